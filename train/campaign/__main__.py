"""python -m train.campaign [--seed 0] [--inputs 1000] [--damaged 200] [--kills 40]."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

# before torch comes in, which would make threads that no child has
os.environ["OMP_NUM_THREADS"] = "1"
# a data set on the hub is refused at once, whether there is a network or not
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["PYTHONPATH"] = str(Path(__file__).parent.parent.parent)

PARTS = ("inputs", "damage", "kills")
SHOWN = 12  # lines of a failing case's output


def arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser("python -m train.campaign", description=__doc__)
    add = parser.add_argument
    add("--seed", type=int, default=0)
    add("--inputs", type=int, default=1000, help="malformed command lines and files")
    add("--damaged", type=int, default=200, help="damaged checkpoints")
    add("--kills", type=int, default=40, help="runs that are killed")
    add("--only", nargs="*", choices=PARTS, default=list(PARTS))
    add("--case", type=int, nargs="*", help="numbers of the cases to play")
    add("--at-once", type=int, default=2, help="cases that run side by side")
    add("--brief", action="store_true", help="of each part what is over soonest")
    add("--keep", action="store_true", help="leave the folders of failing cases")
    return parser.parse_args()


def _cases(ground, ends: dict, args: argparse.Namespace) -> Iterator:
    """Yield the cases that were asked for, one part after the other."""
    from train.campaign import damage, inputs, kills

    known = ground, ends, args.seed
    every = {
        "inputs": lambda: inputs.cases(ground, args.seed, args.inputs, args.brief),
        "damage": lambda: damage.cases(*known, args.damaged, args.brief),
        "kills": lambda: kills.cases(*known, args.kills, args.brief),
    }
    for part in args.only:
        found = every[part]()
        yield from (c for c in found if not args.case or c.number in args.case)


def _commands(ground, args: argparse.Namespace) -> dict:
    """Return what the parts need to have been run."""
    from train.campaign import damage, kills

    found = {}
    if "damage" in args.only:
        found |= damage.commands(ground, args.damaged)
    if "kills" in args.only:
        found |= kills.commands(ground, args.seed, args.kills, args.brief)
    return found


def _show(case, verdict, commands: list, ends: list) -> None:
    """Print a case that came out as it must not."""
    print(f"\n{case.part} {case.number}: {verdict.kind}: {verdict.why}\n  {case.name}")
    for command, ended in zip(commands, ends, strict=True):
        print(f"  $ {str(command)[:1500]}\n  exit codes {ended.codes}")
        for name, said in (("stdout", ended.out), ("stderr", ended.err)):
            lines = said.strip().splitlines()
            if len(lines) > SHOWN:
                lines = [*lines[: SHOWN // 3], "...", *lines[-SHOWN * 2 // 3 :]]
            for line in lines:
                shown = line[:400].encode(errors="backslashreplace").decode()
                print(f"    {name}: {shown}")
    sys.stdout.flush()


def play_all(ground, ends: dict, scratch: Path, args) -> dict[str, Counter]:
    """Play all cases; return of each part how many came out how."""
    from train.campaign.children import play
    from train.campaign.law import GOOD

    found: dict[str, Counter] = {part: Counter() for part in args.only}
    began = time.monotonic()
    cases = _cases(ground, ends, args)
    for case, verdict, commands, ended in play(cases, scratch, args.at_once):
        counts = found[case.part]
        counts[verdict.kind] += 1
        bad = verdict.kind not in GOOD
        if bad:
            _show(case, verdict, commands, ended)
        if not (bad and args.keep):
            shutil.rmtree(scratch / f"{case.part}{case.number}", ignore_errors=True)
        if counts.total() % 50 == 0:
            said = ", ".join(f"{n} {kind}" for kind, n in counts.items())
            seconds = time.monotonic() - began
            print(f"{case.part}: {said} after {seconds:.0f} s", flush=True)
    return found


def main() -> None:
    """Run the campaign."""
    args = arguments()
    began = time.monotonic()
    from train.campaign.children import import_all
    from train.campaign.ground import make
    from train.campaign.law import GOOD, KINDS

    import_all()
    scratch = Path(tempfile.mkdtemp(prefix="campaign-"))
    try:
        with_files = "inputs" in args.only
        place = scratch / "ground"
        ground, ends = make(place, with_files, lambda g: _commands(g, args))
        found = play_all(ground, ends, scratch, args)
    finally:
        if args.keep:
            print(f"folders are left in {scratch}")
        else:
            shutil.rmtree(scratch, ignore_errors=True)
    print(f"\n{'':8}{'cases':>7}" + "".join(f"{kind:>11}" for kind in KINDS))
    for part, counts in found.items():
        row = "".join(f"{counts[kind]:11}" for kind in KINDS)
        print(f"{part:8}{counts.total():7}{row}")
    print(f"seed {args.seed}, {time.monotonic() - began:.0f} s")
    every = sum(found.values(), Counter())
    sys.exit(1 if every.keys() - set(GOOD) else 0)


if __name__ == "__main__":
    main()
