"""Every test of the studies starts from the same seed, on one thread."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # NumPy and torch read it on import

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    torch._dynamo.reset()
