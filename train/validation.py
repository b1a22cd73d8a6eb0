"""The loss over a whole split, window by window."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from train.errors import UserError
from train.gpt2 import GPT2


class WholeLoss(NamedTuple):
    """The mean over so many predicted tokens."""

    nats_per_token: float
    tokens: int


@torch.no_grad()
def whole_loss(
    model: GPT2, tokens: np.ndarray, *, window: int, batch: int
) -> WholeLoss:
    """Every token but the first, predicted from those before it in its window.

    Windows do not overlap; the last one may be short.

    Args:
        model: on any device; runs in its own precision.
        tokens: (num_tokens,) uint16.
        window: tokens per window, up to the model's block size.
        batch: windows per forward pass.

    Raises:
        UserError: nothing to predict, or an id outside the vocabulary.
    """
    if len(tokens) < 2:
        raise UserError(
            f"got a split of {len(tokens)} tokens, expected at least 2: prepare more "
            "text"
        )
    count, device = len(tokens) - 1, model.wte.weight.device
    full = count // window
    total = 0.0
    for first in tqdm(range(0, full, batch), desc="loss", unit="batch", disable=None):
        rows = min(batch, full - first)
        start, stop = first * window, (first + rows) * window
        total += _nats(model, tokens[start : stop + 1], rows, device)
    if full * window < count:
        total += _nats(model, tokens[full * window :], 1, device)
    return WholeLoss(total / count, count)


def _nats(model: GPT2, tokens: np.ndarray, rows: int, device: torch.device) -> float:
    """Sum over consecutive windows of equal length."""
    ids = torch.from_numpy(tokens.astype(np.int64)).to(device)
    if ids.max() >= model.shape.vocab_size:
        raise UserError(
            f"got token id {ids.max()} in the data, expected ids below the model's "
            f"vocabulary of {model.shape.vocab_size}: name data of its tokenizer"
        )
    logits = model(ids[:-1].view(rows, -1))
    losses = F.cross_entropy(logits.flatten(0, 1).float(), ids[1:], reduction="none")
    return losses.double().sum().item()
