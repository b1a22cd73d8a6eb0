"""The binding of an optimizer: the one place that knows memory. It holds parameters,
gradients and state as the groups of a step, with the numbers of param groups as tables
(G, K), and says when any of these have changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, compress
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from marsopt.functional.authors import REST
from marsopt.functional.buffers import entries_at_owner
from marsopt.optim.attach import (
    attach,
    attach_owned,
    check_state,
    drop_unstepped,
    held_steps,
    view_steps,
)
from marsopt.optim.groups import (
    check_group,
    kinds_of,
    labels,
    options_of_group,
    takes_part,
    values_of,
)
from marsopt.optim.state_dict import STAGE_COUNT, State
from marsopt.rules import checks
from marsopt.rules.checks import Number
from marsopt.rules.component import Algorithm, MatrixCost
from marsopt.rules.formats import CODED, check_piece
from marsopt.rules.numerics import scalar_dtype, working, working_dtype
from marsopt.rules.options import options_of
from marsopt.rules.registry import named
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
from marsopt.step.owners import LOCAL, Collectives, OwnedTensors, OwnerBuffer
from marsopt.step.step import Gradients, Group, MatrixLeaves, exchanges_of

LR = ("lr", "lr_ratio", "lr_1d_ratio")  # keys whose product is a learning rate
PATTERNS = 64  # masks that stay; a mixture of experts has patterns without end

# ``map`` reads an attribute of many tensors in a third of the time of a loop
GRAD, LAYOUT, SHAPE = map(attrgetter, ("grad", "layout", "shape"))
DTYPE, PARAMS = attrgetter("dtype"), itemgetter("params")


# ---- numbers of param groups ---------------------------------------------------------


class Row:
    """The numbers of a param group's matrices, or of its other tensors: a row of their
    formula's table, read from the group itself.

    Args:
        group: a param group, with all hyperparameters.
        is_matrix: whether it is the row of matrices.
        options: the constructor's options.

    Raises:
        ValueError: a hyperparameter out of its range.
    """

    def __init__(
        self, group: Mapping[str, Any], is_matrix: bool, options: Mapping[str, Any]
    ) -> None:
        self.group, values = group, values_of(group, is_matrix)
        algorithm = named(values["mars_type"]).algorithm({**options, **values})
        self.algorithm = algorithm
        is_of_rule = values["mars_type"] == group["mars_type"]
        # A column after lr is a key of the group and a place in its pair, or a number.
        self._sources: list[tuple[str, int | None] | Number] = []
        defaults = algorithm.defaults(0.0, None)
        lines = options_of(type(algorithm.preconditioner))
        for (name, place), default in zip(algorithm.columns, defaults, strict=True):
            key = name
            if name in lines and lines[name].beta is not None:
                key, place = "betas", lines[name].beta
            if not is_matrix and group.get(f"{key}_1d") is not None:
                key = f"{key}_1d"
            elif group.get(key) is None or (key == "nesterov" and not is_of_rule):
                self._sources.append(default)
                continue
            self._sources.append((key, place))
        del self._sources[0]
        known = options_of_group(group, options)
        self._structure = [
            key for key, line in known.items() if key in group and not line.is_number
        ]
        # Numbers that the formula does not read are checked, too.
        self._lines = {
            key: line
            for key, line in known.items()
            if line.is_number and key in group and not (is_matrix and key in REST)
        }
        self._names, self._form = set(group), self._present_form()
        self._seen: list[Any] = [...] * len(self._lines)
        self._plain: dict[str, Any] = {}
        self.numbers: list[Number] = []
        self.refresh()

    def _present_form(self) -> list[Any]:
        """Return the values that the formula depends on: structure; and None, True or
        False in the place of a number.
        """
        values = list(map(self.group.get, self._structure))
        for value in map(self.group.get, self._lines):
            is_switch = value is None or value is True or value is False
            values.append(value if is_switch else float)
        return values

    def fits(self) -> bool:
        """Return whether the group has the keys, and the formula, of before."""
        try:
            is_same_form = self._present_form() == self._form
        except (ValueError, RuntimeError):  # an array or tensor is neither true nor not
            return False
        return is_same_form and self.group.keys() == self._names

    def refresh(self) -> bool:
        """Take over the group's changes since the last call; return whether there may
        be any. Tensors, lists and arrays count as changed: they may change in place,
        and reading a tensor would sync.

        Raises:
            ValueError: a value out of its range.
        """
        group = self.group
        latest = [group.get(key) for key in self._lines]
        if all(map(is_, latest, self._seen)) and not any(map(_is_mutable, latest)):
            return False
        items = self._lines.items()
        for (key, line), value, seen in zip(items, latest, self._seen, strict=True):
            self._plain[key] = value = checks.plain(value)
            if value is seen and not checks.can_read(value):
                continue
            if line.check and not (value is None and line.is_optional):
                line.check(key, value)
        rate: Number = 1.0
        for key in LR:
            if (factor := self._plain.get(key)) is not None:
                rate = rate * factor
        checks.at_least_zero("lr * lr_ratio", rate)
        self.numbers = [rate]
        for source in self._sources:
            if isinstance(source, tuple):
                key, place = source
                value = self._plain[key]
                self.numbers.append(value if place is None else value[place])
            else:
                self.numbers.append(source)
        self._seen = latest
        return True


def _is_mutable(value: Any) -> bool:
    """Return whether a value may change in place."""
    if isinstance(value, tuple):
        return any(map(_is_mutable, value))
    return not isinstance(value, checks.PLAIN)


class Table:
    """The numbers of G rows of one formula, on the device.

    Args:
        rows: of the numbers.
        device: of the parameters.
    """

    def __init__(self, rows: Sequence[Row], device: torch.device) -> None:
        self.rows = rows
        shape = len(rows), len(rows[0].numbers)
        self.values = torch.zeros(shape, dtype=scalar_dtype(device), device=device)
        self.send()

    def send(self) -> None:
        """Send all numbers, by one copy; tensors on the device are copied there.

        Raises:
            RuntimeError: a CUDA graph captures the step, and a number is a tensor on
                the host.
        """
        rows, device = [row.numbers for row in self.rows], self.values.device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            for row, numbers in zip(self.values.unbind(), rows, strict=True):
                for cell, number in zip(row.unbind(), numbers, strict=True):
                    put(cell, number)
            return
        plain = [[0.0 if isinstance(n, Tensor) else n for n in row] for row in rows]
        host = torch.tensor(plain, dtype=self.values.dtype, device="cpu")
        self.values.copy_(host, non_blocking=True)
        for row, numbers in zip(self.values, rows, strict=True):
            for column, number in enumerate(numbers):
                if isinstance(number, Tensor):
                    put(row[column], number)


def put(cell: Tensor, value: Number) -> None:
    """Write a number into a 0-D tensor; a tensor without a sync.

    Raises:
        RuntimeError: a CUDA graph captures it, and the tensor is on the host.
    """
    if isinstance(value, Tensor):
        capturing = cell.is_cuda and torch.cuda.is_current_stream_capturing()
        if capturing and not value.is_cuda:
            raise RuntimeError(
                f"got a hyperparameter as a tensor on {value.device} in a step that a "
                f"CUDA graph captures, expected one on {cell.device}: a replay could "
                "not read it; move it there, and change it in place"
            )
        cell.copy_(value.detach().reshape(()), non_blocking=True)
    else:
        cell.fill_(value)


# ---- parameters and their state ------------------------------------------------------


@dataclass(eq=False)
class Member:
    """A parameter that is updated, and its state."""

    p: Tensor  # as the user holds it: a DTensor, too
    label: str
    number: int  # among all parameters of the optimizer
    row: Row  # its numbers
    algorithm: Algorithm  # equal for all parameters of a formula
    piece: Tensor  # this process's elements of it
    state: dict[str, Tensor] = field(default_factory=dict)  # pieces, by symbol
    owned: OwnedTensors = ()  # buffers that the owners of its matrices keep here
    owns: tuple[int, ...] | None = None  # which matrices these are of


class BoundFormula(Group):
    """The parameters of one formula.

    Args:
        inputs, leaves: as ``Group`` has them.
        first: the number of its first parameter among all formulas'.
        members: its parameters, in the order of the leaves.
        table: the numbers of their param groups.
        packs: the tensors that a step copies into each leaf, or None.
        counts: views of the counts of steps, and the tensors of ``optimizer.state``
            which a step copies in, and out again. Both are empty under kernels, where
            the state holds the views.
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
        self.has_stages = inputs.algorithm.has_stages
        self.in_order = not any(packs) and all(leaf.strides == () for leaf in leaves)
        rest = iter(members)
        params_of_leaves = [[next(rest) for _ in leaf.params] for leaf in leaves]
        pairs = zip(packs, params_of_leaves, strict=True)
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
        self._all_params = [p for group in groups for p in group["params"]]
        self.collectives: Collectives = options["collectives"]
        # whether kernels update parameters in their own memory
        self.is_printed = options["compile"] is not False and kernels.available(
            device or torch.device("cpu")
        )
        names = dict(labels(groups))
        numbers = {p: number for number, p in enumerate(names)}
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
                number = numbers[p]
                members.append(Member(p, names[p], number, row, formula, piece))
            self._rows += rows.values()
        self._formulas = list(by_formula.values())
        self.members = [member for members in self._formulas for member in members]
        self.params = [member.p for member in self.members]
        # fake tensors have no address
        is_faked = bool(self.params) and is_fake(self.params[0])
        self._address: Callable[[Any], int] = id if is_faked else Tensor.data_ptr
        self._kept = [_keys_of(members[0].algorithm) for members in self._formulas]
        with_member = set(self.params)
        self._idle = [p for p in self._all_params if p not in with_member]
        self.groups: list[BoundFormula] = []
        self.exchanges: list[list[MatrixLeaves]] = []
        self._entries: list[list[Any]] = []  # the state's entries, by formula
        self._in_state: tuple[list[Any], list[Any]] = [], []  # keys, and entries
        self._is_stale = False  # whether a gather was broken off
        self._grad_masks: dict[tuple[bool, ...], Tensor] = {}

    @torch.no_grad()
    def bind(self) -> None:
        """Give every parameter its state; allocate missing buffers."""
        state, before = self._state, self._before
        self._before = None
        for m in self.members:
            m.state = attach(m.p, m.piece, m.algorithm, state, self.collectives)
        kinds: dict[MatrixCost, list[Member]] = {}
        for member in self.members:
            if member.algorithm.owned:
                cost = member.algorithm.matrix_preconditioner.cost
                kinds.setdefault(cost, []).append(member)
        if kinds and before is not None:
            before.publish_owned(state)
        for together in kinds.values():
            parts = None if before is None else before.parts_at_owners
            params = [(member.p, member.algorithm) for member in together]
            buffers = attach_owned(params, state, parts, self.collectives)
            for member, (owned, owns) in zip(together, buffers, strict=True):
                member.owned, member.owns = owned, owns
        # last, for it holds the counts of all that has restarted
        self.groups = []
        for members in self._formulas:
            self.groups.append(self._group(members))
        self._counts = [group.inputs.t for group in self.groups]
        is_local = self.collectives is LOCAL
        is_batch = bool(self.params) and takes_batches(self.params[0].device, is_local)
        self.exchanges = exchanges_of(self.groups, is_local, is_batch)
        drop_unstepped(state, self._all_params)
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
                algorithm,
                member.p.shape,
                member.piece,
                [member.p],
                self.collectives,
                member.number,
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
            view_steps(self._state, params, t)
            counts = list[Tensor](), list[Tensor]()
        else:
            counts = list(t.unbind()), held_steps(self._state, params, t[0])
        dtype = working_dtype(ordered[0].piece)
        index = index_of(singles, algorithm.has_noise)
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
        bound = self._all_params
        return len(params) == len(bound) and all(map(is_, params, bound))

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
        by_formula = map(map, self._kept, self._entries)
        return chain.from_iterable(chain.from_iterable(by_formula))

    def _memory(self) -> tuple[list[Any], ...]:
        """Return the addresses of parameters and state, which ``tensor.data = ...``
        changes, and the shapes and strides of parameters. No other tensor is at such an
        address, since the binding keeps its memory.
        """
        params, held = self.params, self._held
        if self.collectives is not LOCAL:
            params = list(map(self.collectives.local, params))
            held = list(map(self.collectives.local, held))
        places = list(map(self._address, chain(params, held)))
        return places, list(map(SHAPE, params)), list(map(Tensor.stride, params))

    def has_left(self) -> bool:
        """Return whether the last tensor of the state is another, or elsewhere: loops
        that move the state move all of it.
        """
        if not self.groups:
            return False
        try:
            last = self._kept[-1](self._state[self.params[-1]])[-1]
        except KeyError:  # a caller has deleted it
            return True
        if last is not self._held[-1]:
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
            if group.has_stages:
                group.stages = self._stages(group)
            group_grads = list(map(GRAD, group.params))
            has_grads = [g is not None for g in group_grads]
            present = (
                group_grads if all(has_grads) else compress(group_grads, has_grads)
            )
            if not set(map(LAYOUT, present)) <= {torch.strided}:
                self._refuse_layout()
            has += has_grads
            if not is_local:
                group_grads = [
                    torch.zeros_like(m.piece) if g is None else local(g, m.p)
                    for g, m in zip(group_grads, group.members, strict=True)
                ]
            grads.append(_grads_of_leaves(group, group_grads, printed))
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
        flags = [has for has, n in zip(pattern, nums, strict=True) for _ in range(n)]
        mask = torch.tensor(flags, device="cpu").to(device, non_blocking=True)
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
        for group, group_grads in zip(self.groups, grads, strict=True):
            views, entries = group.counts
            if views:
                torch._foreach_copy_(entries, views)
            is_stepped = [g is not None for g in group_grads]
            for pack in filter(None, compress(group.packs, is_stepped)):
                pack.scatter()
            written = compress(group.written, is_stepped)
            torch.autograd.graph.increment_version(chain.from_iterable(written))
        skipped += decision.skipped
        for group in self.groups:
            if group.has_stages:
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


def _grads_of_leaves(
    group: BoundFormula,
    grads: Sequence[Tensor | None],
    printed: Container[Algorithm],
) -> Sequence[Tensor | None]:
    """Return the gradient of each leaf, None if there is none: (P, n) but for kernels,
    which read its address, since a view costs a GPU's host 3 us.

    Args:
        group: a formula's leaves.
        grads: the gradient of each parameter's piece.
        printed: the formulas of kernels.
    """
    is_printed = group.algorithm in printed
    if is_printed and group.in_order and _are_in_order(grads):
        return grads
    rest, leaf_grads = iter(grads), list[Tensor | None]()
    for leaf, pack in zip(group.leaves, group.packs, strict=True):
        param_grads = [next(rest) for _ in leaf.params]
        if pack is not None:
            has = any(g is not None for g in param_grads)
            leaf_grads.append(pack.gather(param_grads) if has else None)
        else:
            (g,) = param_grads
            laid = leaf.laid_out if is_printed else leaf.as_parts
            leaf_grads.append(None if g is None else laid(g))
    if is_printed:
        dtype = common_dtype(leaf_grads, group.leaves[0].x.dtype)
        leaf_grads = [None if g is None else g.to(dtype) for g in leaf_grads]
    return leaf_grads


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
