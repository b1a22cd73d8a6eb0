"""The studies: runs that are searched, stored and continued; what pages say of them is
what the stores hold; and what is compared is what its formula says.
"""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import configs
import marsopt
from marsopt.rules.preconditioner import Average
from research import (
    captured,
    correlations,
    decide,
    fine_tuning,
    log_time,
    studies,
    svrg,
)
from research.compare import __main__ as compare
from research.compare import graphs, images
from research.compare.neighbours import (
    ADANA,
    GPA,
    MONA,
    SNOO,
    EMANesterov,
    FallingWeight,
    LogTimeDecay,
    QHAdamW,
    lookahead,
)
from research.compare.optimizers import build, value_of
from research.compare.plain import Setting, train
from research.compare.results import entries, rows
from research.compare.search import Axis, search
from research.compare.store import Store, final
from research.compare.study import Method, Run, Study, changed, named
from tests.tape import Tape
from train import prepare
from train.engine.launch import parse
from train.engine.titan_optim import MarsOptimizers
from train.errors import UserError
from train.gpt2 import GPT2, Shape


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A text in which every token says which one follows, mostly."""
    folder, draw = tmp_path_factory.mktemp("tokens"), np.random.default_rng(0)
    for split in ("train", "val"):
        steps = draw.choice([1, 1, 1, 5], 5000).cumsum() % 64
        steps.astype("<u2").tofile(folder / f"{split}.bin")
    return folder


@pytest.fixture(scope="module")
def setting(data):
    return Setting(
        data=str(data), layers=1, heads=1, width=16, vocab_size=64, seq_len=16,
        batch=4, micro_batch=2, steps=8, held_out=4, points=2,
    )  # fmt: skip


# ---- the manager ---------------------------------------------------------------------


MINE = """
from research.compare.plain import Setting
from research.compare.study import Method, Study

__all__ = ["quick"]

def quick():
    methods = {{"AdamW": Method(dict(rule="adamw", lr=1e-3), num_seeds=1)}}
    return Study(title="quick", setting=Setting(**{given!r}), methods=methods)
"""


def test_a_study_runs_a_trial_and_a_later_call_continues(
    setting, tmp_path, monkeypatch, capsys
):
    """With one seed, then with two, after a kill that cut off the second one's line."""
    (tmp_path / "mine.py").write_text(MINE.format(given=asdict(setting)))
    monkeypatch.syspath_prepend(tmp_path)
    out = tmp_path / "out"

    def call(*more):
        words = ["quick", "--module", "mine", "--out", str(out), "--jobs", "1"]
        assert compare.compare(compare.arguments([*words, *more]))
        return capsys.readouterr().out

    assert "1 run left" in call("--only", "runs")
    first = (out / "runs.jsonl").read_text()
    (out / "runs.jsonl").write_text(first + first[:40])
    printed = call("--set", "num_seeds=2")
    assert "1 run left" in printed and "0 runs left" in printed
    assert (out / "table.md").read_text() in printed and (out / "losses.png").is_file()
    again = (out / "runs.jsonl").read_text()
    assert again.startswith(first) and again.count('"recipe"') == 2
    assert not (out / "runs").exists()
    with pytest.raises(UserError, match="got steps=9 where quick in .* has 8"):
        call("--set", "steps=9")


def test_runs_of_a_folder_are_added_once(setting, tmp_path):
    """Beside another study in one file; runs of another setting are refused."""
    path, folder = tmp_path / "kind.jsonl", tmp_path / "run elsewhere"
    folder.mkdir()
    (folder / "setting.json").write_text(json.dumps(dict(steps=8)))
    line = dict(recipe=dict(rule="adamw"), curve=[[8, 2.0]])
    text = "".join(json.dumps(line | dict(seed=seed)) + "\n" for seed in (1, 2))
    (folder / "runs.jsonl").write_text(text + text[:9])
    other = Store(path, "other")
    other.agree(dict(steps=9))
    other.add(Run(line["recipe"], 1), dict(curve=[[9, 3.0]]))
    mine = Store(path, "mine")
    mine.agree(dict(steps=8))
    mine.add(Run(line["recipe"], 1), dict(curve=[[8, 1.0]]))
    assert mine.take(folder) == 1 and mine.take(folder) == 0
    assert [*Store(path, "mine").losses.values()] == [1.0, 2.0]
    assert [*Store(path, "other").losses.values()] == [3.0]
    with pytest.raises(UserError, match="got steps=8 where other in .* has 9"):
        other.take(folder)
    (folder / "setting.json").unlink()
    with pytest.raises(UserError, match="give the folder that has both"):
        mine.take(folder)


