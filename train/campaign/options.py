"""Malformed command lines: every option of every command, and what it must not take."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from train.campaign.children import Command
from train.campaign.ground import Ground, strings
from train.engine.recipes import recipe

LONG = "9" * 20
SURROGATE = "\udc80"
NO_WHOLE = ("abc", "", "1.5", "nan", "1e3", "0x10", SURROGATE, "None", "True", "-")
NO_NUMBER = ("abc", "", "1,5", SURROGATE, "1..5", "None", "--", "e")
NO_FINITE = ("nan", "NaN", "inf", "-inf", "1e400")
STRINGS = ("", " ", SURROGATE, "x" * 5000, "../../x", "/dev/null", "a\nb", "–", LONG)
# a count that takes hours when it is large: nobody would call that refused or done
COUNTS = {
    "training.steps", "training.local_batch_size", "training.global_batch_size",
    "validator.samples", "validator.most_samples", "validator.freq", "metrics.log_freq",
    "training.seq_len",
    "training.gc_freq", "loss.num_summed", "comm.init_timeout_seconds",
    "comm.train_timeout_seconds", "parallelism.data_parallel_replicate_degree",
}  # fmt: skip
# names that are looked up, and folders that have to be there
LOOKED_UP = {
    "optimizer.mars_type", "tokenizer.name", "dataloader.dataset_path",
    "checkpoint.initial_load_path", "dataloader.split", "checkpoint.folder",
    "validator.dataloader.split", "dataloader.dataset", "metrics.save_tb_folder",
    "validator.dataloader.dataset",
}  # fmt: skip
USUAL = {"checkpoint.folder": "checkpoint", "metrics.save_tb_folder": "tb"}
# compiling takes longer than everything else here, and other tests do it
SLOW = {"compile.enable", "optimizer.compile", "compile.components"}
SUPPRESSED = ("model_spec.",)  # no options
MISSING_FILES = ("/none", "", "/dev/null", SURROGATE, "x" * 300, "a\nb", "~", "/proc/1")


class Input(NamedTuple):
    """A command line; ``must`` be refused, or None where either will do."""

    command: Command
    must: bool | None


def fields(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, type) of all options of a training configuration."""
    for field in dataclasses.fields(config):
        value, path = getattr(config, field.name), prefix + field.name
        if path.startswith(SUPPRESSED):
            continue
        if dataclasses.is_dataclass(value):
            yield from fields(value, f"{path}.")
        else:
            yield path, get_type_hints(type(config))[field.name]


def option(path: str) -> str:
    """Return a field of the configuration as an option is spelt."""
    return "--" + path.replace("_", "-")


def _values(path: str, kind: Any) -> Iterator[tuple[str, bool | None]]:
    """Yield (value, must be refused) for an option of one type."""
    kinds = set(get_args(kind)) or {kind}
    optional = type(None) in kinds
    if get_origin(kind) is tuple:
        yield from [("1", True), ("abc", True), ("nan", True), ("", True)]
    elif "Literal" in str(kind):
        for value in ("xyz", "", "0", SURROGATE, "TRUE", LONG):
            yield value, True
        for value in _literals(kind):
            yield str(value), None
    elif float in kinds:
        for value in NO_NUMBER:
            yield value, None if value == "None" and optional else True
        for value in NO_FINITE:
            yield value, True if value.lower() == "nan" else None
        for value in ("-1", "0", "-0.0", "1e-400", "1e300", LONG, "1_0", "٣"):
            yield value, None
    elif bool in kinds:
        for value in ("abc", "", "2", SURROGATE):
            yield value, True
    elif int in kinds:
        for value in NO_WHOLE:
            yield value, None if value == "None" and optional else True
        yield LONG, True if path in COUNTS else None
        for value in (f"-{LONG}", "-1", "0"):
            always = path in COUNTS - {"training.global_batch_size"}
            yield value, True if always else None
        yield str(2**63), True if path in COUNTS else None
    elif str in kinds:
        for value in STRINGS:
            known = value == USUAL.get(path, "")
            looked_up = path in LOOKED_UP and not known
            yield value, True if looked_up else None
    else:
        for value in ("abc", "", SURROGATE, "[1]", LONG):
            yield value, None


def _literals(kind: Any) -> Iterator[Any]:
    if "Literal" in str(get_origin(kind)):
        yield from get_args(kind)
    for part in get_args(kind):
        if get_origin(part) is not None:
            yield from _literals(part)


