"""The binding of an optimizer: the one place that knows memory. It holds parameters,
gradients and state as the groups of a step, and says when they have changed.
"""

from __future__ import annotations

import math
from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, compress
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from marsopt.functional.buffers import (
    buffer_shape,
    entries_at_owner,
    owned_leaves,
    start_at_owner,
    start_beside,
)
from marsopt.optim.groups import check_group, kinds_of, labels, takes_part
from marsopt.optim.loading import as_tensor
from marsopt.optim.numbers import Row, Table
from marsopt.optim.state_dict import STAGE_COUNT, State, in_form_of
from marsopt.rules.component import Algorithm, Buffer, MatrixCost, owned_shapes
from marsopt.rules.formats import CODED, check_piece
from marsopt.rules.numerics import working, working_dtype
from marsopt.rules.registry import STATE_KEYS
from marsopt.step import kernels
from marsopt.step.decide import Decision, Inputs, num_columns
from marsopt.step.leaf import (
    SMALL,
    Leaf,
    Pack,
    common_dtype,
    index_of,
    leaf_of,
    memory_of,
)
from marsopt.step.leaf import is_dense as is_memory
from marsopt.step.owners import LOCAL, Collectives, OwnerBuffer, Tensors
from marsopt.step.step import Gradients, Group, MatrixLeaves, exchanges_of

PATTERNS = 64  # of missing gradients that are kept: a mixture of experts has no end

# of many tensors each is read by ``map``: a loop of Python takes three times as long
GRAD, LAYOUT, SHAPE = map(attrgetter, ("grad", "layout", "shape"))
DTYPE, PARAMS = attrgetter("dtype"), itemgetter("params")


@dataclass(eq=False)
class Member:
    """A parameter that is updated, and its state."""

    p: Tensor  # as the user holds it: a DTensor, too
    label: str
    row: Row  # its numbers
    algorithm: Algorithm  # of its formula
    piece: Tensor  # the elements that lie here
    state: dict[str, Tensor] = field(default_factory=dict)  # pieces, by symbol
    owned: Tensors = ()  # buffers that the owners of its matrices keep here
    owns: tuple[int, ...] | None = None  # which matrices these are of


class BoundFormula(Group):
    """The parameters of one formula.

    Args:
        inputs, leaves: as ``Group`` has them.
        first: the number of its first parameter among all formulas'.
        members: its parameters, in the order of the leaves.
        table: the numbers of their param groups.
        packs: of each leaf, the tensors that a step copies into it, if there are.
        counts: views of the counts of steps, and the tensors of ``optimizer.state``
            from and to which a step copies them; none if these are the views.
    """

    def __init__(
        self,
        inputs: Inputs,
        leaves: Sequence[Leaf],
        first: int,
        members: Sequence[Member],
        table: Table,
        packs: Sequence[Pack | None],
        counts: tuple[list[Tensor], list[Tensor]],
    ) -> None:
        super().__init__(inputs, leaves)
        self.first, self.members, self.table = first, members, table
        self.packs, self.counts = packs, counts
        self.params = [member.p for member in members]
        self.in_order = not any(packs) and all(leaf.strides == () for leaf in leaves)
        rest = iter(members)
        of_leaves = [[next(rest) for _ in leaf.params] for leaf in leaves]
        pairs = zip(packs, of_leaves, strict=True)
        self.copied = {m for pack, each in pairs if pack for m in each}
        # the tensors of each leaf that a step writes in place: packs copy theirs
        self.written = [
            [] if pack else [m.piece, *m.state.values()]
            for pack, m in zip(packs, members, strict=False)
        ]


