"""What README and docs/guide.md show runs as it stands there, and does what the text
says.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import marsopt
from marsopt import MARS

ROOT = Path(__file__).parent.parent


def snippets(page: Path) -> dict[str, list[str]]:
    """The code of each heading, or of each bold beginning of a paragraph."""
    found, where, code = {}, "", []
    for line in [*page.read_text().splitlines(), "end"]:
        if line.startswith("    ") or (code and not line):
            code.append(line.removeprefix("    "))
            continue
        if code:
            found.setdefault(where, []).append("\n".join(code).strip() + "\n")
            code = []
        named = re.match(r"#+ (.*)|\*\*(.*?)\.?\*\*", line)
        where = (named[1] or named[2]) if named else where
    return found


SNIPPETS = snippets(ROOT / "docs" / "guide.md")
README = snippets(ROOT / "README.md")


@pytest.fixture
def names():
    """What the snippets take for granted."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    loader = list(zip(torch.randn(8, 5, 4), torch.randn(8, 5, 2), strict=True))
    options = dict(lr=1e-2, correction="transport", gamma=0.1, compile=False)
    optimizer = MARS(model.parameters(), **options)
    optimizer.follow(model)
    return dict(
        MARS=lambda *given, **more: MARS(*given, **dict(compile=False) | more),
        copy=copy,
        loader=loader,
        loss_fn=nn.functional.mse_loss,
        marsopt=marsopt,
        model=model,
        optimizer=optimizer,
        torch=torch,
    )


def run(name, names, part=None):
    """Run the code under ``name``: all of it, or one part."""
    parts = SNIPPETS[name] if part is None else [SNIPPETS[name][part]]
    for code in parts:
        exec(compile(code, f"guide.md: {name}", "exec"), names)
    return SimpleNamespace(**names)


def loss(names):
    model, pairs = names["model"], names["loader"]
    model.eval()
    with torch.no_grad():
        found = sum(float(nn.functional.mse_loss(model(x), y)) for x, y in pairs)
    model.train()
    return found


def test_following_a_model_is_one_line(names):
    (line,) = [code for code in SNIPPETS["Corrections"] if "follow" in code]
    exec(line, names)


