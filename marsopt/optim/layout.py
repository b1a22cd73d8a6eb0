"""The buckets of all groups, and this step's stacks over them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import reduce
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from marsopt.functional.binding import entries_at_owner
from marsopt.functional.collectives import (
    LOCAL,
    Collectives,
    Owned,
    OwnerBuffer,
)
from marsopt.functional.stacks import repeated
from marsopt.functional.step_types import Decision, RuleGroup
from marsopt.optim import buckets
from marsopt.optim.buckets import (
    BucketGroup,
    MovingGroup,
    ParameterBucket,
    empty_rows,
)
from marsopt.optim.device_values import DeviceHyperparameters
from marsopt.optim.groups import labels, moves, structure
from marsopt.optim.portions import portions
from marsopt.optim.state_dict import STAGE_COUNT, State
from marsopt.rules import checks
from marsopt.rules.dtypes import working
from marsopt.step import kernels

PATTERNS = 64  # of missing gradients that are kept: a mixture of experts has no end

FORM = attrgetter("shape", "dtype")


class Copies:
    """Small tensors that a step copies: one call for all of two dtypes."""

    def __init__(self) -> None:
        self._by_dtypes: dict[Hashable, tuple[list[Tensor], list[Tensor]]] = {}

    def add(self, to: Sequence[Tensor], source: Sequence[Tensor]) -> None:
        """Note down tensors of one dtype, and the source of each, of one dtype too."""
        key = to[0].dtype, source[0].dtype
        lists = self._by_dtypes.setdefault(key, ([], []))
        lists[0].extend(to)
        lists[1].extend(source)

    def run(self) -> None:
        """Copy all that was noted down."""
        for lists in self._by_dtypes.values():
            torch._foreach_copy_(*lists)


class Layout:
    """Made from groups and state, and made again when ``fits`` says so. It writes
    nothing before ``bind``.

    Args:
        groups: the optimizer's param groups.
        state: the optimizer's state.
        options: the constructor's options.
        hyper: by the id of a group, its hyperparameters on the device, as layouts
            before this one have made them; missing ones are added.
        device: of the parameters that move; None where none does.
        before: the layout that this one replaces.

    Raises:
        ValueError: state of other parameters than these.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        state: State,
        options: Mapping[str, Any],
        hyper: dict[int, DeviceHyperparameters],
        device: torch.device | None,
        before: Layout | None = None,
    ) -> None:
        self.param_groups, self.options = list(groups), options
        self._state, self._before = state, before
        self._every = [p for group in groups for p in group["params"]]
        self._hyper: list[tuple[dict[str, Any], DeviceHyperparameters]] = []
        moving_groups: list[MovingGroup] = []
        for group in filter(itemgetter("params"), groups):
            present = hyper.get(id(group))
            if present is None or not present.fits(group, device):
                present = hyper[id(group)] = DeviceHyperparameters(
                    group, options, device
                )
            self._hyper.append((group, present))
            moving = buckets.moving_group(group, present, state)
            moving_groups += [moving] if moving.params else []
        self.collectives: Collectives = options["collectives"]
        # whether kernels move parameters where they lie
        self.is_printed = options["compile"] is not False and kernels.available(
            device or torch.device("cpu")
        )
        names = dict(labels(groups))
        for moving in moving_groups:
            for p in moving.params:
                buckets.check_state(
                    p, names[p], moving.algorithm, state, self.collectives
                )
        self._together = [
            (
                together,
                *buckets.build(together, names, self.collectives, self.is_printed),
            )
            for together in buckets.by_formula(moving_groups)
        ]
        self.buckets = [b for *_, several in self._together for b in several]
        self.members = [bucket.members for bucket in self.buckets]
        self.params = [p for bucket in self.buckets for p in bucket.params]
        self._kept = [bucket.kept for bucket in self.buckets for _ in bucket.params]
        with_bucket = set(self.params)
        self._idle = [p for p in self._every if p not in with_bucket]
        self.groups: list[BucketGroup] = []
        self._results = Copies()  # of this step, out of stacks
        self._is_stale = False  # whether a gather was broken off
        self._live: dict[tuple[bool, ...], Tensor] = {}

    @torch.no_grad()
    def bind(self) -> None:
        """Give every bucket its state; allocate missing buffers."""
        state, before = self._state, self._before
        self._before = None
        for bucket in self.buckets:
            buckets.attach(bucket, state)
        ways: dict[Hashable, list[ParameterBucket]] = {}
        for bucket in self.buckets:
            algorithm = bucket.algorithm
            if algorithm.owned:
                cost = algorithm.matrix_preconditioner.cost
                ways.setdefault(cost, []).append(bucket)
        if ways and before is not None:
            before.publish_owned(state)
        for together in ways.values():
            parts = None if before is None else before.parts_at_owners
            buckets.attach_owned(together, state, parts)
        self.groups = [  # last, for it holds the counts of all that has restarted
            buckets.join(moving_groups, moving, several, state)
            for moving_groups, moving, several in self._together
        ]
        for group in self.groups:
            # there from the start, to be loaded into
            if group.hyper.algorithm.has_stages:
                for param_group in group.groups:
                    param_group.setdefault(STAGE_COUNT, 0)
        _drop_unstepped(state, self._every)
        self._signature = self._sign(self.param_groups)

    def owned_entries(self) -> list[tuple[Tensor, str, Owned, tuple[int, ...]]]:
        """Return (parameter, key in its state, what of its matrices has its owner here,
        entries of each of its matrices) of all buffers whose home is with owners.
        """
        return [
            (p, buffer.key, owns, sizes)
            for bucket in self.buckets
            for symbol in bucket.algorithm.owned
            for buffer in [bucket.algorithm.buffers[symbol]]
            for sizes in [entries_at_owner(bucket.algorithm, buffer, bucket.shape)]
            for p, owns in zip(bucket.params, bucket.owns, strict=False)
        ]

    @property
    def parts_at_owners(self) -> dict[Tensor, tuple[int, ...]]:
        """Return the rows of the parts of parameters whose matrices' owners keep
        buffers.
        """
        return {
            p: bucket.algorithm.matrices.part_rows(bucket.shape)
            for bucket in self.buckets
            if bucket.algorithm.owned
            for p in bucket.params
        }

    def publish_owned(self, state: State) -> None:
        """Replace all buffers at owners in ``state`` by all ranks' buffers, before the
        owners change. A collective.
        """
        present = [e for e in self.owned_entries() if e[1] in state.get(e[0], ())]
        buffers = [
            OwnerBuffer(state[p][key], p, sizes, owns)
            for p, key, owns, sizes in present
        ]
        published = self.collectives.publish_all(buffers)
        for (p, key, *_), whole in zip(present, [*published], strict=True):
            state[p][key] = whole

    # ---- whether it still holds ------------------------------------------------------

    def covers(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Return whether the groups hold the parameters that this was made for."""
        params = [p for group in groups for p in group["params"]]
        return len(params) == len(self._every) and all(map(is_, params, self._every))

    def fits(self, groups: Sequence[dict[str, Any]], state: State) -> bool:
        """Return whether groups, parameters and state are still those, and in the
        memory, that this was made for.

        Raises:
            ValueError: a sparse gradient.
        """
        self._check_gradients()
        try:
            return state is self._state and self._sign(groups) == self._signature
        except (KeyError, TypeError):  # state was deleted, or is no tensor any more
            return False

    def changes(self, groups: Sequence[dict[str, Any]]) -> str:
        """Return what of the groups, or beside them, is not as this was made for."""
        keys = [
            f"{key}={group.get(key)!r} in group {i}"
            for i, (group, before) in enumerate(
                zip(groups, self._signature[2], strict=False)
            )
            for key, value in structure(group, self.options).items()
            if value != before.get(key)
        ]
        return ", ".join(keys) or "other groups, parameters or state"

    def _sign(self, groups: Sequence[dict[str, Any]]) -> tuple[list[Any], ...]:
        """Return all that a layout depends on: which groups hold which parameters, by
        which formulas they move, which tensors the state holds of them, and where all
        of these lie.
        """
        params = [p for group in groups for p in group["params"]]
        entries = map(self._state.__getitem__, self.params)
        held = [x for kept, e in zip(self._kept, entries, strict=True) for x in kept(e)]
        tensors = [*self.params, *held]
        fake = bool(self.params) and is_fake(self.params[0])  # it has no address
        if self.collectives is not LOCAL:
            tensors = list(map(self.collectives.local, tensors))
        return (
            [*map(id, groups), *map(id, params)],
            [len(group["params"]) for group in groups],
            [structure(group, self.options) for group in groups],
            [moves(p, self._state) for p in self._idle],
            list(map(id, held)),
            # tensor.data = ... moves it
            list(map(id if fake else Tensor.data_ptr, tensors)),
            list(map(FORM, tensors[: len(self.params)])),
            list(map(Tensor.stride, tensors[: len(self.params)])),
        )

    def _check_gradients(self) -> None:
        grads = [p.grad for p in self.params]
        if {g.layout for g in grads if g is not None} <= {torch.strided}:
            return
        for p, what in labels(self.param_groups):
            if p.grad is not None and p.grad.layout != torch.strided:
                raise ValueError(
                    f"got a gradient of layout {p.grad.layout} for {what}, expected "
                    "torch.strided: make it dense (nn.Embedding(sparse=False))"
                )

    # ---- a step ----------------------------------------------------------------------

    @property
    def batches(self) -> list[Hashable]:
        """Return ``ParameterBucket.batch`` of every bucket."""
        return [bucket.batch for bucket in self.buckets]

    def portions(self, compile: bool) -> list[list[list[int]]]:
        """Return how a step over the buckets is cut (``portions.portions``)."""
        return portions(
            [bucket.kind() for bucket in self.buckets],
            self.batches,
            compile,
            self.collectives is LOCAL,
        )

    @property
    def places(self) -> list[tuple[int, int]]:
        """Return of every bucket the number of its group, and of its first part in
        it.
        """
        places = []
        for number, group in enumerate(self.groups):
            first = 0
            for bucket in group.buckets:
                places.append((number, first))
                first += len(bucket.params) * bucket.num_clipped
        return places

    def gather(self) -> tuple[Sequence[RuleGroup], list[Tensor], Tensor]:
        """Return the arguments of the one step, with the groups' present
        hyperparameters; the gradient of each stack; and which of its N parts have a
        gradient (N,), bool.

        Small tensors that share a stack are copied into it. A parameter without a
        gradient gets zeros, so that the graph stays the same.

        Raises:
            ValueError: a hyperparameter out of its range.
            RuntimeError: a CUDA graph captures it, and it has to send something that is
                on the host.
        """
        # a value that is refused leaves groups before it refreshed, but not joined
        is_changed, self._is_stale = self._is_stale, True
        for param_group, values in self._hyper:
            is_changed = values.refresh(param_group) or is_changed
        copies, self._results = Copies(), Copies()
        param_grads = [p.grad for p in self.params]
        rest, grads = iter(param_grads), []
        for group in self.groups:
            group.stacks = [b.stack or b.make_stack() for b in group.buckets]
            for bucket in group.buckets:
                for copied, tensors in bucket.copied:
                    copies.add(copied, tensors)
                    self._results.add(tensors, copied)
                of_bucket = [next(rest) for _ in bucket.params]
                grads.append(self._gradient(bucket, of_bucket, copies))
            if is_changed:
                group.refresh()
            lr, unread = group.hyper.lr, None
            rates = [g["lr"] for g in group.groups]
            if any(isinstance(r, Tensor) and not checks.can_read(r) for r in rates):
                assert isinstance(lr, Tensor)  # as the class has it
                unread = lr
            group.hyper = group.hyper._replace(unread_lr=unread)
            group.num_steps = group.groups[0].get(STAGE_COUNT, 0)
        self._is_stale = False
        copies.run()
        live = self._live_of(tuple([g is not None for g in param_grads]))
        return self.groups, grads, live

    def _gradient(
        self, bucket: ParameterBucket, grads: Sequence[Tensor | None], copies: Copies
    ) -> Tensor:
        """Return the gradient of a bucket's stack. Gradients of several parameters are
        noted down to be copied into it.
        """
        local, pieces = bucket.collectives.local, bucket.pieces
        is_single = not bucket.is_copied and len(bucket.shape) > 0
        if is_single and (g := grads[0]) is not None:
            return local(g, bucket.params[0])
        pairs = zip(grads, bucket.params, strict=True)
        local_grads = [None if g is None else local(g, p) for g, p in pairs]
        dtypes = [g.dtype for g in local_grads if g is not None] or [pieces[0].dtype]
        dtype = reduce(torch.promote_types, dtypes)
        if bucket.gradients is None or bucket.gradients[0].dtype != dtype:
            bucket.gradients = empty_rows(pieces, dtype)
        stack, rows = bucket.gradients
        zero = torch.zeros((), dtype=dtype, device=stack.device)
        filled = [
            zero.expand_as(x) if g is None else g
            for x, g in zip(pieces, local_grads, strict=True)
        ]
        copies.add(rows, filled)
        return rows[0] if is_single else stack

    def _live_of(self, pattern: tuple[bool, ...]) -> Tensor:
        """Return a bool tensor (N,) on the device, of a pattern by parameter. It is
        sent there when it is first seen, and kept: later steps with it copy nothing, so
        that a CUDA graph may capture them.

        Raises:
            RuntimeError: a CUDA graph captures the step, and no step before it had this
                pattern.
        """
        mask = self._live.get(pattern)
        if mask is not None:
            return mask
        device = self.params[0].device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "got a step to capture in which other parameters have no gradient "
                f"({len(pattern) - sum(pattern)} of {len(pattern)}) than in earlier "
                "steps, expected the same ones: take such a step before the capture"
            )
        has, live = iter(pattern), list[bool]()
        for bucket in self.buckets:
            live += repeated([next(has) for _ in bucket.params], bucket.num_clipped)
        mask = torch.tensor(live).to(device, non_blocking=True)
        if len(self._live) < PATTERNS:  # a tensor that a graph has captured stays
            self._live[pattern] = mask
        return mask

    def scatter(self) -> None:
        """Copy small parameters and their state out of stacks.

        Stacks on a GPU go back to the caching allocator: a CUDA graph has captured
        tensors of its own pool.
        """
        self._results.run()
        self._results = Copies()
        for group in self.groups:
            group.stacks = []
        if self.params[0].device.type != "cpu":
            for bucket in self.buckets:
                bucket.free()

    def count(self, decision: Decision, skipped: Tensor) -> None:
        """Count the step that was taken, or skipped, after everything is written: where
        that fails, it was not taken.
        """
        torch._foreach_copy_([group.hyper.t for group in self.groups], decision.t)
        skipped += decision.finite.logical_not()
        for group in self.groups:
            if group.hyper.algorithm.has_stages:
                # later steps build on the first step's bases: it is taken until one is
                # finite. A step that waits for eigenvectors may wait for that, too
                count: int = group.groups[0][STAGE_COUNT]
                waits = not count and not is_fake(decision.finite)
                count += int(decision.finite) if waits else 1
                for param_group in group.groups:
                    param_group[STAGE_COUNT] = count

    # ---- gradients -------------------------------------------------------------------

    def present_norm(self) -> Tensor:
        """Return the global norm of the present gradients, 0-D, which are of the next
        batch: no step measures them.
        """
        squares = [
            torch.zeros((), device=p.device)
            if p.grad is None
            else torch.linalg.vector_norm(
                working(self.collectives.local(p.grad, p))
            ).square()
            for p in self.params
        ]
        partial = torch.stack(squares)[:, None]
        return self.collectives.sum(partial, self.params).sum().sqrt()

    def references(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield every parameter that has a reference gradient h, and this rank's piece
        of h.
        """
        for bucket in self.buckets:
            if "h" in bucket.state:
                yield from zip(bucket.params, bucket.state["h"], strict=True)

    def describe_nonfinite(self, sums: Tensor) -> str:
        """Say whose gradient is not finite, from the complete sums of the step."""
        bad = torch.isfinite(sums).all(1).logical_not().nonzero().flatten().tolist()
        everyone = [name for bucket in self.buckets for name in bucket.labels]
        parts = [b.num_clipped for b in self.buckets for _ in b.labels]
        owners = [i for i, num in enumerate(parts) for _ in range(num)]
        blamed = list(dict.fromkeys(owners[row] for row in bad))
        if not blamed:
            return (
                "got a learning rate in a tensor that is not finite, expected a number "
                ">= 0: nothing has changed; look at what sets it"
            )
        named = ", ".join(everyone[i] for i in blamed[:3])
        more = ", ..." if len(blamed) > 3 else ""
        return (
            "got a gradient that is not finite, or whose square overflows, in "
            f"{len(blamed)} of {len(everyone)} parameters ({named}{more}), expected "
            "numbers: nothing has changed; lower the learning rate, or pass "
            "nonfinite='skip' to go on"
        )


def _drop_unstepped(state: State, present: Sequence[Tensor]) -> None:
    """Drop state of parameters that left their groups before a step (float32 masters
    took their place): torch.optim has none of these, since it makes state in a step.
    """
    left = [p for p in state.keys() - set(present) if isinstance(p, Tensor)]
    for p in left:
        if not float(state[p].get("step", 1.0)):
            del state[p]
