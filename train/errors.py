"""Bad input, told in one line."""

from __future__ import annotations

import sys
from collections.abc import Callable


class UserError(Exception):
    """The user gave something unusable. The message says: got, expected, do."""


def command(main: Callable[[], None]) -> None:
    """Run a command: a UserError becomes one line on stderr and exit code 2."""
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
