"""Gradients that DDP reduces to the owners of their rows alone: training goes as after
an all-reduce, and half the bytes travel.
"""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel

from marsopt import MARS
from marsopt.parallel import DataParallel
from tests.processes import spawn
from tests.table import steady

pytestmark = pytest.mark.processes

VIEWS = dict(gradient_as_bucket_view=True)
UNUSED, STATIC = dict(find_unused_parameters=True), dict(static_graph=True)
# torch itself fails in a static graph with no_sync
WAYS = [(form, how) for form in (UNUSED, VIEWS | UNUSED) for how in ("", "no_sync")]
WAYS += [(STATIC, ""), (STATIC | VIEWS, "")]
CASES = [("mars-m", "transport"), ("adamw", None)]


class Model(nn.Module):
    """With a number, a transposed parameter, a branch that not every pass takes, and
    parameters that none uses.
    """

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(6, 5), nn.LayerNorm(5)
        self.branch, self.last = nn.Linear(5, 5), nn.Linear(5, 2, bias=False)
        self.idle, self.scale = nn.Linear(5, 3), nn.Parameter(torch.ones(()))
        self.across = nn.Parameter(torch.randn(5, 5).mT)

    def forward(self, x, takes_branch):
        x = torch.tanh(self.norm(self.first(x))) @ self.across * self.scale
        return self.last(self.branch(x) if takes_branch else x)


def build(to_owners, mars_type="mars-m", form="approximate", **options):
    """DDP in buckets of a few parameters, and MARS with DataParallel."""
    torch.manual_seed(1)
    model = DistributedDataParallel(Model().double(), bucket_cap_mb=3e-4, **options)
    collectives = DataParallel(model.process_group)
    if to_owners:
        collectives.reduce_to_owners(model)
    optimizer = MARS(
        model.named_parameters(), lr=0.02, lr_1d=0.02, mars_type=mars_type,
        correction=form, ns_dtype=torch.float64, compile=False, max_norm=1.0,
        collectives=collectives, **steady(mars_type),
    )  # fmt: skip
    return model, optimizer, collectives


def loss_of(model, seed, takes_branch=True):
    """Each rank has a batch of its own."""
    g = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    x, y = (torch.randn(8, n, generator=g).double() for n in (6, 2))
    return nn.functional.mse_loss(model(x, takes_branch), y)


def train(model, optimizer, accumulates, may_skip, to_none):
    """Return the gradient norms of three steps, of three batches where gradients are
    accumulated.
    """
    rank, world, norms = dist.get_rank(), dist.get_world_size(), []
    for t in range(3):
        optimizer.zero_grad(set_to_none=to_none)
        for i in range(num := 3 if accumulates else 1):
            # on some ranks, on all, and in the second step's last batch on none
            takes = not may_skip or (rank + t + i) % world == 0 or (t + i) % 3 == 0
            takes = takes and not (may_skip and t == 1 and i == num - 1)
            is_quiet = accumulates == "no_sync" and i < num - 1
            with model.no_sync() if is_quiet else nullcontext():
                loss_of(model, 10 * t + i, takes).backward()
        optimizer.step()
        norms.append(optimizer.grad_norm)
    return torch.stack(norms)


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def beside_all_reduce(rank, world, ways, large):
    """Of every case: how far parameters and norms are from an all-reduce's."""
    off = {}
    with mock.patch("marsopt.parallel.owner_gradients.LARGE", large):
        for mars_type, form in CASES:
            for i, (options, accumulates) in enumerate(ways):
                ends = []
                for to_owners in (True, False):
                    model, optimizer, _ = build(to_owners, mars_type, form, **options)
                    may_skip = "static_graph" not in options
                    norms = train(model, optimizer, accumulates, may_skip, i % 2 == 0)
                    ends.append((flat(model), norms))
                gaps = [(a - b).abs().max() for a, b in zip(*ends, strict=True)]
                off[mars_type, i] = max(map(float, gaps)), ends[0][0]
    return off


def furthest(world, ways, large):
    """The largest gap; all ranks have to hold the same parameters."""
    first, *others = spawn(beside_all_reduce, world, ways, large, seconds=240)
    for case, (_, end) in first.items():
        assert all(torch.equal(other[case][1], end) for other in others), case
    return max(gap for gap, _ in first.values())


@pytest.mark.parametrize("large", [8, 2**16])
def test_two_ranks_train_bit_for_bit_as_after_an_all_reduce(large):
    """Pieces travel where they lie, or in a copy."""
    assert furthest(2, WAYS, large) == 0


