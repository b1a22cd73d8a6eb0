"""MARS in torchtitan 0.3.0, beside its AdamW.

    from marsopt.interop.torchtitan import default_mars

    config.optimizer = default_mars(lr=3e-3)

No other file of the library imports torchtitan.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.optim import Optimizer
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

from marsopt import MARS
from marsopt.functional.authors import adamw_values, all_options
from marsopt.models.names import NAMES
from marsopt.parallel.mesh import over_meshes
from marsopt.rules import checks
from marsopt.rules.options import check_names, check_values
from marsopt.rules.registry import named

__all__ = ["MarsOptimizersContainer", "build_mars", "default_mars"]

NAME = "MARS"
# AdamW's parameters beside the rule in default_mars, as marsopt.param_groups tells them
# by name
BESIDE = "|".join(NAMES.values())
REST = ".*"  # the parameters that the rule moves there


def build_mars(groups: Iterable[dict[str, Any]], **options: Any) -> MARS:
    """Return MARS over torchtitan's param groups.

    Args:
        groups: torchtitan's, from ``ParamGroupConfig``. They may have options of the
            whole optimizer, with equal values.
        options: arguments of ``MARS``; dtypes by name, too.

    Raises:
        ValueError: two groups, or a group and ``options``, disagree about an option of
            the whole optimizer; a dtype that torch does not have.
    """
    param_groups, options = [], _from_text(options)
    for group in groups:
        kept = {k: v for k, v in group.items() if k not in ("fused", "foreach")}
        kept["params"] = list(kept["params"])  # MARS would find a generator used up
        param_groups.append(_from_text(kept))
    for name in _whole():
        values = [options[name]] if name in options else []
        values += [group.pop(name) for group in param_groups if name in group]
        if any(value != values[0] for value in values):
            raise ValueError(
                f"got {name}={values} for {NAME} and its param groups, expected one "
                "value: it belongs to the whole optimizer; give it once, in "
                f'optimizer_factory_kwargs_by_name={{"{NAME}": ...}}'
            )
        options |= {name: values[0]} if values else {}
    entries = (p for group in param_groups for p in group["params"])
    params = (p[1] if isinstance(p, tuple) else p for p in entries)
    return MARS(param_groups, collectives=over_meshes(params), **options)


def _whole() -> list[str]:
    """Return the options that are one value for MARS: no param group has its own."""
    known = all_options().values()
    return [line.name for line in known if line.is_whole] + ["nonfinite", "compile"]


def _from_text(options: dict[str, Any]) -> dict[str, Any]:
    """Return ``options`` with dtypes in place of their names."""
    resolved = dict(options)
    for line in all_options().values():
        name = options.get(line.name)
        if line.is_dtype and isinstance(name, str):
            resolved[line.name] = getattr(torch, name, None)
            if not isinstance(resolved[line.name], torch.dtype):
                raise ValueError(
                    f"got {line.name}={name!r}, expected the name of a dtype: write "
                    '"float32" or "bfloat16"'
                )
    return resolved


class MarsOptimizersContainer(OptimizersContainer):
    """torchtitan's container, which also knows MARS by name.

        ParamGroupConfig(
            pattern=r"layers\\..*weight$",
            optimizer_name="MARS",
            optimizer_kwargs=dict(mars_type="moonlight", lr=6e-3),
        )

    ``optimizer_kwargs`` are arguments of ``MARS``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    def __init__(
        self,
        config: OptimizersContainer.Config,
        *,
        model_parts: list[nn.Module],
        **kwargs: Any,
    ) -> None:
        _check_patterns(config.param_groups, model_parts)
        super().__init__(config, model_parts=model_parts, **kwargs)

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., Optimizer]:
        if name == NAME:
            return build_mars
        return OptimizersContainer._resolve_optimizer_factory(name)

    @staticmethod
    def _build_param_groups(
        model: nn.Module,
        param_group_configs: Sequence[ParamGroupConfig],
        impl_kwargs: dict[str, Any],
    ) -> list[dict[str, Any]]:
        """As torchtitan's, but a part of the model need not have every group."""
        counts = _num_matched(param_group_configs, [model])
        pairs = zip(param_group_configs, counts, strict=True)
        present = [config for config, count in pairs if count]
        return OptimizersContainer._build_param_groups(model, present, impl_kwargs)


