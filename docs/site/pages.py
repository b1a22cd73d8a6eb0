"""An extension of Sphinx: which files of the checkout are pages of the site, and which
language the code in them is.
"""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.parsers import Parser
from sphinx.project import Project

import marsopt

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.stem for path in ROOT.glob("examples/*.py"))
# The sidebar's chapters: pages, if they are there, and what it calls them. A page that
# no chapter has stands in the last one.
CHAPTERS: dict[str, dict[str, str]] = {
    "Use it": {
        "install": "Install",
        "choose": "What to choose",
        "guide": "Guide",
        "setups": "Your setup",
        "training": "Training",
        "data": "Data",
        "recipes": "Recipes",
        "reliability": "Reliability",
    },
    "Reference": {
        "api/optimizer": "The optimizer",
        "api/functions": "Rules as functions",
        "api/components": "Components",
        "api/mesh": "Meshes and torchtitan",
        "api/profiling": "Profiling",
    },
    "Evidence": {
        "comparison": "Comparison",
        "fidelity": "Rules and fidelity",
        "conformance": "Conformance",
    },
    "Look inside": {
        "architecture": "Architecture",
        "performance": "Performance",
        "scaling": "Scaling",
    },
    "Examples": {f"source/examples/{name}": f"{name}.py" for name in EXAMPLES},
    "Project": {
        "contents": "All pages",
        "changelog": "Changelog",
        "contributing": "Contributing",
        "releasing": "Releasing",
        "security": "Security",
    },
}
# what pages lead to, and no chapter names
BESIDE = ("source/", "research/")
NAMES = {"README.md": "index", "docs/README.md": "contents"}
PROSE = ("", "docs/", "research/")  # folders of pages
# what is linked wherever it is named
NAMED = r"arXiv\s\d{4}\.\d{5}|(?:\.\./|\bdocs/|\b)\w+\.md\b"
# how a block begins that is for a shell
COMMANDS = r"(#.*\n)*(\w+=\S+ )*(make|python|pip|torchrun|git|\.|export|lm_eval) "


def linked_sources() -> set[str]:
    """Return the Python files that pages link to."""
    found = set()
    for page in (p for folder in PROSE for p in ROOT.glob(f"{folder}*.md")):
        for target in re.findall(r"\]\(([^):]+\.py)\)", page.read_text()):
            found.add((page.parent / target).resolve().relative_to(ROOT).as_posix())
    return found


SOURCES = {f"examples/{name}.py" for name in EXAMPLES} | linked_sources()
FILES = ["*.md", "docs/**.md", "research/**.md", *sorted(SOURCES)]


class Pages(Project):
    """The pages: docs/guide.md is "guide", examples/sweep.py "source/examples/sweep".

    Sphinx's source folder is the checkout, so that every link between its files holds
    in the site too.
    """

    def path2doc(self, filename: str | Path) -> str | None:
        path = Path(filename)
        path = path.relative_to(ROOT) if path.is_absolute() else path
        name, plain = path.as_posix(), path.with_suffix("").as_posix()
        if path.suffix == ".py":
            return f"source/{plain}" if name in SOURCES else None
        if path.suffix != ".md":
            return None
        return NAMES.get(name, plain.removeprefix("docs/").lower())


