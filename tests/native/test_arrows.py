"""The parts of native/src include only parts below them: the picture in docs/explanation/architecture.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "native/src"

# From the bottom; parts of one line do not know each other.
LAYERS = (
    ("base",),
    ("codecs",),
    ("kernels",),
    ("model",),
    ("banks",),
    ("loading",),
    ("residency",),
    ("prediction",),
    ("cluster",),
    ("device",),
    ("routing", "replay"),
    ("engine",),
    ("api",),
)
HEIGHT = {part: height for height, layer in enumerate(LAYERS) for part in layer}


def part_of(path: Path) -> str:
    """The folder of a file; engine.h and engine.cpp are a part by themselves."""
    return path.parts[0] if len(path.parts) > 1 else path.stem


def files() -> list[Path]:
    return sorted(path.relative_to(SRC) for path in SRC.rglob("*") if path.suffix in (".cpp", ".h"))


def test_every_part_has_its_place():
    assert {part_of(path) for path in files()} == HEIGHT.keys()


@pytest.mark.parametrize("part", HEIGHT)
def test_part_includes_only_what_is_below(part):
    upward = [
        f"{path} includes {included}"
        for path in files() if part_of(path) == part
        for included in re.findall(r'^#include "([^"]+)"', (SRC / path).read_text(), re.MULTILINE)
        if (SRC / included).is_file()
        and part_of(Path(included)) != part and HEIGHT[part_of(Path(included))] >= HEIGHT[part]
    ]
    assert upward == []


def included_by(path: Path) -> set[Path]:
    """All files that a file includes, directly or through others."""
    found: set[Path] = set()
    new = [path]
    while new:
        names = re.findall(r'^#include "([^"]+)"', (SRC / new.pop()).read_text(), re.MULTILINE)
        new += [Path(name) for name in names if (SRC / name).is_file() and Path(name) not in found]
        found.update(new)
    return found


def test_only_parts_that_move_experts_to_devices_include_their_headers():
    parts = {part_of(path) for path in files() if any(part_of(included) == "device" for included in included_by(path))}
    assert parts == {"device", "routing", "replay", "engine", "api"}


def test_a_batch_of_routed_tokens_knows_no_device():
    batch = Path("routing/routed_batch.h")
    assert {part_of(included) for included in included_by(batch)}.isdisjoint({"device"})
    text = (SRC / batch).read_text()
    fields = re.findall(r"^    bool +(\w+) *=", text[text.index("struct RoutedBatch {"):], re.MULTILINE)
    assert 0 < len(fields) <= 4, fields
