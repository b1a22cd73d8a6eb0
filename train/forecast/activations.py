"""What forward and backward keep of a micro-batch: a closed formula, held to what torch
allocates for tensors without memory (tests/application/test_forecast.py).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Blocks:
    """A transformer, by what it keeps of each token for the backward pass.

    Args:
        num_layers, width: of the blocks.
        qkv: numbers a token of queries, keys and values that a block keeps.
        mlp: numbers a token that a block keeps between the matrices of its MLP.
        vocab_size: columns of the logits.
    """

    num_layers: int
    width: int
    qkv: int
    mlp: int
    vocab_size: int

    @staticmethod
    def gpt2(num_layers: int, width: int, vocab_size: int, *, scaled: bool) -> Blocks:
        """Return GPT-2's: one product of queries, keys and values, which stays whole,
        and 4 ``width`` numbers before and after GELU.

        ``scaled``: queries are divided, and the quotients kept, too.
        """
        return Blocks(num_layers, width, (3 + scaled) * width, 8 * width, vocab_size)

    @staticmethod
    def llama(
        num_layers: int, width: int, inner: int, vocab_size: int, kv_width: int
    ) -> Blocks:
        """Return LLaMA's: rotated queries and keys, values, and SwiGLU, which keeps
        gate, SiLU, up and their product.
        """
        return Blocks(num_layers, width, width + 2 * kv_width, 4 * inner, vocab_size)


@dataclass(frozen=True)
class MicroBatch:
    """The tokens of one forward pass on one GPU.

    Args:
        blocks: of the model.
        num_sequences, seq_len: of the micro-batch.
        is_compiled: the loss is: it keeps the logits in their own dtype, and makes one
            gradient of them. If not, the peak is three float32 tensors of that shape.
        itemsize: bytes of a number: 2 in bfloat16, 4 in float32.
    """

    blocks: Blocks
    num_sequences: int
    seq_len: int
    is_compiled: bool = True
    itemsize: int = 2

    def activation_bytes(self, *, is_checkpointed: bool = False) -> int:
        """Return the most bytes that activations, logits, loss and their gradients take
        at once. Compiled blocks keep what eager blocks keep.

        Attention keeps no matrix of scores (FlashAttention). The statistics of norms
        and the log-sum-exp of heads are left out: 0.25% of a block of GPT-2 small.

        Args:
            is_checkpointed: a block keeps its input, and is computed again in the
                backward pass (torchtitan's activation-checkpoint:full).
        """
        blocks, size = self.blocks, self.itemsize
        # input, attention's output, the sum of both, and the outputs of two norms
        block = 5 * blocks.width + blocks.qkv + blocks.mlp
        kept = blocks.num_layers * (blocks.width if is_checkpointed else block)
        logits = blocks.vocab_size * (2 * size if self.is_compiled else 12)
        # with the last norm's input and output
        at_loss = size * (kept + 2 * blocks.width) + logits
        # in the last block's backward: what it keeps, and gradients up to its MLP's
        again = block if is_checkpointed else 0
        at_block = size * (kept + again + 2 * blocks.width + blocks.mlp // 2)
        return self.num_sequences * self.seq_len * max(at_loss, at_block)
