"""The binding of an optimizer: the one place that knows memory. It holds parameters,
gradients and state as the groups of a step, and says when they have changed.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from marsopt.functional.buffers import (
    entries_at_owner,
    index_of_leaves,
    leaf_of,
    owned_leaves,
    start_at_owner,
    start_beside,
)
from marsopt.optim.groups import labels, moves, structure
from marsopt.optim.loading import as_tensor
from marsopt.optim.numbers import FormulaValues, GroupValues
from marsopt.optim.state_dict import STAGE_COUNT, State
from marsopt.rules.algorithm import Algorithm
from marsopt.rules.buffers import Buffer, owned_shapes
from marsopt.rules.dtypes import working, working_dtype
from marsopt.rules.preconditioner import MatrixCost
from marsopt.rules.registry import STATE_KEYS
from marsopt.step import kernels
from marsopt.step.owners import LOCAL, Collectives, OwnerBuffer, Tensors
from marsopt.step.step import Gradients, Group
from marsopt.step.tables import (
    Decision,
    GroupInputs,
    formula,
    largest_square,
)

PATTERNS = 64  # of missing gradients that are kept: a mixture of experts has no end

FORM = attrgetter("shape", "dtype")


@dataclass(eq=False)
class Member:
    """A parameter that moves, and its state."""

    p: Tensor  # as the user holds it: a DTensor, too
    label: str
    group: dict[str, Any]  # its param group
    values: GroupValues  # of the group
    piece: Tensor  # the elements that lie here
    state: dict[str, Tensor] = field(default_factory=dict)  # pieces, by symbol
    owned: Tensors = ()  # buffers that the owners of its matrices keep here
    owns: tuple[int, ...] | None = None  # which matrices these are of

    @property
    def algorithm(self) -> Algorithm:
        return self.values.algorithm


@dataclass(kw_only=True)
class BoundFormula(Group):
    """The parameters of one formula."""

    members: Sequence[Member]
    values: FormulaValues
    # views of the counts of steps, and the tensors of ``optimizer.state`` from and to
    # which a step copies them; none if these are the views
    counts: tuple[list[Tensor], list[Tensor]]


class Binding:
    """Made from groups and state, and made again if ``is_current`` is false. It writes
    nothing before ``bind``.

    Args:
        groups: the optimizer's param groups.
        state: the optimizer's state.
        options: the constructor's options.
        values: by the id of a group, its numbers, as bindings before this one have made
            them; missing ones are added.
        device: of the parameters that move; None where none does.
        before: the binding that this one replaces.

    Raises:
        ValueError: state of other parameters than these.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        state: State,
        options: Mapping[str, Any],
        values: dict[int, GroupValues],
        device: torch.device | None,
        before: Binding | None = None,
    ) -> None:
        self.param_groups, self.options = list(groups), options
        self._state, self._before = state, before
        self._every = [p for group in groups for p in group["params"]]
        self.collectives: Collectives = options["collectives"]
        # whether kernels move parameters where they lie
        self.is_printed = options["compile"] is not False and kernels.available(
            device or torch.device("cpu")
        )
        names = dict(labels(groups))
        self._values: list[tuple[dict[str, Any], GroupValues]] = []
        by_formula: dict[Hashable, list[Member]] = {}
        for group in filter(itemgetter("params"), groups):
            present = values.get(id(group))
            if present is None or not present.fits(group, device):
                present = values[id(group)] = GroupValues(group, options, device)
            self._values.append((group, present))
            algorithm = present.algorithm
            stage = group.get(STAGE_COUNT, 0) if algorithm.has_stages else 0
            for p in group["params"]:
                if not moves(p, state):
                    continue
                check_state(p, names[p], algorithm, state, self.collectives)
                # detached tensors count writes together with their parameters
                piece = self.collectives.local(p).detach()
                member = Member(p, names[p], group, present, piece)
                key = formula(algorithm), stage, p.dtype
                by_formula.setdefault(key, []).append(member)
        self._formulas = list(by_formula.values())
        self.members = [member for members in self._formulas for member in members]
        self.params = [member.p for member in self.members]
        self._kept = [_keys_of(member.algorithm) for member in self.members]
        with_member = set(self.params)
        self._idle = [p for p in self._every if p not in with_member]
        self.groups: list[BoundFormula] = []
        self._is_stale = False  # whether a gather was broken off
        self._grad_masks: dict[tuple[bool, ...], Tensor] = {}

    @torch.no_grad()
    def bind(self) -> None:
        """Give every parameter its state; allocate missing buffers."""
        state, before = self._state, self._before
        self._before = None
        for member in self.members:
            _attach(member, state, self.collectives)
        kinds: dict[MatrixCost, list[Member]] = {}
        for member in self.members:
            if member.algorithm.owned:
                cost = member.algorithm.matrix_preconditioner.cost
                kinds.setdefault(cost, []).append(member)
        if kinds and before is not None:
            before.publish_owned(state)
        for together in kinds.values():
            parts = None if before is None else before.parts_at_owners
            _attach_owned(together, state, parts, self.collectives)
        # last, for it holds the counts of all that has restarted
        self.groups = [self._group(members) for members in self._formulas]
        for member in self.members:  # there from the start, to be loaded into
            if member.algorithm.has_stages:
                member.group.setdefault(STAGE_COUNT, 0)
        _drop_unstepped(state, self._every)
        self._bound_fingerprint = self._fingerprint(self.param_groups)

    def _group(self, members: Sequence[Member]) -> BoundFormula:
        """Return the parameters of one formula as a group of a step; the state gets
        their counts of steps, as views of one tensor if kernels move them.
        """
        device, params = members[0].piece.device, [member.p for member in members]
        groups = list(dict.fromkeys(member.values for member in members))
        values = FormulaValues(groups, device)
        kind = formula(members[0].algorithm)
        leaves = [
            leaf_of(
                kind.algorithm,
                member.p.shape,
                member.piece,
                member.state,
                [member.p],
                self.collectives,
            )._replace(
                owned=[member.owned] if member.owned else [],
                preconditioner=_preconditioner(values, groups.index(member.values)),
            )
            for member in members
        ]
        index = index_of_leaves(
            members[0].algorithm, [member.p.shape for member in members], leaves
        )
        by_norm = None
        if len(groups) > 1:
            numbers = [
                groups.index(member.values)
                for member, leaf in zip(members, leaves, strict=True)
                for _ in range(leaf.parts.num_norms)
            ]
            by_norm = torch.tensor(numbers, device=device)
        t = torch.zeros(len(members), dtype=torch.float32, device=device)
        if self.is_printed:
            _view_steps(self._state, params, t)
            counts = list[Tensor](), list[Tensor]()
        else:
            counts = list(t.unbind()), _held_steps(self._state, params, t[0])
        dtype = working_dtype(members[0].piece)
        # a component of a user may read its own numbers
        algorithm = kind.algorithm if kind.is_shared else values.algorithms[0]
        inputs = GroupInputs(kind, values.values, by_norm, index, t, dtype)
        return BoundFormula(
            algorithm, leaves, inputs, members=members, values=values, counts=counts
        )

    # ---- buffers of owners -----------------------------------------------------------

    def owned_entries(
        self,
    ) -> list[tuple[Tensor, str, tuple[int, ...], tuple[int, ...]]]:
        """List the buffers that owners keep: parameter, key in its state, the matrices
        that have their owner here, entries of each of its matrices.
        """
        return [
            (member.p, buffer.key, member.owns, sizes)
            for member in self.members
            if member.owns is not None
            for symbol in member.algorithm.owned
            for buffer in [member.algorithm.buffers[symbol]]
            for sizes in [entries_at_owner(member.algorithm, buffer, member.p.shape)]
        ]

    @property
    def parts_at_owners(self) -> dict[Tensor, tuple[int, ...]]:
        """Return the rows of the matrices of parameters, if owners keep buffers of
        them.
        """
        return {
            member.p: member.algorithm.matrices.part_rows(member.p.shape)
            for member in self.members
            if member.algorithm.owned
        }

    def publish_owned(self, state: State) -> None:
        """Replace all buffers at owners in ``state`` by all ranks' buffers, before the
        owners change. A collective.
        """
        present = [e for e in self.owned_entries() if e[1] in state.get(e[0], ())]
        buffers = [
            OwnerBuffer(state[p][key], p, sizes, owns)
            for p, key, owns, sizes in present
        ]
        published = self.collectives.publish_all(buffers)
        for (p, key, *_), whole in zip(present, [*published], strict=True):
            state[p][key] = whole

    # ---- whether it still holds ------------------------------------------------------

    def covers(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Return whether the groups hold the parameters that this was made for."""
        params = [p for group in groups for p in group["params"]]
        return len(params) == len(self._every) and all(map(is_, params, self._every))

    def is_current(self, groups: Sequence[dict[str, Any]], state: State) -> bool:
        """Return whether groups, parameters and state are still those, and in the
        memory, that this was made for.

        Raises:
            ValueError: a sparse gradient.
        """
        self._check_gradients()
        try:
            return (
                state is self._state
                and self._fingerprint(groups) == self._bound_fingerprint
            )
        except (KeyError, TypeError):  # state was deleted, or is no tensor any more
            return False

    def changes(self, groups: Sequence[dict[str, Any]]) -> str:
        """Return the differences of the groups to those that this was made for."""
        keys = [
            f"{key}={group.get(key)!r} in group {i}"
            for i, (group, before) in enumerate(
                zip(groups, self._bound_fingerprint[2], strict=False)
            )
            for key, value in structure(group, self.options).items()
            if value != before.get(key)
        ]
        return ", ".join(keys) or "other groups, parameters or state"

    def _fingerprint(self, groups: Sequence[dict[str, Any]]) -> tuple[list[Any], ...]:
        """Return all that a binding depends on: which groups hold which parameters, by
        which formulas they move, which tensors the state holds of them, and where all
        of these lie.
        """
        params = [p for group in groups for p in group["params"]]
        entries = map(self._state.__getitem__, self.params)
        held = [x for kept, e in zip(self._kept, entries, strict=True) for x in kept(e)]
        tensors = [*self.params, *held]
        fake = bool(self.params) and is_fake(self.params[0])  # it has no address
        if self.collectives is not LOCAL:
            tensors = list(map(self.collectives.local, tensors))
        return (
            [*map(id, groups), *map(id, params)],
            [len(group["params"]) for group in groups],
            [structure(group, self.options) for group in groups],
            [moves(p, self._state) for p in self._idle],
            list(map(id, held)),
            # tensor.data = ... moves it
            list(map(id if fake else Tensor.data_ptr, tensors)),
            list(map(FORM, tensors[: len(self.params)])),
            list(map(Tensor.stride, tensors[: len(self.params)])),
        )

    def _check_gradients(self) -> None:
        grads = [p.grad for p in self.params]
        if {g.layout for g in grads if g is not None} <= {torch.strided}:
            return
        for p, what in labels(self.param_groups):
            if p.grad is not None and p.grad.layout != torch.strided:
                raise ValueError(
                    f"got a gradient of layout {p.grad.layout} for {what}, expected "
                    "torch.strided: make it dense (nn.Embedding(sparse=False))"
                )

    # ---- a step ----------------------------------------------------------------------

    def gather(self) -> tuple[Sequence[BoundFormula], Gradients, Tensor]:
        """Return the groups of a step, with the param groups' present numbers; the
        gradient of each leaf, None if there is none; and which of N norms have one
        (N,), bool.

        Raises:
            ValueError: a hyperparameter out of its range.
            RuntimeError: a CUDA graph captures it, and it has to send something that is
                on the host.
        """
        # a value that is refused leaves groups before it refreshed, but not sent
        is_changed, self._is_stale = self._is_stale, True
        for param_group, values in self._values:
            is_changed = values.refresh(param_group) or is_changed
        for group in self.groups:
            views, entries = group.counts
            if views:
                torch._foreach_copy_(views, entries)
            if is_changed:
                group.values.send()
            group.num_steps = group.members[0].group.get(STAGE_COUNT, 0)
        self._is_stale = False
        local = self.collectives.local
        grads = [
            [None if (g := m.p.grad) is None else local(g, m.p) for m in group.members]
            for group in self.groups
        ]
        has = tuple([g is not None for of_group in grads for g in of_group])
        return self.groups, grads, self._has_grad(has)

    def _has_grad(self, pattern: tuple[bool, ...]) -> Tensor:
        """Return a bool tensor (N,) on the device, of a pattern by parameter. It is
        sent there when it is first seen, and kept: later steps with it copy nothing, so
        that a CUDA graph may capture them.

        Raises:
            RuntimeError: a CUDA graph captures the step, and no step before it had this
                pattern.
        """
        mask = self._grad_masks.get(pattern)
        if mask is not None:
            return mask
        device = self.params[0].device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "got a step to capture in which other parameters have no gradient "
                f"({len(pattern) - sum(pattern)} of {len(pattern)}) than in earlier "
                "steps, expected the same ones: take such a step before the capture"
            )
        has, of_norms = iter(pattern), list[bool]()
        for group in self.groups:
            for leaf in group.leaves:
                of_norms += [next(has)] * leaf.parts.num_norms
        mask = torch.tensor(of_norms, device="cpu").to(device, non_blocking=True)
        if len(self._grad_masks) < PATTERNS:  # a tensor that a graph has captured stays
            self._grad_masks[pattern] = mask
        return mask

    def count(self, decision: Decision, skipped: Tensor) -> None:
        """Count the step that was taken, or skipped, after everything is written: where
        that fails, it was not taken.
        """
        counts = [group.inputs.t for group in self.groups]
        torch._foreach_copy_(counts, decision.t)
        for group in self.groups:
            views, entries = group.counts
            if views:
                torch._foreach_copy_(entries, views)
        skipped += decision.finite.logical_not()
        for group in self.groups:
            if group.algorithm.has_stages:
                # later steps build on the first step's bases: it is taken until one is
                # finite. A step that waits for eigenvectors may wait for that, too
                count: int = group.members[0].group[STAGE_COUNT]
                waits = not count and not is_fake(decision.finite)
                count += int(decision.finite) if waits else 1
                for member in group.members:
                    member.group[STAGE_COUNT] = count

    # ---- gradients -------------------------------------------------------------------

    def present_norm(self) -> Tensor:
        """Return the global norm of the present gradients, 0-D, which are of the next
        batch: no step measures them.
        """
        squares = [
            torch.zeros((), device=p.device)
            if p.grad is None
            else torch.linalg.vector_norm(
                working(self.collectives.local(p.grad, p))
            ).square()
            for p in self.params
        ]
        partial = torch.stack(squares)[:, None]
        return self.collectives.sum(partial, self.params).sum().sqrt()

    def references(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield every parameter that has a reference gradient h, and this rank's piece
        of h.
        """
        for member in self.members:
            if "h" in member.state:
                yield member.p, member.state["h"]

    def describe_nonfinite(self, sums: Tensor) -> str:
        """Name the parameters with gradients that are not finite, or too large for
        their state, by the complete sums of the step.
        """
        largest = [
            largest_square(group.algorithm, group.inputs.dtype)
            for group in self.groups
            for leaf in group.leaves
            for _ in range(leaf.parts.num_norms)
        ]
        bounds = torch.tensor(largest, dtype=sums.dtype, device=sums.device)
        fits = (sums.abs() <= bounds[:, None]).all(1)  # not so of NaN
        bad = fits.logical_not().nonzero().flatten().tolist()
        owners = [
            member
            for group in self.groups
            for member, leaf in zip(group.members, group.leaves, strict=True)
            for _ in range(leaf.parts.num_norms)
        ]
        blamed = list(dict.fromkeys(owners[row].label for row in bad))
        if not blamed:
            return (
                "got a learning rate in a tensor that is not finite, expected a number "
                ">= 0: nothing has changed; look at what sets it"
            )
        named = ", ".join(blamed[:3])
        more = ", ..." if len(blamed) > 3 else ""
        return (
            "got a gradient that is not finite, or whose square overflows, in "
            f"{len(blamed)} of {len(self.members)} parameters ({named}{more}), "
            "expected numbers: nothing has changed; lower the learning rate, or pass "
            "nonfinite='skip' to go on"
        )


def _preconditioner(values: FormulaValues, number: int) -> Any:
    """Return the matrix preconditioner with the numbers of a param group; None of an
    elementwise one.
    """
    algorithm = values.algorithms[number]
    return algorithm.matrix_preconditioner if algorithm.matrix_only else None


def _keys_of(algorithm: Algorithm) -> itemgetter[Any]:
    """Return a function to the tensors that the state's entry of a parameter holds for
    the algorithm: of two keys or more a tuple.
    """
    kept = [buffer.key for buffer in algorithm.buffers.values()]
    return itemgetter("step", *(kept or ["step"]))


# ---- state ---------------------------------------------------------------------------


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
        if value is None or buffer.home == "owner":
            continue
        got = f"a {type(value).__name__}"
        if isinstance(value, Tensor):
            local = collectives.local(value)
            if local.shape == piece.shape and local.device == piece.device:
                continue
            got = f"a tensor of shape {tuple(local.shape)} on {local.device}"
        raise ValueError(
            f"got {got} as state {buffer.key!r} of {what}, expected a tensor of shape "
            f"{tuple(piece.shape)} on {piece.device}, as the parameter is: change all "
            "state of a parameter with it, or delete optimizer.state[parameter], which "
            "then restarts"
        )


def _held_steps(state: State, params: Sequence[Tensor], like: Tensor) -> list[Tensor]:
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


def _view_steps(state: State, params: Sequence[Tensor], t: Tensor) -> None:
    """Give ``state`` views of ``t`` (N,) as the parameters' counts of steps, with the
    values that it has.
    """
    views = t.unbind()
    for p, view in zip(params, views, strict=True):
        before = state[p].get("step")
        if before is not None and is_fake(as_tensor(before)) == is_fake(t):
            view.copy_(as_tensor(before).reshape(()))
        state[p]["step"] = view


def _attach(member: Member, state: State, collectives: Collectives) -> None:
    """Give a parameter the tensors that ``state`` holds, and make the missing ones."""
    p, algorithm = member.p, member.algorithm
    buffers = algorithm.buffers
    unwanted = STATE_KEYS - {buffer.key for buffer in buffers.values()}
    debiased = {buffer.key for buffer in buffers.values() if buffer.is_debiased}
    state[p].setdefault("step", torch.zeros((), device="cpu"))
    for key in unwanted & set(state[p]):
        del state[p][key]  # of another rule: stale when that one returns
    if debiased - set(state[p]):
        # all of them start with the count of steps: one that is new beside an old
        # momentum would be far too small
        # (new tensors, so that a state dict that is refused has changed none)
        for key in debiased & set(state[p]):
            state[p][key] = torch.zeros_like(state[p][key])
        state[p]["step"] = torch.zeros((), device="cpu")
    for symbol, buffer in buffers.items():
        if buffer.home == "shard":
            held = _attached(member, buffer, state[p], collectives)
            member.state[symbol] = collectives.local(held)


def _attached(
    member: Member, buffer: Buffer, entry: dict[str, Any], collectives: Collectives
) -> Tensor:
    """Return a buffer of a parameter as its ``entry`` of the state holds it: the tensor
    that is there, else a new tensor with its values.
    """
    algorithm, before = member.algorithm, entry.get(buffer.key)
    dtype = algorithm.dtype_of(buffer, member.piece)
    if isinstance(before, Tensor) and collectives.local(before).dtype == dtype:
        return before
    fresh = start_beside(algorithm, buffer, member.piece)
    if before is not None:
        fresh.copy_(collectives.local(before))
    held: Tensor = collectives.wrap(fresh, member.p)
    entry[buffer.key] = held
    return held


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


def _attach_owned(
    members: Sequence[Member],
    state: State,
    before: Mapping[Tensor, tuple[int, ...]] | None,
    collectives: Collectives,
) -> None:
    """Give parameters the buffers at home with the owners of matrices, from ``state``
    or new.

    Args:
        members: all that share their exchanges.
        state: the optimizer's.
        before: the rows of parameters' parts in the binding before; None: there is
            none. The owners may differ from those then, as they do where other
            parameters share the exchanges: all ranks have handed over their buffers.
        collectives: of the ranks that hold the parameters.
    """
    leaves = [leaf for m in members for leaf in owned_leaves(m.algorithm, [m.p])]
    for member, ownership in zip(members, collectives.owns(leaves), strict=True):
        p, algorithm, buffers = member.p, member.algorithm, []
        parts = algorithm.matrices.part_rows(p.shape)
        every = range(algorithm.matrices.num_in(p.shape))
        here = ownership if before is None else every
        changed = before is not None and before.get(p, parts) != parts
        if changed or _is_of_others(algorithm, p, state[p], here):
            for symbol in algorithm.owned:
                state[p].pop(algorithm.buffers[symbol].key, None)
            state[p]["step"] = torch.zeros((), device="cpu")
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
        member.owned, member.owns = tuple(buffers), ownership


def _drop_unstepped(state: State, present: Sequence[Tensor]) -> None:
    """Drop state of parameters that left their groups before a step (float32 masters
    took their place): torch.optim has none of these, since it makes state in a step.
    """
    left = [p for p in state.keys() - set(present) if isinstance(p, Tensor)]
    for p in left:
        if not float(state[p].get("step", 1.0)):
            del state[p]
