"""A cluster, as its users see it: commands, endpoints, and processes that die. Ray and llama-server are real."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from clusters import Cluster, assert_nothing_is_left, needs_ray, ports_of, processes_of, wait_until, write_config
from processes import HANG_SECONDS, heed_ctrl_c, pyorch, python

from pyorch import ports
from pyorch.cli import main
from pyorch.cluster import local_ray, members, state
from pyorch.cluster.costs import read_costs
from pyorch.cluster.members import SERVING
from pyorch.cluster.placement.placement import ABSENT, Placement, write_placement
from pyorch.errors import PyorchError
from pyorch.llama.model import Model
from pyorch.runtime.model_map import ModelMap
from scripts.papers.dancemoe import measure_computing

CERTIFICATES = Path(__file__).parents[1] / "fixtures/certificates"


def tls(certificate: str = "server") -> str:
    """Tests of the tunnel say what these are."""
    files = {"certificate": f"{certificate}.pem", "key": f"{certificate}.key", "authority": "authority.pem"}
    return "[tls]\n" + "".join(f'{what} = "{CERTIFICATES / name}"\n' for what, name in files.items())


def is_alive(pid: int) -> bool:
    """Whether there is such a process that is not a zombie."""
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module")
def cluster(small_moe: Path, private_state: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One with a plan that gives each server half of each layer's experts, more than the memory of a holds, and with
    TLS between servers and to users, who need a key."""
    config = write_config(tmp_path_factory.mktemp("cluster"), small_moe)
    config.write_text(config.read_text() + tls() + '[endpoints]\nkeys = "keys"\ntls = true\n')
    config.with_name("keys").write_text("# of tests\nfirst-key\nsecond-key\n")
    device = np.full((2, 8, 64), ABSENT, np.int16)
    device[0, :, :32] = device[1, :, 32:] = 0
    plan = config.with_name("plan.json")
    with ModelMap(small_moe) as model_map:
        write_placement(plan, Placement(("a", "b"), tuple(range(8)), (64,) * 8, device, "halves"), model_map)
    cluster = Cluster(config, "--plan", plan)
    cluster.key, cluster.authority = "second-key", str(CERTIFICATES / "authority.pem")
    try:
        yield cluster
    finally:
        cluster.close()


@needs_ray
def test_status_shows_what_every_server_does(cluster: Cluster) -> None:
    servers: dict[str, dict] = {}

    def all_serve() -> bool:
        """Where the machine is busy, not every look finds all of them."""
        done = cluster.run("status", "--json")
        assert done.returncode == 0 and cluster.running.token not in done.stdout, done.stderr
        servers.update({server["name"]: server for server in json.loads(done.stdout)["servers"]})
        return all(server["state"] == SERVING and server["peers"] for server in servers.values())

    wait_until(all_serve)
    assert list(servers) == ["a", "b"]
    for name, peer in (("a", ["b"]), ("b", ["a"])):
        server = servers[name]
        assert (server["state"], server["peers"], server["restarted"]) == ("serving", peer, False), server["reason"]
        assert server["url"].startswith("https://127.0.0.1:") and server["url"] in cluster.up.stdout
        counters = server["counters"]
        assert 0 < counters["used_bytes"] <= counters["budget_bytes"] < counters["memory_bytes"]
    assert servers["a"]["counters"]["budget_bytes"] < servers["b"]["counters"]["budget_bytes"]


@needs_ray
def test_servers_keep_what_the_plan_gives_them_as_far_as_their_memory_goes(cluster: Cluster) -> None:
    servers = cluster.serving()
    assert servers["a"]["digest"] == servers["b"]["digest"] != ""
    for server in servers.values():
        assert server["placed"] == 8 * 32
    n_pinned, reason = servers["a"]["counters"]["pinned"], servers["a"]["reason"]
    assert 0 < n_pinned < 8 * 32 and f"{n_pinned} experts of the plan stay in memory: its experts" in reason
    assert "experts that do not stay are read when they are used" in reason
    assert servers["b"]["counters"]["pinned"] == 8 * 32 and servers["b"]["reason"] == ""


