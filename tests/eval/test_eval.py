"""Accuracy by log-likelihood, perplexity, and sweeps over lossy settings."""

from __future__ import annotations

import csv
import errno
import json
import math
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from buddy_lists import complete_buddies
from ghost_layers import random_ghosts
from models import CHECKPOINT
from shared import with_torch

from pyorch import load
from pyorch.cli import main
from pyorch.errors import FormatError, PyorchError
from pyorch.eval import arc, method, perplexity, report, sweep
from pyorch.eval.arc import Accuracy, Score
from pyorch.eval.judge import Judge
from pyorch.eval.likelihood import kl_divergences
from pyorch.eval.speed import Speed
from pyorch.llama.context import Context
from pyorch.llama.model import Model
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.budget import RESIDENT
from pyorch.settings.substitution import Substitution
from pyorch.traces.data import Document, Question

FACTS = CHECKPOINT / "facts-test.jsonl"
TEXT = CHECKPOINT / "text-test.txt"

# Of log-likelihoods, in nats. Sums are made in another order. That now and then decides for another sixth expert, or,
# where weights are BF16, rounds an activation to the other neighbour: of few, so nothing is asked of the largest.
USUAL_DIFFERENCE, LARGE_DIFFERENCE = 1e-5, 0.1


def assert_alike(actual: np.ndarray, expected: np.ndarray) -> None:
    """float[n_questions, n_choices] that were computed in batches of another shape, or by another program."""
    difference = np.abs(actual - expected)
    assert np.median(difference) < USUAL_DIFFERENCE and np.quantile(difference, 0.9) < LARGE_DIFFERENCE, difference


def assert_best(chosen: list[int], values: np.ndarray) -> None:
    """The choices are those of the highest values, but where two are so close that a difference may exchange them."""
    rows = np.arange(len(values))
    second, first = np.sort(values, axis=1)[:, -2:].T
    clear = first - second > LARGE_DIFFERENCE
    assert clear.sum() > len(values) / 2, "nothing is clear"
    assert (values[rows, chosen] == first)[clear].mean() > 0.9


@pytest.fixture(scope="module")
def whole(small_moe: Path):
    """The model with all experts in memory."""
    with load(small_moe, budget="100%", n_ctx=64, n_threads=1) as model:
        yield model


def write_questions(path: Path, n: int, **changes: object) -> Path:
    lines = [json.loads(line) for line in FACTS.read_text(encoding="utf-8").splitlines()[:n]]
    path.write_text("".join(json.dumps({**line, **changes}) + "\n" for line in lines), encoding="utf-8")
    return path


def log_likelihoods(scores: list[Score]) -> np.ndarray:
    return np.array([score.log_likelihoods for score in scores])


#
# questions
#


@pytest.mark.parametrize("n_shots, n", [(0, 24), (3, 10)])
def test_scores_agree_with_transformers_question_by_question(
    small_moe_f32: Path, tmp_path: Path, n_shots: int, n: int
) -> None:
    path = write_questions(tmp_path / "facts.jsonl", n + n_shots)
    answers = with_torch(Path(__file__).with_name("arc_process.py"), CHECKPOINT, path, n_shots)
    expected = np.array([json.loads(line) for line in answers.splitlines()])
    with load(small_moe_f32, budget="100%", n_ctx=64, n_threads=1) as model:
        task = arc.read_task(model, path, n_shots)
        scores = arc.score(model, task, n_threads=1)
    assert len(scores) == len(expected) == n
    assert_alike(log_likelihoods(scores), expected)
    assert_best([score.choice for score in scores], expected)
    lengths = np.array([[len(choice) for choice in score.question.choices] for score in scores])
    assert_best([score.choice_norm for score in scores], expected / lengths)


@pytest.mark.parametrize("n_shots, n", [(0, 16), (3, 6)])
def test_batched_scores_are_those_of_each_choice_by_itself(whole: Model, n_shots: int, n: int) -> None:
    task = arc.read_task(whole, FACTS, n_shots, limit=n)
    batched = arc.score(whole, task, n_threads=1)
    alone = arc.score(whole, task, together=False, n_threads=1)
    assert_alike(log_likelihoods(batched), log_likelihoods(alone))
    assert_best([score.choice for score in batched], log_likelihoods(alone))


def test_a_score_does_not_depend_on_the_question_before(whole: Model) -> None:
    task = arc.read_task(whole, FACTS, limit=12)
    scores = arc.score(whole, task, n_threads=1)
    backwards = arc.score(whole, arc.Task(task.path, task.questions[::-1], task.prompts[::-1]), n_threads=1)[::-1]
    assert_alike(log_likelihoods(backwards), log_likelihoods(scores))
    assert np.median(np.abs(log_likelihoods(scores)[1:] - log_likelihoods(scores)[:-1])) > LARGE_DIFFERENCE


