"""The examples run, and learn."""

from __future__ import annotations

import importlib
import json
import re
import runpy
import shutil
import sys
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

import marsopt
from examples import sweep
from tests.forks import forked
from train import prepare
from train.engine.schedule import cosine


def read(out):
    """The losses in what an example has printed, and its held-out loss."""
    losses = [float(v) for v in re.findall(r"loss (\d+\.\d+)", out)]
    held_out = re.search(r"held-out (\d+\.\d+)", out)
    return losses, held_out and float(held_out[1])


def by_child(*command, **how):
    """Those of one that takes a forked child of what has imported torchtitan."""
    code, out, err = forked(*command, TORCH_COMPILE_DISABLE="1", **how)
    assert code == 0, out + err
    losses = [float(v) for v in re.findall(r"loss:? +(\d+\.\d+)", out)]
    assert len(losses) == 6
    return losses


@pytest.fixture(autouse=True)
def eagerly(monkeypatch):
    """What an optimizer compiles is tested elsewhere, and takes each process longer
    than its example. Graphs of their own are those of dynamo.
    """
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


@pytest.fixture
def played(monkeypatch, capsys):
    """Run an example in this process, which has imported it all; what it printed."""

    def play(name, *options):
        monkeypatch.setattr(sys, "argv", ["example", *map(str, options)])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of trainers, as in a process of their own
            runpy.run_module(f"examples.{name}", run_name="__main__")
        return capsys.readouterr().out

    return play


@pytest.mark.parametrize(
    "command",
    ["custom_loop --flat", "custom_loop --eager", "drop_in", "drop_in --exact"],
)
def test_example(command, played):
    losses, _ = read(played(*command.split()))
    assert len(losses) == 6 and losses[-1] < 0.05 * losses[0]


@pytest.mark.parametrize("draws", [True, False])
def test_sweep_tells_half_and_double_from_the_default(
    played, tmp_path, monkeypatch, draws
):
    if not draws:  # the library's environment has no matplotlib
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    out = played("sweep", tmp_path / "sweep.png")
    rates = [float(rate) for rate in re.findall(r"lr (\S+)", out)]
    losses, _ = read(out)
    default = marsopt.for_model(sweep.build()).param_groups[0]["lr"]
    assert rates == [default / 2, default, 2 * default]
    assert min(losses) == losses[1] and losses[2] < 0.3
    if draws:
        assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    else:
        assert "no picture" in out


class OfHuggingFace:
    """The example's model and data, as a plain loop has them; and its checkpoint."""

    packages, last = ("transformers", "accelerate"), "checkpoint-120"

    def __init__(self, example):
        self.model, self.rows = example.build(), self.batch(example, 512)
        self.held_out, self.num_steps = self.batch(example, 64), example.STEPS
        self.size = example.BATCH

    @staticmethod
    def batch(example, num):
        return torch.stack([row["input_ids"] for row in example.chains(num)])

    def losses(self):
        batches = self.rows.split(self.size)
        for step in range(self.num_steps):
            yield self.loss(batches[step % len(batches)])

    def loss(self, rows):
        return self.model(rows, labels=rows).loss

    def scheduler(self, optimizer):  # the Trainer's own: a cosine to a tenth
        to_a_tenth = dict(warmup=0, total=self.num_steps, floor=0.1)
        return LambdaLR(optimizer, lambda step: cosine(step, **to_a_tenth))

    def load(self, saved):
        self.model = type(self.model).from_pretrained(saved)


class OfLightning:
    packages, last = ("lightning",), "epoch=5-step=192.ckpt"

    def __init__(self, example):
        self.whole, self.num_epochs = example.build(), example.EPOCHS
        self.model, self.batches = self.whole.model, [*example.data(512)]
        self.held_out = [*map(torch.cat, zip(*example.data(64), strict=True))]

    def losses(self):
        for _ in range(self.num_epochs):
            yield from map(self.loss, self.batches)

    def loss(self, batch):
        return torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def scheduler(self, optimizer):
        return LambdaLR(optimizer, lambda step: 1.0)

    def load(self, saved):
        self.whole.load_state_dict(torch.load(saved)["state_dict"])


