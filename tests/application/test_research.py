"""The numbers that pages say of the studies are those of their stores."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import mean

import pytest

from research import decide, fine_tuning, studies, warm_up
from research.compare.results import entries, markdown, rows


def test_the_study_page_has_what_the_rule_says_of_the_store(capsys):
    decide.main()
    printed = capsys.readouterr().out
    page = (Path(studies.__file__).parent / "study.md").read_text()
    rule = printed[printed.index("### The rule") :].splitlines()
    said = [line for line in rule if line.startswith(("- ", "Log time is"))]
    assert len(said) == 7 and not [line for line in said if line not in page]
    tables = [decide.table(name, decide.judged(name)) for name in warm_up.PLACES]
    judged = [row for table in tables for row in table.splitlines()[2:]]
    assert len(judged) > 60 and not [row for row in judged if row not in page]


@pytest.mark.parametrize(
    "page, num, only", [("README.md", 6, "torch Muon"), ("docs/choose.md", 3, None)]
)
def test_pages_quote_losses_and_differences_of_the_study(page, num, only):
    losses = decide.judged("1920").at_best(warm_up.PLACES["1920"].contenders)
    losses |= decide.judged("960").at_best(studies.EXACT)
    known = set()
    for title, own in losses.items():
        control = only or warm_up.CONTROL_OF.get(title, "NAdamW")
        to = decide.differences(losses, control).get(title)
        said = f"{to.mean:+.3f} ± {to.error:.3f}" if to else ""
        said += f" to {control}" if to and not only else ""
        known.add((f"{mean(own.values()):.3f}", said))
    rows = (Path(studies.__file__).parents[1] / page).read_text().replace("**", "")
    quoted = re.findall(r"^\| [^|\d]+ \| (\d\.\d{3}) \| ([^|]*?) ?\|", rows, re.M)
    quoted = [row for row in quoted if "±" in row[1] or not row[1]]
    assert len(quoted) == num and not set(quoted) - known


@pytest.mark.parametrize(
    "name, title, control, said",
    [
        ("small", "AdamW", "NAdamW", "+0.0541"),
        ("fine_tuning", "for_model", "AdamW", "-0.0059"),
        ("fine_tuning_lora", "for_model", "AdamW", "+0.0066"),
    ],
)
def test_the_study_page_has_the_differences_of_the_stores(name, title, control, said):
    module = fine_tuning if name in fine_tuning.__all__ else studies
    table = rows(entries(getattr(module, name)(), studies.stored(name)))
    (row,) = (r for r in table if r.entry.title == title)
    assert row.entry.control == control and f"{row.difference:+.4f}" == said
    assert said in (Path(studies.__file__).parent / "study.md").read_text()


def test_the_study_page_has_the_table_of_batches():
    study, store = studies.batch(), studies.stored("batch")
    found = entries(study, store)
    judged = rows(found)
    page = (Path(studies.__file__).parent / "study.md").read_text()
    page = page[page.index("### MARS by the batch: outcome") :].split("\n### ")[0]
    table = markdown(study, store, found, judged).splitlines()
    table = [line for line in table if line.startswith("| ")]
    assert len(table) > 4 and not [line for line in table if line not in page]
    paired = [row.paired for row in judged if row.paired]
    forms = ("{:+.4f} ± {:.4f}", "{:+.3f} ± {:.3f}")
    known = {form.format(*pair) for form in forms for pair in paired}
    for name in ("docs/choose.md", "research/README.md"):  # what links to this section
        parts = (Path(studies.__file__).parents[1] / name).read_text().split("\n")
        links = [i for i, x in enumerate(parts) if "#mars-by-the-batch-outcome" in x]
        page += "".join("".join(parts[i - 1 : i + 1]) for i in links)
    assert not set(re.findall(r"[-+]\d\.\d+ ± \d\.\d+", page)) - known
