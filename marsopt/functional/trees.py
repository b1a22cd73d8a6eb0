"""Trees of tensors: a sequence, a mapping, or a FlatGroup, which is a model as a few
stacks of leaves of equal shape.

A GPT-2 of any depth has seven shapes: graphs over stacks do not grow with depth, norms
per leaf are reductions over the trailing dims, and one kernel updates all leaves of a
shape.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from marsopt.functional.buffers import check_parameter

Tree = Sequence[Tensor] | Mapping[str, Tensor]
Name = Any  # a leaf's key in a mapping, or its position in a sequence
AnyTree = TypeVar("AnyTree", bound=Tree)  # comes back in the same container
# Parts of names that torch adds to a module that it compiles, checkpoints, shards or
# replicates, and to a weight that it parametrizes or prunes; Lightning Fabric to a
# module; and PEFT to a module that it adapts (a copy also has the adapter's name).
WRAPPERS = re.compile(
    r"(^|\.)(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module|module"
    r"|parametrizations|_forward_module|base_layer|original_module"
    r"|modules_to_save\.[^.]+)(?=\.|$)|(?<=.)(\.original|_orig)$"
)


@dataclass(frozen=True)
class Packing:
    """The place of each leaf in the stacks."""

    names: tuple[Name, ...]  # leaf names, in their order
    is_mapping: bool
    members: tuple[tuple[int, ...], ...]  # positions of the leaves of each stack

    def keys(self) -> list[str]:
        """The name of each stack: its first leaf, and how many follow."""
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
    route.

    Args:
        packing: the place of each leaf; ``pack`` makes it.
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
            ValueError: no tensors, tensors on several devices, a DTensor, or a tensor
                that no rule can update.
        """
        leaves, called = flatten(params, "params"), names(params)
        if not leaves:
            raise ValueError(
                "got no parameters, expected at least one tensor: pass the model's "
                "parameters"
            )
        for name, x in zip(called, leaves, strict=True):
            _check(x, name, leaves[0].device)
        members: dict[tuple[torch.Size, torch.dtype], list[int]] = {}
        for i, x in enumerate(leaves):
            members.setdefault((x.shape, x.dtype), []).append(i)
        if not any(map(is_functorch_wrapped_tensor, leaves)):  # in grad, vmap or jvp
            leaves = [x.detach() for x in leaves]
        stacks = [torch.stack([leaves[i] for i in m]) for m in members.values()]
        packing = Packing(
            tuple(called),
            isinstance(params, Mapping),
            tuple(map(tuple, members.values())),
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
            "give MARS(..., collectives=...) the sharded parameters themselves"
        )
    if x.device != device:
        raise ValueError(
            f"got params[{name!r}] on {x.device}, expected {device}, where the first "
            "one is: use one FlatGroup per device"
        )


pytree.register_pytree_node(
    FlatGroup,
    lambda flat: (list(flat.stacks), flat.packing),
    lambda stacks, packing: FlatGroup(packing, list(stacks)),
    serialized_type_name="marsopt.FlatGroup",
)


# ---- trees ---------------------------------------------------------------------------


def check_container(tree: Tree, label: str) -> None:
    """Raise TypeError if a tree like ``tree`` cannot be made of other leaves."""
    if not pytree.tree_is_leaf(tree):
        return
    plain = "dict" if isinstance(tree, Mapping) else "list"
    raise TypeError(
        f"got {label} of type {type(tree).__name__}, expected a list, tuple, "
        "NamedTuple, dict, OrderedDict or defaultdict, which come back as such: pass "
        f"{plain}({label})"
    )


def plain_name(name: str) -> str:
    """Return a name as the model itself has it, without wrappers."""
    return WRAPPERS.sub("", name).removeprefix(".")


def plain_names(names: Iterable[str]) -> list[str]:
    """Return names without wrappers; as they are, if two were equal then."""
    listed = list(names)
    plain = [plain_name(name) for name in listed]
    return plain if len({*plain}) == len(plain) else listed


def names(tree: Tree) -> list[Name]:
    """The names of the leaves in messages: keys of a mapping, positions in a
    sequence.
    """
    return list(tree) if isinstance(tree, Mapping) else list(range(len(tree)))


def flatten(tree: Tree, label: str) -> list[Tensor]:
    """The leaves in order.

    Raises:
        TypeError: ``tree`` is a single tensor, or holds something that is not a tensor.
    """
    if isinstance(tree, Tensor) or not isinstance(tree, Mapping | Sequence):
        do = f"[{label}] or {{name: tensor}}"
        if isinstance(tree, nn.Module):
            do = f"dict({label}.named_parameters())"
        elif isinstance(tree, Iterable) and not isinstance(tree, Tensor):
            do = f"list({label})"
        raise TypeError(
            f"got {label} of type {type(tree).__name__}, expected a sequence or "
            f"mapping of tensors: pass {do}"
        )
    flat = list(tree.values()) if isinstance(tree, Mapping) else list(tree)
    for name, leaf in zip(names(tree), flat, strict=True):
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"got {label}[{name!r}] of type {type(leaf).__name__}, expected a "
                "tensor: "
                "leave out parameters without a gradient, on both sides"
            )
    return flat


def rebuild(like: AnyTree, leaves: Iterable[Tensor]) -> AnyTree:
    """Return ``leaves`` in a container like ``like``."""
    tree: AnyTree = pytree.tree_unflatten(leaves, pytree.tree_structure(like))
    return tree


def subtree(tree: Tree, part: Sequence[Name] | None) -> Tree:
    """Return the leaves of ``tree`` that ``part`` names, as a mapping; None: itself."""
    if part is None:
        return tree
    if isinstance(tree, FlatGroup):
        return tree.subset(part)
    return {name: tree[name] for name in part}


def check_matching(params: Tree, other: Tree, label: str) -> None:
    """Raise ValueError if ``other`` has other leaves than ``params``, or packs them
    otherwise.
    """
    if isinstance(params, FlatGroup) and (
        not isinstance(other, FlatGroup) or other.packing != params.packing
    ):
        raise ValueError(
            f"got {label} that are packed otherwise than the parameters, expected a "
            "FlatGroup of the same leaves in the same order: differentiate with "
            "respect to the flat group itself, or pack the same mapping"
        )
    flatten(other, label)
    if isinstance(params, Mapping) != isinstance(other, Mapping):
        raise ValueError(
            f"got {label} in a {type(other).__name__}, expected the container of the "
            f"parameters, a {type(params).__name__}: pass such a container"
        )
    expected, present = set(names(params)), set(names(other))
    if expected != present:
        raise ValueError(
            f"got {label} without {sorted(expected - present, key=str)} and with "
            f"{sorted(present - expected, key=str)} in addition, expected the names of "
            "the parameters: a parameter without a gradient is left out on all sides"
        )
