"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

from pyorch.errors import PyorchError
from pyorch.sizes import format_bytes

# Beyond the tensors a GGUF holds a vocabulary; what else writes to the disk needs something too.
_SPARE_BYTES = 32 << 20


def check_target(target: Path) -> None:
    """Raises PyorchError if no file can be written at `target`."""
    directory = target.parent
    if not directory.is_dir():
        raise PyorchError(f"the output directory {directory} does not exist: create it first")
    if target.is_dir():
        raise PyorchError(f"the output {target} is a directory: name a file, such as {target / 'model.gguf'}")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PyorchError(f"the output directory {directory} is not writable")


def check_free_space(directory: Path, n_bytes: int) -> None:
    """Raises PyorchError if the disk under `directory` has no room for `n_bytes` and some spare."""
    free = shutil.disk_usage(directory).free
    if free < n_bytes + _SPARE_BYTES:
        raise PyorchError(f"{directory} has {format_bytes(free)} free, the conversion needs about "
                          f"{format_bytes(n_bytes + _SPARE_BYTES)}: free some space or name another output")


@contextmanager
def staging(target: Path) -> Iterator[Path]:
    """A directory beside `target` for files in the making. It is gone afterwards, whatever happened."""
    try:
        directory = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent))
    except OSError as error:
        raise PyorchError(f"the output directory {target.parent} is not writable: {error.strerror}") from None
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def publish(files: list[Path], directory: Path) -> list[Path]:
    """Moves finished files of one staging directory into `directory`; they are on the disk before they have a name.

    The first is renamed last: a reader opens a split model by its first shard, and finds the others.
    """
    for file in files:
        _sync(file)
    published = [directory / file.name for file in files]
    for file, name in zip(reversed(files), reversed(published)):
        os.replace(file, name)
    _sync(directory)
    return published


def write_text(target: str | os.PathLike[str], text: str) -> None:
    """Writes a small file. Raises PyorchError if it cannot."""
    target = Path(target).absolute()
    check_target(target)
    with staging(target) as directory:
        try:
            (directory / target.name).write_text(text, encoding="utf-8")
            publish([directory / target.name], target.parent)
        except OSError as error:
            raise PyorchError(f"writing {target} failed: {error.strerror}; nothing was left there") from None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