class Binding:
    """Made from groups and state, and made again if ``is_current`` is false. It writes
    nothing before ``bind``.

    Args:
        groups: the optimizer's param groups.
        state: the optimizer's state.
        options: the constructor's options.
        device: of the parameters that are updated; None if there are none.
        before: the binding that this one replaces.

    Raises:
        ValueError: state of other parameters than these, or a hyperparameter out of its
            range.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        state: State,
        options: Mapping[str, Any],
        device: torch.device | None,
        before: Binding | None = None,
    ) -> None:
        self.param_groups, self.options = list(groups), options
        self._state, self._before = state, before
        self._every = [p for group in groups for p in group["params"]]
        self.collectives: Collectives = options["collectives"]
        # whether kernels update parameters in their own memory
        self.is_printed = options["compile"] is not False and kernels.available(
            device or torch.device("cpu")
        )
        names = dict(labels(groups))
        self._rows: list[Row] = []
        by_formula: dict[Hashable, list[Member]] = {}
        for group in groups:
            check_group(group, options)
            rows: dict[bool, Row] = {}
            for p, kind in zip(group["params"], kinds_of(group), strict=True):
                if not takes_part(p, state):
                    continue
                if kind not in rows:
                    rows[kind] = Row(group, kind, options)
                row = rows[kind]
                algorithm = row.algorithm.of_tensor(p, p.shape)
                check_state(p, names[p], algorithm, state, self.collectives)
                # detached tensors count writes together with their parameters
                piece = self.collectives.local(p).detach()
                if algorithm.state_dtype == CODED:
                    check_piece(piece, names[p])
                members = by_formula.setdefault((algorithm, p.dtype), [])
                formula = members[0].algorithm if members else algorithm
                members.append(Member(p, names[p], row, formula, piece))
            self._rows += rows.values()
        self._formulas = list(by_formula.values())
        self.members = [member for members in self._formulas for member in members]
        self.params = [member.p for member in self.members]
        self._kept = [_keys_of(members[0].algorithm) for members in self._formulas]
        with_member = set(self.params)
        self._idle = [p for p in self._every if p not in with_member]
        self.groups: list[BoundFormula] = []
        self.exchanges: list[list[MatrixLeaves]] = []
        self._entries: list[list[Any]] = []  # of the state, by formula
        self._in_state: tuple[list[Any], list[Any]] = [], []  # keys, and entries
        self._is_stale = False  # whether a gather was broken off
        self._grad_masks: dict[tuple[bool, ...], Tensor] = {}

    @torch.no_grad()
    def bind(self) -> None:
        """Give every parameter its state; allocate missing buffers."""
        state, before = self._state, self._before
        self._before = None
        for member in self.members:
            _attach(member, state, self.collectives)
        kinds: dict[MatrixCost, list[Member]] = {}
        for member in self.members:
            if member.algorithm.owned:
                cost = member.algorithm.matrix_preconditioner.cost
                kinds.setdefault(cost, []).append(member)
        if kinds and before is not None:
            before.publish_owned(state)
        for together in kinds.values():
            parts = None if before is None else before.parts_at_owners
            _attach_owned(together, state, parts, self.collectives)
        # last, for it holds the counts of all that has restarted
        self.groups = []
        for members in self._formulas:
            self.groups.append(self._group(members))
        self._counts = [group.inputs.t for group in self.groups]
        is_local = self.collectives is LOCAL
        is_batch = bool(self.params) and takes_batches(self.params[0].device, is_local)
        self.exchanges = exchanges_of(self.groups, is_local, is_batch)
        _drop_unstepped(state, self._every)
        self._held, self._bound_form = [*self._tensors()], self._form(self.param_groups)
        self._places = self._memory()

    def _group(self, members: Sequence[Member]) -> BoundFormula:
        """Return the parameters of one formula as a group of a step; the state gets
        their counts of steps, as views of one tensor if kernels update them.
        """
        device, algorithm = members[0].piece.device, members[0].algorithm
        singles, packs, small = list[Leaf](), list[Pack | None](), list[Any]()
        ordered, packed = list[Member](), list[Member]()
        for member in members:
            bare, parts = leaf_of(
                algorithm, member.p.shape, member.piece, [member.p], self.collectives
            )
            if member.owned:
                bare = bare._replace(owned=[member.owned])
            tensors = [member.piece, *member.state.values()]
            in_order = all(t.is_contiguous() and not t.is_neg() for t in tensors)
            strides = () if in_order else member.piece.stride()
            is_dense = in_order or all(
                is_memory(t, len(bare.norms)) and t.stride() == strides for t in tensors
            )
            is_small = device.type == "cpu" and not self.is_printed
            is_small = is_small and member.piece.numel() < SMALL
            is_small = is_small and algorithm.state_dtype != CODED
            if is_dense and (algorithm.matrix_only or not is_small):
                num = len(bare.norms)
                x, *buffers = [memory_of(t, (num, t.numel() // num)) for t in tensors]
                by_symbol = dict(zip(member.state, buffers, strict=True))
                leaf = bare._replace(x=x, buffers=by_symbol, strides=strides)
                singles.append(leaf)
                packs.append(None)
                ordered.append(member)
                continue
            x, state = member.piece, member.state
            if algorithm.matrix_only:
                pack = Pack(num_columns(algorithm), [bare], [parts], [x], [state])
                singles.append(pack.leaf)
                packs.append(pack)
                ordered.append(member)
            else:
                small.append((bare, parts, x, state))
                packed.append(member)
        if small:
            pack = Pack(num_columns(algorithm), *zip(*small, strict=True))
            singles.append(pack.leaf)
            packs.append(pack)
        ordered += packed
        rows = list(dict.fromkeys(member.row for member in ordered))
        table, by_norm = Table(rows, device), None
        if len(rows) > 1:
            nums = [num for leaf in singles for num in leaf.num_norms]
            numbers = [
                rows.index(member.row)
                for member, num in zip(ordered, nums, strict=True)
                for _ in range(num)
            ]
            by_norm = torch.tensor(numbers, device=device)
        params = [member.p for member in ordered]
        t = torch.zeros(len(params), dtype=torch.float32, device=device)
        if self.is_printed:
            _view_steps(self._state, params, t)
            counts = list[Tensor](), list[Tensor]()
        else:
            counts = list(t.unbind()), _held_steps(self._state, params, t[0])
        dtype = working_dtype(ordered[0].piece)
        index = index_of(singles)
        inputs = Inputs(algorithm, table.values, by_norm, index, t, dtype)
        first = sum(len(group.members) for group in self.groups)
        return BoundFormula(inputs, singles, first, ordered, table, packs, counts)

    # ---- buffers of owners -----------------------------------------------------------

    def owned_entries(
        self,
    ) -> list[tuple[Tensor, str, tuple[int, ...], tuple[int, ...]]]:
        """List the buffers that owners keep: parameter, key in its state, the matrices
        that have their owner here, entries of each of its matrices.
        """
        return [
            (member.p, buffer.key, member.owns, sizes)
            for member in self.members
            if member.owns is not None
            for symbol in member.algorithm.owned
            for buffer in [member.algorithm.buffers[symbol]]
            for sizes in [entries_at_owner(member.algorithm, buffer, member.p.shape)]
        ]

    @property
    def parts_at_owners(self) -> dict[Tensor, tuple[int, ...]]:
        """Return the rows of the matrices of parameters, if owners keep buffers of
        them.
        """
        return {
            member.p: member.algorithm.matrices.part_rows(member.p.shape)
            for member in self.members
            if member.algorithm.owned
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
        params = list(chain.from_iterable(map(PARAMS, groups)))
        return len(params) == len(self._every) and all(map(is_, params, self._every))

    def is_current(self, groups: Sequence[dict[str, Any]], state: State) -> bool:
        """Return whether groups, parameters and state are still those, and in the
        memory, that this was made for.
        """
        try:
            return (
                state is self._state
                and all(map(Row.fits, self._rows))
                and self.covers(groups)
                and self._form(groups) == self._bound_form
                and all(map(is_, self._tensors(), self._held))
                and self._memory() == self._places
            )
        except (KeyError, TypeError):  # state was deleted, or is no tensor any more
            return False

    def _form(self, groups: Sequence[dict[str, Any]]) -> tuple[list[Any], ...]:
        """Return which groups there are, how many parameters each has, and which of the
        parameters without a formula take part in steps.
        """
        nums = map(len, map(PARAMS, groups))
        is_trained = map(partial(takes_part, state=self._state), self._idle)
        return list(map(id, groups)), list(nums), list(is_trained)

    def _tensors(self) -> Iterator[Any]:
        """Return all that the state holds for the formulas."""
        state, (params, entries) = self._state, self._in_state
        is_same = len(state) == len(params) and all(map(is_, state, params))
        if not is_same or not all(map(is_, state.values(), entries)):
            # each lookup calls Tensor.__hash__
            self._in_state = [*state], [*state.values()]
            self._entries = [[state.get(m.p) for m in ms] for ms in self._formulas]
        of_formulas = map(map, self._kept, self._entries)
        return chain.from_iterable(chain.from_iterable(of_formulas))

    def _memory(self) -> tuple[list[Any], ...]:
        """Return the addresses of parameters and state, which ``tensor.data = ...``
        changes, and the shapes and strides of parameters. No other tensor is at such an
        address, since the binding keeps its memory.
        """
        params, held = self.params, self._held
        fake = bool(params) and is_fake(params[0])  # it has no address
        if self.collectives is not LOCAL:
            params = list(map(self.collectives.local, params))
            held = list(map(self.collectives.local, held))
        places = list(map(id if fake else Tensor.data_ptr, chain(params, held)))
        return places, list(map(SHAPE, params)), list(map(Tensor.stride, params))

    def has_left(self) -> bool:
        """Return whether the last tensor of the state is another, or elsewhere: loops
        that move the state move all of it.
        """
        if not self.groups:
            return False
        entry = self._state.get(self.params[-1], {})
        last = self._kept[-1](entry)[-1] if entry else None
        if last is None or last is not self._held[-1]:
            return True
        address = self._places[0][-1]
        return not is_fake(last) and self.collectives.local(last).data_ptr() != address

    def release(self) -> None:
        """Let go of all state: the next step makes another binding."""
        self._state, self.groups, self.exchanges, self._counts = {}, [], [], []
        self._held, self._entries, self._in_state = [], [], ([], [])
        for member in self.members:
            member.state, member.owned = {}, ()

    def _refuse_layout(self) -> None:
        for p, what in labels(self.param_groups):
            if p.grad is not None and p.grad.layout != torch.strided:
                raise ValueError(
                    f"got a gradient of layout {p.grad.layout} for {what}, expected "
                    "torch.strided: make it dense (nn.Embedding(sparse=False))"
                )

    # ---- a step ----------------------------------------------------------------------

    def gather(self, printed: Container[Algorithm] = ()) -> tuple[Gradients, Tensor]:
        """Return the gradient of each leaf of each group, (P, n), None if there is
        none; and which of N norms have one (N,), bool. The tables of the groups have
        the param groups' present numbers then.

        Args:
            printed: the formulas of kernels, which read gradients by their addresses:
                the gradients of these have one dtype and any shape.

        Raises:
            ValueError: a hyperparameter out of its range, or a sparse gradient.
            RuntimeError: a CUDA graph captures it, and it has to send something that is
                on the host.
        """
        # a value that is refused leaves groups before it refreshed, but not sent
        is_changed, self._is_stale = self._is_stale, True
        for row in self._rows:
            is_changed = row.refresh() or is_changed
        local, is_local = self.collectives.local, self.collectives is LOCAL
        grads: list[Sequence[Tensor | None]] = []
        has: list[bool] = []
        for group in self.groups:
            views, entries = group.counts
            if views:
                torch._foreach_copy_(views, entries)
            if is_changed:
                group.table.send()
            if group.algorithm.has_stages:
                group.stages = self._stages(group)
            of_group = list(map(GRAD, group.params))
            has_grads = [g is not None for g in of_group]
            present = of_group if all(has_grads) else compress(of_group, has_grads)
            if not set(map(LAYOUT, present)) <= {torch.strided}:
                self._refuse_layout()
            has += has_grads
            if not is_local:
                of_group = [
                    torch.zeros_like(m.piece) if g is None else local(g, m.p)
                    for g, m in zip(of_group, group.members, strict=True)
                ]
            grads.append(_of_leaves(group, of_group, printed))
        self._is_stale = False
        return grads, self._has_grad(tuple(has))

    def _stages(self, group: BoundFormula) -> list[Hashable]:
        """Return the stage of each parameter's matrices in this step."""
        stage = group.algorithm.matrix_preconditioner.stage
        counts = [self._state[member.p][STAGE_COUNT] for member in group.members]
        return [
            stage(0 if is_fake(count) else int(count), number)
            for number, count in enumerate(counts, group.first)
        ]

    def _has_grad(self, pattern: tuple[bool, ...]) -> Tensor:
        """Return a bool tensor (N,) on the device, of a pattern by parameter. It is
        sent there when it is first seen, and kept: later steps with it copy nothing, so
        that a CUDA graph may capture them.

        Raises:
            RuntimeError: a CUDA graph captures the step, and no step before it had this
                pattern.
        """
        mask = self._grad_masks.get(pattern)
        if mask is not None:
            return mask
        device = self.params[0].device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "got a step to capture in which other parameters have no gradient "
                f"({len(pattern) - sum(pattern)} of {len(pattern)}) than in earlier "
                "steps, expected the same ones: take such a step before the capture"
            )
        nums = [num for group in self.groups for num in group.num_norms]
        of_norms = [has for has, n in zip(pattern, nums, strict=True) for _ in range(n)]
        mask = torch.tensor(of_norms, device="cpu").to(device, non_blocking=True)
        if len(self._grad_masks) < PATTERNS:  # a tensor that a graph has captured stays
            self._grad_masks[pattern] = mask
        return mask

    def scatter(self, grads: Gradients, decision: Decision, skipped: Tensor) -> None:
        """Copy small tensors out, tell autograd which tensors were written, and count
        the step that was taken, or skipped: if something fails before, it was not
        taken.

        Args:
            grads: of ``gather``.
            decision: the step's.
            skipped: the count of skipped steps, 0-D.
        """
        torch._foreach_copy_(self._counts, decision.t)
        for group, of_group in zip(self.groups, grads, strict=True):
            views, entries = group.counts
            if views:
                torch._foreach_copy_(entries, views)
            is_stepped = [g is not None for g in of_group]
            for pack in filter(None, compress(group.packs, is_stepped)):
                pack.scatter()
            written = compress(group.written, is_stepped)
            torch.autograd.graph.increment_version(chain.from_iterable(written))
        skipped += decision.finite.logical_not()
        for group in self.groups:
            if group.algorithm.has_stages:
                self._count_stages(group, decision.finite)

    def _count_stages(self, group: BoundFormula, finite: Tensor) -> None:
        """Count the step of a group whose steps differ. Later steps build on the first
        step's bases: it is taken until one is finite. A step that waits for
        eigenvectors may wait for that, too.
        """
        if not is_fake(finite):
            for member in group.members:
                count = self._state[member.p][STAGE_COUNT]
                count += 1 if count else int(finite)

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
        for member in self.members:
            if "h" in member.state:
                yield member.p, member.state["h"]

    def describe_nonfinite(self, sums: Tensor) -> str:
        """Return the error of a step that is not finite: which norm is largest, and
        the parameter that it is of.

        Args:
            sums: the complete sums of the step, (norms, pairs + 1).
        """
        largest = sums.abs().nan_to_num(math.inf, math.inf).amax(1)
        if largest.isfinite().all():
            return (
                "got a learning rate in a tensor that is not finite, expected a number "
                ">= 0: nothing has changed; look at what sets it"
            )
        labels = [
            member.label
            for group in self.groups
            for member, num in zip(group.members, group.num_norms, strict=True)
            for _ in range(num)
        ]
        norm = int(largest.argmax())
        return (
            "got a gradient that is not finite, or whose square overflows, in "
            f"{labels[norm]} (norm {norm} of {len(labels)}), expected numbers: nothing "
            "has changed; lower the learning rate, or pass nonfinite='skip' to go on"
        )


