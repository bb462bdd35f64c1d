"""Puts the patched llama.cpp source tree in place: fetch, verify, extract, patch, write.

    python llama_source.py tree DIR [--patches DIR]   the patched tree, brought up to date in DIR
    python llama_source.py bindings DIR               the package llama_cpp, brought up to date in DIR/llama_cpp
    python llama_source.py sdist                      the verified archive; prints its path

The source is what the `llama-cpp-python` distribution pinned in llama-cpp-python.txt carries. It is
downloaded once with pip into the user's cache; PYORCH_LLAMA_SDIST names a copy instead, for machines
that reach no package index.

Patches apply at the lines that they name, with every context line equal, or the build stops. A hunk
that fits somewhere nearby is a patch made for another version.

Standard library only: it runs before anything of this project is installed. The tree is composed in
memory and only files whose content differs are written, so a changed patch recompiles what it
touches and no more.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

PIN_FILE = Path(__file__).with_name("llama-cpp-python.txt")
VARIABLE = "PYORCH_LLAMA_SDIST"
CONTENTS = "source of llama.cpp, 76 MB"
STAMP = ".pyorch-source"

LLAMA_CPP = "vendor/llama.cpp/"  # in the archive
BINDINGS = "llama_cpp/"
BINDINGS_LICENSE = "LICENSE.md"

# In front of the package llama_cpp: whoever imports it gets the libraries that pyorch names.
CLAIM = b"import pyorch  # brings these bindings, and says which libraries they load\n\n"

# What its __init__.py imports, and what stands there instead: whoever wants the C API only, as a server does, need not
# wait for numpy, jinja2 and the chat formats, a fifth of a second. Everything of llama_cpp.llama is found as before.
EAGER = b"\nfrom .llama import *\n"
LATER = b"""

def __getattr__(name):
    from importlib import import_module

    module = import_module(".llama", __name__)
    globals().update({key: value for key, value in vars(module).items() if not key.startswith("_")})
    if name in globals():
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    __getattr__("Llama")
    return sorted(globals())

