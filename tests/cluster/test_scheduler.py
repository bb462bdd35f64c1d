"""The scheduler of a running cluster: experts go where they are asked for, and no request notices."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from clusters import Cluster, assert_nothing_is_left, needs_ray, ports_of, processes_of, wait_until, write_config

from pyorch.cli import main
from pyorch.cluster.costs import CostsFile, ServerCosts, write_costs
from pyorch.cluster.placement.placement import ABSENT, Placement, write_placement
from pyorch.llama.model import Model
from pyorch.runtime.model_map import ModelMap

# Longer than any test: what is decided here is decided when somebody asks for it.
_SCHEDULER = '[scheduler]\ninterval = "5h"\ncosts = "costs.json"\n'


@pytest.fixture(scope="module")
def cluster(small_moe: Path, private_state: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Each server has a share of the experts, whoever asks for which. The disk of a is said to be slow."""
    config = write_config(tmp_path_factory.mktemp("scheduled"), small_moe, _SCHEDULER)
    device = np.full((2, 8, 64), ABSENT, np.int16)
    device[0, :, :25] = device[1, :, 25:] = 0
    write_costs(config.with_name("costs.json"), CostsFile(servers={"a": ServerCosts(disk_bytes_per_second=1e6)}))
    plan = config.with_name("plan.json")
    with ModelMap(small_moe) as model_map:
        write_placement(plan, Placement(("a", "b"), tuple(range(8)), (64,) * 8, device, "halves"), model_map)
    cluster = Cluster(config, "--plan", plan)
    try:
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(scope="module")
def alone(resident: Model, prompt_tokens: list[int]) -> str:
    """What one server by itself answers."""
    return "".join(resident.generate(prompt_tokens, max_tokens=16, temperature=0))


def rebalance(cluster: Cluster) -> dict:
    """The verdict, where all servers answered in time."""
    verdict = {}

    def is_judged() -> bool:
        done = cluster.run("rebalance", "--json")
        assert done.returncode == 0, done.stderr
        verdict.update(json.loads(done.stdout))
        return "answer" not in verdict["reason"]

    wait_until(is_judged)
    return verdict


def adopted(cluster: Cluster, url: str, prompt: list[int]) -> tuple[dict, set[str]]:
    """The verdict that experts move to whose users ask for them, and the answers. How many it takes is nobody's claim:
    what others asked before counts, and so does what rows took on a machine that may be busy."""
    verdict, answers = {}, set()

    def pays() -> bool:
        answers.update(cluster.complete(url, prompt) for _ in range(6))
        verdict.update(rebalance(cluster))
        return verdict["adopted"]

    wait_until(pays)
    return verdict, answers


def local_ratio(cluster: Cluster, prompt: list[int], answer: str) -> float:
    """Of one request to a, for which b was asked: who was not heard for two seconds is not asked for a while."""
    of_request: dict[str, int] = {}

    def is_asked() -> bool:
        before = cluster.status()["a"]
        assert cluster.complete(before["url"], prompt) == answer
        after = cluster.status()["a"]["counters"]
        for name in ("sent", "fallback", "activations"):
            of_request[name] = after[name] - before["counters"][name]
        return of_request["sent"] > 0 == of_request["fallback"]

    wait_until(is_asked)
    return 1 - of_request["sent"] / of_request["activations"]


@contextlib.contextmanager
def asking(cluster: Cluster, prompt: list[int], name: str) -> Iterator[list[tuple[str, str]]]:
    """A server is asked all the time, at least once. Gives who answers, and what."""
    answers, ended = [], threading.Event()

    def ask(url: str) -> None:
        while True:
            answers.append((name, cluster.complete(url, prompt)))
            if ended.is_set():
                return

    url = cluster.serving()[name]["url"]
    with ThreadPoolExecutor(1) as pool:
        thread = pool.submit(ask, url)
        try:
            yield answers
        finally:
            ended.set()
        thread.result()


def settled(cluster: Cluster) -> dict:
    """The scheduler's report when experts have moved."""
    found = {}

    def is_settled() -> bool:
        found.update(cluster.scheduler() or {"moving": "not known"})
        return found["moving"] is None and len({server["digest"] for server in cluster.serving().values()}) == 1

    wait_until(is_settled)
    return found


@needs_ray
def test_before_anybody_asked_nothing_moves(cluster: Cluster) -> None:
    verdict = rebalance(cluster)
    assert not verdict["adopted"] and verdict["reason"] == "there were no requests yet"


