"""Ranks whose hyperparameters come to differ between two steps."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from marsopt import MARS
from marsopt.parallel import MeshCollectives
from marsopt.parallel.agreement import Agreement
from tests.processes import spawn
from tests.stacking import traced

CHANGES = {
    "lr": lambda optimizer: optimizer.param_groups[0].update(lr=0.5),
    "betas": lambda optimizer: optimizer.param_groups[0].update(betas=(0.9, 0.98)),
    "max_norm": lambda optimizer: setattr(optimizer, "max_norm", 0.3),
    "amsgrad": lambda optimizer: optimizer.param_groups[0].update(amsgrad=True),
}

VALUES = {
    "lr": "0.0033333333333333335 on rank 0, 0.5 on rank 1",
    "betas": "(0.95, 0.99) on rank 0, (0.9, 0.98) on rank 1",
    "max_norm": "1.0 on rank 0, 0.3 on rank 1",
    "amsgrad": "False on rank 0, True on rank 1",
}


def train(rank, world, shape, places, who, what, compile):
    """Three steps, a change on the ranks of ``who``, and a step more; the error, and
    whether parameters and state are those from before.
    """
    mesh = init_device_mesh("cpu", shape)
    g = torch.Generator().manual_seed(0)
    params = []
    for place in places:
        whole = torch.randn(8, 6, generator=g)
        params.append(nn.Parameter(distribute_tensor(whole, mesh, place)))
    params.append(nn.Parameter(torch.randn(3, generator=g)))  # plain, on every rank
    optimizer = MARS(
        params, lr=0.01, max_norm=1.0, compile=compile,
        collectives=MeshCollectives(mesh),
    )  # fmt: skip

    def step():
        for p in params:
            p.grad = torch.ones_like(p)
        with traced():
            optimizer.step()

    for t in range(3):
        optimizer.param_groups[0]["lr"] = 0.01 / (t + 1)
        step()
    collectives = MeshCollectives(mesh)
    pieces = [collectives.local(p.detach()) for p in params]
    before = [piece.clone() for piece in pieces]
    if rank in who:
        CHANGES[what](optimizer)
    error = ""
    try:
        step()
    except RuntimeError as raised:
        error = str(raised)
    same = all(map(torch.equal, before, pieces))
    if error:  # set right, it goes on
        optimizer.param_groups[0].update(lr=0.001, betas=(0.95, 0.99), amsgrad=False)
        optimizer.max_norm = 1.0
        step()
        steps = float(optimizer.state[params[0]]["step"])
        assert steps == 4, steps
    return error, same


ROWS, COLS, WHOLE = [Shard(0)], [Shard(1)], [Replicate()]


@pytest.mark.processes
@pytest.mark.parametrize("what", CHANGES)
def test_a_change_on_one_rank_is_an_error_on_all(what):
    for error, same in spawn(train, 2, (2,), [ROWS, WHOLE], [1], what, False):
        assert "differ between the ranks" in error
        assert "set equal ones on every rank" in error
        assert f"{what}={VALUES[what]}" in error
        assert len(error) <= 300
        assert same


@pytest.mark.processes
@pytest.mark.parametrize("compile", [False, True])
def test_three_ranks(compile):
    for error, same in spawn(train, 3, (3,), [ROWS, COLS], [0], "lr", compile):
        assert "differ between the ranks" in error
        assert same


@pytest.mark.processes
def test_a_change_on_all_ranks_is_none():
    for what in CHANGES:
        found = spawn(train, 2, (2,), [ROWS], [0, 1], what, False)
        assert found == [("", False)] * 2


@pytest.mark.processes
def test_all_axes_that_cut_something_compare():
    """Also with ranks that share no shards of one parameter."""
    places = [[Shard(0), Replicate()], [Replicate(), Shard(0)]]
    for error, same in spawn(train, 4, (2, 2), places, [3], "lr", False):
        assert "differ between the ranks" in error
        assert same


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_ranks", [2, 3, 1000, 2**16])
def test_sums_are_exact_at_any_number_of_ranks(num_ranks, dtype):
    like, agreement = torch.zeros(5, 4, dtype=dtype), Agreement()
    ours, theirs = (agreement.digest_rows(what, num_ranks, like) for what in ("a", "b"))
    assert ours.shape[1] == 4 and not torch.equal(ours, theirs)
    total = ours * num_ranks  # as exact as the sum, which stays below 2^24
    exact = 2 / torch.finfo(dtype).eps
    assert total.max() <= exact
    assert agreement.judged(like, total, num_ranks, "a", []) is like
    for others in (1, num_ranks - 1):
        mixed = total + others * (theirs - ours)
        with (
            mock.patch("torch.distributed.get_rank", return_value=0),
            pytest.raises(RuntimeError, match="differ between the ranks"),
        ):
            agreement.judged(like, mixed, num_ranks, "a", [])
