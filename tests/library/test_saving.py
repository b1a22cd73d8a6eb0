"""Tools that save, share and copy tensors look at storages: each parameter and each
state tensor has one of its own, that starts at its data and has its size.
"""

from __future__ import annotations

import copy
import io
import pickle
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only

import marsopt
from marsopt import REGISTRY
from tests.stacking import MODES, build, forced, traced
from train.runs.safe_dcp import load

WIDTH = 32  # 4 KiB a matrix: more than what a file says about it
NUM_LAYERS = 4
LR = 0.01


def network(width=WIDTH):
    """Eight tensors of two shapes."""
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(NUM_LAYERS)))


def backward(model, seed):
    g = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(4, model[0].in_features, generator=g) for _ in range(2))
    model.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()


def train(model, optimizer, steps):
    with traced():
        for seed in steps:
            backward(model, seed)
            optimizer.step()


def fresh(mode, seed=0, **kwargs):
    torch.manual_seed(seed)
    model = network()
    return model, build(model.parameters(), mode, lr=LR, **kwargs)


@pytest.fixture(params=MODES)
def mode(request, monkeypatch):
    return forced(monkeypatch, request.param)


@pytest.fixture(
    scope="module",
    params=[("eager", 0), ("eager", 2), ("stacks", 0), ("stacks", 2)],
    ids=lambda p: f"{p[0]}-{p[1]} steps",
)
def trained(request):
    """(model, optimizer), after really compiled steps; only to be looked at."""
    mode, num_steps = request.param
    with pytest.MonkeyPatch.context() as patch:
        model, optimizer = fresh(forced(patch, mode))
        for seed in range(num_steps):
            backward(model, seed)
            optimizer.step()
        model.zero_grad()
        return model, optimizer


@pytest.fixture
def pair(mode):
    """(model, optimizer) of two steps, to be trained on."""
    model, optimizer = fresh(mode)
    train(model, optimizer, range(2))
    return model, optimizer


def state_tensors(optimizer):
    return [t for entry in optimizer.state.values() for t in entry.values()]


def everything(model, optimizer):
    """All tensors that may be saved."""
    found = [*model.parameters(), *state_tensors(optimizer)]
    assert len(found) > 3 * len(list(model.parameters()))
    return found


def check_storages(tensors):
    for tensor in tensors:
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert tensor.storage_offset() == 0
        assert tensor.untyped_storage().data_ptr() == tensor.data_ptr()
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == len(tensors)


def bitwise(a, b):
    torch.testing.assert_close(dict(a), dict(b), rtol=0, atol=0)


def check_same(one, two):
    """Parameters and state of (model, optimizer) pairs, bit for bit."""
    bitwise(one[0].state_dict(), two[0].state_dict())
    bitwise(one[1].state_dict()["state"], two[1].state_dict()["state"])


# ---- storages ----------------------------------------------------------------------


def test_every_tensor_has_a_storage_of_its_own(trained):
    check_storages(everything(*trained))


def test_what_a_state_dict_holds_has_storages_of_its_own(trained):
    model, optimizer = trained
    check_storages(list(model.state_dict().values()))
    saved = optimizer.state_dict()["state"].values()
    check_storages([t for entry in saved for t in entry.values()])


@pytest.mark.parametrize("mars_type", REGISTRY)
def test_no_rule_shares_storages(mars_type, mode):
    model, optimizer = fresh(mode, mars_type=mars_type, amsgrad=mars_type == "adamw")
    check_storages([*model.parameters(), *state_tensors(optimizer)])
    train(model, optimizer, range(2))
    check_storages([*model.parameters(), *state_tensors(optimizer)])


@pytest.mark.parametrize(
    "option",
    [
        dict(state_dtype=torch.float64),
        dict(h_dtype=torch.bfloat16),
        dict(optimize_1d=True),
        dict(is_approx=False),
        dict(clip=None, mars_type="mars-lion"),
        dict(max_norm=0.5),
    ],
    ids=lambda o: next(iter(o)),
)
def test_no_option_shares_storages(option, mode):
    model, optimizer = fresh(mode, **option)
    for t in range(2):
        backward(model, 10 + t)
        optimizer.update_previous_grad()
        train(model, optimizer, [t])
        optimizer.update_last_grad()
    check_storages(everything(model, optimizer))


def test_loading_and_a_new_group_leave_storages_apart(pair):
    model, optimizer = pair
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    late = network()
    optimizer.add_param_group({"params": late.parameters()})
    backward(late, 2)
    train(model, optimizer, [2])
    both = [*model.parameters(), *late.parameters()]
    check_storages([*both, *state_tensors(optimizer)])


