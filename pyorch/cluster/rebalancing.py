"""The scheduler's decisions in a running cluster, from each server's recent work and its costs.

The functions take plain data and return a decision; Decision.adopt in pyorch.cluster.migration says if moving pays.
pyorch.cluster.scheduler asks the servers and moves experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from pyorch.cluster.config import Cluster
from pyorch.cluster.costs import Costs, CostsFile, read_costs
from pyorch.cluster.members import Work
from pyorch.cluster.migration import FADING, Decision, RecentUses, Sharing, decide, migration_seconds
from pyorch.cluster.placement.dance import place
from pyorch.cluster.placement.placement import Placement
from pyorch.cluster.placement.problem import Problem
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.rows import ROW_BYTES

N_EMBD = 2048  # default for a model without the number


@dataclass(frozen=True, eq=False)
class Setting:
    """The constants of a running cluster.

    Attributes:
        problem: Servers, layers, sizes and memory, with zero frequencies.
        costs: The costs of links, disks and computing.
        interval: Seconds between two looks.
    """

    problem: Problem
    costs: Costs
    interval: float

    @cached_property
    def moving(self) -> Costs:
        """The costs of moving experts. Links include a read from the sender's disk.

        In memory an expert may have an order for the sender's kernels, so the sender reads it from its disk.
        """
        costs = self.costs
        with np.errstate(divide="ignore"):
            rate = 1 / (1 / costs.bytes_per_second + 1 / costs.disk_bytes_per_second[:, None])
        return replace(costs, latency=costs.latency + costs.disk_latency[:, None], bytes_per_second=rate)

    @classmethod
    def of(cls, cluster: Cluster, model_map: ModelMap) -> Setting:
        """Reads the costs.

        Raises:
            PyorchError: The file of costs cannot be read, or names other servers.
        """
        scheduler = cluster.scheduler
        known = CostsFile() if scheduler.costs is None else read_costs(scheduler.costs)
        known.check_names(cluster.names)
        layers = model_map.decoded_layers
        n_expert = max((layer.n_expert for layer in layers), default=1)
        problem = Problem.of_model(cluster, model_map, np.zeros((len(cluster.servers), len(layers), n_expert)))
        n_embd = model_map.hparam("embedding_length", N_EMBD)
        costs = known.of(cluster.names, cluster.latencies, cluster.bandwidths, problem.sizes,
                         float(ROW_BYTES[cluster.rows] * n_embd))
        return cls(problem, costs, scheduler.interval)


@dataclass(frozen=True)
class Verdict:
    """A decision of the scheduler, for people and programs.

    Attributes:
        at: Its time, in seconds since the epoch.
        adopted: Whether experts move.
        reason: A sentence.
        current: C(P), the remote seconds of an interval; None if no placements were compared, as for the next two.
        candidate: C(P').
        migration: T_mig.
        n_moves: The number of experts that servers would load.
        n_bytes: Their size.
    """

    at: float
    adopted: bool
    reason: str
    current: float | None = None
    candidate: float | None = None
    migration: float | None = None
    n_moves: int = 0
    n_bytes: int = 0

    @classmethod
    def of(cls, at: float, decision: Decision) -> Verdict:
        if not decision.n_moves:
            reason = "the placement is as good as the one that the algorithm makes now"
        elif decision.adopt:
            reason = "it gains more than moving takes: C(P') + T_mig < C(P)"
        else:
            reason = "it gains no more than moving takes: C(P') + T_mig is not below C(P)"
        return cls(at, decision.adopt, reason, decision.current, decision.candidate, decision.migration,
                   decision.n_moves, decision.n_bytes)


@dataclass
class Recent:
    """The recent work of all servers. seen: the last work by name; at: its time, in seconds since the epoch."""

    uses: RecentUses
    at: float
    seen: dict[str, Work] = field(default_factory=dict)
    local: dict[str, float] = field(default_factory=dict)  # the local ratio of each server in the last window
    sharing: Sharing = Sharing()
    served: dict[str, tuple[float, float]] = field(default_factory=dict)  # rows for others and their seconds; both fade

    @classmethod
    def begin(cls, setting: Setting, at: float) -> Recent:
        return cls(RecentUses(setting.problem.shape, setting.interval), at)

    def look(self, setting: Setting, now: Mapping[str, Work], at: float) -> None:
        """Adds the servers' work since the last look. The first look at a server adds nothing."""
        new = {name: one.since(self.seen.get(name, one)) for name, one in now.items()}
        counts = np.zeros(setting.problem.shape)
        seconds = max(0.0, at - self.at)
        faded = FADING ** (seconds / setting.interval)
        for name, one in new.items():
            counts[setting.problem.servers.index(name)] = one.activations
            rows, busy = self.served.get(name, (0.0, 0.0))
            self.served[name] = faded * rows + one.served, faded * busy + 1e-9 * one.served_ns
            if total := float(one.activations.sum()):
                self.local[name] = 1 - (one.sent + one.read) / total
        if seconds:
            self.uses.add(counts, seconds)
        self.at = at
        self.seen.update(now)
        self.sharing = _sharing(list(new.values()), setting.costs) or self.sharing

    def costs(self, setting: Setting) -> Costs:
        """Returns the setting's costs, with the recent time of a row on servers that computed rows for others.

        As in DanceMoE (section IV-A) this is the mean over all rows. So it includes their experts and messages, and
        waiting for other computations at the same time.
        """
        costs = setting.costs
        found = [self.served.get(name, (0.0, 0.0)) for name in setting.problem.servers]
        known = np.array([rows >= 1 for rows, _ in found])
        row = np.array([seconds / max(rows, 1.0) for rows, seconds in found])
        return replace(costs, row=np.where(known, row, costs.row), expert=np.where(known, 0.0, costs.expert),
                       message=np.where(known, 0.0, costs.message))


def _sharing(windows: Sequence[Work], costs: Costs) -> Sharing | None:
    """Returns the sharing in the servers' messages; None if they sent none."""
    sent, messages, computed, uses = (sum(getattr(window, name) for window in windows)
                                      for name in ("sent", "messages", "computed", "uses"))
    if not sent or not messages:
        return None
    n_bytes = sum(window.sent_bytes for window in windows) - messages * costs.message_bytes
    inputs = max(n_bytes / costs.request_bytes, messages)
    return Sharing(max(1.0, sent / messages), max(1.0, computed / uses) if uses else 1.0, max(1.0, sent / inputs))


def place_again(
    setting: Setting, now: Placement, recent: Recent, present: Sequence[str]
) -> tuple[Placement, Decision]:
    """Makes a placement for the recent uses, and decides if it pays.

    Servers that are not present hold no expert, in the present placement and in the new one.
    """
    problem, uses = setting.problem, recent.uses.expected
    is_present = np.isin(problem.servers, present)
    uses = uses * is_present[:, None, None]
    capacities = tuple(devices if is_there else (0,) * len(devices)
                       for devices, is_there in zip(problem.capacities, is_present))
    problem = Problem(problem.servers, problem.layers, uses, problem.sizes, capacities, problem.n_experts)
    candidate, held = place(problem, partial=True), now.held & is_present[:, None, None]
    decision = decide(held, candidate.held, uses, recent.costs(setting), recent.sharing)
    return candidate, replace(decision, migration=float(migration_seconds(held, candidate.held, setting.moving).sum()))
