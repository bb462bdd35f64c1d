"""Imports Ray when it is needed, and runs a minimal Ray for a cluster on this machine."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

from pyorch import ports
from pyorch.cluster.state import Running, remember
from pyorch.errors import PyorchError
from pyorch.sizes import MiB

MARK = "PYORCH_CLUSTER"  # environment variable that marks processes of a cluster
CHILD = "pyorch.cluster.child"  # the module that a serving process runs
_TEMPORARY = "/tmp"  # not TMPDIR: a socket's path has at most 107 bytes, and Ray appends 72
_ANSWER_SECONDS = 10.0  # for Ray's first bytes
_SECONDS_TO_END = 15.0  # for servers without Ray to write their learned data; then they are killed

# Ray sends no usage statistics, hides no device from actors that claim none, and gives up soon if a server does not
# answer.
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_NUM_REDIS_GET_RETRIES": "2",  # attempts to connect, of 41 seconds each
    "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",  # which would turn SIGTERM into a crash
}

# The minimum of Ray. It keeps nothing in its object store, which has the smallest size. Servers claim no processor, no
# worker waits for tasks, and no process is niced. Ray's memory monitor is off, because a budget fills memory on
# purpose; the machine's limits apply. Ray notices a dead process within 3 seconds, and allows a process of a busy
# machine to be silent for 15.
_START = (
    "--head", "--block", "--port=0", "--dashboard-agent-listen-port=0", "--num-cpus=0", "--num-gpus=0",
    f"--object-store-memory={80 * MiB}", "--include-dashboard=false", "--include-log-monitor=false", "--no-monitor",
    "--disable-usage-stats", "--system-config=" + json.dumps({
        "memory_monitor_refresh_ms": 0, "enable_worker_prestart": False, "worker_niceness": 0,
        "health_check_period_ms": 500, "health_check_timeout_ms": 5000, "health_check_failure_threshold": 3,
    }),
)


# Both ends of an HTTP/2 connection first send their settings, in a frame with its kind in the fourth byte.
_SETTINGS, _KIND = b"\x04", 3
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + _SETTINGS + bytes(5)


def ray_library() -> ModuleType:
    """Imports the module ray.

    Not imported at the top: it takes half a second, commands without a cluster do not need it, and it reads its
    environment when it is imported.

    Raises:
        PyorchError: Ray is not installed.
    """
    check_installed()
    os.environ.update(_QUIET)
    import ray

    return ray


def check_installed() -> None:
    """Checks that Ray is installed.

    Raises:
        PyorchError: It is not.
    """
    if importlib.util.find_spec("ray") is None or importlib.util.find_spec("psutil") is None:
        raise PyorchError("a cluster needs Ray, which is not installed: pip install 'pyorch[cluster]'")


def ask_all(
    ray: ModuleType, names: Iterable[str], method: str, arguments: Callable[[str], tuple] = lambda name: (),
    seconds: float | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Calls a method of the actors with these names that Ray knows.

    Returns:
        By name: results or exceptions (RayError for an actor that died); and the references of late results.
    """
    calls: dict[Any, str] = {}
    for name in names:
        with contextlib.suppress(ValueError):  # Ray has no such actor (any more)
            calls[getattr(ray.get_actor(name), method).remote(*arguments(name))] = name
    ready, late = ray.wait(list(calls), num_returns=len(calls), timeout=seconds) if calls else ([], [])
    answers: dict[str, Any] = {}
    for call in ready:
        try:
            answers[calls[call]] = ray.get(call)
        except ray.exceptions.RayTaskError as error:
            answers[calls[call]] = error.cause
        except ray.exceptions.RayError as error:
            answers[calls[call]] = error
    return answers, {calls[call]: call for call in late}


def start(running: Running) -> Running:
    """Starts Ray for a cluster, on the loopback interface. Returns the cluster with Ray's address.

    Its processes end with the first one, the keeper, which outlives this process. The cluster is remembered before
    anything starts, so that end() can remove all remains.
    """
    check_installed()
    directory = os.path.realpath(tempfile.mkdtemp(prefix="pyorch-ray-", dir=_TEMPORARY))
    running = remember(running, directory=directory)
    inner = os.path.join(directory, "r")  # Ray makes it public, with logs and sockets, so its parent is private
    log = os.path.join(directory, "ray.log")
    client = ports.free()  # Ray gets its other ports from the system
    with open(log, "wb") as output:
        keeper = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", *_START, f"--temp-dir={inner}",
             f"--ray-client-server-port={client}"],
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=running.directory,
            env=os.environ | _environment(running), start_new_session=True,
        )
    running = remember(running, keeper=keeper.pid)
    # Ray writes this file when all its parts run.
    while not (address := _read(os.path.join(inner, "ray_current_cluster"))):
        if keeper.poll() is not None:
            raise PyorchError(f"Ray did not start: {_last_line(log)}")
        time.sleep(0.05)
    return remember(running, ray=address)


