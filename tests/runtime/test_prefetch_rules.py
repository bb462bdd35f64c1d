"""What a read ahead may do: it waits behind demand, is forgotten in time, takes nobody's place, and has to pay."""

from __future__ import annotations

import time
from pathlib import Path

import parts
import pytest

import pyorch
from pyorch.llama.context import Context
from pyorch.runtime.callbacks import Routing
from pyorch.runtime.model_map import ModelMap

N_LAYERS, N_EXPERT, N_USED = 8, 64, 6
TEXT = ("class Reader:\n    def __init__(self, path):\n        self.path = path\n\n"
        "    def read(self):\n        return self.path\n")


class WatchedSource:
    """Reads the file for one reader, and notes what of which layer and expert, in order with what is routed.

    An observer is called before a layer demands its experts, so between the two nothing is read: `routed` stops the
    reader until the layer has been counted, which it is when it demands them.
    """

    def __init__(self, path: Path) -> None:
        self.log: list[tuple] = []
        self.model = None
        self._file = path.open("rb")
        self._n_routed = 0
        self._owners: dict[int, tuple[int, int]] = {}
        with ModelMap(path) as model_map:
            for layer in model_map.layers:
                for expert in range(layer.n_expert):
                    for role in range(len(layer.roles)):
                        self._owners[model_map.expert_range(layer.il, expert, role).offset] = (layer.il, expert)

    def routed(self, routing) -> None:
        experts = sorted(set(routing.experts.ravel().tolist()))
        self._n_routed += 1
        self.log.append(("routed", routing.il, set(experts)))

    def read(self, file: int, offset: int, size: int) -> bytes:
        while self.model.engine.stats().layer_passes < self._n_routed:
            time.sleep(0)
        self.log.append(("read", *self._owners[offset]))
        self._file.seek(offset)
        return self._file.read(size)

    def passes(self) -> list[tuple[int, set[int], list[tuple[int, int]]]]:
        """Of each layer that was routed: il, its experts, and what was read before the next layer was."""
        found: list[tuple[int, set[int], list[tuple[int, int]]]] = []
        for event in self.log:
            if event[0] == "routed":
                found.append((event[1], event[2], []))
            elif found:
                found[-1][2].append(event[1:])
        return found


@pytest.fixture
def watched(small_moe: Path):
    source = WatchedSource(small_moe)
    with pyorch.load(small_moe, budget="30%", prefetch="none", reads="threads:1", source=source, n_ctx=256,
                     n_threads=1) as model:
        source.model = model
        model.engine.set_prefetch("quasi-hidden", 1, 0.0)
        model.engine.set_observer(source.routed)
        yield source
        model.engine.set_observer(None)


def decode(model, tokens, wait: bool = False) -> None:
    """wait: behind each token, for all that was guessed and is read ahead."""
    with Context(model.llama.model, n_ctx=256, n_threads=1) as context:
        for token in tokens:
            context.decode([token])
            if wait:
                model.engine.wait_idle()


def tokens_of(model) -> list[int]:
    return model.llama.tokenize(TEXT.encode(), add_bos=False)


def test_demand_goes_before_what_is_read_ahead(watched: WatchedSource):
    ahead = 0
    while ahead <= 100:  # there was something to go before: at least what is read behind a token for the next
        watched.log.clear()
        decode(watched.model, tokens_of(watched.model), wait=True)
        for il, experts, reads in watched.passes():
            demanded = [layer == il and expert in experts for layer, expert in reads]
            if True in demanded:
                last = len(demanded) - 1 - demanded[::-1].index(True)
                assert demanded[: last + 1].count(False) <= 1, (il, reads)  # that was under way
            ahead += demanded.count(False)


def test_guesses_of_a_layer_that_has_passed_are_not_read(watched: WatchedSource):
    decode(watched.model, tokens_of(watched.model))
    for il, experts, reads in watched.passes():
        stale = {(layer, expert) for layer, expert in reads if layer != (il + 1) % N_LAYERS and expert not in experts}
        assert len(stale) <= 1, (il, stale)  # the one that was under way


