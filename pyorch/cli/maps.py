"""`pyorch maps`: collects past tokens, from a trace, for the predictor that searches them."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from pyorch.cli.options import add_model, add_output_options, answer, check_output
from pyorch.cli.progress import Progress
from pyorch.sizes import format_bytes

EXAMPLE = """pyorch profile olmoe.gguf --data prose.txt --router full -o olmoe.trace
  pyorch maps olmoe.gguf olmoe.trace --capacity 2000"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description += (
        " An expert map holds the outputs of all routers for one token. The predictor expert-map searches for the map "
        "that is most similar to the present token. The file also has the number of uses of each expert, from which a "
        "plan for a compressed pack starts."
    )
    add_model(parser)
    parser.add_argument("trace", type=Path, metavar="FILE.trace",
                        help="a trace that pyorch profile --router full recorded")
    parser.add_argument("--capacity", type=int, default=1000, metavar="N",
                        help="keep the maps of N tokens, as different as possible (default: %(default)s)")
    parser.add_argument("--distance", type=int, default=3, metavar="LAYERS",
                        help="prefetch distance: when maps are compared, the embedding stands for so many layers "
                             "(default: %(default)s)")
    add_output_options(parser, "MODEL.maps.gguf beside the model")


def run(args: argparse.Namespace) -> int:
    from pyorch.runtime.model_map import ModelMap
    from pyorch.sidecars import container
    from pyorch.traces.expert_maps import maps_from_trace
    from pyorch.traces.file import Trace

    path = (args.output or container.default_path(args.model, "maps")).absolute()
    check_output(path, args.model, [args.trace], force=args.force,
                 is_own=partial(container.is_sidecar_of, kind="maps"), by_default=args.output is None)
    with ModelMap(args.model) as model_map:
        trace = Trace(args.trace)
        with Progress() as progress:
            maps = maps_from_trace(trace, model_map, args.capacity, args.distance, progress.update)
        maps.write(path, model_map)
    n_bytes = path.stat().st_size
    # n_tokens: tokens of the trace. n_maps: maps that were kept.
    return answer(args, {
        "path": path, "n_tokens": len(trace), "n_maps": maps.n_maps, "capacity": maps.capacity,
        "distance": maps.distance, "file_bytes": n_bytes,
    }, lambda: [f"{path}: maps of {maps.n_maps} of {len(trace)} tokens, {format_bytes(n_bytes)}"])
