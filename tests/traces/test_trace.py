"""Traces: the file, the recording, and the statistics of what was recorded."""

from __future__ import annotations

import dataclasses
import json
import os
import struct
import zlib
from itertools import permutations
from pathlib import Path

import llama_cpp.llama_cpp as llama
import numpy as np
import pytest
from architectures import CHECKPOINT_PROCESS
from models import CHECKPOINT, small_model
from shared import with_torch

from pyorch.cli import main
from pyorch.errors import FormatError, PyorchError
from pyorch.llama.context import Context
from pyorch.runtime.callbacks import Routing
from pyorch.traces import recorder as profiling
from pyorch.traces import routing_statistics as routing_stats
from pyorch.traces.file import DECODE, HEADER_BYTES, PREFILL, Trace, TraceHeader, TraceWriter, part_path
from pyorch.traces.recorder import Recorder, profile

FACTS = CHECKPOINT / "facts-test.jsonl"
TEXT = CHECKPOINT / "text-test.txt"

N_PIECES = 2  # of prose, that fill a context of 256 tokens
HEADER = TraceHeader("f" * 64, "qwen2moe", (1, 2, 5), n_expert=16, n_expert_used=4, n_embd=8, n_inputs=5, seed=3)
OPTIONS = dict(budget="50%", n_threads=1)


