"""Everything that a GPU is asked, in three parts, continued where they were cut.

    python -m benchmarks.gpu [correctness] [speed] [training] [--data FOLDER]
        [--out runs/gpu] [--limit SECONDS] [--device cpu] [--miniature]

Each part writes PART.json below --out after every command, and prints it at its end as
one line of JSON; called again, it goes on with what is missing (a test or a training
that was cut begins anew). --limit holds for each part: a command that would not end in
time is left for the next call. Needed are torch, numpy, safetensors, matplotlib,
pytest and pytest-xdist. --miniature runs the same commands on tiny models. `python -m
benchmarks.gpu.tables` prints the tables of the documentation from --out.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.jobs import PARTS, Job, jobs_of
from train.errors import UserError, check_least, command
from train.files import write_json

TAIL = 4000  # characters of a command's output that are kept
GRACE = 30.0  # seconds of a study's limit for its start, and for its pictures


def arguments() -> argparse.Namespace:
    """Return the command line, checked."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("parts", nargs="*", metavar="PART", help=f"of {PARTS}; default: all of them")
    add("--data", type=Path, default=Path("data/packages"), help="tokens (%(default)s)")
    add("--out", type=Path, default=Path("runs/gpu"), help="(%(default)s)")
    add("--limit", type=float, default=540.0, help="seconds a part (%(default)s)")
    add("--device", default="cuda", choices=["cpu", "cuda"])
    add("--miniature", action="store_true", help="tiny models: a rehearsal")
    args = parser.parse_args()
    unknown = [part for part in args.parts if part not in PARTS]
    if unknown:
        raise UserError(f"got part {unknown[0]!r}, expected some of {PARTS}: name one")
    check_least(1, limit=args.limit)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "got a machine without a GPU that torch can use, expected one: add "
            "--device cpu --miniature to rehearse"
        )
    return args


def run(job: Job, folder: Path, seconds: float) -> dict[str, Any]:
    """Run a command for so many seconds at most; return what came of it.

    ``code`` is None where it was cut; ``result`` is what it wrote as JSON, if it did.
    """
    place = folder / job.name.replace(" ", "-")
    path, call = place.with_suffix(".json"), [sys.executable, "-m", job.module]
    if job.resumes:
        path, minutes = place / "results.json", max(1, seconds - GRACE) / 60
        call += [*job.args, "--out", str(place), "--minutes", f"{minutes:.2f}"]
    else:
        call += ["--json", str(path), *job.args]
    began = time.perf_counter()
    child = subprocess.Popen(
        call,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **os.environ},
        # to be killed with what it started; a session of its own would outlive us
        process_group=0,
    )
    cut = False
    try:
        output, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        cut = True
        os.killpg(child.pid, signal.SIGKILL)
        output, _ = child.communicate()
    except BaseException:
        os.killpg(child.pid, signal.SIGKILL)
        raise
    try:
        found = json.loads(path.read_text()) if path.exists() else None
    except ValueError:  # it was cut while it wrote
        found = None
    if not job.resumes:
        path.unlink(missing_ok=True)
    return dict(
        command=" ".join(["python", "-m", job.module, *job.args]),
        code=None if cut else child.returncode,
        seconds=round(time.perf_counter() - began, 1),
        output=output[-TAIL:],
        result=found,
    )


def is_done(entry: dict[str, Any] | None) -> bool:
    """Return whether a command need not run again."""
    return entry is not None and entry["code"] == 0


def play(part: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run what is missing of a part; return all of it."""
    path = args.out / f"{part}.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    end = time.perf_counter() + args.limit
    for job in jobs_of(part, args.device, args.miniature, args.data):
        if is_done(found.get(job.name)):
            continue
        left = end - time.perf_counter()
        if left < (1 if args.miniature else job.seconds):
            print(f"{part}: {job.name} is left for another call", flush=True)
            continue
        print(f"{part}: {job.name}", flush=True)
        found[job.name] = run(job, args.out, left)
        write_json(path, found)
        if found[job.name]["code"] != 0:
            print(found[job.name]["output"], flush=True)
    return found


def main() -> None:
    """Run the command."""
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    for part in args.parts or PARTS:
        found = play(part, args)
        short = {
            name: {key: value for key, value in entry.items() if key != "output"}
            for name, entry in found.items()
        }
        print(json.dumps({part: short}), flush=True)
    from benchmarks.gpu.tables import tables

    print(tables(args.out))


if __name__ == "__main__":
    command(main)
