"""The result of `pyorch advise`, and how it is shown."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pyorch.cli.tables import Facts, Table
from pyorch.sizes import MiB, format_bytes

if TYPE_CHECKING:
    from pyorch.advise.device_estimate import Device
    from pyorch.advise.estimates import Estimate
    from pyorch.advise.gains import Gain
    from pyorch.advise.machine import Compute, Disk
    from pyorch.llama.division import MemoryLimit


@dataclass(frozen=True)
class Advice:
    """The object that --json prints. Sizes are in bytes, rates in tokens a second.

    Attributes:
        context_bytes: KV cache and compute buffers for n_ctx tokens, in host or device memory.
        auto_bytes: Host memory left for experts, at most the bytes of all. None if the model does not fit.
        estimates: The last one has the recommended budget. With a device, the first one is without it.
        budget_names: Names of the budgets of `estimates`: "auto" for the memory that is left, "least" for the floor.
        gains: At the recommended budget. gains_at_least: at the smallest one, least_budget.
        useful: Sidecars that would help at one of the two budgets.
    """

    model: str
    arch: str
    n_threads: int
    disk: Disk
    compute: Compute
    memory: MemoryLimit
    device: Device | None
    n_ctx: int
    context_bytes: int
    auto_bytes: int | None
    routing: str
    prompt_tokens: int
    estimates: list[Estimate]
    budget_names: list[str]
    gains: list[Gain]
    least_budget: str
    gains_at_least: list[Gain]
    useful: list[str]
    command: str | None
    notes: list[str]
    plot: Path | None


def parts_of(advice: Advice) -> list[str | Table | Facts]:
    how = {"kept": "measured before", "measured": "measured now", "probe": "measured on a temporary file",
           "given": "as given"}
    left = "too little for any expert"
    if advice.auto_bytes is not None:
        left = f"{format_bytes(advice.auto_bytes)} for experts"
    context = f"a context of {advice.n_ctx} tokens needs {format_bytes(advice.context_bytes)}"
    facts = [
        ("model", f"{advice.model} ({advice.arch})"),
        ("disk", f"{advice.disk.bytes_per_second / 1e9:.2f} GB/s ({how[advice.disk.how]})"),
        ("computing", f"{1 / advice.compute.decode_seconds:.1f} tok/s decoded, "
                      f"{1 / advice.compute.prefill_seconds:.0f} tok/s of a prompt, with all experts in memory, on "
                      f"{advice.n_threads} threads"),
        ("memory", f"{format_bytes(advice.memory.free_bytes)} free ({advice.memory.source}); "
                   f"{f'{context}, which' if advice.device is None else 'the rest of the model'} leaves {left}"),
        *_facts_of_device(advice, context),
        ("routing", advice.routing),
    ]
    table = _table_of_budgets(advice) if advice.device is None else _table_of_device(advice)
    recommended = advice.estimates[-1]
    least = advice.estimates[max(i for i, name in enumerate(advice.budget_names) if name == advice.least_budget)]
    columns_of_gains = ["sidecar", "is there", f"tok/s at {advice.budget_names[-1]}"]
    if least is not recommended:
        columns_of_gains.insert(2, f"tok/s at {advice.least_budget}")
    gains, reasons = [], []
    for gain, at_least in zip(advice.gains, advice.gains_at_least):
        shown = [(at_least, least), (gain, recommended)] if least is not recommended else [(gain, recommended)]
        gains.append((gain.sidecar, "yes" if gain.there else "no", *(_gain(*pair) for pair in shown)))
        command = f": {gain.command}" if gain.sidecar in advice.useful else ""
        reasons.append((gain.sidecar, f"{'lossy: ' if gain.lossy else ''}{gain.why}{command}"))
    return [
        Facts(facts), "",
        table, "",
        Table(columns_of_gains, gains, left=columns_of_gains), "",
        Facts(reasons), "",
        *[f"note: {note}" for note in advice.notes],
        *([f"picture: {advice.plot}"] if advice.plot is not None else []),
        *([f"run it with: {advice.command}"] if advice.command is not None else []),
    ]


def _facts_of_device(advice: Advice, context: str) -> list[tuple[str, str]]:
    if advice.device is None:
        return []
    memory, speed = "", advice.device.speed
    if advice.device.free_bytes is not None:
        memory = (f"{format_bytes(advice.device.free_bytes)} free; {context} there, which leaves "
                  f"{format_bytes(advice.estimates[-1].vram_bytes)} for experts")
    return [
        ("device", f"{advice.device.name or 'one that is not here'}{': ' if memory else ''}{memory}"),
        ("its speed", f"uploads {speed.link / 1e9:.3g} GB/s, a token {_ratio(speed.decode)} times as fast as on the "
                      f"processor, a prompt {_ratio(speed.prefill)} times ({speed.how})"),
    ]


def _ratio(ratio: float) -> str:
    return f"{float(f'{ratio:.3g}'):g}"  # 3010, not 3.01e+03


def _table_of_budgets(advice: Advice) -> Table:
    rows = [(name, format_bytes(estimate.budget_bytes), f"{estimate.hit_rate:.1%}", f"{estimate.decode_rate:.1f}",
             f"{estimate.first_token_seconds:.1f} s", f"{estimate.bytes_per_token / MiB:.0f}", f"{estimate.stall:.0%}")
            for estimate, name in zip(advice.estimates, advice.budget_names)]
    return Table(("budget", "memory", "hits", "tok/s", "first token", "MiB/token", "waiting"), rows, left=("budget",))


def _table_of_device(advice: Advice) -> Table:
    """Returns where the used experts are, in shares of all uses."""
    rows = [(format_bytes(estimate.vram_bytes) if estimate.vram_budget else "none", name,
             format_bytes(estimate.budget_bytes), f"{estimate.on_device:.1%}", f"{estimate.in_memory:.1%}",
             f"{estimate.read:.1%}", f"{estimate.decode_rate:.1f}", f"{estimate.first_token_seconds:.1f} s")
            for estimate, name in zip(advice.estimates, advice.budget_names)]
    columns = ("VRAM", "budget", "memory", "in VRAM", "in memory", "on disk", "tok/s", "first token")
    return Table(columns, rows, left=("VRAM", "budget"))


def _gain(gain: Gain, without: Estimate) -> str:
    """Formats a gain. A lossy gain has no share, because its bound would be to read nothing."""
    if gain.decode_rate is None:
        return "not known"
    bound = "at most " if gain.at_most else ""
    more = "" if gain.lossy else f" ({round(100 * (gain.decode_rate / without.decode_rate - 1)):+d}%)"
    return f"{bound}{gain.decode_rate:.1f}{more}"
