"""The floor plan: who may import whom, and what the wheel holds."""

from __future__ import annotations

import ast
import graphlib
import os
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


# The rooms of train, and what of train each may import beside itself; what stands in no
# room is a command, and may import all of them
ROOMS = {
    "errors": set(),
    "files": {"errors"},
    "pictures": set(),
    "gpt2": {"errors", "files"},
    "data": {"errors", "files"},
    "runs": {"errors", "files", "pictures", "gpt2", "data"},
    "engine": {"errors", "files", "gpt2", "data", "runs"},
}
COMMANDS = {
    "compare", "evaluate", "export", "import_hf", "plan", "prepare", "sample",
}  # fmt: skip


@pytest.mark.parametrize("folder", LAYERS)
def test_imports_point_right(folder):
    forbidden = {*LAYERS[: LAYERS.index(folder)], "tests", "examples"}
    for path in files(folder):
        wrong = {name for name in imports(path) if name.split(".")[0] in forbidden}
        # the command line names the recipes; nothing else in train knows them
        if path == ROOT / "train" / "engine" / "launch.py":
            wrong -= {"configs"}
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


def room_of(module: str) -> str:
    """ "data" of "train.data.tokens"; "" of "train" itself."""
    return (module.split(".") + [""])[1]


def members() -> dict[str, list[Path]]:
    """{room or command: its files}; "__main__" is python -m train."""
    found: dict[str, list[Path]] = {}
    for path in files("train"):
        parts = path.relative_to(ROOT / "train").with_suffix("").parts
        if parts != ("__init__",):
            found.setdefault(parts[0], []).append(path)
    return found


def test_every_file_of_train_is_in_a_room_or_a_command():
    assert members().keys() == ROOMS.keys() | COMMANDS | {"__main__"}


def test_rooms_stand_in_one_order():
    """Each names only rooms above it in the table: no circle, no arrow back."""
    for number, (room, allowed) in enumerate(ROOMS.items()):
        assert allowed <= set(list(ROOMS)[:number]), room


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_what_the_table_says(room):
    for path in members()[room]:
        found = {name for name in imports(path) if name.split(".")[0] == "train"}
        assert {room_of(name) for name in found} <= {room} | ROOMS[room], path


def test_commands_know_rooms_not_each_other():
    """But for what export makes, which evaluate reads and import_hf names."""
    for command in COMMANDS:
        for path in members()[command]:
            names = {n for n in imports(path) if n.split(".")[0] == "train"}
            others = {room_of(name) for name in names} - {command} - ROOMS.keys()
            may = {"export"} if command in ("evaluate", "import_hf") else set()
            assert others <= may, path


# The rooms of marsopt: each may import itself and those before it
LIBRARY_ROOMS = ["rules", "functional", "optim", "profiling"]


@pytest.mark.parametrize("room", LIBRARY_ROOMS)
def test_rooms_of_the_library_stand_in_one_order(room):
    allowed = set(LIBRARY_ROOMS[: LIBRARY_ROOMS.index(room) + 1])
    for path in files(f"marsopt/{room}"):
        found = {n.split(".")[1] for n in imports(path) if n.startswith("marsopt.")}
        assert found <= allowed, path
        assert "marsopt" not in imports(path), path


