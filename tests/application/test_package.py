"""What is released: the wheel and the sdist that `python -m build` makes, and what they
are where they are installed, without the checkout.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def build(folder: Path, *what: str) -> Path:
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder]
    subprocess.run([*command, *what, ROOT], check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """The sdist, and the wheel that is built from what the sdist holds."""
    folder = tmp_path_factory.mktemp("released")
    wheel = build(folder)
    (sdist,) = folder.glob("*.tar.gz")
    return sdist, wheel


@pytest.fixture(scope="module")
def site(released, tmp_path_factory):
    """A folder that the wheel is installed into."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index"]
    subprocess.run([*command, "--target", folder, released[1]], check=True)
    return folder


def run_with(site, cwd, *args):
    """Run Python beside torch with what is installed alone: no checkout on the path."""
    return subprocess.run(
        [sys.executable, *args],
        cwd=cwd,
        env={
            "PYTHONPATH": str(site),
            "PATH": os.environ["PATH"],
            "OMP_NUM_THREADS": "1",
        },
        check=True,
        capture_output=True,
        text=True,
        timeout=240,
    ).stdout


def test_an_index_takes_them(released):
    command = [sys.executable, "-m", "twine", "check", "--strict", *released]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("PASSED") == 2


def test_the_sdist_builds_the_wheel_of_the_checkout(released, tmp_path):
    """Byte for byte."""
    sdist, wheel = released
    assert build(tmp_path, "--wheel").read_bytes() == wheel.read_bytes()
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        package = {n for n in archive.namelist() if n.startswith("marsopt/")}
    assert names - package == {
        *("README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff"),
        *("pyproject.toml", "PKG-INFO", ".gitignore"),
    }


def test_the_wheel_holds_marsopt_alone(released):
    with zipfile.ZipFile(released[1]) as archive:
        names = archive.namelist()
    assert {n.split("/")[0] for n in names if ".dist-info" not in n} == {"marsopt"}
    assert "marsopt/py.typed" in names
    assert any(n.startswith("torch_marsopt-") for n in names)
    modules = sorted(n for n in names if n.startswith("marsopt/parallel/"))
    sources = sorted((ROOT / "marsopt/parallel").rglob("*.py"))
    assert modules == [str(path.relative_to(ROOT)) for path in sources]
    assert "marsopt/interop/torchtitan.py" in names  # imported by who asks for it


# their imports take longer than all else; nothing of the wheel differs for them
OF_TRAINERS = "Trainer or Lightning or accelerate or torchtitan"


def test_what_is_shown_runs_where_the_wheel_is_installed(site, tmp_path):
    shutil.copytree(ROOT / "tests", tmp_path / "tests")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    said = run_with(
        *(site, tmp_path, "-m", "pytest", "tests/library/test_guide.py"),
        *("-p", "no:cacheprovider", "-k", f"shown and not ({OF_TRAINERS})"),
    )
    assert int(re.search(r"(\d+) passed", said)[1]) > 20


FSDP_LOOP = """
import os, sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import marsopt
from marsopt import MARS
from marsopt.parallel import MeshCollectives

assert marsopt.__file__.startswith(sys.argv[1]), marsopt.__file__
assert "torchtitan" not in sys.modules
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)
)
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
fully_shard(model, mesh=mesh)
model.set_gradient_divide_factor(dist.get_world_size())
model.set_force_sum_reduction_for_comms(True)
optimizer = MARS(
    model.parameters(), lr=0.02, mars_type="mars-shampoo", max_norm=1.0,
    ns_dtype=torch.float32, compile=False, collectives=MeshCollectives(mesh),
)
for step in range(10):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"{loss:.5f}", flush=True)
dist.barrier()
os._exit(0)
"""


@pytest.mark.processes
def test_the_wheel_alone_trains_on_two_processes(site, tmp_path):
    """What they train is that of one process in test_sharded.py."""
    (tmp_path / "loop.py").write_text(FSDP_LOOP)
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "loop.py", site)
    losses = run_with(site, tmp_path, *launch).split()
    assert len(losses) == 10
    assert float(losses[-1]) < float(losses[0])
