"""The two pictures of the documentation that are not of one command's run.

    python -m research.pictures [--folder docs]

losses.png is the small study's seven rows of README's table, from its store.
transport.png is one step of transport, computed on a quadratic.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np

from research import studies
from research.compare.results import entries, noise
from train.pictures import picture

ROWS = {  # method: its name in the picture; controls first
    "AdamW": "AdamW",
    "NAdamW": "NAdamW",
    "transport": "MARS-AdamW with transport",
    "Moonlight": "Moonlight",
    "Moonlight, transport": "Moonlight with transport",
    "SOAP-Muon": "SOAP-Muon",
    "SOAP-Muon, transport": "SOAP-Muon with transport",
}
ACCENT, GREY = "#b5440e", "#6b6b6b"
CURVATURE = np.array([1.0, 6.0])  # of the quadratic
BETA1, GAMMA, LR = 0.8, 0.5, 0.16


def losses(path: Path) -> None:
    """Draw the loss of every seed, means with standard errors, and each pair's step
    from the control to transport.
    """
    every = entries(studies.small(), studies.stored("small"))
    sigma, found = noise(every) or 0.0, {e.title: e for e in every}
    labels = dict(xlabel="held-out loss, nats per byte (lower is better)")
    with picture(path, (7, 3.4), **labels) as axes:
        for place, title in enumerate(reversed(ROWS)):
            e = found[title]
            is_ahead = "transport" in title
            color = ACCENT if is_ahead else GREY
            axes.plot(e.finite, [place] * len(e.finite), ".", color=color, alpha=0.35)
            error = sigma / math.sqrt(len(e.losses))
            bar = dict(fmt="o" if is_ahead else "s", color=color, capsize=3)
            axes.errorbar(e.mean, place, xerr=error, markersize=6, **bar)
            end = axes.get_yaxis_transform()  # x as a share of the width
            label = dict(va="center", ha="left", color=color, transform=end)
            axes.text(1.01, place, f"{e.mean:.3f}", **label)
            if is_ahead:  # from its control, one row above
                control = found[e.control].mean
                arrow = dict(arrowstyle="->", color=ACCENT, linewidth=1.2)
                ends = (e.mean, place + 0.1), (control, place + 0.9)
                axes.annotate("", *ends, arrowprops=arrow)
        axes.set_yticks(range(len(ROWS)), list(reversed(ROWS.values())))
        axes.set_ylim(-0.5, len(ROWS) - 0.3)
        axes.grid(axis="y", visible=False)


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
