"""A loop with Hugging Face's accelerate and MARS, here with correction="transport".

    python -m examples.accelerate_loop [FOLDER]

Line 1 is the optimizer, which prepare() wraps. Line 2, which transport alone needs,
puts the trained model in place of the points where gradients are taken, to evaluate and
save it; optimizer.train() undoes that. The run goes on from the newest checkpoint in
FOLDER.
"""

import sys
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from marsopt import MARS


def data(num: int) -> TensorDataset:
    inputs = torch.randn(num, 16, generator=torch.Generator().manual_seed(num))
    return TensorDataset(inputs, torch.tanh(inputs[:, :4] - inputs[:, 4:8]))


def build() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(16, 4), torch.nn.Tanh())


if __name__ == "__main__":
    torch.manual_seed(0)
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    model, loader = build(), DataLoader(data(512), batch_size=16, shuffle=True)
    optimizer = MARS(  # 1
        model.parameters(), lr=1e-2, correction="transport", gamma=0.1
    )
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    saved = sorted(folder.glob("epoch-*"))
    if saved:
        accelerator.load_state(saved[-1])
    for epoch in range(len(saved), 6):
        model.train()
        optimizer.train()
        for inputs, labels in loader:
            loss = mse_loss(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch}  loss {loss:.6f}")
        optimizer.eval()  # 2
        accelerator.save_state(folder / f"epoch-{epoch}")
    model.eval()
    inputs, labels = data(64).tensors
    print(f"held-out {mse_loss(model(inputs), labels):.6f}")
