"""The life of a correction in an optimizer: what it does before and after a step, in
and out of evaluation, when gradients are handed to it, when state is loaded or moved.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor

from marsopt.rules.buffers import LOOKAHEAD
from marsopt.rules.preconditioner import Preconditioner

Factor = Tensor | float | None  # what a gradient is multiplied by; None = nothing


class Held:
    """One parameter, as its optimizer holds it.

    Args:
        p: the parameter, which may be a DTensor.
        local: returns the piece of a tensor that lies on this rank; of a gradient, in
            the layout of its parameter.
        state: ``optimizer.state``.
        keys: of its correction's buffers there, by symbol; empty where its algorithm
            has no correction, or needs no buffer of one.
        leads_back: what can compute x from the point ahead of it.
    """

    __slots__ = ("p", "local", "_state", "_keys", "_leads_back")

    def __init__(
        self,
        p: Tensor,
        local: Callable[..., Tensor],
        state: MutableMapping[Tensor, dict[str, Any]],
        keys: Mapping[str, str],
        leads_back: Preconditioner | None = None,
    ) -> None:
        self.p, self.local, self._state, self._keys = p, local, state, keys
        self._leads_back = leads_back

    @property
    def piece(self) -> Tensor:
        """Return the parameter's piece."""
        return self.local(self.p)

    @property
    def grad(self) -> Tensor | None:
        """Return the gradient's piece, or None."""
        return None if self.p.grad is None else self.local(self.p.grad, self.p)

    @property
    def has_stepped(self) -> bool:
        """Return whether it has taken a step. Costs a sync."""
        return bool(self._state[self.p]["step"])

    @property
    def entry(self) -> dict[str, Any]:
        """Return what ``optimizer.state`` holds for it."""
        return self._state.get(self.p, {})

    def __contains__(self, symbol: str) -> bool:
        return self._keys.get(symbol) in self.entry

    def __getitem__(self, symbol: str) -> Tensor:
        """Return this rank's piece of a buffer."""
        return self.local(self.kept(symbol))

    def kept(self, symbol: str) -> Tensor:
        """Return a buffer as ``optimizer.state`` holds it."""
        return self._state[self.p][self._keys[symbol]]

    def found(self, symbol: str, entry: Mapping[str, Any]) -> Any:
        """Return a buffer of another state's ``entry``, or None."""
        return entry.get(self._keys[symbol])

    # ---- a point ahead ---------------------------------------------------------------

    @property
    def can_lead_back(self) -> bool:
        """Return whether ``behind`` and ``ahead`` are known."""
        return self._leads_back is not None

    @property
    def numbers(self) -> Tensor | None:
        """Return those of the last step, from which x follows; None where the state
        keeps x, or the parameter is x.
        """
        return self.entry.get(LOOKAHEAD)

    def behind(self, numbers: Tensor) -> Tensor:
        """Return this rank's piece of x, where the parameter is the point ahead."""
        return self._leads_back.behind(self.piece, *self._known(numbers))

    def ahead(self, numbers: Tensor) -> Tensor:
        """Return this rank's piece of the point ahead, where the parameter is x."""
        return self._leads_back.ahead(self.piece, *self._known(numbers))

    def _known(self, numbers: Tensor) -> tuple[dict[str, Tensor], Sequence[Tensor]]:
        buffers = self._leads_back.buffers.items()
        moments = {symbol: self.local(self.entry[b.key]) for symbol, b in buffers}
        return moments, numbers.to(self.p.dtype).unbind()


class Life:
    """A correction that needs nothing but its step. One instance lives in each
    optimizer; every method gets all parameters that it moves.

    Three protocols may be asked of the caller: ``takes_gradients``, gradients handed
    over by ``update_previous_grad`` and ``update_last_grad``; ``exchanges``, parameters
    that hold one point while gradients are taken and another one in evaluation, by
    ``train`` and ``eval``; and ``has_anchor``, a snapshot and its full gradient, by
    ``update_anchor`` and ``at_snapshot``. A life that has one sets the flag and writes
    the methods.
    """

    takes_gradients = False
    exchanges = False
    has_anchor = False

    # ---- a step ----------------------------------------------------------------------

    def before_step(self, held: Sequence[Held]) -> None:
        """Check, before anything is read, that the step may be taken; take over what
        others have written.
        """

    def after_step(self, held: Sequence[Held]) -> None:
        """Note that a step was taken."""

    # ---- gradients that are handed over ----------------------------------------------

    def check_may_keep(self) -> None:
        """Check that another gradient may be kept.

        Raises:
            RuntimeError: the protocol was left out.
        """

    def keep(self, held: Sequence[Held], factor: Factor) -> None:
        """Keep the gradients that are there, times ``factor``."""

    def check_may_hand_over(self) -> None:
        """Check that there is something to hand over.

        Raises:
            RuntimeError: there is nothing.
        """

    def hand_over(self, held: Sequence[Held]) -> None:
        """Make what was kept the operand of the next step."""

    def anchor(self, held: Sequence[Held], factor: Factor) -> None:
        """Let the snapshot be the parameters, and its full gradient those that are
        there, times ``factor``.
        """

    # ---- evaluation ------------------------------------------------------------------

    @property
    def is_away(self) -> bool:
        """Return whether parameters may hold something else than the iterate."""
        return False

    def exchange(self, held: Sequence[Held], ahead: bool) -> None:
        """Let parameters hold the one or the other point.

        Args:
            held: all parameters.
            ahead: whether to hold the one where gradients are taken.
        """

    def iterate(self, held: Held) -> Tensor | None:
        """Return what is trained, in train mode, like the parameter (a DTensor of one);
        None where it is the parameter itself.
        """
        return None

    @property
    def num_bytes(self) -> int:
        """Return how many are held beside the optimizer's state."""
        return 0

    def check_may_save(self) -> None:
        """Check that parameters and state are what a checkpoint is to hold.

        Raises:
            RuntimeError: they are exchanged for the time being.
        """

    # ---- state that is saved, loaded, copied, moved ----------------------------------

    def settle(self, held: Sequence[Held]) -> None:
        """Take over what others have written into parameters, before state is handed
        out or parameters move.
        """

    def complete(self, held: Sequence[Held]) -> None:
        """Before state is handed out: finish a load, now that parameters are there."""

    def before_rebuild(self) -> Any:
        """Return what ``after_rebuild`` is to be told: parameters may move."""
        return None

    def after_rebuild(self, held: Sequence[Held], before: Any) -> None:
        """Note where parameters are now, by our own doing."""

    def forget(self, state: Container[Tensor]) -> None:
        """Let go of parameters that ``state`` has no entry of."""

    def loaded(
        self,
        held: Sequence[Held],
        entries: Mapping[Tensor, Mapping[str, Any]],
        ahead: bool,
    ) -> None:
        """Note that state was loaded.

        Args:
            held: all parameters.
            entries: what was there, by parameter.
            ahead: as in ``exchange``, of the parameters that belong to it.
        """

    def carried(self) -> Any:
        """Return what a copy or pickle has to know."""
        return None

    def resumed(self, held: Sequence[Held], carried: Any) -> None:
        """Go on in a copy, or from a pickle."""
