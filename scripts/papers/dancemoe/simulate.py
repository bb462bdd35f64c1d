"""A cluster in simulated time, with placements, arrivals, networks and sizes of choice (DanceMoE, section IV)."""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from time import perf_counter

from pyorch import pictures
from pyorch.cli.numbers import number, whole
from pyorch.cli.options import check_readable, print_json
from pyorch.cli.progress import Progress
from pyorch.cli.tables import show
from pyorch.cluster.config import read_cluster
from pyorch.cluster.costs import MOST, CostsFile, ServerCosts, read_costs
from pyorch.cluster.placement.placement import read_placement
from pyorch.errors import FormatError, PyorchError
from pyorch.files import check_no_source, check_target, write_text
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.rows import ROW_BYTES
from pyorch.traces.file import Trace
from scripts.papers import program
from scripts.papers.dancemoe import scenario
from scripts.papers.dancemoe.baselines import ALGORITHMS
from scripts.papers.dancemoe.simulated_costs import Sizes
from scripts.papers.dancemoe.simulation_report import MEGABIT, Report, csv_of, draw_report, parts_of, row_of
from scripts.papers.dancemoe.simulator import Settings
from scripts.papers.dancemoe.workload import Arrivals, read_requests

EXPERT_BYTES = 8 << 20  # of an expert if no model and no cost gives its size
MAX_REQUESTS = 10_000_000  # of a simulation
N_EMBD = 2048  # if neither the model nor the trace gives it


def main(argv: list[str] | None = None) -> int:
    parser = program.parser_of(
        "scripts.papers.dancemoe.simulate", "simulate a cluster: placements, migration, networks and sizes",
        "--cluster cluster.toml --trace clinic=clinic.trace lab=lab.trace \\\n"
        "      --algorithm dance,eplb --migration on,off --shift clinic=lab.trace lab=clinic.trace",
    )
    parser.description += (
        " Nothing is computed or sent: requests arrive at random, their tokens use experts as in the traces, and a "
        "linear model gives the times of computing, messages and reads. Options with commas are lists: each "
        "combination is simulated, with the same requests."
    )
    parser.add_argument("--cluster", type=Path, required=True, metavar="FILE.toml",
                        help="the servers, their memory and the network (docs/reference/cluster.md describes it)")
    parser.add_argument("--trace", nargs="+", action="extend", required=True, metavar="SERVER=FILE",
                        help="a trace of the requests of a server's users, by pyorch profile; one for each server")
    parser.add_argument("--algorithm", default="dance", metavar="NAME,...",
                        help=f"algorithms that place experts: {', '.join(ALGORITHMS)} (default: dance)")
    parser.add_argument("--placement", type=Path, metavar="FILE.json",
                        help="begin with a placement by pyorch place or dancemoe.place (default: placed by the traces)")
    parser.add_argument("--migration", default="on", metavar="on,off",
                        help="on: at intervals, experts are placed by recent uses, and move if that pays "
                             "(default: on)")
    parser.add_argument("--interval", type=number(above=0), default=300.0, metavar="S",
                        help="seconds between two such placements (default: 300)")
    parser.add_argument("--arrivals", default="poisson:0.1", metavar="poisson:RATE,...",
                        help="requests per second of each server, or seconds between two: poisson:10s (default: "
                             "poisson:0.1)")
    parser.add_argument("--duration", type=number(above=0, most=1e8), default=1800.0, metavar="S",
                        help="seconds in which requests arrive; all of them are answered (default: 1800)")
    parser.add_argument("--shift", nargs="+", action="extend", default=[], metavar="SERVER=FILE",
                        help="from --shift-at on, this server gets the requests of another trace; rotate: each server "
                             "gets the requests of the next server")
    parser.add_argument("--shift-at", type=number(least=0), metavar="S",
                        help="when the workload changes (default: half of --duration)")
    parser.add_argument("--routing", choices=("replay", "fitted"), default="replay",
                        help="replay: requests as they were recorded, one after another; fitted: drawn, with recorded "
                             "lengths, from distributions fitted to the trace (default: replay)")
    parser.add_argument("--output-tokens", type=whole(0), metavar="N",
                        help="tokens at the end of each recorded request that are decoded one by one (default: as "
                             "recorded, or 20 if the trace records none)")
    parser.add_argument("--servers", metavar="N,...",
                        help="numbers of servers; larger clusters repeat the cluster's servers in turn (default: the "
                             "cluster's)")
    parser.add_argument("--bandwidth", metavar="MBIT,...",
                        help="megabits per second of every link (default: the cluster's)")
    parser.add_argument("--places", type=whole(1, 4096), default=4, metavar="N",
                        help="requests of a server that run together, a step at a time (default: 4)")
    parser.add_argument("--step-tokens", type=whole(1), default=512, metavar="N",
                        help="most tokens of a step (default: 512)")
    parser.add_argument("--disk-slice", type=number(least=0), default=0.0, metavar="S",
                        help="disks have a quota in slices of S seconds, as in control groups: after a pause a "
                             "disk reads a slice's bytes at once (default: no quota)")
    parser.add_argument("--costs", type=Path, metavar="FILE.json",
                        help="costs of computing and messages (the README in this program's folder describes the file)")
    defaults = ", ".join(f"{name} {value:g}" for name, value in vars(ServerCosts()).items())
    parser.add_argument("--cost", nargs="+", action="extend", default=[], metavar="NAME=VALUE",
                        help=f"a cost of every server, in seconds: {defaults}; in bytes: expert_bytes (default: the "
                             f"model's, or {EXPERT_BYTES} without a model), request_bytes of a token for a peer, "
                             f"reply_bytes of each of its experts (4 for each number in the model's embedding), "
                             f"message_bytes {Sizes().message:g}")
    parser.add_argument("--seed", type=whole(0), default=0, help="seed of all random draws (default: 0)")
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object")
    parser.add_argument("--csv", type=Path, metavar="FILE",
                        help="also write latency and local ratio of each server over time")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="also draw pictures into this directory")
    return program.run(parser, run, argv)


