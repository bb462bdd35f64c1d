"""A line on a terminal that shows how far something is."""

from __future__ import annotations

import sys
import time


class Bar:
    """One line on stderr: `counting   [#####...................]  22 %  12 s left`. Nothing where it is no terminal."""

    def __init__(self, shown: bool = True):
        self._shown = shown and sys.stderr.isatty()
        self._step = ""
        self._begin = self._last = 0.0
        self._write(" starting")

    def update(self, step: str, done: int, total: int) -> None:
        now = time.monotonic()
        if step != self._step:
            self._step, self._begin = step, now
        if now - self._last < 0.1 and done < total:
            return
        self._last = now
        fraction = done / total if total else 1.0
        eta = (now - self._begin) * (1 - fraction) / fraction if fraction > 0.02 else None
        filled = int(fraction * 24)
        self._write(f" {step:<10} [{'#' * filled}{'.' * (24 - filled)}] {fraction:4.0%}"
                    + ("" if eta is None else f"  {eta:.0f} s left"))

    def clear(self) -> None:
        self._write("")

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def _write(self, text: str) -> None:
        if self._shown:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
