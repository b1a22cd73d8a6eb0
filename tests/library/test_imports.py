"""What an import of the library does, and does not do; and what make does alone.
Contracts about who may import whom are in pyproject.toml, for lint-imports.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def python(code: str) -> subprocess.CompletedProcess:
    """Run ``code`` in the checkout."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_the_library_imports_no_compiler_no_mesh_and_no_profiler_before_they_are_used():
    """Dynamo alone takes seconds."""
    done = python(
        "import sys, torch, marsopt; "
        "print('torch._dynamo' in sys.modules); "
        "marsopt.for_model(torch.nn.Linear(2, 2), lr=0.1, compile=False); "
        "print('marsopt.parallel' in sys.modules); "
        "import marsopt.parallel; "
        "print(any(n.startswith('marsopt.profil') for n in sys.modules)); "
        "import parallel; "  # the checkout's link
        "print(parallel.MeshCollectives is marsopt.parallel.MeshCollectives); "
        "from marsopt import *; "
        "print(profile is marsopt.profile, profile.__module__)"
    )
    usual = ["False", "False", "False", "True", "True", "marsopt.profiling.profiler"]
    assert done.stdout.split() == usual, done.stderr


def test_make_alone_installs_nothing_and_an_installation_shows_its_progress(tmp_path):
    def make(*args):
        options = dict(capture_output=True, text=True, check=True)
        return subprocess.run(["make", "-C", str(ROOT), *args], **options).stdout

    assert "make train " in make(f"VENV={tmp_path}/venv")
    assert not list(tmp_path.iterdir())
    installs = make("--dry-run", f"VENV={tmp_path}/venv", "train")
    assert "pip install" in installs
    assert "--quiet" not in installs


MAKERS = {"arange", "as_tensor", "empty", "eye", "full", "ones", "tensor", "zeros"}


def test_every_new_tensor_names_its_device():
    """A tensor without a device lies on torch's default device, which users set."""
    unnamed = [
        f"{path}:{node.lineno}"
        for path in (ROOT / "marsopt").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch.")
        if ast.unparse(node.func).removeprefix("torch.") in MAKERS
        if not {"device", None} & {keyword.arg for keyword in node.keywords}
    ]
    assert unnamed == []
