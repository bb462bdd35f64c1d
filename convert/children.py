"""Starts the converter, the quantizer and trainings as child processes and turns their failures into sentences."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import textwrap
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO

from pyorch.convert import architectures
from pyorch.errors import PyorchError
from pyorch.files import staging_locks

OnProgress = Callable[[int, int], None]  # done, total
Feed = Callable[[Callable[[bytes], None]], None]  # is given what sends a frame

CONVERTER = Path(__file__).with_name("converter_process.py")
_ESTIMATOR = Path(__file__).with_name("estimator_process.py")


class WriteError(PyorchError):
    """The output could not be written: a reason without the name of the place."""

    def __init__(self, reason: str):
        # neither numpy nor a C++ stream tells the errno
        vague = "requested and" in reason or "iostream" in reason
        super().__init__("the disk is full or at its limit" if vague else reason)


def run_converter(jobs: list[dict], *, verbose: bool = False, on_progress: OnProgress | None = None) -> None:
    """Converts each job: {"checkpoint", "output": paths, "outtype", "options": of llama.cpp's converter,
    "pre_tokenizer": str or None, "has_mtp": bool}.

    Several in one process save the seconds that torch needs to start. Raises PyorchError at the first
    failure.
    """
    argv = [sys.executable, str(CONVERTER), str(architectures.converter_dir())]
    failure = _run(argv, jobs, verbose, on_progress)
    if failure is None:
        return
    kind, message, last_line = failure
    if kind == "missing":
        raise PyorchError(f"the converter needs Python packages that are missing ({message}): "
                          "pip install 'pyorch[convert]'")
    if kind == "pre-tokenizer":
        raise PyorchError(
            "llama.cpp's converter does not recognize this checkpoint's tokenizer: say with --pre-tokenizer NAME "
            "how it splits text before BPE, such as gpt-2, qwen2 or llama-bpe; the names are "
            f"{', '.join(architectures.known_pre_tokenizers())}"
        )
    if kind == "write":
        raise WriteError(message)
    raise PyorchError(f"llama.cpp's converter failed: {_one_line(message or last_line)}; --verbose shows its log")


def run_quantizer(job: dict, *, verbose: bool = False, on_progress: OnProgress | None = None) -> None:
    """Quantizes {"source", "output": paths, "file_type": llama_ftype, "pure", "keep_split": bool, "imatrix": path or
    None}.

    Raises PyorchError.
    """
    failure = _run([sys.executable, "-m", "pyorch.convert.quantize_process"], job, verbose, on_progress)
    if failure is None:
        return
    kind, message, last_line = failure
    if kind == "write":
        raise WriteError(message)
    if job["imatrix"] is None and ("imatrix" in message or "importance matrix" in message):
        raise PyorchError("this quantization needs an importance matrix: give one, which llama.cpp's llama-imatrix "
                          "makes, with --imatrix, or use a type of 3 bits and more")
    if "imatrix" in message:
        raise PyorchError(f"{job['imatrix']} does not suit this model: {_one_line(message)}")
    raise PyorchError(f"llama.cpp's quantizer failed: {_one_line(message or last_line)}; --verbose shows its log")


def run_estimator(
    job: dict, feed: Feed, *, verbose: bool = False, on_progress: OnProgress | None = None
) -> None:
    """Trains {"header": the fields of a TraceHeader, "arrays", "output": paths, "n_training": tokens to come,
    "n_latent", "n_hidden", "epochs", "seed": int, "lr": float}.

    arrays: npz with, of each layer i, "defaults.i" and the router's "gate.i", "norm.i" and so on, "eps" of all, what
    Router.choice() says of all. output: npz of weights; beside it a .json says what was measured. feed: called with
    what takes frames of records as estimator_process.frames() reads them. Raises PyorchError.
    """
    failure = _run([sys.executable, str(_ESTIMATOR)], job, verbose, on_progress, feed)
    if failure is None:
        return
    kind, message, last_line = failure
    if kind == "missing":
        raise PyorchError(f"training needs Python packages that are missing ({message}): pip install 'pyorch[convert]'")
    raise PyorchError(f"the training failed: {_one_line(message or last_line)}; --verbose shows its log")


def _one_line(text: str) -> str:
    return textwrap.shorten(text, 400)


def _run(
    argv: list[str], job: object, verbose: bool, on_progress: OnProgress | None, feed: Feed | None = None
) -> tuple[str, str, str] | None:
    """Runs a child on a job. Returns None, or kind of failure, message and last line of its log.

    feed: sends frames behind the job; each is sent when the child is done with the one before, so that this process
    and the child compute in turns, and no more than a frame is under way.

    On any exception, KeyboardInterrupt included, the child is killed before the exception goes on.
    """
    reader, writer = os.pipe()
    try:
        child = subprocess.Popen(
            [*argv, str(writer)], stdin=subprocess.PIPE, pass_fds=[writer, *staging_locks()],
            stdout=None if verbose else subprocess.PIPE, stderr=None if verbose else subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    tail: deque[str] = deque(maxlen=50)
    drain = None
    try:
        if child.stdout is not None:
            lines = (line.decode("utf-8", "replace") for line in child.stdout)
            drain = threading.Thread(target=tail.extend, args=(lines,))
            drain.start()
        reports = _Reports(reader, on_progress)
        try:
            child.stdin.write(json.dumps(job).encode() + b"\n")
            if feed is not None:
                feed(partial(reports.send_in_turn, child.stdin))
            child.stdin.close()
        except BrokenPipeError:  # it has ended: the exit status tells whether it had enough
            with contextlib.suppress(BrokenPipeError):
                child.stdin.close()
        error = reports.error()
        status = child.wait()
    except BaseException:
        child.kill()
        child.wait()
        raise
    finally:
        if drain is not None:
            drain.join()
            child.stdout.close()
    if status == 0:
        return None
    last_line = next((line.strip() for line in reversed(tail) if line.strip()), "")
    if error is not None:
        return error["error"], error["message"], last_line
    if status < 0:
        return "failed", f"it was ended by signal {-status}{' (out of memory?)' if status == -9 else ''}", last_line
    return "failed", "", last_line


class _Reports(threading.Thread):
    """Reads the reports of a child until it closes its end of the pipe."""

    def __init__(self, reader: int, on_progress: OnProgress | None) -> None:
        super().__init__(daemon=True)  # where this process is interrupted, nobody waits for it
        self._reader, self._on_progress = reader, on_progress
        self._error: dict | None = None
        self._unseen: OSError | None = None  # why progress could not be shown
        self._turns = threading.Semaphore(1)
        self.start()

    def run(self) -> None:
        try:
            with os.fdopen(self._reader) as reports:
                for line in reports:
                    message = json.loads(line)
                    if "error" in message:
                        self._error = message
                    elif "taken" in message:
                        self._turns.release()
                    elif self._on_progress is not None:
                        self._on_progress(message["done"], message["total"])
        except OSError as error:
            self._unseen = error
        finally:
            self._turns.release()  # nobody will take anything: writing says so

    def send_in_turn(self, pipe: BinaryIO, frame: bytes) -> None:
        """BrokenPipeError where the child has ended."""
        self._turns.acquire()
        if self._unseen is not None:
            raise BrokenPipeError
        pipe.write(frame)
        pipe.flush()

    def error(self) -> dict | None:
        """The error among the reports, when all have come. OSError where progress cannot be shown any more."""
        self.join()
        if self._unseen is not None:
            raise self._unseen
        return self._error
