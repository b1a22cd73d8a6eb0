"""Contenders beside the reference, in rounds of groups that fit into memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor, nn

from benchmarks import memory
from benchmarks.contenders import REFERENCE, Contender, Entry, Params
from benchmarks.timing import spread, take_turns
from benchmarks.workload import Gradients, Shapes, parameters, sample
from marsopt import MARS
from marsopt.profiling.machine import Timed, timed
from marsopt.profiling.profiler import traced
from train.errors import UserError

# the first compiles or makes state; HeavyBall compiles in the second
WARM_UP = 3
# full-size tensors that all share: the round's gradient, the one in hand, and what a
# step may need for a while
SHARED_BUFFERS = 5
OTHER_GRADIENT = 0.5  # exact MARS's gradient of the next batch, in this round's
Measured = TypeVar("Measured")


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was measured of one contender.

    Args:
        group: number of its group; None for the reference, which is in all.
        times: seconds of each round's step (``marsopt.profiling.machine.timed``).
        host_times: seconds until the step returned, which on a GPU is not its end.
        ratios: the same over the reference's step of the same round.
        warm_up: seconds of the first steps.
        num_launches: of kernels on a GPU in a step; None on a CPU.
        kernel_seconds: that these take.
        peak_bytes: see ``memory.peak_bytes``.
        state_bytes: see ``memory.state_bytes``.
        moved: how far a sample of its parameters has come from the start.
        distance: root mean square of what ``moved`` differs from its twin's, over that
            of the twin's; None where no twin took part.
    """

    contender: Contender
    group: int | None
    times: list[float]
    host_times: list[float]
    ratios: list[float]
    warm_up: list[float]
    num_launches: int | None
    kernel_seconds: float | None
    peak_bytes: int
    state_bytes: int
    moved: Tensor = field(repr=False)
    distance: float | None = None

    @property
    def compile_seconds(self) -> float:
        """Return what the first steps took beyond as many median ones: compilation, and
        making the state.
        """
        return max(0.0, sum(self.warm_up) - WARM_UP * spread(self.times).median)


def plan(
    contenders: Sequence[Contender], num_params: int, budget: int
) -> list[list[Contender]]:
    """Return groups that fit into ``budget`` bytes, the reference first in each.

    Matrix rules, many times slower, come last and apart: so rounds of the others stay
    short, and steps that are compared close in time.

    Raises:
        UserError: a contender does not even fit alone beside the reference.
    """

    def need(group: Sequence[Contender]) -> int:
        buffers = sum(1 + c.num_buffers for c in group)
        return 4 * num_params * (SHARED_BUFFERS + buffers)

    groups: list[list[Contender]] = [[REFERENCE]]
    for contender in sorted(contenders, key=lambda c: c.matrix):
        if contender is REFERENCE:
            continue
        least = need([REFERENCE, contender])
        if least > budget:
            raise UserError(
                f"got {budget / 2**30:.1f} GiB to plan with, expected "
                f"{least / 2**30:.1f} for {contender.title} beside the reference: give "
                "a larger --memory, fewer --layers or a smaller --model"
            )
        last = groups[-1]
        apart = last[-1] is not REFERENCE and last[-1].matrix != contender.matrix
        if apart or need([*last, contender]) > budget:
            groups.append([REFERENCE])
        groups[-1].append(contender)
    return groups


def walk(
    entry: Entry,
    params: Params,
    gradients: Gradients,
    measured: Callable[[Callable[[], object]], Measured],
) -> list[Measured]:
    """Take one step; return what ``measured`` does for each phase.

    Each finds a gradient as backward leaves it, and ends by zero_grad: somebody has to
    free it.
    """

    def whole(phase: Callable[[], object]) -> None:
        phase()
        for optimizer in entry.optimizers:
            optimizer.zero_grad()

    found = []
    for phase in entry.phases:
        last = phase is entry.phases[-1]
        gradients.hand_to(params, 1.0 if last else OTHER_GRADIENT)
        found.append(measured(partial(whole, phase)))
    return found


