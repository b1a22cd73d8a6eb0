"""Optimizers by the recipes of a study: MARS's rules, torch's AdamW, and what others do
with a trajectory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Muon

from marsopt import MARS, REGISTRY, LogTime, param_groups
from marsopt.rules.correction import scale as mars_scale
from marsopt.rules.registry import canonical
from research.compare.neighbours import (
    ADANA,
    GPA,
    MONA,
    SNOO,
    EMANesterov,
    FallingWeight,
    LogTimeDecay,
    NearestState,
    QHAdamW,
    TwoAverages,
    Wrapper,
)

MAX_NORM = 1.0
TORCH, QH, TWO_AVERAGES = "torch-adamw", "qhadamw", "two-averages"
TORCH_MUON = "torch-muon"
ADANAS = {  # extra momentum, and the share of the run's steps after which decay falls
    "adana": (0.0, 0.0),
    "adana-code": (1.0, 0.1),
}
# JSON's spelling of a value that knows its step, by the name of its first argument:
# {"log_time": 10, "cap": 0.98} is LogTime(delta=10, cap=0.98)
SPELLED = {
    "log_time": (LogTime, "delta"),
    "falling_weight": (FallingWeight, "kappa"),
}
# of what is no option of an optimizer
GROUPED = ("weight_decay", "weight_decay_1d", "convolutions", "betas_1d", "nesterov_1d")
BUILD = ("rule", "lr", "lr_1d_ratio", "beta1", "beta2", "one_rate", "beside", *GROUPED)
LOOP = ("gamma_follows_rate", "warmup")
EVERY = 20  # inner steps of one of SNOO's


def value_of(spelled: Any) -> Any:
    """Return the value of a hyperparameter that JSON spells, alone or in a list.

    Raises:
        ValueError: a spelling that SPELLED does not have.
    """
    if isinstance(spelled, list | tuple):
        return tuple(map(value_of, spelled))
    if not isinstance(spelled, Mapping):
        return spelled
    names = [name for name in SPELLED if name in spelled]
    if len(names) != 1:
        raise ValueError(
            f"got {dict(spelled)}, expected one of {', '.join(SPELLED)} in it: spell "
            'a decay {"log_time": 10}, a weight {"falling_weight": 0.85}'
        )
    made, first = SPELLED[names[0]]
    options = {first if k == names[0] else k: v for k, v in spelled.items()}
    return made(**options)


class Clipped(Wrapper):
    """An optimizer without a global clip of its own, after ``clip_grad_norm_``."""

    def step(self) -> None:
        """Clip, and take a step."""
        clip_grad_norm_(self.params, MAX_NORM)
        self.inner.step()


class Both(Wrapper):
    """Two of torch's optimizers, each of its own parameters."""

    def __init__(self, *every: torch.optim.Optimizer) -> None:
        super().__init__(every[0])
        self._every = every
        self.params = [p for group in self.param_groups for p in group["params"]]

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
        recipe: "rule", a name of ``marsopt.REGISTRY``, "torch-adamw", "torch-muon"
            (torch's AdamW beside it), "qhadamw" (with "nu1"), "two-averages" (with
            "weight" and "age_ratio"), "adana" (ADANA by its paper) or "adana-code" (by its authors' code); "lr"; "beta1" and
            "beta2", both or none; "weight_decay"; "weight_decay_1d" and "lr_1d_ratio",
            decay and share of the rate of what AdamW moves beside a rule;
            "betas_1d" and "nesterov_1d" of the same; "convolutions", whether that rule
            takes kernels; "one_rate",
            whether all tensors are moved alike instead of by ``marsopt.param_groups``;
            "beside", the rule of what those give to AdamW; "ema_nesterov", the scale of
            that wrapper, or "snoo", the outer momentum of that one, whose outer rate is
            one minus it; "gpa", beta1 inside that wrapper, whose mu_x is then "beta1"
            and whose mu_y one minus "gamma"; "mona", the decay of that wrapper, which
            corrects what the rule moves by MARS's scale of "beta1" and "gamma";
            "nearest_state", a dtype by name, of that one; "decay_omega", omega of
            LogTimeDecay, as ADANA's code has it;
            "gamma_follows_rate", and "warmup", the run's instead of the setting's,
            which the loop reads; other options of MARS, of which
            dtypes are given by name. Every value may be one that SPELLED spells.
        steps: of the run.
        compile: whether MARS is compiled.

    Raises:
        TypeError, ValueError: a recipe that this is not.
    """
    recipe = {key: value_of(value) for key, value in recipe.items()}
    own = {key: value for key, value in recipe.items() if key not in (*BUILD, *LOOP)}
    scale, momentum = own.pop("ema_nesterov", None), own.pop("snoo", None)
    inner_beta1, mona_decay = own.pop("gpa", None), own.pop("mona", None)
    if "beta1" in recipe:
        own["betas"] = recipe["beta1"], recipe["beta2"]
    if inner_beta1 is not None:
        own["betas"], gamma = (inner_beta1, recipe["beta2"]), own.pop("gamma")
    if mona_decay is not None:
        k = mars_scale(recipe["beta1"], own.pop("gamma"))
        own["max_norm"] = None  # of the gradient, not of what MONA makes of it
    if "state_dtype" in own:
        own["state_dtype"] = getattr(torch, own["state_dtype"])
    nearest, omega = own.pop("nearest_state", None), own.pop("decay_omega", None)
    if recipe["rule"] in ADANAS:
        return _adana(model, recipe, own, steps)
    made = _built(model, recipe, own, compile)
    if omega is not None:
        return LogTimeDecay(
            made, omega=omega, decay_start=ADANAS["adana-code"][1] * steps
        )
    if inner_beta1 is not None:
        return GPA(made, mu_x=recipe["beta1"], mu_y=1 - gamma)
    if mona_decay is not None:
        rule = canonical(recipe["rule"])
        groups = [g for g in made.param_groups if g["mars_type"] == rule]
        corrected = [p for group in groups for p in group["params"]]
        return Clipped(MONA(made, params=corrected, scale=k, decay=mona_decay))
    if nearest is not None:
        return NearestState(made, getattr(torch, nearest))
    if scale is not None:
        return EMANesterov(made, scale=scale, steps=steps)
    if momentum is not None:
        return SNOO(made, lr=1 - momentum, momentum=momentum, every=EVERY)
    return made


def _adana(
    model: nn.Module, recipe: Mapping[str, Any], own: dict[str, Any], steps: int
) -> Clipped:
    """Return ADANA, which decays hidden matrices alone, as its authors' code."""
    extra, share = ADANAS[recipe["rule"]]
    groups = param_groups(model, "adamw", lr=recipe["lr"], weight_decay=1.0)
    given = dict(lr=recipe["lr"], extra_momentum=extra, decay_start=share * steps)
    return Clipped(ADANA(groups, **given, **own))


def _built(
    model: nn.Module, recipe: Mapping[str, Any], own: dict[str, Any], compile: bool
) -> MARS | Clipped:
    rule, given = canonical(recipe["rule"]), dict(lr=recipe["lr"])
    given |= {key: recipe[key] for key in GROUPED if key in recipe}
    if "lr_1d_ratio" in recipe:
        given["lr_1d"] = recipe["lr"] * recipe["lr_1d_ratio"]
    if rule == TORCH:
        groups = param_groups(model, "adamw", **given)
        return Clipped(AdamW(groups, fused=True, **own))
    if rule == TORCH_MUON:
        matrices, *rest = (
            [dict(params=g["params"], lr=g["lr"], weight_decay=g["weight_decay"])]
            for g in param_groups(model, "moonlight", **given)
        )
        adamw = dict(betas=(0.9, own.pop("betas")[1]), fused=True)
        return Both(
            Muon(matrices, adjust_lr_fn="match_rms_adamw", **own),
            AdamW([group for (group,) in rest], **adamw),
        )
    if rule == QH:
        return Clipped(QHAdamW(model.parameters(), **given, **own))
    if rule == TWO_AVERAGES:
        (fast, beta2), ratio = own.pop("betas"), own.pop("age_ratio")
        betas = (fast, 1 - (1 - fast) / ratio, beta2)
        return Clipped(TwoAverages(model.parameters(), betas=betas, **given, **own))
    if rule not in REGISTRY:
        raise ValueError(
            f"got rule={recipe['rule']!r}, expected {TORCH}, {QH}, {TWO_AVERAGES}, "
            f"{', '.join(ADANAS)} or one of {sorted(REGISTRY)}: choose one"
        )
    groups = param_groups(model, rule, **given)
    if "beside" in recipe:
        for group in groups:
            if group["mars_type"] == "adamw":
                group["mars_type"] = recipe["beside"]
                group.pop("nesterov", None)  # that rule's own
    if recipe.get("one_rate"):
        groups = [dict(params=[*model.parameters()], **given)]
        own["optimize_1d"] = REGISTRY[rule].is_mars
    own = dict(max_norm=MAX_NORM) | own
    return MARS(groups, mars_type=rule, compile=compile, **own)
