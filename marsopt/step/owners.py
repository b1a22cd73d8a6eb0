"""A rule meets a mesh by these methods, over lists of leaves. ``LOCAL`` implements them
for tensors that live whole in one process.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from marsopt.rules.component import (
    MatrixInput,
    MatrixOutput,
    MatrixPreconditioner,
    owned_parts,
)
from marsopt.rules.matrices import LARGE, Matrices
from marsopt.rules.numerics import working_dtype


class MatrixParam(NamedTuple):
    """A parameter that is made of matrices."""

    tensor: Tensor  # as its owner holds it
    matrices: Matrices
    preconditioner: MatrixPreconditioner


class OwnerBuffer(NamedTuple):
    """An owner's buffer of the matrices of a leaf."""

    owned: Tensor  # (number here, *shape); flat if matrices have several shapes
    leaf: Tensor
    sizes: tuple[int, ...]  # entries along its first dim, of each matrix of the leaf
    owns: tuple[int, ...]


OwnedTensors = tuple[Tensor, ...]


class Request(NamedTuple):
    """The work of one leaf for the owners of its matrices."""

    input: MatrixInput  # this process's piece of the leaf
    tensor: Tensor  # the parameter, as its owner holds it
    matrices: Matrices
    preconditioner: MatrixPreconditioner
    stage: Hashable = None
    ok: Tensor | None = None  # 0-D bool: whether owners' buffers change; None: they do
    writes: bool = False  # whether the new buffers are written into the old ones

    @property
    def leaf(self) -> MatrixParam:
        return MatrixParam(self.tensor, self.matrices, self.preconditioner)

    @property
    def factor_dtype(self) -> torch.dtype:
        """Return the dtype of the factor that comes back: the step's working dtype."""
        return working_dtype(self.input.matrix)

    @property
    def empty_output(self) -> MatrixOutput:
        """Return the result of a piece without an element."""
        factor = torch.empty_like(self.input.matrix, dtype=self.factor_dtype)
        return MatrixOutput(factor, self.input.owned)

    def kept(self, result: MatrixOutput) -> MatrixOutput:
        """Return the result of this request, with owners' buffers after the step."""
        owned = []
        pairs = zip(self.input.owned, result.owned, strict=False)
        for old, new in pairs:
            if new is None:
                owned.append(old)
                continue
            ok = torch.ones_like(old[..., :1]).bool() if self.ok is None else self.ok
            values = ok, new.to(old.dtype), old
            out = {"out": old} if self.writes else {}
            owned.append(torch.where(*values, **out))
        return result._replace(owned=tuple(owned))


def precondition_leaves(requests: Sequence[Request]) -> list[MatrixOutput]:
    """Return the results of preconditioners for leaves that this process has whole."""
    by_leaf = [
        [request._replace(input=part) for part in batches_of(request)]
        for request in requests
    ]
    results = iter(precondition_matrices([part for leaf in by_leaf for part in leaf]))
    return [
        leaf_output(request, [next(results) for _ in parts])
        for request, parts in zip(requests, by_leaf, strict=True)
    ]


def batches_of(request: Request) -> list[MatrixInput]:
    """Return the matrices of a leaf; matrices of one shape as a batch. A leaf without
    an element has none.
    """
    whole, matrices, shape = request.input, request.matrices, request.tensor.shape
    if not whole.matrix.numel():
        return []
    batches = matrices.unbound(whole.matrix, shape)
    if matrices.is_even(shape):
        owned = [[x[0] if batches[0].ndim == 2 else x] for x in whole.owned]
    else:
        owned = owned_views(request, [batch.shape for batch in batches])
    return [
        whole._replace(matrix=batch, owned=tuple(o[i] for o in owned))
        for i, batch in enumerate(batches)
    ]


def owned_views(request: Request, shapes: Sequence[torch.Size]) -> list[list[Tensor]]:
    """Return views of the owner's buffers, which are flat if matrices have several
    shapes: of each buffer a view for each of these (..., rows, cols).
    """
    preconditioner, matrices = request.preconditioner, request.matrices
    buffers = [preconditioner.buffers[symbol] for symbol in preconditioner.owned]
    return [
        owned_parts(flat, [x[:-2] + buffer.shape(x[-2:], matrices) for x in shapes])
        for flat, buffer in zip(request.input.owned, buffers, strict=False)
    ]


def leaf_output(request: Request, results: Sequence[MatrixOutput]) -> MatrixOutput:
    """Return the results of all matrices of a leaf, or of batches of them, in order, as
    the result of the leaf.
    """
    if not results:  # no element lies here
        return request.empty_output
    owned = request.input.owned
    new = [cast(OwnedTensors, result.owned) for result in results if result.owned]
    if new:
        pairs = zip(zip(*new, strict=True), owned, strict=True)
        owned = tuple(_joined(parts, old.shape) for parts, old in pairs)
    matrix = _joined([r.matrix for r in results], request.input.matrix.shape)
    return MatrixOutput(matrix, owned)


