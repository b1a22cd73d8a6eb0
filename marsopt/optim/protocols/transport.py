"""Transport in the class: parameters hold the point ahead while gradients are taken,
and x, which is trained, for evaluation and in checkpoints.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from marsopt.optim.compiled import once
from marsopt.optim.protocols.base import (
    CorrectionProtocol,
    Entries,
    Handles,
    Host,
    ParameterHandle,
)
from marsopt.optim.state_dict import TRAIN_MODE
from marsopt.rules.buffers import AHEAD
from marsopt.rules.dtypes import without_autocast

TOO_OFTEN = 3
REMIND_AFTER = 100  # steps ahead of what is trained, which nobody has asked for


class Versions(NamedTuple):
    """Autograd's counters of writes, and where p lies."""

    p: int
    piece: int  # of p on this rank: DCP writes there
    storage: int  # of that: p.data = ... gives it another
    x: int  # of x, or of the numbers from which it follows


class Lookahead(CorrectionProtocol):
    """Parameters hold y, the point ahead; x is in the state, or follows from y, the
    moments and the last step's numbers. Lets parameters be x for evaluation, and finds
    out where somebody else has written a parameter: x restarts from there, so that
    nothing which is loaded, averaged or clamped between two steps is lost.

    Writing is found by autograd's version counters (of the parameter, and of its x or
    numbers for checkpoints that load into the tensors of a state dict) and by the
    storage, which ``p.data = ...`` exchanges. What is written in place through
    ``p.data`` counts elsewhere, and is not found.
    """

    def __init__(self) -> None:
        # whether parameters are x for a state dict alone, until training goes on
        self.progress: bool = False
        # versions after our last write, of parameters that have taken a step: of others
        # p is x; None: p and x are to be trusted
        self._versions: dict[Tensor, Versions | None] = {}
        self._num_written_before = 0  # steps in a row before which somebody has written
        self._num_steps = 0
        self._is_asked_for_x = self._is_followed = False
        self._say = once()

    # ---- a step ----------------------------------------------------------------------

    def before_step(self, optimizer: Host, handles: Handles) -> None:
        """Let x be p wherever p is not what we wrote.

        Raises:
            RuntimeError: parameters are x; or somebody writes them before every step,
                which would be another algorithm.
        """
        if self.progress:  # since the backward pass
            optimizer.train()
        if not _in_train_mode(optimizer):  # a closure may have ended so, too
            raise RuntimeError(
                "got step() in eval mode, expected train mode: the gradient belongs to "
                "the point ahead; call optimizer.train() before the forward pass (or "
                "model.train(), where the optimizer follows the model), and evaluate "
                "after step(), not between backward() and step(); a model that trains "
                "in eval mode is not to be followed (marsopt.MARS without follow)"
            )
        written = [h for h in _looking_ahead(handles) if self._is_written(h)]
        has_stepped = any(handle.p in self._versions for handle in written)
        self._num_written_before = self._num_written_before + 1 if has_stepped else 0
        if self._num_written_before >= TOO_OFTEN:
            self._num_written_before = 0
            raise RuntimeError(
                f"got parameters that were written before each of {TOO_OFTEN} steps, "
                'expected nobody to write between steps with correction="transport": '
                "write between optimizer.eval() and optimizer.train(), or choose "
                "another correction (SAM moves parameters before every step)"
            )
        is_cuda = bool(written) and written[0].p.is_cuda
        if is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "got a step to capture whose parameters are new to it, expected one "
                "after an ordinary step: replays would start from y every time; take a "
                "step before the capture, and write parameters between eval() and "
                "train()"
            )
        for handle in written:
            self._restart(handle)

    def after_step(self, optimizer: Host, handles: Handles) -> None:
        """Note what parameters and x are after our own writes; say once where nobody
        asks for x.
        """
        for handle in _looking_ahead(handles):
            self._versions[handle.p] = _versions(handle)
        self._num_steps += 1
        if self._num_steps == REMIND_AFTER and not self._is_asked_for_x:
            self._say(
                logging.WARNING,
                f"{REMIND_AFTER} steps with correction='transport', and neither "
                "follow, eval nor iterates was called: the model's parameters are the "
                "points where gradients are taken, ahead of what is trained. Evaluated "
                "or saved as they are, they lose what the correction gains: call "
                "optimizer.follow(model) once, or optimizer.eval() before and "
                "optimizer.train() after",
            )

    # ---- modes -----------------------------------------------------------------------

    def eval(self, optimizer: Host) -> None:
        """Put x into parameters, to stay there until ``train``."""
        self._is_asked_for_x = True
        self._switch(optimizer, to_train=False)
        self.progress = False

    def train(self, optimizer: Host) -> None:
        """Put the points ahead back into parameters."""
        self._switch(optimizer, to_train=True)
        self.progress = False

    def expose_for_saving(self, optimizer: Host) -> None:
        """As ``eval``, until the next forward pass of training or the next step."""
        if _in_train_mode(optimizer):
            self._switch(optimizer, to_train=False)
            self.progress = True

    def state_dict(self, optimizer: Host) -> None:
        """Let a state dict be that of eval mode, where a model is followed, as its own
        is; where it is that of train mode, say so once.
        """
        if self._is_followed:
            self.expose_for_saving(optimizer)
        elif self._versions and _in_train_mode(optimizer):
            self._say(
                logging.WARNING,
                "state_dict() in train mode: the parameters are the points where "
                "gradients are taken, ahead of the model that is trained. Training "
                "resumes exactly from them; to save or evaluate the model, call "
                "optimizer.eval() before and optimizer.train() after, or "
                "optimizer.follow(model) once",
            )

    def is_in(self, optimizer: Host, train: bool) -> bool:
        """Return whether parameters are as in this mode, and stay so."""
        return _in_train_mode(optimizer) == train and not self.progress

    def follow(self, optimizer: Host, model: nn.Module) -> None:
        """Let ``model`` switch modes: by its forward passes, and by its state dicts and
        those of its parts.
        """
        self._is_followed = self._is_asked_for_x = True
        for links in list(FOLLOWERS.values()):
            links[:] = [link for link in links if not link.give_way(optimizer)]
        link = Link(self, optimizer)
        FOLLOWERS.setdefault(model, []).append(link)
        # DDP's own module is called too, where it is evaluated without its wrapper
        called = [model]
        if isinstance(model, nn.parallel.DistributedDataParallel):
            called.append(model.module)
        for module in called:  # before FSDP gathers the parameters
            hook = module.register_forward_pre_hook(FollowMode(link), prepend=True)
            link.hooks.append(hook)
        for module in model.modules():
            hook = module.register_state_dict_pre_hook(ExposeForSaving(link))
            link.hooks.append(hook)

    def iterates(self, optimizer: Host) -> Callable[[Tensor], Tensor | None]:
        """Return what returns x of a parameter, None where the parameter is x."""
        self._is_asked_for_x = True
        handles = optimizer.synced_handles()
        ahead = _looking_ahead(handles) if _in_train_mode(optimizer) else []
        by_parameter = {handle.p: handle for handle in ahead}

        @torch.no_grad()
        @without_autocast
        def find_iterate(p: Tensor) -> Tensor | None:
            handle = by_parameter.get(p)
            if handle is None or p not in self._versions:  # no step, no load
                return None
            if handle.numbers is None:
                return handle.whole("x")
            return handle.wrapped(handle.recover_x(handle.piece))

        return find_iterate

    def _switch(self, optimizer: Host, to_train: bool) -> None:
        if _in_train_mode(optimizer) == to_train:
            return
        # one rank may do it alone, for a state dict
        call = "train()" if to_train else "eval()"
        handles = optimizer.parameter_handles(call, agree=False)
        with optimizer.writing:
            ahead = _looking_ahead(handles)
            self._exchange(ahead, to_train)
            optimizer.notify_written()
            self._note_ours(ahead)
            for group in optimizer.param_groups:
                group[TRAIN_MODE] = to_train

    def _exchange(self, handles: Handles, to_ahead: bool) -> None:
        """Let parameters be y (``to_ahead``) or x, and keep the other one. Where
        somebody else has written a parameter since our last write, both are that.
        """
        for handle in handles:
            if self._is_written(handle):
                self._restart(handle)
        for handle in handles:
            piece = handle.piece
            if handle.numbers is None:
                parameter = piece.clone()
                piece.copy_(handle["x"])
                handle["x"].copy_(parameter)
            elif not to_ahead:
                _keep_ahead(handle, handle.wrapped(piece.detach()))
                piece.copy_(handle.recover_x(piece))
            else:
                piece.copy_(self._find_ahead(handle))
                _keep_ahead(handle, None)  # afterwards: the copy may be broken off

    def _find_ahead(self, handle: ParameterHandle) -> Tensor:
        """Return this rank's piece of the point ahead, where the parameter is x: what
        ``eval`` has kept, bit for bit, or what follows from x if nothing was kept.
        After a load nobody knows whether the kept point and the parameter are of one
        checkpoint: elements that are not follow from x, which stays what it is.
        """
        point = _kept_ahead(handle.entry)
        if point is None:
            return handle.recover_ahead()
        y, x = handle.local(point), handle.piece
        if self._versions.get(handle.p) is not None:  # nobody has written either
            return y
        x_of_y = handle.recover_x(y)
        # another device may round the last bits of x_of_y otherwise
        rounding = 16 * torch.finfo(x.dtype).eps * x.abs()
        is_of_x = (x_of_y - x).abs() <= 1e-3 * (y - x_of_y).abs() + rounding
        return torch.where(is_of_x, y, handle.recover_ahead())

    # ---- what others write -----------------------------------------------------------

    def _is_written(self, handle: ParameterHandle) -> bool:
        if handle.p not in self._versions:
            return True  # before the first step
        is_written = self._differs(handle)
        if is_written:
            self._say(
                logging.WARNING,
                "a parameter was written between two steps, by a checkpoint, an "
                "average or by hand: its lookahead restarts from what is there",
            )
        return is_written

    def _differs(self, handle: ParameterHandle) -> bool:
        """Return whether a parameter is not what we wrote; of a trusted one, no."""
        versions = self._versions.get(handle.p)
        return versions is not None and versions[:3] != _versions(handle)[:3]

    def _restart(self, handle: ParameterHandle) -> None:
        """Let x be what is in the parameter, and the point ahead where one is kept."""
        if handle.numbers is None:
            handle["x"].copy_(handle.piece)
        else:
            handle.numbers.zero_()
            if _kept_ahead(handle.entry) is not None:  # its size is in the checkpoint
                _keep_ahead(handle, handle.wrapped(handle.piece.detach()))
        self._note_ours([handle])  # once, also where a step fails and is tried again

    def _note_ours(self, handles: Handles) -> None:
        """Note that what parameters and x are was written by us. To be called after all
        writes: pieces of one buffer count together.
        """
        for handle in handles:
            if handle.p in self._versions:  # before its first step p stays the truth
                self._versions[handle.p] = _versions(handle)

    def sync_from_params(self, handles: Handles) -> None:
        for handle in _looking_ahead(handles):
            if handle.p in self._versions and self._is_written(handle):
                self._restart(handle)

    @contextmanager
    def rebinding(
        self,
        before: Handles,
        after: Handles,
        state: Container[Tensor],
        *,
        loading: bool = False,
    ) -> Iterator[None]:
        if not loading:
            self.sync_from_params(before)
        # what others have written stays so: ``load`` says whether it is trusted
        written = {h.p for h in _looking_ahead(before) if self._differs(h)}
        known = {p for p, v in self._versions.items() if v is not None} - written
        # trusted, in case that this is broken off
        self._versions = {
            p: v if p in written else None
            for p, v in self._versions.items()
            if p in state
        }
        try:
            yield
        finally:
            self._note_ours([h for h in _looking_ahead(after) if h.p in known])

    def load(self, handles: Handles, entries: Entries) -> None:
        """Trust p and x, whoever of the two came first. In eval mode p is x, whatever
        it holds by the time of ``train``; in train mode x is what was loaded, so that
        other weights are to be written between ``eval`` and ``train``. (Where moments
        are rounded on loading, x then follows from the rounded ones.)

        An entry without x lets x restart from p, as the next step finds it. Where x is
        the tensor in the state, unwritten since our last write, a partial load has
        passed it by: nothing is new.
        """
        self.progress = False  # parameters are what the groups' mode says
        for handle in _looking_ahead(handles):
            entry, versions = (
                entries.get(handle.p, {}),
                self._versions.pop(handle.p, None),
            )
            loaded = entry.get(handle.iterate_key)
            if handle.numbers is not None:
                if loaded is None:
                    handle.numbers.zero_()
                # the point ahead does not follow from x by moments that were rounded
                is_of_x = loaded is not None and not handle.has_rounded(entry)
                _keep_ahead(handle, _kept_ahead(entry) if is_of_x else None)
            if loaded is None or not handle.has_stepped:  # x is p
                continue
            is_ours = loaded is handle.entry[handle.iterate_key]
            is_old = versions is not None and versions.x == _versions(handle).x
            self._versions[handle.p] = versions if is_ours and is_old else None

    def start_as_copy(self, handles: Handles) -> None:
        """Notice what is written from now on: p and x were copied together."""
        ahead = [h for h in _looking_ahead(handles) if h.has_stepped]
        self._versions = {h.p: _versions(h) for h in ahead}

    answers = frozenset(
        {"eval", "expose_for_saving", "follow", "iterates", "state_dict", "train"}
    )


