"""Plans: the division of memory among forms of a compressed pack's experts, in the file MODEL.plan.json.

`pyorch plan` makes one. A plan stores its inputs too, routing by rank and the machine's speeds, so that it also serves
other budgets.
"""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from pyorch.errors import FormatError
from pyorch.planning.makespan import POOLS, Delays
from pyorch.planning.planner import LEAST_STEP, LayerCosts, Planner
from pyorch.planning.ranks import inclusion_of_batch
from pyorch.runtime.model_map import ModelMap, beside
from pyorch.sidecars import json_file
from pyorch.sidecars.packs import required_part_sizes

KIND = "pyorch plan"
VERSION = 2


@dataclass(frozen=True)
class Machine:
    """Speeds: bytes_per_second of reads; decoded_per_second, bytes of matrices that one worker recovers; workers."""

    bytes_per_second: float
    decoded_per_second: float
    n_workers: int


@dataclass(frozen=True)
class Plan:
    """A division of memory, and its inputs.

    Attributes:
        budget: Bytes.
        batch: Sequences decoded together.
        pools: The allowed ones of F, C, S and E.
        step: The step of the search.
        shares: Shares of the budget for F, C, S and E.
        compressed: Experts are read from the pack; otherwise from the model.
        hits: Mean number of a token's (or batch's) experts of a layer in each pool and in none, as expected.
        makespan_ms: Expected wait of these tokens.
        handicap: See Planner.plan().
        codecs: Codecs of the pack.
        n_tokens: Tokens of the trace.
        inclusion: [n_layers][n_expert] of the executed layers, by rank (pyorch.planning.ranks).
        uses: The same by expert: uses in the trace; () without a trace.
    """

    budget: int
    pools: str
    step: float
    shares: tuple[float, float, float, float]
    compressed: bool
    hits: tuple[float, float, float, float, float]
    makespan_ms: float
    handicap: float
    n_tokens: int
    machine: Machine
    codecs: tuple[str, ...]
    inclusion: tuple[tuple[float, ...], ...]
    uses: tuple[tuple[int, ...], ...]
    batch: int = 1

    @property
    def rows(self) -> np.ndarray:
        """The inclusion probabilities, float64[n_layers, n_expert]."""
        return np.array(self.inclusion)


def default_path(model: str | os.PathLike[str]) -> Path:
    """Returns the path model.plan.json next to the model."""
    return beside(model, "plan.json")


def layer_costs(model_map: ModelMap, machine: Machine) -> list[LayerCosts]:
    """Returns the costs of experts of each executed layer.

    Raises:
        FormatError: There is no compressed pack.
    """
    parts = required_part_sizes(model_map)
    costs = []
    for layer in model_map.decoded_layers:
        part, n = parts.get(layer.il), len(layer.roles)
        plain_read = layer.expert_bytes / machine.bytes_per_second
        if part is None:
            sizes = (layer.slot_bytes, 0, 0, 0)
            delays = Delays(plain_read / n, e_read=0, decode=0, n_workers=machine.n_workers, n_shards=1, n_matrices=n)
        else:
            sizes = (layer.slot_bytes, part.e_memory + part.sm_memory, part.sm_memory, part.e_memory)
            shards = n * part.n_shards
            delays = Delays(
                sm_read=part.sm_bytes / n / machine.bytes_per_second,
                e_read=part.e_bytes / shards / machine.bytes_per_second,
                decode=layer.expert_bytes / shards / machine.decoded_per_second,
                n_workers=machine.n_workers, n_shards=part.n_shards, n_matrices=n,
            )
        costs.append(LayerCosts(layer.n_expert, sizes, delays, None if model_map.info.slim else plain_read))
    return costs


def new_planner(model_map: ModelMap, inclusion: np.ndarray, machine: Machine, batch: int = 1) -> Planner:
    """Returns a planner for a model's memory.

    Whole experts get at least the memory for two tokens in the largest layer and one expert more; for a batch, the
    memory for its tokens together, as Table::widen() of native/src/residency reserves it.

    Raises:
        FormatError: There is no compressed pack.
        PyorchError: The inclusion probabilities are not valid.
    """
    least_full = Reserve.of(model_map).least_full
    if batch > 1:
        together = inclusion_of_batch(inclusion, batch)
        most = together.sum(axis=1) + 2 * np.sqrt((together * (1 - together)).sum(axis=1))
        least_full = max(least_full, *(math.ceil(min(n, layer.n_expert)) * layer.slot_bytes
                                       for n, layer in zip(most, model_map.decoded_layers)))
    return Planner(inclusion, model_map.info.n_expert_used, layer_costs(model_map, machine), least_full, batch)


