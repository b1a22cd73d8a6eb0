"""Part "interpreted": steps of MARS by the Triton kernels that a GPU would run,
interpreted on the CPU, beside eager steps of the same optimizer on the same numbers.

A case is RULE/CORRECTION[/DTYPE[/H_DTYPE[/STATE]]]: the dtypes of parameters, of the
kept gradient and of other state, which bfloat16 rounds stochastically. Four steps are
taken, in which lr, gamma, betas, weight decay and both clips move; a gradient of the
third holds a NaN, and in the fourth one of two parameters of one shape has no gradient.

A fault: numbers beyond rounding, a skipped step that changes something or is not
counted, bytes beside what a step has to move, a graph that a later step compiles. What
a GPU does and an interpreter does not stays unseen: contracted multiplications and
additions, approximate divisions, races, misaligned addresses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

# first, since all that follows imports Triton
from benchmarks.gpu.rehearsal.interpreter import interpreter, launch

# isort: split
import torch
from torch import Tensor, fx, nn
from torch._guards import detect_fake_mode
from torch._inductor import compile_fx

from benchmarks.gpu.rehearsal.device import h100
from benchmarks.gpu.rehearsal.lowered import DTYPES, NONE, corrections
from benchmarks.gpu.rehearsal.lowering import Graph, load, lowering
from marsopt import MARS
from marsopt.optim import base, compiled
from marsopt.profiling import optimizer as profiled
from marsopt.profiling.optimizer import floor_of
from marsopt.rules.registry import REGISTRY

Kind = Literal["normal", "skipped", "missing"]
STEPS: tuple[Kind, ...] = ("normal", "normal", "skipped", "missing")
# stacks of two matrices, three vectors, two matrices and one; blocks of kernels, powers
# of two, divide none of them
SHAPES = ((48, 40), (48, 40), (40,), (40,), (40,), (40, 48), (40, 48), (33, 40))
MISSING = 1  # which parameter has no gradient then: one of two in a stack
# Sums have another order than eager ones: a few units in the last place of float32, of
# parameters up to 4 and of state. Parameters in bfloat16 are to be the same: its last
# place, of all but tiny numbers, is beyond this bound.
X_BOUND, STATE_BOUND = 1e-6, 1e-5
# bytes a parameter: numbers per tensor and sums of rows, where parameters are so few
SMALL = 1.0


@dataclass(frozen=True)
class Case:
    """What is stepped; ``steps``: "skipped" has a NaN in a gradient, "missing" lacks
    one, which the first step may not.
    """

    rule: str
    correction: str
    dtype: str = "float32"
    h_dtype: str = "float32"
    state: str = "float32"
    shapes: tuple[tuple[int, ...], ...] = SHAPES
    steps: tuple[Kind, ...] = STEPS

    @property
    def name(self) -> str:
        """Return the words of the case, without float32 at the end."""
        words = [self.rule, self.correction, self.dtype, self.h_dtype, self.state]
        while words[-1] == "float32":
            words.pop()
        return "/".join(words)

    def tensors(self, seed: int) -> list[Tensor]:
        """Return normal numbers in the parameters' shapes."""
        numbers, dtype = torch.Generator().manual_seed(seed), DTYPES[self.dtype]
        return [torch.randn(s, generator=numbers).to(dtype) for s in self.shapes]


# exact MARS has the steps of "approximate", with an h that comes from elsewhere
_ALL = (
    *(Case(r, c) for r in REGISTRY for c in corrections(r) if c != "exact"),
    Case("mars-adamw", "approximate", "bfloat16"),
    Case("mars-adamw", "transport", "bfloat16"),
    Case("mars-m", "transport", "bfloat16"),
    Case("mars-adamw", "approximate", "float32", "bfloat16"),
    Case("mars-adamw", "approximate", "float32", "bfloat16", "bfloat16"),
    Case("mars-adamw", "transport", "float32", "float32", "bfloat16"),
)
CASES = {case.name: case for case in _ALL}
NAMES = DEFAULT = tuple(CASES)


# ---- compiled steps of CPU tensors, by interpreted kernels ---------------------------


