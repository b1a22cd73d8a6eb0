"""Studies of ``python -m research.compare``: what is compared, how, by how many trials.

research/study.md has the questions, and what came of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from configs.published import LR, ONE_RATE, RULES, SIZES, TRANSPORT_GAMMA
from research.compare import images
from research.compare.plain import Setting
from research.compare.search import Axis, Point
from research.compare.store import Store
from research.compare.study import Method, Study

__all__ = [
    "batch_four",
    "batch_four_long",
    "batch_quarter",
    "bf16_state",
    "bpe",
    "defaults",
    "defaults_480",
    "defaults_wide",
    "digits_convnet",
    "digits_vit",
    "gpu",
    "gpu_swept",
    "lr_1d",
    "middle",
    "prose",
    "small",
    "small_all",
    "small_long",
    "ten_million",
    "tiny",
    "to_zero",
    "width_32",
    "width_64",
    "width_128",
]
Recipe = dict[str, Any]

STORES = Path(__file__).parent / "study"
KINDS = ("batch", "defaults", "digits", "fine_tuning", "log_time", "small", "width")

# The space that draws come from, the same for all methods of one kind; searches go
# beyond it.
RATES = Axis("lr", 2e-3, 3.2e-2)  # of elementwise rules
MATRIX_RATES = Axis("lr", 4e-3, 6.4e-2)
BETA1 = Axis("beta1", 0.6, 0.98, decay=True)
GAMMA = Axis("gamma", 0.0125, 0.4)
# 1 - mu_y beside momentum inside: a search from GAMMA's draws stopped at beta1 0.37
WIDE_GAMMA = Axis("gamma", 0.1, 0.8)
SCALE = Axis("ema_nesterov", 0.1, 1.6)
OUTER = Axis("snoo", 0.1, 0.8, decay=True)  # momentum
BETA2 = Axis("beta2", 0.9, 0.999, decay=True)
DECAY = Axis("weight_decay", 0.0125, 0.4)
NU1 = Axis("nu1", 0.6, 0.9875, decay=True)  # 1 - nu1 where GAMMA has gamma

ELEMENTWISE: Recipe = dict(one_rate=True, weight_decay=0.1, beta2=0.99)
MATRICES: Recipe = dict(weight_decay=0.1, beta2=0.95)
TRANSPORT: Recipe = dict(correction="transport")
SHORT: Recipe = dict(sides="short")
MIXED: Recipe = dict(rule="two-averages", weight_decay=0.1, beta2=0.99)
MIXED |= dict(weight=0.5, age_ratio=5.0)

SEEDS, MORE_SEEDS = 4, 8  # at the best point; more for what the questions turn on


def stored(name: str) -> Store:
    """Return the store of a study that git keeps: studies of one of KINDS share a file,
    small_long has small.jsonl; every other study has its own.
    """
    kinds = [kind for kind in KINDS if name.startswith(f"{kind}_")]
    return Store(STORES / f"{(kinds or [name])[0]}.jsonl", name)


def elementwise() -> dict[str, Method]:
    """Return NAdamW, and the methods beside it."""
    axes = (RATES, BETA1)
    nadamw = ELEMENTWISE | dict(rule="nadamw")
    mars = ELEMENTWISE | dict(rule="mars-adamw")
    falling = mars | TRANSPORT | dict(gamma_follows_rate=True)
    adamw, ahead = ELEMENTWISE | dict(rule="adamw"), dict(control="transport")
    return {
        "NAdamW": Method(nadamw, axes, MORE_SEEDS),
        "transport": Method(mars | TRANSPORT, (*axes, GAMMA), MORE_SEEDS),
        "AdamW": Method(ELEMENTWISE | dict(rule="adamw"), axes, SEEDS),
        "MARS, approximate": Method(mars, (*axes, GAMMA), SEEDS),
        "QHAdamW": Method(ELEMENTWISE | dict(rule="qhadamw"), (*axes, NU1), MORE_SEEDS),
        "two averages": Method(MIXED, axes, SEEDS),
        "two averages, ahead": Method(MIXED, (*axes, GAMMA), SEEDS),
        "EMA-Nesterov on NAdamW": Method(nadamw, (*axes, SCALE), MORE_SEEDS),
        "SNOO on NAdamW": Method(nadamw, (*axes, OUTER), MORE_SEEDS),
        "transport, gamma with the rate": Method(falling, (*axes, GAMMA), SEEDS),
        # beta1 is mu_x, gamma 1 - mu_y
        "GPA on AdamW, beta1 0 inside": Method(
            adamw | dict(gpa=0.0), (*axes, GAMMA), MORE_SEEDS, **ahead
        ),
        "GPA on AdamW, beta1 0.9 inside": Method(
            adamw | dict(gpa=0.9), (*axes, WIDE_GAMMA), MORE_SEEDS, **ahead
        ),
        "SNOO on transport": Method(
            mars | TRANSPORT, (*axes, GAMMA, OUTER), MORE_SEEDS, **ahead
        ),
    }


def matrices() -> dict[str, Method]:
    """Return Moonlight, which has Nesterov's momentum, and SOAP-Muon, each with
    transport and other neighbours.
    """
    axes = (MATRIX_RATES, BETA1)
    moonlight, soap = MATRICES | dict(rule="moonlight"), MATRICES | SHORT
    ahead = moonlight | TRANSPORT
    soap_ahead = soap | TRANSPORT | dict(rule="mars-soap-muon")
    mars_m, beside = MATRICES | dict(rule="mars-m"), dict(beside="nadamw")
    mine, other = dict(control="Moonlight"), dict(control="SOAP-Muon")
    plain = Method(soap | dict(rule="soap-muon"), axes, MORE_SEEDS, **mine)
    return {
        "Moonlight": Method(moonlight, axes, MORE_SEEDS, **mine),
        "Moonlight, transport": Method(ahead, (*axes, GAMMA), MORE_SEEDS, **mine),
        "SOAP-Muon": plain,
        "SOAP-Muon, transport": Method(soap_ahead, (*axes, GAMMA), MORE_SEEDS, **other),
        "EMA-Nesterov on Moonlight": Method(
            moonlight, (*axes, SCALE), MORE_SEEDS, **mine
        ),
        "SNOO on Moonlight": Method(moonlight, (*axes, OUTER), MORE_SEEDS, **mine),
        "GPA on Moonlight, beta1 0.95 inside": Method(
            moonlight | dict(gpa=0.95),
            (*axes, WIDE_GAMMA),
            MORE_SEEDS,
            control="Moonlight, transport",
        ),
        "MONA on MARS-M": Method(
            moonlight | dict(nesterov=False, mona=0.975),
            (*axes, GAMMA),
            MORE_SEEDS,
            **mine,
        ),
        "MARS-M, approximate": Method(mars_m, (*axes, GAMMA), SEEDS, **mine),
        # whose embeddings have Nesterov's momentum too, as transport's look ahead
        "Moonlight, NAdamW beside": Method(
            moonlight | beside, axes, MORE_SEEDS, **mine
        ),
        "SOAP-Muon, NAdamW beside": Method(
            soap | dict(rule="soap-muon") | beside, axes, MORE_SEEDS, **other
        ),
    }


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


def small() -> Study:
    """0.1M parameters, 20 tokens each: elementwise rules and matrix rules."""
    return Study(
        title="0.1M parameters, 20 tokens each",
        setting=SMALL,
        methods=elementwise() | matrices(),
        trials=20,
        num_draws=8,
    )


def defaults() -> Study:
    """What ``marsopt.for_model`` builds, and that without transport: learning rates."""
    lr, _ = SMALL_BEST["Moonlight"]
    axes, plain = (Axis("lr", lr / 2**0.5, lr * 2**0.5),), dict(rule="moonlight")
    ahead = plain | TRANSPORT | dict(gamma=TRANSPORT_GAMMA)
    control = "Moonlight"
    return Study(
        title="0.1M parameters, 20 tokens each, for_model's defaults",
        setting=SMALL,
        methods={
            control: Method(plain, axes, MORE_SEEDS, control=control),
            "for_model": Method(ahead, axes, MORE_SEEDS, control=control),
        },
        trials=5,
    )


def defaults_480() -> Study:
    """The same in 480 steps."""
    return replace(defaults(), setting=replace(SMALL, steps=480))


def defaults_wide() -> Study:
    """The same at four times the weights and as many steps, beside small's best."""
    study = defaults()
    title = "Moonlight, transport"
    best = replace(_rates([title], 0.5**0.5, 2**0.5, SEEDS)[title], control="Moonlight")
    methods = {t: replace(m, num_seeds=SEEDS) for t, m in study.methods.items()}
    return replace(
        study,
        title="0.4M parameters, 5 tokens each, for_model's defaults",
        setting=sized(2, 128, 8, batch=8, steps=1920),
        methods=methods | {f"{title}, small's best": best},
        trials=3,
    )


