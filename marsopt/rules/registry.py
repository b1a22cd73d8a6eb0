"""The named rules: a correction, a preconditioner, and their defaults. SOAP is known
only by ``register``, as a user's own components are.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from dataclasses import replace as with_fields
from difflib import get_close_matches
from typing import Any, Literal

import torch

from marsopt.rules import checks
from marsopt.rules.adamw import AdamW
from marsopt.rules.checks import Number
from marsopt.rules.component import (
    MOMENTUM,
    Algorithm,
    Correction,
    H,
    Preconditioner,
    like_x,
)
from marsopt.rules.formats import LOW_BITS, SCALE
from marsopt.rules.lion import Lion, SignAverage
from marsopt.rules.mars import Approximate, Exact
from marsopt.rules.normuon import NorMuon
from marsopt.rules.numerics import LOG_TIME_BETA, LOG_TIME_NESTEROV
from marsopt.rules.options import OptionTable, arguments, options_of
from marsopt.rules.orthogonal import MATCH_RMS_ADAMW, Orthogonal

# The rule of tensors that are not matrices: the rule itself; an AdamW with numbers of
# its own, the authors' (optimizers/mars.py); or an AdamW with the rule's own lr and
# weight decay and eps on the raw v (as MARS_M/train_mars_m.py and train_moonlight.py
# do).
Fallback = Literal["itself", "adamw_1d", "adamw"]
# The numbers of this AdamW; None: the rule's lr, betas or weight_decay.
FALLBACKS: dict[Fallback, dict[str, Any]] = {
    "itself": dict(lr_1d=None, betas_1d=None, weight_decay_1d=None),
    "adamw_1d": dict(lr_1d=3e-3, betas_1d=(0.9, 0.95), weight_decay_1d=0.1),
    "adamw": dict(lr_1d=None, betas_1d=(0.9, 0.95), weight_decay_1d=None),
}
# The rule's numbers that the fallback takes if its own is None.
FOLLOWED = {name: name.removesuffix("_1d") for name in FALLBACKS["itself"]}
# Options of tensors that are not matrices, and the options that they replace.
BESIDE = {**FOLLOWED, "nesterov_1d": "nesterov"}
# The keys of groups for the AdamW beside a rule; their ``nesterov`` is the rule's.
FALLBACK_TABLE = {n: line for n, line in options_of(AdamW).items() if n != "nesterov"}
# The ``betas`` that a rule does not read: the authors' values.
UNUSED_BETAS = (0.95, 0.99)


@dataclass(frozen=True)
class NamedRule:
    """A rule by name.

    Args:
        name: its value of ``mars_type``.
        preconditioner: its class.
        is_mars: whether it corrects the gradient.
        fallback: the rule of tensors that are not matrices.
        defaults: arguments of the preconditioner that differ from its own defaults.
        source: paper and algorithm.

    Example:
        >>> row = marsopt.REGISTRY["mars-m"]
        >>> row.source
        'MARS-M, arXiv 2510.21800'
        >>> row.matrix_only, row.num_buffers("approximate")
        (True, 2)
        >>> print(row)      # doctest: +ELLIPSIS
        mars-m (MARS-M, arXiv 2510.21800), options of Orthogonal and of corrections:
            weight_decay = 0.0: decoupled: x <- (1 - lr weight_decay) x - ...
    """

    name: str
    preconditioner: type[Preconditioner]
    is_mars: bool
    fallback: Fallback
    defaults: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""

    @property
    def matrix_only(self) -> bool:
        """Whether it updates only matrices."""
        return self.preconditioner.matrix_only

    @property
    def table(self) -> OptionTable:
        """Its preconditioner's hyperparameters, with its own defaults."""
        return {
            name: line._replace(default=self.defaults.get(name, line.default))
            for name, line in options_of(self.preconditioner).items()
        }

    @property
    def options(self) -> OptionTable:
        """The options of ``marsopt.rule`` for it: the fields of its components."""
        lines = {**self.table, **options_of(Algorithm)}
        for kind in CORRECTIONS.values() if self.is_mars else ():
            lines |= {n: line for n, line in options_of(kind).items() if n not in lines}
        return lines

    def __str__(self) -> str:
        """Return its options, with their defaults and descriptions."""
        parts = self.preconditioner.__name__
        parts += " and of corrections" if self.is_mars else ""
        lines = [f"{self.name} ({self.source}), options of {parts}:"]
        for name, option in self.options.items():
            line = f"    {name} = {option.default!r}: {option.text}"
            lines.append(textwrap.fill(line, 88, subsequent_indent=8 * " "))
        return "\n".join(lines)

    def group_defaults(self, log_time: Number | None = None) -> dict[str, Any]:
        """Return the defaults of its param groups, by the groups' names: single
        momentums as parts of ``betas``.
        """
        lines, betas = self.table, list(UNUSED_BETAS)
        for line in lines.values():
            if line.beta is not None:
                betas[line.beta] = line.default
        numbers = {
            name: line.default
            for name, line in lines.items()
            if line.is_number and line.beta is None and name not in options_of(AdamW)
        }
        defaults = dict(
            betas=lines["betas"].default if "betas" in lines else tuple(betas),
            weight_decay=lines["weight_decay"].default,
            **numbers,
            **FALLBACKS[self.fallback],
        )
        return defaults | self.log_time_defaults(log_time)

    def log_time_defaults(self, log_time: Number | None) -> dict[str, Any]:
        """Return the values that ``log_time`` sets if its user gives none, by the names
        of ``group_defaults``; {} for None.
        """
        if log_time is None:
            return {}
        both = LOG_TIME_BETA, LOG_TIME_BETA
        values: dict[str, Any] = dict(betas=both)
        if "nesterov" in self.table:
            values["nesterov"] = LOG_TIME_NESTEROV
        if self.fallback != "itself":
            values |= dict(betas_1d=both, nesterov_1d=LOG_TIME_NESTEROV)
        return values

    def algorithm(self, values: Mapping[str, Any]) -> Algorithm:
        """Return its algorithm.

        Args:
            values: options, by the names of ``options`` or of param groups, the
                correction by its name; the rule has defaults.

        Raises:
            ValueError: an option is out of its range, or switches off the feature that
                names this rule.
        """
        fields = arguments(self.preconditioner, values)
        for name, default in self.defaults.items():
            if default is True and fields.get(name) is False:
                self._check_needed(name)
        correction = None
        if self.is_mars:
            kind = correction_named(values.get("correction", Approximate.name))
            correction = kind(**arguments(kind, values))
        return Algorithm(
            preconditioner=self.preconditioner(**{**self.defaults, **fields}),
            correction=correction,
            name=self.name,
            **arguments(Algorithm, values),
        )

    def _check_needed(self, name: str) -> None:
        """Refuse to switch an option off, if another rule is this rule without it."""
        without = {n: v for n, v in self.defaults.items() if n != name}
        for other in REGISTRY.values():
            form = other.preconditioner, other.is_mars, other.defaults
            if form == (self.preconditioner, self.is_mars, without):
                raise ValueError(
                    f"got {name}=False with mars_type={self.name!r}, expected None "
                    f"or True: {self.name!r} without it is mars_type={other.name!r}"
                )

    def num_buffers(self, correction: str = Approximate.name) -> int:
        """Return how many tensors of the parameter's size the state holds."""
        algorithm = self.algorithm({"correction": correction})
        return sum(buffer.shape is like_x for buffer in algorithm.kept.values())


