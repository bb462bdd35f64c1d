"""Estimates the cost of a recorded trace with other settings, in simulated time."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np

from pyorch.cli.numbers import number, rate, whole
from pyorch.cli.options import add_model, answer
from pyorch.cli.progress import Progress
from pyorch.cli.settings import add_settings, given_settings, listed
from pyorch.cli.tables import Table
from pyorch.errors import PyorchError
from pyorch.library import choices
from pyorch.llama.cores import physical_cores
from pyorch.runtime.decompression import recovery_threads
from pyorch.runtime.disk import measure_bandwidth
from pyorch.settings.budget import Budget
from pyorch.settings.device_options import MAX_AHEAD, PROCESSOR
from pyorch.settings.pools import Pools
from pyorch.settings.prefetch import AUTO
from pyorch.settings.settings import Settings
from pyorch.sidecars import packs
from pyorch.sidecars.beside import Sidecars
from pyorch.sidecars.history import ExpertMaps
from pyorch.sizes import MiB
from pyorch.traces.file import Trace
from pyorch.traces.recording import Recording
from pyorch.traces.replay import Replayed, ReplaySettings, compute_time, replay
from scripts.papers import program

BUDGETS = tuple(map(Budget.parse, ("25%", "40%", "60%")))
PROBE_SECONDS = 2.0

_LISTS = ("budget", "policy", "prefetch")
_DEFAULTS = {"budget": BUDGETS, "policy": (ReplaySettings.policy,), "prefetch": (ReplaySettings.prefetch,)}
_POOLS = "pools"  # a single value, because it has commas itself

_ASSUMED = "assumed"  # the time of computing is unknown
_TIMED = ("ms/token", "stall ms")  # columns, and measures, without meaning then
_TIMES = ("tpot_ms", "stall_ms", "tokens_per_second")

_MEASURES = ("n_tokens", "hit_rate", *_TIMES, "bytes_per_token", "useful", "late", "wasted", "useful_bytes",
             "late_bytes", "wasted_bytes", "predict_wall_ms")  # of pyorch.traces.replay.Replayed


def main(argv: list[str] | None = None) -> int:
    parser = program.parser_of(
        "scripts.replay", "simulate what a trace would cost under other settings",
        "olmoe.gguf olmoe.trace --policy lru,belady --prefetch none,quasi-hidden:2 --budget 25%,40%")
    parser.description += (
        " No layer is computed and nothing is read: the cache, the predictors and the disk run in simulated time, so "
        "many settings can be compared in seconds."
    )
    add_model(parser)
    parser.add_argument("trace", type=Path, metavar="FILE.trace",
                        help="a trace that pyorch profile recorded; predictors that apply routers need one with "
                             "--states")
    parser.description += (
        f" The policy {', '.join(choices.policies().foreseeing)} and the predictor "
        f"{', '.join(choices.predictors().foreseeing)} know the future; the policies "
        f"{choices.listed(choices.policies().compared, 'and')} are for comparison. Nothing is prefetched without "
        "--prefetch."
    )
    add_settings(parser, *_LISTS, _POOLS, lists=_LISTS,
                 defaults={"budget": ",".join(map(str, BUDGETS)), "prefetch": "none",
                           _POOLS: "1,0,0,0 with --decode-bandwidth, else experts are read from the model"})
    parser.add_argument("--read-bandwidth", type=rate, metavar="RATE",
                        help="speed of the disk, such as 1GB/s (default: measured on the model's file, in two seconds)")
    parser.add_argument("--decode-bandwidth", type=rate, metavar="RATE",
                        help="bytes of matrices that one thread recovers in a second, with the threads of an engine, "
                             "if experts come from the compressed pack next to the model (default: with "
                             "--pools, decoding takes no time)")
    parser.add_argument("--vram-budget", metavar="SIZE",
                        help="slots of a device in front of the memory of --budget: a size, or a share of the experts "
                             "(default: no device)")
    parser.add_argument("--device-misses", metavar="WHO",
                        help="what computes experts that the device lacks: processor or upload, as for pyorch run "
                             "(default: processor)")
    parser.add_argument("--link-bandwidth", type=rate, default=0.0, metavar="RATE",
                        help="speed of uploads to the device, such as 12GB/s (default: they take no time)")
    parser.add_argument("--device-speed", type=number(above=0), metavar="TIMES",
                        help="speed of the device relative to the processor (default: 1)")
    parser.add_argument("--device-ahead", type=whole(0, MAX_AHEAD), default=0, metavar="N",
                        help="experts of a layer that forecasts upload ahead, as for pyorch run "
                             "(default: 0)")
    parser.add_argument("--compute-ms", type=number(above=0), metavar="MS",
                        help="time to decode a token when all experts are resident; pyorch bench measures it (default: "
                             "the trace's, otherwise that of pyorch calibrate; without both, 30 is assumed, and no "
                             "times are shown)")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="decode N requests together (default: 1)")
    parser.add_argument("--warm", type=int, default=0, metavar="N", help="begin to count after N tokens (default: 0)")
    parser.add_argument("--prompts", action="store_true",
                        help="compute prompts as a whole; otherwise their tokens are decoded one by one")
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object")
    return program.run(parser, _run, argv)


def _run(args: argparse.Namespace) -> int:
    of_device = _of_device(args)
    pools = given_settings(args, *_LISTS).get(_POOLS)
    packed = pools is not None or args.decode_bandwidth is not None
    with packs.open_model(args.model) as model_map, Progress() as progress:
        if packed:
            packs.require_compressed(model_map)
        packed = packs.part_sizes(model_map) is not None  # a slim model's pack is always attached
        sidecars, trace, paths = Sidecars(model_map), Trace(args.trace), model_map.sidecars()
        uses = sidecars.uses() if packed else None
        recording = Recording.from_trace(trace, model_map)
        maps = ExpertMaps.read(paths["maps"], model_map) if "maps" in paths else None
        predictor_file = sidecars.predictor if "predictor" in paths else None
        compute_ms, compute_from = compute_time(args.compute_ms, trace, sidecars)
        if compute_ms is None:
            compute_ms, compute_from = ReplaySettings.compute_ms, _ASSUMED
        settings = ReplaySettings(
            read_bandwidth=args.read_bandwidth or measure_bandwidth(model_map, PROBE_SECONDS).bytes_per_second,
            compute_ms=compute_ms, n_warm_tokens=args.warm, batch=args.batch, as_decode=not args.prompts,
            pools=pools or Pools(), decode_bandwidth=args.decode_bandwidth or 0.0,
            n_decoders=recovery_threads(physical_cores()), **of_device,
        )
        combinations = list(itertools.product(*(listed(args, name) or _DEFAULTS[name] for name in _LISTS)))
        rows = []
        for n, (budget, policy, prefetch) in enumerate(combinations):
            step = f"replaying {policy or choices.default_policy()}, {prefetch}, {budget}"
            progress.update(step, n, len(combinations))
            settings = dataclasses.replace(settings, budget=budget, policy=policy, prefetch=prefetch)
            found = replay(model_map, recording, settings, maps, predictor_file, uses=uses)
            rows.append(_row(found, timed=compute_from != _ASSUMED))
    of = (args, settings, compute_from, packed, rows)
    return answer(args, _report(*of), lambda: _parts(*of))


def _of_device(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the options of a device, for ReplaySettings. PyorchError: they are impossible."""
    if args.vram_budget is None and (args.device_misses or args.link_bandwidth or args.device_speed
                                     or args.device_ahead):
        raise PyorchError("--device-misses, --device-speed, --device-ahead and --link-bandwidth are about a device: "
                          "say its memory with --vram-budget")
    if args.device_ahead and any(p.predictor == AUTO for p in listed(args, "prefetch") or ()):
        raise PyorchError("--device-ahead uploads what a predictor names, at any time, and auto does as time allows: "
                          "name a predictor, such as --prefetch quasi-hidden")
    read = Settings(device="auto", vram_budget=args.vram_budget or "0", device_misses=args.device_misses or None)
    return {"vram_budget": read.vram_budget, "device_misses": read.device_misses or PROCESSOR,
            "device_ahead": args.device_ahead, "link_bandwidth": args.link_bandwidth,
            "device_speed": args.device_speed or 1.0}


