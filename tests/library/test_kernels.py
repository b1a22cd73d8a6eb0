"""Printed kernels: equal to the eager function in Triton's interpreter. What they are
compiled to is in tests/application/test_rehearsal.py.

Triton's interpreter is chosen for a whole process. The first test starts one, which
runs the other tests of this file.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import weakref
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_leaves

import marsopt
from marsopt.parallel import MeshCollectives
from marsopt.rules import numerics
from marsopt.rules.component import Numbers, number_fields
from marsopt.rules.lion import SignAverage
from marsopt.rules.newton_schulz import NewtonSchulz
from marsopt.rules.numerics import working, working_dtype
from marsopt.step import graphs, kernels
from marsopt.step.expressions import Unprintable
from marsopt.step.graphs import missing_for, resolve_compile
from marsopt.step.kernel_runner import Kernels, update_kernel
from marsopt.step.kernels import (
    AddressTable,
    Blocks,
    DecisionKernel,
    Kernel,
    SumsKernel,
    Tables,
    UpdateKernel,
    available,
    build,
)
from marsopt.step.printer import OPTIONS, print_sums, print_update
from marsopt.step.source import GIVEN
from tests.library.test_memory import by_data, by_to

ROOT = Path(__file__).parents[2]
FILES = [
    Path(__file__).with_name(f"test_{n}.py") for n in ("layouts", "master_weights")
]
TRITON = ROOT / os.environ.get("MARSOPT_TRITON", ".venv-triton")
HAS_TRITON = bool(importlib.util.find_spec("triton")) or (TRITON / "triton").is_dir()
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(
    not IS_INTERPRETED, reason="runs in Triton's interpreter"
)
# NumPy, which interprets, warns of infinite and undefined results
anything = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CPU = torch.device("cpu")
F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16


@pytest.mark.skipif(IS_INTERPRETED, reason="runs inside of itself")
@pytest.mark.skipif(not HAS_TRITON, reason=f"needs Triton, here or in {TRITON.name}")
def test_in_a_process_with_triton():
    command = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "interp"]
    places = os.pathsep.join([str(ROOT), str(TRITON)])
    environment = {"PYTHONPATH": places, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, *command, __file__, *map(str, FILES)],
        cwd=ROOT,
        env={**os.environ, **environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout + done.stderr


# ---- formulas of the rules -----------------------------------------------------------

LR, STEPS = 0.1, torch.tensor([1.0, 7.0, 3.0, 2.0, 4.0], dtype=F64)  # of each part


def scalars_of(preconditioner, has_h, dtype):
    """Columns of a step: weights of g and h, a key in two halves, the rule's own."""
    weights = [0.7 + 0.01 * STEPS, -0.2 * STEPS] if has_h else [0.7 + 0.01 * STEPS]
    key = numerics.step_key(STEPS, torch.arange(5) * 77)
    numbers = Numbers(lr=LR, **number_fields(preconditioner))
    own = [value + 0 * STEPS for value in preconditioner.scalars(STEPS, numbers)]
    columns = [*weights, key >> 16, key & numerics.HALF, *own]
    return torch.stack([column.to(dtype) for column in columns], 1)


def new_values(preconditioner, tensors, columns, position, *, rounds=False):
    """What a step makes of a part, as a step of the engine does."""
    x, c = working(tensors["x"]), columns[0] * working(tensors["g"])
    clipped = c
    if "h" in tensors:
        weight, *columns = columns[1:]
        c = c + weight * working(tensors["h"])
    else:
        columns = columns[1:]
    high, low, *own = columns
    key = (high.to(torch.int64) << 16) | low.to(torch.int64)
    buffers = {k: working(tensors[k]) for k in preconditioner.buffers}
    out, new = preconditioner.update(x, c, buffers, tuple(own))
    if rounds:
        noise = [numerics.noise(position, key, i) for i in range(len(new))]
        pairs = zip(new.items(), noise, strict=True)
        new = {k: numerics.stochastic(value, bits) for (k, value), bits in pairs}
    if "h" in tensors:
        new["h"] = clipped
    name = "o" if preconditioner.matrix_only else "x"
    return {**new, name: new["m"] if out is None else out}


def applied(preconditioner, tensors, columns, position):
    """What a step makes of x, given the owners' results."""
    x, o = working(tensors["x"]), working(tensors["o"])
    _, _, _, *own = columns
    return {"x": preconditioner.apply(x, o, tuple(own), 0.3)}