def test_searches_take_equal_trials_and_come_near_the_best():
    """Also beyond the space that draws come from, and around what diverges."""
    axes = (Axis("lr", 1e-3, 1.6e-2), Axis("beta1", 0.6, 0.98, decay=True))
    for best in ((4e-3, 0.9), (6.4e-2, 0.99)):

        def bowl(point, best=best):
            pairs = zip(axes, point, best, strict=True)
            loss = sum((axis.place(a) - axis.place(b)) ** 2 for axis, a, b in pairs)
            return loss if loss < 50 else math.inf

        losses: dict = {}
        while wanted := (
            found := search(axes, losses.get, trials=40, num_draws=8)
        ).wanted:
            losses |= {point: bowl(point) for point in wanted}
        assert len(losses) == len(found.losses) == 40
        assert bowl(found.best) < 0.1 and found.inside(axes) <= 1.0


def test_a_difference_is_judged_by_the_pooled_deviation_over_seeds(tmp_path, setting):
    methods = {title: Method(dict(rule=title), num_seeds=4) for title in "abc"}
    study = Study(title="x", setting=setting, methods=methods)
    path = tmp_path / "runs.jsonl"
    store = Store(path, "x")
    store.agree(setting.identity())
    for title, middle in dict(a=3.0, b=2.9, c=2.995).items():
        for run, step in zip(study.wanted(title, {}), (-1, 0, 0, 1), strict=True):
            store.add(run, dict(curve=[[8, middle + 0.02 * step]]))
    found = entries(study, Store(path, "x"))
    by_title = {row.entry.title: row for row in rows(found)}
    deviation = 0.02 * math.sqrt(2 / 3)
    assert by_title["b"].z == pytest.approx(-0.1 / (deviation * math.sqrt(1 / 2)))
    assert {t: row.verdict for t, row in by_title.items()} == {
        "a": "", "b": "leads", "c": "tie"
    }  # fmt: skip
    # of a and b alone, whose seeds scatter alike; and seed by seed, without scatter
    assert by_title["b"].own_z == pytest.approx(-0.1 / (deviation * math.sqrt(1 / 2)))
    assert by_title["b"].paired == pytest.approx((-0.1, 0.0))
    path.write_text("{}\n")
    with pytest.raises(UserError, match="runs.jsonl that does not read"):
        Store(path, "x")


def test_a_search_by_two_seeds_goes_by_their_mean(setting):
    method = Method(dict(rule="adamw"), (Axis("lr", 1e-3, 2e-3),), num_seeds=2)
    study = Study(
        title="x", setting=setting, methods={"a": method}, trials=2, num_draws=2,
        search_seeds=(0, 2),
    )  # fmt: skip
    first = study.wanted("a", {})
    assert len(first) == 4 and study.num_left("a", {}) == 6
    one, other = dict.fromkeys(run.recipe["lr"] for run in first)
    # one is better at seed 0, the other in the mean
    table = {one: {0: 1.0, 2: 4.0}, other: {0: 2.0, 2: 2.0}}
    losses = {run.key: table[run.recipe["lr"]][run.seed] for run in first}
    judged = study.wanted("a", losses)
    assert [(r.recipe["lr"], r.seed) for r in judged] == [
        (other, 1),
        (other, 3),
    ]


def test_a_search_around_a_start_ends_where_both_neighbours_are_worse():
    """Three points, and one more for each step to an edge."""
    axis = Axis("lr", 0.01, 0.0225, factor=1.5, start=0.015)

    def tried(best):
        losses: dict = {}
        own = dict(trials=5, num_draws=1, halve=False)
        while wanted := (found := search((axis,), losses.get, **own)).wanted:
            losses |= {p: abs(math.log(p[0] / best)) for p in wanted}
        return [point for (point,) in found.losses]

    assert tried(0.015) == [0.015, 0.01, 0.0225]
    assert tried(0.0225) == [0.015, 0.01, 0.0225, 0.03375]
    assert len(tried(1.0)) == 5


