"""Sharded equals unsharded: every rule, strategy, placement and number of ranks."""

from __future__ import annotations

import contextlib
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import marsopt
from marsopt import MARS, REGISTRY
from marsopt.parallel import MeshCollectives
from tests.processes import spawn
from tests.table import steady

pytestmark = pytest.mark.processes

# GPT-2's shapes scaled down; 5 rows are uneven on 2 to 4 ranks, 1 row leaves empty
# shards
SHAPES = {
    "wte": (50, 16), "attn_in": (48, 16), "attn_out": (16, 16), "mlp_in": (64, 16),
    "mlp_out": (16, 64), "mlp_out2": (16, 64), "five": (5, 16), "one": (1, 16),
    "norm": (16,), "small": (3,),
}  # fmt: skip
STEPS = 3
APPROXIMATE, EXACT, TRANSPORT = "approximate", "exact", "transport"
FORMS = {
    t: (APPROXIMATE, EXACT) if r.is_mars else (APPROXIMATE,)
    for t, r in REGISTRY.items()
}
AHEAD = [(t, TRANSPORT) for t in ("mars-adamw", "mars-normuon", "moonlight")]
EVERY = [(t, kind) for t, forms in FORMS.items() for kind in forms] + AHEAD


def values(seed, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return {n: scale * torch.randn(s, generator=g) for n, s in SHAPES.items()}


def rows(name):
    return [Shard(0)]


def columns(name):
    """shard_placement_fn may cut dim 1 where it divides."""
    return [Shard(1)] if name.startswith(("mlp", "attn")) else [Shard(0)]


def hybrid(name):
    return [Replicate(), Shard(0)]


def mixed(name):
    """Sharded, replicated and plain tensors side by side."""
    if name in ("attn_out", "norm"):
        return [Replicate()]
    return None if name in ("five", "small") else [Shard(0)]


def grid(name):
    """FSDP x TP, row-wise: two axes cut one matrix."""
    by_both = name.startswith(("mlp", "attn"))
    return [Shard(0), Shard(1) if by_both else Replicate()]


def train(
    place, mesh, collectives, mars_type, kind, scale, compiled=False, cautious=False
):
    """STEPS steps on given gradients; whole parameters afterwards, with transport also
    the x behind them.
    """
    exact = kind == EXACT

    def spread(tree):
        if place is None:
            return dict(tree)
        at = {n: place(n) for n in tree}
        return {
            n: v if at[n] is None else distribute_tensor(v, mesh, at[n])
            for n, v in tree.items()
        }

    params = {n: nn.Parameter(v) for n, v in spread(values(0, 0.1)).items()}
    kw = {} if collectives is None else dict(collectives=collectives)
    optimizer = MARS(
        params.items(), lr=0.02, weight_decay=0.1, mars_type=mars_type, max_norm=2.0,
        correction=kind, ns_dtype=torch.float32, compile=compiled,
        cautious_weight_decay=cautious, **kw,
    )  # fmt: skip

    def give(seed):
        for n, g in spread(values(seed, scale)).items():
            params[n].grad = g

    for t in range(STEPS):
        if exact:
            give(100 + t)
            optimizer.update_previous_grad()
        give(1 + t)
        optimizer.step()
        if exact:
            optimizer.update_last_grad()
    found = {n: p.detach().clone() for n, p in params.items()}
    if kind == TRANSPORT:
        optimizer.eval()
        found |= {f"{n}, x": p.detach() for n, p in params.items()}
    whole = {
        n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in found.items()
    }
    return whole, float(optimizer.grad_norm)


def compare(rank, world, cases, mesh_shape, place, strategies):
    """Largest differences to the same steps on whole tensors, by kind of rule."""
    torch.set_grad_enabled(False)
    mesh = init_device_mesh("cpu", mesh_shape)
    worst = {"elementwise": 0.0, "matrix": 0.0}
    for mars_type, form in cases:
        kind = "matrix" if REGISTRY[mars_type].matrix_only else "elementwise"
        for scale in (1.0, 1e-3):  # the per-tensor clip acts, and does not
            want, norm = train(None, None, None, mars_type, form, scale)
            for strategy in strategies if kind == "matrix" else ("auto",):
                collectives = MeshCollectives(mesh, strategy=strategy)
                got, mine = train(place, mesh, collectives, mars_type, form, scale)
                # what is replicated counts once
                assert abs(mine - norm) < 1e-5 * norm, f"{mine} where whole has {norm}"
                error = max(float((got[n] - want[n]).abs().max()) for n in want)
                worst[kind] = max(worst[kind], error)
    return worst


def compare_cautious(rank, world):
    """Largest difference to whole tensors, and that of cautious to plain decay."""
    torch.set_grad_enabled(False)
    collectives = MeshCollectives(mesh := init_device_mesh("cpu", (world,)))
    case = ("adamw", APPROXIMATE, 1.0)
    want, _ = train(None, None, None, *case, cautious=True)
    plain, _ = train(None, None, None, *case)
    got, _ = train(rows, mesh, collectives, *case, cautious=True)
    return [
        max(float((a[n] - want[n]).abs().max()) for n in want) for a in (got, plain)
    ]


def test_sharded_cautious_decay_equals_unsharded():
    for error, seen in spawn(compare_cautious, 2):
        assert error < 1e-6 < 1e-4 < seen


ALL = ("owner", "gram", "replicate")
ADAMW, SHAMPOO, SHAMPOO_EXACT = (
    ("mars-adamw", APPROXIMATE),
    ("mars-shampoo", APPROXIMATE),
    ("mars-shampoo", EXACT),
)
SOME = [(t, APPROXIMATE) for t in ("mars-lion", "mars-m", "normuon", "mars-soap")]
SOME += [SHAMPOO_EXACT, *AHEAD]
# mesh, placements, (mars_type, correction), strategies
CASES = {
    "1 rank": ((1,), rows, EVERY, ("auto",)),
    "2 ranks": ((2,), rows, EVERY, ALL),
    "3 ranks": ((3,), rows, [ADAMW, SHAMPOO_EXACT, *AHEAD], ("owner", "gram")),
    "4 ranks": ((4,), rows, SOME, ("owner",)),
    "8 ranks": (
        (8,),
        rows,
        [("mars-adamw", EXACT), ("mars-m", APPROXIMATE)],
        ("owner",),
    ),
    "Shard(1)": ((2,), columns, [ADAMW, SHAMPOO], ALL),
    "HSDP 2x2": (
        (2, 2),
        hybrid,
        [("mars-adamw", EXACT), SHAMPOO, *AHEAD],
        (*ALL, "auto"),
    ),
    "HSDP 2x1": ((2, 1), hybrid, [ADAMW, SHAMPOO], ("owner", "auto")),
    "FSDP x TP 2x2": ((2, 2), grid, [ADAMW, ("mars-m", EXACT)], ("owner",)),
    "mixed": ((2,), mixed, [("mars-lion", APPROXIMATE), SHAMPOO], ("owner", "auto")),
}


@pytest.mark.parametrize("name", CASES)
def test_sharded_equals_unsharded(name):
    mesh_shape, place, cases, strategies = CASES[name]
    world = torch.Size(mesh_shape).numel()
    for worst in spawn(
        compare, world, cases, mesh_shape, place, strategies, seconds=240
    ):
        assert worst["elementwise"] < 1e-6
        assert worst["matrix"] < 1e-5


def several_meshes(rank, world):
    """Leaves on three meshes and plain ones: each is reduced over its own axes."""
    line = init_device_mesh("cpu", (2,))
    wide, tall = init_device_mesh("cpu", (1, 2)), init_device_mesh("cpu", (2, 1))
    homes = {
        "wte": (line, [Shard(0)]),
        "attn_in": (wide, [Replicate(), Shard(0)]),
        "mlp_in": (tall, [Shard(0), Replicate()]),
        "mlp_out": (line, [Shard(1)]),
        "attn_out": (line, [Replicate()]),
    }

    def steps(sharded, **kw):
        def put(name, whole):
            if not sharded or name not in homes:
                return whole
            return distribute_tensor(whole, *homes[name])

        params = {n: nn.Parameter(put(n, v)) for n, v in values(0, 0.1).items()}
        optimizer = MARS(
            params.items(), lr=0.02, mars_type="mars-shampoo", max_norm=2.0,
            ns_dtype=torch.float32, compile=False, **kw,
        )  # fmt: skip
        for t in range(STEPS):
            for n, g in values(1 + t).items():
                params[n].grad = put(n, g)
            optimizer.step()
        whole = [p.detach() for p in params.values()]
        whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in whole]
        return whole, float(optimizer.grad_norm)

    want, norm = steps(False)
    worst = 0.0
    for strategy in ("owner", "gram", "auto"):
        got, mine = steps(True, collectives=MeshCollectives(line, strategy=strategy))
        worst = max(worst, abs(mine - norm) / norm)
        pairs = zip(got, want, strict=True)
        worst = max(worst, *(float((a - b).abs().max()) for a, b in pairs))
    return worst


