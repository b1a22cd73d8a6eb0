"""Damaged and wrong files in the place of those that a command reads: the command ends
with one line and exit code 2, and takes no wrong file for a right one.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
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
from train.data.shards import Ledger
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

VALUES = {"null": "null", "negative": "-5", "text": '"x"', "absent": None}
MODEL = ("model_spec.model", "shape")
# each file, who reads it, and places in it with the values that are right there
JSON = {
    "meta": ("data/meta.json", losses, {
        ("tokenizer",): {}, ("vocab_size",): {}, ("source",): {},
        ("val", "tokens"): {}, ("val", "text_bytes"): {"null"}, ("val", "sha256"): {},
    }),
    "meta, recognised": ("data/meta.json", prepares, {
        ("source", "files"): {}, ("source", "val_fraction"): {},
    }),
    "settings": ("run/settings.json", losses, {
        (*MODEL, "width"): {}, ("training.seq_len",): {}, ("tokenizer.name",): {},
        MODEL: {},
    }),
    "settings, gone on by": ("run/settings.json", goes_on, {("optimizer.lr",): {}}),
    "settings, started by": ("run/settings.json", starts, {("optimizer.lr",): {}}),
    "note": ("noted/shape.json", reads_note, {
        ("num_layers",): {}, ("inverse_layer_scale",): {"absent"},
    }),
    "config": ("hf/config.json", imports, {
        ("n_layer",): {}, ("vocab_size",): {}, ("model_type",): {},
        ("n_inner",): {"null", "absent"}, ("activation_function",): {"absent"},
        ("tie_word_embeddings",): {"absent"},
    }),
}  # fmt: skip
# whatever else lies in the place of a file that a command reads
LIES = {
    "dead link": lambda path: path.symlink_to("/none/none"),
    "folder": lambda path: path.mkdir(),
    "empty": b"",
    "torn": b"{",
    "no UTF-8": b"\xff\xfe",
    "a number": b"3",
}
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
    for at, right in places.items():
        for what, text in VALUES.items():
            (place / file).write_bytes(whole)
            damage(place / file, at, text)
            if what not in right:
                refused(*act(place))
                continue
            code, _, err = called(*act(place))
            assert code == 0, (at, what, err)
            shutil.rmtree(place / "out", ignore_errors=True)


@pytest.mark.parametrize("file", READ)
def test_whatever_lies_in_the_place_of_a_file_is_one_line(file, made, tmp_path):
    for name, what in LIES.items():
        place = shutil.copytree(made, tmp_path / name)
        path = place / file
        path.unlink()
        path.write_bytes(what) if isinstance(what, bytes) else what(path)
        said = refused(*READ[file](place))
        assert path.name in said or str(place) in said


def test_shards_lie_in_their_folder(place):
    for name in ("../run/val.bin", "/etc/passwd", "a/b.bin", ".."):
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


def other_step_s(name):
    def act(step, mark):
        shutil.copy(step.with_name(f"step-{OLDER}") / name, step)

    return act


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
    "another step's data": (other_step_s(DATA), "with SHA-256"),
    "torn index": (
        changed(INDEX, lambda raw: raw[:100]),
        r"\.metadata that does not read",
    ),
    "lost index": (  # as a copy without the files whose names begin with a dot
        lost(INDEX),
        rf"/step-{NEWEST} without \.metadata, expected",
    ),
    "a bit of sums": (changed(SUMS, bit), "with SHA-256"),
    "another step's sums": (other_step_s(SUMS), "with SHA-256"),
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


# sizes that its settings say, beside the layer of width 8 that it has
OTHERS = {
    "width": (16, "it is of another model"),
    "num_layers": (3, r"layers\.1\.\S+ of shape None"),
    "block_size": (32, r"wpe\.weight of shape \(16, 8\)"),
}


@pytest.mark.parametrize("field", OTHERS)
def test_a_checkpoint_of_another_model_is_refused(field, place):
    size, message = OTHERS[field]
    damage(place / "run/settings.json", (*MODEL, field), size)
    assert re.search(message, refused(*exports(place)))


# ---- unfinished work of prepare ------------------------------------------------------


@pytest.fixture
def unfinished(tmp_path, monkeypatch):
    """A command that was stopped after its second shard, and its folder."""
    (tmp_path / "corpus").mkdir()
    texts = pa.table({"text": [f"some text {i}" for i in range(60)]})
    pq.write_table(texts, tmp_path / "corpus/a.parquet")
    save = Ledger.save

    def stopped(self, work):
        save(self, work)
        if len(self.shards) == 2:
            raise KeyboardInterrupt

    def begin(source):
        act = (
            *(prepare.main, "--source", source, "--dataset", tmp_path / "corpus"),
            *("--tokenizer", "bytes", "--shard-tokens", 200, "--processes", 1),
            *("--out", tmp_path / "out"),
        )
        with monkeypatch.context() as patch:
            patch.setattr(Ledger, "save", stopped)
            assert called(*act)[0] == 130
        return act, tmp_path / ".out.unfinished"

    return begin


@pytest.mark.parametrize("source", ["openwebtext", "fineweb-edu"])
def test_ledgers_and_plans_that_were_altered(source, unfinished, tmp_path):
    act, work = unfinished(source)
    kept = shutil.copytree(work, tmp_path / "kept")

    def restored(name="ledger.json"):
        shutil.rmtree(work)
        return shutil.copytree(kept, work) / name

    for at in (("shards",), ("shards", 0, "tokens"), ("skip",), ("complete",)):
        damage(restored(), at, VALUES["text"])
        assert work.name in refused(*act)
    for name in ("ledger.json", "plan.json"):
        for text in (b"", b"{", b"3"):
            restored(name).write_bytes(text)
            assert work.name in refused(*act)
    restored()
    assert called(*act)[0] == 0


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
    "two names": (
        tensors(**{"wte.weight": torch.zeros(257, 8)}),
        "got wte.weight twice",
    ),
    "a head of its own": (
        tensors(**{f"{P}lm_head.weight": torch.ones(257, 8)}),
        "got an lm_head.weight of its own",
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


def test_weights_in_several_files(place):
    """With an index, which names files beside it; a tensor lies in one of them."""
    folder = place / "hf"
    kept = load_file(folder / huggingface.WEIGHTS)
    files = {name: f"{i % 2}.safetensors" for i, name in enumerate(sorted(kept))}

    def save(extra=()):
        for file in set(files.values()):
            mine = {n: t for n, t in kept.items() if files[n] == file or n in extra}
            save_file(mine, folder / file)

    gone(folder)
    save()
    index = folder / huggingface.INDEX
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": files}))
    assert called(*imports(place))[0] == 0
    shutil.copy(folder / "0.safetensors", place)
    outside = str((place / "0.safetensors").resolve())
    for text in ("../0.safetensors", outside, "", "x", 3, None, ["0.safetensors"]):
        index.write_text(json.dumps({"weight_map": files | {min(files): text}}))
        assert "weight_map" in refused(*imports(place)), text
    for text in ("{}", "[]", '{"weight_map": {}}', '{"weight_map": [1]}'):
        index.write_text(text)
        assert huggingface.INDEX in refused(*imports(place))
    index.write_text(json.dumps({"weight_map": files}))
    save(extra=[WTE])
    assert "got wte.weight twice" in refused(*imports(place))


# ---- tokenizers and rows of others ---------------------------------------------------


def of_one_word(kind, **more):
    names = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
    model = {"type": kind, "vocab": {"b": 0}, **more}
    return dict.fromkeys(names) | {"added_tokens": [], "model": model}


# parts of a tokenizer.json, and what is said of a prompt of four a; None: it is encoded
PADDED = dict(strategy={"Fixed": 10**8}, direction="Left", pad_id=0, pad_token="a")
PADDED |= dict(pad_to_multiple_of=None, pad_type_id=0)
TOKENIZERS = {
    "padding": (dict(padding=PADDED), None),
    "an unknown word": (of_one_word("WordLevel", unk_token="?"), "cannot encode"),
    "no token": (of_one_word("BPE", merges=[], unk_token=None), "a prompt of no token"),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizers_that_are_not_ours(name, place):
    """They pad and cut no text."""
    parts, message = TOKENIZERS[name]
    path = place / "hf/tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))
    act = samples(place, "--prompt", "aaaa")
    if message is None:
        code, out, _ = called(*act)
        assert code == 0 and out.startswith("aaaa")
    else:
        assert message in refused(*act)


def test_a_tokenizer_of_more_tokens_than_the_model(place):
    path = str(place / "hf/tokenizer.json")
    coder = tokenizers.Tokenizer.from_file(path)
    coder.add_tokens(["class"])
    coder.save(path)
    said = refused(*samples(place, "--prompt", "class "))
    assert "got a prompt of the token id 257, expected ids below" in said


@pytest.mark.parametrize("row", ['{"text": "\\ud800"}', '{"text": null}', "[1"])
def test_rows_without_a_text(row, tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/a.jsonl").write_text(f"{row}\n" * 3)
    options = ("--source=openwebtext", f"--dataset={tmp_path / 'corpus'}")
    options += ("--tokenizer=bytes", "--processes=1", f"--out={tmp_path / 'out'}")
    assert "corpus" in refused(prepare.main, *options)
