"""Checks for tests of a component of your own."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from marsopt.functional.buffers import start_at_owner
from marsopt.functional.state import Leaves, new_state
from marsopt.rules.algorithm import Algorithm
from marsopt.rules.correction import Correction
from marsopt.rules.lion import Lion
from marsopt.rules.preconditioner import MatrixInput, Preconditioner
from marsopt.step.owners import LOCAL

__all__ = ["check_component"]


def check_component(
    component: Preconditioner | Correction, shape: Sequence[int] = (4, 3)
) -> None:
    """Check a component's outputs against its declared buffers: call it in a test of
    your own preconditioner or correction.

    A component has to return every buffer that it declares, in the buffer's shape and
    dtype, and must not write into its arguments: a skipped step keeps the old values.

    Args:
        component: an instance, with the hyperparameters to check.
        shape: of the parameter that takes the step, which is zero on the CPU.

    Raises:
        TypeError: ``component`` is no preconditioner and no correction.
        ValueError: ``component`` returns other buffers, shapes or dtypes than it
            declares, writes into an argument, or takes only matrices and ``shape`` is
            no matrix.

    Example:
        >>> class Forgetful(marsopt.Lion):
        ...     def update(self, x, c, buffers, s):
        ...         x, _ = super().update(x, c, buffers, s)
        ...         return x, {}
        >>> marsopt.testing.check_component(marsopt.Lion())
        >>> marsopt.testing.check_component(Forgetful())  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        ValueError: got {} from Forgetful.update, expected {'m': ((1, 12), ...
    """
    if isinstance(component, Correction):
        algorithm = Algorithm(preconditioner=Lion(), correction=component)
        if algorithm.h_from == "step":
            _check_next_h(component, *_part(algorithm, shape))
        return
    if not isinstance(component, Preconditioner):
        raise TypeError(
            f"got {component!r}, expected a preconditioner or a correction: pass an "
            "instance of the class"
        )
    algorithm = Algorithm(preconditioner=component)
    _check_update(algorithm, *_part(algorithm, shape))
    if algorithm.matrix_only:
        _check_matrices(algorithm, torch.Size(shape))


def _part(
    algorithm: Algorithm, shape: Sequence[int]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a parameter of zeros as a step sees it, one part (1, n), and its buffers
    before the first step.

    Raises:
        ValueError: the algorithm takes only matrices, and this is no shape of a matrix.
    """
    leaves = Leaves(algorithm, [torch.zeros(*shape, device="cpu")], None, LOCAL)
    state, x = new_state(leaves), leaves.tensors[0]
    symbols = [s for s, b in algorithm.kept.items() if b.home == "shard"]
    buffers = {s: leaves.matching(state.buffers[s], s) for s in symbols}
    return x.view(1, -1), {s: pieces[0].view(1, -1) for s, pieces in buffers.items()}


def _check_next_h(
    correction: Correction, x: Tensor, buffers: Mapping[str, Tensor]
) -> None:
    """Check the reference gradient of the next step."""
    g, old = torch.zeros_like(x), {"h": buffers["h"]}
    what = f"{type(correction).__name__}.next_h"
    with _unwritten(what, {"g": g, **old}):
        h = correction.next_h(g, old["h"])
    _compare(what, {"h": h}, old, {"h"})


def _scalars(algorithm: Algorithm, x: Tensor) -> tuple[Tensor, ...]:
    unit = torch.ones(1, 1, dtype=x.dtype, device="cpu")
    values = algorithm.scalars(torch.ones(1, dtype=x.dtype, device="cpu"), 1e-3, 0.0)
    return tuple((value * unit).to(x.dtype) for value in values)


def _check_update(
    algorithm: Algorithm, x: Tensor, moments: Mapping[str, Tensor]
) -> None:
    """Check the outputs of a preconditioner for a parameter."""
    who, s = type(algorithm.preconditioner).__name__, _scalars(algorithm, x)
    with _unwritten(f"{who}.update", {"x": x, **moments}):
        pair = algorithm.preconditioner.update(x, torch.zeros_like(x), moments, s)
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise ValueError(
            f"got {type(pair).__name__} from {who}.update, expected a pair: return x "
            "(of a matrix rule what goes to the owners) and a dict of buffers"
        )
    out, new = pair
    _compare(f"{who}.update", new, moments, moments)
    if out is not None or not algorithm.matrix_only:  # None of a matrix rule is m
        _compare(f"{who}.update", {"x": out}, {"x": x}, {"x"})


def _check_matrices(algorithm: Algorithm, whole: torch.Size) -> None:
    """Check the owners' result for a matrix, and the parameter's step along it."""
    ((_, shape),) = algorithm.matrices.shapes_in(whole)
    preconditioner = algorithm.matrix_preconditioner
    who, buffers = type(preconditioner).__name__, preconditioner.buffers
    matrix = torch.zeros(shape, device="cpu")
    owned = {
        symbol: start_at_owner(algorithm, buffers[symbol], matrix, (0,))[0]
        for symbol in preconditioner.owned
    }
    given = MatrixInput(matrix, tuple(owned.values()))
    with _unwritten(f"{who}.at_owner", {"matrix": matrix, **owned}):
        (result,) = preconditioner.at_owner([given], preconditioner.stage(0, 0))
    wanted = {"matrix": matrix.to(result.matrix.dtype)}
    _compare(f"{who}.at_owner", {"matrix": result.matrix}, wanted, wanted)
    if owned:
        after = dict(zip(owned, result.owned or (), strict=False))
        stays = {k: v for k, v in owned.items() if after.get(k, v) is None}
        cast = {k: v.to(owned[k].dtype) for k, v in after.items() if v is not None}
        _compare(f"{who}.at_owner", cast | stays, owned, owned)
    x, scale = (
        torch.zeros(1, shape.numel(), device="cpu"),
        torch.ones(1, 1, device="cpu"),
    )
    with _unwritten(f"{who}.apply", {"x": x}):
        s = _scalars(algorithm, x)
        new = preconditioner.apply(x, torch.zeros_like(x), s, scale)
    _compare(f"{who}.apply", {"x": new}, {"x": x}, {"x"})


@contextmanager
def _unwritten(who: str, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Raise ValueError if one of ``tensors`` is written within."""
    before = {name: tensor._version for name, tensor in tensors.items()}
    yield
    written = [name for name, num in before.items() if tensors[name]._version != num]
    if written:
        raise ValueError(
            f"got {who} that writes into {', '.join(written)}, expected new tensors, "
            "since a step that is not finite keeps the old ones: write m = beta * m, "
            "not m.mul_(beta)"
        )


def _compare(
    who: str,
    outputs: Any,
    declared: Mapping[str, Tensor],
    required: Collection[str],
) -> None:
    """Raise ValueError if ``outputs`` are other tensors than are ``declared``, or lack
    one that is ``required``.
    """
    expected = {name: _form(tensor) for name, tensor in declared.items()}
    outputs = (
        outputs if isinstance(outputs, Mapping) else {type(outputs).__name__: outputs}
    )
    got = {name: _form(value) for name, value in outputs.items()}
    missing = set(required) - got.keys()
    if missing or any(form != expected.get(name) for name, form in got.items()):
        raise ValueError(
            f"got {got} from {who}, expected {expected}, each as (shape, dtype): "
            "return every tensor that it declares, one that stays as it is too, in "
            "the shape and dtype in which it was passed in"
        )


def _form(value: Any) -> object:
    is_tensor = isinstance(value, Tensor)
    return (tuple(value.shape), value.dtype) if is_tensor else type(value).__name__
