"""The placements that DanceMoE compares with its own (section IV-A). No baseline uses the location of users.

Each returns int16[n_servers, n_layers, n_expert] in the form of Placement.device. Two devices of a server never hold
the same expert, because an expert on either device is local to the server.
"""

from __future__ import annotations

import heapq

import numpy as np

from pyorch.cluster.placement.dance import Counts, cover, covering, dance, fill, placed
from pyorch.cluster.placement.placement import ABSENT, Placement
from pyorch.cluster.placement.problem import Problem
from pyorch.errors import PyorchError


def place(problem: Problem, algorithm: str = "dance", partial: bool = False, seed: int = 0) -> Placement:
    """Returns a placement by one of ALGORITHMS.

    Args:
        problem: The problem.
        algorithm: Name of the algorithm.
        partial: As in pyorch.cluster.placement.dance.place().
        seed: Seed of algorithms that draw.

    Raises:
        PyorchError: The algorithm is not known, or pyorch.cluster.placement.dance.place() would refuse the result.
    """
    if algorithm not in ALGORITHMS:
        raise PyorchError(f'algorithm "{algorithm}" is not known: use {", ".join(ALGORITHMS)}')
    return placed(problem, ALGORITHMS[algorithm](problem, np.random.default_rng(seed)), algorithm, partial)


def uniform(problem: Problem, rng: np.random.Generator) -> np.ndarray:
    """Places each expert once, on a random device. Devices have equal numbers of each layer's experts.

    Source: DanceMoE, section IV-A, "Uniform"; expert parallelism as in Megatron-LM (Shoeybi et al., 2019).
    """
    return _scattered(even(problem), rng)


def redundance(problem: Problem, rng: np.random.Generator) -> np.ndarray:
    """Places as uniform() does, then fills the free memory with random experts that the server does not hold.

    Source: DanceMoE, section IV-A, "Redundance".
    """
    counts = even(problem)
    device = _scattered(counts, rng)
    for of_cluster, server in enumerate(problem.device_server):
        layers, experts = np.nonzero(problem.exists & (device[server] == ABSENT))
        order = rng.permutation(len(layers))
        layers, experts = layers[order], experts[order]
        free = counts.free[of_cluster]
        while len(layers):  # takes experts up to the first that does not fit; smaller ones may follow it
            sizes = problem.sizes[layers]
            n = int(np.searchsorted(np.cumsum(sizes), free, side="right"))
            _put(device, problem, of_cluster, layers[:n], experts[:n])
            free -= sizes[:n].sum()
            fits = sizes[n:] <= free
            layers, experts = layers[n:][fits], experts[n:][fits]
    return device


def smartmoe(problem: Problem, _: np.random.Generator) -> np.ndarray:
    """Places each expert once. Devices have equal numbers of each layer's experts, and loads as equal as that allows.

    The experts of a layer are placed from the busiest to the idlest, each on the device with the least load among the
    devices with a free place.

    Source: the placement of SmartMoE (Zhai et al., USENIX ATC 2023, section 5) as DanceMoE uses it: experts for
    devices by load, each device with the same number of experts.
    """
    counts = even(problem)
    device = _nowhere(problem)
    for layer in range(problem.shape[1]):
        left, loads = counts.of_device[:, layer].copy(), np.zeros(len(counts.free))
        n_experts = problem.n_experts[layer]
        for expert in np.argsort(-problem.loads[layer, :n_experts], kind="stable"):
            chosen = _least(loads, left > 0)
            if chosen is None:
                break
            _put(device, problem, chosen, layer, expert)
            left[chosen] -= 1
            loads[chosen] += problem.loads[layer, expert]
    return device


def eplb(problem: Problem, _: np.random.Generator) -> np.ndarray:
    """Places busy experts several times, so that devices have equal loads.

    A device has as many places in each layer as its memory allows. Each expert of a layer gets one place. Each further
    place of the layer goes to the expert with the highest load per replica. Then the replicas are placed, from the
    highest load to the lowest, each on the device with the least load among the devices with a free place.

    Source: Expert Parallelism Load Balancer (DeepSeek, 2025), its policy "global load balancing", after DeepSeek-V3
    (Liu et al., 2024, section 3.4). As in DanceMoE (section IV-A) devices may differ in memory. A server gets no second
    replica of an expert. If only places on such servers are left, they get the busiest experts that the server lacks.
    """
    counts = _proportional(problem)
    device = _nowhere(problem)
    for layer in range(problem.shape[1]):
        _balance_layer(problem, counts, layer, device)
    return device


def _proportional(problem: Problem) -> Counts:
    """Returns the places that eplb() fills: all memory, with each layer's experts in proportion to a device's share."""
    counts = Counts(problem)
    shares = problem.device_bytes / problem.experts_bytes
    of_server = np.minimum(np.bincount(problem.device_server, shares), 1.0)  # no server needs more than all experts
    targets = (shares * (of_server / np.maximum(np.bincount(problem.device_server, shares), 1e-300))[
        problem.device_server])[:, None] * problem.n_experts
    apportion(counts, targets, np.floor(targets.sum(axis=0) + 1e-9).astype(np.int64))
    cover(counts)
    counts = covering(counts)
    fill(counts, np.broadcast_to(1.0 / (1 + np.arange(problem.shape[2])), problem.shape))
    return counts


