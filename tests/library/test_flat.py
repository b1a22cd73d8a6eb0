"""Flat groups: a rule on stacks is the rule on leaves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import marsopt
from marsopt import FlatGroup
from tests.table import ROWS

SHAPES = {
    "a": (6, 4),
    "scale": (4,),
    "b": (6, 4),
    "tall": (5, 3),
    "c": (6, 4),
    "bias": (4,),
}
MATRICES = {name: s for name, s in SHAPES.items() if len(s) == 2}
LR = 1e-2
CLOSE = dict(rtol=0, atol=1e-6)


def tensors(shapes, seed):
    """{name: random tensor}"""
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}


# ---- the container ----------------------------------------------------------------


@pytest.mark.parametrize("container", [dict, list, tuple])
def test_pack_and_unpack_round_trip(container):
    leaves = tensors(SHAPES, 0)
    leaves["half"] = torch.randn(6, 4).bfloat16()
    given = leaves if container is dict else container(leaves.values())
    flat = FlatGroup.pack(given)
    back = flat.unpack()
    pairs = (
        zip(given.items(), back.items(), strict=True)
        if container is dict
        else zip(enumerate(given), enumerate(back), strict=True)
    )
    for (name, x), (other, y) in pairs:
        assert name == other
        assert torch.equal(x, y) and x.dtype == y.dtype
        assert x.data_ptr() != y.data_ptr()
    assert [tuple(s.shape) for s in flat.stacks] == [
        (3, 6, 4),
        (2, 4),
        (1, 5, 3),
        (1, 6, 4),
    ]


def test_leaves_are_views_of_the_stacks():
    flat = FlatGroup.pack(tensors(SHAPES, 0))
    flat.unpack()["b"].fill_(7.0)
    assert (flat["a (+2)"][1] == 7.0).all()
    assert "a (+2)" in repr(flat)


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        (torch.zeros(3), TypeError, "expected a sequence or mapping"),
        (nn.Linear(2, 2), TypeError, r"pass dict\(params.named_parameters\(\)\)"),
        (nn.Linear(2, 2).parameters(), TypeError, r"pass list\(params\)"),
        ([], ValueError, "got no parameters"),
        (
            [torch.zeros(2), torch.zeros(2, device="meta")],
            ValueError,
            "use one FlatGroup per device",
        ),
        ([torch.zeros(2, dtype=torch.int64)], ValueError, "real floating point"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_pack_refuses_what_no_stack_can_hold(given, kind, message):
    with pytest.raises(kind, match=message):
        FlatGroup.pack(given)


@pytest.mark.parametrize("rule", [marsopt.rule("lion"), marsopt.mars()], ids=["", "2"])
def test_grads_packed_in_another_order_are_refused(rule):
    flat = FlatGroup.pack(tensors({"a": (3,), "b": (3,), "c": (3,)}, 0))
    other = FlatGroup.pack(tensors({"a": (3,), "c": (3,), "b": (3,)}, 0))
    with pytest.raises(ValueError, match="packed otherwise"):
        rule.step(flat, other, rule.init(flat), lr=1.0)


# ---- rules on stacks --------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_rule_on_stacks_is_the_rule_on_leaves(row):
    """Values, state, and purity, over four steps with clips at work."""
    shapes = MATRICES if row.matrix_only else SHAPES
    rule = row.rule(max_norm=0.7)
    x = tensors(shapes, 0)
    flat = FlatGroup.pack(x)
    s, t = rule.init(x), rule.init(flat)
    for i in range(4):
        g = tensors(shapes, 1 + i)
        before = [v.clone() for v in flat.stacks]
        x, s = rule.step(x, g, s, lr=LR)
        packed = FlatGroup.pack(g)
        new, t = rule.step(flat, packed, t, lr=LR)
        assert all(map(torch.equal, before, flat.stacks))
        flat = new
        torch.testing.assert_close(flat.unpack(), x, **CLOSE)
    for name in rule.matrix.kept:
        torch.testing.assert_close(t.buffers[name].unpack(), s.buffers[name], **CLOSE)
