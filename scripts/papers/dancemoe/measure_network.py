"""Gives servers on one machine their own network: namespaces, links of a chosen bandwidth, and slow disks.

Each server is a network namespace with one interface, at 10.77.0.1, 10.77.0.2, ... A switch in its own namespace joins
them. The token buckets of tc limit the bytes that each server sends. Where control groups of version 1 can throttle
reads, each server has its own limit of reads from the disk. No packet can leave: no link joins these namespaces to the
machine's network.

A separate process removes the network when the process that made it ends, so a crash leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

_RUN = Path("/run/netns")
_THROTTLE = Path("/sys/fs/cgroup/blkio")
_CLONE_NEWNET = 0x40000000
_TEMPORARY = Path("/tmp")  # TMPDIR may be too long for the paths of Ray's sockets
_MARK = "PYORCH_LAB"  # variable in the environment of processes, with the tag of their network
_PREFIX = "pyorch-lab-"  # of all names of a network; unique letters and then a server's number follow


class NoNetwork(Exception):
    """A network cannot be made here. The message is a sentence with the reason."""


def check_possible() -> None:
    """Raises NoNetwork if this user or this machine cannot make a network."""
    if sys.platform != "linux" or os.geteuid() != 0:
        raise NoNetwork("network namespaces need Linux and root: run the program as root, or with sudo")
    for program in ("ip", "tc", "nsenter"):
        if shutil.which(program) is None:
            raise NoNetwork(f"the program {program} is missing: it comes with iproute2 and util-linux")


class Network:
    """A context that holds the servers' namespaces, with a link to each server.

    Attributes:
        names: Names of the servers.
        tag: Name of the network.
        directory: Directory for temporary files. It is removed at the end.
        throttled: Reads of the disk are limited.

    Args:
        names: Names of the servers.
        bits_per_second: Bandwidth of each link, in each direction.
        disk: Bytes per second that each server may read from the disk; 0: no limit.
        path: A file on that disk.
    """

    def __init__(self, names: Sequence[str], bits_per_second: float, disk: float, path: Path) -> None:
        check_possible()
        self.names = tuple(names)
        self.tag = f"{_PREFIX}{secrets.token_hex(4)}"
        self.directory = _TEMPORARY / self.tag
        self.throttled = False
        self._rate, self._disk, self._path = bits_per_second, disk, path
        self._keeper: subprocess.Popen | None = None

    def __enter__(self) -> Network:
        self._keeper = subprocess.Popen([sys.executable, __file__, self.tag], stdin=subprocess.PIPE,
                                        start_new_session=True)
        try:
            self.directory.mkdir(mode=0o700)
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Ends all processes of the servers, and removes the network."""
        self._keeper.stdin.close()
        self._keeper.wait()

    def address(self, name: str) -> str:
        return f"10.77.0.{self.names.index(name) + 1}"

    def start(self, name: str, command: Sequence[str], **options: object) -> subprocess.Popen:
        """Starts a process of a server. It ends with the network at the latest.

        Args:
            name: The server.
            command: Program and arguments.
            options: Options of Popen, except the environment.
        """
        group = self._group(name)
        join = f'echo $$ > {group}/cgroup.procs; exec "$@"' if self.throttled else 'exec "$@"'
        inside = ["nsenter", f"--net={_RUN / self._space(name)}", "sh", "-c", join, "sh", *command]
        return subprocess.Popen(inside, stdin=subprocess.DEVNULL, start_new_session=True,
                                env=os.environ | {_MARK: self.tag}, **options)

    def run(self, name: str, command: Sequence[str], seconds: float) -> str:
        """Returns the output of a process of a server.

        Raises:
            NoNetwork: The process fails or takes longer than `seconds`. The message is its last line if it fails.
        """
        process = self.start(name, command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            output, errors = process.communicate(timeout=seconds)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise NoNetwork(f"{' '.join(command[:6])} takes longer than {seconds:g} s") from None
            raise
        if process.returncode:
            raise NoNetwork((errors.strip() or output.strip() or f"{command[0]} failed").splitlines()[-1])
        return output

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Opens connections of the calling thread in the namespace of a server."""
        with open("/proc/thread-self/ns/net") as before:
            with open(_RUN / self._space(name)) as there:
                _enter(there.fileno())
            try:
                yield
            finally:
                _enter(before.fileno())

    def kill(self, name: str) -> int:
        """Kills all processes of a server and returns their number. Its link fails first, as in a loss of power."""
        self.set_link(name, up=False)
        return _kill_all(lambda: self.processes(name))

    def set_link(self, name: str, up: bool) -> None:
        """Joins the server to the others, or disconnects it."""
        _ip("-n", f"{self.tag}-switch", "link", "set", f"p{self.names.index(name)}", "up" if up else "down")

    def set_disk(self, bytes_per_second: float) -> None:
        """Sets the limit of each server's reads from now on; 0: no limit. Does nothing if reads cannot be limited."""
        if self.throttled:
            for name in self.names:
                limit = self._group(name) / "blkio.throttle.read_bps_device"
                limit.write_text(f"{_disk_of(self._path)} {bytes_per_second:.0f}")

    def processes(self, name: str) -> list[int]:
        return _processes(self._space(name))

    def _space(self, name: str) -> str:
        return f"{self.tag}-{self.names.index(name)}"

    def _group(self, name: str) -> Path:
        return _THROTTLE / self._space(name)

    def _make(self) -> None:
        switch = f"{self.tag}-switch"
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for i, name in enumerate(self.names):
            space, port = self._space(name), f"p{i}"
            _ip("netns", "add", space)
            _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("-n", switch, "link", "set", port, "master", "switch", "up")
            _ip("-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", space, "link", "set", "lo", "up")
            # The server's interface limits sent bytes, the switch's port received bytes. A burst is the bytes of 1 ms.
            burst = str(max(16_000, int(self._rate / 8e3)))
            for where, device in ((space, "eth0"), (switch, port)):
                _call("tc", "-n", where, "qdisc", "add", "dev", device, "root", "tbf", "rate", f"{self._rate:.0f}",
                      "burst", burst, "latency", "200ms")
        if _throttles():
            self._join_groups()
            self.set_disk(self._disk)

    def _join_groups(self) -> None:
        for name in self.names:
            self._group(name).mkdir()
        self.throttled = _disk_of(self._path) is not None


def take_away(tag: str) -> None:
    """Removes all remains of a network.

    The names of its namespaces are removed first, so no process can enter them later. A process that has already opened
    a namespace has the mark in its environment, and is killed for that.
    """
    spaces = {path.name: os.stat(path).st_ino for path in _RUN.glob(f"{tag}-*")}
    for space in spaces:
        with contextlib.suppress(NoNetwork):
            _ip("netns", "del", space)
    _kill_all(lambda: _belonging(tag, set(spaces.values())))
    for group in _THROTTLE.glob(f"{tag}-*"):
        for _ in range(100):  # a group may list an ended process for a moment
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.05)
    shutil.rmtree(_TEMPORARY / tag, ignore_errors=True)


