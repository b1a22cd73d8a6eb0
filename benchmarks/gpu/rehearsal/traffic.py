"""Bytes that the launches of a graph load and store, read from the Triton source of
their kernels: not inductor's count, but the loads and stores that a GPU executes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from benchmarks.gpu.rehearsal.lowering import Launch


@dataclass(frozen=True)
class Access:
    """A load or store of one launch.

    Args:
        kind: "stored" or "loaded".
        num_elements: how many elements of the tensor are touched, each once.
        size: of an element, in bytes.
        full: whether it goes over as many elements as the launch does, and the tensor
            is an input of the graph or lies in its memory: gradient, parameter, state.
        loop: number of its loop in the kernel.
    """

    kind: str
    num_elements: int
    size: int
    full: bool
    loop: int = 0


def accesses(source: str, launch: Launch) -> Iterator[Access]:
    """Yield every load and store that a launch of this kernel executes."""
    nodes = ast.walk(ast.parse(source))
    (kernel,) = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    names = [a.arg for a in kernel.args.args]
    args = dict(zip(names, launch.args, strict=False))
    for number, (loop, work) in enumerate(_loops(kernel, prod(launch.sizes))):
        made = _assignments(loop)
        for call in ast.walk(loop):
            if not _is_call_of(call, "load", "store"):
                continue
            pointer, index = _pointer(call.args[0])
            is_store, tensor = call.func.attr == "store", args[pointer]
            by_element = _depends_on_position(index, made)
            large = by_element and tensor.numel() >= 0.9 * work  # a padding is more
            yield Access(
                kind="stored" if is_store else "loaded",
                num_elements=min(tensor.numel(), work) if by_element else 1,
                size=tensor.element_size(),
                full=large and launch.is_input(tensor),
                loop=number,
            )


def _loops(kernel: ast.FunctionDef, work: int) -> Iterator[tuple[ast.AST, int]]:
    """Yield the loops of a kernel, each with how many elements it goes over: ``work``,
    or in a combo kernel, which has a loop in each branch, what the branch says.
    """
    branch = next((node for node in kernel.body if isinstance(node, ast.If)), None)
    if branch is None:
        yield kernel, work
    while isinstance(branch, ast.If):
        loop = ast.Module(branch.body, [])
        sizes = [
            node.value.value
            for node in branch.body
            if isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]).endswith("numel")
            and isinstance(node.value, ast.Constant)  # "rnumel" repeats another
        ]
        yield loop, prod(sizes)
        branch = branch.orelse[0]


def _is_call_of(node: ast.AST, *methods: str) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in methods
    )


def _pointer(where: ast.expr) -> tuple[str, ast.expr]:
    """Return the argument and the index of ``argument + (index)``."""
    if isinstance(where, ast.BinOp) and isinstance(where.left, ast.Name):
        return where.left.id, where.right
    raise ValueError(f"got an access to {ast.unparse(where)}, expected pointer + index")


def _assignments(loop: ast.AST) -> dict[str, list[ast.expr]]:
    """Return the expressions assigned to each name; in a loop there are several."""
    made: dict[str, list[ast.expr]] = {}
    for node in ast.walk(loop):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            made.setdefault(node.targets[0].id, []).append(node.value)
    return made


def _depends_on_position(value: ast.expr, made: dict[str, list[ast.expr]]) -> bool:
    """Return whether ``value`` is computed from a position."""
    seen: set[str] = set()
    todo: list[ast.expr] = [value]
    while todo:
        for node in ast.walk(todo.pop()):
            if _is_call_of(node, "arange"):
                return True
            if isinstance(node, ast.Name) and node.id not in seen:
                seen.add(node.id)
                todo += made.get(node.id, [])
    return False
