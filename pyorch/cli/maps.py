"""`pyorch maps`: past iterations and requests for the predictors that search them, from a trace."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from pyorch.cli.options import add_command, print_json


@dataclass(frozen=True)
class Report:
    """What --json prints. n_tokens, n_trace_requests: of the trace; n_maps, n_requests: kept of them."""

    path: Path
    n_tokens: int
    n_maps: int
    capacity: int
    distance: int
    n_trace_requests: int
    n_requests: int
    request_capacity: int
    file_bytes: int


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    parser = add_command(
        subparsers, "maps", "collect past iterations and requests for predictions, from a trace",
        "pyorch maps olmoe.gguf olmoe.trace --capacity 2000",
    )
    parser.add_argument("model", metavar="MODEL.gguf")
    parser.add_argument("trace", type=Path, metavar="FILE.trace", help="what pyorch profile --router full recorded")
    parser.add_argument("--capacity", type=int, default=1000, metavar="N",
                        help="keep N iterations, the least redundant ones (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=100, metavar="N",
                        help="keep the counts of N requests (default: %(default)s)")
    parser.add_argument("--distance", type=int, default=3, metavar="D",
                        help="prefetch distance, in layers: of how many of them embeddings count for, in what is "
                             "redundant (default: %(default)s)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: MODEL.maps.gguf")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    import numpy as np

    from pyorch.sidecars import container
    from pyorch.cli.progress import Bar
    from pyorch.files import check_target
    from pyorch.runtime.model_map import ModelMap
    from pyorch.traces.expert_maps import maps_from_trace
    from pyorch.traces.file import Trace

    path = (args.output or container.default_path(args.model, "maps")).absolute()
    check_target(path)
    with ModelMap(args.model) as model_map:
        trace = Trace(args.trace)
        with Bar() as bar:
            maps = maps_from_trace(trace, model_map, args.capacity, args.distance, args.requests, bar.update)
        maps.write(path, model_map)
    report = Report(path, len(trace), maps.n_maps, maps.capacity, maps.distance,
                    len(np.unique(trace.records["request"])), maps.n_requests, maps.request_capacity,
                    path.stat().st_size)
    if args.json:
        print_json(report)
    else:
        print(_sentence(report))
    return 0


def _sentence(it: Report) -> str:
    from pyorch.sizes import format_bytes

    return (f"{it.path}: {it.n_maps} iterations of {it.n_tokens}, {it.n_requests} requests of {it.n_trace_requests}, "
            f"{format_bytes(it.file_bytes)}")