"""

# What the build and the packaged converter read; the rest (docs, vocabularies, web UI sources) is
# two thirds of the archive.
WANTED = (
    "CMakeLists.txt", "LICENSE", "cmake/", "common/", "conversion/", "convert_hf_to_gguf.py", "ggml/",
    "gguf-py/LICENSE", "gguf-py/gguf/", "include/", "licenses/", "models/templates/", "scripts/ui-assets.cmake", "src/",
    "tools/", "vendor/",
)
UNWANTED = ("tools/ui/src/", "tools/ui/static/", "tools/ui/tests/")


class SourceError(Exception):
    """A sentence for the person who builds."""


class DownloadError(SourceError):
    """pip brought nothing; the text is what pip said."""


# --- the archive -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pin:
    """A source distribution. file: where it is pinned; variable: of the environment, names a local copy."""

    name: str
    version: str
    sha256: str
    file: Path = PIN_FILE
    variable: str = VARIABLE
    contents: str = CONTENTS

    @property
    def archive_name(self) -> str:
        return f"{self.name.replace('-', '_')}-{self.version}.tar.gz"

    @property
    def line(self) -> str:
        """As the file has it, a line of a requirements file."""
        return f"{self.name}=={self.version} --hash=sha256:{self.sha256}"


def read_pin(file: Path = PIN_FILE, variable: str = VARIABLE, contents: str = CONTENTS) -> Pin:
    match = re.search(
        r"^([\w-]+)==([\w.]+) --hash=sha256:([0-9a-f]{64})$", file.read_text(), re.MULTILINE
    )
    if match is None:
        raise SourceError(f"{file} has no line of the form NAME==VERSION --hash=sha256:HEX")
    return Pin(*match.groups(), file, variable, contents)


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def find_sdist(pin: Pin) -> Path:
    """The verified archive: the copy that the user names, else the cached one, else a download."""
    named = os.environ.get(pin.variable)
    if named:
        path = Path(named)
        if not path.is_file():
            raise SourceError(f"{pin.variable} names {named}, which is not a file")
        actual = sha256_of(path)
        if actual != pin.sha256:
            raise SourceError(
                f"{pin.variable} names {named}, whose sha256 is {actual}: this is not "
                f"{pin.archive_name}, whose sha256 is {pin.sha256}"
            )
        return path

    cached = cache_dir() / pin.archive_name
    if cached.is_file() and sha256_of(cached) == pin.sha256:
        return cached
    return download(pin, cached)


def cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    path = Path(base) / "pyorch"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SourceError(
            f"the cache directory {path} cannot be made ({error.strerror}): "
            "set XDG_CACHE_HOME to a directory that can be written"
        ) from error
    return path


def download(pin: Pin, target: Path) -> Path:
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        try:
            archive = fetch(pin.name, pin.version, ["--require-hashes", "--requirement", str(pin.file)], Path(scratch),
                            pin.contents)
        except DownloadError as error:
            raise SourceError(
                f"pip could not download {pin.name}=={pin.version}; without a package index, set "
                f"{pin.variable} to a local {pin.archive_name}. pip said:\n{error}"
            ) from error
        actual = sha256_of(archive)
        if actual != pin.sha256:
            raise SourceError(
                f"the downloaded {pin.archive_name} has sha256 {actual}, expected {pin.sha256}"
            )
        # The rename makes the cache entry appear whole or not at all.
        os.replace(archive, target)
    return target


def fetch(name: str, version: str, requirement: Sequence[str], directory: Path, contents: str = CONTENTS) -> Path:
    """The source distribution, brought by pip into a directory.

    requirement: the arguments that tell pip what is required. Raises DownloadError.
    """
    print(f"fetching {name} {version} ({contents}, once)", flush=True, file=sys.stderr)
    # pip prepares the metadata of whatever it downloads, which needs the package's build backend.
    # That of llama-cpp-python is one of our own build requirements: where it is installed, pip need not fetch it again.
    ours = name == "llama-cpp-python" and find_spec("scikit_build_core") is not None
    isolation = ["--no-build-isolation"] if ours else []
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
        "--no-deps", "--no-binary", name, *isolation, "--dest", str(directory), *requirement,
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    archives = list(directory.glob("*.tar.gz"))
    if done.returncode != 0 or len(archives) != 1:
        raise DownloadError(done.stdout.strip())
    return archives[0]


def extract(archive: Path, pin: Pin) -> dict[str, bytes]:
    """The wanted files of the archive's vendor/llama.cpp, by path relative to it."""
    return llama_cpp_tree(archive, read_archive(archive, pin, is_wanted))


def is_wanted(path: str) -> bool:
    """Of a path in the archive."""
    below = path.removeprefix(LLAMA_CPP)
    return below != path and below.startswith(WANTED) and not below.startswith(UNWANTED)


def read_archive(archive: Path, pin: Pin, wanted: Callable[[str], bool]) -> dict[str, bytes]:
    """The wanted files of the archive, by path relative to its only directory."""
    prefix = f"{pin.name.replace('-', '_')}-{pin.version}/"
    files = {}
    try:
        with tarfile.open(archive, "r|gz") as tar:
            for member in tar:
                path = member.name.removeprefix(prefix)
                if path != member.name and member.isfile() and wanted(path):
                    files[path] = tar.extractfile(member).read()
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise SourceError(f"{archive} is not a readable .tar.gz archive: {error}") from error
    return files


def llama_cpp_tree(archive: Path, files: dict[str, bytes]) -> dict[str, bytes]:
    """Those of the archive's files that are llama.cpp's, by path relative to its root."""
    tree = {path.removeprefix(LLAMA_CPP): text for path, text in files.items() if path.startswith(LLAMA_CPP)}
    if "src/llama.cpp" not in tree:
        raise SourceError(f"{archive} holds no {LLAMA_CPP}src/llama.cpp: the archive's layout changed")
    return tree


# --- the patches -------------------------------------------------------------------------------


@dataclass
class Hunk:
    header: str
    start: int  # 0-based index of the first line in the file before this patch
    text: bytes = b""  # as the patch has it
    old: list[bytes] = field(default_factory=list)
    new: list[bytes] = field(default_factory=list)


@dataclass
class FilePatch:
    old_path: str | None  # None: the patch creates the file
    new_path: str | None  # None: the patch deletes it
    hunks: list[Hunk] = field(default_factory=list)


HUNK_HEADER = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


