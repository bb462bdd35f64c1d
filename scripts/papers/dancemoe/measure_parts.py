"""Runs the parts of dancemoe.measure: starts clusters on a network, sends requests, and reads counters meanwhile."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from pyorch.cluster import state
from pyorch.cluster.actor import stop_servers
from pyorch.cluster.local_ray import ray_library
from pyorch.cluster.members import SERVING, Counters
from pyorch.cluster.state import Running
from scripts.papers.dancemoe.measure_load import (
    TASKS,
    Answered,
    Arrival,
    Requests,
    arrivals_of,
    ask,
    complete,
    read_requests_of,
)
from scripts.papers.dancemoe.measure_network import Network, NoNetwork
from scripts.papers.dancemoe.measure_setups import SERVERS, Setup, config_of, costs_of, plan_of, say, setups, write_json

PLACES = 4  # requests of a server that run together
_UP_SECONDS = 180.0
_RAY_PORT = 6379
_RAY = (
    "--block", "--num-cpus=0", "--num-gpus=0", f"--object-store-memory={80 << 20}", "--include-log-monitor=false",
    "--disable-usage-stats", "--dashboard-agent-listen-port=0",
)
_HEAD = (
    "--head", f"--port={_RAY_PORT}", "--include-dashboard=false", "--no-monitor", "--system-config="
    '{"memory_monitor_refresh_ms":0,"enable_worker_prestart":false,"worker_niceness":0,"health_check_period_ms":500,'
    '"health_check_timeout_ms":1000,"health_check_failure_threshold":3}',
)


@dataclasses.dataclass
class Cluster:
    """A running cluster. `actors`: the servers' actors in Ray; `urls`: their endpoints."""

    setup: Setup
    actors: dict[str, Any]
    urls: dict[str, str]


