"""A model and its rule, and models by name."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from marsopt import REGISTRY
from marsopt.parallel.layout import Matrix
from marsopt.profiling import gpt2
from marsopt.rules.registry import canonical

EXACT = "-exact"  # at the end of a rule's name
RULES = ("moonlight", "adamw", "muon", "mars-adamw", "mars-m")  # compared by default


@dataclass(frozen=True)
class Job:
    """A model and the rule that trains it.

    Args:
        shapes: of all parameters, by name.
        mars_type: the rule of matrices.
        elementwise: matrices that AdamW takes, such as embeddings.
        options: more arguments of ``marsopt.mars``.
    """

    shapes: Mapping[str, Sequence[int]]
    mars_type: str
    elementwise: Collection[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_params(self) -> int:
        """Return the number of all parameters."""
        return sum(map(math.prod, self.shapes.values()))

    @property
    def dtype(self) -> torch.dtype:
        """Return the parameters' dtype."""
        bits = self.options.get("master_weight_bits")
        return torch.float32 if bits is None else torch.bfloat16

    @property
    def is_exact(self) -> bool:
        """Return whether MARS corrects by a second gradient."""
        return self.options.get("correction") == "exact"

    @property
    def rule(self) -> str:
        """Return the rule's name, with "-exact" at its end if it corrects exactly."""
        return self.mars_type + EXACT * self.is_exact

    def matrices(self) -> dict[str, Matrix]:
        """Return the matrices that owners take, as FSDP2 cuts them: along rows."""
        return {
            name: Matrix(*shape, dim=0)
            for name, shape in self.shapes.items()
            if len(shape) == 2 and name not in self.elementwise
            if REGISTRY[self.mars_type].matrix_only
        }


class Model(NamedTuple):
    """The shapes of a model's parameters, and the names of embeddings and head, which
    AdamW takes if the rule takes only matrices.
    """

    shapes: Mapping[str, tuple[int, ...]]
    elementwise: tuple[str, ...]


def llama_shapes(
    num_layers: int,
    width: int,
    inner: int,
    vocab_size: int = 32_000,
    kv_width: int | None = None,
) -> dict[str, tuple[int, ...]]:
    """Return LLaMA's parameters (Touvron et al., arXiv 2302.13971, section 2): no
    biases, RMSNorm, SwiGLU, a head apart from the embedding. Keys and values have
    ``kv_width`` rows each if heads of queries share them.
    """
    block = {
        "attn_norm": (width,),
        **dict.fromkeys(("q", "attn_out"), (width, width)),
        **dict.fromkeys(("k", "v"), (kv_width or width, width)),
        "mlp_norm": (width,),
        **dict.fromkeys(("gate", "up"), (inner, width)),
        "down": (width, inner),
    }
    blocks = {
        f"{i}.{n}": shape for i in range(num_layers) for n, shape in block.items()
    }
    ends = dict.fromkeys(("embedding", "head"), (vocab_size, width))
    return {**ends, **blocks, "norm": (width,)}


# Geng and Liu, OpenLLaMA (2023), config.json of open_llama_3b; LLaMA (arXiv 2302.13971,
# table 2), with inner widths from config.json of Llama-2-7b and 13b; Llama 3 (arXiv
# 2407.21783, table 3), 8 heads of keys of width 128
LLAMAS = {
    "llama-3b": llama_shapes(26, 3200, 8640),
    "llama-7b": llama_shapes(32, 4096, 11_008),
    "llama-13b": llama_shapes(40, 5120, 13_824),
    "llama3-8b": llama_shapes(32, 4096, 14_336, vocab_size=128_256, kv_width=1024),
}
MODELS = {
    name: Model(gpt2.shapes(*sizes), gpt2.EMBEDDINGS)
    for name, sizes in gpt2.MODELS.items()
} | {name: Model(shapes, ("embedding", "head")) for name, shapes in LLAMAS.items()}


def jobs(model: str, rules: Sequence[str] = RULES, **formats: Any) -> list[Job]:
    """Return the jobs of training a model by each of ``rules``.

    Args:
        model: a name in ``MODELS``.
        rules: names in ``marsopt.REGISTRY``; those of MARS may end in "-exact".
        formats: arguments of ``marsopt.mars`` that say how tensors are stored.

    Raises:
        ValueError: an unknown model or rule.
    """
    if model not in MODELS:
        raise ValueError(
            f"got model {model}, expected one of {', '.join(MODELS)}: choose one, or "
            "give the shapes of your own to train.forecast (docs/scaling.md)"
        )
    shapes, elementwise = MODELS[model]
    found = []
    for rule in rules:
        name = canonical(rule)
        mars_type = name.removesuffix(EXACT)
        row, is_exact = REGISTRY.get(mars_type), name != mars_type
        if row is None or (is_exact and not row.is_mars):
            raise ValueError(
                f"got rule {rule}, expected one of {', '.join(REGISTRY)}, or a rule of "
                f"MARS with {EXACT} at its end: choose one"
            )
        options = formats | ({"correction": "exact"} if is_exact else {})
        beside = elementwise if row.matrix_only else ()
        found.append(Job(shapes, mars_type, beside, options))
    return found
