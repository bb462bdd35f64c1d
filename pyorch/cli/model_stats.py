"""What commands print of a model that ran: speed, hits, memory, and what was lossy."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from pyorch.cli.tables import Facts, show

if TYPE_CHECKING:
    from pyorch.llama.model import ModelStats
    from pyorch.runtime.statistics import Stats


def show_stats(stats: ModelStats) -> None:
    """To stderr: the text on stdout may go into a pipe."""
    from pyorch.sizes import counted, format_bytes

    rows = []
    if stats.prefill_tokens:  # a prompt of one token is computed as those that follow are
        rows.append(("prefill", f"{counted(stats.prefill_tokens, 'token')}, {stats.prefill_rate:.1f} tok/s"))
    rows.append(("decode", f"{counted(stats.decode_tokens, 'token')}, {stats.decode_rate:.1f} tok/s"))
    experts, speculation, substitution = stats.experts, stats.speculation, stats.substitution
    if experts is not None:
        read = format_bytes(round(stats.bytes_read_per_token))
        rows.append(("experts", f"{experts.in_memory}, {_stored_hits(experts)}{read} read per token, waited "
                                f"{experts.stall_ns / 1e9:.2f} s"))
        budget, peak = format_bytes(experts.budget_bytes), format_bytes(experts.peak_bytes)
        rows.append(("budget", f"{budget}, at most {peak} used"))
        if experts.on_device:
            rows.append(("device", experts.on_device))
    if stats.pools is not None:
        names = ("full", "compressed", "SM only", "E only")
        shares = ", ".join(f"{share:.0%} {name}" for share, name in zip(stats.pools.shares, names) if share)
        rows.append(("pools", f"{shares} ({stats.pools_from})"))
    elif stats.pools_from:
        rows.append(("pools", stats.pools_from))
    rows.append(("memory", f"at most {format_bytes(stats.peak_memory_bytes)} used by the process"))
    if speculation is not None:
        rows.append(("lossy", f"{speculation.slots} expert slots computed as predicted, {speculation.right} of them as "
                              "their routers chose"))
    if substitution is not None:
        rows.append(("lossy", f"{substitution.lossy_tokens} of {substitution.tokens} token-layers changed, "
                              f"{substitution}; "
                              f"{substitution.avoided} of {substitution.absent} absent experts not needed"))
    show([Facts(rows)], sys.stderr)


def _stored_hits(experts: Stats) -> str:
    """Shares of the uses of experts, of those that were in memory in other forms; "" without any."""
    uses, partial = experts.hits + experts.misses, experts.sm_hits + experts.e_hits
    forms = ((experts.compressed_hits, "compressed"), (partial, "in part"))
    return "".join(f"{n / uses:.1%} {form}, " for n, form in forms if n)
