"""`pyorch plan`: divide the memory for experts of a compressed pack between their forms."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from pyorch.cli.numbers import number, whole
from pyorch.cli.options import add_command, add_output_options, check_readable, print_json
from pyorch.cli.progress import Progress
from pyorch.cli.settings import add_settings, given_settings
from pyorch.cli.tables import Facts, Table, show
from pyorch.errors import PyorchError

DECODE_SECONDS = 1.0
PROBE_SECONDS = 2.0

_POOL_NAMES = ("full", "compressed", "sm", "e")
_PLOTTED = tuple(n / 20 for n in range(2, 21))  # budgets, as shares of all experts


@dataclass(frozen=True)
class Row:
    """Of one division. shares: of the budget for F, C, S and E; hits: of a token's experts in a layer those in each
    pool and in none, as expected; wait_ms: that a token waits for, as expected. played_hits, played_wait_ms: the same
    of the second half of the trace, played through pools of these sizes; None where that was not asked for."""

    name: str
    shares: tuple[float, ...]
    compressed: bool
    hits: tuple[float, ...]
    wait_ms: float
    played_hits: tuple[float, ...] | None
    played_wait_ms: float | None


@dataclass(frozen=True)
class Report:
    """What --json prints. Sizes in bytes; seconds: that planning took."""

    model: str
    trace: Path | None
    routing: str
    plan: Path
    budget: int
    pools: str
    n_tokens: int
    bytes_per_second: float
    decoded_per_second: float
    n_workers: int
    n_splits: int
    n_evaluated: int
    seconds: float
    rows: list[Row]


def add_parser(subparsers: argparse._SubParsersAction, summary: str) -> argparse.ArgumentParser:
    parser = add_command(
        subparsers, "plan", summary,
        "pyorch pack olmoe.gguf --codec auto\n"
        "  pyorch profile olmoe.gguf --data prose.txt -o olmoe.trace\n"
        "  pyorch plan olmoe.gguf --trace olmoe.trace --budget 40%",
    )
    parser.description += (
        " Experts can be kept whole (F), compressed (C), as the packed planes of signs and mantissas (S) or of "
        "exponents (E) alone: the smaller the form, the more experts, and the more is to be done when one is needed. "
        "The command finds the shares of the budget with which a token waits least, by how unevenly experts are used "
        "and how fast this machine reads and decodes, and writes them beside the model, where every command finds "
        "them. By expectation that gains; a model that ran faster than with whole experts alone was not seen yet."
    )
    parser.add_argument("model", metavar="MODEL.gguf", help="the model, a GGUF file with a compressed pack beside it")
    parser.add_argument("--trace", type=Path, metavar="FILE.trace",
                        help="a trace that pyorch profile recorded (default: the requests in MODEL.maps.gguf; without "
                             "them all experts count as used alike)")
    add_settings(parser, "budget", defaults={"budget": "none, it must be given"})
    parser.add_argument("--forms", default="F,C,S,E", metavar="F,C,S,E",
                        help="the forms that may be kept (default: F,C,S,E)")
    parser.add_argument("--step", type=number(most=1, above=0), default=0.05, metavar="SHARE",
                        help="try shares in steps of this (default: 0.05)")
    parser.add_argument("--read-bandwidth", metavar="RATE",
                        help="speed of the disk, such as 1GB/s (default: measured on the model's file, or before)")
    parser.add_argument("--decode-bandwidth", metavar="RATE",
                        help="bytes of matrices that one thread recovers in a second (default: measured on the pack)")
    parser.add_argument("--workers", type=whole(1, 512), metavar="N",
                        help="threads that decode (default: as many as an engine has)")
    parser.add_argument("--check", action="store_true",
                        help="plan by the first half of the trace, and play the second half through the pools")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="also draw a picture into this directory")
    add_output_options(parser, "MODEL.plan.json beside the model")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    from time import perf_counter

    import numpy as np

    from pyorch.files import check_target
    from pyorch.planning.makespan import POOLS
    from pyorch.settings.budget import AUTO
    from pyorch.sidecars import packed_sizes, packs, plan as plans

    budget_setting = given_settings(args).get("budget", AUTO)
    if budget_setting.amount is None:
        raise PyorchError("a plan is for a size or a share of the experts: give --budget, such as 40%")
    pools = args.forms.replace(",", "").upper()
    if not pools or set(pools) - set(POOLS) or len(set(pools)) < len(pools):
        raise PyorchError(f'forms "{args.forms}" are not understood: name some of {", ".join(POOLS)}, each once')
    output = args.output or plans.default_path(args.model)
    check_target(output.absolute())
    check_readable([args.trace])
    if args.check and args.trace is None:
        raise PyorchError("--check plays a trace: name one with --trace")
    with packs.open_model(args.model) as model_map, Progress() as progress:
        packed_sizes.require(model_map)
        budget = budget_setting.resolve(model_map.info)
        experts = None if args.trace is None else _experts(args.trace, model_map)
        planned_by = experts if experts is None or not args.check else experts[: len(experts) // 2]
        inclusion, routing = _inclusion(planned_by, model_map)
        if args.trace is not None:
            routing = f"{len(planned_by)} tokens of {args.trace}"
        progress.update("measuring reading and decoding", 0, 0)
        machine = _machine(args, model_map)
        begin = perf_counter()
        planner = plans.new_planner(model_map, inclusion, machine)
        reserved = plans.Reserve.of(model_map).bytes(budget)
        planned = planner.plan(budget, pools, args.step, reserved)
        seconds = perf_counter() - begin
        best = planned.best
        splits = {"plan": best, **_others(planner, planned, budget - reserved, pools)}
        played = None
        if args.check:
            progress.update("playing the trace", 0, 0)
            played = {name: _played(experts, split, planner) for name, split in splits.items() if split.compressed}
        rows = [_row(name, split, planner, (played or {}).get(name)) for name, split in splits.items()]
        n_tokens = 0 if planned_by is None else len(planned_by)
        plans.write_plan(output, plans.Plan(
            budget, pools, args.step, best.shares, best.compressed, rows[0].hits, rows[0].wait_ms, n_tokens, machine,
            tuple(map(tuple, np.asarray(inclusion).tolist())),
        ), model_map)
        picture = None if args.plot is None else _draw(args.plot, planner, planned, model_map, pools, args.step)
    report = Report(args.model, args.trace, routing, output, budget, pools, n_tokens, machine.bytes_per_second,
                    machine.decoded_per_second, machine.n_workers, planned.n_splits, planned.n_evaluated, seconds, rows)
    if args.json:
        print_json(report)
    else:
        show([*_parts(report, model_map.info), *([str(picture)] if picture else [])])
    return 0


def _experts(path: Path, model_map):
    """integer[n_tokens, n_layers, n_used], of a trace, in order: the layers that a decode passes."""
    import numpy as np

    from pyorch.errors import FormatError
    from pyorch.traces.file import Trace
    from pyorch.traces.recording import Recording

    recording = Recording.from_trace(Trace(path), model_map)
    wanted = [layer.il for layer in model_map.decoded_layers]
    if missing := sorted(set(wanted) - set(recording.layers)):
        raise FormatError(f"{path} has no layer {missing[0]}: record it with pyorch profile")
    experts = np.asarray(recording.experts)[:, [recording.layers.index(il) for il in wanted]]
    n_used = model_map.info.n_expert_used
    if experts.shape[2] != n_used:
        raise FormatError(f"{path} is damaged: it has {experts.shape[2]} experts of a token in a layer, not {n_used}")
    for layer, last in zip(model_map.decoded_layers, experts.max(axis=(0, 2))):
        if last >= layer.n_expert:
            raise FormatError(f"{path} is damaged: it names expert {last} of {layer.n_expert} in layer {layer.il}")
    return experts


def _inclusion(experts, model_map):
    """float64[n_layers, n_expert], by rank: of a trace, or of what lies beside the model, else even; and which."""
    from pyorch.planning.ranks import even_inclusion, inclusion_by_rank
    from pyorch.sidecars import container
    from pyorch.sidecars.beside import Sidecars

    n_experts = [layer.n_expert for layer in model_map.decoded_layers]
    if experts is not None:
        return inclusion_by_rank(experts, max(n_experts)), "of a trace"
    kept = Sidecars(model_map).inclusion()
    if kept is not None:
        return kept, f"the requests in {container.default_path(model_map.path, 'maps')}"
    return even_inclusion(n_experts, model_map.info.n_expert_used), "unknown: all experts count as used alike"


def _machine(args: argparse.Namespace, model_map):
    from pyorch.cli.replay import parse_rate
    from pyorch.errors import FormatError
    from pyorch.runtime.disk import kept_bandwidth, measure_bandwidth
    from pyorch.runtime.recovery import measure_recovery, recovery_threads
    from pyorch.sidecars.plan import Machine

    if args.read_bandwidth:
        reading = parse_rate(args.read_bandwidth)
    else:
        reading = (kept_bandwidth(model_map) or measure_bandwidth(model_map, PROBE_SECONDS)).bytes_per_second
    decoding = parse_rate(args.decode_bandwidth, "decode bandwidth") if args.decode_bandwidth else (
        measure_recovery(model_map, DECODE_SECONDS))
    if decoding is None:
        raise FormatError(f"{model_map.pack} is damaged: none of its experts can be decoded")
    return Machine(reading, decoding, args.workers or recovery_threads())


def _others(planner, planned, budget: int, pools: str) -> dict:
    """What a plan is compared with."""
    others = {"full only": planner.cost((1, 0, 0, 0), budget), "compressed only": planner.cost((0, 1, 0, 0), budget),
              "signs and mantissas only": planner.cost((0, 0, 1, 0), budget)}
    if "E" in pools:
        others["exponents only"] = planner.cost((0, 0, 0, 1), budget)
    if planned.plain is not None and planned.best is not planned.plain:
        others["without a pack"] = planned.plain
    if planned.best is not planned.packed_best:
        others["best with the pack"] = planned.packed_best
    return others


def _played(experts, split, planner) -> tuple[tuple[float, ...], float]:
    """Mean hits by pool, and milliseconds that a token waited by Algorithm 3: of the second half, after the first."""
    from pyorch.planning.makespan import makespan
    from pyorch.planning.simulation import simulate

    half = len(experts) // 2
    hits = simulate(experts, planner.inclusion.shape[1], split.capacities, n_warm=half)
    waits = sum(makespan(layer.delays, hits[:, i]).mean() for i, layer in enumerate(planner.layers))
    return tuple(float(n) for n in hits.mean(axis=(0, 1))), 1000 * float(waits)


def _row(name: str, split, planner, played) -> Row:
    hits = tuple(float(n) for n in split.hits.mean(axis=0))
    return Row(name, split.shares, split.compressed, hits, 1000 * split.makespan, *(played or (None, None)))


def _draw(directory: Path, planner, planned, model_map, pools: str, step: float) -> Path:
    from pyorch.planning.plot import draw
    from pyorch.sidecars.plan import Reserve

    reserve = Reserve.of(model_map)
    costs: dict[str, list[float]] = {}
    info = model_map.info
    budgets = [share for share in _PLOTTED if int(share * info.slots_bytes) >= info.floor_bytes]
    for share in budgets:
        at = int(share * info.slots_bytes)
        reserved = reserve.bytes(at)
        found = planner.plan(at, pools, step, reserved)
        splits = {"plan": found.best, **_others(planner, found, at - reserved, pools)}
        splits.pop("best with the pack", None)
        if found.plain is not None:
            splits.setdefault("without a pack", found.plain)
        for name, split in splits.items():
            costs.setdefault(name, []).append(1000 * split.makespan)
    return draw(planner.inclusion, planned.best.capacities, budgets, costs, directory)


def _decoders(n: int) -> str:
    return "1 thread decodes" if n == 1 else f"{n} threads decode"


def _ms(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def _parts(report: Report, info) -> list[str | Table | Facts]:
    from pyorch.sizes import format_bytes

    best = report.rows[0]
    how = "compressed experts" if best.compressed else "experts as the model has them: compression does not pay"
    played = any(row.played_hits is not None for row in report.rows)
    columns = ("", *(f"{name} %" for name in _POOL_NAMES), *_POOL_NAMES, "missed", "wait ms",
               *(("played: full", "in part", "missed", "wait ms") if played else ()))
    rows = []
    for row in report.rows:
        cells = [row.name, *(f"{100 * share:.0f}" for share in row.shares), *(f"{n:.2f}" for n in row.hits),
                 _ms(row.wait_ms)]
        if played:
            hits = row.played_hits
            cells += ["-"] * 4 if hits is None else [
                f"{hits[0]:.2f}", f"{sum(hits[1:-1]):.2f}", f"{hits[-1]:.2f}", _ms(row.played_wait_ms)]
        rows.append(cells)
    return [
        Facts([
            ("budget", f"{format_bytes(report.budget)} ({report.budget / info.slots_bytes:.0%} of the experts)"),
            ("routing", report.routing),
            ("machine", f"reads {report.bytes_per_second / 1e9:.3g} GB/s; {_decoders(report.n_workers)} "
                        f"{report.decoded_per_second / 1e9:.3g} GB/s each"),
            ("search", f"{report.n_splits} divisions, {report.n_evaluated} computed to the end, "
                       f"{report.seconds:.2f} s"),
        ]),
        "",
        Table(columns, rows, left=("",), title="shares of the budget; of a token's experts in a layer, those in each "
                                               "form; what a token waits for"),
        "",
        f"{report.plan}: {how}",
    ]
