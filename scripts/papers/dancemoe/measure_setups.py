"""The measured clusters: their cluster.toml, the traces of their users, and their plans."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pyorch.runtime.model_map import ModelMap
from scripts.papers.dancemoe.measure_load import TASKS, write_prompts
from scripts.papers.dancemoe.measure_network import NoNetwork

ALGORITHMS = ("uniform", "redundance", "smartmoe", "eplb", "dance")
PARTS = ("costs", "placements", "disk", "shift", "scaling", "kill", "thirds")
READS = ("last", "faster", "last:bf16", "faster:bf16")
SERVERS = ("a", "b", "c")
SHARES = (1, 1, 2)


@dataclass(frozen=True)
class Setup:
    """One cluster.toml and its plan.

    Attributes:
        memory: Memory of each server, as a share of all experts.
        algorithm: Algorithm of the plan. "": no plan.
        migrates: At intervals, a new placement is computed and experts migrate.
        read, rows: Settings of the same names in cluster.toml.
    """

    name: str
    memory: tuple[float, ...]
    algorithm: str
    migrates: bool = False
    read: str = "last"
    rows: str = "f32"

    @property
    def label(self) -> str:
        """Name of the placement in reports."""
        return (self.algorithm + (f", read = {self.read}" if self.read != "last" else "")
                + (f", rows = {self.rows}" if self.rows != "f32" else ""))

    @property
    def servers(self) -> tuple[str, ...]:
        return SERVERS[: len(self.memory)]


def split(total: float) -> tuple[float, ...]:
    """Divides memory for `total` times the experts, 1 : 1 : 2."""
    return tuple(total * share / sum(SHARES) for share in SHARES)


def setups(part: str, algorithms: Sequence[str], reads: Sequence[str] = READS[:1]) -> list[Setup]:
    """Returns the clusters of a part."""
    thirds = (1 / 3,) * 3

    def compared(part: str, total: float) -> list[Setup]:
        return [Setup(f"{part}-{name}" + (f"-{read}" if read != READS[0] else "").replace(":", "-"), split(total), name,
                      read=read.partition(":")[0], rows=read.partition(":")[2] or "f32")
                for name in algorithms for read in reads]

    return {
        "costs": [Setup("costs", split(1.3), "dance")],
        "placements": compared("placements", 1.3),
        "disk": compared("disk", 0.8),
        "shift": [Setup("shift-off", split(1.3), "dance"), Setup("shift-on", split(1.3), "dance", migrates=True)],
        "scaling": [Setup(f"scaling-{n}", thirds[:n], "dance") for n in (1, 2, 3)],
        "kill": [Setup("kill", split(1.3), "dance")],
        "thirds": [Setup("thirds-1", thirds[:1], ""), Setup("thirds-3", thirds, "dance")],
    }[part]


def prepare(args: argparse.Namespace) -> None:
    """Makes prompts, their traces, and a plan for each cluster. Existing files stay."""
    args.output.mkdir(parents=True, exist_ok=True)
    files = {(task, part): args.output / f"{part}-{task}.jsonl" for task in TASKS for part in ("known", "asked")}
    if not all(path.exists() for path in files.values()):
        files = write_prompts(args.output, args.prompts, args.seed)
    for path in files.values():
        trace = path.with_suffix(".trace")
        if not trace.exists():
            say(f"{trace}")
            _python("pyorch", "profile", args.model, "--data", path, "--decode", args.tokens, "--budget", "100%",
                    "--threads", args.threads, "-o", trace)
    with ModelMap(str(args.model)) as model_map:
        info = model_map.info
        all_bytes, floor = info.slots_bytes, info.floor_bytes
    for part in PARTS:
        for setup in setups(part, ALGORITHMS, READS):
            # A layer's own need is added to the plan's memory, so that a server can keep all planned experts.
            for kind, beside in (("place", 0), ("run", floor)):
                _write_config(args, setup, kind, [int(share * all_bytes) + beside for share in setup.memory])
            plan = plan_of(args, setup)
            if setup.algorithm and not plan.exists():
                traces = [f"{name}={args.output / f'known-{task}.trace'}" for name, task in zip(setup.servers, TASKS)]
                program("place", "--cluster", config_of(args, setup, "place"), "--trace", *traces, "--partial",
                        "--algorithm", setup.algorithm, "-o", plan)


def _write_config(args: argparse.Namespace, setup: Setup, kind: str, memory: Sequence[int]) -> None:
    text = (f'model = "{args.model.resolve()}"\nread = "{setup.read}"\n\n[network]\nplain = true\n'
            f'rows = "{setup.rows}"\nbandwidth = "{args.link:g}Mbit/s"\nlatency = "20us"\n')
    for i, (name, n_bytes) in enumerate(zip(setup.servers, memory)):
        text += f'\n[[server]]\nname = "{name}"\naddress = "10.77.0.{i + 1}"\nmemory = {n_bytes}\n'
    if kind == "run":
        text += "\n[scheduler]\n" + (f'interval = "{args.interval:g}s"\n' if setup.migrates else "enabled = false\n")
        if setup.migrates and costs_of(args).exists():
            text += f'costs = "{costs_of(args).name}"\n'
    config_of(args, setup, kind).write_text(text)


def costs_of(args: argparse.Namespace) -> Path:
    """Returns the file of `pyorch cluster measure`, from the part costs."""
    return args.output / "measured-costs.json"


def config_of(args: argparse.Namespace, setup: Setup, kind: str = "run") -> Path:
    return args.output / f"{setup.name}.{kind}.toml"


def plan_of(args: argparse.Namespace, setup: Setup) -> Path:
    return args.output / f"{setup.name}.plan.json"


def program(name: str, *arguments: object) -> str:
    """Returns the output of another program of this folder. NoNetwork, with its last line: it fails."""
    return _python(f"scripts.papers.dancemoe.{name}", *arguments)


def _python(module: str, *arguments: object) -> str:
    done = subprocess.run([sys.executable, "-m", module, *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        raise NoNetwork(f"{module} failed: {(done.stderr.strip() or 'no output').splitlines()[-1]}")
    return done.stdout


def say(sentence: str) -> None:
    print(f"measure: {sentence}", file=sys.stderr, flush=True)


def write_json(path: Path, value: object) -> None:
    """Writes a file whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(part, path)
