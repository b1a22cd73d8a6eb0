"""Flat groups: a model as a few stacks of leaves of equal shape.

A GPT-2 of any depth has seven shapes: graphs over stacks do not grow with depth, norms
per leaf are reductions over the trailing dims, and one kernel moves all leaves of a
shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from marsopt.functional.stacks import empty_stacks, group_by
from marsopt.functional.trees import (
    AnyTree,
    Name,
    Tree,
    check_parameter,
    flatten,
    like_tree,
    match_names,
    names,
)


@dataclass(frozen=True)
class Packing:
    """Which leaf lies where."""

    names: tuple[str | int, ...]  # of the leaves, in their own order
    is_mapping: bool
    members: tuple[tuple[int, ...], ...]  # positions of the leaves of each stack

    def keys(self) -> list[str]:
        """What each stack is called: its first leaf, and how many follow."""
        return [
            f"{self.names[m[0]]}" + (f" (+{len(m) - 1})" if len(m) > 1 else "")
            for m in self.members
        ]


class FlatGroup(Mapping[str, Tensor]):
    """A whole model as a few stacks (L, *shape), which a rule takes in place of params.

        flat = marsopt.FlatGroup.pack(dict(model.named_parameters()))
        state = rule.init(flat)

        def loss(flat, batch):
            return functional_call(model, flat.unpack(), batch)

        grads = torch.func.grad(loss)(flat, batch)      # a FlatGroup too
        flat, state = rule.step(flat, grads, state, lr=lr)

    A mapping from a stack's name to its tensor, and a pytree: it passes through
    torch.func, torch.compile and ``tree_map``. Each leaf keeps its own norm, clip and
    route. ``stacks`` are views of one contiguous buffer per dtype where ``pack`` made
    them.

    Args:
        packing: which leaf lies where; ``pack`` makes it.
        stacks: tensors (L, *shape), one for each shape and dtype of leaves.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        >>> marsopt.FlatGroup.pack(dict(model.named_parameters()))
        FlatGroup({'0.weight (+1)': (2, 4, 4), '0.bias (+1)': (2, 4)})
    """

    def __init__(self, packing: Packing, stacks: Sequence[Tensor]) -> None:
        self.packing = packing
        self.stacks = tuple(stacks)

    @classmethod
    def pack(cls, params: Tree) -> FlatGroup:
        """Copy ``params`` (a sequence or mapping of tensors) into stacks, shape by
        shape and dtype by dtype; the originals stay as they are.

        Args:
            params: real floating point tensors of one device, of any shapes and dtypes.

        Raises:
            TypeError: no sequence or mapping of tensors.
            ValueError: no tensors, tensors on several devices, a DTensor, or one that
                no rule can move.
        """
        leaves, called = flatten(params, "params"), names(params)
        if not leaves:
            raise ValueError(
                "got no parameters, expected at least one tensor: pass those of the "
                "model"
            )
        for name, x in zip(called, leaves, strict=True):
            _check(x, name, leaves[0].device)
        members = group_by([(x.shape, x.dtype) for x in leaves])
        stacks = empty_stacks(
            [(len(m), *leaves[m[0]].shape) for m in members],
            [leaves[m[0]].dtype for m in members],
            leaves[0].device,
        )
        with torch.no_grad():
            for stack, m in zip(stacks, members, strict=True):
                torch._foreach_copy_(list(stack.unbind()), [leaves[i] for i in m])
        packing = Packing(
            tuple(called), isinstance(params, Mapping), tuple(map(tuple, members))
        )
        return cls(packing, stacks)

    def unpack(self) -> dict[str, Tensor] | list[Tensor]:
        """The leaves as views, in a dict or list as they were given; gradients of
        the views flow into the stacks.
        """
        leaves: dict[int, Tensor] = {}
        for m, stack in zip(self.packing.members, self.stacks, strict=True):
            leaves.update(zip(m, stack.unbind(), strict=True))
        if self.packing.is_mapping:
            return {self.packing.names[i]: leaves[i] for i in sorted(leaves)}
        return [leaves[i] for i in sorted(leaves)]

    def subset(self, keys: Sequence[str]) -> FlatGroup:
        """Some of the stacks; they unpack to a dict."""
        all_keys = self.packing.keys()
        members = tuple(self.packing.members[all_keys.index(key)] for key in keys)
        packing = Packing(self.packing.names, True, members)
        return FlatGroup(packing, [self[key] for key in keys])

    def __getitem__(self, key: str) -> Tensor:
        keys = self.packing.keys()
        if key not in keys:
            raise KeyError(key)
        return self.stacks[keys.index(key)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.packing.keys())

    def __len__(self) -> int:
        return len(self.stacks)

    def __repr__(self) -> str:
        shapes = {k: tuple(s.shape) for k, s in self.items()}
        return f"FlatGroup({shapes})"


def _check(x: Tensor, name: str | int, device: torch.device) -> None:
    check_parameter(x, f"params[{name!r}]")
    if is_traceable_wrapper_subclass(x):
        raise ValueError(
            f"got a {type(x).__name__} for params[{name!r}], expected a plain tensor: "
            "give MARS(..., collectives=...) the sharded parameters themselves; it "
            "stacks their local shards"
        )
    if x.device != device:
        raise ValueError(
            f"got params[{name!r}] on {x.device}, expected {device}, where the first "
            "one is: use one FlatGroup per device"
        )


pytree.register_pytree_node(
    FlatGroup,
    lambda flat: (list(flat.stacks), flat.packing),
    lambda stacks, packing: FlatGroup(packing, stacks),
    serialized_type_name="marsopt.FlatGroup",
)


def rebuild(like: AnyTree, leaves: Sequence[Tensor]) -> AnyTree:
    """``leaves`` in the container of ``like``, a FlatGroup for one."""
    if isinstance(like, FlatGroup):
        return FlatGroup(like.packing, leaves)
    return like_tree(like, leaves)


def subtree(tree: Tree, part: Sequence[Name]) -> FlatGroup | dict[Any, Tensor]:
    """The leaves of ``tree`` that ``part`` names, as a mapping."""
    if isinstance(tree, FlatGroup):
        return tree.subset(part)
    return {name: tree[name] for name in part}


def check_matching(params: Tree, other: Tree, what: str) -> None:
    """Raise ValueError where ``other`` has other leaves than ``params``, or packs them
    otherwise.
    """
    if isinstance(params, FlatGroup) and (
        not isinstance(other, FlatGroup) or other.packing != params.packing
    ):
        raise ValueError(
            f"got {what} that are packed otherwise than the parameters, expected a "
            "FlatGroup of the same leaves in the same order: differentiate with "
            "respect to the flat group itself, or pack the same mapping"
        )
    match_names(params, other, what)


def leaf_shape(tree: Tree, x: Tensor) -> torch.Size:
    """Shape of one leaf, ``x`` being a leaf of ``tree`` or a stack of a FlatGroup."""
    return x.shape[1:] if isinstance(tree, FlatGroup) else x.shape
