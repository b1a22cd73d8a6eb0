"""What the studies of research.log_time have shown so far, and what the rule says.

    python -m research.decide

Prints a table for each setting, the steps saved at small, and the decision. The rule
stands in research/study.md, "Memory that grows: predictions".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from research import log_time, studies
from research.compare.results import LEADS, Entry, entries
from train.errors import command

STORED = (  # searched controls that older stores have
    *("NAdamW", "transport", "Moonlight", "Moonlight, transport", "for_model"),
    *("SOAP-Muon", "SOAP-Muon, transport"),
)
FEW = 4  # seeds, below which the deviation of differences is pooled
Losses = Mapping[str, Mapping[int, float]]  # final, by title and seed


@dataclass(frozen=True)
class Question:
    """What a rule decides.

    Args:
        references: titles that a contender has to be ahead of.
        contenders: by title, whether it has modes (``eval()`` and ``train()``).
        else_: what is the default where no contender passes.
    """

    references: tuple[str, ...]
    contenders: Mapping[str, bool]
    else_: str


ELEMENTWISE = {
    "AdamW, log time": False,
    "AdamW, log time, transport": True,
    "ADANA": False,
}
QUESTIONS = {
    "for_model": Question(
        ("for_model", "Moonlight"),
        ELEMENTWISE | {"Moonlight, log time": False},
        "Moonlight with correction=None",
    ),
    "MARS-AdamW's snippet": Question(("transport", "NAdamW"), ELEMENTWISE, "NAdamW"),
}


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
class Standing:
    """In how many settings a contender stands how, by the rule."""

    ahead: int  # of all references
    behind: int  # of one of them
    settings: int

    @property
    def passes(self) -> bool:
        """Return whether it may become the default."""
        enough = self.settings > 0 and 3 * self.ahead >= 2 * self.settings
        return enough and not self.behind


def standing(
    settings: Iterable[Losses], contender: str, references: Sequence[str]
) -> Standing:
    """Return a contender's standing in the settings that have it and all references."""
    ahead = behind = num = 0
    for losses in settings:
        if not {contender, *references} <= losses.keys():
            continue
        sides = [differences(losses, r)[contender].side for r in references]
        num += 1
        ahead += all(side == "ahead" for side in sides)
        behind += "behind" in sides
    return Standing(ahead, behind, num)


def winner(settings: Sequence[Losses], question: Question) -> str | None:
    """Return the contender that the rule makes the default; None = none passes.

    Of those with modes, and of those without, the one with the lowest mean loss stands
    for its kind. The one without modes wins, unless the other is ahead of it by 2.5
    errors in half of the settings.
    """
    passing = [
        title
        for title in question.contenders
        if standing(settings, title, question.references).passes
    ]
    kinds = [
        [title for title in passing if question.contenders[title] is has_modes]
        for has_modes in (False, True)
    ]
    best = [
        min(kind, key=lambda t: _level(settings, t), default=None) for kind in kinds
    ]
    plain, moded = best
    if plain is None or moded is None:
        return plain or moded
    against = standing(settings, moded, (plain,))
    return moded if 2 * against.ahead >= against.settings else plain


def _level(settings: Iterable[Losses], title: str) -> float:
    """Return a title's mean over settings of its mean loss."""
    return mean(mean(losses[title].values()) for losses in settings if title in losses)


def steps_saved(
    mine: Mapping[int, float], at: int, control: Mapping[int, Mapping[int, float]]
) -> tuple[float, float | None] | None:
    """Return the share of steps that a method saves, with its error over seeds.

    The control's loss between two horizons lies on a line in the logarithm of steps.

    Args:
        mine: the method's final loss by seed.
        at: steps of its runs.
        control: final losses by horizon and seed.
    """
    shares = []
    for seed, loss in mine.items():
        points = [(math.log(t), own[seed]) for t, own in control.items() if seed in own]
        points.sort()
        for (x, high), (y, low) in zip(points, points[1:], strict=False):
            if low <= loss <= high and low < high:
                needed = x + (y - x) * (high - loss) / (high - low)
                shares.append(1 - at / math.exp(needed))
                break
    if len(shares) < len(mine) or not shares:
        return None  # beyond the control's horizons
    error = stdev(shares) / math.sqrt(len(shares)) if len(shares) > 1 else None
    return mean(shares), error


