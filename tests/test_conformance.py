"""A verdict names what a port does otherwise, and says of MARS that it conforms."""

from __future__ import annotations

import math
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

import marsopt
from marsopt.conformance import (
    AUTHORS,
    DEVIATIONS,
    Adapted,
    cases,
    check,
    judge,
    verdict,
)
from marsopt.conformance.__main__ import arguments, main
from marsopt.conformance.model import simulate
from marsopt.conformance.recordings import TYPES

PORT = "marsopt.optim.mars:MARS"
ROOT = Path(__file__).parent.parent
# where make installs ports of others, apart from the environment
PORTS = ROOT / os.environ.get("MARSOPT_PORTS", ".venv-ports")
needs_ports = pytest.mark.skipif(
    not PORTS.is_dir(), reason=f"needs ports of MARS, in {PORTS.name}"
)


def words(report, ndim):
    (kind,) = [kind for kind in report.kinds if kind.ndim == ndim]
    return [sorted(d.words for d in found) for found in kind.explained]


@pytest.mark.parametrize("mars_type", TYPES)
def test_mars_conforms(mars_type):
    found = check(Adapted(marsopt.MARS, dict(compile=False)), mars_type)
    assert found.conforms and found.num_cases == len(cases(mars_type))
    assert 0 < found.largest < 1


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
        found = judge(steps, mars_type)
        departing = [kind for kind in found.kinds if kind.departure]
        assert all({deviation} in kind.explained for kind in departing)
        if departing:
            return
    raise AssertionError("it does nothing in any case: it could not be named")


class Port(torch.optim.Optimizer):
    """Another's MARS-AdamW, with faults: no correction at step 1, more than two dims
    are matrices, vectors decay as matrices do.
    """

    def __init__(self, params, lr, betas, eps, weight_decay, gamma, lr_1d, betas_1d):
        super().__init__(params, dict(lr=lr, wd=weight_decay))
        self.numbers = betas, betas_1d, eps, gamma, lr_1d / lr

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
                state["h"] = g.clone()
                state["m"].lerp_(c, 1 - beta1)
                state["v"].lerp_(c**2, 1 - beta2)
                root = (state["v"] / (1 - beta2 ** state["t"])).sqrt() + eps
                update = state["m"] / (1 - beta1 ** state["t"]) / root
                lr = group["lr"] * (1 if is_matrix else ratio)
                p.mul_(1 - lr * group["wd"]).sub_(lr * update)


def test_several_faults_of_a_port_are_named():
    port = Adapted(Port)
    assert port.lacks == [
        *("amsgrad", "is_approx", "mars_type", "optimize_1d", "weight_decay_1d")
    ]
    found = check(port)
    first = "no correction at step 1, where h is 0"
    assert not found.conforms
    assert words(found, 2) == [[first]]
    assert words(found, 1) == [["weight_decay_1d is ignored: weight_decay"]]
    more = "tensors of more than two dims are corrected too"
    assert sorted([first, more]) in words(found, 4)
    assert first in str(found) and "step 1" in str(found)


# What is said of the matrices of a port, given as docs/conformance.md has it
FAULTS = {
    "pytorch_optimizer:MARS --option mars_type=adamw --name amsgrad=ams_bound": [
        "1e-15 is added to v under the root",
        "eps is added before debiasing",
    ],
    "heavyball:AdamW --option mars=True compile_step=False --name gamma=mars_gamma": [
        "gamma and beta1 are swapped",
        "c is never clipped",
        "eps is a floor",
    ],
    "timm_alone.mars:Mars --option mars_type=adamw": ["no correction at step 1"],
}


