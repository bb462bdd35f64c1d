"""Files of each earlier format are read, or refused with the sentence that stands in docs/reference/versions.md."""

from __future__ import annotations

import dataclasses
import json
import re
import zlib
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from pyorch.cluster import activations, costs
from pyorch.cluster.placement import placement
from pyorch.convert import pack as packing
from pyorch.errors import FormatError
from pyorch.eval import sweep
from pyorch.library.bindings import ABI
from pyorch.runtime.model_map import ModelMap
from pyorch.sidecars import buddies, container, eviction, ghosts, history, memory_plan, packs, predictor, tuned_setting
from pyorch.sidecars.buddies import Buddies
from pyorch.sidecars.history import ExpertMaps
from pyorch.sidecars.predictor import PredictorFile
from pyorch.traces import file as traces
from pyorch.traces.file import Trace, TraceHeader, TraceWriter

PAGE = " ".join((Path(__file__).parents[1] / "docs/reference/versions.md").read_text().replace('"', "`").split())


@pytest.fixture
def model_map(small_moe: Path, tmp_path: Path):
    (tmp_path / "MODEL.gguf").symlink_to(small_moe)
    with ModelMap(tmp_path / "MODEL.gguf") as model_map:
        yield model_map


def test_the_page_has_the_formats_that_are_written() -> None:
    named = {name.strip("` "): int(version) for name, version in re.findall(r"\| ([^|]+) \| [^|]+ \| (\d+) \|", PAGE)}
    assert named == {
        "trace": traces.VERSION,
        **{f"MODEL.{kind.KIND}.gguf": kind.VERSION for kind in (predictor, buddies, ghosts, history, packs)},
        "MODEL.plan.json": memory_plan.VERSION, "MODEL.tuned.json": tuned_setting.VERSION,
        "placement": placement.VERSION, "counts of activations": activations.VERSION, "costs": costs.VERSION,
        "record of a sweep": sweep.VERSION, "warm-*.gguf` in the cache folder": eviction.VERSION,
    }
    assert f"`PYORCH_ABI` in `native/include/pyorch.h` is now {ABI}." in PAGE


def write_former(path: Path, kind: str, version: int, model_map: ModelMap, metadata: dict, arrays: dict) -> None:
    """A sidecar as it was written before sidecars had checksums."""
    writer = container.new_writer(path, kind, version, model_map, metadata)
    for name, values in arrays.items():
        writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def layers_of(model_map: ModelMap) -> list[int]:
    return [layer.il for layer in model_map.layers]


@pytest.mark.parametrize(("version", "absent"), [(1, ["states", "compute_ms"]), (2, ["compute_ms"])])
def test_a_trace_of_an_older_version_is_read_and_appended_to(tmp_path: Path, version: int, absent: list[str]) -> None:
    path, header = tmp_path / "x.trace", TraceHeader("0" * 64, "qwen2moe", (1, 2, 5), 16, 4, 8, n_inputs=5)
    records = np.zeros(10, header.record_dtype())
    records["token"] = np.arange(10)
    fields = dataclasses.asdict(header)
    for name in absent:
        del fields[name]
    text = json.dumps(fields).encode()
    begin = b"PYORCHTR" + np.array([version, len(text), zlib.crc32(text)], "<u4").tobytes() + text
    slots = np.zeros(header.n_inputs, header.slot_dtype())
    path.write_bytes(begin.ljust(traces.HEADER_BYTES, b"\0") + slots.tobytes() + records.tobytes())
    trace = Trace(path)
    assert trace.header == header and np.array_equal(trace.records, records)
    with TraceWriter(path, dataclasses.replace(header, compute_ms=2.5), append=True) as writer:
        writer.write(records)
    assert Trace(path).header == header and len(Trace(path)) == 20


def test_buddies_with_factors_are_read(model_map: ModelMap, tmp_path: Path) -> None:
    n = model_map.layers[0].n_expert
    of_layer = {
        "ids": (np.arange(n, dtype=np.int32)[:, None] + 1) % n, "q": np.full((n, 1), 0.5, np.float32),
        "scale": np.full((n, 1), np.nan, np.float32), "activations": np.arange(n),
        "tae_percentiles": np.linspace(0, 1, 101, dtype=np.float32),
        "margin_percentiles": np.linspace(0, 1, 101, dtype=np.float32),
    }
    layers, path = layers_of(model_map), tmp_path / "MODEL.buddies.gguf"
    write_former(path, "buddies", 1, model_map, {
        "layers": layers, "alpha": [0.9] * len(layers), "similarity": "coactivation", "n_tokens": 100,
    }, {f"blk.{il}.{name}": values for il in layers for name, values in of_layer.items()})
    found = Buddies.read(path, model_map)
    assert found.alpha == dict.fromkeys(layers, 0.9) and found.n_tokens == 100
    assert all(np.array_equal(found.layers[il].ids, of_layer["ids"]) for il in layers)


def test_maps_with_the_uses_of_each_request_are_read(model_map: ModelMap, tmp_path: Path) -> None:
    of_model = ExpertMaps.for_model(model_map)
    shape, path = (of_model.n_layers, of_model.n_expert), tmp_path / "MODEL.maps.gguf"
    maps = np.full((2, *shape), 1 / of_model.n_expert, np.float32)
    requests = np.arange(3 * np.prod(shape), dtype=np.float32).reshape(3, *shape)
    write_former(path, "maps", 1, model_map, {
        "layers": [layer.il for layer in model_map.decoded_layers], "capacity": 10, "distance": 3, "n_requests": 300,
    }, {"embeddings": np.zeros((2, of_model.n_embd), np.float32), "maps": maps, "requests": requests})
    found = ExpertMaps.read(path, model_map)
    assert found.n_maps == 2 and np.array_equal(found.uses, requests.sum(axis=0))


