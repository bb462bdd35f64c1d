"""Estimators: training, the sidecar that holds them, and what they compute in C++ against torch."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import parts
import pytest
from models import CHECKPOINT, PROMPT, small_model
from shared import torch_at_hand, with_torch

import pyorch
from pyorch.cli import main
from pyorch.convert import children
from pyorch.convert.estimator import split
from pyorch.errors import FormatError, PyorchError
from pyorch.eval.calibration import Calibrated, Trial
from pyorch.llama.context import Context
from pyorch.runtime.callbacks import Routing
from pyorch.runtime.engine import Engine
from pyorch.runtime.model_map import ModelMap
from pyorch.runtime.routers import Router
from pyorch.sidecars.predictor import DefaultVectors, PredictorFile

N_EXPERT, N_LAYERS, N_USED = 64, 8, 6
N_TOKENS = 24
FACTS, TEXT = CHECKPOINT / "facts-train.jsonl", CHECKPOINT / "text-test.txt"
LEARNED = ["--data", str(FACTS), "--tokens", "3000", "--threads", "1"]
SIZES = ["--latent", "32", "--hidden", "48"]


@dataclass(frozen=True)
class Made:
    """A model with default vectors and an estimator beside it, and what was reported of its training."""

    model: Path
    report: dict

    def read(self) -> PredictorFile:
        with ModelMap(self.model) as model_map:
            return PredictorFile.read(self.model.with_name("model.predictor.gguf"), model_map)


@pytest.fixture(scope="module")
def made(small_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    directory = tmp_path_factory.mktemp("estimator")
    model = directory / "model.gguf"
    os.link(small_moe, model)
    assert main(["calibrate", str(model), "--data", str(FACTS), "--tokens", "1000", "--threads", "1"]) == 0
    return Made(model, trained(model, "--epochs", "4", *SIZES))


def trained(model: Path, *options: str) -> dict:
    """The report of a training."""
    printed = io.StringIO()
    with torch_at_hand(), contextlib.redirect_stdout(printed):
        assert main(["train-predictor", str(model), *LEARNED, "--json", *options]) == 0
    return json.loads(printed.getvalue())


# Training


def test_training_improves_on_quasi_hidden_states(made: Made) -> None:
    losses, layers = made.report["losses"], made.report["layers"]
    assert losses[made.report["best_part"]] == min(losses) < 0.8 * losses[0]
    assert [layer["il"] for layer in layers] == list(range(1, N_LAYERS))
    mean = {name: np.mean([layer[name] for layer in layers]) for name in ("quasi_hidden", "estimator")}
    assert mean["estimator"] > mean["quasi_hidden"] + 0.02
    file = made.read()
    tokens, recalls = file.curve.T
    assert tokens[0] == 0 and (np.diff(tokens) > 0).all() and len(recalls) == len(losses)
    assert recalls[made.report["best_part"]] == pytest.approx(mean["estimator"]) and recalls[0] < recalls[-1]
    assert file.hybrid == {0: False} | {layer["il"]: layer["estimator"] > layer["quasi_hidden"] for layer in layers}
    assert file.default_vectors is not None and file.distance in (1, 2, 3, 4)


def test_training_again_gives_the_same_estimator(made: Made, tmp_path: Path) -> None:
    output = tmp_path / "again.gguf"
    report = trained(made.model, "--epochs", "4", *SIZES, "-o", str(output))
    with ModelMap(made.model) as model_map:
        again = PredictorFile.read(output, model_map).estimator.arrays()
    first = made.read().estimator.arrays()
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert report["losses"] == made.report["losses"]


def test_training_that_gets_worse_is_stopped_and_its_best_is_kept(made: Made, tmp_path: Path) -> None:
    output = tmp_path / "out.gguf"
    report = trained(made.model, "--epochs", "4", *SIZES, "--lr", "0.9", "-o", str(output))
    losses = report["losses"]
    assert len(losses) == report["best_part"] + 4 + 1 < 17
    assert losses[report["best_part"]] == min(losses)


def test_no_request_is_both_trained_on_and_held_out() -> None:
    held_out = split(350, 0.1, seed=3)
    assert held_out.dtype == bool and held_out.sum() == 35 and len(held_out) == 350
    assert not np.array_equal(held_out, split(350, 0.1, seed=4))
    assert split(2, 0.001, seed=0).sum() == split(2, 0.999, seed=0).sum() == 1


def test_a_text_of_one_request_is_one_sentence(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    text = tmp_path / "short.txt"
    text.write_text("a line\n")
    refused(capsys, ["train-predictor", str(made.model), "--data", str(text)], "the text makes 1 request: two are")


def test_a_decode_that_fails_ends_the_training(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: object, *_: object) -> None:
        raise PyorchError("no decode today")

    sidecar = made.model.with_name("model.predictor.gguf")
    before = sidecar.read_bytes()
    monkeypatch.setattr(Context, "decode", broken)
    assert main(["train-predictor", str(made.model), *LEARNED]) == 2
    assert sidecar.read_bytes() == before


def test_more_tokens_than_fit_take_the_places_of_others(tmp_path: Path) -> None:
    with_torch(Path(__file__).with_name("pool_process.py"), Path(children.__file__).parent)


def test_an_estimator_needs_default_vectors(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model = tmp_path / "model.gguf"
    os.link(made.model, model)
    refused(capsys, ["train-predictor", str(model), *LEARNED],
            f"{tmp_path / 'model.predictor.gguf'} does not exist, which would have default vectors")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize("options, complaint", [
    (["--epochs", "0"], "epochs is 0"),
    (["--val-share", "1"], "val_share is 1: use a share"),
    (["--lr", "-1"], "lr is -1"),
    (["--latent", "0"], "n_latent is 0"),
    (["-o", "absent/x.gguf"], "absent"),
])
def test_settings_that_cannot_be_are_one_sentence(
    made: Made, capsys: pytest.CaptureFixture, options: list[str], complaint: str
) -> None:
    refused(capsys, ["train-predictor", str(made.model), *LEARNED, *options], complaint)


def refused(capsys: pytest.CaptureFixture, command: list[str], complaint: str) -> None:
    capsys.readouterr()
    assert main(command) == 2
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1


@pytest.mark.parametrize("gating", ["softmax", "sigmoid", "softmax-selected", "sqrt-softplus"])
@pytest.mark.parametrize("choice", [dict(), dict(n_groups=8, n_groups_used=3)], ids=["all", "groups"])
@pytest.mark.parametrize("biased", [False, True])
def test_recall_is_counted_by_the_choice_that_routers_make(
    small_moe: Path, tmp_path: Path, gating: str, choice: dict, biased: bool
) -> None:
    random = np.random.default_rng(0)
    logits = random.normal(size=(200, N_EXPERT)).astype(np.float32)
    bias = random.normal(scale=0.1, size=N_EXPERT).astype(np.float32) if biased else None
    router = Router(np.eye(N_EXPERT, dtype=np.float32), None, bias, None, 0.0, gating, N_USED, **choice)
    with ModelMap(small_moe) as model_map, Engine(model_map, "100%", simulated=True) as engine:
        engine.set_router(1, router)
        selected, _ = parts.apply_router(engine, 1, logits)
    plain = np.argsort(-logits, axis=-1)[:, :N_USED]
    assert (np.sort(plain) == np.sort(selected)).all() == (not biased and not choice)
    arrays = {f"{name}.1": array for name, array in router.arrays().items()}
    arrays |= {name: np.array(value) for name, value in router.choice().items()} | {"eps": np.zeros(2)}
    np.savez(
        tmp_path / "in.npz",
        **arrays,
        **{"gate.0": router.gate, "logits": logits, "selected": selected.astype(np.int64)},
    )
    found = with_torch(
        Path(__file__).with_name("recall_process.py"), Path(children.__file__).parent, tmp_path / "in.npz"
    )
    assert int(found) == selected.size


# The sidecar


def test_a_predictor_file_gives_back_what_was_written(made: Made, tmp_path: Path) -> None:
    path, whole = tmp_path / "a.gguf", dataclasses.replace(made.read(), distance=3)
    vectors, estimator = whole.default_vectors, whole.estimator
    with ModelMap(made.model) as model_map:
        whole.write(path, model_map)
        read = PredictorFile.read(path, model_map)
        assert read.distance == 3 and read.hybrid == whole.hybrid and np.array_equal(read.curve, whole.curve)
        assert read.default_vectors.n_tokens == vectors.n_tokens
        for il in range(N_LAYERS):
            assert np.array_equal(read.default_vectors.vectors[il], vectors.vectors[il])
            assert np.array_equal(read.default_vectors.counts[il], vectors.counts[il])
        for name, array in estimator.arrays().items():
            assert np.array_equal(getattr(read.estimator, name), array)
        PredictorFile(vectors).write(path, model_map)
        read = PredictorFile.read(path, model_map)
        assert (read.estimator, read.hybrid, read.distance, read.curve) == (None, None, None, None)
        PredictorFile(estimator=estimator).write(path, model_map)
        assert PredictorFile.read(path, model_map).default_vectors is None


def test_a_predictor_file_of_another_model_is_refused(made: Made, small_moe_q4: Path) -> None:
    with ModelMap(small_moe_q4) as other, pytest.raises(FormatError, match="belongs to another model"):
        PredictorFile.read(made.model.with_name("model.predictor.gguf"), other)


@pytest.mark.parametrize("change, complaint", [
    (dict(in_bias=np.zeros(31, np.float32)), "do not fit together"),
    (dict(in_weight=np.zeros((32, 64), np.float32)), "do not fit"),
    (dict(norm_bias=np.full(32, np.nan, np.float32)), "does not hold numbers only"),
])
def test_a_damaged_estimator_is_refused(made: Made, tmp_path: Path, change: dict, complaint: str) -> None:
    path, file = tmp_path / "a.gguf", made.read()
    with ModelMap(made.model) as model_map:
        PredictorFile(estimator=dataclasses.replace(file.estimator, **change)).write(path, model_map)
        with pytest.raises(FormatError, match=complaint):
            PredictorFile.read(path, model_map)


def test_a_damaged_course_of_training_is_refused(made: Made, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    with ModelMap(made.model) as model_map:
        PredictorFile(estimator=made.read().estimator, curve=np.zeros((3, 4), np.float32)).write(path, model_map)
        with pytest.raises(FormatError, match="no list of pairs"):
            PredictorFile.read(path, model_map)


def test_calibrating_again_says_that_the_estimator_is_gone(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    model, sidecar = tmp_path / "model.gguf", tmp_path / "model.predictor.gguf"
    os.link(made.model, model)
    shutil.copy(made.model.with_name("model.predictor.gguf"), sidecar)
    assert main(["calibrate", str(model), "--data", str(TEXT), "--tokens", "200", "--threads", "1"]) == 0
    captured = capsys.readouterr()
    assert "held an estimator" in captured.err
    assert (
        "how many layers ahead to read was not tried: that takes 10 pieces of at most 512 tokens, and fewer were "
        "computed"
        in captured.out
    )
    with ModelMap(model) as model_map:
        file = PredictorFile.read(sidecar, model_map)
        assert file.estimator is None and file.distance is None
    assert main(["calibrate", str(model), "--data", str(TEXT), "--tokens", "200", "--threads", "1"]) == 0
    assert "held an estimator" not in capsys.readouterr().err


@pytest.mark.parametrize("milliseconds, distance", [
    ([9, 8, 7, 7.5, 7.6], 2),
    ([9, 8, 7.01, 7, 7.1], 2),
    ([9, 9.5, 9.1, 9.2, 9.3], 2),
    ([9, 9, 9, 9, 9], 1),
    ([], None),
])
def test_the_shortest_of_the_best_distances_is_chosen(milliseconds: list[float], distance: int | None) -> None:
    trials = tuple(Trial(*trial) for trial in enumerate(milliseconds))
    assert Calibrated(DefaultVectors({}, {}, 0), 1.0, trials).distance == distance


# What it computes


Guesses = dict[tuple[int, int, int], list[int]]  # the experts guessed for a token, il_from and il


def watched(model: pyorch.Model, predictor: str, distance: int = 1) -> tuple[list[Routing], Guesses]:
    """What was routed, and what was predicted for the tokens of a text, one by one.

    A layer that is routed before earlier ones are predicted may go without: the text is decoded until most are there.
    """
    routings: list[Routing] = []
    predictions: list[parts.Prediction] = []
    guesses: Guesses = {}
    model.engine.set_prefetch(predictor, distance)
    model.engine.set_observer(routings.append)
    parts.set_prediction_observer(model.engine, predictions.append)
    tokens = model.llama.tokenize(PROMPT.encode(), add_bos=False)[:N_TOKENS]
    n_pairs = sum(N_LAYERS - 1 - ahead for ahead in range(distance))
    with Context(model.llama.model, n_ctx=256, n_threads=1) as context:
        while len(guesses) < 0.8 * len(tokens) * n_pairs:
            context.clear()
            for i, token in enumerate(tokens):
                context.decode([token])
                model.engine.wait_idle()
                guesses |= {
                    (i, prediction.il_from, prediction.il): prediction.experts.tolist() for prediction in predictions
                }
                predictions.clear()
    routings = routings[: len(tokens) * N_LAYERS]
    model.engine.set_prefetch("none")
    model.engine.set_observer(None)
    parts.set_prediction_observer(model.engine, None)
    return routings, guesses


def test_estimates_equal_what_torch_computes(made: Made, tmp_path: Path) -> None:
    il, file = 4, made.read()
    with small_model(made.model, "50%", prefetch="hybrid") as model:
        model.engine.set_hybrid([True] * N_LAYERS)
        routings, guesses = watched(model, "hybrid")
        routed = [routing for routing in routings if routing.il == il]
        router = model.engine.router(il + 1)
        states = np.random.default_rng(0).normal(size=(20, len(router.norm))).astype(np.float32)
        corrections = np.stack([parts.estimate(model.engine, il, state) for state in states])
        guessed = {i: experts for (i, *layers), experts in guesses.items() if layers == [il, il + 1]}
    given = dict(
        states=states, residuals=np.concatenate([routing.residuals for routing in routed]), layer=il,
        weights=np.concatenate([routing.weights for routing in routed]),
        experts=np.concatenate([routing.experts for routing in routed]).astype(np.int64),
        defaults=file.default_vectors.vectors[il], norm=router.norm, eps=router.eps, gate=router.gate,
    )
    np.savez(tmp_path / "in.npz", **file.estimator.arrays(), **given)
    with_torch(Path(__file__).with_name("estimator_process.py"), tmp_path / "in.npz", tmp_path / "out.npz")
    expected = np.load(tmp_path / "out.npz")
    assert expected["corrections"].std() > 0.1, "the reference says nothing"
    largest = np.abs(expected["corrections"]).max()
    np.testing.assert_allclose(corrections, expected["corrections"], atol=2e-2 * largest)
    assert len(routed) == N_TOKENS and len(guessed) > N_TOKENS / 2
    for i, experts in guessed.items():
        logits = expected["logits"][i]
        assert len(experts) == 2 * N_USED and len(set(experts)) == len(experts)
        # The best, in their order, but for logits that weights of 8 bits may exchange.
        np.testing.assert_allclose(logits[experts], -np.sort(-logits)[: len(experts)], atol=2e-2 * np.abs(logits).max())


def test_the_router_is_that_of_the_file(made: Made) -> None:
    with small_model(made.model, "50%") as model:
        router = model.engine.router(2)
        for array, name in ((router.gate, "ffn_gate_inp"), (router.norm, "ffn_norm")):
            place = model.map.tensor_range(f"blk.2.{name}.weight")
            expected = np.fromfile(place.path, np.float32, place.size // 4, offset=place.offset)
            assert np.array_equal(array.ravel(), expected)
        assert (
            router.eps == np.float32(1e-6)
            and router.gating == "softmax"
            and router.bias is None
            and router.selection_bias is None
        )


def test_hybrid_asks_the_estimator_for_the_layers_that_it_is_better_at(made: Made) -> None:
    with small_model(made.model, "50%", prefetch="hybrid") as model:
        model.engine.set_hybrid([il in (2, 5) for il in range(N_LAYERS)])
        hybrid, quasi_hidden = (watched(model, name, 2)[1] for name in ("hybrid", "quasi-hidden"))
        model.engine.set_hybrid([True] * N_LAYERS)
        estimator = watched(model, "hybrid", 2)[1]
    common = hybrid.keys() & estimator.keys() & quasi_hidden.keys()
    assert len({key[1:] for key in common}) == 7 + 6 and len(common) > N_TOKENS * 13 / 4
    for key in common:
        _, il_from, il = key
        expected = estimator if il in (2, 5) else quasi_hidden
        assert hybrid[key] == expected[key]
        if il - il_from == 2:  # nobody but the quasi-hidden state's router looks farther ahead than a layer
            assert estimator[key] == quasi_hidden[key]
    for il in range(1, N_LAYERS):
        assert any(estimator[key] != quasi_hidden[key] for key in common if key[1:] == (il - 1, il))


def test_a_model_without_an_estimator_cannot_be_guessed_by_one(small_moe: Path) -> None:
    with pytest.raises(PyorchError, match="make one with pyorch train-predictor"):
        small_model(small_moe, "50%", prefetch="hybrid")


def test_an_engine_refuses_an_estimator_that_does_not_fit(made: Made) -> None:
    arrays = made.read().estimator.arrays()
    deeper = {**arrays, "head_bias": np.zeros((N_LAYERS, N_EXPERT)), "head_weight": np.zeros((N_LAYERS, N_EXPERT, 32)),
              "position": np.zeros((N_LAYERS, 32))}
    wider = {**arrays, "head_bias": np.zeros((7, 65)), "head_weight": np.zeros((7, 65, 32))}
    with small_model(made.model, "50%", prefetch="none") as model:
        with pytest.raises(PyorchError, match="an estimator for 8 of 8 layers"):
            model.engine.set_estimator(deeper)
        with pytest.raises(PyorchError, match="layer 1 has 64 experts, not 65"):
            model.engine.set_estimator(wider)
        with pytest.raises(PyorchError, match="8 layers with routed experts, not 3"):
            model.engine.set_hybrid([True] * 3)
        with pytest.raises(PyorchError, match="no estimator for layer 3"):
            parts.estimate(model.engine, 3, np.zeros(128, np.float32))
