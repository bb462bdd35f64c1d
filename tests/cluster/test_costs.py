"""Files of costs: what is written is read again, what cannot be is one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pyorch.cluster.costs import KIND, CostsFile, ServerCosts, read_costs, write_costs
from pyorch.errors import FormatError, PyorchError

LATENCY, RATE = np.array([[0, 0.1], [0.2, 0]]), np.array([[np.inf, 100], [200, np.inf]])


def written(path: Path, **fields) -> Path:
    path.write_text(json.dumps({"kind": KIND, "version": 1, **fields}))
    return path


def test_what_is_written_is_read_again(tmp_path):
    costs = CostsFile(ServerCosts(layer=0.5), {"lab": ServerCosts(layer=0.5, row=0.25)},
                      {("clinic", "lab"): (50.0, 0.75)},
                      {"expert_bytes": [100.0, 200.0], "machines": [{"servers": ["clinic", "lab"], "cores": 2.0}]})
    write_costs(tmp_path / "costs.json", costs)
    assert read_costs(tmp_path / "costs.json") == costs
    write_costs(tmp_path / "costs.json", CostsFile(servers={}, links={}))
    assert read_costs(tmp_path / "costs.json") == CostsFile(servers={}, links={})


def test_what_is_not_there_is_the_default(tmp_path):
    path = written(tmp_path / "costs.json", server={"layer": 0.5}, servers={"lab": {"row": 0.25}})
    costs = read_costs(path).of(("clinic", "lab"), LATENCY, RATE, np.full(3, 77), 512.0)
    assert costs.layer.tolist() == [0.5, 0.5]
    assert costs.row.tolist() == [ServerCosts().row, 0.25]
    assert costs.expert_bytes.tolist() == [77] * 3
    assert (costs.request_bytes, costs.reply_bytes) == (512, 512)
    assert (costs.latency == LATENCY).all() and (costs.bytes_per_second == RATE).all()


def test_a_measured_link_replaces_the_clusters_in_its_direction(tmp_path):
    path = written(tmp_path / "costs.json",
                   links=[{"from": "lab", "to": "clinic", "bytes_per_second": 7, "latency": 0.5}])
    costs = read_costs(path).of(("clinic", "lab"), LATENCY, RATE, np.ones(1), 1.0)
    assert (costs.bytes_per_second[1, 0], costs.latency[1, 0]) == (7, 0.5)
    assert (costs.bytes_per_second[0, 1], costs.latency[0, 1]) == (100, 0.1)
    assert RATE[1, 0] == 200, "the argument stays as it was"


def test_costs_of_a_server_that_there_is_not_are_refused(tmp_path):
    with pytest.raises(PyorchError, match='costs of a server "c": the cluster has a, b'):
        read_costs(written(tmp_path / "costs.json", servers={"c": {}})).check_names(("a", "b"))


@pytest.mark.parametrize(("fields", "sentence"), [
    ({"version": 2}, "version 2"),
    ({"kind": "pyorch placement"}, "is not a file of costs"),
    ({"servr": {}}, '"servr" is not known'),
    ({"server": {"layers": 1}}, '"layers" is no cost'),
    ({"server": {"layer": "1"}}, "layer is '1', not a number"),
    ({"server": {"layer": -1}}, "not a number from 0 to 1e"),
    ({"server": {"layer": True}}, "not a number"),
    ({"server": {"layer": 10**400}}, "layer is 10{59}, not a number from 0 to 1e"),
    ({"servers": {"lab": {"row": float("nan")}}}, "server lab: row is nan"),
    ({"servers": []}, "servers is no object"),
    ({"links": {}}, "links are no list"),
    ({"links": [{"from": "a", "to": "b", "latency": 1}]}, "must have exactly the fields"),
    ({"links": [{"from": "a", "to": "b", "latency": 1, "bytes_per_second": 0}]}, "bytes_per_second is 0"),
])
def test_a_file_with_what_cannot_be_is_one_sentence(tmp_path, fields, sentence):
    with pytest.raises(FormatError, match=sentence) as error:
        read_costs(written(tmp_path / "costs.json", **fields))
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_what_is_no_json_is_one_sentence(tmp_path, content):
    (tmp_path / "costs.json").write_bytes(content)
    with pytest.raises(FormatError, match="is not a file of costs"):
        read_costs(tmp_path / "costs.json")
    with pytest.raises(FormatError, match="cannot be read"):
        read_costs(tmp_path)
