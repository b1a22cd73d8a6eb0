"""State that other libraries have saved goes on here: the next step is theirs to 1e-6.

Fifty steps and their files come from the packages themselves where an index has them,
else from the published formulas, in our own words. In the step that is compared both
sides orthogonalize by one Newton-Schulz in float64: each library rounds to bfloat16 in
an order of its own, which is 1e-2 of a step.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import logging
import math

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import nn

import marsopt
from marsopt import MARS
from tests.library.test_conformance import PORTS, needs_ports
from tests.library.test_param_groups import Replica

# in the order of a model, which is none of falling shapes
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


def pick(params, names):
    return [params[n] for n in names]


# ---- published formulas --------------------------------------------------------------


class Formula(torch.optim.Optimizer):
    """An optimizer whose ``move(p, g, state, group)`` is a published formula."""

    def __init__(self, params, move, **defaults):
        super().__init__(params, defaults)
        self.move = move

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            if "step" in group:  # dion's
                group["step"] += 1
            for p in group["params"]:
                p.mul_(1 - group["lr"] * group.get("wd", group.get("weight_decay")))
                self.move(p, p.grad, self.state[p], group)


def momentum(p, g, buffer, mu, nesterov):
    """b <- mu b + g, and what of it is orthogonalized."""
    buffer.mul_(mu).add_(g)
    return g + mu * buffer if nesterov else buffer


def adam(p, g, m, v, t, lr, betas, eps, *, early_eps):
    beta1, beta2 = betas
    m.lerp_(g, 1 - beta1)
    v.lerp_(g * g, 1 - beta2)
    root = math.sqrt(1 - beta2**t)
    denominator = (v.sqrt() + eps) / root if early_eps else v.sqrt() / root + eps
    p.sub_(lr / (1 - beta1**t) * m / denominator)


def moonlight(p, g, state, group):
    """arXiv 2502.16982, with the state of MoonshotAI/Moonlight's toy_train.py."""
    if state["use_muon"]:
        buffer = state.setdefault("momentum_buffer", torch.zeros_like(p))
        u = momentum(p, g, buffer, group["momentum"], group["nesterov"])
        scale = 0.2 * math.sqrt(max(p.shape))
        p.sub_(group["lr"] * scale * orthogonal(u))
        return
    m, v = (state.setdefault(k, torch.zeros_like(p)) for k in ("moment1", "moment2"))
    t = state["step"] = state.get("step", 0) + 1
    betas, eps = group["adamw_betas"], group["adamw_eps"]
    adam(p, g, m, v, t, group["lr"], betas, eps, early_eps=True)


def dion(p, g, state, group):
    """microsoft/dion's Muon and NorMuon (arXiv 2510.05491), with adjust_lr="rms_norm"
    and AdamW beside them.
    """
    m = state.setdefault("momentum", torch.zeros_like(p))
    lr, t = group["lr"], group["step"]
    if group["algorithm"] == "adamw":
        v = state.setdefault("variance", torch.zeros_like(p))
        count = state.setdefault("step_dev", torch.zeros(())).add_(1)
        betas = group["beta1"], group["beta2"]
        assert float(count) == t
        adam(p, g, m, v, t, lr, betas, group["epsilon"], early_eps=False)
        return
    o = orthogonal(momentum(p, g, m, group["mu"], group["nesterov"]))
    if group["algorithm"] == "normuon":
        r = state.setdefault("variance_neuron", torch.zeros_like(p[:, :1]))
        r.lerp_((o * o).mean(1, keepdim=True), 1 - group["muon_beta2"])
        scaled = o / (r.sqrt() + 1e-8)
        o = scaled * (o.norm() / scaled.norm())
    p.sub_(lr * 0.2 * math.sqrt(max(p.shape)) * o)


# ---- the libraries -------------------------------------------------------------------


