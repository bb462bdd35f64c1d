"""`pyorch replay`: what a recorded trace would cost under other settings, in simulated time."""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyorch.cli.numbers import number, rate, whole
from pyorch.cli.options import add_command, add_model, print_json
from pyorch.cli.progress import Progress
from pyorch.cli.settings import add_settings, given_settings, listed, names
from pyorch.cli.tables import Table, show
from pyorch.errors import PyorchError
from pyorch.settings.budget import REPLAY_BUDGETS
from pyorch.settings.device import MAX_AHEAD
from pyorch.settings.prefetch import AUTO

if TYPE_CHECKING:
    from pyorch.sidecars.predictor import PredictorFile
    from pyorch.traces.replay import Replayed

PROBE_SECONDS = 2.0

_LISTS = ("budget", "policy", "prefetch")
_POOLS = "pools"  # one setting: it has commas itself

_COLUMNS = (
    "policy", "predictor", "budget", "hits", "ms/token", "stall ms", "MiB read", "useful MiB", "late MiB", "wasted MiB",
    "recall",
)
_PACKED_COLUMNS = ("in part",)  # and that, of a compressed pack
_AHEAD_COLUMNS = ("forecasts", "right")  # and those, where forecasts upload to a device
_DEVICE_COLUMNS = ("VRAM hits", "MiB uploaded")  # and those, of a device

_ASSUMED = "assumed"  # nobody said how long computing takes
_TIMED = ("ms/token", "stall ms")  # columns, and measures, that then mean nothing
_TIMES = ("tpot_ms", "stall_ms", "tokens_per_second")

_MEASURES = ("n_tokens", "hit_rate", *_TIMES, "bytes_per_token", "useful", "late", "wasted", "useful_bytes",
             "late_bytes", "wasted_bytes", "predict_wall_ms")  # of pyorch.traces.replay.Replayed


@dataclass(frozen=True)
class Report:
    """What --json prints. rows: of each combination, see _row()."""

    model: str
    trace: Path
    read_bandwidth: float
    bandwidth_measured: bool
    read_latency_s: float
    pause_ms: float
    pause_every_ms: float
    compute_ms: float
    compute_from: str  # given, calibrated or assumed
    route_share: float
    batch: int
    pools: str | None
    decode_bandwidth: float | None
    n_decoders: int
    vram_budget: str | None
    device_misses: str | None
    link_bandwidth: float | None
    device_speed: float | None
    device_ahead: int
    rows: list[dict[str, Any]]


