"""The lanes of all groups, and this step's gradients for them."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from functools import partial
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from marsopt import lanes, taking
from marsopt.chunks import chunks, should_stack
from marsopt.gather import Gather
from marsopt.numbers import Numbers
from marsopt.stacks import adjacent
from marsopt.step import Stack, Verdict, working

# What, when it changes in a group, changes formulas and not only their numbers.
STRUCTURE = ("mars_type", "optimize_1d", "amsgrad", "epsilon_hat")


def label(groups: Sequence[dict[str, Any]], number: int, index: int) -> str:
    """What a parameter is called in messages."""
    group = groups[number]
    if "param_names" in group:
        return f"parameter {group['param_names'][index]!r}"
    return f"parameter {index} of group {number}"


def labels(groups: Sequence[dict[str, Any]]) -> list[tuple[Tensor, str]]:
    """All parameters with what they are called."""
    return [
        (p, label(groups, number, i))
        for number, group in enumerate(groups)
        for i, p in enumerate(group["params"])
    ]


def _structure(groups: Sequence[dict[str, Any]]) -> list[tuple]:
    return [
        (
            id(g),
            g["clip"] is None,
            *(g[key] for key in STRUCTURE),
            *map(id, g["params"]),
        )
        for g in groups
    ]


class Layout:
    """Made from groups and state, and made anew when ``fits`` says so.

    Args:
        groups: the optimizer's param groups.
        state: the optimizer's state; what is missing is made, as zeros.
        options: what the optimizer was built with.
        compile: whether lanes move in compiled chunks.
        before: the layout that this one replaces; what lies in its stacks stays there.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        state: MutableMapping[Tensor, dict[str, Tensor]],
        options: dict[str, Any],
        compile: bool,
        before: Layout | None = None,
    ) -> None:
        self._groups, self._options = groups, options
        self._structure = _structure(groups)
        filled = [group for group in groups if group["params"]]
        self._numbers = [Numbers(group, options) for group in filled]
        stacked = partial(should_stack, compile=compile)
        known = {} if before is None else before.known
        self.chunks = chunks(
            [
                lane
                for group, numbers in zip(filled, self._numbers, strict=True)
                for lane in lanes.build(group, numbers, state, options, stacked, known)
            ],
            compile,
        )
        self.lanes = [lane for chunk in self.chunks for lane in chunk.lanes]
        self.leaves = [lane.params for lane in self.lanes]
        self.params = list(chain.from_iterable(self.leaves))
        self._every = [p for group in groups for p in group["params"]]
        self._forms = [(p.shape, p.device, p.dtype) for p in self.params]
        self._known = set(self.params)
        lanes.forget_strangers(state, groups)
        self.hold(state)
        self._gather = Gather()
        self._takers = taking.prepare(self.lanes) if options["take_grads"] else []
        with torch.no_grad():  # now, so that no address changes in the first step
            for lane in self.lanes:
                lane.settle_in(lane.pieces())

    def hold(self, state: Mapping[Tensor, dict[str, Tensor]]) -> None:
        """Note what the lanes hold views of: whoever replaces it gets a new layout."""
        self._held = [(p, state[p], lanes.own(state[p])) for p in self.params]

    @property
    def known(self) -> dict[int, Tensor]:
        """All stacks of several leaves, by address."""
        stacks = [
            stack
            for lane in self.lanes
            if len(lane.params) > 1
            for stack in (lane.home, *lane.state.values())
            if stack is not None and not is_fake(stack)
        ]
        return {stack.data_ptr(): stack for stack in stacks}

    def fits(self, state: Mapping[Tensor, dict[str, Tensor]]) -> bool:
        """Whether groups and state are still those that this was made for.

        Raises:
            ValueError: a sparse gradient, or a parameter of another shape or on another
                device than before.
        """
        known = self._check_forms()
        for number, group in enumerate(self._groups):
            for i, p in enumerate(group["params"]):
                if p.grad is None:
                    continue
                if p.grad.layout != torch.strided:
                    raise ValueError(
                        f"got a gradient of layout {p.grad.layout} for "
                        f"{label(self._groups, number, i)}, expected torch.strided: "
                        "make it dense (nn.Embedding(sparse=False))"
                    )
                known = known and p in self._known  # else it has thawed
        return (
            known
            and self._structure == _structure(self._groups)
            and all(
                state.get(p) is entry and all(map(is_, lanes.own(entry), tensors))
                for p, entry, tensors in self._held
            )
        )

    def covers(self) -> bool:
        """Whether the groups hold the parameters that this was made for."""
        held = [p for group in self._groups for p in group["params"]]
        return len(held) == len(self._every) and all(map(is_, held, self._every))

    def _check_forms(self) -> bool:
        """Whether parameters have the dtype that their lanes were made for."""
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

    def stacks(self) -> tuple[list[Stack], list[Tensor] | None]:
        """Arguments of the pure step, with the groups' present hyperparameters; and
        which leaves have a gradient (None: all).

        Raises:
            ValueError: a hyperparameter out of its range.
        """
        for numbers in self._numbers:
            numbers.refresh()
        return self._gather.stacks(self.lanes)

    def grad_norm(self) -> Tensor:
        """Global norm of the gradients that are there, 0-D."""
        collectives = self._options["collectives"]
        squares = [
            torch.zeros((), device=p.device)
            if p.grad is None
            else torch.linalg.vector_norm(working(collectives.local(p.grad))).square()
            for p in self.params
        ]
        partial = torch.stack(squares)[:, None]
        return collectives.sum(partial, self.params).sum().sqrt()

    def join_gradients(self) -> None:
        """Move gradients of one shape into one buffer, where all are plain."""
        for lane in self.lanes:
            grads = [p.grad for p in lane.params if p.grad is not None]
            whole = all(x is p for x, p in zip(lane.pieces(), lane.params, strict=True))
            complete = len(grads) == len(lane.params)
            alike = len({g.dtype for g in grads}) == 1
            if whole and complete and alike and adjacent(grads) is None:
                rows = torch.stack(grads).unbind()
                for p, row in zip(lane.params, rows, strict=True):
                    p.grad = row

    def scatter(self) -> None:
        """After a step: parameters that were copied into stacks go home."""
        self._gather.scatter()

    def take(
        self, state: MutableMapping[Tensor, dict[str, Tensor]], verdict: Verdict
    ) -> None:
        """After a step: gradients become h where they can, and leave their owner."""
        if self._takers and verdict.finite:
            taking.take(self._takers, state, verdict.a)
            self.hold(state)
        for p in self.params:
            p.grad = None

    def settle(self) -> None:
        """Make the state what it says: h may still have to be scaled."""
        taking.settle(self._takers)

    def blame(self, sums: Tensor) -> str:
        """Whose gradient is not finite, from the complete sums of ``measure``."""
        rows = torch.isfinite(sums).all(1).logical_not().nonzero().flatten().tolist()
        everyone = [name for lane in self.lanes for name in lane.labels]
        named = ", ".join(everyone[i] for i in rows[:3])
        more = ", ..." if len(rows) > 3 else ""
        return (
            "got a gradient that is not finite, or whose square overflows, in "
            f"{len(rows)} of {len(everyone)} parameters ({named}{more}), expected "
            "numbers: nothing has changed; lower the learning rate, or pass "
            "nonfinite='skip' to go on"
        )
