"""The commands and programs that the documentation shows, taken out of its fenced blocks and run as they stand.

A page runs from top to bottom in a directory of its own, in which the files that pages begin with are there under the
names that the pages use: the small trained model stands for `olmoe.gguf`. What must be there before or takes too long
is marked in the page, in a comment that readers do not see, on the line before its block:

    <!-- by hand: needs a model of 4 GiB -->

Lines that begin with one of _PROGRAMS are commands; a comment behind them is none of theirs. `pyorch serve` runs until
its page ends; a port 8080 is one that is free.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from processes import HANG_SECONDS

from pyorch import ports

ROOT = Path(__file__).parents[1]
FIXTURE = ROOT / "tests/fixtures/small-moe"

_PROGRAMS = ("pyorch", "curl", "python", "pip", "make", "cmake", "docker", ".venv/bin/", "sudo", "git", "llama-server")
_BY_HAND = re.compile(r"<!-- by hand: (.+) -->")
_FENCE = re.compile(r"^```(\w*)")
_PORT = "8080"


@dataclass(frozen=True)
class Block:
    """One fenced block. language: "" where none is named; by_hand: why nobody runs it in a test, "" if it is run."""

    page: str
    line: int
    language: str
    text: str
    by_hand: str

    @property
    def commands(self) -> list[str]:
        """Without comments, continued lines joined."""
        if self.language not in ("", "sh", "bash", "console"):
            return []
        lines = re.sub(r"\\\n\s*", "", self.text).split("\n")
        return [re.sub(r"\s+#\s.*$", "", line).strip().removeprefix("$ ") for line in lines
                if line.strip().removeprefix("$ ").startswith(_PROGRAMS)]


def blocks(page: Path) -> list[Block]:
    found, by_hand, begun = [], "", None
    for number, line in enumerate(page.read_text(encoding="utf-8").split("\n"), 1):
        if begun is None:
            if fence := _FENCE.match(line):
                begun, language, lines = number, fence[1], []
            elif line.strip():
                mark = _BY_HAND.fullmatch(line.strip())
                by_hand = mark[1] if mark else ""
        elif line.startswith("```"):
            found.append(Block(str(page.relative_to(ROOT)), begun, language, "\n".join(lines), by_hand))
            begun, by_hand = None, ""
        else:
            lines.append(line)
    return found


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def by_hand() -> Iterator[tuple[str, str, str]]:
    """Page and line, why, and the commands that nobody runs in a test."""
    for page in pages():
        for block in blocks(page):
            if block.by_hand:
                yield f"{block.page}:{block.line}", block.by_hand, "; ".join(block.commands) or block.language


def furnish(directory: Path, model: Path) -> None:
    """Puts the files there that pages begin with."""
    shutil.copy(model, directory / "olmoe.gguf")
    shutil.copytree(FIXTURE, directory / "OLMoE-1B-7B-0125")
    text = (FIXTURE / "text-test.txt").read_text(encoding="utf-8")
    (directory / "book.txt").write_text(text[:6000])
    (directory / "prose.txt").write_text(text[:6000])
    questions = (FIXTURE / "facts-train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (directory / "prompts.jsonl").write_text("".join(questions[:40]))
    (directory / "train-questions.jsonl").write_text("".join(questions[:60]))
    (directory / "questions.jsonl").write_text("".join(
        (FIXTURE / "facts-test.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)[:40]))


class PageRun:
    """Runs the blocks of a page, one after the other, in a directory. As a `with` block."""

    def __init__(self, directory: Path, seconds: float = HANG_SECONDS) -> None:
        self._directory, self._seconds = directory, seconds
        self._server: subprocess.Popen[bytes] | None = None
        self._port = ""
        programs = directory / ".programs"
        programs.mkdir()
        (programs / "pyorch").write_text(f'#!/bin/sh\nexec {sys.executable} -m pyorch "$@"\n')
        (programs / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        for program in programs.iterdir():
            program.chmod(0o755)
        # One thread: those that wait for each other use a processor, too. A cache of its own: nothing is measured anew
        # by others because of what was measured here.
        self._environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
                             "XDG_CACHE_HOME": str(directory / ".cache")}

    def __enter__(self) -> PageRun:
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.send_signal(signal.SIGTERM)
            try:
                self._server.wait(self._seconds)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()

    def run(self, block: Block) -> None:
        """AssertionError where one of its commands fails, with what it said."""
        where = f"{block.page}:{block.line}"
        if block.language == "python":
            self._call(where, [sys.executable, "-c", self._with_port(block.text)], block.text)
        for command in block.commands:
            if command.startswith("pyorch serve"):
                self._serve(where, command)
            else:
                self._call(where, ["sh", "-c", self._with_port(command)], command)

    def _with_port(self, text: str) -> str:
        return re.sub(rf"\b{_PORT}\b", self._port, text) if self._port else text

    def _call(self, where: str, arguments: list[str], shown: str) -> None:
        done = subprocess.run(arguments, cwd=self._directory, env=self._environment, stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, timeout=self._seconds, errors="replace")
        assert done.returncode == 0, f"{where}: {shown}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"

    def _serve(self, where: str, command: str) -> None:
        self.__exit__()  # the one before
        self._port = str(ports.free())
        words = shlex.split(self._with_port(command))
        if "--port" not in words:
            words[3:3] = ["--port", self._port]
        log = self._directory / "server.log"
        with log.open("wb") as file:
            self._server = subprocess.Popen(words, cwd=self._directory, env=self._environment, stdout=file, stderr=file,
                                            stdin=subprocess.DEVNULL)
        end = time.monotonic() + self._seconds
        while time.monotonic() < end:
            assert self._server.poll() is None, f"{where}: {command}\n{log.read_text(errors='replace')[-2000:]}"
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise AssertionError(f"{where}: {command} does not answer\n{log.read_text(errors='replace')[-2000:]}")


def main() -> int:
    """Lists what no test runs."""
    for where, why, what in by_hand():
        print(f"{where}: {why}\n    {what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
