"""Figures, readable in black and white."""

from collections.abc import Iterator
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