def operands_of(preconditioner, *, x=F32, state=None, h=None, applies=False):
    """Dtypes of a formula's operands."""
    if applies:
        return {"x": x, "o": BF16}
    operands = {"x": x, "g": x} | ({} if h is None else {"h": h})
    operands |= dict.fromkeys(preconditioner.buffers, state or x)
    return operands | ({"o": x} if preconditioner.matrix_only else {})


AdamW, Lion, Orthogonal = marsopt.AdamW, marsopt.Lion, marsopt.Orthogonal
ROUNDED = dict(state=BF16, rounds=True)
FORMULAS = {
    "adamw": (AdamW(), {}),
    "adamw, all options": (
        AdamW(amsgrad=True, epsilon_hat=True, nesterov=True, weight_decay=0.1),
        dict(x=BF16, state=F32, h=BF16),
    ),
    "adamw, weight of c": (AdamW(nesterov=0.2, cautious_weight_decay=True), {}),
    "adamw, float64": (AdamW(amsgrad=True, eps=0.0), dict(x=F64, h=F64)),
    "adamw, float16": (AdamW(), dict(x=F16, state=F32)),
    "adamw, rounded": (AdamW(amsgrad=True), dict(**ROUNDED, h=F32)),
    "lion": (Lion(weight_decay=0.1), dict(h=F32)),
    "lion, rounded": (Lion(cautious_weight_decay=True), dict(x=BF16, **ROUNDED)),
    "sign of an average": (SignAverage(), dict(h=F32)),
    "orthogonal": (Orthogonal(), dict(h=F32)),
    "orthogonal, nesterov": (Orthogonal(nesterov=True), dict(x=BF16)),
    "orthogonal, applied": (
        Orthogonal(cautious_weight_decay=True, weight_decay=0.1),
        dict(applies=True),
    ),
    "soap, applied": (marsopt.SOAP(weight_decay=0.1), dict(x=BF16, applies=True)),
}


def body_of(name):
    """The body of a formula, its operands and its table of scalars."""
    preconditioner, options = FORMULAS[name]
    options = dict(options)
    rounds = options.pop("rounds", False)
    operands = operands_of(preconditioner, **options)
    table = scalars_of(preconditioner, "h" in operands, working_dtype_of(operands))
    if options.get("applies"):
        return partial(applied, preconditioner), operands, table
    return partial(new_values, preconditioner, rounds=rounds), operands, table


def working_dtype_of(operands):
    return working_dtype(torch.empty(0, dtype=operands["x"]))


def printed(name):
    body, operands, table = body_of(name)
    return print_update(f"{name}", body, operands, table.shape[1], table.dtype)


# ---- in the interpreter --------------------------------------------------------------

SMALL = 64  # elements of a program
# four tensors: the first has two parts, the second begins at an odd address, the third
# has no gradient, and the last one does not move
TENSORS = (0, 0, 1, 2, 3)
OFFSETS = torch.tensor([0, 3 * SMALL, 0, 0, 0])
SIZES = [3 * SMALL, 41, 2 * SMALL + 7, SMALL + 1, SMALL]
OK = torch.tensor([True, True, True, True, False])
GUARD = 16  # elements beside each tensor, which nothing may write


class Memory:
    """Tensors of each operand, in memory with a guard around each."""

    def __init__(self, operands):
        lengths = [SIZES[0] + SIZES[1], *SIZES[2:]]
        self.whole = {
            name: [torch.randn(n + 2 * GUARD + 1).to(dtype) for n in lengths]
            for name, dtype in operands.items()
        }
        for name in operands.keys() - {"x", "g", "h", "m", "o"}:  # squares
            for tensor in self.whole[name]:
                tensor.abs_()
        self.tensors = {
            name: [
                t[self.start(i) :][:n]
                for i, (t, n) in enumerate(zip(ts, lengths, strict=True))
            ]
            for name, ts in self.whole.items()
        }
        if "g" in operands:
            self.tensors["g"][2].zero_()

    @staticmethod
    def start(i):
        return GUARD + (i == 1)

    def addresses(self):
        lists = {k: [t.data_ptr() for t in ts] for k, ts in self.tensors.items()}
        if "g" in lists:
            lists["g"][2] = 0
        return lists

    def part(self, name, i):
        tensor = self.tensors[name][TENSORS[i]]
        return tensor[OFFSETS[i] :][: SIZES[i]].view(1, -1)

    def copy(self):
        return {k: [t.clone() for t in ts] for k, ts in self.whole.items()}


