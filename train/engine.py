"""Everything that plugs into torchtitan 0.3.0: model, optimizer, schedule, data,
validation, trainer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from marsopt import LOCAL, MARS
from parallel import MeshCollectives
from train import gpt2, schedule
from train.batches import Batches
from train.titan import (
    TORCH_DTYPE_MAP,
    BaseDataLoader,
    BaseModel,
    BaseTokenizer,
    LRSchedulersContainer,
    OptimizersContainer,
    Trainer,
    Validator,
    clip_grad_norm_,
)
from train.tokenizers import tokenizer
from train.tokens import open_tokens

# ---- model ---------------------------------------------------------------------------
# -------------------------------


class TitanGPT2(gpt2.GPT2, BaseModel):
    """GPT-2 as torchtitan builds it."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        shape: gpt2.Shape
        seed: int = 0

        def update_from_config(self, *, config, **kwargs) -> None:
            self.seed = config.debug.seed or 0

        def get_nparams_and_flops(self, model, seq_len: int) -> tuple[int, int]:
            count = sum(p.numel() for p in model.parameters())
            return count, gpt2.num_flops_per_token(self.shape, count, seq_len)

    def __init__(self, config: Config) -> None:
        super().__init__(config.shape)
        self.config = config

    def verify_module_protocol(self) -> None:
        """Our submodules are plain torch modules; torchtitan's docstring allows to say
        so here.
        """

    def init_weights(self, **kwargs) -> None:
        gpt2.GPT2.init_weights(self, seed=self.config.seed)


def parallelize(
    model,
    *,
    parallel_dims,
    training,
    parallelism,
    compile_config,
    ac_config,
    dump_folder,
):
    """torchtitan's hook: FSDP2 or HSDP, after activation checkpointing and compilation
    of each block.
    """
    if parallel_dims.tp_enabled or parallel_dims.cp_enabled or parallel_dims.ep_enabled:
        raise NotImplementedError(
            "this model has data parallelism only: leave tensor, context and expert "
            "degrees at 1"
        )
    axis = (
        "fsdp" if parallelism.spmd_backend == "partial_dtensor" else "dp_shard"
    )  # exists at size 1 too
    names = ["dp_replicate", axis] if parallel_dims.dp_replicate_enabled else axis
    compiled = compile_config.enable and "model" in compile_config.components
    return gpt2.shard(
        model,
        parallel_dims.get_mesh(names),
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        reshard_after_forward=parallelism.fsdp_reshard_after_forward != "never",
        checkpoint=ac_config.build(dump_folder=dump_folder).apply
        if ac_config is not None
        else None,
        compile_block=(
            lambda b: b.compile(backend=compile_config.backend, fullgraph=True)
        )
        if compiled
        else None,
    )


# ---- optimizer and schedule ----------------------------------------------------------
# -------------------------------


class MarsOptimizers(OptimizersContainer):
    """One MARS over the whole model: embeddings in a group without weight decay, as in
    the authors' scripts.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        mars_type: str = "mars-adamw"
        """mars-adamw, mars-lion, mars-shampoo, mars-m, adamw, lion, muon or moonlight.
        """
        lr: float = 3e-3
        """Peak learning rate of matrices."""
        betas: tuple[float, float] = (0.95, 0.99)
        """Decay rates of the moments; rules with one momentum use the first."""
        eps: float = 1e-8
        """Added to the root of the second moment."""
        weight_decay: float = 0.0
        """Decoupled weight decay of the matrices in the blocks."""
        embedding_weight_decay: float = 0.0
        """Weight decay of token and position embeddings."""
        amsgrad: bool = False
        """Divide by the root of the largest second moment so far."""
        gamma: float = 0.025
        """Scale of the variance reduction."""
        exact: bool = False
        """Exact MARS: a second gradient a step, of the next batch at the current
        parameters.
        """
        optimize_1d: bool = False
        """Give LayerNorm weights to the MARS rule too."""
        lr_1d: float = 3e-3
        """Peak learning rate of LayerNorm weights."""
        betas_1d: tuple[float, float] = (0.9, 0.95)
        """Decay rates of their AdamW."""
        weight_decay_1d: float = 0.1
        """Weight decay of their AdamW."""
        clip: float | None = 1.0
        """Threshold of the per-tensor norm of the corrected gradient; None = off."""
        ns_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
        """Working precision of Newton-Schulz."""
        compile: bool | None = None
        """Compile the step: None = where this machine can."""

        def group(self) -> dict:
            """What is MARS's own, per param group."""
            names = (
                "mars_type lr betas eps weight_decay amsgrad gamma optimize_1d clip "
                "lr_1d betas_1d weight_decay_1d"
            )
            return {name: getattr(self, name) for name in names.split()}

    def __init__(self, config: Config, *, model_parts: list[torch.nn.Module]) -> None:
        (model,) = model_parts
        self.model_parts = model_parts
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        embeddings = [
            (name, p) for name, p in named if name.startswith(("wte.", "wpe."))
        ]
        others = [
            (name, p) for name, p in named if not name.startswith(("wte.", "wpe."))
        ]
        mesh = next((p.device_mesh for _, p in named if isinstance(p, DTensor)), None)
        mars = MARS(
            [
                {"params": others},
                {"params": embeddings, "weight_decay": config.embedding_weight_decay},
            ],
            **config.group(),
            is_approx=not config.exact,
            ns_dtype=TORCH_DTYPE_MAP.get(config.ns_dtype, torch.float16),
            collectives=LOCAL if mesh is None else MeshCollectives(mesh),
            compile=config.compile,
        )
        self.optimizers = [mars]
        self._post_init([p for _, p in named])

    @property
    def mars(self) -> MARS:
        """The one optimizer."""
        return self.optimizers[0]


