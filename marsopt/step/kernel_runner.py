"""The runner of printed kernels: on a GPU one launch updates all tensors of a formula.
Graphs take a user's components, formulas with an operator that the printer lacks, and
tensors with gaps in memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from marsopt.rules.algorithm import Algorithm
from marsopt.rules.dtypes import working
from marsopt.step import graph_runner, step
from marsopt.step.compiling import KEPT, named_range
from marsopt.step.expressions import Unprintable
from marsopt.step.graph_runner import (
    Graphs,
    batch_dtype,
    leaf_views,
    matrix_outputs,
    widest,
    writes_matrices,
)
from marsopt.step.kernels import AddressTable, Blocks, SumsKernel, UpdateKernel
from marsopt.step.parts import laid_as
from marsopt.step.printer import print_sums, print_update
from marsopt.step.step import Gradients, Group, Leaf, Place
from marsopt.step.tables import Decision, Formula, StepScalars, formula, num_columns

Dtypes = tuple[tuple[str, torch.dtype], ...]  # of operands, by name


def update(
    algorithm: Algorithm, s: StepScalars, tensors: dict[str, Tensor], position: Tensor
) -> dict[str, Tensor]:
    """Return new values: of x, or of the matrices o for owners if these have a tensor
    of their own, and of the buffers.
    """
    buffers = {k: v for k, v in tensors.items() if k in algorithm.buffers}
    index = position if algorithm.stochastic_rounding else None
    out, new = step.new_values(algorithm, s, tensors["x"], tensors["g"], buffers, index)
    if not algorithm.matrix_only:
        assert out is not None
        return {"x": out, **new}
    return {**new, "o": new["m"] if out is None else out} if "o" in tensors else new


def apply(
    algorithm: Algorithm, s: StepScalars, tensors: dict[str, Tensor], position: Tensor
) -> dict[str, Tensor]:
    """Return the new x of a matrix algorithm, from x and the owners' results o."""
    assert s.scale is not None
    x, o = working(tensors["x"]), working(tensors["o"])
    return {"x": algorithm.matrix_preconditioner.apply(x, o, s.rule, s.scale)}


@lru_cache(maxsize=KEPT)
def update_kernel(
    function: Callable[..., dict[str, Tensor]],
    kind: Formula,
    operands: Dtypes,
    num_columns: int,
) -> UpdateKernel:
    """Return the kernel of ``update`` or ``apply``.

    Args:
        function: ``update`` or ``apply``.
        kind: the formula.
        operands: the tensors of ``function``.
        num_columns: of the table of scalars.

    Raises:
        Unprintable: an operator has no Triton expression.
    """
    algorithm, dtypes = kind.algorithm, dict(operands)
    unread = torch.empty((), device="cpu")  # a kernel reads ok by itself

    def body(
        tensors: dict[str, Tensor], columns: tuple[Tensor, ...], position: Tensor
    ) -> dict[str, Tensor]:
        s = StepScalars.read(algorithm, unread, columns)
        return function(algorithm, s, tensors, position)

    dtype = torch.promote_types(dtypes["x"], torch.float32)
    title = f"{function.__name__} of {algorithm}"
    return UpdateKernel(print_update(title, body, dtypes, num_columns, dtype))


