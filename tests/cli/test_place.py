"""`pyorch place`: traces or counts, and a cluster.toml, to a placement."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from pyorch.cli import main
from pyorch.cluster.activations import count_traces, read_counts, write_counts
from pyorch.cluster.placement.placement import read_placement
from pyorch.errors import FormatError
from pyorch.runtime.model_map import ModelMap
from pyorch.sidecars import container
from pyorch.traces.file import Trace, TraceHeader, TraceWriter

CLUSTER = """
model = "{model}"
[[server]]
name = "clinic"
memory = "30%"
[[server]]
name = "lab"
memory = ["25%", "25%"]
[[server]]
name = "attic"
memory = "50%"
"""


@pytest.fixture(scope="module")
def header(small_moe: Path) -> TraceHeader:
    with ModelMap(small_moe) as model_map:
        layers = model_map.decoded_layers
        return TraceHeader(container.fingerprint(model_map), model_map.info.arch, tuple(layer.il for layer in layers),
                           layers[0].n_expert, model_map.info.n_expert_used, n_embd=0)


def write_trace(path: Path, header: TraceHeader, seed: int, n_tokens: int = 300) -> Path:
    """Of a task of its own: some experts are needed far more often than others."""
    rng = np.random.default_rng(seed)
    records = np.zeros(n_tokens, header.record_dtype())
    records["position"] = np.arange(n_tokens)
    scores = 2 * rng.normal(size=(len(header.layers), header.n_expert))
    scores = scores + rng.gumbel(size=(n_tokens, *scores.shape))
    records["experts"] = np.argsort(-scores, axis=2)[:, :, : header.n_expert_used]
    with TraceWriter(path, header) as writer:
        writer.write(records)
    return path


@pytest.fixture(scope="module")
def traces(header: TraceHeader, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("traces")
    return {name: write_trace(directory / f"{name}.trace", header, seed) for seed, name in enumerate(("clinic", "lab"))}


@pytest.fixture
def cluster(small_moe: Path, tmp_path: Path) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER.format(model=small_moe))
    return path


@pytest.fixture
def placed(cluster: Path, traces: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Runs the command with the traces; returns what --json prints."""

    def run(*args: object) -> dict:
        named = [f"{name}={path}" for name, path in traces.items()]
        command = ["place", "--cluster", cluster, "--trace", *named, "-o", tmp_path / "plan.json", "--json", *args]
        assert main([str(word) for word in command]) == 0
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def refused(cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Runs the command, which must fail; returns its sentence."""

    def run(*args: object) -> str:
        output = () if "-o" in args else ("-o", tmp_path / "plan.json")
        command = ["place", "--cluster", cluster, *output, *args]
        assert main([str(word) for word in command]) == 2
        assert not (tmp_path / "plan.json").exists()
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.count("\n") == 1
        return printed.err.removeprefix("pyorch: error: ").strip()

    return run


def test_a_placement_is_written_that_holds_every_expert_and_keeps_memory(
    placed, small_moe: Path, tmp_path: Path
) -> None:
    report = placed()
    assert (report["algorithm"], report["n_experts"], report["n_uncovered"]) == ("dance", 512, 0)
    with ModelMap(small_moe) as model_map:
        placement = read_placement(tmp_path / "plan.json", model_map)
        slot_bytes = model_map.decoded_layers[0].slot_bytes
    assert placement.servers == ("clinic", "lab", "attic") and placement.n_uncovered == 0
    for row, held in zip(report["servers"], placement.held):
        assert row["n_experts"] == held.sum() and row["used"] == held.sum() * slot_bytes <= row["memory"]
        assert [layer["n_experts"] for layer in row["layers"]] == held.sum(axis=1).tolist()
    assert [row["n_devices"] for row in report["servers"]] == [1, 2, 1]
    lab, attic = report["servers"][1:]
    assert 0 < lab["local_ratio"] < 1 and attic["local_ratio"] is None  # the attic has no users of its own
    assert report["remote"] == pytest.approx(1 - report["local_ratio"])


def test_a_check_judges_by_tokens_that_were_not_placed_by(placed, small_moe: Path, tmp_path: Path) -> None:
    counts = tmp_path / "counts.json"
    dance = placed("--check", "--save-counts", counts)
    with ModelMap(small_moe) as model_map:  # what is kept is of both halves
        assert (read_counts(counts, model_map).counts.sum(axis=2) == 300 * 6).all()
    assert dance["checked_ratio"] != dance["local_ratio"]
    assert dance["servers"][0]["checked_ratio"] == pytest.approx(dance["servers"][0]["local_ratio"], abs=0.1)


def test_counts_serve_as_well_as_traces(placed, cluster: Path, small_moe: Path, tmp_path: Path, capsys) -> None:
    by_traces = placed("--save-counts", tmp_path / "counts.json")
    with ModelMap(small_moe) as model_map:
        placement = read_placement(tmp_path / "plan.json", model_map)
    command = ["place", "--cluster", cluster, "--counts", tmp_path / "counts.json", "-o", tmp_path / "plan.json",
               "--json"]
    assert main([str(word) for word in command]) == 0
    assert json.loads(capsys.readouterr().out)["local_ratio"] == pytest.approx(by_traces["local_ratio"])
    with ModelMap(small_moe) as model_map:
        np.testing.assert_array_equal(read_placement(tmp_path / "plan.json", model_map).held, placement.held)
        counts = read_counts(tmp_path / "counts.json", model_map)
    assert counts.servers == ("clinic", "lab") and (counts.counts.sum(axis=2) == 300 * 6).all()


def test_several_traces_of_a_server_are_added_up_and_parts_make_a_whole(
    small_moe: Path, traces: dict[str, Path]
) -> None:
    clinic, lab = (Trace(path) for path in traces.values())
    with ModelMap(small_moe) as model_map:
        both = count_traces({"a": [clinic, lab]}, model_map).counts[0]
        each = count_traces({"a": [clinic], "b": [lab]}, model_map).counts
        halves = [count_traces({"a": [clinic]}, model_map, part).counts[0] for part in ((0, 0.5), (0.5, 1))]
    np.testing.assert_array_equal(both, each.sum(axis=0))
    np.testing.assert_array_equal(halves[0] + halves[1], each[0])
    expert = int(clinic.records["experts"][0, 3, 0])
    assert each[0, 3, expert] == (clinic.records["experts"][:, 3] == expert).sum() > 0


def test_people_get_tables(
    cluster: Path, traces: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["place", "--cluster", cluster, "--trace", f"lab={traces['lab']}", "--explain", "--check",
               "-o", tmp_path / "plan.json"]
    assert main([str(word) for word in command]) == 0
    shown = capsys.readouterr().out
    assert "3, with memory for 1.30 times all experts" in shown and "of those in the second halves" in shown
    layers = shown.partition("experts of a layer on each server")[2].splitlines()[3:11]
    assert [line.split()[0] for line in layers] == [str(il) for il in range(8)]
    assert shown.endswith(f"{tmp_path}/plan.json\n")


def test_memory_for_a_part_of_the_experts_has_to_be_asked_for(
    refused, placed, cluster: Path, traces: dict[str, Path]
) -> None:
    cluster.write_text(cluster.read_text().replace("50%", "0%"))
    assert refused("--trace", f"lab={traces['lab']}").startswith("103 of 512 experts have no place: the servers have ")
    report = placed("--partial")
    assert report["n_uncovered"] == 103 and sum(row["n_experts"] for row in report["servers"]) == 409


def test_what_does_not_fit_is_refused(
    refused, header: TraceHeader, traces: dict[str, Path], cluster: Path, small_moe: Path, tmp_path: Path
) -> None:
    lab = traces["lab"]
    assert refused().startswith("who activates what is read from --trace")
    assert "give one of the two" in refused("--trace", f"lab={lab}", "--counts", lab)
    assert refused("--trace", lab) == f'--trace "{lab}" is not of the form SERVER=FILE'
    assert refused("--trace", f"cellar={lab}") == f'{cluster} has no server "cellar": it has clinic, lab, attic'
    assert refused("--trace", "lab=absent.trace") == "absent.trace cannot be read: No such file or directory"
    assert "is not a trace" in refused("--trace", f"lab={cluster}")
    assert refused("--counts", cluster) == (
        f"{cluster} is not a count of activations: `pyorch place --save-counts` makes one")
    assert "--check and --save-counts need traces" in refused("--counts", cluster, "--check")
    assert "is a file that is read: name another" in refused("--trace", f"lab={lab}", "-o", lab)
    assert "is the model itself" in refused("--trace", f"lab={lab}", "-o", small_moe)
    assert "cannot hold both" in refused("--trace", f"lab={lab}", "--save-counts", tmp_path / "plan.json")
    assert "does not exist" in refused("--trace", f"lab={lab}", "-o", tmp_path / "absent" / "plan.json")

    other = write_trace(tmp_path / "other.trace", dataclasses.replace(header, fingerprint="0" * 64), 0)
    assert "was recorded with another model" in refused("--trace", f"lab={other}")
    fewer = write_trace(tmp_path / "fewer.trace", dataclasses.replace(header, layers=header.layers[1:]), 0)
    assert refused("--trace", f"lab={fewer}") == f"{fewer} has no layer 0: record it with pyorch profile"
    short = write_trace(tmp_path / "short.trace", header, 0, n_tokens=1)
    assert refused("--trace", f"lab={short}") == f"{short} holds too few tokens: 1"
    many = write_trace(tmp_path / "many.trace", dataclasses.replace(header, n_expert=999), 0)
    assert "is damaged: it names expert" in refused("--trace", f"lab={many}")

    cluster.write_text(cluster.read_text().replace("model =", "# model ="))
    assert f"{cluster} names no model" in refused("--trace", f"lab={lab}")


@pytest.mark.parametrize("change", [
    {"fingerprint": "0"}, {"version": 2}, {"kind": "pyorch plan"}, {"layers": [0]}, {"servers": []}, {"servers": None},
    {"servers": [{"name": "lab"}]}, {"servers": [{"name": "lab", "counts": [[1] * 64] * 7}]},
    {"servers": [{"name": "lab", "counts": [[1] * 63] * 8}]}, {"servers": [{"name": "lab", "counts": [[-1] * 64] * 8}]},
    {"servers": [{"name": "lab", "counts": [["1"] * 64] * 8}]}, {"servers": [{"name": 3, "counts": [[1] * 64] * 8}]},
    {"servers": [{"name": "lab", "counts": [[1e999] * 64] * 8}]},
    {"servers": [{"name": "lab", "counts": [[10**400] * 64] * 8}]},
    {"servers": [{"name": "lab", "counts": [[1.7e308] * 64] * 8}]},
    {"servers": [{"name": "lab", "counts": [[1] * 64] * 8}] * 2},
])
def test_counts_of_another_model_and_damaged_ones_are_refused(
    change: dict, small_moe: Path, traces: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "counts.json"
    with ModelMap(small_moe) as model_map:
        write_counts(path, count_traces({"lab": [Trace(traces["lab"])]}, model_map), model_map)
        read_counts(path, model_map)
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        with pytest.raises(FormatError) as error:
            read_counts(path, model_map)
    assert str(path) in str(error.value)


def test_placements_of_another_model_and_damaged_ones_are_refused(placed, small_moe: Path, tmp_path: Path) -> None:
    placed()
    path = tmp_path / "plan.json"
    value = json.loads(path.read_text())
    with ModelMap(small_moe) as model_map:
        for change, sentence in (({"fingerprint": "0"}, "was made for another model"), ({"layers": [7]}, "is damaged"),
                                 ({"n_experts": [63] * 8}, "is damaged"), ({"kind": "x"}, "is not a placement")):
            path.write_text(json.dumps(value | change))
            with pytest.raises(FormatError, match=sentence):
                read_placement(path, model_map)
