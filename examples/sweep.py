"""Half, as it is, double: is ``for_model``'s learning rate the best for your model?

    python -m examples.sweep [PICTURE]

Put your model into ``build`` and your data into ``batches``. If the best learning rate
is at an end, go on in its direction.
"""

import sys

import torch
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR

import marsopt

STEPS = 60


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    words, hidden = torch.nn.Embedding(64, 32), torch.nn.Linear(32, 128)
    model = torch.nn.Sequential(words, hidden, torch.nn.GELU())
    model.add_module("head", torch.nn.Linear(128, 64))  # AdamW's, by its name
    return model


def batches(num: int, seed: int):
    random = torch.Generator().manual_seed(seed)
    for _ in range(num):
        tokens, noise = torch.randint(64, (2, 64), generator=random)
        yield tokens, torch.where(noise < 2, noise, (5 * tokens + 3) % 64)


def held_out_loss(lr: float) -> float:
    model = build()
    optimizer = marsopt.for_model(model, lr=lr)
    schedule = CosineAnnealingLR(optimizer, T_max=STEPS, eta_min=lr / 10)
    for inputs, labels in batches(STEPS, seed=1):
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    with torch.no_grad():
        losses = [cross_entropy(model(x), y) for x, y in batches(16, seed=2)]
    return float(torch.stack(losses).mean())


def main() -> None:
    lr = marsopt.for_model(build()).param_groups[0]["lr"]
    losses = {}
    for rate in (lr / 2, lr, 2 * lr):
        losses[rate] = held_out_loss(rate)
        print(f"lr {rate:.3g}  loss {losses[rate]:.6f}", flush=True)
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: pip install matplotlib draws one")
        return
    axes = Figure(figsize=(6, 3.6), layout="constrained").subplots()
    axes.plot([*losses], [*losses.values()], "o-")
    axes.set(xscale="log", xlabel="learning rate", ylabel="held-out loss")
    axes.set_xticks([*losses], [f"{rate:.3g}" for rate in losses])
    axes.minorticks_off()
    axes.figure.savefig(sys.argv[1] if len(sys.argv) > 1 else "sweep.png")


if __name__ == "__main__":
    main()
