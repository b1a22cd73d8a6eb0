"""A whole training step in one CUDA graph: forward, backward and MARS.

    python -m examples.cuda_graph

A replay launches what was captured, and runs no Python: batches and the learning rate
are written into tensors that the graph reads. On a CPU the same step runs eagerly.
"""

import torch
from torch import Tensor, nn

from marsopt import MARS

PEAK, WARM_UP, STEPS, BATCH = 3e-2, 3, 200, 256


def build(
    device: torch.device, compile: bool | None = None
) -> tuple[nn.Sequential, MARS]:
    """A model, and its optimizer with rates that a graph reads where they are."""
    hidden = 64
    with device:
        model = nn.Sequential(
            *(nn.Linear(16, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh()),
            nn.Linear(hidden, 4),
        )
    optimizer = MARS(
        model.parameters(),
        lr=PEAK,
        lr_1d=PEAK,
        max_norm=1.0,
        compile=compile,
    )
    for group in optimizer.param_groups:  # a number would be frozen by the capture
        group["lr"] = torch.full((), PEAK, dtype=torch.float64, device=device)
    return model, optimizer


def schedule(optimizer: MARS, step: int) -> None:
    """Write the rates of this step: up, then down to nothing."""
    factor = min((step + 1) / 20, 1 - step / STEPS)
    for group in optimizer.param_groups:
        group["lr"].fill_(PEAK * factor)


def training_step(model: nn.Module, optimizer: MARS, batch: list[Tensor]) -> Tensor:
    """Everything that is captured; the loss. Gradients are None before and after, so
    that the graph makes them anew in its own memory: nothing is zeroed, or added to.
    """
    inputs, labels = batch
    loss = nn.functional.mse_loss(model(inputs), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def capture(model: nn.Module, optimizer: MARS, batch: list[Tensor]):
    """The graph of ``training_step``, and the loss that each replay writes."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # recorded, not run
        loss = training_step(model, optimizer, batch)
    return graph, loss


@torch.no_grad()
def held_out(model: nn.Module, batch: list[Tensor]) -> float:
    """The loss on ``batch``, outside of the graph."""
    inputs, labels = batch
    return nn.functional.mse_loss(model(inputs), labels).item()


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(device)
    model, optimizer = build(device)

    @torch.no_grad()
    def draw() -> list[Tensor]:
        inputs = torch.randn(BATCH, 16, device=device)
        return [inputs, teacher(inputs)]

    batch, validation = draw(), draw()  # what a graph reads stays where it is
    side = torch.cuda.Stream() if device.type == "cuda" else None
    graph = None
    if side is None:
        print("no GPU: nothing is captured, and every step runs eagerly")
    for step in range(STEPS):
        for static, new in zip(batch, draw(), strict=True):
            static.copy_(new)
        schedule(optimizer, step)
        if side is None:
            loss = training_step(model, optimizer, batch)
        elif step < WARM_UP:  # compiles, and allocates what lasts: aside, torch says
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                loss = training_step(model, optimizer, batch)
            torch.cuda.current_stream().wait_stream(side)
        else:
            if graph is None:
                graph, loss = capture(model, optimizer, batch)
            graph.replay()
        if step % 40 == 0 or step == STEPS - 1:
            validated = held_out(model, validation)
            print(f"step {step:3}  loss {loss.item():.6f}  held-out {validated:.6f}")
    print(f"skipped {optimizer.num_skipped}")


if __name__ == "__main__":
    main()
