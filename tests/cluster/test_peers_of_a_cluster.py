"""A placement, made true by servers that compute for each other: the logits are those of a single server."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from models import assert_same_bits, small_model
from processes import HANG_SECONDS

from pyorch import ports
from pyorch.cluster.peers import Peers
from pyorch.cluster.placement.placement import ABSENT, Placement
from pyorch.errors import PyorchError
from pyorch.llama.context import Context
from pyorch.llama.model import Model
from pyorch.sidecars.container import fingerprint

NAMES = ("a", "b", "c")


def random_placement(model: Model, seed: int, held: float = 0.4) -> Placement:
    """Some experts are at several servers, some at none."""
    layers = [(layer.il, layer.n_expert) for layer in model.map.layers]
    shape = (len(NAMES), len(layers), layers[0][1])
    holds = np.random.default_rng(seed).random(shape) < held
    return Placement(NAMES, *zip(*layers), np.where(holds, 0, ABSENT).astype(np.int16))


def decoded(model: Model, prompt: list[int]) -> list[np.ndarray]:
    with Context(model.llama.model, n_ctx=128, n_threads=1) as context:
        return [context.decode(prompt), *(context.decode([token]) for token in prompt[:3])]


@pytest.fixture
def servers(small_moe: Path) -> Iterator[list[tuple[Model, Peers]]]:
    """Three that have met each other."""
    with contextlib.ExitStack() as stack:
        models = [stack.enter_context(small_model(small_moe, "60%", prefetch="none")) for _ in NAMES]
        all_peers = [Peers(model.engine, name, "token", fingerprint(model.map))
                     for name, model in zip(NAMES, models)]
        ports = [peers.listen() for peers in all_peers]
        for peers in all_peers:
            for name, port, other in zip(NAMES, ports, all_peers):
                if other is not peers:
                    peers.meet(name, "127.0.0.1", port, timeout=60)
        yield list(zip(models, all_peers))


def test_servers_compute_what_the_placement_gives_them(servers, resident, prompt_tokens):
    expected = decoded(resident, prompt_tokens)
    placement = random_placement(servers[0][0], seed=1)
    assert placement.n_uncovered > 0 and (placement.copies == 3).any()
    for _, peers in servers:
        peers.follow(placement)
    with ThreadPoolExecutor(3) as pool:
        for answer in pool.map(lambda server: decoded(server[0], prompt_tokens), servers):
            for rows, right in zip(answer, expected, strict=True):
                assert_same_bits(rows, right)
    for own, (model, peers) in enumerate(servers):
        assert peers.met() == {name: True for name in NAMES if name != NAMES[own]}
        stats = model.engine.remote_stats()
        assert stats.slots > 0 and stats.fallback == 0
        for layer, (il, residents) in enumerate(model.residency.items()):
            here = placement.held[own, layer] | (placement.copies[layer] == 0)
            assert residents.any() and not residents[~here].any(), il


def test_a_new_placement_and_a_server_that_moves_fail_no_request(servers, resident, prompt_tokens):
    expected = decoded(resident, prompt_tokens)
    (model, peers), (moved_model, moved), _ = servers
    for seed in range(3):
        peers.follow(random_placement(model, seed))
        for rows, right in zip(decoded(model, prompt_tokens), expected, strict=True):
            assert_same_bits(rows, right)
    moved_model.engine.stop_listening()
    peers.meet("b", "127.0.0.1", moved.listen(), timeout=60)
    peers.follow(random_placement(model, seed=3))
    before = moved_model.engine.served().slots
    for rows, right in zip(decoded(model, prompt_tokens), expected, strict=True):
        assert_same_bits(rows, right)
    assert moved_model.engine.served().slots > before == 0


def test_a_server_that_was_cut_off_is_asked_again_once_it_is_met_again(servers):
    (_, peers), (b_model, b), _ = servers
    b_model.engine.stop_listening()
    port = b.listen(port=ports.free())
    peers.meet("b", "127.0.0.1", port, timeout=60)
    b_model.engine.stop_listening()
    with socket.create_server(("127.0.0.1", port)) as listening:
        connection, _ = listening.accept()
        with connection:
            connection.sendall(b"no header of frames, 24.")  # as many bytes as one has
            while connection.recv(4096):  # until it is cut off
                pass
    assert b.listen(port=port) == port
    assert not peers.met()["b"]
    peers.meet("b", "127.0.0.1", port, timeout=60)
    assert peers.met()["b"]


def test_while_another_server_does_not_answer_placements_change(servers):
    (model, peers), *_ = servers
    refused: list[PyorchError] = []

    def meet(port: int) -> None:
        try:
            peers.meet("c", "127.0.0.1", port, timeout=HANG_SECONDS)
        except PyorchError as error:
            refused.append(error)

    with socket.create_server(("127.0.0.1", 0)) as silent:
        meeting = threading.Thread(target=meet, args=(silent.getsockname()[1],))
        meeting.start()
        with silent.accept()[0]:
            peers.follow(random_placement(model, seed=5))
            assert peers.met() == {"b": True, "c": True} and not refused
    meeting.join()
    assert "closed the connection" in str(refused[0]) or "was lost" in str(refused[0])


def test_a_placement_that_does_not_fit_is_refused(servers):
    (model, peers), *_ = servers
    placement = random_placement(model, seed=0)
    with pytest.raises(PyorchError, match="for x, y, z, this server is a"):
        peers.follow(Placement(("x", "y", "z"), placement.layers, placement.n_experts, placement.device))
    with pytest.raises(PyorchError, match="another model"):
        peers.follow(Placement(NAMES, placement.layers[:-1], placement.n_experts[:-1], placement.device[:, :-1]))
