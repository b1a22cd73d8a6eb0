"""Every recipe: its numbers frozen, built for 8 ranks, and the tiny ones trained."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers "fake")

import configs
import marsopt
from marsopt.optim.groups import kinds_of, values_of
from tests.trainers import losses, train_all
from train import prepare
from train.engine.resolve import resolve
from train.engine.schedule import cosine
from train.engine.trainer import MarsTrainer
from train.errors import UserError
from train.gpt2 import Shape

# Layers, heads, width, block, vocabulary; parameters; sequences per GPU and micro-step,
# micro-steps on the published number of GPUs; steps, warm-up.
SIZES = {
    "tiny": (Shape(4, 4, 128, 128, 257, False), 836_864, 8, 1, 1, 1400, 100),
    "small": (Shape(12, 12, 768, 1024, 50304), 124_373_760, 15, 4, 8, 100_000, 2000),
    "medium": (Shape(24, 16, 1024, 1024, 50304), 354_599_936, 15, 4, 8, 100_000, 2000),
    "large": (Shape(36, 20, 1280, 1024, 50304), 773_582_080, 5, 12, 8, 100_000, 2000),
    "xl": (Shape(48, 25, 1600, 1024, 50304), 1_556_840_000, 5, 12, 8, 100_000, 2000),
}

# Effective values of AGI-Arena/MARS at 4831e28 where a script is published (defaults,
# then configuration, then command line); peak rates of matrices, embeddings and
# LayerNorm weights, weight decays in this order, betas of the rule.
TABLE = """
recipe               rule          lr      lr_emb  lr_1d   min_lr   wd   emb  1d   b1  b2
small_adamw          adamw         6e-4    6e-4    6e-4    3e-5     .1   0    0    .9  .95
medium_adamw         adamw         3e-4    3e-4    3e-4    6e-5     .1   0    0    .9  .95
large_adamw          adamw         2e-4    2e-4    2e-4    1e-5     .1   0    0    .9  .95
small_adamw_fw       adamw         6e-4    6e-4    6e-4    3e-5     .1   0    0    .9  .95
xl_adamw_fw          adamw         2e-4    2e-4    2e-4    1e-5     .1   0    0    .9  .95
small_mars_adamw     mars-adamw    6e-3    6e-3    3e-3    3e-5     .01  0    .1   .95 .99
medium_mars_adamw    mars-adamw    3e-3    3e-3    1.5e-3  6e-5     .01  0    .1   .95 .99
large_mars_adamw     mars-adamw    2e-3    2e-3    1e-3    1e-5     .01  0    .1   .95 .99
small_mars_adamw_fw  mars-adamw    6e-3    6e-3    3e-3    3e-5     .01  0    .1   .95 .99
xl_mars_adamw_fw     mars-adamw    2e-3    2e-3    1e-3    1e-5     .01  0    .1   .95 .99
small_muon           muon          2e-2    2e-2    3e-3    3e-5     0    0    .1   .95 .99
medium_muon          muon          1e-2    1e-2    1.5e-3  6e-5     0    0    .1   .95 .99
large_muon           muon          6.67e-3 6.67e-3 1e-3    1e-5     0    0    .1   .95 .99
small_moonlight      moonlight     6e-3    6e-3    6e-3    3e-5     .1   .1   .1   .95 .99
medium_moonlight     moonlight     5e-3    5e-3    5e-3    6e-5     .1   .1   .1   .95 .99
large_moonlight      moonlight     5e-3    5e-3    5e-3    1e-5     .1   .1   .1   .95 .99
large_moonlight_4_bytes moonlight  5e-3    5e-3    5e-3    1e-5     .1   .1   .1   .95 .99
xl_moonlight         moonlight     3e-3    3e-3    3e-3    1e-5     .1   .1   .1   .95 .99
small_moonlight_fw   moonlight     6e-3    6e-3    6e-3    3e-5     .1   .1   .1   .95 .99
large_moonlight_fw   moonlight     5e-3    5e-3    5e-3    1e-5     .1   .1   .1   .95 .99
xl_moonlight_fw      moonlight     3e-3    3e-3    3e-3    1e-5     .1   .1   .1   .95 .99
small_mars_m         mars-m        6e-3    6e-3    6e-3    3e-5     .01  .01  .01  .95 .99
medium_mars_m        mars-m        5e-3    5e-3    5e-3    6e-5     .01  .01  .01  .95 .99
large_mars_m         mars-m        5e-3    5e-3    5e-3    1e-5     .01  .01  .01  .95 .99
small_mars_m_fw      mars-m        6e-3    6e-3    6e-3    3e-5     .01  .01  .01  .95 .99
xl_mars_m_fw         mars-m        3e-3    3e-3    3e-3    1e-5     .01  .01  .01  .95 .99
small_lion           lion          2e-4    2e-4    2e-4    1e-5     .3   0    0    .9  .99
medium_lion          lion          1e-4    1e-4    1e-4    2e-5     .3   0    0    .9  .99
large_lion           lion          6.67e-5 6.67e-5 6.67e-5 3.333e-6 .3   0    0    .9  .99
small_mars_lion      mars-lion     2e-4    2e-4    3e-3    1e-5     .3   0    .1   .95 .99
medium_mars_lion     mars-lion     1e-4    1e-4    1.5e-3  2e-5     .3   0    .1   .95 .99
large_mars_lion      mars-lion     6.67e-5 6.67e-5 1e-3    3.333e-6 .3   0    .1   .95 .99
small_mars_shampoo   mars-shampoo  2e-2    2e-2    3e-3    3e-5     0    0    .1   .95 .99
medium_mars_shampoo  mars-shampoo  1e-2    1e-2    1.5e-3  6e-5     0    0    .1   .95 .99
large_mars_shampoo   mars-shampoo  6.67e-3 6.67e-3 1e-3    1e-5     0    0    .1   .95 .99
xl_mars_shampoo      mars-shampoo  6.67e-3 6.67e-3 1e-3    1e-5     0    0    .1   .95 .99
tiny_adamw           adamw         4e-3    4e-3    4e-3    4e-4     .1   0    0    .9  .95
tiny_nadamw          nadamw        6e-3    6e-3    6e-3    6e-4     .01  0    0    .9  .99
tiny_lion            lion          1e-3    1e-3    1e-3    1e-4     .3   0    0    .9  .99
tiny_muon            muon          2e-2    2e-2    3e-3    2e-3     0    0    .1   .95 .99
tiny_moonlight       moonlight     1.3e-2  1.3e-2  1.3e-2  1.3e-3   .1   .1   .1   .95 .99
tiny_mars_adamw      mars-adamw    6e-3    6e-3    3e-3    6e-4     .01  0    .1   .95 .99
tiny_mars_adamw_gamma0 mars-adamw  6e-3    6e-3    3e-3    6e-4     .01  0    .1   .95 .99
tiny_mars_adamw_exact mars-adamw   6e-3    6e-3    3e-3    6e-4     .01  0    .1   .95 .99
tiny_mars_lion       mars-lion     1e-3    1e-3    3e-3    1e-4     .3   0    .1   .95 .99
tiny_mars_shampoo    mars-shampoo  3e-2    3e-2    3e-3    3e-3     0    0    .1   .95 .99
tiny_mars_m          mars-m        6e-3    6e-3    6e-3    6e-4     .01  .01  .01  .95 .99
tiny_soap            soap          1.2e-2  1.2e-2  1.2e-2  1.2e-3   .01  .01  .01  .95 .95
tiny_soap_muon       soap-muon     1.2e-2  1.2e-2  1.2e-2  1.2e-3   .1   .1   .1   .95 .95
"""  # noqa: E501
GAMMA = {"tiny_mars_adamw_gamma0": 0.0}  # where it is not the published 0.025
HEAD, *ROWS = [line.split() for line in TABLE.split("\n") if line]
FROZEN = {row[0]: dict(zip(HEAD, row, strict=True)) for row in ROWS}
WORLD = 8


@pytest.fixture(scope="module")
def mesh():
    """torchtitan's mesh of 8 ranks, of which this process plays one."""
    from torchtitan.distributed import ParallelDims

    dist.init_process_group("fake", rank=3, world_size=WORLD)
    dims = ParallelDims.from_config(configs.tiny_adamw().parallelism, WORLD)
    dims.build_mesh()
    yield dims
    dist.destroy_process_group()