def _row(replayed: Replayed, timed: bool) -> dict[str, Any]:
    """Returns the row of one combination.

    recall: mean over layers, by the distance of predictions in layers. part_rate: share of the needed experts of which
    a compressed form was in memory (--pools). device_hit_rate: share of the uses that found the expert on the device
    (--vram-budget); hit_rate is that of host memory, among the others. uploaded_bytes: per token. ahead: experts that
    forecasts uploaded, per token; ahead_precision: their share that their layer used, nan without any (--device-ahead).

    timed: Whether times have a meaning.
    """
    recall = []
    for distance in range(1, replayed.rank_hits.shape[1] + 1):
        of_layers = replayed.recall_at(distance)
        recall.append(float(np.nanmean(of_layers)) if np.isfinite(of_layers).any() else float("nan"))
    settings, stats = replayed.settings, replayed.stats
    uses, in_part = stats.hits + stats.misses, stats.compressed_hits + stats.sm_hits + stats.e_hits
    measures = {name: getattr(replayed, name) if timed or name not in _TIMES else None for name in _MEASURES}
    return {
        "policy": settings.policy or choices.default_policy(), "predictor": str(settings.prefetch),
        "budget": str(settings.budget), **measures, "recall": recall,
        "part_rate": in_part / uses if uses else float("nan"), "device_hit_rate": stats.device_hit_rate,
        "uploaded_bytes": stats.device_bytes / replayed.n_tokens, "ahead": stats.device_ahead / replayed.n_tokens,
        "ahead_precision": stats.device_ahead_precision,
    }


