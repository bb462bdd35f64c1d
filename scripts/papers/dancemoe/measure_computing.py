"""What computing takes on servers that are up: coefficients for simulations, fitted to requests that nobody disturbs.

A probe is one request to one server. llama-server says how long its steps took, counters of all servers what they did
for it. Of what peers computed the time is known by itself, so a message, an expert and a row are told apart there, by
messages of different lengths. Taken from a request's time with what it waited for answers and reads, that leaves the
dense part: a layer, and a token in it. Errors count as shares of the time, for short and long requests alike.

A step outside the layers cannot be told from its layers, all steps having as many: it is a part of `layer`.

Servers on one machine get probes at the same time, too: then its processors are busy for longer than the same work
takes alone, because memory, caches and the system are shared. So many seconds of work as are done while all of them are
busy for a second are the cores that the machine is worth.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import ssl
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import psutil

from pyorch.cli.numbers import whole
from pyorch.cluster import operations, state
from pyorch.cluster.config import Cluster, read_cluster
from pyorch.cluster.costs import ServerCosts, read_costs, write_costs
from pyorch.cluster.local_ray import connected
from pyorch.cluster.members import Counters
from pyorch.errors import PyorchError
from pyorch.llama.cores import physical_cores
from pyorch.runtime.model_map import ModelMap
from pyorch.serve.llama_server import keys_in
from scripts.papers import program

# Tokens of the prompt, and those decoded behind the first, of each request that is sent. The longest fits any context.
_PROBES = ((2, 16), (8, 0), (24, 0), (64, 0), (160, 0), (320, 0))
_ROUNDS = 3  # of all of them; the first, in which buffers are made and pages come, does not count
_SECONDS = 60.0  # after which no further round begins, for one server

# Probes of all servers of a machine at once, and seconds in which they get them. Short ones: they end at about the same
# time.
_TOGETHER, _TOGETHER_SECONDS = ((2, 16), (64, 0)), 4.0


_LOWEST, _HIGHEST = 100, 1000  # tokens that prompts are made of: whole pieces of words in any vocabulary
_PATIENCE = 120.0  # seconds for one request


@dataclass(frozen=True)
class Processors:
    """Of a machine. n: processors; busy: seconds that all of them together were, since any time. n_threads: that
    compute in a job of a server."""

    n: int
    n_threads: int
    busy: float


@dataclass(frozen=True)
class Work:
    """Of a server, in so many seconds of computing. steps: 0 of what it did for others; tokens: of all steps. messages:
    that it answered; 0 of requests of its own users. experts: uses of an expert, by any number of rows at once."""

    seconds: float
    steps: int
    tokens: int
    messages: int
    experts: int
    rows: int


class Works:
    """What servers did for probes, one after another.

    probe: sends a request to a server, of so many tokens of a prompt and so many decoded behind the first; returns
    seconds that its steps took. counters: of all servers, now. n_layers: with experts.
    """

    def __init__(
        self, names: Sequence[str], n_layers: int, probe: Callable[[str, int, int], float],
        counters: Callable[[], Mapping[str, Counters]],
    ) -> None:
        self._probe, self._counters, self._n_layers = probe, counters, n_layers
        self.own: dict[str, list[Work]] = {name: [] for name in names}
        self.for_others: dict[str, list[Work]] = {name: [] for name in names}

    def measure(self, name: str) -> None:
        """Sends the probes of one server, while nobody else asks."""
        begin = time.monotonic()
        for number in range(_ROUNDS):
            if number > 1 and time.monotonic() > begin + _SECONDS:
                return
            for n_tokens, n_output in _PROBES:
                before = self._counters()
                seconds = self._probe(name, n_tokens, n_output)
                after = self._counters()
                if number:
                    self._add(name, seconds, 1 + n_output, n_tokens + n_output, before, after)

    def measure_together(
        self, names: Sequence[str], processors: Callable[[], Processors], costs: Mapping[str, ServerCosts]
    ) -> float:
        """How many jobs the machine of these servers computes at once, none slower than alone: 1 at least.

        processors: of that machine, on which nobody else should compute meanwhile. costs: as fitted.
        """
        before, then = self._counters(), processors()
        deadline = time.monotonic() + _TOGETHER_SECONDS
        with ThreadPoolExecutor(len(names)) as pool:
            asked = list(pool.map(lambda name: self._ask_until(name, deadline), names))
        now, after = processors(), self._counters()
        seconds = sum(work_seconds(costs[name], self._n_layers, _gained(before[name], after[name]), requests)
                      for name, requests in zip(names, asked))
        return at_once(now, now.busy - then.busy, seconds)

    def _ask_until(self, name: str, deadline: float) -> list[tuple[int, int]]:
        """Steps and tokens of the probes that a server got."""
        requests = []
        for n_tokens, n_output in itertools.cycle(_TOGETHER):
            self._probe(name, n_tokens, n_output)
            requests.append((1 + n_output, n_tokens + n_output))
            if time.monotonic() > deadline:
                return requests

    def fit(self, name: str, known: ServerCosts) -> ServerCosts:
        """Costs of a server: `known`, with those coefficients that its work tells."""
        return fit(self.own[name], self.for_others[name], self._n_layers, known)

    def _add(
        self, name: str, seconds: float, steps: int, tokens: int, before: Mapping[str, Counters],
        after: Mapping[str, Counters],
    ) -> None:
        for other in self.own:
            gained = _gained(before[other], after[other])
            experts = gained["hits"] + gained["misses"]
            if other == name:
                computing = seconds - 1e-9 * (gained["waited_ns"] + gained["stalled_ns"])
                work = Work(computing, steps, tokens, 0, experts, _own_rows(gained))
            else:
                work = Work(1e-9 * gained["served_ns"], 0, 0, gained["served_messages"], experts, gained["served"])
            if work.seconds > 0:
                (self.own if other == name else self.for_others)[other].append(work)


_COUNTED = ("hits", "misses", "activations", "sent", "fallback", "waited_ns", "stalled_ns", "served_ns",
            "served_messages", "served")


def _gained(before: Counters, after: Counters) -> dict[str, int]:
    return {name: getattr(after, name) - getattr(before, name) for name in _COUNTED}


def _own_rows(gained: Mapping[str, int]) -> int:
    return gained["activations"] - gained["sent"] + gained["fallback"]


def work_seconds(
    costs: ServerCosts, n_layers: int, gained: Mapping[str, int], requests: Sequence[tuple[int, int]]
) -> float:
    """What took a server so long by its costs: all that it computed, for its own users and for others. requests: steps
    and tokens of each of its own."""
    steps, tokens = (sum(column) for column in zip(*requests)) if requests else (0, 0)
    return (n_layers * (costs.layer * steps + costs.token * tokens) + costs.message * gained["served_messages"]
            + costs.expert * (gained["hits"] + gained["misses"])
            + costs.row * (_own_rows(gained) + gained["served"]))


def at_once(processors: Processors, busy: float, seconds: float) -> float:
    """Jobs that they compute at once when they were busy for so long with so many seconds of work."""
    most = max(1.0, processors.n / processors.n_threads)
    return most if busy <= 0 else min(max(1.0, processors.n * seconds / busy), most)


def fit(own: Sequence[Work], for_others: Sequence[Work], n_layers: int, known: ServerCosts) -> ServerCosts:
    """Costs of a server: `known`, with those coefficients that can be told from its work.

    own: of requests of its users, without waiting. for_others: what it computed meanwhile for requests to other
    servers; none where it never did: then rows are counted with tokens.
    """
    expert = row = 0.0
    if for_others:
        message, expert, row = _fitted(for_others, [[work.messages, work.experts, work.rows] for work in for_others])
        dense = [[work.steps * n_layers, work.tokens * n_layers] for work in own]
        rest = [max(0.0, work.seconds - expert * work.experts - row * work.rows) for work in own]
        layer, token = _fitted(own, dense, rest)
    else:
        message = known.message
        layer, token, expert = _fitted(own, [[work.steps * n_layers, work.tokens * n_layers, work.experts]
                                             for work in own])
    return ServerCosts(0.0, layer, token, expert, row, message, known.disk_latency, known.disk_bytes_per_second)


def _fitted(
    works: Sequence[Work], columns: Sequence[Sequence[float]], seconds: Sequence[float] | None = None
) -> tuple[float, ...]:
    """Coefficients of the columns, none below 0, whose sums differ least from the seconds, as shares of the work's.

    They are few: of all choices of those that are not 0 the best is taken.
    """
    weights = 1 / np.array([work.seconds for work in works])
    matrix = np.array(columns, np.float64) * weights[:, None]
    wanted = (np.array([work.seconds for work in works] if seconds is None else seconds)) * weights
    n = matrix.shape[1]
    best, least = np.zeros(n), float((wanted**2).sum())
    for size in range(1, n + 1):
        for chosen in map(list, itertools.combinations(range(n), size)):
            found = np.linalg.lstsq(matrix[:, chosen], wanted, rcond=None)[0]
            error = float(((matrix[:, chosen] @ found - wanted) ** 2).sum())
            if (found >= 0).all() and error < least:
                best, least = np.zeros(n), error
                best[chosen] = found
    return tuple(best.tolist())


def main(argv: list[str] | None = None) -> int:
    parser = program.parser_of(
        "scripts.papers.dancemoe.measure_computing", "measure what computing takes on the servers of this machine",
        "--config cluster.toml --costs costs.json -o costs.json")
    parser.description += " Nobody else should ask the servers meanwhile, nor compute here."
    parser.add_argument("--config", type=Path, required=True, metavar="FILE.toml", help="of a cluster that is up here")
    parser.add_argument("--costs", type=Path, required=True, metavar="FILE.json",
                        help="links and disks, by pyorch cluster measure")
    parser.add_argument("--threads", type=whole(1, 512), default=physical_cores(), metavar="N",
                        help="that compute, of each server (default: the physical cores)")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE.json",
                        help="the costs with those of computing")
    return program.run(parser, _run, argv)


def _run(args: argparse.Namespace) -> int:
    costs, cluster = read_costs(args.costs), read_cluster(args.config)
    with ModelMap(cluster.required_model) as model_map:
        n_layers = len(model_map.decoded_layers)
    running = state.find(args.config)
    if running is None:
        raise PyorchError(f"no cluster of {args.config} is up here")
    with connected(running) as ray:
        urls = {status.name: status.url for status in operations.statuses(ray, running.servers)}

        def counters() -> dict[str, Counters]:
            found = {status.name: status.counters for status in operations.statuses(ray, running.servers)}
            if absent := [name for name, counted in found.items() if counted is None]:
                raise PyorchError(f"server {absent[0]} does not answer: `pyorch cluster status` shows how it does")
            return found

        works = Works(running.servers, n_layers, lambda name, *tokens: ask(urls[name], *tokens, cluster), counters)
        servers = {}
        for name in running.servers:
            print(f"computing of {name}", file=sys.stderr, flush=True)
            works.measure(name)
        for name in running.servers:
            servers[name] = works.fit(name, costs.servers.get(name, costs.server))
        simulated = dict(costs.simulated)
        if len(running.servers) > 1:
            cores = works.measure_together(running.servers, lambda: _processors(args.threads), servers)
            simulated["machines"] = [{"servers": running.servers, "cores": cores}]
    write_costs(args.output, replace(costs, servers=servers, simulated=simulated))
    return 0


def ask(url: str, n_tokens: int, n_output: int, cluster: Cluster) -> float:
    """Seconds that the steps of a request take, a prompt of so many tokens and so many decoded behind the first."""
    where, headers = urlsplit(url), {"Content-Type": "application/json"}
    tokens = np.random.default_rng(n_tokens).integers(_LOWEST, _HIGHEST, n_tokens).tolist()
    if where.scheme == "https":
        tls = ssl.create_default_context(cafile=cluster.servers[0].tls.authority)
        connection = http.client.HTTPSConnection(where.hostname, where.port, timeout=_PATIENCE, context=tls)
    else:
        connection = http.client.HTTPConnection(where.hostname, where.port, timeout=_PATIENCE)
    if cluster.endpoints.keys is not None:
        headers["Authorization"] = f"Bearer {keys_in(str(cluster.endpoints.keys))[0]}"
    try:
        connection.request("POST", f"{where.path.rstrip('/')}/completion", json.dumps({
            "prompt": tokens, "n_predict": n_output + 1, "ignore_eos": True, "cache_prompt": False,
        }), headers)
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise PyorchError(f"{url} answers with status {answer.status} when computing is measured")
        timings = json.loads(text)["timings"]
        return 1e-3 * (timings["prompt_ms"] + timings["predicted_ms"])
    except (OSError, http.client.HTTPException) as error:
        raise PyorchError(f"{url} does not answer: {error}") from None
    finally:
        connection.close()


def _processors(n_threads: int) -> Processors:
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    # Of times of guests psutil says that they are in user and nice already.
    counted = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return Processors(psutil.cpu_count() or 1, n_threads, counted - idle)


if __name__ == "__main__":
    sys.exit(main())
