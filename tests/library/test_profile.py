"""What a step costs: the counts that docs/performance.md states, and the profiler that
counts them.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import marsopt
from marsopt.profiling import command, machine
from marsopt.profiling.gpt2 import Subject
from marsopt.profiling.optimizer import profile_optimizer

ROOT = Path(__file__).parents[2]
TRITON = ROOT / os.environ.get("MARSOPT_TRITON", ".venv-triton")
WIDTH, VOCAB = 64, 2048
MATRIX = 4 * WIDTH * WIDTH  # bytes of the smallest one
# few shapes: what compiling takes grows with their number
SAME = {f"{i}.in": (4 * WIDTH, WIDTH) for i in range(3)}


def layers(num: int) -> dict[str, tuple[int, ...]]:
    """A matrix and a vector of each layer, and an embedding."""
    found = {"wte": (VOCAB, WIDTH)}
    for i in range(num):
        found |= {f"{i}.out": (WIDTH, WIDTH), f"{i}.norm": (WIDTH,)}
    return found


class Clocked(Subject):
    """Notes the CPU seconds of every step, which neighbours do not stretch."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.seconds: list[float] = []

    def __call__(self) -> None:
        start = time.process_time()
        super().__call__()
        self.seconds.append(time.process_time() - start)


def watched(rule: str, tensors, *, steps: int = 3, cautious: bool = False, **options):
    """Return the report, and the CPU seconds of the first step."""
    clocked = Clocked(tensors, rule, num_steps=steps + 2, **options)
    for group in clocked.optimizer.param_groups if cautious else ():
        group["cautious_weight_decay"] = True
    report = profile_optimizer(clocked, title=rule, steps=steps, cold=False)
    return report, clocked.seconds[0]


