"""Prints an elementwise function as one Triton kernel for all parts of a formula.

A part is a contiguous run of elements with one row of scalars. A program handles one
block of one part: it loads the part's addresses from a table on the device. If all its
operands are aligned and the block is whole, it accesses 16 bytes at a time; every other
block is masked, and right at any address.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import indent

import torch
from torch import Tensor

from marsopt.step.expressions import DTYPES, Body, cast, computing_dtype, print_body

BLOCK = 4096  # elements of a program
NUM_WARPS = 4  # on an H200 8,192 elements by 8 warps take 1.12 times as long
CHUNK = 1024  # blocks whose sums are added at once
ALIGNMENT = 16  # bytes of the widest access

Operands = Mapping[str, torch.dtype]  # by name, in the order of the address table
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

    @property
    def bytes_read(self) -> int:
        """Bytes of the operands that the kernel loads for one element."""
        return sum(self.operands[name].itemsize for name in self.reads)

    @property
    def bytes_written(self) -> int:
        """Bytes of the operands that the kernel stores for one element."""
        return sum(self.operands[name].itemsize for name in self.writes)


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
            elements in the whole unsharded tensor. It returns new values by the names
            of their operands.
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
    values = [
        cast(value, operands[name]).text
        for name, value in zip(written, traced.results, strict=True)
    ]
    rows = [
        f"{column} = tl.load(scalars + {num_columns} * part + {i})"
        for i, column in enumerate(columns)
        if column in traced.used
    ]
    if "position" in traced.used:
        rows += POSITION.splitlines()
    results = {name: f"new_{name}" for name in written}
    wide = [f"tl.store({name}, {new})" for name, new in results.items()]
    masked = [
        f"tl.store({name}, {new}, mask=has_{name})" for name, new in results.items()
    ]
    block = _block(operands, traced, rows, (*results.values(),), (wide, masked))
    name, reads = _name(title), _reads(operands, traced)
    source = _compute(title, traced, values)
    source += UPDATE.format(name=name, block=indent(block, 8 * " "))
    writes = tuple(written)
    return Printed(
        name, source, dict(operands), reads, writes, num_columns, column_dtype
    )


def print_sums(title: str, body: Sums, operands: Operands) -> Printed:
    """Print a kernel that sums the terms of ``body`` over each block, and a kernel,
    ``{name}_totals``, that adds the blocks of each part.

    Args:
        title: names the formula, in its source and in a profiler's trace.
        body: ``body(tensors)``, pure: operands by name (1, n), in their own dtypes. It
            returns terms (1, n), in the dtype in which a block of them is summed.
        operands: dtypes by name, in the order of the address table.

    Raises:
        Unprintable: an operator of ``body`` has no Triton expression.
    """

    def flat(*values: Tensor) -> list[Tensor]:
        return list(body(dict(zip(operands, values, strict=True))))

    traced = print_body(flat, operands, {})
    values = [cast(v, computing_dtype(v.dtype)).text for v in traced.results]
    num_terms = len(values)
    results = tuple(f"term{i}" for i in range(num_terms))
    stores = [
        f"tl.store(partials + {num_terms} * program + {i}, tl.sum({term}))"
        for i, term in enumerate(results)
    ]
    masks = [f"{term} = tl.where(lanes < size, {term}, 0.0)" for term in results]
    block = _block(operands, traced, [], results, (stores, [*masks, *stores]))
    name, reads = _name(title), _reads(operands, traced)
    source = _compute(title, traced, values)
    source += SUMS.format(name=name, block=indent(block, 4 * " "))
    source += _totals(name, num_terms)
    return Printed(name, source, dict(operands), reads, num_terms=num_terms)


# ---- source --------------------------------------------------------------------------

COMPUTE = """\
# marsopt: {title}
import triton
import triton.language as tl


@triton.jit
def compute({inputs}):
{lines}
"""
# one binary for every number of parts, wherever its tables lie
JIT = """

@triton.jit(
    do_not_specialize=["num_parts"],
    do_not_specialize_on_alignment={pointers},
)
"""
POINTERS = ["addresses", "sizes", "positions", "parts", "blocks"]
UPDATE = (
    JIT.format(pointers=[*POINTERS, "okays", "scalars"])
    + """\