@dataclass(frozen=True)
class Reserve:
    """The memory through which compressed experts are read, as the runtime reserves it (residency/pools.cpp).

    Attributes:
        each: Bytes of one. least, most: the number of them.
        least_full: Bytes that whole experts always have, before there are more than the least.
    """

    each: int
    least: int
    most: int
    least_full: int

    @classmethod
    def of(cls, model_map: ModelMap) -> Reserve:
        """Returns the reserve of a model.

        Raises:
            FormatError: There is no compressed pack.
        """
        each = max(part.e_memory + part.sm_memory for part in required_part_sizes(model_map).values())
        least = 2
        return cls(each, least, model_map.info.n_expert_used + 2, model_map.info.floor_bytes - least * each)

    def bytes(self, budget: int) -> int:
        """Returns the reserved bytes of a budget."""
        n = min(budget // (16 * self.each), (budget - self.least_full) // self.each)
        return self.each * min(max(n, self.least), self.most)


def write_plan(path: str | os.PathLike[str], plan: Plan, model_map: ModelMap) -> None:
    """Writes the plan, completely or not at all.

    Raises:
        PyorchError: It cannot be written.
    """
    fields = asdict(plan) | {"inclusion": [[float(f"{f:.6g}") for f in row] for row in plan.inclusion]}
    json_file.write(path, KIND, VERSION, model_map, fields)


def read_plan(path: str | os.PathLike[str], model_map: ModelMap) -> Plan:
    """Reads a plan.

    Raises:
        FormatError: There is no such file, or it is no plan, damaged, or of another version or model.
    """
    plan = _checked(json_file.read(path, KIND, VERSION, model_map, command="plan"), model_map)
    if plan is None:
        raise FormatError(f"{path} is damaged: plan again")
    return plan


def _checked(value: dict, model_map: ModelMap) -> Plan | None:
    """Returns the plan, or None if a field is missing or not valid."""
    layers = model_map.decoded_layers
    value = {"batch": 1, **value}  # older plans are for one sequence
    try:
        machine = Machine(**value["machine"])
        inclusion = np.array(value["inclusion"], np.float64)
        uses, codecs = np.array(value["uses"]), value["codecs"]
        numbers = [*value["shares"], *value["hits"], value["makespan_ms"], value["step"], value["handicap"],
                   machine.bytes_per_second, machine.decoded_per_second]
        whole = [value["budget"], value["n_tokens"], machine.n_workers]
        if (
            all(type(n) in (int, float) and math.isfinite(n) and n >= 0 for n in numbers)
            and all(type(n) is int and 0 <= n < 1 << 62 for n in whole)
            and len(value["shares"]) == len(POOLS) and abs(sum(value["shares"]) - 1) < 1e-6
            and len(value["hits"]) == len(POOLS) + 1
            and machine.bytes_per_second > 0 and machine.decoded_per_second > 0 and machine.n_workers > 0
            and value["handicap"] >= 1 and type(value["batch"]) is int and value["batch"] >= 1
            and isinstance(value["compressed"], bool) and isinstance(value["pools"], str)
            and value["pools"] and not set(value["pools"]) - set(POOLS)
            and len(set(value["pools"])) == len(value["pools"]) and LEAST_STEP <= value["step"] <= 1
            and inclusion.shape == (len(layers), max((layer.n_expert for layer in layers), default=0))
            and np.isfinite(inclusion).all()
            and isinstance(codecs, list) and all(isinstance(codec, str) for codec in codecs)
            and (not len(uses) or (uses.shape == inclusion.shape and np.issubdtype(uses.dtype, np.integer)
                 and uses.min() >= 0 and (uses.sum(axis=1) > 0).all()))
        ):
            fields = {name: value[name] for name in Plan.__dataclass_fields__}
            rows = _restored(inclusion, model_map.info.n_expert_used)
            return Plan(**{**fields, "machine": machine, "shares": tuple(value["shares"]),
                           "hits": tuple(value["hits"]), "codecs": tuple(codecs),
                           "inclusion": tuple(map(tuple, rows.tolist())), "uses": tuple(map(tuple, uses.tolist()))})
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        pass
    return None


def _restored(inclusion: np.ndarray, n_used: int) -> np.ndarray:
    """Returns rows with the sum that they had before rounding.

    Raises:
        ValueError: No plan has such rows.
    """
    sums = inclusion.sum(axis=1, keepdims=True)
    if inclusion.min() < 0 or inclusion.max() > 1 or np.abs(sums - n_used).max() > 1e-3 * n_used:
        raise ValueError(inclusion)
    return np.minimum(inclusion * n_used / sums, 1)
