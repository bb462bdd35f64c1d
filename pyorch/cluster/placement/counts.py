"""How many experts of each layer each device holds: what memory decides, before it is decided which ones they are.

Experts of a layer have one size, so counts keep the memory of every device, whichever experts are chosen later; and a
layer whose counts add up to the number of its experts can be covered.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pyorch.cluster.placement.problem import Problem


class Counts:
    """Counts that never exceed a device's memory, nor on a server the experts that a layer has.

    of_device: int64[n_devices, n_layers]; of_server: int64[n_servers, n_layers] (N_{n,l} of DanceMoE's Algorithm 1);
    of_layer: int64[n_layers], their sums. free: bytes left on each device, int64[n_devices].
    """

    def __init__(self, problem: Problem) -> None:
        n_servers, n_layers, _ = problem.shape
        self.problem = problem
        self.of_device = np.zeros((len(problem.device_bytes), n_layers), np.int64)
        self.of_server = np.zeros((n_servers, n_layers), np.int64)
        self.of_layer = np.zeros(n_layers, np.int64)
        self.free = problem.device_bytes.copy()

    def add(self, device: int, layer: int, n: int = 1) -> None:
        """Takes memory for n more experts, or gives back that of -n."""
        self.of_device[device, layer] += n
        self.of_server[self.problem.device_server[device], layer] += n
        self.of_layer[layer] += n
        self.free[device] -= n * self.problem.sizes[layer]

    def devices_with_room(self, layer: int) -> np.ndarray:
        """For one more expert: bool[n_devices]."""
        problem = self.problem
        return (self.free >= problem.sizes[layer]) & (
            self.of_server[problem.device_server, layer] < problem.n_experts[layer])

    @property
    def missing(self) -> np.ndarray:
        """How many more each layer needs to be covered: int64[n_layers]."""
        return np.maximum(self.problem.n_experts - self.of_layer, 0)

    @property
    def n_missing(self) -> int:
        return int(self.missing.sum())


def cover(counts: Counts) -> None:
    """Step 2 of DanceMoE's Algorithm 1: raises a layer's counts to the number of its experts, as far as memory does.

    Memory that is left is taken first. Then layers with more than they need give: the one with the most first, and of
    the servers those with the most memory first. Of layers of different sizes, one gives as many as take the place of
    one.
    """
    problem = counts.problem
    by_memory = np.argsort(-problem.server_bytes[problem.device_server], kind="stable").tolist()
    for layer in np.argsort(-problem.sizes, kind="stable").tolist():  # large ones are the hardest to fit
        while counts.missing[layer]:
            room = counts.devices_with_room(layer)
            if room.any():
                counts.add(int(np.argmax(np.where(room, counts.free, -1))), layer)
            elif not _borrow(counts, layer, by_memory):
                break


def _borrow(counts: Counts, layer: int, devices: Sequence[int]) -> bool:
    """Gives a layer memory of another one, on as many devices as it takes. False where there is none."""
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
    """Uses what memory is left, on each device for the layer that gains most by a byte.

    gains: float64[n_servers, n_layers, n_expert], of one expert more where a server has 0, 1, ... of a layer.
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
    """Each expert once, the largest first, on the device with the most memory left. Where that leaves some without a
    place, nearly always nothing else would have done: to fill devices to the last byte is bin packing."""
    counts = Counts(problem)
    for layer in np.argsort(-problem.sizes, kind="stable").tolist():
        for _ in range(problem.n_experts[layer]):
            device = int(np.argmax(counts.free))
            if counts.free[device] < problem.sizes[layer]:
                break
            counts.add(device, layer)
    return counts


def covering(counts: Counts) -> Counts:
    """The counts, or those of first_fit() where these cover more experts."""
    if not counts.n_missing:
        return counts
    other = first_fit(counts.problem)
    return other if other.n_missing < counts.n_missing else counts
