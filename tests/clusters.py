"""Clusters that tests bring up, and what is left of them. Ray and llama-server are real."""

from __future__ import annotations

import importlib.util
import json
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from models import PROMPT
from processes import HANG_SECONDS, pyorch

from pyorch.cluster import state
from pyorch.cluster.local_ray import MARK
from pyorch.cluster.members import ABSENT, SERVING
from pyorch.cluster.state import Running

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None or importlib.util.find_spec("psutil") is None,
    reason="Ray is not installed: pip install 'pyorch[cluster]'",
)


def write_config(directory: Path, model: Path, more: str = "", **others: Path) -> Path:
    """A cluster of two servers on this machine, a and b, which ask each other whatever their disks do. more: tables of
    the file. others: the model of one of them, where it is another."""
    text = f'model = "{model}"\nread = "last"\n{more}'
    for name, memory in (("a", "40%"), ("b", "60%")):
        text += f'[[server]]\nname = "{name}"\nmemory = "{memory}"\n'
        text += f'model = "{others[name]}"\n' if name in others else ""
    config = directory / "cluster.toml"
    config.write_text(text)
    return config


_LOOK = """
import dataclasses, json, sys
from pathlib import Path
from pyorch.cluster import state
from pyorch.cluster.local_ray import connected
from pyorch.cluster.operations import report, statuses

running = state.find(Path(sys.argv[1]))
with connected(running) as ray:
    for what in sys.stdin:
        if what == "servers\\n":
            found = [dataclasses.asdict(status) for status in statuses(ray, running.servers)]
        else:
            found = report(ray)
            found = None if found is None else dataclasses.asdict(found)
        print(json.dumps(found), flush=True)
"""


class Cluster:
    """One that `pyorch cluster up` has brought up."""

    def __init__(self, config: Path, *options: object) -> None:
        self.config = config
        self.key, self.authority = "", ""  # of endpoints: an API key, and whose certificates are believed
        self.up = self.run("up", *map(str, options))
        assert self.up.returncode == 0, self.up.stderr
        self.running = state.find(config)
        self.has_plan = "--plan" in options
        self._looking = subprocess.Popen([sys.executable, "-c", _LOOK, str(config)], text=True, stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return pyorch("cluster", *arguments, "--config", self.config)

    def glance(self) -> dict[str, dict]:
        """What one look at the servers shows, by name: as `pyorch cluster status`, without a new process for each."""
        return {server["name"]: server for server in self._look("servers")}

    def status(self) -> dict[str, dict]:
        """The same when all of them answer, for which a busy machine may need several looks."""
        found = {}

        def all_answer() -> bool:
            found.update(self.glance())
            return all(server["state"] != ABSENT for server in found.values())

        wait_until(all_answer)
        return found

    def serving(self) -> dict[str, dict]:
        """The same when all serve, and with a plan for each other: a busy machine may take its time."""
        found: dict[str, dict] = {}

        def do_serve() -> bool:
            found.update(self.glance())
            return all(server["state"] == SERVING and
                       (not self.has_plan or server["counters"]["met"] == len(found) - 1) for server in found.values())

        wait_until(do_serve)
        return found

    def scheduler(self) -> dict | None:
        """What it reports, likewise; None where none answers."""
        return self._look("scheduler")

    def _look(self, what: str) -> Any:
        print(what, file=self._looking.stdin, flush=True)
        return json.loads(self._looking.stdout.readline())

    def close(self) -> None:
        with self._looking:
            self._looking.kill()
        self.run("down")

    def serving_again(self, name: str, before: dict) -> dict:
        """The status of a server that serves in another process than before."""
        found = {}

        def is_back() -> bool:
            found.update(self.status()[name])
            return found["state"] == SERVING and found["counters"]["pid"] != before["counters"]["pid"]

        wait_until(is_back)
        return found

    def complete(self, url: str, prompt: object = PROMPT, **more: object) -> str:
        asked = {"prompt": prompt, "max_tokens": 16, "temperature": 0, "cache_prompt": False, **more}
        body = json.dumps(asked).encode()
        headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {self.key}"} if self.key else {})
        request = urllib.request.Request(f"{url}/v1/completions", body, headers)
        tls = ssl.create_default_context(cafile=self.authority) if self.authority else None
        with urllib.request.urlopen(request, timeout=HANG_SECONDS, context=tls) as answer:
            return json.load(answer)["choices"][0]["text"]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def processes_of(running: Running) -> list[int]:
    """Those with the mark of a cluster in their environment, or below its directory."""
    import psutil

    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == running.mark or running.directory in process.cwd():
                found.append(process.pid)
        except (psutil.Error, OSError):
            continue
    return found


def ports_of(pids: list[int]) -> set[tuple[str, int]]:
    """Where processes listen."""
    import psutil

    return {
        tuple(connection.laddr) for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.pid in pids
    }


def assert_nothing_is_left(running: Running, ports: set[tuple[str, int]]) -> None:
    assert processes_of(running) == []
    assert not Path(running.directory).exists()
    assert state.find(Path(running.config)) is None
    for host, port in ports:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            assert probe.connect_ex((host, port)) != 0, port
