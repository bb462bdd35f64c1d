"""Files that appear complete or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyorch.errors import FormatError, PyorchError, because
from pyorch.signals import terminable
from pyorch.sizes import format_bytes

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# A GGUF has a vocabulary in addition to its tensors, and other programs write to the disk too.
SPARE_BYTES = 32 << 20
FEW_BYTES = 1 << 20  # for other programs, if the size of the file is known


def docs_dir() -> Path | None:
    """Returns the directory of the documentation, of the installed package or of the checkout."""
    for home in map(Path, sys.modules["pyorch"].__path__):
        for found in (home / "docs", home.parent / "docs"):
            if (found / "quickstart.md").is_file():
                return found
    return None


def check_target(target: Path) -> None:
    """Checks that a file can be written at `target`.

    Raises:
        PyorchError: It cannot.
    """
    directory = target.parent
    if not directory.is_dir():
        what = "is a file: name another" if directory.exists() else "does not exist: create it first"
        raise PyorchError(f"the output directory {directory} {what}")
    if target.is_dir():
        raise PyorchError(f"the output {target} is a directory: name a file in it")
    if target.exists() and not target.is_file():
        raise PyorchError(f"the output {target} is no file, and would be replaced by one: name another")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PyorchError(f"the output directory {directory} is not writable")


def make_directory(directory: Path, mode: int = 0o777) -> None:
    """Makes a directory and its parents if they do not exist.

    Raises:
        PyorchError: A directory cannot be made.
    """
    try:
        directory.mkdir(mode, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        file = next(path for path in (directory, *directory.parents) if path.exists() or path.is_symlink())
        raise PyorchError(f"{file} is a file, and a folder is needed there: name another folder") from None
    except OSError as error:
        raise PyorchError(f"{directory} cannot be written: {error.strerror}") from None


@contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns errors of reading into sentences.

    Raises:
        FormatError: The block could not read the file, or it is not UTF-8 text.
    """
    try:
        yield
    except OSError as error:
        raise FormatError(f"{os.fspath(path)} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise FormatError(f"{os.fspath(path)} is not UTF-8 text") from None


def read_toml(path: Path) -> dict[str, Any]:
    """Returns the content of a TOML file.

    Raises:
        FormatError: The file cannot be read.
    """
    with reading(path):
        text = path.read_bytes().decode("utf-8-sig")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is not TOML: {because(error)}") from None


def forget(descriptor: int, offset: int = 0, n_bytes: int = 0) -> None:
    """Asks the kernel to drop a part of a file from the page cache; 0 bytes: from the offset to the end."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, offset, n_bytes, os.POSIX_FADV_DONTNEED)


def check_free_space(directory: Path, n_bytes: int, spare_bytes: int = SPARE_BYTES) -> None:
    """Checks that the disk of `directory` has room for `n_bytes` and some spare.

    Raises:
        PyorchError: It has not.
    """
    free, needed = shutil.disk_usage(directory).free, n_bytes + spare_bytes
    if free < needed:
        raise PyorchError(f"{directory} has {format_bytes(free)} free, what is to be written needs about "
                          f"{format_bytes(needed, round_up=True)}: free some space or name another output")


@contextmanager
def staging(target: Path) -> Iterator[Path]:
    """Yields a directory next to `target` for unfinished files, and removes it afterwards.

    If a process is killed, its directory remains. The next staging() in the same place removes it, for any target. A
    lock on the directory, which ends with its process, marks a directory in use.
    """
    with terminable():
        _remove_abandoned(target.parent)
        try:
            directory, lock = _make_staging(target)
        except OSError as error:
            raise PyorchError(f"the output directory {target.parent} is not writable: {error.strerror}") from None
        _locks.add(lock)
        try:
            yield directory
        finally:
            _locks.discard(lock)
            shutil.rmtree(directory, ignore_errors=True)
            os.close(lock)


def staging_locks() -> tuple[int, ...]:
    """Returns descriptors for a child that writes into staging directories: the locks hold while the child lives."""
    return tuple(_locks)


_locks: set[int] = set()
_STAGING = re.compile(r"\..+\.[a-z0-9_]{8}\.part")  # the names that mkdtemp makes


def _make_staging(target: Path) -> tuple[Path, int]:
    """Makes a directory and returns it with the descriptor that holds its lock."""
    while True:
        directory = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent))
        lock = os.open(directory, os.O_RDONLY)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        # Before it was locked, another process may have removed the directory as abandoned.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(directory), os.fstat(lock)):
                return directory, lock
        os.close(lock)


def _remove_abandoned(parent: Path) -> None:
    """Removes the staging directories in `parent` that no living process holds."""
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(parent)):
            if _STAGING.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    _remove_unless_held(entry.path)


def _remove_unless_held(directory: str) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory, ignore_errors=True)
    finally:
        os.close(descriptor)


def publish(files: list[Path], directory: Path) -> list[Path]:
    """Moves finished files of one staging directory into `directory`, after they are written to the disk.

    It renames the first file last: a reader opens a split model by its first shard, and finds the others.
    """
    for file in files:
        _sync(file)
    published = [directory / file.name for file in files]
    for file, name in zip(reversed(files), reversed(published)):
        os.replace(file, name)
    _sync(directory)
    return published


def replace(file: Path, target: Path) -> None:
    """Gives a finished file its name, after it is written to the disk."""
    _sync(file)
    os.replace(file, target)
    _sync(target.parent)


def check_no_source(target: Path, sources: Iterable[str | Path], what: str = "the model itself") -> None:
    """Refuses to replace one of the files that are read for `target`. what: the role of these files.

    Raises:
        PyorchError: `target` is one of the sources.
    """
    if target.exists() and any(target.samefile(source) for source in sources if os.path.exists(source)):
        raise PyorchError(f"{target} is {what}: name another file")


@contextmanager
def continued(target: Path) -> Iterator[tuple[Path, int]]:
    """Yields the file in which a long run makes `target`, and its descriptor; the file has an earlier run's content.

    The file stays if the run does not end with replace(), unless it is empty. A lock, which ends with its process,
    excludes other processes. SIGTERM ends the run as Ctrl-C does.

    Raises:
        PyorchError: Another process holds the file, or it cannot be written.
    """
    part = target.with_name(f".{target.name}.part")
    while True:
        try:
            descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise PyorchError(f"{part} cannot be written: {error.strerror}") from None
        try:
            if take(descriptor, part, target):
                try:
                    with terminable():
                        yield part, descriptor
                finally:
                    _remove_empty(part, descriptor)
                return
        finally:
            os.close(descriptor)


def take(descriptor: int, path: Path, target: Path) -> bool:
    """Locks an open file for `target` until the file is closed or its process ends.

    Returns:
        False if the path names another file by now, because another process finished this one before the lock.

    Raises:
        PyorchError: Another process holds the lock.
    """
    with contextlib.suppress(OSError):  # a file system without locks
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PyorchError(f"another process is writing {target}: wait until it has ended") from None
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    return False


def discard(part: Path, target: Path) -> None:
    """Removes the unfinished file of an ended run, unless another process writes it."""
    with contextlib.suppress(OSError, PyorchError):
        descriptor = os.open(part, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if take(descriptor, part, target):
                part.unlink()
        finally:
            os.close(descriptor)


def _remove_empty(part: Path, descriptor: int) -> None:
    """Removes an open empty file while it still has this name."""
    with contextlib.suppress(OSError):
        if os.fstat(descriptor).st_size == 0 and os.path.samestat(os.stat(part), os.fstat(descriptor)):
            part.unlink()


@contextmanager
def writing(target: Path) -> Iterator[Path]:
    """Yields the file to write, which then becomes `target`.

    Raises:
        PyorchError: The file cannot be written.
    """
    with staging(target) as directory:
        try:
            yield directory / target.name
            publish([directory / target.name], target.parent)
        except OSError as error:
            raise PyorchError(f"writing {target} failed: {error.strerror}; what was there is unchanged") from None


def write_text(target: str | os.PathLike[str], text: str) -> None:
    """Writes a small file.

    Raises:
        PyorchError: The file cannot be written.
    """
    target = Path(target).absolute()
    check_target(target)
    with writing(target) as file:
        file.write_text(text, encoding="utf-8")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def has_holes(paths: list[str]) -> bool:
    """Whether files have holes, as a header of the right size does. Reading them would measure no disk.

    The number of blocks is not enough: some file systems report none, and some compress.
    """
    return any(status.st_blocks * 512 < 0.9 * status.st_size and _is_hole(path, status.st_size // 2)
               for path, status in zip(paths, map(os.stat, paths)))


def _is_hole(path: str, offset: int) -> bool:
    """Whether there is a hole at the offset; False if the file system does not say."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.lseek(descriptor, offset, os.SEEK_DATA) > offset
    except OSError as error:
        return error.errno == errno.ENXIO  # no data after it
    finally:
        os.close(descriptor)