def add_parser(subparsers: argparse._SubParsersAction, summary: str) -> argparse.ArgumentParser:
    from pyorch.library.choices import listed, policies, predictors

    parser = add_command(
        subparsers, "replay", summary,
        "pyorch profile olmoe.gguf --data prose.txt --states -o olmoe.trace\n"
        "  pyorch replay olmoe.gguf olmoe.trace --policy lru,belady --prefetch none,next-router:2:0.5 --budget 25%,40%",
    )
    parser.description += (
        " No layer is computed and nothing is read: the cache, the predictors and the disk run in simulated time, so "
        "many settings can be compared in seconds."
    )
    add_model(parser)
    parser.add_argument("trace", type=Path, metavar="FILE.trace",
                        help="a trace that pyorch profile recorded; predictors that apply routers need one with "
                             "--states")
    parser.description += (
        f" The policy {', '.join(policies().foreseeing)} and the predictor {', '.join(predictors().foreseeing)} know "
        f"the future; the policies {listed(policies().compared, 'and')} and the predictors "
        f"{listed(predictors().compared, 'and')} are there to be compared with. Nothing is read ahead unless "
        "--prefetch says so."
    )
    add_settings(parser, *_LISTS, _POOLS, lists=_LISTS,
                 defaults={"budget": ",".join(map(str, REPLAY_BUDGETS)), "prefetch": "none",
                           _POOLS: "1,0,0,0 with --decode-bandwidth, else experts are read from the model"})
    parser.add_argument("--read-bandwidth", type=rate, metavar="RATE",
                        help="speed of the disk, such as 1GB/s (default: measured on the model's file, in two seconds)")
    parser.add_argument("--decode-bandwidth", type=rate, metavar="RATE",
                        help="bytes of matrices that one thread recovers in a second, of as many as an engine "
                             "has, where experts come from the compressed pack beside the model (default: with "
                             "--pools, decoding takes no time)")
    parser.add_argument("--vram-budget", metavar="SIZE",
                        help="slots of a device in front of the memory of --budget: a size, or a share of the experts "
                             "(default: no device)")
    parser.add_argument("--device-misses", metavar="WHO",
                        help="what becomes of experts that the device lacks: processor, upload or auto with its five "
                             "rates, as pyorch run takes it (default: processor)")
    parser.add_argument("--link-bandwidth", type=rate, metavar="RATE",
                        help="speed of uploads to the device, such as 12GB/s (default: they take no time)")
    parser.add_argument("--device-speed", type=number(above=0), metavar="TIMES",
                        help="how many times as fast as the processor the device computes (default: 1)")
    parser.add_argument("--device-ahead", type=whole(0, MAX_AHEAD), default=0, metavar="N",
                        help="experts of a layer that forecasts upload before it comes, as pyorch run takes it "
                             "(default: 0)")
    parser.add_argument("--read-latency-ms", type=float, default=0.0, metavar="MS",
                        help="time that each read takes, beside that of its bytes (default: 0)")
    parser.add_argument("--pause-ms", type=float, default=0.0, metavar="MS",
                        help="time for which the disk stands still at the end of each period (default: 0)")
    parser.add_argument("--pause-every-ms", type=float, default=0.0, metavar="MS", help="length of these periods")
    parser.add_argument("--compute-ms", type=number(above=0), metavar="MS",
                        help="time to decode a token when all experts are resident; pyorch bench measures it (default: "
                             "what pyorch calibrate measured; else 30 is assumed, and no times are shown)")
    parser.add_argument("--route-share", type=float, metavar="SHARE",
                        help="share of this time that passes in a layer before its router has decided (default: the "
                             "share of the dense weights in all weights that a token uses)")
    parser.add_argument("--predict-ms", type=float, default=0.0, metavar="MS",
                        help="time from the decision of a router to the predictions that follow from it (default: 0)")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="decode N requests together (default: 1)")
    parser.add_argument("--warm", type=int, default=0, metavar="N", help="begin to count after N tokens (default: 0)")
    parser.add_argument("--prompts", action="store_true",
                        help="compute prompts as a whole; otherwise their tokens are decoded one by one")
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    from pyorch.llama.memory import physical_cores
    from pyorch.runtime.disk import measure_bandwidth
    from pyorch.runtime.recovery import recovery_threads
    from pyorch.settings.pools import Pools
    from pyorch.sidecars import packed_sizes, packs
    from pyorch.sidecars.beside import Sidecars
    from pyorch.sidecars.history import ExpertMaps
    from pyorch.sidecars.predictor import PredictorFile
    from pyorch.traces.file import Trace
    from pyorch.traces.recording import Recording
    from pyorch.traces.replay import DEFAULTS, ReplaySettings, default_route_share, replay

    given, decoding, link = args.read_bandwidth, args.decode_bandwidth, args.link_bandwidth or 0.0
    speed = args.device_speed or 1.0
    if args.vram_budget is None and (args.device_misses or link or args.device_speed or args.device_ahead):
        raise PyorchError("--device-misses, --device-speed, --device-ahead and --link-bandwidth are about a device: "
                          "say its memory with --vram-budget")
    if args.device_ahead and any(p.predictor == AUTO for p in listed(args, "prefetch") or ()):
        raise PyorchError("--device-ahead uploads what a predictor names, at any time, and auto does as time allows: "
                          "name a predictor, such as --prefetch quasi-hidden")
    vram_budget, misses = _device(args.vram_budget, args.device_misses)
    pools = given_settings(args, *_LISTS).get(_POOLS)
    packed = pools is not None or decoding is not None
    with packs.open_model(args.model) as model_map, Progress() as progress:
        if packed:
            packed_sizes.require(model_map)
        packed = packed_sizes.part_sizes(model_map) is not None  # a slim model's pack is attached whatever it is
        uses = Sidecars(model_map).uses() if packed else None
        recording = Recording.from_trace(Trace(args.trace), model_map)
        sidecars = model_map.sidecars()
        maps = ExpertMaps.read(sidecars["maps"], model_map) if "maps" in sidecars else None
        predictor_file = PredictorFile.read(sidecars["predictor"], model_map) if "predictor" in sidecars else None
        bandwidth = given or measure_bandwidth(model_map, PROBE_SECONDS).bytes_per_second
        n_decoders = recovery_threads(physical_cores())
        compute_ms, compute_from = _compute_time(args.compute_ms, predictor_file)
        share = default_route_share(model_map) if args.route_share is None else args.route_share
        combinations = list(itertools.product(*(listed(args, name) or DEFAULTS[name] for name in _LISTS)))
        rows = []
        for n, (budget, policy, prefetch) in enumerate(combinations):
            progress.update(f"replaying {policy or names()['policy']}, {prefetch}, {budget}", n, len(combinations))
            settings = ReplaySettings(
                policy, prefetch, budget, bandwidth, args.read_latency_ms / 1000, compute_ms,
                share, predict_ms=args.predict_ms, n_warm_tokens=args.warm, batch=args.batch,
                as_decode=not args.prompts, pause_ms=args.pause_ms, pause_every_ms=args.pause_every_ms,
                pools=pools or Pools(), decode_bandwidth=decoding or 0.0, n_decoders=n_decoders,
                vram_budget=vram_budget, device_misses=misses, link_bandwidth=link,
                device_speed=speed,
                device_ahead=args.device_ahead,
            )
            found = replay(model_map, recording, settings, maps, predictor_file, uses=uses)
            rows.append(_row(found, timed=compute_from != _ASSUMED))
    report = Report(args.model, args.trace, bandwidth, given is None, args.read_latency_ms / 1000, args.pause_ms,
                    args.pause_every_ms, compute_ms, compute_from, share, args.batch,
                    str(pools or Pools()) if packed else None, decoding, n_decoders, args.vram_budget,
                    str(misses) if args.vram_budget else None, link or None, speed if args.vram_budget else None,
                    args.device_ahead, rows)
    if args.json:
        print_json(report)
    else:
        show(_parts(report))
    return 0


