"""Every program of scripts/papers shows its help; and nothing of the product imports it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAMS = sorted(path for path in (*(ROOT / "scripts/papers").rglob("*.py"), ROOT / "scripts/bench_disks.py",
                             ROOT / "scripts/bench_goals.py", ROOT / "scripts/bench_neighbour.py",
                             ROOT / "scripts/bench_scale.py",
                             ROOT / "scripts/bench_serve/__main__.py",
                             ROOT / "scripts/make_wheel.py", ROOT / "scripts/replay.py",
                             ROOT / "scripts/routes_to_trace.py", ROOT / "scripts/write_reference.py",
                             ROOT / "scripts/write_signatures.py")
                  if "__main__" in path.read_text() and path.name != "measure_network.py")


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_program_shows_its_help(path: Path) -> None:
    module = module_of(path)
    done = subprocess.run([sys.executable, "-m", module, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and f"python -m {module}" in done.stdout, done.stderr


def test_each_paper_has_a_page_that_names_its_programs() -> None:
    for path in PROGRAMS:
        if path.parent.parent.name == "papers":
            assert f"{path.parent.name}.{path.stem}" in (path.parent / "README.md").read_text(), path


def test_programs_that_the_documentation_names_are_there() -> None:
    pages = [ROOT / "README.md", ROOT / "Makefile", *(ROOT / "docs").rglob("*.md"), *(ROOT / "scripts").rglob("*.md")]
    named = {name for page in pages for name in re.findall(r"python -m (scripts\.[\w.]+)", page.read_text())}
    modules = {module_of(path) for path in PROGRAMS}
    assert named == modules


@pytest.mark.parametrize("folder", ["pyorch", "convert"])
def test_the_product_does_not_import_the_laboratory(folder: str) -> None:
    importing = re.compile(r"^\s*(from|import) (scripts|simpy)\b", re.MULTILINE)
    files = list((ROOT / folder).rglob("*.py"))
    assert files and not [path for path in files if importing.search(path.read_text(encoding="utf-8"))]
