"""Runs of a plain loop: a GPT-2 and an optimizer by name, on a CPU or one GPU.

python -m research.compare.plain SETTING RECIPE SEED FILE trains, and writes what it
showed; torch and numpy are enough.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from marsopt.profiling.machine import matmul_rate
from research.compare.optimizers import LOOP, build
from train.data.batches import Batches
from train.data.token_files import Stream, open_raw, open_shard
from train.data.tokens import SPLITS
from train.engine.schedule import cosine, linear
from train.errors import UserError, check_least
from train.files import write_json
from train.gpt2 import GPT2, Shape

if TYPE_CHECKING:
    from research.compare.study import Run

FOUND = "found.json"
WARM_UP = 3  # steps that compile, and make the state; no time counts them
WORST = 1.5  # times the loss of a uniform guess, beyond which a run has diverged
EXECUTION = ("data", "device", "micro_batch", "compile")
SCHEDULES = dict(cosine=cosine, linear=linear)
CHOICES = dict(
    device=("cpu", "cuda"), dtype=("float32", "bfloat16"), schedule=tuple(SCHEDULES)
)
NUM_SAMPLED = 2**16  # tokens by which a text is known, and their number
Tokens = np.ndarray | Stream


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How every method of a study is trained.

    Args:
        data: folder of train.bin and val.bin (uint16), as train.prepare or nanoGPT
            makes them, or of llm.c's shards.
        layers, heads, width, vocab_size, inverse_layer_scale: of the model.
        tied: whether the output head is the token embedding.
        seq_len: tokens of a sequence.
        batch: sequences of a step, whose gradient is their mean.
        micro_batch: sequences of one forward and backward pass; None = ``batch``.
        steps: of a run, after which the learning rate is at ``floor``.
        warmup: share of the steps, linear from 0, before the schedule.
        schedule: "cosine" (half of one) or "linear".
        floor: last learning rate, as a share of the peak.
        held_out: sequences of a validation, the first of the held-out text.
        points: validations of a run.
        device: "cpu" or "cuda".
        dtype: "bfloat16" (autocast over float32 parameters) or "float32".
        compile: whether model and optimizer are compiled.
    """

    data: str
    layers: int
    heads: int
    width: int
    vocab_size: int
    seq_len: int
    batch: int
    steps: int
    held_out: int
    micro_batch: int | None = None
    inverse_layer_scale: bool = False
    tied: bool = True
    warmup: float = 0.1
    schedule: str = "cosine"
    floor: float = 0.1
    points: int = 4
    device: str = "cpu"
    dtype: str = "float32"
    compile: bool = False
    keeps: ClassVar[bool] = False
    unit: ClassVar[str] = "token"

    @property
    def shape(self) -> Shape:
        """Return the model's."""
        return Shape(
            self.layers,
            self.heads,
            self.width,
            self.seq_len,
            self.vocab_size,
            self.inverse_layer_scale,
        )

    @property
    def per_pass(self) -> int:
        """Return the sequences of one pass."""
        return self.micro_batch or self.batch

    def model(self, seed: int) -> GPT2:
        """Return the model as a run begins with it, on the CPU."""
        model = (GPT2 if self.tied else Untied)(self.shape)
        model.init_weights(seed)
        return model

    def of(self, recipe: Mapping[str, Any]) -> Setting:
        """Return the setting of a recipe's runs, which may have a warm-up, a batch and
        steps of their own.
        """
        return replace(self, **{name: recipe[name] for name in LOOP if name in recipe})

    def share_at(self, step: int) -> float:
        """Return the learning rate of a step, from 1 on, as a share of its peak."""
        warmup = max(1, round(self.warmup * self.steps))
        schedule = SCHEDULES[self.schedule]
        return schedule(step, warmup=warmup, total=self.steps, floor=self.floor)

    def texts(self) -> tuple[Tokens, Tokens]:
        """Return the tokens to train on, and those that are held out."""
        return tuple(tokens(Path(self.data), split) for split in SPLITS)

    def check(self, recipes: Mapping[str, Mapping[str, Any]]) -> None:
        """Check the setting, and that all methods can be built.

        Raises:
            UserError: what does not fit together, data that is not there, a recipe with
                an option that nothing takes.
        """
        check_least(1, layers=self.layers, heads=self.heads, width=self.width)
        check_least(1, micro_batch=self.micro_batch, points=self.points)
        check_least(1, vocab_size=self.vocab_size, held_out=self.held_out)
        check_least(1, seq_len=self.seq_len)
        check_least(0, 1, floor=self.floor)
        for own in (self, *map(self.of, recipes.values())):
            own._check_loop()
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise UserError(
                    f"got {name}={getattr(self, name)!r}, expected one of "
                    f"{', '.join(choices)}: choose one"
                )
        if self.width % self.heads:
            raise UserError(
                f"got width={self.width} and heads={self.heads}, expected a multiple "
                "of them: change one of the two"
            )
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UserError(
                "got device=cuda, expected a GPU that torch can use: give --set "
                "device=cpu"
            )
        _, held_out = self.texts()
        if self.held_out > (len(held_out) - 1) // self.seq_len:
            raise UserError(
                f"got held_out={self.held_out} sequences of {self.seq_len} tokens, "
                f"expected no more than a text of {len(held_out):,} has: change it"
            )
        model = GPT2(Shape(1, 1, 8, 8, 8))  # any: a recipe knows none
        for title, recipe in recipes.items():
            try:
                whole = copy.deepcopy(model)
                start(whole, recipe)
                build(whole, recipe, steps=self.steps, compile=False)
            except KeyError as error:
                raise UserError(
                    f"{title}: got no {error}, expected it in the recipe or as an "
                    "axis: give it"
                ) from error
            except (TypeError, ValueError) as error:
                raise UserError(f"{title}: {error}") from error

    def _check_loop(self) -> None:
        """Check what a recipe may have of its own, and what depends on it."""
        check_least(1, batch=self.batch, steps=self.steps)
        check_least(0, 1, warmup=self.warmup)
        for name, whole in (("batch", self.batch), ("held_out", self.held_out)):
            if whole % self.per_pass:
                raise UserError(
                    f"got {name}={whole} and passes of {self.per_pass} sequences, "
                    "expected a multiple of them: change one of the two"
                )

    def identity(self) -> dict[str, Any]:
        """Return what two calls must agree on, by name: what is computed, not where."""
        own = {key: v for key, v in asdict(self).items() if key not in EXECUTION}
        return own | dict(zip(SPLITS, map(_checksum, self.texts()), strict=True))

    def command(self, run: Run, folder: Path) -> tuple[str, list[str]]:
        """Return the module and the arguments that train a run."""
        return __name__, arguments(self, run, folder)

    def found(self, folder: Path) -> dict[str, Any] | None:
        """Return what a run in ``folder`` showed; None before its end."""
        return result_in(folder)


