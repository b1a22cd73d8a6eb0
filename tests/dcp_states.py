"""A model and its optimizer to a DCP checkpoint and back, by torch's own functions."""

from __future__ import annotations

from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    return {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }


def save(model: nn.Module, optimizer: Optimizer, folder: str) -> None:
    dcp.save(_state(model, optimizer), checkpoint_id=folder)


def load(model: nn.Module, optimizer: Optimizer, folder: str) -> None:
    state = _state(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
