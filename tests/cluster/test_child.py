"""What a process that serves for a cluster answers its actor."""

from __future__ import annotations

import signal
import subprocess
import sys
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from models import small_model
from processes import HANG_SECONDS

from pyorch.cluster.actor import Server
from pyorch.cluster.child import Serving
from pyorch.cluster.members import Job
from pyorch.cluster.peers import Peers
from pyorch.cluster.placement.placement import ABSENT, Placement
from pyorch.sidecars.container import fingerprint

_SERVING = """
import sys
from multiprocessing.connection import Connection
from pyorch.cluster.child import Serving
from pyorch.cluster.members import Job

job = Job("a", "absent.gguf", "127.0.0.1", 1, 1, "40%", "f" * 64, "token")
Serving(Connection(int(sys.argv[1])), job).obey()
"""


_SLOW = """
import sys, threading
from multiprocessing.connection import Connection
from pyorch.cluster.child import Serving

class Slow(Serving):
    done = threading.Event()

    def connect(self):
        return self.done.wait()

    def counters(self):
        self.done.set()

Slow(Connection(int(sys.argv[1])), None).obey()
"""


def test_what_takes_long_holds_up_no_other_answer() -> None:
    ours, theirs = Pipe()
    with theirs:
        process = subprocess.Popen([sys.executable, "-c", _SLOW, str(theirs.fileno())], pass_fds=(theirs.fileno(),))
    with ours:
        for number, what in enumerate(("connect", "counters")):
            ours.send((number, what, {}))
        said = []
        for _ in range(2):
            assert ours.poll(HANG_SECONDS)
            said.append(ours.recv())
        assert sorted(said) == [("answer", 0, True), ("answer", 1, None)]
    assert process.wait() == -signal.SIGTERM


def test_what_cannot_be_answered_is_said_and_the_process_still_ends_with_its_actor() -> None:
    ours, theirs = Pipe()
    with theirs:
        process = subprocess.Popen([sys.executable, "-c", _SERVING, str(theirs.fileno())], pass_fds=(theirs.fileno(),),
                                   stderr=subprocess.DEVNULL)
    with ours:
        for number, (what, arguments, sentence) in enumerate((
            ("dance", {}, "AttributeError: "), ("pin", {"hard": True}, "TypeError: "), ("pin", {}, "has no plan"),
            ("disk_bytes_per_second", {}, "absent.gguf: no such file"),
        )):
            ours.send((number, what, arguments))
            assert ours.poll(HANG_SECONDS)
            kind, answered, refused = ours.recv()
            assert (kind, answered) == ("refused", number) and sentence in refused
    assert process.wait() == -signal.SIGTERM


def test_of_a_plan_that_the_memory_is_for_nothing_is_said_and_of_a_larger_one_by_how_much(small_moe: Path) -> None:
    with small_model(small_moe, "50%") as model:
        layers, digest = model.map.layers, fingerprint(model.map)
        serving = Serving(None, Job("a", str(small_moe), "127.0.0.1", 1, 1, "50%", digest, "token"))
        serving._engine, serving._peers = model.engine, Peers(model.engine, "a", "token", digest)
        n_fitting = model.engine.stats().budget_bytes // sum(layer.expert_bytes for layer in layers)
        for n_held, says in ((n_fitting, ""), (n_fitting + 1, "its experts of the plan take ")):
            device = np.full((1, len(layers), 64), ABSENT, np.int16)
            device[0, :, :n_held] = 0
            serving._peers.follow(Placement(("a",), tuple(layer.il for layer in layers), (64,) * len(layers), device))
            n_kept, reason = serving.pin()
            assert 0 < n_kept < n_fitting * len(layers)  # a layer needs some room at once
            assert reason.startswith(says) and bool(reason) == bool(says)


@pytest.mark.parametrize(("has_pack", "fetched"), [(False, [(1, 2)]), (True, [])])
def test_only_what_is_taken_in_place_of_a_read_is_fetched(has_pack: bool, fetched: list[tuple[int, int]]) -> None:
    serving = Serving(None, None)
    resident = np.array([True, True, False])
    serving._engine = SimpleNamespace(has_pack=has_pack, residency=lambda il: SimpleNamespace(resident=resident))
    serving._peers = SimpleNamespace(placement=SimpleNamespace(layers=(0, 3)))
    asked = []
    server = SimpleNamespace(
        _fetch=lambda *expert: asked.append(expert),
        _ask=lambda what, experts=(), **arguments: serving.lacking(experts) if what == "lacking" else "")
    Server.hold(server, [(1, 1), (1, 2)], [], "b")
    assert asked == [(*expert, "b") for expert in fetched]
