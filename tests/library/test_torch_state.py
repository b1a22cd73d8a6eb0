"""State of torch.optim's AdamW and Muon goes on here: the next step is theirs to 1e-6.

In the step that is compared both sides orthogonalize by one Newton-Schulz in float64:
each library rounds to bfloat16 in an order of its own, which is 1e-2 of a step.
"""

from __future__ import annotations

import copy
import functools
import logging

import pytest
import torch
from torch import nn

import marsopt
from marsopt import MARS
from marsopt.optim.torch_state import ADAMW, MUON, OPTIONAL
from tests.library.test_param_groups import Replica
from tests.stacking import same

SHAPES = {
    "embed": (12, 4),
    "in": (4, 8),
    "bias": (8,),
    "mid": (8, 4),
    "out": (8, 4),
    "head": (12, 4),
}
MATRICES, REST = ("in", "mid", "out"), ("embed", "bias", "head")
LR = 1e-2
TORCH_NS = "torch.optim._muon._zeropower_via_newtonschulz"
exact = functools.partial(marsopt.newton_schulz, dtype=torch.float64)


def orthogonal(x, *_, **__):
    return exact(x.double()).to(x.dtype)


def parameters():
    g = torch.Generator().manual_seed(1)
    return {n: nn.Parameter(torch.randn(s, generator=g)) for n, s in SHAPES.items()}


def step(optimizers, params, t):
    g = torch.Generator().manual_seed(t)
    for p in params.values():
        p.grad = torch.randn(p.shape, generator=g)
    for optimizer in optimizers:
        optimizer.step()


def pick(params, names, named=False):
    return [(n, params[n]) if named else params[n] for n in names]


BESIDE = dict(lr=LR, betas=(0.9, 0.95), weight_decay=0.1)


def torch_adamw(params, named=False):
    return [torch.optim.AdamW(pick(params, SHAPES, named), **BESIDE)]


def torch_pair(params, named=False):
    muon = torch.optim.Muon(pick(params, MATRICES, named), lr=LR, momentum=0.9)
    return [muon, torch.optim.AdamW(pick(params, REST, named), **BESIDE)]


def ours(params, mars_type, named=False, **options):
    """The matrices by a rule; embedding, head and bias by AdamW. Their groups are in
    another order than the model.
    """
    groups = [{"params": pick(params, SHAPES, named), "mars_type": "adamw", **BESIDE}]
    if mars_type != "adamw":
        groups = [
            {"params": pick(params, REST, named), "mars_type": "adamw", **BESIDE},
            {"params": pick(params, MATRICES[::-1] if named else MATRICES, named)}
            | {"mars_type": mars_type, **BESIDE},
        ]
    options = dict(ns_dtype=torch.float64, compile=False, lr=LR) | options
    return MARS(groups, mars_type=mars_type, **options)


def after_fifty(make, **how):
    """Parameters, optimizers of torch, and their state dicts: one, or a list."""
    params = parameters()
    optimizers = make(params, **how)
    for t in range(50):
        step(optimizers, params, t)
    saved = [copy.deepcopy(each.state_dict()) for each in optimizers]
    return params, optimizers, saved if len(saved) > 1 else saved[0]


@pytest.mark.parametrize("format, kind", [(ADAMW, "AdamW"), (MUON, "Muon")])
def test_the_keys_are_torchs(format, kind):
    """Which are those of this version; a new one has to be looked at."""
    made = getattr(torch.optim, kind)([nn.Parameter(torch.ones(2, 2))])
    assert made.defaults.keys() == format.group
    step([made], {"p": made.param_groups[0]["params"][0]}, 0)
    assert [*made.state.values()][0].keys() == format.state.keys() - OPTIONAL


@pytest.mark.parametrize("named", [False, True], ids=["order", "name"])
@pytest.mark.parametrize(
    "make, mars_type", [(torch_adamw, "adamw"), (torch_pair, "muon")]
)
def test_a_checkpoint_goes_on(make, mars_type, named, tmp_path, monkeypatch):
    params, optimizers, saved = after_fifty(make, named=named)
    torch.save(saved, tmp_path / "optimizer.pt")
    saved = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    monkeypatch.setattr(TORCH_NS, orthogonal)
    own = {name: nn.Parameter(p.detach().clone()) for name, p in params.items()}
    optimizer = ours(own, mars_type, named)
    optimizer.load_state_dict(saved)
    before = {name: p.detach().clone() for name, p in own.items()}
    step(optimizers, params, 50)
    step([optimizer], own, 50)
    for name, p in params.items():
        assert (p.detach() - before[name]).abs().max() > 1e-3
        torch.testing.assert_close(own[name], p, rtol=0, atol=1e-6)


# ---- docs/conformance.md's recipe, into for_model ------------------------------------