# ---- from the stores, as tables ------------------------------------------------------


def found(name: str) -> dict[str, Entry]:
    """Return the judged methods of a place, best first; nothing without a store."""
    store = studies.stored(f"log_time_{name}")
    every = entries(log_time.study(name), store)
    return {entry.title: entry for entry in every}


def losses_of(judged: Mapping[str, Entry]) -> Losses:
    """Return the final losses."""
    return {title: entry.by_seed for title, entry in judged.items()}


def stored(name: str) -> dict[str, Entry]:
    """Return the searched controls of the same setting, of an older store."""
    study = log_time.PLACES[name].stored
    if study is None:
        return {}
    every = entries(getattr(studies, study)(), studies.stored(study))
    return {f"{e.title} ({study}, stored)": e for e in every if e.title in STORED}


def table(name: str, judged: Mapping[str, Entry], old: Mapping[str, Entry]) -> str:
    """Return a setting's table: of its runs, then of stored controls."""
    references = ("for_model", "Moonlight", "NAdamW", "transport")
    losses = losses_of({**judged, **old})
    to = {reference: differences(losses, reference) for reference in references}
    place = log_time.PLACES[name]
    lines = [
        f"### {place.title}",
        "",
        f"| method | lr | loss | seeds | to {' | to '.join(references)} |",
        "|---|---|---|---|" + "---|" * len(references),
    ]
    for title, entry in {**judged, **old}.items():
        seeds = f"{len(entry.losses)}" + " so far" * bool(entry.num_missing)
        edge = "" if math.isfinite(entry.inside) else ", at an edge"
        cells = [title, f"{entry.values.get('lr', math.nan):.4g}{edge}"]
        cells += [f"{entry.mean:.4f}", seeds]
        cells += [str(to[r].get(title, "")) for r in references]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def savings(judged: Mapping[str, Mapping[str, Entry]]) -> str:
    """Return the table of steps saved at small."""
    lengths = {name: int(name) for name in judged if name.isdigit()}
    lines = ["### Steps saved at small", "", "| method | control | steps | saved |"]
    lines.append("|---|---|---|---|")
    for control in ("AdamW", "NAdamW", "Moonlight"):
        horizons = {
            steps: judged[name][control].by_seed
            for name, steps in lengths.items()
            if control in judged[name]
        }
        for name, steps in sorted(lengths.items(), key=lambda pair: pair[1]):
            for title, entry in judged[name].items():
                share = steps_saved(entry.by_seed, steps, horizons)
                if title == control or share is None:
                    continue
                error = "" if share[1] is None else f" ± {share[1]:.0%}"
                lines.append(
                    f"| {title} | {control} | {steps} | {share[0]:.0%}{error} |"
                )
    return "\n".join(lines)


def decision(judged: Mapping[str, Mapping[str, Entry]]) -> str:
    """Return what the rule says of the settings that are there."""
    settings = [losses_of(own) for own in judged.values()]
    lines = ["### The rule", ""]
    for name, question in QUESTIONS.items():
        lines.append(f"| {name}: contender | ahead | behind | settings | passes |")
        lines.append("|---|---|---|---|---|")
        for title in question.contenders:
            own = standing(settings, title, question.references)
            cells = [title, own.ahead, own.behind, own.settings, own.passes]
            lines.append(f"| {' | '.join(map(str, cells))} |")
        default = winner(settings, question) or question.else_
        lines += ["", f"So far the default would be: {default}.", ""]
    left = [name for name in log_time.PLACES if not judged.get(name)]
    lines.append(f"Settings without a run: {', '.join(left) or 'none'}.")
    return "\n".join(lines)


def main() -> None:
    """Print all tables."""
    judged = {name: found(name) for name in log_time.PLACES}
    judged = {name: own for name, own in judged.items() if own}
    for name, own in judged.items():
        print(f"\n{table(name, own, stored(name))}")
    print(f"\n{savings(judged)}\n\n{decision(judged)}")


if __name__ == "__main__":
    command(main)
