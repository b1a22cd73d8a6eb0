"""python -m train.compare: its store, its session, its numbers, tables and pictures."""

from __future__ import annotations

import json
import math
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import matplotlib.pyplot
import numpy as np
import pytest

from tests import quick_setting
from tests.quick_setting import AXES, Quick
from train.compare import __main__ as compare
from train.compare import plots, results, table, timing
from train.compare.results import entries, rows
from train.compare.search import Axis
from train.compare.session import Session
from train.compare.store import Store, final
from train.compare.study import Method, Run, Study, changed, named
from train.errors import UserError

ROOT = Path(__file__).parent.parent


def session(study, folder, **own):
    said: list[str] = []
    usual = dict(jobs=2, threads=1, minutes=None, lock=0, say=said.append)
    titles = own.pop("titles", list(study.methods))
    store = Store(folder)
    store.agree(study.setting.identity())
    made = Session(study, store, folder / "runs", titles, **usual | own)
    return made, said


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A study that was run to its end, its folder, and what was said."""
    folder, study = tmp_path_factory.mktemp("quick"), quick_setting.study()
    made, said = session(study, folder)
    assert made.train()
    return study, folder, said


# ---- runs ----------------------------------------------------------------------------


def test_every_method_has_as_many_trials_and_its_seeds(ran):
    study, folder, said = ran
    store = Store(folder)
    for title, method in study.methods.items():
        mine = [
            line
            for line in store.lines.values()
            if line["recipe"]["base"] == method.recipe["base"]
        ]
        by_seed = statistics.multimode(line["seed"] for line in mine)
        searched = [line for line in mine if line["seed"] == 0]
        assert len(searched) == study.trials_of(title) == (9 if method.axes else 0)
        others = {line["seed"] for line in mine} - {0}
        assert others == set(range(1, method.num_seeds + 1)), by_seed
    assert said[0] == "26 runs left"
    assert said[-1].endswith("0 runs left")
    assert "control (lr 0.003325, beta1 0.6856, seed 0): " in "\n".join(said)
    assert not (folder / "runs").exists()


def test_a_call_that_was_ended_is_continued(ran, tmp_path):
    """Whatever of it was stored, one run at a time or two; and nothing runs twice."""
    study, whole, _ = ran
    lines = (whole / "runs.jsonl").read_text().splitlines(keepends=True)
    cut = "".join(lines[:13]) + lines[13][:40]  # killed while it wrote
    session(study, tmp_path)  # which notes the setting
    (tmp_path / "runs.jsonl").write_text(cut)
    made, said = session(study, tmp_path, jobs=1)
    assert made.train()
    assert said[0].startswith("13 runs left, about 0:00:")
    again = Store(tmp_path).losses
    assert again == Store(whole).losses and len(again) == 26
    quiet, said = session(study, tmp_path)
    assert quiet.train() and said == ["0 runs left"]


def test_a_run_that_ended_unseen_is_taken_in(tmp_path):
    study = quick_setting.study(trials=1, num_draws=1)
    made, said = session(study, tmp_path, titles=["control"])
    run = study.wanted("control", {})[0]
    folder = made.place("control", run)
    assert folder.name.startswith("lr-0.003325-beta1-0.6856-seed-0-")
    folder.mkdir(parents=True)
    found = dict(curve=[[30, 1.25]], seconds=1.0)
    (folder / "found.json").write_text(json.dumps(found))
    assert made.train()
    assert Store(tmp_path).losses[run.key] == 1.25
    assert any("seed 0): 1.2500. 3 runs left" in line for line in said)


def test_a_failed_run_is_told_costs_no_other_and_is_tried_again(tmp_path):
    in_the_way = tmp_path / "way"
    in_the_way.touch()
    study = quick_setting.study(trials=3, num_draws=2)
    recipe = dict(base=1.0, slow=1, fails=str(in_the_way))
    methods = dict(study.methods) | {"fails": Method(recipe, AXES, num_seeds=1)}
    study = replace(study, methods=methods)
    made, said = session(study, tmp_path)
    assert not made.train()
    told = "\n".join(said)
    assert told.count("FAILED (exit code 1), tried again by the next call") == 2
    assert "there is something in the way" in told
    losses = Store(tmp_path).losses
    assert len(losses) == 3 + 3 + 3 + 3 + 2
    in_the_way.unlink()
    again, said = session(study, tmp_path)
    assert again.train() and said[0].startswith("4 runs left, about")


def test_the_time_ends_a_call(tmp_path):
    recipe = dict(base=1.0, slow=1, waits=30.0)
    study = Study(title="slow", setting=Quick(), methods={"a": Method(recipe, AXES)})
    made, said = session(study, tmp_path, minutes=0.02)
    began = time.monotonic()
    assert not made.train()
    assert time.monotonic() - began < 20
    assert said[-1] == "the time is over: the same command goes on"
    lines = dict(recipe=recipe | dict(lr=1.0, beta1=0.5), seed=5, curve=[[1, 2.0]])
    Store(tmp_path).agree(study.setting.identity())
    (tmp_path / "runs.jsonl").write_text(json.dumps(lines | dict(wall=90.0)) + "\n")
    made, said = session(study, tmp_path, minutes=1)
    began = time.monotonic()
    assert not made.train()  # a run of 90 s is not begun
    assert time.monotonic() - began < 5 and said == ["4 runs left, about 0:03:00"]


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
signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal
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


# ---- the store -----------------------------------------------------------------------


def test_what_runs_share_may_grow_and_not_change(tmp_path):
    store = Store(tmp_path)
    store.agree(dict(steps=3, one={"lr": 1.0, "eps": (1, 2)}))
    Store(tmp_path).agree(dict(steps=3, two={"lr": 2.0}))
    assert set(Store(tmp_path).setting) == {"steps", "one", "two"}
    with pytest.raises(UserError, match="got steps=4 where .*setting.json has 3"):
        Store(tmp_path).agree(dict(steps=4))
    with pytest.raises(UserError, match="got one lr=1.5 where .* has 1.0, expected"):
        Store(tmp_path).agree(dict(steps=3, one={"lr": 1.5}))


def test_runs_without_their_setting_are_refused(tmp_path):
    line = dict(recipe={}, seed=0, curve=[[1, 2.0]])
    (tmp_path / "runs.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(UserError, match="runs.jsonl without setting.json, expected"):
        Store(tmp_path)
    for content in ('{"steps": 10}', "{}", "[]", "x", ""):
        (tmp_path / "setting.json").write_text(content)
        if content.startswith('{"'):
            with pytest.raises(UserError, match="got steps=999 where .* has 10"):
                Store(tmp_path).agree(dict(steps=999))
            continue
        with pytest.raises(UserError, match="setting.json that does not read"):
            Store(tmp_path)


@pytest.mark.parametrize(
    "content",
    ["[]\n", "{}\n", "nothing\n", '{"recipe": {}, "seed": 0}\n', "\xff\n",
     '{"recipe": {}, "seed": 0, "curve": []}\n', "5\n",
     '{"recipe": {}, "seed": 0, "curve": [[1, "x"]]}\n'],
)  # fmt: skip
def test_a_store_that_was_altered(tmp_path, content):
    (tmp_path / "runs.jsonl").write_text(content, encoding="latin-1")
    with pytest.raises(UserError, match="runs.jsonl that does not read .*restore it"):
        Store(tmp_path)


def test_a_run_that_diverged_is_infinitely_bad(tmp_path):
    assert final(dict(curve=[[1, 2.0], [2, None]])) == math.inf
    assert final(dict(curve=[[1, 2.0], [2, 1.5]])) == 1.5


# ---- the study -----------------------------------------------------------------------


def test_a_study_by_its_name():
    assert named("study", "tests.quick_setting").title == "quick"
    for name in ("none", "__name__"):
        with pytest.raises(UserError, match=f"got study '{name}', expected one of"):
            named(name, "tests.quick_setting")
    with pytest.raises(UserError, match="got --module none_here, of which"):
        named("study", "none_here")


def test_fields_of_a_study_can_be_changed():
    study = quick_setting.study()
    given = dict(steps=7, noise=1, trials=3, num_draws=2, num_seeds=9)
    other = changed(study, given)
    assert (other.setting.steps, other.setting.noise) == (7, 1)
    assert (other.trials, other.num_draws) == (3, 2)
    assert {method.num_seeds for method in other.methods.values()} == {9}
    for name, value in (("step", 3), ("steps", "x"), ("steps", 1.5), ("trials", 1),
                        ("num_seeds", 0)):  # fmt: skip
        with pytest.raises(UserError, match=f"got --set {name}={value} .*expected val"):
            changed(study, {name: value})


def test_a_study_that_is_none():
    study = quick_setting.study()
    with pytest.raises(ValueError, match="num_draws=5 of trials=4"):
        replace(study, trials=4)
    methods = dict(study.methods) | {"c": Method({}, AXES, control="d")}
    with pytest.raises(ValueError, match="got c with control='d', expected the title"):
        replace(study, methods=methods)
    with pytest.raises(ValueError, match="got a study without methods"):
        replace(study, methods={})


def test_a_function_that_makes_no_study(monkeypatch):
    def reversed_axis():
        return Axis("lr", 2.0, 1.0)

    for made in (reversed_axis, lambda x: x, 5):
        monkeypatch.setattr(quick_setting, "study", made)
        with pytest.raises(UserError, match="study"):
            named("study", "tests.quick_setting")


# ---- numbers -------------------------------------------------------------------------


def lines_of(study, title, losses, searched=(3.0, 3.5, 4.0, 4.5, 5.0)):
    """Runs of a method: a search whose first draw is the best, then seeds."""
    found = {}
    for loss in searched:
        (run, *_) = study.wanted(title, {k: final(v) for k, v in found.items()})
        found[run.key] = dict(recipe=run.recipe, seed=0, curve=[[30, loss]])
    for run, loss in zip(study.wanted(title, {k: final(v) for k, v in found.items()}),
                         losses, strict=False):  # fmt: skip
        steps = [3 * (i + 1) for i in range(10)]
        drop = np.linspace(1, 0, 10)
        own = None if loss is None else loss
        curve = [[s, None if own is None else own + d]
                 for s, d in zip(steps, drop, strict=True)]  # fmt: skip
        found[run.key] = dict(recipe=run.recipe, seed=run.seed, curve=curve)
    return found


def judged(tmp_path, **losses):
    """Rows by title, of a study with five draws and no more."""
    methods = {t: Method(dict(base=t), AXES, num_seeds=4) for t in losses}
    study = Study(title="x", setting=Quick(), methods=methods, trials=5, num_draws=5)
    Store(tmp_path).agree(study.setting.identity())
    with open(tmp_path / "runs.jsonl", "w") as file:
        for title, own in losses.items():
            for line in lines_of(study, title, *own).values():
                file.write(json.dumps(line) + "\n")
    found = entries(study, Store(tmp_path), tmp_path)
    return study, found, {row.entry.title: row for row in rows(found)}


def test_a_difference_is_judged_by_the_pooled_noise(tmp_path):
    control = [3.00, 3.02, 2.98, 3.00]
    study, found, by_title = judged(
        tmp_path,
        control=(control,),
        leads=([2.90, 2.92, 2.88, 2.90],),
        ahead=([2.98, 3.00, 2.96, 2.98],),
        same=([2.995, 3.015, 2.975, 2.995],),
        behind=([3.1, 3.12, 3.08, 3.1],),
        few=([2.9, 2.9],),
    )
    assert [e.title for e in found][0] in ("leads", "few")
    free = 5 * 3 + 1
    want = math.sqrt(5 * 3 * statistics.variance(control) / free)
    assert results.noise(found) == pytest.approx(want)
    row = by_title["leads"]
    assert row.difference == pytest.approx(-0.1)
    assert row.z == pytest.approx(-0.1 / (want * math.sqrt(1 / 2)))
    said = {title: row.verdict for title, row in by_title.items()}
    assert said == dict(control="", leads="leads", ahead="ahead, not shown",
                        same="tie", behind="behind", few="leads so far")  # fmt: skip
    assert by_title["few"].entry.num_missing == 2
    assert by_title["control"].z is None
    # 3 + 27 (1 - t) meets 3.0 where a tenth of the way is missing
    assert by_title["leads"].tokens == pytest.approx((27 + 3 * 0.1) / 30, abs=0.03)
    assert by_title["behind"].tokens == math.inf


def test_draws_are_compared_five_at_a_time(tmp_path):
    _, _, by_title = judged(
        tmp_path,
        control=([3.0], (3.0, 4.0, 4.0, 4.0, 4.0)),
        wins=([3.0], (2.9, 9.0, 9.0, 9.0, 9.0)),
    )
    assert by_title["wins"].wins == 1.0
    seven = dict(mine=[1.0, 9, 9, 9, 9, 9, 9], theirs=[2.0, 2, 2, 2, 2, 2, 2])
    sets = list(combinations(range(7), 5))
    share = sum(0 in chosen for chosen in sets) / len(sets)
    made = []
    for e, own in zip((by_title["wins"].entry, by_title["control"].entry),
                      seven.values(), strict=True):  # fmt: skip
        # what a search finds after its draws does not count, however good
        losses = {(float(i),): loss for i, loss in enumerate([*own, 0.5, 0.4])}
        made.append(replace(e, num_draws=7, found=replace(e.found, losses=losses)))
    assert rows(made)[0].wins == pytest.approx(share)
    same = [made[1], replace(made[1], title="same", control=made[1].title)]
    assert rows(same)[1].wins == 0.0  # equal is no win


def test_a_seed_that_diverged_is_told(tmp_path):
    study, found, by_title = judged(
        tmp_path, control=([3.0, 3.1, 3.0, 3.1],), bad=([2.0, None, 2.0, 2.0],)
    )
    assert found[-1].title == "bad" and by_title["bad"].verdict == ""
    assert "| 1 diverged | 4 |  |  |  |" in table.markdown(
        study, Store(tmp_path), found, rows(found)
    )


def test_nothing_leads_a_control_that_diverged(tmp_path):
    study, found, by_title = judged(
        tmp_path, control=([3.0, None, 3.0, 3.1],), good=([2.0, 2.1, 2.0, 2.0],)
    )
    row = by_title["good"]
    assert (row.difference, row.z, row.tokens, row.verdict) == (None, None, None, "")
    assert "| 1 diverged |" in table.markdown(
        study, Store(tmp_path), found, rows(found)
    )


def test_the_table_names_what_is_not_there(ran):
    study, folder, _ = ran
    other = replace(study, methods=dict(study.methods) | {"new": Method({}, AXES)})
    found = entries(other, Store(folder), folder)
    text = table.markdown(other, Store(folder), found, rows(found))
    assert "Not here, since not run to an end: new." in text
    with pytest.raises(UserError, match="whose search has ended, expected one"):
        table.report(other, Store(folder / "none"), folder / "none")


def test_table_numbers_and_pictures(ran, capsys):
    study, folder, _ = ran
    (folder / timing.FILE).write_text('{"control": 0.1, "better": 0.2}')
    table.report(study, Store(folder), folder)
    told = capsys.readouterr().out
    text = (folder / "table.md").read_text()
    assert text in told
    better = next(line for line in text.splitlines() if line.startswith("| better"))
    assert " leads | 100% | " in better and better.endswith(" 2.00x |")
    assert "| 9, inside " in better
    raw = json.loads((folder / "results.json").read_text())
    assert raw["methods"]["better"]["difference"] == pytest.approx(-0.1, abs=0.05)
    assert len(raw["methods"]["control"]["trials"]) == 9
    assert raw["methods"]["fixed"]["trials"] == []
    for name in ("losses", "by_lr", "by_beta1", "by_steps", "by_time"):
        assert f"{name}.png" in told
        pixels = matplotlib.image.imread(folder / f"{name}.png")
        assert (pixels[..., :3].std(-1) > 0.1).mean() > 0.0003  # colours


def test_a_profile_is_the_best_near_a_value(ran):
    study, folder, _ = ran
    (e, *_) = [e for e in entries(study, Store(folder), folder) if e.title == "control"]
    axis = AXES[0]
    values, losses = plots.profile(axis, e)
    assert values == sorted(point[0] for point in e.found.losses)
    assert min(losses) == e.found.losses[e.found.best]
    for value, loss in zip(values, losses, strict=True):
        near = [
            own for point, own in e.found.losses.items()
            if abs(axis.place(point[0]) - axis.place(value)) <= 0.5
        ]  # fmt: skip
        assert loss == min(near)


def test_pictures_name_methods_and_no_two_lines_are_alike(ran, monkeypatch):
    study, folder, _ = ran
    drawn = []
    monkeypatch.setattr(matplotlib.pyplot, "close", drawn.append)
    found = entries(study, Store(folder), folder)
    plots.draw(study, found, folder)
    by_lr = drawn[1].axes[0]
    assert {text.get_text() for text in by_lr.texts} == {"control", "better"}
    curves = [line for line in by_lr.lines if len(line.get_xdata()) > 1]
    looks = {(x.get_color(), str(x.get_linestyle()), x.get_marker()) for x in curves}
    assert len(looks) == 2
    ticks = [t.get_text() for t in drawn[2].axes[0].get_xticklabels()]
    assert "0.9" in ticks and drawn[2].axes[0].xaxis_inverted()


def test_labels_are_moved_apart_and_keep_their_order():
    heights = [1.0, 1.01, 1.02, 3.0]
    moved = plots.spread_out(heights, 0.5)
    assert np.diff(moved).min() >= 0.5 - 1e-9
    assert moved[3] == 3.0
    assert np.mean(moved[:3]) == pytest.approx(1.01)


def test_steps_are_timed_in_turns(ran, monkeypatch):
    study, folder, _ = ran
    monkeypatch.setattr(timing, "TURNS", 2)
    found = timing.measure(study, Store(folder))
    assert set(found) == {*study.methods}
    assert 1.3 < found["better"] / found["control"] < 3
    calls = []

    def rarely():  # every tenth step takes long
        calls.append(0)
        time.sleep(0.02 if len(calls) % 10 == 0 else 0.0)

    monkeypatch.setattr(Quick, "stepper", lambda self, recipe: rarely)
    alone = replace(study, methods={"control": study.methods["control"]})
    assert timing.measure(alone, Store(folder))["control"] > 0.0019


# ---- the command ---------------------------------------------------------------------


def call(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["compare", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        compare.main()
    return ended.value.code


QUICK = ("study", "--module", "tests.quick_setting")


def test_the_command_runs_times_reports_and_goes_on(tmp_path, monkeypatch, capfd):
    own = (*QUICK, "--out", tmp_path / "out", "--jobs", 2)
    own = (*own, "--set", "trials=2", "--set", "num_draws=1", "num_seeds=1")
    assert call(monkeypatch, *own, "--methods", "control", "--timing") == 0
    told = capfd.readouterr().out
    assert "3 runs left" in told and "timing: turn 6 of 6" in told
    assert "Not here, since not run to an end: better; fixed." in told
    assert call(monkeypatch, *own) == 0
    told = capfd.readouterr().out
    assert "4 runs left, about" in told and "Not here" not in told
    assert call(monkeypatch, *own, "--only", "report") == 0
    with pytest.raises(
        UserError, match="got --methods 'x', expected some of 'control'"
    ):
        compare.compare(compare.arguments([*map(str, own), "--methods", "x"]))
    other = [*map(str, own), "steps=31"]
    other.remove("--jobs"), other.remove("2")
    with pytest.raises(UserError, match="got steps=31 where .* has 30"):
        compare.compare(compare.arguments(other))


@pytest.mark.parametrize(
    "words, message",
    [
        (["--set", "steps"], "got --set steps, expected NAME=VALUE"),
        (
            ["--set", "none=1"],
            "got --set none=1 .*expected values of trials, num_draws",
        ),
        (["--jobs", "0"], "got --jobs 0, expected at least 1"),
        (["--minutes", "-1"], "got --minutes -1.0, expected at least 0"),
        (["--out", __file__], "expected a folder"),
    ],
)
def test_bad_input_is_one_line(tmp_path, words, message):
    own = [*QUICK, *([] if "--out" in words else ["--out", str(tmp_path)]), *words]
    with pytest.raises(UserError, match=message):
        compare.compare(compare.arguments(own))


def test_two_calls_do_not_meet_in_one_folder(tmp_path, monkeypatch):
    import fcntl
    import os

    monkeypatch.setattr(compare, "WAIT", 0)
    (tmp_path / compare.LOCK).touch()
    held = os.open(tmp_path / compare.LOCK, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(UserError, match="another process is at work"):
        compare.compare(compare.arguments([*QUICK, "--out", str(tmp_path)]))
    os.close(held)


def test_an_axis_that_a_recipe_has_too_is_the_axis_s():
    method = Method(dict(lr=1.0, other=2), (Axis("lr", 1e-3, 1e-2),))
    assert method.at((5e-3,)) == dict(lr=5e-3, other=2)
    assert Run(dict(a=1, b=2), 3).key == Run(dict(b=2, a=1), 3).key
