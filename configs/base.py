"""What all recipes share, and the shapes of GPT-2."""

from __future__ import annotations

import torch

from marsopt.profiling.gpt2 import MODELS, NUM_POSITIONS, VOCAB_SIZE
from train.engine.progress import Progress
from train.engine.titan import (
    CompileConfig,
    DebugConfig,
    ModelSpec,
    ParallelismConfig,
    TrainingConfig,
)
from train.engine.titan_checkpoint import RunCheckpoints
from train.engine.titan_data import HeldOut, TitanTokenizer, TokenLoader
from train.engine.titan_model import SummedLoss, TitanGPT2, parallelize
from train.engine.titan_optim import MarsOptimizers, RateSchedule
from train.engine.trainer import MarsTrainer
from train.gpt2 import Shape

HEAD_WIDTH = 64  # of every GPT-2
SHAPES = {
    name.removeprefix("gpt2-"): Shape(
        num_layers=num_layers,
        num_heads=width // HEAD_WIDTH,
        width=width,
        block_size=NUM_POSITIONS,
        vocab_size=VOCAB_SIZE,
    )
    for name, (num_layers, width) in MODELS.items()
}


def gpt2_recipe(
    *,
    name: str,
    shape: Shape,
    tokenizer: str,
    data: str,
    optimizer: MarsOptimizers.Config,
    lr_scheduler: RateSchedule.Config,
    training: TrainingConfig,
    validation_samples: int,
    validation_interval: int,
    checkpoint_interval: int,
    log_freq: int,
    compile_model: bool,
    num_summed: int = 1,
) -> MarsTrainer.Config:
    """A complete configuration. ``name`` is the function that returns it: its runs lie
    in runs/NAME.
    """
    return MarsTrainer.Config(
        model_spec=ModelSpec(
            name="gpt2",
            flavor=name,
            model=TitanGPT2.Config(shape=shape),
            parallelize_fn=parallelize,
            pipelining_fn=None,
            post_optimizer_build_fn=None,
            state_dict_adapter=None,
        ),
        dump_folder=f"runs/{name}",
        hf_assets_path=".",  # has to exist; nothing is read from it
        tokenizer=TitanTokenizer.Config(name=tokenizer),
        dataloader=TokenLoader.Config(dataset_path=data),
        optimizer=optimizer,
        lr_scheduler=lr_scheduler,
        loss=SummedLoss.Config(num_summed=num_summed),
        training=training,
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        metrics=Progress.Config(
            log_freq=log_freq, enable_tensorboard=True, disable_color_printing=True
        ),
        checkpoint=RunCheckpoints.Config(
            enable=True,
            interval=checkpoint_interval,
            last_save_model_only=False,
            keep_latest_k=2,
        ),
        activation_checkpoint=None,
        compile=CompileConfig(enable=compile_model),
        validator=HeldOut.Config(
            enable=True,
            freq=validation_interval,
            steps=1,  # replaced: see HeldOut
            most_samples=validation_samples,
            dataloader=TokenLoader.Config(split="val"),
        ),
        debug=DebugConfig(seed=0, enable_structured_logging=False),
    )


def training(**kwargs) -> TrainingConfig:
    """torchtitan's section, for machines with and without a GPU."""
    on_cpu = not torch.cuda.is_available()
    return TrainingConfig(
        max_norm=1.0,
        disable_cuda_graphs=True,  # exact MARS sets gradients aside between two passes
        mixed_precision_param="float32" if on_cpu else "bfloat16",
        **kwargs,
    )
