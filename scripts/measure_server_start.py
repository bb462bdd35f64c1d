"""Measures how long a server takes to answer: `pyorch serve`, and llama-server of the same build, in turn.

    cmake --build build/py3-* --target llama-server
    python scripts/measure_server_start.py MODEL.gguf build/py3-*/bin/llama-server

Python keeps what it compiled, as it does where pyorch is installed, whatever PYTHONDONTWRITEBYTECODE says; the first
start of each is not counted. Prints the median seconds from the start of the process to the first /health that says ok,
of each, and how much time of processors it took, which depends less on what else runs on the machine.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

N = 9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL.gguf")
    parser.add_argument("llama_server", metavar="LLAMA-SERVER")
    args = parser.parse_args()
    flags = ["--load-mode", "none", "--no-warmup", "-fit", "off", "-cram", "0", "--no-ui", "-c", "4096", "-lv", "1"]
    commands = {"pyorch serve": [sys.executable, "-m", "pyorch", "serve", args.model, "--budget", "40%"],
                "llama-server": [args.llama_server, "-m", args.model, *flags]}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryDirectory() as compiled:
        environment = {**inherited, "PYTHONPYCACHEPREFIX": compiled}
        for n in range(N + 1):
            for name, command in commands.items():
                seconds = _start(command, environment)
                if n > 0:
                    times[name].append(seconds)
    for name, pairs in times.items():
        seconds, of_processors = zip(*pairs)
        print(f"{name}: {statistics.median(seconds):.3f} s ({min(seconds):.3f} to {max(seconds):.3f}), "
              f"{statistics.median(of_processors):.3f} s of processors ({min(of_processors):.3f} to "
              f"{max(of_processors):.3f})")
    return 0


def _start(command: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Seconds until it answers, and of processors."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    begin = time.perf_counter()
    server = subprocess.Popen([*command, "--port", str(port)], env=environment, stderr=subprocess.DEVNULL,
                              stdout=subprocess.DEVNULL)
    try:
        seconds = None
        while seconds is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
                    if answer.status == 200:
                        seconds = time.perf_counter() - begin
            except OSError:
                time.sleep(0.005)
    finally:
        server.kill()
        _, status, usage = os.wait4(server.pid, 0)
        server.returncode = os.waitstatus_to_exitcode(status)
    return seconds, usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    sys.exit(main())