def test_bf16_parameters_have_storages_of_their_own(mode):
    model = network().bfloat16()
    optimizer = build(model.parameters(), mode, lr=LR, state_dtype=torch.float32)
    with traced():
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    check_storages(everything(model, optimizer))


def test_writing_through_one_storage_moves_one_tensor(pair):
    """... as tools do that fill a storage from a file."""
    model, optimizer = pair
    first, *rest = everything(model, optimizer)
    before = [t.detach().clone() for t in rest]
    with torch.no_grad():
        view = torch.empty(0).set_(first.untyped_storage())
        view.zero_()
    assert not first.any()
    assert all(map(torch.equal, before, rest))


def test_a_parameter_moves_through_any_view_of_it(pair):
    """What looked into its storage before the step sees the step."""
    model, optimizer = pair
    p = model[1].weight
    view = p.detach().view(-1)
    before = view.clone()
    train(model, optimizer, [2])
    assert torch.equal(view, p.detach().view(-1))
    assert not torch.equal(view, before)


def test_shared_memory_shares_one_tensor(pair):
    model, optimizer = pair
    model.share_memory()
    train(model, optimizer, [2])
    assert all(p.is_shared() for p in model.parameters())
    twin, other = fresh("eager")
    train(twin, other, range(3))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


# ---- torch.save --------------------------------------------------------------------


def size(saved):
    file = io.BytesIO()
    torch.save(saved, file)
    return file.tell()


PARTS = {
    "model": lambda m, o: m.state_dict(),
    "one layer": lambda m, o: m[0].state_dict(),
    "one parameter": lambda m, o: m[2].bias,
    "optimizer": lambda m, o: o.state_dict(),
    "state of one parameter": lambda m, o: o.state[m[1].weight],
    "one state tensor": lambda m, o: o.state[m[1].weight]["exp_avg"],
    "one step": lambda m, o: o.state[m[3].bias]["step"],
}


@pytest.mark.parametrize("part", PARTS)
def test_a_file_is_as_large_as_its_tensors(part, trained):
    saved = PARTS[part](*trained)
    alone = tree_map_only(
        torch.Tensor,
        lambda t: t.detach().clone().requires_grad_(t.requires_grad),
        saved,
    )
    assert size(saved) <= 1.02 * size(alone) + 64


def test_a_file_restores_both(pair, mode):
    file = io.BytesIO()
    torch.save([each.state_dict() for each in pair], file)
    file.seek(0)
    other = fresh(mode, seed=1)
    for each, saved in zip(other, torch.load(file, weights_only=True), strict=True):
        each.load_state_dict(saved)
    check_same(pair, other)
    for each in (pair, other):
        train(*each, range(2, 4))
    check_same(pair, other)


# ---- safetensors -------------------------------------------------------------------


