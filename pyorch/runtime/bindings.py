"""The C API of libpyorch, declared by the header that lies beside the library.

`lib` and `ffi` are cffi's (ABI mode). Functions that return a status go through check().
"""

from __future__ import annotations

import re

import cffi

from pyorch import _libs
from pyorch.errors import BudgetError, FormatError, PyorchError

_ERRORS: dict[int, type[PyorchError]] = {2: FormatError, 3: FormatError, 4: BudgetError}


def declarations(header: str) -> str:
    """The declarations of a C header without its preprocessor lines and its C++ brackets."""
    without_cpp = re.sub(r"#ifdef __cplusplus\b.*?#endif[^\n]*", "", header, flags=re.DOTALL)
    return re.sub(r"^\s*#.*$", "", without_cpp, flags=re.MULTILINE)


_directory = _libs.lib_dir()
ffi = cffi.FFI()
ffi.cdef(declarations((_directory / "pyorch.h").read_text(encoding="utf-8")))
lib = ffi.dlopen(str(_directory / f"libpyorch{_libs._SUFFIX}"))


def string(pointer) -> str:
    """A C string, "" for NULL."""
    return ffi.string(pointer).decode("utf-8", "replace") if pointer else ""


def check(status: int) -> None:
    """Raises the PyorchError that a pyorch_status stands for; nothing for PYORCH_OK."""
    if status != lib.PYORCH_OK:
        raise _ERRORS.get(status, PyorchError)(string(lib.pyorch_last_error()))
