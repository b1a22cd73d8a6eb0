"""A rule is a pure pair init/step over trees of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from marsopt.functional.state import (
    Bound,
    RouteLeaves,
    State,
    bind,
    new_state,
    unbind,
)
from marsopt.functional.trees import (
    AnyTree,
    FlatGroup,
    Name,
    Packing,
    Tree,
    check_container,
    check_matching,
    flatten,
    names,
    rebuild,
)
from marsopt.rules import checks
from marsopt.rules.checks import Number
from marsopt.rules.component import Algorithm
from marsopt.rules.numerics import without_autocast
from marsopt.rules.options import NO_OPTION, check_fields, number
from marsopt.step.owners import LOCAL, Collectives, check_collectives
from marsopt.step.step import Pure, exchanges_of, step


class Route(NamedTuple):
    """Parameters of a model that share an algorithm and a learning rate.

    Args:
        algorithm: the algorithm of these parameters.
        lr_ratio: their learning rate over the step's; None: 1.
        names: their names; None: the route takes tensors by shape.
    """

    algorithm: Algorithm
    lr_ratio: Number | None = None
    names: frozenset[str] | None = None

    def __repr__(self) -> str:
        of = "" if self.names is None else f", {sorted(self.names)}"
        return f"Route({self.algorithm}, lr_ratio={self.lr_ratio}{of})"


# State of one route; or of several, by the name of the route
RuleState = State | dict[str, State]
AnyState = TypeVar("AnyState", bound=RuleState)  # comes back as such


@dataclass(frozen=True, kw_only=True, eq=False)
class Rule:
    """A stateless optimizer: a correction, a preconditioner, one step.

        state = rule.init(params)
        params, state = rule.step(params, grads, state, lr=...)

    Args:
        matrix: the algorithm of matrices, or of every tensor.
        rest: the algorithm of other tensors; None: ``matrix`` takes every tensor.
        rest_ratio: learning rate of ``rest`` over ``matrix``'s; None: 1.
        max_norm: threshold of the global gradient norm, applied inside the step
            (``clip_grad_norm_`` is then not needed); None = off.
        lr: the learning rate that ``MARS`` would have: a loop passes it, or a
            schedule's factor times it, to ``step``.
        routes: routes of a model's parameters by name, as ``marsopt.rule_for`` makes
            them; empty: ``matrix`` and ``rest`` take tensors by shape.

    Raises:
        ValueError: ``max_norm``, ``rest_ratio`` or ``lr`` out of its range.

    Example:
        >>> algorithm = marsopt.Algorithm(
        ...     preconditioner=marsopt.AdamW(betas=(0.95, 0.99)),
        ...     correction=marsopt.Approximate(gamma=0.025),
        ... )
        >>> rule = marsopt.Rule(matrix=algorithm, max_norm=1.0)
        >>> params = {"w": torch.ones(2, 3)}
        >>> state = rule.init(params)
        >>> params, state = rule.step(params, params, state, lr=0.1)
        >>> params["w"]
        tensor([[0.8990, 0.8990, 0.8990],
                [0.8990, 0.8990, 0.8990]])
        >>> sorted(state.buffers)
        ['h', 'm', 'v']
    """

    matrix: Algorithm = field(metadata=NO_OPTION)
    rest: Algorithm | None = field(default=None, metadata=NO_OPTION)
    rest_ratio: Number | None = number(None, checks.none_or(checks.at_least_zero))
    max_norm: Number | None = number(None, checks.positive_or_none)
    lr: Number = number(3e-3, checks.at_least_zero)
    routes: Mapping[str, Route] = field(default_factory=dict, metadata=NO_OPTION)

    def __post_init__(self) -> None:
        check_fields(self)

    def init(self, params: Tree, *, collectives: Collectives = LOCAL) -> RuleState:
        """Return the state before the first step: only the buffers that this rule
        needs, of zeros. A rule with several routes has a dict with a state for each.

        Args:
            params: list, tuple, NamedTuple, dict, OrderedDict or defaultdict of real
                floating point tensors, or a FlatGroup; each buffer of the state has its
                container, or is a dict if several routes share them.
            collectives: as in ``step``.

        Raises:
            TypeError: ``params`` is no such container of tensors.
            ValueError: a tensor that this rule cannot update (complex, sparse, narrower
                than 16 bits, or not a matrix for a matrix rule); ``collectives`` are
                none.
            RuntimeError: names, their order, shapes or dtypes differ between the ranks
                of ``collectives``.
        """
        sides = self._leaves(params, collectives)
        if collectives is not LOCAL:
            labelled = [
                (x, f"leaf {name!r}")
                for leaves in sides.values()
                for name, x in zip(leaves.names, leaves.tensors, strict=True)
            ]
            forms = {label: f"{tuple(x.shape)} {x.dtype}" for x, label in labelled}
            collectives.agree(forms, labelled)
        return self._join({side: new_state(leaves) for side, leaves in sides.items()})

    @without_autocast
    def step(
        self,
        params: AnyTree,
        grads: Tree,
        state: AnyState,
        *,
        lr: Number,
        gamma: Number | None = None,
        reference: Tree | None = None,
        collectives: Collectives = LOCAL,
        count: int | None = None,
    ) -> tuple[AnyTree, AnyState]:
        """Take one step; nothing that is passed in changes. Autocast has no part in it.

        Args:
            params: as given to ``init``.
            grads: same container, names, shapes and dtypes.
            state: the result of ``init`` or of the last step.
            lr: learning rate, a number or a 0-D tensor (a tensor may change under
                torch.compile without recompiling).
            gamma: scale of the variance reduction in this step; None takes the rule's
                own. Rules without a correction have none.
            reference: None = approximate MARS (h is the previous gradient, kept in the
                state). Given = exact MARS (h, the current batch's gradient at the
                previous parameters). At the first step there is no previous gradient:
                exact MARS starts with zeros, as the authors' script does. ``max_norm``
                clips only ``grads``: clip the reference by its own global norm before,
                as ``MARS.update_previous_grad`` does.
            collectives: they sum over shards and bring whole matrices together;
                ``LOCAL`` for whole tensors.
            count: how many steps were taken before, for a rule with a period in steps
                (SOAP). None = the state's count, read from the device: on a GPU a wait,
                under torch.compile and vmap an error. The state does not count skipped
                steps; ``MARS`` counts them, after its first step that was not skipped.
                Other rules do not read it.

        Returns:
            The new parameters, in the container of ``params``, and the new state. If
            the gradient (or reference) holds a NaN or infinity anywhere, both are
            unchanged except for ``state.skipped``, which counts such steps.

        Raises:
            TypeError: an argument that is no such container of tensors.
            ValueError: names, shapes or dtypes that differ from ``params``; a
                hyperparameter out of its range; ``collectives`` are none; leaves that
                require a gradient, outside of torch.no_grad() and torch.func.
        """
        checks.at_least_zero("lr", lr)
        self._check_arguments(gamma, reference)
        lr, gamma = checks.plain(lr), checks.plain(gamma)
        sides = self._leaves(params, collectives)
        _check_detached(params)
        states = self._split(state, sides)
        check_matching(params, grads, "grads")
        if reference is not None:
            check_matching(params, reference, "reference")
        bound: list[tuple[str, Bound]] = []
        for side, leaves in sides.items():
            algorithm, ratio = leaves.algorithm, self._routes[side].lr_ratio
            side_lr = lr if ratio is None else lr * ratio
            before = count
            if before is None:  # the host has to know it if work differs between steps
                before = int(states[side].t) if algorithm.has_stages else 0
            formulas = bind(
                leaves, grads, reference, states[side], side_lr, gamma, before
            )
            bound += [(side, group) for group in formulas]
        groups, grads_of = [b.group for _, b in bound], [b.grads for _, b in bound]
        is_local = collectives is LOCAL
        outcome = step(
            groups,
            exchanges_of(groups, is_local, is_batch=True),
            grads_of,
            max_norm=self.max_norm,
            collectives=collectives,
            runner=Pure(),
        )
        by_name: dict[Name, Tensor] = {}
        for side, leaves in sides.items():
            places = {
                position: (number, i)
                for number, (route, b) in enumerate(bound)
                if route == side
                for i, position in enumerate(b.positions)
            }
            in_order = [places[i] for i in range(len(leaves.names))]
            values = [outcome.values[number][i] for number, i in in_order]
            owned = [outcome.owned[number][i] for number, i in in_order]
            new, states[side] = unbind(
                leaves, values, owned, states[side], outcome.decision
            )
            by_name.update(zip(leaves.names, new, strict=True))
        new_params = rebuild(params, [by_name[name] for name in names(params)])
        return new_params, cast(AnyState, self._join(states))

    # ---- routes ----------------------------------------------------------------------

    @property
    def _routes(self) -> Mapping[str, Route]:
        if self.routes:
            return self.routes
        rest = {} if self.rest is None else {"rest": Route(self.rest, self.rest_ratio)}
        return {"matrix": Route(self.matrix), **rest}

    @property
    def _algorithms(self) -> list[Algorithm]:
        return [route.algorithm for route in self._routes.values()]

    @property
    def _called(self) -> str:
        return " and ".join(map(str, self._algorithms))

    def _leaves(self, params: Tree, collectives: Collectives) -> dict[str, RouteLeaves]:
        """Return the leaves of each route; a route without any is left out.

        Raises:
            ValueError: there are no leaves at all, a name that no route has, or
                ``collectives`` are none.
        """
        if collectives is not LOCAL and not torch.compiler.is_compiling():
            check_collectives(collectives)
        all_leaves = RouteLeaves(self.matrix, params, None, collectives)
        if not all_leaves.tensors:
            raise ValueError(
                "got no parameters, expected at least one tensor: pass the model's "
                "parameters"
            )
        check_container(params, "params")
        if len(self._routes) == 1 and not self.routes:
            return {"matrix": all_leaves}
        named = {n: side for side, r in self._routes.items() for n in r.names or ()}
        parts: dict[str, list[Name]] = {side: [] for side in self._routes}
        for name, shape in zip(all_leaves.names, all_leaves.shapes, strict=True):
            by_shape = "matrix" if self.matrix.matrices.takes(shape) else "rest"
            side = named.get(name) if self.routes else by_shape
            if side is None:
                raise ValueError(
                    f"got params[{name!r}], expected a name in named_parameters() of "
                    "the model that rule_for was given: pass {name: p.detach() for "
                    "name, p in model.named_parameters()}, or a part of it"
                )
            parts[side].append(name)
        return {
            side: RouteLeaves(self._routes[side].algorithm, params, part, collectives)
            for side, part in parts.items()
            if part
        }

    def _join(self, states: Mapping[str, State]) -> RuleState:
        return dict(states) if len(self._routes) > 1 else next(iter(states.values()))

    def _split(
        self, state: RuleState, sides: Mapping[str, RouteLeaves]
    ) -> dict[str, State]:
        """Return the states of the routes.

        Raises:
            ValueError: it is of another rule, or of other parameters.
        """
        expected = dict if len(self._routes) > 1 else State
        if not isinstance(state, expected):
            raise ValueError(
                f"got a {type(state).__name__}, expected a {expected.__name__}: make "
                "the state by init of this rule"
            )
        states = {**state} if isinstance(state, dict) else dict.fromkeys(sides, state)
        if states.keys() != sides.keys():
            raise ValueError(
                f"got a state of {sorted(states)}, expected one of {sorted(sides)}, "
                "as these parameters are routed: make the state by init on them"
            )
        for side, leaves in sides.items():
            known, present = leaves.algorithm.kept.keys(), states[side].buffers.keys()
            if present - known:
                raise ValueError(
                    f"got a state of {sorted(present)}, expected {sorted(known)}, "
                    f"which {leaves.algorithm} keeps: make the state by init of this "
                    "rule"
                )
        return states

    def _check_arguments(self, gamma: Number | None, reference: Tree | None) -> None:
        algorithms = self._algorithms
        if gamma is not None and all(a.correction is None for a in algorithms):
            raise ValueError(
                f"got gamma={gamma!r} for {self._called}, which has none: leave "
                "gamma out"
            )
        if gamma is not None:
            checks.finite("gamma", gamma)
        if reference is not None and all(a.h_from is None for a in algorithms):
            raise ValueError(
                f"got a reference for {self._called}, expected a rule that corrects "
                "the gradient by one: leave reference out, or build a MARS rule with "
                'correction="exact"'
            )
        if reference is None and any(a.h_from == "caller" for a in algorithms):
            raise ValueError(
                f"got reference=None for {self._called} with an exact correction, "
                "expected the current batch's gradient at the previous parameters: "
                "pass it as reference=, zeros at the first step"
            )


def _check_detached(params: Tree) -> None:
    """Check that a step adds nothing to an autograd graph that a loop would grow.

    Raises:
        ValueError: a leaf requires a gradient, and no transform differentiates.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    for name, x in zip(names(params), flatten(params, "params"), strict=True):
        if x.is_leaf and x.requires_grad and not is_functorch_wrapped_tensor(x):
            raise ValueError(
                f"got params[{name!r}] that requires a gradient, expected a detached "
                "tensor, or the graph grows with every step: pass p.detach() of each, "
                "or differentiate through steps by torch.func, or from p.clone()"
            )


# torch.load makes these by default: it runs no code that a file names
torch.serialization.add_safe_globals([State, FlatGroup, Packing])
