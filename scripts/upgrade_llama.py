"""Tries another llama-cpp-python release: rebases patches/ onto its llama.cpp, and reports missing names.

    python scripts/upgrade_llama.py 0.3.37              only reports
    python scripts/upgrade_llama.py 0.3.37 -o DIR       writes the rebased series to DIR
    python scripts/upgrade_llama.py 0.3.37 --write      installs it and the new pin

The release is downloaded with pip, as the build does; --sdist names a copy instead. Each hunk that git cannot merge is
printed with its lines and the most similar place. -o writes such hunks to NAME.rej next to the rebased part of their
patch, and --write changes nothing unless all are rebased. Then follow the names that pyorch uses and the release lacks
or has with other parameters: of llama_cpp, of llama.cpp's headers, flags, build and log. A name is found by its
spelling, so a few may belong to something else; they do not prevent --write.

Exit status: 0 if the series fits and every name exists, 1 if something is left to do by hand, 2 if nothing could be
tried (unknown release, no network, no git, a target with other content); then nothing was written.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

# isort: off
from llama_contract import Loss, find_losses
from rebase_patches import AT_ITS_LINE, ROOT, Git, RebasedHunk, RebasedPatch, SourceError, compare, rebase

# isort: on (after the path of llama_source is set)
import llama_source
from llama_source import Pin

PATCHES = "patches"
SOURCES = ("convert", "native", "pyorch", "scripts", "tests")  # use names of llama.cpp

Tree = dict[str, bytes]  # content by path


# --- the release -------------------------------------------------------------------------------


def get_release(name: str, version: str, sdist: Path | None, scratch: Path) -> tuple[Pin, Path]:
    """Returns the archive of a release and its pin. Downloads into scratch unless sdist names a copy."""
    if sdist is None:
        try:
            sdist = llama_source.fetch(name, version, [f"{name}=={version}"], scratch)
        except llama_source.DownloadError as error:
            raise SourceError(explain(name, version, str(error))) from error
    elif not sdist.is_file():
        raise SourceError(f"--sdist names {sdist}, which is not a file")
    return Pin(name, version, llama_source.sha256_of(sdist)), sdist


def explain(name: str, version: str, said: str) -> str:
    """Returns pip's answer in one sentence."""
    known = re.search(r"\(from versions: ([^)]*)\)", said)
    if known is None:
        return f"pip could not download {name}=={version}: {said.splitlines()[-1] if said else 'it said nothing'}"
    if known[1] == "none":
        return (f"pip found no release of {name} at all: is there a network, and a package index? "
                "--sdist names a local copy of the archive")
    return f"there is no source distribution {name} {version}: the newest are {', '.join(known[1].split(', ')[-3:])}"


def read_release(pin: Pin, archive: Path) -> Tree:
    """Returns the files of llama.cpp that the build uses, and the modules of llama_cpp."""
    return llama_source.read_archive(
        archive, pin, lambda path: llama_source.is_wanted(path) or re.fullmatch(r"llama_cpp/.*\.py|PKG-INFO", path)
    )