class Model(nn.Module):
    """Heads and embeddings of one shape, matrices of one shape."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.ln = nn.Embedding(9, 8), nn.LayerNorm(8)
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 9)

    def forward(self, x, labels=None):
        y = self.head(self.two(self.one(self.ln(self.embed(x)))))
        return {"loss": y.square().mean(), "logits": y}


def muon_and_adamw(model):
    """By order: AdamW has what Muon leaves."""
    hidden = [model.one.weight, model.two.weight]
    rest = [p for p in model.parameters() if all(p is not h for h in hidden)]
    return [torch.optim.Muon(hidden), torch.optim.AdamW(rest)]


def all_by_adamw(model):
    return [torch.optim.AdamW(model.parameters())]


def by_decay(model):
    """As the Trainer divides them."""
    groups = [{"params": []}, {"params": []}]
    for name, p in model.named_parameters():
        groups["bias" in name or "ln" in name]["params"].append(p)
    return [torch.optim.AdamW(groups)]


def name_groups(saved, model):
    names = [n for n, _ in model.named_parameters()]
    decayed = [n for n in names if "bias" not in n and "ln" not in n]
    saved["param_groups"][0]["param_names"] = decayed
    saved["param_groups"][1]["param_names"] = [n for n in names if n not in decayed]


@pytest.mark.parametrize("wrap", [lambda m: m, Replica, torch.compile])
@pytest.mark.parametrize("make", [muon_and_adamw, all_by_adamw, by_decay])
def test_a_state_by_order_goes_into_for_model(make, wrap):
    """In the order of model.parameters(), which for_model's groups have not."""
    theirs, model = Model(), Model()
    optimizers = make(theirs)
    theirs(torch.arange(9))["loss"].backward()
    for each in optimizers:
        each.step()
    rule = "moonlight" if make is muon_and_adamw else "adamw"
    optimizer = marsopt.for_model(wrap(model), rule, lr=LR, compile=False)
    saved = [copy.deepcopy(each.state_dict()) for each in optimizers]
    if make is by_decay:
        with pytest.raises(ValueError, match="set param_names"):
            optimizer.load_state_dict(saved[0])
        name_groups(saved[0], theirs)
    optimizer.load_state_dict(saved if len(saved) > 1 else saved[0])
    kept = {p: entry for each in optimizers for p, entry in each.state.items()}
    for p, q in zip(theirs.parameters(), model.parameters(), strict=True):
        for key in kept[p].keys() & optimizer.state[q].keys():
            assert torch.equal(kept[p][key], optimizer.state[q][key]), key
        assert {"exp_avg", "momentum_buffer"} & optimizer.state[q].keys()


def test_a_checkpoint_of_transformers_trainer_goes_on(tmp_path):
    """In the Trainer's own groups, with its schedule, as docs/conformance.md says."""
    transformers = pytest.importorskip("transformers")
    rows = [dict(x=torch.randint(0, 9, (4,)), labels=torch.zeros(4)) for _ in range(64)]

    def trained(steps, folder=None, **how):
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=steps, save_steps=50, weight_decay=0.1,
            use_cpu=True, report_to=[], disable_tqdm=True, learning_rate=LR,
            logging_strategy="no", lr_scheduler_type="cosine", optim="adamw_torch",
        )  # fmt: skip
        trainer = transformers.Trainer(Model(), arguments, train_dataset=rows, **how)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train(resume_from_checkpoint=folder)
        decays = [group["weight_decay"] for group in trainer.optimizer.param_groups]
        return decays, [p.detach() for p in trainer.model.parameters()]

    trained(50)
    options = dict(mars_type="adamw", lr=LR, max_norm=1.0, compile=False)
    how = dict(optimizer_cls_and_kwargs=(MARS, options))
    want, found = (trained(60, tmp_path / "checkpoint-50", **o) for o in ({}, how))
    assert found[0] == want[0] == [0.1, 0.0]
    torch.testing.assert_close(found[1], want[1], rtol=0, atol=1e-6)


# ---- and back: marsopt.to_torch ------------------------------------------------------

GOES_BACK = {
    "adamw": dict(mars_type="adamw", lr_1d=LR / 2, weight_decay_1d=0.0),
    "amsgrad": dict(mars_type="adamw", amsgrad=True, eps=1e-3),
    "muon": dict(mars_type="muon", lr_1d=LR / 2, weight_decay=0.3),
    "moonlight": dict(mars_type="moonlight", betas=(0.8, 0.9)),
    "tensors": dict(mars_type="muon", lr=torch.tensor(LR)),
}


