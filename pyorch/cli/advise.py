"""`pyorch advise`: what this machine would make of a model at each budget, and the command to run it with."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pyorch.cli.numbers import number, whole
from pyorch.cli.options import add_command, check_readable, print_json
from pyorch.cli.progress import Progress
from pyorch.cli.settings import add_settings, given_settings, listed
from pyorch.cli.tables import Facts, Table, show
from pyorch.errors import PyorchError

if TYPE_CHECKING:
    from pyorch.advise.estimates import Estimate
    from pyorch.advise.gains import Gain
    from pyorch.advise.machine import Compute, Disk
    from pyorch.llama.memory import MemoryLimit
    from pyorch.runtime.model_map import ModelMap

_SHARES = (25, 40, 60, 100)


@dataclass(frozen=True)
class Advice:
    """What --json prints. Sizes in bytes, rates in tokens a second.

    context_bytes: KV cache and compute buffers for n_ctx tokens; auto_bytes: what then is left for experts, at most all
    of them; None where the model does not fit. estimates: the last one is of the recommended budget.
    """

    model: str
    arch: str
    n_threads: int
    disk: Disk
    compute: Compute
    memory: MemoryLimit
    n_ctx: int
    context_bytes: int
    auto_bytes: int | None
    routing: str
    prompt_tokens: int
    estimates: list[Estimate]
    gains: list[Gain]
    command: str
    notes: list[str]
    plot: Path | None


def add_parser(subparsers: argparse._SubParsersAction, summary: str) -> argparse.ArgumentParser:
    parser = add_command(subparsers, "advise", summary, "pyorch advise olmoe.gguf\n"
                         "  pyorch advise olmoe.gguf --trace olmoe.trace --budget 30%,50% --plot pictures")
    parser.description += (
        " Disk, computing and memory of this machine are measured once, and kept; then the cache, the predictors and "
        "the disk run in simulated time. No weight of the model is needed: its header suffices."
    )
    parser.add_argument("model", metavar="MODEL.gguf", help="the model, a GGUF file")
    add_settings(parser, "budget", "n_threads", lists=("budget",),
                 defaults={"budget": ",".join(f"{share}%" for share in _SHARES) + ", and what memory leaves"})
    parser.add_argument("--trace", type=Path, metavar="FILE",
                        help="what the routers decided, of pyorch profile (default: MODEL.trace if it is there, else "
                             "the use counts in MODEL.maps.gguf, else an assumption)")
    parser.add_argument("--ctx", type=whole(1), default=4096, metavar="N",
                        help="leave memory for a context of N tokens (default: 4096)")
    parser.add_argument("--prompt-tokens", type=whole(1), default=512, metavar="N",
                        help="the time to the first token is that of a prompt of N tokens (default: 512)")
    parser.add_argument("--memory", metavar="SIZE",
                        help="advise for a machine with so much free memory, such as 16GiB (default: what is free "
                             "here)")
    parser.add_argument("--read-bandwidth", metavar="RATE", help="speed of the disk, such as 3GB/s (default: measured)")
    parser.add_argument("--compute-ms", type=number(above=0), metavar="MS",
                        help="time to decode a token when all experts are in memory (default: measured on small models "
                             "of the same shape)")
    parser.add_argument("--again", action="store_true", help="measure again what was kept from before")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write a picture, advice.png, into DIR")
    parser.add_argument("--json", action="store_true", help="print the advice as one JSON object")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    from pyorch import pictures
    from pyorch.sidecars import packs

    check_readable([args.trace])
    memory = _given_memory(args.memory)
    if args.read_bandwidth:
        _rate(args.read_bandwidth)  # a mistake is found before anything is measured
    with packs.open_model(args.model) as model_map, Progress() as progress:
        if not model_map.layers:
            raise PyorchError(f"{args.model} is a dense model: it has no experts that could be read while it runs")
        if args.plot is not None:
            pictures.check(args.plot)
        advice = _advise(args, model_map, memory, progress)
    if args.json:
        print_json(advice)
    else:
        show(_parts(advice))
    return 0


def _advise(args: argparse.Namespace, model_map: ModelMap, memory: MemoryLimit | None, progress: Progress) -> Advice:
    from pyorch.advise.estimates import Estimator
    from pyorch.advise.gains import gains, worth_it
    from pyorch.advise.machine import Compute, Disk, Machine
    from pyorch.advise.memory import context_bytes, rest_for_experts
    from pyorch.advise.routing import routing_of
    from pyorch.llama.memory import memory_limit, physical_cores
    from pyorch.sidecars.beside import Sidecars
    from pyorch.sizes import as_option
    from pyorch.traces.file import Trace

    info = model_map.info
    budgets = _budgets(args, model_map)
    n_threads = given_settings(args, "budget").get("n_threads") or physical_cores()
    routing = routing_of(model_map, _trace(args, model_map, Trace))
    machine = Machine(model_map, n_threads, progress.update, args.again)
    disk = Disk(_rate(args.read_bandwidth), "given") if args.read_bandwidth else machine.disk()
    compute = machine.compute()
    if args.compute_ms is not None:
        faster = compute.decode_seconds / (args.compute_ms / 1000)
        compute = Compute(args.compute_ms / 1000, compute.prefill_seconds / faster, compute.start_seconds)
    memory = memory or memory_limit()
    n_context_bytes = context_bytes(model_map, args.ctx, n_threads)
    left = rest_for_experts(info, memory, n_context_bytes)
    estimator = Estimator(model_map, routing, compute, disk.bytes_per_second, args.prompt_tokens,
                          Sidecars(model_map).predictor)
    notes = []
    if left is None:
        notes.append(f"the model does not fit into the memory that is free: even the fewest experts need "
                     f"{_missing(model_map, memory, n_context_bytes)} more")
    budgets.append(as_option(left if left is not None else info.floor_bytes))
    estimates = []
    for n, budget in enumerate(budgets):
        progress.update(f"replaying a budget of {budget}", n, len(budgets) + 1)
        estimates.append(estimator.estimate(budget))
    progress.update("replaying with sidecars", len(budgets), len(budgets) + 1)
    found = gains(model_map, estimator, estimates[-1], compute, disk.bytes_per_second)
    commands = [gain.command for gain in worth_it(found, estimates[-1])]
    if not routing.observed:
        notes.append(f"for more than an assumption: pyorch profile {shlex.quote(args.model)} --data TEXT --states "
                     f"-o {shlex.quote(str(_default_trace(model_map)))}, then advise again")
    notes += [f"worth making: {command}" for command in commands]
    plot = None
    if args.plot is not None:
        from pyorch.advise.plot import draw

        ordered = sorted(estimates, key=lambda estimate: estimate.budget_bytes)
        plot = draw(ordered, 1 / compute.decode_seconds, estimates[-1].budget_bytes, args.plot)
    return Advice(
        model=model_map.path, arch=info.arch, n_threads=n_threads, disk=disk, compute=compute, memory=memory,
        n_ctx=args.ctx, context_bytes=n_context_bytes, auto_bytes=left, routing=routing.source,
        prompt_tokens=args.prompt_tokens, estimates=estimates, gains=found,
        command=_command(args, model_map, left), notes=notes, plot=plot,
    )


def _budgets(args: argparse.Namespace, model_map: ModelMap) -> list[str]:
    """Those that were asked for; without any, those of _SHARES that are not below the floor."""
    asked = listed(args, "budget")
    if asked:
        for budget in asked:
            budget.resolve(model_map.info)
        return list(map(str, asked))
    info = model_map.info
    return [f"{share}%" for share in _SHARES if share * info.slots_bytes // 100 >= info.floor_bytes]


def _trace(args: argparse.Namespace, model_map: ModelMap, read):
    """The trace that is named, or lies beside the model and is this model's."""
    from pyorch.errors import FormatError
    from pyorch.sidecars import container

    if args.trace is not None:
        return read(args.trace)
    path = _default_trace(model_map)
    if not path.is_file():
        return None
    try:
        trace = read(path)
    except FormatError:
        return None
    return trace if len(trace) and trace.header.fingerprint == container.fingerprint(model_map) else None


