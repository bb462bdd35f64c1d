"""What a context is said to need before it is made, against what it then takes."""

from __future__ import annotations

import re
from pathlib import Path

import llama_cpp.llama_cpp as llama
import pytest

from pyorch.errors import BudgetError, FormatError
from pyorch.llama import logs, measure, originals
from pyorch.runtime.devices import Device, Devices
from pyorch.runtime.model_map import ModelMap
from pyorch.sizes import GiB, MiB

LOAD = originals.original("llama_model_load_from_file")
INIT = originals.original("llama_init_from_model")


def context_params(n_ctx: int, n_ubatch: int) -> llama.llama_context_params:
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, n_ubatch, n_ubatch
    return params


@pytest.mark.parametrize(("n_ctx", "n_ubatch"), [(256, 32), (4096, 512), (4096, 2048)])
def test_the_measured_context_is_what_llama_cpp_allocates(small_moe: Path, n_ctx: int, n_ubatch: int) -> None:
    params, model_params = context_params(n_ctx, n_ubatch), llama.llama_model_default_params()
    with ModelMap(small_moe) as model_map, measure.twin(str(small_moe), model_params) as twin:
        measured = measure.context_sizes(twin, params, model_map).host
        work = measure.work_bytes(model_map, n_ubatch)
        kv = model_map.kv_bytes(n_ctx)
    with logs.collect() as lines:
        model = LOAD(str(small_moe).encode(), model_params)
        context = INIT(model, params)
        llama.llama_free(context)
        llama.llama_model_free(model)
    buffers = re.findall(r"(KV|compute|output) buffer size = +([\d.]+) MiB", "".join(lines))
    assert {name for name, _ in buffers} == {"KV", "compute", "output"}
    assert measured - work == pytest.approx(sum(float(size) for _, size in buffers) * MiB, abs=0.1 * MiB)
    assert [float(size) for name, size in buffers if name == "KV"] == [kv / MiB]


def test_buffers_are_counted_where_they_are() -> None:
    second = Device("RPC1", "RPC0[127.0.0.1:5]", "the second process, and the first device of it", None, True)
    third = Device("RPC2", "RPC0[127.0.0.1:6]", "the third process", None, True)
    lines = ["llama_context:        CPU  output buffer size =     1.00 MiB",
             *(f"llama_kv_cache: layer {n:3}: dev = {'CPU' if n == 3 else 'RPC1'}" for n in range(4)),
             "llama_kv_cache: RPC0[127.0.0.1:5] KV buffer size =     0.00 MiB",
             "llama_kv_cache: size =    8.00 MiB (   512 cells,   4 layers,  1/1 seqs), K (f16):    4.00 MiB",
             "sched_reserve: RPC0[127.0.0.1:5] compute buffer size =    16.00 MiB",
             "sched_reserve: RPC0[127.0.0.1:6] compute buffer size =    32.00 MiB",
             "sched_reserve:  CUDA_Host compute buffer size =    64.00 MiB"]
    assert measure.reported_sizes(lines, Devices((second,), (4,))) == measure.ContextSizes(99 * MiB, (22 * MiB,))
    assert measure.reported_sizes(lines, Devices((third, second), (1, 4))) == measure.ContextSizes(
        67 * MiB, (32 * MiB, 22 * MiB))
    assert measure.reported_sizes(lines, None) == measure.ContextSizes(121 * MiB)


def test_a_context_that_llama_cpp_refuses_is_refused_with_its_reason(small_moe: Path) -> None:
    params = context_params(256, 32)
    params.type_k, params.type_v = llama.GGML_TYPE_F16, llama.GGML_TYPE_Q4_0
    params.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED  # which a quantized V needs
    model_params = llama.llama_model_default_params()
    with ModelMap(small_moe) as model_map, measure.twin(str(small_moe), model_params) as twin:
        with pytest.raises(BudgetError, match="llama.cpp refuses this context: .+"):
            measure.context_sizes(twin, params, model_map)


def test_a_twin_of_a_broken_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(FormatError, match=str(path)):
        with measure.twin(str(path), llama.llama_model_default_params()):
            pass


def test_a_context_is_measured_without_the_memory_of_its_cells(small_moe: Path) -> None:
    params = context_params(4096, 512)
    with ModelMap(small_moe) as model_map, measure.twin(str(small_moe), llama.llama_model_default_params()) as twin:
        growth = measure.growth(twin, params, model_map)
        for n_ctx in (4096, 65536):
            params.n_ctx = n_ctx
            cells = measure.CELL_BYTES * n_ctx
            assert growth.needed(n_ctx) - cells == pytest.approx(
                measure.context_sizes(twin, params, model_map).host, rel=0.02)
        params.n_ctx = 4_000_000_000  # its cells alone would take all memory
        growth = measure.growth(twin, params, model_map)
        assert growth.needed(params.n_ctx) > model_map.kv_bytes(params.n_ctx)
    fitting = growth.largest(GiB)
    assert growth.needed(fitting) <= GiB < growth.needed(fitting + 1) + growth.slope
