"""Runs of the plain loop on one GPU, every training step one CUDA graph.

    python -m research.compare.graphs warm_up_480 warm_up_1920 --store FILE \\
        --module research.warm_up --methods Moonlight "Moonlight, log time"

trains what studies still need, as ``research.compare`` does on a CPU: the same weights,
windows and learning rates, so both may share a store. A replay draws the windows, sets
the learning rate, runs forward and backward passes and takes the optimizer's step; the
host only launches it. Of an optimizer that no graph can hold the gradients alone are
one, and the host takes the step.

A process trains some runs side by side, each on a stream of its own, and several
processes may share the GPU and a store: a run is claimed by a line of a file beside it.
On a CPU (--device cpu) runs go by the plain loop.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from research.compare.optimizers import TORCH_MUON, build
from research.compare.plain import (
    WARM_UP,
    Setting,
    compiled,
    mean_loss,
    train,
    validations,
)
from research.compare.store import Store
from research.compare.study import Run, Study, named
from train.data.batches import Batches
from train.errors import UserError, command

AT_ONCE = 2**15  # tokens of one validation pass
AGAIN = 1.0  # seconds until other processes are asked for runs again


def windows(text: Tensor, begins: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    """Return inputs, and labels one ahead (batch, seq_len), from where each begins."""
    offsets = torch.arange(seq_len + 1, device=text.device)
    both = text.take(begins[:, None] + offsets).long()
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()


@cache
def texts(setting: Setting) -> tuple[Tensor, Tensor]:
    """Return the tokens to train on, and those held out, on the setting's device."""
    train, held_out = (
        torch.from_numpy(np.asarray(text[:]).astype(np.int32)).to(setting.device)
        for text in setting.texts()
    )
    if setting.device == "cuda":
        torch.cuda.synchronize()  # before other streams read them
    return train, held_out


@cache
def places(setting: Setting, seed: int) -> tuple[Tensor, Tensor]:
    """Return where the windows of ``research.compare.plain`` begin: of training (steps
    + 1, batch), one ahead for an exact correction, and held out (held_out).
    """
    train, _ = setting.texts()
    own = dict(rank=0, world=1, seq_len=setting.seq_len)
    own |= dict(vocab_size=setting.vocab_size, local_batch=setting.batch)
    batches = Batches(train, **own, seed=seed)
    num = (setting.steps + 1) * setting.batch
    drawn = torch.tensor([batches.start_of(sample) for sample in range(num)])
    held_out = torch.arange(setting.held_out) * setting.seq_len
    return drawn.view(-1, setting.batch), held_out


def can_capture(recipe: Mapping[str, Any]) -> bool:
    """Return whether a step of a recipe is the same work every time, without the host:
    SOAP refreshes its bases in some, an exact correction takes two gradients, and
    torch's Muon reads its learning rate.
    """
    rule, correction = recipe["rule"], recipe.get("correction")
    return "soap" not in rule and rule != TORCH_MUON and correction != "exact"


