"""Contenders of research.log_time: methods with one setting of everything but the
learning rate.
"""

from __future__ import annotations

from dataclasses import dataclass

from configs.published import TRANSPORT_GAMMA
from research.studies import (
    ELEMENTWISE,
    MATRICES,
    SHORT,
    SMALL_BEST,
    TRANSPORT,
    Recipe,
)

OMEGA = 4.0  # ADANA's

LOG = {"log_time": 10}
FALLING = {"falling_weight": 0.85}
WEIGHT = 0.2
GROWING: Recipe = dict(beta1=LOG, beta2=LOG)  # AdamW's two
BESIDE: Recipe = dict(betas_1d=[LOG, LOG], nesterov_1d=WEIGHT)  # of a matrix rule

ADAMW = ELEMENTWISE | dict(rule="adamw")
# of hidden matrices, as ADANA's; any weight_decay but 0 says that they have one
FALLING_DECAY: Recipe = dict(rule="adamw", weight_decay=0.1, decay_omega=OMEGA)
MOONLIGHT = MATRICES | dict(rule="moonlight")
SOAP = MATRICES | SHORT | dict(rule="soap-muon")
FOR_MODEL: Recipe = dict(rule="moonlight", gamma=TRANSPORT_GAMMA) | TRANSPORT


@dataclass(frozen=True)
class Contender:
    """A method, and the learning rate around which small's search begins."""

    recipe: Recipe
    lr: float


def _memories(base: Recipe, lr: float) -> dict[str, Contender]:
    """Return a matrix rule by the memory of its matrices, beside AdamW in log time."""
    memories: dict[str, Recipe] = {
        "0.95": dict(beta1=0.95),
        "0.95, weight 0.1": dict(beta1=0.95, nesterov=0.1),
        "log time, weight 0.1": dict(beta1=LOG, nesterov=0.1),
        "log time, weight 0.2": dict(beta1=LOG, nesterov=WEIGHT),
        "log time to 0.95, weight 0.1": dict(beta1=LOG | {"cap": 0.95}, nesterov=0.1),
        "log time to 0.98, weight 0.2": dict(
            beta1=LOG | {"cap": 0.98}, nesterov=WEIGHT
        ),
    }
    if base["rule"] == SOAP["rule"]:  # second moments grow along, factors do not
        memories = {
            name: memory | dict(beta2=memory["beta1"], shampoo_beta=0.95)
            for name, memory in memories.items()
        }
    return {
        name: Contender(base | BESIDE | memory, lr) for name, memory in memories.items()
    }


ELEMENT_LR, ADANA_LR, MATRIX_LR = 0.0131, 0.0032, 0.0175
# Of each contender several variants: those of CHOICES are tried by the two studies
# log_time_choice, and the one with the lowest mean loss is held everywhere.
CHOICES: dict[str, dict[str, Contender]] = {
    "AdamW, log time": {
        "weight 0.2": Contender(ADAMW | GROWING | dict(nesterov=WEIGHT), ELEMENT_LR),
        "falling weight": Contender(
            ADAMW | GROWING | dict(nesterov=FALLING), ELEMENT_LR
        ),
    },
    "ADANA": {
        "as printed": Contender(dict(rule="adana"), ADANA_LR),
        "as their code": Contender(dict(rule="adana-code"), ADANA_LR),
    },
    "Moonlight, log time": _memories(MOONLIGHT, MATRIX_LR),
    "SOAP-Muon, log time": _memories(SOAP, MATRIX_LR),
}


def _best(title: str) -> Recipe:
    """Return a control's decay and gamma of small's search."""
    _, beta1, *gamma = SMALL_BEST[title]
    return dict(beta1=beta1) | (dict(gamma=gamma[0]) if gamma else {})


TODAY: dict[str, Contender] = {
    "for_model": Contender(FOR_MODEL, MATRIX_LR),
    "Moonlight": Contender(MOONLIGHT | dict(beta1=0.95), MATRIX_LR),
    "transport": Contender(
        ELEMENTWISE | TRANSPORT | dict(rule="mars-adamw") | _best("transport"),
        ELEMENT_LR,
    ),
    "NAdamW": Contender(
        ELEMENTWISE | dict(rule="nadamw") | _best("NAdamW"), ELEMENT_LR
    ),
}
AHEAD: dict[str, Contender] = {
    "AdamW, log time, transport": Contender(
        ELEMENTWISE | TRANSPORT | GROWING | dict(rule="mars-adamw", gamma=0.2),
        ELEMENT_LR,
    ),
}
# at small alone: what shows where a difference comes from, and two more controls
CONTROLS: dict[str, Contender] = {
    "AdamW": Contender(ADAMW | dict(beta1=0.8778), ELEMENT_LR),
    "AdamW, falling decay": Contender(
        FALLING_DECAY | dict(beta1=0.8778, beta2=0.99), ELEMENT_LR
    ),
    "AdamW, log time, falling decay": Contender(
        FALLING_DECAY | GROWING | dict(nesterov=WEIGHT), ELEMENT_LR
    ),
    "NAdamW, log time": Contender(
        ELEMENTWISE | GROWING | dict(rule="nadamw"), ELEMENT_LR
    ),
    "SOAP-Muon": Contender(SOAP | dict(beta1=0.9203), MATRIX_LR),
    "SOAP-Muon, transport": Contender(
        MATRICES
        | SHORT
        | TRANSPORT
        | dict(rule="mars-soap-muon", beta1=0.8778, gamma=0.2022),
        MATRIX_LR,
    ),
}
# Issue of lr_1d: a quarter of lr has lost with a head of its own
RATIOS: dict[str, Contender] = {
    f"for_model, lr_1d {ratio:g} lr": Contender(
        FOR_MODEL | dict(lr_1d_ratio=ratio), MATRIX_LR
    )
    for ratio in (0.25, 0.5)
}


def variants(*contenders: str) -> dict[str, Contender]:
    """Return all variants of contenders, by "contender: variant"."""
    return {
        f"{contender}: {name}": found
        for contender in contenders
        for name, found in CHOICES[contender].items()
    }


# What runs at small whatever is chosen, at all three lengths
FIXED = "Moonlight, log time: log time, weight 0.2"
SMALL_ROWS = variants("AdamW, log time", "ADANA") | CONTROLS
SMALL_ROWS |= {FIXED: variants("Moonlight, log time")[FIXED]}
