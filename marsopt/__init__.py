"""MARS: variance reduction for preconditioned optimizers, faithful to its authors,
functional, compiled, sharded.
"""

from marsopt.functional.collectives import LOCAL, Collectives
from marsopt.functional.flat import FlatGroup
from marsopt.functional.named import FACTORIES, mars
from marsopt.functional.rule import Rule
from marsopt.optim.mars import MARS
from marsopt.profiling.profiler import profile
from marsopt.rules.algorithm import Algorithm
from marsopt.rules.correction import Correction
from marsopt.rules.matrices import Matrices
from marsopt.rules.newton_schulz import NewtonSchulz, newton_schulz, polar_factor
from marsopt.rules.registry import REGISTRY

# mars_adamw, mars_lion, adamw, ...: one for each name in the registry
globals().update(FACTORIES)

__all__ = [
    "LOCAL",
    "MARS",
    "REGISTRY",
    "Algorithm",
    "Collectives",
    "Correction",
    "FlatGroup",
    "Matrices",
    "NewtonSchulz",
    "Rule",
    "mars",
    "newton_schulz",
    "polar_factor",
    "profile",
    *FACTORIES,
]
