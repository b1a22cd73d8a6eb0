"""The runner of printed kernels: on a GPU one launch updates all tensors of a formula.
Graphs take formulas of a user's components, and formulas with an operator that the
printer lacks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, reduce
from typing import Any

import torch
from torch import Tensor

from marsopt.rules.component import Algorithm
from marsopt.rules.numerics import working
from marsopt.step.decide import StepScalars, num_columns
from marsopt.step.expressions import Unprintable
from marsopt.step.graphs import KEPT, Graphs, Say
from marsopt.step.kernels import AddressTable, Blocks, SumsKernel, UpdateKernel
from marsopt.step.printer import print_sums, print_update
from marsopt.step.step import (
    Formula,
    Group,
    Leaves,
    Operands,
    Result,
    Results,
    product_terms,
    updated,
)

Dtypes = tuple[tuple[str, torch.dtype], ...]  # of operands, by name
GIVEN = ("g", "o")  # operands that each step gives; leaves hold x and buffers


@lru_cache(maxsize=KEPT)
def update_kernel(
    function: Formula, algorithm: Algorithm, operands: Dtypes
) -> UpdateKernel:
    """Return the kernel of a formula.

    Args:
        function: the formula.
        algorithm: its algorithm.
        operands: the tensors of ``function``.

    Raises:
        Unprintable: an operator has no Triton expression.
    """
    dtypes = dict(operands)

    def body(
        tensors: dict[str, Tensor], columns: tuple[Tensor, ...], position: Tensor
    ) -> dict[str, Tensor]:
        s = StepScalars.read(algorithm, columns)
        return function(algorithm, s, tensors, position)

    dtype = torch.promote_types(dtypes["x"], torch.float32)
    title = f"{function.__name__} of {algorithm}"
    num = num_columns(algorithm)
    return UpdateKernel(print_update(title, body, dtypes, num, dtype))


@lru_cache(maxsize=KEPT)
def sums_kernel(operands: Dtypes) -> SumsKernel:
    """Return the kernel of ``step.products``, over g and, if operands have it, h."""

    def body(tensors: dict[str, Tensor]) -> list[Tensor]:
        h = working(tensors["h"]) if "h" in tensors else None
        return product_terms(working(tensors["g"]), h)

    names = " and ".join(name for name, _ in operands)
    return SumsKernel(print_sums(f"sums of {names}", body, dict(operands)))


class LaunchSet:
    """The parts of leaves that one launch goes over.

    Args:
        leaves: of one formula.
        dtypes: of operands, by name.
    """

    def __init__(self, leaves: Leaves, dtypes: Mapping[str, torch.dtype]) -> None:
        self.leaves, self._dtypes = leaves, dtypes
        xs = [leaf.x for leaf in leaves.leaves]
        device = xs[0].device
        sizes = [x.shape[1] for x in xs for _ in range(x.shape[0])]
        tensors = [n for n, x in enumerate(xs) for _ in range(x.shape[0])]
        starts = [i * x.shape[1] for x in xs for i in range(x.shape[0])]
        offsets = torch.tensor(starts, dtype=torch.int64, device="cpu")
        self.blocks = Blocks(sizes, offsets, device)
        self._table = AddressTable([*dtypes.values()], tensors, offsets, device)
        self._fixed = {
            name: None
            if name in GIVEN
            else [tensor.data_ptr() for tensor in leaves.operands[name]]
            for name in dtypes
        }
        rows = leaves.rows
        first, last = rows[0].start, rows[-1].stop
        # of these leaves, in a table of their group's parts
        self.rows: slice | Tensor = slice(first, last)
        if len(sizes) != last - first:
            parts = [n for each in rows for n in range(each.start, each.stop)]
            self.rows = torch.tensor(parts, device=device)

    def addresses(self, operands: Operands) -> Tensor:
        """Return the addresses on the device. A missing tensor has the address 0: it
        reads as zeros.

        Raises:
            ValueError: a subclass of Tensor has elements, and no memory of its own.
        """
        lists = []
        for name, fixed in self._fixed.items():
            if fixed is None:
                fixed = [0 if t is None else t.data_ptr() for t in operands[name]]
                if 0 in fixed:
                    check_memory(operands[name])
            lists.append(fixed)
        return self._table.on_device(lists)


def check_memory(tensors: Sequence[Tensor | None]) -> None:
    """Check that a tensor without an address has no elements: it reads as zeros.

    Raises:
        ValueError: it has.
    """
    for x in tensors:
        if x is not None and x.numel() and not (x.data_ptr() or x.is_meta):
            raise ValueError(
                "got a gradient without memory of its own, as subclasses of Tensor "
                "have it, expected a plain tensor: convert it"
            )


def in_one_dtype(
    tensors: Sequence[Tensor | None], default: torch.dtype
) -> tuple[torch.dtype, list[Tensor | None]]:
    """Return the dtype that holds all of these, ``default`` if there are none, and the
    tensors in it.
    """
    dtypes = dict.fromkeys(x.dtype for x in tensors if x is not None)
    dtype = reduce(torch.promote_types, dtypes) if dtypes else default
    return dtype, [x if x is None or x.dtype == dtype else x.to(dtype) for x in tensors]


class Kernels:
    """A runner that launches printed kernels over tensors in their own memory.

    Args:
        groups: the tensors of a step.
        graphs: the runner of groups without kernels.
        say: told, with a level of logging, why graphs take a group.
    """

    writes = True

    def __init__(self, groups: Sequence[Group], graphs: Graphs, say: Say) -> None:
        self._graphs, self._say = graphs, say
        self._sets: dict[Any, tuple[UpdateKernel | SumsKernel, LaunchSet]] = {}
        self.printed = {g.algorithm for g in groups if self._has_kernel(g)}

    def _has_kernel(self, group: Group) -> bool:
        """Return whether a kernel computes a group's update. A user's component may
        read numbers that are in no key of a kernel.
        """
        algorithm = group.algorithm
        if not algorithm.is_built_in:
            return False
        # in the order of a step: it takes this kernel
        dtypes = {name: column[0].dtype for name, column in group.operands.items()}
        dtypes["g"] = dtypes["x"]
        if algorithm.matrix_only:
            cost = algorithm.matrix_preconditioner.cost
            cost = cost.on(group.leaves[0].x.device.type)
            dtypes["o"] = cost.payload(group.inputs.dtype)
        try:
            update_kernel(updated, algorithm, tuple(dtypes.items()))
        except Unprintable as error:
            self._say(
                logging.INFO,
                f"graphs update the tensors of {algorithm}: no kernel has {error}",
            )
            return False
        return True

    @property
    def kernels(self) -> list[tuple[UpdateKernel | SumsKernel, LaunchSet]]:
        """Return the kernels that were launched, each with its leaves."""
        return list(self._sets.values())

    def reduce(self, leaves: Leaves, grads: Sequence[Tensor | None]) -> Tensor:
        if leaves.algorithm not in self.printed:
            return self._graphs.reduce(leaves, grads)
        dtype, grads = in_one_dtype(grads, torch.float32)
        operands, dtypes = {"g": grads}, {"g": dtype}
        if (hs := leaves.operands.get("h")) is not None:
            operands["h"], dtypes["h"] = [*hs], hs[0].dtype
        kernel, launched = self._set(sums_kernel, (), leaves, dtypes)
        totals: Tensor = kernel(launched.blocks, launched.addresses(operands))
        return totals

    def map(
        self,
        function: Formula,
        leaves: Leaves,
        operands: Operands,
        ok: Tensor,
        table: Tensor,
    ) -> list[Results | None]:
        if leaves.algorithm not in self.printed:
            return self._graphs.map(function, leaves, operands, ok, table)
        columns, dtypes = dict[str, Sequence[Tensor | None]](), {}
        default = leaves.leaves[0].x.dtype
        for name, column in operands.items():
            columns[name], dtypes[name] = column, default
            if name in GIVEN:
                dtypes[name], columns[name] = in_one_dtype(column, default)
            elif column[0] is not None:
                dtypes[name] = column[0].dtype
        given = [columns[name] for name in GIVEN if name in columns]
        missing = {i for column in given for i, x in enumerate(column) if x is None}
        of_leaves = enumerate(zip(*columns.values(), strict=True))
        results: list[Any] = [
            None if i in missing else dict(zip(columns, of_leaf, strict=True))
            for i, of_leaf in of_leaves
        ]
        if len(missing) == len(results):
            return results
        arguments = function, leaves.algorithm
        kernel, launched = self._set(update_kernel, arguments, leaves, dtypes)
        addresses = launched.addresses(columns)
        kernel(launched.blocks, addresses, ok[launched.rows], table[launched.rows])
        return results

    def small(self, function: Callable[..., Result], *args: Any) -> Result:
        return self._graphs.small(function, *args)

    def _set(
        self,
        made_by: Callable[..., Any],
        arguments: tuple[Any, ...],
        leaves: Leaves,
        dtypes: Mapping[str, torch.dtype],
    ) -> tuple[Any, LaunchSet]:
        """Return a kernel and its tensors: both stay with the runner, however many
        other kernels the process has.
        """
        key = made_by, arguments, id(leaves), tuple(dtypes.items())
        if key not in self._sets:
            kernel = made_by(*arguments, tuple(dtypes.items()))
            self._sets[key] = kernel, LaunchSet(leaves, dtypes)
        return self._sets[key]