# The rules that this package registers. A rule of your own has a name that a type
# checker does not know: write "# type: ignore" beside it.
RuleName = Literal[
    "adamw",
    "nadamw",
    "mars-adamw",
    "lion",
    "mars-lion",
    "muon",
    "mars-shampoo",
    "moonlight",
    "mars-m",
    "normuon",
    "mars-normuon",
    "soap",
    "mars-soap",
    "soap-muon",
    "mars-soap-muon",
]

CORRECTIONS: dict[str, type[Correction]] = {}

RULES = (
    NamedRule("adamw", AdamW, False, "itself", source="arXiv 1711.05101"),
    NamedRule(
        "nadamw",
        AdamW,
        False,
        "itself",
        dict(nesterov=True),
        "Dozat, Incorporating Nesterov Momentum into Adam, 2016",
    ),
    NamedRule(
        "mars-adamw",
        AdamW,
        True,
        "adamw_1d",
        dict(betas=(0.95, 0.99), weight_decay=0.0),
        "MARS, arXiv 2411.10438, Algorithm 2",
    ),
    NamedRule("lion", Lion, False, "itself", source="arXiv 2302.06675"),
    NamedRule(
        "mars-lion",
        SignAverage,
        True,
        "adamw_1d",
        source="MARS, arXiv 2411.10438, Algorithm 3",
    ),
    NamedRule(
        "muon",
        Orthogonal,
        False,
        "adamw_1d",
        dict(nesterov=True, weight_decay=0.1),  # decay as torch.optim.Muon's
        "K. Jordan, kellerjordan.github.io/posts/muon, 2024",
    ),
    NamedRule(
        "mars-shampoo",
        Orthogonal,
        True,
        "adamw_1d",
        source="MARS, arXiv 2411.10438, Algorithm 4",
    ),
    NamedRule(
        "moonlight",
        Orthogonal,
        False,
        "adamw",
        dict(nesterov=True, weight_decay=0.1, adjust_lr_fn=MATCH_RMS_ADAMW),
        "arXiv 2502.16982",
    ),
    NamedRule(
        "mars-m",
        Orthogonal,
        True,
        "adamw",
        dict(adjust_lr_fn=MATCH_RMS_ADAMW),
        "MARS-M, arXiv 2510.21800",
    ),
    NamedRule(
        "normuon",
        NorMuon,
        False,
        "adamw",
        dict(weight_decay=0.1),
        "arXiv 2510.05491",
    ),
    NamedRule(
        "mars-normuon",
        NorMuon,
        True,
        "adamw",
        source="MARS, Algorithm 1, before arXiv 2510.05491",
    ),
)

