"""Sends requests at their times, and records when the tokens of their answers arrive."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from scripts.bench_serve.load import Arrival

_CONNECT_SECONDS = 10.0


@dataclass(frozen=True)
class Answer:
    """The result of a request.

    Attributes:
        ttft_seconds: From its time to its first token, including the wait for a slot.
        tpot_seconds: Between two of its tokens, on average; nan with one token.
        end_seconds: Of its last token, since the time of the first request.
        failure: Why it has no answer. "": it has one. Otherwise the other fields have no meaning.
    """

    n_prompt: int
    n_tokens: int
    ttft_seconds: float
    tpot_seconds: float
    end_seconds: float
    failure: str = ""


def run(
    port: int, arrivals: Sequence[Arrival], prompts: Sequence[Sequence[int]], max_seconds: float,
    on_answer: Callable[[int], None],
) -> list[Answer]:
    """Sends each request at its time. Cancels requests without an answer after max_seconds, and reports them.

    on_answer: Called with the number of finished requests.
    """
    connections = [http.client.HTTPConnection("127.0.0.1", port, timeout=_CONNECT_SECONDS) for _ in arrivals]
    over = threading.Event()
    begin = time.monotonic()

    def ask(i: int) -> Answer:
        due = begin + arrivals[i].seconds
        if arrivals[i].seconds >= max_seconds or over.wait(max(0.0, due - time.monotonic())):
            return _failed(arrivals[i], "not sent in time")
        try:
            return _ask(connections[i], arrivals[i], prompts[i], due, begin)
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = "not answered in time" if over.is_set() else f"{type(error).__name__}: {error}"
            return _failed(arrivals[i], reason)
        finally:
            connections[i].close()

    with ThreadPoolExecutor(len(arrivals)) as pool:
        asked = [pool.submit(ask, i) for i in range(len(arrivals))]
        try:
            for n, _ in enumerate(as_completed(asked, max_seconds), start=1):
                on_answer(n)
        except concurrent.futures.TimeoutError:
            pass
        finally:
            over.set()
            for connection in connections:  # ends the waits of other threads
                if (sock := connection.sock) is not None:
                    with contextlib.suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)
    return [future.result() for future in asked]


def _ask(
    connection: http.client.HTTPConnection, arrival: Arrival, prompt: Sequence[int], due: float, begin: float
) -> Answer:
    body = {"prompt": list(prompt), "n_predict": arrival.n_tokens, "ignore_eos": True, "stream": True,
            "cache_prompt": False, "temperature": 0.8, "seed": len(prompt)}
    connection.connect()
    connection.sock.settimeout(None)  # a prompt may wait long for a slot; run() ends this wait
    connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise ValueError(f"status {response.status}: {response.read(200).decode(errors='replace')}")
    first = last = None
    for line in response:
        if not line.startswith(b"data: "):
            continue
        now = time.monotonic()
        event = json.loads(line.removeprefix(b"data: "))
        if event.get("stop"):
            n = event["tokens_predicted"]
            if first is None:
                first = last = now
            tpot = (last - first) / (n - 1) if n > 1 else float("nan")
            return Answer(arrival.n_prompt, n, first - due, tpot, last - begin)
        if "content" not in event:
            raise ValueError(line.decode(errors="replace").strip()[:200])
        # The first token can be a part of a character, which is sent with the next token.
        first, last = first or now, now
    raise ValueError("the answer ended early")


def _failed(arrival: Arrival, reason: str) -> Answer:
    nan = float("nan")
    return Answer(arrival.n_prompt, 0, nan, nan, nan, reason)
