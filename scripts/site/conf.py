"""Settings of Sphinx for `make docs`: the pages of docs/ as a site with search that loads nothing from other hosts."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"

project = "pyorch"
extensions = ["myst_parser"]
root_doc = "README"
html_theme = "furo"
html_title = "pyorch"
html_copy_source = False
html_show_sphinx = False
exclude_patterns = ["measurements/*/*"]  # numbers of pictures
myst_heading_anchors = 4
nitpicky = True

# The menu, in the order of docs/README.md.
_SECTIONS = {
    "Start": ("quickstart", "troubleshooting", "glossary"),
    "How to": "how-to",
    "Reference": "reference",
    "Explanation": "explanation",
    "Measurements": "measurements",
}


def _menu() -> str:
    menu = ""
    for title, pages in _SECTIONS.items():
        if isinstance(pages, str):
            pages = sorted(f"{pages}/{path.stem}" for path in (DOCS / pages).glob("*.md"))
        menu += f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n" + "\n".join(pages) + "\n```\n"
    return menu


def _read(app: Any, page: str, source: list[str]) -> None:
    """Adds the menu to the first page, and names files outside docs/, which the site lacks, in place of links."""
    def link(found: re.Match[str]) -> str:
        path = os.path.normpath((DOCS / page).parent / found[2].partition("#")[0])
        is_inside = ":" in found[2] or path.startswith(str(DOCS))
        return found[0] if is_inside else f"{found[1]} (`{os.path.relpath(path, DOCS.parent)}`)"

    source[0] = re.sub(r"\[([^\]]*)\]\(([^)#\s][^)\s]*)\)", link, source[0]) + (_menu() if page == root_doc else "")


def setup(app: Any) -> None:
    app.connect("source-read", _read)
