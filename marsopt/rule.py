"""A rule is a pure pair init/step; its page states only its own formulas."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from marsopt import checks
from marsopt.checks import Number
from marsopt.collectives import LOCAL, Collectives
from marsopt.flat import FlatGroup, check_packing, leaf_shape, rebuild
from marsopt.step import Stack, advance
from marsopt.trees import (
    Tree,
    check_parameter,
    flatten,
    match,
    match_state,
    names,
)


class Rule(ABC):
    """A stateless optimizer.

    state = rule.init(params)
    params, state = rule.step(params, grads, state, lr=...)
    """

    @abstractmethod
    def init(self, params: Tree) -> NamedTuple:
        """The state before the first step: zeros, in a NamedTuple that holds what this
        rule needs and no more.

        Args:
            params: sequence or mapping of real floating point tensors, or a
                FlatGroup; each buffer of the state has its container.

        Raises:
            TypeError: ``params`` is no sequence or mapping of tensors.
            ValueError: a tensor that this rule cannot move (complex, sparse, or not a
                matrix for a matrix rule).
        """

    @abstractmethod
    def step(
        self,
        params: Tree,
        grads: Tree,
        state: Any,
        *,
        lr: Number,
        gamma: Number | None = None,
        reference: Tree | None = None,
        collectives: Collectives = LOCAL,
    ) -> tuple[Tree, Any]:
        """One step; nothing that is passed in changes.

        Args:
            params: as given to ``init``.
            grads: same container, names, shapes and dtypes.
            state: what ``init`` or the last step returned.
            lr: learning rate, a number or a 0-D tensor (a tensor may change under
                torch.compile without recompiling).
            gamma: scale of the variance reduction in this step; None takes the rule's
                own. Rules without a correction have none.
            reference: None = approximate MARS (h is the previous gradient, kept in the
                state). Given = exact MARS (h, the current batch's gradient at the
                previous parameters). At the first step there is no previous gradient:
                exact MARS starts with zeros, as the authors' script does.
            collectives: who sums over shards and orthogonalizes; ``LOCAL`` for whole
                tensors.

        Returns:
            The new parameters, in the container of ``params``, and the new state. Where
            the gradient (or reference) holds a NaN or infinity anywhere, both are
            unchanged but for ``state.skipped``, which counts such steps.

        Raises:
            TypeError: an argument that is no sequence or mapping of tensors.
            ValueError: names, shapes or dtypes that differ from ``params``; a
                hyperparameter out of its range.
        """


@dataclass(frozen=True, kw_only=True, eq=False)
class LeafRule(Rule):
    """A rule that treats every leaf alike.

    Args:
        weight_decay: decoupled: x <- (1 - lr weight_decay) x - ... . Default 0.
        max_norm: threshold of the global gradient norm, applied inside the step
            (clip_grad_norm_ is then not needed); None = off.
        state_dtype: dtype of the state buffers; None = the parameter's own. Not
            narrower than that: moments are averages of small steps, which rounding to
            nearest would lose.
    """

    weight_decay: Number = 0.0
    max_norm: Number | None = None
    state_dtype: torch.dtype | None = None

    State: ClassVar[type]  # a page's own NamedTuple
    matrix_only: ClassVar[bool] = False
    has_gamma: ClassVar[bool] = False

    def __post_init__(self) -> None:
        checks.at_least_zero("weight_decay", self.weight_decay)
        checks.positive_or_none("max_norm", self.max_norm)
        checks.floating_or_none("state_dtype", self.state_dtype)

    @property
    @abstractmethod
    def buffers(self) -> tuple[str, ...]:
        """Names of the moments in the state, in the order in which ``update`` takes
        them.
        """

    @property
    def corrected(self) -> bool:
        """Whether the step computes c = g + k (g - h) and clips it; else c is g."""
        return False

    @property
    def keeps_h(self) -> bool:
        """Whether the state keeps the gradient as the next step's h."""
        return False

    @abstractmethod
    def scalars(self, t: Tensor, lr: Number, gamma: Number) -> tuple[Number, ...]:
        """What is one number for a whole leaf, from t = 1, 2, ... (N,): numbers or (N,)
        tensors.
        """

    @abstractmethod
    def update(
        self, x: Tensor, c: Tensor, buffers: tuple[Tensor, ...], s: tuple[Tensor, ...]
    ) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """(new x, new buffers); for a matrix rule (matrix to orthogonalize, or None for
        buffers[0]; new buffers).
        """

    def apply(
        self, x: Tensor, o: Tensor, s: tuple[Tensor, ...], shape: torch.Size
    ) -> Tensor:
        """New x of a matrix rule, from the orthogonal factor o. ``shape`` is that of
        the whole matrix.
        """
        raise NotImplementedError(f"{type(self).__name__} is elementwise")

    @property
    def own_gamma(self) -> Number:
        """gamma where ``step`` is given none."""
        return 0.0

    def dtype_of(self, symbol: str, x: Tensor) -> torch.dtype:
        """Of a buffer for ``x``."""
        return self.state_dtype or x.dtype

    def check(self, x: Tensor, shape: torch.Size, what: str) -> None:
        """Raises ValueError where this rule cannot move ``x``, of leaves of
        ``shape``.
        """
        check_parameter(x, what, self.state_dtype)
        if self.matrix_only and len(shape) != 2:
            raise ValueError(
                f"got {what} of shape {tuple(shape)}, expected a matrix (ndim 2) for "
                f"{type(self).__name__}: "
                "use marsopt.mars(...), which gives other tensors to AdamW, or route "
                "them yourself"
            )

    def init(self, params: Tree) -> Any:
        leaves = flatten(params, "params")
        if not leaves:
            raise ValueError(
                "got no parameters, expected at least one tensor: pass those of the "
                "model"
            )
        for name, x in zip(names(params), leaves, strict=True):
            self.check(x, leaf_shape(params, x), f"params[{name!r}]")

        # separate storage for every buffer: a shared one costs torch.compile a graph
        def zeros(symbol: str) -> Tree:
            fresh = [
                torch.zeros_like(x, dtype=self.dtype_of(symbol, x)) for x in leaves
            ]
            return rebuild(params, fresh)

        device = leaves[0].device
        state = {
            "t": torch.zeros((), dtype=torch.float32, device=device),
            "skipped": torch.zeros((), dtype=torch.float32, device=device),
            **{name: zeros(name) for name in self.buffers},
        }
        if "h" in self.State._fields:
            state["h"] = zeros("h") if self.keeps_h else None
        return self.State(**state)

    def step(
        self, params, grads, state, *, lr, gamma=None, reference=None, collectives=LOCAL
    ):
        checks.at_least_zero("lr", lr)
        stacks, leaves = self.route(
            params, grads, state, lr, gamma, reference, collectives
        )
        stacks, verdict = advance(stacks, leaves, self.max_norm, collectives)
        return self.unroute(params, stacks, state, verdict.finite, collectives)

    def route(
        self, params, grads, state, lr, gamma, reference, collectives
    ) -> tuple[list[Stack], list[list[Tensor]]]:
        """The arguments of ``step`` as checked stacks, one a leaf or, of a FlatGroup,
        one a shape; and the leaves of each as their owner holds them.
        """
        if gamma is not None and not self.has_gamma:
            raise ValueError(
                f"got gamma={gamma!r} for {type(self).__name__}, which has none: leave "
                "gamma out"
            )
        leaves = flatten(params, "params")
        check_packing(params, grads, "grads")
        g = match(params, grads, "grads")
        if type(state) is not self.State:
            raise ValueError(
                f"got a {type(state).__name__}, expected {self.State.__name__}: make "
                f"the state by init of this {type(self).__name__}"
            )
        for name in (*self.buffers, *(("h",) if self.keeps_h else ())):
            if getattr(state, name) is None:
                raise ValueError(
                    f"got a state without {name}, expected one of a rule with the same "
                    "options: clip, amsgrad and is_approx decide what it holds"
                )
        kept = match_state(params, state.h, "state.h") if self.keeps_h else []
        if self.corrected:
            if reference is None and not self.keeps_h:
                raise ValueError(
                    "got reference=None for a rule with is_approx=False, expected the "
                    "current batch's gradient at the "
                    "previous parameters: pass reference=, zeros at the first step"
                )
            h = kept
            if reference is not None:
                check_packing(params, reference, "reference")
                h = match(params, reference, "reference")
        elif reference is None:
            h = []
        else:
            raise ValueError(
                f"got a reference for {self!r}, expected a rule that corrects the "
                "gradient: leave reference out, "
                "or build a MARS rule with is_approx=False"
            )
        buffers = [
            match_state(params, getattr(state, name), f"state.{name}")
            for name in self.buffers
        ]
        flat = isinstance(params, FlatGroup)

        def local(tensor: Tensor) -> Tensor:
            return tensor if flat else collectives.local(tensor).unsqueeze(0)

        own_gamma = self.own_gamma if gamma is None else gamma
        stacks = [
            Stack(
                rule=self,
                lr=lr,
                gamma=own_gamma,
                t=state.t.expand(x.shape[0] if flat else 1),
                x=local(x),
                g=local(g[i]),
                h=local(h[i]) if h else None,
                kept=local(kept[i]) if kept else None,
                buffers=tuple(local(b[i]) for b in buffers),
                shape=leaf_shape(params, x),
            )
            for i, x in enumerate(leaves)
        ]
        return stacks, [list(x.unbind()) if flat else [x] for x in leaves]

    def unroute(
        self, params, stacks: Sequence[Stack], state, finite: Tensor, collectives
    ) -> tuple[Tree, Any]:
        """The stacks after the step as what ``step`` returns."""
        flat, leaves = isinstance(params, FlatGroup), flatten(params, "params")

        def tree(parts):
            if flat:
                return rebuild(params, list(parts))
            return rebuild(
                params,
                [
                    collectives.wrap(new.squeeze(0), like)
                    for new, like in zip(parts, leaves, strict=True)
                ],
            )

        new = {
            name: tree(stack.buffers[i] for stack in stacks)
            for i, name in enumerate(self.buffers)
        }
        if self.keeps_h:
            new["h"] = tree(stack.kept for stack in stacks)
        went = finite.to(state.t.dtype)
        state = state._replace(
            t=state.t + went, skipped=state.skipped + 1 - went, **new
        )
        return tree(stack.x for stack in stacks), state