def default_mars(
    lr: float = 3e-3, mars_type: str = "moonlight", **options: Any
) -> MarsOptimizersContainer.Config:
    """Return a configuration for torchtitan's language models, as ``default_adamw``:
    ``mars_type`` moves the matrices of the layers, expert weights in batches; MARS's
    own AdamW, with this lr too, moves embeddings, output head, routers and vectors,
    without weight decay unless ``weight_decay_1d`` is given. (Vectors in the layers
    take the rule itself with "adamw", "nadamw" and "lion", at these numbers.)

    Args:
        lr: learning rate of everything; ``lr_1d``, if given, is AdamW's.
        mars_type: a name in ``marsopt.REGISTRY``.
        options: other arguments of ``MARS``, dtypes by name, too.

    Raises:
        TypeError: an option that ``MARS`` does not have.
    """
    check_names(
        options, {**all_options(), **signature(MARS).parameters}, "marsopt.MARS"
    )
    defaults: dict[str, Any] = dict(lr_1d=lr, weight_decay_1d=0.0)
    if options.get("log_time") is None:  # which has betas of its own
        defaults["betas_1d"] = (0.9, 0.95)
    options = {k: v for k, v in options.items() if k not in defaults or v is not None}
    options, whole = defaults | options, _whole()
    per_group = {k: v for k, v in options.items() if k not in whole}
    layers = dict(mars_type=mars_type, lr=lr, matrices="batched") | per_group
    row = named(mars_type)
    given = {k: v for k, v in layers.items() if v is not None}
    check_values(all_options(), given)
    beside = adamw_values(row.group_defaults(given.get("log_time")) | given)
    of_whole = {k: v for k, v in options.items() if k in whole} | {"lr": lr}
    return MarsOptimizersContainer.Config(
        param_groups=[
            ParamGroupConfig(
                pattern=pattern, optimizer_name=NAME, optimizer_kwargs=kwargs
            )
            for pattern, kwargs in ((BESIDE, beside), (REST, layers))
        ],
        optimizer_factory_kwargs_by_name={NAME: of_whole},
    )


def _num_matched(
    configs: Sequence[ParamGroupConfig],
    model_parts: Iterable[nn.Module],
    *,
    frozen: bool = False,
) -> list[int]:
    """Return how many parameters each group gets (if ``frozen``, those too that it
    would get); the first match takes a parameter.
    """
    counts = [0] * len(configs)
    for part in model_parts:
        for name, p in part.named_parameters():
            hits = (i for i, c in enumerate(configs) if re.search(c.pattern, name))
            counted = frozen or p.requires_grad
            if counted and (first := next(hits, None)) is not None:
                counts[first] += 1
    return counts


def _check_patterns(
    configs: Sequence[ParamGroupConfig], model_parts: Sequence[nn.Module]
) -> None:
    """Check that every group gets a parameter, which may be frozen, in some part, on
    some rank; of ``default_mars``, where no user wrote the patterns, that any group
    does.

    Raises:
        ValueError: one gets none, on every rank; or nothing is trained; or a pattern is
            no regular expression.
    """
    for config in configs:
        checks.regular_expression("a param group", config.pattern)
    devices = (p.device for part in model_parts for p in part.parameters())
    accelerator = torch.accelerator.current_accelerator()
    device = next(devices, accelerator or torch.device("cpu"))
    with unset_fake_temporarily():  # real numbers for a model without memory, too
        counts = torch.tensor(
            [
                _num_matched(configs, model_parts),
                _num_matched(configs, model_parts, frozen=True),
            ],
            device=device,
        )
        if dist.is_initialized():
            dist.all_reduce(counts)
        trained, matched = counts.tolist()
    if not any(trained):
        raise ValueError(
            f"got no parameter that requires a gradient for {NAME} and the optimizers "
            "beside it, expected one at least: set requires_grad_() before the "
            "optimizer is built"
        )
    for config, count in zip(configs, matched, strict=True):
        if not count and config.pattern not in (BESIDE, REST):
            raise ValueError(
                f"got the pattern {config.pattern!r}, for which no parameter is left "
                "(the first match takes it), expected one at least: correct it, move "
                "it up, or leave it out"
            )
