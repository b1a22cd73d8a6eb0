"""The law: a command is refused in one line with exit code 2, or does as it is told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ended:
    """What became of a command: of each rank the exit code (minus the signal that ended
    it), what it printed, and when it ended.
    """

    codes: list[int]
    outs: list[str]
    errs: list[str]
    times: list[float]
    hung: bool

    @property
    def code(self) -> int:
        """Return the exit code of the rank that ended first: torchrun ends others."""
        return self.codes[self.times.index(min(self.times))]

    @property
    def out(self) -> str:
        """Return all that was printed to stdout."""
        return "".join(self.outs)

    @property
    def err(self) -> str:
        """Return all that was printed to stderr."""
        return "".join(self.errs)


@dataclass(frozen=True)
class Verdict:
    """How a case came out: one of KINDS, and why."""

    kind: str
    why: str = ""


REFUSED, DONE = "refused", "done"
SILENT, TRACEBACK, HANG, DIFFERING = "silent", "traceback", "hang", "differing"
OTHERWISE = "otherwise"  # another exit code, more or fewer lines, something written
KINDS = (REFUSED, DONE, SILENT, TRACEBACK, HANG, DIFFERING, OTHERWISE)
GOOD = (REFUSED, DONE)


def said(err: str) -> list[str]:
    """Return the lines of stderr without Python's warnings, which bring a line of
    source along.
    """
    shown, warned = [], False
    for line in err.strip().splitlines():
        if warned and line.startswith("  "):
            continue
        warned = "Warning: " in line
        if not warned:
            shown.append(line)
    return shown


def judge(ended: Ended, must: bool | None = None) -> Verdict:
    """Apply the law of every command: it is refused in one line with exit code 2, or
    does what it was told; what ``must`` be refused may not be done (False: must be).
    """
    if ended.hung:
        return Verdict(HANG, "did not end in time")
    for said in (ended.out, ended.err):
        if "Traceback (most recent call last)" in said:
            return Verdict(TRACEBACK, said.strip().splitlines()[-1])
    if ended.codes == [0] * len(ended.codes):
        return Verdict(SILENT, "it was done") if must else Verdict(DONE)
    if ended.code != 2:
        return Verdict(OTHERWISE, f"exit code {ended.codes}")
    if must is False:
        return Verdict(OTHERWISE, "what is well was refused")
    lines = ended.err.strip().splitlines()
    if any(line.startswith(("usage:", "╭─")) for line in lines):
        return Verdict(REFUSED)  # argparse's and tyro's own
    errors = [line for line in lines if line.startswith("error: ")]
    if len(errors) != 1 or lines[-1] != errors[0]:
        return Verdict(OTHERWISE, f"{len(errors)} error lines of {len(lines)}")
    return Verdict(REFUSED)
