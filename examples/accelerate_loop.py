"""A loop with Hugging Face's accelerate and MARS.

    python -m examples.accelerate_loop [FOLDER]

Line 1 is the optimizer, which prepare() wraps. The run goes on from the newest
checkpoint in FOLDER.
"""

import sys
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import marsopt

EPOCHS, BATCH, LR = 6, 16, 5e-2


def data(num: int) -> TensorDataset:
    inputs = torch.randn(num, 16, generator=torch.Generator().manual_seed(num))
    return TensorDataset(inputs, torch.tanh(inputs[:, :4] - inputs[:, 4:8]))


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 4), torch.nn.Tanh())


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    model, loader = build(), DataLoader(data(512), batch_size=BATCH)
    optimizer = marsopt.for_model(model, lr=LR)  # 1
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    saved = sorted(folder.glob("epoch-*"))
    if saved:
        accelerator.load_state(saved[-1])
    for epoch in range(len(saved), EPOCHS):
        model.train()
        for inputs, labels in loader:
            loss = mse_loss(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch}  loss {loss:.6f}")
        accelerator.save_state(folder / f"epoch-{epoch}")
    model.eval()
    inputs, labels = data(64).tensors
    print(f"held-out {mse_loss(model(inputs), labels):.6f}")