def takes_batches(device: torch.device, is_local: bool) -> bool:
    """Return whether matrices are made as batches: if one process has everything, and
    its device is fastest on all matrices of one shape at once. A CPU takes large
    matrices one by one.
    """
    return is_local and device.type != "cpu"


def _of_leaves(
    group: BoundFormula,
    grads: Sequence[Tensor | None],
    printed: Container[Algorithm],
) -> Sequence[Tensor | None]:
    """Return the gradient of each leaf, None if there is none: (P, n) but for kernels,
    which read its address, since a view costs a GPU's host 3 us.

    Args:
        group: a formula's leaves.
        grads: of each parameter, the gradient of its piece.
        printed: the formulas of kernels.
    """
    is_printed = group.algorithm in printed
    if is_printed and group.in_order and _are_in_order(grads):
        return grads
    rest, found = iter(grads), list[Tensor | None]()
    for leaf, pack in zip(group.leaves, group.packs, strict=True):
        of_leaf = [next(rest) for _ in leaf.params]
        if pack is not None:
            has = any(g is not None for g in of_leaf)
            found.append(pack.gather(of_leaf) if has else None)
        else:
            (g,) = of_leaf
            laid = leaf.laid_out if is_printed else leaf.as_parts
            found.append(None if g is None else laid(g))
    if is_printed:
        dtype = common_dtype(found, group.leaves[0].x.dtype)
        found = [None if g is None else g.to(dtype) for g in found]
    return found


