"""MARS: the rules behind the interface of torch.optim and the authors' constructor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from marsopt import checks
from marsopt.admission import admit, check_once
from marsopt.collectives import LOCAL, Collectives
from marsopt.compiling import decide
from marsopt.exact import NextReference
from marsopt.lanes import OWN_KEYS
from marsopt.layout import Layout, labels
from marsopt.loading import check_complete, check_ids, restore
from marsopt.newton_schulz import NewtonSchulz
from marsopt.numbers import check_group
from marsopt.passes import Passes
from marsopt.step import Verdict, global_clip, scalar_dtype


class MARS(Optimizer):
    """MARS (arXiv 2411.10438) with the authors' constructor, and their baselines in the
    same frame.

    Tensors of exactly two dims take ``mars_type``; others take AdamW with ``lr_1d``,
    ``betas_1d`` and ``weight_decay_1d`` unless ``optimize_1d``. Every hyperparameter up
    to ``clip``, and ``epsilon_hat``, may be set per param group and changed between
    steps, as in torch.optim (``is_approx`` belongs to the optimizer). A change of
    ``mars_type``, or of ``clip`` to or from None, restarts the state that the two rules
    do not share;
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
            optimizer. None = off. An attribute too, which may change between steps.
        epsilon_hat: AdamW adds eps before debiasing, as the MARS-M and Moonlight
            scripts do for embeddings. For tensors that are not matrices, "mars-m" and
            "moonlight" always do.
        ns_steps, ns_coefficients, ns_dtype, ns_gram: Newton-Schulz iterations,
            coefficient set, working precision, and whether to iterate on Gram matrices
            where that is less work (float32): see ``NewtonSchulz``.
        state_dtype: dtype of the state; None = the parameter's own. torch.float32 for
            bf16 parameters; not narrower than the parameter.
        h_dtype: dtype of the kept gradient; None = that of the state. torch.bfloat16
            halves its share of memory and traffic.
        collectives: ``parallel.MeshCollectives(mesh)`` for sharded parameters.
        compile: None = compile where this machine can (logged once), True = required,
            False = eager. Compiled, parameters of one shape move into one buffer at
            construction (on a CPU small ones only), unless others look into their
            storage: capture CUDA graphs of the model after that.
        take_grads: True = ``step`` takes gradients away: ``p.grad`` is None after it.
            What moves alone, as large parameters do, keeps its gradient as h without a
            copy; in ``state`` it lacks the last global clip until ``state_dict()``. For
            approximate MARS on a CPU.
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
        ns_gram: bool = False,
        state_dtype: torch.dtype | None = None,
        h_dtype: torch.dtype | None = None,
        collectives: Collectives = LOCAL,
        compile: bool | None = None,
        take_grads: bool = False,
        nonfinite: str = "skip",
    ) -> None:
        if nonfinite not in ("skip", "raise"):
            raise ValueError(
                f"got nonfinite={nonfinite!r}, expected 'skip' or 'raise': choose one "
                "of the two"
            )
        checks.positive_or_none("max_norm", max_norm)
        if collectives is None:
            raise ValueError(
                "got collectives=None, expected an object with the verbs of "
                "marsopt.Collectives: leave it out for whole tensors"
            )
        self._options: dict[str, Any] = dict(
            is_approx=is_approx,
            max_norm=max_norm,
            ns=NewtonSchulz(ns_steps, ns_coefficients, ns_dtype, gram=ns_gram),
            state_dtype=state_dtype,
            h_dtype=h_dtype,
            collectives=collectives,
            compile=compile,
            take_grads=take_grads,
            nonfinite=nonfinite,
        )
        self._layout: Layout | None = None
        self._loading: dict[str, Any] | None = None  # inside load_state_dict
        self._verdict: Verdict | None = None
        self._next = NextReference()
        self._agreed = False  # whether all ranks were found to hold the same options
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
        self._place()
        self._build()

    # ---- construction --------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its state is made at once.

        Raises:
            TypeError, ValueError: as the constructor; then nothing was added.
        """
        check_once(self.param_groups, param_group)
        super().add_param_group(param_group)
        try:
            admit(self.param_groups, self._options)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        if self._layout is not None:  # else the constructor is still adding groups
            if not self._layout.params:
                self._place()
            self._build()

    def _place(self) -> None:
        """Go where the parameters are; ZeRO leaves ranks without any, which wait on the
        CPU for a group that has some.
        """
        first = next((p for g in self.param_groups for p in g["params"]), None)
        device = torch.device("cpu") if first is None else first.device
        wanted = self._options["compile"]
        self._compile = False if first is None else decide(wanted, device.type)
        self._skipped = torch.zeros((), dtype=torch.int64, device=device)

    def _build(self, layout: Layout | None = None) -> None:
        """Make missing state, lanes over it, and passes that move them."""
        if self._layout is not None and layout is None:
            self._layout.settle()
        self._layout = layout or self._new_layout()
        self._max_norm: Tensor | None = None
        self.max_norm = self._options["max_norm"]
        self._passes = Passes(
            self._options["collectives"], self._compile, self._options["compile"]
        )

    def _new_layout(self) -> Layout:
        return Layout(
            self.param_groups, self.state, self._options, self._compile, self._layout
        )

    # ---- the step ------------------------------------------------------------------

    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, *, bs: int | None = None
    ) -> Any:
        """One step on the parameters that have a gradient.

        The others, and their state, stay as they are.

        Args:
            closure: reevaluates the model and returns the loss.
            bs: ignored, as in the authors' class, whose loops pass the batch size.

        Returns:
            What the closure returned, or None.

        Raises:
            ValueError: a sparse gradient, or a hyperparameter that was changed to
                something out of its range.
            RuntimeError: exact MARS without its protocol (``update_previous_grad``).
            FloatingPointError: a gradient that is not finite, with
                ``nonfinite="raise"``; nothing has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        layout = self._fitting()
        if not layout.lanes:  # everything is frozen, or elsewhere
            return loss
        if not self._options["is_approx"]:
            self._next.use()
        sums, self._verdict = self._passes.step(layout, self._max_norm, self._skipped)
        if self._options["nonfinite"] == "raise" and not self._verdict.finite:
            raise FloatingPointError(layout.blame(sums))
        if self._options["take_grads"]:
            layout.take(self.state, self._verdict)
        return loss

    @torch.no_grad()
    def join_gradients(self) -> None:
        """Move the gradients that are there into one buffer per shape.

        Where ``zero_grad(set_to_none=False)`` keeps them, backward passes add to them
        there and ``step`` takes them without a copy. Call it before a CUDA graph
        captures the backward pass. Eager steps have no stacks: nothing moves.
        """
        if self._compile:
            self._layout.join_gradients()

    def _fitting(self) -> Layout:
        """The layout, made anew where a group or a frozen parameter has changed."""
        if not self._agreed:  # once: later changes need not come on all ranks at once
            told = [
                {k: str(v) for k, v in group.items() if k not in ("params", "lr")}
                for group in self.param_groups
            ]
            options = {k: v for k, v in self._options.items() if k != "collectives"}
            self._options["collectives"].agree(repr((told, options)))
            self._agreed = True
        if not self._layout.fits(self.state):
            self._build()
        return self._layout

    @property
    def max_norm(self) -> float | None:
        """Threshold of the global clip; may be set between steps, on all ranks alike.

        Raises:
            TypeError, ValueError: set to something but None or a finite number > 0.
        """
        return self._options["max_norm"]

    @max_norm.setter
    def max_norm(self, bound: float | None) -> None:
        checks.positive_or_none("max_norm", bound)
        self._options["max_norm"] = bound
        if bound is None:
            self._max_norm = None
        elif self._max_norm is None:
            dtype = scalar_dtype(self._skipped.device)
            self._max_norm = torch.full_like(self._skipped, bound, dtype=dtype)
        else:  # in place: a captured CUDA graph reads it where it is
            self._max_norm.fill_(bound)

    @property
    def grad_norm(self) -> Tensor | None:
        """Global gradient norm of the last step before any clip, 0-D."""
        return None if self._verdict is None else self._verdict.grad_norm

    @property
    def num_skipped(self) -> int:
        """Steps since construction that a non-finite gradient voided. Costs a sync."""
        return int(self._skipped)

    # ---- exact MARS: the authors' protocol -----------------------------------------

    @torch.no_grad()
    def update_previous_grad(self, *, grad_scale: float | Tensor | None = None) -> None:
        """Exact MARS, before ``step``: keep the *next* batch's gradient, in ``p.grad``.

        It has to be that at the current parameters. With ``max_norm`` it gets a global
        clip of its own, as in the authors' script. Parameters without a gradient keep
        zeros. With ``is_approx`` this does nothing, as in the authors' class.

        Args:
            grad_scale: what the loss was multiplied with (``GradScaler.get_scale()``),
                to be divided out here: the scaler itself unscales once per step.
        """
        if self._options["is_approx"]:
            return
        layout = self._fitting()
        factor = None if grad_scale is None else 1.0 / grad_scale
        if self._max_norm is not None:
            norm = layout.grad_norm()
            scale = 1.0 if factor is None else factor
            factor = scale * global_clip(norm * scale, self._max_norm)
        self._next.keep(layout.lanes, factor)

    @torch.no_grad()
    def update_last_grad(self) -> None:
        """Exact MARS, after ``step``: what was kept becomes the next step's h.

        Raises:
            RuntimeError: ``update_previous_grad`` was not called since the last time.
        """
        if not self._options["is_approx"]:
            layout = self._fitting()
            self._next.hand_over(layout.lanes, self.state)
            layout.hold(self.state)

    # ---- state ---------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim's: hyperparameters of the groups, and state by parameter."""
        if not self._layout.covers():  # parameters were exchanged in the groups
            self._build()
        self._layout.settle()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict()`` returned, bit for bit in the state's own dtype.

        Hyperparameters come from ``state_dict`` too, as in torch.optim; what its groups
        lack stays as it is. What others keep in the state is loaded as torch.optim
        loads it.

        Raises:
            ValueError: other groups or shapes, a hyperparameter out of its range, or
                state that the loaded hyperparameters need and ``state_dict`` lacks (the
                parameter is named). Nothing has changed then.
        """
        self._layout.settle()  # state_dict() may have been called some steps ago
        check_ids(labels(self.param_groups), state_dict)
        before = self.param_groups, self.state
        self._loading = state_dict

        def remember(_: Optimizer, after_hooks: dict[str, Any]) -> None:
            self._loading = after_hooks  # hooks of others may have replaced it

        handle = self.register_load_state_dict_pre_hook(remember)
        try:
            super().load_state_dict(state_dict)  # comes by __setstate__
        except BaseException:
            self.param_groups, self.state = before
            raise
        finally:
            handle.remove()
            self._loading = None

    def _restore(self, saved: dict[str, Any], cast: dict[str, Any]) -> None:
        """Take over ``saved``; torch.optim has made ``cast`` of it, in which state has
        the parameters' dtype.
        """
        labelled = labels(self.param_groups)
        ids = check_ids(labelled, saved)
        groups = zip(self.param_groups, cast["param_groups"], strict=True)
        self.param_groups = [{**old, **new} for old, new in groups]
        for group in self.param_groups:
            check_group(group, self._options)
        # the tensors that are there already, under the loaded structure
        present, self.state = self.state, defaultdict(dict)
        for key, entry in cast["state"].items():
            if not isinstance(key, Tensor):
                self.state[key] = entry
                continue
            mine = {k: v for k, v in present.get(key, {}).items() if k in OWN_KEYS}
            foreign = {k: v for k, v in entry.items() if k not in OWN_KEYS}
            self.state[key] = {"step": torch.zeros(()), **mine, **foreign}
        layout = self._new_layout()
        check_complete(self.state, labelled, ids, saved)
        restore(self.state, [p for p, _ in labelled], ids, saved)
        self._next = NextReference(fresh=True)
        self._build(layout)

    def __getstate__(self) -> dict[str, Any]:
        self._layout.settle()
        kept = {key: getattr(self, key) for key in ("_options", "_compile", "_skipped")}
        return {**super().__getstate__(), **kept, "_fresh": self._next.fresh}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if self.__dict__.get("_loading") is not None:
            self._restore(self._loading, state)
            return
        super().__setstate__(state)
        # torch.optim's own, which MARS does not have: groups would take it up
        self.defaults.pop("differentiable", None)
        if "_options" in state:  # from a pickle or deepcopy
            self._layout, self._verdict, self._agreed = None, None, False
            self._next = NextReference(fresh=self.__dict__.pop("_fresh"))
            self._build()
