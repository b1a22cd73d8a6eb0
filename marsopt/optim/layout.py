"""The buckets of all groups, and this step's stacks over them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import reduce
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from marsopt.functional.collectives import Owned
from marsopt.functional.stacks import adjacent, repeated
from marsopt.functional.step_types import Decision, RuleGroup, Stack
from marsopt.optim import buckets
from marsopt.optim.buckets import ParameterBucket
from marsopt.optim.compiled import should_stack
from marsopt.optim.groups import (
    DeviceHyperparameters,
    check_matrices,
    label,
    labels,
    structure,
)
from marsopt.optim.state_dict import State, own
from marsopt.rules import checks
from marsopt.rules.buffers import LOOKAHEAD
from marsopt.rules.dtypes import working
from marsopt.rules.life import Held

WIDEST_LOAD = 16  # bytes: a GPU's, at multiples of as many
PATTERNS = 64  # of missing gradients that are kept: a mixture of experts has no end

Copies = tuple[list[Tensor], list[Tensor]]  # of what is to be copied: to, from


class Layout:
    """Made from groups and state, and made anew when ``fits`` says so.

    Args:
        groups: the optimizer's param groups.
        state: the optimizer's state; what is missing is made, as zeros.
        options: what the optimizer was built with.
        compile: whether the step is compiled.
        before: the layout that this one replaces; what lies in its stacks stays there.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        state: State,
        options: Mapping[str, Any],
        compile: bool,
        before: Layout | None = None,
    ) -> None:
        check_matrices(groups, options)
        self._groups, self._options = groups, options
        self._collectives = options["collectives"]
        self._state = state
        filled = [group for group in groups if group["params"]]
        self._hyper = [DeviceHyperparameters(group, options) for group in filled]

        def stacked(p: Tensor, num_alike: int) -> bool:
            return should_stack(p, compile, num_alike)

        known = {} if before is None else before.stacks
        self.groups = [
            found
            for group, hyper in zip(filled, self._hyper, strict=True)
            for found in buckets.build(
                group, hyper, state, self._collectives, stacked, known
            )
        ]
        self.buckets = [b for group in self.groups for b in group.buckets]
        for found in self.groups:
            # there from the start, to be loaded into
            if found.hyper.algorithm.has_stages:
                found.group.setdefault(STAGE_COUNT, 0)
        for bucket in self.buckets:
            buckets.attach(bucket, state, known)
        ways: dict[Hashable, list[ParameterBucket]] = {}
        for bucket in self.buckets:
            algorithm = bucket.algorithm
            if algorithm.matrix_only and algorithm.matrix_preconditioner.owned:
                cost = algorithm.matrix_preconditioner.cost
                ways.setdefault(cost, []).append(bucket)
        if ways and before is not None:
            before.publish_owned(state)
        for together in ways.values():
            buckets.attach_owned(together, state, moved=before is not None)
        self.members = [bucket.members for bucket in self.buckets]
        self.params = [p for bucket in self.buckets for p in bucket.params]
        self._every = [p for group in groups for p in group["params"]]
        self.held = [
            Held(
                p,
                self._collectives.local,
                state,
                bucket.algorithm.correction_keys,
                bucket.algorithm.leads_back,
            )
            for bucket in self.buckets
            for p in bucket.params
        ]
        _forget_removed(state, self._every)
        self._signature, self._seen = self._sign()
        self.scratch: dict[tuple[int, str], tuple[Tensor, tuple[Tensor, ...]]] = {}
        self._away: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._moved: list[Tensor] = []
        self._digest: str | None = None  # the groups' numbers
        self._live: dict[tuple[bool, ...], Tensor] = {}
        self.unaligned: str | None = None  # a gradient that no wide load can read
        self._forms = [(x.shape, x.device) for x in self.params]
        with torch.no_grad():  # now, so that no address changes in the first step
            for bucket in self.buckets:
                bucket.flattened(bucket.pieces())

    @property
    def stacks(self) -> dict[int, Tensor]:
        """Return all stacks of several parameters, and their groups' numbers from which
        x follows, by address.
        """
        stacks = [group.hyper.behind for group in self.groups]
        stacks += [
            stack
            for bucket in self.buckets
            if len(bucket.params) > 1
            for stack in (bucket.flat, *bucket.state.values())
        ]
        found = [s for s in stacks if s is not None and not is_fake(s)]
        return {stack.data_ptr(): stack for stack in found}

    def owned_entries(self) -> list[tuple[Tensor, str, Owned, int]]:
        """Return (parameter, key in its state, what of its matrices has its owner here,
        how many it has) of all buffers whose home is with owners.
        """
        return [
            (p, buffer.key, owns.of(buffer), num)
            for bucket in self.buckets
            for num in [bucket.algorithm.matrices.num_in(bucket.shape)]
            for p, owns in zip(bucket.params, bucket.owns, strict=False)
            for symbol in bucket.algorithm.matrix_preconditioner.owned
            for buffer in [bucket.algorithm.buffers[symbol]]
        ]

    def publish_owned(self, state: State) -> None:
        """Replace all buffers at owners in ``state`` by those of all ranks: before
        others become owners. A collective.
        """
        for p, key, owns, num in self.owned_entries():
            if key in state.get(p, ()):
                found = state[p][key]
                state[p][key] = self._collectives.publish(found, p, num, owns)

    # ---- whether it still holds ------------------------------------------------------

    def covers(self) -> bool:
        """Return whether the groups hold the parameters that this was made for."""
        held = [p for group in self._groups for p in group["params"]]
        return len(held) == len(self._every) and all(map(is_, held, self._every))

    def fits(self, state: State) -> bool:
        """Return whether groups and state are still those that this was made for.

        Raises:
            ValueError: a sparse gradient, or a parameter of another shape or on another
                device than before.
        """
        self._check_forms()
        self._check_gradients()
        return state is self._state and self._sign()[0] == self._signature

    def _sign(self) -> tuple[list[Any], list[Any]]:
        """Return all that a layout depends on: formulas, who moves in which dtype, and
        which tensors hold the state; and the objects, which keep their ids while this
        does.

        Of state it has every step, and all tensors of the first parameter of each
        bucket: who replaces state (to move it off the device and back) replaces all.
        """
        state, groups = self._state, list(self._groups)
        seen: list[Any] = [*groups, *self._every]
        seen += [state.get(p, {}).get("step") for p in self.params]
        for bucket in self.buckets:
            keys = {buffer.key for buffer in bucket.algorithm.buffers.values()}
            entry = state.get(bucket.params[0], {})
            seen += [value for key, value in entry.items() if key in keys]
            seen.append(entry.get(LOOKAHEAD) if bucket.algorithm.num_behind else None)
        said = [structure(group, self._options) for group in groups]
        said += [
            (id(p), p.dtype, buckets.moves(p, state))
            for g in groups
            for p in g["params"]
        ]
        return [*said, *map(id, seen)], seen

    def _check_forms(self) -> None:
        for p, (shape, device) in zip(self.params, self._forms, strict=True):
            if p.shape != shape or p.device != device:
                (what,) = (text for q, text in labels(self._groups) if q is p)
                raise ValueError(
                    f"got {what} of shape {tuple(p.shape)} on {p.device}, expected "
                    f"{tuple(shape)} on {device}, where its state is: build a new MARS "
                    "after a parameter was resized or moved"
                )

    def _check_gradients(self) -> None:
        for number, group in enumerate(self._groups):
            for i, p in enumerate(group["params"]):
                grad = p.grad
                if grad is not None and grad.layout != torch.strided:
                    raise ValueError(
                        f"got a gradient of layout {grad.layout} for "
                        f"{label(self._groups, number, i)}, expected torch.strided: "
                        "make it dense (nn.Embedding(sparse=False))"
                    )

    # ---- a step ----------------------------------------------------------------------

    def gather(self) -> tuple[list[RuleGroup], Tensor]:
        """Return the arguments of the one step, with the groups' present
        hyperparameters; and which of its N parts have a gradient (N,), bool.

        Copied are gradients of buckets of several parameters (autograd and FSDP leave
        them apart), unless they lie in one buffer (``MARS.join_gradients``), and
        parameters that could not move: FSDP's shards. A parameter without a gradient
        gets zeros, so that the graph stays the same.

        Raises:
            ValueError: a hyperparameter out of its range.
            RuntimeError: a CUDA graph captures it, and it has to send something that is
                on the host.
        """
        refreshed = [hyper.refresh() for hyper in self._hyper]  # all of them
        if any(refreshed):
            self._digest = None
        copies: Copies = ([], [])
        self._away, self._moved = ([], []), []
        number, found = 0, []
        live: list[bool] = []
        for group in self.groups:
            stacks = []
            for bucket in group.buckets:
                stacks.append(self._stack(number, bucket, copies, live))
                number += 1
            hyper, lr = group.hyper, group.group["lr"]
            if isinstance(lr, Tensor) and not checks.can_read(lr):
                hyper = hyper._replace(unread_lr=hyper.lr)
            found.append(RuleGroup(hyper, stacks, group.group.get(STAGE_COUNT, 0)))
        if copies[0]:
            torch._foreach_copy_(*copies)
        return found, self._live_on(self.params[0].device, live)

    def digest(self) -> str:
        """Return the groups' numbers in the last ``gather``, for ranks to compare."""
        if self._digest is None:
            self._digest = ", ".join(hyper.digest_text() for hyper in self._hyper)
        return self._digest

    def _stack(
        self, number: int, bucket: ParameterBucket, copies: Copies, live: list[bool]
    ) -> Stack:
        pieces = bucket.pieces()
        x = bucket.flattened(pieces)
        if x is not None and x is bucket.flat:
            self._moved.extend(bucket.params)
        if x is None:
            x, rows = self._scratch_stack(number, "x", pieces, copies)
            self._away[0].extend(pieces)
            self._away[1].extend(rows)
        return Stack(
            algorithm=bucket.algorithm,
            x=x,
            g=self._gradients(number, bucket, pieces, copies, live),
            buffers=bucket.state,
            shape=bucket.shape,
            rows=bucket.rows,
            cuts=bucket.cuts,
        )

    def _gradients(
        self,
        number: int,
        bucket: ParameterBucket,
        pieces: list[Tensor],
        copies: Copies,
        live: list[bool],
    ) -> Tensor:
        local = bucket.collectives.local
        every = [p.grad for p in bucket.params]
        has = [g is not None for g in every]
        live += repeated(has, bucket.num_clipped)
        grads = [local(g) for g in every if g is not None]
        strides = pieces[0].stride()
        if all(has) and all(g.stride() == strides for g in grads):
            g = adjacent(grads)
            if g is not None:
                if g.is_cuda and g.storage_offset() * g.itemsize % WIDEST_LOAD:
                    self.unaligned = bucket.labels[0]
                return g
        rest = iter(grads)
        dtype = reduce(torch.promote_types, (g.dtype for g in grads or pieces))
        zero = torch.zeros((), dtype=dtype, device=pieces[0].device)
        like = [
            next(rest) if real else zero.expand_as(x)
            for x, real in zip(pieces, has, strict=True)
        ]
        return self._scratch_stack(number, "g", like, copies, strides, dtype)[0]

    def _scratch_stack(
        self,
        number: int,
        role: str,
        leaves: Sequence[Tensor],
        copies: Copies,
        strides: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return a scratch stack and its rows; the leaves are noted down to be copied
        into them.
        """
        first, dtype = leaves[0], dtype or leaves[0].dtype
        scratch, rows = self.scratch.get((number, role), (None, ()))
        if scratch is None or scratch.dtype != dtype:
            made: dict[str, Any] = dict(dtype=dtype, device=first.device)
            if strides is not None and len(leaves) == 1:
                scratch = torch.empty_strided(first.shape, strides, **made)[None]
            else:
                scratch = torch.empty(len(leaves), *first.shape, **made)
            rows = scratch.unbind()
            self.scratch[number, role] = scratch, rows
        copies[0].extend(rows)
        copies[1].extend(leaves)
        return scratch, rows

    def _live_on(self, device: torch.device, live: list[bool]) -> Tensor:
        """Return ``live`` as a bool tensor (N,) on ``device``. A pattern is sent there
        when it is first seen, and kept: later steps with it copy nothing, so that a
        CUDA graph may capture them.

        Raises:
            RuntimeError: a CUDA graph captures the step, and no step before it had this
                pattern.
        """
        pattern = tuple(live)
        found = self._live.get(pattern)
        if found is not None:
            return found
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"got a step to capture that lacks {len(live) - sum(live)} gradients, "
                "as no step before it did, expected one that lacks the same as a step "
                "before: take one with these gradients before the capture"
            )
        found = torch.tensor(live).to(device, non_blocking=True)
        if len(self._live) < PATTERNS:  # what a graph has captured stays where it is
            self._live[pattern] = found
        return found

    def scatter(self) -> None:
        """Copy parameters that were copied in back to where they live.

        The version of parameters that moved with their stack is counted up, so that
        autograd finds out about a graph from before the step.

        Scratch on a GPU goes back to the caching allocator, where the next forward pass
        finds it; on a CPU fresh pages cost more than the copies.
        """
        if self._away[0]:
            torch._foreach_copy_(*self._away)
        torch.autograd.graph.increment_version(self._moved)
        self._away, self._moved = ([], []), []
        for key in [k for k, (s, _) in self.scratch.items() if s.device.type != "cpu"]:
            del self.scratch[key]

    def count(self, decision: Decision, skipped: Tensor) -> None:
        """Count the step that was taken, or skipped, after everything is written: where
        that fails, it was not taken.
        """
        old = [group.hyper.t for group in self.groups]
        old += [group.hyper.behind for group in self.groups]
        pairs = zip(old, [*decision.t, *decision.behind], strict=True)
        kept, new = zip(*(pair for pair in pairs if pair[0] is not None), strict=True)
        torch._foreach_copy_(kept, new)
        skipped += decision.finite.logical_not()
        for group in self.groups:
            if group.hyper.algorithm.has_stages:
                group.group[STAGE_COUNT] += 1

    # ---- gradients -------------------------------------------------------------------

    def grad_norm(self) -> Tensor:
        """Return the global norm of the gradients that are there, 0-D."""
        squares = [
            torch.zeros((), device=p.device)
            if p.grad is None
            else torch.linalg.vector_norm(
                working(self._collectives.local(p.grad))
            ).square()
            for p in self.params
        ]
        partial = torch.stack(squares)[:, None]
        return self._collectives.sum(partial, self.params).sum().sqrt()

    def join_gradients(self) -> None:
        """Move gradients of one shape into one buffer, where all are plain."""
        for bucket in self.buckets:
            grads = [p.grad for p in bucket.params if p.grad is not None]
            whole = all(map(is_, bucket.pieces(), bucket.params))
            complete = len(grads) == len(bucket.params)
            alike = len({g.dtype for g in grads}) == 1
            if whole and complete and alike and adjacent(grads) is None:
                rows = torch.stack(grads).unbind()
                for p, row in zip(bucket.params, rows, strict=True):
                    p.grad = row

    def blame(self, sums: Tensor) -> str:
        """Say whose gradient is not finite, from the complete sums of the step."""
        bad = torch.isfinite(sums).all(1).logical_not().nonzero().flatten().tolist()
        everyone = [name for bucket in self.buckets for name in bucket.labels]
        parts = [b.num_clipped for b in self.buckets for _ in b.labels]
        owners = [i for i, num in enumerate(parts) for _ in range(num)]
        blamed = list(dict.fromkeys(owners[row] for row in bad))
        if not blamed:
            return (
                "got a learning rate in a tensor that is not finite, expected a number "
                ">= 0: nothing has changed; look at what sets it"
            )
        named = ", ".join(everyone[i] for i in blamed[:3])
        more = ", ..." if len(blamed) > 3 else ""
        return (
            "got a gradient that is not finite, or whose square overflows, in "
            f"{len(blamed)} of {len(everyone)} parameters ({named}{more}), expected "
            "numbers: nothing has changed; lower the learning rate, or pass "
            "nonfinite='skip' to go on"
        )


# How many steps a group has taken whose preconditioner has stages: the host's count,
# saved with the group, so that a run that goes on keeps its rhythm.
STAGE_COUNT = "stage_count"


def _forget_removed(state: State, present: Sequence[Tensor]) -> None:
    """Drop our state of parameters that are in no group any more: somebody exchanged
    them (for float32 masters, say), and torch's state_dict knows no name for them.
    """
    known = set(present)
    for p in [p for p in state if isinstance(p, Tensor) and p not in known]:
        for key in own(state[p]):
            del state[p][key]
        if not state[p]:
            del state[p]
