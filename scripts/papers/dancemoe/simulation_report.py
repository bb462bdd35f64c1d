"""Reports simulations: rows of numbers, tables, CSV and pictures."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass
from pathlib import Path

from pyorch.cli.tables import Table

MEGABIT = 1e6 / 8  # bytes


@dataclass(frozen=True)
class ServerRow:
    """A server in seconds and shares, also over time. `busy` is its device's share of time spent computing."""

    name: str
    n_requests: int
    latency_s: float
    local_ratio: float
    busy: float
    latency_over_time_s: list[float]
    local_over_time: list[float]
    requests_over_time: list[int]


@dataclass(frozen=True)
class ChangeRow:
    """A decision of the scheduler.

    The remote times are seconds in an interval. The candidate is adopted if candidate + migration < current (DanceMoE,
    eq. 4).

    Attributes:
        current_s: Remote time of the current placement, C(P).
        candidate_s: Remote time of the candidate, C(P').
        migration_s: Time of the migration, T_mig.
        finished_s: Time when the experts had moved.
    """

    time_s: float
    adopted: bool
    current_s: float
    candidate_s: float
    migration_s: float
    n_moves: int
    n_bytes: int
    finished_s: float


@dataclass(frozen=True)
class Row:
    """The results of one simulation. Latencies are means, in seconds.

    Attributes:
        before_s, after_s: Of requests that arrive before and after the workload changes; nan if it does not change.
        busiest: The largest share of time that a server's device computed.
    """

    algorithm: str
    migration: bool
    n_servers: int
    megabits: float
    arrivals: str
    n_requests: int
    latency_s: float
    latency_p50_s: float
    latency_p95_s: float
    first_token_s: float
    before_s: float
    after_s: float
    local_ratio: float
    busiest: float
    n_messages: int
    n_bytes: float
    n_read: int
    duration_s: float
    bins_s: list[float]
    local_over_time: list[float]
    latency_over_time_s: list[float]
    changes: list[ChangeRow]
    servers: list[ServerRow]


@dataclass(frozen=True)
class Report:
    """The output of --json. `seconds` is the time that the simulations took."""

    cluster: Path
    duration_s: float
    shift_s: float
    interval_s: float
    seed: int
    routing: str
    seconds: float
    rows: list[Row]


def row_of(case: dict, outcome, cluster, shift: float | None) -> Row:
    import numpy as np

    from scripts.papers.dancemoe.scenario import server_name

    def mean(values) -> float:
        return float(np.mean(values)) if len(values) else math.nan

    def over_time(chosen) -> tuple[list[float], list[int]]:
        n = np.bincount(bins[chosen], minlength=n_bins)
        sums = np.bincount(bins[chosen], latency[chosen], n_bins)
        return np.divide(sums, n, out=np.full(n_bins, np.nan), where=n > 0).tolist(), n.tolist()

    latency, n_bins = outcome.latency, len(outcome.bins) - 1
    bins = np.minimum(np.searchsorted(outcome.bins, outcome.arrival, "right") - 1, n_bins - 1)
    before = np.full(len(latency), False) if shift is None else outcome.arrival < shift
    after = np.full(len(latency), False) if shift is None else ~before
    servers = []
    for n in range(case["n_servers"]):
        own = outcome.server == n
        of_time, counts = over_time(own)
        servers.append(ServerRow(
            server_name(cluster, n), int(own.sum()), mean(latency[own]),
            _ratio(outcome.local[n].sum(), outcome.uses[n].sum()),
            float(outcome.busy[n] / outcome.duration) if outcome.duration else 0.0, of_time,
            [_ratio(*pair) for pair in zip(outcome.local[n], outcome.uses[n])], counts,
        ))
    changes = [ChangeRow(change.time, change.decision.adopt, change.decision.current, change.decision.candidate,
                         change.decision.migration, change.decision.n_moves, change.decision.n_bytes, change.finished)
               for change in outcome.changes]
    rate = case["bytes_per_second"] or cluster.network.bytes_per_second
    p50, p95 = np.percentile(latency, (50, 95)).tolist() if len(latency) else (math.nan, math.nan)
    return Row(
        case["algorithm"], case["migration"], case["n_servers"], rate / MEGABIT, case["arrivals"].text, len(latency),
        mean(latency), p50, p95, mean(outcome.first - outcome.arrival), mean(latency[before]), mean(latency[after]),
        outcome.local_ratio, max(server.busy for server in servers), outcome.n_messages, outcome.n_bytes,
        outcome.n_read, outcome.duration, outcome.bins.tolist(),
        [_ratio(*pair) for pair in zip(outcome.local.sum(axis=0), outcome.uses.sum(axis=0))],
        over_time(np.full(len(latency), True))[0], changes, servers,
    )


