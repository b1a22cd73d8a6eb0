"""A verdict names what a port does otherwise, and says of MARS that it conforms."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from tests.conformance.__main__ import main
from tests.conformance.deviations import DEVIATIONS
from tests.conformance.model import cases, simulate
from tests.conformance.port import Port, check
from tests.conformance.recordings import TYPES
from tests.conformance.verdict import judge

ROOT = Path(__file__).parents[2]
# where make installs ports of others, apart from the environment
PORTS = ROOT / os.environ.get("MARSOPT_PORTS", ".venv-ports")
needs_ports = pytest.mark.skipif(
    not PORTS.is_dir(), reason=f"needs ports of MARS, in {PORTS.name}"
)


def judged(*command, folders=(), **environment):
    """Run the command with folders on the path; return its process. What the ports
    compile runs eagerly, to save time.
    """
    path = os.pathsep.join(map(str, folders))
    environment |= {"PYTHONPATH": path, "TORCHDYNAMO_DISABLE": "1"}
    return subprocess.run(
        [sys.executable, "-m", "tests.conformance", *map(str, command)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def words(report, ndim):
    (kind,) = [kind for kind in report.kinds if kind.ndim == ndim]
    return [sorted(d.words for d in some) for some in kind.explanations]


@pytest.mark.parametrize("mars_type", TYPES)
def test_the_oracle_is_the_authors_code(mars_type):
    for case in cases(mars_type):
        for got, want in zip(simulate(case), case.params, strict=True):
            for name in got:
                np.testing.assert_allclose(got[name], want[name], rtol=0, atol=1e-7)


@pytest.mark.parametrize("deviation", DEVIATIONS, ids=lambda d: d.words)
def test_a_deviation_is_named(deviation):
    """Alone, in the first type of MARS and of each kind of tensors on which it acts."""
    for mars_type in TYPES:
        steps = {c.name: list(simulate(c, [deviation])) for c in cases(mars_type)}
        report = judge(steps, mars_type)
        departing = [kind for kind in report.kinds if kind.departure]
        assert all({deviation} in kind.explanations for kind in departing)
        if departing:
            return
    raise AssertionError("it does nothing in any case: it could not be named")


class Faulty(torch.optim.Optimizer):
    """A MARS-AdamW with faults: no correction at step 1, more than two dims are
    matrices, vectors decay as matrices do; it refuses amsgrad.
    """

    def __init__(
        self, params, lr, gamma, lr_1d, betas_1d, kind="adamw", steps=9, **others
    ):
        if others["amsgrad"] or kind != "adamw":
            raise NotImplementedError(f"amsgrad, {kind}")
        super().__init__(params, dict(lr=lr, wd=others["decay"]))
        self.numbers = others["betas"], betas_1d, others["eps"], gamma, lr_1d / lr
        self.steps = steps

    @torch.no_grad()
    def step(self):
        betas, betas_1d, eps, gamma, ratio = self.numbers
        for group in self.param_groups:
            for p in group["params"]:
                state, g = self.state[p], p.grad
                is_matrix = p.ndim >= 2
                beta1, beta2 = betas if is_matrix else betas_1d
                if not state:
                    state.update(t=0, m=torch.zeros_like(p), v=torch.zeros_like(p), h=g)
                state["t"] += 1
                c = g
                if is_matrix:
                    c = g + gamma * beta1 / (1 - beta1) * (g - state["h"])
                    c = c / c.norm().clamp(min=1)
                state["h"] = g.clone() if state["t"] < self.steps else g
                state["m"].lerp_(c, 1 - beta1)
                state["v"].lerp_(c**2, 1 - beta2)
                root = (state["v"] / (1 - beta2 ** state["t"])).sqrt() + eps
                update = state["m"] / (1 - beta1 ** state["t"]) / root
                lr = group["lr"] * (1 if is_matrix else ratio)
                p.mul_(1 - lr * group["wd"]).sub_(lr * update)


class Inherited(Faulty):
    def __init__(self, params, betas, eps, decay, amsgrad, **others):
        others |= dict(betas=betas, eps=eps, decay=decay, amsgrad=amsgrad)
        super().__init__(params, **others)


NAMES = dict(weight_decay="decay", mars_type="kind")


def test_several_faults_of_a_port_are_named():
    """Its arguments have other names, some behind ``**others``; its types have no
    prefix.
    """
    port = Port(Inherited, names=NAMES)
    assert port.lacks == ["is_approx", "optimize_1d", "weight_decay_1d"]
    report = check(port, "mars-adamw")
    first = "no correction at step 1, where h is 0"
    assert words(report, 2) == [[first]]
    assert words(report, 1) == [["weight_decay_1d is ignored: weight_decay"]]
    more = "tensors of more than two dims are corrected too"
    assert sorted([first, more]) in words(report, 4)
    assert not report.conforms and first in str(report) and "step 1" in str(report)
    assert set(report.failures.values()) == {"NotImplementedError: amsgrad, adamw"}

    lion = str(check(port, "mars-lion"))
    assert lion.startswith("mars-lion: no case could be run\n")
    assert "raises NotImplementedError: amsgrad, lion" in lion and "dims" not in lion


# What is said of the matrices of a port, as docs/conformance.md has it
FAULTS = {
    "marsopt:MARS --option compile=False": [],
    "zij.contrib.first_order.mars:MARS --type mars-lion": [],  # the authors' file
    "pytorch_optimizer:MARS --type mars-lion": [],
    "pytorch_optimizer:MARS --name amsgrad=ams_bound": [
        "1e-15 is added to v under the root",
        "eps is added before debiasing",
    ],
    "heavyball:AdamW --option mars=True --option compile_step=False "
    "--name gamma=mars_gamma": [
        "gamma and beta1 are swapped",
        "c is never clipped",
        "eps is a floor",
    ],
    "timm_alone.mars:Mars": ["no correction at step 1"],
}


EACH = """
import contextlib, io, json, sys
from tests.conformance.__main__ import main

