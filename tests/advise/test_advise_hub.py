"""Advice before the download: what is read of a repository, what is recommended, and what is refused."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ggufs import split, write_dense_model, write_moe_model
from hub_server import HubServer, Repository
from models import CHECKPOINT
from processes import HANG_SECONDS, pyorch

from pyorch.advise import comparison, probe, stand_in
from pyorch.advise.comparison import MEASURED, SCALED, Choice, recommend, settled
from pyorch.bench.job import ENGINE, Config, Job
from pyorch.bench.rounds import measure_once
from pyorch.cli import main
from pyorch.hub import headers, ranges
from pyorch.hub.download import Hub
from pyorch.hub.headers import opened
from pyorch.hub.reference import Reference
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.settings import Settings
from pyorch.sizes import KiB, MiB
from scripts.model_headers import Header, Types, around, experts, qwen3

# What else would be measured; nothing in these tests is about that.
GIVEN = ("--compute-ms", "20:5", "--read-bandwidth", "1GB/s", "--device", "none", "--prompt-tokens", "8")
MEMORY = ("--memory", "2GiB")
KINDS = {"Q2_K": Types.Q2_K, "Q4_K_M": Types.Q4_K, "Q8_0": Types.Q8_0}
N_WORDS = 30_000


def write_model(path: Path, kind: Types, word: str = "word") -> Path:
    """Writes a model of holes: 2 layers of 16 experts, and a vocabulary of a MiB."""
    header = Header(path, "olmoe", 2, 1024, 8, 8, 4096)
    header.experts(16, 2, 4096)
    header.writer.add_tokenizer_model("gpt2")
    header.writer.add_tokenizer_pre("gpt-2")
    header.writer.add_token_list([f"{word}{i}" for i in range(N_WORDS)])
    header.writer.add_token_types([1] * N_WORDS)
    header.writer.add_token_merges([f"{word} {i}" for i in range(N_WORDS - 100)])
    header.writer.add_eos_token_id(0)
    header.writer.add_file_type(int(kind))
    around(header, N_WORDS, 1024, kind, kind)
    for il in range(2):
        for name in ("attn_norm", "attn_q_norm", "attn_k_norm", "ffn_norm"):
            header.add(f"blk.{il}.{name}.weight", Types.F32, 1024)
        for name in ("q", "k", "v", "output"):
            header.add(f"blk.{il}.attn_{name}.weight", kind, 1024, 1024)
        experts(header, il, 16, 4096, 1024, kind, kind)
    header.close()
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: write_model(folder / f"big-{name}.gguf", kind) for name, kind in KINDS.items()}


@pytest.fixture
def server(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    files: dict[str, bytes | Path] = {path.name: path for path in models.values()}
    repositories = {"org/big": Repository({**files, "README.md": b"#"}), "org/gated": Repository(files, gated="files")}
    monkeypatch.setattr(ranges, "SAMPLE_BYTES", MiB)
    monkeypatch.setattr(ranges, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    with HubServer(repositories).running() as server:
        monkeypatch.setattr("pyorch.hub.download.Hub", lambda: Hub(server.endpoint, tmp_path / "cache"))
        yield server


def header_bytes(path: Path) -> int:
    """The bytes of a header, up to its weights: what else a file has is holes."""
    return len(beginning(path, 4 * MiB).rstrip(b"\0"))


def beginning(path: Path, n_bytes: int) -> bytes:
    with path.open("rb") as file:
        return file.read(n_bytes)


@pytest.fixture
def advise(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict]:
    def run(name: str, *options: str) -> dict:
        memory = () if "--memory" in options else MEMORY
        assert main(["advise", name, *GIVEN, *memory, "--json", *options]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    def run(name: str) -> str:
        assert main(["advise", name, *GIVEN, *MEMORY]) == 2
        said = capsys.readouterr()
        assert said.out == "" and said.err.startswith("pyorch: error: ") and said.err.count("\n") == 1, said.err
        return said.err

    return run


def test_the_files_of_a_repository_are_compared_by_their_headers(
    server: HubServer, models: dict[str, Path], advise, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = advise("hf:org/big")
    # All reach the rate and all fit: the most bits.
    assert said["name"] == "hf:org/big:Q8_0" and "the most bits a weight" in said["reason"]
    assert [one["name"] for one in said["files"]] == [f"hf:org/big:{name}" for name in KINDS]
    assert [one["n_bytes"] for one in said["files"]] == [path.stat().st_size for path in models.values()]
    assert [round(one["bits"], 1) for one in said["files"]] == [2.6, 4.5, 8.5]
    assert said["advice"]["command"].startswith("pyorch run hf:org/big:Q8_0 --ctx 4096")
    assert said["download"]["n_bytes"] == models["Q8_0"].stat().st_size and said["download"]["enough"]
    assert said["download"]["sampled_bytes"] == MiB and "the connection" in said["measured"]
    # One vocabulary of three, and little else. A file alone has two hundred times as much.
    longest = max(map(header_bytes, models.values()))
    assert said["header_bytes"] < 2 * longest + 6 * ranges.FIRST_BYTES
    assert server.n_sent == said["header_bytes"] + MiB < models["Q2_K"].stat().st_size / 10
    assert not (tmp_path / "cache").exists() and not list(tmp_path.rglob("*.part"))
    assert main(["advise", "hf:org/big", *GIVEN, *MEMORY]) == 0
    out = capsys.readouterr().out
    assert "recommended: hf:org/big:Q8_0, because it has the most bits" in out
    assert "over one connection" in out and "enough" in out and "run it with: pyorch run hf:org/big:Q8_0" in out
    table = out[: out.index("recommended")].splitlines()
    assert "in memory" in table[0] and max(map(len, table)) <= 80


def test_advice_about_a_header_is_that_about_the_file(server: HubServer, models: dict[str, Path], advise) -> None:
    there, here = advise("hf:org/big:Q4_K_M", "--budget", "30%"), advise(str(models["Q4_K_M"]), "--budget", "30%")
    for name in ("arch", "memory", "context_bytes", "auto_bytes", "estimates", "useful"):
        assert there["advice"][name] == here[name], name
    assert there["files"] == [] and there["others"] == 2
    assert there["advice"]["command"] == here["command"].replace(str(models["Q4_K_M"]), "hf:org/big:Q4_K_M")
    assert str(models["Q4_K_M"].parent) not in json.dumps(there)


def test_a_budget_decides_what_streams(server: HubServer, advise) -> None:
    files = {one["name"].partition("big:")[2]: one for one in advise("hf:org/big", "--budget", "250MiB")["files"]}
    assert [one["all_in_memory"] for one in files.values()] == [True, True, False]
    assert files["Q8_0"]["decode_rate"] < files["Q2_K"]["decode_rate"]
    assert advise("hf:org/big", "--budget", "20MiB")["files"][2]["decode_rate"] is None  # below its floor


def headers_of(server: HubServer, name: str, directory: Path) -> tuple[list[Path], int]:
    """The files that headers are written to, and the bytes that came for them."""
    hub, reference = Hub(server.endpoint, directory / "cache"), Reference.parse(name)
    with opened(hub, reference, hub.listing(reference, print)) as repository:
        paths = [repository.open(offer, lambda *_: None) for offer in repository.offers()]
        for path in paths:
            path.rename(directory / path.name)
        return [directory / path.name for path in paths], repository.n_fetched


def test_a_header_comes_whole_whether_its_vocabulary_is_read_or_that_of_another_file(
    server: HubServer, models: dict[str, Path], tmp_path: Path
) -> None:
    other = write_model(tmp_path / "other-Q6_K.gguf", Types.Q6_K, word="work")
    longer = write_model(tmp_path / "longer-Q5_K.gguf", Types.Q5_K, word="wordy")
    server.repositories["org/mixed"] = Repository({path.name: path for path in (*models.values(), other, longer)})
    (tmp_path / "out").mkdir()
    paths, n_fetched = headers_of(server, "hf:org/mixed", tmp_path / "out")
    sources = {path.name: path for path in (*models.values(), other, longer)}
    for path in paths:
        length = header_bytes(sources[path.name])
        assert beginning(path, length) == beginning(sources[path.name], length)
        assert path.stat().st_size == sources[path.name].stat().st_size and path.stat().st_blocks * 512 < 4 * MiB
    assert n_fetched < 3 * 2 * length  # of five files, two were not read whole


def test_a_vocabulary_that_only_begins_alike_is_read_itself(server: HubServer, tmp_path: Path) -> None:
    """As many words, alike for 4 KiB, and longer then: what was borrowed does not end where it should."""
    first, second = tmp_path / "a-Q4_K.gguf", tmp_path / "b-Q8_0.gguf"
    for path, word in ((first, "w"), (second, "www")):
        header = Header(path, "olmoe", 1, 256, 4, 4, 512)
        header.experts(8, 2, 256)
        header.writer.add_token_list([f"word{i}" if i < 5000 else f"{word}{i}" for i in range(9000)])
        around(header, 9000, 256, Types.F16, Types.F16)
        experts(header, 0, 8, 256, 256, Types.F16, Types.F16)
        header.close()
    server.repositories["org/alike"] = Repository({path.name: path for path in (first, second)})
    (tmp_path / "out").mkdir()
    for source, path in zip((first, second), headers_of(server, "hf:org/alike", tmp_path / "out")[0]):
        assert path.read_bytes() == source.read_bytes()


def test_of_a_split_model_each_header_is_read(server: HubServer, tmp_path: Path, advise) -> None:
    whole = tmp_path / "whole.gguf"
    write_moe_model(whole, n_layer=4, n_embd=256)
    shards = split(whole, tmp_path / "moe-Q4_0.gguf", max_tensors=20)
    assert len(shards) > 2
    server.repositories["org/split"] = Repository({path.name: path for path in shards})
    said, here = advise("hf:org/split"), advise(str(shards[0]))
    assert said["name"] == "hf:org/split:Q4_0" and said["files"] == [] and said["others"] == 0
    assert said["advice"]["estimates"] == here["estimates"]
    assert said["download"]["n_bytes"] == sum(path.stat().st_size for path in shards)
    asked = [path.rpartition("/")[2] for method, path, _ in server.requests if "/resolve/" in path]
    assert set(asked) == {path.name for path in shards}


@pytest.mark.parametrize(("name", "sentence"), [
    ("hf:org/big:Q5_0", "has no model of type Q5_0: name one of hf:org/big:Q2_K"),
    ("hf:org/big/none.gguf", "has no model none.gguf"),
    ("hf:org/none", "the hub has no such repository, or it is private"),
    ("hf:org/big@v9", "has no revision v9"),
    ("hf:org/gated:Q8_0", "is gated: accept its licence at"),
    ("hf:org/gated", "and set HF_TOKEN"),
    ("hf:big", "names no model of the hub"),
])
def test_what_the_hub_does_not_give_is_said_in_a_sentence(server: HubServer, name: str, sentence: str, refusal) -> None:
    assert sentence in refusal(name)
    assert server.n_sent == 0


def test_without_a_network_there_is_a_sentence_or_what_was_fetched(
    server: HubServer, small_moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, advise, refusal
) -> None:
    server.repositories["org/small"] = Repository({"small-BF16.gguf": small_moe.read_bytes()})
    cached = Hub(server.endpoint, tmp_path / "cache").model(Reference.parse("hf:org/small"), lambda *_: None, print)
    monkeypatch.setattr("pyorch.hub.download.Hub", lambda: Hub("http://127.0.0.1:1", tmp_path / "cache"))
    said = refusal("hf:org/big:Q8_0")
    assert "cannot be reached (Connection refused)" in said and "was not fetched yet" in said
    found = advise("hf:org/small")
    assert found["cached"] == str(cached) and found["download"] is None and found["header_bytes"] == 0


def test_a_token_opens_a_repository_and_does_not_reach_another_host(
    server: HubServer, models: dict[str, Path], advise, refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.redirects = True
    server.repositories["org/private"] = Repository({"big-Q8_0.gguf": models["Q8_0"]}, token="secret")
    assert "the hub has no such repository, or it is private" in refusal("hf:org/private")
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert advise("hf:org/private")["name"] == "hf:org/private:Q8_0"
    assert any(path.startswith("/elsewhere/") and part for _, path, part in server.requests)


def test_the_environment_of_a_process_names_the_hub_and_forbids_it(server: HubServer, tmp_path: Path) -> None:
    env = {**os.environ, "HF_ENDPOINT": server.endpoint, "HF_HUB_CACHE": str(tmp_path / "cache"), "NO_PROXY": "*"}
    done = pyorch("advise", "hf:org/big:Q8_0", *GIVEN, *MEMORY, env=env)
    assert done.returncode == 0 and "run it with: pyorch run hf:org/big:Q8_0" in done.stdout, done.stderr
    done = pyorch("advise", "hf:org/big:Q8_0", *GIVEN, *MEMORY, env={**env, "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "pyorch: error: hf:org/big:Q8_0 was not fetched yet, and the hub cannot be asked for it\n"


def test_a_fetched_file_is_used(
    server: HubServer, small_moe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.repositories["org/small"] = Repository({"small-BF16.gguf": small_moe.read_bytes()})
    cached = Hub(server.endpoint, tmp_path / "cache").model(Reference.parse("hf:org/small"), lambda *_: None, print)
    before = server.n_sent
    assert main(["advise", "hf:org/small", *GIVEN, *MEMORY]) == 0
    out = capsys.readouterr().out
    assert f"this model is fetched already: {cached}" in out and "space" not in out and server.n_sent == before


def test_a_connection_that_breaks_in_a_header_is_resumed(
    server: HubServer, models: dict[str, Path], advise, refusal
) -> None:
    server.cut_after, server.cuts = 200 * KiB, 3
    whole = advise("hf:org/big:Q8_0")
    begins = [int(part.removeprefix("bytes=").partition("-")[0]) for _, path, part in server.requests if part]
    assert len(begins) > 6 and begins == sorted(begins) and begins.count(0) == 1  # nothing is asked for twice
    assert whole["header_bytes"] < header_bytes(models["Q8_0"]) + MiB
    server.cut_after, server.cuts = 0, 99
    assert "hf:org/big:Q8_0 could not be read: " in refusal("hf:org/big:Q8_0")
    assert server.cuts > 90


def test_a_server_that_ignores_ranges_sends_a_header_and_is_left(
    server: HubServer, models: dict[str, Path], advise
) -> None:
    server.ignores_ranges = True
    there, here = advise("hf:org/big:Q8_0"), advise(str(models["Q8_0"]))
    assert there["advice"]["estimates"] == here["estimates"]
    assert there["header_bytes"] < header_bytes(models["Q8_0"]) + MiB
    assert server.n_sent < models["Q8_0"].stat().st_size / 4  # sockets have buffers of some MiB


def test_a_server_that_ignores_ranges_and_breaks_is_read_from_the_beginning(
    server: HubServer, models: dict[str, Path], advise
) -> None:
    server.ignores_ranges, server.cut_after, server.cuts = True, 300 * KiB, 1
    there, here = advise("hf:org/big:Q8_0"), advise(str(models["Q8_0"]))
    assert there["advice"]["estimates"] == here["estimates"]


def test_another_range_than_the_wanted_one_is_not_read(
    server: HubServer, models: dict[str, Path], advise, refusal
) -> None:
    server.shifts = 1
    there, here = advise("hf:org/big:Q8_0"), advise(str(models["Q8_0"]))
    assert there["advice"]["estimates"] == here["estimates"] and server.shifts == 0
    server.shifts = 99
    assert "could not be read: the server sent another part of the file than bytes " in refusal("hf:org/big:Q2_K")


def test_a_long_path_has_a_header(server: HubServer, models: dict[str, Path], advise) -> None:
    server.repositories["org/deep"] = Repository({f"{'folder' * 20}/" * 3 + "deep-Q2_K.gguf": models["Q2_K"]})
    assert advise("hf:org/deep")["advice"]["estimates"]


@pytest.mark.parametrize(("content", "sentence"), [
    (b"<html>" + bytes(100), "is no GGUF"),
    (b"GGUF", "is damaged: its header does not end"),
    (b"GGUF" + (3).to_bytes(4, "little") + (1 << 60).to_bytes(8, "little") + bytes(64), "has 1152921504606846976"),
    (b"GGUF" + (3).to_bytes(4, "little") + bytes(8) + (1).to_bytes(8, "little") + (1 << 15).to_bytes(8, "little")
     + bytes(1 << 15) + (9).to_bytes(4, "little") + (4).to_bytes(4, "little") + (1 << 60).to_bytes(8, "little"),
     "is damaged: its header does not end"),
])
def test_a_damaged_header_is_refused_and_not_read_on(
    server: HubServer, content: bytes, sentence: str, refusal
) -> None:
    server.repositories["org/bad"] = Repository({"bad-Q4_0.gguf": content})
    assert sentence in refusal("hf:org/bad")


def test_a_header_without_an_end_is_read_up_to_a_bound(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal
) -> None:
    monkeypatch.setattr(ranges, "MOST_BYTES", 2 * MiB)
    path = tmp_path / "endless-Q4_0.gguf"
    key = b"tokenizer.ggml.tokens"
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(8) + (1).to_bytes(8, "little")
                     + len(key).to_bytes(8, "little") + key + (9).to_bytes(4, "little") + (8).to_bytes(4, "little")
                     + (1 << 40).to_bytes(8, "little"))
    with path.open("r+b") as file:
        file.truncate(1 << 36)  # words of no letters
    server.repositories["org/endless"] = Repository({path.name: path})
    assert "no header has more than 2048 KiB" in refusal("hf:org/endless")
    assert server.n_sent <= 3 * MiB


def test_a_shorter_file_than_its_header_says_is_refused(server: HubServer, models: dict[str, Path], refusal) -> None:
    server.repositories["org/short"] = Repository({"short-Q2_K.gguf": beginning(models["Q2_K"], 4 * MiB)})
    assert "hf:org/short/short-Q2_K.gguf is truncated: its header describes" in refusal("hf:org/short")


def test_a_dense_model_is_refused_by_its_name(server: HubServer, tmp_path: Path, refusal) -> None:
    write_dense_model(tmp_path / "dense-Q8_0.gguf")
    server.repositories["org/dense"] = Repository({"dense-Q8_0.gguf": tmp_path / "dense-Q8_0.gguf"})
    assert "hf:org/dense:Q8_0 is a dense model" in refusal("hf:org/dense")


def test_files_that_cannot_be_compared_are_left_out(
    server: HubServer, models: dict[str, Path], tmp_path: Path, advise, refusal
) -> None:
    write_dense_model(tmp_path / "draft-F16.gguf")
    dense, bad = tmp_path / "draft-F16.gguf", b"<html>" + bytes(100)
    server.repositories["org/mixed"] = Repository({
        "a-IQ4_XS.gguf": bad, "draft-F16.gguf": dense, **{path.name: path for path in models.values()}})
    said = advise("hf:org/mixed")
    assert [one["name"].partition("mixed:")[2] for one in said["files"]] == list(KINDS)
    assert len(said["left_out"]) == 2 and "is no GGUF" in said["left_out"][0]
    assert "hf:org/mixed:F16 is a dense model" in said["left_out"][1]
    server.repositories["org/dense"] = Repository({f"d-Q{n}_K.gguf": dense for n in range(2, 9)})
    before = len(server.requests)
    assert "hf:org/dense:Q2_K is a dense model" in refusal("hf:org/dense")
    assert len(server.requests) == before + 4  # the listing, and three of seven


def test_a_full_disk_is_said(
    server: HubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 100 * MiB}))
    assert main(["advise", "hf:org/big", *GIVEN, *MEMORY]) == 0
    out = capsys.readouterr().out
    assert "none fits on the disk" in out and "NOT enough: free" in out


def write_checkpoint(folder: Path, n_files: int = 3, **config: object) -> dict[str, bytes | Path]:
    """Writes the headers of a Qwen3-30B-A3B in BF16, in files of holes, and its config.json."""
    n_layers, n_embd, n_ff, n_expert = 48, 2048, 768, 128
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (151936, n_embd), "lm_head.weight": (151936, n_embd),
        "model.norm.weight": (n_embd,)}
    for il in range(n_layers):
        name = f"model.layers.{il}."
        for part, shape in (("q", (4096, n_embd)), ("k", (512, n_embd)), ("v", (512, n_embd)), ("o", (n_embd, 4096))):
            shapes[f"{name}self_attn.{part}_proj.weight"] = shape
        shapes[f"{name}mlp.gate.weight"] = (n_expert, n_embd)
        shapes |= {f"{name}{norm}.weight": (n_embd,) for norm in ("input_layernorm", "post_attention_layernorm")}
        for expert in range(n_expert):
            shapes |= {f"{name}mlp.experts.{expert}.{part}_proj.weight": (n_ff, n_embd) for part in ("gate", "up")}
            shapes[f"{name}mlp.experts.{expert}.down_proj.weight"] = (n_embd, n_ff)
    files: dict[str, bytes | Path] = {"config.json": json.dumps({
        "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": n_layers, "hidden_size": n_embd,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": n_expert,
        "num_experts_per_tok": 8, "moe_intermediate_size": n_ff, "vocab_size": 151936,
        "max_position_embeddings": 40960, **config}).encode()}
    names = list(shapes)
    for n in range(n_files):
        head, at = {}, 0
        for name in names[n::n_files]:
            n_bytes = 2 * math.prod(shapes[name])
            head[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [at, at + n_bytes]}
            at += n_bytes
        path = folder / f"model-{n + 1:05}-of-{n_files:05}.safetensors"
        content = json.dumps(head).encode()
        path.write_bytes(len(content).to_bytes(8, "little") + content)
        with path.open("r+b") as file:
            file.truncate(8 + len(content) + at)
        files[path.name] = path
    return files


def test_of_a_checkpoint_the_sizes_after_conversion_are_said_and_the_command(
    server: HubServer, tmp_path: Path, advise
) -> None:
    files = write_checkpoint(tmp_path)
    server.repositories["Qwen/Qwen3-30B-A3B"] = Repository({**files, "model.py": b"1/0"})
    said = advise("hf:Qwen/Qwen3-30B-A3B", "--memory", "16GiB", "--budget", "40%")
    sizes = {one["name"]: one["n_bytes"] for one in said["files"]}
    assert {"Q2_K", "Q4_K_M", "Q8_0", "BF16", "MXFP4_MOE"} <= sizes.keys() and len(sizes) > 30
    assert sizes["Q4_K_M"] == pytest.approx(18.6e9, rel=0.04) and sizes["BF16"] == pytest.approx(61.1e9, rel=0.01)
    assert said["conversion"]["command"].startswith(
        "pyorch convert hf:Qwen/Qwen3-30B-A3B -o Qwen3-30B-A3B-Q4_K_M.gguf --quantize Q4_K_M")
    assert said["advice"]["command"].startswith("pyorch run Qwen3-30B-A3B-Q4_K_M.gguf")
    assert said["advice"]["arch"] == "Qwen3MoeForCausalLM"
    assert any("stand-in" in note for note in said["advice"]["notes"])
    # That of the GGUF that others converted, but for what its file has more than the rule says.
    qwen3(path := tmp_path / "qwen3.gguf").close()
    here = advise(str(path), "--memory", "16GiB", "--budget", "40%")
    assert said["advice"]["auto_bytes"] == pytest.approx(here["auto_bytes"], rel=0.01)
    for there, one in zip(said["advice"]["estimates"], here["estimates"]):
        assert there["bytes_per_token"] == pytest.approx(one["bytes_per_token"], rel=0.1)
        assert there["decode_rate"] == pytest.approx(one["decode_rate"], rel=0.03)
    assert said["header_bytes"] < 20 * MiB


def test_a_conversion_is_shown_with_its_command(server: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: (CHECKPOINT / name).read_bytes() for name in ("config.json", "model.safetensors")}
    server.repositories["org/small"] = Repository({**files, "modeling.py": b"1/0"})
    assert main(["advise", "hf:org/small", *GIVEN, *MEMORY]) == 0
    out = capsys.readouterr().out
    assert "convert it with: pyorch convert hf:org/small -o small-Q8_0.gguf --quantize Q8_0\n" in out
    assert "(Qwen2MoeForCausalLM)" in out and "beside the checkpoint" in out
    assert "run it with: pyorch run small-Q8_0" in out
    table = out[out.index("\nfile ") : out.index("recommended")].splitlines()
    assert len(table) > 30 and max(map(len, table)) <= 80


def test_a_stand_in_has_the_sizes_of_what_the_converter_makes(
    server: HubServer, small_moe: Path, tmp_path: Path
) -> None:
    head = (CHECKPOINT / "model.safetensors").read_bytes()
    entries = json.loads(head[8: 8 + int.from_bytes(head[:8], "little")])
    entries.pop("__metadata__", None)
    config = json.loads((CHECKPOINT / "config.json").read_text())
    outline = stand_in.read("it", config, entries)
    stand_in.write(outline, "Q8_0", tmp_path / "stand-in.gguf")
    with ModelMap(small_moe) as real, ModelMap(tmp_path / "stand-in.gguf") as other:
        assert outline.n_elements == real.info.n_params
        assert [layer.il for layer in other.layers] == [layer.il for layer in real.layers]
        assert (other.layers[0].n_expert, other.layers[0].n_expert_used) == (64, 6)
        assert (other.layers[0].n_in, other.layers[0].n_ff) == (real.layers[0].n_in, real.layers[0].n_ff)
        assert other.info.expert_bytes == real.info.expert_bytes * 8.5 / 16


@pytest.mark.parametrize("attention", [
    {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64},  # queries are wider than the hidden state
    {"num_attention_heads": 6, "kv_lora_rank": 96, "qk_rope_head_dim": 32},
])
def test_llama_cpp_computes_a_probe_of_a_stand_in(attention: dict, tmp_path: Path) -> None:
    shapes = {"model.embed_tokens.weight": (512, 256), "lm_head.weight": (512, 256)}
    for il in range(3):
        shapes[f"model.layers.{il}.self_attn.q_proj.weight"] = (512, 256)
        sparse = [(f"experts.{n}.", 96) for n in range(16)] + [("shared_experts.", 192)]
        for name, n_ff in sparse if il else [("", 1024)]:
            for part in ("gate", "up", "down"):
                shapes[f"model.layers.{il}.mlp.{name}{part}_proj.weight"] = (n_ff, 256)
    config = {"hidden_size": 256, "num_hidden_layers": 3, "n_routed_experts": 16, "num_experts_per_tok": 3,
              "vocab_size": 512, **attention}
    outline = stand_in.read("it", config, {name: {"dtype": "BF16", "shape": shape} for name, shape in shapes.items()})
    assert (outline.n_dense, outline.n_ff, outline.n_elements) == (1, 96, sum(map(math.prod, shapes.values())))
    path, small = tmp_path / "stand-in.gguf", tmp_path / "probe.gguf"
    stand_in.write(outline, "Q4_K_M", path)
    with ModelMap(path) as model_map:
        assert [layer.il for layer in model_map.layers] == [1, 2]
        probe.write_probe(probe.read_shape(model_map), small, 3)
    config = Config("probe", ENGINE, Settings(budget="100%", n_threads=1), preload=True)
    failure, measured, _ = measure_once(Job(str(small), config, None, 2, 4, 1, HANG_SECONDS))
    assert failure == "" and measured.decode.n_tokens == 4 and measured.decode.hits == 4 * 2 * 3


@pytest.mark.parametrize(("config", "sentence"), [
    ({"architectures": ["SomethingForCausalLM"]}, "has no GGUF file and cannot be converted: architecture Something"),
    ({"quantization_config": {"quant_method": "awq"}}, "is quantized with awq, which llama.cpp's converter cannot"),
    ({"num_experts": None}, "/config.json has no num_experts"),
    ({"architectures": None}, "/config.json names no model class"),
])
def test_a_checkpoint_that_cannot_be_converted_is_refused(
    server: HubServer, tmp_path: Path, config: dict, sentence: str, refusal
) -> None:
    server.repositories["org/checkpoint"] = Repository(write_checkpoint(tmp_path, **config))
    assert sentence in refusal("hf:org/checkpoint")


def test_a_repository_without_a_model_is_refused(server: HubServer, refusal) -> None:
    server.repositories["org/text"] = Repository({"README.md": b"#", "config.json": b"{}"})
    assert "hf:org/text has no model: neither a GGUF file, nor a checkpoint" in refusal("hf:org/text")
    server.repositories["org/text"].files["model.safetensors"] = b"\xff" * 100
    assert "names no model class" in refusal("hf:org/text")
    server.repositories["org/text"].files["config.json"] = b'{"architectures": ["Qwen3MoeForCausalLM"]}'
    assert "is damaged: its header does not end" in refusal("hf:org/text")


def choice(bits: float, rate: float | None, missing: int = 0, computing: str = MEASURED) -> Choice:
    return Choice(f"{bits}", int(bits), bits, missing, 1, True, rate, 1.0, computing)


@pytest.mark.parametrize(("choices", "bits", "why"), [
    ([choice(2.8, 40), choice(4.9, 20), choice(6.6, 11), choice(8.5, 9)], 6.6, "of all that reach 10 tok/s"),
    ([choice(2.8, 40), choice(4.9, 20), choice(8.5, 11), choice(16, 11)], 8.5, "up to those of Q8_0"),
    ([choice(2.8, 9), choice(4.9, 5), choice(8.5, 2)], 4.9, "none reaches 10 tok/s"),
    ([choice(1.8, 9), choice(2.8, 5), choice(3.9, 2), choice(16, 1)], 3.9, "the most below"),
    ([choice(16, 2), choice(32, 1)], 16, "more bits a weight than Q8_0"),
    ([choice(2.8, 40), choice(4.9, None)], 2.8, "the most below"),
    ([choice(4.9, 20, missing=50), choice(6.6, 20, missing=200)], 4.9, "of all that reach"),
    ([choice(4.9, 20, missing=150), choice(6.6, 20, missing=200)], 6.6, "none fits on the disk"),
])
def test_a_recommendation_has_as_many_bits_as_are_read_fast_enough(
    choices: list[Choice], bits: float, why: str
) -> None:
    best, reason = recommend(choices, 100)
    assert best.bits == bits and why in reason
    assert recommend([choice(4.9, None)], 100) is None


def test_what_is_recommended_was_measured() -> None:
    """Q6_K seems fast enough until it is measured, and then Q4_K_M is what is recommended."""
    choices = [choice(4.9, 20), choice(6.6, 11, computing=SCALED), choice(8.5, 5, computing=SCALED)]
    measured = []

    def measure(i: int) -> Choice:
        measured.append(i)
        return choice(choices[i].bits, 8)

    found, index, _ = settled(choices, 100, measure)
    assert (measured, index) == ([1], 0) and found[1].decode_rate == 8 and found[2].computing == SCALED


def test_a_smaller_model_is_computed_sooner_and_its_prompt_is_not() -> None:
    found = comparison.scaled(comparison.Compute(0.04, 0.01, 1.0), 50, 100)
    assert (found.decode_seconds, found.prefill_seconds) == (0.02, 0.01)


def test_a_file_system_without_holes_gets_no_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hole").touch()
    real = Path.stat
    monkeypatch.setattr(Path, "stat", lambda self, **how: _without_holes(real(self, **how)))
    with pytest.raises(Exception, match="without holes in files"):
        headers._check_holes(tmp_path)


def _without_holes(status: object) -> object:
    return type("Status", (), {"st_size": status.st_size, "st_blocks": status.st_size // 512})


def test_the_map_of_a_header_is_that_of_the_file(server: HubServer, models: dict[str, Path], tmp_path: Path) -> None:
    paths, _ = headers_of(server, "hf:org/big:Q4_K_M", tmp_path)
    with ModelMap(paths[0]) as there, ModelMap(models["Q4_K_M"]) as here:
        assert (there.info, there.layers) == (here.info, here.layers)
