"""The input of a simulation: a cluster, perhaps enlarged, the requests of its users, and a way to place experts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pyorch.cluster.config import Cluster
from pyorch.cluster.costs import Costs, CostsFile
from pyorch.cluster.placement.placement import Placement
from pyorch.cluster.placement.problem import Problem
from scripts.papers.dancemoe.baselines import place
from scripts.papers.dancemoe.simulated_costs import Sizes, machines_of
from scripts.papers.dancemoe.simulator import Outcome, Settings, Traffic, simulate
from scripts.papers.dancemoe.workload import Arrivals, Fitted, Recorded, Replay, Source, arrival_times

ROUTINGS = ("replay", "fitted")


@dataclass(frozen=True)
class Workload:
    """The requests of users.

    Attributes:
        recorded: Requests of each server of the cluster.
        later: Requests from `shift` on. None: no shift.
        shift: Time of the change, in seconds.
        layers: Block numbers.
        n_experts: Number of experts of each layer.
        routing: One of ROUTINGS.
    """

    recorded: tuple[Recorded, ...]
    layers: tuple[int, ...]
    n_experts: tuple[int, ...]
    later: tuple[Recorded, ...] | None = None
    shift: float = math.inf
    routing: str = "replay"


@dataclass(frozen=True)
class Case:
    """The differences between simulations.

    Attributes:
        placement: The first placement. None: the algorithm makes it from the recorded requests.
        n_servers: Number of servers. None: the cluster's. A larger number repeats the cluster's servers in turn.
        bytes_per_second: Bandwidth of every link. None: the cluster's.
    """

    algorithm: str = "dance"
    migration: bool = True
    n_servers: int | None = None
    bytes_per_second: float | None = None
    arrivals: Arrivals = Arrivals(0.1, "poisson:0.1")
    placement: Placement | None = None


def run(
    cluster: Cluster, costs: CostsFile, sizes: Sizes, workload: Workload, case: Case, duration: float,
    settings: Settings = Settings(), seed: int = 0,
) -> Outcome:
    """Runs one simulation. Requests depend on the seed, the arrivals and the servers alone, so cases are comparable.

    Raises:
        PyorchError: No placement is possible, or no server has a needed expert.
    """
    original = np.arange(case.n_servers or len(cluster.servers)) % len(cluster.servers)
    names = tuple(server_name(cluster, n) for n in range(len(original)))
    known = _costs(cluster, costs, sizes, workload, case, original)
    n_bytes = np.rint(known.expert_bytes).astype(np.int64)
    n_experts = np.array(workload.n_experts)
    capacities = tuple(cluster.servers[i].device_bytes(int(n_experts @ n_bytes)) for i in original)

    def placed(uses: np.ndarray) -> np.ndarray:
        problem = Problem(names, workload.layers, uses, n_bytes, capacities, n_experts)
        return place(problem, case.algorithm, partial=True, seed=seed).held

    if case.placement is None:
        resident = placed(np.stack([workload.recorded[i].uses / len(workload.recorded[i]) for i in original]))
    else:
        resident = case.placement.held
    rngs = [np.random.default_rng((seed, n)) for n in range(len(original))]
    traffic = [
        Traffic(
            arrival_times(rng, case.arrivals.rate, duration), _source(workload.recorded[i], workload.routing, rng),
            None if workload.later is None else _source(workload.later[i], workload.routing, rng), workload.shift,
        )
        for i, rng in zip(original, rngs)
    ]
    settings = replace(settings, machines=machines_of(costs, [cluster.names[i] for i in original]))
    return simulate(known, resident, traffic, duration, settings, placed if case.migration else None, seed)


def server_name(cluster: Cluster, n: int) -> str:
    """Returns the name of the n-th simulated server: the cluster's names, then clinic.2, clinic.3, ..."""
    again, i = divmod(n, len(cluster.servers))
    return f"{cluster.names[i]}.{again + 1}" if again else cluster.names[i]


def _costs(
    cluster: Cluster, costs: CostsFile, sizes: Sizes, workload: Workload, case: Case, original: Sequence[int]
) -> Costs:
    pairs = np.ix_(original, original)
    same = np.equal.outer(original, original)
    latency = np.where(same, cluster.network.latency, cluster.latencies[pairs])
    rate = np.where(same, cluster.network.bytes_per_second, cluster.bandwidths[pairs])
    np.fill_diagonal(latency, 0)
    np.fill_diagonal(rate, np.inf)
    n_layers = len(workload.layers)
    names = [cluster.names[i] for i in original]
    known = sizes.applied(costs.of(names, latency, rate, np.ones(n_layers), 0.0), n_layers)
    if case.bytes_per_second is not None:
        rate = known.bytes_per_second
        rate[~np.eye(len(rate), dtype=bool)] = case.bytes_per_second
    return known


def _source(recorded: Recorded, routing: str, rng: np.random.Generator) -> Source:
    return Replay(recorded, rng) if routing == "replay" else Fitted(recorded)