def run_group(
    group: Sequence[Contender],
    number: int,
    shapes: Shapes,
    device: torch.device,
    *,
    num_rounds: int,
    compile: bool,
    dtype: torch.dtype,
) -> Iterator[Row]:
    """Build, warm up, take turns; then one more step each for the peak of memory and,
    on a GPU, one for its kernels.
    """
    gradients = Gradients(shapes, device, dtype)
    params = {c.key: parameters(shapes, device, dtype) for c in group}
    start = sample(params[REFERENCE.key])
    entries = {c.key: c.build(params[c.key], compile) for c in group}
    watch = partial(timed, device=device.type)
    peak = partial(memory.peak_bytes, device=device)

    def step(key: str) -> Timed:
        phases = walk(entries[key], params[key], gradients, watch)
        return Timed(*map(sum, zip(*phases, strict=True)))

    steps = {key: partial(step, key) for key in entries}
    warm_up = take_turns(steps, WARM_UP, gradients.draw)
    times = take_turns(steps, num_rounds, gradients.draw)
    for c in group:
        entry, own, mine = entries[c.key], params[c.key], times[c.key]
        moved = sample(own) - start
        pairs = zip(mine, times[REFERENCE.key], strict=True)
        peak_bytes = int(max(walk(entry, own, gradients, peak)))
        num_launches, kernel_seconds = None, None
        if device.type == "cuda":
            traces = walk(entry, own, gradients, partial(traced, device="cuda"))
            num_launches = sum(trace.num_launches or 0 for trace in traces)
            kernel_seconds = sum(trace.kernel_seconds or 0.0 for trace in traces)
        yield Row(
            contender=c,
            group=number,
            times=[step.seconds for step in mine],
            host_times=[step.host for step in mine],
            ratios=[ours.seconds / other.seconds for ours, other in pairs],
            warm_up=[step.host for step in warm_up[c.key]],
            num_launches=num_launches,
            kernel_seconds=kernel_seconds,
            peak_bytes=peak_bytes,
            state_bytes=memory.state_bytes(entry.optimizers, own.values()),
            moved=moved,
        )


def wake_compiler(device: torch.device) -> None:
    """Compile something, so that the first contender does not pay for what a process
    pays once.

    Raises:
        UserError: nothing compiles here.
    """
    x = torch.ones(2, 2, device=device)
    try:
        MARS([nn.Parameter(x)], compile=True)  # says what is missing
    except RuntimeError as error:
        raise UserError(f"{error} (here: --eager)") from error
    torch.compile(torch.sin)(x)


def run(
    groups: Sequence[Sequence[Contender]],
    shapes: Shapes,
    device: torch.device,
    *,
    num_rounds: int,
    compile: bool,
    dtype: torch.dtype,
    tell: Callable[[str], None],
) -> list[Row]:
    """Run all groups, one after the other; return one row a contender.

    Args:
        groups: of ``plan``.
        shapes: of the model's parameters.
        device: where they lie.
        num_rounds: steps of each contender that count.
        compile: whether our rules are compiled.
        dtype: of parameters and gradients; the state of our rules is float32.
        tell: called with what is going on.
    """
    if compile:
        wake_compiler(device)
    rows: list[Row] = []
    for number, group in enumerate(groups, 1):
        keys = ", ".join(c.key for c in group)
        tell(f"group {number} of {len(groups)}: {keys}")
        own = dict(num_rounds=num_rounds, compile=compile, dtype=dtype)
        rows += run_group(group, number, shapes, device, **own)
        gc.collect()
        torch._dynamo.reset()  # lets go of compiled code and what it refers to
        if device.type == "cuda":
            torch.cuda.empty_cache()
    mine = [row for row in rows if row.contender is REFERENCE]
    reference = replace(
        mine[0],
        group=None,
        times=list(chain.from_iterable(row.times for row in mine)),
        host_times=list(chain.from_iterable(row.host_times for row in mine)),
        ratios=list(chain.from_iterable(row.ratios for row in mine)),
    )
    rows = [reference, *(row for row in rows if row.contender is not REFERENCE)]
    moved = {row.contender.key: row.moved for row in rows}
    return [replace(row, distance=distance(row, moved)) for row in rows]


def distance(row: Row, moved: Mapping[str, Tensor]) -> float | None:
    """Return that of ``Row``."""
    twin = moved.get(row.contender.twin)
    if twin is None:
        return None
    return float((row.moved - twin).norm() / twin.norm())
