"""Experts come from the pack beside a model, with the same bits; and from the model where the pack is no good."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from architectures import Zoo
from buddy_lists import N_EXPERT, N_LAYERS, random_buddies
from models import assert_same_bits, small_model
from processes import python

from pyorch.convert import pack as packing
from pyorch.errors import PyorchError
from pyorch.llama import managed
from pyorch.llama.context import Context
from pyorch.llama.model import Model
from pyorch.sidecars import container, packs


@pytest.fixture
def model(small_moe: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(small_moe, tmp_path / "model.gguf"))


@pytest.fixture
def packed(model: Path) -> Path:
    packing.pack(model)
    return model


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What people are told about packs that are refused."""
    lines: list[str] = []
    monkeypatch.setattr(managed.fatal, "notice", lines.append)
    monkeypatch.setattr(managed, "_noted", set())
    return lines


def pack_of(model: Path) -> Path:
    return container.default_path(model, packs.KIND)


def logits(model: Model, tokens: list[int]) -> np.ndarray:
    with Context(model.llama.model, n_ctx=256, n_batch=128, n_ubatch=16, n_threads=1) as ctx:
        return np.concatenate([ctx.decode(tokens), *(ctx.decode([token]) for token in tokens[:12])])


def test_logits_are_those_of_the_resident_model(packed: Path, resident: Model, prompt_tokens: list[int]) -> None:
    expected = logits(resident, prompt_tokens)
    plain_slots = resident.map.info.slots_bytes
    for options in ({}, {"direct_io": False}, {"reads": "threads:3"}, {"prefetch": "quasi-hidden:2:0"}):
        with small_model(packed, "30%", **options) as model:
            assert model.map.pack == pack_of(packed)
            assert_same_bits(logits(model, prompt_tokens), expected)
            experts = model.stats().experts
            assert experts.misses > 0 and experts.evictions > 0
            assert experts.peak_bytes <= experts.budget_bytes <= 0.31 * plain_slots
    with small_model(packed, "30%", packed=False) as model:
        assert model.map.pack is None
        assert_same_bits(logits(model, prompt_tokens), expected)


@pytest.mark.parametrize(("name", "type_name"), [("mixtral", "F32"), ("gpt-oss-mxfp4", "MXFP4"),
                                                 ("qwen3-next-fused", "BF16")])
def test_logits_of_other_architectures_are_too(zoo: Zoo, tmp_path: Path, name: str, type_name: str) -> None:
    """Large experts, which are read directly; biases, which stay in the model; gate and up in one matrix."""
    model = tmp_path / "model.gguf"
    model.symlink_to(zoo.path(name, type_name))
    tokens = [1, 5, 9, 2, 30, 7, 4, 3, 8, 11]
    with small_model(model, "30%", prefetch="none") as plain:
        expected = logits(plain, tokens)
    packing.pack(model)
    with small_model(model, "30%", prefetch="none") as from_pack:
        assert_same_bits(logits(from_pack, tokens), expected)
        experts, layer = from_pack.stats().experts, from_pack.map.layers[0]
        assert experts.bytes_read == experts.loads * layer.slot_bytes
        assert layer.slot_bytes - layer.expert_bytes < packs.PAGE


