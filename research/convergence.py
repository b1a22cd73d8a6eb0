"""How far momentum is from the true gradient, by correction: the laws of
research/convergence.md, measured.

    python -m research.convergence [--picture research/convergence.png]

The loss of a batch is a sum over coordinates,

    -cos(x) + sigma (z1 sin(x) - z2 cos(x)),   z1, z2 standard normal for each batch,

so that it is not quadratic, and batches differ in their curvature as in their
gradients. The path is prescribed: all coordinates move by one step length a step.
Figures are root mean squares over coordinates and steps.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from marsopt.profiling.machine import describe, one_line
from train.errors import command
from train.pictures import picture

Gradient = Callable[[np.ndarray], np.ndarray]  # of a batch's loss, at a point
FORMS = ("plain", "approximate", "exact", "transport")


class Case(NamedTuple):
    """What estimates the gradient, on which path.

    Args:
        form: "plain" momentum, or that of a correction of MARS.
        a: 1 - beta1.
        gamma: of the correction.
        step: by which every coordinate moves.
        sigma: standard deviation of a coordinate of a batch's gradient.
    """

    form: str
    a: float
    gamma: float = 0.0
    step: float = 0.0
    sigma: float = 0.0

    @property
    def k(self) -> float:
        """Return gamma beta1 / (1 - beta1)."""
        return 0.0 if self.form == "plain" else self.gamma * (1 - self.a) / self.a


def batches(sigma: float, num: int, seed: int = 0) -> Iterator[Gradient]:
    """Yield the gradients of batches, for so many coordinates."""
    draw = np.random.default_rng(seed)
    while True:
        z1, z2 = sigma * draw.standard_normal((2, num)) if sigma else (0.0, 0.0)
        yield lambda x, z1=z1, z2=z2: (1 + z2) * np.sin(x) + z1 * np.cos(x)


def moments(
    case: Case,
    path: Iterable[np.ndarray],
    gradients: Iterable[Gradient],
    start: np.ndarray | float = 0.0,
) -> Iterator[np.ndarray]:
    """Yield m at every point of a path but the first, without a clip:
    m <- (1 - a) m + a c.

    Args:
        case: of which the step length and sigma are not read.
        path: points.
        gradients: of the batch at each point but the first.
        start: m and h at the first point.
    """
    m, h, k = start, start, case.k
    for (before, x), g in zip(itertools.pairwise(path), gradients, strict=False):
        if case.form == "transport":
            c = g(x + k * (x - before))
        elif case.form == "exact":
            c = g(x) + k * (g(x) - g(before))
        else:
            now = g(x)
            c, h = now + k * (now - h), now
        m = (1 - case.a) * m + case.a * c
        yield m


def measured(case: Case, num: int = 256, memories: float = 4.0) -> float:
    """Return the error of m, over so many times 1/a steps, after twice as many."""
    first = 2 * np.pi * (np.arange(num) + 0.5) / num
    num_steps = math.ceil(memories / case.a)
    path = (first + case.step * t for t in itertools.count())
    estimates = moments(case, path, batches(case.sigma, num), np.sin(first))
    errors = (
        m - np.sin(first + case.step * t)
        for t, m in enumerate(itertools.islice(estimates, 3 * num_steps), start=1)
        if t > 2 * num_steps
    )
    return math.sqrt(sum(float(e @ e) for e in errors) / num / num_steps)


def lag(case: Case) -> float:
    """Return the error without noise: of the filter from the gradient to m."""
    turn, v = np.exp(-1j * case.step), case.gamma * (1 - case.a)
    into = case.a
    if case.form == "transport":
        into = case.a * np.exp(1j * case.k * case.step)
    elif case.form != "plain":
        into = case.a + v * (1 - turn)
    return float(abs(into / (1 - (1 - case.a) * turn) - 1)) / math.sqrt(2)


def noise(case: Case) -> float:
    """Return the standard deviation of m."""
    a, v = case.a, 0.0 if case.form == "plain" else case.gamma * (1 - case.a)
    square = a * a
    if case.form == "exact":  # one batch at two points
        square = (a + v) ** 2 + v * v - 2 * v * (a + v) * math.cos(case.step)
    elif case.form == "approximate":  # two batches
        square = (a + v) ** 2 + v * v - 2 * (1 - a) * v * (a + v)
    return case.sigma * math.sqrt(square / (a * (2 - a)))


def law(case: Case) -> float:
    """Return the error in closed form."""
    return math.hypot(lag(case), noise(case))


def best(case: Case) -> Case:
    """Return the case with the a of the smallest error, to a factor of 1.05."""
    grid = (case._replace(a=1.05**-i) for i in range(1, 320))
    return min(grid, key=law)


def exponent(xs: Iterable[float], ys: Iterable[float]) -> float:
    """Return the slope between logarithms, by least squares."""
    return float(np.polyfit(np.log(list(xs)), np.log(list(ys)), 1)[0])


# ---- a loss of many curvatures -------------------------------------------------------

CURVATURE, LOSS = 2.0, 2.0  # mode j has curvature j^-2, and j^-2 of the initial loss


def modes(num: int = 256, last: float = 1e5) -> tuple[np.ndarray, np.ndarray]:
    """Return groups of modes with a power-law spectrum: their curvature (num,) and how
    many modes each stands for (num,).
    """
    edges = np.geomspace(1.0, last, num + 1)
    return np.sqrt(edges[1:] * edges[:-1]) ** -CURVATURE, np.diff(edges)


def power_law_losses(
    decays: np.ndarray, growth: np.ndarray, lr: float, noise: float = 1.0
) -> np.ndarray:
    """Return the expected loss before each step on a quadratic, without sampling: the
    second moments of x and m of every mode follow from those of the step before.

        m <- decay m + (1 - decay) g,    x <- x - lr (g + t^growth m)

    Batches have a gradient noise of covariance 2 noise loss H, as least squares without
    label noise have (noise: 1 / batch size).

    Args:
        decays: of momentum (cases, steps).
        growth: power of the step's number by which the step along m grows (cases,).
    """
    curvature, num = modes()
    xx = np.tile(curvature ** (LOSS / CURVATURE - 1), (len(decays), 1))
    xm, mm = np.zeros_like(xx), np.zeros_like(xx)
    losses = []
    for t, beta in enumerate(decays.T[..., None], start=1):
        loss = (xx * curvature * num).sum(1, keepdims=True) / 2
        losses.append(loss[:, 0])
        variance = 2 * noise * loss * curvature
        along = lr * t ** growth[:, None]
        of_g = lr + along * (1 - beta)
        # x <- p x + q m - of_g n,   m <- r x + beta m + (1 - beta) n
        p, q, r = 1 - of_g * curvature, -along * beta, (1 - beta) * curvature
        xx, xm, mm = (
            p * p * xx + 2 * p * q * xm + q * q * mm + of_g**2 * variance,
            p * r * xx + (p * beta + q * r) * xm + q * beta * mm
            - of_g * (1 - beta) * variance,
            r * r * xx + 2 * r * beta * xm + beta**2 * mm + (1 - beta) ** 2 * variance,
        )  # fmt: skip
    return np.array(losses)


GROWTH, MEMORIES = 0.4, ("age 9", "LogTime(8)", "LogTime(8)", "age 9")


def memories(num_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of steps, and the losses before each (steps, 4), of MEMORIES:
    at one learning rate, the last two with steps along m that grow as t^GROWTH.
    """
    t = np.arange(1.0, num_steps + 1)
    fixed, log_time = np.full(num_steps, 0.9), t / (t + 8)
    decays = np.array([fixed, log_time, log_time, fixed])
    growth = np.array([0.0, 0.0, GROWTH, GROWTH])
    with np.errstate(over="ignore"):
        return t, power_law_losses(decays, growth, lr=0.1)


