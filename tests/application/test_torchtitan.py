"""MARS in torchtitan's own configurations, on its own models."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from examples import torchtitan_llama3
from tests import titan_models as titan  # it prepares torchtitan for a CPU

# isort: split
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer import ParamGroupConfig

from marsopt import MARS
from marsopt.interop.torchtitan import (
    MarsOptimizersContainer,
    build_mars,
    default_mars,
)
from marsopt.optim.groups import kinds_of, values_of
from tests.library.test_guide import snippets
from tests.processes import spawn

# two iterations: what the products of Newton-Schulz take is most of a step
EAGER = dict(compile=False, ns_dtype="float32", ns_steps=2)
RULES = {
    "mars-adamw": default_mars(mars_type="mars-adamw", lr=3e-3, **EAGER),
    "mars-m": default_mars(mars_type="mars-m", lr=3e-3, **EAGER),
}
# each model and each rule: a matrix rule where experts are stacks
JOBS = [("llama3", "mars-adamw"), ("deepseek_v3", "mars-m")]


@pytest.fixture(scope="module")
def runs():
    """Every job, on one rank and on two."""
    jobs = [(model, RULES[rule]) for model, rule in JOBS]
    found = [spawn(titan.train, world, jobs, seconds=900)[0] for world in (1, 2)]
    return dict(zip(JOBS, zip(*found, strict=True), strict=True))


@pytest.mark.processes
@pytest.mark.parametrize("model, rule", JOBS)
def test_torchtitans_models_train_alike_on_one_rank_and_two(runs, model, rule):
    one, two = runs[model, rule]
    assert two.losses == pytest.approx(one.losses, rel=1e-5)
    assert one.losses[-1] < 0.95 * one.losses[0]
    for name, moved in one.moved.items():
        # experts compute in bfloat16 whatever the configuration says, and few tokens
        # reach each: what their gradients lack in rank Newton-Schulz makes of rounding
        bound = 1e-3
        if model == "deepseek_v3":
            bound = 0.15 if ".moe." in name else 1e-2
        assert (two.moved[name] - moved).norm() < bound * moved.norm(), name


# whose runs are stopped, and go on: with all kinds of state
STOPPED = default_mars(
    mars_type="mars-soap", lr=3e-3, sides="short", precondition_frequency=2, **EAGER
)


def stopped(rank, world, folder):
    """A run, and one that went on from its last but one checkpoint."""

    def configuration():
        config = titan.configuration("llama3", STOPPED)
        config.dump_folder = folder
        config.checkpoint = CheckpointManager.Config(
            enable=True, interval=3, last_save_model_only=False, keep_latest_k=0
        )
        return config

    whole = titan.trained(configuration())
    if rank == 0:
        (Path(folder) / "checkpoint" / "step-5").rename(f"{folder}/away")
    dist.barrier()
    again = titan.trained(configuration())
    return whole, again


@pytest.mark.processes
def test_a_run_goes_on_from_its_checkpoint(tmp_path):
    """With llama3's fused projection, which torchtitan splits in checkpoints and joins
    after the optimizer was loaded.
    """
    ((whole, again), _) = spawn(stopped, 2, str(tmp_path), seconds=300)
    assert again.losses == whole.losses[3:]
    for name, moved in whole.moved.items():
        assert torch.equal(again.moved[name], moved), name


# ---- the container -------------------------------------------------------------------


class Part(nn.Module):
    """A language model, or a part of one, under torchtitan's names."""

    def __init__(self, embeds=True, heads=True):
        super().__init__()
        if embeds:
            self.tok_embeddings = nn.Embedding(8, 4)
        self.layers = nn.ModuleDict({"0": nn.Linear(4, 4, bias=False)})
        self.experts = nn.Parameter(torch.randn(2, 4, 6))
        self.router = nn.ModuleDict({"gate": nn.Linear(4, 2, bias=False)})
        self.norm = nn.RMSNorm(4)
        if heads:
            self.lm_head = nn.Linear(4, 8, bias=False)

    def forward(self, x):
        return self.norm(self.layers["0"](x))


