"""Reads the simulator's own parts of a file of costs: sizes, and machines with cores that several servers share."""

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
    """Sizes in bytes. None means the model's size, which or_of() sets.

    Attributes:
        expert: Of an expert: one size, or one for each layer.
        request: Of a token's input. A peer receives it once for all experts that use it.
        reply: Of a row of an answer.
        message: Of a message, without its inputs or rows.
    """

    expert: float | tuple[float, ...] | None = None
    request: float | None = None
    reply: float | None = None
    message: float = Costs.message_bytes

    @classmethod
    def of(cls, file: CostsFile) -> Sizes:
        """Returns the sizes in a file of costs. FormatError: a value is no size."""
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
        """Returns these sizes, with the model's in place of None. `row` is the size of a row."""
        return replace(self, **{name: value for name, value in (("expert", expert), ("request", row), ("reply", row))
                                if getattr(self, name) is None})

    def applied(self, costs: Costs, n_layers: int) -> Costs:
        """Returns costs with these sizes, of which none may be None.

        Raises:
            PyorchError: The number of layers differs, or a size of an expert is not possible.
        """
        expert = np.atleast_1d(np.asarray(self.expert, np.float64))
        if len(expert) not in (1, n_layers):
            raise PyorchError(f"expert_bytes has sizes of {len(expert)} layers: the model has {n_layers}")
        if not (expert.min() >= 1 and expert.max() <= MOST_OF_EXPERT):
            raise PyorchError(f"expert_bytes ranges from {expert.min():g} to {expert.max():g}: an expert has 1 byte at "
                              f"least, and {MOST_OF_EXPERT:g} at most")
        return replace(costs, expert_bytes=np.broadcast_to(expert, n_layers).copy(), request_bytes=self.request,
                       reply_bytes=self.reply, message_bytes=self.message)


@dataclass(frozen=True)
class Machine:
    """A machine with servers that share its cores.

    Attributes:
        servers: Names or numbers of the servers.
        cores: Jobs that the machine computes at once at full speed: its cores divided by the threads of a job.
    """

    servers: tuple[Any, ...]
    cores: float


def machines_of(costs: CostsFile, names: Sequence[str]) -> tuple[Machine, ...]:
    """Returns the machines of a file of costs, with numbers of servers in place of names.

    A server on no machine has its own device. If the cluster repeats its servers, names occur several times; the
    machines are then repeated, too.

    Raises:
        FormatError: The description of the machines is not valid.
        PyorchError: A machine names a server that the cluster does not have.
    """
    again = [names[:i].count(name) for i, name in enumerate(names)]
    found, taken = [], set()
    machines = costs.simulated.get("machines", [])
    if not isinstance(machines, (list, tuple)):
        raise FormatError("machines is not a list")
    for i, value in enumerate(machines):
        machine = _machine(value, f"machines[{i}]")
        for name in machine.servers:
            if name not in names:
                raise PyorchError(f'there are costs of a server "{name}": the cluster has {", ".join(names)}')
            if name in taken:
                raise FormatError(f"machines: server {name} occurs twice")
            taken.add(name)
        for n in range(max(again) + 1):
            there = tuple(i for i, name in enumerate(names) if name in machine.servers and again[i] == n)
            if there:
                found.append(Machine(there, machine.cores))
    return tuple(found)


def _machine(value: Any, where: str) -> Machine:
    if not isinstance(value, dict) or value.keys() != {"servers", "cores"}:
        raise FormatError(f"{where} must have exactly the fields servers and cores")
    if not isinstance(value["servers"], list):
        raise FormatError(f"{where}: servers is not a list")
    if type(value["cores"]) not in (int, float) or not 1 <= value["cores"] <= MOST:
        raise FormatError(f"{where}: cores is {repr(value['cores'])[:60]}, not a number of at least 1")
    return Machine(tuple(map(str, value["servers"])), float(value["cores"]))
