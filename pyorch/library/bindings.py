"""The C API of libpyorch, as the headers next to the library declare it.

`lib` and `ffi` are cffi's (ABI mode). Call functions that return a status through check(), or through call(), which
allocates their last argument.
"""

from __future__ import annotations

import os
import weakref
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any, NamedTuple

from pyorch import _libs
from pyorch.errors import BudgetError, FormatError, OutOfMemoryError, PyorchError
from pyorch.library.numerics import np

ABI = 8  # PYORCH_ABI of the headers that this package is written for


def declared(library: str) -> Any:
    """Returns the declarations of a library's headers: `ffi` and `numbers`.

    The build stored them (native/cmake/declarations.py), because parsing takes a tenth of a second.
    """
    path = _libs.lib_dir() / f"{library}_declarations.py"
    if not path.is_file():
        raise ImportError(f"{path} is missing: {_TOGETHER}")
    spec = spec_from_file_location(path.stem, path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_abi(path: str | os.PathLike[str]) -> None:
    """Checks that the calls and structs of a library are the ones of this package.

    Raises:
        ImportError: They are not.
    """
    library = ffi.dlopen(os.fspath(path))
    try:
        abi, version = library.pyorch_abi(), string(library.pyorch_version())
    except ffi.error:
        abi, version = 0, "unknown"
    if abi != ABI:
        raise ImportError(f"{path} has ABI {abi} (version {version}), and this pyorch needs ABI {ABI}: {_TOGETHER}")


def string(pointer) -> str:
    """Returns a C string; "" for NULL."""
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
    """Raises the PyorchError of a pyorch_status, unless it is PYORCH_OK."""
    if status != lib.PYORCH_OK:
        raise _ERRORS.get(status, PyorchError)(string(lib.pyorch_last_error()))


def call(function, *arguments, out: str):
    """Calls a function that returns a status, and returns its last argument.

    Args:
        function: The function of the library.
        arguments: Its arguments except the last.
        out: The type of the last argument, such as "pyorch_stats".
    """
    value = ffi.new(f"{out} *")
    check(function(*arguments, value))
    return value


class Number(NamedTuple):
    """A field of a struct of counters. part: the comment line above its part of the struct. text: its comment."""

    name: str
    part: str
    text: str


def numbers(struct: str) -> list[Number]:
    """Returns the fields of a struct of counters, such as "pyorch_stats", in the order of the header."""
    return [Number(*field) for field in _declared.numbers[struct]]


_pointed_to: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # keeps the targets of a struct's pointers alive


def given(struct: str, **fields):
    """Returns a pointer to a struct with the header's defaults, changed by `fields`."""
    defaults = getattr(lib, struct.replace("pyorch_", "pyorch_default_", 1), None)
    value = ffi.new(f"{struct} *") if defaults is None else ffi.new(f"{struct} *", defaults)
    for name, field in fields.items():
        setattr(value, name, field)
    _pointed_to[value] = fields
    return value


def array(kind: str, values):
    """Returns a pointer to a contiguous array with numbers of a C type such as "float"; NULL for None.

    An array of that type is not copied: the library may write into it.
    """
    if values is None:
        return ffi.NULL
    dtype = {"float": np.float32, "double": np.float64}.get(kind) or kind.removesuffix("_t")
    return ffi.from_buffer(f"{kind}[]", np.ascontiguousarray(values, dtype))


def decode_error() -> str:
    """Returns why an engine failed this thread's llama_decode since the last call of this function; "" if none did.

    Call it before and after a decode: the second result is about that decode.
    """
    return string(lib.pyorch_decode_error())
