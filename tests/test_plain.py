"""The plain loop of train.compare: recipes' numbers, equal starts, validation."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import configs
from configs import studies
from configs.published import LR, TRANSPORT_GAMMA
from configs.studies import published
from marsopt.rules import newton_schulz
from tests.forks import forked
from train.compare import plain
from train.compare.optimizers import build
from train.compare.plain import Setting, Task, Training, train
from train.compare.results import entries, rows
from train.compare.store import Store
from train.engine.titan_optim import MarsOptimizers
from train.errors import UserError
from train.gpt2 import GPT2, Shape

SHAPE = Shape(num_layers=1, num_heads=1, width=64, block_size=16, vocab_size=64)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A text in which every token says which one follows, mostly."""
    folder, draw = tmp_path_factory.mktemp("tokens"), np.random.default_rng(0)
    for split, length in (("train", 4000), ("val", 200)):
        steps = draw.choice([1, 1, 1, 5], length).cumsum() % 64
        steps.astype("<u2").tofile(folder / f"{split}.bin")
    return folder


@pytest.fixture(scope="module")
def setting(data):
    return Setting(
        data=str(data), layers=1, heads=1, width=64, vocab_size=64, seq_len=16,
        batch=4, micro_batch=2, steps=9, held_out=4, points=3,
    )  # fmt: skip


# rules that the authors' scripts and param_groups give the same tensors
RECIPES = [n for n in LR if n not in ("muon", "mars_shampoo")]
RECIPES += [f"{n}_transport" for n in TRANSPORT_GAMMA if n in RECIPES]


@pytest.mark.parametrize("name", RECIPES)
def test_a_published_method_has_the_numbers_of_its_recipe(name, monkeypatch):
    # as the recipe says, also on a CPU without instructions for bf16
    monkeypatch.setattr(newton_schulz, "found_dtype", lambda: torch.bfloat16)
    config = replace(getattr(configs, f"small_{name}")().optimizer, compile=False)
    model, other = GPT2(SHAPE), GPT2(SHAPE)
    model.init_weights(0), other.init_weights(0)
    want = MarsOptimizers(config, model_parts=[other]).mars
    got = build(model, published(name.replace("_", "-")), steps=9, compile=False)
    torch.manual_seed(0)
    for _ in range(3):
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            p.grad = 1e-4 * torch.randn_like(p)  # below every clip
            q.grad = p.grad.clone()
        got.step(), want.step()
    for (n, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7, msg=n)


METHODS = ["torch-adamw", "adamw", "mars-adamw", "mars-adamw-exact", "mars-m-transport"]


@pytest.fixture(scope="module")
def ran(setting):
    return {name: train(setting, published(name, lr=6e-4), 0) for name in METHODS}


def test_methods_learn_from_the_same_start_at_equal_tokens(ran, setting):
    for found in ran.values():
        assert [step for step, _ in found["curve"]] == [3, 6, 9]
        assert found["curve"][-1][1] < math.log(64)
        assert 0 < found["optimizer_seconds"] < found["seconds"]
        assert found["peak_bytes"] is None
    ours, torchs = (np.array(ran[name]["curve"]) for name in ("adamw", "torch-adamw"))
    np.testing.assert_allclose(ours, torchs, rtol=1e-5)
    exact, approximate = ran["mars-adamw-exact"], ran["mars-adamw"]
    assert exact["flops"] == 2 * approximate["flops"]
    assert exact["curve"] != approximate["curve"]


def test_a_seed_is_one_start_and_one_order(setting):
    recipe = published("adamw")
    starts = [Training(setting, recipe, seed, setting.texts()) for seed in (0, 0, 1)]
    losses = [float(one.gradient()) for one in starts]
    assert losses[0] == losses[1] != losses[2]


