"""The end of a run: loss curves as a picture, a sample, and where everything lies."""

from __future__ import annotations

import json
from pathlib import Path

from train.errors import UserError
from train.run import generate, last_step, load_model
from train.settings import describe
from train.tokenizers import tokenizer

TRAIN, VAL = "loss_metrics/global_avg_loss", "validation_metrics/loss"
PER_BYTE = "validation_metrics/nats_per_byte"
PROMPT = "class "


def read_scalars(folder: Path) -> dict[str, dict[int, float]]:
    """{tag: {step: value}} of all TensorBoard files below ``folder``; what was written
    last counts.
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


def plot(scalars: dict[str, dict[int, float]], title: str, path: Path) -> None:
    """Training and validation loss against steps, readable in black and white."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), constrained_layout=True)
    for tag, style, label in ((TRAIN, "-", "training"), (VAL, "o--", "held-out text")):
        row = scalars.get(tag, {})
        if row:
            axes.plot(
                list(row),
                list(row.values()),
                style,
                color="black" if tag == VAL else "0.55",
                label=label,
            )
    if val := scalars.get(VAL):
        step, loss = max(val.items())
        axes.annotate(
            f"{loss:.3f}",
            (step, loss),
            textcoords="offset points",
            xytext=(-4, 8),
            ha="right",
        )
    axes.set(title=title, xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _sample(folder: Path) -> None:
    """Print and write what the model says. A tokenizer that is not on this machine, or
    a model that has diverged, is no reason to end a training in an error.
    """
    shape, tokenizer_name = describe(folder)
    path = folder / "sample.txt"
    path.unlink(missing_ok=True)  # of an earlier end of this run
    try:
        coder = tokenizer(tokenizer_name)
        ids = generate(
            load_model(folder, shape),
            coder.encode(PROMPT),
            num_tokens=240,
            temperature=0.8,
            top_k=50,
            seed=0,
        )
    except UserError as error:
        print(f"\nno sample: {error}\n")
        return
    sample = PROMPT + coder.decode(ids)
    path.write_text(sample + "\n")
    print(f"\nsample:\n{sample}\n")


def report(folder: Path, title: str) -> None:
    """Print and draw what the finished run in ``folder`` has to show."""
    scalars = read_scalars(folder / "tb")
    picture = folder / "loss.png"
    plot(scalars, title, picture)

    step = last_step(folder)
    summary: dict[str, float] = {"step": step}
    if step in (losses := scalars.get(VAL, {})):
        summary["validation_loss"] = losses[step]
        line = f"validation loss {losses[step]:.4f}"
        if step in (per_byte := scalars.get(PER_BYTE, {})):
            summary["nats_per_byte"] = per_byte[step]
            line += f", {per_byte[step]:.4f} nats per byte of held-out text"
    elif losses:  # cut off between the last checkpoint and its validation
        line = (
            f"no validation after step {step}: python -m train.evaluate --run {folder} "
            "--loss --data DATA"
        )
    else:
        line = "validation was off"
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    _sample(folder)
    print(line)
    for what, where in (
        ("loss curve", picture),
        ("sample", folder / "sample.txt"),
        ("TensorBoard", folder / "tb"),
        ("checkpoint", folder / "checkpoint" / f"step-{step}"),
        ("log", folder / "rank0.log"),
    ):
        if where.exists():
            print(f"{what:12} {where}")
