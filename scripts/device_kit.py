"""Makes a kit that measures experts on a GPU, on a machine that has only Python and the GPU's driver and runtime.

    python scripts/device_kit.py -o device-kit.tar.xz [--architectures 80,90] [--python 3.12]

It is made where a CUDA toolkit is installed, with a GPU or without, and needs no network where it is unpacked:

    tar xf device-kit.tar.xz && cd device-kit
    scripts/measure_device.sh CUDA0 --results device.jsonl --minutes 9 --rounds 1 --only checks,speed > device.md

The kit has the package and its scripts; libraries with kernels for several processors and for the named architectures;
wheels of the packages that pyorch imports (numpy is the largest); the small model as a GGUF, of which the measured one
is made; and a library that counts the calls of CUDA (scripts/cuda_trace.c). CUDA_HOME names the toolkit. CUDA's runtime
and cuBLAS are those of the other machine: LD_LIBRARY_PATH names them if the loader does not find them.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from device_build import ROOT, Missing, cmake, cuda_options

WHEELS = ("cffi", "pycparser", "diskcache", "gguf", "jinja2", "markdown-it-py", "markupsafe", "mdurl", "numpy",
          "prometheus-client", "prompt-toolkit", "pygments", "pyyaml", "rich", "tqdm", "typing-extensions", "wcwidth")
LIBRARIES = ("libggml", "libllama.", "libpyorch.")
VARIANTS = "haswell;icelake;zen4"  # of the processor's kernels


def build(tree: Path, architectures: str) -> Path:
    """Builds, and returns the directory of the libraries. Raises Missing."""
    options = [option for option in cuda_options() if not option.startswith(("-DCMAKE_CUDA_ARCH", "-DGGML_CUDA_FA"))]
    real = ";".join(f"{architecture}-real" for architecture in architectures.split(","))
    cmake("-G", "Ninja", "-S", ROOT / "native", "-B", tree, f"-DPython_EXECUTABLE={sys.executable}",
          f"-DCMAKE_MAKE_PROGRAM={Path(sys.executable).with_name('ninja')}", "-DPYORCH_PORTABLE=ON",
          f"-DGGML_CPU_VARIANTS={VARIANTS}", "-DGGML_CUDA_COMPRESSION_MODE=size", *options,
          f"-DCMAKE_CUDA_ARCHITECTURES={real}")
    cmake("--build", tree, "--target", "pyorch-core")
    return tree / "bin"


def fill(kit: Path, libraries: Path, python: str) -> None:
    """Fills the directory `kit` of the tree that is packed."""
    (kit / "lib").mkdir(parents=True)
    for file in libraries.iterdir():
        if file.suffix in (".h", ".py") or (file.name.startswith(LIBRARIES) and file.suffix == ".so"):
            shutil.copy(file, kit / "lib")
    shutil.copytree(libraries / "bindings", kit / "lib/bindings", ignore=shutil.ignore_patterns("__pycache__"))
    run("strip", *(kit / "lib").glob("*.so"))
    run("cc", "-O2", "-shared", "-fPIC", "-o", kit / "libcuda_trace.so", ROOT / "scripts/cuda_trace.c", "-ldl")
    platforms = [word for glibc in ("2014", "_2_17", "_2_27", "_2_28")
                 for word in ("--platform", f"manylinux{glibc}_x86_64")]
    run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--python-version", python,
        "--implementation", "cp", *platforms, "-d", kit / "wheels", *WHEELS)
    run(sys.executable, "-m", "pyorch", "convert", ROOT / "tests/fixtures/small-moe", "-o", kit / "small.gguf",
        "--pre-tokenizer", "gpt-2")


def run(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("device-kit.tar.xz"), help="(default: %(default)s)")
    parser.add_argument("--architectures", default="80,90",
                        help="of GPUs; kernels for 80 also run on 86 and 89 (default: %(default)s)")
    parser.add_argument("--python", default="3.12", help="of the other machine (default: %(default)s)")
    parser.add_argument("--tree", type=Path, default=ROOT / "build/device-kit", help="the build directory")
    arguments = parser.parse_args()
    try:
        libraries = build(arguments.tree, arguments.architectures)
        with tempfile.TemporaryDirectory() as scratch:
            root = Path(scratch, "device-kit")
            fill(root / "kit", libraries, arguments.python)
            for folder in ("pyorch", "scripts"):
                shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
            with tarfile.open(arguments.output, "w:xz") as archive:
                archive.add(root, "device-kit")
    except Missing as missing:
        print(f"device_kit.py: {missing}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as failure:
        print(f"device_kit.py: {Path(failure.cmd[0]).name} failed with status {failure.returncode}", file=sys.stderr)
        return 1
    print(f"{arguments.output}  {arguments.output.stat().st_size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
