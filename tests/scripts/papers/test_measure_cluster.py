"""The parts of scripts.papers.dancemoe.measure that measure nothing; and the network itself, where one can be made."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from processes import HANG_SECONDS, is_alive

from pyorch.cluster.costs import Costs, ServerCosts
from scripts.papers.dancemoe import measure
from scripts.papers.dancemoe import measure_network as network_of
from scripts.papers.dancemoe.measure_load import TASKS, Requests, arrivals_of, write_prompts
from scripts.papers.dancemoe.measure_network import Network, NoNetwork
from scripts.papers.dancemoe.measure_report import paired
from scripts.papers.dancemoe.measure_setups import setups
from scripts.papers.dancemoe.simulator import Settings, Traffic, simulate
from scripts.papers.dancemoe.workload import Recorded, Replay, arrival_times

ROOT = Path(__file__).parents[3]


def _why_not() -> str:
    try:
        network_of.check_possible()
        subprocess.run(["ip", "netns", "add", f"pyorch-lab-probe-{os.getpid()}"], check=True, capture_output=True)
        subprocess.run(["ip", "netns", "del", f"pyorch-lab-probe-{os.getpid()}"], check=True, capture_output=True)
    except (NoNetwork, OSError, subprocess.CalledProcessError) as error:
        return f"no namespaces here: {error}"
    return ""


_WHY_NOT = _why_not()
needs_namespaces = pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT or "-")


def test_who_is_not_root_is_told_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert measure.main(["model.gguf", "-o", str(tmp_path / "out")]) == 2
    assert "network namespaces need Linux and root: run the program as root" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_unknown_part_is_told_so(capsys):
    with pytest.raises(SystemExit) as error:
        measure.main(["model.gguf", "-o", "out", "--parts", "placements,all"])
    assert error.value.code == 2 and '--parts: "all" is not known: costs, placements, ' in capsys.readouterr().err


def test_prompts_that_are_asked_were_not_known(tmp_path):
    files = write_prompts(tmp_path, 30, seed=1)
    prompts = {key: [json.loads(line)["prompt"] for line in path.read_text().splitlines()] for key, path in
               files.items()}
    for task in TASKS:
        assert len(prompts[task, "known"]) == len(prompts[task, "asked"]) == 30
        assert not set(prompts[task, "known"]) & set(prompts[task, "asked"])
    assert write_prompts(tmp_path, 30, seed=1) == files
    assert [json.loads(line)["prompt"] for line in files["facts", "asked"].read_text().splitlines()] == \
        prompts["facts", "asked"]


def test_users_ask_what_the_simulator_simulates():
    """Requests of one token, each with an expert of its own, and costs by which it is known which one was simulated."""
    n = 7
    tasks = [Requests(Recorded(np.arange(n, dtype=np.uint16).reshape(n, 1, 1), np.arange(n + 1), np.zeros(n, int), n),
                      [f"{task} {i}" for i in range(n)]) for task in range(3)]
    arrivals = arrivals_of("abc", tasks, every=2.0, seconds=60.0, seed=4, shift=30.0)
    simulated = []
    for server in range(3):
        rng = np.random.default_rng((4, server))
        times = arrival_times(rng, 0.5, 60.0)
        first, later = (Replay(tasks[(server + i) % 3].recorded, rng) for i in range(2))
        simulated.append(Traffic(times, first, later, 30.0))
    found = simulate(_costs(3), np.ones((3, 1, n), bool), simulated, 60.0, Settings())
    assert [arrival.time for arrival in arrivals] == found.arrival.tolist()
    assert ["abc".index(arrival.server) for arrival in arrivals] == found.server.tolist()
    for arrival, server, i in zip(arrivals, found.server, _counted(found.server)):
        source = simulated[server].later if arrival.time >= 30 else simulated[server].source
        expert = int(source.request(np.random.default_rng(), i)[0][0, 0, 0])
        assert arrival.prompt == f"{(server + (arrival.time >= 30)) % 3} {expert}"


def _answers(seconds: list[float], failed: int = -1) -> dict:
    """A round with a request every 10 seconds."""
    return {"answers": [{"time": 10.0 * i, "seconds": each, "error": "gone" if i == failed else ""}
                        for i, each in enumerate(seconds)]}


def test_latencies_are_compared_request_by_request():
    base = [_answers([1.0, 2.0, 4.0, 8.0]), _answers([8.0, 4.0, 2.0, 1.0])]
    half = [_answers([0.5, 1.0, 2.0, 4.0]), _answers([4.0, 2.0, 1.0, 0.5])]
    # All requests gain alike, so whichever are drawn the ratio is the same: without pairs it would range widely.
    assert paired(half, base) == pytest.approx((0.5, 0.5, 0.5))
    mixed = [_answers([0.5, 2.0, 4.0, 4.0]), _answers([8.0, 2.0, 2.0, 0.5])]
    ratio, low, high = paired(mixed, base)
    assert ratio == pytest.approx(23 / 30) and 0.5 < low < ratio < high < 1.0


def test_what_one_of_both_did_not_answer_is_not_compared():
    base, other = _answers([1.0, 1.0, 1.0], failed=1), _answers([3.0, 100.0, 2.0], failed=2)
    assert paired([other], [base]) == pytest.approx((3, 3, 3))
    assert paired([other], [base], begin=5.0) is None


def test_clusters_that_are_compared_have_names_of_their_own():
    compared = setups("placements", ["eplb", "dance"], ["last", "faster"])
    assert [(setup.algorithm, setup.read) for setup in compared] == [
        ("eplb", "last"), ("eplb", "faster"), ("dance", "last"), ("dance", "faster")]
    assert len({setup.name for setup in compared}) == len({setup.label for setup in compared}) == 4


def _costs(n: int) -> Costs:
    links = np.zeros((n, n))
    return Costs.of([ServerCosts()] * n, links, np.full((n, n), math.inf), np.ones(1), 1.0)


def _counted(servers: np.ndarray) -> list[int]:
    """Of each, how many of the same came before."""
    return [int((servers[:i] == server).sum()) for i, server in enumerate(servers)]


_PEER = """
import sys
import pyorch
from pyorch.sidecars.container import fingerprint
with pyorch.load(sys.argv[1], budget="100%", warm=False, n_ctx=64, n_threads=1) as model:
    print(model.engine.listen("token", fingerprint(model.map), "10.77.0.2", 9080), flush=True)
    sys.stdin.read()
