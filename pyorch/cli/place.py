"""`pyorch place`: assigns experts to the servers of a cluster."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from pyorch.cli.options import add_force, answer, check_output, check_readable
from pyorch.cli.tables import Facts, Table
from pyorch.errors import PyorchError
from pyorch.sizes import format_bytes

if TYPE_CHECKING:
    import numpy as np

    from pyorch.cluster.config import Cluster
    from pyorch.cluster.placement.placement import Placement
    from pyorch.cluster.placement.problem import Problem

EXAMPLE = """pyorch profile olmoe.gguf --data of-the-clinic.txt -o clinic.trace
  pyorch profile olmoe.gguf --data of-the-lab.txt -o lab.trace
  pyorch place --cluster cluster.toml --trace clinic=clinic.trace lab=lab.trace -o plan.json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description += (
        " A server computes with the experts in its memory and asks other servers for the rest. The more of its users' "
        "activations are local, the less crosses the network. The command takes the activations from traces of each "
        "server's requests, or from the counts of a running cluster, and the memory of servers from cluster.toml. "
        "Every expert gets a server."
    )
    parser.add_argument("--cluster", type=Path, required=True, metavar="FILE.toml",
                        help="the servers, their memory, and the model (docs/reference/cluster.md describes it)")
    parser.add_argument("--trace", nargs="+", action="extend", default=[], metavar="SERVER=FILE",
                        help="a trace of the requests to a server, by pyorch profile; several are added up, and a "
                             "server without one has no users of its own")
    parser.add_argument("--counts", type=Path, metavar="FILE.json",
                        help="in place of traces, activations that a running cluster counted; busier servers weigh "
                             "more")
    parser.add_argument("--partial", action="store_true",
                        help="if memory does not hold all experts, place as many as fit; the others are read from "
                             "disk")
    parser.add_argument("--check", action="store_true",
                        help="place by the first half of each trace, and show the local ratio of the second half too")
    parser.add_argument("--explain", action="store_true", help="show each layer of each server")
    parser.add_argument("--save-counts", type=Path, metavar="FILE.json",
                        help="also write the counts of the traces, for --counts")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the placement to write")
    add_force(parser)
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")


@dataclass(frozen=True)
class Placed:
    """A placement, and the seconds that it took. checked: frequencies of the second halves of the traces."""

    cluster: Cluster
    problem: Problem
    placement: Placement
    checked: np.ndarray | None
    seconds: float


def run(args: argparse.Namespace) -> int:
    from pyorch.cluster.placement.dance import place

    report(args, decide(args, place))
    return 0


def decide(args: argparse.Namespace, place: Callable[[Problem, bool], Placement]) -> Placed:
    """Writes the placement that place() makes of a problem.

    Raises:
        PyorchError: The options contradict each other, or there is no placement.
    """
    from pyorch.cluster.activations import KIND as COUNTS
    from pyorch.cluster.activations import read_counts, write_counts
    from pyorch.cluster.config import read_cluster
    from pyorch.cluster.placement.placement import KIND as PLACEMENT
    from pyorch.cluster.placement.placement import write_placement
    from pyorch.cluster.placement.problem import Problem
    from pyorch.runtime.model_map import ModelMap
    from pyorch.sidecars import json_file

    if bool(args.trace) == (args.counts is not None):
        raise PyorchError("who activates what is read from --trace SERVER=FILE or from --counts FILE.json: give one of "
                          "the two")
    if args.counts is not None and (args.check or args.save_counts):
        raise PyorchError("--check and --save-counts need traces: give --trace instead of --counts")
    cluster = read_cluster(args.cluster)
    files = _by_server(args.trace, cluster)
    sources = [path for paths in files.values() for path in paths]
    check_readable([*sources, args.counts])
    targets = {kind: target for kind, target in ((PLACEMENT, args.output), (COUNTS, args.save_counts)) if target}
    if len({target.absolute() for target in targets.values()}) < len(targets):
        raise PyorchError(f"{args.output} cannot hold both the placement and the counts: name another file for one")
    with ModelMap(cluster.required_model) as model_map:
        for kind, target in targets.items():
            check_output(target, cluster.required_model, [args.cluster, *sources, args.counts], force=args.force,
                         is_own=partial(json_file.is_written_for, kind=kind))
        checked = None
        if args.counts is not None:
            activations = read_counts(args.counts, model_map)
            for name in activations.servers:
                cluster.index(name)
            frequencies = activations.of(cluster.names)
        else:
            counted, other = _counted(files, model_map, args.check)
            frequencies = counted.shares().of(cluster.names)
            checked = None if other is None else other.shares().of(cluster.names)
        problem = Problem.of_model(cluster, model_map, frequencies)
        begin = perf_counter()
        placement = place(problem, args.partial)
        seconds = perf_counter() - begin
        if args.save_counts:
            write_counts(args.save_counts, counted if other is None else counted + other, model_map)
        write_placement(args.output, placement, model_map)
    return Placed(cluster, problem, placement, checked, seconds)