@pytest.fixture(scope="module", autouse=True)
def several_threads():
    """Generated loops are parallel ones, as on any machine, whose rates are measured
    once.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("copy_bandwidth", "matmul_rate"):
            measured = functools.cache(getattr(machine, name))
            patch.setattr(machine, name, measured)
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def deep():
    return watched("mars-adamw", layers(24))


@pytest.fixture(scope="module")
def shallow(deep):
    """After ``deep``, which pays for what a process compiles but once."""
    return watched("mars-adamw", layers(2), steps=49)


NARROW = dict(state_dtype=torch.bfloat16, stochastic_rounding=True)
HALF = dict(h_dtype=torch.bfloat16, cautious=True)  # cautious decay adds no byte


@pytest.mark.parametrize(
    ("rule", "least", "options"),
    [("adamw", 24, NARROW), ("mars-adamw", 38, HALF), ("mars-m", 40, {})],
)
def test_bytes_a_parameter_are_the_floor(rule, least, options):
    """With both clips, to 0.2%: for the norms, the update and, by a matrix rule, moving
    x along the owners' results.
    """
    report, _ = watched(rule, SAME, **options)
    assert report.floor.num_bytes == least * report.num_params
    assert report.num_bytes == pytest.approx(report.floor.num_bytes, rel=2e-3)
    names = ["measure", "update", "update"][: 3 if rule == "mars-m" else 2]
    assert [g.name for g in report.graphs] == names
    assert [g.num_runs for g in report.graphs] == [len(SAME)] * len(names)
    assert report.breaks == report.recompiles == report.printed == []
    assert all(g.peak_bytes < MATRIX for g in report.graphs)
    largest = 4 * 4 * WIDTH * WIDTH
    # the owners' results, and what Newton-Schulz holds beside them of one matrix
    held = largest * (len(SAME) + 2) if rule == "mars-m" else MATRIX
    assert report.peak_bytes < held


def test_no_recompiles_while_every_hyperparameter_moves(shallow):
    """lr, gamma, betas, weight decay and both clips, over 51 steps."""
    report, _ = shallow
    assert report.num_calls == 51
    assert report.recompiles == []
    assert report.peak_bytes < MATRIX


def test_graphs_do_not_grow_with_depth(shallow, deep):
    """2 and 24 layers, of 44 bytes a parameter: as many graphs, kernels and characters
    of generated code. The time is the CPU's in the first step, which neighbours do not
    stretch: tracing and code generation; the C++ compiler's follows the code's size.
    """
    (two, seconds_two), (many, seconds_many) = shallow, deep
    assert many.num_tensors > 9 * two.num_tensors
    assert many.num_bytes == pytest.approx(44 * many.num_params, rel=2e-3)
    assert len(many.graphs) == len(two.graphs)
    for a, b in zip(two.graphs, many.graphs, strict=True):
        assert (a.name, len(a.kernels)) == (b.name, len(b.kernels))
        assert len(b.source) <= 1.1 * len(a.source)
    assert seconds_many <= 3 * seconds_two  # of 12 times as many tensors


def test_copies_of_small_tensors_are_counted_apart(shallow):
    """Of vectors: g goes in; x, m and v go in and out."""
    vectors = sum(torch.Size(s).numel() for s in layers(2).values() if len(s) == 1)
    assert shallow[0].floor.copied == 2 * 4 * (1 + 2 * 3) * vectors


# ---- a function of the user's ------------------------------------------------------


def breaks(x):
    y = x.sin()
    print(end="")
    return y.cos()


def test_a_break_is_told_with_its_place_and_reason(capsys):
    """And progress on standard error."""
    report = marsopt.profile(torch.compile(breaks), torch.ones(8), steps=2, cold=False)
    printed = capsys.readouterr()
    assert printed.out == ""
    for word in ("first call", "compiled in", "breaks", "2 calls", "copy"):
        assert word in printed.err
    (found,) = report.breaks
    line = breaks.__code__.co_firstlineno + 2
    assert found.where == f"{__file__}:{line}"
    assert "print" in found.reason
    assert len(report.graphs) == 2
    assert f"test_profile.py:{line}: " in str(report)


def test_bytes_and_kernels_of_a_plain_function(tmp_path):
    """Compiled here, since nothing in it is: one kernel reads x and writes y."""
    x = torch.ones(1024, 1024)
    report = marsopt.profile(
        lambda x: (x + 1).sqrt(),
        x,
        steps=2,
        cold=False,
        trace=tmp_path / "trace.json",
        compile_log=tmp_path / "log",
    )
    (found,) = report.graphs
    assert report.num_bytes == 2 * x.nbytes
    assert report.num_kernels == 1
    assert found.peak_bytes == report.peak_bytes == x.nbytes
    assert report.allowed_seconds == 2 * x.nbytes / report.copy_bandwidth
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    (log,) = (tmp_path / "log").iterdir()
    assert "inductor_output_code" in log.read_text()


def test_recompiles_are_told_with_their_reason():
    sizes = iter(range(2, 20))
    multiply = torch.compile(lambda x, n: x * n)
    report = marsopt.profile(
        lambda: multiply(torch.ones(4), next(sizes)), steps=2, cold=False
    )
    assert report.recompiles
    assert "n == 2" in report.recompiles[0].reason
    assert f"{len(report.recompiles)} in 4 calls" in str(report)


def switching(values):
    """A step of MARS at which the group's ``clip`` is the next of ``values``."""
    params = [torch.nn.Parameter(torch.randn(4, 4)) for _ in range(2)]
    optimizer, clips = marsopt.MARS(params, lr=1e-3, compile=True), iter(values)

    def step():
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.param_groups[0]["clip"] = next(clips)
        optimizer.step()

    return step


