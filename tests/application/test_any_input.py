"""Whatever values, bytes and words a command is given, it ends with one line and exit
code 2, or does what they say. Hypothesis draws inputs from a fixed seed:
``MARSOPT_EXAMPLES=10`` draws ten times as many.
"""

# ruff: noqa: F401, F811  (fixtures of another file)

from __future__ import annotations

import json
import os
import shutil
import sys
from contextlib import contextmanager
from functools import reduce
from operator import attrgetter, getitem
from typing import get_args

import hypothesis
import pytest
from hypothesis import strategies as st

import configs
from tests.application.test_malformed import (
    JSON,
    LONG,
    OPTIONS,
    READ,
    SHAPE,
    STEP,
    base,
    called,
    made,
    place,
    samples,
)
from tests.forks import forked
from train import export, sample
from train.engine.launch import parse
from train.engine.options import options
from train.engine.resolve import FOLLOW, UNUSED, resolve
from train.runs import checksums
from train.runs.initial import check_initial, note_shape, shape_of
from train.runs.settings import FROM, HELD_OUT, claim, settings

EXAMPLES = int(os.environ.get("MARSOPT_EXAMPLES", "1"))
TEXTS = st.text(st.characters(), max_size=20)  # surrogates too
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXTS),
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
    max_leaves=5,
)


