"""Servers that share the cores of a machine, as a file of costs names them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pyorch.cluster.costs import MOST, CostsFile
from pyorch.errors import FormatError, PyorchError


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
    for i, value in enumerate(costs.machines):
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
