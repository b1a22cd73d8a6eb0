"""What pages say of others' losses is what research/others.json has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import mean, stdev

import pytest

from research import decide, studies, warm_up

ROOT = Path(studies.__file__).parents[1]
OTHERS = json.loads((ROOT / "research/others.json").read_text())
AUTHORS, DENSE, EXPERTS, STANFORD, BATCHES = OTHERS
MARS, NADAMW, MUON = "MARS-AdamW", "NAdamW", "Muon"
DECIMAL = r"\b\d\.\d{3,4}\b"


def apart(study, title, other="AdamW", cell=""):
    """Return by how much the losses of two rules differ, in cells of this name."""
    cells = OTHERS[study]["losses"].items()
    losses = [own for name, own in cells if cell in name and {title, other} <= {*own}]
    return [own[title] - own[other] for own in losses]


def ends(*args):
    sizes = [abs(difference) for difference in apart(*args)]
    return min(sizes), max(sizes)


def small(*titles):
    """Return by how much rules differ in this project's study at 1,920 steps."""
    losses = decide.judged("1920").at_best(warm_up.PLACES["1920"].contenders)
    title, other = titles
    return abs(decide.differences(losses, other)[title].mean)


def phrases():
    """Return {page: [a phrase, with its numbers]}, each number computed here."""
    lead, cells = ends(DENSE, MARS), apart(STANFORD, MARS)
    average, error = abs(mean(cells)), stdev(cells) / len(cells) ** 0.5
    *_, last = apart(EXPERTS, MARS)
    by_size = [abs(difference) for difference in apart(AUTHORS, MARS)]
    nadamw = [abs(difference) for difference in apart(STANFORD, NADAMW)]
    muon = [abs(difference) for difference in apart(STANFORD, MUON, NADAMW)]
    at_most = "by {:.3f} to {:.3f} (8x), by {:.3f} at 1.2B"
    found = {
        "README.md": [
            ("by {:.3f} to {:.3f} at 720M", *lead),
            ("by {:.3f} on average from 130M to 520M", average),
            ("but {:.3f} behind AdamW on a mixture", last),
        ],
        "docs/choose.md": [
            ("is Muon): {:.3f} to {:.3f} at 720M", *ends(DENSE, "Moonlight")),
            ("leads AdamW by {:.3f} to {:.3f} at 720M (EPFL)", *lead),
            ("by {:.3f} on average (Stanford)", average),
            ("it ends {:.3f} behind AdamW (EPFL)", last),
        ],
        "research/results.md": [
            ("-{:.4f} ± {:.4f} (deviation of cells", average, error),
            ("MARS-AdamW leads AdamW by {:.3f}, {:.3f} and {:.3f}", *by_size),
            ("by {:.3f} to {:.3f} (EPFL, 720M), by {:.3f} on", *lead, average),
            ("behind by {:.3f} on EPFL's mixture", last),
            ("leads Muon by {:.3f} to {:.3f}", *ends(AUTHORS, MARS, MUON)),
            ("Moonlight by {:.3f} to {:.3f}", *ends(DENSE, MARS, "Moonlight")),
            ("Muon leads it by {:.3f} to {:.3f}", *ends(STANFORD, MARS, MUON)),
            ("MARS-AdamW is {:.3f} behind AdamW at 0.1M", small(MARS, "AdamW")),
            ("NAdamW leads AdamW by {:.3f} at 0.1M", small("AdamW", NADAMW)),
            (at_most, min(nadamw[:3]), max(nadamw[:3]), nadamw[3]),
            ("leads NAdamW by {:.3f} at 0.1M", small("Moonlight", NADAMW)),
            (f"Muon {at_most}", min(muon[:3]), max(muon[:3]), muon[3]),
            ("by {:.3f} to {:.3f} (8x) | level", *ends(STANFORD, MARS, NADAMW)),
        ],
    }
    return {
        page: [phrase.format(*numbers) for phrase, *numbers in own]
        for page, own in found.items()
    }


PARTS = {  # of a page, by a pattern: a paragraph, or lines that name a lab
    "README.md": r"(?:.+\n)+(?=\n)",
    "docs/choose.md": r"^\| .*\n",
    "research/results.md": r"^(?:\| (?!\d)|-0|.*cells MARS).*\n",
}
NAMES = "EPFL|Stanford|both labs|deviation of cells|authors: it|ours: |leads NAdamW"


@pytest.mark.parametrize("page", PARTS)
def test_pages_quote_what_others_measured(page):
    """Each decimal beside a lab's name is in a phrase that is computed here."""
    parts = re.findall(PARTS[page], (ROOT / page).read_text(), re.M)
    text = " ".join(" ".join(x for x in parts if re.search(NAMES, x)).split())
    said = phrases()[page]
    assert not [phrase for phrase in said if phrase not in text]
    decimals = (re.findall(DECIMAL, x) for x in (text, " ".join(said)))
    assert sorted(next(decimals)) == sorted(next(decimals))


def losses_and_differences():
    """Return {(row, column): a cell of the tables}."""
    known = {}
    for study, found in OTHERS.items():
        for row, losses in found["losses"].items():
            for title, loss in losses.items():
                to = f"{loss - losses['AdamW']:+.3f}"
                said = f"{loss:.{4 if study == STANFORD else 3}f}"
                known[row, title] = said if title == "AdamW" else f"{said} ({to})"
                if study == BATCHES and title == MARS:
                    known[tuple(row.rsplit(", ", 1))] = to
            if study == BATCHES:
                del known[row, "AdamW"], known[row, MARS]
    return known


def test_tables_have_the_losses_of_others():
    assert all(found["address"].startswith("https://") for found in OTHERS.values())
    known, cells = losses_and_differences(), {}
    rows = {row for row, _ in known}
    page = (ROOT / "research/results.md").read_text()
    for table in re.findall(r"(?:^\|.*\n)+", page[page.index("## Measured") :], re.M):
        head, _, *body = (
            [cell.strip() for cell in row.split("|")[1:-1]]
            for row in table.splitlines()
        )
        for name, *own in body:
            if name in rows:
                named = zip(head[1:], own, strict=True)
                cells |= {(name, title): cell for title, cell in named if cell}
    assert cells == known