def test_graphs_of_a_new_binding_are_recompiles_with_their_cause(capsys):
    """To torch they are new functions, which it compiles for the first time. A formula
    that was there before has its graphs still.
    """
    step = switching([0.5, 0.7, None, None, 2.0])
    report = marsopt.profile(step, steps=3, cold=False, progress=False)
    assert "calls" not in capsys.readouterr().err
    why = "compiled again: a new binding, since groups, parameters or state changed"
    (told,) = [(r.name, r.call, r.reason) for r in report.recompiles]
    assert told == ("update", 3, why)
    assert [g.name for g in report.graphs] == ["measure", "update", "update"]
    table = str(report)
    assert "recompiles    1 in 5 calls" in table
    assert f"update: {why} (call 3)" in table
    assert report.to_dict()["recompiles"][0]["call"] == 3


def test_a_backward_pass_counts_into_its_graph():
    x = torch.ones(512, 512, requires_grad=True)
    loss = torch.compile(lambda x: (x.sin() * x).sum())

    def step():
        x.grad = None
        loss(x).backward()

    (found,) = marsopt.profile(step, steps=2, cold=False).graphs
    assert len(found.kernels) >= 2
    assert found.num_bytes >= 3 * x.nbytes  # x twice, its gradient


def test_what_runs_eagerly_is_not_counted():
    """Not as nothing either."""
    report = marsopt.profile(
        lambda x: (x + 1).neg_(), torch.ones(1000), steps=2, compile=False, cold=False
    )
    assert report.graphs == []
    assert report.num_bytes is report.num_kernels is report.allowed_seconds is None
    assert report.num_eager_ops == 2
    assert 4000 <= report.peak_bytes < 4100
    rows = dict(report.rows())
    for name in ("kernels", "bytes"):
        assert rows[name] == "not counted: nothing is compiled"
    assert rows["eager"].startswith("2 operators a call")
    assert "with compiling" not in rows["first call"]
    assert json.loads(json.dumps(report.to_dict()))["num_bytes"] is None


def test_operators_beside_the_graphs_are_told_apart():
    sine = torch.compile(torch.sin)

    def step(x):
        return sine(x).mul(2).add_(1)

    report = marsopt.profile(step, torch.ones(8), steps=2, cold=False)
    assert report.num_kernels == 1
    assert report.num_eager_ops == 2
    assert "2 operators a call beside these graphs" in str(report)


def test_without_torch_compile_there_is_nothing_to_profile(monkeypatch):
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    with pytest.raises(ValueError, match="got TORCH_COMPILE_DISABLE=1, expected"):
        command.arguments([])


def test_nothing_stays_switched_on():
    """Neither logs nor counts nor caches."""
    import logging

    from torch._inductor import config, metrics
    from torch._inductor.compile_fx import inductor_metrics_log

    def state():
        return (
            list(logging.getLogger("torch.__trace").handlers),
            list(inductor_metrics_log.filters),
            inductor_metrics_log.level,
            len(metrics.nodes_num_elem),
            config.fx_graph_cache,
        )

    before = state()

    def fails(x):
        raise RuntimeError("of its own")

    with pytest.raises(RuntimeError, match="of its own"):
        marsopt.profile(fails, torch.ones(3))
    assert state() == before