def test_safetensors_saves_and_loads_the_model(trained, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model, _ = trained
    safetensors.save_model(model, tmp_path / "model.safetensors")
    assert set(safetensors.load_file(tmp_path / "model.safetensors")) == set(
        model.state_dict()
    )
    other = network()
    safetensors.load_model(other, tmp_path / "model.safetensors")
    bitwise(model.state_dict(), other.state_dict())


def test_safetensors_loads_into_parameters_that_mars_holds(pair, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model, optimizer = pair
    other = network()
    safetensors.save_model(other, tmp_path / "model.safetensors")
    safetensors.load_model(model, tmp_path / "model.safetensors")
    bitwise(model.state_dict(), other.state_dict())
    before = model[0].weight.detach().clone()
    train(model, optimizer, [2])
    assert not torch.equal(before, model[0].weight)


def test_safetensors_saves_state_tensors(trained, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    _, optimizer = trained
    saved = optimizer.state_dict()["state"]
    flat = {f"{i}.{key}": t for i, e in saved.items() for key, t in e.items()}
    safetensors.save_file(flat, tmp_path / "state.safetensors")
    bitwise(flat, safetensors.load_file(tmp_path / "state.safetensors"))
    nbytes = sum(t.nbytes for t in flat.values())
    assert (tmp_path / "state.safetensors").stat().st_size < 1.2 * nbytes + 4096


# ---- Hugging Face ------------------------------------------------------------------


def gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=3, n_head=2, n_embd=8, n_positions=8, vocab_size=16
    )
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.parametrize("num_steps", [0, 2])
def test_transformers_saves_a_pretrained_model(num_steps, mode, tmp_path):
    """Tied weights stay tied, and every tensor is in the file."""
    model = gpt2().eval()
    optimizer = build(model.parameters(), mode, lr=LR)
    tokens = torch.arange(8)[None]
    with traced():
        for _ in range(num_steps):
            model.zero_grad()
            model(tokens, labels=tokens).loss.backward()
            optimizer.step()
    model.save_pretrained(tmp_path)
    other = type(model).from_pretrained(tmp_path).eval()
    assert other.lm_head.weight is other.transformer.wte.weight
    bitwise(model.state_dict(), other.state_dict())
    assert torch.equal(model(tokens).logits, other(tokens).logits)


def test_transformers_shards_are_small(mode, tmp_path):
    model = gpt2()
    optimizer = build(model.parameters(), mode, lr=LR)
    limit = 3000
    model.save_pretrained(tmp_path, max_shard_size=limit)
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    assert sum(f.stat().st_size for f in files) < 2 * sum(
        p.nbytes for group in optimizer.param_groups for p in group["params"]
    )
    bitwise(model.state_dict(), type(model).from_pretrained(tmp_path).state_dict())


def test_huggingface_hub_saves_a_torch_model(trained, tmp_path):
    hub = pytest.importorskip("huggingface_hub")
    model, _ = trained
    hub.save_torch_model(model, tmp_path)
    other = network()
    hub.load_torch_model(other, tmp_path)
    bitwise(model.state_dict(), other.state_dict())


def test_huggingface_hub_shards_are_small(trained, tmp_path):
    hub = pytest.importorskip("huggingface_hub")
    model, _ = trained
    limit = 5000  # one matrix and one bias
    hub.save_torch_model(model, tmp_path, max_shard_size=limit)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == NUM_LAYERS
    assert all(f.stat().st_size < limit + 1024 for f in files)
    other = network()
    hub.load_torch_model(other, tmp_path)
    bitwise(model.state_dict(), other.state_dict())


# ---- accelerate --------------------------------------------------------------------


@pytest.fixture
def accelerator():
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    yield accelerate.Accelerator(cpu=True)
    accelerate.state.AcceleratorState._reset_state(True)


@pytest.mark.parametrize("mars_type", ["mars-adamw", "mars-soap"])
def test_accelerate_goes_on_as_if_uninterrupted(mars_type, mode, accelerator, tmp_path):
    own = dict(mars_type=mars_type)
    whole = fresh(mode, **own)
    train(*whole, range(4))
    first = accelerator.prepare(*fresh(mode, **own))
    train(*first, range(2))
    accelerator.save_state(tmp_path)
    train(*first, range(7, 9))  # astray
    accelerator.load_state(tmp_path)
    train(*first, range(2, 4))
    bitwise(first[0].state_dict(), whole[0].state_dict())
    accelerator.free_memory()
    second = accelerator.prepare(*fresh(mode, seed=1, **own))
    accelerator.load_state(tmp_path)
    train(*second, range(2, 4))
    bitwise(second[0].state_dict(), whole[0].state_dict())


def test_accelerate_saves_all_tensors_of_a_model(mode, accelerator, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model, optimizer = accelerator.prepare(*fresh(mode))
    train(model, optimizer, range(2))
    accelerator.save_model(model, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    saved = safetensors.load_file(file)
    assert len(saved) == 2 * NUM_LAYERS
    bitwise(saved, model.state_dict())


# ---- copies ------------------------------------------------------------------------


def through_pickle(both):
    return pickle.loads(pickle.dumps(both))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle])
def test_a_copy_of_both_trains_to_the_same_values(duplicate, pair):
    twin = duplicate(pair)
    check_same(pair, twin)
    check_storages(everything(*twin))
    for each in (pair, twin):
        train(*each, range(2, 4))
    check_same(pair, twin)
    assert twin[0][0].weight.data_ptr() != pair[0][0].weight.data_ptr()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle])
def test_a_copy_of_the_model_is_its_own(duplicate, pair):
    model, optimizer = pair
    twin = duplicate(model)
    before = copy.deepcopy(twin.state_dict())
    check_storages(list(twin.parameters()))
    train(model, optimizer, [2])
    bitwise(twin.state_dict(), before)


def test_a_pickle_of_one_layer_is_as_large_as_the_layer(trained):
    model, _ = trained
    alone = copy.deepcopy(model[0])
    for p in alone.parameters():
        p.data = p.data.clone()
    assert len(pickle.dumps(model[0])) <= 1.02 * len(pickle.dumps(alone)) + 64


# ---- torch.distributed.checkpoint --------------------------------------------------