@pytest.mark.parametrize("atol, dtype", [(1e-6, torch.float64), (2e-2 * LR, None)])
@pytest.mark.parametrize("options", GOES_BACK.values(), ids=GOES_BACK)
def test_torchs_next_step_is_ours(options, atol, dtype, monkeypatch):
    """And its state comes back as it was, but for the count of Muon's steps, of which
    torch keeps none. Without ``dtype`` by torch's own Newton-Schulz, in bfloat16.
    """
    params = parameters()
    options = dict(lr=LR, ns_dtype=dtype or torch.bfloat16, compile=False) | options
    optimizer = MARS([*params.items()], **options)
    for t in range(30):
        step([optimizer], params, t)
    if dtype is not None:
        monkeypatch.setattr(TORCH_NS, orthogonal)
    optimizers = [each for each in marsopt.to_torch(optimizer) if each is not None]
    assert len(optimizers) == (1 if options["mars_type"] == "adamw" else 2)
    before = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict([each.state_dict() for each in optimizers])
    for entry in before["state"].values():
        entry["step"] *= "momentum_buffer" not in entry
    same(optimizer.state_dict(), before)
    weights = {name: p.detach().clone() for name, p in params.items()}
    step([optimizer], params, 30)
    ours = {name: p.detach().clone() for name, p in params.items()}
    with torch.no_grad():
        for name, p in params.items():
            p.copy_(weights[name])
    step(optimizers, params, 30)
    for name, p in params.items():
        assert (p - weights[name]).abs().max() > 1e-3
        torch.testing.assert_close(p.detach(), ours[name], rtol=0, atol=atol)


def test_a_model_of_for_model_goes_back_with_its_schedule():
    model = Model()
    optimizer = marsopt.for_model(model, lr=LR, lr_1d=LR / 2, compile=False)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.1)
    muon, adamw = marsopt.to_torch(optimizer)
    moved = {p for each in (muon, adamw) for p in each.state}
    assert moved == {*model.parameters()}
    for each, lr in ((muon, LR), (adamw, LR / 2)):
        for group in each.param_groups:
            assert group["initial_lr"] == pytest.approx(lr)
            assert group["lr"] == pytest.approx(0.1 * lr)


LACKING = {
    "a correction": (dict(mars_type="mars-m"), "correction='approximate' in group 0"),
    "log_time": (dict(mars_type="moonlight", log_time=9.0), "log_time=9.0.*in group 0"),
    "SOAP": (dict(mars_type="soap"), "got 'soap' in group 0, expected"),
    "NorMuon": (dict(mars_type="normuon"), "got 'normuon' in group 0, expected"),
    "Lion": (dict(mars_type="lion"), "got 'lion' in group 0"),
    "NAdamW": (dict(mars_type="nadamw"), "got nesterov=True in group 0"),
    "splits": (dict(mars_type="muon", splits=2), "got splits=2 in group 0, expected"),
    "experts": (dict(mars_type="muon", matrices="batched"), "matrices='batched'"),
    "coefficients": (
        dict(mars_type="muon", ns_coefficients="polar_express"),
        "ns_coefficients='polar_express'",
    ),
    "cautious": (
        dict(mars_type="adamw", cautious_weight_decay=True),
        "cautious_weight_decay=True",
    ),
}


@pytest.mark.parametrize("options, message", LACKING.values(), ids=LACKING)
def test_what_torch_lacks_is_refused(options, message):
    params = parameters()
    if options.get("matrices") == "batched":
        params["experts"] = nn.Parameter(torch.ones(2, 4, 4))
    optimizer = MARS(params.values(), compile=False, **options)
    with pytest.raises(ValueError, match=message):
        marsopt.to_torch(optimizer)


# ---- what is taken, and what begins again --------------------------------------------


@pytest.mark.parametrize(
    "mars_type, correction, key",
    [
        ("muon", None, "momentum_buffer"),
        ("mars-m", None, "exp_avg"),
        ("mars-shampoo", "exact", "exp_avg"),
    ],
)
def test_an_average_goes_on_under_its_name_here(mars_type, correction, key, caplog):
    """Hyperparameters stay, and one line says so. MARS's gradient before the first
    starts at zero.
    """
    params, (muon, _), saved = after_fifty(torch_pair)
    own = parameters()
    optimizer = ours(own, mars_type, correction=correction)
    optimizer.param_groups[1]["lr"] = lr = torch.tensor(0.5)
    before = [{**group, "params": 0} for group in optimizer.param_groups]
    caplog.clear()
    optimizer.load_state_dict(saved)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert record.getMessage().endswith(
        "; state of torch.optim.Muon and torch.optim.AdamW, by order; hyperparameters "
        "stay"
    )
    entry = optimizer.state[own["mid"]]
    assert torch.equal(entry[key], muon.state[params["mid"]]["momentum_buffer"])
    assert not entry.get("last_grad", torch.zeros(1)).any()
    assert optimizer.param_groups[1]["lr"] is lr
    assert [{**group, "params": 0} for group in optimizer.param_groups] == before


