"""What ranks of plain data parallelism pack and send each other, without processes."""

from __future__ import annotations

import random

import pytest
import torch

from marsopt.parallel.packs import Packs, streams

CASES = {
    "even": [10] * 8,
    "one has all": [0, 1000, 0, 0, 0],
    "two ranks": [30, 10],
    "one rank": [7],
    "uneven": [random.Random(0).randrange(1000) for _ in range(64)],
    "many": [2359] * 48 + [17] * 464,
}


@pytest.mark.parametrize("name", CASES)
def test_streams_hold_every_element_once(name):
    totals = CASES[name]
    sent = streams(totals)
    found = sorted(run for stream in sent for run in stream if run.length)
    at = [0] * len(totals)
    for source, start, length in found:
        assert start == at[source]
        at[source] += length
    assert at == totals


@pytest.mark.parametrize("name", ["uneven", "many"])
def test_little_is_sent_beside_the_elements(name):
    """An all-gather as wide as the longest stream, and what others send for a rank."""
    totals = CASES[name]
    num, sent = len(totals), streams(totals)
    widest = max(sum(run.length for run in stream) for stream in sent)
    moved = [sum(r.length for r in s if r.source != i) for i, s in enumerate(sent)]
    given = [
        sum(r.length for s in sent for r in s if r.source == i) - sent[i][0].length
        for i in range(num)
    ]
    ideal = sum(totals) * (num - 1) / num
    assert (num - 1) * widest + max(*moved, *given) <= 1.05 * ideal


@pytest.mark.parametrize("totals", [[9] * 4, [0, 99, 0, 3], [30, 10], [7, 50, 1, 0, 8]])
@pytest.mark.parametrize("most", [1, 300, 10**6])
def test_chunks_bring_every_element_to_every_rank(totals, most):
    ranks = range(len(totals))
    right = [torch.arange(n) + 10_000 * rank for rank, n in enumerate(totals)]

    def held(rank):
        """Its own elements, and zeros for the others."""
        return [x.clone() if i == rank else 0 * x for i, x in enumerate(right)]

    every = [held(rank) for rank in ranks]
    packs = [
        Packs([[*x.split(5)] if len(x) else [] for x in every[rank]], rank)
        for rank in ranks
    ]
    for together in zip(*(p.chunks(most) for p in packs), strict=True):
        flats = []
        leaving = [
            iter(torch.cat([*c.leaving, c.like.new_empty(0)]).split(c.leaving_sizes))
            for c in together
        ]
        for chunk in together:
            moved = [next(part) for part in leaving]  # one for each rank, in order
            assert [len(x) for x in moved] == chunk.arriving_sizes
            flat = torch.cat([*chunk.own, *moved])
            flats.append(torch.nn.functional.pad(flat, (0, chunk.width - len(flat))))
        gathered = torch.cat(flats)
        for chunk in together:
            parts = gathered.split(chunk.sizes)
            assert gathered.nbytes <= max(most, 8 * len(totals))
            for i, view in zip(chunk.incoming_parts, chunk.incoming, strict=True):
                view.copy_(parts[i])
    for mine in every:
        assert all(map(torch.equal, mine, right))
