"""Bad input, told in one line, and how a command begins and ends."""

import errno
import io
import logging
import os
import re
import select
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from unicodedata import category

if TYPE_CHECKING:  # importing torch takes a second, which a usage message need not wait
    from torch.distributed import Store

log = logging.getLogger(__name__)

SPACE = 1 << 20  # bytes; with less a disk counts as full
LONGEST = 1200, 800  # characters of a line, at both ends
STOPPED = "stopped before its end: run the same command again"
UNREAD = 128 + signal.SIGPIPE  # of a program that a pipe's end has ended


_FILE_SYSTEM = "a file system that answers: mount it again"
_NETWORK = "a network that answers: try again when it does"
_OPEN_FILES = "fewer open files: allow more (ulimit -n)"
ADVICE = {
    errno.ENOSPC: "space on the disk: make some",
    errno.EDQUOT: "space within this user's quota: make some",
    errno.EFBIG: "a file of any length: raise the limit (ulimit -f)",
    errno.ENOMEM: "free memory: end something else, or ask for less",
    errno.EMFILE: _OPEN_FILES,
    errno.ENFILE: _OPEN_FILES,
    errno.EAGAIN: "free processes: end some, or allow more (ulimit -u)",
    errno.EIO: "a disk that works: look into the system's log, and copy what you need",
    errno.ESTALE: _FILE_SYSTEM,
    errno.ENOTCONN: _FILE_SYSTEM,
    errno.EROFS: "a file system that may be written to: choose another path",
    errno.EBUSY: "a path that nobody else uses: wait, or choose another",
    errno.EPIPE: "somebody who reads it: run the command again",
    **dict.fromkeys((errno.ECONNREFUSED, errno.ECONNRESET), _NETWORK),
    **dict.fromkeys((errno.ETIMEDOUT, errno.ENETUNREACH, errno.EHOSTUNREACH), _NETWORK),
}
PATH = "a path that this user may use: choose another"
OF_PATHS = {
    errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST,
    errno.ENAMETOOLONG, errno.ELOOP, errno.ENXIO, errno.ENOTEMPTY, errno.EXDEV,
    errno.EINVAL,
}  # fmt: skip


class UserError(Exception):
    """The user gave something unusable. The message says: got, expected, do; what was
    found at once are several messages.
    """

    def __str__(self) -> str:
        return "; ".join(self.args)


def counted(num: int, what: str) -> str:
    """Return "1 rank", "2 ranks"."""
    return f"{num:,} {what}{'s' * (num != 1)}"


def check_least(
    least: float, most: float = 2**31 - 1, /, **options: float | None
) -> None:
    """Check that the options that were given are from ``least`` to ``most``."""
    for name, value in options.items():
        if value is not None and not least <= value <= most:
            limit = f"at most {most}" if value > most else f"at least {least}"
            raise UserError(
                f"got --{name.replace('_', '-')} {value}, expected {limit}: change it, "
                "or leave it out"
            )


def environment_count(name: str, least: int, usual: int | None = None) -> int:
    """Return a number that a launcher puts into the environment."""
    text = os.environ.get(name)
    if text is None and usual is not None:
        return usual
    number = int(text) if re.fullmatch("[0-9]{1,9}", text or "") else -1
    if number < least:
        got = f"no {name}" if text is None else f"{name}={text!r:.40}"
        raise UserError(
            f"got {got} in the environment, expected a number from {least} on, as "
            "torchrun sets it: start with torchrun, or unset RANK and what goes with it"
        )
    return number


def advice(error: OSError) -> str:
    """Say what the user can do about an error of the system."""
    if error.errno in OF_PATHS:
        return PATH
    return ADVICE.get(error.errno or 0, "none: mend what it names")


def system_errno(error: BaseException, folder: Path) -> int | None:
    """Return the number of the system's error behind an error of any library that was
    writing to a folder, if there is such a number.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    said = str(error)
    if told := re.search(r"os error ([0-9]{1,4})\b", said):  # as Rust says it
        return int(told[1])
    with suppress(OSError):
        if "No space left" in said or shutil.disk_usage(folder).free < SPACE:
            return errno.ENOSPC
    return None


def is_full(error: BaseException, folder: Path) -> bool:
    """Return whether an error, of any library, is that the disk of a folder is full."""
    return system_errno(error, folder) == errno.ENOSPC


def shown(text: str) -> str:
    """Return a text with what would steer a terminal written out, ends of lines and
    tabs apart.
    """
    return "".join(c if _is_plain(c) else ascii(c)[1:-1] for c in text)


def _is_plain(character: str) -> bool:
    is_space = character in "\n\t" or category(character) == "Zs"
    return is_space or character.isprintable()


@contextmanager
def quiet() -> Iterator[None]:
    """Let nothing be printed on stderr that a library writes past Python."""
    kept = os.dup(2)
    try:
        _drop(2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def begin() -> None:
    """Prepare this process for a command, whose imports, of seconds, come before
    ``command``: Ctrl-C is one line until then, and a stream that was closed is empty,
    so that no other file gets its number.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)
    _open_streams()


