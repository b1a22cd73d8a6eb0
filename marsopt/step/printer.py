"""Prints an elementwise function as one Triton kernel for all parts of a formula.

A part is a contiguous run of elements with one row of scalars. A program handles one
block of one part: it loads the part's addresses from a table on the device. If all its
operands are aligned and the block is whole, it accesses 16 bytes at a time; every other
block is masked, and right at any address.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from marsopt.rules.formats import span_of
from marsopt.step.decide import Form, decide_row
from marsopt.step.expressions import (
    Body,
    cast,
    computing_dtype,
    print_body,
    triton_dtype,
)
from marsopt.step.source import (
    DECISION,
    ROWS_OF,
    SUMS,
    UPDATE,
    Block,
    Operands,
    formula_source,
    indented,
    kernel_name,
    totals_source,
)

BLOCK = 4096  # elements of a program
OPTIONS = {  # of Triton's compiler
    "num_warps": 4,  # on an H200 8,192 elements by 8 warps take 1.12 times as long
    # as it was timed, by whatever version: Triton 3.10 changes the default
    "enable_fp_fusion": True,
}
# elements of an unmasked pass of a block's loop, by the registers that one element's
# operands take, at most: more elements spill
WIDE = {5: 4096, 9: 2048, 1 << 30: 1024}
NARROW = 1024  # elements of a masked pass
CHUNK = 1024  # blocks: so many sums are added at once
ROWS = 128  # tensors: so many are decided about at once; with 256 some kernels spill

Update = Callable[[dict[str, Tensor], tuple[Tensor, ...], Tensor], Mapping[str, Tensor]]
Sums = Callable[[dict[str, Tensor]], Sequence[Tensor]]


@dataclass(frozen=True)
class Printed:
    """A formula's Triton source, and the operands that it loads and stores."""

    name: str  # of the Triton function
    source: str
    operands: Operands
    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()
    num_columns: int = 0  # scalars of a part, if this is an update
    column_dtype: torch.dtype = torch.float32
    num_terms: int = 0  # sums of a part; 0: this is an update
    has_position: bool = False  # whether it reads the elements' numbers, int64

    @cached_property
    def wide(self) -> int:
        """Elements of an unmasked pass of the loop: operands stay in registers."""
        names = [n for n in {*self.reads, *self.writes} if span_of(n) == 1]
        sizes = [self.operands[n].itemsize for n in names]
        # an operand of 16 bits is there packed and unpacked
        registers = sum(2 if size < 4 else size // 4 for size in sizes)
        registers += 2 * self.has_position
        return next(step for most, step in WIDE.items() if registers <= most)

    @cached_property
    def narrow(self) -> int:
        """Elements of a masked pass of the loop: finding a scale takes registers."""
        has_scales = any(span_of(name) > 1 for name in self.operands)
        return NARROW // 2 if has_scales else NARROW

    @property
    def bytes_read(self) -> float:
        """Bytes of the operands that the kernel loads for one element."""
        return sum(self.operands[n].itemsize / span_of(n) for n in self.reads)

    @property
    def bytes_written(self) -> float:
        """Bytes of the operands that the kernel stores for one element."""
        return sum(self.operands[n].itemsize / span_of(n) for n in self.writes)


def print_update(
    title: str,
    body: Update,
    operands: Operands,
    num_columns: int,
    column_dtype: torch.dtype = torch.float32,
) -> Printed:
    """Print a kernel that stores the results of ``body``, in parts that move.

    Args:
        title: names the formula, in its source and in a profiler's trace.
        body: ``body(tensors, columns, position)``, pure: operands by name (1, n), in
            their own dtypes; scalars of the part (1, 1); numbers (1, n), int64, of the
            elements in their tensor. It returns new values by the names of their
            operands.
        operands: dtypes by name, in the order of the address table.
        num_columns: scalars of a part.
        column_dtype: their dtype.

    Raises:
        Unprintable: an operator of ``body`` has no Triton expression.
    """
    num_operands, written = len(operands), dict[str, None]()

    def flat(*values: Tensor) -> list[Tensor]:
        tensors = dict(zip(operands, values, strict=False))
        new = body(tensors, values[num_operands + 1 :], values[num_operands])
        written.update(dict.fromkeys(name for name in operands if name in new))
        assert len(new) == len(written), f"no operands: {new.keys() - operands.keys()}"
        return [new[name] for name in written]

    columns = {f"s{i}": column_dtype for i in range(num_columns)}
    traced = print_body(flat, {**operands, "position": torch.int64}, columns)
    name, writes = kernel_name(title), tuple(written)
    block = Block(operands, traced, writes)
    values = [
        cast(value, operands[name]).text
        for name, value in zip(writes, traced.results, strict=True)
    ]
    rows = [
        f"{column} = tl.load(scalars + {num_columns} * part + {i})"
        for i, column in enumerate(columns)
        if column in traced.used
    ]
    call = f"{', '.join(f'new_{name}' for name in writes)} = {{call}}"
    wide = [call, *(f"tl.store({name}, new_{name})" for name in writes)]
    masked = [call]
    masked += [f"tl.store({name}, new_{name}, mask=has_{name})" for name in writes]
    lines = [*block.head(), *rows, *block.branches(wide, masked)]
    source = formula_source(title, traced, values)
    source += UPDATE.format(name=name, lines=indented(lines, 8))
    return Printed(
        name,
        source,
        dict(operands),
        block.reads,
        writes,
        num_columns,
        column_dtype,
        has_position=block.has_position,
    )


def print_sums(title: str, body: Sums, operands: Operands) -> Printed:
    """Print a kernel that sums the terms of ``body`` over each block, and a kernel,
    ``{name}_totals``, that adds the blocks of each part.

    Args:
        title: names the formula, in its source and in a profiler's trace.
        body: ``body(tensors)``, pure: operands by name (1, n), in their own dtypes. It
            returns terms (1, n), in the dtype of a block's sum.
        operands: dtypes by name, in the order of the address table.

    Raises:
        Unprintable: an operator of ``body`` has no Triton expression.
    """

    def flat(*values: Tensor) -> list[Tensor]:
        return list(body(dict(zip(operands, values, strict=True))))

    traced = print_body(flat, operands, {})
    name, block = kernel_name(title), Block(operands, traced, ())
    values = [cast(v, computing_dtype(v.dtype)) for v in traced.results]
    num_terms = len(values)
    call = f"{', '.join(f'term{i}' for i in range(num_terms))} = {{call}}"
    zeros, wide, masked, stores = [], [call], [call], []
    for i, value in enumerate(values):
        zeros.append(f"sum{i} = tl.full((), 0.0, {triton_dtype(value.dtype)})")
        wide.append(f"sum{i} += tl.sum(term{i})")
        masked.append(f"sum{i} += tl.sum(tl.where(lanes < size, term{i}, 0.0))")
        stores.append(f"tl.store(partials + {num_terms} * program + {i}, sum{i})")
    lines = [*block.head(), *zeros, *block.branches(wide, masked), *stores]
    source = formula_source(title, traced, [value.text for value in values])
    source += SUMS.format(name=name, lines=indented(lines, 4))
    source += totals_source(name, num_terms)
    return Printed(name, source, dict(operands), block.reads, num_terms=num_terms)


def print_decision(
    forms: Sequence[Form], *, is_clipped: bool, is_alone: bool
) -> Printed:
    """Print the kernel that sums the squared norms, and makes the decision from them
    and from the numbers of param groups.

    Args:
        forms: of each formula.
        is_clipped: whether there is a threshold of the global norm.
        is_alone: whether it gets products, and stores the sums; else it gets sums.

    Raises:
        Unprintable: an operator of ``decide_row`` has no Triton expression.
    """
    width = max(form.num_products for form in forms) + 1
    arguments = ["has_grad"] if is_alone else []
    arguments += ["sums", *(["max_norm"] if is_clipped else [])]
    arguments += ["norm_out", "finite_out", "skipped_out"]
    formulas, sizes = list[str](), [f"num{i}" for i in range(len(forms))]
    squares, checks, stores = list[str](), list[str](), list[str]()
    for i, form in enumerate(forms):
        body, traced = _print_row(i, form, is_clipped)
        formulas.append(body)
        num, num_columns = form.num_products, len(traced.results) - 1
        index = f"tl.load(groups{i} + rows, mask=mask, other=0)"
        start = "".join(f"{size} + " for size in sizes[:i])
        of_sums = f"sums + {width} * ({start}rows)"
        has, source = f"{of_sums} + {width - 1}", of_sums
        if is_alone:
            has, source = f"has_grad + {start}rows", f"products{i} + {num} * rows"
        products = [
            f"p{k} = tl.load({source} + {k}, mask=mask, other=0.0)" for k in range(num)
        ]
        num_numbers = len(form.algorithm.columns)
        loads = [
            *products,
            *(f"s{k} = tl.where(has, p{k}, 0.0)" for k in range(num)),
            f"group = {index if form.has_groups else '0 * rows'}",
            *(
                f"n{k} = tl.load(numbers{i} + {num_numbers} * group + {k})"
                for k in range(num_numbers)
            ),
            *(
                f"{name} = tl.load({name}{i} + rows, mask=mask, other=0)"
                for name in ("t", *dict(form.of_index))
            ),
            *(["threshold = tl.load(max_norm)"] if is_clipped else []),
        ]
        columns = [f"c{k}" for k in range(num_columns)]
        call = f"fits, {', '.join(columns)} = formula{i}({', '.join(traced.used)})"
        sums = [*(f"p{k}" for k in range(num)), *["0.0"] * (width - 1 - num), "count"]
        results = [
            "moves = has.to(tl.int32) > bad",
            f"tl.store(t_out{i} + rows, t + moves.to(tl.float32), mask=mask)",
            f"tl.store(ok_out{i} + rows, moves, mask=mask)",
            *(
                f"tl.store(table_out{i} + {num_columns} * rows + {k}, c{k}, mask=mask)"
                for k in range(num_columns)
            ),
            *(
                f"tl.store({of_sums} + {k}, {value}, mask=mask)"
                for k, value in enumerate(sums if is_alone else [])
            ),
        ]
        square = "square += tl.sum(tl.where(has, p0, 0.0))"
        check = "bad += tl.sum(tl.where(fits | (mask == 0), 0, 1))"
        for loops, lines in (
            (squares, [*products[:1], square]),
            (checks, [*loads, call, check]),
            (stores, [*loads, call, *results]),
        ):
            text = ROWS_OF.format(i=i, has=has, lines=indented(lines, 4))
            loops += text.splitlines()
        tables = [*(["products"] if is_alone else []), "numbers"]
        tables += [*(["groups"] if form.has_groups else []), "t"]
        tables += [*dict(form.of_index), "t_out", "ok_out", "table_out"]
        arguments += [f"{name}{i}" for name in tables]
    source = DECISION.format(
        formulas="\n".join(formulas),
        sizes=sizes,
        tables=arguments,
        arguments=", ".join([*arguments, *sizes]),
        squares=indented(squares, 4),
        checks=indented(checks, 4),
        stores=indented(stores, 4),
    )
    return Printed("decision", source, {}, ())


def _print_row(number: int, form: Form, is_clipped: bool) -> tuple[str, Body]:
    """Return the source of ``decide_row`` for a formula of this number, and the
    function as lines.
    """
    columns = {f"s{k}": torch.float64 for k in range(form.num_products)}
    columns["count"] = torch.float64
    columns |= {f"n{k}": torch.float64 for k in range(len(form.algorithm.columns))}
    columns |= {"t": torch.float32, **dict(form.of_index)}
    scalars = {"square": torch.float64}
    scalars |= {"threshold": torch.float64} if is_clipped else {}

    def row(*values: Tensor) -> list[Tensor]:
        return decide_row(form, dict(zip([*columns, *scalars], values, strict=True)))

    traced = print_body(row, columns, scalars)
    fits, *table = traced.results
    results = [fits.text, *(cast(value, form.dtype).text for value in table)]
    lines = indented([*traced.lines, f"return {', '.join(results)}"], 4)
    inputs = indented(traced.used, 4).replace("\n", ",\n")
    head = f"\n@triton.jit\ndef formula{number}(\n{inputs},\n):\n"
    return f"{head}{lines}\n", traced
