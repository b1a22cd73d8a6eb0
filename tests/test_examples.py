"""The examples run, and learn."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent


def printed(*command, held_out=False):
    """The six losses that an example prints, and its ``held_out`` loss."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(v) for v in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    if held_out:
        return losses, float(re.search(r"held-out (\d+\.\d+)", done.stdout)[1])
    assert len(losses) == 6
    return losses


@pytest.mark.parametrize(
    "args",
    [
        ["custom_loop", "--flat"],
        ["custom_loop", "--eager"],
        ["drop_in"],
        ["drop_in", "--exact"],
    ],
)
def test_example(args):
    losses = printed("-m", f"examples.{args[0]}", *args[1:])
    assert losses[-1] < 0.05 * losses[0]


def of_hugging_face(example, saved):
    llama = pytest.importorskip("transformers").LlamaForCausalLM
    rows = torch.stack([row["input_ids"] for row in example.chains(64)])
    loss = llama.from_pretrained(saved)(rows, labels=rows).loss
    return loss, torch.load(saved / "optimizer.pt")


def of_lightning(example, saved):
    model = example.Regression.load_from_checkpoint(saved, map_location="cpu").model
    inputs, labels = map(torch.cat, zip(*example.data(64), strict=True))
    loss = torch.nn.functional.mse_loss(model(inputs), labels)
    return loss, torch.load(saved)["optimizer_states"][0]


def of_accelerate(example, saved):
    model = example.build()
    load_file = pytest.importorskip("safetensors.torch").load_file
    model.load_state_dict(load_file(saved / "model.safetensors"))
    inputs, labels = example.data(64).tensors
    loss = torch.nn.functional.mse_loss(model(inputs), labels)
    return loss, torch.load(saved / "optimizer.bin")


# Foreign trainers: the packages that an example needs, the last checkpoint of its run,
# and what reads the held-out loss of its weights and the optimizer's state from there
TRAINERS = {
    "hf_trainer": (("transformers", "accelerate"), "checkpoint-120", of_hugging_face),
    "lightning_loop": (("lightning",), "epoch=5-step=192.ckpt", of_lightning),
    "accelerate_loop": (("accelerate",), "epoch-5", of_accelerate),
}


@pytest.mark.processes
@pytest.mark.parametrize("command", [*TRAINERS, "hf_trainer --class"])
def test_foreign_trainers_save_and_resume_what_is_trained(command, tmp_path):
    """The example learns; its last checkpoint holds the model that was evaluated, which
    is x; and a run that goes on from the checkpoint before repeats the rest.
    """
    name, *options = command.split()
    packages, last, read = TRAINERS[name]
    for package in packages:
        pytest.importorskip(package)
    what = ("-m", f"examples.{name}", tmp_path, *options)
    losses, held_out = printed(*what, held_out=True)
    assert len(losses) == 6 and losses[-1] < 0.05 * losses[0]

    example, saved = importlib.import_module(f"examples.{name}"), tmp_path / last
    with torch.no_grad():
        loss, state = read(example, saved)
    assert float(loss) == pytest.approx(held_out, abs=1e-6)
    assert not any(group["train_mode"] for group in state["param_groups"])

    shutil.rmtree(saved) if saved.is_dir() else saved.unlink()
    rest, again = printed(*what, held_out=True)
    assert 0 < len(rest) < 6 and rest == losses[-len(rest) :] and again == held_out


@pytest.mark.parametrize("name", TRAINERS)
def test_foreign_trainers_are_a_page_with_two_marks(name):
    lines = (ROOT / "examples" / f"{name}.py").read_text().splitlines()
    assert len(lines) <= 60
    for mark in ("  # 1", "  # 2"):
        assert any(line.endswith(mark) for line in lines)


@pytest.mark.processes
def test_fsdp2_goes_on_with_another_number_of_processes(tmp_path):
    launch = ("-m", "torch.distributed.run", "--nproc-per-node")
    what = ("-m", "examples.fsdp2", tmp_path / "checkpoint")
    first = printed(*launch, "2", *what)
    assert first[-1] < 0.05 * first[0]
    rest = printed(*launch, "1", *what)
    assert rest[0] < 1.1 * first[-1]
    assert rest[-1] < 0.5 * first[-1]
