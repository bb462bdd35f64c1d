"""Inside a callback of an engine: what might wait for the callback is refused in a sentence, the rest works.

The read callback is tested by native/tests/api/c_api.c.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import parts
import pytest
from faulty_source import FaultySource
from models import small_model

from pyorch.errors import PyorchError
from pyorch.llama.context import Context
from pyorch.llama.model import Model
from pyorch.runtime.callbacks import Routing
from pyorch.runtime.engine import Engine
from pyorch.sidecars.history import ExpertMaps

IL = 3

REFUSED: dict[str, Callable[[Model], object]] = {
    "pyorch_engine_free": lambda model: model.engine.close(),
    "pyorch_set_budget": lambda model: model.engine.set_budget(model.map.info.slots_bytes),
    "pyorch_set_policy": lambda model: model.engine.set_policy("lru"),
    "pyorch_set_layer_limits": lambda model: model.engine.set_layer_limits(IL, 0, 64),
    "pyorch_wait_idle": lambda model: model.engine.wait_idle(),
    "pyorch_reset_stats": lambda model: model.engine.reset_stats(),
    "pyorch_set_prefetch": lambda model: model.engine.set_prefetch("none"),
    "pyorch_check_routers": lambda model: model.engine.check_routers(),
    "pyorch_set_default_vectors": lambda model: model.engine.set_default_vectors(IL, np.zeros((64, 128))),
    "pyorch_set_hybrid": lambda model: model.engine.set_hybrid([False] * 8),
    "pyorch_set_history": lambda model: model.engine.set_history(ExpertMaps.for_model(model.map)),
    "pyorch_set_speculation": lambda model: model.engine.set_speculation("none"),
    "pyorch_set_observer": lambda model: model.engine.set_observer(None),
    "parts_set_prediction_observer": lambda model: parts.set_prediction_observer(model.engine, None),
    "pyorch_set_substitution": lambda model: model.engine.set_substitution(IL, {}),
    "pyorch_set_cache": lambda model: model.engine.set_cache(IL, None),
    "pyorch_listen": lambda model: model.engine.listen("token", "model"),
    "pyorch_stop_listening": lambda model: model.engine.stop_listening(),
    "pyorch_set_placement": lambda model: model.engine.set_placement(IL, [-1] * 64),
    "pyorch_engine_new": lambda model: Engine(model.map, "50%").close(),
}
ALLOWED: dict[str, Callable[[Model], object]] = {
    "residency": lambda model: model.engine.residency(IL),
    "stats": lambda model: model.engine.stats(),
    "layer stats": lambda model: model.engine.stats(IL),
    "substitution stats": lambda model: model.engine.substitution_stats(),
    "speculation stats": lambda model: model.engine.speculation_stats(),
    "remote stats": lambda model: model.engine.remote_stats(),
    "error": lambda model: model.engine.error(),
    "router": lambda model: model.engine.router(IL),
    "prefetch": lambda model: model.engine.prefetch(IL, [1]),
    "pin": lambda model: model.engine.pin(IL, [2]),
    "unpin": lambda model: model.engine.unpin(IL, [2]),
    "evict": lambda model: model.engine.evict(IL, [3]),
    "map": lambda model: model.map.expert_range(IL, 0, 0),
}


@pytest.fixture(scope="module")
def model(small_moe: Path) -> Iterator[Model]:
    with small_model(small_moe, "50%") as model:
        yield model


def sentences(model: Model, calls: Mapping[str, Callable[[Model], object]]) -> dict[str, str]:
    """What each call answered: "" for those that worked."""
    found = {}
    for name, call in calls.items():
        try:
            call(model)
            found[name] = ""
        except PyorchError as error:
            found[name] = str(error)
    return found


@pytest.mark.parametrize("observe", [Engine.set_observer, parts.set_prediction_observer])
def test_an_observer_may_ask_and_order_and_is_refused_what_might_wait_for_it(
    model: Model, prompt_tokens: list[int], observe: Callable
) -> None:
    seen: list[dict[str, str]] = []
    model.engine.set_prefetch("quasi-hidden")
    with Context(model.llama.model, n_threads=1) as context:
        context.decode(prompt_tokens[:8])
        observe(
            model.engine, lambda _shown: seen.append(sentences(model, REFUSED | ALLOWED)) if not seen else None)
        for token in prompt_tokens[8:12]:
            context.decode([token])
            model.engine.wait_idle()  # a thread without a turn forgets all but the last layers: those it is shown
        observe(model.engine, None)
    assert len(seen) == 1
    for name in REFUSED:
        assert seen[0][name].startswith(f"{name} cannot be called inside a callback"), (name, seen[0][name])
    for name in ALLOWED:
        assert seen[0][name] == "", name

    # Outside of callbacks all of it works, but for the end of an engine that has a model.
    outside = {name: call for name, call in (REFUSED | ALLOWED).items() if name != "pyorch_engine_free"}
    assert not any(sentences(model, outside).values())


def test_a_decode_inside_an_observer_fails_and_the_outer_one_does_not(model: Model, prompt_tokens: list[int]) -> None:
    seen: list[str] = []
    with Context(model.llama.model, n_threads=1) as outer, Context(model.llama.model, n_threads=1) as inner:
        def decode(_routing: object) -> None:
            if not seen:
                try:
                    inner.decode(prompt_tokens[:2])
                    seen.append("")
                except PyorchError as error:
                    seen.append(str(error))

        expected = outer.decode(prompt_tokens[:4])
        outer.clear()
        model.engine.set_observer(decode)
        actual = outer.decode(prompt_tokens[:4])
        model.engine.set_observer(None)
        assert seen == ["a callback of an engine cannot decode: decode in another thread, or afterwards"]
        assert actual.tobytes() == expected.tobytes()
        assert inner.decode(prompt_tokens[:2]).shape[0] == 2


def test_closing_a_model_inside_an_observer_is_refused_and_spares_the_decode(
    model: Model, prompt_tokens: list[int]
) -> None:
    refusals: list[str] = []

    def close(_routing: object) -> None:
        try:
            model.close()
        except PyorchError as error:
            refusals.append(str(error))

    with Context(model.llama.model, n_threads=1) as context:
        expected = context.decode(prompt_tokens[:4])
        context.clear()
        model.engine.set_observer(close)
        actual = context.decode(prompt_tokens[:4])
        model.engine.set_observer(None)
    assert len(refusals) == len(model.layers) and "cannot be called inside a callback" in refusals[0]
    assert actual.tobytes() == expected.tobytes()


def test_closing_a_model_inside_a_source_is_refused_and_spares_the_text(small_moe: Path) -> None:
    refusals: list[str] = []

    class Closing(FaultySource):
        def read(self, file: int, offset: int, size: int) -> bytes:
            if not refusals:
                try:
                    model.close()
                except PyorchError as error:
                    refusals.append(str(error))
            return super().read(file, offset, size)

    with small_model(small_moe, "20%", source=Closing(small_moe)) as model:
        text = "".join(model.generate("import os", max_tokens=4, temperature=0))
    assert text and "cannot be called inside a callback" in refusals[0]


def test_an_interrupt_inside_an_observer_reaches_the_caller_of_the_decode(
    model: Model, prompt_tokens: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    routed: list[int] = []

    def interrupted(routing: Routing) -> None:
        routed.append(routing.il)
        if len(routed) == 1:
            raise KeyboardInterrupt

    model.engine.set_observer(interrupted)
    try:
        with Context(model.llama.model, n_threads=1) as context, pytest.raises(KeyboardInterrupt):
            context.decode(prompt_tokens[:4])
        routed.clear()
        with pytest.raises(KeyboardInterrupt):
            list(model.generate("import os", max_tokens=2, temperature=0))
    finally:
        model.engine.set_observer(None)
    assert "Traceback" not in capfd.readouterr().err
    assert list(model.generate("import os", max_tokens=2, temperature=0))


def test_two_threads_that_change_the_observer_take_none_away_from_the_other(model: Model) -> None:
    ended = threading.Event()

    def change() -> None:
        while not ended.is_set():
            model.engine.set_observer(lambda routing: None)

    threads = [threading.Thread(target=change) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        with Context(model.llama.model, n_threads=1) as ctx:
            for _ in range(20):
                ctx.decode(list(range(20, 40)))
                ctx.clear()
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    model.engine.set_observer(None)
