"""The role of each parameter in its model, a hidden matrix, an embedding, a head; and
the parts of fused weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from marsopt.functional.trees import plain_name
from marsopt.models.names import ADAPTERS, FUSED, Role, by_name
from marsopt.models.walk import Place, places, stores_inputs_first
from marsopt.rules import checks


def roles(model: nn.Module) -> Iterator[tuple[str, Tensor, Role]]:
    """Yield (name, tensor, role) of all parameters: each once, under the name that
    ``model.named_parameters()`` gives it.

    ``marsopt.param_groups`` explains the roles. A tensor that is an embedding in
    one place is one in all of them (a tied head).
    """
    by_id, all_places = dict[int, list[Place]](), list(places(model))
    for place in all_places:
        by_id.setdefault(id(place.tensor), []).append(place)
    names, heads = {place.plain for place in all_places}, {*_heads(model, all_places)}
    for uses in by_id.values():
        yield uses[0].name, uses[0].tensor, _role(uses, names, heads)


@runtime_checkable
class _HasOutputEmbeddings(Protocol):
    """As models of transformers."""

    def get_output_embeddings(self) -> Any: ...


def _heads(model: nn.Module, all_places: Sequence[Place]) -> Iterator[int]:
    """Yield the ids of weights that are heads whatever their names: of layers that a
    model, or a part of it, declares; and of the last Linear, if it has a row for each
    row of an embedding.
    """
    for module in model.modules():
        if isinstance(module, _HasOutputEmbeddings):
            with suppress(NotImplementedError, AttributeError):  # it declares none
                head = module.get_output_embeddings()
                yield from map(id, head.parameters())
    linears = [place for place in all_places if isinstance(place.module, nn.Linear)]
    weights = [p.tensor for p in linears if p.plain.endswith("weight")]
    adapters = {id(p.tensor) for p in all_places if ADAPTERS.search(p.plain)}
    rows = {place.tensor.shape[0] for place in all_places if place.is_embedding}
    for last in [p for p in weights if id(p) not in adapters][-1:]:
        if last.shape[0] in rows and last.shape[0] > last.shape[-1]:
            yield id(last)


def _role(uses: Sequence[Place], all_names: set[str], heads: set[int]) -> Role:
    p, names = uses[0].tensor, [place.plain for place in uses]
    by_names = [by_name(name) for name in names]
    if "router" in by_names and not any(_routes(name, all_names) for name in names):
        by_names = [None if role == "router" else role for role in by_names]
    in_list = any(isinstance(place.module, nn.ParameterList) for place in uses)
    is_rows = in_list and "embedding" in by_names  # rows of an embedding
    if is_rows or any(place.is_embedding for place in uses):
        return "embedding"
    if p.ndim < 2:
        return "vector"
    is_adapter = p.ndim == 2 and all(ADAPTERS.search(name) for name in names)
    if id(p) in heads and not is_adapter:
        return "head"
    for role in by_names:
        if role:
            return role
    if p.numel() == max(p.shape):  # (num, 1) and (1, num)
        return "vector"
    if any(isinstance(place.module, _ConvNd) for place in uses):
        return "convolution"
    if is_adapter:
        return "adapter"
    if p.ndim == 2:  # parameters of a model's own may be anything
        is_weight = any("weight" in name.rpartition(".")[2] for name in names)
        return "matrix" if is_weight else "other"
    return "experts" if any(map(_is_of_experts, uses)) else "other"


def _routes(name: str, plain_names: set[str]) -> bool:
    """Whether a weight named like a router has experts in its block: ``gate`` is also a
    name of the first matrix of a gated MLP.
    """
    block = name.removesuffix("gate.weight")
    others = (n.removeprefix(block) for n in plain_names if n.startswith(block))
    return "router" in name or any("expert" in other for other in others)


def _is_of_experts(place: Place) -> bool:
    """Whether a stack of matrices is of experts: its name says so, or its module counts
    them, as transformers' do.
    """
    num = vars(place.module).get("num_experts")
    return num == place.tensor.shape[0] or "expert" in place.plain


# ---- parts of fused weights ----------------------------------------------------------


@runtime_checkable
class _HasSplits(Protocol):
    weight_splits: Any


def splits_of(model: nn.Module, by_pattern: Mapping[str, Any]) -> dict[int, Any]:
    """Return the parts of fused weights, by the id of the weight: the value of the
    first pattern that its name matches, with wrappers or without; else
    ``weight_splits`` of its module; else queries, keys and values (``FUSED``).

    Raises:
        ValueError: no dict of patterns; a pattern that is no regular expression or that
            no weight of two dims or more matches; parts of a weight (in, out).
    """
    if not isinstance(by_pattern, Mapping):
        raise ValueError(
            f"got splits={by_pattern!r}, expected a dict by patterns of names: pass "
            f'e.g. splits={{"qkv": {by_pattern!r}}}'
        )
    for pattern in by_pattern:
        checks.regular_expression("splits", pattern)
    modules = {plain_name(name): module for name, module in model.named_modules()}
    splits, unused = dict[int, Any](), dict.fromkeys(by_pattern)
    for place in places(model):
        p, texts = place.tensor, (place.name, place.plain)
        if p.ndim < 2:
            continue
        hits = [x for x in by_pattern if any(re.search(x, text) for text in texts)]
        for pattern in hits:
            unused.pop(pattern, None)
        parts = by_pattern[hits[0]] if hits else _declared_splits(place, modules)
        if parts is not None and stores_inputs_first(place):
            raise ValueError(
                f"got splits={parts!r} for {place.name!r} of a "
                f"{type(place.module).__name__}, which stores (in, out), expected a "
                "weight (out, in), whose rows are parts: leave it out, the weight is "
                "one matrix then"
            )
        if hits or parts is not None:
            splits.setdefault(id(p), parts)
    if unused:
        raise ValueError(
            f"got the patterns {[*unused]} in splits, expected each to match the name "
            "of a weight: correct them (model.named_parameters() lists the names)"
        )
    return splits


def _declared_splits(place: Place, modules: Mapping[str, nn.Module]) -> Any:
    """Return the parts that modules declare of a weight: its own, or grouped-query
    attention with it as a fused Linear.
    """
    path, _, attribute = place.plain.rpartition(".")
    if isinstance(place.module, _HasSplits) and attribute == "weight":
        return place.module.weight_splits
    parent, _, name = path.rpartition(".")
    if not (name in FUSED and isinstance(place.module, nn.Linear)):
        return None
    around = vars(modules.get(parent, place.module))
    if not {"num_key_value_heads", "head_dim"} <= around.keys():
        return None
    num, width = around["num_key_value_heads"], around["head_dim"]
    num_heads = around.get("num_heads", around.get("num_key_value_groups", 1) * num)
    sizes = num_heads * width, num * width, num * width
    is_grouped = num_heads != num and place.tensor.shape[0] == sum(sizes)
    return sizes if is_grouped else None
