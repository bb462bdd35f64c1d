"""Writes what cffi needs to know of C headers as a module of Python: who imports that need not parse them.

    python declarations.py OUT.py HEADER...

The module has `ffi`, whose dlopen() opens the library (cffi's ABI mode, out of line), and `numbers`: of each struct of
counters, which has fields of the type uint64_t only, what the header says of them. Headers have declarations only
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


def numbers(header: str) -> dict[str, tuple[tuple[str, str, str], ...]]:
    """Of each struct of uint64_t its fields: name, the line that stands above their part, and the comment."""
    found = {}
    for name, body in re.findall(r"^typedef struct (\w+) \{\n(.*?)^\} \1;", header, flags=re.DOTALL | re.MULTILINE):
        part, fields = "", []
        for line in body.splitlines():
            if field := re.fullmatch(r" {4}uint64_t +(\w+); *(?:// )?(.*)", line):
                fields.append([field[1], part, field[2]])
            elif part_line := re.fullmatch(r" {4}// (.*)", line):
                part = part_line[1]
            elif fields and (more := re.fullmatch(r" {5,}// (.*)", line)):
                fields[-1][2] += f" {more[1]}"
        if len(fields) == len(re.findall(r"^ {4}\w[^/\n]*;", body, flags=re.MULTILINE)):
            found[name] = tuple(map(tuple, fields))
    return found


def write(output: Path, headers: list[Path]) -> None:
    import cffi

    ffi = cffi.FFI()
    texts = [header.read_text(encoding="utf-8") for header in headers]
    for text in texts:
        ffi.cdef(declarations(text))
    ffi.set_source(output.stem, None)
    part = output.with_suffix(".part")
    ffi.emit_python_code(str(part))
    with part.open("a", encoding="utf-8") as module:
        module.write(f"\nnumbers = {numbers(''.join(texts))!r}\n")
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