def random_records(header: TraceHeader, n: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    records = np.zeros(n, header.record_dtype())
    records["request"], records["position"] = np.arange(n) // 10, np.arange(n) % 10
    records["token"] = rng.integers(0, 1000, n)
    shape = (n, len(header.layers), header.n_expert)
    records["experts"] = rng.random(shape).argsort(-1)[..., : header.n_expert_used]
    records["probs"] = rng.random(records["probs"].shape, np.float32)
    return records


def write_trace(
    path: Path, records: np.ndarray, header: TraceHeader = HEADER, step: int = 7, sign: int = 1, **options
) -> Trace:
    """In batches of `step`. The inputs of a token are all its record's number, times the sign."""
    with TraceWriter(path, header, **options) as writer:
        for start in range(0, len(records), step):
            batch = records[start : start + step]
            rows, slots = writer.sample(len(batch))
            inputs = sign * np.broadcast_to(
                (writer.n_records + rows)[:, None, None], (len(rows), len(header.layers), 8)
            )
            writer.write(batch, rows, slots, inputs.astype(np.float16))
    return Trace(path)


# The file


def test_a_trace_gives_back_what_was_written(tmp_path: Path) -> None:
    records = random_records(HEADER, 100)
    trace = write_trace(tmp_path / "a.trace", records)
    assert trace.header == HEADER and len(trace) == 100
    assert isinstance(trace.records, np.memmap) and np.array_equal(trace.records, records)
    indices, inputs = trace.inputs
    assert len(set(indices)) == 5 and inputs.shape == (5, 3, 8) and inputs.dtype == np.float16
    assert (inputs == indices[:, None, None]).all()
    assert trace.layer_index(5) == 2
    with pytest.raises(PyorchError, match="has no layer 3: it recorded 1, 2, 5"):
        trace.layer_index(3)


def test_a_trace_without_records_or_inputs_is_empty(tmp_path: Path) -> None:
    header = dataclasses.replace(HEADER, n_inputs=0)
    trace = write_trace(tmp_path / "a.trace", random_records(header, 0), header)
    indices, inputs = trace.inputs
    assert len(trace) == len(indices) == len(inputs) == 0 and inputs.shape[1:] == (3, 8)


def test_a_trace_that_is_appended_to_equals_one_written_at_once(tmp_path: Path) -> None:
    records = random_records(HEADER, 100)
    once, twice = tmp_path / "once.trace", tmp_path / "twice.trace"
    write_trace(once, records)
    write_trace(twice, records[:33])
    write_trace(twice, records[33:], append=True, step=11)
    assert once.read_bytes() == twice.read_bytes()


@pytest.mark.parametrize(
    "change", [dict(fingerprint="0" * 64), dict(layers=(1, 2)), dict(router="full"), dict(seed=4), dict(states=True)]
)
def test_a_trace_of_something_else_is_not_appended_to(tmp_path: Path, change: dict) -> None:
    path = tmp_path / "a.trace"
    write_trace(path, random_records(HEADER, 10))
    before = path.read_bytes()
    with pytest.raises(PyorchError, match=f"cannot be appended to: its {next(iter(change))} is"):
        TraceWriter(path, dataclasses.replace(HEADER, **change), append=True)
    assert path.read_bytes() == before


@pytest.mark.parametrize("missing", [1, 50, HEADER.record_dtype().itemsize])
def test_a_trace_that_was_cut_off_is_whole_up_to_its_last_record(tmp_path: Path, missing: int) -> None:
    path = tmp_path / "a.trace"
    records = random_records(HEADER, 100)
    write_trace(path, records)
    os.truncate(path, path.stat().st_size - missing)
    trace = Trace(path)
    assert np.array_equal(trace.records, records[:99])
    write_trace(path, records[99:], append=True)
    assert np.array_equal(Trace(path).records, records)


def test_inputs_of_records_that_were_cut_off_are_gone(tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    records = random_records(HEADER, 100)
    indices, _ = write_trace(path, records).inputs
    n = int(np.sort(indices)[2])
    os.truncate(path, HEADER.records_offset + n * HEADER.record_dtype().itemsize + 1)
    left, inputs = Trace(path).inputs
    assert set(left) == {i for i in indices if i < n} and (inputs == left[:, None, None]).all()
    write_trace(path, records[n:], append=True, sign=-1)
    again, inputs = Trace(path).inputs
    assert set(again) == set(indices) and n in again
    assert (inputs == np.where(again < n, again, -again)[:, None, None]).all()


@pytest.mark.parametrize("size", [HEADER_BYTES, HEADER_BYTES + 10, HEADER.records_offset - 1, HEADER.records_offset])
def test_a_trace_that_was_cut_off_before_its_records_is_empty(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a.trace"
    write_trace(path, random_records(HEADER, 10))
    os.truncate(path, size)
    assert len(Trace(path)) == len(Trace(path).inputs[0]) == 0


@pytest.mark.parametrize(
    "damage, complaint",
    [
        (lambda content: b"", "is not a trace: it does not begin with PYORCHTR"),
        (lambda content: b"GGUF" + content[4:], "is not a trace"),
        (lambda content: content[:100], "is cut off in its header"),
        (
            lambda content: content[:8] + b"\x04" + content[9:],
            "is a trace of version 4: this pyorch reads versions 1 to 3",
        ),
        (lambda content: content.replace(b"qwen2moe", b"qwen9moe"), "the header is damaged"),
        (lambda content: content[:12] + b"\xff\xff" + content[14:], "the header is damaged"),
    ],
)
def test_a_file_with_another_header_is_refused(tmp_path: Path, damage, complaint: str) -> None:
    path = tmp_path / "a.trace"
    write_trace(path, random_records(HEADER, 10))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(FormatError, match=complaint):
        Trace(path)


@pytest.mark.parametrize(
    "change",
    [
        {"layers": []},
        {"layers": {}},
        {"layers": 3},
        {"layers": [1.5]},
        {"layers": [2, 1]},
        {"layers": [1, 1]},
        {"layers": [-1]},
        {"layers": ["1"]},
        {"n_expert": "16"},
        {"n_expert": None},
        {"n_expert": True},
        {"n_expert": 2**53},
        {"n_expert": 0},
        {"n_expert_used": 17},
        {"n_expert_used": []},
        {"n_embd": -1},
        {"n_embd": [8, 8]},
        {"n_embd": 2**31},
        {"n_inputs": 2**62},
        {"n_inputs": float("nan")},
        {"seed": "x"},
        {"states": 1},
        {"compute_ms": 0},
        {"compute_ms": True},
        {"compute_ms": "30"},
        {"compute_ms": float("inf")},
        {"router": "some"},
        {"router": ["full"]},
        {"arch": 5},
        {"fingerprint": None},
        {"unknown": 1},
    ],
    ids=str,
)
def test_a_header_whose_fields_cannot_be_is_refused(tmp_path: Path, change: dict) -> None:
    write_header(tmp_path / "a.trace", json.dumps(dataclasses.asdict(HEADER) | change))
    with pytest.raises(FormatError, match="the header is damaged"):
        Trace(tmp_path / "a.trace")


def test_a_header_nested_deep_is_refused(tmp_path: Path) -> None:
    write_header(tmp_path / "a.trace", "[" * 4000)
    with pytest.raises(FormatError, match="the header is damaged"):
        Trace(tmp_path / "a.trace")


def write_header(path: Path, text: str) -> None:
    """Another header, with a checksum that is right, before the records of a trace."""
    write_trace(path, random_records(HEADER, 10))
    prefix = struct.pack("<8sIII", b"PYORCHTR", 2, len(text), zlib.crc32(text.encode()))
    path.write_bytes((prefix + text.encode()).ljust(HEADER_BYTES, b"\0") + path.read_bytes()[HEADER_BYTES:])


def test_an_absent_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="absent.trace cannot be read: No such file"):
        Trace(tmp_path / "absent.trace")


def test_an_interrupted_recording_spares_the_old_trace(tmp_path: Path) -> None:
    path, records = tmp_path / "a.trace", random_records(HEADER, 20)
    write_trace(path, records[:3])
    with pytest.raises(KeyboardInterrupt), TraceWriter(path, HEADER) as writer:
        writer.write(records)
        raise KeyboardInterrupt
    assert len(Trace(path)) == 3
    assert np.array_equal(Trace(part_path(path)).records, records)


def test_nobody_elses_file_becomes_the_part_of_a_trace(tmp_path: Path) -> None:
    path, mine = tmp_path / "a.trace", tmp_path / "mine.txt"
    mine.write_text("of somebody else")
    part_path(path).symlink_to(mine)
    with pytest.raises(PyorchError, match="a.trace.part cannot be written"):
        TraceWriter(path, HEADER)
    part_path(path).unlink()
    part_path(path).write_text("of somebody else")
    with pytest.raises(PyorchError, match="a.trace.part is no trace of an earlier run, and would be lost"):
        TraceWriter(path, HEADER)
    assert mine.read_text() == part_path(path).read_text() == "of somebody else" and not path.exists()


def test_a_recording_that_did_not_begin_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), TraceWriter(tmp_path / "a.trace", HEADER):
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_every_token_is_sampled_alike(tmp_path: Path) -> None:
    n, capacity, n_seeds = 200, 20, 500
    kept = np.zeros(n)
    for seed in range(n_seeds):
        with TraceWriter(tmp_path / "a.trace", dataclasses.replace(HEADER, n_inputs=capacity, seed=seed)) as writer:
            rows, slots = writer.sample(n)
        assert len(set(slots)) == len(slots) and (np.diff(rows) > 0).all()
        kept[rows] += 1
    expected = n_seeds * capacity / n
    assert kept.sum() == n_seeds * capacity
    # A binomial's variance, and nobody beyond five of its deviations.
    assert np.abs(kept - expected).max() < 5 * np.sqrt(expected) and 0.6 < kept.var() / (expected * 0.9) < 1.5


# Recording


@pytest.fixture(scope="module")
def recorded(small_moe_f32: Path, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Prose and questions, the whole distribution and a sample of inputs, in more than one ubatch."""
    path = tmp_path_factory.mktemp("trace") / "small.trace"
    record(small_moe_f32, path, TEXT)
    return record(small_moe_f32, path, FACTS, append=True)


@pytest.fixture(scope="module")
def recorded_with_float32_attention(small_moe_f32: Path, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Prose without what llama.cpp rounds to float16: the KV cache, and the queries of flash attention."""

    def in_float32() -> llama.llama_context_params:
        params = defaults()
        params.type_k = params.type_v = 0  # GGML_TYPE_F32
        params.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
        return params

    defaults = llama.llama_context_default_params
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama, "llama_context_default_params", in_float32)
        return record(small_moe_f32, tmp_path_factory.mktemp("trace") / "small.trace", TEXT)


def record(model: Path, path: Path, data: Path, append: bool = False) -> Trace:
    profile(model, [data], path, n_tokens=N_PIECES * 256, router="full", n_inputs=64, append=append, n_ctx=256,
            n_ubatch=100, **OPTIONS)
    return Trace(path)


@pytest.fixture(scope="module")
def router_logits(recorded: Trace, tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """What transformers computes in float32 for the pieces of prose: float64[n_tokens, 8, 64]."""
    checkpoint = tmp_path_factory.mktemp("checkpoint") / "small-moe"
    checkpoint.mkdir()
    for file in ("config.json", "model.safetensors"):
        (checkpoint / file).symlink_to((CHECKPOINT / file).resolve())
    (checkpoint / "tokens.json").write_text(json.dumps([request["token"].tolist() for request in prose(recorded)]))
    with_torch(CHECKPOINT_PROCESS, "routers", checkpoint.parent)
    return np.load(checkpoint / "routers.npy").reshape(-1, 8, 64).astype(np.float64)


def prose(trace: Trace) -> list[np.ndarray]:
    """Requests that fill the context."""
    pieces = [request for request in requests_of(trace).values() if len(request) == 256]
    assert len(pieces) == N_PIECES
    return pieces


def requests_of(trace: Trace) -> dict[int, np.ndarray]:
    """The records of each request, in order of positions."""
    records = np.sort(np.asarray(trace.records), order=["request", "position"])
    return {int(number): records[records["request"] == number] for number in np.unique(records["request"])}


def same_choice(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Which selections are the same set of experts."""
    return (np.sort(a, -1) == np.sort(b, -1)).all(-1)


def compare(trace: Trace, logits: np.ndarray) -> tuple[float, float]:
    """The share of tokens and layers that chose the same experts, and how close the others were to doing so: the
    largest difference of logits between the last expert chosen and the first one left out.

    Another choice changes what later layers see: of a request, only the first layer that differs tells how close it
    was.
    """
    ours = np.concatenate(prose(trace))
    same = same_choice(ours["experts"], np.argsort(-logits, -1, kind="stable")[..., :6])
    ordered = -np.sort(-logits, -1)
    probs = np.exp(logits - ordered[..., :1])
    probs /= probs.sum(-1, keepdims=True)
    chosen = np.take_along_axis(probs, ours["experts"].astype(int), -1)
    assert np.abs(ours["probs"] - chosen).mean() < 1e-4 and np.abs(ours["router"] - probs).mean() < 1e-5
    gaps = []
    for request, gap in zip(same.reshape(-1, 256, 8), (ordered[..., 5] - ordered[..., 6]).reshape(-1, 256, 8)):
        differs = np.flatnonzero(~request.all(axis=0))
        if len(differs):
            gaps += gap[:, differs[0]][~request[:, differs[0]]].tolist()
    return same.mean(), max(gaps, default=0.0)


def test_recorded_routing_equals_transformers(
    recorded_with_float32_attention: Trace, router_logits: np.ndarray
) -> None:
    same, gap = compare(recorded_with_float32_attention, router_logits)
    assert same >= 0.998 and gap < 1e-4  # ties but for the order of a float32 sum


def test_recorded_routing_differs_only_by_attention_in_float16(recorded: Trace, router_logits: np.ndarray) -> None:
    same, gap = compare(recorded, router_logits)
    assert same >= 0.99 and gap < 0.1  # of logits whose median gap at this place is 0.1


def test_probabilities_are_those_of_the_distribution(recorded: Trace) -> None:
    records = recorded.records
    router = records["router"].astype(np.float64)
    assert np.allclose(router.sum(-1), 1, atol=2e-3)
    assert np.allclose(np.take_along_axis(router, records["experts"].astype(int), -1), records["probs"], rtol=1e-3)
    assert same_choice(records["experts"], np.argsort(-router, -1, kind="stable")[..., :6]).mean() > 0.99


def test_sampled_inputs_give_the_recorded_routing(recorded: Trace, small_moe_f32: Path) -> None:
    import gguf

    weights = {tensor.name: tensor.data for tensor in gguf.GGUFReader(small_moe_f32).tensors}
    indices, inputs = recorded.inputs
    assert len(set(indices)) == 64 and indices.max() > N_PIECES * 256  # of both recordings
    for layer, il in enumerate(recorded.header.layers):
        logits = inputs[:, layer].astype(np.float32) @ weights[f"blk.{il}.ffn_gate_inp.weight"].T
        probs = np.exp(logits - logits.max(-1, keepdims=True))
        probs /= probs.sum(-1, keepdims=True)
        assert np.abs(probs - recorded.records["router"][indices, layer]).max() < 3e-3


def test_recorded_states_are_what_the_inputs_are_made_of(small_moe_f32: Path, tmp_path: Path) -> None:
    import gguf

    path = tmp_path / "a.trace"
    profile(small_moe_f32, [FACTS], path, n_tokens=300, n_inputs=40, states=True, n_decode=2, n_ubatch=64, **OPTIONS)
    trace = Trace(path)
    weights = {tensor.name: tensor.data for tensor in gguf.GGUFReader(small_moe_f32).tensors}
    indices, inputs = trace.inputs
    states = trace.records["states"][indices]
    for layer, il in enumerate(trace.header.layers):
        state = states[:, layer]
        normalized = state / np.sqrt((state**2).mean(-1, keepdims=True) + 1e-6) * weights[f"blk.{il}.ffn_norm.weight"]
        np.testing.assert_allclose(inputs[:, layer], normalized, rtol=2e-3, atol=2e-3)
    assert np.array_equal(trace.records["weights"], trace.records["probs"])  # of this architecture


def test_recording_is_the_same_at_any_budget(small_moe: Path, tmp_path: Path) -> None:
    contents = []
    for budget in ("13%", "100%"):
        profile(
            small_moe,
            [FACTS],
            tmp_path / "a.trace",
            n_tokens=500,
            n_decode=3,
            n_inputs=9,
            states=True,
            n_ubatch=64,
            budget=budget,
            n_threads=2,
        )
        header = dataclasses.replace(Trace(tmp_path / "a.trace").header, compute_ms=None)
        contents.append((header, (tmp_path / "a.trace").read_bytes()[HEADER_BYTES:]))
    assert contents[0] == contents[1]


def test_requests_in_one_batch_are_recorded_as_if_alone(
    small_moe_f32: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prose = TEXT.read_text()
    data = tmp_path / "data.jsonl"  # texts of different lengths that do not end
    data.write_text("".join(json.dumps({"text": prose[80 * i :][: 40 + 2 * i]}) + "\n" for i in range(30)))
    traces = []
    for together, n_ubatch in ((64, 50), (1, 512)):
        monkeypatch.setattr(profiling, "MAX_REQUESTS_TOGETHER", together)
        path = tmp_path / f"{together}.trace"
        done = profile(small_moe_f32, [data], path, n_ubatch=n_ubatch, n_decode=2, **OPTIONS)
        assert done.n_requests == 30 and done.prefill_tokens > 500 and done.decode_tokens > 55
        traces.append(requests_of(Trace(path)))
    assert traces[0].keys() == traces[1].keys()
    for field in ("request", "position", "phase"):
        assert all(np.array_equal(a[field], b[field]) for a, b in zip(*map(dict.values, traces))), field
    # Other batch shapes round differently: a near tie may give another expert, or another token in an answer.
    pairs = [(a, b) for a, b in zip(*map(dict.values, traces)) if np.array_equal(a["token"], b["token"])]
    assert len(pairs) >= 27
    a, b = (np.concatenate(pair) for pair in zip(*pairs))
    same = same_choice(a["experts"], b["experts"])
    assert same.mean() > 0.99
    assert np.isclose(a["probs"][same], b["probs"][same], atol=1e-3).mean() > 0.99


def test_decoded_tokens_are_the_models_own(small_moe: Path, tmp_path: Path) -> None:
    done = profile(small_moe, [TEXT], tmp_path / "a.trace", n_tokens=300, n_decode=8, n_ctx=108, **OPTIONS)
    assert (done.n_requests, done.prefill_tokens, done.decode_tokens) == (3, 300, 24)
    with small_model(small_moe, "50%") as model, Context(model.llama.model, 256, n_threads=2) as context:
        for records in requests_of(Trace(tmp_path / "a.trace")).values():
            assert records["position"].tolist() == list(range(108))
            assert records["phase"].tolist() == [PREFILL] * 100 + [DECODE] * 8
            context.clear()
            logits = context.decode(records["token"].tolist())[99:107]
            # All at once, sums have another order: of two tokens that are nearly as good it may be the other one.
            chosen = np.take_along_axis(logits, records["token"][100:, None].astype(int), axis=1)[:, 0]
            assert np.median(logits.max(axis=1) - chosen) < 0.02 * logits.std()


def test_texts_are_cut_and_counted(small_moe: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    done = profile(small_moe, [FACTS, TEXT], path, n_tokens=100, n_ctx=32, **OPTIONS)
    trace = Trace(path)
    assert done.prefill_tokens == done.n_records == len(trace) == 100 and done.file_bytes == path.stat().st_size
    with small_model(small_moe, "50%") as model:
        tokens = [request["token"].tolist() for request in requests_of(trace).values()]
        assert model.llama.detokenize(tokens[0]).decode().startswith("Question: A zoo keeper must feed the klaklur.")
    assert max(map(len, tokens)) <= 32 and done.n_requests == len(tokens)
    compute_ms = Trace(path).header.compute_ms
    again = profile(small_moe, [FACTS], path, n_tokens=50, append=True, **OPTIONS)
    assert 0.001 < Trace(path).header.compute_ms == compute_ms
    assert again.prefill_tokens == 50 and again.n_records == 150
    assert Trace(path).records["request"][100:].min() == done.n_requests


def routing(il: int, n: int, logits: np.ndarray, probs: np.ndarray | None = None) -> Routing:
    experts = np.argsort(-logits, -1)[:, :2].astype(np.int32)
    chosen = np.exp(np.take_along_axis(logits, experts, -1))
    softmax = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    return Routing(
        context=1, il=il, decode=n == 1, experts=experts, weights=chosen / chosen.sum(-1, keepdims=True),
        probs=softmax if probs is None else probs, logits=logits, inputs=np.ones((n, 8), np.float32),
    )


RECORDED = TraceHeader("", "x", (0, 1), n_expert=4, n_expert_used=2, n_embd=8, router="full")


@pytest.mark.parametrize("calls, complaint", [
    ([(0, 3)], "layer 1 routed 0 of 3 tokens"),
    ([(0, 3), (1, 1)], "layer 1 was computed out of order"),
    ([(1, 3), (0, 3)], "layer 1 was computed out of order"),
    ([(0, 3), (1, 3), (0, 3), (1, 3)], "layer 0 was computed out of order"),
    ([(0, 2), (1, 2)], "layer 0 routed 2 of 3 tokens"),
    ([(0, 3), (7, 3), (1, 3)], "7"),
])
def test_routing_that_does_not_fit_is_no_record(calls: list[tuple[int, int]], complaint: str) -> None:
    recorder = Recorder(RECORDED, 8)
    recorder.expect(3)
    for il, n in calls:
        recorder(routing(il, n, np.random.default_rng(il).normal(size=(n, 4)).astype(np.float32)))
    with pytest.raises(PyorchError, match=f"the routing was not recorded: .*{complaint}"):
        recorder.records()


@pytest.mark.parametrize("softmax_of_selected", [False, True])
def test_ubatches_are_joined(softmax_of_selected: bool) -> None:
    logits = np.random.default_rng(0).normal(size=(2, 5, 4)).astype(np.float32)
    recorder = Recorder(RECORDED, 8)
    recorder.expect(5, np.array([1, 3, 4]))
    for rows in (slice(0, 2), slice(2, 5)):
        for il in range(2):
            some = logits[il, rows]
            recorder(routing(il, len(some), some, some if softmax_of_selected else None))
    records = recorder.records()
    softmax = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    assert np.array_equal(records["experts"], np.argsort(-logits, -1)[..., :2].swapaxes(0, 1))
    assert np.allclose(records["router"], softmax.swapaxes(0, 1), atol=1e-3)
    expected = -np.sort(-softmax, -1)[..., :2].swapaxes(0, 1)
    if softmax_of_selected:
        expected = expected / expected.sum(-1, keepdims=True)
    assert np.allclose(records["probs"], expected, atol=1e-6)
    assert recorder.inputs().shape == (3, 2, 8) and (recorder.inputs() == 1).all()


@pytest.mark.parametrize("arguments, complaint", [
    (["--tokens", "0"], 'argument --tokens: "0" is not a whole number of 1 or more'),
    (["--decode", "-1"], 'argument --decode: "-1" is not a whole number of 0 or more'),
    (["--inputs", "-5"], 'argument --inputs: "-5" is not a whole number of 0 or more'),
    (["--decode", "64", "--ctx", "64"], "leaves none for a text"),
    (["-o", "absent/a.trace"], "does not exist"),
])
def test_what_cannot_be_profiled_is_one_sentence(
    small_moe: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch, arguments: list[str], complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    output = () if "-o" in arguments else ("-o", "a.trace")
    command = ["profile", str(small_moe), "--data", str(FACTS), "--budget", "50%", *output, *arguments]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1 and not list(tmp_path.iterdir())


def test_a_dense_model_has_no_routers(dense_model: Path, tmp_path: Path, capsys) -> None:
    assert main(["profile", str(dense_model), "--data", str(FACTS), "-o", str(tmp_path / "a.trace")]) == 2
    assert "is a dense model" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_malformed_data_is_named_before_anything_is_recorded(small_moe: Path, tmp_path: Path, capsys) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "one"}\n{"body": "two"}\n')
    assert main(["profile", str(small_moe), "--data", str(data), "-o", str(tmp_path / "a.trace")]) == 2
    assert f"{data}:2: " in capsys.readouterr().err and list(tmp_path.iterdir()) == [data]


# Statistics


@pytest.fixture
def layer() -> tuple[np.ndarray, np.ndarray]:
    """experts, probs of 300 tokens, 16 experts, 4 used, some far more than others."""
    rng = np.random.default_rng(1)
    scores = rng.gumbel(size=(300, 16)) + np.linspace(0, 3, 16)
    experts = np.argsort(-scores, -1)[:, :4].astype(np.uint16)
    return experts, rng.random((300, 4), np.float32)


def test_counts_equal_a_count_one_by_one(layer) -> None:
    experts, _ = layer
    counts, pairs = np.zeros(16), np.zeros((16, 16))
    for chosen in experts:
        counts[chosen] += 1
        for i, j in permutations(chosen, 2):
            pairs[i, j] += 1
    assert np.array_equal(routing_stats.activation_counts(experts, 16), counts)
    assert np.array_equal(routing_stats.coactivation(experts, 16), pairs)


def test_tae_and_margin_are_those_of_the_paper(layer) -> None:
    _, probs = layer
    for p, tae, margin in zip(probs, routing_stats.token_activating_entropy(probs), routing_stats.margin(probs)):
        q = p.astype(float) / p.sum(dtype=float)
        assert tae == pytest.approx(-sum(x * np.log(x) for x in q) / np.log(4))
        assert margin == pytest.approx(sorted(q)[-1] - sorted(q)[-2])
    extremes = np.array([[0.25] * 4, [1, 0, 0, 0]], np.float32)
    assert routing_stats.token_activating_entropy(extremes) == pytest.approx([1, 0])
    assert routing_stats.margin(extremes) == pytest.approx([0, 1])
    assert routing_stats.token_activating_entropy(np.ones((2, 1))).tolist() == [0, 0]


def test_profile_as_a_command(small_moe: Path, tmp_path: Path, capsys) -> None:
    path = str(tmp_path / "a.trace")
    command = ["profile", str(small_moe), "--data", str(FACTS), "--tokens", "300", "--decode", "2", "--inputs", "10",
               "--budget", "50%", "--threads", "2", "-o", path]
    assert main(command) == 0
    printed = capsys.readouterr()
    assert "tok/s" in printed.out and "router inputs of 10" in printed.out
    assert printed.err == "", "such a trace is enough for every command"
    assert main([*command, "--append", "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert done["prefill_tokens"] == 300 and done["n_records"] == len(Trace(path)) > 600


def test_two_that_write_one_trace_do_not_mix(small_moe: Path, tmp_path: Path, capsys) -> None:
    header = TraceHeader("0" * 64, "qwen2moe", (0, 1), 8, 2, 4)
    with TraceWriter(tmp_path / "a.trace", header):
        assert main(["profile", str(small_moe), "--data", str(FACTS), "-o", str(tmp_path / "a.trace")]) == 2
    said = capsys.readouterr().err
    assert "another process is writing" in said and "recorded until now" not in said, "the part is the other's"
