"""Flat trees: a sequence or a mapping of tensors, and what has to match."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from marsopt.rules.dtypes import default_state_dtype
from marsopt.rules.rounding import NARROW

Tree = Sequence[Tensor] | Mapping[str, Tensor]
Name = Any  # of a leaf: a key of a mapping, or a position in a sequence
AnyTree = TypeVar("AnyTree", bound=Tree)  # comes back in the same container


CONTAINERS = (dict, OrderedDict, defaultdict, list, tuple)


def check_container(tree: Tree, what: str) -> None:
    """Raises TypeError where a tree like ``tree`` cannot be made of other leaves."""
    if type(tree) in CONTAINERS or _is_namedtuple(tree):
        return
    plain = "dict" if isinstance(tree, Mapping) else "list"
    raise TypeError(
        f"got {what} of type {type(tree).__name__}, expected a list, tuple, "
        "NamedTuple, dict, OrderedDict or defaultdict, which come back as such: pass "
        f"{plain}({what})"
    )


def like_tree(tree: Any, leaves: Iterable[Tensor]) -> Any:
    """Return ``leaves`` in a container like ``tree``."""
    if isinstance(tree, defaultdict):
        return defaultdict(tree.default_factory, zip(tree, leaves, strict=True))
    kind: Any = type(tree)
    if isinstance(tree, Mapping):
        return kind(zip(tree, leaves, strict=True))
    return tree._make(leaves) if _is_namedtuple(tree) else kind(leaves)


def _is_namedtuple(tree: Tree) -> bool:
    return isinstance(tree, tuple) and hasattr(tree, "_make")


def names(tree: Tree) -> list[Name]:
    """What the leaves are called in messages: keys of a mapping, positions in a
    sequence.
    """
    return list(tree) if isinstance(tree, Mapping) else list(range(len(tree)))


def flatten(tree: Tree, what: str) -> list[Tensor]:
    """The leaves in order.

    Raises:
        TypeError: ``tree`` is a single tensor, or holds something that is not a tensor.
    """
    if isinstance(tree, Tensor) or not isinstance(tree, Mapping | Sequence):
        do = f"[{what}] or {{name: tensor}}"
        if isinstance(tree, nn.Module):
            do = f"dict({what}.named_parameters())"
        elif isinstance(tree, Iterable) and not isinstance(tree, Tensor):
            do = f"list({what})"
        raise TypeError(
            f"got {what} of type {type(tree).__name__}, expected a sequence or mapping "
            f"of tensors: pass {do}"
        )
    flat = list(tree.values()) if isinstance(tree, Mapping) else list(tree)
    for name, leaf in zip(names(tree), flat, strict=True):
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"got {what}[{name!r}] of type {type(leaf).__name__}, expected a "
                "tensor: "
                "leave out parameters without a gradient, on both sides"
            )
    return flat


def match_names(params: Tree, other: Tree, what: str) -> None:
    """Raises ValueError where ``other`` is no tree over the leaves of ``params``."""
    flatten(other, what)
    if isinstance(params, Mapping) != isinstance(other, Mapping) or set(
        names(params)
    ) != set(names(other)):
        raise ValueError(
            f"got {what} for {sorted(names(other), key=str)}, expected "
            f"{sorted(names(params), key=str)}: "
            f"give {what} the same container and names as the parameters"
        )


def match(params: Tree, other: Tree, what: str) -> list[Tensor]:
    """The leaves of ``other`` in the order of ``params``.

    Raises:
        TypeError: ``other`` is no tree of tensors.
        ValueError: other names or number, or a leaf of another shape or dtype.
    """
    match_names(params, other, what)
    for name in names(params):
        check_like(params[name], other[name], f"{what}[{name!r}]")
    return [other[name] for name in names(params)]


def check_like(x: Tensor, g: Tensor, what: str) -> None:
    """Raises ValueError where ``g`` cannot be the gradient of ``x``."""
    if g.shape != x.shape or g.dtype != x.dtype:
        raise ValueError(
            f"got {what} of shape {tuple(g.shape)} and dtype {g.dtype}, expected "
            f"{tuple(x.shape)} and {x.dtype}: "
            "compute it from the parameter itself, and cast it if it was reduced in "
            "another precision"
        )
    if g.layout != torch.strided:
        raise ValueError(
            f"got {what} of layout {g.layout}, expected torch.strided: make it dense "
            "(nn.Embedding(sparse=False))"
        )


def check_unflattened(x: Tensor, what: str) -> None:
    """Raises ValueError where ``x`` is FSDP1's: a rank's shard of flattened parameters,
    in which no rule finds a matrix, and whose norm is that of the shard.
    """
    if hasattr(x, "_fsdp_flattened"):  # on all that FSDP1 has flattened
        raise ValueError(
            f"got {what}, which FSDP1 (FullyShardedDataParallel) has flattened, "
            "expected a whole parameter or a DTensor: shard the model by FSDP2 "
            "(fully_shard) and pass collectives=MeshCollectives(mesh), or use "
            "DistributedDataParallel"
        )


def check_parameter(
    x: Tensor,
    what: str,
    state_dtype: torch.dtype | None = None,
    stochastic_rounding: bool = False,
) -> None:
    """Raises ValueError where no rule can move ``x``."""
    check_unflattened(x, what)
    if not x.is_floating_point():
        raise ValueError(
            f"got {what} of dtype {x.dtype}, expected a real floating point type: "
            "leave it out, or optimize torch.view_as_real of a complex tensor"
        )
    if x.dtype.itemsize < 2:  # float8, float4: torch has no arithmetic of theirs
        raise ValueError(
            f"got {what} of dtype {x.dtype}, expected a floating point type of 16 bits "
            "or more: optimize the wider tensor, and quantize it in the forward pass"
        )
    if x.layout != torch.strided:
        raise ValueError(
            f"got {what} of layout {x.layout}, expected torch.strided: make it dense"
        )
    buffer_dtype = state_dtype or default_state_dtype(x.dtype)
    may_be_narrow = stochastic_rounding and buffer_dtype == NARROW
    if torch.promote_types(buffer_dtype, x.dtype) != buffer_dtype and not may_be_narrow:
        raise ValueError(
            f"got state_dtype={state_dtype} for {what} of {x.dtype}, expected nothing "
            "narrower than the parameter, where small steps would be rounded away: "
            "leave it out, narrow h alone (h_dtype), or pass torch.bfloat16 with "
            "stochastic_rounding=True"
        )
