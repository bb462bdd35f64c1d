"""The benchmark measures and reports. No test depends on how fast anything was."""

from __future__ import annotations

import contextlib
import json
import math
import signal
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path

import pytest
from devices import DeviceProcess
from processes import HANG_SECONDS, is_alive

from pyorch.bench import bench_plan, surroundings, table
from pyorch.bench.job import ENGINE, Config, Job, Measurement, Phase, Text
from pyorch.bench.rounds import Results, Run
from pyorch.bench.summary import TextChange, ratio, summarize, text_change
from pyorch.bench.surroundings import busy_processes, memory_group
from pyorch.bench.table import bandwidth
from pyorch.cli import main
from pyorch.errors import PyorchError
from pyorch.llama import memory
from pyorch.runtime import disk
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.budget import Budget
from pyorch.settings.settings import Settings
from pyorch.sizes import GiB, MiB

WORK = ("--repeat", "1", "--tokens", "16", "--prompt-tokens", "32", "--threads", "1", "--max-seconds", "600")


def limits_work() -> bool:
    try:
        with memory_group(64 * MiB):
            return True
    except PyorchError:
        return False


needs_limits = pytest.mark.skipif(not limits_work(), reason="no memory controller is writable here")


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small model fits into many a processor's, and then no roofline is told."""
    monkeypatch.setattr(memory, "cache_bytes", lambda: 0)


def test_report_is_complete_and_consistent(small_moe: Path, capfd: pytest.CaptureFixture[str]):
    assert main(["bench", str(small_moe), "--budget", "40%", "--baseline", "mmap,stock", "--json", *WORK]) == 0
    report = json.loads(capfd.readouterr().out)

    info, by_label = report["info"], {summary["config"]["label"]: summary for summary in report["summaries"]}
    assert list(by_label) == ["all resident", "budget 40%", "llama.cpp mmap", "llama.cpp, all in memory"]
    assert len(report["runs"]) == 4 and len(report["bandwidths"]) == 5
    assert all(bandwidth["bytes_per_second"] > 0 for bandwidth in report["bandwidths"])
    for run in report["runs"]:
        assert run["failure"] == ""
        measurement = run["measurement"]
        assert measurement["prefill"]["n_tokens"] == 32 and measurement["decode"]["n_tokens"] == 16
        assert measurement["ttft_seconds"] > measurement["load_seconds"] > 0
        assert measurement["peak_memory_bytes"] > info["dense_bytes"]
        if run["config"]["mode"] == ENGINE:
            uses = measurement["decode"]["hits"] + measurement["decode"]["misses"]
            assert uses == 16 * info["n_moe_layers"] * info["n_expert_used"]
            assert 0 < measurement["peak_expert_bytes"] <= measurement["budget_bytes"] <= info["slots_bytes"]
            assert measurement["decode"]["useful_bytes"] <= measurement["decode"]["bytes_read"]

    resident, budget = by_label["all resident"], by_label["budget 40%"]
    assert resident["decode_hit_rate"] == 1 and resident["decode_bytes_per_token"] == 0
    assert resident["decode_roofline"] == 1 and resident["prefill_roofline"] == 1
    assert budget["decode_hit_rate"] < 1 and budget["decode_bytes_per_token"] > 0
    assert budget["decode_roofline"] > 0 and budget["prefill_roofline"] > 0
    assert by_label["llama.cpp mmap"]["decode_hit_rate"] is None


def test_table_names_machine_model_and_what_the_roofline_is(small_moe: Path, capfd: pytest.CaptureFixture[str]):
    assert main(["bench", str(small_moe), "--budget", "40%", *WORK]) == 0
    out, progress = capfd.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith("machine ") and lines[1].startswith("model    small-moe.gguf (qwen2moe)")
    assert "8 layers of 64 experts, 6 used" in lines[1] and "prefill 32 tokens, decode 16 tokens" in lines[2]
    columns = next(line for line in lines if "decode tok/s" in line)
    rows = lines[lines.index(columns) + 1 :][:2]
    assert [row[: columns.index("prefill")].strip() for row in rows] == ["all resident", "budget 40%"]
    assert {"disk", "compute", "miss", "roofline"} <= {line.split()[0] for line in lines[-5:] if line}
    assert "round 1 of 1: budget 40%" in progress


