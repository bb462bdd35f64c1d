"""With little memory, layers of a prompt are streamed, or computed in narrower ubatches: the bits stay the same."""

from __future__ import annotations

import shutil
from pathlib import Path

import llama_cpp.llama_cpp as llama
import numpy as np
import pytest
from models import assert_same_bits, small_model

import pyorch
from pyorch.convert import pack as packing
from pyorch.llama import measure, memory
from pyorch.llama.context import Context
from pyorch.llama.model import Model
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.budget import RESIDENT
from pyorch.sizes import GiB

N_CTX, N_BATCH = 4096, 512


def logits(model: Model, tokens: list[int]) -> np.ndarray:
    """After a prompt, and after each of some tokens behind it: in the context that the model was loaded with."""
    rows = []
    for some in (tokens, *([token] for token in tokens[:6])):
        model.llama.eval(some)
        last = llama.llama_get_logits_ith(model.llama.ctx, -1)
        rows.append(np.ctypeslib.as_array(last, (model.llama.n_vocab(),)).copy())
    return np.stack(rows)


def context_bytes(path: Path, n_ubatch: int) -> int:
    """Of the context that logits() computes in."""
    model_params, params = llama.llama_model_default_params(), llama.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = N_CTX, N_BATCH, n_ubatch
    with ModelMap(path) as model_map, measure.twin(str(path), model_params) as twin:
        return measure.context_sizes(twin, params, model_map).host


def test_where_buffers_leave_less_than_the_floor_the_ubatch_is_narrower(
    small_moe: Path, prompt_tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, options = 3 * prompt_tokens, {"n_ctx": N_CTX, "n_batch": N_BATCH, "n_threads": 2}
    with ModelMap(small_moe) as model_map:
        info = model_map.info
    limit = memory.MemoryLimit("cgroup /job", GiB, 0)
    free = limit.margin_bytes + context_bytes(small_moe, 64) + info.floor_bytes
    assert context_bytes(small_moe, 64) < context_bytes(small_moe, 128)
    assert free > limit.margin_bytes + info.dense_bytes + info.floor_bytes, "else loading is refused"
    with monkeypatch.context() as tight:
        tight.setattr(memory, "memory_limit", lambda: memory.MemoryLimit("cgroup /job", GiB, free))
        with pyorch.load(small_moe, **options) as model:
            assert llama.llama_n_ubatch(model.llama.ctx) == 64 < len(tokens)
            assert info.floor_bytes <= model.stats().experts.budget_bytes < 1.1 * info.floor_bytes
            narrow = logits(model, tokens)
    with pyorch.load(small_moe, budget=RESIDENT, n_ubatch=64, **options) as model:
        assert_same_bits(narrow, logits(model, tokens))


@pytest.mark.parametrize("layout", packing.LAYOUTS)
def test_a_layer_that_is_streamed_from_a_pack(
    small_moe_q4: Path, prompt_tokens: list[int], tmp_path: Path, layout: str
) -> None:
    model_path = Path(shutil.copy(small_moe_q4, tmp_path / "model.gguf"))
    made = packing.pack(model_path, layout=layout)
    found = []
    with ModelMap(model_path) as model_map:
        floor = model_map.info.floor_bytes
    ways = ({}, {"reads": "threads:2"}, {"direct_io": False})
    for budget, options in ((RESIDENT, {}), *((floor, way) for way in ways)):
        with small_model(model_path, budget, **options) as model:
            with Context(model.llama.model, n_ctx=256, n_batch=128, n_ubatch=32) as context:
                found.append(context.decode(prompt_tokens))
            if budget == RESIDENT:
                continue
            assert model.map.pack == made.path
            experts = model.stats().experts
            used = (experts.hits + experts.misses) / experts.layer_passes
            assert used * model.map.layers[0].slot_bytes > experts.budget_bytes >= experts.peak_bytes
    for streamed in found[1:]:
        assert_same_bits(streamed, found[0])
