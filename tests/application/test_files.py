"""No command writes or deletes through a link that it did not make, empties a folder
that it did not make, or reads what is no file or has no end.
"""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from train.errors import UserError
from train.files import (
    MARK,
    PLAN,
    SMALL,
    check_links,
    check_writable,
    copy,
    discard,
    growing,
    made_whole,
    opened,
    read,
    remove,
    remove_folder,
    replacing,
    sha256,
    unfinished,
    workspace,
    write,
    write_json,
)


@pytest.fixture
def users(tmp_path):
    """A file of the user's, to which a stranger's links lead."""
    path = tmp_path / "user/thesis"
    path.parent.mkdir()
    path.write_bytes(b"years")
    yield path
    assert path.read_bytes() == b"years"
    assert [p.name for p in path.parent.iterdir()] == ["thesis"]


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "stranger"
    path.mkdir()
    return path


def bind(path):
    """Let a socket lie there, whose address may have some 100 characters alone."""
    with socket.socket(socket.AF_UNIX) as bound, TemporaryDirectory() as short:
        bound.bind(f"{short}/bound")
        os.rename(f"{short}/bound", path)


LINKS = {"symbolic": os.symlink, "hard": os.link}


# ---- to write ------------------------------------------------------------------------


def test_a_hard_link_is_replaced_and_a_symbolic_one_refused(users, folder):
    os.link(users, folder / "hard")
    write(folder / "hard", b"new")
    assert (folder / "hard").read_bytes() == b"new"
    (folder / "link").symlink_to(users)
    (folder / "dead").symlink_to(users.with_name("none"))
    for name in ("link", "dead"):
        with pytest.raises(UserError, match="which is a folder, a FIFO or a link"):
            write(folder / name, b"new")
        assert (folder / name).is_symlink()


def test_what_fails_leaves_the_file_and_no_draft(folder):
    write(folder / "a", b"old")
    with pytest.raises(KeyError), replacing(folder / "a") as file:
        file.write(b"new")
        raise KeyError
    assert [path.name for path in folder.iterdir()] == ["a"]
    assert read(folder / "a", "a file") == b"old"


def test_only_files_devices_and_nothing_are_written_to(folder):
    os.mkfifo(folder / "fifo")
    (folder / "folder").mkdir()
    bind(folder / "socket")
    for name in ("fifo", "folder", "socket"):
        with pytest.raises(UserError, match="expected a file that can be written"):
            write(folder / name, b"new")
    assert not check_writable(folder / "new")
    assert check_writable(Path("/dev/null"))
    write(Path("/dev/null"), b"new")


@pytest.mark.parametrize("kind", LINKS)
def test_a_log_of_somebody_else_does_not_grow(kind, users, folder):
    LINKS[kind](users, folder / "rank0.log")
    with pytest.raises(UserError, match="nothing was written to it"):
        growing(folder / "rank0.log")
    (folder / "rank0.log").unlink()
    os.mkfifo(folder / "rank0.log")
    with pytest.raises(UserError, match="nothing was written to it"):
        growing(folder / "rank0.log")
    (folder / "rank0.log").unlink()
    for _ in range(2):
        with growing(folder / "rank0.log") as file:
            file.write(b"line")
    assert (folder / "rank0.log").read_bytes() == b"lineline"


# ---- to delete -----------------------------------------------------------------------


def test_of_a_link_the_link_is_deleted(users, folder):
    (folder / "link").symlink_to(users.parent)
    remove_folder(folder / "link")
    (folder / "inner").mkdir()
    (folder / "inner/link").symlink_to(users.parent)
    os.link(users, folder / "inner/hard")
    with pytest.raises(OSError):
        remove(folder / "inner")
    remove_folder(folder / "inner")
    (folder / "link").symlink_to(users)
    remove(folder / "link")
    remove(folder / "none")
    assert not any(folder.iterdir())


