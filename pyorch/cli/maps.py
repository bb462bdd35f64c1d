"""`pyorch maps`: past tokens and requests for the predictors that search them, from a trace."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from pyorch.cli.options import add_command, add_model, add_output_options, check_output, print_json
from pyorch.cli.progress import Progress


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


def add_parser(subparsers: argparse._SubParsersAction, summary: str) -> argparse.ArgumentParser:
    parser = add_command(
        subparsers, "maps", summary,
        "pyorch profile olmoe.gguf --data prose.txt --router full -o olmoe.trace\n"
        "  pyorch maps olmoe.gguf olmoe.trace --capacity 2000",
    )
    parser.description += (
        " An expert map holds what every router said about one token. The predictor expert-map looks for the map that "
        "is most like the present token; replays compare that with activation-matrix, which looks for the past "
        "request that is most like the present one."
    )
    add_model(parser)
    parser.add_argument("trace", type=Path, metavar="FILE.trace",
                        help="a trace that pyorch profile --router full recorded")
    parser.add_argument("--capacity", type=int, default=1000, metavar="N",
                        help="keep the maps of N tokens, those that are least like each other (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=100, metavar="N",
                        help="keep the counts of N requests (default: %(default)s)")
    parser.add_argument("--distance", type=int, default=3, metavar="LAYERS",
                        help="prefetch distance: the embedding of a token stands for as many layers when two maps are "
                             "compared (default: %(default)s)")
    add_output_options(parser, "MODEL.maps.gguf beside the model")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    import numpy as np

    from pyorch.runtime.model_map import ModelMap
    from pyorch.sidecars import container
    from pyorch.traces.expert_maps import maps_from_trace
    from pyorch.traces.file import Trace

    path = (args.output or container.default_path(args.model, "maps")).absolute()
    check_output(path, args.model, [args.trace])
    with ModelMap(args.model) as model_map:
        trace = Trace(args.trace)
        with Progress() as progress:
            maps = maps_from_trace(trace, model_map, args.capacity, args.distance, args.requests, progress.update)
        maps.write(path, model_map)
    report = Report(path, len(trace), maps.n_maps, maps.capacity, maps.distance,
                    len(np.unique(trace.records["request"])), maps.n_requests, maps.request_capacity,
                    path.stat().st_size)
    if args.json:
        print_json(report)
    else:
        print(_sentence(report))
    return 0


def _sentence(report: Report) -> str:
    from pyorch.sizes import counted, format_bytes

    return (f"{report.path}: maps of {report.n_maps} of {report.n_tokens} tokens, counts of {report.n_requests} of "
            f"{counted(report.n_trace_requests, 'request')}, {format_bytes(report.file_bytes)}")
