"""Activations of a forward and backward pass, as a formula: does a micro-batch fit?"""

from __future__ import annotations

from dataclasses import dataclass

FULL = 4  # bytes of a float32


@dataclass(frozen=True)
class Activations:
    """The sizes that decide what a transformer's forward pass keeps on one GPU.

    Args:
        num_layers, width, vocab_size: of the model.
        inner: width inside the MLP.
        seq_len: tokens of a sequence.
        kv_width: width of keys and of values in a llama block (RMSNorm, SwiGLU); None =
            a GPT-2 block (LayerNorm, GELU).
        micro_batch: sequences of a forward pass.
    """

    num_layers: int
    width: int
    inner: int
    vocab_size: int
    seq_len: int
    kv_width: int | None = None
    micro_batch: int = 1

    def peak(self, *, checkpointed: bool = False, itemsize: int = 2) -> int:
        """Return the most bytes that activations, logits and loss take at once.

        The pass is eager, attention is fused, and cross entropy is taken in float32 of
        whole logits. Statistics of norms and of attention are left out: they are under
        1%. Parameters and their gradients are not counted.

        Args:
            checkpointed: a block keeps its input alone, and runs again in backward.
            itemsize: bytes of an activation's dtype; 2 = bfloat16.
        """
        block, norm = self._block(itemsize), self._norm(itemsize)
        kept = self.width * itemsize if checkpointed else block
        # at the loss: log-probabilities, their gradient and that of the logits
        loss = self.width * itemsize + norm + 3 * FULL * self.vocab_size
        # in backward of the last block: what it computed again, and its gradients
        again = block if checkpointed else 0
        backward = again + (2 * self.inner + 2 * self.width) * itemsize
        tokens = self.micro_batch * self.seq_len
        return tokens * (self.num_layers * kept + max(loss, backward))

    def _norm(self, itemsize: int) -> int:
        """Return the bytes a token that a norm keeps beside its input."""
        if self.kv_width is None:
            return self.width * itemsize
        # RMSNorm in several kernels: its input in float32, before and after the weight
        upcast = FULL if itemsize < FULL else 0
        return self.width * (2 * itemsize + upcast)

    def _block(self, itemsize: int) -> int:
        """Return the bytes a token that a block keeps for its backward pass."""
        if self.kv_width is None:
            # two inputs of norms; q, k, v and the divided q; attention's output;
            # before and after GELU
            kept = (2 + 4 + 1) * self.width + 2 * self.inner
        else:
            # two inputs of norms; q, attention's output; k, v; gate before and after
            # SiLU, up, and their product
            kept = (2 + 2) * self.width + 2 * self.kv_width + 4 * self.inner
        return kept * itemsize + 2 * self._norm(itemsize)
