"""A user's program, which nobody runs: `make lint` checks that types are as said here.

Calls that are wrong stand under an ignore, which is an error where it is not needed.
"""

from typing import Any, assert_type

from torch import Tensor, nn

import marsopt


def train(model: nn.Module, x: Tensor) -> None:
    groups = marsopt.param_groups(model, "moonlight", lr=6e-3)
    assert_type(groups, list[dict[str, Any]])
    optimizer = marsopt.MARS(groups, correction="transport", gamma=0.05)
    assert_type(optimizer, marsopt.MARS)
    marsopt.MARS(model.parameters(), lr=3e-3)
    marsopt.MARS(model.named_parameters(), betas=(0.95, 0.99))

    rule = marsopt.mars_adamw(gamma=0.025)
    assert_type(rule, marsopt.Rule)
    state = rule.init([x])
    rule.step([x], [x], state, lr=3e-3)
    assert_type(marsopt.newton_schulz(x), Tensor)


def wrong(model: nn.Module, x: Tensor) -> None:
    marsopt.param_groups(model)  # type: ignore[call-arg]  # no lr
    marsopt.param_groups(model, lr="fast")  # type: ignore[arg-type]  # a word
    marsopt.MARS([1, 2])  # type: ignore[arg-type]  # numbers for tensors
    marsopt.MARS([x], betas=0.9)  # type: ignore[arg-type]  # one for two
    marsopt.newton_schulz([x])  # type: ignore[arg-type]  # a list for a tensor
