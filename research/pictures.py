"""The picture of the documentation that is not of one command's run.

    python -m research.pictures [--folder docs]

losses.png has the loss of runs of several lengths, from the stores of the studies.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, stdev

from research import decide, studies
from research.compare.store import final
from train.pictures import picture

ACCENT, GREY = "#b5440e", "#6b6b6b"
DEFAULT, CONTROL, LOWEST = "Moonlight", "NAdamW", "SOAP-Muon, log time"
TORCH = "torch Muon"
LINES = {  # method: its color and dashes
    "AdamW": (GREY, ":"),
    CONTROL: ("#0b3c8c", "--"),
    DEFAULT: (ACCENT, "-"),
    TORCH: ("black", ""),  # points, named by a legend: they are on the default's line
    LOWEST: ("#1f7a3d", "-."),
}
NAMES = {
    DEFAULT: "for_model",
    TORCH: "torch's Muon and AdamW",
    LOWEST: "SOAP-Muon\nwith log_time",
}
BELOW = (-2, -22)  # points, from the last mark of a line to a name below it
LENGTHS = (480, 1920, 7680)  # steps
JUDGING = range(1, 9)  # seeds
TITLE = "0.1M parameters beside embeddings, each point tuned"


def horizons() -> dict[str, dict[int, dict[int, float]]]:
    """Return by method and number of steps the final losses of the judging seeds, each
    at its best warm-up; the control's longest runs are of small, at a tenth.
    """
    lowest: dict[str, dict[int, dict[int, float]]] = {title: {} for title in LINES}
    for steps in LENGTHS:
        place = decide.judged(str(steps))
        known = [title for title in LINES if title in place.study.methods]
        for title, own in place.at_best(known).items():
            lowest[title][steps] = own
    runs = studies.stored("small_long").lines.values()
    longest = [run for run in runs if run["recipe"]["rule"] == CONTROL.lower()]
    judging = {run["seed"]: final(run) for run in longest if run["seed"] in JUDGING}
    lowest[CONTROL][LENGTHS[-1]] = judging
    return lowest


def steps_saved(
    mine: Mapping[int, float], at: int, control: Mapping[int, Mapping[int, float]]
) -> tuple[float, float | None] | None:
    """Return the share of steps that a method saves, with its error over seeds.

    The control's loss between two horizons lies on a line in the logarithm of steps.

    Args:
        mine: the method's final loss by seed.
        at: steps of its runs.
        control: final losses by horizon and seed.
    """
    shares = []
    for seed, loss in mine.items():
        points = [(math.log(t), own[seed]) for t, own in control.items() if seed in own]
        points.sort()
        for (x, high), (y, low) in zip(points, points[1:], strict=False):
            if low <= loss <= high and low < high:
                needed = x + (y - x) * (high - loss) / (high - low)
                shares.append(1 - at / math.exp(needed))
                break
    if len(shares) < len(mine) or not shares:
        return None  # beyond the control's horizons
    error = stdev(shares) / math.sqrt(len(shares)) if len(shares) > 1 else None
    return mean(shares), error


def losses(path: Path) -> None:
    """Draw the loss at the end of runs of three lengths, with standard errors, and the
    steps that the default saves.
    """
    by_length = horizons()
    labels = dict(
        xlabel="steps of the run", ylabel="held-out loss, nats per byte", title=TITLE
    )
    with picture(path, (7, 3.6), **labels) as axes:
        for title, (color, dashes) in LINES.items():
            steps, name = [*by_length[title]], NAMES.get(title, title)
            means = [mean(own.values()) for own in by_length[title].values()]
            errors = [error_of(own) for own in by_length[title].values()]
            look = dict(color=color, linestyle=dashes or "none", capsize=3)
            look |= dict(marker="o" if dashes else "D", zorder=2 if dashes else 3)
            axes.errorbar(steps, means, yerr=errors, markersize=5, **look, label=name)
            if not dashes:
                continue
            text = dict(xytext=(8, 0), textcoords="offset points", va="center")
            if title == LOWEST:
                text |= dict(xytext=BELOW, ha="center")
            axes.annotate(name, (steps[-1], means[-1]), **text, color=color)
        control = by_length[CONTROL].items()
        means = {t: {0: mean(own.values())} for t, own in control}
        for steps, own in by_length[DEFAULT].items():
            loss = mean(own.values())
            saved = steps_saved({0: loss}, steps, means)
            if saved is None:
                continue
            share, _ = saved
            ends = (steps, loss), (steps / (1 - share), loss)
            arrow = dict(arrowstyle="<->", color="0.2", shrinkA=0, shrinkB=0)
            axes.annotate("", *ends, arrowprops=arrow)
            middle = steps / math.sqrt(1 - share), loss
            text = dict(xytext=(0, 6), textcoords="offset points", ha="center")
            text |= dict(bbox=dict(facecolor="white", edgecolor="none", pad=1))
            axes.annotate(f"{share:.0%} fewer steps", middle, **text, fontsize=9)
        handles, names = axes.get_legend_handles_labels()
        points = names.index(NAMES[TORCH])
        axes.legend([handles[points]], [names[points]], frameon=False)
        axes.set_xscale("log")
        axes.set_xticks(steps := sorted({t for f in by_length.values() for t in f}))
        axes.set_xticklabels([f"{t:,}" for t in steps])
        axes.minorticks_off()
        axes.set_xlim(steps[0] / 1.15, steps[-1] * 1.6)
        axes.spines[["top", "right"]].set_visible(False)


def error_of(own: Mapping[int, float]) -> float:
    """Return the standard error of the mean of losses by seed."""
    return stdev(own.values()) / math.sqrt(len(own))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("docs"))
    folder = parser.parse_args().folder
    losses(folder / "losses.png")
    print(folder / "losses.png")


if __name__ == "__main__":
    main()
