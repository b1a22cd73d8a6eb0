"""One run: a GPT-2 trained by one method, with the clock and the memory watched."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.pretrain.methods import Method
from marsopt.profiling.machine import seconds
from train.data.batches import Batches
from train.data.token_files import Stream
from train.engine.schedule import cosine
from train.gpt2 import GPT2, Shape

MARGIN = 1.05  # on the time that a run is said to take
WARM_UP = 3  # steps that compile, and make the state; no time counts them
Tokens = np.ndarray | Stream


class TooLong(Exception):
    """A run that would not end in time."""


class Machine(NamedTuple):
    """What runs are measured on, and by."""

    name: str
    matmul_rate: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How every method is trained.

    Args:
        shape: of the model.
        seq_len: tokens of a sequence.
        batch: sequences of a step, whose gradient is their mean.
        micro_batch: sequences of one forward and backward pass.
        steps: of a run, after which the learning rate is at ``floor``.
        warmup: steps of linear warm-up, then half a cosine.
        floor: last learning rate, as a share of the peak.
        held_out: sequences of a validation.
        interval: steps between two validations.
        seed: of initial weights and of the order of the data.
        device: "cpu" or "cuda".
        dtype: "bfloat16" (autocast over float32 parameters) or "float32".
        compile: whether model and optimizer are compiled.
    """

    shape: Shape
    seq_len: int
    batch: int
    micro_batch: int
    steps: int
    warmup: int
    floor: float
    held_out: int
    interval: int
    seed: int
    device: str
    dtype: str
    compile: bool

    @property
    def tokens_per_step(self) -> int:
        """Return those of a batch."""
        return self.batch * self.seq_len


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run showed, in what JSON can hold.

    Args:
        method, lr, gamma: what was trained.
        curve: (tokens, seconds of training, held-out loss in nats a token); seconds
            are without validation, reading batches (which a GPU does not wait for),
            compiling and the other work of the first steps.
        train_losses: of every step's batch, in nats a token.
        step_seconds, optimizer_seconds: of a step, and of the optimizer in it, medians.
        flops: of the gradients of a step; 6 for each weight and token, and attention.
        peak_bytes: most memory of the GPU that was allocated; None on a CPU.
        num_skipped: steps that MARS skipped, since their gradient was not finite.
        wall_seconds: of everything.
        machine: the GPU, or CPU, that it ran on.
        matmul_rate: that machine's, FLOP/s of a large product in the run's dtype.
    """

    method: str
    lr: float
    gamma: float
    num_params: int
    tokens_per_step: int
    curve: list[tuple[int, float, float]]
    train_losses: list[float]
    step_seconds: float
    optimizer_seconds: float
    flops: int
    peak_bytes: int | None
    num_skipped: int
    wall_seconds: float
    machine: str
    matmul_rate: float

    @property
    def loss(self) -> float:
        """Return the held-out loss at the end."""
        return self.curve[-1][2]

    @property
    def tokens_per_second(self) -> float:
        """Return those that are trained on."""
        return self.tokens_per_step / self.step_seconds


class Clock:
    """Times of steps: of the GPU by its events, which wait for nobody, else of the
    wall.
    """

    def __init__(self, device: str) -> None:
        self._on_gpu = device == "cuda"
        self.marks: list[Any] = []

    def mark(self) -> None:
        """Note this moment of the work that is under way."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Return the seconds from each mark to the next; a GPU is waited for."""
        if not self._on_gpu:
            return [b - a for a, b in zip(self.marks, self.marks[1:], strict=False)]
        torch.cuda.synchronize()
        pairs = zip(self.marks, self.marks[1:], strict=False)
        return [a.elapsed_time(b) / 1e3 for a, b in pairs]


def mean_loss(model: GPT2, inputs: Tensor, labels: Tensor, half: bool) -> Tensor:
    """Return the mean loss of (micro_batch, seq_len) tokens; ``half``: in bfloat16."""
    with torch.autocast(inputs.device.type, torch.bfloat16, enabled=half):
        logits = model(inputs)
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


@cache
def compiled() -> Callable[..., Tensor]:
    """Return ``mean_loss`` compiled: once for all models of one shape."""
    return torch.compile(mean_loss, fullgraph=True, dynamic=False)


