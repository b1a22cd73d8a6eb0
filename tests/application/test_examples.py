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
from examples import digits
from tests.forks import forked
from train import prepare
from train.engine.schedule import cosine
from train.errors import UserError

ROOT = Path(__file__).parents[2]


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


@pytest.mark.parametrize("name", TRAINERS)
def test_foreign_trainers_are_a_page_with_a_mark(name):
    lines = (ROOT / "examples" / f"{name}.py").read_text().splitlines()
    assert len(lines) <= 60
    assert any(line.endswith("  # 1") for line in lines)


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
    options += ["--dump-folder", tmp_path / "out"]
    losses = by_child("examples.torchtitan_llama3", *options, **ALONE)
    assert losses[-1] < 0.7 * losses[0]


# ---- digits --------------------------------------------------------------------------


def test_digits_prints_a_table(capsys):
    pytest.importorskip("sklearn")
    methods = ("mars-m", "muon-2d")
    rates = [f"{method}=1e-2" for method in ("adamw", *methods)]
    short = ["--seeds", "1", "--steps", "24", "--extend", "0", "--models", "resnet"]
    digits.main([*short, "--methods", *methods, "--lrs", *rates])
    *_, told = lines = capsys.readouterr().out.splitlines()
    rows = [line.split(" | ") for line in lines if line.startswith("| resnet")]
    assert [row[1] for row in rows] == ["adamw", *methods]
    for row in rows:
        assert float(row[4].split()[0]) > 30  # of a hundred, where chance is ten
    edges = ", ".join(f"{method} (resnet)" for method in ("adamw", *methods))
    assert told == f"best rates at an edge of their grid: {edges}"


def test_digits_leaves_kernels_to_adamw_where_it_says_so():
    for method, by_adamw in (("muon", False), ("muon-2d", True)):
        model = digits.ResNet()
        optimizer = digits.build(model, method, 1e-2, 1e-3)
        kernel = model.blocks[0].parts[0][2].weight
        assert kernel.ndim == 4
        assert ("exp_avg_sq" in optimizer.state[kernel]) == by_adamw
        assert "exp_avg_sq" in optimizer.state[model.embed.weight]
        assert "exp_avg_sq" in optimizer.state[model.head.weight]


def test_digits_extends_a_grid_until_the_best_rate_is_inside(monkeypatch):
    def run(name, method, lr, rest_lr, seed, steps, splits):
        return digits.Outcome(abs(lr - 0.2), 0.0, 100.0)

    monkeypatch.setattr(digits, "run", run)
    args = digits.arguments(["--lrs", "muon=0.025,0.05"])
    row = digits.swept(args, "vit", "muon", 1e-3, None)
    assert sorted(row.rates) == [0.025, 0.05, 0.1, 0.2, 0.4]
    assert row.lr == 0.2 and not row.is_at_edge and len(row.seeds) == 3


@pytest.mark.parametrize(
    "given, told",
    [
        (["--lrs", "muon=fast"], "got --lrs muon=fast, expected METHOD=LR"),
        (["--lrs", "sgd=0.1"], "got --lrs sgd=0.1, expected METHOD=LR"),
        (["--lrs", "muon=0,nan"], "and rates above 0"),
        (["--seeds", "0"], "got --seeds 0, expected at least 1"),
    ],
)
def test_digits_says_what_it_cannot_use(given, told):
    with pytest.raises(UserError, match=told):
        digits.arguments(given)