class Lab:
    """A context: a network, and Ray on each of its servers. Several clusters may run on it at the same time."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.network = Network(SERVERS, args.link * 1e6, args.disk * 1e6, args.model)
        self._ending = contextlib.ExitStack()
        self._requests: dict[str, Requests] = {}
        self._running: list[Running] = []

    def __enter__(self) -> Lab:
        with self._ending:
            self._ending.enter_context(self.network)
            # The list of running clusters is a temporary file, too. Ray would lower the priority of workers.
            self._ending.callback(os.environ.update, XDG_RUNTIME_DIR=os.environ.get("XDG_RUNTIME_DIR", ""))
            os.environ.update(XDG_RUNTIME_DIR=str(self.network.directory), RAY_worker_niceness="0")
            if self.args.disk and not self.network.throttled:
                say("disks are not limited: limits need control groups of version 1")
            self.ray = self._start_ray()
            self._ending = self._ending.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._ending.__exit__(*error)

    def up(self, chosen: Sequence[Setup]) -> list[Cluster]:
        """Starts clusters at the same time. NoNetwork: a cluster does not start."""
        say(f"bringing up {', '.join(setup.name for setup in chosen)}")
        head = self.network.address(SERVERS[0])
        starting = []
        for setup in chosen:
            plan = ["--plan", str(plan_of(self.args, setup))] if setup.algorithm else []
            log = open(self.network.directory / f"{setup.name}.log", "w+b")
            starting.append((setup, log, self.network.start(SERVERS[0], [
                sys.executable, "-m", "pyorch", "cluster", "up", "--config", str(config_of(self.args, setup)),
                "--address", f"{head}:{_RAY_PORT}", *plan, "--threads", str(self.args.threads),
                "--", "-np", str(PLACES), "-c", str(PLACES * 1024),
            ], stdout=log, stderr=log)))
        deadline = time.monotonic() + _UP_SECONDS
        while any(process.poll() is None for _, _, process in starting) and time.monotonic() < deadline:
            time.sleep(0.1)
        clusters = []
        for setup, log, process in starting:
            log.seek(0)
            words = log.read().decode(errors="replace").strip().splitlines() or ["it said nothing"]
            if process.poll() != 0:
                raise NoNetwork(f"{setup.name} did not start: {words[-1]}")
            running = state.find(config_of(self.args, setup))
            self._running.append(running)
            actors = {name: self.ray.get_actor(name, namespace=running.namespace) for name in setup.servers}
            cluster = Cluster(setup, actors, {})
            cluster.urls = {name: status.url for name, status in self.statuses(cluster).items()}
            clusters.append(cluster)
        return clusters

    def down(self) -> None:
        """Ends all running clusters."""
        for running in self._running:
            stop_servers(self.ray, running)
            state.forget(running)
        self._running.clear()

    def statuses(self, cluster: Cluster) -> dict[str, Any]:
        """Returns the statuses of the servers that answer within two seconds."""
        calls = {actor.status.remote(): name for name, actor in cluster.actors.items()}
        ready, _ = self.ray.wait(list(calls), num_returns=len(calls), timeout=2)
        found = {}
        for call in ready:
            with contextlib.suppress(self.ray.exceptions.RayError):
                found[calls[call]] = self.ray.get(call)
        return {name: found[name] for name in cluster.actors if name in found}

    def counters(self, cluster: Cluster) -> dict[str, Counters]:
        return {name: status.counters for name, status in self.statuses(cluster).items() if status.state == SERVING}

    def load(
        self, cluster: Cluster, seed: int, seconds: float, shift: float | None = None,
        at: dict[float, Callable[[], None]] | None = None, servers: Sequence[str] = SERVERS,
    ) -> tuple[list[Answered], list[dict]]:
        """Sends requests, and reads the servers' counters every second meanwhile.

        Args:
            cluster: The cluster.
            seed: Requests and arrivals are the same as with `simulate --seed`.
            seconds: Time in which requests arrive.
            shift: Time at which each server gets the task of the next server. None: never.
            at: Calls at given times.
            servers: Servers that get requests.

        Returns:
            The answers, and the counters.
        """
        counts: list[dict] = []
        ended = threading.Event()
        looking = threading.Thread(target=self._look, args=(cluster, counts, ended), daemon=True)
        looking.start()
        while not counts:
            time.sleep(0.01)
        arrivals = [arrival for arrival in self.arrivals(cluster, seed, seconds, shift) if arrival.server in servers]
        try:
            answers = ask(self.network, cluster.urls, arrivals, self.args.tokens, at)
        finally:
            ended.set()
            looking.join()
        return answers, counts

    def arrivals(self, cluster: Cluster, seed: int, seconds: float, shift: float | None = None) -> list[Arrival]:
        tasks = [self.requests(task) for task in TASKS]
        return arrivals_of(cluster.setup.servers, tasks, self.args.every, seconds, seed, shift)

    def requests(self, task: str) -> Requests:
        if task not in self._requests:
            self._requests[task] = read_requests_of(self.args.output / f"asked-{task}.jsonl")
        return self._requests[task]

    def _look(self, cluster: Cluster, counts: list[dict], ended: threading.Event) -> None:
        begin = time.perf_counter()
        while True:
            found = self.counters(cluster)
            counts.append({"time": time.perf_counter() - begin,
                           "servers": {name: dataclasses.asdict(each) for name, each in found.items()}})
            if ended.is_set():
                return
            ended.wait(1.0)

    def _start_ray(self) -> ModuleType:
        head = self.network.address(SERVERS[0])
        command = [sys.executable, "-m", "ray.scripts.scripts", "start"]
        ray = ray_library()
        for i, name in enumerate(SERVERS):  # in sequence: nodes that start together choose the same names for sockets
            role = [*_HEAD, f"--temp-dir={self.network.directory}"] if i == 0 else [f"--address={head}:{_RAY_PORT}"]
            log = open(self.network.directory / f"ray-{name}.log", "wb")
            self.network.start(name, [*command, *role, *_RAY, f"--node-ip-address={self.network.address(name)}"],
                               stdout=log, stderr=log)
            if i == 0:
                _wait((self.network.directory / "ray_current_cluster").exists, 60, "Ray does not start")
                self._ending.enter_context(self.network.inside(SERVERS[0]))
                ray.init(address=f"{head}:{_RAY_PORT}", namespace="measuring", log_to_driver=False,
                         logging_level="CRITICAL")
                self._ending.callback(ray.shutdown)
            _wait(lambda: sum(node["Alive"] for node in ray.nodes()) == i + 1, 60, f"Ray does not start on {name}")
        return ray


def _wait(done: Callable[[], object], seconds: float, sentence: str) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            raise NoNetwork(sentence)
        time.sleep(0.1)


def measure_parts(args: argparse.Namespace) -> dict[str, Any]:
    """Runs the parts and returns their results. Each is written at once. The part that kills a server is the last."""
    found = {}
    with Lab(args) as lab:
        for part in sorted(args.parts, key="kill".__eq__):
            say(f"part {part}")
            begin = time.perf_counter()
            found[part] = _MEASURES[part](lab, part)
            settings = {name: getattr(args, name) for name in ("link", "disk", "threads", "every", "tokens", "seed")}
            found[part] |= {"part": part, "settings": settings, "took": time.perf_counter() - begin}
            write_json(args.output / f"{part}.json", found[part])
            if part != "kill":
                lab.down()
                lab.network.set_disk(args.disk * 1e6)
    return found


def _costs(lab: Lab, part: str) -> dict[str, Any]:
    (cluster,) = lab.up(setups(part, lab.args.algorithms))
    config, costs = str(config_of(lab.args, cluster.setup)), str(costs_of(lab.args))
    for module, *options in (("pyorch", "cluster", "measure"),
                             ("scripts.papers.dancemoe.measure_computing", "--costs", costs, "--threads",
                              str(lab.args.threads))):
        lab.network.run(SERVERS[0], [sys.executable, "-m", module, *options, "--config", config, "-o", costs], 240)
    return {}


def _placements(lab: Lab, part: str) -> dict[str, Any]:
    args = lab.args
    clusters = lab.up(setups(part, args.algorithms, args.read))
    results = {cluster.setup.label: [] for cluster in clusters}
    for cluster in clusters:
        _warm(lab, cluster)
    for number in range(args.rounds):
        for cluster in clusters[number % len(clusters):] + clusters[: number % len(clusters)]:
            say(f"round {number + 1} of {args.rounds}: {cluster.setup.label}")
            answers, counts = lab.load(cluster, args.seed + number, args.seconds)
            results[cluster.setup.label].append(_round(answers, counts, args.seed + number))
    return {"clusters": results, "seconds": args.seconds}


def _warm(lab: Lab, cluster: Cluster) -> None:
    """Sends a few requests to each server, which do not count. They load pages of the dense part and make buffers."""
    for name in cluster.setup.servers:
        prompts = lab.requests(TASKS[cluster.setup.servers.index(name)]).prompts
        with lab.network.inside(name):
            for prompt in prompts[-3:]:
                complete(cluster.urls[name], prompt, 4)


def _round(answers: Sequence[Answered], counts: Sequence[dict], seed: int) -> dict[str, Any]:
    return {"seed": seed, "answers": [dataclasses.asdict(answer) for answer in answers], "counts": list(counts)}


def _shift(lab: Lab, part: str) -> dict[str, Any]:
    args = lab.args
    both = setups(part, args.algorithms)
    results: dict[str, list] = {setup.name: [] for setup in both}
    for number in range(args.rounds):
        for setup in both[:: -1 if number % 2 else 1]:  # in sequence, so that no expert moves before the requests
            (cluster,) = lab.up([setup])
            _warm(lab, cluster)
            say(f"round {number + 1} of {args.rounds}: {setup.name}, {args.shift_seconds:g} s")
            seed = args.seed + number
            found = lab.load(cluster, seed, args.shift_seconds, args.shift_seconds / 2)
            results[setup.name].append(_round(*found, seed))
            lab.down()
    return {"clusters": results, "seconds": args.shift_seconds, "shift": args.shift_seconds / 2,
            "interval": args.interval}


def _scaling(lab: Lab, part: str) -> dict[str, Any]:
    """Sends each server as many requests at once as it has places, one server after another."""
    args = lab.args
    results = {}
    for cluster in lab.up(setups(part, args.algorithms)):  # the others are idle meanwhile
        _warm(lab, cluster)
        say(f"{cluster.setup.name}, {args.seconds:g} s")
        results[cluster.setup.name] = _saturate(lab, cluster)
    return {"clusters": results, "seconds": args.seconds}


def _saturate(lab: Lab, cluster: Cluster) -> dict[str, Any]:
    args = lab.args
    tokens: list[tuple[int, int]] = []
    deadline = time.perf_counter() + args.seconds
    before = lab.counters(cluster)

    def user(name: str, prompts: Iterator[str]) -> None:
        with lab.network.inside(name):
            while time.perf_counter() < deadline:
                timings = complete(cluster.urls[name], next(prompts), args.tokens + 1)["timings"]
                tokens.append((timings["prompt_n"], timings["predicted_n"]))

    begin = time.perf_counter()
    users = []
    for n, name in enumerate(cluster.setup.servers):
        prompts = itertools.cycle(lab.requests(TASKS[n]).prompts)
        users += [threading.Thread(target=user, args=(name, prompts), daemon=True) for _ in range(PLACES)]
    for thread in users:
        thread.start()
    for thread in users:
        thread.join()
    seconds = time.perf_counter() - begin
    after = lab.counters(cluster)
    return {"seconds": seconds, "n_requests": len(tokens), "prompt_tokens": sum(n for n, _ in tokens),
            "output_tokens": sum(n for _, n in tokens),
            "bytes_read": sum(after[name].bytes_read - before[name].bytes_read for name in after)}


def _kill(lab: Lab, part: str) -> dict[str, Any]:
    """Cuts the power of one server in the middle."""
    args = lab.args
    (cluster,) = lab.up(setups(part, args.algorithms))
    _warm(lab, cluster)
    seconds, victim = 2 * args.seconds, SERVERS[-1]
    at = {seconds / 2: lambda: lab.network.kill(victim)}
    found = _round(*lab.load(cluster, args.seed, seconds, at=at), args.seed)
    return {"clusters": {"kill": [found]}, "seconds": seconds, "events": {"killed": seconds / 2}, "victim": victim}


def _thirds(lab: Lab, part: str) -> dict[str, Any]:
    """Sends requests to one server only, with a limited disk and with the disk's own speed."""
    args = lab.args
    clusters = lab.up(setups(part, args.algorithms))
    for cluster in clusters:
        _warm(lab, cluster)
    results: dict[str, list] = {}
    for number in range(args.rounds):
        for disk in (args.disk, 0.0):
            lab.network.set_disk(disk * 1e6)
            for cluster in clusters:
                name = f"{cluster.setup.name}, {f'{disk:g} MB/s' if disk else 'the disk as it is'}"
                say(f"round {number + 1} of {args.rounds}: {name}")
                found = lab.load(cluster, args.seed + number, args.seconds, servers=SERVERS[:1])
                results.setdefault(name, []).append(_round(*found, args.seed + number))
    return {"clusters": results, "seconds": args.seconds}


_MEASURES = {"costs": _costs, "placements": _placements, "disk": _placements, "shift": _shift, "scaling": _scaling,
             "kill": _kill, "thirds": _thirds}
