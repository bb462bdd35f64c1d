"""Models of the hub: which one a name means, how it comes, what is kept, and how it goes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import HubServer, Repository
from models import CHECKPOINT, PROMPT
from processes import pyorch
from terminals import Dialogue

from pyorch.cli import main
from pyorch.cli.hub import find
from pyorch.errors import PyorchError
from pyorch.hub import cache
from pyorch.hub.download import Hub
from pyorch.hub.reference import Reference, candidates, choose
from pyorch.llama.model import load

SIZES = {
    "README.md": 1, "config.json": 1, "mmproj-F16.gguf": 1, "model.imatrix.gguf": 1, "model-Q4_K_M.buddies.gguf": 1,
    "model-Q4_K_M.gguf": 40, "model-IQ4_XS.gguf": 30, "model-UD-Q4_K_XL.gguf": 45, "half-00001-of-00002.gguf": 1,
    "BF16/model-BF16-00001-of-00002.gguf": 80, "BF16/model-BF16-00002-of-00002.gguf": 70,
}


def NOTHING(*_: object) -> None:
    """Progress that nobody looks at."""


@pytest.mark.parametrize(("text", "parts"), [
    ("hf:org/name", ("org/name", "", "", "")),
    ("hf:org/name:Q4_K_M", ("org/name", "", "Q4_K_M", "")),
    ("hf:or.g/na-me@v1/a/b.gguf", ("or.g/na-me", "v1", "", "a/b.gguf")),
])
def test_a_name_is_read_and_written(text: str, parts: tuple[str, ...]) -> None:
    reference = Reference.parse(text)
    assert (reference.repo, reference.revision, reference.quant, reference.file) == parts and str(reference) == text


@pytest.mark.parametrize("text", ["hf:", "hf:name", "hf:org/name:", "hf:org/name/", "hf:/org/name", "hf:org/na me"])
def test_what_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(PyorchError, match="write hf:ORG/NAME"):
        Reference.parse(text)


def test_a_repository_s_models_are_its_whole_gguf_files_that_are_not_sidecars() -> None:
    assert {one.quant: (len(one.files), one.n_bytes) for one in candidates(SIZES)} == {
        "Q4_K_M": (1, 40), "IQ4_XS": (1, 30), "UD-Q4_K_XL": (1, 45), "BF16": (2, 150)}


@pytest.mark.parametrize(("name", "file"), [
    ("hf:o/n", "model-Q4_K_M.gguf"),  # the usual one
    ("hf:o/n:iq4_xs", "model-IQ4_XS.gguf"),
    ("hf:o/n:Q4_K_XL", "model-UD-Q4_K_XL.gguf"),
    ("hf:o/n:bf16", "BF16/model-BF16-00001-of-00002.gguf"),
    ("hf:o/n/BF16/model-BF16-00002-of-00002.gguf", "BF16/model-BF16-00001-of-00002.gguf"),
])
def test_a_name_means_one_model(name: str, file: str) -> None:
    assert choose(Reference.parse(name), SIZES).files[0] == file


def test_a_name_that_means_none_or_several_lists_what_there_is() -> None:
    for name in ("hf:o/n:Q8_0", "hf:o/n/none.gguf", "hf:o/n:Q4"):
        with pytest.raises(PyorchError, match=r"name one of .*hf:o/n:Q4_K_M \(40 bytes\)"):
            choose(Reference.parse(name), SIZES)
    with pytest.raises(PyorchError, match="has several models: name one of hf:o/n/a.gguf .*, hf:o/n/b.gguf"):
        choose(Reference.parse("hf:o/n"), {"a.gguf": 1, "b.gguf": 1})
    with pytest.raises(PyorchError, match="pyorch convert hf:o/n -o FILE makes one"):
        choose(Reference.parse("hf:o/n"), {"model.safetensors": 1})


@pytest.fixture
def hub(small_moe: Path, tmp_path: Path) -> Iterator[tuple[HubServer, Hub, Path]]:
    model = small_moe.read_bytes()
    repositories = {
        "org/small": Repository({"small-BF16.gguf": model, "old-Q8_0.gguf": model[: 1 << 20], "README.md": b"#"}),
        "org/private": Repository({"a.gguf": b"GGUF"}, token="secret"),
        "org/gated": Repository({"a.gguf": b"GGUF"}, gated=True),
    }
    with HubServer(repositories).running() as server:
        yield server, Hub(server.endpoint, tmp_path / "cache"), tmp_path / "cache"


def fetched(hub: Hub, name: str, on_progress=NOTHING, on_note=NOTHING) -> Path:
    return hub.model(Reference.parse(name), on_progress, on_note)


def test_a_model_is_fetched_once(hub, small_moe: Path) -> None:
    server, ours, _ = hub
    steps = []
    path = fetched(ours, "hf:org/small:BF16", lambda *step: steps.append(step))
    assert path.read_bytes() == small_moe.read_bytes()
    size = small_moe.stat().st_size
    assert {(step, total) for step, _, total in steps} == {("fetching small-BF16.gguf", size)}
    assert all(0 <= done <= total for _, done, total in steps)
    assert fetched(ours, "hf:org/small:BF16") == path
    assert [path for method, path, _ in server.requests if method == "GET" and "/resolve/" in path] == [
        "/org/small/resolve/main/small-BF16.gguf"]


def test_what_was_begun_is_resumed(hub, small_moe: Path) -> None:
    server, ours, where = hub
    server.cut_after = 12 << 20  # huggingface_hub writes 10 MiB at a time
    with pytest.raises(PyorchError, match="did not come: .*what has come is kept, and the same command goes on there"):
        fetched(ours, "hf:org/small:BF16")
    (part,) = where.rglob("*.incomplete")
    assert 0 < part.stat().st_size <= 12 << 20
    begun, first = part.stat().st_size, []
    path = fetched(ours, "hf:org/small:BF16", lambda _, done, __: first.append(done))
    assert path.read_bytes() == small_moe.read_bytes()
    assert server.requests[-1] == ("GET", "/org/small/resolve/main/small-BF16.gguf", f"bytes={begun}-")
    assert first[0] == begun


def test_what_was_fetched_is_used_where_the_hub_is_not_reached(hub) -> None:
    _, ours, where = hub
    path = fetched(ours, "hf:org/small:BF16")
    nobody = Hub("http://127.0.0.1:1", where)
    notes = []
    assert fetched(nobody, "hf:org/small:BF16", on_note=notes.append) == path
    assert len(notes) == 1 and "cannot be reached (Connection refused)" in notes[0]
    assert fetched(nobody, "hf:org/small") == path  # the only one that is here
    with pytest.raises(PyorchError, match="was not fetched yet, and the hub cannot be asked"):
        fetched(nobody, "hf:org/other")
    with pytest.raises(PyorchError, match=r"has no model of type Q8_0: name one of hf:org/small:BF16"):
        fetched(nobody, "hf:org/small:Q8_0")


@pytest.mark.parametrize(("name", "said"), [
    ("hf:org/none", "no such repository, or it is private"),
    ("hf:org/private", "no such repository, or it is private"),
    ("hf:org/gated", "is gated: accept its licence at .*/org/gated, and set HF_TOKEN"),
    ("hf:org/small@v7:BF16", "has no revision v7"),
])
def test_what_the_hub_refuses_is_said(hub, name: str, said: str) -> None:
    with pytest.raises(PyorchError, match=said):
        fetched(hub[1], name)


def test_a_token_opens_private_repositories(hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert fetched(hub[1], "hf:org/private").read_bytes() == b"GGUF"


def test_shards_come_together(hub) -> None:
    server, ours, _ = hub
    names = [f"big-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    server.repositories["org/big"] = Repository({name: name.encode() * 1000 for name in names})
    path = fetched(ours, "hf:org/big")
    assert path.name == names[0] and sorted(one.name for one in path.parent.iterdir()) == names


def test_a_checkpoint_comes_without_programs(hub) -> None:
    server, ours, _ = hub
    files = {path.name: path.read_bytes() for path in CHECKPOINT.iterdir() if path.is_file()}
    server.repositories["org/checkpoint"] = Repository({**files, "modeling.py": b"1/0", "pytorch_model.bin": b"x"})
    directory = ours.checkpoint(Reference.parse("hf:org/checkpoint"), NOTHING, NOTHING)
    names = {path.name for path in directory.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not {"modeling.py", "pytorch_model.bin"} & names
    with pytest.raises(PyorchError, match="is no checkpoint"):
        ours.checkpoint(Reference.parse("hf:org/small"), NOTHING, NOTHING)


def test_a_full_disk_is_seen_before_anything_comes(hub, monkeypatch: pytest.MonkeyPatch) -> None:
    server, ours, _ = hub
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1 << 20}))
    with pytest.raises(PyorchError, match="free some space"):
        fetched(ours, "hf:org/small:BF16")
    assert not [path for method, path, _ in server.requests if "/resolve/" in path]


def test_models_are_listed_and_removed_with_their_sidecars(hub, small_moe: Path) -> None:
    _, ours, where = hub
    path = fetched(ours, "hf:org/small:BF16")
    fetched(ours, "hf:org/small:Q8_0")
    sidecar = path.with_name("small-BF16.maps.gguf")
    sidecar.write_bytes(b"x" * 100)
    found = {stored.name: stored for stored in cache.in_cache(where)}
    assert found.keys() == {"hf:org/small:BF16", "hf:org/small:Q8_0"}
    assert found["hf:org/small:BF16"].n_bytes == small_moe.stat().st_size
    assert found["hf:org/small:BF16"].sidecars == {"maps": sidecar}
    removal = cache.removal("hf:org/small:BF16", where)
    assert removal.n_bytes == small_moe.stat().st_size + 100
    removal.execute()
    assert not path.exists() and not sidecar.exists() and not os.path.lexists(path)
    assert [stored.name for stored in cache.in_cache(where)] == ["hf:org/small:Q8_0"]
    assert sum(one.stat().st_size for one in where.rglob("blobs/*")) == 1 << 20
    cache.removal("hf:org/small", where).execute()
    assert cache.in_cache(where) == [] and not list(where.rglob("blobs/*"))
    with pytest.raises(PyorchError, match="is not in the cache"):
        cache.removal("hf:org/small", where)


def test_a_blob_that_another_model_is_made_of_stays(hub) -> None:
    server, ours, where = hub
    server.repositories["org/twins"] = Repository({"a-Q4_0.gguf": b"GGUFx", "b-Q8_0.gguf": b"GGUFx"})
    first, second = fetched(ours, "hf:org/twins:Q4_0"), fetched(ours, "hf:org/twins:Q8_0")
    cache.removal("hf:org/twins:Q4_0", where).execute()
    assert not first.exists() and second.read_bytes() == b"GGUFx"


def test_folders_are_listed_and_their_models_removed(small_moe: Path, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("m.gguf", "m.maps.gguf", "m.plan.json", "deep/n-00001-of-00002.gguf", "deep/n-00002-of-00002.gguf",
                 "notes.txt"):
        (tmp_path / name).write_bytes(b"x")
    first, second = sorted(cache.in_folder(tmp_path), key=lambda stored: len(stored.files))
    assert (first.name, set(first.sidecars)) == (str(tmp_path / "m.gguf"), {"maps", "plan"})
    assert len(second.files) == 2
    for stored in (first, second):
        cache.removal(stored.name).execute()
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["notes.txt"]


def test_load_takes_models_of_the_hub(hub, monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours, _ = hub
    monkeypatch.setattr("pyorch.hub.download.Hub", lambda: ours)
    with load("hf:org/small:BF16", budget="50%", n_ctx=256, n_threads=1) as model:
        assert model.map.path.endswith("/small-BF16.gguf") and len(model.layers) == 8


def test_commands_take_models_of_the_hub(hub, small_moe: Path, tmp_path: Path) -> None:
    """One process after another, as a user has it: fetched, offline, listed, removed."""
    server, _, where = hub
    del server.repositories["org/small"].files["old-Q8_0.gguf"]
    environment = {**os.environ, "HF_ENDPOINT": server.endpoint, "HF_HUB_CACHE": str(where), "NO_PROXY": "*"}
    few = ("-n", "2", "--temp", "0", "--budget", "50%", "--threads", "1")
    done = pyorch("run", "hf:org/small", "-p", PROMPT, *few, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == pyorch("run", small_moe, "-p", PROMPT, *few).stdout
    offline = {**environment, "HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:1"}
    assert json.loads(pyorch("inspect", "hf:org/small:BF16", "--json", env=offline).stdout)["arch"] == "qwen2moe"
    assert json.loads(pyorch("inspect", "SMALL", "--json", env=offline).stdout)["arch"] == "qwen2moe"
    (row,) = json.loads(pyorch("models", "--json", env=offline).stdout)
    assert (row["name"], row["kind"], row["experts"]) == ("hf:org/small:BF16", "qwen2moe", "64 x 8")
    refused = pyorch("models", "rm", "hf:org/small", env=offline, stdin=-3)
    assert (refused.returncode, "say --yes" in refused.stderr) == (2, True)
    with Dialogue(*refused.args, HF_HUB_CACHE=str(where)) as dialogue:
        dialogue.expect("remove? [y/N] ")
        dialogue.type("\r")
        assert dialogue.end()[0] == 1
    removed = pyorch("models", "rm", "--yes", "hf:org/small", env=offline)
    assert (removed.returncode, removed.stdout.startswith("removed hf:org/small, ")) == (0, True)
    assert pyorch("models", env=offline).stdout.startswith(f"no models, neither here nor in {where}")
    missing = pyorch("run", "hf:org/small", "-p", "x", env=offline)
    assert missing.returncode == 2 and "was not fetched yet" in missing.stderr and missing.stderr.count("\n") == 1


def test_the_beginning_of_a_name_finds_one_model(hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours, where = hub
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(where))
    monkeypatch.chdir(tmp_path)
    fetched = str(ours.model(Reference.parse("hf:org/small:BF16"), lambda *_: None, print))
    for name in ("Qwen3.5-A3B.gguf", "qwen3.5-a3b-it.gguf", "qwen3.5-a3b.maps.gguf", "olmoe-00001-of-00002.gguf"):
        (tmp_path / name).touch()
    assert find("sma") == find("small-bf") == fetched
    assert find("qwen3.5-a3b") == find("QWEN3.5-A3B") == "Qwen3.5-A3B.gguf"
    assert find("qwen3.5-a3b-") == "qwen3.5-a3b-it.gguf"
    for nothing in ("mall", "olmoe", str(tmp_path / "sma"), "Qwen3.5-A3B.gguf", "hf:org/small", ""):
        assert find(nothing) is None
    with pytest.raises(PyorchError, match=r"several models: say which of Qwen3\.5-A3B\.gguf, qwen3\.5-a3b-it\.gguf$"):
        find("qwen")
    Path("sma").mkdir()
    assert find("sma") is None


def test_convert_takes_models_of_the_hub(hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a repository's name alone it would take the checkpoint, of which another test says how it comes."""
    _, ours, _ = hub
    monkeypatch.setattr("pyorch.hub.download.Hub", lambda: ours)
    out = tmp_path / "out.gguf"
    assert main(["convert", "hf:org/small:BF16", "-o", str(out), "--quantize", "Q8_0"]) == 0 and out.is_file()
    assert main(["convert", "hf:org/small", "-o", str(out)]) == 2
