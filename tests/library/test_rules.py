"""Laws that every rule obeys, run over the table of rules."""

from __future__ import annotations

from collections import OrderedDict, UserDict, UserList, defaultdict, namedtuple
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import get_args, get_type_hints

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad

import marsopt
from marsopt.functional.authors import all_options
from marsopt.functional.keywords import Options, Parts
from marsopt.optim.state_dict import STAGE_COUNT
from marsopt.rules.registry import RuleName
from tests.conformance.oracle import Oracle
from tests.table import ROWS, SHAPES, tensors

rows = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
LR = 0.01


def buffers(state):
    """The state's trees of tensors, by symbol."""
    return state.buffers


@pytest.mark.parametrize("scale", [3.0, 1e-3], ids=["clip active", "clip idle"])
@pytest.mark.parametrize("exact", [False, True], ids=["approximate", "exact"])
@pytest.mark.parametrize("name", ROWS)
def test_equals_the_oracle(name, exact, scale):
    """Six steps of the algorithm box in float64: no tolerance hides a wrong formula.

    (Matrix rules: the authors' eps stands beside the norm of m/(1 - beta1), ours beside
    that of m.) A baseline has no exact form: giving it a reference is an error.
    """
    row = ROWS[name]
    atol = 1e-7 if row.matrix_only else 1e-12
    more = {"is_approx": False} if exact and row.has_gamma else {}
    rule = row.rule(**more)
    x = tensors(row.names, 0, dtype=torch.float64)
    oracles = {n: Oracle(v.numpy(), **row.oracle) for n, v in x.items()}
    state = rule.init(x)
    for t in range(6):
        lr = LR * (1 + t) / 8
        g = tensors(row.names, 1 + t, scale, torch.float64)
        h = tensors(row.names, 100 + t, scale, torch.float64) if exact else None
        if exact and not row.has_gamma:
            with pytest.raises(ValueError, match="got a reference"):
                rule.step(x, g, state, lr=lr, reference=h)
            return
        x, state = rule.step(x, g, state, lr=lr, reference=h)
        for n in row.names:
            want = oracles[n].step(
                g[n].numpy(), lr, None if h is None else h[n].numpy()
            )
            torch.testing.assert_close(
                x[n],
                torch.from_numpy(want),
                rtol=0,
                atol=atol,
                msg=lambda m, n=n: f"{n}: {m}",
            )


@rows
def test_is_pure(row):
    rule, x = row.rule(), tensors(row.names, 0)
    g, state = tensors(row.names, 1), rule.init(x)
    given = [*x.values(), *g.values(), state.t, state.skipped]
    given += [b for tree in buffers(state).values() for b in tree.values()]
    versions, copies = [p._version for p in given], [p.clone() for p in given]
    rule.step(x, g, state, lr=LR)
    assert [p._version for p in given] == versions
    assert all(torch.equal(p, c) for p, c in zip(given, copies, strict=True))


@rows
def test_state_holds_what_the_rule_needs_and_no_more(row):
    x = tensors(row.names, 0)
    state = row.rule().init(x)
    shapes = [[b.shape for b in tree.values()] for tree in buffers(state).values()]
    like_x = [p.shape for p in x.values()]
    rows_of_x = [(1, p.shape[0]) for p in x.values()]
    at_owner = [(1, *shape) for shape in like_x]  # number of matrices here
    num_full = shapes.count(like_x) + shapes.count(at_owner)
    assert num_full == row.buffers
    rest = len(shapes) - num_full - row.num_factors
    assert shapes.count(rows_of_x) == rest <= 1
    if row.has_gamma:
        exact = row.rule(is_approx=False, clip=1.0).init(x)
        assert exact.h is None


@rows
@pytest.mark.parametrize(
    ("dtype", "own"),
    [
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.float64, None),
        (torch.bfloat16, torch.float32),
    ],
)
def test_dtypes_and_structure_are_stable(row, dtype, own):
    """State has the dtype of the parameters, or one of its own."""
    rule, x = row.rule(state_dtype=own), tensors(row.names, 0, dtype=dtype)
    before = rule.init(x)
    g = tensors(row.names, 1, dtype=dtype)
    new, after = rule.step(x, g, before, lr=LR)
    assert all(new[n].dtype == dtype and new[n].shape == x[n].shape for n in x)
    assert type(after) is type(before)
    for name, tree in buffers(before).items():
        kinds = {n: (b.shape, b.dtype) for n, b in tree.items()}
        found = buffers(after)[name].items()
        assert kinds == {n: (b.shape, b.dtype) for n, b in found}
        assert own is None or {kind for _, kind in kinds.values()} == {own}
    assert float(after.t) == 1


