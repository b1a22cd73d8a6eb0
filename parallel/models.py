"""Models that are planned by name: their parameters, and the FLOPs of a token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from marsopt import REGISTRY
from marsopt.profiling import gpt2
from marsopt.rules.registry import canonical

from .forecast import Job

CORRECTIONS = ("exact", "transport")  # at the end of a rule's name
RULES = (  # that are compared
    *("adamw", "muon", "mars-adamw", "mars-adamw-exact", "mars-adamw-transport"),
    *("mars-m", "mars-m-transport"),
)


def num_flops_per_token(
    num_multiplied: int, num_layers: int, width: int, seq_len: int
) -> int:
    """Return the FLOPs a token, forward and backward: 6 per weight that is multiplied
    with, and causal attention (PaLM, arXiv 2204.02311, appendix B).
    """
    return 6 * (num_multiplied + num_layers * width * seq_len)


@dataclass(frozen=True)
class Model:
    """A transformer, and how its authors trained it.

    Args:
        shapes: of all parameters, by name.
        num_layers, width: of its blocks, for the FLOPs of attention.
        looked_up: embeddings that nothing is multiplied with.
        beside: embeddings and head, which AdamW moves beside a rule of matrices.
        seq_len: tokens of a sequence.
        tokens: of a step.
    """

    shapes: Mapping[str, tuple[int, ...]]
    num_layers: int
    width: int
    looked_up: tuple[str, ...]
    beside: tuple[str, ...]
    seq_len: int
    tokens: int

    @property
    def num_params(self) -> int:
        """Return the number of all parameters."""
        return sum(map(math.prod, self.shapes.values()))

    @property
    def num_flops_per_token(self) -> int:
        """Return the FLOPs of a token."""
        looked_up = sum(math.prod(self.shapes[name]) for name in self.looked_up)
        multiplied = self.num_params - looked_up
        sizes = self.num_layers, self.width, self.seq_len
        return num_flops_per_token(multiplied, *sizes)


def llama_shapes(
    num_layers: int, width: int, inner: int, vocab_size: int = 32_000
) -> dict[str, tuple[int, ...]]:
    """Return LLaMA's parameters (Touvron et al., arXiv 2302.13971, section 2): no
    biases, RMSNorm, SwiGLU, a head of its own, and as many heads of keys as of queries.
    """
    block = {
        "attn_norm": (width,),
        **dict.fromkeys(("q", "k", "v", "attn_out"), (width, width)),
        "mlp_norm": (width,),
        **dict.fromkeys(("gate", "up"), (inner, width)),
        "down": (width, inner),
    }
    blocks = {
        f"{i}.{n}": shape for i in range(num_layers) for n, shape in block.items()
    }
    ends = dict.fromkeys(("embedding", "head"), (vocab_size, width))
    return {**ends, **blocks, "norm": (width,)}


def _gpt2(name: str) -> Model:
    """As the MARS authors train it: 480 sequences a step (arXiv 2411.10438)."""
    num_layers, width = gpt2.MODELS[name]
    return Model(
        shapes=gpt2.shapes(num_layers, width),
        num_layers=num_layers,
        width=width,
        looked_up=("wpe",),  # wte is the head, too
        beside=gpt2.EMBEDDINGS,
        seq_len=gpt2.NUM_POSITIONS,
        tokens=480 * gpt2.NUM_POSITIONS,
    )


def _llama(num_layers: int, width: int, inner: int, seq_len: int) -> Model:
    return Model(
        shapes=llama_shapes(num_layers, width, inner),
        num_layers=num_layers,
        width=width,
        looked_up=("embedding",),
        beside=("embedding", "head"),
        seq_len=seq_len,
        tokens=2**22,  # "4M" in the papers of both LLaMAs
    )


MODELS: dict[str, Model] = {
    **{name: _gpt2(name) for name in gpt2.MODELS},
    # Geng and Liu, OpenLLaMA (2023), config.json of open_llama_3b
    "llama-3b": _llama(26, 3200, 8640, 2048),
    # LLaMA (arXiv 2302.13971, table 2), as Llama 2 (arXiv 2307.09288, table 1), whose
    # sequences these are; inner widths from config.json of Llama-2-7b and 13b
    "llama-7b": _llama(32, 4096, 11_008, 4096),
    "llama-13b": _llama(40, 5120, 13_824, 4096),
}


def jobs(
    model: str, rules: Sequence[str] | None = None, tokens: int | None = None
) -> list[Job]:
    """Return how each of ``rules`` trains a model; AdamW has embeddings and head,
    beside any rule of matrices.

    Args:
        model: a name in ``MODELS``.
        rules: names in ``marsopt.REGISTRY``, also with "-exact" or "-transport"; None =
            ``RULES``.
        tokens: of a step; None = as many as its authors took.

    Raises:
        ValueError: an unknown model or rule.
    """
    if model not in MODELS:
        raise ValueError(
            f"got model {model}, expected one of {', '.join(MODELS)}: choose one"
        )
    chosen, found = MODELS[model], []
    for mars_type, correction in map(_parts, RULES if rules is None else rules):
        found.append(
            Job(
                shapes=chosen.shapes,
                mars_type=mars_type,
                tokens=chosen.tokens if tokens is None else tokens,
                flops_per_token=chosen.num_flops_per_token,
                elementwise=chosen.beside if REGISTRY[mars_type].matrix_only else (),
                options={"correction": correction},
            )
        )
    return found


def _parts(rule: str) -> tuple[str, str]:
    """Return the names of a rule and of its correction."""
    name = canonical(rule)
    mars_type, _, correction = name.rpartition("-")
    if correction not in CORRECTIONS:
        mars_type, correction = name, "approximate"
    found = REGISTRY.get(mars_type)
    if found is None or (correction == "exact" and not found.is_mars):
        raise ValueError(
            f"got rule {rule}, expected one of {', '.join(REGISTRY)}, or with -exact "
            "(of MARS alone) or -transport at its end: choose one"
        )
    return mars_type, correction
