"""Buddy lists: what is counted, how lists follow from it, what their sidecar refuses."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import gguf
import numpy as np
import pytest
from architectures import Zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from models import CHECKPOINT
from shared import with_torch

from pyorch.cli import main
from pyorch.convert import buddies as lists
from pyorch.convert import expert_outputs
from pyorch.convert.buddies import Settings, build
from pyorch.convert.expert_outputs import LayerExperts
from pyorch.errors import FormatError, PyorchError
from pyorch.runtime.model_map import ModelMap
from pyorch.sidecars import container
from pyorch.sidecars.buddies import KIND, VERSION, Buddies, LayerBuddies
from pyorch.traces.file import Trace, TraceHeader, TraceWriter

N_TOKENS, N_INPUTS = 300, 40


@pytest.fixture(scope="module")
def model_map(small_moe: Path):
    with ModelMap(small_moe) as model_map:
        yield model_map


@pytest.fixture(scope="module")
def trace_path(model_map: ModelMap, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 random tokens of the small MoE: expert 0 never, the others the likelier the higher their number."""
    path = tmp_path_factory.mktemp("trace") / "small-moe.trace"
    header = TraceHeader(
        container.fingerprint(model_map),
        model_map.info.arch,
        tuple(layer.il for layer in model_map.layers),
        64,
        6,
        128,
        n_inputs=N_INPUTS,
    )
    write_trace(path, header, N_TOKENS, likelihood=np.r_[0, 20:83])
    return path


def write_trace(path: Path, header: TraceHeader, n: int, likelihood: np.ndarray, seed: int = 0) -> None:
    random = np.random.default_rng(seed)
    n_layers, k = len(header.layers), header.n_expert_used
    records = np.zeros(n, header.record_dtype())
    records["position"] = np.arange(n) % 17
    keys = random.random((n, n_layers, header.n_expert)) ** (1 / np.maximum(likelihood, 1e-9))
    records["experts"] = np.argsort(-keys, axis=2)[:, :, :k]
    records["probs"] = np.sort(random.random((n, n_layers, k)), axis=2)[:, :, ::-1]
    with TraceWriter(path, header) as writer:
        rows, slots = writer.sample(n)
        writer.write(records, rows, slots, random.normal(size=(len(rows), n_layers, header.n_embd)).astype(np.float16))


def small_trace(directory: str, n: int, n_expert: int, k: int, seed: int) -> Trace:
    header = TraceHeader("", "", (2, 5), n_expert, k, 1)
    write_trace(Path(directory) / "t.trace", header, n, np.ones(n_expert), seed)
    return Trace(Path(directory) / "t.trace")


def layer_of(q_of_peers: np.ndarray, activations: np.ndarray, k_max: int) -> LayerBuddies:
    """The lists by a matrix of scores alone."""
    counted = lists.LayerCounts(activations, q_of_peers, np.zeros(1, np.float32), np.zeros(1, np.float32))
    return lists.lists_of(0, counted, q_of_peers, k_max)


# Counting


@settings(max_examples=40)
@given(n=st.integers(1, 60), n_expert=st.integers(3, 9), k=st.integers(1, 3), seed=st.integers(0, 1000),
       weighting=st.sampled_from(["binary", "probability"]), warm_up=st.sampled_from([0, 1, 5]))
def test_counts_are_those_of_a_plain_loop(
    n: int, n_expert: int, k: int, seed: int, weighting: str, warm_up: int
) -> None:
    """M(i, j) of section 3.3: each token counts as 1, or as min(p_i, p_j), and less in the first steps of a request."""
    with tempfile.TemporaryDirectory() as directory:
        trace = small_trace(directory, n, n_expert, k, seed)
        counted = lists.count(trace, Settings(weighting=weighting, warm_up=warm_up))
    for n, layer in enumerate(counted):
        activations = [0] * n_expert
        pairs = np.zeros((n_expert, n_expert))
        for record in trace.records:
            ids = record["experts"][n].tolist()
            p = record["probs"][n].astype(float)
            p = dict(zip(ids, p / p.sum()))
            step = min(1, (int(record["position"]) + 1) / (warm_up + 1))
            for i in ids:
                activations[i] += 1
                for j in ids:
                    pairs[i, j] += (i != j) * step * (1 if weighting == "binary" else min(p[i], p[j]))
        assert layer.activations.tolist() == activations
        np.testing.assert_allclose(layer.coactivations, pairs, rtol=1e-6)
        if weighting == "binary" and not warm_up:
            assert np.array_equal(layer.coactivations, pairs), "whole numbers"


