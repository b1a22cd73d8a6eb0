"""Optimizers by the recipes of a study: MARS's rules, torch's AdamW and Muon."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Muon, Optimizer

from marsopt import MARS, REGISTRY, param_groups
from marsopt.rules.registry import canonical

MAX_NORM = 1.0
TORCH, TORCH_MUON = "torch-adamw", "torch-muon"
# of what is no option of an optimizer
GROUPED = ("weight_decay", "weight_decay_1d", "convolutions", "betas_1d")
GROUPED += ("nesterov_1d", "log_time")
BUILD = ("rule", "lr", "lr_1d_ratio", "beta1", "beta2", "one_rate", *GROUPED)
LOOP = ("warmup", "batch", "steps")  # of a run, in place of its setting's
STARTS = ("weights", "perturb")  # dtype of the weights; whether their last bits change


def unspelled(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe with ``log_time`` and caps in place of the decays that stores
    spell: {"log_time": 10, "cap": 0.98} is min(0.98, t / (t + 10)); 0.999 is the cap of
    a decay without one, which no run of a store reaches.

    Raises:
        ValueError: another spelling, or decays of several ``log_time``.
    """
    found: list[float] = []

    def cap_of(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return tuple(map(cap_of, value))
        if not isinstance(value, Mapping):
            return value
        if not {"log_time"} <= value.keys() <= {"log_time", "cap"}:
            raise ValueError(
                f'got {dict(value)}, expected "log_time" in it, and "cap" at most '
                'beside it: spell {"log_time": 10}'
            )
        found.append(value["log_time"])
        return value.get("cap", 0.999)

    values = {key: cap_of(value) for key, value in recipe.items()}
    if len(set(found)) > 1:
        raise ValueError(f"got log_time={found} in one recipe, expected one value")
    return values | ({"log_time": found[0]} if found else {})


class Wrapper:
    """An optimizer around another one.

    Args:
        inner: the other one.
    """

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> list[dict]:
        """Return those of the inner one."""
        return self.inner.param_groups

    @property
    def params(self) -> list[torch.Tensor]:
        """Return all parameters."""
        return [p for group in self.param_groups for p in group["params"]]

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self.inner.zero_grad()


class Clipped(Wrapper):
    """An optimizer without a global clip of its own, after ``clip_grad_norm_``."""

    def step(self) -> None:
        """Clip, and take a step."""
        clip_grad_norm_(self.params, MAX_NORM)
        self.inner.step()


class Both(Wrapper):
    """Two of torch's optimizers, each of its own parameters, after
    ``clip_grad_norm_``.
    """

    def __init__(self, *every: Optimizer) -> None:
        super().__init__(every[0])
        self._every = every

    @property
    def param_groups(self) -> list[dict]:
        """Return those of both."""
        return [group for optimizer in self._every for group in optimizer.param_groups]

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for optimizer in self._every:
            optimizer.zero_grad()

    def step(self) -> None:
        """Clip the norm of all gradients, and take the steps."""
        clip_grad_norm_(self.params, MAX_NORM)
        for optimizer in self._every:
            optimizer.step()


def build(
    model: nn.Module, recipe: Mapping[str, Any], *, steps: int, compile: bool
) -> MARS | Wrapper:
    """Return the optimizer of a model.

    Args:
        model: to train.
        recipe: "rule", a name of ``marsopt.REGISTRY``, "torch-adamw", or "torch-muon"
            with torch's AdamW beside it; "lr"; "beta1" and "beta2", both or none;
            "weight_decay"; "weight_decay_1d" and "lr_1d_ratio", decay and share of the
            learning rate of what AdamW moves beside a rule; "betas_1d" and
            "nesterov_1d" of the same; "convolutions", whether that rule takes kernels;
            "one_rate", whether all tensors are moved alike instead of by
            ``marsopt.param_groups``; LOOP and STARTS, which the loop reads; other
            options of MARS, of which dtypes are given by name. ``unspelled`` says how
            JSON spells a decay that grows.
        steps: of the run.
        compile: whether MARS is compiled.

    Raises:
        TypeError, ValueError: a recipe that this is not.
    """
    recipe = unspelled(recipe)
    own = {
        key: value
        for key, value in recipe.items()
        if key not in (*BUILD, *LOOP, *STARTS)
    }
    if "beta1" in recipe:
        own["betas"] = recipe["beta1"], recipe["beta2"]
    if "state_dtype" in own:
        own["state_dtype"] = getattr(torch, own["state_dtype"])
    return _built(model, recipe, own, compile)


def _built(
    model: nn.Module, recipe: Mapping[str, Any], own: dict[str, Any], compile: bool
) -> MARS | Wrapper:
    rule, given = canonical(recipe["rule"]), dict(lr=recipe["lr"])
    given |= {key: recipe[key] for key in GROUPED if key in recipe}
    if "lr_1d_ratio" in recipe:
        given["lr_1d"] = recipe["lr"] * recipe["lr_1d_ratio"]
    if rule == TORCH:
        groups = param_groups(model, "adamw", **given)
        return Clipped(AdamW(groups, fused=True, **own))
    if rule == TORCH_MUON:
        return _torch_muon(param_groups(model, "moonlight", **given), **own)
    if rule not in REGISTRY:
        raise ValueError(
            f"got rule={recipe['rule']!r}, expected {TORCH}, {TORCH_MUON} or one of "
            f"{sorted(REGISTRY)}: choose one"
        )
    groups = param_groups(model, rule, **given)
    if recipe.get("one_rate"):
        groups = [dict(params=[*model.parameters()], **given)]
        own["optimize_1d"] = REGISTRY[rule].is_mars
    own = dict(max_norm=MAX_NORM) | own
    return MARS(groups, mars_type=rule, compile=compile, **own)


def _torch_muon(groups: list[dict], betas: tuple[float, float]) -> Both:
    """Return torch's Muon at AdamW's step size, and AdamW beside it as param_groups has
    it, from Moonlight's groups.
    """
    matrices, *beside = (
        {key: group[key] for key in ("params", "lr", "weight_decay")}
        for group in groups
    )
    muon = Muon([matrices], momentum=betas[0], adjust_lr_fn="match_rms_adamw")
    return Both(muon, AdamW(beside, betas=(0.9, betas[1]), fused=True))
