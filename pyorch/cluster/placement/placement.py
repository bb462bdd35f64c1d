"""A placement, which gives experts to devices of servers, and its file.

The JSON file has the fields of all JSON files of pyorch (kind, version, model, fingerprint) and

    "algorithm": "dance", "layers": [0, 1, ...], "n_experts": [64, 64, ...],
    "servers": [{"name": "clinic", "experts": [[[3, 17, ...]], ...]}, ...]

layers: block numbers. n_experts: experts of each layer. experts: the experts on each device of the server, for each
layer.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from pyorch.errors import FormatError, PyorchError
from pyorch.runtime.model_map import ModelMap
from pyorch.sidecars import json_file
from pyorch.sizes import counted

KIND, VERSION = "pyorch placement", 1

ABSENT = -1

# The limit of a placement's size. 256 servers of a model with 128 layers of 512 experts need a sixteenth of it.
MAX_PLACES = 1 << 28


class Move(NamedTuple):
    """An expert that a server loads, on one of its devices, or evicts (ABSENT).

    Attributes:
        server: An index into the placement's servers.
        layer: An index into its layers.
        expert: The expert.
        device: The device, or ABSENT.
    """

    server: int
    layer: int
    expert: int
    device: int


@dataclass(frozen=True, eq=False)
class Placement:
    """The places of experts (P of DanceMoE's section III-B; at most one z for a server and an expert).

    Attributes:
        servers: The names of the servers.
        layers: The block numbers (il).
        n_experts: The number of experts of each layer.
        device: int16[n_servers, n_layers, n_expert]: the server's device that holds an expert, or ABSENT.
        algorithm: The name of the algorithm that made it.
    """

    servers: tuple[str, ...]
    layers: tuple[int, ...]
    n_experts: tuple[int, ...]
    device: np.ndarray
    algorithm: str = ""

    @cached_property
    def held(self) -> np.ndarray:
        """Whether a server holds an expert: bool[n_servers, n_layers, n_expert]."""
        return self.device != ABSENT

    def changed(self, moves: Iterable[Move]) -> Placement:
        """Returns the placement after these moves."""
        device = self.device.copy()
        for move in moves:
            device[move.server, move.layer, move.expert] = move.device
        return replace(self, device=device)

    def moves_to(self, other: Placement) -> list[Move]:
        """Returns the moves from this placement to another one with the same servers and layers."""
        return [Move(*place, int(other.device[place])) for place in
                zip(*(axis.tolist() for axis in np.nonzero(self.device != other.device)))]

    @property
    def copies(self) -> np.ndarray:
        """The number of servers that hold an expert: int64[n_layers, n_expert]."""
        return self.held.sum(axis=0)

    @property
    def n_uncovered(self) -> int:
        """The number of experts without a server."""
        return int(sum(n - np.count_nonzero(row[:n]) for n, row in zip(self.n_experts, self.copies)))

    def check_servers(self, names: Collection[str]) -> None:
        """Checks that the placement is for exactly these servers.

        Raises:
            PyorchError: It is for others.
        """
        if set(self.servers) != set(names):
            raise PyorchError(f"the plan is for the servers {', '.join(self.servers)}, the cluster has "
                              f"{', '.join(names)}")

    def cost(self, frequencies: np.ndarray) -> float:
        """Returns the number of remote activations, DanceMoE's eq. 2. frequencies: [n_servers, n_layers, n_expert]."""
        return float(frequencies[~self.held].sum())

    def local_ratio(self, frequencies: np.ndarray) -> np.ndarray:
        """Returns the share of activations on the own server, float64[n_servers, n_layers]; nan without activations."""
        return _ratio((frequencies * self.held).sum(axis=2), frequencies.sum(axis=2))

    def server_ratio(self, frequencies: np.ndarray) -> np.ndarray:
        """Returns the same share over all layers: float64[n_servers]."""
        return _ratio((frequencies * self.held).sum(axis=(1, 2)), frequencies.sum(axis=(1, 2)))

    def total_ratio(self, frequencies: np.ndarray) -> float:
        """Returns the same share over all servers."""
        return float(_ratio((frequencies * self.held).sum(), frequencies.sum()))

    def to_fields(self) -> dict[str, Any]:
        """Returns the fields for JSON: for each server and layer, the experts of each device."""
        servers = []
        for name, rows in zip(self.servers, self.device):
            n_devices = max(1, int(rows.max()) + 1)
            servers.append({"name": name, "experts": [
                [np.flatnonzero(row == device).tolist() for device in range(n_devices)] for row in rows
            ]})
        return {"algorithm": self.algorithm, "layers": list(self.layers), "n_experts": list(self.n_experts),
                "servers": servers}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Placement:
        """Reads the result of to_fields().

        Raises:
            ValueError: The fields are wrong.
        """
        try:
            layers, n_experts = (tuple(fields[name]) for name in ("layers", "n_experts"))
            servers, algorithm = fields["servers"], fields["algorithm"]
            names = tuple(server["name"] for server in servers)
            if not (
                all(type(n) is int and 0 <= n < 1 << 16 for n in (*layers, *n_experts)) and layers
                and len(n_experts) == len(layers) and list(layers) == sorted(set(layers)) and min(n_experts) > 0
                and names and all(isinstance(name, str) for name in (*names, algorithm))
                and len(set(names)) == len(names)
            ):
                raise ValueError("layers and servers cannot be")
            if len(servers) * len(layers) * max(n_experts) > MAX_PLACES:
                raise ValueError("it is larger than any cluster")
            device = np.full((len(servers), len(layers), max(n_experts)), ABSENT, np.int16)
            for rows, server in zip(device, servers):
                if len(server["experts"]) != len(layers):
                    raise ValueError("a server has other layers")
                for row, n_expert, devices in zip(rows, n_experts, server["experts"]):
                    _place(row, n_expert, devices)
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(str(error)) from None
        return cls(names, layers, n_experts, device, algorithm)


def refuse_lacking(share: Mapping[int, np.ndarray] | None, placement: Placement | None, name: str) -> None:
    """Checks that a plan gives a server only experts in its share of the model.

    Args:
        share: By layer (il), bool[n_expert]; None: it has all experts.
        placement: The plan.
        name: The server.

    Raises:
        PyorchError: An expert is missing from the share.
    """
    if share is None or placement is None:
        return
    held = placement.held[placement.servers.index(name)]
    n = sum(int(np.count_nonzero(row[: len(share[il])] & ~share[il])) for il, row in zip(placement.layers, held))
    if n:
        raise PyorchError(f"the plan gives it {counted(n, 'expert')} that its share of them lacks: make it again with "
                          "`pyorch cluster prepare`")
    nobody = sum(int(np.count_nonzero((row[: len(share[il])] == 0) & ~share[il]))
                 for il, row in zip(placement.layers, placement.copies))
    if nobody:
        raise PyorchError(f"the plan gives {counted(nobody, 'expert')} to no server, and its share of them lacks these")


def _place(row: np.ndarray, n_expert: int, devices: list[list[int]]) -> None:
    for number, experts in enumerate(devices):
        for expert in experts:
            if type(expert) is not int or not 0 <= expert < n_expert or row[expert] != ABSENT:
                raise ValueError(f"expert {expert} cannot be there")
            row[expert] = number


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.divide(part, whole, out=np.full(np.shape(whole), np.nan), where=whole > 0)


def write_placement(path: str | os.PathLike[str], placement: Placement, model_map: ModelMap) -> None:
    """Writes the file atomically.

    Raises:
        PyorchError: It cannot be written.
    """
    json_file.write(path, KIND, VERSION, model_map, placement.to_fields())


def read_placement(path: str | os.PathLike[str], model_map: ModelMap) -> Placement:
    """Reads the file.

    Raises:
        FormatError: It is missing, damaged, no placement, or of another version or model.
    """
    value = json_file.read(path, KIND, VERSION, model_map, command="place")
    layers = model_map.decoded_layers
    expected = [layer.il for layer in layers], [layer.n_expert for layer in layers]
    try:
        if (value.get("layers"), value.get("n_experts")) != expected:  # check before memory is allocated
            raise ValueError("other layers")
        placement = Placement.from_fields(value)
    except ValueError:
        raise FormatError(f"{path} is damaged: place again") from None
    return placement
