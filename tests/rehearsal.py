"""Runs parts of the GPU rehearsal in processes of their own: what they tell torch about
a GPU, and Triton on the path, would change what other tests find.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
# where make installs Triton, apart from the environment
TRITON = ROOT / os.environ.get("MARSOPT_TRITON", ".venv-triton")
HAS_TRITON = bool(importlib.util.find_spec("triton")) or (TRITON / "triton").is_dir()
needs_triton = pytest.mark.skipif(
    not HAS_TRITON, reason=f"needs Triton, in the environment or in {TRITON.name}"
)


def rehearsed(module: str, *args: str, folder: Path, **env: str) -> Any:
    """Return what ``python -m MODULE ARGS... --json FILE`` writes.

    Args:
        module: ``benchmarks.gpu.rehearsal``, or of tests.
        args: its arguments.
        folder: where the file may lie.
        env: more of its environment.
    """
    path = folder / "rehearsed.json"
    places = [str(ROOT), str(TRITON)]
    own = {"PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1", **env}
    done = subprocess.run(
        [sys.executable, "-m", module, *args, "--json", str(path)],
        cwd=ROOT,
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(path.read_text())


def played(folder: Path, **cases: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return {case: row} of parts of the rehearsal; a CASE may be NAME=MUTANT."""
    words = [f"{part}:{case}" for part, own in cases.items() for case in own]
    return rehearsed("tests.mutants", *words, folder=folder)
