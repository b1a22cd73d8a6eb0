"""Does a component return what it declares? Every declared buffer in its shape and
dtype, and nothing is written in place, since a skipped step keeps the old values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from marsopt import LOCAL, Algorithm, Correction, Lion
from marsopt.functional.buffers import start_at_owner
from marsopt.functional.state import RouteLeaves, new_state
from marsopt.rules.component import MatrixInput, Preconditioner, number_fields


def check_component(
    component: Preconditioner | Correction, shape: Sequence[int] = (4, 3)
) -> None:
    """Check the outputs of a preconditioner or correction, for a parameter of zeros."""
    if isinstance(component, Correction):
        algorithm = Algorithm(preconditioner=Lion(), correction=component)
        numbers = algorithm.read(algorithm.defaults(1e-3, None))
        without_numbers(component).coefficients(0.9, numbers)
        if algorithm.h_from == "step":
            x, buffers = parts_of(algorithm, shape)
            given = {"g": torch.zeros_like(x), "h": buffers["h"]}
            h = unwritten(given, lambda: component.next_h(*given.values()))
            assert forms({"h": h}) == forms({"h": buffers["h"]})
        return
    algorithm = Algorithm(preconditioner=component)
    numbers = algorithm.read(algorithm.defaults(1e-3, None))
    component = without_numbers(component)
    algorithm = Algorithm(preconditioner=component)
    x, buffers = parts_of(algorithm, shape)
    unit = torch.ones(1, 1)
    values = component.scalars(torch.ones(1), numbers)
    s = tuple((value * unit).to(x.dtype) for value in values)
    c = torch.zeros_like(x)
    out, new = unwritten(
        {"x": x, **buffers}, lambda: component.update(x, c, buffers, s)
    )
    assert forms(new) == forms(buffers)
    if out is not None or not algorithm.matrix_only:  # None of a matrix rule is m
        assert forms({"x": out}) == forms({"x": x})
    if algorithm.matrix_only:
        check_matrices(algorithm, torch.Size(shape), s)


def without_numbers(component: Preconditioner | Correction) -> Any:
    """The component without its numbers: a step gives them to the formulas, and reading
    a field in place of them fails.
    """
    bare = copy.copy(component)
    for name, value in number_fields(component).items():
        if isinstance(value, tuple):
            vars(bare)[name] = (...,) * len(value)
        elif value is not None and not isinstance(value, bool):
            vars(bare)[name] = ...
    return bare


def parts_of(
    algorithm: Algorithm, shape: Sequence[int]
) -> tuple[Tensor, dict[str, Tensor]]:
    """A parameter as a step sees it, one part (1, n), and its buffers in shards."""
    leaves = RouteLeaves(algorithm, [torch.zeros(*shape)], None, LOCAL)
    state, (x,) = new_state(leaves), leaves.tensors
    symbols = [s for s, b in algorithm.kept.items() if b.home == "shard"]
    buffers = {s: leaves.matching(state.buffers[s], s)[0] for s in symbols}
    return x.view(1, -1), {s: piece.view(1, -1) for s, piece in buffers.items()}


def check_matrices(
    algorithm: Algorithm, whole: torch.Size, s: tuple[Tensor, ...]
) -> None:
    """Check the owners' result for a matrix, and the parameter's step along it."""
    ((_, shape),) = algorithm.matrices.shapes_in(whole)
    rule = algorithm.matrix_preconditioner
    matrix = torch.zeros(shape)
    owned = {
        symbol: start_at_owner(algorithm, rule.buffers[symbol], matrix, (0,))[0]
        for symbol in rule.owned
    }
    at_once = tuple(value.reshape(()) for value in s)
    given = MatrixInput(matrix, tuple(owned.values()), at_once)
    (result,) = unwritten(
        {"matrix": matrix, **owned},
        lambda: rule.at_owner([given], rule.stage(0, 0)),
    )
    assert result.matrix.shape == shape
    after = dict(zip(owned, result.owned or (), strict=True))
    changed = {key: value for key, value in after.items() if value is not None}
    assert forms(changed).items() <= forms(owned).items()
    x = torch.zeros(1, shape.numel())
    new = unwritten({"x": x}, lambda: rule.apply(x, x.clone(), s, torch.ones(1, 1)))
    assert forms({"x": new}) == forms({"x": x})


def unwritten(tensors: Mapping[str, Tensor], call: Callable[[], Any]) -> Any:
    """The result of a call that writes into none of ``tensors``."""
    before = {name: tensor._version for name, tensor in tensors.items()}
    result = call()
    assert {name: tensor._version for name, tensor in tensors.items()} == before
    return result


def forms(tensors: Mapping[str, Any]) -> dict[str, object]:
    return {
        name: (t.shape, t.dtype) if isinstance(t, Tensor) else type(t)
        for name, t in tensors.items()
    }