@lru_cache(maxsize=KEPT)
def sums_kernel(operands: Dtypes) -> SumsKernel:
    """Return the kernel of ``step.products``, over g and, if operands have it, h."""

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
        runs = [leaf.positions for leaf in leaves if leaf.positions is not None]
        positions = torch.cat(runs) if runs else None
        self.blocks = Blocks(sizes, device, positions=positions)
        kinds = list(self.dtypes.values())
        self._table = AddressTable(
            kinds, tensors, torch.tensor(starts, device="cpu"), device
        )
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
    ) -> list[Tensor | None]:
        """Return an operand of this step in its dtype, laid out as the leaves."""
        dtype, laid = self.dtypes[name], list(tensors)
        for n, tensor in enumerate(tensors):
            if tensor is None:
                continue
            is_laid = tensor.stride() == self._strides[n] and not tensor.is_neg()
            if tensor.dtype != dtype or not is_laid:
                laid[n] = laid_as(self._leaves[n].x, tensor, dtype)
        return laid

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
    """A runner that launches printed kernels over tensors in their own memory.

    Args:
        groups, kwargs: as ``Graphs`` has them.
    """

    def __init__(self, groups: Sequence[Group], **kwargs: Any) -> None:
        self._all, self._say = groups, kwargs["say"]
        device, is_local = kwargs["device"], kwargs["is_local"]
        self._is_batch = graph_runner.takes_batches(device, is_local)
        self._columns = [num_columns(group.algorithm) for group in groups]
        self._printed = [self._printable(*item) for item in enumerate(groups)]
        self._sets: dict[Any, tuple[UpdateKernel | SumsKernel, LaunchSet]] = {}
        super().__init__(groups, taken=self._printed, **kwargs)
        # of each printed leaf, the leaves of its group that one launch updates
        self._together: dict[Place, list[int]] = {}
        for number, printed in enumerate(map(set, self._printed)):
            for places in self._portions:
                members = [i for n, i in places if n == number and i in printed]
                self._together |= {(number, i): members for i in members}

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
        if writes_matrices(group.algorithm, self._is_batch):
            operands["o"] = batch_dtype(group.algorithm, leaf.x)
        try:
            update_kernel(update, kind, tuple(operands.items()), columns)
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
        return list(self._sets.values())

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
        operands = {"g": widest(of_members, torch.float32)}
        if group.algorithm.h_from is not None:
            operands["h"] = group.leaves[members[0]].buffers["h"].dtype
        arguments = (tuple(operands.items()),)
        kernel, launched = self._set(sums_kernel, arguments, number, members, operands)
        laid = launched.laid_out("g", of_members)
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
        if place in self._together:
            return self._grads[number][i] is not None
        return super()._moves(place)

    def _update(
        self, number: int, members: list[int], outputs: dict[Place, Tensor]
    ) -> None:
        super()._update(number, members, outputs)
        members = [i for i in members if (number, i) in self._together]
        if not members:
            return
        together = self._together[number, members[0]]
        group, grads = self._all[number], [self._grads[number][i] for i in together]
        algorithm, leaves = group.algorithm, [group.leaves[i] for i in members]
        operands = _operands(group, leaves[0], widest(grads, leaves[0].x.dtype))
        given: dict[str, Sequence[Tensor | None]] = {"g": grads}
        if algorithm.matrix_only:
            made = matrix_outputs(algorithm, leaves, self._is_batch)
            outputs |= {(number, i): o for i, o in zip(members, made, strict=True)}
            if writes_matrices(algorithm, self._is_batch):
                operands["o"] = made[0].dtype
                given["o"] = [outputs.get((number, i)) for i in together]
        self._launch(update, number, together, operands, given)

    def _apply(
        self, number: int, members: list[int], directions: dict[Place, Tensor]
    ) -> None:
        super()._apply(number, members, directions)
        members = [i for i in members if (number, i) in self._together]
        if not members:
            return
        together = self._together[number, members[0]]
        given = [directions.get((number, i)) for i in together]
        group, dtype = self._all[number], directions[number, members[0]].dtype
        operands = {"x": group.leaves[members[0]].x.dtype, "o": dtype}
        self._launch(apply, number, together, operands, {"o": given})

    def _launch(
        self,
        function: Callable[..., dict[str, Tensor]],
        number: int,
        members: list[int],
        operands: Mapping[str, torch.dtype],
        given: dict[str, Sequence[Tensor | None]],
    ) -> None:
        kind, columns = formula(self._all[number].algorithm), self._columns[number]
        arguments = function, kind, tuple(operands.items()), columns
        kernel, launched = self._set(
            update_kernel, arguments, number, members, operands
        )
        laid = {name: launched.laid_out(name, x) for name, x in given.items()}
        ok = self._decision.ok_parts[number][launched.rows]
        table = self._decision.tables[number][launched.rows]
        kernel(launched.blocks, launched.addresses(laid), ok, table)

    def _set(
        self,
        made_by: Callable[..., Any],
        arguments: tuple[Any, ...],
        number: int,
        members: list[int],
        operands: Mapping[str, torch.dtype],
    ) -> tuple[Any, LaunchSet]:
        """Return a kernel and its tensors: both stay with the runner, however many
        other kernels the process has.
        """
        key = made_by, arguments, number, tuple(members)
        if key not in self._sets:
            launched = LaunchSet(self._all[number], members, operands)
            self._sets[key] = made_by(*arguments), launched
        return self._sets[key]


def _is_dense(leaf: Leaf) -> bool:
    """Return whether a kernel finds the parts of a leaf in its memory."""
    has_runs = leaf.positions is None or leaf.positions.ndim == 2
    return has_runs and leaf_views(leaf) is not None


def _operands(group: Group, leaf: Leaf, g: torch.dtype) -> dict[str, torch.dtype]:
    """Return the operands of an update but for o."""
    buffers = {name: buffer.dtype for name, buffer in leaf.buffers.items()}
    return {"x": leaf.x.dtype, "g": g, **buffers}