def {name}(
    addresses, sizes, positions, parts, blocks, okays, scalars, num_parts,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    part = tl.load(parts + program)
    if tl.load(okays + part):
{block}
"""
)
SUMS = (
    JIT.format(pointers=[*POINTERS, "partials"])
    + """\
def {name}(
    addresses, sizes, positions, parts, blocks, partials, num_parts,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    part = tl.load(parts + program)
{block}
"""
)
TOTALS = """

@triton.jit(do_not_specialize_on_alignment=["partials", "firsts", "totals"])
def {name}_totals(partials, firsts, totals, CHUNK: tl.constexpr):
    part = tl.program_id(0)
    block = tl.load(firsts + part)
    end = tl.load(firsts + part + 1)
    lanes = tl.arange(0, CHUNK)
{zeros}
    while block < end:
        mask = block + lanes < end
{additions}
        block += CHUNK
{stores}
"""
BLOCK_HEAD = """\
start = tl.load(blocks + program).to(tl.int64) * BLOCK
size = tl.minimum(tl.load(sizes + part) - start, BLOCK).to(tl.int32)
lanes = tl.arange(0, BLOCK)
"""
# elements lie in runs; most blocks lie inside of one and need no division for each
POSITION = """\
base = tl.load(positions + part)
run = tl.load(positions + num_parts + part)
stride = tl.load(positions + 2 * num_parts + part)
column = start % run
position = base + start // run * stride + column + lanes
if column + BLOCK > run:
    index = start + lanes
    position = base + index // run * stride + index % run
"""


def _name(title: str) -> str:
    return re.sub(r"\W+", "_", title)


def _reads(operands: Operands, traced: Body) -> tuple[str, ...]:
    return tuple(name for name in operands if name in traced.used)


def _compute(title: str, traced: Body, values: Sequence[str]) -> str:
    """Return the function of elements, which the kernel calls."""
    lines = [*traced.lines, f"return {', '.join(values)}"]
    body = indent("\n".join(lines), 4 * " ")
    return COMPUTE.format(title=title, inputs=", ".join(traced.used), lines=body)


def _block(
    operands: Operands,
    traced: Body,
    rows: Sequence[str],
    results: Sequence[str],
    stores: tuple[Sequence[str], Sequence[str]],
) -> str:
    """Return the work of a program on its block.

    Args:
        operands: of the address table.
        traced: the function of elements.
        rows: lines that load its other inputs.
        results: names of its results.
        stores: lines that store these, of an aligned and of a masked block.
    """
    wide_stores, masked_stores = stores
    reads = _reads(operands, traced)
    accessed = {
        name: dtype
        for name, dtype in operands.items()
        if name in reads or f"new_{name}" in results
    }
    head = [
        f"{name}_address = tl.load(addresses + {row} * num_parts + part)"
        for row, name in enumerate(operands)
        if name in accessed
    ]
    conditions = ["(size == BLOCK)"]
    bits = " | ".join(f"{name}_address" for name in accessed)
    conditions.append(f"((({bits}) % {ALIGNMENT}) == 0)")
    conditions += [f"({name}_address != 0)" for name in accessed]
    wide, masked = [], []
    for name, dtype in accessed.items():
        address, pointer = f"{name}_address", f".to(tl.pointer_type({DTYPES[dtype]}))"
        wide.append(f"{name} = tl.multiple_of({address}, {ALIGNMENT}){pointer}")
        hint = f"tl.multiple_of({name} + start + lanes, {ALIGNMENT})"
        wide.append(f"{name} = tl.max_contiguous({hint}, {ALIGNMENT})")
        masked.append(f"{name} = {address}{pointer} + start + lanes")
        masked.append(f"has_{name} = (lanes < size) & ({address} != 0)")
    call = f"{', '.join(results)} = compute({{}})"
    others = [name for name in traced.used if name not in reads]
    loads = [f"tl.load({name})" for name in reads]
    wide.append(call.format(", ".join([*loads, *others])))
    loads = [f"tl.load({name}, mask=has_{name}, other=0)" for name in reads]
    masked.append(call.format(", ".join([*loads, *others])))
    tail = [f"if {' & '.join(conditions)}:"]
    tail += [f"    {line}" for line in (*wide, *wide_stores)]
    tail += ["else:"]
    tail += [f"    {line}" for line in (*masked, *masked_stores)]
    return "\n".join([*BLOCK_HEAD.splitlines(), *head, *rows, *tail])


def _totals(name: str, num_terms: int) -> str:
    """Return the kernel that adds the sums of blocks."""
    terms = range(num_terms)
    load = "tl.load(partials + {num} * (block + lanes) + {i}, mask=mask, other=0.0)"
    zeros = [f"sum{i} = tl.zeros((CHUNK,), tl.float64)" for i in terms]
    additions = [f"sum{i} += {load.format(num=num_terms, i=i)}" for i in terms]
    stores = [
        f"tl.store(totals + {num_terms} * part + {i}, tl.sum(sum{i}))" for i in terms
    ]
    return TOTALS.format(
        name=name,
        zeros=indent("\n".join(zeros), 4 * " "),
        additions=indent("\n".join(additions), 8 * " "),
        stores=indent("\n".join(stores), 4 * " "),
    )
