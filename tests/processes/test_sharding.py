"""What shards meet beside the table of test_sharded.py: several meshes, tensor
parallelism by torch, what is sent, ranks that differ, and precision.
"""

from __future__ import annotations

import contextlib
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import marsopt
from marsopt import LOCAL, MARS, REGISTRY
from marsopt.parallel import DataParallel, MeshCollectives
from tests.processes import spawn
from tests.slices import BATCHED, FLATTENED, Several, at_once
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
APPROXIMATE, EXACT = "approximate", "exact"


def values(seed, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return {n: scale * torch.randn(s, generator=g) for n, s in SHAPES.items()}


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
    got, mine = steps(True, collectives=MeshCollectives(line))
    pairs = zip(got, want, strict=True)
    differences = (float((a - b).abs().max()) for a, b in pairs)
    return max(abs(mine - norm) / norm, *differences)


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


def tensor_parallel(rank, world, rule, splits):
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
        groups = [{"params": [model.up.weight], "splits": splits}]
        groups += [{"params": [model.down.weight]}]
        optimizer = MARS(
            groups, lr=0.02, mars_type=rule, max_norm=0.5, compile=False,
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


@pytest.mark.parametrize("splits", [None, (7, 3, 2)], ids=["whole", "fused"])
@pytest.mark.parametrize("rule", ["mars-shampoo", "mars-normuon", "mars-soap"])
def test_fsdp_and_tensor_parallelism(rule, splits):
    """A matrix that two axes cut goes to one owner over both and back, and sends two
    thirds of what gathering it on 2x2 ranks would; a fused weight is gathered.
    """
    found = spawn(tensor_parallel, 4, rule, splits)
    for places, error, sent in found:
        assert any("StridedShard" in p or "_S" in p for p in places), places
        assert error < 1e-11
        assert len(sent) <= 8  # 4 for each bucket
    away = sum(sum(sent) for _, _, sent in found) / 4
    numel = 2 * 8 * 12
    if splits is None:  # gathered, it is 3 / 4 numel
        assert 0 < away <= numel / 2


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
        ("mars-adamw", APPROXIMATE, True),
        ("mars-adamw", EXACT, False),
        ("mars-m", APPROXIMATE, False),
    ],
)
def test_tensor_parallelism_alone(rule, correction, pure):
    for places, error in spawn(tensor_parallel_alone, 2, rule, correction, pure):
        assert places["norm.weight"] == "(Partial(sum),)"
        assert places["table.weight"] != "(Shard(dim=0),)"  # as the table itself is
        assert error < 1e-9


# ---- what is sent --------------------------------------------------------------------


def count(rank, world):
    """All-to-alls of a step after the first, of expert weights, heads and kernels on
    two ranks: whole on a rank, and not.
    """
    mesh = init_device_mesh("cpu", (world,))
    found, real = {}, dist.all_to_all_single
    for name, several, placement in (
        ("experts", Several((4, 4, 6), BATCHED), Shard(0)),
        ("heads", Several((16, 6), dict(splits=4)), Shard(0)),
        ("rows of experts", Several((4, 4, 6), BATCHED), Shard(1)),
        ("odd heads", Several((12, 6), dict(splits=3)), Shard(0)),
        ("fused kernels", Several((8, 2, 3), FLATTENED | dict(splits=2)), Shard(0)),
        ("channels out", Several((5, 4, 3, 3), FLATTENED), Shard(0)),
        ("channels in", Several((6, 3, 2, 2), FLATTENED), Shard(1)),
        ("height", Several((6, 2, 3, 2), FLATTENED), Shard(2)),
    ):
        calls = []

        def all_to_all(*args, calls=calls, **kw):
            calls.append(1)
            return real(*args, **kw)

        dist.all_to_all_single = all_to_all
        collectives = MeshCollectives(mesh)
        at_once(
            {name: several},
            1,
            lambda _, whole, place=placement: distribute_tensor(whole, mesh, [place]),
            mars_type="mars-m",
            collectives=collectives,
            lr=0.1, ns_dtype=torch.float32, compile=False,
        )  # fmt: skip
        dist.all_to_all_single = real
        found[name] = len(calls)
    return found


