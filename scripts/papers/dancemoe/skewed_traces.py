"""Writes traces of an invented model, one for each task: task-0.trace, task-1.trace, ...

    python -m scripts.papers.dancemoe.skewed_traces -o build/traces

As in DanceMoE's figs. 2 and 3, tasks prefer different experts, and some layers are more uneven than others. The
preferences of a request vary around its task's. The default shape is DeepSeek-V2-Lite's: 26 layers of 64 experts.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from pyorch.traces.file import DECODE, TraceHeader, TraceWriter
from scripts.papers.dancemoe.workload import draw_experts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="directory for the traces")
    parser.add_argument("--tasks", type=int, default=3)
    parser.add_argument("--requests", type=int, default=50, help="requests of each task")
    parser.add_argument("--prompt", type=int, default=64, help="mean tokens of a prompt")
    parser.add_argument("--decoded", type=int, default=20, help="decoded tokens of a request")
    parser.add_argument("--layers", type=int, default=26)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--used", type=int, default=6)
    parser.add_argument("--embedding", type=int, default=2048, help="numbers in a row")
    parser.add_argument("--concentration", type=float, default=100.0,
                        help="concentration of a request's preferences; larger values vary less")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    header = TraceHeader("made up", "made-up", tuple(range(args.layers)), args.experts, args.used, args.embedding)
    rng = np.random.default_rng(args.seed)
    steepness = rng.uniform(0.4, 1.6, args.layers)
    for task in range(args.tasks):
        shares = np.stack([rng.permutation(np.arange(1, args.experts + 1.0) ** -s) for s in steepness])
        shares /= shares.sum(axis=1, keepdims=True)
        with TraceWriter(args.output / f"task-{task}.trace", header) as writer:
            for request in range(args.requests):
                own = rng.standard_gamma(args.concentration * shares)
                n_prompt = int(rng.integers(args.prompt // 2, args.prompt + args.prompt // 2 + 1))
                records = np.zeros(n_prompt + args.decoded, header.record_dtype())
                records["request"], records["position"] = request, np.arange(len(records))
                records["phase"][n_prompt:] = DECODE
                records["experts"] = draw_experts(rng, own / own.sum(axis=1, keepdims=True), len(records), args.used)
                records["probs"] = 1 / args.used
                writer.write(records)
        print(args.output / f"task-{task}.trace")


if __name__ == "__main__":
    main()