def requirements(release: Tree) -> set[str]:
    """Returns the release's requirements without extras."""
    lines = release.get("PKG-INFO", b"").decode(errors="replace").splitlines()
    return {line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: ") and "extra ==" not in line}


# --- the report --------------------------------------------------------------------------------


def print_patches(patches: Iterable[RebasedPatch]) -> None:
    for patch in patches:
        counts = Counter(hunk.became for hunk in patch.hunks)
        print(f"{patch.name}: " + ", ".join(f"{count} {became}" for became, count in counts.items()))
        for hunk in patch.hunks:
            if hunk.became != AT_ITS_LINE:
                line = f", line {hunk.line}" if hunk.line else ""
                print(f"    {hunk.path} {hunk.hunk.header}: {hunk.became}{line}")


def print_failed(patch: RebasedPatch, hunk: RebasedHunk) -> None:
    print(f"\n{patch.name}: {hunk.path}\n{hunk.hunk.header}\n    {hunk.why}")
    if hunk.nearest is None:
        print("    no place has half of the words that the hunk looks for:")
        rows = [("-", line) for line in hunk.hunk.old]
    else:
        print(f"    nearest is {hunk.nearest.path}, line {hunk.nearest.line}; - looked for, + found:")
        rows = list(compare(hunk.hunk.old, hunk.nearest.lines))
    for sign, line in rows:
        print(f"    {sign} {line.decode(errors='replace').rstrip()}".rstrip())


def print_losses(version: str, losses: Iterable[Loss]) -> None:
    print(f"\nUsed here, and not in {version} as it was:")
    for loss in losses:
        more = f" and {len(loss.used_in) - 3} more" if len(loss.used_in) > 3 else ""
        print(f"    {loss.name}: {loss.what}\n        {', '.join(loss.used_in[:3])}{more}")


# --- writing -----------------------------------------------------------------------------------


def write_directory(target: Path, patches: Iterable[RebasedPatch]) -> None:
    """Writes the rebased series, and NAME.rej for failed hunks. The directory appears whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
        directory = Path(scratch, target.name)
        directory.mkdir()
        for patch in patches:
            if patch.text is not None:
                (directory / patch.name).write_bytes(patch.text)
            if patch.rejected:
                (directory / f"{patch.name}.rej").write_bytes(patch.rejected)
        os.replace(directory, target)


class Checkout:
    """The files of this repository that an upgrade changes.

    Raises:
        SourceError: They are not in a git checkout, or differ from the last commit.
    """

    def __init__(self, git: Git, pin: Pin) -> None:
        self._git, self._pin = git, pin
        self._pinned = re.compile(rf"{re.escape(pin.name)}=={re.escape(pin.version)}(?![\w.])".encode())
        self._files = [path for path in self._list() if self._pinned.search((ROOT / path).read_bytes())]
        changed = self._run("status", "--porcelain", "--", PATCHES, *self._files)
        if changed:
            raise SourceError(f"{', '.join(line[3:] for line in changed.splitlines())} changed since the last commit: "
                              "commit or stash that first, or write to a directory with -o")

    def _list(self) -> list[str]:
        return [path for path in self._run("ls-files", "-z").split("\0") if (ROOT / path).is_file() and path]

    def _run(self, *arguments: str) -> str:
        done = self._git.run(arguments, ROOT)
        if done.returncode != 0:
            raise SourceError(f"--write is for a git checkout: {done.stderr.decode(errors='replace').strip()}")
        return done.stdout.decode()

    def write(self, new: Pin, patches: Iterable[RebasedPatch]) -> None:
        """Writes the new pin into every file that has the old one, and the series."""
        texts: dict[str, bytes | None] = {f"{PATCHES}/{patch.name}": patch.text for patch in patches}
        for path in self._files:
            text = (ROOT / path).read_bytes().replace(self._pin.line.encode(), new.line.encode())
            texts[path] = self._pinned.sub(f"{new.name}=={new.version}".encode(), text)
        # Writes all before it renames the first, so that a full disk leaves the checkout unchanged.
        written: list[tuple[Path, Path]] = []
        try:
            for path, text in texts.items():
                if text is not None and text != (ROOT / path).read_bytes():
                    part = ROOT / f"{path}.part"
                    written.append((part, ROOT / path))
                    part.write_bytes(text)
            for part, target in written:
                os.replace(part, target)
        finally:
            for part, _ in written:
                part.unlink(missing_ok=True)
        for path, text in texts.items():
            if text is None:
                (ROOT / path).unlink()

    def mentions(self) -> list[str]:
        """Returns lines that still name the old version, for the reader."""
        bare = re.compile(rf"(?<![\w.]){re.escape(self._pin.version)}(?![\w.])".encode())
        return [f"{path}:{number}" for path in self._list()
                for number, line in enumerate((ROOT / path).read_bytes().split(b"\n"), 1) if bare.search(line)]


# --- the command -------------------------------------------------------------------------------


def upgrade(version: str, sdist: Path | None, output: Path | None, write: bool) -> int:
    git = Git()
    pin = llama_source.read_pin()
    if not re.fullmatch(r"\d+(\.\d+)+\w*", version):
        raise SourceError(f'"{version}" is not a version: give one such as {pin.version}')
    if output is not None and (
        (output.exists() and not output.is_dir()) or (output.is_dir() and any(output.iterdir()))
    ):
        raise SourceError(f"{output} exists and is not an empty directory: name another one for the series")
    checkout = Checkout(git, pin) if write else None
    archive = llama_source.find_sdist(pin)
    pinned = read_release(pin, archive)
    tree = llama_source.llama_cpp_tree(archive, pinned)
    series = {path.name: path.read_bytes() for path in sorted((ROOT / PATCHES).glob("*.patch"))}
    patched = dict(tree)
    for name, text in series.items():
        llama_source.apply_patch(f"{PATCHES}/{name}", text, patched)

    cache = llama_source.cache_dir()
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        new_pin, new_archive = get_release(pin.name, version, sdist, Path(scratch))
        new = read_release(new_pin, new_archive)
        patches = rebase(series, tree, llama_source.llama_cpp_tree(new_archive, new), git)
        losses = find_losses(read_sources(), pinned, new)

        print(f"{pin.name} {pin.version} -> {version}, {sum(len(patch.hunks) for patch in patches)} hunks")
        print_patches(patches)
        failed = [(patch, hunk) for patch in patches for hunk in patch.failed]
        for patch, hunk in failed:
            print_failed(patch, hunk)
        if losses:
            print_losses(version, losses)
        for requirement in sorted(requirements(pinned) ^ requirements(new)):
            sign = "-" if requirement in requirements(pinned) else "+"
            print(f"\nIts requirements changed: {sign} {requirement}")

        print()
        if output is not None:
            write_directory(output, patches)
            print(f"series written to {output}; its pin would be\n    {new_pin.line}")
        if checkout is not None and failed:
            print(f"nothing written: {count(len(failed), 'hunk')} could not be rebased (-o DIR writes the rest)")
        elif checkout is not None:
            if sdist is None:  # saves the build another download
                os.replace(new_archive, cache / new_pin.archive_name)
            checkout.write(new_pin, patches)
            print("written; run `make setup` and `make test`")
            if mentions := checkout.mentions():
                print(f"{pin.version} is still named in {', '.join(mentions)}")
    print(f"{count(len(failed), 'hunk')} and {count(len(losses), 'name')} left to do by hand")
    return 1 if failed or losses else 0


def count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def read_sources() -> Tree:
    return {path.relative_to(ROOT).as_posix(): path.read_bytes()
            for folder in SOURCES for path in sorted((ROOT / folder).rglob("*"))
            if path.suffix in (".c", ".cmake", ".cpp", ".h", ".py") or path.name == "CMakeLists.txt"}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], epilog=__doc__[__doc__.index("Exit status") :],
    )
    parser.add_argument("version", metavar="VERSION", help="of llama-cpp-python, such as 0.3.37")
    parser.add_argument("--sdist", type=Path, metavar="FILE", help="the release's archive, instead of a download")
    target = parser.add_mutually_exclusive_group()
    target.add_argument("-o", "--output", type=Path, metavar="DIR", help="write the rebased series to DIR")
    target.add_argument("--write", action="store_true", help="put the series and the new pin in place")
    args = parser.parse_args()
    try:
        return upgrade(args.version, args.sdist, args.output, args.write)
    except (SourceError, OSError, ValueError) as error:
        print(f"upgrade_llama: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
