"""Param groups of a whole model: which rule moves which parameter, by which numbers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from marsopt.optim.roles import Role, roles
from marsopt.rules import checks
from marsopt.rules.registry import NamedRule, named

# What has the group of the embeddings.
TABLES: tuple[Role, ...] = ("embedding", "head", "router")
NUMBERS = ("lr", "betas", "weight_decay")


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
    - "adamw", "nadamw", "lion": the rule itself, without decay.

    Every group names its rule, its lr and its decay, so that these arguments of MARS no
    longer reach it: give them here. It may be changed before it is passed on. With
    transport, groups that AdamW moves look ahead by ``gamma``, which a group may have
    of its own, not by ``gamma_1d``.

    Args:
        model: on any device, sharded, compiled, checkpointed or not. Parameters that do
            not require a gradient are left out.
        mars_type: a name in ``marsopt.REGISTRY``.
        lr: learning rate of hidden matrices, and of what takes the rule itself.
        weight_decay: of hidden matrices; None = the rule's default.
        lr_1d, betas_1d, weight_decay_1d: of what AdamW moves beside the rule,
            embeddings among it (with "adamw", "nadamw" and "lion": of vectors); None =
            as above.
        experts: give weights of experts, (num_experts, rows, cols), to the rule as
            batches of matrices; False: they are moved as vectors are. torchtitan's
            fused w13 always is: no two of its dims are a matrix.
        convolutions: give kernels (out, in, *kernel) to the rule as matrices of out
            rows; False: they are moved as vectors are, which is how the authors' code
            has it. "adamw", "nadamw" and "lion" move experts and kernels as they do
            matrices, whatever is said here.

    Returns:
        Groups with (name, tensor) pairs in "params", every parameter once, in the order
        of the model: matrices, experts, convolutions, embeddings with heads and
        routers, vectors; those that are empty are left out.

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
    tables, rest = _beside(
        row, hidden, dict(lr=lr_1d, betas=betas_1d, weight_decay=weight_decay_1d)
    )
    everything = row.others == "itself"
    parts: dict[str, dict[str, Any]] = {"matrix": hidden}
    if experts or everything:
        parts["experts"] = hidden | {"matrices": "batched"}
    if convolutions or everything:
        parts["convolution"] = hidden | {"matrices": "flattened"}
    parts |= {"tables": tables, "rest": rest}
    groups = {part: {"params": [], **options} for part, options in parts.items()}
    for name, p, role in roles(model):
        beside = "tables" if role in TABLES else "rest"
        groups[role if role in parts else beside]["params"].append((name, p))
    filled = [group for group in groups.values() if group["params"]]
    if not filled:
        raise ValueError(
            "got a model without a parameter that requires a gradient, expected one at "
            "least: set requires_grad_() before the groups are made"
        )
    return filled


def _beside(
    row: NamedRule, hidden: dict[str, Any], given: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what moves embeddings, heads and routers beside a rule, and what moves
    vectors; ``given`` takes the place of AdamW's numbers where it is not None.
    """
    given = {name: value for name, value in given.items() if value is not None}
    undecayed = hidden | {"weight_decay": 0.0}
    if row.others == "itself":
        return undecayed, undecayed | given
    # None: as hidden matrices have it
    own = {name: row.hyperparameters[f"{name}_1d"] for name in NUMBERS}
    own = {name: value for name, value in own.items() if value is not None}
    # said, so that an argument of MARS for the rule does not change AdamW
    form = dict(mars_type="adamw", epsilon_hat=row.others == "adamw", nesterov=False)
    form["optimize_1d"] = False
    rest = hidden | form | own
    if not row.matrix_only:
        return undecayed, rest | given
    tables = rest if row.others == "adamw" else rest | {"weight_decay": 0.0}
    return tables | given, rest | given
