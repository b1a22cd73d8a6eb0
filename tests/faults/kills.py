"""Runs that are killed, at moments of the seed: the same command continues with the
losses of a run that nobody disturbed.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.faults.cases import (
    DIFFERING,
    DONE,
    HANG,
    OTHERWISE,
    TRACEBACK,
    Case,
    Play,
    Steps,
    Verdict,
    broken,
    judge,
    not_one_error,
    without_warnings,
)
from tests.faults.ground import INTERVAL, STEPS, TOTAL, Ground, Losses, losses
from tests.forks import LIMIT, ROOT, Command, Ended, Running

PATIENCE = 60.0  # seconds in which a rank whose other was killed ends by itself
# what a process does to a folder of checkpoints, as Python's audit hooks call it
TOUCHES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir")
CORRECTIONS = {
    "approximate": (),
    "exact": ("--optimizer.correction", "exact"),
}


@dataclass(frozen=True)
class Plan:
    """Who is ended when, and how.

    ``at`` is a step after whose line the signal comes, ``seconds`` later; or with
    ``touch`` the number of the file operation, counted in the folder of the checkpoint
    of step ``at``, before which a rank kills itself. ``victims`` get the signal.
    """

    correction: str
    ranks: int
    steps: int
    at: int
    victims: tuple[int, ...]
    number: int = signal.SIGKILL
    seconds: float = 0.0
    touch: int | None = None

    @property
    def undisturbed(self) -> str:
        """Return the name of the run whose losses this one has to show."""
        if self.correction == "approximate" and self.ranks == 1 and self.steps <= STEPS:
            return "run"  # from which everything begins
        return f"{self.correction}{self.ranks}"

    def __str__(self) -> str:
        when = f"{self.seconds:.2f} s after step {self.at}"
        if self.touch is not None:
            when = f"at touch {self.touch} of the checkpoint of step {self.at}"
        who = f"rank {self.victims} of {self.ranks}"
        name = signal.Signals(self.number).name
        return f"{name} to {who}, {self.correction}, {self.steps} steps, {when}"

    def command(self, ground: Ground, run: Path, **kw) -> Command:
        """Return the training that is killed, and given again."""
        options = CORRECTIONS[self.correction]
        return ground.train(run, *options, steps=self.steps, ranks=self.ranks, **kw)


def _kill_when_touched(plan: Plan) -> Callable[[int], None]:
    """Return what makes the child of a rank kill itself while it saves."""
    folder = f"/checkpoint/step-{plan.at}"

    def prepare(rank: int) -> None:
        if rank not in plan.victims:
            return
        num_touches = 0

        def hook(event: str, args: tuple) -> None:
            nonlocal num_touches
            if event in TOUCHES and folder in str(args[0]):
                if num_touches == plan.touch:
                    os.kill(os.getpid(), signal.SIGKILL)
                num_touches += 1

        sys.addaudithook(hook)

    return prepare


def _signal_after(plan: Plan) -> Callable[[Running], None]:
    """Return what sends the signal some time after a step was printed."""
    due: float | None = None
    sent = False

    def watch(running: Running) -> None:
        nonlocal due, sent
        if due is None and f"step {plan.at}/" in running.printed("out", 0):
            due = time.monotonic() + plan.seconds
        if due is not None and time.monotonic() >= due and not sent:
            running.kill(plan.number, *plan.victims)
            sent = True

    return watch


def _draw(draw: random.Random, number: int) -> Plan:
    """Return the plan of a case: of each ten four while saving, three at any moment,
    two told by SIGTERM or SIGINT, one more while saving the last checkpoint.
    """
    correction = draw.choice(list(CORRECTIONS))
    ranks = 2 if number % 10 == 0 else draw.choice((1, 2))
    steps = INTERVAL * draw.randint(2, 5)
    if correction == "approximate" and draw.random() < 0.1:
        steps = TOTAL
    everyone = tuple(range(ranks))
    victims = draw.choice([everyone, *((rank,) for rank in everyone)])
    common = dict(correction=correction, ranks=ranks, steps=steps)
    kind = number % 10
    if kind in (1, 3, 5, 7, 9):
        at = steps if kind == 9 else INTERVAL * draw.randint(1, steps // INTERVAL)
        return Plan(**common, at=at, victims=victims, touch=draw.randrange(9))
    at, seconds = draw.randint(1, steps - 1), draw.random() * 0.3
    if kind in (2, 6):
        name = draw.choice((signal.SIGTERM, signal.SIGINT))
        whole = dict(victims=everyone, number=name, seconds=seconds)
        return Plan(**common, at=min(at, steps - 3), **whole)
    return Plan(**common, at=at, victims=victims, seconds=seconds)


def _plans(seed: int, num: int, brief: bool) -> list[Plan]:
    draws = [random.Random(f"{seed} kills {number}") for number in range(1, num + 1)]
    if brief:
        short = dict(steps=2 * INTERVAL, at=INTERVAL, victims=(0,))
        return [Plan("approximate", 1, **short, touch=d.randrange(9)) for d in draws]
    return [_draw(draw, number) for number, draw in enumerate(draws, 1)]


def commands(ground: Ground, seed: int, num: int, brief: bool) -> dict[str, Command]:
    """Return the runs that nobody disturbs, as long as the longest that is killed: one
    for each number of ranks, whose sums are rounded in other places.
    """
    plans = sorted(_plans(seed, num, brief), key=lambda plan: plan.steps)
    longest = {plan.undisturbed: plan for plan in plans if plan.undisturbed != "run"}
    return {
        name: plan.command(ground, ground.root / name) for name, plan in longest.items()
    }


def cases(
    ground: Ground, ends: dict[str, Ended], seed: int, num: int, brief: bool
) -> Iterator[Case]:
    """Yield ``num`` runs that are killed; every tenth under torchrun itself, and
    ``brief`` ones soon after they began.
    """
    for number, plan in enumerate(_plans(seed, num, brief), 1):
        expected = losses(ends[plan.undisturbed].out)
        if number % 10 == 0:
            name = f"SIGKILL to torchrun itself, {plan.correction}"
            play = _of_torchrun(ground, plan, expected)
        else:
            name, play = str(plan), _of_plan(ground, plan, expected)
        yield Case("kills", number, name, play)


def _of_plan(ground: Ground, plan: Plan, expected: Losses) -> Play:
    def steps(folder: Path) -> Steps:
        hooks = {"watch": _signal_after(plan)}
        if plan.touch is not None:
            hooks = {"prepare": _kill_when_touched(plan)}
        run = folder / "run"
        first = yield plan.command(ground, run, together=False, **hooks)
        verdict = _after_signal(first, plan, run)
        if verdict.kind != DONE:
            return verdict
        return (yield from _again(ground, run, plan, expected, first.outs[0]))

    return steps


def _after_signal(ended: Ended, plan: Plan, run: Path) -> Verdict:
    """Judge what became of the ranks that were not killed, or were told to end."""
    if verdict := broken(ended):
        return verdict
    over = f"step {plan.steps}/{plan.steps}  loss" in ended.outs[0]
    if over and set(ended.codes) <= {0, -signal.SIGKILL, 1}:
        return Verdict(DONE)  # it had nothing more to do
    if plan.number != signal.SIGKILL:
        return _after_telling(ended, plan, run)
    if any(ended.codes[rank] != -signal.SIGKILL for rank in plan.victims):
        return Verdict(OTHERWISE, f"nobody was killed: {ended.codes}")
    for rank in set(range(plan.ranks)) - set(plan.victims):
        late = ended.times[rank] - ended.times[plan.victims[0]]
        if late > PATIENCE:
            return Verdict(HANG, f"rank {rank} ended {late:.0f} s after the other")
        wrong = not_one_error(ended.errs[rank])
        if ended.codes[rank] != 1 or wrong:
            code = ended.codes[rank]
            return Verdict(OTHERWISE, f"rank {rank}: exit code {code}, {wrong}")
    return Verdict(DONE)


def _after_telling(ended: Ended, plan: Plan, run: Path) -> Verdict:
    """Judge a run that SIGTERM or SIGINT has asked to end."""
    code = 128 + plan.number
    if set(ended.codes) != {code}:
        return Verdict(OTHERWISE, f"exit codes {ended.codes}, expected {code}")
    lines = without_warnings(ended.err)
    if len(lines) != 1 or not lines[0].startswith("stopped by "):
        return Verdict(OTHERWISE, f"{len(lines)} lines")
    step = lines[0].partition(" at step ")[2].partition(":")[0]
    if not (run / "checkpoint" / f"step-{step}" / ".metadata").exists():
        return Verdict(OTHERWISE, f"no checkpoint of step {step}")
    return Verdict(DONE)


def _again(
    ground: Ground, run: Path, plan: Plan, expected: Losses, before: str
) -> Steps:
    """Give the same command again, which has to come to the end; compare all losses."""
    second = yield plan.command(ground, run)
    verdict = judge(second, False)
    if verdict.kind != DONE:
        return verdict
    first, rest = losses(before), losses(second.outs[0])
    steps = {step for what, step in first | rest if what == "loss"}
    missing = sorted(set(range(1, plan.steps + 1)) - steps)
    if missing and "is complete at step" not in second.outs[0]:
        return Verdict(DIFFERING, f"steps {missing} were not shown")
    wrong = [
        (key, loss)
        for key, loss in [*first.items(), *rest.items()]
        if expected.get(key) != loss or key[1] > plan.steps
    ]
    return Verdict(DIFFERING, f"{wrong[:4]}") if wrong else Verdict(DONE)


# ---- torchrun ------------------------------------------------------------------------


def _of_torchrun(ground: Ground, plan: Plan, expected: Losses) -> Play:
    """Return a case in which torchrun is killed, and leaves two workers."""

    def steps(folder: Path) -> Steps:
        run = folder / "run"
        out, err = folder / "torchrun.out", folder / "torchrun.err"
        verdict = _kill_launcher(plan.command(ground, run), out, err, plan.at)
        if verdict.kind != DONE:
            return verdict
        return (yield from _again(ground, run, plan, expected, out.read_text()))

    return steps


def _kill_launcher(command: Command, out: Path, err: Path, at: int) -> Verdict:
    """Start torchrun, kill it after a step, and wait until its workers have gone.

    What else is under way waits in the meantime: it has a limit of minutes.
    """
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "train"]
    with out.open("w") as stdout, err.open("w") as stderr:
        streams = dict(stdout=stdout, stderr=stderr)
        line = [sys.executable, *words, *command.args]
        launcher = subprocess.Popen(line, cwd=ROOT, **streams)
    until = time.monotonic() + LIMIT
    while f"step {at}/" not in out.read_text():
        if launcher.poll() is not None or time.monotonic() > until:
            launcher.kill()
            return Verdict(OTHERWISE, f"not at step {at}: {err.read_text()[-300:]}")
        time.sleep(0.05)
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text()
    workers = [int(pid) for pid in children.split()]
    launcher.kill()
    launcher.wait()
    killed = time.monotonic()
    while any(map(_lives, workers)):
        if time.monotonic() - killed > PATIENCE:
            for pid in workers:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return Verdict(HANG, f"workers outlived torchrun by {PATIENCE} s")
        time.sleep(0.1)
    if len(workers) < 2:
        return Verdict(OTHERWISE, f"torchrun had {len(workers)} workers")
    if "Traceback (most recent call last)" in err.read_text():
        return Verdict(TRACEBACK, err.read_text()[-300:])
    return Verdict(DONE)


def _lives(pid: int) -> bool:
    """Return whether a process runs: whoever inherits it may not have reaped it."""
    with suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in "ZX"
    return False
