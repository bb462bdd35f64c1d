"""An expert that cannot be read fails one decode, with a sentence; the next decode works."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from pathlib import Path

import llama_cpp.llama_cpp as llama
import numpy as np
import pytest
from faulty_source import FaultySource
from models import PROMPT, assert_same_bits, small_model

from pyorch.errors import ExpertReadError, PyorchError
from pyorch.llama.context import Context
from pyorch.llama.model import Model

FAULTS = {
    "EIO": "Input/output error",
    "nothing": "the file ends before it",
    "short": "the file ends before it",
    "too much": "Input/output error",
    "a bug in the source": "Input/output error",
}


@pytest.mark.parametrize("fault, budget", [*((fault, "20%") for fault in FAULTS), ("EIO", "312KiB")])
def test_a_read_error_fails_the_decode_and_spares_the_next(
    small_moe: Path, resident: Model, prompt_tokens: list[int], fault: str, budget: str
) -> None:
    """With the smaller budget the layers of a prompt are streamed."""
    with Context(resident.llama.model, n_threads=1) as ctx:
        expected = ctx.decode(prompt_tokens)
    source = FaultySource(small_moe)
    with small_model(small_moe, budget, source=source) as model, Context(model.llama.model, n_threads=2) as ctx:
        source.fault = fault
        with pytest.raises(ExpertReadError) as failed:
            ctx.decode(prompt_tokens)
        assert source.n_faults > 0
        sentence = str(failed.value)
        assert str(small_moe) in sentence and "ffn_" in sentence and "expert " in sentence
        assert sentence.endswith(FAULTS[fault])
        assert model.stats().experts.failures == 1

        model.engine.wait_idle()  # reads that began before the fault ends may still fail
        source.fault = ""
        assert_same_bits(ctx.decode(prompt_tokens), expected)
        assert model.stats().experts.failures == 1


def test_an_error_in_the_middle_of_generating_is_raised_and_generating_again_works(small_moe: Path) -> None:
    source = FaultySource(small_moe)
    with small_model(small_moe, "15%", source=source) as model:
        expected = "".join(model.generate(PROMPT, max_tokens=24, temperature=0))
        model.llama.reset()
        pieces = []
        with pytest.raises(ExpertReadError, match="cannot read expert"):
            for piece in model.generate(PROMPT, max_tokens=24, temperature=0):
                pieces.append(piece)
                if len(pieces) == 5:
                    source.fault = "EIO"
        model.engine.wait_idle()
        source.fault = ""
        assert 5 <= len(pieces) < 24 and expected.startswith("".join(pieces))
        # Llama would keep the prompt's KV cache, and batches of other shapes are summed in another order.
        model.llama.reset()
        assert "".join(model.generate(PROMPT, max_tokens=24, temperature=0)) == expected


def test_an_error_in_one_context_spares_another(small_moe: Path, resident: Model, prompt_tokens: list[int]) -> None:
    with Context(resident.llama.model, n_threads=1) as ctx:
        expected = ctx.decode(prompt_tokens)
    source = FaultySource(small_moe)
    with small_model(small_moe, "20%", source=source) as model:
        with Context(model.llama.model, n_threads=1) as one, Context(model.llama.model, n_threads=1) as other:
            source.fault = "EIO"
            with pytest.raises(ExpertReadError):
                one.decode(prompt_tokens)
            model.engine.wait_idle()
            source.fault = ""
            assert_same_bits(other.decode(prompt_tokens), expected)


def test_a_decode_reports_its_own_error_though_another_one_fails_before_it_is_asked(
    small_moe: Path, prompt_tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, others = FaultySource(small_moe), []
    with small_model(small_moe, "20%", source=source) as model:
        with Context(model.llama.model, n_threads=1) as one, Context(model.llama.model, n_threads=1) as other:
            remove = llama.llama_memory_seq_rm

            def fail_other(*arguments: object) -> bool:
                """A context that failed clears up with llama_memory_seq_rm: then the other one fails."""
                monkeypatch.setattr(llama, "llama_memory_seq_rm", remove)
                model.engine.wait_idle()
                source.fault = "nothing"
                thread = threading.Thread(target=lambda: others.append(failure(other)))
                thread.start()
                thread.join()
                return remove(*arguments)

            def failure(context: Context) -> str:
                with pytest.raises(ExpertReadError) as failed:
                    context.decode(prompt_tokens)
                return str(failed.value)

            monkeypatch.setattr(llama, "llama_memory_seq_rm", fail_other)
            source.fault = "EIO"
            assert failure(one).endswith(FAULTS["EIO"])
            assert len(others) == 1 and others[0].endswith(FAULTS["nothing"])

            # A decode that fails for another reason says so.
            model.engine.wait_idle()
            source.fault = ""
            with pytest.raises(PyorchError) as failed:
                other.decode([10**6])
            assert not isinstance(failed.value, ExpertReadError) and "llama_decode returned" in str(failed.value)


@pytest.mark.parametrize("direct_io", [True, False], ids=["direct", "buffered"])
def test_a_file_truncated_after_loading_fails_the_request_and_spares_the_process(
    small_moe: Path, resident: Model, prompt_tokens: list[int], tmp_path: Path, direct_io: bool
) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(small_moe, path)
    with small_model(path, "20%", direct_io=direct_io) as model, Context(model.llama.model, n_threads=1) as ctx:
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(ExpertReadError, match=f"from {path}: the file was changed after it was loaded"):
            ctx.decode(prompt_tokens)
        with pytest.raises(ExpertReadError):
            ctx.decode(prompt_tokens)
    with Context(resident.llama.model, n_threads=1) as ctx:
        expected = ctx.decode(prompt_tokens)
    with small_model(small_moe, "20%") as model, Context(model.llama.model, n_threads=1) as ctx:
        assert_same_bits(ctx.decode(prompt_tokens), expected)


def test_a_file_overwritten_in_place_with_its_time_set_back_fails_the_request(
    small_moe: Path, prompt_tokens: list[int], tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(small_moe, path)
    with small_model(path, "20%") as model, Context(model.llama.model, n_threads=1) as ctx:
        before = path.stat()
        with path.open("r+b") as file:
            file.seek(before.st_size // 2)
            file.write(bytes(before.st_size // 2))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        after = path.stat()
        assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
        with pytest.raises(ExpertReadError, match="the file was changed after it was loaded"):
            ctx.decode(prompt_tokens)


def test_another_model_in_the_place_of_one_that_got_a_name_is_not_taken_for_it(
    small_moe: Path, prompt_tokens: list[int], tmp_path: Path
) -> None:
    path, other = tmp_path / "model.gguf", tmp_path / "other.gguf"
    shutil.copy(small_moe, path)
    with small_model(path, "20%") as model, Context(model.llama.model, n_threads=1) as ctx:
        os.link(path, tmp_path / "name.gguf")
        ctx.decode(prompt_tokens)
        content = np.fromfile(small_moe, np.uint8)
        content[len(content) // 2 :] ^= 1
        content.tofile(other)
        shutil.copystat(path, other)
        os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
        subprocess.run(["cp", "--preserve=timestamps", other, path], check=True)
        ctx.clear()
        with pytest.raises(ExpertReadError, match="the file was changed after it was loaded"):
            ctx.decode(prompt_tokens)
        subprocess.run(["cp", small_moe, path], check=True)  # into the same file
        ctx.clear()
        ctx.decode(prompt_tokens)


def test_a_file_that_is_touched_moved_and_protected_is_read_on(
    small_moe: Path, resident: Model, prompt_tokens: list[int], tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(small_moe, path)
    with (
        small_model(path, "20%") as model,
        Context(model.llama.model, n_threads=1) as ctx,
        Context(resident.llama.model, n_threads=1) as whole,
    ):
        expected = whole.decode(prompt_tokens)
        for change in (path.touch, lambda: path.chmod(0o400), lambda: path.rename(tmp_path / "moved.gguf")):
            change()
            ctx.clear()
            assert_same_bits(ctx.decode(prompt_tokens), expected)


def test_a_file_that_gets_and_loses_a_name_is_read_as_it_was(
    small_moe: Path, resident: Model, prompt_tokens: list[int], tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(small_moe, path)
    with (
        small_model(path, "20%") as model,
        Context(model.llama.model, n_threads=1) as ctx,
        Context(resident.llama.model, n_threads=1) as whole,
    ):
        os.link(path, tmp_path / "other.gguf")
        path.unlink()
        os.link(tmp_path / "other.gguf", path)
        assert_same_bits(ctx.decode(prompt_tokens), whole.decode(prompt_tokens))


def test_a_file_replaced_after_loading_is_read_as_it_was(
    small_moe: Path, resident: Model, prompt_tokens: list[int], tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(small_moe, path)
    with (
        small_model(path, "20%") as model,
        Context(model.llama.model, n_threads=1) as ctx,
        Context(resident.llama.model, n_threads=1) as whole,
    ):
        replacement = tmp_path / "new"
        replacement.write_bytes(bytes(path.stat().st_size))
        replacement.rename(path)
        assert_same_bits(ctx.decode(prompt_tokens), whole.decode(prompt_tokens))


def test_a_file_deleted_after_loading_is_read_as_it_was(
    small_moe: Path, resident: Model, prompt_tokens: list[int], tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(small_moe, path)
    with (
        small_model(path, "20%") as model,
        Context(model.llama.model, n_threads=1) as ctx,
        Context(resident.llama.model, n_threads=1) as whole,
    ):
        path.unlink()
        assert_same_bits(ctx.decode(prompt_tokens), whole.decode(prompt_tokens))


@pytest.mark.parametrize("name", ["small_moe", "small_moe_q4"])
def test_bytes_that_are_offered_are_taken_in_place_of_reads(
    request: pytest.FixtureRequest, prompt_tokens: list[int], name: str
) -> None:
    path = request.getfixturevalue(name)
    with small_model(path, "60%") as model, Context(model.llama.model, n_threads=1) as ctx:
        expected = ctx.decode(prompt_tokens)
    source = FaultySource(path)
    with small_model(path, "60%", source=source, prefetch="none") as model:
        engine, il, experts = model.engine, model.map.layers[0].il, range(30)
        source.fault = "EIO"
        for expert in experts:
            engine.offer(il, expert, model.map.read_expert(il, expert))
        with pytest.raises(PyorchError, match=f"an expert of layer {il} has [0-9]+ bytes, not 1"):
            engine.offer(il, 0, b"x")
        engine.pin(il, experts)
        engine.wait_idle()
        assert engine.residency(il).resident[:30].all() and source.n_faults == 0
        source.fault = ""
        with Context(model.llama.model, n_threads=1) as ctx:
            assert_same_bits(ctx.decode(prompt_tokens), expected)
