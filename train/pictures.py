"""Figures, readable in black and white."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
    figure.savefig(path, dpi=150)
    plt.close(figure)
