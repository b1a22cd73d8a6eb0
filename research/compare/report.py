"""The files of a study: its table, numbers and pictures."""

from __future__ import annotations

from pathlib import Path

from research.compare.plots import draw
from research.compare.results import as_json, entries, markdown, rows
from research.compare.store import Store
from research.compare.study import Study
from train.errors import UserError
from train.files import write, write_json


def report(study: Study, store: Store, folder: Path) -> None:
    """Print and save table.md, results.json and the pictures."""
    found = entries(study, store)
    if not found:
        raise UserError(
            f"got no method in {folder} whose search has ended, expected one: leave "
            "out --only to train"
        )
    table = rows(found)
    text = markdown(study, store, found, table)
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "table.md", text.encode())
    write_json(folder / "results.json", as_json(study, store, found, table))
    pictures = draw(study, found, folder)
    print(
        f"\n{text}\n"
        f"{'table':9} {folder / 'table.md'}\n"
        f"{'numbers':9} {folder / 'results.json'}\n"
        f"{'pictures':9} {', '.join(str(folder / name) for name in pictures)}",
        flush=True,
    )
