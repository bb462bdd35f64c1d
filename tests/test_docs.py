"""What the documentation says is so: paths and links lead somewhere, commands have flags that there are, and run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from docs_commands import ROOT, PageRun, blocks, by_hand, furnish, pages

from pyorch.cli import COMMANDS, _parse
from pyorch.errors import PyorchError
from pyorch.settings.option import options
from pyorch.settings.substitution import Substitution
from scripts import write_reference

# Where the paths begin that a page names.
HOMES = (ROOT, ROOT / "docs", ROOT / "pyorch", ROOT / "native/include", ROOT / "native/src")

# Pages for users, whose commands are run. The others say how figures were made, in hours and with gigabytes.
RUN = ("quickstart.md", "how-to/advise.md", "how-to/packs.md", "how-to/prepare.md", "how-to/python.md",
       "how-to/lossy.md", "how-to/prefetch.md", "how-to/disk.md", "how-to/limit-memory.md")
CHEAP = RUN[0]  # run always


@pytest.mark.parametrize("name", ["architecture", "walks", "kernels"])
def test_an_explanation_of_the_code_names_paths_that_exist(name: str) -> None:
    text = (ROOT / f"docs/explanation/{name}.md").read_text()
    paths = set(re.findall(r"`([\w./-]+(?:/|\.(?:cpp|h|md|py|toml)))`", text))
    assert len(paths) > 2
    assert [path for path in sorted(paths) if not any((home / path).exists() for home in HOMES)] == []


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_files_of_the_project_that_exist(page: Path) -> None:
    folders = "docs|scripts|tests|native|patches|convert|pyorch|docker"
    paths = set(re.findall(rf"(?<![\w./-])((?:{folders})/[\w./-]*[\w/])", page.read_text(encoding="utf-8")))
    # A page may shorten names of files: `device_{cuda,metal}.cpp`, `0008-*`. pyorch/lib is a folder of wheels.
    missing = [path for path in sorted(paths) if not any([*home.glob(f"{path.rstrip('/')}*")] for home in HOMES)]
    assert [path for path in missing if not path.startswith("pyorch/lib/")] == []


def test_files_and_tests_of_the_papers_are_there():
    text = (ROOT / "docs/explanation/papers.md").read_text()
    files = set(re.findall(r"`((?:convert|pyorch|native|scripts|tests)/[\w./]+)`", text))
    assert len(files) > 40
    assert [path for path in sorted(files) if not any((home / path).exists() for home in (ROOT, ROOT / "pyorch"))] == []
    of_python = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    of_cpp = {path.name: path.read_text() for path in (ROOT / "native/tests").rglob("*_test.cpp")}
    tests = set(re.findall(r"`(test_\w+)`", text))
    assert len(tests) > 50
    assert [name for name in sorted(tests) if f"def {name}(" not in of_python] == []
    for name, case in re.findall(r"`(\w+_test\.cpp)`(?: \(`(\w+)`\))?", text):
        assert case in of_cpp[name], (name, case)


def test_every_equation_of_the_papers_has_a_row():
    sections = re.split(r"^## ", (ROOT / "docs/explanation/papers.md").read_text(), flags=re.MULTILINE)[1:]
    last = {"BuddyMoE": (6, 1), "FineMoE": (8, 0), "Speculating Experts": (1, 1), "ZipMoE": (24, 4), "DanceMoE": (4, 2)}
    for name, (n_equations, n_algorithms) in last.items():
        section = next(section for section in sections if section.startswith(f"{name}\n"))
        cells = " ".join(re.findall(r"^\| ([^|]*) \|", section, re.MULTILINE))
        for kind, n in (("eq", n_equations), ("algorithm", n_algorithms)):
            named: set[int] = set()
            for numbers in re.findall(rf"{kind}s?\.? ((?:\d+(?:, | to )?)+)", cells):
                for part in numbers.strip(", ").split(", "):
                    begin, _, end = part.partition(" to ")
                    named |= set(range(int(begin), int(end or begin) + 1))
            assert named == set(range(1, n + 1)), (name, kind)


def test_every_part_in_the_picture_is_there():
    picture = (ROOT / "docs/explanation/architecture.md").read_text().split("```")[1]
    folders = set(re.findall(r"\b([a-z]+)/ ", picture))
    assert {"cli", "settings", "residency", "banks"} <= folders
    assert [name for name in sorted(folders) if not any((home / name).is_dir() for home in HOMES)] == []


def test_the_reference_explains_every_lossy_setting():
    reference = (ROOT / "docs/reference/lossy.md").read_text()
    for name, option in options(Substitution).items():
        row = re.search(rf"\| `{option.plain or name}` \|([^|]*)\|", reference)
        assert row is not None, name
        assert not option.plain or row[1].strip(), name


@pytest.mark.parametrize("name, text", write_reference.pages().items())
def test_a_generated_page_is_current(name: str, text: str) -> None:
    written = (write_reference.FOLDER / name).read_text(encoding="utf-8")
    assert written == text, "run python -m scripts.write_reference"


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"\w+:", target) or target.endswith(".png"):  # pictures are made after the text
            continue
        path, _, anchor = target.partition("#")
        file = page if not path else page.parent / path
        assert file.exists(), f"{page.name} links to {target}"
        if anchor and file.suffix == ".md":
            titles = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in map(_anchor, titles), f"{page.name} links to {target}"


def test_the_site_is_built_strictly_and_loads_nothing_from_other_hosts(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="make docs installs it")
    subprocess.run([sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html", "-c", ROOT / "scripts/site",
                    "-d", tmp_path / "cache", ROOT / "docs", tmp_path / "site"], check=True)
    written = {path.relative_to(tmp_path / "site").with_suffix(".md") for path in (tmp_path / "site").rglob("*.html")}
    assert {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")} <= written
    text = "".join(path.read_text(encoding="utf-8") for path in (tmp_path / "site").rglob("*.html"))
    assert re.findall(r"<(?:script|img|link)\b[^>]*(?:src|href)=\"(?:https?:)?//[^\"]*\"", text) == []


def _anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _ours() -> list[tuple[str, str]]:
    """Place and text of every pyorch command that a page shows."""
    return [(f"{block.page}:{block.line}", command) for page in pages() for block in blocks(page)
            for command in block.commands if re.match(r"pyorch\s", command)]


@pytest.mark.parametrize("where, command", _ours())
def test_commands_have_flags_that_there_are(where: str, command: str) -> None:
    words = _words(command)
    if words[0] not in COMMANDS:
        pytest.fail(f"{where}: there is no pyorch {words[0]}")
    try:
        _parse(words)
    except PyorchError as error:
        unsaid = ("..." in command and "required" in str(error)) or re.search(r"invalid choice: '\$\w", str(error))
        if not unsaid:
            pytest.fail(f"{where}: {command}: {error}")


def _words(command: str) -> list[str]:
    """What the program gets of a command: without redirections, what stands for more words, and words of a synopsis."""
    words = shlex.split(command.split("|")[0], comments=True)[1:]
    return [word for word in words if word not in ("...", ">", "2>") and not word.startswith("[")]


def test_what_is_run_by_hand_says_why() -> None:
    for where, why, what in by_hand():
        assert len(why) > 5 and what, where


@pytest.mark.parametrize("name", RUN)
def test_the_commands_of_a_page_run(name: str, small_moe: Path, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    if name != CHEAP and not pytestconfig.getoption("--docs"):
        pytest.skip("takes a while: run with --docs")
    furnish(tmp_path, small_moe)
    with PageRun(tmp_path) as run:
        for block in blocks(ROOT / "docs" / name):
            if not block.by_hand:
                run.run(block)


def test_the_program_of_the_readme_runs(small_moe: Path, tmp_path: Path) -> None:
    furnish(tmp_path, small_moe)
    programs = [block for block in blocks(ROOT / "README.md") if block.language == "python"]
    assert programs
    with PageRun(tmp_path) as run:
        for program in programs:
            run.run(program)