def test_parameters_on_several_meshes():
    assert max(spawn(several_meshes, 2)) < 1e-5


# ---- tensor parallelism by torch's own API -------------------------------------------


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


@contextlib.contextmanager
def sent_away():
    """Yield a list of how many elements each all-to-all takes from this rank."""
    sent, real = [], dist.all_to_all_single

    def counted(out, flat, of, to, group=None, **kw):
        sent.append(flat.numel() - to[dist.get_rank(group)])
        return real(out, flat, of, to, group=group, **kw)

    dist.all_to_all_single = counted
    try:
        yield sent
    finally:
        dist.all_to_all_single = real


def tensor_parallel(rank, world, rule):
    """Column-wise (striped shards) and row-wise, under fully_shard on a 2x2 mesh;
    placements, largest error, and what the last step took away from here.
    """
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def steps(parallel):
        torch.manual_seed(0)
        model, kw = Mlp().double(), {}
        if parallel:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(model, mesh["tp"], plan)
            fully_shard(model, mesh=mesh["dp"])
            model.set_gradient_divide_factor(2.0)
            model.set_force_sum_reduction_for_comms(True)
            found = next(model.parameters()).device_mesh
            kw = dict(collectives=MeshCollectives(found))
        optimizer = MARS(
            model.parameters(), lr=0.02, mars_type=rule, max_norm=0.5, compile=False,
            ns_dtype=torch.float64, **steady(rule), **kw,
        )  # fmt: skip
        for t in range(STEPS):
            g = torch.Generator().manual_seed(t)
            optimizer.zero_grad()
            x = torch.randn(16, 8, generator=g, dtype=torch.float64)
            model(x).square().mean().backward()
            with sent_away() as sent:
                optimizer.step()
        return model, sent

    model, sent = steps(True)
    places = {str(p.placements) for p in model.parameters()}
    got = [p.full_tensor().detach() for p in model.parameters()]
    want = [p.detach() for p in steps(False)[0].parameters()]
    pairs = zip(got, want, strict=True)
    return places, max(float((a - b).abs().max()) for a, b in pairs), sent


