"""What a layer is set to: all of it, or nothing where a part is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pyorch import LayerSettings
from pyorch.errors import PyorchError
from pyorch.llama.model import Model, load

PROMPT = "import os\nimport sys\n\ndef main("


@pytest.fixture
def model(small_moe: Path):
    with load(small_moe, budget="40%", n_ctx=256, n_threads=1) as loaded:
        yield loaded


def text(model: Model) -> str:
    return "".join(model.generate(PROMPT, max_tokens=16, temperature=0))


@pytest.mark.parametrize("prefetch", ["hybrid", "quasi-hidden:9"])  # no estimator is there; so many layers are not
def test_settings_of_which_a_part_is_refused_change_nothing(model: Model, prefetch: str) -> None:
    lossless = text(model)
    for layer in model.layers.values():
        wanted = LayerSettings(2, 30, {1, 2, 3}, "sacred=1,mode=none,miss=drop", prefetch)
        with pytest.raises(PyorchError):
            layer.settings = wanted
        assert layer.settings == LayerSettings()
    assert text(model) == lossless and model.engine.substitution_stats().dropped == 0
    assert model.stats().substitution is None
    for layer in model.layers.values():
        layer.evict(range(layer.n_expert))
        assert not layer.residency.any(), "an expert stayed pinned"


def test_lossy_settings_stay_where_lossless_ones_are_refused(model: Model) -> None:
    model.substitute("sacred=1,mode=none,miss=drop")
    layer = model.layers[3]
    lossy = layer.settings
    with pytest.raises(PyorchError):
        layer.settings = LayerSettings(prefetch="hybrid")
    assert layer.settings == lossy
    text(model)
    assert model.engine.substitution_stats(3).dropped > 0


def test_what_a_layer_reads_ahead_is_taken_back(model: Model) -> None:
    lossless = text(model)
    for settings in (LayerSettings(prefetch="quasi-hidden:2:0.5"), LayerSettings(), LayerSettings(prefetch="none")):
        model.layers[3].settings = settings
        assert model.layers[3].settings == settings and text(model) == lossless


@pytest.mark.parametrize(("settings", "said"), [
    ({"substitution": "nonsense"}, "nonsense"), ({"pinned": ["1"]}, "must be numbers of experts"),
    ({"pinned": 3}, "must be numbers of experts"), ({"pinned": [2**40]}, "must be numbers of experts"),
    ({"max_experts": 10**12}, "max_experts is 1000000000000"),
    ({"min_experts": -1}, "min_experts is -1"), ({"min_on_device": 1.5}, "must be a number of experts"),
    ({"prefetch": "auto"}, "name a predictor for one"), ({"prefetch": "x:y"}, "prefetch"),
])
def test_what_cannot_be_meant_is_said(settings: dict[str, object], said: str) -> None:
    with pytest.raises(PyorchError, match=said):
        LayerSettings(**settings)


def test_numbers_and_texts_are_taken_as_they_are_written() -> None:
    settings = LayerSettings(pinned=[np.int64(2), 1], substitution="heaviest")
    assert settings.pinned == {1, 2} and settings.substitution.lossy


def test_a_cache_is_simulated_for_layers_that_there_are(model: Model) -> None:
    with pytest.raises(PyorchError, match="layer 99 has no routed experts"):
        model.set_cache({99: np.ones(64, bool)})
