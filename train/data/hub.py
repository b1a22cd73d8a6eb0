"""Documents of a Hugging Face data set, streamed from the hub or a local folder."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from train.errors import UserError

BATCH_DOCUMENTS = 256
SECONDS = 10  # for the first answer of the hub
EDGE = 1 << 16  # bytes at both ends of a local file that are looked at to recognise it


@dataclass(frozen=True)
class Place:
    """Where documents come from."""

    dataset: str  # OWNER/NAME on the hub, or a folder
    subset: str | None = None  # the hub's name of a part; None for the whole
    revision: str | None = None  # a branch or commit on the hub; None for the newest
    num_documents: int | None = None  # where known; for the progress bar

    def __post_init__(self) -> None:
        if self.is_local and self.subset is not None:
            raise UserError(
                f"got --subset {self.subset} with the folder {self.dataset}, expected "
                "none: give the folder of that subset's files alone"
            )
        on_hub = self.dataset.count("/") == 1 and self.dataset[0] not in "./~"
        if not self.is_local and not on_hub:
            raise UserError(
                f"got --dataset {self.dataset}, where no folder is, expected a folder "
                "of parquet, arrow or JSON-lines files, or a name on the Hugging Face "
                "hub as OWNER/NAME: give one of these"
            )

    @property
    def is_local(self) -> bool:
        """Return whether it is a folder of this machine."""
        return self.folder.is_dir()

    @property
    def folder(self) -> Path:
        """Return the folder, if it is one."""
        return Path(os.path.expanduser(self.dataset))

    def identity(self) -> dict:
        """Return by what prepared data is recognised again.

        A folder by the names, sizes and both ends of its files (parquet keeps its index
        and statistics at the end), wherever it lies.
        """
        if not self.is_local:
            return {"dataset": self.dataset, "subset": self.subset}
        files = sorted(p for p in self.folder.rglob("*") if p.is_file())
        digest = hashlib.sha256()
        for path in files:
            size = path.stat().st_size
            digest.update(os.fsencode(f"{path.relative_to(self.folder)}:{size}\n"))
            with path.open("rb") as file:
                digest.update(file.read(EDGE))
                file.seek(max(size - EDGE, 0))
                digest.update(file.read(EDGE))
        contents = digest.hexdigest()
        return {"dataset": "local", "files": len(files), "contents": contents}

    def commit(self, revision: str | None) -> str | None:
        """Return the commit that ``revision`` is now, so that a run that is continued
        later reads the same documents; None for a folder.

        One request without retries: a machine without a way to the hub is told at once.
        """
        if self.is_local:
            return None
        import httpx
        from huggingface_hub import dataset_info

        try:
            found = dataset_info(self.dataset, revision=revision, timeout=SECONDS)
        except (OSError, httpx.HTTPError, ValueError) as error:
            raise UserError(
                f"got {_line(error)} when asking the Hugging Face hub for "
                f"{self.dataset}, expected its answer within {SECONDS} s: this data set"
                " cannot be downloaded here; try again with a network, or copy its "
                "files here and give --dataset FOLDER"
            ) from error
        return found.sha


def _line(error: Exception) -> str:
    """Return the kind and first line of an error."""
    said = str(error).strip().splitlines()
    return f"{type(error).__name__} ({said[0][:200]})" if said else type(error).__name__


@contextmanager
def _explained(dataset: str) -> Iterator[None]:
    """Say in one line what the libraries raise for data that they cannot read."""
    try:
        yield
    except Exception as error:  # they pass on whatever they ran into
        raise UserError(
            f"got {_line(error)} while reading {dataset}, expected a data set with a "
            'split "train" and a column "text": run the same command again to go on '
            "where it stopped if the network failed, else repair or choose another "
            "--dataset"
        ) from error


class Corpus:
    """A data set's documents in its order; ``revision``: the commit, None: a folder."""

    def __init__(self, place: Place, revision: str | None) -> None:
        import datasets

        datasets.disable_progress_bars()
        self._name = place.dataset
        with _explained(self._name):
            path = str(place.folder) if place.is_local else place.dataset
            part = dict(name=place.subset, revision=revision, split="train")
            stream = datasets.load_dataset(path, **part, streaming=True)
            self._stream = stream.select_columns(["text"]).with_format("arrow")

    def batches(self, position: dict | None) -> Iterator[tuple[dict | None, list[str]]]:
        """Yield (position, texts) from a position of an earlier call on, None for the
        beginning: documents, and the position from which they come again.
        """
        with _explained(self._name):
            if position is not None:
                self._stream.load_state_dict(position)
            batches = self._stream.iter(BATCH_DOCUMENTS)
        while True:
            with _explained(self._name):
                batch = next(batches, None)
                texts = None if batch is None else batch["text"].to_pylist()
            if texts is None:
                return
            if not all(isinstance(text, str) for text in texts):
                raise UserError(
                    f"got a document without text in {self._name}, expected a "
                    'string in every row of the column "text": repair it'
                )
            yield position, texts
            position = self._stream.state_dict()