def _are_in_order(grads: Sequence[Tensor | None]) -> bool:
    """Return whether all gradients are contiguous, and of one dtype."""
    present = [g for g in grads if g is not None]
    return (
        all(map(Tensor.is_contiguous, present))
        and not any(map(Tensor.is_neg, present))
        and len(set(map(DTYPE, present))) <= 1
    )


def _keys_of(algorithm: Algorithm) -> itemgetter[Any]:
    """Return a function to the tensors that the state's entry of a parameter holds for
    the algorithm: of two keys or more a tuple.
    """
    kept = [buffer.key for buffer in algorithm.buffers.values()]
    return itemgetter("step", *(kept or ["step"]))


# ---- state ---------------------------------------------------------------------------


def check_state(
    p: Tensor, what: str, algorithm: Algorithm, state: State, collectives: Collectives
) -> None:
    """Check what ``state`` holds of a parameter for ``algorithm``.

    Raises:
        ValueError: no tensor, or one of another shape or device than the parameter's.
    """
    entry, piece = state.get(p, {}), collectives.local(p)
    for buffer in algorithm.buffers.values():
        value = entry.get(buffer.key)
        if value is None:
            continue
        got, do = f"a {type(value).__name__}", "change all state of a parameter with it"
        shape = buffer_shape(algorithm, buffer, piece)
        if isinstance(value, Tensor):
            local = collectives.local(value)
            if buffer.home == "owner" or local.shape == shape:
                if local.device == piece.device:
                    continue
                do = "move all state back before a step"
            got = f"a tensor of shape {tuple(local.shape)} on {local.device}"
        raise ValueError(
            f"got {got} as state {buffer.key!r} of {what}, expected a tensor of shape "
            f"{tuple(shape)} on {piece.device}, as the parameter is: {do}, or "
            "delete optimizer.state[parameter], which then restarts"
        )


