"""The training step of examples.cuda_graph without a GPU: replays are played by a tape
that runs the recorded operations again.
"""

import copy
from types import SimpleNamespace

import pytest
import torch

from examples import cuda_graph as example
from marsopt import MARS
from tests.stacking import copies
from tests.tape import Tape


def draw(step):
    g = torch.Generator().manual_seed(step)
    return [torch.randn(example.BATCH, n, generator=g) for n in (16, 4)]


def eager(model, optimizer, batch):
    return SimpleNamespace(
        replay=lambda: example.training_step(model, optimizer, batch)
    )


def taped(model, optimizer, batch):
    """A step is taken here: recording one runs it."""
    with Tape() as tape:
        example.training_step(model, optimizer, batch)
    return tape


def run(start, schedule=example.schedule, between=lambda optimizer, step, batch: None):
    """Take eight steps from the third on, all but the first of them by replays.

    Args:
        start: what makes them, from a model that was warmed up.
        schedule: writes rates.
        between: called before each step.
    """
    torch.manual_seed(0)
    model, optimizer = example.build(torch.device("cpu"), compile=False)
    batch, graph = draw(0), None
    for step in range(10):
        for static, new in zip(batch, draw(step), strict=True):
            static.copy_(new)
        schedule(optimizer, step)
        if step < 2:
            example.training_step(model, optimizer, batch)
            continue
        between(optimizer, step, batch)
        if graph is None and start is taped:
            graph = taped(model, optimizer, batch)
            continue
        graph = graph or eager(model, optimizer, batch)
        graph.replay()
    return model, optimizer


def same(between=lambda optimizer, step, batch: None, schedule=example.schedule):
    """Whether replays end where eager steps do, bit for bit."""
    ends = []
    for start in (eager, taped):
        model, optimizer = run(start, schedule, between)
        ends.append((copies(model.parameters()), optimizer.num_skipped))
    (a, skipped), (b, skipped_too) = ends
    return all(map(torch.equal, a, b)) and skipped == skipped_too


def test_replays_are_the_next_steps(both_layouts):
    assert same()


def test_a_norm_that_is_set_between_replays_is_read():
    def tighten(optimizer, step, batch):
        optimizer.max_norm = 1e-3 * (step + 1)

    assert same(tighten)
    (fixed, _), (moved, _) = run(taped), run(taped, between=tighten)
    pairs = zip(fixed.parameters(), moved.parameters(), strict=True)
    assert not all(torch.equal(p, q) for p, q in pairs)


def test_a_gradient_that_is_not_finite_is_skipped_and_counted_in_replays():
    def poison(optimizer, step, batch):
        if step == 5:
            batch[0][0, 0] = float("nan")

    assert same(poison)
    model, optimizer = run(taped, between=poison)
    assert optimizer.num_skipped == 1
    assert all(torch.isfinite(p).all() for p in model.parameters())


def in_place(optimizer, step):
    """Every number as a tensor that is there, moved."""
    (group,) = optimizer.param_groups
    keys = "gamma", "clip", "lr_ratio", "eps", "weight_decay", "weight_decay_1d"
    for key in keys:
        if step == 0:
            group[key] = torch.tensor(group[key], dtype=torch.float64)
        group[key].fill_(0.01 * (step + 1))
    for key in ("betas", "betas_1d"):
        if step == 0:
            group[key] = tuple(map(torch.tensor, group[key]))
        for beta in group[key]:
            beta.fill_(0.8 + 0.01 * step)


def test_every_number_may_be_a_tensor_that_moves():
    assert same(schedule=in_place)
    (fixed, _), (moved, _) = run(taped), run(taped, schedule=in_place)
    pairs = zip(fixed.parameters(), moved.parameters(), strict=True)
    assert not any(torch.equal(p, q) for p, q in pairs)


def test_schedulers_of_torch_write_into_a_tensor():
    def by_torch(optimizer, step):
        if step == 0:
            own = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))
            optimizer.scheduler = own
        elif step > 2:  # before, torch would warn that no step has been taken
            optimizer.scheduler.step()

    assert same(schedule=by_torch)


def test_groups_of_one_rule_have_rates_of_their_own():
    """The step looks whether each tensor's rate is finite."""

    def train(start):
        torch.manual_seed(0)
        layers = torch.nn.Linear(16, 8, bias=False), torch.nn.Linear(8, 4)
        model, batch = torch.nn.Sequential(*layers), draw(0)
        pairs = [([p], torch.tensor(1e-2)) for p in model.parameters()]
        groups = [dict(params=params, lr=lr) for params, lr in pairs]
        optimizer = MARS(groups, mars_type="adamw", compile=False)
        graph = None
        for step in range(6):
            for i, (_, lr) in enumerate(pairs):
                lr.fill_(1e-2 * (i + 1) / (step + 1))
            if step == 3:
                graph = start(model, optimizer, batch)
                if start is taped:
                    continue
            graph.replay() if graph else example.training_step(model, optimizer, batch)
        assert not optimizer.num_skipped
        return copies(model.parameters())

    assert all(map(torch.equal, train(eager), train(taped)))


def by_numbers(optimizer, step):
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * (1 - step / 10)


def by_new_tensors(optimizer, step):
    for group in optimizer.param_groups:
        group["lr"] = torch.full_like(group["lr"], 1e-3 * (step + 1))


def decay(optimizer, step):
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.1 * step


@pytest.mark.parametrize("schedule", [by_numbers, by_new_tensors, decay])
def test_numbers_and_new_tensors_are_frozen(schedule):
    assert not same(schedule=schedule)


def test_loading_exchanges_the_rate_that_a_graph_reads_and_keeps_the_state():
    model, optimizer = run(eager)
    rate, state = optimizer.param_groups[0]["lr"], optimizer.state[model[0].weight]
    address = state["step"].data_ptr()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.param_groups[0]["lr"] is not rate
    assert optimizer.state[model[0].weight]["step"].data_ptr() == address


def test_a_tape_refuses_to_tell_the_host_a_value():
    with Tape(), pytest.raises(RuntimeError, match="when stream is capturing"):
        torch.ones(()).item()


# ---- the example ---------------------------------------------------------------------


def test_on_a_cpu_it_says_that_nothing_is_captured_and_learns(capsys, monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, on which it captures")
    build = example.build
    monkeypatch.setattr(example, "build", lambda device: build(device, compile=False))
    example.main()
    first, *steps, last = capsys.readouterr().out.splitlines()
    assert "nothing is captured" in first and last == "skipped 0"
    losses = [float(line.rpartition(" ")[2]) for line in steps]
    assert len(losses) == 6 and losses[-1] < 0.05 * losses[0]