def run(args: argparse.Namespace) -> int:
    cluster = read_cluster(args.cluster)
    shift = _shift(args)
    cases = _cases(args, len(cluster.servers))
    check_readable([args.placement])
    if args.csv is not None:
        check_target(args.csv.absolute())
        traces = [word.partition("=")[2] for word in args.trace]
        check_no_source(args.csv, filter(None, [args.cluster, args.placement, args.costs, *traces]),
                        "a file that is read")
    costs = with_costs(CostsFile() if args.costs is None else read_costs(args.costs), _given_costs(args.cost))
    costs.check_names(cluster.names)
    if args.plot is not None:
        pictures.check(args.plot)
    workload, sizes, placement = _read(args, cluster, costs, shift)
    settings = Settings(args.places, args.step_tokens, args.interval, disk_slice=args.disk_slice)
    begin = perf_counter()
    outcomes = []
    with Progress() as progress:
        for i, case in enumerate(cases):
            progress.update(f"simulating {case['algorithm']}, {case['n_servers']} servers", i, len(cases))
            outcomes.append(scenario.run(cluster, costs, sizes, workload, scenario.Case(placement=placement, **case),
                                         args.duration, settings, args.seed))
    rows = [row_of(case, outcome, cluster, shift) for case, outcome in zip(cases, outcomes)]
    report = Report(args.cluster, args.duration, math.nan if shift is None else shift, args.interval, args.seed,
                    args.routing, perf_counter() - begin, rows)
    if args.csv is not None:
        write_text(args.csv, csv_of(rows))
    drawn = [] if args.plot is None else draw_report(report, args.plot, shift)
    if args.json:
        print_json(report)
    else:
        show([*parts_of(report), *map(str, drawn)])
    return 0


def _shift(args: argparse.Namespace) -> float | None:
    """Returns the time at which the workload changes. None: never."""
    if not args.shift:
        if args.shift_at is not None:
            raise PyorchError("--shift-at is the time of a change: name the later workload with --shift")
        return None
    shift = args.duration / 2 if args.shift_at is None else args.shift_at
    if shift > args.duration:
        raise PyorchError(f"--shift-at {shift:g} is after the end: no request arrives after {args.duration:g} seconds")
    return shift


def _cases(args: argparse.Namespace, n_servers: int) -> list[dict]:
    """Returns the combinations, as keywords of scenario.Case."""
    def algorithm(text: str) -> str:
        if text not in ALGORITHMS:
            raise PyorchError(f'algorithm "{text}" is not known: use {", ".join(ALGORITHMS)}')
        return text

    def migration(text: str) -> bool:
        if text not in ("on", "off"):
            raise PyorchError(f'migration "{text}" is neither on nor off')
        return text == "on"

    servers = _listed(args.servers, "--servers", _number(whole(1, 4096), "--servers")) or [n_servers]
    if args.placement is not None and servers != [n_servers]:
        raise PyorchError(f"--placement is for the {n_servers} servers of the cluster: leave --servers out")
    bandwidths = _listed(args.bandwidth, "--bandwidth", _number(number(above=0, most=1e9), "--bandwidth"))
    names = ("algorithm", "migration", "n_servers", "bytes_per_second", "arrivals")
    cases = [dict(zip(names, values)) for values in itertools.product(
        _listed(args.algorithm, "--algorithm", algorithm), _listed(args.migration, "--migration", migration), servers,
        [megabits * MEGABIT for megabits in bandwidths] or [None],
        _listed(args.arrivals, "--arrivals", Arrivals.parse),
    )]
    for case in cases:
        if case["arrivals"].rate * args.duration * case["n_servers"] > MAX_REQUESTS:
            raise PyorchError(f"--arrivals {case['arrivals'].text} for {args.duration:g} seconds at "
                              f"{case['n_servers']} servers are more than {MAX_REQUESTS} requests")
    return cases


