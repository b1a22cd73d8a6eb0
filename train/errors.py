"""Bad input, told in one line."""

import math
import os
import sys
from collections.abc import Callable


class UserError(Exception):
    """The user gave something unusable. The message says: got, expected, do."""


def check_least(least: float, **options: float | None) -> None:
    """Check that the options that were given are numbers of at least ``least``."""
    for name, value in options.items():
        if value is not None and not least <= value < math.inf:
            raise UserError(
                f"got --{name.replace('_', '-')} {value}, expected at least {least}: "
                "give a larger number, or leave it out"
            )


def command(main: Callable[[], None]) -> None:
    """Run a command: a UserError, or a path that may not be used, becomes one line on
    stderr and exit code 2.
    """
    try:
        main()
    except (UserError, PermissionError, NotADirectoryError, FileExistsError) as error:
        if not isinstance(error, UserError):
            error = (
                f"got {error}, expected a path that this user may use: choose another"
            )
        if os.environ.get("RANK", "0") == "0":  # under torchrun, one of them says it
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
