"""What is planned: a model and how it is trained, who moves which of its tensors and
which of them go to owners; and models that are planned by name.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

import marsopt
from marsopt import REGISTRY
from marsopt.functional.routing import algorithm_of, of_adamw
from marsopt.parallel.placement import shard_sizes
from marsopt.parallel.planner import Matrix
from marsopt.profiling import gpt2
from marsopt.rules.algorithm import Algorithm
from marsopt.rules.preconditioner import MatrixCost
from marsopt.rules.registry import canonical
from train.forecast.activations import Blocks, MicroBatch

FULL = 4  # bytes of a float32: parameters, gradients, momenta
EXACT = "-exact"  # at the end of a rule's name
RULES = ("adamw", "muon", "mars-adamw", "mars-adamw-exact", "mars-m")  # compared


@dataclass(frozen=True)
class Alike:
    """Tensors of one shape that one algorithm moves together."""

    algorithm: Algorithm
    shape: torch.Size
    names: tuple[str, ...]

    def local(self, rank: int, num_ranks: int) -> torch.Size:
        """Return the shape of one rank's piece of a tensor, as Shard(0) cuts."""
        first, *rest = self.shape
        return torch.Size([shard_sizes(first, num_ranks)[rank], *rest])


@dataclass(frozen=True)
class Job:
    """A model and how it is trained."""

    shapes: Mapping[str, Sequence[int]]  # of all parameters, by name
    mars_type: str  # the rule of its matrices
    tokens: int  # per step, over all ranks
    flops_per_token: int  # of forward and backward
    elementwise: Collection[str] = ()  # matrices that AdamW takes all the same
    # arguments of ``marsopt.mars``: correction, clip and amsgrad say what is kept
    options: Mapping[str, Any] = field(default_factory=dict)
    micro_batch: MicroBatch | None = None  # for the activations of one GPU

    @property
    def num_params(self) -> int:
        """Return the number of all parameters."""
        return sum(math.prod(s) for s in self.shapes.values())

    @property
    def rule(self) -> str:
        """Return the rule's name, with "-exact" at its end if it corrects exactly."""
        is_exact = self.options.get("correction") == "exact"
        return self.mars_type + EXACT * is_exact

    @property
    def num_gradients(self) -> int:
        """Return how many gradients a step wants: exact MARS two."""
        return 1 + any(stack.algorithm.h_from == "caller" for stack in self.alike)

    @cached_property
    def alike(self) -> list[Alike]:
        """Return who moves what, routed and stacked as ``MARS`` does."""
        options = {**self.options, "mars_type": self.mars_type}
        rule, beside = marsopt.mars(**options), algorithm_of(of_adamw(options))
        rest = rule.matrix if rule.rest is None else rule.rest
        found: dict[tuple[Algorithm, torch.Size], list[str]] = {}
        for name, shape in self.shapes.items():
            size = torch.Size(shape)
            mover = rule.matrix if rule.matrix.matrices.takes(size) else rest
            mover = beside if name in self.elementwise else mover
            found.setdefault((mover, size), []).append(name)
        return [Alike(*key, tuple(names)) for key, names in found.items()]

    @property
    def cost(self) -> MatrixCost:
        """Return that of whole matrices, on GPUs; of Newton-Schulz where there are
        none.
        """
        found = [s.algorithm for s in self.alike if s.algorithm.matrix_only]
        costs = [algorithm.matrix_preconditioner.cost for algorithm in found]
        return (costs[0] if costs else marsopt.NewtonSchulz()).on("meta")

    def matrices(self) -> dict[str, Matrix]:
        """Return the matrices that owners take, as FSDP2 cuts them: along rows.

        Raises:
            ValueError: a tensor that is made of several matrices.
        """
        found = {}
        for stack in self.alike:
            if not stack.algorithm.matrix_only:
                continue
            if stack.algorithm.matrices.shapes_in(stack.shape) != [(1, stack.shape)]:
                raise ValueError(
                    f"got {stack.names[0]} of shape {tuple(stack.shape)}, which is "
                    "made of several matrices, expected tensors that are one each: "
                    'plan with matrices="2d" and without splits'
                )
            rows, cols = stack.shape
            matrix = Matrix(rows, cols, 0)
            found.update(dict.fromkeys(stack.names, matrix))
        return found