def _listed(text: str | None, option: str, read: Callable) -> list:
    if text is None:
        return []
    values = [read(part.strip()) for part in text.split(",")]
    if len(set(values)) < len(values):
        raise PyorchError(f"{option} {text} names the same twice")
    return values


def _number(read: Callable, option: str) -> Callable:
    def checked(text: str):
        try:
            return read(text)
        except argparse.ArgumentTypeError as error:
            raise PyorchError(f"{option}: {error}") from None
    return checked


def _given_costs(texts: list[str]) -> dict[str, float]:
    costs = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            costs[name] = number(least=0, most=MOST)(value)
        except argparse.ArgumentTypeError:
            raise PyorchError(f'--cost "{text}" is not of the form NAME=VALUE, with a value from 0 to '
                              f'{MOST:g}') from None
    return costs


def with_costs(file: CostsFile, settings: Mapping[str, float]) -> CostsFile:
    """Returns costs with these coefficients and sizes for all servers. PyorchError: a name is not known."""
    known = {field.name for field in fields(ServerCosts)}
    sizes = [f"{field.name}_bytes" for field in fields(Sizes)]
    for name in settings:
        if name not in known and name not in sizes:
            raise PyorchError(f'there is no cost "{name}": {", ".join([*sorted(known), *sizes])} are known')
    common = {name: value for name, value in settings.items() if name in known}
    return replace(
        file, server=replace(file.server, **common),
        servers={name: replace(server, **common) for name, server in file.servers.items()},
        simulated={**file.simulated, **{name: value for name, value in settings.items() if name in sizes}})


def _read(args: argparse.Namespace, cluster, costs, shift: float | None):
    """Returns the workload, sizes that are all known, and the placement or None."""
    rotate = args.shift == ["rotate"]
    paths = _by_server(args.trace, "--trace", cluster)
    for name in cluster.names:
        if name not in paths:
            raise PyorchError(f"server {name} has no trace: give one with --trace {name}=FILE")
    later = paths | ({} if rotate else _by_server(args.shift, "--shift", cluster))
    traces = {path: Trace(path) for path in dict.fromkeys([*paths.values(), *later.values()])}
    first = next(iter(traces.values()))
    for trace in traces.values():
        for field in ("fingerprint", "layers", "n_expert", "n_expert_used"):
            if getattr(trace.header, field) != getattr(first.header, field):
                raise FormatError(f"{trace.path} was recorded with another model than {first.path}: use traces "
                                  "of one model")
    layers, n_experts = first.header.layers, (first.header.n_expert,) * len(first.header.layers)
    expert_bytes: float | tuple[float, ...] = float(EXPERT_BYTES)
    placement = None
    if cluster.model is not None:
        with ModelMap(cluster.model) as model_map:
            first.check(model_map, decoded=True)
            n_experts = tuple(layer.n_expert for layer in model_map.decoded_layers)
            layers = tuple(layer.il for layer in model_map.decoded_layers)
            expert_bytes = tuple(float(layer.slot_bytes) for layer in model_map.decoded_layers)
            if args.placement is not None:
                placement = read_placement(args.placement, model_map)
                if placement.servers != cluster.names:
                    raise PyorchError(f"{args.placement} is for the servers {', '.join(placement.servers)}, not for "
                                      f"{', '.join(cluster.names)}: place again")
    elif args.placement is not None:
        raise PyorchError(f"{cluster.path} names no model, which --placement needs")
    columns = [first.layer_index(il) for il in layers]
    recorded = {path: read_requests(trace, args.output_tokens).of_layers(columns) for path, trace in traces.items()}
    names = cluster.names
    of_servers = tuple(recorded[paths[name]] for name in names)
    of_later = None if shift is None else of_servers[1:] + of_servers[:1] if rotate else tuple(
        recorded[later[name]] for name in names)
    workload = scenario.Workload(of_servers, layers, n_experts, of_later, math.inf if shift is None else shift,
                                 args.routing)
    row = float(ROW_BYTES[cluster.rows] * (first.header.n_embd or N_EMBD))
    return workload, Sizes.of(costs).or_of(expert_bytes, row), placement


def _by_server(texts: list[str], option: str, cluster) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not equals or not path:
            raise PyorchError(f'{option} "{text}" is not of the form SERVER=FILE')
        cluster.index(name)
        if name in files:
            raise PyorchError(f"{option} names server {name} twice: it has one trace")
        files[name] = Path(path)
    return files


if __name__ == "__main__":
    sys.exit(main())
