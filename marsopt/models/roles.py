"""The role of each parameter in its model, a hidden matrix, an embedding, a head; and
the parts of fused weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from marsopt.functional.trees import plain_name
from marsopt.models import heads
from marsopt.rules import checks

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
    "head": heads.PATTERN,
    # tables, and what projects patches: patch_embed.proj; then, as parameters of the
    # model's own, positions, class tokens, latents
    "embedding": (
        r"(^|\.)(trainable_tokens_[^.]*|lora_embedding_[^.]*)(\.|$)"  # PEFT's
        r"|(^|\.)([^.]*embed[^.]*|([^.]*_)?emb|wte|wpe)(\.(?!lora_)[^.]+)?(\.weight)?$"
        r"|(^|\.)(([^.]*_)?pos(ition(al)?)?(s|_[hw])?|[^.]*_tokens?|latents)(\.\d+)?$"
    ),
    "router": r"(^|\.)router\.((?!lora_)[^.]+\.)*weight$|(^|\.)gate\.weight$",
}
# LoRA's two factors, as PEFT, torchtune, torchtitan, loralib and diffusers name them
ADAPTERS = re.compile(r"(^|\.)lora_(A|B|a|b|down|up)(\.|$)")

# Linear layers of grouped-query attention whose rows are queries, keys and values, part
# after part, and where the names come from. (By head lie the rows of torchtitan's and
# InternLM's wqkv and of GPT-NeoX's and Falcon's query_key_value.)
FUSED = {
    "qkv_proj": "transformers' Phi-3 and Phi-4",
    "Wqkv": "transformers' DBRX",
    "qkv": "transformers' EXAONE 4.5, for images",
}

# Roles in the group of the embeddings.
TABLES: tuple[Role, ...] = ("embedding", "head", "router")


@dataclass
class _Uses:
    """Where a tensor is in a model: tied ones are in several places."""

    tensor: Tensor
    names: list[str] = field(default_factory=list)
    owners: list[nn.Module] = field(default_factory=list)


def roles(model: nn.Module) -> Iterator[tuple[str, Tensor, Role]]:
    """Yield (name, tensor, role) of all parameters: each once, under the name that
    ``model.named_parameters()`` gives it.

    ``marsopt.param_groups`` explains the roles. A tensor that is an embedding in
    one place is one in all of them (a tied head).
    """
    uses_by_id: dict[int, _Uses] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        pairs = module.named_parameters(prefix, recurse=False, remove_duplicate=False)
        for name, p in pairs:
            uses = uses_by_id.setdefault(id(p), _Uses(p))
            uses.names.append(name)
            uses.owners.append(module)
    known = _Known(model, uses_by_id)
    for uses in uses_by_id.values():
        yield uses.names[0], uses.tensor, _role(uses, known)


class _Known:
    """Facts about a model before its parameters have roles."""

    def __init__(self, model: nn.Module, uses_by_id: dict[int, _Uses]) -> None:
        every = uses_by_id.values()
        self.names = {plain_name(n) for uses in every for n in uses.names}
        self.matrices = {
            plain_name(n) for uses in every if uses.tensor.ndim > 1 for n in uses.names
        }
        self.declared_heads = heads.declared_heads(model)
        self.last_linear = _last_linear_over_a_vocabulary(model)


def _role(uses: _Uses, known: _Known) -> Role:
    p, owners = uses.tensor, uses.owners
    names = list(map(_name_in, owners, uses.names))
    if any(isinstance(owner, nn.Embedding | nn.EmbeddingBag) for owner in owners):
        return "embedding"
    in_list = any(isinstance(owner, nn.ParameterList) for owner in owners)
    if in_list and any(by_name(name) == "embedding" for name in names):  # rows of it
        return "embedding"
    if p.ndim < 2:
        return "vector"
    is_adapter = p.ndim == 2 and all(ADAPTERS.search(name) for name in names)
    if id(p) in known.declared_heads and not is_adapter:
        return "head"
    hints = [role for name in names if (role := _by_name_in(name, names, known))]
    if hints:
        return hints[0]
    if p.numel() == max(p.shape):  # (num, 1) and (1, num)
        return "vector"
    if known.last_linear in names:
        return "head"
    if any(isinstance(owner, _ConvNd) for owner in owners):
        return "convolution"
    if is_adapter:
        return "adapter"
    if p.ndim == 2:
        return "matrix"
    return "experts" if any("expert" in name for name in names) else "other"


def by_name(name: str) -> Role | None:
    """Return the role that a parameter's name tells, if it does."""
    plain = plain_name(name)
    return next((r for r, pattern in NAMES.items() if re.search(pattern, plain)), None)


