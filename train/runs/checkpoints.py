"""A run's checkpoints, read without torchtitan's trainer and in one process."""

import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from train.errors import UserError
from train.gpt2 import GPT2, Shape, tensor_sizes

STEP = re.compile("step-(0|[1-9][0-9]*)")


def step_folders(checkpoints: Path) -> dict[int, Path]:
    """Return the folders of a run's checkpoints by step, ascending, complete or not.

    Whatever has another name, such as a copy ``step-20.bak``, is the user's.
    """
    if not checkpoints.is_dir():
        return {}
    named = {path: STEP.fullmatch(path.name) for path in checkpoints.iterdir()}
    found = {int(m[1]): path for path, m in named.items() if m and path.is_dir()}
    return dict(sorted(found.items()))


def complete_steps(checkpoints: Path) -> list[int]:
    """Return the steps of the complete checkpoints, ascending."""
    found = step_folders(checkpoints)
    return [step for step, path in found.items() if (path / ".metadata").is_file()]


def steps(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints of the run in ``folder``."""
    return complete_steps(folder / "checkpoint")


def last_step(folder: Path) -> int:
    """Return the step of the newest complete checkpoint, 0 if there is none."""
    return max(steps(folder), default=0)


def checkpoint(folder: Path, step: int | None = None) -> Path:
    """Return where the checkpoint of ``step``, or the newest, of a run lies."""
    complete = steps(folder)
    if step is None and not complete:
        raise UserError(
            f"got {folder} without a complete checkpoint, expected a run: python -m "
            "train --config NAME"
        )
    step = complete[-1] if step is None else step
    path = folder / "checkpoint" / f"step-{step}"
    if step not in complete:
        cut_off = f"{path}, which has no .metadata: its saving was cut off"
        what = cut_off if path.exists() else f"--step {step}"
        raise UserError(
            f"got {what}, expected one of the complete checkpoints {complete} of "
            f"{folder}: choose one of them"
        )
    return path


def check_weights(path: Path, shape: Shape, *, whole: bool = False) -> None:
    """Check that the checkpoint in ``path`` holds all weights of a model of this shape,
    by what it says of itself and by the sizes of its files; ``whole``: and all else
    that it speaks of.
    """
    metadata, sizes = _read_metadata(path), tensor_sizes(shape)
    saved = metadata.state_dict_metadata
    layers = {name for name in saved if name.startswith("layers.")}
    for name in sorted(sizes.keys() | layers):
        size = tuple(saved[name].size) if name in saved else None
        if size != sizes.get(name):
            raise UserError(
                f"got a checkpoint {path} with {name} of shape {size}, expected "
                f"{sizes.get(name)}: it is of another model; name the configuration "
                "that trained it"
            )
    for index, stored in metadata.storage_data.items():
        file = path / stored.relative_path
        if not whole and index.fqn not in sizes:
            continue
        if not file.exists() or file.stat().st_size < stored.offset + stored.length:
            raise UserError(
                f"got a checkpoint {path} whose {file.name} is missing or shorter than "
                "its .metadata says, expected all files: copy it whole, or choose "
                "another step"
            )


def _read_metadata(path: Path) -> Metadata:
    if not (path / ".metadata").is_file():
        raise UserError(
            f"got {path} without .metadata, expected the folder of a complete "
            "checkpoint, e.g. runs/NAME/checkpoint/step-N: choose one"
        )
    try:
        return dcp.FileSystemReader(path).read_metadata()
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError) as error:
        raise UserError(
            f"got a {path / '.metadata'} that does not read ({error}), expected what "
            "a run wrote: choose another checkpoint"
        ) from error


def load_model(folder: Path, shape: Shape, step: int | None = None) -> GPT2:
    """Return the model of the checkpoint of ``step``, or the newest, of a run on any
    number of ranks.
    """
    path = checkpoint(folder, step)
    check_weights(path, shape)
    model = GPT2(shape)
    state = model.state_dict()
    _alone(dcp.load, state, path)
    model.load_state_dict(state)
    return model.eval()


def save_model(model: GPT2, path: Path) -> None:
    """Write the weights as a checkpoint that a run can start from."""
    _alone(dcp.save, model.state_dict(), path)


def _alone(move: Callable, state: dict, path: Path) -> None:
    """Load or save in one process, without the warning that it is one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        move(state, checkpoint_id=path, no_dist=True)
