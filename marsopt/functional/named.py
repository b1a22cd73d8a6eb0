"""The named rules as functions. A function's options are those of its ``TypedDict``
(marsopt/functional/options.py); what they set and their defaults are the registry's.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import replace
from inspect import Parameter, Signature
from typing import Any, TypeVar, Unpack, get_args, get_type_hints

from marsopt.functional.options import (
    AdamWOptions,
    LionOptions,
    MarsAdamWOptions,
    MarsLionOptions,
    MarsNorMuonOptions,
    MarsOrthogonalOptions,
    MarsSOAPOptions,
    NorMuonOptions,
    OrthogonalOptions,
    RoutedOptions,
    SOAPOptions,
    sentences,
)
from marsopt.functional.routing import (
    Choice,
    all_hyperparameters,
    check_suits,
    check_taken,
    route,
)
from marsopt.functional.rule import Rule
from marsopt.rules import checks
from marsopt.rules.hyperparameters import Table, arguments, check_names, table
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

Make = TypeVar("Make", bound=Callable[..., Rule])

# of every rule, on the gradient of |w|^2 / 2
SECTIONS = """\
Args:
{args}

Raises:
    TypeError: an argument that it does not have.
    ValueError: a hyperparameter out of its range.

Example:
    >>> rule = marsopt.{name}()
    >>> params = {{"w": torch.eye(2)}}
    >>> state = rule.init(params)
    >>> for _ in range(3):
    ...     params, state = rule.step(params, params, state, lr=0.1)
    >>> bool(params["w"].norm() < 1.41)     # what it was
    True
