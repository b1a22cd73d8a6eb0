"""An optimizer over a binding: built, rebuilt, saved, loaded, copied."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from marsopt.functional.routing import all_hyperparameters
from marsopt.optim.binding import Binding, Member
from marsopt.optim.exact import NextGradients
from marsopt.optim.groups import (
    check_group,
    check_no_module,
    check_once,
    check_parameters,
    complete_group,
    configuration,
    device_of,
    labels,
    validate_group,
)
from marsopt.optim.loading import as_tensor
from marsopt.optim.numbers import put
from marsopt.optim.state_dict import check_ids, to_restore, under_loaded
from marsopt.optim.statistics import LastStep
from marsopt.optim.summary import summary
from marsopt.optim.torch_state import state_of_mars
from marsopt.rules import checks
from marsopt.rules.dtypes import scalar_dtype
from marsopt.rules.registry import correction_named
from marsopt.step.compiling import declined, once, resolve_compile
from marsopt.step.graphs import Graphs
from marsopt.step.kernel_runner import Kernels
from marsopt.step.owners import OwnerBuffer

log = logging.getLogger(__name__)
NEW_BINDING = "marsopt: a new binding, since groups, parameters or state changed"


class Description(NamedTuple):
    """How an optimizer lies in memory."""

    binding: Binding
    members: list[Member]  # of it: parameters that move
    # 0-D, on the device, which steps read and write where they are: how many steps were
    # skipped and, if there is one, the threshold of the global norm
    scalars: list[Tensor]
    num_kept_bytes: int  # of the next batch's gradients, beside ``optimizer.state``
    # of steps over the binding; None before the first
    runner: Graphs | Kernels | None


class BoundOptimizer(Optimizer):
    """What torch.optim asks of an optimizer, its steps apart.

    Args:
        params: tensors, (name, tensor) pairs or param groups.
        defaults: of the param groups.
        options: of the whole optimizer.
    """

    @torch.inference_mode(False)  # else later steps could not write the tensors
    def __init__(
        self, params: Any, defaults: dict[str, Any], options: dict[str, Any]
    ) -> None:
        self._options = options
        self._order: list[int] = []  # the model's: these numbers, if it is known
        self._forget_bindings()
        self._loading: dict[str, Any] | None = None  # inside load_state_dict
        self._grad_norm: Tensor | None = None
        self._last: LastStep | None = None
        self._skipped = torch.zeros((), dtype=torch.int64, device="cpu")
        self._start_protocol()
        self._agreed = False  # whether all ranks were found to hold the same options
        self._num_loads = 0
        check_no_module(params)
        super().__init__(params, defaults)
        self._place()
        self._build()

    def _start_protocol(self) -> None:
        correction = correction_named(self._options["correction"])
        self._next_grads = NextGradients(is_used=correction.h_from == "caller")
        self._say = once()

    # ---- construction --------------------------------------------------------------

    @torch.inference_mode(False)
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, the given dict, and complete it. Its state is made at once.

        Raises:
            TypeError, ValueError: as the constructor; then nothing was added.
        """
        check_once(self.param_groups, param_group)
        num_before, given = len(self.param_groups), None
        try:
            if isinstance(param_group, dict):  # torch.optim refuses all else
                given = dict(param_group)
                complete_group(param_group, self._options, self.defaults)
            super().add_param_group(param_group)
            validate_group(param_group, self._options)
            if self._binding is not None:  # the constructor checks all of them at once
                check_parameters(self.param_groups, self._options, self.state)
        except (TypeError, ValueError):
            del self.param_groups[num_before:]
            if given is not None:
                param_group.clear()
                param_group.update(given)
            raise
        if self._binding is not None:  # else the constructor is still adding groups
            self._build()
            self._agreed = False

    def _forget_bindings(self) -> None:
        self._binding: Binding | None = None

    def _place(self) -> None:
        """Choose the device and whether to compile. An optimizer that moves nothing
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
        self._last = None  # of a step over the binding before
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
            self._place()  # the first that moves, or all were moved
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
        known = all_hyperparameters()
        for group in saved["param_groups"]:
            group |= {n: known[n].plain(v) for n, v in group.items() if n in known}
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
            {**old, **new}
            | {key: old[key] for key in ("param_names",) if key in old}  # of ours
            for old, new in groups
        ]
        for group in self.param_groups:
            check_group(group, self._options)
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
        return {**saved, "state": entries}

    def __getstate__(self) -> dict[str, Any]:
        self._next_grads.check_may_save()
        names = ("_options", "_order", "_compile", "_skipped", "_num_loads")
        kept = {key: getattr(self, key) for key in names}
        kept["_is_fresh"] = self._next_grads.is_fresh
        return {**super().__getstate__(), **kept}

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
