"""python -m train, from the outside: processes, resumes, exact mode, errors."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import configs
from tests.application.runs import (
    BATCH,
    ROOT,
    SEQ,
    STEPS,
    TINY,
    tiny,
    train_tiny,
)
from tests.forks import forked
from train import prepare
from train.data.batches import Batches
from train.data.tokens import open_tokens
from train.engine.launch import parse, title
from train.engine.progress import METRICS
from train.engine.resolve import (
    FOLLOW,
    UNUSED,
    resolve,
)
from train.errors import UserError
from train.errors import command as in_one_line
from train.evaluate import __main__ as evaluate
from train.runs import settings as run_settings
from train.runs import summary
from train.runs.checkpoints import load_model
from train.runs.settings import claim, settings
from train.runs.summary import read_scalars

pytestmark = pytest.mark.application


@pytest.fixture(scope="session")
def exact(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "exact"
    return folder, *train_tiny(data, folder, *CORRECTIONS["exact"])


# gamma falls with the rate, so that continuing has to find it again
CORRECTIONS = {
    "one": [],
    "exact": ["--optimizer.correction=exact", "--optimizer.gamma-decay=with_lr"],
}
every_correction = pytest.mark.parametrize("name", CORRECTIONS)


def test_a_run_shows_everything(one):
    folder, losses, held_out, out = one
    assert list(losses) == list(range(1, STEPS + 1))
    assert list(held_out) == [1, 4, 8]
    assert float(losses[STEPS]) < float(losses[1]) - 0.5
    assert f"starting a new run in {folder} (1 process): {STEPS} steps" in out
    # after the second log, before which steps compile
    timed = re.findall(r"step (\d)/8 .* tokens/s  ETA 0:00:0\d", out)
    assert timed == ["3", "4", "5", "6", "7", "8"]
    assert "nats per byte of held-out text" in out
    assert "per token" not in out  # a token is a byte
    log = (folder / "rank0.log").read_text()
    assert all(line in log for line in out.splitlines() if line)
    assert (folder / "loss.png").stat().st_size > 10_000
    assert (folder / "sample.txt").read_text() in out
    assert list((folder / "tb").rglob("events.out.tfevents.*"))
    assert (folder / "checkpoint" / f"step-{STEPS}" / ".metadata").exists()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["validation_loss"] == pytest.approx(float(held_out[8]), abs=1e-5)


def test_tensorboard_has_one_run_with_names(one):
    folder, *_ = one
    assert len(list((folder / "tb").glob("events.out.tfevents.*"))) == 1
    scalars = read_scalars(folder / "tb")
    rates = {tag: row[2] for tag, row in scalars.items() if tag.startswith("lr/")}
    half = dict(embeddings=3e-3, layer_norms=1.5e-3, matrices=3e-3)  # of the warm-up
    assert rates == {f"lr/{n}": pytest.approx(lr) for n, lr in half.items()}
    assert "mfu(%)" not in scalars


def rows_of(folder):
    """The JSON lines of a run."""
    return [json.loads(row) for row in (folder / METRICS).read_text().splitlines()]


def test_json_lines_are_what_tensorboard_has(one):
    folder, *_ = one
    found = {}
    for row in rows_of(folder):
        step = row.pop("step")
        for tag, value in row.items():
            assert step not in found.setdefault(tag, {})
            found[tag][step] = pytest.approx(value, rel=1e-6)
    assert read_scalars(folder / "tb") == found
    # and each is described
    page = (ROOT / "docs/training.md").read_text()
    assert all(f"`{tag}`" in page for tag in found)


def test_statistics_of_each_parameter_are_in_tensorboard(data, one, tmp_path):
    """Every second step, beside the losses of a run without them."""
    _, losses, *_ = one
    folder = tmp_path / "run"
    found, *_ = train_tiny(data, folder, "--metrics.statistics-freq", 2, steps=4)
    assert found == {step: loss for step, loss in losses.items() if step <= 4}
    scalars = read_scalars(folder / "tb")
    norms = {tag: row for tag, row in scalars.items() if tag.startswith("grad_norm/")}
    assert len(norms) > 10
    assert all([*row] == [2, 4] for row in norms.values())
    assert {*scalars} >= {tag.replace("grad_norm", "clip", 1) for tag in norms}
    total = sum(row[2] ** 2 for tag, row in scalars.items() if "grad_norm/" in tag)
    assert total**0.5 == pytest.approx(scalars["grad_norm"][2], rel=1e-4)


def test_exact_is_not_approximate(one, exact):
    assert one[1][1] == exact[1][1]
    assert one[1][STEPS] != exact[1][STEPS]


def test_tokens_are_counted_once(one, exact):
    """The second pass of exact MARS sees the next batch, which is counted later."""
    for folder, *_ in (one, exact):
        seen = read_scalars(folder / "tb")["n_tokens_seen"]
        assert seen == {t: t * BATCH * SEQ for t in range(1, STEPS + 1)}


def test_the_saved_model_has_the_loss_that_validation_printed(one, data):
    folder, _, held_out, _ = one
    model = load_model(folder, configs.tiny_mars_adamw().model_spec.model.shape)
    tokens, _ = open_tokens(data, "val", vocab_size=257)
    kw = dict(rank=0, world=1, local_batch=BATCH, seq_len=SEQ, vocab_size=257)
    samples = int(TINY[TINY.index("--validator.samples") + 1])
    stream = Batches(tokens, **kw, spread=samples)
    with torch.no_grad():
        losses = [
            F.cross_entropy(model(x).flatten(0, 1), y.flatten()).item()
            for x, y in (stream.next() for _ in range(samples // BATCH))
        ]
    mean = sum(losses) / len(losses)
    assert float(held_out[STEPS]) == pytest.approx(mean, abs=2e-5)


@every_correction
def test_stopped_and_resumed_on_another_number_of_processes(
    data, request, tmp_path, name
):
    _, losses, held_out, _ = request.getfixturevalue(name)
    options = CORRECTIONS[name]
    first, val_first, _ = train_tiny(data, tmp_path / "r", *options, steps=4, ranks=2)
    rest, val_rest, out = train_tiny(data, tmp_path / "r", *options)
    assert f"resuming the run in {tmp_path / 'r'} (1 process) after step 4 of 8" in out
    one_run = EventAccumulator(str(tmp_path / "r" / "tb")).Reload()
    logged = [event.step for event in one_run.Scalars(summary.TRAIN)]
    assert logged == list(range(1, STEPS + 1))
    rows = [row["step"] for row in rows_of(tmp_path / "r") if summary.TRAIN in row]
    assert rows == logged
    assert {**first, **rest} == losses
    assert {**val_first, **val_rest} == held_out
    assert list(rest) == [5, 6, 7, 8]


def test_a_run_is_trained_longer_as_its_message_says(data, one, tmp_path):
    _, losses, _, _ = one
    folder = shutil.copytree(one[0], tmp_path / "longer")
    rest, _, _ = train_tiny(data, folder, steps=STEPS + 2)
    assert list(rest) == [STEPS + 1, STEPS + 2]
    rates = read_scalars(folder / "tb")["lr/matrices"]
    assert rates[STEPS + 2] == pytest.approx(rates[STEPS + 1])


def test_evaluate_finds_the_data_of_a_run(data, one, tmp_path, monkeypatch, capsys):
    def loss(folder):
        monkeypatch.setattr(sys, "argv", ["", "--run", str(folder), "--loss"])
        evaluate.main()
        return json.loads((folder / "evaluation.json").read_text())["loss"]

    folder = shutil.copytree(one[0], tmp_path / "run")
    written = {"model": str(folder), "step": STEPS, "tasks": {"results": {"a": {}}}}
    (folder / "evaluation.json").write_text(json.dumps(written))
    assert loss(folder)["data"] == str(data)
    kept = json.loads((folder / "evaluation.json").read_text())
    assert {key: kept[key] for key in written} == written  # of the same step
    settings = json.loads((folder / "settings.json").read_text())
    said = json.dumps(settings | {"data.val": "0" * 64})
    (folder / "settings.json").write_text(said)
    with pytest.raises(UserError, match="held-out text has changed since"):
        loss(folder)
    settings.pop("held_out_folder")  # as earlier releases wrote them
    (folder / "settings.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match="does not say where its data lies"):
        loss(folder)


def test_a_second_call_says_that_the_run_is_complete(data, one):
    folder, *_ = one
    stamp = (folder / "checkpoint" / "step-8" / ".metadata").stat().st_mtime_ns
    logged = sorted((folder / "tb").rglob("*"))
    losses, _, out = train_tiny(data, folder)
    assert losses == {}
    assert sorted((folder / "tb").rglob("*")) == logged
    assert "is complete at step 8: nothing to train" in out
    assert (folder / "checkpoint/step-8/.metadata").stat().st_mtime_ns == stamp


def test_the_picture_has_adamw_s_curve_of_the_same_model_and_data(
    tmp_path, monkeypatch
):
    stored = json.loads(summary.ADAMW.read_text())
    data = {split: stored["settings"][f"data.{split}"] for split in ("train", "val")}
    monkeypatch.setattr(run_settings, "data_checksums", lambda config: data)
    own = settings(configs.tiny_moonlight())
    (tmp_path / "settings.json").write_text(json.dumps(own))
    losses = summary.adamw(tmp_path)
    assert [*losses][:4] == [1, 200, 400, 600]
    assert [*losses.values()] == sorted(losses.values(), reverse=True)
    for key in stored["settings"]:
        (tmp_path / "settings.json").write_text(json.dumps(own | {key: "other"}))
        assert summary.adamw(tmp_path) == {}


def test_the_title_says_what_was_trained():
    assert title(configs.tiny_moonlight()) == (
        "tiny_moonlight: GPT-2 of 0.837M parameters, 1,400 steps\n"
        "moonlight, no correction, peak learning rate 0.013"
    )
    assert "exact correction" in title(configs.tiny_mars_adamw_exact())


def test_sample_command(one):
    folder, *_ = one
    args = ["train.sample", "--run", folder, "--tokens", 20, "--prompt", "import "]
    code, out, err = forked(*args)
    assert (code, err) == (0, "")
    assert out.startswith("import ")


# ---- errors: one line, exit code 2 ---------------------------------------------------

COMMANDS = {
    "unknown config": (
        ["train", "--config", "tiny"],
        "got --config tiny, expected one",
    ),
    "negative lr": (
        ["train", "--config", "tiny_mars_adamw", "--optimizer.lr", "-1"],
        "got lr=-1.0, expected a finite number > 0",
    ),
    "no data": (
        ["train", "--config", "small_mars_adamw", "--dataloader.dataset-path", "/none"],
        "got no /none/meta.json",
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_fail_in_one_line(name):
    args, message = COMMANDS[name]
    code, _, err = forked(*args)
    told = [line for line in err.splitlines() if line.startswith("error: ")]
    told = [line for line in told if "got no data/python" not in line]  # nor need it
    assert code == 2, err
    assert len(told) == 1, err
    assert message in told[0]
    assert "Traceback" not in err


def test_help_names_the_recipes():
    code, out, _ = forked("train", "--help")
    assert code == 0
    listed = re.findall(r"^  (\w+)  +\S", out, re.MULTILINE)
    assert listed == configs.__all__


def test_help_of_a_recipe_shows_what_the_application_takes(capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["--config", "tiny_mars_adamw", "--help"])
    out = capsys.readouterr().out
    assert not ended.value.code
    shown = set(re.findall(r"^  --([a-z0-9.-]+) ", out, re.MULTILINE))
    for path in {*UNUSED, *FOLLOW}:
        assert path.replace("_", "-") not in shown
    for path in ("optimizer.lr", "training.steps", "dump-folder", "validator.samples"):
        assert path in shown
    assert "\n  --optimizer.lr 0.006 " in out
    assert max(map(len, out.splitlines())) <= 88
    assert out.count("\n") < 240


MISTYPED = {
    "--training.step=5": "--training.steps",
    "--lr": "--optimizer.lr",
    "--optimizer_lr": "--optimizer.lr",
    "--seed": "--debug.seed",
}


@pytest.mark.parametrize("typed", MISTYPED)
def test_an_option_that_there_is_not_gets_the_nearest(typed):
    with pytest.raises(UserError, match=rf"did you mean .*{MISTYPED[typed]}\b") as told:
        parse(["--config", "tiny_adamw", typed, "3"])
    assert str(told.value).startswith(f"got {typed.partition('=')[0]}, which is no")


def test_a_recipe_that_there_is_not_gets_the_nearest():
    with pytest.raises(UserError, match="such as tiny_adamw") as told:
        parse(["--config", "tiny_admw"])
    assert "xl_" not in str(told.value)


def test_options_of_activation_checkpointing_are_known():
    after = ["activation-checkpoint:full", "--activation-checkpoint.preserve-rng-state"]
    config = parse(["--config", "tiny_adamw", "--training.steps", "200", *after])
    assert config.activation_checkpoint.preserve_rng_state
    assert config.training.steps == 200


def test_activation_checkpointing_is_chosen_at_the_end():
    words = ["activation-checkpoint:full", "--training.steps", "200"]
    with pytest.raises(UserError, match="got --training.steps after activation-.* end"):
        parse(["--config", "tiny_adamw", *words])


def test_under_torchrun_one_rank_says_it(data):
    args = ["train", "--config", "tiny_mars_adamw", "--optimizer.lr", "-1"]
    code, _, err = forked(*args, ranks=2)
    assert code != 0
    assert err.count("error: got lr=-1.0") == 1


SETTINGS = {
    "sequence too long": (dict(training__seq_len=129), "got training.seq_len=129"),
    "ascent": (dict(training__max_norm=-1.0), "got training.max_norm=-1.0"),
    "batch that does not divide": (
        dict(training__global_batch_size=12),
        "got training.global_batch_size=12 with 2 ranks of local_batch_size=8",
    ),
    "a schedule of no steps": (
        dict(lr_scheduler__total_steps=0),
        "got lr_scheduler.total_steps=0, expected 1 or more",
    ),
    "a decay longer than the run": (
        dict(lr_scheduler__kind="wsd", lr_scheduler__decay_ratio=0.95),
        "got lr_scheduler.decay_ratio=0.95, expected .* at most 0.9286",
    ),
    "warm-up beyond the end": (
        dict(lr_scheduler__warmup_steps=1400),
        "got lr_scheduler.warmup_steps=1400",
    ),
    "unknown mars_type": (dict(optimizer__mars_type="mars"), "got mars_type='mars'"),
    "master weights of a model in float32": (
        dict(optimizer__master_weight_bits=32),
        "got optimizer.master_weight_bits=32 with training.dtype=float32",
    ),
    "master weights": (
        dict(optimizer__master_weight_bits=16, training__dtype="bfloat16"),
        "got master_weight_bits=16",
    ),
    "exact baseline": (
        dict(optimizer__mars_type="muon", optimizer__correction="exact"),
        "got correction='exact' with mars_type='muon'",
    ),
    "validation samples": (
        dict(validator__samples=17),
        "got validator.samples=17 with 2 ranks",
    ),
    "more than held out": (dict(validator__samples=16 * 10**6), "windows of 32 tokens"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_checked_before_processes_meet(name, data):
    changes, message = SETTINGS[name]
    with pytest.raises(UserError, match=message):
        resolve(tiny(data, **changes), world=2)


def test_all_mistakes_are_told_at_once(data, capsys, monkeypatch):
    wrong = dict(
        lr_scheduler__warmup_steps=1400,
        validator__samples=10**6,
        optimizer__mars_type="mars",
        checkpoint__load_step=2,
        metrics__log_freq=0,
    )
    with pytest.raises(UserError) as told:
        resolve(tiny(data, **wrong), world=2)
    assert [message.split("=")[0] for message in told.value.args] == [
        "got metrics.log_freq",
        "got checkpoint.load_step",
        "got lr_scheduler.warmup_steps",
        "got mars_type",
        "got validator.samples",
    ]

    def main():
        raise told.value

    with pytest.raises(SystemExit) as ended:
        in_one_line(main)
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"error: {message}" for message in told.value.args]


def test_a_validation_has_as_many_samples_as_there_are(data, caplog):
    """Up to the recipe's number, the same for any number of ranks."""
    tokens, _ = open_tokens(data, "val", vocab_size=257)
    windows = (len(tokens) - 1) // SEQ
    for world in (1, 2):
        config = tiny(data, validator__samples=None)
        resolve(config, world)
        assert config.validator.samples == windows // 16 * 16 < 1024
    assert f"holds out {windows}" in caplog.text
    config = tiny(data, validator__samples=None, validator__most_samples=32)
    resolve(config, world=2)
    assert config.validator.samples == 32


