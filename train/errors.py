"""Unusable input, said in one line, and how a command ends."""

import errno
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from unicodedata import category

if TYPE_CHECKING:  # importing torch takes a second, which a usage message need not wait
    from torch.distributed import Store

log = logging.getLogger(__name__)

SPACE = 1 << 20  # bytes; with less a disk counts as full
STOPPED = "stopped before its end: run the same command again"


class UserError(Exception):
    """The user gave something unusable. The message says: got, expected, do; several
    mistakes are several messages.
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


def is_full(error: BaseException, folder: Path) -> bool:
    """Return whether an error, of any library, is that the disk of a folder is full."""
    with suppress(OSError):
        if "No space left" in str(error) or shutil.disk_usage(folder).free < SPACE:
            return True
    return isinstance(error, OSError) and error.errno == errno.ENOSPC


def shown(text: str) -> str:
    """Return a text with everything that would steer a terminal written out, but for
    ends of lines and tabs.
    """

    def is_plain(c: str) -> bool:
        return c in "\n\t" or category(c) == "Zs" or c.isprintable()

    return "".join(c if is_plain(c) else ascii(c)[1:-1] for c in text)


def command(main: Callable[[], None]) -> None:
    """Run a command. A UserError or an error of the system becomes one line on stderr
    and exit code 2, Ctrl-C one line and 130. If nobody reads standard output, the exit
    code is 141, as other programs have it.
    """
    try:
        main()
        sys.stdout.flush()
    except UserError as error:
        say(*(f"error: {line}" for line in error.args))
        sys.exit(2)
    except BrokenPipeError:
        # The interpreter would try to flush again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        say(f"error: got {error}, expected that the system allows it: mend that")
        sys.exit(2)
    except KeyboardInterrupt as told:
        say(STOPPED)
        sys.exit(128 + (told.args[0] if told.args else signal.SIGINT))


def tell(*lines: str) -> None:
    """Print lines on standard output, and write them into the run's log."""
    for line in lines:
        print(line)
        for part in filter(None, line.splitlines()):
            log.info(part)
    sys.stdout.flush()


def say(*lines: str) -> None:
    """Print the reasons for the end of this process, each in one line.

    Of the ranks that torchrun has started, only the first to ask prints: torchrun keeps
    a store for them. Without torchrun, each rank prints, and names itself.
    """
    rank = os.environ.get("RANK")
    if rank and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        if not _is_first():
            return
    elif rank is not None and os.environ.get("WORLD_SIZE") != "1":
        lines = tuple(f"rank {rank}: {line}" for line in lines)
    for line in lines:
        print(shown(" ".join(line.split())), file=sys.stderr)


def _is_first() -> bool:
    try:
        return shared_store().add("said", 1) == 1
    except (RuntimeError, OSError, KeyError, ValueError):  # torchrun has gone
        return os.environ["RANK"] == "0"


def shared_store(seconds: float = 5.0) -> "Store":
    """Return a store that ranks read and write without meeting, a new one at each
    attempt of torchrun; calls take so many seconds at most.

    Raises:
        RuntimeError, OSError: the process that keeps it, torchrun or rank 0, has gone.
    """
    from torch.distributed import PrefixStore, TCPStore

    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(*place, is_master=False, timeout=timedelta(seconds=seconds))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"train/{attempt}", store)
