"""The studies: runs are searched, stored and continued, and train by their formula."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

import configs
from research import decide, fine_tuning, pictures, studies, warm_up
from research.compare import __main__ as compare
from research.compare import graphs
from research.compare.optimizers import build, unspelled
from research.compare.plain import Setting, train
from research.compare.results import entries, rows
from research.compare.search import Axis, search
from research.compare.store import Store, final
from research.compare.study import Method, Run, Study, changed, named
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


def test_studies_share_a_file_each_with_its_setting(setting, tmp_path):
    path, recipe = tmp_path / "kind.jsonl", dict(rule="adamw")
    for name, steps in dict(other=9, mine=8).items():
        store = Store(path, name)
        store.agree(dict(steps=steps))
        store.add(Run(recipe, 1), dict(curve=[[steps, float(steps)]]))
    assert [*Store(path, "mine").losses.values()] == [8.0]
    assert [*Store(path, "other").losses.values()] == [9.0]
    with pytest.raises(UserError, match="got steps=8 where other in .* has 9"):
        Store(path, "other").agree(dict(steps=8))


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
    assert unspelled(dict(beta1=0.95, one_rate=True)) == dict(beta1=0.95, one_rate=True)
    with pytest.raises(ValueError, match='expected "log_time" in it'):
        unspelled(dict(beta1={"log": 10}))
    capped, plain = {"log_time": 10, "cap": 0.98}, {"log_time": 10}
    found = unspelled(dict(beta1=capped, betas_1d=[plain, 0.95]))
    assert found == dict(beta1=0.98, betas_1d=(0.999, 0.95), log_time=10)
    with pytest.raises(ValueError, match="expected one value"):
        unspelled(dict(beta1=plain, beta2={"log_time": 5}))
    recipe = dict(rule="adamw", beta1=capped, lr=0.01)
    path = tmp_path / "runs.jsonl"
    store, run = Store(path, "x"), Run(recipe, 1)
    store.agree(setting.identity())
    store.add(run, dict(curve=[[8, 2.0]]))
    assert [*Store(path, "x").losses] == [run.key]


# ---- the rule ------------------------------------------------------------------------


def difference(side, error=0.001):
    mean = dict(ahead=-0.01, behind=0.01, open=0.002)[side]
    return decide.Difference(mean, error, 4)


@pytest.mark.parametrize(
    "sides, grows",
    [
        (("ahead", "ahead", "open", "open"), True),
        (("ahead", "ahead", "open", "open", "open"), False),  # of a half
        (("ahead", "ahead", "ahead", "behind"), False),
        (("ahead", "ahead", "ahead"), False),  # too few
    ],
)
def test_the_rule_of_the_default(sides, grows):
    said = decide.decision(map(difference, sides))
    assert ("log time becomes" in said) is grows
    assert f"ahead in {sides.count('ahead')} of {len(sides)}" in said


def test_a_method_may_be_searched_by_seeds_of_its_own(setting):
    own = Method({}, studies.around(0.01), search_seeds=(9,))
    methods = dict(own=own, others=Method({}, studies.around(0.01)))
    given = dict(trials=6, num_draws=3, search_seeds=(9, 10), halve=False)
    study = Study(title="any", setting=setting, methods=methods, **given)
    first = {title: study.wanted(title, {}) for title in methods}
    seeds = {title: [run.seed for run in runs] for title, runs in first.items()}
    assert seeds == dict(own=3 * [9], others=3 * [9, 10])
    losses = {run.key: abs(run.recipe["lr"] - 0.01) for run in first["own"]}
    judging = study.wanted("own", losses)
    assert [(run.recipe["lr"], run.seed) for run in judging] == [
        (0.01, seed) for seed in (1, 2, 3)
    ]
    left = {title: study.num_left(title, losses) for title in methods}
    assert left == dict(own=3, others=6 * 2 - 3 + 3)


def test_each_contender_has_its_best_of_the_warm_ups_that_all_have(setting):
    """By its search, whatever its other seeds say."""
    axis, ends = Axis("lr", 0.01, 0.04, start=0.02), [*warm_up.WARM_UPS.items()]
    methods = {
        title + end: Method(dict(rule=title) | own, (axis,), num_seeds=4)
        for title in ("adamw", "moonlight")
        for end, own in ends
    }
    own = dict(trials=3, num_draws=3, search_seeds=(9, 10))
    study = Study(title="any", setting=setting, methods=methods, **own)
    losses = {}

    def search(title, loss):
        for run in study.wanted(title, losses):
            losses[run.key] = loss + abs(run.recipe["lr"] - 0.02)

    for end, loss in zip(warm_up.WARM_UPS, (2.0, 1.9, 1.8), strict=True):
        search(f"adamw{end}", loss)
    for end, loss in zip([*warm_up.WARM_UPS][:2], (1.5, 1.6), strict=True):
        search(f"moonlight{end}", loss)
    place = decide.Judged(study, losses)
    assert place.best(("adamw",)) == {"adamw": "adamw, no warm-up"}
    assert place.best(("adamw", "moonlight")) == {
        "adamw": "adamw, 2% warm-up", "moonlight": "moonlight"
    }  # fmt: skip
    assert not place.is_complete("moonlight") and place.by_seed("moonlight") == {}


def test_a_difference_of_few_seeds_has_the_pooled_error():
    two = dict(a={1: 2.0, 2: 2.0}, b={1: 1.9, 2: 1.9}, c={1: 1.0, 2: 3.0})
    found = decide.differences(two, "a")
    assert found["b"].error == pytest.approx(1 / math.sqrt(2)) == found["c"].error
    assert found["b"].side == "open"
    two["c"][2] = math.inf
    assert decide.differences(two, "a")["c"].side == "behind"


def test_steps_saved_lie_between_the_control_s_horizons():
    control = {480: {1: 2.5, 2: 2.5}, 1920: {1: 1.9, 2: 1.9}}
    share, error = pictures.steps_saved({1: 2.2, 2: 2.2}, 480, control)
    assert share == pytest.approx(0.5) and error == 0.0
    assert pictures.steps_saved({1: 1.8}, 1920, control) is None


# ---- what is compared ----------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [studies.small, studies.batch, studies.gpu, studies.storage]
)
def test_methods_of_a_study_can_be_built(make, setting):
    study = make()
    own = dict(data=setting.data, device="cpu", seq_len=16, held_out=4, micro_batch=4)
    own |= dict(batch=4)
    replace(study.setting, **own).check({t: study.first(t) for t in study.methods})


@pytest.mark.parametrize("name", warm_up.__all__)
def test_contenders_can_be_built(name, setting):
    study = named(name, "research.warm_up")
    replace(setting, steps=2).check({t: study.first(t) for t in study.methods})


@pytest.mark.parametrize("name", ["mars_adamw", "moonlight", "mars_m"])
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
    recipe = dict(config="tiny_mars_adamw", lr=1.2e-2, beta1=0.8)
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
    names = ("adamw", "torch-adamw", "mars-adamw", "mars-adamw-exact")
    recipes = {name: studies.published(name, lr=6e-3) for name in names}
    found = {name: train(setting, recipe, 0) for name, recipe in recipes.items()}
    for result in found.values():
        assert [step for step, _ in result["curve"]] == [4, 8]
        assert final(result) < math.log(64)
    ours, torchs = final(found["adamw"]), final(found["torch-adamw"])
    assert ours == pytest.approx(torchs, rel=1e-5)
    assert found["mars-adamw-exact"]["flops"] == 2 * found["adamw"]["flops"]


def test_the_loop_trains_contenders_by_their_own_warm_up_batch_and_steps(setting):
    """Also with a head of its own; the setting's warm-up is of 8 steps."""
    untied = replace(setting, tied=False, steps=16, warmup=0.5)
    assert untied.identity() != setting.identity()
    contenders = studies.CONTENDERS | studies.CONTROLS
    for recipe in (recipe | dict(lr=lr) for recipe, lr in contenders.values()):
        assert final(train(untied, recipe, 0)) < math.log(64)
    recipe = dict(rule="adamw", lr=6e-3)
    for own in (dict(warmup=0.0), dict(batch=2, steps=8)):
        found = train(untied, recipe | own, 0)["curve"]
        assert found == train(replace(untied, **own), recipe, 0)["curve"]
        assert found != train(untied, recipe, 0)["curve"]
    with pytest.raises(UserError, match="got batch=3 and passes of 2 sequences"):
        untied.check(dict(mine=recipe | dict(batch=3)))


