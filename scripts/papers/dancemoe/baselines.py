"""The placements with which DanceMoE compares its own (section IV-A). None of them asks on which server users are.

Each returns int16[n_servers, n_layers, n_expert] as Placement.device. Devices of one server never hold the same expert:
what one of them has, is local to the server.
"""

from __future__ import annotations

import heapq

import numpy as np

from pyorch.cluster.placement.dance import Counts, cover, covering, dance, fill, placed
from pyorch.cluster.placement.placement import ABSENT, Placement
from pyorch.cluster.placement.problem import Problem
from pyorch.errors import PyorchError


def place(problem: Problem, algorithm: str = "dance", partial: bool = False, seed: int = 0) -> Placement:
    """A placement by one of ALGORITHMS, as pyorch.cluster.placement.dance.place() makes and refuses one. seed: of
    algorithms that draw. PyorchError for an algorithm that is not known."""
    if algorithm not in ALGORITHMS:
        raise PyorchError(f'algorithm "{algorithm}" is not known: use {", ".join(ALGORITHMS)}')
    return placed(problem, ALGORITHMS[algorithm](problem, np.random.default_rng(seed)), algorithm, partial)


def uniform(problem: Problem, rng: np.random.Generator) -> np.ndarray:
    """Each expert once, on a random device; devices have alike many of each layer.

    Source: DanceMoE, section IV-A, "Uniform"; expert parallelism as in Megatron-LM (Shoeybi et al., 2019).
    """
    return _scattered(even(problem), rng)


def redundance(problem: Problem, rng: np.random.Generator) -> np.ndarray:
    """Like uniform(); then memory that is left gets random experts which the server does not have.

    Source: DanceMoE, section IV-A, "Redundance".
    """
    counts = even(problem)
    device = _scattered(counts, rng)
    for of_cluster, server in enumerate(problem.device_server):
        layers, experts = np.nonzero(problem.exists & (device[server] == ABSENT))
        order = rng.permutation(len(layers))
        layers, experts = layers[order], experts[order]
        free = counts.free[of_cluster]
        while len(layers):  # those that fit, up to the first that does not, of which there may be smaller ones behind
            sizes = problem.sizes[layers]
            n = int(np.searchsorted(np.cumsum(sizes), free, side="right"))
            _put(device, problem, of_cluster, layers[:n], experts[:n])
            free -= sizes[:n].sum()
            fits = sizes[n:] <= free
            layers, experts = layers[n:][fits], experts[n:][fits]
    return device


def smartmoe(problem: Problem, _: np.random.Generator) -> np.ndarray:
    """Each expert once; devices have alike many of each layer, and as far as that allows, alike much to do.

    The experts of a layer, the busiest first, each go to the device with the least to do of those with a place left.

    Source: the placement of SmartMoE (Zhai et al., USENIX ATC 2023, section 5) as DanceMoE uses it: experts for
    devices by load, each device with the same number of them.
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
    """Busy experts several times, so that devices have alike much to do.

    A device has as many places in each layer as its memory allows. A layer's places beyond one for each expert go to
    the expert whose replicas have most to do, one after the other. Then the replicas, those with most to do first, go
    to the device with the least to do of those with a place left.

    Source: Expert Parallelism Load Balancer (DeepSeek, 2025), its policy "global load balancing", after DeepSeek-V3
    (Liu et al., 2024, section 3.4). As in DanceMoE (section IV-A) devices may differ in memory. A server gets no second
    replica of an expert; where only such places are left, they get the busiest experts that the server does not have.
    """
    counts = _proportional(problem)
    device = _nowhere(problem)
    for layer in range(problem.shape[1]):
        _balance_layer(problem, counts, layer, device)
    return device


def _proportional(problem: Problem) -> Counts:
    """All memory, as many experts of each layer as a device's share of it: the places that eplb() fills."""
    counts = Counts(problem)
    shares = problem.device_bytes / problem.experts_bytes
    of_server = np.minimum(np.bincount(problem.device_server, shares), 1.0)  # more than all experts no server needs
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
    """How many replicas each expert gets, int64[n_experts]: one; then one more for the one whose have most to do.

    Where there are fewer places than experts, the busiest get one. most: replicas of an expert.
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
    """Random experts of each layer, each at most once, as many as each device has places."""
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
    device[server, layer, expert] = of_cluster - np.searchsorted(problem.device_server, server)  # of its server's


def _least(loads: np.ndarray, allowed: np.ndarray) -> int | None:
    """The allowed device with the least to do; None where there is none."""
    return int(np.argmin(np.where(allowed, loads, np.inf))) if allowed.any() else None


def even(problem: Problem) -> Counts:
    """Each expert once; devices have alike many of a layer, those with little memory as many as they can."""
    counts = Counts(problem)
    apportion(counts, _water_level(problem), problem.n_experts)
    return covering(counts)


def _water_level(problem: Problem) -> np.ndarray:
    """min(level, room) of each device and layer, which adds up to the layer's experts: float64[n_devices, n_layers].

    room: of a layer, where a device holds the same share of each.
    """
    shares = problem.device_bytes / problem.experts_bytes
    ascending = np.sort(shares)
    n = len(shares)
    # With the k smallest full, the others get (1 - their sum) / (n - k) each.
    full = np.concatenate([[0.0], np.cumsum(ascending)[:-1]])
    levels = (1.0 - full) / (n - np.arange(n))
    level = next((level for level, share in zip(levels, ascending) if level <= share), ascending[-1])
    return np.minimum(level, shares)[:, None] * problem.n_experts


def apportion(counts: Counts, targets: np.ndarray, totals: np.ndarray) -> None:
    """Gives each layer a total, divided between devices in proportion to targets.

    What a device gets too little of in one layer, by rounding, it gets in the next ones. Where a device has no memory
    left, others take its part, as long as one has any.

    Args:
        targets: float64[n_devices, n_layers]. totals: int64[n_layers].
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
