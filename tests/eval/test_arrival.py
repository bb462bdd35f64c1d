"""What counts as absent in an evaluation does not depend on how fast the machine is, and a run says where it did."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from models import CHECKPOINT

import pyorch
from pyorch.errors import PyorchError
from pyorch.eval.method import Arrival, dynamic_model, lossy_method
from pyorch.eval.verify import verify
from pyorch.llama.context import Context
from pyorch.settings.substitution import Substitution

TEXT = (CHECKPOINT / "text-test.txt").read_text()[:400]
LOSSY = "mode=none,miss=drop,order=weight,sacred=1"


class Disk:
    """The model's file, at a pace of its own."""

    def __init__(self, path: Path, seconds: float) -> None:
        self._file = os.open(path, os.O_RDONLY)
        self._seconds = seconds
        self.n_reads = 0

    def read(self, file: int, offset: int, size: int) -> bytes:
        time.sleep(self._seconds)
        self.n_reads += 1
        return os.pread(self._file, size, offset)


class Found:
    """Logits, and what was counted."""

    def __init__(self, path: Path, arrival: Arrival | None, read_seconds: float = 0.0, substitution: str = LOSSY,
                 prefetch: str = "none", resident: bool = False) -> None:
        method = lossy_method(Substitution.parse(substitution))
        disk = Disk(path, read_seconds)
        with dynamic_model(path, method, "30%", None, arrival, source=disk, prefetch=prefetch, n_threads=1) as model:
            tokens = model.llama.tokenize(TEXT.encode(), add_bos=False)[:48]
            with Context(model.llama.model, n_ctx=256, n_threads=1) as context:
                self.logits = np.concatenate([context.decode([token]) for token in tokens])
            self.counts = model.engine.substitution_stats()
            self.stats = model.engine.simulated_stats() if arrival is not None else model.engine.stats()
            self.budget = model.engine.stats().budget_bytes
        self.n_reads = disk.n_reads


@pytest.mark.parametrize("arrival", [Arrival(), Arrival(4.0, 7)])
def test_a_slow_disk_changes_no_logit_and_no_count(small_moe: Path, arrival: Arrival):
    quick = Found(small_moe, arrival)
    slow = Found(small_moe, arrival, 0.003)
    assert slow.logits.tobytes() == quick.logits.tobytes()
    assert slow.counts == quick.counts and slow.stats == quick.stats
    assert quick.counts.dropped > 0 and quick.n_reads > 0


def test_neither_do_a_busy_machine_and_what_is_guessed(small_moe: Path):
    alone = Found(small_moe, Arrival(2.0))
    ended = threading.Event()

    def spin() -> None:
        while not ended.is_set():
            sum(range(1000))

    switches = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)  # seconds, for which a thread of Python has it to itself: reading needs it too
    busy = threading.Thread(target=spin)
    busy.start()
    try:
        beside = Found(small_moe, Arrival(2.0), prefetch="quasi-hidden:1:0")
    finally:
        ended.set()
        busy.join()
        sys.setswitchinterval(switches)
    assert beside.logits.tobytes() == alone.logits.tobytes() and beside.counts == alone.counts


def test_what_a_context_left_behind_is_nothing_to_one_at_its_address(small_moe: Path):
    """A context that is closed leaves its address to the next one, unless another context takes it before."""
    def decoded(between: bool) -> list[bytes]:
        found, others = [], []
        with dynamic_model(small_moe, lossy_method(Substitution.parse("mode=random")), "30%", None, Arrival(),
                           n_threads=1) as model:
            tokens = model.llama.tokenize(TEXT.encode(), add_bos=False)
            for start in range(0, 120, 20):
                with Context(model.llama.model, n_ctx=256, n_threads=1) as context:
                    logits = [context.decode([token]) for token in (tokens * 4)[start : start + 20]]
                found.append(np.concatenate(logits).tobytes())
                if between:
                    others.append(Context(model.llama.model, n_ctx=256, n_threads=1))
            for other in others:
                other.close()
        return found

    assert decoded(between=False) == decoded(between=True)


def test_a_slower_simulated_disk_leaves_more_absent_and_a_seed_draws_other_times(small_moe: Path):
    at_once, slow = Found(small_moe, Arrival(0.0)), Found(small_moe, Arrival(8.0))
    assert at_once.counts.on_their_way == 0 < slow.counts.on_their_way
    assert at_once.counts.dropped < slow.counts.dropped
    drawn = [Found(small_moe, Arrival(4.0, seed)) for seed in (1, 2)]
    assert drawn[0].logits.tobytes() != drawn[1].logits.tobytes()


def test_the_simulated_cache_fills_and_keeps_to_the_budget(small_moe: Path):
    found = Found(small_moe, Arrival())
    assert found.stats.budget_bytes == found.budget and found.stats.peak_bytes <= found.budget
    assert found.stats.loads > 100 and found.stats.evictions > 0
    assert found.stats.hits + found.stats.misses > 0


def test_with_everything_there_and_nothing_lossy_left_the_bits_are_those_of_the_model(small_moe: Path):
    with pyorch.load(small_moe, budget="100%", n_ctx=256, n_threads=1, prefetch="none") as model:
        tokens = model.llama.tokenize(TEXT.encode(), add_bos=False)[:16]

        def decode() -> np.ndarray:
            with Context(model.llama.model, n_ctx=256, n_threads=1) as context:
                return np.concatenate([context.decode([token]) for token in tokens])

        lossless = decode()
        model.substitute(LOSSY)
        Arrival(0.5).simulate(model, {il: np.ones(64, bool) for il in model.layers})
        assert decode().tobytes() == lossless.tobytes()
        Arrival(0.5).simulate(model)
        assert decode().tobytes() != lossless.tobytes()


def test_verify_gives_the_same_twice_and_says_what_was_on_its_way(small_moe: Path):
    def found(seconds: float):
        options = {"source": Disk(small_moe, seconds), "prefetch": "none", "substitution": LOSSY}
        return next(verify(small_moe, ["25%"], n_tokens=12, n_threads=1, arrival=Arrival(4.0), **options))

    quick, slow = found(0.0), found(0.003)
    assert quick.substitution == slow.substitution and quick.substitution.on_their_way > 0
    assert (quick.kl_divergence, quick.max_abs_difference) == (slow.kl_divergence, slow.max_abs_difference)
    assert "of them while their experts were being read" in str(quick.substitution)


@pytest.mark.parametrize(("numbers", "named"), [((-1,), "--read-time"), ((math.inf,), "--read-time"),
                                                ((math.nan,), "--read-time"), ((1, -3), "--read-seed")])
def test_numbers_that_no_arrival_can_have_are_refused(numbers: tuple[float, ...], named: str):
    with pytest.raises(PyorchError, match=named):
        Arrival(*numbers)
