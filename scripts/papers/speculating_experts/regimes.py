"""Measures the gain of prefetching in simulated time, by disk, requests at once, length of prompts and budget.

    .venv/bin/pyorch profile small.gguf --data text.txt --tokens 6000 --states --ctx 512 -o small.trace
    .venv/bin/python -m scripts.papers.speculating_experts.regimes small.gguf small.trace \
        -o docs/measurements/prefetch/regimes.csv
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import itertools
import sys
from pathlib import Path

import numpy as np

from pyorch.errors import PyorchError
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.prefetch import NONE, Prefetch
from pyorch.sidecars.predictor import PredictorFile
from pyorch.traces.file import PREFILL, Trace
from pyorch.traces.recording import Recording
from pyorch.traces.replay import ReplaySettings, replay

COMPUTE_MS = 36.0  # of a token, with all experts resident
PREFILL_MS = 15.0  # of a token of a prompt
LATENCY_MS = 0.1  # of a request
PREDICT_MS = 0.2

# Milliseconds to read an expert; milliseconds of a pause, and its period.
DISKS = {
    "page cache": (0.5, 0, 0), "fast": (1.6, 0, 0), "as measured": (6.4, 0, 0), "slow": (50.0, 0, 0),
    "in bursts": (6.4, 100, 500), "stuttering": (6.4, 5, 20),
}
SLOTS = (1, 4)
PROMPTS = (16, 192)
BUDGETS = ("25%", "40%", "60%")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("trace", type=Path, help="recorded with --states")
    parser.add_argument("--prefetch", type=Prefetch.parse, default=Prefetch(), help="(default: auto)")
    parser.add_argument("--policy", help="(default: that of pyorch)")
    parser.add_argument("--warm", type=int, default=1000, help="tokens that do not count (default: 1000)")
    parser.add_argument("-o", "--output", type=Path, help="a CSV file")
    args = parser.parse_args()
    try:
        with ModelMap(args.model) as model_map:
            rows = measured(model_map, Recording.from_trace(Trace(args.trace), model_map), args)
    except PyorchError as error:
        print(f"regimes: {error}", file=sys.stderr)
        return 2
    if args.output:
        with args.output.open("w", newline="") as file:
            csv.writer(file).writerows([
                ("disk", "requests", "prompt", "budget", "none_ms", "ahead_ms", "saved"), *rows])
    show(rows)
    return 0


def measured(model_map: ModelMap, recording: Recording, args: argparse.Namespace) -> list[tuple]:
    expert = model_map.layers[0].expert_bytes
    sidecars = model_map.sidecars()
    file = PredictorFile.read(sidecars["predictor"], model_map) if "predictor" in sidecars else None
    rows = []
    for n_prompt in PROMPTS:
        position = np.arange(len(recording)) - np.searchsorted(recording.request, recording.request)
        recording.phase[:] = np.where(position < n_prompt, PREFILL, PREFILL + 1)
        for (disk, (read_ms, pause_ms, every_ms)), slots, budget in itertools.product(DISKS.items(), SLOTS, BUDGETS):
            settings = ReplaySettings(
                **({"policy": args.policy} if args.policy else {}), budget=budget,
                read_bandwidth=1000 * expert / read_ms,
                read_latency_s=LATENCY_MS / 1000, compute_ms=COMPUTE_MS, prefill_ms=PREFILL_MS, predict_ms=PREDICT_MS,
                n_warm_tokens=args.warm, batch=slots, as_decode=False, pause_ms=pause_ms, pause_every_ms=every_ms,
            )
            none, ahead = (replay(model_map, recording, dataclasses.replace(settings, prefetch=prefetch),
                                  predictor_file=file)
                           for prefetch in (Prefetch(NONE), args.prefetch))
            rows.append((disk, slots, n_prompt, budget, round(none.tpot_ms, 3), round(ahead.tpot_ms, 3),
                         round(1 - ahead.seconds / none.seconds, 5)))
            print(*rows[-1], file=sys.stderr)
    return rows


def show(rows: list[tuple]) -> None:
    """Prints the rows. Saved: of the whole time, including prompts."""
    cells = {row[:4]: row[-1] for row in rows}
    print("| disk | requests at once | prompt | " + " | ".join(f"saved {budget}" for budget in BUDGETS) + " |")
    print("| --- " * (3 + len(BUDGETS)) + "|")
    for disk, slots, n_prompt in itertools.product(DISKS, SLOTS, PROMPTS):
        saved = " | ".join(f"{cells[disk, slots, n_prompt, budget]:.1%}" for budget in BUDGETS)
        print(f"| {disk} | {slots} | {n_prompt} | {saved} |")
    print(f"\nleast {min(cells.values()):.2%}, most {max(cells.values()):.2%}")


if __name__ == "__main__":
    sys.exit(main())
