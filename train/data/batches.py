"""Sample number s: a function of (data, seed, s), whatever the number of ranks."""

from dataclasses import KW_ONLY, dataclass

import numpy as np
import torch
from torch import Tensor

from train.errors import UserError


@dataclass
class Batches:
    """One rank's share of global batches that are the same for any number of ranks.

    A training sample is a window at a random place (nanoGPT's sampling: uniform, with
    replacement), drawn from a counter based generator keyed by the seed, so that the
    state is one integer: the samples that all ranks have been served. Validation
    samples are windows without overlap, spread evenly over the whole file.

    Whoever makes one gives this ``rank`` of how many (``world``), samples per batch of
    one rank, tokens per sample, and the model's vocabulary: an id outside it is an
    error.
    """

    tokens: np.ndarray  # (num_tokens,) uint16
    _: KW_ONLY
    rank: int
    world: int
    local_batch: int
    seq_len: int
    vocab_size: int
    seed: int = 0  # of the order
    spread: int | None = None  # validation: samples of a round; None = random places
    samples: int = 0  # served so far, over all ranks

    def __post_init__(self) -> None:
        if len(self.tokens) < self.seq_len + 1:
            raise UserError(
                f"got {len(self.tokens):,} tokens, expected at least one sample of "
                f"seq_len + 1 = {self.seq_len + 1:,}: prepare more text, or lower "
                "training.seq_len"
            )

    @property
    def num_windows(self) -> int:
        """Return the number of windows without overlap in the file."""
        return (len(self.tokens) - 1) // self.seq_len

    def start_of(self, sample: int) -> int:
        """Return the place in the file at which a sample begins."""
        if self.spread is not None:  # the middle of each of so many equal parts
            middle = 2 * (sample % self.spread) + 1
            return middle * self.num_windows // (2 * self.spread) * self.seq_len
        counter = np.random.Philox(key=self.seed, counter=[0, 0, 0, sample])
        draw = np.random.Generator(counter)
        return int(draw.integers(len(self.tokens) - self.seq_len))

    def next(self) -> tuple[Tensor, Tensor]:
        """Return inputs, and labels one ahead: (local_batch, seq_len), int64."""
        first = self.samples + self.rank * self.local_batch
        starts = [self.start_of(first + i) for i in range(self.local_batch)]
        length = self.seq_len + 1
        window = np.stack([self.tokens[at : at + length] for at in starts])
        window = window.astype(np.int64)
        if window.max() >= self.vocab_size:
            raise UserError(
                f"got token id {window.max()} in the data, expected ids below the "
                f"model's vocabulary of {self.vocab_size}: prepare the data with this "
                "configuration's tokenizer"
            )
        self.samples += self.local_batch * self.world
        both = torch.from_numpy(window)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()
