"""The interface of a preconditioner: its buffers, its scalars, its update; and where it
needs whole matrices, the work of their owners.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from marsopt.rules import checks
from marsopt.rules.buffers import Buffer
from marsopt.rules.checks import Number
from marsopt.rules.decay import at, complement
from marsopt.rules.hyperparameters import check_fields, number

Tensors = Mapping[str, Tensor]  # by symbol


@dataclass(frozen=True, kw_only=True, eq=False)
class Preconditioner(ABC):
    """Makes a step from the corrected gradient c, over stacks (L, *shape) of tensors.

    Args:
        weight_decay: decoupled: x <- (1 - lr weight_decay) x - ...
        cautious_weight_decay: decay only those elements of x that the step moves
            towards zero as well, where step * x >= 0 ("Cautious Weight Decay", arXiv
            2510.12402; dion's ``cautious_wd``).
        log_time: every decay of this rule is min(beta, t / (t + log_time)) in step t of
            a tensor, so that averages remember a fixed share of the run (log-time
            momentum, arXiv 2602.05298); betas are the caps. None = off.
    """

    weight_decay: Number = number(0.0, checks.at_least_zero)
    cautious_weight_decay: bool = False
    log_time: Number | None = number(None, checks.log_time_or_none)

    keeps: ClassVar[dict[str, Buffer]] = {}  # all that it may keep, by symbol
    matrix_only: ClassVar[bool] = False  # whether it is a ``MatrixPreconditioner``

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    @abstractmethod
    def beta1(self) -> Number:
        """Decay of the first moment, which scales MARS's correction: with ``log_time``
        its cap.
        """

    @property
    def averages(self) -> bool:
        """Whether x and the state see c only through one average m."""
        return False

    @property
    def buffers(self) -> dict[str, Buffer]:
        """The buffers that the state keeps, by symbol."""
        return self.keeps

    @abstractmethod
    def scalars(
        self, t: Tensor, lr: Number, w: Number | None = None
    ) -> tuple[Number, ...]:
        """Return the scalars of a step, each one number for a whole tensor, from
        t = 1, 2, ... (N,): numbers or (N,) tensors. ``w`` is as in ``Average``.

        ``update`` and ``apply`` get them as factors of x, in the dtype in which x is
        computed, made from float64: 1 - beta, too, is best made here. A preconditioner
        that reads only these scalars, and no hyperparameter of its own, shares its
        compiled graph with all preconditioners of its kind.
        """

    @abstractmethod
    def update(
        self, x: Tensor, c: Tensor, buffers: Tensors, s: tuple[Tensor, ...]
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Return the new x and all buffers that are at home in shards, as new tensors
        in the dtypes of those that are given; a matrix preconditioner returns in place
        of x what goes to the owners, None for m itself.
        """

    def decay_of(self, x: Tensor, step: Tensor, decay: Tensor) -> Tensor:
        """Return what x is multiplied by beside the subtraction of ``step``.

        Args:
            x: before the step, of any shape.
            step: the change that is subtracted from x beside the decay, with the
                learning rate in it, in the shape of x.
            decay: 1 - lr weight_decay, as a factor of x.

        Returns:
            ``decay`` itself; with ``cautious_weight_decay``, in the shape of x, that
            where step * x >= 0 and else 1 (arXiv 2510.12402).
        """
        if not self.cautious_weight_decay:
            return decay
        return torch.where(step * x >= 0, decay, 1.0)


class MatrixInput(NamedTuple):
    """What there is of one tensor's matrices: all of it at their owner, in a request
    the piece that lies in this process.
    """

    matrix: Tensor  # (rows, cols), or a batch (num, rows, cols)
    owned: tuple[Tensor, ...] = ()  # the owner's buffers: (*shape) or (num, *shape)
    t: Tensor | None = None  # 0-D, the tensor's step; None where no decay asks for it
    # the preconditioner with the numbers of this tensor's param group, where tensors of
    # several groups share a call of ``at_owner``; None: the one that is called
    own: Any = None

    @property
    def is_outweighed(self) -> bool:
        """Whether the owner's buffers have more elements than the matrix."""
        return sum(buffer.numel() for buffer in self.owned) > self.matrix.numel()


class MatrixOutput(NamedTuple):
    """What became of it."""

    matrix: Tensor  # in the shape of the input
    # the owner's buffers after the step, None for one that stays as it is. (None for
    # all is the step's own, of buffers that it has written where they lie.)
    owned: tuple[Tensor | None, ...] | None = ()


class MatrixCost(Protocol):
    """The cost of the work on whole matrices, by which owners are chosen. Matrices of
    equal costs share their exchanges: costs are hashable, and equal on all ranks.
    """

    def __hash__(self) -> int: ...

    def on(self, device_type: str) -> MatrixCost:
        """Return the cost on such a device, where devices differ."""

    @property
    def is_float32(self) -> bool:
        """Whether its products are of float32, for the model of time."""

    def payload(self, dtype: torch.dtype = torch.float32) -> torch.dtype:
        """Return the dtype in which a matrix of ``dtype`` travels to its owner."""

    def returned(self, dtype: torch.dtype = torch.float32) -> torch.dtype:
        """Return the dtype in which the owner's result travels back."""

    def num_flops(self, rows: int, cols: int) -> int:
        """Return the FLOPs of one matrix in one step, on average."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MatrixPreconditioner(Preconditioner):
    """A preconditioner whose step needs whole matrices: the collectives bring the
    result of ``update`` to the owners, ``at_owner`` turns it into a direction, and
    ``apply`` moves x along it.
    """

    matrix_only = True

    @property
    @abstractmethod
    def cost(self) -> MatrixCost:
        """The cost of ``at_owner``."""

    @property
    def owned(self) -> tuple[str, ...]:
        """Return the symbols of the buffers that live with the owners."""
        return tuple(s for s, b in self.buffers.items() if b.home == "owner")

    @property
    def makes_matrix(self) -> bool:
        """Whether ``update`` returns a tensor of its own, and not None for m."""
        return True

    @property
    def counts_at_owner(self) -> bool:
        """Whether ``at_owner`` reads t."""
        return False

    @property
    def every(self) -> int | None:
        """The period of ``stage``, in steps; None = all steps are equal."""
        return None

    def stage(self, count: int, number: int) -> Hashable:
        """Return the extra work of ``at_owner`` in a step, if any. The host decides it,
        so that nothing waits for the device.

        Args:
            count: how many steps were taken before.
            number: of the tensor, among all.
        """
        return None

    @abstractmethod
    def at_owner(
        self, matrices: Sequence[MatrixInput], stage: Hashable
    ) -> list[MatrixOutput]:
        """Return the directions of whole matrices, and the new buffers of owners;
        nothing that is given changes.

        Args:
            matrices: in the dtype in which they traveled, or wider. For a matrix with
                ``own``, the hyperparameters of ``own`` hold.
            stage: of these matrices in this step.
        """

    def scale(self, rows: int, cols: int) -> float:
        """Return the factor of the learning rate for a whole matrix of this shape."""
        return 1.0

    @abstractmethod
    def apply(
        self, x: Tensor, o: Tensor, s: tuple[Tensor, ...], scale: Number
    ) -> Tensor:
        """Return the new x.

        Args:
            x: (L, *shape of a piece).
            o: the same, what ``at_owner`` made.
            s: this preconditioner's scalars, as factors of ``x``.
            scale: ``scale`` of the matrices; a factor of ``x`` where they have several.
        """


@dataclass(frozen=True, kw_only=True, eq=False)
class Average(Preconditioner):
    """One moment, and a direction u that looks ahead of it:

        m <- mu m + (1 - mu) c
        u = w c + (1 - w) m

    w is 0 by default, 1 - mu with Nesterov's momentum, and gamma for approximate MARS
    without clip: there m, the average of c, is gamma g + (1 - gamma) times the average
    of g (quasi-hyperbolic momentum), so that neither h nor c has to be kept.

    Args:
        momentum: mu, decay rate of m: the authors' betas[0].
    """

    momentum: Number = number(0.95, checks.decay_rate, beta=0)

    keeps = {"m": Buffer("exp_avg")}
    averaged: ClassVar[tuple[str, ...]] = ("m",)  # the symbols of its averages

    @property
    def beta1(self) -> Number:
        return self.momentum

    @property
    def buffers(self) -> dict[str, Buffer]:
        """The buffers that the state keeps, by symbol. An average that reads the count
        of steps starts with it.
        """
        kept = dict(self.keeps)
        for symbol in self.averaged:
            if self.log_time is not None or (symbol == "m" and self.debiases):
                kept[symbol] = kept[symbol]._replace(is_debiased=True)
        return kept

    @property
    def debiases(self) -> bool:
        """Whether u divides m by 1 - mu^t."""
        return False

    @property
    def averages(self) -> bool:
        return True

    def scalars(
        self, t: Tensor, lr: Number, w: Number | None = None
    ) -> tuple[Number, ...]:
        of_m = self.momentum, t, self.log_time
        weights = () if w is None else (w, 1 - w)
        decay = 1 - lr * self.weight_decay
        return lr, decay, at(*of_m), complement(*of_m), *weights

    def average(
        self, m: Tensor, c: Tensor, weights: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return (m, u), by what follows lr and the decay among ``scalars``; u is m
        itself where there is no w.
        """
        mu, weight, *w = weights
        m = mu * m + weight * c
        return m, (w[0] * c + w[1] * m if w else m)
