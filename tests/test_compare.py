"""python -m train.compare: its study, its numbers, and one whole comparison."""

from __future__ import annotations

import _pydecimal
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from functools import partial
from itertools import combinations
from pathlib import Path

import matplotlib.pyplot
import numpy as np
import pytest

from tests.forks import forked
from train import prepare
from train.compare import curves, plots, results, study, table, timing
from train.compare.__main__ import arguments, grids, swept
from train.compare.curves import Curve
from train.compare.session import Session
from train.compare.sweep import Run, Sweep, search
from train.compare.table import markdown, report
from train.engine.launch import parse
from train.errors import UserError
from train.runs.checkpoints import last_step

ROOT = Path(__file__).parent.parent
STEPS = 30
SMALL = ["--training.seq-len", "32", "--training.global-batch-size", "8"]
BYTES = ["--tokenizer.name", "bytes"]
FAILS = "runs/tiny_adamw/lr-0.004/seed-0"
STOPPED = "runs/tiny_mars_adamw/lr-0.006/seed-0"
CALL = [
    "--configs", "tiny_adamw", "tiny_mars_adamw",
    "--lrs", "4e-3", "tiny_mars_adamw=6e-3",
    "--steps", str(STEPS), "--seeds", "1",
]  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    out = tmp_path_factory.mktemp("text") / "data"
    prepare.prepare(
        "text", "bytes", out, files=[Path(_pydecimal.__file__)], val_fraction=0.2
    )
    return out


@pytest.fixture
def options(data):
    return ["--dataloader.dataset-path", str(data), *SMALL]


def make(names, options, **kwargs):
    usual = dict(
        grids={}, swept={}, steps=STEPS, num_seeds=2, threads=1, options=options
    )
    return study.make(names, **{**usual, **kwargs})


@pytest.mark.parametrize(
    ("option", "written"),
    [
        ("amsgrad=True", ["--optimizer.amsgrad"]),
        ("amsgrad=False", ["--optimizer.no-amsgrad"]),
        ("nesterov=False", ["--optimizer.nesterov", "False"]),  # or None
        ("betas=0.8,0.95", ["--optimizer.betas", "0.8", "0.95"]),
    ],
)
def test_options_in_a_name_are_those_of_the_command_line(option, written):
    found = study.command_line(f"tiny_moonlight:{option}")
    assert found == ["--config", "tiny_moonlight", *written]
    parse(found)  # torchtitan's parser takes them


# ---- the study -----------------------------------------------------------------------


def test_a_run_is_its_recipe_at_another_rate(options, tmp_path):
    """Rates keep their ratios, the warm-up its share; the schedule ends with it."""
    made = make(["tiny_mars_adamw"], options, steps=700)
    assert made.grids == {"tiny_mars_adamw": [3e-3, 6e-3, 1.2e-2]}
    base = parse(["--config", "tiny_mars_adamw"])
    run = Run("tiny_mars_adamw", 1.2e-2, 5)
    config = parse(made.arguments(run, tmp_path))
    assert config.optimizer.lr == 1.2e-2
    assert config.optimizer.lr_1d == pytest.approx(2 * base.optimizer.lr_1d)
    assert config.lr_scheduler.min_lr == pytest.approx(2 * base.lr_scheduler.min_lr)
    assert config.lr_scheduler.warmup_steps == base.lr_scheduler.warmup_steps / 2
    assert config.training.steps == config.lr_scheduler.total_steps == 700
    assert config.debug.seed == 5
    assert config.optimizer.weight_decay == base.optimizer.weight_decay
    assert config.dump_folder == str(
        tmp_path / "runs" / "tiny_mars_adamw" / "lr-0.012" / "seed-5"
    )


def test_validation_takes_a_tenth_of_the_arithmetic(data):
    made = make(["tiny_adamw"], ["--dataloader.dataset-path", str(data)], steps=750)
    assert made.validation_interval == 50
    points = 750 / 50 + 1
    share = points * made.validation_samples / 3 / (750 * 16)
    assert 0.08 < share <= 0.1
    assert made.validation_samples % 8 == 0


def test_a_plan_reads_as_it_was_written(options, tmp_path):
    made = make(["tiny_adamw", "tiny_mars_adamw"], options)
    made.save(tmp_path)
    assert study.Study.load(tmp_path) == made


