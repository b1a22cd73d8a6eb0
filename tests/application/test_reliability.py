"""What a run survives, refuses and says: kills, signals, a second run in its folder, a
full disk, ranks that differ, options that would change it silently.
"""

from __future__ import annotations

import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import types
from operator import attrgetter
from pathlib import Path

import pytest

import configs
from tests.application.runs import ROOT, STEPS, printed, tiny, train_tiny, words
from tests.forks import forked
from tests.processes import spawn
from train import prepare
from train.engine import ends
from train.engine.ranks import SharedError, compare, together
from train.engine.resolve import UNUSED, resolve
from train.engine.titan_checkpoint import RunCheckpoints
from train.errors import UserError
from train.runs import checkpoints, checksums
from train.runs.settings import EXECUTION_WITHIN, settings

pytestmark = pytest.mark.application

SHAPE = configs.tiny_mars_adamw().model_spec.model.shape


@pytest.fixture
def copied(one, tmp_path):
    return shutil.copytree(one[0], tmp_path / "copied")


def newest(folder: Path) -> Path:
    return folder / "checkpoint" / f"step-{STEPS}"


def test_every_checkpoint_has_the_checksums_of_sha256sum(one):
    for step in (4, STEPS):
        folder = one[0] / "checkpoint" / f"step-{step}"
        done = subprocess.run(
            ["sha256sum", "--check", checksums.SUMS],
            cwd=folder, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout == ".metadata: OK\n__0_0.distcp: OK\n"


def test_what_was_cut_off_pushes_no_whole_checkpoint_out(tmp_path):
    for step in (10, 20, 25, 30):
        (tmp_path / f"step-{step}").mkdir()
    for step in (10, 20):  # 25 was cut off, 30 is being written
        (tmp_path / f"step-{step}" / ".metadata").touch()
    purged = queue.Queue()
    manager = types.SimpleNamespace(
        folder=str(tmp_path),
        keep_latest_k=2,
        purge_queue=purged,
        _should_purge=lambda: True,
    )
    RunCheckpoints._purge_stale_checkpoints(manager)
    assert purged.empty()
    for step in (25, 30):
        (tmp_path / f"step-{step}" / ".metadata").touch()
    RunCheckpoints._purge_stale_checkpoints(manager)
    assert [Path(purged.get()).name for _ in range(purged.qsize())] == [
        "step-10", "step-20",
    ]  # fmt: skip


# ---- ends ----------------------------------------------------------------------------

# ranks, and which of them kills itself before which operation on the checkpoint's files
# of which step, while it saves it
KILLS = {
    "as it begins": (1, 0, 0, 4),
    "in the midst": (1, 0, 4, 4),
    "as it ends": (1, 0, 8, STEPS),
    "the first of two": (2, 0, 5, 4),
    "the second of two": (2, 1, 1, 4),
}


@pytest.mark.processes
@pytest.mark.parametrize("name", KILLS)
def test_a_run_that_is_killed_while_it_saves_goes_on(name, one, data, tmp_path):
    """By the same command, with the losses of a run that nobody disturbed; a rank that
    is left says once that the other one has gone.
    """
    ranks, victim, number, step = KILLS[name]
    kill = (f"/checkpoint/step-{step}", number, [victim])
    command = words(data, tmp_path / "run")
    code, out, err = forked(*command, ranks=ranks, together=False, kill=kill)
    assert code in (-signal.SIGKILL, ends.FAILED)
    told = told_by(err)
    assert len(told) == ranks - 1, err
    for line in told:
        assert f"error: another rank than {1 - victim} is gone or stopped" in line
        assert re.search(r"the same command (resumes after|starts anew)", line)
        assert "train_step" not in err  # a traceback of ours
        assert "Traceback" in (tmp_path / f"run/rank{1 - victim}.log").read_text()
    first, rest = printed(out), train_tiny(data, tmp_path / "run", ranks=ranks)
    losses, held_out = (a | b for a, b in zip(first, rest[:2], strict=True))
    assert losses == one[1] and held_out.items() <= one[2].items()
    assert first[0].items() <= one[1].items()


def many_steps(data, folder) -> list[str]:
    """The arguments of a run that takes longer than a test waits."""
    many = (
        "--lr-scheduler.total-steps", 5000, "--checkpoint.interval", 10,
        "--validator.freq", 5000,
    )  # fmt: skip
    return [*map(str, words(data, folder, *many, steps=5000))]


def under_torchrun(data, folder) -> subprocess.Popen:
    """It on two ranks, in processes of their own."""
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m"]
    return subprocess.Popen(
        [sys.executable, *launch, *many_steps(data, folder)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def after_step(process: subprocess.Popen, step: int) -> None:
    """Wait until it says that it took this step."""
    limit = threading.Timer(300, process.kill)  # of a busy machine
    limit.start()
    for line in process.stdout:
        if line.startswith(f"step {step}/"):
            break
    else:
        pytest.fail(f"ended before step {step}: {process.stderr.read()}")
    limit.cancel()


def told_by(stderr: str) -> list[str]:
    kept = [line for line in stderr.splitlines() if re.match("error|stopped", line)]
    return kept


@pytest.mark.parametrize(
    ("number", "code", "name"),
    [
        (signal.SIGINT, 130, "Ctrl-C"),
        (signal.SIGTERM, 143, "SIGTERM"),
        (signal.SIGHUP, 129, "SIGHUP"),
    ],
)
def test_a_signal_ends_a_run_in_one_line(data, tmp_path, number, code, name):
    # the second one as of torchrun and of Slurm
    ended, _, stderr = forked(
        *many_steps(data, tmp_path / "run"), signals=("step 15/", [number, number])
    )
    assert ended == code, stderr
    (line,) = stderr.splitlines()
    step, last = map(
        int,
        re.fullmatch(
            rf"stopped by {name} at step (\d+): the same command resumes after step "
            r"(\d+)",
            line,
        ).groups(),
    )
    assert step == last == checkpoints.last_step(tmp_path / "run") >= 10
    checkpoints.check(
        tmp_path / "run" / "checkpoint" / f"step-{last}", SHAPE, whole=True
    )
    log = (tmp_path / "run" / "rank0.log").read_text()
    assert "Traceback" not in stderr + log


def workers(launcher: int) -> dict[str, int]:
    """{rank: process} of those that torchrun has started."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    found = {}
    for child in children:
        environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        ranks = [v[5:].decode() for v in environment if v.startswith(b"RANK=")]
        found |= {rank: int(child) for rank in ranks}
    return found


def runs(process: int) -> bool:
    """Whether it does, or has ended and waits for somebody to notice."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


@pytest.mark.processes
def test_ranks_whose_launcher_was_killed_save_and_end(data, tmp_path):
    process = under_torchrun(data, tmp_path / "run")
    after_step(process, 2)
    left = workers(process.pid)
    process.kill()
    out, stderr = process.communicate(timeout=90)  # until all have closed the pipes
    (line,) = told_by(stderr)
    step, last = re.findall(r"at step (\d+): .* after step (\d+)", line)[0]
    assert step == last
    assert int(last) == checkpoints.last_step(tmp_path / "run")
    assert not any(map(runs, left.values()))


def test_a_loss_that_is_not_finite_names_a_checkpoint_and_the_rate(data, tmp_path):
    folder = tmp_path / "run"
    options = ("--optimizer.lr=1e25", "--training.max-norm=1e20")
    options += ("--checkpoint.interval", 1)
    code, _, err = forked(*words(data, folder, *options))
    *_, line = err.splitlines()
    assert code == ends.FAILED
    told = re.match(r"error: got a loss .* not finite after step (\d), at .*", line)
    assert told and " rate of 1e+25 (its peak is 1e+25)" in line
    good = folder / "checkpoint" / f"step-{int(told[1]) - 1}"
    assert f"of a finite loss is {good}: " in line and good.exists()
    assert line.endswith(f"(--checkpoint.initial-load-path {good})")
    log = (folder / "rank0.log").read_text()
    assert line in log and "Traceback" in log


def test_a_checkpoint_that_lost_its_file_is_not_resumed_from(copied, data):
    """As a run that ends says it."""
    file = newest(copied) / "__0_0.distcp"
    file.unlink()
    file.mkdir()
    again = words(data, copied)
    code, _, err = forked(*again)
    assert code == ends.UNUSABLE and "Of this run step 4 is whole" in err
    newest(copied).rename(copied / "damaged")
    assert ends.goes_on(copied) == "the same command resumes after step 4"
    blocked = newest(copied) / "__0_0.distcp"
    blocked.mkdir(parents=True)
    code, _, err = forked(*again)
    assert code == ends.FAILED and "Is a directory" in err
    assert "once that is mended, the same command resumes after step 4" in err


@pytest.fixture
def small_disk(tmp_path):
    """A file system that holds one checkpoint and a half."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_ends_a_run_in_one_line(data, small_disk):
    code, _, stderr = forked(*many_steps(data, small_disk / "run"))
    assert code == 1, stderr
    assert stderr.count("\n") == 1
    assert re.match(
        rf"error: no space is left on the disk of {small_disk}/run: make some, at step "
        "20 of 5000: the same command resumes after step 10",
        stderr,
    )


# ---- ranks that do not share what they must ------------------------------------------

ON_ALL = dict(training__global_batch_size=16)


def ended_by(rank: int, world: int, cases: list) -> list[str]:
    """Why this rank ends in each of ``cases``, (data, folder, changes) by rank; and
    where neither, one, or both of two cannot use what they were given.
    """
    whys = []

    def end(act) -> None:
        try:
            act()
            whys.append("")
        except SharedError as error:
            whys.append(str(error))

    for place, folder, changes in (case.get(rank, case[0]) for case in cases):
        config = tiny(place, **ON_ALL | changes)
        config.dump_folder = str(folder)
        resolve(config, world)
        end(lambda config=config: compare(config))

    def unusable_on(ranks: tuple) -> None:
        if rank in ranks:
            raise UserError("got nothing, expected something")

    for ranks in ((), (1,), (0, 1)):
        end(lambda ranks=ranks: together(lambda: unusable_on(ranks)))
    return whys


DIFFERENT = {
    "steps": (dict(training__steps=1300), "training.steps=1300 where rank 0 has 1400"),
    "several": (
        dict(optimizer__lr=0.1, debug__seed=1),
        "debug.seed=1 where rank 0 has 0 and 1 more",
    ),
}


@pytest.mark.processes
def test_ranks_that_differ_end_with_the_same_line(data, tmp_path):
    """Before the first step; the line names the rank, the value and what to do."""
    place, other = tmp_path / "run", tmp_path / "other"
    moved, elsewhere = tmp_path / "moved", tmp_path / "elsewhere"
    for folder in (place, elsewhere):
        folder.mkdir()
    (tmp_path / "link").symlink_to(place)
    shutil.copytree(data, moved)
    text = [Path(shutil.__file__)]
    prepare.prepare("text", "bytes", other, files=text, val_fraction=0.2)
    usual = {0: (data, place, {})}
    cases = [usual | {1: (data, place, changes)} for changes, _ in DIFFERENT.values()]
    cases += [
        # the same data and the same folder by other names, and what may differ
        usual | {1: (moved, tmp_path / "link", dict(profiler__enable_profiling=True))},
        usual | {1: (other, place, {})},
        usual | {1: (data, elsewhere, {})},
    ]
    first, second = spawn(ended_by, 2, cases)
    assert first == second
    *of_options, alike, of_data, of_folder, neither, one, both = first
    for (_, told), why in zip(DIFFERENT.values(), of_options, strict=True):
        assert why == (
            f"got on rank 1 {told}, expected the same on all ranks: start every rank "
            "with the same command and data"
        )
    assert alike == neither == ""
    assert re.match(
        rf"got on rank 1 data\.train='\w{{59}} \({other}\) where rank 0 has "
        rf"'\w{{59}} \({data}\) and 1 more, expected",
        of_data,
    )
    assert of_folder == (
        f"got --dump-folder {elsewhere} on rank 1, where a file is missing that rank 0 "
        f"wrote into {place}, expected one folder: give all ranks the same "
        "--dump-folder, on a disk that all of them see"
    )
    assert (one, both) == (f"rank 1: {both}", "got nothing, expected something")
    assert not list(place.iterdir()) and not list(elsewhere.iterdir())


@pytest.mark.processes
def test_ranks_started_by_hand_that_differ_end_at_once(data, tmp_path):
    """With a line from each; where torchrun has started them with one, of rank 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        by_hand = {"MASTER_PORT": str(free.getsockname()[1])}
    by_hand |= {"TORCHELASTIC_USE_AGENT_STORE": "False"}
    command = words(data, tmp_path / "run", "--debug.seed", "$RANK")
    code, _, err = forked(*command, ranks=2, together=False, **by_hand)
    why = (
        "got on rank 1 debug.seed=1 where rank 0 has 0, expected the same on all "
        "ranks: start every rank with the same command and data"
    )
    assert err == "".join(f"rank {rank}: error: {why}\n" for rank in range(2))
    assert code == 2
    assert not list((tmp_path / "run").glob("ranks-*"))
    assert not (tmp_path / "run" / "settings.json").exists()


# ---- options -------------------------------------------------------------------------


def other_than(usual):
    """A value of the same type."""
    if isinstance(usual, bool):
        return not usual
    if isinstance(usual, int | float):
        return usual + 2
    if isinstance(usual, str):
        return usual + "x"
    return {} if usual is None else {"x": 1} if isinstance(usual, dict) else ["x"]


FOLLOW = {
    "dataloader.vocab_size": 5,
    "dataloader.seed": 5,
    "validator.dataloader.vocab_size": 5,
    "validator.dataloader.seed": 5,
    "validator.last_step": 5,
    "metrics.total_steps": 5,
    "tokenizer.name": "gpt2",
}


def test_options_of_no_effect_and_those_that_follow_from_others_are_refused(data):
    values = {path: other_than(usual) for path, usual in UNUSED.items()} | FOLLOW
    for path, value in values.items():
        config = tiny(data)
        section, _, name = path.rpartition(".")
        setattr(attrgetter(section)(config), name, value)
        said = path if path in UNUSED else f"{name}={value}"
        with pytest.raises(UserError, match=f"{re.escape(said)}"):
            resolve(config, 1)


# options with an effect on how a run is executed or shown, not on what it computes
EFFECTIVE = EXECUTION_WITHIN | {
    "metrics": {
        "log_freq", "statistics_freq", "enable_tensorboard", "disable_color_printing",
        "save_for_all_ranks", "enable_wandb",
    },
    "checkpoint": {
        "interval", "initial_load_path", "initial_load_model_only", "keep_latest_k",
        "enable_first_step_checkpoint", "async_mode",
    },
    "compile": {"enable", "components", "backend"},
    "comm": {
        "init_timeout_seconds", "train_timeout_seconds", "trace_buf_size",
        "save_traces_folder", "save_traces_file_prefix",
    },
    "parallelism": {
        "data_parallel_replicate_degree", "data_parallel_shard_degree",
        "fsdp_reshard_after_forward", "spmd_backend",
        # of parallelism that is switched off
        "enable_sequence_parallel", "module_fqns_per_model_part",
        "context_parallel_load_balancer", "context_parallel_ptrr_mask_key",
    },
    "dataloader": {"dataset_path"},
    "validator.dataloader": {"dataset_path"},
    "lr_scheduler": {"total_steps"},
}  # fmt: skip
ALONE = {"hf_assets_path", "dump_folder", "activation_checkpoint"}
WHOLE = ("profiler.", "model_spec.", "parallelism.pipeline_parallel_")


def flat(options: dict, prefix: str = ""):
    for name, value in options.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict) and value and path not in UNUSED:
            yield from flat(value, f"{path}.")
        else:
            yield path


def test_every_option_is_known_to_have_an_effect_or_refused(data):
    """A new option of torchtitan fails here until somebody has looked at it."""
    config = tiny(data)
    within = {f"{section}.{name}" for section, names in EFFECTIVE.items()
              for name in names}  # fmt: skip
    known = {*UNUSED, *FOLLOW, *ALONE, *within}
    every = set(flat(config.to_dict()))
    resolve(config, 1)
    pinned = tuple(settings(config))
    assert known <= every
    assert {
        path
        for path in every - known
        if not path.startswith(WHOLE)
        and not any(path == name or path.startswith(f"{name}.") for name in pinned)
    } == set()
