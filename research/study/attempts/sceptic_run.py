"""A run with other schedules, QHAdamW, and more points of the end: x, y, averages.

As it was run: beside train/, as a module that sceptic.py, the file beside it,
imports. python -m sceptic_run SETTING RECIPE SEED FILE
"""

import json
import sys
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from research.compare import optimizers, plain
from research.compare.neighbours import Wrapper
from train.engine import schedule
from train.files import write_json

DECAYS = (0.98, 0.995)
MORE = 2048  # held-out windows of the points at the end


class QHAdamW(torch.optim.Optimizer):
    """AdamW with -lr ((1 - gamma) m + gamma g) / (root(v) + eps) (arXiv 1810.06801 with
    nu1 = 1 - gamma, nu2 = 1), m and v debiased, decoupled decay.
    """

    def __init__(self, params, *, lr, betas, gamma, eps=1e-8, weight_decay=0.0):
        own = dict(lr=lr, betas=betas, gamma=gamma, eps=eps, weight_decay=weight_decay)
        super().__init__(params, own)
        self.own = [p for group in self.param_groups for p in group["params"]]
        self._m, self._v = ([torch.zeros_like(p) for p in self.own] for _ in range(2))
        self._t = 0

    def _root(self):
        (group,) = self.param_groups
        root = torch._foreach_sqrt(self._v)
        torch._foreach_div_(root, (1 - group["betas"][1] ** self._t) ** 0.5)
        torch._foreach_add_(root, group["eps"])
        return root

    @torch.no_grad()
    def step(self, closure=None):
        (group,) = self.param_groups
        lr, gamma, (beta1, beta2) = group["lr"], group["gamma"], group["betas"]
        self._t += 1
        g = [p.grad for p in self.own]
        torch._foreach_lerp_(self._m, g, 1 - beta1)
        torch._foreach_lerp_(self._v, torch._foreach_mul(g, g), 1 - beta2)
        u = torch._foreach_mul(self._m, (1 - gamma) / (1 - beta1**self._t))
        torch._foreach_add_(u, g, alpha=gamma)
        torch._foreach_div_(u, self._root())
        torch._foreach_mul_(self.own, 1 - lr * group["weight_decay"])
        torch._foreach_add_(self.own, u, alpha=-lr)

    @torch.no_grad()
    def behind(self):
        """Return what transport would call x: k displacements of m behind."""
        (group,) = self.param_groups
        beta1 = group["betas"][0]
        k = group["gamma"] * beta1 / (1 - beta1)
        d = torch._foreach_mul(self._m, group["lr"] / (1 - beta1**self._t))
        torch._foreach_div_(d, self._root())
        return torch._foreach_add(self.own, d, alpha=k)


def build(model, recipe, *, steps, compile):
    if recipe["rule"] != "qhadamw":
        return optimizers.build(model, recipe, steps=steps, compile=compile)
    own = {key: recipe[key] for key in ("lr", "gamma", "weight_decay")}
    betas = recipe["beta1"], recipe["beta2"]
    return optimizers.Clipped(QHAdamW(model.parameters(), betas=betas, **own))


plain.build = build


@torch.no_grad()
def losses(training, setting) -> list[float]:
    """Return mean losses of the first held-out windows: 512, and MORE."""
    task = training.task
    batches, found = task._held_out(), []
    for _ in range(MORE // setting.per_pass):
        ((inputs, labels),) = task._micro(batches.next())
        found.append(task._loss(inputs, labels, False))
    found = torch.stack(found)
    return [
        float(found[: setting.held_out // setting.per_pass].mean()),
        float(found.mean()),
    ]


def train(given: dict, recipe: dict, seed: int) -> dict:
    torch.set_num_threads(1)
    given = dict(given)
    way = given.pop("schedule")
    setting = plain.Setting(**given)
    training = plain.Training(setting, recipe, seed, setting.texts())
    warmup = max(1, round(setting.warmup * setting.steps))
    own = dict(warmup=warmup, total=setting.steps, floor=setting.floor)
    if way == "wsd":
        own["decay"] = setting.steps // 5
    training._rate = partial(getattr(schedule, way), **own)
    params: list[Tensor] = [*training.task.model.parameters()]
    averages = {decay: [torch.zeros_like(p) for p in params] for decay in DECAYS}
    curve = []
    interval = -(-setting.steps // setting.points)
    for done in range(1, setting.steps + 1):
        training.gradient()
        training.update()
        if setting.steps - done < 1500:
            with torch.no_grad():
                for decay, average in averages.items():
                    torch._foreach_lerp_(average, params, 1 - decay)
        if done % interval == 0 or done == setting.steps:
            curve.append([done, training.validate()])
    points = {}
    training.optimizer.eval()
    points["x"] = losses(training, setting)
    training.optimizer.train()
    inner = training.optimizer
    while isinstance(inner, Wrapper):
        inner = inner.inner
    if recipe.get("correction") == "transport":
        points["y"] = losses(training, setting)
    with torch.no_grad():
        if isinstance(inner, QHAdamW):
            kept = [p.clone() for p in params]
            torch._foreach_copy_(params, inner.behind())
            points["behind"] = losses(training, setting)
            torch._foreach_copy_(params, kept)
        for decay, average in averages.items():
            num = min(1500, setting.steps)
            torch._foreach_div_(average, 1 - decay**num)
            torch._foreach_copy_(params, average)
            points[f"average {decay}"] = losses(training, setting)
    return dict(curve=curve, ends=points)


def main() -> None:
    setting, recipe, seed = map(json.loads, sys.argv[1:4])
    write_json(Path(sys.argv[4]), train(setting, recipe, seed))


if __name__ == "__main__":
    main()