def _open_streams() -> None:
    """Read from nowhere and print to nowhere where a stream was closed (``>&-``)."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest that is free
            os.set_inheritable(number, True)
            stream = open(number, mode, closefd=False)  # noqa: SIM115  (until the end)
            setattr(sys, name, stream)


def _stop(number: int, frame: object) -> None:
    """End at once: an exception could be lost, or be shown, in what is imported."""
    if os.environ.get("RANK", "0") == "0":
        with suppress(OSError):
            os.write(2, f"{STOPPED}\n".encode())
    os._exit(128 + number)


def command(main: Callable[[], None]) -> None:
    """Run a command: what the user can mend, such as a UserError or a path that may not
    be used, becomes one line on stderr and exit code 2, Ctrl-C one line and 130. Where
    nobody reads standard output any more, it ends as other programs do, with 141.
    """
    _open_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names that are no UTF-8
    try:
        if signal.getsignal(signal.SIGINT) is _stop:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = _run(main)
    except KeyboardInterrupt as told:  # also while it says why it ends
        code = 128 + (told.args[0] if told.args else signal.SIGINT)
        say(STOPPED)
    if code:
        try:
            sys.stdout.flush()
        except OSError:
            _drop(sys.stdout.fileno())
        # an exception of a signal's handler would be shown from here on
        if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        sys.exit(code)


def _run(main: Callable[[], None]) -> int | str | None:
    code: int | str | None = 0
    try:
        for given in sys.argv:
            text = given.encode(errors="ignore").decode()
            if text != given or given.endswith("=--"):  # of which argparse makes []
                raise UserError(f"got {given!a}, expected text in UTF-8: change it")
        try:
            main()
        except SystemExit as ended:  # argparse's, which has printed its help
            code = ended.code
        sys.stdout.flush()
        return code
    except UserError as error:
        lines = error.args
    except OSError as error:
        if is_unread(error):
            return UNREAD
        lines = (f"got {error}, expected {advice(error)}",)
    except MemoryError as error:
        lines = (f"got no memory ({error}), expected {ADVICE[errno.ENOMEM]}",)
    say(*(f"error: {line}" for line in lines))
    return 2


def tell(*lines: str) -> None:
    """Print lines on standard output, and write them into the run's log."""
    for line in lines:
        print(line)
        for part in filter(None, line.splitlines()):
            log.info(part)
    sys.stdout.flush()


def say(*lines: str) -> None:
    """Print why this process ends, each reason in one line, whatever it quotes.

    Of the ranks that torchrun has started the first to ask says it, by the store that
    it keeps for them; without one each speaks for itself.
    """
    rank = os.environ.get("RANK")
    if rank and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        if not _is_first():
            return
    elif rank is not None and os.environ.get("WORLD_SIZE") != "1":
        lines = tuple(f"rank {rank}: {line}" for line in lines)
    try:
        for line in lines:
            line, (head, tail) = shown(" ".join(line.split())), LONGEST
            if len(line) > head + tail:
                line = f"{line[:head]} ... {line[-tail:]}"
            print(line, file=sys.stderr)
    except OSError:
        _drop(sys.stderr.fileno())


def is_unread(error: BaseException) -> bool:
    """Return whether an error is that nobody reads standard output (``| head -1``)."""
    if not isinstance(error, BrokenPipeError):
        return False
    poll = select.poll()
    poll.register(sys.stdout, 0)  # errors are always told
    return bool(poll.poll(0))


def _drop(stream: int) -> None:
    """Let go of what cannot be written: the interpreter would try again as it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream)
    os.close(nowhere)


def _is_first() -> bool:
    try:
        return shared_store().add("said", 1) == 1
    except (RuntimeError, OSError, KeyError, ValueError):  # torchrun has gone
        return os.environ["RANK"] == "0"


def shared_store(seconds: float = 5.0) -> "Store":
    """Return what ranks may write and read without meeting, anew at each attempt of
    torchrun; calls take so many seconds at most.

    Raises:
        RuntimeError, OSError: who keeps it, torchrun or rank 0, has gone.
    """
    from torch.distributed import PrefixStore, TCPStore

    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(*place, is_master=False, timeout=timedelta(seconds=seconds))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"train/{attempt}", store)