def _throttles() -> bool:
    return (_THROTTLE / "blkio.throttle.read_bps_device").exists()


def _processes(space: str) -> list[int]:
    with contextlib.suppress(NoNetwork):
        return [int(word) for word in _ip("netns", "pids", space).split()]
    return []


def _belonging(tag: str, spaces: set[int]) -> list[int]:
    """Returns the processes in these namespaces (inodes) or with the mark of the network."""
    found, mark = [], f"{_MARK}={tag}".encode()
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # the process has ended
            if process.name.isdigit() and (os.stat(process / "ns/net").st_ino in spaces
                                           or mark in (process / "environ").read_bytes().split(b"\0")):
                found.append(int(process.name))
    return found


def _kill_all(processes: Callable[[], list[int]]) -> int:
    """Kills the processes, and processes that they start meanwhile. Returns their number."""
    killed = set()
    deadline = time.monotonic() + 30
    while (left := [pid for pid in processes() if pid != os.getpid()]) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed.update(left)
        time.sleep(0.02)
    return len(killed)


def _disk_of(path: Path) -> str | None:
    """Returns MAJOR:MINOR of the whole disk with that file; None if no disk holds it."""
    number = os.stat(path).st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not device.exists():
        return None
    device = device.resolve()
    if (device / "partition").exists():
        device = device.parent
    return (device / "dev").read_text().strip()


def _enter(descriptor: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
        raise NoNetwork(f"a namespace cannot be entered: {os.strerror(ctypes.get_errno())}")


def _ip(*arguments: str) -> str:
    return _call("ip", *arguments)


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        words = done.stderr.strip() or "it does not say why"
        raise NoNetwork(f"`{' '.join(command)}` failed: {words.splitlines()[-1]}")
    return done.stdout


def _keep(tag: str) -> None:
    """Keeps a network until its maker closes the pipe or ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    take_away(tag)


if __name__ == "__main__":
    _keep(sys.argv[1])
