"""Transport in the class: ``train()`` puts y into the parameters, where gradients are
taken, and ``eval()`` puts x there, which is trained.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from marsopt.optim.compiled import once
from marsopt.optim.protocols.base import (
    CorrectionProtocol,
    Entries,
    Handles,
    Host,
    ParameterHandle,
)
from marsopt.optim.state_dict import TRAIN_MODE
from marsopt.rules.dtypes import without_autocast


class Lookahead(CorrectionProtocol):
    """In train mode parameters hold y, the point ahead. x is in the state, or follows
    from y, the moments and the last step's numbers. In eval mode parameters hold x; y
    is in the state in place of x, or follows from x.

    Before its first step a parameter is x and y: weights may be loaded after the
    optimizer was built.
    """

    def __init__(self) -> None:
        super().__init__()
        # parameters whose x in the state is known to be valid; and parameters with
        # state of another correction, whose x is the parameter until the next step
        self._valid: set[Tensor] = set()
        self._without_x: set[Tensor] = set()
        self._unknown: list[ParameterHandle] = []  # in this step: not known to be valid
        self._has_stepped = False
        self._say = once()

    def before_step(self, optimizer: Host, handles: Handles) -> None:
        """Let x be the parameter before its first step.

        Raises:
            RuntimeError: parameters are x, or a CUDA graph captures a first step.
        """
        if not _in_train_mode(optimizer):  # a closure may have ended so, too
            raise RuntimeError(
                "got step() in eval mode, expected train mode: the gradient belongs to "
                "the point ahead; call optimizer.train() before the forward pass, and "
                "optimizer.eval() after step(), not between backward() and step()"
            )
        self._unknown = [
            h for h in handles if h.p not in self._valid and h.numbers is None
        ]
        first = [handle.p for handle in self._unknown if handle.p.grad is not None]
        if first and first[0].is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "got a first step to capture, expected one after an ordinary step: "
                "replays would start from y every time; take a step before the capture"
            )
        for handle in self._unknown:
            x, piece = handle["x"], handle.piece
            if handle.p not in self._without_x:
                piece = torch.where(handle.entry["step"] == 0, piece, x)
            x.copy_(piece)

    def after_step(self, optimizer: Host, handles: Handles) -> None:
        """Note which parameters have taken their first step: a sync for each, once. A
        parameter without a gradient on this rank is not asked.
        """
        for handle in self._unknown:
            if handle.p in self._without_x:
                self._without_x.discard(handle.p)
                self._valid.add(handle.p)
            elif handle.p.grad is not None and handle.has_stepped:
                self._valid.add(handle.p)
        self._unknown, self._has_stepped = [], True

    def eval(self, optimizer: Host) -> None:
        """Put x into parameters."""
        self._switch(optimizer, to_train=False)

    def train(self, optimizer: Host) -> None:
        """Put y into parameters."""
        self._switch(optimizer, to_train=True)

    def check_may_save(self, optimizer: Host) -> None:
        """Warn once that parameters are not the trained weights."""
        if self._has_stepped and _in_train_mode(optimizer):
            self._say(
                logging.WARNING,
                "saved in train mode: the parameters are the points where gradients "
                "are taken, ahead of the trained weights. Training resumes from them; "
                "to save or evaluate the model, call optimizer.eval() before and "
                "optimizer.train() after",
            )

    def iterates(self, optimizer: Host) -> Callable[[Tensor], Tensor | None]:
        """Return a function that returns x of a parameter, None where the parameter is
        x.
        """
        handles = optimizer.parameter_handles(agree=False)
        ahead = {handle.p: handle for handle in handles if self._has_x(handle)}
        is_ahead = _in_train_mode(optimizer)

        @torch.no_grad()
        @without_autocast
        def find_iterate(p: Tensor) -> Tensor | None:
            handle = ahead.get(p) if is_ahead else None
            if handle is None:
                return None
            if handle.numbers is None:
                return handle.whole("x")
            return handle.wrapped(handle.recover_x(handle.piece))

        return find_iterate

    def restart(self, optimizer: Host, handles: Handles) -> None:
        """Put x into parameters, of which nothing is ahead in either mode."""
        if _in_train_mode(optimizer):
            for handle in handles:
                if self._has_x(handle):
                    y = handle.piece
                    y.copy_(
                        handle["x"] if handle.numbers is None else handle.recover_x(y)
                    )
            optimizer.notify_written()
        self._valid, self._without_x, self._has_stepped = set(), set(), False

    def load(self, handles: Handles, entries: Entries) -> None:
        """Take x, or its numbers, as loaded. An entry without them leaves x to the
        parameter, as before a first step.
        """
        self._valid, self._without_x = set(), set()
        for handle in handles:
            if handle.has_stepped:
                self._has_stepped = True
                has_x = handle.iterate_key in entries.get(handle.p, {})
                (self._valid if has_x else self._without_x).add(handle.p)

    def _has_x(self, handle: ParameterHandle) -> bool:
        """Return whether the state has x of a parameter, or the numbers from which it
        follows (zeros, where the parameter is x). May cost a sync.
        """
        if handle.numbers is not None or handle.p in self._valid:
            return True
        return handle.p not in self._without_x and handle.has_stepped

    def _switch(self, optimizer: Host, to_train: bool) -> None:
        if _in_train_mode(optimizer) == to_train:
            return
        for handle in optimizer.parameter_handles(agree=False):
            if self._has_x(handle):
                _exchange(handle, to_train)
        optimizer.notify_written()
        for group in optimizer.param_groups:
            group[TRAIN_MODE] = to_train

    handled_calls = frozenset({"eval", "iterates", "train"})


def _exchange(handle: ParameterHandle, to_train: bool) -> None:
    """Let a parameter be y (``to_train``) or x."""
    piece = handle.piece
    if handle.numbers is None:
        parameter = piece.clone()
        piece.copy_(handle["x"])
        handle["x"].copy_(parameter)
    elif to_train:
        piece.copy_(handle.recover_ahead())
    else:
        piece.copy_(handle.recover_x(piece))


def _in_train_mode(optimizer: Host) -> bool:
    return all(group[TRAIN_MODE] for group in optimizer.param_groups)