def _held_steps(state: State, params: Sequence[Tensor], like: Tensor) -> list[Tensor]:
    """Return the counts of steps that ``state`` holds of each parameter. Where there is
    none in the form of ``like``, the state gets one.
    """
    for p in params:
        before = state[p].get("step")
        if (
            type(before) is not Tensor
            or before.shape != like.shape
            or (before.dtype, before.device) != (like.dtype, like.device)
            or is_fake(before) != is_fake(like)
        ):
            number = torch.zeros_like(like)
            if before is not None:
                number.copy_(as_tensor(before).reshape(like.shape))
            state[p]["step"] = number
    return [state[p]["step"] for p in params]


def _view_steps(state: State, params: Sequence[Tensor], t: Tensor) -> None:
    """Give ``state`` views of ``t`` (N,) as the parameters' counts of steps, with the
    values that it has.
    """
    views = t.unbind()
    for p, view in zip(params, views, strict=True):
        before = state[p].get("step")
        if before is not None and is_fake(as_tensor(before)) == is_fake(t):
            view.copy_(as_tensor(before).reshape(()))
        state[p]["step"] = view


def _attach(member: Member, state: State, collectives: Collectives) -> None:
    """Give a parameter the tensors that ``state`` holds, and make the missing ones."""
    p, algorithm = member.p, member.algorithm
    buffers = algorithm.buffers
    unwanted = STATE_KEYS - {buffer.key for buffer in buffers.values()}
    debiased = {buffer.key for buffer in buffers.values() if buffer.is_debiased}
    state[p].setdefault("step", torch.zeros((), device="cpu"))
    state[p].update(in_form_of(algorithm, state[p], collectives))
    for key in unwanted & set(state[p]):
        del state[p][key]  # of another rule: stale when that one returns
    if debiased - set(state[p]):
        # all of them start with the count of steps: one that is new beside an old
        # momentum would be far too small
        # (new tensors, so that a state dict that is refused has changed none)
        for key in debiased & set(state[p]):
            state[p][key] = torch.zeros_like(state[p][key])
        state[p]["step"] = torch.zeros((), device="cpu")
    if algorithm.has_stages:
        state[p].setdefault(STAGE_COUNT, torch.zeros((), device="cpu"))
    else:
        state[p].pop(STAGE_COUNT, None)
    for symbol, buffer in buffers.items():
        if buffer.home == "shard":
            held = _attached(member, buffer, state[p], collectives)
            member.state[symbol] = collectives.local(held)