STEPS = (4e-3, 2e-3, 1e-3, 5e-4)
AVERAGES = (0.2, 0.05, 0.0125)
WITHOUT_NOISE = (
    Case("plain", 0.02),
    Case("exact", 0.02, 0.2),
    Case("transport", 0.02, 0.2),
    Case("approximate", 0.02, 0.2),
    Case("transport", 0.02, 1.0),
    Case("exact", 0.02, 1.0),
)
NOISE_ALONE = (
    Case("plain", 0.2, sigma=1.0),
    Case("transport", 0.2, 1.0, sigma=1.0),
    Case("exact", 0.2, 1.0, sigma=1.0),
    Case("exact", 0.2, 1.0, step=0.05, sigma=1.0),
    Case("approximate", 0.2, 0.2, sigma=1.0),
    Case("approximate", 0.2, 1.0, sigma=1.0),
)
CURVES = (
    Case("plain", 0.5, sigma=1.0),
    Case("approximate", 0.5, 0.2, sigma=1.0),
    Case("transport", 0.5, 0.2, sigma=1.0),
    Case("exact", 0.5, 0.2, sigma=1.0),
    Case("transport", 0.5, 1.0, sigma=1.0),
    Case("exact", 0.5, 1.0, sigma=1.0),
)
DECADES = tuple(10.0**p for p in np.arange(-4, -0.99, 0.5))