def _in_train_mode(optimizer: Host) -> bool:
    return all(group[TRAIN_MODE] for group in optimizer.param_groups)


def _looking_ahead(handles: Handles) -> list[ParameterHandle]:
    """Return those that look ahead; of others, somebody may have taken x away."""
    return [h for h in handles if h.looks_ahead]


def _versions(handle: ParameterHandle) -> Versions:
    p, piece, kept = handle.p, handle.piece, handle.numbers
    storage = piece.untyped_storage()._cdata
    kept = handle["x"] if kept is None else kept
    return Versions(p._version, piece._version, storage, kept._version)


def _kept_ahead(entry: Mapping[str, Any]) -> Tensor | None:
    """Return the point ahead that an entry of a state has; None where the parameter is
    it: a tensor without elements then stands for it, since torch's loader of flattened
    state dicts takes only keys that are there.
    """
    point = entry.get(AHEAD)  # (0, cols) is the piece of a rank that has no rows
    return None if point is None or point.shape == (0,) else point


def _keep_ahead(handle: ParameterHandle, point: Tensor | None) -> None:
    """Let the state have this as the point ahead, or none."""
    if point is None:
        handle.entry[AHEAD] = handle.piece.new_empty(0)
    elif point is not handle.entry.get(AHEAD):
        kept = torch.empty_like(handle.piece, requires_grad=False)
        handle.entry[AHEAD] = handle.wrapped(kept).copy_(point)


