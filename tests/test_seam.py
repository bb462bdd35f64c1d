"""Promises of llama.cpp and llama-cpp-python that pyorch relies on and that no other test checks.

docs/reference/seam.md has the whole list.
"""

from __future__ import annotations

import ast
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import llama_cpp.llama_cpp as llama
import numpy as np
import pytest
from models import assert_same_bits, small_model
from processes import HANG_SECONDS

import pyorch
from pyorch import _libs
from pyorch.llama.context import Context
from pyorch.llama.model import Model
from pyorch.runtime.callbacks import Routing
from pyorch.runtime.model_map import ModelMap
from pyorch.serve import front

ROOT = Path(__file__).parent.parent
SEAM = (ROOT / "docs/reference/seam.md").read_text(encoding="utf-8")


def test_the_difference_to_llama_cpp_stays_small():
    added = [line for patch in sorted((ROOT / "patches").glob("*.patch"))
             for line in patch.read_text(encoding="utf-8").splitlines() if re.match(r"\+(?!\+\+ )", line)]
    # Ten of them so that a device that is lost does not end the process, three so that its server goes on, four so that
    # graphs bring no more from a device than is wanted, three so that repacked experts can be picked twice, eight so
    # that threads wait at a barrier of ours, seven so that kernels of ours may multiply an expert, four so that no
    # threads meet where a device computes all experts, one so that an adapter for another number of experts is refused,
    # fifty-two so that no grammar or schema of a request takes all time or memory, or ends the process, two so that a
    # request ends when its client leaves, eight so that no page of another site reads an answer.
    assert 200 < len(added) <= 400
    assert f"(`patches/`, {len(added)} added lines)" in (
        ROOT / "docs/explanation/architecture.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tree() -> Path:
    """The patched llama.cpp."""
    trees = sorted(ROOT.glob("build/py3-*/llama.cpp/include/llama-moe.h"))
    if not trees:
        pytest.skip("needs the build tree of an editable install: make setup")
    return trees[0].parent.parent


def test_several_models_have_the_endpoints_of_one(tree: Path) -> None:
    source = (tree / "tools/server/server.cpp").read_text(encoding="utf-8")
    declared = re.findall(r'ctx_http\.(get|post|del) *\("([^"]+)"', source)
    methods = {"get": "GET", "post": "POST", "del": "DELETE"}
    of_one = {(methods[method], re.sub(":.*", "*", path)) for method, path in declared
              if path not in ("/models", "/models/sse", "/v1/models", "/health", "/v1/health")}  # outside of ENDPOINTS
    of_several = {(method, path) for method, paths in front.ENDPOINTS.items() for path in paths}
    ours = {("GET", "/residency"), ("POST", "/residency"), ("GET", "/tokenizer_info")}
    assert len(of_one) > 40 and of_several == of_one | ours
    header = (tree / "vendor/cpp-httplib/httplib.h").read_text(encoding="utf-8")
    size = re.search(r"CPPHTTPLIB_PAYLOAD_MAX_LENGTH \(([0-9 *]+)\)", header)[1]
    assert math.prod(map(int, size.split("*"))) == front._MAX_BODY_BYTES


class IntactSource:
    """Experts of a file, while the model is loaded from another one."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDONLY)

    def read(self, file: int, offset: int, size: int) -> bytes:
        return os.pread(self._file, size, offset)


@pytest.mark.parametrize("use_mmap", [False, True])
def test_no_kernel_takes_an_expert_from_where_the_loader_mapped_it(
    small_moe_q4: Path, prompt_tokens: list[int], tmp_path: Path, use_mmap: bool
) -> None:
    """The file that the model is loaded from holds nothing where its experts were."""
    path = tmp_path / "emptied.gguf"
    path.write_bytes(small_moe_q4.read_bytes())
    with ModelMap(path) as model_map, path.open("r+b") as file:
        for layer in model_map.layers:
            for expert in range(layer.n_expert):
                for role in range(len(layer.roles)):
                    place = model_map.expert_range(layer.il, expert, role)
                    file.seek(place.offset)
                    file.write(bytes(place.size))
    with small_model(small_moe_q4, "100%") as model, Context(model.llama.model, n_ctx=128, n_threads=1) as context:
        expected = context.decode(prompt_tokens)
    with small_model(path, "30%", source=IntactSource(small_moe_q4), use_mmap=use_mmap) as model:
        with Context(model.llama.model, n_ctx=128, n_threads=1) as context:
            assert_same_bits(context.decode(prompt_tokens), expected)


def test_kernels_take_the_matrices_of_an_expert_in_the_order_of_the_map(
    small_moe: Path, prompt_tokens: list[int]
) -> None:
    """In another order, what was read for the next matrix of a layer that is streamed would be read again."""
    with ModelMap(small_moe) as model_map:
        floor, expert_bytes = model_map.info.floor_bytes, model_map.layers[0].expert_bytes
    with (
        small_model(small_moe, floor, prefetch="none") as model,
        Context(model.llama.model, n_ctx=128, n_threads=1) as context,
    ):
        context.decode(prompt_tokens)
        stats = model.engine.stats()
    assert stats.loads == stats.misses > 13 * len(model.layers), "more than the budget holds"
    assert stats.bytes_read == stats.misses * expert_bytes
    assert stats.peak_bytes <= floor


def test_the_warm_up_reads_one_expert_of_each_layer(small_moe: Path) -> None:
    with small_model(small_moe, "50%", prefetch="none") as model:
        params = llama.llama_context_default_params()
        params.n_ctx = 64
        context = llama.llama_init_from_model(model.llama.model, params)
        llama.llama_set_warmup(context, True)
        token = (llama.llama_token * 1)(1)
        assert llama.llama_decode(context, llama.llama_batch_get_one(token, 1)) == 0
        llama.llama_set_warmup(context, False)
        stats = model.engine.stats()
        llama.llama_free(context)
    assert (stats.loads, stats.layer_passes) == (len(model.layers), len(model.layers))


def test_residuals_are_what_the_router_inputs_are_the_normalization_of(
    resident: Model, small_moe: Path, prompt_tokens: list[int]
) -> None:
    """They are found as the source of an RMS normalization, and its epsilon in the first four bytes of its
    parameters."""
    routings: list[Routing] = []
    with small_model(small_moe, "50%", prefetch="none") as model:
        model.engine.set_observer(routings.append)
        with Context(model.llama.model, n_ctx=128, n_threads=1) as context:
            context.decode(prompt_tokens[:16])
        model.engine.set_observer(None)
        for routing in routings:
            router = model.engine.router(routing.il)
            states = routing.residuals.astype(np.float64)
            expected = states / np.sqrt((states**2).mean(-1, keepdims=True) + router.eps) * router.norm
            np.testing.assert_allclose(routing.inputs, expected, rtol=1e-4, atol=1e-5)


def test_llama_cpp_finds_experts_in_three_kernels(tree: Path) -> None:
    """And each of them asks the hook. A fourth would compute with what is not there."""
    kernels = tree / "ggml/src/ggml-cpu"
    found = {path.relative_to(kernels).as_posix(): path.read_text(encoding="utf-8") for path in kernels.rglob("*.c*")}
    asking = {
        name: len(re.findall(r"ggml_cpu_expert_(?:addr|next)\((?:&rounds, )?dst", text)) for name, text in found.items()
    }
    assert {name: n for name, n in asking.items() if n} == {"ggml-cpu.c": 1, "repack.cpp": 1, "tiled/tiled.cpp": 1}
    # SpacemiT's kernels are for a buffer type of their own, which managed experts never are in.
    computing = {
        name
        for name, text in found.items()
        if re.search(r"\bforward_mul_mat_id\w*\(|compute_forward_mul_mat_id\w*\(", text)
    }
    assert computing == {"ggml-cpu.c", "repack.cpp", "tiled/tiled.cpp", "spacemit/ime.cpp"}


@pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf is not installed")
def test_libpyorch_is_linked_with_no_kernels() -> None:
    """Those for this processor may be one of several libraries, which ggml loads when it runs."""
    for name in ("pyorch", "llama", "llama-common", "mtmd", "llama-server-impl"):
        done = subprocess.run(
            ["readelf", "-d", _libs.lib_dir() / f"lib{name}.so"], capture_output=True, text=True, check=True
        )
        needed = re.findall(r"\(NEEDED\).*\[(.*)\]", done.stdout)
        assert "libggml-base.so" in needed and "libggml-cpu.so" not in needed


@pytest.mark.skipif(sys.platform != "linux", reason="glibc tells which files it opens")
def test_backends_are_looked_for_beside_the_library_only(tmp_path: Path) -> None:
    """A file of such a name would be run, whoever put it into the directory that somebody stands in."""
    shutil.copy(_libs.lib_dir() / "libggml-base.so", tmp_path / "libggml-cuda-here.so")
    program = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).ggml_backend_load_all{}"

    def opened(call: str) -> bool:
        done = subprocess.run(
            [sys.executable, "-c", program.format(call), _libs.lib_dir() / "libggml.so", str(tmp_path)],
            capture_output=True,
            text=True,
            check=True,
            cwd=tmp_path,
            timeout=HANG_SECONDS,
            env={**os.environ, "LD_DEBUG": "files"},
        )
        return "libggml-cuda-here.so" in done.stderr

    assert opened("_from_path(sys.argv[2].encode())") and not opened("()")


def test_llama_cpp_computes_experts_in_build_moe_ffn_only(tree: Path) -> None:
    calls = {
        path.relative_to(tree / "src").as_posix()
        for path in (tree / "src").rglob("*.cpp")
        if re.search(r"\b(?:ggml_mul_mat_id|build_lora_mm_id)\(", path.read_text())
    }
    # The loader asks which buffers can hold the operation; Granite Switch has adapters that it chooses by token.
    assert calls == {"llama-graph.cpp", "llama-model-loader.cpp", "models/granite-switch.cpp"}


def test_llama_cpp_says_what_it_does_only_when_asked(small_moe: Path, capsys: pytest.CaptureFixture) -> None:
    """By the level of llama_cpp._logger.logger, which Llama(verbose=...) sets."""
    with pyorch.load(small_moe, budget="50%", n_ctx=64):
        pass
    assert capsys.readouterr().err == ""
    with pyorch.load(small_moe, budget="50%", n_ctx=64, verbose=True):
        pass
    assert "llama_model_loader: loaded meta data" in capsys.readouterr().err


def test_libraries_that_llama_cpp_brought_itself_are_refused(tmp_path: Path) -> None:
    """Its module says where they are: llama_cpp.llama_cpp._base_path."""
    for library in _libs.lib_dir().iterdir():
        (tmp_path / library.name).symlink_to(library)
    program = "import llama_cpp, pyorch"
    done = _run_with_another_llama_cpp(tmp_path, program, LLAMA_CPP_LIB_PATH=str(tmp_path))
    assert done.returncode == 1
    assert f"llama_cpp was imported before pyorch and loaded the libraries in {tmp_path}" in done.stderr


def test_with_pyorch_come_its_own_bindings_whatever_is_installed(tmp_path: Path) -> None:
    done = _run_with_another_llama_cpp(tmp_path, "import pyorch, llama_cpp; print(llama_cpp.__file__)")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(_libs.lib_dir())


def _run_with_another_llama_cpp(directory: Path, program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Where one is found before ours, as llama-cpp-python installs it."""
    copy = directory / "other/llama_cpp"
    shutil.copytree(_libs.lib_dir() / "bindings/llama_cpp", copy)
    first = copy / "__init__.py"
    first.write_text(first.read_text().partition("\n\n")[2])  # without the line that imports pyorch
    environment = {name: value for name, value in os.environ.items() if name != "LLAMA_CPP_LIB_PATH"}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_SECONDS,
                          env={**environment, "PYTHONPATH": str(copy.parent), **variables})


