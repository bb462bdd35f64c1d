"""Progress of a long command, on stderr: a bar on a terminal, otherwise a line now and then."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TextIO

from pyorch.errors import one_line

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

INTERVAL = 10.0  # seconds between lines; a shorter command prints none
SHARE = 0.1  # progress of a step that is worth a line before the interval is over
_LEAST = 1.0  # seconds between two lines at least
_REFRESH = 0.1  # seconds between two drawings of the bar, so that compute threads are not disturbed


class Progress:
    """Shows the progress that `update(step, done, total)` reports; total 0: unknown.

    Inside the `with` block only `paused()` and `say()` may write to the terminal.
    """

    def __init__(self, live: bool = True, stream: TextIO | None = None, interval: float | None = None) -> None:
        """Args:
        live: Draw a bar if there is a terminal. False if a log scrolls there.
        stream: The output; by default stderr.
        interval: Seconds between lines without a terminal.
        """
        self._given = sys.stderr if stream is None else stream
        self._stream = _duplicate(self._given)
        bar = live and self._stream.isatty()
        self._shown = _Bar(self._stream) if bar else _Lines(self._stream, INTERVAL if interval is None else interval)

    def update(self, step: str, done: int, total: int) -> None:
        self._shown.update(step, done, total)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Pauses the bar for output of the command itself."""
        self._shown.stop()
        try:
            yield
        finally:
            self._shown.start()

    def say(self, sentence: str) -> None:
        with self.paused():
            print(f"pyorch: {one_line(sentence)}", file=self._stream, flush=True)

    def __enter__(self) -> Progress:
        self._shown.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._shown.stop()
        if self._stream is not self._given:
            self._stream.close()


def _duplicate(stream: TextIO) -> TextIO:
    """Duplicates the stream: while llama_cpp loads a model silently, descriptors 1 and 2 are those of /dev/null."""
    try:
        return open(os.dup(stream.fileno()), "w", encoding=stream.encoding, errors="replace", buffering=1)
    except (OSError, ValueError):  # not a file
        return stream


class PlainLines:
    """Decides when a line is due, and its text. clock: returns seconds."""

    def __init__(self, interval: float = INTERVAL, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval = interval
        self._clock = clock
        self._last = self._began = clock()
        self._silent = True  # so far
        self._step, self._done, self._total = "", 0, 0
        self._last_share = 0.0

    def update(self, step: str, done: int, total: int) -> str | None:
        """Returns the line that is due now, or None."""
        if _begins_anew(done, total, self._done, self._total):
            self._began, self._last_share = self._clock(), 0.0
        self._step, self._done, self._total = step, done, total
        much = self._share - self._last_share >= SHARE - 1e-9 and self._clock() - self._last >= _LEAST
        return self._line() if much and not self._silent else self.beat()

    def beat(self) -> str | None:
        """Returns the line that is due without news, so that a step of minutes shows signs of life."""
        return self._line() if self._clock() - self._last >= self._interval else None

    @property
    def seconds_until_due(self) -> float:
        return max(0.0, self._last + self._interval - self._clock())

    @property
    def _share(self) -> float:
        return self._done / self._total if self._total else 0.0

    def _line(self) -> str:
        now = self._clock()
        self._last, self._last_share, self._silent = now, self._share, False
        if not self._step:
            return "starting"
        if not self._total:
            return f"{self._step}: {self._done} so far" if self._done else self._step
        left = (now - self._began) * (1 - self._share) / self._share if self._share > 0.02 else None
        return f"{self._step}: {self._share:.0%}" + ("" if left is None else f", about {_duration(left)} left")


class _Lines:
    """Prints lines from update(), and from a thread that waits for the next one."""

    def __init__(self, stream: TextIO, interval: float) -> None:
        self._stream = stream
        self._lines = PlainLines(interval)
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            with self._changed:
                self._changed.notify()
            thread.join()

    def update(self, step: str, done: int, total: int) -> None:
        with self._changed:
            self._print(self._lines.update(step, done, total))

    def _wait(self) -> None:
        with self._changed:
            while self._thread is threading.current_thread():
                self._changed.wait(self._lines.seconds_until_due)
                if self._thread is threading.current_thread():
                    self._print(self._lines.beat())

    def _print(self, line: str | None) -> None:
        if line is not None:
            print(f"pyorch: {line}", file=self._stream, flush=True)


class _Bar:
    """A bar such as `counting ━━━━━━━━━━╸━━━━━━━━━  52% 0:00:12`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._progress: RichProgress | None = None
        self._step = ""
        self._done = self._total = 0
        self._last = 0.0

    def start(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        if self._progress is None:
            # Step names are text, not markup. The bar is drawn once a second as a sign of life.
            self._progress = Progress(
                TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(),
                TimeRemainingColumn(),
                console=Console(file=self._stream), transient=True, refresh_per_second=1, redirect_stdout=False,
                redirect_stderr=False,
            )
            self._task = self._progress.add_task("starting", total=None)
        self._progress.start()

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()

    def update(self, step: str, done: int, total: int) -> None:
        now = time.monotonic()
        anew = _begins_anew(done, total, self._done, self._total)
        if not anew and step == self._step and now - self._last < _REFRESH:
            return
        self._step, self._done, self._total, self._last = step, done, total, now
        if anew:
            self._progress.reset(self._task, total=total or None)
        self._progress.update(self._task, description=step, completed=done, total=total or None, refresh=True)


def _begins_anew(done: int, total: int, done_before: int, total_before: int) -> bool:
    """Whether another piece of work has begun, with an unknown speed."""
    return done < done_before or total != total_before


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