def arguments(setting: Any, run: Run, folder: Path) -> list[str]:
    """Return the arguments with which the module of a setting trains a run."""
    values = asdict(setting), dict(run.recipe), run.seed
    return [*map(json.dumps, values), str(folder / FOUND)]


def result_in(folder: Path) -> dict[str, Any] | None:
    """Return what a run wrote into ``folder``; None before its end."""
    path = folder / FOUND
    if not path.exists():
        return None
    result: dict[str, Any] = json.loads(path.read_bytes())
    return result


def tokens(folder: Path, split: str) -> Tokens:
    """Return the tokens of a split, "train" or "val"."""
    raw, shards = folder / f"{split}.bin", sorted(folder.glob(f"*_{split}*.bin"))
    if shards and not raw.exists():
        return Stream([open_shard(path) for path in shards])
    return open_raw(raw)


def _checksum(text: Tokens) -> str:
    """Return what tells a text from others: its length and the SHA-256 of its start."""
    start = np.ascontiguousarray(text[:NUM_SAMPLED], dtype="<u2")
    return f"{len(text)} {hashlib.sha256(start.tobytes()).hexdigest()}"


def mean_loss(model: GPT2, inputs: Tensor, labels: Tensor, half: bool) -> Tensor:
    """Return the mean loss of (micro_batch, seq_len) tokens; ``half``: in bfloat16."""
    with torch.autocast(inputs.device.type, torch.bfloat16, enabled=half):
        if model.wte.weight.dtype == torch.float32:
            logits = model(inputs)
        else:  # arithmetic in float32: what is compared is how weights are stored
            weights = {name: p.float() for name, p in model.named_parameters()}
            logits = functional_call(model, weights, inputs)
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