# ---- by name -------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A transformer, and how its authors trained it.

    Args:
        shapes: of all parameters, by name.
        blocks: for activations, and the FLOPs of attention.
        looked_up: embeddings that nothing is multiplied with.
        beside: embeddings and head, which AdamW moves beside a rule of matrices.
        seq_len: tokens of a sequence.
        tokens: of a step.
    """

    shapes: Mapping[str, tuple[int, ...]]
    blocks: Blocks
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
        """Return the FLOPs of a token, forward and backward: 6 per weight that is
        multiplied with, and causal attention (PaLM, arXiv 2204.02311, appendix B).
        """
        looked_up = sum(math.prod(self.shapes[name]) for name in self.looked_up)
        attention = self.blocks.num_layers * self.blocks.width * self.seq_len
        return 6 * (self.num_params - looked_up + attention)


def llama_shapes(
    num_layers: int,
    width: int,
    inner: int,
    vocab_size: int = 32_000,
    kv_width: int | None = None,
) -> dict[str, tuple[int, ...]]:
    """Return LLaMA's parameters (Touvron et al., arXiv 2302.13971, section 2): no
    biases, RMSNorm, SwiGLU, an output head apart from the embedding; ``kv_width`` rows
    of keys and of values, where several heads of queries share one of these.
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


def _gpt2(name: str) -> Model:
    """As the MARS authors train it: 480 sequences a step (arXiv 2411.10438)."""
    num_layers, width = gpt2.MODELS[name]
    return Model(
        shapes=gpt2.shapes(num_layers, width),
        blocks=Blocks.gpt2(num_layers, width, gpt2.VOCAB_SIZE, scaled=True),
        looked_up=("wpe",),  # wte is the head, too
        beside=gpt2.EMBEDDINGS,
        seq_len=gpt2.NUM_POSITIONS,
        tokens=480 * gpt2.NUM_POSITIONS,
    )


def _llama(
    num_layers: int,
    width: int,
    inner: int,
    seq_len: int,
    vocab_size: int = 32_000,
    kv_width: int | None = None,
) -> Model:
    sizes = num_layers, width, inner, vocab_size, kv_width or width
    return Model(
        shapes=llama_shapes(*sizes),
        blocks=Blocks.llama(*sizes),
        looked_up=("embedding",),
        beside=("embedding", "head"),
        seq_len=seq_len,
        tokens=2**22,  # "4M" in the papers of all three; Llama 3's batch grows later
    )


MODELS: dict[str, Model] = {
    **{name: _gpt2(name) for name in gpt2.MODELS},
    # Geng and Liu, OpenLLaMA (2023), config.json of open_llama_3b
    "llama-3b": _llama(26, 3200, 8640, 2048),
    # LLaMA (arXiv 2302.13971, table 2), as Llama 2 (arXiv 2307.09288, table 1), whose
    # sequences these are; inner widths from config.json of Llama-2-7b and 13b
    "llama-7b": _llama(32, 4096, 11_008, 4096),
    "llama-13b": _llama(40, 5120, 13_824, 4096),
    # Llama 3 (arXiv 2407.21783, table 3), 8 heads of keys of width 128
    "llama3-8b": _llama(32, 4096, 14_336, 8192, vocab_size=128_256, kv_width=1024),
}


def jobs(
    model: str, rules: Sequence[str] | None = None, tokens: int | None = None
) -> list[Job]:
    """Return how each of ``rules`` trains a model; AdamW has embeddings and head,
    beside any rule of matrices.

    Args:
        model: a name in ``MODELS``.
        rules: names in ``marsopt.REGISTRY``, of MARS also with "-exact"; None =
            ``RULES``.
        tokens: of a step; None = as many as its authors took.

    Raises:
        ValueError: an unknown model or rule.
    """
    if model not in MODELS:
        raise ValueError(
            f"got model {model}, expected one of {', '.join(MODELS)}: choose one, or "
            "give the shapes of your own to train.forecast (docs/scaling.md)"
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
                micro_batch=MicroBatch(chosen.blocks, 1, chosen.seq_len),
            )
        )
    return found


def _parts(rule: str) -> tuple[str, str]:
    """Return the names of a rule and of its correction."""
    name = canonical(rule)
    mars_type = name.removesuffix(EXACT)
    is_exact, row = mars_type != name, REGISTRY.get(mars_type)
    if row is None or (is_exact and not row.is_mars):
        raise ValueError(
            f"got rule {rule}, expected one of {', '.join(REGISTRY)}, or one of MARS "
            f"with {EXACT} at its end: choose one"
        )
    return mars_type, "exact" if is_exact else "approximate"
