"""Messages between the parts of a running cluster: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from pyorch.cluster.placement.placement import Placement
from pyorch.cluster.tls import Tls

# States of a server: it loads its model; it serves; it does not answer, because it hangs, or died and Ray restarts it;
# it cannot serve, and a restart would not help.
STARTING, SERVING, ABSENT, REFUSED = ("starting", "serving", "no answer", "refused")


@dataclass(frozen=True)
class Job:
    """The task of one server, the same after each restart.

    Attributes:
        name: The server's name.
        model: The model's file.
        address: The address of its endpoint.
        port: The port of its endpoint, not 0.
        peer_port: The port at which it computes for other servers.
        budget: The memory for experts.
        fingerprint: The model's fingerprint.
        token: The cluster's secret. `up` makes it; it is never shown.
        peers: Addresses and ports at which other servers compute for it, by name.
        settings: Settings of pyorch.serve, as texts.
        flags: Flags of llama-server.
        placement: The first plan.
        tls: Certificates for connections to the others; None: plain TCP.
        reads: Whether it reads experts of others if that is faster than a request.
        rows: The type of numbers in messages.
        keys: A file of API keys; None: requests need none.
        https: Whether users connect with HTTPS.
    """

    name: str
    model: str
    address: str
    port: int
    peer_port: int
    budget: str
    fingerprint: str
    token: str = field(repr=False)
    peers: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    placement: Placement | None = None
    tls: Tls | None = None
    reads: bool = True
    rows: str = "f32"
    keys: str | None = None
    https: bool = False


@dataclass(frozen=True)
class Plan:
    """A placement and its number in the sequence of plans, from 0."""

    placement: Placement
    number: int = 0


@dataclass(frozen=True, eq=False)
class Work:
    """The work of a server since it started.

    Rows are counted for each expert that computes them.

    Attributes:
        life: Identifies the serving process; another one after a restart.
        activations: float64[n_layers, n_expert]: how often its routers selected each expert, as in
            pyorch_get_activations.
        sent: Rows sent to peers.
        messages: Messages with these rows.
        sent_bytes: Bytes of these messages.
        computed: Rows computed here.
        uses: Uses of an expert here, by any number of rows at once.
        served: Rows computed for others.
        served_ns: The time for these.
        read: Rows that could have been sent, but for which experts were read.
    """

    life: str
    activations: np.ndarray
    sent: int = 0
    messages: int = 0
    sent_bytes: int = 0
    computed: int = 0
    uses: int = 0
    served: int = 0
    served_ns: int = 0
    read: int = 0

    def since(self, before: Work) -> Work:
        """Returns the work after `before`; all work if the server has restarted since."""
        if before.life != self.life:
            return self
        return Work(self.life, *(np.maximum(getattr(self, one.name) - getattr(before, one.name), 0)
                                 for one in fields(self)[1:]))


@dataclass(frozen=True, eq=False)
class Activity:
    """A server's work and plan, for the scheduler. memo: the scheduler's last memo."""

    work: Work
    plan: Plan
    memo: Any


@dataclass(frozen=True)
class Counters:
    """The counters of a serving process.

    Rows are counted for each expert that computes them. Values of llama-server are None while it is too busy to answer.

    Attributes:
        pid: The process with the model.
        memory_bytes: Its memory.
        budget_bytes, used_bytes, hits, misses, bytes_read, failures: As in pyorch.runtime.statistics.Stats.
        pinned: Experts of the plan that stay in memory.
        activations: Rows that its routers selected, on any server.
        sent: Rows requested from other servers.
        fallback: Requested rows that no server answered.
        waited_ns: The time of waiting for answers, after its own experts.
        read: Rows that were not requested, because reading their experts was estimated to be faster.
        served: Rows computed for others.
        served_messages: Messages with these rows.
        served_ns: The time for these.
        stalled_ns: The time that its own layers waited for reads.
        met: Other servers that now compute for it.
        requests_running, requests_waiting: Requests of llama-server.
        prompt_tokens, prompt_seconds, generated_tokens, generated_seconds: Its totals.
    """

    pid: int
    memory_bytes: int
    budget_bytes: int = 0
    used_bytes: int = 0
    hits: int = 0
    misses: int = 0
    bytes_read: int = 0
    failures: int = 0
    pinned: int = 0
    activations: int = 0
    sent: int = 0
    fallback: int = 0
    waited_ns: int = 0
    read: int = 0
    served: int = 0
    served_messages: int = 0
    served_ns: int = 0
    stalled_ns: int = 0
    met: int = 0
    requests_running: int | None = None
    requests_waiting: int | None = None
    prompt_tokens: int | None = None
    prompt_seconds: float | None = None
    generated_tokens: int | None = None
    generated_seconds: float | None = None


@dataclass(frozen=True)
class Status:
    """The state of one server.

    Attributes:
        name: The server's name.
        state: STARTING, SERVING, ABSENT or REFUSED.
        url: Its endpoint.
        reason: A sentence if it does not serve, or if some of the plan's experts do not stay in memory.
        restarted: Whether Ray has restarted it.
        actor_pid: The process of the Ray actor.
        digest: The digest of the plan.
        placed: The experts that the plan gives this server.
        peers: Other servers that are connected in both directions.
        fetched: Experts that moved here from another server's disk.
        counters: None unless it serves.
    """

    name: str
    state: str
    url: str = ""
    reason: str = ""
    restarted: bool = False
    actor_pid: int = 0
    digest: str = ""
    placed: int = 0
    peers: tuple[str, ...] = ()
    fetched: int = 0
    counters: Counters | None = None
