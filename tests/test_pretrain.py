"""benchmarks.pretrain: the recipes' numbers, equal tokens, sweeps, continuing."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, replace

import matplotlib.image
import numpy as np
import pytest

import configs
from benchmarks.pretrain import __main__ as command
from benchmarks.pretrain import loop, report, study
from benchmarks.pretrain.loop import Run, Task
from benchmarks.pretrain.methods import method
from configs.published import LR, TRANSPORT_GAMMA
from marsopt.profiling.gpt2 import EMBEDDINGS
from train.engine.titan_optim import MarsOptimizers
from train.errors import UserError
from train.gpt2 import GPT2, Shape

TINY = ["--layers", "1", "--width", "64", "--vocab", "64", "--seq-len", "16",
        "--batch", "4", "--micro-batch", "2", "--held-out", "4", "--validations", "3",
        "--tokens", "600", "--dtype", "float32", "--eager"]  # fmt: skip
SHAPE = Shape(num_layers=1, num_heads=1, width=64, block_size=16, vocab_size=64)
NUMBERS = ("lr", "base_lr", "betas", "weight_decay", "gamma", "mars_type", "lr_1d",
           "weight_decay_1d", "epsilon_hat", "clip")  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A text in which every token says which one follows, mostly."""
    folder, draw = tmp_path_factory.mktemp("tokens"), np.random.default_rng(0)
    for split, length in (("train", 4000), ("val", 200)):
        steps = draw.choice([1, 1, 1, 5], length).cumsum() % 64
        steps.astype("<u2").tofile(folder / f"{split}.bin")
    return folder


def call(monkeypatch, *args: object) -> None:
    monkeypatch.setattr(sys, "argv", ["pretrain", *map(str, args)])
    command.main()


RECIPES = [f"small_{rule}" for rule in LR]
RECIPES += [f"small_{rule}_transport" for rule in TRANSPORT_GAMMA]


@pytest.mark.parametrize("name", RECIPES)
def test_a_method_has_the_numbers_of_its_recipe(name):
    config = replace(getattr(configs, name)().optimizer, compile=False)
    model = GPT2(SHAPE)
    want = MarsOptimizers(config, model_parts=[model]).mars
    mine = method(name.removeprefix("small_").replace("_", "-"), "small")
    got = mine.build(model, compile=False)
    ahead = ["train_mode" in optimizer.defaults for optimizer in (got, want)]
    assert ahead == ["transport" in name] * 2
    for n, p in model.named_parameters():
        a, b = (
            next(g for g in m.param_groups if any(p is q for q in g["params"]))
            for m in (got, want)
        )
        unused = set() if n.split(".")[0] in EMBEDDINGS else {"epsilon_hat"}
        if p.ndim == 2:  # of vectors
            unused |= {"lr_1d", "weight_decay_1d"}
        for key in set(NUMBERS) - unused:
            assert a[key] == b[key], (n, key)


METHODS = ["torch-adamw", "adamw", "mars-adamw", "mars-adamw-exact", "mars-m-transport"]


@pytest.fixture(scope="module")
def ran(data, tmp_path_factory):
    """The command's JSON, output and picture, of five methods."""
    folder = tmp_path_factory.mktemp("pretrain")
    with pytest.MonkeyPatch.context() as patch:
        told = []
        patch.setattr("builtins.print", lambda *text, **_: told.append(*text))
        call(patch, "--data", data, *TINY, "--methods", *METHODS,
             "--json", folder / "a.json", "--png", folder / "a.png")  # fmt: skip
    return json.loads((folder / "a.json").read_text()), "\n".join(told), folder


def test_methods_learn_from_the_same_start_at_equal_tokens(ran):
    runs = {run["method"]: run for run in ran[0]["runs"]}
    assert list(runs) == METHODS
    assert len({run["train_losses"][0] for run in runs.values()}) == 1
    for run in runs.values():
        assert [tokens for tokens, _, _ in run["curve"]] == [0, 192, 384, 576]
        assert run["curve"][0] == runs["adamw"]["curve"][0]
        assert run["curve"][-1][2] < math.log(64)
        assert 0 < run["optimizer_seconds"] < run["step_seconds"]
        assert run["num_skipped"] == 0
    ours, torchs = runs["adamw"], runs["torch-adamw"]
    assert ours["train_losses"] == pytest.approx(torchs["train_losses"], rel=1e-5)
    exact, approximate = runs["mars-adamw-exact"], runs["mars-adamw"]
    assert exact["flops"] == 2 * approximate["flops"]
    assert exact["train_losses"] != approximate["train_losses"]


def test_the_table_and_the_picture_show_them(ran):
    _, told, folder = ran
    for name in METHODS:
        lines = [x for x in told.splitlines() if x.startswith(f"{name} ")]
        assert "%" in lines[-1]
    assert "576 tokens, 9 steps of 4 x 16, float32, eager, seed 0" in told
    pixels = matplotlib.image.imread(folder / "a.png")
    assert (pixels[..., :3].std(-1) > 0.1).mean() > 0.001  # coloured lines


