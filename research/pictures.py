"""The two pictures of the documentation that are not of one command's run.

    python -m research.pictures [--folder docs]

losses.png has the loss of runs of several lengths, from the stores of the studies.
transport.png is one step of transport, computed on a quadratic.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from statistics import mean, stdev

import numpy as np

from research import studies
from research.compare.results import Entry, entries
from research.decide import found as judged
from research.decide import steps_saved
from train.pictures import picture

ACCENT, GREY = "#b5440e", "#6b6b6b"
DEFAULT, CONTROL = "Moonlight", "NAdamW"
LINES = {  # method: its name, color and dashes
    "AdamW": ("AdamW", GREY, ":"),
    CONTROL: ("NAdamW", "#0b3c8c", "--"),
    DEFAULT: ("for_model", ACCENT, "-"),
}
OLDER = {"1920": "small", "7680": "small_long"}  # stores of searched controls
TITLE = "0.1M parameters beside embeddings, each point tuned"
CURVATURE = np.array([1.0, 6.0])  # of the quadratic
BETA1, GAMMA, LR = 0.8, 0.5, 0.16


def horizons() -> dict[str, dict[int, Entry]]:
    """Return by method and number of steps the lower of its two searches, each of which
    has all its seeds.
    """
    lowest: dict[str, dict[int, Entry]] = {title: {} for title in LINES}
    for name in ("480", "1920", "7680"):
        searches = [*judged(name).values()]
        if name in OLDER:
            older = OLDER[name]
            searches += entries(getattr(studies, older)(), studies.stored(older))
        for entry in sorted(searches, key=lambda entry: entry.mean, reverse=True):
            if entry.title in lowest and not entry.num_missing:
                lowest[entry.title][int(name)] = entry
    return lowest


def losses(path: Path) -> None:
    """Draw the loss at the end of runs of three lengths, with standard errors, and the
    steps that the default saves.
    """
    by_length = horizons()
    labels = dict(
        xlabel="steps of the run", ylabel="held-out loss, nats per byte", title=TITLE
    )
    with picture(path, (7, 3.6), **labels) as axes:
        for title, (name, color, dashes) in LINES.items():
            steps, means = (
                [*by_length[title]],
                [e.mean for e in by_length[title].values()],
            )
            errors = [error_of(e) for e in by_length[title].values()]
            look = dict(color=color, linestyle=dashes, capsize=3, marker="o")
            axes.errorbar(steps, means, yerr=errors, markersize=5, **look)
            beside = (-6, -14) if title == DEFAULT else (8, 0)
            text = dict(xytext=beside, textcoords="offset points", va="center")
            text |= dict(ha="right") if title == DEFAULT else {}
            axes.annotate(name, (steps[-1], means[-1]), **text, color=color)
        control = {steps: e.by_seed for steps, e in by_length[CONTROL].items()}
        for steps, e in by_length[DEFAULT].items():
            means = {t: {0: mean(own.values())} for t, own in control.items()}
            saved = steps_saved({0: e.mean}, steps, means)
            if saved is None:
                continue
            share, _ = saved
            ends = (steps, e.mean), (steps / (1 - share), e.mean)
            arrow = dict(arrowstyle="<->", color="0.2", shrinkA=0, shrinkB=0)
            axes.annotate("", *ends, arrowprops=arrow)
            middle = steps / math.sqrt(1 - share), e.mean
            text = dict(xytext=(0, 6), textcoords="offset points", ha="center")
            text |= dict(bbox=dict(facecolor="white", edgecolor="none", pad=1))
            axes.annotate(f"{share:.0%} fewer steps", middle, **text, fontsize=9)
        axes.set_xscale("log")
        axes.set_xticks(steps := sorted({t for f in by_length.values() for t in f}))
        axes.set_xticklabels([f"{t:,}" for t in steps])
        axes.minorticks_off()
        axes.set_xlim(steps[0] / 1.15, steps[-1] * 1.5)
        axes.spines[["top", "right"]].set_visible(False)


def error_of(e: Entry) -> float:
    """Return the standard error of a method's mean loss."""
    return stdev(e.losses) / math.sqrt(len(e.losses))


def transport(path: Path) -> None:
    """Draw where one step of transport with plain momentum takes its gradient."""
    x, before, m = np.array([-2.2, 1.0]), np.array([-2.6, 1.35]), np.zeros(2)
    k = GAMMA * BETA1 / (1 - BETA1)
    for _ in range(3):
        y = x + k * (x - before)
        m = BETA1 * m + (1 - BETA1) * CURVATURE * y
        x, before = x - LR * m, x
    y = x + k * (x - before)
    g = CURVATURE * y
    after = x - LR * (BETA1 * m + (1 - BETA1) * g)
    with picture(path, (7, 3.4)) as axes:
        grid = np.meshgrid(np.linspace(-2.6, 0.3, 200), np.linspace(-0.8, 1.1, 200))
        height = sum(c * v**2 / 2 for c, v in zip(CURVATURE, grid, strict=True))
        axes.contour(*grid, height, levels=8, colors="0.85", linewidths=0.8)
        axes.plot(*np.stack([before, x, after]).T, "o-", color=GREY, linewidth=1.5)
        axes.plot(*np.stack([x, y]).T, "--", color=ACCENT, linewidth=1.5)
        axes.plot(*y, "D", color=ACCENT, markersize=7)
        arrow = dict(arrowstyle="->", color=ACCENT, linewidth=2)
        axes.annotate("", y - 0.12 * g, y, arrowprops=arrow)
        texts = {
            "$x_{t-1}$": (before, (-6, 8), GREY),
            "$x_t$: what eval() and\nstate_dict() see": (x, (10, 2), GREY),
            "$y_t = x_t + k\\,(x_t - x_{t-1})$: what the model\nholds in training; "
            "its gradient is taken here": (y, (-60, -38), ACCENT),
            "$x_{t+1}$": (after, (8, -2), GREY),
        }
        for text, (point, offset, color) in texts.items():
            place = dict(xytext=offset, textcoords="offset points", color=color)
            axes.annotate(text, point, **place, fontsize=9)
        axes.set_xticks([])
        axes.set_yticks([])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("docs"))
    folder = parser.parse_args().folder
    losses(folder / "losses.png")
    transport(folder / "transport.png")
    print(f"{folder / 'losses.png'}, {folder / 'transport.png'}")


if __name__ == "__main__":
    main()
