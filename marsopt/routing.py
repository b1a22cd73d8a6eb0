"""The authors' routing: matrices to a rule by name, every other tensor to AdamW."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from marsopt import checks
from marsopt.checks import Number
from marsopt.collectives import LOCAL
from marsopt.flat import check_packing, leaf_shape, rebuild, subtree
from marsopt.newton_schulz import NewtonSchulz
from marsopt.rule import LeafRule, Rule
from marsopt.rules.adamw import AdamW
from marsopt.rules.lion import Lion
from marsopt.rules.mars_adamw import MarsAdamW
from marsopt.rules.mars_lion import MarsLion
from marsopt.rules.mars_m import MarsM
from marsopt.rules.mars_shampoo import MarsShampoo
from marsopt.rules.moonlight import Moonlight
from marsopt.rules.muon import Muon
from marsopt.step import Stack, advance
from marsopt.trees import Tree, flatten, match_names, names

MARS_TYPES = (
    "mars-adamw",
    "mars-lion",
    "mars-shampoo",
    "mars-m",
    "adamw",
    "lion",
    "muon",
    "moonlight",
)


def is_matrix(shape: torch.Size) -> bool:
    """Exactly two dims: a convolution kernel is no matrix, an embedding is one (the
    authors' rule).
    """
    return len(shape) == 2


class Pair(NamedTuple):
    """Who moves what. ``rest`` is ``matrix`` where one rule takes every tensor."""

    matrix: LeafRule
    rest: LeafRule
    own_rate: bool  # whether the rest has the rate lr_1d instead of lr


def pair(
    *,
    mars_type: str,
    betas: tuple[Number, Number],
    eps: Number,
    weight_decay: Number,
    amsgrad: bool,
    epsilon_hat: bool,
    gamma: Number,
    clip: Number | None,
    is_approx: bool,
    optimize_1d: bool,
    betas_1d: tuple[Number, Number],
    weight_decay_1d: Number,
    ns: NewtonSchulz,
    state_dtype: torch.dtype | None,
    h_dtype: torch.dtype | None,
) -> Pair:
    """The two rules behind a ``mars_type``, from the authors' hyperparameters.

    Raises:
        ValueError: an unknown type, ``optimize_1d`` for a baseline, a hyperparameter
            out of its range.
    """
    if mars_type not in MARS_TYPES:
        raise ValueError(
            f"got mars_type={mars_type!r}, expected one of {MARS_TYPES}: choose one of "
            "these names"
        )
    is_mars = mars_type.startswith("mars-")
    if optimize_1d and not is_mars:
        raise ValueError(
            f"got optimize_1d=True with mars_type={mars_type!r}, expected a MARS type: "
            "a baseline corrects nothing, "
            "leave optimize_1d False"
        )
    common: dict[str, Any] = dict(weight_decay=weight_decay, state_dtype=state_dtype)
    corrected = dict(
        common, gamma=gamma, clip=clip, is_approx=is_approx, h_dtype=h_dtype
    )
    adam: dict[str, Any] = dict(
        betas=betas, eps=eps, amsgrad=amsgrad, epsilon_hat=epsilon_hat
    )
    beta1 = betas[0]

    if mars_type == "adamw":
        rule: LeafRule = AdamW(**common, **adam)
        return Pair(rule, rule, False)
    if mars_type == "lion":
        rule = Lion(**common, betas=betas)
        return Pair(rule, rule, False)
    if mars_type == "mars-adamw":
        rule = MarsAdamW(**corrected, **adam)
    elif mars_type == "mars-lion":
        rule = MarsLion(**corrected, momentum=beta1)
    elif mars_type == "mars-shampoo":
        rule = MarsShampoo(**corrected, momentum=beta1, ns=ns)
    elif mars_type == "mars-m":
        rule = MarsM(**corrected, momentum=beta1, ns=ns)
    else:
        rule = {"muon": Muon, "moonlight": Moonlight}[mars_type](
            **common, momentum=beta1, ns=ns
        )

    if optimize_1d:
        return Pair(
            rule, MarsAdamW(**corrected, **adam) if rule.matrix_only else rule, False
        )
    rest: dict[str, Any] = dict(
        betas=betas_1d, eps=eps, amsgrad=amsgrad, state_dtype=state_dtype
    )
    if mars_type in (
        "mars-m",
        "moonlight",
    ):  # the same lr and weight decay for everything, and eps on the raw v
        return Pair(
            rule, AdamW(**rest, weight_decay=weight_decay, epsilon_hat=True), False
        )
    return Pair(
        rule, AdamW(**rest, weight_decay=weight_decay_1d, epsilon_hat=epsilon_hat), True
    )


class RoutedState(NamedTuple):
    """The states of both rules, over mappings from name (or position) to tensor; None
    where a rule has no tensor.
    """

    matrix: Any
    rest: Any


@dataclass(frozen=True, kw_only=True, eq=False)
class Routed(Rule):
    """Matrices by one rule, the rest by another, in one step with one global clip. Made
    by ``mars``.
    """

    pair: Pair
    ratio: Number
    max_norm: Number | None

    def sides(self, params: Tree) -> dict[str, list]:
        """Names of the leaves of each rule that has any, in the order of ``params``."""
        flatten(params, "params")
        one = self.pair.matrix is self.pair.rest
        matrix = [
            n for n in names(params) if one or is_matrix(leaf_shape(params, params[n]))
        ]
        rest = [n for n in names(params) if n not in set(matrix)]
        if not matrix + rest:
            raise ValueError(
                "got no parameters, expected at least one tensor: pass those of the "
                "model"
            )
        return {
            side: part for side, part in (("matrix", matrix), ("rest", rest)) if part
        }

    def init(self, params: Tree) -> RoutedState:
        sides = self.sides(params).items()
        states = {
            side: getattr(self.pair, side).init(subtree(params, part))
            for side, part in sides
        }
        return RoutedState(**{"matrix": None, "rest": None, **states})

    def step(
        self, params, grads, state, *, lr, gamma=None, reference=None, collectives=LOCAL
    ):
        checks.at_least_zero("lr", lr)
        if type(state) is not RoutedState:
            raise ValueError(
                f"got a {type(state).__name__}, expected RoutedState: make the state "
                "by init of this rule"
            )
        check_packing(params, grads, "grads")
        match_names(params, grads, "grads")
        if reference is not None:
            check_packing(params, reference, "reference")
            match_names(params, reference, "reference")
        sides = self.sides(params)
        stacks: dict[str, list[Stack]] = {}
        leaves = []
        for side, part in sides.items():
            rule = getattr(self.pair, side)
            # AdamW on the rest corrects nothing, so that gamma and reference are not
            # its concern
            concerned = side == "matrix" or rule.has_gamma
            stacks[side], own = rule.route(
                subtree(params, part),
                subtree(grads, part),
                getattr(state, side),
                lr * self.ratio if side == "rest" else lr,
                gamma if concerned else None,
                subtree(reference, part)
                if concerned and reference is not None
                else None,
                collectives,
            )
            leaves += own
        done, verdict = advance(
            [s for part in stacks.values() for s in part],
            leaves,
            self.max_norm,
            collectives,
        )
        moved, states, rest = {}, state._asdict(), iter(done)
        for side, part in sides.items():
            new, states[side] = getattr(self.pair, side).unroute(
                subtree(params, part),
                [next(rest) for _ in stacks[side]],
                states[side],
                verdict.finite,
                collectives,
            )
            moved.update(new)
        return rebuild(params, [moved[n] for n in names(params)]), RoutedState(**states)


def mars(
    *,
    mars_type: str = "mars-adamw",
    lr: float = 3e-3,
    betas: tuple[Number, Number] = (0.95, 0.99),
    eps: Number = 1e-8,
    weight_decay: Number = 0.0,
    amsgrad: bool = False,
    gamma: Number = 0.025,
    is_approx: bool = True,
    optimize_1d: bool = False,
    lr_1d: float = 3e-3,
    betas_1d: tuple[Number, Number] = (0.9, 0.95),
    weight_decay_1d: Number = 0.1,
    clip: Number | None = 1.0,
    max_norm: Number | None = None,
    epsilon_hat: bool = False,
    ns: NewtonSchulz = NewtonSchulz(),
    state_dtype: torch.dtype | None = None,
    h_dtype: torch.dtype | None = None,
) -> Routed:
    """The authors' routing as one rule: tensors of exactly two dims by ``mars_type``,
    the others by AdamW.

    Args:
        mars_type: "mars-adamw", "mars-lion", "mars-shampoo", "mars-m", or a baseline:
            "adamw", "lion" (these two take every tensor), "muon", "moonlight".
        lr: the peak rate that ``lr_1d`` is measured against; the rate of a step is
            given to ``step``.
        betas, eps, weight_decay, amsgrad, epsilon_hat, gamma, is_approx, clip,
            max_norm: as in ``mars_adamw``; rules with one momentum take betas[0].
        optimize_1d: give the other tensors to the MARS rule too (mars-shampoo and
            mars-m: to MARS-AdamW).
        lr_1d, betas_1d, weight_decay_1d: of the AdamW for the others; its rate is the
            step's lr times lr_1d / lr, so that it follows the schedule. "mars-m" and
            "moonlight" give it lr and weight_decay, as their authors do.
        ns: how matrices are orthogonalized.
        state_dtype, h_dtype: dtype of the state buffers, and of h alone; None = the
            parameter's own.

    Raises:
        ValueError: an unknown ``mars_type`` or a hyperparameter out of its range.
    """
    checks.positive("lr", lr)
    checks.at_least_zero("lr_1d", lr_1d)
    checks.positive_or_none("max_norm", max_norm)
    chosen = pair(
        mars_type=mars_type,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        amsgrad=amsgrad,
        epsilon_hat=epsilon_hat,
        gamma=gamma,
        clip=clip,
        is_approx=is_approx,
        optimize_1d=optimize_1d,
        betas_1d=betas_1d,
        weight_decay_1d=weight_decay_1d,
        ns=ns,
        state_dtype=state_dtype,
        h_dtype=h_dtype,
    )
    return Routed(
        pair=chosen, ratio=lr_1d / lr if chosen.own_rate else 1.0, max_norm=max_norm
    )
