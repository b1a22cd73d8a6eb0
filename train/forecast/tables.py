"""Forecasts as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from train.forecast.activations import MicroBatch
from train.forecast.models import Job
from train.forecast.step import Forecast, Hardware, forecast

MEGA, GIGA, MILLI = 1e6, 2**30, 1e-3


def table(job: Job, found: Forecast, every: bool) -> str:
    """Return each matrix's owner, and the totals."""
    kinds: Counter[str] = Counter()
    lines: dict[str, str] = {}
    matrices = job.matrices()
    for (name, m), owner in zip(matrices.items(), found.plan.owners, strict=True):
        what = f"{m.rows:6} x {m.cols:<6} {'replicate' if owner < 0 else 'owner'}"
        kinds[what] += 1
        who = "every rank" if owner < 0 else f"rank {owner}"
        lines[name] = f"{name:32} {what:26} {who}"
    if every:
        shown = [lines[name] for name in job.shapes if name in lines]
    else:
        shown = [f"{count:4} x {what}" for what, count in kinds.items()]
    return "\n".join([*shown, *_totals(job, found)])


def _totals(job: Job, found: Forecast) -> list[str]:
    m, flops, calls = found.memory, found.cost.owner_flops, found.collectives
    mean = sum(flops) / len(flops) / 1e12
    called = ", ".join(f"{num} {kind}" for kind, num in calls.items() if num)
    return [
        f"batch                      {job.tokens:10,} tokens a step, over all GPUs",
        f"sent per rank and step     {found.sent_bytes / MEGA:10.1f} MB "
        f"(most: {found.most_sent_bytes / MEGA:.1f} MB, by an owner)",
        f"collectives per step       {called or 'none':>10}",
        f"owner FLOPs, mean and max  {mean:10.3f} {max(flops) / 1e12:.3f} TFLOP "
        f"(imbalance {found.cost.imbalance:.3f})",
        f"parameters per GPU         {m.parameters / GIGA:10.2f} GiB, "
        f"and as much of gradients",
        f"optimizer state per GPU    {m.state / GIGA:10.2f} GiB",
        f"peak memory per GPU        {m.peak / GIGA:10.2f} GiB "
        "(of the optimizer's step: these and what it holds; no activations)",
        *_training(job, found),
        f"optimizer step, predicted  {found.optimizer_seconds / MILLI:10.2f} ms",
        f"forward and backward       {found.training_seconds:10.3f} s, predicted "
        f"(optimizer's share of both {found.share:.1%})",
        f"tokens/s, predicted        {job.tokens / found.seconds:10,.0f}, of all GPUs",
    ]


def _training(job: Job, found: Forecast) -> list[str]:
    """Return what a micro-batch takes, and that with all that stays."""
    if job.micro_batch is None:
        return []
    m = found.memory
    stays = m.parameters + m.gradients + m.state
    return [
        f"activations per GPU        {_activations(job.micro_batch)}",
        f"with what stays            {_gib(job.micro_batch, stays)} (parameters, "
        "gradients, state; what FSDP gathers comes on top)",
    ]


def _activations(batch: MicroBatch) -> str:
    compiled = ", loss compiled" if batch.is_compiled else ""
    tokens = f"{batch.num_sequences} x {batch.seq_len:,} tokens"
    return f"{_gib(batch)} ({tokens} in bf16{compiled})"


def _gib(batch: MicroBatch, more: int = 0) -> str:
    """Return the GiB of activations, and of ``more`` bytes."""
    kept, checkpointed = (
        (more + batch.activation_bytes(is_checkpointed=full)) / GIGA
        for full in (False, True)
    )
    return f"{kept:10.2f} GiB, {checkpointed:.2f} GiB with activation-checkpoint:full"


def sweep_table(rows: Sequence[tuple[int, Forecast]]) -> str:
    """Return one line per number of ranks."""
    lines = [
        " ranks  owner   MB sent    most  max TFLOP  imbalance  state GiB"
        "  optimizer ms  training s  share"
    ]
    for n, f in rows:
        lines.append(
            f"{n:6} {len(f.plan.owned):6} {f.sent_bytes / MEGA:9.1f}"
            f" {f.most_sent_bytes / MEGA:7.1f}"
            f" {max(f.cost.owner_flops) / 1e12:10.3f} {f.cost.imbalance:10.3f}"
            f" {f.memory.state / GIGA:10.2f} {f.optimizer_seconds / MILLI:13.2f}"
            f" {f.training_seconds:11.3f} {f.share:6.1%}"
        )
    return "\n".join(lines)


HEAD = (
    f"{'':25} {'-- counted: GiB per GPU --':>27} {'counted':>8} "
    f"{'-- model, not measured --':>29}",
    f"{'rule':20} {'GPUs':>4} {'param':>6} {'grad':>6} {'state':>6} {'peak':>6} "
    f"{'MB sent':>8} {'opt. ms':>8} {'train s':>9} {'tokens/s':>10}",
)


