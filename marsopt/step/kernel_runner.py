"""The runner of printed kernels: on a GPU one launch updates all tensors of a formula.
Graphs take formulas of a user's components, and formulas with an operator that the
printer lacks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from marsopt.rules.component import Algorithm
from marsopt.rules.formats import span_of
from marsopt.rules.numerics import working
from marsopt.step.decide import (
    Form,
    Inputs,
    Scalars,
    StepScalars,
    decide,
    decide_alone,
    num_columns,
)
from marsopt.step.expressions import Unprintable
from marsopt.step.graphs import KEPT, Graphs, Say
from marsopt.step.kernels import (
    AddressTable,
    Blocks,
    DecisionKernel,
    Kernel,
    SumsKernel,
    Tables,
    UpdateKernel,
    build,
)
from marsopt.step.printer import print_decision, print_sums, print_update
from marsopt.step.step import (
    REFERENCE,
    Batch,
    Formula,
    Group,
    Leaves,
    Operands,
    Result,
    Results,
    applied,
    product_terms,
    reference,
    updated,
)

Dtypes = tuple[tuple[str, torch.dtype], ...]  # of operands, by name


def in_order(dtypes: dict[str, torch.dtype]) -> Dtypes:
    """Return operands in the order of the table of addresses: h first, since the kernel
    of sums knows no other.
    """
    return tuple(sorted(dtypes.items(), key=lambda item: item[0] not in REFERENCE))


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
    """Return the kernel of ``step.products``, over g and, if operands hold it, h."""

    def body(tensors: dict[str, Tensor]) -> list[Tensor]:
        return product_terms(working(tensors["g"]), reference(tensors))

    names = " and ".join(name for name, _ in operands)
    return SumsKernel(print_sums(f"sums of {names}", body, dict(operands)))


@lru_cache(maxsize=KEPT)
def decision_kernel(
    forms: tuple[Form, ...], is_clipped: bool, is_alone: bool
) -> DecisionKernel:
    """Return the kernel of ``decide.decide`` for formulas of these forms."""
    printed = print_decision(forms, is_clipped=is_clipped, is_alone=is_alone)
    return DecisionKernel(printed, [num_columns(form.algorithm) for form in forms])


class Memory:
    """The parts of a group, and where their operands are.

    Args:
        group: the leaves of a formula.
    """

    def __init__(self, group: Group) -> None:
        xs = group.operands["x"]
        device, shapes = xs[0].device, [x.shape for x in xs]
        sizes = [size for num, size in shapes for _ in range(num)]
        starts = [part * size for num, size in shapes for part in range(num)]
        tensors = [n for n, (num, _) in enumerate(shapes) for _ in range(num)]
        offsets = torch.tensor(starts, dtype=torch.int64, device="cpu")
        self._blocks: dict[Leaves, Blocks] = {group: Blocks(sizes, device)}
        columns = group.operands
        self.dtypes = dict(in_order({n: x[0].dtype for n, x in columns.items()}))
        options: Any = dict(tensors=tensors, offsets=offsets, device=device)
        addresses = [list(map(Tensor.data_ptr, columns[name])) for name in self.dtypes]
        spans = [*map(span_of, self.dtypes)]
        table = AddressTable([*self.dtypes.values()], **options, spans=spans)
        self.fixed = table.on_device(addresses)
        # of g, and of o of each launch, by dtype
        self._given = cache(lambda launch, dtype: AddressTable([dtype], **options))

    def blocks(self, leaves: Leaves) -> Blocks:
        """Return the blocks of some leaves of the group."""
        if leaves not in self._blocks:
            parts = [n for rows in leaves.rows for n in range(rows.start, rows.stop)]
            self._blocks[leaves] = self._blocks[leaves.group].of(parts)
        return self._blocks[leaves]

    def given(
        self, launch: Hashable, leaves: Leaves, tensors: Sequence[Tensor | None]
    ) -> tuple[torch.dtype, Tensor]:
        """Return the dtype and addresses of an operand that each step gives. A missing
        tensor has the address 0: it reads as zeros.

        Args:
            launch: has a table to itself, which is sent if addresses have changed.
            leaves: some leaves of the group.
            tensors: of each of these.

        Raises:
            ValueError: a subclass of Tensor has elements, and no memory of its own.
        """
        if isinstance(tensors, Batch):
            dtype, addresses = tensors.matrices.dtype, tensors.addresses
        else:
            present = (x.dtype for x in tensors if x is not None)
            dtype = next(present, self.dtypes["x"])
            addresses = [0 if x is None else x.data_ptr() for x in tensors]
            if 0 in addresses:
                check_memory(tensors)
        if leaves is not leaves.group:
            places = dict(zip(leaves.places, addresses, strict=True))
            addresses = [places.get(i, 0) for i in leaves.group.places]
        return dtype, self._given(launch, dtype).on_device([addresses])


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
        expected = {group: self.expected(group) for group in groups}
        self._memories = {g: Memory(g) for g, kernels in expected.items() if kernels}
        for group in islice(self._memories, 1):
            if (device := group.leaves[0].x.device).type == "cuda":
                build([*chain.from_iterable(expected.values())], device)
        self._grads: dict[Group, tuple[torch.dtype, Tensor]] = {}
        # by whether there is a clip, and whether one process has everything
        self._decisions: dict[tuple[bool, bool], DecisionKernel | None] = {}
        # the kernels that were launched stay with the runner, however many other
        # kernels the process has
        self._launches: dict[Any, tuple[UpdateKernel | SumsKernel, Blocks]] = {}
        # formulas that kernels compute
        self.printed = frozenset(group.algorithm for group in self._memories)

    def expected(self, group: Group) -> list[SumsKernel | UpdateKernel]:
        """Return the kernels of a group's first step, if gradients are as parameters
        and one process has all matrices; none if graphs update the group. A user's
        component may read numbers that are in no key of a kernel.
        """
        algorithm, device = group.algorithm, group.leaves[0].x.device
        if not algorithm.is_built_in:
            return []
        dtypes = {name: column[0].dtype for name, column in group.operands.items()}
        of_x, dtypes["g"] = {**dtypes}, dtypes["x"]
        of_sums = {n: d for n, d in dtypes.items() if n in ("g", *REFERENCE)}
        kernels: list[SumsKernel | UpdateKernel] = []
        try:
            if algorithm.matrix_only:
                cost = algorithm.cost_on(device)
                of_x["o"] = cost.returned(group.inputs.dtype)
                kernels.append(update_kernel(applied, algorithm, in_order(of_x)))
                dtypes["o"] = cost.payload(group.inputs.dtype)
            kernels.append(update_kernel(updated, algorithm, in_order(dtypes)))
        except Unprintable as error:
            self._say(
                logging.INFO,
                f"graphs update the tensors of {algorithm}: no kernel has {error}",
            )
            return []
        return [*kernels, sums_kernel(in_order(of_sums))]

    @property
    def kernels(self) -> list[tuple[Kernel, int]]:
        """Return the kernels that were launched, and how many elements each goes over:
        a decision goes over none.
        """
        launches = self._launches.values()
        found: list[tuple[Kernel, int]] = [(k, b.num_elements) for k, b in launches]
        return found + [(k, 0) for k in self._decisions.values() if k is not None]

    def reduce(self, leaves: Leaves, grads: Sequence[Tensor | None]) -> Tensor:
        memory = self._memories.get(leaves.group)
        if memory is None:
            return self._graphs.reduce(leaves, grads)
        self._grads[leaves.group] = dtype, addresses = memory.given("g", leaves, grads)
        of_h = {name: d for name, d in memory.dtypes.items() if name in REFERENCE}
        kernel, blocks = self._launch(sums_kernel, (), leaves, {"g": dtype} | of_h)
        totals: Tensor = kernel(blocks, memory.fixed, addresses)
        return totals

    def map(
        self, function: Formula, leaves: Leaves, operands: Operands, scalars: Scalars
    ) -> list[Results]:
        group = leaves.group
        memory = self._memories.get(group)
        if memory is None:
            return self._graphs.map(function, leaves, operands, scalars)
        dtypes, grads, matrices = {**memory.dtypes}, memory.fixed, memory.fixed
        if "g" in operands:
            dtypes["g"], grads = self._grads[group]
        if "o" in operands:
            launch = function, leaves
            dtypes["o"], matrices = memory.given(launch, leaves, operands["o"])
        arguments = function, leaves.algorithm
        kernel, blocks = self._launch(update_kernel, arguments, leaves, dtypes)
        kernel(blocks, Tables(memory.fixed, grads, matrices), *scalars)
        return []

    def small(self, function: Callable[..., Result], *args: Any) -> Result:
        inputs, max_norm = args[0], args[-1]
        is_alone = function is decide_alone
        kernel = None
        if is_alone or function is decide:
            kernel = self._decision(inputs, max_norm is not None, is_alone)
        if kernel is None:
            return self._graphs.small(function, *args)
        if not is_alone:
            return kernel(*args)  # type: ignore[return-value]
        _, products, has_grad, _ = args
        width = max(x.shape[1] for x in products) + 1
        sums = products[0].new_empty(sum(map(len, products)), width)
        decision = kernel(inputs, sums, max_norm, products, has_grad)
        return sums, decision  # type: ignore[return-value]

    def _decision(
        self, inputs: Sequence[Inputs], is_clipped: bool, is_alone: bool
    ) -> DecisionKernel | None:
        """Return the kernel of a decision; None if graphs make it: tensors of several
        norms or parts, a user's component, or an operator that the printer lacks.
        """
        key = is_clipped, is_alone
        if key not in self._decisions:
            forms = tuple(map(Form.of, inputs))
            self._decisions[key] = None
            is_plain = all(i.rows.is_identity for i in inputs)
            if is_plain and all(form.algorithm in self.printed for form in forms):
                with suppress(Unprintable):
                    self._decisions[key] = decision_kernel(forms, *key)
        return self._decisions[key]

    def _launch(
        self,
        made_by: Callable[..., Any],
        arguments: tuple[Any, ...],
        leaves: Leaves,
        dtypes: dict[str, torch.dtype],
    ) -> tuple[Any, Blocks]:
        """Return a kernel, and the blocks of leaves."""
        key = made_by, arguments[:1], leaves, tuple(dtypes.items())
        if key not in self._launches:
            kernel = made_by(*arguments, in_order(dtypes))
            blocks = self._memories[leaves.group].blocks(leaves)
            self._launches[key] = kernel, blocks
        return self._launches[key]
