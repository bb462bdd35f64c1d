"""The wheel for other machines, which `make test-wheel` builds: installed where there is no compiler, run on processors
that this is not. `--wheel` names it, or the folder that it is in; one of another architecture runs under QEMU, with
Debian's Python for it."""

from __future__ import annotations

import gzip
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from models import PROMPT
from processes import HANG_SECONDS
from servers import ServerProcess, pyorch_serve

from pyorch import _libs
from scripts.make_wheel import ADDED, NOTICES, without_notice

ROOT = Path(__file__).parents[1]

# Processors that QEMU can be, and the kernels that are for them. Those of x86-64 are without vectors of 256 bits, with
# them, and with fused multiplication; those of aarch64 without and with dot products, and with all that QEMU has.
EMULATED = {
    "core2duo": "x64", "Nehalem": "sse42", "SandyBridge": "sandybridge", "Haswell": "haswell",
    "cortex-a57": "armv8.0_1", "neoverse-n1": "armv8.2_2", "max": "armv8.6_2",
}
VULKAN = "pyorch/lib/libggml-vulkan.so"
AARCH64 = {"armv8.0_1", "armv8.2_2", "armv8.6_1", "armv8.6_2"}

# What Debian's Python is made of, but for what nothing here uses.
FOREIGN = ("python3.11", "python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib", "libc6", "libgcc-s1",
           "libstdc++6", "zlib1g", "libexpat1", "libssl3", "libffi8", "libbz2-1.0", "liblzma5", "libuuid1",
           "libsqlite3-0", "libgomp1")
DEBIAN = {"aarch64": "arm64", "x86_64": "amd64"}  # what it calls architectures

# What each kind of kernels needs, the best one last, by Linux's names; as score() of ggml's cpu-feats.cpp has it.
_AVX2 = ["avx", "avx2", "bmi2", "fma", "f16c"]
_AVX512 = [*_AVX2, "avx512f", "avx512cd", "avx512vl", "avx512dq", "avx512bw"]
NEEDS = {
    "x64": [], "sse42": ["sse4_2"], "sandybridge": ["avx"], "haswell": _AVX2, "alderlake": [*_AVX2, "avx_vnni"],
    "skylakex": _AVX512, "cascadelake": [*_AVX512, "avx512_vnni"], "icelake": [*_AVX512, "avx512_vnni", "avx512vbmi"],
    "zen4": [*_AVX512, "avx512_vnni", "avx512vbmi", "avx512_bf16"],
}

# Decodes a prompt under a budget, and puts compressed experts together; tells which kernels computed, and what.
PROBE = """
import hashlib, json, re, sys
import numpy as np
import pyorch
from pyorch.library import codecs
from pyorch.llama.context import Context

digests = {}
for path in sys.argv[1:]:
    with pyorch.load(path, budget="50%", n_ctx=64, n_threads=1) as model:
        with Context(model.llama.model, n_ctx=64, n_threads=1) as context:
            logits = [context.decode(list(range(300, 340))), context.decode([7])]
    assert all(np.isfinite(part).all() and part.std() > 0 for part in logits)
    digests[path] = hashlib.sha256(b"".join(part.tobytes() for part in logits)).hexdigest()

numbers = np.random.default_rng(1).normal(0, 0.02, 1 << 14).astype(np.float32).view(np.uint8)[2:].copy()
numbers = numbers[: len(numbers) // 32 * 32]
for kind in codecs.TYPES:
    e, sm = codecs.split(kind, numbers)
    for codec in codecs.TABLE, codecs.ZSTD:
        stored = codecs.encode(codec, 0, e)
        if stored is not None:
            raw = np.empty_like(numbers)
            codecs.recover(kind, codec, stored, sm, raw)
            assert (raw == numbers).all(), (kind, codec)

loaded = re.findall(r"/libggml-cpu-([\\w.]+)\\.so", open("/proc/self/maps").read())
print(json.dumps({"kernels": sorted(set(loaded)), "digests": digests}))
"""


@pytest.fixture(scope="module")
def wheel(request: pytest.FixtureRequest) -> Path:
    named = request.config.getoption("--wheel")
    if named is None:
        pytest.skip("needs a wheel for other machines: make test-wheel")
    found = [named] if named.is_file() else sorted(named.glob("pyorch-*.whl"), key=os.path.getmtime)
    assert found, f"{named} holds no wheel of pyorch"
    return found[-1].resolve()


@pytest.fixture(scope="module")
def variants(wheel: Path) -> list[str]:
    """The kinds of kernels that the wheel has."""
    with zipfile.ZipFile(wheel) as archive:
        found = [re.fullmatch(r"pyorch/lib/libggml-cpu-([\w.]+)\.so", name) for name in archive.namelist()]
    return [match[1] for match in found if match]


