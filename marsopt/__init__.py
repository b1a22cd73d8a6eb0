"""MARS: variance reduction for preconditioned optimizers, faithful to its authors,
functional, compiled, sharded.
"""

from marsopt.functional.collectives import LOCAL, Collectives
from marsopt.functional.flat import FlatGroup
from marsopt.functional.named import (
    adamw,
    lion,
    mars_adamw,
    mars_lion,
    mars_m,
    mars_normuon,
    mars_shampoo,
    moonlight,
    muon,
    nadamw,
    normuon,
)
from marsopt.functional.routing import mars
from marsopt.functional.rule import Rule
from marsopt.optim.mars import MARS
from marsopt.optim.param_groups import param_groups
from marsopt.profiling.profiler import profile
from marsopt.rules.adamw import AdamW
from marsopt.rules.algorithm import Algorithm
from marsopt.rules.correction import Correction
from marsopt.rules.lion import Lion, SignAverage
from marsopt.rules.matrices import Matrices
from marsopt.rules.newton_schulz import NewtonSchulz, newton_schulz, polar_factor
from marsopt.rules.normuon import NorMuon
from marsopt.rules.orthogonal import Orthogonal
from marsopt.rules.registry import REGISTRY
from marsopt.version import __version__

__all__ = [
    "LOCAL",
    "MARS",
    "REGISTRY",
    "AdamW",
    "Algorithm",
    "Collectives",
    "Correction",
    "FlatGroup",
    "Lion",
    "Matrices",
    "NewtonSchulz",
    "NorMuon",
    "Orthogonal",
    "Rule",
    "SignAverage",
    "__version__",
    "adamw",
    "lion",
    "mars",
    "mars_adamw",
    "mars_lion",
    "mars_m",
    "mars_normuon",
    "mars_shampoo",
    "moonlight",
    "muon",
    "nadamw",
    "newton_schulz",
    "normuon",
    "param_groups",
    "polar_factor",
    "profile",
]
