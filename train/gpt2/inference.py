"""What a trained model does: the loss over a split, text that continues a prompt."""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from train.errors import UserError
from train.gpt2.model import GPT2


class WholeLoss(NamedTuple):
    """The mean over so many predicted tokens."""

    nats_per_token: float
    tokens: int


@torch.no_grad()
def whole_loss(
    model: GPT2, tokens: np.ndarray, *, window: int, batch: int
) -> WholeLoss:
    """Return the loss of every token but the first, predicted from those before it in
    its window.

    Windows do not overlap; the last one may be short.

    The model runs where it is, in its own precision, on ``tokens`` (num_tokens,)
    uint16, in ``batch`` windows of ``window`` tokens per forward pass.
    """
    if len(tokens) < 2:
        raise UserError(
            f"got a split of {len(tokens)} tokens, expected 2 at least: prepare more"
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
    """Return the sum over consecutive windows of equal length."""
    ids = torch.from_numpy(tokens.astype(np.int64)).to(device)
    if ids.max() >= model.shape.vocab_size:
        raise UserError(
            f"got token id {ids.max()} in the data, expected ids below the model's "
            f"vocabulary of {model.shape.vocab_size}: name data of its tokenizer"
        )
    logits = model(ids[:-1].view(rows, -1))
    losses = F.cross_entropy(logits.flatten(0, 1).float(), ids[1:], reduction="none")
    return losses.double().sum().item()


@torch.no_grad()
def generate(
    model: GPT2,
    prompt: list[int],
    *,
    num_tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
) -> list[int]:
    """Return ``num_tokens`` ids after ``prompt``, each of the ``top_k`` likeliest."""
    if not prompt or max(prompt) >= model.shape.vocab_size:
        what = f"the token id {max(prompt)}" if prompt else "no token"
        raise UserError(
            f"got a prompt of {what}, expected ids below the model's vocabulary of "
            f"{model.shape.vocab_size}: write some text, or take the model's tokenizer"
        )
    generator = torch.Generator().manual_seed(seed)
    ids = torch.tensor([prompt])
    for _ in range(num_tokens):
        logits = model(ids[:, -model.shape.block_size :])[0, -1].float()
        if not logits.isfinite().all():
            raise UserError(
                "got logits that are not finite, expected numbers: the training has "
                "diverged; sample from an earlier checkpoint (--step)"
            )
        best = torch.topk(logits, min(top_k, len(logits)))
        odds = torch.softmax(best.values / temperature, -1)
        chosen = torch.multinomial(odds, 1, generator=generator)
        ids = torch.cat([ids, best.indices[chosen][None]], 1)
    return ids[0, len(prompt) :].tolist()