def build(config: MarsTrainer.Config, dims):
    """Model, optimizer and schedule as torchtitan's trainer builds them, without
    memory behind the tensors.
    """
    with FakeTensorMode():
        torch.set_default_dtype(getattr(torch, config.training.dtype))
        try:
            with torch.device("meta"):
                model = config.model_spec.model.build()
        finally:
            torch.set_default_dtype(torch.float32)
        count = sum(p.numel() for p in model.parameters())
        model = config.model_spec.parallelize_fn(
            model,
            parallel_dims=dims,
            training=config.training,
            parallelism=config.parallelism,
            compile_config=config.compile,
            ac_config=config.activation_checkpoint,
            dump_folder="",
        )
        model.to_empty(device="cpu")
        optimizers = config.optimizer.build(model_parts=[model])
        schedule = config.lr_scheduler.build(
            optimizers=optimizers, training_steps=config.training.steps
        )
    return model, optimizers.mars, schedule, count


def effective(mars, model) -> dict:
    """{kind of parameter: what moves it}, from the optimizer's own groups."""
    found = {}
    names = {p: name for name, p in model.named_parameters()}
    for group in mars.param_groups:
        for p, is_matrix in zip(group["params"], kinds_of(group), strict=True):
            name, values = names[p], values_of(group, is_matrix)
            kind = "vector" if p.ndim == 1 else "matrix"
            if name.startswith(("wte", "wpe")):
                kind = "embedding"
            rule, peak = values["mars_type"], values["initial_lr"] * values["lr_ratio"]
            wd, betas = values["weight_decay"], values["betas"]
            found.setdefault(kind, set()).add((rule, peak, wd, betas))
    assert all(len(values) == 1 for values in found.values()), found
    return {kind: values.pop() for kind, values in found.items()}


