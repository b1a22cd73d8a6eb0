"""benchmarks.many_runs: gradients of many models at once are those of each."""

from __future__ import annotations

import pytest
import torch

from benchmarks.many_runs import ways


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_at_once_are_those_of_each():
    torch.manual_seed(0)
    (one, first), (every, num), (_, same) = ways(2).values()
    assert (first, num, same) == (1, 2, 2)
    alone, together = one(), every()
    assert alone.keys() == together.keys()
    for name, g in alone.items():
        assert together[name].shape == (2, *g.shape)
        torch.testing.assert_close(together[name][0], g, rtol=1e-4, atol=1e-6)
        assert not torch.equal(together[name][0], together[name][1])
