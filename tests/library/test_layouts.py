"""The law of layouts: a step depends on the values of a tensor, never on its strides.

Every rule steps over one parameter of each layout and of each side of the engine's
thresholds, by every runner, and ends where contiguous parameters end by eager steps.
test_kernels.py runs this file in Triton's interpreter, too.
"""

import os
import warnings

import pytest
import torch
from torch import Tensor, nn

import marsopt
from marsopt.optim import binding
from marsopt.step.leaf import Leaf
from tests.table import steady

F64 = torch.float64
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def transposed(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def shifted(x: Tensor) -> Tensor:
    """A view with an offset of one element, which no 16 bytes are aligned to."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def with_gaps(x: Tensor) -> Tensor:
    return torch.stack([x, x], -1)[..., 0]


def wide_of_one_row(x: Tensor) -> Tensor:
    """A dim of size 1 has a stride that no element uses."""
    return x.contiguous().as_strided(x.shape, (7 * x.numel(), 1))


def expanded(g: Tensor) -> Tensor:
    return g[:1].expand_as(g)


def negated(g: Tensor) -> Tensor:
    """A tensor whose values are its memory's, negated, as torch marks it."""
    return torch._neg_view(-g)  # noqa: SLF001  (dense, as no public view is)


# Each shape lies below or above SMALL = 4,096 elements (a copy into rows, or a graph in
# place), ROW = 512 (elements that are summed first), BLOCK = 4,096 (a masked or a whole
# block of a kernel); (40, 16) has several rows of WIDTH = 64.
MATRICES = [(8, 12), (40, 16), (64, 96), (96, 64), (64, 64)]
ROWS = [(1, 24), (1, 5000)]
KERNELS = [(8, 4, 3, 3), (32, 16, 3, 3)]
FORMS = [
    *((shape, form) for shape in MATRICES for form in (transposed, shifted, with_gaps)),
    *((shape, wide_of_one_row) for shape in ROWS),
    *((shape, form) for shape in KERNELS for form in (channels_last, shifted)),
]
GRADIENTS = [torch.clone, transposed, expanded, negated, with_gaps]
RULES = ["adamw", "mars-adamw", "lion", "mars-lion", "muon", "moonlight", "mars-m"]
RULES += ["normuon", "soap", "soap-muon"]
BATCHED = ["muon", "moonlight", "mars-m", "normuon"]
COMPILED = ["mars-adamw", "moonlight", "normuon"]  # all kinds of graphs and kernels


def values(shape, seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=F64)


def trained(mars_type, compile, is_contiguous):
    """Return the parameters of all forms after a step for each form of gradients."""
    params = []
    for shape, form in FORMS:
        x = values(shape, 0)
        params.append(nn.Parameter(x if is_contiguous else form(x)))
    is_matrix_rule = marsopt.REGISTRY[mars_type].matrix_only
    own = dict(ns_dtype=F64) if is_matrix_rule else {}
    own |= dict(lr=0.1, matrices="flattened", compile=compile)
    optimizer = marsopt.MARS(params, mars_type=mars_type, **own, **steady(mars_type))
    for number, form in enumerate(GRADIENTS, 1):
        for p in params:
            g = values(p.shape, number)
            g = form(g) if p.ndim == 2 or form is expanded else g
            p.grad = g.resolve_neg().contiguous() if is_contiguous else g
        optimizer.step()
    return [p.detach() for p in params]


CASES = [
    (rule, compile, is_batch)
    for rule in RULES
    for compile in ([False, True] if rule in COMPILED else [False])
    # a rule of elements, or SOAP, has no batches
    for is_batch in ([False, True] if rule in BATCHED else [False])
]
IDS = [
    f"{rule}-{'compiled interp' if compile else 'eager'}{'-batches' * is_batch}"
    for rule, compile, is_batch in CASES
]


@pytest.mark.parametrize(("mars_type", "compile", "is_batch"), CASES, ids=IDS)
def test_a_step_depends_on_values_and_not_on_strides(
    mars_type, compile, is_batch, monkeypatch
):
    """Batches are of one GPU: matrices of one shape are orthogonalized together."""
    want = trained(mars_type, False, is_contiguous=True)
    monkeypatch.setattr(binding, "takes_batches", lambda *_, **__: is_batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy interprets
        # kernels if Triton is there, else graphs
        found = trained(
            mars_type,
            (None if IS_INTERPRETED else True) if compile else False,
            is_contiguous=False,
        )
    for (shape, form), a, b in zip(FORMS, found, want, strict=True):
        torch.testing.assert_close(
            a, b, rtol=0, atol=1e-8, msg=lambda m, n=(shape, form.__name__): f"{n}: {m}"
        )


def of_one_pixel(g: Tensor) -> Tensor:
    """As cuDNN lays out the gradient of a 1 x 1 convolution in channels_last."""
    channels = g.shape[1]
    return g.as_strided(g.shape, (channels, 1, channels, channels))


@pytest.mark.parametrize("mars_type", ["mars-adamw", "moonlight"])
@pytest.mark.parametrize(
    ("form", "shape", "num_copies"),
    [
        (torch.clone, (64, 96), 0),
        (transposed, (64, 96), 1),
        (negated, (64, 96), 1),
        (of_one_pixel, (96, 64, 1, 1), 0),
    ],
)
def test_a_gradient_is_copied_once_at_most_by_interpreted_steps_too(
    mars_type, form, shape, num_copies, monkeypatch
):
    """A step reads it twice: for its norm, and for the new values."""
    copies = list[bool]()

    laid_out = Leaf.laid_out

    def noted(leaf: Leaf, piece: Tensor) -> Tensor:
        laid = laid_out(leaf, piece)
        copies.append(laid.data_ptr() != piece.data_ptr())
        return laid

    monkeypatch.setattr(Leaf, "laid_out", noted)
    p = nn.Parameter(values(shape, 0))
    p.grad = form(values(shape, 1))
    compile = None if IS_INTERPRETED else False
    options = dict(mars_type=mars_type, lr=0.1, matrices="flattened", compile=compile)
    marsopt.MARS([p], **options).step()
    assert sum(copies) == num_copies