@needs_ray
def test_servers_compute_for_each_other_what_one_would_compute_alone(
    cluster: Cluster, resident: Model, prompt_tokens: list[int],
) -> None:
    alone = "".join(resident.generate(prompt_tokens, max_tokens=16, temperature=0))
    for name, server in cluster.status().items():
        def asks_the_other() -> bool:
            """For a whole request. The other one is lost for a while where it has not been heard for two seconds."""
            before = cluster.status()[name]["counters"]
            assert cluster.complete(server["url"], prompt_tokens) == alone
            after = cluster.status()[name]["counters"]
            return after["sent"] > before["sent"] and after["fallback"] == before["fallback"]

        wait_until(asks_the_other)
    assert all(server["counters"]["served"] > 0 for server in cluster.status().values())


@needs_ray
def test_every_endpoint_gives_the_same_answer_and_counts_it(cluster: Cluster) -> None:
    servers = cluster.serving()
    answers = {cluster.complete(server["url"]) for server in servers.values()}
    assert len(answers) == 1 and answers.pop().strip()
    # llama-server's own counters are not there while it does not answer within a second.
    wait_until(lambda: all(server["counters"]["generated_tokens"] >= 15 for server in cluster.status().values()))
    assert all(server["counters"]["hits"] > 0 for server in cluster.status().values())


@needs_ray
def test_users_need_a_key_and_tls(cluster: Cluster) -> None:
    url = cluster.serving()["a"]["url"]
    for key, authority, error in (("no key", cluster.authority, "401"), (cluster.key, "", "certificate verify failed")):
        other = copy.copy(cluster)
        other.key, other.authority = key, authority
        with pytest.raises(urllib.error.URLError, match=error):
            other.complete(url)
    with pytest.raises((urllib.error.URLError, OSError)):  # HTTP to HTTPS
        cluster.complete(url.replace("https", "http"))
    assert cluster.complete(url)
    wait_until(lambda: cluster.status()["a"]["counters"]["prompt_tokens"] is not None)  # asked with a key, too


@needs_ray
def test_nobody_but_this_machine_can_reach_a_cluster_of_its_own(cluster: Cluster) -> None:
    hosts = {host.removeprefix("::ffff:") for host, _ in ports_of(processes_of(cluster.running))}
    assert hosts == {"127.0.0.1"}
    for directory in (Path(os.environ["XDG_RUNTIME_DIR"]) / "pyorch", cluster.running.directory):  # Ray's has sockets
        assert os.stat(directory).st_mode & 0o077 == 0


@needs_ray
def test_a_cluster_that_is_up_is_not_started_again(cluster: Cluster) -> None:
    again = cluster.run("up")
    assert again.returncode == 2 and f"is up: `pyorch cluster down --config {cluster.running.config}`" in again.stderr
    assert cluster.serving()["a"]["state"] == "serving"


@needs_ray
def test_a_killed_server_is_seen_and_serves_again_at_its_address(cluster: Cluster) -> None:
    before = cluster.serving()["b"]
    a = cluster.serving()["a"]["url"]
    answer = cluster.complete(a)
    os.kill(before["counters"]["pid"], signal.SIGKILL)
    assert cluster.complete(a) == answer  # without the experts of b
    now = cluster.glance()["b"]  # the first look shows it
    assert now["state"] != "serving" or now["restarted"]
    after = cluster.serving_again("b", before)
    assert (after["url"], after["restarted"]) == (before["url"], True)
    assert cluster.complete(after["url"]) == answer