def test_a_comparison_may_grow_but_not_change(options, tmp_path):
    first = make(["tiny_adamw"], options)
    study.check(first, tmp_path).save(tmp_path)
    more = make(["tiny_lion"], options, num_seeds=3)
    assert set(study.check(more, tmp_path).recipes) == {"tiny_adamw", "tiny_lion"}
    other = make(["tiny_adamw"], options, steps=45)
    with pytest.raises(UserError, match="got --steps 45 where .* has 30"):
        study.check(other, tmp_path)
    with pytest.raises(UserError, match="got options after -- .* has"):
        study.check(make(["tiny_adamw"], [*options, "--optimizer.lr", "1"]), tmp_path)
    merged = study.check(more, tmp_path)
    assert merged.grids == first.grids | more.grids
    assert merged.num_seeds == 3
    merged.save(tmp_path)
    assert study.check(study.again(study.Study.load(tmp_path), 1), tmp_path) == merged
    edited = {"tiny_adamw": first.settings["tiny_adamw"] | {"optimizer.eps": 1.0}}
    with pytest.raises(UserError, match="tiny_adamw with optimizer.eps=1.0 where it"):
        study.check(replace(first, settings=edited), tmp_path)


def test_rates_for_all_and_for_one():
    names = ["a", "b"]
    assert grids([], names) == {"a": [], "b": []}
    assert grids(["2e-3", "1e-3"], names) == {n: [1e-3, 2e-3] for n in names}
    assert grids(["1e-3", "b=4e-3,2e-3"], names) == {"a": [1e-3], "b": [2e-3, 4e-3]}


def test_options_for_all_and_for_one():
    names = ["a", "b:c=transport"]
    assert swept([], names) == {}
    found = swept(["x-y=1/2", "b:c=transport:betas=0.8,0.95/0.9,0.95"], names)
    assert found == {
        "a": {"x_y": ["1", "2"]},
        "b:c=transport": {"x_y": ["1", "2"], "betas": ["0.8,0.95", "0.9,0.95"]},
    }


BETAS = ["0.8,0.95", "0.9,0.95"]


def test_a_swept_option_trains_as_a_recipe_with_it(options, tmp_path):
    """In the same folder, with the same command line."""
    made = make(["tiny_adamw"], options, swept={"tiny_adamw": {"betas": BETAS}})
    sweep = made.sweeps["tiny_adamw"]
    assert sweep.start == ("0.004", "0.9", "0.95")
    run = sweep.run(("0.004", "0.8", "0.95"), 0)
    assert run.path == "tiny_adamw:betas=0.8,0.95/lr-0.004/seed-0"
    alone = make(["tiny_adamw:betas=0.8,0.95"], options)
    assert made.arguments(run, tmp_path) == alone.arguments(run, tmp_path)
    config = parse(made.arguments(run, tmp_path))
    assert config.optimizer.betas == (0.8, 0.95)


def test_rates_of_vectors_and_switches_are_options_too(options, tmp_path):
    swept = {"tiny_mars_adamw": {"lr_1d": ["1e-3", "2e-3"], "amsgrad": ["True"]}}
    made = make(["tiny_mars_adamw"], options, swept=swept)
    run = made.sweeps["tiny_mars_adamw"].run(("0.012", "1e-3", "True"), 0)
    config = parse(made.arguments(run, tmp_path))
    assert config.optimizer.lr_1d == 2e-3
    assert config.optimizer.amsgrad


def test_a_swept_value_is_checked_before_anything_trains(options, capsys):
    for wrong in ({"gamma": ["0.1", "much"]}, {"gama": ["0.1"]}):
        with pytest.raises((SystemExit, UserError)):  # tyro's, of a value; ours
            make(["tiny_mars_adamw"], options, swept={"tiny_mars_adamw": wrong})
    capsys.readouterr()


