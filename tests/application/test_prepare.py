"""train.prepare on data sets in the hub's formats: files, kills, errors."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import datasets
import pytest

from tests.corpora import MARK, documents, llmc_files, nanogpt_files, write_corpus
from train.data import hub, web_text
from train.data.tokenizers import tokenizer
from train.data.tokens import open_tokens
from train.data.web_text import split_order
from train.errors import UserError
from train.files import unfinished
from train.prepare import prepare

ROOT = Path(__file__).parents[2]
STREAMED = {"openwebtext": dict(val_fraction=0.1), "fineweb-edu": {}}
TEXTS = documents(200)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("hub") / "corpus", TEXTS)


def make(source, dataset, out, **options):
    options = {**STREAMED[source], "shard_tokens": 4000, **options}
    return prepare(source, "bytes", out, dataset=str(dataset), **options)


def contents(folder):
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


# ---- the files -----------------------------------------------------------------------


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_openwebtext_is_nanogpts_byte_for_byte(tmp_path, monkeypatch, form):
    monkeypatch.setattr(web_text, "SLAB", 23)
    corpus = write_corpus(tmp_path / "corpus", TEXTS, form)
    meta = make("openwebtext", corpus, tmp_path / "out")
    want = nanogpt_files(TEXTS, 0.1)
    got = contents(tmp_path / "out")
    assert sorted(got) == ["meta.json", "train.bin", "val.bin"]
    assert {f"{s}.bin": b for s, b in want.items()}.items() <= got.items()
    assert meta.val.tokens * 2 == len(want["val"])
    assert meta.source["documents"] == 200
    total = sum(len(text.encode()) for text in TEXTS)
    assert meta.train.text_bytes + meta.val.text_bytes == total
    for split in ("train", "val"):
        tokens, _ = open_tokens(tmp_path / "out", split, vocab_size=257)
        assert tokens[:].tobytes() == want[split]


def test_fineweb_is_llmcs_byte_for_byte(tmp_path, corpus):
    meta = make("fineweb-edu", corpus, tmp_path / "out")
    want, got = llmc_files(TEXTS, 4000), contents(tmp_path / "out")
    assert len(want) > 5
    assert got.keys() - want.keys() == {"meta.json"}
    assert want.items() <= got.items()
    tokens, _ = open_tokens(tmp_path / "out", "train", vocab_size=257)
    whole = b"".join(want[name][1024:] for name in sorted(want)[:-1])
    assert tokens[0 : len(tokens)].tobytes() == whole
    assert list(meta.train.shards) == sorted(want)[:-1]
    assert (tokens[:] == MARK).sum() + meta.train.text_bytes == meta.train.tokens


@pytest.mark.parametrize("num", [7, 100, 2001])
def test_the_split_is_that_of_datasets(num):
    whole = datasets.Dataset.from_dict({"i": range(num)})
    want = whole.train_test_split(test_size=0.0005, seed=2357, shuffle=True)
    got = split_order(num, 0.0005)
    assert got["train"].tolist() == want["train"]["i"]
    assert got["val"].tolist() == want["test"]["i"]


def test_the_split_of_openwebtext_itself():
    """nanoGPT says 8,009,762 and 4,007 documents; numpy's stream must not change."""
    order = split_order(web_text.NUM_DOCUMENTS, web_text.VAL_FRACTION)
    assert [len(order[s]) for s in ("train", "val")] == [8_009_762, 4_007]
    assert order["val"][:3].tolist() == [4327249, 4286500, 2184614]
    assert order["train"][:3].tolist() == [4269689, 2140761, 3324742]


