"""The text of a printed kernel: the loads, stores and loops around the function of
elements.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import indent, wrap

import torch

from marsopt.rules.formats import SPAN, span_of
from marsopt.step.expressions import FUNCTIONS, Body, triton_dtype

WIDEST = 16  # bytes of the widest access
# tables of the operands that each step gives; the rest are rows of ``addresses``
GIVEN = {"g": "grads", "o": "matrices"}

Operands = Mapping[str, torch.dtype]  # by name, in the order of the address table

FORMULA = """\
# marsopt: {title}
import triton
import triton.language as tl

{functions}
@triton.jit
def formula(
{inputs}
):
{lines}
"""
# one binary for any number of parts, and any alignment of the tables
UPDATE = """

@triton.jit(
    do_not_specialize=["num_parts"],
    do_not_specialize_on_alignment=[
        "addresses", "grads", "matrices", "sizes", "parts", "blocks", "moves",
        "scalars",
    ],
)
def {name}(
    addresses, grads, matrices, sizes, parts, blocks, moves, scalars, num_parts,
    BLOCK: tl.constexpr, WIDE: tl.constexpr, NARROW: tl.constexpr,
):
    program = tl.program_id(0)
    part = tl.load(parts + program)
    if tl.load(moves + part):
{lines}
"""
SUMS = """

@triton.jit(
    do_not_specialize=["num_parts"],
    do_not_specialize_on_alignment=[
        "addresses", "grads", "sizes", "parts", "blocks", "partials",
    ],
)
def {name}(
    addresses, grads, sizes, parts, blocks, partials, num_parts,
    BLOCK: tl.constexpr, WIDE: tl.constexpr, NARROW: tl.constexpr,
):
    program = tl.program_id(0)
    part = tl.load(parts + program)
{lines}
"""
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
# one program, since a norm of one tensor decides about all of them
DECISION = """\
# marsopt: decision
import triton
import triton.language as tl

{formulas}

@triton.jit(
    do_not_specialize={sizes},
    do_not_specialize_on_alignment={tables},
)
def decision({arguments}, ROWS: tl.constexpr):
    lanes = tl.arange(0, ROWS)
    square = tl.full((), 0.0, tl.float64)
{squares}
    bad = tl.full((), 0, tl.int32)
{checks}
    bad += tl.where(square - square == 0, 0, 1)
{stores}
    tl.store(norm_out, tl.sqrt(square))
    tl.store(finite_out, bad == 0)
    tl.store(skipped_out, bad != 0)
"""
ROWS_OF = """\
first = 0
while first < num{i}:
    rows = first + lanes
    mask = rows < num{i}
    has = tl.load({has}, mask=mask, other=0) != 0
    count = has.to(tl.float64)
{lines}
    first += ROWS
