"""What a run survives, refuses and says: damaged checkpoints, signals, a second run in
its folder, options that would change it silently.
"""

# ruff: noqa: F401, F811  (fixtures of another file)

from __future__ import annotations

import os
import pickle
import queue
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from operator import attrgetter
from pathlib import Path

import pytest

import configs
from tests.application.test_application import ROOT, STEPS, TINY, data, run, tiny
from tests.forks import forked
from tests.processes import spawn
from train import export, prepare, sample
from train.engine import ends
from train.engine.launch import parse
from train.engine.progress import Progress
from train.engine.ranks import SharedError, compare, together
from train.engine.resolve import UNUSED, resolve
from train.engine.titan_checkpoint import RunCheckpoints
from train.errors import UserError, command
from train.evaluate import __main__ as evaluate
from train.files import hold
from train.runs import checkpoints, checksums
from train.runs.settings import settings

pytestmark = pytest.mark.application

SHAPE = configs.tiny_mars_adamw().model_spec.model.shape


@pytest.fixture(scope="module")
def one(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "one"
    return folder, *run(data, folder)


@pytest.fixture
def copied(one, tmp_path):
    return shutil.copytree(one[0], tmp_path / "copied")


def newest(folder: Path) -> Path:
    return folder / "checkpoint" / f"step-{STEPS}"


# ---- checksums -----------------------------------------------------------------------


def test_every_checkpoint_has_the_checksums_of_sha256sum(one):
    for step in (4, STEPS):
        folder = one[0] / "checkpoint" / f"step-{step}"
        done = subprocess.run(
            ["sha256sum", "--check", checksums.SUMS],
            cwd=folder, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout == ".metadata: OK\n__0_0.distcp: OK\n"


def flip(path: Path, at: int) -> None:
    """Flip one bit."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << at % 8]))


def called(main, *args):
    sys.argv = ["command", *map(str, args)]
    main()


def starting(data, folder, *options):
    args = [*TINY, "--dataloader.dataset-path", data, "--dump-folder", folder]
    config = parse(["--config", "tiny_mars_adamw", *map(str, [*args, *options])])
    resolve(config, 1)
    checkpoints.check_own(Path(config.dump_folder), config.model_spec.model.shape)


# each way to a checkpoint, from the folder of a damaged run
READERS = {
    "continue": lambda data, run, out: starting(data, run),
    "initial weights": lambda data, run, out: starting(
        data, out, "--checkpoint.initial-load-path", newest(run)
    ),
    "initial state": lambda data, run, out: starting(
        data, out, "--checkpoint.initial-load-path", newest(run),
        "--checkpoint.no-initial-load-model-only",
    ),
    "sample": lambda data, run, out: called(sample.main, "--run", run),
    "export": lambda data, run, out: called(export.main, "--run", run, "--out", out),
    "evaluate": lambda data, run, out: called(
        evaluate.main, "--run", run, "--loss", "--data", data
    ),
}  # fmt: skip
every_reader = pytest.mark.parametrize("reader", READERS)


@every_reader
def test_one_flipped_bit_is_noticed(data, copied, tmp_path, reader, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train"])
    path = newest(copied) / "__0_0.distcp"
    size = path.stat().st_size
    for at in (size // 3, size // 2, size - 5):
        flip(path, at)
        with pytest.raises(UserError, match=r"step-8/__0_0\.distcp with SHA-256") as e:
            READERS[reader](data, copied, tmp_path / "out")
        assert "\n" not in str(e.value)
        flip(path, at)
    assert not (tmp_path / "out").exists()


@every_reader
def test_a_checkpoint_that_lost_its_index_is_damaged(
    data, copied, tmp_path, reader, monkeypatch
):
    """As a copy without the files whose names begin with a dot."""
    monkeypatch.setattr(sys, "argv", ["train"])
    (newest(copied) / ".metadata").unlink()
    with pytest.raises(
        UserError, match=r"got \S+/step-8, which has lost its \.metadata \(SHA256SUMS"
    ) as error:
        READERS[reader](data, copied, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    goes_on = f"mv {newest(copied)} {newest(copied)}.damaged, then the same command"
    assert (goes_on in str(error.value)) == (reader == "continue")


def test_a_checkpoint_without_its_index_by_its_number(copied):
    path = newest(copied) / ".metadata"
    for make in (path.mkdir, lambda: os.mkfifo(path), lambda: path.symlink_to("/no")):
        path.rmdir() if path.is_dir() else path.unlink()
        make()
        with pytest.raises(UserError, match=r"step-8/\.metadata, which is a folder, a"):
            called(sample.main, "--run", copied, "--step", STEPS)
    path.unlink()
    with pytest.raises(UserError, match=r"lost its \.metadata \(SHA256SUMS"):
        called(sample.main, "--run", copied, "--step", STEPS)
    (newest(copied) / checksums.SUMS).unlink()
    with pytest.raises(UserError, match=r"no \.metadata: its saving was cut off"):
        called(sample.main, "--run", copied, "--step", STEPS)
    assert checkpoints.last_step(copied) == 4


class Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@every_reader
def test_a_checkpoint_of_a_stranger_runs_nothing(
    data,
    copied,
    tmp_path,
    reader,
    monkeypatch,
):
    monkeypatch.setattr(sys, "argv", ["train"])
    mark = tmp_path / "mark"
    (newest(copied) / ".metadata").write_bytes(pickle.dumps(Touch(mark)))
    checksums.write(newest(copied))  # a stranger can do that, too
    with pytest.raises(UserError, match=r"it names pathlib\.Path\.touch"):
        READERS[reader](data, copied, tmp_path / "out")
    assert not mark.exists()


def test_checksums_in_capitals_and_what_is_no_file(copied):
    path = newest(copied) / checksums.SUMS
    lines = [line.split("  ") for line in path.read_text().splitlines()]
    path.write_text("".join(f"{found.upper()}  {name}\n" for found, name in lines))
    checkpoints.check(newest(copied), SHAPE, whole=True)
    for make in (path.mkdir, lambda: os.mkfifo(path), lambda: path.symlink_to("/no")):
        path.rmdir() if path.is_dir() else path.unlink()
        make()
        with pytest.raises(UserError, match="step-8/SHA256SUMS, which is a folder, a "):
            checkpoints.check(newest(copied), SHAPE, whole=True)


def test_an_old_checkpoint_is_believed_and_that_is_said_once(copied, caplog):
    (newest(copied) / checksums.SUMS).unlink()
    for _ in range(3):
        checkpoints.check(newest(copied), SHAPE, whole=True)
    (said,) = [r.getMessage() for r in caplog.records if r.name == checksums.__name__]
    assert said.startswith(f"{newest(copied)} has no SHA256SUMS, so that damage would")


def test_continuing_names_what_is_damaged_and_how_to_go_on(data, copied):
    flip(newest(copied) / "__0_0.distcp", 10**6)
    with pytest.raises(UserError) as error:
        starting(data, copied)
    said = str(error.value)
    assert f"{newest(copied) / '__0_0.distcp'} with SHA-256" in said
    (aside,) = re.findall(
        r"Of this run step 4 is whole; to resume from it: (mv .*), then the same "
        r"command again$",
        said,
    )
    subprocess.run(aside, shell=True, check=True)
    starting(data, copied)
    assert checkpoints.last_step(copied) == 4
    (copied / "checkpoint/step-4/.metadata").write_bytes(b"x")
    with pytest.raises(UserError, match="no other step is whole; to start anew: mv "):
        starting(data, copied)


def test_one_run_at_a_time_has_the_folder(tmp_path):
    held = hold(tmp_path, "--dump-folder")
    with pytest.raises(UserError, match="in which another process is at work"):
        hold(tmp_path, "--dump-folder")
    os.close(held)
    os.close(hold(tmp_path, "--dump-folder"))


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


def many_steps(data, folder) -> list[str]:
    """The arguments of a run that takes longer than a test waits."""
    words = [
        "train", "--config", "tiny_mars_adamw", *TINY,
        "--lr-scheduler.total-steps", "5000", "--training.steps", "5000",
        "--checkpoint.interval", "10", "--validator.freq", "5000",
        "--dataloader.dataset-path", data, "--dump-folder", folder,
    ]  # fmt: skip
    return [*map(str, words)]


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
    [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM")],
)
def test_a_signal_ends_a_run_in_one_line(data, tmp_path, number, code, name):
    # the second one as of torchrun and of Slurm
    ended, _, stderr = forked(
        *many_steps(data, tmp_path / "run"), signals=("step 15/", [number, number], [])
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
def test_a_rank_that_died_is_named_once(data, tmp_path):
    died = ("step 15/", [signal.SIGKILL], [1])
    words = many_steps(data, tmp_path / "run")
    _, _, stderr = forked(*words, ranks=2, signals=died)
    (line,) = told_by(stderr)
    assert "error: rank 1 gone or stopped" in line
    assert re.search(r"the same command resumes after step \d+0\.", line)
    assert "train_step" not in stderr  # a traceback of ours
    log = (tmp_path / "run" / "rank0.log").read_text()
    assert "Traceback" in log


@pytest.mark.processes
def test_ranks_whose_launcher_was_killed_save_and_end(data, tmp_path):
    process = under_torchrun(data, tmp_path / "run")
    after_step(process, 15)
    left = workers(process.pid)
    process.kill()
    out, stderr = process.communicate(timeout=90)  # until all have closed the pipes
    (line,) = told_by(stderr)
    step, last = re.findall(r"at step (\d+): .* after step (\d+)", line)[0]
    assert step == last
    assert int(last) == checkpoints.last_step(tmp_path / "run")
    assert not any(map(runs, left.values()))


def test_what_was_found_is_printed_before_it_is_written(data, one, capsys):
    with pytest.raises(SystemExit) as ended:
        command(
            lambda: called(
                evaluate.main, "--run", one[0], "--loss", "--data", data,
                "--out", "/dev/full",
            )
        )  # fmt: skip
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert re.search(r"loss \d\.\d+ nats per byte, over", said.out)
    assert said.err.count("\n") == 1
    assert "expected space on the disk" in said.err


def test_a_loss_that_is_not_finite_names_a_checkpoint_and_the_rate(data, tmp_path):
    folder = tmp_path / "run"
    code, _, err = forked(
        "train", "--config", "tiny_mars_adamw", *TINY, "--training.steps", 8,
        "--optimizer.lr=1e25", "--training.max-norm=1e20", "--checkpoint.interval", 1,
        "--metrics.log-freq", 1, "--dataloader.dataset-path", data,
        "--dump-folder", folder,
    )  # fmt: skip
    *_, line = err.splitlines()
    assert code == ends.FAILED
    told = re.match(r"error: got a loss .* not finite after step (\d), at .*", line)
    assert told and " rate of 1e+25 (its peak is 1e+25)" in line
    good = folder / "checkpoint" / f"step-{int(told[1]) - 1}"
    assert f"of a finite loss is {good}: " in line and good.exists()
    assert line.endswith(f"(--checkpoint.initial-load-path {good})")
    log = (folder / "rank0.log").read_text()
    assert line in log and "Traceback" in log


def test_a_gpu_has_memory_and_flops_on_the_console():
    monitor = types.SimpleNamespace(
        device_name="NVIDIA H100",
        get_peak_stats=lambda: types.SimpleNamespace(max_reserved_gib=41.26),
    )
    metrics = types.SimpleNamespace(
        device_memory_monitor=monitor,
        has_quantization=False,
        ntokens_since_last_log=1000,
        num_flops_per_token=2e9,
        gpu_peak_flops=4e12,
        parallel_dims=types.SimpleNamespace(non_data_parallel_size=1),
    )
    assert Progress.of_device(metrics, 2.0) == "  41.3 GiB  MFU 25.0%"
    metrics.has_quantization = True
    assert Progress.of_device(metrics, 2.0) == "  41.3 GiB"
    monitor.device_name = "cpu"
    assert Progress.of_device(metrics, 2.0) == ""


def test_a_checkpoint_that_lost_its_file_is_not_resumed_from(copied, data):
    """As a run that ends says it."""
    file = newest(copied) / "__0_0.distcp"
    file.unlink()
    file.mkdir()
    again = [
        "train", "--config", "tiny_mars_adamw", *TINY, "--training.steps", STEPS,
        "--dataloader.dataset-path", data, "--dump-folder", copied,
    ]  # fmt: skip
    code, _, err = forked(*again)
    assert code == ends.UNUSABLE and "Of this run step 4 is whole" in err
    assert ends.goes_on(copied).startswith(f"the checkpoint of step {STEPS} has lost")
    newest(copied).rename(copied / "damaged")
    assert ends.goes_on(copied) == "the same command resumes after step 4"
    blocked = newest(copied) / "__0_0.distcp"
    blocked.mkdir(parents=True)
    code, _, err = forked(*again)
    assert code == ends.FAILED and "Is a directory" in err
    assert "once that is mended, the same command resumes after step 4" in err


def test_without_a_checkpoint_of_a_finite_loss_a_new_run_is_advised(one):
    assert "step-4: " in ends.restart(one[0], 7)
    assert "There is no checkpoint of a finite loss" in ends.restart(one[0], 4)


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


def test_an_export_to_a_full_disk_is_one_line(one, small_disk):
    (small_disk / "filled").write_bytes(bytes(23 << 20))
    code, _, stderr = forked(
        "train.export", "--run", one[0], "--out", small_disk / "hf"
    )
    assert code == 2
    assert stderr.count("\n") == 1
    assert "expected space on the disk: make some" in stderr
    assert [path.name for path in small_disk.iterdir()] == ["filled"]


# ---- ranks that do not share what they must ------------------------------------------

ON_ALL = dict(training__global_batch_size=24, validator__samples=24)


def ended_by(rank: int, world: int, cases: list) -> list[str]:
    """Why this rank ends in each of ``cases``, (data, folder, changes) by rank."""
    whys = []
    for place, folder, changes in (case.get(rank, case[0]) for case in cases):
        config = tiny(place, **ON_ALL | changes)
        config.dump_folder = str(folder)
        resolve(config, world)
        try:
            compare(config)
            whys.append("")
        except SharedError as error:
            whys.append(str(error))
    return whys


DIFFERENT = {
    "steps": (dict(training__steps=1300), "training.steps=1300 where rank 0 has 1400"),
    "interval": (
        dict(checkpoint__interval=7),
        "checkpoint.interval=7 where rank 0 has 200",
    ),
    "seed": (dict(debug__seed=3), "debug.seed=3 where rank 0 has 0"),
    "rule": (
        dict(optimizer__mars_type="lion"),
        "optimizer.mars_type='lion' where rank 0 has 'mars-adamw'",
    ),
    "how often it is shown": (
        dict(metrics__log_freq=3, validator__freq=9),
        "metrics.log_freq=3 where rank 0 has 10; validator.freq=9 where rank 0 has 200",
    ),
    "many": (
        dict(optimizer__lr=0.1, optimizer__eps=0.1, debug__seed=1, training__steps=200),
        "debug.seed=1 where rank 0 has 0; optimizer.eps=0.1 where rank 0 has 1e-08; "
        "optimizer.lr=0.1 where rank 0 has 0.006 and more",
    ),
}


@pytest.mark.processes
def test_ranks_that_differ_end_with_the_same_line(data, tmp_path):
    """Before the first step; the line names the rank, the value and what to do."""
    place, moved, other = tmp_path / "run", tmp_path / "moved", tmp_path / "other"
    for folder in (place, tmp_path / "elsewhere"):
        folder.mkdir()
    (tmp_path / "link").symlink_to(place)
    shutil.copytree(data, moved)
    text = [Path(shutil.__file__)]
    prepare.prepare("text", "bytes", other, files=text, val_fraction=0.2)
    usual = {0: (data, place, {})}
    cases = [usual | {2: (data, place, changes)} for changes, _ in DIFFERENT.values()]
    cases += [
        usual,
        # the same data and the same folder by other names, and what may differ
        usual | {1: (moved, tmp_path / "link", dict(profiler__enable_profiling=True))},
        usual | {1: (other, place, {})},
        usual | {r: (data, tmp_path / "elsewhere", {}) for r in (1, 2)},
    ]
    first, second, third = spawn(ended_by, 3, cases)
    assert first == second == third
    for (_, told), why in zip(DIFFERENT.values(), first[:-4], strict=True):
        assert why == (
            f"got on rank 2 {told}, expected the same on all ranks: start every rank "
            "with the same command and data"
        )
    same, alike, of_data, of_folder = first[-4:]
    assert same == alike == ""
    assert re.match(
        rf"got on rank 1 data\.train='\w{{59}} \({other}\) where rank 0 has "
        rf"'\w{{59}} \({data}\); data\.val=",
        of_data,
    )
    assert of_folder == (
        f"got --dump-folder {tmp_path / 'elsewhere'} on ranks 1, 2, where a file is "
        f"missing that rank 0 wrote into {place}, expected one folder: give all ranks "
        "the same --dump-folder, on a disk that all of them see"
    )
    assert not list(place.iterdir()) and not list((tmp_path / "elsewhere").iterdir())


def ended_together(rank: int, world: int) -> list[str]:
    def unusable_on(*ranks: int) -> None:
        if rank in ranks:
            raise UserError("got nothing, expected something")

    whys = []
    for ranks in ((), (1,), range(world)):
        try:
            together(lambda ranks=ranks: unusable_on(*ranks))
            whys.append("")
        except SharedError as error:
            whys.append(str(error))
    return whys


@pytest.mark.processes
def test_what_one_rank_cannot_use_ends_all_with_the_same_line():
    why = "got nothing, expected something"
    assert spawn(ended_together, 3) == 3 * [["", f"rank 1: {why}", why]]


@pytest.mark.processes
def test_ranks_started_by_hand_that_differ_end_at_once(data, tmp_path):
    """With a line from each; where torchrun has started them with one, of rank 0
    (test_a_rank_that_died_is_named_once).
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        by_hand = {"MASTER_PORT": str(free.getsockname()[1])}
    by_hand |= {"TORCHELASTIC_USE_AGENT_STORE": "False"}
    code, _, err = forked(
        "train", "--config", "tiny_mars_adamw", *TINY, "--training.steps", STEPS,
        "--dataloader.dataset-path", data, "--dump-folder", tmp_path / "run",
        "--debug.seed", "$RANK", ranks=2, together=False, **by_hand,
    )  # fmt: skip
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


@pytest.mark.parametrize("path", UNUSED)
def test_an_option_of_no_effect_is_refused(data, path):
    config = tiny(data)
    *sections, name = path.split(".")
    section = attrgetter(".".join(sections))(config)
    setattr(section, name, other_than(UNUSED[path]))
    with pytest.raises(UserError, match=re.escape(f"got {path}=")):
        resolve(config, 1)


FOLLOW = {
    "dataloader.vocab_size": 5,
    "dataloader.seed": 5,
    "validator.dataloader.vocab_size": 5,
    "validator.dataloader.seed": 5,
    "validator.last_step": 5,
    "metrics.total_steps": 5,
    "tokenizer.name": "gpt2",
}


@pytest.mark.parametrize("path", FOLLOW)
def test_an_option_that_follows_from_others_is_refused(data, path):
    config = tiny(data)
    *sections, name = path.split(".")
    setattr(attrgetter(".".join(sections))(config), name, FOLLOW[path])
    with pytest.raises(UserError, match=f"{name}={FOLLOW[path]}"):
        resolve(config, 1)


# options with an effect on how a run is executed or shown, not on what it computes
EFFECTIVE = {
    "hf_assets_path",
    "dump_folder",
    "debug.print_config",
    "debug.save_config_file",
    "debug.enable_structured_logging",
    "training.steps",
    "training.local_batch_size",
    "training.gc_freq",
    "training.gc_debug",
    "training.disable_cuda_graphs",
    "optimizer.compile",
    "validator.freq",
    "validator.samples",
    "validator.most_samples",
    "validator.enable",
    "metrics.log_freq",
    "metrics.enable_tensorboard",
    "metrics.disable_color_printing",
    "metrics.save_for_all_ranks",
    "metrics.enable_wandb",
    "checkpoint.interval",
    "checkpoint.initial_load_path",
    "checkpoint.initial_load_model_only",
    "checkpoint.keep_latest_k",
    "checkpoint.enable_first_step_checkpoint",
    "checkpoint.async_mode",
    "activation_checkpoint",
    "compile.enable",
    "compile.components",
    "compile.backend",
    "comm.init_timeout_seconds",
    "comm.train_timeout_seconds",
    "comm.trace_buf_size",
    "comm.save_traces_folder",
    "comm.save_traces_file_prefix",
    "parallelism.data_parallel_replicate_degree",
    "parallelism.data_parallel_shard_degree",
    "parallelism.fsdp_reshard_after_forward",
    "parallelism.spmd_backend",
    "dataloader.dataset_path",
    "validator.dataloader.dataset_path",
    "lr_scheduler.total_steps",
    "metrics.statistics_freq",
}
# of parallelism that is switched off
IDLE = {
    "parallelism.enable_sequence_parallel",
    "parallelism.module_fqns_per_model_part",
    "parallelism.context_parallel_load_balancer",
    "parallelism.context_parallel_ptrr_mask_key",
}


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
    known = {*UNUSED, *FOLLOW, *EFFECTIVE, *IDLE}
    every = set(flat(config.to_dict()))
    resolve(config, 1)
    pinned = settings(config).keys()
    unknown = {
        path
        for path in every - known
        if not path.startswith(
            ("profiler.", "model_spec.", "parallelism.pipeline_parallel_")
        )
        and not any(path == name or path.startswith(f"{name}.") for name in pinned)
    }
    assert unknown == set()
    assert {path for path in known if path not in every} == set()