def test_what_is_swept_is_kept_and_may_grow(options, tmp_path):
    two = {"betas": BETAS, "eps": ["1e-8", "1e-6"]}
    first = make(["tiny_adamw"], options, swept={"tiny_adamw": two})
    study.check(first, tmp_path).save(tmp_path)
    assert study.Study.load(tmp_path) == first
    assert study.again(study.Study.load(tmp_path), 1) == first
    other = make(["tiny_lion"], options)
    assert study.check(other, tmp_path).swept == first.swept
    more = {"eps": ["1e-8"], "betas": [*BETAS, "0.95,0.95"]}
    grown = make(["tiny_adamw"], options, swept={"tiny_adamw": more})
    kept = study.check(grown, tmp_path).swept["tiny_adamw"]
    assert kept == more
    assert list(kept) == ["betas", "eps"]  # whose order names the folders
    alone = study.check(make(["tiny_adamw"], options), tmp_path)
    assert alone.swept == {}


def test_runs_of_another_comparison_are_taken_in_where_they_fit(options, tmp_path):
    """Such as those of a recipe that is now a point of a sweep."""
    made = make(["tiny_adamw"], options, swept={"tiny_adamw": {"betas": BETAS}})
    run = tmp_path / "runs" / "tiny_adamw:betas=0.8,0.95" / "lr-0.004" / "seed-0"
    run.mkdir(parents=True)
    theirs = made.settings["tiny_adamw"]
    (run / "settings.json").write_text(json.dumps(theirs))
    assert study.check(made, tmp_path) == made
    (run / "settings.json").write_text(json.dumps(theirs | {"training.seq_len": 1}))
    with pytest.raises(UserError, match="with another sequence length, expected runs"):
        study.check(made, tmp_path)


