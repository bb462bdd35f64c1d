"""The live view at /pyorch: one page, that asks /residency and /slots by itself."""

from __future__ import annotations

from pathlib import Path

from pyorch.serve.routes import HTML, SCRIPT, STYLE, Answer, Request, Routes

_FILES = {"/pyorch": ("live.html", HTML), "/pyorch/live.css": ("live.css", STYLE),
          "/pyorch/live.js": ("live.js", SCRIPT), "/pyorch/charts.js": ("charts.js", SCRIPT)}


def add_to(routes: Routes, needs_key: bool, has_chat: bool) -> None:
    """The page needs no API key, it asks for one. "/" leads to it, where llama-server has no chat page there."""
    for path, (name, kind) in _FILES.items():
        body = Path(__file__).with_name(name).read_text(encoding="utf-8")
        body = body.replace("NEEDS_KEY", "true" if needs_key else "false").replace(
            "NO_CHAT", "" if has_chat else "hidden"
        )
        answer = Answer(body, kind)
        routes.add("GET", path, lambda _, answer=answer: answer, public=True)
    if not has_chat:
        routes.add("GET", "/", _to_live_view, public=True)


def _to_live_view(_: Request) -> Answer:
    return Answer("", HTML, 302, "pyorch")