@pytest.mark.parametrize("make", [made_whole, workspace])
def test_unfinished_work_is_no_link(make, users, folder):
    out = folder / "out"
    unfinished(out).symlink_to(users.parent)
    with pytest.raises(UserError, match="which is a link or a file"), make(out):
        raise AssertionError
    discard(out)
    assert unfinished(out).is_symlink()
    unfinished(out).unlink()
    unfinished(out).write_text("")
    with pytest.raises(UserError, match="which is a link or a file"), make(out):
        raise AssertionError


def test_a_folder_of_somebody_else_is_not_emptied(folder):
    out = folder / "out"
    unfinished(out).mkdir()
    for name, content in (("a", "1"), (PLAN, "{}"), (PLAN, '{"a": 1}'), (PLAN, "[")):
        (unfinished(out) / name).write_text(content)
        with pytest.raises(UserError), made_whole(out):
            raise AssertionError
        discard(out)
        assert (unfinished(out) / "a").read_text() == "1"
    write_json(unfinished(out) / PLAN, MARK)
    with made_whole(out) as made:
        (made / "whole").touch()
    assert [path.name for path in folder.iterdir()] == ["out"]


@pytest.mark.parametrize("name", ["thesis.tmp", ".thesis.json.tmp"])
def test_drafts_of_somebody_else_are_not_deleted(name, folder):
    out = folder / "out"
    unfinished(out).mkdir()
    (unfinished(out) / name).write_text("years")
    with pytest.raises(UserError), made_whole(out):
        raise AssertionError
    discard(out)
    assert (unfinished(out) / name).read_text() == "years"


def test_unfinished_work_holds_no_links(users, folder):
    out = folder / "out"
    unfinished(out).mkdir()
    write_json(unfinished(out) / PLAN, MARK)
    (unfinished(out) / "made").symlink_to(users.parent)
    elsewhere = "a link to .*, which lies elsewhere"
    with pytest.raises(UserError, match=elsewhere), made_whole(out):
        raise AssertionError


def test_a_call_that_was_killed_while_it_began_is_no_obstacle(folder):
    out = folder / "out"
    unfinished(out).mkdir()
    (unfinished(out) / f".{PLAN}.tmp").write_text("{")
    with made_whole(out) as made:
        (made / "whole").touch()
    assert [path.name for path in folder.iterdir()] == ["out"]


def test_links_within_a_folder_are_its_own(users, folder):
    (folder / "a/b").mkdir(parents=True)
    (folder / "a/latest").symlink_to("b")
    check_links(folder, "none")
    for lead in (users, "../..", "/none/none"):
        (folder / "a/link").symlink_to(lead)
        with pytest.raises(UserError, match="which lies elsewhere, expected none"):
            check_links(folder, "none")
        (folder / "a/link").unlink()


# ---- to read -------------------------------------------------------------------------


def test_files_have_an_end(folder):
    path = folder / "a"
    path.write_bytes(b"12345")
    assert read(path, "five", most=5) == b"12345"
    with pytest.raises(UserError, match="a of 5 bytes, expected at most 4: four"):
        read(path, "four", most=4)
    os.truncate(path, 1 << 40)
    for reads in (opened, copy):
        with pytest.raises(UserError, match="bytes, expected as many on the disk"):
            reads(path, folder)
    with pytest.raises(UserError, match="bytes, expected as many on the disk"):
        sha256(path)
    with path.open("wb") as file:  # some zeros that take no place are no harm
        file.seek(SMALL // 4)
        file.write(os.urandom(SMALL))
    opened(path, "a file").close()


def test_copies_are_of_files(users, folder):
    (folder / "link").symlink_to(users)
    (folder / "to").mkdir()
    with pytest.raises(UserError, match="link, which is a link, expected a file"):
        copy(folder / "link", folder / "to")
    assert not any((folder / "to").iterdir())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO])
def test_a_library_that_cannot_write_is_an_error_of_the_system(number, tmp_path):
    """As safetensors says it, which is written in Rust."""
    said = f"I/O error: {os.strerror(number)} (os error {number})"
    with pytest.raises(OSError) as caught, workspace(tmp_path / "out"):
        raise RuntimeError(said)
    assert caught.value.errno == number
    assert not (tmp_path / "out").exists()
    with pytest.raises(RuntimeError), workspace(tmp_path / "out"):
        raise RuntimeError("another error")
