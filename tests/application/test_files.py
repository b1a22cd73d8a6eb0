"""Files are replaced whole, and a folder that is not ours is not emptied."""

from __future__ import annotations

import os

import pytest

from train.errors import UserError
from train.files import (
    PLAN,
    check_writable,
    discard,
    hold,
    made_whole,
    replacing,
    unfinished,
    write,
    write_json,
)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "folder"
    path.mkdir()
    return path


def test_what_fails_leaves_the_file_and_no_draft(folder):
    write(folder / "a", b"old")
    with pytest.raises(KeyError), replacing(folder / "a") as file:
        file.write(b"new")
        raise KeyError
    assert [path.name for path in folder.iterdir()] == ["a"]
    assert (folder / "a").read_bytes() == b"old"
    check_writable(folder / "new")
    with pytest.raises(UserError, match="expected a file"):
        check_writable(folder)


@pytest.mark.parametrize("name", ["thesis", "thesis.tmp", ".thesis.json.tmp"])
def test_a_folder_of_somebody_else_is_not_emptied(name, folder):
    out = folder / "out"
    unfinished(out).mkdir()
    (unfinished(out) / name).write_text("years")
    with pytest.raises(UserError, match="move that folder away"), made_whole(out):
        raise AssertionError
    discard(out)
    assert (unfinished(out) / name).read_text() == "years"


@pytest.mark.parametrize("left", [f".{PLAN}.tmp", PLAN, "more"])
def test_a_call_that_was_killed_while_it_began_is_no_obstacle(left, folder):
    out = folder / "out"
    unfinished(out).mkdir()
    if left == "more":
        write_json(unfinished(out) / PLAN, {"of": "another"})
    (unfinished(out) / left).write_text("{")
    with made_whole(out) as made:
        (made / "whole").touch()
    assert [path.name for path in folder.iterdir()] == ["out"]


def test_one_process_at_a_time_has_a_folder(folder):
    held = hold(folder, "--dump-folder")
    with pytest.raises(UserError, match="in which another process is at work"):
        hold(folder, "--dump-folder")
    os.close(held)
    os.close(hold(folder, "--dump-folder"))
