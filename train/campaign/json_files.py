"""Malformed JSON files: every key of every one that the application reads."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from train.campaign.children import Command
from train.campaign.ground import NEWEST, Ground, linked, rewrite, strings
from train.runs.settings import HELD_OUT

Make = Callable[[Path], Command]


class Malformed(NamedTuple):
    """A file that is wrong: ``make`` puts it into a case's folder and returns the
    command that reads it; it ``must`` be refused, or None where either will do.
    """

    name: str
    make: Make
    must: bool | None


# as bytes, in the place of a whole JSON file
WHOLE_FILES = {
    "empty": b"",
    "not UTF-8": b'{"tokenizer": "\xff\xfe"}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "truncated": b'{"tokenizer": "by',
    "a list": b"[]",
    "a list of pairs": b'[["a", 1]]',
    "a number": b"3",
    "a string": b'"abc"',
    "null": b"null",
    "NaN": b"NaN",
    "nested lists": b"[" * 100_000,
    "nested objects": b'{"a":' * 100_000,
    "nested and closed": b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
    "a number of 5000 digits": b'{"a": ' + b"9" * 5_000 + b"}",
    "NUL": b"\0" * 100,
    "a lone surrogate": b'{"\\ud800": "\\ud800"}',
    "an empty object": b"{}",
    "zeros after it": None,
    "another behind it": None,
}
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1.5, "x", "", [], {}, [1], {"a": 1}, 10**20, -(10**20), 10**400,
    float("nan"), float("inf"), "\ud800", "9" * 20, "../x", "a\0b",
)  # fmt: skip


def _paths(value: Any, prefix: tuple = ()) -> Iterator[tuple]:
    """Yield where each value of a JSON file lies."""
    if not isinstance(value, dict):
        return
    for key, inner in value.items():
        yield (*prefix, key)
        yield from _paths(inner, (*prefix, key))


def _changed(value: dict, path: tuple, new: Any, remove: bool = False) -> dict:
    value = copy.deepcopy(value)
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    if remove:
        del inner[path[-1]]
    else:
        inner[path[-1]] = new
    return value


class Target(NamedTuple):
    """A JSON file, and a command that reads it.

    ``stage`` copies what the command reads into the folder and returns the file there;
    ``needed`` are the keys that the command cannot do without; "" = all of them.
    """

    name: str
    original: Path
    stage: Callable[[Path], tuple[Path, Command]]
    needed: tuple[str, ...]


def _same(old: Any, new: Any) -> bool:
    """Whether a value may stand for another: 1.5 for a float, "x" for a free text."""
    if isinstance(old, bool) or isinstance(new, bool):
        return type(old) is type(new)
    if isinstance(old, int | float) and isinstance(new, int | float):
        return not isinstance(old, int) or isinstance(new, int)
    return type(old) is type(new)


def _of_target(target: Target) -> Iterator[Malformed]:
    original = json.loads(target.original.read_text())

    def case(what: str, content: bytes, must: bool | None) -> Malformed:
        def make(folder: Path) -> Command:
            path, command = target.stage(folder)
            rewrite(path, content)
            return command

        return Malformed(f"{target.name}: {what}", make, must)

    raw = target.original.read_bytes()
    for what, content in WHOLE_FILES.items():
        if content is None:
            content = raw + (b"\0" * 10 if what.startswith("zeros") else raw)
        yield case(what, content, True)
    for at in (1, len(raw) // 2, len(raw) - 3):
        yield case(f"truncated to {at} bytes", raw[:at], True)
    for path in _paths(original):
        if not isinstance(path[-1], str):
            continue
        where = ".".join(path)
        old = original
        for key in path:
            old = old[key]
        is_needed = any(where.startswith(key) for key in target.needed)
        removed = json.dumps(_changed(original, path, None, remove=True)).encode()
        # a run of before an option was there goes on, where it is null by default
        yield case(f"without {where}", removed, (is_needed and old is not None) or None)
        for new in VALUES:
            if new == old:
                continue
            wrong = is_needed and not (_same(old, new) and new != "a\0b")
            content = json.dumps(_changed(original, path, new)).encode()
            said = repr(new)[:30]
            yield case(f"{where} = {said}", content, True if wrong else None)


def _targets(ground: Ground) -> Iterator[Target]:
    run, data, words = ground.run, ground.data, strings
    meta = data / "meta.json"

    def of(source: Path, name: str, command: Callable[[Path], Command]):
        def stage(folder: Path) -> tuple[Path, Command]:
            copied = linked(source, folder / "given")
            return copied / name, command(copied)

        return stage

    def train_on(given: Path) -> Command:
        options = ("--dataloader.dataset-path", given)
        return ground.train("run", *options, steps=1)

    def evaluate_on(given: Path) -> Command:
        out = ("--out", "evaluation.json")
        return Command(
            "train.evaluate", words("--run", run, "--loss", *out, "--data", given)
        )

    def recognise(given: Path) -> Command:
        options = ("--source", "text", "--tokenizer", "bytes", "--val-fraction", 0.2)
        files = (json.__file__, __import__("re").__file__)
        return Command("train.prepare", words(*options, "--out", given, *files))

    # text_bytes may be null: of somebody else's tokens they are not known
    needed = ("tokenizer", "vocab_size", "train.tokens", "train.sha256", "val.tokens",
              "val.sha256")  # fmt: skip
    yield Target("meta.json, train", meta, of(data, "meta.json", train_on), needed)
    yield Target(
        "meta.json, evaluate", meta, of(data, "meta.json", evaluate_on), needed
    )
    yield Target("meta.json, prepare", meta, of(data, "meta.json", recognise),
                 (*needed, "source"))  # fmt: skip

    def sample(given: Path) -> Command:
        return Command("train.sample", words("--run", given, "--tokens", 3))

    def export(given: Path) -> Command:
        return Command("train.export", words("--run", given, "--out", "exported"))

    def go_on(given: Path) -> Command:
        return ground.train(given)

    settings = run / "settings.json"
    shape = ("model_spec.model.shape", "tokenizer.name")
    flat = json.loads(settings.read_text())
    for name, command, keys in (
        ("sample", sample, ("training.seq_len",)),
        ("export", export, ("training.seq_len",)),
        # where the held-out data lay is for others to read
        ("train", go_on, tuple(key for key in flat if key != HELD_OUT)),
    ):
        at = of(run, "settings.json", command)
        yield Target(f"settings.json, {name}", settings, at, (*shape, *keys))

    def start(given: Path) -> Command:
        options = ("--checkpoint.initial-load-path", given)
        return ground.train("run", *options, steps=1)

    weights = ground.weights
    note, all_of_it = (
        weights / "shape.json",
        tuple(json.loads((weights / "shape.json").read_text())),
    )
    yield Target("shape.json", note, of(weights, "shape.json", start), all_of_it)

    def begin(given: Path) -> Command:
        options = ("--checkpoint.initial-load-path", given / "training_state")
        whole = "--checkpoint.no-initial-load-model-only"
        return ground.train("run", *options, whole, steps=NEWEST + 1)

    exported = ground.exported
    noted = exported / "training_state" / "settings.json"
    at = of(exported, "training_state/settings.json", begin)
    # where its own weights came from does not matter to who starts from it
    settled = tuple(key for key in flat if key != "initial_load_path")
    yield Target("settings.json, whole start", noted, at, settled)

    def imports(given: Path) -> Command:
        return Command("train.import_hf", words("--model", given, "--out", "weights"))

    def speak(given: Path) -> Command:
        return Command("train.sample", words("--model", given, "--tokens", 3))

    # with another key away, Hugging Face's own default counts
    config, sizes = exported / "config.json", (
        "model_type", "n_layer", "n_head", "n_embd", "n_positions", "vocab_size",
    )  # fmt: skip
    for name, command in (("import_hf", imports), ("sample", speak)):
        at = of(exported, "config.json", command)
        yield Target(f"config.json, {name}", config, at, sizes)

    def unfinished(name: str):
        def stage(folder: Path) -> tuple[Path, Command]:
            linked(ground.unfinished, folder / ".tokens.unfinished")
            command = ground.prepare_texts(ground.texts, folder / "tokens")
            return folder / ".tokens.unfinished" / name, command

        return stage

    plan, ledger = ground.unfinished / "plan.json", ground.unfinished / "ledger.json"
    every = tuple(json.loads(plan.read_text()))
    yield Target("plan.json", plan, unfinished("plan.json"), every)
    keys = ("shards", "skip", "documents", "complete", "position")
    yield Target("ledger.json", ledger, unfinished("ledger.json"), keys)


def json_files(ground: Ground) -> Iterator[Malformed]:
    for target in _targets(ground):
        yield from _of_target(target)
    yield from _of_index(ground)


def _of_index(ground: Ground) -> Iterator[Malformed]:
    """Yield indexes of weights in several files."""
    good = {"weight_map": {"transformer.wte.weight": "model.safetensors"}}
    indexes: dict[str, Any] = {
        "no map": {},
        "a map of numbers": {"weight_map": {"a": 1}},
        "a map of lists": {"weight_map": {"a": ["model.safetensors"]}},
        "a list": {"weight_map": ["model.safetensors"]},
        "a string": {"weight_map": "model.safetensors"},
        "null": {"weight_map": None},
        "an empty map": {"weight_map": {}},
        "a file that is missing": {"weight_map": {"a": "none.safetensors"}},
        "a path that leaves": {"weight_map": {"a": "../../../../../etc/passwd"}},
        "an absolute path": {"weight_map": {"a": "/etc/passwd"}},
        "a NUL": {"weight_map": {"a": "a\0b"}},
        "a lone surrogate": {"weight_map": {"a": "\ud800"}},
        "a folder": {"weight_map": {"a": "training_state"}},
        "an empty name": {"weight_map": {"a": ""}},
        "mixed": {"weight_map": {"a": "model.safetensors", "b": 3}},
    }
    contents = {name: json.dumps(value).encode() for name, value in indexes.items()}
    for name, content in WHOLE_FILES.items():
        contents[name + " as a whole"] = content or json.dumps(good).encode() * 2

    def case(name: str, content: bytes) -> Malformed:
        def make(folder: Path) -> Command:
            given = linked(ground.exported, folder / "given")
            rewrite(given / "model.safetensors.index.json", content)
            return import_of(given)

        return Malformed(f"index.json: {name}", make, True)

    for name, content in contents.items():
        yield case(name, content)


def import_of(given: Path) -> Command:
    return Command("train.import_hf", strings("--model", given, "--out", "weights"))
