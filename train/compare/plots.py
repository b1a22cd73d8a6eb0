"""Pictures of a comparison, readable in black and white.

MARS is dark and has markers, baselines are grey; every line has its own dashes and
carries its name where it ends.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

import numpy as np

from train.compare.results import Entry
from train.pictures import picture

DASHES = ["-", (0, (6, 2)), (0, (2, 1.2)), (0, (6, 2, 1.5, 2)), (0, (1, 1.5))]
MARKERS = "osD^vP"
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


def _size(found: list[Entry]) -> tuple[float, float]:
    """Return inches that leave the curves their place beside the longest name."""
    return 9 + 0.08 * max(0, max(len(e.name) for e in found) - 25), 5.2


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


def _label(
    axes, ends: list[tuple[Entry, float, float]], looks: dict, title: str
) -> None:
    """Write names at the right border, a thin line from each to its curve's end."""
    axes.set_title(title, loc="left", fontsize=10)  # centred, it would move the axes
    axes.spines[["top", "right"]].set_visible(False)
    low, high = axes.get_ylim()
    heights = spread_out([y for _, _, y in ends], 0.042 * (high - low))
    for (e, x, y), height in zip(ends, heights, strict=True):
        color = looks[e.recipe.name]["color"]
        line = dict(arrowstyle="-", color=color, linewidth=0.6, linestyle=":")
        line |= dict(relpos=(0, 0.5), shrinkA=0, shrinkB=0)
        text = dict(fontsize=8, va="center", annotation_clip=False, color="0.35")
        if e.recipe.corrects:
            text |= dict(color=color, weight="bold")
        text |= dict(textcoords=axes.get_yaxis_transform(), arrowprops=line)
        axes.annotate(f"{e.name}  {y:.3f}", (x, y), (1.02, height), **text)


def by(
    unit: Callable[[Entry], float],
    xlabel: str,
    found: list[Entry],
    title: str,
    path: Path,
) -> None:
    """Draw mean losses against steps times ``unit``, with the range over seeds."""
    looks, ends = style(found), []
    early = [e.curve.at(0.12 * found[0].curve.steps[-1]) for e in found]
    labels = dict(xlabel=xlabel, ylabel="validation loss (nats per token)")
    with picture(path, _size(found), **labels) as axes:
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
        # beyond the last point, whose marker the border would cut
        axes.set(xlim=(0, 1.01 * max(x for _, x, _ in ends)), ylim=margins)
        _label(axes, ends, looks, title)


def sweeps(found: list[Entry]) -> dict[str, list[tuple[Entry, int]]]:
    """Return {name: entries and the number of their axis} of what was swept: rate,
    options, second numbers of options ("betas_2"); without what has one value.
    """
    named: dict[str, list[tuple[Entry, int]]] = {}
    for e in found:
        seen: Counter[str] = Counter()
        for i, axis in enumerate(e.found.sweep.axes):
            seen[axis.option] += 1
            part = f"_{seen[axis.option]}" if seen[axis.option] > 1 else ""
            if len(e.found.line(i)) > 1:
                named.setdefault(axis.option + part, []).append((e, i))
    return named


def _places(name: str, values: Sequence[str]) -> dict[str, float]:
    """Return {value: x}: rates as they are, other values at equal distances."""
    if name == "lr":
        return {value: float(value) for value in values}
    with suppress(ValueError):  # words come as they were listed
        values = sorted(values, key=float)
    return {value: float(i) for i, value in enumerate(values)}


def _ticks(places: dict[str, float], log: bool) -> tuple[list[float], list[str]]:
    """Return where values stand and what they are, less those whose text would run
    into the one before.
    """
    shown: list[tuple[float, str]] = []
    ordered = sorted((math.log(x) if log else x, x, v) for v, x in places.items())
    width = 0.022 * max(map(len, places))  # of the axis, in an ordinary font
    least = width * (ordered[-1][0] - ordered[0][0])
    last = -math.inf
    for at, x, value in ordered:
        if at - last >= least:
            shown.append((x, value))
            last = at
    return [x for x, _ in shown], [value for _, value in shown]


def by_value(name: str, found: list[Entry], title: str, path: Path) -> None:
    """Draw the final loss of seed 0 against one of ``sweeps``, the others at their
    best; a ring is the chosen value, a cross at the top a run that diverged or is above
    the picture.
    """
    lines = [(e, i, e.found.line(i)) for e, i in sweeps(found)[name]]
    looks, ends = style(found), []
    places = _places(name, list(dict.fromkeys(v for *_, line in lines for v in line)))
    losses = [v for *_, line in lines for v in line.values() if math.isfinite(v)]
    low, usual = min(losses), float(np.quantile(losses, 0.75))
    top = min(max(losses), low + 2 * (usual - low))
    high = top + 0.05 * (top - low or 1.0)  # where an option has no effect: 1 nat
    what = "peak learning rate" if name == "lr" else name
    labels = dict(
        xlabel=f"{what} (ring: chosen; cross: diverged or above)",
        ylabel="final validation loss (nats per token)",
    )
    with picture(path, _size(found), **labels) as axes:
        for e, i, line in lines:
            look, best = looks[e.recipe.name], e.found.best[i]
            color, chosen = look["color"], line[best]
            x = [places[v] for v, loss in line.items() if math.isfinite(loss)]
            y = [loss for loss in line.values() if math.isfinite(loss)]
            axes.plot(x, y, **{"marker": ".", **look})
            gone = [places[v] for v, loss in line.items() if not loss <= high]
            cross = dict(color=color, clip_on=False, zorder=4)
            axes.plot(gone, [high] * len(gone), "x", **cross)
            ring = dict(color=color, markersize=10, fillstyle="none")
            axes.plot(places[best], chosen, "o", **ring)
            ends.append((e, places[best], min(high, chosen)))
        if name == "lr":
            axes.set_xscale("log")
        axes.set_ylim(low - 0.05 * (high - low), high)
        axes.minorticks_off()
        axes.set_xticks(*_ticks(places, name == "lr"))
        _label(axes, ends, looks, title)
