"""The policy `learned` in a running model: what teaches it, and what is kept of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from models import CHECKPOINT

import pyorch
from pyorch.cli import main
from pyorch.errors import FormatError, PyorchError
from pyorch.library.bindings import array, check, given, lib
from pyorch.llama.context import Context
from pyorch.llama.model import Model
from pyorch.runtime.engine import Engine
from pyorch.runtime.model_map import ModelMap
from pyorch.sidecars import container, eviction
from pyorch.traces.recording import Recording
from pyorch.traces.replay import ReplaySettings, replay

LAYERS = tuple(range(8))


def loaded(path: Path, budget: str = "40%", **settings) -> Model:
    return pyorch.load(path, budget=budget, policy="learned", prefetch="none", n_ctx=256, n_threads=1, **settings)


def tokens_of(model: Model, n: int) -> list[int]:
    return model.llama.tokenize((CHECKPOINT / "text-test.txt").read_bytes(), add_bos=False)[:n]


def taught(model: Model) -> bool:
    """Whether any value was moved towards what came of it."""
    return bool(model.engine.learned()["tables"].any())


def test_a_replay_learns_what_an_engine_learns(small_moe: Path) -> None:
    seen = []
    with loaded(small_moe, "25%") as model, Context(model.llama.model, n_ctx=256, n_threads=1) as context:
        tokens = tokens_of(model, 120)
        model.engine.set_observer(lambda routing: seen.append((routing.experts[0], routing.weights[0])))
        model.reset_stats()
        for token in tokens:
            context.decode([token])
        model.engine.set_observer(None)
        real = model.engine.stats()
    experts, weights = (np.array([one[i] for one in seen]).reshape(120, 8, 6) for i in (0, 1))
    with ModelMap(small_moe) as model_map:
        routing = Recording(LAYERS, 64, experts, weights, np.zeros(120))
        simulated = replay(model_map, routing, ReplaySettings("learned", budget="25%")).stats
    assert (simulated.hits, simulated.misses, simulated.evictions) == (real.hits, real.misses, real.evictions)
    assert 0.3 < real.hit_rate < 0.95


def test_prompts_and_the_first_token_behind_one_teach_nothing(small_moe: Path) -> None:
    with loaded(small_moe) as model, Context(model.llama.model, n_ctx=256, n_threads=1) as context:
        tokens = tokens_of(model, 60)
        context.decode(tokens[:40])
        context.decode(tokens[40:41])
        assert not taught(model)
        context.decode(tokens[41:42])
        assert taught(model)


def test_what_begins_anew_does_not_follow_on(small_moe: Path) -> None:
    with loaded(small_moe) as model, Context(model.llama.model, n_ctx=256, n_threads=1) as context:
        tokens = tokens_of(model, 3)
        for token in tokens:
            context.clear()
            context.decode([token])
        assert not taught(model)
        context.decode([tokens[0]])
        assert taught(model)


def test_logits_are_those_of_the_resident_model(small_moe: Path) -> None:
    assert main(["verify", str(small_moe), "--budget", "25%", "--policy", "learned", "--tokens", "64",
                 "--threads", "1"]) == 0


def test_no_more_moments_are_copied_than_there_is_room_for(small_moe: Path) -> None:
    """Tokens come between the question how many there are and the copy."""
    with loaded(small_moe) as model, Context(model.llama.model, n_ctx=256, n_threads=1) as context:
        for token in tokens_of(model, 6):
            context.decode([token])
        whole = model.engine.learned()
        moments, previous = np.full((3, *whole["moments"].shape[1:]), -7, np.int32), np.full(3, -7, np.int32)
        raw = given("pyorch_learned", n_moments=2, moments=array("int32_t", moments),
                    previous=array("int32_t", previous))
        check(lib.pyorch_get_learned(model.engine.handle, raw))
    assert len(whole["previous"]) == 6 and raw.n_moments == 2
    assert np.array_equal(moments[:2], whole["moments"][-2:]) and (moments[2] == -7).all()
    assert previous.tolist() == [-1, 0, -7]


def test_what_cannot_have_been_learned_is_refused(small_moe: Path, tmp_path: Path) -> None:
    path = tmp_path / "eviction.gguf"
    with ModelMap(small_moe) as model_map, Engine(model_map, "40%", "learned", simulated=True) as engine:
        good = {**engine.learned(), "moments": np.zeros((2, 8, 2), np.int32), "previous": np.array([-1, 0], np.int32)}
        for changes, sentence in (
            ({"bias": np.full_like(good["bias"], np.nan)}, "bias that cannot be"),
            ({"counts": good["counts"] + 2}, "counts that cannot be"),
            ({"weights": np.zeros_like(good["weights"])}, "squares that cannot be"),
            ({"tables": good["tables"][:4]}, r"\[4, 3, 64, 64\] as tables, the model needs \[8, 3, 64, 64\]"),
            ({"bias": good["bias"].astype(np.float64)}, "nothing as bias"),
            ({"previous": np.array([-1, 1], np.int32)}, "moments in an order that cannot be"),
            ({"previous": np.array([-1, 0, 0], np.int32), "moments": np.zeros((3, 8, 2), np.int32)},
             "moments in an order that cannot be"),
            ({"moments": np.zeros((3, 8, 1), np.int32)}, r"\[3, 8, 1\] as moments, the model needs \[2, 8, 2\]"),
        ):
            container.write(path, eviction.KIND, eviction.VERSION, model_map, {}, {**good, **changes})
            with pytest.raises(FormatError, match=sentence):
                eviction.read(path, model_map).tell(engine)
        eviction.write(path, engine, model_map, engine.learned())
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(FormatError, match="damaged or cut off"):
            eviction.read(path, model_map).tell(engine)
        engine.set_policy("lru")
        with pytest.raises(PyorchError, match="only learned does"):
            engine.learned()
