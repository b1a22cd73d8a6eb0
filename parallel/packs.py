"""Beside data parallelism: the flat pack of each rank, in chunks of equal width."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

PADDING = 1.05  # times the mean: as wide ranks may send without moving anything


class Run(NamedTuple):
    """Consecutive elements of the pack of one rank."""

    source: int
    start: int
    length: int


def streams(totals: Sequence[int]) -> list[list[Run]]:
    """Return the runs that each rank sends to all: its pack, of so many elements. Where
    packs are uneven, all-gathers would send padding as wide as the largest one: packs
    are cut at the mean, and ranks with smaller ones send the rest in addition.
    """
    num, most = len(totals), max(totals)
    width = -(-sum(totals) // num)
    padded, moved = (num - 1) * (most - width), width - min(totals)
    if most <= PADDING * width or padded <= 2 * moved:  # moving costs a collective
        return [[Run(rank, 0, total)] for rank, total in enumerate(totals)]
    sent = [[Run(rank, 0, min(total, width))] for rank, total in enumerate(totals)]
    room, receiver = [max(0, width - total) for total in totals], 0
    for source, total in enumerate(totals):
        start = width
        while start < total:
            while not room[receiver]:
                receiver += 1
            length = min(room[receiver], total - start)
            sent[receiver].append(Run(source, start, length))
            room[receiver] -= length
            start += length
    return sent


def _clipped(stream: Sequence[Run], first: int, last: int) -> Iterator[Run]:
    """Yield the part of a stream from ``first`` to ``last``."""
    at = 0
    for source, start, length in stream:
        low, high = max(first, at), min(last, at + length)
        if low < high:
            yield Run(source, start + low - at, high - low)
        at += length


class Chunk(NamedTuple):
    """One all-gather, and the all-to-all before it where ranks send for other ranks."""

    like: Tensor  # of the dtype and device
    width: int  # elements that each rank sends, padding included
    own: list[Tensor]  # views of this rank's pack: runs that it sends itself
    leaving: list[Tensor]  # and runs that other ranks send
    leaving_sizes: list[int]  # by rank
    arriving_sizes: list[int]  # by rank: elements sent here for it
    is_moved: bool  # whether any rank sends for another
    incoming: list[Tensor]  # views that receive the packs of other ranks
    sizes: list[int]  # elements of each arriving part, padding and own runs too
    incoming_parts: list[int]  # which parts ``incoming`` receives


class Packs:
    """What all ranks pack of one dtype.

    Args:
        views: flat views of each rank's elements, in the order of its pack.
        rank: this one.
    """

    def __init__(self, views: Sequence[Sequence[Tensor]], rank: int) -> None:
        self._views, self._rank = views, rank
        self._ends = [list(accumulate(x.numel() for x in pack)) for pack in views]
        self._like = next(x for pack in views for x in pack)

    def chunks(self, most: int) -> list[Chunk]:
        """Return the chunks in which at most ``most`` bytes arrive at a rank."""
        sent = streams([ends[-1] if ends else 0 for ends in self._ends])
        longest = max(sum(run.length for run in stream) for stream in sent)
        width = max(1, most // (len(sent) * self._like.itemsize))
        return [
            self._chunk(sent, first, min(first + width, longest))
            for first in range(0, longest, width)
        ]

    def _chunk(self, sent: Sequence[Sequence[Run]], first: int, last: int) -> Chunk:
        runs = [list(_clipped(stream, first, last)) for stream in sent]
        num, rank, width = len(runs), self._rank, last - first
        own = [run for run in runs[rank] if run.source == rank]
        leaving: list[Tensor] = []
        leaving_sizes, arriving_sizes = [0] * num, [0] * num
        incoming: list[Tensor] = []
        sizes: list[int] = []
        parts: list[int] = []
        for sender, its_runs in enumerate(runs):
            for run in its_runs:
                if run.source != rank:
                    views = self._part(run)
                    parts += range(len(sizes), len(sizes) + len(views))
                    sizes += [x.numel() for x in views]
                    incoming += views
                    arriving_sizes[run.source] += run.length * (sender == rank)
                    continue
                sizes.append(run.length)
                if sender != rank:
                    leaving += self._part(run)
                    leaving_sizes[sender] += run.length
            sizes.append(width - sum(run.length for run in its_runs))
        return Chunk(
            self._like,
            width,
            [x for run in own for x in self._part(run)],
            leaving,
            leaving_sizes,
            arriving_sizes,
            any(run.source != i for i, its_runs in enumerate(runs) for run in its_runs),
            incoming,
            sizes,
            parts,
        )

    def _part(self, run: Run) -> list[Tensor]:
        """Return views of consecutive elements of a pack."""
        views, ends = self._views[run.source], self._ends[run.source]
        at, end = run.start, run.start + run.length
        found = []
        while at < end:
            number = bisect_right(ends, at)
            begin = ends[number] - views[number].numel()
            stop = min(end, ends[number])
            found.append(views[number][at - begin : stop - begin])
            at = stop
        return found
