"""`pyorch plan`: divides the memory for experts of a compressed pack among their forms."""

from __future__ import annotations

import argparse
import dataclasses
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from pyorch.cli.numbers import number, rate, whole
from pyorch.cli.options import add_model, add_output_options, answer, check_output, check_readable
from pyorch.cli.progress import Progress
from pyorch.cli.settings import add_settings, given_settings
from pyorch.cli.tables import Facts, Table
from pyorch.errors import FormatError, PyorchError
from pyorch.settings.budget import AUTO
from pyorch.sizes import counted, format_bytes

DECODE_SECONDS = 1.0
PROBE_SECONDS = 2.0

_POOL_NAMES = ("full", "compressed", "sm", "e")

EXAMPLE = """pyorch pack olmoe.gguf --codec table
  pyorch profile olmoe.gguf --data prose.txt -o olmoe.trace
  pyorch plan olmoe.gguf --trace olmoe.trace --budget 40%"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description += (
        " An expert can be kept whole (F), compressed (C), or only its packed plane of signs and mantissas (S) or of "
        "exponents (E). Smaller forms allow more experts but need more work for each use. The command finds the shares "
        "of the budget with the shortest waits for a token, from the use of experts and this machine's speed of "
        "reading and decoding. It writes them beside the model, where every command finds them. It replays the end of "
        "the trace, with the time of computing and without prefetching, on the best divisions and on whole experts "
        "alone. It takes the fastest one; whole experts unless another division gains much."
    )
    add_model(parser, "with a compressed pack beside it")
    parser.add_argument("--trace", type=Path, metavar="FILE.trace",
                        help="a trace of pyorch profile (default: the requests in MODEL.maps.gguf; without it all "
                             "experts count as equally used)")
    add_settings(parser, "budget", defaults={"budget": "none: a size or a share must be given, not auto"})
    parser.add_argument("--batch", type=whole(1, 512), default=1, metavar="N",
                        help="plan for N sequences decoded together, as a server does; an expert that several of them "
                             "need is recovered once (default: 1)")
    parser.add_argument("--forms", default="F,C,S,E", metavar="F,C,S,E",
                        help="the forms that may be kept (default: F,C,S,E)")
    parser.add_argument("--step", type=number(0.01, most=1), default=0.05, metavar="SHARE",
                        help="try shares in steps of this, 0.01 at least (default: 0.05)")
    parser.add_argument("--read-bandwidth", type=rate, metavar="RATE",
                        help="speed of the disk, such as 1GB/s (default: measured on the model's file)")
    parser.add_argument("--decode-bandwidth", type=rate, metavar="RATE",
                        help="bytes of matrices that one thread recovers in a second (default: measured on the pack)")
    parser.add_argument("--workers", type=whole(1, 512), metavar="N",
                        help="threads that decode (default: compute threads and the engine's threads, at most one for "
                             "each processor)")
    parser.add_argument("--compute-ms", type=number(0, most=1e6), metavar="MS",
                        help="time to decode a token with all experts resident, for the replay (default: the "
                             "trace's; else the one of pyorch calibrate; else 0)")
    add_output_options(parser, "MODEL.plan.json beside the model")


def run(args: argparse.Namespace) -> int:
    import numpy as np

    from pyorch.planning.makespan import POOLS
    from pyorch.planning.planner import HANDICAP
    from pyorch.planning.ranks import use_counts
    from pyorch.runtime.model_map import ModelMap
    from pyorch.sidecars import json_file, packs
    from pyorch.sidecars import memory_plan as plans
    from pyorch.sidecars.beside import Sidecars
    from pyorch.traces.divisions import FINALISTS, choose
    from pyorch.traces.file import Trace
    from pyorch.traces.recording import decoded_recording
    from pyorch.traces.replay import compute_time

    if args.compute_ms is not None and args.trace is None:
        raise PyorchError("--compute-ms is for playing a trace: give --trace")
    budget_setting = given_settings(args).get("budget", AUTO)
    if budget_setting.amount is None:
        raise PyorchError("a plan is for a size or a share of the experts: give --budget, such as 40%")
    pools = args.forms.replace(",", "").upper()
    if not pools or set(pools) - set(POOLS) or len(set(pools)) < len(pools):
        raise PyorchError(f'forms "{args.forms}" are not understood: name some of {", ".join(POOLS)}, each once')
    output = args.output or plans.default_path(args.model)
    check_output(output, args.model, [args.trace], force=args.force,
                 is_own=partial(json_file.is_written_for, kind=plans.KIND), by_default=args.output is None)
    check_readable([args.trace])
    with (packs.open_model(args.model) as model_map, ModelMap(args.model) as plain_map, Progress() as progress):
        packs.require_compressed(model_map)
        budget = budget_setting.resolve(model_map.info)
        trace = None if args.trace is None else Trace(args.trace)
        recording = None if trace is None else decoded_recording(trace, model_map)
        if recording is not None and recording.n_requests < args.batch:
            raise PyorchError(f"{args.trace} has {counted(recording.n_requests, 'request')}: for {args.batch} "
                              "sequences at once record as many, each of --ctx tokens of the text")
        inclusion, routing = _inclusion(recording, model_map, args.batch)
        if recording is not None:
            routing = f"{len(recording)} tokens of {args.trace}"
        if args.batch > 1:
            routing += f"; {args.batch} sequences at once"
        progress.update("measuring reading and decoding", 0, 0)
        machine = measured_machine(args, model_map)
        begin = perf_counter()
        planner = plans.new_planner(model_map, inclusion, machine, args.batch)
        reserved = plans.Reserve.of(model_map).bytes(budget)
        planned = planner.plan(budget, pools, args.step, reserved, HANDICAP, FINALISTS)
        seconds = perf_counter() - begin
        whole, compressed = (planner.cost(shares, budget - reserved) for shares in ((1, 0, 0, 0), (0, 1, 0, 0)))
        best, handicap, n_played, n_played_tokens = planned.best, HANDICAP, 0, 0
        compute_ms, compute_from = None, None
        divided = next((split for split in planned.finalists if split.is_mixed), None)
        if recording is not None and _can_play(recording, model_map):
            progress.update("playing the trace", 0, 0)
            simple = [*([whole] if "F" in pools else []), *([compressed] if "C" in pools else []),
                      *([planned.plain] if planned.plain is not None else [])]
            compute_ms, compute_from = compute_time(args.compute_ms, trace, Sidecars(model_map))
            choice = choose([*simple, *planned.finalists], model_map, plain_map, recording, budget, machine,
                            batch=args.batch, compute_ms=compute_ms or 0.0)
            best, divided, n_played, n_played_tokens = choice.best, choice.divided, choice.n_played, choice.n_tokens
            handicap = max(1.0, choice.handicap or HANDICAP)
        splits = {"plan": best, "full only": whole, "compressed only": compressed}
        if not best.is_mixed and divided is not None:
            splits["best divided"] = divided
        if not best.compressed:
            splits["best with the pack"] = planned.packed_best
        elif planned.plain is not None:
            splits["without a pack"] = planned.plain
        rows = [_row(name, split) for name, split in splits.items()]
        uses = () if recording is None else use_counts(recording.experts, inclusion.shape[1])
        n_tokens = 0 if recording is None else len(recording)
        plans.write_plan(output, plans.Plan(
            budget, pools, args.step, best.shares, best.compressed, rows[0]["hits"], rows[0]["wait_ms"], handicap,
            n_tokens, machine, packs.contents(model_map).codecs, tuple(map(tuple, np.asarray(inclusion).tolist())),
            tuple(map(tuple, np.asarray(uses).tolist())), args.batch,
        ), model_map)
    # Sizes in bytes. seconds: the time of planning. compute_ms, compute_from: null without a replay.
    report = {
        "model": args.model, "trace": args.trace, "routing": routing, "plan": output, "budget": budget,
        "batch": args.batch, "pools": pools, "n_tokens": n_tokens, **dataclasses.asdict(machine),
        "n_splits": planned.n_splits, "n_evaluated": planned.n_evaluated, "seconds": seconds, "n_played": n_played,
        "n_played_tokens": n_played_tokens, "compute_ms": compute_ms, "compute_from": compute_from,
        "handicap": handicap, "rows": rows,
    }
    return answer(args, report, lambda: _parts(report, model_map.info))


def _can_play(recording, model_map) -> bool:
    """Whether a replay is possible: all layers must have the same number of experts."""
    return all(layer.n_expert == recording.n_expert for layer in model_map.decoded_layers)


def _inclusion(recording, model_map, batch: int):
    """Returns the use of experts by rank, float64[n_layers, n_expert], and its source.

    The source is the trace, else the maps beside the model, else equal use. batch: the number of requests of the trace
    whose tokens alternate; an expert is popular if all of them use it.
    """
    from pyorch.planning.ranks import even_inclusion, inclusion_by_rank
    from pyorch.sidecars import container
    from pyorch.sidecars.beside import Sidecars

    n_experts = [layer.n_expert for layer in model_map.decoded_layers]
    if recording is not None:
        return inclusion_by_rank(recording.experts[recording.schedule(batch).order], max(n_experts)), "of a trace"
    kept = Sidecars(model_map).inclusion()
    if kept is not None:
        return kept, f"the requests in {container.default_path(model_map.path, 'maps')}"
    return even_inclusion(n_experts, model_map.info.n_expert_used), "unknown: all experts count as used alike"


def measured_machine(args: argparse.Namespace, model_map):
    """Returns the Machine: the values of --read-bandwidth, --decode-bandwidth and --workers, the rest measured."""
    from pyorch.llama.cores import physical_cores
    from pyorch.runtime.decompression import measure_recovery, recovery_threads
    from pyorch.runtime.disk import measure_bandwidth
    from pyorch.sidecars.memory_plan import Machine

    # Measured again: the stored value may be of a moment at which files had just been written.
    reading = args.read_bandwidth or measure_bandwidth(model_map, PROBE_SECONDS).bytes_per_second
    decoding = args.decode_bandwidth or measure_recovery(model_map, DECODE_SECONDS)
    if decoding is None:
        raise FormatError(f"{model_map.pack} is damaged: none of its experts can be decoded")
    return Machine(reading, decoding, args.workers or recovery_threads(physical_cores()))


def _row(name: str, split) -> dict[str, Any]:
    """Of one division. shares: of the budget for F, C, S and E; hits: of a token's experts in a layer those in each
    pool and in none, as expected; wait_ms: that a token waits for, as expected: of several sequences, what their tokens
    need together, and what these wait for."""
    return {"name": name, "shares": split.shares, "compressed": split.compressed,
            "hits": tuple(float(n) for n in split.hits.mean(axis=0)), "wait_ms": 1000 * split.makespan}


def _computing(report: dict[str, Any]) -> str:
    source = {"given": "given", "trace": f"recorded in {report['trace']}", "calibrated": "measured by pyorch calibrate"}
    if report["compute_ms"] is None:
        return ("not known, so no wait is hidden behind it: give --compute-ms, or record the trace anew with pyorch "
                "profile")
    return f"{report['compute_ms']:.3g} ms a token ({source[report['compute_from']]})"


def _parts(report: dict[str, Any], info) -> list[str | Table | Facts]:
    best, batch, n_workers = report["rows"][0], report["batch"], report["n_workers"]
    how = "compressed experts" if best["compressed"] else "experts as the model has them: compression does not pay"
    tokens, waits = ("a token's", "a token waits") if batch == 1 else (f"{batch} tokens'", f"{batch} tokens wait")
    columns = ("", *(f"{name} %" for name in _POOL_NAMES), *_POOL_NAMES, "missed", "wait ms")
    rows = [[row["name"], *(f"{100 * share:.0f}" for share in row["shares"]), *(f"{n:.2f}" for n in row["hits"]),
             format(row["wait_ms"], ".1f" if row["wait_ms"] >= 10 else ".3g")] for row in report["rows"]]
    played = (f"; the best of {report['n_played']} that were played on {report['n_played_tokens']} tokens"
              if report["n_played"] else "")
    return [
        Facts([
            ("budget", f"{format_bytes(report['budget'])} ({report['budget'] / info.slots_bytes:.0%} of the experts)"),
            ("routing", report["routing"]),
            ("machine", f"reads {report['bytes_per_second'] / 1e9:.3g} GB/s; "
                        f"{'1 thread decodes' if n_workers == 1 else f'{n_workers} threads decode'} "
                        f"{report['decoded_per_second'] / 1e9:.3g} GB/s each"),
            ("search", f"{report['n_splits']} divisions, {report['n_evaluated']} computed to the end, "
                       f"{report['seconds']:.2f} s{played}"),
            *([("computing", _computing(report))] if report["n_played"] else []),
        ]),
        "",
        Table(columns, rows, left=("",), title=f"shares of the budget; of {tokens} experts in a layer, those in each "
                                               f"form; what {waits} for"),
        "",
        f"{report['plan']}: {how}",
    ]
