"""Whether a component does what it declares. One of somebody else's is asked once,
before its first step, with tensors that nobody else holds: what it returns otherwise
would move parameters wrongly, or spoil them where a step is skipped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from marsopt.functional.step_types import RuleGroup, Stack, factor
from marsopt.rules.algorithm import Algorithm
from marsopt.rules.dtypes import working_dtype
from marsopt.rules.preconditioner import MatrixInput
from marsopt.rules.registry import BUILT_IN

CHECKED: WeakSet[Algorithm] = WeakSet()


def check_declared(groups: Sequence[RuleGroup]) -> None:
    """Check the algorithms that take their first step. No graph has it.

    Raises:
        ValueError: a component returns other buffers, shapes or dtypes than it
            declares, or writes into what it was given.
    """
    if torch.compiler.is_compiling():
        return
    for group in groups:
        algorithm = group.hyper.algorithm
        if algorithm in CHECKED:
            continue
        components = {type(algorithm.preconditioner), type(algorithm.correction)}
        if group.stacks and not components <= BUILT_IN:
            with torch.inference_mode(False), torch.no_grad():
                _check(min(group.stacks, key=lambda s: s.x.shape[1:].numel()))
        CHECKED.add(algorithm)


def _check(stack: Stack) -> None:
    algorithm, preconditioner = stack.algorithm, stack.algorithm.preconditioner
    who, shape = type(preconditioner).__name__, (1, *stack.x.shape[1:])
    x = torch.zeros(shape, dtype=working_dtype(stack.x), device=stack.x.device)
    kept = {
        symbol: torch.zeros(
            (1, *buffer.shape[1:]), dtype=working_dtype(buffer), device=buffer.device
        )
        for symbol, buffer in stack.buffers.items()
    }
    unit = torch.ones(1, dtype=x.dtype, device=x.device)
    scalars = algorithm.scalars(unit, 1e-3, 0.0)
    s = tuple(factor((value * unit).to(x.dtype), x) for value in scalars)
    moments = {symbol: kept[symbol] for symbol in algorithm.moments}
    by_owners: Collection[str] = ()
    if algorithm.matrix_only:
        by_owners = algorithm.matrix_preconditioner.row_outputs
    with _unwritten(f"{who}.update", {"x": x, **moments}):
        pair = preconditioner.update(x, torch.zeros_like(x), moments, s)
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise ValueError(
            f"got {type(pair).__name__} from {who}.update, expected a pair: return x "
            "(of a matrix rule what goes to the owners) and a dict of buffers"
        )
    out, new = pair
    required = [symbol for symbol in moments if symbol not in by_owners]
    _compare(f"{who}.update", new, moments, required)
    if out is not None or not algorithm.matrix_only:  # None of a matrix rule is m
        _compare(f"{who}.update", {"x": out}, {"x": x}, {"x"})
    if algorithm.matrix_only:
        _check_matrices(stack, x, s)
    if (correction := algorithm.corrects) is not None:
        what = f"{type(correction).__name__}.kept"
        old = {k: kept[k] for k in correction.keeps if k in kept}
        with _unwritten(what, old):
            new = correction.kept(torch.zeros_like(x), old)
        _compare(what, new, old, [k for k in correction.written if k in old])


def _check_matrices(stack: Stack, x: Tensor, s: tuple[Tensor, ...]) -> None:
    """Check what owners make of a matrix, and x of that."""
    algorithm, shape = stack.algorithm, stack.matrix_shape
    preconditioner = algorithm.matrix_preconditioner
    who, buffers = type(preconditioner).__name__, preconditioner.buffers
    matrix = x.new_zeros(shape)
    rows = {symbol: x.new_zeros(shape[0]) for symbol in preconditioner.row_inputs}
    owned = {}
    for symbol in preconditioner.owned:
        size = buffers[symbol].shape(shape, algorithm.matrices)
        dtype = algorithm.dtype_of(buffers[symbol], stack.x)
        owned[symbol] = x.new_zeros(size, dtype=dtype)
        if buffers[symbol].start == "identity":
            owned[symbol] = torch.eye(size[-1], dtype=dtype, device=x.device)
    whole = MatrixInput(matrix, tuple(rows.values()), tuple(owned.values()))
    with _unwritten(f"{who}.at_owner", {"matrix": matrix, **rows, **owned}):
        (result,) = preconditioner.at_owner([whole], preconditioner.stage(0, 0))
    symbols = preconditioner.row_outputs
    outputs = {"matrix": result.matrix, **dict(zip(symbols, result.rows, strict=False))}
    wanted = {"matrix": matrix.to(result.matrix.dtype)}
    wanted |= {k: matrix[:, 0].to(v.dtype) for k, v in outputs.items() if k in symbols}
    _compare(f"{who}.at_owner", outputs, wanted, ("matrix", *symbols))
    if owned:
        after = dict(zip(owned, result.owned or (), strict=False))
        stays = {k: v for k, v in owned.items() if after.get(k, v) is None}
        cast = {k: v.to(owned[k].dtype) for k, v in after.items() if v is not None}
        _compare(f"{who}.at_owner", cast | stays, owned, owned)
    numbers = x.new_ones(1, *stack.x.shape[1 : stack.num_row_dims])
    factors = {symbol: factor(numbers, x) for symbol in symbols}
    with _unwritten(f"{who}.apply", {"x": x}):
        new = preconditioner.apply(x, torch.zeros_like(x), factors, s, shape)
    _compare(f"{who}.apply", {"x": new}, {"x": x}, {"x"})


@contextmanager
def _unwritten(who: str, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Raise ValueError where one of ``tensors`` is written within."""
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
    """Raise ValueError where ``outputs`` are other tensors than are ``declared``, or
    lack one that is ``required``.
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
