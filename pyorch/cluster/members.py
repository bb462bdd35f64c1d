"""What the parts of a running cluster tell each other: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from pyorch.cluster.placement.placement import Placement
from pyorch.cluster.tls import Tls

# Of a server: it loads its model; it answers; it does not answer (it died and Ray restarts it, or it hangs); it cannot
# serve, and a restart would not change that.
STARTING, SERVING, ABSENT, REFUSED = ("starting", "serving", "no answer", "refused")


@dataclass(frozen=True)
class Job:
    """What one server does, the same after each restart.

    name, address, port: of its endpoint; the port is not 0. peer_port: where it computes for other servers.
    fingerprint: of the model. token: made by `up`, never shown. peers: where others compute for it, address and port by
    name. settings: texts, as pyorch.serve takes them. flags: of llama-server. placement: the plan that it begins with.
    tls: what it speaks to the others; None: plain TCP. reads: it reads experts that others have where that is faster
    than to ask. rows: what numbers travel as. keys: a file of API keys; None: none is asked for. https: users speak it.
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
    """A placement, and which of those it is that followed one another, from 0."""

    placement: Placement
    number: int = 0


@dataclass(frozen=True, eq=False)
class Work:
    """What a server did since it started.

    life: of the process that serves, another one after a restart. activations: float64[n_layers, n_expert], how often
    its routers selected each expert, as pyorch_get_activations. sent: rows times experts that were sent, in so many
    messages of so many bytes. computed: rows times experts that were computed here, and uses: of an expert, by any
    number of rows at once. served: rows times experts that were computed for others, in served_ns. read: that could
    have been sent, and whose experts were read instead.
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
        """What came after `before`; all of it where the server was restarted since."""
        if before.life != self.life:
            return self
        return Work(self.life, *(np.maximum(getattr(self, one.name) - getattr(before, one.name), 0)
                                 for one in fields(self)[1:]))


@dataclass(frozen=True, eq=False)
class Activity:
    """What a server did, and the plan that it follows; for the scheduler. memo: what that gave it last."""

    work: Work
    plan: Plan
    memo: Any


@dataclass(frozen=True)
class Counters:
    """Of a serving process. Bytes of memory; requests as llama-server counts them, None while it is too busy to say.

    pid: of the process with the model. pinned: experts of the plan that stay in memory. activations: rows times experts
    that its routers selected, wherever they were computed. sent: of them, those that other servers were asked for;
    fallback: of them, those that no server answered; waited_ns: for answers, when its own
    experts were done; read: that none was asked for, because reading their experts was estimated to be faster. served:
    rows times experts that it computed for others, in so many messages and so long; stalled_ns: that its own layers
    waited for reads. met: other servers that compute for it now.
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
    """Of one server.

    url: of its endpoint. reason: a sentence where it does not serve, or not all of the plan's experts stay in memory.
    restarted: by Ray, at least once. actor_pid: of the Ray actor. digest: of the plan; placed: experts that it gives
    this server. peers: servers that it knows, and that know it. fetched: experts that came from another server's disk
    when they moved. counters: None unless it serves.
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
