"""The measured process. Its argument is the descriptor of a connection: it receives a Job and answers a Measurement.

It ends when the other end closes. The work is a cold prompt, then text decoded token by token, then the next part of
the text as a second prompt. Nothing is sampled: the text decides the next token, so routing is as in real use. Each of
several sequences has its own part of the text: their prompts run one after the other, then a token of each together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import llama_cpp.llama_cpp as llama  # uses the libraries that `import pyorch` chose
import numpy as np

from pyorch.bench.job import ENGINE, Job, Measurement, Phase, Text
from pyorch.errors import PyorchError
from pyorch.llama import interception, logs, memory
from pyorch.llama.context import Context, log_softmax
from pyorch.llama.managed import find
from pyorch.processes import end_with
from pyorch.settings.budget import Budget

_WARM_UP = 0.25  # tokens decoded before the measured ones, as a share of these


def main() -> int:
    connection = Connection(int(sys.argv[1]))
    end_with(connection.fileno())
    job = connection.recv()
    connection.send(measure(job))
    return 0


def measure(job: Job) -> Measurement:
    begin = time.perf_counter()
    with _loaded(job) as run:
        if job.config.preload:
            run.preload()
        load_seconds = time.perf_counter() - begin
        n_warm_up = int(job.n_tokens * _WARM_UP)
        sizes = [*[job.n_prompt, n_warm_up + job.n_tokens] * job.n_sequences, job.n_prompt]
        tokens = _random_tokens(sum(sizes)) if job.data is None else run.tokenize(job.data)
        *parts, second_prompt = _parts(tokens, *sizes)
        prompts, texts = parts[::2], parts[1::2]
        run.prefill(prompts[0], 0)
        ttft_seconds = time.perf_counter() - begin
        for sequence, prompt in enumerate(prompts[1:], start=1):
            run.prefill(prompt, sequence)
        run.decode([text[:n_warm_up] for text in texts], job.max_decode_seconds * _WARM_UP)
        run.reader = reader = _Reader()
        decode = run.timed(lambda: run.decode([text[n_warm_up:] for text in texts], job.max_decode_seconds))
        run.reader = None
        memory_bytes = memory.Resident.now().total
        run.clear()
        prefill = run.timed(lambda: run.prefill(second_prompt, 0))
        stats = run.engine.stats() if run.engine is not None else None
        peak_memory_bytes = memory.peak_bytes()
    of_engine = (stats.budget_bytes, stats.peak_bytes, stats.device_used_bytes) if stats is not None else (0, 0, 0)
    return Measurement(load_seconds, ttft_seconds, prefill, decode, peak_memory_bytes, *of_engine,
                       run.planned_stall_seconds, reader.text(), memory_bytes)


class _Reader:
    """Records the model's predictions while text is decoded. seconds: the time that this took, which is not counted."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._most_probable: list[int] = []
        self._log_likelihoods: list[float] = []
        self._when: list[float] = []
        self._bytes_read: list[int] = []

    def note(self, run: _Run, logits: np.ndarray, follows: int | None) -> None:
        """Records the logits after a token of the first sequence. follows: the next token, None after the last."""
        begin = time.perf_counter()
        self._most_probable.append(int(logits.argmax()))
        if follows is not None:
            self._log_likelihoods.append(float(log_softmax(logits)[follows]))
        self._when.append(begin - self.seconds)
        self._bytes_read.append(run.bytes_read())
        self.seconds += time.perf_counter() - begin

    def text(self) -> Text:
        mean = sum(self._log_likelihoods) / max(1, len(self._log_likelihoods))
        return Text(self._most_probable, mean, [when - self._when[0] for when in self._when],
                    [read - self._bytes_read[0] for read in self._bytes_read])


