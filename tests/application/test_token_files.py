"""What training reads: nanoGPT's files and shards with a header; damage to them."""

from __future__ import annotations

import hashlib
import os

import numpy as np
import pytest

import configs
from tests.corpora import documents, write_corpus
from train.data.batches import Batches
from train.data.token_files import open_shard, write_shard
from train.data.tokens import open_tokens, read_meta
from train.engine.resolve import resolve
from train.errors import UserError
from train.gpt2 import Shape
from train.prepare import prepare
from train.runs.settings import settings

NO_LENGTHS = np.zeros(65536, dtype=np.uint16)


def ids(num, seed=0):
    return np.random.default_rng(seed).integers(50257, size=num).astype(np.uint16)


@pytest.fixture
def nanogpt(tmp_path):
    """train.bin and val.bin as nanoGPT writes them, nothing beside them."""
    folder = tmp_path / "nanogpt"
    folder.mkdir()
    ids(9000, 1).tofile(folder / "train.bin")
    ids(1100, 2).tofile(folder / "val.bin")
    return folder


@pytest.fixture
def shards(tmp_path):
    """Shards as modded-nanogpt downloads them."""
    folder = tmp_path / "shards"
    folder.mkdir()
    write_shard(folder / "finewebedu_val_000000.bin", ids(1100, 2), NO_LENGTHS)
    whole = ids(9000, 1)
    for i, part in enumerate(np.split(whole, [4000, 8000]), 1):
        write_shard(folder / f"finewebedu_train_{i:06d}.bin", part, NO_LENGTHS)
    return folder


# ---- formats -------------------------------------------------------------------------


def test_nanogpts_files_are_read_as_they_are(nanogpt):
    tokens, meta = open_tokens(nanogpt, "train", vocab_size=50304)
    assert np.array_equal(tokens, ids(9000, 1))
    assert (meta.tokenizer, meta.vocab_size, meta.val.tokens) == ("gpt2", 50257, 1100)
    assert meta.nats_per_byte("val") is None
    assert sorted(p.name for p in nanogpt.iterdir()) == ["train.bin", "val.bin"]


def test_shards_are_one_stream(shards):
    tokens, meta = open_tokens(shards, "train", vocab_size=50304)
    whole = ids(9000, 1)
    assert len(tokens) == meta.train.tokens == 9000
    for start, stop in [(0, 9000), (10, 20), (3990, 4010), (3999, 8001), (4000, 4000)]:
        assert np.array_equal(tokens[start:stop], whole[start:stop])
    assert np.array_equal(tokens[8990:9999], whole[8990:])
    batches = Batches(
        tokens, rank=0, world=1, local_batch=300, seq_len=32, vocab_size=50257
    )
    same = Batches(
        whole, rank=0, world=1, local_batch=300, seq_len=32, vocab_size=50257
    )
    assert all(a.equal(b) for a, b in zip(batches.next(), same.next(), strict=True))


def test_the_header_is_llmcs(tmp_path):
    content = write_shard(tmp_path / "a.bin", ids(5), np.full(50257, 2, np.uint16))
    raw = (tmp_path / "a.bin").read_bytes()
    assert np.frombuffer(raw[:1024], np.int32).tolist() == [20240520, 1, 5, *[0] * 253]
    assert (content.tokens, content.text_bytes) == (5, 10)
    assert content.sha256 == hashlib.sha256(raw).hexdigest()
    assert np.array_equal(open_shard(tmp_path / "a.bin"), ids(5))


# ---- runs ----------------------------------------------------------------------------


def recipe(folder):
    config = configs.tiny_mars_adamw()
    config.dataloader.dataset_path = str(folder)
    config.model_spec.model.shape = Shape(
        num_layers=1, num_heads=2, width=8, block_size=128, vocab_size=50304
    )
    config.validator.samples, config.tokenizer.name = 8, "gpt2"
    return config


@pytest.mark.parametrize("form", ["nanogpt", "shards"])
def test_a_run_takes_them_and_knows_them_again(form, request):
    folder = request.getfixturevalue(form)
    config = recipe(folder)
    resolve(config, 1)
    known = settings(config)
    assert known["data.train"].startswith("sampled:")
    moved = folder.rename(folder.with_name("moved"))
    assert settings(recipe(moved))["data.train"] == known["data.train"]
    name = {"nanogpt": "train.bin", "shards": SHARD}[form]
    patch(name, 4321, b"\0\0")(moved)
    assert settings(recipe(moved))["data.train"] != known["data.train"]


def test_the_same_tokens_are_the_same_data_whatever_the_files(nanogpt, shards):
    assert read_meta(nanogpt).train.sha256 == read_meta(shards).train.sha256


def test_prepared_shards_train_and_are_verified(tmp_path):
    corpus = write_corpus(tmp_path / "corpus", documents(100))
    out = tmp_path / "out"
    prepare("fineweb-edu", "bytes", out, dataset=str(corpus), shard_tokens=2000)
    config = configs.tiny_mars_adamw()
    config.dataloader.dataset_path = str(out)
    config.validator.samples = 8
    resolve(config, 1)
    assert len(settings(config)["data.train"]) == 64
    path = out / "fineweb_train_000002.bin"
    raw = bytearray(path.read_bytes())
    raw[1500] ^= 1
    path.write_bytes(raw)
    with pytest.raises(UserError, match="got checksum .* of .*train_000002.bin"):
        resolve(config, 1)
    path.unlink()
    with pytest.raises(UserError, match="got no .*train_000002.bin"):
        resolve(config, 1)


# ---- damage --------------------------------------------------------------------------


def patch(name, at, value):
    def damage(folder):
        with (folder / name).open("r+b") as file:
            file.seek(at)
            file.write(value)

    return damage


def cut(name, size):
    return lambda folder: os.truncate(folder / name, size)


SHARD = "finewebedu_train_000002.bin"
DAMAGE = {
    "magic": ("shards", patch(SHARD, 0, b"\1"), "with magic 20240385, version 1 in"),
    "short": ("shards", cut(SHARD, 5000), "got 5,000 bytes .* expected 9,024 for the"),
    "id": ("shards", patch(SHARD, 2000, b"\xff\xff"), "got token id 65535 in the tr"),
    "raw id": ("nanogpt", patch("val.bin", 2, b"\xff\xff"), "got token id 65535"),
    "odd": ("nanogpt", cut("train.bin", 999), "got 999 bytes .* an even number"),
    "one split": (
        "nanogpt",
        lambda f: (f / "val.bin").unlink(),
        "got no token file of the val split",
    ),
    "neither": (
        "nanogpt",
        lambda f: [p.unlink() for p in f.iterdir()],
        "got no .*meta.json, expected token files: .* --source text FILES --out NEW "
        "makes them.*, nanoGPT.s train.bin",
    ),
}


def test_data_that_a_recipe_names_is_made_by_its_source(tmp_path):
    folder = tmp_path / "fineweb-edu"
    with pytest.raises(UserError, match=f"--source fineweb-edu --out {folder} makes"):
        read_meta(folder)


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_files_are_refused(name, request):
    form, damage, message = DAMAGE[name]
    folder = request.getfixturevalue(form)
    damage(folder)
    with pytest.raises(UserError, match=message):
        open_tokens(folder, "train", vocab_size=50304)
