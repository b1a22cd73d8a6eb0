"""A stand-in for ``torchtitan.components.optim`` as torchtitan's main has it after
0.3.0: what its classes ask of an optimizer, written from their public source
(pytorch/torchtitan: optimizer.py at 1697d399, ema.py at 2d4176c2). The rest of
torchtitan is the one that is installed.

    adapter = titan_main.adapter()    # marsopt.interop.torchtitan over the stand-in
"""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch
from torch.optim import Optimizer

from train.engine.titan_cpu import prepare

prepare()

from torchtitan.components.checkpointer.utils import canonical_fqn  # noqa: E402
from torchtitan.components.optimizer.utils import (  # noqa: E402
    get_flat_optim_state_dict,
    init_optim_state,
    load_flat_optim_state_dict,
)
from torchtitan.config import Configurable  # noqa: E402

PATH = Path(__file__).parent.parent / "marsopt/interop/torchtitan.py"


class BaseOptimizer(Optimizer, Configurable):
    """An optimizer whose configuration says which parameters are its own."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        pattern: str


class AdamW(torch.optim.AdamW, BaseOptimizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseOptimizer.Config):
        lr: float = 8e-4

    def __init__(self, config, *, params):
        super().__init__(params, lr=config.lr)


class OptimizersContainer(Optimizer, Configurable):
    """One optimizer for each part of the model and each configuration; the first
    pattern that matches takes a parameter.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        optimizers: list[BaseOptimizer.Config] = field(default_factory=list)

    def __init__(self, config, *, model_parts, enable_cuda_graph=False):
        self.optimizers, self.model_parts, params = [], model_parts, []
        for part in model_parts:
            taken = set()
            for optimizer_config in config.optimizers:
                pattern = optimizer_config.pattern
                pairs = [
                    (name, p)
                    for name, p in part.named_parameters()
                    if p.requires_grad
                    and name not in taken
                    and re.search(pattern, name)
                ]
                if not pairs:
                    raise ValueError(f"{pattern!r} matched no parameters")
                taken |= {name for name, _ in pairs}
                names = [canonical_fqn(name) for name, _ in pairs]
                group = dict(params=[p for _, p in pairs], param_names=names)
                optimizer = optimizer_config.build(params=[group])
                groups = optimizer.param_groups
                if enable_cuda_graph and any("capturable" not in g for g in groups):
                    raise ValueError("does not support CUDA graph capture")
                self.optimizers.append(optimizer)
                params += group["params"]
        trained = {
            p for part in model_parts for p in part.parameters() if p.requires_grad
        }
        assert trained == set(params) and len(trained) == len(params)
        self._post_init(params)

    def _post_init(self, params):
        Optimizer.__init__(self, params, {})

    def __iter__(self):
        return iter(self.optimizers)

    def __len__(self):
        return len(self.optimizers)

    def step(self, closure=None):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none=True):
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self):
        found = {}
        for optimizer in self.optimizers:
            init_optim_state(optimizer)
            found |= get_flat_optim_state_dict(optimizer)
        return found

    def load_state_dict(self, state_dict):
        for optimizer in self.optimizers:
            init_optim_state(optimizer)
            load_flat_optim_state_dict(optimizer, state_dict)


def adapter() -> ModuleType:
    """``marsopt.interop.torchtitan`` as it is where main is installed."""
    spec = importlib.util.spec_from_file_location("marsopt.parallel.titan_main", PATH)
    found = importlib.util.module_from_spec(spec)
    present = {"torchtitan.components.optim": sys.modules[__name__]}
    with mock.patch.dict(sys.modules, {**present, spec.name: found}):
        spec.loader.exec_module(found)
    return found