class OfAccelerate(OfLightning):
    packages, last = ("accelerate",), "epoch-5"

    def __init__(self, example):
        self.model, self.num_epochs = example.build(), example.EPOCHS
        rows, self.held_out = example.data(512).tensors, example.data(64).tensors
        split = (x.split(example.BATCH) for x in rows)
        self.batches = [*zip(*split, strict=True)]

    def load(self, saved):
        load_file = pytest.importorskip("safetensors.torch").load_file
        self.model.load_state_dict(load_file(saved / "model.safetensors"))


TRAINERS = {
    "hf_trainer": OfHuggingFace,
    "lightning_loop": OfLightning,
    "accelerate_loop": OfAccelerate,
}


def trained_plainly(kind, example) -> float:
    """The held-out loss of the same training in a plain loop."""
    plain = kind(example)
    optimizer = marsopt.for_model(plain.model, lr=example.LR, compile=False)
    scheduler = plain.scheduler(optimizer)
    plain.model.train()
    for loss in plain.losses():
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    plain.model.eval()
    with torch.no_grad():
        return float(plain.loss(plain.held_out))


@pytest.mark.processes
@pytest.mark.parametrize("command", [*TRAINERS, "hf_trainer --object"])
def test_foreign_trainers_do_what_the_plain_loop_does(command, tmp_path, played):
    """And save and resume it: the last checkpoint holds the model that was evaluated,
    and a run that goes on from the checkpoint before repeats the rest.
    """
    name, *options = command.split()
    kind = TRAINERS[name]
    for package in kind.packages:
        pytest.importorskip(package)
    losses, held_out = read(played(name, tmp_path, *options))
    example, saved = importlib.import_module(f"examples.{name}"), tmp_path / kind.last
    assert len(losses) == 6 and losses[-1] < 0.2 * losses[0]
    assert trained_plainly(kind, example) == pytest.approx(held_out, abs=1e-5)
    if options:  # another way to the same optimizer, which is saved as that
        return

    checkpoint = kind(example)
    checkpoint.load(saved)
    with torch.no_grad():
        loss = checkpoint.loss(checkpoint.held_out)
    assert float(loss) == pytest.approx(held_out, abs=1e-6)

    shutil.rmtree(saved) if saved.is_dir() else saved.unlink()
    rest, again = read(played(name, tmp_path, *options))
    assert 0 < len(rest) < 6 and rest == losses[-len(rest) :] and again == held_out


# what torchrun tells the one process that it starts
ALONE = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
ALONE |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")


@pytest.mark.processes
def test_fsdp2_goes_on_with_another_number_of_processes(tmp_path):
    what = ("examples.fsdp2", tmp_path / "checkpoint")
    first, rest = by_child(*what, ranks=2), by_child(*what, **ALONE)
    assert first[-1] < 0.05 * first[0]
    assert rest[0] < 1.1 * first[-1]
    assert rest[-1] < 0.5 * first[-1]


@pytest.mark.processes
def test_torchtitans_llama3_learns_without_a_gpu(tmp_path):
    text = tmp_path / "text.py"
    text.write_bytes(Path(json.__file__).read_bytes())  # which no change here edits
    prepare.prepare("text", "bytes", tmp_path / "data", files=[text])
    options = ["--dataloader.dataset-path", tmp_path / "data", "--training.steps", "6"]
    options += ["--training.local-batch-size", "2", "--training.seq-len", "32"]
    options += ["--debug.seed", "0"]  # else torchtitan draws one
    options += ["--dump-folder", tmp_path / "out"]
    losses = by_child("examples.torchtitan_llama3", *options, **ALONE)
    assert losses[-1] < 0.7 * losses[0]
