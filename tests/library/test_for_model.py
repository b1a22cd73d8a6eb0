"""marsopt.for_model: what one line chooses for a model, however it is wrapped."""

from __future__ import annotations

import copy
import io
import json
import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers "fake")

import configs
import marsopt
from configs.published import LR
from marsopt import LOCAL, MARS, REGISTRY, for_model
from marsopt.models.for_model import LEARNING_RATES, RULES, learning_rate
from marsopt.parallel import MeshCollectives
from tests.library.test_param_groups import SHAPE, adapted, everything
from tests.processes import spawn
from train.gpt2 import GPT2

TOKENS = torch.arange(12).view(2, 6)


def gpt2(seed=0) -> GPT2:
    torch.manual_seed(seed)
    model = GPT2(SHAPE)
    model.init_weights()
    return model


def loss_of(model, tokens=TOKENS):
    logits = model(tokens).flatten(0, 1)
    return nn.functional.cross_entropy(logits, tokens.roll(-1, 1).flatten())


def train(model, optimizer, num_steps=3, whole=None):
    """Steps; ``whole`` is what the loop calls, if that is not ``model``."""
    for _ in range(num_steps):
        loss_of(model if whole is None else whole).backward()
        optimizer.step()
        optimizer.zero_grad()


def by_hand(model, **options) -> MARS:
    """What the docstring says that it is."""
    groups = marsopt.param_groups(model, "moonlight", lr=0.02)
    return MARS(groups, compile=False, **dict(max_norm=1.0) | options)


def assert_same(model, other):
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name


# ---- one line ------------------------------------------------------------------------


def test_it_is_what_its_docstring_says():
    one, two = gpt2(), gpt2()
    optimizer = for_model(one, lr=0.02, compile=False)
    other = by_hand(two)
    train(one, optimizer)
    train(two, other)
    assert_same(one, two)
    saved = optimizer.state_dict()["param_groups"]
    assert saved == other.state_dict()["param_groups"]


OPTIONS = {
    "": {},
    "many": dict(weight_decay=0.3, lr_1d=1e-3, convolutions=True, splits={"qkv": 3}),
    "in log time": dict(log_time=8, betas=(0.9, 0.99), max_norm=None),
    "exact": dict(correction="exact", max_norm=None, clip=0.5),
}
DOORS = [(rule, "") for rule in REGISTRY] + [
    *((rule, "many") for rule in ("moonlight", "mars-lion", "muon")),
    *((rule, "in log time") for rule in ("adamw", "normuon", "soap")),
    *((rule, "exact") for rule in ("mars-adamw", "mars-m")),
]


@pytest.mark.parametrize("rule, options", DOORS)
def test_both_doors_are_one_optimizer(rule, options):
    """Ten steps of ``for_model`` and ``rule_for`` are equal to the bit, but SOAP's."""
    is_exact = options == "exact"
    torch.manual_seed(0)
    model, given = everything(), dict(lr=0.02) | OPTIONS[options]
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = for_model(model, rule, compile=False, **given)
    pure = marsopt.rule_for(model, rule, **given)
    state = pure.init(params)
    h = {name: torch.zeros_like(p) for name, p in params.items()}

    def differentiate(grads):
        for name, p in model.named_parameters():
            p.grad = grads[name].clone()

    for count in range(10):
        grads, new_h = ({n: torch.randn_like(p) for n, p in h.items()} for _ in "gh")
        differentiate(new_h)
        optimizer.update_previous_grad()
        differentiate(grads)
        optimizer.step()
        optimizer.update_last_grad()
        more = dict(reference=h if is_exact else None, count=count)
        params, state = pure.step(params, grads, state, lr=pure.lr, **more)
        h = new_h
    # SOAP's bases differ in the last bit, by the batch that a matrix is in
    tolerance = dict(rtol=0, atol=1e-6 if "soap" in rule else 0)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p, params[name], msg=name, **tolerance)


