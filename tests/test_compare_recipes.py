"""train.compare by recipes: each run a python -m train, stopped and continued."""

from __future__ import annotations

import _pydecimal
import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from configs import studies
from train import prepare
from train.compare.recipes import Setting
from train.compare.search import Axis
from train.compare.study import Method, Run, Study, changed
from train.engine.launch import parse
from train.errors import UserError
from train.runs.checkpoints import last_step

ROOT = Path(__file__).parent.parent
STEPS = 30
SMALL = ["--training.seq-len", "32", "--training.global-batch-size", "8"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    out = tmp_path_factory.mktemp("text") / "data"
    prepare.prepare(
        "text", "bytes", out, files=[Path(_pydecimal.__file__)], val_fraction=0.2
    )
    return out


@pytest.fixture
def options(data):
    return ("--dataloader.dataset-path", str(data), *SMALL)


def config_of(setting, recipe, seed=0, folder=Path("unused")):
    setting.check({"it": recipe})
    module, words = setting.command(Run(recipe, seed), folder)
    assert module == "train"
    return parse(words)


def test_a_run_is_its_recipe_at_another_rate(options, tmp_path):
    """Rates keep their ratios, the warm-up its share; the schedule ends with it."""
    setting = Setting(steps=700, options=options)
    base = parse(["--config", "tiny_mars_adamw"])
    recipe = dict(config="tiny_mars_adamw", lr=1.2e-2)
    config = config_of(setting, recipe, 5, tmp_path)
    assert config.optimizer.lr == 1.2e-2
    assert config.optimizer.lr_1d == pytest.approx(2 * base.optimizer.lr_1d)
    assert config.lr_scheduler.min_lr_factor == base.lr_scheduler.min_lr_factor
    assert config.lr_scheduler.warmup_steps == base.lr_scheduler.warmup_steps / 2
    assert config.training.steps == config.lr_scheduler.total_steps == 700
    assert config.debug.seed == 5
    assert config.optimizer.weight_decay == base.optimizer.weight_decay
    assert config.dump_folder == str(tmp_path)
    own = config_of(setting, dict(config="tiny_mars_adamw"))
    assert own.optimizer.lr == base.optimizer.lr


def test_options_are_those_of_the_optimizer(options):
    setting = Setting(steps=40, options=options)
    recipe = dict(config="tiny_moonlight", correction="transport", gamma=0.2)
    recipe |= dict(beta1=0.8, amsgrad=False, nesterov=False, lr_1d=1e-3, lr=1.2e-2)
    optimizer = config_of(setting, recipe).optimizer
    assert optimizer.correction == "transport" and optimizer.gamma == 0.2
    assert optimizer.betas == (
        0.8,
        parse(["--config", "tiny_moonlight"]).optimizer.betas[1],
    )
    assert optimizer.nesterov is False and not optimizer.amsgrad
    assert optimizer.lr_1d == pytest.approx(2e-3)  # 1e-3 at the recipe's own rate


def test_validation_takes_a_tenth_of_the_arithmetic(data):
    setting = Setting(steps=750, options=("--dataloader.dataset-path", str(data)))
    config = config_of(setting, dict(config="tiny_adamw"))
    assert config.validator.freq == 50
    share = (750 / 50 + 1) * config.validator.samples / 3 / (750 * 16)
    assert 0.08 < share <= 0.1
    assert config.validator.samples % 8 == 0


@pytest.mark.parametrize(
    "recipe, more, message",
    [
        (dict(config="tiny_adam"), (), "got --config tiny_adam, expected one of the"),
        (dict(config="tiny_adamw", eps=-1.0), (), "got eps=-1.0"),
        (dict(config="tiny_adamw"), ("--lr-scheduler.warmup-steps", "1399"),
         "got it with a warm-up as long as its run"),
    ],
)  # fmt: skip
def test_a_recipe_that_cannot_be_run(options, recipe, more, message):
    setting = Setting(steps=STEPS, options=(*options, *more))
    with pytest.raises(UserError, match=message):
        setting.check({"it": recipe})


def test_recipes_differ_in_their_optimizer_alone(options):
    more = ("--tokenizer.name", "bytes", "--training.local-batch-size", "8")
    setting = Setting(steps=STEPS, options=(*options, *more))
    recipes = {"a": dict(config="tiny_adamw"), "b": dict(config="small_adamw")}
    with pytest.raises(UserError, match="tiny_adamw and small_adamw with different"):
        setting.check(recipes)


def test_what_two_calls_agree_on(options):
    first, other = (Setting(steps=STEPS, options=options) for _ in range(2))
    first.check({"a": dict(config="tiny_adamw")})
    other.check({"a": dict(config="tiny_adamw"), "b": dict(config="tiny_lion")})
    mine, theirs = first.identity(), other.identity()
    assert mine.items() <= theirs.items() and "tiny_lion" in theirs
    assert mine["tiny_adamw"]["training.seq_len"] == 32
    longer = Setting(steps=STEPS, options=(*options, "--optimizer.eps", "1e-6"))
    longer.check({"a": dict(config="tiny_adamw")})
    assert longer.identity()["tiny_adamw"] != mine["tiny_adamw"]


# ---- the command ---------------------------------------------------------------------

STUDY = """
from pathlib import Path
from train.compare.recipes import Setting
from train.compare.study import Method, Study

__all__ = ["mine"]
OPTIONS = {options!r}

def mine() -> Study:
    methods = {{
        "fails": Method(dict(config="tiny_adamw"), num_seeds=1),
        "mars": Method(dict(config="tiny_mars_adamw", gamma=0.05), num_seeds=1),
    }}
    setting = Setting(steps={steps}, options=OPTIONS)
    return Study(title="mine", setting=setting, methods=methods)
"""


@pytest.fixture(scope="module")
def stopped(data, tmp_path_factory):
    """Two recipes: one fails, the other is stopped on its way; then both again.

    Folder, step at which the second was stopped, and what each of the two calls said.
    """
    folder = tmp_path_factory.mktemp("compare")
    options = ("--dataloader.dataset-path", str(data), *SMALL)
    (folder / "mine.py").write_text(STUDY.format(options=options, steps=STEPS))
    words = ["train.compare", "mine", "--module", "mine", "--out", folder / "out"]
    path = os.pathsep.join(map(str, (folder, ROOT)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    in_the_way = list_of(folder, "fails") / "rank0.log"
    in_the_way.mkdir(parents=True)
    first = subprocess.Popen(
        [sys.executable, "-m", *map(str, words), "--jobs", "1"], env=environment,
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=folder,
    )  # fmt: skip
    deadline, place = time.monotonic() + 240, list_of(folder, "mars")
    while last_step(place) == 0 and first.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    first.terminate()
    said, _ = first.communicate(timeout=60)  # until its runs have ended, too
    assert first.returncode == 130, said
    step = last_step(place)
    in_the_way.rmdir()
    done = subprocess.run(
        [sys.executable, "-m", *map(str, words), "--jobs", "2", "--timing"],
        env=environment, text=True, capture_output=True, cwd=folder, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, step, said, done.stdout


def list_of(folder, title):
    """Where the run of a method lies."""
    from train.compare.session import Session

    recipe = dict(config="tiny_adamw")
    if title == "mars":
        recipe = dict(config="tiny_mars_adamw", gamma=0.05)
    methods = {title: Method(recipe, num_seeds=1)}
    study = Study(title="", setting=Setting(steps=STEPS), methods=methods)
    own = dict(jobs=1, threads=1, minutes=None, lock=0, say=print)
    session = Session(study, None, folder / "out" / "runs", [title], **own)
    return session.place(title, Run(recipe, 1))


@pytest.mark.application
def test_a_failed_run_is_told_and_costs_no_other(stopped):
    _, step, said, _ = stopped
    assert "2 runs left" in said
    assert "fails (seed 1): FAILED (exit code 2), tried again by" in said
    assert "Is a directory" in said
    assert "stopped before its end: run the same command again" in said
    assert 0 < step < STEPS


@pytest.mark.application
def test_the_next_call_continues(stopped):
    folder, step, _, told = stopped
    assert "2 runs left" in told and "0 runs left" in told
    place = list_of(folder, "mars")
    assert f"after step {step} of {STEPS}" in (place / "console.txt").read_text()
    assert [p.name for p in (place / "checkpoint").iterdir()] == [f"step-{STEPS}"]
    lines = (folder / "out" / "runs.jsonl").read_text().splitlines()
    curves = {json.loads(x)["recipe"]["config"]: json.loads(x)["curve"] for x in lines}
    assert len(curves) == 2
    for curve in curves.values():
        steps = [step for step, _ in curve]
        assert steps[-1] == STEPS and len(steps) >= 15
        assert curve[-1][1] < curve[0][1]


@pytest.mark.application
def test_table_and_pictures_are_there(stopped):
    folder, *_, told = stopped
    assert (folder / "out" / "table.md").read_text() in told
    raw = json.loads((folder / "out" / "results.json").read_text())
    assert raw["methods"]["mars"]["seconds"] > 0
    for name in ("losses", "by_steps", "by_time"):
        assert (folder / "out" / f"{name}.png").stat().st_size > 10_000


def test_a_run_killed_before_its_last_validation_goes_back_a_checkpoint(
    options, tmp_path
):
    setting = Setting(steps=12, options=options)
    setting.check({"a": dict(config="tiny_adamw")})
    for step in (8, 12):
        folder = tmp_path / "checkpoint" / f"step-{step}"
        folder.mkdir(parents=True)
        (folder / ".metadata").touch()
    assert setting.found(tmp_path) is None
    setting.command(Run(dict(config="tiny_adamw"), 0), tmp_path)
    assert last_step(tmp_path) == 8


def test_an_axis_of_a_recipe(options):
    study = Study(
        title="x",
        setting=Setting(steps=STEPS, options=options),
        methods={"a": Method(dict(config="tiny_adamw"), (Axis("lr", 1e-3, 1e-2),))},
        trials=3,
        num_draws=1,
    )
    config = config_of(study.setting, study.first("a"))
    assert 1e-3 < config.optimizer.lr < 1e-2


def test_the_study_of_the_documentation(options):
    text = (ROOT / "docs" / "training.md").read_text()
    lines = text[text.index("    from train.compare.recipes") :].splitlines()
    end = lines.index("    python -m train.compare mine --module mine")
    space: dict = {}
    exec(textwrap.dedent("\n".join(lines[:end])), space)
    study = changed(space["mine"](), dict(options=[*options], steps=STEPS))
    study.setting.check({title: study.first(title) for title in study.methods})


def test_the_shipped_study_of_recipes(options):
    study = changed(studies.tiny(), dict(options=[*options], steps=STEPS))
    study.setting.check({title: study.first(title) for title in study.methods})
