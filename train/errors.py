"""Bad input, told in one line."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path


class UserError(Exception):
    """The user gave something unusable. The message says: got, expected, do."""


def read_json(path: Path, expected: str) -> dict:
    """The JSON object in a file.

    Raises:
        UserError: it does not read; ``expected`` says what was, and what to do.
    """
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"got a {path} that does not read ({error}), expected {expected}"
        ) from error


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
