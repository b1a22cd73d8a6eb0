"""E3: 10.6M parameters at three horizons, every training step one CUDA graph.

    S=.venv/lib/python3.*/site-packages
    python -m train.prepare --source text --tokenizer bpe1024 --out data/packages_bpe \\
        $S/{transformers,torch,sympy,scipy,pandas,sklearn,mypy,matplotlib,numpy,nltk} \\
        --held-out $S/{networkx,huggingface_hub}
    python -m research.captured --data data/packages_bpe --out runs/captured

A replay draws the windows, sets the learning rate, runs forward and backward passes and
takes the optimizer's step; the host only launches it. Contenders of a seed see the same
windows. Every run that has ended is a line of OUT/runs.jsonl (a copy is kept as
research/study/horizons.jsonl); a later call skips what is there. The study's text was
98.5M tokens of 29 packages, and 3.0M held-out tokens of two; any text of this
vocabulary will do. Without a GPU, ``--miniature`` runs the same loop in a tiny shape,
eagerly. research/study.md ("10.6M parameters, three horizons")
has the predictions. torch and numpy are enough.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from marsopt.profiling.machine import describe, matmul_rate, one_line
from research.compare.graphs import Captured, texts
from research.compare.plain import WARM_UP, WORST, Setting
from research.log_time import HELD, TODAY, Contender
from research.studies import sized
from train.errors import UserError, command
from train.files import growing

PASS_TOKENS = 2**15  # of one forward and backward pass
# Learning rates of setting A: the best of research/study/ten_million.jsonl,
# for AdamW's family by a parabola through three of them
MATRIX_LR, ELEMENT_LR = 8.5e-3, 1.6e-3
CONTROL = "Moonlight"
CONTENDERS: dict[str, Contender] = {
    "for_model": replace(TODAY["for_model"], lr=MATRIX_LR),
    CONTROL: replace(TODAY["Moonlight"], lr=MATRIX_LR),
    "Moonlight, log time": Contender(  # its memory is capped: what ran on an H200
        HELD["Moonlight, log time"].recipe | dict(beta1=dict(log_time=10, cap=0.98)),
        MATRIX_LR,
    ),
    "AdamW, log time": replace(HELD["AdamW, log time"], lr=ELEMENT_LR),
    "NAdamW": replace(TODAY["NAdamW"], lr=ELEMENT_LR),
}


@dataclass(frozen=True)
class Horizon:
    """How long a run is, and by how much its learning rate differs from A's."""

    steps: int
    batch: int  # sequences of a step
    scale: float = 1.0


HORIZONS = {
    "A": Horizon(1_600, 32),
    "B": Horizon(1_600, 512, scale=1.5),
    "C": Horizon(25_600, 32, scale=0.4),
}
MINIATURE = {"A": Horizon(10, 4), "B": Horizon(10, 16), "C": Horizon(20, 4)}
# (horizon, seeds, factors on the learning rate), in the order in which they decide
PLAN = (
    ("A", (0, 1), (1.0,)),
    ("C", (0,), (1.0,)),
    ("A", (0,), (1 / 1.5, 1.5)),  # before AdamW in log time is called behind
    ("B", (0,), (1.0,)),
    ("C", (1,), (1.0,)),
    ("B", (1,), (1.0,)),
)


@dataclass(frozen=True)
class Planned:
    """A run of the plan."""

    horizon: str
    title: str
    seed: int
    lr: float
    setting: Setting

    @property
    def recipe(self) -> dict[str, Any]:
        """Return what ``research.compare.optimizers.build`` takes."""
        return CONTENDERS[self.title].recipe | {"lr": self.lr}

    def identity(self) -> dict[str, Any]:
        """Return what tells this run from others, and its line in the store."""
        own = dict(horizon=self.horizon, contender=self.title, seed=self.seed)
        return own | dict(
            lr=self.lr, steps=self.setting.steps, batch=self.setting.batch
        )


def plan(
    data: str, *, miniature: bool = False, compile: bool = True, only: str = "ABC"
) -> Iterator[Planned]:
    """Yield the runs in the order in which they decide.

    Args:
        data: folder of train.bin and val.bin.
        miniature: in a tiny shape on the CPU, eagerly.
        compile: whether model and optimizer are compiled on the GPU.
        only: letters of HORIZONS.
    """
    for letter, seeds, factors in PLAN:
        horizon = (MINIATURE if miniature else HORIZONS)[letter]
        setting = _setting(data, horizon, miniature, compile)
        for seed in seeds if letter in only else ():
            for factor in factors:
                for title, contender in CONTENDERS.items():
                    lr = _rate(contender, horizon, factor)
                    yield Planned(letter, title, seed, lr, setting)


