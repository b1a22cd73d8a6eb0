"""Checkpoints of torch.distributed.checkpoint (DCP), read without running code.

DCP keeps a checkpoint's index as a pickle (``.metadata``) and objects that are no
tensors as files of torch.save that it reads with ``weights_only=False``: either runs
whatever a stranger put there. Here both are read by unpicklers that know the types of a
checkpoint and nothing else.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import IO, Any

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
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from train.errors import UserError
from train.files import INDEX, OBJECT, read
from train.runs.pickles import check_cost, names

Entry = TensorStorageMetadata | BytesStorageMetadata
# what has attributes in an index
ENTRIES = (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
    _StorageInfo,
)
# all that an index names, beside dtypes and paths (torch 2.11 to 2.13)
INDEX_TYPES = frozenset(
    [("torch", "Size"), ("torch.serialization", "_get_layout")]
    + [(Metadata.__module__, "_MEM_FORMAT_ENCODING")]
    + [(kind.__module__, kind.__name__) for kind in (*ENTRIES, TensorProperties)]
)


# what numbers, strings and tensors name in a file of torch.save
SAVED = re.compile(
    r"_codecs\.encode|collections\.OrderedDict|set|complex|torch\.(Size|device|"
    r"_utils\._rebuild_(tensor_v[23]|parameter)|serialization\._get_layout|"
    r"storage\.UntypedStorage|[A-Z][A-Za-z0-9]+Storage|[a-z]+[0-9a-z_]*)"
)
CHOOSE = "a checkpoint's index: choose another checkpoint"


class UnreadableCheckpoint(UserError):
    """A checkpoint that is damaged, or that names something it must not."""


# pickle's own in Python: its C twin cannot be told what may be changed
class _IndexUnpickler(pickle._Unpickler):
    dispatch = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        if name in ("PosixPath", "PurePosixPath") and module in (
            "pathlib",
            "pathlib._local",
        ):
            return PurePosixPath  # Python 3.13 has another name for their module
        known = (module, name) in INDEX_TYPES
        if not known and module == "torch":
            known = isinstance(vars(torch).get(name), torch.dtype)
        if not known:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)

    def load_build(self) -> None:
        """Set attributes of the entries of an index, never of types or functions."""
        target, state = self.stack[-2], self.stack[-1]
        own = isinstance(target, TensorProperties)  # which has a __setstate__
        if not own and not (isinstance(target, ENTRIES) and isinstance(state, dict)):
            what = type(target).__name__ if own else f"{target!r:.60}"
            raise pickle.UnpicklingError(f"it changes {what}")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build


def read_index(path: str | os.PathLike) -> Metadata:
    """Return what the checkpoint folder ``path`` says of itself in ``.metadata``.

    Raises:
        UnreadableCheckpoint: it names something that no checkpoint holds, lists files
            outside its folder, or does not read.
        OSError: there is no such file, or it may not be read.
    """
    return _parse(path, read(Path(path) / ".metadata", CHOOSE, INDEX))


def _parse(path: str | os.PathLike, raw: bytes) -> Metadata:
    where = os.path.join(path, ".metadata")
    try:
        if len(raw) > INDEX:
            raise pickle.UnpicklingError(f"more than {INDEX:,} bytes")
        check_cost(raw)
        index = _IndexUnpickler(io.BytesIO(raw)).load()
        found = _is_index(index)
        entries = index.state_dict_metadata.items() if found else ()
        torn = [n for n, e in entries if not _is_complete(n, e, index.storage_data)]
    except Exception as error:  # damaged bytes may call any type with anything
        raise UnreadableCheckpoint(
            f"got a {where} that does not read as a checkpoint's index ({error!s:.99}),"
            " expected sizes and places of tensors alone: it is damaged, or made by "
            "somebody else; nothing of it was run; choose another checkpoint"
        ) from error
    if not found:
        raise UnreadableCheckpoint(
            f"got a {where} without a checkpoint's index, or with files outside its "
            "folder, expected what DCP wrote: choose another checkpoint"
        )
    if torn:
        raise UnreadableCheckpoint(
            f"got a {where} in which parts of {torn[0]:.99} are missing, expected all "
            "of it: DCP would leave the rest as it is; choose another checkpoint"
        )
    return index


def _is_index(index: object) -> bool:
    return (
        isinstance(index, Metadata)
        and _maps(index.state_dict_metadata, str, _is_entry)
        and _maps(index.storage_data, MetadataIndex, _is_place)
    )


def _maps(found: object, key: type, is_value) -> bool:
    return isinstance(found, dict) and all(
        isinstance(k, key) and is_value(v) for k, v in found.items()
    )


def _is_entry(entry: object) -> bool:
    if isinstance(entry, TensorStorageMetadata):
        return isinstance(entry.size, torch.Size) and all(
            isinstance(c, ChunkStorageMetadata)
            and isinstance(c.offsets, torch.Size)
            and isinstance(c.sizes, torch.Size)
            for c in entry.chunks
        )
    return isinstance(entry, BytesStorageMetadata)


def _fits(offset: int, size: int, whole: int) -> bool:
    return 0 <= offset <= offset + size <= whole


def _is_complete(name: str, entry: Entry, places: Mapping) -> bool:
    """Whether all of a tensor or object has its place in the files; DCP's planner does
    not ask.
    """
    if isinstance(entry, BytesStorageMetadata):
        return MetadataIndex(name) in places
    parts = {tuple(c.offsets): tuple(c.sizes) for c in entry.chunks if c.sizes.numel()}
    inside = all(
        len(offsets) == len(sizes) == len(entry.size)
        and all(map(_fits, offsets, sizes, entry.size))
        for offsets, sizes in parts.items()
    )
    whole = sum(map(math.prod, parts.values())) == math.prod(entry.size)
    return inside and whole and all(MetadataIndex(name, o) in places for o in parts)


def _is_place(place: object) -> bool:
    if not isinstance(place, _StorageInfo) or not isinstance(place.relative_path, str):
        return False
    numbers = place.offset, place.length
    parts = PurePosixPath(place.relative_path).parts
    return (
        not place.transform_descriptors  # packed: torchtitan packs nothing
        and len(parts) == 1
        and parts[0] not in ("..", "/")
        and all(type(n) is int and n >= 0 for n in numbers)
    )


class SafeReader(FileSystemReader):
    """DCP's reader of a folder, which reads the index as ``read_index`` does."""

    index: Metadata | None = None
    """What was read before."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        index = self.index
        if index is None:
            path = self._get_metadata_path(kwargs.get("rank"))
            with self.fs.create_stream(path, "rb") as file:
                index = _parse(self.path, file.read(INDEX + 1))
        index.storage_meta = index.storage_meta or StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            place, name = self.storage_data[item.storage_index], item.storage_index.fqn
            path = self.fs.concat_path(self.path, place.relative_path)
            with self.fs.create_stream(path, "rb") as file:
                _check_saved(name, _Slice(file, place), place.length)
        return super().read_data(plan, planner)


class _Slice(io.RawIOBase):
    """A part of a file; DCP's own cannot be asked for its end."""

    def __init__(self, file: IO[bytes], place: _StorageInfo) -> None:
        self._file, self._start, self._size = file, place.offset, place.length
        self.seek(0)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        begin = {os.SEEK_CUR: self.tell(), os.SEEK_END: self._size}.get(whence, 0)
        return self._file.seek(self._start + begin + offset) - self._start

    def tell(self) -> int:
        return self._file.tell() - self._start

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        left = self._size - self.tell()
        return self._file.read(left if size < 0 else min(size, left))


