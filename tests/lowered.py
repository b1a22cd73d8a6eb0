"""Run by tests/test_rehearsal.py: cases of the rehearsal, some with a mutant of the
code that its checks guard, and what a step says of what a GPU would not do.

    python -m tests.lowered --json FILE [CASE ...]

A CASE is rule/correction/model/dtype, with /state-bfloat16 for state in that, with
/binaries to compile, and with =MUTANT to change the library before.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
from pathlib import Path
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.gpu.rehearsal import cases
from benchmarks.gpu.rehearsal.cases import NONE, Case, lower
from benchmarks.gpu.rehearsal.device import h100
from benchmarks.gpu.rehearsal.faults import faults
from benchmarks.gpu.rehearsal.lowering import lowering
from benchmarks.gpu.rehearsal.measure import Compiler, measure, to_dict
from marsopt import MARS
from marsopt.functional import step
from marsopt.optim.layout import Layout

HEAVY = 32  # registers: fewer than an update needs


def read_always():
    """Read y of transport in every step."""
    return mock.patch.object(step, "where_or_unread", torch.where)


def sum_at_once():
    """Leave the splitting of long sums to inductor."""

    def everything(shape, first):
        return tuple(range(first, len(shape)))

    return mock.patch.object(step, "row_dims", everything)


def none_if_all():
    """Have no flags where all gradients are there."""
    real = Layout.gather

    def gather(layout):
        groups, live = real(layout)
        has = all(p.grad is not None for p in layout.params)
        return groups, None if has else live

    return mock.patch.object(Layout, "gather", gather)


def few_registers():
    """Compile with so few registers that they spill."""
    import triton

    real = triton.compile

    def compile(source, *, target, options):
        return real(source, target=target, options={**options, "maxnreg": HEAVY})

    return mock.patch.object(triton, "compile", compile)


def at_odd_places():
    """Let gradients begin 12 bytes after a multiple of 16."""

    def odd(p):
        buffer = torch.empty(p.numel() + 3, dtype=p.dtype, device=p.device)
        return buffer[3:].view_as(p)

    return mock.patch.object(cases, "gradient_of", odd)


MUTANTS = {
    made.__name__: made
    for made in (
        read_always,
        sum_at_once,
        none_if_all,
        few_registers,
        at_odd_places,
    )
}


def case(text: str) -> dict:
    """Return what a case is made of."""
    text, _, mutant = text.partition("=")
    rule, correction, model, dtype, *more = text.split("/")
    state = "bfloat16" if "state-bfloat16" in more else "float32"
    chosen = Case(rule, None if correction == NONE else correction, model, dtype, state)
    changed = MUTANTS[mutant]() if mutant else contextlib.nullcontext()
    with changed:
        found = to_dict(
            measure(lower(chosen)), Compiler() if "binaries" in more else None
        )
    return found | dict(faults=[*faults(found)])


class Said(logging.Handler):
    """Keeps what is said."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def messages() -> dict[str, str]:
    """Return what a step says, or raises, on a GPU."""
    said, found = Said(), {}
    logging.getLogger("marsopt").addHandler(said)
    with h100(), lowering(), FakeTensorMode():
        params = [nn.Parameter(torch.empty(64, 96, device="cuda")) for _ in range(2)]
        params.append(nn.Parameter(torch.empty(32, 96, device="cuda")))
        for p in params:
            p.grad = torch.empty_like(p)
        optimizer = MARS(params, lr=1e-3, compile=True)
        optimizer.step()
        found["aligned"] = " ".join(line for line in said.lines if "narrow" in line)
        buffer = torch.empty(params[2].numel() + 3, device="cuda")
        params[2].grad = buffer[3:].view_as(params[2])
        optimizer.step()
        found["unaligned"] = " ".join(line for line in said.lines if "narrow" in line)

        def captured(change) -> str:
            change()
            there = mock.patch.object(
                torch.cuda, "is_current_stream_capturing", lambda: True
            )
            try:
                with there:
                    optimizer.step()
            except RuntimeError as error:
                return str(error)
            return "captured"

        def lose() -> None:
            params[0].grad = None

        def on_the_host() -> None:
            optimizer.param_groups[0]["lr"] = torch.tensor(1e-3, device="cpu")

        params[2].grad = torch.empty_like(params[2])
        found["warm"] = captured(lambda: None)
        found["new pattern"] = captured(lose)
        optimizer.step()
        found["known pattern"] = captured(lose)
        found["rate on the host"] = captured(on_the_host)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    found = {text: case(text) for text in args.cases}
    args.json.write_text(json.dumps(dict(cases=found, messages=messages())))


if __name__ == "__main__":
    main()
