"""The model as the authors train it, the schedule, and the recipes as numbers."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import configs
from configs.base import SHAPES
from train.gpt2 import GPT2, Shape, num_flops_per_token
from train.schedule import cosine
from train.trainer import MarsTrainer

SMALL = Shape(num_layers=3, num_heads=2, width=8, block_size=16, vocab_size=32)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("small", 124_373_760),
        ("medium", 354_599_936),
        ("large", 773_582_080),
        ("xl", 1_556_840_000),
    ],
)
def test_number_of_parameters_is_the_authors(name, count):
    with torch.device("meta"):
        model = GPT2(SHAPES[name])
    assert sum(p.numel() for p in model.parameters()) == count


def test_forward_is_the_formula():
    """Pre-norm without bias, logits over sqrt(d) and layer + 1, tanh GELU, tied."""
    model = GPT2(SMALL)
    model.init_weights(seed=1)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    tokens = torch.randint(32, (2, 16))
    w = {n: p.detach() for n, p in model.named_parameters()}
    x = w["wte.weight"][tokens] + w["wpe.weight"]

    def norm(x, weight):
        centred = x - x.mean(-1, keepdim=True)
        return (
            centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
        )

    causal = torch.full((16, 16), -math.inf).triu(1)
    for i in range(3):
        layer = {
            n.split(".", 2)[2]: p for n, p in w.items() if n.startswith(f"layers.{i}.")
        }
        q, k, v = (
            norm(x, layer["attn_norm.weight"]) @ layer["attn_in.weight"].T
        ).chunk(3, -1)
        heads = []
        for h in (slice(0, 4), slice(4, 8)):
            logits = q[..., h] @ k[..., h].mT / 4**0.5 / (i + 1)
            heads.append(torch.softmax(logits + causal, -1) @ v[..., h])
        x = x + torch.cat(heads, -1) @ layer["attn_out.weight"].T
        inner = F.gelu(
            norm(x, layer["mlp_norm.weight"]) @ layer["mlp_in.weight"].T,
            approximate="tanh",
        )
        x = x + inner @ layer["mlp_out.weight"].T
    want = norm(x, w["norm.weight"]) @ w["wte.weight"].T
    torch.testing.assert_close(model(tokens), want, rtol=1e-4, atol=1e-4)


def test_init_is_the_authors_and_depends_on_names_alone():
    shape = Shape(num_layers=2, num_heads=4, width=64, block_size=64, vocab_size=512)
    a, b, c = GPT2(shape), GPT2(shape), GPT2(shape)
    a.init_weights(seed=0)
    torch.rand(100)
    b.init_weights(seed=0)
    c.init_weights(seed=1)
    for (n, p), q, r in zip(
        a.named_parameters(), b.parameters(), c.parameters(), strict=True
    ):
        assert torch.equal(p, q)
        if p.ndim == 1:
            assert bool((p == 1).all())
            continue
        assert not torch.equal(p, r)
        residual = n.endswith(("attn_out.weight", "mlp_out.weight"))
        assert float(p.detach().std()) == pytest.approx(
            0.02 / (2 if residual else 1), rel=0.05
        )


def test_flops_of_gpt2_small():
    """6 per weight that is multiplied with (not positions), and attention."""
    flops = num_flops_per_token(SHAPES["small"], 124_373_760, 1024)
    assert flops == 6 * (124_373_760 - 1024 * 768) + 6 * 12 * 768 * 1024


def test_schedule_is_the_authors():
    """0 at the first step, the peak after the warm-up, min_lr at the end."""
    at = [cosine(t, warmup=10, total=110, floor=0.1) for t in range(130)]
    assert at[:11] == pytest.approx([t / 10 for t in range(11)])
    assert at[60] == pytest.approx(0.55)
    assert at[110:] == [0.1] * 20
    assert all(a > b for a, b in zip(at[10:109], at[11:110], strict=True))


def test_every_recipe_is_complete():
    for name in configs.__all__:
        config = getattr(configs, name)()
        assert isinstance(config, MarsTrainer.Config)
        assert config.model_spec.flavor == name
        assert config.dump_folder == f"runs/{name}"
        assert config.to_dict()


def test_small_mars_adamw_is_the_published_recipe():
    """Effective values of AGI-Arena/MARS, config/train_gpt2_small_mars.py."""
    c = configs.small_mars_adamw()
    assert c.model_spec.model.shape == Shape(12, 12, 768, 1024, 50304, True)
    assert c.optimizer.group() == dict(
        mars_type="mars-adamw", lr=6e-3, betas=(0.95, 0.99), eps=1e-8,
        weight_decay=0.01, amsgrad=False, gamma=0.025, optimize_1d=False, clip=1.0,
        lr_1d=3e-3, betas_1d=(0.9, 0.95), weight_decay_1d=0.1,
    )  # fmt: skip
    assert (c.optimizer.exact, c.optimizer.embedding_weight_decay) == (False, 0.0)
    assert (c.lr_scheduler.warmup_steps, c.lr_scheduler.min_lr) == (2000, 3e-5)
    t = c.training
    assert (t.global_batch_size, t.local_batch_size, t.seq_len) == (480, 15, 1024)
    assert (t.steps, t.max_norm) == (100_000, 1.0)
    assert t.global_batch_size * t.seq_len == 491_520
