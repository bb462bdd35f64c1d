"""libpyorch-server: llama-server with added routes, declared by pyorch-server.h."""

from __future__ import annotations

from pyorch import _libs
from pyorch.errors import PyorchError
from pyorch.library.bindings import declared

_path = _libs.lib_dir() / f"libpyorch-server{_libs.SUFFIX}"
if not _path.exists():
    raise PyorchError("llama-server is not built yet, which running a model does not need: make setup builds it")
ffi = declared("pyorch_server").ffi
lib = ffi.dlopen(str(_path))


def chat_page() -> list[str]:
    """Returns the files of llama-server's chat page, [] if this build has none."""
    names = []
    while name := lib.pyorch_server_get_page(len(names)):
        names.append(ffi.string(name).decode())
    return names


def served_context() -> int:
    """Returns the llama_context * of the server, 0 while its model is not loaded."""
    return int(ffi.cast("uintptr_t", lib.pyorch_server_get_context()))
