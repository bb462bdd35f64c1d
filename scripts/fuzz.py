"""Runs commands on damaged files: each must work, or report the error in one sentence and exit with status 2.

    python scripts/fuzz.py gguf sidecar trace --hours 4
    python scripts/fuzz.py gguf --seed 17 --count 1 --keep damaged.gguf

Case number SEED of a kind is always the same damage. Each runs in its own process, forked from one that has imported
everything, under limits of memory and processor time. Violations are printed as lines of JSON, with the seed that makes
the file again, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import re
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import numpy as np
from ggufs import write_moe_model
from mutations import gguf_mutator, index_mutator, json_mutator, pack_mutator, trace_mutator

KINDS = ("gguf", "sidecar", "pack", "plan", "trace", "quantize")
CPU_SECONDS = 10  # most cases take a tenth of a second
EXTRA_MEMORY = 1 << 30  # above the memory that the imported libraries have mapped
WALL_SECONDS = 120  # ends a process that waits for ever

# An allowed error: one sentence, perhaps after notes and statistics, which are lines of pyorch too.
_SENTENCE = re.compile(r"(?:pyorch|replay): error: [^\n]+\n\Z")
_SPEEDS = ("--read-bandwidth", "1GB/s", "--decode-bandwidth", "10GB/s", "--workers", "1")
_RUN = ("-p", "ab", "-n", "3", "--temp", "0", "--ctx", "32", "--threads", "1")

Mutator = Callable[[random.Random], "tuple[str, bytes]"]


@dataclass(frozen=True)
class Target:
    """A file to damage, and the commands that read the damaged one."""

    mutate: Mutator
    name: str
    beside: tuple[Path, ...]
    commands: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Outcome:
    """The end of a command. status: of exit, or minus the signal."""

    command: tuple[str, ...]
    status: int
    out: str
    err: str
    cpu_seconds: float

    @property
    def complaint(self) -> str:
        """The violation of the rule, or ""."""
        if self.status < 0:
            return f"ended by {signal.Signals(-self.status).name}"
        if self.status == 0:
            return "" if "Traceback" not in self.err else "a traceback"
        if self.status != 2:
            return f"exit status {self.status}"
        return "" if _SENTENCE.search(self.err) and "Traceback" not in self.err else "no sentence"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="+", choices=KINDS, metavar="KIND", help=f"files to damage: {', '.join(KINDS)}")
    parser.add_argument("--model", type=Path, metavar="FILE", help="a GGUF in place of the small one made here")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="number of the first case (default: 0)")
    parser.add_argument("--count", type=int, metavar="N", help="cases of each kind (default: no end)")
    parser.add_argument("--hours", type=float, metavar="H", help="stop after H hours (default: never)")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="leave the last damaged file there")
    parser.add_argument("--verbose", action="store_true", help="print every case")
    args = parser.parse_args()
    end = time.monotonic() + 3600 * args.hours if args.hours else float("inf")
    _import_everything()
    gc.freeze()  # otherwise the first collection of each fork copies all imported modules
    with tempfile.TemporaryDirectory() as directory:
        targets = {kind: _targets(kind, Path(directory), args.model) for kind in dict.fromkeys(args.kinds)}
        n_cases = n_failed = 0
        for seed in range(args.seed, args.seed + args.count if args.count else sys.maxsize):
            for kind, of_kind in targets.items():
                if time.monotonic() >= end:
                    break
                n_cases += 1
                n_failed += _try(kind, seed, of_kind, Path(directory), args)
            else:
                continue
            break
    print(f"{n_cases} cases, {n_failed} of them break the rule", file=sys.stderr)
    return 1 if n_failed else 0


def _import_everything() -> None:
    import numpy.random  # noqa: F401

    import pyorch.cli.buddies
    import pyorch.cli.convert
    import pyorch.cli.ghosts
    import pyorch.cli.inspect
    import pyorch.cli.maps
    import pyorch.cli.pack
    import pyorch.cli.plan
    import pyorch.cli.run
    import pyorch.convert.pack
    import pyorch.llama.model  # noqa: F401
    import scripts.replay  # noqa: F401


def _targets(kind: str, directory: Path, model: Path | None) -> list[Target]:
    base = directory / f"{kind}-base"
    base.mkdir()
    if model is None:
        model = base / "model.gguf"
        write_moe_model(model)
    if kind == "quantize":
        commands = (("convert", "{}", "-o", str(base / "out.gguf"), "--quantize", "Q8_0"),)
        return [Target(gguf_mutator(model.read_bytes()), "model.gguf", (), commands)]
    if kind == "gguf":
        commands = (("inspect", "{}", "--json"), ("run", "{}", *_RUN, "--budget", "60%"), ("run", "{}", *_RUN))
        return [Target(gguf_mutator(model.read_bytes()), "model.gguf", (), commands)]
    if kind == "pack":
        return _compressed(model, base)
    if kind == "plan":
        plan = model.with_suffix(".plan.json")
        _must(("pack", model, "--codec", "table"))
        _must(("plan", model, "--budget", "70%", *_SPEEDS))
        commands = (("run", model.name, *_RUN, "--budget", "70%"), ("inspect", model.name, "--json"))
        return [Target(json_mutator(plan.read_bytes()), plan.name, (model, _pack_of(model)), commands)]
    trace = base / "model.trace"
    text = base / "text.txt"
    text.write_text("A quick brown fox jumps over the lazy dog. " * 8)
    _must(("profile", model, "--data", text, "-o", trace, "--router", "full", "--states", "--inputs", "4",
           "--ctx", "64", "--decode", "8", "--threads", "1"))
    if kind == "trace":
        commands = (("buddies", str(model), "--trace", "{}", "-o", str(base / "buddies.gguf")),
                    ("maps", str(model), "{}", "-o", str(base / "maps.gguf")),
                    ("replay", str(model), "{}", "--budget", "60%", "--prefetch", "none,quasi-hidden", "--json"))
        return [Target(trace_mutator(trace.read_bytes()), "damaged.trace", (), commands)]
    _must(("maps", model, trace))
    _must(("buddies", model, "--trace", trace))
    _must(("ghosts", model, "--trace", trace, "--rank", "1"))
    _must(("calibrate", model, "--data", text, "--tokens", "64", "--threads", "1"))
    uses = {"maps": ("--prefetch", "expert-map"), "buddies": ("--lossy", "buddies"),
            "predictor": ("--prefetch", "quasi-hidden"), "ghosts": ("--lossy", "mode=none,miss=ghost")}
    sidecars = [
        Target(gguf_mutator(model.with_suffix(f".{name}.gguf").read_bytes()), f"model.{name}.gguf", (model,),
               (("run", model.name, *_RUN, "--budget", "60%", *options),))
        for name, options in uses.items()
    ]
    pack, slim = _pack_of(model), base / "slim.gguf"
    _must(("pack", model))
    _must(("pack", model, "--slim", slim))
    commands = (("run", "{}", *_RUN, "--budget", "60%"),)
    return [
        *sidecars,
        Target(gguf_mutator(slim.read_bytes()), slim.name, (slim.with_suffix(".experts.gguf"),), commands),
        Target(pack_mutator(pack.read_bytes()), pack.name, (model,),
               (("run", model.name, *_RUN, "--budget", "60%"), ("pack", model.name, "--check"))),
    ]


def _compressed(model: Path, base: Path) -> list[Target]:
    """Makes compressed packs: of a model that has all experts itself, and of a slim one that has none."""
    from pyorch.sidecars.container import checksum

    slim = base / "slim.gguf"
    _must(("pack", model, "--codec", "table", "--shards", "2"))
    _must(("pack", model, "--codec", "zstd", "--shards", "2", "--slim", slim))
    pools = ("--budget", "70%", "--pools", "0.4,0.3,0.2,0.1")
    return [
        Target(index_mutator(_pack_of(path).read_bytes(), lambda chunk: checksum(np.frombuffer(chunk, np.uint8))),
               _pack_of(path).name, (path,),
               (("run", path.name, *_RUN, *pools), ("pack", path.name, "--check"), ("inspect", path.name, "--json")))
        for path in (model, slim)
    ]


def _pack_of(model: Path) -> Path:
    return model.with_suffix(".experts.gguf")


def _must(command: tuple[object, ...]) -> None:
    outcome = _run(tuple(map(str, command)), None)
    if outcome.status != 0:
        raise SystemExit(f"{' '.join(outcome.command)} failed: {outcome.err}")


def _try(kind: str, seed: int, targets: list[Target], directory: Path, args: argparse.Namespace) -> int:
    chance = random.Random(f"{kind} {seed}")
    target = targets[seed % len(targets)]
    damage, content = target.mutate(chance)
    place = directory / f"{kind}-case"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    for path in target.beside:
        os.link(path, place / path.name)
    damaged = place / target.name
    damaged.write_bytes(content)
    if args.keep is not None:
        args.keep.write_bytes(content)
    failed = 0
    for command in target.commands:
        outcome = _run(tuple(word.replace("{}", str(damaged)) for word in command), place)
        if args.verbose or outcome.complaint:
            print(json.dumps({"kind": kind, "seed": seed, "damage": damage, "complaint": outcome.complaint,
                              "command": outcome.command[0], "status": outcome.status, "err": outcome.err[-2000:],
                              "cpu_seconds": round(outcome.cpu_seconds, 2)}), flush=True)
        failed |= bool(outcome.complaint)
    return failed


def _run(command: tuple[str, ...], directory: Path | None) -> Outcome:
    """Runs a command in a forked process with limits."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            _be_the_child(command, directory, out.fileno(), err.fileno())
        status, used = _wait(child)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read(1 << 20).decode("utf-8", "replace"))
    return Outcome(command, os.waitstatus_to_exitcode(status), *texts, used.ru_utime + used.ru_stime)


def _be_the_child(command: tuple[str, ...], directory: Path | None, out: int, err: int) -> None:
    status = 70
    try:
        os.dup2(out, 1)
        os.dup2(err, 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if directory is not None:
            os.chdir(directory)
            mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (mapped + EXTRA_MEMORY,) * 2)
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
        from pyorch.cli import main as pyorch
        from scripts.replay import main as replay

        status = replay(list(command[1:])) if command[0] == "replay" else pyorch(list(command))
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 70
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _wait(child: int) -> tuple[int, resource.struct_rusage]:
    descriptor = os.pidfd_open(child)
    try:
        if not select.select([descriptor], [], [], WALL_SECONDS)[0]:
            os.kill(child, signal.SIGKILL)
        _, status, used = os.wait4(child, 0)
        return status, used
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
