"""A step by printed kernels: on a GPU one launch updates all tensors of a formula.
Graphs (``InPlace``) take formulas that the printer does not know, and tensors whose
parts are no contiguous runs.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from marsopt.functional import step
from marsopt.functional.stacks import empty_stacks
from marsopt.functional.step import Each, Move
from marsopt.functional.step_types import (
    Decision,
    Formula,
    RuleGroup,
    Stack,
    StackScalars,
    StepScalars,
    formula,
)
from marsopt.optim.compiled import RANGES, InPlace, declined, named_range
from marsopt.optim.portions import batch_dtype
from marsopt.rules.algorithm import Algorithm
from marsopt.rules.dtypes import working, working_dtype
from marsopt.step.expressions import Unprintable
from marsopt.step.kernels import AddressTable, Parts, SumsKernel, UpdateKernel
from marsopt.step.printer import print_sums, print_update

KEPT = 256  # kernels of the process, the latest

Dtypes = tuple[tuple[str, torch.dtype], ...]  # of operands, by name


class Segment(NamedTuple):
    """A contiguous run of a tensor's elements with one row of scalars."""

    part: int  # of its tensor
    matrix: int  # of its tensor
    start: int  # elements
    size: int


def segments_of(stack: Stack, by_matrix: bool) -> list[Segment]:
    """Return the segments of the one tensor of a stack.

    Args:
        stack: of one tensor.
        by_matrix: whether a segment has to belong to one matrix; else only parts that
            are clipped by themselves are cut.
    """
    size, rows = stack.x.numel(), stack.rows
    has_parts = stack.num_clipped > 1
    if rows is None or not (has_parts or by_matrix):
        return [Segment(0, 0, 0, size)]
    num_rows = stack.x.shape[1 : stack.num_row_dims].numel()
    if rows.matrix_index is None:
        ((_, length),) = rows.runs
        matrices = [row // length for row in range(num_rows)]
    else:
        matrices = rows.matrix_index.tolist()
    segments, row = [], 0
    cols = size // max(1, num_rows)
    for matrix, run in groupby(matrices):
        length = len(list(run))
        part = matrix if has_parts else 0
        segments.append(Segment(part, matrix, row * cols, length * cols))
        row += length
    return segments


def position_of(stack: Stack, start: int) -> tuple[int, int, int] | None:
    """Return (base, run, stride): element i of the run that begins at ``start`` of a
    piece has the number base + i // run * stride + i % run in the whole tensor. None:
    its numbers have no such form.
    """
    piece, whole = stack.x.shape[1:], stack.shape
    if not piece.numel():
        return 0, 1, 0
    strides = [*accumulate(reversed(whole[1:]), lambda a, b: a * b, initial=1)][::-1]
    base, inner = 0, len(whole)
    for dim, indices in stack.cuts.items():
        listed = indices.tolist()
        if listed != list(range(listed[0], listed[0] + len(listed))):
            return None
        base += listed[0] * strides[dim]
        if dim > 0:
            if inner != len(whole):
                return None
            inner = dim
    if inner == len(whole):
        return base + start, piece.numel(), 0
    run, stride = piece[inner:].numel(), strides[inner - 1]
    return base + start // run * stride + start % run, run, stride


@lru_cache(maxsize=KEPT)
def moving_kernel(
    function: Move, kind: Formula, operands: Dtypes, num_columns: int
) -> UpdateKernel:
    """Return the kernel of a formula's ``step.update`` or ``step.apply``.

    Args:
        function: one of these two.
        kind: the formula.
        operands: of ``update`` x, g, buffers by symbol and, if the matrices for owners
            have a tensor of their own, o; of ``apply`` x and o.
        num_columns: scalars of a part; of ``apply`` the last one is the
            preconditioner's ``scale``.

    Raises:
        Unprintable: an operator has no Triton expression.
    """
    algorithm, dtypes = kind.algorithm, dict(operands)
    unread = torch.empty(())  # a kernel reads ok by itself

    def update(
        tensors: dict[str, Tensor], columns: tuple[Tensor, ...], position: Tensor
    ) -> dict[str, Tensor]:
        s = StepScalars.read(algorithm, unread, *columns)
        x, g = tensors["x"], tensors["g"]
        buffers = {k: v for k, v in tensors.items() if k in algorithm.buffers}
        index = position if algorithm.stochastic_rounding else None
        out, new = step.new_values(algorithm, s, x, g, buffers, buffers.get("h"), index)
        if not algorithm.matrix_only:
            assert out is not None
            return {"x": out, **new}
        return {**new, "o": new["m"] if out is None else out} if "o" in dtypes else new

    def apply(
        tensors: dict[str, Tensor], columns: tuple[Tensor, ...], position: Tensor
    ) -> dict[str, Tensor]:
        *columns_of_step, scale = columns
        s = StepScalars.read(algorithm, unread, *columns_of_step)
        x, o = working(tensors["x"]), working(tensors["o"])
        return {"x": algorithm.matrix_preconditioner.apply(x, o, s.rule, scale)}

    name, body = ("update", update) if function is step.update else ("apply", apply)
    dtype = torch.promote_types(dtypes["x"], torch.float32)
    title = f"{name} of {algorithm}"
    return UpdateKernel(print_update(title, body, dtypes, num_columns, dtype))


@lru_cache(maxsize=KEPT)
def sums_kernel(operands: Dtypes) -> SumsKernel:
    """Return the kernel of ``step.products``: of g and, if there is one, h."""

    def body(tensors: dict[str, Tensor]) -> list[Tensor]:
        h = working(tensors["h"]) if "h" in tensors else None
        return step.product_terms(working(tensors["g"]), h)

    names = [name for name, _ in operands if name in ("g", "h")]
    return SumsKernel(
        print_sums(f"sums of {' and '.join(names)}", body, dict(operands))
    )


@dataclass
class LaunchSet:
    """Tensors of one formula that one launch moves; they follow each other."""

    positions: list[int]  # of their stacks, among all
    group: int
    rows: list[int]  # of each segment: its row among the parts of the group
    kernel: UpdateKernel
    parts: Parts  # the segments
    table: AddressTable
    dtypes: Dtypes  # of the operands, by name
    # of operands that stay where they are, their addresses; None: given to each launch
    fixed: dict[str, list[int] | None]
    pieces: list[Tensor]  # the tensors
    scale: Tensor  # (segments, 1), of the segments' matrices

    def __post_init__(self) -> None:
        first, num = (self.rows[0], len(self.rows)) if self.rows else (0, 0)
        self._are_consecutive = self.rows == list(range(first, first + num))
        self._index = torch.tensor(self.rows, device=self.scale.device)
        self._strides = list(map(Tensor.stride, self.pieces))

    def addresses(self, given: Mapping[str, Sequence[Tensor]]) -> Tensor:
        """Return the addresses on the device; ``given`` are this step's operands."""
        lists = [
            list(map(Tensor.data_ptr, given[name])) if fixed is None else fixed
            for name, fixed in self.fixed.items()
        ]
        return self.table.on_device(lists)

    def of_segments(self, values: Tensor) -> Tensor:
        """Return the segments' rows of ``values``, of all parts of the group."""
        if self._are_consecutive and self.rows:
            return values[self.rows[0] : self.rows[-1] + 1]
        return values.index_select(0, self._index)

    def of_parts(self, sums: Tensor, first: int, num: int) -> Tensor:
        """Return the sums over parts ``first`` to ``first + num`` of the group, from
        the ``sums`` over segments (segments, pairs).
        """
        if self._are_consecutive and len(self.rows) == num:
            return sums
        totals = sums.new_zeros(num, sums.shape[1])
        return totals.index_add_(0, self._index - first, sums)

    def laid_out(
        self, tensors: Sequence[Tensor], dtype: torch.dtype
    ) -> tuple[Sequence[Tensor], int]:
        """Return an operand of this step in its dtype, laid out as the set's tensors,
        and how many of its tensors had to be copied for that.
        """
        lie = list(map(Tensor.stride, tensors)) == self._strides
        if lie and {t.dtype for t in tensors} == {dtype}:
            return tensors, 0
        alike, num_copied = [], 0
        for tensor, piece in zip(tensors, self.pieces, strict=True):
            if tensor.stride() != piece.stride() or tensor.dtype != dtype:
                copy = torch.empty_like(piece, dtype=dtype)
                tensor, num_copied = copy.copy_(tensor.view_as(piece)), num_copied + 1
            alike.append(tensor)
        return alike, num_copied


Sets = tuple[list[LaunchSet], list[int]]  # and the stacks that no kernel moves
Given = Mapping[str, Sequence[Any]]  # operands of this step, by name and stack


class Kernels(InPlace):
    """A ``step.Run`` that launches printed kernels over tensors where they lie. Each
    tensor is a stack of its own.

    Args:
        places: of each stack the number of its group, and of its first part in it.
        args, kwargs: as ``InPlace`` has them.
    """

    def __init__(
        self, places: Sequence[tuple[int, int]], *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.is_fused = False
        self._places = places
        self.num_copied = 0  # gradients and factors that lie otherwise than parameters
        self._sets: dict[Hashable, Sets] = {}
        self._groups: Sequence[RuleGroup] = ()
        self._decision: Decision | None = None
        self._of_graphs: list[StackScalars] = []

    # ---- the parts of a step ---------------------------------------------------------

    def each(
        self, function: Each, stacks: Sequence[Stack], grads: Sequence[Tensor]
    ) -> list[Tensor]:
        if self._is_off(stacks):
            return super().each(function, stacks, grads)
        results: list[Tensor | None] = [None] * len(stacks)
        with named_range(RANGES[function]):
            everything = list(range(len(stacks)))
            given: Given = dict(g=grads)
            sets, others = self._sets_of(step.update, everything, stacks, given)
            for launched in sets:
                operands = self._operands(launched, given)
                kernel = sums_kernel(launched.dtypes)
                sums = kernel(launched.parts, launched.addresses(operands))
                first = launched.positions[0]
                num = sum(stacks[i].num_clipped for i in launched.positions)
                # of all its stacks, in order
                results[first] = launched.of_parts(sums, self._places[first][1], num)
            if others:
                masked = [grads[i] if i in others else None for i in everything]
                parts = self._by_calls(function, stacks, masked)
                for i in others:
                    results[i] = parts[i]
        return [result for result in results if result is not None]

    def per_stack(
        self, groups: Sequence[RuleGroup], decision: Decision
    ) -> list[StackScalars]:
        """Return what stands for the scalars of each stack: kernels read the groups'
        tables.
        """
        stacks = step.stacks_of(groups)
        if self._is_off(stacks):
            return super().per_stack(groups, decision)
        self._groups, self._decision, self._of_graphs = groups, decision, []
        return [StackScalars(decision.finite, decision.finite)] * len(stacks)

    def move(
        self, function: Move, stacks: Sequence[Stack], *columns: Sequence[Any]
    ) -> tuple[list[Stack], list[Tensor | None]]:
        if self._is_off(stacks):
            return super().move(function, stacks, *columns)
        active = [i for i, entry in enumerate(columns[0]) if entry is not None]
        with named_range(RANGES[function]):
            if function is step.update:
                _, grads, *batches = columns
                return list(stacks), self._update(active, stacks, grads, *batches)
            self._apply(active, stacks, *columns)
            return list(stacks), [None] * len(stacks)

    def _update(
        self,
        active: list[int],
        stacks: Sequence[Stack],
        grads: Sequence[Tensor],
        batches: Sequence[Tensor | None] | None = None,
    ) -> list[Tensor | None]:
        """Launch ``step.update``; return the matrices that go to owners, of stacks that
        have no row of a batch.
        """
        batches = [None] * len(stacks) if batches is None else batches
        outputs = self._outputs(active, stacks, batches)
        pairs = zip(outputs, batches, strict=True)
        given: Given = dict(
            g=grads, o=_first([b if a is None else a for a, b in pairs])
        )
        others = self._launch(step.update, active, stacks, given)
        if others:
            columns = self._for_graphs(others), grads, batches
            results = self._by_calls(step.update, stacks, *columns)
            for i in others:
                outputs[i] = results[i]
        return outputs

    def _apply(
        self,
        active: list[int],
        stacks: Sequence[Stack],
        matrices: Sequence[Tensor | None],
        _: Sequence[StackScalars],
    ) -> None:
        """Launch ``step.apply``."""
        given: Given = dict(o=_first(matrices))
        others = self._launch(step.apply, active, stacks, given)
        if others:
            masked = [m if i in others else None for i, m in enumerate(matrices)]
            self._by_calls(step.apply, stacks, masked, self._for_graphs(others))

    def _launch(
        self, function: Move, active: list[int], stacks: Sequence[Stack], given: Given
    ) -> list[int]:
        """Launch the kernels of ``function`` over the stacks at ``active``; return the
        stacks that graphs have to move.
        """
        sets, others = self._sets_of(function, active, stacks, given)
        for launched in sets:
            ok, table = self._segment_scalars(launched)
            if function is step.apply:
                table = torch.cat([table, launched.scale], 1)
            operands = self._operands(launched, given)
            addresses = launched.addresses(operands)
            launched.kernel(launched.parts, addresses, ok, table)
        return others

    # ---- operands and scalars --------------------------------------------------------

    def _outputs(
        self,
        active: Sequence[int],
        stacks: Sequence[Stack],
        batches: Sequence[Tensor | None],
    ) -> list[Tensor | None]:
        """Return tensors for the matrices of stacks that have no row of a batch, and
        send more than m.
        """
        outputs: list[Tensor | None] = [None] * len(stacks)
        alone = [
            i for i in active if batches[i] is None and stacks[i].algorithm.makes_matrix
        ]
        if alone:
            xs, device = [stacks[i].x for i in alone], stacks[alone[0]].x.device
            dtypes = [
                batch_dtype(stacks[i].algorithm, x, device.type)
                for i, x in zip(alone, xs, strict=True)
            ]
            made = empty_stacks([x.shape for x in xs], dtypes, device)
            for i, output in zip(alone, made, strict=True):
                outputs[i] = output
        return outputs

    def _operands(
        self, launched: LaunchSet, given: Given
    ) -> dict[str, Sequence[Tensor]]:
        """Return a set's operands of this step; the caller holds them until it has
        launched. Those that lie otherwise than the set's tensors are copied.
        """
        operands: dict[str, Sequence[Tensor]] = {}
        for name, dtype in launched.dtypes:
            if launched.fixed[name] is None:
                column = given[name]
                tensors = [column[i] for i in launched.positions]
                operands[name], num_copied = launched.laid_out(tensors, dtype)
                self.num_copied += num_copied
        return operands

    def _segment_scalars(self, launched: LaunchSet) -> tuple[Tensor, Tensor]:
        """Return which segments of a set move, and their rows of the table."""
        assert self._decision is not None
        hyper = self._groups[launched.group].hyper
        ok = hyper.per_part(self._decision.ok[launched.group])
        table = self._decision.tables[launched.group][launched.scale.dtype]
        return launched.of_segments(ok), launched.of_segments(table)

    def _for_graphs(self, others: Sequence[int]) -> list[StackScalars | None]:
        """Return the scalars of the stacks that graphs move, None of those that kernels
        move.
        """
        assert self._decision is not None
        self._of_graphs = self._of_graphs or step.per_stack(
            self._groups, self._decision
        )
        return [s if i in others else None for i, s in enumerate(self._of_graphs)]

    # ---- which launch moves which tensors --------------------------------------------

    def _is_off(self, stacks: Sequence[Stack]) -> bool:
        """Whether a mode wants to see every operation, or there is no memory."""
        return declined() is not None or (bool(stacks) and is_fake(stacks[0].x))

    def _sets_of(
        self, function: Move, active: list[int], stacks: Sequence[Stack], given: Given
    ) -> Sets:
        """Return the sets of a launch of ``step.update`` or ``step.apply``."""
        key = function, tuple(active), *given
        if key not in self._sets:
            self._sets[key] = self._find_sets(function, active, stacks, given)
        return self._sets[key]

    def _find_sets(
        self, function: Move, active: list[int], stacks: Sequence[Stack], given: Given
    ) -> Sets:
        num_columns = {
            algorithm: _num_columns(algorithm, stacks[0].x.device)
            for algorithm in dict.fromkeys(stacks[i].algorithm for i in active)
        }
        together: list[tuple[tuple[int, Dtypes], UpdateKernel | None, list[int]]] = []
        for i in active:
            stack = stacks[i]
            operands = {name: tensors[i] for name, tensors in given.items()}
            dtypes = _dtypes(function, stack, operands)
            num = num_columns[stack.algorithm] + (function is step.apply)
            kernel = self._kernel(function, stack, dtypes, num)
            key = self._places[i][0], dtypes
            if together and together[-1][:2] == (key, kernel):
                together[-1][2].append(i)
            else:
                together.append((key, kernel, [i]))
        sets, others = [], list[int]()
        for (_, dtypes), kernel, positions in together:
            if kernel is None:
                others += positions
            else:
                sets.append(
                    self._launch_set(function, kernel, positions, dtypes, stacks)
                )
        return sets, others

    def _kernel(
        self, function: Move, stack: Stack, dtypes: Dtypes, num_columns: int
    ) -> UpdateKernel | None:
        """Return the kernel that moves a stack; None if graphs have to: it is of a
        user's component, or its parts or positions are no runs.
        """
        algorithm, x = stack.algorithm, stack.x
        kind = formula(algorithm)
        if not kind.is_shared or stack.num_tensors != 1:
            return None
        needs_order = algorithm.matrix_only or stack.rows is not None
        alike = all(b.stride() == x.stride() for b in stack.buffers.values())
        is_run = x.is_contiguous() if needs_order else _is_dense(x)
        if not (alike and is_run):
            return None
        if algorithm.stochastic_rounding and position_of(stack, 0) is None:
            return None
        try:
            return moving_kernel(function, kind, dtypes, num_columns)
        except Unprintable as error:
            self._say(
                logging.INFO,
                f"graphs move the tensors of {algorithm}: no kernel has {error}",
            )
            return None

    def _launch_set(
        self,
        function: Move,
        kernel: UpdateKernel,
        positions: list[int],
        dtypes: Dtypes,
        stacks: Sequence[Stack],
    ) -> LaunchSet:
        pieces = [stacks[i].x[0] for i in positions]
        device = pieces[0].device
        sizes, rows, tensors, starts, scales = [], [], [], [], list[float]()
        places = list[tuple[int, int, int]]()
        for n, i in enumerate(positions):
            stack, (_, first) = stacks[i], self._places[i]
            by_matrix = function is step.apply
            of_matrices = _scales(stack) if by_matrix else [1.0]
            for segment in segments_of(stack, by_matrix):
                tensors.append(n)
                starts.append(segment.start)
                sizes.append(segment.size)
                rows.append(first + segment.part)
                scales.append(of_matrices[segment.matrix % len(of_matrices)])
                if stack.algorithm.stochastic_rounding:
                    position = position_of(stack, segment.start)
                    assert position is not None
                    places.append(position)
        fixed: dict[str, list[int] | None] = dict.fromkeys(name for name, _ in dtypes)
        for name in fixed.keys() - {"g", "o"}:
            held = [stacks[i].buffers.get(name, stacks[i].x) for i in positions]
            fixed[name] = list(map(Tensor.data_ptr, held))
        offsets = torch.tensor(starts, dtype=torch.int64)
        kinds = [dtype for _, dtype in dtypes]
        return LaunchSet(
            positions,
            self._places[positions[0]][0],
            rows,
            kernel,
            Parts(sizes, device, positions=places or None),
            AddressTable(kinds, tensors, offsets, device),
            dtypes,
            fixed,
            pieces,
            torch.tensor(scales, dtype=working_dtype(pieces[0]), device=device)[
                :, None
            ],
        )


def _first(stacks: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the one tensor of each stack."""
    return [None if stack is None else stack[0] for stack in stacks]


def _scales(stack: Stack) -> list[float]:
    """Return the preconditioner's ``scale`` of each matrix in a batch of a tensor."""
    algorithm = stack.algorithm
    shapes = algorithm.matrices.part_shapes(stack.shape)
    return [algorithm.matrix_preconditioner.scale(*shape) for shape in shapes]


def _dtypes(function: Move, stack: Stack, given: Mapping[str, Tensor | None]) -> Dtypes:
    """Return the dtypes of a launch's operands, some of which a step has ``given``."""
    operands: dict[str, Tensor | None] = {"x": stack.x, **given}
    if function is step.update:
        operands |= stack.buffers
    pairs = operands.items()
    return tuple((name, t.dtype) for name, t in pairs if t is not None)


def _num_columns(algorithm: Algorithm, device: torch.device) -> int:
    """Return how many columns ``StepScalars.table`` has."""
    num = len(algorithm.scalars(torch.ones(1, device=device), 1.0, 0.0))
    num += 1 if algorithm.h_from is None else 2  # weights
    num += 1 if algorithm.h_from == "step" else 0
    return num + 2 * algorithm.stochastic_rounding


def _is_dense(x: Tensor) -> bool:
    """Whether the elements of a stack fill a run of memory, in whatever order."""
    order = sorted(range(x.ndim), key=x.stride, reverse=True)
    return x.permute(order).is_contiguous()
