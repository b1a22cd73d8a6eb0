"""The printed kernels of every rule, compiled for GPUs without one.

    python -m benchmarks.gpu.rehearsal [CASE ...] [--workers N] [--json FILE]

Steps over the tensors of GPT-2 large, which have no memory, choose their kernels.
Counted are launches, and the bytes that the loads and stores of the source move, beside
the floor. Every kernel is compiled for sm_80, sm_90 and sm_100: registers, spills, and
whether whole blocks are accessed 16 bytes at a time. A fault ends in exit status 1.

A CASE is a pattern of RULE/DTYPES, as 'mars-adamw*/float32'. Triton is needed beside
torch: `make gpu REHEARSAL=1` installs it apart.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from fnmatch import filter as matching
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from marsopt import MARS
from marsopt.optim.binding import Binding
from marsopt.optim.state_dict import State
from marsopt.profiling.optimizer import floor_of, printed_kernels
from marsopt.rules.formats import span_of
from marsopt.rules.registry import REGISTRY
from marsopt.step.graphs import Graphs
from marsopt.step.kernel_runner import Kernels
from marsopt.step.kernels import Kernel, load
from marsopt.step.owners import LOCAL
from marsopt.step.printer import OPTIONS
from marsopt.step.step import step
from train.errors import UserError, check_least, command
from train.files import write_json
from train.forecast.models import Job, jobs

MODEL = "gpt2-large"
CAPABILITIES = (80, 90, 100)
BF16 = torch.bfloat16
DTYPES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {  # of parameters; options
    "float32": (torch.float32, {}),
    "bfloat16": (BF16, dict(state_dtype=torch.float32)),
    "float16": (torch.float16, {}),
    "float64": (torch.float64, {}),
    # the most operands
    "amsgrad": (torch.float64, dict(amsgrad=True, cautious_weight_decay=True)),
    "narrowest": (BF16, dict(state_dtype=torch.int8, master_weight_bits=24)),
    "coded": (torch.float32, dict(state_dtype=torch.int8)),
    "rounded": (torch.float32, dict(state_dtype=BF16, stochastic_rounding=True)),
    "master32": (BF16, dict(master_weight_bits=32)),
    # the most registers
    "master24": (
        BF16,
        dict(master_weight_bits=24, state_dtype=BF16, stochastic_rounding=True),
    ),
    # the fewest bytes
    "least": (BF16, dict(master_weight_bits=24, state_dtype=torch.int8)),
}
RULES = [
    f"{name}{correction}"
    for name, rule in REGISTRY.items()
    for correction in ("", *(["-exact"] if rule.is_mars else []))
]
CASES = [
    f"{rule}/{dtypes}"
    for dtypes in DTYPES
    for rule in RULES
    if dtypes != "amsgrad" or "adamw" in rule
]
EXACT = 2e-3  # by which bytes may differ from the floor
WARP = 32
WIDEST = 16  # bytes that a thread loads or stores at once
ACCESS = re.compile(r"(ld|st)\.global\S*\.v(?:4\.b32|2\.b64)")


# ---- launches ------------------------------------------------------------------------


class Launch(NamedTuple):
    """A launch of a Triton function."""

    kernel: Kernel
    name: str  # of the function: a kernel of sums has two
    types: tuple[str, ...]  # of its arguments, as Triton writes them
    sizes: tuple[tuple[str, int], ...]  # its constants


TYPES = {torch.int64: "i64", torch.int32: "i32", torch.bool: "i1"}
TYPES |= {torch.float32: "fp32", torch.float64: "fp64"}


def launches_of(runner: Kernels, binding: Binding) -> list[Launch]:
    """Return the launches of a step, none of which runs."""
    found: list[Launch] = []

    def note(
        kernel: Kernel, function: Any, num: int, *args: Tensor | int, **sizes: int
    ) -> None:
        types = [f"*{TYPES[x.dtype]}" if isinstance(x, Tensor) else "i32" for x in args]
        name = function.fn.__name__
        found.append(Launch(kernel, name, tuple(types), tuple(sizes.items())))

    grads, has_grad = binding.gather(runner.printed)
    with mock.patch.object(Kernel, "_launch", note):
        step(
            binding.groups,
            binding.exchanges,
            grads,
            max_norm=torch.ones((), dtype=torch.float64, device="meta"),
            collectives=LOCAL,
            runner=runner,
            has_grad=has_grad,
        )
    return found


def bound(job: Job, dtype: torch.dtype) -> Binding:
    """Return the binding of parameters that have no memory. MARS would refuse to move
    them: it gets them frozen, and makes groups and options.
    """
    sides: list[list[tuple[str, Tensor]]] = [[], []]
    for name, shape in job.shapes.items():
        x = torch.empty(tuple(shape), dtype=dtype, device="meta")
        sides[name in job.elementwise].append((name, x))
    matrices, beside = sides
    groups = [dict(params=matrices), dict(params=beside, mars_type="adamw")]
    options = {**job.options, "mars_type": job.mars_type, "compile": False}
    optimizer = MARS([group for group in groups if group["params"]], **options)
    frozen = optimizer.describe().binding
    for x in (x for side in sides for _, x in side):
        x.requires_grad_()
        x.grad = torch.empty_like(x)
    meta = torch.device("meta")
    state: State = defaultdict(dict)
    binding = Binding(frozen.param_groups, state, frozen.options, meta)
    binding.bind()
    return binding


def played(name: str) -> dict[str, Any]:
    """Return the figures of a case, and its faults."""
    rule, _, dtypes = name.partition("/")
    dtype, options = DTYPES[dtypes]
    (job,) = jobs(MODEL, [rule])
    job = replace(job, options={**job.options, **options})
    told: list[str] = []
    with torch.no_grad():
        binding = bound(job, dtype)

        def say(level: int, what: str) -> None:
            told.append(what)

        graphs = Graphs(torch.device("meta"), compile=False, say=say)
        runner = Kernels(binding.groups, graphs, say)
        launches = launches_of(runner, binding)
    floor = floor_of(binding.groups).num_bytes
    moved = sum(kernel.num_bytes for kernel in printed_kernels(runner))
    row = dict(
        name=name,
        launches=len(launches),
        moved=moved / job.num_params,
        floor=floor / job.num_params,
        told=told,
        binaries=[
            binary(launch, capability)
            for launch in dict.fromkeys(launches)
            for capability in CAPABILITIES
        ],
    )
    return row | dict(faults=[*faults(row)])


# ---- binaries ------------------------------------------------------------------------


@cache
def binary(launch: Launch, capability: int) -> dict[str, Any]:
    """Compile a function for a GPU that need not be there: its registers, the bytes
    that it spills, and how many loads and stores of a whole step through a block are
    not as wide as can be.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    printed, sizes = launch.kernel.printed, dict(launch.sizes)
    function = getattr(load(printed.source), launch.name)
    rest = iter(launch.types)
    types = {k: "constexpr" if k in sizes else next(rest) for k in function.arg_names}
    kernel = triton.compile(
        ASTSource(fn=function, signature=types, constexprs=sizes),
        target=GPUTarget("cuda", capability, WARP),
        options=OPTIONS,
    )
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = [tools / "cuobjdump", "-res-usage", file.name]
        out = subprocess.run(usage, capture_output=True, text=True, check=True).stdout
    used = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", out))
    wide = ACCESS.findall(kernel.asm["ptx"])
    threads = WARP * OPTIONS["num_warps"]
    step = sizes.get("WIDE", 0) // threads  # elements of a thread; 0: totals

    def num_wide(names: Sequence[str]) -> int:
        """Return the widest accesses of these operands: a thread has 8 bytes of codes
        in a short step, and less of scales.
        """
        sizes = [printed.operands[n].itemsize * step // span_of(n) for n in names]
        return sum(size // WIDEST for size in sizes)

    narrow = (
        num_wide(printed.reads) - wide.count("ld"),
        num_wide(printed.writes) - wide.count("st"),
    )
    return dict(
        name=f"{launch.name} for sm_{capability}",
        registers=int(used["REG"]),
        spills=int(used["STACK"]) + int(used["LOCAL"]),
        wide=len(wide),
        narrow=sum(max(0, num) for num in narrow),
    )


def faults(row: dict[str, Any]) -> Iterator[str]:
    """Yield each fault of a case."""
    yield from row["told"]
    if abs(row["moved"] / row["floor"] - 1) > EXACT:
        yield f"{row['moved']:.2f} bytes a parameter, floor {row['floor']:.2f}"
    for found in row["binaries"]:
        if found["spills"]:
            yield f"{found['name']} spills {found['spills']} bytes"
        if found["narrow"]:
            yield f"{found['name']} lacks {found['narrow']} wide loads or stores"


# ---- the command ---------------------------------------------------------------------


def line(row: dict[str, Any]) -> str:
    """Return a case's figures; bytes are those of a parameter."""
    registers = max((found["registers"] for found in row["binaries"]), default=0)
    return (
        f"{row['name']}: {row['launches']} launches, {row['moved']:.2f} bytes, floor "
        f"{row['floor']:.2f}, {len(row['binaries'])} binaries, at most {registers} "
        f"registers: {'; '.join(row['faults']) or 'no fault'}"
    )


def chosen(patterns: Sequence[str]) -> list[str]:
    """Return the names of the cases that ``patterns`` ask for.

    Raises:
        UserError: a pattern of no case.
    """
    for pattern in patterns:
        if not matching(CASES, pattern):
            raise UserError(
                f"got the case {pattern!r}, expected a pattern of names like "
                f"{CASES[0]!r}: give a rule and dtypes"
            )
    return [n for pattern in patterns or ["*"] for n in matching(CASES, pattern)]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command.

    Raises:
        SystemExit: with status 1, for a fault.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.rehearsal",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("cases", nargs="*", metavar="CASE", help="patterns of names")
    add("--workers", type=int, default=1, help="processes (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="everything")
    args = parser.parse_args(argv)
    check_least(1, workers=args.workers)
    names = chosen(args.cases)
    if importlib.util.find_spec("triton") is None:
        raise UserError(
            "got no Triton, expected it on Python's path: run make gpu REHEARSAL=1, "
            "which installs it apart"
        )
    rows = []
    with ProcessPoolExecutor(args.workers, get_context("spawn")) as pool:
        for row in pool.map(played, names):
            rows.append(row)
            print(line(row), flush=True)
    if args.json is not None:
        write_json(args.json, rows)
    if any(row["faults"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    command(main)
