"""Which processors compute: on made-up machines, and on this one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from processes import python

from pyorch.errors import PyorchError
from pyorch.llama import cores
from pyorch.settings.settings import Settings

Machine = Callable[..., Path]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Makes the files of one: core ids of its processors, those it may use, and what tells the kinds of cores."""
    def make(core_ids: Iterable[int], allowed: Iterable[int], kinds: dict[str, str]) -> Path:
        blocks = [f"processor\t: {cpu}\nphysical id\t: 0\ncore id\t\t: {core}\n"
                  for cpu, core in enumerate(core_ids)]
        files = {"proc/cpuinfo": "\n".join(blocks), **{f"sys/devices/{name}": text for name, text in kinds.items()}}
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        monkeypatch.setattr(cores, "allowed_at_first", set(allowed))
        return tmp_path

    for name in ("GOMP_CPU_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND"):
        monkeypatch.delenv(name, raising=False)
    return make


# Eight cores with two hardware threads each, then eight that have one.
HYBRID = [cpu // 2 if cpu < 16 else cpu - 8 for cpu in range(24)]
INTEL = {"cpu_core/cpus": "0-15\n"}


def test_a_second_hardware_thread_is_no_core(machine: Machine) -> None:
    assert cores.physical_cores(machine([0, 0, 1, 1, 2, 2, 3, 3], {0, 1, 2, 5}, {})) == 3


@pytest.mark.parametrize(("kinds", "allowed", "n", "kept"), [
    (INTEL, range(24), 8, [0, 2, 4, 6, 8, 10, 12, 14]),
    (INTEL, [0, 1, 2, 17, 18], 2, [0, 2]),  # never in what others were given
    (INTEL, range(16), 8, []),  # there are no slow ones to stay away from
    (INTEL, range(16, 24), 8, []),
    ({"cpu_core/cpus": "0,2,4-5\n"}, range(24), 3, [0, 2, 4]),
    ({"cpu_core/cpus": "many\n"}, range(24), 16, []),
    ({}, range(24), 16, []),
    ({f"system/cpu/cpu{cpu}/cpu_capacity": f"{1024 if cpu < 4 else 446}\n" for cpu in range(24)}, range(24), 2, [0, 2]),
    ({f"system/cpu/cpu{cpu}/cpu_capacity": "1024\n" for cpu in range(24)}, range(24), 16, []),
    ({f"system/cpu/cpu{cpu}/cpu_capacity": f"{(1024 if cpu < 2 else 720) if cpu < 8 else 300}\n"
      for cpu in range(24)}, range(24), 4, [0, 2, 4, 6]),  # one of them is faster than all others
])
def test_threads_compute_on_cores_of_the_fast_kind(
    machine: Machine, kinds: dict[str, str], allowed: Iterable[int], n: int, kept: list[int]
) -> None:
    root = machine(HYBRID, allowed, kinds)
    assert cores.physical_cores(root) == n
    assert cores.compute_cpus(Settings(), n, root) == kept


@pytest.mark.parametrize(("files", "n"), [
    ({"cpu.max": "250000 100000\n"}, 3),
    ({"cpu.max": "max 100000\n"}, 16),
    ({"cpu.max": "50000 100000\n"}, 1),
    ({"cpu.max": "6400000 100000\n"}, 16),
    ({"cpu.cfs_quota_us": "400000\n", "cpu.cfs_period_us": "100000\n"}, 4),
    ({"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}, 16),
])
def test_there_are_no_more_threads_than_a_control_group_has_the_time_of(
    machine: Machine, files: dict[str, str], n: int
) -> None:
    root = machine(HYBRID, range(24), {})
    v1 = "cpu.max" not in files
    (root / "proc/self").mkdir()
    (root / "proc/self/cgroup").write_text("4:cpu,cpuacct:/job/a\n" if v1 else "0::/job/a\n")
    (root / "proc/self/mountinfo").write_text(
        "36 25 0:31 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n" if v1 else
        "30 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    group = root / "sys/fs/cgroup" / ("cpu/job" if v1 else "job")  # an ancestor's holds too
    group.mkdir(parents=True)
    for name, text in files.items():
        (group / name).write_text(text)
    assert cores.physical_cores(root) == n


def test_what_was_said_of_places_stands(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    root = machine(HYBRID, range(24), INTEL)
    assert cores.compute_cpus(Settings(cpus="any"), 8, root) == []
    assert cores.compute_cpus(Settings(cpus="3,16-18"), 4, root) == [3, 16, 17, 18]
    assert Settings(cpus="3,16-18").n_threads == 4
    assert Settings(cpus="3,16-18", n_threads=2).n_threads == 2
    assert cores.compute_cpus(Settings(), 9, root) == []  # more threads than fast cores
    monkeypatch.setenv("OMP_PROC_BIND", "spread")
    assert cores.compute_cpus(Settings(), 8, root) == []


@pytest.mark.parametrize("text", ["", "3-1", "-1", "0-", "a", "0,,1", "0-1000000000000", "any,1"])
def test_what_is_no_list_of_processors_is_refused(text: str) -> None:
    with pytest.raises(PyorchError, match=r"^cpus is .* must be any, auto or a list such as 0-5,8$"):
        Settings(cpus=text)


_PLACES = """
import os, sys
import pyorch

def places():
    return {frozenset(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")}

path, reader = sys.argv[1:]
before = os.sched_getaffinity(0)
first = min(before)
named = {frozenset({first}), frozenset(before - {first} or before)}
for cpus, wanted in ((str(first), named), ("any", {frozenset(before)})):
    with pyorch.load(path, budget="30%", prefetch="quasi-hidden", reads=reader, cpus=cpus, n_threads=2) as model:
        "".join(model.generate("def f(x):", max_tokens=8))
        assert os.sched_getaffinity(0) == ({first} if cpus != "any" else before), os.sched_getaffinity(0)
        assert places() >= wanted, (places(), wanted)
try:
    pyorch.load(path, cpus=str(max(before) + 1))
except pyorch.PyorchError as error:
    print(error)
"""


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system does not place threads")
@pytest.mark.parametrize("reader", ["threads", "auto"])
def test_computing_keeps_to_the_processors_that_were_named(small_moe: Path, reader: str) -> None:
    """And reading to the others, until any may be used again."""
    ran = python("-c", _PLACES, small_moe, reader)
    beyond = max(os.sched_getaffinity(0)) + 1
    assert ran.stdout == f"processor {beyond} is none of those that this process may use\n", ran.stderr
