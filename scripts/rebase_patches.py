"""Rebases a patch series from one source tree onto another, hunk by hunk, and reports the result of each.

Every hunk is a three-way merge by git: the base is the file of the old tree with the series up to this hunk; one side
is the base with the hunk; the other side is the file of the new tree with all hunks rebased so far. If that
conflicts, the hunk's lines are searched in the whole file, because moved code has them unchanged. If that fails too,
the hunk's changes are tried one by one. A change that fits in no place, or in several, is left to the reader, and the
rest of its patch is rebased without it.

The resulting patches fit the new tree line by line, with the three lines of context that git writes.
"""

from __future__ import annotations

import difflib
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]

sys.dont_write_bytecode = True  # a new file under native/ would count as a change to build
sys.path.insert(0, str(ROOT / "native/cmake"))

from llama_source import FilePatch, Hunk, SourceError, apply_hunks, apply_patch, parse_patch, split_lines  # noqa: E402

Tree = dict[str, bytes]  # content by path

# Results of a hunk.
AT_ITS_LINE = "at its line"
SHIFTED = "at another line"
MERGED = "merged into changed lines"
MOVED = "found elsewhere in the file"
PRESENT = "already in the new tree"
FAILED = "not rebased"

OTHER_LINES = "the new tree has other lines there"
N_CONTEXT = 3  # unchanged lines around a change, as git writes them
NEAR = 0.5  # share of a hunk's words that makes a place worth showing


@dataclass(frozen=True)
class Place:
    """The place where a file is most like a hunk."""

    path: str
    line: int  # the first, from 1
    lines: list[bytes]
    share: float  # of the hunk's words, rare ones counting more


@dataclass(frozen=True)
class RebasedHunk:
    hunk: Hunk
    path: str  # in the new tree; in the old one if the new one lacks the file
    became: str
    line: int = 0  # of the change in the new tree with the series so far, from 1
    why: str = ""  # FAILED: a sentence
    nearest: Place | None = None  # FAILED: None if no place is like the hunk


@dataclass(frozen=True)
class RebasedPatch:
    name: str
    text: bytes | None  # None: nothing of it is left
    rejected: bytes  # the hunks that failed, as a patch
    hunks: list[RebasedHunk]

    @property
    def failed(self) -> list[RebasedHunk]:
        return [hunk for hunk in self.hunks if hunk.became == FAILED]


class Git:
    """git outside any repository, without the user's configuration.

    Raises:
        SourceError: There is no git.
    """

    def __init__(self) -> None:
        program = shutil.which("git")
        if program is None:
            raise SourceError("git was not found, and the patches are merged with it: install git")
        self._program = program
        self._env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        self._env |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C"}

    def merge(self, current: bytes, base: bytes, other: bytes) -> bytes | None:
        """Returns current with the changes from base to other; None if they conflict."""
        with tempfile.TemporaryDirectory() as scratch:
            for name, text in (("current", current), ("base", base), ("other", other)):
                Path(scratch, name).write_bytes(text)
            done = self.run(["merge-file", "-p", "-q", "current", "base", "other"], scratch)
        if done.returncode > 127:  # lower ones are the number of conflicts
            raise SourceError(f"git merge-file failed: {done.stderr.decode(errors='replace').strip()}")
        return None if done.returncode else done.stdout

    def diff(self, before: Tree, after: Tree) -> bytes:
        """Returns a patch from one tree to another, without renames."""
        return self._diff(before, after, ["--no-renames"])

    def renames(self, before: Tree, after: Tree) -> dict[str, str]:
        """Returns the new paths of files in `before` of which another file in `after` has at least half the content."""
        options = ["--name-status", "-z", "--find-renames", "-l0", "--diff-filter=R"]
        fields = self._diff(before, after, options).decode().split("\0")
        return {old.partition("/")[2]: new.partition("/")[2] for old, new in zip(fields[1::3], fields[2::3])}

    def _diff(self, before: Tree, after: Tree, options: Sequence[str]) -> bytes:
        with tempfile.TemporaryDirectory() as scratch:
            for side, tree in (("a", before), ("b", after)):
                Path(scratch, side).mkdir()
                for path, text in tree.items():
                    target = Path(scratch, side, path)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(text)
            # The directories are the prefixes of the paths.
            command = ["diff", "--no-index", "--no-prefix", "--no-color", "--no-ext-diff", *options, "a", "b"]
            done = self.run(command, scratch)
        if done.returncode > 1:  # 1: there are differences
            raise SourceError(f"git diff failed: {done.stderr.decode(errors='replace').strip()}")
        return done.stdout

    def run(self, arguments: Sequence[str], directory: str | Path) -> subprocess.CompletedProcess:
        return subprocess.run([self._program, *arguments], cwd=directory, env=self._env, capture_output=True)