def report(args: argparse.Namespace, placed: Placed) -> None:
    found = _report(args, placed)
    answer(args, found, lambda: _parts(found, args.explain))


def _by_server(texts: list[str], cluster) -> dict[str, list[Path]]:
    files: dict[str, list[Path]] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not equals or not path:
            raise PyorchError(f'--trace "{text}" is not of the form SERVER=FILE')
        cluster.index(name)
        files.setdefault(name, []).append(Path(path))
    return files


def _counted(files: dict[str, list[Path]], model_map, check: bool):
    """Returns activations to place by, and activations of the halves that are kept for a check."""
    from pyorch.cluster.activations import count_traces
    from pyorch.traces.file import Trace

    traces = {name: [Trace(path) for path in paths] for name, paths in files.items()}
    if not check:
        return count_traces(traces, model_map), None
    return count_traces(traces, model_map, (0.0, 0.5)), count_traces(traces, model_map, (0.5, 1.0))


def _report(args: argparse.Namespace, placed: Placed) -> dict[str, Any]:
    """Returns the object that --json prints. Sizes are in bytes; seconds: the time of placing.

    remote: activations computed on another server (DanceMoE, eq. 2), as a share of all. For each server: memory, the
    budget of experts; used, the bytes of its experts; n_only, experts that no other server has; local_ratio, the share
    of its users' activations that it computes itself; checked_ratio, the same for the other halves of the traces.
    """
    problem, placement, checked = placed.problem, placed.placement, placed.checked
    held = placement.held
    n_held, n_only = held.sum(axis=2), (held & (placement.copies == 1)).sum(axis=(1, 2))
    ratios, of_server = (ratio(problem.frequencies) for ratio in (placement.local_ratio, placement.server_ratio))
    of_checked = None if checked is None else placement.server_ratio(checked)
    servers = [
        {
            "name": server.name, "n_devices": server.n_devices, "memory": int(problem.server_bytes[i]),
            "used": int(n_held[i] @ problem.sizes), "n_experts": int(n_held[i].sum()), "n_only": int(n_only[i]),
            "local_ratio": float(of_server[i]), "checked_ratio": None if of_checked is None else float(of_checked[i]),
            "layers": [{"il": il, "n_experts": int(n), "local_ratio": float(ratio)}
                       for il, n, ratio in zip(problem.layers, n_held[i], ratios[i])],
        } for i, server in enumerate(placed.cluster.servers)
    ]
    local = placement.total_ratio(problem.frequencies)
    return {
        "model": placed.cluster.required_model, "plan": args.output, "algorithm": placement.algorithm,
        "n_experts": int(sum(problem.n_experts)), "n_uncovered": placement.n_uncovered,
        "expert_bytes": problem.experts_bytes, "memory": int(problem.device_bytes.sum()), "local_ratio": local,
        "checked_ratio": None if checked is None else placement.total_ratio(checked), "remote": 1 - local,
        "seconds": placed.seconds, "servers": servers,
    }


def _parts(report: dict[str, Any], explain: bool) -> list[str | Table | Facts]:
    checked = report["checked_ratio"] is not None
    columns = ("server", "devices", "memory", "used", "experts", "only here", "local", *(["checked"] * checked))
    rows = [
        (row["name"], str(row["n_devices"]), format_bytes(row["memory"]), format_bytes(row["used"]),
         str(row["n_experts"]), str(row["n_only"]), _percent(row["local_ratio"]),
         *((_percent(row["checked_ratio"]),) if checked else ()))
        for row in report["servers"]
    ]
    uncovered = f"; {report['n_uncovered']} of them on no server" if report["n_uncovered"] else ""
    halves = f"; {_percent(report['checked_ratio'])} of those in the second halves" if checked else ""
    parts: list[str | Table | Facts] = [
        Facts([
            ("model", f"{report['model']}: {report['n_experts']} experts, {format_bytes(report['expert_bytes'])}"),
            ("servers", f"{len(rows)}, with memory for {report['memory'] / report['expert_bytes']:.2f} times all "
                        f"experts{uncovered}"),
            ("algorithm", f"{report['algorithm']}, {report['seconds']:.2f} s"),
            ("local", f"{_percent(report['local_ratio'])} of the activations{halves}"),
        ]),
        "",
        "only here  experts that no other server holds",
        "local      share of the activations of a server's users that the server computes itself",
        *(["checked    the same of the second halves of the traces"] if checked else []),
        "",
        Table(columns, rows, left=("server",)),
        "",
    ]
    if explain:
        layers = zip(*(server["layers"] for server in report["servers"]))
        cells = [(str(of[0]["il"]), *(f"{one['n_experts']:3} {_percent(one['local_ratio']):>6}" for one in of))
                 for of in layers]
        parts += ["experts of a layer on each server, and the share of the layer's activations that it computes itself",
                  "", Table(("layer", *(row[0] for row in rows)), cells), ""]
    return [*parts, str(report["plan"])]


def _percent(ratio: float) -> str:
    return "-" if math.isnan(ratio) else f"{100 * ratio:.1f}%"
