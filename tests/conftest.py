"""Every test starts from the same seed, and with an empty compile cache."""

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    torch._dynamo.reset()
