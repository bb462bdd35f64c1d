"""Starts a cluster, reports its state, and ends it.

Ray manages membership, detects failures and restarts servers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from pyorch.cluster import examination, local_ray, state
from pyorch.cluster.actor import start_server, stop_servers
from pyorch.cluster.config import Cluster
from pyorch.cluster.costs import CostsFile, ServerCosts
from pyorch.cluster.examination import Examined
from pyorch.cluster.local_ray import ask_all, connected
from pyorch.cluster.members import ABSENT, REFUSED, SERVING, Job, Status
from pyorch.cluster.placement.placement import Placement
from pyorch.cluster.rebalancing import Setting, Verdict
from pyorch.cluster.scheduler import NAME as SCHEDULER
from pyorch.cluster.scheduler import Report, start_scheduler
from pyorch.cluster.state import Running
from pyorch.errors import PyorchError
from pyorch.runtime.model_map import ModelMap

MEASURE_SECONDS = 600.0  # for one link, which may be slow, or one disk
REBALANCE_SECONDS = 120.0  # for the scheduler to ask all servers and make a placement
STATUS_SECONDS = 2.0  # for a server's answer: so the death of a server shows within three seconds


@contextlib.contextmanager
def brought_up(
    cluster: Cluster, *, ray_address: str = "", placement: Placement | None = None,
    settings: Mapping[str, Any] | None = None, flags: Sequence[str] = (),
    say: Callable[[str], None] = lambda sentence: None,
) -> Iterator[tuple[ModuleType, list[Status]]]:
    """Starts every server of a cluster, and waits until all serve.

    The servers outlive the context and this process.

    Args:
        cluster: The cluster.toml.
        ray_address: HOST:PORT of an existing Ray cluster; "" starts Ray on this machine, for servers here.
        placement: The experts that servers keep in memory, for the served model.
        settings: Settings of pyorch.serve, as texts, the same for all servers.
        flags: Flags of llama-server, the same for all servers.
        say: Receives a sentence for each event.

    Yields:
        The module ray, connected to the cluster's Ray, and the states of the servers.

    Raises:
        PyorchError: The cluster is up already, or a server cannot start. Then nothing is left running.
    """
    if placement is not None:
        placement.check_servers(cluster.names)
    for flag in ("--host", "--port"):
        if flag in flags:
            raise PyorchError(f"{flag} cannot be one for all servers: {cluster.path} has address and port of each")
    for flag in ("--ssl-key-file", "--ssl-cert-file"):
        if flag in flags:
            raise PyorchError(f"llama-server speaks no TLS here: instead of {flag}, say `tls = true` under [endpoints] "
                              f"in {cluster.path}")
    if placement is not None:
        cluster.check_privacy()
    if placement is None and len(cluster.servers) > 1:
        say("without a plan (--plan) servers do not compute for each other: each reads absent experts from its own "
            "disk")
    if cluster.open_to_anybody and "--api-key" not in flags and "--api-key-file" not in flags:
        say(f"server {', '.join(cluster.open_to_anybody)} answers every machine that reaches it: keys under "
            f"[endpoints] in {cluster.path} restrict this")
    setting = None
    if placement is not None and cluster.scheduler.enabled:
        with ModelMap(cluster.model_of(cluster.servers[0])) as model_map:
            setting = Setting.of(cluster, model_map)
    with contextlib.ExitStack() as connection:
        with state.locked(cluster.path):
            before = state.find(cluster.path)
            if before is not None:
                alive = local_ray.is_alive(before)
                what = "is up" if alive else "was up, and ended by itself"
                raise PyorchError(f"the cluster of {cluster.path} {what}: `pyorch cluster down --config "
                                  f"{cluster.path}` takes it down")
            running = dataclasses.replace(Running.new(cluster.path), servers=cluster.names, ray=ray_address)
            if not ray_address:  # the servers are here: check them before anything starts
                found = examination.here(cluster, placement)
                examination.check_ubatch(found, settings or {}, flags)
            try:
                if not ray_address:
                    say("starting Ray")
                    running = local_ray.start(running)
                ray = connection.enter_context(connected(running))
                state.remember(running)
                nodes = {}
                if ray_address:
                    nodes = examination.nodes_of(ray, cluster)
                    found = examination.there(ray, cluster, nodes, placement)
                    examination.check_ubatch(found, settings or {}, flags)
                if setting is not None and any(one.has_share for one in found.values()):
                    say("experts stay where the plan has them: a server with a share of them cannot load others")
                    setting = None
                for job in _jobs(cluster, found, running, placement, settings or {}, flags):
                    start_server(ray, job, nodes.get(job.name, ""))
                servers = _wait(ray, cluster.names, say)
                if setting is not None:
                    start_scheduler(ray, setting)
            except BaseException:  # also Ctrl-C
                connection.close()
                left = state.find(cluster.path)  # its processes may be more than this function knows
                if left is not None:
                    say("ending the started servers")
                    _take_down(left)
                raise
        yield ray, servers


def status(config: Path) -> tuple[Running, list[Status], Report | None]:
    """Returns the cluster, the state of each server, and the scheduler's report (None if it does not answer).

    Raises:
        PyorchError: The cluster is not up, or its Ray is gone.
    """
    running = _running(config)
    with connected(running) as ray:
        return running, statuses(ray, running.servers), report(ray)


def report(ray: ModuleType) -> Report | None:
    """Returns the scheduler's report; None if there is no scheduler, or it does not answer in time."""
    answers, _ = ask_all(ray, [SCHEDULER], "report", seconds=STATUS_SECONDS)
    found = answers.get(SCHEDULER)
    return found if isinstance(found, Report) else None  # otherwise it died, and Ray restarts it


