"""The command benchmarks.host_calls."""

import math

from benchmarks.host_calls import REFERENCE, measure


def test_every_optimizer_steps_both_sizes(monkeypatch):
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")  # what is timed is no subject here
    found = measure(2, (3, 5), 2)
    assert len(found) == 2
    for times in found.values():
        assert REFERENCE in times and len(times) == 2
        assert all(
            len(row) == 2 and all(map(math.isfinite, row)) for row in times.values()
        )
