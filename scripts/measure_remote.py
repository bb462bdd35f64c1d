"""Measures the cost and the gain of computing with other servers, with processes of one machine that share the experts.

    python scripts/measure_remote.py MODEL --budget 40% --servers 2

Alternates between a server that reads missing experts from its disk, and the same server that asks the others: each of
them, all with the same budget, has every n-th expert. Prints milliseconds a token of one sequence, medians of rounds,
and the time that a layer waited for answers after its own experts. Processes compute on one thread each. With
--certificates (scripts/make_certificates.py server=127.0.0.1 -o DIR) also the same with TLS between servers.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import pyorch
from pyorch.cluster.tls import Tls
from pyorch.cluster.tunnel import Tunnel
from pyorch.llama.context import Context
from pyorch.llama.model import Model
from pyorch.runtime.engine import HERE
from pyorch.sidecars.container import fingerprint

TOKEN = "measured on one machine"


def load(path: str, budget: str) -> Model:
    return pyorch.load(path, budget=budget, n_ctx=256, n_threads=1)


def tunnel_of(certificates: Path) -> Tunnel:
    return Tunnel(Tls(*(certificates / name for name in ("server.pem", "server.key", "authority.pem"))))


def serve(path: str, budget: str, certificates: Path | None) -> None:
    """Serves until the input ends. Prints its port, and the port with TLS, if it has one."""
    with load(path, budget) as model:
        ports = [model.engine.listen(TOKEN, fingerprint(model.map))]
        if certificates is not None:
            ports.append(tunnel_of(certificates).listen("127.0.0.1", 0, ports[0]))
        print(*ports, flush=True)
        sys.stdin.read()


def decode(model: Model, tokens: list[int]) -> float:
    """Returns milliseconds a token."""
    with Context(model.llama.model, n_ctx=len(tokens), n_threads=1) as context:
        begin = time.perf_counter()
        for token in tokens:
            context.decode([token])
        return (time.perf_counter() - begin) / len(tokens) * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--budget", default="40%")
    parser.add_argument("--servers", type=int, default=2, help="in addition to the measured one")
    parser.add_argument("--tokens", type=int, default=48, help="of a round, the same in each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--certificates", type=Path, metavar="DIR")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.model, args.budget, args.certificates)
        return 0
    command = [sys.executable, __file__, args.model, "--budget", args.budget, "--serve"]
    if args.certificates is not None:
        command += ["--certificates", str(args.certificates)]
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            for _ in range(args.servers)
        ]
        stack.callback(lambda: [process.stdin.close() for process in processes])
        ports = list(zip(*(map(int, process.stdout.readline().split()) for process in processes)))
        with load(args.model, args.budget) as model:
            engine = model.engine
            if args.certificates is not None:
                tunnel = tunnel_of(args.certificates)
                stack.callback(tunnel.close)
                ports[1] = [tunnel.port_to("127.0.0.1", port) for port in ports[1]]
            numbers = {how: [HERE, *(engine.connect("127.0.0.1", port, TOKEN, fingerprint(model.map)) for port in of)]
                       for how, of in zip(("servers", "TLS"), ports)}
            tokens = np.random.default_rng(0).integers(8, 376, args.tokens).tolist()
            found: dict[str, list[float]] = {"disk": []} | {how: [] for how in numbers}
            waits: dict[str, list[float]] = {how: [] for how in numbers}
            for _ in range(args.rounds):
                for how, times in found.items():
                    for layer in model.map.layers:
                        places = numbers.get(how, [HERE])
                        engine.set_placement(layer.il, [places[e % len(places)] for e in range(layer.n_expert)])
                        engine.evict(layer.il, range(layer.n_expert))
                    decode(model, tokens)  # fills memory with these tokens' experts
                    before = engine.remote_stats().wait_ns
                    times.append(decode(model, tokens))
                    if how in waits:
                        waited = engine.remote_stats().wait_ns - before
                        waits[how].append(waited / len(tokens) / len(model.map.layers) / 1e3)
            print(f"budget {args.budget}, {args.servers + 1} servers, {len(tokens)} tokens, {args.rounds} rounds")
            for how, times in found.items():
                print(f"{how:8} {statistics.median(times):8.2f} ms a token ({', '.join(f'{t:.2f}' for t in times)})")
            for how, times in waits.items():
                print(f"a layer waited for answers of {how} for {statistics.median(times):.0f} us")
            print(f"{engine.remote_stats().fallback} slots without an answer")
    return 0


if __name__ == "__main__":
    sys.exit(main())
