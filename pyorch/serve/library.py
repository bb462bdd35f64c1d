"""libpyorch-server, declared by the header that lies beside it: llama-server with routes of ours."""

from __future__ import annotations

import cffi

from pyorch import _libs
from pyorch.library.bindings import declarations

_directory = _libs.lib_dir()
ffi = cffi.FFI()
ffi.cdef(declarations((_directory / "pyorch-server.h").read_text(encoding="utf-8")))
lib = ffi.dlopen(str(_directory / f"libpyorch-server{_libs._SUFFIX}"))


def served_context() -> int:
    """The llama_context * of the server, 0 while its model is not loaded."""
    return int(ffi.cast("uintptr_t", lib.pyorch_server_get_context()))
