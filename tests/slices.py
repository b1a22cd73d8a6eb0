"""Tensors that are made of several matrices, and the same matrices as parameters of
their own: what batches have to equal.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from marsopt import MARS, Matrices


@dataclass(frozen=True)
class Several:
    """A shape, and the group options that say which matrices it is made of."""

    shape: tuple[int, ...]
    options: dict = field(default_factory=dict)

    @property
    def matrices(self) -> Matrices:
        return Matrices(
            kind=self.options.get("matrices", "2d"),
            splits=self.options.get("splits"),
        )

    def slices(self, whole: Tensor) -> list[Tensor]:
        if whole.ndim == 1:
            return [whole]
        if self.matrices.kind == "flattened":
            batches = whole.reshape(1, len(whole), -1)
        else:
            batches = whole.reshape(-1, *whole.shape[-2:])
        splits = self.options.get("splits", 1)
        sizes = batches.shape[1] // splits if isinstance(splits, int) else [*splits]
        return [part for batch in batches for part in batch.split(sizes)]

    def joined(self, slices: list[Tensor]) -> Tensor:
        return torch.cat([s.reshape(-1) for s in slices]).view(self.shape)


BATCHED, FLATTENED = dict(matrices="batched"), dict(matrices="flattened")
TENSORS = {
    "experts": Several((3, 4, 6), BATCHED),
    "other experts": Several((3, 4, 6), BATCHED),
    "grouped experts": Several((2, 2, 5, 4), BATCHED),
    "fused experts": Several((3, 8, 6), BATCHED | dict(splits=2)),
    "uneven experts": Several((2, 7, 6), BATCHED | dict(splits=(4, 3))),
    "heads": Several((20, 6), dict(splits=5)),
    "qkv": Several((16, 6), dict(splits=(10, 3, 3))),
    "convolution": Several((6, 2, 3, 2), FLATTENED),
    "other convolution": Several((6, 2, 3, 2), FLATTENED),
    "tall convolution": Several((20, 3, 2), FLATTENED),
    "fused convolutions": Several((8, 3, 2, 2), FLATTENED | dict(splits=2)),
    "one matrix": Several((10, 4)),
    "bias": Several((7,)),
}


def values(seed: int, tensors=TENSORS, dtype=torch.float64) -> dict[str, Tensor]:
    """{name: random tensor}, whose slices have norms of different orders, so that the
    clip acts on some.
    """
    g = torch.Generator().manual_seed(seed)
    found = {}
    for name, several in tensors.items():
        parts = several.slices(torch.randn(several.shape, generator=g, dtype=dtype))
        found[name] = several.joined(
            [x * 10.0 ** -(i % 3) for i, x in enumerate(parts)]
        )
    return found


def groups(params: dict[str, nn.Parameter], tensors) -> list[dict]:
    """Named parameters, those of the same options in one group."""
    found: dict[tuple, dict] = {}
    for name, p in params.items():
        options = tensors[name].options
        group = found.setdefault(
            tuple(sorted(options.items())), options | {"params": []}
        )
        group["params"].append((name, p))
    return list(found.values())


def in_loop(tensors, steps: int, **options) -> dict[str, Tensor]:
    """Whole tensors after steps on every slice as a parameter of its own."""
    parts = {
        name: [nn.Parameter(x.clone()) for x in tensors[name].slices(whole)]
        for name, whole in values(0, tensors).items()
    }
    optimizer = MARS([p for part in parts.values() for p in part], **options)
    for t in range(steps):
        for name, whole in values(1 + t, tensors).items():
            slices = tensors[name].slices(whole)
            for p, grad in zip(parts[name], slices, strict=True):
                p.grad = grad.clone()
        optimizer.step()
    return {n: tensors[n].joined([p.detach() for p in parts[n]]) for n in tensors}


def at_once(tensors, steps: int, put=lambda name, whole: whole, **options):
    """(name: parameter, optimizer) after the same steps on whole tensors, which ``put``
    may shard.
    """
    params = {n: nn.Parameter(put(n, v)) for n, v in values(0, tensors).items()}
    optimizer = MARS(groups(params, tensors), **options)
    for t in range(steps):
        for name, whole in values(1 + t, tensors).items():
            params[name].grad = put(name, whole.clone())
        optimizer.step()
    return params, optimizer
