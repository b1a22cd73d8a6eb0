"""The protocol of a correction: its work beside a step. It handles methods of ``MARS``,
and is called before and after a step, before parameters are saved or their state begins
again, and after a load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, ClassVar, Protocol

from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from marsopt.rules.algorithm import Algorithm
from marsopt.rules.buffers import LOOKAHEAD

Factor = Tensor | float | None  # of a gradient; None = 1


class ParameterHandle:
    """One parameter, as protocols read and write it.

    Args:
        p: the parameter, which may be a DTensor.
        local: returns this rank's piece of a tensor; of a gradient, in the layout of
            its parameter.
        wrap: returns a piece, given the parameter, as ``optimizer.state`` holds it.
        state: ``optimizer.state``.
        algorithm: what moves the parameter.
    """

    __slots__ = ("p", "local", "algorithm", "_wrap", "_state", "_keys")

    def __init__(
        self,
        p: Tensor,
        local: Callable[..., Tensor],
        wrap: Callable[[Tensor, Tensor], Tensor],
        state: MutableMapping[Tensor, dict[str, Any]],
        algorithm: Algorithm,
    ) -> None:
        self.p, self.local, self.algorithm = p, local, algorithm
        self._wrap, self._state = wrap, state
        self._keys = algorithm.correction_keys

    @property
    def piece(self) -> Tensor:
        """Return this rank's piece of the parameter."""
        return self.local(self.p)

    def wrapped(self, piece: Tensor) -> Tensor:
        """Return a piece of the parameter as ``optimizer.state`` holds one."""
        return self._wrap(piece, self.p)

    @property
    def grad(self) -> Tensor | None:
        """Return this rank's piece of the gradient, or None."""
        return None if self.p.grad is None else self.local(self.p.grad, self.p)

    @property
    def has_stepped(self) -> bool:
        """Return whether the parameter has taken a step. Costs a sync."""
        step = self._state[self.p]["step"]
        return is_fake(step) or bool(step)

    @property
    def entry(self) -> dict[str, Any]:
        """Return what ``optimizer.state`` holds for the parameter."""
        return self._state.get(self.p, {})

    # ---- buffers of the correction ---------------------------------------------------

    def __contains__(self, symbol: str) -> bool:
        return self._keys.get(symbol) in self.entry

    def __getitem__(self, symbol: str) -> Tensor:
        """Return this rank's piece of a buffer."""
        return self.local(self.whole(symbol))

    def whole(self, symbol: str) -> Tensor:
        """Return a buffer as ``optimizer.state`` holds it."""
        tensor: Tensor = self._state[self.p][self._keys[symbol]]
        return tensor

    # ---- a point ahead of x ----------------------------------------------------------

    @property
    def numbers(self) -> Tensor | None:
        """Return the numbers of the last step, from which x follows; None where the
        state keeps x, or the parameter is x.
        """
        return self.entry.get(LOOKAHEAD)

    @property
    def iterate_key(self) -> str:
        """Return where ``optimizer.state[p]`` has x, or the numbers."""
        return LOOKAHEAD if self.algorithm.num_lookahead_scalars else self._keys["x"]

    def recover_x(self, y: Tensor) -> Tensor:
        """Return this rank's piece of x from its piece of the point ahead."""
        return self.algorithm.preconditioner.behind(y, *self._last_step())

    def recover_ahead(self) -> Tensor:
        """Return this rank's piece of the point ahead, where the parameter is x."""
        return self.algorithm.preconditioner.ahead(self.piece, *self._last_step())

    def _last_step(self) -> tuple[dict[str, Tensor], Sequence[Tensor]]:
        """Return the moments and the numbers that the last step left."""
        keys = {s: b.key for s, b in self.algorithm.preconditioner.buffers.items()}
        symbols, dtype = self.algorithm.moments, self.p.dtype
        moments = {s: self.local(self.entry[keys[s]]).to(dtype) for s in symbols}
        return moments, self.entry[LOOKAHEAD].to(dtype).unbind()


Handles = Sequence[ParameterHandle]
Entries = Mapping[Tensor, Mapping[str, Any]]  # as in ``optimizer.state``


class Host(Protocol):
    """The optimizer that a protocol serves, as far as protocols use it."""

    param_groups: list[dict[str, Any]]

    def parameter_handles(self, *, agree: bool = True) -> list[ParameterHandle]:
        """Return all parameters that move; ``agree``: all ranks call it."""

    def gradient_factor(self, grad_scale: float | Tensor | None) -> Factor:
        """Return what to multiply the present gradients by: one over ``grad_scale``,
        and a global clip of their own.
        """

    def notify_written(self) -> None:
        """Broadcast the pieces of parameters that this rank has written, and drop
        gathered copies of parameters, which are stale now.
        """


class CorrectionProtocol:
    """The protocol of a correction without work beside its step. Each optimizer has one
    instance. A subclass says which methods of ``MARS`` it handles, and overrides the
    hooks that it needs; every method gets the handles of all parameters that move.
    """

    # the methods of MARS that it handles, by methods of the same names, given the
    # optimizer and the arguments of MARS's method; other methods do nothing
    handled_calls: ClassVar[frozenset[str]] = frozenset()
    # buffers of which it holds a second copy between two calls, by symbol
    copied: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        # what of the caller's protocol was done; copies and pickles have it too
        self.progress: Any = None

    @property
    def num_bytes(self) -> int:
        """Return how many are held beside ``optimizer.state``."""
        return 0

    def before_step(self, optimizer: Host, handles: Handles) -> None:
        """Check that the step may be taken, before anything is read."""

    def after_step(self, optimizer: Host, handles: Handles) -> None:
        """Note that a step was taken."""

    def check_may_save(self, optimizer: Host) -> None:
        """Check that parameters and state are fit for a checkpoint or a copy.

        Raises:
            RuntimeError: parameters hold something else for the time being.
        """

    def check_may_restart(self) -> None:
        """Check that parameters are what ``restart`` expects.

        Raises:
            RuntimeError: they hold something else for the time being.
        """

    def restart(self, optimizer: Host, handles: Handles) -> None:
        """Put the trained weights into parameters: then their state begins again."""

    def load(self, handles: Handles, entries: Entries) -> None:
        """Go on from state that was loaded, or copied.

        Args:
            handles: all parameters, with their state as it is now.
            entries: the source's state, by parameter.
        """