def routes(optimizers) -> dict[str, str]:
    """{parameter: what moves it}"""
    found = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            rules = [type(optimizer).__name__] * len(group["params"])
            if isinstance(optimizer, MARS):
                rules = [values_of(group, k)["mars_type"] for k in kinds_of(group)]
            found |= zip(group["param_names"], rules, strict=True)
    return found


def config(*groups, **factory) -> MarsOptimizersContainer.Config:
    return MarsOptimizersContainer.Config(
        param_groups=[
            ParamGroupConfig(pattern=p, optimizer_name=name, optimizer_kwargs=options)
            for p, name, options in groups
        ],
        optimizer_factory_kwargs_by_name={"MARS": dict(compile=False) | factory},
    )


def test_default_mars_gives_layers_and_experts_to_the_rule_and_the_rest_to_adamw():
    container = default_mars(mars_type="mars-m", lr=0.01, **EAGER).build(
        model_parts=[Part()]
    )
    rule = {n for n, kind in routes(container).items() if kind == "mars-m"}
    assert rule == {"layers.0.weight", "experts"}
    (mars,) = container.optimizers
    (layers,) = (g for g in mars.param_groups if g["mars_type"] == "mars-m")
    vectors = values_of(layers, is_matrix=False)
    assert vectors["lr"] * vectors["lr_ratio"] == 0.01  # one rate
    assert vectors["weight_decay"] == 0.0
    assert (layers["matrices"], layers["lr"]) == ("batched", 0.01)
    state = {
        name: p
        for group in mars.param_groups
        for name, p in zip(group["param_names"], group["params"], strict=True)
    }
    assert "exp_avg_sq" not in mars.state[state["experts"]]
    assert "exp_avg_sq" in mars.state[state["norm.weight"]]


def test_the_example_trains_llama3_8b_by_moonlight():
    trained = torchtitan_llama3.llama3_8b_mars()
    assert len(trained.model_spec.model.layers) == 32
    assert trained.checkpoint.interval == 500
    (mars,) = trained.optimizer.build(model_parts=[Part()]).optimizers
    assert {g["mars_type"] for g in mars.param_groups} == {"moonlight", "adamw"}
    assert {g["lr"] for g in mars.param_groups} == {3e-3}


def test_what_the_page_shows_splits_the_fused_projection_into_heads():
    part = Part()
    part.wqkv = nn.Linear(4, 48 * 2, bias=False)
    names = dict(config=titan.configuration("llama3", None), default_mars=default_mars)
    (code,) = snippets(Path(__file__).parents[2] / "docs/setups.md")["torchtitan"]
    exec(code, names | dict(dataclasses=dataclasses))
    (mars,) = names["config"].optimizer.build(model_parts=[part]).optimizers
    splits = {n: g.get("splits") for g in mars.param_groups for n in g["param_names"]}
    assert splits.pop("wqkv.weight") == 48 and set(splits.values()) == {None}


def test_mars_stands_beside_torchs_optimizers_and_the_first_match_wins():
    container = config(
        (r"norm", "AdamW", dict(lr=0.1, fused=False)),
        (r"layers\.", "MARS", dict(mars_type="muon", lr=0.1)),
        (r".*", "MARS", dict(mars_type="mars-adamw", lr=0.2)),
    ).build(model_parts=[Part()])
    found = routes(container)
    assert found["norm.weight"] == "AdamW" and found["layers.0.weight"] == "muon"
    assert found["lm_head.weight"] == "mars-adamw"
    assert found["experts"] == "adamw"  # no matrix, unless batches are
    assert len(container.optimizers) == 2
    part = container.model_parts[0]
    for p in part.parameters():
        p.grad = torch.randn_like(p)
    before = {n: p.detach().clone() for n, p in part.named_parameters()}
    container.step()
    assert all(not torch.equal(before[n], p) for n, p in part.named_parameters())
    saved = container.state_dict()
    assert saved["param_groups.layers.0.weight.mars_type"] == "muon"
    container.load_state_dict(saved)


