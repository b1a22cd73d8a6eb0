"""Checkpoints of strangers: nothing that they name is run, whoever reads them."""

from __future__ import annotations

import pickle
import shutil
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.processes import spawn
from train.runs.safe_dcp import UnreadableCheckpoint, load, read_index


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def alone(move, *args, **options):
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        return move(*args, no_dist=True, **options)


def objects(number: int = 7) -> dict:
    """Everything that a training keeps beside tensors."""
    return {
        "rates": {"lr": 0.1 * number, "betas": (0.9, 0.99), "amsgrad": number == 7},
        "step": number,
        "names": ["a", str(number)],
        "raw": b"bytes of a data loader",
        "x": number * torch.arange(6.0).view(2, 3),
        "half": torch.full((3,), number, dtype=torch.bfloat16),
    }


@pytest.fixture
def saved(tmp_path):
    folder = tmp_path / "saved"
    alone(dcp.save, objects(), checkpoint_id=folder)
    return folder


def test_what_a_training_keeps_comes_back(saved):
    state, expected = objects(0), objects()
    alone(load, state, saved)
    for name in ("x", "half"):
        assert torch.equal(state.pop(name), expected.pop(name))
    assert state == expected


def test_an_index_runs_nothing(saved, tmp_path):
    mark = tmp_path / "mark"
    (saved / ".metadata").write_bytes(pickle.dumps(Touch(mark)))
    pickle.loads((saved / ".metadata").read_bytes())
    assert mark.exists(), "the payload works"
    mark.unlink()
    for read in (read_index, lambda path: alone(load, objects(0), path)):
        with pytest.raises(UnreadableCheckpoint, match="it names pathlib.Path.touch"):
            read(saved)
    assert not mark.exists()


HEAD = b"\x80\x04"
GADGETS = (
    "os:system", "builtins:eval", "torch:load", "torch:hub.load",
    "torch.serialization:load", "torch.distributed.checkpoint.metadata:os.system",
    "pathlib:Path", "functools:partial",
    "torch._dynamo.bytecode_analysis:stacksize_analysis",
)  # fmt: skip
CHANGED = (
    "pathlib:PosixPath", "torch.distributed.checkpoint.filesystem:_StorageInfo",
    "torch.serialization:_get_layout",
)  # fmt: skip


def naming(gadget: str) -> bytes:
    """By STACK_GLOBAL, whose names may have dots."""
    texts = [text.encode() for text in gadget.split(":")]
    said = b"".join(b"\x8c" + bytes([len(text)]) + text for text in texts)
    return HEAD + said + b"\x93."


def changing(target: str) -> bytes:
    """BUILD with a state for slots sets attributes of whatever it is given."""
    named = b"c" + target.replace(":", "\n").encode() + b"\n"
    return HEAD + named + b"(N}X\x06\x00\x00\x00existsctorch\nSize\nstb."


# the bytes of an index, and what is said of them
PICKLES = {
    **{g: (naming(g), f"it names {g.replace(':', '.')}") for g in GADGETS},
    **{f"set {name}": (changing(name), "it changes <") for name in CHANGED},
}


@pytest.mark.parametrize("what", PICKLES)
def test_no_pickle_names_or_changes_more_than_an_index(saved, what):
    raw, message = PICKLES[what]
    (saved / ".metadata").write_bytes(raw)
    with pytest.raises(UnreadableCheckpoint, match=message):
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


def by_manager(state, folder):
    """torchtitan's manager would load objects by DCP's own."""
    from train.engine.titan_checkpoint import RunCheckpoints

    manager = object.__new__(RunCheckpoints)  # without a trainer
    manager.states = {}
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        manager.dcp_load(state, str(folder), False, False)


@pytest.mark.parametrize("read", [partial(alone, load), by_manager])
def test_an_object_runs_nothing(read, tmp_path):
    mark, folder = tmp_path / "mark", tmp_path / "saved"
    alone(dcp.save, {"state": Touch(mark)}, checkpoint_id=folder)
    alone(dcp.load, {"state": None}, checkpoint_id=folder)
    assert mark.exists(), "the payload works"
    mark.unlink()
    with pytest.raises(UnreadableCheckpoint, match="got state in a checkpoint that"):
        read({"state": None}, folder)
    assert not mark.exists()


def of_places(**changes):
    """Change where everything lies."""

    def change(index):
        for place in index.storage_data.values():
            vars(place).update(changes)

    return change


UNREAD = "does not read as a checkpoint's index"
ALTERED = {
    "in another step": (of_places(relative_path="../step-4/__0_0.distcp"), UNREAD),
    "far behind the end": (of_places(offset=2**60), "cannot read its part"),
    "of other types": (lambda i: setattr(i, "state_dict_metadata", ["x"]), UNREAD),
}


@pytest.mark.parametrize("what", ALTERED)
def test_an_index_that_was_altered_is_refused(saved, what):
    change, message = ALTERED[what]
    index = read_index(saved)
    change(index)
    (saved / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(UnreadableCheckpoint, match=message):
        alone(load, objects(0), saved)


def test_damage_is_told_in_one_line(saved, tmp_path):
    whole = (saved / ".metadata").read_bytes()
    seeded = torch.Generator().manual_seed(0)
    refused = 0
    for at in torch.randint(len(whole), (60,), generator=seeded).tolist():
        flipped = bytearray(whole)
        flipped[at] ^= 1 << at % 8
        (saved / ".metadata").write_bytes(flipped)
        try:
            alone(load, objects(0), saved)
        except UnreadableCheckpoint as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 20
    (saved / ".metadata").write_bytes(whole)
    (data,) = saved.glob("*.distcp")
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    with pytest.raises(UnreadableCheckpoint, match="rank 0 cannot read its part"):
        alone(load, objects(0), saved)
    shutil.rmtree(saved)
    with pytest.raises(OSError):
        read_index(saved)


def loading(rank, world, folder):
    """What a rank sees of a checkpoint that rank 1 cannot read."""
    mine = Path(folder) if rank == 0 else Path(folder) / "elsewhere"
    with warnings.catch_warnings(action="ignore"):
        try:
            load(objects(0), mine)
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