def _ratio(part: float, whole: float) -> float:
    return float(part / whole) if whole else math.nan


_CASE = ("algorithm", "migration", "n_servers", "megabits", "arrivals")


def csv_of(rows: list[Row]) -> str:
    """Returns a line for each simulation, server and piece of time."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*_CASE, "server", "begin_s", "end_s", "n_requests", "latency_s", "local_ratio"])
    for row in rows:
        case = [getattr(row, name) for name in _CASE]
        for server in row.servers:
            times = zip(row.bins_s, row.bins_s[1:], server.requests_over_time, server.latency_over_time_s,
                        server.local_over_time)
            for begin, end, n, *values in times:
                writer.writerow([*case, server.name, begin, end, n, *("" if v != v else f"{v:.6g}" for v in values)])
    return text.getvalue()


def draw_report(report: Report, directory: Path, shift: float | None) -> list[Path]:
    from scripts.papers.dancemoe.simulation_plots import Curve, draw

    differing = [name for name in _CASE if len({getattr(row, name) for row in report.rows}) > 1]
    curves = [Curve(
        _label(row, differing), row.bins_s, row.local_over_time, row.latency_over_time_s,
        [change.time_s for change in row.changes if change.adopted], row.n_servers, row.megabits,
        _label(row, [name for name in differing if name not in ("n_servers", "megabits")]), row.latency_s,
    ) for row in report.rows]
    return draw(curves, shift, directory)


def _label(row: Row, names: list[str]) -> str:
    words = {"algorithm": row.algorithm, "migration": "migration" if row.migration else "no migration",
             "n_servers": f"{row.n_servers} servers", "megabits": f"{row.megabits:g} Mbit/s", "arrivals": row.arrivals}
    return ", ".join(words[name] for name in names)


def parts_of(report: Report) -> list[str | Table]:
    rows = report.rows
    shifted = report.shift_s == report.shift_s
    few = max(row.n_servers for row in rows) <= 8 and len({row.n_servers for row in rows}) == 1
    names = [server.name for server in rows[0].servers] if few else []
    columns = ("algorithm", "migration", "servers", "Mbit/s", "arrivals", "requests", "mean s", "median", "95 %",
               *names, *(("before", "after") if shifted else ()), "local", "busiest", "moved")
    cells = [(
        row.algorithm, "on" if row.migration else "off", str(row.n_servers), f"{row.megabits:g}", row.arrivals,
        str(row.n_requests), *map(_seconds, (row.latency_s, row.latency_p50_s, row.latency_p95_s)),
        *(_seconds(server.latency_s) for server in row.servers if few),
        *(map(_seconds, (row.before_s, row.after_s)) if shifted else ()), _percent(row.local_ratio),
        _percent(row.busiest), _moved(row),
    ) for row in rows]
    total = sum(row.n_requests for row in rows)
    parts: list[str | Table] = [
        "seconds from arrival to the last token, of servers by the users they serve; local: rows that a server "
        "computes itself",
        "busiest: share of the time in which that server computed; moved: experts, and how often",
        "",
        Table(columns, cells, left=("algorithm", "migration", "arrivals")),
    ]
    changes = [(row, change) for row in rows for change in row.changes]
    if changes and len(rows) <= 6:
        parts += ["", Table(
            ("algorithm", "servers", "Mbit/s", "arrivals", "at s", "C(P) s", "C(P') s", "T_mig s", "adopted", "experts",
             "done at s"),
            [(row.algorithm, str(row.n_servers), f"{row.megabits:g}", row.arrivals, f"{change.time_s:g}",
              *map(_seconds, (change.current_s, change.candidate_s, change.migration_s)),
              "yes" if change.adopted else "no", str(change.n_moves), _seconds(change.finished_s))
             for row, change in changes],
            left=("algorithm", "arrivals", "adopted"),
            title="the scheduler: adopts where C(P') + T_mig < C(P), seconds of remote time in an interval",
        )]
    return [*parts, "", f"{total} requests, {report.seconds:.1f} s"]


def _moved(row: Row) -> str:
    adopted = [change for change in row.changes if change.adopted]
    return f"{sum(change.n_moves for change in adopted)} in {len(adopted)}" if adopted else "-"


def _seconds(value: float) -> str:
    return "-" if not math.isfinite(value) else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _percent(value: float) -> str:
    return "-" if value != value else f"{100 * value:.1f}%"
