"""Pictures of a study, readable in black and white."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from research.compare.results import Entry, noise
from research.compare.search import Axis
from research.compare.study import Study
from train.pictures import picture

DASHES = ["-", (0, (6, 2)), (0, (2, 1.2)), (0, (6, 2, 1.5, 2)), (0, (1, 1.5))]
MARKERS = "osD^vPX*"
COLORS = ("#0b3c8c", "#b5440e", "#146b4a", "#5b2a86", "#000000", "#8a6d00", "#a0145a")
TICKS = [digit * 10.0**power for power in range(-6, 2) for digit in (1, 2, 5)]
USUAL = 0.75  # of a method's losses along an axis; what is above is cut


def draw(study: Study, found: Sequence[Entry], folder: Path) -> list[str]:
    """Draw what there is to draw; return the names of the files.

    A color is a family: a control and what is compared with it.
    """
    first, *_ = study.methods
    controls = [*dict.fromkeys(m.control or first for m in study.methods.values())]
    looks = {}
    for i, (title, method) in enumerate(study.methods.items()):
        family = title if title in controls else method.control or first
        looks[title] = dict(
            color=COLORS[controls.index(family) % len(COLORS)],
            marker=MARKERS[i % len(MARKERS)],
            linestyle="-" if title == family else DASHES[1 + i % (len(DASHES) - 1)],
            markersize=4,
            linewidth=1.4,
        )
    loss = f"held-out loss (nats per {study.setting.unit})"
    losses(found, looks, study.title, loss, folder / "losses.png")
    names = ["losses.png"]
    for axis in {a.name: a for m in study.methods.values() for a in m.axes}.values():
        mine = [e for e in found if axis.name in e.values]
        if mine:
            names.append(f"by_{axis.name}.png")
            by_value(axis, mine, looks, loss, folder / names[-1])
    return names


def losses(
    found: Sequence[Entry], looks: dict, title: str, loss: str, path: Path
) -> None:
    """Draw the loss of each seed, and means with their standard errors, best on top."""
    sigma = noise(found) or 0.0
    labels = dict(xlabel=f"{loss}; bar: mean and standard error", title=title)
    with picture(path, (8, 1.2 + 0.3 * len(found)), **labels) as axes:
        for place, e in enumerate(reversed(found)):
            color = looks[e.title]["color"]
            axes.plot(e.finite, [place] * len(e.finite), ".", color="0.6")
            if math.isfinite(e.mean):
                error = sigma / math.sqrt(len(e.losses))
                bar = dict(fmt="|", color=color, capsize=3, markersize=9)
                axes.errorbar(e.mean, place, xerr=error, **bar)
        axes.set_yticks(range(len(found)), [e.title for e in reversed(found)])


def profile(axis: Axis, e: Entry) -> tuple[list[float], list[float]]:
    """Return values of an axis that were tried, ascending, and for each the lowest loss
    of the trials within half a step of it.
    """
    i = list(e.values).index(axis.name)
    tried = sorted((point[i], loss) for point, loss in e.found.losses.items())
    tried = [(value, loss) for value, loss in tried if math.isfinite(loss)]
    places = np.array([axis.place(value) for value, _ in tried])
    every = np.array([loss for _, loss in tried])
    lowest = [every[np.abs(places - at) <= 0.5].min() for at in places]
    return [value for value, _ in tried], [float(loss) for loss in lowest]


def by_value(
    axis: Axis, found: Sequence[Entry], looks: dict, loss: str, path: Path
) -> None:
    """Draw the loss of the search against one axis, the others at the best that was
    tried near it, without the worst; a ring is the value that was chosen.
    """
    lines = {e.title: profile(axis, e) for e in found}
    low = min(loss for _, own in lines.values() for loss in own)
    high = max(float(np.quantile(own, USUAL)) for _, own in lines.values())
    labels = dict(xlabel=f"{axis.name} (ring: chosen)", ylabel=loss)
    with picture(path, (9, 5.2), **labels) as axes:
        ends = []
        for e in found:
            values, own = lines[e.title]
            x = [1 - v if axis.decay else v for v in values]
            axes.plot(x, own, **looks[e.title])
            chosen = e.values[axis.name]
            at = 1 - chosen if axis.decay else chosen
            y = e.found.losses[e.found.best]
            axes.plot(at, y, "o", fillstyle="none", markersize=11, color="0.3")
            ends.append((e, x[-1], min(own[-1], high)))
        axes.set_xscale("log")
        margin = 0.05 * (high - low or 1.0)
        axes.set_ylim(low - margin, high + margin)
        shown = [t for t in TICKS if axes.get_xlim()[0] < t < axes.get_xlim()[1]]
        axes.set_xticks(shown, [f"{1 - t if axis.decay else t:g}" for t in shown])
        axes.minorticks_off()
        if axis.decay:
            axes.invert_xaxis()
        label(axes, ends, looks)


def label(axes, ends: Sequence[tuple[Entry, float, float]], looks: dict) -> None:
    """Write names at the right border, a thin line from each to its curve's end."""
    axes.spines[["top", "right"]].set_visible(False)
    low, high = axes.get_ylim()
    heights = spread_out([y for *_, y in ends], 0.042 * (high - low))
    for (e, x, y), height in zip(ends, heights, strict=True):
        color = looks[e.title]["color"]
        line = dict(arrowstyle="-", color=color, linewidth=0.6, linestyle=":")
        line |= dict(relpos=(0, 0.5), shrinkA=0, shrinkB=0)
        text = dict(fontsize=8, va="center", annotation_clip=False, color=color)
        text |= dict(textcoords=axes.get_yaxis_transform(), arrowprops=line)
        axes.annotate(e.title, (x, y), (1.02, height), **text)


def spread_out(heights: Sequence[float], gap: float) -> list[float]:
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
