"""Param groups of a whole model: the role of each parameter, the rule that moves it,
and the rule's numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from marsopt.functional.binding import check_unflattened
from marsopt.rules import checks
from marsopt.rules.decay import Decay, Weight
from marsopt.rules.registry import named

Role = Literal[
    "matrix",
    "experts",
    "convolution",
    "adapter",
    "embedding",
    "head",
    "router",
    "vector",
    "other",
]

# Roles that a name tells, whatever the module is, in this order: as torchtitan,
# transformers, timm and nanoGPT name them. They are searched in names without the parts
# of WRAPPERS, and stand for any of them, so that torchtitan's groups can use them too.
NAMES: dict[Role, str] = {
    # biases of experts have two dims, one table has one a head; A of a state space
    # model is a vector for each channel
    "vector": r"bias(_[A-Z]+|_table)?$|(^|\.)A_log$",
    # torchtitan's fused w13, whose rows of gate and up lie between each other, so that
    # no two of its dims are a matrix
    "other": r"(^|\.)w13(\.|_|$)",
    # the second kind of names is also used inside of blocks, for something else
    "head": (
        r"(^|\.)(lm_head|embed_out|unembed|shared_head\.head)\.weight$"
        r"|^(?!(.*\.)?\d+\.)(.*\.)?(output|head|classifier|score|fc)\.weight$"
    ),
    # tables, and what projects patches: patch_embed.proj; then, as parameters of the
    # model's own, positions, class tokens, latents
    "embedding": (
        r"(^|\.)(trainable_tokens_[^.]*|lora_embedding_[^.]*)(\.|$)"  # PEFT's
        r"|(^|\.)([^.]*embed[^.]*|([^.]*_)?emb|wte|wpe)(\.(?!lora_)[^.]+)?(\.weight)?$"
        r"|(^|\.)(([^.]*_)?pos(ition(al)?)?(s|_[hw])?|[^.]*_tokens?|latents)(\.\d+)?$"
    ),
    "router": r"(^|\.)router\.((?!lora_)[^.]+\.)*weight$|(^|\.)gate\.weight$",
}
# What torch puts into the names of a module that it compiles, checkpoints or shards;
# and PEFT into names of a module that it adapts (a copy also has the adapter's name).
WRAPPERS = re.compile(
    r"(^|\.)(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module|base_layer"
    r"|original_module|modules_to_save\.[^.]+)(?=\.|$)"
)
# LoRA's two factors, as PEFT, torchtune, torchtitan, loralib and diffusers name them
ADAPTERS = re.compile(r"(^|\.)lora_(A|B|a|b|down|up)(\.|$)")

# The roles in the group of the embeddings.
TABLES: tuple[Role, ...] = ("embedding", "head", "router")


def param_groups(
    model: nn.Module,
    mars_type: str = "mars-adamw",
    *,
    lr: float | Tensor,
    weight_decay: float | None = None,
    lr_1d: float | Tensor | None = None,
    betas_1d: tuple[Decay, Decay] | None = None,
    weight_decay_1d: float | None = None,
    nesterov_1d: Weight | None = None,
    gamma_1d: float | None = None,
    experts: bool = True,
    convolutions: bool = False,
    adapters: Literal["matrix", "adamw"] = "matrix",
) -> list[dict[str, Any]]:
    """Return param groups for ``MARS``: hidden matrices by ``mars_type``, everything
    else as the authors' recipes for this rule have it.

        groups = marsopt.param_groups(model, "moonlight", lr=6e-3)
        optimizer = MARS(groups, correction="transport", gamma=0.05)

    Everything else is told by modules and by names: embeddings (tied output heads among
    them), output heads, routers of experts; and vectors: norms, biases, all else that
    is no matrix. The rules that move them, and their numbers:

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
    transport, groups that AdamW moves look ahead by ``gamma_1d``, if it is given here.

    Args:
        model: on any device, sharded, compiled, checkpointed, adapted (PEFT) or not.
            Parameters that do not require a gradient have their places too, for when
            they do: until then they cost nothing.
        mars_type: a name in ``marsopt.REGISTRY``.
        lr: learning rate of hidden matrices, and of what takes the rule itself.
        weight_decay: of hidden matrices; None = the rule's default.
        lr_1d, betas_1d, weight_decay_1d: of what AdamW moves beside the rule,
            embeddings among it (with "adamw", "nadamw" and "lion": of vectors); None =
            as above.
        nesterov_1d: Nesterov's momentum of the same, as ``MARS``'s ``nesterov``; None =
            off.
        gamma_1d: with transport, gamma of the same; None = ``MARS``'s.
        experts: give weights of experts, (num_experts, rows, cols), to the rule as
            batches of matrices; False: they are moved as vectors are. torchtitan's
            fused w13 always is: no two of its dims are a matrix.
        convolutions: give kernels (out, in, *kernel) to the rule as matrices of out
            rows; False: they are moved as vectors are, which is how the authors' code
            has it. "adamw", "nadamw" and "lion" move experts and kernels as they do
            matrices, whatever is said here.
        adapters: "matrix": LoRA's A and B are matrices of the rule; "adamw": they are
            moved as vectors are.

    Returns:
        Groups with (name, tensor) pairs in "params", every parameter once, in the order
        of the model: matrices, experts, convolutions, embeddings with heads and
        routers, vectors; those that are empty are left out.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: it has no parameter that requires a gradient, or some that FSDP1 has
            flattened; an unknown ``mars_type`` or other ``adapters``.

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
            "itself, whose modules tell the roles of its parameters"
        )
    row = named(mars_type)
    checks.at_least_zero("lr", lr)
    if adapters not in ("matrix", "adamw"):
        raise ValueError(
            f"got adapters={adapters!r}, expected 'matrix' or 'adamw': choose one of "
            "the two"
        )
    decay = row.table["weight_decay"].default if weight_decay is None else weight_decay
    hidden = dict(mars_type=row.name, lr=lr, weight_decay=decay)
    of_1d: dict[str, Any] = dict(
        lr_1d=lr_1d,
        betas_1d=betas_1d,
        weight_decay_1d=weight_decay_1d,
        nesterov_1d=nesterov_1d,
        gamma_1d=gamma_1d,
    )
    tables, vectors = hidden | {"weight_decay": 0.0}, row.fallback_group(hidden | of_1d)
    everything = row.fallback == "itself"
    if everything:
        given = {name: value for name, value in of_1d.items() if value is not None}
        explicit = {name.removesuffix("_1d"): value for name, value in given.items()}
        vectors = tables | explicit
    elif row.matrix_only:
        undecayed = row.fallback == "adamw_1d" and weight_decay_1d is None
        tables = vectors | ({"weight_decay": 0.0} if undecayed else {})
    parts: dict[str, dict[str, Any]] = {"matrix": hidden}
    if experts or everything:
        parts["experts"] = hidden | {"matrices": "batched"}
    if convolutions or everything:
        parts["convolution"] = hidden | {"matrices": "flattened"}
    parts |= {"tables": tables, "vectors": vectors}
    groups = {part: {"params": [], **options} for part, options in parts.items()}
    trained = False
    for name, p, role in roles(model):
        if p.requires_grad:
            check_unflattened(p, f"parameter {name!r}")
            trained = True
        if role == "adapter" and adapters == "matrix":
            role = "matrix"
        other = "tables" if role in TABLES else "vectors"
        groups[role if role in parts else other]["params"].append((name, p))
    if not trained:
        raise ValueError(
            "got a model without a parameter that requires a gradient, expected one at "
            "least: set requires_grad_() before the groups are made"
        )
    return [group for group in groups.values() if group["params"]]