def test_q_is_the_share_of_each_peer_and_smoothing_counts_for_every_pair() -> None:
    m = np.array([[0, 3, 1], [3, 0, 0], [1, 0, 0]], float)
    np.testing.assert_allclose(lists.conditional(m), [[0, 4 / 6, 2 / 6], [4 / 5, 0, 1 / 5], [2 / 3, 1 / 3, 0]])
    assert m[0, 0] == 0, "the counts themselves stay"
    np.testing.assert_allclose(lists.conditional(m, 0), [[0, 3 / 4, 1 / 4], [1, 0, 0], [1, 0, 0]])
    np.testing.assert_allclose(lists.conditional(m, 0.5)[1], [3.5 / 4, 0, 0.5 / 4])
    assert not lists.conditional(np.zeros((3, 3)), 0).any(), "no counts, no shares"


def test_what_is_counted_and_added_is_what_the_lists_are_made_of(model_map: ModelMap, trace_path: Path) -> None:
    trace = Trace(trace_path)
    default = build(model_map, trace).buddies.layers[2].q
    for changed in (Settings(weighting="probability"), Settings(smoothing=0.01), Settings(warm_up=9)):
        q = lists.conditional(lists.count(trace, changed)[2].coactivations, changed.smoothing)
        layer = build(model_map, trace, changed).buddies.layers[2]
        np.testing.assert_allclose(layer.q, -np.sort(-q, axis=1)[:, :16], rtol=1e-6)
        assert not np.allclose(layer.q, default, rtol=1e-3)


def test_a_trace_that_is_read_in_pieces_counts_the_same(trace_path: Path, monkeypatch) -> None:
    whole = lists.count(Trace(trace_path))
    monkeypatch.setattr(lists, "RECORDS_AT_ONCE", 7)
    for a, b in zip(whole, lists.count(Trace(trace_path))):
        assert np.array_equal(a.activations, b.activations) and np.array_equal(a.tae, b.tae)
        assert np.array_equal(a.coactivations, b.coactivations)


# Lists


@settings(max_examples=200)
@given(n_expert=st.integers(2, 12), k_max=st.integers(1, 12), cap=st.integers(1, 12),
       cft_alpha=st.floats(0.01, 1.0) | st.sampled_from([0.25, 0.5, 0.75]),  # which shares of few tokens often are
       seed=st.integers(0, 10_000))
