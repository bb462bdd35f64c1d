"""Models whose layers are not alike, whose experts are narrower than the hidden state, and adapters of experts."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import parts
import pytest
from ggufs import write_adapter, write_encoder_model, write_gemma4_model, write_latent_model
from models import CHECKPOINT
from processes import pyorch as pyorch_process

import pyorch
from pyorch.advise import machine
from pyorch.cli import main
from pyorch.convert.expert_outputs import LayerExperts
from pyorch.errors import PyorchError
from pyorch.eval.verify import verify
from pyorch.llama.context import Context
from pyorch.runtime.callbacks import Routing
from pyorch.sidecars.predictor import PredictorFile
from pyorch.traces.file import Trace
from pyorch.traces.recorder import profile
from pyorch.traces.routers import read_router

LAYERS = (1, 3, 5, 7)
N_EMBD, N_LATENT = 128, 64
TEXT = "Sixteen experts compute with half of the numbers that their router sees. " * 20


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Each layer has another top-k."""
    path = tmp_path / "mixed.gguf"
    write_latent_model(path, top_k=(0, 4, 0, 2, 0, 6, 0, 3))
    return path


@pytest.fixture
def latent(tmp_path: Path) -> Path:
    path = tmp_path / "latent.gguf"
    write_latent_model(path, top_k=4)
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def is_identical(path: Path, **options: object) -> bool:
    return all(compared.identical for compared in verify(path, ["40%"], n_tokens=8, n_threads=1, **options))