def test_acc_norm_divides_by_the_characters_of_the_choice() -> None:
    question = Question("q", "?", ("no", "yes"), ("A", "B"), 1)
    score = Score(question, np.array([-2.0, -2.9]))
    assert score.choice == 0 and score.choice_norm == 1  # -1 and -0.97 a character; -0.67 and -0.72 with the space
    assert arc.accuracy([score]) == Accuracy("0", "1")


def test_the_prompt_is_that_of_the_harness(whole: Model, tmp_path: Path) -> None:
    path = write_questions(tmp_path / "facts.jsonl", 3)
    task = arc.read_task(whole, path, n_shots=2)
    first, second, third = (json.loads(line) for line in path.read_text().splitlines())
    answers = [next(c["text"] for c in entry["question"]["choices"] if c["label"] == entry["answerKey"])
               for entry in (first, second)]
    expected = (
        f"Question: {first['question']['stem']}\nAnswer: {answers[0]}\n\n"
        f"Question: {second['question']['stem']}\nAnswer: {answers[1]}\n\n"
        f"Question: {third['question']['stem']}\nAnswer:"
    )
    assert [question.id for question in task.questions] == [third["id"]]
    detokenize = whole.llama.detokenize
    assert detokenize(list(task.prompts[0].context)).decode() == expected
    choices = [choice["text"] for choice in third["question"]["choices"]]
    assert [detokenize(list(continuation)).decode() for continuation in task.prompts[0].continuations] == [
        f" {choice}" for choice in choices
    ]


def test_examples_of_another_file_leave_all_questions(whole: Model, tmp_path: Path) -> None:
    path = write_questions(tmp_path / "facts.jsonl", 5)
    task = arc.read_task(whole, path, n_shots=2, shots_path=CHECKPOINT / "facts-train.jsonl")
    assert len(task.questions) == 5


def test_digits_as_labels_and_three_to_five_choices(whole: Model, tmp_path: Path) -> None:
    def scores_with(labels: str) -> list[Score]:
        lines = [json.loads(line) for line in FACTS.read_text(encoding="utf-8").splitlines()[:3]]
        for n, one_line in zip((3, 4, 5), lines):
            choices = [*one_line["question"]["choices"], {"text": "something else", "label": "E"}][:n]
            one_line["answerKey"] = labels["ABCDE".index(one_line["answerKey"]) if n > 3 else 0]
            one_line["question"]["choices"] = [{**choice, "label": label} for choice, label in zip(choices, labels)]
        path = tmp_path / f"{labels}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return arc.score(whole, arc.read_task(whole, path), n_threads=1)

    digits, letters = scores_with("12345"), scores_with("ABCDE")
    assert [len(score.log_likelihoods) for score in digits] == [3, 4, 5]
    for digit, letter in zip(digits, letters):
        assert digit.question.answer == letter.question.answer
        assert np.array_equal(digit.log_likelihoods, letter.log_likelihoods)


def test_a_question_longer_than_the_context_is_named(whole: Model, tmp_path: Path) -> None:
    question = json.loads(FACTS.read_text(encoding="utf-8").splitlines()[0])
    question["question"]["stem"] = "word " * 5000
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps(question) + "\n")
    with pytest.raises(PyorchError, match=r"long.jsonl: question facts_test_0000 .* has \d+ tokens, the model was"):
        arc.read_task(whole, path)


def test_a_failed_batch_leaves_the_prefix_of_all_questions(small_moe: Path) -> None:
    """Context's sequences are as before, so the same questions can be asked again."""
    with load(small_moe, budget="100%", n_ctx=64, n_threads=1) as model:
        with Context(model.llama.model, 64, 64, n_seq_max=4, n_threads=1, shared=True) as context:
            context.decode([5, 6, 7], outputs=())
            first = []
            for _ in range(2):
                for sequence in (1, 2):
                    context.copy(0, sequence)
                first.append(context.decode([8, 9, 10], [(1, 2), 1, 2], outputs=(0, 2)))
                for sequence in (1, 2):
                    context.remove(sequence)
            assert first[0].shape == (2, model.llama.n_vocab()) and np.array_equal(*first)


#
# sweeps
#


def run_sweep(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict]:
    assert main(["eval", "arc", *map(str, arguments), "--json", "--threads", "1"]) == 0
    return json.loads(capsys.readouterr().out)


def test_original_alone(small_moe: Path, whole: Model, capsys: pytest.CaptureFixture[str]) -> None:
    row, = run_sweep(capsys, small_moe, "--data", FACTS, "--limit", 20, "--budget", "50%")
    scores = arc.accuracy(arc.score(whole, arc.read_task(whole, FACTS, limit=20), n_threads=1))
    assert (row["facts-test acc"], row["facts-test acc_norm"]) == (scores.acc, scores.acc_norm)
    assert row["facts-test questions"] == 20
    assert row["method"] == "original" and row["cache_rate"] is None and row["tokens_per_second"] is None
    assert row["facts-test acc"] > 0.6, "the model knows its facts"


