"""Puts the C source of zstd and lz4 in place, as llama_source.py does that of llama.cpp.

    python codec_sources.py DIR     DIR/zstd and DIR/lz4, brought up to date

The source is what the `zstandard` and `lz4` distributions pinned in zstandard.txt and lz4.txt carry. Each is downloaded
once with pip into the user's cache; PYORCH_ZSTD_SDIST and PYORCH_LZ4_SDIST name copies instead, for machines that reach
no package index.

Standard library only.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from llama_source import SourceError, bring_up_to_date, find_sdist, read_archive, read_pin


@dataclass(frozen=True)
class Source:
    """What is taken out of an archive, and what it is called in the tree."""

    pin_file: Path
    variable: str
    contents: str
    files: dict[str, str]


_HERE = Path(__file__).parent

SOURCES = {
    "zstd": Source(
        _HERE / "zstandard.txt", "PYORCH_ZSTD_SDIST", "source of zstd, 0.7 MB",
        {"zstd/LICENSE": "LICENSE", **{f"zstd/{name}": name for name in ("zstd.c", "zstd.h", "zstd_errors.h")}},
    ),
    "lz4": Source(
        _HERE / "lz4.txt", "PYORCH_LZ4_SDIST", "source of lz4, 0.2 MB",
        {f"lz4libs/{name}": name for name in ("lz4.c", "lz4.h", "lz4hc.c", "lz4hc.h")},
    ),
}


def update(tree: Path, source: Source) -> None:
    pin = read_pin(source.pin_file, source.variable, source.contents)

    def compose() -> dict[str, bytes]:
        archive = find_sdist(pin)
        found = read_archive(archive, pin, source.files.__contains__)
        missing = source.files.keys() - found.keys()
        if missing:
            raise SourceError(f"{archive} holds no {sorted(missing)[0]}: the archive's layout changed")
        return {source.files[path]: text for path, text in found.items()}

    bring_up_to_date(tree, f"{pin.line}\n", compose)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("dir", type=Path)
    directory = parser.parse_args().dir
    try:
        for name, source in SOURCES.items():
            update(directory / name, source)
    except SourceError as error:
        print(f"sources of codecs: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
