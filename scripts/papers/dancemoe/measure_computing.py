"""Measures the costs of computing on running servers: coefficients for simulations, fitted to undisturbed requests.

A probe is one request to one server. llama-server reports the time of its steps; counters of all servers report their
work for it. The time that peers compute is known separately. There, messages of different lengths separate the costs of
a message, an expert and a row. From the request's time, these costs and the waits for answers and reads are subtracted.
The rest is the dense part: the cost of a layer, and of a token in it. The fit weighs relative errors, so short and long
requests count equally.

A step's time outside the layers cannot be told from its layers, because all steps have the same number of layers.
It is a part of `layer`.

Servers on one machine also get probes at the same time. The processors are then busy for longer than the same work
takes alone, because the servers share memory, caches and the system. The machine's cores, for simulations, are the
seconds of work done per second in which all processors are busy.
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

# Of each probe: tokens of the prompt, and tokens decoded after the first. The longest probe fits any context.
_PROBES = ((2, 16), (8, 0), (24, 0), (64, 0), (160, 0), (320, 0))
_ROUNDS = 3  # of all probes; the first one does not count: it allocates buffers and loads pages
_SECONDS = 60.0  # per server; after this time no round begins

# Probes of all servers of a machine at the same time, and the seconds for them. Short probes end at about the same
# time.
_TOGETHER, _TOGETHER_SECONDS = ((2, 16), (64, 0)), 4.0


_LOWEST, _HIGHEST = 100, 1000  # range of token ids for prompts: whole pieces of words in any vocabulary
_PATIENCE = 120.0  # seconds for one request


@dataclass(frozen=True)
class Processors:
    """The processors of a machine.

    Attributes:
        n: Number of processors.
        n_threads: Threads that compute in a server's job.
        busy: Seconds that the processors were busy, added up, since any fixed time.
    """

    n: int
    n_threads: int
    busy: float


@dataclass(frozen=True)
class Work:
    """Work of a server.

    Attributes:
        seconds: Time of computing.
        steps: Steps; 0 for work for others.
        tokens: Tokens of all steps.
        messages: Answered messages; 0 for requests of the server's own users.
        experts: Uses of an expert, each by any number of rows at once.
        rows: Rows of the experts.
    """

    seconds: float
    steps: int
    tokens: int
    messages: int
    experts: int
    rows: int


class Works:
    """The servers' work for probes, one probe after another.

    Attributes:
        own: Of each server, its work for its own users.
        for_others: Of each server, its work for peers.

    Args:
        names: Names of the servers.
        n_layers: Layers with experts.
        probe: Sends a server a request with this number of prompt tokens and of tokens decoded after the first;
            returns the seconds of its steps.
        counters: Returns the present counters of all servers.
    """

    def __init__(
        self, names: Sequence[str], n_layers: int, probe: Callable[[str, int, int], float],
        counters: Callable[[], Mapping[str, Counters]],
    ) -> None:
        self._probe, self._counters, self._n_layers = probe, counters, n_layers
        self.own: dict[str, list[Work]] = {name: [] for name in names}
        self.for_others: dict[str, list[Work]] = {name: [] for name in names}

    def measure(self, name: str) -> None:
        """Sends the probes of one server. No other request may run meanwhile."""
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
        """Returns the number of jobs that the machine of these servers computes at once at full speed: at least 1.

        Args:
            names: Servers of the machine.
            processors: Reads the machine's processors. No other program should compute on them meanwhile.
            costs: Fitted costs of the servers.
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
        """Sends a server probes until the deadline. Returns the steps and tokens of each."""
        requests = []
        for n_tokens, n_output in itertools.cycle(_TOGETHER):
            self._probe(name, n_tokens, n_output)
            requests.append((1 + n_output, n_tokens + n_output))
            if time.monotonic() > deadline:
                return requests

    def fit(self, name: str, known: ServerCosts) -> ServerCosts:
        """Returns costs of a server: `known`, with the coefficients that its work determines."""
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
    """Returns the seconds that a server's whole work takes by its costs, for its own users and for peers.

    Args:
        costs: Costs of the server.
        n_layers: Layers with experts.
        gained: Increase of the server's counters.
        requests: Steps and tokens of each request of its own users.
    """
    steps, tokens = (sum(column) for column in zip(*requests)) if requests else (0, 0)
    return (n_layers * (costs.layer * steps + costs.token * tokens) + costs.message * gained["served_messages"]
            + costs.expert * (gained["hits"] + gained["misses"])
            + costs.row * (_own_rows(gained) + gained["served"]))


def at_once(processors: Processors, busy: float, seconds: float) -> float:
    """Returns the number of jobs computed at once, if `seconds` of work kept the processors busy for `busy` seconds."""
    most = max(1.0, processors.n / processors.n_threads)
    return most if busy <= 0 else min(max(1.0, processors.n * seconds / busy), most)


def fit(own: Sequence[Work], for_others: Sequence[Work], n_layers: int, known: ServerCosts) -> ServerCosts:
    """Returns costs of a server: `known`, with the coefficients that its work determines.

    Args:
        own: Work for requests of its users, without waits.
        for_others: Work for requests to other servers. If there is none, rows count with tokens.
        n_layers: Layers with experts.
        known: Costs that are kept if the work does not determine them.
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
    """Returns the coefficients of the columns, all >= 0, with the least squared relative errors of their sums.

    An error is relative to the work's seconds. The columns are few, so all subsets of nonzero coefficients are tried.
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
    parser.description += " Send the servers no other requests meanwhile, and run no other programs on this machine."
    parser.add_argument("--config", type=Path, required=True, metavar="FILE.toml", help="a cluster that runs here")
    parser.add_argument("--costs", type=Path, required=True, metavar="FILE.json",
                        help="links and disks, by pyorch cluster measure")
    parser.add_argument("--threads", type=whole(1, 512), default=physical_cores(), metavar="N",
                        help="computing threads of each server (default: the physical cores)")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE.json",
                        help="the same costs, with the costs of computing")
    return program.run(parser, _run, argv)


def _run(args: argparse.Namespace) -> int:
    costs, cluster = read_costs(args.costs), read_cluster(args.config)
    with ModelMap(cluster.required_model) as model_map:
        n_layers = len(model_map.decoded_layers)
    running = state.find(args.config)
    if running is None:
        raise PyorchError(f"no cluster of {args.config} runs here")
    with connected(running) as ray:
        urls = {status.name: status.url for status in operations.statuses(ray, running.servers)}

        def counters() -> dict[str, Counters]:
            found = {status.name: status.counters for status in operations.statuses(ray, running.servers)}
            if absent := [name for name, counted in found.items() if counted is None]:
                raise PyorchError(f"server {absent[0]} does not answer: `pyorch cluster status` shows its state")
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
    """Returns the seconds of a request's steps.

    The request has `n_tokens` prompt tokens and `n_output` tokens decoded after the first.
    """
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
            raise PyorchError(f"{url} answers with status {answer.status} while computing is measured")
        timings = json.loads(text)["timings"]
        return 1e-3 * (timings["prompt_ms"] + timings["predicted_ms"])
    except (OSError, http.client.HTTPException) as error:
        raise PyorchError(f"{url} does not answer: {error}") from None
    finally:
        connection.close()


def _processors(n_threads: int) -> Processors:
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    # psutil already counts the times of guests in user and nice.
    counted = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return Processors(psutil.cpu_count() or 1, n_threads, counted - idle)


if __name__ == "__main__":
    sys.exit(main())