FEW = ("wide", "bias")  # what compiling takes grows with their number
P = namedtuple("P", FEW)  # noqa: PYI024  (of tensors by any name)


CONTAINERS = {
    "list": lambda tree: list(tree.values()),
    "tuple": lambda tree: tuple(tree.values()),
    "OrderedDict": OrderedDict,
    "defaultdict": partial(defaultdict, torch.Tensor),
    "namedtuple": lambda tree: P(**tree),
}


@pytest.mark.parametrize("like", CONTAINERS)
@pytest.mark.parametrize("routed", [True, False])
def test_containers_come_back_as_themselves(routed, like):
    rule = marsopt.mars() if routed else marsopt.rule("lion")
    x, g = tensors(FEW, 0), tensors(FEW, 1)
    want, _ = rule.step(x, g, rule.init(x), lr=LR)
    xs, gs = CONTAINERS[like](x), CONTAINERS[like](g)
    steps = [rule.step]
    if not routed and like in ("defaultdict", "namedtuple"):
        steps.append(torch.compile(rule.step, backend="eager", fullgraph=True))
    for step in steps:
        state = rule.init(xs)
        new, state = step(xs, gs, state, lr=LR)
        assert type(new) is type(xs)
        assert routed or type(state.m) is type(xs)
        assert like != "defaultdict" or new.default_factory is torch.Tensor
        new = new._asdict() if like == "namedtuple" else new
        assert list(new) == list(want) or like in ("list", "tuple")
        found = new.values() if isinstance(new, dict) else new
        assert all(map(torch.equal, found, want.values()))


@pytest.mark.parametrize("wrap", [UserDict, UserList, MappingProxyType])
def test_other_containers_are_refused(wrap):
    rule, x = marsopt.rule("mars-adamw"), tensors(SHAPES, 0)
    given = wrap(list(x.values()) if wrap is UserList else x)
    with pytest.raises(TypeError, match=f"got params of type .*{wrap.__name__}"):
        rule.init(given)
    with pytest.raises(TypeError, match=r"pass dict\(params\)|pass list\(params\)"):
        rule.step(given, given, rule.init(x), lr=LR)


def two_steps(row, x, g, lr):
    """What is trained after two steps, on gradients that depend on the parameters."""
    rule = row.rule()
    state = rule.init([x])
    p = [x.clone()]  # leaves are refused
    for t in range(2):
        now = [g * p[0] + t]
        p, state = rule.step(p, now, state, lr=lr)
    return p[0]


@rows
def test_gradients_flow_through_steps(row):
    """To where it starts, to what it is given and to the rate, as finite differences
    find them: MAML and hypergradients. No clip is at its kink.
    """
    x, g = torch.randn(2, 2, 3, dtype=torch.float64).unbind()
    lr = torch.tensor(0.1, dtype=torch.float64)
    for given in (x, g, lr):
        given.requires_grad_()
    after = partial(two_steps, row)
    if "lion" in row.oracle["kind"]:  # signs: of x alone there is something to say
        assert torch.autograd.gradcheck(lambda x, lr: after(x, g, lr), (x, lr))
    else:
        assert torch.autograd.gradcheck(after, (x, g, lr))
    (found,) = torch.autograd.grad(after(x, g, lr).sum(), x, retain_graph=True)
    assert found.abs().mean() > 0.1  # of the identity


@rows
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_gradients_flow_past_a_gradient_of_zero(row, max_norm):
    """As that before a last layer that starts at zero: every root is at its end."""
    rule, ends = replace(row.rule(), max_norm=max_norm), []
    lr = torch.tensor(0.1, requires_grad=True)
    for zero in (False, True):
        head = torch.ones(2, 3, requires_grad=True)
        x = {"w": torch.ones(2, 3), "head": head.clone()}  # leaves are refused
        zeros = 0 * x["head"]
        if row.num_factors:  # a basis of nothing has no derivative
            zeros = zeros.detach()
        g = {"w": torch.eye(2, 3) * (not zero), "head": zeros}
        after, state = rule.step(x, g, rule.init(x), lr=lr)
        after, _ = rule.step(after, g, state, lr=lr)
        ends += torch.autograd.grad(sum(map(torch.sum, after.values())), (lr, head))
    assert all(torch.isfinite(end).all() for end in ends)


