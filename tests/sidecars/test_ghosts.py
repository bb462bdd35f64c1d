"""Ghosts: how they are fitted, how bytes are divided among them, and what their sidecar refuses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from ghost_layers import outputs_of, random_ghosts, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st
from small_traces import trace_of

import pyorch
from pyorch.cli import main
from pyorch.convert import ghosts as fitting
from pyorch.convert.ghosts import Regression, Samples, Settings, absence, build, folds
from pyorch.errors import FormatError, PyorchError
from pyorch.runtime.model_map import ModelMap
from pyorch.sidecars import container
from pyorch.sidecars.ghosts import KIND, VERSION, Ghosts
from pyorch.sizes import Amount
from pyorch.traces.file import HEADER_BYTES, Trace


@pytest.fixture(scope="module")
def model_map(small_moe: Path):
    with ModelMap(small_moe) as model_map:
        yield model_map


@pytest.fixture(scope="module")
def trace(model_map: ModelMap, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Random tokens of the small MoE: expert 0 never, the others the likelier the higher their number."""
    return trace_of(model_map, tmp_path_factory.mktemp("trace") / "small-moe.trace", n_tokens=300, n_inputs=100)


@pytest.fixture(scope="module")
def of_rank_8(model_map: ModelMap, trace: Trace) -> Ghosts:
    return build(model_map, trace, Settings(rank=8, sacred=0)).ghosts


