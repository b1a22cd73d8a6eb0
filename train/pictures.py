"""Figures, readable in black and white."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from train.files import replacing


@contextmanager
def picture(
    path: Path, size: tuple[float, float] = (7, 4.2), **labels: str
) -> Iterator:
    """Yield axes with a grid and ``labels`` (title, xlabel, ylabel); then save them."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=size, layout="constrained")
    axes.set(**labels)
    axes.grid(alpha=0.3)
    yield axes
    with replacing(path) as file:
        figure.savefig(file, dpi=150, format=path.suffix[1:])
    plt.close(figure)


def by_layer(names: Sequence[str], values: Sequence[float], **labels: str):
    """Return a figure of one value of each parameter over the layer, which is the first
    number in its name: a line for each name without that number.
    """
    from matplotlib.figure import Figure

    lines = defaultdict(list)
    for name, value in zip(names, values, strict=True):
        parts = name.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if at is not None:
            layer, parts[at] = int(parts[at]), "*"
            lines[".".join(parts)].append((layer, value))
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel="layer", yscale="log", **labels)
    axes.grid(alpha=0.3)
    for kind, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=kind)
    if lines:
        axes.legend(fontsize="x-small")
    return figure
