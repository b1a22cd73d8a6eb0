"""The model as the authors train it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from configs.base import SHAPES
from train.gpt2 import GPT2, Shape

SMALL = Shape(num_layers=3, num_heads=2, width=8, block_size=16, vocab_size=32)


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
    flops = SHAPES["small"].num_flops_per_token(124_373_760, 1024)
    assert flops == 6 * (124_373_760 - 1024 * 768) + 6 * 12 * 768 * 1024


def test_a_model_without_memory_is_filled_whole():
    """As torchtitan builds it, on meta."""
    model, other = GPT2(SMALL), GPT2(SMALL).to("meta")
    other.to_empty(device="cpu")
    for block in other.layers.values():
        block.divisor.fill_(7)
    model.init_weights()
    other.init_weights()
    for (name, a), (_, b) in zip(
        [*model.named_parameters(), *model.named_buffers()],
        [*other.named_parameters(), *other.named_buffers()],
        strict=True,
    ):
        assert torch.equal(a, b), name
    assert not set(model.state_dict()) - {name for name, _ in model.named_parameters()}
