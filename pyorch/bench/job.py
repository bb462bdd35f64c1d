"""The request to a measured process, and its answer: plain data."""

from __future__ import annotations

from dataclasses import dataclass

from pyorch.runtime.statistics import Stats
from pyorch.settings.device_options import NONE
from pyorch.settings.settings import Settings

# Who manages the experts.
ENGINE = "engine"  # pyorch, under a budget
UNMANAGED = "unmanaged"  # llama.cpp: pyorch is not loaded; its hooks are compiled in but not attached


@dataclass(frozen=True)
class Config:
    """One line of the table. settings: of an engine. limit_bytes 0: no memory limit. n_busy: other busy processes."""

    label: str
    mode: str
    settings: Settings = Settings()
    limit_bytes: int = 0
    preload: bool = False  # load all experts before measuring
    repack: bool = True  # weights in the order of the faster kernels, if there are any
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

    Attributes:
        data: A text file. None: random tokens among the first 256.
        n_sequences: Sequences decoded together, each after its own prompt.
        n_prompt: Tokens of the prompt of each sequence. n_tokens: tokens that each decodes.
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
    """Prefill or decode. Without an engine, hits and misses are 0, and bytes are those that the kernel read.

    Attributes:
        useful_bytes: Bytes read without those of wrong guesses.
        changed_slots: Expert slots that were substituted, dropped, computed by ghosts, or predicted differently from
            the router's choice.
        device_hits: Uses of experts that the device has. device_misses: all others, which ask host memory.
        device_computed: Uses that the device computed; the processor computed the others.
        device_bytes: Bytes uploaded.
        device_ahead: Experts uploaded by forecasts. device_ahead_hits: those of them that their layer used.
        processor_seconds: Time of all threads of the process, system calls included.
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
        """Tokens a second."""
        return self.n_tokens / self.seconds

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / self.n_tokens

    # The same formulas as an engine's, for the same counters.
    hit_rate, device_hit_rate = Stats.hit_rate, Stats.device_hit_rate
    device_computed_share, device_ahead_precision = Stats.device_computed_share, Stats.device_ahead_precision


@dataclass(frozen=True)
class Text:
    """The model's predictions for the text that it decoded, and its reads, after each token of the first sequence.

    Attributes:
        most_probable: The token with the highest probability.
        log_likelihood: Of the actual token, mean, in nats.
        seconds: Since the first token. bytes_read: the same for reads.
    """

    most_probable: list[int]
    log_likelihood: float
    seconds: list[float]
    bytes_read: list[int]


@dataclass(frozen=True)
class Measurement:
    """The answer of the process. Sizes are in bytes.

    Attributes:
        ttft_seconds: From the start of loading, with a cold page cache, to the logits after the prompt.
        prefill: Later, in the steady state, for the tokens of all sequences; decode too.
        peak_memory_bytes: Peak of the process (VmHWM).
        planned_stall_seconds: Planned wait of a decoded token with a compressed pack (pyorch plan); nan without a plan.
        text: The decoded text.
        device_used_bytes: Device memory of experts.
        memory_bytes: Resident memory of the process after the decode phase (VmRSS), 0 if unknown.
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
