"""Budgets, and the limits of real and of made-up machines."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pyorch.errors import BudgetError
from pyorch.llama import memory
from pyorch.llama.division import budget_beside
from pyorch.llama.memory import MemoryLimits, memory_limit
from pyorch.runtime.model_map import MapInfo
from pyorch.settings.budget import Budget
from pyorch.sizes import GiB, KiB, MiB

INFO = MapInfo(
    arch="olmoe", name="OLMoE", n_files=1, n_layers=16, n_moe_layers=16, n_expert_used=8,
    file_bytes=4000 * MiB, expert_bytes=3424 * MiB, dense_bytes=500 * MiB,
    slots_bytes=3424 * MiB, floor_bytes=214 * MiB,
)


@pytest.mark.parametrize(("text", "n_bytes"), [
    ("50%", 1712 * MiB),
    ("12.5 %", 428 * MiB),
    ("1.5GiB", 1536 * MiB),
    ("1.5g", 1536 * MiB),
    ("800MB", 800_000_000),
    ("800 mib", 800 * MiB),
    ("300M", 300 * MiB),
    (str(300 * MiB), 300 * MiB),
    (300 * MiB, 300 * MiB),
    ("250000KiB", 250000 * KiB),
])
def test_a_budget_is_a_share_or_a_size(text: str | int, n_bytes: int) -> None:
    assert Budget.parse(text).resolve(INFO) == n_bytes


@pytest.mark.parametrize("text", ["100%", "64GiB", "1TiB"])
def test_a_budget_above_the_model_is_all_of_it(text: str) -> None:
    assert Budget.parse(text).resolve(INFO) == INFO.slots_bytes


def test_a_budget_below_the_floor_is_refused_with_one_that_works() -> None:
    with pytest.raises(BudgetError) as refused:
        Budget.parse("120MiB").resolve(INFO)
    assert str(refused.value) == (
        "budget 120 MiB is below the floor of 214 MiB (twice the experts of a token, and one): use --budget "
        "214MiB or more"
    )
    assert Budget.parse("214MiB").resolve(INFO) == INFO.floor_bytes


@pytest.mark.parametrize("floor", [1, 1000, 1536 * KiB + 1, 10 * MiB - 1, 213 * MiB + 1, 12 * GiB + 5])
def test_the_budget_that_a_refusal_names_is_accepted(floor: int) -> None:
    info = replace(INFO, floor_bytes=floor, slots_bytes=64 * GiB)
    with pytest.raises(BudgetError) as refused:
        Budget.parse("0").resolve(info)
    named = str(refused.value).rsplit("--budget ", 1)[1].removesuffix(" or more")
    assert Budget.parse(named).resolve(info) >= floor


NONSENSE = ["", "fast", "-5MiB", "5 parsecs", "0.4", "1e9", "50%%", "nan", "1.2.3GiB", True, None, 0.4]


@pytest.mark.parametrize("text", NONSENSE)
def test_nonsense_is_refused_with_what_is_accepted(text: object) -> None:
    with pytest.raises(BudgetError, match=r"is not understood: use a share of the experts such as 40%, a size"):
        Budget.parse(text).resolve(INFO)


def machine(root: Path, cgroup: str = "", mountinfo: str = "", available: int = 20 * GiB) -> Path:
    """The /proc of a machine of 32 GiB."""
    proc = root / "proc" / "self"
    proc.mkdir(parents=True)
    (proc / "cgroup").write_text(cgroup)
    (proc / "mountinfo").write_text(mountinfo)
    sizes = f"MemTotal:  {32 * GiB // KiB} kB\nMemFree:  1 kB\nMemAvailable:   {available // KiB} kB\n"
    (root / "proc" / "meminfo").write_text(sizes)
    return root


def group(root: Path, directory: str, **files: int | str) -> None:
    path = root / directory
    path.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (path / name.replace("__", ".", 1)).write_text(f"{content}\n")


V1 = "36 25 0:31 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
V2 = "30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_UNLIMITED = 9223372036854771712


def test_without_a_cgroup_physical_memory_is_the_limit(tmp_path: Path) -> None:
    limit = memory_limit(machine(tmp_path))
    assert (limit.source, limit.limit_bytes, limit.free_bytes) == ("physical memory", 32 * GiB, 20 * GiB)


def test_a_cgroup_v1_limits_and_its_page_cache_counts_as_free(tmp_path: Path) -> None:
    root = machine(tmp_path, "9:name=systemd:/\n4:memory:/job/a\n3:cpuset:/\n0::/\n", V1)
    group(root, "sys/fs/cgroup/memory", memory__limit_in_bytes=V1_UNLIMITED, memory__usage_in_bytes=GiB)
    group(root, "sys/fs/cgroup/memory/job", memory__limit_in_bytes=V1_UNLIMITED, memory__usage_in_bytes=GiB)
    group(root, "sys/fs/cgroup/memory/job/a", memory__limit_in_bytes=2 * GiB, memory__usage_in_bytes=GiB,
          memory__stat=f"cache 1\ntotal_inactive_file {300 * MiB}\ntotal_active_file {200 * MiB}\ninactive_file 7\n")
    limit = memory_limit(root)
    assert limit.source == "cgroup /sys/fs/cgroup/memory/job/a"
    assert (limit.limit_bytes, limit.free_bytes) == (2 * GiB, GiB + 500 * MiB)


def test_an_ancestor_cgroup_limits_too(tmp_path: Path) -> None:
    root = machine(tmp_path, "4:memory:/job/a\n", V1)
    group(root, "sys/fs/cgroup/memory/job", memory__limit_in_bytes=GiB, memory__usage_in_bytes=512 * MiB)
    group(root, "sys/fs/cgroup/memory/job/a", memory__limit_in_bytes=2 * GiB, memory__usage_in_bytes=100 * MiB)
    limit = memory_limit(root)
    assert limit.source == "cgroup /sys/fs/cgroup/memory/job" and limit.free_bytes == 512 * MiB


def test_a_cgroup_v2_limits_and_max_is_none(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/user.slice/job.scope\n", V2)
    group(root, "sys/fs/cgroup/user.slice", memory__max="max", memory__current=3 * GiB)
    group(root, "sys/fs/cgroup/user.slice/job.scope", memory__max=4 * GiB, memory__high="max", memory__current=GiB,
          memory__stat=f"anon 1\ninactive_file {MiB}\nactive_file {MiB}\n")
    limit = memory_limit(root)
    assert limit.source == "cgroup /sys/fs/cgroup/user.slice/job.scope"
    assert (limit.limit_bytes, limit.free_bytes) == (4 * GiB, 3 * GiB + 2 * MiB)


def test_cgroup_v2_memory_high_limits_as_well(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/job\n", V2)
    group(root, "sys/fs/cgroup/job", memory__max=4 * GiB, memory__high=3 * GiB, memory__current=GiB)
    assert memory_limit(root).limit_bytes == 3 * GiB


def test_after_its_group_was_removed_the_group_of_the_process_is_found_anew(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/old\n", V2)
    group(root, "sys/fs/cgroup/old", memory__max=GiB, memory__current=0)
    limits = MemoryLimits(root)
    assert limits.tightest().limit_bytes == GiB
    group(root, "sys/fs/cgroup/new", memory__max=2 * GiB, memory__current=0)
    (root / "proc/self/cgroup").write_text("0::/new\n")
    shutil.rmtree(root / "sys/fs/cgroup/old")
    assert limits.tightest().limit_bytes == 2 * GiB


@pytest.mark.parametrize(("path", "mount_root"), [
    ("/docker/abc", "/docker/abc"),  # the host's path, only the group itself is mounted
    ("/", "/"),  # a cgroup namespace
    ("/docker/abc", "/somewhere/else"),
    ("/../outside", "/"),
])
def test_inside_a_container_the_mounted_group_limits(tmp_path: Path, path: str, mount_root: str) -> None:
    root = machine(tmp_path, f"0::{path}\n", f"30 24 0:26 {mount_root} /sys/fs/cgroup ro - cgroup2 cgroup2 rw\n")
    group(root, "sys/fs/cgroup", memory__max=GiB, memory__current=256 * MiB)
    assert memory_limit(root).free_bytes == 768 * MiB


def test_the_limit_of_this_machine_is_plausible() -> None:
    limit = memory_limit()
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KiB
    assert used < limit.limit_bytes and 0 < limit.free_bytes < limit.limit_bytes


def test_the_peak_is_this_programs_and_not_its_parents() -> None:
    ballast = bytearray(b"x") * (192 * MiB)
    script = ("from resource import RUSAGE_SELF, getrusage; from pyorch.llama.memory import peak_bytes; "
              "print(peak_bytes(), getrusage(RUSAGE_SELF).ru_maxrss)")
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    own, inherited = map(int, child.stdout.split())
    del ballast
    assert inherited * KiB > 192 * MiB, "the parent's size does not show: the test says nothing"
    assert 4 * MiB < own < 192 * MiB
    assert memory.peak_bytes() > 192 * MiB


def test_the_automatic_budget_is_what_dense_weights_context_and_margin_leave() -> None:
    limit = memory.MemoryLimit("test", 4 * GiB, 3 * GiB)
    planned = budget_beside(INFO, limit, dense_bytes=500 * MiB, context_bytes=400 * MiB)
    assert planned == 3 * GiB - 900 * MiB - limit.margin_bytes


def test_the_automatic_budget_is_at_most_all_experts() -> None:
    assert budget_beside(INFO, memory.MemoryLimit("test", 64 * GiB, 60 * GiB), 0, 0) == INFO.slots_bytes


def test_a_limit_that_leaves_less_than_the_floor_is_refused_with_the_numbers() -> None:
    with pytest.raises(BudgetError) as refused:
        budget_beside(INFO, memory.MemoryLimit("cgroup /job", GiB, 900 * MiB), 500 * MiB, 150 * MiB)
    assert str(refused.value) == (
        "OLMoE does not fit: 900 MiB are free under the limit of 1024 MiB (cgroup /job), but it still needs 991 MiB "
        "(500 MiB for dense weights, 150 MiB for the context, 214 MiB for the fewest experts, "
        "127 MiB as a margin): allow it more memory, use a smaller context or ubatch, or name a budget, such as "
        "--budget 40%, for which no margin is kept free"
    )


def test_a_refusal_for_the_sake_of_the_margin_names_the_way_out() -> None:
    small = replace(INFO, floor_bytes=2 * MiB, slots_bytes=14 * MiB)
    limit = memory.MemoryLimit("physical memory", 24 * GiB, 691 * MiB)
    with pytest.raises(BudgetError, match="name a budget, such as --budget 40%, for which no margin is kept free$"):
        budget_beside(small, limit, 2 * MiB, 0)
    with pytest.raises(BudgetError, match="use a smaller context or ubatch$"):
        budget_beside(small, limit, 2 * MiB, 690 * MiB)