def test_exact_mars_takes_the_next_batch_at_the_present_point(setting, monkeypatch):
    """As the authors' loop does: the correction is of one batch at two points."""
    seen = []
    gradient = Task.gradient

    def watched(self, batch):
        weights = float(sum(p.detach().double().sum() for p in self.model.parameters()))
        seen.append((float(batch[0].double().sum()), weights))
        return gradient(self, batch)

    monkeypatch.setattr(Task, "gradient", watched)
    train(replace(setting, steps=3), published("mars-adamw-exact"), 0)
    following, own = seen[0::2], seen[1::2]
    for (ahead, at), (batch, here) in zip(following, own, strict=True):
        assert at == here and ahead != batch
    assert [ahead for ahead, _ in following[:-1]] == [batch for batch, _ in own[1:]]


@pytest.mark.parametrize("schedule, quarter", [("cosine", 0.868), ("linear", 0.775)])
def test_rates_go_up_from_zero_and_down_to_the_floor(setting, schedule, quarter):
    recipe = studies.published("mars-adamw-transport") | dict(gamma_follows_rate=True)
    one = replace(setting, steps=20, warmup=0.2, schedule=schedule, floor=0.1)
    training = Training(one, recipe, 0, one.texts())
    peaks = [group["lr"] for group in training.optimizer.param_groups]
    shares, gammas = [], []
    for _ in range(20):
        training.gradient()
        training.update()
        group = training.optimizer.param_groups[0]
        shares.append(group["lr"] / peaks[0])
        gammas.append(group["gamma"])
    assert shares[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert shares[-1] == pytest.approx(0.1)
    assert shares[7] == pytest.approx(quarter, abs=1e-3)
    assert all(a > b for a, b in zip(shares[3:], shares[4:], strict=False))
    assert gammas == pytest.approx([0.05 * share for share in shares])


def test_validation_sees_the_model_that_is_trained(setting, monkeypatch):
    """With transport, x: not the point ahead, which the parameters hold in training."""
    made, modes = [], []
    monkeypatch.setattr(
        plain, "build", lambda *a, **k: made.append(build(*a, **k)) or made[-1]
    )
    validate = Task.validate

    def watched(self):
        modes.append(made[-1].param_groups[0]["train_mode"])
        return validate(self)

    monkeypatch.setattr(Task, "validate", watched)
    train(setting, published("mars-adamw-transport"), 0)
    assert modes == [False] * 3
    assert made[-1].param_groups[0]["train_mode"]


def test_a_run_that_diverges_ends(setting):
    found = train(setting, published("adamw", lr=1e4), 0)
    assert found["curve"][-1][1] is None
    assert len(found["curve"]) <= 3


def test_what_is_compared_is_known_by_its_content(setting, data, tmp_path):
    here = setting.identity()
    assert "data" not in here and "device" not in here
    for split in ("train", "val"):
        text = np.fromfile(data / f"{split}.bin", "<u2")
        text.tofile(tmp_path / f"{split}.bin")
    moved = replace(setting, data=str(tmp_path), micro_batch=4)
    assert moved.identity() == here
    text[5] += 1
    text.tofile(tmp_path / "val.bin")
    assert moved.identity() != here


@pytest.mark.parametrize("make", [studies.gpu, studies.gpu_swept, studies.small])
def test_shipped_studies_can_be_run(make, setting):
    study = make()
    here = replace(study.setting, data=setting.data, device="cpu", seq_len=16)
    here = replace(here, held_out=4, micro_batch=4)
    here.check({title: study.first(title) for title in study.methods})


@pytest.mark.parametrize(
    "change, recipe, message",
    [
        (dict(micro_batch=3), {}, "got batch=4 and passes of 3 sequences"),
        (dict(data="nowhere"), {}, "got no nowhere/train.bin, expected a token file"),
        (dict(warmup=2.0), {}, "got --warmup 2.0, expected at most 1"),
        (dict(micro_batch=0), {}, "got --micro-batch 0, expected at least 1"),
        (dict(seq_len=0), {}, "got --seq-len 0, expected at least 1"),
        (dict(heads=3), {}, "got width=64 and heads=3, expected a multiple"),
        (dict(dtype="float16"), {}, "got dtype='float16', expected one of float32"),
        (dict(device="tpu"), {}, "got device='tpu', expected one of cpu, cuda"),
        (dict(held_out=500), {}, "got held_out=500 sequences of 16 tokens"),
        ({}, dict(gamma_follows_rate=True), "a: got no 'gamma', expected it"),
        (dict(device="cuda"), {}, "expected a GPU that torch can use"),
        (
            {},
            dict(rule="adam"),
            "a: got rule='adam', expected torch-adamw, qhadamw, two",
        ),
        ({}, dict(gamma="x"), "a: "),
        ({}, dict(betas=1, unknown=2), "a: .*unknown"),
        ({}, dict(lr=None), "a: got no 'lr', expected it in the recipe or as an axis"),
    ],
)
def test_bad_input(setting, change, recipe, message):
    if change.get("device") == "cuda" and plain.torch.cuda.is_available():
        pytest.skip("there is a GPU")
    given = dict(rule="mars-adamw", lr=1e-3) | recipe
    given = {key: value for key, value in given.items() if value is not None}
    with pytest.raises(UserError, match=message):
        replace(setting, **change).check({"a": given})


def test_the_command_trains_what_a_study_says(data, tmp_path):
    changes = ["layers=1", "heads=1", "width=64", "vocab_size=64", "seq_len=16",
               "batch=4", "micro_batch=2", "steps=9", "held_out=4", "points=9",
               "dtype=float32", "compile=false", "device=cpu"]  # fmt: skip
    changes.append(f"data={data}")
    names = ["mars-adamw", "torch-adamw"]
    own = ["train.compare", "gpu_swept", "--out", tmp_path, "--jobs", "1"]
    own += ["--methods", *names, "--set", *changes, "trials=1", "num_draws=1"]
    code, out, err = forked(*own)
    assert code == 0, out + err
    study = studies.gpu_swept()
    methods = {name: study.methods[name] for name in names}
    study = replace(study, trials=1, num_draws=1, methods=methods)
    found = entries(study, Store(tmp_path), tmp_path)
    assert {e.title for e in found} == {*names}
    assert {len(e.curve.steps) for e in found} == {9}
    (row,) = [row for row in rows(found) if row.difference is not None]
    assert row.z is None and row.tokens > 0  # one seed
    raw = json.loads((tmp_path / "results.json").read_text())
    assert raw["setting"]["batch"] == 4
    assert raw["methods"]["mars-adamw"]["step"]["flops"] > 0


def test_a_token_outside_the_vocabulary_is_told(setting):
    with pytest.raises(UserError, match="got token id 6. in the data, expected ids"):
        train(replace(setting, vocab_size=60), published("adamw"), 0)


def test_the_module_writes_what_a_run_showed(setting, tmp_path, monkeypatch):
    from train.compare.study import Run

    run = Run(published("adamw"), 3)
    module, arguments = setting.command(run, tmp_path)
    assert module == "train.compare.plain" and setting.found(tmp_path) is None
    monkeypatch.setattr(sys, "argv", ["plain", *arguments])
    plain.main()
    assert setting.found(tmp_path)["curve"] == train(setting, run.recipe, 3)["curve"]


@pytest.mark.parametrize("rule", ["moonlight", "soap-muon"])
def test_what_is_beside_matrices_has_nesterovs_momentum_where_asked(rule):
    """As NAdamW moves all tensors: embeddings and norms; matrices stay as they are."""
    moved = {}
    recipes = {
        "plain": dict(rule=rule, lr=1e-2, beta1=0.9, beta2=0.95, weight_decay=0.1),
        "nadamw": dict(rule="nadamw", lr=1e-2, beta1=0.9, beta2=0.95),
    }
    recipes["beside"] = recipes["plain"] | dict(beside="nadamw")
    recipes["nadamw"] |= dict(weight_decay=0.1, one_rate=True)
    for title, recipe in recipes.items():
        model = GPT2(SHAPE)
        model.init_weights(0)
        made = build(model, recipe, steps=9, compile=False)
        torch.manual_seed(0)
        for _ in range(3):
            for p in model.parameters():
                p.grad = 1e-4 * torch.randn_like(p)
            made.step()
        moved[title] = dict(model.named_parameters())
    for name, p in moved["beside"].items():
        is_matrix = name.startswith("layers") and p.ndim == 2
        assert torch.equal(p, moved["plain"][name]) == is_matrix, name
