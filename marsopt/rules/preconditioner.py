"""The interface of a preconditioner: its buffers, its scalars, its update; and the work
of owners, if it needs whole matrices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from marsopt.rules import checks
from marsopt.rules.buffers import Buffer
from marsopt.rules.checks import Number
from marsopt.rules.decay import at, complement
from marsopt.rules.hyperparameters import Numbers, check_fields, number

Tensors = Mapping[str, Tensor]  # by symbol


@dataclass(frozen=True, kw_only=True, eq=False)
class Preconditioner(ABC):
    """Makes a step from the corrected gradient c, over parts (P, n) of tensors.

    Args:
        weight_decay: decoupled: x <- (1 - lr weight_decay) x - ...
        cautious_weight_decay: decay only those elements of x that the step moves
            towards zero as well: step * x >= 0 ("Cautious Weight Decay", arXiv
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

    @abstractmethod
    def beta1(self, n: Numbers) -> Number:
        """Return the decay of the first moment, which scales MARS's correction: with
        ``log_time`` its cap.
        """

    @property
    def buffers(self) -> dict[str, Buffer]:
        """The buffers that the state keeps, by symbol."""
        return self.keeps

    @abstractmethod
    def scalars(self, t: Tensor, n: Numbers) -> tuple[Number, ...]:
        """Return the scalars of a step from t = 1, 2, ... (N,): each is a number, or a
        tensor with an entry for each norm (N,).

        ``update`` and ``apply`` get them as factors of x, (P, 1), rounded from float64
        to the working dtype: compute 1 - beta here, too.

        Args:
            t: the number of this step, of each norm.
            n: ``lr`` and the numbers among this component's fields, as param groups
                have them now; a field of ``self`` is only their default.
        """

    @abstractmethod
    def update(
        self, x: Tensor, c: Tensor, buffers: Tensors, s: tuple[Tensor, ...]
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Return the new x and all buffers that are at home in shards, as new tensors
        in the dtypes of those that are given; a matrix preconditioner returns in place
        of x the matrix for the owners, None for m itself.
        """

    def decay_of(self, x: Tensor, step: Tensor, decay: Tensor) -> Tensor:
        """Return the factor of x beside the subtraction of ``step``.

        Args:
            x: before the step, (P, n).
            step: the change that is subtracted from x beside the decay, with the
                learning rate in it, in the shape of x.
            decay: 1 - lr weight_decay, as a factor of x.

        Returns:
            ``decay`` itself; with ``cautious_weight_decay``, in the shape of x,
            ``decay`` for elements with step * x >= 0, else 1 (arXiv 2510.12402).
        """
        if not self.cautious_weight_decay:
            return decay
        return torch.where(step * x >= 0, decay, 1.0)


class MatrixInput(NamedTuple):
    """The matrices of one tensor: whole at their owner; in a request, the piece that
    lies in this process.
    """

    matrix: Tensor  # (rows, cols), or a batch (num, rows, cols)
    owned: tuple[Tensor, ...] = ()  # the owner's buffers: (*shape) or (num, *shape)
    # the scalars of the matrix in this step, 0-D each, if owners keep buffers
    s: tuple[Tensor, ...] = ()

    @property
    def is_outweighed(self) -> bool:
        """Whether the owner's buffers have more elements than the matrix."""
        return sum(buffer.numel() for buffer in self.owned) > self.matrix.numel()


class MatrixOutput(NamedTuple):
    """The result of ``at_owner`` for one ``MatrixInput``."""

    matrix: Tensor  # in the shape of the input
    # the owner's buffers after the step, None for a buffer that stays as it is
    owned: tuple[Tensor | None, ...] = ()


class MatrixCost(Protocol):
    """The cost of the work on whole matrices: owners are chosen by it. Matrices of
    equal costs share their exchanges: costs are hashable, and equal on all ranks.
    """

    def __hash__(self) -> int: ...

    def on(self, device_type: str) -> MatrixCost:
        """Return the cost on a type of device, if devices differ."""

    @property
    def is_float32(self) -> bool:
        """Whether its products are of float32, for the model of time."""

    def payload(self, dtype: torch.dtype = torch.float32) -> torch.dtype:
        """Return the dtype that a matrix of ``dtype`` travels to its owner in."""

    def returned(self, dtype: torch.dtype = torch.float32) -> torch.dtype:
        """Return the dtype that the owner's result travels back in."""

    def num_flops(self, rows: int, cols: int) -> int:
        """Return the FLOPs of one matrix in one step, on average."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MatrixPreconditioner(Preconditioner):
    """A preconditioner that needs whole matrices: the collectives bring the result of
    ``update`` to the owners, ``at_owner`` turns it into a direction, and ``apply``
    moves x along it.
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
            matrices: in the dtype that they traveled in, or wider.
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
            x: (P, n), parts of a piece.
            o: (P, n), the results of ``at_owner``.
            s: this preconditioner's scalars, (P, 1) each.
            scale: ``scale`` of each part's matrix, (P, 1).
        """


@dataclass(frozen=True, kw_only=True, eq=False)
class Average(Preconditioner):
    """One moment: m <- mu m + (1 - mu) c.

    Args:
        momentum: mu, decay rate of m: the authors' betas[0].
    """

    momentum: Number = number(0.95, checks.decay_rate, beta=0)

    keeps = {"m": Buffer("exp_avg")}
    averaged: ClassVar[tuple[str, ...]] = ("m",)  # the symbols of its averages

    def beta1(self, n: Numbers) -> Number:
        momentum: Number = n.momentum
        return momentum

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

    def scalars(self, t: Tensor, n: Numbers) -> tuple[Number, ...]:
        of_m = n.momentum, t, n.log_time
        return n.lr, 1 - n.lr * n.weight_decay, at(*of_m), complement(*of_m)