@pytest.mark.parametrize("name", FROZEN)
def test_recipe_is_the_table_and_builds_for_8_ranks(name, mesh):
    row, config = FROZEN[name], getattr(configs, name)()
    size = name.split("_")[0]
    shape, count, micro_batch, micro_steps, gpus, steps, warmup = SIZES[size]
    warmup = 0 if name == "tiny_moonlight" else warmup
    number = {key: float(row[key]) for key in HEAD[2:]}
    betas = number["b1"], number["b2"]

    assert config.model_spec.flavor == name
    assert config.dump_folder == f"runs/{name}"
    assert config.model_spec.model.shape == shape
    data = {"tiny": "data/python"}.get(size, "data/openwebtext")
    data = "data/fineweb-edu" if name.endswith("_fw") else data
    assert config.dataloader.dataset_path == data
    assert config.tokenizer.name == ("bytes" if size == "tiny" else "gpt2")

    t = config.training
    assert (t.local_batch_size, config.loss.num_summed) == (micro_batch, micro_steps)
    if size != "tiny":
        assert t.global_batch_size * t.seq_len == 491_520
        assert gpus * micro_batch * micro_steps == t.global_batch_size
    assert (t.steps, t.seq_len, t.max_norm) == (steps, shape.block_size, 1.0)
    assert config.validator.freq == (200 if size == "tiny" else 1000)

    o, s = config.optimizer, config.lr_scheduler
    assert (o.mars_type, o.betas_1d, o.eps) == (row["rule"], None, 1e-8)
    assert (o.clip, o.optimize_1d, o.amsgrad) == (1.0, False, False)
    assert o.gamma == GAMMA.get(name, 0.025)
    assert o.correction == ("exact" if name.endswith("_exact") else "approximate")
    assert o.gamma_decay == "none"
    assert o.ns_dtype == ("float32" if size == "tiny" else "bfloat16")
    assert (s.kind, s.warmup_steps, s.total_steps) == ("cosine", warmup, None)
    assert s.min_lr_factor * o.lr == pytest.approx(number["min_lr"], rel=2e-4)

    # of one block, as all others are
    config.model_spec.model.shape = dataclasses.replace(shape, num_layers=1)
    model, mars, schedule, built = build(config, mesh)
    of_a_block = 12 * shape.width**2 + 2 * shape.width
    assert built + (shape.num_layers - 1) * of_a_block == count
    approx = {
        kind: (rule, pytest.approx(lr), wd, b)
        for kind, (rule, lr, wd, b) in effective(mars, model).items()
    }
    # embeddings by AdamW
    beside = row["rule"] in ("mars-m", "moonlight") or "soap" in row["rule"]
    itself = row["rule"] in ("adamw", "nadamw", "lion")
    vectors = betas if itself else (0.9, 0.95)
    own = row["rule"] if itself else "adamw"
    assert approx == {
        "matrix": (row["rule"], number["lr"], number["wd"], betas),
        "embedding": (
            "adamw" if beside else row["rule"],
            number["lr_emb"],
            number["emb"],
            (0.9, 0.95) if beside else betas,
        ),
        "vector": (own, number["lr_1d"], number["1d"], vectors),
    }
    floor = number["min_lr"] / number["lr"]
    (scheduler,) = schedule.schedulers
    for step in (0, warmup, 3 * steps // 4, steps):
        want = cosine(step, warmup=warmup, total=steps, floor=floor)
        assert scheduler.lr_lambdas[0](step) == pytest.approx(want, rel=2e-4)


def test_the_default_recipe_is_what_for_model_builds():
    """At the learning rate that ``for_model`` takes for its size."""
    config = configs.tiny_moonlight()
    model = config.model_spec.model.build()
    recipe = config.optimizer.build(model_parts=[model]).mars

    def numbers(optimizer):
        return {
            p: values_of(group, is_matrix)
            for group in optimizer.param_groups
            for p, is_matrix in zip(group["params"], kinds_of(group), strict=True)
        }

    assert numbers(recipe) == numbers(marsopt.for_model(model, compile=False))
    assert config.training.max_norm == 1.0


# ---- blocks are compiled one by one --------------------------------------------------


def compiled(mesh, graphs):
    """A recipe's GPT-2 XL as the application shards and compiles it, but narrow."""
    config = configs.xl_mars_adamw_fw()
    assert config.compile.enable and "model" in config.compile.components
    narrow = dict(num_heads=2, width=16, block_size=8, vocab_size=32)
    model_config = config.model_spec.model
    model_config.shape = dataclasses.replace(model_config.shape, **narrow)
    model = model_config.build()
    return config.model_spec.parallelize_fn(
        model,
        parallel_dims=mesh,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=dataclasses.replace(config.compile, backend=graphs),
        ac_config=config.activation_checkpoint,
        dump_folder="",
    )


# dynamo reads it of every input
reads_grad = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)


