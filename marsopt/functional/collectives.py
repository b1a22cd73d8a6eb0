"""The methods by which a rule meets a mesh, over lists of leaves; here for tensors that
live whole in one process.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal, Protocol

from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from marsopt.rules.matrices import Matrices
from marsopt.rules.newton_schulz import NewtonSchulz

Lines = Literal["rows", "cols"]  # dims before ``Matrices.column_dim``; from it on


class Collectives(Protocol):
    """Communication and sharding operations that a step needs, over lists of
    parameters (``leaves``), which may be DTensors.
    """

    def local(self, tensor: Tensor) -> Tensor:
        """The piece of ``tensor`` that this process holds, sharing its storage."""

    def wrap(self, local: Tensor, like: Tensor) -> Tensor:
        """Inverse of ``local``: a piece of a tensor laid out as ``like``; where it has
        fewer dims, of one that has only so many of its first dims.
        """

    def rows(self, tensor: Tensor, matrices: Matrices) -> Tensor | None:
        """Return which rows of all ``matrices`` of ``tensor`` lie here: their numbers
        among all of them, in the order of the piece's; None = all.
        """

    def placement(self, tensor: Tensor) -> Hashable:
        """Return a hashable key: parameters of equal shape and equal key are sharded
        identically. It agrees across ranks.
        """

    def written(self) -> None:
        """Parameters were written outside of a step: what was gathered from them, and
        is kept for the next forward pass, must not be used any more.
        """

    def agree(self, what: str) -> None:
        """Raise on every rank unless all were given the same ``what``."""

    def sum(
        self, partial: Tensor, leaves: Sequence[Tensor], alike: str | None = None
    ) -> Tensor:
        """Sum ``partial`` (len(leaves), K) over the shards of each leaf; what is
        replicated counts once. Where ranks differ in ``alike``, the sums are NaN, and
        all of them raise, then or at a later call.
        """

    def still_agree(self, alike: str) -> None:
        """Raise where a ``sum`` is known to have found ranks that differ."""

    def sum_along(
        self,
        parts: Sequence[Tensor],
        leaves: Sequence[Tensor],
        matrices: Sequence[Matrices],
        lines: Lines,
    ) -> list[Tensor]:
        """Sum the part of each leaf over the shards that cut the ``lines`` of its
        matrices.
        """

    def orthogonalize(
        self,
        pieces: Sequence[Tensor],
        ns: NewtonSchulz,
        leaves: Sequence[Tensor],
        matrices: Sequence[Matrices],
    ) -> list[Tensor]:
        """The orthogonal factors of the whole matrices of each leaf, given and returned
        as this process's pieces.
        """


class LocalCollectives:
    """One process holds everything: sums are complete, matrices are whole."""

    def __reduce__(self) -> str:
        return "LOCAL"  # copies and pickles are this one

    def local(self, tensor: Tensor) -> Tensor:
        """``tensor`` itself.

        Raises:
            ValueError: ``tensor`` is sharded (a DTensor): its norm would silently be
                that of one shard.
        """
        if is_traceable_wrapper_subclass(tensor):
            raise ValueError(
                f"got a {type(tensor).__name__} of shape {tuple(tensor.shape)} without "
                "collectives, expected a plain "
                "tensor: pass collectives=MeshCollectives(mesh) (from marsopt.parallel)"
            )
        return tensor

    def wrap(self, local: Tensor, like: Tensor) -> Tensor:
        return local

    def rows(self, tensor: Tensor, matrices: Matrices) -> Tensor | None:
        return None

    def placement(self, tensor: Tensor) -> Hashable:
        return None

    def written(self) -> None:
        pass

    def agree(self, what: str) -> None:
        pass

    def sum(
        self, partial: Tensor, leaves: Sequence[Tensor], alike: str | None = None
    ) -> Tensor:
        return partial

    def still_agree(self, alike: str) -> None:
        pass

    def sum_along(
        self,
        parts: Sequence[Tensor],
        leaves: Sequence[Tensor],
        matrices: Sequence[Matrices],
        lines: Lines,
    ) -> list[Tensor]:
        return list(parts)

    def orthogonalize(
        self,
        pieces: Sequence[Tensor],
        ns: NewtonSchulz,
        leaves: Sequence[Tensor],
        matrices: Sequence[Matrices],
    ) -> list[Tensor]:
        pairs = zip(matrices, pieces, strict=True)
        factors = ns.many([m.unbound(piece) for m, piece in pairs])
        return [o.view_as(x) for o, x in zip(factors, pieces, strict=True)]


LOCAL = LocalCollectives()
