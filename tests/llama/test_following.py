"""The automatic budget follows free memory."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import small_model
from processes import HANG_SECONDS

from pyorch.bench.surroundings import MemoryGroup, memory_group
from pyorch.errors import PyorchError
from pyorch.llama import managed, memory
from pyorch.llama.following import LEAST_PERIOD, MOST_PERIOD, QUIET_SECONDS, Follower, Look
from pyorch.planning.concurrency import Concurrency
from pyorch.runtime import fatal
from pyorch.serve.residency import Residency
from pyorch.sizes import GiB, MiB

FLOOR, MOST, LIMIT, MARGIN = 200 * MiB, 3 * GiB, 4 * GiB, 200 * MiB


class Machine:
    """Free memory that others take, and a budget that follows it."""

    def __init__(self, budget: int) -> None:
        self.follower, self.budget, self.now = Follower(FLOOR, MOST), budget, 0.0

    def look(self, available: int, pressed: bool = False, seconds: float = 0.1) -> int:
        self.now += seconds
        look = Look(self.now, self.budget, available, MARGIN, LIMIT, pressed)
        changed = self.follower.next(look)
        self.budget = self.budget if changed is None else changed
        return self.budget

    def wait(self, available: int, seconds: float, pressed: bool = False) -> int:
        for _ in range(round(seconds / 0.1)):
            self.look(available, pressed)
        return self.budget


def test_between_the_marks_the_budget_stays() -> None:
    machine = Machine(2 * GiB)
    for spare in (MARGIN, MARGIN // 2 + MiB, 2 * MARGIN - MiB):
        assert machine.wait(2 * GiB + spare, 10 * QUIET_SECONDS) == 2 * GiB


def test_when_others_need_memory_the_budget_falls_at_once_until_the_reserve_is_free() -> None:
    machine = Machine(2 * GiB)
    machine.wait(2 * GiB + MARGIN, 1)
    assert machine.look(GiB) <= GiB - MARGIN
    assert machine.wait(0, 1) == FLOOR, "not below what works"


def test_the_budget_rises_only_after_a_quiet_time_and_by_half() -> None:
    machine = Machine(GiB)
    surplus = 800 * MiB
    assert machine.wait(GiB + MARGIN + surplus, QUIET_SECONDS - 0.2) == GiB
    assert machine.wait(GiB + MARGIN + surplus, 0.4) == GiB + surplus // 2
    assert machine.wait(8 * GiB, 60) == MOST
    machine = Machine(GiB)
    for _ in range(40):  # a surplus that never lasts
        machine.wait(GiB + 2 * MARGIN + MiB, QUIET_SECONDS / 2)
        machine.wait(GiB + MARGIN, 0.1)
    assert machine.budget == GiB


def test_fast_allocations_make_the_reserve_larger_and_are_forgotten() -> None:
    slow, fast = Machine(2 * GiB), Machine(2 * GiB)
    slow.wait(3 * GiB, 0.1)
    fast.wait(3 * GiB, 0.1)
    slow.look(GiB, seconds=60)
    fast.look(GiB, seconds=0.1)
    assert slow.budget == GiB - MARGIN
    assert fast.budget == GiB - LIMIT // 10, "at most a tenth of the limit"
    fast.look(GiB, seconds=10_000)
    assert fast.wait(2 * GiB, 30) > 2 * GiB - 2 * MARGIN - MiB


def test_pressure_doubles_the_reserve_and_stops_the_growth() -> None:
    machine = Machine(GiB)
    assert machine.wait(3 * GiB, 10, pressed=True) == GiB
    machine = Machine(GiB)
    assert machine.look(GiB + MARGIN * 3 // 4, pressed=True) == GiB + MARGIN * 3 // 4 - 2 * MARGIN


def test_two_that_follow_the_same_memory_share_it_without_swinging() -> None:
    total, machines = 4 * GiB, [Machine(FLOOR), Machine(FLOOR)]
    budgets = []
    for _ in range(600):
        for mine, other in (machines, machines[::-1]):
            mine.look(total - other.budget)
        budgets.append(tuple(machine.budget for machine in machines))
    assert len(set(budgets[300:])) == 1
    assert total - 2 * LIMIT // 10 <= sum(budgets[-1]) <= total - MARGIN // 2


@given(st.lists(st.tuples(st.integers(0, LIMIT), st.booleans(), st.floats(0.01, 30)), max_size=60))
def test_whatever_happens_the_budget_works_and_leaves_half_a_margin(looks: list[tuple[int, bool, float]]) -> None:
    machine = Machine(GiB)
    for available, pressed, seconds in looks:
        budget = machine.look(available, pressed, seconds)
        assert FLOOR <= budget <= MOST
        assert budget == FLOOR or available - budget >= MARGIN // 2
        assert LEAST_PERIOD <= machine.follower.period() <= MOST_PERIOD


def test_with_much_memory_the_looks_are_rare_and_near_the_mark_they_are_frequent() -> None:
    machine = Machine(GiB)
    machine.look(GiB + MARGIN)
    assert machine.follower.period() == LEAST_PERIOD
    machine.look(20 * GiB)
    assert machine.follower.period() == MOST_PERIOD


def test_the_kernels_pressure_is_read_where_it_exists(tmp_path: Path) -> None:
    assert memory.MemoryLimits(tmp_path).stalled_seconds() is None
    (tmp_path / "proc/pressure").mkdir(parents=True)
    (tmp_path / "proc/pressure/memory").write_text(
        "some avg10=1.00 avg60=0.10 avg300=0.00 total=2500000\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=1\n")
    assert memory.MemoryLimits(tmp_path).stalled_seconds() == 2.5


# Decodes in a control group while another program takes and frees memory, and reports after each line of its input.
_PROGRAM = """
import json, sys, time
from pathlib import Path
from models import PROMPT, small_model
from pyorch.llama import managed, memory