@cache
def compiled() -> Callable[..., Tensor]:
    """Return ``mean_loss`` compiled: once for all models of one shape."""
    return torch.compile(mean_loss, fullgraph=True, dynamic=False)


class Untied(GPT2):
    """A GPT-2 whose output head is a matrix of its own."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.head = nn.Linear(shape.width, shape.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return (batch, time, vocab_size) logits of (batch, time) tokens."""
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.layers.values():
            x = block(x)
        return self.head(self.norm(x))


class Task:
    """The model, its loss, and its batches, the same for every method of a seed."""

    def __init__(
        self, setting: Setting, seed: int, train: Tokens, held_out: Tokens
    ) -> None:
        self._setting = setting
        self.model = setting.model(seed).to(setting.device)
        own = dict(rank=0, world=1, seq_len=setting.seq_len)
        own |= dict(vocab_size=setting.vocab_size)
        self.batches = Batches(train, **own, local_batch=setting.batch, seed=seed)
        first = held_out[: setting.held_out * setting.seq_len + 1]
        order = dict(local_batch=setting.per_pass, spread=setting.held_out)
        self._held_out = partial(Batches, first, **own, **order)
        self._loss = partial(compiled() if setting.compile else mean_loss, self.model)
        self._half = setting.dtype == "bfloat16"

    def _micro(self, both: tuple[Tensor, Tensor]) -> Iterator[tuple[Tensor, ...]]:
        device, size = self._setting.device, self._setting.per_pass
        if device == "cuda":  # or copies would wait for the GPU
            both = both[0].pin_memory(), both[1].pin_memory()
        inputs, labels = (x.to(device, non_blocking=True) for x in both)
        yield from zip(inputs.split(size), labels.split(size), strict=True)

    def gradient(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Add the gradient of a batch's mean loss to what is there; return the loss."""
        num = self._setting.batch // self._setting.per_pass
        losses = []
        for inputs, labels in self._micro(batch):
            loss = self._loss(inputs, labels, self._half) / num
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    @torch.no_grad()
    def validate(self) -> float:
        """Return the loss of the first held-out sequences."""
        batches, losses = self._held_out(), []
        for _ in range(self._setting.held_out // self._setting.per_pass):
            ((inputs, labels),) = self._micro(batches.next())
            losses.append(self._loss(inputs, labels, self._half))
        return float(torch.stack(losses).mean())


class Clock:
    """Times of steps: of the GPU by its events, which wait for nobody, else of the
    wall.
    """

    def __init__(self, device: str) -> None:
        self._on_gpu = device == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Note this moment of the work that is under way."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def steps(self) -> list[tuple[float, float]]:
        """Return the seconds of gradients and optimizer of every step, which has three
        marks; a GPU is waited for.
        """
        every = zip(*(self._marks[i::3] for i in range(3)), strict=True)
        if not self._on_gpu:
            return [(b - a, c - b) for a, b, c in every]
        torch.cuda.synchronize()
        return [(a.elapsed_time(b) / 1e3, b.elapsed_time(c) / 1e3) for a, b, c in every]


@torch.no_grad()
def start(model: GPT2, recipe: Mapping[str, Any]) -> None:
    """Change a new model's weights as a recipe says: "weights", a dtype by name;
    "perturb", whether each weight becomes the next larger number.
    """
    if recipe.get("perturb"):
        for p in model.parameters():
            p.copy_(torch.nextafter(p, torch.full_like(p, math.inf)))
    model.to(getattr(torch, recipe.get("weights", "float32")))


class Training:
    """A run under way.

    Args:
        setting: how it is trained.
        recipe: by what, as ``research.compare.optimizers.build`` takes it.
        seed: of initial weights and of the order of the data.
        texts: to train on, and held out.
        compile: whether the optimizer is compiled; None = as the setting says.
    """

    def __init__(
        self,
        setting: Setting,
        recipe: Mapping[str, Any],
        seed: int,
        texts: tuple[Tokens, Tokens],
        compile: bool | None = None,
    ) -> None:
        self.setting = setting = setting.of(recipe)
        self.task = Task(setting, seed, *texts)
        start(self.task.model, recipe)
        compile = setting.compile if compile is None else compile
        self.optimizer = build(
            self.task.model, recipe, steps=setting.steps, compile=compile
        )
        self._exact = recipe.get("correction") == "exact"
        self._share_at = setting.share_at
        self._peaks = [group["lr"] for group in self.optimizer.param_groups]
        self._ahead = self.task.batches.next()
        self.clock, self.count = Clock(setting.device), 0

    def gradient(self) -> Tensor:
        """Take the gradient of the next batch; return its loss."""
        self.count += 1
        share = self._share_at(self.count)
        for group, peak in zip(self.optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * share
        batch, self._ahead = self._ahead, self.task.batches.next()
        self.clock.mark()
        if self._exact:
            self.task.gradient(self._ahead)
            self.optimizer.update_previous_grad()
            self.optimizer.zero_grad()
        loss = self.task.gradient(batch)
        self.clock.mark()
        return loss

    def update(self) -> None:
        """Step, and let go of the gradient."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self._exact:
            self.optimizer.update_last_grad()
        self.clock.mark()

    def validate(self) -> float:
        """Return the held-out loss."""
        return self.task.validate()


def validations(
    setting: Setting,
    advance: Callable[[], object],
    validate: Callable[[], float],
    pause: int | None = None,
) -> Iterator[list[float | None]]:
    """Take all steps of a run; yield [step, held-out loss] at each of its points. A run
    that has diverged ends with a loss of None.

    Args:
        setting: how it is trained.
        advance: takes the next step.
        validate: returns the held-out loss.
        pause: steps after which an empty list is yielded, for other work; None = never.
    """
    interval = -(-setting.steps // setting.points)
    worst = WORST * math.log(setting.vocab_size)
    for step in range(1, setting.steps + 1):
        advance()
        if step % interval == 0 or step == setting.steps:
            loss = validate()
            yield [step, loss if loss < worst else None]
            if not loss < worst:
                return
        elif pause and step % pause == 0:
            yield []


def train(setting: Setting, recipe: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Train from the start.

    Returns:
        "curve", [[step, held-out loss in nats a token]], which ends with null where a
        run has diverged; "seconds" and "optimizer_seconds" of a step, and of the
        optimizer in it, medians; "flops" of a step's gradients; "matmul_rate", FLOP/s
        of a large product of the setting's dtype, and "peak_bytes", most memory, of a
        GPU, null on a CPU.
    """
    training = Training(setting, recipe, seed, setting.texts())
    setting = training.setting

    def advance() -> None:
        training.gradient()
        training.update()

    curve = [*validations(setting, advance, training.validate)]
    steps = training.clock.steps()
    counted = steps[WARM_UP:] or steps
    num_params = sum(p.numel() for p in training.task.model.parameters())
    if not setting.tied:  # the embedding is looked up alone
        num_params -= training.task.model.wte.weight.numel()
    flops = setting.shape.num_flops_per_token(num_params, setting.seq_len)
    flops *= (
        setting.batch
        * setting.seq_len
        * (2 if recipe.get("correction") == "exact" else 1)
    )
    on_gpu, dtype = setting.device == "cuda", getattr(torch, setting.dtype)
    return dict(
        curve=curve,
        seconds=round(statistics.median(a + b for a, b in counted), 6),
        optimizer_seconds=round(statistics.median(b for _, b in counted), 6),
        flops=flops,
        matmul_rate=matmul_rate("cuda", dtype) if on_gpu else None,
        peak_bytes=torch.cuda.max_memory_allocated() if on_gpu else None,
    )


def main() -> None:
    """Train as the arguments say."""
    setting, recipe, seed = map(json.loads, sys.argv[1:4])
    write_json(Path(sys.argv[4]), train(Setting(**setting), recipe, seed))


if __name__ == "__main__":
    main()