one_process = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@one_process
def test_distributed_checkpoint_loads_twice_into_one_optimizer(pair, mode, tmp_path):
    state = {
        "model": get_model_state_dict(pair[0]),
        "optimizer": get_optimizer_state_dict(*pair),
    }
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    model, optimizer = other = fresh(mode, seed=1)
    for _ in range(2):
        found = {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(*other),
        }
        dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
        set_model_state_dict(model, found["model"])
        set_optimizer_state_dict(model, optimizer, optim_state_dict=found["optimizer"])
        check_same(pair, other)
        twin = copy.deepcopy(pair)
        for each in (twin, other):
            train(*each, range(2, 4))
        check_same(twin, other)


@one_process
def test_distributed_checkpoint_takes_flattened_state(pair, mode, tmp_path):
    """Names such as state.0.weight.exp_avg, which torchtitan writes."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    options = StateDictOptions(flatten_optimizer_state_dict=True)
    saved = get_optimizer_state_dict(*pair, options=options)
    assert "state.1.bias.exp_avg_sq" in saved
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    other = fresh(mode)
    for _ in range(2):
        found = get_optimizer_state_dict(*other, options=options)
        dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
        set_optimizer_state_dict(*other, optim_state_dict=found, options=options)
        bitwise(other[1].state_dict()["state"], pair[1].state_dict()["state"])


@one_process
def test_distributed_checkpoint_takes_a_plain_state_dict_twice(pair, mode, tmp_path):
    model, optimizer = pair
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    twin, other = both = fresh(mode, seed=1)
    for _ in range(2):
        found = {"model": twin.state_dict(), "optimizer": other.state_dict()}
        dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
        twin.load_state_dict(found["model"])
        other.load_state_dict(found["optimizer"])
        check_same(pair, both)


@one_process
def test_distributed_checkpoint_stores_no_tensor_twice(pair, tmp_path):
    _, optimizer = pair
    saved = optimizer.state_dict()
    dcp.save({"optimizer": saved}, checkpoint_id=tmp_path / "a", no_dist=True)
    written = sum(f.stat().st_size for f in (tmp_path / "a").glob("*.distcp"))
    alone = {k: {n: t.clone() for n, t in e.items()} for k, e in saved["state"].items()}
    dcp.save(
        {"optimizer": {**saved, "state": alone}},
        checkpoint_id=tmp_path / "b",
        no_dist=True,
    )
    assert written == sum(f.stat().st_size for f in (tmp_path / "b").glob("*.distcp"))


# ---- the functional rule's state -----------------------------------------------------


def functional(flat, make):
    """A rule, and its parameters and state before and after a step."""
    x = {n: torch.randn(s) for n, s in {"a": (4, 3), "b": (4, 3), "c": (3,)}.items()}
    params = marsopt.FlatGroup.pack(x) if flat else x
    rule = make(max_norm=1.0)
    state = rule.init(params)
    return rule, (params, state), rule.step(params, params, state, lr=LR)


def same(a, b):
    (mine, shape), (theirs, other) = tree_flatten(a), tree_flatten(b)
    return shape == other and all(map(torch.equal, mine, theirs))


functional_rules = pytest.mark.parametrize(
    "make",
    [marsopt.mars, partial(marsopt.rule, "mars-adamw")],
    ids=["routed", "one"],
)


@pytest.mark.parametrize("flat", [False, True], ids=["dict", "flat"])
@functional_rules
def test_functional_state_is_loaded_without_running_code(make, flat):
    """By torch.load as it is, which refuses types that it was not told of."""
    rule, _, (params, state) = functional(flat, make)
    file = io.BytesIO()
    torch.save({"params": params, "state": state}, file)
    file.seek(0)
    found = torch.load(file, weights_only=True)
    assert same(found, {"params": params, "state": state})
    want = rule.step(params, params, state, lr=LR)
    got = rule.step(found["params"], found["params"], found["state"], lr=LR)
    assert same(got, want)


@one_process
@pytest.mark.parametrize("flat", [False, True], ids=["dict", "flat"])
@functional_rules
def test_functional_state_through_dcp(make, flat, tmp_path):
    """As one value, in place of one (which DCP takes to pieces), or as its tensors."""
    rule, (first, _), (params, state) = functional(flat, make)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    dcp.save({"state": state}, checkpoint_id=whole, no_dist=True)
    for read in (partial(dcp.load, checkpoint_id=whole), partial(load, path=whole)):
        found = {"state": rule.init(first)}
        read(found, no_dist=True)
        assert same(found["state"], state)
    both = {"params": params, "state": state}
    dcp.save({"leaves": tree_leaves(both)}, checkpoint_id=parts, no_dist=True)
    again = {"params": tree_map(torch.clone, first), "state": rule.init(first)}
    dcp.load({"leaves": tree_leaves(again)}, checkpoint_id=parts, no_dist=True)
    assert same(again, both)
