"""Writes what cffi needs to know of C headers as a module of Python: who imports that need not parse them.

    python declarations.py OUT.py HEADER...

The module has `ffi`, whose dlopen() opens the library (cffi's ABI mode, out of line). Headers have declarations only
below their guard. Needs cffi, which pip installs for the build.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path


def declarations(header: str) -> str:
    """The declarations of a C header without its preprocessor lines and its C++ brackets."""
    without_cpp = re.sub(r"#ifdef __cplusplus\b.*?#endif[^\n]*", "", header, flags=re.DOTALL)
    return re.sub(r"^\s*#.*$", "", without_cpp, flags=re.MULTILINE)


def write(output: Path, headers: list[Path]) -> None:
    import cffi

    ffi = cffi.FFI()
    for header in headers:
        ffi.cdef(declarations(header.read_text(encoding="utf-8")))
    ffi.set_source(output.stem, None)
    part = output.with_suffix(".part")
    ffi.emit_python_code(str(part))
    os.replace(part, output)


def main() -> int:
    if len(sys.argv) < 3:
        print(__doc__, file=sys.stderr)
        return 2
    output, *headers = map(Path, sys.argv[1:])
    try:
        write(output, headers)
    except ImportError:
        print(f"{sys.executable} has no cffi, which the build needs: install it with pip", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
