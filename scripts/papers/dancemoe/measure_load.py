"""The load of a measured cluster: prompts of three tasks, arrivals, and times of answers.

docs/measurements/cluster.md shows placements for the same tasks: Python, questions about a made-up world, and prose.
Each task has prompts that are known when experts are placed, and other prompts for its users.
"""

from __future__ import annotations

import http.client
import json
import random
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from pyorch.traces.file import Trace
from scripts.papers.dancemoe.measure_network import Network, NoNetwork
from scripts.papers.dancemoe.workload import Recorded, Replay, arrival_times, read_requests

ROOT = Path(__file__).parents[3]
TASKS = ("python", "facts", "prose")
_SHORTEST, _LONGEST = 120, 320  # characters of a prompt: about 40 to 120 tokens
_PATIENCE = 120.0  # seconds for one answer


@dataclass(frozen=True)
class Arrival:
    """A request of a server's user, at `time` in seconds from the start."""

    time: float
    server: str
    prompt: str


@dataclass(frozen=True)
class Requests:
    """Requests of a task. `recorded` has their uses of experts, in the order of the prompts."""

    recorded: Recorded
    prompts: list[str]


@dataclass(frozen=True)
class Answered:
    """An answer.

    Attributes:
        seconds: Time from the arrival to the last token.
        prompt_seconds, output_seconds: Times of the prompt and of the other tokens, by llama-server.
        error: The reason of a missing answer. "": the answer is there.
    """

    time: float
    server: str
    seconds: float
    n_prompt: int = 0
    n_output: int = 0
    prompt_seconds: float = 0.0
    output_seconds: float = 0.0
    error: str = ""


def write_prompts(directory: Path, n_each: int, seed: int) -> dict[tuple[str, str], Path]:
    """Writes files of prompts, a JSON object per line. Returns them by task and by "known" or "asked"."""
    fixtures = ROOT / "tests/fixtures/small-moe"
    texts = {
        "python": (fixtures / "text-test.txt").read_text(),
        "facts": "\n".join(_question(line) for line in (fixtures / "facts-test.jsonl").read_text().splitlines()),
        "prose": "\n".join(path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]),
    }
    files = {}
    for task in TASKS:
        pieces = list(dict.fromkeys(_pieces(texts[task], random.Random(f"{seed} {task}"))))  # each once
        random.Random(seed).shuffle(pieces)
        for i, part in enumerate(("known", "asked")):
            files[task, part] = directory / f"{part}-{task}.jsonl"
            chosen = pieces[i::2][:n_each]
            files[task, part].write_text("".join(json.dumps({"prompt": piece}) + "\n" for piece in chosen))
    return files


def read_requests_of(path: Path) -> Requests:
    """Reads the prompts of a file and the trace next to it. NoNetwork: they do not match."""
    prompts = [json.loads(line)["prompt"] for line in path.read_text().splitlines()]
    recorded = read_requests(Trace(path.with_suffix(".trace")))
    if len(recorded) != len(prompts):
        raise NoNetwork(f"{path} has {len(prompts)} prompts and its trace {len(recorded)} requests: remove both")
    return Requests(recorded, prompts)


def arrivals_of(
    servers: Sequence[str], requests: Sequence[Requests], every: float, seconds: float, seed: int,
    shift: float | None = None,
) -> list[Arrival]:
    """Returns the arrivals of `dancemoe.simulate --arrivals poisson:{every}s --duration SECONDS --seed SEED`, by time.

    Args:
        servers: Names of the servers.
        requests: Requests of each server's task.
        every: Mean seconds between two requests of a server.
        seconds: Time in which requests arrive.
        seed: Seed of random draws.
        shift: Time at which each server gets the task of the next server, as with --shift rotate. None: never.
    """
    found = []
    for n, name in enumerate(servers):
        rng = np.random.default_rng((seed, n))
        times = arrival_times(rng, 1 / every, seconds)
        tasks = [requests[n]] if shift is None else [requests[n], requests[(n + 1) % len(servers)]]
        replays = [Replay(task.recorded, rng) for task in tasks]
        for i, at in enumerate(times.tolist()):
            task = shift is not None and at >= shift
            found.append(Arrival(at, name, tasks[task].prompts[replays[task].number(i)]))
    return sorted(found, key=lambda arrival: arrival.time)


def _question(line: str) -> str:
    question = json.loads(line)["question"]
    choices = " ".join(f"({choice['label']}) {choice['text']}" for choice in question["choices"])
    return f"Question: {question['stem']} {choices}"


def _pieces(text: str, rng: random.Random) -> list[str]:
    """Yields pieces of whole lines, each of a random length."""
    pieces, piece, wanted = [], "", rng.randint(_SHORTEST, _LONGEST)
    for line in re.split(r"(?<=\n)", text):
        if piece and len(piece) + len(line) > wanted:
            if _SHORTEST // 2 <= len(piece.strip()) <= _LONGEST:
                pieces.append(piece.strip("\n"))
            piece, wanted = "", rng.randint(_SHORTEST, _LONGEST)
        piece += line
    return pieces


def ask(
    network: Network, urls: Mapping[str, str], arrivals: Sequence[Arrival], n_output: int,
    at: Mapping[float, object] | None = None,
) -> list[Answered]:
    """Sends each request at its arrival, from its server's namespace, and returns all answers in this order.

    Args:
        network: The network of the servers.
        urls: Endpoint of each server.
        arrivals: The requests.
        n_output: Tokens of each answer after its first.
        at: Functions to call, by time in seconds from the start.
    """
    found: list[Answered | None] = [None] * len(arrivals)
    begin = time.perf_counter()
    threads = []

    def send(i: int) -> None:
        found[i] = _answer(network, urls[arrivals[i].server], arrivals[i], n_output, begin)

    events = [(arrival.time, lambda i=i: threads.append(_started(send, i))) for i, arrival in enumerate(arrivals)]
    events += [(when, lambda call=call: threads.append(_started(call))) for when, call in (at or {}).items()]
    for when, call in sorted(events, key=lambda event: event[0]):
        time.sleep(max(0.0, begin + when - time.perf_counter()))
        call()
    for thread in threads:
        thread.join()
    return found


def _started(call, *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=call, args=arguments, daemon=True)
    thread.start()
    return thread


def _answer(network: Network, url: str, arrival: Arrival, n_output: int, begin: float) -> Answered:
    try:
        with network.inside(arrival.server):
            answer = complete(url, arrival.prompt, n_output + 1)
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        return Answered(arrival.time, arrival.server, time.perf_counter() - begin - arrival.time,
                        error=f"{type(error).__name__}: {error}")
    seconds = time.perf_counter() - begin - arrival.time
    timings = answer["timings"]
    return Answered(arrival.time, arrival.server, seconds, timings["prompt_n"], timings["predicted_n"],
                    timings["prompt_ms"] / 1e3, timings["predicted_ms"] / 1e3)


def complete(url: str, prompt: str, n_predict: int) -> dict:
    """Returns the completion of a prompt by the llama-server at url, greedily, without its cache."""
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=_PATIENCE)
    try:
        connection.request("POST", "/completion", json.dumps({
            "prompt": prompt, "n_predict": n_predict, "cache_prompt": False, "temperature": 0, "top_k": 1,
        }), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read().decode(errors="replace")
        if answer.status != 200:
            raise ValueError(f"status {answer.status}: {text[:200]}")
        return json.loads(text)
    finally:
        connection.close()
