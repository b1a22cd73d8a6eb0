"""What the studies of research.warm_up have shown so far, and what the rule says.

    python -m research.decide

Prints a table for each setting, in which every method has its best warm-up, and the
decision. The rule stands in research/study.md, "What pays, beside its strongest
control".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from research import studies
from research.compare.results import LEADS
from research.compare.search import Found
from research.compare.study import Study
from research.studies import GROWING, MOONLIGHT
from research.warm_up import (
    CONTROL_OF,
    HALF,
    PLACES,
    WARM_UPS,
    WHOLE,
    study,
)
from train.errors import command

FEW = 4  # seeds, below which the deviation of differences is pooled
AT_LEAST = 4  # settings, without which nothing is decided
Losses = Mapping[str, Mapping[int, float]]  # final, by title and seed


@dataclass(frozen=True)
class Difference:
    """Of losses with shared seeds: below 0 = better."""

    mean: float
    error: float | None  # None = not known
    num: int

    @property
    def side(self) -> str:
        """Return "ahead", "behind", or "open"."""
        if math.isnan(self.mean) or self.error is None:
            return "open"
        if self.mean and abs(self.mean) >= LEADS * self.error:
            return "ahead" if self.mean < 0 else "behind"
        return "open"

    def __str__(self) -> str:
        error = "" if self.error is None else f" ± {self.error:.4f}"
        return f"{self.mean:+.4f}{error}"


def differences(losses: Losses, reference: str) -> dict[str, Difference]:
    """Return each title's difference to one of them, by paired seeds.

    The error is that of the mean of paired differences; with fewer than FEW seeds their
    deviation is pooled over the titles, since two or three say little of it. A run that
    diverged makes a difference infinite: known without an error.
    """
    paired: dict[str, list[float]] = {}
    for title, by_seed in losses.items():
        shared = sorted(by_seed.keys() & losses.get(reference, {}).keys())
        if title != reference and shared:
            paired[title] = [by_seed[s] - losses[reference][s] for s in shared]
    finite = [d for d in paired.values() if len(d) > 1 and all(map(math.isfinite, d))]
    free = sum(len(d) - 1 for d in finite)
    squares = sum((len(d) - 1) * stdev(d) ** 2 for d in finite)
    pooled = math.sqrt(squares / free) if free else None
    return {t: _difference(own, pooled) for t, own in paired.items()}


def _difference(own: Sequence[float], pooled: float | None) -> Difference:
    middle, num = mean(own), len(own)
    if not math.isfinite(middle):
        return Difference(middle, 0.0, num)
    deviation = stdev(own) if num >= FEW else pooled
    error = None if deviation is None else deviation / math.sqrt(num)
    return Difference(middle, error, num)


@dataclass(frozen=True)
class Judged:
    """A place's searches, and the runs at their best points.

    Args:
        study: with a method for each contender and warm-up.
        losses: final, by a run's key.
    """

    study: Study
    losses: Mapping[str, float]

    def search(self, title: str) -> Found:
        """Return how far a method's search is."""
        return self.study.search(title, self.losses)

    def best(self, titles: Sequence[str]) -> dict[str, str]:
        """Return by contender its method of the lowest mean loss over the seeds of the
        search, among the warm-ups with which all of them have been searched to the end;
        nothing without one.
        """
        ends = [
            end
            for end in WARM_UPS
            if all(not self.search(title + end).wanted for title in titles)
        ]
        lowest = {
            title + end: min(self.search(title + end).losses.values())
            for title in titles
            for end in ends
        }
        every = {title: [title + end for end in ends] for title in titles if ends}
        return {title: min(own, key=lowest.__getitem__) for title, own in every.items()}

    def by_seed(self, title: str) -> dict[int, float]:
        """Return the final losses of the seeds that did not choose a method's point."""
        runs = self.study.seeds(title, self.search(title))
        return {r.seed: self.losses[r.key] for r in runs if r.key in self.losses}

    def at_best(self, titles: Iterable[str]) -> dict[str, dict[int, float]]:
        """Return by contender its ``by_seed`` at its own best warm-up, of those that
        have runs.
        """
        best = [(t, own) for t in titles for own in self.best((t,)).values()]
        found = {title: self.by_seed(own) for title, own in best}
        return {title: by_seed for title, by_seed in found.items() if by_seed}

    def is_complete(self, title: str) -> bool:
        """Return whether a method's search and all its seeds have been run."""
        return not self.study.wanted(title, self.losses)


