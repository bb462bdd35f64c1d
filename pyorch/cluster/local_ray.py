"""Ray, imported when it is needed; and a Ray of our own on this machine, as small as it can be."""

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

MARK = "PYORCH_CLUSTER"  # the environment variable that marks processes of a cluster
CHILD = "pyorch.cluster.child"  # the module that a serving process runs
_TEMPORARY = "/tmp"  # paths of sockets have 107 bytes at most, and Ray appends 72: not wherever TMPDIR is
_ANSWER_SECONDS = 10.0  # for Ray's first word
_SECONDS_TO_END = 15.0  # for servers whose Ray is gone: they write down what they learned; then they are killed

# No statistics are sent anywhere, no device is hidden from actors that claim none, and nobody who does not answer is
# asked for minutes.
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_NUM_REDIS_GET_RETRIES": "2",  # attempts to connect, of 41 seconds each
    "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",  # which would make a crash of SIGTERM
}

# As little of Ray as there can be: nothing is kept in its object store, of which this is the least; servers claim no
# processor, no worker waits for tasks, and none gives way to other processes. What uses too much memory is for the
# machine's rules, not for Ray's: a budget fills memory on purpose. A process that is gone is noticed within three
# seconds; one that is slow, as all are on a busy machine, may be so for fifteen.
_START = (
    "--head", "--block", "--port=0", "--dashboard-agent-listen-port=0", "--num-cpus=0", "--num-gpus=0",
    f"--object-store-memory={80 * MiB}", "--include-dashboard=false", "--include-log-monitor=false", "--no-monitor",
    "--disable-usage-stats", "--system-config=" + json.dumps({
        "memory_monitor_refresh_ms": 0, "enable_worker_prestart": False, "worker_niceness": 0,
        "health_check_period_ms": 500, "health_check_timeout_ms": 5000, "health_check_failure_threshold": 3,
    }),
)


# Either end of a connection of HTTP/2 says first which settings it has, in a frame whose fourth byte is its kind.
_SETTINGS, _KIND = b"\x04", 3
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + _SETTINGS + bytes(5)


def ray_library() -> ModuleType:
    """The module ray. PyorchError where it is not installed.

    Not imported before: it takes half a second, commands that need no cluster never see it, and it reads its
    environment when it is imported.
    """
    check_installed()
    os.environ.update(_QUIET)
    import ray

    return ray


def check_installed() -> None:
    """PyorchError where Ray is not installed."""
    if importlib.util.find_spec("ray") is None or importlib.util.find_spec("psutil") is None:
        raise PyorchError("a cluster needs Ray, which is not installed: pip install 'pyorch[cluster]'")


def ask_all(
    ray: ModuleType, names: Iterable[str], method: str, arguments: Callable[[str], tuple] = lambda name: (),
    seconds: float | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Calls a method of the actors with these names that Ray knows.

    Returns by name what they answered, what they raised, the RayError of one that died; and the references of answers
    that are late.
    """
    calls: dict[Any, str] = {}
    for name in names:
        with contextlib.suppress(ValueError):  # Ray knows it not, or no longer
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
    """Starts Ray for a cluster, on the loopback interface. Returns where it is.

    Its processes end with the first of them, the keeper, which outlives this process. Before anything is started the
    cluster is remembered, so that end() can remove whatever is left behind.
    """
    check_installed()
    directory = os.path.realpath(tempfile.mkdtemp(prefix="pyorch-ray-", dir=_TEMPORARY))
    running = remember(running, directory=directory)
    inner = os.path.join(directory, "r")  # Ray opens it to everybody, with logs and sockets: it lies in a private one
    log = os.path.join(directory, "ray.log")
    client = ports.free()  # for all else Ray asks the system, and keeps what it gets
    with open(log, "wb") as output:
        keeper = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", *_START, f"--temp-dir={inner}",
             f"--ray-client-server-port={client}"],
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=running.directory,
            env=os.environ | _environment(running), start_new_session=True,
        )
    running = remember(running, keeper=keeper.pid)
    # The file is there when all of Ray is.
    while not (address := _read(os.path.join(inner, "ray_current_cluster"))):
        if keeper.poll() is not None:
            raise PyorchError(f"Ray did not start: {_last_line(log)}")
        time.sleep(0.05)
    return remember(running, ray=address)


@contextlib.contextmanager
def connected(running: Running) -> Iterator[ModuleType]:
    """The module ray, connected to a cluster's Ray. PyorchError where nobody answers there."""
    if running.has_own_ray:
        os.environ.update(_environment(running))
    ray = ray_library()
    _check_answers(running)
    handler = signal.getsignal(signal.SIGTERM)  # Ray takes it for itself
    try:
        ray.init(address=running.ray, namespace=running.namespace, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # whatever Ray has for it, down to RuntimeError
        raise PyorchError(f"Ray at {running.ray} refused the connection: {_first_line(error)}") from None
    finally:
        signal.signal(signal.SIGTERM, handler)
    try:
        yield ray
    finally:
        ray.shutdown()


def end(running: Running) -> None:
    """Ends every process of a cluster with a Ray of its own, and removes its directory.

    Whatever state they are in; also where this was interrupted before. A serving process ends in order when its actor
    is gone, as far as it can.
    """
    begin = time.monotonic()
    # The keeper first: the kernel ends Ray's processes with it, none of which starts another one then.
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
    """Whether a cluster's Ray answers, and the keeper of one of its own is there."""
    import psutil

    try:
        if running.has_own_ray and not _belongs(psutil.Process(running.keeper), running):
            return False
    except psutil.Error:
        return False
    return answers(running)


def _check_answers(running: Running) -> None:
    if not running.ray:
        raise PyorchError("the cluster is starting; or who started it was interrupted, and `pyorch cluster down` "
                          "removes what is left of it")
    if not answers(running):
        ended = ": it has ended; `pyorch cluster down` removes what is left of it" if running.has_own_ray else ""
        raise PyorchError(f"no Ray answers at {running.ray}{ended}")


def answers(running: Running) -> bool:
    """Whether somebody speaks HTTP/2 where its Ray is, as Ray does. Ray itself would ask another one for minutes."""
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
    """Of the processes of a cluster with a Ray of its own. Ray asks for the token at its ports, too."""
    return {
        MARK: running.mark, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": running.token,
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on the loopback interface, as there: no cluster across machines
    }


def _processes(running: Running) -> list:
    """Of a cluster, on this machine.

    They have the cluster's mark in their environment. Some of Ray's write their title over that; they are in its
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
    except (psutil.Error, OSError):  # it is gone
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
        process.kill()  # psutil looks whether the number still is that process's


def _read(path: str) -> str:
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        return file.read().strip()
    return ""


def _last_line(path: str) -> str:
    return _read(path).rpartition("\n")[2].strip() or "it said nothing"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
