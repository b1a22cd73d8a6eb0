"""The buckets of all groups, and this step's stacks over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from marsopt.functional.stacks import adjacent, repeated
from marsopt.functional.step_types import Decision, RuleGroup, Stack
from marsopt.optim import buckets
from marsopt.optim.buckets import ParameterBucket
from marsopt.optim.calls import should_stack
from marsopt.optim.groups import check_matrices, label, labels
from marsopt.optim.hyperparameters import DeviceHyperparameters, structure
from marsopt.optim.live import Live
from marsopt.optim.state_dict import State, forget_strangers, own
from marsopt.rules.algorithm import working

WIDEST_LOAD = 16  # bytes: a GPU's, at multiples of as many


def _structure(groups: Sequence[dict[str, Any]]) -> list[tuple]:
    return [(id(g), *structure(g), *map(id, g["params"])) for g in groups]


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
        self._groups, self._collectives = groups, options["collectives"]
        self._structure, self._state = _structure(groups), state
        filled = [group for group in groups if group["params"]]
        self._hyper = [DeviceHyperparameters(group, options) for group in filled]
        known = {} if before is None else before.known

        def stacked(p: Tensor, num_alike: int) -> bool:
            return should_stack(p, compile, num_alike)

        self.groups = [
            found
            for group, hyper in zip(filled, self._hyper, strict=True)
            for found in buckets.build(group, hyper, state, options, stacked, known)
        ]
        self.buckets = [b for group in self.groups for b in group.buckets]
        self.leaves = [bucket.params for bucket in self.buckets]
        self.params = list(chain.from_iterable(self.leaves))
        self._known_params = set(self.params)
        self._every = [p for group in groups for p in group["params"]]
        forget_strangers(state, groups)
        self._held = [(b.params[0], own(state[b.params[0]])) for b in self.buckets]
        self._steps = [state[p]["step"] for p in self.params]
        self._scratch: dict[tuple[int, str], tuple[Tensor, tuple[Tensor, ...]]] = {}
        self._away: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._moved: list[Tensor] = []
        self._told: str | None = None  # the groups' numbers
        self._live = Live()
        self.unaligned: str | None = None  # a gradient that no wide load can read
        self._forms = [(x.shape, x.device, x.dtype) for x in self.params]
        with torch.no_grad():  # now, so that no address changes in the first step
            for bucket in self.buckets:
                bucket.flattened(bucket.pieces())

    @property
    def known(self) -> dict[int, Tensor]:
        """Return all stacks of several parameters, by address."""
        stacks = [
            stack
            for bucket in self.buckets
            if len(bucket.params) > 1
            for stack in (bucket.flat, *bucket.state.values())
            if stack is not None and not is_fake(stack)
        ]
        return {stack.data_ptr(): stack for stack in stacks}

    # ---- whether it still holds ------------------------------------------------------

    def covers(self) -> bool:
        """Return whether the groups hold the parameters that this was made for."""
        held = [p for group in self._groups for p in group["params"]]
        return len(held) == len(self._every) and all(map(is_, held, self._every))

    def fits(self, state: State) -> bool:
        """Return whether groups and state are still those that this was made for.

        Of state it looks at every step, and at all tensors of the first parameter of
        each bucket: who replaces state (to move it off the device and back) replaces
        all.

        Raises:
            ValueError: a sparse gradient, or a parameter of another shape or on another
                device than before.
        """
        known = self._check_forms()
        for number, group in enumerate(self._groups):
            for i, p in enumerate(group["params"]):
                grad = p.grad  # read once: of a subclass it is slow
                if grad is None:
                    continue
                if grad.layout != torch.strided:
                    raise ValueError(
                        f"got a gradient of layout {grad.layout} for "
                        f"{label(self._groups, number, i)}, expected torch.strided: "
                        "make it dense (nn.Embedding(sparse=False))"
                    )
                known = known and p in self._known_params  # else it has thawed
        return (
            known
            and state is self._state
            and self._structure == _structure(self._groups)
            and all(
                state.get(p, {}).get("step") is step
                for p, step in zip(self.params, self._steps, strict=True)
            )
            and all(
                state.get(p, {}).get(key) is tensor
                for p, held in self._held
                for key, tensor in held.items()
            )
        )

    def _check_forms(self) -> bool:
        """Return whether parameters have the dtype that their buckets were made for."""
        same = True
        for p, (shape, device, dtype) in zip(self.params, self._forms, strict=True):
            same = same and p.dtype == dtype
            if p.shape != shape or p.device != device:
                (what,) = (text for q, text in labels(self._groups) if q is p)
                raise ValueError(
                    f"got {what} of shape {tuple(p.shape)} on {p.device}, expected "
                    f"{tuple(shape)} on {device}, where its state is: build a new MARS "
                    "after a parameter was resized or moved"
                )
        return same

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
            self._told = None
        copies: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._away, self._moved = ([], []), []
        number, live, found = 0, [], []
        for group in self.groups:
            stacks = []
            for bucket in group.buckets:
                stacks.append(self._stack(number, bucket, copies, live))
                number += 1
            found.append(RuleGroup(group.hyper, stacks))
        if copies[0]:
            torch._foreach_copy_(*copies)
        return found, self._live.on(self.params[0].device, live)

    def told(self) -> str:
        """Return the groups' numbers in the last ``gather``, for ranks to compare."""
        if self._told is None:
            self._told = ", ".join(hyper.told() for hyper in self._hyper)
        return self._told

    def _stack(
        self, number: int, bucket: ParameterBucket, copies, live: list[bool]
    ) -> Stack:
        pieces = bucket.pieces()
        x = bucket.flattened(pieces)
        if x is not None and x is bucket.flat:
            self._moved.extend(bucket.params)
        if x is None:
            x, rows = self._rows(number, "x", pieces, copies)
            self._away[0].extend(pieces)
            self._away[1].extend(rows)
        g = self._gradients(number, bucket, pieces, copies, live)
        algorithm, state = bucket.algorithm, bucket.state
        return Stack(
            algorithm=algorithm,
            x=x,
            g=g,
            h=state.get("h"),
            buffers={symbol: state[symbol] for symbol in algorithm.buffers},
            shape=bucket.shape,
            rows=bucket.rows,
        )

    def _gradients(
        self,
        number: int,
        bucket: ParameterBucket,
        pieces: list[Tensor],
        copies,
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
        return self._rows(number, "g", like, copies, strides, dtype)[0]

    def _rows(
        self, number: int, role: str, leaves, copies, strides=None, dtype=None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return a scratch stack and its rows; the leaves are noted down to be copied
        into them.
        """
        first, dtype = leaves[0], dtype or leaves[0].dtype
        scratch, rows = self._scratch.get((number, role), (None, ()))
        if scratch is None or scratch.dtype != dtype:
            made = dict(dtype=dtype, device=first.device)
            if strides is not None and len(leaves) == 1:
                scratch = torch.empty_strided(first.shape, strides, **made)[None]
            else:
                scratch = torch.empty(len(leaves), *first.shape, **made)
            rows = scratch.unbind()
            self._scratch[number, role] = scratch, rows
        copies[0].extend(rows)
        copies[1].extend(leaves)
        return scratch, rows

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
        for key in [k for k, (s, _) in self._scratch.items() if s.device.type != "cpu"]:
            del self._scratch[key]

    def count(self, decision: Decision, skipped: Tensor) -> None:
        """Count the step that was taken, or skipped, after everything is written: where
        that fails, it was not taken.
        """
        torch._foreach_copy_([group.hyper.t for group in self.groups], decision.t)
        skipped += decision.finite.logical_not()

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
        named = ", ".join(everyone[i] for i in blamed[:3])
        more = ", ..." if len(blamed) > 3 else ""
        return (
            "got a gradient that is not finite, or whose square overflows, in "
            f"{len(blamed)} of {len(everyone)} parameters ({named}{more}), expected "
            "numbers: nothing has changed; lower the learning rate, or pass "
            "nonfinite='skip' to go on"
        )