found = []
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = main(arguments)
    found.append((code, printed.getvalue()))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    """What the command says of each port: (exit status, output); in one process, since
    imports take longer than verdicts.
    """
    folder = tmp_path_factory.mktemp("ports")
    # timm imports torchvision, which no build of torch for CPUs here comes with
    (folder / "timm_alone").mkdir()
    for name in ("mars.py", "_types.py"):
        shutil.copy(PORTS / "timm" / "optim" / name, folder / "timm_alone")
    commands = json.dumps([command.split() for command in FAULTS])
    path = os.pathsep.join(map(str, (PORTS, folder)))
    done = subprocess.run(
        [sys.executable, "-c", EACH, commands],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "TORCHDYNAMO_DISABLE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(FAULTS, json.loads(done.stdout), strict=True))


@needs_ports
@pytest.mark.parametrize("command", FAULTS)
def test_faults_of_installed_ports(command, verdicts):
    code, out = verdicts[command]
    conforms = re.search(r"^mars-\w+: conforms", out, re.MULTILINE)
    assert code == (0 if conforms else 1), out
    matrices = out.partition("matrices (2 dims): as if")[2]
    lines = re.findall(r"^    - (.*)", matrices.partition("first at")[0], re.MULTILINE)
    for line, fault in zip(lines, FAULTS[command], strict=True):
        assert line.startswith(fault)


def test_a_file_is_judged_without_torch(tmp_path):
    """As of a port to JAX or MLX, which ran one case and came to NaN in vectors."""
    (tmp_path / "torch.py").write_text("raise ImportError('no torch')")
    swapped, case = DEVIATIONS[0], cases("mars-lion")[0]
    steps = list(simulate(case, [swapped]))
    arrays = {
        f"param/{case.name}/{name}": np.stack([row[name] for row in steps])
        for name in case.init
    }
    arrays[f"param/{case.name}/bias"][1] = np.nan
    file = tmp_path / "port.safetensors"
    save_file(arrays, file)
    done = judged(file, "--type", "mars-lion", folders=[tmp_path])
    assert done.returncode == 1, done.stderr
    matrices, _, vectors = done.stdout.partition("vectors (1 dim): ")
    assert swapped.words in matrices and vectors.startswith("none of the named")


@pytest.mark.parametrize(
    ("arguments", "end"),
    [
        (["no_such_module:X"], "expected MODULE:CLASS"),
        (["broken:X"], "expected MODULE:CLASS"),
        (["torch.optim:SGD", "--option", "lr"], "expected NAME=VALUE"),
        (["torch.optim:SGD", "--name", "beta=x"], "expected arguments of the authors'"),
        (["{folder}/other.safetensors"], "expected param/CASE/NAME"),
    ],
)
def test_what_cannot_be_used_is_one_line(arguments, end, tmp_path, monkeypatch, capsys):
    shape = {"param/mars-lion-clip/w_tall": np.zeros((4, 3), np.float32)}
    save_file(shape, tmp_path / "other.safetensors")
    (tmp_path / "broken.py").write_text("raise RuntimeError('of two\\nlines')")
    arguments = [text.format(folder=tmp_path) for text in arguments]
    monkeypatch.syspath_prepend(tmp_path)
    try:
        code = main(arguments)
    except SystemExit as ended:
        code = ended.code
    told = capsys.readouterr().err
    assert code == 2
    assert end in told and told.count("\n") == 1