def _device(budget: str | None, misses: str | None):
    """The Budget and the DeviceMisses of the options. PyorchError for what is none."""
    from pyorch.settings.settings import Settings

    given = {"vram_budget": budget or "0", **({"device_misses": misses} if misses else {})}
    settings = Settings(device="auto", **given)
    return settings.vram_budget, settings.device_misses


def _compute_time(given: float | None, calibrated: PredictorFile | None) -> tuple[float, str]:
    """Milliseconds of a token, and who says so."""
    from pyorch.traces.replay import ReplaySettings

    if given is not None:
        return given, "given"
    if calibrated is not None and calibrated.compute_ms is not None:
        return calibrated.compute_ms, "calibrated"
    return ReplaySettings.compute_ms, _ASSUMED


def _row(replayed: Replayed, timed: bool) -> dict[str, Any]:
    """Of one combination. timed: whether times mean anything.

    recall: mean over layers, by how many layers ahead the predictions are. part_rate: share of the experts that were
    needed of which a compressed form was in memory (--pools). device_hit_rate: share of the uses that found the expert
    on the device (--vram-budget); hit_rate is that of host memory, among the others. uploaded_bytes: for each token.
    ahead: experts that forecasts ordered to the device, for each token; ahead_precision: share of those that their
    layer used, nan without any (--device-ahead).
    """
    import numpy as np

    recall = []
    for distance in range(1, replayed.rank_hits.shape[1] + 1):
        of_layers = replayed.recall_at(distance)
        recall.append(float(np.nanmean(of_layers)) if np.isfinite(of_layers).any() else float("nan"))
    settings, stats = replayed.settings, replayed.stats
    uses, in_part = stats.hits + stats.misses, stats.compressed_hits + stats.sm_hits + stats.e_hits
    measures = {name: getattr(replayed, name) if timed or name not in _TIMES else None for name in _MEASURES}
    return {
        "policy": settings.policy or names()["policy"], "predictor": str(settings.prefetch),
        "budget": str(settings.budget), **measures, "recall": recall,
        "part_rate": in_part / uses if uses else float("nan"), "device_hit_rate": stats.device_hit_rate,
        "uploaded_bytes": stats.device_bytes / replayed.n_tokens, "ahead": stats.device_ahead / replayed.n_tokens,
        "ahead_precision": stats.device_ahead_precision,
    }


