"""Whole-split loss, and lm-evaluation-harness without a network."""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.application.runs import ROOT
from train.data import tokenizer_files
from train.data.token_files import Split
from train.data.tokenizers import Bytes
from train.data.tokens import SPLITS, Meta
from train.errors import UserError
from train.evaluate import __main__ as evaluate
from train.evaluate import harness
from train.gpt2 import GPT2, Shape, huggingface
from train.gpt2.inference import whole_loss
from train.runs.trained import of_folder

pytestmark = pytest.mark.application

TASK = ROOT / "examples" / "local_task"


def model_of(width=24, **changes):
    shape = dict(num_layers=2, num_heads=2, width=width, block_size=128, vocab_size=257)
    return GPT2(Shape(**shape | changes)).eval()


def scattered(**changes):
    """Weights large enough that every token matters."""
    model = model_of(**changes)
    for p in model.parameters():
        torch.nn.init.normal_(p, mean=float(p.ndim == 1), std=0.2)
    return model


def exported(model, folder):
    folder.mkdir()
    huggingface.save(model, folder, Bytes.end_of_text)
    tokenizer_files.save(Bytes(), folder, model.shape.block_size)
    return folder


# ---- the loss ------------------------------------------------------------------------


@torch.no_grad()
def one_by_one(model, tokens, window):
    """-log p of each token but the first, given those before it in its window."""
    model = model.double()
    nats = []
    for at in range(1, len(tokens)):
        start = (at - 1) // window * window
        context = torch.tensor([tokens[start:at].tolist()])
        nats.append(-model(context)[0, -1].log_softmax(-1)[tokens[at]].item())
    return nats


@pytest.mark.parametrize("count, batch", [(2, 1), (15, 1), (57, 3)])
def test_whole_loss_is_every_token_once(count, batch):
    tokens = np.random.default_rng(count).integers(0, 257, count).astype(np.uint16)
    model = scattered()
    found = whole_loss(model, tokens, window=7, batch=batch)
    want = one_by_one(model, tokens, 7)
    assert found.tokens == len(want) == count - 1
    assert found.nats_per_token == pytest.approx(sum(want) / len(want), rel=1e-5)


# ---- the harness ---------------------------------------------------------------------


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    """No hub, and a cache of our own."""
    import datasets
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def called(monkeypatch, *args):
    """The command in this process; what it wrote."""
    monkeypatch.setattr(sys, "argv", ["evaluate", "--device", "cpu", *map(str, args)])
    evaluate.main()


def test_the_harness_evaluates_a_local_task(tmp_path, monkeypatch, capsys):
    folder = exported(scattered(inverse_layer_scale=True), tmp_path / "model")
    words = ["--model", folder, "--tasks", "letters", "--include-path", TASK]
    called(monkeypatch, *words)
    told = json.loads((folder / "evaluation.json").read_text())["tasks"]
    num = len((TASK / "letters.jsonl").read_text().splitlines())
    assert told["n-samples"]["letters"] == {"original": num, "effective": num}
    accuracy = told["results"]["letters"]["acc,none"]
    assert (accuracy * num) % 1 == pytest.approx(0, abs=1e-6)
    assert re.search(rf"letters +acc +{accuracy:.4f} ", capsys.readouterr().out)
    called(monkeypatch, *words, "--limit", 4, "--out", tmp_path / "four.json")
    told = json.loads((tmp_path / "four.json").read_text())["tasks"]
    assert told["n-samples"]["letters"] == {"original": num, "effective": 4}


@pytest.fixture
def held_out(tmp_path):
    """Data whose held-out text is two short documents."""
    data = tmp_path / "data"
    data.mkdir()
    splits = {}
    for split in SPLITS:
        ids = np.array([*"Größe: 3\n".encode(), 256, *b"import re\n", 256], "<u2")
        ids.tofile(data / f"{split}.bin")
        splits[split] = Split(len(ids), len(ids) - 2, _sha256(data / f"{split}.bin"))
    Meta("bytes", 257, {"source": "test"}, **splits).save(data)
    return data


def _sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_loss_of_the_whole_split(tmp_path, monkeypatch, held_out, capsys):
    model = scattered()
    folder = exported(model, tmp_path / "model")
    common = ["--model", folder, "--loss", "--data", held_out]
    called(monkeypatch, *common, "--window", 8)
    told = json.loads((folder / "evaluation.json").read_text())["loss"]
    tokens = np.fromfile(held_out / "val.bin", "<u2")
    want = one_by_one(model, tokens, 8)
    assert told["tokens"] == len(want) == 22
    mean = sum(want) / len(want)
    assert told["nats_per_token"] == pytest.approx(mean, rel=1e-5)
    # 21 bytes stand behind 23 tokens
    assert told["nats_per_byte"] == pytest.approx(mean * 23 / 21, rel=1e-5)
    bits = mean * 23 / 21 / math.log(2)
    assert told["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    assert told["sha256"] == _sha256(held_out / "val.bin")
    said = capsys.readouterr().out
    assert f"loss {told['nats_per_token']:.5f} nats per byte, over 22 tokens" in said
    with pytest.raises(UserError, match="got --window 129, expected at most the"):
        called(monkeypatch, *common, "--window", 129)
    with pytest.raises(UserError, match="which is a folder, .* expected a file"):
        called(monkeypatch, *common, "--out", tmp_path)
    of_others = replace(of_folder(folder), tokens="gpt2")
    monkeypatch.setattr(evaluate, "from_arguments", lambda args: of_others)
    with pytest.raises(UserError, match="got tokens by bytes in .* expected gpt2"):
        called(monkeypatch, *common)


# ---- one line each -------------------------------------------------------------------


def test_tasks_are_checked(tmp_path, monkeypatch):
    from lm_eval import tasks

    # of all tasks it takes 5 s
    folder = Path(tasks.__file__).parent / "hellaswag"
    index = tasks.TaskManager(include_path=str(folder), include_defaults=False)
    monkeypatch.setattr(tasks, "TaskManager", lambda **_: index)
    for name, message in {
        "hellaswag": "got --tasks hellaswag, whose data cannot be loaded here",
        "helaswag": "got --tasks helaswag, .* like hellaswag",
    }.items():
        with pytest.raises(UserError, match=message):
            harness.load_tasks([name], None)


@pytest.mark.parametrize(
    "args, message",
    [
        ([], "got neither --tasks nor --loss"),
        (["--loss"], "got --loss without --data"),
        (["--tasks", "letters"], r"got no .*config\.json"),
    ],
)
def test_arguments_are_checked(args, message, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=message):
        called(monkeypatch, "--model", tmp_path, *args)
