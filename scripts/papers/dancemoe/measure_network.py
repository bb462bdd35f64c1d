"""Servers on one machine that have a network of their own: namespaces, links of a chosen bandwidth, slow disks.

Each server is a network namespace with one interface, at 10.77.0.1 and so on; a switch, in a namespace too, joins them.
The token buckets of tc limit what each sends. Where control groups of version 1 can throttle reads, each server reads
the disk at a speed of its own. No packet can leave: nothing joins these namespaces to the machine's network.

Everything is taken away by a process that waits for the end of the one that made it, so also after a crash.
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
_TEMPORARY = Path("/tmp")  # not wherever TMPDIR is: paths of Ray's sockets are long
_MARK = "PYORCH_LAB"  # in the environment of processes: the network that they belong to
_PREFIX = "pyorch-lab-"  # of what belongs to a network: then letters that no other one has, and a server


class NoNetwork(Exception):
    """A sentence: why no network can be made here."""


def check_possible() -> None:
    """NoNetwork where this user, or this machine, cannot make one."""
    if sys.platform != "linux" or os.geteuid() != 0:
        raise NoNetwork("network namespaces need Linux and root: run it as root, or with sudo")
    for program in ("ip", "tc", "nsenter"):
        if shutil.which(program) is None:
            raise NoNetwork(f"the program {program} is missing: it comes with iproute2 and util-linux")


class Network:
    """A context: namespaces of servers with these names, joined by links of so many bits a second, in each direction.

    disk: bytes a second that each server reads of the disk with `path` on it; 0: as many as it can. throttled: whether
    that could be done. directory: for temporary files, which are removed at the end, too.
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
        """Ends all processes of the servers, and takes everything away."""
        self._keeper.stdin.close()
        self._keeper.wait()

    def address(self, name: str) -> str:
        return f"10.77.0.{self.names.index(name) + 1}"

    def start(self, name: str, command: Sequence[str], **options: object) -> subprocess.Popen:
        """A process of a server. It ends with the network at the latest. options: of Popen, but for its environment."""
        group = self._group(name)
        join = f'echo $$ > {group}/cgroup.procs; exec "$@"' if self.throttled else 'exec "$@"'
        inside = ["nsenter", f"--net={_RUN / self._space(name)}", "sh", "-c", join, "sh", *command]
        return subprocess.Popen(inside, stdin=subprocess.DEVNULL, start_new_session=True,
                                env=os.environ | {_MARK: self.tag}, **options)

    def run(self, name: str, command: Sequence[str], seconds: float) -> str:
        """What a process of a server prints. NoNetwork, with its last line, where it fails or takes longer."""
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
        """The calling thread opens its connections in the namespace of a server."""
        with open("/proc/thread-self/ns/net") as before:
            with open(_RUN / self._space(name)) as there:
                _enter(there.fileno())
            try:
                yield
            finally:
                _enter(before.fileno())

    def kill(self, name: str) -> int:
        """Ends all processes of a server at once, and its network before that: as if its power failed. How many."""
        self.set_link(name, up=False)
        return _kill_all(lambda: self.processes(name))

    def set_link(self, name: str, up: bool) -> None:
        """Joins the server to the others, or cuts it off."""
        _ip("-n", f"{self.tag}-switch", "link", "set", f"p{self.names.index(name)}", "up" if up else "down")

    def set_disk(self, bytes_per_second: float) -> None:
        """How fast each server reads, from now on; 0: as fast as it can. Nothing where that is not possible here."""
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
            # What a server sends; what it gets passes the switch's port to it. A burst is what 1 ms carries.
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
    """All that belongs to a network, whatever is left of it.

    First the names of its namespaces: then a process that was about to enter one cannot, unless it has opened it, and
    such a one bears the mark.
    """
    spaces = {path.name: os.stat(path).st_ino for path in _RUN.glob(f"{tag}-*")}
    for space in spaces:
        with contextlib.suppress(NoNetwork):
            _ip("netns", "del", space)
    _kill_all(lambda: _belonging(tag, set(spaces.values())))
    for group in _THROTTLE.glob(f"{tag}-*"):
        for _ in range(100):  # a process that has just ended may be listed for a moment
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
    """Processes in these namespaces, by inode, or with the mark of the network."""
    found, mark = [], f"{_MARK}={tag}".encode()
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            if process.name.isdigit() and (os.stat(process / "ns/net").st_ino in spaces
                                           or mark in (process / "environ").read_bytes().split(b"\0")):
                found.append(int(process.name))
    return found


def _kill_all(processes: Callable[[], list[int]]) -> int:
    """Those that are there, and those that they start meanwhile."""
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
    """MAJOR:MINOR of the whole disk with that file; None where it lies on none."""
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
    """Until whoever made the network closes the pipe, or ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    take_away(tag)


if __name__ == "__main__":
    _keep(sys.argv[1])