def test_a_folder_belongs_to_one_run(data, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    folder = tmp_path / "run"

    def claimed(where=data, **changes):
        config = tiny(where, **changes)
        config.dump_folder = str(folder)
        resolve(config, world=1)
        claim(config)

    claimed(optimizer__lr=0.1)
    claimed()  # nothing was trained yet: the folder is free
    (folder / "checkpoint" / "step-4").mkdir(parents=True)
    (folder / "checkpoint" / "step-4" / ".metadata").touch()
    claimed()
    # how it is executed may change, and how long it is shown
    claimed(training__local_batch_size=4, metrics__log_freq=1, validator__freq=7)
    shutil.copytree(data, tmp_path / "moved")
    claimed(tmp_path / "moved")  # the same data elsewhere
    with pytest.raises(UserError, match=r"got optimizer.lr=0.1 where it has 0.006"):
        claimed(optimizer__lr=0.1)
    longer = "--training.steps 1500 --lr-scheduler.total-steps 1400"
    with pytest.raises(UserError, match=rf"steps=1500 where it has 1400.*{longer}$"):
        claimed(training__steps=1500)
    claimed(training__steps=1500, lr_scheduler__total_steps=1400)
    other = tmp_path / "other"
    prepare.prepare(
        "text", "bytes", other, files=[Path(shutil.__file__)], val_fraction=0.2
    )
    with pytest.raises(UserError, match=r"got data\.train="):
        claimed(other)
    elsewhere = replace(tiny(data).validator.dataloader, dataset_path=str(other))
    with pytest.raises(UserError, match=r"got data\.val="):
        claimed(validator__dataloader=elsewhere)
    (folder / "settings.json").unlink()
    with pytest.raises(UserError, match=r"checkpoints but no settings\.json"):
        claimed()
    folder = tmp_path / "file"
    folder.touch()
    with pytest.raises(UserError, match="which is a file"):
        claimed()


def test_every_setting_of_a_run_is_recognised(data):
    """Only what is listed as execution may differ; new fields of torchtitan count."""
    config = tiny(data)
    resolve(config, world=1)
    found = settings(config)
    for name in ("optimizer.gamma", "training.global_batch_size", "debug.seed"):
        assert name in found
    assert "dataloader.dataset_path" not in found
