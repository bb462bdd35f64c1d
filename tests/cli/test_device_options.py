"""What users get wrong about devices: one sentence, exit status 2, and nothing is loaded."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
from processes import HANG_SECONDS, pyorch

from pyorch import ports
from pyorch.cli import main
from pyorch.errors import PyorchError
from pyorch.llama.model import load
from pyorch.runtime import devices
from pyorch.settings.settings import Settings


@pytest.fixture
def refused(small_moe: Path, capfd: pytest.CaptureFixture[str]):
    """Runs a command that must fail, without a byte on standard output; returns its sentence."""

    def run(*arguments: str, command: tuple[str, ...] = ("run", "-p", "x")) -> str:
        assert main([command[0], str(small_moe), *command[1:], *arguments]) == 2
        printed = capfd.readouterr()
        assert printed.out == ""
        assert printed.err.startswith("pyorch: error: ") and printed.err.count("\n") == 1, printed.err
        return printed.err

    return run


@pytest.mark.parametrize("command", [
    ("run", "-p", "x"), ("verify",), ("bench",), ("serve", "--port", "0"),
], ids=lambda command: command[0])
def test_every_command_says_which_devices_there_are(refused, command: tuple[str, ...]) -> None:
    sentence = refused("--device", "CUDA7", command=command)
    assert "there is no device CUDA7: " in sentence
    assert "-DGGML_CUDA=ON" in sentence and "docs/how-to/gpu.md" in sentence


def test_a_device_that_cannot_be_reached_is_named(refused) -> None:
    port = ports.free()
    for address in (f"127.0.0.1:{port}", f"no-such-host.invalid:{port}"):
        assert f"no device can be reached at {address}" in refused("--device", f"rpc:{address}")


@pytest.mark.parametrize("command", ["advise", "bench"])
def test_that_is_one_sentence_where_nothing_was_loaded_before(small_moe: Path, command: str) -> None:
    done = pyorch(command, small_moe, "--device", f"rpc:127.0.0.1:{ports.free()}")
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1, done.stderr
    assert "no device can be reached at 127.0.0.1:" in done.stderr


def test_a_device_that_has_others_to_serve_is_waited_for_and_a_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = []
    with socket.create_server(("127.0.0.1", 0)) as busy:  # who connects is never answered

        def say(line: str) -> None:
            lines.append(line)
            busy.close()  # ends the connections that nobody accepted

        monkeypatch.setattr(devices.fatal, "notice", say)
        monkeypatch.setattr(devices, "_SOON_SECONDS", 0.1)
        name = f"rpc:127.0.0.1:{busy.getsockname()[1]}"
        no_line = threading.Timer(HANG_SECONDS, busy.close)
        no_line.start()
        with pytest.raises(PyorchError, match="no device can be reached"):
            devices.find_device(name)
        no_line.cancel()
    assert lines == [f"waiting for the device {name}, which serves one process at a time"]


@pytest.mark.parametrize("device", ["rpc:", "rpc:127.0.0.1", "rpc::50052", "rpc:127.0.0.1:0", "rpc:127.0.0.1:65536",
                                    "rpc:127.0.0.1:x", "rpc:a:1;rpc:b:2"])
def test_an_address_is_a_host_and_a_port(refused, device: str) -> None:
    assert "it is rpc:HOST:PORT, such as" in refused("--device", device)


@pytest.mark.parametrize(("options", "sentence"), [
    (("--vram-budget", "1GiB"), "name it with --device"),
    (("--device-misses", "upload"), "name it with --device"),
    (("--device-ahead", "2", "--prefetch", "quasi-hidden"), "name a device with --device"),
    (("--device", "auto", "--device-ahead", "2"), "a predictor that is not auto"),
    (("--device", "auto", "--device-ahead", "65", "--prefetch", "quasi-hidden"), "a whole number from 0 (none) to 64"),
    (("--device", "auto", "--vram-budget=-1GiB"), '--vram-budget "-1GiB" is not understood'),
    (("--device", "auto", "--vram-budget", "101%"), "100% is the most"),
    (("--device", "auto", "--vram-budget", "resident"), "--vram-budget is a size"),
    (("--device", "auto", "--vram-budget", "much"), '--vram-budget "much" is not understood: use'),
    (("--device", "auto", "--device-misses", "somebody"), "must be processor or upload"),
    (("--device", ""), "must be the names of devices"),
    (("--device", "auto"), "there is no device: "),
])
def test_options_that_cannot_mean_anything_are_refused(refused, options: tuple[str, ...], sentence: str) -> None:
    assert sentence in refused(*options)


def test_no_device_is_none_whatever_else_is_said_of_one(small_moe: Path, tmp_path: Path) -> None:
    """As a file of settings may."""
    settings = tmp_path / "config.toml"
    settings.write_text('[run]\ndevice = "CUDA0"\nvram-budget = "50%"\ndevice-misses = "upload"\n')
    done = pyorch("--config", settings, "run", small_moe, "-p", "x", "-n", 2, "--device", "none")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("options", [{"device": 1}, {"device": b"CUDA0"}, {"device": ["CUDA0"]},
                                     {"device": "auto", "vram_budget": 0.5}, {"device": "auto", "vram_budget": []},
                                     {"device": "auto", "device_misses": True}], ids=str)
def test_values_of_other_types_are_refused_in_a_sentence(small_moe: Path, options: dict[str, object]) -> None:
    with pytest.raises(PyorchError, match="must be|is not understood"):
        Settings(**options)
    with pytest.raises(PyorchError, match="must be|is not understood"):
        load(small_moe, budget="50%", **options)


@pytest.mark.parametrize("command", ["run", "serve", "verify", "bench"])
def test_help_has_an_example_with_a_device(command: str) -> None:
    assert " --device " in pyorch(command, "--help").stdout.partition("xample")[2]
