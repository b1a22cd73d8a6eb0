"""How a run ends before its last step: by a signal, by a failure here or on another
rank, or because its launcher is gone. One line each, and the exit codes that schedulers
know.
"""

import logging
import os
import shlex
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from train.engine.ranks import SharedError
from train.errors import UserError, is_full, say
from train.runs.checkpoints import instead, last_step, steps
from train.runs.safe_dcp import UnreadableCheckpoint

FAILED, UNUSABLE = 1, 2
NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}
PATIENCE = 5.0  # seconds in which the rank that failed says why
ONE_PRESS = 1.0  # seconds in which two signals are one Ctrl-C, torchrun's and ours
ORPHAN_PATIENCE = 600.0  # seconds in which a rank without a launcher may still save
# what a collective says when another rank has gone
BY_OTHERS = ("onnection", "peer", "imed out", "imeout", "gloo", "NCCL")

log = logging.getLogger(__name__)


class LossNotFinite(UserError):
    """A loss is NaN or infinite; ``last_finite`` is the last step whose loss was seen
    to be finite.
    """

    def __init__(self, message: str, last_finite: int) -> None:
        super().__init__(message)
        self.last_finite = last_finite


class Signals:
    """The first signal that this process was sent.

    Ctrl-C, SIGTERM, which schedulers send some time before SIGKILL, and SIGHUP, which a
    closed terminal sends, end it after the next step, with a checkpoint; before the
    first step, and by a second Ctrl-C, at once.
    """

    def __init__(self) -> None:
        self.told: signal.Signals | None = None
        self.in_steps, self._first = False, 0.0
        for number in NAMES:
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
                signal.signal(number, self._handle)
        if "TORCHELASTIC_RUN_ID" in os.environ:
            launcher = os.getppid()
            threading.Thread(target=self._outlive, args=[launcher], daemon=True).start()

    def _handle(self, number: int, frame: object) -> None:
        # torchrun passes on a signal that its ranks may have had already
        if self.told is None:
            self.told, self._first = signal.Signals(number), time.monotonic()
        is_second = time.monotonic() - self._first > ONE_PRESS
        if not self.in_steps or (number == signal.SIGINT and is_second):
            raise KeyboardInterrupt(number)

    def _outlive(self, launcher: int) -> None:
        """End this process when the one that started it has gone."""
        while os.getppid() == launcher:
            time.sleep(1.0)
        if self.told is None:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ORPHAN_PATIENCE)
        os.kill(os.getpid(), signal.SIGKILL)


class Vote:
    """Whether some rank was told to end, found out by all after the same step.

    An all-reduce of one number over gloo runs beside each step, and is read after the
    next: nobody waits for it.
    """

    def __init__(self) -> None:
        several = dist.get_world_size() > 1
        self._group = dist.new_group(backend="gloo") if several else None
        self._asked: tuple[dist.Work, torch.Tensor] | None = None

    def take(self, mine: bool) -> bool:
        """Give this rank's vote of this step; return the result of the last."""
        if self._group is None:
            return mine
        decided = False
        if self._asked is not None:
            work, votes = self._asked
            work.wait()
            decided = bool(votes)
        votes = torch.tensor(int(mine))
        options = dict(op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._asked = dist.all_reduce(votes, **options), votes
        return decided


def end(
    error: BaseException | None,
    told: signal.Signals | None,
    config,
    step: int,
    began: bool,
) -> NoReturn:
    """End this process with one line on the stderr of one rank; the whole traceback
    goes to the logs.

    Args:
        error: what ended the training; None = it ended after the step, as it was told.
        told: the signal that the process was sent.
        config: of the run.
        step: at which it ended, 0 = before the first.
        began: whether this process has taken a step.
    """
    for number in NAMES:
        signal.signal(number, signal.SIG_IGN)
    folder = Path(config.dump_folder)
    if error is None or isinstance(error, KeyboardInterrupt) or told == signal.SIGINT:
        number = told or signal.SIGTERM  # told None: another rank was sent one
        code = 128 + number
        line = f"stopped by {NAMES[number]} at step {step}: {goes_on(folder)}"
    else:
        log.info("the run has failed", exc_info=error)
        code = FAILED if began or not isinstance(error, UserError) else UNUSABLE
        line = f"error: {_failure(error, config, folder, step, began)}"
        if _by_others(error):
            time.sleep(PATIENCE)
    log.info(line)
    say(line)
    if told_launcher := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # torchtitan's, of which torchrun would print all 60 lines
        with suppress(OSError):
            Path(told_launcher).unlink(missing_ok=True)
    logging.shutdown()
    with suppress(OSError):  # nobody may be there to read it
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # other ranks may be gone: nothing that waits for them


def _failure(error: BaseException, config, folder: Path, step: int, began: bool) -> str:
    if isinstance(error, SharedError):
        return str(error)
    rank, world = os.environ["RANK"], int(os.environ["WORLD_SIZE"])
    reason = _reason(error, folder)
    line = f"rank {rank}: {reason}" if world > 1 else reason
    if _by_others(error):
        line = f"another rank than {rank} is gone or stopped (killed? out of memory?)"
    if isinstance(error, UnreadableCheckpoint) and last_step(folder):
        return f"{line}. {instead(folder, config.model_spec.model.shape)}"
    if isinstance(error, LossNotFinite):
        return f"{line}. {restart(folder, error.last_finite)}"
    if isinstance(error, UserError):
        return line
    # before its first step a process ends as it did: the same again would, too; and
    # what the system refuses once, it refuses again
    again = not began or isinstance(_cause(error), OSError)
    mended = "once that is mended, " if again and not _by_others(error) else ""
    line += f", at step {step} of {config.training.steps}: {mended}{goes_on(folder)}"
    path = folder / f"rank{rank}.log"
    return f"{line}. The traceback is in {path}" if path.exists() else line


def restart(folder: Path, last_finite: int) -> str:
    """Say how to go on after a loss that is not finite: from which checkpoint."""
    # the loss of a step is that of the weights before it
    good = max((step for step in steps(folder) if step < last_finite), default=0)
    do = "start a new run (--dump-folder) with a lower --optimizer.lr"
    if not good:
        return f"There is no checkpoint of a finite loss: {do}"
    path = (folder / "checkpoint" / f"step-{good}").resolve()
    return (
        f"The last checkpoint of a finite loss is {path}: {do} and these weights "
        f"(--checkpoint.initial-load-path {shlex.quote(str(path))})"
    )


def goes_on(folder: Path) -> str:
    """Say what the same command would do."""
    done = last_step(folder)
    if not folder.exists():
        return "with the folder back the same command resumes, else it starts anew"
    if done == 0:
        return "there is no checkpoint yet, so the same command starts anew"
    return f"the same command resumes after step {done}"


def _reason(error: BaseException, folder: Path) -> str:
    """Say what went wrong in one line."""
    error = _cause(error)
    if not folder.exists():
        return f"{folder} is gone, deleted or renamed while the run was in it"
    if is_full(error, folder):
        return f"no space is left on the disk of {folder}: make some"
    if isinstance(error, UserError):
        return str(error)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _cause(error: BaseException) -> BaseException:
    """Return the error behind DCP's, which wraps those of the ranks."""
    if isinstance(error, CheckpointException):
        return next(iter(error.failures.values()))[0]
    return error


def _by_others(error: BaseException) -> bool:
    """Whether a collective failed, as it does when another rank has gone."""
    said = str(error)
    return (
        os.environ["WORLD_SIZE"] != "1"
        and isinstance(error, RuntimeError)
        and any(word in said for word in BY_OTHERS)
    )
