"""One line for a whole model: param groups, clip, collectives."""

from __future__ import annotations

import logging
import math
from bisect import bisect
from collections.abc import Mapping
from importlib import import_module
from inspect import signature
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor, nn

from marsopt.functional.authors import all_options, check_taken
from marsopt.functional.keywords import ModelOptions, RoleOptions
from marsopt.functional.rule import Route, Rule
from marsopt.models.param_groups import param_groups
from marsopt.optim.groups import constructor_values, fill_defaults, kinds_of, values_of
from marsopt.optim.mars import MARS
from marsopt.rules.options import check_names
from marsopt.rules.registry import RuleName, named
from marsopt.step.owners import LOCAL, Collectives

log = logging.getLogger(__name__)

# Learning rates of RULES by the number of parameters: the best of the searches in
# research/study.md (small Moonlight), and the authors' of GPT-2 small to XL
# (configs/published.py)
LEARNING_RATES = (
    (123_264, 1.7e-2),
    (124_373_760, 6e-3),
    (354_599_936, 5e-3),
    (773_582_080, 5e-3),
    (1_556_840_000, 3e-3),
)
RULES = ("moonlight", "mars-m")
NUM_DIGITS = 2  # a learning rate between two sizes is rounded to these


def for_model(
    model: nn.Module,
    mars_type: RuleName = "moonlight",
    *,
    lr: float | Tensor | None = None,
    **options: Unpack[ModelOptions],
) -> MARS:
    """Return ``MARS`` for a model, ready to train.

        optimizer = marsopt.for_model(model)

    With GPT-2 small, at a learning rate of 6e-3, it is this, with ``collectives`` for
    the ranks that the model is spread over:

        groups = marsopt.param_groups(model, "moonlight", lr=6e-3)
        optimizer = MARS(groups, max_norm=1.0)

    ``logging`` (INFO) and ``print(optimizer)`` show the choice.

    Call it last, with the module that the loop calls: after ``fully_shard``,
    ``DistributedDataParallel``, ``torch.compile`` or PEFT have wrapped the model, and
    after parameters are frozen.

    Args:
        model: on one device, in DistributedDataParallel, or sharded by FSDP2.
        mars_type: a name in ``marsopt.REGISTRY``: the rule of hidden matrices.
        lr: learning rate of hidden matrices; None = by the number of trained
            parameters, for "moonlight" and "mars-m" trained from scratch: 1.7e-2 at
            0.12M, 6e-3 at GPT-2 small, 5e-3 at medium and large, 3e-3 at XL and above,
            and between two sizes on a line in the logarithms of both. GPT-2's rates are
            the authors', the first was searched here.
        options: arguments of ``param_groups`` and of ``MARS``. ``max_norm`` is 1.0
            unless given (None turns it off), ``collectives`` the model's own.

    Raises:
        TypeError: ``model`` is no module, or an option that neither has.
        ValueError: as ``param_groups`` and ``MARS``; no ``lr`` for another rule, or if
            less than half of the model's parameters are trained.

    Example:
        >>> words = torch.nn.Embedding(12, 4)
        >>> model = torch.nn.Sequential(words, torch.nn.Linear(4, 4))
        >>> optimizer = marsopt.for_model(model, lr=6e-3, compile=False)
        >>> model(torch.arange(12)).square().sum().backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
        >>> [group["mars_type"] for group in optimizer.param_groups]
        ['moonlight', 'adamw', 'adamw']
    """
    # first, and also if they are given: FSDP shards again
    collectives = _collectives_of(model) if isinstance(model, nn.Module) else LOCAL
    plan = _plan(model, mars_type, lr, options)
    whole = {"collectives": collectives} | plan.whole
    optimizer = MARS(plan.groups, lr=plan.lr, mars_type=mars_type, **whole)
    numbers = optimizer._ids()
    optimizer._order = [numbers[p] for p in model.parameters() if p in numbers]
    return optimizer