class Installed:
    """A virtual environment with the wheel in it, in a world without compilers and without variables."""

    def __init__(self, directory: Path, wheel: Path) -> None:
        self.architecture = platform.machine()
        subprocess.run([sys.executable, "-m", "venv", directory], check=True, timeout=HANG_SECONDS)
        self.python = directory / "bin/python"
        self.environment = {"PATH": str(directory / "bin"), "HOME": str(directory), "LANG": "C.UTF-8"}
        assert [tool for tool in ("cc", "gcc", "c++", "g++", "clang", "make", "cmake")
                if shutil.which(tool, path=self.environment["PATH"])] == []
        done = self.run("-m", "pip", "install", "--no-cache-dir", "--only-binary", ":all:", "-c",
                        ROOT / "constraints.txt", wheel)
        assert done.returncode == 0, done.stdout + done.stderr
        site, = directory.glob("lib/python3*/site-packages")
        self.site = site

    def emulator(self, processor: str) -> list[str]:
        """What runs a program on a processor; on this one, if none is named."""
        if not processor:
            return []
        found = shutil.which(f"qemu-{self.architecture}")
        if found is None:
            pytest.skip(f"qemu-{self.architecture} is not installed: apt install qemu-user")
        return [found, "-cpu", processor]

    def run(self, *arguments: object, processor: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
        command = [*self.emulator(processor), str(self.python), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, cwd=self.python.parent,
                              env={**self.environment, **variables})

    def serve(self, model: Path, log: Path, *options: str) -> ServerProcess:
        python, *arguments = pyorch_serve(model, *options)
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        elsewhere = ["-C", str(self.python.parent)]  # Python would find the package where it stands
        return ServerProcess([shutil.which("env"), "-i", *elsewhere, *variables, str(self.python), *arguments], log)

    def probe(self, models: list[Path], processor: str = "", **variables: str) -> dict:
        done = self.run("-c", PROBE, *models, processor=processor, **variables)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


class Foreign(Installed):
    """The same for a wheel of another architecture: a folder with Debian's Python for it, which QEMU runs."""

    def __init__(self, directory: Path, wheel: Path, architecture: str) -> None:
        self.architecture = architecture
        directory.mkdir()
        self.python, self.site = directory / "usr/bin/python3.11", directory / "usr/lib/python3/dist-packages"
        self.environment = {"PATH": "/nowhere", "HOME": str(directory), "LANG": "C.UTF-8",
                            "QEMU_LD_PREFIX": str(directory)}
        packages = [f"{name}:{DEBIAN[architecture]}" for name in FOREIGN]
        done = subprocess.run(["apt-get", "download", "-qq", *packages], cwd=directory, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"needs Debian's Python 3.11 for {architecture}: dpkg --add-architecture "
                        f"{DEBIAN[architecture]} && apt-get update ({done.stderr.strip()})")
        for package in directory.glob("*.deb"):
            subprocess.run(["dpkg", "-x", package, directory], check=True)
        platforms = [word for glibc in range(17, 37) for word in ("--platform", f"manylinux_2_{glibc}_{architecture}")]
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--target", self.site, "--only-binary", ":all:",
                        *platforms, "--platform", f"manylinux2014_{architecture}", "--python-version", "3.11", "--abi",
                        "cp311", "--abi", "abi3", "--abi", "none", "-c", ROOT / "constraints.txt", wheel], check=True)

    def emulator(self, processor: str) -> list[str]:
        return super().emulator(processor or "max")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    architecture = wheel.stem.partition("manylinux_")[2].split("_", 2)[2]
    directory = tmp_path_factory.mktemp("clean") / "venv"
    foreign = architecture != platform.machine()
    return Foreign(directory, wheel, architecture) if foreign else Installed(directory, wheel)


@pytest.fixture(scope="module")
def native(installed: Installed) -> Installed:
    """For what is about this processor, or needs programs that start programs."""
    if isinstance(installed, Foreign):
        pytest.skip(f"the wheel is for {installed.architecture}")
    return installed