def tables_of(operands, addresses, tensors=TENSORS, offsets=OFFSETS):
    """The tables of addresses of each operand's tensors."""

    def sent(names):
        dtypes = [operands[name] for name in names]
        table = AddressTable(dtypes, tensors, offsets, CPU)
        return table.on_device([addresses[name] for name in names])

    fixed = sent([name for name in operands if name not in GIVEN])
    return Tables(fixed, *(sent([n]) if n in operands else fixed for n in GIVEN))


def blocks_of():
    return Blocks(SIZES, CPU, block=SMALL)


def position_of(i):
    return torch.arange(SIZES[i]).view(1, -1)


@interpreted
@pytest.mark.parametrize("name", FORMULAS)
def test_interpreted_update_is_the_eager_one(name):
    body, operands, scalars = body_of(name)
    memory = Memory(operands)
    tables = tables_of(operands, memory.addresses())
    want = memory.copy()
    for i in [i for i, moves in enumerate(OK) if moves]:
        tensors = {k: memory.part(k, i) for k in operands}
        columns = tuple(scalars[i].view(-1, 1, 1))
        for k, value in body(tensors, columns, position_of(i)).items():
            first = memory.start(TENSORS[i]) + OFFSETS[i]
            want[k][TENSORS[i]][first:][: SIZES[i]] = value.view(-1).to(operands[k])
    kernel = UpdateKernel(printed(name))
    kernel(blocks_of(), tables, OK, scalars)
    for k, dtype in operands.items():
        ulps = dict(rtol=2 * torch.finfo(dtype).eps, atol=1e-7 if dtype == F32 else 0)
        for found, expected in zip(memory.whole[k], want[k], strict=True):
            torch.testing.assert_close(
                found, expected, **ulps, msg=partial("{} {}".format, k)
            )


@interpreted
@anything
def test_interpreted_rounding_has_the_bits_of_the_eager_one():
    def body(tensors, columns, position):
        noise = numerics.noise(position, columns[0].to(torch.int64), 1)
        return {"m": numerics.stochastic(tensors["x"], noise)}

    operands = {"x": F32, "m": BF16}
    memory = Memory(operands)
    memory.tensors["x"][0][:4] = torch.tensor([torch.inf, torch.nan, 3.4e38, -0.0])
    tables = tables_of(operands, memory.addresses())
    scalars = torch.arange(5.0).view(5, 1) * 12345
    kernel = UpdateKernel(print_update("rounding", body, operands, 1))
    kernel(blocks_of(), tables, OK, scalars)
    for i in range(4):
        columns = (scalars[i].view(1, 1),)
        expected = body({"x": memory.part("x", i)}, columns, position_of(i))["m"]
        found = memory.part("m", i)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


OPERATORS = {
    "arithmetic": lambda x, y, s: (2 - x) * y / (1 + s * s) + x.abs() - x.sign(),
    "roots": lambda x, y, s: x.abs().sqrt() + y.abs().sqrt(),
    "limits": lambda x, y, s: x.clamp(min=0.0) + torch.maximum(x, y).clamp(max=2.0),
    "signs": lambda x, y, s: -x * torch.ones_like(y) + torch.minimum(x, y) + 1 / s,
    "columns": lambda x, y, s: sum(torch.stack([x, y, -x], 1)[:, :2].unbind(1)),
    "choices": lambda x, y, s: torch.where((x > y) & (y != s), x, 1e-42) + (x <= 0) * y,
    "halves": lambda x, y, s: x.to(BF16) * 0.5 + x.to(F16).double() + y,
    "bits": lambda x, y, s: (x.view(torch.int32) >> 3 & ~5 | 1 << 20).view(F32),
    "words": lambda x, y, s: (
        (x.to(BF16).view(torch.int16).to(torch.int32) << 16)
        + y.to(torch.int8).to(torch.int32).clamp(min=0)
    ).view(F32),
    "truth": lambda x, y, s: torch.isfinite(x).float(),
    "shapes": lambda x, y, s: (x[None].view(1, -1) + s.expand_as(x)).detach(),
}