def test_values_that_know_their_step_are_spelled_by_json(setting, tmp_path):
    """In studies and stores; a store knows its runs again."""
    assert value_of(0.95) == 0.95 and value_of(True) is True
    with pytest.raises(ValueError, match="expected one of log_time, falling_weight"):
        value_of({"log": 10})
    capped = {"log_time": 10, "cap": 0.98}
    assert value_of([capped, 0.95]) == (marsopt.LogTime(10, cap=0.98), 0.95)
    assert value_of({"falling_weight": 0.85}) == FallingWeight(kappa=0.85)
    recipe = dict(rule="adamw", beta1=capped, lr=0.01)
    path = tmp_path / "runs.jsonl"
    store, run = Store(path, "x"), Run(recipe, 1)
    store.agree(setting.identity())
    store.add(run, dict(curve=[[8, 2.0]]))
    assert [*Store(path, "x").losses] == [run.key]


# ---- the rule ------------------------------------------------------------------------


def place(**levels):
    """Losses of four seeds, whose paired differences scatter by 0.001."""
    shift = (0.0, 0.001, -0.001, 0.0)
    return {
        title: {seed: level + i * shift[seed] for seed in range(4)}
        for i, (title, level) in enumerate(levels.items())
    }


def test_the_rule_of_the_default():
    question = decide.Question(("today", "bare"), dict(plain=False, moded=True), "none")
    tie = place(today=2.0, bare=2.0, plain=2.0, moded=2.0)
    lead = place(today=2.0, bare=2.1, plain=1.9, moded=1.9)
    half = place(today=2.0, bare=1.9, plain=1.9, moded=2.0)  # of one of the two
    lost = place(today=2.0, bare=2.1, plain=2.1, moded=1.9)
    ahead = place(today=2.0, bare=2.1, plain=1.95, moded=1.9)
    assert decide.winner([tie], question) is None
    assert decide.winner([lead, lead, tie], question) == "plain"
    assert decide.winner([lead, tie, tie], question) is None  # of a third
    assert decide.winner([half, half, half], question) is None
    assert decide.winner([lead, lead, lead, lost], question) == "moded"
    assert decide.winner([lead, lead, ahead], question) == "plain"
    assert decide.winner([lead, ahead], question) == "moded"
    standing = decide.standing([lead, lost], "plain", question.references)
    assert standing == decide.Standing(ahead=1, behind=1, settings=2)


def test_a_difference_of_few_seeds_has_the_pooled_error():
    two = dict(a={1: 2.0, 2: 2.0}, b={1: 1.9, 2: 1.9}, c={1: 1.0, 2: 3.0})
    found = decide.differences(two, "a")
    assert found["b"].error == pytest.approx(1 / math.sqrt(2)) == found["c"].error
    assert found["b"].side == "open"
    two["c"][2] = math.inf
    assert decide.differences(two, "a")["c"].side == "behind"


def test_steps_saved_lie_between_the_control_s_horizons():
    control = {480: {1: 2.5, 2: 2.5}, 1920: {1: 1.9, 2: 1.9}}
    share, error = decide.steps_saved({1: 2.2, 2: 2.2}, 480, control)
    assert share == pytest.approx(0.5) and error == 0.0
    assert decide.steps_saved({1: 1.8}, 1920, control) is None


# ---- what pages say ------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, title, control, said",
    [
        ("small", "transport", "NAdamW", "-0.0387"),
        ("small_long", "transport", "NAdamW", "-0.0385"),
        ("middle", "transport", "NAdamW", "-0.0370"),
        ("to_zero", "transport", "NAdamW", "-0.0233"),
        ("batch_quarter", "transport", "NAdamW", "-0.0470"),
        ("prose", "Moonlight, transport", "Moonlight", "-0.0407"),
        ("bpe", "transport", "NAdamW", "+0.0119"),
        ("fine_tuning", "for_model", "AdamW", "-0.0059"),
        ("fine_tuning_lora", "for_model", "AdamW", "+0.0066"),
    ],
)
def test_the_study_page_has_the_differences_of_the_stores(name, title, control, said):
    module = fine_tuning if name in fine_tuning.__all__ else studies
    table = rows(entries(getattr(module, name)(), studies.stored(name)))
    (row,) = (r for r in table if r.entry.title == title)
    assert row.entry.control == control and f"{row.difference:+.4f}" == said
    assert said in (Path(studies.__file__).parent / "study.md").read_text()


# ---- what is compared ----------------------------------------------------------------