@pytest.fixture(scope="module")
def with_only(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """PYTHONPATH for the same installation with these kernels alone."""

    def make(*kept: str) -> str:
        copy = tmp_path_factory.mktemp("only")
        for package in ("pyorch", "pyorch.libs"):
            shutil.copytree(installed.site / package, copy / package, copy_function=os.link)
        for library in (copy / "pyorch/lib").glob("libggml-cpu-*.so"):
            if library.stem.removeprefix("libggml-cpu-") not in kept:
                library.unlink()
        return str(copy)

    return make


@pytest.fixture(scope="module")
def models(small_moe: Path, small_moe_q4: Path) -> list[Path]:
    """Experts that the kernels take as they are, and such that they take repacked, where they can."""
    return [small_moe, small_moe_q4]


def test_its_name_says_what_it_runs_on(wheel: Path, variants: list[str]) -> None:
    assert re.fullmatch(r"pyorch-[\d.]+-py3-none-manylinux_2_\d+_\w+\.whl", wheel.name)
    assert set(variants) == (NEEDS.keys() if wheel.stem.endswith("_x86_64") else AARCH64)


def test_everything_in_it_has_a_notice(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        notices = {
            name.removeprefix(NOTICES): archive.read(name) for name in archive.namelist() if name.startswith(NOTICES)
        }
        libraries = [name for name in archive.namelist() if name.startswith(ADDED) and ".so" in name]
    assert libraries, "no system is sure to have libgomp"
    assert without_notice(wheel) == []
    with zipfile.ZipFile(wheel) as archive:
        has_vulkan = VULKAN in archive.namelist()
    assert {"llama.cpp", "llama-cpp-python", "zstd", "libgomp", *(["vulkan-headers"] * has_vulkan)} <= notices.keys()
    assert not any("libvulkan" in name for name in libraries), "it is the system's, or there is none"
    assert b"GCC RUNTIME LIBRARY EXCEPTION" in notices["libgomp"].upper()
    assert all(text.strip() for text in notices.values())


def test_it_takes_the_best_kernels_for_this_processor(
    native: Installed, variants: list[str], models: list[Path]
) -> None:
    flags = re.search(r"^flags\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[1].split()
    able = [name for name in NEEDS if name in variants and set(NEEDS[name]) <= set(flags)]
    assert native.probe(models)["kernels"] == able[-1:]


def test_commands_run_and_stay_lossless(installed: Installed, models: list[Path]) -> None:
    for model in models:
        done = installed.run("-m", "pyorch", "verify", model, "--budget", "40%", "--prompt", "import os\nimport sys\n")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "bit-identical" in done.stdout
    done = installed.run("-m", "pyorch", "run", models[0], "-p", "import ", "-n", "4", "--budget", "40%")
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
    assert "load_backend" not in done.stderr, "which kernels suit is told to nobody who did not ask"


def test_the_demo_says_what_it_needs(installed: Installed) -> None:
    done = installed.run("-m", "pyorch", "demo")
    assert done.returncode == 2 and "is in the source tree only: name one" in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_documentation_is_in_it(wheel: Path, installed: Installed) -> None:
    done = installed.run("-m", "pyorch", "--help")
    assert Path(done.stdout.splitlines()[-1].removeprefix("Documentation: ")).is_relative_to(installed.site)
    with zipfile.ZipFile(wheel) as archive:
        names = {name.removeprefix("pyorch/docs/") for name in archive.namelist()
                 if name.startswith("pyorch/docs/") and not name.endswith("/")}
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.*")}
    assert names == {page for page in pages if not re.match("measurements/.*/", page)}


def test_it_serves_answers_pages_and_ends_when_told(
    wheel: Path, native: Installed, models: list[Path], tmp_path: Path
) -> None:
    server = native.serve(models[0], tmp_path / "log", "--budget", "40%", "--threads", "1")
    try:
        assert server.get("/health") == {"status": "ok"}
        assert server.complete(PROMPT)
        assert server.get("/residency")["totals"]["hits"] > 0
        # The chat page is in the library compressed, and in no other form.
        request = urllib.request.Request(f"{server.url}/", headers={"Accept-Encoding": "gzip"})
        with urllib.request.urlopen(request, timeout=HANG_SECONDS) as answer:
            page, url = answer.read(), answer.url
            if answer.headers["Content-Encoding"] == "gzip":
                page = gzip.decompress(page)
        with zipfile.ZipFile(wheel) as archive:
            has_chat_page = f"{NOTICES}chat-page" in archive.namelist()
        assert b"<!doctype html>" in page.lower()
        assert url == f"{server.url}/" and has_chat_page and b"pyorch/live.css" not in page  # which our own page names
        # The live view leads there.
        with urllib.request.urlopen(f"{server.url}/pyorch/docs", timeout=HANG_SECONDS) as answer:
            assert answer.read().startswith(b"# Serving")
        assert server.stop()[0] == 0
    finally:
        server.process.kill()
        server.process.communicate()


def test_llama_cpp_alone_finds_the_kernels(installed: Installed, models: list[Path]) -> None:
    """Nothing of libpyorch is loaded then: llama.cpp looks beside its own library."""
    program = (
        "import sys, llama_cpp; llm = llama_cpp.Llama(sys.argv[1], n_ctx=64, verbose=False);"
        "print(len(llm.create_completion('import ', max_tokens=4, temperature=0)['choices'][0]['text']));"
        "print('libpyorch.so' in open('/proc/self/maps').read())"
    )
    done = installed.run("-c", program, models[0])
    assert done.returncode == 0, done.stderr
    length, with_libpyorch = done.stdout.split()
    assert int(length) > 0 and with_libpyorch == "False" and done.stderr == ""


@pytest.mark.parametrize("processor", EMULATED)
def test_on_another_processor_it_takes_its_kernels_and_they_compute_the_same_bits_as_here(
    installed: Installed, with_only: Callable[..., str], variants: list[str], models: list[Path], processor: str
) -> None:
    if EMULATED[processor] not in variants:
        pytest.skip("the wheel is for another architecture")
    there = installed.probe(models, processor)
    assert there["kernels"] == [EMULATED[processor]]
    assert installed.probe(models, PYTHONPATH=with_only(EMULATED[processor])) == there


def test_all_kernels_that_this_processor_has_run(
    native: Installed, with_only: Callable[..., str], variants: list[str], models: list[Path]
) -> None:
    flags = re.search(r"^flags\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[1].split()
    for name in variants:
        if set(NEEDS[name]) <= set(flags):
            assert native.probe(models, PYTHONPATH=with_only(name))["kernels"] == [name]


def test_its_threads_sleep_soon_when_they_wait_whichever_libgomp_was_there_before(installed: Installed) -> None:
    program = "import ctypes; ctypes.CDLL('libgomp.so.1'); import pyorch.library.bindings"
    done = installed.run("-c", program, OMP_DISPLAY_ENV="verbose")
    assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr
    theirs, ours = re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)
    assert (theirs, ours) == (_libs.LIBGOMP_SPIN_COUNT, _libs.spin_count())


@pytest.fixture
def with_vulkan(native: Installed, wheel: Path) -> Installed:
    with zipfile.ZipFile(wheel) as archive:
        if VULKAN not in archive.namelist():
            pytest.skip("the wheel was built without Vulkan's tools")
    return native


def test_without_a_driver_of_a_gpu_its_vulkan_backend_changes_nothing(
    with_vulkan: Installed, models: list[Path], tmp_path: Path
) -> None:
    """Where the system has Vulkan's loader, and no driver, or one of a processor only, which is the usual case."""
    backend = with_vulkan.site / VULKAN
    command = ("-m", "pyorch", "run", models[0], "-p", "import ", "-n", "8", "--ctx", "64", "--json")
    told = [with_vulkan.run(*command, **driver) for driver in ({}, {"VK_DRIVER_FILES": str(tmp_path / "none")})]
    refused = with_vulkan.run(*command, "--device", "auto")
    backend.rename(tmp_path / backend.name)
    try:
        told.append(with_vulkan.run(*command))
    finally:
        shutil.move(tmp_path / backend.name, backend)
    assert all(done.returncode == 0 and done.stderr == told[-1].stderr for done in told), told
    assert len({json.loads(done.stdout)["text"] for done in told}) == 1
    assert refused.returncode == 2 and "Vulkan of this build finds none: is the driver" in refused.stderr


def test_its_vulkan_backend_computes_where_there_is_a_driver(with_vulkan: Installed, models: list[Path]) -> None:
    if not list(Path("/usr/share/vulkan/icd.d").glob("*.json")):
        pytest.skip("no driver of Vulkan is here, nor a software one: apt install mesa-vulkan-drivers")
    program = """
import sys
import numpy as np
import pyorch
from pyorch.llama.context import Context

made = []
for budget, options in (("resident", {}), ("50%", {"vram_budget": "50%", "device_misses": "upload"})):
    with pyorch.load(sys.argv[1], budget=budget, device="Vulkan0", n_ctx=64, n_threads=1, **options) as model:
        with Context(model.llama.model, n_ctx=64, n_threads=1, exact=True) as context:
            made.append(np.concatenate([context.decode(list(range(300, 340))), context.decode([7])]))
        experts = model.stats().experts
print((made[0].view(np.uint32) == made[1].view(np.uint32)).all(), experts.device_computed > 0)
"""
    done = with_vulkan.run("-c", program, models[1], GGML_VK_VISIBLE_DEVICES="0")
    assert done.stdout.split() == ["True", "True"], done.stderr


def test_without_kernels_it_says_so(installed: Installed, with_only: Callable[..., str], models: list[Path]) -> None:
    done = installed.run("-m", "pyorch", "run", models[0], "-p", "import ", "-n", "1", PYTHONPATH=with_only())
    assert done.returncode != 0 and "ggml found no CPU backend beside its library" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
