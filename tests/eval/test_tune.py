"""The search for a setting, and the file that it is kept in."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from models import CHECKPOINT

from pyorch.cli import main
from pyorch.errors import FormatError, PyorchError
from pyorch.eval import judge
from pyorch.eval import tune as tuning
from pyorch.eval.arc import Accuracy, Task
from pyorch.eval.judge import PARTS, Judgement
from pyorch.eval.method import Method, Slots
from pyorch.eval.perplexity import Divergence
from pyorch.eval.search import Goal, Outcome, Search, Trial
from pyorch.eval.speed import Speed, median
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.substitution import Substitution
from pyorch.sidecars.tuned_setting import TunedSetting, default_path, read_tuned, write_tuned

FACTS = CHECKPOINT / "facts-train.jsonl"
N_QUESTIONS = 400


class World:
    """Settings by how many experts they read for a token, of ten absent ones, and which share of answers they spoil."""

    def __init__(self, n_questions: int = N_QUESTIONS) -> None:
        self.spoil: dict[Substitution | None, float] = {None: 0.0}
        self.read: dict[Substitution | None, int] = {None: 10}
        self.asked: list[tuple[Substitution | None, int, int]] = []
        self.luck = np.random.default_rng(5).random(n_questions)  # below 0.2: also the original is wrong

    def add(self, reads: int, spoils: float) -> Substitution:
        setting = Substitution(mode="random", seed=len(self.spoil))
        self.read[setting], self.spoil[setting] = reads, spoils
        return setting

    def __call__(self, lossy: Substitution | None, begin: int, end: int) -> Judgement:
        self.asked.append((lossy, begin, end))
        luck = self.luck[len(self.luck) * begin // PARTS : len(self.luck) * end // PARTS]
        right = "".join(str(int(one >= 0.2 + self.spoil[lossy])) for one in luck)
        n = 10 * len(luck)
        return Judgement((Accuracy(right, right),), Slots(n, 10 * n, 0, (10 - self.read[lossy]) * n))


def search(world: World, min_accuracy: float = 0.95) -> list[Trial]:
    settings = [setting for setting in world.spoil if setting is not None]
    return Search(world, Goal(min_accuracy, None), settings, len(world.luck)).run()


def test_the_setting_wins_that_reads_least_of_those_that_keep_the_accuracy() -> None:
    world = World()
    for reads, spoils in ((1, 0.3), (2, 0.1), (3, 0.06), (5, 0.01), (6, 0.005), (7, 0.0), (8, 0.0), (9, 0.0)):
        world.add(reads, spoils)
    trials = search(world)
    assert trials[0].reached and trials[0].outcome.slots.read_per_token == 5
    assert [trial.reached for trial in trials] == sorted((trial.reached for trial in trials), reverse=True)
    assert len(trials) == 8 and {trial.outcome.share for trial in trials} == {1.0, 0.5, 0.25, 0.125}


def test_twenty_four_settings_cost_what_eight_and_a_half_do() -> None:
    world = World()
    for i in range(24):
        world.add(i % 10, 0.01 * (i % 7))
    search(world)
    assert sum(end - begin for _, begin, end in world.asked) == 8.5 * PARTS
    for setting in world.spoil:
        parts = [(begin, end) for entry, begin, end in world.asked if entry == setting]
        assert all(end == begin for (_, end), (begin, _) in zip(parts, parts[1:])), "none is answered twice"
    told = []
    Search(World(), Goal(0.9, None), [], N_QUESTIONS, on_trial=lambda *trial: told.append(trial)).run()
    assert told == [(0, 8), (1, 8), (2, 8), (4, 8)]


def test_a_setting_that_loses_much_is_left_behind_though_it_reads_nothing() -> None:
    world = World()
    tempting, modest = world.add(0, 0.25), world.add(8, 0.0)
    trials = {trial.substitution: trial for trial in search(world)}
    assert trials[modest].reached and trials[tempting].outcome.share < 1


def test_of_few_questions_all_settings_answer_all() -> None:
    world = World(n_questions=24)
    for reads in range(6):
        world.add(reads, 0.0)
    trials = search(world)
    assert {trial.outcome.share for trial in trials} == {1.0} and trials[0].outcome.slots.read_per_token == 0


def test_that_few_answers_are_alike_is_no_proof() -> None:
    """An error of 0 would be certainty; of all questions it stands."""
    world = World()
    for reads in range(8):
        world.add(reads, 0.0)
    for trial in search(world):
        share = trial.outcome.share
        assert trial.outcome.error == (1 / (N_QUESTIONS * share) if share < 1 else 0)


def test_out_of_reach() -> None:
    world = World()
    world.add(0, 0.3), world.add(5, 0.2)
    trials = search(world)
    assert not any(trial.reached for trial in trials)
    assert trials[0].outcome.slots.read_per_token == 5, "the closest comes first"


def outcome(accuracy: float | None = None, error: float = 0.0, kl: float | None = None, share: float = 1.0) -> Outcome:
    return Outcome(accuracy, 0.8, error, kl, 0.01, Slots(1, 1, 1, 0), share)


def test_a_divergence_may_be_the_goal() -> None:
    goal = Goal(None, 0.1)
    assert goal.reached(outcome(kl=0.05)) and goal.loss(outcome(kl=0.05)) == pytest.approx(0.5)
    assert not Goal(None, 0.04).reached(outcome(kl=0.05))
    assert 0.5 < goal.chance(outcome(kl=0.095, share=0.5)) < 0.9 < goal.chance(outcome(kl=0.05, share=0.5))


def test_a_setting_keeps_the_accuracy_beyond_chance() -> None:
    goal = Goal(0.9, None)
    for accuracy, error, reached in (
        (0.73, 0.0, True),
        (0.73, 0.02, False),
        (0.77, 0.02, True),
        (0.8, math.nan, False),
    ):
        assert goal.reached(outcome(accuracy, error)) is reached
        assert goal.chance(outcome(accuracy, error)) == reached
    assert goal.loss(outcome(0.72)) == pytest.approx(1) and goal.loss(outcome(0.76, 0.02)) == pytest.approx(1)


def test_the_chance_to_reach_the_goal_counts_with_all_questions() -> None:
    """Of a quarter of them the error is twice what it will be: 0.76 now is 0.76 - 2 * 0.02 then, which is the bound."""
    goal = Goal(0.9, None)
    assert goal.chance(outcome(0.76, 0.04, share=0.25)) == pytest.approx(0.5, abs=1e-6)
    assert goal.chance(outcome(0.76, 0.02, share=0.25)) > 0.8 > 0.2 > goal.chance(outcome(0.72, 0.02, share=0.25))


def test_evidence_of_parts_is_that_of_the_whole() -> None:
    parts = [Judgement((Accuracy("10", "11"),), Slots(n, 2, 1, 0), Divergence(n, mean, (mean,) * blocks))
             for n, mean, blocks in ((64, 1.0, 2), (32, 4.0, 1))]
    whole = parts[0] + parts[1]
    assert whole == Judgement((Accuracy("1010", "1111"),), Slots(96, 4, 2, 0), Divergence(96, 2.0, (1.0, 1.0, 4.0)))
    text_only = Judgement((), Slots(0, 0, 0, 0))
    assert (text_only + replace(parts[0], accuracies=())).divergence == parts[0].divergence


def test_a_lever_stands_for_all_its_alternatives() -> None:
    found = tuning.settings_of(
        ["mode=none,miss=drop,sacred=1|2,min_entropy=p5|0.5", "order=weight", "mode=buddies,order=weight"])
    assert [str(setting) for setting in found] == [
        "mode=none,min_entropy=p5,miss=drop,sacred=1", "mode=none,min_entropy=0.5,miss=drop,sacred=1",
        "mode=none,min_entropy=p5,miss=drop,sacred=2", "mode=none,min_entropy=0.5,miss=drop,sacred=2", "order=weight"]
    assert len(tuning.settings_of(tuning.LEVERS)) == 25
    for lever, sentence in (
        ("mode=none", "replaces nothing"), ("sacred=1|x", "not a whole number"), ("a=1", "is not known"),
        ("seed=" + "|".join(map(str, range(600))), "more than 512 settings"),
    ):
        with pytest.raises(PyorchError, match=sentence):
            tuning.settings_of([lever])


#
# the command
#


def tune(small_moe: Path, lists: Path, *arguments: object) -> int:
    return main([str(word) for word in (
        "tune", small_moe, "--data", FACTS, "--limit", 12, "--buddies-file", lists, "--candidates", 1, "--lever",
        "mode=none,miss=drop,sacred=1|3", "--lever", "mode=cache,sacred=2", "--lever", "rho=1|3",
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
    assert len(printed["trials"]) == 5 and {trial["tried_on"] for trial in printed["trials"]} == {1.0}


@pytest.mark.parametrize(("share", "says"), [(0.49, True), (0.51, False)])
def test_tune_says_when_held_out_questions_keep_less_than_was_asked(
    small_moe: Path, buddies_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, share: float, says: bool,
) -> None:
    held_out = tmp_path / "others.jsonl"
    held_out.write_text("".join((CHECKPOINT / "facts-test.jsonl").read_text(encoding="utf-8").splitlines(True)[:8]))
    real = tuning.tune

    def losing(*arguments: object) -> object:
        done = real(*arguments)
        return replace(done, tuned=replace(
            done.tuned, held_out_accuracy=share * done.tuned.held_out_original_accuracy))

    monkeypatch.setattr(tuning, "tune", losing)
    assert tune(small_moe, buddies_file, "--cache-rate", 0.75, "--min-accuracy", "50%", "--held-out", held_out,
                "-o", tmp_path / "small.tuned.json") == 0
    assert ("of the held-out questions it keeps less than the 50.0% asked for" in capsys.readouterr().err) == says


def test_the_first_part_of_the_questions_is_of_all_of_the_file() -> None:
    """Which may have one kind of them behind another."""
    task = Task("a.jsonl", tuple(range(80)), tuple(range(80)))
    shuffled = judge.shuffled(task)
    assert shuffled.questions == shuffled.prompts
    first = judge.part_of(shuffled.questions, 0, 1)
    assert len(first) == 10 and min(first) < 20 and max(first) >= 60
    parts = [question for part in range(PARTS) for question in judge.part_of(shuffled.questions, part, part + 1)]
    assert sorted(parts) == list(range(80)) and judge.shuffled(task) == shuffled


def test_of_those_that_keep_the_accuracy_the_fastest_wins(
    small_moe: Path, buddies_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the one that reads least, whatever this machine does. Rounds go there and back."""
    asked: list[str] = []

    def measured(path: str, method: Method, *rest: object, **options: object) -> Speed:
        asked.append(method.settings)
        return Speed(8, 1.0 if method.settings == "heaviest" else 2.0, 0, 0, 0, 0.0, 0, 0, 0)

    monkeypatch.setattr(tuning, "measure_speed", measured)
    path = tmp_path / "small.tuned.json"
    assert main([str(word) for word in (
        "tune", small_moe, "--data", FACTS, "--limit", 4, "--buddies-file", buddies_file, "--cache-rate", 0.75,
        "--min-accuracy", "1%", "--lever", "heaviest:0.7|0.9|1.2", "--threads", 1,
        "-o", path)]) == 0
    with ModelMap(small_moe) as model_map:
        tuned = read_tuned(path, model_map)
    assert tuned.settings == "heaviest" and tuned.tokens_per_second == 8 and tuned.original_tokens_per_second == 4
    assert len(asked) == 3 * 4 and asked[:4] == asked[4:8][::-1] == asked[8:]