def test_options_go_to_the_groups_and_to_the_class():
    model = gpt2()
    optimizer = for_model(
        model,
        "mars-adamw",
        lr=0.02,
        correction="approximate",
        lr_1d=0.5,
        weight_decay=0.25,
        gamma=0.125,
        max_norm=None,
        nonfinite="raise",
        compile=False,
    )
    matrices, tables, vectors = optimizer.param_groups
    assert (matrices["weight_decay"], vectors["lr_ratio"]) == (0.25, 0.5 / 0.02)
    optimizer.add_param_group(dict(params=[("more", nn.Parameter(torch.ones(2, 2)))]))
    later = optimizer.param_groups[-1]
    assert (later["lr"], later["weight_decay"]) == (0.02, 0.25)
    assert {group["gamma"] for group in optimizer.param_groups} == {0.125}
    assert optimizer.max_norm is None
    assert "correction: approximate" in str(optimizer)
    plain = for_model(gpt2(), "mars-m", lr=0.1, correction="exact", compile=False)
    assert plain.param_groups[0]["gamma"] == 0.025  # the authors'
    soap = for_model(gpt2(), "soap-muon", lr=0.1, sides="short", compile=False)
    assert soap.param_groups[0]["sides"] == "short"  # an option of that rule alone


LINES = {
    "moonlight": (
        ["moonlight: 8 matrices, 1536 parameters, lr 0.017"]
        + ["adamw: 1 matrices (wte.weight), 296 parameters, lr 0.017"]
        + ["frozen: 48 parameters", "correction: None", "max_norm: 1.0"]
    ),
    "mars-adamw": (
        ["mars-adamw: 9 matrices, 1792 parameters, lr 0.1"]
        + ["adamw: 0 matrices, 40 parameters, lr 0.003", "frozen: 48 parameters"]
        + ["correction: approximate", "max_norm: 1.0"]
    ),
    "lion": (
        ["lion: 9 matrices, 1832 parameters, lr 0.1", "frozen: 48 parameters"]
        + ["correction: None", "max_norm: 1.0"]
    ),
}


@pytest.mark.parametrize("rule", LINES)
def test_one_line_and_print_say_what_moves_what(rule, caplog):
    caplog.set_level(logging.INFO)
    model = gpt2()
    model.wpe.requires_grad_(False)
    lr = None if rule == "moonlight" else 0.1
    optimizer = for_model(model, rule, lr=lr, compile=False)
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    lines = [*LINES[rule], "collectives: LOCAL"]
    by_size = ["marsopt: lr 0.017 by size (1832 parameters)"]
    source = by_size if lr is None else []
    assert said == [*source, f"marsopt.MARS: {'; '.join(lines)}"]
    head = "".join(f"    {text}\n" for text in lines)
    assert str(optimizer).startswith(f"MARS (\n{head}Parameter Group 0\n")


@pytest.mark.parametrize("are_named", [True, False])
def test_the_class_says_what_it_gave_to_whom_if_it_knows_names(are_named, caplog):
    caplog.set_level(logging.INFO)
    model = gpt2()
    params = model.named_parameters() if are_named else model.parameters()
    MARS(params, mars_type="moonlight", compile=False)
    said = [text for text in caplog.messages if text.startswith("marsopt.MARS: ")]
    lines = [
        "marsopt.MARS: moonlight: 10 matrices, 1840 parameters, lr 0.003"
    ] * are_named
    assert [text.partition(";")[0] for text in said] == lines


def test_matrices_that_share_a_name_but_for_numbers_are_named_in_full():
    """So that the head among them can be checked."""
    model = nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 8), nn.Linear(8, 32))
    optimizer = for_model(model, lr=0.1, compile=False)
    assert "    adamw: 2 matrices (0.weight, 2.weight), 552 param" in str(optimizer)


def test_a_rule_for_a_model_takes_the_models_names():
    model = gpt2()
    rule = marsopt.rule_for(model, lr=0.1)
    params = {name: p.detach() for name, p in model.named_parameters()}
    for other in ([*params.values()], {f"module.{n}": p for n, p in params.items()}):
        with pytest.raises(ValueError, match=r"got params\[.*expected a name in named"):
            rule.init(other)
    some = {name: params[name] for name in ("wte.weight", "layers.0.attn_in.weight")}
    assert {*rule.init(some)} == {*[*rule.routes][:2]}
    with pytest.raises(TypeError, match="got .*'compile'.*of marsopt.rule_for"):
        marsopt.rule_for(model, compile=False)


