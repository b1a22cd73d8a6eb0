"""The prose of marsopt/: ``make lint`` fails on words that hide a noun.

The head of a phrase is a concrete noun: "the value that the caller passes", and not
"what is passed".
"""

import io
import pathlib
import re
import sys
import tokenize
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parent.parent
BANNED = re.compile(
    r"\bwhat\s+(?:is|are|was|were|has|have|the|an?|its?|they|this|that|these|each|no)\b"
    r"|\b(?:that|those)\s+of\b"
    r"|\b(?:who|whoever|somebody|nobody|others|anew|alike|alone)\b",
    re.IGNORECASE,
)
ALLOWED = re.compile(r"\b(?:caller|user)s?\s+who\b", re.IGNORECASE)  # it has its noun
MARKS = re.compile(r"^(?:# ?|[a-zA-Z]{0,2}[\"']+)|[\"']+$")


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield the first line and the text of each string and each block of comments.

    Adjacent strings are one text, for a phrase may cross the end of a line. Expressions
    in braces are left out.
    """
    kind, first, end, text = None, 0, 0, ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NL:
            continue
        if token.type != kind and text:
            yield first, re.sub(r"\{[^{}\n]*\}", "", text)
            text = ""
        kind = token.type
        if kind in (tokenize.COMMENT, tokenize.STRING):
            first, end = (first, end) if text else (token.start[0], token.start[0])
            text += "\n" * (token.start[0] - end) + " " + MARKS.sub("", token.string)
            end = token.end[0]


def hits(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the words of each banned phrase."""
    for first, text in texts(source):
        kept = ALLOWED.sub(lambda match: "\n" * match[0].count("\n"), text)
        for match in BANNED.finditer(kept):
            yield first + kept.count("\n", 0, match.start()), " ".join(match[0].split())


if __name__ == "__main__":
    paths = sorted((ROOT / "marsopt").rglob("*.py"))
    found = [(path, *hit) for path in paths for hit in hits(path.read_text())]
    for path, line, words in found:
        place = f"{path.relative_to(ROOT)}:{line}"
        print(f"{place}: got {words!r}, expected a noun in its place: name it")
    sys.exit(bool(found))