def _balance_layer(problem: Problem, counts: Counts, layer: int, device: np.ndarray) -> None:
    loads_of = problem.loads[layer, : problem.n_experts[layer]]
    replicas = _replicas(loads_of, counts.of_layer[layer], np.count_nonzero(counts.of_server[:, layer]))
    each = loads_of / np.maximum(replicas, 1)
    left, loads = counts.of_device[:, layer].copy(), np.zeros(len(counts.free))

    def put(expert: int) -> None:
        free_of_it = device[problem.device_server, layer, expert] == ABSENT
        chosen = _least(loads, (left > 0) & free_of_it)
        if chosen is not None:
            _put(device, problem, chosen, layer, expert)
            left[chosen] -= 1
            loads[chosen] += each[expert]

    queue = np.repeat(np.arange(len(each)), replicas)
    for expert in queue[np.argsort(-each[queue], kind="stable")]:
        put(expert)
    by_load = np.argsort(-each, kind="stable")
    for chosen in np.flatnonzero(left):
        server = problem.device_server[chosen]
        absent = by_load[device[server, layer, by_load] == ABSENT]
        for expert in absent[: left[chosen]]:
            _put(device, problem, chosen, layer, expert)


def _replicas(loads: np.ndarray, n_places: int, most: int) -> np.ndarray:
    """Returns the number of replicas of each expert, int64[n_experts].

    Each expert gets one replica. Each further replica goes to the expert with the highest load per replica. If there
    are fewer places than experts, the busiest get one. `most` is the maximum for an expert.
    """
    replicas = np.zeros(len(loads), np.int64)
    replicas[np.argsort(-loads, kind="stable")[:n_places]] = 1
    heap = [(-load, expert) for expert, load in enumerate(loads.tolist())]
    heapq.heapify(heap)
    for _ in range(n_places - len(loads)):
        while heap and replicas[heap[0][1]] >= most:
            heapq.heappop(heap)
        if not heap:
            break
        expert = heap[0][1]
        replicas[expert] += 1
        heapq.heapreplace(heap, (-loads[expert] / replicas[expert], expert))
    return replicas


def _scattered(counts: Counts, rng: np.random.Generator) -> np.ndarray:
    """Places random experts of each layer, each at most once, in the number of each device's places."""
    problem = counts.problem
    device = _nowhere(problem)
    for layer, n_experts in enumerate(problem.n_experts):
        devices = np.repeat(np.arange(len(counts.free)), counts.of_device[:, layer])
        experts = rng.permutation(n_experts)[: len(devices)]
        _put(device, problem, devices, layer, experts)
    return device


def _nowhere(problem: Problem) -> np.ndarray:
    return np.full(problem.shape, ABSENT, np.int16)


def _put(
    device: np.ndarray, problem: Problem, of_cluster: int | np.ndarray, layer: int | np.ndarray,
    expert: int | np.ndarray,
) -> None:
    server = problem.device_server[of_cluster]
    device[server, layer, expert] = of_cluster - np.searchsorted(problem.device_server, server)  # number in its server


def _least(loads: np.ndarray, allowed: np.ndarray) -> int | None:
    """Returns the allowed device with the least load; None if no device is allowed."""
    return int(np.argmin(np.where(allowed, loads, np.inf))) if allowed.any() else None


def even(problem: Problem) -> Counts:
    """Places each expert once. Devices have equal numbers of a layer's experts, small devices as many as they can."""
    counts = Counts(problem)
    apportion(counts, _water_level(problem), problem.n_experts)
    return covering(counts)


def _water_level(problem: Problem) -> np.ndarray:
    """Returns min(level, room) of each device and layer, float64[n_devices, n_layers].

    The sum over devices is the layer's number of experts. `room` is a device's room for a layer, if it holds the same
    share of each layer.
    """
    shares = problem.device_bytes / problem.experts_bytes
    ascending = np.sort(shares)
    n = len(shares)
    # If the k smallest devices are full, each other device gets (1 - their sum) / (n - k).
    full = np.concatenate([[0.0], np.cumsum(ascending)[:-1]])
    levels = (1.0 - full) / (n - np.arange(n))
    level = next((level for level, share in zip(levels, ascending) if level <= share), ascending[-1])
    return np.minimum(level, shares)[:, None] * problem.n_experts


def apportion(counts: Counts, targets: np.ndarray, totals: np.ndarray) -> None:
    """Gives each layer a total, divided between devices in proportion to targets.

    If rounding gives a device too few experts in one layer, it gets them in the next layers. If a device has no memory
    left, its part goes to other devices with memory.

    Args:
        counts: The counts to fill.
        targets: float64[n_devices, n_layers].
        totals: int64[n_layers].
    """
    sums = targets.sum(axis=0)
    shares = np.divide(targets, sums, out=np.zeros_like(targets), where=sums > 0)
    credit = np.zeros(len(targets))
    for layer in np.argsort(-counts.problem.sizes, kind="stable").tolist():
        credit += shares[:, layer] * totals[layer]
        for _ in range(totals[layer]):
            room = counts.devices_with_room(layer)
            if not room.any():
                break
            device = int(np.argmax(np.where(room, credit, -np.inf)))
            counts.add(device, layer)
            credit[device] -= 1


ALGORITHMS = {
    "dance": lambda problem, _: dance(problem), "uniform": uniform, "redundance": redundance, "smartmoe": smartmoe,
    "eplb": eplb,
}
