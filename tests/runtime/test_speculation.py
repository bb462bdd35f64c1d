"""Speculative execution: layers compute what was forecast for them, and it is lossy, counted and can be ended."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import parts
import pytest
from buddy_lists import complete_buddies
from ghost_layers import N_EXPERT, random_ghosts
from models import CHECKPOINT

import pyorch
from pyorch.cli import main
from pyorch.llama.apply import apply_substitution
from pyorch.llama.context import Context
from pyorch.runtime.callbacks import Routing
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.substitution import Substitution

N_LAYERS, N_USED = 8, 6
TEXT = "class Reader:\n    def __init__(self, path):\n        self.path = path\n"


def decode(model, tokens: list[int]) -> np.ndarray:
    with Context(model.llama.model, n_ctx=256, n_threads=1) as context:
        return np.concatenate([context.decode([token]) for token in tokens])


@pytest.fixture
def model(small_moe: Path):
    with pyorch.load(small_moe, budget="30%", prefetch="none", n_ctx=256, n_threads=1) as loaded:
        yield loaded


def tokens_of(model) -> list[int]:
    return model.llama.tokenize(TEXT.encode(), add_bos=False)


def test_layers_compute_what_was_forecast_for_them(model):
    routings: list[Routing] = []
    predictions: list[parts.Prediction] = []
    tokens = tokens_of(model)
    model.speculate("quasi-hidden:1:1")
    model.engine.set_observer(routings.append)
    parts.set_prediction_observer(model.engine, predictions.append)
    model.reset_stats()
    with model.engine.calibrating():
        decode(model, tokens)
    model.engine.set_observer(None)
    parts.set_prediction_observer(model.engine, None)

    forecast = {
        il: [prediction.experts[:N_USED] for prediction in predictions if prediction.il == il]
        for il in range(1, N_LAYERS)
    }
    chosen = {il: [routing.experts[0] for routing in routings if routing.il == il] for il in range(N_LAYERS)}
    right = sum(len(set(f) & set(c)) for il in forecast for f, c in zip(forecast[il], chosen[il], strict=True))
    stats = model.stats().speculation
    assert (stats.tokens, stats.slots) == (len(tokens) * N_LAYERS, len(tokens) * (N_LAYERS - 1) * N_USED)
    assert stats.right == right < stats.slots
    for il in range(N_LAYERS):
        _, counts = model.engine.mean_outputs(il, model.llama.n_embd())
        computed = forecast[il] if il else chosen[0]  # nothing comes before the first layer
        assert counts.tolist() == np.bincount(np.concatenate(computed), minlength=len(counts)).tolist()


def test_nothing_is_read_that_is_not_computed(model):
    """A guess that is only read ahead may be wrong; one that is executed cannot."""
    tokens = tokens_of(model)
    model.engine.set_prefetch("quasi-hidden", 1, 0.0)
    while model.stats().experts.prefetch_wasted == 0:
        decode(model, tokens)
    model.speculate("quasi-hidden:1:0")
    decode(model, tokens[:1])  # what was guessed before is settled
    model.reset_stats()
    decode(model, tokens)
    while model.stats().experts.prefetch_loads == 0:  # on a busy machine the layer may come before the reader does
        decode(model, tokens)
    assert model.stats().experts.prefetch_wasted == 0


def test_a_model_is_lossless_again_when_speculation_ends(model):
    tokens = tokens_of(model)
    before = decode(model, tokens)
    model.speculate("quasi-hidden")
    assert decode(model, tokens).tobytes() != before.tobytes()
    model.speculate(None)
    assert model.stats().speculation is None
    assert decode(model, tokens).tobytes() == before.tobytes()


def test_without_a_predictor_nothing_is_speculated(model):
    """And nobody waits for forecasts that are not made."""
    tokens = tokens_of(model)
    lossless = decode(model, tokens)
    model.engine.set_speculation("decode")
    assert decode(model, tokens).tobytes() == lossless.tobytes()
    assert model.engine.speculation_stats().slots == 0


def test_prompts_keep_to_their_routers_unless_asked(model):
    tokens = tokens_of(model)

    def prefill() -> np.ndarray:
        with Context(model.llama.model, n_ctx=256, n_threads=1) as context:
            return context.decode(tokens)

    lossless = prefill()
    model.speculate("quasi-hidden")
    assert prefill().tobytes() == lossless.tobytes()
    model.speculate("quasi-hidden", prompts=True)
    speculated = prefill()
    assert speculated.tobytes() != lossless.tobytes()
    # A prompt computed at once is what its tokens are one by one, but for the kernels: a near tie may send some
    # elsewhere.
    one_by_one = decode(model, tokens)
    assert np.median(np.abs(speculated - one_by_one)) < 0.1 * np.median(np.abs(speculated - lossless))


def test_what_cannot_be_executed_is_refused(model, small_moe: Path, capsys):
    with pytest.raises(pyorch.PyorchError, match="expert-map.*no weights"):
        model.speculate("expert-map")
    with pytest.raises(pyorch.PyorchError, match="needs an estimator"):
        model.speculate("hybrid")
    command = ["run", str(small_moe), "-p", "x", "-n", "2", "--budget", "50%", "--ctx", "64", "--speculate"]
    assert main([*command, "--prefetch", "none"]) == 2
    assert "no weights to compute with" in capsys.readouterr().err


def test_run_says_what_was_computed_as_forecast(small_moe: Path, tmp_path: Path, capsys):
    path = tmp_path / "model.gguf"
    os.link(small_moe, path)
    assert main(["run", str(path), "-p", "import", "-n", "8", "--temp", "0", "--budget", "50%", "--ctx", "64",
                 "--threads", "1", "--speculate"]) == 0
    assert "expert slots computed as predicted" in capsys.readouterr().err


def test_eval_has_rows_of_speculation(small_moe: Path, capsys):
    import json

    data = CHECKPOINT / "facts-test.jsonl"
    command = ["eval", "arc", str(small_moe), "--data", str(data), "--limit", "8", "--cache-rate", "0.5",
               "--threads", "1", "--speculate", "quasi-hidden", "--speed-tokens", "0", "--json"]
    assert main(command) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["method"] for row in rows] == ["original", "speculate"]
    assert rows[-1]["settings"] == "quasi-hidden"


GHOSTS = "mode=none,miss=ghost,order=weight"
NOTHING, EVERYTHING = np.zeros(N_EXPERT, bool), np.ones(N_EXPERT, bool)


def set_ghosts(model, substitution: str | None, residents: dict[int, np.ndarray] | None) -> None:
    for il in model.layers:
        random_ghosts(1).apply(model.engine, il)
        apply_substitution(model.engine, il, None if substitution is None else Substitution.parse(substitution), None)
    model.set_cache(residents)
    model.reset_stats()


@pytest.mark.parametrize("settings", [GHOSTS, f"{GHOSTS},sacred=1", "mode=none,miss=drop"])
def test_what_was_not_forecast_is_treated_as_absent_and_what_was_as_there(model, settings: str):
    """As without speculation, of a cache that holds for each token what was forecast for it."""
    tokens = tokens_of(model)[:16]
    predictions: list[parts.Prediction] = []
    set_ghosts(model, settings, dict.fromkeys(model.layers, NOTHING))
    model.speculate("quasi-hidden:1:1")
    parts.set_prediction_observer(model.engine, predictions.append)
    speculated = decode(model, tokens)
    parts.set_prediction_observer(model.engine, None)
    counts, right = model.engine.substitution_stats(), model.engine.speculation_stats()
    assert counts.ghosts + counts.dropped > 0 and right.slots == right.right > 0
    assert counts.ghosts + counts.dropped + counts.refused_sacred + right.right == len(tokens) * (N_LAYERS - 1) * N_USED

    model.speculate(None)
    forecast = {
        il: [prediction.experts[:N_USED] for prediction in predictions if prediction.il == il]
        for il in range(1, N_LAYERS)
    }
    with Context(model.llama.model, n_ctx=256, n_threads=1) as context:
        for n, token in enumerate(tokens):
            there = {il: np.isin(np.arange(N_EXPERT), forecast[il][n]) for il in forecast}
            set_ghosts(model, settings, {0: EVERYTHING, **there})  # the first layer waits: nothing comes before it
            assert context.decode([token]).tobytes() == speculated[n : n + 1].tobytes()


def test_ghosts_of_what_is_there_compute_nothing_and_the_router_is_obeyed(model):
    tokens = tokens_of(model)
    lossless = decode(model, tokens)
    set_ghosts(model, GHOSTS, dict.fromkeys(model.layers, EVERYTHING))
    model.speculate("quasi-hidden:1:1")
    assert decode(model, tokens).tobytes() == lossless.tobytes()
    assert model.engine.substitution_stats().changed == 0


def test_run_and_eval_speculate_with_ghosts_for_what_was_not_predicted(small_moe: Path, tmp_path: Path, capsys):
    import json

    path = tmp_path / "model.gguf"
    os.link(small_moe, path)
    with ModelMap(path) as model_map:
        random_ghosts(1).write(tmp_path / "model.ghosts.gguf", model_map)
        complete_buddies().write(tmp_path / "model.buddies.gguf", model_map)
    run = ["run", str(path), "-p", "import", "-n", "8", "--temp", "0", "--budget", "20%", "--ctx", "64",
           "--threads", "1", "--prefetch", "quasi-hidden", "--json", "--lossy", GHOSTS]
    assert main([*run, "--speculate"]) == 0
    stats = json.loads(capsys.readouterr().out)["stats"]
    assert stats["speculation"]["right"] > 0 and stats["substitution"]["ghosts"] > 0
    data = CHECKPOINT / "facts-test.jsonl"
    command = ["eval", "arc", str(path), "--data", str(data), "--limit", "4", "--cache-rate", "0.5", "--threads", "1",
               "--speculate", f"quasi-hidden+{GHOSTS}", "--speed-tokens", "0", "--json"]
    assert main(command) == 0
    row = json.loads(capsys.readouterr().out)[-1]
    assert row["settings"].startswith("quasi-hidden+mode=none") and row["judged_ghosts_per_token"] > 0
    command = ["eval", "perplexity", str(path), "--data", str(CHECKPOINT / "text-test.txt"), "--tokens", "24",
               "--threads", "1", "--speculate", "--prefetch", "quasi-hidden", "--cache-rate", "0.5",
               "--lossy", GHOSTS, "--json"]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["substitution"]["ghosts"] > 0 and found["speculation"]["right"] > 0 and found["kl_divergence"] > 0
    assert main([*command[:-3], "--json"]) == 2
    assert "say with --lossy how experts are treated that were not predicted" in capsys.readouterr().err
