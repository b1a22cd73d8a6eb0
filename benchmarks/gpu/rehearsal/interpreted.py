"""Steps of MARS by the Triton kernels that a GPU would run, interpreted on the CPU,
beside eager steps of the same optimizer on the same numbers.

    python -m benchmarks.gpu.rehearsal.interpreted [--cases CASE ...] [--json FILE]

A CASE is RULE[/CORRECTION[/DTYPE[/H_DTYPE[/STATE]]]], as mars-adamw or
mars-m/transport/bfloat16: the dtypes of parameters, of the kept gradient and of other
state, which bfloat16 rounds stochastically. Without --cases: every rule with its own
correction and with transport, and five cases of bfloat16. Triton is needed beside
torch: `make gpu REHEARSAL=1` installs it apart.

Four steps are taken, in which lr, gamma, betas, weight decay and both clips move; a
gradient of the third holds a NaN, and in the fourth one of two parameters of one shape
has no gradient. The table shows

    graphs         compiled in the first step + in later ones
    launches       of kernels, in each step
    x differs      from eager steps, at most
    state differs  at most, as a part of the largest number of its tensor
    skipped        how many steps were
    floor          bytes a parameter that no step can go below
    bytes          a parameter that each step moves, by lanes that masks let through

A fault (numbers beyond rounding, a skipped step that changes something or is not
counted, bytes beside what a step has to move) ends in exit status 1. What a GPU does
and an interpreter does not stays unseen: contracted multiplications and additions,
approximate divisions, races, misaligned addresses.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

# first, since all that follows imports Triton
from benchmarks.gpu.rehearsal.on_cpu import interpreting

# isort: split
import torch

from benchmarks.gpu.rehearsal.cases import DTYPES
from benchmarks.gpu.rehearsal.steppers import (
    DEFAULT,
    Case,
    Kind,
    Stepper,
    corrections,
    eager,
)
from marsopt.profiling.optimizer import floor_of
from marsopt.rules.registry import REGISTRY, canonical
from train.errors import UserError, command
from train.files import write_json

# Sums have another order than eager ones: a few units in the last place of float32, of
# parameters up to 4 and of state. Parameters in bfloat16 are to be the same: its last
# place, of all but tiny numbers, is beyond this bound.
X_BOUND, STATE_BOUND = 1e-6, 1e-5
# bytes a parameter: numbers per tensor and sums of rows, where parameters are so few
SMALL = 1.0


# ---- comparison ----------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """What came of a case.

    Args:
        name: the case's.
        steps: the kind of each.
        graphs: compiled in each step.
        launches: of kernels in each step.
        x_differs: from eager steps, the largest difference of a parameter.
        state_differs: the largest of a state tensor, over its largest number.
        num_skipped: steps that were.
        changed: which parameters and state tensors skipped steps have changed.
        num_bytes: a parameter, moved in each step.
        floor: bytes a parameter that no step can go below.
        expected: bytes a parameter that each step has to move.
    """

    name: str
    steps: tuple[Kind, ...]
    graphs: list[int]
    launches: list[int]
    x_differs: float
    state_differs: float
    num_skipped: int
    changed: list[str]
    num_bytes: list[float]
    floor: float
    expected: list[float]

    def faults(self) -> Iterator[str]:
        """Yield what is not as it has to be."""
        if not self.x_differs <= X_BOUND:  # a NaN, too
            yield f"parameters differ by {self.x_differs:.1e} from eager steps"
        if not self.state_differs <= STATE_BOUND:
            yield f"state differs by {self.state_differs:.1e} of its largest number"
        num_skipped = self.steps.count("skipped")
        if self.num_skipped != num_skipped:
            yield f"{self.num_skipped} steps counted as skipped, expected {num_skipped}"
        if self.changed:
            yield f"a skipped step changed {', '.join(self.changed)}"
        pairs = zip(self.num_bytes, self.expected, strict=True)
        for number, (found, expected) in enumerate(pairs, 1):
            if not expected <= found <= expected + SMALL:
                yield (
                    f"step {number} ({self.steps[number - 1]}) moved {found:.2f} bytes "
                    f"a parameter, expected {expected:.2f}"
                )


def interpreted(case: Case, reference: Stepper) -> Result:
    """Step by interpreted kernels; return how that compares with eager steps.

    Args:
        case: what is stepped.
        reference: ``eager(case)``.
    """
    counts, changed, floor = [(0, 0, 0)], set(), 0
    with interpreting() as runs:
        ours = Stepper(case, compile=True)
        before = {key: x.clone() for key, x in ours.tensors().items()}

        def after(kind: Kind) -> None:
            nonlocal before, floor
            counts.append(runs.counts())
            now = {key: x.clone() for key, x in ours.tensors().items()}
            if kind == "skipped":
                changed.update(
                    name
                    for (i, name), x in now.items()
                    if not torch.equal(x, before[i, name])
                )
            before = now
            floor = floor or floor_of(ours.optimizer.describe().buckets).num_bytes

        ours.walk(after)
    spent = [
        [now - then for then, now in zip(*pair, strict=True)]
        for pair in zip(counts, counts[1:], strict=False)
    ]
    n, flagged = case.num_params, ours.flagged()
    more = dict(normal=0.0, skipped=1.0, missing=case.num_missing / n)
    x_differs, state_differs = _differences(ours, reference)
    return Result(
        name=case.name,
        steps=case.steps,
        graphs=[step[0] for step in spent],
        launches=[step[1] for step in spent],
        x_differs=x_differs,
        state_differs=state_differs,
        num_skipped=ours.optimizer.num_skipped,
        changed=sorted(changed),
        num_bytes=[step[2] / n for step in spent],
        floor=floor / n,
        expected=[(floor + more[kind] * flagged) / n for kind in case.steps],
    )


def _differences(ours: Stepper, reference: Stepper) -> tuple[float, float]:
    """Return the largest differences of parameters, and of state relative to it; NaN
    where a NaN is on one side.
    """
    mine, theirs = ours.tensors(), reference.tensors()
    assert mine.keys() == theirs.keys()
    of_x, of_state = [], []
    for key, other in theirs.items():
        if not other.numel():  # of transport's point ahead, while parameters are it
            continue
        other = other.double()
        difference = (mine[key].double() - other).abs().max()
        if key[1] == "parameter":
            of_x.append(difference)
        else:
            of_state.append(difference / other.abs().max().clamp(min=1e-30))
    return torch.stack(of_x).max().item(), torch.stack(of_state).max().item()


# ---- the command ---------------------------------------------------------------------


def table(results: Sequence[Result]) -> str:
    """Return the table that the command prints."""
    head = ["step", "graphs", "launches", "x differs", "state differs", "skipped",
            "floor", "bytes"]  # fmt: skip
    lines = [
        [
            r.name,
            f"{r.graphs[0]} + {sum(r.graphs[1:])}",
            " ".join(map(str, r.launches)),
            f"{r.x_differs:.1e}",
            f"{r.state_differs:.1e}",
            f"{r.num_skipped}",
            f"{r.floor:.2f}",
            " ".join(f"{found:.2f}" for found in r.num_bytes),
        ]
        for r in results
    ]
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    rows = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in [head, *lines])
    return "\n".join(rows)


def to_dict(result: Result) -> dict[str, Any]:
    """Return what JSON can hold, and every fault."""
    return {**asdict(result), "faults": [*result.faults()]}


def case_of(text: str) -> Case:
    """Return the case that a command line names."""
    rule, *words = text.split("/")
    rule = canonical(rule)
    if rule not in REGISTRY:
        raise UserError(
            f"got the rule {rule!r} in {text!r}, expected one of {tuple(REGISTRY)}: "
            "choose one"
        )
    dtypes = tuple(DTYPES)
    choices = (corrections(rule), dtypes, dtypes, dtypes)
    if len(words) > len(choices):
        raise UserError(
            f"got {text!r}, expected RULE[/CORRECTION[/DTYPE[/H_DTYPE[/STATE]]]]: "
            f"leave {words[len(choices)]!r} out"
        )
    for word, known in zip(words, choices, strict=False):
        if word not in known:
            raise UserError(
                f"got {word!r} in {text!r}, expected one of {known}: choose one"
            )
    return Case(rule, *(words or [corrections(rule)[0]]))


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line, checked."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.rehearsal.interpreted",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--cases", nargs="+", metavar="CASE", help="(default: as above)")
    add("--json", type=Path, metavar="FILE", help="everything")
    args = parser.parse_args(argv)
    args.cases = DEFAULT if args.cases is None else [*map(case_of, args.cases)]
    if importlib.util.find_spec("triton") is None:
        raise UserError(
            "got no Triton, expected it on Python's path: run make gpu REHEARSAL=1, "
            "which installs it apart"
        )
    return args


def report(found: Sequence[Result], path: Path | None) -> None:
    """Print the table, and write everything to ``path``.

    Raises:
        SystemExit: with status 1, for a fault.
    """
    made = dict(torch=torch.__version__, triton=version("triton"))
    rows = [to_dict(result) for result in found]
    if path is not None:
        write_json(path, dict(made_with=made, cases=rows))
    print(f"torch {made['torch']}, triton {made['triton']}, interpreted; bytes a")
    print("parameter, of lanes that masks let through\n")
    print(table(found))
    num_faults = sum(len(row["faults"]) for row in rows)
    print(f"\n{len(found)} cases, {num_faults} faults")
    if num_faults:
        raise SystemExit(1)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = arguments(argv)
    found = []
    for number, case in enumerate(args.cases, 1):
        found.append(interpreted(case, eager(case)))
        print(
            f"[{number} of {len(args.cases)}] {case.name}: "
            f"{'; '.join(found[-1].faults()) or 'as it should be'}",
            file=sys.stderr,
            flush=True,
        )
    report(found, args.json)


if __name__ == "__main__":
    command(main)
