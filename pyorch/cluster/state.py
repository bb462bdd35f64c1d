"""The file about a running cluster, which `up` writes for later commands.

It is in a directory that only the user can read, because it contains the cluster's token.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pyorch.errors import PyorchError
from pyorch.files import make_directory


@dataclass(frozen=True)
class Running:
    """A cluster that is up or starting.

    Attributes:
        config: The cluster.toml.
        mark: Hexadecimal digits in the environment of each of its processes on this machine.
        token: The cluster's secret.
        servers: The names of the servers.
        ray: HOST:PORT of Ray's control server; "" while it starts.
        keeper: The process that owns the cluster's own Ray; 0 on an existing Ray cluster.
        directory: The temporary files of the cluster's own Ray; "" on an existing Ray cluster.
    """

    config: str
    mark: str
    token: str = field(repr=False)
    servers: tuple[str, ...] = ()
    ray: str = ""
    keeper: int = 0
    directory: str = ""

    @property
    def namespace(self) -> str:
        """The namespace of its actors in Ray."""
        return f"pyorch-{self.mark}"

    @property
    def has_own_ray(self) -> bool:
        return bool(self.directory)

    @classmethod
    def new(cls, config: Path) -> Running:
        """Returns a cluster with a new mark and token."""
        return cls(str(config.resolve()), secrets.token_hex(8), secrets.token_hex(32))


def find(config: Path) -> Running | None:
    """The running cluster of a cluster.toml, None if it is not up."""
    path = _path(config)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return Running(**{**values, "servers": tuple(values["servers"])})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PyorchError(f"{path}, which names the running cluster, cannot be read: {error}; remove it "
                          f"when no process of the cluster is left (their environment has PYORCH_CLUSTER)") from None


def remember(running: Running, **changes: Any) -> Running:
    """Writes the file atomically, with changes. Only this user can read it."""
    running = replace(running, **changes)
    path = _path(Path(running.config))
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(asdict(running), file)
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise PyorchError(f"{path}, which names the running cluster, cannot be written: "
                          f"{error.strerror}") from None
    return running


def forget(running: Running) -> None:
    """Deletes the file."""
    _path(Path(running.config)).unlink(missing_ok=True)


@contextlib.contextmanager
def locked(config: Path) -> Iterator[None]:
    """Holds a lock, so that no other command starts or ends this cluster.

    Raises:
        PyorchError: Another command holds it.
    """
    path = _path(config).with_suffix(".lock")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PyorchError(f"another command is starting or ending the cluster of {config}: wait for it") from None
        yield
    finally:
        os.close(descriptor)


def _path(config: Path) -> Path:
    """Returns the file for a cluster.toml; its name depends on the whole path."""
    key = hashlib.sha256(os.fsencode(config.resolve())).hexdigest()[:16]
    return _directory() / f"{config.stem}-{key}.json"


def _directory() -> Path:
    """Returns $XDG_RUNTIME_DIR/pyorch, or a private directory in the one for temporary files."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    home = Path(runtime) / "pyorch" if runtime and os.path.isdir(runtime) else \
        Path(tempfile.gettempdir()) / f"pyorch-{os.getuid()}"
    make_directory(home, 0o700)
    found = os.lstat(home)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PyorchError(f"{home} is open to others than this user: remove it, or make it private (chmod 700)")
    return home
