"""The forecast against the bytes that the code keeps and sends, and its FLOPs."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.flop_counter import FlopCounterMode

from marsopt import MARS, REGISTRY, NewtonSchulz
from marsopt.parallel import MeshCollectives
from tests.messages import Messages, pretended
from train.forecast import Job, forecast, models
from train.forecast.models import MODELS
from train.gpt2 import GPT2, Shape

ROOT = Path(__file__).parents[2]
CLOSE = pytest.approx

# shards are uneven, and those of vectors too
SHAPES = {
    "wte": (513, 192),
    **{f"{i}.a": (192, 192) for i in range(4)},
    **{f"{i}.b": (320, 320) for i in range(3)},
    **{f"{i}.n": (191,) for i in range(5)},
}
# every rule with every correction that it takes, and with narrow state
NARROW = dict(state_dtype=torch.bfloat16, stochastic_rounding=True)
BITS = dict(state_dtype=torch.int8, master_weight_bits=24)
EXACT = [name for name, rule in REGISTRY.items() if rule.is_mars]
CELLS = [
    *((name, {}) for name in REGISTRY),
    *((name, {"correction": "exact"}) for name in EXACT),
    *((name, NARROW) for name in REGISTRY),
    *((name, BITS) for name in REGISTRY),
    *(
        (name, {"correction": "exact"} | how)
        for name in EXACT
        for how in (NARROW, BITS)
    ),
]


def step(optimizer, params, wrap=lambda x: x):
    """A step on gradients of ones, by exact MARS's protocol, which others ignore."""
    for p in params.values():
        p.grad = wrap(torch.ones(p.shape))
    optimizer.update_previous_grad()
    optimizer.step()
    optimizer.update_last_grad()


def kept(optimizer):
    """Bytes of the state, step counters left out, and of exact MARS's next h."""
    state = [
        (value.to_local() if isinstance(value, DTensor) else value).nbytes
        for entry in optimizer.state.values()
        for key, value in entry.items()
        if key not in ("step", "stage_count")  # counts
    ]
    return sum(state) + optimizer.describe().num_kept_bytes


@pytest.mark.parametrize("rule, options", CELLS)
def test_state_is_what_the_optimizer_keeps(rule, options):
    job = Job(SHAPES, rule, options=options)
    ones = {n: torch.ones(shape, dtype=job.dtype) for n, shape in SHAPES.items()}
    params = {n: nn.Parameter(x) for n, x in ones.items()}
    optimizer = MARS(params.items(), mars_type=rule, compile=False, **options)
    for p in params.values():
        p.grad = torch.zeros_like(p)
    optimizer.update_previous_grad()
    found = forecast(job, 1)
    assert found.state == kept(optimizer)
    assert found.parameters == sum(p.nbytes for p in params.values())


@pytest.mark.parametrize("rule", ["adamw", "muon", "normuon", "soap"])
def test_each_of_three_ranks_keeps_and_sends_what_is_predicted(rule):
    found = forecast(Job(SHAPES, rule, options=dict(ns_dtype=torch.float32)), 3)
    states, sent = [], []
    for rank in range(3):
        with pretended(rank, (3,)) as mesh:

            def cut(whole, mesh=mesh):
                return distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)

            params = {n: nn.Parameter(cut(torch.ones(s))) for n, s in SHAPES.items()}
            optimizer = MARS(
                params.items(), mars_type=rule, compile=False, max_norm=1.0,
                ns_dtype=torch.float32, collectives=MeshCollectives(mesh),
            )  # fmt: skip
            step(optimizer, params, cut)  # ranks compare what they hold
            with Messages() as messages:
                step(optimizer, params, cut)
        states.append(kept(optimizer))
        kinds = [kind for kind, _ in messages.sent]
        assert kinds.count("all-reduce") == 1
        sent.append(sum(n for kind, n in messages.sent if kind == "all-to-all"))
    # the fullest shards, and the fullest owner, may be two ranks
    assert max(states) <= found.state <= 1.02 * max(states)
    assert sum(sent) / 3 == CLOSE(found.sent)
    assert max(sent) == CLOSE(found.most_sent, rel=0.02)


