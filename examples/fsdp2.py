"""FSDP2 in a loop of one's own: one line for the optimizer, and a checkpoint.

    torchrun --nproc-per-node 2 -m examples.fsdp2 [FOLDER]

The first run with FOLDER saves there, the next goes on from it, on any number of
processes.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from marsopt import MARS, for_model
from train.gpt2 import GPT2, Shape

SHAPE = Shape(num_layers=2, num_heads=2, width=64, block_size=16, vocab_size=64)
BATCH, STEPS = 32, 100


def batch(step: int, rank: int, world: int, device: torch.device) -> torch.Tensor:
    """This rank's share of chains in which a token follows from the one before."""
    start = torch.Generator().manual_seed(step)
    chain = [torch.randint(SHAPE.vocab_size, (BATCH,), generator=start)]
    for _ in range(SHAPE.block_size):
        chain.append((5 * chain[-1] + 3) % SHAPE.vocab_size)
    return torch.stack(chain, 1)[rank::world].to(device)


def build(mesh: DeviceMesh, device: torch.device) -> tuple[GPT2, MARS]:
    """A sharded model, and its optimizer."""
    model = GPT2(SHAPE).to(device)
    model.init_weights()
    for block in model.layers.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if device.type == "cpu":  # gloo sums, and cannot average
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(mesh.size())
                module.set_force_sum_reduction_for_comms(True)
    # after fully_shard: it takes the mesh from the parameters
    return model, for_model(model, "moonlight", lr=1e-2)


def load(model: GPT2, optimizer: MARS, folder: Path) -> int:
    """Whatever number of ranks has saved it. Returns the step to go on with."""
    weights, state = get_state_dict(model, optimizer)
    saved = {"model": weights, "optimizer": state, "step": 0}
    dcp.load(saved, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=saved["model"],
        optim_state_dict=saved["optimizer"],
    )
    return saved["step"]


def train_step(model: GPT2, optimizer: MARS, tokens: torch.Tensor) -> torch.Tensor:
    """One step on chains (batch, time). Returns this rank's loss."""
    logits = model(tokens[:, :-1])
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), tokens[:, 1:].flatten()
    )
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def main() -> None:
    dist.init_process_group()
    rank, world = dist.get_rank(), dist.get_world_size()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]) if kind == "cuda" else 0)
    mesh = init_device_mesh(kind, (world,))  # HSDP: (replicas, world // replicas)
    model, optimizer = build(mesh, device)
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    goes_on = folder is not None and folder.exists()
    first = load(model, optimizer, folder) if goes_on else 0

    for step in range(first, first + STEPS):
        tokens = batch(step, rank, world, device)
        loss = train_step(model, optimizer, tokens)
        if step % 20 == 0 or step == first + STEPS - 1:
            mean = loss / world
            dist.all_reduce(mean)
            if rank == 0:
                norm = float(optimizer.grad_norm)
                print(f"step {step:3}  loss {mean:.6f}  gradient norm {norm:.4f}")

    if folder is not None and not goes_on:
        weights, state = get_state_dict(model, optimizer)
        saved = {"model": weights, "optimizer": state, "step": step + 1}
        dcp.save(saved, checkpoint_id=folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
