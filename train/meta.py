"""What is known of a folder of token files: meta.json."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from train.errors import UserError
from train.token_files import sync

SPLITS = ("train", "val")


@dataclass(frozen=True)
class Split:
    """The tokens of one split: how many, and the bytes of text behind them (None: not
    known).

    One raw file, ``sha256`` its checksum; or ``shards`` with a header, {name: checksum}
    in their order, ``sha256`` that of the list of them.
    """

    tokens: int
    text_bytes: int | None
    sha256: str
    shards: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Meta:
    """What meta.json says. ``source`` is what the files were made from, to recognise
    them again.
    """

    tokenizer: str
    vocab_size: int
    source: dict
    train: Split
    val: Split

    def save(self, folder: Path) -> None:
        """Write meta.json."""
        raw = asdict(self)
        for split in SPLITS:
            if not raw[split]["shards"]:
                del raw[split]["shards"]
        draft = folder / "meta.json.tmp"
        with draft.open("w") as file:
            file.write(json.dumps(raw, indent=1) + "\n")
            sync(file)
        draft.rename(folder / "meta.json")

    @classmethod
    def load(cls, folder: Path) -> Meta:
        """Read meta.json.

        Raises:
            UserError: no such file, or not one of ours.
        """
        path = folder / "meta.json"
        if not path.exists():
            raise UserError(
                f"got no {path}, expected the output of train.prepare: python -m "
                f"train.prepare --source python --out {folder}"
            )
        try:
            raw = json.loads(path.read_text())
            splits = {name: Split(**raw.pop(name)) for name in SPLITS}
            return cls(**raw, **splits)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(
                f"got a {path} that does not read ({error}), expected the output of "
                "train.prepare: prepare the data again "
                "into another folder"
            ) from error

    def nats_per_byte(self, split: str) -> float | None:
        """What a loss in nats per token is multiplied with to give nats per byte of
        text; None where the bytes are not known.
        """
        part = getattr(self, split)
        return part.tokens / part.text_bytes if part.text_bytes else None
