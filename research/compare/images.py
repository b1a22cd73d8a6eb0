"""Runs on images: a small convolutional net or a ViT on scikit-learn's handwritten
digits (1,797 images of 8 x 8 pixels, which come with the package).

python -m research.compare.images SETTING RECIPE SEED FILE trains, and writes what it
showed.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from research.compare.optimizers import build
from research.compare.plain import arguments, result_in
from train.engine.schedule import cosine
from train.errors import UserError, check_least
from train.files import write_json

if TYPE_CHECKING:
    from research.compare.study import Run

NUM_TRAINED = 797  # of the images; the other 1,000 are held out
WORST = 3.0  # times the loss of a uniform guess, beyond which a run has diverged


class ConvNet(nn.Module):
    """Three convolutions, of which the second halves the image, and a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, 16, 3, padding=1)
        self.hidden = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.last = nn.Conv2d(32, 64, 3, padding=1)
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return (N, 10) logits of (N, 1, 8, 8) images."""
        x = images
        for part in (self.embed, self.hidden, self.last):
            x = part(x).relu()
        return self.head(x.mean((2, 3)))


class Block(nn.Module):
    """Attention and an MLP, each behind a norm and beside a shortcut."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, patches, width) of the same."""
        h = self.norms[0](x)
        heads = (
            part(h).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in self.qkv
        )
        x = x + self.out(
            scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        )
        return x + self.down(gelu(self.up(self.norms[1](x))))


class ViT(nn.Module):
    """Two blocks over 16 patches of 2 x 2 pixels."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, width, 2, stride=2)
        self.position = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(2))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return (N, 10) logits of (N, 1, 8, 8) images."""
        x = self.embed(images).flatten(2).mT + self.position.weight
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


MODELS: dict[str, type[nn.Module]] = {"convnet": ConvNet, "vit": ViT}


def digits() -> tuple[Tensor, Tensor]:
    """Return (1797, 1, 8, 8) images from -1 to 1 in a random order, and their labels.

    Raises:
        UserError: there is no scikit-learn.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UserError(
            f"got no scikit-learn ({error}), expected its digits: pip install "
            "--group examples -c constraints.txt"
        ) from None
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images[order], torch.tensor(labels)[order]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How every method of a study is trained.

    Args:
        model: "convnet" or "vit".
        steps: of a run, after which the learning rate is at ``floor``.
        batch: images of a step.
        warmup: share of the steps, linear from 0, before the cosine.
        floor: last learning rate, as a share of the peak.
        points: validations of a run.
    """

    model: str
    steps: int
    batch: int = 64
    warmup: float = 0.1
    floor: float = 0.1
    points: int = 4
    keeps: ClassVar[bool] = False
    unit: ClassVar[str] = "image"

    def check(self, recipes: Mapping[str, Mapping[str, Any]]) -> None:
        """Check the setting, and that all methods can be built.

        Raises:
            UserError: what is no setting, or a recipe that is none.
        """
        check_least(1, batch=self.batch, steps=self.steps, points=self.points)
        check_least(0, 1, warmup=self.warmup, floor=self.floor)
        if self.model not in MODELS:
            raise UserError(
                f"got model={self.model!r}, expected one of {', '.join(MODELS)}: "
                "choose one"
            )
        for title, recipe in recipes.items():
            try:
                build(MODELS[self.model](), recipe, steps=self.steps, compile=False)
            except (KeyError, TypeError, ValueError) as error:
                raise UserError(f"{title}: {error}") from error

    def identity(self) -> dict[str, Any]:
        """Return what two calls must agree on, by name."""
        return asdict(self)

    def command(self, run: Run, folder: Path) -> tuple[str, list[str]]:
        """Return the module and the arguments that train a run."""
        return __name__, arguments(self, run, folder)

    def found(self, folder: Path) -> dict[str, Any] | None:
        """Return what a run in ``folder`` showed; None before its end."""
        return result_in(folder)


def train(setting: Setting, recipe: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Train from the start, in epochs without the images that fill no batch.

    Returns:
        "curve", [[step, held-out loss in nats an image]], which ends with null where a
        run has diverged; "accuracy" of the last point, a share of the held-out images.
    """
    images, labels = digits()
    torch.manual_seed(seed)
    model = MODELS[setting.model]()
    optimizer = build(model, recipe, steps=setting.steps, compile=False)
    peaks = [group["lr"] for group in optimizer.param_groups]
    warmup = max(1, round(setting.warmup * setting.steps))
    per_epoch = NUM_TRAINED // setting.batch
    interval = -(-setting.steps // setting.points)
    curve: list[list[float | None]] = []
    accuracy = 0.0
    for step in range(setting.steps):
        share = cosine(
            step + 1, warmup=warmup, total=setting.steps, floor=setting.floor
        )
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * share
        if step % per_epoch == 0:
            order = torch.randperm(NUM_TRAINED).split(setting.batch)
        batch = order[step % per_epoch]
        cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % interval == 0 or step + 1 == setting.steps:
            optimizer.eval()
            with torch.no_grad():
                logits = model(images[NUM_TRAINED:])
            optimizer.train()
            loss = float(cross_entropy(logits, labels[NUM_TRAINED:]))
            accuracy = float((logits.argmax(1) == labels[NUM_TRAINED:]).float().mean())
            curve.append([step + 1, loss if loss < WORST * math.log(10) else None])
            if curve[-1][1] is None:
                break
    return dict(curve=curve, accuracy=round(accuracy, 4))


def main() -> None:
    """Train as the arguments say."""
    setting, recipe, seed = map(json.loads, sys.argv[1:4])
    write_json(Path(sys.argv[4]), train(Setting(**setting), recipe, seed))


if __name__ == "__main__":
    main()