def _joined(parts: Sequence[Tensor], shape: torch.Size) -> Tensor:
    """Return the elements of all parts, in order, in this shape."""
    if len(parts) == 1:
        return parts[0].reshape(shape)
    return torch.cat([part.flatten() for part in parts]).view(shape)


def precondition_matrices(requests: Sequence[Request]) -> list[MatrixOutput]:
    """Return the results of preconditioners for whole matrices. Each preconditioner
    gets all its matrices in one call; but each large matrix that its owner's buffers
    outweigh has a call of its own, so that its temporaries are freed before the next.
    """
    calls: dict[tuple[Hashable, ...], list[int]] = {}
    for i, request in enumerate(requests):
        matrix = request.input.matrix
        alone = matrix.numel() >= LARGE and request.input.is_outweighed
        key = id(request.preconditioner), request.stage, i if alone else None
        calls.setdefault(key, []).append(i)
    outputs: dict[int, MatrixOutput] = {}
    for positions in calls.values():
        first = requests[positions[0]]
        inputs = [requests[i].input for i in positions]
        results = first.preconditioner.at_owner(inputs, first.stage)
        for i, result in zip(positions, results, strict=True):
            outputs[i] = requests[i].kept(result)
    return [outputs[i] for i in range(len(requests))]


def flat_indices(
    shape: torch.Size, cuts: Mapping[int, Tensor], device: torch.device
) -> Tensor:
    """Return the numbers of a piece's elements in the whole tensor, row by row.

    Args:
        shape: of the whole tensor, or its first dims.
        cuts: of the tensor, as ``Collectives.cuts`` returns them.
        device: of the piece.
    """
    cuts = {dim: indices for dim, indices in cuts.items() if dim < len(shape)}
    # dims behind all cuts are one dim, so that a compiled loop over them is one loop
    first = max(cuts, default=-1) + 1
    stride = shape[first:].numel()
    flat_index = torch.arange(stride, device=device).view(shape[first:])
    for dim in reversed(range(first)):
        indices = cuts.get(dim)
        if indices is None:
            indices = torch.arange(shape[dim], device=device)
        indices = indices.to(device=device) * stride
        flat_index = flat_index + indices.view(-1, *[1] * (len(shape) - 1 - dim))
        stride *= shape[dim]
    return flat_index


def rows_here(
    shape: torch.Size, cuts: Mapping[int, Tensor], matrices: Matrices
) -> list[tuple[int, int]]:
    """Return each matrix that has rows in a piece of a tensor, in order: its number
    among all ``matrices`` of the tensor, and how many of its rows lie here.
    """
    row_shape = matrices.row_shape(shape)
    rows = matrices.part_rows(shape) * max(1, row_shape[:-1].numel())
    if all(dim >= len(row_shape) for dim in cuts):
        return list(enumerate(rows))
    here = flat_indices(row_shape, cuts, torch.device("cpu")).flatten()
    ends = torch.tensor([*accumulate(rows)], device="cpu")
    numbers = torch.searchsorted(ends, here, right=True)
    numbers, counts = numbers.unique_consecutive(return_counts=True)
    return list(zip(numbers.tolist(), counts.tolist(), strict=True))