def test_with_every_expert_in_the_cache_nothing_changes(whole: Model) -> None:
    task = arc.read_task(whole, FACTS, limit=10)
    with method.simulated(whole, method.ORIGINAL, 1.0, None):
        original = arc.score(whole, task, n_threads=1)
    with method.simulated(whole, method.lossy_method(Substitution(mode="random")), 1.0, complete_buddies()):
        lossy = arc.score(whole, task, n_threads=1)
        assert method.slots(whole).absent == 0
    assert np.array_equal(log_likelihoods(original), log_likelihoods(lossy))


def test_what_was_selected_most_is_most_active() -> None:
    activations = {3: np.random.default_rng(0).integers(0, 20, 64)}
    mask = method.most_active(activations, 0.375)[3]
    assert mask.sum() == 24 and activations[3][mask].min() >= activations[3][~mask].max()
    assert not method.most_active(activations, 0)[3].any() and method.most_active(activations, 1)[3].all()


def test_a_share_that_is_no_whole_number_of_a_layers_experts_is_kept_over_all_layers() -> None:
    activations = {il: np.arange(16)[::-1] for il in range(6)}
    masks = method.most_active(activations, 0.47)
    assert [int(mask.sum()) for mask in masks.values()] == [8, 7, 8, 7, 8, 7]
    assert all(not mask[int(mask.sum()):].any() for mask in masks.values())


