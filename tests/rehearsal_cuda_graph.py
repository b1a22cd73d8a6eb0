"""The training step of examples.cuda_graph over fake CUDA tensors, as it is and with
defects: what would keep a graph from capturing it, or a replay from being the next
step.

    python -m tests.rehearsal_cuda_graph --json FILE
"""

import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from benchmarks.gpu.rehearsal.crossings import Watch
from benchmarks.gpu.rehearsal.device import h100
from examples import cuda_graph as example
from marsopt import MARS, AdamW
from tests.stacking import as_on_a_gpu
from train.files import write_json


class Kept(Watch):
    """Finds out, too, how large is what was made within it, and is still there."""

    def __init__(self):
        super().__init__()
        self._known, self._made = set(), {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._known |= {ref.cdata for ref, _ in storages((args, kwargs))} - set(
            self._made
        )
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self._made |= {
            ref.cdata: (ref, size)
            for ref, size in storages(out)
            if ref.cdata not in self._known
        }
        return out

    def left(self):
        """Bytes of each storage."""
        return [size for ref, size in self._made.values() if not ref.expired()]


def storages(tree):
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            storage = leaf.untyped_storage()
            yield StorageWeakRef(storage), storage.nbytes()


def held(model, optimizer):
    """What a graph has noted down: of parameters, state and learning rates."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [t for state in optimizer.state.values() for t in state.values()]
    tensors += [group["lr"] for group in optimizer.param_groups]
    tensors += optimizer.describe().scalars
    return [ref.cdata for ref, size in storages(tensors) if size]


def frozen(schedule, optimizer):
    """What a schedule gives to a group as another object than was there: a graph would
    go on with what it has captured. Raises where it writes nothing.
    """
    before = [dict(group) for group in optimizer.param_groups]
    written = [group["lr"]._version for group in before]
    schedule(optimizer, 7)
    groups = list(zip(before, optimizer.param_groups, strict=True))
    other = [key for old, new in groups for key in old if old[key] is not new[key]]
    if not other:
        rates = [group["lr"] for group in optimizer.param_groups]
        assert all(rate.is_cuda for rate in rates)
        assert all(r._version > v for r, v in zip(rates, written, strict=True))
    return other


def warm():
    """A model and its optimizer after two steps, and a batch."""
    model, optimizer = example.build(torch.device("cuda"), compile=False)
    batch = [torch.empty(example.BATCH, n, device="cuda") for n in (16, 4)]
    for step in range(2):
        example.schedule(optimizer, step)
        example.training_step(model, optimizer, batch)
    return model, optimizer, batch


def inspected(step, schedule):
    with FakeTensorMode():
        model, optimizer, batch = warm()
        other = frozen(schedule, optimizer)
        before = held(model, optimizer)
        with Kept() as seen:
            loss = step(model, optimizer, batch)  # noqa: F841  (is kept)
        found = dict(
            num_operations=seen.num_operations,
            crossings=[str(crossing) for crossing in seen.found],
            largest_left=max(seen.left()),
            moved=before != held(model, optimizer),
            frozen=other,
        )
        with Watch() as exchanged:
            optimizer.eval()
            optimizer.train()
        found["exchange"] = [str(crossing) for crossing in exchanged.found]
        found["moved_by_exchange"] = before != held(model, optimizer)
    return found


def batched():
    """As it is, with matrices in batches, which the devices of fakes have, too."""
    with pytest.MonkeyPatch.context() as patch:
        as_on_a_gpu(patch)
        return inspected(example.training_step, example.schedule)


# ---- defects -------------------------------------------------------------------------


def by_numbers(optimizer, step):
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * (1 - step / example.STEPS)


def by_new_tensors(optimizer, step):
    for group in optimizer.param_groups:
        group["lr"] = torch.full_like(group["lr"], 1e-3)


def keeps_gradients(model, optimizer, batch):
    loss = nn.functional.mse_loss(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()


def prints_loss(model, optimizer, batch):
    return example.training_step(model, optimizer, batch).item()


def moves_state(model, optimizer, batch):
    loss = example.training_step(model, optimizer, batch)
    key = AdamW.keeps["m"].key
    for state in optimizer.state.values():
        state[key] = state[key].clone()
    return loss


# ---- refused -------------------------------------------------------------------------


def refused(prepare, steps_before):
    """What a step says that a capture could not hold."""
    with FakeTensorMode():
        params = [nn.Parameter(torch.empty(8, 4, device="cuda")) for _ in range(2)]
        optimizer = MARS(params, lr=1e-2, correction="transport", compile=False)
        for _ in range(steps_before):
            for p in params:
                p.grad = torch.empty_like(p)
            optimizer.step()
        prepare(optimizer, params)
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
            try:
                optimizer.step()
            except RuntimeError as error:
                return str(error)
    return None


def nothing(optimizer, params): ...


def backward(optimizer, params):
    for p in params:
        p.grad = torch.empty_like(p)


def missing(optimizer, params):
    params[0].grad = None


def rate_of_the_host(optimizer, params):
    optimizer.param_groups[0]["lr"] = torch.full((), 1e-2, device="cpu")


if __name__ == "__main__":
    with h100(triton=False):
        step, schedule = example.training_step, example.schedule
        found = dict(
            as_it_is=inspected(step, schedule),
            batched=batched(),
            by_numbers=inspected(step, by_numbers),
            by_new_tensors=inspected(step, by_new_tensors),
            keeps_gradients=inspected(keeps_gradients, schedule),
            prints_loss=inspected(prints_loss, schedule),
            moves_state=inspected(moves_state, schedule),
            refused=dict(
                warm=refused(nothing, 1),
                first=refused(backward, 0),
                missing=refused(missing, 1),
                rate_of_the_host=refused(rate_of_the_host, 1),
            ),
        )
    write_json(Path(sys.argv[2]), found)