def rebalance(config: Path) -> Verdict:
    """Makes the scheduler decide now.

    Raises:
        PyorchError: The cluster is not up, or has no scheduler.
    """
    running = _running(config)
    with connected(running) as ray:
        answers, late = ask_all(ray, [SCHEDULER], "rebalance", seconds=REBALANCE_SECONDS)
    if not answers and not late:
        raise PyorchError("the cluster has no scheduler: it has one when it runs with a plan (`pyorch cluster up "
                          "--plan`), all of them have the whole model, and cluster.toml does not say enabled = false "
                          "under [scheduler]")
    if not isinstance(verdict := answers.get(SCHEDULER), Verdict):
        raise PyorchError("the scheduler does not answer: try again when Ray has started it again")
    return verdict


def down(config: Path) -> bool:
    """Ends a cluster, in order if it answers, and removes all its remains, also after a crash.

    Returns:
        Whether there was a cluster.
    """
    with state.locked(config):
        running = state.find(config)
        if running is None:
            return False
        _take_down(running)
        return True


def measure(config: Path, say: Callable[[str], None]) -> CostsFile:
    """Measures latency and bandwidth from each server to each other one, and their disks, one after another.

    Raises:
        PyorchError: A server does not answer.
    """
    running = _running(config)
    with connected(running) as ray:

        def asked(name: str, method: str, *arguments: Any) -> Any:
            answers, _ = ask_all(ray, [name], method, lambda name: arguments, MEASURE_SECONDS)
            answer = answers.get(name)
            if isinstance(answer, PyorchError):
                raise PyorchError(f"server {name}: {answer}")
            if name not in answers or isinstance(answer, Exception):
                raise PyorchError(f"server {name} does not answer: `pyorch cluster status` shows how it does")
            return answer

        links, servers = {}, {}
        try:
            where = {name: asked(name, "open_link") for name in running.servers}
            for one in running.servers:
                for other in running.servers:
                    if one != other:
                        say(f"the link from {one} to {other}")
                        link = asked(one, "measure_link", *where[other])
                        links[one, other] = (link.bytes_per_second, link.latency)
        finally:
            for name in running.servers:
                with contextlib.suppress(PyorchError):
                    asked(name, "close_link")
        for name in running.servers:
            say(f"the disk of {name}")
            servers[name] = ServerCosts(disk_bytes_per_second=asked(name, "measure_disk"))
    return CostsFile(servers=servers, links=links)


