"""python -m tests.campaign [--seed 0] [--inputs 1000] [--damaged 200] [--kills 40]."""

from __future__ import annotations

import argparse
import gc
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


def import_all() -> None:
    """Import what the commands import, so that no child has to."""
    import datasets  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    import safetensors.torch  # noqa: F401
    import tokenizers  # noqa: F401
    import torch.utils.tensorboard  # noqa: F401
    from tensorboard.backend.event_processing import event_accumulator  # noqa: F401

    import configs  # noqa: F401
    import marsopt.profile.optimizer  # noqa: F401
    import train.engine.ends  # noqa: F401
    import train.evaluate.harness  # noqa: F401
    import train.export  # noqa: F401
    import train.plan.forecast  # noqa: F401
    import train.prepare  # noqa: F401
    import train.runs.summary  # noqa: F401
    import train.runs.trained  # noqa: F401

    gc.collect()
    gc.freeze()  # what the children share stays shared


def arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser("python -m tests.campaign", description=__doc__)
    add = parser.add_argument
    add("--seed", type=int, default=0)
    add("--inputs", type=int, default=1000, help="malformed command lines and files")
    add("--damaged", type=int, default=200, help="damaged checkpoints")
    add("--kills", type=int, default=40, help="runs that are killed")
    add("--only", nargs="*", choices=PARTS, default=list(PARTS))
    add("--case", type=int, nargs="*", help="numbers of the cases to play")
    add("--at-once", type=int, default=2, help="cases that run side by side")
    add("--keep", action="store_true", help="leave the folders of failing cases")
    return parser.parse_args()


def _cases(part: str, ground, args: argparse.Namespace) -> Iterator:
    from tests.campaign import damage, inputs, kills

    if part == "inputs":
        found = inputs.cases(ground, args.seed, args.inputs)
    elif part == "damage":
        found = damage.cases(ground, args.seed, args.damaged)
    else:
        found = kills.cases(ground, args.seed, args.kills)
    return (case for case in found if not args.case or case.number in args.case)


def _show(part: str, case, verdict, commands: list, ends: list) -> None:
    """Print a case that came out as it must not."""
    print(f"\n{part} {case.number}: {verdict.kind}: {verdict.why}\n  {case.name}")
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


def play_part(part: str, ground, scratch: Path, args: argparse.Namespace) -> Counter:
    """Play the cases of one part; return how many came out how."""
    from tests.campaign.children import GOOD, play

    counts: Counter = Counter()
    began = time.monotonic()
    cases = _cases(part, ground, args)
    for case, verdict, commands, ends in play(cases, scratch / part, args.at_once):
        counts[verdict.kind] += 1
        bad = verdict.kind not in GOOD
        if bad:
            _show(part, case, verdict, commands, ends)
        if not (bad and args.keep):
            shutil.rmtree(scratch / part / f"case{case.number}", ignore_errors=True)
        if counts.total() % 50 == 0:
            said = ", ".join(f"{n} {kind}" for kind, n in counts.items())
            seconds = time.monotonic() - began
            print(f"{part}: {said} after {seconds:.0f} s", flush=True)
    return counts


def main() -> None:
    """Run the campaign."""
    args = arguments()
    began = time.monotonic()
    import_all()
    from tests.campaign.children import GOOD, KINDS
    from tests.campaign.ground import make

    scratch = Path(tempfile.mkdtemp(prefix="campaign-"))
    try:
        ground = make(scratch / "ground", with_files="inputs" in args.only)
        found = {part: play_part(part, ground, scratch, args) for part in args.only}
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
    bad = sum(n for counts in found.values() for kind, n in counts.items()
              if kind not in GOOD)  # fmt: skip
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
