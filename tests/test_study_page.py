"""The stores of runs in docs/study: what pages say of them is what they hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from configs import studies
from train.compare import table
from train.compare.results import entries, rows
from train.compare.store import Store

ROOT = Path(__file__).parent.parent
STORES = sorted(path.parent for path in (ROOT / "docs/study").glob("*/runs.jsonl"))
PAGES = {
    path: path.read_text() for path in (ROOT / "README.md", ROOT / "docs/study.md")
}


@pytest.mark.parametrize("folder", STORES, ids=lambda folder: folder.name)
def test_a_table_is_that_of_its_store(folder):
    study, store = getattr(studies, folder.name)(), Store(folder)
    found = entries(study, store, folder)
    want = table.markdown(study, store, found, rows(found))
    assert (folder / "table.md").read_text() == want
    kept = {
        key: store.setting[key] for key in store.setting if key not in ("train", "val")
    }
    mine = {key: getattr(study.setting, key) for key in kept}
    assert kept == mine  # a store of this study, as it is now


def test_rows_of_the_page_are_those_of_the_tables():
    """But for the columns that it leaves out."""
    whole = "\n".join((folder / "table.md").read_text() for folder in STORES)
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in whole.splitlines()
        if line.startswith("| ")
    ]
    written = re.findall(r"^\| (.+?) \((lr .+?)\) \| (.+?) \| (.+?) \| (.+?) \|",
                         PAGES[ROOT / "docs/study.md"], re.MULTILINE)  # fmt: skip
    assert written
    for title, at, loss, seeds, difference in written:
        assert [title, at, loss, seeds, difference] in [
            [c[0], c[1], c[3], c[4], c[5]] for c in cells
        ], title


def test_losses_of_the_readme_are_those_of_the_study():
    folder = ROOT / "docs/study/small"
    found = entries(studies.small(), Store(folder), folder)
    means = {f"{entry.mean:.3f}" for entry in found}
    text = PAGES[ROOT / "README.md"]
    start = text.index("| | loss, nats per byte")
    written = re.findall(r"^\| .+? \| \**(\d\.\d{3})\** \|", text[start : start + 1500],
                         re.MULTILINE)  # fmt: skip
    assert len(written) >= 3 and set(written) <= means
