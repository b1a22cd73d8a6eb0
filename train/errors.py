"""Bad input, told in one line."""

import errno
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn

PATIENCE = 3.0  # seconds in which torchrun ends the ranks beside one that ended


class UserError(Exception):
    """The user gave something unusable. The message says: got, expected, do."""


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


def command(main: Callable[[], None]) -> None:
    """Run a command: what the user can mend, such as a UserError or a path that may not
    be used, becomes one line on stderr and exit code 2, Ctrl-C one line and 130.
    """
    try:
        for given in sys.argv:
            text = given.encode(errors="ignore").decode()
            if text != given or given.endswith("=--"):  # of which argparse makes []
                raise UserError(f"got {given!a}, expected text in UTF-8: change it")
        main()
    except UserError as error:
        _end(f"error: {error}", 2)
    except OSError as error:
        full = error.errno == errno.ENOSPC
        path = "a path that this user may use: choose another"
        what = "space on the disk: make some" if full else path
        _end(f"error: got {error}, expected {what}", 2)
    except KeyboardInterrupt as told:
        number = told.args[0] if told.args else signal.SIGINT
        _end("stopped before its end: run the same command again", 128 + number)


def _end(line: str, code: int) -> NoReturn:
    """Say it once: where rank 0 has ended as well, torchrun ends the others before they
    come to speak.
    """
    if os.environ.get("RANK", "0") != "0":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(PATIENCE)
    print(" ".join(line.split()), file=sys.stderr)
    sys.exit(code)
