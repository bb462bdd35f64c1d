"""Recorded routes become a trace, as scripts.replay reads it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pyorch.runtime.model_map import ModelMap
from pyorch.traces.file import DECODE, Trace
from pyorch.traces.recording import Recording
from scripts.routes_to_trace import main

N_LAYERS, N_EXPERT, N_USED = 8, 64, 6


def test_a_trace_has_what_routes_have(small_moe: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    experts = rng.permuted(np.tile(np.arange(N_EXPERT, dtype=np.uint8), (5, N_LAYERS, 1)), axis=2)[:, :, :N_USED]
    probs = -np.sort(-rng.dirichlet(np.ones(N_USED), (5, N_LAYERS))).astype(np.float16)
    np.savez(tmp_path / "routes.npz", experts=experts, probs=probs, offsets=np.array([0, 2, 5]))
    assert main([str(small_moe), str(tmp_path / "routes.npz"), "-o", str(tmp_path / "routes.trace")]) == 0
    trace = Trace(tmp_path / "routes.trace")
    records = trace.records
    assert records["request"].tolist() == [0, 0, 1, 1, 1] and records["position"].tolist() == [0, 1, 0, 1, 2]
    assert (records["phase"] == DECODE).all() and (records["token"] == 0).all()
    np.testing.assert_array_equal(records["experts"], experts)
    np.testing.assert_array_equal(records["probs"], probs)
    router = records["router"].copy()
    np.testing.assert_array_equal(np.take_along_axis(router, experts.astype(np.int64), axis=2), probs)
    np.put_along_axis(router, experts.astype(np.int64), 0, axis=2)
    assert not router.any(), "of all others nothing"
    with ModelMap(small_moe) as model_map:
        np.testing.assert_allclose(Recording.from_trace(trace, model_map).probs.sum(axis=-1), 1, rtol=1e-6)


@pytest.mark.parametrize(("changed", "sentence"), [
    ({"experts": np.full((5, N_LAYERS, N_USED), N_EXPERT)}, "has no experts of"),
    ({"probs": np.ones((5, N_LAYERS, 1))}, "of which a token uses 6 of 64 in each of 8 layers"),
    ({"offsets": None}, "does not hold routes"),
])
def test_routes_of_another_model_are_refused(
    small_moe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: dict, sentence: str
) -> None:
    shape = 5, N_LAYERS, N_USED
    arrays = {"experts": np.zeros(shape, int), "probs": np.ones(shape), "offsets": np.array([0, 5]), **changed}
    np.savez(tmp_path / "routes.npz", **{name: array for name, array in arrays.items() if array is not None})
    assert main([str(small_moe), str(tmp_path / "routes.npz"), "-o", str(tmp_path / "routes.trace")]) == 2
    assert sentence in capsys.readouterr().err and not (tmp_path / "routes.trace").exists()


def test_a_file_that_was_cut_off_is_refused(
    small_moe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "routes.npz", experts=np.zeros((5, N_LAYERS, N_USED), int))
    whole = (tmp_path / "routes.npz").read_bytes()
    (tmp_path / "routes.npz").write_bytes(whole[:len(whole) // 2])
    assert main([str(small_moe), str(tmp_path / "routes.npz"), "-o", str(tmp_path / "routes.trace")]) == 2
    assert "does not hold routes" in capsys.readouterr().err
