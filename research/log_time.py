"""Studies of memory that grows with the run: one table of contenders, one of settings.

    python -m research.compare log_time_1920 --module research.log_time \
        --store research/study/log_time.jsonl --only runs

research/study.md ("Memory that grows: predictions") has the questions and the rule by
which ``python -m research.decide`` judges. Every contender has one setting of
everything but the learning rate, which is searched by three points a factor of 1.5
apart, and by more where the best stands at an edge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from configs.published import TRANSPORT_GAMMA
from research.compare.plain import Setting
from research.compare.search import Axis
from research.compare.study import Method, Study
from research.studies import (
    ELEMENTWISE,
    MATRICES,
    SHORT,
    SMALL,
    SMALL_BEST,
    TRANSPORT,
    Recipe,
    sized,
)

__all__ = [
    "log_time_480",
    "log_time_1920",
    "log_time_7680",
    "log_time_batch_four",
    "log_time_batch_quarter",
    "log_time_bpe",
    "log_time_large",
    "log_time_middle",
    "log_time_prose",
    "log_time_rates",
    "log_time_three_million",
    "log_time_to_zero",
    "log_time_untied",
]
FACTOR, TRIALS = 1.5, 5  # between learning rates; most of them
BETAS = (0.8, 0.95, 0.9875)  # of log_time_rates: a factor of four in age between them
SPARE_SEEDS = (9, 10)  # of no judgement
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


ELEMENT_LR, ADANA_LR, MATRIX_LR = 0.0131, 0.0032, 0.0175
HELD: dict[str, Contender] = {
    "AdamW, log time": Contender(ADAMW | GROWING | dict(nesterov=WEIGHT), ELEMENT_LR),
    "AdamW, log time, transport": Contender(
        ELEMENTWISE | TRANSPORT | GROWING | dict(rule="mars-adamw", gamma=0.2),
        ELEMENT_LR,
    ),
    "ADANA": Contender(dict(rule="adana-code"), ADANA_LR),
    "Moonlight, log time": Contender(
        MOONLIGHT | BESIDE | dict(beta1=LOG, nesterov=WEIGHT), MATRIX_LR
    ),
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
# at small alone: what shows where a difference comes from, and two more controls
CONTROLS: dict[str, Contender] = {
    "AdamW, log time, falling weight": Contender(
        ADAMW | GROWING | dict(nesterov=FALLING), ELEMENT_LR
    ),
    "ADANA, as printed": Contender(dict(rule="adana"), ADANA_LR),
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


# ---- where they are compared ---------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A setting of the comparison.

    Args:
        title: in words.
        setting: how runs go.
        scale: of small's learning rates.
        num_seeds: of the judgement.
        more: contenders of this place alone.
        only: titles that run here; None = all of TODAY and HELD.
        stored: study whose store has the searched controls of this setting.
    """

    title: str
    setting: Setting
    scale: float = 1.0
    num_seeds: int = 4
    more: Mapping[str, Contender] = field(default_factory=dict)
    only: Sequence[str] | None = None
    stored: str | None = None


def _small(said: str, **changes: object) -> tuple[str, Setting]:
    return f"0.1M parameters, {said}", replace(SMALL, **changes)


# In the order in which they decide
PLACES: dict[str, Place] = {
    "1920": Place(
        *_small("1,920 steps"),
        num_seeds=8,
        more=CONTROLS | {k: v for k, v in RATIOS.items() if "0.25" in k},
        stored="small",
    ),
    "480": Place(
        *_small("480 steps", steps=480),
        num_seeds=8,
        more=CONTROLS,
        stored="defaults_480",
    ),
    "7680": Place(
        *_small("7,680 steps", steps=7680), 0.7, more=CONTROLS, stored="small_long"
    ),
    "batch_quarter": Place(
        *_small("a quarter of the batch", batch=2, steps=7680),
        0.5,
        stored="batch_quarter",
    ),
    "batch_four": Place(
        *_small("four times the batch", batch=32, steps=480), 0.7, stored="batch_four"
    ),
    "to_zero": Place(
        *_small("rate linear to zero", schedule="linear", floor=0.0), stored="to_zero"
    ),
    "prose": Place(*_small("prose", data="data/prose"), stored="prose"),
    "bpe": Place(
        *_small("BPE", data="data/python_bpe", vocab_size=1024), 0.8, stored="bpe"
    ),
    "untied": Place(*_small("untied head", tied=False), more=RATIOS),
    "middle": Place(
        "0.3M parameters",
        sized(3, 96, 3, batch=16, steps=3240),
        0.7,
        stored="middle",
    ),
    "large": Place(
        "0.8M parameters", sized(4, 128, 4, batch=32, steps=3840), 0.6, num_seeds=3
    ),
    "three_million": Place(
        "3M parameters, 5 tokens each",
        sized(5, 224, 7, batch=64, steps=1920),
        0.45,
        num_seeds=2,
        only=("for_model", "Moonlight", "AdamW, log time", "Moonlight, log time"),
    ),
}


def study(name: str) -> Study:
    """Return the study of a place: today's defaults, and the contenders."""
    place = PLACES[name]
    contenders = {**TODAY, **HELD, **place.more}
    if place.only is not None:
        contenders = {t: c for t, c in contenders.items() if t in place.only}
    methods = {
        title: _method(contender, place.scale, place.num_seeds)
        for title, contender in contenders.items()
    }
    return _searched(place.title, place.setting, methods)


def rates() -> Study:
    """Return the study of Moonlight's learning rate by the memory of its matrices."""
    place = PLACES["480"]
    memories: dict[str, Recipe] = {f"{beta1}": dict(beta1=beta1) for beta1 in BETAS}
    memories["log time"] = dict(beta1=LOG, nesterov=WEIGHT)
    methods = {
        f"Moonlight, {title}": _method(
            Contender(MOONLIGHT | BESIDE | memory, MATRIX_LR), 1.0, num_seeds=0
        )
        for title, memory in memories.items()
    }
    made = _searched(f"{place.title}, memories", place.setting, methods)
    return replace(made, search_seeds=SPARE_SEEDS)


def _method(contender: Contender, scale: float, num_seeds: int) -> Method:
    start = float(f"{contender.lr * scale:.3g}")
    ends = start / FACTOR, start * FACTOR
    axis = Axis("lr", *ends, factor=FACTOR, start=start)
    return Method(contender.recipe, (axis,), num_seeds)


def _searched(title: str, setting: Setting, methods: dict[str, Method]) -> Study:
    return Study(
        title=title, setting=setting, methods=methods, trials=TRIALS, halve=False
    )


log_time_rates = rates
log_time_480 = partial(study, "480")
log_time_1920 = partial(study, "1920")
log_time_7680 = partial(study, "7680")
log_time_batch_quarter = partial(study, "batch_quarter")
log_time_batch_four = partial(study, "batch_four")
log_time_to_zero = partial(study, "to_zero")
log_time_prose = partial(study, "prose")
log_time_bpe = partial(study, "bpe")
log_time_untied = partial(study, "untied")
log_time_middle = partial(study, "middle")
log_time_large = partial(study, "large")
log_time_three_million = partial(study, "three_million")