@reads_grad
def test_one_compiled_graph_serves_all_blocks_of_gpt2_xl(mesh):
    """Dynamo gives up after eight graphs of a function: a constant of each block, in
    place of a tensor, once ended every recipe of more blocks at its first step.
    """
    graphs = CompileCounter()
    model = compiled(mesh, graphs)
    assert len(model.layers) == 48
    tokens = torch.zeros(2, 8, dtype=torch.long)
    for _ in range(2):
        model(tokens).sum().backward()
        assert graphs.frame_count == 1
    with torch.no_grad():  # as it validates
        model(tokens)
    assert graphs.frame_count == 2


def test_recipes_use_bfloat16_where_there_is_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert configs.xl_moonlight_fw().training.mixed_precision_param == "bfloat16"


def test_a_recipe_is_a_new_value_each_time():
    configs.small_muon().optimizer.lr = 1.0
    assert configs.small_muon().optimizer.lr == 2e-2


# ---- ranks x local batch x micro-steps = global batch --------------------------------


@pytest.mark.parametrize("world", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("name", [f"{n}_moonlight" for n in [*SIZES][1:]])
def test_published_batches_divide_on_the_usual_numbers_of_gpus(name, world):
    """All checks pass up to the data, which is looked for last."""
    config = getattr(configs, name)()
    config.dataloader.dataset_path = "/none"
    with pytest.raises(UserError, match=r"got no /none/meta\.json"):
        resolve(config, world)


@pytest.mark.parametrize(
    ("world", "local", "told"),
    [
        (
            12,
            15,
            r"set --training\.local-batch-size to one of 1, 2, 4, 5, 8, 10, 20, 40$",
        ),
        (8, 16, r"to one of 1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30, 60$"),
        (7, 15, "start a number of processes that divides 480, or change it$"),
    ],
)
def test_a_batch_that_does_not_divide_says_what_does(world, local, told):
    config = configs.small_mars_adamw()
    config.training.local_batch_size = local
    config.dataloader.dataset_path = "/none"
    ranks = f"{world:,} ranks of local_batch_size={local}"
    head = f"got training.global_batch_size=480 with {ranks}, expected a multiple of"
    with pytest.raises(UserError) as error:
        resolve(config, world)
    batch, data = error.value.args
    assert batch.startswith(head)
    assert re.search(told, batch)
    assert data.startswith("got no /none/meta.json")


# ---- the tiny ones are trained -------------------------------------------------------

TINY = [name for name in FROZEN if name.startswith("tiny")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What two steps of each printed, from one process."""
    folder = tmp_path_factory.mktemp("tiny")
    sources = [Path(json.__file__), Path(logging.__file__)]
    prepare.prepare("text", "bytes", folder / "data", files=sources, val_fraction=0.1)
    options = [
        "--training.steps", "2", "--lr-scheduler.warmup-steps", "1",
        "--metrics.log-freq", "1", "--validator.samples", "16",
        "--training.seq-len", "32", "--training.global-batch-size", "8",
        "--dataloader.dataset-path", folder / "data",
    ]  # fmt: skip
    jobs = {name: ["--config", name, *options] for name in TINY}
    return train_all(jobs, folder, num_layers=1)


@pytest.mark.application
@pytest.mark.parametrize("name", TINY)
def test_two_steps_of_a_tiny_recipe(name, trained):
    shown = losses(trained[name])
    assert sorted(shown) == [1, 2], trained[name]
    assert shown[1] == pytest.approx(math.log(257), abs=0.2)  # before the first step
    held_out = losses(trained[name], "validation loss")
    assert held_out[2] < held_out[1] - 0.2
