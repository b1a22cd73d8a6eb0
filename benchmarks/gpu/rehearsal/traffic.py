"""What the launches of a graph load and store, read from the Triton source of their
kernels: not inductor's count, but the loads and stores that a GPU executes.
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
        is_store: else it is a load.
        num_bytes: of the tensor, which every element is touched of once.
        size: of an element, in bytes.
        flagged: whether its mask depends on what the kernel has loaded: where the flag
            says no, nothing is touched.
        divides: whether it is full and its index has a modulo or a quotient.
        full: whether it goes over as many elements as the launch does.
        of_stack: whether it is full and the tensor is given to the graph, or one of its
            results: gradients, parameters, state.
    """

    is_store: bool
    num_bytes: int
    size: int
    flagged: bool
    divides: bool
    full: bool
    of_stack: bool

    @property
    def way(self) -> str:
        """Return "stored", "loaded", or "flagged": loaded where a flag says so."""
        if self.is_store:
            return "stored"
        return "flagged" if self.flagged else "loaded"

    @property
    def num_elements(self) -> int:
        """Return how many are touched."""
        return self.num_bytes // self.size


def jitted(source: str) -> ast.FunctionDef:
    """Return the kernel in a source that inductor wrote."""
    nodes = ast.walk(ast.parse(source))
    (found,) = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    return found


def accesses(source: str, launch: Launch) -> list[Access]:
    """Return every load and store that a launch of this kernel executes."""
    kernel = jitted(source)
    names = [a.arg for a in kernel.args.args]
    args = dict(zip(names, launch.args, strict=False))
    made = _assignments(kernel)
    work = prod(launch.sizes)
    found = []
    for call in _calls(kernel):
        pointer, index = _pointer(call.args[0])
        masks = call.args[1:2] if call.func.attr == "load" else call.args[2:3]
        tensor = args[pointer]
        by_element = _depends(index, made, _is_position)
        num = min(tensor.numel(), work) if by_element else 1
        full = by_element and tensor.numel() >= 0.9 * work  # a padding is more
        found.append(
            Access(
                is_store=call.func.attr == "store",
                num_bytes=num * tensor.element_size(),
                size=tensor.element_size(),
                flagged=any(_depends(mask, made, _is_load) for mask in masks),
                divides=full and _depends(index, made, _is_division),
                full=full,
                of_stack=full and launch.is_outside(tensor),
            )
        )
    return found


def _calls(kernel: ast.FunctionDef) -> Iterator[ast.Call]:
    for node in ast.walk(kernel):
        called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if called and node.func.attr in ("load", "store"):
            yield node


def _pointer(where: ast.expr) -> tuple[str, ast.expr]:
    """Return the argument and the index of ``argument + (index)``."""
    if isinstance(where, ast.BinOp) and isinstance(where.left, ast.Name):
        return where.left.id, where.right
    raise ValueError(f"got an access to {ast.unparse(where)}, expected pointer + index")


def _assignments(kernel: ast.FunctionDef) -> dict[str, list[ast.expr]]:
    """Return what each name is made of; one in a loop has several."""
    made: dict[str, list[ast.expr]] = {}
    for node in ast.walk(kernel):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    made.setdefault(target.id, []).append(node.value)
    return made


def _depends(value: ast.expr, made: dict[str, list[ast.expr]], is_it) -> bool:
    """Return whether some expression that ``value`` is made of ``is_it``."""
    seen: set[str] = set()
    todo: list[ast.expr] = [value]
    while todo:
        for node in ast.walk(todo.pop()):
            if is_it(node):
                return True
            if isinstance(node, ast.Name) and node.id not in seen:
                seen.add(node.id)
                todo += made.get(node.id, [])
    return False


def _is_load(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "load"


def _is_position(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "arange"


def _is_division(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod | ast.FloorDiv)
