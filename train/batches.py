"""Sample number s: a function of (data, seed, s), whatever the number of ranks."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from train.errors import UserError


class Batches:
    """One rank's share of global batches that are the same for any number of ranks.

    A training sample is a window at a random place (nanoGPT's sampling: uniform, with
    replacement), drawn from a counter based generator keyed by the seed, so that the
    state is one integer: the samples that all ranks have been served. Validation
    samples are consecutive windows from the start of the file.

    Args:
        tokens: (num_tokens,) uint16.
        rank, world: this rank of how many.
        local_batch: samples per batch of one rank.
        seq_len: tokens per sample.
        vocab_size: of the model; an id outside it is an error.
        seed: of the order.
        consecutive: validation's order instead of random places.

    Raises:
        UserError: fewer tokens than one sample needs.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        *,
        rank: int,
        world: int,
        local_batch: int,
        seq_len: int,
        vocab_size: int,
        seed: int = 0,
        consecutive: bool = False,
    ) -> None:
        if len(tokens) < seq_len + 1:
            raise UserError(
                f"got {len(tokens):,} tokens, expected at least one sample of seq_len "
                f"+ 1 = {seq_len + 1:,}: prepare more "
                "text, or lower training.seq_len"
            )
        self._tokens, self.rank, self.world = tokens, rank, world
        self._local_batch, self._seq_len, self._vocab_size = (
            local_batch,
            seq_len,
            vocab_size,
        )
        self._seed, self._consecutive = seed, consecutive
        self.samples = 0  # served so far, over all ranks

    @property
    def num_windows(self) -> int:
        """Windows without overlap in the file."""
        return (len(self._tokens) - 1) // self._seq_len

    def _start(self, sample: int) -> int:
        if self._consecutive:
            return sample % self.num_windows * self._seq_len
        draw = np.random.Generator(
            np.random.Philox(key=self._seed, counter=[0, 0, 0, sample])
        )
        return int(draw.integers(len(self._tokens) - self._seq_len))

    def next(self) -> tuple[Tensor, Tensor]:
        """Inputs and labels (local_batch, seq_len), int64, labels one token ahead.

        Raises:
            UserError: a token id outside the vocabulary.
        """
        first = self.samples + self.rank * self._local_batch
        starts = [self._start(first + i) for i in range(self._local_batch)]
        window = np.stack(
            [self._tokens[at : at + self._seq_len + 1] for at in starts]
        ).astype(np.int64)
        if window.max() >= self._vocab_size:
            raise UserError(
                f"got token id {window.max()} in the data, expected ids below the "
                f"model's vocabulary of {self._vocab_size}: "
                "prepare the data with this configuration's tokenizer"
            )
        self.samples += self._local_batch * self.world
        both = torch.from_numpy(window)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()