def test_gradients_flow_through_a_packing():
    def squares(x):
        flat = marsopt.FlatGroup.pack(x)
        return sum(stack.square().sum() for stack in flat.values())

    x = {"a": torch.ones(3), "b": torch.full((3,), 2.0)}
    slopes = torch.func.grad(squares)(x)
    assert all(torch.equal(slopes[k], 2 * v) for k, v in x.items())
    many = torch.vmap(squares)({k: v.expand(4, 3) for k, v in x.items()})
    assert many.tolist() == [15.0] * 4


@rows
def test_a_state_shares_nothing_with_the_parameters(row):
    x = tensors(row.names, 0)
    state = row.rule().init(x)
    kept = [b for tree in buffers(state).values() for b in tree.values()]
    where = [b.data_ptr() for b in (*x.values(), *kept) if b.numel()]
    assert len(set(where)) == len(where)


@rows
def test_one_leaf_is_as_many_leaves(row):
    rule, x, g = row.rule(), tensors(row.names, 0), tensors(row.names, 1)
    together, _ = rule.step(x, g, rule.init(x), lr=LR)
    for n in row.names:
        one = rule.init([x[n]])
        alone, _ = rule.step([x[n]], [g[n]], one, lr=LR)
        torch.testing.assert_close(alone[0], together[n], rtol=0, atol=1e-6)


class Run:
    """A row's rule from one start, by the function or by the class."""

    def __init__(self, row, door, dtype=torch.float32, **more):
        more |= dict(ns_dtype=torch.float32) if "ns_dtype" in row.kwargs else {}
        x = tensors(row.names, 0, dtype=dtype)
        self.row, self.door = row, door
        if door == "function":
            more = {n: v for n, v in more.items() if n != "nonfinite"}
            self.rule, self.x = row.rule(**more), x
            self.state = self.rule.init(x)
            return
        self.params = [torch.nn.Parameter(v) for v in x.values()]
        self.optimizer = marsopt.MARS(
            self.params,
            mars_type=row.mars_type,
            compile=False,
            **{**row.of_class, **more},
        )

    def step(self, g):
        if self.door == "function":
            self.x, self.state = self.rule.step(self.x, g, self.state, lr=LR)
            return
        for p, value in zip(self.params, g.values(), strict=True):
            p.grad = value.clone()
        self.optimizer.step()

    @property
    def num_skipped(self):
        by_class = self.door == "class"
        return self.optimizer.num_skipped if by_class else int(self.state.skipped)

    def everything(self):
        """Parameters and what the state keeps, copied."""
        if self.door == "function":
            trees = [self.x, *buffers(self.state).values()]
            found = [v for tree in trees for v in tree.values()]
            return [v.clone() for v in (*found, self.state.t)]
        entries = [self.optimizer.state[p] for p in self.params]
        kept = [v for entry in entries for k, v in entry.items() if k != STAGE_COUNT]
        return [v.detach().clone() for v in (*self.params, *kept)]


def same(found, wanted):
    return all(map(torch.equal, found, wanted)) and len(found) == len(wanted)


doors = pytest.mark.parametrize("door", ["function", "class"])


@rows
@doors
def test_under_autocast_bit_for_bit(row, door):
    """Manual optimization under mixed precision: a step computes in its own dtypes."""
    runs = [Run(row, door) for _ in range(3)]
    for t in range(2):
        g = tensors(row.names, 1 + t)
        runs[0].step(g)
        for run, dtype in zip(runs[1:], (torch.bfloat16, torch.float16), strict=True):
            with torch.autocast("cpu", dtype=dtype):
                run.step(g)
                assert torch.is_autocast_enabled("cpu")
    assert same(runs[1].everything(), runs[0].everything())
    assert same(runs[2].everything(), runs[0].everything())