# The document


def test_every_test_that_the_document_names_exists() -> None:
    files = {path.relative_to(ROOT).as_posix(): path for path in ROOT.glob("tests/**/test_*.py")}
    named_files = set(re.findall(r"`(tests/\w[^`:]*)[`:]", SEAM))
    assert len(named_files) > 10 and named_files <= files.keys()
    functions = {node.name for path in files.values()
                 for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.FunctionDef)}
    named_functions = set(re.findall(r"`(test_\w+)`", SEAM))
    assert len(named_functions) > 60 and named_functions <= functions
    native = {path.stem for path in ROOT.glob("native/tests/**/*_test.cpp")}
    named_native = set(re.findall(r"`(\w+_test)`", SEAM))
    assert len(named_native) > 4 and named_native <= native


def test_the_document_names_every_hook_and_all_that_it_is_told(tree: Path) -> None:
    hooks = (tree / "include/llama-moe.h").read_text() + re.search(
        r"struct ggml_cpu_expert_hooks \{.*?\};", (tree / "ggml/include/ggml-cpu.h").read_text(), re.DOTALL)[0]
    code = re.sub(r"//.*", "", hooks)
    names = {*re.findall(r"\(\*(\w+)\)", code), *re.findall(r"^    [\w ]+?[ *]+(\w+);", code, re.MULTILINE)}
    assert {
        "addr",
        "failed",
        "weight",
        "weight_freed",
        "route",
        "done",
        "begin",
        "end",
        "selection_b",
        "gating",
    } <= names
    assert {name for name in names if f"`{name}`" not in SEAM} == set()


def test_the_document_names_what_is_taken_of_llama_cpp_pythons_private_parts() -> None:
    for path in [*ROOT.glob("pyorch/**/*.py"), *ROOT.glob("convert/*.py")]:
        text = path.read_text(encoding="utf-8")
        private = {*re.findall(r"\binternals\.(\w+(?:\.\w+)?)", text), *re.findall(r"from llama_cpp\.(_\w+)", text),
                   *re.findall(r"import llama_cpp\.(_\w+)", text), *re.findall(r"\bloaded\.(_\w+)", text),
                   *re.findall(r"\b(?:llama|llm)\.(_[a-z]\w+)", text)}
        for name in private:
            assert f"`{name}`" in SEAM or f".{name}`" in SEAM, f"{path.relative_to(ROOT)} takes {name}"
