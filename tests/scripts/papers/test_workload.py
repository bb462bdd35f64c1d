"""Requests from traces, and made-up ones that are like them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_cluster import zipf

from pyorch.errors import FormatError, PyorchError
from pyorch.traces.file import DECODE, Trace, TraceHeader, TraceWriter
from scripts.papers.dancemoe import skewed_traces
from scripts.papers.dancemoe.workload import (
    Arrivals,
    Fitted,
    Recorded,
    Replay,
    count_uses,
    draw_experts,
    fit_concentration,
    read_requests,
)


def trace(path: Path, requests: list[tuple[int, int]], n_expert: int = 8, highest: int | None = None) -> Trace:
    """Requests of so many tokens of prompt and decoded ones, all of them recorded token by token in turn."""
    header = TraceHeader("f" * 16, "qwen2moe", (0, 1), n_expert, 2, 0)
    tokens = [(request, position, PHASES[position >= n_prompt])
              for request, (n_prompt, n_decoded) in enumerate(requests) for position in range(n_prompt + n_decoded)]
    tokens.sort(key=lambda token: (token[1], token[0]))  # as requests that run together are recorded
    records = np.zeros(len(tokens), header.record_dtype())
    for name, values in zip(("request", "position", "phase"), zip(*tokens)):
        records[name] = values
    records["experts"] = [[[r % n_expert, p % n_expert]] * 2 for r, p, _ in tokens] if highest is None else highest
    with TraceWriter(path, header) as writer:
        writer.write(records)
    return Trace(path)


PHASES = (0, DECODE)


def recorded(n_requests: int, concentration: float, seed: int = 0, n_tokens: int = 60, n_used: int = 2) -> Recorded:
    """Shares of a request are drawn around those of all with a concentration."""
    rng = np.random.default_rng(seed)
    shares = zipf(rng, 2, 16, 0.5)
    shares /= shares.sum(axis=1, keepdims=True)
    requests = []
    for _ in range(n_requests):
        own = np.stack([rng.dirichlet(concentration * row) for row in shares])
        requests.append(np.stack([rng.choice(16, (n_tokens, n_used), p=row) for row in own], axis=1))
    return Recorded(np.concatenate(requests).astype(np.uint16), np.arange(n_requests + 1) * n_tokens,
                    np.full(n_requests, 5), 16)


def test_requests_are_put_together_from_records_in_turn(tmp_path):
    found = read_requests(trace(tmp_path / "a.trace", [(3, 2), (5, 1)]))
    assert found.starts.tolist() == [0, 5, 11]
    assert found.n_output.tolist() == [2, 1]
    assert found.request(1)[:, 0].tolist() == [[1, position] for position in range(6)]
    assert found.uses.tolist() == count_uses(found.experts, 8).tolist()
    assert found.uses.sum() == 11 * 2 * 2


@pytest.mark.parametrize(("requests", "n_output", "wanted"), [
    ([(30, 0), (5, 0)], None, [20, 4]),
    ([(3, 2), (30, 0)], None, [2, 0]),
    ([(3, 2), (30, 0)], 4, [4, 4]),
    ([(1, 0)], None, [0]),
])
def test_decoded_tokens_are_those_recorded_so_else_the_last(tmp_path, requests, n_output, wanted):
    assert read_requests(trace(tmp_path / "a.trace", requests), n_output).n_output.tolist() == wanted


def test_traces_that_cannot_be_are_refused(tmp_path):
    with pytest.raises(FormatError, match="names expert 8 of 8"):
        read_requests(trace(tmp_path / "a.trace", [(3, 0)], highest=8))
    with pytest.raises(FormatError, match="holds no tokens"):
        with TraceWriter(tmp_path / "b.trace", TraceHeader("f", "a", (0,), 8, 2, 0)) as writer:
            writer.write(np.zeros(0, writer.header.record_dtype()))
        read_requests(Trace(tmp_path / "b.trace"))


def test_a_replay_goes_round():
    requests = recorded(4, 5.0)
    replay = Replay(requests, np.random.default_rng(2))
    seen = [replay.request(np.random.default_rng(0), i)[0].tobytes() for i in range(8)]
    assert seen[:4] == seen[4:]
    assert set(seen) == {requests.request(i).tobytes() for i in range(4)}


@given(st.integers(0, 1 << 32), st.integers(1, 4), st.integers(4, 12), st.sampled_from([0.0, 0.8, 3.0]))
@settings(max_examples=60)
def test_a_token_uses_different_experts_in_proportion_to_their_shares(seed, n_used, n_expert, steepness):
    rng = np.random.default_rng(seed)
    shares = zipf(rng, 2, n_expert, steepness)
    shares /= shares.sum(axis=1, keepdims=True)
    n_tokens = 400
    experts = draw_experts(rng, shares, n_tokens, n_used)
    assert experts.shape == (n_tokens, 2, n_used) and experts.max() < n_expert
    assert all(len(set(row)) == n_used for token in experts.tolist() for row in token)
    found = count_uses(experts, n_expert) / n_tokens
    inclusion = shares * n_used
    possible = (inclusion <= 1).all(axis=1)  # where some are above 1 the others get what is beyond
    error = 5 * np.sqrt(0.25 / n_tokens)
    assert np.abs(found - inclusion)[possible] == pytest.approx(0, abs=error)
    assert (found >= np.minimum(inclusion, 1) - error).all()


def test_tasks_of_made_up_traces_prefer_different_experts_and_layers_are_uneven(monkeypatch, tmp_path):
    """Uses of an expert follow the 1 / rank^s of its layer, as loops over all tokens count them."""
    n_layers, n_expert, n_used = 5, 24, 2
    monkeypatch.setattr(sys, "argv", ["skewed_traces", "-o", str(tmp_path), "--tasks", "2", "--requests", "150",
                                      "--layers", str(n_layers), "--experts", str(n_expert), "--used", str(n_used)])
    skewed_traces.main()
    steepness = np.random.default_rng(0).uniform(0.4, 1.6, n_layers)
    assert steepness.max() - steepness.min() > 0.5  # else the layers are too alike for this test
    preferred = []
    for task in range(2):
        halves = np.zeros((2, n_layers, n_expert))
        records = Trace(tmp_path / f"task-{task}.trace").records
        for record in records:
            for layer, experts in enumerate(record["experts"]):
                for expert in experts:
                    halves[record["request"] % 2, layer, expert] += 1
        for layer in range(n_layers):
            assert np.corrcoef(halves[:, layer])[0, 1] > 0.9  # requests of a task prefer the same experts
            shares = np.sort(halves.sum(axis=0)[layer] / (n_used * len(records)))[::-1]
            printed = [rank ** -steepness[layer] for rank in range(1, n_expert + 1)]
            wanted = [value / sum(printed) for value in printed]
            if wanted[0] * n_used <= 1:  # else the others get what is beyond
                assert shares[:4] == pytest.approx(wanted[:4], rel=0.2)
        preferred.append(halves.sum(axis=0))
    alike = [np.corrcoef(preferred[0][layer], preferred[1][layer])[0, 1] for layer in range(n_layers)]
    assert np.mean(alike) < 0.5


def test_more_experts_than_have_shares_are_filled_up():
    shares = np.array([[1.0, 0.0, 0.0, 0.0]])
    experts = draw_experts(np.random.default_rng(0), shares, 50, 3)
    assert (experts == 0).any(axis=2).all()
    assert all(len(set(token[0])) == 3 for token in experts.tolist())


@pytest.mark.parametrize("concentration", [2.0, 10.0, 50.0])
def test_the_fitted_concentration_is_that_of_the_requests(concentration):
    assert fit_concentration(recorded(400, concentration)) == pytest.approx([concentration] * 2, rel=0.2)


def test_requests_that_differ_as_little_as_tokens_do_have_no_concentration_to_speak_of():
    assert (fit_concentration(recorded(200, 1e9)) > 1000).all()
    assert np.isinf(fit_concentration(recorded(1, 10.0))).all()


def test_drawn_requests_use_experts_as_recorded_ones_do():
    requests = recorded(200, 20.0)
    fitted = Fitted(requests)
    drawn = [fitted.request(np.random.default_rng(i), i) for i in range(400)]
    assert {len(experts) for experts, _ in drawn} == {60} and {n for _, n in drawn} == {5}
    uses = count_uses(np.concatenate([experts for experts, _ in drawn]), 16)
    assert np.abs(uses / uses.sum(axis=1, keepdims=True) - fitted.shares).max() < 0.015


@pytest.mark.parametrize(("text", "rate"), [("poisson:0.2", 0.2), ("poisson:5s", 0.2), (" poisson:1e-2 ", 0.01)])
def test_arrivals_are_a_rate_or_a_time_between_two(text, rate):
    assert Arrivals.parse(text).rate == pytest.approx(rate)


@pytest.mark.parametrize("text", ["0.2", "poisson", "poisson:", "poisson:0", "poisson:-1", "poisson:0s", "poisson:nan",
                                  "poisson:inf", "uniform:1", "poisson:1/s"])
def test_other_arrivals_are_refused(text):
    with pytest.raises(PyorchError, match="are not understood"):
        Arrivals.parse(text)