def test_matrices_that_lie_whole_on_a_rank_do_not_travel():
    """Two all-to-alls a bucket: an owner of two matrices has two buckets."""
    here = dict.fromkeys(("experts", "heads", "fused kernels"), 0)
    one = dict.fromkeys(("channels out", "channels in", "height"), 2)
    several = dict.fromkeys(("rows of experts", "odd heads"), 4)
    for found in spawn(count, 2):
        assert found == here | one | several


def empty_matrices(rank, world, dim):
    """Steps of rules on a matrix and on tensors that have no element, cut by a dim, or
    whole: of several ranks, of one.
    """
    out, put, collectives = {}, lambda x: x, LOCAL if world == 1 else DataParallel()
    if dim is not None:
        mesh = init_device_mesh("cpu", (world,))
        put, collectives = (
            lambda x: distribute_tensor(x, mesh, [Shard(dim)]),
            MeshCollectives(mesh),
        )
    for rule in ("soap", "mars-soap-muon", "normuon", "mars-m"):
        shapes = (6, 4), (0, 4), (4, 0), (0, 4, 3), (2, 0, 3)
        params = [nn.Parameter(put(torch.ones(shape))) for shape in shapes]
        groups = [dict(params=params[:3]), dict(params=params[3:], **BATCHED)]
        optimizer = MARS(
            groups, lr=0.1, mars_type=rule, compile=False, **steady(rule),
            collectives=collectives,
        )  # fmt: skip
        for _ in range(3):
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        out[rule] = optimizer.num_skipped
    return out


@pytest.mark.parametrize("world, dim", [(2, 0), (2, 1), (2, None), (1, None)])
def test_rules_take_matrices_without_an_element(world, dim):
    for found in spawn(empty_matrices, world, dim):
        assert set(found.values()) == {0}


def saved_factors(rank, world):
    """All-reduces of SOAP's state dict, of eight matrices, and the largest difference
    of a buffer to the state dict of one process.
    """
    mesh = init_device_mesh("cpu", (2, 2))
    g = torch.Generator().manual_seed(0)
    drawn = [torch.randn(s, generator=g) for s in ((6, 4), (4, 7)) * 4]
    places = [[Replicate(), Shard(0)], [Shard(0), Replicate()]] * 4

    def saved(put, **options):
        params = [nn.Parameter(put(x, p)) for x, p in zip(drawn, places, strict=True)]
        optimizer = MARS(
            params, mars_type="soap", compile=False, **steady("soap"), **options
        )
        for _ in range(3):
            for p, x, place in zip(params, drawn, places, strict=True):
                p.grad = put(x.cos(), place)
            optimizer.step()
        return optimizer.state_dict()["state"]

    want = saved(lambda x, place: x.clone())
    calls, real = [], dist.all_reduce
    with mock.patch.object(
        dist, "all_reduce", lambda *a, **own: (calls.append(a), real(*a, **own))
    ):
        got = saved(
            lambda x, place: distribute_tensor(x, mesh, place),
            collectives=MeshCollectives(mesh),
        )
    num = sum(x.dtype in (torch.uint8, torch.int64) for x, *_ in calls[-4:])
    worst = 0.0
    for i, entry in want.items():
        assert got[i].keys() == entry.keys()
        for key, x in entry.items():
            mine = got[i][key]
            mine = mine.full_tensor() if isinstance(mine, DTensor) else mine
            assert mine.dtype == x.dtype and mine.shape == x.shape, key
            worst = max(worst, float((mine.float() - x.float()).abs().sum()))
    return num, worst


def test_a_state_dict_takes_two_all_reduces():
    """One of the owners' numbers, one of all buffers that they keep."""
    for num, worst in spawn(saved_factors, 4):
        assert num == 2
        assert worst < 1e-3  # of all elements together


# ---- faults --------------------------------------------------------------------------


def lone_nan(rank, world):
    """A NaN on one rank: in a shard, in a plain tensor of rank 0, then of rank 1; an
    infinity in SOAP's first gradient, which moves nothing when it counts.
    """
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
    whole = torch.ones(4, 4, dtype=torch.float16)
    p = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    options = dict(mars_type="soap", compile=False, collectives=MeshCollectives(mesh))
    optimizer = MARS([p], **options)
    for broken in (True, False, False):
        p.grad = torch.ones_like(p)
        if broken and rank == 1:
            p.grad.to_local()[0, 0] = float("inf")
        optimizer.step()
        out.append((optimizer.num_skipped, bool((p.to_local() == 1).all())))
    return out


