"""Exact MARS (arXiv 2411.10438, Algorithm 1): two gradients of every batch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from marsopt.rules.buffers import Buffer
from marsopt.rules.checks import Number
from marsopt.rules.correction import Correction, scale
from marsopt.rules.dtypes import working
from marsopt.rules.life import Factor, Held, Life

STEP, KEEP = "step()", "update_previous_grad()"


class NextGradients(Life):
    """The authors' protocol: the *next* batch's gradient at the current parameters is
    kept before a step (``update_previous_grad``), and becomes h, the reference of the
    next step, after it (``update_last_grad``).
    """

    takes_gradients = True

    def __init__(self) -> None:
        self._taken = TakenGradients()
        self._forget(fresh=False)

    def _forget(self, fresh: bool) -> None:
        """Forget what was kept; ``fresh`` says whether h, as it is now, is of the batch
        that the next step takes.
        """
        self._rows: dict[Tensor, Tensor] = {}  # by parameter, local pieces
        self._full = False
        self._owed = False  # whether a step was taken that ``hand_over`` has to follow
        self._fresh = fresh

    @property
    def num_bytes(self) -> int:
        """Return how many are held beside the optimizer's state."""
        return sum(row.nbytes for row in self._rows.values())

    def check_may_keep(self) -> None:
        """Check, before another gradient is kept, that the last one was handed over.

        Raises:
            RuntimeError: it was not, so that h would stay what it is for ever.
        """
        if self._owed:
            raise RuntimeError(
                "got update_previous_grad() after a step whose reference gradient was "
                "not handed over, expected the protocol of exact MARS: call "
                "optimizer.update_last_grad() after every optimizer.step()"
            )

    def keep(self, held: Sequence[Held], factor: Factor) -> None:
        """Copy the gradients (never alias them), times ``factor``; zeros where there
        is none.

        Raises:
            RuntimeError: they were added to those of the last step.
        """
        self._taken.check(held, KEEP)
        rows: dict[Tensor, Tensor] = {}
        self._full = False  # not before all are there
        for one in held:
            if "h" not in one:
                continue
            h, row = one["h"], self._rows.get(one.p)
            if row is None or (row.shape, row.dtype) != (h.shape, h.dtype):
                row = torch.empty_like(h)
            rows[one.p] = row
            put(row, one.grad, factor)
        self._rows, self._full = rows, True
        self._taken.note(held, KEEP)

    def before_step(self, held: Sequence[Held]) -> None:
        """Check that a step may take h, and the gradients that are there.

        Raises:
            RuntimeError: the protocol was left out, so that h is stale or zero; or the
                gradients were added to those that were kept.
        """
        if self._owed or not (self._full or self._fresh):
            raise RuntimeError(
                "got step() without a reference gradient, expected the protocol of "
                "exact MARS: update_previous_grad() before step(), update_last_grad() "
                "after it; or pass is_approx=True"
            )
        self._taken.check(held, STEP)

    def after_step(self, held: Sequence[Held]) -> None:
        """Note that a step was taken: h is of its batch, no longer of the next."""
        self._fresh, self._owed = False, self._full
        self._taken.note(held, STEP)

    def check_may_hand_over(self) -> None:
        """Check that there is something to hand over.

        Raises:
            RuntimeError: nothing was kept since the last time.
        """
        if not self._full:
            raise RuntimeError(
                "got update_last_grad() with nothing kept, expected "
                "update_previous_grad() before the step: compute the next batch's "
                "gradient at the current parameters and call it"
            )

    def hand_over(self, held: Sequence[Held]) -> None:
        """Make what was kept the reference h; zeros for what has come since."""
        for one in held:
            if "h" in one:
                h, row = one["h"], self._rows.get(one.p)
                h.zero_() if row is None else h.copy_(row)
        self._full, self._owed, self._fresh = False, False, True

    def loaded(
        self,
        held: Sequence[Held],
        entries: Mapping[Tensor, Mapping[str, Any]],
        ahead: bool,
    ) -> None:
        self._forget(fresh=True)

    def carried(self) -> bool:
        return self._fresh

    def resumed(self, held: Sequence[Held], carried: Any) -> None:
        self._forget(fresh=carried)