class Captured:
    """A run whose step reads nothing from the host: windows, learning rates and the
    number of the step are tensors on the device. On a GPU an optimizer that a graph can
    hold is compiled, the model only as the setting says: a study has many shapes.

    Args:
        setting: how it is trained.
        run: what is trained.
        stream: of all its work; None = on a CPU.
    """

    PAUSE = 64  # steps that are launched before other runs have their turn

    def __init__(
        self, setting: Setting, run: Run, stream: torch.cuda.Stream | None = None
    ) -> None:
        setting = setting.of(run.recipe)
        self.stream, self._setting, self._began = stream, setting, time.monotonic()
        self._turn = (
            nullcontext if stream is None else partial(torch.cuda.stream, stream)
        )
        with self._turn():
            self._prepare(run)
        self.curve: list[list[float | None]] = []
        own = setting, self.advance, self.validate
        self._points = validations(*own, pause=self.PAUSE)

    def _prepare(self, run: Run) -> None:
        setting, on = self._setting, dict(device=self._setting.device)
        self._train, self._held_out = texts(setting)
        self.model = setting.model(run.seed).to(**on)
        self._is_whole = can_capture(run.recipe)
        self._is_exact = run.recipe.get("correction") == "exact"
        compile = self._is_whole and setting.device == "cuda"
        own = dict(steps=setting.steps, compile=compile)
        self.optimizer = build(self.model, run.recipe, **own)
        self._loss = compiled() if setting.compile else mean_loss
        self._peaks = [group["lr"] for group in self.optimizer.param_groups]
        self._shares = [setting.share_at(i) for i in range(1, setting.steps + 1)]
        self._share_of_step = torch.tensor(self._shares, dtype=torch.float64, **on)
        if self._is_whole:  # the capture would freeze a number
            for group in self.optimizer.param_groups:
                group["lr"] = torch.full((), group["lr"], dtype=torch.float64, **on)
        both = places(setting, run.seed)
        self._starts, self._spread = (place.to(**on) for place in both)
        self._at_once = math.gcd(setting.held_out, AT_ONCE // setting.seq_len)
        self.losses = torch.zeros(setting.steps + 1, **on)  # of every step's batch
        self._at = torch.zeros(1, dtype=torch.long, **on)
        self._graph: torch.cuda.CUDAGraph | None = None
        self.count = 0

    def step(self) -> None:
        """Take a step: all that a graph captures. Gradients are None before and after,
        so that the graph makes them in its own memory.
        """
        share = self._share_of_step.index_select(0, self._at)[0]
        for group, peak in zip(self.optimizer.param_groups, self._peaks, strict=True):
            group["lr"].copy_(share * peak)
        self.gradient()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._at.add_(1)

    def gradient(self) -> None:
        """Add the gradient of the present step's batch to what is there."""
        setting, at = self._setting, self._at
        begins = self._starts.index_select(0, at)[0].split(setting.per_pass)
        losses = []
        for part in begins:
            loss = self._loss_at(self._train, part) / len(begins)
            loss.backward()
            losses.append(loss.detach())
        self.losses.index_copy_(0, at, torch.stack(losses).sum()[None])

    def step_by_host(self) -> None:
        """Take a step of which a graph captures the gradients alone: a replay makes
        them anew, in the same memory.
        """
        share = self._shares[self.count - 1]
        for group, peak in zip(self.optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * share
        if self._is_exact:
            self._at.add_(1)
            self._launch(self.gradient)
            self.optimizer.update_previous_grad()
            self._at.sub_(1)
        self._launch(self.gradient)
        self.optimizer.step()
        if self._is_exact:
            self.optimizer.update_last_grad()
        self._at.add_(1)

    def _loss_at(self, text: Tensor, begins: Tensor) -> Tensor:
        batch = windows(text, begins, self._setting.seq_len)
        return self._loss(self.model, *batch, self._setting.dtype == "bfloat16")

    def advance(self) -> None:
        """Take the next step."""
        self.count += 1
        if self._is_whole:
            self._launch(self.step)
        else:
            self.step_by_host()

    def _launch(self, work: Callable[[], None]) -> None:
        """Do the one work of this run's graph: eagerly on a CPU, and while a GPU warms
        up; then the graph's replay.
        """
        is_eager = self.stream is None or self.count <= WARM_UP
        if is_eager or self._graph is None:
            self.optimizer.zero_grad()
        if is_eager:
            work()
            return
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=self.stream):
                work()  # recorded, not run
        self._graph.replay()

    @torch.no_grad()
    def validate(self) -> float:
        """Return the loss of the held-out windows."""
        parts = self._spread.split(self._at_once)
        losses = [self._loss_at(self._held_out, part) for part in parts]
        return float(torch.stack(losses).mean())

    def go_on(self) -> dict[str, Any] | None:
        """Launch some steps, to the next validation at most.

        Returns:
            after the last, "curve" as ``research.compare.plain.train`` returns it, and
            "wall" seconds; before it None.
        """
        with self._turn():
            for point in self._points:
                if not point:
                    return None
                self.curve.append(point)
        return dict(curve=self.curve, wall=round(time.monotonic() - self._began, 1))


# ---- runs of studies -----------------------------------------------------------------


class Wanted:
    """What studies still need, for several processes that share a store: each takes
    runs that no other has claimed.

    Args:
        store: file of what was run. Claims are a file beside it.
        studies: by name, in the order in which they run.
        titles: methods to run, in their order; none = all.
        device: to train on.
    """

    def __init__(
        self,
        store: Path,
        studies: Mapping[str, Study],
        titles: Sequence[str] = (),
        device: str = "cuda",
    ) -> None:
        self._path, self._claims = store, store.with_suffix(".claims")
        self._studies = {
            name: replace(study, setting=replace(study.setting, device=device))
            for name, study in studies.items()
        }
        self._titles = titles
        self._took: dict[str, float] = {}  # seconds of a run, by study
        self.is_over = False
        with self._alone():
            for name, study in self._studies.items():
                Store(store, name).agree(study.setting.identity())

    @contextmanager
    def _alone(self) -> Iterator[IO]:
        """Hold store and claims against other processes."""
        with open(self._claims, "a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file

    def next(self, deadline: float) -> tuple[str, Setting, Run] | None:
        """Claim a run that would end in time, and return it with its study's name;
        searches come first, then the seeds at the best points, best method first.
        ``is_over`` says afterwards whether nothing is left, here or elsewhere.
        """
        self.is_over = True
        with self._alone() as file:
            file.seek(0)
            claimed = set(file.read().split())
            for name, study in self._studies.items():
                if time.monotonic() + self._took.get(name, 0.0) > deadline:
                    continue
                for run in self._runs(name, study):
                    self.is_over = False
                    key = hashlib.sha256(f"{name} {run.key}".encode()).hexdigest()
                    if key not in claimed:
                        file.write(f"{key}\n")
                        return name, study.setting, run
        return None

    def _runs(self, name: str, study: Study) -> list[Run]:
        losses = Store(self._path, name).losses
        every = self._titles or study.methods
        titles = [title for title in every if title in study.methods]
        found = {title: study.search(title, losses) for title in titles}
        ended = [title for title in titles if not found[title].wanted]
        searching = [title for title in titles if found[title].wanted]
        ended.sort(key=lambda title: found[title].losses[found[title].best])
        return [run for t in searching + ended for run in study.wanted(t, losses)]

    def add(self, name: str, run: Run, line: dict[str, Any]) -> None:
        """Keep what a run showed."""
        self._took[name] = line["wall"]
        with self._alone():
            Store(self._path, name).add(run, line)
        recipe = run.recipe
        how = f"{recipe['rule']} {recipe.get('warmup', '')} lr {recipe['lr']:.5g}"
        said = f"{how} seed {run.seed}"
        print(name, f"{said}: {line['curve'][-1][1]} ({line['wall']} s)", flush=True)


def train_all(
    every: Sequence[Wanted],
    streams: Sequence[torch.cuda.Stream | None],
    deadline: float,
) -> None:
    """Train what is wanted, first things first, some runs side by side.

    Args:
        every: what is wanted.
        streams: one for each run at a time: graphs that were captured on one stream
            share cuBLAS's workspace, and train wrongly side by side. None = on the CPU.
        deadline: of ``time.monotonic``; what has not ended then is given up.
    """
    free, active, asked = [*streams], [], 0.0
    while (now := time.monotonic()) < deadline:
        while free and now - asked > AGAIN:
            tasks = ((wanted, wanted.next(deadline)) for wanted in every)
            wanted, task = next((t for t in tasks if t[1]), (None, None))
            if task is None:
                asked = now
                break
            name, setting, run = task
            training = Captured(setting, run, free.pop())
            active.append((wanted, name, run, training))
        for entry in [*active]:
            wanted, name, run, training = entry
            if (line := training.go_on()) is not None:
                wanted.add(name, run, line)
                active.remove(entry)
                free.append(training.stream)
                asked = 0.0
        if not active:
            if all(wanted.is_over for wanted in every):
                return
            time.sleep(AGAIN)
        elif not asked:
            del entry, training
            gc.collect()  # graphs of runs that have ended


def train_alone(wanted: Wanted, deadline: float) -> None:
    """Train what is wanted on the CPU, by ``research.compare.plain``."""
    while time.monotonic() < deadline:
        task = wanted.next(deadline)
        if task is None:
            if wanted.is_over:
                return
            time.sleep(AGAIN)
            continue
        name, setting, run = task
        began = time.monotonic()
        line = train(setting, run.recipe, run.seed)
        wanted.add(name, run, line | dict(wall=round(time.monotonic() - began, 1)))


def main() -> None:
    """Train what the arguments say."""
    parser = argparse.ArgumentParser("python -m research.compare.graphs")
    add = parser.add_argument
    add("studies", nargs="+", metavar="STUDY", help="in the order in which they run")
    add("--module", default="research.studies")
    add("--store", type=Path, required=True, help="file of what was run")
    add("--methods", nargs="+", default=[], help="titles (all)")
    add("--device", default="cuda", choices=("cpu", "cuda"))
    add("--slots", type=int, default=8, help="runs side by side on the GPU")
    add("--minutes", type=float, default=math.inf, help="after which all is ended")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("got no GPU, expected one: give --device cpu to try it here")
    deadline = time.monotonic() + 60 * args.minutes
    studies = {name: named(name, args.module) for name in args.studies}
    wanted = Wanted(args.store, studies, args.methods, args.device)
    if args.device == "cpu":
        train_alone(wanted, deadline)
    else:
        train_all([wanted], [torch.cuda.Stream() for _ in range(args.slots)], deadline)


if __name__ == "__main__":
    command(main)
