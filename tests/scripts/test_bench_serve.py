"""Servers under load. No test depends on how fast anything was."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyorch.bench.job import ENGINE, Config
from pyorch.errors import FormatError, PyorchError
from scripts.bench_serve.__main__ import main
from scripts.bench_serve.client import Answer
from scripts.bench_serve.load import Arrival, Lengths, poisson, prompts_of, read_arrivals
from scripts.bench_serve.measure import Run, Served, percentile, suitable, summarize

WORK = ("--requests", "3", "--rate", "inf", "--prompt-tokens", "8-24", "--tokens", "4-8", "--threads", "1",
        "--max-seconds", "600")


def test_each_way_answers_the_same_requests_and_leaves_no_server(small_moe: Path, capfd: pytest.CaptureFixture[str]):
    before = processes_of(small_moe)
    assert main([str(small_moe), "--budget", "40%", "--baseline", "mmap", "--np", "1,2", "--json", *WORK]) == 0
    report = json.loads(capfd.readouterr().out)
    assert [(summary["served"]["config"]["label"], summary["served"]["slots"]) for summary in report["summaries"]] == [
        ("budget 40%", 1), ("budget 40%", 2), ("llama.cpp mmap", 1), ("llama.cpp mmap", 2)]
    for summary in report["summaries"]:
        assert (summary["n_requests"], summary["n_answered"], summary["failure"]) == (3, 3, "")
        assert 0 < summary["ttft"][0] <= summary["ttft"][1] <= summary["ttft"][2] and summary["throughput"] > 0
        assert (summary["hit_rate"] is None) == (summary["served"]["config"]["mode"] != ENGINE)
    assert 0 < report["summaries"][0]["hit_rate"] < 1 and report["suits"].keys() == {"budget 40%", "llama.cpp mmap"}
    for run in report["runs"]:
        assert [(a["n_prompt"], a["n_tokens"]) for a in run["answers"]] == [
            (a["n_prompt"], a["n_tokens"]) for a in report["arrivals"]]
    assert processes_of(small_moe) == before


def processes_of(model: Path) -> set[str]:
    """Processes with this model among their arguments."""
    found = set()
    for entry in Path("/proc").iterdir() if os.path.isdir("/proc/self") else ():
        try:
            if entry.name.isdigit() and str(model) in (entry / "cmdline").read_text().split("\0"):
                found.add(entry.name)
        except OSError:  # it has just ended
            continue
    return found


def test_the_table_says_which_number_of_slots_suits(small_moe: Path, capfd: pytest.CaptureFixture[str]):
    assert main([str(small_moe), "--budget", "40%", "--np", "1,2", *WORK]) == 0
    out, progress = capfd.readouterr()
    rows = [line for line in out.splitlines() if line.startswith("budget 40%, -np")]
    assert len(rows) == 2 and all("3 of 3" in row for row in rows)
    assert "3 requests, all at once" in out and "suits this load" in out.splitlines()[-1]
    assert "round 1 of 1: budget 40%, -np 2" in progress


def test_what_is_not_answered_in_time_is_given_up(small_moe: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    arrivals = tmp_path / "arrivals.jsonl"
    arrivals.write_text('{"seconds": 0, "prompt_tokens": 4, "tokens": 2}\n{"seconds": 100000}\n')
    assert main([str(small_moe), "--budget", "40%", "--np", "1", "--arrivals", str(arrivals),
                 "--max-seconds", "600", "--tokens", "2", "--json", "--threads", "1"]) == 0
    out, progress = capfd.readouterr()
    answers = json.loads(out)["runs"][0]["answers"]
    assert [answer["failure"] for answer in answers] == ["", "not sent in time"]
    assert "1 of 2 answered: not sent in time" in progress


@pytest.mark.parametrize("arguments, sentence", [
    (("--prompt-tokens", "9-3"), '"9-3" is no distribution of lengths'),
    (("--tokens", "lognormal:0:1"), '"lognormal:0:1" is no distribution of lengths'),
    (("--np", "9"), '"9" is not a whole number from 1 to 8'),
    (("--rate", "0"), '"0" is not a number above 0'),
    (("--budget", "1KiB"), "budget 1 KiB is below the floor"),
    (("--prompt-tokens", "10000000", "--np", "1"), "give a longer one with --data"),
    (("--arrivals", "nowhere.jsonl"), "nowhere.jsonl cannot be read"),
    (("--unknown",), "python -m scripts.bench_serve --help shows all options"),
])
def test_a_mistake_is_a_sentence(
    small_moe: Path, capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], sentence: str
):
    assert main([str(small_moe), *arguments]) == 2
    assert sentence in capfd.readouterr().err


@pytest.mark.parametrize("line, sentence", [
    ("0.4", "not a JSON object"), ('{"seconds": -1}', '"seconds" is -1'), ('{"at": 1}', '"at" is not known'),
    ('{"seconds": 0, "tokens": 0}', '"tokens" is 0'), ("", "holds no arrivals"),
])
def test_a_file_of_arrivals_is_refused_with_its_line(tmp_path: Path, line: str, sentence: str):
    path = tmp_path / "arrivals.jsonl"
    path.write_text(f'{line}\n')
    with pytest.raises(FormatError, match="arrivals.jsonl(:1:)?") as raised:
        read_arrivals(path, Lengths.parse("8"), Lengths.parse("8"), 0)
    assert sentence in str(raised.value)


def test_a_file_of_arrivals_is_sorted_and_completed(tmp_path: Path):
    path = tmp_path / "arrivals.jsonl"
    path.write_text('{"seconds": 2, "prompt_tokens": 5}\n\n{"seconds": 0.5, "prompt_tokens": 3, "tokens": 7}\n')
    assert read_arrivals(path, Lengths.parse("9"), Lengths.parse("4"), 0) == [Arrival(0.5, 3, 7), Arrival(2.0, 5, 4)]


@given(st.integers(1, 200), st.integers(0, 3), st.floats(0.01, 100))
def test_poisson_arrivals_are_ordered_and_the_same_for_the_same_seed(n: int, seed: int, rate: float):
    lengths = Lengths.parse("lognormal:20:0.7"), Lengths.parse("3-9")
    arrivals = poisson(n, rate, *lengths, seed)
    assert arrivals == poisson(n, rate, *lengths, seed) and len(arrivals) == n
    assert [arrival.seconds for arrival in arrivals] == sorted(arrival.seconds for arrival in arrivals)
    assert all(1 <= arrival.n_prompt <= 160 and 3 <= arrival.n_tokens <= 9 for arrival in arrivals)


def test_the_rate_of_poisson_arrivals_is_the_one_asked_for():
    arrivals = poisson(4000, 5.0, Lengths.parse("8"), Lengths.parse("8"), seed=1)
    assert arrivals[-1].seconds == pytest.approx(800, rel=0.1)


@given(st.integers(1, 40), st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_prompts_are_parts_of_the_text(n_text: int, lengths: list[int]):
    arrivals = [Arrival(0.0, n, 1) for n in lengths]
    if max(lengths) > n_text:
        with pytest.raises(PyorchError, match="give a longer one with --data"):
            prompts_of(range(n_text), arrivals)
        return
    prompts = prompts_of(range(n_text), arrivals)
    assert [len(prompt) for prompt in prompts] == lengths
    assert all(list(prompt) == list(range(prompt[0], prompt[0] + len(prompt))) for prompt in prompts)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentiles_are_those_of_numpy(values: list[float], p: float):
    import numpy as np

    assert percentile(values, p) == pytest.approx(np.percentile(values, p), rel=1e-9, abs=1e-6)


def test_percentiles_leave_out_what_is_no_number():
    assert percentile([float("nan"), 3.0], 95) == 3.0 and math.isnan(percentile([], 50))


def served(slots: int) -> Served:
    return Served(Config("budget 40%", ENGINE), slots)


def run_of(slots: int, *answers: Answer, failure: str = "") -> Run:
    return Run(served(slots), 0, failure, answers, 1.0, 3, 1, 800, None)


def test_a_summary_counts_what_was_answered():
    run = run_of(2, Answer(8, 10, 1.0, 0.1, 4.0), Answer(8, 1, 3.0, float("nan"), 5.0),
                 Answer(8, 0, float("nan"), float("nan"), float("nan"), "not sent in time"))
    summary = summarize([run], served(2))
    assert (summary.n_requests, summary.n_answered, summary.hit_rate) == (3, 2, 0.75)
    assert summary.failure == "not sent in time"
    assert summary.ttft[0] == 2.0 and summary.tpot == (0.1, 0.1, 0.1)
    assert summary.throughput == 11 / 5 and summary.bytes_per_token == 800 / 11


def test_the_fewest_slots_that_are_fast_enough_suit():
    summaries = [summarize([run_of(slots, Answer(8, tokens, 1.0, 0.1, 10.0))], served(slots))
                 for slots, tokens in ((1, 60), (2, 97), (4, 100), (8, 50))]
    assert suitable(summaries).served.slots == 2
    killed = summarize([run_of(1, failure="killed for memory")], served(1))
    assert suitable([killed]) is None and suitable([killed, summaries[3]]) is summaries[3]
