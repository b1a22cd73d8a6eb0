"""What is stepped: parameters, and gradients that all contenders see."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

# Global norm of a gradient, and how much of it the tied embedding holds. Clipped to 1
# and corrected, the embedding's gradient still exceeds 1 and the others' do not: both
# clips are at work, the per-tensor one where training sees it.
NORM, EMBEDDING_NORM = 3.0, 2.8
EMBEDDING = "wte"

Shapes = Mapping[str, tuple[int, ...]]


def parameters(
    shapes: Shapes, device: torch.device, dtype: torch.dtype = torch.float32
) -> dict[str, nn.Parameter]:
    """Return every contender's start: matrices N(0, 0.02), LayerNorm weights 1."""
    generator = torch.Generator(device).manual_seed(0)
    found = {}
    for name, shape in shapes.items():
        p = torch.ones(shape, device=device, dtype=dtype)
        if len(shape) > 1:
            p.normal_(0.0, 0.02, generator=generator)
        found[name] = nn.Parameter(p)
    return found


class Gradients:
    """Gradients as a backward pass would leave them, normally distributed.

    Their second moments stay far from denormal numbers: the smallest standard
    deviation, at GPT-2 XL, is 3e-5.
    """

    def __init__(
        self, shapes: Shapes, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        empty = partial(torch.empty, device=device, dtype=dtype)
        self._values = {name: empty(shape) for name, shape in shapes.items()}
        others = sum(v.numel() for n, v in self._values.items() if n != EMBEDDING)
        self._others_std = ((NORM**2 - EMBEDDING_NORM**2) / others) ** 0.5
        self._embedding_std = EMBEDDING_NORM / self._values[EMBEDDING].numel() ** 0.5
        self._generator = torch.Generator(device).manual_seed(1)

    def draw(self) -> None:
        """Draw the next round's values."""
        for name, value in self._values.items():
            std = self._embedding_std if name == EMBEDDING else self._others_std
            value.normal_(0.0, std, generator=self._generator)

    @torch.no_grad()
    def hand_to(self, params: Mapping[str, nn.Parameter], scale: float) -> None:
        """Do to p.grad what backward does: add to what is there (zeros), else put a new
        tensor of its own. So nobody sees a gradient that another contender has
        clipped, and who keeps p.grad as state keeps what it was.
        """
        for name, p in params.items():
            if p.grad is None:
                p.grad = self._values[name] * scale
            else:
                p.grad.add_(self._values[name], alpha=scale)


@torch.no_grad()
def sample(params: Mapping[str, nn.Parameter]) -> Tensor:
    """Return up to 4096 elements of each parameter, evenly spaced, on the CPU."""
    return torch.cat(
        [
            p.flatten()[:: max(1, p.numel() // 4096)].float().cpu()
            for p in params.values()
        ]
    )