def test_torch_s_muon_and_adamw_are_moonlight(setting):
    """But for the dtype of Newton-Schulz."""
    recipe = dict(lr=0.02, beta1=0.95, beta2=0.95, weight_decay=0.1)
    found = [
        final(train(setting, recipe | dict(rule=rule), 0))
        for rule in ("moonlight", "torch-muon")
    ]
    assert found[0] == pytest.approx(found[1], abs=2e-3)


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


# ---- a step as one graph -------------------------------------------------------------


RECIPES = {
    "Moonlight, log time": studies.CONTENDERS[studies.GROWING][0] | dict(lr=0.01),
    "NAdamW": studies.CONTROLS["NAdamW"][0] | dict(lr=0.01, warmup=0.0),
}
BY_HOST = {  # no graph can hold their steps
    "SOAP-Muon": studies.CONTROLS["SOAP-Muon"][0] | dict(lr=0.01),
    "torch Muon": studies.CONTROLS["torch Muon"][0] | dict(lr=0.01),
    "MARS-AdamW, exact": studies.EXACT["MARS-AdamW, exact"][0] | dict(lr=0.01),
}


@pytest.mark.parametrize("title", RECIPES | BY_HOST)
def test_a_run_of_graphs_is_that_of_the_plain_loop(title, setting, monkeypatch):
    """Also where it pauses for others."""
    monkeypatch.setattr(graphs.Captured, "PAUSE", 3)
    recipe = (RECIPES | BY_HOST)[title]
    training = graphs.Captured(setting, Run(recipe, 1))
    turns = 1
    while (found := training.go_on()) is None:
        turns += 1
    curve = train(setting, recipe, 1)["curve"]
    assert turns == 3 and [step for step, _ in found["curve"]] == [4, 8]
    for (_, ours), (_, other) in zip(found["curve"], curve, strict=True):
        assert ours == pytest.approx(other, rel=1e-5)


