"""Reports results of scripts.papers.dancemoe.measure: Markdown tables, CSV, pictures, and the same in simulation."""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pyorch import pictures
from pyorch.files import write_text
from scripts.papers.dancemoe.measure_load import TASKS
from scripts.papers.dancemoe.measure_parts import PLACES
from scripts.papers.dancemoe.measure_setups import PARTS, SERVERS, config_of, costs_of, plan_of, program, setups

QUOTA_SLICE = 0.1  # seconds: the slice by which the kernel throttles reads (DFL_THROTL_SLICE)


def report(args: argparse.Namespace) -> None:
    """Prints tables of the measured parts, and writes CSV and pictures to args.report."""
    args.report.mkdir(parents=True, exist_ok=True)
    tables = {"placements": _placements, "disk": _placements, "shift": _shift, "scaling": _scaling, "kill": _kill,
              "thirds": _thirds}
    for part in PARTS:
        path = args.output / f"{part}.json"
        if part in tables and part in args.parts and path.exists():
            print(f"\n{part}\n")
            tables[part](args, json.loads(path.read_text()))


def _placements(args: argparse.Namespace, found: dict[str, Any]) -> None:
    part = found["part"]
    rows = []
    chosen = [setup for setup in setups(part, args.algorithms, args.read) if found["clusters"].get(setup.label)]
    for setup in chosen:
        rounds = found["clusters"][setup.label]
        answers = [answer for one in rounds for answer in one["answers"]]
        simulated = [_simulated(args, found, setup, one["seed"]) for one in rounds]
        n = [row["n_requests"] for row in simulated]
        mean = sum(row["latency_s"] * n for row, n in zip(simulated, n)) / sum(n)
        real = _mean(answers)
        rows.append({
            "placement": setup.label, "mean latency s": real,
            "the last / this": paired(found["clusters"][chosen[-1].label], rounds),
            **{name: _mean(_of(answers, name)) for name in SERVERS},
            "median": statistics.median(_seconds(answers)), "requests": len(answers), "failed": _failed(answers),
            "computed locally": _local_of_rounds(rounds), "read MB": _read(rounds) / 1e6,
            "simulated s": mean, "differs": mean / real - 1, "locally, simulated": simulated[0]["local_ratio"],
        })
    _table(rows)
    _csv(args.report / f"{part}.csv", rows)
    curves = {name: _over_time([one["counts"] for one in rounds]) for name, rounds in found["clusters"].items()}
    pictures.save_as(partial(_draw_placements, rows=rows, curves=curves), args.report / f"{part}.png")


def _simulated(args: argparse.Namespace, found: dict[str, Any], setup, seed: int) -> dict[str, Any]:
    """Simulates the same requests at the same times."""
    settings = found["settings"]
    traces = [f"{name}={args.output / f'asked-{task}.trace'}" for name, task in zip(setup.servers, TASKS)]
    of_disk = ["--cost", f"disk_bytes_per_second={1e6 * settings['disk']:g}", "--disk-slice", QUOTA_SLICE] if (
        settings["disk"]) else []
    if found["part"] == "placements" and setup.read == "last":  # the measured servers read nothing in this part
        of_disk = ["--cost", "disk_bytes_per_second=0"]
    text = program("simulate", "--cluster", config_of(args, setup, "place"), "--trace", *traces, "--placement",
                  plan_of(args, setup), "--migration", "off", "--arrivals", f"poisson:{settings['every']:g}s",
                  "--duration", found["seconds"], "--seed", seed, "--places", PLACES, "--step-tokens", 2048,
                  "--costs", costs_of(args), *of_disk, "--json")
    return json.loads(text)["rows"][0]


def _shift(args: argparse.Namespace, found: dict[str, Any]) -> None:
    rows, curves = [], {}
    settled = found["shift"] + 2 * found["interval"]
    off = next(iter(found["clusters"].values()))
    for name, rounds in found["clusters"].items():
        row: dict[str, Any] = {"migration": name.removeprefix("shift-")}
        for what, begin, end in (("mean latency s", 0.0, math.inf), ("before the shift", 0.0, found["shift"]),
                                 ("after", found["shift"], math.inf), ("settled", settled, math.inf)):
            row[what] = _mean(answer for one in rounds for answer in one["answers"] if begin <= answer["time"] < end)
            row[f"{what}, this / off"] = paired(rounds, off, begin, end)
        answers = [answer for one in rounds for answer in one["answers"]]
        end = found["seconds"] - 2 * found["interval"]
        rows.append(row | {
            "computed locally": _local_of_rounds(rounds),
            "locally at the end": statistics.fmean(_local(_from(one["counts"], end)) for one in rounds),
            "requests": len(answers), "failed": _failed(answers),
        })
        curves[f"migration {row['migration']}"] = (_over_time([one["counts"] for one in rounds]), answers)
    _table(rows)
    _csv(args.report / "shift.csv", rows)
    pictures.save_as(partial(_draw_shift, curves=curves, found=found), args.report / "shift.png")