def test_what_it_does_not_take():
    with pytest.raises(TypeError, match="got generator, expected a torch.nn.Module"):
        for_model(gpt2().parameters())
    with pytest.raises(TypeError, match="did you mean 'max_norm'"):
        for_model(gpt2(), lr=0.1, max_grad_norm=1.0)
    with pytest.raises(ValueError, match="got mars_type='moon'"):
        for_model(gpt2(), "moon")
    with pytest.raises(ValueError, match="got mars_type=0.001, .*: pass lr=0.001$"):
        for_model(gpt2(), 1e-3)
    with pytest.raises(TypeError, match="got lr='lion', .*: pass mars_type='lion'$"):
        MARS(gpt2().parameters(), "lion")
    with pytest.raises(ValueError, match="got no lr for 'lion', expected one"):
        for_model(gpt2(), "lion")
    bigrams = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))
    with pytest.raises(ValueError, match="without a hidden matrix for 'muon', expec"):
        for_model(bigrams, "Muon", lr=0.1)
    assert for_model(bigrams, "adamw", lr=0.1, compile=False)


# ---- what other tools read -----------------------------------------------------------


KEYS = dict(no_weight_decay=True, lr_scale=0.5, name="mine", l1=None)
HOW = [{}, *({name: True} for name in ("full_state_dict", "cpu_offload"))]
HOW += [dict(flatten_optimizer_state_dict=True, ignore_frozen_params=True)]


@pytest.mark.parametrize("how", HOW, ids=lambda how: " ".join(how))
@pytest.mark.parametrize("rule", ["adamw", "moonlight", "mars-soap"])
def test_other_tools_read_groups_and_state(rule, how):
    def build(model):
        own = dict(lr=0.02, log_time=8, betas=[0.9, 0.99], compile=False)
        made = for_model(model, rule, **own)
        for group in made.param_groups:
            group.update(KEYS)
        return made

    model, resumed = gpt2(), gpt2()
    optimizer, how = build(model), StateDictOptions(**how)
    train(model, optimizer, 2)
    groups = json.loads(json.dumps(optimizer.state_dict()["param_groups"]))
    assert all(group.items() >= KEYS.items() for group in groups)
    file = io.BytesIO()
    torch.save(copy.deepcopy(optimizer).state_dict(), file)
    assert b"marsopt" not in file.getvalue()  # which another program has not
    saved = get_optimizer_state_dict(model, optimizer, options=how)
    other = build(resumed)
    resumed.load_state_dict(model.state_dict())
    set_optimizer_state_dict(resumed, other, saved, options=how)
    train(model, optimizer, 2)
    train(resumed, other, 2)
    assert_same(model, resumed)


# ---- learning rates ------------------------------------------------------------------


def test_learning_rates_are_the_recipes():
    rates = dict(LEARNING_RATES)
    recipes = ["small_moonlight", "medium_moonlight", "large_moonlight"]
    recipes += ["xl_moonlight_fw"]
    for name in recipes:
        config = getattr(configs, name)()
        with torch.device("meta"):
            model = GPT2(config.model_spec.model.shape)
        num_params = sum(p.numel() for p in model.parameters())
        assert rates[num_params] == config.optimizer.lr, name
    assert len(rates) == len(recipes) + 1  # the study's
    for rule in RULES:
        assert LR[rule.replace("-", "_")] == LR["moonlight"]


@pytest.mark.parametrize(
    "num_params, lr",
    [
        (10, 1.7e-2),
        (123_264, 1.7e-2),
        (4_000_000, 1e-2),  # about halfway between two sizes
        (124_000_000, 6e-3),
        (500_000_000, 5e-3),
        (70_000_000_000, 3e-3),
    ],
)
def test_between_two_sizes_a_learning_rate_lies_on_a_line(num_params, lr):
    assert learning_rate(num_params) == lr


def test_what_is_fine_tuned_asks_for_a_learning_rate():
    model = adapted().requires_grad_(False)
    for name, p in model.named_parameters():
        p.requires_grad_("lora_A" in name or "lora_B" in name)
    with pytest.raises(ValueError, match="got no lr for a model of which 128 of"):
        for_model(model)
    optimizer = for_model(model, lr=1e-3, compile=False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    optimizer.step()
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) is not p.requires_grad, name
    beside = for_model(model, lr=1e-3, adapters="adamw", compile=False)
    trained = [
        group["mars_type"]
        for group in beside.param_groups
        if any(p.requires_grad for p in group["params"])
    ]
    assert trained == ["adamw"]


