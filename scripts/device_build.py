"""Builds the backend of a device next to the usual build, and tests it as far as possible.

    device_build.py vulkan     runs the tests of devices on the first Vulkan device, also a software one
    device_build.py cuda       for one architecture; without a GPU it cannot run

Only the backend is compiled, and the parts of ggml that it links; all other libraries of the usual build are copied to
the tree's lib/. If the backend's tools are missing, a line names them, and nothing is done. They are searched in the
usual places, and in:

    VULKAN_INCLUDE   a directory with vulkan/vulkan.h, if the system's is too old
    CUDA_HOME        a directory with bin/nvcc, include and lib, or lib64
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from pyorch import _libs

ROOT = Path(__file__).parent.parent
LEAST_VULKAN = (1, 4, 300)  # of the headers: earlier ones lack names that llama.cpp uses
CUDA_ARCHITECTURE = "80"


class Missing(Exception):
    """A tool or library of the build is missing. The message names it."""


def first(paths: list[str]) -> Path | None:
    return next((path for path in map(Path, paths) if path.exists()), None)


def header_version(header: Path) -> tuple[int, int, int]:
    """Returns the version of vulkan_core.h."""
    text = header.read_text(encoding="utf-8")
    patch = re.search(r"#define VK_HEADER_VERSION (\d+)", text)
    minor = max(map(int, re.findall(r"#define VK_API_VERSION_1_(\d)\b", text)))
    return 1, minor, int(patch[1]) if patch else 0


def vulkan_options() -> list[str]:
    """Returns options for cmake. Raises Missing."""
    if not shutil.which("glslc"):
        raise Missing("there is no glslc (on Debian and Ubuntu: apt install glslc)")
    if not first(["/usr/share/cmake/SPIRV-Headers", "/usr/lib/cmake/SPIRV-Headers",
                  "/usr/local/share/cmake/SPIRV-Headers"]):
        raise Missing("there are no SPIR-V headers (on Debian and Ubuntu: apt install spirv-headers)")
    include = Path(os.environ.get("VULKAN_INCLUDE", "/usr/include"))
    header = include / "vulkan/vulkan_core.h"
    if not header.exists():
        raise Missing("there are no Vulkan headers (on Debian and Ubuntu: apt install libvulkan-dev)")
    if header_version(header) < LEAST_VULKAN:
        raise Missing(f"the Vulkan headers in {include} are older than {'.'.join(map(str, LEAST_VULKAN))}: "
                      "VULKAN_INCLUDE names others")
    folders = ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"]
    library = first([f"{folder}/libvulkan.{end}" for folder in folders for end in ("so", "so.1")])
    if not library:
        raise Missing("there is no libvulkan (on Debian and Ubuntu: apt install libvulkan1)")
    return ["-DGGML_VULKAN=ON", f"-DVulkan_INCLUDE_DIR={include}", f"-DVulkan_LIBRARY={library}"]


def cuda_options() -> list[str]:
    """Returns options for cmake. Raises Missing."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = first([f"{home}/bin/nvcc", shutil.which("nvcc") or ""])
    if not nvcc or nvcc.is_dir():
        raise Missing("there is no nvcc: CUDA_HOME names the directory of a CUDA toolkit")
    toolkit = nvcc.resolve().parent.parent
    libraries = first([f"{toolkit}/{folder}/libcublas.so" for folder in ("lib64", "lib", "targets/x86_64-linux/lib")])
    if not libraries:
        raise Missing(f"there is no cuBLAS in {toolkit}: CUDA_HOME names the directory of a whole CUDA toolkit")
    # The loader does not search a toolkit that is only unpacked somewhere.
    paths = [str(libraries.parent), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(paths)
    # Without a GPU there is no driver to link; and attention in all its shapes would compile for hours.
    return ["-DGGML_CUDA=ON", "-DGGML_CUDA_NO_VMM=ON", "-DGGML_CUDA_FA=OFF", "-DGGML_CUDA_NCCL=OFF",
            f"-DCMAKE_CUDA_COMPILER={nvcc}", f"-DCUDAToolkit_ROOT={toolkit}",
            f"-DCMAKE_CUDA_ARCHITECTURES={CUDA_ARCHITECTURE}"]


def cmake(*arguments: object) -> None:
    subprocess.run([Path(sys.executable).with_name("cmake"), *map(str, arguments)], check=True)


def build(tree: Path, backend: str, options: list[str]) -> Path:
    """Builds, and returns the directory of all libraries."""
    cmake("-G", "Ninja", "-S", ROOT / "native", "-B", tree, f"-DPython_EXECUTABLE={sys.executable}",
          f"-DCMAKE_MAKE_PROGRAM={Path(sys.executable).with_name('ninja')}", *options)
    cmake("--build", tree, "--target", "ggml", f"ggml-{backend}")
    libraries = tree / "lib"
    shutil.copytree(_libs.lib_dir(), libraries, dirs_exist_ok=True)
    for name in ("libggml", f"libggml-{backend}"):  # libggml knows the backends
        shutil.copy(tree / "bin" / f"{name}{_libs.SUFFIX}", libraries)
    return libraries


def test(libraries: Path, *arguments: str, **variables: str) -> int:
    environment = {**os.environ, "PYORCH_LIB_DIR": str(libraries), **variables}
    return subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments], cwd=ROOT,
                          env=environment).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=("vulkan", "cuda"))
    parser.add_argument("--tree", type=Path, help="the build directory (default: build/BACKEND)")
    arguments = parser.parse_args()
    tree = arguments.tree or ROOT / "build" / arguments.backend
    try:
        options = vulkan_options() if arguments.backend == "vulkan" else cuda_options()
    except Missing as missing:
        print(f"skipped: {missing}")
        return 0
    try:
        libraries = build(tree, arguments.backend, options)
    except subprocess.CalledProcessError as failure:
        print(f"device_build.py: the build failed with status {failure.returncode}", file=sys.stderr)
        return 1
    if arguments.backend == "vulkan":
        # A software device is used only if it is named.
        return test(libraries, "tests/llama/test_device.py", "-k", "vulkan",
                    GGML_VK_VISIBLE_DEVICES=os.environ.get("GGML_VK_VISIBLE_DEVICES", "0"))
    return test(libraries, "tests/llama/test_device_build.py")


if __name__ == "__main__":
    raise SystemExit(main())