def of_training(ground: Ground, draw: random.Random) -> Iterator[Input]:
    """Yield command lines of python -m train."""

    def line(*options: str, must: bool | None) -> Input:
        # relative: each case has a folder of its own
        return Input(ground.train("run", *options, steps=1), must)

    listed = list(fields(recipe("tiny_mars_adamw")()))
    for path, kind in listed:
        if path in SLOW:
            continue
        for value, must in _values(path, kind):
            yield line(f"{option(path)}={value}", must=must)
        if bool in {kind, *get_args(kind)}:
            yield line(option(path), must=None)
            at = path.rfind(".") + 1
            yield line(option(path[:at] + "no-" + path[at:]), must=None)
        else:
            yield line(option(path), must=True)  # its value is missing
        at = draw.randrange(3, len(path))
        yield line(option(f"{path[:at]}q{path[at:]}"), "1", must=True)
    for name in ("tiny", "", "__all__", "gpt2_recipe", SURROGATE, "tiny_adamw ", "-1"):
        yield Input(Command("train", ("--config", name)), True)
    for words in (("--config",), ("x",), ("--",), ("--config", "tiny_adamw", "x"), ()):
        yield Input(Command("train", words), True)
    for mode in ("selective", "full", "none", "xyz"):
        known = None if mode != "xyz" else True
        yield line(f"activation-checkpoint:{mode}", must=known)
    # two at once
    for _ in range(150):
        chosen = draw.sample(listed, 2)
        options, musts = [], []
        for path, kind in chosen:
            if path in SLOW or path in ("training.global_batch_size",):
                continue
            value, must = draw.choice(list(_values(path, kind)))
            options.append(f"{option(path)}={value}")
            musts.append(must)
        if options:
            yield line(*options, must=True if True in musts else None)


# {command: ({option: what it takes}, the options that make a complete command line)}
WHOLE, NUMBER, PATH, NAME, SWITCH = "whole", "number", "path", "name", "switch"


def _others(ground: Ground) -> dict[str, tuple[dict[str, str], tuple[str, ...]]]:
    run = strings("--run", ground.run)
    return {
        "train.sample": (
            {"run": PATH, "model": PATH, "step": WHOLE, "tokens": WHOLE, "top-k": WHOLE,
             "temperature": NUMBER, "seed": WHOLE, "prompt": "text"},
            (*run, "--tokens", "3"),
        ),
        "train.export": (
            {"run": PATH, "out": "out", "step": WHOLE, "no-tokenizer": SWITCH,
             "training-state": SWITCH},
            (*run, "--out", "exported"),
        ),
        "train.evaluate": (
            {"run": PATH, "model": PATH, "step": WHOLE, "limit": WHOLE, "loss": SWITCH,
             "num-fewshot": WHOLE, "data": PATH, "window": WHOLE, "batch-size": WHOLE,
             "device": NAME, "include-path": "unread", "out": "out"},
            (*run, "--loss", "--out", "e.json", *strings("--data", ground.data)),
        ),
        "train.import_hf": (
            {"model": PATH, "out": "out"},
            strings("--model", ground.exported, "--out", "weights"),
        ),
        "train.prepare": (
            {"source": NAME, "tokenizer": NAME, "out": "out", "val-fraction": NUMBER,
             "dataset": "refused", "subset": "refused", "shard-tokens": WHOLE,
             "processes": WHOLE},
            strings("--source", "text", "--out", "data", random.__file__),
        ),
        "train.plan": (
            {"config": NAME, "ranks": WHOLE, "replicas": WHOLE, "link-gbps": NUMBER,
             "tflops": NUMBER, "memory-gbs": NUMBER, "all": SWITCH, "model": NAME,
             "rules": NAME, "tokens": WHOLE},
            ("--config", "tiny_mars_m"),
        ),
        "marsopt.profile": (
            {"model": NAME, "layers": WHOLE, "width": WHOLE, "vocab": WHOLE,
             "rule": NAME, "correction": NAME, "h-dtype": NAME, "gradients": NAME,
             "device": NAME, "steps": WHOLE, "json": "new file", "trace": "new file",
             "warm": SWITCH},
            strings("--layers", 1, "--width", 8, "--vocab", 16, "--steps", 1, "--warm"),
        ),
    }  # fmt: skip


# whole numbers below these are refused; where -1 or 0 may be meant, nothing is said
LEAST = {
    "tokens": 1, "top-k": 1, "limit": 1, "window": 1, "batch-size": 1, "num-fewshot": 0,
    "shard-tokens": 1, "processes": 1, "ranks": 1, "replicas": 1, "layers": 1,
    "width": 1, "vocab": 1, "steps": 1, "step": 0,
}  # fmt: skip
ABOVE_ALL = {"step", "tokens", "window", "shard-tokens", "ranks", "layers", "width",
             "vocab", "steps", "processes", "replicas"}  # fmt: skip