def split_lines(text: bytes) -> list[bytes]:
    return re.findall(rb"[^\n]*\n|[^\n]+", text)  # splitlines() also ends a line at a lone \r


def parse_patch(name: str, text: bytes) -> list[FilePatch]:
    lines = split_lines(text)
    patches: list[FilePatch] = []
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.startswith((b"rename from ", b"copy from ", b"GIT binary patch")):
            raise SourceError(f"{name}: line {at + 1}: renames, copies and binary files are not supported")
        is_header = line.startswith(b"--- ") and lines[at + 1 : at + 2] and lines[at + 1].startswith(b"+++ ")
        if is_header:
            patches.append(FilePatch(header_path(line), header_path(lines[at + 1])))
            at += 2
        elif line.startswith(b"@@ ") and patches:
            hunk, at = parse_hunk(name, lines, at)
            patches[-1].hunks.append(hunk)
        else:
            at += 1  # the message above a patch, "diff --git" and "index" lines, the signature below
    if not any(patch.hunks for patch in patches):
        raise SourceError(f"{name}: no hunks found: this is not a unified diff")
    return patches


def header_path(line: bytes) -> str | None:
    path = line[4:].decode().rstrip("\n").split("\t")[0]
    if path == "/dev/null":
        return None
    return path.partition("/")[2]  # -p1


def parse_hunk(name: str, lines: list[bytes], at: int) -> tuple[Hunk, int]:
    header = lines[at].decode(errors="replace").strip()
    match = HUNK_HEADER.match(lines[at])
    if match is None:
        raise SourceError(f"{name}: line {at + 1}: malformed hunk header: {header}")
    old_start, old_count, _, new_count = (int(group) if group is not None else 1 for group in match.groups())
    # An empty old range names the line before the insertion, any other the first line of the range.
    hunk = Hunk(header, old_start if old_count == 0 else old_start - 1)
    first = at
    at += 1
    while len(hunk.old) < old_count or len(hunk.new) < new_count:
        line = lines[at] if at < len(lines) else b""
        kind, content = line[:1], line[1:]
        if kind not in (b" ", b"-", b"+"):
            raise SourceError(f"{name}: line {at + 1}: the hunk {header} is shorter than its header says")
        at += 1
        if at < len(lines) and lines[at].startswith(b"\\"):  # "\ No newline at end of file"
            content = content.rstrip(b"\n")
            at += 1
        if kind != b"+":
            hunk.old.append(content)
        if kind != b"-":
            hunk.new.append(content)
    if len(hunk.old) != old_count or len(hunk.new) != new_count:
        raise SourceError(f"{name}: line {at + 1}: the hunk {header} does not match its header's counts")
    if at < len(lines) and lines[at][:1] in (b" ", b"-", b"+") and not lines[at].startswith((b"--- ", b"-- \n")):
        raise SourceError(f"{name}: line {at + 1}: the hunk {header} is longer than its header says")
    hunk.text = b"".join(lines[first:at])
    return hunk, at


def apply_patch(name: str, text: bytes, files: dict[str, bytes]) -> None:
    for patch in parse_patch(name, text):
        path = patch.new_path or patch.old_path
        if patch.old_path is None:
            if path in files:
                raise SourceError(f"{name}: creates {path}, which exists already")
            before = []
        elif patch.old_path not in files:
            raise SourceError(f"{name}: changes {patch.old_path}, which the llama.cpp source does not have")
        else:
            before = split_lines(files[patch.old_path])

        copied = 0
        for number, hunk in enumerate(patch.hunks, 1):
            check_hunk(f"{name}: hunk {number} ({hunk.header}) does not apply to {path}", hunk, before, copied)
            copied = hunk.start + len(hunk.old)

        if patch.new_path is None:
            del files[patch.old_path]
        else:
            files[patch.new_path] = b"".join(apply_hunks(before, patch.hunks))


def apply_hunks(before: list[bytes], hunks: Sequence[Hunk]) -> list[bytes]:
    """The lines with these hunks, which fit, in the places that they name."""
    after: list[bytes] = []
    copied = 0
    for hunk in hunks:
        after += before[copied : hunk.start] + hunk.new
        copied = hunk.start + len(hunk.old)
    return after + before[copied:]


