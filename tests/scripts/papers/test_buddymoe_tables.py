"""scripts.papers.buddymoe.tables: baselines have the gates of the rows beside which they stand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from buddy_lists import complete_buddies
from models import CHECKPOINT

from pyorch.eval.arc import Accuracy
from pyorch.eval.judge import Judgement
from pyorch.eval.method import Slots
from pyorch.eval.perplexity import Divergence
from pyorch.eval.sweep import Row
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.substitution import Substitution
from scripts.papers.buddymoe.tables import baseline, leads, main

FACTS = CHECKPOINT / "facts-test.jsonl"


def test_a_baseline_beside_ghosts_has_none() -> None:
    ghosts = Substitution.parse("mode=none,miss=ghost,order=weight,sacred=2")
    gates = Substitution(order="weight", sacred=2)
    assert baseline("random", ghosts).substitution == dataclasses.replace(gates, mode="random")
    assert baseline("drop", ghosts).substitution == dataclasses.replace(gates, mode="none", miss="drop")


def test_errors_of_leads_are_those_of_differences_in_pairs() -> None:
    def row(mean: float, *blocks: float) -> Row:
        judgement = Judgement((Accuracy("1110", "1110"),), Slots(1, 0, 0, 0), Divergence(96, mean, blocks))
        return Row(0.5, "m", "s", judgement, {}, {}, None, None)

    one, other = row(2.0, 1.0, 2.0, 3.0), row(1.0, 0.0, 1.0, 2.0)
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
