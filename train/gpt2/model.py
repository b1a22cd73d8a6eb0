"""GPT-2 as the MARS authors train it, in plain PyTorch: no biases, one embedding."""

import hashlib
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from train.files import Limits

# as files may give them: what is built from these takes a second at most
Depth = Annotated[int, Limits(ge=1, le=1000)]
Size = Annotated[int, Limits(ge=1, le=2**20)]


@dataclass(frozen=True)
class Shape:
    """Size of a GPT-2.

    ``inverse_layer_scale`` divides the attention logits of layer i (from 0) by i + 1,
    as the authors' recipes do (Hugging Face's scale_attn_by_inverse_layer_idx).
    """

    num_layers: Depth
    num_heads: Size
    width: Size
    block_size: Size
    vocab_size: Size
    inverse_layer_scale: bool = True

    def num_flops_per_token(self, num_params: int, seq_len: int) -> int:
        """Return the FLOPs of a token, forward and backward: 6 per weight that is
        multiplied with, as positions are not, and causal attention (PaLM, arXiv
        2204.02311, appendix B).
        """
        looked_up, attention = self.block_size, self.num_layers * seq_len
        return 6 * (num_params + (attention - looked_up) * self.width)

    def __post_init__(self) -> None:
        if self.width % self.num_heads:
            heads = f"{self.num_heads} heads with a width of {self.width}"
            raise ValueError(f"got {heads}, expected a number that divides it")


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), on (batch, time, width)."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        width, self.num_heads = shape.width, shape.num_heads
        # a tensor, which one compiled graph takes from every block: of a number dynamo
        # compiles each block anew, and gives up after eight
        divisor = torch.full((1,), layer + 1) if shape.inverse_layer_scale else None
        self.register_buffer("divisor", divisor, persistent=False)
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
        if self.divisor is not None:
            q = q / self.divisor
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_out(y.transpose(1, 2).reshape(batch, time, width))
        inner = self.mlp_in(self.mlp_norm(x))
        return x + self.mlp_out(F.gelu(inner, approximate="tanh"))


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
        blocks = {str(i): Block(shape, i) for i in range(shape.num_layers)}
        self.layers = nn.ModuleDict(blocks)
        self.norm = nn.LayerNorm(shape.width, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.layers.values():
            x = block(x)
        return F.linear(self.norm(x), self.wte.weight)

    @torch.no_grad()
    def init_weights(self, seed: int = 0) -> None:
        """Draw N(0, 0.02), projections into the residual N(0, 0.02/sqrt(2 num_layers)),
        norms 1; the same on every mesh. Buffers, which to_empty() empties, are set too.

        Each full tensor is drawn on the CPU from its own name and then cut: on a CPU
        mesh DTensor would draw the same numbers for every shard.
        """
        for name, p in self.named_parameters():
            for wrapper in ("_checkpoint_wrapped_module.", "_orig_mod."):
                name = name.replace(wrapper, "")
            if p.ndim == 1:
                full = torch.ones(p.shape)
            else:
                digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7]
                generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
                residual = name.endswith(("attn_out.weight", "mlp_out.weight"))
                std = 0.02 / (2 * self.shape.num_layers) ** 0.5 if residual else 0.02
                full = torch.empty(p.shape).normal_(0.0, std, generator=generator)
            if isinstance(p, DTensor):
                mesh, placements = p.device_mesh, p.placements
                shard = distribute_tensor(full, mesh, placements, src_data_rank=None)
                p, full = p.to_local(), shard.to_local()
            p.copy_(full)
        if self.shape.inverse_layer_scale:
            for layer, block in enumerate(self.layers.values()):
                block.divisor.fill_(layer + 1)


def tensor_sizes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Return the sizes of all parameters by name, without making them."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in GPT2(shape).named_parameters()}