def _on_gpu(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """Let a graph over CPU tensors be one over fake CUDA tensors; return its inputs, of
    which those that share memory still do.
    """

    def moved(value: Any) -> Any:
        return torch.device("cuda", 0) if isinstance(value, torch.device) else value

    for node in gm.graph.nodes:
        node.args = fx.node.map_aggregate(node.args, moved)
        node.kwargs = fx.node.map_aggregate(node.kwargs, moved)
    gm.recompile()
    storages: dict[tuple[int, torch.dtype], Tensor] = {}

    def fake(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        storage = x.untyped_storage()
        key = storage._cdata, x.dtype
        if key not in storages:
            size = storage.nbytes() // x.itemsize
            storages[key] = torch.empty(size, dtype=x.dtype, device="cuda")
        return storages[key].as_strided(x.shape, x.stride(), x.storage_offset())

    with detect_fake_mode(inputs):
        return [fake(x) for x in inputs]


def _interpret(graph: Graph, gm: fx.GraphModule) -> Callable:
    wrapper = load(graph.source, device="cpu", run=launch)
    return lambda *args: wrapper.call(list(args))


@contextlib.contextmanager
def interpreting() -> Iterator[Callable[[], tuple[int, int]]]:
    """Let compiled optimizers of CPU tensors lay these out as on a GPU, and step by the
    kernels that they would launch there; yield what counts graphs and bytes so far.
    """

    with h100(), interpreter() as traffic, lowering(_interpret) as graphs:
        lowered = compile_fx.compile_fx

        # calls itself where a graph has options of its own: fake tensors stay fake
        def compile_fake(gm, inputs, *args, **kwargs):
            return lowered(gm, _on_gpu(gm, inputs), *args, **kwargs)

        with (
            mock.patch.object(compile_fx, "compile_fx", compile_fake),
            # answers for CUDA tensors
            mock.patch.object(base, "resolve_compile", lambda wanted, device: wanted),
            mock.patch.object(base, "takes_batches", lambda device: True),
            mock.patch.object(compiled, "takes_batches", lambda device: True),
            mock.patch.object(profiled, "takes_batches", lambda device: True),
        ):
            yield lambda: (len(graphs), traffic.num_bytes)


# ---- steps ---------------------------------------------------------------------------


class Stepper:
    """A case's optimizer and parameters, beginning at the same numbers each time."""

    def __init__(self, case: Case, *, compile: bool) -> None:
        self.case = case
        self.params = [nn.Parameter(x) for x in case.tensors(0)]
        self.optimizer = MARS(
            self.params,
            lr=1e-2,
            weight_decay=0.1,
            mars_type=case.rule,
            # its own, but passed: MARS logs that nobody has chosen it
            lr_1d=REGISTRY[case.rule].hyperparameters["lr_1d"],
            # gradients of this norm have matrices above the other bound, and vectors
            # below it
            max_norm=0.7,
            clip=0.3,
            ns_dtype=torch.float32,  # coarser numbers would hide differences
            state_dtype=DTYPES[case.state],
            stochastic_rounding=case.state == "bfloat16",
            h_dtype=DTYPES[case.h_dtype],
            compile=compile,
            correction=None if case.correction == NONE else case.correction,
        )

    def walk(self, after: Callable[[Kind], None] = lambda kind: None) -> None:
        """Take all steps; call ``after`` each."""
        for number, kind in enumerate(self.case.steps):
            self._move(number)
            gradients = self.case.tensors(number + 1)
            for p, g in zip(self.params, gradients, strict=True):
                p.grad = g
            if kind == "skipped":
                gradients[0][3, 5] = float("nan")
            if kind == "missing":
                self.params[MISSING].grad = None
            self.optimizer.step()
            after(kind)

    def _move(self, number: int) -> None:
        """Let every hyperparameter be another in each step."""
        self.optimizer.max_norm = 0.7 + 0.1 * number
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-2 * (1 - 0.1 * number)
            group["gamma"] = 0.025 + 0.005 * number
            group["betas"] = tuple(
                start - 0.01 * number
                for start in REGISTRY[self.case.rule].hyperparameters["betas"]
            )
            group["weight_decay"] = 0.1 + 0.01 * number
            if group["clip"] is not None:
                group["clip"] = 0.3 - 0.02 * number

    def tensors(self) -> dict[tuple[int, str], Tensor]:
        """Return copies of parameters ("parameter") and state, by number and name."""
        copies = {}
        for i, p in enumerate(self.params):
            copies[i, "parameter"] = p.detach().clone()
            for name, value in self.optimizer.state[p].items():
                copies[i, name] = value.clone()
        return copies

    def num_flagged(self) -> int:
        """Return the bytes that a skipped step reads and another does not: of y, where
        the state keeps x.
        """
        buckets = self.optimizer.describe().buckets
        keep_x = [
            b for b in buckets if b.algorithm.is_ahead and not b.algorithm.num_behind
        ]
        return sum(p.nbytes for b in keep_x for p in b.params)


def eager(case: Case) -> dict[tuple[int, str], Tensor]:
    """Return a case's tensors after eager steps."""
    stepper = Stepper(case, compile=False)
    stepper.walk()
    return stepper.tensors()


def play(name: str) -> dict[str, Any]:
    """Return how a case's interpreted steps compare with its eager ones."""
    return beside(CASES[name], eager(CASES[name]))


def beside(case: Case, reference: dict[tuple[int, str], Tensor]) -> dict[str, Any]:
    """Step by interpreted kernels.

    Returns:
        graphs and bytes a parameter (``num_bytes``, beside ``expected``) of each step;
        ``x_differs`` from eager steps at most, ``state_differs`` over the
        largest number of its tensor; ``num_skipped``; ``changed``: which parameters and
        state tensors skipped steps have changed; ``faults``.
    """
    torch.compiler.reset()  # or sizes that another case had before become dynamic
    counts, changed, floor = [(0, 0)], set(), 0
    with interpreting() as count:
        compiled = Stepper(case, compile=True)
        before = compiled.tensors()

        def after(kind: Kind) -> None:
            nonlocal before, floor
            counts.append(count())
            now = compiled.tensors()
            if kind == "skipped":
                changed.update(k for k, x in now.items() if not x.equal(before[k]))
            before = now
            buckets = compiled.optimizer.describe().buckets
            floor = floor or floor_of(buckets).num_bytes

        compiled.walk(after)
    pairs = zip(counts, counts[1:], strict=False)
    spent = [[b - a for a, b in zip(*pair, strict=True)] for pair in pairs]
    num_params = sum(p.numel() for p in compiled.params)
    flagged = compiled.num_flagged()
    share = dict(normal=0.0, skipped=1.0)
    share["missing"] = compiled.params[MISSING].numel() / num_params
    x_differs, state_differs = _differences(compiled.tensors(), reference)
    row = dict(
        name=case.name,
        steps=case.steps,
        graphs=[step[0] for step in spent],
        x_differs=x_differs,
        state_differs=state_differs,
        num_skipped=compiled.optimizer.num_skipped,
        changed=sorted({name for _, name in changed}),
        num_bytes=[step[1] / num_params for step in spent],
        floor=floor / num_params,
        expected=[(floor + share[kind] * flagged) / num_params for kind in case.steps],
    )
    return row | dict(faults=[*_faults(row)])


def _differences(
    tensors: dict[tuple[int, str], Tensor], reference: dict[tuple[int, str], Tensor]
) -> tuple[float, float]:
    """Return the largest differences of parameters, and of state relative to it; NaN
    where a NaN is on one side.
    """
    assert tensors.keys() == reference.keys()
    of_x, of_state = [], []
    for key, expected in reference.items():
        if not expected.numel():  # of transport's point ahead, while parameters are it
            continue
        expected = expected.double()
        difference = (tensors[key].double() - expected).abs().max()
        if key[1] == "parameter":
            of_x.append(difference)
        else:
            of_state.append(difference / expected.abs().max().clamp(min=1e-30))
    return torch.stack(of_x).max().item(), torch.stack(of_state).max().item()


def _faults(row: dict[str, Any]) -> Iterator[str]:
    if not row["x_differs"] <= X_BOUND:  # a NaN, too
        yield f"parameters differ by {row['x_differs']:.1e} from eager steps"
    if not row["state_differs"] <= STATE_BOUND:
        yield f"state differs by {row['state_differs']:.1e} of its largest number"
    num_skipped = row["steps"].count("skipped")
    if row["num_skipped"] != num_skipped:
        yield (f"{row['num_skipped']} steps counted as skipped, expected {num_skipped}")
    if row["changed"]:
        yield f"a skipped step changed {', '.join(row['changed'])}"
    if not row["graphs"][0] or any(row["graphs"][1:]):
        yield f"got {row['graphs']} graphs compiled in each step, expected later none"
    pairs = zip(row["num_bytes"], row["expected"], strict=True)
    for number, (moved, expected) in enumerate(pairs, 1):
        if not expected <= moved <= expected + SMALL:
            yield (
                f"step {number} ({row['steps'][number - 1]}) moved {moved:.2f} bytes a "
                f"parameter, expected {expected:.2f}"
            )


def columns(row: dict[str, Any]) -> dict[str, str]:
    """Return a case's figures for the table; bytes are those of a parameter, of lanes
    that masks let through.
    """
    return {
        "x differs": f"{row['x_differs']:.1e}",
        "state differs": f"{row['state_differs']:.1e}",
        "floor": f"{row['floor']:.2f}",
        "bytes of each step": " ".join(f"{b:.2f}" for b in row["num_bytes"]),
    }
