"""The floor plan: who may import whom."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# each layer may import itself and what stands right of it; a folder is a layer. That of
# parallel is imported as marsopt.parallel: a link in the folder marsopt leads there
LAYERS = ["tests", "configs", "train", "parallel", "marsopt"]
PACKAGES = {layer: layer for layer in LAYERS} | {"parallel": "marsopt.parallel"}


def name_of(path: Path) -> str:
    """ "marsopt.parallel.cut" of parallel/cut.py; of an __init__.py its folder's."""
    folder, *parts = path.relative_to(ROOT).with_suffix("").parts
    inner = [part for part in parts if part != "__init__"]
    return ".".join([PACKAGES.get(folder, folder), *inner])


def layer_of(name: str) -> str | None:
    """The layer of a module's name; None of a module that is in none."""
    if name == "marsopt.parallel" or name.startswith("marsopt.parallel."):
        return "parallel"
    layer = name.split(".")[0]
    # the folder's own name imports nothing: the package refuses it
    return layer if layer in LAYERS and layer != "parallel" else None


def when_it_runs(path: Path) -> set[str]:
    """Packages that a file imports where not only type checkers look."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    return {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (getattr(node, "module", None), *(a.name for a in node.names))
        if name
    }


def imports(path: Path) -> set[str]:
    """Names of all imports, wherever they stand in the file, relative ones resolved;
    of ``from a import b`` both a and a.b, which may be a module.
    """
    package = name_of(path).split(".")
    if path.name != "__init__.py":
        package.pop()
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return found


def files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


# The rooms of train, and what of train each may import beside itself; what stands in no
# room is a command, and may import all of them
ROOMS = {
    "errors": set(),
    "files": {"errors"},
    "pictures": {"errors", "files"},
    "gpt2": {"errors", "files"},
    "data": {"errors", "files"},
    "runs": {"errors", "files", "pictures", "gpt2", "data"},
    "engine": {"errors", "files", "gpt2", "data", "runs"},
    "forecast": set(),
}
COMMANDS = {"evaluate", "export", "import_hf", "plan", "prepare", "sample"}


# what others name so that tests meet it: namedtuple, os and threading; torch's tensors
# and modules; accelerate; torchtitan, whose methods ours override
OF_OTHERS = {
    *("_apply", "_asdict", "_replace", "_exit", "_shutdown", "_version"),
    *("_forward_pre_hooks", "_state_dict_pre_hooks", "_post_accumulate_grad_hooks"),
    *("_reset_state", "_purge_stale_checkpoints", "_resolve_optimizer_factory"),
}


def private(path: Path) -> set[str]:
    """Attributes whose names begin with one underscore, but for those of the test's own
    objects and of modules of torch.
    """
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Attribute) or not node.attr.startswith("_"):
            continue
        whose = ast.unparse(node.value)
        own = whose in ("self", "cls") or whose.split(".")[0] == "torch"
        if not own and not node.attr.startswith("__"):
            found.add(f"{whose}.{node.attr}")
    return {name for name in found if name.rpartition(".")[2] not in OF_OTHERS}


@pytest.mark.parametrize("path", files("tests"), ids=lambda path: path.stem)
def test_tests_read_nothing_private(path):
    """Of the library they use what its users can; see ``MARS.describe``."""
    assert not private(path)


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_right(layer):
    allowed = {*LAYERS[LAYERS.index(layer) :], None}
    for path in files(layer):
        wrong = {name for name in imports(path) if layer_of(name) not in allowed}
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


# what stands beside the layers may use them, not they it
@pytest.mark.parametrize("layer", LAYERS[1:])
def test_no_layer_imports_what_stands_beside_it(layer):
    for path in files(layer):
        roots = {name.split(".")[0] for name in imports(path)}
        assert not roots & {"examples", "benchmarks", "research"}, path


def test_research_is_imported_by_itself_alone():
    """And imports layers alone."""
    for folder in ("benchmarks", "examples", "research"):
        for path in files(folder):
            roots = {name.split(".")[0] for name in imports(path)}
            if folder == "research":
                assert not roots & {"benchmarks", "examples", "tests"}, path
            else:
                assert "research" not in roots, path


def test_no_file_is_in_a_circle():
    """Of all layers but the tests, in one graph: also between parallel and marsopt."""
    paths = [path for layer in LAYERS[1:] for path in files(layer)]
    arrows = {name_of(path): imports(path) for path in paths}
    assert {"marsopt.parallel.collectives", "marsopt.rules.registry"} <= arrows.keys()
    graph = {name: found & arrows.keys() - {name} for name, found in arrows.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names it


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


def test_marsopt_is_arithmetic():
    """It imports torch, never torch.distributed, never torchtitan; and nothing else."""
    for path in files("marsopt"):
        known = {"torch", "marsopt", *sys.stdlib_module_names}
        known |= {"jaxtyping"} - when_it_runs(path)
        for name in imports(path):
            assert name.split(".")[0] in known, (path, name)
            assert not name.startswith("torch.distributed"), path


def test_one_line_of_marsopt_names_the_mesh_and_asks_for_it_where_there_are_ranks():
    """``for_model``, which cannot import what stands on it."""
    calls = [
        path.name
        for path in files("marsopt")
        if "parallel" not in path.parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func)
    ]
    assert calls == ["for_model.py"]
    done = python(
        "import sys, torch, marsopt; "
        "marsopt.for_model(torch.nn.Linear(2, 2), lr=0.1, compile=False); "
        "print('marsopt.parallel' in sys.modules)"
    )
    assert done.stdout == "False\n", done.stderr


# What the core (step, class, checkpoints, mesh) does not know, and who does: pages of
# rules, the functions by name, and what stands above the class
SATELLITES = {
    "marsopt.rules.newton_schulz": {
        *("marsopt", "marsopt.rules.orthogonal", "marsopt.rules.soap"),
        "marsopt.parallel.collectives",  # plans for nothing, to check its options
    },
    "marsopt.rules.soap": {"marsopt", "marsopt.functional.options"},
    "marsopt.rules.svrg": {"marsopt", "marsopt.optim.protocols.svrg"},
    "marsopt.optim.protocols.svrg": {"marsopt"},
    "marsopt.optim.param_groups": {
        *("marsopt", "marsopt.optim.for_model", "marsopt.parallel.torchtitan"),
        "marsopt.profiling.command",
        "marsopt.optim.advice",  # embeddings in a matrix rule's group, told by name
    },
    "marsopt.parallel.torchtitan": set(),
}


@pytest.mark.parametrize("satellite", SATELLITES)
def test_the_core_knows_satellites_by_register_alone(satellite):
    paths = [*files("marsopt"), *files("parallel")]
    users = {name_of(path) for path in paths if satellite in imports(path)}
    assert users == SATELLITES[satellite]


def test_importing_the_library_imports_no_compiler():
    """Dynamo alone takes seconds."""
    done = python("import sys, marsopt; print('torch._dynamo' in sys.modules)")
    assert done.stdout == "False\n", done.stderr


def test_few_doors_lead_to_torchtitan():
    doors = {p.relative_to(ROOT).as_posix() for f in LAYERS[1:] for p in files(f)
             if any(n.split(".")[0] == "torchtitan" for n in imports(p))}  # fmt: skip
    assert doors == {
        "parallel/torchtitan.py", "train/engine/titan.py", "train/engine/titan_cpu.py"
    }  # fmt: skip


def test_nothing_that_trains_imports_the_forecast():
    """It is a tool's room, which knows torch's process group for tests."""
    room = "train.forecast"
    users = {
        path.relative_to(ROOT).as_posix()
        for layer in LAYERS[1:]
        for path in files(layer)
        if any(name == room or name.startswith(f"{room}.") for name in imports(path))
    }
    inside = {user for user in users if user.startswith("train/forecast/")}
    assert inside
    assert users - inside == {"train/plan.py"}


def python(code: str) -> subprocess.CompletedProcess:
    """Run ``code`` in the checkout."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


