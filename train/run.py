"""A run's folder: its checkpoints, read without torchtitan's trainer and in one
process.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from train.errors import UserError
from train.gpt2 import GPT2, Shape


def last_step(folder: Path) -> int:
    """The step of the newest complete checkpoint, 0 if there is none."""
    steps = [
        int(path.parent.name.removeprefix("step-"))
        for path in (folder / "checkpoint").glob("step-*/.metadata")
    ]
    return max(steps, default=0)


def load_model(folder: Path, shape: Shape) -> GPT2:
    """The model of the newest checkpoint, of a run on any number of ranks.

    Raises:
        UserError: no checkpoint, or one of another model.
    """
    step = last_step(folder)
    if step == 0:
        raise UserError(
            f"got {folder} without a complete checkpoint, expected a run: python -m "
            "train --config NAME"
        )
    model = GPT2(shape)
    state = model.state_dict()
    path = folder / "checkpoint" / f"step-{step}"
    saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    for name, tensor in state.items():
        size = tuple(saved[name].size) if name in saved else None
        if size != tuple(tensor.shape):
            raise UserError(
                f"got a checkpoint {path} with {name} of shape {size}, expected "
                f"{tuple(tensor.shape)}: it is of another "
                "model; name the configuration that trained it"
            )
    with warnings.catch_warnings():  # that one process loads is the intent
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, checkpoint_id=path, no_dist=True)
    model.load_state_dict(state)
    return model.eval()


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
    """``num_tokens`` ids that continue ``prompt``, sampled from the ``top_k`` likeliest
    at each place.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.tensor([prompt])
    for _ in range(num_tokens):
        logits = model(ids[:, -model.shape.block_size :])[0, -1].float()
        best = torch.topk(logits, min(top_k, len(logits)))
        chosen = torch.multinomial(
            torch.softmax(best.values / temperature, -1), 1, generator=generator
        )
        ids = torch.cat([ids, best.indices[chosen][None]], 1)
    return ids[0, len(prompt) :].tolist()
