"""``reset_momentum``: what follows is what a new optimizer does on the same weights."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from marsopt import MARS
from tests.stacking import equal, run_protocol, same
from tests.table import ROWS, SHAPES, tensors

EXACT = {
    f"{n}-exact": r for n, r in ROWS.items() if r.has_gamma and "log_time" not in n
}


def optimizer_of(name, params, **more):
    row = (ROWS | EXACT)[name]
    own = dict(correction="exact") if name in EXACT else {}
    options = dict(mars_type=row.mars_type, lr=0.02, max_norm=2.0, compile=False)
    options |= dict(ns_dtype=torch.float32) if "ns_dtype" in row.kwargs else {}
    return MARS(params, **{**row.of_class, **options, **own, **more})


def start(names=tuple(SHAPES)):
    return [nn.Parameter(x) for x in tensors(names, 0).values()]


def pair(name):
    """Parameters that have been trained, their optimizer after a reset, and a new one
    over copies of what was trained.
    """
    params = start()
    optimizer = optimizer_of(name, params)
    run_protocol(optimizer, params, range(3))
    trained = [p.detach().clone() for p in params]
    optimizer.reset_momentum()
    equal(params, trained)  # no weight jumps
    others = [nn.Parameter(x) for x in trained]
    return params, optimizer, others, optimizer_of(name, others)


@pytest.mark.parametrize("name", [*ROWS, *EXACT])
def test_later_steps_are_a_new_optimizers(name):
    params, optimizer, others, new = pair(name)
    same(optimizer.state_dict(), new.state_dict())
    for each, of in ((optimizer, params), (new, others)):
        run_protocol(each, of, range(10, 13))
    equal(params, others)
    same(optimizer.state_dict(), new.state_dict())


def test_graphs_stay(of_dynamo):
    """State begins again where it lies."""
    params = start(("wide", "bias"))
    optimizer = optimizer_of("mars_adamw-log_time", params, compile=True)
    run_protocol(optimizer, params, range(2))
    held = {id(t) for entry in optimizer.state.values() for t in entry.values()}
    before = counters["stats"]["unique_graphs"]
    optimizer.reset_momentum()
    run_protocol(optimizer, params, range(2))
    assert counters["stats"]["unique_graphs"] == before
    assert held == {id(t) for e in optimizer.state.values() for t in e.values()}


def test_one_line_says_what_was_set(caplog):
    with caplog.at_level(logging.INFO, "marsopt"):
        pair("mars_soap")
    (line,) = [r.message for r in caplog.records if "reset_momentum" in r.message]
    assert "row_basis to identity" in line
    assert "exp_avg_in_basis" in line


def test_what_is_no_average_stays():
    params = start()
    optimizer = optimizer_of("mars_adamw", params, max_norm=0.5)
    run_protocol(optimizer, params, range(2))
    params[0].grad[0, 0] = torch.nan
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.state[params[0]]["mine"] = torch.ones(2)
    optimizer.reset_momentum()
    assert optimizer.num_skipped == 1
    assert optimizer.max_norm == 0.5
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert torch.equal(optimizer.state[params[0]]["mine"], torch.ones(2))


def test_exact_mars_asks_for_its_protocol_again():
    params, optimizer, *_ = pair("mars_adamw-exact")
    with pytest.raises(RuntimeError, match="update_previous_grad"):
        optimizer.step()
    run_protocol(optimizer, params, range(1))


def test_bases_of_uneven_parts_begin_as_identities():
    p, q = (torch.nn.Parameter(torch.randn(12, 6)) for _ in range(2))
    options = dict(mars_type="soap", splits=(8, 2, 2), compile=False)
    optimizer = MARS([p], **options)
    for _ in range(2):
        p.grad = torch.randn_like(p)
        optimizer.step()
    optimizer.reset_momentum()
    q.data.copy_(p.data)
    new = MARS([q], **options)
    for _ in range(3):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
        optimizer.step()
        new.step()
    assert torch.equal(p, q)
