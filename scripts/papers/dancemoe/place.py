"""Places experts as `pyorch place` does, or as the placements that DanceMoE compares with its own; and draws that."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pyorch import pictures
from pyorch.cli import place as command
from pyorch.cli.numbers import whole
from scripts.papers.dancemoe.baselines import ALGORITHMS, place
from scripts.papers.dancemoe.placement_plot import draw
from scripts.papers.program import parser_of, run


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(
        "scripts.papers.dancemoe.place", "place experts by an algorithm of choice",
        "--cluster cluster.toml \\\n      --trace clinic=clinic.trace lab=lab.trace --algorithm eplb -o plan.json")
    command.add_arguments(parser)
    parser.add_argument("--algorithm", choices=tuple(ALGORITHMS), default="dance",
                        help="dance: as pyorch place; uniform: each expert once, at random; redundance: as uniform, "
                             "with random further experts; smartmoe: each expert once, devices with equal loads; "
                             "eplb: as smartmoe, with busy experts several times (default: dance)")
    parser.add_argument("--seed", type=whole(0), default=0, help="seed of all random draws (default: 0)")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="also draw a picture into this directory")
    return run(parser, _run, argv)


def _run(args: argparse.Namespace) -> int:
    if args.plot is not None:
        pictures.check(args.plot)
    placed = command.decide(args, lambda problem, partial: place(problem, args.algorithm, partial, args.seed))
    command.report(args, placed)
    if args.plot is not None:
        path = draw(placed.placement, placed.problem.frequencies, args.plot)
        if not args.json:
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
