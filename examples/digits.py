"""Optimizers side by side where convolutions meet matrices: a ViT and a ResNet on
scikit-learn's handwritten digits (1797 images of 8 x 8; nothing is downloaded).

    python -m examples.digits [--seeds 3] [--steps 300] [--models vit resnet]
        [--methods adamw muon ...] [--lrs muon=1e-2,2e-2,4e-2 ...] [--extend 4]

Every method is swept over learning rates with one seed, by the loss on a validation
split; where the best rate is at the grid's edge, the grid grows. Then the seeds are run
at that rate, and accuracies on the test split printed. With matrix rules, kernels are
matrices (out, in * height * width); rows that end in "-2d" leave them to AdamW, which
is the default. Inputs, positions and heads take AdamW beside a matrix rule. What AdamW
moves beside another rule has the rate that AdamW alone was best with; only MARS-M gives
vectors (and, in "-2d", kernels) the rate of its matrices, as its authors do.
"""

import argparse
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from marsopt import MARS, REGISTRY
from marsopt.profiling.machine import describe, one_line
from train.errors import UserError, check_least, command

WIDTH, BATCH, WARMUP = 32, 64, 0.1
TRAIN, VALIDATION = 797, 400  # images; the other 600 are the test split

# ---- data and models -----------------------------------------------------------------


def digits() -> list[tuple[Tensor, Tensor]]:
    """Return (images (N, 1, 8, 8), labels (N,)) of train, validation and test split."""
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
    parts = order.tensor_split([TRAIN, TRAIN + VALIDATION])
    return [(images[part], torch.tensor(labels)[part]) for part in parts]


class ViT(nn.Module):
    """Two blocks over 16 patches of 2 x 2."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, WIDTH, 2, stride=2)
        self.position = nn.Parameter(0.02 * torch.randn(16, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images).flatten(2).mT + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Block(nn.Module):
    """Attention and an MLP, each behind a norm and beside a shortcut."""

    def __init__(self, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.query, self.key, self.value, self.out = (
            nn.Linear(WIDTH, WIDTH) for _ in range(4)
        )
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norms[0](x)
        q, k, v = (
            part(h).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        h = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(h.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class ResNet(nn.Module):
    """Three residual blocks, the second at half the size, after a first convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, WIDTH // 2, 3, padding=1, bias=False)
        self.blocks = nn.Sequential(
            Residual(WIDTH // 2, WIDTH // 2, 1),
            Residual(WIDTH // 2, WIDTH, 2),
            Residual(WIDTH, WIDTH, 1),
        )
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(images)).mean((2, 3)))


class Residual(nn.Module):
    """Two convolutions behind batch norms, beside a shortcut."""

    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()

        def part(width: int, stride: int) -> nn.Sequential:
            kernel = nn.Conv2d(width, out, 3, stride=stride, padding=1, bias=False)
            return nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(), kernel)

        self.parts = nn.Sequential(part(width, stride), part(out, 1))
        same = stride == 1 and width == out
        shortcut = nn.Conv2d(width, out, 1, stride=stride, bias=False)
        self.shortcut = nn.Identity() if same else shortcut

    def forward(self, x: Tensor) -> Tensor:
        return self.shortcut(x) + self.parts(x)


MODELS = {"vit": ViT, "resnet": ResNet}

# ---- methods -------------------------------------------------------------------------

# where each sweep starts, and what the optimizer is given
METHODS: dict[str, tuple[float, dict]] = {
    "adamw": (4e-3, dict(mars_type="adamw", betas=(0.9, 0.95))),
    "mars-adamw": (8e-3, dict(mars_type="mars-adamw")),
    "muon": (4e-2, dict(mars_type="muon")),
    "mars-m": (1.6e-2, dict(mars_type="mars-m")),
}
# the same with kernels left to AdamW
TWO_DIMS = {f"{n}-2d": METHODS[n] for n in ("mars-adamw", "muon", "mars-m")}


def build(model: nn.Module, method: str, lr: float, rest_lr: float) -> MARS:
    """Return the optimizer of one method.

    Args:
        model: a ViT or ResNet.
        method: a name in METHODS or TWO_DIMS.
        lr: of what the rule moves.
        rest_lr: of what AdamW moves beside it.
    """
    _, options = {**METHODS, **TWO_DIMS}[method]
    kind = "2d" if method in TWO_DIMS else "flattened"
    tables, others = [], list(model.parameters())
    if REGISTRY[options["mars_type"]].matrix_only:
        named = list(model.named_parameters())
        ends = ("embed", "position", "head")
        tables = [p for n, p in named if n.startswith(ends)]
        others = [p for n, p in named if not n.startswith(ends)]
    groups: list[dict] = [{"params": others, "matrices": kind}]
    if tables:
        by_adamw = dict(mars_type="adamw", betas=(0.9, 0.95))
        groups.append({"params": tables, "lr": rest_lr, **by_adamw})
    common = dict(lr=lr, lr_1d=rest_lr, weight_decay=0.1, ns_dtype=torch.float32)
    return MARS(groups, compile=False, **common, **options)


class Outcome(NamedTuple):
    """What one run ends with."""

    validation_loss: float
    test_loss: float
    accuracy: float  # on the test split, percent


