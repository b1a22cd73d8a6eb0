"""torchtitan's own models, trained by its own Trainer on CPU processes with gloo.

Models, sharding, loss, loop and clip are torchtitan's; ``configuration`` says what is
changed of its debug configurations, and why::

    ((one,),) = spawn(train, 1, [("llama3", default_adamw(lr=1e-3))])
    (two,), _ = spawn(train, 2, [("llama3", default_adamw(lr=1e-3))])
    # two.losses are one.losses, two.moved[name] is one.moved[name]
"""
# ruff: noqa: E402  (prepare() runs first)

from __future__ import annotations

import dataclasses
import time
import types
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from examples.torchtitan_llama3 import summing
from train.engine.titan_cpu import prepare

prepare()  # before the first import of torchtitan, here and in spawned processes

from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.protocols.module import Module
from torchtitan.trainer import Trainer

MODELS: dict[str, Callable[[], Trainer.Config]] = {
    "llama3": llama3_debugmodel,
    "deepseek_v3": deepseek_v3_debugmodel,  # the second block is a mixture of experts
}
NUM_BLOCKS, SEQ_LEN, STEPS = 2, 32, 5
# sequences per step, and in one forward pass of one rank
BATCH, MICRO_BATCH = 4, 2


class Synthetic(BaseDataLoader):
    """Sequence n is drawn from seed n, so the global batch of a step is the same
    however it is split; rank r of w takes the micro-batches r, r + w, r + 2w ...

    Only one token in 32 occurs, so that a few steps have something to learn.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        vocab_size: int

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        **kwargs,
    ) -> None:
        self.num_tokens, self.length = config.vocab_size // 32, seq_len + 1
        self.batch = local_batch_size
        self.rank, self.world, self.passes = dp_rank, dp_world_size, 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            first = (self.passes * self.world + self.rank) * self.batch
            self.passes += 1
            tokens = torch.stack(
                [self._sequence(n) for n in range(first, first + self.batch)]
            )
            yield {"input": tokens[:, :-1]}, tokens[:, 1:]

    def _sequence(self, number: int) -> Tensor:
        drawn = torch.Generator().manual_seed(number)
        return torch.randint(self.num_tokens, (self.length,), generator=drawn)

    def state_dict(self) -> dict[str, int]:
        return {"passes": self.passes}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.passes = state_dict["passes"]


class NoTokenizer(BaseTokenizer):
    """The Trainer builds one; tokens are drawn, not read."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **kwargs) -> None:
        super().__init__()

    def encode(self, *args, **kwargs) -> list[int]:
        raise NotImplementedError

    def decode(self, *args, **kwargs) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        raise NotImplementedError


class Losses(MetricsProcessor):
    """Keeps the loss of the global batch where the Trainer would log it."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def __init__(self, config: Config, **kwargs) -> None:
        super().__init__(config, **kwargs)
        self.losses: list[float] = []

    def log(self, step: int, global_avg_loss: float, *args, **kwargs) -> None:
        self.losses.append(global_avg_loss)


def drawn_whole(name: str, init: Callable[[Tensor], object]) -> Callable:
    """``init`` of the whole tensor, seeded by its name; a rank keeps its shard.

    DTensor has no random tracker for a CPU mesh: by ``init`` itself every rank would
    draw the same numbers for its shard, and two ranks would train another model than
    one.
    """

    def initialize(x: Tensor) -> None:
        whole = torch.empty(x.shape, dtype=x.dtype)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(zlib.crc32(name.encode()))
            init(whole)
        if isinstance(x, DTensor):
            mesh, places = x.device_mesh, x.placements
            whole = distribute_tensor(whole, mesh, places, src_data_rank=None)
        x.copy_(whole)

    return initialize


def configuration(name: str, optimizer: OptimizersContainer.Config) -> Trainer.Config:
    """torchtitan's debug configuration of this name with its first two blocks, for 1 or
    2 ranks of a machine without an accelerator.
    """
    config = MODELS[name]()
    spec = config.model_spec
    model = spec.model
    model.layers = model.layers[:NUM_BLOCKS]
    # FlexAttention has no CPU backward; this is torchtitan's own other module. Without
    # positions, which Synthetic does not give, both are causal.
    for _, _, owner, field in list(model.traverse(FlexAttention.Config)):
        setattr(owner, field, ScaledDotProductAttention.Config())
    for path, part, _, _ in model.traverse(Module.Config, recurse=True):
        if part.param_init is not None:
            part.param_init = {
                n: init if init is skip_param_init else drawn_whole(f"{path}.{n}", init)
                for n, init in part.param_init.items()
            }
    return dataclasses.replace(
        config,
        model_spec=dataclasses.replace(
            spec, parallelize_fn=summing(spec.parallelize_fn)
        ),
        optimizer=optimizer,
        tokenizer=NoTokenizer.Config(),
        dataloader=Synthetic.Config(vocab_size=model.vocab_size),
        metrics=Losses.Config(log_freq=1),
        # a constant rate
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0),
        # One rank takes two micro-batches a step, two ranks take one each: the same
        # products, and sums of two in either case. Without it the gradients of experts
        # differ by 2e-3: GroupedExperts computes in bfloat16 whatever is said here.
        training=dataclasses.replace(
            config.training,
            global_batch_size=BATCH,
            local_batch_size=MICRO_BATCH,
            seq_len=SEQ_LEN,
            steps=STEPS,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        # under torch 2.13 the default, spmd_types, refuses plain parameters on 2 ranks
        parallelism=dataclasses.replace(
            config.parallelism, spmd_backend="partial_dtensor"
        ),
    )


class Trained(NamedTuple):
    """What a training did."""

    losses: list[float]
    """Of the global batch at each step, the same on every rank."""
    moved: dict[str, Tensor]
    """How far each parameter went, whole; on rank 0 alone. Losses hardly feel the
    experts: five steps without any change of theirs move them by 3e-5.
    """


def trained(config: Trainer.Config) -> Trained:
    """Train in this process, whose process group is there already."""
    # Trainer.train ends by sleeping for two seconds
    clock = types.SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda s: None)
    with mock.patch("torchtitan.trainer.time", clock):
        trainer = config.build()
        (model,) = trainer.model_parts
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        try:
            trainer.train()
        finally:
            trainer.close()
    moved = {}
    for name, p in model.named_parameters():
        whole = (p.detach() - before[name]).full_tensor()
        if dist.get_rank() == 0:
            moved[canonical_fqn(name)] = whole
    return Trained(trainer.metrics_processor.losses, moved)


def train(
    rank: int, world: int, jobs: Sequence[tuple[str, OptimizersContainer.Config]]
) -> list[Trained]:
    """Train each (model, optimizer) in turn, for ``tests.processes.spawn``: to start a
    process costs more than a training.
    """
    return [trained(configuration(name, optimizer)) for name, optimizer in jobs]