def test_a_list_is_the_shortest_that_reaches_alpha(
    n_expert: int, k_max: int, cft_alpha: float, cap: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    m = random.poisson(0.7, (n_expert, n_expert)).astype(float)
    activations = random.integers(0, 3, n_expert)
    q = lists.conditional(m + m.T)
    full = layer_of(q, activations, k_max)
    cut = full.cut(cft_alpha, cap)
    for i in range(n_expert):
        peers = sorted((j for j in range(n_expert) if j != i), key=lambda j: (-q[i, j], -activations[j], j))
        expected = peers[:k_max]
        assert full.ids[i][full.ids[i] >= 0].tolist() == expected
        total, prefix = 0.0, []
        for j in expected[:cap]:  # eq. 5, term by term
            prefix.append(j)
            total += float(np.float32(q[i, j]))
            if total >= cft_alpha - 1e-6:
                break
        assert cut.ids[i].tolist() == prefix + [-1] * (cut.ids.shape[1] - len(prefix))
        np.testing.assert_allclose(cut.q[i, :len(prefix)], q[i, prefix], rtol=1e-6)
        assert not cut.q[i, len(prefix):].any()


def test_no_list_is_longer_than_k_max(model_map: ModelMap, trace_path: Path) -> None:
    built = build(model_map, Trace(trace_path), Settings(alpha=(1.0,), k_max=5))
    for il, layer in built.buddies.layers.items():
        assert layer.ids.shape == (64, 5) and (layer.lengths == 5).all()
        assert built.sizes[il].counts == (0, 0, 0, 0, 0, 64) and built.sizes[il].capped == 64
        assert (layer.cut(built.buddies.alpha[il], 3).lengths == 3).all()


@pytest.mark.parametrize("alpha, expected", [
    ((0.9,), [0.9] * 8), ((0.9, 0.2), [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]),
    (tuple(np.linspace(0.1, 0.8, 8)[::-1] ** 2), np.linspace(0.1, 0.8, 8)[::-1] ** 2),  # one for each layer
])
def test_alpha_follows_a_schedule_over_the_layers(
    model_map: ModelMap, trace_path: Path, alpha: tuple[float, ...], expected: list[float]
) -> None:
    built = build(model_map, Trace(trace_path), Settings(alpha=alpha))
    assert list(built.buddies.alpha.values()) == pytest.approx(list(expected))
    for il, size in enumerate(built.sizes):
        layer = built.buddies.layers[il]
        assert size.alpha == pytest.approx(expected[il])
        assert sum(size.counts) == 64 and size.mean == layer.cut(expected[il]).lengths.mean()


def test_lists_by_outputs_rank_peers_by_the_cosine_of_what_experts_compute(
    model_map: ModelMap, trace_path: Path
) -> None:
    trace = Trace(trace_path)
    rows, inputs = trace.inputs
    il, q = 4, lists.conditional(lists.count(trace)[4].coactivations)
    experts = LayerExperts(model_map, il)
    outputs = np.stack([experts.outputs(e, inputs[:, il].astype(np.float32)) for e in range(64)]).astype(float)
    outputs /= np.linalg.norm(outputs, axis=2, keepdims=True)
    chosen = trace.records["experts"][rows][:, il]
    by = {name: build(model_map, trace, Settings(k_max=63, similarity=name)).buddies.layers[il]
          for name in ("coactivation", "output", "both")}
    for i in (0, 7, 40, 63):
        samples = (chosen == i).any(axis=1)
        samples = samples if samples.sum() >= 8 else np.ones(len(samples), bool)
        cosine = np.maximum(np.einsum("jnd,nd->j", outputs[:, samples], outputs[i, samples]) / samples.sum(), 0)
        cosine[i] = 0
        for name, scores in (("output", cosine), ("both", cosine * q[i]), ("coactivation", q[i])):
            found = by[name]
            order = found.ids[i]
            np.testing.assert_allclose(found.q[i], scores[order] / scores.sum(), rtol=1e-2, atol=1e-4)
            assert sorted(order) == [j for j in range(64) if j != i]
    assert (by["output"].ids[:, 0] != by["coactivation"].ids[:, 0]).any()


def test_an_expert_that_computes_like_no_other_keeps_its_counts() -> None:
    q = np.array([[0, 0.7, 0.3], [0.5, 0, 0.5], [0.6, 0.4, 0]])
    cosine = np.array([[1, -0.2, 0], [0.1, 1, 0.3], [0, 0.5, 1]])
    np.testing.assert_allclose(lists.by_outputs(q, cosine, "output"), [q[0], [0.25, 0, 0.75], [0, 1, 0]])
    np.testing.assert_allclose(lists.by_outputs(q, cosine, "both"), [q[0], [0.25, 0, 0.75], [0, 1, 0]])


def test_every_expert_has_a_buddy_however_small_alpha_is(model_map: ModelMap, trace_path: Path) -> None:
    buddies = build(model_map, Trace(trace_path)).buddies
    assert all((layer.cut(1e-6).lengths == 1).all() for layer in buddies.layers.values())


def test_the_gates_are_calibrated_on_every_token_of_a_layer(model_map: ModelMap, trace_path: Path) -> None:
    trace = Trace(trace_path)
    layer = build(model_map, trace).buddies.layers[5]
    p = trace.records["probs"][:, 5].astype(float)
    p /= p.sum(axis=1, keepdims=True)
    tae = -(p * np.log(p)).sum(axis=1) / np.log(6)
    assert layer.tae_percentiles[[0, 50, 100]] == pytest.approx([tae.min(), np.median(tae), tae.max()], rel=1e-5)
    assert layer.margin_percentiles[100] == pytest.approx((p[:, 0] - p[:, 1]).max(), rel=1e-5)


# Outputs


def assert_computes_as_transformers(model: Path, checkpoint: Path, directory: Path) -> None:
    with ModelMap(model) as model_map:
        n_embd = model_map.hparam("embedding_length")
        inputs = np.random.default_rng(3).normal(0, 2, (5, n_embd)).astype(np.float32)
        np.save(directory / "inputs.npy", inputs)
        with_torch(Path(__file__).with_name("expert_outputs_process.py"), checkpoint, directory / "inputs.npy",
                   directory / "outputs.npy")
        expected = np.load(directory / "outputs.npy")
        assert expected.shape[:2] == (len(model_map.layers), model_map.layers[0].n_expert)
        for layer, of_layer in zip(model_map.layers, expected):
            experts = LayerExperts(model_map, layer.il)
            for expert in range(layer.n_expert):
                outputs = experts.outputs(expert, inputs)
                assert np.abs(outputs - of_layer[expert]).max() < 1e-4 * np.abs(of_layer[expert]).max()


def test_experts_compute_what_transformers_computes(small_moe: Path, tmp_path: Path) -> None:
    assert_computes_as_transformers(small_moe, CHECKPOINT, tmp_path)


# Biases and limits; gate and up in one matrix; another order of dimensions.
@pytest.mark.parametrize("name", ["gpt-oss", "qwen3-next-fused", "mixtral"])
def test_experts_of_other_layouts_compute_what_transformers_computes(zoo: Zoo, tmp_path: Path, name: str) -> None:
    assert_computes_as_transformers(zoo.path(name, "F32"), zoo.checkpoints / name.removesuffix("-fused"), tmp_path)


def test_quantized_experts_compute_with_the_weights_of_the_file(small_moe_q4: Path) -> None:
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(small_moe_q4).tensors}
    gate, up, down = (
        gguf.quants.dequantize(tensor.data, tensor.tensor_type)[9]
        for tensor in (tensors[f"blk.4.ffn_{role}_exps.weight"] for role in ("gate", "up", "down")))
    x = np.random.default_rng(0).normal(size=(3, 128)).astype(np.float32)
    g = x @ gate.T
    expected = (g / (1 + np.exp(-g)) * (x @ up.T)) @ down.T
    with ModelMap(small_moe_q4) as model_map:
        assert {role.type for role in model_map.layers[4].roles} == {"q4_0"}
        np.testing.assert_allclose(LayerExperts(model_map, 4).outputs(9, x), expected, rtol=1e-4, atol=1e-6)


