"""Checkpoints of strangers: nothing that they name is run, whoever reads them."""

from __future__ import annotations

import io
import pickle
import pickletools
import shutil
import time
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex

from tests.processes import spawn
from train.errors import UserError
from train.files import INDEX
from train.runs.safe_dcp import INDEX_TYPES, UnreadableCheckpoint, load, read_index


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def alone(move, *args, **options):
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        return move(*args, no_dist=True, **options)


def objects() -> dict:
    """Everything that a training keeps beside tensors."""
    return {
        "rates": {"lr": 0.1, "betas": (0.9, 0.99), "amsgrad": False, "none": None},
        "step": 7,
        "names": ["a", "b"],
        "raw": b"bytes of a data loader",
        "x": torch.arange(6.0).view(2, 3),
        "half": torch.ones(3, dtype=torch.bfloat16),
    }


@pytest.fixture
def saved(tmp_path):
    folder = tmp_path / "saved"
    alone(dcp.save, objects(), checkpoint_id=folder)
    return folder


def blank() -> dict:
    return {
        "rates": {"lr": 0.0, "betas": (0.0, 0.0), "amsgrad": True, "none": 0},
        "step": 0,
        "names": ["", ""],
        "raw": b"",
        "x": torch.zeros(2, 3),
        "half": torch.zeros(3, dtype=torch.bfloat16),
    }


def test_what_a_training_keeps_comes_back(saved):
    state, expected = blank(), objects()
    alone(load, state, saved)
    for name in ("x", "half"):
        assert torch.equal(state.pop(name), expected.pop(name))
    assert state == expected


def test_the_list_of_types_is_no_longer_than_it_has_to_be(saved):
    """Each is in an index that DCP writes."""
    names = set()
    strings: list[str] = []
    for opcode, argument, _ in pickletools.genops((saved / ".metadata").read_bytes()):
        if opcode.name in ("SHORT_BINUNICODE", "BINUNICODE"):
            strings.append(argument)
        elif opcode.name == "GLOBAL":
            names.add(tuple(argument.split(" ")))
    found = set(strings) | {part for pair in names for part in pair}
    for module, name in INDEX_TYPES:
        assert module in found, module
        assert name in found, name


def test_an_index_runs_nothing(saved, tmp_path):
    mark = tmp_path / "mark"
    (saved / ".metadata").write_bytes(pickle.dumps(Touch(mark)))
    pickle.loads((saved / ".metadata").read_bytes())
    assert mark.exists(), "the payload works"
    mark.unlink()
    for read in (read_index, lambda path: alone(load, blank(), path)):
        with pytest.raises(UnreadableCheckpoint, match="it names pathlib.Path.touch"):
            read(saved)
    assert not mark.exists()


GADGETS = [
    ("os", "system"),
    ("builtins", "eval"),
    ("torch", "load"),
    ("torch", "hub.load"),
    ("torch.serialization", "load"),
    ("torch.distributed.checkpoint.metadata", "os.system"),
    ("pathlib", "Path"),
    ("functools", "partial"),
    ("torch._dynamo.bytecode_analysis", "stacksize_analysis"),
]


@pytest.mark.parametrize("gadget", GADGETS, ids=".".join)
def test_nothing_else_can_be_named(saved, gadget):
    """By STACK_GLOBAL, whose names may have dots."""
    module, name = gadget
    raw = b"\x80\x04"
    for text in (module, name):
        raw += b"\x8c" + bytes([len(text)]) + text.encode()
    (saved / ".metadata").write_bytes(raw + b"\x93.")
    with pytest.raises(UnreadableCheckpoint, match=f"it names {module}.{name}"):
        read_index(saved)


