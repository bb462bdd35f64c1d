"""The live view at /pyorch, which polls /residency and /slots, and a small chat page."""

from __future__ import annotations

from pathlib import Path

from pyorch.files import docs_dir
from pyorch.serve.llama_server import Root
from pyorch.serve.routes import HTML, SCRIPT, STYLE, TEXT, Answer, Routes

_FILES = {"/pyorch": ("live.html", HTML), "/pyorch/live.css": ("live.css", STYLE),
          "/pyorch/live.js": ("live.js", SCRIPT), "/pyorch/charts.js": ("charts.js", SCRIPT)}


def contents(needs_key: bool, root: Root) -> dict[str, Answer]:
    """Returns the content of each path. Pages need no API key; they ask the user for one. root: see Flags.root."""
    files = {**_FILES, "/": ("chat.html", HTML)} if root is Root.SMALL_CHAT else _FILES
    docs = docs_dir()
    found = {} if docs is None else {
        "/pyorch/docs": Answer((docs / "how-to/serve.md").read_text(encoding="utf-8"), TEXT)}
    for path, (name, kind) in files.items():
        body = Path(__file__).with_name(name).read_text(encoding="utf-8")
        body = body.replace("NEEDS_KEY", "true" if needs_key else "false").replace(
            "NO_CHAT", "hidden" if root is Root.LIVE_VIEW else ""
        ).replace("NO_DOCS", "hidden" if docs is None else "")
        found[path] = Answer(body, kind)
    if root is Root.LIVE_VIEW:
        found["/"] = Answer("", HTML, 302, "pyorch")
    return found


def add_to(routes: Routes, needs_key: bool, root: Root) -> None:
    for path, answer in contents(needs_key, root).items():
        routes.add("GET", path, lambda _, answer=answer: answer, public=True)
