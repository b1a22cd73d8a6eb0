"""Elementwise functions as Triton: each aten operator of a traced function becomes one
expression. float32 results equal eager results to an ulp: roots are rounded to nearest,
quotients are inductor's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from marsopt.rules.formats import SPAN, span_of

# scales of the traced part: a prime that no rule has as a constant
TRACED_SCALES = 7919
TRACED_SIZE = SPAN * TRACED_SCALES  # its elements
SIZES = (1, TRACED_SCALES, TRACED_SIZE)
SHORT = 40  # characters: longer expressions, and those with two uses, get a name

NAMES = {
    torch.float64: "tl.float64",
    torch.float32: "tl.float32",
    torch.bfloat16: "tl.bfloat16",
    torch.float16: "tl.float16",
    torch.int64: "tl.int64",
    torch.int32: "tl.int32",
    torch.int16: "tl.int16",
    torch.int8: "tl.int8",
    torch.bool: "tl.int1",
}
# operators that return their input's elements
ALIASES = {
    *("_unsafe_view", "alias", "clone", "detach", "expand", "reshape", "squeeze"),
    *("unsqueeze", "view"),
}
COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
INFIX = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "bitwise_and": "&",
    "bitwise_or": "|",
    "bitwise_xor": "^",
    **dict.fromkeys(("__lshift__", "bitwise_left_shift"), "<<"),
    **dict.fromkeys(("__rshift__", "bitwise_right_shift"), ">>"),
}
FORMS = {
    **{operator: f"({{0}} {sign} {{1}})" for operator, sign in INFIX.items()},
    **{operator: f"({{0}} {sign} {{1}})" for operator, sign in COMPARISONS.items()},
    "abs": "tl.abs({0})",
    "neg": "(-{0})",
    "reciprocal": "(1.0 / {0})",
    "rsub": "({1} - {0})",
    "sign": "(({0} > 0).to({dtype}) - ({0} < 0).to({dtype}))",
    "sqrt": "{sqrt}({0})",
    **dict.fromkeys(("clamp", "maximum"), "tl.maximum({0}, {1}{nan})"),
    "minimum": "tl.minimum({0}, {1}{nan})",
    # of positive bases, to some ulps of float64
    "pow": "tl.exp({1} * tl.log({0}))",
}
# operators on a matrix of which each column is a value
COLUMNS = ("slice", "select", "unbind", "getitem")


# functions of printed kernels: the largest of each span, and a scale for each element
FUNCTIONS = f"""\

