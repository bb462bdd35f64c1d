"""Finds the shared libraries of this package, makes `llama_cpp` load the same ones, and sets how their threads wait.

A process must have one ggml, because libllama calls the hooks that libpyorch registers. The package `llama_cpp` that
pyorch imports is the one shipped with the libraries: bindings of another release would call them wrongly. This module
imports little, because it runs first, while Ctrl-C still prints a traceback (pyorch/starting.py).
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from pathlib import Path

SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"


def lib_dir() -> Path:
    """Returns the directory of libllama, libpyorch, the packaged converter and the licences.

    PYORCH_LIB_DIR names another one, such as the `bin` of a build with a sanitizer.
    """
    from pathlib import Path

    return Path(_lib_dir())


def _lib_dir() -> str:
    named = os.environ.get("PYORCH_LIB_DIR")
    # An editable install has two folders: the checkout, and site-packages for built files.
    homes = [named] if named else [os.path.join(home, "lib") for home in sys.modules["pyorch"].__path__]
    for home in homes:
        if os.path.isfile(os.path.join(home, f"libllama{SUFFIX}")):
            return os.path.realpath(home)
    if named:
        raise ImportError(f"PYORCH_LIB_DIR names {named}, which holds no libllama{SUFFIX}")
    raise ImportError(
        f"libllama{SUFFIX} is in none of {', '.join(homes)}: "
        "pyorch was not built; run `pip install .` or `make setup` in its source directory"
    )


def claim_llama_cpp() -> None:
    """Makes `import llama_cpp` load the bindings next to the libraries of lib_dir(), and these libraries.

    Raises:
        ImportError: `llama_cpp` was already imported and loaded other libraries.
    """
    ours = _lib_dir()
    loaded = sys.modules.get("llama_cpp.llama_cpp")
    if loaded is None:
        os.environ["LLAMA_CPP_LIB_PATH"] = os.environ["MTMD_CPP_LIB"] = ours
        if "llama_cpp" not in sys.modules:
            sys.meta_path.insert(0, _Package("llama_cpp", [os.path.join(ours, "bindings")]))
        return
    theirs = os.path.realpath(loaded._base_path)
    if theirs != ours:
        raise ImportError(
            f"llama_cpp was imported before pyorch and loaded the libraries in {theirs}, which lack "
            f"pyorch's hooks: import pyorch first, or set LLAMA_CPP_LIB_PATH={ours}"
        )


def claim_gguf() -> None:
    """Makes `import gguf` load llama.cpp's package of the same release as the libraries.

    An installed package of another release may lack types of tensors that the libraries write. If the program has
    already imported it, it stays.
    """
    homes = [_lib_dir(), *(os.path.join(home, "lib") for home in sys.modules["pyorch"].__path__)]
    sys.meta_path.insert(0, _Package("gguf", [os.path.join(home, "llama.cpp-converter/gguf-py") for home in homes]))


class _Package:
    """Finds a package in one of some directories before any installed one (an importlib.abc.MetaPathFinder)."""

    def __init__(self, name: str, directories: list[str]) -> None:
        self._name, self._directories = name, directories

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        from importlib.machinery import PathFinder

        return PathFinder.find_spec(name, self._directories)


# Rounds that a compute thread without work spins before it sleeps, between two graphs. Inside a graph, threads meet at
# pyorch's own barrier (native/src/base/barrier.h). libgomp's default of 300,000 rounds takes milliseconds, and with
# another busy process costs a fifth of the speed.
SPIN_COUNT = "1000"
LIBGOMP_SPIN_COUNT = "300000"

# With experts on a device each layer is several graphs. The processor's graphs start some tenths of a millisecond
# apart, and one thread computes many of them. Waking the other threads each time took up to a third of a token's time;
# 10,000 rounds of 20 to 50 ns were too few (docs/measurements/devices.md).
DEVICE_SPIN_COUNT = "100000"
_DEVICE_BACKENDS = ("cuda", "hip", "musa", "sycl", "vulkan")  # wheels contain vulkan on every machine

chose_spin_count = False  # whether this module set the value in the environment


def spin_count() -> str:
    """Returns the spin count for this build and machine, which show whether a device could be used."""
    ours = _lib_dir()
    *built, vulkan = (os.path.exists(os.path.join(ours, f"libggml-{name}{SUFFIX}")) for name in _DEVICE_BACKENDS)
    return DEVICE_SPIN_COUNT if any(built) or (vulkan and has_gpu_driver()) else SPIN_COUNT


def has_gpu_driver(root: str = "/") -> bool:
    """Whether Linux has the driver of a GPU that may have its own memory.

    Detects NVIDIA, also in WSL, and AMD with more memory than integrated graphics reserve. Intel's driver does not say.
    """
    if any(os.path.exists(os.path.join(root, node)) for node in ("dev/nvidia0", "dev/dxg")):
        return True
    from glob import glob

    for path in glob(os.path.join(root, "sys/class/drm/card*/device/mem_info_vram_total")):
        try:
            with open(path, encoding="ascii") as file:
                if int(file.read()) >= 3 << 30:
                    return True
        except (OSError, ValueError):
            continue
    return False


def choose_spin_count() -> None:
    """Sets GOMP_SPINCOUNT for this process and its children, unless the user chose how threads wait.

    If the user did, libgomp's barrier stays in use too (PYORCH_BARRIER). libgomp reads the variable once, when it
    loads; a RuntimeWarning says if that has already happened. Other OpenMP runtimes ignore it.
    """
    count = spin_count()
    if "OMP_WAIT_POLICY" in os.environ or os.environ.get("GOMP_SPINCOUNT", count) != count:
        os.environ["PYORCH_BARRIER"] = "openmp"
        return
    if "GOMP_SPINCOUNT" in os.environ:  # set by the parent process
        return
    global chose_spin_count
    chose_spin_count = True
    os.environ["GOMP_SPINCOUNT"] = count
    loaded = _loaded_libgomp()
    if loaded:
        import warnings

        warnings.warn(
            f"{loaded} was loaded before pyorch was imported: threads spin long when they have no work, which "
            f"is slow beside other busy processes; import pyorch first, or set GOMP_SPINCOUNT={count}",
            RuntimeWarning,
            stacklevel=3,
        )


def _loaded_libgomp() -> str:
    """Returns the loaded libgomp that our libraries will share, or "". Other packages rename theirs."""
    if os.path.isdir(os.path.join(_lib_dir(), "..", "..", "pyorch.libs")):
        return ""  # a portable wheel contains its own
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
            paths = [line[line.index("/") :].rstrip("\n") for line in maps if "/libgomp.so.1" in line]
    except OSError:  # not Linux
        return ""
    return paths[0] if paths else ""