def lr_1d() -> Study:
    """What for_model builds at the best learning rate of ``defaults``: that of AdamW's
    parameters tied to it, or searched.
    """
    recipe = dict(defaults().methods["for_model"].recipe, lr=0.02363)
    axes = (Axis("lr_1d_ratio", 0.5, 2.0),)
    methods = {
        "tied": Method(recipe, (), MORE_SEEDS),
        "lr_1d": Method(recipe, axes, MORE_SEEDS),
    }
    return Study(
        title="0.1M parameters, 20 tokens each, for_model's lr_1d",
        setting=SMALL,
        methods=methods,
        trials=6,
    )


def small_all() -> Study:
    """The same, NAdamW and transport, with decay and beta2 searched too."""
    axes = (BETA2, DECAY)
    chosen = ("NAdamW", "transport")
    methods = {
        name: Method(m.recipe, (*m.axes, *axes), m.num_seeds)
        for name, m in elementwise().items()
        if name in chosen
    }
    return Study(
        title="0.1M parameters, 20 tokens each, decay and beta2 searched",
        setting=SMALL,
        methods=methods,
        trials=40,
        num_draws=8,
    )


# What the searches of small found, from which those of other settings begin, and
# transport's where there is none
SMALL_BEST: dict[str, Point] = {
    "NAdamW": (0.0146, 0.914),
    "transport": (0.0131, 0.961, 0.205),
    "Moonlight": (0.0175, 0.960),
    "Moonlight, transport": (0.0175, 0.972, 0.0804),
    "QHAdamW": (0.0131, 0.961, 0.795),
}


