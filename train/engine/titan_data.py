"""Token files as torchtitan's tokenizer, data loader and validator."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from train.data.batches import Batches
from train.data.tokenizers import tokenizer
from train.data.tokens import open_tokens
from train.engine.titan import BaseDataLoader, BaseTokenizer, Validator


class TitanTokenizer(BaseTokenizer):
    """Ours, as torchtitan wants one; made when first used, since training reads ids."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        name: str = "bytes"
        """bytes, bpe1024 or gpt2."""

    def __init__(self, config: Config, **kwargs) -> None:
        super().__init__()
        self._name = config.name

    def encode(self, text: str, **kwargs) -> list[int]:
        return tokenizer(self._name).encode(text)

    def decode(self, ids, **kwargs) -> str:
        return tokenizer(self._name).decode(ids)

    def get_vocab_size(self) -> int:
        return tokenizer(self._name).vocab_size


class TokenLoader(BaseDataLoader):
    """Batches of a token file; its state is the number of samples all ranks served."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        dataset_path: str | None = None
        """The folder of train.prepare; of validator.dataloader None = that of
        dataloader.
        """
        split: str = "train"
        """train or val."""
        infinite: bool = True
        """Set by torchtitan's Validator; ours sets a number of samples instead."""
        vocab_size: int = 0
        """Set from the model."""
        seed: int = 0
        """Set from debug.seed."""

    def __init__(
        self, config: Config, *, dp_rank, dp_world_size, seq_len, local_batch_size, **_
    ) -> None:
        folder, vocab = Path(config.dataset_path), config.vocab_size
        # the launcher has verified checksums once
        tokens, _ = open_tokens(folder, config.split, vocab_size=vocab, verify=False)
        ranks = dict(rank=dp_rank, world=dp_world_size)
        sizes = dict(local_batch=local_batch_size, seq_len=seq_len, vocab_size=vocab)
        self.batches = Batches(tokens, **ranks, **sizes, seed=config.seed)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            inputs, labels = self.batches.next()
            yield {"input": inputs}, labels

    def state_dict(self) -> dict[str, int]:
        return {"samples": self.batches.samples}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.batches.samples = int(state_dict["samples"])


@dataclass(frozen=True)
class Spread:
    """What torchtitan's Validator builds its loader from, anew at each validation: one
    of so many samples, spread over the whole text.
    """

    config: TokenLoader.Config
    samples: int

    def build(self, **kwargs) -> TokenLoader:
        """Return the loader, at its first sample."""
        loader = self.config.build(**kwargs)
        loader.batches.spread = self.samples
        return loader


class HeldOut(Validator):
    """Validation on the same samples for any number of ranks, at the last step too."""

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        samples: int | None = None
        """Held-out sequences per validation, over all ranks; None = as many as there
        are, up to most_samples.
        """
        most_samples: int = 256
        """What the recipe validates on where that much is held out."""
        last_step: int = 0
        """Set from training.steps."""

    def __init__(
        self, config: Config, *, dp_world_size: int, local_batch_size: int, **kwargs
    ) -> None:
        sizes = dict(dp_world_size=dp_world_size, local_batch_size=local_batch_size)
        steps = config.samples // (local_batch_size * dp_world_size)
        super().__init__(replace(config, steps=steps), **sizes, **kwargs)
        self.dl_config = Spread(self.dl_config, config.samples)
        self._validated = 0  # the last step

    def should_validate(self, step: int) -> bool:
        is_due = super().should_validate(step) or step == self.config.last_step
        return is_due and step != self._validated

    def validate(self, model_parts, step: int) -> None:
        super().validate(model_parts, step)
        self._validated = step