def test_an_architecture_that_is_not_known_is_refused(model_map: ModelMap, monkeypatch) -> None:
    monkeypatch.delitem(expert_outputs.HIDDEN, "qwen2moe")
    with pytest.raises(PyorchError, match="does not know how an expert of qwen2moe computes"):
        LayerExperts(model_map, 0)


# The sidecar


@pytest.fixture(scope="module")
def buddies(model_map: ModelMap, trace_path: Path) -> Buddies:
    return build(model_map, Trace(trace_path), Settings((0.9,))).buddies


def test_what_is_written_is_read(buddies: Buddies, model_map: ModelMap, tmp_path: Path) -> None:
    buddies.write(tmp_path / "b.gguf", model_map)
    read = Buddies.read(tmp_path / "b.gguf", model_map)
    assert (read.alpha, read.n_tokens) == (buddies.alpha, N_TOKENS)
    for il, layer in buddies.layers.items():
        for field in dataclasses.fields(LayerBuddies)[1:]:
            found, expected = getattr(read.layers[il], field.name), getattr(layer, field.name)
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected)  # takes nan for equal to nan


def changed(buddies: Buddies, **arrays: np.ndarray) -> Buddies:
    return dataclasses.replace(
        buddies, layers=buddies.layers | {3: dataclasses.replace(buddies.layers[3], **arrays)})


def put(array: np.ndarray, row: int, column: int, value: float) -> np.ndarray:
    array = array.copy()
    array[row, column] = value
    return array


@pytest.mark.parametrize("what, array, edit", [
    ("numbers from 0 to 63", "ids", lambda ids: put(ids, 7, 2, 64)),
    ("numbers from 0 to 63", "ids", lambda ids: put(ids, 7, 2, -2)),
    ("after the end", "ids", lambda ids: put(ids, 7, 2, -1)),
    ("the expert itself", "ids", lambda ids: put(ids, 7, 2, 7)),
    ("an expert twice", "ids", lambda ids: put(ids, 7, 2, ids[7, 0])),
    ("not a number", "q", lambda q: put(q, 7, 2, np.nan)),
    ("not a number", "q", lambda q: put(q, 7, 15, -0.1)),
    ("not sorted", "q", lambda q: put(q, 7, 2, q[7, 0] + 0.01)),
    ("more than 1", "q", lambda q: put(q, 7, 0, 1.1)),
])
def test_a_list_that_cannot_be_is_refused(
    buddies: Buddies, model_map: ModelMap, tmp_path: Path, what: str, array: str, edit
) -> None:
    path = tmp_path / "b.gguf"
    changed(buddies, **{array: edit(getattr(buddies.layers[3], array))}).write(path, model_map)
    with pytest.raises(FormatError, match=what) as refused:
        Buddies.read(path, model_map)
    assert str(refused.value).startswith(f"{path}: the buddies of expert 7 of layer 3 ")


