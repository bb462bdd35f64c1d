"""Writes recorded routes of a model, arrays of a .npz file, as a trace for scripts.replay."""

from __future__ import annotations

import argparse
import sys
import zipfile
from pathlib import Path

import numpy as np

from pyorch.cli.options import add_model
from pyorch.errors import PyorchError
from pyorch.runtime.model_map import ModelMap
from pyorch.traces.file import DECODE, TraceWriter
from pyorch.traces.recorder import trace_header
from scripts.papers import program


def main(argv: list[str] | None = None) -> int:
    parser = program.parser_of(
        "scripts.routes_to_trace", "write recorded routes of a model as a trace", "oss.gguf routes.npz -o oss.trace")
    parser.description += (
        " The routes are three arrays of n generated tokens: experts[n, layers, k], the likeliest first, of each layer "
        "with experts; probs[n, layers, k], their weights; and offsets[requests + 1]: request r has the tokens from "
        "offsets[r] to offsets[r + 1]. In the trace, the probability of every other expert is 0, and every token is 0.")
    add_model(parser, "whose header suffices")
    parser.add_argument("routes", type=Path, metavar="ROUTES.npz", help="the recorded routes")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE.trace", help="the trace to write")
    return program.run(parser, write, argv)


def write(args: argparse.Namespace) -> int:
    try:
        with np.load(args.routes) as routes:
            experts, probs, offsets = (routes[name] for name in ("experts", "probs", "offsets"))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise PyorchError(f"{args.routes} does not hold routes: {error}") from None
    with ModelMap(args.model) as model_map:
        header = trace_header(model_map, router="full")
    shape = len(header.layers), header.n_expert_used
    if experts.shape[1:] != shape or probs.shape != experts.shape or not all(
            0 <= expert < header.n_expert for expert in np.unique(experts)):
        raise PyorchError(f"{args.routes} has no experts of {args.model}, of which a token uses {shape[1]} of "
                          f"{header.n_expert} in each of {shape[0]} layers")
    records = np.zeros(len(experts), header.record_dtype())
    records["request"] = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    records["position"] = np.arange(len(records)) - offsets[records["request"]]
    records["phase"], records["experts"], records["probs"] = DECODE, experts, probs
    np.put_along_axis(records["router"], experts.astype(np.int64), probs.astype(np.float16), axis=2)
    with TraceWriter(args.output, header) as writer:
        writer.write(records)
    print(f"{args.output}: {len(records)} tokens of {len(offsets) - 1} requests")
    return 0


if __name__ == "__main__":
    sys.exit(main())