class _Run:
    """A loaded model and its sequences."""

    reader: _Reader | None = None  # of the text that is being decoded

    def __init__(self, model: int, context: Context, n_sequences: int) -> None:
        self._record = record = find(model)
        self.engine = record.engine if record is not None else None
        division = record.division.split if record is not None else None
        is_planned = division is not None and division.batch == n_sequences
        self.planned_stall_seconds = division.makespan / n_sequences if is_planned else float("nan")
        self._vocab = llama.llama_model_get_vocab(model)
        self._context = context

    def tokenize(self, path: str) -> list[int]:
        text = Path(path).read_bytes()
        tokens = (llama.llama_token * (len(text) + 8))()
        n = llama.llama_tokenize(self._vocab, text, len(text), tokens, len(tokens), False, False)
        return list(tokens[:n])

    def preload(self) -> None:
        for layer in self._record.map.layers:
            self.engine.prefetch(layer.il, range(layer.n_expert))
        self.engine.wait_idle()

    def prefill(self, tokens: Sequence[int], sequence: int) -> int:
        """Appends tokens to a sequence. Returns their number."""
        self._context.decode(tokens, [sequence] * len(tokens), (len(tokens) - 1,))
        return len(tokens)

    def decode(self, texts: Sequence[Sequence[int]], max_seconds: float) -> int:
        """Appends a text to each sequence, one token to all at once, until the texts or the time end.

        Returns:
            The number of tokens.
        """
        end = time.perf_counter() + max_seconds
        n = 0
        for i, tokens in enumerate(zip(*texts)):
            logits = self._context.decode(tokens, range(len(texts)))
            n += len(texts)
            if self.reader is not None:
                self.reader.note(self, logits[0], texts[0][i + 1] if i + 1 < len(texts[0]) else None)
            if time.perf_counter() >= end:
                break
        return n

    def bytes_read(self) -> int:
        return self.engine.stats().bytes_read if self.engine is not None else _kernel_bytes_read()

    def clear(self) -> None:
        self._context.clear()

    def timed(self, work: Callable[[], int]) -> Phase:
        """Times work(), which returns the number of tokens."""
        if self.engine is not None:
            self.engine.reset_stats()
        before, processor = _kernel_bytes_read(), time.process_time()
        begin = time.perf_counter()
        n_tokens = work()
        seconds = time.perf_counter() - begin - (self.reader.seconds if self.reader is not None else 0)
        processor_seconds = time.process_time() - processor
        if self.engine is None:
            n = _kernel_bytes_read() - before
            return Phase(n_tokens, seconds, 0, 0, n, n, 0.0, processor_seconds=processor_seconds)
        stats = self.engine.stats()
        useful = round(stats.bytes_read * stats.useful_share) if stats.loads else stats.bytes_read
        lossy = self.engine.substitution_stats()
        speculated = self.engine.speculation_stats()
        changed = lossy.changed + speculated.slots - speculated.right
        return Phase(
            n_tokens, seconds, stats.hits, stats.misses, stats.bytes_read, useful, stats.stall_ns / 1e9, changed,
            stats.device_hits, stats.device_misses, stats.device_computed, stats.device_bytes, stats.device_ahead,
            stats.device_ahead_hits, processor_seconds,
        )


@contextlib.contextmanager
def _loaded(job: Job) -> Iterator[_Run]:
    logs.install()
    logs.set_quiet(True)
    params = llama.llama_model_default_params()
    params.use_extra_bufts = job.config.repack
    params.load_mode = llama.LLAMA_LOAD_MODE_NONE if job.config.mode == ENGINE else llama.LLAMA_LOAD_MODE_MMAP
    with contextlib.ExitStack() as stack:
        if job.config.mode == ENGINE:
            settings = job.config.settings
            if settings.budget != Budget.parse("100%"):  # otherwise earlier runs decide
                settings = dataclasses.replace(settings, warm=False)
            stack.enter_context(interception.managing(settings))
        llama.llama_backend_init()
        model = llama.llama_model_load_from_file(os.fsencode(job.model), params)
        if not model:
            raise PyorchError(f"llama.cpp cannot load {job.model}")
        stack.callback(lambda: llama.llama_model_free(model))
        n_ctx = job.n_sequences * (job.n_prompt + 2 * job.n_tokens)
        n_batch = max(job.n_prompt, job.n_sequences)
        context = stack.enter_context(Context(
            model, n_ctx, n_batch, n_batch, job.n_sequences, job.n_threads, n_outputs=job.n_sequences))
        yield _Run(model, context, job.n_sequences)


def _kernel_bytes_read() -> int:
    """Returns the bytes that the kernel read from disk for this process, page faults included; 0 if unknown."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return int(next(line.split()[1] for line in lines if line.startswith("read_bytes")))


def _random_tokens(n: int) -> list[int]:
    return random.Random(0).choices(range(256), k=n)


def _parts(tokens: Sequence[int], *sizes: int) -> list[Sequence[int]]:
    """Returns consecutive parts of the text."""
    if len(tokens) < sum(sizes):
        raise PyorchError(
            f"the text has {len(tokens)} tokens, but {sum(sizes)} are needed: give a longer one with --data"
        )
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [tokens[start : start + size] for start, size in zip(starts, sizes)]


if __name__ == "__main__":
    sys.exit(main())
