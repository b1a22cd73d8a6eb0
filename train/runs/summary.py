"""The end of a run: loss curves as a picture, a sample, and where everything lies."""

import math
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

from train.data.tokenizers import NATS_PER_BYTE, loss_unit, tokenizer
from train.errors import UserError, shown, tell
from train.files import read_json, write, write_json
from train.gpt2.inference import generate
from train.pictures import picture
from train.runs.checkpoints import last_step, load_model
from train.runs.settings import SETTINGS, describe, read

TRAIN, VAL = "loss_metrics/global_avg_loss", "validation_metrics/loss"
PER_BYTE = "validation_metrics/nats_per_byte"
PROMPT = "class "
# A run of configs.tiny's tiny_adamw: "settings" of its model, data and batches, and
# "held_out", {step: loss}. Of 2e-3, 4e-3 and 8e-3 its 4e-3 was best at 750 steps.
ADAMW = Path(__file__).with_name("tiny_adamw.json")
SAMPLE_TOKENS = 240


def read_scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Return {tag: {step: value}} of all TensorBoard files below ``folder``; what was
    written last counts.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    stamped: dict[str, dict[int, tuple[float, float]]] = {}
    for file in sorted(folder.rglob("events.out.tfevents.*")):
        events = EventAccumulator(str(file), size_guidance={"scalars": 0}).Reload()
        for tag in events.Tags()["scalars"]:
            for e in events.Scalars(tag):
                row = stamped.setdefault(tag, {})
                if e.step not in row or row[e.step][0] <= e.wall_time:
                    row[e.step] = (e.wall_time, e.value)
    return {
        tag: {step: v for step, (_, v) in sorted(row.items())}
        for tag, row in stamped.items()
    }


def smoothed(values: Sequence[float]) -> np.ndarray:
    """Return (num,) running means over a tenth of the values around each, fewer at both
    ends.
    """
    half = len(values) // 20
    sums = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    reach = np.minimum(half, np.minimum(at, len(values) - 1 - at))
    return (sums[at + reach + 1] - sums[at - reach]) / (2 * reach + 1)


def heights(curves: Sequence[dict[int, float]]) -> tuple[float, float]:
    """Return the losses between which a picture shows curves, {step: loss}: from the
    lowest to where a tenth of the steps is done, so that the start, which is several
    times as high, does not press the rest flat.
    """
    last = max(step for curve in curves for step in curve)
    late = [[v for step, v in curve.items() if step >= last / 10] for curve in curves]
    shown = [value for values in late for value in values if math.isfinite(value)]
    low, high = min(shown, default=0.0), max(shown, default=1.0)
    return low - 0.05 * (high - low), high + 0.05 * (high - low)


def adamw(folder: Path) -> dict[int, float]:
    """Return the held-out losses of tuned AdamW by step, if the run in ``folder`` has
    the same model, data, batches and number of steps as the stored run; else {}.
    """
    stored = read_json(ADAMW, dict[str, dict[str, Any]], "the file of this checkout")
    own = read(folder / SETTINGS)
    if any(own.get(key) != value for key, value in stored["settings"].items()):
        return {}
    return {int(step): loss for step, loss in stored["held_out"].items()}


def plot(
    scalars: dict[str, dict[int, float]],
    title: str,
    path: Path,
    unit: str,
    control: dict[int, float],
) -> None:
    """Draw training and validation loss against steps, and in grey the validation loss
    of a ``control`` run, {step: loss}.
    """
    labels = dict(title=title, xlabel="step", ylabel=f"loss ({unit})")
    row, held_out = scalars.get(TRAIN, {}), scalars.get(VAL, {})
    mean = dict(zip(row, smoothed([*row.values()]).tolist(), strict=True))
    curves = [
        (row, dict(color="0.88", linewidth=0.8)),
        (mean, dict(color="0.65", label="training, smoothed")),
        (control, dict(color="0.5", marker="s", ls="--", label="held-out text, AdamW")),
        (held_out, dict(color="black", marker="o", label="held-out text")),
    ]
    with picture(path, **labels) as axes:
        for curve, look in curves:
            axes.plot([*curve], [*curve.values()], **look)
        ends = {look["color"]: [*c.items()][-1] for c, look in curves[2:] if c}
        for color, (step, loss) in ends.items():
            is_above = loss == max(last for _, last in ends.values())
            beside = dict(xytext=(8, 0), va="bottom" if is_above else "top")
            beside |= dict(textcoords="offset points", color=color)
            axes.annotate(f"{loss:.3f}", (step, loss), **beside)
        if drawn := [curve for curve, _ in curves[1:] if curve]:
            axes.set_ylim(*heights(drawn))
            axes.set_xlim(right=1.1 * max(map(max, drawn)))
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)


def _sample(folder: Path) -> None:
    """Print and write what the model says. A tokenizer that is not on this machine, or
    a model that has diverged, is no reason to end a training in an error.
    """
    run = describe(folder)
    path = folder / "sample.txt"
    path.unlink(missing_ok=True)  # of an earlier end of this run
    options = dict(num_tokens=SAMPLE_TOKENS, temperature=0.8, top_k=50, seed=0)
    try:
        coder = tokenizer(run.tokenizer)
        ids = generate(load_model(folder, run.shape), coder.encode(PROMPT), **options)
    except UserError as error:
        tell(f"\nno sample: {error}\n")
        return
    sample = shown(PROMPT + coder.decode(ids))
    write(path, f"{sample}\n".encode())
    tell(f"\nsample:\n{sample}\n")


def summarize(folder: Path, title: str) -> None:
    """Print and draw what the finished run in ``folder`` has to show."""
    scalars = read_scalars(folder / "tb")
    unit = loss_unit(describe(folder).tokenizer)
    plot(scalars, title, folder / "loss.png", unit, adamw(folder))
    step = last_step(folder)
    summary: dict[str, float] = {"step": step}
    if step in (losses := scalars.get(VAL, {})):
        summary["validation_loss"] = losses[step]
        line = f"validation loss {losses[step]:.4f} {unit}"
        if step in (per_byte := scalars.get(PER_BYTE, {})):
            summary["nats_per_byte"] = per_byte[step]
            if unit != NATS_PER_BYTE:  # else all but the same number
                line += f", {per_byte[step]:.4f} {NATS_PER_BYTE}"
        line += " of held-out text"
    elif losses:  # cut off between the last checkpoint and its validation
        line = (
            f"no validation after step {step}: python -m train.evaluate --run "
            f"{quote(str(folder))} --loss"
        )
    else:
        line = "validation was off"
    write_json(folder / "summary.json", summary)
    _sample(folder)
    tell(line)
    for what, name in (
        ("loss curve", "loss.png"),
        ("sample", "sample.txt"),
        ("TensorBoard", "tb"),
        ("JSON lines", "metrics.jsonl"),
        ("checkpoint", f"checkpoint/step-{step}"),
        ("log", "rank0.log"),
    ):
        if (folder / name).exists():
            tell(f"{what:12} {folder / name}")