@needs_ray
def test_with_its_actor_a_serving_process_ends_and_ray_starts_both_again(cluster: Cluster) -> None:
    before = cluster.serving()["a"]
    os.kill(before["actor_pid"], signal.SIGKILL)
    after = cluster.serving_again("a", before)
    assert after["actor_pid"] != before["actor_pid"] and after["url"] == before["url"]
    wait_until(lambda: not is_alive(before["counters"]["pid"]))
    wait_until(lambda: cluster.status()["a"]["peers"] == ["b"])  # one that is not heard for two seconds is lost


@needs_ray
def test_a_server_that_hangs_is_seen(cluster: Cluster) -> None:
    pid = cluster.serving()["b"]["counters"]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        assert cluster.glance()["b"]["state"] == members.ABSENT
    finally:
        os.kill(pid, signal.SIGCONT)
    assert cluster.status()["b"]["state"] == SERVING


@needs_ray
def test_a_server_that_could_not_be_reached_is_reached_when_it_can(cluster: Cluster) -> None:
    before = cluster.serving()
    os.kill(before["b"]["counters"]["pid"], signal.SIGSTOP)
    try:
        os.kill(before["a"]["counters"]["pid"], signal.SIGKILL)
        wait_until(lambda: "server b does not compute for this one yet: " in cluster.glance()["a"]["reason"])
    finally:
        os.kill(before["b"]["counters"]["pid"], signal.SIGCONT)
    after = cluster.serving()
    assert after["a"]["counters"]["met"] == 1 and "yet" not in after["a"]["reason"]


_IMPOSTOR = """
import dataclasses, sys
from pathlib import Path
from pyorch.cluster import state
from pyorch.cluster.local_ray import connected
from pyorch.errors import PyorchError

try:
    with connected(dataclasses.replace(state.find(Path(sys.argv[1])), token="0" * 64)):
        print("admitted")
except PyorchError as error:
    print(error)
"""


@needs_ray
def test_links_and_disks_are_measured_and_what_computing_takes(cluster: Cluster, tmp_path: Path) -> None:
    done = cluster.run("measure", "-o", str(tmp_path / "costs.json"))
    assert done.returncode == 0, done.stderr
    costs = read_costs(tmp_path / "costs.json")
    assert sorted(costs.links) == [("a", "b"), ("b", "a")]
    assert all(rate > 0 and latency > 0 for rate, latency in costs.links.values())
    assert {name: server.disk_bytes_per_second > 0 for name, server in costs.servers.items()} == {"a": True, "b": True}
    assert measure_computing.main(["--config", str(cluster.config), "--costs", str(tmp_path / "costs.json"), "-o",
                                   str(tmp_path / "all.json")]) == 0
    costs = read_costs(tmp_path / "all.json")
    assert sorted(costs.links) == [("a", "b"), ("b", "a")]
    for server in costs.servers.values():  # computing takes time; for what, a busy machine does not tell
        assert server.layer + server.token + server.expert + server.row > 0
    (machine,) = costs.simulated["machines"]
    assert machine["servers"] == ["a", "b"] and 1 <= machine["cores"] <= max(1, os.cpu_count())


@needs_ray
def test_ray_itself_asks_for_the_token(cluster: Cluster) -> None:
    done = python("-c", _IMPOSTOR, cluster.config)
    assert done.stdout.startswith(f"Ray at {cluster.running.ray} refused"), done.stdout + done.stderr


@needs_ray
def test_down_leaves_nothing(cluster: Cluster) -> None:
    processes = processes_of(cluster.running)
    ports = ports_of(processes)
    assert len(processes) > 6 and len(ports) > 4
    done = cluster.run("down")
    assert (done.returncode, done.stderr) == (0, "pyorch: the cluster is down\n")
    assert_nothing_is_left(cluster.running, ports)
    assert cluster.run("down").stderr == "pyorch: there was no cluster to take down\n"
    assert "is not up: `pyorch cluster up" in cluster.run("status").stderr


