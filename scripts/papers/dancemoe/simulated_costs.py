"""What simulations know of a file of costs beside the product: sizes, and servers that share the cores of a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from pyorch.cluster.costs import MOST, Costs, CostsFile
from pyorch.errors import FormatError, PyorchError

MOST_OF_EXPERT = 1e10  # bytes


@dataclass(frozen=True)
class Sizes:
    """In bytes. expert: of one expert, or of one of each layer; request: of a token's input, which a peer gets once for
    all its experts; reply: of a row; message: of a message beside these. None: as the model has it; or_of() fills that
    in."""

    expert: float | tuple[float, ...] | None = None
    request: float | None = None
    reply: float | None = None
    message: float = Costs.message_bytes

    @classmethod
    def of(cls, file: CostsFile) -> Sizes:
        """FormatError for what is no size."""
        sizes = {}
        for field in fields(cls):
            size = file.simulated.get(f"{field.name}_bytes")
            several = field.name == "expert" and isinstance(size, list) and size
            for one in size if several else [size]:
                if size is not None and (type(one) not in (int, float) or not 0 <= one <= MOST):
                    raise FormatError(f"{field.name}_bytes is {repr(one)[:60]}, not a number from 0 to {MOST:g}")
            if size is not None:
                sizes[field.name] = tuple(map(float, size)) if several else float(size)
        return cls(**sizes)

    def or_of(self, expert: float | tuple[float, ...], row: float) -> Sizes:
        """What is None, of a model. row: of one."""
        return replace(self, **{name: value for name, value in (("expert", expert), ("request", row), ("reply", row))
                                if getattr(self, name) is None})

    def applied(self, costs: Costs, n_layers: int) -> Costs:
        """Costs with these sizes, of which none is None. PyorchError where they are of another number of layers, or no
        expert has such."""
        expert = np.atleast_1d(np.asarray(self.expert, np.float64))
        if len(expert) not in (1, n_layers):
            raise PyorchError(f"expert_bytes are of {len(expert)} layers: there are {n_layers}")
        if not (expert.min() >= 1 and expert.max() <= MOST_OF_EXPERT):
            raise PyorchError(f"expert_bytes are from {expert.min():g} to {expert.max():g}: an expert has 1 byte at "
                              f"least, and {MOST_OF_EXPERT:g} at most")
        return replace(costs, expert_bytes=np.broadcast_to(expert, n_layers).copy(), request_bytes=self.request,
                       reply_bytes=self.reply, message_bytes=self.message)


@dataclass(frozen=True)
class Machine:
    """Servers that share its cores, by their names or numbers. cores: jobs that it computes at once without any being
    slower for that: so where a job has several threads, the cores over these."""

    servers: tuple[Any, ...]
    cores: float


def machines_of(costs: CostsFile, names: Sequence[str]) -> tuple[Machine, ...]:
    """With numbers of servers, which have these names; one that is on none has a device of its own. A name may be there
    several times: of servers that are there again the machines are, too.

    Raises FormatError for machines that cannot be, PyorchError for one of a server that there is not.
    """
    again = [names[:i].count(name) for i, name in enumerate(names)]
    found, taken = [], set()
    machines = costs.simulated.get("machines", [])
    if not isinstance(machines, (list, tuple)):
        raise FormatError("machines are no list")
    for i, value in enumerate(machines):
        machine = _machine(value, f"machines[{i}]")
        for name in machine.servers:
            if name not in names:
                raise PyorchError(f'there are costs of a server "{name}": the cluster has {", ".join(names)}')
            if name in taken:
                raise FormatError(f"machines: server {name} is there twice")
            taken.add(name)
        for n in range(max(again) + 1):
            there = tuple(i for i, name in enumerate(names) if name in machine.servers and again[i] == n)
            if there:
                found.append(Machine(there, machine.cores))
    return tuple(found)


def _machine(value: Any, where: str) -> Machine:
    if not isinstance(value, dict) or value.keys() != {"servers", "cores"}:
        raise FormatError(f"{where} has not the fields servers and cores")
    if not isinstance(value["servers"], list):
        raise FormatError(f"{where}: servers are no list")
    if type(value["cores"]) not in (int, float) or not 1 <= value["cores"] <= MOST:
        raise FormatError(f"{where}: cores is {repr(value['cores'])[:60]}, less than 1, or no number")
    return Machine(tuple(map(str, value["servers"])), float(value["cores"]))
