"""Ranks meet before the first step: all have to be told the same and to see one folder,
and what fails on one ends all with one line.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import torch.distributed as dist

from train.data.tokens import SPLITS
from train.engine.resolve import FOLLOW
from train.engine.titan import dist_utils
from train.errors import UserError
from train.files import write_json
from train.runs.settings import data_checksums, data_folders

T = TypeVar("T")

# Where things lie may differ between machines: data are compared by checksum, the
# run's folder by a file in it. What is profiled may differ from rank to rank.
FREE = (
    "dump_folder", "hf_assets_path", "dataloader.dataset_path",
    "validator.dataloader.dataset_path", "profiler.",
)  # fmt: skip
FIRST = ("recipe", "data.train", "data.val")  # of an error


class SharedError(UserError):
    """What is unusable, in the same words on all ranks."""


def meet(config) -> dist.ProcessGroup:
    """Let all ranks meet, and compare; return the group in which they did.

    Raises:
        SharedError: ranks differ.
    """
    dist_utils.init_distributed(config.comm, base_folder=config.dump_folder)
    timeout = timedelta(seconds=config.comm.init_timeout_seconds)
    group = dist.new_group(backend="gloo", timeout=timeout)
    compare(config, group)
    return group


def compare(config, group: dist.ProcessGroup | None = None) -> None:
    """Check that all ranks have the same recipe, options, data and folder.

    Raises:
        SharedError: ranks differ.
    """
    folder, rank = Path(config.dump_folder), dist.get_rank()
    witness = folder / f"ranks-{uuid4().hex}.json"
    if rank == 0:
        write_json(witness, {"written by rank": 0})
    try:
        ranks = _gather((options(config), _places(config), witness.name), group)
        values, places, names = zip(*ranks, strict=True)
        _check_values(values, places)
        seen = _gather((folder / names[0]).exists(), group)
    finally:
        if rank == 0:
            witness.unlink(missing_ok=True)
    blind = [r for r, sees in enumerate(seen) if not sees]
    if blind:
        raise SharedError(
            f"got --dump-folder {places[blind[0]]['run']} on rank {blind[0]}, where a "
            f"file is missing that rank 0 wrote into {places[0]['run']}, expected one "
            "folder: give all ranks the same --dump-folder, on a disk that all of them "
            "see"
        )


def _check_values(
    values: Sequence[dict[str, Any]], places: Sequence[dict[str, str]]
) -> None:
    rank = next((r for r, value in enumerate(values) if value != values[0]), 0)
    first, other = values[0], values[rank]
    keys = sorted(k for k in first | other if first.get(k) != other.get(k))
    if not keys:
        return

    def shown(key: str, at: int) -> str:
        """Return a value, and where it lies if it is a checksum."""
        place = f" ({places[at][key]})" if key in places[at] else ""
        return f"{values[at].get(key)!r:.60}{place}"

    key = next((key for key in FIRST if key in keys), keys[0])
    more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
    raise SharedError(
        f"got on rank {rank} {key}={shown(key, rank)} where rank 0 has "
        f"{shown(key, 0)}{more}, expected the same on all ranks: start every rank with "
        "the same command and data"
    )


def _gather(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """Return what each rank has."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def together(work: Callable[[], None], group: dist.ProcessGroup | None = None) -> None:
    """Do ``work`` on all ranks; what is unusable to one of them ends all.

    Raises:
        SharedError: why.
    """
    reason = ""
    try:
        work()
    except UserError as error:
        reason = str(error)
    reasons = _gather(reason, group)
    failed = [r for r, why in enumerate(reasons) if why]
    if failed:
        why = reasons[failed[0]]
        alike = reasons.count(why) == len(reasons)
        raise SharedError(why if alike else f"rank {failed[0]}: {why}")


def options(config) -> dict[str, Any]:
    """Return what all ranks have to be told alike: {"section.option": value}."""
    raw = json.loads(json.dumps(config.to_dict(), default=str))
    raw["recipe"] = raw["model_spec"].pop("flavor")
    raw["data"] = data_checksums(config)
    return {
        path: value
        for path, value in _flat(raw, "")
        if path not in FOLLOW and not path.startswith(FREE)
    }


def _places(config) -> dict[str, str]:
    """Return where the run and its data lie."""
    folders = dict(zip(SPLITS, data_folders(config), strict=True))
    places = {f"data.{split}": str(folder) for split, folder in folders.items()}
    return places | {"run": config.dump_folder}


def _flat(values: dict[str, Any], section: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{section}{name}.")
        else:
            yield f"{section}{name}", value
