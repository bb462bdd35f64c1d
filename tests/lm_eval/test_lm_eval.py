"""lm-evaluation-harness with the model "pyorch": in processes of its own, because it may import torch."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from buddy_lists import complete_buddies
from docs_commands import ROOT, blocks
from models import CHECKPOINT
from processes import python

from pyorch import load
from pyorch.eval import arc, method
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.substitution import Substitution

pytest.importorskip("lm_eval.api", reason="lm-evaluation-harness is not installed: pip install '.[lm-eval]'")

FACTS = CHECKPOINT / "facts-test.jsonl"
N = 24

# The one that docs/how-to/evaluate.md shows. Of ARC's own task only where the fields lie differs.
TASK, = (block.text.replace(str(FACTS.relative_to(ROOT)), json.dumps(str(FACTS)))
         for block in blocks(ROOT / "docs/how-to/evaluate.md") if block.language == "yaml")


@pytest.fixture(scope="module")
def lists(small_moe: Path) -> Path:
    """Random lists of buddies, beside the model."""
    path = small_moe.with_name("small-moe.buddies.gguf")
    with ModelMap(small_moe) as model_map:
        complete_buddies().write(path, model_map)
    return path


def evaluate(directory: Path, model_args: str) -> tuple[dict, np.ndarray, np.ndarray]:
    """The results; of each question the choices' log-likelihoods, and whether acc and acc_norm count it."""
    (directory / "tasks").mkdir()
    (directory / "tasks/facts.yaml").write_text(TASK)
    done = python(
        "-m", "pyorch.lm_eval", "run", "--model", "pyorch", "--model_args", model_args, "--tasks", "facts",
        "--limit", N, "--include_path", directory / "tasks", "--output_path", directory / "out", "--log_samples",
        env={**os.environ, "HF_HOME": str(directory / "hf"), "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(next((directory / "out").rglob("results_*.json")).read_text())
    lines = next((directory / "out").rglob("samples_*.jsonl")).read_text().splitlines()
    samples = sorted((json.loads(line) for line in lines), key=lambda sample: sample["doc_id"])
    values = np.array([[float(choice[0][0]) for choice in sample["resps"]] for sample in samples])
    return results, values, np.array([(sample["acc"], sample["acc_norm"]) for sample in samples])


def judged(scores: list[arc.Score]) -> tuple[np.ndarray, np.ndarray]:
    right = [(score.choice == score.question.answer, score.choice_norm == score.question.answer) for score in scores]
    return np.array([score.log_likelihoods for score in scores]), np.array(right)


def test_accuracy_is_that_of_eval_arc_question_by_question(small_moe: Path, tmp_path: Path) -> None:
    results, values, right = evaluate(tmp_path, f"model={small_moe},budget=40%,threads=1")
    with load(small_moe, budget="40%", n_ctx=64, n_threads=1) as model:
        expected, expected_right = judged(arc.score(model, arc.read_task(model, FACTS, limit=N), n_threads=1))
    assert np.array_equal(values, expected) and np.array_equal(right, expected_right)
    assert results["results"]["facts"]["acc,none"] == expected_right[:, 0].mean() > 0.6
    assert 0 < results["config"]["expert_hit_rate"] < 1 and results["config"]["substituted_slots"] is None


def test_a_lossy_setting_is_judged_as_eval_arc_judges_it(small_moe: Path, lists: Path, tmp_path: Path) -> None:
    """Settings of lossy have commas, at which the harness cuts."""
    results, values, right = evaluate(
        tmp_path, f"model={small_moe},cache_rate=0.5,lossy=rho=3,tau=p15,alpha=1,threads=1")
    settings = method.lossy_method(Substitution.parse("rho=3,tau=p15,alpha=1"))
    buddies = method.read_buddies(small_moe, str(lists), needed=True)
    with (method.static_model(small_moe, n_threads=1) as model,
          method.simulated(model, settings, 0.5, buddies)):
        expected, expected_right = judged(arc.score(model, arc.read_task(model, FACTS, limit=N), n_threads=1))
    assert np.array_equal(values, expected) and np.array_equal(right, expected_right)
    assert results["config"]["substituted_slots"] > 0


def test_the_process_with_the_harness_loads_no_llama_cpp_and_the_other_no_torch(small_moe: Path) -> None:
    program = (
        "import sys, pathlib, torch, pyorch.lm_eval\n"
        "from lm_eval.api.registry import get_model\n"
        f"model = get_model('pyorch')(model={str(small_moe)!r}, budget='40%', threads=1)\n"
        "maps = pathlib.Path(f'/proc/{model._process._child.pid}/maps').read_text()\n"
        "print('libtorch' in maps, 'libllama' in maps, 'libllama' in pathlib.Path('/proc/self/maps').read_text())\n"
    )
    pytest.importorskip("torch")
    done = python("-c", program)
    assert done.stdout.split() == ["False", "True", "False"], done.stderr


def test_texts_are_generated_and_whole_texts_judged(small_moe: Path) -> None:
    program = f"""
import json, pyorch.lm_eval
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

def requests(kind, *arguments):
    return [Instance(kind, {{}}, one, i) for i, one in enumerate(arguments)]

results = []
for n in (1, 2):
    lm = get_model("pyorch")(model={str(small_moe)!r}, budget="40%", threads=1, max_length=64, batch_size=n)
    until = {{"until": ["\\n\\n"], "max_gen_toks": 12}}
    prompts = ("import os\\nimport", "def add(a, b):\\n")
    texts = lm.generate_until(requests("generate_until", *[(prompt, until) for prompt in prompts]))
    rolling = lm.loglikelihood_rolling(requests("loglikelihood_rolling", ("import os\\n" * 40,), ("x",)))
    pairs = lm.loglikelihood(requests("loglikelihood", ("import os\\nimport", texts[0]), ("", "import")))
    results.append((texts, rolling, pairs))
print(json.dumps(results))
"""
    done = python("-c", program)
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)
    texts, rolling, pairs = first
    assert all(texts) and len(rolling) == 2 and rolling[0] < rolling[1] < 0
    assert pairs[0][1], "what was generated greedily is the most probable continuation"
    assert pairs[1][0] < 0 and rolling == second[1]


@pytest.mark.parametrize("model_args, sentence", [
    ("budget=40%", "which model is missing"),
    ("model=nowhere.gguf", "nowhere.gguf: no such model"),
    ("model={model},max_replaced=3", "max_replaced is a setting of lossy: give lossy too"),
    ("model={model},buget=40%", '"buget" is no argument of the model pyorch: use model, cache_rate'),
    ("model={model},budget=1KiB", "budget 1 KiB is below the floor"),
    ("model={model},cache_rate=0.5", "cache_rate simulates a cache for settings that replace absent experts"),
    ("model={model},max_length=many", "max_length is many, and must be a whole number"),
])
def test_a_mistake_in_the_arguments_is_a_sentence(small_moe: Path, model_args: str, sentence: str) -> None:
    done = python("-c", "from pyorch.errors import PyorchError\n"
                  "import sys, pyorch.lm_eval\n"
                  "from lm_eval.api.registry import get_model\n"
                  "try:\n    get_model('pyorch').create_from_arg_string(sys.argv[1])\n"
                  "except PyorchError as error:\n    print(error)", model_args.format(model=small_moe))
    assert done.stdout.startswith(sentence), done.stdout + done.stderr
