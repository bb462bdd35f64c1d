"""Accuracy and speed of lossy settings at several cache rates, next to baselines: tables 2 to 4 of BuddyMoE.

A baseline has the gates, the order and the limits of the row that it is compared with. Otherwise a setting that changes
few slots would beat one that changes all, whatever replaces them. Differences are of the same questions and tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence

from pyorch.cli import eval as command
from pyorch.cli.tables import Table, show
from pyorch.errors import PyorchError
from pyorch.eval import report
from pyorch.eval.arc import difference
from pyorch.eval.judge import Judgement
from pyorch.eval.method import Method, lossy_method
from pyorch.eval.perplexity import Divergence
from pyorch.eval.sweep import METRICS, Row
from pyorch.settings.substitution import Substitution
from scripts.papers import program

BASELINES = ("random", "drop")

# Settings that only choose the replacing expert.
_OF_BUDDIES = {name: getattr(Substitution(), name) for name in ("alpha", "k", "among", "bonus")}


def baseline(name: str, beside: Substitution | None = None) -> Method:
    """Returns a row of BASELINES to compare with.

    Random residents, and dropping, use the gates, order and limits of the compared row; without one, no gates.
    """
    gates = Substitution() if beside is None else beside
    treatment = {"mode": "none", "miss": "drop"} if name == "drop" else {"mode": "random"}
    if name != "drop" and gates.needs_ghosts:
        treatment["miss"] = "fetch"
    return lossy_method(dataclasses.replace(gates, **treatment, **_OF_BUDDIES))


def main(argv: list[str] | None = None) -> int:
    parser = program.parser_of(
        "scripts.papers.buddymoe.tables", "compare lossy settings with baselines under the same gates",
        "olmoe.gguf --data ARC-Easy-Dev.jsonl --cache-rate 0.75,0.5 \\\n"
        "      --lossy coverage=0.95,max_replaced=3 --baseline random,drop")
    command.add_arc_options(parser)
    parser.add_argument("--baseline", default=",".join(BASELINES), metavar="NAME,...",
                        help="next to each row of --lossy, under its gates: random (a random resident expert replaces "
                             "an absent one) and drop (it is left out) (default: both)")
    return program.run(parser, _run, argv)


def _run(args: argparse.Namespace) -> int:
    names = args.baseline.split(",")
    for name in names:
        if name not in BASELINES:
            raise PyorchError(f'baseline "{name}" is not known: use {" or ".join(BASELINES)}')
    methods: list[Method] = []
    beside: dict[str, dict[str, str]] = {}  # by settings of a row: settings of its baselines, by name
    for method in command.methods_of(args):
        methods.append(method)
        if method.substitution is not None and not method.forecast:
            rows = {name: baseline(name, method.substitution) for name in names}
            rows = {name: row for name, row in rows.items() if row != method}
            methods += rows.values()
            beside[method.settings] = {name: row.settings for name, row in rows.items()}
    found = command.swept(args, methods)
    objects = report.to_json(found, args.data)
    for row, flat in zip(found, objects):
        for name, other in _beside(row, found, beside).items():
            flat.update(leads(row.judgement, name, other.judgement))
    command.show_rows(args, found, objects)
    if not args.json:
        show(["", _table(found, beside, args.metric)])
    return 0


def _beside(row: Row, rows: Sequence[Row], beside: dict[str, dict[str, str]]) -> dict[str, Row]:
    """Returns the baselines of a row, by name."""
    wanted = beside.get(row.settings, {})
    return {name: other for name, settings in wanted.items() for other in rows
            if (other.rate, other.settings) == (row.rate, settings)}


def leads(row: Judgement, name: str, other: Judgement) -> dict[str, float]:
    """Returns how much more accurate a row is than a baseline, and how much farther its predictions diverge."""
    found = {}
    for metric in METRICS:
        lead = difference(row.accuracies, other.accuracies, metric)
        found[f"leads {name} {metric}"], found[f"leads {name} {metric} stderr"] = lead.mean, lead.stderr
    if row.divergence is not None:
        ours, theirs = row.divergence, other.divergence
        blocks = tuple(mine - its for mine, its in zip(ours.blocks, theirs.blocks))
        farther = Divergence(ours.n_tokens, ours.mean - theirs.mean, blocks)
        found[f"kl_divergence above {name}"] = farther.mean
        found[f"kl_divergence above {name} stderr"] = farther.stderr
    return found


def _table(rows: Sequence[Row], beside: dict[str, dict[str, str]], metric: str) -> Table:
    cells = []
    for row in rows:
        for name, other in _beside(row, rows, beside).items():
            lead = leads(row.judgement, name, other.judgement)
            kl = f"kl_divergence above {name}"
            cells.append((
                f"{row.rate:g}", row.settings, name,
                f"{lead[f'leads {name} {metric}']:+.3f} ±{lead[f'leads {name} {metric} stderr']:.3f}",
                f"{lead[kl]:+.4f} ±{lead[f'{kl} stderr']:.4f}" if kl in lead else "-"))
    return Table(("cache", "settings", "baseline", f"leads it by {metric}", "KL above it"), cells,
                 left=("cache", "settings", "baseline"))


if __name__ == "__main__":
    sys.exit(main())