def _default_trace(model_map: ModelMap) -> Path:
    from pyorch.runtime.model_map import beside

    return beside(model_map.path, "trace")


def _given_memory(text: str | None) -> MemoryLimit | None:
    from pyorch.llama.memory import MemoryLimit
    from pyorch.sizes import Amount

    if text is None:
        return None
    try:
        n_bytes = Amount.parse(text).n_bytes or 0
    except ValueError:
        n_bytes = 0
    if n_bytes <= 0:
        raise PyorchError(f'--memory "{text}" is not understood: use a size such as 16GiB')
    return MemoryLimit("as given", n_bytes, n_bytes)


def _rate(text: str) -> float:
    from pyorch.cli.replay import parse_rate

    return parse_rate(text)


def _missing(model_map: ModelMap, memory: MemoryLimit, n_context_bytes: int) -> str:
    from pyorch.llama.memory import rest_bytes
    from pyorch.sizes import format_bytes

    left = rest_bytes(memory, model_map.info.dense_bytes, n_context_bytes)
    return format_bytes(model_map.info.floor_bytes - left, round_up=True)


def _command(args: argparse.Namespace, model_map: ModelMap, left: int | None) -> str:
    """The budget is named only where "auto" would take another: for a machine that is not this one."""
    from pyorch.sizes import as_option

    words = ["pyorch", "run", model_map.path, "--ctx", str(args.ctx)]
    if left is not None and args.memory is not None:
        words += ["--budget", as_option(left - left % (1 << 20))]
    words += ["-p", "TEXT"]
    return shlex.join(words)


