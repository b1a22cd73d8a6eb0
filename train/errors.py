"""Bad input, told in one line, and how a command begins and ends."""

import errno
import os
import select
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:  # importing torch takes a second, which a usage message need not wait
    from torch.distributed import Store

STOPPED = "stopped before its end: run the same command again"
UNREAD = 128 + signal.SIGPIPE  # of a program that a pipe's end has ended


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
            _drop(sys.stdout)
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
        full = error.errno == errno.ENOSPC
        path = "a path that this user may use: choose another"
        what = "space on the disk: make some" if full else path
        lines = (f"got {error}, expected {what}",)
    say(*(f"error: {line}" for line in lines))
    return 2


def say(*lines: str) -> None:
    """Print why this process ends, each reason in one line, whatever it quotes.

    Of the ranks that torchrun has started the first to ask says it, by the store that
    it keeps for them; without one each speaks for itself.
    """
    rank = os.environ.get("RANK")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        if not _is_first():
            return
    elif rank is not None and os.environ.get("WORLD_SIZE") != "1":
        lines = tuple(f"rank {rank}: {line}" for line in lines)
    try:
        for line in lines:
            print(" ".join(line.split()), file=sys.stderr)
    except OSError:
        _drop(sys.stderr)


def is_unread(error: BaseException) -> bool:
    """Return whether an error is that nobody reads standard output (``| head -1``)."""
    if not isinstance(error, BrokenPipeError):
        return False
    poll = select.poll()
    poll.register(sys.stdout, 0)  # errors are always told
    return bool(poll.poll(0))


def _drop(stream: IO) -> None:
    """Let go of what cannot be written: the interpreter would try again as it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _is_first() -> bool:
    try:
        return shared_store().add("said", 1) == 1
    except (RuntimeError, OSError):  # torchrun has gone
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