@pytest.mark.parametrize("source", STREAMED)
def test_the_number_of_processes_does_not_matter(tmp_path, corpus, source, monkeypatch):
    monkeypatch.setattr(hub, "BATCH_DOCUMENTS", 5)  # more batches than are in flight
    make(source, corpus, tmp_path / "one")
    make(source, corpus, tmp_path / "two", processes=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


# ---- kills ---------------------------------------------------------------------------


class Killed(BaseException):
    """Nothing catches it, like a kill."""


@pytest.mark.parametrize("source", STREAMED)
def test_cut_off_before_every_write_that_counts(tmp_path, corpus, source, monkeypatch):
    """All moments at which a file is synced or renamed, one after the other."""
    monkeypatch.setattr(web_text, "SLAB", 70)
    make(source, corpus, tmp_path / "whole", shard_tokens=12000)
    want = contents(tmp_path / "whole")
    countdown = 0

    def counted(function):
        def call(*args):
            nonlocal countdown
            countdown -= 1
            if countdown == 0:
                raise Killed
            return function(*args)

        return call

    monkeypatch.setattr(Path, "rename", counted(Path.rename))
    monkeypatch.setattr(os, "fsync", counted(os.fsync))
    kills = 0
    while True:
        countdown = kills + 1
        try:
            make(source, corpus, tmp_path / "out", shard_tokens=12000)
        except Killed:
            kills += 1
        else:
            break
        countdown = 0
        make(source, corpus, tmp_path / "out", shard_tokens=12000)
        assert contents(tmp_path / "out") == want, f"cut off at write {kills}"
        assert not unfinished(tmp_path / "out").exists()
        shutil.rmtree(tmp_path / "out")
    assert kills > 4 * len(want)


def test_unfinished_work_of_another_command_is_not_mixed_in(tmp_path, corpus):
    out = tmp_path / "out"
    with pytest.raises(UserError, match="expected more than one shard"):
        make("fineweb-edu", corpus, out, shard_tokens=10**6)
    with pytest.raises(UserError, match="holds unfinished work on other data"):
        make("fineweb-edu", corpus, out)
    shutil.rmtree(unfinished(out))
    make("fineweb-edu", corpus, out)


def test_prepared_data_is_recognised(tmp_path, corpus, capsys):
    out = tmp_path / "out"
    make("openwebtext", corpus, out)
    moved = shutil.move(shutil.copytree(corpus, tmp_path / "copy"), tmp_path / "moved")
    make("openwebtext", moved, out, shard_tokens=10)  # the result is the same
    assert "prepared already" in capsys.readouterr().out
    with pytest.raises(UserError, match="made from something else"):
        make("openwebtext", moved, out, val_fraction=0.2)
    (moved / "train-00000-of-00003.parquet").unlink()
    with pytest.raises(UserError, match="made from something else"):
        make("openwebtext", moved, out)


# ---- bad input -----------------------------------------------------------------------


def test_no_way_to_the_hub_is_one_quick_line(tmp_path):
    """An endpoint that nobody serves, in place of a network that is down."""
    words = ("--source", "fineweb-edu", "--out", tmp_path / "out")
    nowhere = dict(HF_HUB_OFFLINE="", HF_ENDPOINT="http://127.0.0.1:9")
    done = subprocess.run(
        [sys.executable, "-m", "train.prepare", *words, "--tokenizer", "bytes"],
        cwd=ROOT,
        env={**os.environ, **nowhere, "HF_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: got ") and "--dataset FOLDER" in line
    assert not [p for p in tmp_path.iterdir() if p.name != "home"]


def test_bad_options(tmp_path, corpus):
    def refused(message, source="fineweb-edu", dataset=corpus, **options):
        with pytest.raises(UserError, match=message):
            make(source, dataset, tmp_path / "out", **options)

    refused("got --dataset ./none, where no folder is", dataset="./none")
    refused("got --val-fraction 0.1 with --source fineweb-edu", val_fraction=0.1)
    refused("got --val-fraction 1.0, expected a number between", val_fraction=1.0)
    refused("holds out 200, expected some to train", "openwebtext", val_fraction=0.9999)
    with pytest.raises(UserError, match="got --dataset .*with --source python"):
        prepare("python", "bytes", tmp_path / "out", dataset=str(corpus))


def test_packages_are_held_out_whole(tmp_path, capsys):
    """Folders stand for their text; a package's METADATA is text, its tests are not."""
    site = tmp_path / "site"
    texts = {
        "a/__init__.py": "import b\n",
        "a/deep/page.md": "# A page\n",
        "a/tests/test_a.py": "assert False\n",
        "a/data.bin": "no text",
        "a-1.0.dist-info/METADATA": "Name: a\n",
        "b/__init__.py": "held = 'out'\n",
    }
    for name, text in texts.items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    given = partial(prepare, "text", "bytes", tmp_path / "out", files=[site])
    meta = given(held_out=[site / "b"])
    train, _ = open_tokens(tmp_path / "out", "train", vocab_size=257)
    val, _ = open_tokens(tmp_path / "out", "val", vocab_size=257)
    bytes_only = tokenizer("bytes")
    kept = ("a/__init__.py", "a/deep/page.md", "a-1.0.dist-info/METADATA")
    assert bytes_only.decode(train[:]) == "".join(texts[name] for name in kept)
    assert bytes_only.decode(val[:]) == texts["b/__init__.py"]
    assert meta.source["files"] == 4 and meta.source["held_out"] == 1
    given(held_out=[site / "b"])
    assert "is prepared already" in capsys.readouterr().out
    with pytest.raises(UserError, match="made from something else"):
        given()
    with pytest.raises(UserError, match="got --held-out with --source python"):
        prepare("python", "bytes", tmp_path / "other", held_out=[site / "b"])


def test_a_share_of_the_files_is_held_out_whole(tmp_path):
    """By their content: where they lie and what they are called does not matter."""
    texts = [f"text {i}\n" * 5 for i in range(40)]
    kept = {}
    for folder, names in {"a": "m{}.txt", "b": "other{}.rst"}.items():
        (tmp_path / folder).mkdir()
        for i, text in enumerate(texts):
            (tmp_path / folder / names.format(i)).write_text(text)
        out = tmp_path / f"{folder}-out"
        given = partial(prepare, "text", "bytes", out, files=[tmp_path / folder])
        given(val_files=0.3)
        splits = [open_tokens(out, s, vocab_size=257)[0] for s in ("train", "val")]
        whole = [tokenizer("bytes").decode(t[:][t != MARK]) for t in splits]
        kept[folder] = [{t for t in texts if t in text} for text in whole]
        with pytest.raises(UserError, match="made from something else"):
            given(val_fraction=0.3)
    train, val = kept["a"]
    assert kept["a"] == kept["b"]
    assert train | val == set(texts) and not train & val
    assert 4 <= len(val) <= 20
    with pytest.raises(UserError, match="got --val-files and --val-fraction with"):
        given(val_files=0.3, val_fraction=0.3)