@pytest.mark.parametrize("make", [studies.small, studies.gpu, studies.bf16_state])
def test_methods_of_a_study_can_be_built(make, setting):
    study = make()
    own = dict(data=setting.data, device="cpu", seq_len=16, held_out=4, micro_batch=4)
    own |= dict(batch=4)
    replace(study.setting, **own).check({t: study.first(t) for t in study.methods})


@pytest.mark.parametrize("name", log_time.__all__)
def test_contenders_can_be_built(name, setting):
    study = named(name, "research.log_time")
    replace(setting, steps=2).check({t: study.first(t) for t in study.methods})
    assert study.num_draws == 1 and study.trials == 5


@pytest.mark.parametrize("name", ["mars_adamw", "moonlight", "mars_m_transport"])
def test_a_published_method_has_the_numbers_of_its_recipe(name):
    config = getattr(configs, f"small_{name}")().optimizer
    config = replace(config, ns_dtype="float32", compile=False)  # as a CPU by itself
    shape = Shape(num_layers=1, num_heads=1, width=64, block_size=16, vocab_size=64)
    model, other = GPT2(shape), GPT2(shape)
    model.init_weights(0), other.init_weights(0)
    want = MarsOptimizers(config, model_parts=[other]).mars
    recipe = studies.published(name.replace("_", "-"))
    got = build(model, recipe, steps=9, compile=False)
    torch.manual_seed(0)
    for _ in range(2):
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            p.grad = 1e-4 * torch.randn_like(p)  # below every clip
            q.grad = p.grad.clone()
        got.step(), want.step()
    for (n, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7, msg=n)


@mock.patch.dict(os.environ)  # where the check writes the variables of a launcher
def test_recipes_of_a_study_keep_the_ratios_of_their_learning_rates(tmp_path):
    text = [Path(json.__file__)]
    prepare.prepare("text", "bytes", tmp_path, files=text, val_fraction=0.2)
    options = ("--dataloader.dataset-path", str(tmp_path))
    study = changed(studies.tiny(), dict(options=[*options], steps=70))
    study.setting.check({title: study.first(title) for title in study.methods})
    recipe = dict(config="tiny_mars_adamw_transport", lr=1.2e-2, beta1=0.8)
    module, words = study.setting.command(Run(recipe, 5), tmp_path / "run")
    base, config = parse(words[:2]), parse(words)
    assert module == "train" and config.debug.seed == 5
    assert config.optimizer.lr == 1.2e-2
    ratio = config.optimizer.lr_1d / base.optimizer.lr_1d
    assert ratio == pytest.approx(config.optimizer.lr / base.optimizer.lr)
    assert config.optimizer.betas == (0.8, base.optimizer.betas[1])
    assert config.training.steps == config.lr_scheduler.total_steps == 70
    share = base.lr_scheduler.warmup_steps / base.training.steps
    assert config.lr_scheduler.warmup_steps == round(share * 70)


def test_the_loop_trains_all_methods_from_one_start(setting):
    names = ("adamw", "torch-adamw", "mars-adamw-transport", "mars-adamw-exact")
    recipes = {name: studies.published(name, lr=6e-3) for name in names}
    found = {name: train(setting, recipe, 0) for name, recipe in recipes.items()}
    for result in found.values():
        assert [step for step, _ in result["curve"]] == [4, 8]
        assert final(result) < math.log(64)
    ours, torchs = final(found["adamw"]), final(found["torch-adamw"])
    assert ours == pytest.approx(torchs, rel=1e-5)
    assert found["mars-adamw-exact"]["flops"] == 2 * found["adamw"]["flops"]


def test_the_loop_trains_contenders_with_a_head_of_its_own(setting):
    untied = replace(setting, tied=False, steps=16)
    assert untied.identity() != setting.identity()
    contenders = log_time.HELD | log_time.CONTROLS
    for recipe in (
        *(c.recipe | dict(lr=c.lr) for c in contenders.values()),
        dict(rule="adamw", lr=6e-3, weight_decay=0.1, decay_omega=4.0),
    ):
        untied.check({"it": recipe})
        assert final(train(untied, recipe, 0)) < math.log(64)


