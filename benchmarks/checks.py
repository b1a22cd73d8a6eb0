"""What several commands check of their options."""

from __future__ import annotations

from pathlib import Path

import torch

from train.errors import UserError


def outputs(*paths: Path | None) -> None:
    """Check that files can be written, before what takes minutes.

    Raises:
        UserError: a folder that is not there.
    """
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise UserError(
                f"got {path} to write to, expected a folder that exists: make "
                f"{path.parent}"
            )


def device(name: str) -> None:
    """Check that "cpu" or "cuda" is there.

    Raises:
        UserError: no GPU.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "got --device cuda, expected a GPU that torch can use: leave it out for CPU"
        )