@needs_ray
def test_down_removes_what_a_killed_up_and_a_killed_ray_leave(
    small_moe: Path, private_state: None, tmp_path: Path,
) -> None:
    config = write_config(tmp_path, small_moe)
    up = subprocess.Popen([sys.executable, "-m", "pyorch", "cluster", "up", "--config", str(config)],
                          stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: (found := state.find(config)) is not None and len(processes_of(found)) > 2)
    up.kill()
    up.wait()
    running = state.find(config)
    os.kill(running.keeper, signal.SIGKILL)
    again = pyorch("cluster", "up", "--config", config)
    assert again.returncode == 2 and f"ended by itself: `pyorch cluster down --config {config}`" in again.stderr
    assert "`pyorch cluster down` removes the rest" in pyorch("cluster", "status", "--config", config).stderr
    assert pyorch("cluster", "down", "--config", config).returncode == 0
    assert_nothing_is_left(running, set())


@needs_ray
def test_who_ends_up_while_ray_starts_leaves_nothing(small_moe: Path, private_state: None, tmp_path: Path) -> None:
    config = write_config(tmp_path, small_moe)
    up = subprocess.Popen([sys.executable, "-m", "pyorch", "cluster", "up", "--config", str(config)],
                          stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=heed_ctrl_c)
    wait_until(lambda: (found := state.find(config)) is not None and len(processes_of(found)) > 1)
    running = state.find(config)
    up.terminate()
    assert up.wait(HANG_SECONDS) == 130
    assert_nothing_is_left(running, set())


@needs_ray
def test_serve_says_what_happens_and_ends_everything_when_it_is_told_to(
    small_moe: Path, private_state: None, tmp_path: Path,
) -> None:
    config, log = write_config(tmp_path, small_moe), tmp_path / "log"
    with log.open("wb") as stderr:
        serve = subprocess.Popen([sys.executable, "-m", "pyorch", "cluster", "serve", "--config", str(config)],
                                 stdout=subprocess.PIPE, stderr=stderr, preexec_fn=heed_ctrl_c)
    try:
        table = [serve.stdout.readline() for _ in range(3)]
        assert table[1].startswith(b"a ") and table[2].startswith(b"b "), log.read_text()
        running = state.find(config)
        ports = ports_of(processes_of(running))
        serve.send_signal(signal.SIGHUP)  # its terminal was closed
        assert serve.wait(HANG_SECONDS) == 0, log.read_text()
        assert_nothing_is_left(running, ports)
    finally:
        serve.kill()
        serve.communicate()
        pyorch("cluster", "down", "--config", config)


@needs_ray
def test_what_cannot_serve_is_refused_before_ray_starts(
    small_moe: Path, small_moe_q4: Path, private_state: None, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local_ray, "start", lambda running: pytest.fail("Ray was started"))

    def refused(text: str, *flags: str) -> str:
        config = tmp_path / "cluster.toml"
        config.write_text(text)
        assert main(["cluster", "up", "--config", str(config), "--", *flags]) == 2
        assert state.find(config) is None
        return capsys.readouterr().err

    a = f'model = "{small_moe}"\n[[server]]\nname = "a"\nmemory = "50%"\n'
    assert "server b has another model than server a: its fingerprint is " in \
        refused(f'{a}[[server]]\nname = "b"\nmemory = "50%"\nmodel = "{small_moe_q4}"\n')
    assert "--port cannot be one for all servers" in refused(a, "--port", "8080")
    assert "instead of --ssl-key-file, say `tls = true`" in refused(a, "--ssl-key-file", "server.key")
    keys = tmp_path / "keys"
    assert f"server a: the keys {keys} cannot be read: No such file" in refused(a + '[endpoints]\nkeys = "keys"\n')
    for text, why in (("\n", "has no key"), ("# none yet\n", "has no key"), ("one\ntwo words\n", "key 2 of"),
                      ("# mine\nkey\r\n", "key 1 of"), ("clé\n", "key 1 of")):
        keys.write_text(text)
        found = refused(a + '[endpoints]\nkeys = "keys"\n')
        assert str(keys) in found and why in found
    assert "server b: its memory of 1 KiB is below the model's least memory" in \
        refused(f'{a}[[server]]\nname = "b"\nmemory = "1KiB"\n')
    said = refused(f'{a}[[server]]\nname = "b"\nmemory = "50%"\naddress = "192.0.2.77"\n')
    assert "server b: cannot listen on 192.0.2.77 port 0: " in said
    assert "server b answers every machine that reaches it" in said and "without a plan (--plan)" in said
    assert "server a: the certificate " in (expired := refused(a + tls("past"))) and "has expired" in expired
    assert f"server a: the key {CERTIFICATES}/nothing.key cannot be read" in \
        refused(a + tls().replace("server.key", "nothing.key"))
    port = ports.free()
    text = a.replace('name = "a"', f'name = "a"\nport = {port}')
    assert f"server b and server a are both to listen at port {port} of 127.0.0.1" in \
        refused(f'{text}[[server]]\nname = "b"\nmemory = "50%"\naddress = "localhost"\npeer_port = {port}\n')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"server b: cannot listen on 127.0.0.1 port {port}: Address already in use" in \
            refused(f'{a}[[server]]\nname = "b"\nmemory = "50%"\nport = {port}\n')


