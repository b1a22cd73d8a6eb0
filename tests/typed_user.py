"""A user's program, which nobody runs: `make lint` checks that types are as said here.

Calls that are wrong stand under an ignore, which is an error where it is not needed.
"""

from typing import Any, assert_type

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import marsopt
from marsopt.parallel import MeshCollectives


def train(model: nn.Module, x: Tensor) -> None:
    groups = marsopt.param_groups(model, "moonlight", lr=6e-3)
    assert_type(groups, list[dict[str, Any]])
    optimizer = marsopt.MARS(groups, max_norm=1.0)
    assert_type(optimizer, marsopt.MARS)
    whole = marsopt.for_model(model, "moonlight", gamma=0.1, adapters="adamw")
    assert_type(whole, marsopt.MARS)
    marsopt.MARS(model.parameters(), lr=3e-3)
    marsopt.MARS(model.named_parameters(), betas=(0.95, 0.99))

    marsopt.for_model(model, "soap-muon", sides="short", log_time=10, splits={"qkv": 3})
    marsopt.MARS([x], mars_type="moonlight", ns_steps=5, splits=(4, 4), base_lr=6e-3)
    marsopt.mars(mars_type="moonlight", max_norm=1.0, betas_1d=(0.9, 0.95))
    whole_rule = marsopt.rule_for(model, "mars-m", lr=6e-3, convolutions=True)
    assert_type(whole_rule, marsopt.Rule)
    whole_rule.step({"w": x}, {"w": x}, {}, lr=whole_rule.lr * 0.5)

    rule = marsopt.rule("mars-adamw", gamma=0.025)
    assert_type(rule, marsopt.Rule)
    state = rule.init([x])
    moved, state = rule.step([x], [x], state, lr=3e-3)
    assert_type(moved, list[Tensor])  # the container that was given
    named, state = rule.step({"w": x}, {"w": x}, state, lr=x, gamma=x)
    assert_type(named, dict[str, Tensor])
    flat, _ = rule.step(marsopt.FlatGroup.pack([x]), [x], state, lr=3e-3)
    assert_type(flat, marsopt.FlatGroup)
    assert_type(marsopt.newton_schulz(x), Tensor)


def shard_and_measure(model: nn.Module, mesh: DeviceMesh) -> None:
    collectives = MeshCollectives(mesh)
    marsopt.MARS(model.parameters(), lr=3e-3, collectives=collectives)
    rule = marsopt.rule("mars-soap-muon", sides="short", precondition_frequency=5)
    rule.init(dict(model.named_parameters()), collectives=collectives)
    optimizer = marsopt.MARS(model.parameters())
    report = marsopt.profile(optimizer.step, steps=3)
    assert_type(report.num_bytes, int | None)


def wrong(model: nn.Module, x: Tensor) -> None:
    marsopt.param_groups(model)  # type: ignore[call-arg]  # no lr
    marsopt.param_groups(model, lr="fast")  # type: ignore[arg-type]  # a word
    marsopt.for_model(model, lr="fast")  # type: ignore[arg-type]  # a word
    marsopt.rule_for(model, compile=True)  # type: ignore[call-arg]  # of for_model
    marsopt.MARS([1, 2])  # type: ignore[arg-type]  # numbers for tensors
    marsopt.MARS([x], betas=0.9)  # type: ignore[arg-type]  # one for two
    marsopt.newton_schulz([x])  # type: ignore[arg-type]  # a list for a tensor
    marsopt.rule()  # type: ignore[call-arg]  # no name
    marsopt.rule(marsopt.AdamW)  # type: ignore[arg-type]  # a class for its name
    marsopt.rule("moonligth")  # type: ignore[arg-type]  # no rule
    marsopt.for_model(model, "adam")  # type: ignore[arg-type]  # no rule
    marsopt.param_groups(model, "adam", lr=1.0)  # type: ignore[arg-type]  # no rule
    marsopt.MARS([x], mars_type="adam")  # type: ignore[arg-type]  # no rule
    marsopt.mars(mars_type="adam")  # type: ignore[arg-type]  # no rule
    marsopt.for_model(model, grad_clip=1.0)  # type: ignore[call-arg]  # max_norm
    marsopt.for_model(model, sides="long")  # type: ignore[arg-type]  # both or short
    marsopt.param_groups(model, lr=1.0, clip=1.0)  # type: ignore[call-arg]  # of MARS
    marsopt.MARS([x], ns_step=5)  # type: ignore[call-arg]  # ns_steps
    marsopt.rule("soap", side="both")  # type: ignore[call-arg]  # sides
    marsopt.mars(ns_steps="five")  # type: ignore[arg-type]  # a word
    marsopt.AdamW(eps="small")  # type: ignore[arg-type]  # a word
    marsopt.AdamW(gamma=0.1)  # type: ignore[call-arg]  # it has none
    marsopt.mars_adamw()  # type: ignore[attr-defined]  # rules are no functions
    marsopt.rule("adamw").init(x)  # type: ignore[arg-type]  # no container
    MeshCollectives("cuda")  # type: ignore[arg-type]  # a word for a mesh