class Source(Parser):
    """The page of a Python file."""

    supported = ("source",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        env = document.settings.env
        path = env.doc2path(env.docname, base=False)
        section = nodes.section("", nodes.title("", str(path)), ids=["source"])
        section += nodes.literal_block(inputstring, inputstring, language="python")
        document += section
        if f"source/{path.with_suffix('')}" not in CHAPTERS["Examples"]:
            env.metadata[env.docname]["orphan"] = True


def complete(app: Sphinx, docname: str, content: list[str]) -> None:
    """Append the sidebar's chapters to the first page; give tables a title."""
    if docname.startswith("research/"):  # linked, and in no chapter
        head = f"# {docname}\n\n" if docname.endswith("/table") else ""
        content[0] = f"---\norphan: true\n---\n{head}{content[0]}"
    if docname != app.config.root_doc:
        return
    found = app.env.found_docs
    named = {docname, *(page for own in CHAPTERS.values() for page in own)}
    rest = sorted(page for page in found - named if not page.startswith(BESIDE))
    for caption, own in CHAPTERS.items():
        lines = [f"{title} <{page}>" for page, title in own.items() if page in found]
        lines += rest if caption == [*CHAPTERS][-1] else []
        head = f"\n\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n"
        content[0] += head + "\n".join(lines) + "\n```\n"


def language_of(code: str) -> str:
    """Return that of a block which does not say it: pages and docstrings indent
    commands, Python, formulas and diagrams alike.
    """
    if code.startswith(">>> "):
        return "pycon"
    if re.match(COMMANDS, code):
        return "bash"
    try:
        ast.parse(code)
    except SyntaxError:  # or Python that leaves something out
        return "python" if re.match(r"(#.*\n)*(from|import) ", code) else "text"
    return "python"


def highlight(app: Sphinx, document: nodes.document) -> None:
    """Give every block of code its language."""
    for block in document.findall(nodes.literal_block):
        if block.get("language", "none") == "none":
            block["language"] = language_of(block.astext())


def link(app: Sphinx, document: nodes.document) -> None:
    """Make links of papers and pages that plain text names, and let links to pages say
    what the sidebar calls them, not their files.
    """
    titles = {page: title for own in CHAPTERS.values() for page, title in own.items()}
    inside = nodes.literal, nodes.literal_block, nodes.reference, nodes.title
    for text in [*document.findall(nodes.Text)]:
        parent, parts = text.parent, []
        if isinstance(parent, inside) or not re.search(NAMED, text):
            continue
        for i, part in enumerate(re.split(f"({NAMED})", text)):
            name = Path(part).stem.lower()
            if i % 2 == 0 or (part.endswith(".md") and name not in titles):
                parts.append(nodes.Text(part))
            elif isinstance(parent.parent, addnodes.pending_xref):
                parts.append(nodes.Text(titles.get(name, part)))
            elif part.startswith("arXiv"):
                where = f"https://arxiv.org/abs/{part[-10:]}"
                parts.append(nodes.reference("", part, refuri=where))
            elif not part.startswith("docs/"):  # of another project, for all we know
                parts.append(nodes.Text(part))
            else:
                where = app.builder.get_relative_uri(app.env.docname, name)
                parts.append(nodes.reference("", titles[name], refuri=where))
        parent.replace(text, parts)


def arguments(doc: str) -> dict[str, list[str]]:
    """Return the lines of a docstring's list of arguments, by name."""
    listed = inspect.cleandoc(doc).partition("\nArgs:\n")[2].partition("\n\n")[0]
    found: dict[str, list[str]] = {}
    for entry in re.findall(r"^    \S.*(?:\n     .*)*", listed, re.MULTILINE):
        found |= dict.fromkeys(re.split(", ", entry.split(":")[0].strip()), [entry])
    return {name: "".join(entry).split("\n") for name, entry in found.items()}


def inherit_arguments(
    app: Sphinx, what: str, name: str, it: object, options: object, lines: list[str]
) -> None:
    """Append to a class's arguments those that the docstrings of its bases describe."""
    if not inspect.isclass(it):
        return
    own, more = arguments("\n" + "\n".join(lines)), []
    for argument in inspect.signature(it).parameters:
        above = (arguments(base.__doc__ or "") for base in it.__mro__[1:])
        entry = next((found[argument] for found in above if argument in found), None)
        more += entry if entry and argument not in own else []
    if not more:
        return
    if "Args:" in lines:
        at = lines.index("", lines.index("Args:"))
    else:
        sections = [
            i for i, line in enumerate(lines) if line in ("Raises:", "Example:")
        ]
        at, more = min(sections), ["Args:", *more, ""]
    lines[at:at] = more


def mark_blocks(
    app: Sphinx, what: str, name: str, it: object, options: object, lines: list[str]
) -> None:
    """Make reStructuredText of a docstring. Its indented paragraphs, formulas and code,
    are blocks, not quotations; in its prose * and _ are what they are.
    """
    found: list[str] = []
    inside = False
    for line in lines:
        indented = line.startswith("    ")
        if indented and not inside and found and not found[-1].strip():
            inside = True
            found += ["::", ""]
        inside = inside and (indented or not line.strip())
        code = inside or line.lstrip().startswith((">>> ", "... "))
        found.append(line if code else escaped(line))
    lines[:] = found


def escaped(line: str) -> str:
    """Return a line of prose whose marks outside of ``code`` are text."""
    parts = line.split("``")
    parts[::2] = [re.sub(r"[*|]|_(?!\w)", r"\\\g<0>", part) for part in parts[::2]]
    return "``".join(parts)


def write_defaults(
    app: Sphinx,
    what: str,
    name: str,
    it: object,
    options: object,
    signature: str | None,
    returns: str | None,
) -> tuple[str | None, str | None]:
    """Write defaults of dataclasses as somebody would: a dict, and large numbers."""
    if signature is not None:
        signature = signature.replace("<factory>", "{}")
        large = r"\b\d{7,}\.0\b"
        signature = re.sub(large, lambda found: f"{float(found[0]):g}", signature)
    return signature, returns


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_source_parser(Source)
    app.connect("builder-inited", use_pages)
    app.connect("builder-inited", resolve_hints)
    app.connect("source-read", complete)
    app.connect("doctree-read", highlight)
    app.connect("doctree-read", link)
    app.connect("autodoc-process-docstring", inherit_arguments, priority=0)
    app.connect("autodoc-process-docstring", mark_blocks, priority=1)
    app.connect("autodoc-process-signature", write_defaults)
    return {"parallel_read_safe": True}


def use_pages(app: Sphinx) -> None:
    app.project.__class__ = Pages


def resolve_hints(app: Sphinx) -> None:
    """Let components have the types of fields that they inherit: by name they are
    looked for in the wrong module.
    """
    for name in marsopt.__all__:
        it = getattr(marsopt, name)
        if inspect.isclass(it) and is_dataclass(it):
            known = get_type_hints(it)
            it.__init__.__annotations__ |= {f.name: known[f.name] for f in fields(it)}