model = small_model(Path(sys.argv[1]), "auto", n_ctx=512, n_batch=64, **json.loads(sys.argv[2]))
record, said = managed.find(model.llama.model), []
record.on_budget = said.append
while True:
    text = "".join(model.generate(PROMPT, 24, temperature=0))
    print(json.dumps({"budget": record.budget_bytes(), "used": model.engine.stats().used_bytes, "text": text,
                      "free": memory.memory_limit().free_bytes, "said": said, "follows": record.follows()}), flush=True)
    if not sys.stdin.readline():
        break
"""

# Takes as many bytes as each line of its input says.
_NEIGHBOUR = """
import sys
for line in sys.stdin:
    taken = None
    taken = bytearray(b"x") * int(line)
    print(len(taken), flush=True)
"""


class Child:
    """A program in the control group."""

    def __init__(self, group: MemoryGroup, program: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            preexec_fn=group.join, env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])})

    def read(self) -> Any:
        line = self._process.stdout.readline()
        assert line, f"the program ended with {self._process.wait()}"
        return json.loads(line)

    def ask(self, line: object = "") -> Any:
        print(line, file=self._process.stdin, flush=True)
        return self.read()

    def ask_until(self, is_true: Callable[[Any], bool]) -> Any:
        end = time.monotonic() + HANG_SECONDS
        while not is_true(answer := self.ask()):
            assert time.monotonic() < end, answer
        return answer

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    try:
        made = memory_group(700 * MiB)
        with made as group:
            yield group
    except PyorchError as error:
        pytest.skip(str(error))


def test_another_program_gets_the_memory_and_the_text_stays_the_same(small_moe: Path, group: MemoryGroup) -> None:
    with Child(group, _NEIGHBOUR) as neighbour, Child(group, _PROGRAM, str(small_moe), "{}") as model:
        neighbour.ask(1)
        first = model.read()
        assert first["follows"] and not first["said"]
        for _ in range(2):
            free = model.ask()["free"]
            neighbour.ask(free - 30 * MiB)
            lower = model.ask_until(lambda now: now["said"] and "other programs need memory" in now["said"][-1])
            assert lower["used"] <= lower["budget"] < first["budget"] and str(group.directory) in lower["said"][-1]
            neighbour.ask(1)
            higher = model.ask_until(lambda now: "memory is free again" in now["said"][-1])
            assert higher["budget"] == first["budget"]
            assert first["text"] == lower["text"] == higher["text"]
        assert group.n_killed() == 0


def test_lossy_answers_do_not_depend_on_other_programs(small_moe: Path, group: MemoryGroup) -> None:
    lossy = json.dumps({"substitution": "mode=random,max_replaced=1"})
    with Child(group, _NEIGHBOUR) as neighbour, Child(group, _PROGRAM, str(small_moe), lossy) as model:
        neighbour.ask(1)
        first = model.read()
        neighbour.ask(first["free"] - 30 * MiB)
        for _ in range(20):
            now = model.ask()
            assert not now["follows"] and now["budget"] == first["budget"]


def test_a_budget_that_the_user_names_stays(small_moe: Path) -> None:
    with small_model(small_moe, "auto") as model, small_model(small_moe, "40%") as named:
        record = managed.find(model.llama.model)
        assert record.follows() and not managed.find(named.llama.model).follows()
        record.engine.set_budget(record.map.info.floor_bytes)
        assert not record.follows()
        record.set_budget(record.map.info.slots_bytes)
        assert record.follows()


def followers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "pyorch-budget"]


def no_follower_is_left() -> bool:
    for thread in followers():
        thread.join(HANG_SECONDS)
    return not followers()


def test_the_thread_ends_with_the_last_model(small_moe: Path) -> None:
    with small_model(small_moe, "auto"), small_model(small_moe, "auto"):
        assert len(followers()) == 1
    assert no_follower_is_left()


def test_a_freed_model_is_forgotten_although_its_budget_was_named(small_moe: Path) -> None:
    with small_model(small_moe, "auto") as model:
        managed.find(model.llama.model).is_automatic = False
    assert no_follower_is_left()


def test_beside_pinned_experts_the_budget_falls_as_far_as_it_can(
    small_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_model(small_moe, "auto") as model:
        record = managed.find(model.llama.model)
        most = record.map.info.slots_bytes
        for il, n_expert in record.engine.n_expert.items():
            record.engine.pin(il, range(n_expert // 2))
        no_memory = memory.MemoryLimit("a test", 64 * MiB, 0)
        monkeypatch.setattr(memory.MemoryLimits, "tightest", lambda _: no_memory)
        end = time.monotonic() + HANG_SECONDS
        while record.budget_bytes() > 0.7 * most:
            assert time.monotonic() < end, record.budget_bytes() / most
            time.sleep(0.05)
        assert record.budget_bytes() >= 0.5 * most


def test_without_free_descriptors_the_memory_is_unknown_and_the_budget_stays(small_moe: Path) -> None:
    with small_model(small_moe, "auto") as model:
        record = managed.find(model.llama.model)
        record.set_budget(record.map.info.floor_bytes)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            for look in (memory.memory_limit, memory.Resident.now, memory.MemoryLimits):
                with pytest.raises(OSError, match="Too many open files"):
                    look()
            time.sleep(1.5 * QUIET_SECONDS)
            assert record.budget_bytes() == record.map.info.floor_bytes
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        end = time.monotonic() + HANG_SECONDS
        while record.budget_bytes() == record.map.info.floor_bytes:
            assert time.monotonic() < end
            time.sleep(0.05)


def test_the_thread_says_why_a_budget_no_longer_follows(
    small_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = []
    monkeypatch.setattr(fatal, "notice", said.append)

    def fails(_: object) -> bool:
        raise RuntimeError("a bug\nin two lines")

    with small_model(small_moe, "auto"):
        monkeypatch.setattr(managed.ManagedModel, "follows", fails)
        assert no_follower_is_left()
        assert "follows free memory no longer: a bug\\nin two lines" in "".join(said)


def test_a_budget_of_a_request_is_not_changed_before_it_counts(small_moe: Path) -> None:
    with small_model(small_moe, "auto") as model:
        record = managed.find(model.llama.model)
        floor, tried = record.map.info.floor_bytes, []

        def try_to_use() -> None:
            tried.append(record.in_use.acquire(blocking=False))
            if tried[-1]:
                record.in_use.release()

        def set_budget(n_bytes: int) -> None:
            other = threading.Thread(target=try_to_use)
            other.start()
            other.join()
            managed.ManagedModel.set_budget(record, n_bytes)

        record.set_budget = set_budget
        Residency(record, Concurrency.of(record.map.layers, 1), local_only=False).change({"budget": floor})
        assert tried == [False] and record.budget_bytes() == floor and not record.follows()