def rebase(series: dict[str, bytes], old: Tree, new: Tree, git: Git) -> list[RebasedPatch]:
    """Rebases the series, text by name in the order of the patches, from the old tree onto the new one.

    Raises:
        SourceError: The series does not fit the old tree line by line.
    """
    return list(_Rebase(series, old, new, git).run())


@dataclass
class _Rebase:
    series: dict[str, bytes]
    old: Tree
    new: Tree
    git: Git
    paths: dict[str, str] = field(default_factory=dict)  # of files that have another path in the new tree
    failed_lines: dict[bytes, str] = field(default_factory=dict)  # by line that a failed hunk would add: its hunk

    def run(self) -> Iterator[RebasedPatch]:
        self.old, self.new = dict(self.old), dict(self.new)
        patches = {name: parse_patch(name, text) for name, text in self.series.items()}
        touched = {patch.old_path for files in patches.values() for patch in files if patch.old_path}
        self.paths = self._find_renamed(touched)
        for name, files in patches.items():
            yield self._rebase_patch(name, files)

    def _find_renamed(self, touched: Iterable[str]) -> dict[str, str]:
        gone = {path: self.old[path] for path in touched if path in self.old and path not in self.new}
        added = {path: text for path, text in self.new.items() if path not in self.old}
        return self.git.renames(gone, added) if gone else {}

    def _rebase_patch(self, name: str, files: list[FilePatch]) -> RebasedPatch:
        old_before, before, text = dict(self.old), dict(self.new), self.series[name]
        apply_patch(name, text, self.old)
        hunks, rejected = [], b""
        for patch in files:
            done = self._rebase_file(name, patch, old_before)
            hunks += done
            failed = [hunk.hunk.text for hunk in done if hunk.became == FAILED]
            if failed:
                rejected += _file_header(patch) + b"".join(failed)

        changed = {path for path in before.keys() | self.new.keys() if before.get(path) != self.new.get(path)}
        if not changed:
            return RebasedPatch(name, None, rejected, hunks)
        renamed = any(patch.old_path in self.paths for patch in files)
        if renamed or any(hunk.became != AT_ITS_LINE for hunk in hunks):
            text = message(text) + self.git.diff(_part(before, changed), _part(self.new, changed))
        apply_patch(name, text, before)
        if _part(before, changed) != _part(self.new, changed):
            raise SourceError(f"{name}: the rebased patch does not lead to the merged files")
        return RebasedPatch(name, text, rejected, hunks)

    def _rebase_file(self, name: str, patch: FilePatch, old_before: Tree) -> list[RebasedHunk]:
        path = self.paths.get(patch.old_path or "", patch.new_path or patch.old_path)
        base = old_before.get(patch.old_path or "", b"")
        why = ""
        if patch.old_path is None and path in self.new:
            if self.new[path] == self.old[path]:
                return [RebasedHunk(hunk, path, PRESENT) for hunk in patch.hunks]
            why = "the patch creates a file that the new tree has already"
        elif patch.old_path is not None and path not in self.new:
            if patch.new_path is None:
                return [RebasedHunk(hunk, path, PRESENT) for hunk in patch.hunks]
            why = "the new tree has no such file"
        elif patch.new_path is None and self.new[path] != base:
            why = "the patch deletes a file that is another one in the new tree"
        if why:
            return [self._fail(name, hunk, path, why) for hunk in patch.hunks]

        done = []
        lines = split_lines(base)
        for count, hunk in enumerate(patch.hunks):
            earlier = apply_hunks(lines, patch.hunks[:count])
            step = replace(hunk, start=hunk.start + len(earlier) - len(lines))
            done += self._rebase_hunk(name, path, step, earlier)
        if patch.new_path is None:
            del self.new[path]
        return done

    def _rebase_hunk(self, name: str, path: str, hunk: Hunk, base: list[bytes]) -> list[RebasedHunk]:
        """Rebases a hunk into self.new[path], as a whole or change by change. hunk.start: in base."""
        whole = self._place(path, hunk, base)
        if whole is not None:
            return [whole]
        changes = split_hunk(hunk)
        if len(changes) == 1:
            return [self._fail(name, hunk, path, OTHER_LINES)]
        done = []
        for change in changes:
            done.append(self._place(path, change, base) or self._fail(name, change, path, OTHER_LINES))
            base = apply_hunks(base, [change])
        return done

    def _place(self, path: str, hunk: Hunk, base: list[bytes]) -> RebasedHunk | None:
        current = self.new.get(path, b"")
        lines = split_lines(current)
        merged = self.git.merge(current, b"".join(base), b"".join(apply_hunks(base, [hunk])))
        if merged is None:
            at, part = _find_only(hunk, lines)
            if part is None:
                return None
            self.new[path] = b"".join(apply_hunks(lines, [replace(part, start=at)]))
            return RebasedHunk(hunk, path, MOVED, at + _n_context(part)[0] + 1)
        if merged == current and current:
            return RebasedHunk(hunk, path, PRESENT)
        self.new[path] = merged
        head = _n_context(hunk)[0]
        at = _n_common(lines, split_lines(merged)) - head
        fits = at >= 0 and lines[at : at + len(hunk.old)] == hunk.old
        became = MERGED if not fits else AT_ITS_LINE if at == hunk.start else SHIFTED
        return RebasedHunk(hunk, path, became, at + head + 1)

    def _fail(self, name: str, hunk: Hunk, path: str, why: str) -> RebasedHunk:
        place = find_nearest(hunk, path, self.new)
        found = {_bare(line) for line in place.lines} if place else set()
        missing = [_bare(line) for line in hunk.old if _bare(line) not in found]
        cause = next((self.failed_lines[line] for line in missing if line in self.failed_lines), None)
        if cause is not None:
            why = f"it changes lines of a hunk that was not rebased: {cause}"
        head, tail = _n_context(hunk)
        for line in map(_bare, hunk.new[head : len(hunk.new) - tail]):
            if _is_telling(line):
                self.failed_lines.setdefault(line, f"{name} {hunk.header}")
        return RebasedHunk(hunk, path, FAILED, why=why, nearest=place)


