"""Pictures of a comparison, readable in black and white.

MARS is dark and has markers, baselines are grey; every line has its own dashes and
carries its name where it ends.
"""

import math
from collections.abc import Callable
from itertools import count
from pathlib import Path

import numpy as np

from train.compare.results import Entry
from train.pictures import picture

DASHES = ["-", (0, (6, 2)), (0, (2, 1.2)), (0, (6, 2, 1.5, 2)), (0, (1, 1.5))]
MARKERS, SIZE = "osD^vP", (9, 5.2)
MARS, BASELINE = ("#0b3c8c", "#b5440e", "#146b4a", "#5b2a86", "#000000"), "0.55"


def style(found: list[Entry]) -> dict[str, dict]:
    """Return {recipe: how its line looks}, the same in all pictures."""
    looks: dict[str, dict] = {}
    numbers = {True: count(), False: count()}
    for e in sorted(found, key=lambda e: e.recipe.name):
        i = next(numbers[e.recipe.corrects])
        look = dict(color=BASELINE, linewidth=1.3, zorder=2)
        if e.recipe.corrects:
            look = dict(color=MARS[i % len(MARS)], linewidth=1.8, zorder=3)
            look |= dict(marker=MARKERS[i % len(MARKERS)], markersize=4)
        looks[e.recipe.name] = look | {"linestyle": DASHES[i % len(DASHES)]}
    return looks


def spread_out(heights: list[float], gap: float) -> list[float]:
    """Return the same heights in the same order, moved apart to at least ``gap``.

    Neighbours that collide share their mean: the isotonic regression, by its formula.
    """
    order, ends = np.argsort(heights), range(1, len(heights) + 1)
    free = np.asarray(heights)[order] - gap * np.arange(len(heights))
    moved = np.empty(len(heights))
    for i in range(len(heights)):
        level = max(min(free[j:k].mean() for k in ends[i:]) for j in range(i + 1))
        moved[order[i]] = level + gap * i
    return moved.tolist()


def _label(axes, ends: list[tuple[Entry, float, float]], looks: dict) -> None:
    """Write names at the right border, a thin line from each to its curve's end."""
    axes.spines[["top", "right"]].set_visible(False)
    low, high = axes.get_ylim()
    heights = spread_out([y for _, _, y in ends], 0.042 * (high - low))
    right = axes.get_xlim()[1]
    for (e, x, y), height in zip(ends, heights, strict=True):
        color = looks[e.recipe.name]["color"]
        line = dict(arrowstyle="-", color=color, linewidth=0.6, linestyle=":")
        line |= dict(relpos=(0, 0.5), shrinkA=0, shrinkB=0)
        text = dict(fontsize=8, va="center", annotation_clip=False, color="0.35")
        if e.recipe.corrects:
            text |= dict(color=color, weight="bold")
        said, place = f"{e.recipe.name}  {y:.3f}", (right * 1.025, height)
        axes.annotate(said, (x, y), place, arrowprops=line, **text)


def by(
    unit: Callable[[Entry], float], xlabel: str, found: list[Entry], path: Path
) -> None:
    """Draw mean losses against steps times ``unit``, with the range over seeds."""
    looks, ends = style(found), []
    early = [e.curve.at(0.12 * found[0].curve.steps[-1]) for e in found]
    labels = dict(xlabel=xlabel, ylabel="validation loss (nats per token)")
    with picture(path, SIZE, **labels) as axes:
        for e in found:
            curve, look = e.curve, looks[e.recipe.name]
            x = curve.steps * unit(e)
            axes.plot(x, curve.losses, **look)
            each = [np.interp(curve.steps, c.steps, c.losses) for c in e.curves]
            shade = dict(color=look["color"], alpha=0.15, linewidth=0)
            axes.fill_between(x, np.min(each, 0), np.max(each, 0), **shade)
            ends.append((e, float(x[-1]), float(curve.losses[-1])))
        finals = [y for _, _, y in ends]
        low, high = min(finals), max(*finals, float(np.median(early)))
        margins = low - 0.06 * (high - low), high + 0.04 * (high - low)
        axes.set(xlim=(0, max(x for _, x, _ in ends)), ylim=margins)
        _label(axes, ends, looks)


def by_rate(found: list[Entry], path: Path) -> None:
    """Draw the final loss of seed 0 against the learning rate; a ring is the chosen
    rate, a cross at the top a run that diverged or is above the picture.
    """
    from matplotlib import ticker

    looks, ends = style(found), []
    losses = [v for e in found for v in e.sweep.values() if math.isfinite(v)]
    low, top = min(losses), min(max(losses), 2 * np.median(losses) - min(losses))
    high = top + 0.05 * (top - low)
    labels = dict(
        xlabel="peak learning rate (ring: chosen; cross: diverged or above)",
        ylabel="final validation loss (nats per token)",
    )
    with picture(path, SIZE, **labels) as axes:
        for e in found:
            look = looks[e.recipe.name]
            color, chosen = look["color"], e.sweep[e.lr]
            rates = [lr for lr, loss in e.sweep.items() if math.isfinite(loss)]
            axes.plot(rates, [e.sweep[lr] for lr in rates], **{"marker": ".", **look})
            gone = [lr for lr, loss in e.sweep.items() if not loss <= high]
            cross = dict(color=color, clip_on=False, zorder=4)
            axes.plot(gone, [high] * len(gone), "x", **cross)
            ring = dict(color=color, markersize=10, fillstyle="none")
            axes.plot(e.lr, chosen, "o", **ring)
            ends.append((e, e.lr, min(high, chosen)))
        axes.set(xscale="log", ylim=(low - 0.05 * (high - low), high))
        axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axes.xaxis.set_minor_formatter(ticker.NullFormatter())
        _label(axes, ends, looks)