def check_hunk(complaint: str, hunk: Hunk, before: list[bytes], copied: int) -> None:
    if hunk.start < copied:
        raise SourceError(f"{complaint}: it overlaps the hunk before it")
    for offset, expected in enumerate(hunk.old):
        line = hunk.start + offset
        actual = before[line] if line < len(before) else b"(end of file)"
        if actual != expected:
            raise SourceError(
                f"{complaint}: at line {line + 1} the patch expects\n"
                f"    {expected.decode(errors='replace').rstrip()}\n"
                f"but llama.cpp has\n"
                f"    {actual.decode(errors='replace').rstrip()}"
            )


# --- the tree ----------------------------------------------------------------------------------


def bring_up_to_date(directory: Path, state: str, compose: Callable[[], dict[str, bytes]]) -> bool:
    """Writes files into a directory, and what they were made of; False where they are of that already.

    Without its stamp an interrupted update is repeated; comparing content makes that cheap.
    """
    stamp = directory / STAMP
    if stamp.is_file() and stamp.read_text() == state:
        return False
    files = compose()
    stamp.unlink(missing_ok=True)
    write_tree(directory, files)
    stamp.write_text(state)
    return True


def update_tree(tree: Path, patch_dir: Path | None) -> None:
    pin = read_pin()
    texts = {patch.name: patch.read_bytes() for patch in sorted(patch_dir.glob("*.patch") if patch_dir else [])}

    def compose() -> dict[str, bytes]:
        files = extract(find_sdist(pin), pin)
        for name, text in texts.items():
            apply_patch(f"{patch_dir.name}/{name}", text, files)
        return files

    if bring_up_to_date(tree, describe_state(pin, texts), compose):
        print(f"llama.cpp from {pin.name} {pin.version}, {len(texts)} patches applied", file=sys.stderr)


def update_bindings(directory: Path) -> None:
    """The Python part of llama-cpp-python in directory/llama_cpp, its licence beside it."""
    pin = read_pin()
    bring_up_to_date(directory, describe_state(pin, {}), lambda: bindings(find_sdist(pin), pin))


def bindings(archive: Path, pin: Pin) -> dict[str, bytes]:
    files = read_archive(archive, pin, lambda path: is_binding(path) or path == BINDINGS_LICENSE)
    first = f"{BINDINGS}__init__.py"
    if not {first, BINDINGS_LICENSE} <= set(files):
        raise SourceError(f"{archive} holds no {first} or no {BINDINGS_LICENSE}: the archive's layout changed")
    if EAGER not in files[first]:
        raise SourceError(
            f"{archive}: {first} no longer imports llama_cpp.llama as a whole: what it does has to be read"
        )
    return files | {first: CLAIM + files[first].replace(EAGER, LATER)}


def is_binding(path: str) -> bool:
    return path.startswith(BINDINGS) and path.endswith((".py", "/py.typed"))


def describe_state(pin: Pin, texts: dict[str, bytes]) -> str:
    lines = [pin.sha256, hashlib.sha256(Path(__file__).read_bytes()).hexdigest()]
    lines += [f"{name} {hashlib.sha256(text).hexdigest()}" for name, text in texts.items()]
    return "\n".join(lines) + "\n"


def write_tree(tree: Path, files: dict[str, bytes]) -> None:
    for path, content in files.items():
        target = tree / path
        if not target.is_file() or target.read_bytes() != content:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
    for target in tree.rglob("*"):
        if target.is_file() and target.relative_to(tree).as_posix() not in files:
            target.unlink()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    tree = commands.add_parser("tree", help="bring the patched source tree in DIR up to date")
    tree.add_argument("dir", type=Path)
    tree.add_argument("--patches", type=Path, help="directory of *.patch files, applied in the order of their names")
    bindings = commands.add_parser("bindings", help="bring the package llama_cpp in DIR up to date")
    bindings.add_argument("dir", type=Path)
    commands.add_parser("sdist", help="print the path of the verified archive")
    args = parser.parse_args()
    try:
        if args.command == "tree":
            update_tree(args.dir, args.patches)
        elif args.command == "bindings":
            update_bindings(args.dir)
        else:
            print(find_sdist(read_pin()))
    except SourceError as error:
        print(f"llama.cpp source: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