def watch(
    config: Path, ray: ModuleType, servers: Sequence[Status], say: Callable[[str], None],
    ended: Callable[[float], bool],
) -> None:
    """Reports changes of servers' states, until `ended` (which waits for so many seconds) returns true.

    Raises:
        PyorchError: Ray has ended. After a while it would end this process, too.
    """
    known = {server.name: server.state for server in servers}
    running, n_silent = _running(config), 0
    while not ended(0.5):
        n_silent = 0 if local_ray.is_alive(running) else n_silent + 1
        if n_silent == 2:
            raise PyorchError("the cluster has ended: its Ray died, or another command took it down")
        if n_silent:
            continue
        for now in statuses(ray, list(known)):
            if now.state != known[now.name]:
                say(f"server {now.name}: {now.state}" + (f", {now.reason}" if now.reason else ""))
            known[now.name] = now.state


def statuses(ray: ModuleType, names: Sequence[str], seconds: float = STATUS_SECONDS) -> list[Status]:
    """Returns the states of servers in this order; a server that does not answer in time is ABSENT."""
    answers, late = ask_all(ray, names, "status", seconds=seconds)
    found = []
    for name in names:
        answer = answers.get(name)
        if isinstance(answer, Status):
            found.append(answer)
        elif isinstance(answer, ray.exceptions.ActorDiedError):
            found.append(Status(name, REFUSED, reason="it died, and Ray gave it up"))
        elif answer is not None:
            found.append(Status(name, ABSENT, reason="it died, and Ray starts it again"))
        else:
            found.append(Status(name, ABSENT, reason="it hangs, or died and Ray starts it again" if name in late else
                                "Ray knows it no longer"))
    return found


def _jobs(
    cluster: Cluster, found: Mapping[str, Examined], running: Running, placement: Placement | None,
    settings: Mapping[str, Any], flags: Sequence[str],
) -> list[Job]:
    peers = {server.name: (server.address, found[server.name].peer_port) for server in cluster.servers}
    return [
        Job(
            server.name, examination.model_of(cluster, server), server.address, found[server.name].port,
            found[server.name].peer_port, str(found[server.name].budget_bytes),
            found[server.name].fingerprint, running.token,
            {name: where for name, where in peers.items() if name != server.name}, dict(settings), tuple(flags),
            placement, server.tls, cluster.reads, cluster.rows, examination.keys_of(cluster), cluster.endpoints.tls,
        )
        for server in cluster.servers
    ]


def _wait(ray: ModuleType, names: Sequence[str], say: Callable[[str], None]) -> list[Status]:
    """Waits until all servers serve.

    Raises:
        PyorchError: A server will not.
    """
    told = set()
    while True:
        now = statuses(ray, names)
        for server in now:
            if server.state == REFUSED or server.restarted:
                raise PyorchError(f"server {server.name} did not start: {server.reason or 'it died while it began'}")
            if server.state == SERVING and server.name not in told:
                told.add(server.name)
                say(f"server {server.name} serves at {server.url}")
        if len(told) == len(names):
            return now
        time.sleep(0.2)


def _running(config: Path) -> Running:
    running = state.find(config)
    if running is None:
        if not config.exists():
            raise PyorchError(f"{config}: no such file, and no cluster of it is up")
        raise PyorchError(f"the cluster of {config} is not up: `pyorch cluster up --config {config}` starts it")
    return running


def _take_down(running: Running) -> None:
    if not running.has_own_ray:
        # Its servers are in the user's Ray cluster. If that is gone, so are they.
        if local_ray.answers(running):
            with connected(running) as ray:
                stop_servers(ray, running)
    else:
        local_ray.end(running)
    state.forget(running)
