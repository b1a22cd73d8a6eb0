"""MARS: variance reduction for preconditioned optimizers, faithful to its authors,
functional, compiled, sharded.
"""

from marsopt.collectives import LOCAL, Collectives
from marsopt.flat import FlatGroup
from marsopt.newton_schulz import NewtonSchulz, newton_schulz, polar_factor
from marsopt.optimizer import MARS
from marsopt.profile import profile
from marsopt.routing import mars
from marsopt.rule import Rule
from marsopt.rules.adamw import AdamW as adamw
from marsopt.rules.lion import Lion as lion
from marsopt.rules.mars_adamw import MarsAdamW as mars_adamw
from marsopt.rules.mars_lion import MarsLion as mars_lion
from marsopt.rules.mars_m import MarsM as mars_m
from marsopt.rules.mars_shampoo import MarsShampoo as mars_shampoo
from marsopt.rules.moonlight import Moonlight as moonlight
from marsopt.rules.muon import Muon as muon

__all__ = [
    "LOCAL",
    "MARS",
    "Collectives",
    "FlatGroup",
    "NewtonSchulz",
    "Rule",
    "adamw",
    "lion",
    "mars",
    "mars_adamw",
    "mars_lion",
    "mars_m",
    "mars_shampoo",
    "moonlight",
    "muon",
    "newton_schulz",
    "polar_factor",
    "profile",
]