"""

_ASKER = """
import sys
import pyorch
from pyorch.llama.context import Context
from pyorch.sidecars.container import fingerprint
with pyorch.load(sys.argv[1], budget="100%", warm=False, n_ctx=64, n_threads=1) as model:
    there = model.engine.connect("10.77.0.2", 9080, "token", fingerprint(model.map))
    for layer in model.map.layers:
        model.engine.set_placement(layer.il, [there] * layer.n_expert)
    with Context(model.llama.model, n_ctx=64, n_threads=1) as context:
        context.decode(list(range(8, 40)))
        print(model.engine.remote_stats(), flush=True)
        sys.stdin.readline()
        context.decode(list(range(8, 40)))
        print(model.engine.remote_stats(), flush=True)
"""


@needs_namespaces
def test_servers_in_namespaces_ask_each_other_until_one_is_killed(small_moe: Path):
    """Through links of 500 Mbit/s. Whoever was asked and is gone leaves the work to the one that asked."""
    def start(network: Network, name: str, code: str) -> subprocess.Popen:
        return subprocess.Popen(
            ["nsenter", f"--net=/run/netns/{network.tag}-{network.names.index(name)}", sys.executable, "-c", code,
             str(small_moe)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    with Network(["a", "b"], 500e6, 0, small_moe) as network:
        peer = start(network, "b", _PEER)
        assert peer.stdout.readline() == "9080\n"
        asker = start(network, "a", _ASKER)
        before = asker.stdout.readline()
        assert "slots=0" not in before and "fallback=0" in before
        assert network.kill("b") >= 1
        after, _ = asker.communicate("\n", timeout=HANG_SECONDS)
        assert asker.returncode == 0 and "fallback" in after
        assert peer.wait(HANG_SECONDS) == -signal.SIGKILL
        peer.stdin.close()
        peer.stdout.close()
    assert not list(Path("/run/netns").glob(f"{network.tag}*")) and not network.directory.exists()


_CRASH = """
import os, signal, sys
from pathlib import Path
from scripts.papers.dancemoe.measure_network import Network
network = Network(["a", "b"], 500e6, 0, Path("/")).__enter__()
sleeping = network.start("a", ["sleep", "1000"])
print(network.tag, sleeping.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@needs_namespaces
def test_after_a_crash_nothing_is_left():
    done = subprocess.run([sys.executable, "-c", _CRASH], cwd=ROOT, capture_output=True, text=True,
                          timeout=HANG_SECONDS)
    # Whoever takes away has this process's output, too: it has ended, as there is no more of that.
    tag, sleeping = done.stdout.split()
    assert not list(Path("/run/netns").glob(f"{tag}*")) and not Path(f"/tmp/{tag}").exists()
    assert not is_alive(sleeping)
