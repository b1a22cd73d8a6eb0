"""Part "host": what of a warm step crosses between host and device: copies of tensors
from one to the other, and values that the host waits for. A CUDA graph records neither.

Steps of every rule run eagerly over fake CUDA tensors. A fault: something crosses that
the documentation does not name, or something that it names does not cross.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.gpu.rehearsal.crossings import COPY, WAIT, Watch, watched
from benchmarks.gpu.rehearsal.device import h100
from benchmarks.gpu.rehearsal.lowered import NONE, corrections, move
from marsopt import MARS, REGISTRY

SHAPES = [(64, 32), (48,), (32, 64), (4, 16, 8)]
Params = list[nn.Parameter]
Change = Callable[[MARS, Params], None]


def nothing(optimizer: MARS, params: Params) -> None:
    """Change nothing between steps."""


def every_number(optimizer: MARS, params: Params) -> None:
    """Move every hyperparameter that a schedule may move."""
    for group in optimizer.param_groups:
        move(group)
    optimizer.max_norm = 3.0


def without_last(optimizer: MARS, params: Params) -> None:
    """Take one parameter's gradient away."""
    params[-1].grad = None


def without_first(optimizer: MARS, params: Params) -> None:
    """Take another parameter's gradient away."""
    params[0].grad = None


def freeze_last(optimizer: MARS, params: Params) -> None:
    """Freeze one parameter."""
    params[-1].grad = None
    params[-1].requires_grad_(False)


def write_first(optimizer: MARS, params: Params) -> None:
    """Write a parameter, as a loaded checkpoint does."""
    with torch.no_grad():
        params[0].add_(1)


def rate_on(device: str) -> Change:
    """Return a change of the learning rate into a tensor on ``device``."""

    def change(optimizer: MARS, params: Params) -> None:
        for group in optimizer.param_groups:
            group["lr"] = torch.full((), 3e-3, dtype=torch.float64, device=device)

    return change


def numbers_on_gpu(optimizer: MARS, params: Params) -> None:
    """Turn every number of the groups into a tensor on the GPU."""

    def on_gpu(number: float) -> Tensor:
        return torch.full((), number, dtype=torch.float64, device="cuda")

    for group in optimizer.param_groups:
        for key in ("lr", "lr_1d", "gamma", "weight_decay", "eps", "clip"):
            group[key] = on_gpu(1e-3)
        for key in ("betas", "betas_1d"):
            group[key] = on_gpu(0.9), on_gpu(0.95)


def step(optimizer: MARS) -> None:
    """One step; exact MARS with its protocol."""
    optimizer.update_previous_grad()
    optimizer.step()
    optimizer.update_last_grad()


@dataclass(frozen=True)
class Case:
    """A call that is watched, after a step.

    Args:
        title: its name in the table.
        options: of MARS.
        warm: done before the step; and before the call, unless ``change`` is.
        change: done before the call.
        act: the call.
        crosses: what the documentation says that crosses: "copy" or "wait".
        source: which documentation.
    """

    title: str
    options: dict[str, Any] = field(default_factory=dict)
    warm: Change = nothing
    change: Change = nothing
    act: Callable[[MARS], Any] = step
    crosses: str | None = None
    source: str = ""


def cases() -> Iterator[Case]:
    """Yield all that is watched."""
    for rule in REGISTRY:
        for correction in corrections(rule):
            options = dict(mars_type=rule)
            options["correction"] = None if correction == NONE else correction
            title = f"{rule}, {correction}, every number moves"
            yield Case(title, options, change=every_number)
    ahead = dict(correction="transport")
    yield Case("transport: eval", ahead, act=MARS.eval)
    yield Case("transport: train", ahead, change=lambda o, _: o.eval(), act=MARS.train)
    yield Case("transport, a parameter was written", ahead, change=write_first)
    yield Case("zero_grad", act=MARS.zero_grad)
    yield Case("grad_norm", act=lambda optimizer: optimizer.grad_norm)
    yield Case("a gradient is missing, as before", warm=without_last)
    yield Case("the same, transport", ahead, warm=without_last)
    yield Case("a parameter is frozen, as before", warm=freeze_last)
    for rule in ("mars-m", "mars-normuon"):
        yield Case(f"{rule}, block_rows", dict(mars_type=rule, block_rows=16))
        options = dict(mars_type=rule, matrices="batched", clip_per="tensor")
        yield Case(f"{rule}, batched, clip_per", options)
    yield Case("h in bfloat16", dict(h_dtype=torch.bfloat16))
    yield Case("amsgrad", dict(amsgrad=True))
    yield Case("no clip, no max_norm", dict(clip=None, max_norm=None))
    yield Case("lr is a tensor on the GPU", warm=rate_on("cuda"))
    yield Case("every number is a tensor on the GPU", ahead, warm=numbers_on_gpu)
    yield Case(
        "lr is a tensor on the CPU",
        warm=rate_on("cpu"),
        crosses=COPY,
        source="docs/guide.md, CUDA graphs",
    )
    yield Case(
        "a gradient is missing for the first time",
        warm=without_last,
        change=without_first,
        crosses=COPY,
        source="marsopt.optim.layout: a pattern is sent once",
    )
    yield Case(
        "nonfinite is raise",
        dict(nonfinite="raise"),
        crosses=WAIT,
        source="MARS: one sync a step",
    )
    yield Case(
        "num_skipped",
        act=lambda optimizer: optimizer.num_skipped,
        crosses=WAIT,
        source="MARS.num_skipped: costs a sync",
    )


CASES = {case.title: case for case in cases()}
NAMES = DEFAULT = tuple(CASES)


def play(name: str) -> dict[str, Any]:
    """Return a case's ``crossings``, its ``num_operations`` and its ``faults``."""
    case = CASES[name]
    with h100(triton=False), FakeTensorMode():
        seen = _watch(case)
    crossings = tuple(dict.fromkeys(seen.found))
    faults = []
    if {c.kind for c in crossings} != {case.crosses} - {None}:
        told = ", ".join(map(str, crossings)) or "nothing"
        faults.append(f"got {told}, expected {case.crosses or 'nothing'} to cross")
    return dict(
        name=case.title,
        source=case.source,
        num_operations=seen.num_operations,
        crossings=[asdict(c) | dict(told=str(c)) for c in crossings],
        faults=faults,
    )


def _watch(case: Case) -> Watch:
    rule = REGISTRY[case.options.get("mars_type", "mars-adamw")]
    # its own, but passed: MARS logs that nobody has chosen it
    chosen = dict(lr=1e-2, lr_1d=rule.hyperparameters["lr_1d"], max_norm=0.7)
    options = {**chosen, "compile": False, **case.options}
    params = [nn.Parameter(torch.empty(s, device="cuda")) for s in SHAPES]
    optimizer = MARS(params, **options)

    def backward() -> None:
        for p in params:
            p.grad = torch.empty_like(p) if p.requires_grad else None

    backward()
    case.warm(optimizer, params)
    first = watched(lambda: step(optimizer))  # which answers a step that asks
    if first.ended:
        return first
    backward()
    (case.warm if case.change is nothing else case.change)(optimizer, params)
    return watched(lambda: case.act(optimizer))


def columns(row: dict[str, Any]) -> dict[str, str]:
    """Return a case's figures for the table."""
    crossed = "; ".join(dict.fromkeys(c["told"] for c in row["crossings"]))
    return {
        "operations": f"{row['num_operations']}",
        "what crosses": crossed or "nothing",
        "documented in": row["source"],
    }