@pytest.mark.parametrize("make", fine_tuning.__all__)
def test_pretrained_weights_are_tuned_whole_or_by_lora(make, setting, tmp_path):
    """By every method; LoRA begins as the pretrained model and freezes it."""
    study = named(make, "research.fine_tuning")
    source = tmp_path / "source"
    source.mkdir()
    for path in Path(setting.data).iterdir():  # read backwards
        np.fromfile(path, "<u2")[::-1].tofile(source / path.name)
    own = asdict(setting) | dict(steps=24, source=str(source), source_steps=16)
    rank, rule = study.setting.rank, study.setting.source_rule
    own |= dict(source_rule=rule, weights=str(tmp_path / "weights"))
    tuning = fine_tuning.Setting(**own, rank=rank)
    tuning.check({title: study.first(title) for title in study.methods})
    before = tuning.identity()["pretraining"]
    assert (before["steps"], before["rule"]) == (16, rule)
    model, whole = tuning.model(1), replace(tuning, rank=None).model(2)
    (kept,) = (tmp_path / "weights").iterdir()
    tokens = torch.arange(16)[None]
    torch.testing.assert_close(model(tokens), whole(tokens))
    moved = [n for n, p in model.named_parameters() if p.requires_grad]
    trained = {name.rsplit(".")[-1] for name in moved}
    assert trained == ({"lora_A", "lora_B"} if rank else {"weight"})
    found = {t: final(train(tuning, study.first(t), 1)) for t in study.methods}
    start = train(replace(tuning, rank=None), fine_tuning.ADAMW | dict(lr=0.0), 1)
    assert max(found["AdamW"], found["for_model"]) < final(start) < math.log(64)
    assert [*(tmp_path / "weights").iterdir()] == [kept]
    with pytest.raises(UserError, match="got source_rule='sgd', expected one of moon"):
        replace(tuning, source_rule="sgd").check({})


@pytest.mark.parametrize("make", [studies.digits_convnet, studies.digits_vit])
def test_images_are_trained_by_every_method(make):
    pytest.importorskip("sklearn")
    study = make()
    setting = replace(study.setting, steps=24, points=1)
    setting.check({title: study.first(title) for title in study.methods})
    for title in ("AdamW", "Moonlight, transport"):
        found = images.train(setting, study.first(title), seed=1)
        ((step, loss),) = found["curve"]
        assert step == 24 and loss < 2.25 and found["accuracy"] > 0.1
    with pytest.raises(UserError, match="got model='mlp', expected one of convnet"):
        replace(setting, model="mlp").check({})


def trajectory(make, x, steps=40):
    """x after each step on a quadratic."""
    optimizer, points = make(x), []
    for _ in range(steps):
        x.grad = torch.linspace(0.5, 3.0, 5) * x.detach() - 1.0
        optimizer.step()
        points.append(x.detach().clone())
    return torch.stack(points)


def start():
    return nn.Parameter(torch.zeros(5, dtype=torch.float64))


def test_neighbours_are_their_formulas():
    """Where one of them is an optimizer that torch has: QHAdamW with nu1 = 1, an outer
    step of every step, a lookahead of scale 0.
    """
    own = dict(lr=0.05, betas=(0.9, 0.99), weight_decay=0.1)
    adamw = trajectory(lambda x: torch.optim.AdamW([x], **own), start())
    qh = trajectory(lambda x: QHAdamW([x], nu1=1.0, **own), start())
    torch.testing.assert_close(qh, adamw, rtol=1e-10, atol=1e-12)
    weighed = trajectory(lambda x: QHAdamW([x], nu1=0.8, **own), start())
    assert not torch.allclose(weighed, adamw)

    def sgd(x, lr=0.05, **options):
        return torch.optim.SGD([x], lr=lr, **options)

    outer = dict(lr=0.6, momentum=0.4, every=1)
    snoo = trajectory(lambda x: SNOO(sgd(x), **outer), start())
    nesterov = dict(momentum=0.4, nesterov=True)
    want = trajectory(lambda x: sgd(x, lr=0.6 * 0.05, **nesterov), start())
    torch.testing.assert_close(snoo, want, rtol=1e-10, atol=1e-12)
    still = trajectory(lambda x: EMANesterov(sgd(x), scale=0.0, steps=40), start())
    torch.testing.assert_close(still, trajectory(sgd, start()))


