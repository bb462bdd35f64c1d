"""What one measured process is asked, and what it answers: plain data."""

from __future__ import annotations

from dataclasses import dataclass

from pyorch.runtime.statistics import Stats
from pyorch.settings.device import NONE
from pyorch.settings.settings import Settings

# How the experts are kept.
ENGINE = "engine"  # by pyorch, under a budget
UNMANAGED = "unmanaged"  # by llama.cpp: pyorch is not loaded, its hooks are compiled in but not attached


@dataclass(frozen=True)
class Config:
    """One line of the table. settings: of an engine. limit_bytes 0: no memory limit. n_busy: processes beside it."""

    label: str
    mode: str
    settings: Settings = Settings()
    limit_bytes: int = 0
    preload: bool = False  # bring in all experts before anything is measured
    repack: bool = True  # weights in the layout of the faster kernels, where there are any
    n_busy: int = 0

    @property
    def lossy(self) -> bool:
        return self.settings.lossy

    @property
    def on_device(self) -> bool:
        return self.settings.device != NONE


@dataclass(frozen=True)
class Job:
    """A configuration and the work to measure it with.

    data: a text file; None: tokens at random, of the first 256. n_sequences: decoded at once, each after a prompt of
    its own; n_prompt, n_tokens: of each of them.
    """

    model: str
    config: Config
    data: str | None
    n_prompt: int
    n_tokens: int
    n_threads: int
    max_decode_seconds: float
    n_sequences: int = 1


@dataclass(frozen=True)
class Phase:
    """Prefill or decode. Without an engine hits and misses are 0, and the bytes are what the kernel read.

    useful_bytes: of those read, what was used: all but what was read ahead in vain. changed_slots: expert
    slots that were substituted, dropped, computed by ghosts, or forecast otherwise than the router chose.
    device_hits, device_misses: uses of experts that found them on the device, and all others, which ask host memory;
    device_computed: uses that it computed, the processor the others; device_bytes: uploaded. device_ahead,
    device_ahead_hits: experts that forecasts ordered there, and those of them that their layer used.
    processor_seconds: of all threads of the process, system calls included.
    """

    n_tokens: int
    seconds: float
    hits: int
    misses: int
    bytes_read: int
    useful_bytes: int
    stall_seconds: float
    changed_slots: int = 0
    device_hits: int = 0
    device_misses: int = 0
    device_computed: int = 0
    device_bytes: int = 0
    device_ahead: int = 0
    device_ahead_hits: int = 0
    processor_seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.n_tokens / self.seconds

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / self.n_tokens

    # As an engine's, of the same counters.
    hit_rate, device_hit_rate = Stats.hit_rate, Stats.device_hit_rate
    device_computed_share, device_ahead_precision = Stats.device_computed_share, Stats.device_ahead_precision


@dataclass(frozen=True)
class Text:
    """What a model said of the text that it decoded, and what it read for that, after each token of the first sequence.

    most_probable: the token that it held to be the next one. log_likelihood: of the one that came, mean, in nats.
    seconds, bytes_read: since the first of them.
    """

    most_probable: list[int]
    log_likelihood: float
    seconds: list[float]
    bytes_read: list[int]


@dataclass(frozen=True)
class Measurement:
    """What the process answers. All sizes in bytes.

    ttft_seconds: from the start of loading, with a cold page cache, to the logits after the prompt.
    prefill, decode: later, in the steady state; tokens of all sequences. peak_memory_bytes: of the process (VmHWM).
    planned_stall_seconds: that a decoded token waits as planned, with a compressed pack beside the model (pyorch plan);
    nan where nobody planned. text: that was decoded. device_used_bytes: of the device's memory, by experts.
    memory_bytes: resident in the process after the decode phase (VmRSS), 0 where the system does not report it.
    """

    load_seconds: float
    ttft_seconds: float
    prefill: Phase
    decode: Phase
    peak_memory_bytes: int
    budget_bytes: int
    peak_expert_bytes: int
    device_used_bytes: int = 0
    planned_stall_seconds: float = float("nan")
    text: Text | None = None
    memory_bytes: int = 0