def test_what_the_last_token_used_is_not_given_up_for_a_guess(small_moe: Path):
    """The same token again and again needs the same experts: they are all there, whatever is guessed."""
    with pyorch.load(small_moe, budget="13%", prefetch="none", n_ctx=64, n_threads=1) as model:
        (token, *_) = tokens_of(model)
        with Context(model.llama.model, n_ctx=64, n_threads=1) as context:
            def again() -> None:
                context.clear()
                context.decode([token])
                model.engine.wait_idle()

            again()
            model.engine.set_prefetch("quasi-hidden", 1, 0.0)
            again()
            model.reset_stats()
            for _ in range(5):
                again()
            while model.stats().experts.prefetch_loads == 0:  # on a busy machine guesses may come too late to be read
                again()
        assert model.stats().experts.misses == 0


def test_guesses_that_do_not_come_true_are_no_longer_read(small_moe: Path):
    with pyorch.load(small_moe, budget="30%", prefetch="none", n_ctx=256, n_threads=1) as model:
        tokens = 4 * tokens_of(model)
        predicted: list[parts.Prediction] = []
        n_awaited = 0

        def in_step(routing: Routing) -> None:
            """A layer waits until the layer before it was predicted from: else what comes true may not be counted."""
            nonlocal n_awaited
            n_awaited += routing.il > 0
            while len(predicted) < n_awaited:
                time.sleep(0)

        model.engine.set_observer(in_step)
        parts.set_prediction_observer(model.engine, predicted.append)

        def loads(min_precision: float) -> int:
            """Read ahead for 20 tokens, after those before were counted."""
            model.engine.set_prefetch("quasi-hidden", 1, min_precision)
            decode(model, tokens[:-20], wait=True)
            model.reset_stats()
            decode(model, tokens[-20:], wait=True)
            return model.stats().experts.prefetch_loads

        assert loads(0.99) < loads(0.0) / 4, "of the experts that are named, half are used at most"
        model.engine.set_observer(None)
        parts.set_prediction_observer(model.engine, None)


def test_a_layer_may_have_a_predictor_of_its_own(small_moe: Path):
    with pyorch.load(small_moe, budget="30%", prefetch="none", n_ctx=256, n_threads=1) as model:
        model.layers[3].settings = pyorch.LayerSettings(prefetch="quasi-hidden:1:0")
        ahead: set[int] = set()
        while not ahead:  # on a busy machine guesses may come too late to be read
            decode(model, tokens_of(model))
            ahead = {il for il, layer in model.layers.items() if layer.stats().prefetch_loads}
        assert ahead == {3}
        model.layers[3].settings = pyorch.LayerSettings()
        model.engine.wait_idle()
        model.reset_stats()
        decode(model, tokens_of(model))
        assert not any(layer.stats().prefetch_loads for layer in model.layers.values())
        with pytest.raises(pyorch.PyorchError, match="for all layers together"):
            model.layers[3].settings = pyorch.LayerSettings(prefetch="auto")
        with pytest.raises(pyorch.PyorchError, match="crystal-ball"):
            model.layers[3].settings = pyorch.LayerSettings(prefetch="crystal-ball")
        assert model.layers[3].settings == pyorch.LayerSettings()


@pytest.mark.parametrize(("what", "name", "why"), [
    ("prefetch", "oracle", "needs to know the future"), ("policy", "belady", "needs to know the future"),
    ("policy", "fifo", "is there to be compared with"),
])
def test_what_is_for_replays_is_refused(small_moe: Path, what: str, name: str, why: str):
    with pytest.raises(pyorch.PyorchError, match=f'"{name}" {why}: only a replay'):
        pyorch.load(small_moe, budget="30%", n_ctx=64, **{what: name})
