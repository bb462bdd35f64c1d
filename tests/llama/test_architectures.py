"""Lossless, for every architecture: the logits are those of the same model, fully resident, bit for bit."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import batches
import llama_cpp.llama_cpp as llama
import numpy as np
import pytest
from architectures import NAMES, Zoo, logits_by_transformers, types_of
from batches import tokens
from ggufs import as_grovemoe, split

import pyorch
from pyorch.advise import machine
from pyorch.llama import logs, measure, originals
from pyorch.llama.context import Context
from pyorch.sizes import MiB

# Each layout of experts: apart, with biases, in one matrix, beside a shared one, weighted before.
LAYOUTS = ("mixtral", "gpt-oss", "qwen3-next-fused", "deepseek-v3", "llama4")


def types_to_run(name: str) -> list[str]:
    """Each layout with each type. An architecture whose experts lie as those of another one: as it was converted, and
    with two types more, other ones than its neighbours. Not Q4_K: to quantize to it takes longer than all else here.
    """
    types = list(types_of(name))
    if name in LAYOUTS or len(types) == 1:
        return types
    narrow = [one_type for one_type in types[1:] if one_type != "Q4_K"]
    first = 2 * NAMES.index(name)
    return [types[0], *(narrow[(first + i) % len(narrow)] for i in range(2))]


# Where an expert lies is the budget's matter, what is computed with it the type's: each model is run at the budget
# that moves most, and each architecture and each type at the other budgets.


CASES = [
    (name, type_name, budget)
    for i, name in enumerate(NAMES) for j, type_name in enumerate(types_to_run(name))
    for k, budget in enumerate(("floor", "30%", "100%"))
    if budget == "floor" or j == (i + k) % len(types_to_run(name))
]


@pytest.fixture(scope="module")
def stock():
    """Asks a process that has llama.cpp and nothing of pyorch for the digests of a file. One process for each
    kernels."""
    program = Path(batches.__file__).with_name("stock_process.py")
    processes: dict[str, subprocess.Popen] = {}
    with contextlib.ExitStack() as stack:
        def ask(path: Path, kernels: str) -> dict[str, str]:
            if kernels not in processes:
                argv = [sys.executable, str(program), os.environ["LLAMA_CPP_LIB_PATH"], kernels]
                processes[kernels] = stack.enter_context(
                    subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            process = processes[kernels]
            print(path, file=process.stdin, flush=True)
            return json.loads(process.stdout.readline())
        yield ask
        for process in processes.values():
            process.stdin.close()


def load(path: Path, budget: int | str, **arguments: object) -> pyorch.Model:
    if budget == "floor":
        with pyorch.ModelMap(path) as model_map:
            budget = model_map.info.floor_bytes
    return pyorch.load(path, budget=budget, n_ctx=64, n_batch=64, n_ubatch=batches.N_UBATCH, **arguments)


def digests(model: pyorch.Model, n_threads: int = 1) -> dict[str, str]:
    """One thread, unless they are what is tested: hundreds of tests pass sooner on a machine that is busy."""
    with Context(model.llama.model, n_threads=n_threads, **batches.CONTEXT) as context:
        return batches.digests(context.decode, context.clear)


@lru_cache(maxsize=1)
def resident(path: Path) -> dict[str, str]:
    """As llama.cpp loads it, with nothing that manages its experts."""
    with load(path, "resident") as model:
        return digests(model)


@pytest.mark.parametrize("name, type_name, budget", CASES)
def test_logits_are_bit_identical_at_any_budget(zoo, name, type_name, budget):
    path = zoo.path(name, type_name)
    with load(path, budget) as model:
        result = digests(model)
        stats = model.engine.stats()
    assert result == resident(path)
    assert stats.peak_bytes <= stats.budget_bytes
    assert stats.loads > 0
    if budget == "floor":
        assert stats.evictions > 0


@pytest.mark.parametrize(("kernels", "name"), [
    *(("repacked", name) for name in NAMES), *(("plain", name) for name in LAYOUTS),
])
def test_logits_are_those_of_stock_llama_cpp(zoo, stock, kernels, name):
    path = zoo.path(name, "MXFP4" if types_of(name) == ("MXFP4",) else "Q4_0")
    with load(path, "floor", use_extra_bufts=kernels == "repacked") as model:
        assert digests(model, n_threads=2) == stock(path, kernels)


def test_plain_and_repacked_kernels_are_not_the_same(zoo):
    """Else nothing above tells them apart. On a processor that has only plain ones they are."""
    path = zoo.path("olmoe", "Q4_0")
    with load(path, "floor", use_extra_bufts=False) as model:
        plain = digests(model)
        repacked = {role.layout for layer in model.map.layers for role in layer.roles} != {"plain"}
    assert (plain != resident(path)) == repacked


@pytest.mark.parametrize("name", ["qwen3-moe"])
def test_experts_that_a_token_picks_twice_are_computed_as_plain_ones_are(zoo, stock, tmp_path, name):
    """As far as rows of Q4_0 in another order go: what another expert was computed for is off by more than half."""
    path = tmp_path / "grovemoe.gguf"
    as_grovemoe(zoo.path(name, "F32"), path)
    rows = {}
    for kernels in ("repacked", "plain"):
        with load(path, "floor", use_extra_bufts=kernels == "repacked") as model:
            if kernels == "plain":
                assert digests(model, n_threads=2) == stock(path, kernels)
            else:
                assert digests(model) == resident(path)
            with Context(model.llama.model, n_threads=1) as context:
                rows[kernels] = context.decode(tokens(24))
    assert np.abs(rows["repacked"] - rows["plain"]).max() < 0.02 * rows["plain"].std()


@dataclass(frozen=True)
class Generation:
    tokens: list[int]  # a prompt of 24 and 8 that were generated greedily
    logits: np.ndarray  # float32[n_tokens, n_vocab]
    expected: np.ndarray  # the same by transformers


# There is nothing to compare with where
#   transformers computes MXFP4 on a GPU only,
#   llama.cpp approximates the sparse mixer of Phi-3.5-MoE by a softmax over the chosen experts.
COMPARABLE = [name for name in NAMES if name not in ("gpt-oss-mxfp4", "phimoe") and not name.endswith("-fused")]


@pytest.fixture(scope="module")
def generations(zoo: Zoo) -> dict[str, Generation]:
    sequences, logits = {}, {}
    for name in zoo.names:
        if name in COMPARABLE:
            with load(zoo.path(name, "F32"), "100%") as model, Context(model.llama.model, n_threads=1) as context:
                rows = [context.decode(tokens(24))]
                sequences[name] = tokens(24)
                while len(sequences[name]) < 32:
                    sequences[name].append(int(rows[-1][-1].argmax()))
                    rows.append(context.decode(sequences[name][-1:]))
                logits[name] = np.concatenate(rows)
    expected = logits_by_transformers(zoo.checkpoints, sequences)
    return {name: Generation(sequences[name], logits[name], expected[name]) for name in sequences}


@pytest.mark.parametrize("name", COMPARABLE)
def test_greedy_tokens_are_those_of_transformers(generations, name):
    """The checkpoint was converted to what it is. Sums have another order and the KV cache is F16: a margin."""
    generation = generations[name]
    margin = 0.02 * generation.expected.std()
    differences = np.abs(generation.logits - generation.expected).max(axis=1)
    # Of 32 tokens a few may be routed to another expert by a hair's breadth.
    assert np.median(differences) < margin
    chosen = np.take_along_axis(generation.expected, generation.logits.argmax(axis=1)[:, None], axis=1)[:, 0]
    assert (chosen > generation.expected.max(axis=1) - margin).sum() >= 24


def test_logits_of_a_split_model_are_those_of_the_whole(zoo, tmp_path):
    whole = zoo.path("olmoe", "F32")
    shards = split(whole, tmp_path / "olmoe.gguf", max_tensors=10)
    assert len(shards) > 3
    with load(shards[0], "floor") as model:
        assert digests(model) == resident(whole)


def test_models_in_one_process_keep_out_of_each_others_way(zoo):
    paths = [zoo.path("olmoe", "F32"), zoo.path("mixtral", "Q4_0"), zoo.path("olmoe", "Q8_0")]
    expected = [resident(path) for path in paths]
    models = [load(path, "floor") for path in paths]
    results: dict[int, dict[str, str]] = {}

    def answer(i: int) -> None:
        results[i] = digests(models[i])

    try:
        assert [digests(model) for model in reversed(models)] == expected[::-1]
        threads = [threading.Thread(target=answer, args=(i,)) for i in range(len(models))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [results[i] for i in range(len(models))] == expected
    finally:
        for model in models:
            model.close()


def test_one_file_loaded_twice_gives_two_models(zoo):
    path = zoo.path("olmoe", "Q4_0")
    with load(path, "floor") as first, load(path, "100%") as second:
        assert digests(first) == digests(second) == resident(path)
        assert first.engine.stats().budget_bytes < second.engine.stats().budget_bytes
    with load(path, "30%") as third:
        assert digests(third) == resident(path)


@pytest.mark.parametrize("name", ["qwen3-next", "deepseek-v2", "granite-moe-hybrid", "jamba"])
def test_advise_measures_a_small_model_of_the_architecture(zoo, name, monkeypatch):
    """Cut after the first block with experts, none of them but the last could be computed."""
    for constant, value in (("N_ROUNDS", 1), ("N_PROMPT", 8), ("N_TOKENS", 4)):
        monkeypatch.setattr(machine, constant, value)
    with pyorch.ModelMap(zoo.path(name, "F32")) as model_map:
        measured = machine.Machine(model_map, 1, lambda *_: None, again=True).compute()
    assert measured.decode_seconds > 0


@pytest.mark.parametrize("name", ["qwen3-next", "granite-moe-hybrid", "jamba", "deepseek-v2"])
def test_a_cache_is_said_to_be_as_large_as_llama_cpp_makes_it(zoo, name):
    path = zoo.path(name, "F32")
    params = llama.llama_context_default_params()
    params.n_ctx = 4096
    with logs.collect() as lines:
        model = originals.original("llama_model_load_from_file")(
            str(path).encode(), llama.llama_model_default_params())
        context = originals.original("llama_init_from_model")(model, params)
        llama.llama_free(context)
        llama.llama_model_free(model)
    allocated = sum(float(size) for size in re.findall(r"(?:KV|RS) buffer size = +([\d.]+) MiB", "".join(lines))) * MiB
    assert allocated > 0
    with pyorch.ModelMap(path) as model_map:
        assert measure.cache_bytes(model_map, 4096) == pytest.approx(allocated, abs=0.02 * MiB)
        assert model_map.kv_bytes(4096) >= allocated - 0.02 * MiB


def test_a_layer_that_a_checkpoint_claims_and_lacks_is_not_converted(zoo):
    with pyorch.ModelMap(zoo.path("glm4-moe", "F32")) as model_map:
        assert model_map.hparam("nextn_predict_layers", 0) == 0
        assert model_map.info.n_layers == 5 and model_map.decoded_layers == model_map.layers