def _rate(contender: Contender, horizon: Horizon, factor: float = 1.0) -> float:
    return float(f"{contender.lr * horizon.scale * factor:.3g}")


def _setting(data: str, horizon: Horizon, miniature: bool, compile: bool) -> Setting:
    own = dict(data=data, vocab_size=1024)
    if miniature:
        small = sized(1, 16, 1, batch=horizon.batch, steps=horizon.steps)
        own |= dict(seq_len=16, micro_batch=4, held_out=8, points=2)
        return replace(small, **own)
    seq_len = 256
    own |= dict(seq_len=seq_len, held_out=2048, points=10, device="cuda")
    own |= dict(micro_batch=min(horizon.batch, PASS_TOKENS // seq_len))
    large = sized(6, 384, 6, batch=horizon.batch, steps=horizon.steps)
    return replace(large, **own, dtype="bfloat16", compile=compile)


def train(planned: Planned, texts: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """Train from the start.

    Returns:
        "curve", [[step, held-out loss in nats a token]], which ends with null where a
        run has diverged; "seconds" of the run, "setup" and "training" in it; and of
        training "tokens_per_second", "flops_per_second"; "peak_bytes" of a GPU.
    """
    setting, began = planned.setting, time.monotonic()
    run = Captured(setting, planned.recipe, planned.seed, texts)
    on_gpu = setting.device == "cuda"
    first = WARM_UP + 1  # the capture, and its first replay
    for _ in range(first):
        run.advance()
    _wait(setting)
    setup, training = time.monotonic() - began, 0.0
    interval, curve = -(-setting.steps // setting.points), []
    worst, since = WORST * math.log(setting.vocab_size), time.monotonic()
    for done in range(first + 1, setting.steps + 1):
        run.advance()
        if done % interval and done != setting.steps:
            continue
        _wait(setting)
        training += time.monotonic() - since
        loss = run.validate()
        curve.append([done, round(loss, 6) if loss < worst else None])
        if curve[-1][1] is None:
            break
        since = time.monotonic()
    tokens = (done - first) * setting.batch * setting.seq_len
    num_params = sum(p.numel() for p in run.model.parameters())
    flops = setting.shape.num_flops_per_token(num_params, setting.seq_len)
    return dict(
        curve=curve,
        seconds=round(time.monotonic() - began, 1),
        setup=round(setup, 1),
        training=round(training, 2),
        tokens_per_second=round(tokens / training),
        flops_per_second=round(flops * tokens / training),
        last_batches=run.losses[max(0, done - 100) : done].mean().item(),
        skipped=int(run.optimizer.num_skipped),
        peak_bytes=torch.cuda.max_memory_allocated() if on_gpu else None,
    )


def _wait(setting: Setting) -> None:
    if setting.device == "cuda":
        torch.cuda.synchronize()


class Pace:
    """How long a run will take, by the runs of this process."""

    SETUP, COMPILE = 10.0, 30.0  # seconds, of an optimizer or of a model's batch
    TOKENS = 1.5e6  # a second, before any run has shown it

    def __init__(self) -> None:
        self._rates: dict[int, float] = {}  # by sequences of a step
        self._compiled: set[str] = set()  # contenders

    def seconds(self, planned: Planned) -> float:
        """Return an estimate, rather too long than too short."""
        setting = planned.setting
        slowest = min(self._rates.values(), default=self.TOKENS)
        rate = self._rates.get(setting.batch, slowest)
        new = planned.title not in self._compiled, setting.batch not in self._rates
        tokens = setting.steps * setting.batch * setting.seq_len
        return self.SETUP + sum(new) * self.COMPILE + tokens / rate

    def add(self, planned: Planned, found: Mapping[str, Any]) -> None:
        """Take note of a run."""
        batch, rate = planned.setting.batch, found["tokens_per_second"]
        self._rates[batch] = min(rate, self._rates.get(batch, rate))
        self._compiled.add(planned.title)


def run_all(runs: Sequence[Planned], out: Path, minutes: float) -> list[dict]:
    """Run what ``out`` does not have, until a run would end too late; return all lines
    of ``out``.
    """
    deadline, pace = time.monotonic() + 60 * minutes, Pace()
    found, loaded = stored(out), None
    done = [line["run"] for line in found]
    left = [planned for planned in runs if planned.identity() not in done]
    rate = None
    for planned in left:
        wanted = pace.seconds(planned)
        if time.monotonic() + wanted > deadline:
            print(f"no time for {planned.identity()}: it needs {wanted:.0f} s")
            break
        loaded = loaded or texts(planned.setting)
        if planned.setting.device == "cuda" and rate is None:
            rate = matmul_rate("cuda", torch.bfloat16)
        line = dict(run=planned.identity(), **train(planned, loaded), matmul_rate=rate)
        pace.add(planned, line)
        found.append(line)
        with growing(out / "runs.jsonl") as file:
            file.write(json.dumps(line).encode() + b"\n")
        print(_said(line), flush=True)
        gc.collect()  # the graph's memory, before the next one's
        if planned.setting.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    return found


def stored(out: Path) -> list[dict]:
    """Return the lines of a store; a last one that was cut off is taken out."""
    path = out / "runs.jsonl"
    if not path.exists():
        return []
    content = path.read_bytes()
    *whole, rest = content.split(b"\n")
    os.truncate(path, len(content) - len(rest))
    return [json.loads(line) for line in whole]


def _said(line: Mapping[str, Any]) -> str:
    run, loss = line["run"], line["curve"][-1][1]
    return (
        f"{run['horizon']} seed {run['seed']} {run['contender']} lr {run['lr']:g}: "
        f"{loss} in {line['seconds']} s ({line['setup']} s of setup), "
        f"{line['tokens_per_second']:,} tokens/s{_share(line)}"
    )


def _share(line: Mapping[str, Any]) -> str:
    if line["matmul_rate"] is None:
        return ""
    share = line["flops_per_second"] / line["matmul_rate"]
    return f", {share:.1%} of the card's bf16 product"


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return Markdown: losses, and paired differences to Moonlight of the same horizon
    and seed, each at the plan's own learning rate.
    """
    rows = ["| horizon | contender | lr | seeds | loss | to Moonlight | tokens/s |"]
    rows.append("|---|---|---|---|---|---|---|")
    groups: dict[tuple, dict[int, Mapping[str, Any]]] = {}
    for line in lines:
        run = line["run"]
        key = run["horizon"], run["contender"], run["lr"]
        groups.setdefault(key, {})[run["seed"]] = line
    for (horizon, title, lr), seeds in sorted(groups.items()):
        losses = {seed: line["curve"][-1][1] for seed, line in seeds.items()}
        control = groups.get((horizon, CONTROL, _control_lr(seeds)), {})
        pairs = [
            losses[seed] - control[seed]["curve"][-1][1]
            for seed in losses.keys() & control.keys()
            if None not in (losses[seed], control[seed]["curve"][-1][1])
        ]
        shown = ", ".join(
            "diverged" if x is None else f"{x:.4f}" for x in losses.values()
        )
        paired = f"{statistics.mean(pairs):+.4f}" if pairs else ""
        speed = statistics.median(x["tokens_per_second"] for x in seeds.values())
        rows.append(
            f"| {horizon} | {title} | {lr:g} | {', '.join(map(str, losses))} | {shown} "
            f"| {paired} | {speed:,.0f} |"
        )
    return "\n".join(rows)


def _control_lr(seeds: Mapping[int, Mapping[str, Any]]) -> float:
    run = next(iter(seeds.values()))["run"]
    every = [horizons[run["horizon"]] for horizons in (HORIZONS, MINIATURE)]
    horizon = next(h for h in every if h.steps == run["steps"])
    return _rate(CONTENDERS[CONTROL], horizon)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser("python -m research.captured")
    add = parser.add_argument
    add("--data", required=True, help="folder of train.bin and val.bin")
    add("--out", type=Path, required=True, help="folder of runs.jsonl and table.md")
    add("--minutes", type=float, default=12.0, help="after which no run ends")
    add("--only", default="ABC", help="letters of horizons")
    add("--miniature", action="store_true", help="a tiny shape, on the CPU")
    add("--eager", action="store_true", help="compile nothing on the GPU")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    """Run what is left, then print the table."""
    args = arguments(words)
    if not args.miniature and not torch.cuda.is_available():
        raise UserError("got no GPU, expected one: give --miniature to try it here")
    if not args.miniature:
        print(one_line(describe("cuda")), flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    own = dict(miniature=args.miniature, compile=not args.eager, only=args.only)
    lines = run_all([*plan(args.data, **own)], args.out, args.minutes)
    text = table(lines)
    (args.out / "table.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    command(main)
