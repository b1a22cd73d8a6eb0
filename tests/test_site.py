"""The documentation site builds without a warning and loads nothing from elsewhere,
its links lead somewhere, it can be searched, and its reference is complete.
"""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest
from bs4 import BeautifulSoup

from tests.test_reference import NAMES, ROOT, VALUES, object_of

# what raises nothing of its own: a row of a table, and stacks made elsewhere
WITHOUT_ERRORS = {"marsopt.FlatGroup", "marsopt.NamedRule"}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The folder of the site, as make docs builds it."""
    folder = tmp_path_factory.mktemp("site")
    (command,) = re.findall(r"-m (sphinx .*)", (ROOT / "Makefile").read_text())
    command = command.replace("build/site", str(folder / "site"))
    command = command.replace("build/doctrees", str(folder / "doctrees"))
    done = subprocess.run(
        [sys.executable, "-m", *command.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder / "site"


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, BeautifulSoup]:
    found = {
        p: BeautifulSoup(p.read_text(), "html.parser") for p in site.rglob("*.html")
    }
    assert {site / "index.html", site / "guide.html", site / "search.html"} <= {*found}
    return found


def targets(page: BeautifulSoup) -> list[tuple[str, str]]:
    """(tag, address) of all that a page links to or loads."""
    found = [(tag.name, tag["href"]) for tag in page.select("[href]")]
    return found + [(tag.name, tag["src"]) for tag in page.select("[src]")]


def test_links_lead_to_files_and_anchors_that_are_there(site, pages):
    ids = {
        path: {tag["id"] for tag in page.select("[id]")} for path, page in pages.items()
    }
    num = 0
    for path, page in pages.items():
        for tag, address in targets(page):
            where = urlparse(address)
            if where.scheme:
                continue
            file = (
                path
                if not where.path
                else (path.parent / unquote(where.path)).resolve()
            )
            assert file.is_relative_to(site.resolve()) or file == path, (path, address)
            assert file.is_file(), f"{path.name} leads to {address}"
            if where.fragment and tag == "a" and file in ids:
                # the theme's own, where a page begins
                assert unquote(where.fragment) in ids[file] | {""}, (path.name, address)
                num += 1
    assert num > 500


def test_pages_load_nothing_from_elsewhere(site, pages):
    """It is read offline; what leads away are links that somebody follows."""
    for path, page in pages.items():
        for tag, address in targets(page):
            where = urlparse(address)
            assert where.scheme in ("", "https") or address.startswith("data:"), address
            if where.scheme == "https":
                assert tag == "a", f"{path.name} loads {address}"
                assert re.fullmatch(r"([\w-]+\.)+[a-z]+", where.netloc), address
    for style in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", style.read_text())


def test_every_file_of_docs_is_a_page_with_a_title(site, pages):
    for file in (*ROOT.glob("docs/*.md"), *ROOT.glob("docs/api/*.md")):
        name = file.relative_to(ROOT / "docs").with_suffix(".html")
        name = Path("contents.html") if name.stem == "README" else name
        heading = file.read_text().splitlines()[0].removeprefix("# ")
        title = pages[site / name].select_one("h1").find(string=True)
        assert title == heading.replace("`", ""), name


def pages_with(index: dict, *stems: str) -> set[str]:
    """Names of the pages that a search for all of these finds."""
    places = [set(range(len(index["docnames"])))]
    for stem in stems:
        by_stem = index["terms"].get(stem, []), index["titleterms"].get(stem, [])
        places.append(
            {n for ns in by_stem for n in ([ns] if isinstance(ns, int) else ns)}
        )
    return {index["docnames"][n] for n in set.intersection(*places)}


def test_the_index_of_the_search_knows_pages_and_names(site):
    text = (site / "searchindex.js").read_text()
    index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    places = index["terms"]["transport"] + index["titleterms"]["transport"]
    found = {index["docnames"][place] for place in places}
    assert {"guide", "choose", "api/components", "research/study"} <= found
    assert {"marsopt", "marsopt.parallel"} <= index["objects"].keys()
    # what a reader types, as the search stems it
    assert {"choose", "training", "recipes"} <= pages_with(index, "learn", "rate")
    assert {"training", "reliability", "setups"} <= pages_with(index, "resum")
    assert "install" in pages_with(index, "instal")
    assert {"scaling", "setups"} <= pages_with(index, "ddp")


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_of_a_public_name_is_whole(name, pages):
    (head,) = [tag for page in pages.values() for tag in page.find_all("dt", id=name)]
    about = head.find_next_sibling("dd")
    assert about.select_one(".doctest"), "no example"
    if name in VALUES:
        return
    own = about.find("dl", class_="field-list", recursive=False)
    fields = {tag.get_text() for tag in own.find_all("dt")} if own else set()
    assert name in WITHOUT_ERRORS or "Raises:" in fields, "no errors"
    if name == "marsopt.Collectives":  # a protocol, of which nobody makes one
        return
    taken = inspect.signature(object_of(name)).parameters
    described = {tag.get_text().lstrip("*") for tag in own.find_all("strong")}
    assert not taken.keys() - described, "arguments that are not described"
    shown = {tag.get_text() for tag in head.select(".sig-param > .n")}
    assert not taken.keys() - shown, "arguments that the signature lacks"
