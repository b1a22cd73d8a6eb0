"""Pictures of a comparison, readable in black and white.

MARS is dark and has markers, baselines are grey; every line has its own dashes and
carries its name where it ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import matplotlib
import numpy as np

from train.compare.results import Entry

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (after the backend is chosen)
from matplotlib import ticker  # noqa: E402

DASHES = ["-", (0, (6, 2)), (0, (2, 1.2)), (0, (6, 2, 1.5, 2)), (0, (1, 1.5))]
MARKERS = "osD^vP"
MARS, BASELINE = ("#0b3c8c", "#b5440e", "#146b4a", "#5b2a86", "#000000"), "0.55"


def style(found: list[Entry]) -> dict[str, dict]:
    """{recipe: how its line looks}, the same in all pictures."""
    looks, dark, light = {}, 0, 0
    for e in sorted(found, key=lambda e: e.recipe.name):
        if e.recipe.corrects:
            looks[e.recipe.name] = dict(
                color=MARS[dark % len(MARS)],
                linestyle=DASHES[dark % len(DASHES)],
                marker=MARKERS[dark % len(MARKERS)],
                linewidth=1.8,
                markersize=4,
                zorder=3,
            )
            dark += 1
        else:
            looks[e.recipe.name] = dict(
                color=BASELINE,
                linestyle=DASHES[light % len(DASHES)],
                linewidth=1.3,
                zorder=2,
            )
            light += 1
    return looks


def spread_out(heights: list[float], gap: float) -> list[float]:
    """The same heights in the same order, moved apart to at least ``gap``.

    Neighbours that collide share their mean (pool adjacent violators).
    """
    order = np.argsort(heights)
    offset = gap * np.arange(len(heights))
    blocks: list[list[float]] = []  # [sum, count] of what each is moved to
    for height in np.asarray(heights)[order] - offset:
        blocks.append([height, 1])
        while len(blocks) > 1 and (
            blocks[-2][0] / blocks[-2][1] > blocks[-1][0] / blocks[-1][1]
        ):
            total, count = blocks.pop()
            blocks[-1] = [blocks[-1][0] + total, blocks[-1][1] + count]
    level = np.concatenate([[total / count] * count for total, count in blocks])
    moved = np.empty(len(heights))
    moved[order] = level + offset
    return moved.tolist()


def _label(axes, ends: list[tuple[Entry, float, float]], looks: dict) -> None:
    """Names at the right border, a thin line from each to its curve's end."""
    low, high = axes.get_ylim()
    heights = spread_out([y for _, _, y in ends], 0.042 * (high - low))
    right = axes.get_xlim()[1]
    for (e, x, y), height in zip(ends, heights, strict=True):
        color = looks[e.recipe.name]["color"]
        axes.annotate(
            f"{e.recipe.name}  {y:.3f}",
            xy=(x, y),
            xytext=(right * 1.025, height),
            color=color if e.recipe.corrects else "0.35",
            weight="bold" if e.recipe.corrects else "normal",
            fontsize=8,
            va="center",
            annotation_clip=False,
            arrowprops=dict(
                arrowstyle="-",
                color=color,
                linewidth=0.6,
                linestyle=":",
                relpos=(0, 0.5),
                shrinkA=0,
                shrinkB=0,
            ),
        )


def _curves(
    found: list[Entry], unit: Callable[[Entry], float], xlabel: str, path: Path
) -> None:
    """Mean validation loss of each entry against steps times ``unit``, with the range
    over seeds.
    """
    figure, axes = plt.subplots(figsize=(9, 5.2), layout="constrained")
    looks, ends = style(found), []
    for e in found:
        curve, look = e.curve, looks[e.recipe.name]
        x = curve.steps * unit(e)
        axes.plot(x, curve.losses, **look)
        each = np.array([np.interp(curve.steps, c.steps, c.losses) for c in e.curves])
        axes.fill_between(
            x, each.min(0), each.max(0), color=look["color"], alpha=0.15, linewidth=0
        )
        ends.append((e, float(x[-1]), float(curve.losses[-1])))
    steps = found[0].curve.steps
    early = [e.curve.at(0.12 * steps[-1]) for e in found]
    low = min(y for _, _, y in ends)
    high = max(max(y for _, _, y in ends), float(np.median(early)))
    axes.set_ylim(low - 0.06 * (high - low), high + 0.04 * (high - low))
    axes.set_xlim(0, max(x for _, x, _ in ends))
    axes.set(xlabel=xlabel, ylabel="validation loss (nats per token)")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    _label(axes, ends, looks)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def by_tokens(found: list[Entry], tokens_per_step: int, path: Path) -> None:
    """Loss against tokens."""
    _curves(found, lambda e: tokens_per_step / 1e6, "tokens (millions)", path)


def by_time(found: list[Entry], path: Path) -> None:
    """Loss against steps times the measured median seconds per step."""
    _curves(found, lambda e: e.seconds_per_step, "training time (s)", path)


def by_rate(found: list[Entry], path: Path) -> None:
    """Final loss of seed 0 against the learning rate; a ring is the chosen rate, a
    cross at the top a run that diverged or is above the picture.
    """
    figure, axes = plt.subplots(figsize=(9, 5.2), layout="constrained")
    looks, ends = style(found), []
    losses = [v for e in found for v in e.sweep.values() if math.isfinite(v)]
    low, top = min(losses), min(max(losses), 2 * np.median(losses) - min(losses))
    high = top + 0.05 * (top - low)
    for e in found:
        look = looks[e.recipe.name]
        rates = [lr for lr, loss in e.sweep.items() if math.isfinite(loss)]
        axes.plot(rates, [e.sweep[lr] for lr in rates], **{"marker": ".", **look})
        gone = [lr for lr, loss in e.sweep.items() if not loss <= high]
        axes.plot(
            gone, [high] * len(gone), "x", color=look["color"], clip_on=False, zorder=4
        )
        axes.plot(
            e.lr, e.sweep[e.lr], "o", markersize=10, fillstyle="none",
            color=look["color"],
        )  # fmt: skip
        ends.append((e, e.lr, min(high, e.sweep[e.lr])))
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    axes.set_ylim(low - 0.05 * (high - low), high)
    axes.set(
        xlabel="peak learning rate (ring: chosen; cross: diverged or above)",
        ylabel="final validation loss (nats per token)",
    )
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    _label(axes, ends, looks)
    figure.savefig(path, dpi=150)
    plt.close(figure)
