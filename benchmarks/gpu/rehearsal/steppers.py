"""What is stepped by interpreted kernels, and how: small optimizers in all of whose
steps numbers move, gradients are missing, or one holds a NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from benchmarks.gpu.rehearsal import cases
from benchmarks.gpu.rehearsal.cases import DTYPES, NONE
from marsopt import MARS
from marsopt.rules.registry import REGISTRY

Kind = Literal["normal", "skipped", "missing"]
STEPS: tuple[Kind, ...] = ("normal", "normal", "skipped", "missing")
# stacks of two matrices, three vectors, two matrices and one; blocks of kernels, powers
# of two, divide none of them
SHAPES = ((48, 40), (48, 40), (40,), (40,), (40,), (40, 48), (40, 48), (33, 40))
MISSING = 1  # which parameter has no gradient then: one of two in a stack


@dataclass(frozen=True)
class Case:
    """What is stepped.

    Args:
        rule: of the registry.
        correction: "none" (of a baseline), "approximate" or "transport".
        dtype: of parameters and gradients, of ``DTYPES``.
        h_dtype: of the kept gradient, of ``DTYPES``.
        state: dtype of the state, of ``DTYPES``; bfloat16 is rounded stochastically.
        shapes: of parameters.
        steps: "normal"; "skipped", as a gradient holds a NaN; or "missing", as a
            parameter has no gradient, which the first step may not be.
    """

    rule: str
    correction: str
    dtype: str = "float32"
    h_dtype: str = "float32"
    state: str = "float32"
    shapes: tuple[tuple[int, ...], ...] = SHAPES
    steps: tuple[Kind, ...] = STEPS

    @property
    def name(self) -> str:
        """Return what the command line calls it."""
        words = [self.rule, self.correction, self.dtype, self.h_dtype, self.state]
        while len(words) > 3 and words[-1] == "float32":
            words.pop()
        return "/".join(words)

    @property
    def num_params(self) -> int:
        """Return the elements of all parameters."""
        return sum(torch.Size(shape).numel() for shape in self.shapes)

    @property
    def num_missing(self) -> int:
        """Return those of the parameter whose gradient may be missing."""
        return torch.Size(self.shapes[MISSING]).numel()

    def tensors(self, seed: int) -> list[Tensor]:
        """Return normal numbers in the parameters' shapes."""
        numbers, dtype = torch.Generator().manual_seed(seed), DTYPES[self.dtype]
        return [torch.randn(s, generator=numbers).to(dtype) for s in self.shapes]


def corrections(rule: str) -> tuple[str, ...]:
    """Return a rule's corrections, its own first, but exact MARS: it has the steps of
    "approximate", with an h that comes from elsewhere.
    """
    return tuple(kind or NONE for kind in cases.corrections(rule) if kind != "exact")


DEFAULT = (
    *(Case(rule, kind) for rule in REGISTRY for kind in corrections(rule)),
    Case("mars-adamw", "approximate", "bfloat16"),
    Case("mars-adamw", "transport", "bfloat16"),
    Case("mars-m", "transport", "bfloat16"),
    Case("mars-adamw", "approximate", "float32", "bfloat16"),
    Case("mars-adamw", "approximate", "float32", "bfloat16", "bfloat16"),
)


class Stepper:
    """A case's optimizer and parameters, beginning at the same numbers each time."""

    def __init__(self, case: Case, *, compile: bool) -> None:
        self.case = case
        self.params = [nn.Parameter(x) for x in case.tensors(0)]
        self.optimizer = MARS(
            self.params,
            lr=1e-2,
            weight_decay=0.1,
            mars_type=case.rule,
            # its own, but said: MARS logs that nobody has chosen it
            lr_1d=REGISTRY[case.rule].hyperparameters["lr_1d"],
            # gradients of this norm have matrices above the other bound, and vectors
            # below it
            max_norm=0.7,
            clip=0.3,
            ns_dtype=torch.float32,  # coarser numbers would hide differences
            state_dtype=DTYPES[case.state],
            stochastic_rounding=case.state == "bfloat16",
            h_dtype=DTYPES[case.h_dtype],
            compile=compile,
            correction=None if case.correction == NONE else case.correction,
        )

    def walk(self, after: Callable[[Kind], None] = lambda kind: None) -> None:
        """Take all steps; call ``after`` each."""
        for number, kind in enumerate(self.case.steps):
            self._change(number)
            gradients = self.case.tensors(number + 1)
            for p, g in zip(self.params, gradients, strict=True):
                p.grad = g
            if kind == "skipped":
                gradients[0][3, 5] = float("nan")
            if kind == "missing":
                self.params[MISSING].grad = None
            self.optimizer.step()
            after(kind)

    def _change(self, number: int) -> None:
        """Let every hyperparameter be another in each step."""
        self.optimizer.max_norm = 0.7 + 0.1 * number
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-2 * (1 - 0.1 * number)
            group["gamma"] = 0.025 + 0.005 * number
            group["betas"] = tuple(
                start - 0.01 * number
                for start in REGISTRY[self.case.rule].hyperparameters["betas"]
            )
            group["weight_decay"] = 0.1 + 0.01 * number
            if group["clip"] is not None:
                group["clip"] = 0.3 - 0.02 * number

    def tensors(self) -> dict[tuple[int, str], Tensor]:
        """Return parameters ("parameter") and state, by number and name."""
        found: dict[tuple[int, str], Tensor] = {}
        for i, p in enumerate(self.params):
            found[i, "parameter"] = p.detach()
            for name, value in self.optimizer.state[p].items():
                found[i, name] = value
        return found

    def flagged(self) -> int:
        """Return the bytes that a skipped step reads and another does not: of y, where
        the state keeps x.
        """
        every = self.optimizer.describe().buckets
        stores = [
            b for b in every if b.algorithm.is_ahead and not b.algorithm.num_behind
        ]
        return sum(p.nbytes for b in stores for p in b.params)


def eager(case: Case) -> Stepper:
    """Return a case after eager steps."""
    stepper = Stepper(case, compile=False)
    stepper.walk()
    return stepper