def test_a_device_has_columns_of_its_own_and_no_roofline_of_the_processor(
    small_moe: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    device = DeviceProcess(tmp_path / "log")
    arguments = ["bench", str(small_moe), "--budget", "40%", "--device", device.name, "--vram-budget", "50%", *WORK]
    try:
        assert main([*arguments, "--json"]) == 0
    finally:
        device.stop()
    report = json.loads(capfd.readouterr().out)
    resident, budget = report["summaries"]
    assert 0 < budget["decode_device_hit_rate"] < 1 and budget["decode_device_bytes_per_token"] > 0
    assert 0 < budget["device_used_bytes"] < report["info"]["expert_bytes"]
    decode = report["runs"][1]["measurement"]["decode"]
    assert decode["device_misses"] == decode["hits"] + decode["misses"], "host memory is asked for what it lacks"
    assert resident["decode_device_hit_rate"] is None and resident["device_used_bytes"] == 0
    assert budget["decode_roofline"] is None and resident["decode_roofline"] == 1

    assert main(arguments) == 2 and "no device can be reached" in capfd.readouterr().err, "before anything is measured"
    assert "device hits" not in table.table([summarize(Results((), ()), bench_plan.RESIDENT, None)])[0]
    columns, (row,) = table.table([replace(
        summarize(Results((), ()), replace(bench_plan.RESIDENT, settings=Settings(device="auto")), None), n_rounds=1,
        decode_device_hit_rate=0.25, decode_device_bytes_per_token=MiB / 2, device_used_bytes=3 * MiB)])
    assert dict(zip(columns, row))["device hits"] == "25%"
    assert row[-2:] == ("0.5", "3") and columns[-2:] == ("uploaded MiB/token", "device MiB")
    ahead = replace(bench_plan.RESIDENT, settings=Settings(device="auto", prefetch="quasi-hidden", device_ahead=2))
    columns, (row,) = table.table([replace(summarize(Results((), ()), ahead, None), n_rounds=1,
                                           decode_device_ahead_precision=0.75)])
    assert dict(zip(columns, row))["forecasts right"] == "75%"


def test_busy_processes_stand_beside_each_run_and_in_its_label(small_moe: Path, capfd: pytest.CaptureFixture[str]):
    assert main(["bench", str(small_moe), "--budget", "40%", "--busy", "1", "--json", *WORK]) == 0
    report = json.loads(capfd.readouterr().out)
    assert [(run["config"]["label"], run["config"]["n_busy"], run["failure"]) for run in report["runs"]] == [
        ("all resident, beside one busy process", 1, ""), ("budget 40%, beside one busy process", 1, "")]
    assert report["summaries"][0]["decode_roofline"] == 1, "the reference is as disturbed"


def test_what_is_measured_beside_busy_processes_is_compared_with_itself_alone(small_moe: Path):
    with ModelMap(small_moe) as model_map:
        asked = bench_plan.Plan(budgets=(BUDGET.settings.budget,), busy=(0, 2))
        configs, pairs = bench_plan.configurations(asked, model_map.info)
    labels = ("budget 40%", "budget 40%, beside 2 busy processes")
    assert [(config.label, config.n_busy) for config in configs[2:]] == list(zip(labels, (0, 2)))
    results = Results(tuple(run_of(config, 1.0 + config.n_busy) for config in configs), ())
    assert table.ratio_lines(results, pairs) == [
        f"{label}, beside 2 busy processes: decode 0.33x {label}" for label in ("all resident", "budget 40%")]


def test_orders_of_recovery_are_compared_in_each_round(small_moe: Path):
    with ModelMap(small_moe) as model_map:
        asked = bench_plan.Plan(budgets=(BUDGET.settings.budget,),
                          compared={"recovery": ("kernels", "affinity", "exponents-first")})
        configs, _ = bench_plan.configurations(asked, model_map.info)
    assert [(config.label, config.settings.recovery) for config in configs[1:]] == [
        (f"budget 40%, recovery {order}", order) for order in ("kernels", "affinity", "exponents-first")]


def test_lossy_settings_stand_behind_the_lossless_one(small_moe: Path):
    lossy = tuple(Settings(substitution=lossy_setting) for lossy_setting in ("mode=none,miss=drop", "mode=random"))
    with ModelMap(small_moe) as model_map:
        asked = bench_plan.Plan(Settings(policy="lru"), lossy, tuple(map(Budget.parse, ("40%", "30%"))))
        configs, pairs = bench_plan.configurations(asked, model_map.info)
    assert [config.label for config in configs[1:]] == [
        f"budget {budget}{change}" for budget in ("40%", "30%") for change in (
            "", ", lossy mode=none,miss=drop", ", lossy mode=random")]
    assert [(configs.index(one), configs.index(base)) for one, base in pairs] == [(2, 1), (3, 1), (5, 4), (6, 4)]
    assert all(config.settings.policy == "lru" for config in configs[1:])
    (tuned,) = (
        configuration
        for configuration in bench_plan.configurations(
            bench_plan.Plan(Settings(), (Settings(tuned="a.json"),), (Budget.parse("40%"),)), model_map.info
        )[0]
        if configuration.lossy
    )
    assert str(tuned.settings.tuned) == "a.json" and tuned.label == "budget 40%, lossy a.json"


def test_the_text_that_is_timed_is_judged(small_moe: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """Accuracy and speed are of the same text and the same cache."""
    pytest.importorskip("matplotlib")
    command = ["bench", str(small_moe), "--budget", "25%", "--tokens", "24", "--prompt-tokens", "16", "--repeat", "1",
               "--threads", "1", "--lossy", "mode=none,miss=drop", "--lossy", "mode=none,miss=drop,sacred=4"]
    assert main([*command, "--plot", str(tmp_path / "read.png"), "--json"]) == 0
    assert (tmp_path / "read.png").read_bytes().startswith(b"\x89PNG")
    resident, lossless, *lossy = json.loads(capfd.readouterr().out)["runs"]
    said = [run["measurement"]["text"] for run in (resident, lossless, *lossy)]
    assert said[0]["most_probable"] == said[1]["most_probable"] != said[2]["most_probable"], "lossless is lossless"
    assert said[0]["log_likelihood"] == said[1]["log_likelihood"] != said[2]["log_likelihood"]
    for text in said:
        assert len(text["most_probable"]) == len(text["seconds"]) == len(text["bytes_read"]) == 24
        assert text["seconds"] == sorted(text["seconds"]) and text["bytes_read"] == sorted(text["bytes_read"])


def test_changes_of_a_text_are_counted_where_both_decoded_it():
    text = {BUDGET: Text([1, 2, 3, 4], -2.0, [], []), RESIDENT: Text([1, 5, 3], -1.0, [], [])}
    runs = tuple(replace(run, measurement=replace(run.measurement, text=text[run.config]))
                 for run in (run_of(BUDGET, 1.0), run_of(RESIDENT, 2.0)))
    assert text_change(Results(runs, ()), BUDGET, RESIDENT) == TextChange(pytest.approx(2 / 3), -2.0, -1.0)
    assert text_change(Results((run_of(BUDGET, 1.0), run_of(RESIDENT, 1.0)), ()), BUDGET, RESIDENT) is None


def test_bandwidth_over_time_is_all_that_was_read():
    seconds, rates = bandwidth(Text([], 0, [0.0, 1.0, 2.0, 4.0], [0, 100, 100, 700]), n_bins=4)
    assert seconds.tolist() == [0.5, 1.5, 2.5, 3.5] and rates.tolist() == [100, 0, 300, 300]


def children(pid: int | str = "self") -> set[str]:
    found: set[str] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has just ended
            found.update((task / "children").read_text().split())
    return found


def user_ticks(pid: str) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_busy_processes_compute_until_the_block_ends():
    before = children()
    with busy_processes(2):
        started = children() - before
        assert len(started) == 2
        for _ in range(2):  # forever, if one of them does not compute
            ticks = {pid: user_ticks(pid) for pid in started}
            while any(user_ticks(pid) <= ticks[pid] for pid in started):
                time.sleep(0.01)
    assert not children() & started


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_busy_processes_end_however_the_benchmark_ends(small_moe: Path, stop: signal.Signals):
    bench = subprocess.Popen(
        [sys.executable, "-m", "pyorch", "bench", small_moe, "--busy", "2", "--tokens", "4096", "--prompt-tokens", "8"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    while len(started := children(bench.pid)) < 3:
        assert bench.poll() is None
        time.sleep(0.01)
    bench.send_signal(stop)
    assert bench.wait(HANG_SECONDS) == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[stop]
    while any(map(is_alive, started)):  # of the killed one they end by themselves
        time.sleep(0.01)


def test_the_measured_process_ends_when_nobody_waits_for_it(small_moe: Path):
    """Long before its job is done, which is to decode for ever, and without an answer."""
    text = Path(__file__).parents[1] / "fixtures" / "small-moe" / "text-test.txt"
    job = Job(str(small_moe), BUDGET, str(text), n_prompt=8, n_tokens=8192, n_threads=1, max_decode_seconds=1e9)
    ours, theirs = Pipe()
    with theirs:
        child = subprocess.Popen([sys.executable, "-m", "pyorch.bench.child", str(theirs.fileno())],
                                 pass_fds=[theirs.fileno()])
    with ours:
        ours.send(job)
    assert child.wait(HANG_SECONDS) == 1


@needs_limits
def test_process_that_outgrows_its_memory_limit_is_reported(small_moe: Path, capfd: pytest.CaptureFixture[str]):
    arguments = ["--budget", "40%", "--memory-limit", "16MiB", "--json", *WORK]
    assert main(["bench", str(small_moe), *arguments]) == 0
    report = json.loads(capfd.readouterr().out)
    resident, limited = report["runs"]
    assert resident["failure"] == "" and resident["peak_group_bytes"] is None
    assert limited["failure"] == "killed for memory" and limited["measurement"] is None
    assert report["summaries"][1]["failure"] == "killed for memory" and report["summaries"][1]["decode_rate"] is None


@needs_limits
def test_automatic_budget_stays_below_the_memory_limit(small_moe: Path, capfd: pytest.CaptureFixture[str]):
    assert main(["bench", str(small_moe), "--memory-limit", "400MiB", "--json", *WORK]) == 0
    limited = json.loads(capfd.readouterr().out)["runs"][1]
    assert limited["config"]["settings"]["budget"] == "auto" and limited["failure"] == ""
    assert 0 < limited["peak_group_bytes"] <= 400 * MiB


@needs_limits
def test_group_is_removed_with_its_limit():
    with memory_group(64 * MiB) as group:
        directory = group.directory
        result = subprocess.run([sys.executable, "-c", "bytearray(200 << 20)"], preexec_fn=group.join, check=False)
        assert result.returncode == -9 and group.n_killed() == 1
        assert 0 < group.peak_bytes() <= 64 * MiB
    assert not directory.exists()


@needs_limits
def test_the_next_group_removes_those_of_benchmarks_that_were_killed():
    with memory_group(64 * MiB) as group:
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        left = group.directory.with_name(f"pyorch-bench-{ended.pid}")
        left.mkdir()
    with memory_group(64 * MiB) as group:
        assert group.directory.is_dir() and not left.exists()


def test_memory_limit_is_refused_where_no_group_can_be_made(
    small_moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(surroundings, "V1_ROOT", tmp_path / "absent")
    monkeypatch.setattr(surroundings, "V2_ROOT", tmp_path / "absent")
    assert main(["bench", str(small_moe), "--memory-limit", "1GiB"]) == 2
    assert "without --memory-limit" in capfd.readouterr().err


@needs_limits
@pytest.mark.parametrize("limit", ["1KiB", "0.001%", "15MiB"])
def test_a_memory_limit_with_which_no_process_begins_is_refused(
    limit: str, small_moe: Path, capfd: pytest.CaptureFixture[str]
):
    assert main(["bench", str(small_moe), "--memory-limit", limit]) == 2
    assert "with which no process begins: use 16 MiB or more" in capfd.readouterr().err


def test_text_that_is_too_short_is_refused(small_moe: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    text = tmp_path / "text"
    text.write_text("import os")
    assert main(["bench", str(small_moe), "--budget", "100%", "--data", str(text), *WORK]) == 2
    assert "give a longer one with --data" in capfd.readouterr().err


@pytest.mark.parametrize("arguments", [
    ("--budget", "1KiB"), ("--budget", "much"), ("--baseline", "llamafile"), ("--repeat", "0"), ("--memory-limit", "x"),
    ("--memory-limit", "0"),
    ("--data", "absent.txt"), ("--busy", "-1"), ("--busy", "one"),
])
def test_wrong_options_are_refused(small_moe: Path, arguments: tuple[str, str], capfd: pytest.CaptureFixture[str]):
    assert main(["bench", str(small_moe), *arguments]) == 2
    assert capfd.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(("settings", "lacks"), [
    ("ghosts", "there are no ghosts next to"), ("buddies", "there are no buddy lists next to"),
    ("mode=none,miss=drop,min_entropy=p30", "percentiles such as p30 need buddy lists"),
])
def test_lossy_settings_without_their_file_are_refused_before_anything_is_measured(
    small_moe: Path, settings: str, lacks: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", str(small_moe), "--budget", "50%", "--lossy", "heaviest", "--lossy", settings]) == 2
    shown = capfd.readouterr()
    assert lacks in shown.err and "decode" not in shown.err + shown.out


def test_dense_model_is_refused(dense_model: Path, capfd: pytest.CaptureFixture[str]):
    assert main(["bench", str(dense_model)]) == 2
    assert "dense model" in capfd.readouterr().err


def test_bandwidth_is_measured_on_the_experts(small_moe: Path):
    with ModelMap(small_moe) as model_map:
        bandwidth = disk.measure_bandwidth(model_map, 0.06)
    assert bandwidth.bytes_per_second > 0 and bandwidth.cores > 0
    assert not bandwidth.direct  # experts this small are read through the page cache


# Arithmetic, on runs that never took place: 10 tokens each.

RESIDENT = bench_plan.RESIDENT
BUDGET = Config("budget 40%", ENGINE, Settings(budget="40%"))


def run_of(config: Config, seconds: float, read_bytes: int = 0, round: int = 0, bandwidth: float = GiB) -> Run:
    phase = Phase(10, seconds, 60, 20, read_bytes, read_bytes, 0.0)
    return Run(config, round, "", Measurement(1, 2, phase, phase, 100, 50, 40), None, bandwidth, 0.0)


def decode_roofline(*runs: Run) -> float:
    return summarize(Results(runs, ()), BUDGET, RESIDENT).decode_roofline


def test_roofline_is_compute_where_little_is_read():
    assert decode_roofline(run_of(RESIDENT, 1.0), run_of(BUDGET, 1.25, GiB // 2)) == pytest.approx(0.8)


def test_roofline_is_reading_where_much_is_read():
    assert decode_roofline(run_of(RESIDENT, 1.0), run_of(BUDGET, 4.0, 2 * GiB)) == pytest.approx(0.5)


def test_runs_are_compared_with_those_of_their_own_round():
    quiet = run_of(RESIDENT, 1.0), run_of(BUDGET, 2.0)
    noisy = run_of(RESIDENT, 3.0, round=1), run_of(BUDGET, 6.0, round=1)
    assert decode_roofline(*quiet, *noisy) == pytest.approx(0.5)
    assert ratio(
        Results((*quiet, *noisy), ()), RESIDENT, BUDGET, lambda measured: measured.decode.rate
    ) == pytest.approx(2.0)


def test_a_miss_costs_what_was_waited_for_it():
    phase = Phase(10, 1.0, 60, 20, 0, 0, 0.5)
    run = run_of(BUDGET, 1.0)
    runs = (replace(run, measurement=replace(run.measurement, decode=phase)),)
    assert summarize(Results(runs, ()), BUDGET, None).decode_stall_seconds_per_miss == 0.025
    runs = (replace(run, measurement=replace(run.measurement, decode=replace(phase, misses=0))),)
    assert math.isnan(summarize(Results(runs, ()), BUDGET, None).decode_stall_seconds_per_miss)


def test_roofline_is_unknown_without_the_reference():
    assert math.isnan(decode_roofline(run_of(BUDGET, 2.0)))
