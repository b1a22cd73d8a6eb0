"""``examples/fsdp2.py`` over fake CUDA tensors, on a rank of a fake process group: its
own model, optimizer and step, with every collective counted.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from benchmarks.gpu.rehearsal.crossings import Watch, reads
from benchmarks.gpu.rehearsal.device import Event
from benchmarks.gpu.rehearsal.fakes import fake_h100
from benchmarks.gpu.rehearsal.lowering import launches
from examples import fsdp2
from marsopt.parallel import MeshCollectives
from marsopt.profiling.gpt2 import EMBEDDINGS
from train.forecast import Job, forecast, record
from train.gpt2 import tensor_sizes

NUM_STEPS = 3
RULE = "mars-m"  # of the example


class Stream:
    """A stream on which nothing runs."""

    def __init__(self, *args, **kwargs) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def wait_stream(self, stream: Stream) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event that is never over."""
        return event or Event()


@contextlib.contextmanager
def streams() -> Iterator[None]:
    """Let FSDP2 have streams of its own, which a torch without CUDA cannot make."""
    current = Stream()
    answers = dict(
        Stream=Stream,
        current_stream=lambda device=None: current,
        stream=lambda stream: contextlib.nullcontext(),
    )
    with mock.patch.multiple(torch.cuda, **answers):
        yield


@contextlib.contextmanager
def pretended(rank: int, world: int) -> Iterator[DeviceMesh]:
    """Yield a mesh of as many GPUs as one likes, within ``fake_h100``; nothing arrives.

    Ranks compare no text: what they would compare are numbers, which fakes have not.
    """
    silent = mock.patch.object(MeshCollectives, "agree", lambda self, told: None)
    with contextlib.ExitStack() as stack, streams(), silent:
        with unset_fake_temporarily():
            mesh = stack.enter_context(record.pretended(rank, (world,), "cuda"))
        yield mesh


@contextlib.contextmanager
def _ends(watch: Watch, calls: dict[str, Counter[str]]) -> Iterator[None]:
    """Sort collectives by part: the example's step calls one after the other."""
    backward, step = torch.Tensor.backward, fsdp2.MARS.step

    def ended(part: str) -> None:
        calls[part].update(watch.collectives)
        watch.collectives.clear()

    def run_backward(*args, **kwargs):
        ended("forward")
        backward(*args, **kwargs)
        ended("backward")

    def run_step(*args, **kwargs):
        done = step(*args, **kwargs)
        ended("step")
        return done

    with (
        mock.patch.object(torch.Tensor, "backward", run_backward),
        mock.patch.object(fsdp2.MARS, "step", run_step),
    ):
        yield


def rehearse(rank: int = 3, world: int = 8) -> dict[str, Any]:
    """Run three steps of the example as one rank of so many.

    Returns:
        rank, world; ``collectives`` of each part in the last step; ``expected`` of
        them; ``steps``: graphs so far and what crossed in each; ``graphs``: function
        and launches of each; ``problems`` in words.
    """
    device, problems, steps = torch.device("cuda", 0), [], []
    with fake_h100() as graphs, pretended(rank, world) as mesh, Watch() as watch:
        torch.compiler.reset()
        model, optimizer = fsdp2.build(mesh, device)
        num_units = sum(isinstance(m, FSDPModule) for m in model.modules())
        parts = dict(forward=Counter(), backward=Counter(), step=Counter())
        for number in range(NUM_STEPS):
            tokens = fsdp2.batch(number, rank, world, device)
            watch.taken()  # the example's batch is copied as it is
            for calls in parts.values():
                calls.clear()
            with _ends(watch, parts):
                fsdp2.train_step(model, optimizer, tokens)
            crossed = watch.taken()
            problems += reads(crossed)
            crossed = [asdict(c) for c in crossed]
            steps.append(dict(num_graphs=len(graphs), crossed=crossed))
    done = dict(rank=rank, world=world, steps=steps, problems=problems)
    done["collectives"] = {part: dict(calls) for part, calls in parts.items()}
    done["expected"] = expected(num_units, world)
    done["graphs"] = [
        dict(function=g.function, num_launches=len(launches(g)[1])) for g in graphs
    ]
    problems += check(done)
    return done


def expected(num_units: int, world: int) -> dict[str, dict[str, int]]:
    """Return the collectives of each part: of FSDP2, whose root keeps its parameters
    for the backward pass, and of the optimizer as ``train.plan`` forecasts them.
    """
    sizes = tensor_sizes(fsdp2.SHAPE)
    beside = [name for name in sizes if name.split(".")[0] in EMBEDDINGS]
    job = Job(sizes, RULE, tokens=1, flops_per_token=1, elementwise=beside)
    step = {k: num for k, num in forecast(job, world).collectives.items() if num}
    return dict(
        forward={"all-gather": num_units},
        backward={"all-gather": num_units - 1, "reduce-scatter": num_units},
        step=step,
    )


def check(found: dict[str, Any]) -> list[str]:
    """Return what is not as it should be in ``rehearse``'s answer."""
    problems = []
    counts = [step["num_graphs"] for step in found["steps"]]
    if len(set(counts)) > 1 or counts and not counts[0]:
        problems.append(
            f"got {counts} graphs after each step, expected as many after each: "
            "something is compiled again"
        )
    for part, calls in found["expected"].items():
        if found["steps"] and found["collectives"][part] != calls:
            problems.append(
                f"{part}: got {found['collectives'][part]}, expected {calls}"
            )
    for number, step in enumerate(found["steps"][1:], 2):
        if step["crossed"]:
            problems.append(f"step {number}: got {step['crossed']}, expected nothing")
    return problems


def table(found: dict[str, Any]) -> str:
    """Return the answer of ``rehearse`` as text."""
    lines = [f"rank {found['rank']} of {found['world']}"]
    for part, calls in found["collectives"].items():
        lines.append(f"  {part:9} {', '.join(f'{n} {k}' for k, n in calls.items())}")
    launched = ", ".join(
        f"{g['function']} {g['num_launches']}" for g in found["graphs"]
    )
    lines.append(f"  launches of the compiled step: {launched}")
    num = [len(step["crossed"]) for step in found["steps"]]
    lines.append(f"  crossings in steps 1 to {NUM_STEPS}, without the batch: {num}")
    return "\n".join([*lines, *(f"  PROBLEM {p}" for p in found["problems"])])
