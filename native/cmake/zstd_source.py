"""Puts the C source of zstd in place, as llama_source.py does that of llama.cpp.

    python zstd_source.py DIR     DIR brought up to date

The source is what the `zstandard` distribution pinned in zstandard.txt carries. It is downloaded once with pip into the
user's cache; PYORCH_ZSTD_SDIST names a copy instead, for machines that reach no package index.

Standard library only.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from llama_source import SourceError, bring_up_to_date, find_sdist, read_archive, read_pin

PIN_FILE, VARIABLE = Path(__file__).with_name("zstandard.txt"), "PYORCH_ZSTD_SDIST"
FILES = {f"zstd/{name}": name for name in ("LICENSE", "zstd.c", "zstd.h", "zstd_errors.h")}  # and their names in DIR


def update(directory: Path, pin_file: Path = PIN_FILE) -> None:
    pin = read_pin(pin_file, VARIABLE, "source of zstd, 0.7 MB")

    def compose() -> dict[str, bytes]:
        archive = find_sdist(pin)
        found = read_archive(archive, pin, FILES.__contains__)
        missing = FILES.keys() - found.keys()
        if missing:
            raise SourceError(f"{archive} holds no {sorted(missing)[0]}: the archive's layout changed")
        return {FILES[path]: text for path, text in found.items()}

    bring_up_to_date(directory, f"{pin.line}\n", compose)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("dir", type=Path)
    try:
        update(parser.parse_args().dir)
    except SourceError as error:
        print(f"source of zstd: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