def _attached(
    member: Member, buffer: Buffer, entry: dict[str, Any], collectives: Collectives
) -> Tensor:
    """Return a buffer of a parameter as its ``entry`` of the state holds it: the tensor
    that is there, else a new tensor with its values.
    """
    algorithm, before = member.algorithm, entry.get(buffer.key)
    dtype = algorithm.dtype_of(buffer, member.piece)
    if (
        isinstance(before, Tensor)
        and collectives.local(before).dtype == dtype
        and (algorithm.state_dtype != CODED or before.is_contiguous())
    ):
        return before
    fresh = start_beside(algorithm, buffer, member.piece)
    if before is not None:
        fresh.copy_(collectives.local(before))
    held: Tensor = collectives.wrap(fresh, member.p)
    entry[buffer.key] = held
    return held


def _is_of_others(
    algorithm: Algorithm, p: Tensor, entry: Mapping[str, Any], numbers: Sequence[int]
) -> bool:
    """Return whether owners keep buffers of matrices of other shapes than the algorithm
    has: its ``sides`` or ``matrices`` have changed, so that they restart.

    Args:
        algorithm: the algorithm of ``p``.
        p: a parameter.
        entry: of it, in the state.
        numbers: of its matrices to which the buffers belong.
    """
    for symbol in algorithm.owned:
        buffer = algorithm.buffers[symbol]
        value = entry.get(buffer.key)
        if value is None:
            continue
        if not algorithm.matrices.is_even(p.shape):
            sizes = entries_at_owner(algorithm, buffer, p.shape)
            if value.shape != (sum(sizes[n] for n in numbers),):
                return True
        elif value.shape[1:] != owned_shapes(algorithm.matrices, p.shape, buffer)[0]:
            return True
    return False