def test_all_ranks_skip_together():
    skipped, of_soap = (
        [(n, True) for n in (1, 2, 3)],
        [(1, True), (1, True), (1, False)],
    )
    assert spawn(lone_nan, 2) == [skipped + of_soap] * 2


def nan_in_one_replica(rank, world, kind):
    """What is skipped, whether weights are finite, and how many all-reduces a step
    takes, where one rank of the second replica has a NaN.
    """
    whole = [torch.randn(8, 6, generator=torch.Generator().manual_seed(0))] * 4
    if kind == "DDP":
        collectives, whole = DataParallel(), [x.clone() for x in whole]
    else:
        mesh = init_device_mesh("cpu", (2, 2))
        places = [[Replicate(), Shard(0)]] * 3 + [[Replicate(), Replicate()]]
        collectives = MeshCollectives(mesh)
        pairs = zip(whole, places, strict=True)
        whole = [distribute_tensor(x, mesh, place) for x, place in pairs]
    params = [nn.Parameter(x) for x in whole]
    optimizer = MARS(
        params, mars_type="moonlight", max_norm=1.0, compile=False,
        collectives=collectives,
    )  # fmt: skip
    out, calls, real = [], [], dist.all_reduce
    for broken in (None, 0, 3, None):
        for p in params:
            p.grad = torch.ones_like(p)
        if broken is not None and rank == 3:
            collectives.local(params[broken].grad)[0, 0] = float("nan")
        calls.clear()
        with mock.patch.object(
            dist, "all_reduce", lambda *a, **own: (calls.append(1), real(*a, **own))
        ):
            optimizer.step()
        pieces = [collectives.local(p) for p in params]
        finite = all(bool(piece.isfinite().all()) for piece in pieces)
        out.append((optimizer.num_skipped, finite, len(calls)))
    return out[1:]


@pytest.mark.parametrize("kind", ["HSDP", "DDP"])
def test_a_nan_in_one_replica_voids_the_step_in_all(kind):
    want = [(1, True, 1), (2, True, 1), (2, True, 1)]
    assert spawn(nan_in_one_replica, 4, kind) == [want] * 4


# ---- precision and memory ------------------------------------------------------------


def functional_steps(rank, world):
    """Rule.step over new DTensors each time: one all-reduce, nothing kept alive."""
    import marsopt

    mesh = init_device_mesh("cpu", (world,))
    collectives = MeshCollectives(mesh)
    rule = marsopt.rule("mars-m", max_norm=1.0)
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
    from marsopt.rules.component import MatrixInput
    from marsopt.step.owners import Request

    mesh = init_device_mesh("cpu", (world,))
    out = {}
    for name, dtypes, ns_dtype in (
        ("mixed", (torch.bfloat16, torch.float32), torch.float32),
        ("double", (torch.float64, torch.float64), torch.float64),
        ("default", (torch.float32, torch.float32), torch.bfloat16),
    ):
        g = torch.Generator().manual_seed(0)
        whole = [torch.randn(96, 48, generator=g, dtype=torch.float64) for _ in "ab"]
        given = [w.to(d) for w, d in zip(whole, dtypes, strict=True)]
        cut = [distribute_tensor(w, mesh, [Shard(0)]) for w in given]
        polar = Orthogonal(ns=NewtonSchulz(dtype=ns_dtype))
        found = MeshCollectives(mesh).on_owners(
            [Request(MatrixInput(c.to_local()), c, Matrices(), polar) for c in cut]
        )
        exact = NewtonSchulz(dtype=torch.float64)(given[1].double())
        mine = distribute_tensor(exact, mesh, [Shard(0)]).to_local()
        error = (found[1].matrix.double() - mine).norm() / mine.norm()
        out[name] = float(error)
    return out


def test_precision_does_not_depend_on_the_neighbours():
    for errors in spawn(precision, 2):
        for name, error in errors.items():
            bound = {"mixed": 1e-4, "double": 1e-9, "default": 3e-2}[name]
            assert error < bound, name