def test_parameters_that_never_moved_begin_and_frozen_ones_may_be_absent():
    params = parameters()
    optimizers = torch_pair(params)
    params["mid"].requires_grad_(False)
    for p in params.values():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    for each in optimizers:
        each.step()
    own = {**parameters(), "frozen": nn.Parameter(torch.ones(3), requires_grad=False)}
    optimizer = ours(own, "muon")
    optimizer.add_param_group({"params": own["frozen"], "mars_type": "adamw"})
    optimizer.load_state_dict([each.state_dict() for each in optimizers])
    assert not optimizer.state[own["mid"]]["momentum_buffer"].any()
    assert optimizer.state[own["out"]]["momentum_buffer"].any()
    assert own["frozen"] not in optimizer.state


# ---- what is refused -----------------------------------------------------------------


def changed(entry=None, group=None):
    """Change the first entry and the first group of Muon's state dict."""

    def change(saved):
        saved[0]["state"][0] |= entry or {}
        saved[0]["param_groups"][0] |= group or {}
        return saved

    return change


def of(kind, **options):
    """The state of another optimizer of torch."""

    def change(_):
        params = parameters()
        made = getattr(torch.optim, kind)(params.values(), lr=LR, **options)
        step([made], params, 0)
        return made.state_dict()

    return change


def without(key, *place):
    """Less a key of AdamW's, at a place of its state dict."""

    def change(saved):
        found = saved[1]
        for step in place:
            found = found[step]
        del found[key]
        return saved

    return change


UNKNOWN = "got the state of an optimizer with .*: load only the model"
WRONG = {
    "a key of the state more": (changed(entry={"slow": torch.ones(4, 8)}), UNKNOWN),
    "a key of the state less": (without("exp_avg_sq", "state", 0), UNKNOWN),
    "a key of the group less": (
        without("decoupled_weight_decay", "param_groups", 0),
        UNKNOWN,
    ),
    "Adam": (of("Adam"), UNKNOWN),
    "maximize": (of("AdamW", maximize=True), UNKNOWN),
    "SGD": (of("SGD", momentum=0.9), UNKNOWN),
    "MARS's in a list": (
        lambda s: [ours(parameters(), "moonlight").state_dict()],
        UNKNOWN,
    ),
    "a list as a tensor": (
        changed(entry={"momentum_buffer": [1.0]}),
        "got a list as 'momentum_buffer' of parameter 0 of group 1",
    ),
    "shape": (
        changed(entry={"momentum_buffer": torch.ones(8, 4)}),
        r"shape \(8, 4\) for parameter 0 of group 1, by order, .* set param_names",
    ),
    "fewer": (
        changed(group={"params": [0, 1]}),
        "got state of 2 parameters with a momentum and 3 of AdamW, expected 3 and 3",
    ),
    "too few names": (
        changed(group={"param_names": ["in"]}),
        "got 1 param_names in a param group of 3 parameters, expected one for each",
    ),
    "no dict": (lambda s: [*s, None], "got a NoneType"),
    "a model's": (lambda s: [*s, {"w": 1}], r"got a state dict of \['w'\]"),
}


@pytest.mark.parametrize("change, message", WRONG.values(), ids=WRONG)
def test_state_that_is_not_known_is_refused_and_nothing_has_changed(change, message):
    own = parameters()
    optimizer = ours(own, "moonlight")
    step([optimizer], own, 0)
    before = copy.deepcopy(optimizer.state_dict())
    saved = change(after_fifty(torch_pair)[2])
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    same(optimizer.state_dict(), before)


@pytest.mark.parametrize(
    ("mars_type", "options", "message"),
    [
        ("lion", {}, "expected 0 and 3 of 6"),
        ("moonlight", dict(nesterov=0.1), "counts no steps, expected a count"),
    ],
)
def test_a_rule_that_needs_more_refuses(mars_type, options, message):
    optimizer = ours(parameters(), mars_type)
    optimizer.param_groups[1] |= options
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(after_fifty(torch_pair)[2])


def test_other_names_are_refused():
    _, _, saved = after_fifty(torch_adamw, named=True)
    optimizer = ours(parameters(), "muon", named=True)
    with pytest.raises(ValueError, match="state of parameter 'embed' twice"):
        optimizer.load_state_dict([saved, saved])
    with pytest.raises(ValueError, match="AdamW for parameter 'out', which 'muon' upd"):
        optimizer.load_state_dict(saved)
    names = saved["param_groups"][0]["param_names"]
    saved["param_groups"][0]["param_names"] = [f"net.{name}" for name in names]
    with pytest.raises(ValueError, match="'bias' in MARS only"):
        optimizer.load_state_dict(saved)
