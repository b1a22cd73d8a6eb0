"""What README, docs/guide.md and two pages of docs/api show runs as it stands there,
and does what the text says. Beside this file it needs these pages and an installed
marsopt alone (test_package.py, tests/archives.sh).
"""

from __future__ import annotations

import ast
import contextlib
import copy
import importlib.util
import re
import runpy
import shlex
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import marsopt
from marsopt import MARS
from marsopt.rules.registry import CORRECTIONS

ROOT = Path(__file__).parents[2]


HEADING = re.compile(r"#+ (.*)|\*\*(.*?)\.?\*\*")


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
        named = HEADING.match(line)
        where = (named[1] or named[2]) if named else where
    return found


NAMES = ("README", "docs/guide", "docs/api/functions", "docs/api/components")
FILES = [ROOT / f"{name}.md" for name in NAMES]
PAGES = {file.name: snippets(file) for file in FILES}
README, SNIPPETS = PAGES["README.md"], PAGES["guide.md"] | PAGES["functions.md"]


def inline(page: Path) -> dict[str, list[str]]:
    """The code within the prose and the tables of each heading, as of ``snippets``."""
    prose, where = {}, ""
    for line in page.read_text().splitlines():
        if named := HEADING.match(line):
            where = named[1] or named[2]
        if not line.startswith("    "):
            prose.setdefault(where, []).append(line)
    return {h: re.findall("`([^`]+)`", " ".join(rows)) for h, rows in prose.items()}


def is_python(code: str) -> bool:
    with contextlib.suppress(SyntaxError):
        return bool(ast.parse(code))
    return False


# {(page, heading): its Python}, and all lines of shell, in blocks and in the prose
CODE = {}
COMMANDS = [
    code
    for file in FILES
    for parts in inline(file).values()
    for code in parts
    if re.match(r"(python|torchrun) |make \w", code)
]
for page, headings in PAGES.items():
    for heading, parts in headings.items():
        if code := [part for part in parts if is_python(part)]:
            CODE[page, heading] = code
        others = [part for part in parts if not is_python(part)]
        COMMANDS += [line for part in others for line in part.splitlines()]


@pytest.fixture
def names(monkeypatch):
    """What the snippets take for granted. To compile would take a minute."""
    monkeypatch.setitem(MARS.__init__.__kwdefaults__, "compile", False)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    loader = list(zip(torch.randn(8, 5, 4), torch.randn(8, 5, 2), strict=True))
    optimizer = MARS(model.parameters(), lr=1e-2)
    return dict(
        MARS=MARS,
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
        exec(compile(code, name, "exec"), names)
    return SimpleNamespace(**names)


def rows(num: int, *shape: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape)) for _ in range(num)]


@contextlib.contextmanager
def own_names():
    """What is registered inside has no name after it."""
    tables = [(one, dict(one)) for one in (marsopt.REGISTRY, CORRECTIONS)]
    try:
        yield
    finally:
        for one, before in tables:
            one.clear()
            one.update(before)


@contextlib.contextmanager
def others(*packages: str):
    """Import a trainer's packages, or skip; what it warns of is its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield [pytest.importorskip(package) for package in packages]


class WithLoss(nn.Module):
    """A model as Hugging Face's Trainer calls it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x, labels):
        return dict(loss=nn.functional.mse_loss(self.inner(x), labels))


