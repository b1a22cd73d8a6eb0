"""torchtitan's llama3 with MARS.

torchtitan 0.3.0 imports Triton, which torch for CUDA brings. Copy this file into a
checkout of torchtitan, whose text and tokenizer its debug model reads:

    torchrun --nproc-per-node 8 -m torchtitan.train \
        --module torchtitan_llama3 --config llama3_mars

llama3_8b_mars in its place trains Llama 3 8B. Here, without a GPU and Triton, on bytes
of Python's own source:

    python -m train.prepare --out data/python
    torchrun --nproc-per-node 2 -m examples.torchtitan_llama3

torchtitan's own options may follow either.
"""

import dataclasses
import sys
from collections.abc import Callable

from torch import nn
from torch.distributed.fsdp import FSDPModule


def llama3_mars(compile: bool | None = None):
    """torchtitan's configuration of its debug model, with another optimizer."""
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    # 1e-2 suits this model alone: 6 layers of width 256
    return by_moonlight(llama3_debugmodel(), lr=1e-2, interval=10, compile=compile)


def llama3_8b_mars():
    """torchtitan's Llama 3 8B. 3e-3 is the learning rate of GPT-2 XL, a guess; nobody
    has trained this.
    """
    from torchtitan.models.llama3.config_registry import llama3_8b

    return by_moonlight(llama3_8b(), lr=3e-3, interval=500)


def by_moonlight(config, *, lr: float, interval: int, compile: bool | None = None):
    """``config`` with Moonlight, and a checkpoint every ``interval`` steps."""
    from torchtitan.components.checkpointer import CheckpointManager

    from marsopt.interop.torchtitan import default_mars

    config.optimizer = default_mars(lr=lr, weight_decay_1d=0.1, compile=compile)
    config.lr_scheduler.min_lr_factor = 0.1
    # This replaces the model's settings of checkpoints: repeat those that you keep. By
    # torchtitan's default the last one holds the model alone, and resumes nothing.
    config.checkpoint = CheckpointManager.Config(
        interval=interval, last_save_model_only=False
    )
    return config


def summing(parallelize: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """``parallelize`` for gloo, which has no PREMUL_SUM: FSDP2 reduces gradients by it
    since torchtitan sets the divide factor to 1; SUM is the same.
    """

    def parallelized(model: nn.Module, **kwargs) -> nn.Module:
        model = parallelize(model, **kwargs)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return model

    return parallelized


def llama3_mars_cpu():
    """The same where torch has no GPU, on two ranks or one."""
    from torchtitan.models.common.attention import FlexAttention
    from torchtitan.models.common.attention import ScaledDotProductAttention as SDPA

    from train.engine.titan_data import TitanTokenizer, TokenLoader

    config = llama3_mars(compile=False)
    spec = config.model_spec
    for _, _, owner, field in [*spec.model.traverse(FlexAttention.Config)]:
        setattr(owner, field, SDPA.Config())  # FlexAttention has no backward on a CPU
    config.model_spec = dataclasses.replace(
        spec, parallelize_fn=summing(spec.parallelize_fn)
    )
    config.parallelism.spmd_backend = "partial_dtensor"  # torch 2.13 on several ranks
    config.tokenizer = TitanTokenizer.Config(name="bytes")
    config.dataloader = TokenLoader.Config(
        dataset_path="data/python", vocab_size=spec.model.vocab_size
    )
    config.hf_assets_path = "."
    config.training = dataclasses.replace(
        config.training,
        local_batch_size=4,
        seq_len=128,
        steps=30,
        mixed_precision_param="float32",
        disable_cuda_graphs=True,
    )
    return config


if __name__ == "__main__":
    from train.engine.titan_cpu import prepare

    prepare()  # what torchtitan imports and asks for, where there is neither
    from torchtitan.train import main

    own = ["--module", "examples.torchtitan_llama3", "--config", "llama3_mars_cpu"]
    sys.argv[1:] = own + sys.argv[1:]
    main()