@pytest.mark.parametrize("rule", ["mars-shampoo", "mars-normuon", "mars-soap"])
def test_fsdp_and_tensor_parallelism(rule):
    """A matrix that two axes cut goes to one owner over both and back, and sends two
    thirds of what gathering it on 2x2 ranks would; SOAP, which keeps state there, has
    it gathered.
    """
    found = spawn(tensor_parallel, 4, rule)
    for places, error, sent in found:
        assert any("StridedShard" in p or "_S" in p for p in places), places
        assert error < 1e-11
        assert len(sent) <= (0 if rule == "mars-soap" else 8)  # 4 for each bucket
    away = sum(sum(sent) for _, _, sent in found) / 4
    numel, of_rows = 2 * 8 * 12, 2 * 12 + 2 * 8 if rule == "mars-normuon" else 0
    if rule != "mars-soap":  # gathered, it is 3 / 4 numel
        assert 0 < away <= numel / 2 + of_rows


class Sequence(nn.Module):
    """A table cut by rows, a norm over a part of the sequence, and an MLP."""

    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(10, 8), nn.RMSNorm(8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, tokens):
        return self.down(torch.tanh(self.up(self.norm(self.table(tokens)))))


def tensor_parallel_alone(rank, world, rule, correction, pure):
    """Nothing but DTensor completes gradients: those of the norm are pending sums, and
    those of the table lie otherwise than it. Returns their placements, and the largest
    error of a parameter after some steps of the class, or of pure ones.
    """
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (world,))
    plan = {
        "table": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Replicate()),
    }
    options = dict(mars_type=rule, correction=correction, lr_1d=0.03, max_norm=0.1)
    options |= dict(ns_dtype=torch.float32) if REGISTRY[rule].matrix_only else {}

    def steps(parallel):
        torch.manual_seed(5)
        model, kw = Sequence().double(), {}
        if parallel:
            parallelize_module(model, mesh, plan)
            kw = dict(collectives=MeshCollectives(mesh))
        params = dict(model.named_parameters())

        def backward(t):
            model.zero_grad()
            g = torch.Generator().manual_seed(t)
            tokens = torch.randint(10, (2, 6), generator=g)
            model(tokens).square().mean().backward()

        backward(0)
        places = {n: str(p.grad.placements) for n, p in params.items() if parallel}
        if pure:
            function = marsopt.mars(base_lr=0.03, **options)
            now = {n: p.detach().clone() for n, p in params.items()}
            state = function.init(now, **kw)
            for t in range(STEPS):
                grads = {n: p.grad for n, p in params.items()}
                now, state = function.step(now, grads, state, lr=0.03, **kw)
                with torch.no_grad():
                    for name, p in params.items():
                        p.copy_(now[name])
                backward(t + 1)
        else:
            named = params.items()
            optimizer = MARS(named, lr=0.03, compile=False, **options, **kw)
            for t in range(STEPS):
                backward(t + 1)
                optimizer.update_previous_grad()  # exact alone does something
                backward(t)
                optimizer.step()
                optimizer.update_last_grad()
        found = [p.detach() for p in params.values()]
        return places, [p.full_tensor() for p in found] if parallel else found

    places, got = steps(True)
    pairs = zip(got, steps(False)[1], strict=True)
    return places, max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize(
    "rule, correction, pure",
    [
        ("mars-adamw", APPROXIMATE, False),
        ("mars-adamw", APPROXIMATE, True),
        ("mars-adamw", EXACT, False),
        ("mars-m", TRANSPORT, False),
        ("mars-m", TRANSPORT, True),
    ],
)
def test_tensor_parallelism_alone(rule, correction, pure):
    for places, error in spawn(tensor_parallel_alone, 2, rule, correction, pure):
        assert places["norm.weight"] == "(Partial(sum),)"
        assert places["table.weight"] != "(Shard(dim=0),)"  # as the table itself is
        assert error < 1e-9


