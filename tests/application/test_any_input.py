"""Whatever words and bytes a command gets, it ends with one line and exit code 2, or
does what they say. Hypothesis draws inputs from a fixed seed: ``MARSOPT_EXAMPLES=10``
draws ten times as many.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from contextlib import contextmanager
from operator import attrgetter
from typing import get_args

import hypothesis
import pytest
from hypothesis import strategies as st

import configs
from marsopt.profiling import command as profile
from tests.application.made import SECONDS, STEP, called, refused, samples
from tests.application.test_malformed import READ
from tests.forks import forked
from train import export, import_hf, plan, prepare, sample
from train.engine.launch import parse
from train.engine.options import options
from train.engine.resolve import FOLLOW, UNUSED, _what_divides, resolve
from train.errors import UserError
from train.evaluate import __main__ as evaluate
from train.files import check_folder

LONG = "9" * 20  # of a number on a command line
TIMES = int(os.environ.get("MARSOPT_EXAMPLES", "1"))
MOST_TRAINED = 2 * TIMES


def drawn(num, **what):
    """Call a test with ``num`` inputs."""
    settings = hypothesis.settings(
        max_examples=num * TIMES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=set(hypothesis.Phase) - {hypothesis.Phase.explain},
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    return lambda test: settings(hypothesis.given(**what)(test))


def is_refused(main, *args):
    """Whether it is, in one line, or is done; nothing else may become of a command."""
    code, out, err = called(main, *args)
    lines = [line for line in err.splitlines() if "SHA256SUMS" not in line]
    assert code in (0, 2), err
    assert "Traceback" not in out + err, err
    if code:
        is_usage = "usage: " in err or "For full helptext" in err
        assert is_usage or all(line.startswith("error: got ") for line in lines), err
    return code == 2


# ---- bytes ---------------------------------------------------------------------------


@contextmanager
def replaced(path, content):
    """Give a file another content for as long as a command reads it."""
    whole = path.read_bytes()
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(whole)


@drawn(60, data=st.data())
def test_any_bytes_in_a_file(place, data):
    """Some are lost, some come in; where there is a checksum, that is noticed."""
    file = data.draw(st.sampled_from([name for name in READ if "index" not in name]))
    whole = (place / file).read_bytes()
    start = data.draw(st.integers(0, len(whole)))
    new = data.draw(st.binary(max_size=20))
    lost = data.draw(st.just(len(new)) | st.integers(0, len(whole) - start))
    changed = whole[:start] + new + whole[start + lost :]
    with replaced(place / file, changed):
        told = is_refused(*READ[file](place))
    shutil.rmtree(place / "out", ignore_errors=True)
    summed = file == "data/val.bin" or file.startswith(STEP)
    if summed and changed != whole and not file.endswith("SHA256SUMS"):
        assert told


# ---- words of a command --------------------------------------------------------------

NUMBERS = ["-1", LONG, "-" + LONG, "9" * 5000, "nan", "inf", "1e400", "x", ""]
OPTIONS = {
    "sample": (sample.main, ["--tokens", "--top-k", "--temperature", "--seed"]),
    "evaluate": (
        evaluate.main,
        ["--limit", "--num-fewshot", "--window", "--batch-size", "--step"],
    ),
    "export": (export.main, ["--step"]),
    "prepare": (prepare.main, ["--val-fraction", "--shard-tokens", "--processes"]),
    "plan": (
        plan.main,
        ["--ranks", "--replicas", "--link-gbps", "--tflops", "--memory-gbs"],
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_numbers_out_of_range(name, made, tmp_path):
    run, out = ("--run", made / "run"), ("--out", tmp_path / "out")
    usual = {
        "sample": run,
        "evaluate": (*run, "--loss", "--data", made / "data"),
        "export": (*run, *out),
        "prepare": ("--source", "text", *out, made / "a.txt"),
        "plan": ("--config", "tiny_mars_m"),
    }
    main, names = OPTIONS[name]
    for option in names:
        for number in NUMBERS:
            assert option in refused(main, *usual[name], f"{option}={number}")
    for given in ("=--", "=\udcff", "=\ud800"):
        refused(main, *usual[name], f"{names[0]}{given}")


@pytest.mark.parametrize("option", ["--layers", "--width", "--vocab", "--steps"])
def test_the_profiler_answers_at_once(option):
    for number in ("-1", "0", LONG, "9" * 4000, "10000000000"):
        began = time.monotonic()
        with pytest.raises((ValueError, SystemExit), match=f"got {option}|2"):
            profile.arguments([f"{option}={number}"])
        assert time.monotonic() - began < SECONDS


def test_plans_have_a_limit():
    said = refused(plan.main, "--config", "tiny_mars_m", "--ranks", 10_000_000)
    assert "got --ranks 10000000, expected at most 8192" in said
    for name in ("plot", "plot.abc", "", ".png/"):
        args = ("--config", "tiny_mars_m", "--sweep", "--picture", name)
        assert "--picture" in refused(plan.main, *args)


@pytest.mark.parametrize("batch", [1_000_000_001, 10**18 + 9, 2 * 3 * 10**17])
def test_large_batches_are_explained_at_once(batch):
    began = time.monotonic()
    said = [_what_divides(batch, world) for world in (1, 7, 8, 64)]
    assert time.monotonic() - began < 1
    assert all(re.search("start 1|one of 1", text) or "start" in text for text in said)


@pytest.mark.parametrize("prompt", ["", "\ud800", "\udcff"], ids=ascii)
def test_prompts_that_nobody_can_continue(prompt, made):
    refused(*samples(made, f"--prompt={prompt}"))


@pytest.mark.parametrize(
    "path",
    ["", "\udcff", "x" * 5000, "a/" * 2000, "~nobody/x", "/dev/null", "a.txt"],
    ids=lambda path: ascii(path)[:12],
)
def test_paths_that_are_no_folders(path, made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(made / "a.txt", tmp_path)
    model = ("--model", made / "hf")
    for main, args in (
        (sample.main, [f"--run={path}"]),
        (sample.main, [f"--model={path}"]),
        (export.main, [f"--run={path}", "--out", tmp_path / "out"]),
        (import_hf.main, [f"--model={path}", "--out", tmp_path / "out"]),
        (evaluate.main, [*model, "--loss", f"--data={path}"]),
    ):
        refused(main, *args)
    if path not in ("~nobody/x",):
        refused(import_hf.main, *model, f"--out={path}")
        refused(prepare.main, "--source=text", f"--out={path}", made / "a.txt")
    for source in ("openwebtext", "fineweb-edu"):
        named = (f"--source={source}", f"--dataset={path}", "--tokenizer=bytes")
        refused(prepare.main, *named, "--processes=1", "--out=out")


def test_folders_that_are_links(made, tmp_path):
    """One to an empty folder is that folder; one to nothing is none."""
    inner, link, dead = (tmp_path / name for name in ("inner", "link", "dead"))
    inner.mkdir()
    link.symlink_to(inner)
    dead.symlink_to(tmp_path / "none")
    imports = (import_hf.main, "--model", made / "hf", "--out")
    prepares = (prepare.main, "--source", "text", made / "a.txt", "--out")
    for act in (imports, prepares):
        for out in (dead, dead / "below"):
            said = refused(*act, out)
            assert f"got --out {out}, where {dead} is a link to nothing, ex" in said
        assert called(*act, link)[0] == 0
        assert link.is_symlink() and any(inner.iterdir())
        shutil.rmtree(inner)
        inner.mkdir()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dead", "inner", "link"]
    with pytest.raises(UserError, match="got --dump-folder .*, where .* is a link to "):
        check_folder("--dump-folder", dead)


# ---- words of a training -------------------------------------------------------------

NUMERALS = {
    int: (st.integers(-10, 10) | st.integers(2**31)).map(str),
    float: st.floats().map(str),
}
WORDS = st.one_of(
    *NUMERALS.values(),
    st.text(st.characters(exclude_characters="/."), max_size=20),
    st.sampled_from(["", LONG, "true", "none", "/dev/null", "/proc/1/x", "x" * 300]),
)
# compiling takes longer than all else; options that are always refused have tests
APART = ("compile", "activation_checkpoint", "optimizer.compile", *UNUSED, *FOLLOW)
RECIPE = [
    option
    for option in options(configs.tiny_mars_adamw())
    if not {option.path, option.section} & set(APART)
]
SMALL = (
    "--config", "tiny_mars_adamw", "--training.steps=1", "--training.seq-len=16",
    "--training.local-batch-size=2", "--training.global-batch-size=2",
    "--lr-scheduler.warmup-steps=0", "--validator.samples=2",
)  # fmt: skip


def typed(option):
    """What somebody types for an option: as often as not of its kind."""
    kinds = (option.kind, *get_args(option.kind))
    likely = [words for kind, words in NUMERALS.items() if kind in kinds]
    if names := [kind for kind in kinds if isinstance(kind, str)]:
        likely.append(st.sampled_from(names))
    words = (st.one_of(likely) if likely else WORDS) | WORDS
    with_value = words.map(lambda word: f"{option.flag}={word}")
    return st.sampled_from(sorted(option.flags)) | with_value


trained = []  # options of trainings, which take seconds each


@pytest.mark.application
@drawn(20, data=st.data())
def test_any_word_for_an_option_of_a_training(made, data):
    """What is not refused before the first step is what was typed, and some train."""
    option = data.draw(st.sampled_from(RECIPE))
    where = f"--dataloader.dataset-path={made / 'data'}"
    words = (*SMALL, where, data.draw(typed(option)))
    configured = []

    def main():
        configured.append(parse(sys.argv[1:]))
        resolve(configured[0], 1)

    if is_refused(main, *words):
        return
    value = attrgetter(option.path)(configured[0])
    _, is_valued, word = words[-1].partition("=")
    if is_valued and option.kind in (int, float, str):
        assert value == option.kind(word)
    if len(trained) == MOST_TRAINED:
        return
    trained.append(option)
    code, out, err = forked("train", *words)
    assert code in (0, 2), err
    assert "Traceback" not in out + err
