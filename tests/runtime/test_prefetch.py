"""Prediction and prefetch: each predictor against a numpy reference, and logits that no prefetch changes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import parts
import pytest
from models import CHECKPOINT
from predicting import predict

import pyorch
from pyorch.cli import main
from pyorch.convert.expert_outputs import LayerExperts
from pyorch.library.choices import predictors
from pyorch.llama.context import Context
from pyorch.runtime.callbacks import Routing
from pyorch.runtime.model_map import ModelMap
from pyorch.sidecars.predictor import PredictorFile

N_EXPERT, N_LAYERS, N_USED = 64, 8, 6
TEXT = "class Reader:\n    def __init__(self, path):\n        self.path = path\n\n"
TEXT += "    def read(self):\n        return open(self.path).read()\n"


def decode(model, n_tokens: int = 40) -> np.ndarray:
    tokens = model.llama.tokenize(TEXT.encode(), add_bos=False)[:n_tokens]
    with Context(model.llama.model, n_ctx=256, n_threads=1) as context:
        return np.concatenate([context.decode([token]) for token in tokens])


@pytest.fixture(scope="module")
def resident_logits(small_moe: Path) -> bytes:
    with pyorch.load(small_moe, budget="100%", n_ctx=256, n_threads=1) as model:
        return decode(model).tobytes()


@pytest.mark.parametrize("distance", [1, 3])
@pytest.mark.parametrize("predictor", predictors().present)
def test_logits_do_not_depend_on_what_is_read_ahead(
    small_moe: Path, resident_logits: bytes, predictor: str, distance: int
):
    with pyorch.load(small_moe, budget="25%", prefetch="none", n_ctx=256, n_threads=1) as model:
        predict(model, predictor, distance, 0.0)
        assert decode(model).tobytes() == resident_logits
        stats = model.stats().experts
        assert stats.peak_bytes <= stats.budget_bytes
        assert predictor != "none" or stats.prefetch_loads == 0
        # On a busy machine guesses may come too late to be read.
        while predictor != "none" and model.stats().experts.prefetch_loads == 0:
            assert decode(model).tobytes() == resident_logits


def watched(model, predictor: str, distance: int) -> tuple[list[list[Routing]], list[tuple[int, parts.Prediction]]]:
    """What was routed, by token and layer, and what was predicted, each with the number of its token.

    A layer that is routed before earlier ones are predicted may go without: the text is decoded until many are there.
    """
    routings: list[Routing] = []
    found: list[parts.Prediction] = []
    predictions: list[tuple[int, parts.Prediction]] = []
    model.engine.set_prefetch(predictor, distance)
    model.engine.set_observer(routings.append)
    parts.set_prediction_observer(model.engine, found.append)
    tokens = model.llama.tokenize(TEXT.encode(), add_bos=False)[:12]
    n_decoded = 0
    with Context(model.llama.model, n_ctx=256, n_threads=1) as context:
        while len(predictions) <= len(tokens) * N_LAYERS // 2:
            context.clear()
            for token in tokens:
                context.decode([token])
                model.engine.wait_idle()
                predictions += [(n_decoded, prediction) for prediction in found]
                found.clear()
                n_decoded += 1
    model.engine.set_prefetch("none")
    model.engine.set_observer(None)
    parts.set_prediction_observer(model.engine, None)
    return [routings[i : i + N_LAYERS] for i in range(0, len(routings), N_LAYERS)], predictions


def router(model, il: int) -> np.ndarray:
    """float32[n_expert, n_embd]"""
    place = model.map.tensor_range(f"blk.{il}.ffn_gate_inp.weight")
    return np.fromfile(place.path, np.float32, place.size // 4, offset=place.offset).reshape(N_EXPERT, -1)


def assert_best(experts: np.ndarray, scores: np.ndarray) -> None:
    """The experts are those with the best scores, in their order, but for those that weights of 8 bits may exchange."""
    assert len(experts) == len(set(experts.tolist())) == 2 * N_USED
    np.testing.assert_allclose(scores[experts], -np.sort(-scores)[: 2 * N_USED], atol=2e-2 * np.abs(scores).max())


def test_an_engine_refuses_a_prefetch_that_cannot_be(small_moe: Path):
    with pyorch.load(small_moe, budget="50%", n_ctx=256) as model:
        with pytest.raises(pyorch.PyorchError, match="crystal-ball"):
            model.engine.set_prefetch("crystal-ball")
        for name in predictors().compared:
            with pytest.raises(pyorch.PyorchError, match=f'"{name}" is there to be compared with'):
                model.engine.set_prefetch(name)
        with pytest.raises(pyorch.PyorchError, match="distance from 1 to 8"):
            model.engine.set_prefetch("quasi-hidden", distance=0)


@pytest.fixture(scope="module")
def calibrated(small_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model with default vectors beside it."""
    path = tmp_path_factory.mktemp("calibrated") / "model.gguf"
    os.link(small_moe, path)
    data = CHECKPOINT / "facts-train.jsonl"
    assert main(["calibrate", str(path), "--data", str(data), "--tokens", "400", "--threads", "1"]) == 0
    return path