# ---- what is sent --------------------------------------------------------------------


def count(rank, world, strategy):
    """Collectives and bytes of one step after the first, as torch sees them called."""
    mesh = init_device_mesh("cpu", (world,))
    collectives = MeshCollectives(mesh, strategy=strategy)
    names = ("wte", "attn_in", "attn_out", "mlp_in", "mlp_out", "norm")
    params = {
        n: nn.Parameter(distribute_tensor(v, mesh, [Shard(0)]))
        for n, v in values(0).items()
        if n in names
    }
    optimizer = MARS(
        params.items(), mars_type="mars-shampoo", collectives=collectives, compile=True
    )
    calls = []
    real = dist.all_reduce, dist.all_to_all_single

    def all_reduce(tensor, *args, **kw):
        calls.append(("all_reduce", tensor.numel() * tensor.element_size()))
        return real[0](tensor, *args, **kw)

    def all_to_all_single(out, flat, of, to, *args, **kw):
        kept = to[dist.get_rank()]
        calls.append(("all_to_all", (flat.numel() - kept) * flat.element_size()))
        return real[1](out, flat, of, to, *args, **kw)

    def step():
        for n, p in params.items():
            p.grad = distribute_tensor(values(1)[n], mesh, [Shard(0)])
        optimizer.step()

    step()
    dist.all_reduce, dist.all_to_all_single = all_reduce, all_to_all_single
    try:
        with torch.compiler.set_stance("fail_on_recompile"):
            for t in range(3):
                calls.clear()
                optimizer.param_groups[0].update(lr=0.01 * t, gamma=0.01 * t)
                step()
    finally:
        dist.all_reduce, dist.all_to_all_single = real
    (group,) = collectives.groups
    return list(calls), group.matrices, group.plan