REGISTRY: dict[str, NamedRule] = {}

# The names of all that a component may keep in ``optimizer.state[p]``; other entries
# are the caller's.
STATE_KEYS = {MOMENTUM, H.key, MOMENTUM + SCALE, H.key + SCALE, *LOW_BITS}


def canonical(name: str) -> str:
    """Return a name as the registry writes it: "MARS_AdamW" is "mars-adamw"."""
    return name.lower().replace("_", "-")


def register(component: NamedRule | type[Correction], *, replace: bool = False) -> None:
    """Give a rule or a correction its name: ``MARS``, ``mars`` and all tools know it
    from then on.

    Args:
        component: a row of ``REGISTRY``, or a subclass of ``Correction`` with a
            ``name``. A rule is listed as ``canonical`` writes its name.
        replace: let it take the place of the component that has had that name.

    Raises:
        TypeError: anything else, or a class without a method that it has to have.
        ValueError: another component has the name.

    Example:
        >>> row = marsopt.NamedRule(
        ...     "mars-lion-long",
        ...     preconditioner=marsopt.SignAverage,
        ...     is_mars=True,
        ...     fallback="itself",
        ...     defaults=dict(momentum=0.99),
        ... )
        >>> marsopt.register(row)
        >>> rule = marsopt.rule("mars-lion-long")
        >>> rule.matrix.preconditioner.momentum
        0.99
        >>> _ = marsopt.REGISTRY.pop("mars-lion-long")
    """
    known: dict[str, Any] = CORRECTIONS
    kind: Any = component
    if isinstance(component, NamedRule):
        component = with_fields(component, name=canonical(component.name))
        known, kind = REGISTRY, component.preconditioner
    kinds = Preconditioner if known is REGISTRY else Correction
    if (
        not isinstance(kind, type)
        or not issubclass(kind, kinds)
        or not (known is REGISTRY or hasattr(kind, "name"))
    ):
        raise TypeError(
            f"got {component!r}, expected a NamedRule, or a subclass of Correction "
            "with a name: give a correction one (name = ...); a preconditioner's class "
            "goes into a marsopt.NamedRule"
        )
    if missing := ", ".join(sorted(kind.__abstractmethods__)):
        raise TypeError(
            f"got {kind.__name__} without {missing}, expected a class that can be "
            f"built: define {missing}"
        )
    if known.get(component.name, component) != component and not replace:
        raise ValueError(
            f"got the name {component.name!r}, which is taken, expected one that is "
            f"free (taken are {', '.join(known)}): choose another, or pass replace=True"
        )
    known[component.name] = component
    if isinstance(component, NamedRule):
        keeps = component.preconditioner.keeps
        keys = {buffer.key for buffer in keeps.values() if buffer.home == "shard"}
        STATE_KEYS.update(b.key for b in keeps.values())
        STATE_KEYS.update(key + SCALE for key in keys)


for _component in (*RULES, Approximate, Exact):
    register(_component)


def named(mars_type: str, argument: str = "mars_type") -> NamedRule:
    """Return the rule that ``mars_type`` names, in any spelling of ``canonical``.
    Messages call it by the name of the caller's ``argument``.

    Raises:
        ValueError: there is none.
    """
    name = canonical(str(mars_type))
    if name not in REGISTRY:
        close = get_close_matches(name, REGISTRY, 1)
        meant = f"did you mean {close[0]!r}?" if close else "choose one of these names"
        if isinstance(mars_type, int | float | torch.Tensor):
            meant = f"pass lr={mars_type}"
        raise ValueError(
            f"got {argument}={mars_type!r}, expected one of {tuple(REGISTRY)}: {meant}"
        )
    return REGISTRY[name]


def correction_named(name: str) -> type[Correction]:
    """Return the correction of this name.

    Raises:
        ValueError: there is none.
    """
    if not isinstance(name, str) or name not in CORRECTIONS:
        do = "choose one; None leaves a baseline as it is, without a correction"
        if isinstance(name, Correction | type):
            do = "marsopt.register its class, and give the name"
        raise ValueError(
            f"got correction={name!r}, expected None or one of {tuple(CORRECTIONS)}: "
            f"{do}"
        )
    return CORRECTIONS[name]


def resolve(values: Mapping[str, Any]) -> type[Correction]:
    """Return the correction that the options ``is_approx``, the authors', and
    ``correction`` name together.

    Raises:
        ValueError: they contradict each other, or there is none of this name.
    """
    is_approx, correction = values.get("is_approx", True), values.get("correction")
    checks.true_or_false("is_approx", is_approx)
    if correction is None:
        return Approximate if is_approx else Exact
    kind = correction_named(correction)
    if not is_approx and kind.name != Exact.name:
        raise ValueError(
            f"got is_approx=False with correction={correction!r}, expected one to "
            "agree with the other: pass only correction"
        )
    return kind
