"""The gradient as a sum over micro-steps, on any ranks; test_parity.py has the MARS
scripts' loop.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.forks import forked
from tests.trainers import losses, train_all
from train import prepare
from train.engine.titan import CompileConfig
from train.engine.titan_model import SummedLoss

SUMMED, STEPS, SEQ, BATCH, MICRO = 2, 4, 32, 8, 4
MAX_NORM = 6.0  # above the norm of the first mean gradients, below that of their sums
SHARED = [
    "--config", "tiny_mars_adamw",
    "--training.steps", STEPS,
    "--training.seq-len", SEQ,
    "--training.global-batch-size", BATCH,
    "--training.local-batch-size", MICRO,
    "--training.max-norm", MAX_NORM,
    "--lr-scheduler.warmup-steps", 2,
    "--metrics.log-freq", 1,
    "--validator.samples", 16,
]  # fmt: skip
SUM = ["--loss.num-summed", SUMMED]
JOBS = {
    "mean": [],
    "sum": SUM,
    # as the sum is SUMMED times as large, so are the thresholds that it meets
    "mean, thresholds divided": [
        "--training.max-norm", MAX_NORM / SUMMED,
        "--optimizer.clip", 1 / SUMMED,
        "--optimizer.eps", 1e-8 / SUMMED,
    ],
    "sum, whole batch at once": [*SUM, "--training.local-batch-size", BATCH],
}  # fmt: skip


@pytest.mark.parametrize("num_summed", [1, 3])
def test_value_stays_the_mean_and_gradient_is_the_sum(num_summed):
    config = SummedLoss.Config(num_summed=num_summed)
    loss_fn = config.build(compile_config=CompileConfig(enable=False))
    logits = torch.randn(2, 5, 7, requires_grad=True)
    labels = torch.randint(7, (2, 5))
    want = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    (mean,) = torch.autograd.grad(want, logits)
    loss, _ = loss_fn(logits, labels, torch.tensor(10))
    assert loss.item() == pytest.approx(want.item())
    loss.backward()
    torch.testing.assert_close(logits.grad, num_summed * mean)
    with torch.no_grad():  # validation
        assert loss_fn(logits, labels, torch.tensor(10))[0].item() == pytest.approx(
            want.item()
        )


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    out = tmp_path_factory.mktemp("text") / "data"
    sources = [Path(json.__file__), Path(logging.__file__)]
    prepare.prepare("text", "bytes", out, files=sources, val_fraction=0.1)
    return out


@pytest.fixture(scope="module")
def printed(data, tmp_path_factory):
    path = ["--dataloader.dataset-path", data]
    jobs = {label: [*SHARED, *path, *options] for label, options in JOBS.items()}
    return train_all(jobs, tmp_path_factory.mktemp("runs"))


def shown(printed, label: str) -> list[float]:
    found = losses(printed[label])
    assert sorted(found) == list(range(1, STEPS + 1)), printed[label]
    return list(found.values())


@pytest.mark.application
def test_the_sum_is_the_mean_with_thresholds_divided(printed):
    want = shown(printed, "mean, thresholds divided")
    assert shown(printed, "sum") == pytest.approx(want, abs=2e-5)
    assert shown(printed, "mean") != pytest.approx(want, abs=1e-3)


@pytest.mark.application
def test_the_sum_belongs_to_the_recipe_not_to_the_micro_steps_here(printed):
    want = shown(printed, "sum, whole batch at once")
    assert shown(printed, "sum") == pytest.approx(want, abs=2e-5)


@pytest.mark.application
@pytest.mark.processes
def test_the_sum_is_the_same_on_two_processes(printed, data, tmp_path):
    code, out, err = forked(
        "train", *SHARED, *SUM, "--dataloader.dataset-path", data,
        "--dump-folder", tmp_path / "two", ranks=2,
    )  # fmt: skip
    assert code == 0, out + err
    assert list(losses(out).values()) == pytest.approx(shown(printed, "sum"), abs=2e-5)
