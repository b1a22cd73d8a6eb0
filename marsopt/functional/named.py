"""The named rules as functions, made from the registry and the table of
hyperparameters.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

from marsopt.functional.routing import (
    Choice,
    check_suits,
    every_hyperparameter,
    route,
)
from marsopt.functional.rule import Rule
from marsopt.rules import checks
from marsopt.rules.hyperparameters import (
    Table,
    arguments,
    check_names,
    described,
    table,
)
from marsopt.rules.matrices import Matrices
from marsopt.rules.registry import (
    CORRECTIONS,
    REGISTRY,
    NamedRule,
    canonical,
    correction_named,
    named,
    resolve,
)

# of every rule, on the gradient of |w|^2 / 2
EXAMPLE = """\
    >>> rule = marsopt.{name}()
    >>> params = {{"w": torch.eye(2)}}
    >>> state = rule.init(params)
    >>> for _ in range(3):
    ...     params, state = rule.step(params, params, state, lr=0.1)
    >>> bool(params["w"].norm() < 1.41)     # what it was
    True
"""


def function(row: NamedRule) -> Callable[..., Rule]:
    """Return the function of a named rule: ``marsopt.mars_adamw`` of "mars-adamw"."""

    def make(**given: Any) -> Rule:
        check_names(given, _taken(row), make.__name__)
        correction = None
        if row.is_mars:
            told = resolve(given.get("is_approx", True), given.get("correction"))
            kind = correction_named(told)
            check_suits(row, kind, {k: given[k] for k in given.keys() - row.table})
            correction = kind(**arguments(kind, given))
        algorithm = row.algorithm(
            correction=correction,
            state_dtype=given.get("state_dtype"),
            stochastic_rounding=given.get("stochastic_rounding", False),
            matrices=Matrices(**arguments(Matrices, given)),
            **arguments(row.preconditioner, given),
        )
        return Rule(matrix=algorithm, max_norm=given.get("max_norm"))

    return _documented(
        make,
        row.name.replace("-", "_"),
        _taken(row),
        f"Return the rule {row.name!r} ({row.source}), which moves every tensor that "
        f"it is given.\n\n``{row.preconditioner.__name__}`` has its formulas.",
    )


def _taken(row: NamedRule) -> Table:
    """Return what the function of a rule takes: that of corrections if it has one."""
    shared, found = table(Choice), dict(row.table)
    if row.is_mars:
        for kind in CORRECTIONS.values():
            found = {**table(kind), **found}
        found |= {name: shared[name] for name in ("is_approx", "correction")}
    names = "max_norm", "state_dtype", "stochastic_rounding"
    found |= {name: shared[name] for name in names}
    return found | table(Matrices)


def _mars(**given: Any) -> Rule:
    check_names(given, _listed(), "mars")
    own = named(given.get("mars_type", Choice.mars_type)).hyperparameters
    given |= {name: own[name] for name in own if given.get(name) is None}
    base_lr = given.setdefault("base_lr", Choice.base_lr)
    checks.positive("base_lr", base_lr)
    chosen = route(given)
    return Rule(
        matrix=chosen.matrix,
        rest=chosen.fallback,
        rest_ratio=given["lr_1d"] / base_lr if chosen.own_rate else 1.0,
        rest_gamma=given.get("gamma_1d") if chosen.own_gamma else None,
        max_norm=given.get("max_norm"),
    )


def _listed() -> Table:
    """Return what ``mars`` takes: a step is given its lr."""
    return {name: h for name, h in every_hyperparameter().items() if name != "lr"}


def _documented(
    make: Callable[..., Rule], name: str, known: Table, text: str
) -> Callable[..., Rule]:
    """Return a function with a name, the signature of a table, and a docstring."""
    make.__name__ = make.__qualname__ = name
    make.__signature__ = Signature(
        [
            Parameter(
                line.name,
                Parameter.KEYWORD_ONLY,
                default=line.default,
                annotation=line.hint,
            )
            for line in known.values()
        ],
        return_annotation=Rule,
    )
    make.__doc__ = (
        f"{text}\n\nArgs:\n{described(known)}\n\nRaises:\n"
        "    TypeError: an argument that it does not have.\n"
        "    ValueError: a hyperparameter out of its range.\n\n"
        f"Example:\n{EXAMPLE.format(name=name)}"
    )
    return make


mars: Callable[..., Rule] = _documented(
    _mars,
    "mars",
    _listed(),
    "Return the authors' routing as one rule: matrices by ``mars_type``, other\n"
    "tensors by AdamW.\n\n"
    "What is None is the rule's own, as ``MARS`` has it too: docs/guide.md lists it.",
)

adamw: Callable[..., Rule] = function(REGISTRY["adamw"])
nadamw: Callable[..., Rule] = function(REGISTRY["nadamw"])
mars_adamw: Callable[..., Rule] = function(REGISTRY["mars-adamw"])
lion: Callable[..., Rule] = function(REGISTRY["lion"])
mars_lion: Callable[..., Rule] = function(REGISTRY["mars-lion"])
muon: Callable[..., Rule] = function(REGISTRY["muon"])
mars_shampoo: Callable[..., Rule] = function(REGISTRY["mars-shampoo"])
moonlight: Callable[..., Rule] = function(REGISTRY["moonlight"])
mars_m: Callable[..., Rule] = function(REGISTRY["mars-m"])
normuon: Callable[..., Rule] = function(REGISTRY["normuon"])
mars_normuon: Callable[..., Rule] = function(REGISTRY["mars-normuon"])
soap: Callable[..., Rule] = function(REGISTRY["soap"])
mars_soap: Callable[..., Rule] = function(REGISTRY["mars-soap"])
soap_muon: Callable[..., Rule] = function(REGISTRY["soap-muon"])
mars_soap_muon: Callable[..., Rule] = function(REGISTRY["mars-soap-muon"])


def __getattr__(name: str) -> Callable[..., Rule]:
    """Return the function of a rule that was registered later."""
    row = REGISTRY.get(canonical(name))
    if row is None or name != name.lower():
        near = checks.closest(name, [n.replace("-", "_") for n in REGISTRY])
        do = f"did you mean {near!r}?" if near else "marsopt.REGISTRY has all rules"
        raise AttributeError(f"module 'marsopt' has no attribute {name!r}: {do}")
    return function(row)
