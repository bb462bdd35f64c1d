"""The script that measures a device makes all its tables, on a device that is no faster than this processor."""

from __future__ import annotations

import argparse
import math
import re
import sys
from pathlib import Path

import pytest
from devices import DeviceProcess
from models import PROMPT

from pyorch.runtime.model_map import ModelMap

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import measure_device


def test_all_tables_are_made(
    small_moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text(4 * PROMPT)
    monkeypatch.setattr(measure_device, "in_process", measure_device.run)  # a process for each takes a second
    monkeypatch.setattr(measure_device, "_SHORTER", (1, 0))
    device = DeviceProcess(tmp_path / "log")
    monkeypatch.setattr(sys, "argv", [
        "measure_device.py", str(small_moe), device.name, "--tokens", "2", "--prompt", "33", "--contexts", "8,16",
        "--blocks", "2", "--shares", "50", "--budgets", "100%,50%", "--ahead", "2", "--rounds", "1", "--threads", "1",
        "--data", str(tmp_path / "text")])
    try:
        measure_device.main()
    finally:
        device.stop()
    checks, *tables = capfd.readouterr().out.split("## ")[1:]
    assert [line.count("bit-identical") for line in checks.splitlines()[4:] if line] == [1, 1, 1, 1]
    assert [re.sub("^.*[(](.*)[)]$", r"\1", table.splitlines()[0]) for table in tables] == [
        "By turns in one process, all experts in host memory", "Speed, 100% of the experts in host memory",
        "Speed, 50% of the experts in host memory", "BuddyMoE, table 1",
        "FineMoE, figure 12", "FineMoE, figure 14b", "FineMoE, figure 14a", "Speculating Experts, figure 8",
        "Uploaded before their layer comes, 50 % in VRAM, all in host memory, as forecast by quasi-hidden:1"]
    for table in tables:
        columns, _, *rows = (line.strip("| ").split(" | ") for line in table.splitlines()[2:] if line)
        assert rows and all(len(row) == len(columns) or "llama.cpp" in row for row in rows), table
    ratio, low, high = map(float, re.search(r"([\d.]+) \[([\d.]+), ([\d.]+)\]", tables[0]).groups())
    assert 0 < low <= ratio <= high
    latencies = tables[3].splitlines()[4:]
    assert [line.count("| lossy: ") for line in latencies if line] == [0, 0, 0, 0, 0, 1]
    assert all("%" in line for line in tables[5].splitlines()[4:] if line)


def test_what_does_not_run_costs_its_own_row_only(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def run(setup: measure_device.Setup, _: argparse.Namespace) -> measure_device.Speed:
        if setup.share == 100:
            raise RuntimeError("out of memory")
        return measure_device.Speed({"8": 1.0}, 2.0)

    monkeypatch.setattr(measure_device, "in_process", run)
    setups = [measure_device.Setup(measure_device.STOCK, "", (8,), share) for share in (50, 100, 25)]
    speeds = measure_device.Report(named()).speeds(setups)
    assert [one.decode_ms for one in speeds[::2]] == [2.0, 2.0]
    assert math.isnan(speeds[1].decode_ms) and math.isnan(speeds[1].prefill["8"])
    assert "out of memory" in capfd.readouterr().err
    with pytest.raises(SystemExit, match="out of memory"):  # a wrong device, for instance: none would run
        measure_device.Report(named()).speeds(setups[1:])


def named(**options: object) -> argparse.Namespace:
    return argparse.Namespace(**{"rounds": 1, "model": Path("a.gguf"), "tokens": 2, "threads": 1, "results": None,
                                 "minutes": math.inf, "device": "CUDA0", "data": "text", "blocks": 2, **options})


def test_what_was_measured_is_kept_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []

    def run(setup: measure_device.Setup, _: argparse.Namespace) -> measure_device.Speed:
        ran.append(setup.share)
        monkeypatch.setattr(measure_device.time, "monotonic", lambda: 100.0 * len(ran))
        return measure_device.Speed({"8": 1.0}, float(setup.share))

    monkeypatch.setattr(measure_device, "in_process", run)
    monkeypatch.setattr(measure_device.time, "monotonic", lambda: 0.0)
    setups = [measure_device.Setup(measure_device.OURS, "", (8,), share) for share in (25, 50)]
    results = tmp_path / "results.jsonl"
    with pytest.raises(SystemExit) as ended:
        measure_device.Report(named(results=results, minutes=1.0)).speeds(setups)
    assert ended.value.code == 3 and ran == [25]
    speeds = measure_device.Report(named(results=results)).speeds(setups)
    assert [one.decode_ms for one in speeds] == [25.0, 50.0] and ran == [25, 50]
    measure_device.Report(named(results=results, tokens=3)).speeds(setups[:1])  # of another command
    assert ran == [25, 50, 25]


def test_turns_of_all_rounds_count() -> None:
    def measured(ours: list[float], theirs: list[float], prefill: float) -> measure_device.Speed:
        turns = {"prefill": {"8": 2 * prefill}, "blocks": [ours, theirs]}
        return measure_device.Speed({"8": prefill}, 0.0, turns=turns)

    one = measure_device.median([measured([1.0, 2.0], [2.0, 4.0], 1.0), measured([3.0], [3.0], 3.0)])
    assert (one.decode_ms, one.prefill, one.turns["prefill"]) == (2.0, {"8": 2.0}, {"8": 4.0})
    assert one.turns["blocks"] == [[1.0, 2.0, 3.0], [2.0, 4.0, 3.0]]
    assert measure_device.ratio(one.turns["blocks"]) == "1.59 [1.00, 2.52]"
    assert measure_device.ratio([[1.0], [2.0]]) == "2.00 [0.00, inf]"


def test_what_was_reached_is_of_computing_or_of_the_link(small_moe: Path) -> None:
    model = ModelMap(small_moe)
    of_expert = model.layers[0].expert_bytes
    speed = measure_device.Speed({}, decode_ms=20.0, misses=4.0, link=of_expert * 400.0)  # 10 ms on the link
    assert measure_device.reached(speed, model, all_there=5.0) == "50.0%"
    assert measure_device.reached(speed, model, all_there=18.0) == "90.0%"
    assert measure_device.reached(speed, model, all_there=math.nan) == "-"