@pytest.fixture(scope="module")
def compressed_with(small_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The model beside its pack of some codec, made once."""
    @functools.cache
    def made(codec: str) -> Path:
        model = tmp_path_factory.mktemp(codec) / "model.gguf"
        model.symlink_to(small_moe)
        packing.pack(model, codec=codec)
        return model

    return made


@pytest.mark.parametrize(("codec", "options"), [
    ("table", {"pools": "1,0,0,0"}), ("zstd", {"pools": "0.5,0.5,0,0", "prefetch": "quasi-hidden:2:0"}),
    ("zstd", {"pools": "0.4,0.3,0.2,0.1", "budget": "60%", "policy": "learned", "reads": "threads:2"}),
    ("table", {"pools": "0,0,0.5,0.5", "budget": "14%"}),  # layers are streamed
    ("table", {"pools": "0.4,0.3,0.2,0.1", "recovery": "affinity", "prefetch": "quasi-hidden:2:0"}),
    ("zstd", {"pools": "1,0,0,0", "recovery": "affinity", "reads": "threads:2"}),
    ("table", {"pools": "0.3,0.2,0.2,0.3", "recovery": "exponents-first", "reads": "threads:2"}),
    ("zstd", {"pools": "1,0,0,0", "recovery": "exponents-first", "prefetch": "quasi-hidden:2:0"}),
])
def test_logits_of_a_compressed_pack_are_too_in_every_mix_of_forms(
    compressed_with: Callable[[str], Path], resident: Model, prompt_tokens: list[int], codec: str,
    options: dict[str, str]
) -> None:
    expected = logits(resident, prompt_tokens)
    model = compressed_with(codec)
    with small_model(model, **{"budget": "40%", **options}) as compressed:
        assert compressed.map.pack == pack_of(model)
        for _ in range(2):
            assert_same_bits(logits(compressed, prompt_tokens), expected)
        experts = compressed.stats().experts
        assert experts.decoded_bytes > 0 and experts.evictions > 0 and experts.failures == 0
        assert experts.peak_bytes <= experts.budget_bytes
        if options["pools"] != "1,0,0,0":
            assert experts.compressed_hits + experts.sm_hits + experts.e_hits > 0 and experts.stored_bytes > 0
            compressed.engine.set_pools("1,0,0,0")
            compressed.engine.wait_idle()  # what was being read ahead is stored until it is decoded
            assert compressed.stats().experts.stored_bytes == 0
            assert_same_bits(logits(compressed, prompt_tokens), expected)
        else:
            assert experts.compressed_hits == experts.stored_bytes == 0


_BUDGETS = ("14%", "20%", "30%", "45%", "60%", "80%", "100%")
_WAYS = (
    {"pools": "1,0,0,0", "prefetch": "none"}, {"pools": "0,1,0,0", "policy": "lru", "prefetch": "quasi-hidden:2:0"},
    {"pools": "0,0,1,0", "direct_io": False}, {"pools": "0,0,0,1", "prefetch": "quasi-hidden"},
    {"pools": "0.25,0.25,0.25,0.25", "policy": "learned", "prefetch": "quasi-hidden:2:0"},
    {"pools": "0.6,0,0.4,0", "policy": "lfu", "reads": "threads:2"}, {},
)


@pytest.mark.parametrize(("nth", "codec"), [(0, "zstd"), (1, "table")])
def test_logits_are_the_same_with_every_codec_at_every_budget(
    compressed_with: Callable[[str], Path], resident: Model, prompt_tokens: list[int], nth: int, codec: str
) -> None:
    """Each codec at each budget, and each with another mix of forms, eviction and reading ahead."""
    tokens, n_in_part = prompt_tokens[:40], 0
    expected = logits(resident, tokens)
    for i, budget in enumerate(_BUDGETS):
        options = _WAYS[(i + 2 * nth) % len(_WAYS)]
        with small_model(compressed_with(codec), budget, **options) as compressed:
            assert_same_bits(logits(compressed, tokens), expected)
            assert_same_bits(logits(compressed, tokens), expected)
            experts = compressed.stats().experts
            assert experts.failures == 0 and experts.peak_bytes <= experts.budget_bytes, (budget, options)
            n_in_part += experts.compressed_hits + experts.sm_hits + experts.e_hits
    assert n_in_part > 0


@pytest.mark.parametrize("options", [
    {"prefetch": "none"}, {"direct_io": False, "prefetch": "quasi-hidden"}, {"policy": "lru", "reads": "threads:2"},
    {"budget": "100%", "n_threads": 2}, {"budget": "14%"},  # layers are streamed
])
def test_logits_are_the_same_computed_from_nibbles(
    compressed_with: Callable[[str], Path], resident: Model, prompt_tokens: list[int], options: dict[str, object]
) -> None:
    """Slots hold what the pack holds. Nothing is recovered, and they are smaller but for rows of 32 numbers (down)."""
    expected = logits(resident, prompt_tokens)
    with small_model(compressed_with("nibble"), **{"budget": "30%", **options}) as model:
        assert model.map.info.slots_bytes < 0.87 * resident.map.info.slots_bytes
        for _ in range(2):
            assert_same_bits(logits(model, prompt_tokens), expected)
        experts = model.stats().experts
        assert experts.failures == experts.decoded_bytes == experts.stored_bytes == 0
        assert experts.loads > 0 and experts.peak_bytes <= experts.budget_bytes


def test_nibbles_are_of_no_use_where_experts_are_computed_as_they_lie_in_the_model(
    compressed_with: Callable[[str], Path], told: list[str]
) -> None:
    with small_model(compressed_with("nibble"), "30%", use_extra_bufts=False) as model:
        assert model.map.pack is None and "plain and stock kernels do not compute" in told[0]
    with pytest.raises(PyorchError, match="has no compressed pack with several forms"):
        small_model(compressed_with("nibble"), "30%", pools="0,1,0,0")


def test_an_order_of_recovery_without_a_compressed_pack_is_refused(
    compressed_with: Callable[[str], Path], model: Path
) -> None:
    with pytest.raises(PyorchError, match="has no compressed pack with several forms.*or leave out --recovery"):
        small_model(compressed_with("nibble"), "30%", recovery="affinity")
    with pytest.raises(PyorchError, match="has no compressed pack: make one with .*, or leave out --recovery"):
        small_model(model, "30%", recovery="affinity")
    with pytest.raises(PyorchError, match="with --no-pack .* none is read"):
        small_model(compressed_with("table"), "30%", recovery="affinity", packed=False)
    with pytest.raises(PyorchError, match="recovery is arrival, and must be kernels, affinity or exponents-first"):
        small_model(model, "30%", recovery="arrival")


def test_buddies_stand_in_for_the_same_experts_with_a_compressed_pack(model: Path, prompt_tokens: list[int]) -> None:
    """With a given cache, for which whoever is missing is decided."""
    def lossy(**options: str) -> tuple[np.ndarray, int]:
        with small_model(model, "25%", prefetch="none", **options) as loaded:
            loaded.substitute("prefill=1,rho=3", random_buddies(2))
            loaded.set_cache({il: np.arange(N_EXPERT) % 2 == 0 for il in range(N_LAYERS)})
            return logits(loaded, prompt_tokens[:40]), loaded.stats().substitution.substituted

    expected, n_expected = lossy()
    packing.pack(model, codec="zstd", level=1)
    found, n_found = lossy(pools="0.4,0.6,0,0")
    assert_same_bits(found, expected)
    assert n_found == n_expected > 100


def damage(pack: Path, il: int) -> None:
    """Changes a bit of every matrix of a layer."""
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(pack, "r+").tensors}
    index = tensors[packs.index_name(il)].data.view(packs.CHUNK)[:, 0]
    data = tensors[packs.data_name(il)].data.view(np.uint8)
    data[index["offset"] + index["stored"] // 2] ^= 4


@pytest.mark.parametrize("codec", ["none", "nibble"])
def test_damaged_experts_are_read_from_the_model_and_that_is_said_once(
    model: Path, resident: Model, prompt_tokens: list[int], codec: str
) -> None:
    packing.pack(model, codec=codec)
    packed = model
    damage(pack_of(packed), 3)
    program = f"""
import numpy as np
from pathlib import Path
from pyorch.llama.model import load
from pyorch.llama.context import Context
with load({str(packed)!r}, budget="30%", n_ctx=256, n_batch=256, n_threads=2) as model:
    assert model.map.pack
    with Context(model.llama.model, n_ctx=256, n_batch=128, n_ubatch=16, n_threads=1) as it:
        tokens = {prompt_tokens}
        logits = np.concatenate([it.decode(tokens), *(it.decode([token]) for token in tokens[:12])])
        np.save({str(packed.parent / "logits.npy")!r}, logits)
    assert model.stats().experts.failures == 0
"""
    done = python("-c", program)
    assert done.returncode == 0, done.stderr
    assert_same_bits(np.load(packed.parent / "logits.npy"), logits(resident, prompt_tokens))
    lines = [line for line in done.stderr.splitlines() if "note" in line]
    assert len(lines) == 1 and "ffn_" in lines[0] and str(pack_of(packed)) in lines[0]
    assert "what was read is damaged" in lines[0]


def test_damaged_experts_of_a_native_pack_are_read_from_the_model_and_repacked(
    model: Path, small_moe_q4: Path, prompt_tokens: list[int]
) -> None:
    shutil.copy(small_moe_q4, model)
    with small_model(model, "30%") as without:
        expected = logits(without, prompt_tokens)
    packing.pack(model, layout="native")
    damage(pack_of(model), 3)
    with small_model(model, "30%") as loaded:
        assert loaded.map.pack == pack_of(model)
        assert_same_bits(logits(loaded, prompt_tokens), expected)
        assert loaded.stats().experts.failures == 0


def test_a_pack_that_does_not_belong_there_is_refused_once(
    packed: Path, small_moe_q4: Path, resident: Model, prompt_tokens: list[int], told: list[str]
) -> None:
    tokens = prompt_tokens[:20]
    expected = logits(resident, tokens)
    whole = pack_of(packed).read_bytes()
    other = Path(shutil.copy(small_moe_q4, packed.with_name("other.gguf")))
    packing.pack(other)
    cases = {
        "belongs to another model": pack_of(other).read_bytes(),
        "is damaged or cut off": whole[: len(whole) // 2],
        "do not compute with": whole.replace(b"\x05\0\0\0\0\0\0\0plain", b"\x05\0\0\0\0\0\0\0wheat", 1),
        "does not begin with GGUF": b"",
    }
    for sentence, content in cases.items():
        pack_of(packed).write_bytes(content)
        told.clear()
        for _ in range(2):
            with small_model(packed, "30%") as model:
                assert model.map.pack is None
                assert_same_bits(logits(model, tokens), expected)
        assert len(told) == 1 and sentence in told[0] and str(pack_of(packed)) in told[0], (sentence, told)
        assert told[0].endswith(f"the experts are read from {packed}")


def test_a_native_pack_is_used_by_the_kernels_that_want_it(
    model: Path, small_moe_q4: Path, prompt_tokens: list[int], told: list[str]
) -> None:
    shutil.copy(small_moe_q4, model)
    expected = []
    for layout in (None, "plain", "native"):
        if layout:
            packing.pack(model, layout=layout)
        for repack in (True, False):
            with small_model(model, "30%", use_extra_bufts=repack) as loaded:
                expected.append(logits(loaded, prompt_tokens))
                is_repacked = loaded.map.layers[0].roles[0].layout != packs.PLAIN
                if layout == "native" and is_repacked and not repack:
                    assert loaded.map.pack is None
                    assert len(told) == 1 and "the plain kernels do not compute with" in told[0]
    for plain, from_pack in zip(expected[:2] * 2, expected[2:]):
        assert_same_bits(from_pack, plain)


@pytest.mark.parametrize("codec", ["none", "nibble"])
@pytest.mark.parametrize("column", packs.CHUNK.names[:-1])
@pytest.mark.parametrize("value", [-1, 1, 1 << 40])
def test_an_index_that_lies_is_refused(model: Path, codec: str, column: str, value: int) -> None:
    pack = packing.pack(model, codec=codec).path
    reader = gguf.GGUFReader(pack, "r+")
    rows = next(tensor for tensor in reader.tensors if tensor.name == packs.index_name(5)).data.view(packs.CHUNK)
    rows[column][8, 0] = value + (rows[column][8, 0] if column in ("offset", "stored", "raw") else 0)
    reader.data.flush()
    with pytest.raises(PyorchError) as refused, packing.ModelMap(model) as model_map:
        model_map.attach_pack(pack)
    assert str(pack) in str(refused.value)
