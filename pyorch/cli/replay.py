"""`pyorch replay`: what a recorded trace would cost under other settings, in simulated time."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from pyorch.cli.options import add_command, print_json
from pyorch.errors import PyorchError

_PROBE_SECONDS = 2.0

_COLUMNS = (
    "policy", "predictor", "budget", "hits", "ms/token", "stall ms", "MiB read", "useful MiB", "late MiB", "wasted MiB",
    "recall",
)


@dataclass(frozen=True)
class Row:
    """Of one combination. Names and units are those of pyorch.replay.Replayed; recall: mean over layers, by how many
    layers ahead the forecasts are."""

    policy: str
    predictor: str
    budget: str
    n_tokens: int
    hit_rate: float
    tpot_ms: float
    tokens_per_second: float
    stall_ms: float
    bytes_per_token: float
    useful: int
    late: int
    wasted: int
    useful_bytes: int
    late_bytes: int
    wasted_bytes: int
    predict_wall_ms: float
    recall: list[float]


@dataclass(frozen=True)
class Report:
    """What --json prints."""

    model: str
    trace: Path
    read_bandwidth: float
    bandwidth_measured: bool
    read_latency_s: float
    compute_ms: float
    route_share: float
    batch: int
    rows: list[Row]


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    parser = add_command(
        subparsers, "replay", "show what a recorded trace would cost under other settings, in simulated time",
        "pyorch replay olmoe.gguf olmoe.trace --policy lru,belady --predictor none,next-router:2:0.5 --budget 25%,40%",
    )
    parser.add_argument("model", metavar="MODEL.gguf")
    parser.add_argument("trace", type=Path, metavar="FILE.trace",
                        help="what pyorch profile recorded, with --states for predictors that compute with routers")
    parser.add_argument("--policy", default="lru", metavar="LIST",
                        help="which expert is evicted first: lru, lfu, finemoe, or belady, which knows the future "
                             "(default: lru)")
    parser.add_argument("--predictor", default="none", metavar="LIST",
                        help="what is read ahead, as for --prefetch of pyorch run: NAME or NAME:DISTANCE:PRECISION; or "
                             "oracle, which knows the future (default: none)")
    parser.add_argument("--budget", default="25%,40%,60%", metavar="LIST",
                        help="memory for experts (default: %(default)s)")
    parser.add_argument("--read-bandwidth", metavar="RATE",
                        help="of the disk, such as 1GB/s (default: measured in two seconds, on the model's file)")
    parser.add_argument("--read-latency-ms", type=float, default=0.0, metavar="MS",
                        help="what each read costs beside its bytes (default: 0)")
    parser.add_argument("--compute-ms", type=float, default=30.0, metavar="MS",
                        help="a decoded token with all experts resident, as pyorch bench measures it (default: 30)")
    parser.add_argument("--route-share", type=float, metavar="SHARE",
                        help="of it, what comes before a layer's router is known (default: the share of dense weights "
                             "in what a token reads)")
    parser.add_argument("--predict-ms", type=float, default=0.0, metavar="MS",
                        help="from a layer's router to the guesses that follow from it (default: 0)")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="requests decoded together (default: 1)")
    parser.add_argument("--warm", type=int, default=0, metavar="N", help="tokens before counting begins (default: 0)")
    parser.add_argument("--prompts", action="store_true",
                        help="play prompts as prompts; by default each of their tokens is played as one that is "
                             "decoded")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    from pyorch.runtime.disk import expert_ranges, measure_bandwidth
    from pyorch.sidecars.history import ExpertMaps
    from pyorch.runtime.model_map import ModelMap
    from pyorch.sidecars.predictor import PredictorFile
    from pyorch.settings.prefetch import Prefetch
    from pyorch.traces.replay import Recording, ReplaySettings, default_route_share, replay
    from pyorch.traces.file import Trace

    given = parse_rate(args.read_bandwidth) if args.read_bandwidth else None
    with ModelMap(args.model) as model_map:
        recording = Recording.from_trace(Trace(args.trace), model_map)
        sidecars = model_map.sidecars()
        maps = ExpertMaps.read(sidecars["maps"], model_map) if "maps" in sidecars else None
        predictor_file = PredictorFile.read(sidecars["predictor"], model_map) if "predictor" in sidecars else None
        bandwidth = given or measure_bandwidth(expert_ranges(model_map), _PROBE_SECONDS).bytes_per_second
        share = default_route_share(model_map) if args.route_share is None else args.route_share
        rows = []
        for budget in args.budget.split(","):
            for policy in args.policy.split(","):
                for predictor in args.predictor.split(","):
                    settings = ReplaySettings(
                        policy, Prefetch.parse(predictor), budget, bandwidth, args.read_latency_ms / 1000,
                        args.compute_ms, share, predict_ms=args.predict_ms, n_warm_tokens=args.warm, batch=args.batch,
                        as_decode=not args.prompts,
                    )
                    rows.append(_row(predictor, replay(model_map, recording, settings, maps, predictor_file)))
    report = Report(args.model, args.trace, bandwidth, given is None, args.read_latency_ms / 1000, args.compute_ms,
                    share, args.batch, rows)
    if args.json:
        print_json(report)
    else:
        print("\n".join(_lines(report)))
    return 0


def parse_rate(text: str) -> float:
    """Bytes a second, of a size with or without "/s". PyorchError for what is neither."""
    from pyorch.sizes import Amount

    try:
        rate = Amount.parse(re.sub(r"/s$", "", text.strip(), flags=re.IGNORECASE)).n_bytes or 0
    except ValueError:
        rate = 0
    if rate <= 0:
        raise PyorchError(f'read bandwidth "{text}" is not understood: use bytes a second such as 1GB/s or 800MiB/s')
    return float(rate)


def _row(predictor: str, it) -> Row:
    import numpy as np

    recall = []
    for distance in range(1, it.rank_hits.shape[1] + 1):
        of_layers = it.recall_at(distance)
        recall.append(float(np.nanmean(of_layers)) if np.isfinite(of_layers).any() else float("nan"))
    same = {name: getattr(it, name) for name in Row.__dataclass_fields__ if hasattr(it, name) and name != "recall"}
    return Row(policy=it.settings.policy, predictor=predictor, budget=str(it.settings.budget), recall=recall, **same)


def _lines(report: Report) -> list[str]:
    from pyorch.sizes import MiB

    how = "measured" if report.bandwidth_measured else "given"
    latency = f" and {1000 * report.read_latency_s:g} ms a read" if report.read_latency_s else ""
    together = f", {report.batch} requests together" if report.batch > 1 else ""
    lines = [
        f"{report.trace}: {report.rows[0].n_tokens} tokens{together}",
        f"simulated: disk of {report.read_bandwidth / 1e9:.2f} GB/s ({how}){latency}; compute {report.compute_ms:g} ms "
        f"a token, {report.route_share:.0%} of it before the routers",
        "MiB: of each token; recall: of the experts used, those that were forecast, 1 layer ahead and more",
        "",
    ]
    cells = [_COLUMNS]
    for it in report.rows:
        per_token = [f"{n / it.n_tokens / MiB:.1f}" for n in (it.useful_bytes, it.late_bytes, it.wasted_bytes)]
        recall = "-" if all(share != share for share in it.recall) else " ".join(
            "-" if share != share else f"{share:.0%}" for share in it.recall)
        cells.append((
            it.policy, it.predictor, it.budget, "-" if it.hit_rate != it.hit_rate else f"{it.hit_rate:.1%}",
            _number(it.tpot_ms), _number(it.stall_ms), f"{it.bytes_per_token / MiB:.1f}", *per_token, recall,
        ))
    widths = [max(len(row[i]) for row in cells) for i in range(len(_COLUMNS))]
    for row in cells:
        left = [cell.ljust(width) for cell, width in zip(row[:2], widths)]
        right = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:])]
        lines.append("  ".join(left + right).rstrip())
    return lines


def _number(value: float) -> str:
    return "-" if value != value else f"{value:.1f}"
