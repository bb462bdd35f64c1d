"""Prompts that outlive the server."""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from architectures import Zoo
from processes import HANG_SECONDS
from servers import ServerProcess

from pyorch.serve.prompts import LEAST_TOKENS

TEXT = (Path(__file__).parents[2] / "pyorch/sizes.py").read_text()[:1500]

Serve = Callable[..., ServerProcess]


@pytest.fixture
def model(small_moe: Path, tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(small_moe.read_bytes())
    return path


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that has them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/pyorch/prompts"


@pytest.fixture
def serve(start, model: Path) -> Serve:
    return lambda *options: start([sys.executable, "-m", "pyorch", "serve", str(model), "--port", "0", "--budget",
                                   "60%", "--threads", "1", *options])


def complete(server: ServerProcess, text: str = TEXT) -> tuple[str, int, int]:
    """What follows the text; how many of its tokens were computed, and how many were there."""
    body = json.dumps({"prompt": text, "n_predict": 12, "temperature": 0}).encode()
    request = urllib.request.Request(server.url + "/completion", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=HANG_SECONDS) as answer:
        said = json.load(answer)
    return said["content"], said["timings"]["prompt_n"], said["timings"]["cache_n"]


def test_a_prompt_is_not_computed_again_after_a_restart(serve: Serve, prompts: Path) -> None:
    server = serve()
    text, n_tokens, n_known = complete(server)
    assert n_tokens > 500 and n_known == 0
    with pytest.raises(urllib.error.HTTPError, match="501"):  # nobody else writes there
        urllib.request.urlopen(server.url + "/slots/0?action=save", b'{"filename":"mine"}')
    assert server.stop()[0] == 0
    assert [file.suffix for file in prompts.glob("*/*")] == [".kv"] and prompts.stat().st_mode & 0o077 == 0

    other = prompts / "of another model"
    other.mkdir()
    for left in ("0.part", "1.trying"):
        (other / left).write_bytes(b"of a process that was killed")
    for _ in range(2):  # and what the second one keeps takes the place of what it began with
        server = serve()
        assert "1 prompt of the last time" in server.log.read_text()
        assert complete(server) == (text, 1, n_tokens - 1)
        server.stop()
        assert [file.suffix for file in prompts.glob("*/*")] == [".kv"]


@pytest.mark.parametrize("what", ["settings", "flags", "environment", "model", "copied", "damage", "off", "cold",
                                  "lossy", "adapter"])
def test_what_would_be_computed_otherwise_is_computed(
    serve: Serve, model: Path, prompts: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    n_tokens = complete(server)[1]
    server.stop()
    file, = prompts.glob("*/*.kv")
    options: tuple[str, ...] = {
        "settings": ("--ubatch", "64"), "flags": ("--", "-ctk", "f32"), "off": ("--prompt-cache", "0"),
        "cold": ("--cold",), "lossy": ("--lossy", "heaviest"), "adapter": ("--", "--lora-init-without-apply"),
    }.get(what, ())
    if what == "environment":
        monkeypatch.setenv("LLAMA_ARG_CACHE_TYPE_K", "f32")
    if what == "model":
        os.utime(model)
    if what == "copied":  # over it, with its time
        times = model.stat()
        model.write_bytes(model.read_bytes())
        os.utime(model, ns=(times.st_atime_ns, times.st_mtime_ns))
    if what == "damage":
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    server = serve(*options)
    assert ("is damaged and was deleted" in server.log.read_text()) == (what == "damage")
    assert file.exists() == (what != "damage")
    assert complete(server)[1:] == (n_tokens, 0)


def test_a_file_whose_end_was_not_written_is_not_kept(start, serve: Serve, model: Path, prompts: Path) -> None:
    server = serve()
    text, n_tokens, _ = complete(server)
    server.stop()
    file, = prompts.glob("*/*.kv")
    n_kib = file.stat().st_size // 1024
    assert file.stat().st_size > n_kib * 1024
    file.unlink()
    command = f'ulimit -f {n_kib}; exec "$@"'
    server = start(["bash", "-c", command, "bash", sys.executable, "-m", "pyorch", "serve", str(model), "--port", "0",
                    "--budget", "60%", "--threads", "1"])
    assert complete(server)[:2] == (text, n_tokens)
    server.stop()
    assert not list(prompts.glob("*/*"))
    assert complete(serve()) == (text, n_tokens, 0)


def test_a_file_that_ends_its_server_is_tried_once(serve: Serve, prompts: Path) -> None:
    server = serve()
    n_tokens = complete(server)[1]
    server.stop()
    file, = prompts.glob("*/*.kv")
    file.rename(file.with_suffix(".trying"))
    server = serve()
    assert complete(server)[1] == n_tokens
    server.stop()
    assert [file.suffix for file in prompts.glob("*/*")] == [".kv"]


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3-next"])
def test_a_memory_that_forgets_is_not_kept_and_nothing_is_claimed(start, zoo: Zoo, name: str, prompts: Path) -> None:
    """A window of tokens, and recurrent layers: the same prompt would be computed again."""
    command = [sys.executable, "-m", "pyorch", "serve", str(zoo.path(name, "F32")), "--port", "0", "--budget", "60%",
               "--threads", "1"]
    server = start(command)
    text, n_tokens, _ = complete(server, TEXT[:200])  # their contexts are short
    assert n_tokens > LEAST_TOKENS and server.stop()[0] == 0
    assert not list(prompts.glob("*/*.kv"))
    server = start(command)
    assert "of the last time" not in server.log.read_text()
    assert complete(server, TEXT[:200]) == (text, n_tokens, 0)


def test_all_files_stay_under_the_limit(serve: Serve, prompts: Path) -> None:
    server = serve("--prompt-cache", "100KiB")
    complete(server)
    assert server.stop()[0] == 0
    assert prompts.is_dir() and not list(prompts.glob("*/*"))


def test_lossy_text_is_not_kept(serve: Serve, prompts: Path) -> None:
    """Where a client made the server lossy while it ran."""
    server = serve()
    body = json.dumps({"substitution": "heaviest"}).encode()
    urllib.request.urlopen(server.url + "/residency", body, timeout=HANG_SECONDS)
    complete(server)
    server.stop()
    assert not list(prompts.glob("*/*.kv"))