@pytest.mark.parametrize(("extra", "begin"), [(0.0, 0.0), (1.0, 2.0)])
def test_adana_is_its_formula(extra, begin):
    """Three steps, transcribed; the second group has no decay."""
    grads = [[0.5, -1.0], [0.3, 0.2], [-0.7, 0.1]]
    lrs = [0.05, 0.1, 0.04]
    x = [nn.Parameter(torch.tensor([1.0], dtype=torch.float64)) for _ in range(2)]
    groups = [dict(params=[x[0]]), dict(params=[x[1]], weight_decay=0.0)]
    own = dict(extra_momentum=extra, decay_start=begin, eps=1e-8)
    optimizer = ADANA(groups, lr=0.1, **own)
    want, m, v = [1.0, 1.0], [0.0, 0.0], [0.0, 0.0]
    for t, (g, lr) in enumerate(zip(grads, lrs, strict=True), start=1):
        for i in range(2):
            optimizer.param_groups[i]["lr"] = lr
            x[i].grad = torch.tensor([g[i]], dtype=torch.float64)
            beta = 1 - 8 / (8 + t)
            m[i] = beta * m[i] + (1 - beta) * g[i]
            v[i] = beta * v[i] + (1 - beta) * g[i] ** 2
            u = g[i] + ((1 + t) ** 0.15 + extra) * m[i]
            decay = 0.0 if i else 4 / (begin + t)
            step = 0.1 * u / (math.sqrt(v[i]) + 1e-8) + decay * want[i]
            want[i] -= lr / 0.1 * step
        optimizer.step()
    assert [p.item() for p in x] == pytest.approx(want, rel=1e-12)


def test_the_falling_decay_is_independent_of_the_peak():
    x = nn.Parameter(torch.ones(1, dtype=torch.float64))
    inner = torch.optim.SGD([x], lr=0.5, weight_decay=0.1)
    optimizer, want = LogTimeDecay(inner, omega=0.3, decay_start=2.0), 1.0
    for t, share in enumerate((0.5, 1.0, 0.2), start=1):
        inner.param_groups[0]["lr"] = 0.5 * share
        x.grad = torch.zeros_like(x)
        optimizer.step()
        want *= 1 - share * 0.3 / (t + 2)
    assert x.item() == pytest.approx(want, rel=1e-12)


class Momentum(Average):
    """x <- x - lr u: a linear rule, u the average of c."""

    def update(self, x, c, buffers, s):
        rate, _, *w = s
        m, u = self.average(buffers["m"], c, tuple(w))
        return x - rate * u, {"m": m}


def gradient_of(batch, x):
    """Of a loss that is not quadratic, and another for every batch."""
    return torch.sin(x * (1 + 0.1 * batch)) + 0.1 * torch.cos(batch + 3 * x)


@pytest.mark.parametrize("mu_x, mu_y", [(0.9, 0.8), (0.975, 0.7), (0.9, 1.0)])
def test_gpa_of_gradient_descent_is_momentum_with_transport(mu_x, mu_y):
    """beta1 = mu_x and gamma = 1 - mu_y, at a constant learning rate."""
    rule = marsopt.Rule(
        matrix=marsopt.Algorithm(
            preconditioner=Momentum(momentum=mu_x),
            correction=marsopt.Transport(gamma=1 - mu_y, clip=None),
        )
    )
    x = start()
    gpa = GPA(torch.optim.SGD([x], lr=0.05), mu_x=mu_x, mu_y=mu_y)
    y = {"w": x.detach().clone()}
    state = rule.init(y)
    for batch in range(200):
        x.grad = gradient_of(batch, x.detach())
        gpa.step()
        y, state = rule.step(y, {"w": gradient_of(batch, y["w"])}, state, lr=0.05)
        torch.testing.assert_close(x.detach(), y["w"], rtol=0, atol=1e-14)
    gpa.eval()
    iterate = rule.iterate(y, state)["w"]
    torch.testing.assert_close(x.detach(), iterate, rtol=0, atol=1e-14)
    gpa.train()
    torch.testing.assert_close(x.detach(), y["w"], rtol=0, atol=1e-14)


def test_mona_without_an_average_is_approximate_mars_without_a_clip():
    """Of gradient descent with momentum; MARS-M orthogonalizes the same m."""
    beta1, gamma = 0.9, 0.1
    rule = marsopt.Rule(
        matrix=marsopt.Algorithm(
            preconditioner=Momentum(momentum=beta1),
            correction=marsopt.Approximate(gamma=gamma, clip=None),
        )
    )
    x, scale = start(), gamma * beta1 / (1 - beta1)
    sgd = torch.optim.SGD([x], lr=0.05, momentum=beta1, dampening=beta1)
    sgd.state[x]["momentum_buffer"] = torch.zeros_like(x)  # torch's starts at g
    mona = MONA(sgd, params=[x], scale=scale, decay=0.0)
    y = {"w": x.detach().clone()}
    state = rule.init(y)
    for batch in range(100):
        x.grad = gradient_of(batch, x.detach())
        mona.step()
        y, state = rule.step(y, {"w": gradient_of(batch, y["w"])}, state, lr=0.05)
        torch.testing.assert_close(x.detach(), y["w"], rtol=0, atol=1e-14)
    smooth = MONA(sgd, params=[x], scale=scale, decay=0.5)
    x.grad = torch.ones_like(x)
    smooth.step()
    torch.testing.assert_close(x.grad, torch.full_like(x, 1 + 0.5 * scale))