@triton.jit
def largest(x):
    return tl.max(tl.reshape(x, (x.shape[0] // {SPAN}, {SPAN})), axis=1)


@triton.jit
def spread(x):
    wide = tl.broadcast_to(tl.expand_dims(x, 1), (x.shape[0], {SPAN}))
    return tl.reshape(wide, (x.shape[0] * {SPAN},))

"""


class Unprintable(Exception):
    """The printer lacks an operator, which the argument names."""


class Value(NamedTuple):
    """A Triton expression, a name or closed by parentheses, and its dtype."""

    text: str
    dtype: torch.dtype


class Body(NamedTuple):
    """A function as lines of Triton."""

    lines: list[str]
    results: list[Value]
    used: tuple[str, ...]  # names of the inputs that it reads, in order


def print_body(
    function: Callable[..., Sequence[Tensor]],
    elements: Mapping[str, torch.dtype],
    scalars: Mapping[str, torch.dtype],
) -> Body:
    """Return ``function`` as Triton.

    Args:
        function: pure; of tensors (1, n), then of scalars (1, 1), it returns tensors
            that are elementwise functions of these.
        elements: names and dtypes of the tensors (1, n).
        scalars: names and dtypes of the scalars.

    Raises:
        Unprintable: an operator has no Triton expression here.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    examples = [
        torch.empty(1, TRACED_SIZE // span_of(name), dtype=d, device="cpu")
        for name, d in elements.items()
    ]
    examples += [torch.empty(1, 1, dtype=d, device="cpu") for d in scalars.values()]
    trace = make_fx(function, tracing_mode="fake")
    with torch.no_grad():
        module = trace(*examples)
    module.graph.eliminate_dead_code()
    inputs = [Value(*item) for item in (*elements.items(), *scalars.items())]
    return _Writer().write(module, inputs)


class _Writer:
    """Writes the nodes of a traced function as Triton."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: dict[str, str] = {}  # by expression: each is computed once
        self.values: dict[Any, Value] = {}  # by node
        self.size = TRACED_SIZE  # elements of the result that is being written
        self.columns: dict[Any, list[Value]] = {}  # by node of a matrix

    def write(self, module: fx.GraphModule, inputs: Sequence[Value]) -> Body:
        """Write all nodes of ``module``; its placeholders are ``inputs``."""
        unbound, used, results = iter(inputs), list[str](), list[Value]()
        for node in module.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = value = next(unbound)
                used += [value.text] if node.users else []
            elif node.op == "get_attr":
                raise Unprintable("a constant tensor")
            elif node.op == "output":
                results = [self.values[result] for result in node.args[0]]
            elif not self.is_of_columns(node):
                self.values[node] = self.call(node)
        return Body(self.lines, results, tuple(used))

    def name(self, value: Value) -> Value:
        """Return a name of ``value``."""
        if value.text.isidentifier():
            return value
        if value.text not in self.names:
            self.names[value.text] = f"t{len(self.names)}"
            self.lines.append(f"{self.names[value.text]} = {_bare(value.text)}")
        return value._replace(text=self.names[value.text])

    def is_of_columns(self, node: fx.Node) -> bool:
        """Return whether a node stacks columns, or takes some of them, which prints
        nothing.
        """
        args: Any = node.args
        operator = name_of(node)
        if operator == "stack" and args[1:] == (1,):
            self.columns[node] = [self.values[column] for column in args[0]]
        elif operator in COLUMNS and args[0] in self.columns:
            columns = self.columns[args[0]]
            if operator == "unbind" or args[1:3] == (0, 0):
                self.columns[node] = columns
            elif operator == "slice":
                self.columns[node] = columns[slice(*args[2:])]
            else:
                self.values[node] = columns[args[-1]]
        else:
            return False
        return True

    def call(self, node: fx.Node) -> Value:
        """Return the value of a node that calls an operator."""
        result, operator = node.meta["val"], name_of(node)
        args: Any = node.args
        if not isinstance(result, Tensor) or result.numel() not in SIZES:
            raise Unprintable(operator)
        self.size = result.numel()
        if operator == "ones_like":
            return self.name(Value(_full(1, result.dtype), result.dtype))
        if operator == "scalar_tensor":
            return self.name(Value(_full(args[0], result.dtype), result.dtype))
        if operator in ALIASES and self.values[args[0]].dtype == result.dtype:
            if args[0].meta["val"].numel() > result.numel():
                raise Unprintable(operator)
            return self.value(args[0])
        value = self.compute(operator, args, result.dtype, node.kwargs)
        is_short = len(node.users) < 2 and len(value.text) <= SHORT
        return value if is_short else self.name(value)

    def compute(
        self, operator: str, args: Any, dtype: torch.dtype, options: Mapping[str, Any]
    ) -> Value:
        """Return an operator's result, of ``dtype``."""
        if operator == "amax" and self.size == TRACED_SCALES:
            return Value(f"largest({self.values[args[0]].text})", dtype)
        if operator == "_to_copy":
            return cast(self.value(args[0]), dtype)
        if operator == "view":
            text = self.value(args[0]).text
            return Value(f"{text}.to({triton_dtype(dtype)}, bitcast=True)", dtype)
        if operator == "where":
            texts = [self.value(args[0]).text]
            texts += [self.operand(branch, dtype).text for branch in args[1:]]
            return Value(f"tl.where({', '.join(texts)})", dtype)
        working = computing_dtype(dtype)
        if operator in COMPARISONS:
            tensors = [a.meta["val"] if isinstance(a, fx.Node) else a for a in args]
            working = computing_dtype(torch.result_type(*tensors))
        if operator == "mul" and working == torch.bool:
            operator = "bitwise_and"
        if operator not in FORMS:
            raise Unprintable(operator)
        if operator == "clamp" and len(args) > 2:
            if args[1] is not None:
                raise Unprintable("clamp with two bounds")
            operator, args = "minimum", (args[0], args[2])
        if operator == "pow" and dtype != torch.float64:
            raise Unprintable(f"pow of {dtype}")
        if options:
            raise Unprintable(f"{operator} with {options}")
        operands = [self.operand(argument, working) for argument in args]
        value = self.fill(FORMS[operator], operands)
        if operator in COMPARISONS:
            value = value._replace(dtype=torch.bool)
        return cast(value, dtype)

    def value(self, node: fx.Node) -> Value:
        """Return the value of a node: a scale spread over its elements, if the result
        has all elements.
        """
        value = self.values[node]
        if self.size == TRACED_SIZE and node.meta["val"].numel() == TRACED_SCALES:
            return self.name(value._replace(text=f"spread({value.text})"))
        return value

    def fill(self, form: str, operands: Sequence[Value]) -> Value:
        """Return ``form`` with these operands, all of one dtype."""
        dtype = operands[0].dtype
        if form.count("{0}") > 1:
            operands = [self.name(operand) for operand in operands]
        nan = ", tl.PropagateNan.ALL" if dtype.is_floating_point else ""
        # of float32, tl.sqrt is approximate; sqrt_rn has no float64
        sqrt = "tl.sqrt_rn" if dtype == torch.float32 else "tl.sqrt"
        texts = [operand.text for operand in operands]
        text = form.format(*texts, dtype=triton_dtype(dtype), nan=nan, sqrt=sqrt)
        return Value(text, dtype)

    def operand(self, argument: Any, dtype: torch.dtype) -> Value:
        """Return an argument, a node or a number, in ``dtype``."""
        if isinstance(argument, fx.Node):
            return cast(self.value(argument), dtype)
        return Value(_literal(argument, dtype), dtype)


def name_of(node: fx.Node) -> str:
    """Return the name of a node's operator."""
    target: Any = node.target
    return str(getattr(target, "overloadpacket", target).__name__)


def triton_dtype(dtype: torch.dtype) -> str:
    """Return the name of ``dtype`` in Triton."""
    if dtype not in NAMES:
        raise Unprintable(str(dtype))
    return NAMES[dtype]


def computing_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that eager code computes in, for a result of ``dtype``."""
    is_half = dtype in (torch.float16, torch.bfloat16)
    return torch.float32 if is_half else dtype


def cast(value: Value, dtype: torch.dtype) -> Value:
    """Return ``value`` in ``dtype``, as eager code converts it."""
    if value.dtype == dtype:
        return value
    if dtype == torch.bool:
        return Value(f"({value.text} != 0)", dtype)
    text = value.text
    if value.dtype == torch.float64 and computing_dtype(dtype) != dtype:
        text = f"{text}.to(tl.float32)"  # eager code rounds twice
    return Value(f"{text}.to({triton_dtype(dtype)})", dtype)


def _literal(number: float, dtype: torch.dtype) -> str:
    """Return a number that has ``dtype`` in Triton, beside operands of any dtype."""
    if dtype == torch.float32:
        number, info = float(number), torch.finfo(dtype)
        if number == 0 or info.tiny <= abs(number) <= info.max:
            return repr(number) if number >= 0 else f"({number!r})"
    elif not dtype.is_floating_point and abs(number) < 2**31:
        number = int(number)
        return repr(number) if number >= 0 else f"({number!r})"
    return _full(number, dtype)


def _full(number: float, dtype: torch.dtype) -> str:
    if not dtype.is_floating_point:
        text = repr(int(number))
    elif math.isfinite(number):
        text = repr(float(number))
    else:
        text = f'float("{number}")'
    return f"tl.full((), {text}, {triton_dtype(dtype)})"


def _bare(text: str) -> str:
    """Return ``text`` without parentheses around all of it."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0 and i < len(text) - 1:
            return text
    return text[1:-1] if text.startswith("(") else text
