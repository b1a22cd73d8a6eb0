"""Methods by name, such as mars-m-transport, with the numbers of the recipes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from configs.published import LR, ONE_RATE, RULES, SIZES, TRANSPORT_GAMMA
from marsopt import MARS, REGISTRY
from marsopt.profiling.gpt2 import EMBEDDINGS
from marsopt.rules.registry import canonical
from train.errors import UserError

MAX_NORM = 1.0
TORCH = "torch-adamw"
GAMMA = 0.025  # the authors', of approximate and exact
DEFAULT = (
    "adamw",
    "muon",
    "moonlight",
    "mars-adamw",
    "mars-adamw-transport",
    "mars-m",
    "mars-m-transport",
    "mars-adamw-exact",
)


class ClippedAdamW(torch.optim.AdamW):
    """torch's AdamW after its clip_grad_norm_, with what a loop around MARS calls."""

    def step(self, closure: None = None) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        clip_grad_norm_(params, MAX_NORM)
        super().step(closure)

    def eval(self) -> None:
        """Do nothing: parameters are the model that is trained."""

    def train(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """An optimizer with its numbers.

    Args:
        name: a rule of ``marsopt.REGISTRY``, of which "-transport" or "-exact" names
            the correction, or "torch-adamw", clip_grad_norm_ and torch's fused AdamW.
        size: of ``configs.published.SIZES``, whose rates it takes.
        lr: peak learning rate; its others follow in proportion.
        gamma: scale of the correction.
    """

    name: str
    size: str
    lr: float
    gamma: float

    @property
    def correction(self) -> str | None:
        """Return the correction that the name asks for; None = the rule's own."""
        last = self.name.rpartition("-")[2]
        return last if last in ("transport", "exact") else None

    @property
    def rule(self) -> str:
        """Return the name of the rule."""
        if self.name == TORCH:
            return "adamw"
        return self.name.removesuffix(f"-{self.correction}")

    @property
    def num_gradients(self) -> int:
        """Return the gradients of a step."""
        return 2 if self.correction == "exact" else 1

    def scaled(self, factor: float) -> Method:
        """Return it at another learning rate."""
        return replace(self, lr=self.lr * factor)

    def param_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Return embeddings, matrices and vectors with the recipe's rates and decays.

        As the authors' scripts have it, AdamW with epsilon before debiasing moves the
        embeddings beside rules that give everything one rate.
        """
        row, lr_1d, key = RULES[self._key], self._lr_1d, self._key
        embeddings: dict[str, Any] = {"weight_decay": row.embeddings}
        if REGISTRY[self.rule].fallback == "adamw":
            adamw = dict(mars_type="adamw", betas=(0.9, 0.95), gamma=self.gamma)
            one_rate = key in ONE_RATE
            rate = self.lr if one_rate else lr_1d
            embeddings |= adamw | dict(lr=rate, epsilon_hat=one_rate)
        groups: dict[str, dict[str, Any]] = {
            "embeddings": embeddings,
            "matrices": {"weight_decay": row.matrices},
            "vectors": {"weight_decay": row.vectors},
        }
        for group in groups.values():
            group["params"] = []
        for name, p in model.named_parameters():
            embedding = name.split(".")[0] in EMBEDDINGS
            matrix = "matrices" if p.ndim == 2 else "vectors"
            groups["embeddings" if embedding else matrix]["params"].append(p)
        return [*groups.values()]

    @property
    def _key(self) -> str:
        return self.rule.replace("-", "_")

    @property
    def _lr_1d(self) -> float | None:
        """Return the rate of vectors, as far from the recipe's as ``lr`` is; None = lr
        itself.
        """
        if self._key in ONE_RATE:
            return None
        return SIZES[self.size].lr_1d * self.lr / LR[self._key][self.size]

    def build(self, model: nn.Module, *, compile: bool) -> MARS | ClippedAdamW:
        """Return the optimizer of a model."""
        row, groups = RULES[self._key], self.param_groups(model)
        if self.name == TORCH:
            return ClippedAdamW(groups, lr=self.lr, betas=row.betas, fused=True)
        return MARS(
            groups,
            lr=self.lr,
            betas=row.betas,
            gamma=self.gamma,
            mars_type=self.rule,
            lr_1d=self._lr_1d,
            weight_decay_1d=row.vectors,
            max_norm=MAX_NORM,
            compile=compile,
            correction=self.correction,
        )


def method(name: str, size: str, lr: float | None = None) -> Method:
    """Return a method by name for a model of a size, at the recipe's rate or ``lr``.

    Raises:
        UserError: no such method, or a rate that no recipe has.
    """
    found = Method(name=canonical(name), size=size, lr=lr or 0.0, gamma=GAMMA)
    if found.rule not in REGISTRY or found.rule.replace("-", "_") not in RULES:
        raise UserError(
            f"got method {name!r}, expected {TORCH} or one of {sorted(LR)}, with "
            "-transport or -exact behind it: choose one"
        )
    if found.correction == "exact" and not REGISTRY[found.rule].is_mars:
        raise UserError(
            f"got method {name!r}, a baseline, expected a rule of MARS before -exact: "
            "choose one that begins with mars-"
        )
    key = found.rule.replace("-", "_")
    if lr is None and size not in LR.get(key, {}):
        raise UserError(
            f"got no learning rate for {name} on GPT-2 {size}, which no recipe has, "
            f"expected one: give --lrs {name}=RATE"
        )
    gamma = GAMMA
    if found.correction == "transport":
        gamma = TRANSPORT_GAMMA.get(key, GAMMA)
    return replace(found, lr=LR[key][size] if lr is None else lr, gamma=gamma)
