"""A configuration made complete and checked, and the settings by which a run folder is
recognised.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from marsopt import mars
from train.batches import Batches
from train.errors import UserError
from train.gpt2 import Shape
from train.tokens import open_tokens

# What may differ between two calls that continue one run: how it is executed and shown,
# not what is computed.
EXECUTION = {
    "dump_folder",
    "parallelism",
    "checkpoint",
    "metrics",
    "profiler",
    "comm",
    "compile",
    "activation_checkpoint",
    "hf_assets_path",
}
EXECUTION_WITHIN = {
    "training": {
        "steps",
        "local_batch_size",
        "gc_freq",
        "gc_debug",
        "disable_cuda_graphs",
    },
    "optimizer": {"compile"},
    "validator": {"freq", "samples", "steps", "enable", "last_step"},
    "debug": {"print_config", "save_config_file", "enable_structured_logging"},
}


def resolve(config, world: int) -> None:
    """Fill in what follows from other fields, and check everything that can be checked
    before processes meet.

    Raises:
        UserError: data that is missing or damaged, shapes that do not fit,
            hyperparameters out of range, a run folder that belongs to other settings.
    """
    shape, t, opt = config.model_spec.model.shape, config.training, config.optimizer
    if t.seq_len > shape.block_size:
        raise UserError(
            f"got training.seq_len={t.seq_len}, expected at most the model's block "
            f"size {shape.block_size}: lower it"
        )
    if t.steps < 1:
        raise UserError(
            f"got training.steps={t.steps}, expected at least 1: give a number of steps"
        )
    per_pass = t.local_batch_size * world
    if t.global_batch_size < 0:
        t.global_batch_size = per_pass
    if (
        t.local_batch_size < 1
        or t.global_batch_size % per_pass
        or t.global_batch_size == 0
    ):
        raise UserError(
            f"got training.global_batch_size={t.global_batch_size} with {world} ranks "
            "of local_batch_size="
            f"{t.local_batch_size}, expected a multiple of {per_pass}: change one of "
            "the three"
        )
    total = config.lr_scheduler.total_steps or t.steps
    if config.lr_scheduler.warmup_steps >= total:
        raise UserError(
            f"got lr_scheduler.warmup_steps={config.lr_scheduler.warmup_steps}, "
            f"expected less than the schedule's {total} "
            "steps: shorten the warm-up"
        )
    try:
        group = opt.group()
        lr = group.pop("lr")
        mars(**group, lr=lr if lr else 1.0, is_approx=not opt.exact)
        mars(mars_type="mars-adamw", weight_decay=opt.embedding_weight_decay)
        if not 0 <= config.lr_scheduler.min_lr <= lr:
            raise ValueError(
                f"got lr_scheduler.min_lr={config.lr_scheduler.min_lr}, expected a "
                f"number from 0 to optimizer.lr={lr}: "
                "it is the rate at the end"
            )
    except (ValueError, TypeError) as error:
        raise UserError(str(error)) from error
    if opt.exact and not opt.mars_type.startswith("mars-"):
        raise UserError(
            f"got optimizer.exact with {opt.mars_type}, expected a MARS type: "
            "baselines correct nothing"
        )

    folder = Path(config.dataloader.dataset_path)
    if config.validator.dataloader.dataset_path is None:
        config.validator.dataloader.dataset_path = str(folder)
    for loader in (config.dataloader, config.validator.dataloader):
        loader.vocab_size, loader.seed = shape.vocab_size, config.debug.seed or 0
        tokens, meta = open_tokens(
            Path(loader.dataset_path), loader.split, vocab_size=shape.vocab_size
        )
        batches = Batches(
            tokens,
            rank=0,
            world=1,
            local_batch=1,
            seq_len=t.seq_len,
            vocab_size=shape.vocab_size,
        )
    config.tokenizer.name = meta.tokenizer
    if config.validator.enable:
        samples = config.validator.samples
        if samples % per_pass or not 0 < samples <= batches.num_windows:
            raise UserError(
                f"got validator.samples={samples} with {world} ranks of "
                f"local_batch_size={t.local_batch_size}, expected a "
                f"multiple of {per_pass} up to the {batches.num_windows} windows of "
                f"{t.seq_len} tokens held out in {folder}"
            )
    if (
        config.checkpoint.folder != "checkpoint"
        or config.metrics.save_tb_folder != "tb"
    ):
        raise UserError(
            "got another checkpoint.folder or metrics.save_tb_folder, expected their "
            "defaults: change --dump-folder"
        )
    config.validator.last_step = config.metrics.total_steps = t.steps


def settings(config) -> dict:
    """What two calls must agree on to be one run, flat: {"section.option": value}."""
    flat = {}
    raw = json.loads(json.dumps(config.to_dict(), default=str))
    raw["schedule_steps"] = config.lr_scheduler.total_steps or config.training.steps
    raw["lr_scheduler"].pop("total_steps")
    for section, values in raw.items():
        if section in EXECUTION:
            continue
        if not isinstance(values, dict):
            flat[section] = values
            continue
        for key, value in values.items():
            if key not in EXECUTION_WITHIN.get(section, ()):
                flat[f"{section}.{key}"] = value
    return flat


def claim(config) -> None:
    """Write the settings into the run folder, or find that they are those of the run in
    it.

    Raises:
        UserError: the folder holds another run, or something that is no run.
    """
    folder = Path(config.dump_folder)
    path, mine = folder / "settings.json", settings(config)
    if path.exists():
        theirs = json.loads(path.read_text())
        changed = sorted(
            key
            for key in mine.keys() | theirs.keys()
            if mine.get(key) != theirs.get(key)
        )
        if changed:
            what = "; ".join(
                f"{key}={mine.get(key)!r} where it has {theirs.get(key)!r}"
                for key in changed[:3]
            )
            raise UserError(
                f"got {what}{' and more' if len(changed) > 3 else ''}, expected the "
                f"settings of the run in {folder}: give "
                "these to continue it, or another --dump-folder to start a new one"
            )
    elif (folder / "checkpoint").exists():
        raise UserError(
            f"got {folder}, which holds checkpoints but no settings.json, expected a "
            "run of ours or a new folder"
        )
    elif os.environ["RANK"] == "0":
        folder.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".tmp")
        draft.write_text(json.dumps(mine, indent=1) + "\n")
        draft.rename(path)


def describe(folder: Path) -> tuple[Shape, str]:
    """Shape of the model and name of the tokenizer of the run in ``folder``.

    Raises:
        UserError: no run there.
    """
    path = folder / "settings.json"
    if not path.exists():
        raise UserError(
            f"got no {path}, expected the folder of a run: python -m train --config "
            "NAME makes one"
        )
    theirs = json.loads(path.read_text())
    return Shape(**theirs["model_spec.model"]["shape"]), theirs["tokenizer.name"]
