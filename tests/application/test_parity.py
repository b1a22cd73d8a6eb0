"""The authors' recipe, 200 steps: the application's loss curve is that of a plain loop
whose optimizer is the papers' algorithm boxes, written out in NumPy.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import configs
from tests.conformance.oracle import Oracle
from tests.trainers import losses, train_all
from train import prepare
from train.data.batches import Batches
from train.data.tokens import open_tokens
from train.engine.schedule import cosine
from train.gpt2 import GPT2

pytestmark = pytest.mark.application

STEPS, SEQ, BATCH, MICRO_STEPS = 200, 16, 8, 4
# MARS-AdamW of GPT-2 small (AGI-Arena/MARS, config/train_gpt2_small_mars.py): the
# gradient is a sum over 4 micro-steps, clipped at 1.0; embeddings do not decay. These
# are its first 200 steps of 100,000, the first tenth of the warm-up.
LR, LR_1D, MIN_LR, WD, WD_1D = 6e-3, 3e-3, 3e-5, 0.01, 0.1
WARMUP, TOTAL = 2000, 100_000


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    out = tmp_path_factory.mktemp("text") / "data"
    files = [Path(module.__file__) for module in (json, re, configs)]
    prepare.prepare("text", "bytes", out, files=files, val_fraction=0.1)
    return out


SHAPE = dict(num_layers=1, num_heads=2, width=32)
OPTIONS = [
    "--config", "tiny_mars_adamw",
    "--optimizer.lr", LR,
    "--optimizer.lr-1d", LR_1D,
    "--optimizer.weight-decay", WD,
    "--optimizer.weight-decay-1d", WD_1D,
    "--lr-scheduler.min-lr-factor", MIN_LR / LR,
    "--lr-scheduler.warmup-steps", WARMUP,
    "--lr-scheduler.total-steps", TOTAL,
    "--loss.num-summed", MICRO_STEPS,
    "--training.seq-len", SEQ,
    "--training.global-batch-size", BATCH,
    "--training.local-batch-size", BATCH // MICRO_STEPS,
    "--training.steps", STEPS,
    "--metrics.log-freq", 1,
    "--validator.freq", STEPS,
    "--validator.samples", 8,
    "--checkpoint.interval", STEPS,
]  # fmt: skip


@pytest.fixture(scope="module")
def printed(data, tmp_path_factory):
    """{mode: what the application prints}, with 4 micro-batches a step."""
    options = [*OPTIONS, "--dataloader.dataset-path", data]
    jobs = {"approximate": options, "exact": [*options, "--optimizer.correction=exact"]}
    return train_all(jobs, tmp_path_factory.mktemp("runs"), **SHAPE)


def plain_loop(data, is_exact):
    """The same by the oracle, the whole batch at once."""
    shape = configs.tiny_mars_adamw().model_spec.model.shape
    model = GPT2(dataclasses.replace(shape, **SHAPE))
    model.init_weights(seed=0)
    params = dict(model.named_parameters())
    oracles = {}
    for name, p in params.items():
        x = p.detach().numpy()
        if p.ndim == 2:
            decay = 0.0 if name.startswith(("wte", "wpe")) else WD
            oracles[name] = Oracle(x, "mars-adamw", wd=decay)
        else:
            oracles[name] = Oracle(x, "adamw", beta1=0.9, beta2=0.95, wd=WD_1D)
    tokens, _ = open_tokens(data, "train", vocab_size=257)
    stream = Batches(
        tokens, rank=0, world=1, local_batch=BATCH, seq_len=SEQ, vocab_size=257
    )

    def gradient(batch):
        """Loss, and the summed gradient under the global clip."""
        inputs, labels = batch
        loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
        grads = torch.autograd.grad(MICRO_STEPS * loss, list(params.values()))
        norm = sum(g.double().square().sum() for g in grads).sqrt()
        a = min(1.0, 1.0 / (float(norm) + 1e-6))
        clipped = {n: a * g.numpy() for n, g in zip(params, grads, strict=True)}
        return loss.item(), clipped

    curve, batch = {}, stream.next()
    h = {name: 0 * p.detach().numpy() for name, p in params.items()}
    for t in range(STEPS):
        following = stream.next()
        ahead = gradient(following)[1] if is_exact else None
        curve[t + 1], g = gradient(batch)
        factor = cosine(t, warmup=WARMUP, total=TOTAL, floor=MIN_LR / LR)
        for name, p in params.items():
            rate = factor * (LR if p.ndim == 2 else LR_1D)
            x = oracles[name].step(g[name], rate, h[name] if is_exact else None)
            p.data.copy_(torch.from_numpy(x))
        batch, h = following, ahead
    return curve


@pytest.mark.parametrize("mode", ["approximate", "exact"])
def test_200_steps_of_the_authors_recipe(data, printed, mode):
    found = losses(printed[mode])
    assert list(found) == list(range(1, STEPS + 1)), printed[mode]
    for step, loss in plain_loop(data, mode == "exact").items():
        assert found[step] == pytest.approx(loss, abs=1e-4), f"step {step}"
    assert found[STEPS] < 0.8 * found[1]
