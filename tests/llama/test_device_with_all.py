"""Everything else that a model can do, with experts on a device: nothing of it changes a bit that it did not change
without one. The processor's kernels are the device's here."""

from __future__ import annotations

import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import parts
import pytest
from device_loads_process import data_bytes
from devices import DeviceProcess
from models import PROMPT, assert_same_bits, small_model
from predicting import predict
from servers import WHOLE_PROMPT, ServerProcess, pyorch_serve

from pyorch.convert import pack as packing
from pyorch.library.choices import predictors
from pyorch.llama.context import Context
from pyorch.llama.managed import find
from pyorch.llama.model import Model
from pyorch.sizes import MiB

N_DECODED = 24


def decode(model: Model, tokens: list[int]) -> np.ndarray:
    """Prompts that are wide enough for the areas, and too narrow; and one token after another."""
    with Context(model.llama.model, n_ctx=256, n_batch=128, n_ubatch=32, n_threads=1) as context:
        made = [context.decode(tokens[:40])] + [context.decode([token]) for token in tokens[:N_DECODED]]
        return np.concatenate(made)


@pytest.fixture(scope="module")
def expected(small_moe: Path, prompt_tokens: list[int]) -> np.ndarray:
    with small_model(small_moe, "100%", prefetch="none", use_extra_bufts=False) as model:
        return decode(model, prompt_tokens)


def on_device(path: Path, device: DeviceProcess, budget: str = "30%", **options: object) -> Model:
    return small_model(path, budget, **{"device": device.name, "vram_budget": "25%", **options})


def check_budgets(model: Model) -> None:
    experts = model.stats().experts
    assert experts.device_hits > 0
    assert experts.peak_bytes <= experts.budget_bytes and experts.device_used_bytes <= experts.device_budget_bytes


@pytest.mark.parametrize("predictor", predictors().present)
def test_what_is_read_ahead_changes_nothing(
    small_moe: Path, device: DeviceProcess, prompt_tokens: list[int], expected: np.ndarray, predictor: str
) -> None:
    with on_device(small_moe, device, prefetch="none") as model:
        predict(model, predictor, 1, 0.0)
        for _ in range(2):
            assert_same_bits(decode(model, prompt_tokens), expected)
        # On a busy machine guesses may come too late to be read.
        while predictor != "none" and model.stats().experts.prefetch_loads == 0:
            decode(model, prompt_tokens)
        check_budgets(model)


@pytest.mark.parametrize("predictor", ["quasi-hidden", "hybrid"])
def test_what_a_device_computed_is_forecast_from_as_what_the_processor_did(
    small_moe: Path, device: DeviceProcess, prompt_tokens: list[int], predictor: str
) -> None:
    """A layer that comes before it was predicted may go without: the text is decoded until most have not."""
    tokens = prompt_tokens[:12]

    def forecasts(model: Model) -> dict[tuple[int, int, int], list[int]]:
        predict(model, predictor, 2, 0.0)
        found = []
        parts.set_prediction_observer(model.engine, found.append)
        made = {}
        with Context(model.llama.model, n_ctx=64, n_threads=1) as context:
            while min(sum(key[1:] == (il - 1, il) for key in made) for il in range(1, 8)) <= len(tokens) // 2:
                context.clear()
                for n, token in enumerate(tokens):
                    context.decode([token])
                    model.engine.wait_idle()
                    made |= {
                        (n, prediction.il_from, prediction.il): prediction.experts.tolist() for prediction in found
                    }
                    found.clear()
        parts.set_prediction_observer(model.engine, None)
        return made

    with small_model(small_moe, "100%", prefetch="none", use_extra_bufts=False) as model:
        expected = forecasts(model)
    with on_device(small_moe, device, prefetch="none") as model:
        made = forecasts(model)
    both = expected.keys() & made.keys()
    assert {il for _, _, il in both} == set(range(1, 8))
    assert {key: made[key] for key in both} == {key: expected[key] for key in both}