def test_parts_of_a_model_need_not_have_every_group():
    """As pipeline stages have it; each part has an optimizer of its own."""
    parts = [Part(heads=False), Part(embeds=False)]
    container = default_mars(**EAGER).build(model_parts=parts)
    assert len(container.optimizers) == 2
    groups = [
        (r"tok_embeddings", "MARS", dict(lr=0.1)),
        (r"lm_head", "MARS", dict(lr=0.1)),
        (r".*", "MARS", dict(lr=0.1)),
    ]
    container = config(*groups).build(model_parts=parts)
    assert [len(mars.param_groups) for mars in container.optimizers] == [2, 2]


REFUSED = {
    "no parameters": ("lm_haed", "MARS", "got the pattern 'lm_haed', for which no"),
    "no expression": ("(", "MARS", "expected a regular expression"),
    "no optimizer": ("norm", "NoSuch", "NoSuch"),
}


@pytest.mark.parametrize(("pattern", "name", "message"), REFUSED.values(), ids=REFUSED)
def test_a_group_that_builds_nothing_is_refused(pattern, name, message):
    with pytest.raises((ValueError, NotImplementedError), match=message):
        config((pattern, name, {}), (".*", "MARS", {})).build(model_parts=[Part()])


def test_a_pattern_of_frozen_parameters_is_no_misspelling():
    """But a model without trained parameters is refused."""
    part = Part()
    part.tok_embeddings.requires_grad_(False)
    groups = [("tok_embeddings", "AdamW", {}), (r"l|e|n|r", "MARS", {})]
    assert len(config(*groups).build(model_parts=[part]).optimizers) == 1
    default_mars(0.1, **EAGER).build(model_parts=[nn.Identity(), Part()])
    part.requires_grad_(False)
    for made in (config(*groups), default_mars(0.1, **EAGER)):
        with pytest.raises(ValueError, match="got no parameter that requires a grad"):
            made.build(model_parts=[part])


def test_options_of_the_whole_optimizer_may_stand_in_groups_that_agree():
    own = dict(mars_type="mars-m", ns_dtype="float32", state_dtype="float32")
    container = config(("layers", "MARS", own), (".*", "MARS", {})).build(
        model_parts=[Part()]
    )
    assert "ns_dtype" not in container.optimizers[0].param_groups[0]
    groups = default_mars(0.1, master_weight_bits=24, **EAGER)
    container = groups.build(model_parts=[Part().bfloat16()])
    names = {name for name, _ in Part().named_parameters()}
    assert container.optimizers[0].master_weights().keys() == names
    with pytest.raises(ValueError, match="expected one value"):
        build_mars([dict(params=[], ns_dtype=d) for d in ("float32", "bfloat16")])
    with pytest.raises(ValueError, match="expected one value"):
        build_mars([dict(params=[], correction="approximate")], correction="exact")
    build_mars([dict(params=[], ns_dtype="float32")], ns_dtype=torch.float32)
    with pytest.raises(ValueError, match="expected the name of a dtype"):
        build_mars([dict(params=[], ns_dtype="float31")])


def test_a_recipe_may_name_its_own_groups():
    """Of MARS alone, which clips the norm of all gradients; others are refused."""
    from train.engine.titan_optim import MarsOptimizers
    from train.errors import UserError

    own = [
        ParamGroupConfig(
            pattern="experts",
            optimizer_name="MARS",
            optimizer_kwargs=dict(matrices="batched"),
        ),
        ParamGroupConfig(
            pattern=".*",
            optimizer_name="MARS",
            optimizer_kwargs=dict(mars_type="adamw", lr=0.5),
        ),
    ]
    options = dict(mars_type="mars-m", lr=0.25, compile=False, param_groups=own)
    mars = MarsOptimizers.Config(**options).build(model_parts=[Part()]).mars
    found = [(group["mars_type"], group["lr"]) for group in mars.param_groups]
    assert list(dict.fromkeys(found)) == [("mars-m", 0.25), ("adamw", 0.5)]
    own[1] = ParamGroupConfig(
        pattern=".*",
        optimizer_name="AdamW",
        optimizer_kwargs=dict(lr=0.5, fused=False),
    )
    with pytest.raises(UserError, match="expected one MARS"):
        MarsOptimizers.Config(**options).build(model_parts=[Part()])
    own[1].pattern = "no such"
    with pytest.raises(UserError, match="got the pattern 'no such'"):
        MarsOptimizers.Config(**options).build(model_parts=[Part()])
