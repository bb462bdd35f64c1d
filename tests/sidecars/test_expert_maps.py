"""Expert maps: search and replacement against brute force, the predictor that learns from them, the sidecar."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import parts
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_build import built_tests
from processes import HANG_SECONDS

from pyorch.cli import main
from pyorch.errors import FormatError, PyorchError
from pyorch.runtime.engine import Engine
from pyorch.runtime.model_map import ModelMap
from pyorch.sidecars import container
from pyorch.sidecars.history import KIND, VERSION, ExpertMaps, token_embeddings
from pyorch.traces.expert_maps import maps_from_trace
from pyorch.traces.file import Trace, TraceHeader, TraceWriter

CLOSE = 2e-5  # cosines of float32 sums


@pytest.fixture(scope="module")
def model_map(small_moe: Path) -> Iterator[ModelMap]:
    with ModelMap(small_moe) as model_map:
        yield model_map


def random_maps(random: np.random.Generator, *shape: int) -> np.ndarray:
    """Distributions in the last dimension, peaked as those of routers."""
    values = random.gamma(0.3, size=shape) + 1e-6
    return (values / values.sum(axis=-1, keepdims=True)).astype(np.float32)


def cosines(one: np.ndarray, many: np.ndarray) -> np.ndarray:
    """float64[n]: of a flattened array with each of many; nan where one of them has no direction."""
    a, b = one.astype(np.float64).ravel(), many.astype(np.float64).reshape(len(many), one.size)
    norms = np.linalg.norm(a) * np.linalg.norm(b, axis=1)
    return np.divide(b @ a, norms, out=np.full(len(b), np.nan), where=norms > 0)


def assert_found(found, expected: np.ndarray) -> None:
    """The best of the expected cosines, or one as good."""
    if np.isnan(expected).all():
        assert found == (-1, 0)
        return
    assert found.score == pytest.approx(np.nanmax(expected), abs=CLOSE)
    assert expected[found.entry] == pytest.approx(np.nanmax(expected), abs=CLOSE)


# The store


@settings(max_examples=80)
@given(n_layers=st.integers(1, 5), n_expert=st.integers(1, 40), n_embd=st.integers(0, 20), capacity=st.integers(1, 6),
       n=st.integers(0, 12), distance=st.integers(1, 7), seed=st.integers(0, 10_000))
def test_search_and_replacement_are_those_of_brute_force(
    n_layers: int, n_expert: int, n_embd: int, capacity: int, n: int, distance: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    store = ExpertMaps(n_layers, n_expert, n_embd, capacity, distance)
    embeddings, maps = np.zeros((0, n_embd), np.float32), np.zeros((0, n_layers, n_expert), np.float32)
    for _ in range(n):
        map = random_maps(random, n_layers, n_expert)
        map[: random.integers(0, 2)] = 0  # a first layer that says nothing
        embedding = random.normal(size=n_embd).astype(np.float32) * random.integers(0, 2)
        for known in range(1, n_layers + 1):
            assert_found(parts.search_map(store, map[:known]), cosines(map[:known], maps[:, :known]))
        assert_found(parts.search_embedding(store, embedding), cosines(embedding, embeddings))

        store.add(map, embedding if random.integers(0, 2) or embedding.any() else None)
        there = store.export()
        if len(maps) < capacity:
            embeddings, maps = np.concatenate([embeddings, [embedding]]), np.concatenate([maps, [map]])
        else:
            share = min(1.0, distance / n_layers)
            redundancy = (share * np.nan_to_num(cosines(embedding, embeddings))
                          + (1 - share) * np.nan_to_num(cosines(map, maps)))
            changed = (there.maps != maps).any(axis=(1, 2)) | (there.embeddings != embeddings).any(axis=1)
            assert changed.sum() <= 1
            if changed.any():
                assert redundancy[changed][0] == pytest.approx(redundancy.max(), abs=CLOSE)
                maps[changed], embeddings[changed] = map, embedding
        np.testing.assert_array_equal(there.maps, maps)
        np.testing.assert_array_equal(there.embeddings, embeddings)
        assert store.n_maps == len(maps)


def test_the_most_redundant_iteration_goes_and_the_others_stay() -> None:
    store = ExpertMaps(2, 4, 2, capacity=3, distance=1)
    for expert, embedding in ((0, (1, 0)), (1, (1, 0)), (2, (0, 1))):
        store.add(np.eye(4)[[expert, expert]], np.array(embedding))
    store.add(np.eye(4)[[1, 3]], np.array((1, 0)))  # half the map of the second, and its embedding
    assert store.export().maps.argmax(axis=2).tolist() == [[0, 0], [1, 3], [2, 2]]
    store.add(np.eye(4)[[3, 3]], np.array((0, 1)))  # an embedding alone: d / L of the score
    assert store.export().maps.argmax(axis=2).tolist() == [[0, 0], [1, 3], [3, 3]]


def test_without_embeddings_only_trajectories_are_alike() -> None:
    store = ExpertMaps(2, 4, 3, capacity=2, distance=1)
    store.add(np.eye(4)[[0, 0]])
    store.add(np.eye(4)[[1, 1]], np.zeros(3))
    assert parts.search_embedding(store, np.ones(3)) == (-1, 0)
    assert parts.search_map(store, np.eye(4)[[1]]) == (1, 1)
    store.add(np.eye(4)[[1, 2]], np.ones(3))
    assert parts.search_embedding(store, np.ones(3)) == (1, pytest.approx(1))


def test_what_cannot_be_is_refused_and_changes_nothing() -> None:
    store = ExpertMaps(2, 4, 3)
    good = np.full((2, 4), 0.25)
    for map, embedding, what in (
        (np.where(np.eye(2, 4) > 0, np.nan, good), np.ones(3), "finite"), (good, np.array([1, np.inf, 0]), "finite"),
        (good[:1], np.ones(3), r"\[1, 4\]"), (good, np.ones(4), r"\[4\]"),
    ):
        with pytest.raises(PyorchError, match=what):
            store.add(map, embedding)
    for sizes in ((0, 4, 3), (2, 0, 3), (2, 4, -1), (2, 4, 3, 0), (2, 4, 3, 1, 0)):
        with pytest.raises(PyorchError):
            ExpertMaps(*sizes)
    assert store.n_maps == 0 and not store


def test_a_store_can_be_read_while_it_is_added_to() -> None:
    store = ExpertMaps(3, 16, 8, capacity=40)
    random = np.random.default_rng(0)
    maps, wrong = random_maps(random, 300, 3, 16), []

    def add() -> None:
        for map in maps:
            store.add(map, map[0, :8])

    writer = threading.Thread(target=add)
    writer.start()
    while writer.is_alive():
        there = store.export()
        wrong += [map for map in there.maps if abs(map.sum() - 3) > 1e-3]
        found = parts.search_map(store, maps[7][:2])
        assert -1 <= found.entry < 40
    writer.join()
    assert not wrong and store.n_maps == 40


# The predictor


@pytest.fixture(scope="module")
def program() -> Path:
    return built_tests("expert_map") / "bin" / "expert_map"


class Script:
    """Events for the program, and what each is to be answered."""

    def __init__(self, n_layers: int, n_expert: int, n_embd: int, capacity: int, distance: int) -> None:
        self.arguments = [str(n) for n in (n_layers, n_expert, n_embd, capacity, distance)]
        self.lines: list[str] = []
        self.expected: list[list[tuple]] = []
        self.sizes: list[int] = []

    def tell(self, *words: object, expected: list[tuple], size: int) -> None:
        numbers = [f"{x:.9g}" for word in words[1:] for x in np.ravel(word)]
        self.lines.append(" ".join([words[0], *numbers]))
        self.expected.append(expected)
        self.sizes.append(size)

    def check(self, program: Path) -> None:
        done = subprocess.run([program, *self.arguments], input="\n".join(self.lines), capture_output=True, text=True,
                              check=True, timeout=HANG_SECONDS)
        answers, forecasts = [], []
        for line in done.stdout.splitlines():
            words = line.split()
            if words[0] == "size":
                answers.append((forecasts, int(words[1])))
                forecasts = []
            else:
                layer, distance, token, n = map(int, words[:4])
                experts = [int(word) for word in words[4 : 4 + n]]
                forecasts.append((layer, distance, token, experts, np.array(words[4 + n :], float)))
        assert len(answers) == len(self.lines)
        for line, (found, size), expected, expected_size in zip(self.lines, answers, self.expected, self.sizes):
            assert [f[:4] for f in found] == [e[:4] for e in expected], line[:40]
            for f, e in zip(found, expected):
                np.testing.assert_allclose(f[4], e[4], atol=1e-6)
            assert size == expected_size, line[:40]
        assert any(self.expected), "nothing was forecast"


def selected(probs: np.ndarray, score: float, k: int) -> list[int]:
    """Eqs. 6 to 8."""
    order = np.argsort(-probs, kind="stable")
    enough = np.cumsum(probs[order], dtype=np.float64) >= min(max(1 - score, 0), 1)
    n = int(enough.argmax()) + 1 if enough.any() else len(order)
    return order[: max(n, k)].tolist()


class Mirror:
    """The iterations of a store, replaced by brute force."""

    def __init__(self, capacity: int, distance: int) -> None:
        self.capacity, self.distance = capacity, distance
        self.entries: list[tuple[np.ndarray, np.ndarray]] = []

    def add(self, embedding: np.ndarray, map: np.ndarray) -> None:
        if len(self.entries) < self.capacity:
            self.entries.append((embedding, map))
            return
        share = min(1.0, self.distance / len(map))
        embeddings, maps = (np.array(arrays) for arrays in zip(*self.entries))
        redundancy = (share * np.nan_to_num(cosines(embedding, embeddings)) + (1 - share) * cosines(map, maps))
        self.entries[int(redundancy.argmax())] = (embedding, map)

    def forecast(
        self, embedding: np.ndarray, rows: np.ndarray, layer: int, k: int
    ) -> tuple[list[int], np.ndarray] | None:
        if not self.entries:
            return None
        embeddings, maps = (np.array(arrays) for arrays in zip(*self.entries))
        scores = cosines(rows, maps[:, : len(rows)]) if len(rows) else cosines(embedding, embeddings)
        if np.isnan(scores).all():
            return None
        best = int(np.nanargmax(scores))
        return selected(maps[best, layer], scores[best], k), maps[best, layer]


@pytest.mark.parametrize("seed, distance, embedded", [(0, 1, True), (1, 2, True), (2, 6, True), (3, 2, False)])
def test_the_expert_map_predictor_forecasts_what_the_most_alike_iteration_did(
    program: Path, seed: int, distance: int, embedded: bool
) -> None:
    n_layers, n_expert, n_embd, k, capacity = 5, 12, 6, 2, 6
    random = np.random.default_rng(seed)
    mirror, script = Mirror(capacity, distance), Script(n_layers, n_expert, n_embd, capacity, distance)
    k_known = 1  # until a layer was routed

    for iteration in range(14):
        n_tokens = int(random.integers(1, 4))
        embeddings = random.normal(size=(n_tokens, n_embd)).astype(np.float32) * embedded
        maps = random_maps(random, n_tokens, n_layers, n_expert)
        decode = iteration != 5  # a prompt among them is not looked at
        forecasts = []
        for t in range(n_tokens if decode else 0):
            for layer in range(min(distance, n_layers)):
                made = mirror.forecast(embeddings[t], maps[t, :0], layer, k_known)
                forecasts += [] if made is None else [(layer, layer + 1, t, *made)]
        shown = embeddings if embedded else []
        script.tell("begin", decode, n_tokens, embedded, shown, expected=forecasts, size=len(mirror.entries))
        for layer in range(n_layers):
            if layer == 2 and iteration in (4, 9, 12):  # another context replaces an entry meanwhile
                embedding, map = random.normal(size=n_embd).astype(np.float32), random_maps(random, n_layers, n_expert)
                mirror.add(embedding, map)
                script.tell("add", embedding, map, expected=[], size=len(mirror.entries))
            forecasts = []
            for t in range(n_tokens if decode else 0):
                if layer + distance < n_layers:
                    made = mirror.forecast(embeddings[t], maps[t, : layer + 1], layer + distance, k)
                    forecasts += [] if made is None else [(layer + distance, distance, t, *made)]
                if layer == n_layers - 1:
                    mirror.add(embeddings[t], maps[t])
            experts = np.argsort(-maps[:, layer], axis=1)[:, :k]
            script.tell("routed", layer, n_tokens, k, decode, 1, experts, maps[:, layer], expected=forecasts,
                        size=len(mirror.entries))
            k_known = k if decode else k_known
    script.check(program)


def test_an_iteration_that_is_not_whole_is_not_kept(program: Path) -> None:
    script = Script(3, 4, 2, 5, 1)
    probs, experts = np.full(4, 0.25), [0, 1]

    def routed(layer: int, kept: int, expected: tuple[tuple, ...] = ()) -> None:
        script.tell("routed", layer, 1, 2, 1, 1, experts, probs, expected=list(expected), size=kept)

    script.tell("begin", 1, 1, 1, [1, 0], expected=[], size=0)
    routed(0, 0)
    routed(2, 0)  # layer 1 was not seen
    script.tell("begin", 1, 1, 1, [1, 0], expected=[], size=0)
    routed(0, 0)
    script.tell("routed", 1, 1, 2, 1, 0, experts, expected=[], size=0)  # without probabilities
    routed(2, 0)
    script.tell("begin", 1, 1, 1, [1, 0], expected=[], size=0)
    for layer in range(3):
        routed(layer, layer // 2)
    script.tell("begin", 1, 1, 1, [2, 0], expected=[(0, 1, 0, [0, 1], probs)], size=1)
    script.check(program)


# Traces


def write_trace(path: Path, model_map: ModelMap, n: int = 60, router: str = "full") -> Path:
    """Random tokens of five requests, in a batch: their records are mixed."""
    random = np.random.default_rng(4)
    layers = tuple(layer.il for layer in model_map.layers)
    header = TraceHeader(container.fingerprint(model_map), model_map.info.arch, layers, 64, 6, 128, router=router)
    records = np.zeros(n, header.record_dtype())
    records["request"] = np.arange(n) % 5
    records["token"] = random.integers(0, 500, n)
    probs = random_maps(random, n, len(layers), 64)
    records["experts"] = np.argsort(-probs, axis=2)[:, :, :6]
    if router == "full":
        records["router"] = probs
    with TraceWriter(path, header) as writer:
        writer.write(records)
    return path


@pytest.mark.parametrize("quantized", [False, True])
def test_embeddings_are_the_rows_of_the_token_table(small_moe: Path, small_moe_q4: Path, quantized: bool) -> None:
    path = small_moe_q4 if quantized else small_moe
    table, = (tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == "token_embd.weight")
    expected = gguf.quants.dequantize(table.data, table.tensor_type)
    with ModelMap(path) as model_map:
        found = token_embeddings(model_map, np.array([7, 3, 7, len(expected) - 1]))
        assert found.dtype == np.float32
        assert model_map.tensor_range("token_embd.weight").type == table.tensor_type.name.lower()
        np.testing.assert_array_equal(found, expected[[7, 3, 7, -1]])
        assert token_embeddings(model_map, np.zeros(0, int)).shape == (0, 128)
        for token in (-1, len(expected)):
            with pytest.raises(PyorchError, match=f"not {token} to {token}"):
                token_embeddings(model_map, np.array([token]))


def test_a_trace_gives_its_tokens_and_its_uses(model_map: ModelMap, tmp_path: Path) -> None:
    trace = Trace(write_trace(tmp_path / "t.trace", model_map))
    there = maps_from_trace(trace, model_map).export()
    np.testing.assert_array_equal(there.maps, trace.records["router"].astype(np.float32))
    np.testing.assert_array_equal(there.embeddings, token_embeddings(model_map, trace.records["token"]))
    expected = np.zeros((8, 64))
    for record in trace.records:
        for layer, experts in enumerate(record["experts"]):
            expected[layer, experts] += 1
    np.testing.assert_array_equal(there.uses, expected)


def test_a_trace_that_does_not_do_is_refused(model_map: ModelMap, dense_model: Path, tmp_path: Path) -> None:
    with pytest.raises(PyorchError, match="--router full"):
        maps_from_trace(Trace(write_trace(tmp_path / "a.trace", model_map, router="topk")), model_map)
    with pytest.raises(PyorchError, match="holds no tokens"):
        maps_from_trace(Trace(write_trace(tmp_path / "b.trace", model_map, n=0)), model_map)
    trace = Trace(write_trace(tmp_path / "c.trace", model_map))
    with pytest.raises(PyorchError, match="capacity of expert maps is at least 1, not 0"):
        maps_from_trace(trace, model_map, capacity=0)
    with ModelMap(dense_model) as dense, pytest.raises(PyorchError, match="no routed experts"):
        maps_from_trace(trace, dense)


def test_a_trace_of_another_model_is_refused(model_map: ModelMap, small_moe_q4: Path, tmp_path: Path) -> None:
    trace = Trace(write_trace(tmp_path / "t.trace", model_map))
    with ModelMap(small_moe_q4) as other, pytest.raises(FormatError, match="another model"):
        maps_from_trace(trace, other)


# The sidecar


@pytest.fixture(scope="module")
def maps(model_map: ModelMap, tmp_path_factory: pytest.TempPathFactory) -> ExpertMaps:
    trace = Trace(write_trace(tmp_path_factory.mktemp("maps") / "t.trace", model_map))
    return maps_from_trace(trace, model_map, capacity=20, distance=2)


def test_what_is_written_is_read(maps: ExpertMaps, model_map: ModelMap, tmp_path: Path) -> None:
    maps.write(tmp_path / "m.gguf", model_map)
    read = ExpertMaps.read(tmp_path / "m.gguf", model_map)
    assert (read.capacity, read.distance) == (20, 2)
    expected, found = maps.export(), read.export()
    assert expected.maps.shape == (20, 8, 64) and expected.uses.sum() == 60 * 8 * 6
    for name, array in vars(expected).items():
        np.testing.assert_array_equal(getattr(found, name), array)


def test_uses_alone_and_iterations_alone_are_written(model_map: ModelMap, tmp_path: Path) -> None:
    store = ExpertMaps.for_model(model_map)
    with pytest.raises(PyorchError, match="nothing was added"):
        store.write(tmp_path / "m.gguf", model_map)
    assert not list(tmp_path.iterdir())
    store.uses += 1
    store.write(tmp_path / "m.gguf", model_map)
    assert ExpertMaps.read(tmp_path / "m.gguf", model_map).uses.sum() == 8 * 64
    store = ExpertMaps.for_model(model_map)
    store.add(np.ones((8, 64)))
    store.write(tmp_path / "m.gguf", model_map)
    assert ExpertMaps.read(tmp_path / "m.gguf", model_map).export().maps.sum() == 8 * 64


def test_the_sidecar_of_another_model_is_refused(
    maps: ExpertMaps, model_map: ModelMap, small_moe_q4: Path, tmp_path: Path
) -> None:
    maps.write(tmp_path / "m.gguf", model_map)
    with ModelMap(small_moe_q4) as other, pytest.raises(FormatError, match="belongs to another model.*make it again"):
        ExpertMaps.read(tmp_path / "m.gguf", other)


def test_a_file_that_was_cut_off_is_refused(maps: ExpertMaps, model_map: ModelMap, tmp_path: Path) -> None:
    maps.write(tmp_path / "m.gguf", model_map)
    whole = (tmp_path / "m.gguf").read_bytes()
    for size in (0, 3, 100, len(whole) // 2, len(whole) - 1):
        (tmp_path / "m.gguf").write_bytes(whole[:size])
        with pytest.raises(FormatError) as refused:
            ExpertMaps.read(tmp_path / "m.gguf", model_map)
        assert "\n" not in str(refused.value)


def test_contents_that_cannot_be_are_refused(maps: ExpertMaps, model_map: ModelMap, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    metadata = {"layers": list(range(8)), "capacity": 20, "distance": 2}
    arrays = vars(maps.export())
    container.write(path, KIND, VERSION, model_map, metadata, arrays)
    ExpertMaps.read(path, model_map)

    def put(name: str, value: float) -> dict[str, np.ndarray]:
        array = arrays[name].copy()
        array.flat[5] = value
        return {name: array}

    for bad_metadata, bad_arrays, what in (
        ({"layers": [0, 1]}, {}, "other layers"), ({"capacity": 0}, {}, "made for"),
        ({"distance": "2"}, {}, "made for"),
        ({"capacity": 19}, {}, "up to 19"),
        ({}, put("maps", np.nan), "maps has values"), ({}, put("maps", -0.1), "maps has values"),
        ({}, put("embeddings", np.inf), "embeddings has values"), ({}, put("uses", -1), "uses has values"),
        ({}, {"maps": arrays["maps"][:, :7]}, "maps has the shape"),
        ({}, {"maps": arrays["maps"][:9]}, "9 maps and 20"),
        ({}, {"embeddings": arrays["embeddings"].astype(np.float16)}, "embeddings has the shape"),
    ):
        container.write(path, KIND, VERSION, model_map, metadata | bad_metadata, arrays | bad_arrays)
        with pytest.raises(FormatError, match=what) as refused:
            ExpertMaps.read(path, model_map)
        assert str(refused.value).startswith(str(path))


# An engine


def test_an_engine_takes_maps_of_its_model_only(maps: ExpertMaps, model_map: ModelMap) -> None:
    with Engine(model_map, "50%") as engine:
        engine.set_history(maps)
        with pytest.raises(PyorchError, match="layer 0 has 64 experts, the expert maps 63"):
            engine.set_history(ExpertMaps(8, 63, 128))
        with pytest.raises(PyorchError, match="8 layers with routed experts, the expert maps 9"):
            engine.set_history(ExpertMaps(9, 64, 128))


# The command


def test_the_command_writes_the_sidecar_beside_the_model(
    small_moe: Path, model_map: ModelMap, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_trace(tmp_path / "t.trace", model_map)
    path = small_moe.with_name("small-moe.maps.gguf")
    arguments = ["maps", str(small_moe), str(trace), "--capacity", "30", "--distance", "2"]
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith(f"{path}: maps of 30 of 60 tokens, ")
    assert model_map.sidecars()["maps"] == path
    read = ExpertMaps.read(path, model_map)
    path.unlink()
    assert (read.n_maps, read.capacity, read.distance) == (30, 30, 2)
    assert main([*arguments, "--json", "-o", str(tmp_path / "m.gguf")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["n_maps"] == 30 and report["file_bytes"] == (tmp_path / "m.gguf").stat().st_size


def test_the_command_refuses_in_a_sentence_and_leaves_nothing(
    small_moe: Path, model_map: ModelMap, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = write_trace(tmp_path / "full.trace", model_map)
    topk = write_trace(tmp_path / "topk.trace", model_map, router="topk")
    output = tmp_path / "m.gguf"
    for trace, options in (
        (topk, ()), (tmp_path / "none.trace", ()), (full, ("--capacity", "0")), (full, ("--distance", "0")),
    ):
        assert main(["maps", str(small_moe), str(trace), "-o", str(output), *options]) == 2
        printed = capsys.readouterr().err
        assert printed.startswith("pyorch: error: ") and printed.count("\n") == 1
    assert not output.exists()


def test_run_keeps_what_it_learns(small_moe: Path, tmp_path: Path) -> None:
    path = tmp_path / "learned.gguf"
    command = [
        "run",
        str(small_moe),
        "-p",
        "import os",
        "--temp",
        "0",
        "--budget",
        "50%",
        "--ctx",
        "64",
        "--threads",
        "1",
        "--prefetch",
        "expert-map:2:0",
        "--maps",
        str(path),
    ]

    def n_maps() -> int:
        with ModelMap(small_moe) as model_map:
            return ExpertMaps.read(path, model_map).n_maps

    assert main([*command, "-n", "1"]) == 0
    assert not path.exists()  # a prompt alone leaves no iteration of a decode
    assert main([*command, "-n", "8"]) == 0
    first = n_maps()
    assert first > 0
    assert main([*command, "-n", "8"]) == 0
    assert n_maps() > first
