"""The functional API: model, gradient and MARS in one compiled graph.

    python -m examples.custom_loop [--eager] [--flat]

Fits a small network to a fixed random one. Everything travels as values: no optimizer
object, no hidden state. The learning rate is a tensor, so that its schedule does not
recompile anything. With --flat the parameters are one flat group: tensors of one shape
in one stack, which keeps the graph of a deep model small.
"""

import sys

import torch
from torch.func import functional_call, grad_and_value

import marsopt
from marsopt import FlatGroup


def main() -> None:
    torch.manual_seed(0)
    teacher = torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4)
    )
    student = torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4)
    )
    rule = marsopt.mars(mars_type="moonlight", max_norm=1.0)

    def loss(params, inputs, labels):
        leaves = params.unpack() if isinstance(params, FlatGroup) else params
        outputs = functional_call(student, leaves, inputs)
        return torch.nn.functional.mse_loss(outputs, labels)

    def train_step(params, state, inputs, labels, lr):
        grads, value = grad_and_value(loss)(params, inputs, labels)
        params, state = rule.step(params, grads, state, lr=lr)
        return params, state, value

    if "--eager" not in sys.argv:
        train_step = torch.compile(train_step, fullgraph=True)

    params = {name: p.detach() for name, p in student.named_parameters()}
    if "--flat" in sys.argv:
        params = FlatGroup.pack(params)
    state = rule.init(params)
    num_steps = 200
    for step in range(num_steps):
        inputs = torch.randn(256, 16)
        with torch.no_grad():
            labels = teacher(inputs)
        lr = torch.tensor(1e-2 * (1 - step / num_steps))
        params, state, value = train_step(params, state, inputs, labels, lr)
        if step % 40 == 0 or step == num_steps - 1:
            skipped = int(state["matrix"].skipped)
            print(f"step {step:3}  loss {value:.6f}  skipped {skipped}")


if __name__ == "__main__":
    main()
