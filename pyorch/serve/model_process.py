"""The process that serves one of several models: a separate `pyorch serve`.

    unloaded --request names it--> loading --> loaded --idle for keep-alive, or another needs the memory--> unloaded
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from pyorch.errors import PyorchError, one_line

_ERROR = re.compile(r"pyorch: error: (.*)")
_ERROR_OF_LLAMA = re.compile(r"[0-9.]+ E (?:srv |cmn )? *(.*)")  # a line of llama-server's log, after the time

_SILENT = "it ended without a word"


@dataclass
class Model:
    """One of several models.

    Attributes:
        process: None unless the model is loaded or loading.
        port: The port of the process, 0 until it answers.
        busy: The number of requests that wait for the model or are being answered.
        waits: The time of the first request for a model that was not loaded.
        used: The time at which the last request ended.
        keep_alive: Seconds without a request after which the model is unloaded.
        loading: Whether a thread loads the model.
        promised: The bytes that the load will allocate.
        said: The reason for the end of the process.
        failures: The number of failed loads.
    """

    name: str
    path: Path
    keep_alive: float
    process: subprocess.Popen | None = None
    port: int = 0
    busy: int = 0
    waits: float = 0.0
    used: float = field(default_factory=time.monotonic)
    loading: bool = False
    promised: int = 0
    said: str = ""
    failures: int = 0

    def is_loaded(self) -> bool:
        return self.process is not None and self.process.poll() is None and self.port > 0

    def waiting(self) -> tuple[int, float]:
        """Returns the number of requests that wait until the model is loaded, and the seconds of the oldest."""
        if self.is_loaded() or not self.busy:
            return 0, 0.0
        return self.busy, time.monotonic() - self.waits

    @property
    def state(self) -> str:
        """The state, in the words of llama-server's router."""
        return "loaded" if self.is_loaded() else "loading" if self.loading else "unloaded"

    @property
    def idle_at(self) -> float:
        """The time at which the model will be unloaded, as in time.time()."""
        return time.time() + self.used + self.keep_alive - time.monotonic()

    def begin(self, command: Callable[[str, Path, int], list[str]]) -> TextIO:
        """Starts the process. Returns the file to which it writes its port, for wait_until_it_serves()."""
        # The port cannot be parsed from the output: a model's name may contain any text.
        port, announces = os.pipe()
        announced = open(port)
        try:
            self.port, self.said = 0, _SILENT
            # In its own process group, because Ctrl-C in a terminal is for this process, which then ends the others.
            self.process = subprocess.Popen(
                command(self.name, self.path, announces), stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                errors="replace", start_new_session=True, pass_fds=(announces,))
        except BaseException:
            announced.close()
            raise
        finally:
            os.close(announces)
        return announced

    def wait_until_it_serves(self, announced: TextIO) -> None:
        """Waits until the process answers.

        Raises:
            PyorchError: The process ended first; the message has the reason.
        """
        process, began = self.process, time.monotonic()
        says = threading.Thread(target=self._pass_on, args=(process.stderr,), daemon=True)
        says.start()
        with announced:
            line = announced.readline()  # empty if the process has ended
        if not line.endswith("\n"):
            process.wait()
            says.join()
            raise PyorchError(f"{self.name} could not be loaded: {self.said}")
        self.port = int(line)
        say(f"loaded {self.name} in {time.monotonic() - began:.1f} s")

    def still_to_come(self) -> int:
        """Returns the bytes that a load has promised but its process has not allocated yet."""
        try:
            resident = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, OSError, IndexError):  # not started, or not Linux
            resident = 0
        return max(0, self.promised - resident)

    def _pass_on(self, lines: Iterator[str]) -> None:
        """Copies the output of the process to ours, except for its address."""
        for line in lines:
            # llama-server's first error names the cause; later ones name the functions that failed because of it.
            error = _ERROR.match(line) or (self.said == _SILENT and _ERROR_OF_LLAMA.match(line))
            self.said = error[1] if error else self.said
            if not line.startswith("pyorch: serving ") and "API for programs at" not in line:
                say(f"{self.name}: {line.rstrip().removeprefix('pyorch: ')}")


def end(name: str, process: subprocess.Popen, why: str) -> None:
    process.terminate()
    process.wait()
    say(f"unloaded {name}, {why}")


def say(sentence: str) -> None:
    """Prints a line to stderr. print() writes the end of the line by itself, so lines of several threads would mix."""
    sys.stderr.write(f"pyorch: {one_line(sentence)}\n")
    sys.stderr.flush()