@contextlib.contextmanager
def connected(running: Running) -> Iterator[ModuleType]:
    """Yields the module ray, connected to a cluster's Ray.

    Raises:
        PyorchError: Ray does not answer.
    """
    if running.has_own_ray:
        os.environ.update(_environment(running))
    ray = ray_library()
    _check_answers(running)
    handler = signal.getsignal(signal.SIGTERM)  # Ray replaces it
    try:
        ray.init(address=running.ray, namespace=running.namespace, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # Ray raises several kinds, also RuntimeError
        raise PyorchError(f"Ray at {running.ray} refused the connection: {_first_line(error)}") from None
    finally:
        signal.signal(signal.SIGTERM, handler)
    try:
        yield ray
    finally:
        ray.shutdown()


def end(running: Running) -> None:
    """Ends all processes of a cluster with its own Ray, and deletes its directory.

    Works in any state, also after an interrupted call. When its actor is gone, a serving process ends in order, if it
    can.
    """
    begin = time.monotonic()
    # The keeper first. Then the kernel ends Ray's processes, and none of them starts another one.
    while processes := sorted(_processes(running), key=lambda process: process.pid != running.keeper):
        patient = time.monotonic() < begin + _SECONDS_TO_END
        for process in processes:
            if not (patient and _serves(process)):
                _kill(process)
        if time.monotonic() > begin + 2 * _SECONDS_TO_END:
            raise PyorchError(f"processes of the cluster do not end: {', '.join(str(p.pid) for p in processes)}")
        time.sleep(0.05)
    if running.directory:
        shutil.rmtree(running.directory, ignore_errors=True)


def is_alive(running: Running) -> bool:
    """Checks that a cluster's Ray answers, and that the keeper of its own Ray runs."""
    import psutil

    try:
        if running.has_own_ray and not _belongs(psutil.Process(running.keeper), running):
            return False
    except psutil.Error:
        return False
    return answers(running)


def _check_answers(running: Running) -> None:
    if not running.ray:
        raise PyorchError("the cluster is starting; or its start was interrupted, and `pyorch cluster down` removes "
                          "the rest of it")
    if not answers(running):
        ended = ": it has ended; `pyorch cluster down` removes the rest of it" if running.has_own_ray else ""
        raise PyorchError(f"no Ray answers at {running.ray}{ended}")


def answers(running: Running) -> bool:
    """Returns whether an HTTP/2 server answers at Ray's address. Ray itself would try for minutes."""
    host, _, port = running.ray.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS) as connection:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                return True
            connection.sendall(_GREETING)
            said = b""
            while len(said) <= _KIND and (more := connection.recv(_KIND + 1 - len(said))):
                said += more
            return said[_KIND:] == _SETTINGS
    except (OSError, ValueError, OverflowError):
        return False


def _environment(running: Running) -> dict[str, str]:
    """Returns the environment of a cluster's processes with its own Ray, which checks the token at its ports, too."""
    return {
        MARK: running.mark, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": running.token,
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # no cluster across machines: only the loopback interface
    }


def _processes(running: Running) -> list:
    """Returns the processes of a cluster on this machine.

    They have the cluster's mark in their environment. Some of Ray's overwrite that with their title, but run in its
    directory.
    """
    import psutil

    return [process for process in psutil.process_iter() if process.pid != os.getpid() and _belongs(process, running)]


def _belongs(process, running: Running) -> bool:
    import psutil

    try:
        if process.uids().real != os.getuid() or process.status() == psutil.STATUS_ZOMBIE:
            return False
        if process.environ().get(MARK) == running.mark:
            return True
        return bool(running.directory) and process.cwd() == running.directory and process.name().startswith("ray::")
    except (psutil.Error, OSError):  # the process has ended
        return False


def _serves(process) -> bool:
    import psutil

    try:
        return CHILD in process.cmdline()
    except psutil.Error:
        return False


def _kill(process) -> None:
    import psutil

    with contextlib.suppress(psutil.Error):
        process.kill()  # psutil checks that the pid still belongs to this process


def _read(path: str) -> str:
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        return file.read().strip()
    return ""


def _last_line(path: str) -> str:
    return _read(path).rpartition("\n")[2].strip() or "it said nothing"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