# ---- models as they are wrapped ------------------------------------------------------


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_trains_as_it_is(in_place):
    model, plain = gpt2(), gpt2()
    compiled = torch.compile(model, backend="eager", fullgraph=not in_place)
    if in_place:
        model.compile(backend="eager")
        compiled = model
    optimizer = for_model(compiled, lr=0.02, compile=False)
    other = for_model(plain, lr=0.02, compile=False)
    train(compiled, optimizer)
    train(plain, other)
    assert_same(compiled, plain)


def wrapped(rank, world, kind):
    """Losses, and the trained model, of one line on several ranks."""
    model = gpt2().double()
    if kind == "ddp":
        called = DistributedDataParallel(model)
    else:
        shape = (world,) if kind == "fsdp2" else (2, world // 2)
        names = ("replicas", "shards")[-len(shape) :]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for part in (*model.layers.values(), model):
            fully_shard(part, mesh=mesh)
            part.set_gradient_divide_factor(world)  # gloo cannot average
            part.set_force_sum_reduction_for_comms(True)
        called = model
        with torch.no_grad():  # after which the root's parameters are whole
            called(TOKENS)
    options = dict(ns_dtype=torch.float64, compile=False)
    optimizer = for_model(called, lr=0.02, **options)
    for step in range(3):
        rows = TOKENS.roll(step, 1)[rank % 2 :: 2]  # each row on half of the ranks
        loss_of(called, rows).backward()
        optimizer.step()
        optimizer.zero_grad()
    shown = str(optimizer)
    saved = called.state_dict()
    if kind == "ddp":
        return {name.removeprefix("module."): x for name, x in saved.items()}, shown
    return {name: x.full_tensor() for name, x in saved.items()}, shown


@pytest.mark.processes
@pytest.mark.parametrize("kind, world", [("ddp", 2), ("fsdp2", 2), ("hsdp", 4)])
def test_a_model_on_several_ranks_trains_as_on_one(kind, world):
    results = spawn(wrapped, world, kind)
    model = gpt2().double()
    options = dict(ns_dtype=torch.float64, compile=False)
    optimizer = for_model(model, lr=0.02, **options)
    for step in range(3):
        loss_of(model, TOKENS.roll(step, 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for whole, shown in results:
        for name, x in model.state_dict().items():
            torch.testing.assert_close(whole[name], x, rtol=1e-9, atol=1e-11)
        collectives = {
            "ddp": "DataParallel(2 ranks)",
            "fsdp2": "MeshCollectives(DeviceMesh((shards=2)",
        }
        assert f"collectives: {collectives.get(kind, 'MeshCollectives(')}" in shown


@pytest.fixture
def four_ranks():
    """Of which only this one exists."""
    dist.init_process_group("fake", rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def test_parameters_that_ddp_ignores_are_left_out(four_ranks, caplog):
    caplog.set_level(logging.INFO)
    model = gpt2()
    names = ["wte.weight", "layers.1.mlp_in.weight"]
    vars(model)["_ddp_params_and_buffers_to_ignore"] = names
    all_names = {name for name, _ in model.named_parameters()}
    called = torch.compile(DistributedDataParallel(model), backend="eager")
    optimizer = for_model(called, lr=0.1, compile=False)
    assert "marsopt: left out 2 tensors that DDP ignores" in caplog.messages
    rule = marsopt.rule_for(called, lr=0.1)
    taken = [n for group in optimizer.param_groups for n in group["param_names"]]
    for found in (taken, [n for r in rule.routes.values() for n in r.names]):
        plain = {name.removeprefix("_orig_mod.module.") for name in found}
        assert plain == all_names - {*names}
    alone = for_model(model, lr=0.1, compile=False).param_groups
    assert {n for group in alone for n in group["param_names"]} == all_names


def test_a_sharded_model_brings_its_largest_mesh(four_ranks):
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], mesh=two["shards"])
    fully_shard(model[1], mesh=two)
    optimizer = for_model(model, lr=0.1, compile=False)
    assert f"collectives: MeshCollectives({two})" in str(optimizer)
    given = MeshCollectives(two["shards"])
    assert f"{two['shards']}" in str(
        for_model(model, lr=0.1, collectives=given, compile=False)
    )
    plain = for_model(nn.Linear(4, 4), lr=0.1, compile=False)
    assert f"collectives: {LOCAL}" in str(plain)