def test_no_type_is_changed(saved):
    """BUILD with a state for slots sets attributes of whatever it is given."""
    whole = (saved / ".metadata").read_bytes()
    for module, name in (
        ("pathlib", "PosixPath"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
    ):
        spliced = b"c" + f"{module}\n{name}\n".encode()
        spliced += b"(N}X\x06\x00\x00\x00existsctorch\nSize\nstb0"
        (saved / ".metadata").write_bytes(whole[:-1] + spliced + b".")
        with pytest.raises(UnreadableCheckpoint, match="it changes <"):
            read_index(saved)
    assert Path("/").exists() is True


def test_an_index_of_another_python_is_read(saved):
    raw = (saved / ".metadata").read_bytes()
    old, new = b"\x8c\x07pathlib", b"\x8c\x0epathlib._local"
    if old not in raw:  # Python 3.13 and later
        old, new = new, old
    # the frame grows by what the name grows by
    frame = raw.index(b"\x95")
    size = int.from_bytes(raw[frame + 1 : frame + 9], "little") + len(new) - len(old)
    raw = raw[: frame + 1] + size.to_bytes(8, "little") + raw[frame + 9 :]
    (saved / ".metadata").write_bytes(raw.replace(old, new))
    assert read_index(saved).state_dict_metadata.keys() >= {"x", "step"}


def test_an_object_runs_nothing(tmp_path):
    mark, folder = tmp_path / "mark", tmp_path / "saved"
    alone(dcp.save, {"state": Touch(mark)}, checkpoint_id=folder)
    alone(dcp.load, {"state": None}, checkpoint_id=folder)
    assert mark.exists(), "the payload works"
    mark.unlink()
    with pytest.raises(UnreadableCheckpoint, match="got state in .*it names getattr"):
        alone(load, {"state": None}, folder)
    assert not mark.exists()


def test_a_run_loads_by_this_reader(tmp_path):
    """torchtitan's manager would load objects by DCP's own."""
    from train.engine.titan_checkpoint import RunCheckpoints

    mark, folder = tmp_path / "mark", tmp_path / "saved"
    alone(dcp.save, {"state": Touch(mark)}, checkpoint_id=folder)
    manager = object.__new__(RunCheckpoints)  # without a trainer
    manager.states = {}
    with (
        warnings.catch_warnings(action="ignore", category=UserWarning),
        pytest.raises(UnreadableCheckpoint, match="got state in .*it names getattr"),
    ):
        manager.dcp_load({"state": None}, str(folder), False, False)
    assert not mark.exists()


def altered(index, change):
    change(index)
    return pickle.dumps(index)


def lead_outside(index):
    for place in index.storage_data.values():
        place.relative_path = f"../{place.relative_path}"


def lead_away(index):
    for place in index.storage_data.values():
        place.relative_path = "/etc/passwd"


def of_other_types(index):
    index.state_dict_metadata = ["x"]


def with_other_entries(index):
    index.state_dict_metadata["x"] = torch.Size([2])


def with_other_places(index):
    index.storage_data[MetadataIndex("x")] = "__0_0.distcp"


def with_negative_places(index):
    for place in index.storage_data.values():
        place.offset = -1


def without_parts(index):
    index.state_dict_metadata["x"].chunks = []


def without_a_place(index):
    del index.storage_data[MetadataIndex("step")]


def outside_its_size(index):
    index.state_dict_metadata["x"].chunks[0].offsets = torch.Size([1, 0])


def without_an_attribute(index):
    del index.storage_data[MetadataIndex("step")].offset


INCOMPLETE = {
    without_parts: "parts of x are missing",
    without_a_place: "parts of step are missing",
    outside_its_size: "parts of x are missing",
    without_an_attribute: "does not read as a checkpoint's index",
}


@pytest.mark.parametrize("change", INCOMPLETE)
def test_an_index_that_leaves_out_parts_is_refused(saved, change):
    raw = altered(read_index(saved), change)
    (saved / ".metadata").write_bytes(raw)
    with pytest.raises(UnreadableCheckpoint, match=INCOMPLETE[change]):
        alone(load, blank(), saved)


@pytest.mark.parametrize(
    "change",
    [lead_outside, lead_away, of_other_types, with_other_entries, with_other_places,
     with_negative_places],
)  # fmt: skip
def test_an_index_of_something_else_is_refused(saved, change):
    raw = altered(read_index(saved), change)
    (saved / ".metadata").write_bytes(raw)
    with pytest.raises(UnreadableCheckpoint, match="without a checkpoint's index"):
        alone(load, blank(), saved)


def test_damage_is_told_in_one_line(saved, tmp_path):
    whole = (saved / ".metadata").read_bytes()
    seeded = torch.Generator().manual_seed(0)
    refused = 0
    for at in torch.randint(len(whole), (60,), generator=seeded).tolist():
        flipped = bytearray(whole)
        flipped[at] ^= 1 << at % 8
        (saved / ".metadata").write_bytes(flipped)
        try:
            alone(load, blank(), saved)
        except UnreadableCheckpoint as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 20
    (saved / ".metadata").write_bytes(whole)
    (data,) = saved.glob("*.distcp")
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    with pytest.raises(UnreadableCheckpoint, match="rank 0 cannot read its part"):
        alone(load, blank(), saved)
    shutil.rmtree(saved)
    with pytest.raises(OSError):
        read_index(saved)


HEAD = b"\x80\x04"
# a tuple of a tuple twice, and so on: written out, no memory holds it
DOUBLED = b"K\x01" + b"".join(b"\x94h%c\x86" % at for at in range(60))
COSTLY = {
    "printed": HEAD + DOUBLED + b"}b.",
    "hashed": HEAD + b"}" + DOUBLED + b"Ns.",
    "in a set": HEAD + b"\x8f(" + DOUBLED + b"\x90.",
    "bytes that are not there": HEAD + b"\x96" + (1 << 45).to_bytes(8, "little") + b".",
    "text that is not there": HEAD + b"\x8d" + (1 << 45).to_bytes(8, "little") + b".",
    "grown later": HEAD + b"]\x94h\x00\x86\x94h\x01\x860h\x00K\x01a.",
}


@pytest.mark.parametrize("what", COSTLY)
def test_a_small_index_costs_little(saved, what):
    (saved / ".metadata").write_bytes(COSTLY[what])
    began = time.monotonic()
    with pytest.raises(UnreadableCheckpoint) as refused:
        read_index(saved)
    assert time.monotonic() - began < 5
    assert len(str(refused.value)) < 1000


def test_an_index_has_a_limit(saved):
    with (saved / ".metadata").open("r+b") as file:
        file.truncate(INDEX + 1)
    with pytest.raises(UserError, match="expected (at most|as many)"):
        read_index(saved)


def test_a_packed_tensor_is_refused(saved):
    """Zeros of a gigabyte are a megabyte, packed."""
    plain, packed = io.BytesIO(), io.BytesIO()
    torch.save(torch.zeros(2, 3), plain)
    with zipfile.ZipFile(plain) as parts, zipfile.ZipFile(packed, "w", 8) as out:
        for part in parts.infolist():
            raw = parts.read(part)
            out.writestr(part.filename, raw + bytes(4096) if "/data/" in part.filename
                         else raw)  # fmt: skip
    index = read_index(saved)
    (place,) = [p for at, p in index.storage_data.items() if at.fqn == "x"]
    (saved / "packed").write_bytes(packed.getvalue())
    place.relative_path, place.offset = "packed", 0
    place.length = len(packed.getvalue())
    (saved / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(UnreadableCheckpoint, match="it is packed"):
        alone(load, blank(), saved)


def loading(rank, world, folder):
    """What a rank sees of a checkpoint that rank 1 cannot read."""
    mine = Path(folder) if rank == 0 else Path(folder) / "elsewhere"
    with warnings.catch_warnings(action="ignore"):
        try:
            load(blank(), mine)
        except UnreadableCheckpoint as error:
            return str(error)
    return "loaded"


@pytest.mark.processes
def test_all_ranks_hear_of_one_that_cannot_read(saved):
    """None leaves while others wait."""
    shutil.copytree(saved, saved.parent / "copy")
    shutil.move(saved.parent / "copy", saved / "elsewhere")
    (saved / "elsewhere" / ".metadata").write_bytes(b"x")
    for said in spawn(loading, 2, str(saved)):
        assert "of which rank 1 cannot read its part" in said
