"""Measures a cluster of three servers on one machine: processes in network namespaces, with links of 500 Mbit/s.

Needs Linux, root, ip, tc, nsenter and the extras `cluster` and `papers`. Makes its own namespaces, which no packet
leaves, and removes them at the end, also after Ctrl-C or a crash. docs/measurements/cluster.md shows its results.

    python scripts/make_bench_model.py small.gguf -o model.gguf --size 512MiB
    python -m scripts.papers.dancemoe.measure model.gguf -o build/cluster --prepare  # traces and plans
    python -m scripts.papers.dancemoe.measure model.gguf -o build/cluster            # all parts
    python -m scripts.papers.dancemoe.measure model.gguf -o build/cluster --parts placements,kill
    python -m scripts.papers.dancemoe.measure model.gguf -o build/cluster --report docs/measurements/cluster/measured

DIR/PART.json stores the results of each part at once, so that parts may be measured separately. Parts:

    costs        times of computing, messages and reads, for simulations
    placements   five placements, memory for 1.3 x the experts: latency and local ratio (DanceMoE, table II)
    disk         the same with memory for 0.8 x the experts: the others are read from disk
                 (both: with `read` of cluster.toml as --read says)
    shift        in the middle each server gets the next server's task, with and without migration (figs. 6 and 7)
    scaling      tokens a second of 1, 2 and 3 servers with unlimited work, and a third of the experts
    kill         one of three servers loses its power while all compute
    thirds       three servers with a third of the experts each, and one server alone, which reads the others
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.papers.dancemoe.measure_network import NoNetwork, check_possible
from scripts.papers.dancemoe.measure_setups import ALGORITHMS, PARTS, READS, prepare


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", type=Path, help="GGUF with routed experts, for example by scripts/make_bench_model.py")
    add("-o", "--output", type=Path, required=True, metavar="DIR", help="directory for traces, plans and results")
    add("--parts", default=",".join(PARTS), metavar="PART,...", help="parts to measure (default: all)")
    add("--algorithms", default=",".join(ALGORITHMS), metavar="NAME,...", help="placements to compare (default: all)")
    add("--read", default=READS[0], metavar="WHEN,...",
        help="the settings read (last or faster) of the parts placements and disk, with the type of rows, as in "
             "last:bf16 (default: %(default)s)")
    add("--prepare", action="store_true", help="only write the files that the parts need; needs no network")
    add("--report", type=Path, metavar="DIR", help="only write tables, CSV and pictures of the results, into DIR")
    add("--link", type=float, default=500.0, metavar="MBIT",
        help="megabits per second of each server, each way (default: %(default)g)")
    add("--disk", type=float, default=150.0, metavar="MB",
        help="megabytes per second that each server reads; 0: no limit (default: %(default)g)")
    add("--threads", type=int, default=1, help="computing threads of each server (default: %(default)s)")
    add("--every", type=float, default=1.5, metavar="S",
        help="mean seconds between two requests of a server (default: %(default)g)")
    add("--seconds", type=float, default=20.0,
        help="seconds of a round in which requests arrive (default: %(default)g)")
    add("--rounds", type=int, default=2, help="rounds of each cluster; clusters alternate (default: %(default)s)")
    add("--shift-seconds", type=float, default=120.0, help="seconds of the part shift (default: %(default)g)")
    add("--interval", type=float, default=20.0,
        help="seconds between two decisions of the scheduler, in the part shift (default: %(default)g)")
    add("--tokens", type=int, default=20, help="tokens of an answer after its first (default: %(default)s)")
    add("--prompts", type=int, default=120, help="prompts of each task, known and asked (default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--json", action="store_true", help="print the results of the parts as one JSON object")
    args = parser.parse_args(words)
    for option, known in (("parts", PARTS), ("algorithms", ALGORITHMS), ("read", READS)):
        chosen = tuple(getattr(args, option).split(","))
        if wrong := [word for word in chosen if word not in known]:
            parser.error(f'--{option}: "{wrong[0]}" is not known: {", ".join(known)} are')
        setattr(args, option, chosen)
    return args


def main(words: Sequence[str] | None = None) -> int:
    args = parse_arguments(words)
    try:
        if args.report is not None:
            from scripts.papers.dancemoe.measure_report import report

            report(args)
            return 0
        if not args.prepare:
            check_possible()
        prepare(args)
        if args.prepare:
            return 0
        from scripts.papers.dancemoe.measure_parts import measure_parts

        found = measure_parts(args)
        if args.json:
            print(json.dumps(found, indent=1))
    except (NoNetwork, OSError) as error:
        print(f"measure: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("measure: interrupted; the network is removed", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, lambda *_: sys.exit(130))
    sys.exit(main())
