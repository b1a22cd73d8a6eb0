"""The state of parameters as their algorithms need it: tensors that are there stay, and
missing tensors are made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from marsopt.functional.buffers import (
    buffer_shape,
    entries_at_owner,
    owned_leaves,
    start_at_owner,
    start_beside,
)
from marsopt.optim.loading import as_tensor
from marsopt.optim.state_dict import STAGE_COUNT, State, in_form_of
from marsopt.rules.component import Algorithm, owned_shapes
from marsopt.rules.formats import CODED
from marsopt.rules.registry import STATE_KEYS
from marsopt.step.owners import Collectives, OwnedTensors


def check_state(
    p: Tensor, what: str, algorithm: Algorithm, state: State, collectives: Collectives
) -> None:
    """Check what ``state`` holds of a parameter for ``algorithm``.

    Raises:
        ValueError: no tensor, or one of another shape or device than the parameter's.
    """
    entry, piece = state.get(p, {}), collectives.local(p)
    for buffer in algorithm.buffers.values():
        value = entry.get(buffer.key)
        if value is None:
            continue
        got, do = f"a {type(value).__name__}", "change all state of a parameter with it"
        is_owned = buffer.home == "owner"
        shape = piece.shape if is_owned else buffer_shape(algorithm, buffer, piece)
        if isinstance(value, Tensor):
            local = collectives.local(value)
            if is_owned or local.shape == shape:
                if local.device == piece.device:
                    continue
                do = "move all state back before a step"
            got = f"a tensor of shape {tuple(local.shape)} on {local.device}"
        raise ValueError(
            f"got {got} as state {buffer.key!r} of {what}, expected a tensor of shape "
            f"{tuple(shape)} on {piece.device}, as the parameter is: {do}, or "
            "delete optimizer.state[parameter], which then restarts"
        )


def held_steps(state: State, params: Sequence[Tensor], like: Tensor) -> list[Tensor]:
    """Return the counts of steps that ``state`` holds of each parameter. Where there is
    none in the form of ``like``, the state gets one.
    """
    for p in params:
        before = state[p].get("step")
        if (
            type(before) is not Tensor
            or before.shape != like.shape
            or (before.dtype, before.device) != (like.dtype, like.device)
            or is_fake(before) != is_fake(like)
        ):
            number = torch.zeros_like(like)
            if before is not None:
                number.copy_(as_tensor(before).reshape(like.shape))
            state[p]["step"] = number
    return [state[p]["step"] for p in params]


def view_steps(state: State, params: Sequence[Tensor], t: Tensor) -> None:
    """Give ``state`` views of ``t`` (N,) as the parameters' counts of steps, with the
    values that it has.
    """
    views = t.unbind()
    for p, view in zip(params, views, strict=True):
        before = state[p].get("step")
        if before is not None and is_fake(as_tensor(before)) == is_fake(t):
            view.copy_(as_tensor(before).reshape(()))
        state[p]["step"] = view


def attach(
    p: Tensor,
    piece: Tensor,
    algorithm: Algorithm,
    state: State,
    collectives: Collectives,
) -> dict[str, Tensor]:
    """Return the buffers at home in shards, by symbol, as ``state`` holds them for a
    parameter; missing tensors are made, and another rule's tensors deleted.

    Args:
        p: the parameter.
        piece: the elements of it in this process.
        algorithm: the algorithm that updates it.
        state: the optimizer's.
        collectives: of the ranks that hold the parameter.
    """
    buffers = algorithm.buffers
    unwanted = STATE_KEYS - {buffer.key for buffer in buffers.values()}
    debiased = {buffer.key for buffer in buffers.values() if buffer.is_debiased}
    state[p].setdefault("step", torch.zeros((), device="cpu"))
    state[p].update(in_form_of(algorithm, state[p], collectives))
    for key in unwanted & set(state[p]):
        del state[p][key]  # of another rule: stale when that one returns
    if debiased - set(state[p]):
        # all of them start with the count of steps: one that is new beside an old
        # momentum would be far too small
        # (new tensors, so that a state dict that is refused has changed none)
        for key in debiased & set(state[p]):
            state[p][key] = torch.zeros_like(state[p][key])
        state[p]["step"] = torch.zeros((), device="cpu")
    if algorithm.has_stages:
        state[p].setdefault(STAGE_COUNT, torch.zeros((), device="cpu"))
    else:
        state[p].pop(STAGE_COUNT, None)
    pieces = {}
    for symbol, buffer in buffers.items():
        if buffer.home != "shard":
            continue
        before = state[p].get(buffer.key)
        if not (
            isinstance(before, Tensor)
            and collectives.local(before).dtype == algorithm.dtype_of(buffer, piece)
            and (algorithm.state_dtype != CODED or before.is_contiguous())
        ):
            fresh = start_beside(algorithm, buffer, piece)
            if before is not None:
                fresh.copy_(collectives.local(before))
            state[p][buffer.key] = collectives.wrap(fresh, p)
        pieces[symbol] = collectives.local(state[p][buffer.key])
    return pieces


def _is_of_others(
    algorithm: Algorithm, p: Tensor, entry: Mapping[str, Any], numbers: Sequence[int]
) -> bool:
    """Return whether owners keep buffers of matrices of other shapes than the algorithm
    has: its ``sides`` or ``matrices`` have changed, so that they restart.

    Args:
        algorithm: the algorithm of ``p``.
        p: a parameter.
        entry: of it, in the state.
        numbers: of its matrices to which the buffers belong.
    """
    for symbol in algorithm.owned:
        buffer = algorithm.buffers[symbol]
        value = entry.get(buffer.key)
        if value is None:
            continue
        if not algorithm.matrices.is_even(p.shape):
            sizes = entries_at_owner(algorithm, buffer, p.shape)
            if value.shape != (sum(sizes[n] for n in numbers),):
                return True
        elif value.shape[1:] != owned_shapes(algorithm.matrices, p.shape, buffer)[0]:
            return True
    return False


def attach_owned(
    params: Sequence[tuple[Tensor, Algorithm]],
    state: State,
    before: Mapping[Tensor, tuple[int, ...]] | None,
    collectives: Collectives,
) -> list[tuple[OwnedTensors, tuple[int, ...]]]:
    """Return the buffers at home with the owners of matrices, as ``state`` holds them
    for each parameter, and the numbers of their matrices; missing buffers are made.

    Args:
        params: all parameters that share their exchanges, with their algorithms.
        state: the optimizer's.
        before: the rows of parameters' parts in the binding before; None: there is
            none. The owners may differ from those then, as they do where other
            parameters share the exchanges: all ranks have handed over their buffers.
        collectives: of the ranks that hold the parameters.
    """
    leaves = [leaf for p, algorithm in params for leaf in owned_leaves(algorithm, [p])]
    attached = []
    for (p, algorithm), ownership in zip(params, collectives.owns(leaves), strict=True):
        buffers = []
        parts = algorithm.matrices.part_rows(p.shape)
        all_matrices = range(algorithm.matrices.num_in(p.shape))
        here = ownership if before is None else all_matrices
        changed = before is not None and before.get(p, parts) != parts
        if changed or _is_of_others(algorithm, p, state[p], here):
            for symbol in algorithm.owned:
                state[p].pop(algorithm.buffers[symbol].key, None)
            state[p]["step"] = torch.zeros((), device="cpu")
            if algorithm.has_stages:
                state[p][STAGE_COUNT] = torch.zeros((), device="cpu")
        for symbol in algorithm.owned:
            buffer = algorithm.buffers[symbol]
            value = state[p].get(buffer.key)
            if value is None:
                value = start_at_owner(algorithm, buffer, p, ownership)
            elif before is not None:
                sizes = entries_at_owner(algorithm, buffer, p.shape)
                value = collectives.claim(value, ownership, sizes)
            state[p][buffer.key] = value
            buffers.append(value)
        attached.append((tuple(buffers), ownership))
    return attached


def drop_unstepped(state: State, present: Sequence[Tensor]) -> None:
    """Drop state of parameters that left their groups before a step (float32 masters
    took their place): torch.optim has none of these, since it makes state in a step.
    """
    left = [p for p in state.keys() - set(present) if isinstance(p, Tensor)]
    for p in left:
        if not float(state[p].get("step", 1.0)):
            del state[p]
