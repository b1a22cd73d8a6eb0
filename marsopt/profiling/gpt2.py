"""GPT-2's tensors, and the command's subject: MARS on them, along a schedule of every
hyperparameter.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from marsopt.optim.mars import MARS
from marsopt.rules.registry import REGISTRY

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
EMBEDDINGS = ("wte", "wpe")


def shapes(
    num_layers: int, width: int, vocab_size: int = VOCAB_SIZE
) -> dict[str, tuple[int, ...]]:
    """Return the model's tensors, without biases and with a tied head, as the MARS
    authors train it.
    """
    block = {
        "attn_norm": (width,),
        "attn_in": (3 * width, width),
        "attn_out": (width, width),
        "mlp_norm": (width,),
        "mlp_in": (4 * width, width),
        "mlp_out": (width, 4 * width),
    }
    blocks = {
        f"{i}.{n}": shape for i in range(num_layers) for n, shape in block.items()
    }
    embeddings = {"wte": (vocab_size, width), "wpe": (NUM_POSITIONS, width)}
    return {**embeddings, **blocks, "norm": (width,)}


def param_groups(
    params: Mapping[str, Tensor], rule: str, tables: Collection[str] = EMBEDDINGS
) -> list[dict[str, Any]]:
    """Return the groups for ``rule``: ``tables``, which are embeddings, take it too
    (matrix rules: in a group of their own), but if AdamW with the rule's own rate moves
    tensors that are no matrices, it moves them too, as in the authors' scripts.
    """
    row = REGISTRY[rule]
    beside = tables if row.matrix_only else ()
    split = [[(n, p) for n, p in params.items() if (n in beside) == b] for b in (0, 1)]
    adamw = {"mars_type": "adamw", "betas": (0.9, 0.95)}
    options = adamw if row.fallback == "adamw" else {}
    groups: list[dict[str, Any]] = [
        {"params": split[0]},
        {"params": split[1], **options},
    ]
    return [group for group in groups if group["params"]]


class Subject:
    """MARS of type ``rule`` with both clips over fresh ``tensors`` with gradients, and
    its next step.

    ``num_steps`` is the length of the schedule. With ``log_time`` all decays grow with
    the run. ``options`` are more of MARS; with ``master_weight_bits`` tensors are
    bfloat16.
    """

    def __init__(
        self,
        tensors: Mapping[str, tuple[int, ...]],
        rule: str,
        *,
        tables: Collection[str] = EMBEDDINGS,
        num_steps: int,
        device: str = "cpu",
        log_time: float | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        bits = options.get("master_weight_bits")
        dtype = torch.float32 if bits is None else torch.bfloat16
        named = {
            name: nn.Parameter(0.02 * torch.randn(shape, device=device, dtype=dtype))
            for name, shape in tensors.items()
        }
        for p in named.values():
            p.grad = 1e-3 * torch.randn_like(p)
        groups = param_groups(named, rule, tables)
        options |= dict(mars_type=rule, lr=1e-4, max_norm=1.0, compile=True)
        self._log_time = options["log_time"] = log_time
        self.optimizer = MARS(groups, **options)
        self.params = list(named.values())
        self.step, self.num_steps = 0, num_steps

    def __call__(self) -> None:
        """Take one step, after every hyperparameter has moved: lr up, then down."""
        progress = (self.step + 1) / self.num_steps
        factor = min(10 * progress, 0.55 * (1 + math.cos(math.pi * progress)))
        moved = dict(
            lr=1e-4 * factor,
            betas=(0.9 + 0.05 * factor, 0.98 + 0.01 * factor),
            gamma=0.025 * factor,
            weight_decay=0.1 * factor,
            clip=1.0 + factor,
        )
        if self._log_time is not None:
            moved["log_time"] = self._log_time * (1 + factor)
        for group in self.optimizer.param_groups:
            # another kind of value would change the formulas
            group.update({k: v for k, v in moved.items() if group[k] is not None})
        self.optimizer.max_norm = 1.0 + factor
        self.optimizer.step()
        self.step += 1
