"""Token files, their checks, and the order of batches."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from train import prepare
from train.data import local_text, vocabulary
from train.data.batches import Batches
from train.data.tokenizers import BPE1024_RANKS, Bytes, tokenizer
from train.data.tokens import Meta, open_tokens
from train.errors import UserError


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("Nur wer im Wohlstand lebt, lebt angenehm. äöü€ " * 40)
    return file


@pytest.fixture
def data(tmp_path, text):
    prepare.prepare("text", "bytes", tmp_path / "data", files=[text], val_fraction=0.1)
    return tmp_path / "data"


def test_prepare_text(data, text):
    meta = Meta.load(data)
    raw = text.read_text()
    cut = round(len(raw) * 0.9)
    want = [*raw[:cut].encode(), 256]
    tokens, _ = open_tokens(data, "train", vocab_size=257)
    assert tokens.tolist() == want
    assert (meta.tokenizer, meta.vocab_size) == ("bytes", 257)
    assert (meta.train.tokens, meta.train.text_bytes) == (len(want), len(want) - 1)
    assert meta.nats_per_byte("train") == len(want) / (len(want) - 1)
    # nanoGPT's own way of reading
    assert np.memmap(data / "train.bin", dtype=np.uint16, mode="r").tolist() == want
    assert Bytes().decode(want) == raw[:cut]


def test_prepare_python_holds_out_whole_files(tmp_path, monkeypatch):
    files = []
    for i in range(40):
        files.append(tmp_path / f"m{i}.py")
        files[-1].write_text(f"# {i}\n" * 5)
    monkeypatch.setattr(local_text, "standard_library", lambda: files)
    meta = prepare.prepare("python", "bytes", tmp_path / "data", val_fraction=0.3)
    train, _ = open_tokens(tmp_path / "data", "train", vocab_size=257)
    val, _ = open_tokens(tmp_path / "data", "val", vocab_size=257)
    assert (train == 256).sum() + (val == 256).sum() == 40
    assert 4 <= (val == 256).sum() <= 20
    assert meta.train.text_bytes + meta.val.text_bytes == sum(
        f.stat().st_size for f in files
    )


def test_the_standard_library_is_found_without_tests():
    found = local_text.standard_library()
    assert len(found) > 300
    assert any(p.name == "argparse.py" for p in found)
    assert not any("test" in p.parts or "site-packages" in p.parts for p in found)


def test_vocabularies_are_compared_and_tokenizers_known(data):
    with pytest.raises(UserError, match="got tokenizer 'words'"):
        tokenizer("words")
    with pytest.raises(UserError, match="got data of 257 token ids"):
        open_tokens(data, "train", vocab_size=256)


@pytest.mark.parametrize(
    "source, options, message",
    [
        ("text", {}, "got no files"),
        ("python", dict(files=["text.txt"]), "got 1 file with --source python"),
        ("text", dict(files=["text.txt"], val_fraction=1.5), "got --val-fraction 1.5"),
        ("text", dict(files=["none"]), "none, which is no file"),
        ("text", dict(files=["latin.txt"]), "expected UTF-8 text: convert it"),
        ("text", dict(files=["text.txt"], out="text.txt"), "which is a file"),
    ],
)
def test_what_cannot_be_prepared(source, options, message, tmp_path, text):
    (tmp_path / "latin.txt").write_bytes(b"\xff\xfe\xff")
    before = sorted(tmp_path.iterdir())
    files = [tmp_path / name for name in options.pop("files", [])]
    out, given = tmp_path / options.pop("out", "out"), dict(val_fraction=0.1) | options
    with pytest.raises(UserError, match=message):
        prepare.prepare(source, "bytes", out, files=files, **given)
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_of_json_lines_is_told_from_missing_text(tmp_path, capsys):
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in ("a.jsonl", "b.jsonl", "c.png"):
        (folder / name).write_text("{}")
    given = dict(files=[folder], val_fraction=0.1)
    message = r"no file of text \(2 \.jsonl, 1 \.png\).* read by .*--dataset FOLDER"
    with pytest.raises(UserError, match=message):
        prepare.prepare("text", "bytes", tmp_path / "out", **given)
    (folder / "text.md").write_text("words " * 99)
    prepare.prepare("text", "bytes", tmp_path / "out", **given)
    said = capsys.readouterr().out
    assert said.startswith("left out: 2 .jsonl, 1 .png: text ends in .md .py")
    with pytest.raises(UserError, match=r"got --out .*mine, which is not empty"):
        prepare.prepare("text", "bytes", folder, **given)


def test_gpt2_without_its_vocabulary_is_one_line(tmp_path, monkeypatch):
    tiktoken = pytest.importorskip("tiktoken")

    def offline(name):
        raise ConnectionError("no network")

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(UserError, match="got ConnectionError .* TIKTOKEN_CACHE_DIR"):
        tokenizer("gpt2")


def test_bpe1024_has_every_byte_and_its_ids_stay():
    coder = tokenizer("bpe1024")
    text = "def main() -> None:\n    return €ä\x00<|endoftext|>\n"
    ids = coder.encode(text)
    assert coder.decode([*ids, coder.end_of_text]) == text
    assert len(coder.ranks) == coder.end_of_text == coder.vocab_size - 1
    assert coder.byte_lengths()[ids].sum() == len(text.encode()) > 1.4 * len(ids)
    assert coder.byte_lengths()[coder.end_of_text] == 0
    # other ids would make data and models unreadable
    digest = hashlib.sha256(BPE1024_RANKS.read_bytes()).hexdigest()
    assert digest == "90f1b7fe4dfc9807645e8fe231dd02657a8e32bb0e18701644852158460af68d"


def test_a_vocabulary_is_learned_from_the_training_documents(tmp_path):
    texts = ["a rose is a rose\n" * 3, "ärger\n", "held out: zzzzzzzz\n" * 9]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_text(text)
    files, held_out = [tmp_path / "0.txt", tmp_path / "1.txt"], [tmp_path / "2.txt"]
    given = dict(files=files, held_out=held_out)
    prepare.prepare("text", "bytes", tmp_path / "data", **given)
    documents = list(vocabulary.documents(tmp_path / "data"))
    assert documents == texts[:2]
    pieces = vocabulary.learn(documents, 260)
    assert pieces[:256] == [bytes([b]) for b in range(256)]
    assert len(set(pieces)) == 260 and all(p in b" a rose is" for p in pieces[256:])
    with pytest.raises(UserError, match="expected 2000: give more"):
        vocabulary.learn(documents, 2000)


# ---- order -------------------------------------------------------------------------


def batches(rank=0, world=1, local=4, n=1000, **kw):
    tokens = np.arange(n, dtype=np.uint16)
    return Batches(
        tokens,
        rank=rank,
        world=world,
        local_batch=local,
        seq_len=16,
        vocab_size=n,
        seed=3,
        **kw,
    )


@pytest.mark.parametrize("spread", [None, 24])
def test_order_does_not_depend_on_the_number_of_ranks(spread):
    one = batches(local=8, spread=spread)
    two = [batches(r, 2, 4, spread=spread) for r in range(2)]
    four = [batches(r, 2, 2, spread=spread) for r in range(2)]
    for _ in range(5):
        want = one.next()
        got = [b.next() for b in two]
        small = [[b.next() for b in four] for _ in range(2)]  # two accumulation steps
        for i in range(2):
            assert torch.equal(torch.cat([g[i] for g in got]), want[i])
            assert torch.equal(
                torch.cat([g[i] for step in small for g in step]), want[i]
            )


def test_labels_are_one_ahead_and_state_is_one_integer():
    a, b = batches(), batches()
    for _ in range(3):
        x, y = a.next()
        assert torch.equal(x[:, 1:], y[:, :-1])
        assert (x.dtype, x.shape) == (torch.int64, (4, 16))
    b.samples = a.samples
    assert torch.equal(a.next()[0], b.next()[0])


@pytest.mark.parametrize("samples", [1, 2, 7, 24, 61, 62])
def test_validation_is_spread_over_the_whole_file(samples):
    """Whole windows, each once, in equal parts of the 62; again after the last."""
    held_out = batches(local=samples, spread=samples)
    assert held_out.num_windows == 62
    starts = held_out.next()[0][:, 0]
    assert torch.equal(held_out.next()[0][:, 0], starts)
    assert not (starts % 16).any()
    windows = (starts // 16).tolist()
    assert len(set(windows)) == samples
    for part, window in enumerate(windows):
        assert part * 62 / samples - 1 < window < (part + 1) * 62 / samples
    gaps = {b - a for a, b in zip(windows, windows[1:], strict=False)}
    assert len(gaps) <= 2
    # as far from the start as from the end
    assert abs(windows[0] - (61 - windows[-1])) <= 1


def test_too_little_text_and_foreign_ids():
    with pytest.raises(UserError, match="got 10 tokens, expected at least one sample"):
        batches(n=10)
    tokens = np.full(100, 300, dtype=np.uint16)
    b = Batches(tokens, rank=0, world=1, local_batch=1, seq_len=8, vocab_size=257)
    with pytest.raises(UserError, match="got token id 300"):
        b.next()
