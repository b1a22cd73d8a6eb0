"""A run's checkpoints, read without torchtitan's trainer and in one process."""

import re
import shlex
import warnings
from contextlib import suppress
from os.path import lexists
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from marsopt.rules.formats import LOW_BITS, joined
from train.errors import UserError
from train.files import remove_folder
from train.gpt2 import GPT2, Shape, tensor_sizes
from train.runs import checksums
from train.runs.checksums import SUMS
from train.runs.safe_dcp import load, read_index

INDEX = ".metadata"
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
    """Return the steps of the checkpoints whose saving was completed, ascending.

    A folder with checksums, which are written last, but without an index has lost it.
    That is damage, which whoever reads the checkpoint will find, unless a newer one is
    complete: then its deletion was cut off.
    """
    found = step_folders(checkpoints)
    indexed = [step for step, path in found.items() if lexists(path / INDEX)]
    newest = max(indexed, default=-1)
    summed = [step for step, path in found.items() if lexists(path / SUMS)]
    return indexed + [step for step in summed if step > newest]


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
        raise UserError(
            f"got --step {step}, expected one of the complete checkpoints {complete} "
            f"of {folder}: choose one of them"
        )
    return path


def check(path: Path, shape: Shape, *, whole: bool = False) -> None:
    """Check that the checkpoint in ``path`` holds all weights of a model of this shape,
    undamaged, and names no code; ``whole``: and all else that it speaks of.
    """
    index, sizes = _read_index(path), tensor_sizes(shape)
    saved = index.state_dict_metadata
    sizes |= {n: sizes[name] for name in sizes for n in _low_bits(name) if n in saved}
    layers = {name for name in saved if name.startswith("layers.")}
    for name in sorted(sizes.keys() | layers):
        size = tuple(getattr(saved.get(name), "size", ())) or None
        if size != sizes.get(name):
            raise UserError(
                f"got a checkpoint {path} with {name} of shape {size}, expected "
                f"{sizes.get(name)}: it is of another model; name the configuration "
                "that trained it"
            )
    ends: dict[str, int] = {}  # of each file, where the last part of it ends
    for entry, stored in index.storage_data.items():
        if whole or entry.fqn in sizes:
            end = stored.offset + stored.length
            ends[stored.relative_path] = max(end, ends.get(stored.relative_path, 0))
    for name, end in ends.items():
        file = path / name
        if not file.is_file() or file.stat().st_size < end:
            raise UserError(
                f"got a checkpoint {path} whose {file.name} is missing or shorter than "
                "its .metadata says, expected all files: copy it whole, or choose "
                "another step"
            )
    checksums.verify(path, {INDEX, *ends})


def check_own(folder: Path, shape: Shape) -> None:
    """Check the checkpoint from which the run in ``folder`` continues, if there is one;
    where it is damaged, say how to continue without it.
    """
    if newest := last_step(folder):
        try:
            check(folder / "checkpoint" / f"step-{newest}", shape, whole=True)
        except UserError as error:
            raise UserError(f"{error}. {instead(folder, shape)}") from error


def instead(folder: Path, shape: Shape) -> str:
    """Say how a run goes on whose newest checkpoint is damaged: from which other."""
    *older, newest = steps(folder)
    path = folder / "checkpoint" / f"step-{newest}"
    start = "no other step is whole; to start anew"
    for step in reversed(older):
        with suppress(UserError):
            check(path.with_name(f"step-{step}"), shape, whole=True)
            start = f"step {step} is whole; to resume from it"
            break
    aside = shlex.join(["mv", str(path), f"{path}.damaged"])
    return f"Of this run {start}: {aside}, then the same command again"


def _read_index(path: Path) -> Metadata:
    if not (path / INDEX).is_file():
        raise UserError(
            f"got {path} without {INDEX}, expected the folder of a complete "
            "checkpoint, e.g. runs/NAME/checkpoint/step-N: copy it whole, or choose "
            "another"
        )
    return read_index(path)


def delete(path: Path) -> None:
    """Delete a checkpoint so that what a kill leaves of it is whole, or cut off."""
    for part in () if path.is_symlink() else (path / SUMS, path / INDEX):
        part.unlink(missing_ok=True)
    remove_folder(path)


def _low_bits(name: str) -> list[str]:
    """Return the entries of the bits below a bfloat16 weight, if a run has them."""
    return [f"optimizer.state.{name}.{symbol}" for symbol in LOW_BITS]


def load_model(folder: Path, shape: Shape, step: int | None = None) -> GPT2:
    """Return the model of the checkpoint of ``step``, or the newest, of a run on any
    number of ranks, which was checked: its weights, not the parameters that these were
    rounded to.
    """
    path = checkpoint(folder, step)
    model = GPT2(shape)
    state, saved = model.state_dict(), read_index(path).state_dict_metadata
    low = {
        n: torch.empty(saved[n].size, dtype=saved[n].properties.dtype)
        for name in state
        for n in _low_bits(name)
        if n in saved
    }
    with _alone():
        load(state | low, path, no_dist=True)
    for name in state:
        if bits := [low[n] for n in _low_bits(name) if n in low]:
            state[name] = joined(state[name].to(torch.bfloat16), bits)
    model.load_state_dict(state)
    return model.eval()


def save_model(model: GPT2, path: Path) -> None:
    """Write the weights as a checkpoint that a run can start from."""
    with _alone():
        dcp.save(model.state_dict(), checkpoint_id=path, no_dist=True)


def _alone() -> warnings.catch_warnings:
    """Leave out DCP's warning that this is one process."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)
