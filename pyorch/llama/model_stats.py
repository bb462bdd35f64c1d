"""Measurements of a model that ran: speed, hits, memory, and lossy changes."""

from __future__ import annotations

from dataclasses import dataclass

from pyorch.llama.layouts import Layout
from pyorch.runtime.statistics import SpeculationStats, Stats, SubstitutionStats
from pyorch.settings.pools import Pools
from pyorch.sizes import counted, format_bytes


@dataclass(frozen=True)
class ModelStats:
    """The measurements since the model was loaded, or its statistics were reset.

    Attributes:
        prefill_tokens: Computed in batches.
        prefill_seconds: Of them.
        decode_tokens: Computed one by one.
        decode_seconds: Of them.
        peak_memory_bytes: Of the process.
        experts: The engine's statistics. None for a dense model.
        substitution: None if no layer substitutes.
        speculation: None if no layer executes forecasts.
        layers: The engine's statistics by il; empty for a dense model.
        pools: The division of memory. None if experts do not come from a compressed pack.
        pools_from: The source of `pools`, or the reason why an existing pack is not used.
        kernels: The order of experts in memory. None if there is no choice.
    """

    prefill_tokens: int
    prefill_seconds: float
    decode_tokens: int
    decode_seconds: float
    peak_memory_bytes: int
    experts: Stats | None
    substitution: SubstitutionStats | None
    speculation: SpeculationStats | None
    layers: dict[int, Stats]
    pools: Pools | None
    pools_from: str
    kernels: Layout | None = None

    @property
    def prefill_rate(self) -> float:
        """Tokens per second; 0 without tokens."""
        return self.prefill_tokens / self.prefill_seconds if self.prefill_tokens else 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens per second; 0 without tokens."""
        return self.decode_tokens / self.decode_seconds if self.decode_tokens else 0.0

    @property
    def bytes_read_per_token(self) -> float:
        """Bytes of experts per token of any context; 0 without tokens."""
        if self.experts is None or not self.experts.tokens:
            return 0.0
        return self.experts.bytes_read * len(self.layers) / self.experts.tokens

    @property
    def facts(self) -> list[tuple[str, str]]:
        """Labels and values of the lines that str() returns."""
        rows = []
        if self.prefill_tokens:  # a prompt of one token is counted as decoding
            rows.append(("prefill", f"{counted(self.prefill_tokens, 'token')}, {self.prefill_rate:.1f} tok/s"))
        rows.append(("decode", f"{counted(self.decode_tokens, 'token')}, {self.decode_rate:.1f} tok/s"))
        experts, speculation, substitution = self.experts, self.speculation, self.substitution
        if experts is not None:
            read = format_bytes(round(self.bytes_read_per_token))
            rows.append(("experts", f"{experts.in_memory}, {_stored_hits(experts)}{read} read per token, waited "
                                    f"{experts.stall_ns / 1e9:.2f} s"))
            budget, peak = format_bytes(experts.budget_bytes), format_bytes(experts.peak_bytes)
            rows.append(("budget", f"{budget}, at most {peak} used"))
            if experts.on_device:
                rows.append(("device", experts.on_device))
        if self.pools is not None:
            names = ("full", "compressed", "SM only", "E only")
            shares = ", ".join(f"{share:.0%} {name}" for share, name in zip(self.pools.shares, names) if share)
            rows.append(("pools", f"{shares} ({self.pools_from})"))
        elif self.pools_from:
            rows.append(("pools", self.pools_from))
        if self.kernels is not None:
            rows.append(("kernels", str(self.kernels)))
        rows.append(("memory", f"at most {format_bytes(self.peak_memory_bytes)} used by the process"))
        if speculation is not None:
            rows.append(("lossy", f"{speculation.slots} expert slots computed as predicted, "
                                  f"{speculation.right} of them as their routers chose"))
        if substitution is not None:
            rows.append(("lossy", f"{substitution.lossy_tokens} of {substitution.tokens} token-layers changed, "
                                  f"{substitution}; {substitution.avoided} of {substitution.absent} absent experts "
                                  "not needed"))
        return rows

    def __str__(self) -> str:
        width = max(len(label) for label, _ in self.facts)
        return "\n".join(f"{label:{width}}  {value}" for label, value in self.facts)


def _stored_hits(experts: Stats) -> str:
    """Returns the shares of the uses of experts that found another form of the expert in memory; "" without any."""
    uses, partial = experts.hits + experts.misses, experts.sm_hits + experts.e_hits
    forms = ((experts.compressed_hits, "compressed"), (partial, "in part"))
    return "".join(f"{n / uses:.1%} {form}, " for n, form in forms if n)
