"""A cluster whose servers have a share of the experts each, and nobody the whole model."""

from __future__ import annotations

import json
import os
import shutil
import signal
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from clusters import Cluster, needs_ray, wait_until, write_config

from pyorch.cli import main
from pyorch.cluster import local_ray
from pyorch.cluster.members import REFUSED
from pyorch.cluster.placement.placement import ABSENT, Placement, write_placement
from pyorch.llama.model import Model
from pyorch.runtime.model_map import ModelMap

BOTH = 8  # experts of each layer that both servers have; b lacks the first one


def write_plan(path: Path, model: Path, names: tuple[str, str] = ("a", "b"), n_covered: int = 64) -> Path:
    device = np.full((2, 8, 64), ABSENT, np.int16)
    device[0, :, :32] = device[1, :, 32 - BOTH : n_covered] = 0
    with ModelMap(model) as model_map:
        write_placement(path, Placement(names, tuple(range(8)), (64,) * 8, device, "halves"), model_map)
    return path


@pytest.fixture(scope="module")
def directory(small_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a share for each server below `shares`, and no whole model any more."""
    directory = tmp_path_factory.mktemp("shares")
    model = Path(shutil.copy(small_moe, directory / "small.gguf"))
    config, plan = write_config(directory, model), write_plan(directory / "plan.json", model)
    prepare = ["cluster", "prepare", "--config", config, "--plan", plan, "-o", directory / "shares"]
    assert main(list(map(str, prepare))) == 0
    model.unlink()
    return directory


@pytest.fixture(scope="module")
def cluster(directory: Path, private_state: None) -> Iterator[Cluster]:
    config = write_config(directory, directory / "small.gguf",
                          **{name: directory / f"shares/{name}/small.gguf" for name in ("a", "b")})
    cluster = Cluster(config, "--plan", directory / "plan.json")
    try:
        yield cluster
    finally:
        cluster.close()


@needs_ray
def test_they_answer_as_one_server_with_all_experts_would(
    cluster: Cluster, resident: Model, prompt_tokens: list[int],
) -> None:
    alone = "".join(resident.generate(prompt_tokens, max_tokens=16, temperature=0))
    servers = cluster.serving()
    assert all(server["counters"]["failures"] == 0 for server in servers.values())  # llama-server tried its context
    for server in servers.values():
        assert cluster.complete(server["url"], prompt_tokens) == alone
    assert all(server["counters"]["sent"] > 0 for server in cluster.status().values())


@needs_ray
def test_their_experts_stay_where_they_are(cluster: Cluster) -> None:
    assert "experts stay where the plan has them" in cluster.up.stderr
    again = cluster.run("rebalance")
    assert again.returncode == 2 and "the cluster has no scheduler" in again.stderr


@needs_ray
def test_without_the_only_server_that_has_an_expert_requests_fail_until_it_is_back(
    cluster: Cluster, resident: Model, prompt_tokens: list[int],
) -> None:
    alone = "".join(resident.generate(prompt_tokens, max_tokens=16, temperature=0))
    before = cluster.serving()
    url, pid = before["a"]["url"], before["a"]["counters"]["pid"]
    os.kill(before["b"]["counters"]["pid"], signal.SIGSTOP)  # killed, it might be back before it is missed
    for more in ({}, {"echo": True}):
        with pytest.raises(urllib.error.HTTPError) as refused:
            cluster.complete(url, prompt_tokens, **more)
        error = json.loads(refused.value.read())["error"]
        assert refused.value.code == error["code"] == 503
        assert "no server that has it answers" in error["message"] and "/" not in error["message"]
    os.kill(before["b"]["counters"]["pid"], signal.SIGKILL)
    cluster.serving_again("b", before["b"])

    def answers_again() -> bool:
        try:
            return cluster.complete(url, prompt_tokens) == alone
        except urllib.error.HTTPError:
            return False

    wait_until(answers_again)
    assert cluster.serving()["a"]["counters"]["pid"] == pid


@needs_ray
def test_a_server_whose_share_is_another_one_meanwhile_is_refused_when_it_starts_again(
    cluster: Cluster, small_moe: Path, directory: Path, tmp_path: Path,
) -> None:
    """The last of these tests: a refused server stays so."""
    pid = cluster.serving()["b"]["counters"]["pid"]
    share = directory / "shares/b/small.experts.gguf"
    os.replace(shutil.copy(directory / "shares/a/small.experts.gguf", tmp_path / "share"), share)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: cluster.glance()["b"]["state"] == REFUSED)
    assert "the plan gives it 256 experts that its share of them lacks" in cluster.glance()["b"]["reason"]


def test_what_no_share_can_be_used_for_is_refused_before_ray_starts(
    directory: Path, private_state: None, tmp_path: Path, small_moe: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local_ray, "start", lambda running: pytest.fail("Ray was started"))

    def refused(*arguments: object) -> str:
        assert main(["cluster", *map(str, arguments)]) == 2
        return capsys.readouterr().err

    other = write_config(tmp_path, directory / "small.gguf", a=directory / "shares/a/small.gguf",
                         b=directory / "shares/a/small.gguf")
    plan = directory / "plan.json"
    assert "server b: the plan gives it 256 experts that its share of them lacks" in \
        refused("up", "--config", other, "--plan", plan)
    assert "has a share of the experts, for one server of a cluster" in refused("up", "--config", other)

    one = write_config(tmp_path, small_moe, a=directory / "shares/a/small.gguf")
    for width in (("--ubatch", 2048), ("--", "-ub", 2048)):
        assert "server a: it has a share of the experts, and other servers take no more than 1024 rows" in \
            refused("up", "--config", one, "--plan", plan, *width)

    shares = write_config(tmp_path, directory / "small.gguf",
                          **{name: directory / f"shares/{name}/small.gguf" for name in ("a", "b")})
    part = write_plan(tmp_path / "part.json", small_moe, n_covered=60)
    assert "server a: the plan gives 32 experts to no server, and its share of them lacks these" in \
        refused("up", "--config", shares, "--plan", part)

    whole = write_config(tmp_path, small_moe)
    out = tmp_path / "out"
    for options, why in (
        ((write_plan(tmp_path / "others.json", small_moe, ("a", "c")),), "the plan is for the servers a, c"),
        ((write_plan(tmp_path / "part.json", small_moe, n_covered=60),), "gives 32 experts to no server"),
        ((plan, "--server", "c"), 'has no server "c": it has a, b'),
        ((tmp_path / "nothing.json",), "No such file"),
    ):
        assert why in refused("prepare", "--config", whole, "-o", out, "--plan", *options)
        assert not out.exists()
    out.write_text("")
    assert str(out) in refused("prepare", "--config", whole, "-o", out, "--plan", plan)


def test_one_server_s_share_is_written_alone_and_said_as_json(
    directory: Path, small_moe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare = ["cluster", "prepare", "--config", write_config(tmp_path, small_moe), "--plan", directory / "plan.json",
               "-o", tmp_path / "shares", "--server", "b", "--json"]
    for written in (True, False):
        assert main(list(map(str, prepare))) == 0
        [(name, share)] = json.loads(capsys.readouterr().out).items()
        assert (name, share["n_experts"], share["written"]) == ("b", 8 * (32 + BOTH), written)
    assert [path.name for path in (tmp_path / "shares").iterdir()] == ["b"]
    assert sorted(path.name for path in (tmp_path / "shares/b").iterdir()) == [
        f"{small_moe.stem}.experts.gguf", small_moe.name]
