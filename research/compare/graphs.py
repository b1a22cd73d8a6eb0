"""Runs of the plain loop on one GPU, every training step one CUDA graph.

    python -m research.compare.graphs log_time_480 log_time_1920 --store FILE \\
        --module research.log_time --methods Moonlight "AdamW, log time"

trains what studies still need, as ``research.compare`` does on a CPU: the same weights,
windows and learning rates, so both may share a store. A replay draws the windows, sets
the learning rate, runs forward and backward passes and takes the optimizer's step; the
host only launches it.

Several processes may share the GPU and a store, each with methods of its own: a method
of a study is claimed by a file beside the store. Within a process runs follow one
another: graphs that were captured on one stream and replayed side by side trained
wrongly, it seems by a workspace of cuBLAS that they shared.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import hashlib
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from research.compare.optimizers import build
from research.compare.plain import (
    WARM_UP,
    Setting,
    compiled,
    mean_loss,
    validations,
)
from research.compare.store import Store
from research.compare.study import Run, Study, named
from train.data.batches import Batches
from train.errors import UserError, command

AT_ONCE = 2**15  # tokens of one validation pass


@cache
def starts(seed: int, steps: int, batch: int, places: int) -> Tensor:
    """Return where the windows of every step begin (steps, batch)."""
    drawn = np.random.default_rng(seed).integers(places, size=(steps, batch))
    return torch.from_numpy(drawn)


def windows(text: Tensor, begins: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    """Return inputs, and labels one ahead (batch, seq_len), from where each begins."""
    offsets = torch.arange(seq_len + 1, device=text.device)
    both = text.take(begins[:, None] + offsets).long()
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()


class Captured:
    """A run whose step reads nothing from the host: windows, learning rates and the
    number of the step are tensors on the device.

    Args:
        setting: how it is trained.
        recipe: by what, as ``research.compare.optimizers.build`` takes it.
        seed: of initial weights and of the windows.
        texts: to train on, and held out: 1-D integers on the setting's device.
        places: where windows begin, of training (steps, batch) and held out
            (held_out); None = drawn by the seed, and spread over the whole text.
        compile: whether the optimizer is compiled; None = as the setting says.
    """

    def __init__(
        self,
        setting: Setting,
        recipe: Mapping[str, Any],
        seed: int,
        texts: tuple[Tensor, Tensor],
        *,
        places: tuple[Tensor, Tensor] | None = None,
        compile: bool | None = None,
    ) -> None:
        self._setting, (self._train, self._held_out) = setting, texts
        self.model = setting.model(seed).to(setting.device)
        compile = setting.compile if compile is None else compile
        self.optimizer = build(self.model, recipe, steps=setting.steps, compile=compile)
        self._loss = compiled() if setting.compile else mean_loss
        self._peaks = [group["lr"] for group in self.optimizer.param_groups]
        on = dict(device=setting.device)
        for group in self.optimizer.param_groups:  # the capture would freeze a number
            group["lr"] = torch.full((), group["lr"], dtype=torch.float64, **on)
        shares = [setting.share_at(step) for step in range(1, setting.steps + 1)]
        self._shares = torch.tensor(shares, dtype=torch.float64, **on)
        if places is None:
            num = [len(text) - setting.seq_len for text in texts]
            spread = torch.arange(setting.held_out) * num[1] // setting.held_out
            places = starts(seed, setting.steps, setting.batch, num[0]), spread
        self._starts, self._spread = (place.to(setting.device) for place in places)
        self._at_once = setting.per_pass  # sequences of a validation pass
        self.losses = torch.zeros(setting.steps, **on)  # of every step's batch
        self._at = torch.zeros(1, dtype=torch.long, **on)
        self._graph: torch.cuda.CUDAGraph | None = None
        self.count = 0

    def step(self) -> None:
        """Take a step: all that a graph captures. Gradients are None before and after,
        so that the graph makes them in its own memory.
        """
        setting, at = self._setting, self._at
        share = self._shares.index_select(0, at)[0]
        for group, peak in zip(self.optimizer.param_groups, self._peaks, strict=True):
            group["lr"].copy_(share * peak)
        begins = self._starts.index_select(0, at)[0].split(setting.per_pass)
        losses = []
        for part in begins:
            loss = self._loss_at(self._train, part) / len(begins)
            loss.backward()
            losses.append(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.index_copy_(0, at, torch.stack(losses).sum()[None])
        at.add_(1)

    def _loss_at(self, text: Tensor, begins: Tensor) -> Tensor:
        batch = windows(text, begins, self._setting.seq_len)
        return self._loss(self.model, *batch, self._setting.dtype == "bfloat16")

    def advance(self) -> None:
        """Take the next step: eagerly on a CPU, and while a GPU warms up; then the
        graph's replay.
        """
        self.count += 1
        if self._setting.device == "cpu":
            self.step()
        elif self.count <= WARM_UP:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self.step()
            torch.cuda.current_stream().wait_stream(side)
        else:
            self._captured().replay()

    def _captured(self) -> torch.cuda.CUDAGraph:
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):  # recorded, not run
                self.step()
        return self._graph

    @torch.no_grad()
    def validate(self) -> float:
        """Return the loss of the held-out windows."""
        self.optimizer.eval()
        parts = self._spread.split(self._at_once)
        losses = [self._loss_at(self._held_out, part) for part in parts]
        self.optimizer.train()
        return float(torch.stack(losses).mean())


def texts(setting: Setting) -> tuple[Tensor, Tensor]:
    """Return the tokens to train on, and those held out, on the setting's device."""
    train, held_out = (
        torch.from_numpy(np.asarray(text[:]).astype(np.int32)).to(setting.device)
        for text in setting.texts()
    )
    return train, held_out