class Task:
    """The model, its loss, and its batches, the same for every method."""

    def __init__(self, plan: Plan, train: Tokens, held_out: Tokens) -> None:
        self.plan = plan
        self.model = GPT2(plan.shape)
        self.model.init_weights(plan.seed)
        self.model.to(plan.device)
        own = dict(rank=0, world=1, seq_len=plan.seq_len)
        own |= dict(local_batch=plan.batch, vocab_size=plan.shape.vocab_size)
        self.batches = partial(Batches, train, **own, seed=plan.seed)
        self._held_out = partial(
            Batches, held_out, **own | {"local_batch": plan.micro_batch}
        )
        self._loss = partial(compiled() if plan.compile else mean_loss, self.model)
        self._half = plan.dtype == "bfloat16"

    def _micro(self, both: tuple[Tensor, Tensor]) -> Iterator[tuple[Tensor, ...]]:
        device, size = self.plan.device, self.plan.micro_batch
        if device == "cuda":  # or copies would wait for the GPU
            both = both[0].pin_memory(), both[1].pin_memory()
        inputs, labels = (x.to(device, non_blocking=True) for x in both)
        yield from zip(inputs.split(size), labels.split(size), strict=True)

    def gradient(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Add the gradient of a batch's mean loss to what is there; return the loss."""
        num = self.plan.batch // self.plan.micro_batch
        losses = []
        for inputs, labels in self._micro(batch):
            loss = self._loss(inputs, labels, self._half) / num
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    @torch.no_grad()
    def validate(self) -> float:
        """Return the loss of the first held-out sequences."""
        batches = self._held_out(consecutive=True)
        losses = []
        for _ in range(self.plan.held_out // self.plan.micro_batch):
            ((inputs, labels),) = self._micro(batches.next())
            losses.append(self._loss(inputs, labels, self._half))
        return float(torch.stack(losses).mean())


def run(
    method: Method,
    plan: Plan,
    train: Tokens,
    held_out: Tokens,
    *,
    machine: Machine,
    seconds_left: float = math.inf,
    tell: Callable[[str], None],
) -> Run:
    """Train from the start.

    Args:
        method: what to train with.
        plan: how.
        train, held_out: token ids.
        machine: that this is.
        seconds_left: of this process.
        tell: called with how it goes.

    Raises:
        TooLong: it would need more than ``seconds_left``.
    """
    began = time.perf_counter()
    if plan.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    try:
        return _run(method, plan, train, held_out, machine, began, seconds_left, tell)
    finally:
        gc.collect()
        if plan.device == "cuda":
            torch.cuda.empty_cache()


def _run(
    method: Method,
    plan: Plan,
    train: Tokens,
    held_out: Tokens,
    machine: Machine,
    began: float,
    seconds_left: float,
    tell: Callable[[str], None],
) -> Run:
    task = Task(plan, train, held_out)
    optimizer = method.build(task.model, compile=plan.compile)
    rate = partial(cosine, warmup=plan.warmup, total=plan.steps, floor=plan.floor)
    scheduler = LambdaLR(optimizer, rate)
    batches, clock = task.batches(), Clock(plan.device)
    exact, losses = method.correction == "exact", []

    def validate() -> float:
        optimizer.eval()
        loss = task.validate()
        optimizer.train()
        return loss

    seen = [(0, validate())]  # which compiles
    each = seconds(validate, "cpu")  # it ends with a number for the host
    batch, following = batches.next(), batches.next()
    for step in range(plan.steps):
        clock.mark()
        if exact:
            task.gradient(following)
            optimizer.update_previous_grad()
            optimizer.zero_grad()
        losses.append(task.gradient(batch))
        clock.mark()
        optimizer.step()
        optimizer.zero_grad()
        if exact:
            optimizer.update_last_grad()
        clock.mark()
        scheduler.step()
        batch, following = following, batches.next()
        done = step + 1
        if done % plan.interval == 0 or done == plan.steps:
            seen.append((done, validate()))
            tell(f"{method.name}: step {done} of {plan.steps}, loss {seen[-1][1]:.4f}")
        if done == 2 * WARM_UP:
            left = seconds_left - (time.perf_counter() - began)
            later = (plan.steps - done) // plan.interval + 1
            _check_time(clock, plan.steps - done, later * each, left, method.name)
    return _summed_up(method, plan, machine, clock, seen, losses, began, optimizer)


def _check_time(
    clock: Clock, num_steps: int, more: float, left: float, name: str
) -> None:
    """Raise TooLong if so many steps, and ``more`` seconds, need more than is left."""
    times = [sum(step) for step in _steps(clock)][WARM_UP:]
    needed = MARGIN * (statistics.median(times) * num_steps + more)
    if needed > left:
        raise TooLong(f"{name} needs {needed:.0f} s more, {left:.0f} are left")


def _steps(clock: Clock) -> list[tuple[float, float]]:
    """Return the seconds of gradients and optimizer of every step; from the end of one
    step to the beginning of the next, a validation may be between.
    """
    times = clock.seconds()
    return [*zip(times[0::3], times[1::3], strict=True)]


def _summed_up(
    method: Method,
    plan: Plan,
    machine: Machine,
    clock: Clock,
    seen: list[tuple[int, float]],
    losses: list[Tensor],
    began: float,
    optimizer: torch.optim.Optimizer,
) -> Run:
    """Return what the run showed."""
    steps = _steps(clock)
    counted = steps[WARM_UP:] or steps
    typical = statistics.median(sum(step) for step in counted)
    passed = [typical] * (len(steps) - len(counted)) + [sum(s) for s in counted]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    num_params, on_gpu = sum(p.numel() for p in params), plan.device == "cuda"
    each = plan.shape.num_flops_per_token(num_params, plan.seq_len)
    return Run(
        method=method.name,
        lr=method.lr,
        gamma=method.gamma,
        num_params=num_params,
        tokens_per_step=plan.tokens_per_step,
        curve=[(n * plan.tokens_per_step, sum(passed[:n]), loss) for n, loss in seen],
        train_losses=torch.stack(losses).tolist(),
        step_seconds=typical,
        optimizer_seconds=statistics.median(own for _, own in counted),
        flops=method.num_gradients * each * plan.tokens_per_step,
        peak_bytes=torch.cuda.max_memory_allocated() if on_gpu else None,
        num_skipped=int(getattr(optimizer, "num_skipped", 0)),
        wall_seconds=time.perf_counter() - began,
        machine=machine.name,
        matmul_rate=machine.matmul_rate,
    )
