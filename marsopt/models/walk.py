"""The walk through a model: its parameters, the modules that compute with them, and
their names without wrappers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.utils.parametrize import ParametrizationList

from marsopt.functional.trees import plain_name


class Place(NamedTuple):
    """A parameter in a module; a tied parameter has several places.

    Args:
        name: in ``model.named_parameters()``.
        plain: the name of the module's weight, without wrappers. Two parameters may
            have one, as the two that weight_norm makes of a weight.
        tensor: the parameter.
        module: the module that computes with it; of a parametrized weight the layer.
    """

    name: str
    plain: str
    tensor: Tensor
    module: nn.Module

    @property
    def is_embedding(self) -> bool:
        """Whether the module is an embedding."""
        return isinstance(self.module, nn.Embedding | nn.EmbeddingBag)


def places(model: nn.Module) -> Iterator[Place]:
    """Yield the places of all parameters, in the order of ``model.modules()``."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for prefix, module in modules.items():
        pairs = module.named_parameters(prefix, recurse=False, remove_duplicate=False)
        for name, p in pairs:
            plain, owner, own = plain_name(name), module, name.rpartition(".")[2]
            stem = re.sub("_[gv]$", "", own)
            if isinstance(module, ParametrizationList):
                layer = f".{prefix}".rpartition(".parametrizations.")[0]
                plain, owner = plain.removesuffix(f".{own}"), modules[layer[1:]]
            elif isinstance(module, nn.ParameterList):
                plain = plain.rpartition(".")[0]
            elif stem in vars(module):  # as torch.nn.utils.weight_norm leaves it
                plain = plain.removesuffix(own) + stem
            yield Place(name, plain, p, owner)


# ---- which dim has the outputs -------------------------------------------------------


@runtime_checkable
class _SizedConv1D(Protocol):
    """transformers' Conv1D, a weight (nx, nf)."""

    nx: int
    nf: int


@runtime_checkable
class _SizedLinear(Protocol):
    in_features: int
    out_features: int


@runtime_checkable
class _MayTranspose(Protocol):
    """Experts of transformers' GPT-OSS and Aria."""

    is_transposed: bool


@runtime_checkable
class _Llama4Experts(Protocol):
    num_experts: int
    expert_dim: int


def stores_inputs_first(place: Place) -> bool:
    """Return whether a weight is known to lie (in, out), as the experts' (num, in,
    out): the kinds of modules above, ConvTranspose, and a module whose two sizes say
    so.
    """
    module, shape = place.module, place.tensor.shape
    if isinstance(module, _SizedLinear):
        sizes = module.in_features, module.out_features
        return sizes[0] != sizes[1] and tuple(shape[-2:]) == sizes
    if isinstance(module, _MayTranspose):
        return module.is_transposed
    kinds = _SizedConv1D | _ConvTransposeNd | _Llama4Experts
    return isinstance(module, kinds)
