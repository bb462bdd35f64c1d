"""`pyorch trace`: what a recorded trace says."""

from __future__ import annotations

import argparse
from pathlib import Path

from pyorch.cli.options import add_command, print_json


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    parser = add_command(
        subparsers, "trace", "show what a recorded trace says", "pyorch trace stats olmoe.trace --plot plots"
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions", required=True)
    stats = add_command(
        actions, "stats", "use of experts, certainty of routers, hit rates of caches",
        "pyorch trace stats olmoe.trace --plot plots",
    )
    stats.add_argument("trace", type=Path, metavar="FILE.trace")
    stats.add_argument("--phase", choices=("all", "prefill", "decode"), default="all",
                       help="count the tokens of one phase only (default: all)")
    stats.add_argument("--plot", type=Path, metavar="DIR", help="also draw pictures into a directory")
    stats.add_argument("--json", action="store_true", help="print one JSON object")
    stats.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    from pyorch.traces.file import Trace
    from pyorch.traces.statistics import analyze

    statistics, arrays = analyze(Trace(args.trace), args.phase)
    pictures = []
    if args.plot is not None:
        from pyorch.traces.plots import draw

        pictures = draw(statistics, arrays, args.plot)
    if args.json:
        print_json(statistics)
        return 0
    for line in _lines(statistics):
        print(line)
    for picture in pictures:
        print(picture)
    return 0


def _lines(it) -> list[str]:
    sample = f", router inputs of {it.n_inputs}" if it.n_inputs else ""
    entropy = "entropy" if it.router == "full" else "entropy of the selected"
    lines = [
        f"{it.path}: {it.n_tokens} tokens (prefill {it.n_prefill}, decode {it.n_decode}) of {it.n_requests} "
        f"requests{sample}",
        f"{it.arch}: {len(it.layers)} layers of {it.n_expert} experts, {it.n_expert_used} used for a token",
        "",
        "use: busiest and idlest expert, even use is 1; peer: share of the strongest peer in co-activations;",
        f"TAE, its percentiles, and {entropy}: 1 is even; margin: median of p_max - p_2nd",
        "",
        " layer  busiest  idlest  unused  gini   peer    TAE    p10    p20    p50  entropy  margin",
    ]
    p10, p20, p50 = (it.percentiles.index(p) for p in (10, 20, 50))
    for layer in it.layers:
        lines.append(
            f"{layer.il:>6} {layer.busiest:>8.2f} {layer.idlest:>7.2f} {layer.unused:>7} {layer.gini:>5.2f} "
            f"{layer.strongest_peer:>6.1%} {layer.tae_mean:>6.3f} {layer.tae_percentiles[p10]:>6.3f} "
            f"{layer.tae_percentiles[p20]:>6.3f} {layer.tae_percentiles[p50]:>6.3f} {layer.entropy:>8.3f} "
            f"{layer.margin_percentiles[p50]:>7.3f}"
        )
    lines += [
        "",
        "hit rate of an LRU cache of each layer's experts",
        "cache    " + "".join(f"{rate:>8.1%}" for rate in it.cache_rates),
        "hit rate " + "".join(f"{rate:>8.1%}" for rate in it.hit_rates),
    ]
    return lines
