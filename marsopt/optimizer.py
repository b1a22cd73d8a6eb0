"""MARS: the rules behind the interface of torch.optim and the authors' constructor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from marsopt import checks, lanes
from marsopt.collectives import LOCAL, Collectives
from marsopt.compiling import decide, own_compile
from marsopt.lanes import Lane, Numbers
from marsopt.newton_schulz import NewtonSchulz
from marsopt.step import Verdict, measure, orthogonalize, scalar_dtype
from marsopt.trees import check_parameter


class MARS(Optimizer):
    """MARS (arXiv 2411.10438) with the authors' constructor, and their baselines in the
    same frame.

    Tensors of exactly two dims take ``mars_type``; others take AdamW with ``lr_1d``,
    ``betas_1d`` and ``weight_decay_1d`` unless ``optimize_1d``. Every argument up to
    ``clip`` may be set per param group and changed between steps, as in torch.optim;
    the learning rate of the others is lr * lr_1d / base_lr, where the group's
    ``base_lr`` is its lr when it was added, so that it follows the schedule.

    Args:
        params: tensors, (name, tensor) pairs or param groups. Real floating point,
            dense.
        lr: learning rate, a number or 0-D tensor.
        betas: decay rates of the moments; rules with one momentum use betas[0].
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay of what takes ``mars_type``.
        amsgrad: divide by the root of the largest second moment so far ("mars-adamw",
            "adamw").
        gamma: scale of the variance reduction; 0 turns it off.
        is_approx: True: the reference gradient h is the previous step's gradient. False
            (exact MARS): h is the current batch's gradient at the previous parameters,
            handed over by ``update_previous_grad()``.
        mars_type: "mars-adamw", "mars-lion", "mars-shampoo", "mars-m", "adamw", "lion",
            "muon" or "moonlight".
        optimize_1d: give tensors that are not matrices to the MARS rule too.
        lr_1d, betas_1d, weight_decay_1d: of the AdamW for tensors that are not
            matrices.
        clip: threshold of the per-tensor norm of the corrected gradient; None = off.
        max_norm: threshold of the global gradient norm, applied inside the step (in
            place of clip_grad_norm_); the norm is that of all parameters of this
            optimizer. None = off.
        epsilon_hat: AdamW adds eps before debiasing, as the MARS-M and Moonlight
            scripts do for embeddings. For tensors that are not matrices, "mars-m" and
            "moonlight" always do.
        ns_steps, ns_coefficients, ns_dtype: Newton-Schulz iterations, coefficient set
            and working precision.
        state_dtype: dtype of the state; None = the parameter's own. torch.float32 for
            bf16 parameters.
        collectives: ``parallel.MeshCollectives(mesh)`` for sharded parameters.
        compile: None = compile where this machine can (logged once), True = required,
            False = eager.
        nonfinite: "skip" = a step whose gradient holds a NaN or infinity changes
            nothing and is counted in ``num_skipped``, without a host sync; "raise" = it
            also raises FloatingPointError (one sync a step).

    Raises:
        TypeError, ValueError: arguments out of their range, tensors that no rule can
            move.
        RuntimeError: ``compile=True`` where nothing can compile.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float | Tensor = 3e-3,
        betas: tuple[float, float] = (0.95, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        gamma: float = 0.025,
        is_approx: bool = True,
        mars_type: str = "mars-adamw",
        optimize_1d: bool = False,
        lr_1d: float = 3e-3,
        betas_1d: tuple[float, float] = (0.9, 0.95),
        weight_decay_1d: float = 0.1,
        *,
        clip: float | None = 1.0,
        max_norm: float | None = None,
        epsilon_hat: bool = False,
        ns_steps: int = 5,
        ns_coefficients: str = "quintic",
        ns_dtype: torch.dtype = torch.bfloat16,
        state_dtype: torch.dtype | None = None,
        collectives: Collectives = LOCAL,
        compile: bool | None = None,
        nonfinite: str = "skip",
    ) -> None:
        if nonfinite not in ("skip", "raise"):
            raise ValueError(
                f"got nonfinite={nonfinite!r}, expected 'skip' or 'raise': choose one "
                "of the two"
            )
        checks.positive_or_none("max_norm", max_norm)
        self._options: dict[str, Any] = dict(
            is_approx=is_approx,
            max_norm=max_norm,
            ns=NewtonSchulz(ns_steps, ns_coefficients, ns_dtype),
            state_dtype=state_dtype,
            collectives=collectives,
            compile=compile,
            nonfinite=nonfinite,
        )
        self._reset()
        defaults = dict(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            gamma=gamma,
            mars_type=mars_type,
            optimize_1d=optimize_1d,
            lr_1d=lr_1d,
            betas_1d=betas_1d,
            weight_decay_1d=weight_decay_1d,
            clip=clip,
            epsilon_hat=epsilon_hat,
        )
        super().__init__(params, defaults)
        device = self.param_groups[0]["params"][0].device
        self._compile = decide(compile, device.type)
        self._skipped = torch.zeros((), dtype=torch.int64, device=device)
        self._build()

    # ---- construction ----------------------------------------------------------------
    # ---------------------------

    def _reset(self) -> None:
        """What is derived from groups and state, and made anew when they change."""
        self._lanes: list[Lane] = []
        self._numbers: list[Numbers] = []
        self._max_norm: Tensor | None = None
        self._signature: tuple = ()
        self._known: set[Tensor] = set()
        self._previous: dict[Tensor, Tensor] = {}
        self._zeros: dict[Tensor, Tensor] = {}
        self._verdict: Verdict | None = None
        self._compiled: dict[str, Callable] = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its state is made at once. Raises as the constructor does, and
        then adds nothing.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            group.setdefault("base_lr", float(group["lr"]))
            lanes.pair_of(group, self._options)  # checks ranges
            checks.at_least_zero("lr", group["lr"])
            checks.at_least_zero("lr_1d", group["lr_1d"])
            for i, p in enumerate(group["params"]):
                self._check_parameter(p, self._label(group, i))
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        if self._lanes:  # not while the constructor adds its groups
            self._build()

    def _check_parameter(self, p: Tensor, what: str) -> None:
        check_parameter(p, what)
        if p.device.type == "meta":
            raise ValueError(
                f"got {what} on the meta device, expected real storage: build MARS "
                "after model.to_empty(...)"
            )
        first = self.param_groups[0]["params"][0].device
        if p.device != first:
            raise ValueError(
                f"got {what} on {p.device}, expected {first}, where the first "
                "parameter is: use one MARS per device"
            )
        self._options["collectives"].local(
            p
        )  # raises for a sharded parameter without collectives

    def _label(self, group: dict[str, Any], index: int) -> str:
        """What a parameter is called in messages."""
        if "param_names" in group:
            return f"parameter {group['param_names'][index]!r}"
        number = next(i for i, g in enumerate(self.param_groups) if g is group)
        return f"parameter {index} of group {number}"

    def _build(self) -> None:
        """Make missing state, and lanes over it. Existing state is kept."""
        self._numbers = [Numbers(group, self._options) for group in self.param_groups]
        self._lanes = [
            lane
            for group, numbers in zip(self.param_groups, self._numbers, strict=True)
            for lane in lanes.build(group, numbers, self.state, self._options)
        ]
        self._known = {p for lane in self._lanes for p in lane.params}
        self._signature = self._structure()
        device = self._skipped.device
        bound = self._options["max_norm"]
        self._max_norm = (
            None
            if bound is None
            else torch.tensor(bound, dtype=scalar_dtype(device), device=device)
        )
        functions = dict(
            measure=measure, scale=lanes.scale_, move=lanes.move_, settle=lanes.settle_
        )
        self._compiled = {
            name: own_compile(f) if self._compile else f
            for name, f in functions.items()
        }

    def _structure(self) -> tuple:
        """What, when it changes in a group, changes the formulas and not only their
        numbers.
        """
        keys = ("mars_type", "optimize_1d", "amsgrad", "epsilon_hat")
        return tuple(
            (id(g), g["clip"] is None, *(g[key] for key in keys))
            for g in self.param_groups
        )

    # ---- the step --------------------------------------------------------------------
    # ---------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on the parameters that have a gradient; the others, and their state,
        stay as they are.

        Args:
            closure: reevaluates the model and returns the loss.

        Returns:
            What the closure returned, or None.

        Raises:
            ValueError: a sparse gradient, or a hyperparameter that was changed to
                something out of its range.
            FloatingPointError: a gradient that is not finite, with
                ``nonfinite="raise"``; nothing has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        grads, live = self._gradients()
        for numbers in self._numbers:
            numbers.refresh()
        leaves = [lane.params for lane in self._lanes]
        routes = [lane.route(grads, self._options) for lane in self._lanes]
        collectives = self._options["collectives"]

        sums = collectives.sum(
            self._compiled["measure"](routes), list(chain.from_iterable(leaves))
        )
        scales, self._verdict = self._compiled["scale"](
            routes, sums, self._max_norm, live, self._skipped
        )
        matrices = self._compiled["move"](routes, scales)
        if any(matrices):
            factors = orthogonalize(routes, matrices, leaves, collectives)
            parts = [
                (r, s, o) for r, s, o in zip(routes, scales, factors, strict=True) if o
            ]
            self._compiled["settle"](*zip(*parts, strict=True))
        if self._options["nonfinite"] == "raise" and not self._verdict.finite:
            raise FloatingPointError(self._blame(sums))
        return loss

    def _gradients(self) -> tuple[dict[Tensor, Tensor], Tensor | None]:
        """Local gradients of all lanes' parameters, and which are real (None: all)."""
        for i, group in enumerate(self.param_groups):
            for j, p in enumerate(group["params"]):
                if p.grad is None:
                    continue
                if p.grad.layout != torch.strided:
                    raise ValueError(
                        f"got a gradient of layout {p.grad.layout} for "
                        f"{self._label(self.param_groups[i], j)}, expected "
                        "torch.strided: make it dense (nn.Embedding(sparse=False))"
                    )
                if p not in self._known:
                    self._signature = ()
        if self._signature != self._structure():
            self._build()
        local = self._options["collectives"].local
        grads: dict[Tensor, Tensor] = {}
        live = []
        for p in chain.from_iterable(lane.params for lane in self._lanes):
            live.append(p.grad is not None)
            if p.grad is None and p not in self._zeros:
                self._zeros[p] = torch.zeros_like(local(p))
            grads[p] = self._zeros[p] if p.grad is None else local(p.grad)
        return grads, None if all(live) else torch.tensor(
            live, device=self._skipped.device
        )

    def _blame(self, sums: Tensor) -> str:
        rows = torch.isfinite(sums).all(1).logical_not().nonzero().flatten().tolist()
        everyone = list(chain.from_iterable(lane.labels for lane in self._lanes))
        named = ", ".join(everyone[i] for i in rows[:3])
        return (
            f"got a gradient that is not finite in {len(rows)} of {len(everyone)} "
            f"parameters ({named}"
            f"{', ...' if len(rows) > 3 else ''}), expected numbers: parameters and "
            "state are unchanged; lower the learning "
            "rate, or pass nonfinite='skip' to go on"
        )

    @property
    def grad_norm(self) -> Tensor | None:
        """Global gradient norm of the last step before any clip, 0-D on the device;
        None before the first step.
        """
        return None if self._verdict is None else self._verdict.grad_norm

    @property
    def num_skipped(self) -> int:
        """Steps since construction that changed nothing because a gradient was not
        finite. Reading it is a host sync.
        """
        return int(self._skipped)

    # ---- exact MARS: the authors' protocol
    # ----------------------------------------------------------------------

    @torch.no_grad()
    def update_previous_grad(self) -> None:
        """Exact MARS, before ``step``: keep ``p.grad``, now that of the *next* batch at
        the current parameters.

        With ``max_norm`` it gets a global clip of its own, as in the authors' script.
        Parameters without gradient keep zeros. With ``is_approx`` this does nothing, as
        in the authors' class.
        """
        if self._options["is_approx"]:
            return
        grads, _ = self._gradients()
        everyone = [p for lane in self._lanes for p in lane.params]
        a = None
        if self._max_norm is not None:
            routes = [
                lane.route(grads, self._options)._replace(h=[]) for lane in self._lanes
            ]
            sums = self._options["collectives"].sum(measure(routes), everyone)
            a = (self._max_norm / (sums[:, 0].sum().sqrt() + 1e-6)).clamp(max=1.0)
        for p in (p for lane in self._lanes if lane.h for p in lane.params):
            self._previous.setdefault(p, torch.empty_like(grads[p])).copy_(
                grads[p] if a is None else a * grads[p]
            )

    @torch.no_grad()
    def update_last_grad(self) -> None:
        """Exact MARS, after ``step``: what ``update_previous_grad`` kept becomes the
        next step's reference h.

        Raises:
            RuntimeError: nothing was kept since the last call.
        """
        if self._options["is_approx"]:
            return
        if not self._previous:
            raise RuntimeError(
                "got update_last_grad() with nothing kept, expected "
                "update_previous_grad() before the step: compute the next "
                "batch's gradient at the current parameters and call it"
            )
        for lane in self._lanes:
            for p, h in zip(lane.params, lane.h, strict=bool(lane.h)):
                h.copy_(self._previous[p])

    # ---- state -----------------------------------------------------------------------
    # ---------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict()`` returned, into the existing state tensors, bit for
        bit in their own dtype.

        Raises:
            ValueError: other groups, or state that this optimizer has and
                ``state_dict`` lacks (the parameter is named).
        """
        seen: list[dict[str, Any]] = [state_dict]

        def remember(_: Optimizer, given: dict[str, Any]) -> None:
            seen.append(given)  # after the hooks of others, which may replace it

        mine = self.state
        handle = self.register_load_state_dict_pre_hook(remember)
        try:
            ids = [i for group in state_dict["param_groups"] for i in group["params"]]
            self._check_complete(state_dict, ids)
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        self.state = mine
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        for i, p in zip(ids, params, strict=True):
            for key, tensor in mine.get(p, {}).items():
                tensor.copy_(seen[-1]["state"][i][key])
        self._build()

    def _check_complete(self, state_dict: dict[str, Any], ids: Sequence[int]) -> None:
        labelled = [
            (p, self._label(g, i))
            for g in self.param_groups
            for i, p in enumerate(g["params"])
        ]
        if len(ids) != len(labelled):
            raise ValueError(
                f"got a state dict of {len(ids)} parameters, expected {len(labelled)}: "
                "build MARS over the same parameters"
            )
        for i, (p, label) in zip(ids, labelled, strict=True):
            missing = set(self.state.get(p, {})) - set(state_dict["state"].get(i, {}))
            if missing:
                raise ValueError(
                    f"got a state dict without {sorted(missing)} of {label}, expected "
                    f"{sorted(self.state[p])}: it was saved "
                    "by another optimizer or mars_type; load it into the one that "
                    "saved it"
                )

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "_options": self._options,
            "_compile": self._compile,
            "_skipped": self._skipped,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_options" in state:  # from a pickle or deepcopy, not from load_state_dict
            self._reset()
            self._build()
