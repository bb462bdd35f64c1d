"""Sources: what an engine reads experts from in place of the map's files."""

from __future__ import annotations

import errno
import traceback
from typing import Protocol

from pyorch.library.bindings import ffi


class Source(Protocol):
    """Stands in for the files of a map."""

    def read(self, file: int, offset: int, size: int) -> bytes:
        """Bytes of shard `file` from offset, fewer than size only at its end. An OSError fails the decode.

        Called by several threads at once. It may ask the engine, but not wait for it (see pyorch.h).
        """


def read_callback(source: Source):
    """A pyorch_read_fn."""
    printed = False  # a bug in a source fails hundreds of reads alike

    @ffi.callback("pyorch_read_fn")
    def read(_user, file, offset, buffer, size):
        nonlocal printed
        try:
            data = source.read(file, offset, size)
            if len(data) > size:
                raise ValueError(f"the source returned {len(data)} bytes where {size} were asked for")
            ffi.memmove(buffer, data, len(data))
            return len(data)
        except OSError as error:
            return -(error.errno if error.errno in errno.errorcode else errno.EIO)
        except Exception:
            if not printed:
                traceback.print_exc()
            printed = True
            return -errno.EIO

    return read