def test_each_layer_has_its_own_top_k(mixed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pyorch.ModelMap(mixed) as model_map:
        assert [layer.n_expert_used for layer in model_map.layers] == [4, 2, 6, 3]
        assert model_map.info.n_expert_used == 6
        largest = max(model_map.layers, key=lambda layer: layer.n_expert_used)
        assert model_map.info.floor_bytes == (2 * 6 + 1) * largest.slot_bytes
    assert main(["inspect", str(mixed)]) == 0
    assert "2 to 6 used for a token" in capsys.readouterr().out


def test_a_model_of_several_top_k_is_bit_identical_with_each_form_of_its_experts(mixed: Path) -> None:
    assert is_identical(mixed)
    assert main(["pack", str(mixed), "--codec", "table"]) == 0
    assert is_identical(mixed)
    machine = ["--read-bandwidth", "1GB/s", "--decode-bandwidth", "1GB/s"]
    assert main(["plan", str(mixed), "--budget", "40%", *machine]) == 0
    assert is_identical(mixed)


def test_no_trace_of_several_top_k_is_recorded_and_prepare_does_without(
    mixed: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    why = "has layers of 2, 3, 4, 6 experts used for a token: a trace holds layers of one width"
    with pytest.raises(PyorchError, match=why):
        profile(mixed, [text], tmp_path / "mixed.trace")
    assert not (tmp_path / "mixed.trace").exists()
    assert main(["prepare", str(mixed), "--data", str(text), "--tokens", "200", "--skip", "pack"]) == 0
    assert why in capsys.readouterr().out


def test_a_small_model_for_advise_has_what_llama_cpp_needs_to_compute_it(
    mixed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first block with attention stands behind the first two with experts."""
    assert main(["advise", str(mixed), "--read-bandwidth", "100MB/s", "--compute-ms", "1:1"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "run it with: pyorch run" in said
    assert "a trace holds layers of one width, so neither maps, buddies nor ghosts can be made" in said
    assert "pyorch prepare" in said and all(word not in said for word in ("--with-lossy", "pyorch buddies", "TRACE"))


def routings_of(path: Path) -> tuple[list[Routing], dict[int, tuple[np.ndarray, np.ndarray]]]:
    """What the routers of a latent model decide, and what an engine makes of their inputs."""
    routings: list[Routing] = []
    with pyorch.load(path, budget="100%", n_ctx=64, n_batch=64, n_ubatch=64, n_threads=1, prefetch="none") as model:
        model.engine.set_observer(routings.append)
        with Context(model.llama.model, n_ctx=64, n_batch=64, n_ubatch=64, n_threads=1) as context:
            context.decode(list(range(1, 41)))
        model.engine.set_observer(None)
        applied = {routing.il: parts.apply_router(model.engine, routing.il, routing.inputs) for routing in routings}
        for il in model.layers:
            graph, file = model.engine.router(il), read_router(model.map, il)
            assert (graph.gating, graph.n_used) == (file.gating, file.n_used)
            for array in ("gate", "norm", "selection_bias"):
                assert np.array_equal(graph.arrays()[array], file.arrays()[array])
    return routings, applied


def test_the_router_of_narrow_experts_sees_the_hidden_state(latent: Path) -> None:
    routings, applied = routings_of(latent)
    assert [routing.il for routing in routings] == list(LAYERS)
    for routing in routings:
        assert routing.inputs.shape == routing.residuals.shape == (40, N_EMBD)
        experts, _ = applied[routing.il]
        same = (np.sort(experts) == np.sort(routing.experts)).all(axis=-1)
        assert (~same).sum() <= 1  # a near tie


def test_sidecars_of_narrow_experts_are_made_and_used(latent: Path, text: Path, tmp_path: Path) -> None:
    trace = tmp_path / "latent.trace"
    profile(latent, [text], trace, n_inputs=200, states=True, n_threads=1)
    recorded = Trace(trace)
    with pyorch.ModelMap(latent) as model_map:
        assert recorded.inputs[1].shape[1:] == (len(LAYERS), N_EMBD)
        experts = LayerExperts(model_map, 1)
        assert experts.outputs(0, recorded.inputs[1][:5, 0].astype(np.float32)).shape == (5, N_LATENT)
    assert main(["calibrate", str(latent), "--data", str(text)]) == 0
    assert main(["ghosts", str(latent), "--trace", str(trace)]) == 0
    with pyorch.ModelMap(latent) as model_map:
        vectors = PredictorFile.read(latent.with_suffix(".predictor.gguf"), model_map).default_vectors.vectors
        assert {array.shape for array in vectors.values()} == {(16, N_EMBD)}
    assert is_identical(latent, prefetch="quasi-hidden")
    with pyorch.load(latent, budget="40%", n_threads=1, prefetch="quasi-hidden", substitution="ghosts") as model:
        list(model.generate(TEXT[:200], max_tokens=24, temperature=0))
        stats = model.stats()
    assert stats.experts.prefetch_loads > 0 and stats.substitution.ghosts > 0


@pytest.mark.parametrize("role", ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"])
def test_an_adapter_for_another_number_of_experts_is_refused(small_moe: Path, tmp_path: Path, role: str) -> None:
    path = tmp_path / "adapter.gguf"
    for n_expert in (1, 32, 128):
        write_adapter(path, small_moe, role, n_expert)
        with pytest.raises(PyorchError, match=f"{path} is no LoRA adapter for this model: .*{role}.* incorrect shape"):
            pyorch.load(small_moe, budget="50%", n_ctx=256, n_threads=1, lora_path=str(path))
    write_adapter(path, small_moe, role)
    with pyorch.load(small_moe, budget="50%", n_ctx=256, n_threads=1, lora_path=str(path)) as model:
        assert "".join(model.generate("def", max_tokens=8, temperature=0))


def test_a_server_refuses_an_adapter_for_another_number_of_experts(small_moe: Path, tmp_path: Path) -> None:
    path = tmp_path / "adapter.gguf"
    write_adapter(path, small_moe, "_exps", n_expert=32)
    done = pyorch_process("serve", small_moe, "--budget", "50%", "--port", 0, "--", "--lora", path)
    assert done.returncode == 2 and "incorrect shape" in done.stderr, done.stderr


def test_commands_that_make_text_name_the_server_of_embeddings(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "encoder.gguf"
    write_encoder_model(path)
    for words in (["run", "-p", "x"], ["verify"], ["bench"], ["advise"], ["eval", "perplexity", "--data", text]):
        at = 2 if words[0] == "eval" else 1
        assert main([*map(str, words[:at]), str(path), *map(str, words[at:])]) == 2, words
        said = capsys.readouterr().err
        assert said == (f"pyorch: error: {path} makes embeddings and no text: serve them with `pyorch serve {path} -- "
                        "--embeddings`\n"), words
    lossy = ["--with-lossy", "--questions", str(CHECKPOINT / "facts-train.jsonl")]
    assert main(["prepare", str(path), "--data", str(text), "--tokens", "200", "--budget", "40%", *lossy]) == 0
    said = "\n" + capsys.readouterr().out
    assert re.search("\nghosts +skipped: pyorch does not know how an expert of nomic-bert-moe computes\n", said)
    assert re.search("\ntune +skipped: .* makes embeddings and no text", said)
    assert re.search("\nbuddies +made", said)
    embedded = []
    for budget in ("resident", "50%"):
        with pyorch.load(path, budget=budget, n_ctx=64, n_threads=1, embedding=True) as model:
            embedded.append(model.llama.embed("What is managed computes the same."))
            with pytest.raises(PyorchError, match="makes embeddings and no text"):
                list(model.generate("x"))
    assert embedded[0] == embedded[1]


@pytest.mark.parametrize("n_per_layer", [0, 16])
def test_layers_that_share_tensors_of_later_ones_are_computed_and_measured(
    n_per_layer: int, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Gemma 4: llama.cpp loads `rope_freqs` for the fourth layer, and the last four have no keys of their own."""
    path = tmp_path / "gemma4.gguf"
    write_gemma4_model(path, n_per_layer=n_per_layer)
    assert is_identical(path)
    for constant, value in (("N_ROUNDS", 1), ("N_PROMPT", 8), ("N_TOKENS", 4)):
        monkeypatch.setattr(machine, constant, value)
    with pyorch.ModelMap(path) as model_map:
        assert machine.Machine(model_map, 1, lambda *_: None, again=True).compute().decode_seconds > 0
    assert main(["inspect", str(path)]) == 0
    assert "8, 8 of them with routed experts" in capsys.readouterr().out
    assert main(["pack", str(path), "--codec", "table"]) == 0
    assert is_identical(path)