@interpreted
@anything
@pytest.mark.parametrize("dtype", [F32, F64])
def test_interpreted_operators_are_the_eager_ones(dtype):
    if dtype == F64:
        chosen = {k: v for k, v in OPERATORS.items() if k not in ("bits", "words")}
    else:
        chosen = OPERATORS

    def body(tensors, columns, position):
        x, y = tensors["x"], tensors["y"]
        return {k: v(x, y, columns[0]).reshape(1, -1) for k, v in chosen.items()}

    operands = {"x": dtype, "y": dtype} | dict.fromkeys(chosen, dtype)
    x, y = torch.randn(2, 1, 50, dtype=dtype).mul(16).round() / 16  # exact in bfloat16
    x[0, :5] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0])
    results = {k: torch.empty_like(x) for k in chosen}
    parts = Blocks([50], CPU, block=SMALL)
    tensors = dict(x=x, y=y) | results
    addresses = {name: [tensor.data_ptr()] for name, tensor in tensors.items()}
    tables = tables_of(operands, addresses, [0], torch.tensor([0]))
    scalars = torch.full((1, 1), 0.7, dtype=dtype)
    kernel = UpdateKernel(print_update("operators", body, operands, 1, dtype))
    kernel(parts, tables, torch.tensor([True]), scalars)
    for k, value in body({"x": x, "y": y}, (scalars,), None).items():
        torch.testing.assert_close(
            results[k], value.to(dtype), equal_nan=True, msg=partial("{} {}".format, k)
        )


@interpreted
def test_interpreted_sums_are_right_and_repeat_their_bits():
    def body(tensors):
        g, h = working(tensors["g"]), working(tensors["h"])
        return g * g, g * h, 1 + 0 * h

    operands = {"x": F32, "g": BF16, "h": F32}
    memory = Memory(operands)
    fixed, grads, _ = tables_of(operands, memory.addresses())
    kernel = SumsKernel(print_sums("sums of g and h", body, operands))
    found = kernel(blocks_of(), fixed, grads)
    assert found.dtype == F64
    for i, size in enumerate(SIZES):
        g, h = memory.part("g", i).double(), memory.part("h", i).double()
        expected = torch.stack([g.square().sum(), (g * h).sum(), torch.tensor(size)])
        torch.testing.assert_close(found[i], expected.double(), rtol=1e-6, atol=1e-5)
    again = kernel(blocks_of(), fixed, grads)
    assert torch.equal(found, again)
    assert kernel.printed.bytes_read == 6 and kernel.printed.bytes_written == 0


@interpreted
def test_interpreted_kernels_take_parts_without_elements():
    operands = {"x": F32}
    sums = SumsKernel(print_sums("sum of x", lambda tensors: (tensors["x"],), operands))
    update = UpdateKernel(
        print_update("twice x", lambda t, s, i: {"x": 2 * t["x"]}, operands, 0)
    )
    for sizes in ([], [0, 0]):
        offsets = torch.zeros(len(sizes), dtype=torch.int64)
        parts = Blocks(sizes, CPU)
        addresses = dict(x=[0] * len(sizes))
        tables = tables_of(operands, addresses, range(len(sizes)), offsets)
        ok = torch.ones(len(sizes), dtype=torch.bool)
        update(parts, tables, ok, torch.empty(len(sizes), 0))
        assert sums(parts, *tables[:2]).tolist() == [[0.0]] * len(sizes)


# ---- in every process ----------------------------------------------------------------


def test_addresses_are_sent_where_they_changed(monkeypatch):
    sent, send = [], vars(AddressTable)["_send"]
    monkeypatch.setattr(AddressTable, "_send", lambda *a: sent.append(a) or send(*a))
    table = AddressTable([F32, BF16], [0, 0, 1], torch.tensor([0, 10, 4]), CPU)
    addresses = [[1000, 2000], [3000, 0]]
    expected = [[1000, 1040, 2016], [3000, 3020, 0]]
    assert table.on_device(addresses).tolist() == expected
    table.on_device([list(row) for row in addresses])
    assert len(sent) == 1
    addresses[1][1] = 5000  # in the caller's own list
    assert table.on_device(addresses).tolist()[1] == [3000, 3020, 5008]
    assert len(sent) == 2


def test_the_source_says_what_it_computes_and_is_always_the_same():
    first, second = printed("adamw, rounded"), printed("adamw, rounded")
    assert first == second
    assert first.source.startswith("# marsopt: adamw, rounded\n")
    assert first.name == "adamw_rounded" and f"def {first.name}(" in first.source
    assert first.reads == ("x", "g", "h", "m", "v", "v_max")
    assert first.writes == ("x", "h", "m", "v", "v_max")
    assert first.bytes_read == 3 * 4 + 3 * 2 and first.bytes_written == 2 * 4 + 3 * 2


