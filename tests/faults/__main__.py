"""python -m tests.faults [--seed 0] [--damaged 200] [--kills 40]."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

# before torch comes in, which would make threads that no child has
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PYTHONPATH"] = str(Path(__file__).parent.parent.parent)

SHOWN = 12  # lines of a failing case's output


def arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser("python -m tests.faults", description=__doc__)
    add = parser.add_argument
    add("--seed", type=int, default=0)
    add("--damaged", type=int, default=200, help="damaged checkpoints")
    add("--kills", type=int, default=40, help="runs that are killed")
    add("--case", type=int, nargs="*", help="numbers of the cases to play")
    add("--at-once", type=int, default=2, help="cases that run side by side")
    add("--brief", action="store_true", help="of each part what is over soonest")
    add("--keep", action="store_true", help="leave the folders of failing cases")
    return parser.parse_args()


def _show(played) -> None:
    """Print a case that came out as it must not."""
    case, verdict, commands, ends = played
    print(f"\n{case.part} {case.number}: {verdict.kind}: {verdict.why}\n  {case.name}")
    for command, ended in zip(commands, ends, strict=True):
        print(f"  $ {str(command)[:1500]}\n  exit codes {ended.codes}")
        for name, text in (("stdout", ended.out), ("stderr", ended.err)):
            lines = text.strip().splitlines()
            if len(lines) > SHOWN:
                lines = [*lines[: SHOWN // 3], "...", *lines[-SHOWN * 2 // 3 :]]
            for line in lines:
                print(f"    {name}: {line[:400]}")
    sys.stdout.flush()


def play_all(scratch: Path, args: argparse.Namespace) -> dict[str, Counter]:
    """Play all cases; return of each part how many came out how."""
    from tests.faults import damage, kills
    from tests.faults.cases import GOOD, play
    from tests.faults.ground import Ground, make

    ground, began = Ground(scratch / "ground"), time.monotonic()
    undisturbed = kills.commands(ground, args.seed, args.kills, args.brief)
    ends = make(ground, damage.commands(ground, args.damaged) | undisturbed)
    counts: dict[str, Counter] = {}
    for part, num in ((damage, args.damaged), (kills, args.kills)):
        cases = part.cases(ground, ends, args.seed, num, args.brief)
        chosen = (c for c in cases if not args.case or c.number in args.case)
        for played in play(chosen, scratch, args.at_once):
            name, kind = played.case.part, played.verdict.kind
            part_counts = counts.setdefault(name, Counter())
            part_counts[kind] += 1
            if kind not in GOOD:
                _show(played)
            if kind in GOOD or not args.keep:
                shutil.rmtree(scratch / f"{name}{played.case.number}")
            if part_counts.total() % 20 == 0:
                seconds = time.monotonic() - began
                print(f"{name}: {dict(part_counts)} after {seconds:.0f} s", flush=True)
    return counts


def main() -> None:
    """Run the campaign."""
    args = arguments()
    began = time.monotonic()
    from tests.faults.cases import GOOD, KINDS
    from tests.forks import import_all

    import_all()
    scratch = Path(tempfile.mkdtemp(prefix="faults-"))
    try:
        counts = play_all(scratch, args)
    finally:
        if args.keep:
            print(f"folders are left in {scratch}")
        else:
            shutil.rmtree(scratch, ignore_errors=True)
    print("\n| " + " | ".join(["", "cases", *KINDS]) + " |\n" + "|---" * 9 + "|")
    for part, of_part in counts.items():
        row = [part, of_part.total(), *(of_part[kind] for kind in KINDS)]
        print("| " + " | ".join(map(str, row)) + " |")
    print(f"seed {args.seed}, {time.monotonic() - began:.0f} s")
    sys.exit(1 if set().union(*counts.values()) - set(GOOD) else 0)


if __name__ == "__main__":
    main()