def _parts(advice: Advice) -> list[str | Table | Facts]:
    from pyorch.sizes import MiB, format_bytes

    how = {"kept": "measured before", "measured": "measured now", "probe": "measured on a file beside the model",
           "given": "as given"}
    left = "too little for any expert"
    if advice.auto_bytes is not None:
        left = f"{format_bytes(advice.auto_bytes)} for experts"
    facts = [
        ("model", f"{advice.model} ({advice.arch})"),
        ("disk", f"{advice.disk.bytes_per_second / 1e9:.2f} GB/s ({how[advice.disk.how]})"),
        ("computing", f"{1 / advice.compute.decode_seconds:.1f} tok/s decoded, "
                      f"{1 / advice.compute.prefill_seconds:.0f} tok/s of a prompt, with all experts in memory, on "
                      f"{advice.n_threads} threads"),
        ("memory", f"{format_bytes(advice.memory.free_bytes)} free ({advice.memory.source}); a context of "
                   f"{advice.n_ctx} tokens needs {format_bytes(advice.context_bytes)}, which leaves {left}"),
        ("routing", advice.routing),
    ]
    rows = []
    for estimate, name in zip(advice.estimates, _names(advice)):
        rows.append((name, format_bytes(estimate.budget_bytes), f"{estimate.hit_rate:.1%}",
                     f"{estimate.decode_rate:.1f}", f"{estimate.first_token_seconds:.1f} s",
                     f"{estimate.bytes_per_token / MiB:.0f}", f"{estimate.stall:.0%}"))
    columns = ("budget", "memory", "hits", "tok/s", "first token", "MiB/token", "waiting")
    base = advice.estimates[-1].decode_rate
    columns_of_gains = ("sidecar", "is there", "at the last budget")
    gains = [(gain.sidecar, "yes" if gain.there else "no", _gain(gain, base)) for gain in advice.gains]
    reasons = [(gain.sidecar, f"{'lossy: ' if gain.lossy else ''}{gain.why}: {gain.command}") for gain in advice.gains]
    return [
        Facts(facts), "",
        Table(columns, rows, left=("budget",)), "",
        Table(columns_of_gains, gains, left=columns_of_gains), "",
        Facts(reasons), "",
        *[f"note: {note}" for note in advice.notes],
        *([f"picture: {advice.plot}"] if advice.plot is not None else []),
        f"run it with: {advice.command}",
    ]


def _names(advice: Advice) -> list[str]:
    asked = [estimate.budget for estimate in advice.estimates[:-1]]
    return [*asked, "auto" if advice.auto_bytes is not None else "least"]


def _gain(gain: Gain, base: float) -> str:
    if gain.decode_rate is None:
        return "not known"
    bound = "at most " if gain.at_most else ""
    return f"{bound}{gain.decode_rate:.1f} tok/s ({round(100 * (gain.decode_rate / base - 1)):+d}%)"
