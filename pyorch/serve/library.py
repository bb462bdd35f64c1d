"""libpyorch-server: llama-server with added routes, declared by pyorch-server.h."""

from __future__ import annotations

from dataclasses import dataclass

from pyorch import _libs
from pyorch.errors import PyorchError
from pyorch.library.bindings import declared

_path = _libs.lib_dir() / f"libpyorch-server{_libs.SUFFIX}"
if not _path.exists():
    raise PyorchError("llama-server is not built yet, which running a model does not need: make setup builds it")
ffi = declared("pyorch_server").ffi
lib = ffi.dlopen(str(_path))


@dataclass(frozen=True)
class PageFile:
    """A file of llama-server's chat page.

    Attributes:
        path: The path relative to "/", where index.html is, too.
        type: The content type.
        etag: The entity tag, in quotes.
        data: The bytes.
        gzip: Whether they are compressed.
    """

    path: str
    type: str
    etag: str
    data: memoryview
    gzip: bool


def chat_page() -> list[PageFile]:
    """Returns the files of llama-server's chat page, [] if this build has none."""
    files = []
    file = ffi.new("pyorch_page_file *")
    while lib.pyorch_server_get_page(len(files), file):
        path, kind, etag = (ffi.string(text).decode() for text in (file.path, file.type, file.etag))
        files.append(PageFile(path, kind, etag, memoryview(ffi.buffer(file.data, file.size)), bool(file.gzip)))
    return files


def served_context() -> int:
    """Returns the llama_context * of the server, 0 while its model is not loaded."""
    return int(ffi.cast("uintptr_t", lib.pyorch_server_get_context()))
