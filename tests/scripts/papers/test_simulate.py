"""scripts.papers.dancemoe.simulate: from traces and a cluster.toml to tables, JSON, CSV and pictures."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from pyorch.cluster.config import read_cluster
from pyorch.cluster.costs import CostsFile, ServerCosts
from pyorch.cluster.placement.placement import write_placement
from pyorch.cluster.placement.problem import Problem
from pyorch.errors import PyorchError
from pyorch.runtime.model_map import ModelMap
from pyorch.sidecars import container
from pyorch.traces.file import DECODE, TraceHeader, TraceWriter
from scripts.papers.dancemoe.baselines import place
from scripts.papers.dancemoe.simulate import main, with_costs
from scripts.papers.dancemoe.simulated_costs import Sizes
from scripts.papers.dancemoe.workload import draw_experts

CLUSTER = """
[network]
bandwidth = "500Mbit/s"
[[server]]
name = "clinic"
memory = "60%"
[[server]]
name = "lab"
memory = "60%"
"""


def write_trace(path: Path, seed: int, header: TraceHeader | None = None, n_requests: int = 6) -> Path:
    """Requests of 6 tokens, 4 of them decoded, that use some experts far more than others."""
    header = header or TraceHeader("made up", "made-up", (0, 1, 2), 16, 2, 64)
    rng = np.random.default_rng(seed)
    shares = np.stack([rng.permutation(np.arange(1.0, header.n_expert + 1) ** -1.5) for _ in header.layers])
    records = np.zeros(6 * n_requests, header.record_dtype())
    records["request"], records["position"] = np.divmod(np.arange(len(records)), 6)
    records["phase"] = np.where(records["position"] >= 2, DECODE, 0)
    records["experts"] = draw_experts(rng, shares / shares.sum(axis=1, keepdims=True), len(records),
                                      header.n_expert_used)
    with TraceWriter(path, header) as writer:
        writer.write(records)
    return path


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    """The options that say what is simulated."""
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    traces = [f"{name}={write_trace(tmp_path / f'{name}.trace', i)}" for i, name in enumerate(("clinic", "lab"))]
    return ["--cluster", str(tmp_path / "cluster.toml"), "--trace", *traces]


def report(capsys: pytest.CaptureFixture[str], *argv: object) -> dict:
    assert main([*map(str, argv), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert main([*map(str, argv)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1, printed.err
    return printed.err.removeprefix("simulate: error: ").strip()


def test_each_combination_is_a_row_and_all_have_the_same_requests(capsys, given):
    found = report(capsys, *given, "--algorithm", "dance,uniform", "--bandwidth", "100,1000", "--servers", "2,5",
                   "--migration", "off", "--duration", 60, "--arrivals", "poisson:2s")
    rows = found["rows"]
    assert [(row["algorithm"], row["n_servers"], row["megabits"]) for row in rows] == [
        (algorithm, n, rate) for algorithm in ("dance", "uniform") for n in (2, 5) for rate in (100, 1000)]
    for n in (2, 5):
        assert len({row["n_requests"] for row in rows if row["n_servers"] == n}) == 1
    dance, uniform = rows[0], rows[4]
    assert dance["local_ratio"] > uniform["local_ratio"]
    assert dance["latency_s"] < uniform["latency_s"]
    assert [server["name"] for server in rows[2]["servers"]] == ["clinic", "lab", "clinic.2", "lab.2", "clinic.3"]
    for row in rows:
        assert sum(server["n_requests"] for server in row["servers"]) == row["n_requests"] > 0


def test_with_a_shift_migration_brings_the_local_ratio_back(capsys, given, tmp_path):
    found = report(capsys, *given, "--migration", "on,off", "--duration", 400, "--interval", 50, "--arrivals",
                   "poisson:1", "--shift", "rotate", "--cost", "expert_bytes=1e4", "--csv", tmp_path / "a.csv",
                   "--plot", tmp_path / "plots")
    on, off = found["rows"]
    assert found["shift_s"] == 200
    assert off["changes"] == [] and off["local_over_time"][-1] < off["local_over_time"][5] - 0.1
    assert on["local_over_time"][-1] > off["local_over_time"][-1] + 0.1
    assert on["after_s"] < off["after_s"]
    change = next(change for change in on["changes"] if change["adopted"] and change["time_s"] > 200)
    assert change["candidate_s"] + change["migration_s"] < change["current_s"]
    assert change["n_moves"] > 0 and change["finished_s"] > change["time_s"]
    with (tmp_path / "a.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 2 * 2 * 40  # simulations, servers, pieces of time
    assert sum(int(line["n_requests"]) for line in lines) == on["n_requests"] + off["n_requests"]
    assert (tmp_path / "plots" / "over-time.png").stat().st_size > 1000


def test_a_table_is_printed_and_sizes_are_drawn(capsys, given, tmp_path):
    assert main([*given, "--servers", "2,4", "--bandwidth", "100,500", "--duration", "30", "--plot",
                 str(tmp_path / "plots"), "--shift", "lab=" + given[3].partition("=")[2]]) == 0
    printed = capsys.readouterr().out
    assert "algorithm" in printed and " after " in printed
    assert str(tmp_path / "plots" / "scaling.png") in printed


def test_fitted_routing_and_a_file_of_costs(capsys, given, tmp_path):
    (tmp_path / "costs.json").write_text(json.dumps({
        "kind": "pyorch file of costs", "version": 1, "server": {"layer": 1.0}, "servers": {"lab": {"layer": 2.0}}}))
    found = report(capsys, *given, "--routing", "fitted", "--costs", tmp_path / "costs.json", "--arrivals",
                   "poisson:100s", "--duration", 2000, "--cost", "expert=0", "row=0")
    clinic, lab = (server["latency_s"] for server in found["rows"][0]["servers"])
    assert clinic > 5 * 3 * 1.0 and lab > 5 * 3 * 2.0  # a step of prompt and 4 more, 3 layers


def test_servers_on_one_machine_wait_for_its_cores_and_more_of_them_are_on_more_machines(capsys, given, tmp_path):
    fields = {"kind": "pyorch file of costs", "version": 1, "server": {"layer": 0.02, "step": 0.0}}
    for name, machines in (("own", []), ("shared", [{"servers": ["clinic", "lab"], "cores": 1}])):
        (tmp_path / f"{name}.json").write_text(json.dumps({**fields, "machines": machines}))
    own, shared = (report(capsys, *given, "--costs", tmp_path / f"{name}.json", "--arrivals", "poisson:1", "--duration",
                          60, "--servers", "2,4", "--migration", "off")["rows"] for name in ("own", "shared"))
    for one, other in zip(own, shared):
        assert other["latency_s"] > 1.2 * one["latency_s"] > 1.2 * 5 * 3 * 0.02
        assert other["n_requests"] == one["n_requests"]
    assert shared[1]["latency_s"] < 2 * shared[0]["latency_s"]  # and not 4 servers on one core


def test_a_placement_that_was_written_is_the_one_in_the_beginning(capsys, small_moe, tmp_path):
    (tmp_path / "cluster.toml").write_text(f'model = "{small_moe}"\n{CLUSTER}')
    cluster = read_cluster(tmp_path / "cluster.toml")
    with ModelMap(small_moe) as model_map:
        layers = tuple(layer.il for layer in model_map.decoded_layers)
        header = TraceHeader(container.fingerprint(model_map), model_map.info.arch, layers, 64, 6, 128)
        traces = [f"{name}={write_trace(tmp_path / f'{name}.trace', i, header)}"
                  for i, name in enumerate(cluster.names)]
        problem = Problem.of_model(cluster, model_map, np.ones((2, len(layers), 64)))
        placement = place(problem, "uniform")
        write_placement(tmp_path / "plan.json", placement, model_map)
    given = ["--cluster", tmp_path / "cluster.toml", "--trace", *traces, "--migration", "off"]
    placed = report(capsys, *given, "--placement", tmp_path / "plan.json")["rows"][0]["local_ratio"]
    assert 0.4 < placed < 0.6 < report(capsys, *given)["rows"][0]["local_ratio"]
    assert "leave --servers out" in refused(capsys, *given, "--placement", tmp_path / "plan.json", "--servers", 4)


@pytest.mark.parametrize(("options", "sentence"), [
    (("--algorithm", "best"), 'algorithm "best" is not known'),
    (("--algorithm", "dance,dance"), "names the same twice"),
    (("--migration", "maybe"), "neither on nor off"),
    (("--arrivals", "1"), "not understood"),
    (("--arrivals", "poisson:1e6"), "for 1800 seconds at 2 servers are more than 10000000 requests"),
    (("--cost", "expert_bytes=0"), "an expert has 1 byte at least"),
    (("--servers", "0"), "--servers: "),
    (("--bandwidth", "fast"), "--bandwidth: "),
    (("--cost", "row"), "not of the form NAME=VALUE"),
    (("--cost", "rows=1"), 'no cost "rows"'),
    (("--shift-at", "5"), "name the later workload with --shift"),
    (("--shift", "rotate", "--shift-at", "1e6"), "after the end"),
    (("--shift", "other=x"), 'no server "other"'),
    (("--trace", "lab"), "SERVER=FILE"),
    (("--trace", "lab=x"), "server lab twice"),
    (("--placement", "cluster.toml"), "cannot be read"),
    (("--costs", "absent.json"), "cannot be read: No such file or directory: `pyorch cluster measure` makes one"),
    (("--duration", "0"), "not a number above 0"),
])
def test_what_cannot_be_is_one_sentence(capsys, given, options, sentence):
    assert sentence in refused(capsys, *given, *options)


def test_costs_of_a_server_that_is_not_there_are_refused(capsys, given, tmp_path):
    costs = {"kind": "pyorch file of costs", "version": 1, "servers": {"labb": {"layer": 2.0}}}
    (tmp_path / "costs.json").write_text(json.dumps(costs))
    sentence = refused(capsys, *given, "--costs", tmp_path / "costs.json")
    assert sentence == 'there are costs of a server "labb": the cluster has clinic, lab'


def test_traces_must_be_there_and_of_one_model(capsys, given, tmp_path):
    assert "server lab has no trace" in refused(capsys, *given[:-1])
    other = write_trace(tmp_path / "other.trace", 3, TraceHeader("another", "made-up", (0, 1, 2), 16, 2, 64))
    assert "another model" in refused(capsys, *given[:-1], f"lab={other}")
    assert "names no model" in refused(capsys, *given, "--placement", tmp_path / "cluster.toml")


def test_too_little_memory_and_no_disk_is_one_sentence(capsys, given, tmp_path):
    (tmp_path / "cluster.toml").write_text(CLUSTER.replace("60%", "20%"))
    assert "no server has a needed expert, and no disk" in refused(capsys, *given, "--cost", "disk_bytes_per_second=0")
    assert report(capsys, *given, "--duration", 60)["rows"][0]["n_read"] > 0


def test_given_costs_are_of_all_servers():
    costs = with_costs(CostsFile(servers={"lab": ServerCosts(layer=2.0)}), {"row": 3.0, "expert_bytes": 9.0})
    assert costs.server == ServerCosts(row=3.0)
    assert costs.servers == {"lab": ServerCosts(layer=2.0, row=3.0)}
    assert Sizes.of(costs) == Sizes(expert=9.0)
    with pytest.raises(PyorchError, match='no cost "rows": disk_bytes_per_second, disk_latency, expert, '):
        with_costs(CostsFile(), {"rows": 1.0})
