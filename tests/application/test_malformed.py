"""Damaged and wrong files in the place of those that a command reads: the command ends
with one line and exit code 2, and takes no wrong file for a right one.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.application.made import (
    NEWEST,
    OLDER,
    SHAPE,
    STEP,
    called,
    exports,
    goes_on,
    imports,
    losses,
    prepares,
    reads_note,
    refused,
    samples,
    samples_run,
    starts,
    starts_from_weights,
)
from train import prepare
from train.gpt2 import huggingface
from train.runs import checkpoints, checksums

READERS = (
    losses, imports, samples, samples_run, exports, prepares, reads_note, goes_on,
    starts, starts_from_weights,
)  # fmt: skip


@pytest.mark.parametrize("act", READERS)
def test_what_is_damaged_below_works_whole(act, place):
    code, _, err = called(*act(place))
    assert (code, err) == (0, "")


# ---- JSON files ----------------------------------------------------------------------

VALUES = {"null": "null", "negative": "-5", "absent": None}
MODEL = ("model_spec.model", "shape")
# each file, who reads it, and places in it that have no such values
JSON = {
    "meta": ("data/meta.json", losses, [
        ("tokenizer",), ("vocab_size",), ("source",), ("val", "tokens"),
        ("val", "sha256"),
    ]),
    "settings": ("run/settings.json", losses, [
        (*MODEL, "width"), ("training.seq_len",), ("tokenizer.name",), MODEL,
    ]),
    "settings, gone on by": ("run/settings.json", goes_on, [("optimizer.lr",)]),
    "config": ("hf/config.json", imports, [("n_layer",), ("vocab_size",)]),
}  # fmt: skip
# whatever lies in the place of a file that a command reads
LIES = (b"", b"{", b"\xff\xfe", b"3")
READ = {
    "data/meta.json": losses,
    "data/val.bin": losses,
    "run/settings.json": samples_run,
    f"{STEP}/.metadata": exports,
    f"{STEP}/__0_0.distcp": losses,
    "hf/config.json": imports,
    "hf/model.safetensors": imports,
    "hf/tokenizer.json": samples,
}


def damage(path, at, text):
    """Replace the value at a place in a JSON file by a text; None removes it."""
    found = json.loads(path.read_text())
    parent = found
    for key in at[:-1]:
        parent = parent[key]
    parent[at[-1]] = "@"
    if text is None:
        del parent[at[-1]]
    path.write_text(json.dumps(found).replace('"@"', str(text)))


@pytest.mark.parametrize("name", JSON)
def test_a_wrong_value_in_a_json_file_is_one_line(name, place):
    file, act, places = JSON[name]
    whole = (place / file).read_bytes()
    for at in places:
        for text in VALUES.values():
            (place / file).write_bytes(whole)
            damage(place / file, at, text)
            refused(*act(place))


@pytest.mark.parametrize("file", READ)
def test_whatever_lies_in_the_place_of_a_file_is_one_line(file, place):
    path = place / file
    for raw in LIES:
        path.write_bytes(raw)
        said = refused(*READ[file](place))
        assert path.name in said or str(place) in said


def test_shards_lie_in_their_folder(place):
    for name in ("../run/val.bin", "/etc/passwd"):
        shards = json.dumps({name: "0" * 64})
        damage(place / "data/meta.json", ("val", "shards"), shards)
        assert "val.shards" in refused(*losses(place)), name


# ---- checkpoints, by whoever reads them ----------------------------------------------


def changed(name, change):
    """Give a file of a step the bytes that ``change`` makes of its own."""

    def act(step, mark):
        (step / name).write_bytes(change((step / name).read_bytes()))

    return act


def bit(raw):
    at = len(raw) // 2
    return raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :]


def lost(name):
    return lambda step, mark: (step / name).unlink()


def touching(mark):
    """A pickle, without its first and last opcodes, that makes a file."""
    words = f"touch {mark}".encode()
    return b"cposix\nsystem\n(X" + len(words).to_bytes(4, "little") + words + b"tR"


def call_before_the_index(step, mark):
    """Which reads as before; its checksum is right, as a stranger would have it."""
    changed(INDEX, lambda raw: raw[:2] + touching(mark) + b"0" + raw[2:])(step, mark)
    checksums.write(step)


DATA, INDEX, SUMS = "__0_0.distcp", ".metadata", checksums.SUMS
DAMAGED = {
    "a bit of data": (changed(DATA, bit), rf"step-{NEWEST}/__0_0\.distcp with SHA-256"),
    "half of data": (
        changed(DATA, lambda raw: raw[: len(raw) // 2]),
        r"distcp is missing or shorter than its \.metadata says",
    ),
    "lost data": (lost(DATA), r"__0_0\.distcp is missing or shorter"),
    "torn index": (
        changed(INDEX, lambda raw: raw[:100]),
        r"\.metadata that does not read",
    ),
    "lost index": (  # as a copy without the files whose names begin with a dot
        lost(INDEX),
        rf"/step-{NEWEST} without \.metadata, expected",
    ),
    "a bit of sums": (changed(SUMS, bit), "with SHA-256"),
    "a call": (call_before_the_index, r"it names posix\.system"),
}
OF_CHECKPOINTS = (goes_on, starts, starts_from_weights, samples_run, exports, losses)


def listed(folder):
    return {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize("act", OF_CHECKPOINTS)
def test_a_damaged_checkpoint_is_refused_whoever_reads_it(act, made, tmp_path):
    """And a training that continues says how to go on without it."""
    for name, (change, message) in DAMAGED.items():
        place, mark = shutil.copytree(made, tmp_path / name), tmp_path / "mark"
        change(place / STEP, mark)
        before = listed(place)
        said = refused(*act(place))
        assert re.search(message, said), (name, said)
        assert listed(place) == before and not mark.exists()
        advice = re.search(
            rf"Of this run step {OLDER} is whole; to resume from it: (mv .*), then the "
            "same command again$",
            said,
        )
        assert bool(advice) is (act is goes_on)
        if advice:
            subprocess.run(advice[1], shell=True, check=True)
            assert called(*act(place))[0] == 0
            assert checkpoints.last_step(place / "run") == OLDER


def test_without_a_whole_checkpoint_a_training_starts_anew(place):
    for step in (OLDER, NEWEST):
        (place / f"run/checkpoint/step-{step}" / INDEX).write_bytes(b"x")
    assert "no other step is whole; to start anew: mv " in refused(*goes_on(place))


def test_an_old_checkpoint_is_believed_and_that_is_said_once(place, caplog):
    (place / STEP / SUMS).unlink()
    for _ in range(3):
        checkpoints.check(place / STEP, SHAPE, whole=True)
    (said,) = [r.getMessage() for r in caplog.records if r.name == checksums.__name__]
    assert said.startswith(f"{place / STEP} has no SHA256SUMS, so that damage would")


# ---- weights of others ---------------------------------------------------------------


def tensors(**changes):
    """Change tensors by their names, or what there is to them; None removes one."""

    def act(folder):
        kept = load_file(folder / huggingface.WEIGHTS)
        for name, tensor in changes.items():
            kept[name] = tensor(kept[name]) if callable(tensor) else tensor
        kept = {name: tensor for name, tensor in kept.items() if tensor is not None}
        save_file(kept, folder / huggingface.WEIGHTS)

    return act


def config(**fields):
    def act(folder):
        known = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(known | fields))

    return act


def fill(value):
    return lambda tensor: tensor.index_fill(0, torch.tensor([3]), value)


def gone(folder):
    (folder / huggingface.WEIGHTS).unlink()


P = "transformer."
WTE, WPE, LAST = f"{P}wte.weight", f"{P}wpe.weight", f"{P}ln_f.weight"
WEIGHTS = {
    "integers": (tensors(**{WTE: torch.Tensor.int}), "got wte.weight of torch.int32"),
    "nan": (tensors(**{LAST: fill(float("nan"))}), "got ln_f.weight"),
    "biases": (
        tensors(**{f"{P}h.0.mlp.c_fc.bias": torch.ones(32)}),
        "got h.0.mlp.c_fc.bias that is not zero",
    ),
    "a missing tensor": (
        tensors(**{f"{P}h.0.ln_2.weight": None}),
        "got h.0.ln_2.weight of shape (0,)",
    ),
    "another size": (
        tensors(**{WPE: torch.ones(4, 8)}),
        "got wpe.weight of shape (4, 8)",
    ),
    "a deeper model": (
        tensors(**{f"{P}h.1.ln_1.weight": torch.ones(8)}),
        "which its config.json has no place for",
    ),
    "another architecture": (config(model_type="llama"), "got model_type='llama'"),
    "an untied head": (config(tie_word_embeddings=False), "got tie_word_embeddings"),
    "heads that do not divide": (config(n_head=5), "got 5 heads with a width"),
    "no weights": (gone, "model.safetensors that does not read"),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_that_a_model_cannot_have(name, place):
    act, message = WEIGHTS[name]
    act(place / "hf")
    assert message in refused(*imports(place))
    assert not (place / "out").exists()


def test_weights_in_several_files_lie_in_their_folder(place):
    index = place / "hf" / huggingface.INDEX
    kept = load_file(place / "hf" / huggingface.WEIGHTS)
    save_file(kept, place / "hf" / "0.safetensors")
    gone(place / "hf")
    shutil.copy(place / "hf" / "0.safetensors", place)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(kept, "0.safetensors")}))
    assert called(*imports(place))[0] == 0
    for text in ("../0.safetensors", str((place / "0.safetensors").resolve()), "x", 3):
        index.write_text(json.dumps({"weight_map": dict.fromkeys(kept, text)}))
        assert "weight_map" in refused(*imports(place)), text


# ---- rows of others ------------------------------------------------------------------


@pytest.mark.parametrize("row", ['{"text": "\\ud800"}', '{"text": null}', "[1"])
def test_rows_without_a_text(row, tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/a.jsonl").write_text(f"{row}\n" * 3)
    options = ("--source=openwebtext", f"--dataset={tmp_path / 'corpus'}")
    options += ("--tokenizer=bytes", "--processes=1", f"--out={tmp_path / 'out'}")
    assert "corpus" in refused(prepare.main, *options)
