"""What runs showed, as a table and a picture; both can be read again from JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pretrain.loop import Run
from marsopt.profiling.machine import one_line

EXPLAINED = """\
loss             held out, nats a token, at the end of the run
lr               peak, of the matrices; "edge": the first or last of its sweep
tokens/s         by the median step, without validation and the first steps
MFU              floating point operations of the gradients (6 for each weight and
                 token, and attention), of exact MARS's second too, over what this
                 machine's matrix product does in as long
optimizer        its share of a step, medians
peak             most of the GPU's memory that was allocated, GiB
to the first     tokens and seconds until the loss with which the first method ends, as
                 shares of that method's; the learning rate falls over the whole run"""
LINES = ("-", "--", "-.", ":")


def reached(run: Run, loss: float) -> tuple[float, float] | None:
    """Return (tokens, seconds) at which a run's held-out loss reaches ``loss``, on
    straight lines between validations; None where it does not.
    """
    before = None
    for tokens, seconds, found in run.curve:
        if found <= loss:
            if before is None:
                return tokens, seconds
            share = (before[2] - loss) / (before[2] - found)
            return (
                before[0] + share * (tokens - before[0]),
                before[1] + share * (seconds - before[1]),
            )
        before = (tokens, seconds, found)
    return None


def line(run: Run, first: Run, edge: bool) -> str:
    """Return one row of the table."""
    peak = "-" if run.peak_bytes is None else f"{run.peak_bytes / 2**30:.1f}"
    at, (tokens, seconds, _) = reached(run, first.loss), first.curve[-1]
    shares = "never" if at is None else f"{at[0] / tokens:.2f} {at[1] / seconds:.2f}"
    return (
        f"{run.method:24}{run.loss:8.4f}{run.lr:10.2g}{'  edge' if edge else '':6}"
        f"{run.tokens_per_second:12,.0f}"
        f"{run.flops / run.step_seconds / run.matmul_rate:8.1%}"
        f"{run.optimizer_seconds / run.step_seconds:11.1%}{peak:>7}{shares:>14}"
    )


def table(found: Mapping[str, Any]) -> str:
    """Return everything as text."""
    plan, machine, runs = found["plan"], found["machine"], found["runs"]
    tokens = runs[0].curve[-1][0]
    head = (
        f"{'':24}{'loss':>8}{'lr':>10}{'':6}{'tokens/s':>12}{'MFU':>8}"
        f"{'optimizer':>11}{'peak':>7}{'to the first':>14}"
    )
    edges = found["edges"]
    return "\n".join(
        [
            f"{found['model']}: {runs[0].num_params:,} parameters, {tokens:,} tokens, "
            f"{plan['steps']} steps of {plan['batch']} x {plan['seq_len']}, "
            f"{plan['dtype']}, {'compiled' if plan['compile'] else 'eager'}, "
            f"seed {plan['seed']}",
            one_line(machine),
            *(
                f"{rate / 1e12:.3g} TFLOP/s of a matrix product on {name}"
                for name, rate in {r.machine: r.matmul_rate for r in runs}.items()
            ),
            "",
            head,
            *(line(run, runs[0], run.method in edges) for run in runs),
            "",
            EXPLAINED,
            *(
                f"sweep: {t['method']} lr {t['lr']:.2g} loss {t['loss']}"
                for t in found["trials"]
            ),
            *(f"not run: {text}" for text in found["not_run"]),
        ]
    )


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Draw held-out loss against tokens and against seconds."""
    runs: Sequence[Run] = found["runs"]
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(
        1, 2, figsize=(11, 4.4), layout="constrained", sharey=True
    )
    for axes, column, label in (
        (panels[0], 0, "tokens"),
        (panels[1], 1, "seconds of training"),
    ):
        for number, run in enumerate(runs):
            axes.plot(
                [point[column] for point in run.curve],
                [point[2] for point in run.curve],
                linestyle=LINES[number % len(LINES)],
                label=f"{run.method} ({run.loss:.3f})",
            )
        axes.set(xlabel=label)
        axes.grid(alpha=0.3)
    ends = [run.loss for run in runs]
    middle = max(point[2] for run in runs for point in run.curve[len(run.curve) // 4 :])
    margin = 0.05 * (middle - min(ends)) or 0.1
    panels[0].set_ylim(min(ends) - margin, middle + margin)
    panels[0].set_ylabel("held-out loss, nats a token")
    panels[1].legend(frameon=False, fontsize=8)
    figure.suptitle(f"{found['model']}\n{one_line(found['machine'])}", fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)
