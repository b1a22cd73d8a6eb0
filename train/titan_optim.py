"""MARS and the recipes' schedule as torchtitan's optimizer and scheduler containers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch.distributed.tensor import DTensor

from marsopt import LOCAL, MARS
from parallel import MeshCollectives
from train import schedule
from train.titan import LRSchedulersContainer, OptimizersContainer


class MarsOptimizers(OptimizersContainer):
    """One MARS over the whole model: embeddings in a group without weight decay, as in
    the authors' scripts.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        mars_type: str = "mars-adamw"
        """mars-adamw, mars-lion, mars-shampoo, mars-m, adamw, lion, muon or moonlight.
        """
        lr: float = 3e-3
        """Peak learning rate of matrices."""
        betas: tuple[float, float] = (0.95, 0.99)
        """Decay rates of the moments; rules with one momentum use the first."""
        eps: float = 1e-8
        """Added to the root of the second moment."""
        weight_decay: float = 0.0
        """Decoupled weight decay of the matrices in the blocks."""
        embedding_weight_decay: float = 0.0
        """Weight decay of token and position embeddings."""
        amsgrad: bool = False
        """Divide by the root of the largest second moment so far."""
        gamma: float = 0.025
        """Scale of the variance reduction."""
        exact: bool = False
        """Exact MARS: a second gradient a step, of the next batch at the current
        parameters.
        """
        optimize_1d: bool = False
        """Give LayerNorm weights to the MARS rule too."""
        lr_1d: float = 3e-3
        """Peak learning rate of LayerNorm weights."""
        betas_1d: tuple[float, float] = (0.9, 0.95)
        """Decay rates of their AdamW."""
        weight_decay_1d: float = 0.1
        """Weight decay of their AdamW."""
        clip: float | None = 1.0
        """Threshold of the per-tensor norm of the corrected gradient; None = off."""
        ns_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
        """Working precision of Newton-Schulz."""
        compile: bool | None = None
        """Compile the step: None = where this machine can."""

        def group(self) -> dict:
            """What is MARS's own, per param group."""
            names = (
                "mars_type lr betas eps weight_decay amsgrad gamma optimize_1d clip "
                "lr_1d betas_1d weight_decay_1d"
            )
            return {name: getattr(self, name) for name in names.split()}

    def __init__(self, config: Config, *, model_parts: list[torch.nn.Module]) -> None:
        (model,) = model_parts
        self.model_parts = model_parts
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        embeddings = [
            (name, p) for name, p in named if name.startswith(("wte.", "wpe."))
        ]
        others = [
            (name, p) for name, p in named if not name.startswith(("wte.", "wpe."))
        ]
        mesh = next((p.device_mesh for _, p in named if isinstance(p, DTensor)), None)
        mars = MARS(
            [
                {"params": others},
                {"params": embeddings, "weight_decay": config.embedding_weight_decay},
            ],
            **config.group(),
            is_approx=not config.exact,
            ns_dtype=getattr(torch, config.ns_dtype),
            collectives=LOCAL if mesh is None else MeshCollectives(mesh),
            compile=config.compile,
        )
        self.optimizers = [mars]
        self._post_init([p for _, p in named])

    @property
    def mars(self) -> MARS:
        """The one optimizer."""
        return self.optimizers[0]


class CosineSchedule(LRSchedulersContainer):
    """The recipes' schedule; ``min_lr`` is a learning rate, not a factor."""

    @dataclass(kw_only=True, slots=True)
    class Config(LRSchedulersContainer.Config):
        min_lr: float = 0.0
        """Learning rate of matrices at the end; that of LayerNorm weights follows in
        proportion.
        """

        def build(self, *, optimizers, training_steps):
            mars = optimizers.mars
            factor = partial(
                schedule.cosine,
                warmup=int(self.warmup_steps),
                total=self.total_steps or training_steps,
                floor=self.min_lr / mars.defaults["lr"] if mars.defaults["lr"] else 0.0,
            )
            return CosineSchedule(optimizers, factor)