def test_tune_for_a_divergence_needs_no_questions(
    small_moe: Path, buddies_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, text = tmp_path / "small.tuned.json", write_text(tmp_path / "text.txt", 400)
    assert main([str(word) for word in (
        "tune", small_moe, "--data", text, "--buddies-file", buddies_file, "--lever", "rho=1|2", "--speed-tokens", 0,
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
    assert main([str(word) for word in (
        "tune", small_moe, "--data", text, "--buddies-file", buddies_file, "--lever", "rho=1|2", "--threads", 1,
        "--cache-rate", 0.25, "--max-kl", 0, "-o", path)]) == 2
    error = capsys.readouterr().err
    assert "keeps a KL divergence of 0 nats; the closest, " in error and error.count("\n") == 1
    assert not path.exists()


@pytest.mark.parametrize("arguments, sentence", [
    ([], "give --cache-rate, such as 0.5, or --budget"),
    (["--cache-rate", "0.5,0.75"], "is not a share above 0"),
    (["--cache-rate", "0.5", "--budget", "50%"], "give one of them"),
    (["--cache-rate", "0.5", "--min-accuracy", "95"], '--min-accuracy: "95" is not a share above 0 and at most 1'),
    (["--budget", "100%"], "keeps all experts"),
    (["--cache-rate", "0.5", "--lever", "mode=none,miss=ghost"], "make them with `pyorch ghosts`"),
    (["--cache-rate", "0.5", "--lever", "sacred=many"], 'sacred="many" is not a whole number'),
])
def test_mistakes_are_sentences(
    small_moe: Path, buddies_file: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    command = ["tune", str(small_moe), "--data", str(FACTS), "--buddies-file", str(buddies_file), *arguments]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1


def test_settings_that_need_files_are_tried_where_these_are(
    small_moe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["tune", str(small_moe), "--data", str(FACTS), "--limit", "8", "--cache-rate", "0.75", "--speed-tokens",
               "0", "--threads", "1", "-o", str(tmp_path / "tuned.json"), "--json"]
    for lever, kind in (("mode=none,miss=drop,order=weight,min_entropy=p50", "buddies"), ("coverage=1", "buddies"),
                        ("ghosts", "ghosts")):
        assert main([*command, "--lever", "heaviest", "--lever", lever]) == 2
        assert f"make them with `pyorch {kind}`" in capsys.readouterr().err
    assert main([*command, "--min-accuracy", "0.5"]) == 0
    trials = json.loads(capsys.readouterr().out)["trials"]
    tried = [Substitution.parse(trial["settings"]) for trial in trials]
    assert len(tried) == 14 and not any(setting.needs_buddies or setting.needs_ghosts for setting in tried)


@pytest.mark.parametrize("n, n_held_out, sentence", [
    (1, 4, "questions.jsonl: a single question cannot tell what a setting costs"),
    (4, 1, "others.jsonl: a single question cannot tell what a setting costs"),
    (4, 0, "others.jsonl"),
    (4, None, "others.jsonl is in --data too"),
])
def test_questions_that_tell_nothing_are_refused_before_the_search(
    small_moe: Path, buddies_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, n: int, n_held_out: int | None, sentence: str,
) -> None:
    monkeypatch.setattr(Search, "run", lambda self: pytest.fail("it searched"))
    lines = FACTS.read_text(encoding="utf-8").splitlines(True)
    data, held_out = tmp_path / "questions.jsonl", tmp_path / "others.jsonl"
    data.write_text("".join(lines[:n]))
    if n_held_out is None:
        held_out.symlink_to(data)
    else:
        held_out.write_text("".join(lines[10:10 + n_held_out]) or "{}")
    assert main([str(word) for word in (
        "tune", small_moe, "--data", data, "--held-out", held_out, "--buddies-file", buddies_file, "--cache-rate", 0.5,
        "--threads", 1)]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1


def test_without_a_right_answer_there_is_nothing_to_keep(
    small_moe: Path, buddies_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is all of nothing: every setting would do."""
    data, path = tmp_path / "questions.jsonl", tmp_path / "small.tuned.json"
    questions = [json.loads(line) for line in FACTS.read_text(encoding="utf-8").splitlines()[:3]]
    for question in questions:  # the model knows these
        labels = [choice["label"] for choice in question["question"]["choices"]]
        question["answerKey"] = next(label for label in labels if label != question["answerKey"])
    data.write_text("".join(json.dumps(question) + "\n" for question in questions))
    assert main([str(word) for word in (
        "tune", small_moe, "--data", data, "--buddies-file", buddies_file, "--cache-rate", 0.5, "--metric", "acc",
        "--threads", 1, "--lever", "mode=random", "--speed-tokens", 0, "-o", path)]) == 2
    assert "the lossless model answers none of 3 questions rightly" in capsys.readouterr().err
    assert not path.exists()


def test_the_median_of_the_rounds_counts() -> None:
    rounds = [Speed(8, seconds, 0, 0, 0, 0.0, 0, 0, 0) for seconds in (1.0, 9.0, 2.0, 4.0)]
    assert median(rounds[:3]) is rounds[2] and median(rounds) is rounds[3] and median(rounds[:1]) is rounds[0]


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
    with (
        ModelMap(small_moe) as model_map,
        pytest.raises(FormatError, match="was made for another model, small-moe-q4.gguf"),
    ):
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
