"""MARS and the learning rate's schedules as torchtitan's containers."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from re import search
from typing import Literal

import torch

from marsopt import MARS, REGISTRY
from marsopt.functional.authors import adamw_values
from marsopt.optim.groups import kinds_of, values_of
from marsopt.rules.registry import named
from train.engine.schedule import cosine, linear, wsd
from train.engine.titan import (
    LRSchedulersContainer,
    MarsOptimizersContainer,
    ParamGroupConfig,
)
from train.errors import UserError

EMBEDDINGS, VECTORS, MATRICES = r"^(wte|wpe)\.", r"norm\.weight$", ".*"
GROUPS = {EMBEDDINGS: "embeddings", VECTORS: "layer_norms", MATRICES: "matrices"}
# rules that give everything one rate, and whose scripts keep embeddings from them
# (MARS_M/train_mars_m.py, train_moonlight.py)
ONE_RATE = frozenset(n for n, rule in REGISTRY.items() if rule.fallback == "adamw")


class MarsOptimizers(MarsOptimizersContainer):
    """One MARS over the whole model, in three groups unless ``param_groups`` names
    others: embeddings, LayerNorm weights and the matrices of the blocks.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MarsOptimizersContainer.Config):
        mars_type: str = "mars-adamw"
        """A name in marsopt.REGISTRY: the rule of the matrices."""
        lr: float = 3e-3
        """Peak learning rate of matrices."""
        betas: tuple[float, float] | None = None
        """Decay rates of the moments; rules with one momentum use the first. None = the
        rule's own, 0.999 with log_time.
        """
        log_time: float | None = None
        """Memory that grows with the run: every decay in step t is min(beta, t / (t +
        log_time)). Common values are 8 and 10; None = off.
        """
        eps: float = 1e-8
        """Added to the root of the second moment."""
        weight_decay: float = 0.0
        """Decoupled weight decay of the matrices in the blocks."""
        embedding_weight_decay: float = 0.0
        """Weight decay of token and position embeddings."""
        embeddings_by_adamw: bool | None = None
        """Give embeddings to the AdamW of LayerNorm weights: None = as the authors'
        script of this type, that is with mars-m and moonlight (and those of soap).
        """
        amsgrad: bool = False
        """Divide by the root of the largest second moment so far."""
        nesterov: bool | float | None = None
        """Nesterov's form of the rule's momentum, or the weight of the gradient beside
        its average; None = the rule's own: on with nadamw, muon and moonlight.
        """
        sides: Literal["both", "short"] | None = None
        """Of SOAP: which sides of a matrix have a factor; None = both."""
        precondition_frequency: int | None = None
        """Of SOAP: steps between two refreshes of its bases; None = 10."""
        correction: Literal["approximate", "exact"] = "approximate"
        """What MARS corrects the gradient by: approximate = the previous one; exact = a
        second gradient a step, of the next batch at the current parameters.
        """
        gamma: float = 0.025
        """Scale of the variance reduction."""
        gamma_decay: Literal["none", "with_lr", "last_quarter"] = "none"
        """How gamma falls: in proportion to the learning rate, or to 0 for the last
        quarter of the steps.
        """
        optimize_1d: bool = False
        """Give LayerNorm weights to the MARS rule too."""
        lr_1d: float | None = None
        """Peak learning rate of LayerNorm weights; None = the rule's own: lr with
        adamw, nadamw, lion, mars-m, moonlight and soap, else 3e-3.
        """
        betas_1d: tuple[float, float] | None = None
        """Decay rates of what moves LayerNorm weights; None = the rule's own: betas
        with adamw, nadamw and lion, else (0.9, 0.95), or 0.999 with log_time.
        """
        nesterov_1d: bool | float | None = None
        """As nesterov, of what moves LayerNorm weights, and embeddings by AdamW."""
        weight_decay_1d: float = 0.1
        """Weight decay of LayerNorm weights."""
        clip: float | None = 1.0
        """Threshold of the per-tensor norm of the corrected gradient; None = off."""
        ns_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
        """Working precision of Newton-Schulz."""
        h_dtype: Literal["bfloat16"] | None = None
        """dtype of the kept gradient: bfloat16 halves its memory; None = fp32."""
        master_weight_bits: Literal[24, 32] | None = None
        """Bits of the weights of a model in training.dtype=bfloat16; None = those 16.
        """
        state_dtype: Literal["float32", "bfloat16", "int8"] | None = None
        """dtype of averages: bfloat16 and int8 are rounded stochastically; None = fp32,
        or the parameters' own without master_weight_bits.
        """
        compile: bool | None = None
        """Compile the step: None = where this machine can."""

        def __post_init__(self) -> None:
            self.mars_type = named(self.mars_type).name

        def options(self) -> dict:
            """Return arguments of MARS, which are defaults of every group."""
            names = (
                "mars_type lr betas log_time eps weight_decay amsgrad nesterov sides "
                "precondition_frequency gamma clip "
                "optimize_1d lr_1d betas_1d weight_decay_1d nesterov_1d correction"
            )
            options = {name: getattr(self, name) for name in names.split()}
            if self.correction == "approximate":  # MARS's default; baselines have none
                options["correction"] = None
            return options

        def formats(self) -> dict:
            """Return how weights and averages are stored, as arguments of MARS."""
            stored: dict = dict(master_weight_bits=self.master_weight_bits)
            if self.h_dtype is not None:
                stored["h_dtype"] = getattr(torch, self.h_dtype)
            if self.state_dtype is not None:
                stored["state_dtype"] = getattr(torch, self.state_dtype)
                stored["stochastic_rounding"] = self.state_dtype == "bfloat16"
            return stored

        def rule_options(self) -> dict:
            """Return all as arguments of ``marsopt.mars``."""
            options = self.options() | self.formats()
            return options | {"base_lr": options.pop("lr")}

        def group_options(self) -> dict:
            """Return them as hyperparameters of a param group, with the defaults."""
            options = {n: v for n, v in self.options().items() if v is not None}
            options.pop("correction", None)  # of the whole optimizer
            return named(self.mars_type).group_defaults(self.log_time) | options

        @property
        def by_adamw(self) -> bool:
            """Return whether AdamW moves the embeddings beside another rule."""
            told = self.embeddings_by_adamw
            return self.mars_type in ONE_RATE if told is None else told

        def beside_the_rule(self, names: Iterable[str]) -> set[str]:
            """Return which of these parameters are embeddings that AdamW moves."""
            return {n for n in names if self.by_adamw and search(EMBEDDINGS, n)}

        def groups(self, names: Sequence[str]) -> list[ParamGroupConfig]:
            """Return the groups of a model with parameters of these names."""
            if self.param_groups:
                return self.param_groups
            embeddings = {"weight_decay": self.embedding_weight_decay}
            if self.by_adamw:
                # embeddings have this rate and decay where the scripts have one of each
                own = {"weight_decay_1d": self.embedding_weight_decay}
                own |= {"lr_1d": None} if self.mars_type in ONE_RATE else {}
                embeddings = adamw_values(self.group_options() | own)
            vectors = {"weight_decay": self.weight_decay_1d}
            own = {EMBEDDINGS: embeddings, VECTORS: vectors, MATRICES: {}}
            group = partial(ParamGroupConfig, optimizer_name="MARS")
            return [
                group(pattern=pattern, optimizer_kwargs=kwargs)
                for pattern, kwargs in own.items()
                if any(search(pattern, name) for name in names)
            ]

    def __init__(self, config: Config, *, model_parts: list[torch.nn.Module]) -> None:
        names = [n for part in model_parts for n, _ in part.named_parameters()]
        given = config.options() | config.formats()
        given |= {name: getattr(config, name) for name in ("ns_dtype", "compile")}
        config = replace(
            config,
            param_groups=config.groups(names),
            optimizer_factory_kwargs_by_name={"MARS": given},
        )
        try:
            super().__init__(config, model_parts=model_parts)
        except (ValueError, TypeError) as error:  # of a user's own param_groups
            raise UserError(str(error)) from error
        found = [type(optimizer).__name__ for optimizer in self.optimizers]
        if found != [MARS.__name__]:
            raise UserError(
                f"got optimizers {found}, expected one MARS, which clips the norm of "
                'all gradients: write optimizer_name="MARS" in every group of '
                'param_groups, with mars_type="adamw" for AdamW'
            )
        self._names = [GROUPS.get(group.pattern) for group in config.param_groups]
        # of the last step, before the clip; one tensor, filled in by every step
        first = next(p for part in model_parts for p in part.parameters())
        self.grad_norm = torch.zeros((), device=first.device)
        self._gammas = [group["gamma"] for group in self.mars.param_groups]

    def step(self, closure: None = None) -> None:
        super().step(closure)
        self.grad_norm.copy_(self.mars.grad_norm)

    def scale_gamma(self, factor: float) -> None:
        """Set every gamma to this factor of the configured one."""
        for group, gamma in zip(self.mars.param_groups, self._gammas, strict=True):
            group["gamma"] = factor * gamma

    def rates(self) -> dict[str, float]:
        """Return the learning rate of each group, by its name or its number: of its
        matrices, if it has some.
        """
        groups, found = self.mars.param_groups, {}
        names = self._names if len(self._names) == len(groups) else [None] * len(groups)
        for i, (name, group) in enumerate(zip(names, groups, strict=True)):
            values = values_of(group, is_matrix=any(kinds_of(group)))
            found[name or f"group{i}"] = float(values["lr"] * values["lr_ratio"])
        return found

    @property
    def mars(self) -> MARS:
        """Return the one optimizer."""
        return self.optimizers[0]