def _report(
    args: argparse.Namespace, settings: ReplaySettings, compute_from: str, packed: bool, rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """Returns the object of --json: values common to all combinations, null without a pack or a device; and rows."""
    of_device = args.vram_budget is not None
    shared = {name: getattr(settings, name) for name in
              ("read_bandwidth", "compute_ms", "batch", "n_decoders", "device_ahead")}
    return {
        "model": args.model, "trace": args.trace, "bandwidth_measured": args.read_bandwidth is None,
        "compute_from": compute_from, **shared, "pools": str(settings.pools) if packed else None,
        "decode_bandwidth": args.decode_bandwidth, "vram_budget": args.vram_budget,
        "device_misses": settings.device_misses if of_device else None,
        "link_bandwidth": args.link_bandwidth or None, "device_speed": settings.device_speed if of_device else None,
        "rows": rows,
    }


def _parts(
    args: argparse.Namespace, settings: ReplaySettings, compute_from: str, packed: bool, rows: list[dict[str, Any]]
) -> list[str | Table]:
    timed, of_device = compute_from != _ASSUMED, args.vram_budget is not None
    left_out = {
        *(() if timed else _TIMED), *(() if packed else ("in part",)),
        *(() if settings.device_ahead else ("forecasts", "right")),
        *(() if of_device else ("VRAM hits", "MiB uploaded")),
    }
    cells = [{title: cell for title, cell in _cells(row).items() if title not in left_out} for row in rows]
    together = f", {settings.batch} requests together" if settings.batch > 1 else ""
    parts: list[str | Table] = [
        f"{args.trace}: {rows[0]['n_tokens']} tokens{together}",
        f"simulated: disk of {settings.read_bandwidth / 1e9:.2f} GB/s "
        f"({'given' if args.read_bandwidth else 'measured'}); compute {settings.compute_ms:.3g} ms a token "
        f"({compute_from})",
    ]
    if not timed:
        parts.append("times are not shown, for nobody said how long computing takes: give --compute-ms, or have pyorch "
                     "calibrate measure it")
    if of_device:
        ahead = f", {settings.device_ahead} experts of a layer ahead of it" if settings.device_ahead else ""
        parts.append(
            f"device: room for {args.vram_budget} of the experts, misses: {settings.device_misses}, uploads "
            f"{_speed(args.link_bandwidth)}, computing {settings.device_speed:g} times as fast as the processor{ahead};"
            " hits are those of host memory, of what the device lacks")
    parts.append("MiB: for each token. useful, late, wasted: of what was read ahead. recall: share of the used experts "
                 "that were predicted, one layer ahead and more")
    if packed:
        threads = f" by each of {settings.n_decoders} threads" if args.decode_bandwidth else ""
        parts.append(f"compressed pack: pools {settings.pools}; decoded {_speed(args.decode_bandwidth)}{threads}. in "
                     "part: experts that were needed of which a compressed form was in memory")
    return [*parts, "", Table(list(cells[0]), [list(row.values()) for row in cells], left=("policy", "predictor"))]


def _cells(row: dict[str, Any]) -> dict[str, str]:
    """Returns the cells by the title of the column."""
    useful, late, wasted = (f"{row[f'{name}_bytes'] / row['n_tokens'] / MiB:.1f}"
                            for name in ("useful", "late", "wasted"))
    known = any(share == share for share in row["recall"])
    return {
        "policy": row["policy"], "predictor": row["predictor"], "budget": row["budget"],
        "hits": _number(row["hit_rate"], ".1%"), "ms/token": _number(row["tpot_ms"]),
        "stall ms": _number(row["stall_ms"]), "MiB read": f"{row['bytes_per_token'] / MiB:.1f}", "useful MiB": useful,
        "late MiB": late, "wasted MiB": wasted,
        "recall": " ".join(_number(share, ".0%") for share in row["recall"]) if known else "-",
        "in part": f"{row['part_rate']:.1%}", "forecasts": f"{row['ahead']:.1f}",
        "right": _number(row["ahead_precision"], ".0%"), "VRAM hits": f"{row['device_hit_rate']:.1%}",
        "MiB uploaded": f"{row['uploaded_bytes'] / MiB:.1f}",
    }


def _speed(bytes_per_second: float | None) -> str:
    return f"with {bytes_per_second / 1e9:.3g} GB/s" if bytes_per_second else "in no time"


def _number(value: float | None, form: str = ".1f") -> str:
    return "-" if value is None or value != value else format(value, form)


if __name__ == "__main__":
    sys.exit(main())