def default_vectors(model_map: ModelMap) -> dict[str, np.ndarray]:
    n_embd = model_map.hparam("embedding_length")
    return {f"blk.{layer.il}.{name}": values for layer in model_map.layers for name, values in (
        ("default_vectors", np.ones((layer.n_expert, n_embd), np.float32)), ("counts", np.arange(layer.n_expert)))}


def test_a_predictor_without_times_is_read(model_map: ModelMap, tmp_path: Path) -> None:
    path = tmp_path / "MODEL.predictor.gguf"
    write_former(path, "predictor", 2, model_map, {"n_tokens": 100, "distance": 2}, default_vectors(model_map))
    found = PredictorFile.read(path, model_map)
    assert (found.distance, found.compute_ms, found.curve, found.estimator) == (2, None, None, None)
    assert found.default_vectors.n_tokens == 100 and found.default_vectors.vectors[layers_of(model_map)[0]].all()


def former_predictor(path: Path, model_map: ModelMap) -> Callable[[], object]:
    write_former(path, "predictor", 1, model_map, {"n_tokens": 100}, default_vectors(model_map))
    return lambda: PredictorFile.read(path, model_map)


def former_ghosts(path: Path, model_map: ModelMap) -> Callable[[], object]:
    layers = layers_of(model_map)
    write_former(path, "ghosts", 1, model_map, {"layers": layers, "n_inputs": 100},
                 {f"blk.{il}.rank": np.full(model_map.layer(il).n_expert, -1, np.int32) for il in layers})
    return lambda: ghosts.Ghosts.read(path, model_map)


def former_pack(path: Path, model_map: ModelMap) -> Callable[[], object]:
    """It said "layout" once, and not of each matrix."""
    packing.pack(model_map.path, path)
    path.write_bytes(path.read_bytes().replace(b"experts.layouts", b"experts.layout_"))
    return lambda: model_map.attach_pack(path)


def pack_with_lz4(path: Path, model_map: ModelMap) -> Callable[[], object]:
    packing.pack(model_map.path, path)
    name = packs.index_name(layers_of(model_map)[0])
    found = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == name)
    rows, at = np.array(found.data).view(packs.CHUNK), int(found.data_offset)
    rows["codec"] = 2
    with path.open("r+b") as file:
        file.seek(at)
        file.write(rows.tobytes())
    return lambda: model_map.attach_pack(path)


def former_warm_memory(path: Path, model_map: ModelMap) -> Callable[[], object]:
    write_former(path, "eviction", 1, model_map, {}, {
        "weights": np.zeros(8, np.float32), "resident": np.array([[layers_of(model_map)[0], 0]], np.int32)})
    return lambda: eviction.read(path, model_map)


def json_of(kind: str, version: int, read: Callable) -> Callable[[Path, ModelMap], Callable[[], object]]:
    """A file that pyorch.sidecars.json_file read or would have read; what else it holds is not looked at."""
    def write(path: Path, model_map: ModelMap) -> Callable[[], object]:
        path.write_text(json.dumps({"kind": kind, "version": version, "model": "MODEL.gguf",
                                    "fingerprint": container.fingerprint(model_map)}))
        return lambda: read(path, model_map)
    return write


def record_of(version: int) -> Callable[[Path, ModelMap], Callable[[], object]]:
    def write(path: Path, _: ModelMap) -> Callable[[], object]:
        path.write_text(json.dumps({"version": version, "conditions": {}, "judgements": {}, "speeds": {}}))
        return lambda: sweep.Record(path, {})
    return write


def trace_to_come(path: Path, _: ModelMap) -> Callable[[], object]:
    path.write_bytes((b"PYORCHTR" + np.array([traces.VERSION + 1, 0, 0], "<u4").tobytes()).ljust(traces.HEADER_BYTES))
    return lambda: Trace(path)


@pytest.mark.parametrize(("name", "write"), [
    ("MODEL.predictor.gguf", former_predictor),
    ("MODEL.ghosts.gguf", former_ghosts),
    ("MODEL.experts.gguf", former_pack),
    ("MODEL.experts.gguf", pack_with_lz4),
    ("MODEL.plan.json", json_of("pyorch plan", 1, memory_plan.read_plan)),
    ("MODEL.tuned.json", json_of("pyorch tuned setting", 2, tuned_setting.read_tuned)),
    ("MODEL.profile.json", json_of("pyorch profile", 1, tuned_setting.read_tuned)),
    ("sweep.json", record_of(4)),
    ("warm.gguf", former_warm_memory),
    ("x.trace", trace_to_come),
], ids=lambda value: getattr(value, "__name__", value))
def test_a_refused_file_is_refused_in_the_words_of_the_page(
    model_map: ModelMap, tmp_path: Path, name: str, write: Callable[[Path, ModelMap], Callable[[], object]]
) -> None:
    read = write(tmp_path / name, model_map)
    with pytest.raises(FormatError) as refused:
        read()
    sentence = str(refused.value).replace(f"{tmp_path}/", "").replace('"', "`")
    assert f"- `{sentence}`" in PAGE


@pytest.mark.parametrize(("write", "version", "now"), [
    *((json_of("pyorch tuned setting", version, tuned_setting.read_tuned), version, 3) for version in (1, 2)),
    *((record_of(version), version, 5) for version in (1, 2, 3, 4)),
])
def test_all_other_former_formats_are_refused_by_their_number(
    model_map: ModelMap, tmp_path: Path, write: Callable, version: int, now: int
) -> None:
    with pytest.raises(FormatError, match=rf"has version {version}\b.* {now}:"):
        write(tmp_path / "former.json", model_map)()