@pytest.mark.parametrize("what, array, edit", [
    ("ids of layer 3 has the shape", "ids", lambda ids: ids[:63]),
    ("q of layer 3 has the shape", "q", lambda q: q[:, :4]),
    ("no ids of type int32", "ids", lambda ids: ids.astype(np.int64)),
    ("activations of layer 3", "activations", lambda counts: counts - 1000),
    ("percentiles of layer 3", "tae_percentiles", lambda tae: tae[::-1]),
])
def test_arrays_that_do_not_fit_the_model_are_refused(
    buddies: Buddies, model_map: ModelMap, tmp_path: Path, what: str, array: str, edit
) -> None:
    path = tmp_path / "b.gguf"
    changed(buddies, **{array: edit(getattr(buddies.layers[3], array))}).write(path, model_map)
    with pytest.raises(FormatError, match=what):
        Buddies.read(path, model_map)


def test_metadata_that_does_not_fit_the_model_is_refused(buddies: Buddies, model_map: ModelMap, tmp_path: Path) -> None:
    path = tmp_path / "b.gguf"
    good = {"layers": list(range(8)), "alpha": [0.5] * 8, "n_tokens": 1}
    for bad in ({"layers": [0, 1]}, {"alpha": [0.5]}, {"alpha": [1.5] * 8}, {"n_tokens": "1"}):
        container.write(path, KIND, VERSION, model_map, good | bad, {"x": np.zeros(1, np.float32)})
        with pytest.raises(FormatError, match=f"^{path}: ") as refused:
            Buddies.read(path, model_map)
        assert "\n" not in str(refused.value)


# The command


def test_the_command_writes_the_sidecar_beside_the_model(
    small_moe: Path, trace_path: Path, model_map: ModelMap, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["buddies", str(small_moe), "--trace", str(trace_path), "--coverage", "0.5"]) == 0
    printed = capsys.readouterr().out
    path = small_moe.with_name("small-moe.buddies.gguf")
    assert str(path) in printed and "covered" in printed and "cosine" not in printed
    assert model_map.sidecars()["buddies"] == path
    assert Buddies.read(path, model_map).alpha[7] == 0.5
    path.unlink()


@pytest.mark.parametrize("options, sentence", [
    (["--alpha", "0"], "coverage 0 is not in (0, 1]"),
    (["--k-max", "0"], "k-max 0 is below 1: a list holds at least one buddy"),
    (["--coverage", "0.9:1.5"], "coverage 1.5 is not in (0, 1]"),
    (["--smoothing", "-1"], "smoothing -1 is not a number of 0 or more"),
    (["--warm-up", "-1"], "warm-up -1 is below 0"),
])
def test_options_that_cannot_be_are_refused(
    small_moe: Path, trace_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], sentence: str
) -> None:
    assert main(["buddies", str(small_moe), "--trace", str(trace_path), *options]) == 2
    assert capsys.readouterr().err == f"pyorch: error: {sentence}\n"


def test_traces_that_do_not_do_are_refused(model_map: ModelMap, trace_path: Path, tmp_path: Path) -> None:
    header = Trace(trace_path).header
    path = tmp_path / "t.trace"
    write_trace(path, dataclasses.replace(header, fingerprint="0" * 64), 10, np.ones(64))
    with pytest.raises(FormatError, match="recorded with another model"):
        build(model_map, Trace(path))
    write_trace(path, dataclasses.replace(header, n_inputs=0), 10, np.ones(64))
    with pytest.raises(PyorchError, match="no router inputs to compare outputs on: record it with `pyorch profile"):
        build(model_map, Trace(path), Settings(similarity="both"))
    write_trace(path, header, 10, np.ones(64))
    path.write_bytes(path.read_bytes()[:4200])  # the header and a part of a record
    with pytest.raises(PyorchError, match="holds no tokens"):
        build(model_map, Trace(path))
