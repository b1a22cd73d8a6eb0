"""Hooks by which a model's own modes and state dicts reach the optimizer."""

from __future__ import annotations

import weakref
from typing import Protocol

import torch
from torch import nn


class Modes(Protocol):
    """An optimizer whose parameters are, or are not, what is trained."""

    def train(self) -> None: ...

    def eval(self) -> None: ...

    def lend(self) -> None:
        """As ``eval``, until the next forward pass of training or the next step."""

    def is_in(self, train: bool) -> bool:
        """Return whether it is in this mode, and has lent nothing."""


class FollowMode:
    """A forward pre-hook: what is trained for a module in eval mode, else the points
    ahead of it. It does not keep the optimizer alive, and that of a copied or pickled
    model is nobody's.
    """

    def __init__(self, optimizer: Modes | None = None) -> None:
        self._found = None if optimizer is None else weakref.ref(optimizer)

    def __reduce__(self) -> tuple:
        return type(self), ()

    def __call__(self, module: nn.Module, *_) -> None:
        optimizer = None if self._found is None else self._found()
        if optimizer is not None and not optimizer.is_in(module.training):
            self._switch(optimizer, module.training)

    @torch.compiler.disable  # in place of a graph that writes parameters
    def _switch(self, optimizer: Modes, train: bool) -> None:
        optimizer.train() if train else optimizer.eval()


class LendIterates(FollowMode):
    """A pre-hook of ``state_dict``, which then holds what is trained in any mode."""

    def __call__(self, *_) -> None:
        optimizer = None if self._found is None else self._found()
        if optimizer is not None:
            optimizer.lend()


def follow(optimizer: Modes, model: nn.Module) -> None:
    """Let ``optimizer`` follow the modes of ``model``, and be followed by its state
    dicts and those of its parts.
    """
    # before FSDP gathers the parameters
    model.register_forward_pre_hook(FollowMode(optimizer), prepend=True)
    for module in model.modules():
        module.register_state_dict_pre_hook(LendIterates(optimizer))