def test_residents_give_way_to_ghosts(small_moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(shutil.copy(small_moe, tmp_path))
    with ModelMap(path) as model_map:
        random_ghosts(1).write(path.with_suffix(".ghosts.gguf"), model_map)
    kept: list[int] = []
    with load(path, budget="100%", n_ctx=64, n_threads=1) as model:
        set_cache = type(model).set_cache

        def counting(model: Model, masks) -> None:
            kept.extend([] if masks is None else [sum(int(mask.sum()) for mask in masks.values())])
            set_cache(model, masks)

        monkeypatch.setattr(type(model), "set_cache", counting)
        for settings in ("heaviest", "ghosts"):
            with method.simulated(model, method.lossy_method(Substitution.parse(settings)), 0.5, complete_buddies()):
                pass
        ghosts = method.lossy_method(Substitution.parse("ghosts"))
        with (pytest.raises(PyorchError, match="a cache rate of 0.01 has no room for the ghosts, which take"),
              method.simulated(model, ghosts, 0.01, complete_buddies())):
            pass
        expert_bytes = model.map.info.slots_bytes / (8 * 64)
    given = random_ghosts(1).n_bytes / expert_bytes
    assert given > 5
    assert kept == [256, pytest.approx(256 - given, abs=1)]


def test_without_lists_the_default_text_says_what_is_resident(whole: Model) -> None:
    seen = {il: np.zeros(64, np.int64) for il in whole.layers}

    def count(routing) -> None:
        seen[routing.il] += np.bincount(routing.experts.ravel(), minlength=64)

    heaviest, task = method.lossy_method(Substitution.parse("heaviest")), arc.read_task(whole, FACTS, limit=4)
    whole.engine.set_observer(count)
    counted = method._counted(whole, lambda *_: None)
    whole.engine.set_observer(None)
    assert all(np.array_equal(counted[il], counts) and counts.sum() == 4096 * 6 for il, counts in seen.items())
    before = whole.engine.activations(0)
    with method.simulated(whole, heaviest, 0.5, None):
        found = arc.score(whole, task, n_threads=1)
        absent = method.slots(whole).absent
    assert absent > 0 and (whole.engine.activations(0) - before).sum() < 4096 * 6, "it is counted once"
    lists = complete_buddies()
    for il, layer in lists.layers.items():
        layer.activations[:] = counted[il]
    with method.simulated(whole, heaviest, 0.5, lists):
        assert np.array_equal(log_likelihoods(arc.score(whole, task, n_threads=1)), log_likelihoods(found))
        assert method.slots(whole).absent == absent


def test_a_text_is_judged_alike_whatever_was_asked_before(whole: Model) -> None:
    """What is heavy is measured by the tokens that come: the text has a mean weight of its own."""
    heaviest, task = method.lossy_method(Substitution.parse("heaviest")), arc.read_task(whole, FACTS, limit=8)
    found = []
    for tasks in ([], [task]):
        with Judge(whole, tasks, [str(TEXT)], 600, 1) as judge:
            judged = judge.judge(heaviest, 0.375, complete_buddies())
            found.append((judged.divergence.blocks, judged.text_slots))
    assert found[0] == found[1] and found[0][1].dropped > 0


def test_a_simulated_cache_is_the_most_active_experts(whole: Model) -> None:
    buddies = complete_buddies()
    masks, absent = method.most_active(buddies.activations, 0.25), 0

    def count(routing) -> None:
        nonlocal absent
        absent += int((~masks[routing.il][routing.experts]).sum())

    task = arc.read_task(whole, FACTS, limit=10)
    settings = method.lossy_method(Substitution.parse("mode=random"))
    with method.simulated(whole, settings, 0.25, buddies):
        whole.engine.set_observer(count)
        arc.score(whole, task, n_threads=1)
        whole.engine.set_observer(None)
        counts = method.slots(whole)
    # Random replacement finds a resident for everything: absent slots are those that were replaced.
    assert 0 < absent == counts.absent == counts.substituted and counts.read_per_token == 0
    # About three quarters of the slots are absent with a quarter of the experts, whichever they are.
    assert 0.5 < counts.absent / (counts.n_tokens * 8 * 6) < 0.95
    # llama.cpp leaves out of the last layer the tokens after which no logits are wanted.
    assert 7 / 8 < counts.n_tokens / sum(prompt.n_tokens for prompt in task.prompts) < 1
    after = arc.score(whole, task, n_threads=1)
    assert whole.stats().substitution is None and arc.accuracy(after).acc > 0.4, "lossless again"


def test_a_cache_that_is_too_small_to_decode_with_is_refused_before_anything_is_asked(
    small_moe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "judge", lambda *_: pytest.fail("questions were asked"))
    assert main(["eval", "arc", str(small_moe), "--data", str(FACTS), "--cache-rate", "0.5,0.01", "--lossy",
                 "heaviest", "--speed-tokens", "8"]) == 2
    least = capsys.readouterr().err.split("use ")[1].split()[0]
    monkeypatch.setattr(sweep, "judge", lambda *_: None)
    monkeypatch.setattr(sweep, "measure_speeds", lambda *_: None)
    monkeypatch.setattr(sweep, "rows", lambda *_: [])
    plan = sweep.Plan(model=str(small_moe), data=(str(FACTS),), rates=(float(least),), speed_tokens=8)
    assert sweep.run(plan, sweep.Record(None, {}), lambda *_: None) == []


@pytest.mark.parametrize("settings", [
    "mode=none,miss=drop,sacred=2,max_replaced=1", "mode=random,min_entropy=0.9", "mode=random,max_lead=0.1",
    "mode=cache,bonus=1,sacred=1",
])
def test_every_absent_slot_is_counted_whichever_gate_refused_it(whole: Model, settings: str) -> None:
    buddies = complete_buddies()
    masks, absent = method.most_active(buddies.activations, 0.5), 0

    def count(routing) -> None:
        nonlocal absent
        absent += int((~masks[routing.il][routing.experts]).sum())

    task = arc.read_task(whole, FACTS, limit=2)
    with method.simulated(whole, method.lossy_method(Substitution.parse(settings)), 0.5, buddies):
        whole.engine.set_observer(count)
        arc.score(whole, task, n_threads=1)
        whole.engine.set_observer(None)
        counts = method.slots(whole)
    assert counts.absent == absent > 0 and 0 < counts.read_per_token < counts.per_token("absent")


def test_a_sweep_is_reproducible_and_counts_what_it_did(
    small_moe: Path, buddies_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (
        small_moe, "--data", FACTS, "--limit", 10, "--cache-rate", "0.75,0.375", "--lossy", "alpha=0.9,rho=2",
        "--lossy", "mode=random,rho=2", "--lossy", "mode=none,rho=2,miss=drop", "--buddies-file", buddies_file,
        "--speed-tokens", 0,
    )
    rows = run_sweep(capsys, *arguments)
    assert rows == run_sweep(capsys, *arguments)
    assert [(row["cache_rate"], row["method"], row["settings"]) for row in rows] == [
        (rate, name, settings) for rate in (0.75, 0.375) for name, settings in (
            ("original", ""), ("buddies", "coverage=0.9,max_replaced=2"), ("random", "mode=random,max_replaced=2"),
            ("drop", "mode=none,max_replaced=2,miss=drop"))
    ]
    assert rows[0]["kept acc"] == 1 and rows[0]["facts-test acc"] == rows[4]["facts-test acc"]
    changed = [row["judged_substituted_per_token"] + row["judged_dropped_per_token"] for row in rows]
    assert changed[0] == changed[4] == 0 and all(few < many for few, many in zip(changed[1:4], changed[5:]))
    assert all(0 < count <= 2 * 8 for count in changed[1:4] + changed[5:]), "at most rho in each of 8 layers"


def test_divergence_stands_beside_accuracy(
    small_moe: Path, buddies_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (
        small_moe, "--data", FACTS, "--limit", 4, "--cache-rate", "0.5", "--lossy", "alpha=1,rho=2", "--lossy",
        "mode=none,rho=2,miss=drop", "--lossy", "mode=none,miss=drop", "--buddies-file", buddies_file,
        "--speed-tokens", 0,
        "--text", TEXT, "--text-tokens", 200, "--resume", tmp_path / "sweep.json")
    rows = run_sweep(capsys, *arguments)
    original, lossy, gated, dropping = rows
    assert [row["settings"] for row in (gated, dropping)] == [
        "mode=none,max_replaced=2,miss=drop",
        "mode=none,miss=drop",
    ]
    assert original["kl_divergence"] == 0 < lossy["kl_divergence"]
    assert gated["kl_divergence"] < dropping["kl_divergence"]
    alone = run_perplexity(capsys, small_moe, "--cache-rate", 0.5, "--lossy", "alpha=1,rho=2", "--buddies-file",
                           buddies_file, "--tokens", 200)
    assert lossy["kl_divergence"] == pytest.approx(alone["kl_divergence"], rel=0.02)
    assert run_sweep(capsys, *arguments) == rows, "from the record"


def test_a_divergence_is_that_from_the_reference_and_not_the_other_way_round() -> None:
    even, sure = np.log([[0.5, 0.5]]), np.log([[0.9, 0.1]])
    expected = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    assert kl_divergences(even, sure) == pytest.approx([expected])
    assert kl_divergences(sure, even) == pytest.approx([math.log(2) + 0.9 * math.log(0.9) + 0.1 * math.log(0.1)])


def test_errors_of_averages_over_files_are_those_of_independent_means() -> None:
    one = [Accuracy("1110", "1110"), Accuracy("10", "10")]
    other = [Accuracy("0110", "0110"), Accuracy("01", "01")]
    found = arc.difference(one, other, "acc")  # 1, 0, 0, 0 in the first file and 1, -1 in the second
    assert found == arc.Difference(pytest.approx((0.25 + 0) / 2), pytest.approx(math.sqrt(0.25 / 4 + 2 / 2) / 2))


def test_errors_of_divergences_are_those_of_blocks() -> None:
    one = perplexity.Divergence(96, 2.0, (1.0, 2.0, 3.0))
    assert one.stderr == pytest.approx(1 / math.sqrt(3))
    assert math.isnan(perplexity.Divergence(9, 1.0, (1.0,)).stderr)


def test_a_full_disk_is_named_before_predictions_are_made(whole: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    texts = perplexity.windows(whole, [Document(TEXT.read_text(encoding="utf-8")[:500], "text")])
    with pytest.raises(PyorchError, match=r"no room in .* for the predictions of \d+ tokens, .*: No space left"):
        perplexity.Reference(whole, texts)


def test_every_token_that_a_real_cache_is_judged_by_may_lose_experts(small_moe: Path) -> None:
    """As if it had been decoded: those of questions too, which all their choices share."""
    random = method.lossy_method(Substitution(mode="random"))
    with method.dynamic_model(small_moe, random, "25%", None, n_threads=1) as model:
        arc.score(model, arc.read_task(model, FACTS, limit=2), 1, n_threads=1)
        stats = model.stats()
    assert stats.substitution.tokens == stats.experts.tokens > 20 * 8


def test_speed_is_of_the_real_budget(small_moe: Path, buddies_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = run_sweep(
        capsys, small_moe, "--data", FACTS, "--limit", 4, "--cache-rate", "1,0.25", "--lossy", "alpha=1",
        "--buddies-file", buddies_file, "--speed-tokens", 16, "--speed-rounds", 1,
    )
    whole, _, original, lossy = rows
    assert all(row["tokens_per_second"] > 0 for row in rows) and whole["speedup"] == original["speedup"] == 1
    assert whole["bytes_read_per_token"] == 0 < lossy["bytes_read_per_token"] < original["bytes_read_per_token"]
    assert original["decoded_substituted_per_token"] == 0 < lossy["decoded_substituted_per_token"]


def test_speeds_are_medians_of_rounds_there_and_back(
    small_moe: Path, buddies_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []
    seconds = iter((1.0, 1.0, 1.0, 4.0, 2.0, 8.0))

    def measured(path: str, one_method: method.Method, *rest: object, **options: object) -> Speed:
        asked.append(one_method.name)
        return Speed(8, next(seconds), 0, 0, 0, 0.0, 0, 0, 0)

    monkeypatch.setattr(sweep, "measure_speed", measured)
    original, lossy = run_sweep(
        capsys, small_moe, "--data", FACTS, "--limit", 2, "--cache-rate", 0.5, "--lossy", "mode=random",
        "--buddies-file", buddies_file, "--speed-tokens", 8)
    assert asked == ["original", "random", "random", "original", "original", "random"]
    assert (original["tokens_per_second"], lossy["tokens_per_second"], lossy["speedup"]) == (4, 8, 2)


def test_settings_that_look_at_the_micro_batch_are_judged_token_by_token(
    whole: Model, small_moe: Path, buddies_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of the experts of a batch are absent, but not of a token of its own."""
    one_method = method.lossy_method(Substitution.parse("mode=random,beta=0.3"))
    task = arc.read_task(whole, FACTS, limit=3)
    substituted = []
    for n_ubatch in (arc.N_BATCH, 1):
        with method.simulated(whole, one_method, 0.5, complete_buddies()):
            arc.score(whole, task, n_ubatch, n_threads=1)
            substituted.append(method.slots(whole).substituted)
    assert substituted[0] == 0 < substituted[1]
    row = run_sweep(
        capsys,
        small_moe,
        "--data",
        FACTS,
        "--limit",
        3,
        "--cache-rate",
        0.5,
        "--lossy",
        one_method.settings,
        "--buddies-file",
        buddies_file,
        "--speed-tokens",
        0,
    )[1]
    assert row["judged_substituted_per_token"] > 0
    for settings, width in (("rho=2,tau=p15", arc.N_BATCH), ("beta=0.5", 1), ("rho_token=9", 1)):
        assert method.n_ubatch(Substitution.parse(settings)) == width


def sweep_arguments(small_moe: Path, buddies_file: Path, record: Path) -> list[str]:
    return [str(word) for word in (
        "eval", "arc", small_moe, "--data", FACTS, "--limit", 8, "--cache-rate", "0.5", "--lossy", "rho=1",
        "--lossy", "rho=2", "--lossy", "mode=random,rho=1", "--lossy", "mode=random,rho=2", "--buddies-file",
        buddies_file, "--speed-tokens", 0, "--threads", 1, "--resume", record)]


def test_an_interrupted_sweep_goes_on_where_it_ended(
    small_moe: Path, buddies_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = sweep_arguments(small_moe, buddies_file, tmp_path / "sweep.json")
    score, n_calls = arc.score, 0

    def counted(*args, **options):
        nonlocal n_calls
        n_calls += 1
        if n_calls == 3:
            raise KeyboardInterrupt
        return score(*args, **options)

    monkeypatch.setattr(arc, "score", counted)
    assert main(arguments) == 130
    assert main(arguments) == 0 and n_calls == 3 + 3  # of five rows two were finished
    table = capsys.readouterr().out
    assert main(arguments) == 0 and n_calls == 6
    assert capsys.readouterr().out == table and table.count("buddies") == 2 and table.count("mode=random") == 2


def test_a_record_of_other_conditions_is_refused(
    small_moe: Path, buddies_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "sweep.json"
    model, ghosts = tmp_path / "model.gguf", tmp_path / "model.ghosts.gguf"
    os.link(small_moe, model)
    arguments = [*sweep_arguments(model, buddies_file, record), "--text", str(TEXT), "--text-tokens", "64"]
    assert main(arguments) == 0
    limit = arguments.index("--limit") + 1
    assert main([*arguments[:limit], "9", *arguments[limit + 1 :]]) == 2
    assert f"{record} was made with another --limit" in capsys.readouterr().err
    ghosts.write_bytes(b"of another fit")
    assert main(arguments) == 2
    assert f"{record} was made with another ghosts file" in capsys.readouterr().err
    ghosts.unlink()
    sound = record.read_text(encoding="utf-8")

    def changed(change) -> str:
        value = json.loads(sound)
        for judged in value["judgements"].values():
            change(judged)
        return json.dumps(value)

    damages = [lambda judged: judged.update(accuracies=[]), lambda judged: judged["accuracies"][0].update(right="1"),
               lambda judged: judged["accuracies"][0].update(right=7), lambda judged: judged["slots"].update(absent=""),
               lambda judged: judged["slots"].update(absent=-1), lambda judged: judged.pop("text_slots"),
               lambda judged: judged.update(divergence=None), lambda judged: judged["divergence"].update(blocks=[]),
               lambda judged: judged["divergence"].update(mean=float("nan"))]
    for text in ("[]", "[" * 100_000, '{"version": 1, "conditions": 5}', *map(changed, damages)):
        record.write_text(text)
        assert main(arguments) == 2
        assert "is no record of a sweep" in capsys.readouterr().err
    speed = dict.fromkeys(Speed.__dataclass_fields__, 1)
    for field, value in (("seconds", "x"), ("seconds", 0), ("hits", float("nan")), ("hits", -1)):
        record.write_text(json.dumps(json.loads(sound) | {"speeds": {"0.5": [speed | {field: value}]}}))
        assert main(arguments) == 2
        assert "is no record of a sweep" in capsys.readouterr().err
    record.write_text(sound)
    assert main(arguments) == 0
    assert main([*arguments, "--csv", str(record)]) == 2
    assert "a file that is read" in capsys.readouterr().err and record.read_text(encoding="utf-8") == sound


def test_csv_and_plot(small_moe: Path, buddies_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    table, picture = tmp_path / "sweep.csv", tmp_path / "sweep.png"
    rows = run_sweep(
        capsys, small_moe, "--data", FACTS, "--data", CHECKPOINT / "facts-train.jsonl", "--limit", 4,
        "--cache-rate", "0.5", "--lossy", "rho=2", "--buddies-file", buddies_file, "--speed-tokens", 8,
        "--csv", table, "--plot", picture,
    )
    with table.open() as file:
        read = list(csv.DictReader(file))
    assert [row["method"] for row in read] == ["original", "buddies"] and read[1]["settings"] == "max_replaced=2"
    assert float(read[1]["average acc"]) == rows[1]["average acc"]
    assert rows[1]["average acc"] == (rows[1]["facts-test acc"] + rows[1]["facts-train acc"]) / 2
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_table_has_a_line_for_each_row_and_leaves_out_what_was_not_measured(
    small_moe: Path, buddies_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(word) for word in (
        "eval", "arc", small_moe, "--data", FACTS, "--limit", 4, "--cache-rate", "0.5",
        "--lossy", "mode=none,miss=drop", "--buddies-file", buddies_file, "--speed-tokens", 0, "--threads", 1)]) == 0
    printed = capsys.readouterr()
    header, original, dropping = printed.out.splitlines()
    assert header.split() == ["cache", "method", "settings", "facts-test", "kept", "differs", "changed", "slots/token"]
    assert original.split()[:2] == ["0.5", "original"]
    assert original.split()[-4:] == ["100.0%", "+0.000", "±0.000", "0.00"]
    assert dropping.split()[1:3] == ["drop", "mode=none,miss=drop"] and float(dropping.split()[-1]) > 1
    assert "acc_norm of 4 questions" in printed.err


def test_the_table_names_arc_as_the_paper_does() -> None:
    assert report.names(["a/ARC-Easy-Dev.jsonl", "a/ARC-Challenge-Dev.jsonl"]) == ["ARC-E", "ARC-C"]
    assert report.names(["a/ARC-Easy-Dev.jsonl", "a/ARC-Easy-Test.jsonl"]) == ["ARC-Easy-Dev", "ARC-Easy-Test"]
    assert report.names(["a/x.jsonl", "b/x.jsonl"]) == ["a/x.jsonl", "b/x.jsonl"]


#
# perplexity
#


def test_perplexity_is_that_of_numpy(whole: Model) -> None:
    text = TEXT.read_text(encoding="utf-8")[:2000]
    tokens = whole.llama.tokenize(text.encode(), add_bos=False)
    n_window, total, n = 100, 0.0, 0
    with Context(whole.llama.model, n_threads=1, exact=True) as context:
        for begin in range(0, len(tokens) - 1, n_window):
            context.clear()
            rows = context.decode(tokens[begin : begin + n_window]).astype(np.float64)
            for row, token in zip(rows, tokens[begin + 1 : begin + 1 + n_window]):
                total -= math.log(np.exp(row)[token] / np.exp(row).sum())
                n += 1
    result = perplexity.measure(whole, perplexity.windows(whole, [Document(text, "text")], n_window), n_threads=1)
    assert result.n_tokens == n == len(tokens) - 1
    assert result.perplexity == pytest.approx(math.exp(total / n), rel=1e-6)
    assert 10 < result.perplexity < 60, "the model knows Python"


def test_windows_predict_each_token_once(whole: Model) -> None:
    document = Document(TEXT.read_text(encoding="utf-8")[:1500], "text")
    tokens = tuple(whole.llama.tokenize(document.text.encode(), add_bos=False))
    for n_window in (1, 7, 64, 10_000):
        texts = perplexity.windows(whole, [document], n_window)
        assert sum((text.targets for text in texts), ()) == tokens[1:]
        assert sum((text.inputs for text in texts), ()) == tokens[:-1]
    limited = perplexity.windows(whole, [document, document], 64, n_tokens=100)
    assert [len(window.targets) for window in limited] == [64, 36]


def run_perplexity(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    assert main(["eval", "perplexity", *map(str, arguments), "--data", str(TEXT), "--json", "--threads", "1"]) == 0
    return json.loads(capsys.readouterr().out)


def test_lossless_under_a_budget_diverges_by_nothing(small_moe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run_perplexity(capsys, small_moe, "--budget", "25%", "--compare", small_moe, "--tokens", 300)
    assert report["kl_divergence"] == 0 and report["top1_agreement"] == 1
    assert report["perplexity"] == report["reference_perplexity"] and report["substitution"] is None


def test_divergence_grows_as_the_cache_shrinks(
    small_moe: Path, buddies_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lossy = [
        run_perplexity(capsys, small_moe, "--cache-rate", rate, "--lossy", "alpha=1", "--buddies-file", buddies_file,
                       "--tokens", 150)
        for rate in (1, 0.75, 0.25)
    ]
    assert lossy[0]["kl_divergence"] == 0 < lossy[1]["kl_divergence"] < lossy[2]["kl_divergence"]
    assert lossy[2]["top1_agreement"] < 1 and lossy[2]["perplexity"] > lossy[2]["reference_perplexity"]
    assert lossy[2]["substitution"]["substituted"] > lossy[1]["substitution"]["substituted"] > 0


def test_a_gate_that_lets_nothing_pass_is_lossless_token_by_token(
    small_moe: Path, buddies_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run_perplexity(
        capsys, small_moe, "--cache-rate", 0.5, "--lossy", "beta=0.01", "--buddies-file", buddies_file, "--tokens", 60
    )
    assert report["kl_divergence"] == 0 and report["substitution"]["refused_distribution"] > 0


#
# mistakes
#


def test_malformed_questions_name_the_line(small_moe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_questions(tmp_path / "facts.jsonl", 3)
    with path.open("a") as file:
        file.write('{"id": "x", "question": {"stem": "?"}, "answerKey": "A"}\n')
    assert main(["eval", "arc", str(small_moe), "--data", str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and f"{path}:4: " in printed.err and printed.err.count("\n") == 1


@pytest.mark.parametrize("arguments, sentence", [
    (["--cache-rate", "1.5"], '--cache-rate: "1.5" is not a share'),
    (["--lossy", "rho=3"], "give --cache-rate"),
    (["--cache-rate", "0.5", "--lossy", "max_replaced=x"], 'max_replaced="x" is not a whole number'),
    (["--cache-rate", "0.5", "--budget", "50%"], "give one of them"),
    (["--limit", "0"], '--limit: "0" is not a whole number of 1 or more'),
    (["--shots", "400"], "no question is left"),
    (["--shots", "401"], "has 400 questions, 401 examples"),
    (["--cache-rate", "0.5", "--lossy", "rho=3", "--speed-tokens", "0"], "make them with `pyorch buddies`"),
    (["--cache-rate", "0.5", "--plot", "x.png", "--speed-tokens", "0"], "needs --speed-tokens"),
])
def test_mistakes_are_sentences(
    small_moe: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert main(["eval", "arc", str(small_moe), "--data", str(FACTS), *arguments]) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err and printed.err.count("\n") == 1 and printed.out == ""


def test_a_model_that_does_not_fit_is_judged_alike(whole: Model, small_moe: Path, monkeypatch) -> None:
    from pyorch.llama import memory, warm

    task, one_method = (
        arc.read_task(whole, FACTS, limit=3),
        method.lossy_method(Substitution.parse("mode=none,miss=drop")),
    )
    with method.simulated(whole, one_method, 0.5, complete_buddies()):
        expected = arc.score(whole, task, n_threads=1)
    # Contexts are larger than what this model's experts take: it has room for them, and for some of the experts.
    limits = iter([memory.MemoryLimit("cgroup /job", 128 << 20, 101 << 20)])
    rest = memory.MemoryLimit("cgroup /job", 128 << 20, 117 << 20)
    monkeypatch.setattr(memory, "memory_limit", lambda: next(limits, rest))
    monkeypatch.setattr(warm, "begin", lambda *_: None)  # what experts take is not in these limits
    with (
        method.static_model(small_moe, n_threads=1) as model,
        method.simulated(model, one_method, 0.5, complete_buddies()),
    ):
        assert log_likelihoods(arc.score(model, task, n_threads=1)).tobytes() == log_likelihoods(expected).tobytes()
        assert model.stats().experts.budget_bytes < model.map.info.slots_bytes


def test_another_vocabulary_cannot_be_compared(whole: Model, dense_model: Path) -> None:
    with load(dense_model, budget=RESIDENT, n_ctx=64) as other:
        texts = perplexity.windows(whole, [Document("import os", "text")])
        with pytest.raises(PyorchError, match="vocabulary"):
            perplexity.measure(whole, texts, other)


def test_a_text_of_one_token_has_nothing_to_predict(whole: Model) -> None:
    with pytest.raises(PyorchError, match="too short"):
        perplexity.windows(whole, [Document("a", "text")])


def test_a_sweep_reads_its_own_plan(small_moe: Path, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="cannot be read"):
        sweep.conditions(sweep.Plan(model=str(small_moe), data=(str(tmp_path / "absent.jsonl"),)))
