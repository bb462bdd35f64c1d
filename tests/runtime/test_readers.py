"""Who reads: io_uring where the system allows it, threads elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from ggufs import write_moe_model

from pyorch.runtime.engine import Engine
from pyorch.runtime.model_map import ModelMap

# A sandbox as containers have it: seccomp answers a system call with EPERM.
SANDBOX = """
import ctypes, os, struct, sys

class Program(ctypes.Structure):
    _fields_ = [("n", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

EPERM, ALLOW, ERRNO = 1, 0x7fff0000, 0x00050000
rules = [(0x20, 0, 0, 0), (0x15, 0, 1, int(sys.argv[2])), (0x06, 0, 0, ERRNO | EPERM), (0x06, 0, 0, ALLOW)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
libc = ctypes.CDLL(None, use_errno=True)
program = Program(len(rules), ctypes.addressof(code))
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0

from pyorch.errors import PyorchError
from pyorch.runtime import disk
from pyorch.runtime.engine import Engine
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.reads import Reads

"""

SETUP, ENTER = 425, 426  # system calls, of every processor

FORBIDDEN = f"""{SANDBOX}
with ModelMap(sys.argv[1]) as model_map:
    print(disk.measure(model_map, Reads("auto"), 0.01).reader)
    try:
        disk.measure(model_map, Reads("io_uring"), 0.01)
    except PyorchError as error:
        print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="seccomp is of Linux")
def test_where_io_uring_is_forbidden_threads_read(small_moe: Path) -> None:
    result = subprocess.run([sys.executable, "-c", FORBIDDEN, str(small_moe), str(SETUP)], capture_output=True,
                            text=True)
    assert result.returncode == 0, result.stderr
    reader, refusal = result.stdout.splitlines()
    assert reader == "threads"
    assert refusal == "io_uring cannot be used here (Operation not permitted): let threads read"


FORBIDDEN_LATER = f"""{SANDBOX}
with ModelMap(sys.argv[1]) as model_map:
    before = len(os.listdir("/proc/self/task"))
    with Engine(model_map, "50%", reads=Reads("auto", 64, 1 << 16)) as engine:
        print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="seccomp is of Linux")
def test_a_depth_for_io_uring_is_no_number_of_threads(small_moe: Path) -> None:
    """Where it turns out only when the reader is made that there will be none."""
    result = subprocess.run([sys.executable, "-c", FORBIDDEN_LATER, str(small_moe), str(ENTER)], capture_output=True,
                            text=True)
    assert result.returncode == 0, result.stderr
    assert 1 <= int(result.stdout) <= 4


def pinned_kib() -> int:
    """Of this process, what the kernel has hold of."""
    return int(re.search(r"^VmPin:\s+(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)[1])


@pytest.mark.skipif(sys.platform != "linux", reason="io_uring is of Linux")
def test_an_engine_that_is_closed_lets_go_of_its_memory_at_once(tmp_path: Path) -> None:
    """The next one may need it."""
    write_moe_model(tmp_path / "model.gguf", n_layer=2, n_embd=512)
    before = pinned_kib()
    with ModelMap(tmp_path / "model.gguf") as model_map, Engine(model_map, "100%") as engine:
        (layer,) = model_map.layers
        for _ in range(2):  # memory is registered when it is read into again
            engine.prefetch(layer.il, range(layer.n_expert))
            engine.wait_idle()
            engine.evict(layer.il, range(layer.n_expert))
        if pinned_kib() == before:
            pytest.skip("this system registers no memory")
    assert pinned_kib() == before