@pytest.mark.parametrize("codec", [None, "table"])
def test_experts_from_a_pack_are_uploaded_as_the_model_has_them(
    small_moe: Path, device: DeviceProcess, prompt_tokens: list[int], expected: np.ndarray, tmp_path: Path,
    codec: str | None,
) -> None:
    path = Path(shutil.copy(small_moe, tmp_path / "model.gguf"))
    packing.pack(path, **({"codec": codec} if codec else {}))
    pools = {"pools": "0.5,0.5,0,0"} if codec else {}
    for misses in ("processor", "upload"):
        with on_device(path, device, device_misses=misses, **pools) as model:
            assert model.map.pack is not None
            assert_same_bits(decode(model, prompt_tokens), expected)
            check_budgets(model)


def test_layers_that_speculate_compute_the_same(
    small_moe: Path, device: DeviceProcess, prompt_tokens: list[int]
) -> None:
    def speculated(model: Model) -> tuple[np.ndarray, tuple[int, ...]]:
        model.speculate("quasi-hidden:1:1")
        model.reset_stats()
        logits = decode(model, prompt_tokens)
        counts = model.stats().speculation
        return logits, (counts.tokens, counts.slots, counts.right)

    with small_model(small_moe, "30%", prefetch="none", use_extra_bufts=False) as model:
        expected, counts = speculated(model)
    assert 0 < counts[2] < counts[1]
    for misses in ("processor", "upload"):
        with on_device(small_moe, device, prefetch="none", device_misses=misses) as model:
            logits, those = speculated(model)
            assert_same_bits(logits, expected)
            assert those == counts
            check_budgets(model)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads what Linux says of a process")
def test_the_devices_memory_is_taken_once_and_within_its_budget(
    small_moe: Path, tmp_path: Path, prompt_tokens: list[int]
) -> None:
    """As its own process has it, while it computes, beside what it has without experts."""
    device = DeviceProcess(tmp_path / "log")

    def sampled(vram_budget: str) -> tuple[list[int], int]:
        with on_device(small_moe, device, vram_budget=vram_budget, n_ubatch=32) as model:
            with Context(model.llama.model, n_ctx=256, n_batch=128, n_ubatch=32, n_threads=1) as context:
                held = []
                prompt, text = prompt_tokens[:32], prompt_tokens[:N_DECODED]
                for tokens in (prompt, *([token] for token in text), prompt):
                    context.decode(tokens)
                    held.append(data_bytes(str(device.process.pid)))
                    check = model.stats().experts
                    assert check.device_used_bytes <= check.device_budget_bytes
                    assert check.peak_bytes <= check.budget_bytes
            header = find(model.llama.model).plan.header
            return held, check.device_used_bytes + 2 * header.chain_bytes(32)  # of two contexts

    try:
        (without, _), (held, most) = sampled("0"), sampled("8MiB")
    finally:
        device.stop()
    slack = 3 * MiB // 2  # by which a process of glibc may hold more than it uses
    assert 7 * MiB < max(held) - max(without) < most + slack
    assert max(held) - min(held) < slack, "all of it was taken when the context was made"


def test_slots_of_a_server_compute_together_within_both_budgets(small_moe: Path, tmp_path: Path) -> None:
    """Looked at while they do."""
    device = DeviceProcess(tmp_path / "device.log")  # of its own: such a device serves one process at a time
    server = ServerProcess(
        pyorch_serve(small_moe, "--budget", "30%", "--device", device.name, "--vram-budget", "30%", "--threads", "1",
                     "--ctx", "2048", "--prefetch", "quasi-hidden", "--", "-np", "4"), tmp_path / "log")
    try:
        with ThreadPoolExecutor(5) as pool:
            prompts = [PROMPT[: -(n % 4) or None] for n in range(12)]
            runs = [pool.submit(server.complete, prompt, extra_body=WHOLE_PROMPT) for prompt in prompts]
            seen = []
            while not all(run.done() for run in runs):
                seen.append(server.get("/residency")["totals"])
        assert all(run.result() for run in runs)
        seen.append(server.get("/residency")["totals"])
        for totals in seen:
            assert totals["used_bytes"] <= totals["peak_bytes"] <= totals["budget_bytes"]
            assert 0 < totals["device_used_bytes"] <= totals["device_budget_bytes"]
        assert seen[-1]["device_hits"] > 0 and server.stop()[0] == 0
    finally:
        server.process.kill()
        device.stop()
