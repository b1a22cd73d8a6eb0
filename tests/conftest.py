"""Every test starts from the same seed, and with an empty compile cache."""

import pytest
import torch

from tests.stacking import as_on_a_gpu


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    torch._dynamo.reset()


@pytest.fixture(params=["as-on-a-cpu", "as-on-a-gpu"])
def both_layouts(request, monkeypatch):
    """Run a test with the class's layout of a CPU, and with that of a GPU."""
    if request.param == "as-on-a-gpu":
        as_on_a_gpu(monkeypatch)