def _parts(report: Report) -> list[str | Table]:
    how = "measured" if report.bandwidth_measured else "given"
    latency = f" and {1000 * report.read_latency_s:g} ms a read" if report.read_latency_s else ""
    if report.pause_ms:
        latency += f", standing still for {report.pause_ms:g} of {report.pause_every_ms:g} ms"
    together = f", {report.batch} requests together" if report.batch > 1 else ""
    packed, timed = report.pools is not None, report.compute_from != _ASSUMED
    device = report.vram_budget is not None
    titles = (*_COLUMNS, *(_PACKED_COLUMNS if packed else ()), *(_AHEAD_COLUMNS if report.device_ahead else ()),
              *(_DEVICE_COLUMNS if device else ()))
    columns = [column for column in titles if timed or column not in _TIMED]
    decoding = "in no time" if report.decode_bandwidth is None else (
        f"with {report.decode_bandwidth / 1e9:.3g} GB/s by each of {report.n_decoders} threads")
    return [
        f"{report.trace}: {report.rows[0]['n_tokens']} tokens{together}",
        f"simulated: disk of {report.read_bandwidth / 1e9:.2f} GB/s ({how}){latency}; compute {report.compute_ms:.3g} "
        f"ms a token ({report.compute_from}), {report.route_share:.0%} of it before the routers",
        *(() if timed else ("times are not shown, for nobody said how long computing takes: give --compute-ms, or have "
                            "pyorch calibrate measure it",)),
        *([f"device: room for {report.vram_budget} of the experts, misses: {report.device_misses}, uploads "
           + (f"with {report.link_bandwidth / 1e9:.3g} GB/s" if report.link_bandwidth else "in no time")
           + f", computing {report.device_speed:g} times as fast as the processor"
           + (f", {report.device_ahead} experts of a layer ahead of it" if report.device_ahead else "")
           + "; hits are those of host memory, of what the device lacks"] if device else []),
        "MiB: for each token. useful, late, wasted: of what was read ahead. recall: share of the used experts that "
        "were predicted, one layer ahead and more",
        *([f"compressed pack: pools {report.pools}; decoded {decoding}. in part: experts that were needed of which a "
           "compressed form was in memory"] if packed else []),
        "",
        Table(columns, [[cell for column, cell in _cells(row).items() if column in columns] for row in report.rows],
              left=("policy", "predictor")),
    ]


def _cells(row: dict[str, Any]) -> dict[str, str]:
    """By the title of the column."""
    from pyorch.sizes import MiB

    per_token = [f"{row[name] / row['n_tokens'] / MiB:.1f}" for name in ("useful_bytes", "late_bytes", "wasted_bytes")]
    known = any(share == share for share in row["recall"])
    cells = (
        row["policy"], row["predictor"], row["budget"], _number(row["hit_rate"], ".1%"), _number(row["tpot_ms"]),
        _number(row["stall_ms"]), f"{row['bytes_per_token'] / MiB:.1f}", *per_token,
        " ".join(_number(share, ".0%") for share in row["recall"]) if known else "-", f"{row['part_rate']:.1%}",
        f"{row['ahead']:.1f}", _number(row["ahead_precision"], ".0%"), f"{row['device_hit_rate']:.1%}",
        f"{row['uploaded_bytes'] / MiB:.1f}",
    )
    return dict(zip((*_COLUMNS, *_PACKED_COLUMNS, *_AHEAD_COLUMNS, *_DEVICE_COLUMNS), cells))


def _number(value: float | None, form: str = ".1f") -> str:
    return "-" if value is None or value != value else format(value, form)
