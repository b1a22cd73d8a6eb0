"""What the application's tests share: it is made once in a process."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.application import made as small
from tests.application.runs import train_tiny
from train import prepare


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Two modules of the standard library, as bytes."""
    out = tmp_path_factory.mktemp("text") / "data"
    files = [Path(json.__file__), Path(re.__file__)]
    prepare.prepare("text", "bytes", out, files=files, val_fraction=0.2)
    return out


@pytest.fixture(scope="session")
def one(data, tmp_path_factory):
    """The folder of a training, not to be changed, its losses, and what it printed."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    return folder, *train_tiny(data, folder)


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Data, a run, and a Hugging Face folder of one small model: not to be changed."""
    return small.make(tmp_path_factory.mktemp("made"))


@pytest.fixture
def place(made, tmp_path):
    """A copy to damage."""
    return shutil.copytree(made, tmp_path / "place")