def _scaling(args: argparse.Namespace, found: dict[str, Any]) -> None:
    rows = []
    for name, one in found["clusters"].items():
        rows.append({"servers": int(name.removeprefix("scaling-")), "requests": one["n_requests"],
                     "tokens/s": (one["prompt_tokens"] + one["output_tokens"]) / one["seconds"],
                     "of them decoded": one["output_tokens"] / one["seconds"], "read MB": one["bytes_read"] / 1e6})
    _table(rows)
    _csv(args.report / "scaling.csv", rows)


def _kill(args: argparse.Namespace, found: dict[str, Any]) -> None:
    (one,), events = found["clusters"]["kill"], found["events"]
    times = [("before", 0.0), *sorted(events.items(), key=lambda event: event[1]), ("end", math.inf)]
    rows = []
    for (what, begin), (_, end) in zip(times, times[1:]):
        row: dict[str, Any] = {"server " + found["victim"]: what, "at s": begin}
        for name in SERVERS:
            own = [answer for answer in _of(one["answers"], name) if begin <= answer["time"] < end]
            row |= {f"{name}: requests": len(own), f"{name}: lost": _failed(own),
                    f"{name}: mean s": _mean(own), f"{name}: longest": max(_seconds(own), default=math.nan)}
        rows.append(row)
    _table(rows)
    _csv(args.report / "kill.csv", rows)
    pictures.save_as(partial(_draw_kill, answers=one["answers"], found=found), args.report / "kill.png")


def _thirds(args: argparse.Namespace, found: dict[str, Any]) -> None:
    rows = [{"cluster": name, "mean latency s": _mean(answers), "median": statistics.median(_seconds(answers)),
             "decoding, ms a token": 1e3 * statistics.fmean(
                 answer["output_seconds"] / max(1, answer["n_output"] - 1) for answer in answers
                 if not answer["error"]),
             "requests": len(answers), "failed": _failed(answers), "read MB": _read(rounds) / 1e6}
            for name, rounds in sorted(found["clusters"].items())
            for answers in [[answer for one in rounds for answer in one["answers"]]]]
    _table(rows)
    _csv(args.report / "thirds.csv", rows)


# Numbers


def _seconds(answers: Iterable[dict]) -> list[float]:
    return [answer["seconds"] for answer in answers if not answer["error"]]


def _mean(answers: Iterable[dict]) -> float:
    seconds = _seconds(answers)
    return statistics.fmean(seconds) if seconds else math.nan


def paired(
    rounds: Sequence[dict], base: Sequence[dict], begin: float = 0.0, end: float = math.inf
) -> tuple[float, float, float] | None:
    """Returns the mean latency relative to base, and the ends of its 95 % interval. None: no request counts.

    Requests count if both have answered them. Requests that arrive within the same ten seconds of a round delay each
    other, so they are drawn together (a block bootstrap).
    """
    blocks: dict[tuple[int, int], np.ndarray] = {}
    for n, (one, other) in enumerate(zip(rounds, base)):
        for answer, same in zip(one["answers"], other["answers"], strict=True):
            if begin <= answer["time"] < end and not answer["error"] and not same["error"]:
                block = blocks.setdefault((n, int(answer["time"] / _BLOCK_SECONDS)), np.zeros(2))
                block += answer["seconds"], same["seconds"]
    if not blocks:
        return None
    sums = np.array(list(blocks.values()))
    drawn = np.random.default_rng(0).integers(len(sums), size=(_DRAWS, len(sums)))
    ratios = np.divide(*sums[drawn].sum(axis=1).T)
    ratio = float(np.divide(*sums.sum(axis=0)))
    return ratio, *map(float, np.quantile(ratios, (0.025, 0.975)))


def _of(answers: Iterable[dict], server: str) -> list[dict]:
    return [answer for answer in answers if answer["server"] == server]


def _failed(answers: Iterable[dict]) -> int:
    return sum(bool(answer["error"]) for answer in answers)


def _gained(counts: Sequence[dict], field: str) -> float:
    """Returns the increase of a counter, added over all answering servers, from the first reading to the last."""
    gained = 0
    for name in SERVERS:
        own = [look["servers"][name][field] for look in counts if name in look["servers"]]
        gained += own[-1] - own[0] if own else 0
    return gained


def _local(counts: Sequence[dict]) -> float:
    """Returns the share of rows that the servers computed themselves."""
    rows = _gained(counts, "activations")
    return 1 - (_gained(counts, "sent") - _gained(counts, "fallback")) / rows if rows else math.nan


def _local_of_rounds(rounds: Sequence[dict]) -> float:
    return statistics.fmean(_local(one["counts"]) for one in rounds)


def _read(rounds: Sequence[dict]) -> float:
    return sum(_gained(one["counts"], "bytes_read") for one in rounds)


def _from(counts: Sequence[dict], time: float) -> list[dict]:
    return [look for look in counts if look["time"] >= time]