# ---- runs of studies -----------------------------------------------------------------


@cache
def _loaded(setting: Setting) -> tuple[Tensor, Tensor]:
    return texts(setting)


@cache
def plain_places(setting: Setting, seed: int) -> tuple[Tensor, Tensor]:
    """Return where the windows of ``research.compare.plain`` begin."""
    train, _ = setting.texts()
    own = dict(rank=0, world=1, seq_len=setting.seq_len)
    own |= dict(vocab_size=setting.vocab_size, local_batch=setting.batch)
    batches = Batches(train, **own, seed=seed)
    num = setting.steps * setting.batch
    drawn = torch.tensor([batches.start_of(sample) for sample in range(num)])
    held_out = torch.arange(setting.held_out) * setting.seq_len
    return drawn.view(setting.steps, setting.batch), held_out


class PlainRun(Captured):
    """A run of a study, by the optimizer compiled and a model that is not: its kernels
    are few, and a study has many shapes.
    """

    def __init__(
        self, setting: Setting, run: Run, texts: tuple[Tensor, Tensor]
    ) -> None:
        super().__init__(
            setting,
            run.recipe,
            run.seed,
            texts,
            places=plain_places(setting, run.seed),
            compile=setting.device == "cuda",
        )
        self._at_once = math.gcd(setting.held_out, AT_ONCE // setting.seq_len)


def train_run(
    setting: Setting, run: Run, deadline: float = math.inf
) -> dict[str, Any] | None:
    """Train a run from the start.

    Returns:
        its "curve", as ``research.compare.plain.train`` returns it, and "wall" seconds;
        None where the deadline of ``time.monotonic`` came first.
    """
    began = time.monotonic()
    graphs = PlainRun(setting, run, _loaded(setting))
    curve = []
    for point in validations(setting, graphs.advance, graphs.validate):
        if time.monotonic() > deadline:
            return None
        curve.append(point)
    return dict(curve=curve, wall=round(time.monotonic() - began, 1))


def can_capture(recipe: Mapping[str, Any]) -> bool:
    """Return whether a step of a recipe is the same work every time: SOAP refreshes its
    bases in some, and what neighbours.py counts on the host a graph would freeze.
    """
    rule = recipe["rule"]
    return "soap" not in rule and "adana" not in rule and "decay_omega" not in recipe


@contextmanager
def _alone(store: Path) -> Iterator[None]:
    """Hold the store against other processes of this module."""
    with open(store.with_suffix(".turn"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _claim(store: Path, name: str, title: str) -> bool:
    """Return whether this process is the first that wants a method of a study."""
    own = hashlib.sha256(f"{name} {title}".encode()).hexdigest()[:16]
    folder = store.with_suffix(".claims")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        (folder / own).open("x").close()
    except FileExistsError:
        return False
    return True


def run_method(
    path: Path, name: str, study: Study, title: str, device: str, deadline: float
) -> None:
    """Train all that a method of a study still needs."""
    setting = replace(study.setting, device=device)
    with _alone(path):
        store = Store(path, name)
        store.agree(setting.identity())
    while runs := study.wanted(title, store.losses):
        run = runs[0]
        line = train_run(setting, run, deadline)
        gc.collect()  # the graph's memory, before the next one's
        if line is None:
            return
        with _alone(path):
            store.add(run, line)
        said = f"{title} lr {run.recipe['lr']:.5g} seed {run.seed}"
        print(name, f"{said}: {line['curve'][-1][1]} ({line['wall']} s)", flush=True)


def main() -> None:
    """Train what the arguments say."""
    parser = argparse.ArgumentParser("python -m research.compare.graphs")
    add = parser.add_argument
    add("studies", nargs="+", metavar="STUDY", help="in the order in which they run")
    add("--module", default="research.studies")
    add("--store", type=Path, required=True, help="file of what was run")
    add("--methods", nargs="+", default=[], help="taken first (all in order)")
    add("--device", default="cuda", choices=("cpu", "cuda"))
    add("--minutes", type=float, default=math.inf, help="after which all is ended")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("got no GPU, expected one: give --device cpu to try it here")
    deadline = time.monotonic() + 60 * args.minutes
    while _take_one(args, deadline) and time.monotonic() < deadline:
        pass


def _take_one(args: argparse.Namespace, deadline: float) -> bool:
    """Run a method of a study that is not claimed, or wait for one that is not there
    yet, since its variant is still to be chosen; return whether any is left.
    """
    studies = {name: named(name, args.module) for name in args.studies}
    own = [(name, title) for name in studies for title in args.methods]
    others = [(name, title) for name in studies for title in studies[name].methods]
    for name, title in own + others:
        method = studies[name].methods.get(title)
        if (
            method is not None
            and can_capture(method.recipe)
            and _claim(args.store, name, title)
        ):
            run_method(args.store, name, studies[name], title, args.device, deadline)
            return True
    time.sleep(1)
    known = {title for study in studies.values() for title in study.methods}
    return not known.issuperset(args.methods)


if __name__ == "__main__":
    command(main)