def test_no_file_of_the_library_is_in_a_circle():
    arrows = {}
    for path in files("marsopt"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        arrows[".".join(parts)] = {
            name for name in imports(path) if name.startswith("marsopt.")
        } | {
            # from marsopt.rules import checks
            f"{node.module}.{alias.name}"
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and (node.module or "") != "marsopt"
            for alias in node.names
        }
    graph = {name: found & arrows.keys() for name, found in arrows.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names it


def test_marsopt_is_arithmetic():
    """It imports torch, never torch.distributed, never torchtitan."""
    for path in files("marsopt"):
        for name in imports(path):
            assert name.split(".")[0] in {"torch", "marsopt", *sys.stdlib_module_names}
            assert not name.startswith("torch.distributed"), path


def test_few_doors_lead_to_torchtitan():
    doors = {p.relative_to(ROOT).as_posix() for f in LAYERS for p in files(f)
             if any(n.split(".")[0] == "torchtitan" for n in imports(p))}  # fmt: skip
    assert doors == {
        "parallel/torchtitan.py", "train/engine/titan.py", "train/engine/titan_cpu.py"
    }  # fmt: skip


def test_parallel_travels_under_another_name():
    """Siblings relatively, so that it also works as marsopt.parallel."""
    for path in files("parallel"):
        assert not {n for n in imports(path) if n.split(".")[0] == "parallel"}, path


def test_another_projects_package_of_this_name_is_told(tmp_path):
    """The index has one; who installed it over ours learns what to do."""
    (tmp_path / "marsopt").mkdir()
    (tmp_path / "marsopt/__init__.py").write_text("")
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}]; import parallel"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert "expected that of torch-marsopt: pip uninstall marsopt" in found.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Names in the built wheel, and a folder that it was unpacked into."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir"]
    subprocess.run([*build, folder, ROOT], check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as z:
        z.extractall(folder / "site")
        return z.namelist(), folder / "site"


def run_with(site, cwd, *args):
    """Run Python beside torch with the wheel alone: no checkout on the path."""
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


def test_the_wheel_holds_marsopt_alone(wheel, tmp_path):
    names, site = wheel
    assert {n.split("/")[0] for n in names if ".dist-info" not in n} == {"marsopt"}
    assert "marsopt/py.typed" in names
    assert any(n.startswith("torch_marsopt-") for n in names)
    assert "marsopt/parallel/collectives.py" in names
    assert "marsopt/parallel/torchtitan.py" in names  # imported by who asks for it
    code = (
        "import marsopt, marsopt.parallel as p; from marsopt import MARS;"
        "import sys; assert 'torchtitan' not in sys.modules;"
        "print(marsopt.__file__, p.MeshCollectives)"
    )
    assert str(site) in run_with(site, tmp_path, "-c", code)


def test_make_alone_says_what_there_is(tmp_path):
    """And installs nothing; what installs something shows how it goes on."""
    head = (ROOT / "Makefile").read_text().split("\n\n")[0]

    def make(*args):
        options = dict(capture_output=True, text=True, check=True)
        return subprocess.run(["make", "-C", str(ROOT), *args], **options).stdout

    said = make("--no-print-directory", f"VENV={tmp_path}/venv")
    assert said.splitlines() == [line[2:] for line in head.splitlines()]
    assert not list(tmp_path.iterdir())
    installs = make("--dry-run", f"VENV={tmp_path}/venv", "train")
    assert "pip install" in installs
    assert "--quiet" not in installs


FSDP_LOOP = """
import os, sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from marsopt import MARS
from marsopt.parallel import MeshCollectives

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)
)
kw = {}
if "RANK" in os.environ:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh)
    model.set_gradient_divide_factor(dist.get_world_size())
    model.set_force_sum_reduction_for_comms(True)
    kw = dict(collectives=MeshCollectives(mesh))
optimizer = MARS(
    model.parameters(), lr=0.02, mars_type="mars-shampoo", max_norm=1.0,
    ns_dtype=torch.float32, compile=False, **kw,
)
for step in range(10):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if os.environ.get("RANK", "0") == "0":
        print(f"{loss:.5f}", flush=True)
if "RANK" in os.environ:
    dist.barrier()
os._exit(0)
"""


@pytest.mark.processes
def test_the_wheel_alone_trains_on_two_processes_as_on_one(wheel, tmp_path):
    _, site = wheel
    (tmp_path / "loop.py").write_text(FSDP_LOOP)
    one = run_with(site, tmp_path, "loop.py").split()
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "loop.py")
    assert run_with(site, tmp_path, *launch).split() == one
    assert len(one) == 10
    assert float(one[-1]) < float(one[0])
