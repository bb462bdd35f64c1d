"""The C API of libpyorch, as the headers that lie beside the library declare it.

`lib` and `ffi` are cffi's (ABI mode). Functions that return a status go through check(). Structs begin with their
size: those that are filled in come from new(), those that are given from default().
"""

from __future__ import annotations

import os
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any, NamedTuple

from pyorch import _libs
from pyorch.errors import BudgetError, FormatError, OutOfMemoryError, PyorchError

ABI = 2  # PYORCH_ABI of the headers that this package is written for


def declared(library: str) -> Any:
    """What the headers of a library declare, `ffi` and `numbers`: the build wrote that down
    (native/cmake/declarations.py), for parsing them takes a tenth of a second."""
    path = _libs.lib_dir() / f"{library}_declarations.py"
    if not path.is_file():
        raise ImportError(f"{path} is missing: {_TOGETHER}")
    spec = spec_from_file_location(path.stem, path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_abi(path: str | os.PathLike[str]) -> None:
    """ImportError for a library whose calls and structs are not those of this package."""
    library = ffi.dlopen(os.fspath(path))
    try:
        abi, version = library.pyorch_abi(), string(library.pyorch_version())
    except ffi.error:
        abi, version = 0, "unknown"
    if abi != ABI:
        raise ImportError(f"{path} has ABI {abi} (version {version}), and this pyorch needs ABI {ABI}: {_TOGETHER}")


def string(pointer) -> str:
    """A C string, "" for NULL."""
    return ffi.string(pointer).decode("utf-8", "replace") if pointer else ""


_TOGETHER = "install package and library together, by `pip install .` or `make setup`"
_path = _libs.lib_dir() / f"libpyorch{_libs.SUFFIX}"
_declared = declared("pyorch")
ffi = _declared.ffi
check_abi(_path)
lib = ffi.dlopen(str(_path))

_ERRORS: dict[int, type[PyorchError]] = {
    lib.PYORCH_FORMAT: FormatError,
    lib.PYORCH_IO: FormatError,
    lib.PYORCH_BUDGET: BudgetError,
    lib.PYORCH_MEMORY: OutOfMemoryError,
}


def check(status: int) -> None:
    """Raises the PyorchError that a pyorch_status stands for; nothing for PYORCH_OK."""
    if status != lib.PYORCH_OK:
        raise _ERRORS.get(status, PyorchError)(string(lib.pyorch_last_error()))


class Number(NamedTuple):
    """A field of a struct of counters. part: the line above its part of the struct. text: its comment."""

    name: str
    part: str
    text: str


def numbers(struct: str) -> list[Number]:
    """What a struct of counters has, such as "pyorch_stats", but for its size, in the order of the header."""
    return [Number(*field) for field in _declared.numbers[struct] if field[0] != "struct_size"]


def new(struct: str):
    """A pointer to a struct for the library to fill in, such as "pyorch_stats"."""
    return ffi.new(f"{struct} *", {"struct_size": ffi.sizeof(struct)})


def default(struct: str, **fields):
    """A pointer to a struct for the library to read: its defaults, but for these fields."""
    value = ffi.new(f"{struct} *")
    check(getattr(lib, f"{struct}_default")(value, ffi.sizeof(struct)))
    for name, field in fields.items():
        setattr(value, name, field)
    return value


def array(kind: str, values):
    """A pointer into a contiguous array, such as one of numpy, which must outlive it; NULL for None."""
    return ffi.NULL if values is None else ffi.from_buffer(kind, values)


def decode_error() -> str:
    """Why an engine failed the llama_decode that this thread made since it last called this, "" if none did.

    Called before a decode and after it: what the second call returns is about that decode.
    """
    buffer = ffi.new("char[]", 1024)
    check(lib.pyorch_decode_error(buffer, len(buffer)))
    return string(buffer)
