"""The script that measures a device makes all its tables, on a device that is no faster than this processor."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from devices import DeviceProcess
from models import PROMPT

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import measure_device  # noqa: E402


def test_all_tables_are_made(
    small_moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text(PROMPT)
    monkeypatch.setattr(measure_device, "in_process", measure_device.run)  # a process for each takes a second
    device = DeviceProcess(tmp_path / "log")
    monkeypatch.setattr(sys, "argv", [
        "measure_device.py", str(small_moe), device.name, "--tokens", "2", "--prompt", "33", "--contexts", "8,16",
        "--shares", "50", "--budgets", "100%,50%", "--ahead", "2", "--rounds", "1", "--threads", "1", "--data",
        str(tmp_path / "text")])
    try:
        measure_device.main()
    finally:
        device.stop()
    tables = capfd.readouterr().out.split("## ")[1:]
    assert [re.sub("^.*[(](.*)[)]$", r"\1", table.splitlines()[0]) for table in tables] == [
        "Speed, 100% of the experts in host memory", "Speed, 50% of the experts in host memory", "BuddyMoE, table 1",
        "FineMoE, figure 12", "FineMoE, figure 14b", "FineMoE, figure 14a", "Speculating Experts, figure 8",
        "Uploaded before their layer comes, 50 % in VRAM, all in host memory, as forecast by quasi-hidden:1"]
    for table in tables:
        columns, _, *rows = (line.strip("| ").split(" | ") for line in table.splitlines()[2:] if line)
        assert rows and all(len(row) == len(columns) or "llama.cpp" in row for row in rows), table
    latencies = tables[2].splitlines()[4:]
    assert [line.count("| lossy: ") for line in latencies if line] == [0, 0, 0, 0, 0, 1]
    assert all("%" in line for line in tables[4].splitlines()[4:] if line)