def test_snoo_moves_the_iterate_of_transport():
    """Every outer step is one of x."""
    x = start()
    mars = marsopt.MARS(
        [x], lr=0.05, correction="transport", gamma=0.2, optimize_1d=True, compile=False
    )
    snoo = SNOO(mars, lr=0.7, momentum=0.3, every=3)
    slow, b = torch.zeros_like(x), torch.zeros_like(x)
    for step in range(1, 10):
        x.grad = gradient_of(step, x.detach())
        if step % 3:
            snoo.step()
            continue
        plain = copy.deepcopy(mars)
        (p,) = plain.param_groups[0]["params"]
        p.grad = x.grad.clone()
        plain.step()
        plain.eval()
        b = 0.3 * b + slow - p.detach()
        slow = slow - 0.7 * (slow - p.detach() + 0.3 * b)
        snoo.step()
        snoo.eval()
        torch.testing.assert_close(x.detach(), slow, rtol=0, atol=1e-12)
        snoo.train()


@pytest.mark.parametrize("fast, slow, weight", [(0.9, 0.98, 0.5), (0.95, 0.95, 0.4)])
def test_momentum_at_the_points_ahead_has_no_lag(fast, slow, weight):
    """Of a quadratic, whatever the trajectory: the study's two averages."""
    a, b, rho = lookahead(fast, slow, weight)
    torch.manual_seed(0)
    x = torch.randn(3000, 3, dtype=torch.float64).cumsum(0)
    e = m = s = torch.zeros(3, dtype=torch.float64)
    for before, now in zip(x, x[1:], strict=False):
        e = rho * e + (1 - rho) * (now - before)
        g = now + a * (now - before) + b * e
        m, s = fast * m + (1 - fast) * g, slow * s + (1 - slow) * g
    assert ((1 - weight) * m + weight * s - x[-1]).abs().max() < 1e-10


def test_the_study_of_svrg_counts_what_every_method_takes(data, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["svrg", "--quick", "--data", str(data)])
    monkeypatch.setattr(svrg, "FIRST_LR", 0.032)
    chosen = [m for m in svrg.METHODS if m == svrg.PLAIN or m.decays]
    monkeypatch.setattr(svrg, "METHODS", chosen)
    svrg.main()
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    counts = {cells[0]: cells[2] for cells in lines if len(cells) > 2}
    num_steps = svrg.QUICK.epochs * svrg.QUICK.num_batches
    for method in chosen:  # svrg: of a batch, at the snapshot, and the full one
        times = 3 if method.correction == "svrg" else 1
        assert int(counts[method.title]) == times * num_steps


def test_correlations_need_a_study_of_the_plain_loop(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["correlations", "small", "Adam"])
    with pytest.raises(UserError, match="and one of its methods .NAdamW; transport"):
        correlations.main()


# ---- a step as one graph -------------------------------------------------------------


@pytest.fixture
def graphed(setting):
    """Runs of the test's setting, by contender and seed."""
    texts = captured.texts(setting)

    def made(title, seed=0):
        recipe = captured.CONTENDERS[title].recipe | {"lr": 0.01}
        return captured.Captured(setting, recipe, seed, texts)

    return made


@pytest.mark.parametrize("title", ["for_model", "Moonlight, log time", "NAdamW"])
def test_a_run_of_graphs_is_that_of_the_plain_loop(title, setting):
    run = Run(captured.CONTENDERS[title].recipe | {"lr": 0.01}, 1)
    found = graphs.train_run(setting, run)["curve"]
    curve = train(setting, run.recipe, run.seed)["curve"]
    assert [step for step, _ in found] == [step for step, _ in curve]
    for (_, ours), (_, other) in zip(found, curve, strict=True):
        assert ours == pytest.approx(other, rel=1e-5)


