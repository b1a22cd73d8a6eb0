"""What of a step crosses between host and device: copies of tensors from one to the
other, and values that the host waits for. A CUDA graph records neither.

    python -m benchmarks.gpu.rehearsal.host [--json FILE]

Warm steps of every rule run eagerly over fake CUDA tensors; no GPU and no Triton is
needed. An exit status of 1 says that something crosses that the documentation does not
name, or that something which it names does not cross.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.gpu.rehearsal.cases import corrections, move
from benchmarks.gpu.rehearsal.crossings import COPY, WAIT, Crossing, Watch, watched
from benchmarks.gpu.rehearsal.device import h100
from marsopt import MARS, REGISTRY
from train.errors import command
from train.files import write_json

# ---- cases ---------------------------------------------------------------------------

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
            title = f"{rule}, {correction}, every number moves"
            options = dict(mars_type=rule, correction=correction)
            yield Case(title.replace(", None", ""), options, change=every_number)
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
        source="marsopt.optim.live: a pattern is sent once",
    )
    yield Case(
        'nonfinite="raise"',
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


@dataclass(frozen=True)
class Found:
    """What a case has shown."""

    title: str
    crosses: str | None  # as documented
    source: str
    num_operations: int
    crossings: tuple[Crossing, ...]

    @property
    def as_documented(self) -> bool:
        """Return whether exactly that crosses which the documentation names."""
        return {c.kind for c in self.crossings} == {self.crosses} - {None}


def play(case: Case) -> Found:
    """Watch one case, over fake CUDA tensors."""
    with FakeTensorMode():
        watch = _watch(case)
    crossings = tuple(dict.fromkeys(watch.found))
    return Found(case.title, case.crosses, case.source, watch.num_operations, crossings)


def _watch(case: Case) -> Watch:
    rule = REGISTRY[case.options.get("mars_type", "mars-adamw")]
    # its own, but said: MARS logs that nobody has chosen it
    said = dict(lr=1e-2, lr_1d=rule.hyperparameters["lr_1d"], max_norm=0.7)
    options = {**said, "compile": False, **case.options}
    params = [nn.Parameter(torch.empty(s, device="cuda")) for s in SHAPES]
    optimizer = MARS(params, **options)

    def backward() -> None:
        for p in params:
            p.grad = torch.empty_like(p) if p.requires_grad else None

    backward()
    case.warm(optimizer, params)
    watch = watched(lambda: step(optimizer))  # which answers a step that asks
    if watch.ended:
        return watch
    backward()
    (case.warm if case.change is nothing else case.change)(optimizer, params)
    return watched(lambda: case.act(optimizer))


def play_all() -> list[Found]:
    """Watch every case."""
    with h100(triton=False):
        return [play(case) for case in cases()]


def table(found: list[Found]) -> str:
    """Return a line for each case."""
    width = max(len(f.title) for f in found)
    lines = [f"{'case':{width}}  operations  what crosses"]
    for f in found:
        fault = f"EXPECTED {f.crosses or 'nothing'}"
        note = (f.source and f"({f.source})") if f.as_documented else fault
        said = [*dict.fromkeys(map(str, f.crossings)), *([note] if note else [])]
        first, *rest = said or ["nothing"]
        lines.append(f"{f.title:{width}}  {f.num_operations:10}  {first}")
        lines += [f"{'':{width + 14}}{line}" for line in rest]
    return "\n".join(lines)


def to_dict(found: list[Found]) -> list[dict[str, Any]]:
    """Return what JSON can hold."""
    return [{**asdict(f), "as_documented": f.as_documented} for f in found]


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.rehearsal.host",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    found = play_all()
    print(table(found))
    if args.json is not None:
        write_json(args.json, to_dict(found))
    if not all(f.as_documented for f in found):
        raise SystemExit(1)


if __name__ == "__main__":
    command(main)
