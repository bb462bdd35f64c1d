"""Records a trace: runs text through a model, losslessly, and stores the routers' decisions."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import llama_cpp.llama_cpp as llama
import numpy as np

from pyorch.errors import PyorchError
from pyorch.files import check_target
from pyorch.llama import cores
from pyorch.llama.context import Context
from pyorch.llama.division import NARROW_UBATCH, WIDE_UBATCH
from pyorch.llama.model import Model, load
from pyorch.runtime.callbacks import Routing
from pyorch.runtime.model_map import ModelMap
from pyorch.runtime.statistics import Stats
from pyorch.sidecars import container
from pyorch.traces.data import read_documents
from pyorch.traces.file import DECODE, PREFILL, TraceHeader, TraceWriter

ROUTERS = ("topk", "full")

# Short requests are prefilled together, so that a batch reads each expert once.
MAX_REQUESTS_TOGETHER = 64

# Bounds a batch: llama.cpp routes all tokens through the last layer only if it computes the logits of all,
# and the layers' reports are kept until the batch is done.
_BATCH_BYTES = 256 << 20

_TIMED_TOKENS = 24  # decoded to measure the time of computing

OnProgress = Callable[[str, int, int], None]  # TIMING or "profiling", tokens done, of at most
TIMING = "timing"  # measures before it records


@dataclass(frozen=True)
class Profile:
    """The result of profile().

    Attributes:
        n_records: Of the whole trace, including earlier recordings.
        n_inputs: Sampled tokens in the trace.
        file_bytes: Of the whole trace.
        experts: Statistics of the engine.
        cut_short: The time limit ended the recording before the data did.
    """

    path: Path
    n_requests: int
    prefill_tokens: int
    prefill_seconds: float
    decode_tokens: int
    decode_seconds: float
    n_records: int
    n_inputs: int
    file_bytes: int
    experts: Stats
    cut_short: bool


@dataclass
class _Request:
    """A piece of a document in a context of its own. Generated tokens are appended to `tokens`."""

    number: int
    tokens: list[int]
    n_prompt: int


def profile(
    path: str | os.PathLike[str],
    data: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    n_tokens: int | None = None,
    router: str = "topk",
    n_inputs: int = 0,
    states: bool = False,
    n_decode: int = 0,
    seed: int = 0,
    append: bool = False,
    n_ctx: int | None = None,
    n_ubatch: int | None = None,
    n_threads: int | None = None,
    on_progress: OnProgress | None = None,
    seconds: float | None = None,
    **load_options: object,
) -> Profile:
    """Runs documents (see pyorch.traces.data) through a model and records its routing in a trace.

    A document is a request. A document longer than the context is split into several requests.

    Args:
        path: The model.
        data: Files of documents.
        output: The trace.
        n_tokens: Tokens of the data at most. None: all.
        router: "topk", or "full" to record the whole distribution of every router too.
        n_inputs: Tokens in a uniform sample of router inputs.
        states: Record the residual states before the routers too, 4 * L * n_embd bytes a token.
        n_decode: Tokens to generate after each request, greedily, until an end of text. Not part of n_tokens.
        seed: Of the sample.
        append: Continue the trace if it exists.
        n_ctx: Tokens of one request at most. Default: the model's training context, at most 4096.
        n_ubatch: Tokens computed at once. Default: 2048 if experts have to be read, otherwise 512.
        n_threads: Threads that compute. Default: the physical cores.
        on_progress: Called after each batch.
        seconds: Start no further request after this time since the model was loaded. At least one is recorded.
        load_options: Options of pyorch.load, such as budget and policy.

    Raises:
        FormatError: The data or the model cannot be read.
        PyorchError: An argument is out of range, or the model's routing cannot be recorded.
    """
    if router not in ROUTERS:
        raise PyorchError(f'router "{router}" is not known: use {" or ".join(ROUTERS)}')
    for name, value, least in (("tokens", n_tokens, 1), ("inputs", n_inputs, 0), ("decode", n_decode, 0)):
        if value is not None and value < least:
            raise PyorchError(f"--{name} is {value}: use {least} or more")
    check_target(Path(output).absolute())
    for _ in read_documents(data):
        pass  # reports a mistake in the last line now, not after hours
    n_threads = n_threads or cores.physical_cores()
    with load(path, managed=True, n_ctx=256, n_batch=256, n_threads=n_threads, **load_options) as model:
        if model.engine is None:
            raise PyorchError(model.note or f"{path}: pyorch does not manage its experts, so no routing is seen")
        header = trace_header(model.map, router, n_inputs, seed, states)
        append = append and Path(output).exists()
        tokens = None if append else next(_documents(model, data), None)  # a continued trace keeps its header
        if tokens is not None:
            with Context(model.llama.model, _TIMED_TOKENS, _TIMED_TOKENS, n_threads=n_threads) as context:
                compute_ms = measure_compute(model, context, tokens, on_progress)
                header = dataclasses.replace(header, compute_ms=compute_ms)
        session = _Session(model, header, n_decode, n_ctx, n_ubatch, n_threads)
        with session, TraceWriter(output, header, append) as writer:
            return session.run(lambda: _documents(model, data), n_tokens, writer, on_progress, seconds)


def measure_compute(
    model: Model, context: Context, tokens: list[int], on_progress: OnProgress | None = None
) -> float:
    """Measures the milliseconds of a decoded token without waits for experts. `tokens` are repeated as needed."""
    context.clear()
    tokens = list(itertools.islice(itertools.cycle(tokens), _TIMED_TOKENS))
    context.decode(tokens[:1])
    stalled, begin = model.engine.stats().stall_ns, time.perf_counter()
    for n, token in enumerate(tokens[1:], 1):
        context.decode([token])
        if on_progress is not None:
            on_progress(TIMING, n, len(tokens) - 1)
    seconds = time.perf_counter() - begin - (model.engine.stats().stall_ns - stalled) / 1e9
    return max(1e-3, 1000 * seconds / (len(tokens) - 1))


class RecordStream:
    """Streams the records of documents as they are decoded, without storing them. A context manager.

    Documents become requests as in profile().

    Attributes:
        n_tokens: int64[n_requests], the length of each request.
    """

    def __init__(
        self, model: Model, header: TraceHeader, data: Sequence[str | os.PathLike[str]], n_tokens: int | None = None,
        n_ctx: int | None = None, n_ubatch: int | None = None, n_threads: int | None = None,
    ) -> None:
        self._session = _Session(model, header, 0, n_ctx, n_ubatch, n_threads or cores.physical_cores())
        self._documents, self._limit = partial(_documents, model, data), n_tokens
        self.n_tokens = np.array([request.n_prompt for request in self._requests()], np.int64)

    def __enter__(self) -> RecordStream:
        self._session.__enter__()
        return self

    def __exit__(self, *reason: object) -> None:
        self._session.__exit__(*reason)

    def send(self, chosen: np.ndarray, take: Callable[[np.ndarray], None]) -> None:
        """Decodes the requests with chosen, bool[n_requests], and passes their records to `take`, batch by batch."""
        self._session.stream((request for request in self._requests() if chosen[request.number]), take)

    def _requests(self) -> Iterator[_Request]:
        return self._session.pieces(self._documents(), self._limit)


def trace_header(
    model_map: ModelMap, router: str = "topk", n_inputs: int = 0, seed: int = 0, states: bool = False
) -> TraceHeader:
    """Returns the header of a trace of the model.

    Raises:
        PyorchError: Layers differ in their number of experts, or in their top-k.
    """
    layers = model_map.decoded_layers
    for name, numbers in (("experts", {layer.n_expert for layer in layers}),
                          ("experts used for a token", {layer.n_expert_used for layer in layers})):
        if len(numbers) != 1:
            raise PyorchError(f"{model_map.path} has layers of {', '.join(map(str, sorted(numbers)))} {name}: a trace "
                              "holds layers of one width")
    arch = model_map.info.arch
    return TraceHeader(
        fingerprint=container.fingerprint(model_map),
        arch=arch,
        layers=tuple(layer.il for layer in layers),
        n_expert=layers[0].n_expert,
        n_expert_used=model_map.info.n_expert_used,
        n_embd=model_map.hparam("embedding_length"),
        router=router,
        n_inputs=n_inputs,
        seed=seed,
        states=states,
    )


def why_unrecordable(model_map: ModelMap) -> str:
    """Returns why no trace of the model can be recorded; "" if it can be."""
    try:
        trace_header(model_map)
    except PyorchError as error:
        return str(error)
    return ""


def _documents(model: Model, data: Iterable[str | os.PathLike[str]]) -> Iterator[list[int]]:
    """The tokens of each document."""
    for document in read_documents(data):
        tokens = model.llama.tokenize(document.text.encode(), add_bos=True)
        if tokens:
            yield tokens


class Recorder:
    """An engine's observer that collects the routers' decisions of one batch, layer by layer.

    llama.cpp may split a batch into ubatches. Each ubatch computes all layers, in order, before the next begins, and
    tokens keep their order. A batch that violates this is reported and not recorded.
    """

    def __init__(self, header: TraceHeader, n_batch: int) -> None:
        n_layers, n_expert, k = len(header.layers), header.n_expert, header.n_expert_used
        self._header = header
        self._index = {il: i for i, il in enumerate(header.layers)}
        # Layers come first, so that a call writes contiguous memory.
        self._experts = np.empty((n_layers, n_batch, k), np.int32)
        self._weights = np.empty((n_layers, n_batch, k), np.float32)
        self._probs = np.empty((n_layers, n_batch, n_expert), np.float32)
        self._states = np.empty((n_layers, n_batch if header.states else 0, header.n_embd), np.float32)
        self._softmax_of_selected: bool | None = None
        self.expect(0, ())

    def expect(self, n_tokens: int, rows: Sequence[int] = ()) -> None:
        """Announces the next batch of n_tokens. The router inputs of `rows`, ascending, are collected."""
        self._n_tokens = n_tokens
        self._done = [0] * len(self._index)
        self._failure: Exception | None = None
        self._rows = [int(row) for row in rows]
        self._inputs = np.empty((len(self._index), len(rows), self._header.n_embd), np.float16)

    def __call__(self, routing: Routing) -> None:
        try:
            self._record(routing)
        except Exception as error:  # raised here, it would be printed, and decoding would continue
            self._failure = self._failure or error

    def _record(self, routing: Routing) -> None:
        # Copies only: records() computes the rest for the whole batch.
        layer = self._index[routing.il]
        experts = routing.experts
        start = self._done[layer]
        end = start + len(experts)
        if end > self._n_tokens or (layer and self._done[layer - 1] != end):
            raise ValueError(f"layer {routing.il} was computed out of order")
        self._done[layer] = end
        self._experts[layer, start:end] = experts
        self._probs[layer, start:end] = routing.probs
        if self._softmax_of_selected is None:  # as in gpt-oss, which ranks logits
            self._softmax_of_selected = np.array_equal(routing.probs, routing.logits)
        if self._softmax_of_selected or self._header.states:
            self._weights[layer, start:end] = routing.weights
        if self._header.states:
            self._states[layer, start:end] = routing.inputs if routing.residuals is None else routing.residuals
        if self._rows:
            a, b = bisect.bisect_left(self._rows, start), bisect.bisect_left(self._rows, end)
            if a < b:
                self._inputs[layer, a:b] = routing.inputs[[row - start for row in self._rows[a:b]]]

    def records(self) -> np.ndarray:
        """Returns the collected batch in the trace's dtype; request, position, token and phase are zero.

        Raises:
            PyorchError: A layer did not report all tokens.
        """
        if self._failure is not None:
            raise PyorchError(f"the routing was not recorded: {self._failure!r}") from self._failure
        n = self._n_tokens
        for il, done in zip(self._header.layers, self._done):
            if done != n:
                raise PyorchError(f"the routing was not recorded: layer {il} routed {done} of {n} tokens")
        experts, probs = self._experts[:, :n].swapaxes(0, 1), self._probs[:, :n].swapaxes(0, 1)
        records = np.zeros(n, self._header.record_dtype())
        records["experts"] = experts
        if self._softmax_of_selected:
            records["probs"] = self._weights[:, :n].swapaxes(0, 1)
        else:
            records["probs"] = np.take_along_axis(probs, experts, axis=-1)
        if self._header.router == "full":
            if self._softmax_of_selected:
                probs = np.exp(probs - probs.max(axis=-1, keepdims=True))
            records["router"] = probs / probs.sum(axis=-1, keepdims=True)
        if self._header.states:
            records["weights"] = self._weights[:, :n].swapaxes(0, 1)
            records["states"] = self._states[:, :n].swapaxes(0, 1)
        return records

    def inputs(self) -> np.ndarray:
        """Returns the router inputs of the announced rows: float16[n, L, n_embd]."""
        return self._inputs.swapaxes(0, 1)


class _Session:
    """A context of a model and the recorder that observes it."""

    def __init__(
        self, model: Model, header: TraceHeader, n_decode: int, n_ctx: int | None, n_ubatch: int | None, n_threads: int
    ) -> None:
        self._model, self._header, self._n_decode = model, header, n_decode
        model_map, handle = model.map, model.llama.model
        self._n_ctx = n_ctx or model_map.default_ctx
        if self._n_ctx <= n_decode:
            raise PyorchError(f"a context of {self._n_ctx} tokens leaves none for a text and {n_decode} after it: "
                              "use a smaller --decode or a larger --ctx")
        self._vocab = llama.llama_model_get_vocab(handle)
        whole = model.engine.stats().budget_bytes >= model_map.info.slots_bytes
        n_ubatch = n_ubatch or (NARROW_UBATCH if whole else WIDE_UBATCH)
        kept = header.n_expert + (header.n_embd if header.states else 0)
        row_bytes = 4 * llama.llama_vocab_n_tokens(self._vocab) + 4 * len(header.layers) * kept
        self._n_batch = min(self._n_ctx, max(MAX_REQUESTS_TOGETHER, _BATCH_BYTES // row_bytes))
        # Without a common KV cache llama.cpp reorders a batch's tokens. Recurrent states are never common.
        recurrent = llama.llama_model_is_recurrent(handle) or llama.llama_model_is_hybrid(handle)
        self._n_together = 1 if recurrent else min(MAX_REQUESTS_TOGETHER, self._n_batch)
        self._context = Context(
            handle, self._n_ctx, self._n_batch, min(n_ubatch, self._n_batch), self._n_together, n_threads,
            shared=not recurrent,
        )
        self._recorder = Recorder(header, self._n_batch)

    def __enter__(self) -> _Session:
        self._model.engine.set_observer(self._recorder, copy=False)
        return self

    def __exit__(self, *_: object) -> None:
        self._model.engine.set_observer(None)
        self._context.close()

    def run(
        self, documents: Callable[[], Iterator[list[int]]], n_tokens: int | None, writer: TraceWriter,
        on_progress: OnProgress | None, limit_seconds: float | None = None,
    ) -> Profile:
        """Runs documents, each a list of tokens, and writes their routing."""
        self._writer, self._write = writer, writer.write
        self._model.reset_stats()
        counts, seconds = [0, 0], [0.0, 0.0]
        n_before, n_requests, first = writer.n_records, 0, writer.next_request
        started, limit = time.monotonic(), float("inf") if limit_seconds is None else limit_seconds
        total, cut_short = 0, False
        if on_progress is not None:
            # Splitting the text twice costs little compared with running it.
            pieces = self.pieces(documents(), n_tokens, first)
            total = sum(request.n_prompt + self._n_decode for request in pieces)
        for group in self._groups(self.pieces(documents(), n_tokens, first)):
            elapsed = time.monotonic() - started
            if n_requests and elapsed >= limit:
                cut_short = True
                break
            n_requests += len(group)
            for phase, step in ((PREFILL, self._prefill), (DECODE, self._decode)):
                before, begin = writer.n_records, time.perf_counter()
                for _ in step(group):
                    if on_progress is not None:
                        done = writer.n_records - n_before
                        on_progress("profiling", max(done, int(total * min(1.0, elapsed / limit))), total)
                seconds[phase] += time.perf_counter() - begin
                counts[phase] += writer.n_records - before
            self._context.clear()
        return Profile(
            path=writer.path, n_requests=n_requests,
            prefill_tokens=counts[PREFILL], prefill_seconds=seconds[PREFILL],
            decode_tokens=counts[DECODE], decode_seconds=seconds[DECODE],
            n_records=n_before + sum(counts), n_inputs=min(self._header.n_inputs, writer.n_records),
            file_bytes=writer.n_bytes, experts=self._model.engine.stats(), cut_short=cut_short,
        )

    def stream(self, requests: Iterator[_Request], take: Callable[[np.ndarray], None]) -> None:
        """Runs requests and passes their records to a function."""
        self._write = lambda records, *_: take(records)
        for group in self._groups(requests):
            for _ in self._prefill(group):
                pass
            self._context.clear()

    def pieces(
        self, documents: Iterator[list[int]], n_tokens: int | None, number: int = 0
    ) -> Iterator[_Request]:
        """Splits documents to fit into the context. Each piece starts with the BOS token, if the document does."""
        left = n_tokens if n_tokens is not None else float("inf")
        bos = llama.llama_vocab_bos(self._vocab)
        for tokens in documents:
            head = tokens[:1] if tokens[0] == bos else []
            rest = tokens[len(head) :]
            size = max(1, self._n_ctx - self._n_decode - len(head))
            for start in range(0, len(rest), size):
                piece = (head + rest[start : start + size])[: int(min(left, self._n_ctx))]
                if not piece:
                    return
                left -= len(piece)
                yield _Request(number, piece, len(piece))
                number += 1

    def _groups(self, requests: Iterator[_Request]) -> Iterator[list[_Request]]:
        """Yields groups of as many requests as fit into the context together."""
        group: list[_Request] = []
        size = 0
        for request in requests:
            need = request.n_prompt + self._n_decode
            if group and (size + need > self._n_ctx or len(group) == self._n_together):
                yield group
                group, size = [], 0
            group.append(request)
            size += need
        if group:
            yield group

    def _prefill(self, group: list[_Request]) -> Iterator[None]:
        """Yields after each batch, as _decode() does."""
        tokens = ((i, position) for i, request in enumerate(group) for position in range(request.n_prompt))
        while batch := list(itertools.islice(tokens, self._n_batch)):
            logits = self._run(group, batch, PREFILL)
            for row, (i, position) in enumerate(batch):
                if position == group[i].n_prompt - 1 and self._n_decode:
                    group[i].tokens.append(int(logits[row].argmax()))
            yield

    def _decode(self, group: list[_Request]) -> Iterator[None]:
        for step in range(self._n_decode):
            batch = [(i, len(request.tokens) - 1) for i, request in enumerate(group)
                     if len(request.tokens) == request.n_prompt + step + 1
                     and not llama.llama_vocab_is_eog(self._vocab, request.tokens[-1])]
            if not batch:
                return
            logits = self._run(group, batch, DECODE)
            if step < self._n_decode - 1:
                for row, (i, _) in enumerate(batch):
                    group[i].tokens.append(int(logits[row].argmax()))
            yield

    def _run(self, group: list[_Request], batch: list[tuple[int, int]], phase: int) -> np.ndarray:
        """Decodes and records tokens, each given as a request's index in the group and a position in it."""
        n = len(batch)
        rows, slots = self._writer.sample(n) if self._header.n_inputs else (np.empty(0, np.int64),) * 2
        self._recorder.expect(n, rows)
        tokens = [group[i].tokens[position] for i, position in batch]
        logits = self._context.decode(tokens, [i for i, _ in batch])
        records = self._recorder.records()
        records["request"] = [group[i].number for i, _ in batch]
        records["position"] = [position for _, position in batch]
        records["token"], records["phase"] = tokens, phase
        self._write(records, rows, slots, self._recorder.inputs())
        return logits
