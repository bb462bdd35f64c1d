"""The process that serves one of several models: a `pyorch serve` of its own.

    unloaded --a request names it--> loading --> loaded --idle for keep-alive, or in the way of another--> unloaded
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
_ERROR_OF_LLAMA = re.compile(r"[0-9.]+ E (?:srv |cmn )? *(.*)")  # as llama-server logs it, behind the time

_SILENT = "it ended without a word"


@dataclass
class Model:
    """One of several models.

    Attributes:
        process: None while the model is not loaded, and not being loaded.
        port: Of the process, 0 until it answers.
        busy: Requests that wait for the model, or that it answers.
        used: When the last request ended.
        keep_alive: Seconds without a request after which the model is unloaded.
        loading: A thread loads the model.
        promised: Bytes that the load will take.
        said: Why the process ended.
        failures: Loads that failed.
    """

    name: str
    path: Path
    keep_alive: float
    process: subprocess.Popen | None = None
    port: int = 0
    busy: int = 0
    used: float = field(default_factory=time.monotonic)
    loading: bool = False
    promised: int = 0
    said: str = ""
    failures: int = 0

    def is_loaded(self) -> bool:
        return self.process is not None and self.process.poll() is None and self.port > 0

    @property
    def state(self) -> str:
        """As llama-server's router calls it."""
        return "loaded" if self.is_loaded() else "loading" if self.loading else "unloaded"

    @property
    def idle_at(self) -> float:
        """When the model will be unloaded, in seconds of time.time()."""
        return time.time() + self.used + self.keep_alive - time.monotonic()

    def begin(self, command: Callable[[str, Path, int], list[str]]) -> TextIO:
        """Starts the process. Returns the file into which it writes its port, for wait_until_it_serves()."""
        # No pattern finds the port in what the process says: a model's name may have any text in it.
        port, announces = os.pipe()
        announced = open(port)
        try:
            self.port, self.said = 0, _SILENT
            # In a group of its own: Ctrl-C in a terminal is for this process, which ends the others.
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
        """PyorchError, with the reason, where the process ends before."""
        process, began = self.process, time.monotonic()
        says = threading.Thread(target=self._pass_on, args=(process.stderr,), daemon=True)
        says.start()
        with announced:
            line = announced.readline()  # nothing where the process has ended
        if not line.endswith("\n"):
            process.wait()
            says.join()
            raise PyorchError(f"{self.name} could not be loaded: {self.said}")
        self.port = int(line)
        say(f"loaded {self.name} in {time.monotonic() - began:.1f} s")

    def still_to_come(self) -> int:
        """Bytes that a load will take beside those that its process has, which are free no more."""
        try:
            resident = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, OSError, IndexError):  # it has not begun, or this is not Linux
            resident = 0
        return max(0, self.promised - resident)

    def _pass_on(self, lines: Iterator[str]) -> None:
        """What the process says goes where ours does, but its address, which is not ours."""
        for line in lines:
            # The first line of llama-server has the cause; those behind say which functions failed with it.
            error = _ERROR.match(line) or (self.said == _SILENT and _ERROR_OF_LLAMA.match(line))
            self.said = error[1] if error else self.said
            if not line.startswith("pyorch: serving ") and "API for programs at" not in line:
                say(f"{self.name}: {line.rstrip().removeprefix('pyorch: ')}")


def end(name: str, process: subprocess.Popen, why: str) -> None:
    process.terminate()
    process.wait()
    say(f"unloaded {name}, {why}")


def say(sentence: str) -> None:
    print(f"pyorch: {one_line(sentence)}", file=sys.stderr, flush=True)