@contextlib.contextmanager
def setting(heading, names, folder):
    """Give ``names`` what the code under a heading takes for granted, and look at what
    it has made.
    """
    model, loader = names["model"], names["loader"]
    inputs, labels = loader[0]
    params = {name: p.detach() for name, p in model.named_parameters()}
    names |= dict(batches=loader[:3], params=params, grads=params, lr=1e-2, num_steps=3)
    names["groups"] = marsopt.param_groups(model, "mars-m", lr=6e-3)
    names["config"] = SimpleNamespace(optimizer=None)
    start = [p.detach().clone() for p in model.parameters()]

    def loss(pair):
        return nn.functional.mse_loss(model(pair[0]), pair[1])

    if heading in ("Lightning", "accelerate"):  # a list would be one of loaders
        names["loader"] = torch.utils.data.DataLoader(loader, batch_size=None)
    match heading:
        case "Guide":
            names["loss"] = loss(loader[0])
            yield
        case "Param groups":
            matrices = [p for p in model.parameters() if p.ndim == 2]
            vectors = [p for p in model.parameters() if p.ndim == 1]
            names |= dict(matrices=matrices, norms_and_biases=vectors)
            yield
        case "Master weights":
            names["batches"] = [(x.bfloat16(), y.bfloat16()) for x, y in loader[:3]]
            yield
            for name, p in model.named_parameters():
                weight = names["weights"][name]
                assert torch.equal(weight.bfloat16(), p)
                assert not torch.equal(weight, p.float())
        case "Independent of the learning rate":
            names["optimizer"] = marsopt.for_model(model, "moonlight", lr=1e-2)
            yield
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            names["optimizer"].step()
            for p, x in zip(model.parameters(), start, strict=True):
                torch.testing.assert_close(p.detach(), (1 - 1e-4) * x)
        case "Flat groups and checkpoints":
            names["rule"] = marsopt.mars(mars_type="moonlight")
            names |= dict(x=inputs, folder=folder, loss=lambda y: (y - labels).norm())
            names["functional_call"] = torch.func.functional_call
            with pytest.warns(UserWarning, match="torch.distributed is disabled"):
                yield
            assert not torch.equal(names["flat"].unpack()["0.bias"], params["0.bias"])
        case "A rule of your own":
            with own_names():
                yield
                ones = {n: torch.ones_like(p) for n, p in params.items()}
                state = names["rule"].init(params)
                moved, state = names["rule"].step(params, ones, state, lr=1e-3)
                for p in model.parameters():
                    p.grad = torch.ones_like(p)
                names["optimizer"].step()
            # c = (1 + gamma) g, clipped; v = (1 - alpha) c^2
            for p, x, q in zip(model.parameters(), start, moved.values(), strict=True):
                torch.testing.assert_close(x - p, torch.full_like(p, 1e-3 / 0.1**0.5))
                torch.testing.assert_close(x - q, torch.full_like(p, 1e-3 / 0.1))
        case "Many runs at once, and gradients of a run":
            tasks = [SimpleNamespace(support=loader[0], query=loader[1])]
            names |= dict(held_out=loader[3], models=[model, copy.deepcopy(model)])
            names["tasks"] = tasks
            yield
        case "Fused projections, heads, experts (MoE)":
            sizes = dict(qkv=6144, gate_up=4, q_proj=6)
            layers = {name: nn.Linear(2, num) for name, num in sizes.items()}
            names |= dict(model=nn.ModuleDict(layers), experts=rows(1, 3, 4, 6))
            names |= dict(num_heads=3, q_proj=rows(1, 6, 6), qkv=rows(1, 6144, 2))
            names |= dict(kernels=rows(1, 4, 3, 2, 2), others=rows(2, 5))
            yield
        case "torchtitan":
            pytest.importorskip("torchtitan")
            yield
            built = names["config"].optimizer.build(model_parts=[model])
            assert any(type(optimizer) is MARS for optimizer in built)
        case "Hugging Face's Trainer":
            with others("transformers", "accelerate") as (transformers, _):
                short = dict(max_steps=3, logging_steps=1, use_cpu=True)
                names["transformers"] = SimpleNamespace(
                    Trainer=transformers.Trainer,
                    TrainingArguments=partial(transformers.TrainingArguments, **short),
                )
                pairs = zip(inputs, labels, strict=True)
                names["dataset"] = [dict(x=x, labels=y) for x, y in pairs]
                names |= dict(model=WithLoss(model), folder=str(folder))
                yield
            logged = [r for r in names["trainer"].state.log_history if "loss" in r]
            assert [row["num_skipped"] for row in logged] == [0, 0, 0]
            assert not torch.equal(next(model.parameters()), start[0])
        case "Lightning":
            with others("lightning") as (lightning,):
                off = ("logger", "enable_progress_bar", "enable_checkpointing")
                options = dict.fromkeys(off, False) | dict(accelerator="cpu")
                names["lightning"] = SimpleNamespace(
                    LightningModule=lightning.LightningModule,
                    Trainer=partial(lightning.Trainer, **options),
                )
                yield
            assert not torch.equal(next(model.parameters()), start[0])
        case "accelerate":
            with others("accelerate") as (names["accelerate"],):
                yield
            assert not torch.equal(next(model.parameters()), start[0])
        case "CUDA graphs":
            names["device"] = "cpu"
            yield
        case "Back to torch.optim":
            names["optimizer"] = marsopt.for_model(model, "moonlight", lr=1e-2)
            yield
            moved = {p for name in ("muon", "adamw") for p in names[name].state}
            assert moved == {*model.parameters()}
        case _:
            yield


@pytest.mark.parametrize(("page", "heading"), CODE, ids=map(": ".join, CODE))
def test_what_is_shown_runs(page, heading, names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with setting(heading, names, tmp_path):
        for code in CODE[page, heading]:
            exec(compile(code, f"{page}: {heading}", "exec"), names)


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_that_are_shown_exist(line, monkeypatch):
    """Those of the library take the options that are shown; those of the checkout are
    there, where there is one.
    """
    words = shlex.split(line, comments=True)
    module = words[words.index("-m") + 1] if "-m" in words else None
    if module and module.startswith("marsopt."):
        options = words[words.index("-m") + 2 :]
        monkeypatch.setattr("sys.argv", [module, *options, "--help"])
        with pytest.raises(SystemExit, match="^0$"):
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    if words[0] == "pip":
        assert words == ["pip", "install", "."] and (ROOT / "pyproject.toml").exists()
        return
    assert words[0] in ("make", "python", "torchrun")
    if not (ROOT / "Makefile").exists():
        pytest.skip("a command of the checkout")
    if module:
        assert importlib.util.find_spec(module)
    else:
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M)


def test_gradient_accumulation(names):
    twin = copy.deepcopy(names["model"])
    other = MARS(twin.parameters(), lr=1e-2, compile=False)
    run("Gradient accumulation", names)
    for half in (names["loader"][:4], names["loader"][4:]):
        inputs, labels = (torch.cat(part) for part in zip(*half, strict=True))
        nn.functional.mse_loss(twin(inputs), labels).backward()
        other.step()
        other.zero_grad()
    for p, q in zip(names["model"].parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


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


def test_the_readmes_start_trains_a_model_with_embeddings(names, caplog):
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
    caplog.clear()
    names |= dict(model=model, batches=[(x, x.roll(1))] * 200, num_steps=200)
    names["loss_fn"] = nn.functional.cross_entropy
    exec(compile(code, "README.md", "exec"), names)
    model.eval()
    with torch.no_grad():
        assert nn.functional.cross_entropy(model(x), x.roll(1)) < 1.0
    assert not [r.message for r in caplog.records if r.levelname == "WARNING"]
