"""MARS: the rules behind the interface of torch.optim and the authors' constructor."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, Literal, NamedTuple, Unpack, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from marsopt.functional.authors import all_options, check_taken
from marsopt.functional.keywords import PartOptions
from marsopt.optim.binding import Binding, Member, put
from marsopt.optim.exact import NextGradients
from marsopt.optim.groups import (
    check_no_module,
    check_once,
    check_parameters,
    complete_group,
    configuration,
    constructor_values,
    device_of,
    labels,
)
from marsopt.optim.loading import as_tensor
from marsopt.optim.state_dict import check_ids, in_form_of, to_restore, under_loaded
from marsopt.optim.statistics import LastStep, Statistics, names_of
from marsopt.optim.summary import summary
from marsopt.optim.torch_state import state_of_mars
from marsopt.rules import checks
from marsopt.rules.checks import Number, Weight
from marsopt.rules.formats import joined, low_bits
from marsopt.rules.matrices import Kind
from marsopt.rules.numerics import scalar_dtype, without_autocast
from marsopt.rules.options import check_names
from marsopt.rules.registry import RuleName, correction_named
from marsopt.step.decide import global_clip_of
from marsopt.step.graphs import Graphs, declined, once, resolve_compile
from marsopt.step.kernel_runner import Kernels
from marsopt.step.owners import LOCAL, Collectives, OwnerBuffer, check_collectives
from marsopt.step.step import named_range, step

log = logging.getLogger(__name__)
NEW_BINDING = "marsopt: a new binding, since groups, parameters or state changed"


class Description(NamedTuple):
    """The memory of an optimizer."""

    binding: Binding
    members: list[Member]  # the parameters that steps update
    # 0-D, on the device, which steps read and write where they are: how many steps were
    # skipped and, if there is one, the threshold of the global norm
    scalars: list[Tensor]
    num_kept_bytes: int  # gradients of the next batch are not in ``state``
    # The first step over a binding makes its runner.
    runner: Graphs | Kernels | None


class MARS(Optimizer):
    """MARS (arXiv 2411.10438) with the authors' constructor, and their baselines in the
    same frame.

    Tensors of exactly two dims (or what ``matrices`` says) take ``mars_type``. Other
    tensors take AdamW with ``lr_1d``, ``betas_1d`` and ``weight_decay_1d`` unless
    ``optimize_1d``; with "adamw", "nadamw" and "lion" they take that rule itself. None
    means the rule's default, which docs/fidelity.md lists; the authors' four names have
    the authors' values.

    With named parameters, one line of ``logging`` (INFO) says which rule has which
    matrices, as ``print(optimizer)`` does.

    **A param group stays the dict that is given.** The learning rate of its matrices is
    ``group["lr"] * group["lr_ratio"]``. Other tensors take ``lr_1d_ratio`` of that,
    ``betas_1d``, ``weight_decay_1d`` and ``nesterov_1d``, where the group has these
    keys: it gets them when it is added, if it has such tensors and their numbers
    differ. Schedules write ``lr`` into every group. A group may give every
    hyperparameter, as in torch.optim, but for the whole optimizer's: ``is_approx``,
    ``correction``, ``max_norm``, Newton-Schulz (``ns_...``) and dtypes. Its lr, betas
    and weight_decay hold for everything in it, unless it gives ``lr_1d``, ``betas_1d``
    or ``weight_decay_1d`` too. Values in a group are numbers, bools, strings, None,
    tensors, or tuples of these, and may change between steps. A change of the rule of a
    tensor (``mars_type``, ``matrices``), and of ``clip`` to or from None, restarts the
    state that the two rules do not share, and AdamW's as a whole if it has no second
    moment yet.

    Args:
        params: tensors, (name, tensor) pairs or param groups. Real floating point,
            dense.
        lr: learning rate, a number or 0-D tensor.
        betas: decay rates of the moments; rules with one momentum use betas[0];
            NorMuon's row-wise second moment uses betas[1]. None = the rule's default.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay of tensors that take ``mars_type``. None =
            the rule's default.
        amsgrad: divide by the root of the largest second moment so far ("mars-adamw",
            "adamw", "nadamw").
        gamma: scale of the variance reduction; 0 turns it off.
        is_approx: True: the reference gradient h is the previous step's gradient. False
            (exact MARS): h is the current batch's gradient at the previous parameters,
            handed over by ``update_previous_grad()``.
        mars_type: a name in ``marsopt.REGISTRY``: "mars-adamw", "mars-lion",
            "mars-shampoo", "mars-m", "adamw", "nadamw", "lion", "muon", "moonlight",
            ...
        optimize_1d: give tensors that are not matrices to the MARS rule too.
        lr_1d, betas_1d, weight_decay_1d: of tensors that are not matrices.
            None = the rule's own: lr, betas and weight_decay themselves, or the
            authors' 3e-3, (0.9, 0.95) and 0.1. ``lr_1d`` is measured against lr, or
            against ``base_lr`` if lr starts below its peak.
        clip: threshold of the norm of the corrected gradient, per matrix (see
            ``clip_per``) or tensor that is none; None = off.
        max_norm: threshold of the global gradient norm, applied inside the step (in
            place of clip_grad_norm_), over all parameters of this optimizer. None =
            off. An attribute too, which may change between steps.
        correction: "approximate" or "exact", in place of ``is_approx``; None = as it
            says. Baselines, and the AdamW beside a rule, take none.
        nesterov: True: Nesterov's form of the rule's momentum; a number w in [0, 1]:
            (1 - w) times the debiased average plus w times the gradient; None = the
            rule's own, on for "muon", "moonlight" and "nadamw".
        nesterov_1d: the same of AdamW for tensors that are not matrices; None = off
            beside a matrix rule, else ``nesterov``.
        log_time: memory that grows with the run: every decay in step t of a tensor is
            min(beta, t / (t + log_time)), and betas are the caps. Betas that are not
            given are 0.999 then, and ``nesterov`` is 0.2. Common values are 8 and 10;
            None = off. In log time, averages remember a fixed share of the steps taken
            (arXiv 2602.05298).
        epsilon_hat: AdamW adds eps before debiasing, as the MARS-M and Moonlight
            scripts do for embeddings. For tensors that are not matrices, these two and
            both kinds of NorMuon always do.
        matrices: "2d"; "batched": a tensor (..., rows, cols), as the weights of
            experts, is a batch of matrices, which take ``mars_type``; or "flattened": a
            tensor (rows, ...), as the kernel of a convolution, is one matrix that does.
        state_dtype: dtype of the state; None = the parameter's own, float32 for
            float16 and with ``master_weight_bits``. torch.float32 for bf16 parameters;
            not narrower than the parameter, but torch.bfloat16 with
            ``stochastic_rounding``, or torch.int8: averages are codes of 8 bits, with a
            scale for 64 neighbours in a row.
        collectives: ``marsopt.parallel.MeshCollectives(mesh)`` for sharded parameters;
            ``marsopt.parallel.DataParallel(process_group)`` under DDP, where ranks
            share Newton-Schulz. ``for_model`` finds either.
        compile: None = compile if this machine can (logged once), True = required,
            False = eager. Parameters, gradients and state stay where they are. On a CPU
            a step copies tensors of fewer than 4,096 elements behind each other, and
            out again.
        nonfinite: "skip" = a step whose gradient holds a NaN or infinity changes
            nothing and is counted in ``num_skipped``, without a host sync. "raise" = it
            also raises FloatingPointError (one sync a step).
        options: any other argument of ``marsopt.mars``, whose docstring lists them:
            ``adjust_lr_fn``, ``splits``, ``ns_dtype`` and so on. With
            ``master_weight_bits=32`` a step updates float32 weights, which bfloat16
            parameters are rounded from: the state has the 16 bits that these lack. With
            24 it has 8 of them, rounded stochastically.

    Raises:
        TypeError, ValueError: arguments out of their range, tensors that no rule can
            update.
        RuntimeError: ``compile=True`` where nothing can compile. Of a step that a CUDA
            graph captures: a hyperparameter that is a tensor on the CPU, or gradients
            that are missing as in no step before.

    Example:
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> optimizer = marsopt.MARS(model.parameters(), lr=0.1, compile=False)
        >>> for _ in range(10):
        ...     model(torch.ones(2)).square().sum().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> model.weight.detach()
        tensor([[0.0047, 0.0047]])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 3e-3,
        betas: tuple[Number, Number] | None = None,
        eps: float = 1e-8,
        weight_decay: float | None = None,
        amsgrad: bool = False,
        gamma: float = 0.025,
        is_approx: bool = True,
        mars_type: RuleName = "mars-adamw",
        optimize_1d: bool = False,
        lr_1d: float | None = None,
        betas_1d: tuple[Number, Number] | None = None,
        weight_decay_1d: float | None = None,
        *,
        clip: float | None = 1.0,
        max_norm: float | None = None,
        correction: str | None = None,
        nesterov: Weight | None = None,
        nesterov_1d: Weight | None = None,
        log_time: float | None = None,
        epsilon_hat: bool = False,
        matrices: Kind = "2d",
        state_dtype: torch.dtype | None = None,
        collectives: Collectives = LOCAL,
        compile: bool | None = None,
        nonfinite: Literal["skip", "raise"] = "skip",
        **options: Unpack[PartOptions],
    ) -> None:
        if isinstance(lr, str):
            raise TypeError(f"got lr={lr!r}, expected a number: pass mars_type={lr!r}")
        checks.one_of(("skip", "raise"))("nonfinite", nonfinite)
        checks.none_or(checks.true_or_false)("compile", compile)
        check_collectives(collectives)
        # ratios are of param groups
        known = all_options().keys() - {"lr_ratio", "lr_1d_ratio"}
        check_names(options, known, "marsopt.MARS")
        # the parameters of this function that are options, by name
        arguments = {n: value for n, value in locals().items() if n in known}
        whole, defaults = constructor_values(arguments | {**options})
        whole |= dict(collectives=collectives, compile=compile, nonfinite=nonfinite)
        self._options = whole
        self._order: list[int] = []  # the model's: these numbers, if it is known
        self._forget_bindings()
        self._loading: dict[str, Any] | None = None  # inside load_state_dict
        self._grad_norm: Tensor | None = None
        self._last: LastStep | None = None
        self._start_protocol()
        self._agreed = False  # whether all ranks were found to hold the same options
        self._num_loads = 0
        check_no_module(params)
        with torch.inference_mode(
            False
        ):  # else later steps could not write the tensors
            self._skipped = torch.zeros((), dtype=torch.int64, device="cpu")
            super().__init__(params, defaults)
            self._place()
            self._build()
        types = [group["mars_type"] for group in self.param_groups]
        check_taken(types, correction)
        are_named = any("param_names" in group for group in self.param_groups)
        if are_named and log.isEnabledFor(logging.INFO):  # rates may be on a device
            lines = summary(self.param_groups, self._options)
            log.info("marsopt.MARS: %s", "; ".join(lines))

    def _start_protocol(self) -> None:
        correction = correction_named(self._options["correction"])
        self._next_grads = NextGradients(is_used=correction.h_from == "caller")
        self._say = once()

    @torch.inference_mode(False)
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, the given dict, and complete it. Its state is made at once.

        Raises:
            TypeError, ValueError: as the constructor; then nothing was added.
        """
        check_once(self.param_groups, param_group)
        num_before, before = len(self.param_groups), None
        try:
            if isinstance(param_group, dict):  # torch.optim refuses all else
                before = dict(param_group)
                complete_group(param_group, self._options, self.defaults)
            super().add_param_group(param_group)
            # the constructor binds all groups at once
            binding = None if self._binding is None else self._new_binding()
        except (TypeError, ValueError):
            del self.param_groups[num_before:]
            if before is not None:
                param_group.clear()
                param_group.update(before)
            raise
        if binding is not None:
            binding.bind()
            self._build(binding)
            self._agreed = False

    def _forget_bindings(self) -> None:
        self._binding: Binding | None = None

    def _place(self) -> None:
        """Choose the device and whether to compile. An optimizer that updates nothing
        (ZeRO on some ranks, a model that is frozen) uses the CPU until it does.
        """
        device = device_of(self.param_groups, self.state)
        wanted = self._options["compile"]
        self._compile = device is not None and resolve_compile(wanted, device)
        self._skipped = self._skipped.to(device or "cpu")

    def _build(self, binding: Binding | None = None) -> None:
        """Make missing state and bind it; the next step makes a runner.

        Args:
            binding: one that is bound, as loading binds it, to check the loaded state
                before anything is taken over; None makes it.
        """
        if binding is None:
            binding = self._new_binding()
            binding.bind()
        self._max_norm: Tensor | None = None
        self.max_norm = self._options["max_norm"]
        if self._binding is not None:
            log.debug(NEW_BINDING)
        self._runner: Graphs | Kernels | None = None  # made by the first step over it
        self._last = None  # its sums belong to the previous binding
        self._binding = binding  # last: after an exception above, all is done again

    def _make_runner(self) -> Graphs | Kernels:
        """Return the runner of this step: kernels or graphs; graphs that run eagerly
        where Dynamo traces nothing, for tools that count every operation.
        """
        binding, device = self._present, self._skipped.device
        if self._runner is None:
            graphs = Graphs(device, compile=self._compile, say=self._say)
            self._graphs, self._runner = graphs, graphs
            if self._compile and binding.is_printed:
                self._runner = Kernels(binding.groups, graphs, self._say)
        return self._graphs if declined() else self._runner

    @property
    def _present(self) -> Binding:
        """The binding, which there is once the constructor has added its groups."""
        assert self._binding is not None
        return self._binding

    def _new_binding(self) -> Binding:
        device = device_of(self.param_groups, self.state)
        stays = device in (None, self._skipped.device)
        if self._binding is not None and not (self._binding.params and stays):
            self._place()  # a first parameter is trained, or all are elsewhere
        return Binding(
            self.param_groups,
            self.state,
            self._options,
            check_parameters(self.param_groups, self._options, self.state),
            self._binding,
        )

    def _fitting(self) -> Binding:
        """The binding, rebuilt where groups, parameters or state have changed since it
        was bound. All ranks call it.
        """
        if not self._agreed:  # once: later changes need not come everywhere
            values = configuration(self.param_groups, self._options)
            values["number of loads"] = str(self._num_loads)
            self._present.collectives.agree(values, labels(self.param_groups))
            self._agreed = True
        if not self._present.is_current(self.param_groups, self.state):
            self._build()
        return self._present

    @torch._disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch.optim's. If the state has left its memory, for the host, that memory
        is freed too: the next step does not need it.
        """
        super().zero_grad(set_to_none)
        if self._present.has_left():
            self._present.release()
            self._runner = self._last = None

    @property
    def max_norm(self) -> float | None:
        """Threshold of the global clip; may be set between steps, equal on all ranks.

        Raises:
            TypeError, ValueError: set to something but None or a finite number > 0.
        """
        bound: float | None = self._options["max_norm"]
        return bound

    @max_norm.setter
    def max_norm(self, bound: float | None) -> None:
        checks.positive_or_none("max_norm", bound)
        self._options["max_norm"] = bound = checks.plain(bound)
        if bound is None:
            self._max_norm = None
            return
        if self._max_norm is None:
            dtype = scalar_dtype(self._skipped.device)
            self._max_norm = torch.zeros_like(self._skipped, dtype=dtype)
        put(self._max_norm, bound)  # in place: a captured CUDA graph reads it there

    def describe(self) -> Description:
        """Return how parameters lie at present: for tools and tests, to be read, not
        changed.
        """
        return Description(
            binding=self._present,
            members=self._present.members,
            scalars=[s for s in (self._skipped, self._max_norm) if s is not None],
            num_kept_bytes=self._next_grads.num_bytes,
            runner=self._runner,
        )

    def __repr__(self) -> str:
        head, _, groups = super().__repr__().partition("\n")
        lines = summary(self.param_groups, self._options)
        return "\n".join([head, *(f"    {line}" for line in lines), groups])

    # ---- the step ------------------------------------------------------------------

    # an outer torch.compile does not enter: the step has graphs of its own. As
    # torch.optim does it; torch.compiler.disable would import dynamo with this module
    @torch._disable_dynamo
    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, *, bs: int | None = None
    ) -> Any:
        """One step on the parameters that have a gradient.

        Other parameters, and their state, stay as they are. Autocast has no part in it,
        but in the closure.

        Args:
            closure: reevaluates the model and returns the loss.
            bs: ignored, as in the authors' class, whose loops pass the batch size.

        Returns:
            The closure's result, or None.

        Raises:
            ValueError: a sparse gradient, or a hyperparameter that was changed to
                something out of its range.
            RuntimeError: exact MARS without its protocol (``update_previous_grad``);
                in the first step, parameters, options or hyperparameters that are
                numbers differ between the ranks of ``collectives``, which then raise
                all: nothing has changed.
            FloatingPointError: a gradient that is not finite, with
                ``nonfinite="raise"``; nothing has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    @torch.inference_mode(False)  # later steps write the tensors that are made here
    @torch.no_grad()
    @without_autocast
    def _step(self) -> None:
        binding = self._fitting()
        if not binding.members:  # everything is frozen, or elsewhere
            return
        if self._next_grads.is_used:
            self._next_grads.check_may_step()
        runner = self._make_runner()
        with named_range("marsopt: gather"):
            grads, has_grad = binding.gather(runner.printed)
        if isinstance(bound := self._options["max_norm"], Tensor):
            assert self._max_norm is not None
            self._max_norm.copy_(bound)
        outcome = step(
            binding.groups,
            binding.exchanges,
            grads,
            max_norm=self._max_norm,
            collectives=binding.collectives,
            runner=runner,
            has_grad=has_grad,
        )
        decision = outcome.decision
        with named_range("marsopt: scatter"):
            binding.scatter(grads, decision, self._skipped)
        if self._next_grads.is_used:
            self._next_grads.note_step()
        self._grad_norm = decision.grad_norm
        self._last = LastStep(binding.groups, outcome.sums, decision.ok)
        if self._options["nonfinite"] == "raise" and not decision.finite:
            raise FloatingPointError(binding.describe_nonfinite(outcome.sums))

    @property
    def grad_norm(self) -> Tensor | None:
        """Global gradient norm of the last step before any clip, 0-D, float64 (float32
        on Apple's GPUs), on the device of the parameters; None before the first step.
        """
        return self._grad_norm

    @torch.no_grad()
    def statistics(self) -> Statistics:
        """Return norms and clips of the last step, by parameter, without a sync. They
        are computed here from numbers that every step leaves on the device: a step
        costs nothing more for it.

        Call it before a schedule changes ``gamma``, ``betas``, ``clip`` or
        ``max_norm``: factors of clips are computed by the present values. Norms of
        moments or of single rows are left out, for they would cost a pass.

        Returns:
            A named tuple, of N parameters, on their device, in float64 (float32 on
            Apple's GPUs): ``names``, a list; ``grad_norm`` (N,), before any clip;
            ``global_clip`` (), the factor of ``max_norm``; ``clip`` (N,), the factor of
            ``clip``, of several matrices in a parameter the smallest.

        Raises:
            RuntimeError: there was no step yet, since construction, a load or copy, or
                a change of groups.

        Example:
            >>> model = torch.nn.Linear(2, 1, bias=False)
            >>> optimizer = marsopt.MARS(model.named_parameters(), compile=False)
            >>> model(torch.ones(2)).sum().backward()
            >>> optimizer.step()
            >>> found = optimizer.statistics()
            >>> found.names, round(found.grad_norm.item(), 3)    # of a gradient (1, 1)
            (['weight'], 1.414)
            >>> round(found.clip.item(), 3)                 # c = 1.475 g, its norm 1
            0.479
        """
        if self._last is None:
            raise RuntimeError(
                "got statistics() before a step, expected it after one: it reads the "
                "numbers that the last step has left"
            )
        return self._last.statistics(self.param_groups, self._options["max_norm"])

    @property
    def num_skipped(self) -> int:
        """Steps since construction that a non-finite gradient voided. Costs a sync."""
        return int(self._skipped)

    @torch.no_grad()
    def master_weights(self) -> dict[str, Tensor]:
        """Return the float32 weights of the parameters by name, "group0.3" without
        names: new tensors, DTensors if the parameters are. A parameter without state,
        which is frozen, is left out, as are further names of a tied one: a model loads
        the weights by ``strict=False`` then.

        Raises:
            RuntimeError: there are none, without ``master_weight_bits``.
            ValueError: a parameter is no longer bfloat16.

        Example:
            >>> model = torch.nn.Linear(2, 1).bfloat16()
            >>> optimizer = marsopt.for_model(
            ...     model, "adamw", lr=0.1, master_weight_bits=32, compile=False
            ... )
            >>> weights = optimizer.master_weights()
            >>> model.float().load_state_dict(weights)
            <All keys matched successfully>
        """
        if self._options.get("master_weight_bits") is None:
            raise RuntimeError(
                "got master_weights() of an optimizer without master_weight_bits, "
                "expected it with 32 or 24: the parameters are the weights"
            )
        collectives: Collectives = self._options["collectives"]
        local, weights = collectives.local, {}
        for p, name in names_of(self.param_groups).items():
            if low := low_bits(self.state.get(p, {})):
                weight = joined(local(p.detach()), [local(bits) for bits in low])
                weights[name] = collectives.wrap(weight, p)
        return weights

    # ---- exact MARS: the authors' protocol -----------------------------------------

    @torch.inference_mode(False)  # else later steps could not write the tensors
    @torch.no_grad()
    @without_autocast
    def update_previous_grad(self, *, grad_scale: float | Tensor | None = None) -> None:
        """Exact MARS, before ``step``: keep the *next* batch's gradient, in ``p.grad``.

        It has to be the gradient at the current parameters, of only this batch: call
        ``zero_grad`` before its backward pass, and again before the pass for ``step``.
        With ``max_norm`` it gets a global clip of its own, as in the authors' script.
        Parameters without a gradient keep zeros. With ``is_approx`` this does nothing,
        as in the authors' class.

        Args:
            grad_scale: the factor of the loss (``GradScaler.get_scale()``), to be
                divided out here: the scaler itself unscales once per step.

        Raises:
            RuntimeError: a line of the protocol is missing, which the message names:
                ``update_last_grad`` after the last step.
        """
        if not self._next_grads.is_used:
            return
        binding = self._fitting()
        self._next_grads.check_may_keep()
        factor = None if grad_scale is None else 1.0 / grad_scale
        if self._max_norm is not None:
            scale = 1.0 if factor is None else factor
            norm = binding.present_norm() * scale
            factor = scale * global_clip_of(norm, self._max_norm)
        self._next_grads.keep(binding, factor)

    @torch.inference_mode(False)  # else later steps could not write the tensors
    @torch.no_grad()
    @without_autocast
    def update_last_grad(self) -> None:
        """Exact MARS, after ``step``: the kept gradient becomes the next step's h.

        Raises:
            RuntimeError: ``update_previous_grad`` was not called since the last time.
        """
        if not self._next_grads.is_used:
            return
        binding = self._fitting()
        self._next_grads.check_may_hand_over()
        self._next_grads.hand_over(binding)

    # ---- state ---------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim's: hyperparameters of the groups, and state by parameter."""
        self._next_grads.check_may_save()
        if not self._present.covers(self.param_groups):
            self._build()
        handle = self.register_state_dict_post_hook(
            lambda _, saved: self._complete(saved), prepend=True
        )  # before the caller's hooks, which may return another dict
        try:
            return super().state_dict()
        finally:
            handle.remove()

    def _complete(self, saved: dict[str, Any]) -> None:
        """Complete torch.optim's dict: plain numbers, state of all ranks."""
        known = all_options()
        for group in saved["param_groups"]:
            group |= {n: checks.plain(v) for n, v in group.items() if n in known}
        ids, collectives = self._ids(), self._present.collectives
        owned = self._present.owned_entries()
        buffers = [
            OwnerBuffer(self.state[p][key], p, sizes, owns)
            for p, key, owns, sizes in owned
        ]
        published = collectives.publish_all(buffers)
        for (p, key, _, _), whole in zip(owned, published, strict=True):
            entry = saved["state"][ids[p]] = dict(saved["state"][ids[p]])
            entry[key] = whole

    def _ids(self) -> dict[Tensor, int]:
        """Return under which number a state dict knows each parameter."""
        params = [p for group in self.param_groups for p in group["params"]]
        return {p: i for i, p in enumerate(params)}

    @torch.inference_mode(False)  # else later steps could not write the tensors
    @torch.no_grad()
    def load_state_dict(
        self, state_dict: dict[str, Any] | list[dict[str, Any]]
    ) -> None:
        """Load what ``state_dict()`` returned, bit for bit in the state's own dtype; or
        state of torch.optim's AdamW and Muon (docs/conformance.md), a list of such
        dicts if several optimizers shared the model: then hyperparameters stay.

        State goes to the parameter of its name where both sides name the same
        parameters (``param_names``), else by position, as in torch.optim. A parameter
        without an entry restarts. Hyperparameters come from ``state_dict`` too, as in
        torch.optim; a value that its groups lack stays as it is. A caller's own entries
        in the state are loaded as torch.optim loads them.

        Raises:
            ValueError: other groups or shapes, another library's state, a
                hyperparameter out of its range, state that the loaded hyperparameters
                need and ``state_dict`` lacks, or a tensor that is not floating point
                (the parameter is named). Nothing has changed then.
        """
        before = self.param_groups, self.state
        given = cast(dict[str, Any], state_dict)  # torch.optim only copies it
        self._loading = given

        def remember(_: Optimizer, after_hooks: dict[str, Any]) -> dict[str, Any]:
            # a caller's hooks may have replaced it
            given = list(range(len(self._ids())))
            # the model's order, unless groups were added
            known = [self._order] if len(self._order) == len(given) else []
            self._loading = state_of_mars(
                self.param_groups, self._options, after_hooks, [*known, given]
            )
            return self._loading

        handle = self.register_load_state_dict_pre_hook(remember)
        try:
            super().load_state_dict(given)  # comes by __setstate__
        except BaseException:
            if self._loading is not None:  # else a caller's hook fails after the load
                self.param_groups, self.state = before
            raise
        finally:
            handle.remove()
            self._loading = None

    def _restore(self, saved: dict[str, Any], cast: dict[str, Any]) -> None:
        """Take over ``saved``; torch.optim has made ``cast`` of it, in which state has
        the parameters' dtype.
        """
        before = self.param_groups
        groups = zip(before, cast["param_groups"], strict=True)
        self.param_groups = [
            # names stay this optimizer's
            {**old, **new, **{k: old[k] for k in ("param_names",) if k in old}}
            for old, new in groups
        ]
        self.state = under_loaded(self.state, cast["state"])
        binding = self._new_binding()
        binding.bind()
        labelled = labels(self.param_groups)
        ids = dict(zip(self._ids(), check_ids(labelled, saved), strict=True))
        saved = self._claimed(saved, ids, binding)
        pairs = to_restore(self.state, labelled, saved, binding.collectives)
        for tensor, value in pairs:  # the authors' step is an int
            is_tensor = isinstance(value, Tensor)
            tensor.copy_(value) if is_tensor else tensor.fill_(value)
        self._next_grads.restart(is_fresh=True)
        self._build(binding)
        self._loading = None
        self._num_loads += 1

    def _claimed(
        self, saved: dict[str, Any], ids: Mapping[Tensor, Any], binding: Binding
    ) -> dict[str, Any]:
        """Return ``saved``, which knows parameters by ``ids``, with those parts of it
        that live here.
        """
        entries = dict(saved["state"])
        for p, key, owns, sizes in binding.owned_entries():
            entry = dict(entries.get(ids[p], {}))
            if key in entry:
                whole = as_tensor(entry[key])
                shape = sum(sizes), *self.state[p][key].shape[1:]
                # 0.4 has moments of rows shaped as the parameter's first dims
                is_of_rows = whole.shape == p.shape[: whole.ndim]
                is_other = whole.shape != shape and whole.numel() == prod(shape)
                if is_of_rows and is_other:
                    whole = whole.reshape(shape)
                entry[key] = binding.collectives.claim(whole, owns, sizes)
            entries[ids[p]] = entry
        for member in binding.members:
            if (held := entries.get(ids[member.p])) is not None:
                entries[ids[member.p]] = in_form_of(
                    member.algorithm, held, binding.collectives
                )
        return {**saved, "state": entries}

    def __getstate__(self) -> dict[str, Any]:
        self._next_grads.check_may_save()
        names = ("_options", "_order", "_compile", "_skipped", "_num_loads")
        attributes = {key: getattr(self, key) for key in names}
        attributes["_is_fresh"] = self._next_grads.is_fresh
        return {**super().__getstate__(), **attributes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if (loading := self.__dict__.get("_loading")) is not None:
            self._restore(loading, state)
            return
        super().__setstate__(state)
        # torch.optim's own, which MARS does not have: groups would take it up
        self.defaults.pop("differentiable", None)
        if "_options" in state:  # from a pickle or deepcopy
            self._forget_bindings()
            self._grad_norm = self._last = None
            self._agreed = False
            is_fresh = self.__dict__.pop("_is_fresh")
            self._start_protocol()
            self._next_grads.restart(is_fresh)
            self._build()