def drawn(num, **what):
    """Call a test with ``num`` inputs."""
    settings = hypothesis.settings(
        max_examples=num * EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=set(hypothesis.Phase) - {hypothesis.Phase.explain},
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    return lambda test: settings(hypothesis.given(**what)(test))


def outcome(main, *args):
    """ "refused" in one line, or "done"; nothing else may become of a command."""
    code, out, err = called(main, *args)
    lines = [line for line in err.splitlines() if "SHA256SUMS" not in line]
    assert code in (0, 2), err
    assert "Traceback" not in out + err, err
    if code:
        is_usage = "usage: " in err or "For full helptext" in err
        assert is_usage or all(line.startswith("error: got ") for line in lines), err
    said = "refused" if code else "done"
    hypothesis.event(said)  # counted by --hypothesis-show-statistics
    return said


# ---- files ---------------------------------------------------------------------------


@contextmanager
def replaced(path, content):
    """Give a file another content for as long as a command reads it."""
    whole = path.read_bytes()
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(whole)


def training(place, **of_checkpoint):
    """A configuration of the model of ``made``, by which its run continues."""
    config = configs.tiny_mars_adamw()
    config.model_spec.model.shape = SHAPE
    config.dataloader.dataset_path = str(place / "data")
    config.dump_folder = str(place / "run")
    config.training.seq_len = 16
    config.training.local_batch_size = config.training.global_batch_size = 1
    for name, value in of_checkpoint.items():
        setattr(config.checkpoint, name, value)
    resolve(config, 1)
    return config


def goes_on(place):
    def main():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RANK", "0")
            claim(training(place))

    return (main,)


def starts(place):
    """A training elsewhere, from all that a checkpoint has."""

    def main():
        config = training(place, initial_load_model_only=False)
        config.dump_folder = str(place / "out")
        config.checkpoint.initial_load_path = str(place / STEP)
        check_initial(config)

    return (main,)


def reads_note(place):
    return (lambda: shape_of(place / "noted", None),)


def samples_run(place):
    return sample.main, "--run", place / "run", "--tokens", 2


def exports(place):
    return export.main, "--run", place / "run", "--out", place / "out"


def needed_by(file):
    """Where a JSON file of the table has a value of which another type is refused."""
    return {where for where, right in JSON[file][2].items() if not right}


SETTINGS, CONFIG = "run/settings.json", "hf/config.json"
# each JSON file, who reads it, and what of it is needed: places; everything, but for
# what a run only notes; nothing
READERS = [
    *((file, act, needed_by(name)) for name, (file, act, _) in JSON.items()),
    ("data/meta.json", goes_on, needed_by("meta")),
    (SETTINGS, samples_run, needed_by("settings")),
    (SETTINGS, exports, needed_by("settings")),
    (SETTINGS, goes_on, None),
    (SETTINGS, starts, None),
    ("noted/shape.json", reads_note, None),
    (CONFIG, samples, needed_by("config")),
    ("hf/tokenizer.json", samples, set()),
]


def within(value, above=()):
    """Where values lie in a JSON file."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*above, key)
            yield from within(inner, (*above, key))


def is_another_kind(value, other):
    """Whether two values are of two types of JSON, which has one for numbers."""
    kinds = [bool, int | float, str, list, dict, type(None)]
    first, second = (
        next(i for i, kind in enumerate(kinds) if isinstance(v, kind))
        for v in (value, other)
    )
    return first != second


@pytest.fixture
def begun(place):
    """A run that its whole recipe recognises, checksums, and a note of a shape."""
    whole = settings(training(place)) | {HELD_OUT: str(place / "data")}
    (place / SETTINGS).write_text(json.dumps(whole))
    checksums.write(place / STEP)
    (place / "noted").mkdir()
    note_shape(place / "noted", SHAPE)
    return place


def test_what_any_value_replaces_is_well(begun):
    for _, act, _ in READERS:
        code, _, err = called(*act(begun))
        assert code == 0, err
        shutil.rmtree(begun / "imported", ignore_errors=True)
        shutil.rmtree(begun / "out", ignore_errors=True)


@drawn(80, data=st.data())
def test_any_value_in_a_json_file(begun, data):
    file, act, needed = data.draw(st.sampled_from(READERS))
    whole = json.loads((begun / file).read_text())
    where = data.draw(st.sampled_from(list(within(whole))))
    *above, key = where
    parent = reduce(getitem, above, whole)
    usual = parent[key]
    alike = [str(usual), [usual], {str(usual): usual}, bool(usual)]
    parent[key] = value = data.draw(VALUES | st.sampled_from(alike))
    try:
        with replaced(begun / file, json.dumps(whole).encode()):
            said = outcome(*act(begun))
    finally:
        shutil.rmtree(begun / "imported", ignore_errors=True)
        shutil.rmtree(begun / "out", ignore_errors=True)
    is_needed = where[0] not in (HELD_OUT, FROM) if needed is None else where in needed
    if is_needed and is_another_kind(value, usual):
        assert said == "refused"


@drawn(60, data=st.data())
def test_any_bytes_in_a_file(begun, data):
    """Some are lost, some come in; where there is a checksum, that is noticed."""
    file = data.draw(st.sampled_from([name for name in READ if "index" not in name]))
    whole = (begun / file).read_bytes()
    start = data.draw(st.integers(0, len(whole)))
    new = data.draw(st.binary(max_size=20))
    lost = data.draw(st.just(len(new)) | st.integers(0, len(whole) - start))
    changed = whole[:start] + new + whole[start + lost :]
    with replaced(begun / file, changed):
        said = outcome(*READ[file](begun))
    shutil.rmtree(begun / "imported", ignore_errors=True)
    summed = file == "data/val.bin" or file.startswith(STEP)
    if summed and changed != whole and not file.endswith("SHA256SUMS"):
        assert said == "refused"


# ---- command lines -------------------------------------------------------------------

NUMERALS = {
    int: (st.integers(-10, 10) | st.integers(2**31)).map(str),
    float: st.floats().map(str),
}
WORDS = st.one_of(
    *NUMERALS.values(),
    st.text(st.characters(exclude_characters="/."), max_size=20),
    st.sampled_from(["", LONG, "true", "none", "/dev/null", "/proc/1/x", "x" * 300]),
)
NAMED = {
    "sample": ["--run", "--model", "--prompt"],
    "evaluate": ["--run", "--model", "--data", "--device", "--include-path", "--out"],
    "export": ["--run", "--out"],
    "prepare": ["--source", "--tokenizer", "--dataset", "--subset", "--out"],
    "plan": ["--config", "--model", "--rules", "--tokens"],
}
COMMAND_OPTIONS = [
    (name, option) for name in NAMED for option in [*NAMED[name], *OPTIONS[name][1]]
]


@drawn(40, option=st.sampled_from(COMMAND_OPTIONS), word=WORDS)
def test_any_word_for_an_option(made, tmp_path, monkeypatch, option, word):
    command, name = option
    monkeypatch.chdir(tmp_path)
    outcome(OPTIONS[command][0], *base(command, made, tmp_path), f"{name}={word}")
    for path in tmp_path.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


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
    "--lr-scheduler.warmup-steps=0",
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


@pytest.mark.application
@drawn(8, data=st.data())
def test_any_word_for_an_option_of_a_training(made, data):
    """What is not refused before the first step is what was typed, and trains."""
    option = data.draw(st.sampled_from(RECIPE))
    where = f"--dataloader.dataset-path={made / 'data'}"
    words = (*SMALL, where, data.draw(typed(option)))
    configured = []

    def main():
        configured.append(parse(sys.argv[1:]))
        resolve(configured[0], 1)

    if outcome(main, *words) == "refused":
        return
    value = attrgetter(option.path)(configured[0])
    _, is_valued, word = words[-1].partition("=")
    if is_valued and option.kind in (int, float, str):
        assert value == option.kind(word)
    code, out, err = forked("train", *words)
    assert code in (0, 2), err
    assert "Traceback" not in out + err