def message(text: bytes) -> bytes:
    """Returns the text above the first file of a patch."""
    kept = []
    for line in split_lines(text):
        if line.startswith((b"diff --git ", b"--- ")):
            break
        kept.append(line)
    return b"".join(kept)


def split_hunk(hunk: Hunk) -> list[Hunk]:
    """Returns a hunk for each run of changed lines, with the unchanged lines around.

    Each starts where the file has its first line after the earlier ones are applied.
    """
    signs = [line[:1] for line in split_lines(hunk.text)[1:] if line[:1] in (b" ", b"-", b"+")]
    runs = [(unchanged, len(list(run))) for unchanged, run in itertools.groupby(signs, lambda sign: sign == b" ")]
    parts = []
    n_old = n_new = before = 0  # lines of the hunk so far; unchanged ones before the next change
    at = 0
    for number, (unchanged, length) in enumerate(runs):
        run = signs[at : at + length]
        at += length
        if unchanged:
            n_old, n_new, before = n_old + length, n_new + length, length
            continue
        after = runs[number + 1][1] if number + 1 < len(runs) else 0
        head, tail = min(before, N_CONTEXT), min(after, N_CONTEXT)
        n_removed, n_added = run.count(b"-"), run.count(b"+")
        old = hunk.old[n_old - head : n_old + n_removed + tail]
        new = hunk.new[n_new - head : n_new + n_added + tail]
        start = hunk.start + n_new - head
        where = hunk.header.rpartition("@@")[2]
        header = f"@@ -{hunk.start + n_old - head + 1},{len(old)} +{start + 1},{len(new)} @@{where}"
        removed, added = old[head : head + n_removed], new[head : head + n_added]
        text = _hunk_text(header, old[:head], removed, added, old[len(old) - tail :])
        parts.append(Hunk(header, start, text, old, new))
        n_old, n_new = n_old + n_removed, n_new + n_added
    return parts


