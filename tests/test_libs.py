"""How long threads wait awake for each other: what libgomp read when it was loaded, which it tells when it is asked."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from processes import python

from pyorch import _libs
from pyorch.bench import bench_plan
from pyorch.bench.rounds import environment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="GNU's runtime of OpenMP is Linux's")

LOAD = "import pyorch.library.bindings"
LIBGOMP = "import ctypes; ctypes.CDLL('libgomp.so.1')"


def told(program: str, **variables: str) -> tuple[str, str]:
    """What libgomp says of GOMP_SPINCOUNT in a process with these variables, and what else is on stderr."""
    kept = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = python("-c", program, env={**kept, "OMP_DISPLAY_ENV": "verbose", **variables}, check=True)
    shown = r"(?s)\nOPENMP DISPLAY ENVIRONMENT BEGIN.*?GOMP_SPINCOUNT = '(\d+)'.*?ENVIRONMENT END\n"
    report = re.search(shown, done.stderr)
    return report[1], done.stderr.replace(report[0], "")


def test_threads_sleep_soon_when_they_wait_for_each_other() -> None:
    assert told(LOAD) == (_libs.spin_count(), "")


def test_threads_of_a_build_with_a_device_wait_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"libllama{_libs.SUFFIX}").touch()
    monkeypatch.setenv("PYORCH_LIB_DIR", str(tmp_path))
    assert _libs.spin_count() == _libs.SPIN_COUNT
    (tmp_path / f"libggml-vulkan{_libs.SUFFIX}").touch()  # as in every wheel
    for there in (False, True):
        monkeypatch.setattr(_libs, "has_gpu_driver", lambda there=there: there)
        assert _libs.spin_count() == (_libs.DEVICE_SPIN_COUNT if there else _libs.SPIN_COUNT)
    monkeypatch.setattr(_libs, "has_gpu_driver", lambda: False)
    (tmp_path / f"libggml-cuda{_libs.SUFFIX}").touch()
    assert _libs.spin_count() == _libs.DEVICE_SPIN_COUNT


@pytest.mark.parametrize(("path", "text", "has"), [
    ("dev/nvidia0", "", True), ("dev/dxg", "", True), ("dev/nvidia-modeset", "", False),
    ("sys/class/drm/card1/device/mem_info_vram_total", f"{8 << 30}\n", True),
    ("sys/class/drm/card0/device/mem_info_vram_total", f"{512 << 20}\n", False),  # of a processor with graphics
    ("sys/class/drm/card0/device/mem_info_vram_total", "much", False),
])
def test_the_driver_of_a_gpu_with_memory_of_its_own_is_seen_in_files(
    tmp_path: Path, path: str, text: str, has: bool
) -> None:
    assert not _libs.has_gpu_driver(str(tmp_path))
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(text)
    assert _libs.has_gpu_driver(str(tmp_path)) == has


@pytest.mark.parametrize("variable, value, count", [
    ("GOMP_SPINCOUNT", "77", "77"), ("OMP_WAIT_POLICY", "passive", "0"), ("OMP_WAIT_POLICY", "active", "30000000000"),
])
def test_what_the_user_said_stays(variable: str, value: str, count: str) -> None:
    assert told(LOAD, **{variable: value}) == (count, "")


@pytest.mark.parametrize("variables, barrier", [
    ({}, None), ({"GOMP_SPINCOUNT": _libs.spin_count()}, None), ({"GOMP_SPINCOUNT": "77"}, "openmp"),
    ({"OMP_WAIT_POLICY": "active"}, "openmp"),
])
def test_threads_meet_at_libgomp_s_barrier_only_where_the_user_said_how_they_wait(
    variables: dict[str, str], barrier: str | None
) -> None:
    program = "import os, pyorch; print(os.environ.get('PYORCH_BARRIER'))"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP_", "OMP_", "PYORCH_BAR"))}
    assert python("-c", program, env={**kept, **variables}, check=True).stdout.strip() == str(barrier)


def test_it_is_said_when_it_is_too_late() -> None:
    count, said = told(f"{LIBGOMP}; {LOAD}")
    assert count == _libs.LIBGOMP_SPIN_COUNT
    assert re.search(r"RuntimeWarning: /\S+/libgomp\S+ was loaded before pyorch was imported: .*COUNT=1000", said)


def test_stock_llama_cpp_is_measured_as_it_waits_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(LIBGOMP)[0] == _libs.LIBGOMP_SPIN_COUNT
    for chosen, count in ((True, _libs.LIBGOMP_SPIN_COUNT), (False, "77")):
        monkeypatch.setattr(_libs, "chose_spin_count", chosen)
        monkeypatch.setenv("GOMP_SPINCOUNT", _libs.spin_count() if chosen else "77")
        assert environment(bench_plan.STOCK_PLAIN)["GOMP_SPINCOUNT"] == count
        assert environment(bench_plan.RESIDENT)["GOMP_SPINCOUNT"] == os.environ["GOMP_SPINCOUNT"]
