"""Starts the converter, the quantizer and trainings as child processes and turns their failures into sentences.

A child's last argument is the descriptor of a connection. Over it the child gets a job, and sends dictionaries:

    {"done": n, "total": n}              while it works
    {"taken": True}                      it is done with the frame that it got last, and takes another one
    {"result": value}                    if it has one
    {"error": kind, "message": text}     and the process ends

Where nobody listens any more, the work is pointless: sending fails, and ends it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pyorch import __version__
from pyorch.convert import architectures
from pyorch.errors import PyorchError
from pyorch.files import staging_locks
from pyorch.processes import started

OnProgress = Callable[[int, int], None]  # done, total
Feed = Callable[[Callable[[object], None]], None]  # is given what sends a frame

CONVERTER = Path(__file__).with_name("converter_process.py")
_ESTIMATOR = Path(__file__).with_name("estimator_process.py")


# The key of a GGUF that pyorch converted or quantized; its value is the version of pyorch.
MARK = "pyorch.convert"


class WriteError(PyorchError):
    """The output could not be written: a reason without the name of the place."""

    def __init__(self, reason: str):
        # neither numpy nor a C++ stream tells the errno
        vague = "requested and" in reason or "iostream" in reason
        super().__init__("the disk is full or at its limit" if vague else reason)


class _Failure(Exception):
    """Of a child. message: on one line; what it said last where it gave no reason."""

    def __init__(self, kind: str, message: str) -> None:
        self.kind, self.message = kind, textwrap.shorten(message, 400)


def run_converter(jobs: list[dict], *, verbose: bool = False, on_progress: OnProgress | None = None) -> None:
    """Converts each job: {"checkpoint", "output": paths, "outtype", "options": of llama.cpp's converter,
    "pre_tokenizer": str or None, "has_mtp": bool}.

    Several in one process save the seconds that torch needs to start. Raises PyorchError at the first
    failure.
    """
    try:
        _run([sys.executable, str(CONVERTER), str(architectures.converter_dir())],
             {"jobs": jobs, "mark": (MARK, __version__)}, verbose, on_progress)
    except _Failure as failure:
        if failure.kind == "missing":
            raise PyorchError(f"the converter needs Python packages that are missing ({failure.message}): "
                              "pip install 'pyorch[convert]'") from None
        if failure.kind == "pre-tokenizer":
            raise PyorchError(
                "llama.cpp's converter does not recognize this checkpoint's tokenizer: say with --pre-tokenizer NAME "
                "how it splits text before BPE, such as gpt-2, qwen2 or llama-bpe (--pre-tokenizer list shows all "
                f"{len(architectures.known_pre_tokenizers())})"
            ) from None
        if failure.kind == "write":
            raise WriteError(failure.message) from None
        raise PyorchError(f"llama.cpp's converter failed: {failure.message}; --verbose shows its log") from None


def run_quantizer(job: dict, *, verbose: bool = False, on_progress: OnProgress | None = None) -> None:
    """Quantizes {"source", "output": paths, "file_type": llama_ftype, "pure", "keep_split": bool, "imatrix": path or
    None}.

    Raises PyorchError.
    """
    try:
        _run([sys.executable, "-m", "pyorch.convert.quantize_process"], job, verbose, on_progress)
    except _Failure as failure:
        message = failure.message
        if failure.kind == "write":
            raise WriteError(message) from None
        if job["imatrix"] is None and ("imatrix" in message or "importance matrix" in message):
            raise PyorchError("this quantization needs an importance matrix: give one, which llama.cpp's "
                              "llama-imatrix makes, with --imatrix, or use a type of 3 bits and more") from None
        if "imatrix" in message:
            raise PyorchError(f"{job['imatrix']} does not suit this model: {message}") from None
        raise PyorchError(f"llama.cpp's quantizer failed: {message}; --verbose shows its log") from None


def run_estimator(job: dict, feed: Feed, *, verbose: bool = False, on_progress: OnProgress | None = None) -> Any:
    """Trains {"header": TraceHeader, "arrays", "n_training": tokens to come, "n_latent", "n_hidden", "epochs", "seed":
    int, "lr": float}. Returns weights by name, and what was measured.

    arrays: of each layer i, "defaults.i" and the router's "gate.i", "norm.i" and so on, "eps" of all, what
    Router.choice() says of all. feed: called with what takes (held out or not, records). Raises PyorchError.
    """
    try:
        return _run([sys.executable, str(_ESTIMATOR)], job, verbose, on_progress, feed)
    except _Failure as failure:
        if failure.kind == "missing":
            raise PyorchError(f"training needs Python packages that are missing ({failure.message}): pip install "
                              "'pyorch[convert]'") from None
        raise PyorchError(f"the training failed: {failure.message}; --verbose shows its log") from None


def _run(
    argv: list[str], job: object, verbose: bool, on_progress: OnProgress | None, feed: Feed | None = None
) -> Any:
    """Runs a child on a job, and returns its result. Raises _Failure.

    feed: sends frames behind the job, and None behind the last; each is sent when the child is done with the one
    before, so that this process and the child compute in turns, and no more than a frame is under way.

    On any exception, KeyboardInterrupt included, the child is killed before the exception goes on.
    """
    with tempfile.TemporaryFile() as log:
        output = None if verbose else log
        child, connection = started(argv, staging_locks(), stdout=output, stderr=output,
                                    env={**os.environ, "PYTHONUNBUFFERED": "1"})
        try:
            reports = _Reports(connection, on_progress)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its status tells whether it had enough
                connection.send(job)
                if feed is not None:
                    feed(reports.send_in_turn)
                    reports.send_in_turn(None)
            error = reports.error()
            status = child.wait()
        except BaseException:
            child.kill()
            child.wait()
            raise
        finally:
            connection.close()
        log.seek(0)
        said = [line.strip() for line in log.read().decode("utf-8", "replace").splitlines() if line.strip()]
    if status == 0:
        return reports.result
    last_line = said[-1] if said else ""
    if error is not None:
        raise _Failure(error["error"], error["message"] or last_line)
    if status < 0:
        raise _Failure("failed", f"it was ended by signal {-status}{' (out of memory?)' if status == -9 else ''}")
    raise _Failure("failed", last_line)


class _Reports(threading.Thread):
    """Takes what a child says until it closes its end of the connection."""

    def __init__(self, connection: Connection, on_progress: OnProgress | None) -> None:
        super().__init__(daemon=True)  # where this process is interrupted, nobody waits for it
        self.result: Any = None
        self._connection, self._on_progress = connection, on_progress
        self._error: dict | None = None
        self._unseen: OSError | None = None  # why progress could not be shown
        self._turns = threading.Semaphore(1)
        self.start()

    def run(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while self._unseen is None:
                message = self._connection.recv()
                if "error" in message:
                    self._error = message
                elif "result" in message:
                    self.result = message["result"]
                elif "taken" in message:
                    self._turns.release()
                elif self._on_progress is not None:
                    self._show(message["done"], message["total"])
        self._turns.release()  # nobody will take anything: sending says so

    def _show(self, done: int, total: int) -> None:
        try:
            self._on_progress(done, total)
        except OSError as error:
            self._unseen = error

    def send_in_turn(self, frame: object) -> None:
        """BrokenPipeError where the child has ended."""
        self._turns.acquire()
        if self._unseen is not None:
            raise BrokenPipeError
        self._connection.send(frame)

    def error(self) -> dict | None:
        """The error among the reports, when all have come. OSError where progress cannot be shown any more."""
        self.join()
        if self._unseen is not None:
            raise self._unseen
        return self._error
