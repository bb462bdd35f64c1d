"""The C API of libpyorch, declared by the headers that lie beside the library.

`lib` and `ffi` are cffi's (ABI mode). Functions that return a status go through check(). Structs begin with their
size: those that are filled in come from new(), those that are given from default().
"""

from __future__ import annotations

import os
import re

import cffi

from pyorch import _libs
from pyorch.errors import BudgetError, FormatError, OutOfMemoryError, PyorchError

ABI = 1  # PYORCH_ABI of the headers that this package is written for

_HEADERS = ("pyorch.h", "pyorch-replay.h")


def declarations(header: str) -> str:
    """The declarations of a C header without its preprocessor lines and its C++ brackets."""
    without_cpp = re.sub(r"#ifdef __cplusplus\b.*?#endif[^\n]*", "", header, flags=re.DOTALL)
    return re.sub(r"^\s*#.*$", "", without_cpp, flags=re.MULTILINE)


def check_abi(path: str | os.PathLike[str]) -> None:
    """ImportError for a library whose calls and structs are not those of this package."""
    probe = cffi.FFI()
    probe.cdef("int32_t pyorch_abi(void); const char * pyorch_version(void);")
    library = probe.dlopen(os.fspath(path))
    try:
        abi, version = library.pyorch_abi(), probe.string(library.pyorch_version()).decode()
    except AttributeError:
        abi, version = 0, "unknown"
    if abi != ABI:
        raise ImportError(f"{path} has ABI {abi} (version {version}), and this pyorch needs ABI {ABI}: "
                          "install package and library together, by `pip install .` or `make setup`")


_directory = _libs.lib_dir()
_path = _directory / f"libpyorch{_libs._SUFFIX}"
check_abi(_path)
ffi = cffi.FFI()
for _header in _HEADERS:
    ffi.cdef(declarations((_directory / _header).read_text(encoding="utf-8")))
lib = ffi.dlopen(str(_path))

_ERRORS: dict[int, type[PyorchError]] = {
    lib.PYORCH_FORMAT: FormatError,
    lib.PYORCH_IO: FormatError,
    lib.PYORCH_BUDGET: BudgetError,
    lib.PYORCH_MEMORY: OutOfMemoryError,
}


def string(pointer) -> str:
    """A C string, "" for NULL."""
    return ffi.string(pointer).decode("utf-8", "replace") if pointer else ""


def check(status: int) -> None:
    """Raises the PyorchError that a pyorch_status stands for; nothing for PYORCH_OK."""
    if status != lib.PYORCH_OK:
        raise _ERRORS.get(status, PyorchError)(string(lib.pyorch_last_error()))


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
