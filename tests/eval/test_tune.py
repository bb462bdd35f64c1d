"""The search for a setting, and the file that it is kept in."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from models import CHECKPOINT

from pyorch.cli import main
from pyorch.errors import FormatError
from pyorch.eval.method import Slots
from pyorch.sidecars.tuned_setting import TunedSetting, default_path, read_tuned, write_tuned
from pyorch.eval.search import Goal, Outcome, Search, Trial, positions
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.substitution import Substitution

N_USED = 6
FACTS = CHECKPOINT / "facts-train.jsonl"


class World:
    """Settings cost accuracy by how far their dials are open, each dial by its own price."""

    def __init__(self, **prices: float) -> None:
        self.prices = prices
        self.asked: list[Substitution | None] = []

    def __call__(self, it: Substitution | None) -> Outcome:
        self.asked.append(it)
        if it is None:
            return Outcome(0.8, None, Slots(1, 0, 0, 0))
        open_share = 1.0
        cost = 0.02 * (it.weight != "fitted") + 0.01 * (it.order != "weight")
        for dial, values in positions(N_USED).items():
            share = (values.index(getattr(it, dial)) + 1) / len(values)
            open_share *= share
            cost += self.prices.get(dial, 0.0) * share
        replaced = round(1000 * open_share)
        return Outcome(0.8 - cost, None, Slots(10, 1000, replaced, 0))


def search(world: World, max_trials: int = 48, min_accuracy: float = 0.95) -> list[Trial]:
    return Search(world, Goal(min_accuracy, None), N_USED, max_trials).run()


def test_where_nothing_is_lost_all_dials_stay_open() -> None:
    world = World()
    best = search(world)[0]
    assert best.reached and best.outcome.slots.read_per_token == 0
    assert (best.substitution.rho, best.substitution.tau, best.substitution.beta) == (None, None, None)
    assert len(world.asked) <= 5  # the original, three weights, another order


def test_what_loses_least_is_chosen_before_the_dials() -> None:
    best = search(World(rho=0.07))[0]
    assert best.substitution.weight == "fitted" and best.substitution.order == "weight"


@pytest.mark.parametrize("dial", ["rho", "tau", "alpha", "beta"])
def test_the_dial_that_costs_accuracy_is_closed_just_enough(dial: str) -> None:
    best = search(World(**{dial: 0.081}))[0]  # half open costs a little more than the 0.04 that may be lost
    values = positions(N_USED)[dial]
    position = values.index(getattr(best.substitution, dial))
    assert best.reached
    assert (position + 1) / len(values) * 0.081 <= 0.04 < (position + 2) / len(values) * 0.081
    for other in set(positions(N_USED)) - {dial}:
        assert getattr(best.substitution, other) == positions(N_USED)[other][-1]


def test_two_dials_may_share_the_work() -> None:
    """Neither alone reaches the goal; of what both may cost, each gets about half."""
    best = search(World(rho=0.05, tau=0.05), max_trials=80)[0]
    assert best.reached and best.substitution.alpha == 1.0 and best.substitution.beta is None
    shares = [(values.index(getattr(best.substitution, dial)) + 1) / len(values)
              for dial, values in positions(N_USED).items() if dial in ("rho", "tau")]
    # 2 of 6 and 5 of 11 positions; 3 and 3, or 1 and 6, would read more.
    assert shares == [2 / 6, 5 / 11]


def test_reached_trials_come_first_and_the_one_that_reads_least_before_them_all() -> None:
    trials = search(World(rho=0.05, tau=0.03, beta=0.02))
    assert [it.reached for it in trials] == sorted((it.reached for it in trials), reverse=True)
    reads = [it.outcome.slots.read_per_token for it in trials if it.reached]
    assert reads == sorted(reads) and len(reads) > 1


def test_no_setting_is_tried_twice_and_no_more_than_asked() -> None:
    world = World(rho=0.05, tau=0.05, alpha=0.05, beta=0.05)
    trials = search(world, max_trials=20)
    assert len(world.asked) == len(set(world.asked)) == 1 + len(trials) and len(trials) <= 20


def test_out_of_reach() -> None:
    assert not any(it.reached for it in search(World(rho=0.5, tau=0.5, alpha=0.5, beta=0.5)))


def test_a_divergence_may_be_the_goal() -> None:
    goal = Goal(None, 0.1)
    outcome = Outcome(None, 0.05, Slots(1, 1, 1, 0))
    assert goal.reached(outcome, outcome) and goal.loss(outcome, outcome) == pytest.approx(0.5)
    assert not Goal(None, 0.04).reached(outcome, outcome)


def test_a_setting_keeps_the_accuracy_beyond_chance() -> None:
    goal, original = Goal(0.9, None), Outcome(0.8, None, Slots(1, 0, 0, 0))
    for accuracy, error, reached in ((0.73, 0.0, True), (0.73, 0.02, False), (0.77, 0.02, True), (0.8, math.nan, False)):
        outcome = Outcome(accuracy, None, Slots(1, 1, 1, 0), error)
        assert goal.reached(outcome, original) is reached


#
# the command
#


def tune(small_moe: Path, lists: Path, *arguments: object) -> int:
    return main([str(it) for it in (
        "tune", small_moe, "--data", FACTS, "--limit", 12, "--buddies-file", lists, "--trials", 12, "--candidates", 1,
        "--speed-tokens", 8, "--threads", 1, *arguments)])


def write_text(path: Path, n_characters: int) -> Path:
    path.write_text((CHECKPOINT / "text-test.txt").read_text(encoding="utf-8")[:n_characters], encoding="utf-8")
    return path


def test_tune_writes_a_setting_that_keeps_what_was_asked(
    small_moe: Path, buddies_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "small.tuned.json"
    held_out = tmp_path / "others.jsonl"
    held_out.write_text("".join((CHECKPOINT / "facts-test.jsonl").read_text(encoding="utf-8").splitlines(True)[:8]))
    assert tune(small_moe, buddies_file, "--cache-rate", 0.75, "--min-accuracy", "50%", "--held-out", held_out,
                "-o", path, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    with ModelMap(small_moe) as model_map:
        tuned = read_tuned(path, model_map)
    assert tuned.budget == "75%" and tuned.cache_rate == pytest.approx(0.75) and tuned.n_questions == 12
    assert tuned.accuracy >= 0.5 * tuned.original_accuracy > 0
    assert tuned.n_held_out == 8 and 0 < tuned.held_out_accuracy <= 1 and tuned.held_out_error >= 0
    assert str(tuned.substitution) == tuned.settings == printed["tuned"]["settings"]
    assert tuned.tokens_per_second > 0 and tuned.original_tokens_per_second > 0
    assert printed["trials"][0]["reached"] and printed["trials"][0]["tokens_per_second"] is not None


def test_tune_for_a_divergence_needs_no_questions(
    small_moe: Path, buddies_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, text = tmp_path / "small.tuned.json", write_text(tmp_path / "text.txt", 400)
    assert main([str(it) for it in (
        "tune", small_moe, "--data", text, "--buddies-file", buddies_file, "--trials", 5, "--speed-tokens", 0,
        "--threads", 1, "--cache-rate", 0.75, "--max-kl", 5, "-o", path)]) == 0
    with ModelMap(small_moe) as model_map:
        tuned = read_tuned(path, model_map)
    assert 0 < tuned.kl_divergence < 5 and tuned.accuracy is None and tuned.tokens_per_second is None
    assert "KL divergence" in capsys.readouterr().out


def test_tune_says_what_comes_closest(
    small_moe: Path, buddies_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "small.tuned.json"
    text = write_text(tmp_path / "text.txt", 400)
    assert main([str(it) for it in (
        "tune", small_moe, "--data", text, "--buddies-file", buddies_file, "--trials", 5, "--threads", 1,
        "--cache-rate", 0.25, "--max-kl", 0, "-o", path)]) == 2
    error = capsys.readouterr().err
    assert "keeps a KL divergence of 0 nats; the closest, " in error and error.count("\n") == 1
    assert not path.exists()


@pytest.mark.parametrize("arguments, sentence", [
    ([], "give --cache-rate, such as 0.5, or --budget"),
    (["--cache-rate", "0.5,0.75"], "one cache rate at a time"),
    (["--cache-rate", "0.5", "--budget", "50%"], "give one of them"),
    (["--cache-rate", "0.5", "--min-accuracy", "95"], '--min-accuracy: "95" is not a share above 0 and at most 1'),
    (["--budget", "100%"], "keeps all experts"),
    (["--cache-rate", "0.5", "--trials", "1"], "--trials 1 is less than 5"),
])
def test_mistakes_are_sentences(
    small_moe: Path, buddies_file: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    command = ["tune", str(small_moe), "--data", str(FACTS), "--buddies-file", str(buddies_file), *arguments]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1


#
# tuned settings
#

TUNED = TunedSetting("rho=3,tau=p15", "50%", 0.5, "acc_norm", 100, 0.8, 0.82, None, 12.0, 10.0, 1e6)


def test_a_tuned_setting_is_read_as_it_was_written(small_moe: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.tuned.json"
    with ModelMap(small_moe) as model_map:
        write_tuned(path, TUNED, model_map)
        assert read_tuned(path, model_map) == TUNED
    assert TUNED.substitution == Substitution.parse("rho=3,tau=p15")
    assert default_path("a/model.gguf") == Path("a/model.tuned.json")


def test_a_tuned_setting_of_another_model_is_refused(small_moe: Path, small_moe_q4: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.tuned.json"
    with ModelMap(small_moe_q4) as model_map:
        write_tuned(path, TUNED, model_map)
    with ModelMap(small_moe) as model_map, pytest.raises(FormatError, match="was made for another model, small-moe-q4.gguf"):
        read_tuned(path, model_map)


@pytest.mark.parametrize("change, sentence", [
    ({"kind": "something"}, "is not a tuned setting"),
    ({"version": 99}, "has version 99"),
    ({"settings": "max_replaced=many"}, 'max_replaced="many" is not a whole number'),
    ({"budget": 5}, "budget is not a string"),
    ({"budget": None}, "budget is not a string"),
])
def test_a_damaged_tuned_setting_is_refused(small_moe: Path, tmp_path: Path, change: dict, sentence: str) -> None:
    path = tmp_path / "model.tuned.json"
    with ModelMap(small_moe) as model_map:
        write_tuned(path, TUNED, model_map)
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        with pytest.raises(FormatError, match=sentence):
            read_tuned(path, model_map)
        for text in (path.read_text()[:40], "[" * 100_000):
            path.write_text(text)
            with pytest.raises(FormatError, match="is not a tuned setting"):
                read_tuned(path, model_map)
        path.unlink()
        with pytest.raises(FormatError, match="cannot be read"):
            read_tuned(path, model_map)