def _over_time(rounds: Sequence[Sequence[dict]], width: float = 4.0) -> list[tuple[float, float]]:
    """Returns the local ratio of the first round over time: pairs of a piece's middle and its ratio."""
    counts = rounds[0]
    found = []
    for begin in range(0, math.ceil(counts[-1]["time"]), round(width)):
        piece = [look for look in counts if begin - 0.5 <= look["time"] <= begin + width + 0.5]
        if len(piece) > 1 and (ratio := _local(piece)) == ratio:
            found.append((begin + width / 2, ratio))
    return found


# Tables and pictures


def _table(rows: Sequence[dict[str, Any]]) -> None:
    if rows:
        print("| " + " | ".join(rows[0]) + " |")
        print("|" + " --- |" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(_cell(name, value) for name, value in row.items()) + " |")


_BLOCK_SECONDS = 10.0
_DRAWS = 4000
_SHARES = ("computed locally", "differs", "locally, simulated", "locally at the end")


def _cell(name: str, value: Any) -> str:
    if isinstance(value, tuple):
        return "{:.2f} ({:.2f} to {:.2f})".format(*value)
    if value is None:
        return "-"
    if isinstance(value, float) and not math.isfinite(value):
        return "-"
    if name in _SHARES:
        return f"{100 * value:+.0f} %" if name == "differs" else f"{100 * value:.1f} %"
    return f"{value:.3g}" if isinstance(value, float) and abs(value) < 1000 else f"{value:.0f}" if isinstance(
        value, float) else str(value)


def _csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    if rows:
        lines = [[*rows[0]], *([f"{value:.6g}" if isinstance(value, float) else _cell(name, value)
                                for name, value in row.items()] for row in rows)]
        write_text(path, "".join(_line(line) for line in lines))


def _line(values: Sequence[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue()


def _figure(figure_class, n: int):
    figure = figure_class(figsize=(11, 3.8), layout="constrained")
    return figure, figure.subplots(1, n)


def _draw_placements(figure_class, rows: Sequence[dict[str, Any]], curves: dict[str, Any]):
    figure, (left, right) = _figure(figure_class, 2)
    for i, (label, name) in enumerate((("measured", "mean latency s"), ("simulated", "simulated s"))):
        left.bar([n + 0.4 * i - 0.2 for n in range(len(rows))], [row[name] for row in rows], 0.38, label=label)
    left.set_xticks(range(len(rows)), [row["placement"] for row in rows])
    left.set_ylabel("mean latency of a request, s")
    left.legend(fontsize=8)
    for name, points in curves.items():
        right.plot([t for t, _ in points], [100 * ratio for _, ratio in points], label=name, linewidth=1.5)
    right.set_ylim(0, 100)
    right.set_xlabel("time, s")
    right.set_ylabel("rows that the server computes itself, %")
    right.legend(fontsize=8)
    return figure


def _draw_shift(figure_class, curves: dict[str, Any], found: dict[str, Any]):
    figure, (left, right) = _figure(figure_class, 2)
    for name, (points, answers) in curves.items():
        left.plot([t for t, _ in points], [100 * ratio for _, ratio in points], label=name, linewidth=1.5)
        right.plot(*zip(*_means(answers, found["interval"])), label=name, linewidth=1.5)
    for axis in (left, right):
        axis.axvline(found["shift"], color="0.4", linewidth=1.2, linestyle="--", label="workload changes")
        axis.set_xlabel("time, s")
    left.set_ylim(0, 100)
    right.set_ylim(bottom=0)
    left.set_ylabel("rows that the server computes itself, %")
    right.set_ylabel("mean latency of a request, s")
    left.legend(fontsize=8)
    return figure


def _means(answers: Sequence[dict], width: float) -> Iterator[tuple[float, float]]:
    """Yields the mean latency over time: pairs of a piece's middle and its mean."""
    for i in range(math.ceil(max(answer["time"] for answer in answers) / width)):
        piece = [answer for answer in answers if i * width <= answer["time"] < (i + 1) * width]
        if (mean := _mean(piece)) == mean:
            yield (i + 0.5) * width, mean


def _draw_kill(figure_class, answers: Sequence[dict], found: dict[str, Any]):
    figure, axis = _figure(figure_class, 1)
    for i, name in enumerate(SERVERS):
        own = _of(answers, name)
        answered = [answer for answer in own if not answer["error"]]
        lost = [answer for answer in own if answer["error"]]
        axis.plot([a["time"] for a in answered], [a["seconds"] for a in answered], f"C{i}.", label=f"server {name}")
        axis.plot([a["time"] for a in lost], [0.0] * len(lost), f"C{i}x")
    for what, when in found["events"].items():
        axis.axvline(when, color="0.4", linewidth=1.2, linestyle="--")
        axis.text(when, axis.get_ylim()[1], f" {found['victim']}: {what}", va="top", fontsize=8)
    axis.set_xlabel("time of arrival, s")
    axis.set_ylabel("latency of a request, s")
    axis.legend(fontsize=8)
    return figure