def test_collectives_and_bytes_are_those_of_the_plan():
    """One all-reduce for all norms, two all-to-all per bucket, 2mn/p bytes a matrix; to
    the byte, over uneven shards too.
    """
    from marsopt import NewtonSchulz
    from marsopt.parallel.planner import cost

    world = 2
    results = spawn(count, world, "owner")
    total = 0
    matrices, plan = results[0][1:]
    for calls, _, _ in results:
        reduced = [size for what, size in calls if what == "all_reduce"]
        assert len(reduced) == 1
        # leaves, and rows by which ranks compare hyperparameters, x numbers x float32
        assert reduced[0] == (6 + 3) * 4 * 4
        sent = [size for what, size in calls if what == "all_to_all"]
        assert len(sent) == 2 * plan.num_buckets
        assert plan.num_buckets <= 2
        total += sum(sent)
    model = cost(matrices, plan, NewtonSchulz().on("cpu")).bytes_sent
    assert total / world == model
    numel = sum(m.rows * m.cols for m in matrices)
    assert total / world <= 1.05 * 2 * numel * 2 / world


# ---- faults --------------------------------------------------------------------------


def different_lists(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    params = []
    for rows in (4, 6) if rank == 0 else (4,):
        whole = torch.ones(rows, 4)
        # src_data_rank=None: else making them would be a collective, and hang
        cut = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        params.append(nn.Parameter(cut))
    optimizer = MARS(params, compile=False, collectives=MeshCollectives(mesh))
    for p in params:
        p.grad = torch.ones_like(p)
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_different_parameter_lists_are_an_error_not_a_hang():
    for told in spawn(different_lists, 2, seconds=60):
        assert "expected the same everywhere" in told


def one_rank_differs(rank, world, options):
    """On a 2x2 mesh: every rank has to hear of it, whatever axis it lies on."""
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.ones(4, 4)
    places = [Replicate(), Shard(0)]
    cut = distribute_tensor(whole, mesh, places, src_data_rank=None)
    params = [nn.Parameter(cut)]
    kw = options if rank == 3 else {"mars_type": "muon"}
    optimizer = MARS(params, compile=False, collectives=MeshCollectives(mesh), **kw)
    params[0].grad = torch.ones_like(params[0])
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    "options",
    [{"mars_type": "adamw"}, {"mars_type": "muon", "ns_dtype": torch.float32}],
    ids=["rule", "precision"],
)
def test_different_options_are_an_error_not_a_hang(options):
    for told in spawn(one_rank_differs, 4, options, seconds=60):
        assert "expected the same everywhere" in told


def missing_gradient(rank, world, explicit):
    """Two steps with max_norm; on rank 1 the second parameter has no gradient, or 0."""
    mesh = init_device_mesh("cpu", (world,))
    g = torch.Generator().manual_seed(0)
    params = []
    for _ in range(2):
        whole = torch.randn(4, 4, generator=g)
        params.append(nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])))
    optimizer = MARS(
        params, mars_type="mars-m", max_norm=1.0, weight_decay=0.5, compile=False,
        ns_dtype=torch.float32, collectives=MeshCollectives(mesh),
    )  # fmt: skip
    norms = []
    for _ in range(2):
        for p in params:
            whole = torch.randn(4, 4, generator=g)
            p.grad = distribute_tensor(whole, mesh, [Shard(0)])
        if rank == 1:
            params[1].grad.to_local().zero_()
            if not explicit:
                params[1].grad = None
        optimizer.step()
        norms.append(float(optimizer.grad_norm))
    steps = [float(optimizer.state[p]["step"]) for p in params]
    return [p.to_local().detach().clone() for p in params], norms, steps