def _by_name_in(name: str, names: list[str], known: _Known) -> Role | None:
    """Return the role that a name tells beside the other names of the model."""
    role = by_name(name)
    if role == "router" and not any(_routes(n, known.names) for n in names):
        return None
    if role == "head" and not heads.ends_head(name, known.matrices):
        return None
    return role


def _name_in(owner: nn.Module, name: str) -> str:
    """Return a plain name: of an element of a list the name of the list."""
    plain = plain_name(name)
    return plain.rpartition(".")[0] if isinstance(owner, nn.ParameterList) else plain


def _routes(name: str, plain_names: set[str]) -> bool:
    """Whether a weight named like a router stands beside experts: ``gate`` is also a
    name of the first matrix of a gated MLP.
    """
    block = name.removesuffix("gate.weight")
    beside = (n.removeprefix(block) for n in plain_names if n.startswith(block))
    return "router" in name or any("expert" in other for other in beside)


def _last_linear_over_a_vocabulary(model: nn.Module) -> str | None:
    """Return the name of the weight of the model's last Linear, without wrappers, if
    it has as many outputs as an embedding has rows, and these are more than its
    columns: positions and tables of types have fewer.
    """
    modules = [(n, m) for n, m in model.named_modules() if not ADAPTERS.search(n)]
    tables = [m for _, m in modules if isinstance(m, nn.Embedding)]
    sizes = {t.num_embeddings for t in tables if t.num_embeddings > t.embedding_dim}
    linears = [(n, m.out_features) for n, m in modules if isinstance(m, nn.Linear)]
    last, num_outputs = linears[-1] if linears else ("", 0)
    return plain_name(f"{last}.weight") if num_outputs in sizes else None


# ---- parts of fused weights ----------------------------------------------------------


@runtime_checkable
class _HasSplits(Protocol):
    weight: Tensor
    weight_splits: Any


@runtime_checkable
class _SharesKeys(Protocol):
    num_key_value_heads: int
    head_dim: int


@runtime_checkable
class _CountsHeads(Protocol):
    num_heads: int


@runtime_checkable
class _CountsGroups(Protocol):
    num_key_value_groups: int


def splits_of(model: nn.Module, by_pattern: Mapping[str, Any]) -> dict[int, Any]:
    """Return the parts of fused weights, by the id of the weight: the value of the
    first pattern that its name matches, else ``weight_splits`` of its module, else
    queries, keys and values (``FUSED``). Names are without the parts of ``WRAPPERS``.

    Raises:
        ValueError: no dict of patterns, or a pattern that is no regular expression or
            that no weight of two dims or more matches.
    """
    if not isinstance(by_pattern, Mapping):
        raise ValueError(
            f"got splits={by_pattern!r}, expected a dict by patterns of names: pass "
            f'e.g. splits={{"qkv": {by_pattern!r}}}'
        )
    for pattern in by_pattern:
        checks.regular_expression("splits", pattern)
    found = {id(weight): sizes for weight, sizes in _queries_keys_values(model)}
    for module in model.modules():
        if isinstance(module, _HasSplits):
            found[id(module.weight)] = module.weight_splits
    unused = dict.fromkeys(by_pattern)
    for name, p in model.named_parameters():
        hits = [x for x in by_pattern if p.ndim > 1 and re.search(x, plain_name(name))]
        if hits:
            found[id(p)] = by_pattern[hits[0]]
        for pattern in hits:
            unused.pop(pattern, None)
    if unused:
        raise ValueError(
            f"got the patterns {[*unused]} in splits, expected each to match the name "
            "of a weight: correct them (model.named_parameters() lists the names)"
        )
    return found


def _queries_keys_values(
    model: nn.Module,
) -> Iterator[tuple[Tensor, tuple[int, int, int]]]:
    """Yield the weights of ``FUSED`` in grouped-query attention, with the rows of their
    queries, keys and values.
    """
    for module in model.modules():
        if not isinstance(module, _SharesKeys):
            continue
        num, width = module.num_key_value_heads, module.head_dim
        num_heads = None
        if isinstance(module, _CountsHeads):
            num_heads = module.num_heads
        elif isinstance(module, _CountsGroups):
            num_heads = module.num_key_value_groups * num
        if num_heads is None or num_heads == num:
            continue
        sizes = num_heads * width, num * width, num * width
        for name, child in module.named_children():
            if not (name in FUSED and isinstance(child, nn.Linear)):
                continue
            if child.weight.shape[0] == sum(sizes):
                yield child.weight, sizes