class CosineSchedule(LRSchedulersContainer):
    """The recipes' schedule; ``min_lr`` is a learning rate, not a factor."""

    @dataclass(kw_only=True, slots=True)
    class Config(LRSchedulersContainer.Config):
        min_lr: float = 0.0
        """Learning rate of matrices at the end; that of LayerNorm weights follows in
        proportion.
        """

        def build(self, *, optimizers, training_steps):
            mars = optimizers.mars
            factor = partial(
                schedule.cosine,
                warmup=int(self.warmup_steps),
                total=self.total_steps or training_steps,
                floor=self.min_lr / mars.defaults["lr"] if mars.defaults["lr"] else 0.0,
            )
            return CosineSchedule(optimizers, factor)


# ---- data ----------------------------------------------------------------------------
# -------------------------------


class TitanTokenizer(BaseTokenizer):
    """Ours, as torchtitan wants one; made when first used, since training reads ids."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        name: str = "bytes"
        """bytes or gpt2."""

    def __init__(
        self, config: Config, *, tokenizer_path: str | None = None, **kwargs
    ) -> None:
        super().__init__()
        self._name = config.name

    def encode(self, text: str, **kwargs) -> list[int]:
        return tokenizer(self._name).encode(text)

    def decode(self, ids, **kwargs) -> str:
        return tokenizer(self._name).decode(ids)

    def get_vocab_size(self) -> int:
        return tokenizer(self._name).vocab_size


class TokenLoader(BaseDataLoader):
    """Batches of a token file; its state is one integer, the samples served over all
    ranks.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        split: str = "train"
        """train or val."""
        infinite: bool = True
        """Set by torchtitan's Validator; our validation sets a number of samples
        instead.
        """
        vocab_size: int = 0
        """Set from the model."""
        seed: int = 0
        """Set from debug.seed."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size,
        dp_rank,
        tokenizer,
        seq_len,
        local_batch_size,
        **kwargs,
    ) -> None:
        # the launcher has verified checksums once
        tokens, self.meta = open_tokens(
            Path(config.dataset_path),
            config.split,
            vocab_size=config.vocab_size,
            verify=False,
        )
        self.batches = Batches(
            tokens,
            rank=dp_rank,
            world=dp_world_size,
            local_batch=local_batch_size,
            seq_len=seq_len,
            vocab_size=config.vocab_size,
            seed=config.seed,
            consecutive=config.split != "train",
        )

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            inputs, labels = self.batches.next()
            yield {"input": inputs}, labels

    def state_dict(self) -> dict[str, int]:
        return {"samples": self.batches.samples}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.batches.samples = int(state_dict["samples"])


class HeldOut(Validator):
    """Validation over the same held-out samples for any number of ranks, at the last
    step too.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        samples: int = 256
        """Held-out sequences per validation, over all ranks."""
        last_step: int = 0
        """Set from training.steps."""

    def __init__(
        self, config: Config, *, dp_world_size: int, local_batch_size: int, **kwargs
    ) -> None:
        config = replace(
            config, steps=config.samples // (local_batch_size * dp_world_size)
        )
        super().__init__(
            config,
            dp_world_size=dp_world_size,
            local_batch_size=local_batch_size,
            **kwargs,
        )

    def should_validate(self, step: int) -> bool:
        return super().should_validate(step) or step == self.config.last_step


# ---- trainer -------------------------------------------------------------------------
# -------------------------------


class MarsTrainer(Trainer):
    """torchtitan's trainer; exact MARS adds one pass over the next batch before each
    step.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        optimizer: MarsOptimizers.Config = field(default_factory=MarsOptimizers.Config)
        lr_scheduler: CosineSchedule.Config = field(
            default_factory=CosineSchedule.Config
        )
        tokenizer: TitanTokenizer.Config = field(default_factory=TitanTokenizer.Config)
        dataloader: TokenLoader.Config = field(default_factory=TokenLoader.Config)
        validator: HeldOut.Config = field(default_factory=HeldOut.Config)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.metrics_processor.begin(self.dataloader.meta)
        self._exact = config.optimizer.exact
        if self._exact:
            self._ahead = config.dataloader.build(
                dp_world_size=self.dataloader.batches.world,
                dp_rank=self.dataloader.batches.rank,
                tokenizer=self.tokenizer,
                seq_len=config.training.seq_len,
                local_batch_size=config.training.local_batch_size,
            )

    def train_step(self, data_iterator) -> None:
        if self._exact:
            self._look_ahead()
        super().train_step(data_iterator)
        if self._exact:
            self.optimizers.mars.update_last_grad()

    def _look_ahead(self) -> None:
        """The next global batch's gradient at the current parameters, clipped by its
        own norm, given to MARS.

        It becomes h of the next step (mars.py of the authors: update_previous_grad). A
        loader of its own reads one global batch ahead, so that the state of the real
        one stays what training has consumed.
        """
        training = self.config.training
        batches = self._ahead.batches
        per_step = (
            self.gradient_accumulation_steps * training.local_batch_size * batches.world
        )
        batches.samples = self.dataloader.batches.samples + per_step
        tokens = torch.tensor(per_step * training.seq_len, device=self.device)
        self.optimizers.zero_grad(set_to_none=True)
        seen = self.ntokens_seen
        for _ in range(self.gradient_accumulation_steps):
            inputs, labels = batches.next()
            self.forward_backward_step(
                input_dict={"input": inputs.to(self.device)},
                labels=labels.to(self.device),
                global_valid_tokens=tokens,
            )
        self.ntokens_seen = seen  # these tokens are counted when they are trained on
        params = [p for model in self.model_parts for p in model.parameters()]
        clip_grad_norm_(params, training.max_norm, foreach=True)
        self.optimizers.mars.update_previous_grad()
