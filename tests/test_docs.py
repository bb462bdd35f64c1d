"""docs/architecture.md names files that are there."""

from __future__ import annotations

import re
from pathlib import Path

from pyorch.settings.option import options
from pyorch.settings.substitution import Substitution

ROOT = Path(__file__).parents[1]
HOMES = (ROOT, ROOT / "docs", ROOT / "pyorch", ROOT / "native/src")  # what its paths begin at


def test_every_path_is_there():
    text = (ROOT / "docs/architecture.md").read_text()
    named = set(re.findall(r"`([\w./-]+(?:/|\.(?:cpp|h|md|py|toml)))`|\]\(([\w./-]+)\)", text))
    paths = {path for pair in named for path in pair if path}
    assert len(paths) > 20
    assert [path for path in sorted(paths) if not any((home / path).exists() for home in HOMES)] == []


def test_every_part_in_the_picture_is_there():
    picture = (ROOT / "docs/architecture.md").read_text().split("```")[1]
    folders = set(re.findall(r"\b([a-z]+)/ ", picture))
    assert {"cli", "settings", "residency", "banks"} <= folders
    assert [name for name in sorted(folders) if not any((home / name).is_dir() for home in HOMES)] == []


def test_the_glossary_explains_every_setting_of_buddies():
    glossary = (ROOT / "docs/glossary.md").read_text()
    for name, option in options(Substitution).items():
        row = re.search(rf"\| `{option.plain or name}` \|([^|]*)\|", glossary)
        assert row is not None, name
        assert not option.plain or row[1].strip(), name
