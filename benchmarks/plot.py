"""Paired ratios as horizontal bars, readable in black and white."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402

LOOKS = {
    "ours": dict(facecolor="black", edgecolor="black", label="marsopt"),
    "torch": dict(facecolor="white", edgecolor="black", label="torch"),
    "peers": dict(facecolor="0.85", edgecolor="black", hatch="///", label="peers"),
}


def bars(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """One panel, the fastest on top; whiskers are quartiles."""
    rows = sorted(rows, key=lambda row: row["ratio"]["median"])
    for y, row in enumerate(rows):
        x = row["ratio"]
        axes.barh(y, x["median"], height=0.7, **LOOKS[row["family"]])
        error = [[x["median"] - x["low"]], [x["high"] - x["median"]]]
        axes.errorbar(x["median"], y, xerr=error, color="0.5", capsize=3)
        axes.annotate(
            f"{x['median']:.2f}  ({1e3 * row['seconds']['median']:,.1f} ms)",
            (x["high"], y),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            bbox=dict(facecolor="white", edgecolor="none", pad=0.5),
        )
    axes.set_yticks(range(len(rows)), [row["title"] for row in rows], fontsize=8)
    for tick, row in zip(axes.get_yticklabels(), rows, strict=True):
        tick.set_fontweight("bold" if row["family"] == "ours" else "normal")
    axes.axvline(1.0, color="black", linestyle=":", linewidth=1, zorder=0)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.margins(x=0.2)
    axes.set_xlim(left=0)
    axes.spines[["top", "right"]].set_visible(False)


def draw(report: Mapping[str, Any], subtitle: str, path: Path) -> None:
    """Elementwise rules and matrix rules, each on a scale of its own."""
    panels = {
        "elementwise rules": [r for r in report["rows"] if not r["matrix"]],
        "matrix rules (Newton-Schulz)": [r for r in report["rows"] if r["matrix"]],
    }
    panels = {name: rows for name, rows in panels.items() if rows}
    num_rows = [len(rows) for rows in panels.values()]
    figure, all_axes = plt.subplots(
        len(panels),
        figsize=(9, 1.6 + 0.32 * sum(num_rows) + 0.5 * len(panels)),
        gridspec_kw={"height_ratios": num_rows},
        squeeze=False,
        constrained_layout=True,
    )
    for axes, (name, rows) in zip(all_axes[:, 0], panels.items(), strict=True):
        bars(axes, rows)
        axes.set_title(name, loc="left", fontsize=9)
    all_axes[-1, 0].set_xlabel(
        "time of a step / (clip_grad_norm_ + torch AdamW fused), same round"
    )
    families = {row["family"] for row in report["rows"]}
    figure.legend(
        handles=[Patch(**LOOKS[name]) for name in LOOKS if name in families],
        loc="outside upper right",
        ncols=3,
        frameon=False,
        fontsize=8,
    )
    title = f"{report['model']}: {report['num_params'] / 1e6:.0f}M parameters"
    figure.suptitle(f"{title}\n{subtitle}", x=0.01, ha="left", fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)