def _attach_owned(
    members: Sequence[Member],
    state: State,
    before: Mapping[Tensor, tuple[int, ...]] | None,
    collectives: Collectives,
) -> None:
    """Give parameters the buffers at home with the owners of matrices, from ``state``
    or new.

    Args:
        members: all that share their exchanges.
        state: the optimizer's.
        before: the rows of parameters' parts in the binding before; None: there is
            none. The owners may differ from those then, as they do where other
            parameters share the exchanges: all ranks have handed over their buffers.
        collectives: of the ranks that hold the parameters.
    """
    leaves = [leaf for m in members for leaf in owned_leaves(m.algorithm, [m.p])]
    for member, ownership in zip(members, collectives.owns(leaves), strict=True):
        p, algorithm, buffers = member.p, member.algorithm, []
        parts = algorithm.matrices.part_rows(p.shape)
        every = range(algorithm.matrices.num_in(p.shape))
        here = ownership if before is None else every
        changed = before is not None and before.get(p, parts) != parts
        if changed or _is_of_others(algorithm, p, state[p], here):
            for symbol in algorithm.owned:
                state[p].pop(algorithm.buffers[symbol].key, None)
            state[p]["step"] = torch.zeros((), device="cpu")
            if algorithm.has_stages:
                state[p][STAGE_COUNT] = torch.zeros((), device="cpu")
        for symbol in algorithm.owned:
            buffer = algorithm.buffers[symbol]
            value = state[p].get(buffer.key)
            if value is None:
                value = start_at_owner(algorithm, buffer, p, ownership)
            elif before is not None:
                sizes = entries_at_owner(algorithm, buffer, p.shape)
                value = collectives.claim(value, ownership, sizes)
            state[p][buffer.key] = value
            buffers.append(value)
        member.owned, member.owns = tuple(buffers), ownership


def _drop_unstepped(state: State, present: Sequence[Tensor]) -> None:
    """Drop state of parameters that left their groups before a step (float32 masters
    took their place): torch.optim has none of these, since it makes state in a step.
    """
    left = [p for p in state.keys() - set(present) if isinstance(p, Tensor)]
    for p in left:
        if not float(state[p].get("step", 1.0)):
            del state[p]
