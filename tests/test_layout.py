"""The floor plan: who may import whom, and what the wheel holds."""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# each folder may import itself and what stands right of it
LAYERS = ["configs", "train", "parallel", "marsopt"]


def imports(path: Path) -> set[str]:
    """Names of all absolute imports, wherever they stand in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module)
    return found


def files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("folder", LAYERS)
def test_imports_point_right(folder):
    forbidden = {*LAYERS[: LAYERS.index(folder)], "tests", "examples"}
    for path in files(folder):
        wrong = {name for name in imports(path) if name.split(".")[0] in forbidden}
        # the command line names the recipes; nothing else in train knows them
        if path == ROOT / "train" / "launch.py":
            wrong -= {"configs"}
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


def test_marsopt_is_arithmetic():
    """It imports torch, never torch.distributed, never torchtitan."""
    for path in files("marsopt"):
        for name in imports(path):
            assert name.split(".")[0] in {"torch", "marsopt", *sys.stdlib_module_names}
            assert not name.startswith("torch.distributed"), path


def test_only_one_door_leads_to_torchtitan():
    doors = {p.relative_to(ROOT).as_posix() for f in LAYERS for p in files(f)
             if any(n.split(".")[0] == "torchtitan" for n in imports(p))}  # fmt: skip
    assert doors == {"train/titan.py", "train/titan_cpu.py"}


def test_parallel_travels_under_another_name():
    """Siblings relatively, so that it also works as marsopt.parallel."""
    for path in files("parallel"):
        assert not {n for n in imports(path) if n.split(".")[0] == "parallel"}, path


def test_files_stay_small():
    for folder in LAYERS:
        for path in files(folder):
            assert len(path.read_text().splitlines()) < 400, path


def test_the_wheel_holds_marsopt_alone(tmp_path):
    subprocess.run(
        [
            sys.executable,
            "-m",
            "build",
            "--wheel",
            "--no-isolation",
            "--outdir",
            tmp_path,
            ROOT,
        ],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as z:
        names = z.namelist()
        z.extractall(tmp_path / "site")
    assert {n.split("/")[0] for n in names if ".dist-info" not in n} == {"marsopt"}
    assert "marsopt/py.typed" in names
    assert "marsopt/parallel/collectives.py" in names
    code = (
        "import marsopt, marsopt.parallel as p; from marsopt import MARS;"
        "print(marsopt.__file__, p.MeshCollectives)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site"), "PATH": ""},
        check=True,
        capture_output=True,
        text=True,
    )
    assert str(tmp_path / "site") in done.stdout
