"""Trainings of a few steps."""

from __future__ import annotations

import re
from pathlib import Path

import configs
from tests.forks import forked

ROOT = Path(__file__).parents[2]
STEPS, SEQ, BATCH = 8, 32, 8
TINY = [
    "--training.seq-len", str(SEQ),
    "--training.global-batch-size", str(BATCH),
    "--training.local-batch-size", "4",
    "--lr-scheduler.warmup-steps", "2",
    "--lr-scheduler.total-steps", str(STEPS),
    "--metrics.log-freq", "1",
    "--validator.samples", "16",
    "--validator.freq", "4",
    "--checkpoint.interval", "4",
]  # fmt: skip


def words(data, folder, *options, steps=STEPS):
    """The command line of a training."""
    return [
        "train", "--config", "tiny_mars_adamw", *TINY, "--training.steps", steps,
        "--dataloader.dataset-path", data, "--dump-folder", folder, *options,
    ]  # fmt: skip


def printed(out):
    """{step: loss}, {step: validation loss}, as a training has printed them."""
    found = re.findall(r"step (\d+)/\d+  (loss|validation loss) (\d+\.\d{5})", out)
    losses = {int(s): v for s, what, v in found if what == "loss"}
    return losses, {int(s): v for s, what, v in found if what != "loss"}


def train_tiny(data, folder, *options, steps=STEPS, ranks=1):
    """Train; what ``printed`` finds, and stdout."""
    code, out, err = forked(*words(data, folder, *options, steps=steps), ranks=ranks)
    assert code == 0, out + err
    return *printed(out), out


def tiny(data, **changes):
    """A checked configuration with ``section__option=value`` changed."""
    config = configs.tiny_mars_adamw()
    config.dataloader.dataset_path = str(data)
    config.training.seq_len, config.validator.samples = SEQ, 16
    for path, value in changes.items():
        section, option = path.split("__")
        setattr(getattr(config, section), option, value)
    return config
