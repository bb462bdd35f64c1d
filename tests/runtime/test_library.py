"""The library and the package fit each other, and what the library refuses has an exception of its own."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest
from processes import python

from pyorch.library.bindings import ABI, check_abi, ffi, lib, numbers, string
from pyorch.runtime.statistics import RemoteStats, SpeculationStats, Stats, SubstitutionStats, read

_SHORT_OF_MEMORY = """
import resource
from pyorch.errors import OutOfMemoryError, PyorchError
from pyorch.sidecars.history import ExpertMaps

def address_space():
    pages = int(open("/proc/self/statm").read().split()[0])
    return pages * resource.getpagesize()

limit = address_space() + (64 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    ExpertMaps(n_layers=1 << 23, n_expert=64, n_embd=0)
except OutOfMemoryError as error:
    assert isinstance(error, PyorchError) and isinstance(error, MemoryError)
    print(error)
"""


def test_the_package_is_written_for_the_headers_beside_the_library() -> None:
    assert lib.PYORCH_ABI == lib.pyorch_abi() == ABI
    assert string(lib.pyorch_version()) == version("pyorch")


@pytest.mark.parametrize(("struct", "counts"), [
    ("pyorch_stats", Stats), ("pyorch_substitution_counts", SubstitutionStats),
    ("pyorch_speculation_counts", SpeculationStats), ("pyorch_remote_counts", RemoteStats),
])
def test_python_has_the_counters_of_the_header_as_the_compiler_lays_them_out(struct: str, counts: type) -> None:
    names = [name for name, _ in ffi.typeof(struct).fields]
    assert names == [number.name for number in numbers(struct)]
    assert [field.name for field in dataclasses.fields(counts)] == names
    raw = ffi.new(f"{struct} *", {name: value for value, name in enumerate(names)})
    assert dataclasses.astuple(read(counts, raw)) == tuple(range(len(names)))


def test_each_number_of_the_engine_stands_in_a_part_and_has_a_sentence() -> None:
    parts = {number.part for number in numbers("pyorch_stats")}
    assert parts == {f"{kind}{of}" for kind in ("counters", "gauges")
                     for of in (" of the engine", ", of each layer too")}
    assert all(number.text for number in numbers("pyorch_stats"))


def test_a_library_of_another_abi_is_refused_in_a_sentence(tmp_path: Path) -> None:
    source, other = tmp_path / "other.c", tmp_path / "libother.so"
    source.write_text('int pyorch_abi(void) { return 999; } const char * pyorch_version(void) { return "9.9.9"; }')
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", other, source], check=True)
    with pytest.raises(
        ImportError, match=rf"libother.so has ABI 999 \(version 9.9.9\), and this pyorch needs ABI {ABI}"
    ):
        check_abi(other)
    without = Path(os.environ["LLAMA_CPP_LIB_PATH"]) / "libggml-base.so"
    with pytest.raises(ImportError, match=rf"libggml-base.so has ABI 0 .* needs ABI {ABI}"):
        check_abi(without)


def test_lack_of_memory_is_no_format_error() -> None:
    done = python("-c", _SHORT_OF_MEMORY)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the system has no memory left for this\n"
