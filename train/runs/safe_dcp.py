"""Checkpoints of torch.distributed.checkpoint (DCP), read without running code.

DCP keeps a checkpoint's index as a pickle (``.metadata``) and objects that are no
tensors as files of torch.save that it reads with ``weights_only=False``: either runs
whatever a stranger put there. Here an unpickler that knows the types of an index reads
the index, and ``weights_only=True`` reads objects.
"""

from __future__ import annotations

import io
import os
import pickle
import warnings
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from train.errors import UserError

# the types that have attributes in an index
ENTRIES = (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    _StorageInfo,
)
# all names in an index, beside dtypes and paths (torch 2.11 to 2.14)
INDEX_TYPES = frozenset(
    [("torch", "Size"), ("torch.serialization", "_get_layout")]
    + [(Metadata.__module__, "_MEM_FORMAT_ENCODING")]
    + [(kind.__module__, kind.__name__) for kind in ENTRIES]
)
NOTHING_RAN = (
    "it is damaged, or made by somebody else; nothing of it was run; choose another "
    "checkpoint"
)


class UnreadableCheckpoint(UserError):
    """A checkpoint that is damaged, or that names something it must not."""


# pickle's own in Python: its C twin cannot be told what may be changed
class _IndexUnpickler(pickle._Unpickler):
    dispatch = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        if name in ("PosixPath", "PurePosixPath") and module.startswith("pathlib"):
            return PurePosixPath  # Python 3.13 has another name for their module
        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if (module, name) not in INDEX_TYPES and not is_dtype:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)

    def load_build(self) -> None:
        """Set attributes of the entries of an index, never of types or functions."""
        if not isinstance(self.stack[-2], ENTRIES):
            raise pickle.UnpicklingError(f"it changes {self.stack[-2]!r:.60}")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build


def read_index(path: str | os.PathLike) -> Metadata:
    """Return what the checkpoint folder ``path`` says of itself in ``.metadata``.

    Raises:
        UnreadableCheckpoint: it names something that no checkpoint holds, lists files
            outside its folder, lacks parts of a tensor, or does not read.
        OSError: there is no such file, or it may not be read.
    """
    where = Path(path) / ".metadata"
    raw = where.read_bytes()
    try:
        index = _IndexUnpickler(io.BytesIO(raw)).load()
        _check(index)
    except Exception as error:  # damaged bytes may call any type with anything
        raise UnreadableCheckpoint(
            f"got a {where} that does not read as a checkpoint's index ({error!s:.99}),"
            f" expected sizes and places of tensors alone: {NOTHING_RAN}"
        ) from error
    return index


def _check(index: Metadata) -> None:
    for place in index.storage_data.values():
        if PurePosixPath(place.relative_path).name != place.relative_path:
            raise ValueError(f"it names the file {place.relative_path}")
    for name, entry in index.state_dict_metadata.items():
        # DCP would leave the rest of the tensor as it is.
        if isinstance(entry, TensorStorageMetadata):
            parts = sum(chunk.sizes.numel() for chunk in entry.chunks)
            if parts != entry.size.numel():
                raise ValueError(f"parts of {name} are missing")


class SafeReader(FileSystemReader):
    """DCP's reader of a folder, with an index by ``read_index``."""

    index: Metadata | None = None
    """Read before."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        index = read_index(self.path) if self.index is None else self.index
        index.storage_meta = index.storage_meta or StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index


class SafePlanner(DefaultLoadPlanner):
    """DCP's planner, which loads objects that are no tensors by ``torch.load(...,
    weights_only=True)``: numbers, strings, lists, dicts, tensors.
    """

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        try:
            with warnings.catch_warnings(action="ignore"):
                loaded = torch.load(value, weights_only=True, map_location="cpu")
        except Exception as error:  # damaged bytes raise anything
            raise UnreadableCheckpoint(
                f"got {read_item.storage_index.fqn} in a checkpoint that does not load "
                f"with weights_only=True ({type(error).__name__}), expected numbers, "
                f"strings and tensors alone: {NOTHING_RAN}"
            ) from error
        name = read_item.dest_index.fqn
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded


def load(
    state_dict: dict[str, Any], path: str | os.PathLike, *, no_dist: bool = False
) -> None:
    """Load the checkpoint folder ``path`` into ``state_dict`` as ``dcp.load`` does, and
    run no code that it names.

    Args:
        state_dict: of tensors (also DTensors), numbers and objects with a state dict,
            changed in place.
        path: a folder, e.g. ``checkpoint/step-100``.
        no_dist: in this process alone.

    Raises:
        UnreadableCheckpoint: on all ranks, if one of them could not read its part; see
            ``read_index``. What was loaded until then is in ``state_dict``.
    """
    reader = SafeReader(path)
    if no_dist or not dist.is_initialized():
        # DCP's call would log a traceback and look elsewhere. Of several ranks none may
        # leave before the others.
        reader.index = read_index(path)
    options = dict(storage_reader=reader, planner=SafePlanner())
    try:
        dcp.load(state_dict, **options, no_dist=no_dist)
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
        if isinstance(cause, UnreadableCheckpoint | KeyboardInterrupt):
            raise cause from error
        why = (str(cause) or type(cause).__name__).strip().splitlines()[0]
        raise UnreadableCheckpoint(
            f"got {path}, of which rank {rank} cannot read its part ({why}), expected "
            "what DCP wrote for this model: it is damaged, or of another model; choose "
            "another checkpoint"
        ) from error
