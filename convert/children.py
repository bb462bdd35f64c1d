"""Runs the converter, the quantizer and trainings as child processes, and explains their failures.

A child's last argument is the descriptor of a connection. The child receives a job, and sends dictionaries:

    {"done": n, "total": n}              while it works
    {"taken": True}                      it has read the last frame, and accepts another one
    {"result": value}                    if it has one
    {"error": kind, "message": text}     and the process ends

If the parent has ended, sending fails and ends the child.
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
Feed = Callable[[Callable[[object], None]], None]  # gets a function that sends a frame

CONVERTER = Path(__file__).with_name("converter_process.py")
_ESTIMATOR = Path(__file__).with_name("estimator_process.py")


# The key of a GGUF that pyorch converted or quantized; its value is pyorch's version.
MARK = "pyorch.convert"


class WriteError(PyorchError):
    """The output could not be written. The message is a reason without a path."""

    def __init__(self, reason: str):
        # neither numpy nor a C++ stream has the errno
        vague = "requested and" in reason or "iostream" in reason
        super().__init__("the disk is full or at its limit" if vague else reason)


class _Failure(Exception):
    """The failure of a child. message: one line; its last line of output if it gave no reason."""

    def __init__(self, kind: str, message: str) -> None:
        self.kind, self.message = kind, textwrap.shorten(message, 400)


def run_converter(jobs: list[dict], *, verbose: bool = False, on_progress: OnProgress | None = None) -> None:
    """Converts each job: {"checkpoint", "output": paths, "outtype", "options": of llama.cpp's converter,
    "pre_tokenizer": str or None, "has_mtp": bool}.

    Several jobs in one process save the seconds that torch needs to start.

    Raises:
        PyorchError: A job failed. Later ones are not started.
        WriteError: The output could not be written.
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

    Raises:
        PyorchError: The quantizer failed.
        WriteError: The output could not be written.
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
    int, "lr": float}. Returns weights by name, and the measurements.

    Args:
        job: Its "arrays" are "defaults.i" of each layer i, the router's "gate.i", "norm.i" and so on, "eps" of all, and
            the fields of Router.choice().
        feed: Called with a function that takes (held out or not, records).
        verbose: Show the log of the child.
        on_progress: Called with the steps done.

    Raises:
        PyorchError: The training failed, or packages are missing.
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
    """Runs a child on a job, and returns its result.

    On any exception, including KeyboardInterrupt, the child is killed before the exception propagates.

    Args:
        argv: The program.
        job: Its job.
        verbose: Show the log of the child.
        on_progress: Called with the child's progress.
        feed: Sends frames after the job, and None after the last. Each is sent when the child has taken the one before,
            so that this process and the child alternate, and at most one frame is in flight.

    Raises:
        _Failure: The child failed.
    """
    with tempfile.TemporaryFile() as log:
        output = None if verbose else log
        child, connection = started(argv, staging_locks(), stdout=output, stderr=output,
                                    env={**os.environ, "PYTHONUNBUFFERED": "1"})
        try:
            reports = _Reports(connection, on_progress)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the status tells of a failure
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
    """Receives the messages of a child until it closes its end of the connection."""

    def __init__(self, connection: Connection, on_progress: OnProgress | None) -> None:
        super().__init__(daemon=True)  # an interrupted process does not wait for it
        self.result: Any = None
        self._connection, self._on_progress = connection, on_progress
        self._error: dict | None = None
        self._unseen: OSError | None = None  # why progress cannot be shown
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
        self._turns.release()  # no frame will be taken, and sending reports it

    def _show(self, done: int, total: int) -> None:
        try:
            self._on_progress(done, total)
        except OSError as error:
            self._unseen = error

    def send_in_turn(self, frame: object) -> None:
        """Sends a frame when the child has taken the last one. BrokenPipeError: the child has ended."""
        self._turns.acquire()
        if self._unseen is not None:
            raise BrokenPipeError
        self._connection.send(frame)

    def error(self) -> dict | None:
        """Returns the error among the reports, when all have arrived. OSError: progress cannot be shown."""
        self.join()
        if self._unseen is not None:
            raise self._unseen
        return self._error
