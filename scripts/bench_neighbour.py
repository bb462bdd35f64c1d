"""Measures the automatic budget while another program takes and frees memory under the same limit.

Three runs in a control group of their own, each with the same prompts at temperature 0:

- alone: `--budget auto`, no other program
- follows: `--budget auto`, and a program that takes memory for PERIOD seconds and frees it for PERIOD seconds
- named: the same program, and a named budget: by default what remains while the program has its memory. With the
  budget that `auto` has at its start, the kernel ends one of the two

    python -m scripts.bench_neighbour bench.gguf --memory-limit 2GiB --take 600MiB --seconds 600
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from pyorch.bench.surroundings import MemoryGroup, memory_group
from pyorch.errors import PyorchError
from pyorch.sizes import Amount, format_bytes

PROMPTS = ("The history of the sea begins", "def parse(lines):", "Once upon a time", "The reasons are simple:")
N_TOKENS = 64

# Prints a line for each text, and one for each change of the budget, until its input ends.
_MODEL = """
import json, sys, time, threading
import pyorch
from pyorch.llama import managed, memory
path, budget, prompts, n_tokens, seconds = json.loads(sys.argv[1])
def say(**facts):
    print(json.dumps(facts), flush=True)
with pyorch.load(path, budget, n_ctx=512, warm=False) as model:
    record = managed.find(model.llama.model)
    record.on_budget = lambda sentence: say(at=time.monotonic(), note=sentence)
    for _ in model.generate(prompts[0], n_tokens, temperature=0):
        pass
    say(budget=record.budget_bytes(), floor=model.map.info.floor_bytes, experts=model.map.info.slots_bytes)
    end, i = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        begin, n, text = time.monotonic(), 0, ""
        for piece in model.generate(prompts[i % len(prompts)], n_tokens, temperature=0):
            text, n = text + piece, n + 1
        say(at=begin, seconds=time.monotonic() - begin, tokens=n, prompt=i % len(prompts), text=text,
            budget=record.budget_bytes())
        i += 1
    limits, before = memory.MemoryLimits(), time.thread_time()
    for _ in range(200):  # the readings of one look at the memory
        limits.tightest(), memory.Resident.now(), model.engine.stats(), record.follows()
    say(look_ms=(time.thread_time() - before) / 200 * 1e3, peak=model.engine.stats().peak_bytes, swapped=int(next(
        line.split()[1] for line in open("/proc/self/status") if line.startswith("VmSwap"))))
"""

_NEIGHBOUR = """
import sys, time
n_bytes, period = int(sys.argv[1]), float(sys.argv[2])
while True:
    time.sleep(period)
    memory = bytearray(b"x") * n_bytes  # as fast as the kernel gives pages
    time.sleep(period)
    del memory
"""


@contextlib.contextmanager
def neighbour(group: MemoryGroup, n_bytes: int, period: float) -> Iterator[None]:
    """Runs the other program in the group."""
    process = subprocess.Popen([sys.executable, "-S", "-c", _NEIGHBOUR, str(n_bytes), str(period)],
                               preexec_fn=group.join)
    try:
        yield
        if process.poll() not in (None, -signal.SIGKILL):  # the group counts kills
            raise PyorchError(f"the other program ended with {process.returncode}")
    finally:
        process.kill()
        process.wait()


def measured(path: Path, limit: int, budget: int | str, seconds: float, take: int, period: float) -> dict:
    """Returns the facts of one run."""
    with memory_group(limit) as group:
        process = subprocess.Popen(
            [sys.executable, "-c", _MODEL, json.dumps([str(path), budget, PROMPTS, N_TOKENS, seconds])],
            preexec_fn=group.join, stdout=subprocess.PIPE, text=True)
        begin = json.loads(process.stdout.readline() or "{}")
        facts = {"begin": begin, "texts": {}, "changed": 0, "runs": [], "notes": []}
        facts |= {"end": {"swapped": "-", "look_ms": math.nan}}
        with neighbour(group, take, period) if take else contextlib.nullcontext():
            for line in process.stdout:
                said = json.loads(line)
                if "note" in said:
                    facts["notes"].append(said)
                elif "text" in said:
                    before = facts["texts"].setdefault(said["prompt"], said["text"])
                    facts["changed"] += before != said["text"]
                    facts["runs"].append(said)
                else:
                    facts["end"] = said
            process.wait()
        return facts | {"status": process.returncode, "killed": group.n_killed()}


def rate(facts: dict) -> str:
    """Returns the median tokens a second, and the quartiles of the texts."""
    rates = [run["tokens"] / run["seconds"] for run in facts["runs"]]
    if len(rates) < 2:
        return "-"
    low, middle, high = statistics.quantiles(rates, n=4)
    tokens = sum(run["tokens"] for run in facts["runs"])
    return f"{tokens / sum(run['seconds'] for run in facts['runs']):.1f} (texts: {low:.1f}, {middle:.1f}, {high:.1f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--memory-limit", default="2GiB", metavar="SIZE", help="of the control group (default 2GiB)")
    parser.add_argument("--take", default="600MiB", metavar="SIZE", help="what the other program takes (600MiB)")
    parser.add_argument("--period", type=float, default=20, metavar="SECONDS", help="of taking, and of freeing")
    parser.add_argument("--seconds", type=float, default=600,
                        help="of the run that follows; the others take half as long (default 600)")
    parser.add_argument("--budget", metavar="SIZE", help="of the named run (default: what the other program leaves)")
    parser.add_argument("--json", action="store_true", help="print all facts of all runs")
    args = parser.parse_args()
    limit, take = Amount.parse(args.memory_limit).n_bytes, Amount.parse(args.take).n_bytes
    runs = {"alone": measured(args.model, limit, "auto", args.seconds / 2, 0, args.period)}
    runs["follows"] = measured(args.model, limit, "auto", args.seconds, take, args.period)
    named = args.budget or runs["follows"]["begin"]["budget"] - take
    runs["named"] = measured(args.model, limit, named, args.seconds / 2, take, args.period)
    if args.json:
        print(json.dumps(runs))
        return 0
    print("| run | budget at start | tok/s | lowest and highest budget | texts changed | killed | swapped |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    first = runs["alone"]["texts"]
    for name, facts in runs.items():
        budgets = [run["budget"] for run in facts["runs"]] or [facts["begin"]["budget"]]
        changed = facts["changed"] + sum(first[i] != text for i, text in facts["texts"].items())
        print(f"| {name} | {format_bytes(facts['begin']['budget'])} | {rate(facts)} | {format_bytes(min(budgets))} to "
              f"{format_bytes(max(budgets))} | {changed} of {len(facts['runs'])} | {facts['killed']} | "
              f"{facts['end']['swapped']} |")
    print(f"one look at the memory: {runs['follows']['end']['look_ms']:.2f} ms of processor time")
    for note in runs["follows"]["notes"]:
        print(note["note"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
