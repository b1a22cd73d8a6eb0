"""Commands called in this process, and a small model in each form for them to read:
data, a run of two steps, a folder of Hugging Face's.
"""

from __future__ import annotations

import io
import json
import sys
import warnings
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

import configs
from train import export, import_hf, prepare, sample
from train.data import tokenizer_files
from train.data.tokenizers import Bytes
from train.engine.resolve import resolve
from train.errors import command
from train.evaluate import __main__ as evaluate
from train.gpt2 import GPT2, Shape, huggingface
from train.runs import checkpoints, checksums, initial
from train.runs.settings import claim, settings

SHAPE = Shape(num_layers=1, num_heads=2, width=8, block_size=16, vocab_size=257)
OLDER, NEWEST = 2, 4
STEP = f"run/checkpoint/step-{NEWEST}"


def called(main, *args):
    """Exit code and what was said, of a command called in this process."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["command", *map(str, args)])
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        code = 0
        try:
            command(main)
        except SystemExit as ended:
            code = ended.code
    return code, out.getvalue(), err.getvalue()


def refused(main, *args):
    """The one line with which a command ends that exits with 2."""
    code, out, err = called(main, *args)
    assert code == 2, (code, out, err)
    told = err.splitlines()  # that a checkpoint has no checksums is a warning
    lines = [line for line in told if "has no SHA256SUMS" not in line]
    if lines[0].startswith("usage: "):  # argparse's own
        return lines[-1]
    assert len(lines) == 1 and lines[0].startswith("error: got "), err
    return lines[0]


# ---- what commands read --------------------------------------------------------------


def make(root: Path) -> Path:
    """Make all of it."""
    (root / "a.txt").write_text("hello world\n" * 40)
    prepare.prepare(
        "text", "bytes", root / "data", files=[root / "a.txt"], val_fraction=0.3
    )
    model = GPT2(SHAPE)
    for step in (OLDER, NEWEST):
        model.init_weights(seed=step)
        folder = root / f"run/checkpoint/step-{step}"
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            state = model.state_dict() | {"object": ["neither", "tensor"]}
            dcp.save(state, checkpoint_id=folder, no_dist=True)
        checksums.write(folder)
    known = settings(training(root))
    (root / "run/settings.json").write_text(json.dumps(known))
    for name in ("hf", "noted"):
        (root / name).mkdir()
    huggingface.save(model, root / "hf", 256)
    tokenizer_files.save(Bytes(), root / "hf", 16)
    initial.note_shape(root / "noted", SHAPE)
    return root


def training(place: Path, folder: str = "run", **of_checkpoint):
    """A configuration of this model, by which the run continues."""
    config = configs.tiny_mars_adamw()
    config.model_spec.model.shape = SHAPE
    config.dataloader.dataset_path = str(place / "data")
    config.dump_folder = str(place / folder)
    config.training.seq_len = 16
    config.training.local_batch_size = config.training.global_batch_size = 1
    for name, value in of_checkpoint.items():
        setattr(config.checkpoint, name, value)
    resolve(config, 1)
    return config


# ---- commands on it, but for the one that trains, whole ------------------------------


def losses(place):
    return evaluate.main, "--run", place / "run", "--loss", "--data", place / "data"


def imports(place):
    return import_hf.main, "--model", place / "hf", "--out", place / "out"


def samples(place, *options):
    return sample.main, "--model", place / "hf", "--tokens", 2, *options


def samples_run(place):
    return sample.main, "--run", place / "run", "--tokens", 2


def exports(place, *options):
    return export.main, "--run", place / "run", "--out", place / "out", *options


def prepares(place):
    return (
        *(prepare.main, "--source", "text", "--val-fraction", 0.3),
        *("--out", place / "data", place / "a.txt"),
    )


def reads_note(place):
    return (lambda: initial.shape_of(place / "noted", None),)


def goes_on(place):
    """What a training checks before it continues."""

    def main():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RANK", "0")
            claim(training(place))
        checkpoints.check_own(place / "run", SHAPE)

    return (main,)


def starts(place, weights_alone=False):
    """What a new training checks of the checkpoint that it starts from."""

    def main():
        path = str(place / STEP)
        given = dict(initial_load_path=path, initial_load_model_only=weights_alone)
        training(place, "out", **given)

    return (main,)


def starts_from_weights(place):
    return starts(place, weights_alone=True)
