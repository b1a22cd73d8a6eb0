"""Exact MARS in the class: the next batch's gradient, on its way to becoming h."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from marsopt.optim.buckets import ParameterBucket
from marsopt.rules.algorithm import working

STEP, KEEP = "step()", "update_previous_grad()"


class NextReference:
    """A second h for every parameter whose algorithm reads one, written before a step
    and read after it.
    """

    def __init__(self) -> None:
        self._taken = TakenGradients()
        self.forget(fresh=False)

    def forget(self, fresh: bool) -> None:
        """Forget what was kept.

        Args:
            fresh: whether h, as it is now, is of the batch that the next step takes.
        """
        self._rows: dict[Tensor, Tensor] = {}  # by parameter, local pieces
        self._full = False
        self._owed = False  # whether a step was taken that ``hand_over`` has to follow
        self.fresh = fresh

    def check_handed_over(self) -> None:
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

    def keep(
        self, buckets: Sequence[ParameterBucket], factor: Tensor | float | None
    ) -> None:
        """Copy the gradients (never alias them), times ``factor``; zeros where there
        is none.

        Raises:
            RuntimeError: they were added to those of the last step.
        """
        self._taken.check(buckets, KEEP)
        rows, self._full = {}, False  # not before all are there
        for bucket in buckets:
            stack = bucket.state.get("h", ())
            for p, h in zip(bucket.params, stack, strict=False):
                row = self._rows.get(p)
                alike = row is not None and (row.shape, row.dtype) == (h.shape, h.dtype)
                rows[p] = row = row if alike else torch.empty_like(h)
                if p.grad is None:
                    row.zero_()
                else:
                    _put(row, bucket.collectives.local(p.grad), factor)
        self._rows, self._full = rows, True
        self._taken.note(buckets, KEEP)

    def check(self, buckets: Sequence[ParameterBucket]) -> None:
        """Check that a step may take h, and the gradients that are there.

        Raises:
            RuntimeError: the protocol was left out, so that h is stale or zero; or the
                gradients were added to those that were kept.
        """
        if self._owed or not (self._full or self.fresh):
            raise RuntimeError(
                "got step() without a reference gradient, expected the protocol of "
                "exact MARS: update_previous_grad() before step(), update_last_grad() "
                "after it; or pass is_approx=True"
            )
        self._taken.check(buckets, STEP)

    def stepped(self, buckets: Sequence[ParameterBucket]) -> None:
        """Note that a step was taken: h is of its batch, no longer of the next."""
        self.fresh, self._owed = False, self._full
        self._taken.note(buckets, STEP)

    def check_kept(self) -> None:
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

    def hand_over(self, buckets: Sequence[ParameterBucket]) -> None:
        """Make what was kept the reference h; zeros for what has come since."""
        for bucket in buckets:
            for p, h in zip(bucket.params, bucket.state.get("h", ()), strict=False):
                h.copy_(self._rows[p]) if p in self._rows else h.zero_()
        self._full, self._owed, self.fresh = False, False, True


def _put(row: Tensor, g: Tensor, factor: Tensor | float | None) -> None:
    """Write ``g`` times ``factor`` into ``row``, in one pass where they are alike."""
    if factor is None:
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

    def note(self, buckets: Sequence[ParameterBucket], reader: str) -> None:
        """Note that ``reader`` has read the gradients that are there."""
        for bucket in buckets:
            local = bucket.collectives.local
            for p in bucket.params:
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

    def check(self, buckets: Sequence[ParameterBucket], reader: str) -> None:
        """Check that no gradient which ``reader`` is about to read has that in it which
        the other one has read.

        Raises:
            RuntimeError: one has.
        """
        if not self._added:
            return
        for bucket in buckets:
            for p in bucket.params:
                if p.grad is None or p.grad not in self._added:
                    continue
                other, before = self._seen[p.grad]
                if other == reader:
                    continue
                local = bucket.collectives.local
                # written since: clipped or unscaled, unless it was zeroed
                if _num_writes(p.grad, local) == before or bool(local(p.grad).any()):
                    raise RuntimeError(
                        f"got {reader} with gradients that were added to those which "
                        f"{other} had read, expected those of one batch: call "
                        f"optimizer.zero_grad() after {other}, before the next "
                        "backward pass"
                    )


def _num_writes(g: Tensor, local: Callable[[Tensor], Tensor]) -> int:
    """Count by autograd's versions: FSDP2 accumulates into the piece of a DTensor,
    while what is written through the DTensor counts there alone.
    """
    piece = local(g)
    return g._version + (0 if piece is g else piece._version)


def _hook(taken: TakenGradients, local: Callable[[Tensor], Tensor]) -> Callable:
    """Return a hook that does not keep ``taken`` alive, which parameters outlive."""
    found = weakref.ref(taken)

    def accumulated(p: Tensor) -> None:
        taken = found()
        if taken is not None and p.grad is not None:
            taken.accumulated(p.grad, _num_writes(p.grad, local))

    return accumulated
