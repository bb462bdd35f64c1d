"""scripts.papers.buddymoe.tables: baselines have the gates of the rows beside which they stand; and the tables of
docs/measurements/lossy.md, as scripts.papers.buddymoe.report makes them."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
from pathlib import Path

import pytest
from buddy_lists import complete_buddies
from docs_commands import ROOT
from models import CHECKPOINT

from pyorch.errors import PyorchError
from pyorch.eval.arc import Accuracy
from pyorch.eval.judge import Judgement
from pyorch.eval.method import Slots
from pyorch.eval.perplexity import Divergence
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.substitution import Substitution
from scripts.papers.buddymoe import report
from scripts.papers.buddymoe.measure import Folder
from scripts.papers.buddymoe.report import MODELS
from scripts.papers.buddymoe.tables import baseline, leads, main

FACTS = CHECKPOINT / "facts-test.jsonl"


def test_a_baseline_beside_ghosts_has_none() -> None:
    ghosts = Substitution.parse("mode=none,miss=ghost,order=weight,sacred=2")
    gates = Substitution(order="weight", sacred=2)
    assert baseline("random", ghosts).substitution == dataclasses.replace(gates, mode="random")
    assert baseline("drop", ghosts).substitution == dataclasses.replace(gates, mode="none", miss="drop")


def test_errors_of_leads_are_those_of_differences_in_pairs() -> None:
    def judged(mean: float, *blocks: float) -> Judgement:
        return Judgement((Accuracy("1110", "1110"),), Slots(1, 0, 0, 0), Divergence(96, mean, blocks))

    one, other = judged(2.0, 1.0, 2.0, 3.0), judged(1.0, 0.0, 1.0, 2.0)
    found = leads(one, "drop", other)
    assert (found["leads drop acc"], found["leads drop acc stderr"]) == (0, 0)
    assert (found["kl_divergence above drop"], found["kl_divergence above drop stderr"]) == (1, 0)


def test_rows_lead_baselines_of_the_same_gates(
    small_moe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Baselines of heaviest and of ghosts have the same gates, and leaving out beside heaviest is heaviest itself."""
    with ModelMap(small_moe) as model_map:
        complete_buddies().write(tmp_path / "lists.gguf", model_map)
    arguments = [str(small_moe), "--data", str(FACTS), "--limit", "6", "--cache-rate", "0.5", "--lossy",
                 "alpha=0.9,rho=2", "--lossy", "heaviest", "--buddies-file", str(tmp_path / "lists.gguf"),
                 "--speed-tokens", "0", "--threads", "1", "--text", str(CHECKPOINT / "text-test.txt"), "--text-tokens",
                 "100"]
    assert main([*arguments, "--json"]) == 0
    rows = {row["settings"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == [
        "", "coverage=0.9,max_replaced=2", "mode=random,max_replaced=2", "mode=none,max_replaced=2,miss=drop",
        "heaviest", "mode=random,order=weight,miss=drop,max_weight=0.9,sacred=1"]
    buddies, dropping = rows["coverage=0.9,max_replaced=2"], rows["mode=none,max_replaced=2,miss=drop"]
    assert buddies["leads drop acc"] == pytest.approx(buddies["facts-test acc"] - dropping["facts-test acc"])
    farther = buddies["kl_divergence above drop"]
    assert farther == pytest.approx(buddies["kl_divergence"] - dropping["kl_divergence"])
    assert 0 < buddies["kl_divergence above drop stderr"] < (
        buddies["kl_divergence stderr"] + dropping["kl_divergence stderr"])
    assert "leads random acc" in rows["heaviest"] and "leads drop acc" not in rows["heaviest"]
    assert 0 < rows["heaviest"]["text_read_per_token"] < rows["heaviest"]["text_absent_per_token"]
    assert main([*arguments, "--baseline", "best"]) == 2
    assert 'baseline "best" is not known' in capsys.readouterr().err


def test_the_page_shows_what_its_files_say(tmp_path: Path) -> None:
    """Tables of docs/measurements/lossy.md that are made of the files beside it, and a table for each of its marks."""
    page, folder = (ROOT / "docs/measurements/lossy.md").read_text(encoding="utf-8"), Folder(tmp_path)
    for name in MODELS:
        with (ROOT / f"docs/measurements/lossy/{name}.csv").open(newline="") as file:
            rows = [{key: _number(value) for key, value in row.items() if value} for row in csv.DictReader(file)]
        for row in rows:
            row.setdefault("settings", "")
        folder.result("levers", name).write_text(json.dumps(rows), encoding="utf-8")
    found = report.Found(tmp_path)
    assert all(report.levers(found, name) in page for name in MODELS[:2])
    assert report.gates(found) in page and report.replacing(found) in page
    marks = re.findall(r"<!-- measured: (\w+)(?: \w+)? -->\n\n(?!<)", page)
    assert set(marks) == set(report.TABLES) and page.count("<!-- measured:") == len(marks), "a table is empty"


def _number(value: str) -> float | str:
    try:
        return float(value)
    except ValueError:
        return value


def test_only_marked_tables_of_a_page_are_written_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, page = Folder(tmp_path), tmp_path / "page.md"
    layer = dict.fromkeys(("coactivated_cosine", "random_cosine", "best_cosine", "coactivated_error", "random_error",
                           "best_error", "spearman"), 0.25)
    for name in MODELS:
        folder.result("similarity", name).write_text(json.dumps([layer, {**layer, "spearman": 0.75}]), encoding="utf-8")
        folder.result("levers", name).write_text(json.dumps([{"cache_rate": 0.5}]), encoding="utf-8")
    page.write_text("Before.\n<!-- measured: similarity -->\nold\n<!-- end -->\nBehind.\n", encoding="utf-8")
    report.write(tmp_path, page)
    lines = page.read_text(encoding="utf-8").splitlines()
    assert (lines[0], lines[-1]) == ("Before.", "Behind.") and "old" not in lines
    assert sum("| 0.250 | 0.250 | 0.250 | 0.25 | 0.25 | 0.25 | 0.50 |" in line for line in lines) == 3
    assert (tmp_path / "page/less.csv").read_text(encoding="utf-8") == "cache_rate\n0.5\n"
    for text in ("no marks", "<!-- measured: similarity -->\nno end", "<!-- measured: time -->\n"
                 "<!-- measured: similarity -->\nold\n<!-- end -->\n"):
        page.write_text(text, encoding="utf-8")
        with pytest.raises(PyorchError, match="has no end"):
            report.write(tmp_path, page)
        assert page.read_text(encoding="utf-8") == text
    page.write_text("<!-- measured: nothing -->\n<!-- end -->\n", encoding="utf-8")
    with pytest.raises(PyorchError, match='there is no table "nothing"'):
        report.write(tmp_path, page)
    page.write_text("<!-- measured: unseen -->\nkept\n<!-- end -->\n", encoding="utf-8")
    report.write(tmp_path, page)
    assert "kept" in page.read_text(encoding="utf-8") and "the table unseen stays" in capsys.readouterr().err
    for name in MODELS[:2]:
        folder.result("time", name).write_text("[]", encoding="utf-8")
    page.write_text("<!-- measured: time -->\nkept\n<!-- end -->\n", encoding="utf-8")
    with pytest.raises(PyorchError, match="rows are missing"):
        report.write(tmp_path, page)
    for damaged in ("[", "[{}]", "[]"):
        folder.result("similarity", "less").write_text(damaged, encoding="utf-8")
        page.write_text("<!-- measured: similarity -->\nkept\n<!-- end -->\n", encoding="utf-8")
        with pytest.raises(PyorchError, match="cannot be"):
            report.write(tmp_path, page)
        assert "kept" in page.read_text(encoding="utf-8")
