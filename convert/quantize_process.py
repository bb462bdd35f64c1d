"""Runs llama.cpp's quantizer: in this process by quantize(), or as a program that children.py starts.

A program can be ended at any time; a call into libllama cannot.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path

import gguf
import llama_cpp.llama_cpp as llama
import numpy as np

from pyorch import __version__
from pyorch.convert.children import MARK
from pyorch.convert.imatrix import read_imatrix
from pyorch.errors import FormatError
from pyorch.llama import logs
from pyorch.processes import end_with
from pyorch.runtime import fatal

# The rows of one tensor that the quantizer holds at once. llama.cpp's default of 8 GiB is more than the memory of many
# machines.
_BUFFER_BYTES = 512 << 20

_PROGRESS = re.compile(r"^\[ *(\d+)/ *(\d+)\]")


class QuantizeError(Exception):
    """The quantizer failed. The message is llama.cpp's."""


def quantize(source: Path, target: Path, file_type: int, *, pure: bool = False, keep_split: bool = False,
             imatrix: Mapping[str, np.ndarray] | None = None,
             on_progress: Callable[[int, int], None] = lambda done, total: None,
             on_log: Callable[[str], None] = lambda text: None) -> None:
    """Writes the GGUF `source` to `target` in another type (a llama_ftype).

    Args:
        source: The model.
        target: The file, or with keep_split the prefix of the shards.
        file_type: The type.
        pure: Every matrix gets that type, although llama.cpp would give some a better one.
        keep_split: Write as many shards as `source` has.
        imatrix: By tensor, from read_imatrix().
        on_progress: Called with the tensors done.
        on_log: Gets llama.cpp's log.

    Raises:
        QuantizeError: llama.cpp failed. `target` is then unusable.
    """
    why = []

    @llama.llama_log_callback
    def log(_level, text, _user):
        line = text.decode("utf-8", "replace")
        on_log(line)
        if match := _PROGRESS.match(line):
            on_progress(int(match[1]), int(match[2]))
        if "failed to quantize: " in line:
            why.append(line.split("failed to quantize: ", 1)[1].strip())

    params = llama.llama_model_quantize_default_params()
    params.nthread = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    params.ftype = file_type
    params.allow_requantize = True
    params.pure = pure
    params.keep_split = keep_split
    params.max_buf_size = _BUFFER_BYTES
    marks = _marks()  # referenced until the call returns, as importances
    params.kv_overrides = marks
    importances = _importances(imatrix or {})
    if imatrix:
        params.imatrix = importances
    llama.llama_log_set(log, ctypes.c_void_p(0))
    try:
        with fatal.refused():
            status = llama.llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(params))
    finally:
        logs.install()  # the process has one log, and this function's callback ends here
    if status != 0:
        raise QuantizeError(why[0] if why else f"llama.cpp returned {status} without a reason")


def _marks() -> ctypes.Array:
    """Returns llama_model_kv_override[2] with keys to add to the metadata; the last one has no key."""
    entries = (llama.llama_model_kv_override * 2)()
    entries[0].tag, entries[0].key = llama.LLAMA_KV_OVERRIDE_TYPE_STR, MARK.encode()
    entries[0].value.val_str = __version__.encode()
    return entries


def _importances(imatrix: Mapping[str, np.ndarray]) -> ctypes.Array:
    """Returns llama_model_imatrix_data[n + 1], which point into the arrays; the last one has no name."""
    entries = (llama.llama_model_imatrix_data * (len(imatrix) + 1))()
    for entry, (name, values) in zip(entries, imatrix.items()):
        entry.name = name.encode()
        entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        entry.size = values.size
    return entries


def check_written(path: Path) -> None:
    """Raises QuantizeError if a tensor ends beyond the file's end: the quantizer ignores some failed writes."""
    try:
        tensors = gguf.GGUFReader(path).tensors
    except (ValueError, IndexError, KeyError, OSError):
        raise QuantizeError("iostream error") from None
    end = max(tensor.data_offset + tensor.n_bytes for tensor in tensors)
    if end > path.stat().st_size:
        raise QuantizeError("iostream error")


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process
    connection = Connection(int(sys.argv[1]))
    end_with(connection.fileno())
    job = connection.recv()
    target = Path(job["output"])
    try:
        quantize(
            Path(job["source"]), target, job["file_type"], pure=job["pure"], keep_split=job["keep_split"],
            imatrix=read_imatrix(job["imatrix"]) if job["imatrix"] else None,
            on_progress=lambda done, total: connection.send({"done": done, "total": total}),
            on_log=lambda text: print(text, end="", file=sys.stderr, flush=True),
        )
        for file in sorted(target.parent.glob(f"{target.name}*")):
            check_written(file)
    except (QuantizeError, FormatError) as error:
        message = str(error)
        kind = "write" if "iostream" in message or "No space" in message else "failed"
        connection.send({"error": kind, "message": message})
        sys.exit(1)


if __name__ == "__main__":
    main()
