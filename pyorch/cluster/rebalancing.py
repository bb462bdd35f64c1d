"""What the scheduler of a running cluster decides by: what each server did since it was looked at last, and what it
costs.

Plain data in, a decision out: whether moving pays is Decision.adopt in pyorch.cluster.migration. Who asks the servers,
and moves experts, is pyorch.cluster.scheduler.
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

N_EMBD = 2048  # of a model that does not say it


@dataclass(frozen=True, eq=False)
class Setting:
    """What stays while a cluster is up.

    problem: servers, layers, sizes and memory; its frequencies are zero. costs: of links, disks and computing.
    interval: seconds between two looks.
    """

    problem: Problem
    costs: Costs
    interval: float

    @cached_property
    def moving(self) -> Costs:
        """Of experts that move. A server has them in memory as its kernels want them, which may be another order than
        elsewhere: so who sends one reads it from its disk before."""
        costs = self.costs
        with np.errstate(divide="ignore"):
            rate = 1 / (1 / costs.bytes_per_second + 1 / costs.disk_bytes_per_second[:, None])
        return replace(costs, latency=costs.latency + costs.disk_latency[:, None], bytes_per_second=rate)

    @classmethod
    def of(cls, cluster: Cluster, model_map: ModelMap) -> Setting:
        """PyorchError for costs that cannot be read or are of other servers."""
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
    """A decision of the scheduler, for people and programs. Seconds of remote time in an interval: current C(P),
    candidate C(P'), migration T_mig (None where none were compared); reason: a sentence.

    at: seconds since the epoch. n_moves, n_bytes: of experts that servers would take in.
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
    """What was seen of all servers. seen: by name, when looked at last; at: when, in seconds since the epoch."""

    uses: RecentUses
    at: float
    seen: dict[str, Work] = field(default_factory=dict)
    local: dict[str, float] = field(default_factory=dict)  # ratio of each server, in the window that ended then
    sharing: Sharing = Sharing()
    served: dict[str, tuple[float, float]] = field(default_factory=dict)  # rows for others, and seconds; both fade

    @classmethod
    def begin(cls, setting: Setting, at: float) -> Recent:
        return cls(RecentUses(setting.problem.shape, setting.interval), at)

    def look(self, setting: Setting, now: Mapping[str, Work], at: float) -> None:
        """Takes what these servers did since the last look; of one that is seen for the first time, nothing."""
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
        """The setting's, but for rows as long as they took lately on servers that computed any for others.

        As in DanceMoE (section IV-A) that is the mean of all of them, so it has their experts and messages in it, and
        what they waited for others that compute at the same time.
        """
        costs = setting.costs
        found = [self.served.get(name, (0.0, 0.0)) for name in setting.problem.servers]
        known = np.array([rows >= 1 for rows, _ in found])
        row = np.array([seconds / max(rows, 1.0) for rows, seconds in found])
        return replace(costs, row=np.where(known, row, costs.row), expert=np.where(known, 0.0, costs.expert),
                       message=np.where(known, 0.0, costs.message))


def _sharing(windows: Sequence[Work], costs: Costs) -> Sharing | None:
    """Of what servers sent; None where they sent nothing."""
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
    """The placement that the algorithm makes for what was used lately, and whether it pays.

    Servers that are not present hold nothing: neither now nor then.
    """
    problem, uses = setting.problem, recent.uses.expected
    there = np.isin(problem.servers, present)
    uses = uses * there[:, None, None]
    capacities = tuple(devices if is_there else (0,) * len(devices)
                       for devices, is_there in zip(problem.capacities, there))
    problem = Problem(problem.servers, problem.layers, uses, problem.sizes, capacities, problem.n_experts)
    candidate, held = place(problem, partial=True), now.held & there[:, None, None]
    decision = decide(held, candidate.held, uses, recent.costs(setting), recent.sharing)
    return candidate, replace(decision, migration=float(migration_seconds(held, candidate.held, setting.moving).sum()))
