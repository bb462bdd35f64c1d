"""`pyorch cluster`: several servers of one model, managed by Ray."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from time import time
from types import ModuleType
from typing import TYPE_CHECKING

from pyorch.cli.options import add_command, add_force, answer, holds_anything, in_the_way
from pyorch.cli.progress import Progress
from pyorch.cli.serve import take_server_flags
from pyorch.cli.settings import add_settings, given_settings
from pyorch.cli.tables import Table, show
from pyorch.errors import PyorchError, one_line
from pyorch.settings.option import CONTEXT, EXPERTS, LOSSY, texts
from pyorch.settings.settings import Settings
from pyorch.sizes import counted, format_bytes

if TYPE_CHECKING:
    from pyorch.cluster.members import Counters, Status
    from pyorch.cluster.rebalancing import Verdict
    from pyorch.cluster.scheduler import Report

_DEFAULT = Path("cluster.toml")

EXAMPLE = "pyorch cluster up --config cluster.toml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions", required=True)
    up = _add_action(actions, "up", "start every server, and wait until all of them answer", _up,
                     "pyorch cluster up --config cluster.toml -- --api-key secret")
    serve = _add_action(actions, "serve", "start every server, say what happens to them, and end them after Ctrl-C",
                        _serve, "pyorch cluster serve --config cluster.toml")
    for starting in (up, serve):
        starting.usage = f"pyorch cluster {starting.prog.split()[-1]} [options] [-- flags of llama-server]"
        starting.description += (
            " Each server has an endpoint of the OpenAI API and the settings given here. Flags of llama-server follow "
            "after `--`."
        )
        starting.add_argument("--address", default="", metavar="HOST:PORT",
                              help="the Ray cluster to run on (default: a new one on this machine)")
        starting.add_argument("--plan", type=Path, metavar="FILE",
                              help="keep in the memory of each server the experts that `pyorch place` assigned to it")
        add_settings(starting, EXPERTS, CONTEXT, LOSSY, without=("budget",))
        take_server_flags(starting)
    status = _add_action(actions, "status", "show how the servers do", _status, "pyorch cluster status --json")
    status.add_argument("--json", action="store_true", help="print it as one JSON object")
    rebalance = _add_action(actions, "rebalance", "let the scheduler place the experts now; it also does so "
                            "periodically", _rebalance, "pyorch cluster rebalance --json")
    rebalance.add_argument("--json", action="store_true", help="print the decision as one JSON object")
    prepare = _add_action(actions, "prepare", "write for each server a model with only the experts of a plan, for "
                          "disks without room for all experts", _prepare,
                          "pyorch cluster prepare --plan plan.json -o shares")
    prepare.add_argument("--plan", type=Path, required=True, metavar="FILE",
                         help="the placement of `pyorch place`")
    prepare.add_argument("-o", "--output", type=Path, required=True, metavar="DIR",
                         help="the directory to write to: DIR/SERVER/MODEL.gguf and its pack, for each server")
    prepare.add_argument("--server", action="append", metavar="NAME",
                         help="only for this server; may be repeated (default: for all)")
    prepare.add_argument("--json", action="store_true", help="print what was written as one JSON object")
    measure = _add_action(actions, "measure", "measure links and disks of servers that are up, for the scheduler",
                          _measure, "pyorch cluster measure -o costs.json")
    measure.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the file to write")
    add_force(measure, "one that this command wrote")
    _add_action(actions, "down", "end every server, and remove what is left of a cluster that crashed", _down,
                "pyorch cluster down")


def _add_action(actions, name: str, summary: str, run, example: str) -> argparse.ArgumentParser:
    parser = add_command(actions, name, summary, example)
    parser.add_argument("--config", type=Path, default=_DEFAULT, metavar="FILE",
                        help=f"the file that describes the cluster (default: {_DEFAULT})")
    parser.set_defaults(run=run)
    return parser


def _up(args: argparse.Namespace) -> int:
    with _interruptible(), _started(args) as (_, servers):
        show(_table(servers))
    return 0


def _serve(args: argparse.Namespace) -> int:
    from pyorch.cluster import operations

    asked = threading.Event()
    with _interruptible() as numbers, contextlib.ExitStack() as ending:
        with _started(args) as (ray, servers):
            ending.callback(operations.down, args.config)  # a cluster that was already up stays up
            for number in numbers:
                signal.signal(number, lambda *_: asked.set())
            show(_table(servers))
            operations.watch(args.config, ray, servers, _say, asked.wait)
    return 0


@contextlib.contextmanager
def _interruptible() -> Iterator[list[int]]:
    """Makes termination signals and a closed terminal act as Ctrl-C. Yields the received signals."""
    numbers = [number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
               if signal.getsignal(number) is not signal.SIG_IGN]  # ignored by nohup, or in the background of a script
    before = {number: signal.signal(number, _interrupt) for number in numbers}
    try:
        yield numbers
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _status(args: argparse.Namespace) -> int:
    from pyorch.cluster import operations

    running, servers, report = operations.status(args.config)
    return answer(args, {"config": running.config, "ray": running.ray, "namespace": running.namespace,
                         "servers": servers, "scheduler": report}, lambda: [*_table(servers, report), *_said(report)])


def _rebalance(args: argparse.Namespace) -> int:
    from pyorch.cluster import operations

    verdict = operations.rebalance(args.config)
    return answer(args, verdict, lambda: [_decided(verdict)])


def _prepare(args: argparse.Namespace) -> int:
    from pyorch.cluster.config import read_cluster
    from pyorch.cluster.placement.placement import read_placement
    from pyorch.convert.share import share_for, write_share
    from pyorch.runtime.model_map import ModelMap

    cluster = read_cluster(args.config)
    names = args.server or list(cluster.names)
    for name in names:
        cluster.index(name)
    model = cluster.required_model
    with ModelMap(model) as model_map:
        placement = read_placement(args.plan, model_map)
        layers = model_map.layers
    placement.check_servers(cluster.names)
    if placement.n_uncovered:
        raise PyorchError(f"{args.plan} gives {counted(placement.n_uncovered, 'expert')} to no server: with shares "
                          "nobody could compute them; give servers more memory, and place again")
    written, n_single = {}, int((placement.copies == 1).sum())
    for name in names:
        held = placement.held[placement.servers.index(name)]
        with Progress() as progress:
            written[name] = write_share(
                model, args.output / name / model.name, share_for(layers, dict(zip(placement.layers, held))),
                lambda what, done, total, name=name: progress.update(f"{what} the share of {name}", done, total))
    return answer(args, written, lambda: [
        Table(("server", "experts", "bytes", "model", ""), [
            (name, str(share.n_experts), format_bytes(share.n_bytes), str(share.path),
             "" if share.written else "was there") for name, share in written.items()
        ], left=("server", "model", "")),
        f"bring each directory to its server, and name the model that is in it under its [[server]] in {args.config}",
        *([f"{counted(n_single, 'expert')} of all layers have one server only: requests that need them fail while it "
           "is away"] if n_single else []),
    ])


def _measure(args: argparse.Namespace) -> int:
    from pyorch.cluster import operations
    from pyorch.cluster.costs import KIND, write_costs
    from pyorch.files import check_no_source, check_target
    from pyorch.sidecars import json_file

    check_target(args.output.absolute())
    check_no_source(args.output, [args.config], "the file that describes the cluster")
    if not args.force and holds_anything(args.output) and not json_file.is_written_for(args.output, None, KIND):
        raise in_the_way(args.output, ", and pyorch cluster measure did not write it")
    costs = operations.measure(args.config, _say)
    write_costs(args.output, costs)
    show([
        Table(("from", "to", "latency", "bandwidth"), [
            (one, other, f"{latency * 1e6:.0f} us", f"{rate * 8e-6:.0f} Mbit/s")
            for (one, other), (rate, latency) in costs.links.items()
        ], left=("from", "to")),
        Table(("server", "disk"), [
            (name, f"{format_bytes(server.disk_bytes_per_second)}/s") for name, server in costs.servers.items()
        ], left=("server",)),
        str(args.output),
    ])
    return 0


def _down(args: argparse.Namespace) -> int:
    from pyorch.cluster import operations

    _say("the cluster is down" if operations.down(args.config) else "there was no cluster to take down")
    return 0


def _started(args: argparse.Namespace) -> AbstractContextManager[tuple[ModuleType, list[Status]]]:
    from pyorch.cluster import operations
    from pyorch.cluster.config import read_cluster
    from pyorch.cluster.placement.placement import read_placement
    from pyorch.runtime.model_map import ModelMap

    settings = texts(Settings(**given_settings(args)))
    if args.address and ":" not in args.address:
        raise PyorchError(f"--address is {args.address}, not HOST:PORT of a Ray cluster")
    cluster = read_cluster(args.config)
    placement = None
    if args.plan is not None:
        with ModelMap(cluster.model_of(cluster.servers[0])) as model_map:
            placement = read_placement(args.plan, model_map)
    return operations.brought_up(cluster, ray_address=args.address, placement=placement, settings=settings,
                                 flags=args.server_flags, say=_say)


def _said(report: Report | None) -> list[str]:
    """Returns the state of the scheduler in sentences."""
    if report is None:
        return []
    said = [f"the scheduler decides again in {max(0.0, report.next - time()):.0f} s, every {report.interval:g} s"]
    if report.last is not None:
        said.append(f"{max(0.0, time() - report.last.at):.0f} s ago: {_decided(report.last)}")
    if report.moving is not None:
        said.append(f"experts move: {report.moving.done} of {report.moving.total} have arrived")
    elif report.failed:
        said.append(f"the last migration ended after {report.moved} experts: {report.failed}")
    return said


def _decided(verdict: Verdict) -> str:
    if verdict.current is None:
        return f"nothing moves: {verdict.reason}"
    compared = (f"other servers take {verdict.current:.3g} s of an interval now and {verdict.candidate:.3g} s then, "
                f"moving {verdict.migration:.3g} s")
    if verdict.adopted:
        return f"{verdict.n_moves} experts move, {format_bytes(verdict.n_bytes)}: {compared}"
    return f"nothing moves: {verdict.reason} ({compared})"


def _table(servers: list[Status], report: Report | None = None) -> list:
    rows, notes = [], []
    for server in servers:
        counters = server.counters
        cells = ("",) * 8
        if counters is not None:
            uses = counters.hits + counters.misses if _was_used(counters) else 0
            requests = "busy" if counters.requests_running is None else \
                f"{counters.requests_running} + {counters.requests_waiting}"
            tokens = "" if counters.generated_tokens is None else \
                f"{counters.prompt_tokens} + {counters.generated_tokens}"
            cells = (format_bytes(counters.memory_bytes),
                     f"{format_bytes(counters.used_bytes)} of {format_bytes(counters.budget_bytes)}",
                     f"{counters.hits / uses:.1%}" if uses else "", requests, tokens,
                     f"{counters.sent} / {counters.served}" if server.digest else "",
                     str(counters.read) if server.digest else "", _local(server, report))
        placed = ""
        if server.digest:
            placed = f"{server.digest[:8]} ({counters.pinned if counters else '?'} of {server.placed} kept)"
        state = server.state + (" (restarted)" if server.restarted else "")
        rows.append((server.name, state, server.url, *cells, placed))
        if server.reason:
            notes.append(f"server {server.name}: {server.reason}")
    columns = ("server", "state", "endpoint", "memory", "experts", "hits", "requests", "tokens", "sent / served",
               "read instead", "local", "placement")
    return [Table(columns, rows, left=("server", "state", "endpoint", "placement")), *notes]


def _local(server: Status, report: Report | None) -> str:
    """Returns the share of expert uses computed on the server itself, in the last window or since the start."""
    counters = server.counters
    if report is not None and server.name in report.local:
        return f"{report.local[server.name]:.1%}"
    if not (server.digest and counters.activations and _was_used(counters)):
        return ""
    return f"{1 - (counters.sent - counters.fallback + counters.read) / counters.activations:.1%}"


def _was_used(counters: Counters) -> bool:
    """Whether the server has computed anything for a request; llama-server tries its context at the start."""
    return counters.prompt_tokens != 0 or counters.generated_tokens != 0 or counters.served > 0


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _say(sentence: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # the reader has ended; the command goes on
        print(f"pyorch: {one_line(sentence)}", file=sys.stderr, flush=True)
