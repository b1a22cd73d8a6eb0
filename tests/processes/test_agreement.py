"""Ranks that begin with different options: an error on all of them, by both values."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from marsopt import MARS, rule
from marsopt.parallel import DataParallel, MeshCollectives
from tests.processes import spawn

pytestmark = pytest.mark.processes

SAME = dict(lr=0.01, betas=(0.95, 0.99), max_norm=1.0, amsgrad=False)
SAME |= dict(mars_type="mars-adamw")
OTHERS = {
    "lr of group 0": dict(lr=0.5),
    "betas of group 0": dict(betas=(0.9, 0.98)),
    "max_norm": dict(max_norm=0.3),
    "amsgrad of group 0": dict(amsgrad=True),
    "mars_type of group 0": dict(mars_type="adamw"),
}
NAME, SHAPE, VALUES = "parameter 'w'", "parameter 'b'", "the sum of the bits of"
MORE, PRECISION = "a parameter more", "another precision"
FROZEN, MODULES = "all parameters frozen", "two modules in another order"
TREE = "the order of a tree"  # of the functional door
LOADED, GRADIENT = "number of loads", f"{VALUES} the gradient of parameter 'w'"
# only under DDP does a rank load by itself, and have whole values
OF_DDP, OF_MESHES = (VALUES, LOADED, GRADIENT), (MODULES,)


def first_step(rank, world, mesh_shape, which):
    """Of every difference of the rank ``which``: the error of a first step, and whether
    it has changed nothing. ``mesh_shape`` None: plain data parallelism.
    """
    told = {}
    some = OF_DDP if mesh_shape is None else OF_MESHES
    for what in (*OTHERS, NAME, SHAPE, MORE, PRECISION, FROZEN, TREE, *some):
        is_other = rank == which
        w = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
        w, b = w.flip(0) if is_other and what == VALUES else w, torch.ones(3)
        if mesh_shape is None:
            collectives = DataParallel()
        else:
            names = ("replicate", "shard")[-len(mesh_shape) :]
            mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
            collectives = MeshCollectives(mesh)
            places = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
            w = distribute_tensor(w, mesh, places, src_data_rank=None)
        if is_other and what == SHAPE:
            b = torch.ones(4)
        name = "v" if is_other and what == NAME else "w"
        params = {name: nn.Parameter(w), "b": nn.Parameter(b)}
        if is_other and what == MORE:
            params["more"] = nn.Parameter(torch.ones(2))
        options = SAME | (OTHERS.get(what, {}) if is_other else {})
        if what == PRECISION:
            ns_dtype = torch.float32 if is_other else torch.bfloat16
            options = dict(mars_type="muon", ns_dtype=ns_dtype)
        given = [*params.items()]
        if what == MODULES:
            modules = [nn.Linear(6, 6, bias=False) for _ in range(2)]
            given = [fully_shard(m, mesh=mesh).weight for m in modules]
            given = given[::-1] if is_other else given
        optimizer = MARS(given, collectives=collectives, compile=False, **options)
        if is_other and what == LOADED:
            optimizer.load_state_dict(optimizer.state_dict())
        for p in params.values():
            p.requires_grad_(not (is_other and what == FROZEN))
            p.grad = torch.ones_like(p)
        if is_other and what == GRADIENT:
            params[name].grad[0, 0] += 1
        try:
            if what == TREE:
                tree = dict.fromkeys("xy"[::-1] if is_other else "xy", w)
                rule("moonlight").init(tree, collectives=collectives)
            else:
                optimizer.step()
            told[what] = "", False
        except RuntimeError as error:
            same = torch.equal(collectives.local(params[name]), collectives.local(w))
            told[what] = str(error), same
    return told


@pytest.mark.parametrize(
    "mesh_shape, world, which",
    [((2,), 2, 1), ((2, 2), 4, 3), ((3,), 3, 0), (None, 2, 1)],
    ids=["FSDP2", "HSDP", "the first of three", "DDP"],
)
def test_a_difference_is_an_error_on_all_ranks(mesh_shape, world, which):
    expected = {name: next(iter(value.values())) for name, value in OTHERS.items()}
    expected |= {SHAPE: "(4,) torch.float32", LOADED: 1}
    usual = {name: SAME[name.split()[0]] for name in OTHERS}
    usual |= {SHAPE: "(3,) torch.float32", LOADED: 0}
    for told in spawn(first_step, world, mesh_shape, which):
        error, same = told.pop(NAME)
        assert "parameter 'v'=(8, 6) " in error and "parameter 'w'=(8, 6) " in error
        assert same
        texts = {MORE: "", PRECISION: "", FROZEN: "float32 frozen on rank"}
        texts |= {VALUES: f"{VALUES} parameter 'w'=", GRADIENT: f"{GRADIENT}="}
        texts |= {MODULES: "weight of sharded module", TREE: "leaf 'x'=(8, 6) "}
        for what in texts.keys() & told.keys():
            error, same = told.pop(what)
            assert "differ between the ranks" in error and same, what
            assert texts[what] in error
        for what, (error, same) in told.items():
            assert same, what
            pair = usual[what], expected[what]
            first, last = pair[::-1] if which == 0 else pair
            values = f"{what}={first} on rank 0, {what}={last} on rank {max(which, 1)}"
            assert f"differ between the ranks ({values}" in error
            assert "from equal arguments on every rank" in error