def _check_saved(name: str, file: _Slice, length: int) -> None:
    """Check what torch.save wrote of one tensor or object: nothing in it is packed, or
    makes more of itself than it is.
    """
    try:
        with zipfile.ZipFile(file) as parts:
            held = parts.infolist()
            if sum(part.file_size for part in held) > length:
                raise pickle.UnpicklingError("it is packed")
            for part in held:
                if part.filename.endswith(".pkl"):
                    _check_pickle(parts.read(part))
    except (pickle.UnpicklingError, ValueError, LookupError) as error:
        raise UnreadableCheckpoint(
            f"got {name:.99} in a checkpoint that does not load with weights_only=True "
            f"({error!s:.200}), expected numbers, strings and tensors alone: it is "
            "damaged, or made by somebody else; nothing of it was run; choose another "
            "checkpoint"
        ) from error


def _check_pickle(raw: bytes) -> None:
    if len(raw) > OBJECT:
        raise pickle.UnpicklingError(f"more than {OBJECT:,} bytes")
    check_cost(raw)
    for name in names(raw):
        if not SAVED.fullmatch(name) and name not in _declared_safe():
            raise pickle.UnpicklingError(f"it names {name}")


def _declared_safe() -> set[str]:
    """Return what add_safe_globals was told: the states of rules, for one."""
    return {
        entry[1] if isinstance(entry, tuple) else f"{entry.__module__}.{entry.__name__}"
        for entry in torch.serialization.get_safe_globals()
    }


class SafePlanner(DefaultLoadPlanner):
    """DCP's planner, which loads objects that are no tensors by ``torch.load(...,
    weights_only=True)``: numbers, strings, lists, dicts, tensors.
    """

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        try:
            with warnings.catch_warnings(action="ignore"):
                loaded = torch.load(value, weights_only=True, map_location="cpu")
        except Exception as error:  # damaged bytes raise anything
            what = type(error).__name__
            raise UnreadableCheckpoint(
                f"got {read_item.storage_index.fqn} in a checkpoint that does not load "
                f"with weights_only=True ({what}), expected numbers, strings and "
                "tensors alone: it is damaged, or made by somebody else; nothing of "
                "it was run; choose another checkpoint"
            ) from error
        name = read_item.dest_index.fqn
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded


def _reader(path: str | os.PathLike) -> SafeReader:
    """Return a reader of a folder of this machine, or else of what fsspec knows."""
    if SafeReader.validate_checkpoint_id(path):
        return SafeReader(path)
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    class SafeRemoteReader(SafeReader, FsspecReader): ...

    return SafeRemoteReader(path)


def load(
    state_dict: dict[str, Any], path: str | os.PathLike, *, no_dist: bool = False
) -> None:
    """Load the checkpoint folder ``path`` into ``state_dict`` as ``dcp.load`` does, and
    run no code that it names.

    Args:
        state_dict: of tensors (also DTensors), numbers and objects with a state dict,
            changed in place.
        path: a folder, e.g. ``checkpoint/step-100``, or a URI that fsspec knows.
        no_dist: in this process alone.

    Raises:
        UnreadableCheckpoint: on all ranks, where one of them could not read its part;
            see ``read_index``. What was loaded until then is in ``state_dict``.
    """
    reader, alone = _reader(path), no_dist or not dist.is_initialized()
    if alone and (Path(path) / ".metadata").is_file():
        # DCP's own call would log a traceback and look elsewhere; of several ranks none
        # may leave before the others
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
