"""The planner: balance, choice, and what it says of GPT-2."""

from __future__ import annotations

import re
import time

import pytest
import torch

from marsopt import NewtonSchulz
from marsopt.parallel.placement import shard_sizes
from marsopt.parallel.planner import Matrix, assign, cost, plan
from tests.application.made import called, refused
from train.forecast import Hardware, Job, forecast, tables
from train.forecast import step as forecast_step
from train.plan import duration, job_of, main

NS = NewtonSchulz().on("cuda")
BLOCK = [(3840, 1280), (1280, 1280), (5120, 1280), (1280, 5120)]
LARGE = [Matrix(r, c, 0) for r, c in BLOCK * 36]


@pytest.mark.parametrize(("ranks", "bound"), [(8, 1.05), (64, 1.16)])
def test_owners_of_gpt2_large_are_balanced(ranks, bound):
    found = cost(LARGE, plan(LARGE, ranks, NS, strategy="owner"), NS)
    assert 1.0 <= found.imbalance <= bound


@pytest.mark.parametrize(
    ("ranks", "gathered", "owner", "flops"),
    [(8, 1239e6, 310e6, 2.66e12), (64, 1393e6, 43.5e6, 0.378e12)],
)
def test_bytes_and_flops_of_gpt2_large(ranks, gathered, owner, flops):
    """The arithmetic of docs/scaling.md, by hand: 2mn s/p against mn s (p-1)/p."""
    by_owner = cost(LARGE, plan(LARGE, ranks, NS, strategy="owner"), NS)
    by_all = cost(LARGE, plan(LARGE, ranks, NS, strategy="replicate"), NS)
    assert by_owner.bytes_sent == pytest.approx(owner, rel=0.005)
    assert by_all.bytes_sent == pytest.approx(gathered, rel=0.005)
    assert max(by_owner.owner_flops) == pytest.approx(flops, rel=0.02)


def test_plans_are_deterministic_and_complete():
    first, second = plan(LARGE, 7, NS), plan(LARGE, 7, NS)
    assert first == second
    assert set(first.owners) == set(range(7))
    assert set(first.buckets) == set(range(first.num_buckets))
    assert first.owned == list(range(len(LARGE)))
    assert plan(LARGE, 7, NS, strategy="replicate").owned == []
    assert plan(LARGE, 1, NS).owned == []


@pytest.mark.parametrize(
    ("ranks", "most", "buckets"),
    [(7, None, 7), (8, None, 6), (36, None, 2), (64, None, 2), (8, 2, 2), (8, 1, 1)],
)
def test_a_bucket_is_of_32_mb_and_of_two_matrices_of_each_owner(ranks, most, buckets):
    """Of GPT-2 large a rank sends 1.4 GB over the number of ranks."""
    assert plan(LARGE, ranks, NS, max_buckets=most).num_buckets == buckets
    few = LARGE[:8]
    assert plan(few, 2, NS).num_buckets == 2  # below 64 MB, too, so that they overlap


def test_a_thousand_shapes_on_a_thousand_ranks_are_planned_in_a_second():
    shapes = [Matrix(128 + i, 8192 - 7 * i, 0) for i in range(1000)]
    start = time.process_time()
    plan(shapes, 1024, NS)
    plan(shapes, 128, NS, replicas=8)
    assert time.process_time() - start < 1


def test_replicas_share_the_work():
    """Under HSDP each replica has a part of the owners' work, and gives its factors.

    2mn s (p-1)/p^2 bytes become that over R, and mn s (R-1)/(p R) for the factors.
    """
    shared = plan(LARGE, 4, NS, replicas=4)
    assert shared.replicas == 4
    assert set(shared.owners) == set(range(16))
    alone, split = (
        cost(LARGE, plan(LARGE, 4, NS, strategy="owner", replicas=r), NS)
        for r in (1, 4)
    )
    assert max(split.owner_flops) < 0.3 * max(alone.owner_flops)
    assert split.bytes_sent / alone.bytes_sent == pytest.approx(1 / 4 + 0.75 / 1.5)


def test_an_owner_sends_more_than_the_mean():
    """It returns mn s (p - 1)/p of what it owns; a rank without matrices, nothing."""
    one = [Matrix(512, 256, 0)]
    found = cost(one, plan(one, 4, NS, strategy="owner"), NS)
    shard = 512 * 256 / 4 * 2
    assert found.bytes_max == 3 * shard
    assert found.bytes_sent == pytest.approx((3 * shard + 3 * shard) / 4)


def test_longest_processing_time_first():
    owners, loads = assign([3, 3, 2, 2, 2], 2)
    assert loads == [7, 5]
    assert owners == [0, 1, 0, 1, 0]


@pytest.mark.parametrize("size", [0, 1, 3, 5, 8, 257])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_shard_sizes_are_those_of_torch(size, ranks):
    pieces = [len(c) for c in torch.arange(size).chunk(ranks)] if size else []
    want = pieces + [0] * (ranks - len(pieces))
    assert shard_sizes(size, ranks) == want


def test_matrices_beside_the_rule_have_adamws_state():
    """12 x 8 and 8: AdamW's two buffers; 8 x 12: one momentum."""
    shapes = {"wte.weight": (12, 8), "b": (8, 12), "c": (8,)}
    job = Job(shapes, "moonlight", 1, 1, elementwise={"wte.weight"})
    assert list(job.matrices()) == ["b"]
    assert forecast(job, 1).memory.state == 4 * (2 * 96 + 96 + 2 * 8)


