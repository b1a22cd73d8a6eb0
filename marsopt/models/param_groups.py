"""Param groups of a whole model: a rule for each parameter, with its numbers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor, nn

from marsopt.functional.authors import REST, rest_values
from marsopt.functional.buffers import check_unflattened
from marsopt.functional.keywords import Parts
from marsopt.models.names import TABLES
from marsopt.models.roles import roles, splits_of
from marsopt.models.walk import ignored_by_ddp
from marsopt.rules import checks
from marsopt.rules.checks import Number, Weight
from marsopt.rules.matrices import Matrices
from marsopt.rules.options import check_values
from marsopt.rules.registry import RuleName, named

log = logging.getLogger(__name__)


def param_groups(
    model: nn.Module,
    mars_type: RuleName = "mars-adamw",
    *,
    lr: float | Tensor,
    weight_decay: float | None = None,
    lr_1d: float | Tensor | None = None,
    betas_1d: tuple[Number, Number] | None = None,
    weight_decay_1d: float | None = None,
    nesterov_1d: Weight | None = None,
    log_time: float | None = None,
    experts: bool = True,
    convolutions: bool = False,
    adapters: Literal["matrix", "adamw"] = "matrix",
    splits: Mapping[str, Parts] = {},
) -> list[dict[str, Any]]:
    """Return param groups for ``MARS``: hidden matrices by ``mars_type``, everything
    else as the authors' recipes for this rule have it.

        groups = marsopt.param_groups(model, "moonlight", lr=6e-3)
        optimizer = MARS(groups, max_norm=1.0)

    A hidden matrix is the weight of a layer. Modules and names give the other roles:
    embeddings (tied output heads among them), routers of experts, output heads; and
    vectors: norms, biases and scales, also of two dims, and a model's own parameters of
    two dims that are no "weight". Heads are layers that the model declares
    (transformers' ``get_output_embeddings()``), layers with the name of a head (the
    table in marsopt/models/names.py), and the last Linear over the rows of an
    embedding. ``print`` of the optimizer names the matrices that AdamW has. The rules
    and their numbers:

    - "moonlight", "mars-m", "normuon", "mars-normuon": AdamW, at ``lr`` and
      ``weight_decay``, betas (0.9, 0.95), eps before debiasing (MARS_M/train_mars_m.py,
      train_moonlight.py).
    - "muon", "mars-shampoo": AdamW, at 3e-3, betas (0.9, 0.95), decay 0 of embeddings,
      heads and routers, 0.1 of vectors (the recipes' numbers; the recipes themselves
      give embeddings to the matrix rule).
    - "mars-adamw", "mars-lion": embeddings, heads and routers take the rule itself,
      without decay; vectors AdamW, at 3e-3, betas (0.9, 0.95), decay 0.1 (the recipes
      of GPT-2 small; larger models have a smaller rate).
    - "adamw", "nadamw", "lion": the rule itself, without decay.

    Every group names its rule, its lr and its decay, so that these arguments of MARS no
    longer reach it: give them here, and ``log_time``. All groups have one ``lr``, which
    a schedule may write into them; ``lr_ratio`` says how many times that is a group's
    rate. A group may be changed before it is passed on.

    Args:
        model: on any device, sharded, compiled, checkpointed, adapted (PEFT) or not.
            Parameters that do not require a gradient have their places too, for when
            they do: until then they cost nothing. Parameters that
            DistributedDataParallel ignores are left out, since their gradients differ
            between ranks.
        mars_type: a name in ``marsopt.REGISTRY``.
        lr: learning rate of all parameters that take the rule itself.
        weight_decay: of hidden matrices; None = the rule's default.
        lr_1d, betas_1d, weight_decay_1d: of AdamW's parameters beside the rule,
            embeddings among them (with "adamw", "nadamw" and "lion": of vectors); None
            = as above.
        nesterov_1d: Nesterov's momentum of the same, as ``MARS``'s ``nesterov``; None =
            off, or 0.2 with ``log_time``.
        log_time: of all groups, as in ``MARS``.
        experts: give weights of experts, (num_experts, rows, cols), to the rule as
            batches of matrices; False: they are updated as vectors are. torchtitan's
            fused w13 always is: no two of its dims are a matrix.
        convolutions: give kernels (out, in, *kernel) to the rule as matrices of out
            rows; False: they are updated as vectors are, which is how the authors' code
            has it. "adamw", "nadamw" and "lion" update experts and kernels as they do
            matrices, whatever is said here.
        adapters: "matrix": LoRA's A and B are matrices of the rule; "adamw": they are
            updated as vectors are.
        splits: the parts of fused weights, each a matrix for the rule: by patterns of
            names (``re.search``, the first match counts) a number of equal parts or the
            rows of each part, as {"qkv": (4096, 1024, 1024), "gate_up": 2}; None: the
            weight is one matrix. Without a pattern its module tells it by an attribute
            ``weight_splits``; and grouped-query attention by ``num_key_value_heads``,
            ``head_dim`` and ``num_heads`` or ``num_key_value_groups``, as transformers
            names them, if the rows of a Linear ``qkv_proj`` (``Wqkv``, ``qkv``) are
            queries, keys and values.

    Returns:
        Groups with (name, tensor) pairs in "params", every parameter once, in the order
        of the model: matrices, experts, convolutions (each kind in a group for each
        of its ``splits``), embeddings with heads and routers, vectors; those that are
        empty are left out.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: it has no parameter that requires a gradient, or some that FSDP1 has
            flattened; an unknown ``mars_type``, ``experts``, ``convolutions`` or
            ``adapters``; a pattern in ``splits`` that is no regular expression, or that
            no weight matches.

    Example:
        >>> words = torch.nn.Embedding(12, 4)
        >>> model = torch.nn.Sequential(words, torch.nn.Linear(4, 4))
        >>> for group in marsopt.param_groups(model, "moonlight", lr=6e-3):
        ...     names = [name for name, _ in group["params"]]
        ...     print(names, group["mars_type"], group["weight_decay"])
        ['1.weight'] moonlight 0.1
        ['0.weight'] adamw 0.1
        ['1.bias'] adamw 0.1
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"got {type(model).__name__}, expected a torch.nn.Module: pass the model "
            "itself, whose modules give the roles of its parameters"
        )
    row = named(mars_type)
    checks.at_least_zero("lr", lr)
    checks.true_or_false("experts", experts)
    checks.true_or_false("convolutions", convolutions)
    checks.one_of(("matrix", "adamw"))("adapters", adapters)
    decay = row.table["weight_decay"].default if weight_decay is None else weight_decay
    hidden = dict(mars_type=row.name, lr=lr, weight_decay=decay)
    if log_time is not None:
        hidden["log_time"] = log_time
    values_1d: dict[str, Any] = dict(
        lr_1d=lr_1d,
        betas_1d=betas_1d,
        weight_decay_1d=weight_decay_1d,
        nesterov_1d=nesterov_1d,
    )
    values_1d = {name: value for name, value in values_1d.items() if value is not None}
    check_values(REST, values_1d)
    tables = hidden | {"weight_decay": 0.0}
    everything = row.fallback == "itself"
    if everything:
        vectors = rest_values(tables | values_1d) or tables
    else:
        defaults = row.group_defaults(log_time)
        vectors = rest_values(defaults | hidden | values_1d) or hidden
    if row.matrix_only and not everything:
        undecayed = row.fallback == "adamw_1d" and weight_decay_1d is None
        tables = vectors | ({"weight_decay": 0.0} if undecayed else {})
    parts: dict[str, dict[str, Any]] = {"matrix": hidden}
    if experts or everything:
        parts["experts"] = hidden | {"matrices": "batched"}
    if convolutions or everything:
        parts["convolution"] = hidden | {"matrices": "flattened"}
    parts |= {"tables": tables, "vectors": vectors}
    members: dict[tuple[str, Any], list[tuple[str, Tensor]]]
    members = {(part, None): [] for part in parts}
    trained, fused = False, splits_of(model, splits)
    if ignored := ignored_by_ddp(model):
        log.info("marsopt: left out %d tensors that DDP ignores", len(ignored))
    for name, p, role in roles(model):
        if id(p) in ignored:
            continue
        if p.requires_grad:
            check_unflattened(p, f"parameter {name!r}")
            trained = True
        split = fused.get(id(p)) if role in parts else None  # adapters have no parts
        split = Matrices(splits=split).splits
        if role == "adapter" and adapters == "matrix":
            role = "matrix"
        other = "tables" if role in TABLES else "vectors"
        part = role if role in parts else other
        members.setdefault((part, split), []).append((name, p))
    if not trained:
        raise ValueError(
            "got a model without a parameter that requires a gradient, expected one at "
            "least: set requires_grad_() before the groups are made"
        )
    return [
        {"params": params, **parts[part]} | ({} if split is None else {"splits": split})
        for part in parts
        for (kind, split), params in members.items()
        if kind == part and params
    ]