def _of_kind(name: str, kind: str) -> Iterator[tuple[str, bool | None]]:
    if kind == WHOLE:
        for value in NO_WHOLE:
            yield value, True
        for value in ("-1", "0", f"-{LONG}"):
            below = name in LEAST and int(value) < LEAST[name]
            yield value, True if below or name == "step" else None
        yield LONG, True if name in ABOVE_ALL else None
        yield str(2**63), True if name in ABOVE_ALL else None
    elif kind == NUMBER:
        for value in NO_NUMBER:
            yield value, True
        for value in ("nan", "inf", "-inf", "-1", "0", "1e400", "-1e-300"):
            yield value, True
        yield "1e-320", None
    elif kind == SWITCH:
        yield "1", True
    elif kind in (PATH, "refused"):
        for value in MISSING_FILES:
            yield value, True
    elif kind == NAME:
        for value in ("xyz", "", SURROGATE, LONG, "a\nb", "nan"):
            yield value, True
    elif kind == "new file":
        for value in ("/dev/null/x", "/proc/1/x/y"):
            yield value, True
    elif kind == "text":
        yield "", True
        for value in (" ", SURROGATE, "\ud800", "x" * 5000, "\x01", "–", "a\nb"):
            yield value, None
    elif kind == "out":
        for value in ("/dev/null", "/dev/null/x", "/proc/1/x", "x" * 300, "/proc"):
            yield value, True
        for value in (SURROGATE, "a\nb", "", "."):
            yield value, None
    else:
        for value in MISSING_FILES:
            yield value, None


def of_others(ground: Ground, draw: random.Random) -> Iterator[Input]:
    """Yield command lines of the other commands."""
    for module, (options, whole) in _others(ground).items():
        for name, kind in options.items():
            rest = _without(whole, f"--{name}")
            if name in ("model", "run") and module != "train.import_hf":
                rest = _without(rest, "--run") if module != "marsopt.profile" else rest
            for value, must in _of_kind(name, kind):
                if module == "marsopt.profile" and not must:
                    continue  # it would compile
                yield Input(Command(module, (*rest, f"--{name}={value}")), must)
            if kind != SWITCH:
                yield Input(Command(module, (*rest, f"--{name}")), True)
            at = draw.randrange(1, len(name))
            yield Input(Command(module, (*whole, f"--{name[:at]}q{name[at:]}=1")), True)
        yield Input(Command(module, (*whole, "--unknown", "1")), True)
        if module not in ("train.prepare",):
            yield Input(Command(module, (*whole, "beside")), True)
        for at in range(0, len(whole), 2):
            if whole[at] in ("--run", "--out", "--model", "--data", "--config"):
                if (module, whole[at]) == ("train.evaluate", "--out"):
                    continue
                lacking = _without(whole, whole[at])
                if module != "marsopt.profile":
                    yield Input(Command(module, lacking), True)
    yield from _of_tasks(ground)
    yield from _of_sources(ground)


def _without(words: tuple[str, ...], name: str) -> tuple[str, ...]:
    """Leave an option with its value out of a command line."""
    if name not in words:
        return words
    at = words.index(name)
    alone = at + 1 == len(words) or words[at + 1].startswith("--")
    return words[:at] + words[at + (1 if alone else 2) :]


def _of_tasks(ground: Ground) -> Iterator[Input]:
    run = strings("--run", ground.run)
    for tasks in ("", ",", " , "):
        yield Input(Command("train.evaluate", (*run, "--tasks", tasks)), True)
    for folder in ("/none", "/dev/null"):
        words = ("--tasks", "letters", "--include-path", folder)
        yield Input(Command("train.evaluate", (*run, *words)), True)


def _of_sources(ground: Ground) -> Iterator[Input]:
    """Yield options of train.prepare that do not go together."""
    file = random.__file__
    for words in (
        ("--source", "text"),
        ("--source", "python", file),
        ("--source", "openwebtext", file),
        ("--source", "fineweb-edu", "--val-fraction", "0.5"),
        ("--source", "text", "--dataset", "x", file),
        ("--source", "python", "--subset", "x"),
        ("--source", "fineweb-edu", "--dataset", "none"),
        ("--source", "fineweb-edu", "--dataset", "none/none"),
        ("--source", "fineweb-edu", "--dataset", "none/none/none"),
        ("--source", "fineweb-edu", "--dataset", "a b/c d"),
        ("--source", "fineweb-edu", "--dataset", SURROGATE + "/x"),
        ("--source", "openwebtext", "--dataset", "–/–"),
        ("--source", "fineweb-edu", "--dataset", str(ground.texts), "--subset", "x"),
        ("--source", "openwebtext"),
        ("--source", "fineweb-edu"),
        ("--source", "fineweb-edu", "--subset", "none"),
    ):
        yield Input(Command("train.prepare", (*words, "--out", "data")), True)
