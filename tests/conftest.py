"""Every test starts from the same seed, and with an empty compile cache."""
# ruff: noqa: E402  (NumPy and torch read these when they are imported)

import os

# of matrices as small as these, more threads compute no faster: they wait for one
# another, on a busy machine several times as long as they work
os.environ.setdefault("OMP_NUM_THREADS", "1")
# inductor takes the CPU's word for its instructions: to try them, each process that
# compiles would start another, and the first of all the C++ compiler
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# and no process of its own to compile in, which would import torch again
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import gc
from collections import Counter
from functools import partial

import pytest
import torch

from marsopt.step.graphs import graph_of
from tests.stacking import as_on_a_gpu, forced

# what starts processes
STARTS = {"forked", "spawn", "subprocess", "train_all", "train_tiny"}


def pytest_collection_modifyitems(items):
    """Files whose tests start processes, which take longest, come first, and small ones
    last: the end of a long file is not waited for by one worker alone.
    """
    num = Counter(item.path for item in items)
    items.sort(
        key=lambda item: (STARTS.isdisjoint(vars(item.module)), -num[item.path])
    )  # stable: the order within a file stays


def pytest_collection_finish():
    """What is imported by now stays: half a million objects, which the garbage
    collector would look through again and again while torch traces, for an eighth of
    the time that this takes. What tracing makes takes another fifth.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    torch._dynamo.reset()
    graph_of.cache_clear()  # a test may compile for another backend


@pytest.fixture(params=["as-on-a-cpu", "as-on-a-gpu"])
def both_layouts(request, monkeypatch):
    """Run a test with the class's layout of a CPU, and with that of a GPU."""
    if request.param == "as-on-a-gpu":
        as_on_a_gpu(monkeypatch)


@pytest.fixture(params=["eager", "flat"])
def mode(request, monkeypatch):
    """Run a test with eager steps, and with compiled ones (``tests.stacking``)."""
    return forced(monkeypatch, request.param)


@pytest.fixture
def of_dynamo(monkeypatch):
    """Graphs as dynamo makes them, without what inductor makes of them: that takes
    longer, and has to fit the tensors, of which other tests are.
    """
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