def test_fine_tuning(names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    start = copy.deepcopy(names["model"].state_dict())
    torch.save(start, "pretrained.pt")
    before = loss(names)
    nn.init.zeros_(names["model"][0].weight)
    found = run("Fine-tuning", names)
    assert loss(names) < before
    tuned = torch.load("tuned.pt")
    for (name, x), (_, held) in zip(
        tuned.items(), found.optimizer.iterates(), strict=True
    ):
        assert torch.equal(x, held)
        assert 0 < (x - start[name]).abs().max() < 8 * 3.1e-3


def test_exponential_moving_average(names):
    seen, step = [], names["optimizer"].step

    def watched():
        step()
        seen.append([x.clone() for _, x in names["optimizer"].iterates()])

    names["optimizer"].step = watched
    start = [p.detach().clone() for p in names["model"].parameters()]
    found = run("Exponential moving average", names)
    for xs in seen:
        start = [s.lerp(x, 1e-3) for s, x in zip(start, xs, strict=True)]
    for want, got in zip(start, found.averaged.parameters(), strict=True):
        torch.testing.assert_close(got.detach(), want, rtol=0, atol=1e-7)


def test_stochastic_weight_averaging(names):
    seen, switch = [], names["optimizer"].eval

    def watched():
        switch()
        seen.append([p.detach().clone() for p in names["model"].parameters()])

    names["optimizer"].eval = watched
    found = run("Stochastic weight averaging", names)
    assert len(seen) == 3
    for i, got in enumerate(found.averaged.module.parameters()):
        want = torch.stack([xs[i] for xs in seen]).mean(0)
        torch.testing.assert_close(got.detach(), want, rtol=0, atol=1e-6)


def test_gradient_accumulation(names):
    twin = copy.deepcopy(names["model"])
    other = MARS(twin.parameters(), lr=1e-2, correction="transport", gamma=0.1,
                 compile=False)  # fmt: skip
    run("Gradient accumulation", names)
    for half in (names["loader"][:4], names["loader"][4:]):
        inputs, labels = (torch.cat(part) for part in zip(*half, strict=True))
        nn.functional.mse_loss(twin(inputs), labels).backward()
        other.step()
        other.zero_grad()
    for p, q in zip(names["model"].parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


def test_grad_scaler(names):
    before = loss(names)
    run("GradScaler", names)
    assert loss(names) < before


def test_one_cycle_without_momentum(names):
    found = run("OneCycleLR", names)
    rates = []
    for _ in range(100):
        for p in found.model.parameters():
            p.grad = torch.zeros_like(p)
        found.optimizer.step()
        rates.append(found.optimizer.param_groups[0]["lr"])
        found.scheduler.step() if len(rates) < 100 else None
    assert found.optimizer.param_groups[0]["betas"] == (0.95, 0.99)
    assert max(rates) == pytest.approx(6e-3)


def test_functional_state_is_saved_by_its_tensors(names, tmp_path):
    params = {n: p.detach() for n, p in names["model"].named_parameters()}
    state = marsopt.mars().init(params)
    names.update(params=params, state=state, folder=tmp_path)
    (code,) = [c for c in SNIPPETS["Without an optimizer object"] if "dcp" in c]
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        exec(code, names)


def test_many_runs_at_once_and_gradients_of_a_run(names):
    """The rate's derivative beside finite differences, in float64."""
    model = names["model"].double()
    batches = [(x.double(), y.double()) for x, y in names["loader"]]
    models = [copy.deepcopy(model), nn.Sequential(*map(copy.deepcopy, model))]
    with torch.no_grad():
        models[1][0].weight.add_(0.1)
    tasks = [SimpleNamespace(support=batches[i], query=batches[i + 1]) for i in (0, 2)]
    names.update(batches=batches[:3], held_out=batches[3], models=models, tasks=tasks)
    found = run("Many runs at once, and gradients of a run", names)
    alone = [found.train(found.params, rate) for rate in found.rates]
    torch.testing.assert_close(found.by_rate, torch.stack(alone))
    first = found.train(found.params, torch.tensor(1e-2))
    torch.testing.assert_close(found.by_seed[0], first)
    assert found.by_seed[1] != first
    around = [
        found.train(found.params, torch.tensor(1e-2 + d, dtype=torch.float64))
        for d in (1e-6, -1e-6)
    ]
    slope = float(around[0] - around[1]) / 2e-6
    assert float(found.by_lr) == pytest.approx(slope, rel=1e-4)

    def outer(bias):
        params = {**found.params, "2.bias": bias}
        return sum(found.adapted(params, task) for task in tasks)

    at = found.params["2.bias"]
    for i, d in enumerate(1e-6 * torch.eye(2, dtype=torch.float64)):
        slope = float(outer(at + d) - outer(at - d)) / 2e-6
        assert float(found.meta["2.bias"][i]) == pytest.approx(slope, rel=1e-4)


def test_the_readmes_start_trains_a_model_with_embeddings(caplog):
    """And says nothing but what it compiles: rates and embeddings are chosen."""

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.inner = nn.Embedding(12, 8), nn.Linear(8, 8)
            self.head = nn.Linear(8, 12)

        def forward(self, x):
            return self.head(self.inner(self.embed(x)).relu())

    torch.manual_seed(0)
    model, x = Words(), torch.arange(12)
    (code,) = README["Start here"]
    code = code.replace("max_norm=1.0)", "max_norm=1.0, compile=False)")
    names = dict(model=model, loss_fn=nn.functional.cross_entropy)
    exec(
        compile(code, "README.md", "exec"), names | {"batches": [(x, x.roll(1))] * 200}
    )
    model.eval()
    with torch.no_grad():
        assert nn.functional.cross_entropy(model(x), x.roll(1)) < 1.0
    assert not [r.message for r in caplog.records if r.levelname == "WARNING"]


def test_the_readmes_loop_and_rule(names):
    model = names["model"]
    names["MARS"] = lambda *given, **more: MARS(*given, compile=False, **more)
    (code,) = README["Your own loop"]
    exec(compile(code, "README.md", "exec"), names)
    assert names["optimizer"].param_groups[0]["lr_1d"] == 3e-3
    params = {name: p.detach() for name, p in model.named_parameters()}
    names |= dict(params=params, grads=params)
    (code,) = README["Pure functions"]
    exec(compile(code, "README.md", "exec"), names)
    assert not torch.equal(names["params"]["0.bias"], params["0.bias"])
