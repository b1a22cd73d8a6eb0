"""Whatever values, bytes and words a command is given, it ends with one line and exit
code 2, or does what they say. Inputs are drawn by hypothesis, each time the same:
``MARSOPT_EXAMPLES=10`` draws ten times as many.
"""

# ruff: noqa: F401, F811  (fixtures of another file)

from __future__ import annotations

import json
import os
import shutil
import sys
from operator import attrgetter
from typing import get_args

import hypothesis
import pytest
from hypothesis import strategies as st

import configs
from tests.forks import forked
from tests.test_malformed import (
    JSON,
    LONG,
    OPTIONS,
    READ,
    STEP,
    base,
    called,
    damage,
    imports,
    losses,
    made,
    place,
    prepares,
    samples,
)
from train import export, sample
from train.engine.launch import parse
from train.engine.options import options
from train.engine.resolve import resolve

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


def samples_run(place):
    return sample.main, "--run", place / "run", "--tokens", 2


def exports(place):
    return export.main, "--run", place / "run", "--out", place / "out"


# each JSON file, who reads it, and values in it without which nobody can do
JSON_READERS = [
    *((file, act, places) for file, act, places in JSON.values()),
    ("run/settings.json", samples_run, JSON["settings"][2]),
    ("run/settings.json", exports, JSON["settings"][2]),
    ("hf/config.json", samples, JSON["config"][2]),
    ("hf/tokenizer.json", samples, {}),
]


def within(value, above=()):
    """Where values lie in a JSON file."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*above, key)
            yield from within(inner, (*above, key))


def at(value, place):
    for key in place:
        value = value[key]
    return value


def kind(value):
    """The type of a value in JSON, which has one for numbers."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float if is_number else type(value)


@drawn(60, data=st.data())
def test_any_value_in_a_json_file(place, data):
    file, act, needed = data.draw(st.sampled_from(JSON_READERS))
    text = (place / file).read_text()
    whole = json.loads(text)
    where = data.draw(st.sampled_from(list(within(whole))))
    value = data.draw(VALUES)
    damage(place / file, where, json.dumps(value))
    said = outcome(*act(place))
    (place / file).write_text(text)
    for name in ("imported", "out"):
        shutil.rmtree(place / name, ignore_errors=True)
    if needed.get(where) == {} and kind(value) != kind(at(whole, where)):
        assert said == "refused"


@drawn(60, data=st.data())
def test_any_bytes_in_a_file(place, data):
    """Some are lost, some come in; where there is a checksum, that is noticed."""
    files = [name for name in READ if (place / name).exists()]
    file = data.draw(st.sampled_from(files))
    whole = (place / file).read_bytes()
    first, last = sorted(data.draw(st.integers(0, len(whole))) for _ in range(2))
    cut = data.draw(st.sampled_from([first, min(first + 1, len(whole)), last]))
    changed = whole[:first] + data.draw(st.binary(max_size=20)) + whole[cut:]
    (place / file).write_bytes(changed)
    said = outcome(*READ[file](place))
    (place / file).write_bytes(whole)
    shutil.rmtree(place / "imported", ignore_errors=True)
    summed = file == "data/val.bin" or file.startswith(STEP)
    if summed and changed != whole and not file.endswith("SHA256SUMS"):
        assert said == "refused"


# ---- command lines -------------------------------------------------------------------

WORDS = st.one_of(
    st.text(st.characters(exclude_characters="/."), max_size=20),
    st.integers(-10, 10).map(str),
    st.integers(2**31).map(str),
    st.floats().map(str),
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


RECIPE = [
    option
    for option in options(configs.tiny_mars_adamw())
    # compiling takes longer than all else, and others do it
    if option.path.partition(".")[0] not in ("compile", "activation_checkpoint")
    and option.path != "optimizer.compile"
]
SMALL = (
    "--config", "tiny_mars_adamw", "--training.steps=1", "--training.seq-len=16",
    "--training.local-batch-size=2", "--training.global-batch-size=2",
    "--lr-scheduler.warmup-steps=0",
)  # fmt: skip


def typed(option):
    """What somebody types for an option: more often than not of its kind."""
    usual = [str(value) for value in get_args(option.kind) if isinstance(value, str)]
    words = st.one_of(WORDS, st.sampled_from(usual)) if usual else WORDS
    with_value = words.map(lambda word: f"{option.flag}={word}")
    return with_value | st.sampled_from(sorted(option.flags))


@pytest.mark.application
@drawn(12, data=st.data())
def test_any_word_for_an_option_of_a_training(made, tmp_path, data):
    """What is not refused before the first step is what was typed, and trains."""
    option = data.draw(st.sampled_from(RECIPE))
    word = data.draw(typed(option))
    words = (*SMALL, f"--dataloader.dataset-path={made / 'data'}", word)
    configured = []

    def main():
        configured.append(parse(sys.argv[1:]))
        resolve(configured[0], 1)

    if outcome(main, *words) == "refused":
        return
    value, text = attrgetter(option.path)(configured[0]), word.partition("=")[2]
    if option.kind in (int, float, str) and "=" in word:
        assert value == option.kind(text)
    code, out, err = forked("train", *words)
    assert code in (0, 2), err
    assert "Traceback" not in out + err