@dataclass
class _Uses:
    """Where a tensor is in a model: tied ones are in several places."""

    tensor: Tensor
    names: list[str] = field(default_factory=list)
    owners: list[nn.Module] = field(default_factory=list)


def roles(model: nn.Module) -> Iterator[tuple[str, Tensor, Role]]:
    """Yield (name, tensor, role) of all parameters: each once, under the name that
    ``model.named_parameters()`` gives it.

    ``marsopt.param_groups`` describes the roles. A tensor that is an embedding in one
    place is one in all of them (a tied head).
    """
    uses_by_id: dict[int, _Uses] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        pairs = module.named_parameters(prefix, recurse=False, remove_duplicate=False)
        for name, p in pairs:
            uses = uses_by_id.setdefault(id(p), _Uses(p))
            uses.names.append(name)
            uses.owners.append(module)
    plain_names = {_plain(name) for uses in uses_by_id.values() for name in uses.names}
    head = _last_linear_over_a_vocabulary(model)
    for uses in uses_by_id.values():
        yield uses.names[0], uses.tensor, _role(uses, plain_names, head)


def _role(uses: _Uses, plain_names: set[str], head: str | None) -> Role:
    p, owners = uses.tensor, uses.owners
    names = list(map(_name_in, owners, uses.names))
    if any(isinstance(owner, nn.Embedding | nn.EmbeddingBag) for owner in owners):
        return "embedding"
    in_list = any(isinstance(owner, nn.ParameterList) for owner in owners)
    if in_list and any(by_name(name) == "embedding" for name in names):  # rows of it
        return "embedding"
    if p.ndim < 2:
        return "vector"
    hints: list[Role] = [role for name in names if (role := by_name(name)) is not None]
    hints = [
        r for r in hints if r != "router" or any(_routes(n, plain_names) for n in names)
    ]
    if hints:
        return hints[0]
    if p.numel() == max(p.shape):  # (num, 1) and (1, num)
        return "vector"
    if head in names:
        return "head"
    if any(isinstance(owner, _ConvNd) for owner in owners):
        return "convolution"
    if p.ndim == 2 and all(ADAPTERS.search(name) for name in names):
        return "adapter"
    if p.ndim == 2:
        return "matrix"
    return "experts" if any("expert" in name for name in names) else "other"


