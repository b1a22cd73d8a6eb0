"""Model code over fake CUDA tensors as it is, and changed so that a check has to report
it: a module that tests/test_rehearsal_models.py runs in a process of its own.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu.rehearsal import peak, pretraining, sharded_model
from benchmarks.gpu.rehearsal.allocations import Allocations
from benchmarks.gpu.rehearsal.fakes import fake_h100
from benchmarks.gpu.rehearsal.pretraining import setting_of, shape_of
from examples import fsdp2
from research.compare import plain
from train.files import write_json
from train.gpt2 import Shape

SMALL = Shape(num_layers=1, num_heads=2, width=128, block_size=64, vocab_size=512)
METHOD = "mars-m"
FORECAST = peak.forecast
GRADIENT, LOSS, TRAIN_STEP = plain.Task.gradient, plain.mean_loss, fsdp2.train_step


def rehearsed(*, compile: bool = False) -> dict:
    return pretraining.rehearse(setting_of(SMALL, 2, compile=compile), METHOD)


# ---- mutants -------------------------------------------------------------------------


def reads_the_loss(self, batch) -> Tensor:
    loss = GRADIENT(self, batch)
    loss.item()
    return loss


def breaks_the_graph(model, inputs, labels, half) -> Tensor:
    torch._dynamo.graph_break()
    return LOSS(model, inputs, labels, half)


calls = 0
BUILD = plain.build


def eagerly(model, recipe, *, steps, compile):
    return BUILD(model, recipe, steps=steps, compile=False)


def takes_another_number(model, inputs, labels, half) -> Tensor:
    return LOSS(model, inputs, labels, half) * calls


def counts(self, batch) -> Tensor:
    global calls
    calls += 1
    return GRADIENT(self, batch)


def clips_by_itself(model, optimizer, tokens) -> Tensor:
    step = optimizer.step

    def clipped() -> None:
        total = torch.zeros((), device=tokens.device)
        dist.all_reduce(total)
        step()

    with mock.patch.object(optimizer, "step", clipped):
        return TRAIN_STEP(model, optimizer, tokens)


def reads_after_the_step(model, optimizer, tokens) -> Tensor:
    loss = TRAIN_STEP(model, optimizer, tokens)
    loss.item()
    return loss


def without_gradients(*args):
    found = FORECAST(*args)
    return replace(found, memory=replace(found.memory, gradients=0))


def loops() -> dict[str, list[str]]:
    """Return the problems of the loop, as it is and changed."""
    found = {"as it is": rehearsed(compile=True)["problems"]}
    task = plain.Task
    with mock.patch.object(task, "gradient", reads_the_loss):
        found["reads the loss"] = rehearsed()["problems"]
    with mock.patch.object(Tensor, "pin_memory", lambda self: self):
        found["pageable"] = rehearsed()["problems"]
    with mock.patch.object(plain, "mean_loss", breaks_the_graph):
        found["graph break"] = rehearsed(compile=True)["problems"]
    with (
        mock.patch.object(plain, "mean_loss", takes_another_number),
        mock.patch.object(task, "gradient", counts),
        mock.patch.object(plain, "build", eagerly),
    ):
        found["recompiles"] = rehearsed(compile=True)["problems"]
    return found


def sharded() -> dict[str, list[str]]:
    """Return the problems of the FSDP2 example, as it is and changed."""
    found = {"as it is": sharded_model.rehearse()["problems"]}
    for mutant in (clips_by_itself, reads_after_the_step):
        with (
            mock.patch.object(fsdp2, "train_step", mutant),
            # what is found out needs no graphs
            mock.patch.dict(fsdp2.MARS.__init__.__kwdefaults__, compile=False),
        ):
            found[mutant.__name__] = sharded_model.rehearse()["problems"]
    return found


def memories() -> dict[str, object]:
    """Return what GPT-2 XL needs, and the problems of it, as it is and changed."""
    model = "gpt2-xl"
    setting = setting_of(shape_of(model), 2, compile=False)
    counted = peak.measure(setting, "mars-m")
    row = peak.beside(counted, model)
    with mock.patch.object(peak, "forecast", without_gradients):
        forgot = peak.beside(counted, model)["problems"]
    kept = counted | dict(lives=counted["lives"] + counted["gradients"])
    leaked = peak.beside(kept, model)["problems"]
    return dict(row=row, forgot=forgot, leaked=leaked, counts=counts_of_blocks())


def counts_of_blocks() -> list[tuple[int, int]]:
    """Return (now, peak) as blocks come and go."""
    found = []
    with fake_h100(), Allocations() as allocated:
        first = torch.empty(1, device="cuda")
        row = torch.empty(4, 128, device="cuda")[1]  # holds all four
        found.append((allocated.now, allocated.peak))
        del first
        torch.empty(3, 128, device="cuda")
        torch.empty(10**9)  # of the host
        found.append((allocated.now, allocated.peak))
        allocated.reset()
        del row
        found.append((allocated.now, allocated.peak))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, required=True)
    path = parser.parse_args().json
    counted = memories()  # first: a graph break that was raised is not without traces
    write_json(path, dict(loops=loops(), sharded=sharded(), memory=counted))


if __name__ == "__main__":
    main()