def test_tensors_of_several_matrices_are_not_planned():
    """Experts in one tensor: AdamW's, unless they are asked to be matrices."""
    shapes = {"experts": (4, 12, 8), "b": (8, 12)}
    assert list(Job(shapes, "muon", 1, 1).matrices()) == ["b"]
    job = Job(shapes, "muon", 1, 1, options={"matrices": "batched"})
    with pytest.raises(ValueError, match="got experts of shape .4, 12, 8., which is"):
        job.matrices()


def test_bad_arguments():
    with pytest.raises(ValueError, match="got strategy='fast'"):
        plan(LARGE, 2, NS, strategy="fast")
    with pytest.raises(ValueError, match="got max_buckets=0"):
        plan(LARGE, 2, NS, max_buckets=0)
    with pytest.raises(ValueError, match="got 8 ranks and 3 replicas"):
        forecast(Job({}, "muon", 1, 1), 8, replicas=3)


def test_the_jobs_of_recipes():
    job = job_of("large_mars_shampoo")
    assert job.num_params == 773_582_080
    assert len(job.matrices()) == 36 * 4 + 2
    assert job_of("small_mars_adamw").matrices() == {}
    # MARS-M and Moonlight give embeddings to AdamW
    for name in ("large_mars_m", "large_moonlight"):
        job = job_of(name)
        assert len(job.matrices()) == 36 * 4
        assert not {"wte.weight", "wpe.weight"} & job.matrices().keys()


def planned(*words):
    """What the command prints, called in this process."""
    code, out, err = called(main, *words)
    assert (code, err) == (0, "")
    return out


def test_a_sweep_over_numbers_of_gpus(tmp_path, monkeypatch):
    assert [*forecast_step.SWEEP] == [2**i for i in range(13)]
    monkeypatch.setattr(forecast_step, "SWEEP", (1, 2, 8))  # thousands take a while
    picture = tmp_path / "sweep.png"
    out = planned("--config", "tiny_mars_shampoo", "--sweep", "--picture", picture)
    assert [int(line.split()[0]) for line in out.splitlines()[2:-3]] == [1, 2, 8]
    assert "Times are a model. Each GPU sends 400 Gbit/s" in out
    assert picture.stat().st_size > 10_000


def test_the_plan_of_a_recipe():
    out = planned("--config", "small_mars_shampoo", "--ranks", "4", "--all")
    assert out.count("rank ") >= 48
    assert " GiB with activation-checkpoint:full (15 x 1,024 tokens in bf16" in out
    assert re.search(r"^batch +491,520 tokens a step, over all GPUs$", out, re.M)
    (speed,) = re.findall(r"^tokens/s, predicted +([\d,]+), of all GPUs$", out, re.M)
    (seconds,) = re.findall(r"^forward and backward +(\S+) s, predicted", out, re.M)
    (own,) = re.findall(r"^optimizer step, predicted +(\S+) ms$", out, re.M)
    step = float(seconds) + float(own) / 1e3
    assert float(speed.replace(",", "")) * step == pytest.approx(491_520, rel=2e-3)
    assert "multiplies at 400 TFLOP/s in\n  Newton-Schulz and 40% of that" in out


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(4.9e-3, "4.9 ms"), (2e-5, "20 us"), (30.115, "30.1 s"), (1123.7, "0:18:44")],
)
def test_times_are_readable(seconds, said):
    assert duration(seconds) == said


def test_replicas_are_said_where_they_change_what_is_counted():
    job, hardware = job_of("tiny_muon"), Hardware()
    for ranks, every in (([16], True), ([8, 16], False)):
        said = tables.report(
            "tiny_muon", [job], ranks, every=every, replicas=8, hardware=hardware
        )
        assert "8 replicas of HSDP" in said


def test_rules_are_compared_on_a_model():
    rules = ("adamw", "mars-adamw-exact")
    out = planned("--model", "gpt2-small", "--rules", *rules, "--ranks", "1")
    assert out.startswith("gpt2-small: 124,373,760 parameters, 491,520 tokens a step")
    rows = [line.split() for line in out.splitlines()]
    shown = {row[0]: row for row in rows if row and row[0] in rules}
    seconds = [float(shown[rule][8].replace(",", "")) for rule in rules]
    assert seconds[1] == pytest.approx(2 * seconds[0], rel=1e-2)
    assert all(word in out for word in ("Counted:", "Model:", "float32", "bf16"))
    assert "No network was\n  measured" in out


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("--model", "llama"), "got model llama, expected one of gpt2-small"),
        (("--model", ""), "got model , expected one of gpt2-small"),
        (("--model", "gpt2-xl", "--rules", "sgd"), "got rule sgd, expected one of"),
        (("--model", "gpt2-xl", "--rules", "adamw-exact"), "got rule adamw-exact, ex"),
        (("--model", "gpt2-xl", "--sweep"), "got 5 rules, expected one"),
        (("--model", "gpt2-xl", "--all"), "got 5 rules, expected one"),
        (("--model", "gpt2-xl", "--tokens", "0"), "got --tokens 0, expected at least"),
        (("--model", "gpt2-xl", "--ranks", "8", "0"), "got --ranks 0, expected at"),
        (("--config", "none"), "got --config none, expected one"),
        (("--config", "tiny_muon", "--ranks", "0"), "got --ranks 0, expected at"),
        (("--config", "tiny_muon", "--rules", "muon"), "got --rules or --tokens with"),
        (("--config", "tiny_muon", "--replicas", "3"), "got 8 ranks and 3 replicas"),
        (("--config", "tiny_muon", "--sweep", "--all"), "got --ranks or --all with"),
        (("--config", "tiny_muon", "--sweep", "--replicas", "5000"), "got 5000 repl"),
        (("--model", "gpt2-xl", "--replicas", "0"), "got --replicas 0, expected at"),
    ],
)
def test_what_cannot_be_planned(args, told):
    assert refused(main, *args).startswith(f"error: {told}")
