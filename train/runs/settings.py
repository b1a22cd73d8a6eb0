"""The settings by which a run is recognised, and the folder that belongs to it."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AliasPath, Field, PositiveInt

from train.data.tokenizers import TOKENIZERS
from train.data.tokens import SPLITS, read_meta
from train.errors import UserError
from train.files import check_folder, read_json, write_json
from train.gpt2 import Shape
from train.runs.checkpoints import last_step

SETTINGS, FROM = "settings.json", "initial_load_path"
HELD_OUT = "held_out_folder"  # where it lay when the run began; it may be moved
AGAIN = (
    "the folder of a run, which python -m train --config NAME makes, with all that it "
    "wrote there: name such a folder"
)

# What may differ between two calls that continue one run: how it is executed and shown,
# not what is computed.
EXECUTION = {
    "dump_folder", "parallelism", "checkpoint", "metrics", "profiler", "comm",
    "compile", "activation_checkpoint", "hf_assets_path",
}  # fmt: skip
EXECUTION_WITHIN = {
    "training": {"steps", "local_batch_size", "gc_freq", "gc_debug",
                 "disable_cuda_graphs"},
    "optimizer": {"compile"},
    "validator": {"freq", "samples", "most_samples", "steps", "enable", "last_step"},
    "debug": {"print_config", "save_config_file", "enable_structured_logging"},
}  # fmt: skip


def held_out_folder(config) -> Path:
    """Return where the held-out data lies: beside the training data unless
    told otherwise.
    """
    return Path(
        config.validator.dataloader.dataset_path or config.dataloader.dataset_path
    )


def data_folders(config) -> tuple[Path, Path]:
    """Return where the data to train and to validate on lie."""
    return Path(config.dataloader.dataset_path), held_out_folder(config)


def data_checksums(config) -> dict[str, str]:
    """Return what the data are, not where they lie: {split: checksum}."""
    return {
        split: getattr(read_meta(folder), split).sha256
        for split, folder in zip(SPLITS, data_folders(config), strict=True)
    }


def settings(config) -> dict:
    """Return what two calls must agree on to be one run: {"section.option": value}."""
    flat = {}
    raw = json.loads(json.dumps(config.to_dict(), default=str))
    raw["schedule_steps"] = config.lr_scheduler.total_steps or config.training.steps
    raw["lr_scheduler"].pop("total_steps")
    raw[FROM] = config.checkpoint.initial_load_path
    for section in (raw["dataloader"], raw["validator"]["dataloader"]):
        section.pop("dataset_path")
    raw["data"] = data_checksums(config)
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


def difference(mine: dict, theirs: dict) -> str:
    """Say what of two runs' settings differs; empty if nothing does."""
    changed = [
        f"{key}={_value(key, mine)} where it has {_value(key, theirs)}"
        for key in sorted((mine.keys() | theirs.keys()) - {HELD_OUT})
        if mine.get(key) != theirs.get(key)
    ]
    return "; ".join(changed[:3]) + (" and more" if len(changed) > 3 else "")


def _value(key: str, flat: dict) -> str:
    """Return a setting, as an error shows it."""
    value = flat.get(key)
    return f"checksum {value}"[:29] if key.startswith("data.") else repr(value)


def claim(config) -> None:
    """Write the settings into the run folder, or find that they are those in it.

    A folder without a checkpoint belongs to nobody yet: a run that failed at its start
    does not pin what it was given.
    """
    folder = Path(config.dump_folder)
    path, mine = folder / SETTINGS, settings(config)
    check_folder("--dump-folder", folder)
    begun = last_step(folder) > 0
    if path.exists() and begun:
        theirs = read(path)
        if what := difference(mine, theirs):
            raise UserError(
                f"got {what}, expected the settings and data of the run in {folder}: "
                "give these to resume it, or another --dump-folder to start a new one"
                + _longer(config, theirs)
            )
    elif begun:
        raise UserError(
            f"got {folder}, which holds checkpoints but no settings.json, expected a "
            "run of ours or a new folder"
        )
    elif os.environ["RANK"] == "0":
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, mine | {HELD_OUT: str(held_out_folder(config))})


def _longer(config, theirs: dict) -> str:
    """Say how a run is continued to another last step than its schedule's."""
    steps, total = config.training.steps, theirs.get("schedule_steps")
    if config.lr_scheduler.total_steps is not None or steps == total:
        return ""
    return (
        f". To train it to step {steps} by its schedule of {total} steps, after which "
        f"the learning rate stays constant: --training.steps {steps} "
        f"--lr-scheduler.total-steps {total}"
    )


def read(path: Path) -> dict[str, Any]:
    """Return the settings that ``claim`` wrote, to be compared with others."""
    return read_json(path, dict[str, Any], AGAIN)


@dataclass(frozen=True)
class Described:
    """What of its settings others go by who use a run's model."""

    shape: Annotated[
        Shape, Field(validation_alias=AliasPath("model_spec.model", "shape"))
    ]
    tokenizer: Annotated[Literal[*TOKENIZERS], Field(validation_alias="tokenizer.name")]
    window: Annotated[PositiveInt, Field(validation_alias="training.seq_len")]
    data: Annotated[str, Field(validation_alias="data.val")] = ""
    held_out: Annotated[str | None, Field(validation_alias=HELD_OUT)] = None


def describe(folder: Path) -> Described:
    """Return what the settings in ``folder`` say, checked."""
    return read_json(folder / SETTINGS, Described, AGAIN, extra="ignore")
