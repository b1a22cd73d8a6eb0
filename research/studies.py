"""Studies of ``python -m research.compare``: what is compared, how, by how many trials.

research/study.md has the questions, and what came of them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from configs.published import LR, ONE_RATE, RULES, SIZES
from research.compare.plain import Setting
from research.compare.search import Axis
from research.compare.store import Store
from research.compare.study import Method, Study

__all__ = ["batch", "gpu", "gpu_swept", "small", "storage", "tiny"]
Recipe = dict[str, Any]

STORES = Path(__file__).parent / "study"
KINDS = ("fine_tuning", "small", "warm_up")

# The space that draws come from, the same for all methods of one kind; searches go
# beyond it.
RATES = Axis("lr", 2e-3, 3.2e-2)  # of elementwise rules
MATRIX_RATES = Axis("lr", 4e-3, 6.4e-2)
BETA1 = Axis("beta1", 0.6, 0.98, decay=True)
GAMMA = Axis("gamma", 0.0125, 0.4)

ELEMENTWISE: Recipe = dict(one_rate=True, weight_decay=0.1, beta2=0.99)
MATRICES: Recipe = dict(weight_decay=0.1, beta2=0.95)
SHORT: Recipe = dict(sides="short")

LOG, WEIGHT = {"log_time": 10}, 0.2
BESIDE: Recipe = dict(betas_1d=[LOG, LOG], nesterov_1d=WEIGHT)

MOONLIGHT, GROWING = "Moonlight", "Moonlight, log time"
MARS: Recipe = ELEMENTWISE | dict(rule="mars-adamw", beta1=0.95, gamma=0.025)
SOAP: Recipe = MATRICES | SHORT | dict(rule="soap-muon")
# with the learning rate around which small's search begins
CONTENDERS: dict[str, tuple[Recipe, float]] = {
    MOONLIGHT: (MATRICES | dict(rule="moonlight", beta1=0.95), 0.0175),
    GROWING: (
        MATRICES | BESIDE | dict(rule="moonlight", beta1=LOG, nesterov=WEIGHT),
        0.02625,
    ),
}
CONTROLS: dict[str, tuple[Recipe, float]] = {
    "SOAP-Muon": (SOAP | dict(beta1=0.9203), 0.0175),
    "SOAP-Muon, log time": (
        SOAP | BESIDE | dict(beta1=LOG, beta2=LOG, nesterov=WEIGHT),
        0.0175,
    ),
    "NAdamW": (ELEMENTWISE | dict(rule="nadamw", beta1=0.914), 0.0087),
    "AdamW": (ELEMENTWISE | dict(rule="adamw", beta1=0.8778), 0.0087),
    "MARS-AdamW": (MARS, 0.0087),
    "torch Muon": (MATRICES | dict(rule="torch-muon", beta1=0.95), 0.0175),
    "MARS-M": (MATRICES | dict(rule="mars-m", beta1=0.95, gamma=0.025), 0.0175),
}
EXACT: dict[str, tuple[Recipe, float]] = {
    "MARS-AdamW, exact": (MARS | dict(correction="exact"), 0.0087)
}

# searches by seeds of no judgement: three learning rates, more if the best is at an end
FACTOR, TRIALS, DRAWS, SEARCH_SEEDS = 1.5, 6, 3, (9, 10)
SEEDS, MORE_SEEDS = 4, 8  # at the best point; more for what the questions turn on
SMALL_MOONLIGHT_LR = 0.0175  # the best of small


def stored(name: str) -> Store:
    """Return the store of a study that git keeps: studies of one of KINDS share a
    file.
    """
    kinds = [kind for kind in KINDS if name.startswith(f"{kind}_")]
    return Store(STORES / f"{(kinds or [name])[0]}.jsonl", name)


def sized(layers: int, width: int, heads: int, batch: int, steps: int) -> Setting:
    return Setting(
        layers=layers,
        width=width,
        heads=heads,
        vocab_size=257,
        data="data/python",
        seq_len=128,
        batch=batch,
        steps=steps,
        warmup=0.1,
        floor=0.1,
        held_out=512,
    )


SMALL = sized(2, 64, 4, batch=8, steps=1920)  # 98,304 weights beside embeddings


# GPT-2 small, 131,072 tokens a step
GPU = Setting(
    layers=12,
    width=768,
    heads=12,
    vocab_size=50304,
    inverse_layer_scale=True,
    data="data/packages",
    seq_len=1024,
    batch=128,
    micro_batch=32,
    steps=763,
    floor=0.05,
    held_out=512,
    points=20,
    device="cuda",
    dtype="bfloat16",
    compile=True,
)


def around(lr: float) -> tuple[Axis, ...]:
    """Return the axis of a search that begins with three learning rates."""
    return (Axis("lr", lr / FACTOR, lr * FACTOR, factor=FACTOR, start=lr),)


# The authors' recipe of GPT-2: the rule has embeddings too, without decay, and AdamW
# has LayerNorms at half the learning rate. MARS has these as well, with one learning
# rate and one decay.
AS_SHIPPED: Recipe = MARS | dict(one_rate=False, weight_decay=0.01)
AS_SHIPPED |= dict(lr_1d_ratio=0.5, weight_decay_1d=0.1)
NO_WARM_UP: Recipe = dict(warmup=0.0)  # best for these in warm_up's studies
MATRIX_STARTS = (0.0175, 0.0263, 0.0263, 0.0263)
BATCHES: dict[str, Recipe] = {
    "1k": {},
    "4k": dict(batch=32),
    "16k": dict(batch=128),
    "64k": dict(batch=512, steps=480),
}
# by title: recipe, its control, and where its searches begin at each of BATCHES
AT_BATCHES: dict[str, tuple[Recipe, str, tuple[float, ...]]] = {
    "AdamW": (CONTROLS["AdamW"][0], "AdamW", (0.0058, 0.0087, 0.0131, 0.0131)),
    "MARS-AdamW": (AS_SHIPPED, "AdamW", (0.0087, 0.0196, 0.0196, 0.0196)),
    "MARS-AdamW, all tensors": (MARS, "AdamW", (0.0131, 0.0196, 0.0196, 0.0196)),
    "NAdamW": (CONTROLS["NAdamW"][0], "AdamW", (0.0087, 0.0087, 0.0131, 0.0131)),
    MOONLIGHT: (CONTENDERS[MOONLIGHT][0] | NO_WARM_UP, "NAdamW", MATRIX_STARTS),
    "torch Muon": (CONTROLS["torch Muon"][0] | NO_WARM_UP, MOONLIGHT, MATRIX_STARTS),
    "MARS-M": (CONTROLS["MARS-M"][0] | NO_WARM_UP, MOONLIGHT, MATRIX_STARTS),
    "SOAP-Muon, log time": (
        CONTROLS["SOAP-Muon, log time"][0] | NO_WARM_UP,
        MOONLIGHT,
        4 * (0.0263,),
    ),
    "MARS-AdamW, exact": (EXACT["MARS-AdamW, exact"][0], "AdamW", 4 * (0.0131,)),
}


def batch() -> Study:
    """0.1M parameters by 1k to 64k tokens a step: does MARS pay with the batch?"""
    methods = {}
    for title, (recipe, control, rates) in AT_BATCHES.items():
        for (size, own), lr in zip(BATCHES.items(), rates, strict=True):
            methods[f"{title}, {size}"] = Method(
                recipe | own,
                around(lr),
                num_seeds=3 if size in ("16k", "64k") else 5,
                control=f"{control}, {size}",
                search_seeds=None if size == "1k" else SEARCH_SEEDS[:1],
            )
    return Study(
        title="0.1M parameters, by tokens a step",
        setting=replace(SMALL, steps=960, micro_batch=8),
        methods=methods,
        trials=TRIALS,
        num_draws=DRAWS,
        search_seeds=SEARCH_SEEDS,
        halve=False,
    )


def small() -> Study:
    """0.1M parameters, 20 tokens each, searched by one seed."""
    elementwise, matrices = (RATES, BETA1), (MATRIX_RATES, BETA1)
    own = dict(control="Moonlight")
    soap = MATRICES | SHORT | dict(rule="soap-muon")
    return Study(
        title="0.1M parameters, 20 tokens each",
        setting=SMALL,
        methods={
            "NAdamW": Method(
                ELEMENTWISE | dict(rule="nadamw"), elementwise, MORE_SEEDS
            ),
            "AdamW": Method(ELEMENTWISE | dict(rule="adamw"), elementwise, SEEDS),
            "MARS, approximate": Method(
                ELEMENTWISE | dict(rule="mars-adamw"), (*elementwise, GAMMA), SEEDS
            ),
            "Moonlight": Method(
                MATRICES | dict(rule="moonlight"), matrices, MORE_SEEDS, **own
            ),
            "SOAP-Muon": Method(soap, matrices, MORE_SEEDS, **own),
        },
        trials=20,
        num_draws=8,
    )


def storage() -> Study:
    """Weights and averages in fewer bits, beside float32 and a null: float32 whose
    first weights differ in their last bit.
    """
    half: Recipe = dict(weights="bfloat16")
    formats: dict[str, Recipe] = {
        "float32": {},
        "null": dict(perturb=True),
        "bf16 weights": half | dict(state_dtype="float32"),
        "32 bits": half | dict(master_weight_bits=32),
        "24 bits": half | dict(master_weight_bits=24),
        "int8": dict(state_dtype="int8"),
        "24 bits, int8": half | dict(master_weight_bits=24, state_dtype="int8"),
        "bf16 state": dict(state_dtype="bfloat16", stochastic_rounding=True),
    }
    rules: dict[str, Recipe] = {
        "AdamW": CONTROLS["AdamW"][0] | dict(lr=0.0087, beta2=0.999),
        MOONLIGHT: CONTENDERS[MOONLIGHT][0] | NO_WARM_UP | dict(lr=SMALL_MOONLIGHT_LR),
        GROWING: CONTENDERS[GROWING][0] | NO_WARM_UP | dict(lr=CONTENDERS[GROWING][1]),
        "MARS-AdamW": AS_SHIPPED | dict(lr=0.0087),
    }
    methods = {
        f"{name}, {stored_in}": Method(
            recipe | bits, num_seeds=5, control=f"{name}, float32"
        )
        for name, recipe in rules.items()
        for stored_in, bits in formats.items()
    }
    return Study(title="0.1M parameters, by bits", setting=SMALL, methods=methods)


def tiny() -> Study:
    """Recipes of configs.tiny, by torchtitan: rates and beta1."""
    from research.compare.recipes import Setting as Recipes  # torchtitan with it

    rates = {
        "tiny_nadamw": (3e-3, 1.2e-2),
        "tiny_adamw": (2e-3, 8e-3),
        "tiny_mars_adamw": (3e-3, 1.2e-2),
        "tiny_moonlight": (6e-3, 2.4e-2),
    }
    methods = {
        name: Method(dict(config=name), (Axis("lr", *ends), BETA1))
        for name, ends in rates.items()
    }
    return Study(
        title="recipes of configs.tiny, 0.84M parameters",
        setting=Recipes(steps=750),
        methods=methods,
        trials=9,
        num_draws=3,
    )


def published(name: str, size: str = "small", lr: float | None = None) -> Recipe:
    """Return a rule's recipe at the numbers of configs.published.

    Args:
        name: of a rule, with "-exact" behind it for that correction, or "torch-adamw",
            clip_grad_norm_ and torch's fused AdamW.
        size: of the GPT-2.
        lr: where no recipe has one for this size.
    """
    rule, recipe = name, {}
    if name.endswith("-exact"):
        rule, recipe = name.removesuffix("-exact"), dict(correction="exact")
    key = "adamw" if rule == "torch-adamw" else _key(rule)
    row, rate = RULES[key], LR[key][size] if lr is None else lr
    beta1, beta2 = row.betas
    recipe |= dict(rule=rule, lr=rate, beta1=beta1, beta2=beta2)
    recipe |= dict(weight_decay=row.matrices)
    if key not in ONE_RATE:
        ratio = SIZES[size].lr_1d / rate
        recipe |= dict(lr_1d_ratio=ratio, weight_decay_1d=row.vectors)
    return recipe


def _key(rule: str) -> str:
    return rule.replace("-", "_")


COMPARED = ("torch-adamw", "moonlight", "mars-adamw", "mars-m")


def gpu() -> Study:
    """GPT-2 small, 100M tokens on one GPU, at the recipes' numbers."""
    return Study(
        title="GPT-2 small, 100M tokens",
        setting=GPU,
        methods={name: Method(published(name), num_seeds=1) for name in COMPARED},
    )


def gpu_swept() -> Study:
    """The same, 25M tokens and rates searched."""
    methods = {}
    for name in COMPARED:
        recipe = published(name)
        lr = recipe.pop("lr")
        axes = (Axis("lr", lr / 2, 2 * lr),)
        methods[name] = Method(recipe, axes, num_seeds=1)
    return Study(
        title="GPT-2 small, 25M tokens",
        setting=replace(GPU, steps=190),
        methods=methods,
        trials=4,
        num_draws=2,
    )