def test_owners_of_gpt2_large_are_balanced():
    """2 mn s (p - 1)/p^2 bytes of all matrices, and 4/3 of their FLOPs."""
    (job,) = models.jobs("gpt2-large", ["muon"])
    numel = sum(m.rows * m.cols for m in job.matrices().values())
    for ranks, imbalance in ((8, 1.05), (64, 1.16)):
        found = forecast(job, ranks)
        assert found.sent == CLOSE(4 * numel * (ranks - 1) / ranks**2)
        assert 1 <= max(found.flops) * ranks / sum(found.flops) < imbalance


def test_flops_of_newton_schulz():
    (job,) = models.jobs("gpt2-small", ["muon"])
    matrices = job.matrices().values()
    with FlopCounterMode(display=False) as counter:
        NewtonSchulz().many(
            [torch.empty(m.rows, m.cols, device="meta") for m in matrices]
        )
    for ranks in (1, 8):
        flops = sum(forecast(job, ranks).flops)
        assert counter.get_total_flops() == CLOSE(flops, rel=0.02)


def test_matrices_beside_the_rule_have_adamws_state():
    """12 x 8 and 8: AdamW's two buffers; 8 x 12: one momentum."""
    shapes = {"wte.weight": (12, 8), "b": (8, 12), "c": (8,)}
    job = Job(shapes, "moonlight", elementwise={"wte.weight"})
    assert list(job.matrices()) == ["b"]
    assert forecast(job, 1).state == 4 * (2 * 96 + 96 + 2 * 8)


# ---- models by name ------------------------------------------------------------------


def sizes_of(model):
    return sorted(tuple(p.shape) for p in model.parameters())


def test_gpt2_is_that_of_the_application():
    num_layers, width = models.gpt2.MODELS["gpt2-small"]
    shape = Shape(num_layers, width // 64, width, 1024, models.gpt2.VOCAB_SIZE)
    with torch.device("meta"):
        model = GPT2(shape)
    assert sorted(MODELS["gpt2-small"].shapes.values()) == sizes_of(model)


def test_llama_is_that_of_transformers():
    from transformers import LlamaConfig, LlamaForCausalLM

    shapes = MODELS["llama3-8b"].shapes
    inner, width = shapes["0.gate"]
    config = LlamaConfig(
        vocab_size=shapes["head"][0],
        num_key_value_heads=32 * shapes["0.k"][0] // width,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=32,
        num_attention_heads=32,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    assert sorted(shapes.values()) == sizes_of(model)


@pytest.mark.parametrize(
    ("name", "num"),
    [
        # Llama 2's 6.74 and 13.02, OpenLLaMA's 3.43, Llama 3's 8.03 x 1e9
        ("llama-3b", 3_426_473_600),
        ("llama-7b", 6_738_415_616),
        ("llama-13b", 13_015_864_320),
        ("llama3-8b", 8_030_261_248),
        # 12 w^2 + 2 w a layer, tables of tokens and of 1,024 positions, and a norm
        ("gpt2-large", 36 * (12 * 1280 + 2) * 1280 + (50_304 + 1024 + 1) * 1280),
        ("gpt2-xl", 48 * (12 * 1600 + 2) * 1600 + (50_304 + 1024 + 1) * 1600),
    ],
)
def test_numbers_of_parameters(name, num):
    assert Job(MODELS[name].shapes, "muon").num_params == num


def test_the_snippet_of_the_page_runs():
    page = (ROOT / "docs" / "scaling.md").read_text()
    lines = page.split("A model of your own is its shapes", 1)[1].splitlines()[1:]
    end = next(i for i, line in enumerate(lines) if line and not line.startswith(" "))
    model = nn.Module()
    model.wte, model.wpe = nn.Embedding(640, 64), nn.Embedding(64, 64)
    model.mlp = nn.Linear(64, 128)
    names = dict(model=model)
    exec(textwrap.dedent("\n".join(lines[:end])), names)
    assert list(names["job"].matrices()) == ["mlp.weight"]
    # the fullest of 8 has an eighth: AdamW 8 bytes of state, Moonlight 4
    num_bytes = 8 * (640 * 64 + 64 * 64) + 4 * 64 * 128
    assert names["found"].state == CLOSE(num_bytes / 8, rel=0.02)