def test_a_comparison_of_an_earlier_release_is_read(options, tmp_path):
    made = make(["tiny_adamw"], options)
    raw = asdict(made)
    del raw["swept"], raw["model"]
    (tmp_path / "comparison.json").write_text(json.dumps(raw))
    assert study.Study.load(tmp_path) == made


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda o, d: make(["tiny"], o), "got --config tiny, expected one"),
        (lambda o, d: make(["tiny_adamw", "small_mars_adamw"], [*o[:2], *BYTES]),
         "got tiny_adamw and small_mars_adamw with different model"),
        (lambda o, d: make(["tiny_adamw"], ["--dataloader.dataset-path", "/none"]),
         "got no /none/meta.json"),
        (lambda o, d: grids(["c=1e-3"], ["a"]), "got --lrs c=1e-3, expected a recipe"),
        (lambda o, d: grids(["fast"], ["a"]), "got --lrs fast, expected positive"),
        (lambda o, d: grids(["-1"], ["a"]), "got --lrs -1, expected positive"),
        (lambda o, d: swept(["gamma"], ["a"]), "got --sweep gamma, expected OPTION="),
        (lambda o, d: swept(["a=1//2"], ["a"]), "got --sweep a=1//2, expected OPTION="),
        (lambda o, d: swept(["a=1:2"], ["a"]), "got --sweep a=1:2, expected OPTION="),
        (lambda o, d: swept(["b:x=1"], ["a"]), "expected a recipe of --configs"),
        (lambda o, d: swept(["lr=1/2"], ["a"]), "expected --lrs for rates"),
        (lambda o, d: swept(["x=1/2"], ["a:x=3"]), "the recipe's name does not fix"),
        (lambda o, d: arguments(["--out", "x", "--seeds", "0"]), "got --seeds 0"),
        (lambda o, d: arguments(["--out", "x", "--sweep", "a=1"]), "without --configs"),
        (lambda o, d: arguments(["--out", "x", "--steps", "9"]), "without --configs"),
        (lambda o, d: study.Study.load(d), "comparison.json, expected the folder of"),
        (lambda o, d: study.check(make(["tiny_adamw"], o), ROOT), "something else"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(act, message, options, tmp_path):
    with pytest.raises(UserError, match=re.escape(message)) as error:
        act(options, tmp_path)
    assert "\n" not in str(error.value)


# ---- the numbers ---------------------------------------------------------------------


def curve(*losses):
    return Curve(np.arange(len(losses)) * 10 + 10, np.array(losses))


def test_a_curve_is_read_between_its_points():
    c = curve(5.0, 3.0, 2.0, 2.5)
    assert (c.best, c.final, c.score) == (2.0, 2.5, 2.5)
    assert c.at(15) == 4.0
    assert c.reaches(2.5) == 25.0
    assert c.reaches(5.5) == 10.0
    assert c.reaches(1.9) == math.inf


@pytest.mark.parametrize("losses", [(5.0, 2.0, math.nan), (5.0, 3.0, 6.0)])
def test_a_diverged_run_is_infinitely_bad(losses):
    assert curve(*losses).score == math.inf


def entry(name, corrects, seconds, *seeds):
    recipe = study.Recipe(name, "mars-adamw", corrects, False, 1.0, 1.0, 0.1, 0.1)
    sweep = Sweep.of(name, [0.5, 1, 2], 1, {}, {})
    losses = {0.5: 9.0, 1: seeds[0].final, 2: math.inf}
    tried = search(sweep, {Run(name, lr, 0): loss for lr, loss in losses.items()})
    return results.Entry(recipe, tried, list(seeds), 0, seconds)


@pytest.fixture
def found():
    """The better one is at the worse one's end (3.0) half way, at twice the seconds."""
    good = entry(
        "good", True, 0.2, curve(5.0, 3.5, 2.5, 2.0), curve(5.0, 2.5, 2.5, 2.0)
    )
    bad = entry("bad", False, 0.1, curve(5.0, 4.5, 4.0, 3.0))
    return [good, bad]


def test_ratios_are_of_the_worst_final_loss(found):
    good, bad = results.rows(found, 40)
    assert (good.tokens_ratio, bad.tokens_ratio) == (0.5, 1.0)
    assert good.tokens_ratio_range == pytest.approx((0.45, 0.625))
    assert (good.seconds_per_step_ratio, bad.seconds_per_step_ratio) == (2.0, 1.0)
    assert (good.seconds_ratio, bad.seconds_ratio) == (1.0, 1.0)
    assert (good.loss_at_time, bad.loss_at_time) == (3.0, 3.0)
    assert found[0].final == results.Spread(2.0, 0.0, [2.0, 2.0])


def test_table_and_json_say_the_same(found, options):
    table = results.rows(found, 40)
    made = make(["tiny_adamw"], options)
    text = markdown(found, table, made, ["lost"])
    assert "| good | 1 | 3 (inside lr) | 2.000 ± 0.000 | 2.000 ± 0.000 |" in text
    assert "| 0.50x (0.45 to 0.62) |" in text
    assert "Not here: lost" in text
    raw = json.loads(json.dumps(results.as_json(found, table, made), allow_nan=False))
    assert raw["optimizers"]["good"]["tokens_ratio"] == 0.5
    assert raw["sweeps"]["bad"] == [
        {"lr": 1.0, "final_loss": 3.0},
        {"lr": 0.5, "final_loss": 9.0},
        {"lr": 2.0, "final_loss": None},
    ]
    assert raw["optimizers"]["bad"]["num_trials"] == 3
    assert raw["optimizers"]["bad"]["inside"] == {"lr": True}


def test_the_row_of_a_swept_recipe_names_what_it_chose(found, options):
    losses = {(lr, gamma): lr + 10 * gamma for lr in (1, 2) for gamma in (0.1, 0.2)}
    sweep = Sweep.of("bad", [1, 2], 1, {"gamma": ["0.1", "0.2"]}, {"gamma": "0.1"})
    tried = {Run(f"bad:gamma={g}", lr, 0): loss for (lr, g), loss in losses.items()}
    tried[Run("bad:gamma=0.05", 1, 0)] = 9.0
    chosen = replace(search(sweep, tried), wanted=[])
    found[1] = replace(found[1], found=chosen)
    table, made = results.rows(found, 40), make(["tiny_adamw"], options)
    text = markdown(found, table, made, [])
    assert "| bad:gamma=0.1 | 1 | 5 (inside gamma; at the edge of lr) | 3.000" in text
    raw = results.as_json(found, table, made)
    assert raw["optimizers"]["bad"]["options"] == {"gamma": "0.1"}
    assert raw["optimizers"]["bad"]["inside"] == {"lr": False, "gamma": True}
    assert {"lr": 2.0, "gamma": "0.2", "final_loss": 4.0} in raw["sweeps"]["bad"]
    assert {name: len(rows) for name, rows in plots.sweeps(found).items()} == {
        "lr": 2,
        "gamma": 1,
    }


def test_an_unfinished_sweep_says_so(found, options):
    unfinished = replace(found[0].found, wanted=[("4",), ("8",)])
    found[0] = replace(found[0], found=unfinished)
    text = markdown(found, results.rows(found, 40), make(["tiny_adamw"], options), [])
    assert "| good | 1 | 3 (unfinished: 2 to try) | 2.000" in text


def test_a_run_killed_before_its_last_validation_goes_back_a_checkpoint(tmp_path):
    for step in (10, 20):
        (tmp_path / "checkpoint" / f"step-{step}").mkdir(parents=True)
        (tmp_path / "checkpoint" / f"step-{step}" / ".metadata").touch()
    assert curves.discard_incomplete(tmp_path, 20)
    assert last_step(tmp_path) == 10
    assert not curves.discard_incomplete(tmp_path, 20)


def test_mars_stands_out_and_no_two_lines_are_alike(found):
    more = [entry(f"m{i}", i < 5, 0.1, curve(5.0, 3.0)) for i in range(10)]
    looks = plots.style(more)
    assert {looks[e.recipe.name]["color"] == plots.BASELINE for e in more[5:]} == {True}
    assert all("marker" in looks[e.recipe.name] for e in more[:5])
    kinds = {(look.get("marker"), str(look["linestyle"])) for look in looks.values()}
    assert len(kinds) == len(more)


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were drawn."""
    figures, close = [], matplotlib.pyplot.close
    monkeypatch.setattr(matplotlib.pyplot, "close", figures.append)
    yield figures
    for figure in figures:
        close(figure)


def overlap(boxes):
    return any(a.overlaps(b) for a, b in combinations(boxes, 2))


def test_pictures_name_what_was_trained_and_cut_nothing(found, tmp_path, drawn):
    path = tmp_path / "a.png"
    plots.by(lambda e: 1.0, "tokens", found, "GPT-2, 40 steps, 2 seeds", path)
    (axes,) = drawn[0].axes
    assert axes.get_title(loc="left") == "GPT-2, 40 steps, 2 seeds"
    last = axes.transData.transform((40, 3.0))[0]
    assert axes.bbox.x1 - last >= 2 * drawn[0].dpi / 72  # half a marker of 4 points


def rated(name, *rates):
    made = entry(name, True, 0.1, curve(5.0, 3.0))
    sweep = Sweep.of(name, rates, rates[len(rates) // 2], {}, {})
    losses = {Run(name, lr, 0): 3 + (lr - rates[len(rates) // 2]) ** 2 for lr in rates}
    return replace(made, found=search(sweep, losses))


def test_one_rate_is_no_sweep(found, options, tmp_path):
    alone = rated("alone", 1e-3)
    names = table.draw_pictures([alone], make(["tiny_adamw"], options), tmp_path)
    assert names == ["loss_by_tokens.png", "loss_by_time.png"]
    assert {p.name for p in tmp_path.iterdir()} == {*names}
    both = plots.sweeps([alone, *found])
    assert [e.recipe.name for e, _ in both["lr"]] == ["good", "bad"]
    untimed = replace(alone, seconds_per_step=None)
    names = table.draw_pictures([untimed], make(["tiny_adamw"], options), tmp_path)
    assert names == ["loss_by_tokens.png"]


@pytest.mark.parametrize(
    "rates",
    [
        (5e-3, 5.5e-3, 6e-3),
        (1e-3, 2e-3, 4e-3),
        (2.5e-4, 5e-4, 1e-3, 2e-3, 3e-3, 4e-3, 6e-3, 8e-3, 1.2e-2, 2.4e-2, 4.8e-2),
    ],
)
def test_rates_on_the_axis_do_not_run_into_each_other(rates, tmp_path, drawn):
    for name in ("short", "tiny_mars_adamw_transport:betas=0.95,0.99:gamma=0.025"):
        path = tmp_path / "a.png"
        plots.by_value("lr", [rated(name, *rates)], "title", path)
        (axes,) = drawn[-1].axes
        labels = [text for text in axes.get_xticklabels() if text.get_text()]
        assert len(labels) >= 3
        assert not overlap([text.get_window_extent().padded(2) for text in labels])
        assert axes.bbox.width > drawn[-1].dpi * 4


def test_a_picture_of_an_option_without_effect(tmp_path, drawn):
    sweep = Sweep.of("a", [1], 1, {"gamma": ["0.1", "0.2"]}, {"gamma": "0.1"})
    tried = {Run(f"a:gamma={gamma}", 1, 0): 3.0 for gamma in (0.05, 0.1, 0.2)}
    flat = replace(rated("a", 1), found=search(sweep, tried))
    path = tmp_path / "a.png"
    plots.by_value("gamma", [flat], "title", path)
    low, high = drawn[0].axes[0].get_ylim()
    assert low < 3.0 < high


def test_labels_are_moved_apart_and_keep_their_order():
    heights = [1.0, 1.01, 1.02, 3.0]
    moved = plots.spread_out(heights, 0.5)
    assert np.diff(moved).min() >= 0.5 - 1e-9
    assert moved[3] == 3.0
    assert np.mean(moved[:3]) == pytest.approx(1.01)


# ---- the command ---------------------------------------------------------------------


ORPHAN = """
import os, sys
from train.compare.children import spawn
spawn("timeit", ["-n", "1", "import time; print('up', flush=True); time.sleep(60)"],
      threads=1, lock=0)
sys.stdin.readline()
os._exit(1)
"""


def test_a_process_ends_with_the_one_that_started_it():
    """Even where that one has no time to say so."""
    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHAN], cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert parent.stdout.readline() == "up\n"
    began = time.monotonic()
    parent.communicate("now\n", timeout=40)  # until nobody holds its output
    assert time.monotonic() - began < 30


INTERRUPTED = """
import os, signal, sys, time
from train.compare.children import end, spawn
child = spawn("timeit", ["-n", "1", "import time; print('up', flush=True); "
                         "time.sleep(60)"], threads=1, lock=0)
try:
    sys.stdin.readline()
    os.killpg(0, signal.SIGINT)
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(0.3)  # in which the child would say that it was interrupted
    end([child])
    print("ended", child.returncode, flush=True)
"""


def test_a_terminals_ctrl_c_is_not_told_by_the_children():
    parent = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED], cwd=ROOT, text=True, process_group=0,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert parent.stdout.readline() == "up\n"
    said, _ = parent.communicate("now\n", timeout=40)
    assert said == f"ended {-signal.SIGTERM}\n"


def test_a_stopped_measurement_goes_on(tmp_path):
    """With the turns that it has, after another of warm-up."""
    runs, calls = {"a": "a/lr-1/seed-0", "b": "b/lr-1/seed-0"}, []

    def step(stop=math.inf):
        calls.append(len(calls))
        if len(calls) > stop:
            raise KeyboardInterrupt
        return 1.0 + len(calls)

    draft = tmp_path / timing.DRAFT
    steps = {"a": partial(step, stop=4 * 2 * timing.BLOCK + 1), "b": step}
    with pytest.raises(KeyboardInterrupt):
        timing.take_turns(timing.begun(draft, runs, 2), steps, tmp_path)
    assert not (tmp_path / "timing.json").exists()
    assert timing.begun(draft, runs, 2).done == 3
    for other in (({**runs, "b": "b/lr-2/seed-0"}, 2), (runs, 1), ({"a": "x"}, 2)):
        assert timing.begun(draft, *other).done == 0
    calls.clear()
    steps = {"a": step, "b": step}
    timing.take_turns(timing.begun(draft, runs, 2), steps, tmp_path)
    assert len(calls) == (1 + timing.TURNS - 3) * 2 * timing.BLOCK
    found = json.loads((tmp_path / "timing.json").read_text())
    assert {len(values) for values in found.values()} == {timing.TURNS * timing.BLOCK}
    assert not draft.exists()


def words(data, folder, *more):
    return [
        "train.compare", *CALL, "--out", folder, *more,
        "--", "--dataloader.dataset-path", data, *SMALL,
    ]  # fmt: skip


def command(*args):
    return subprocess.Popen(
        [sys.executable, "-m", *args],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


@pytest.fixture(scope="module")
def comparison(data, tmp_path_factory):
    """Two recipes: one fails, the other is stopped on its way; then both again.

    Folder, step at which the second was stopped, and what each of the two calls said.
    """
    folder = tmp_path_factory.mktemp("compare") / "out"
    options = ["--dataloader.dataset-path", str(data), *SMALL]
    in_the_way = folder / FAILS / "rank0.log"
    in_the_way.mkdir(parents=True)
    make(["tiny_adamw", "tiny_mars_adamw"], options, num_seeds=1).save(folder)
    first = command(*words(data, folder, "--jobs", "1"))
    deadline = time.monotonic() + 240
    while last_step(folder / STOPPED) == 0 and first.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    first.terminate()
    said, _ = first.communicate(timeout=60)  # until its runs have ended, too
    assert first.returncode == 130, said
    step = last_step(folder / STOPPED)
    in_the_way.rmdir()
    code, out, err = forked(*words(data, folder, "--jobs", "2"))
    assert code == 0, out + err
    return folder, step, said, out + err


@pytest.mark.application
def test_a_failed_run_is_told_and_costs_no_other(comparison):
    _, step, said, _ = comparison
    assert "0 of 2 runs done" in said
    assert "tiny_adamw lr 0.004 seed 0: FAILED (exit code 2), tried again by" in said
    assert "Is a directory" in said
    assert "tiny_mars_adamw lr 0.006 seed 0: starts" in said
    assert "stopped before its end: run the same command again" in said
    assert 0 < step < STEPS


@pytest.mark.application
def test_the_next_call_continues(comparison):
    folder, step, _, told = comparison
    assert "tiny_adamw lr 0.004 seed 0: starts" in told
    assert "tiny_mars_adamw lr 0.006 seed 0: continues" in told
    assert "2 of 2 runs done" in told
    console = (folder / STOPPED / "console.txt").read_text()
    assert f"after step {step} of {STEPS}" in console
    points = set(curves.validations(folder / STOPPED))
    # one that fell together with the checkpoint may have been cut off
    assert {1, *range(2, STEPS + 1, 2)} - points <= {step}
    checkpoints = (folder / STOPPED / "checkpoint").iterdir()
    assert [p.name for p in checkpoints] == [f"step-{STEPS}"]


@pytest.mark.application
def test_what_is_finished_is_recognised(comparison):
    folder, *_ = comparison
    said: list[str] = []
    loaded = study.Study.load(folder)
    Session(loaded, folder, jobs=2, lock=0, say=said.append).train()
    assert said == ["2 of 2 runs done (more where a sweep goes on), about 0:00:00 left"]


def test_a_recipe_may_have_options_of_its_own(data):
    """CONFIG:OPTION=VALUE trains, and is shown, as a recipe by itself."""
    names = [
        "tiny_adamw:betas=0.95,0.99",
        "tiny_moonlight:correction=transport:gamma=0",
    ]
    options = ["--dataloader.dataset-path", str(data)]
    made = study.make(names, {}, {}, steps=20, num_seeds=1, threads=1, options=options)
    given = made.settings[names[0]]
    assert given["optimizer.betas"] == [0.95, 0.99]
    assert not made.recipes[names[1]].corrects  # gamma is 0
    line = made.arguments(Run(names[1], 1e-3, 0), data)
    assert line[:2] == ["--config", "tiny_moonlight"]
    assert line[2:6] == [
        "--optimizer.correction",
        "transport",
        "--optimizer.gamma",
        "0",
    ]
    for wrong in ("tiny_adamw:betas", "tiny_adamw:=1", "tiny_adamw:eps=/tmp"):
        with pytest.raises(UserError, match=f"got {wrong}, expected CONFIG:OPTION"):
            study.command_line(wrong)


@pytest.mark.application
def test_table_numbers_and_pictures(comparison, capsys):
    folder, _, _, told = comparison
    raw = json.loads((folder / "results.json").read_text())
    assert set(raw["optimizers"]) == {"tiny_adamw", "tiny_mars_adamw"}
    for name, row in raw["optimizers"].items():
        assert row["final"]["mean"] == raw["curves"][name]["mean_loss"][-1] < 4.5
        assert row["seconds_per_step"] > 0
        assert raw["curves"][name]["tokens"][-1] == STEPS * 8 * 32
    for name in ("tokens", "time"):
        assert (folder / f"loss_by_{name}.png").stat().st_size > 20_000
    table = (folder / "table.md").read_text()
    assert table in told
    report(study.Study.load(folder), folder)  # again, from what is there
    assert table in capsys.readouterr().out
