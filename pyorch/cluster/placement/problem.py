"""The input for a placement: the users' activations of experts, and the memory of devices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pyorch.cluster.config import Cluster
from pyorch.errors import PyorchError
from pyorch.runtime.model_map import ModelMap


@dataclass(frozen=True, eq=False)
class Problem:
    """A model's experts and a cluster's servers (DanceMoE, section III-B).

    Attributes:
        servers: The names of the servers.
        layers: The block numbers (il).
        frequencies: float64[n_servers, n_layers, n_expert]: how often users of a server activate an expert (f_n^l(e)),
            all on one scale: a server with twice the counts has twice the weight.
        sizes: int64[n_layers]: the bytes of one expert of each layer in memory (m_e).
        capacities: For each server, the bytes for experts of each of its devices (mem_{n,g}).
        n_experts: int64[n_layers]: the experts of each layer; higher numbers, up to n_expert, do not exist. Default:
            n_expert.
    """

    servers: tuple[str, ...]
    layers: tuple[int, ...]
    frequencies: np.ndarray
    sizes: np.ndarray
    capacities: tuple[tuple[int, ...], ...]
    n_experts: np.ndarray | None = None

    def __post_init__(self) -> None:
        frequencies = np.asarray(self.frequencies, np.float64)
        _, n_layers, n_expert = frequencies.shape
        n_experts = np.full(n_layers, n_expert) if self.n_experts is None else np.asarray(self.n_experts, np.int64)
        object.__setattr__(self, "frequencies", np.where(np.arange(n_expert) < n_experts[:, None], frequencies, 0.0))
        object.__setattr__(self, "sizes", np.asarray(self.sizes, np.int64))
        object.__setattr__(self, "n_experts", n_experts)

    @classmethod
    def of_model(cls, cluster: Cluster, model_map: ModelMap, frequencies: np.ndarray) -> Problem:
        """Makes the problem of a cluster's servers and the layers that a decode uses.

        If a device's memory is a share, it is a share of all experts in these layers.

        Raises:
            PyorchError: The model has no such layer.
        """
        layers = model_map.decoded_layers
        if not layers:
            raise PyorchError(f"{model_map.path} has no routed experts: there is nothing to place")
        sizes = np.array([layer.slot_bytes for layer in layers], np.int64)
        n_experts = np.array([layer.n_expert for layer in layers], np.int64)
        capacities = tuple(server.device_bytes(int(sizes @ n_experts)) for server in cluster.servers)
        return cls(cluster.names, tuple(layer.il for layer in layers), frequencies, sizes, capacities, n_experts)

    @property
    def shape(self) -> tuple[int, int, int]:
        """n_servers, n_layers, n_expert."""
        return self.frequencies.shape

    @cached_property
    def exists(self) -> np.ndarray:
        """Whether an expert exists: bool[n_layers, n_expert]."""
        return np.arange(self.shape[2]) < self.n_experts[:, None]

    @cached_property
    def device_server(self) -> np.ndarray:
        """The server of each device, in the order of servers: int64[n_devices]."""
        return np.repeat(np.arange(len(self.servers)), [len(devices) for devices in self.capacities])

    @cached_property
    def device_bytes(self) -> np.ndarray:
        """The memory of each device: int64[n_devices]."""
        return np.concatenate([np.asarray(devices, np.int64) for devices in self.capacities])

    @cached_property
    def server_bytes(self) -> np.ndarray:
        """The memory of each server (M_n): int64[n_servers]."""
        return np.array([sum(devices) for devices in self.capacities], np.int64)

    @property
    def experts_bytes(self) -> int:
        """The bytes of all experts, each once."""
        return int(self.sizes @ self.n_experts)

    @cached_property
    def loads(self) -> np.ndarray:
        """How often users of all servers activate an expert: float64[n_layers, n_expert]."""
        return self.frequencies.sum(axis=0)