def test_a_compiled_step_under_autocast_is_one_graph():
    """... in a region of the trace that autocast has, and around all of it."""
    more = dict(ns_dtype=torch.float32, ns_steps=1)
    rule = marsopt.rule("mars-m", max_norm=1.0, **more)
    x, g = tensors(("wide",), 0), tensors(("wide",), 1)

    def inside(x, g, state):
        with torch.autocast("cpu", dtype=torch.float16):
            return rule.step(x, g, state, lr=LR)

    want, _ = rule.step(x, g, rule.init(x), lr=LR)
    fast = torch.compile(inside, backend="eager", fullgraph=True)
    found = [fast(x, g, rule.init(x))[0]]
    fast = torch.compile(rule.step, backend="eager", fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found.append(fast(x, g, rule.init(x), lr=LR)[0])
    assert all(same([*new.values()], [*want.values()]) for new in found)


@rows
@doors
def test_no_step_takes_a_gradient_that_is_not_finite(row, door):
    """From the first step on: nothing changes, it is counted, and others follow."""
    bad = [float("nan"), float("inf"), -2e38]
    for at, value in enumerate(bad):
        run = Run(row, door)
        for t in range(at):
            run.step(tensors(row.names, 1 + t))
        before, g = run.everything(), tensors(row.names, 7)
        g[row.names[0]][0, 1] = value
        run.step(g)
        assert same(run.everything(), before)
        assert run.num_skipped == 1
        run.step(tensors(row.names, 8))
        assert all(v.isfinite().all() for v in run.everything())
        assert run.num_skipped == 1


@pytest.mark.parametrize("name", [n for n, row in ROWS.items() if row.num_factors])
@doors
def test_bases_begin_with_the_first_finite_gradient(name, door):
    """Skipped first steps are as if they had not been."""
    runs = [Run(ROWS[name], door) for _ in range(2)]
    for _ in range(2):
        runs[1].step({n: v / 0 for n, v in tensors(ROWS[name].names, 5).items()})
    for t in range(5):
        for run in runs:
            run.step(tensors(ROWS[name].names, 1 + t))
    assert same(runs[1].everything(), runs[0].everything())
    assert runs[1].num_skipped == 2


@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
def test_a_first_gradient_of_a_later_group_that_is_not_finite(nonfinite):
    first, later = [torch.nn.Parameter(torch.randn(5, 4)) for _ in range(2)]
    more = dict(mars_type="soap-muon", compile=False, nonfinite=nonfinite)
    optimizer = marsopt.MARS([first], **more)
    for _ in range(3):
        first.grad = torch.randn(5, 4)
        optimizer.step()
    optimizer.add_param_group(dict(params=[later]))
    before = [p.detach().clone() for p in (first, later)]
    first.grad, later.grad = torch.randn(5, 4), torch.full((5, 4), float("nan"))
    if nonfinite == "raise":
        with pytest.raises(FloatingPointError, match="norm 1 of 2"):
            optimizer.step()
    else:
        optimizer.step()
    assert same([first, later], before)
    assert optimizer.num_skipped == 1
    for _ in range(2):
        later.grad = torch.randn(5, 4)
        optimizer.step()
    assert not torch.equal(later, before[1])
    assert later.isfinite().all()


@rows
@doors
def test_float16_parameters_have_float32_state(row, door):
    """Float16 has no squares of these gradients."""
    g = tensors(row.names, 1, 2**-12, torch.float16)
    runs = [
        Run(row, door, torch.float16),
        Run(row, door, torch.float16, state_dtype=torch.float32),
    ]
    for run in runs:
        for _ in range(3):
            run.step(g)
    found = runs[0].everything()
    assert same(found, runs[1].everything())
    assert sum(v.dtype == torch.float16 for v in found) == len(row.names)


def test_state_that_was_saved_in_float16_goes_on_in_float32():
    """By both doors; SOAP's, which its owners keep, too."""
    for mars_type in ("mars-adamw", "soap"):
        p = torch.nn.Parameter(torch.randn(4, 3).half())
        optimizer = marsopt.MARS([p], mars_type=mars_type, compile=False)
        for _ in range(2):
            p.grad = torch.randn(4, 3).half()
            optimizer.step()
        saved = optimizer.state_dict()
        for entry in saved["state"].values():
            entry |= {k: v.half() for k, v in entry.items() if v.numel() == p.numel()}
        twin = torch.nn.Parameter(p.detach().clone())
        wide = marsopt.MARS([twin], mars_type=mars_type, compile=False)
        wide.load_state_dict(saved)
        twin.grad = torch.randn(4, 3).half()
        wide.step()
        found = wide.state[twin]
        assert {v.dtype for v in found.values()} == {torch.float32}
    x = [torch.randn(4, 3).half()]
    rule = marsopt.rule("adamw")
    _, state = rule.step(x, x, rule.init(x), lr=LR)
    halves = {symbol: [v.half() for v in vs] for symbol, vs in state.buffers.items()}
    _, state = rule.step(x, x, state._replace(buffers=halves), lr=LR)
    assert state.v[0].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clip", [None, 1e30])
@doors
def test_a_square_of_c_that_overflows_is_no_step(door, clip, dtype):
    """g and h are numbers whose squares are some; that of g + k (g - h) is none."""
    run = Run(ROWS["mars_adamw"], door, dtype, gamma=0.5, clip=clip)
    before = run.everything()
    for t in range(4):
        g = tensors(SHAPES, t, dtype=dtype)
        run.step({n: torch.full_like(v, (-1) ** t * 1e18) for n, v in g.items()})
    assert same(run.everything(), before)
    assert run.num_skipped == 4


@rows
def test_no_host_sync(row):
    """Under FakeTensorMode, reading a value on the host raises."""
    with FakeTensorMode():
        x = {n: torch.empty(SHAPES[n]) for n in row.names}
        rule = row.rule(max_norm=1.0)
        lr = torch.tensor(LR, dtype=torch.float64)
        gamma = lr if row.has_gamma else None
        state = rule.init(x)
        stages = {str(row.counted(t)): row.counted(t) for t in range(4)}
        for stage in stages.values():
            rule.step(x, x, state, lr=lr, gamma=gamma, **stage)


# Inductor generates code, which takes seconds, for one rule (for every page in
# test_optimizer.py, by the class).
GENERATED = "mars_adamw-noclip"
# Dynamo traces options that no other compiled test has; a rule with stages has a graph
# for each stage.
TRACED = (
    *("mars_adamw-amsgrad", "mars_normuon"),
    *("adamw-nesterov", "muon-cautious", "soap_muon"),
)


@pytest.mark.parametrize("name", [GENERATED, *TRACED])
def test_compiles_once_and_equals_eager(name):
    """No recompile while lr, gamma and the step change, but for a stage that is new;
    inductor equals eager.
    """
    row = ROWS[name]
    names, rule = (row.names[0], row.names[-1]), row.rule(max_norm=1.0)
    names = names[:1] if row.num_factors else names  # dynamo traces three stages
    x = tensors(names, 0)

    def step(x, g, state, lr, gamma, **stage):
        return rule.step(x, g, state, lr=lr, gamma=gamma, **stage)

    backend = "inductor" if name == GENERATED else "eager"
    fast = torch.compile(step, backend=backend, fullgraph=True)
    a, b = ((x, rule.init(x)) for _ in range(2))
    stages = []
    for t in range(5 if row.num_factors else 3):
        lr = torch.tensor(LR / (1 + t), dtype=torch.float64)
        gamma = torch.tensor(0.01 * t, dtype=torch.float64) if row.has_gamma else None
        g = tensors(names, 1 + t)
        stage = row.counted(t)
        a = step(a[0], g, a[1], lr, gamma)
        known = stage in stages
        stages.append(stage)
        with torch.compiler.set_stance("fail_on_recompile" if known else "default"):
            b = fast(b[0], g, b[1], lr, gamma, **stage)
    for n in names:
        torch.testing.assert_close(b[0][n], a[0][n], rtol=0, atol=1e-6)


def test_a_whole_train_step_is_one_graph():
    """torch.func.grad, model and rule under one torch.compile(fullgraph=True)."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    more = dict(ns_dtype=torch.float64, ns_steps=2)
    rule = marsopt.mars(mars_type="mars-shampoo", base_lr=0.02, max_norm=1.0, **more)
    count = CompileCounter()

    def loss(params, inputs, labels):
        return torch.nn.functional.mse_loss(
            functional_call(model, params, inputs), labels
        )

    def train_step(params, state, inputs, labels, lr):
        grads = grad(loss)(params, inputs, labels)
        return rule.step(params, grads, state, lr=lr)

    params = {n: p.detach() for n, p in model.named_parameters()}
    inputs, labels = torch.randn(32, 8), torch.randn(32, 4)
    compiled = torch.compile(train_step, backend=count, fullgraph=True)
    state, eager, eager_state = rule.init(params), params, rule.init(params)
    first = float(loss(params, inputs, labels))
    for t in range(5):
        lr = torch.tensor(0.2 / (1 + t))
        params, state = compiled(params, state, inputs, labels, lr)
        eager, eager_state = train_step(eager, eager_state, inputs, labels, lr)
    assert count.frame_count == 1
    assert float(loss(params, inputs, labels)) < 0.9 * first
    for n in params:
        torch.testing.assert_close(params[n], eager[n], rtol=0, atol=1e-6)


def test_routing_by_ndim():
    """Matrices go to the named rule, the rest to AdamW at lr * lr_1d / lr."""
    rule = marsopt.mars(
        mars_type="mars-lion", base_lr=0.01, lr_1d=0.002, weight_decay=0.1
    )
    x, g = tensors(SHAPES, 0), tensors(SHAPES, 1)
    new, state = rule.step(x, g, rule.init(x), lr=0.005)
    lion = marsopt.rule("mars-lion", weight_decay=0.1)
    adamw = marsopt.rule("adamw", betas=(0.9, 0.95), weight_decay=0.1)
    for n in SHAPES:
        one, lr = (adamw, 0.001) if n == "bias" else (lion, 0.005)
        want, _ = one.step([x[n]], [g[n]], one.init([x[n]]), lr=lr)
        torch.testing.assert_close(new[n], want[0], rtol=0, atol=1e-7)
    assert set(state["matrix"].m) == {"wide", "tall", "square"}
    assert set(state["rest"].m) == {"bias"}


BAD = {
    "negative lr": (lambda x: step(marsopt.rule("adamw"), x, lr=-1.0), "got lr=-1.0"),
    "1-D to a matrix rule": (
        lambda x: marsopt.rule("muon").init(x),
        r"got params\['bias'\] of shape \(7,\), expected a matrix",
    ),
    "gradient of another shape": (
        lambda x: step(marsopt.rule("adamw"), x, bias=torch.zeros(8)),
        r"got grads\['bias'\] of shape \(8,\)",
    ),
    "gradient of another dtype": (
        lambda x: step(marsopt.rule("adamw"), x, bias=torch.zeros(7).double()),
        "dtype torch.float64",
    ),
    "missing gradient": (
        lambda x: marsopt.rule("adamw").step(
            x, {"bias": x["bias"]}, marsopt.rule("adamw").init(x), lr=1.0
        ),
        r"got grads without \['square', 'tall', 'wide'\] and with",
    ),
    "sparse gradient": (
        lambda x: step(marsopt.rule("adamw"), x, bias=torch.zeros(7).to_sparse()),
        "make it dense",
    ),
    "complex": (
        lambda x: marsopt.rule("adamw").init([torch.zeros(2, dtype=torch.complex64)]),
        "view_as_real",
    ),
    "no parameters": (lambda x: marsopt.rule("adamw").init([]), "got no parameters"),
    "gamma for a baseline": (
        lambda x: step(marsopt.rule("adamw"), x, gamma=0.1),
        "which has none",
    ),
    "no reference": (
        lambda x: step(marsopt.rule("mars-adamw", is_approx=False), x),
        "got reference=None",
    ),
    "no reference of vectors": (
        lambda x: step(
            replace(
                marsopt.rule("muon"),
                rest=marsopt.rule("mars-adamw", is_approx=False).matrix,
            ),
            x,
        ),
        "got reference=None",
    ),
    "optimize_1d of a baseline": (
        lambda x: marsopt.mars(mars_type="muon", optimize_1d=True),
        "got optimize_1d=True",
    ),
}


def step(rule, x, *, lr=LR, gamma=None, reference=None, **replaced):
    return rule.step(
        x, {**x, **replaced}, rule.init(x), lr=lr, gamma=gamma, reference=reference
    )


@pytest.mark.parametrize("name", BAD)
def test_bad_input_says_got_expected_do(name):
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message) as info:
        call(tensors(SHAPES, 0))
    text = str(info.value)
    assert (
        ("expected" in text or "has none" in text) and ":" in text and "\n" not in text
    )


def test_a_single_tensor_is_no_tree():
    with pytest.raises(TypeError, match=r"pass \[params\]"):
        marsopt.rule("adamw").init(torch.zeros(3))


def test_type_checkers_know_every_rule_and_the_type_of_every_option():
    known = all_options()
    for row in marsopt.REGISTRY.values():
        known = {**row.options, **known}
    hints = {name: line.hint for name, line in known.items()}
    # of signatures, or of groups
    for name in ("lr", "lr_ratio", "lr_1d_ratio", "mars_type"):
        del hints[name]
    hints["splits"] |= Mapping[str, Parts]  # by patterns, in for_model
    assert get_type_hints(Options) == hints
    assert get_args(RuleName) == tuple(marsopt.REGISTRY)
