"""Copies of the model on other disks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MAX_MIRRORS = 16  # PYORCH_MAX_COPIES


@dataclass(frozen=True)
class Mirrors:
    """Copies of the model on other disks.

    Attributes:
        paths: For each disk a copy of the file, or a folder that contains one. Text separates them with a colon.
    """

    paths: tuple[Path, ...] = ()

    @classmethod
    def parse(cls, given: str | Path | Sequence[str | Path] | Mirrors) -> Mirrors:
        """Parses one path, several paths joined by a colon, or a list.

        Raises:
            ValueError: A path is empty, or there are more than MAX_MIRRORS.
        """
        if isinstance(given, Mirrors):
            return given
        several: Sequence[str | Path] = [given] if isinstance(given, (str, Path)) else list(given)
        texts = [part for one in several for part in os.fspath(one).split(os.pathsep)]
        if not all(texts) or not 1 <= len(texts) <= MAX_MIRRORS:
            raise ValueError(given)
        return cls(tuple(map(Path, texts)))

    def __str__(self) -> str:
        return os.pathsep.join(map(str, self.paths))