def test_processes_share_a_study_each_a_method(setting, tmp_path, monkeypatch, capsys):
    """What a second call finds claimed it leaves; without claims nothing is left."""
    methods = {
        title: Method(captured.CONTENDERS[title].recipe | {"lr": 0.01}, num_seeds=2)
        for title in ("Moonlight", "NAdamW")
    }
    methods["SOAP-Muon"] = Method(dict(rule="soap-muon", lr=0.01))  # refreshes
    study = Study(title="any", setting=setting, methods=methods)
    monkeypatch.setattr(graphs, "named", lambda name, module: study)
    store = tmp_path / "store.jsonl"
    words = ["graphs", "any", "--store", str(store), "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", [*words, "--methods", "NAdamW"])

    def call():
        graphs.main()
        return [line.split()[1] for line in capsys.readouterr().out.splitlines()]

    assert call() == ["NAdamW"] * 2 + ["Moonlight"] * 2
    assert call() == []
    shutil.rmtree(store.with_suffix(".claims"))
    assert call() == []
    losses = Store(store, "any").losses
    assert all(not study.wanted(title, losses) for title in ("Moonlight", "NAdamW"))


@pytest.mark.parametrize("title", captured.CONTENDERS)
def test_a_replay_is_the_next_step(title, graphed, setting):
    """Also after a validation, which transport takes at other weights."""
    eager, replayed = graphed(title), graphed(title)
    for run in eager, replayed:
        for _ in range(3):
            run.advance()
    with Tape() as tape:
        replayed.step()
    eager.advance()
    for step in range(4, setting.steps):
        assert eager.validate() == replayed.validate()
        eager.advance()
        tape.replay()
        assert eager.losses[step] == replayed.losses[step] != 0
    assert eager.validate() == replayed.validate()


def test_contenders_of_a_seed_see_the_same_windows(graphed):
    first = [graphed(title) for title in captured.CONTENDERS] + [graphed("NAdamW", 1)]
    for run in first:
        run.advance()
    *losses, other = (run.losses[0].item() for run in first)
    assert len(set(losses)) == 1 and other != losses[0]


def test_a_later_call_runs_what_is_left(data, tmp_path, monkeypatch, capsys):
    chosen = {title: captured.CONTENDERS[title] for title in ("Moonlight", "NAdamW")}
    monkeypatch.setattr(captured, "CONTENDERS", chosen)
    words = ["--data", str(data), "--out", str(tmp_path), "--miniature", "--only", "B"]

    def call(*more):
        captured.main([*words, *more])
        return capsys.readouterr().out

    assert "no time for" in call("--minutes", "0")
    assert not (tmp_path / "runs.jsonl").exists()
    assert call().count("tokens/s") == 4 + 1  # runs, and the head of the table
    store = (tmp_path / "runs.jsonl").read_bytes()
    lines = store.splitlines(keepends=True)
    runs = [json.loads(line)["run"] for line in lines]
    assert [(r["contender"], r["seed"]) for r in runs] == [
        ("Moonlight", 0), ("NAdamW", 0), ("Moonlight", 1), ("NAdamW", 1)
    ]  # fmt: skip
    assert call().count("tokens/s") == 1
    (tmp_path / "runs.jsonl").write_bytes(b"".join(lines[:3]) + lines[3][:20])
    assert call().count("tokens/s") == 2
    again = captured.stored(tmp_path)
    assert [line["run"] for line in again] == runs
    assert again[3]["curve"] == json.loads(lines[3])["curve"]


def test_without_a_gpu_the_full_size_is_refused(data, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="got no GPU"):
        captured.main(["--data", str(data), "--out", str(tmp_path)])


def test_the_full_size_is_that_of_the_10_6m_study():
    """But for the vocabulary, and what fits one pass."""
    full = {p.horizon: p.setting for p in captured.plan("nowhere")}
    study = studies.ten_million().setting
    own = ("data", "vocab_size", "micro_batch", "held_out", "points")
    assert {
        k for k, v in asdict(full["A"]).items() if asdict(study)[k] != v
    } == {*own}  # fmt: skip
    tokens = {h: s.steps * s.batch * s.seq_len for h, s in full.items()}
    assert tokens["B"] == tokens["C"] == 16 * tokens["A"] == 209_715_200
    for setting in full.values():
        assert setting.per_pass * setting.seq_len <= captured.PASS_TOKENS
        assert setting.batch % setting.per_pass == 0
    first = [p.title for p in captured.plan("nowhere")][:5]
    assert first == list(captured.CONTENDERS)
