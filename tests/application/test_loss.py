"""The gradient as a sum over micro-steps: the MARS scripts' loop, on any ranks."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import configs
from marsopt import MARS
from tests.forks import forked
from tests.trainers import losses, train_all
from train import prepare
from train.data.batches import Batches
from train.data.tokens import open_tokens
from train.engine.schedule import cosine
from train.engine.titan import CompileConfig
from train.engine.titan_model import SummedLoss
from train.gpt2 import GPT2

SUMMED, STEPS, SEQ, BATCH, MICRO = 2, 6, 32, 8, 4
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
    "exact sum": [*SUM, "--optimizer.correction=exact"],
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


def the_authors_loop(data, is_exact: bool) -> list[float]:
    """loss.backward() of each micro-batch, then the clip: nothing is divided by the
    number of micro-batches (MARS/train_mars.py).
    """
    config = configs.tiny_mars_adamw()
    model = GPT2(config.model_spec.model.shape)
    model.init_weights(seed=0)
    named = dict(model.named_parameters())
    embeddings = [named.pop("wte.weight"), named.pop("wpe.weight")]
    optimizer = MARS(
        [
            {"params": list(named.values())},
            {"params": embeddings, "weight_decay": 0.0},
        ],
        lr=6e-3,
        lr_1d=3e-3,
        weight_decay=0.01,
        is_approx=not is_exact,
        compile=False,
    )
    tokens, _ = open_tokens(data, "train", vocab_size=257)
    kw = dict(rank=0, world=1, local_batch=BATCH, seq_len=SEQ, vocab_size=257)
    stream = Batches(tokens, **kw)
    batches = [stream.next() for _ in range(STEPS + 1)]

    def gradient(batch):
        optimizer.zero_grad()
        means = []
        for inputs, labels in zip(*(part.split(MICRO) for part in batch), strict=True):
            loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
            loss.backward()
            means.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        return sum(means) / len(means)

    trained = []
    for t in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 6e-3 * cosine(t, warmup=2, total=STEPS, floor=0.1)
        if is_exact:
            gradient(batches[t + 1])
            optimizer.update_previous_grad()
        trained.append(gradient(batches[t]))
        optimizer.step()
        optimizer.update_last_grad()
    return trained


@pytest.mark.application
@pytest.mark.parametrize("is_exact", [False, True], ids=["approximate", "exact"])
def test_the_sum_is_the_authors_loop(printed, data, is_exact):
    got = shown(printed, "exact sum" if is_exact else "sum")
    assert got == pytest.approx(the_authors_loop(data, is_exact), abs=2e-5)


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