# methods and functions of modules that write, move or delete files
WRITES = {
    "unlink", "rmtree", "remove", "removedirs", "write_text", "write_bytes", "rename",
    "replace", "renames", "move", "copy", "copy2", "copyfile", "copytree", "symlink_to",
    "hardlink_to", "symlink", "link", "touch", "tofile", "FileHandler", "mkstemp",
    "NamedTemporaryFile", "mkdtemp",
}  # fmt: skip
LIST, TEXT = "self._running.remove", "str.replace"


def writes(path: Path) -> Iterator[str]:
    """Calls in a file that write, move or delete files."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name.endswith(".replace") and len(node.args) > 1:
            name = TEXT
        last = name.rpartition(".")[2]
        given = [*node.args[:2], *(k.value for k in node.keywords if k.arg == "mode")]
        modes = [a.value for a in given if isinstance(a, ast.Constant)]
        to_write = any(isinstance(m, str) and set(m) & set("wax+") for m in modes)
        # without a dot it is a function of train.files or dataclasses
        opens = last in ("open", "fdopen") and to_write
        if opens or (last != name and last in WRITES):
            yield name


def test_files_are_written_in_one_place():
    """By the laws of train.files."""
    found = {
        str(path.relative_to(ROOT)): set(writes(path)) - {TEXT, LIST}
        for path in files("train")
    }
    assert "shutil.rmtree" in found.pop("train/files.py")
    assert not {path: calls for path, calls in found.items() if calls}


def test_parallel_has_one_name():
    """Two would be two classes of every name."""
    for path in files("parallel"):
        nodes = ast.walk(ast.parse(path.read_text()))
        named = [n.module for n in nodes if isinstance(n, ast.ImportFrom) and n.module]
        siblings = [name for name in named if name.startswith("marsopt.parallel")]
        assert not siblings, f"{path} imports {siblings}, expected relative imports"
    found = python("from parallel import MeshCollectives")
    assert found.returncode == 1
    assert "got an import of parallel, expected one of marsopt.parallel" in found.stderr
    found = python("from marsopt.parallel import MeshCollectives as M; print(M)")
    assert "'marsopt.parallel.collectives.MeshCollectives'" in found.stdout


def test_another_projects_package_of_this_name_is_told(tmp_path):
    """The index has one; who installed it over ours learns what to do."""
    (tmp_path / "marsopt").mkdir()
    (tmp_path / "marsopt/__init__.py").write_text("")
    (tmp_path / "marsopt/parallel").symlink_to(ROOT / "parallel")
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}]; import marsopt.parallel"
    said = python(code).stderr
    assert "expected that of torch-marsopt: pip uninstall marsopt" in said


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
