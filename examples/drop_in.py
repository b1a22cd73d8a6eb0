"""The drop-in optimizer: a plain loop with the authors' class replaced by ours.

    python -m examples.drop_in [--exact]

With --exact the loop follows the authors' protocol for exact MARS: before each step,
the gradient of the *next* batch at the current parameters is handed over.
"""

import sys

import torch

# from mars import MARS        # the authors' class
from marsopt import MARS


def main() -> None:
    torch.manual_seed(0)
    exact = "--exact" in sys.argv
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4)
    )
    target = torch.randn(16, 4) / 4
    optimizer = MARS(
        model.parameters(),
        lr=1e-2,
        betas=(0.95, 0.99),
        gamma=0.025,
        is_approx=not exact,
        lr_1d=5e-3,
        weight_decay_1d=0.0,
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)

    def gradient(batch):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(batch), torch.tanh(batch @ target))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return loss.item()

    batch = torch.randn(256, 16)
    for step in range(200):
        following = torch.randn(256, 16)
        if exact:
            gradient(following)
            optimizer.update_previous_grad()
        loss = gradient(batch)
        optimizer.step()
        if exact:
            optimizer.update_last_grad()
        scheduler.step()
        batch = following
        if step % 40 == 0 or step == 199:
            print(f"step {step:3}  loss {loss:.6f}")


if __name__ == "__main__":
    main()