class RateSchedule(LRSchedulersContainer):
    """The learning rate's course: factors on the peak of every group."""

    @dataclass(kw_only=True, slots=True)
    class Config(LRSchedulersContainer.Config):
        kind: Literal["cosine", "linear", "wsd"] = "cosine"
        """How it falls after the warm-up: along half a cosine, in a straight line, or
        not before the last decay_ratio of the steps, then in a straight line.
        """
        min_lr_factor: float = 0.0
        """Last learning rate, as a share of the peak."""

        def decay_steps(self, total: int) -> int:
            """Return wsd's decay: its part of all steps, or a fifth, as MARS-M's."""
            ratio = 0.2 if self.decay_ratio is None else self.decay_ratio
            return round(total * ratio)

        def build(self, *, optimizers, training_steps):
            total = self.total_steps or training_steps
            options = dict(warmup=int(self.warmup_steps), total=total)
            options["floor"] = self.min_lr_factor
            if self.kind == "wsd":
                options["decay"] = self.decay_steps(total)
            return RateSchedule(optimizers, partial(SCHEDULES[self.kind], **options))

    def __init__(self, optimizers: MarsOptimizers, factor: Callable) -> None:
        super().__init__(optimizers, factor)
        self._optimizers = optimizers

    def get_metrics(self) -> dict[str, float]:
        """Return what is logged."""
        return {f"lr/{name}": lr for name, lr in self._optimizers.rates().items()}


SCHEDULES = {"cosine": cosine, "linear": linear, "wsd": wsd}