@needs_ray
def test_experts_move_to_whose_users_ask_for_them_and_every_answer_stays_that_of_one_server(
    cluster: Cluster, prompt_tokens: list[int], alone: str,
) -> None:
    before = local_ratio(cluster, prompt_tokens, alone)
    digest = cluster.serving()["a"]["digest"]
    with asking(cluster, prompt_tokens, "a") as of_a:
        verdict = rebalance(cluster)
        assert verdict["adopted"] and verdict["n_moves"] > 0, verdict
        assert verdict["candidate"] + verdict["migration"] < verdict["current"]
        with asking(cluster, prompt_tokens, "b") as of_b:  # not before it is decided where experts go
            report = settled(cluster)
    assert report["moved"] == verdict["n_moves"] and report["failed"] == "" and report["plan"] > 0
    assert set(of_a + of_b) == {("a", alone), ("b", alone)}
    assert local_ratio(cluster, prompt_tokens, alone) > before
    servers = cluster.serving()
    assert servers["a"]["digest"] == servers["b"]["digest"] != digest
    assert cluster.complete(servers["b"]["url"], prompt_tokens) == alone
    assert servers["a"]["fetched"] > 0 == servers["b"]["fetched"]  # b has read them from its disk for a
    text = cluster.run("status").stdout
    assert "the scheduler decides again in" in text and " experts move, " in text
    shown = json.loads(cluster.run("status", "--json").stdout)["scheduler"]
    assert shown["last"] == verdict and 0 < shown["local"]["a"] < 1


@needs_ray
def test_a_server_that_dies_comes_back_with_its_share_of_the_present_placement(
    cluster: Cluster, prompt_tokens: list[int], alone: str,
) -> None:
    before = cluster.serving()
    os.kill(before["b"]["counters"]["pid"], signal.SIGKILL)
    assert cluster.complete(before["a"]["url"], prompt_tokens) == alone
    after = cluster.serving_again("b", before["b"])
    assert after["digest"] == before["a"]["digest"] and after["counters"]["pinned"] == before["b"]["counters"]["pinned"]
    assert cluster.complete(after["url"], prompt_tokens) == alone


@needs_ray
def test_a_scheduler_that_is_killed_while_experts_move_goes_on_where_it_was(
    cluster: Cluster, prompt_tokens: list[int], alone: str,
) -> None:
    servers = cluster.serving()
    other = prompt_tokens[::-1]  # what was asked so far counts, too
    verdict, answers = adopted(cluster, servers["a"]["url"], other)
    killed = cluster.scheduler()
    os.kill(killed["pid"], signal.SIGKILL)
    answers.add(cluster.complete(servers["a"]["url"], other))
    wait_until(lambda: (cluster.scheduler() or {"last": None})["last"])  # the new scheduler has asked the servers
    report = settled(cluster)
    assert report["pid"] != killed["pid"] and report["failed"] == ""
    assert report["last"] == verdict and report["plan"] >= killed["plan"]
    # Most is where it was to go. One request more was counted, so some may be wanted elsewhere now.
    assert rebalance(cluster)["n_moves"] < verdict["n_moves"]
    assert len(answers) == 1
    for server in servers.values():
        assert cluster.complete(server["url"], prompt_tokens) == alone


@needs_ray
def test_a_server_that_is_killed_while_experts_move_costs_the_other_one_no_request(
    cluster: Cluster, prompt_tokens: list[int],
) -> None:
    before = cluster.serving()
    other = [8 + 7 * token % 300 for token in prompt_tokens]
    _, answers = adopted(cluster, before["b"]["url"], other)  # b wants others now
    with asking(cluster, other, "a") as of_a:
        os.kill(before["b"]["counters"]["pid"], signal.SIGKILL)
        cluster.serving_again("b", before["b"])
        settled(cluster)
    assert {answer for _, answer in of_a} == answers and len(answers) == 1
    after = cluster.serving()
    assert {cluster.complete(server["url"], other) for server in after.values()} == answers
    assert rebalance(cluster)["current"] is not None  # both are looked at again


@needs_ray
def test_down_leaves_nothing_of_a_cluster_with_a_scheduler(cluster: Cluster) -> None:
    processes = processes_of(cluster.running)
    ports = ports_of(processes)
    assert cluster.run("down").returncode == 0
    assert_nothing_is_left(cluster.running, ports)


def test_what_needs_a_cluster_that_is_up_is_refused_in_a_sentence_where_none_is(
    small_moe: Path, private_state: None, tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:
    config = write_config(tmp_path, small_moe)
    assert main(["cluster", "rebalance", "--config", str(config)]) == 2
    assert f"is not up: `pyorch cluster up --config {config}` starts it" in capsys.readouterr().err
    for action in ("status", "rebalance"):
        assert main(["cluster", action, "--config", str(tmp_path / "misspelt.toml")]) == 2
        assert "misspelt.toml: no such file, and no cluster of it is up" in capsys.readouterr().err