def test_an_operand_that_nobody_reads_is_not_loaded():
    orthogonal = printed("orthogonal")  # x stays until the owners answer
    assert "x" not in orthogonal.reads and "x_address" not in orthogonal.source


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (lambda x: x.cumsum(1), "cumsum"),
        (lambda x: x - x.mean(), "mean"),
        (lambda x: x.exp(), "exp"),
        (lambda x: x.to(torch.uint8).to(F32), "torch.uint8"),
        (lambda x: x * torch.tensor(0.7), "a constant tensor"),
        (lambda x: x.clamp(0.0, 1.0), "clamp with two bounds"),
        (lambda x: x**x, "pow of torch.float32"),
        (lambda x: torch.add(x, x, alpha=2), "add with"),
        (lambda x: x[:, :1] + x, "slice"),
        (lambda x: torch.div(x, 2, rounding_mode="floor"), "div with"),
    ],
)
def test_operators_that_the_printer_lacks_are_named(function, operator):
    with pytest.raises(Unprintable, match=operator):
        print_sums("sums", lambda tensors: (function(tensors["g"]),), {"g": F32})


def test_triton_runs_where_it_can(monkeypatch):
    assert not available(torch.device("mps"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    for interpreted in (False, True):
        monkeypatch.setenv("TRITON_INTERPRET", str(int(interpreted)))
        assert available(CPU) == interpreted
        assert available(torch.device("cuda", 0)) != interpreted  # reads host memory


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Failed to find C compiler."),  # of slim images, for the launcher
        PermissionError(13, "Permission denied", "/cache/marsopt"),
        ModuleNotFoundError("No module named 'triton'"),
    ],
)
def test_kernels_that_cannot_be_built_are_found_before_the_first_step(
    error, monkeypatch
):
    """Neither graphs nor printed kernels can be launched then."""

    def load(source):
        raise error

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    monkeypatch.setattr(kernels, "device_guard", lambda device: nullcontext())
    monkeypatch.setattr(kernels, "load", load)
    missing_for.cache_clear()
    with pytest.raises(RuntimeError, match=re.escape(str(error))):
        resolve_compile(True, torch.device("cuda", 0))
    assert not resolve_compile(None, torch.device("cuda", 0))
    missing_for.cache_clear()


@interpreted
def test_interpreted_kernels_can_be_built():
    assert kernels.why_not_built(CPU) is None


# ---- the class -----------------------------------------------------------------------

RULES = [
    ("mars-adamw", dict(state_dtype=BF16, stochastic_rounding=True)),
    ("mars-adamw", dict(state_dtype=torch.int8)),
    ("moonlight", dict(state_dtype=torch.int8, ns_dtype=F32)),
    *((name, dict(ns_dtype=F32)) for name in marsopt.REGISTRY),
]


def trained(name, compile, between=lambda optimizer: None, **options):
    """Four steps of two groups: with every gradient, without one, with gradients that
    are laid out otherwise, with a NaN; after each ``between(optimizer)``.
    """
    g = torch.Generator().manual_seed(0)
    shapes = [(70, 64), (1000,), (8, 8), (30, 70)]  # the first may have codes
    params = [torch.nn.Parameter(torch.randn(s, generator=g)) for s in shapes]
    groups = [dict(params=params[:2]), dict(params=params[2:], lr=2e-2)]
    options |= dict(mars_type=name, lr=1e-2, max_norm=1.0, compile=compile)
    optimizer = marsopt.MARS(groups, **options)
    for number in range(4):
        for p in params:
            p.grad = torch.randn(p.shape, generator=g)
            if number == 2:
                p.grad = p.grad.mT.contiguous().mT if p.ndim == 2 else p.grad
        if number == 1:
            params[0].grad = None
        elif number == 3:
            params[2].grad[0, 0] = torch.nan
        optimizer.step()
        between(optimizer)
    return params, optimizer


@interpreted
@anything
@pytest.mark.parametrize(("name", "options"), RULES)
def test_interpreted_steps_of_the_class_are_eager_ones(name, options, monkeypatch):
    """Their decisions to the last bits, and their results."""
    small = Kernels.small

    def compared(runner, function, *args):
        found = small(runner, function, *args)
        pairs = zip(*map(tree_leaves, (found, function(*args))), strict=True)
        for a, b in pairs:
            eps = torch.finfo(a.dtype).eps if a.is_floating_point() else 0
            torch.testing.assert_close(a, b, rtol=2 * eps, atol=0, equal_nan=True)
        return found

    monkeypatch.setattr(Kernels, "small", compared)
    monkeypatch.setattr(graphs, "graph_of", None)  # no graph takes a part
    params, optimizer = trained(name, None, **options)
    runner = vars(optimizer)["_runner"]
    assert isinstance(runner, Kernels)
    assert all(
        isinstance(k, DecisionKernel) for k in vars(runner)["_decisions"].values()
    )
    others, eager = trained(name, False, **options)
    assert optimizer.num_skipped == eager.num_skipped == 1
    # eager steps join small tensors, whose elements have other noise then
    rounded = "state_dtype" in options
    bounds = dict(rtol=0, atol=1e-3) if rounded else dict(rtol=1e-5, atol=1e-6)
    for p, other in zip(params, others, strict=True):
        torch.testing.assert_close(p, other, **bounds)
        assert optimizer.state[p]["step"] == eager.state[other]["step"]


