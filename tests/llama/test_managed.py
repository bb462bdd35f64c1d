"""Models that are loaded through llama_cpp itself."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from pathlib import Path

import llama_cpp
import llama_cpp.llama_cpp as llama
import pytest
from ggufs import write_moe_model
from models import small_model
from mutations import set_metadata
from processes import python

import pyorch
from pyorch.llama import interception
from pyorch.llama.context import Context

SCRIPT = """
import sys
import tracemalloc
from llama_cpp import Llama

llm = Llama(sys.argv[1], n_ctx=256, n_threads=2, verbose=False)
print(llm("import os", max_tokens=16, temperature=0)["choices"][0]["text"])
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_an_unmodified_llama_cpp_script_runs_under_a_budget(small_moe: Path, script: Path) -> None:
    under_budget = python("-m", "pyorch", "exec", "--verbose", "--budget", "15%", script, small_moe)
    assert under_budget.returncode == 0, under_budget.stderr
    with small_model(small_moe, "resident") as model:
        assert under_budget.stdout.rstrip("\n") == "".join(model.generate("import os", max_tokens=16, temperature=0))
    assert "hit rate" in under_budget.stderr and "budget 1843 KiB" in under_budget.stderr


@pytest.mark.parametrize(("last", "status"), [("", 0), ("sys.exit(3)", 3)])
def test_what_a_script_leaves_to_the_interpreter_is_saved_and_counted_once(
    small_moe: Path, script: Path, tmp_path: Path, last: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.write_text(f"{SCRIPT}\nsys.kept = llm\n{last}\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = python("-m", "pyorch", "exec", "--verbose", "--budget", "15%", script, small_moe)
    assert done.returncode == status and done.stderr.count("hit rate") == 1, done.stderr
    assert len(list(tmp_path.glob("pyorch/warm-*.gguf"))) == 1


def test_a_script_that_fails_fails_as_it_would_alone(tmp_path: Path) -> None:
    path = tmp_path / "fails.py"
    path.write_text("import sys\nsys.exit(7)\n")
    assert python("-m", "pyorch", "exec", path).returncode == 7
    path.write_text("open('absent')\n")
    failed = python("-m", "pyorch", "exec", path)
    assert failed.returncode == 1 and f'{path}", line 1' in failed.stderr and "FileNotFoundError" in failed.stderr


def test_a_script_sees_its_own_arguments_and_directory(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("NAME = 'neighbour'\n")
    path = tmp_path / "script.py"
    path.write_text("import sys, neighbour\nprint(sys.argv[1:], neighbour.NAME, __name__)\n")
    done = python("-m", "pyorch", "exec", "--budget", "50%", path, "--budget", "mine", "-x")
    assert done.stdout == "['--budget', 'mine', '-x'] neighbour __main__\n", done.stderr


def test_manage_holds_for_every_load_until_it_is_closed(small_moe: Path) -> None:
    with pyorch.manage(budget="25%"):
        inside = llama_cpp.Llama(str(small_moe), n_ctx=64, verbose=False)
    outside = llama_cpp.Llama(str(small_moe), n_ctx=64, verbose=False)
    try:
        record = interception.find(inside.model)
        assert record.engine.stats().budget_bytes == record.map.info.slots_bytes // 4
        assert interception.find(outside.model) is None
    finally:
        inside.close()
        outside.close()


def test_the_engine_ends_with_the_model(small_moe: Path) -> None:
    with pyorch.manage(budget="20%"):
        llm = llama_cpp.Llama(str(small_moe), n_ctx=64, verbose=False)
    engine = interception.find(llm.model).engine
    assert engine.stats().budget_bytes > 0
    del llm  # never closed: what a script does that just drops its model
    gc.collect()
    with pytest.raises(pyorch.PyorchError, match="the engine was closed"):
        engine.stats()


def test_the_whole_api_of_llama_works(small_moe: Path) -> None:
    with small_model(small_moe, "20%", logits_all=True) as model:
        answer = model.llama.create_chat_completion([{"role": "user", "content": "import"}], max_tokens=4)
        assert answer["usage"]["completion_tokens"] <= 4
        completion = model.llama("import", max_tokens=2, logprobs=3)
        assert len(completion["choices"][0]["logprobs"]["top_logprobs"]) == 2
    with small_model(small_moe, "20%", embedding=True) as model:
        assert len(model.llama.create_embedding("import")["data"]) == 1


def test_a_vocabulary_alone_has_no_engine(small_moe: Path) -> None:
    with pyorch.manage(budget="20%"):
        params = llama.llama_model_default_params()
        params.vocab_only = True
        model = llama.llama_model_load_from_file(str(small_moe).encode(), params)
        assert model and interception.find(model) is None
        llama.llama_model_free(model)


def test_the_automatic_budget_shrinks_when_a_context_is_made(small_moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyorch.llama import memory
    from pyorch.llama.context import Context

    free = 160 << 20
    monkeypatch.setattr(memory, "memory_limit", lambda: memory.MemoryLimit("test", 256 << 20, free))
    # Cold: what warm experts occupy would count as free.
    with small_model(small_moe, "auto", n_ubatch=64, warm=False) as model:
        before = model.engine.stats().budget_bytes
        assert before == model.map.info.slots_bytes
        free = 112 << 20
        with Context(model.llama.model, n_ctx=256, n_batch=64, n_ubatch=64):
            assert model.map.info.floor_bytes <= model.engine.stats().budget_bytes < before


GENERATES = """
import pyorch, sys
model = pyorch.load(sys.argv[1], budget="20%", n_ctx=64)
print(*model.generate("import", max_tokens=4))
"""

MANAGES = """
import pyorch, sys, llama_cpp
pyorch.manage()
llm = llama_cpp.Llama(sys.argv[1], n_ctx=64, verbose=False)
llm("import")
"""

PREFETCHES = """
import pyorch, sys
model = pyorch.load(sys.argv[1], n_ctx=64)
model.engine.set_observer(print)
model.layers[0].prefetch(range(64))
"""


@pytest.mark.parametrize("source", [GENERATES, MANAGES, PREFETCHES], ids=["generates", "manages", "prefetches"])
def test_a_program_that_closes_nothing_ends_quietly(small_moe: Path, tmp_path: Path, source: str) -> None:
    path = tmp_path / "program.py"
    path.write_text(source)
    done = python(path, small_moe)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_context_too_small_for_its_sequences_is_refused(small_moe: Path) -> None:
    with (
        pyorch.load(small_moe, budget="50%", n_ctx=64) as model,
        pytest.raises(pyorch.PyorchError, match="4 tokens cannot hold 8"),
    ):
        Context(model.llama.model, n_ctx=4, n_seq_max=8)


def test_tokenizing_takes_room_for_the_text_and_not_for_the_models_whole_context(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_moe_model(path)
    path.write_bytes(set_metadata(path.read_bytes(), "dots1.context_length", 1 << 27))
    with small_model(path, "60%") as model:
        tracemalloc.start()
        try:
            tokens = model.llama.tokenize(b"abc" * 10)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()
        assert model.llama.detokenize(tokens) == b"abc" * 10
        assert model.llama.tokenize(b"") == []


def test_an_interrupt_while_a_model_is_loaded_reaches_the_caller(
    small_moe: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Log:
        """Stands where llama.cpp's log is written: the interrupt comes while llama.cpp calls back to write a line."""

        n_lines = 0

        def write(self, _line: str) -> None:
            self.n_lines += 1
            if self.n_lines == 1:
                raise KeyboardInterrupt

        def flush(self) -> None:
            pass

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(sys, "stderr", Log())
        pyorch.load(small_moe, budget="50%", n_ctx=256, verbose=True)
    assert "ignored" not in capfd.readouterr().err
    with pyorch.load(small_moe, budget="50%", n_ctx=256) as model:
        assert list(model.generate("import os", max_tokens=2))
