"""`pyorch trace`: what a recorded trace says."""

from __future__ import annotations

import argparse
from pathlib import Path

from pyorch.cli.options import add_command, print_json
from pyorch.cli.tables import Table, show
from pyorch.sizes import counted

_EXAMPLE = "pyorch trace stats olmoe.trace"


def add_parser(subparsers: argparse._SubParsersAction, summary: str) -> argparse.ArgumentParser:
    parser = add_command(subparsers, "trace", summary, _EXAMPLE)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions", required=True)
    stats = add_command(
        actions, "stats", "show how experts are used, how certain routers are, and what caches would hit", _EXAMPLE)
    stats.add_argument("trace", type=Path, metavar="FILE.trace", help="a trace that pyorch profile recorded")
    stats.add_argument("--phase", choices=("all", "prefill", "decode"), default="all",
                       help="count only the tokens of this phase (default: all)")
    stats.add_argument("--json", action="store_true", help="print the statistics as one JSON object")
    stats.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    from pyorch.traces.file import Trace
    from pyorch.traces.statistics import analyze

    statistics, _ = analyze(Trace(args.trace), args.phase)
    if args.json:
        print_json(statistics)
    else:
        show(_parts(statistics))
    return 0


def _parts(statistics) -> list[str | Table]:
    sample = f", router inputs of {statistics.n_inputs}" if statistics.n_inputs else ""
    selected = "" if statistics.router == "full" else " of the selected experts' probabilities"
    p10, p20, p50 = (statistics.percentiles.index(p) for p in (10, 20, 50))
    rows = [
        (str(layer.il), f"{layer.busiest:.2f}", f"{layer.idlest:.2f}", str(layer.unused), f"{layer.gini:.2f}",
         f"{layer.strongest_peer:.1%}", f"{layer.tae_mean:.3f}", f"{layer.tae_percentiles[p10]:.3f}",
         f"{layer.tae_percentiles[p20]:.3f}", f"{layer.tae_percentiles[p50]:.3f}", f"{layer.entropy:.3f}",
         f"{layer.margin_percentiles[p50]:.3f}")
        for layer in statistics.layers
    ]
    return [
        f"{statistics.path}: {statistics.n_tokens} tokens (prefill {statistics.n_prefill}, decode "
        f"{statistics.n_decode}) of {counted(statistics.n_requests, 'request')}{sample}",
        f"{statistics.arch}: {len(statistics.layers)} layers of {statistics.n_expert} experts, "
        f"{statistics.n_expert_used} used for a token",
        "",
        "busiest, idlest  how often the router selects this expert, where 1 is the average",
        "peer             share of an expert's co-activations that its strongest peer has, mean of the experts",
        f"entropy          mean entropy{selected}, where 1 is an even distribution",
        "TAE              the same of the selected experts alone (token activating entropy): mean and percentiles",
        "margin           largest probability less the second largest, median",
        "",
        Table(("layer", "busiest", "idlest", "unused", "gini", "peer", "TAE", "p10", "p20", "p50", "entropy", "margin"),
              rows),
        "",
        Table(("cache", *(f"{rate:.1%}" for rate in statistics.cache_rates)),
              [("hit rate", *(f"{rate:.1%}" for rate in statistics.hit_rates))], left=("cache",),
              title="an LRU cache that keeps this share of each layer's experts"),
    ]