@interpreted
@anything
def test_interpreted_steps_wait_for_gradients_and_refuse_those_without_memory():
    """Kernels read addresses: such a tensor has the address of a missing gradient."""
    dist.init_process_group("fake", rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))

    def sharded(x):
        return DTensor.from_local(x, mesh, [Shard(0)], run_check=False)

    try:
        p = torch.nn.Parameter(sharded(torch.zeros(64)))
        options = dict(mars_type="adamw", lr=LR, collectives=MeshCollectives(mesh))
        optimizer = marsopt.MARS([p], **options)
        p.grad = sharded(AsyncCollectiveTensor(torch.ones(64)))
        optimizer.step()
        assert optimizer.grad_norm == 8
        torch.testing.assert_close(p.to_local(), torch.full((64,), -LR))
        p.grad = sharded(TwoTensor(torch.ones(64), torch.ones(64)))
        with pytest.raises(ValueError, match="got a gradient without memory"):
            optimizer.step()
    finally:
        dist.destroy_process_group()


@interpreted
@anything
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("mars-adamw", None), ("mars-adamw", torch.int8), ("moonlight", None)],
)
def test_interpreted_kernels_are_compiled_for_their_launches(name, dtype, monkeypatch):
    """Ahead of them, for the same types and constants; none but the decision is left
    out, which depends on whether there is a global clip.
    """
    launched, compiled = [], []

    def note(kernel, function, num, *args, **sizes):
        types = [x.dtype if isinstance(x, torch.Tensor) else 1 for x in args]
        if not isinstance(kernel, DecisionKernel):
            launched.append((function, types, sizes))

    def asked_of(function):
        return lambda *types, grid, **options: compiled.append(
            (function, [*types], {k: v for k, v in options.items() if k not in OPTIONS})
        )

    monkeypatch.setattr(Kernel, "_launch", note)
    _, optimizer = trained(name, None, ns_dtype=BF16, state_dtype=dtype)
    groups = optimizer.describe().binding.groups
    expected = [k for g in groups for k in vars(optimizer)["_runner"].expected(g)]
    for function in (f for kernel in expected for f in kernel.functions):
        monkeypatch.setattr(function, "warmup", asked_of(function), raising=False)
    build(expected, CPU)
    assert all(launch in compiled for launch in launched)


@interpreted
@anything
@pytest.mark.parametrize("name", ["mars-adamw", "moonlight"])
def test_interpreted_steps_let_gradients_go(name):
    params, optimizer = trained(name, None)
    gradients = [weakref.ref(p.grad) for p in params]
    optimizer.zero_grad()
    assert [gradient() for gradient in gradients] == [None] * len(params)


@interpreted
@anything
def test_interpreted_steps_orthogonalize_only_matrices_with_a_gradient(monkeypatch):
    shapes, many = [], NewtonSchulz.many

    def noted(self, matrices):
        shapes.extend(tuple(x.shape) for x in matrices)
        return many(self, matrices)

    monkeypatch.setattr(NewtonSchulz, "many", noted)
    trained("moonlight", None)
    assert shapes.count((70, 64)) == 3 and shapes.count((30, 70)) == 4


@interpreted
@anything
@pytest.mark.parametrize("move", [by_to, by_data])
@pytest.mark.parametrize("name", ["mars-adamw", "moonlight", "soap"])
def test_interpreted_steps_go_on_when_state_comes_back(name, move):
    """To the bit, by the same kernels."""
    params, optimizer = trained(name, None, ns_dtype=F32)
    assert isinstance(vars(optimizer)["_runner"], Kernels)
    num_printed = update_kernel.cache_info().misses
    others, _ = trained(name, None, move, ns_dtype=F32)
    assert update_kernel.cache_info().misses == num_printed
    for p, other in zip(params, others, strict=True):
        assert torch.equal(p, other)