@runtime_checkable
class Collectives(Protocol):
    """Communication and sharding operations that a step needs, over lists of
    parameters (``leaves``), which may be DTensors.

    ``LOCAL`` serves a single process, ``marsopt.parallel.MeshCollectives`` a device
    mesh, ``marsopt.parallel.DataParallel`` ranks that all hold all parameters. Another
    way to shard needs another class.

    Raises:
        RuntimeError: of ``agree``, if ranks differ.

    Example:
        >>> class Watched(type(marsopt.LOCAL)):
        ...     def sum(self, partial, leaves):
        ...         print("one sum over shards, of", len(leaves), "tensors")
        ...         return super().sum(partial, leaves)
        >>> rule = marsopt.rule("mars-adamw")
        >>> params = {"w": torch.ones(2, 3), "b": torch.ones(3)}
        >>> state = rule.init(params)
        >>> _ = rule.step(params, params, state, lr=0.1, collectives=Watched())
        one sum over shards, of 2 tensors
    """

    def local(self, tensor: Tensor, like: Tensor | None = None) -> Tensor:
        """The piece of ``tensor`` that this process holds, sharing its storage. Of a
        gradient, ``like`` is its parameter: a gradient that is laid out otherwise (as
        pending sums, for example) is brought into the parameter's layout first.
        """

    def wrap(self, local: Tensor, like: Tensor) -> Tensor:
        """Inverse of ``local``: a piece of a tensor laid out as ``like``."""

    def cuts(self, tensor: Tensor) -> Mapping[int, Tensor]:
        """Return, for every dim of ``tensor`` that is cut, which of its indices lie
        here, in the order of the piece's.
        """

    def agree(
        self, values: Mapping[str, object], params: Sequence[tuple[Tensor, str]]
    ) -> None:
        """Raise on every rank unless all have equal ``values``, by their names in
        errors; and, if every rank holds all parameters, equal ``params`` and
        gradients, each with its name.
        """

    def sum(self, partial: Tensor, leaves: Sequence[Tensor]) -> Tensor:
        """Sum ``partial`` (len(leaves), K) over the shards of each leaf; replicas count
        once.
        """

    def on_owners(self, requests: Sequence[Request]) -> list[MatrixOutput]:
        """Bring together the whole matrices of each leaf, let their preconditioners'
        ``at_owner`` make something of them, and return it as this process's pieces.
        The preconditioners of all requests have one cost.
        """

    def owns(self, leaves: Sequence[MatrixParam]) -> list[tuple[int, ...]]:
        """Return which matrices of each leaf have their owner here, for leaves with
        preconditioners of one cost: the leaves of one ``on_owners``.
        """

    def publish_all(self, buffers: Sequence[OwnerBuffer]) -> Iterator[Tensor]:
        """Yield each buffer of all matrices of its leaf, as a tensor that belongs
        beside the leaf in a checkpoint of all ranks.
        """

    def claim(
        self, published: Tensor, owns: tuple[int, ...], sizes: Sequence[int]
    ) -> Tensor:
        """Return the part of a published buffer that has its owner here; ``sizes`` are
        its entries of each matrix.
        """


class LocalCollectives:
    """One process holds everything: sums are complete, matrices are whole."""

    def __reduce__(self) -> str:
        return "LOCAL"  # copies and pickles are this object

    def __repr__(self) -> str:
        return "LOCAL"

    def local(self, tensor: Tensor, like: Tensor | None = None) -> Tensor:
        """``tensor`` itself.

        Raises:
            ValueError: ``tensor`` is sharded (a DTensor): its norm would silently be
                a shard's; or it is another wrapper of tensors.
        """
        if type(tensor) is not Tensor and is_traceable_wrapper_subclass(tensor):
            what = f"got a {type(tensor).__name__} of shape {tuple(tensor.shape)}"
            if _is_dtensor(tensor):
                raise ValueError(
                    f"{what} without collectives, expected a plain tensor: pass "
                    "collectives=MeshCollectives(mesh) (from marsopt.parallel)"
                )
            raise ValueError(
                f"{what}, a subclass that wraps other tensors, expected a plain tensor "
                "or a DTensor: optimize the plain tensor that it is made from, leave "
                "it out, or freeze it (requires_grad_(False))"
            )
        return tensor

    def wrap(self, local: Tensor, like: Tensor) -> Tensor:
        return local

    def cuts(self, tensor: Tensor) -> Mapping[int, Tensor]:
        return {}

    def agree(
        self, values: Mapping[str, object], params: Sequence[tuple[Tensor, str]]
    ) -> None:
        pass

    def sum(self, partial: Tensor, leaves: Sequence[Tensor]) -> Tensor:
        return partial

    def on_owners(self, requests: Sequence[Request]) -> list[MatrixOutput]:
        return precondition_leaves(requests)

    def owns(self, leaves: Sequence[MatrixParam]) -> list[tuple[int, ...]]:
        nums = [leaf.matrices.num_in(leaf.tensor.shape) for leaf in leaves]
        return [tuple(range(num)) for num in nums]

    def publish_all(self, buffers: Sequence[OwnerBuffer]) -> Iterator[Tensor]:
        return (buffer.owned for buffer in buffers)

    def claim(
        self, published: Tensor, owns: tuple[int, ...], sizes: Sequence[int]
    ) -> Tensor:
        return published


def _is_dtensor(tensor: Tensor) -> bool:
    """By name: marsopt does not import torch.distributed."""
    return any(kind.__name__ == "DTensor" for kind in type(tensor).__mro__)


LOCAL = LocalCollectives()


def check_collectives(value: object) -> None:
    """Check that a value has the methods of ``Collectives``.

    Raises:
        ValueError: it has not, or is a class.
    """
    if isinstance(value, type) or not isinstance(value, Collectives):
        raise ValueError(
            f"got collectives={value!r:.60}, expected an object with the methods of "
            "marsopt.Collectives: leave it out for whole tensors"
        )