def _title(case: Case) -> str:
    title = case.form if case.form == "plain" else f"{case.form}, gamma {case.gamma:g}"
    return f"{title}, steps of {case.step:g}" if case.step else title


def _row(case: Case, cells: Iterable[float], xs: Iterable[float]) -> str:
    """Return a row: measured errors, and their exponent where there is one."""
    cells = list(cells)
    slope = "" if max(cells) < 1e-12 else f"{exponent(xs, cells):.2f}"
    shown = [f"{cell:.2g}" if cell < 1e-12 else f"{cell:.3g}" for cell in cells]
    return f"| {' | '.join([_title(case), *shown, slope])} |"


def lines() -> list[str]:
    """Return the two tables of errors, and that of losses on many curvatures."""
    head = " | ".join(f"step {s:g}" for s in STEPS)
    rows = [f"| no noise, a = 0.02 | {head} | exponent |", "|---|---|---|---|---|---|"]
    for case in WITHOUT_NOISE:
        cells = [measured(case._replace(step=s), num=16) for s in STEPS]
        rows.append(_row(case, cells, STEPS))
    head = " | ".join(f"a = {a:g}" for a in AVERAGES)
    rows += ["", f"| noise, sigma 1 | {head} | exponent |", "|---|---|---|---|---|"]
    for case in NOISE_ALONE:
        cells = [measured(case._replace(a=a), num=2048) for a in AVERAGES]
        rows.append(_row(case, cells, AVERAGES))
    t, losses = memories(8192)
    marks = (512, 2048, 8192)
    head = " | ".join(f"after {mark:,}" for mark in marks)
    rows += ["", f"| memory | step along m | {head} | exponent |"]
    rows.append("|---|---|---|---|---|---|")
    for i, title in enumerate(MEMORIES):
        own = losses[:, i]
        slope = "" if own[-1] > own[0] else f"{-exponent(t[2048:], own[2048:]):.2f}"
        cells = [f"{own[mark - 1]:.3g}" for mark in marks]
        grows = "1" if i < 2 else f"t^{GROWTH:g}"
        rows.append(f"| {' | '.join([title, grows, *cells, slope])} |")
    return rows


def draw(path: Path) -> list[str]:
    """Draw the error at the best a, by the length of a step; return a line each."""
    dashes = ["-", (0, (1, 1.5)), (0, (6, 2)), (0, (2, 1.2)), (0, (6, 2)), "-"]
    colors = ("#000000", "#8a6d00", "#b5440e", "#5b2a86", "#0b3c8c", "#146b4a")
    labels = dict(
        xlabel="length of a step",
        ylabel="error of momentum at the best beta1",
        title="lines: closed forms; marks: measured on batches",
    )
    summaries, fine = [], np.geomspace(DECADES[0], DECADES[-1], 40)
    with picture(path, (7.5, 5.0), **labels) as axes:
        for i, case in enumerate(CURVES):
            on_line = [law(best(case._replace(step=s))) for s in fine]
            chosen = [best(case._replace(step=s)) for s in DECADES]
            errors = [measured(c, num=128, memories=8.0) for c in chosen]
            slope = exponent(fine, on_line)
            look = dict(color=colors[i], linewidth=1.4)
            levels_off = case.form == "approximate"
            name = _title(case) + ("" if levels_off else f": slope {slope:.2f}")
            axes.loglog(fine, on_line, linestyle=dashes[i], label=name, **look)
            axes.loglog(DECADES, errors, "osD^vP"[i], markersize=5, color=colors[i])
            off = max(abs(e / law(c) - 1) for e, c in zip(errors, chosen, strict=True))
            summaries.append(
                f"{_title(case)}: slope {slope:.3f} over three decades of step "
                f"lengths; marks within {off:.1%} of the closed form"
            )
        axes.legend(fontsize=8)
    return summaries


def main() -> None:
    """Print the tables, and draw the picture."""
    parser = argparse.ArgumentParser("python -m research.convergence")
    parser.add_argument("--picture", type=Path, help="to be drawn (a minute)")
    args = parser.parse_args()
    print(one_line(describe("cpu")))
    print("\n".join(["", *lines(), ""]))
    if args.picture:
        print("\n".join(draw(args.picture)))


if __name__ == "__main__":
    command(main)