"""
START = """\
start = tl.load(blocks + program).to(tl.int64) * BLOCK
size = tl.minimum(tl.load(sizes + part) - start, BLOCK).to(tl.int32)
"""
POSITION = "position = start + lanes"


def kernel_name(title: str) -> str:
    return re.sub(r"\W+", "_", title)


def indented(lines: Sequence[str], width: int) -> str:
    return indent("\n".join(lines), width * " ")


def formula_source(title: str, traced: Body, values: Sequence[str]) -> str:
    """Return the function of elements, which the kernel calls."""
    inputs = indented(_wrapped(traced.used), 4)
    lines = indented([*traced.lines, f"return {', '.join(values)}"], 4)
    has_scales = any(f"{name}(" in lines for name in ("largest", "spread"))
    functions = FUNCTIONS if has_scales else ""
    return FORMULA.format(title=title, functions=functions, inputs=inputs, lines=lines)


def _wrapped(names: Sequence[str]) -> list[str]:
    """Return lines of arguments."""
    return wrap(" ".join(f"{name}," for name in names), 76)


@dataclass(frozen=True)
class Block:
    """The lines of a program, which works on one block of one part.

    A whole block of aligned operands is accessed at once. Another block goes in steps,
    masked: the registers of a masked block would halve the number of programs that a
    GPU holds.
    """

    operands: Operands
    traced: Body
    writes: tuple[str, ...]

    @property
    def reads(self) -> tuple[str, ...]:
        """The operands that the function of elements reads."""
        return tuple(name for name in self.operands if name in self.traced.used)

    @property
    def accessed(self) -> list[str]:
        """The operands that a program loads or stores, in the table's order."""
        used = {*self.reads, *self.writes}
        return [name for name in self.operands if name in used]

    @property
    def has_position(self) -> bool:
        return "position" in self.traced.used

    def head(self) -> list[str]:
        """Return the lines that load the place of the block."""
        rows = [name for name in self.operands if name not in GIVEN]
        places = {name: f"addresses + {i} * num_parts" for i, name in enumerate(rows)}
        addresses = [
            f"{name}_address = tl.load({place} + part)"
            for name, place in {**places, **GIVEN}.items()
            if name in self.accessed
        ]
        return [*START.splitlines(), *addresses]

    def branches(self, wide: Sequence[str], masked: Sequence[str]) -> list[str]:
        """Return the lines that go through the block.

        Args:
            wide: lines of a pass of a whole block's loop; "{call}" stands for the
                function of elements.
            masked: lines of a pass of another block's loop.
        """
        mask = ", mask=has_{name}, other=0"
        wide = [line.format(call=self.call("")) for line in wide]
        masked = [line.format(call=self.call(mask)) for line in masked]
        return [
            *self.condition(),
            "    for first in range(0, BLOCK, WIDE):",
            indented([*self.wide_pointers(), *wide], 8),
            "else:",
            "    first = 0",
            "    while first < size:",
            indented([*self.masked_pointers(), *masked, "first += NARROW"], 8),
        ]

    def condition(self) -> list[str]:
        """Return the test that a block is whole and aligned. Scales are too few to be
        accessed widely.
        """
        aligned = [name for name in self.accessed if span_of(name) == 1]
        bits = " | ".join(f"{name}_address" for name in aligned)
        lines = [f"is_wide = (size == BLOCK) & (({bits}) % {WIDEST} == 0)"]
        lines += [f"is_wide &= {name}_address != 0" for name in self.accessed]
        return [*lines, "if is_wide:"]

    def wide_pointers(self) -> list[str]:
        lines = ["lanes = first + tl.arange(0, WIDE)"]
        lines += [POSITION] if self.has_position else []
        for name in self.accessed:
            if span_of(name) > 1:
                lines.append(self.scale_pointer(name, "WIDE"))
                continue
            address = f"tl.multiple_of({name}_address, {WIDEST})"
            lines.append(f"{name} = {self.pointer(name, address)} + start + lanes")
            hint = f"tl.multiple_of({name}, {WIDEST})"
            lines.append(f"{name} = tl.max_contiguous({hint}, {WIDEST})")
        return lines

    def masked_pointers(self) -> list[str]:
        lines = ["lanes = first + tl.arange(0, NARROW)", "index = start + lanes"]
        lines += [POSITION] if self.has_position else []
        for name in self.accessed:
            pointer = self.pointer(name, f"{name}_address")
            within = f"tl.where({name}_address != 0, size, 0)"
            if span_of(name) > 1:
                lines.append(self.scale_pointer(name, "NARROW"))
                lanes = f"{self.scale_lanes('NARROW')} * {SPAN}"
                lines.append(f"has_{name} = {lanes} < {within}")
                continue
            lines.append(f"{name} = {pointer} + index")
            lines.append(f"has_{name} = lanes < {within}")
        return lines

    def scale_lanes(self, step: str) -> str:
        """Return the numbers of a step's scales in the block."""
        return f"(first // {SPAN} + tl.arange(0, {step} // {SPAN}))"

    def scale_pointer(self, name: str, step: str) -> str:
        """Return the line that points to the scales of a pass of the loop."""
        pointer = self.pointer(name, f"{name}_address")
        return f"{name} = {pointer} + start // {SPAN} + {self.scale_lanes(step)}"

    def pointer(self, name: str, address: str) -> str:
        return f"{address}.to(tl.pointer_type({triton_dtype(self.operands[name])}))"

    def call(self, mask: str) -> str:
        """Return the call of the function of elements."""
        loads = [f"tl.load({name}{mask.format(name=name)})," for name in self.reads]
        others = [name for name in self.traced.used if name not in self.reads]
        return f"formula(\n{indented([*loads, *_wrapped(others)], 4)}\n)"


def totals_source(name: str, num_terms: int) -> str:
    """Return the kernel that adds the sums of blocks."""
    terms = range(num_terms)
    at = f"partials + {num_terms} * (block + lanes)"
    zeros = [f"sum{i} = tl.zeros((CHUNK,), tl.float64)" for i in terms]
    additions = [f"sum{i} += tl.load({at} + {i}, mask=mask, other=0.0)" for i in terms]
    stores = [
        f"tl.store(totals + {num_terms} * part + {i}, tl.sum(sum{i}))" for i in terms
    ]
    return TOTALS.format(
        name=name,
        zeros=indented(zeros, 4),
        additions=indented(additions, 8),
        stores=indented(stores, 4),
    )