def assumed(hardware: Hardware) -> str:
    """Return the device that times are predicted for, and how much of it is used."""
    machine = hardware.machine
    return (
        f"Each GPU sends {machine.link * 8 / 1e9:g} Gbit/s, multiplies at "
        f"{machine.flops / 1e12:g} TFLOP/s in\n"
        f"  Newton-Schulz and {hardware.utilization:.0%} of that in training, moves "
        f"{hardware.memory / 1e9:g} GB/s in its memory"
    )


def comparison(rows: Sequence[tuple[Job, int, Forecast]]) -> str:
    """Return one line per rule and number of ranks."""
    lines, before = [*HEAD], None
    for job, num_ranks, f in rows:
        m, shown = f.memory, "" if job is before else job.rule
        lines.append(
            f"{shown:20} {num_ranks:4} {m.parameters / GIGA:6.2f}"
            f" {m.gradients / GIGA:6.2f} {m.state / GIGA:6.2f}"
            f" {m.peak / GIGA:6.2f} {f.sent_bytes / MEGA:8.2f}"
            f" {f.optimizer_seconds / MILLI:8.2f}"
            f" {f.training_seconds:9,.2f} {job.tokens / f.seconds:10,.0f}"
        )
        before = job
    return "\n".join(lines)


def legend(hardware: Hardware) -> str:
    """Return what the columns of ``comparison`` mean and assume."""
    return f"""\
Counted: FSDP2, all in float32, each GPU its shard, of which the largest is shown; one
  GPU alone without FSDP2: its parameters lie in the optimizer's own stacks.
  param, grad, state: what stays. peak: that, and the most that the optimizer's step
  holds beside it (Newton-Schulz in bf16); without activations, what FSDP gathers in
  bf16 for forward and backward, and buffers of NCCL and cuBLAS. MB sent: by the
  optimizer, in the mean over GPUs; without what FSDP sends.
Model: opt. ms, the optimizer's step; train s, forward and backward (of exact MARS
  two); tokens/s, of all. {assumed(hardware)};
  FSDP's traffic hides behind computing, or the other way round. No network was
  measured."""


def title(what: str, job: Job, replicas: int = 1) -> str:
    """Return the heading of what is said about one job."""
    num = len(job.matrices())
    return (
        f"{what}: {job.num_params:,} parameters, {job.rule}, "
        f"{num} {'matrix' if num == 1 else 'matrices'} for Newton-Schulz{_of(replicas)}"
    )


def only(jobs: Sequence[Job]) -> Job:
    """Return the job.

    Raises:
        ValueError: there are several.
    """
    if len(jobs) != 1:
        raise ValueError(
            f"got {len(jobs)} rules, expected one: --all and --sweep show one; give "
            "--rules one name"
        )
    return jobs[0]


def report(
    what: str,
    jobs: Sequence[Job],
    ranks: Sequence[int],
    *,
    every: bool,
    replicas: int,
    hardware: Hardware,
) -> str:
    """Return the whole text: of one job on one number of ranks all about it, else a
    line for each.

    Args:
        what: the name of recipe or model.
        jobs: those to forecast.
        ranks: each number of them.
        every: list every matrix, of one job.
        replicas: of HSDP.
        hardware: what times assume.

    Raises:
        ValueError: replicas that do not divide the ranks, ``every`` of several jobs.
    """
    sizes: dict[str, Any] = dict(replicas=replicas, hardware=hardware)
    if every or len(jobs) * len(ranks) == 1:
        job = only(jobs)
        parts = [title(what, job)]
        for n in ranks:
            several = len(ranks) > 1 or replicas > 1
            parts += [f"{n} {'GPU' if n == 1 else 'GPUs'}{_of(replicas)}"] * several
            parts.append(table(job, forecast(job, n, **sizes), every))
        parts.append(f"Times are a model. {assumed(hardware)}.")
        return "\n".join(parts)
    rows = [(job, n, forecast(job, n, **sizes)) for job in jobs for n in ranks]
    heading = _heading(what, jobs, replicas)
    return "\n\n".join([heading, comparison(rows), legend(hardware)])


def _of(replicas: int) -> str:
    """Say how many replicas share the work, where there are several."""
    return f", {replicas} replicas of HSDP" if replicas > 1 else ""


def _heading(what: str, jobs: Sequence[Job], replicas: int) -> str:
    """Return what all jobs have in common, and what AdamW moves in some."""
    job, beside = jobs[0], {name for job in jobs for name in job.elementwise}
    lines = [
        f"{what}: {job.num_params:,} parameters, {job.tokens:,} tokens a step, "
        f"{job.flops_per_token / 1e9:.2f} GFLOP a token{_of(replicas)}"
    ]
    if beside:
        lines.append(f"AdamW moves {', '.join(sorted(beside))} beside matrices")
    if job.micro_batch:
        lines.append(f"activations of a GPU: {_activations(job.micro_batch).strip()}")
    return "\n".join(lines)