@pytest.mark.parametrize(
    "step_fn, options, message",
    [
        (torch.ones(3), {}, "got a Tensor, expected a function"),
        (breaks, {"steps": 0}, "got steps=0, expected at least 1"),
        (breaks, {"device": "tpu"}, "got device='tpu', expected 'cpu' or 'cuda'"),
    ],
)
def test_bad_arguments(step_fn, options, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        marsopt.profile(step_fn, **options)


# ---- the command -------------------------------------------------------------------


TITLE = "adamw with its clips on mine:model: 2 tensors, 16,448 parameters\n"
ARGV = ["--model=mine:model", "--rule=adamw", "--steps=2", "--warm", "--source"]


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The folder of a user's model, from which the command is called."""
    shapes = {"embed.weight": (256, 64), "gain": [64]}
    (tmp_path / "mine.py").write_text(f"def model():\n    return {shapes}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("mine", None)  # others have modules of this name


def test_the_command_prints_and_writes(mine, capfd):
    out, trace = mine / "new/folder/report.json", mine / "other/trace.json"
    command.run(command.arguments([*ARGV, "--json", str(out), "--trace", str(trace)]))
    printed, progress = capfd.readouterr()
    assert printed.startswith(TITLE)
    assert "update, compiled in" in progress
    assert "Memory block of unknown size" not in progress
    found = json.loads(out.read_text())
    keys = {e["name"] for e in json.loads(trace.read_text())["traceEvents"]}
    for graph in found["graphs"]:
        key = graph["compile_id"]
        assert f"Torch-Compiled Region: {key}" in keys
        assert re.search(rf"^  {key} +{graph['name']}: ", printed, re.MULTILINE)
        assert graph["source"] in printed
    # of each, one for the embedding and one for the rows of small tensors
    names = [g["name"] for g in found["graphs"]]
    assert names == ["measure", "measure", "update", "update"]
    assert found["recompiles"] == []
    assert found["bytes_per_param"] == pytest.approx(32, rel=0.02)
    for word in ("floor", "first call", "peak memory", "# no kernel is printed here"):
        assert word in printed


@pytest.mark.skipif(not (TRITON / "triton").is_dir(), reason=f"needs {TRITON.name}")
def test_the_command_prints_the_kernels_source(mine):
    """As a user calls it, without a warning of runpy's; on a CPU by Triton's
    interpreter: no graph takes a part.
    """
    out, places = mine / "report.json", os.pathsep.join([str(ROOT), str(TRITON)])
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-m", "marsopt.profile"]
        + [*ARGV, "--json", out],
        env={**os.environ, "PYTHONPATH": places, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(TITLE)
    found = json.loads(out.read_text())
    assert found["graphs"] == []
    assert [k["num_launches"] for k in found["printed"]] == [2, 1, 1]
    assert all(kernel["source"] in done.stdout for kernel in found["printed"])
    assert found["num_bytes"] == sum(found["floor"][k] for k in ("norms", "update"))
    assert found["bytes_per_param"] == 32 and found["floor"]["copied"] == 0


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--layers", "0"], "got --layers 0, expected at least 1"),
        (["--json", f"{__file__}/report.json"], "expected a file in a folder"),
        (["--trace", "/dev/null/trace.json"], "expected a file in a folder"),
        (["--json", "."], "expected a file in a folder"),
        (["--layers", "100000"], "GB, expected at most the"),
    ],
)
def test_the_command_refuses(argv, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        command.arguments(argv)


def build():
    """What --model names below."""
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Embedding(64, 32), torch.nn.Linear(32, 16))
    return model.requires_grad_()


def sizes():
    return {"embed.weight": (64, 32), "mlp.weight": torch.empty(16, 32), "gain": [16]}


def model_of(name, *options):
    return command.arguments([f"--model={__name__}:{name}", *options])


def test_a_model_of_the_users_has_its_shapes():
    args = model_of("build")
    assert args.rule == "moonlight"
    assert args.tensors == {"0.weight": (64, 32), "1.weight": (16, 32), "1.bias": (16,)}
    assert args.tables == {"0.weight"}
    named = model_of("sizes")
    assert list(named.tensors.values()) == list(args.tensors.values())
    assert named.tables == {"embed.weight"}
    changed = command.arguments(["--layers=1", "--h-dtype=bfloat16", "--rule=lion"])
    said = command.title(changed)
    assert said == "lion with its clips on gpt2-small, 1 layers, h in bfloat16"


@pytest.mark.parametrize(
    "name, message",
    [
        ("gpt3", "got --model gpt3, expected one of gpt2-small"),
        ("no_such:model", "(No module named 'no_such'), expected MODULE:FUNCTION that"),
        (f"{__name__}:other", "has no attribute 'other'), expected MODULE:FUNCTION"),
    ],
)
def test_a_model_that_cannot_be_profiled(name, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        command.arguments(["--model", name])
    with pytest.raises(ValueError, match="got --width with --model .*change the funct"):
        model_of("sizes", "--width=8")