def test_three_ranks_train_as_after_an_all_reduce():
    """Sums have another order."""
    assert furthest(3, WAYS[:2], 8) < 1e-12


@pytest.mark.parametrize("world", [2, 3])
def test_gradients_accumulate_without_no_sync(world):
    """Each backward pass reduces the sum of all of them again."""
    ways = [(form, "reduced") for form in (UNUSED, VIEWS | UNUSED, STATIC)]
    assert furthest(world, ways, 8) < 1e-12


# ---- what is sent --------------------------------------------------------------------


def sent(rank, world, to_owners):
    """Elements by gloo's collectives, of a backward pass with its step."""
    model, optimizer, _ = build(to_owners, **STATIC)
    for seed in range(3):
        optimizer.zero_grad()
        with torch.profiler.profile(record_shapes=True) as seen:
            loss_of(model, seed).backward()
            optimizer.step()
    totals = {}
    for event in seen.events():
        if event.name.startswith("gloo:"):
            numel = torch.Size(event.input_shapes[0]).numel()
            totals[event.name] = totals.get(event.name, 0) + numel
    return totals, flat(model).numel()


@pytest.mark.parametrize("world", [2, 4])
def test_each_element_of_a_gradient_goes_to_one_rank(world):
    """A sum that one rank receives sends half of an all-reduce's bytes."""
    pairs = zip(spawn(sent, world, True), spawn(sent, world, False), strict=True)
    for (to_owners, numel), (everywhere, _) in pairs:
        before, after = everywhere["gloo:all_reduce"], to_owners["gloo:all_reduce"]
        # all-reduced remain the one number, and the sums of the step
        assert to_owners["gloo:reduce"] == before - after == numel - 1
        assert to_owners["gloo:all_gather"] == everywhere["gloo:all_gather"]


# ---- plans that change, steps that are skipped ---------------------------------------


def owners_change(rank, world):
    """How far training in which the owners change between backward pass and step is
    from an all-reduce's.
    """
    ends = []
    for to_owners in (True, False):
        model, optimizer, collectives = build(to_owners, **UNUSED)
        loss_of(model, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model, 1).backward()
        # which adds nothing to the gradients
        torch.autograd.grad(loss_of(model.module, 1), model.module.last.weight)
        for group in optimizer.param_groups:
            group["mars_type"] = "mars-adamw"
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model, 2).backward()
        # a plan of another optimizer over the same parameters, which reduces the next
        MARS(model.parameters(), mars_type="lion", collectives=collectives)
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model, 3).backward()
        optimizer.step()
        ends.append(flat(model))
    return float((ends[0] - ends[1]).abs().max())


@pytest.mark.parametrize("world", [2, 3])
def test_a_gradient_follows_its_owners(world):
    assert max(spawn(owners_change, world)) < 1e-12


def skips(rank, world):
    """Steps of one rank's NaN, and of an infinity that a scaler finds."""
    model, optimizer, _ = build(True, **UNUSED)
    scaler = ShardedGradScaler(device="cpu", init_scale=4.0)
    start, moved = flat(model), []
    for bad in (float("nan"), float("inf"), 1.0):
        optimizer.zero_grad()
        loss = loss_of(model, 0) * (bad if rank == world - 1 else 1.0)
        if bad == float("inf"):
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
        moved.append(not torch.equal(flat(model), start))
    return moved, optimizer.num_skipped, scaler.get_scale(), float(optimizer.grad_norm)


def test_all_ranks_skip_together():
    first, *others = spawn(skips, 3)
    assert first[:3] == ([False, False, True], 1, 2.0)
    assert all(other == first for other in others)


# ---- refusals ------------------------------------------------------------------------


def refusals(rank, world):
    told, collectives = [], DataParallel()
    alone = [dist.new_group([r]) for r in range(world)][rank]
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    collectives.reduce_to_owners(ddp)

    def tell(error, what, *args):
        with pytest.raises(error) as info:
            what(*args)
        told.append(str(info.value))

    tell(TypeError, collectives.reduce_to_owners, nn.Linear(2, 2))
    tell(RuntimeError, collectives.reduce_to_owners, ddp)
    other = DistributedDataParallel(nn.Linear(2, 2), process_group=alone)
    tell(ValueError, collectives.reduce_to_owners, other)
    with ddp.join():
        tell(RuntimeError, ddp, torch.ones(2))
    return told


def test_refusals_say_what_to_do():
    for told in spawn(refusals, 2, seconds=60):
        assert "got a Linear, expected a DistributedDataParallel" in told[0]
        assert "can only be called once" in told[1]  # torch's own
        assert "pass it model.process_group" in told[2]
        assert "got a forward pass within join()" in told[3]