FOUR = "NAdamW", "transport", "Moonlight", "Moonlight, transport"
TWO = FOUR[:2]


def _near(titles: Iterable[str], steps: float, num_seeds: int) -> dict[str, Method]:
    """Return methods of small whose space is so many steps around their best of it."""
    every, found = elementwise() | matrices(), {}
    for title in titles:
        method = every[title]
        axes = []
        for axis, value in zip(method.axes, SMALL_BEST[title], strict=True):
            place = axis.place(value)
            ends = axis.value(place - steps), axis.value(place + steps)
            axes.append(replace(axis, low=ends[0], high=ends[1]))
        found[title] = replace(method, axes=tuple(axes), num_seeds=num_seeds)
    return found


def _batch(said: str, batch: int) -> Study:
    """Return small with another batch, at equal tokens."""
    return Study(
        title=f"0.1M parameters, 20 tokens each, {said}",
        setting=replace(SMALL, batch=batch, steps=SMALL.steps * SMALL.batch // batch),
        methods=_near(TWO, 2.0, SEEDS),
        trials=14,
        num_draws=6,
    )


def batch_quarter() -> Study:
    """Small, with a quarter of the batch."""
    return _batch("a quarter of the batch", SMALL.batch // 4)


def batch_four() -> Study:
    """Small, with four times the batch."""
    return _batch("four times the batch", SMALL.batch * 4)


def batch_four_long() -> Study:
    """Small, with four times the batch at as many steps: four times the tokens."""
    return Study(
        title="0.1M parameters, 80 tokens each, four times the batch",
        setting=replace(SMALL, batch=4 * SMALL.batch),
        methods=_near(TWO, 1.0, SEEDS),
        trials=6,
        num_draws=4,
    )


def prose() -> Study:
    """Small, on prose (docs/data.md makes it)."""
    return Study(
        title="0.1M parameters, 20 tokens each, prose",
        setting=replace(SMALL, data="data/prose"),
        methods=_near(FOUR, 1.0, SEEDS),
        trials=10,
        num_draws=4,
    )


def bpe() -> Study:
    """Small, on a vocabulary of 1,024 (docs/data.md makes it)."""
    return Study(
        title="0.1M parameters, 20 tokens each, BPE",
        setting=replace(SMALL, data="data/python_bpe", vocab_size=1024),
        methods=_near(TWO, 1.0, 16),
        trials=10,
        num_draws=4,
    )


def small_long() -> Study:
    """Small, 80 tokens a parameter."""
    return Study(
        title="0.1M parameters, 80 tokens each",
        setting=replace(SMALL, steps=4 * SMALL.steps),
        methods=_near(TWO, 1.0, SEEDS),
        trials=14,
        num_draws=4,
    )


def to_zero() -> Study:
    """Small, with a rate that falls to zero in a straight line."""
    return Study(
        title="0.1M parameters, 20 tokens each, rate linear to zero",
        setting=replace(SMALL, schedule="linear", floor=0.0),
        methods=_near((*TWO, "QHAdamW"), 1.0, MORE_SEEDS),
        trials=14,
        num_draws=6,
    )


def middle() -> Study:
    """0.3M parameters, 20 tokens each."""
    return Study(
        title="0.3M parameters, 20 tokens each",
        setting=sized(3, 96, 3, batch=16, steps=3240),
        methods=_near(FOUR, 1.0, SEEDS),
        trials=10,
        num_draws=4,
    )


def _rates(
    titles: Iterable[str], low: float, high: float, num_seeds: int
) -> dict[str, Method]:
    """Return methods whose learning rate alone is searched, from ``low`` to ``high``
    times the best of small; their other hyperparameters are those of SMALL_BEST.
    """
    every, methods = elementwise() | matrices(), {}
    for title in titles:
        method, (lr, *rest) = every[title], SMALL_BEST[title]
        names = [axis.name for axis in method.axes[1:]]
        methods[title] = Method(
            dict(method.recipe) | dict(zip(names, rest, strict=True)),
            (Axis("lr", low * lr, high * lr),),
            num_seeds=num_seeds,
        )
    return methods


def _width(width: int) -> Study:
    """Search the learning rate."""
    return Study(
        title=f"width {width}, 0.5M tokens, learning rates",
        setting=sized(2, width, width // 16, batch=8, steps=480),
        methods=_rates(FOUR[1:], 0.5**0.5, 2**0.5, num_seeds=1),
        trials=6,
    )


def ten_million() -> Study:
    """10.6M parameters on one GPU, 13M tokens."""
    return Study(
        title="10.6M parameters, 13M tokens",
        setting=replace(
            sized(6, 384, 6, batch=32, steps=1600),
            seq_len=256,
            device="cuda",
            dtype="bfloat16",
            compile=True,
        ),
        methods=_rates(FOUR, 1 / 8, 1 / 2, SEEDS),
        trials=6,
        num_draws=3,
    )


def width_32() -> Study:
    """The learning rate of a model of width 32: is it that of a wider one?"""
    return _width(32)


def width_64() -> Study:
    """The same, twice as wide."""
    return _width(64)


def width_128() -> Study:
    """The same, four times as wide."""
    return _width(128)


def _digits(model: str) -> Study:
    """Return AdamW, NAdamW and Moonlight on images, each with transport and without."""
    rules = {
        "AdamW": (ELEMENTWISE | dict(rule="adamw"), RATES),
        "NAdamW": (ELEMENTWISE | dict(rule="nadamw"), RATES),
        "Moonlight": (
            MATRICES | dict(rule="moonlight", convolutions=True),
            MATRIX_RATES,
        ),
    }
    methods = {}
    for title, (recipe, lr) in rules.items():
        axes = (lr, BETA1)
        methods[title] = Method(recipe, axes, MORE_SEEDS)
        methods[f"{title}, transport"] = Method(
            recipe | TRANSPORT, (*axes, GAMMA), MORE_SEEDS, control=title
        )
    return Study(
        title=f"digits of 8 x 8 pixels, {model}",
        setting=images.Setting(model=model, steps=300),
        methods=methods,
        trials=10,
        num_draws=4,
        search_seeds=(0, 9),
    )


def digits_convnet() -> Study:
    """A convolutional net of 24,000 parameters on scikit-learn's digits."""
    return _digits("convnet")


def digits_vit() -> Study:
    """A ViT of 26,000 parameters on scikit-learn's digits."""
    return _digits("vit")


def bf16_state() -> Study:
    """State in float32, in bfloat16 rounded stochastically, and to nearest."""
    kept: dict[str, Recipe] = {
        "float32": {},
        "stochastic": dict(state_dtype="bfloat16", stochastic_rounding=True),
        "to nearest": dict(nearest_state="bfloat16"),
    }
    rules: dict[str, Recipe] = {
        "MARS-AdamW": dict(rule="mars-adamw", lr=6e-3, beta1=0.95, beta2=0.99),
        "transport": TRANSPORT
        | dict(rule="mars-adamw", lr=6e-3, beta1=0.95, beta2=0.99, gamma=0.2),
        "AdamW": dict(rule="adamw", lr=4e-3, beta1=0.9, beta2=0.999),
    }
    methods = {
        f"{name}, {how}": Method(
            recipe | own | dict(one_rate=True),
            num_seeds=6,
            control=f"{name}, float32",
        )
        for name, recipe in rules.items()
        for how, own in kept.items()
        # which rounds after the step, so that transport's x would not follow
        if (name, how) != ("transport", "to nearest")
    }
    return Study(
        title="0.1M parameters, state in bfloat16",
        setting=replace(SMALL, seq_len=64, steps=3000),
        methods=methods,
    )


def tiny() -> Study:
    """Recipes of configs.tiny, by torchtitan: rates and beta1."""
    from research.compare.recipes import Setting as Recipes  # torchtitan with it

    rates = {
        "tiny_nadamw": (3e-3, 1.2e-2),
        "tiny_adamw": (2e-3, 8e-3),
        "tiny_mars_adamw_transport": (3e-3, 1.2e-2),
        "tiny_moonlight": (6e-3, 2.4e-2),
        "tiny_moonlight_transport": (6e-3, 2.4e-2),
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
        name: of a rule, with "-transport" or "-exact" behind it for that correction, or
            "torch-adamw", clip_grad_norm_ and torch's fused AdamW.
        size: of the GPT-2.
        lr: where no recipe has one for this size.
    """
    rule, recipe = name, {}
    if name.endswith("-transport"):
        rule = name.removesuffix("-transport")
        recipe = TRANSPORT | dict(gamma=TRANSPORT_GAMMA)
    elif name.endswith("-exact"):
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


COMPARED = (
    *("torch-adamw", "mars-adamw-transport", "moonlight", "mars-adamw"),
    "mars-m-transport",
)


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
