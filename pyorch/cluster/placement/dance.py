"""DanceMoE's placement: Algorithms 1 and 2 of its section III-C."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pyorch.cluster.placement.placement import Placement
from pyorch.cluster.placement.problem import Problem
from pyorch.cluster.placement.swaps import exchange
from pyorch.errors import BudgetError
from pyorch.sizes import format_bytes


class Counts:
    """The number of experts of each layer on each device: a division of memory, before the experts are selected.

    The experts of a layer have one size, so the counts of a device fit into its memory with any selection. A layer can
    be covered if its counts add up to the number of its experts. Counts never exceed a device's memory, and on a server
    never the number of a layer's experts.

    Attributes:
        of_device: int64[n_devices, n_layers].
        of_server: int64[n_servers, n_layers] (N_{n,l} of DanceMoE's Algorithm 1).
        of_layer: The sums, int64[n_layers].
        free: Bytes left on each device, int64[n_devices].
    """

    def __init__(self, problem: Problem) -> None:
        n_servers, n_layers, _ = problem.shape
        self.problem = problem
        self.of_device = np.zeros((len(problem.device_bytes), n_layers), np.int64)
        self.of_server = np.zeros((n_servers, n_layers), np.int64)
        self.of_layer = np.zeros(n_layers, np.int64)
        self.free = problem.device_bytes.copy()

    def add(self, device: int, layer: int, n: int = 1) -> None:
        """Reserves memory for n more experts; releases it if n is negative."""
        self.of_device[device, layer] += n
        self.of_server[self.problem.device_server[device], layer] += n
        self.of_layer[layer] += n
        self.free[device] -= n * self.problem.sizes[layer]

    def devices_with_room(self, layer: int) -> np.ndarray:
        """Returns the devices with memory for one more expert: bool[n_devices]."""
        problem = self.problem
        return (self.free >= problem.sizes[layer]) & (
            self.of_server[problem.device_server, layer] < problem.n_experts[layer])

    @property
    def missing(self) -> np.ndarray:
        """Returns how many experts each layer needs to be covered: int64[n_layers]."""
        return np.maximum(self.problem.n_experts - self.of_layer, 0)

    @property
    def n_missing(self) -> int:
        return int(self.missing.sum())


def cover(counts: Counts) -> None:
    """Step 2 of DanceMoE's Algorithm 1: raises a layer's counts to the number of its experts, as far as memory allows.

    Free memory is used first. Then layers with more than they need release some: the layer with the largest surplus
    first, and on it the servers with the most memory first. If sizes differ, a layer releases as many experts as make
    room for one.
    """
    problem = counts.problem
    by_memory = np.argsort(-problem.server_bytes[problem.device_server], kind="stable").tolist()
    for layer in np.argsort(-problem.sizes, kind="stable").tolist():  # large experts are the hardest to fit
        while counts.missing[layer]:
            room = counts.devices_with_room(layer)
            if room.any():
                counts.add(int(np.argmax(np.where(room, counts.free, -1))), layer)
            elif not _borrow(counts, layer, by_memory):
                break


def _borrow(counts: Counts, layer: int, devices: Sequence[int]) -> bool:
    """Takes memory from another layer, on one device or several. Returns False if no layer has enough."""
    problem = counts.problem
    for donor in np.argsort(-counts.of_layer, kind="stable").tolist():
        borrowed = False
        for device in devices:
            spare = counts.of_layer[donor] - problem.n_experts[donor]
            if spare <= 0 or not counts.missing[layer]:
                break
            n = max(0, -(-(problem.sizes[layer] - counts.free[device]) // problem.sizes[donor]))
            if n <= min(spare, counts.of_device[device, donor]) and (
                counts.of_server[problem.device_server[device], layer] < problem.n_experts[layer]
            ):
                counts.add(device, donor, -n)
                counts.add(device, layer)
                borrowed = True
        if borrowed:
            return True
    return False


def fill(counts: Counts, gains: np.ndarray) -> None:
    """Uses the remaining memory of each device for the layer with the largest gain for a byte.

    Args:
        counts: The counts to raise.
        gains: float64[n_servers, n_layers, n_expert]: the gain of one more expert if a server has 0, 1, ... of a layer.
    """
    problem = counts.problem
    padded = np.concatenate([gains, np.zeros((*gains.shape[:2], 1))], axis=2)
    layers = np.arange(len(problem.sizes))
    for device, server in enumerate(problem.device_server):
        while True:
            room = (problem.sizes <= counts.free[device]) & (counts.of_server[server] < problem.n_experts)
            if not room.any():
                break
            gain = np.where(room, padded[server, layers, counts.of_server[server]] / problem.sizes, -1.0)
            counts.add(device, int(np.argmax(gain)))


def first_fit(problem: Problem) -> Counts:
    """Places each expert once, the largest first, on the device with the most free memory.

    If some do not fit, hardly any other order would help: filling devices to the last byte is bin packing.
    """
    counts = Counts(problem)
    for layer in np.argsort(-problem.sizes, kind="stable").tolist():
        for _ in range(problem.n_experts[layer]):
            device = int(np.argmax(counts.free))
            if counts.free[device] < problem.sizes[layer]:
                break
            counts.add(device, layer)
    return counts


def covering(counts: Counts) -> Counts:
    """Returns the counts, or the counts from first_fit() if these cover more experts."""
    if not counts.n_missing:
        return counts
    other = first_fit(counts.problem)
    return other if other.n_missing < counts.n_missing else counts


def place(problem: Problem, partial: bool = False) -> Placement:
    """Makes a placement within the memory of every device, such that some server holds each expert.

    Args:
        problem: Experts, servers and frequencies.
        partial: If memory is too small, place as many experts as fit, and read the others from disk. Then no expert of
            a layer is on two servers while another expert of this layer is on none.

    Raises:
        BudgetError: Some expert has no place, and `partial` is False.
    """
    return placed(problem, dance(problem), "dance", partial)


def placed(problem: Problem, device: np.ndarray, algorithm: str, partial: bool) -> Placement:
    """Returns the placement with these devices and the algorithm's name.

    Raises:
        BudgetError: Some expert has no place, and `partial` is False.
    """
    n_experts = tuple(problem.n_experts.tolist())
    placement = Placement(problem.servers, problem.layers, n_experts, device, algorithm)
    if (n := placement.n_uncovered) and not partial:
        raise BudgetError(
            f"{n} of {sum(n_experts)} experts have no place: the servers have memory for "
            f"{format_bytes(int(problem.device_bytes.sum()))} of experts, and all of them need "
            f"{format_bytes(problem.experts_bytes)}, each device in whole experts"
        )
    return placement


def dance(problem: Problem) -> np.ndarray:
    """Allocates more experts to layers with more diverse activations, then selects the ones that users activate most.

    exchange() follows, which the paper lacks: without it no bound holds. If the users of all servers always activate
    the same expert of a layer, its entropy is zero, and only one server may get this expert.

    Returns:
        int16[n_servers, n_layers, n_expert] as Placement.device.
    """
    counts = allocate(problem)
    device = on_devices(counts, assign(problem, counts.of_server))
    exchange(problem, device)
    return device


def entropies(problem: Problem) -> np.ndarray:
    """Returns the entropy of each layer's activations by a server's users, in bits.

    Without activations all experts count as equally often activated.

    Returns:
        v_{n,l}, float64[n_servers, n_layers].
    """
    sums = problem.frequencies.sum(axis=2, keepdims=True)
    even = problem.exists / problem.n_experts[:, None]
    p = np.where(sums > 0, problem.frequencies / np.where(sums > 0, sums, 1), even)
    return -(p * np.log2(p, out=np.zeros_like(p), where=p > 0)).sum(axis=2) + 0.0


def allocate(problem: Problem) -> Counts:
    """Algorithm 1: the number of experts of each layer on a server.

    Its first step divides a server's memory between the layers in proportion to their entropies, and rounds down. The
    paper does not mention three additions:

    - No layer gets more than its number of experts; the other layers get the rest.
    - Experts of different layers may have different sizes.
    - Memory that is left by rounding goes to the most frequent absent experts. So a layer with zero entropy also gets
      an expert.
    """
    counts = Counts(problem)
    # A product such as 0.1 * 30 may be slightly below the whole number.
    for server, row in enumerate(np.floor(_shares_of_memory(problem) + 1e-9).astype(np.int64).tolist()):
        for layer, n in enumerate(row):
            _add_on_server(counts, server, layer, n)
    cover(counts)
    counts = covering(counts)
    fill(counts, -np.sort(-problem.frequencies, axis=2))
    return counts


def _add_on_server(counts: Counts, server: int, layer: int, n: int) -> None:
    """Adds experts on a server's devices by their shares of memory; the rest one by one, on the freest device."""
    problem = counts.problem
    devices = np.flatnonzero(problem.device_server == server)
    portions = problem.device_bytes[devices] / max(1, problem.server_bytes[server])
    for device, part in zip(devices.tolist(), np.floor(n * portions + 1e-9).astype(np.int64).tolist()):
        counts.add(device, layer, min(part, int(counts.free[device] // problem.sizes[layer])))
        n -= part
    for _ in range(n):
        device = int(devices[np.argmax(counts.free[devices])])
        if counts.free[device] >= problem.sizes[layer]:
            counts.add(device, layer)


def _shares_of_memory(problem: Problem) -> np.ndarray:
    """Returns M_n / m_e * v_{n,l} / sum of v_{n,l}, at most a layer's experts: float64[n_servers, n_layers]."""
    weights = entropies(problem)
    weights = np.where(weights.sum(axis=1, keepdims=True) > 0, weights, 1.0)
    wanted = np.zeros_like(weights)
    left = problem.server_bytes.astype(np.float64)
    for _ in problem.layers:  # in each round, full layers leave memory to the others
        open_weights = np.where(wanted < problem.n_experts, weights, 0.0)
        sums = open_weights.sum(axis=1, keepdims=True)
        more = left[:, None] * np.divide(open_weights, sums, out=np.zeros_like(sums + weights), where=sums > 0)
        wanted = np.minimum(wanted + more / problem.sizes, problem.n_experts)
        left = np.maximum(problem.server_bytes - wanted @ problem.sizes, 0.0)
        if not (left > 0).any():
            break
    return wanted


def assign(problem: Problem, n_held: np.ndarray) -> np.ndarray:
    """Algorithm 2: the experts of each server, bool[n_servers, n_layers, n_expert].

    Each server gets the experts that its users activate most. Then experts without a server replace duplicates. Servers
    with the fewest duplicates come first, each with the missing expert that its users activate most.

    Args:
        problem: Experts, servers and frequencies.
        n_held: int64[n_servers, n_layers] (N_{n,l}).
    """
    n_servers, n_layers, n_expert = problem.shape
    # Among equally activated experts, such as unused ones, servers prefer different ones: so fewer have no server.
    turned = (np.arange(n_expert) - np.arange(n_servers)[:, None, None] * n_expert // n_servers) % n_expert
    keys = np.where(problem.exists, -problem.frequencies, np.inf)
    order = np.lexsort((np.broadcast_to(turned, keys.shape), keys), axis=2)
    held = np.zeros(keys.shape, bool)
    np.put_along_axis(held, order, np.arange(n_expert) < n_held[:, :, None], axis=2)
    for layer in range(n_layers):
        _cover_layer(held[:, layer], problem.frequencies[:, layer], problem.exists[layer])
    return held


def _cover_layer(held: np.ndarray, frequencies: np.ndarray, exists: np.ndarray) -> None:
    """Replaces duplicates by experts without a server. Arrays: bool and float64[n_servers, n_expert]."""
    copies = held.sum(axis=0)
    absent = exists & (copies == 0)
    while absent.any():
        n_duplicates = (held & (copies > 1)).sum(axis=1)
        if not n_duplicates.any():
            return
        for server in np.argsort(n_duplicates, kind="stable"):
            duplicates = held[server] & (copies > 1)
            if not duplicates.any():
                continue
            expert = int(np.argmax(np.where(absent, frequencies[server], -1)))
            replaced = int(np.argmin(np.where(duplicates, frequencies[server], np.inf)))
            held[server, [expert, replaced]] = True, False
            copies[[expert, replaced]] += 1, -1
            absent[expert] = False
            if not absent.any():
                return


def on_devices(counts: Counts, held: np.ndarray) -> np.ndarray:
    """Divides a server's experts between its devices: the busiest first, each to the device with the least work.

    Args:
        counts: The number of experts of each layer on each device.
        held: bool[n_servers, n_layers, n_expert], with as many experts of a layer as in `counts`.

    Returns:
        Placement.device.
    """
    problem = counts.problem
    device = np.where(held, 0, -1).astype(np.int16)
    several = np.bincount(problem.device_server, minlength=len(problem.servers)) > 1
    for server in np.flatnonzero(several):
        devices = np.flatnonzero(problem.device_server == server)
        for layer, row in enumerate(held[server]):
            left, loads = counts.of_device[devices, layer].copy(), np.zeros(len(devices))
            experts = np.flatnonzero(row)
            for expert in experts[np.argsort(-problem.loads[layer, experts], kind="stable")]:
                chosen = int(np.argmin(np.where(left > 0, loads, np.inf)))
                device[server, layer, expert] = chosen
                left[chosen] -= 1
                loads[chosen] += problem.loads[layer, expert]
    return device
