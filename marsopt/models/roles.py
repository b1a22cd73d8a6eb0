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
from marsopt.models.names import ADAPTERS, FUSED, Role, by_name, is_head_anywhere
from marsopt.models.walk import Place, places, stores_inputs_first
from marsopt.rules import checks


def roles(model: nn.Module) -> Iterator[tuple[str, Tensor, Role]]:
    """Yield (name, tensor, role) of all parameters: each once, under the name that
    ``model.named_parameters()`` gives it.

    ``marsopt.param_groups`` explains the roles. A tensor that is an embedding in
    one place is one in all of them (a tied head).
    """
    by_id, every = dict[int, list[Place]](), list(places(model))
    for place in every:
        by_id.setdefault(id(place.tensor), []).append(place)
    known = _Known(model, every)
    for uses in by_id.values():
        yield uses[0].name, uses[0].tensor, _role(uses, known)


class _Known:
    """Facts about a model before its parameters have roles."""

    def __init__(self, model: nn.Module, every: Sequence[Place]) -> None:
        tables = [p for p in every if p.is_embedding]
        weights = [p for p in every if _is_weight(p)]
        rows = ((p.tensor.shape[0], p.tensor.shape[-1]) for p in tables)
        self.names = {p.plain for p in every}
        self.declared_heads = {id(p) for h in _declared(model) for p in h.parameters()}
        # positions and tables of types have fewer rows than columns
        self.vocabularies = {num for num, width in rows if num > width}
        linears = [p for p in weights if isinstance(p.module, nn.Linear)]
        self.last = linears[-1].plain if linears else ""
        self.last_outputs = _outputs(linears[-1]) if linears else 0
        # widths that matrices take; a gated unit takes two halves; depthwise kernels
        # take 1
        taken = {n for p in weights for n in _inputs(p) if n > 1}
        self.inputs = taken | {2 * n for n in taken}
        sure = self.declared_heads | {id(p.tensor) for p in tables}  # tied
        self.has_head = any(
            id(p.tensor) in sure or self.is_surely_head(p) for p in weights
        )

    def is_surely_head(self, place: Place) -> bool:
        """Return whether a weight's name, or name and rows, say that it is a head."""
        in_vocabulary = _outputs(place) in self.vocabularies
        is_named = by_name(place.plain) == "head"
        return is_head_anywhere(place.plain) or (is_named and in_vocabulary)

    def is_head(self, place: Place) -> bool:
        """Return whether a weight with the name of a head is a head: no matrix takes
        its outputs; or it is the last Linear of a model without another head.
        """
        if self.is_surely_head(place) or _outputs(place) not in self.inputs:
            return True
        return place.plain == self.last and not self.has_head


def _is_weight(place: Place) -> bool:
    """Return whether a parameter is a matrix, or several, that takes inputs."""
    is_matrix = place.tensor.ndim > 1 and place.tensor.numel() > max(place.tensor.shape)
    is_own = not (place.is_embedding or ADAPTERS.search(place.plain))
    return is_matrix and is_own and place.plain.endswith("weight")


def _outputs(place: Place) -> int:
    return place.tensor.shape[-1 if stores_inputs_first(place) else 0]


def _inputs(place: Place) -> tuple[int, ...]:
    """Return which dims of a weight may be of inputs: of three, experts' or a kernel's,
    the last two.
    """
    shape = place.tensor.shape
    return shape[:1] if stores_inputs_first(place) else shape[1 : min(len(shape), 3)]


def _role(uses: Sequence[Place], known: _Known) -> Role:
    p, names = uses[0].tensor, [place.plain for place in uses]
    if any(place.is_embedding for place in uses):
        return "embedding"
    in_list = any(isinstance(place.module, nn.ParameterList) for place in uses)
    if in_list and any(by_name(name) == "embedding" for name in names):  # rows of it
        return "embedding"
    if p.ndim < 2:
        return "vector"
    is_adapter = p.ndim == 2 and all(ADAPTERS.search(name) for name in names)
    if id(p) in known.declared_heads and not is_adapter:
        return "head"
    for place in uses:
        if role := _by_name_in(place, names, known):
            return role
    if p.numel() == max(p.shape):  # (num, 1) and (1, num)
        return "vector"
    if known.last in names and known.last_outputs in known.vocabularies:
        return "head"
    if any(isinstance(place.module, _ConvNd) for place in uses):
        return "convolution"
    if is_adapter:
        return "adapter"
    if p.ndim == 2:
        return "matrix"
    return "experts" if any(map(_is_of_experts, uses)) else "other"


def _by_name_in(place: Place, names: Sequence[str], known: _Known) -> Role | None:
    """Return the role that a name tells beside the rest of the model."""
    role = by_name(place.plain)
    if role == "router" and not any(_routes(n, known.names) for n in names):
        return None
    return None if role == "head" and not known.is_head(place) else role


def _routes(name: str, plain_names: set[str]) -> bool:
    """Whether a weight named like a router stands beside experts: ``gate`` is also a
    name of the first matrix of a gated MLP.
    """
    block = name.removesuffix("gate.weight")
    beside = (n.removeprefix(block) for n in plain_names if n.startswith(block))
    return "router" in name or any("expert" in other for other in beside)


def _is_of_experts(place: Place) -> bool:
    """Whether a stack of matrices is of experts: its name says so, or its module counts
    them, as transformers' do.
    """
    num = vars(place.module).get("num_experts")
    return num == place.tensor.shape[0] or "expert" in place.plain


# ---- heads that a model declares -----------------------------------------------------


@runtime_checkable
class _HasOutputEmbeddings(Protocol):
    """As models of transformers."""

    def get_output_embeddings(self) -> Any: ...


@runtime_checkable
class _HasClassifier(Protocol):
    """As models of timm."""

    def get_classifier(self) -> Any: ...


def _declared(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the heads that a model, or a part of it, declares."""
    for module in model.modules():
        heads: list[Any] = []
        with suppress(NotImplementedError, AttributeError):  # this model declares none
            if isinstance(module, _HasOutputEmbeddings):
                heads.append(module.get_output_embeddings())
            if isinstance(module, _HasClassifier):
                classifier = module.get_classifier()
                # timm's distilled models have two
                several = isinstance(classifier, tuple | list)
                heads += classifier if several else [classifier]
        yield from (head for head in heads if isinstance(head, nn.Module))


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
    found, unused = dict[int, Any](), dict.fromkeys(by_pattern)
    for place in places(model):
        p, texts = place.tensor, (place.name, place.plain)
        if p.ndim < 2:
            continue
        hits = [x for x in by_pattern if any(re.search(x, text) for text in texts)]
        for pattern in hits:
            unused.pop(pattern, None)
        own = by_pattern[hits[0]] if hits else _declared_splits(place, modules)
        if own is not None and stores_inputs_first(place):
            raise ValueError(
                f"got splits={own!r} for {place.name!r} of a "
                f"{type(place.module).__name__}, which stores (in, out), expected a "
                "weight (out, in), whose rows are parts: leave it out, the weight is "
                "one matrix then"
            )
        if hits or own is not None:
            found.setdefault(id(p), own)
    if unused:
        raise ValueError(
            f"got the patterns {[*unused]} in splits, expected each to match the name "
            "of a weight: correct them (model.named_parameters() lists the names)"
        )
    return found


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
