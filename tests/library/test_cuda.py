"""On a GPU: the authors' trajectories, the compiled step against the eager one, one
NCCL rank against none, CUDA graphs, no host sync. Skipped elsewhere, but that
MARSOPT_TEST_DEVICE=cpu rehearses all that a CPU can.
"""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from marsopt import MARS, REGISTRY
from marsopt.parallel import MeshCollectives
from tests import recordings

DEVICE = os.environ.get("MARSOPT_TEST_DEVICE", "cuda")
GPU = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and not GPU, reason="needs a GPU that torch can use"
)
gpu_alone = pytest.mark.skipif(not GPU, reason="a CPU has nothing like it")

SHAPES = [(64, 32), (64, 32), (48,), (32, 64), (64, 32)]
every_rule = pytest.mark.parametrize("mars_type", REGISTRY)


def dtype_of(mars_type: str) -> torch.dtype:
    """SOAP's eigenvectors multiply an ulp of a gradient by thousands."""
    return torch.float64 if "soap" in mars_type else torch.float32


def drawn(seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=g).to(DEVICE, dtype) for s in SHAPES]


def parameters(mars_type: str) -> list[nn.Parameter]:
    return [nn.Parameter(x) for x in drawn(0, dtype_of(mars_type))]


def options(mars_type: str) -> dict:
    lr = torch.tensor(1e-2, dtype=torch.float64, device=DEVICE)
    options = dict(lr=lr, mars_type=mars_type, max_norm=0.7)
    if "soap" in mars_type:  # the longer side's factor lacks a rank: rounding decides
        options["sides"] = "short"
    return options | dict(ns_dtype=dtype_of(mars_type))


def walk(
    optimizer: MARS, params: list[nn.Parameter], num_steps: int, factor: float = 1.0
) -> None:
    for seed in range(num_steps):
        for p, g in zip(params, drawn(seed, params[0].dtype), strict=True):
            p.grad = factor * g
        optimizer.step()


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("case", recordings.TABLE["cases"])
def test_golden(case, compile):
    recordings.walk(recordings.read(case, "copied"), DEVICE, compile)


@every_rule
@pytest.mark.parametrize("other", ["compiled", "an ulp off"])
def test_compiled_is_eager(mars_type, other):
    """Sums of other order differ by an ulp: a bound that it breaks proves nothing."""
    a, b = parameters(mars_type), parameters(mars_type)
    ulp = torch.finfo(dtype_of(mars_type)).eps if other == "an ulp off" else 0.0
    walk(MARS(a, compile=False, **options(mars_type)), a, 4)
    walk(MARS(b, compile=not ulp, **options(mars_type)), b, 4, 1 + ulp)
    torch.testing.assert_close(b, a, rtol=0, atol=1e-5)


def test_equal_inputs_give_equal_bits():
    """Of tensors with gaps, too, whose rows add up to few norms."""
    ends = []
    for _ in range(4):
        g = torch.Generator().manual_seed(0)
        whole = torch.randn(500, 64, generator=g).to(DEVICE)
        p = nn.Parameter(whole[:, ::2])
        optimizer = MARS([p], compile=False, **options("adamw"))
        p.grad = torch.randn(500, 32, generator=g).to(DEVICE)
        optimizer.step()
        ends.append(optimizer.grad_norm)
    assert len({norm.item() for norm in ends}) == 1


@gpu_alone
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@every_rule
def test_no_host_sync(mars_type):
    params = parameters(mars_type)
    optimizer = MARS(params, compile=True, **options(mars_type))
    walk(optimizer, params, 2)
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(3):
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@gpu_alone
@pytest.mark.parametrize("mars_type", REGISTRY)
def test_a_captured_step_replays(mars_type):
    """Gradients in fixed places; the learning rate is a tensor that may change."""
    eager, params = parameters(mars_type), parameters(mars_type)
    reference = MARS(eager, compile=False, **options(mars_type))
    walk(reference, eager, 5)
    optimizer = MARS(params, compile=True, **options(mars_type))
    for p in params:
        p.grad = torch.zeros_like(p)

    def feed(seed: int) -> None:
        for p, g in zip(params, drawn(seed, params[0].dtype), strict=True):
            p.grad.copy_(g)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for seed in range(2):
            feed(seed)
            optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    feed(2)
    with torch.cuda.graph(graph):
        optimizer.step()  # recorded, not run
    for seed in range(2, 5):
        feed(seed)
        graph.replay()
    torch.testing.assert_close(params, eager, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    """A mesh of this process alone."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("ranks") / "store"), 1)
    own = dict(store=store, rank=0, world_size=1, timeout=timedelta(seconds=60))
    if DEVICE == "cuda":
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        dist.init_process_group("nccl", device_id=torch.device("cuda", 0), **own)
    else:
        dist.init_process_group("gloo", **own)
    yield init_device_mesh(DEVICE, (1,))
    dist.destroy_process_group()


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(24, 40), nn.Tanh(), nn.LayerNorm(40), nn.Linear(40, 8)
    return nn.Sequential(*layers).to(DEVICE)


def train(model: nn.Module, optimizer: MARS) -> list[float]:
    losses = []
    for seed in range(4):
        x = torch.randn(16, 24, generator=torch.Generator().manual_seed(seed))
        loss = 10 * model(x.to(DEVICE)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("mars_type", ["mars-adamw", "mars-m"])
def test_one_sharded_rank_is_none(mesh, mars_type, compile):
    """FSDP2 over one rank: DTensors, its collectives, and the planner's owner."""
    own = options(mars_type) | dict(compile=compile)
    whole = model()
    want = train(whole, MARS(whole.parameters(), **own))
    sharded = fully_shard(model(), mesh=mesh)
    if DEVICE == "cpu":  # gloo has no average
        sharded.set_gradient_divide_factor(1)
        sharded.set_force_sum_reduction_for_comms(True)
    optimizer = MARS(sharded.parameters(), collectives=MeshCollectives(mesh), **own)
    assert train(sharded, optimizer) == pytest.approx(want, rel=1e-5)