def test_default_vectors_are_the_mean_outputs_of_the_experts(calibrated: Path):
    """Of the experts as they are in the file, computed with numpy, on the router inputs that selected them."""
    il = 3
    seen: list[Routing] = []
    with pyorch.load(calibrated, budget="50%", prefetch="none", n_ctx=256, n_threads=1) as model:
        tokens = model.llama.tokenize(TEXT.encode(), add_bos=False)
        model.engine.set_observer(lambda routing: seen.append(routing) if routing.il == il else None)
        with Context(model.llama.model, n_ctx=256, n_threads=1) as context, model.engine.calibrating():
            context.decode(tokens)
        model.engine.set_observer(None)
        vectors, counts = model.engine.mean_outputs(il, model.llama.n_embd())
        assert counts.sum() == len(tokens) * N_USED
        (routing,) = seen
        experts = LayerExperts(model.map, il)
        for expert in np.flatnonzero(counts)[:8]:
            inputs = routing.inputs[(routing.experts == expert).any(axis=1)]
            assert len(inputs) == counts[expert]
            expected = experts.outputs(expert, inputs).mean(axis=0)
            np.testing.assert_allclose(vectors[expert], expected, atol=2e-2 * np.abs(expected).max())
        assert not vectors[counts == 0].any()


def test_quasi_hidden_predicts_as_numpy_does(calibrated: Path):
    with pyorch.load(calibrated, budget="50%", n_ctx=256, n_threads=1) as model, ModelMap(calibrated) as model_map:
        defaults = PredictorFile.read(calibrated.with_name("model.predictor.gguf"), model_map).default_vectors.vectors
        routings, predictions = watched(model, "quasi-hidden", 2)
        norms = {}
        for il in range(N_LAYERS):
            place = model.map.tensor_range(f"blk.{il}.ffn_norm.weight")
            norms[il] = np.fromfile(place.path, np.float32, place.size // 4, offset=place.offset)
        for token, prediction in predictions:
            routed = routings[token][prediction.il_from]
            hidden = routed.residuals[0] + routed.weights[0] @ defaults[prediction.il_from][routed.experts[0]]
            hidden = hidden / np.sqrt((hidden**2).mean() + 1e-6) * norms[prediction.il]
            assert_best(prediction.experts, router(model, prediction.il) @ hidden)


def test_default_vectors_of_another_model_are_refused(calibrated: Path, tmp_path: Path):
    other = tmp_path / "other.gguf"
    with pyorch.load(calibrated, budget="50%", n_ctx=64):
        pass
    content = bytearray(calibrated.read_bytes())
    with ModelMap(calibrated) as model_map:
        place = model_map.tensor_range("blk.2.ffn_gate_inp.weight")
    content[place.offset] ^= 1
    other.write_bytes(content)
    (tmp_path / "other.predictor.gguf").write_bytes(calibrated.with_name("model.predictor.gguf").read_bytes())
    with pytest.raises(pyorch.FormatError, match="other.predictor.gguf"):
        pyorch.load(other, budget="50%", prefetch="quasi-hidden", n_ctx=64)
    for prefetch in ("none", "auto"):  # auto does without them
        with pyorch.load(other, budget="50%", prefetch=prefetch, n_ctx=64):
            pass