@dataclass(frozen=True, kw_only=True, eq=False)
class Exact(Correction):
    """With h the current batch's gradient at the parameters one step before:

        k = gamma beta1 / (1 - beta1)
        c = g + k (g - h)

    h is given to every step: by the protocol of ``NextGradients``, or as the
    ``reference`` of ``Rule.step``.

    Source: MARS, arXiv 2411.10438, Algorithm 1.

    Raises:
        ValueError: a field out of its range.

    Example:
        >>> rule = marsopt.mars_adamw(correction="exact", clip=None)
        >>> x = {"w": torch.ones(2)}
        >>> g, h = {"w": torch.full((2,), 3.0)}, {"w": torch.ones(2)}
        >>> _, state = rule.step(x, g, rule.init(x), lr=0.1, reference=h)
        >>> state.buffers["m"]["w"]     # 0.05 (g + 0.475 (g - h))
        tensor([0.1975, 0.1975])
    """

    name = "exact"
    operands = ("h",)
    given = ("h",)
    reference = "h"
    keeps = {"h": Buffer("last_grad", dtype="gradient")}
    life = NextGradients

    def coefficients(self, beta1: Number, gamma: Number) -> tuple[Number, ...]:
        k = scale(beta1, gamma)
        return 1 + k, -k


def put(row: Tensor, g: Tensor | None, factor: Factor) -> None:
    """Write ``g`` times ``factor`` into ``row``, in one pass where they are alike;
    zeros where there is none.
    """
    if g is None:
        row.zero_()
    elif factor is None:
        row.copy_(g)
    elif (g.dtype, g.shape) == (row.dtype, row.shape):
        torch.mul(g, factor, out=row)
    else:  # not rounded before it is scaled, and no other shape
        row.copy_(working(g) * factor)


class TakenGradients:
    """Which gradients were read by whom, so that a backward pass is found that adds to
    one of them for want of ``zero_grad()``.

    A hook that autograd and FSDP2 call right after a gradient was accumulated finds the
    very tensor that was read, with one write more. Zeroed in place, it has two; zeroed
    through ``.data``, which counts nowhere, it has one, and is taken wrongly. Not found
    are gradients that others write, sums that are new tensors (``create_graph``), and
    what a CUDA graph replays.
    """

    def __init__(self) -> None:
        self._watched = WeakTensorKeyDictionary()  # parameters that have the hook
        # gradients, which must not be kept alive: who read them, and how often they
        # were written until then, or until the last backward pass that added to them
        self._seen = WeakTensorKeyDictionary()
        self._added = WeakTensorKeyDictionary()  # those of them that were added to

    def note(self, held: Sequence[Held], reader: str) -> None:
        """Note that ``reader`` has read the gradients that are there."""
        for one in held:
            p, local = one.p, one.local
            if p.grad is None:
                continue
            self._seen[p.grad] = reader, _num_writes(p.grad, local)
            self._added.pop(p.grad, None)
            if p not in self._watched and p.requires_grad and p.is_leaf:
                hook = p.register_post_accumulate_grad_hook(_hook(self, local))
                weakref.finalize(self, hook.remove)
                self._watched[p] = True

    def accumulated(self, g: Tensor, num_writes: int) -> None:
        """Note that a backward pass has just accumulated into ``g``."""
        reader, before = self._seen.get(g, (None, None))
        if num_writes - 1 == before:
            self._seen[g], self._added[g] = (reader, num_writes), True
        else:  # fresh, or somebody has written in between: zeros, for all we know
            self._added.pop(g, None)

    def check(self, held: Sequence[Held], reader: str) -> None:
        """Check that no gradient which ``reader`` is about to read has that in it which
        the other one has read.

        Raises:
            RuntimeError: one has.
        """
        if not self._added:
            return
        for one in held:
            p, local = one.p, one.local
            if p.grad is None or p.grad not in self._added:
                continue
            other, before = self._seen[p.grad]
            if other == reader:
                continue
            # written since: clipped or unscaled, unless it was zeroed
            if _num_writes(p.grad, local) == before or bool(
                local(p.grad, p.grad).any()
            ):
                raise RuntimeError(
                    f"got {reader} with gradients that were added to those which "
                    f"{other} had read, expected those of one batch: call "
                    f"optimizer.zero_grad() after {other}, before the next backward "
                    "pass"
                )


def _num_writes(g: Tensor, local: Callable[..., Tensor]) -> int:
    """Count by autograd's versions: FSDP2 accumulates into the piece of a DTensor,
    while what is written through the DTensor counts there alone.
    """
    piece = local(g, g)  # as it lies
    return g._version + (0 if piece is g else piece._version)


def _hook(
    taken: TakenGradients, local: Callable[..., Tensor]
) -> Callable[[Tensor], None]:
    """Return a hook that does not keep ``taken`` alive, which parameters outlive."""
    found = weakref.ref(taken)

    def accumulated(p: Tensor) -> None:
        taken = found()
        if taken is not None and p.grad is not None:
            taken.accumulated(p.grad, _num_writes(p.grad, local))

    return accumulated
