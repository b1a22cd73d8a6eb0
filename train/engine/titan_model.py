"""GPT-2 as torchtitan builds and shards it, and the loss that it descends."""

from dataclasses import dataclass

from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from train.engine.titan import TORCH_DTYPE_MAP, BaseModel, CrossEntropyLoss
from train.gpt2 import GPT2, Shape


class TitanGPT2(GPT2, BaseModel):
    """GPT-2 as torchtitan builds it."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        shape: Shape
        seed: int = 0

        def update_from_config(self, *, config, **kwargs) -> None:
            self.seed = config.debug.seed or 0

        def get_nparams_and_flops(self, model, seq_len: int) -> tuple[int, int]:
            count = sum(p.numel() for p in model.parameters())
            return count, self.shape.num_flops_per_token(count, seq_len)

    def __init__(self, config: Config) -> None:
        super().__init__(config.shape)
        self.config = config

    def verify_module_protocol(self) -> None:
        """Accept plain torch modules inside; torchtitan allows to say so here."""

    def init_weights(self, **kwargs) -> None:
        GPT2.init_weights(self, seed=self.config.seed)


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
    """Shard the model in place, as torchtitan's hook: activation checkpointing and
    compilation of each block, then FSDP2 (1-D mesh) or HSDP (2-D: replicate, shard).
    """
    if parallel_dims.tp_enabled or parallel_dims.cp_enabled or parallel_dims.ep_enabled:
        raise NotImplementedError(
            "data parallelism only: leave tensor, context and expert degrees at 1"
        )
    if ac_config:
        ac_config.build(dump_folder=dump_folder).apply(model)
    blocks = model.layers.values()
    if compile_config.enable and "model" in compile_config.components:
        for block in blocks:
            block.compile(backend=compile_config.backend, fullgraph=True)
    # exists at size 1 too
    axis = "fsdp" if parallelism.spmd_backend == "partial_dtensor" else "dp_shard"
    names = ["dp_replicate", axis] if parallel_dims.dp_replicate_enabled else axis
    dtypes = (training.mixed_precision_param, training.mixed_precision_reduce)
    policy = MixedPrecisionPolicy(*(TORCH_DTYPE_MAP[name] for name in dtypes))
    mesh = parallel_dims.get_mesh(names)
    reshard = parallelism.fsdp_reshard_after_forward != "never"
    for module in (*blocks, model):
        again = reshard and module is not model
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=again)
        # the loss is divided by the global number of tokens already
        module.set_gradient_divide_factor(1.0)
        if mesh.device_type == "cpu":
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    return model


class SummedLoss(CrossEntropyLoss):
    """Mean cross entropy over the global batch, whose gradient may be scaled.

    The MARS scripts do not divide by their number of micro-steps: DDP averages over
    GPUs, the loop adds up, so that what the global clip sees is the mean gradient times
    the micro-steps of *their* GPUs. Here that number belongs to the recipe, not to how
    it is executed: the gradient is the same for any number of processes and any local
    batch size. Losses shown and validated stay means.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CrossEntropyLoss.Config):
        num_summed: int = 1
        """Micro-steps whose mean gradients are added before the clip; 1 = the mean."""

    def __init__(self, config: Config, **kwargs) -> None:
        super().__init__(config, **kwargs)
        self._num_summed = config.num_summed

    def __call__(
        self, pred: Tensor, labels: Tensor, global_valid_tokens=None, **kwargs
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = super().__call__(pred, labels, global_valid_tokens, **kwargs)
        if loss.requires_grad and self._num_summed != 1:
            loss.register_hook(lambda grad: grad * self._num_summed)
        return loss, metrics
