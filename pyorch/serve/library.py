"""libpyorch-server: llama-server with routes of ours, as the header that lies beside it declares it."""

from __future__ import annotations

from pyorch import _libs
from pyorch.library.bindings import declared

ffi = declared("pyorch_server").ffi
lib = ffi.dlopen(str(_libs.lib_dir() / f"libpyorch-server{_libs.SUFFIX}"))


def chat_page() -> list[str]:
    """The files of llama-server's chat page, [] where it was not built."""
    names = []
    while name := lib.pyorch_server_get_page(len(names)):
        names.append(ffi.string(name).decode())
    return names


def served_context() -> int:
    """The llama_context * of the server, 0 while its model is not loaded."""
    return int(ffi.cast("uintptr_t", lib.pyorch_server_get_context()))
