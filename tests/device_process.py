"""A device that is the processor of this process: ggml's RPC, on a port of this machine.

    device_process.py PORT [MEMORY]

MEMORY: bytes that may be allocated; more is refused.
"""

from __future__ import annotations

import ctypes
import resource
import sys
from pathlib import Path

from pyorch import _libs

CPU = 0  # GGML_BACKEND_DEVICE_TYPE_CPU


def main() -> None:
    base = ctypes.CDLL(str(_libs.lib_dir() / f"libggml-base{_libs.SUFFIX}"), ctypes.RTLD_GLOBAL)
    registry = ctypes.CDLL(str(_libs.lib_dir() / f"libggml{_libs.SUFFIX}"), ctypes.RTLD_GLOBAL)

    def function(library: ctypes.CDLL, name: str, result: object, *arguments: object) -> object:
        return ctypes.CFUNCTYPE(result, *arguments)((name, library))

    pointer = ctypes.c_void_p
    function(registry, "ggml_backend_load_all", None)()  # nothing, where the backends are linked
    processor = function(registry, "ggml_backend_dev_by_type", pointer, ctypes.c_int)(CPU)
    rpc = function(registry, "ggml_backend_reg_by_name", pointer, ctypes.c_char_p)(b"RPC")
    find = function(base, "ggml_backend_reg_get_proc_address", pointer, pointer, ctypes.c_char_p)
    text, number = ctypes.c_char_p, ctypes.c_size_t
    serve = ctypes.CFUNCTYPE(None, text, text, number, number, ctypes.POINTER(pointer))(
        find(rpc, b"ggml_backend_rpc_start_server"))
    if len(sys.argv) > 2:
        used = int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0]) * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (used + int(sys.argv[2]),) * 2)
    serve(f"127.0.0.1:{int(sys.argv[1])}".encode(), None, 1, 1, (pointer * 1)(processor))


if __name__ == "__main__":
    main()
