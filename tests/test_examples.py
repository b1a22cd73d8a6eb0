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

from examples import digits
from train.errors import UserError

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


COMPILED = ("custom_loop --flat", "drop_in")


@pytest.fixture(autouse=True)
def eagerly(request, monkeypatch):
    """But for two of them: what an optimizer compiles is tested elsewhere, and takes
    each process longer than its example.
    """
    if request.node.name not in {f"test_example[{command}]" for command in COMPILED}:
        monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")


@pytest.mark.parametrize(
    "command", [*COMPILED, "custom_loop --eager", "drop_in --exact"]
)
def test_example(command):
    name, *options = command.split()
    losses = printed("-m", f"examples.{name}", *options)
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


# ---- digits --------------------------------------------------------------------------


def test_digits_prints_a_table(capsys):
    pytest.importorskip("sklearn")
    methods = ("mars-m-transport", "muon-2d")
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
