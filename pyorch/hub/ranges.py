"""Reads parts of the hub's files over HTTP, without fetching the rest."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from huggingface_hub import constants
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from pyorch.errors import FormatError
from pyorch.sizes import KiB, MiB, format_bytes

# A header has a vocabulary of tens of MiB at most. A longer one is damaged.
MOST_BYTES = 128 * MiB
FIRST_BYTES = 64 * KiB  # of the first request for a file
_REQUEST_BYTES = 8 * MiB  # of later requests, which double up to this
_PIECE_BYTES = 64 * KiB

_ATTEMPTS = 4  # in a row in which nothing arrives
_PAUSE_SECONDS = 0.25  # before the second attempt; then twice as long

SAMPLE_BYTES = 32 * MiB
SAMPLE_SECONDS = 3.0

OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Sample:
    """The bytes that one connection delivered in a time."""

    n_bytes: int
    seconds: float

    @property
    def bytes_per_second(self) -> float:
        return self.n_bytes / self.seconds


class RemoteFile:
    """The beginning of a file, which grows by requests for ranges.

    A server may ignore ranges and send the whole file. Then the reply stays open, and its next bytes are read on
    demand. close() ends it.

    Attributes:
        data: The bytes so far.
        n_fetched: Bytes that arrived; the others were borrowed.
    """

    def __init__(self, url: str, name: str, n_bytes: int) -> None:
        self.name, self.n_bytes = name, n_bytes
        self.data = bytearray()
        self.n_fetched = 0
        self._url = url
        self._next_bytes = FIRST_BYTES
        self._whole: _Reply | None = None  # the reply of a server that ignores ranges
        self._behind = 0  # its bytes that data has, and that are still to come

    def grow(self, n_bytes: int) -> None:
        """Reads until data has at least n_bytes.

        Raises:
            FormatError: The header ends after the file, or is too long for one.
            OSError: The connection failed several times in a row. httpx.HTTPError: the same.
            HfHubHTTPError: The hub refuses the file.
        """
        if n_bytes > min(self.n_bytes, MOST_BYTES):
            whole = f"the file has {format_bytes(self.n_bytes)}" if n_bytes > self.n_bytes else (
                f"no header has more than {format_bytes(MOST_BYTES)}")
            raise FormatError(f"{self.name} is damaged: its header does not end, and {whole}")
        failed = 0
        while len(self.data) < n_bytes:
            before = len(self.data)
            try:
                self._read_some(n_bytes)
            except Exception as error:
                self.close()
                failed = 1 if len(self.data) > before else failed + 1
                if failed == _ATTEMPTS or not _may_pass(error):
                    raise
                time.sleep(_PAUSE_SECONDS * 2 ** (failed - 1))

    def borrow(self, content: bytes) -> None:
        """Adds bytes that are known from another file, in place of reading them."""
        self.close()
        self.data += content
        self._next_bytes = FIRST_BYTES

    def close(self) -> None:
        """Ends an open reply."""
        if self._whole is not None:
            self._whole.close()
            self._whole = None

    def _read_some(self, n_bytes: int) -> None:
        if self._whole is None:
            begin = len(self.data)
            end = min(self.n_bytes, MOST_BYTES, max(n_bytes, begin + self._next_bytes))
            reply = _Reply(self._url, begin, end)
            if reply.whole:
                self._whole, self._behind = reply, begin
            else:
                with contextlib.closing(reply):
                    self._take(reply, end)
                self._next_bytes = min(_REQUEST_BYTES, 2 * self._next_bytes)
        if self._whole is not None:
            self._take(self._whole, n_bytes)

    def _take(self, reply: _Reply, end: int) -> None:
        for piece in reply.pieces:
            self.n_fetched += len(piece)
            skipped = min(self._behind, len(piece))
            self._behind -= skipped
            self.data += piece[skipped:]
            if len(self.data) >= end:
                return
        raise ConnectionError("the connection ended early")


def sample(url: str, offset: int, n_bytes: int, on_progress: OnProgress) -> Sample | None:
    """Measures how fast the bytes of a file arrive, for some seconds or MiB.

    Args:
        url: The address of the file.
        offset: The place from which to read.
        n_bytes: The bytes of the file after it.
        on_progress: Called with the bytes so far.

    Returns:
        None if nothing arrived.

    Raises:
        OSError: There is no connection. httpx.HTTPError: the same.
        HfHubHTTPError: The hub refuses the file.
    """
    wanted = min(n_bytes, SAMPLE_BYTES)
    if wanted <= 0:
        return None
    done = 0
    with contextlib.closing(_Reply(url, offset, offset + wanted)) as reply, contextlib.suppress(Exception):
        begin = time.monotonic()
        for piece in reply.pieces:
            done += len(piece)
            on_progress("measuring the connection", min(done, wanted), wanted)
            if done >= wanted or time.monotonic() - begin >= SAMPLE_SECONDS:
                break
    return Sample(done, max(1e-6, time.monotonic() - begin)) if done else None


class _Reply:
    """The reply to a request for a range. whole: the server ignored the range and sends the file from its beginning."""

    def __init__(self, url: str, begin: int, end: int) -> None:
        headers = {**build_hf_headers(), "Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
        session: Any = get_session()
        self._stack = contextlib.ExitStack()
        options: dict[str, Any] = {"headers": headers, "timeout": constants.HF_HUB_DOWNLOAD_TIMEOUT}
        # huggingface_hub 1 has a client of httpx, and earlier versions a session of requests, where `stream` is a flag.
        # Both follow redirections, and send the token to no other host.
        if callable(session.stream):
            reply = self._stack.enter_context(session.stream("GET", url, follow_redirects=True, **options))
            self.pieces: Iterator[bytes] = reply.iter_bytes(_PIECE_BYTES)
        else:
            reply = self._stack.enter_context(session.get(url, stream=True, **options))
            self.pieces = reply.iter_content(_PIECE_BYTES)
        try:
            hf_raise_for_status(reply)
        except BaseException:
            self.close()
            raise
        self.whole = reply.status_code != 206
        given = reply.headers.get("Content-Range", "")
        if not self.whole and not given.startswith(f"bytes {begin}-"):
            self.close()
            raise ConnectionError(f"the server sent another part of the file than bytes {begin}-{end - 1}: {given!r}")

    def close(self) -> None:
        self._stack.close()


def _may_pass(error: Exception) -> bool:
    """Whether another attempt may succeed: after a lost connection, or if the server is busy."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status >= 500 or status in (408, 429) if status is not None else is_of_network(error)


def is_of_network(error: Exception) -> bool:
    """Whether an error is of requests, or of httpx, which later versions of huggingface_hub call httpx2."""
    return isinstance(error, OSError) or type(error).__module__.startswith(("httpx", "httpcore"))
