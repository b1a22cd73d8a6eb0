"""The walk through a model: its parameters, the modules that compute with them, and
their names without wrappers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import ParametrizationList

from marsopt.functional.trees import plain_name


class Place(NamedTuple):
    """A parameter in a module; a tied parameter has several places.

    Args:
        name: in ``model.named_parameters()``.
        plain: the name of the module's weight, without wrappers. Two parameters may
            have the same, as the two that weight_norm makes of a weight.
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
            plain, owner, attribute = plain_name(name), module, name.rpartition(".")[2]
            stem = re.sub("_[gv]$", "", attribute)
            if isinstance(module, ParametrizationList):
                layer = f".{prefix}".rpartition(".parametrizations.")[0]
                plain, owner = plain.removesuffix(f".{attribute}"), modules[layer[1:]]
            elif isinstance(module, nn.ParameterList):
                plain = plain.rpartition(".")[0]
            elif stem in vars(module):  # as torch.nn.utils.weight_norm leaves it
                plain = plain.removesuffix(attribute) + stem
            yield Place(name, plain, p, owner)


def ignored_by_ddp(model: nn.Module) -> set[int]:
    """Return the ids of parameters that DistributedDataParallel was told to ignore."""
    return {
        id(p)
        for ddp in model.modules()
        if isinstance(ddp, DistributedDataParallel)
        for name, p in ddp.module.named_parameters()
        if name in vars(ddp.module).get("_ddp_params_and_buffers_to_ignore", ())
    }


def stores_inputs_first(place: Place) -> bool:
    """Return whether a weight is known to be stored (in, out), or experts' (num, in,
    out): torch's ConvTranspose; transformers' Conv1D, its experts of GPT-OSS and Aria,
    and of Llama 4; and any module, if its two sizes say so.
    """
    attributes, shape = vars(place.module), place.tensor.shape
    if {"in_features", "out_features"} <= attributes.keys():
        sizes = attributes["in_features"], attributes["out_features"]
        return sizes[0] != sizes[1] and shape[-2:] == sizes
    if "is_transposed" in attributes:
        return bool(attributes["is_transposed"])
    is_known = {"nx", "nf"} <= attributes.keys() or "expert_dim" in attributes
    return is_known or isinstance(place.module, _ConvTransposeNd)