@pytest.fixture(scope="module")
def small_trace(model_map: ModelMap, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """For who only needs one."""
    return trace_of(model_map, tmp_path_factory.mktemp("trace") / "small.trace", n_tokens=40, n_inputs=20)


@pytest.fixture(scope="module")
def built(model_map: ModelMap, trace: Trace):
    return build(model_map, trace, Settings(Amount.parse("2.5%")))


def samples(n: int, n_in: int, n_out: int, seed: int, noise: float = 0.3, rank: int = 3) -> Samples:
    """Nearly linear of a low rank, not centered."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, n_in)) + rng.normal(size=n_in)
    b = rng.normal(size=(n_out, rank)) @ rng.normal(size=(rank, n_in))
    return Samples(x, x @ b.T + noise * rng.normal(size=(n, n_out)) + 5, rng.uniform(0.01, 1, n))


# Fitting


@settings(max_examples=30)
@given(n=st.integers(8, 40), n_in=st.integers(1, 12), n_out=st.integers(1, 9), ridge=st.sampled_from([0.01, 1.0]),
       seed=st.integers(0, 1000))
def test_a_map_of_full_rank_is_numpys_weighted_ridge_regression(
    n: int, n_in: int, n_out: int, ridge: float, seed: int
) -> None:
    s = samples(n, n_in, n_out, seed)
    w = s.weights / s.weights.sum()
    x, y = s.inputs - w @ s.inputs, s.outputs - w @ s.outputs
    root = np.sqrt(w)[:, None]
    stacked = np.concatenate([root * x, np.sqrt(ridge) * np.eye(n_in)])
    expected = np.linalg.lstsq(stacked, np.concatenate([root * y, np.zeros((n_in, n_out))]), rcond=None)[0]
    mean, down, up = Regression(s).map(ridge, 99)
    np.testing.assert_allclose((up.T @ down).T, expected, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(mean, w @ s.outputs - (w @ s.inputs) @ expected, rtol=1e-6, atol=1e-7)


def test_with_fewer_samples_than_inputs_it_is_the_same_regression() -> None:
    s = samples(10, 200, 30, 1)
    w = s.weights / s.weights.sum()
    x, y = s.inputs - w @ s.inputs, s.outputs - w @ s.outputs
    expected = np.linalg.solve((x * w[:, None]).T @ x + 0.1 * np.eye(200), (x * w[:, None]).T @ y)
    _, down, up = Regression(s).map(0.1, 99)
    np.testing.assert_allclose((up.T @ down).T, expected, rtol=1e-5, atol=1e-8)


def test_no_other_map_of_its_rank_fits_better() -> None:
    """Neither one that is near it, nor the best rows of the map of full rank."""
    s = samples(60, 8, 6, 2, rank=6)
    w = (s.weights / s.weights.sum())[:, None]
    x, y = s.inputs - (w * s.inputs).sum(0), s.outputs - (w * s.outputs).sum(0)

    def loss(b: np.ndarray) -> float:
        return float((w * (y - x @ b) ** 2).sum() + 0.05 * (b**2).sum())

    _, down, up = Regression(s).map(0.05, 2)
    best = loss((up.T @ down).T)
    u, d, v = np.linalg.svd((lambda d, u: (u.T @ d).T)(*Regression(s).map(0.05, 99)[1:]))
    assert best < loss(u[:, :2] * d[:2] @ v[:2])
    rng = np.random.default_rng(0)
    for size in (1e-3, 1e-2, 0.1):
        for _ in range(20):
            other = (up + size * rng.normal(size=up.shape)).T @ (down + size * rng.normal(size=down.shape))
            assert best <= loss(other.T)


def test_what_is_left_by_rank_is_what_maps_of_that_rank_leave() -> None:
    s, held_out = samples(30, 12, 7, 3), samples(20, 12, 7, 3)
    regression = Regression(s)
    left = regression.left_by_rank(held_out, 0.2, 10)
    for rank in range(11):
        mean, down, up = regression.map(0.2, rank)
        error = held_out.outputs - mean - held_out.inputs @ down.T @ up
        assert left[rank] == pytest.approx(held_out.weights @ (error**2).sum(axis=1))
    assert regression.left(held_out, [0.2])[0] == pytest.approx(left[-1])


def test_each_sample_is_held_out_once_and_never_fitted_on_then() -> None:
    s = samples(23, 2, 2, 4)
    seen = []
    for fitted, held_out in folds(s):
        assert len(fitted) + len(held_out) == 23
        both = np.concatenate([fitted.inputs, held_out.inputs])
        assert len(np.unique(both, axis=0)) == 23
        seen.append(held_out.inputs)
    assert len(np.unique(np.concatenate(seen), axis=0)) == 23


def test_held_out_noise_is_told_from_what_inputs_and_means_foretell() -> None:
    rng = np.random.default_rng(0)
    noise = Samples(rng.normal(size=(40, 20)), rng.normal(size=(40, 20)), np.ones(40))
    left = sum(Regression(fitted).left_by_rank(held_out, 0.1, 5) for fitted, held_out in folds(noise))
    assert left[0] < left[3:].min() and left[0] > noise.energy


@given(uses=st.lists(st.floats(0, 1), min_size=2, max_size=30))
def test_rarely_used_experts_are_absent_most_often(uses: list[float]) -> None:
    absent = absence(np.array(uses))
    assert ((absent >= 0) & (absent <= 1)).all()
    assert (np.diff(absent[np.argsort(uses)]) <= 1e-12).all()
    used = np.array(uses)
    if (used > 1e-3).sum() > len(uses) / 2 + 1:
        assert (1 - absent).mean() == pytest.approx(0.5, abs=1e-6)


# Of a model


def test_every_layer_gets_its_bytes_worth_and_no_more(model_map: ModelMap, built) -> None:
    assert list(built.ghosts.layers) == [layer.il for layer in model_map.layers]
    assert 0.024 * built.expert_bytes < built.ghosts.n_bytes <= 0.025 * built.expert_bytes
    n_rows = sum(64 + 2 * int(np.maximum(layer.rank, 0).sum()) for layer in built.ghosts.layers.values())
    assert built.ghosts.n_bytes == n_rows * (128 + 2 * 128 // 32), "an engine has them in 8 bits, with a scale for 32"
    for layer, report in zip(built.ghosts.layers.values(), built.layers):
        assert (layer.error <= layer.energy * (1 + 1e-6)).all(), "a ghost that is worse than none"
        assert report.left <= report.left_by_means


def test_the_error_that_is_reported_is_that_on_inputs_it_was_not_fitted_on(
    model_map: ModelMap, trace: Trace, of_rank_8: Ghosts
) -> None:
    """Random outputs of random inputs: what is left of those fitted on would be far less."""
    from pyorch.convert.expert_outputs import LayerExperts

    indices, inputs = trace.inputs
    chosen = trace.records["experts"][indices][:, 0]
    layer, experts = of_rank_8.layers[0], LayerExperts(model_map, 0)
    fitted, held_out = [], []
    for expert in np.flatnonzero(layer.rank > 3):
        mine = (chosen == expert).any(axis=1)
        if mine.sum() < 8:
            continue
        x = np.asarray(inputs[mine, 0], np.float32)
        y = experts.outputs(int(expert), x)
        fitted.append(((y - outputs_of(layer, expert, x)) ** 2).sum() / (y**2).sum())
        held_out.append(layer.error[expert] / layer.energy[expert])
    assert len(fitted) > 5 and np.mean(fitted) < 0.8 * np.mean(held_out)


def test_a_rank_is_the_most_that_any_ghost_gets(of_rank_8: Ghosts) -> None:
    layers = of_rank_8.layers.values()
    assert max(layer.rank.max() for layer in layers) == 8
    assert all(len(layer.down) == np.maximum(layer.rank, 0).sum() for layer in layers)


def test_experts_that_are_waited_for_do_not_count(model_map: ModelMap, trace: Trace) -> None:
    """What remains are the slots with the lowest weights; where all are waited for, all count again."""
    sums = {}
    for sacred in (0, 2, 6):
        fit = fitting.LayerFit(model_map, trace, 0, sacred)
        for _ in fit.steps():
            pass
        sums[sacred] = sum(samples.weights.sum() for samples in fit.samples[1:])
    assert sums[2] < 0.7 * sums[0] and sums[6] == sums[0]


def test_a_sample_counts_by_the_square_of_its_weight(model_map: ModelMap, trace: Trace) -> None:
    """As an error there adds to the squared error of the layer."""
    fit = fitting.LayerFit(model_map, trace, 0, sacred=0)
    for _ in fit.steps():
        pass
    often = [e for e in range(fit.n_expert) if (fit.weights[:, e] > 0).sum() >= fitting.LEAST_SAMPLES]
    assert len(often) > 3
    for expert in often:
        chosen = fit.samples[expert]
        np.testing.assert_allclose(chosen.weights, fit.weights[chosen.rows, expert] ** 2)


def test_an_expert_of_many_samples_counts_for_all_that_were_left_out(
    model_map: ModelMap, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    totals = []
    for most in (1024, 12):
        monkeypatch.setattr(fitting, "_MOST_SAMPLES", most)
        fit = fitting.LayerFit(model_map, trace, 0, sacred=0)
        for _ in fit.steps():
            pass
        often = [e for e in range(fit.n_expert) if (fit.weights[:, e] > 0).sum() > 12]
        totals.append(sum(fit.samples[e].weights.sum() for e in often))
        assert len(often) > 3
    assert totals[1] == pytest.approx(totals[0], rel=0.2)


def test_no_outputs_are_kept_of_a_layer_that_was_gone_through(model_map: ModelMap, trace: Trace) -> None:
    """Of a large model they would be a hundred GiB."""
    fit = fitting.LayerFit(model_map, trace, 0, sacred=2)
    for _ in fit.steps():
        pass
    kept = [values for chosen in fit.samples for values in vars(chosen).values()]
    assert all(values.ndim == 1 for values in kept)


def test_of_any_rank_no_ghost_is_worse_than_none(of_rank_8: Ghosts) -> None:
    layers = of_rank_8.layers.values()
    assert all((layer.error[layer.rank >= 0] < layer.energy[layer.rank >= 0]).all() for layer in layers)
    assert any((layer.rank < 0).any() for layer in layers), "random experts: some cannot be estimated"


@pytest.mark.parametrize("rank", [-1, 65])
def test_ranks_that_cannot_be_are_refused(rank: int) -> None:
    with pytest.raises(PyorchError, match=f"rank {rank} is not from 0 to 64"):
        Settings(rank=rank)
    with pytest.raises(PyorchError, match="sacred -1 is below 0"):
        Settings(sacred=-1)


def test_a_step_that_has_no_room_gives_way_to_a_smaller_one() -> None:
    """Of two experts the better one gets its two rows; for the other's best step, of three rows, two are left."""
    left = np.array([[10.0, 9.9, 1.0, 1.0], [10.0, 9.0, 8.0, 2.0]])
    fit = SimpleNamespace(
        left=left, energies=np.full(2, 20.0), absence=np.ones(2), n_expert=2, base_bytes=0, row_bytes=10, ranks=None
    )
    for room, ranks in ((0, [0, 0]), (10, [0, 1]), (20, [2, 0]), (30, [2, 1]), (49, [2, 2]), (50, [2, 3])):
        fitting.divide([fit], room)
        assert fit.ranks.tolist() == ranks, room


def test_of_experts_that_gain_alike_the_one_that_is_absent_more_often_gets_the_row() -> None:
    left = np.array([[10.0, 5.0, 4.0], [10.0, 5.0, 4.0]])
    fit = SimpleNamespace(left=left, energies=np.full(2, 20.0), absence=np.array([0.1, 0.9]), n_expert=2, base_bytes=0,
                          row_bytes=10, ranks=None)
    for room, ranks in ((10, [0, 1]), (20, [0, 2]), (30, [1, 2])):
        fitting.divide([fit], room)
        assert fit.ranks.tolist() == ranks, room


def test_a_mean_that_is_worse_than_nothing_is_no_ghost_unless_rows_make_up_for_it() -> None:
    fit = SimpleNamespace(left=np.array([[25.0, 5.0], [15.0, 14.0]]), energies=np.full(2, 20.0), absence=np.ones(2),
                          n_expert=2, base_bytes=0, row_bytes=10, ranks=None)
    for room, ranks in ((0, [-1, 0]), (10, [1, 0]), (20, [1, 1])):
        fitting.divide([fit], room)
        assert fit.ranks.tolist() == ranks, room


def test_a_ghost_is_the_map_of_its_regression(model_map: ModelMap, trace: Trace, of_rank_8: Ghosts) -> None:
    """With rows of one size on both sides, for which 16 bits have room."""
    from pyorch.convert.expert_outputs import LayerExperts

    fit, experts = fitting.LayerFit(model_map, trace, 0, sacred=0), LayerExperts(model_map, 0)
    layer = of_rank_8.layers[0]
    for _ in fit.steps():
        pass
    expert = int(layer.rank.argmax())
    chosen, rows = fit.samples[expert], rows_of(layer, expert)
    inputs = np.asarray(trace.inputs[1][:, 0], np.float32)
    regression = Regression(chosen.samples(inputs, experts.outputs(expert, inputs[chosen.rows])))
    mean, down, up = regression.map(regression.ridge(fit.ridge), int(layer.rank[expert]))
    expected = mean + inputs @ down.T @ up
    np.testing.assert_allclose(outputs_of(layer, expert, inputs), expected, atol=1e-4 * np.abs(expected).max())
    sizes = [np.linalg.norm(matrix[rows], axis=1) for matrix in (layer.down, layer.up)]
    np.testing.assert_allclose(*sizes, rtol=1e-4)


def test_an_expert_that_was_hardly_selected_counts_hardly(model_map: ModelMap, trace: Trace) -> None:
    """Though it is fitted on all inputs: it gets bytes by what it costs to be without it."""
    fit = fitting.LayerFit(model_map, trace, 0, sacred=0)
    for _ in fit.steps():
        pass
    counts = (fit.weights > 0).sum(axis=0)
    norms = np.array([chosen.weights.sum() for chosen in fit.samples])
    assert counts[0] == 0 and len(fit.samples[0].rows) == len(fit.weights)
    typical = norms[counts >= fitting.LEAST_SAMPLES] / counts[counts >= fitting.LEAST_SAMPLES]
    assert norms[0] < np.median(typical) < norms[counts.argmax()]


# The sidecar


def test_a_file_gives_back_what_was_written(model_map: ModelMap, tmp_path: Path) -> None:
    path, ghosts = tmp_path / "m.ghosts.gguf", random_ghosts(1)
    ghosts.write(path, model_map)
    read = Ghosts.read(path, model_map)
    assert (read.n_inputs, read.sacred) == (ghosts.n_inputs, ghosts.sacred)
    for il, layer in ghosts.layers.items():
        for name, values in vars(layer).items():
            assert np.array_equal(getattr(read.layers[il], name), values), name
        matrices = read.layers[il].mean, read.layers[il].down, read.layers[il].up
        assert all(matrix.dtype == np.float16 for matrix in matrices), "twice the memory, as long as the model is there"


def test_ghosts_of_means_alone_have_no_rows_in_the_file(
    model_map: ModelMap, small_trace: Trace, tmp_path: Path
) -> None:
    path = tmp_path / "m.ghosts.gguf"
    ghosts = build(model_map, small_trace, Settings(rank=0)).ghosts
    ghosts.write(path, model_map)
    read = Ghosts.read(path, model_map)
    assert all(np.array_equal(layer.rank, ghosts.layers[il].rank) for il, layer in read.layers.items())
    assert all(layer.down.shape == (0, 128) and layer.up.shape == (0, 128) for layer in read.layers.values())


def changed(layer: int, **change) -> Ghosts:
    ghosts = random_ghosts(1)
    return dataclasses.replace(
        ghosts, layers=ghosts.layers | {layer: dataclasses.replace(ghosts.layers[layer], **change)})


@pytest.mark.parametrize("ghosts, why", [
    (changed(2, rank=np.full(64, 7, np.int32)), "down of layer 2 has the shape .* the model needs"),
    (changed(2, rank=np.full(64, -2, np.int32)), "layer 2 has no ranks of 64 ghosts"),
    (changed(2, rank=np.zeros(3, np.int32)), "rank of layer 2 has the shape"),
    (changed(3, error=np.full(64, np.nan)), "error of layer 3 does not hold numbers only"),
    (changed(3, energy=np.full(64, -1.0)), "errors of layer 3 are not all 0 or more"),
    (dataclasses.replace(random_ghosts(1), layers={0: random_ghosts(1).layers[0]}), "for other layers than the 8"),
])
def test_a_file_with_ghosts_that_cannot_be_is_refused(
    model_map: ModelMap, tmp_path: Path, ghosts: Ghosts, why: str
) -> None:
    path = tmp_path / "m.ghosts.gguf"
    ghosts.write(path, model_map)
    with pytest.raises(FormatError, match=why):
        Ghosts.read(path, model_map)


def test_a_file_that_is_cut_off_or_of_another_kind_or_model_is_refused(model_map: ModelMap, tmp_path: Path) -> None:
    path = tmp_path / "m.ghosts.gguf"
    random_ghosts(1).write(path, model_map)
    whole = path.read_bytes()
    for n in (0, 3, 100, len(whole) // 2, len(whole) - 1000):
        path.write_bytes(whole[:n])
        with pytest.raises(FormatError):
            Ghosts.read(path, model_map)
    path.write_bytes(whole.replace(container.fingerprint(model_map).encode(), b"0" * 64))
    with pytest.raises(FormatError, match="belongs to another model"):
        Ghosts.read(path, model_map)
    container.write(path, KIND, VERSION + 1, model_map, {"layers": [0]}, {"a": np.zeros(1, np.float32)})
    with pytest.raises(FormatError, match="version 2 of the ghosts format"):
        Ghosts.read(path, model_map)


# The command


@pytest.fixture
def beside(small_moe: Path):
    path = small_moe.with_name("small-moe.ghosts.gguf")
    yield path
    path.unlink(missing_ok=True)


def test_the_command_writes_what_models_find_and_use(
    small_moe: Path, small_trace: Trace, beside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = small_trace
    assert main(["ghosts", str(small_moe), "--trace", str(trace.path), "--rank", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["path"] == str(beside) and len(report["layers"]) == 8 and report["n_inputs"] == 20
    with pyorch.load(
        small_moe, budget="30%", n_ctx=256, n_threads=1, substitution="mode=none,miss=ghost,prefill=1"
    ) as model:
        "".join(model.generate("def read(", 8, temperature=0))
        assert model.stats().substitution.ghosts > 0
        assert "computed by ghosts" in str(model.stats().substitution)
    assert main(["ghosts", str(small_moe), "--trace", str(trace.path), "--bytes", "2%"]) == 0
    out = capsys.readouterr().out
    assert "of the experts" in out and "left by means" in out


@pytest.mark.parametrize("options, why", [
    (["--bytes", "much"], "--bytes \"much\" is not understood"),
    (["--rank", "100"], "rank 100 is not from 0 to 64"),
    (["--bytes", "1KiB"], "1 KiB are too few for the ghosts of this model: their means alone need 68 KiB"),
])
def test_the_command_refuses_in_a_sentence(
    small_moe: Path, small_trace: Trace, beside: Path, capsys: pytest.CaptureFixture[str], options: list[str], why: str
) -> None:
    assert main(["ghosts", str(small_moe), "--trace", str(small_trace.path), *options]) == 2
    assert why in capsys.readouterr().err and not beside.exists()


def test_a_trace_without_inputs_is_refused(
    small_moe: Path, model_map: ModelMap, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = trace_of(model_map, tmp_path / "t.trace", n_tokens=20, n_inputs=0)
    assert main(["ghosts", str(small_moe), "--trace", str(trace.path)]) == 2
    assert "record it with --inputs 1000" in capsys.readouterr().err


def test_a_trace_with_inputs_that_are_no_numbers_is_refused(model_map: ModelMap, tmp_path: Path) -> None:
    path = tmp_path / "t.trace"
    trace = trace_of(model_map, path, n_tokens=20, n_inputs=10)
    at = HEADER_BYTES + trace.header.slot_dtype().fields["inputs"][1]
    with path.open("r+b") as file:
        file.seek(at)
        file.write(np.array([np.inf], np.float16).tobytes())
    with pytest.raises(FormatError, match="does not hold numbers only, in block 0"):
        build(model_map, Trace(path))


def test_a_model_without_ghosts_says_how_to_make_them(small_moe: Path) -> None:
    with pytest.raises(PyorchError, match="make them with `pyorch ghosts`"):
        pyorch.load(small_moe, budget="50%", n_ctx=128, substitution="mode=none,miss=ghost")
    with pyorch.load(small_moe, budget="50%", n_ctx=128) as model:
        with pytest.raises(PyorchError, match="make them with `pyorch ghosts`"):
            model.substitute("mode=none,miss=ghost")
        assert all(layer.settings.substitution is None for layer in model.layers.values())


def test_few_samples_are_those_of_other_experts(model_map: ModelMap, built, trace: Trace) -> None:
    """Expert 0 was never selected: its ghost is fitted to what it gives for the inputs that there are."""
    assert fitting.LEAST_SAMPLES > 0
    assert all(layer.energy[0] > 0 for layer in built.ghosts.layers.values())