def run(
    name: str, method: str, lr: float, rest_lr: float, seed: int, steps: int, splits
) -> Outcome:
    """Train one model from one seed, and evaluate it."""
    torch.manual_seed(seed)
    model = MODELS[name]()
    optimizer = build(model, method, lr, rest_lr)

    def factor(step: int) -> float:
        warm = min(1.0, (step + 1) / (WARMUP * steps))
        return warm * 0.5 * (1 + math.cos(math.pi * step / steps))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    (images, labels), *held_out = splits
    per_epoch = len(images) // BATCH
    for step in range(steps):
        if step % per_epoch == 0:
            order = torch.randperm(len(images)).split(BATCH)
        batch = order[step % per_epoch]
        cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

    model.eval()
    (validation_loss, _), (test_loss, accuracy) = (
        evaluated(model, *split) for split in held_out
    )
    return Outcome(validation_loss, test_loss, accuracy)


@torch.no_grad()
def evaluated(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return loss and accuracy in percent; a run that diverged has an infinite loss."""
    logits = model(images)
    loss = float(cross_entropy(logits, labels))
    hits = (logits.argmax(1) == labels).float().mean()
    return (loss if math.isfinite(loss) else math.inf), 100 * float(hits)


# ---- the table -----------------------------------------------------------------------


class Row(NamedTuple):
    """One method on one model."""

    model: str
    method: str
    rates: dict[float, Outcome]  # of the sweep, with seed 0
    seeds: list[Outcome]  # at the best rate

    @property
    def lr(self) -> float:
        """Return the rate of the lowest validation loss."""
        return min(self.rates, key=lambda lr: self.rates[lr].validation_loss)

    @property
    def is_at_edge(self) -> bool:
        """Return whether a rate beyond the grid might be better."""
        return self.lr in (min(self.rates), max(self.rates))

    def __str__(self) -> str:
        accuracies = [seed.accuracy for seed in self.seeds]
        losses = [seed.test_loss for seed in self.seeds]
        grid = f"{min(self.rates):.3g} to {max(self.rates):.3g}"
        return (
            f"| {self.model} | {self.method} | {self.lr:.3g} | {grid} | "
            f"{spread(accuracies, 2)} | {spread(losses, 3)} |"
        )


def spread(values: Sequence[float], places: int) -> str:
    """Return mean and standard deviation in words."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.{places}f} ± {deviation:.{places}f}"


def swept(args, name: str, method: str, rest_lr: float | None, splits) -> Row:
    """Return one row: its sweep, and its seeds at the best rate."""
    middle, _ = {**METHODS, **TWO_DIMS}[method]
    grid = args.lrs.get(method, [middle / 2, middle, 2 * middle])
    rates: dict[float, Outcome] = {}

    def outcome(lr: float, seed: int) -> Outcome:
        own = lr if rest_lr is None else rest_lr
        return run(name, method, lr, own, seed, args.steps, splits)

    for lr in grid:
        rates[lr] = outcome(lr, 0)
    row = Row(name, method, rates, [])
    for _ in range(args.extend):
        if not row.is_at_edge:
            break
        lr = row.lr / 2 if row.lr == min(rates) else row.lr * 2
        rates[lr] = outcome(lr, 0)
    rest = [outcome(row.lr, seed) for seed in range(1, args.seeds)]
    return row._replace(seeds=[rates[row.lr], *rest])


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, with ``lrs`` as {method: [rate, ...]}."""
    names = [*METHODS, *TWO_DIMS]
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], allow_abbrev=False
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument(
        "--methods", nargs="+", choices=names, help="default: all (-2d: of a ResNet)"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--extend", type=int, default=4, help="rates added to a grid")
    parser.add_argument(
        "--lrs",
        nargs="+",
        action="extend",
        default=[],
        metavar="METHOD=LR,...",
        help="grids to sweep",
    )
    args = parser.parse_args(given)
    check_least(1, seeds=args.seeds, steps=args.steps)
    check_least(0, extend=args.extend)
    args.lrs = dict(grid(text, names) for text in args.lrs)
    return args


def grid(text: str, names: Sequence[str]) -> tuple[str, list[float]]:
    """Return the method and the rates that ``METHOD=LR,...`` says."""
    method, _, rates = text.partition("=")
    try:
        found = sorted({float(rate) for rate in rates.split(",")})
    except ValueError:
        found = []
    usable = found and all(0 < rate < math.inf for rate in found)
    if method not in names or not usable:
        raise UserError(
            f"got --lrs {text}, expected METHOD=LR,... with a METHOD of {names} and "
            "rates above 0: name one, with numbers such as 1e-2"
        )
    return method, found


def main(given: Sequence[str] | None = None) -> None:
    args = arguments(given)
    splits = digits()
    print(one_line(describe("cpu")))
    print("| model | method | lr | swept | test accuracy, % | test loss |")
    print("|---|---|---|---|---|---|")
    edges = []
    for name in args.models:
        more = TWO_DIMS if name == "resnet" else {}
        chosen = [m for m in args.methods or [*METHODS, *more] if m != "adamw"]
        first = swept(args, name, "adamw", None, splits)
        print(first, flush=True)
        rows = [first]
        for method in chosen:
            rows.append(swept(args, name, method, first.lr, splits))
            print(rows[-1], flush=True)
        edges += [f"{r.method} ({r.model})" for r in rows if r.is_at_edge]
    print("best rates at an edge of their grid:", ", ".join(edges) or "none")


if __name__ == "__main__":
    command(main)