def test_a_missing_gradient_on_one_rank_counts_as_zero():
    missing = spawn(missing_gradient, 2, False, seconds=60)
    zero = spawn(missing_gradient, 2, True, seconds=60)
    for (a, norms, steps), (b, want, _) in zip(missing, zero, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        assert norms == want == missing[0][1]
        assert steps == [2, 2]


def lone_nan(rank, world):
    """A NaN on one rank: in a shard, in a plain tensor of rank 0, then of rank 1."""
    mesh = init_device_mesh("cpu", (world,))
    plain = nn.Parameter(torch.ones(3, 3))
    cut = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    params = [nn.Parameter(cut), plain]
    optimizer = MARS(params, compile=False, collectives=MeshCollectives(mesh))
    out = []
    for broken, where in enumerate((1, 0, 1)):
        for p in params:
            p.grad = torch.ones_like(p)
        if rank == where:
            grad = params[0].grad.to_local() if broken == 0 else plain.grad
            grad[0, 0] = float("nan")
        optimizer.step()
        out.append((optimizer.num_skipped, bool((plain == 1).all())))
    return out


def test_all_ranks_skip_together():
    assert spawn(lone_nan, 2) == [[(1, True), (2, True), (3, True)]] * 2


def lone_overflow(rank, world):
    """On one rank: a moment that float16 does not hold, and SOAP's first gradient."""
    mesh, out = init_device_mesh("cpu", (world,)), []
    for mars_type, state_dtype, large in (
        ("adamw", torch.float16, 3e4),
        ("soap", None, float("inf")),
    ):
        whole = torch.ones(4, 4, dtype=torch.float16)
        p = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
        optimizer = MARS(
            [p], mars_type=mars_type, betas=(0.9, 0.99), state_dtype=state_dtype,
            compile=False, collectives=MeshCollectives(mesh),
        )  # fmt: skip
        for broken in (True, False, False):
            p.grad = torch.ones_like(p)
            if broken and rank == 1:
                p.grad.to_local()[0, 0] = large
            optimizer.step()
            out.append((optimizer.num_skipped, bool((p.to_local() == 1).all())))
    return out


def test_what_one_rank_cannot_hold_all_skip():
    adamw = [(1, True), (1, False), (1, False)]
    soap = [(1, True), (1, True), (1, False)]  # whose first step moves nothing
    assert spawn(lone_overflow, 2) == [adamw + soap] * 2


# ---- precision and memory ------------------------------------------------------------


def functional_steps(rank, world):
    """Rule.step over new DTensors each time: one all-reduce, nothing kept alive."""
    import marsopt

    mesh = init_device_mesh("cpu", (world,))
    collectives = MeshCollectives(mesh)
    rule = marsopt.mars_m(max_norm=1.0)
    x = {"w": distribute_tensor(torch.ones(5, 3), mesh, [Shard(0)])}
    state, calls, real = rule.init(x), [], dist.all_reduce

    def all_reduce(tensor, *args, **kw):
        calls.append(tensor.numel())
        return real(tensor, *args, **kw)

    dist.all_reduce = all_reduce
    try:
        seen = []
        for t in range(4):
            calls.clear()
            g = {"w": distribute_tensor(torch.full((5, 3), t + 1.0), mesh, [Shard(0)])}
            old = weakref.ref(x["w"])
            x, state = rule.step(x, g, state, lr=0.1, collectives=collectives)
            seen.append((list(calls), old() is None))
    finally:
        dist.all_reduce = real
    return seen[1:]


def test_functional_steps_keep_nothing_and_reduce_once():
    for seen in spawn(functional_steps, 2):
        assert seen == [([4], True)] * 3


def precision(rank, world):
    """Relative errors to float64: mixed dtypes, float64, and the default bf16."""
    from marsopt import Matrices, NewtonSchulz, Orthogonal
    from marsopt.functional.collectives import Request
    from marsopt.rules.preconditioner import Whole

    mesh = init_device_mesh("cpu", (world,))
    out = {}
    for strategy in ("owner", "gram", "replicate"):
        for name, dtypes, ns_dtype in (
            ("mixed", (torch.bfloat16, torch.float32), torch.float32),
            ("double", (torch.float64, torch.float64), torch.float64),
            ("default", (torch.float32, torch.float32), torch.bfloat16),
        ):
            g = torch.Generator().manual_seed(0)
            whole = [
                torch.randn(96, 48, generator=g, dtype=torch.float64) for _ in "ab"
            ]
            given = [w.to(d) for w, d in zip(whole, dtypes, strict=True)]
            cut = [distribute_tensor(w, mesh, [Shard(0)]) for w in given]
            polar = Orthogonal(ns=NewtonSchulz(dtype=ns_dtype))
            found = MeshCollectives(mesh, strategy=strategy).on_owners(
                [Request(Whole(c.to_local()), c, Matrices(), polar) for c in cut]
            )
            exact = NewtonSchulz(dtype=torch.float64)(given[1].double())
            mine = distribute_tensor(exact, mesh, [Shard(0)]).to_local()
            error = (found[1].matrix.double() - mine).norm() / mine.norm()
            out[strategy, name] = float(error)
    return out


def test_precision_does_not_depend_on_the_neighbours():
    for errors in spawn(precision, 2):
        for (strategy, name), error in errors.items():
            bound = {"mixed": 1e-4, "double": 1e-9, "default": 3e-2}[name]
            assert error < bound, (strategy, name)