def test_processes_share_a_study_each_a_run(setting, tmp_path, monkeypatch, capsys):
    """What another one has claimed a second call leaves; without claims nothing is
    left.
    """
    methods = {t: Method(recipe, num_seeds=2) for t, recipe in RECIPES.items()}
    methods["SOAP-Muon"] = Method(dict(rule="soap-muon", lr=0.01), num_seeds=1)
    study = Study(title="any", setting=setting, methods=methods)
    monkeypatch.setattr(graphs, "named", lambda name, module: study)
    store = tmp_path / "store.jsonl"
    words = ["graphs", "any", "--store", str(store), "--device", "cpu"]

    def call(*more):
        monkeypatch.setattr(sys, "argv", [*words, *more])
        graphs.main()
        return [line.split()[1] for line in capsys.readouterr().out.splitlines()]

    other = graphs.Wanted(store, {"any": study}, ["NAdamW"], "cpu")
    name, _, first = other.next(math.inf)
    assert call("--methods", "SOAP-Muon") == ["soap-muon"]
    own = graphs.Wanted(store, {"any": study}, device="cpu")
    runs = [own.next(math.inf)[2] for _ in range(3)]
    assert first.key not in {run.key for run in runs}
    assert own.next(math.inf) is None and not own.is_over  # four are not there yet
    store.with_suffix(".claims").unlink()
    graphs.train_all([own], [None, None], math.inf)
    assert own.is_over and len(capsys.readouterr().out.splitlines()) == 4
    assert call() == []
    losses = Store(store, "any").losses
    assert not any(study.wanted(title, losses) for title in methods)


def test_contenders_of_a_seed_see_the_same_windows(setting):
    every = [(recipe, 0) for recipe in RECIPES.values()] + [(RECIPES["NAdamW"], 1)]
    first = [graphs.Captured(setting, Run(*run)) for run in every]
    for run in first:
        run.advance()
    *losses, other = (run.losses[0].item() for run in first)
    assert len(set(losses)) == 1 and other != losses[0]