def judged(command, *folders):
    """Run the command with folders on the path; return its status, and what it says.

    What the ports themselves compile runs as it is, which takes less.
    """
    path = os.pathsep.join(map(str, folders))
    done = subprocess.run(
        [sys.executable, "-m", "marsopt.conformance", *command.split()],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "TORCHDYNAMO_DISABLE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout or done.stderr


@needs_ports
@pytest.mark.parametrize("command", FAULTS)
def test_known_faults_of_installed_ports(command, tmp_path):
    # timm imports torchvision, which no build of torch for CPUs here comes with
    for name in ("mars.py", "_types.py"):
        (tmp_path / "timm_alone").mkdir(exist_ok=True)
        shutil.copy(PORTS / "timm" / "optim" / name, tmp_path / "timm_alone")
    status, said = judged(command, PORTS, tmp_path)
    assert status == 1, said
    matrices = said.partition("matrices (2 dims): as if")[2].partition("first at")[0]
    told = re.findall(r"^    - (.*)", matrices, re.MULTILINE)
    for line, fault in zip(told, FAULTS[command], strict=True):
        assert line.startswith(fault)


@needs_ports
@pytest.mark.parametrize("mars_type", TYPES)
def test_the_authors_class_conforms(mars_type):
    """Their file, as another package has it."""
    command = f"zij.contrib.first_order.mars:MARS --type {mars_type}"
    status, said = judged(command, PORTS)
    assert status == 0 and f"{mars_type}: conforms" in said


def test_an_option_may_be_given_twice():
    given = ["--option", "a=1", "--option", "b=2", "c=3", "--name", "lr=x"]
    found = arguments([PORT, *given, "--name", "eps=y"])
    assert found.options == ["a=1", "b=2", "c=3"]
    assert found.names == ["lr=x", "eps=y"]


def test_what_no_deviation_explains_is_said_as_such(monkeypatch):
    monkeypatch.setattr(verdict, "AT_MOST", 1)  # pairs and more take their time
    found = check(Adapted(torch.optim.SGD, dict(momentum=0.9)))
    assert not found.conforms and not any(kind.explained for kind in found.kinds)
    assert "none of the named deviations explains it" in str(found)


def test_a_case_that_raises_is_told():
    def broken(params, **arguments):
        if arguments["amsgrad"]:
            raise NotImplementedError("no amsgrad")
        return marsopt.MARS(params, compile=False, **arguments)

    found = check(broken)
    assert not found.conforms
    told = set(found.failures.values())
    assert told == {"NotImplementedError: no amsgrad"} and len(found.failures) == 2


def test_adapted_gives_the_authors_values():
    made = {}

    class Recorder:
        def __init__(self, params, lr, decay=None, other=1):
            made.update(lr=lr, decay=decay, other=other)

    Adapted(Recorder, dict(other=2), dict(weight_decay="decay"))([], **AUTHORS)
    assert made == dict(lr=3e-3, decay=0.0, other=2)


def test_arguments_behind_kwargs_are_given():
    class Named(Port):
        def __init__(self, params, learning_rate=1.0, **others):
            super().__init__(params, lr=learning_rate, **others)

    port = Adapted(Named, names=dict(lr="learning_rate"))
    assert port.lacks == Adapted(Port).lacks
    assert str(check(port)) == str(check(Adapted(Port)))

    def hidden(params, **every):
        return Port(params, **every)

    told = {name: name for name in AUTHORS if name not in port.lacks}
    assert Adapted(hidden).taken == {} and Adapted(hidden, names=told).taken == told


def test_nothing_is_said_of_a_port_that_no_case_could_run():
    def broken(params, **arguments):
        raise TypeError("unexpected beta")

    found = str(check(broken))
    assert found.startswith("mars-adamw: no case could be run\n")
    assert "cannot be run: TypeError: unexpected beta" in found
    assert "as the authors'" not in found and "departs" not in found


def test_the_command(tmp_path, capsys):
    assert main([PORT, "--option", "compile=False"]) == 0
    assert "mars-adamw: conforms (11 cases" in capsys.readouterr().out
    swapped = DEVIATIONS[0]
    arrays = {
        f"param/{case.name}/{name}": np.stack([row[name] for row in steps])
        for case in cases("mars-lion")
        for steps in [list(simulate(case, [swapped]))]
        for name in case.init
    }
    file = tmp_path / "port.safetensors"
    save_file(arrays, file)
    assert main([str(file), "--type", "mars-lion"]) == 1
    assert swapped.words in capsys.readouterr().out


@pytest.mark.parametrize(
    "given, told",
    [
        (["no_such_module:X"], "expected MODULE:CLASS"),
        (["torch.optim"], "expected MODULE:CLASS"),
        ([PORT, "--option", "lr"], "expected NAME=VALUE"),
        ([PORT, "--name", "beta=betas"], "expected arguments of the authors'"),
        (["no.safetensors"], "expected a file of safetensors"),
    ],
)
def test_what_cannot_be_used_is_one_line(given, told, capsys):
    assert main(given) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1 and "Traceback" not in error


def test_a_file_with_other_tensors_is_refused(tmp_path, capsys):
    file = tmp_path / "x.safetensors"
    save_file({"param/mars-lion-clip/w_tall": np.zeros((4, 3), np.float32)}, file)
    assert main([str(file)]) == 2
    assert "expected param/CASE/NAME" in capsys.readouterr().err


def test_the_files_are_read_without_torch():
    code = (
        "import sys\nfrom safetensors.numpy import load_file\n"
        "found = load_file('marsopt/conformance/recordings.safetensors')\n"
        "assert found['grad0/w_tall'].shape == (4, 24, 8)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_nan_departs():
    (case, *_) = cases("mars-lion")
    steps = [dict(row) for row in case.params]
    steps[1]["bias"] = np.full_like(steps[1]["bias"], math.nan)
    found = judge({case.name: steps}, "mars-lion")
    assert [kind.ndim for kind in found.kinds if kind.departure] == [1]
