"""Parts of the runtime without a model: native/tests/."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from native_build import ROOT, headers

from pyorch import _libs

SANITIZERS = ["thread", "address"]
SOURCES = [
    *("residency/residency", "residency/residency_orders", "residency/residency_reads", "residency/eviction"),
    *("loading/readers", "loading/source", "banks/block_pool", "model/model_map", "model/fatal", "base/status"),
]


@pytest.fixture(scope="module")
def stress(tmp_path_factory) -> dict[str, Path]:
    """The stress test, by sanitizer. Compiled at once: that takes longer than running it."""
    tree, libraries, directory = headers(), _libs.lib_dir(), tmp_path_factory.mktemp("stress")
    programs = {sanitizer: directory / sanitizer for sanitizer in SANITIZERS}
    compilers = [
        subprocess.Popen(
            ["g++", "-std=c++17", "-O1", "-g", f"-fsanitize={sanitizer}", "-pthread", "-o", program]
            + [f"-I{ROOT / 'native/src'}", f"-I{ROOT / 'native/include'}", f"-I{tree / 'include'}", f"-I{tree / 'ggml/include'}"]
            + [ROOT / "native/tests/residency_stress.cpp"]
            + [ROOT / f"native/src/{name}.cpp" for name in SOURCES]
            + [f"-L{libraries}", "-lllama", "-lggml-base", f"-Wl,-rpath,{libraries}"]
        )
        for sanitizer, program in programs.items()
    ]
    assert [compiler.wait() for compiler in compilers] == [0, 0]
    return programs


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_contexts_share_a_tight_budget_while_reads_fail_and_orders_come_in(sanitizer, stress, tmp_path):
    for seed in (1, 2):
        done = subprocess.run(
            [stress[sanitizer], tmp_path / "stress.gguf", str(seed), "40"], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr


def test_speculation_gives_forecast_experts_the_weights_that_the_model_would(tmp_path):
    headers()
    program = tmp_path / "speculation_test"
    sources = [ROOT / "native/tests/speculation_test.cpp", ROOT / "native/src/routing/speculation.cpp"]
    includes = [f"-I{ROOT / 'native/src'}", f"-I{ROOT / 'native/include'}"]
    subprocess.run(["g++", "-std=c++17", "-O1", "-o", program, *includes, *sources], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def controller(tmp_path_factory) -> Path:
    headers()
    program = tmp_path_factory.mktemp("controller") / "controller_test"
    sources = [ROOT / "native/tests/controller_test.cpp", ROOT / "native/src/prediction/prefetch_controller.cpp"]
    subprocess.run(["g++", "-std=c++17", "-O1", "-o", program, f"-I{ROOT / 'native/src'}", *sources], check=True)
    return program


def shares(controller: Path, *regimes: tuple[int, float, float]) -> list[float]:
    """Of the tokens of each regime (n, ms with prefetch, ms without), those that had prefetch on."""
    arguments = [str(number) for regime in regimes for number in regime]
    done = subprocess.run([controller, *arguments], capture_output=True, text=True, check=True, timeout=60)
    return [float(line) for line in done.stdout.split()]


def test_prefetch_stays_on_while_it_gains(controller: Path):
    assert shares(controller, (20000, 40, 60))[0] > 0.95


def test_prefetch_goes_off_where_it_loses(controller: Path):
    assert shares(controller, (20000, 60, 40))[0] < 0.05


def test_prefetch_follows_a_regime_that_changes(controller: Path):
    fast_disk, slow_disk = (20000, 30, 20), (20000, 60, 90)
    for regimes, expected in (((fast_disk, slow_disk), (0, 1)), ((slow_disk, fast_disk), (1, 0))):
        assert all(abs(share - wanted) < 0.1 for share, wanted in zip(shares(controller, *regimes), expected))


def test_a_small_loss_costs_less_than_a_percent(controller: Path):
    share = shares(controller, (50000, 41, 40))[0]
    assert share * 1 / 40 < 0.01
