"""MARS in torchtitan (0.3.0): a name beside AdamW in the optimizer's param groups.

    from marsopt.parallel.torchtitan import default_mars

    config.optimizer = default_mars(mars_type="mars-m", lr=6e-3)

This file alone imports torchtitan.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer import OPTIMIZER, CheckpointManager
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

from marsopt import LOCAL, MARS

from .collectives import MeshCollectives

NAME = "MARS"
# What a param group may not have of its own: one value for the whole optimizer.
WHOLE = (
    *("correction", "is_approx", "max_norm", "nonfinite", "compile"),
    *("ns_steps", "ns_coefficients", "ns_dtype", "ns_gram", "state_dtype", "h_dtype"),
)
# torchtitan's names of token embeddings, output heads and routers, and Hugging Face's
BESIDE = r"(^|\.)(tok_embeddings|embed_tokens|output|lm_head|router(\.gate)?)\.weight$"


def build_mars(groups: Iterable[dict[str, Any]], **options: Any) -> MARS:
    """Return MARS over torchtitan's param groups.

    Args:
        groups: what torchtitan makes of ``ParamGroupConfig``. Options of the whole
            optimizer may stand in them, where all that name one agree.
        options: arguments of ``MARS``; dtypes by name, too.

    Raises:
        ValueError: two groups disagree about an option of the whole optimizer.
    """
    found = [
        {k: v for k, v in g.items() if k not in ("fused", "foreach")} for g in groups
    ]
    for name in WHOLE:
        given = [group.pop(name) for group in found if name in group]
        if any(value != given[0] for value in given):
            raise ValueError(
                f"got {name}={given} in param groups of {NAME}, expected one value: it "
                "belongs to the whole optimizer, give it in "
                f'optimizer_factory_kwargs_by_name={{"{NAME}": ...}}'
            )
        options |= {name: given[0]} if given else {}
    for name in ("ns_dtype", "state_dtype", "h_dtype"):
        if isinstance(options.get(name), str):
            options[name] = getattr(torch, options[name])
    meshes = (
        p.device_mesh for g in found for p in g["params"] if isinstance(p, DTensor)
    )
    mesh = next(meshes, None)
    return MARS(
        found, collectives=LOCAL if mesh is None else MeshCollectives(mesh), **options
    )


class MarsOptimizersContainer(OptimizersContainer):
    """torchtitan's container, which also knows ``optimizer_name="MARS"``:

        ParamGroupConfig(
            pattern=r"layers\\..*weight$",
            optimizer_name="MARS",
            optimizer_kwargs=dict(mars_type="mars-m", lr=6e-3),
        )

    With transport, forward passes of a module in eval mode see the trained parameters,
    as torchtitan's validator runs them; ``MarsCheckpointManager`` saves those.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    def __init__(
        self, config: OptimizersContainer.Config, *, model_parts: list[nn.Module]
    ) -> None:
        _check_patterns(config.param_groups, model_parts)
        super().__init__(config, model_parts=model_parts)
        if any("train_mode" in mars.param_groups[0] for mars in self.every_mars):
            for part in model_parts:  # before FSDP gathers the parameters
                part.register_forward_pre_hook(self._follow, prepend=True)

    @staticmethod
    def _resolve_optimizer_factory(name: str):
        if name == NAME:
            return build_mars
        return OptimizersContainer._resolve_optimizer_factory(name)

    @staticmethod
    def _build_param_groups(model, param_group_configs, impl_kwargs):
        """As torchtitan's, but a part of the model need not have every group."""
        counts = _num_matched(param_group_configs, [model])
        pairs = zip(param_group_configs, counts, strict=True)
        present = [config for config, count in pairs if count]
        return OptimizersContainer._build_param_groups(model, present, impl_kwargs)

    @property
    def every_mars(self) -> list[MARS]:
        """Return those that are MARS: one per part of the model."""
        return [o for o in self.optimizers if isinstance(o, MARS)]

    def _follow(self, part: nn.Module, args: tuple) -> None:
        for mars in self.every_mars:
            mars.train() if part.training else mars.eval()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Let the model hold what is trained, not the points ahead of it, meanwhile."""
        for mars in self.every_mars:
            mars.eval()
        try:
            yield
        finally:
            for mars in self.every_mars:
                mars.train()


class MarsCheckpointManager(CheckpointManager):
    """torchtitan's manager of checkpoints; with transport the model in them is the one
    that is trained, and the state belongs to it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        pass

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save as torchtitan does, in eval mode until all is staged."""
        if not self._should_save(curr_step, last_step):
            return False
        with self.states[OPTIMIZER].evaluating():
            saved = super().save(curr_step, last_step)
            self.maybe_wait_for_staging()
        return saved


def default_mars(
    lr: float = 3e-3, mars_type: str = "mars-adamw", **options: Any
) -> MarsOptimizersContainer.Config:
    """Return a configuration for torchtitan's language models, as ``default_adamw``:
    ``mars_type`` moves the matrices of the layers, expert weights in batches; AdamW
    (MARS's own, with lr) moves embeddings, output head, routers and vectors.

    Args:
        lr: learning rate.
        mars_type: a name in ``marsopt.REGISTRY``.
        options: other arguments of ``MARS``.
    """
    betas = options.get("betas_1d", (0.9, 0.95))
    beside = dict(mars_type="adamw", lr=lr, betas=betas, weight_decay=0.0)
    layers = dict(mars_type=mars_type, lr=lr, matrices="batched")
    per_group = {k: v for k, v in options.items() if k not in WHOLE}
    return MarsOptimizersContainer.Config(
        param_groups=[
            ParamGroupConfig(
                pattern=BESIDE, optimizer_name=NAME, optimizer_kwargs=beside
            ),
            ParamGroupConfig(
                pattern=".*", optimizer_name=NAME, optimizer_kwargs=layers | per_group
            ),
        ],
        optimizer_factory_kwargs_by_name={
            NAME: {k: v for k, v in options.items() if k in WHOLE} | {"lr": lr}
        },
    )


def _num_matched(
    configs: Sequence[ParamGroupConfig], model_parts: Iterable[nn.Module]
) -> list[int]:
    """Return how many parameters each group gets; the first match takes one."""
    counts = [0] * len(configs)
    for part in model_parts:
        for name, p in part.named_parameters():
            hits = (i for i, c in enumerate(configs) if re.search(c.pattern, name))
            if p.requires_grad and (first := next(hits, None)) is not None:
                counts[first] += 1
    return counts


def _check_patterns(
    configs: Sequence[ParamGroupConfig], model_parts: Sequence[nn.Module]
) -> None:
    """Check that every group gets a parameter in some part, on some rank.

    Raises:
        ValueError: one gets none, on every rank.
    """
    device = next(p.device for part in model_parts for p in part.parameters())
    with unset_fake_temporarily():  # real numbers for a model without memory, too
        counts = torch.tensor(_num_matched(configs, model_parts), device=device)
        if dist.is_initialized():
            dist.all_reduce(counts)
        found = counts.tolist()
    for config, count in zip(configs, found, strict=True):
        if not count:
            raise ValueError(
                f"got the pattern {config.pattern!r}, which is the first to match no "
                "parameter of any model part, expected one at least: correct it, or "
                "leave it out"
            )
