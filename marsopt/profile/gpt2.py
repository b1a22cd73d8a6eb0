"""What the command profiles: MARS on the tensors of a GPT-2, along a schedule in which
every hyperparameter moves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from marsopt.optim.mars import MARS

# Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), table 2
MODELS = {
    "gpt2-small": (12, 768),
    "gpt2-medium": (24, 1024),
    "gpt2-large": (36, 1280),
    "gpt2-xl": (48, 1600),
}
NUM_POSITIONS = 1024
# GPT-2's 50257 padded to a multiple of 128, as the MARS authors do
VOCAB_SIZE = 50304


def shapes(num_layers: int, width: int, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """The model's tensors, without biases and with a tied head, as the MARS authors
    train it.
    """
    found: dict[str, tuple[int, ...]] = {
        "wte": (vocab_size, width),
        "wpe": (NUM_POSITIONS, width),
    }
    for i in range(num_layers):
        found |= {
            f"{i}.attn_norm": (width,),
            f"{i}.attn_in": (3 * width, width),
            f"{i}.attn_out": (width, width),
            f"{i}.mlp_norm": (width,),
            f"{i}.mlp_in": (4 * width, width),
            f"{i}.mlp_out": (width, 4 * width),
        }
    return found | {"norm": (width,)}


@dataclass
class Subject:
    """An optimizer with gradients, and its next step."""

    optimizer: MARS
    num_steps: int  # of the whole schedule
    step: int = 0

    def __call__(self) -> None:
        """One step, after every hyperparameter has moved: lr warms up and decays."""
        progress = (self.step + 1) / self.num_steps
        factor = min(10 * progress, 0.55 * (1 + math.cos(math.pi * progress)))
        for group in self.optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor
            group["gamma"] = 0.025 * factor
            group["betas"] = (0.9 + 0.05 * factor, 0.98 + 0.01 * factor)
            group["betas_1d"] = (0.85 + 0.05 * factor, 0.95 + 0.01 * factor)
            group["weight_decay"] = 0.1 * factor
            group["weight_decay_1d"] = 0.1 * factor
            if group["clip"] is not None:
                group["clip"] = 1.0 + factor
        if self.optimizer.max_norm is not None:
            self.optimizer.max_norm = 1.0 + factor
        self.optimizer.step()
        self.step += 1

    @property
    def params(self) -> list[Tensor]:
        """All parameters."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @property
    def num_params(self) -> int:
        """Their elements."""
        return sum(p.numel() for p in self.params)


def subject(
    tensors: dict[str, tuple[int, ...]],
    rule: str,
    *,
    num_steps: int,
    device: str = "cpu",
    h_dtype: torch.dtype | None = None,
    joined: bool = False,
) -> Subject:
    """MARS of type ``rule`` with both clips over fresh ``tensors``.

    Embeddings take the rule, but with "mars-m" and "moonlight" AdamW, as in the
    authors' scripts. Gradients lie apart, as autograd leaves them; ``joined``: in one
    buffer per shape (``MARS.join_gradients``).
    """
    torch.manual_seed(0)
    params = {
        name: nn.Parameter(0.02 * torch.randn(shape, device=device))
        for name, shape in tensors.items()
    }
    for p in params.values():
        p.grad = 1e-3 * torch.randn_like(p)
    beside = {"wte", "wpe"} if rule in ("mars-m", "moonlight") else set()
    groups = [
        {"params": [(n, p) for n, p in params.items() if n not in beside]},
        {"params": [(n, params[n]) for n in sorted(beside)], "mars_type": "adamw"},
    ]
    optimizer = MARS(
        [group for group in groups if group["params"]],
        lr=1e-4,
        mars_type=rule,
        max_norm=1.0,
        h_dtype=h_dtype,
        compile=True,
    )
    if joined:
        optimizer.join_gradients()
    return Subject(optimizer, num_steps)
