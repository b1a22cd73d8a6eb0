"""Studies of contenders beside their strongest controls, each at its best warm-up.

    python -m research.compare warm_up_1920 --module research.warm_up \\
        --store research/study/warm_up.jsonl --only runs

research/study.md ("What pays, beside its strongest control") has the questions, and the
rule by which ``python -m research.decide`` judges. A learning rate is searched by two
seeds that judge nothing: three points a factor of 1.5 apart, and more where the best
stands at an edge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from research.compare.plain import Setting
from research.compare.study import Method, Study
from research.studies import (
    CONTENDERS,
    CONTROLS,
    DRAWS,
    EXACT,
    SEARCH_SEEDS,
    SMALL,
    TRIALS,
    Recipe,
    around,
    sized,
)

__all__ = [
    "warm_up_480",
    "warm_up_960",
    "warm_up_1920",
    "warm_up_7680",
    "warm_up_batch_quarter",
    "warm_up_bpe",
    "warm_up_middle",
    "warm_up_prose",
    "warm_up_ten_million",
]
# by the end of a title; the setting's own is a tenth of the steps
WARM_UPS: dict[str, Recipe] = {
    "": {},
    ", 2% warm-up": dict(warmup=0.02),
    ", no warm-up": dict(warmup=0.0),
}
# of each method; NAdamW of what is not here
CONTROL_OF = {
    "Moonlight, log time": "Moonlight",
    "SOAP-Muon": "Moonlight",
    "torch Muon": "Moonlight",
    "MARS-M": "Moonlight",
    "SOAP-Muon, log time": "SOAP-Muon",
}
# which takes two gradients a step: its control has twice the steps
HALF, WHOLE = "960", "1920"


@dataclass(frozen=True)
class Place:
    """A setting of the comparison.

    Args:
        title: in words.
        setting: how runs go.
        rates: where the search of CONTENDERS begins, in their order; None = as at
            small.
        more: other methods, with small's learning rates.
        num_seeds: of the judgement.
        trials, draws: of a search.
        is_judged: whether the rule counts it.
    """

    title: str
    setting: Setting
    rates: Sequence[float] | None = None
    more: Mapping[str, tuple[Recipe, float]] | None = None
    num_seeds: int = 4
    trials: int = TRIALS
    draws: int = DRAWS
    is_judged: bool = True

    @property
    def contenders(self) -> dict[str, tuple[Recipe, float]]:
        """Return what is compared, with its first learning rate."""
        pairs = CONTENDERS.items()
        rates = self.rates or [lr for _, (_, lr) in pairs]
        zipped = zip(pairs, rates, strict=True)
        found = {title: (recipe, lr) for (title, (recipe, _)), lr in zipped}
        return found | dict(self.more or {})


def _small(said: str, **changes: object) -> tuple[str, Setting]:
    return f"0.1M parameters, {said}", replace(SMALL, **changes)


KNOWN = dict(more=CONTROLS, num_seeds=5, is_judged=False)
PLACES: dict[str, Place] = {
    "480": Place(*_small("480 steps", steps=480), **KNOWN),
    HALF: Place(*_small("960 steps", steps=960), **KNOWN | dict(more=EXACT)),
    WHOLE: Place(*_small("1,920 steps"), **KNOWN),
    "7680": Place(*_small("7,680 steps", steps=7680), (0.0123, 0.0175)),
    "batch_quarter": Place(
        *_small("a quarter of the batch", batch=2, steps=7680), (0.0082, 0.0117)
    ),
    "bpe": Place(
        *_small("BPE", data="data/python_bpe", vocab_size=1024), (0.0123, 0.0175)
    ),
    "middle": Place(
        "0.3M parameters", sized(3, 96, 3, batch=16, steps=3240), (0.0123, 0.0175)
    ),
    "prose": Place(*_small("prose", data="data/prose"), (0.0117, 0.0175)),
    "ten_million": Place(
        "10.6M parameters, 13M tokens",
        replace(
            sized(6, 384, 6, batch=32, steps=1600),
            data="data/packages_bpe",
            vocab_size=1024,
            seq_len=256,
            device="cuda",
            dtype="bfloat16",
            compile=True,
        ),
        (0.01275, 0.0191),  # the second draw is a factor below
        num_seeds=3,
        trials=2,
        draws=2,
    ),
}


def study(name: str) -> Study:
    """Return the study of a place: every contender at three warm-ups."""
    place, methods = PLACES[name], {}
    for title, (recipe, lr) in place.contenders.items():
        for end, warmup in WARM_UPS.items():
            own = around(lr), place.num_seeds
            methods[title + end] = Method(recipe | warmup, *own)
    return Study(
        title=place.title,
        setting=place.setting,
        methods=methods,
        trials=place.trials,
        num_draws=place.draws,
        search_seeds=SEARCH_SEEDS,
        halve=False,
    )


warm_up_480 = partial(study, "480")
warm_up_960 = partial(study, HALF)
warm_up_1920 = partial(study, WHOLE)
warm_up_7680 = partial(study, "7680")
warm_up_batch_quarter = partial(study, "batch_quarter")
warm_up_bpe = partial(study, "bpe")
warm_up_middle = partial(study, "middle")
warm_up_prose = partial(study, "prose")
warm_up_ten_million = partial(study, "ten_million")
