"""GPT-2 as the MARS authors train it, in plain PyTorch: no biases, pre-LayerNorm, tied
embedding, tanh GELU.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


@dataclass(frozen=True)
class Shape:
    """Size of a GPT-2.

    ``inverse_layer_scale`` divides the attention logits of layer i (from 0) by i + 1,
    as the authors' recipes do (Hugging Face's scale_attn_by_inverse_layer_idx).
    """

    num_layers: int
    num_heads: int
    width: int
    block_size: int
    vocab_size: int
    inverse_layer_scale: bool = True


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), on (batch, time, width)."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        width = shape.width
        self.num_heads = shape.num_heads
        self.scale = (width // shape.num_heads) ** -0.5 / (
            layer + 1 if shape.inverse_layer_scale else 1
        )
        self.attn_norm = nn.LayerNorm(width, bias=False)
        self.attn_in = nn.Linear(width, 3 * width, bias=False)
        self.attn_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        heads = self.attn_in(self.attn_norm(x)).view(
            batch, time, 3, self.num_heads, width // self.num_heads
        )
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each (batch, heads, time, head width)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        x = x + self.attn_out(y.transpose(1, 2).reshape(batch, time, width))
        return x + self.mlp_out(
            F.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh")
        )


class GPT2(nn.Module):
    """Token ids (batch, time) to logits (batch, time, vocab_size).

    Input and output embedding are one parameter, used twice in the root's own forward:
    FSDP2 refuses a parameter that two modules share. Blocks stand in a ModuleDict named
    ``layers``, where torchtitan looks for them.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.wte = nn.Embedding(shape.vocab_size, shape.width)
        self.wpe = nn.Embedding(shape.block_size, shape.width)
        self.layers = nn.ModuleDict(
            {str(i): Block(shape, i) for i in range(shape.num_layers)}
        )
        self.norm = nn.LayerNorm(shape.width, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.layers.values():
            x = block(x)
        return F.linear(self.norm(x), self.wte.weight)

    @torch.no_grad()
    def init_weights(self, seed: int = 0) -> None:
        """N(0, 0.02), projections into the residual N(0, 0.02/sqrt(2 num_layers)),
        norms 1; the same on every mesh.

        Each full tensor is drawn on the CPU from its own name and then cut: on a CPU
        mesh DTensor would draw the same numbers for every shard.
        """
        for name, p in self.named_parameters():
            name = name.replace("_checkpoint_wrapped_module.", "").replace(
                "_orig_mod.", ""
            )
            if p.ndim == 1:
                full = torch.ones(p.shape)
            else:
                digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
                generator = torch.Generator().manual_seed(
                    int.from_bytes(digest[:7], "big")
                )
                residual = name.endswith(("attn_out.weight", "mlp_out.weight"))
                std = 0.02 / (2 * self.shape.num_layers) ** 0.5 if residual else 0.02
                full = torch.empty(p.shape).normal_(0.0, std, generator=generator)
            if isinstance(p, DTensor):
                shard = distribute_tensor(
                    full, p.device_mesh, p.placements, src_data_rank=None
                )
                p.to_local().copy_(shard.to_local())
            else:
                p.copy_(full)


def num_flops_per_token(shape: Shape, num_params: int, seq_len: int) -> int:
    """Forward and backward FLOPs a token: 6 per weight that is multiplied with, and
    causal attention (PaLM, appendix B).
    """
    return (
        6 * (num_params - shape.block_size * shape.width)
        + 6 * shape.num_layers * shape.width * seq_len
    )


def shard(
    model: GPT2,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard_after_forward: bool = True,
    checkpoint: Callable[[nn.Module], None] | None = None,
    compile_block: Callable[[nn.Module], None] | None = None,
) -> GPT2:
    """Activation checkpointing, compilation per block, then FSDP2 (1-D mesh) or HSDP
    (2-D: replicate, shard), in place.
    """
    if checkpoint is not None:
        checkpoint(model)
    if compile_block is not None:
        for block in model.layers.values():
            compile_block(block)
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    for block in model.layers.values():
        fully_shard(
            block,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=reshard_after_forward,
        )
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(
                1.0
            )  # the loss is divided by the global number of tokens already
            if mesh.device_type == "cpu":
                module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    return model
