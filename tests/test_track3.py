"""The script for the optimizer track of modded-nanogpt: a run in miniature, and where
its gradients are taken.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from examples import track3
from tests.processes import spawn

SCRIPT = Path(__file__).parent.parent / "examples" / "track3.py"


def read_log(path: Path) -> tuple[list[float], str]:
    """The validation losses, and the checksum of the weights."""
    text = path.read_text()
    losses = re.findall(r"^step:\d+/\d+ val_loss:([\d.]+) train_time:", text, re.M)
    return [float(loss) for loss in losses], re.search(r"sha256:(\w{64})$", text, re.M)[
        1
    ]


def test_a_miniature_learns_and_its_log_begins_with_the_script(tmp_path):
    command = [sys.executable, SCRIPT, "--miniature", tmp_path, "--steps", "40"]
    done = subprocess.run(
        [*map(str, command), "--gamma", "0.05", "--two-averages"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    log = Path(re.search(r"^/.*\.txt$", done.stdout, re.M)[0])
    assert log.read_text().startswith(SCRIPT.read_text() + "=" * 100)
    losses, _ = read_log(log)
    assert losses[0] == pytest.approx(np.log(256), abs=1e-4)
    assert losses[-1] < 0.65 * losses[0]


def train_on(rank: int, world: int, folder: Path, steps: int, *options: str) -> Path:
    """The log of a miniature on ranks that are there already."""
    log = track3.Log(folder)
    sizes = replace(track3.MINIATURE, steps=steps)
    track3.train(folder, sizes, track3.arguments(options), log)
    return log.path


@pytest.mark.processes
def test_gamma_0_is_the_baseline_and_ranks_change_nothing(tmp_path):
    """Bit for bit, though 0 goes through everything that another gamma does. Of several
    ranks sums round otherwise, in bfloat16.
    """
    track3.write_shards(tmp_path)
    (baseline,) = spawn(train_on, 1, tmp_path, 24)
    (zero,) = spawn(train_on, 1, tmp_path, 24, "--gamma", "0")
    assert read_log(zero) == read_log(baseline)

    (ahead,) = spawn(train_on, 1, tmp_path, 24, "--gamma", "0.05")
    losses, weights = read_log(ahead)
    assert weights != read_log(baseline)[1]
    path, _ = spawn(train_on, 2, tmp_path, 24, "--gamma", "0.05")
    assert read_log(path)[0] == pytest.approx(losses, rel=0.02)


@pytest.mark.processes
def test_what_is_validated_is_x(tmp_path):
    """The first gradient is taken at x whatever the gamma, so that x after one step is
    the baseline's; the parameters are at y by then.
    """
    track3.write_shards(tmp_path)
    (baseline,) = spawn(train_on, 1, tmp_path, 1)
    (ahead,) = spawn(train_on, 1, tmp_path, 1, "--gamma", "0.5")
    assert read_log(ahead) == read_log(baseline)


# ---- where gradients are taken -------------------------------------------------------


class Quadratic:
    """<w - c, A (w - c) B> / 2 of a matrix in float64, A and B positive definite."""

    def __init__(self):
        draw = torch.Generator().manual_seed(1)
        a, b, self.c, start = (
            torch.randn(*shape, dtype=torch.float64, generator=draw)
            for shape in ((6, 6), (4, 4), (6, 4), (6, 4))
        )
        self.a, self.b = a @ a.T / 6, b @ b.T / 4
        self.w = torch.nn.Parameter(start)

    def grad(self, w: torch.Tensor) -> torch.Tensor:
        return self.a @ (w - self.c) @ self.b


STEPS, SWITCH = 60, 25


def lags(optimizer, quadratic, point, momentum_of, forgets) -> list[float]:
    """Of each step, how far the momentum is from the gradient at x, but for what it has
    not forgotten yet of its start from 0: ``forgets(step)`` of the first gradient.
    """
    w, found = quadratic.w, []
    first = quadratic.grad(w.detach())
    lookahead = track3.Lookahead([([w], point)], from_x=True)
    for step in range(STEPS):
        w.grad = quadratic.grad(w.detach())
        lookahead.exchange()
        expected = quadratic.grad(w.detach()) - forgets(step) * first
        lookahead.exchange()
        track3.take_step([optimizer], lookahead, step, STEPS)
        error = momentum_of(optimizer.state[w], step) - expected
        found.append(float(error.norm() / first.norm()))
    return found


def lags_of_muon(rank: int, world: int, gamma: float, two_from: int | None):
    quadratic = Quadratic()
    muon = track3.Muon([quadratic.w], 0.05, 0.05, two_from=two_from)
    memory = torch.tensor([1 - track3.WEIGHT, track3.WEIGHT], dtype=torch.float64)
    decays = torch.tensor([track3.FAST, track3.SLOW], dtype=torch.float64)

    def momentum(state, step):
        averages = state["averages"]
        if two_from is None or step <= two_from:
            assert len(averages) == 1
            return averages[0]
        return sum(w * m for w, m in zip(memory, averages, strict=True))

    def forgets(step):
        if two_from is None or step <= two_from:
            return track3.MU ** (step + 1)
        mixed = (memory * decays ** (step - two_from)).sum()
        return track3.MU ** (two_from + 1) * mixed

    point = track3.transport(gamma, track3.MU, two_from)
    return lags(muon, quadratic, point, momentum, forgets)


@pytest.mark.processes
@pytest.mark.parametrize("two_from", [None, SWITCH])
def test_muons_momentum_has_no_lag(two_from):
    """At gamma = 1, of one average and of two, at every step, the switch included."""
    (without,) = spawn(lags_of_muon, 1, 1.0, two_from)
    assert max(without) < 1e-10
    (baseline,) = spawn(lags_of_muon, 1, 0.0, two_from)
    (half,) = spawn(lags_of_muon, 1, 0.5, two_from)
    assert max(baseline[SWITCH + 1 :]) > max(half[SWITCH + 1 :]) > 1e-2


def test_adamws_momentum_has_no_lag():
    def of(gamma):
        quadratic = Quadratic()
        adamw = torch.optim.AdamW([quadratic.w], 0.05, (track3.BETA1, 0.95))
        return lags(
            adamw,
            quadratic,
            track3.transport(gamma, track3.BETA1),
            lambda state, step: state["exp_avg"],
            lambda step: track3.BETA1 ** (step + 1),
        )

    assert max(of(1.0)) < 1e-10 and max(of(0.0)) > 1e-2


def test_two_averages_of_one_decay_are_one():
    a, b, rho = track3.lag_free_of_two(0.9, 0.9, 0.3)
    assert (a + b, rho) == pytest.approx((9.0, 0.9)) and b == pytest.approx(0.0)


def test_ema_nesterov_steps_from_the_point_ahead():
    """x' = A(x + beta m), m' = 0.99 m + 0.01 (x' - x), of pull request 308."""
    sizes = track3.Sizes(steps=60, ahead_from=10, ahead_until=50)
    quadratic = Quadratic()
    w, x = quadratic.w, quadratic.w.detach().clone()
    m = torch.zeros_like(x)
    point = track3.ema_nesterov(sizes)
    lookahead = track3.Lookahead([([w], point)], from_x=False)
    sgd = torch.optim.SGD([w], 0.1)
    for t in range(60):
        alpha = 1.0 if t <= 18 else (60 - t) / 42  # of the peak: constant, then to 0
        y = x + (0.6 * alpha * m if 10 <= t < 50 else 0)
        torch.testing.assert_close(w.detach(), y, rtol=0, atol=1e-12)
        held = w.detach().clone()
        lookahead.exchange()
        torch.testing.assert_close(w.detach(), x, rtol=0, atol=1e-12)
        lookahead.exchange()
        assert torch.equal(w, held)

        w.grad = quadratic.grad(w.detach())
        track3.take_step([sgd], lookahead, t, 60)
        new = y - 0.1 * alpha * quadratic.grad(y)
        x, m = new, 0.99 * m + 0.01 * (new - x)


def test_an_average_of_bfloat16_is_kept_in_float32():
    """Its steps of a hundredth would be lost in 8 bits."""
    w = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    lookahead = track3.Lookahead([([w], lambda step: (0.0, 1.0, 0.99))], from_x=False)
    for step in range(200):
        with torch.no_grad():
            w.copy_(torch.full_like(w, 2.0**-7 * (step + 1)))
        lookahead.after_step(step + 1)
    with torch.no_grad():
        ahead = w.float() - 2.0**-7 * 200
    assert (ahead > 0).all() and w.dtype == torch.bfloat16


# ---- what is read --------------------------------------------------------------------


def batches_of(rank: int, world: int, folder: Path) -> list:
    """Two sequences of three a batch, until there are no more tokens."""
    found = []
    with pytest.raises(ValueError, match="got too few tokens"):
        for inputs, labels in track3.batches(
            folder, "train", 2, 3, torch.device("cpu")
        ):
            found.append((inputs.tolist(), labels.tolist()))
    return found


def write_shard(folder: Path, number: int, tokens: range, version: int = 1) -> Path:
    folder = folder / "data" / "fineweb10B"
    folder.mkdir(parents=True, exist_ok=True)
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, version, len(tokens)
    path = folder / f"fineweb_train_{number:06}.bin"
    path.write_bytes(header.tobytes() + np.array(tokens, np.uint16).tobytes())
    return path


@pytest.mark.processes
def test_ranks_share_batches_in_the_tracks_order(tmp_path):
    """A shard's last tokens are left out, also where they would just make a batch."""
    write_shard(tmp_path, 1, range(14))
    write_shard(tmp_path, 2, range(100, 107))
    write_shard(tmp_path, 3, range(200, 208))
    first, second = spawn(batches_of, 2, tmp_path)
    assert first == [
        ([[s, s + 1, s + 2]], [[s + 1, s + 2, s + 3]]) for s in (0, 6, 200)
    ]
    assert second == [
        ([[s, s + 1, s + 2]], [[s + 1, s + 2, s + 3]]) for s in (3, 9, 203)
    ]


def test_another_format_is_refused(tmp_path):
    path = write_shard(tmp_path, 1, range(9), version=2)
    with pytest.raises(ValueError, match=r"got header \[20240520, 2, 9\], expected"):
        track3.read_shard(path)


@pytest.mark.parametrize(
    "given, told",
    [
        (["--ema-nesterov", "--gamma", "0.1"], "expected one of them"),
        (["--transport", "matrices"], "without --gamma"),
    ],
)
def test_options_that_exclude_one_another(given, told, capsys):
    with pytest.raises(SystemExit):
        track3.arguments(given)
    assert told in capsys.readouterr().err