def test_what_is_done_is_not_done_again(ran, data, monkeypatch):
    monkeypatch.setattr(command, "run", lambda *_, **__: pytest.fail("ran again"))
    same = ["--data", data, *TINY, "--json", ran[2] / "a.json"]
    call(monkeypatch, *same, "--methods", *METHODS)
    with pytest.raises(UserError, match="holds runs with other options"):
        call(monkeypatch, *same, "--methods", *METHODS, "--seed", 1)


def test_a_run_that_would_not_end_in_time_is_named(data, monkeypatch, tmp_path):
    path = tmp_path / "a.json"
    with pytest.raises(UserError, match="adamw: no time is left; nor what comes"):
        call(monkeypatch, "--data", data, *TINY, "--methods", "adamw",
             "--limit", 1e-3, "--json", path)  # fmt: skip
    found = json.loads(path.read_text())
    assert found["runs"] == [] and len(found["not_run"]) == 1
    files = command.tokens(data, "train"), command.tokens(data, "val")
    plan = command.plan_of(command.arguments(), 600, 1)
    own = dict(machine=loop.Machine("CPU", 1.0), tell=print)
    with pytest.raises(loop.TooLong, match="adamw needs .* s more, .* are left"):
        loop.run(method("adamw", "small"), plan, *files, seconds_left=1e-3, **own)


def test_validation_sees_the_model_that_is_trained(data, monkeypatch):
    """With transport, x: not the point ahead, which the parameters hold in training."""
    made, modes = [], []
    build = loop.Method.build
    monkeypatch.setattr(
        loop.Method, "build", lambda *a, **k: made.append(build(*a, **k)) or made[-1]
    )
    validate = Task.validate

    def watched(self):
        modes.append(made[-1].param_groups[0]["train_mode"])
        return validate(self)

    monkeypatch.setattr(Task, "validate", watched)
    call(monkeypatch, "--data", data, *TINY, "--methods", "mars-adamw-transport")
    assert modes == [False] * 5  # the first two compile, and tell how long one takes
    assert made[-1].param_groups[0]["train_mode"]


def run_of(method, loss):
    return Run(method=method.name, lr=method.lr, gamma=0.0, num_params=1,
               tokens_per_step=1, curve=[(1, 1.0, loss)], train_losses=[loss],
               step_seconds=1.0, optimizer_seconds=0.1, flops=1, peak_bytes=None,
               num_skipped=0, wall_seconds=1.0, machine="CPU",
               matmul_rate=1.0)  # fmt: skip


def swept(tmp_path, best_factor, diverges_at=math.inf):
    """A sweep around 1 of a loss that is least at ``best_factor``, and its trials."""
    plan = command.plan_of(command.arguments(), 600, 1)
    own = method("adamw", "small")
    own_study = study.Study(plan=plan, sweep_plan=plan, factors=[1, 2, 0.5],
                            extensions=3, path=tmp_path / "a.json")  # fmt: skip

    def train(tried, plan):
        factor = tried.lr / own.lr
        loss = math.log(factor / best_factor) ** 2
        return run_of(tried, math.nan if factor > diverges_at else loss)

    found = own_study.best(own, train)
    return found.lr / own.lr, own_study


def test_sweeps_grow_until_the_best_rate_is_inside(tmp_path, data, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pretrain", "--data", str(data), *TINY])
    for best, diverges_at in ((1.0, 9.0), (4.0, 9.0), (0.25, 1.5)):
        factor, found = swept(tmp_path, best, diverges_at)
        assert factor == pytest.approx(best)
        assert found.optimum("adamw")[1] == "inside"
    factor, found = swept(tmp_path, 1e3)
    assert factor == pytest.approx(16) and found.optimum("adamw")[1] == "last"
    found.save()
    again = replace(found, trials=[])
    again.load()
    assert again.trials == found.trials

    def fail(*_):
        pytest.fail("tried again")

    assert again.best(method("adamw", "small"), fail).lr == pytest.approx(16 * 6e-4)


def test_how_far_to_the_first_ones_loss():
    run = replace(run_of(method("adamw", "small"), 0.0))
    run = Run(**asdict(run) | dict(curve=[(10, 1.0, 4.0), (20, 3.0, 2.0)]))
    assert report.reached(run, 3.0) == (15, 2.0)
    assert report.reached(run, 5.0) == (10, 1.0)
    assert report.reached(run, 1.0) is None


@pytest.mark.parametrize(
    "args, message",
    [
        (["--methods", "adam"], "got method 'adam', expected torch-adamw or one of"),
        (["--methods", "muon-exact"], "got method 'muon-exact', a baseline"),
        (["--methods", "normuon"], "got method 'normuon'"),
        (["--methods", "lion", "--model", "gpt2-xl"], "give --lrs lion=RATE"),
        (["--lrs", "adamw=fast"], "got --lrs adamw=fast, expected NAME=RATE"),
        (["--micro-batch", "3"], "got --batch 4 and --micro-batch 3"),
        (["--width", "100"], "got --width 100, expected a multiple of 64"),
        (["--sweep", "1"], "expected at least two positive factors"),
        (["--json", "nowhere/a.json"], "got nowhere/a.json to write to"),
        (["--data", "nowhere"], "got no nowhere/train.bin, expected a token file"),
        (["--vocab", "63"], "got token id 63 in the data"),
    ],
)
def test_bad_input(data, monkeypatch, args, message):
    with pytest.raises(UserError, match=message):
        call(monkeypatch, "--data", data, *TINY, *args)