"""


def documented(make: Make) -> Make:
    """Let ``help`` show the options of a function with defaults and sentences."""
    (options,) = get_args(get_type_hints(make)["options"])
    routed = options is RoutedOptions
    known = _routed() if routed else _options_of(named(make.__name__))
    return _describe(make, known, sentences(options))


def _describe(make: Make, known: Table, texts: Mapping[str, str]) -> Make:
    """Give a function the signature of a table, and a docstring that lists it."""
    parameters = [
        Parameter(
            line.name,
            Parameter.KEYWORD_ONLY,
            default=line.default,
            annotation=line.hint,
        )
        for line in known.values()
    ]
    args = [
        textwrap.fill(
            f"{name}: {texts[name]}",
            80,
            initial_indent="    ",
            subsequent_indent="        ",
        )
        for name in known
    ]
    listed = SECTIONS.format(args="\n".join(args), name=make.__name__)
    make.__signature__ = Signature(parameters, return_annotation=Rule)  # type: ignore[attr-defined]
    make.__doc__ = f"{inspect.getdoc(make)}\n\n{listed}"
    return make


# ---- what the functions take and make ------------------------------------------------


def _options_of(row: NamedRule) -> Table:
    """Return what the function of a rule takes, and its correction if it has one."""
    lines: Table = row.table
    names = ["max_norm", "state_dtype", "stochastic_rounding"]
    if row.is_mars:
        for kind in CORRECTIONS.values():
            lines = {**table(kind), **lines}
        names = ["is_approx", "correction", *names]
    of_model = {name: table(Choice)[name] for name in names}
    return {**lines, **of_model, **table(Matrices)}


def _routed() -> Table:
    """Return what ``mars`` takes: a step is given its lr."""
    return {n: line for n, line in all_hyperparameters().items() if n != "lr"}


def _rule(name: str, options: Mapping[str, Any]) -> Rule:
    """Return the rule of this name that moves every tensor."""
    row = named(name)
    check_names(options, _options_of(row), _function_name(row))
    correction = None
    if row.is_mars:
        chosen = resolve(options.get("is_approx", True), options.get("correction"))
        kind = correction_named(chosen)
        check_suits(row, kind, {k: options[k] for k in options.keys() - row.table})
        correction = kind(**arguments(kind, options))
    algorithm = row.algorithm(
        correction=correction,
        state_dtype=options.get("state_dtype"),
        stochastic_rounding=options.get("stochastic_rounding", False),
        matrices=Matrices(**arguments(Matrices, options)),
        **arguments(row.preconditioner, options),
    )
    return Rule(matrix=algorithm, max_norm=options.get("max_norm"))


def _function_name(row: NamedRule) -> str:
    return row.name.replace("-", "_")


# ---- whole models --------------------------------------------------------------------


@documented
def mars(**options: Unpack[RoutedOptions]) -> Rule:
    """Return the authors' routing as one rule: matrices by ``mars_type``, other
    tensors by AdamW.

    What is None is the rule's own, as ``MARS`` has it too: docs/fidelity.md lists it.
    """
    check_names(options, _routed(), "mars")
    row = named(options.get("mars_type", Choice.mars_type))
    values: dict[str, Any] = {"base_lr": Choice.base_lr, **options}
    for name, default in row.hyperparameters.items():
        if values.get(name) is None:
            values[name] = default
    checks.positive("base_lr", values["base_lr"])
    rule = route(values)
    check_taken([row.name], options.get("correction"))
    if rule.rest_ratio is None:
        return rule
    return replace(rule, rest_ratio=rule.rest_ratio / values["base_lr"])


# ---- one rule for every tensor -------------------------------------------------------


@documented
def adamw(**options: Unpack[AdamWOptions]) -> Rule:
    """Return AdamW (arXiv 1711.05101), whose formulas ``AdamW`` has."""
    return _rule("adamw", options)


@documented
def nadamw(**options: Unpack[AdamWOptions]) -> Rule:
    """Return NAdamW, AdamW with Nesterov's momentum (Dozat, Incorporating Nesterov
    Momentum into Adam, 2016), whose formulas ``AdamW`` has.
    """
    return _rule("nadamw", options)


@documented
def mars_adamw(**options: Unpack[MarsAdamWOptions]) -> Rule:
    """Return MARS-AdamW (arXiv 2411.10438, Algorithm 2): a correction, then AdamW,
    whose formulas ``AdamW`` has.
    """
    return _rule("mars-adamw", options)


@documented
def lion(**options: Unpack[LionOptions]) -> Rule:
    """Return Lion (arXiv 2302.06675), whose formulas ``Lion`` has."""
    return _rule("lion", options)


@documented
def mars_lion(**options: Unpack[MarsLionOptions]) -> Rule:
    """Return MARS-Lion (arXiv 2411.10438, Algorithm 3): a correction, then the sign of
    one average, whose formulas ``SignAverage`` has.
    """
    return _rule("mars-lion", options)


@documented
def muon(**options: Unpack[OrthogonalOptions]) -> Rule:
    """Return Muon for matrices (K. Jordan, kellerjordan.github.io/posts/muon, 2024),
    whose formulas ``Orthogonal`` has.
    """
    return _rule("muon", options)


@documented
def mars_shampoo(**options: Unpack[MarsOrthogonalOptions]) -> Rule:
    """Return MARS-Shampoo for matrices (arXiv 2411.10438, Algorithm 4): a correction,
    then the orthogonal factor of an average, whose formulas ``Orthogonal`` has.
    """
    return _rule("mars-shampoo", options)


@documented
def moonlight(**options: Unpack[OrthogonalOptions]) -> Rule:
    """Return Moonlight's Muon for matrices (arXiv 2502.16982), whose formulas
    ``Orthogonal`` has.
    """
    return _rule("moonlight", options)


@documented
def mars_m(**options: Unpack[MarsOrthogonalOptions]) -> Rule:
    """Return MARS-M for matrices (arXiv 2510.21800): a correction, then the orthogonal
    factor of an average, at Moonlight's scale; ``Orthogonal`` has the formulas.
    """
    return _rule("mars-m", options)


@documented
def normuon(**options: Unpack[NorMuonOptions]) -> Rule:
    """Return NorMuon for matrices (arXiv 2510.05491), whose formulas ``NorMuon``
    has.
    """
    return _rule("normuon", options)


@documented
def mars_normuon(**options: Unpack[MarsNorMuonOptions]) -> Rule:
    """Return MARS-NorMuon for matrices: a correction (MARS, Algorithm 1), then NorMuon
    (arXiv 2510.05491), whose formulas ``NorMuon`` has.
    """
    return _rule("mars-normuon", options)


@documented
def soap(**options: Unpack[SOAPOptions]) -> Rule:
    """Return SOAP for matrices (arXiv 2409.11321), whose formulas ``SOAP`` has."""
    return _rule("soap", options)


@documented
def mars_soap(**options: Unpack[MarsSOAPOptions]) -> Rule:
    """Return MARS-SOAP for matrices: a correction (MARS, Algorithm 1), then SOAP (arXiv
    2409.11321), whose formulas ``SOAP`` has.
    """
    return _rule("mars-soap", options)


@documented
def soap_muon(**options: Unpack[SOAPOptions]) -> Rule:
    """Return SOAP-Muon for matrices: SOAP (arXiv 2409.11321), whose step is then
    orthogonalized as Muon's; ``SOAP`` has the formulas.
    """
    return _rule("soap-muon", options)


@documented
def mars_soap_muon(**options: Unpack[MarsSOAPOptions]) -> Rule:
    """Return MARS-SOAP-Muon for matrices: a correction (MARS, Algorithm 1), then
    SOAP-Muon; ``SOAP`` has the formulas.
    """
    return _rule("mars-soap-muon", options)


# ---- rules that were registered later ------------------------------------------------


def _registered(row: NamedRule) -> Callable[..., Rule]:
    """Return the function of a rule that this page does not have."""

    def make(**options: Any) -> Rule:
        return _rule(row.name, options)

    formulas, known = row.preconditioner, _options_of(row)
    make.__name__ = make.__qualname__ = _function_name(row)
    make.__doc__ = f"Return the rule {row.name!r} ({row.source})."
    texts = dict.fromkeys(known, f"as ``{formulas.__name__}`` has it, see below.")
    texts |= sentences(NorMuonOptions) | sentences(RoutedOptions)
    _describe(make, known, texts)
    about = textwrap.indent(inspect.getdoc(formulas) or "", "    ")
    make.__doc__ = f"{make.__doc__}\n{formulas.__name__}:\n{about}"
    return make


def __getattr__(name: str) -> Callable[..., Rule]:
    """Return the function of a rule that was registered later."""
    row = REGISTRY.get(canonical(name))
    if row is None or name != name.lower():
        near = checks.closest(name, [_function_name(row) for row in REGISTRY.values()])
        do = f"did you mean {near!r}?" if near else "marsopt.REGISTRY has all rules"
        raise AttributeError(f"module 'marsopt' has no attribute {name!r}: {do}")
    return _registered(row)
