"""Param groups of a whole model: which rule moves which parameter, by which numbers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from marsopt.optim.roles import Role, roles
from marsopt.rules import checks
from marsopt.rules.registry import NamedRule, named

# Of the AdamW beside rules whose authors give it numbers of its own: the defaults of
# their class, which their recipes for GPT-2 small have too (optimizers/mars.py).
LR_1D, BETAS_1D, WEIGHT_DECAY_1D = 3e-3, (0.9, 0.95), 0.1

# Which parameters share a group.
TABLES: tuple[Role, ...] = ("embedding", "head", "router")
REST: tuple[Role, ...] = ("vector", "convolution", "experts", "other")


def param_groups(
    model: nn.Module,
    mars_type: str = "mars-adamw",
    *,
    lr: float | Tensor,
    weight_decay: float | None = None,
    lr_1d: float | Tensor | None = None,
    betas_1d: tuple[float, float] | None = None,
    weight_decay_1d: float | None = None,
    experts: bool = True,
    convolutions: bool = False,
) -> list[dict[str, Any]]:
    """Return param groups for ``MARS``: hidden matrices by ``mars_type``, everything
    else as the authors' recipes for this rule have it.

        groups = marsopt.param_groups(model, "moonlight", lr=6e-3)
        optimizer = MARS(groups, correction="transport", gamma=0.05)

    Everything else is told by modules and by names: embeddings (tied output heads among
    them), output heads, routers of experts; and vectors: norms, biases, whatever else
    is no matrix. Who moves it, by which numbers:

    - "moonlight", "mars-m", "normuon", "mars-normuon": AdamW, at ``lr`` and
      ``weight_decay``, betas (0.9, 0.95), eps before debiasing (MARS_M/train_mars_m.py,
      train_moonlight.py).
    - "muon", "mars-shampoo": AdamW, at 3e-3, betas (0.9, 0.95), decay 0 of embeddings,
      heads and routers, 0.1 of vectors (the recipes' numbers; the recipes themselves
      give embeddings to the matrix rule).
    - "mars-adamw", "mars-lion": embeddings, heads and routers take the rule itself,
      without decay; vectors AdamW, at 3e-3, betas (0.9, 0.95), decay 0.1 (the recipes
      of GPT-2 small; larger ones have a smaller rate).
    - "adamw", "lion": the rule itself, without decay.

    Every group names its rule, its lr and its decay, and may be changed before it is
    passed on. With transport, groups that AdamW moves look ahead by ``gamma`` (a group
    may have one of its own).

    Args:
        model: on any device, sharded, compiled, checkpointed or not. Parameters that do
            not require a gradient are left out.
        mars_type: a name in ``marsopt.REGISTRY``.
        lr: learning rate of hidden matrices, and of what takes the rule itself.
        weight_decay: of hidden matrices; None = the rule's default.
        lr_1d, betas_1d, weight_decay_1d: of what AdamW moves beside the rule (with
            "adamw" and "lion": of vectors), embeddings among it; None = as above.
        experts: give weights of experts, (num_experts, rows, cols), to the rule as
            batches of matrices; False: they are moved as vectors are. torchtitan's
            fused w13 always is: no two of its dims are a matrix.
        convolutions: give kernels (out, in, *kernel) to the rule as matrices of out
            rows; False: they are moved as vectors are, which is how the authors' code
            has it. "adamw" and "lion" move experts and kernels as they do matrices,
            whatever is said here.

    Returns:
        Groups with (name, tensor) pairs in "params", every parameter once: matrices,
        experts, convolutions, embeddings with heads and routers, vectors; those that
        are empty are left out.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: it has no parameter that requires a gradient, or an unknown
            ``mars_type``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"got {type(model).__name__}, expected a torch.nn.Module: pass the model "
            "itself, whose modules say what its parameters are"
        )
    row = named(mars_type)
    checks.at_least_zero("lr", lr)
    decay = row.arguments["weight_decay"] if weight_decay is None else weight_decay
    hidden = dict(mars_type=row.name, lr=lr, weight_decay=decay)
    tables, rest = _beside(row, hidden)
    given = dict(lr=lr_1d, betas=betas_1d, weight_decay=weight_decay_1d)
    given = {name: value for name, value in given.items() if value is not None}
    rest |= given
    if row.matrix_only:
        tables |= given

    found: dict[Role, list] = {}
    for name, p, role in roles(model):
        found.setdefault(role, []).append((name, p))
    if not found:
        raise ValueError(
            "got a model without a parameter that requires a gradient, expected one at "
            "least: set requires_grad_() before the groups are made"
        )
    of_rule: dict[Role, dict[str, Any]] = {"matrix": hidden}
    if experts or row.others == "itself":
        of_rule["experts"] = hidden | {"matrices": "batched"}
    if convolutions or row.others == "itself":
        of_rule["convolution"] = hidden | {"matrices": "flattened"}
    rows = [((role,), options) for role, options in of_rule.items()]
    rows += [(TABLES, tables), (tuple(r for r in REST if r not in of_rule), rest)]
    groups = [
        {"params": [pair for role in some for pair in found.get(role, ())], **options}
        for some, options in rows
    ]
    return [group for group in groups if group["params"]]


def _beside(
    row: NamedRule, hidden: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what moves embeddings, heads and routers beside a rule, and what moves
    vectors, where nothing is said.
    """
    undecayed = hidden | {"weight_decay": 0.0}
    if row.others == "itself":
        return undecayed, dict(undecayed)
    adamw = hidden | dict(mars_type="adamw", betas=BETAS_1D)
    if row.others == "adamw":
        return adamw | {"epsilon_hat": True}, adamw | {"epsilon_hat": True}
    rest = adamw | dict(lr=LR_1D, weight_decay=WEIGHT_DECAY_1D)
    return (rest | {"weight_decay": 0.0} if row.matrix_only else undecayed), rest
