"""GPT-2 as torchtitan builds and shards it."""

from __future__ import annotations

from dataclasses import dataclass

from train import gpt2
from train.titan import TORCH_DTYPE_MAP, BaseModel


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