def torch_adamw(params):
    options = dict(lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    return [torch.optim.AdamW(params.values(), **options)]


def torch_pair(params):
    muon = torch.optim.Muon(pick(params, MATRICES), lr=LR, momentum=0.9)
    beside = dict(lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    return [muon, torch.optim.AdamW(pick(params, REST), **beside)]


def jordan_module():
    spec = importlib.util.spec_from_file_location("jordan", PORTS / "muon.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def jordan(params, module):
    """As the distributed class leaves them, the matrices are sorted by falling size."""
    falling = sorted(pick(params, MATRICES), key=lambda p: p.size(), reverse=True)
    beside = dict(lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    return [
        module.SingleDeviceMuonWithAuxAdam(
            [
                dict(params=pick(params, REST), use_muon=False, **beside),
                dict(
                    params=falling, use_muon=True, lr=LR, momentum=0.9, weight_decay=0.1
                ),
            ]
        )
    ]


def of_moonlight(params):
    options = dict(
        wd=0.1, momentum=0.9, nesterov=True, ns_steps=5, adamw_betas=(0.9, 0.95)
    )
    ordered = pick(params, MATRICES + REST)
    made = Formula(ordered, moonlight, lr=LR, adamw_eps=1e-8, **options)
    for name, p in params.items():
        made.state[p]["use_muon"] = name in MATRICES
    return [made]


def of_dion(params, algorithm):
    options = dict(
        mu=0.9, beta1=0.9, beta2=0.95, weight_decay=0.1, cautious_wd=False, step=0,
        epsilon=1e-8, nesterov=algorithm == "muon", flatten=False, adjust_lr="rms_norm",
        algorithm=algorithm, muon_beta2=0.95,
    )  # fmt: skip
    rest = {"params": pick(params, REST), "algorithm": "adamw"}
    groups = [{"params": pick(params, MATRICES)}, rest]
    return [Formula(groups, dion, lr=LR, **options)]


# ---- the same of MARS ----------------------------------------------------------------


def ours(params, mars_type, *, named=False, correction=None, **beside):
    """The matrices by a rule, embedding, head and bias by AdamW, in two groups that lie
    between one another in the model.
    """

    def part(names):
        return [(n, params[n]) for n in names] if named else pick(params, names)

    common = dict(lr=LR, weight_decay=0.1, betas=(0.9, 0.95))
    if mars_type == "adamw":
        return MARS(part(params), mars_type="adamw", compile=False, **common)
    groups = [
        {"params": part(REST), "mars_type": "adamw", **common, **beside},
        {"params": part(MATRICES), "mars_type": mars_type, **common},
    ]
    return MARS(
        groups, ns_dtype=torch.float64, correction=correction, compile=False, lr=LR
    )


def saved_by(optimizers, tmp_path):
    """What lies in their file."""
    state = [each.state_dict() for each in optimizers]
    torch.save(state[0] if len(state) == 1 else state, tmp_path / "optimizer.pt")
    return torch.load(tmp_path / "optimizer.pt", weights_only=True)


def after_fifty(make):
    params = parameters()
    optimizers = make(params)
    for t in range(50):
        step(optimizers, params, t)
    return params, optimizers


def goes_on(params, optimizers, saved, mars_type, **options):
    """Take step 51 on both sides, and compare."""
    own = {name: nn.Parameter(p.detach().clone()) for name, p in params.items()}
    optimizer = ours(own, mars_type, **options)
    optimizer.load_state_dict(saved)
    before = {name: p.detach().clone() for name, p in own.items()}
    step(optimizers, params, 50)
    step([optimizer], own, 50)
    for name, p in params.items():
        assert (p.detach() - before[name]).abs().max() > 1e-3
        torch.testing.assert_close(own[name], p, rtol=0, atol=1e-6)
    return optimizer


@pytest.mark.parametrize(
    ("make", "mars_type", "beside"),
    [
        (torch_adamw, "adamw", {}),
        (torch_pair, "muon", {}),
        (of_moonlight, "moonlight", dict(epsilon_hat=True)),
        (functools.partial(of_dion, algorithm="muon"), "moonlight", {}),
        (functools.partial(of_dion, algorithm="normuon"), "normuon", {}),
    ],
    ids=["AdamW", "Muon and AdamW", "Moonlight", "dion's Muon", "dion's NorMuon"],
)
def test_a_checkpoint_goes_on(make, mars_type, beside, tmp_path, monkeypatch):
    params, optimizers = after_fifty(make)
    saved = saved_by(optimizers, tmp_path)
    monkeypatch.setattr(TORCH_NS, orthogonal)
    goes_on(params, optimizers, saved, mars_type, **beside)


@needs_ports
def test_a_checkpoint_of_jordans_package_goes_on(tmp_path, monkeypatch):
    module = jordan_module()
    params, optimizers = after_fifty(functools.partial(jordan, module=module))
    saved = saved_by(optimizers, tmp_path)
    monkeypatch.setattr(module, "zeropower_via_newtonschulz5", orthogonal)
    goes_on(params, optimizers, saved, "muon")


def test_a_checkpoint_of_torchtitan_goes_on_by_name(tmp_path, monkeypatch):
    """The container's flat form through DCP, read without a model; the names lie in
    another order here.
    """
    pytest.importorskip("torchtitan")
    from train.engine.titan_cpu import prepare

    prepare()
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    from torchtitan.components.optimizer.utils import get_flat_optim_state_dict

    def make(params):
        named = {names: [(n, params[n]) for n in names] for names in (MATRICES, REST)}
        beside = dict(lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
        muon = torch.optim.Muon(named[MATRICES], lr=LR, momentum=0.9)
        return [muon, torch.optim.AdamW(named[REST], **beside)]

    params, optimizers = after_fifty(make)
    flat = {}
    for optimizer in optimizers:
        flat |= get_flat_optim_state_dict(optimizer)
    with pytest.warns(UserWarning, match="in a single process"):
        torch.distributed.checkpoint.save(
            {"optimizer": flat}, checkpoint_id=tmp_path / "step-50", no_dist=True
        )
    dcp_to_torch_save(tmp_path / "step-50", tmp_path / "whole.pt")
    saved = torch.load(tmp_path / "whole.pt", weights_only=True)["optimizer"]
    assert any(key.startswith("state.mid.") for key in saved)
    saved = dict(sorted(saved.items()))
    monkeypatch.setattr(TORCH_NS, orthogonal)
    goes_on(params, optimizers, saved, "muon", named=True)


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


# ---- what is taken, and what begins again --------------------------------------------


def test_one_line_says_what_was_taken(caplog):
    params, optimizers = after_fifty(of_moonlight)
    optimizer = ours(parameters(), "moonlight", epsilon_hat=True)
    caplog.clear()
    optimizer.load_state_dict(optimizers[0].state_dict())
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert record.getMessage() == (
        "marsopt: load_state_dict restored 12 tensors, and restarted 3; state of "
        "Moonlight's Muon and Moonlight's AdamW, by order: momentum_buffer (a sum) "
        "times 0.1, moment1 as exp_avg, moment2 as exp_avg_sq, step; hyperparameters "
        "stay"
    )


def test_hyperparameters_stay_those_of_mars():
    params, optimizers = after_fifty(torch_pair)
    optimizer = ours(parameters(), "muon")
    optimizer.param_groups[1]["lr"] = lr = torch.tensor(0.5)
    before = [{**group} for group in optimizer.param_groups]
    optimizer.load_state_dict([each.state_dict() for each in optimizers])
    assert optimizer.param_groups[1]["lr"] is lr
    for group, old in zip(optimizer.param_groups, before, strict=True):
        assert {**group, "params": 0} == {**old, "params": 0}


def test_adamws_moments_go_on_in_mars_adamw():
    """MARS's gradient before the first starts at zero."""
    params, (adamw,) = after_fifty(torch_adamw)
    own = {n: nn.Parameter(p.detach().clone()) for n, p in params.items()}
    options = dict(optimize_1d=True, compile=False)
    optimizer = MARS(own.values(), lr=LR, **options)
    step([optimizer], own, 0)
    with torch.no_grad():
        for name, p in own.items():
            p.copy_(params[name])
    optimizer.load_state_dict(adamw.state_dict())
    assert optimizer.param_groups[0]["betas"] == (0.95, 0.99)
    for name, p in own.items():
        entry, theirs = optimizer.state[p], adamw.state[params[name]]
        for key in ("exp_avg", "exp_avg_sq", "step"):
            torch.testing.assert_close(entry[key], theirs[key], rtol=0, atol=0)
        assert not entry["last_grad"].any()
    step([optimizer], own, 50)


def test_an_average_goes_on_under_whatever_name():
    """Of gradients, in place of corrected ones (exp_avg) or of the same (grad_avg)."""
    params, optimizers = after_fifty(torch_pair)
    saved = [each.state_dict() for each in optimizers]
    for mars_type, correction, key in (
        ("muon", None, "momentum_buffer"),
        ("mars-m", None, "exp_avg"),
        ("mars-shampoo", "exact", "exp_avg"),
    ):
        own = parameters()
        optimizer = ours(own, mars_type, correction=correction)
        optimizer.load_state_dict(saved)
        found = optimizer.state[own["mid"]]
        key = key if key in found else "exp_avg"
        want = optimizers[0].state[params["mid"]]["momentum_buffer"]
        torch.testing.assert_close(found[key], want, rtol=0, atol=0)


def test_parameters_that_never_moved_begin():
    params = parameters()
    muon, adamw = torch_pair(params)
    for p in params.values():
        p.grad = torch.ones_like(p)
    params["mid"].grad = None
    muon.step()
    adamw.step()
    own = parameters()
    optimizer = ours(own, "muon")
    optimizer.load_state_dict([adamw.state_dict(), muon.state_dict()])
    assert not optimizer.state[own["mid"]]["momentum_buffer"].any()
    assert optimizer.state[own["out"]]["momentum_buffer"].any()


def test_frozen_parameters_may_be_absent():
    params, (made,) = after_fifty(torch_adamw)
    own = parameters()
    own["frozen"] = nn.Parameter(torch.ones(3, 3), requires_grad=False)
    optimizer = MARS(own.values(), mars_type="adamw", compile=False)
    optimizer.load_state_dict(made.state_dict())
    assert own["frozen"] not in optimizer.state
    want = made.state[params["head"]]["exp_avg_sq"]
    found = optimizer.state[own["head"]]["exp_avg_sq"]
    torch.testing.assert_close(found, want, rtol=0, atol=0)


def test_a_sum_of_bfloat16_is_averaged_in_float32():
    params, (made,) = after_fifty(of_moonlight)
    saved = copy.deepcopy(made.state_dict())
    narrow = saved["state"][0]["momentum_buffer"].bfloat16()
    saved["state"][0]["momentum_buffer"] = narrow
    own = parameters()
    optimizer = ours(own, "moonlight", epsilon_hat=True)
    optimizer.load_state_dict(saved)
    found = optimizer.state[own["in"]]["momentum_buffer"]
    torch.testing.assert_close(found, narrow.float() * (1 - 0.9), rtol=0, atol=0)


# ---- what is refused -----------------------------------------------------------------


def changed(saved, *, entry=None, group=None):
    """A copy of a state dict whose first entry or first group is another."""
    saved = copy.deepcopy(saved)
    saved["state"][0] |= entry or {}
    saved["param_groups"][0] |= group or {}
    return saved


def entry_of(key, value):
    return lambda saved: changed(saved, entry={key: value})


WRONG = {
    "an unknown key": (entry_of("slow", torch.ones(4, 8)), "got the state of"),
    "no mark": (lambda s: {**s, "state": {}}, "got the state of an optimizer with"),
    "mu": (lambda s: changed(s, group={"momentum": 1.0}), "got momentum=1.0"),
    "NaN": (
        entry_of("momentum_buffer", torch.full((4, 8), math.nan)),
        "got NaN or infinity in the state of parameter 0 of group 1",
    ),
    "a list": (
        entry_of("momentum_buffer", [1.0]),
        "got a list as 'momentum_buffer' of parameter 0 of group 1",
    ),
    "shape": (
        entry_of("momentum_buffer", torch.ones(8, 4)),
        r"shape \(8, 4\) for parameter 0 of group 1, by order, .* set param_names",
    ),
    "fewer": (
        lambda s: changed(s, group={"params": s["param_groups"][0]["params"][:-1]}),
        "got state of 3 parameters with a momentum and 2 of AdamW, expected 3 and 3",
    ),
    "too few names": (
        lambda s: changed(s, group={"param_names": ["in"]}),
        "got 1 param_names in a param group of 6 parameters, expected one for each",
    ),
    "no dict": (lambda s: [s, None], "got a NoneType"),
    "a model's": (lambda s: [s, {"w": torch.ones(2)}], r"got a state dict of \['w'\]"),
    "MARS's in a list": (
        lambda s: [ours(parameters(), "moonlight").state_dict()],
        "got the state of an optimizer with",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_state_that_is_not_known_is_refused_and_nothing_has_changed(wrong):
    change, message = WRONG[wrong]
    _, (made,) = after_fifty(of_moonlight)
    own = parameters()
    optimizer = ours(own, "moonlight", epsilon_hat=True)
    step([optimizer], own, 0)
    before = copy.deepcopy(optimizer.state_dict())
    saved = change(made.state_dict())
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved if isinstance(saved, list) else [saved])
    after = optimizer.state_dict()
    torch.testing.assert_close(after["state"], before["state"], rtol=0, atol=0)
    assert after["param_groups"] == before["param_groups"]


@pytest.mark.parametrize(
    ("mars_type", "options", "message"),
    [
        ("lion", {}, "expected 0 and 3 of 6"),
        ("moonlight", dict(nesterov=0.1), "counts no steps, expected a count"),
    ],
)
def test_a_rule_that_needs_more_refuses(mars_type, options, message):
    _, optimizers = after_fifty(torch_pair)
    optimizer = ours(parameters(), mars_type)
    optimizer.param_groups[1] |= options
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict([each.state_dict() for each in optimizers])


def timm(params):
    """With the keys of timm's Mars, which corrects by another formula."""
    made = torch.optim.RAdam(params)
    for group in made.param_groups:
        group |= dict(mars_type="adamw", optimize_1d=False, gamma=0.025)
    return made


UNKNOWN = [
    functools.partial(torch.optim.SGD, lr=LR, momentum=0.9),
    functools.partial(torch.optim.RMSprop, momentum=0.9),
    torch.optim.RAdam,
    torch.optim.NAdam,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    timm,
]


@hypothesis.settings(max_examples=60, derandomize=True, database=None, deadline=None)
@hypothesis.given(
    make=st.sampled_from(UNKNOWN),
    mars_type=st.sampled_from(["muon", "adamw", "mars-adamw", "lion"]),
    several=st.booleans(),
    num_groups=st.integers(1, 2),
    named=st.booleans(),
)
def test_state_of_an_unknown_optimizer_is_refused_by_both_doors(
    make, mars_type, several, num_groups, named
):
    params = parameters()
    listed = [*params.items()] if named else [*params.values()]
    groups = [{"params": listed[:3]}, {"params": listed[3:]}]
    theirs = make(groups if num_groups == 2 else listed)
    step([theirs], params, 0)
    saved, own = theirs.state_dict(), parameters()
    optimizer = MARS(own.items(), mars_type=mars_type, compile=False)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="got the state of an optimizer with .* only"):
        optimizer.load_state_dict([saved] if several else saved)
    after = optimizer.state_dict()
    torch.testing.assert_close(after["state"], before["state"], rtol=0, atol=0)
    assert after["param_groups"] == before["param_groups"]


def test_a_parameter_that_is_named_twice_is_refused():
    def named(params):
        return [torch.optim.AdamW(list(params.items()), lr=LR)]

    _, (adamw,) = after_fifty(named)
    saved = adamw.state_dict()
    optimizer = MARS(list(parameters().items()), mars_type="adamw", compile=False)
    with pytest.raises(ValueError, match="state of parameter 'embed' twice"):
        optimizer.load_state_dict([saved, saved])


def test_other_names_are_refused():
    def named(params):
        return [torch.optim.AdamW([(f"net.{n}", p) for n, p in params.items()], lr=LR)]

    _, (adamw,) = after_fifty(named)
    optimizer = ours(parameters(), "muon", named=True)
    with pytest.raises(ValueError, match="'bias' in MARS only"):
        optimizer.load_state_dict(adamw.state_dict())
    saved = adamw.state_dict()
    saved["param_groups"][0]["param_names"] = list(SHAPES)
    with pytest.raises(
        ValueError, match="AdamW for parameter 'in', which 'muon' moves"
    ):
        optimizer.load_state_dict(saved)


# ---- undivided groups: marsopt 0.4, and the authors' class ---------------------------


def undivided(optimizer, params, **more):
    """Its state dict as 0.4 has it: two groups of both kinds, the first one reversed if
    its parameters have names.
    """
    state, groups = {}, []
    for i, p in enumerate(params):
        # NorMuon's moments of rows were of the parameter's row shape
        state[i] = {
            k: v[0].clone() if k == "row_exp_avg_sq" else v.clone()
            for k, v in optimizer.state[p].items()
        }
    for numbers in ([2, 1, 0], [3]):
        names = [f"p{i}" for i in numbers]
        groups.append(dict(mars_type="mars-adamw", amsgrad=False, lr=0.5, **more))
        is_named = "param_names" in optimizer.param_groups[0]
        groups[-1] |= {"param_names": names} if is_named else {}
        groups[-1]["params"] = numbers if is_named else sorted(numbers)
    return {"state": state, "param_groups": groups}


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(
    "mars_type", ["mars-adamw", "moonlight", "soap", "lion", "normuon"]
)
def test_a_state_of_undivided_groups_goes_to_those_that_were_given(mars_type, named):
    g = torch.Generator().manual_seed(0)
    params = [
        nn.Parameter(torch.randn(shape, generator=g))
        for shape in ((5,), (6, 4), (3,), (4, 4))
    ]
    listed = [(f"p{i}", p) for i, p in enumerate(params)] if named else params
    groups = [{"params": listed[:3]}, {"params": listed[3:]}]
    optimizer = MARS(groups, mars_type=mars_type, lr=0.1, compile=False)
    for seed in range(3):
        step([optimizer], dict(enumerate(params)), seed)
    saved, other = undivided(optimizer, params), copy.deepcopy(optimizer)
    other.reset_momentum()
    with pytest.raises(ValueError, match="correction='transport' in train mode"):
        other.load_state_dict(undivided(optimizer, params, train_mode=True))
    other.load_state_dict(saved)
    new, old = other.state_dict(), optimizer.state_dict()
    torch.testing.assert_close(new["state"], old["state"], rtol=0, atol=0)
    assert {group["lr"] for group in other.param_groups} == {0.1}