# ---- hooks of a model that is followed -----------------------------------------------


class Link:
    """What the hooks of a model know of the optimizer that it follows. It keeps the
    optimizer alive while parameters are points ahead: with the optimizer, x would be
    gone.

    Args:
        protocol: the optimizer's.
        optimizer: in train mode.
    """

    def __init__(self, protocol: Lookahead, optimizer: Host) -> None:
        self.protocol, self.hooks = protocol, list[RemovableHandle]()
        self._weak = weakref.ref(optimizer)
        self._alive: Host | None = optimizer

    @property
    def optimizer(self) -> Host | None:
        """Return the optimizer, if there is one."""
        return self._weak()

    def switched(self, optimizer: Host) -> None:
        """Note that the optimizer may have switched modes."""
        is_ahead = self.protocol.is_in(optimizer, train=True)
        self._alive = optimizer if is_ahead else None

    def give_way(self, successor: Host) -> bool:
        """Take the hooks away where the optimizer is gone, or where another one takes
        over parameters of it, which then are x. Return whether they are away.
        """
        optimizer = self.optimizer
        if optimizer is successor:
            return False
        if optimizer is not None:
            taken = {p for group in successor.param_groups for p in group["params"]}
            if taken.isdisjoint(p for g in optimizer.param_groups for p in g["params"]):
                return False
            optimizer.eval()
        for hook in self.hooks:
            hook.remove()
        return True


# of every model that is followed, by whom
FOLLOWERS: MutableMapping[nn.Module, list[Link]] = weakref.WeakKeyDictionary()


class FollowMode:
    """A forward pre-hook: x for a module in eval mode, else the points ahead. That of a
    copied or pickled model is nobody's.
    """

    def __init__(self, link: Link | None = None) -> None:
        self._link = link

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), ()

    def __call__(self, module: nn.Module, *_: object) -> None:
        optimizer = None if self._link is None else self._link.optimizer
        if self._link is None or optimizer is None:
            return
        if not self._link.protocol.is_in(optimizer, module.training):
            self._switch(optimizer, self._link, module.training)

    # in place of a graph that writes parameters; as in ``MARS.step``
    @torch._disable_dynamo
    def _switch(self, optimizer: Host, link: Link, train: bool) -> None:
        optimizer.train() if train else optimizer.eval()
        link.switched(optimizer)


class ExposeForSaving(FollowMode):
    """A pre-hook of ``state_dict``, which then holds x in any mode."""

    def __call__(self, *_: object) -> None:
        optimizer = None if self._link is None else self._link.optimizer
        if self._link is not None and optimizer is not None:
            optimizer.expose_for_saving()
            self._link.switched(optimizer)
