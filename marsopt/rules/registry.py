"""The one list of named rules: who corrects, who preconditions, with which defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, Literal

import torch

from marsopt.rules.adamw import AdamW
from marsopt.rules.algorithm import Algorithm
from marsopt.rules.correction import Correction, Kind
from marsopt.rules.lion import Lion, SignAverage
from marsopt.rules.matrices import Matrices
from marsopt.rules.normuon import NorMuon
from marsopt.rules.orthogonal import MATCH_RMS_ADAMW, Orthogonal
from marsopt.rules.preconditioner import Preconditioner

# Who moves what is not a matrix: the rule itself; an AdamW with numbers of its own, the
# authors' (optimizers/mars.py); or one with the rule's own lr and weight decay and eps
# on the raw v (as MARS_M/train_mars_m.py and train_moonlight.py do).
Others = Literal["itself", "adamw_1d", "adamw"]
# The numbers of that; None: the rule's lr, betas or weight_decay.
OTHERS: dict[Others, dict[str, Any]] = {
    "itself": dict(lr_1d=None, betas_1d=None, weight_decay_1d=None),
    "adamw_1d": dict(lr_1d=3e-3, betas_1d=(0.9, 0.95), weight_decay_1d=0.1),
    "adamw": dict(lr_1d=None, betas_1d=(0.9, 0.95), weight_decay_1d=None),
}
# Second of ``betas`` for rules that have one momentum alone, which do not read it.
UNUSED_BETA = 0.99


@dataclass(frozen=True)
class NamedRule:
    """A rule by name.

    Args:
        name: what ``mars_type`` calls it.
        preconditioner: its page.
        is_mars: whether it corrects the gradient.
        others: who moves what is not a matrix.
        defaults: arguments of the page that differ from its own defaults.
        source: paper and algorithm.
    """

    name: str
    preconditioner: type[Preconditioner]
    is_mars: bool
    others: Others
    defaults: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""

    @property
    def matrix_only(self) -> bool:
        """Whether Newton-Schulz makes its steps, for matrices alone."""
        return self.preconditioner.matrix_only

    @property
    def arguments(self) -> dict[str, Any]:
        """Its hyperparameters and their defaults; the correction's apart."""
        own = {f.name: f.default for f in fields(self.preconditioner)}
        return {**own, **self.defaults}

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """Its defaults under the names that routing and param groups have: the momentum
        of matrix rules as the first of ``betas``, NorMuon's beta2 as the second.
        """
        own = self.arguments
        betas = own.get("momentum"), own.get("beta2", UNUSED_BETA)
        return dict(
            betas=own.get("betas", betas),
            weight_decay=own["weight_decay"],
            **OTHERS[self.others],
        )

    def algorithm(
        self,
        *,
        correction: Correction | None = None,
        state_dtype: torch.dtype | None = None,
        matrices: Matrices = Matrices(),
        **arguments: Any,
    ) -> Algorithm:
        """Join the page, with these ``arguments`` of it, and a correction."""
        page = self.preconditioner(**{**self.defaults, **arguments})
        return Algorithm(
            preconditioner=page,
            correction=correction,
            state_dtype=state_dtype,
            matrices=matrices,
            name=self.name,
        )

    def num_buffers(self, kind: Kind = "approximate") -> int:
        """Return how many tensors of the parameter's size the state holds."""
        corrects = self.is_mars or kind == "transport"
        found = self.algorithm(correction=Correction(kind=kind) if corrects else None)
        return sum(dims is None for dims in found.buffers.values())


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

REGISTRY: dict[str, NamedRule] = {rule.name: rule for rule in RULES}


def canonical(name: str) -> str:
    """Return a name as the registry writes it: "MARS_AdamW" is "mars-adamw"."""
    return name.lower().replace("_", "-")


def named(mars_type: str) -> NamedRule:
    """Return the rule that ``mars_type`` names, in any spelling of ``canonical``.

    Raises:
        ValueError: there is none.
    """
    name = canonical(str(mars_type))
    if name not in REGISTRY:
        close = get_close_matches(name, REGISTRY, n=1)
        meant = f"did you mean {close[0]!r}?" if close else "choose one of these names"
        raise ValueError(
            f"got mars_type={mars_type!r}, expected one of {tuple(REGISTRY)}: {meant}"
        )
    return REGISTRY[name]
