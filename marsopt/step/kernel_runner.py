"""The runner of printed kernels: on a GPU one launch updates all tensors of a formula.
Graphs take formulas that the printer does not know, and tensors with gaps in memory.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from marsopt.rules.dtypes import working
from marsopt.step import step
from marsopt.step.compiling import named_range
from marsopt.step.expressions import Unprintable
from marsopt.step.graph_runner import (
    Graphs,
    batch_dtype,
    dense_view,
    matrix_outputs,
    widest,
)
from marsopt.step.kernels import AddressTable, Blocks, SumsKernel, UpdateKernel
from marsopt.step.printer import print_sums, print_update
from marsopt.step.step import Gradients, Group, Leaf, Place
from marsopt.step.tables import Decision, Formula, StepScalars, formula, num_columns

KEPT = 256  # kernels of the process, the latest

Dtypes = tuple[tuple[str, torch.dtype], ...]  # of operands, by name


@lru_cache(maxsize=KEPT)
def update_kernel(kind: Formula, operands: Dtypes, num_columns: int) -> UpdateKernel:
    """Return the kernel of a formula's ``step.new_values``.

    Args:
        kind: the formula.
        operands: x, g, buffers by symbol and, if the matrices for owners have a tensor
            of their own, o.
        num_columns: of the table of scalars.

    Raises:
        Unprintable: an operator has no Triton expression.
    """
    algorithm, dtypes = kind.algorithm, dict(operands)
    unread = torch.empty(())  # a kernel reads ok by itself

    def body(
        tensors: dict[str, Tensor], columns: tuple[Tensor, ...], position: Tensor
    ) -> dict[str, Tensor]:
        s = StepScalars.read(algorithm, unread, columns)
        buffers = {k: v for k, v in tensors.items() if k in algorithm.buffers}
        index = position if algorithm.stochastic_rounding else None
        x, g = tensors["x"], tensors["g"]
        out, new = step.new_values(algorithm, s, x, g, buffers, index)
        if not algorithm.matrix_only:
            assert out is not None
            return {"x": out, **new}
        return {**new, "o": new["m"] if out is None else out} if "o" in dtypes else new

    dtype = torch.promote_types(dtypes["x"], torch.float32)
    title = f"update of {algorithm}"
    return UpdateKernel(print_update(title, body, dtypes, num_columns, dtype))


@lru_cache(maxsize=KEPT)
def apply_kernel(kind: Formula, operands: Dtypes, num_columns: int) -> UpdateKernel:
    """Return the kernel that moves x of a matrix algorithm, from x and o; arguments and
    exception are as of ``update_kernel``.
    """
    algorithm, dtypes = kind.algorithm, dict(operands)
    unread = torch.empty(())

    def body(
        tensors: dict[str, Tensor], columns: tuple[Tensor, ...], position: Tensor
    ) -> dict[str, Tensor]:
        s = StepScalars.read(algorithm, unread, columns)
        assert s.scale is not None
        x, o = working(tensors["x"]), working(tensors["o"])
        return {"x": algorithm.matrix_preconditioner.apply(x, o, s.rule, s.scale)}

    dtype = torch.promote_types(dtypes["x"], torch.float32)
    title = f"apply of {algorithm}"
    return UpdateKernel(print_update(title, body, dtypes, num_columns, dtype))


@lru_cache(maxsize=KEPT)
def sums_kernel(operands: Dtypes) -> SumsKernel:
    """Return the kernel of ``step.products``: of g and, if there is one, h."""

    def body(tensors: dict[str, Tensor]) -> list[Tensor]:
        h = working(tensors["h"]) if "h" in tensors else None
        return step.product_terms(working(tensors["g"]), h)

    names = " and ".join(name for name, _ in operands)
    return SumsKernel(print_sums(f"sums of {names}", body, dict(operands)))


class LaunchSet:
    """Leaves of a formula that one launch updates.

    Args:
        group: the tensors of the formula.
        members: which of its leaves, by number.
        operands: names and dtypes: "g" and "o" are given to each launch, the rest lies
            with the leaves.
    """

    def __init__(
        self, group: Group, members: Sequence[int], operands: Mapping[str, torch.dtype]
    ) -> None:
        self.members, self.dtypes = list(members), dict(operands)
        leaves = [group.leaves[i] for i in members]
        self._leaves = leaves
        device = leaves[0].x.device
        sizes = [size for leaf in leaves for size in leaf.parts.sizes]
        tensors = [n for n, leaf in enumerate(leaves) for _ in leaf.parts.sizes]
        starts = [
            number * leaf.parts.sizes[0]
            for leaf in leaves
            for number in range(leaf.parts.num)
        ]
        numbers = [leaf.numbers for leaf in leaves if leaf.numbers is not None]
        positions = torch.cat(numbers) if numbers else None
        self.blocks = Blocks(sizes, device, positions=positions)
        kinds = list(self.dtypes.values())
        self._table = AddressTable(kinds, tensors, torch.tensor(starts), device)
        self._fixed = {
            name: None
            if name in ("g", "o")
            else [leaf.buffers.get(name, leaf.x).data_ptr() for leaf in leaves]
            for name in self.dtypes
        }
        self._strides = [leaf.x.stride() for leaf in leaves]
        rows_of = [group.rows[i] for i in members]
        first, last = rows_of[0].start, rows_of[-1].stop
        # of these leaves, in a table of the group's parts
        self.rows: slice | Tensor = slice(first, last)
        if len(sizes) != last - first:
            parts = [n for rows in rows_of for n in range(rows.start, rows.stop)]
            self.rows = torch.tensor(parts, device=device)

    def laid_out(
        self, name: str, tensors: Sequence[Tensor | None]
    ) -> tuple[list[Tensor | None], int]:
        """Return an operand of this step in its dtype, laid out as the leaves, and how
        many of its tensors had to be copied for that.
        """
        dtype, num_copied = self.dtypes[name], 0
        laid: list[Tensor | None] = list(tensors)
        present = [tensor for tensor in tensors if tensor is not None]
        if (
            len(present) == len(laid)
            and list(map(Tensor.stride, present)) == self._strides
            and {tensor.dtype for tensor in present} == {dtype}
        ):
            return laid, 0
        for n, tensor in enumerate(tensors):
            if tensor is None:
                continue
            if tensor.dtype != dtype or tensor.stride() != self._strides[n]:
                x = self._leaves[n].x
                copy = torch.empty_like(x, dtype=dtype)
                laid[n], num_copied = copy.copy_(tensor.view_as(x)), num_copied + 1
        return laid, num_copied

    def addresses(self, given: Mapping[str, Sequence[Tensor | None]]) -> Tensor:
        """Return the addresses on the device; ``given`` are this step's operands. A
        missing tensor has the address 0: it reads as zeros.
        """
        lists = []
        for name, fixed in self._fixed.items():
            if fixed is None:
                fixed = [0 if t is None else t.data_ptr() for t in given[name]]
            lists.append(fixed)
        return self._table.on_device(lists)


class Kernels(Graphs):
    """A runner that launches printed kernels over tensors where they lie.

    Args:
        groups, kwargs: as ``Graphs`` has them.
    """

    def __init__(self, groups: Sequence[Group], **kwargs: Any) -> None:
        self.num_copied = 0  # gradients and directions that lie otherwise than leaves
        self._say = kwargs["say"]
        self._columns = [num_columns(group.algorithm) for group in groups]
        self._printed = [self._printable(*item) for item in enumerate(groups)]
        self._taken = list(map(set, self._printed))
        self._sets: dict[Any, LaunchSet] = {}
        self._all = groups
        super().__init__(groups, taken=self._printed, **kwargs)

    def _printable(self, number: int, group: Group) -> list[int]:
        """Return the leaves of a group that kernels update: none of a user's component,
        none with gaps in its memory, and none with other numbers of elements than
        runs.
        """
        kind = formula(group.algorithm)
        if not kind.is_shared:
            return []
        members = [i for i, leaf in enumerate(group.leaves) if _is_dense(leaf)]
        if not members:
            return []
        leaf, columns = group.leaves[members[0]], self._columns[number]
        operands = _operands(group, leaf, leaf.x.dtype)
        if group.algorithm.matrix_only and group.algorithm.makes_matrix:
            operands["o"] = batch_dtype(group.algorithm, leaf.x)
        try:
            update_kernel(kind, tuple(operands.items()), columns)
        except Unprintable as error:
            self._say(
                logging.INFO,
                f"graphs move the tensors of {group.algorithm}: no kernel has {error}",
            )
            return []
        return members

    @property
    def kernels(self) -> list[tuple[UpdateKernel | SumsKernel, LaunchSet]]:
        """Return the kernels that were launched, each with its leaves."""
        return [(kernel, launched) for (kernel, *_), launched in self._sets.items()]

    # ---- the parts of a step ---------------------------------------------------------

    def measure(self, groups: Sequence[Group], grads: Gradients) -> list[Tensor]:
        sums = super().measure(groups, grads)
        with named_range("marsopt: norms"):
            for number, members in enumerate(self._printed):
                if members:
                    self._launch_sums(number, members, grads[number], sums)
        return sums

    def _launch_sums(
        self,
        number: int,
        members: list[int],
        grads: Sequence[Tensor | None],
        sums: list[Tensor],
    ) -> None:
        group = self._all[number]
        of_members = [grads[i] for i in members]
        names = ["g"] if group.algorithm.h_from is None else ["g", "h"]
        operands = _operands(
            group, group.leaves[members[0]], widest(of_members, torch.float32)
        )
        operands = {name: operands[name] for name in names}
        kernel = sums_kernel(tuple(operands.items()))
        launched = self._set(kernel, number, members, operands)
        laid, num = launched.laid_out("g", of_members)
        self.num_copied += num
        totals = kernel(launched.blocks, launched.addresses({"g": laid}))
        if len(members) == len(group.leaves):
            sums[number] = totals
        else:
            sums[number][launched.rows] = totals.to(sums[number].dtype)

    def start(
        self, groups: Sequence[Group], grads: Gradients, decision: Decision
    ) -> None:
        self._decision = decision
        super().start(groups, grads, decision)

    def _moves(self, place: Place) -> bool:
        number, i = place
        return i in self._taken[number] or super()._moves(place)

    def _update(
        self, number: int, members: list[int], outputs: dict[Place, Tensor]
    ) -> None:
        super()._update(number, members, outputs)
        members = [i for i in members if i in self._taken[number]]
        if not members:
            return
        group, grads = self._all[number], [self._grads[number][i] for i in members]
        algorithm, leaves = group.algorithm, [group.leaves[i] for i in members]
        operands = _operands(group, leaves[0], widest(grads, leaves[0].x.dtype))
        given: dict[str, Sequence[Tensor | None]] = {"g": grads}
        if algorithm.matrix_only:
            made = matrix_outputs(algorithm, leaves, self._is_batch)
            outputs |= {(number, i): o for i, o in zip(members, made, strict=True)}
            if self._is_batch or algorithm.makes_matrix:
                operands["o"], given["o"] = made[0].dtype, made
        kernel = update_kernel(
            formula(algorithm), tuple(operands.items()), self._columns[number]
        )
        self._launch(kernel, number, members, operands, given)

    def _apply(
        self, number: int, members: list[int], directions: dict[Place, Tensor]
    ) -> None:
        super()._apply(number, members, directions)
        members = [i for i in members if i in self._taken[number]]
        if not members:
            return
        group, given = self._all[number], [directions[number, i] for i in members]
        operands = {"x": group.leaves[members[0]].x.dtype, "o": given[0].dtype}
        kernel = apply_kernel(
            formula(group.algorithm),
            tuple(operands.items()),
            self._columns[number],
        )
        self._launch(kernel, number, members, operands, {"o": given})

    def _launch(
        self,
        kernel: UpdateKernel,
        number: int,
        members: list[int],
        operands: Mapping[str, torch.dtype],
        given: dict[str, Sequence[Tensor | None]],
    ) -> None:
        launched = self._set(kernel, number, members, operands)
        laid = {}
        for name, tensors in given.items():
            laid[name], num = launched.laid_out(name, tensors)
            self.num_copied += num
        ok = self._decision.ok_parts[number][launched.rows]
        table = self._decision.tables[number][launched.rows]
        kernel(launched.blocks, launched.addresses(laid), ok, table)

    def _set(
        self,
        kernel: UpdateKernel | SumsKernel,
        number: int,
        members: list[int],
        operands: Mapping[str, torch.dtype],
    ) -> LaunchSet:
        key = kernel, number, tuple(members)
        if key not in self._sets:
            self._sets[key] = LaunchSet(self._all[number], members, operands)
        return self._sets[key]


def _is_dense(leaf: Leaf) -> bool:
    """Return whether a kernel finds the parts of a leaf in its memory."""
    if any(t.stride() != leaf.x.stride() for t in leaf.tensors):
        return False
    has_runs = leaf.numbers is None or leaf.numbers.ndim == 2
    return has_runs and dense_view(leaf.x, leaf.parts) is not None


def _operands(group: Group, leaf: Leaf, g: torch.dtype) -> dict[str, torch.dtype]:
    """Return the operands of an update but for o."""
    buffers = {name: buffer.dtype for name, buffer in leaf.buffers.items()}
    return {"x": leaf.x.dtype, "g": g, **buffers}