def _hunk_text(header: str, head: list[bytes], removed: list[bytes], added: list[bytes], tail: list[bytes]) -> bytes:
    text = [header.encode() + b"\n"]
    for sign, lines in ((b" ", head), (b"-", removed), (b"+", added), (b" ", tail)):
        for line in lines:
            text.append(sign + (line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n"))
    return b"".join(text)


def _file_header(patch: FilePatch) -> bytes:
    old = f"a/{patch.old_path}" if patch.old_path else "/dev/null"
    new = f"b/{patch.new_path}" if patch.new_path else "/dev/null"
    return f"--- {old}\n+++ {new}\n".encode()


def _part(tree: Tree, paths: Iterable[str]) -> Tree:
    return {path: tree[path] for path in sorted(paths) if path in tree}


def _n_common(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """Counts the common first lines."""
    return next((n for n, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def _n_context(hunk: Hunk) -> tuple[int, int]:
    """Counts the lines of context before and after a hunk's changes."""
    head = _n_common(hunk.old, hunk.new)
    tail = _n_common(hunk.old[head:][::-1], hunk.new[head:][::-1])
    return head, tail


def _find_only(hunk: Hunk, lines: list[bytes]) -> tuple[int, Hunk | None]:
    """Finds the only place that has the hunk's lines, or all except the outermost one or two of its context."""
    for fuzz in range(3):
        head, tail = (max(0, min(n - 1, fuzz)) for n in _n_context(hunk))
        part = replace(hunk, old=hunk.old[head : len(hunk.old) - tail], new=hunk.new[head : len(hunk.new) - tail])
        if sum(_is_telling(_bare(line)) for line in part.old) < 2:
            break  # braces and blank lines are everywhere
        size = len(part.old)
        places = [at for at in range(len(lines) - size + 1) if lines[at : at + size] == part.old]
        if len(places) == 1:
            return places[0], part
        if places:
            break
    return 0, None


def _bare(line: bytes) -> bytes:
    return b" ".join(line.split())


def _is_telling(line: bytes) -> bool:
    return len(line) > 3


def find_nearest(hunk: Hunk, path: str, tree: Tree) -> Place | None:
    """Finds the place with most of the hunk's words, at least half: in the file at path, otherwise in similar files."""
    wanted = _words(b"".join(hunk.old))
    here = _nearest_in(path, tree.get(path, b""), hunk, wanted)
    if here is not None and here.share >= NEAR:
        return here
    kind = PurePosixPath(path).suffix[:2]  # .c and .cpp, .h and .hpp
    places = (_nearest_in(other, text, hunk, wanted) for other, text in tree.items()
              if other != path and PurePosixPath(other).suffix[:2] == kind and any(word in text for word in wanted))
    best = max(filter(None, places), key=lambda place: place.share, default=None)
    return best if best is not None and best.share >= NEAR else None


def _words(line: bytes) -> set[bytes]:
    return set(re.findall(rb"[A-Za-z_]\w{3,}", line))


def _nearest_in(path: str, text: bytes, hunk: Hunk, wanted: set[bytes]) -> Place | None:
    lines = split_lines(text)
    size = len(hunk.old)
    found = [wanted & _words(line) for line in lines]
    # Words that the file has everywhere say little about the place.
    n_lines = Counter(word for words in found for word in words)
    weight = {word: 1 / max(1, n_lines[word]) for word in wanted}
    seen: Counter[bytes] = Counter()
    best, where, score = 0.0, 0, 0.0
    for at in range(len(lines)):
        for word in found[at]:
            score += weight[word] if not seen[word] else 0
            seen[word] += 1
        for word in found[at - size] if at >= size else ():
            seen[word] -= 1
            score -= weight[word] if not seen[word] else 0
        start = max(0, at + 1 - size)
        # Among equal places, the nearest to the hunk's old place.
        if (round(score, 6), -abs(start - hunk.start)) > (round(best, 6), -abs(where - hunk.start)):
            best, where = score, start
    return Place(path, where + 1, lines[where : where + size], best / sum(weight.values())) if best else None


def compare(wanted: list[bytes], found: list[bytes]) -> Iterator[tuple[str, bytes]]:
    """Yields the lines of both: "-" only wanted, "+" only found, " " in both, ignoring indentation."""
    matcher = difflib.SequenceMatcher(None, [_bare(line) for line in wanted], [_bare(line) for line in found], False)
    for kind, i1, i2, j1, j2 in matcher.get_opcodes():
        if kind == "equal":
            yield from ((" ", line) for line in found[j1:j2])
        else:
            yield from (("-", line) for line in wanted[i1:i2])
            yield from (("+", line) for line in found[j1:j2])
