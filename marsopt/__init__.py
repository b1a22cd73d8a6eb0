"""MARS: variance reduction for preconditioned optimizers, faithful to its authors,
functional, compiled, sharded.
"""

from typing import TYPE_CHECKING

from marsopt.functional.named import mars, rule
from marsopt.functional.rule import Rule
from marsopt.functional.trees import FlatGroup
from marsopt.interop.torch_optim import to_torch
from marsopt.models.for_model import for_model, rule_for
from marsopt.models.param_groups import param_groups
from marsopt.optim.mars import MARS
from marsopt.rules.adamw import AdamW
from marsopt.rules.component import Algorithm, Correction
from marsopt.rules.lion import Lion, SignAverage
from marsopt.rules.mars import Approximate, Exact
from marsopt.rules.matrices import Matrices
from marsopt.rules.newton_schulz import NewtonSchulz, newton_schulz, polar_factor
from marsopt.rules.normuon import NorMuon
from marsopt.rules.orthogonal import Orthogonal
from marsopt.rules.registry import REGISTRY, NamedRule, register
from marsopt.rules.soap import SOAP
from marsopt.step.owners import LOCAL, Collectives
from marsopt.version import __version__

if TYPE_CHECKING:
    from marsopt.profiling.profiler import profile

__all__ = [
    "LOCAL",
    "MARS",
    "REGISTRY",
    "SOAP",
    "AdamW",
    "Algorithm",
    "Approximate",
    "Collectives",
    "Correction",
    "Exact",
    "FlatGroup",
    "Lion",
    "Matrices",
    "NamedRule",
    "NewtonSchulz",
    "NorMuon",
    "Orthogonal",
    "Rule",
    "SignAverage",
    "__version__",
    "for_model",
    "mars",
    "newton_schulz",
    "param_groups",
    "polar_factor",
    "profile",
    "register",
    "rule",
    "rule_for",
    "to_torch",
]


if not TYPE_CHECKING:  # to a type checker no name is any name

    def __getattr__(name: str) -> object:
        """Load the profiler on first access: no training needs it."""
        if name != "profile":
            raise AttributeError(f"module 'marsopt' has no attribute {name!r}")
        from marsopt.profiling.profiler import profile

        return profile