def judged(name: str) -> Judged:
    """Return what the store has of a place."""
    return Judged(study(name), studies.stored(f"warm_up_{name}").losses)


def difference(place: Judged) -> Difference | None:
    """Return the difference of growing memory to Moonlight, each with its best warm-up;
    None where one of the two lacks runs.
    """
    best = place.best((MOONLIGHT, GROWING))
    if not best or not all(map(place.is_complete, best.values())):
        return None
    ended = [t for t in place.study.methods if place.is_complete(t)]
    losses = {title: place.by_seed(title) for title in ended}
    return differences(losses, best[MOONLIGHT])[best[GROWING]]


def decision(found: Iterable[Difference]) -> str:
    """Return what the rule says of the settings that have been judged."""
    sides = [one.side for one in found]
    ahead, behind = sides.count("ahead"), sides.count("behind")
    said = f"ahead in {ahead} of {len(sides)}, behind in {behind}"
    if len(sides) < AT_LEAST:
        return f"{said}: too few settings, Moonlight stays"
    grows = 2 * ahead >= len(sides) and not behind
    return f"{said}: {f'{GROWING} becomes' if grows else 'Moonlight stays'} the default"


# ---- as tables -----------------------------------------------------------------------


def table(name: str, place: Judged) -> str:
    """Return a place's table: each contender at each warm-up, its best one bold, and
    the best one's difference to its control at its own best.
    """
    contenders = [t for t in PLACES[name].contenders if place.best((t,))]
    losses = place.at_best(contenders)
    if name == HALF:  # as many gradients as its control has at twice the steps
        losses |= judged(WHOLE).at_best(("NAdamW",))
    lines = [f"### {place.study.title}", ""]
    lines += [
        "| method | warm-up | learning rate | search | loss | seeds | to control |"
    ]
    lines += ["|---|---|---|---|---|---|---|"]
    for title in contenders:
        control = CONTROL_OF.get(title, "NAdamW")
        to, best = differences(losses, control).get(title), place.best((title,))[title]
        said = "" if to is None else f"{to} to {control}"
        for end in WARM_UPS:
            if place.search(title + end).wanted:
                continue
            is_best = best == title + end
            cells = [f"**{title}**" if is_best else title, *_cells(place, title + end)]
            lines.append(f"| {' | '.join([*cells, said if is_best else ''])} |")
    return "\n".join(lines)


def _cells(place: Judged, title: str) -> list[str]:
    method, found = place.study.methods[title], place.search(title)
    warmup = method.recipe.get("warmup", place.study.setting.warmup)
    edge = "" if math.isfinite(found.inside(method.axes)) else ", at an edge"
    losses = [*place.by_seed(title).values()]
    loss = f"{mean(losses):.4f}" if losses else ""
    lowest = min(found.losses.values())
    cells = [f"{warmup:.0%}", f"{found.best[0]:.4g}{edge}", f"{lowest:.4f}", loss]
    return [*cells, f"{len(losses)} of {method.num_seeds}"]


def main() -> None:
    """Print all tables."""
    found = {}
    for name, place in PLACES.items():
        own = judged(name)
        print(f"\n{table(name, own)}")
        if place.is_judged:
            found[name] = difference(own)
    print("\n### README: 0.1M parameters, 1,920 steps, to torch Muon\n")
    losses = judged("1920").at_best(PLACES["1920"].contenders)
    for title, to in differences(losses, "torch Muon").items():
        print(f"- {title}: {to}")
    print("\n### The rule\n")
    for name, one in found.items():
        said = (
            "not judged" if one is None else f"{one} over {one.num} seeds: {one.side}"
        )
        print(f"- {PLACES[name].title}: {said}")
    print(f"\nLog time is {decision(d for d in found.values() if d is not None)}.")


if __name__ == "__main__":
    command(main)