def test_without_ray_a_sentence_says_what_to_install(
    small_moe: Path, private_state: None, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "ray" else find(name, *rest))
    config = write_config(tmp_path, small_moe)
    assert main(["cluster", "up", "--config", str(config)]) == 2
    assert "pip install 'pyorch[cluster]'" in capsys.readouterr().err and state.find(config) is None


def test_other_commands_never_see_ray() -> None:
    code = "import sys, pyorch.cli\ntry: pyorch.cli.main(['cluster', 'up', '--help'])\nexcept SystemExit: pass\n" \
           "print('ray' in sys.modules, 'psutil' in sys.modules)"
    assert python("-c", code).stdout.splitlines()[-1] == "False False"


@needs_ray
def test_what_is_no_ray_is_not_joined(
    small_moe: Path, private_state: None, tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:
    def serve(listening: socket.socket) -> None:
        with listening.accept()[0] as connection:
            connection.recv(1)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    config = write_config(tmp_path, small_moe)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=(listening,))
        thread.start()
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        assert main(["cluster", "up", "--config", str(config), "--address", address]) == 2
        thread.join()
    assert f"no Ray answers at {address}" in capsys.readouterr().err and state.find(config) is None


@needs_ray
def test_a_cluster_that_is_only_starting_is_not_called_ended(
    private_state: None, tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:
    running = replace(state.Running.new(tmp_path / "cluster.toml"), directory=str(tmp_path))
    state.remember(running)
    assert main(["cluster", "status", "--config", running.config]) == 2
    assert "the cluster is starting" in capsys.readouterr().err
    state.forget(running)


def test_where_the_cluster_is_cannot_be_written_or_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # that of other tests may have a cluster that is up
    running = state.Running.new(tmp_path / "cluster.toml")
    state.remember(running)
    (path,) = (tmp_path / "pyorch").glob("cluster-*.json")
    path.write_text(path.read_text()[:-9])
    assert main(["cluster", "down", "--config", running.config]) == 2
    assert "cannot be read" in (said := capsys.readouterr().err) and "remove it" in said
    path.unlink()
    path.mkdir()
    with pytest.raises(PyorchError, match="cannot be written: Is a directory"):
        state.remember(running)
    path.rmdir()
    assert not [left for left in path.parent.iterdir() if left.suffix == ".part"]


def test_the_file_with_the_token_is_refused_where_others_can_read(
    private_state: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "pyorch").mkdir(mode=0o755)
    (tmp_path / "pyorch").chmod(0o755)
    assert main(["cluster", "status", "--config", str(tmp_path / "cluster.toml")]) == 2
    assert "is open to others than this user" in capsys.readouterr().err