def by_name(name: str) -> Role | None:
    """Return the role that a parameter's name tells, if it does."""
    plain = _plain(name)
    return next((r for r, pattern in NAMES.items() if re.search(pattern, plain)), None)


def _plain(name: str) -> str:
    """Return a name as the model itself has it, without wrappers."""
    return WRAPPERS.sub("", name).removeprefix(".")


def _name_in(owner: nn.Module, name: str) -> str:
    """Return a plain name; for a parameter in a list, the list's."""
    plain = _plain(name)
    return plain.rpartition(".")[0] if isinstance(owner, nn.ParameterList) else plain


def _routes(name: str, plain_names: set[str]) -> bool:
    """Whether a parameter that is named like a router stands beside experts: ``gate``
    is also a name of the first matrix of a gated MLP.
    """
    block = name.removesuffix("gate.weight")
    beside = (n.removeprefix(block) for n in plain_names if n.startswith(block))
    return "router" in name or any("expert" in other for other in beside)


def _last_linear_over_a_vocabulary(model: nn.Module) -> str | None:
    """Return the name of the weight of the model's last Linear, without wrappers, if it
    has as many outputs as an embedding has rows, and these are more than its columns:
    positions and tables of types have fewer.
    """
    modules = [(n, m) for n, m in model.named_modules() if not ADAPTERS.search(n)]
    tables = [m for _, m in modules if isinstance(m, nn.Embedding)]
    sizes = {t.num_embeddings for t in tables if t.num_embeddings > t.embedding_dim}
    linears = [(n, m.out_features) for n, m in modules if isinstance(m, nn.Linear)]
    last, num_outputs = linears[-1] if linears else ("", 0)
    return _plain(f"{last}.weight") if num_outputs in sizes else None
