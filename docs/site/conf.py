"""How Sphinx makes the documentation site (make docs) of the files that are also read
on their own: README.md, docs/*.md, the examples, and the docstrings of the library.
"""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
sys.path[:0] = [str(ROOT), str(FOLDER)]

import pages  # noqa: E402

import marsopt  # noqa: E402

project = "marsopt"
author = copyright = "the marsopt developers"
version = release = marsopt.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "pages",
]
root_doc = "index"
source_suffix = {".md": "markdown", ".py": "source"}
include_patterns = pages.FILES
exclude_patterns = [  # folders that nobody has to look through
    path.name
    for path in ROOT.iterdir()
    if path.is_dir() and not any(p.startswith(f"{path.name}/") for p in pages.FILES)
]

myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_mock_imports = ["torchtitan"]
maximum_signature_line_length = 72
napoleon_numpy_docstring = False
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

smartquotes_action = "D"  # dashes; "mars-adamw" is a string
pygments_style, pygments_dark_style = "a11y-high-contrast-light", "github-dark"

html_theme = "furo"
html_title = f"marsopt {version}"
html_logo = html_favicon = "static/logo.svg"
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#9c3a15",
        "color-brand-content": "#a63d16",
        "color-brand-visited": "#7d4a35",
        "color-code-background": "#f5f4f2",
        "color-sidebar-link-text--top-level": "var(--color-foreground-primary)",
    },
    "dark_css_variables": {
        "color-brand-primary": "#ffa27a",
        "color-brand-content": "#ffa27a",
        "color-brand-visited": "#dba48f",
        "color-code-background": "#1e1f22",
        "color-sidebar-link-text--top-level": "var(--color-foreground-primary)",
    },
}
html_static_path = ["static"]
html_css_files = ["style.css"]
html_copy_source = html_use_index = html_domain_indices = False
html_show_sphinx = False
