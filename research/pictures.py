"""The picture of the documentation that is not of one command's run.

    python -m research.pictures [--folder docs]

losses.png has the loss of runs of several lengths, from the stores of the studies.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean, stdev

from research.compare.store import final
from research.studies import STORES
from train.pictures import picture

ACCENT, GREY = "#b5440e", "#6b6b6b"
DEFAULT, CONTROL = "Moonlight", "NAdamW"
LINES = {  # method: its rule, color and dashes
    "AdamW": ("adamw", GREY, ":"),
    CONTROL: ("nadamw", "#0b3c8c", "--"),
    DEFAULT: ("moonlight", ACCENT, "-"),
}
NAMES = {DEFAULT: "for_model"}
SHOWN = {  # studies of the setting, by length and store
    480: (("warm_up", "warm_up_480"), ("log_time", "log_time_480")),
    1920: (
        ("warm_up", "warm_up_1920"), ("log_time", "log_time_1920"), ("small", "small")
    ),
    7680: (("warm_up", "warm_up_7680"), ("small", "small_long")),
}  # fmt: skip
JUDGING, FEWEST = range(1, 9), 4  # seeds, and how many a point has at least
TITLE = "0.1M parameters beside embeddings, each point tuned"


def _runs(store: str, study: str, rule: str) -> Iterator[tuple[str, int, float]]:
    """Yield recipe, seed and final loss of the runs of a rule at constant decays."""
    for line in map(json.loads, (STORES / f"{store}.jsonl").read_text().splitlines()):
        recipe = line.get("recipe", {})
        own = {*recipe} - {
            "gpa",
            "snoo",
            "ema_nesterov",
            "mona",
            "correction",
            "beside",
        }
        is_plain = own == {*recipe} and isinstance(recipe.get("beta1"), float)
        if line["study"] == study and is_plain and recipe["rule"] == rule:
            yield json.dumps(recipe, sort_keys=True), line["seed"], final(line)


def horizons() -> dict[str, dict[int, dict[int, float]]]:
    """Return by method and number of steps the final losses of the judging seeds at the
    best of the points that have them.
    """
    lowest: dict[str, dict[int, dict[int, float]]] = {title: {} for title in LINES}
    for title, (rule, *_) in LINES.items():
        for steps, stored in SHOWN.items():
            points: dict[tuple[str, str], dict[int, float]] = {}
            for place in stored:
                for recipe, seed, loss in _runs(*place, rule):
                    if seed in JUDGING:
                        points.setdefault((place[1], recipe), {})[seed] = loss
            whole = [own for own in points.values() if len(own) >= FEWEST]
            if whole:
                lowest[title][steps] = min(whole, key=lambda own: mean(own.values()))
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
        for title, (_, color, dashes) in LINES.items():
            steps, name = [*by_length[title]], NAMES.get(title, title)
            means = [mean(own.values()) for own in by_length[title].values()]
            errors = [error_of(own) for own in by_length[title].values()]
            look = dict(color=color, linestyle=dashes, capsize=3, marker="o")
            axes.errorbar(steps, means, yerr=errors, markersize=5, **look)
            beside = (-6, -14) if title == DEFAULT else (8, 0)
            text = dict(xytext=beside, textcoords="offset points", va="center")
            text |= dict(ha="right") if title == DEFAULT else {}
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
        axes.set_xscale("log")
        axes.set_xticks(steps := sorted({t for f in by_length.values() for t in f}))
        axes.set_xticklabels([f"{t:,}" for t in steps])
        axes.minorticks_off()
        axes.set_xlim(steps[0] / 1.15, steps[-1] * 1.5)
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
