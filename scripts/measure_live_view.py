"""Measures what the live view costs: tokens per second while /residency and /slots are asked twice a second, and not.

    python scripts/measure_live_view.py MODEL.gguf [options of pyorch serve]

Both in turn, on one server; each pair answers the same prompt. A browser's own work is not in it: it is done where
somebody looks. Prints the medians, and that of the ratios of the pairs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
import urllib.request

PERIOD_SECONDS = 0.5  # of live.js
N_PAIRS, N_TOKENS = 8, 48


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL.gguf")
    args, options = parser.parse_known_args()
    command = [sys.executable, "-m", "pyorch", "serve", args.model, "--port", "0", *options]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        url = next(word for line in server.stderr for word in line.split() if word.startswith("http://"))
        threading.Thread(target=server.stderr.read, daemon=True).start()
        _speed(url, 0)
        pairs, answers = [], []
        for i in range(N_PAIRS):
            pair = {}
            for watched in ((False, True) if i % 2 else (True, False)):
                with _Watching(url, watched) as watching:
                    pair[watched] = _speed(url, i)
                answers += watching.seconds
            pairs.append((pair[False], pair[True]))
        alone, beside = (statistics.median(speeds) for speeds in zip(*pairs))
        ratio = statistics.median(watched / not_watched for not_watched, watched in pairs)
        print(f"tokens/s: {alone:.2f} alone, {beside:.2f} watched; ratio of pairs {ratio:.4f} "
              f"({min(w / n for n, w in pairs):.4f} to {max(w / n for n, w in pairs):.4f}); "
              f"an answer takes {1000 * statistics.median(answers):.1f} ms")
    finally:
        server.kill()
        server.wait()
    return 0


class _Watching(threading.Thread):
    """What the page asks, inside."""

    def __init__(self, url: str, on: bool) -> None:
        super().__init__(daemon=True)
        self.seconds: list[float] = []
        self._url, self._on, self._ended = url, on, threading.Event()

    def __enter__(self) -> _Watching:
        if self._on:
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._on:
            self.join()

    def run(self) -> None:
        while not self._ended.wait(PERIOD_SECONDS):
            for path in ("/residency", "/slots"):
                begin = time.perf_counter()
                urllib.request.urlopen(self._url + path).read()
                if path == "/residency":
                    self.seconds.append(time.perf_counter() - begin)


def _speed(url: str, seed: int) -> float:
    """Tokens per second, as the server measures it."""
    body = {"prompt": "def read_table(path):\n", "n_predict": N_TOKENS, "ignore_eos": True, "seed": seed,
            "temperature": 0.8, "cache_prompt": False}
    request = urllib.request.Request(
        f"{url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["timings"]["predicted_per_second"]


if __name__ == "__main__":
    sys.exit(main())