def rule_for(
    model: nn.Module,
    mars_type: RuleName = "moonlight",
    *,
    lr: float | Tensor | None = None,
    **options: Unpack[RoleOptions],
) -> Rule:
    """Return the optimizer of ``for_model`` as a ``Rule`` over named parameters: the
    same routing, learning rates and clip.

        rule = marsopt.rule_for(model)
        params = {name: p.detach() for name, p in model.named_parameters()}
        state = rule.init(params)
        params, state = rule.step(params, grads, state, lr=rule.lr)

    ``rule.routes`` lists the parameters of each algorithm. Parameters without a
    gradient are left out of ``params`` and ``grads``. A sharded model needs
    ``collectives`` in ``init`` and ``step``.

    Args:
        model: as in ``for_model``. Only its names, modules and shapes are read.
        mars_type: as in ``for_model``.
        lr: as in ``for_model``; ``rule.lr`` holds it, for ``step``.
        options: as in ``for_model``, without ``collectives``, ``compile`` and
            ``nonfinite``.

    Raises:
        TypeError, ValueError: as ``for_model``.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        >>> rule = marsopt.rule_for(model, lr=6e-3)
        >>> [route.algorithm.matrix_only for route in rule.routes.values()]
        [True, False]
    """
    plan = _plan(model, mars_type, lr, options)
    known = all_options().keys() - {"lr_ratio"}
    check_names(plan.whole, known, "marsopt.rule_for")
    arguments = {"lr": plan.lr, "mars_type": mars_type, **plan.whole}
    whole, defaults = constructor_values(arguments)
    check_taken([group["mars_type"] for group in plan.groups], whole["correction"])
    routes: dict[str, Route] = {}
    for group in plan.groups:
        fill_defaults(group, whole, defaults)
        all_names, group["params"] = zip(*group["params"], strict=True)
        kinds = kinds_of(group)
        for is_matrix in sorted({*kinds}, reverse=True):
            pairs = zip(all_names, kinds, strict=True)
            names = [name for name, kind in pairs if kind is is_matrix]
            numbers = whole | defaults | values_of(group, is_matrix)
            algorithm = named(numbers["mars_type"]).algorithm(numbers)
            key = names[0] + (f" (+{len(names) - 1})" if len(names) > 1 else "")
            routes[key] = Route(algorithm, numbers["lr_ratio"], frozenset(names))
    first = next(iter(routes.values())).algorithm
    max_norm = plan.whole["max_norm"]
    return Rule(matrix=first, max_norm=max_norm, lr=plan.lr, routes=routes)


class _Plan(NamedTuple):
    """The choices that an optimizer and a rule for a model share."""

    groups: list[dict[str, Any]]
    lr: float | Tensor
    whole: dict[str, Any]  # options of the whole optimizer


def _plan(
    model: nn.Module,
    mars_type: RuleName,
    lr: float | Tensor | None,
    options: Mapping[str, Any],
) -> _Plan:
    parameters = signature(param_groups).parameters
    for_groups: dict[str, Any] = {k: v for k, v in options.items() if k in parameters}
    # groups that are added later take these, too
    not_inherited = parameters.keys() - {"weight_decay", "log_time"}
    whole = {k: v for k, v in options.items() if k not in not_inherited}
    rate: Any = lr
    rule = named(mars_type).name
    if lr is None and isinstance(model, nn.Module):  # param_groups refuses another
        rate = _by_size(model, rule)
    groups = param_groups(model, mars_type, lr=rate, **for_groups)
    if named(rule).matrix_only and all(g["mars_type"] != rule for g in groups):
        raise ValueError(
            f"got a model without a hidden matrix for {rule!r}, expected one at least: "
            'pass mars_type="adamw", or groups of your own to MARS, if AdamW is to '
            "update all of it"
        )
    return _Plan(groups, rate, {"max_norm": 1.0} | whole)


def learning_rate(num_params: int) -> float:
    """Return the learning rate of ``RULES`` for a model of this size."""
    at = bisect([size for size, _ in LEARNING_RATES], num_params)
    if at in (0, len(LEARNING_RATES)):
        return LEARNING_RATES[0 if at == 0 else -1][1]
    (size, lr), (larger, lower) = LEARNING_RATES[at - 1 : at + 1]
    part = math.log(num_params / size) / math.log(larger / size)
    return float(f"{lr * (lower / lr) ** part:.{NUM_DIGITS}g}")


def _by_size(model: nn.Module, rule: str) -> float:
    """Return the learning rate of a model's size.

    Raises:
        ValueError: there is none for this rule, or for a model that is fine-tuned.
    """
    if rule not in RULES:
        raise ValueError(
            f"got no lr for {rule!r}, expected one: learning rates by size are known "
            f"only for {' and '.join(map(repr, RULES))}; pass lr"
        )
    num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    num_params = sum(p.numel() for p in model.parameters())
    if 2 * num_trained < num_params:
        raise ValueError(
            f"got no lr for a model of which {num_trained} of {num_params} parameters "
            "are trained, expected one: learning rates by size hold for models trained "
            "from scratch; pass lr"
        )
    rate = learning_rate(num_trained)
    log.info("marsopt: lr %g by size (%d parameters)", rate, num_trained)
    return rate


def _collectives_of(model: nn.Module) -> Collectives:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return LOCAL
    # imported when it is needed, for it imports this package
    parallel: Any = import_module("marsopt.parallel")
    collectives: Collectives = parallel.collectives_of(model)
    return collectives
