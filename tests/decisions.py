"""What the tables of host memory and of a device decide when recorded routes are replayed.

tests/fixtures/routes has the routes, and a digest of the decisions for each case. To see where a case differs first,
print all its decisions in both checkouts:

    PYTHONPATH=. python tests/decisions.py small-moe:lru > decisions.txt
    PYTHONPATH=. python tests/decisions.py --write       # accepts the decisions of this checkout
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import parts

from pyorch.runtime.engine import Engine
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.prefetch import Prefetch
from pyorch.traces.file import DECODE, PREFILL
from pyorch.traces.recording import Recording, Schedule
from pyorch.traces.replay import ReplaySettings, replay
from scripts import model_headers

ROUTES = Path(__file__).parent / "fixtures" / "routes"
DIGESTS = ROUTES / "decisions.json"
PROMPT = 40  # tokens at the beginning of a request that a replay of prompts takes for its prompt

TIERS = "host", "device"
PLACES = "none", "there", "passing", "guest"
BUDGET, PIN, UNPIN, LIMITS, DEVICE_LIMITS, WARM = range(6)


@dataclass(frozen=True)
class Model:
    """header writes the GGUF. slow: bytes a second of a disk that layers wait for; link: to the device."""

    header: Callable[[Path], model_headers.Header]
    slow: float
    link: float
    compute_ms: float


def small_moe(path: Path) -> model_headers.Header:
    """The model of tests/fixtures/small-moe."""
    header = model_headers.Header(path, "qwen2moe", 8, 128, 4, 2, 1024)
    header.experts(64, 6, 32)
    kind = model_headers.Types.BF16
    model_headers.around(header, 2048, 128, kind, kind)
    for il in range(header.n_layers):
        model_headers.experts(header, il, 64, 32, 128, kind, kind)
    return header


MODELS = {
    "small-moe": Model(small_moe, 7.7e6, 3e7, 36),
    "gpt-oss-20b": Model(model_headers.gpt_oss, 2e9, 2e10, 40),
}


def _repeat(recording: Recording, schedule: Schedule, distance: int) -> np.ndarray:
    """Forecasts that a layer uses again what it used for the token before. Many are wrong."""
    experts = np.roll(recording.experts.astype(np.int16), 1, axis=0)
    return np.repeat(experts[:, :, None], distance, axis=2)


def _changes(model_map: ModelMap, device: bool) -> list[tuple[int, ...]]:
    """Warm memory, pins, limits and budgets that change: before which ubatch, what, the layer, and two numbers."""
    slots, last = model_map.info.expert_bytes, len(model_map.layers) - 1
    changes: list[tuple[int, ...]] = [(0, WARM, layer, 0, 6) for layer in range(last + 1)]
    changes += [(20, PIN, 1, expert, 0) for expert in (3, 30)]
    changes += [(40, LIMITS, 2, 8, 14), (60, LIMITS, 3, 0, 4)]
    changes += [(80, BUDGET, 0, slots // 4, 0), (120, UNPIN, 1, 3, 0), (140, BUDGET, 0, slots // 2, 0)]
    changes += [(160, LIMITS, 2, 0, 32), (160, LIMITS, 3, 2, 32)]
    if device:
        changes += [(50, DEVICE_LIMITS, 0, 0, 2), (70, DEVICE_LIMITS, last, 5, 20), (150, DEVICE_LIMITS, 0, 3, 32)]
    return sorted(changes, key=lambda change: change[0])


_GUESSES = Prefetch("oracle", 2, 0.3)
_DEVICE = dict(vram_budget="20%", device_speed=4.0)

# settings: of ReplaySettings; changes, guesses: see above. marking draws lots as a library's distribution does, so no
# case has it; expert maps and routers compute with states, which routes do not have.
CASES: dict[str, dict[str, Any]] = {
    "lru": dict(policy="lru", budget="25%"),
    "lfu-of-three-requests": dict(policy="lfu", batch=3),
    "learned": dict(policy="learned", budget="25%"),
    "belady": dict(policy="belady"),
    "learned-with-prompts": dict(policy="learned", budget="25%", as_decode=False),
    "lru-with-streamed-prompts": dict(policy="lru", budget="4%", as_decode=False),
    "lru-with-guesses": dict(policy="lru", prefetch=_GUESSES),
    "learned-with-guesses": dict(policy="learned", prefetch=_GUESSES, budget="25%"),
    "lfu-with-changes": dict(policy="lfu", changes=True),
    "learned-with-changes": dict(policy="learned", changes=True),
    "device-lru": dict(policy="lru", **_DEVICE),
    "device-learned": dict(policy="learned", **_DEVICE),
    "device-lfu-uploads": dict(policy="lfu", device_misses="upload", **_DEVICE),
    "device-learned-uploads": dict(policy="learned", device_misses="upload", budget="25%", **_DEVICE),
    "device-lfu-with-prompts": dict(policy="lfu", as_decode=False, device_misses="upload", **_DEVICE),
    "device-learned-of-three-requests": dict(policy="learned", batch=3, **_DEVICE),
    "device-learned-with-changes": dict(policy="learned", changes=True, device_misses="upload", **_DEVICE),
    "device-lfu-with-changes": dict(policy="lfu", changes=True, **_DEVICE),
    "device-ahead": dict(policy="learned", device_ahead=2, prefetch=_GUESSES, budget="60%", **_DEVICE),
    "device-ahead-uploads": dict(
        policy="lru", device_ahead=2, prefetch=_GUESSES, budget="60%", device_misses="upload", **_DEVICE),
}


def names(model: str) -> list[str]:
    return [f"{model}:{case}" for case in CASES]


def recording(model: str) -> Recording:
    routes = np.load(ROUTES / f"{model}.npz")
    experts, lengths = routes["experts"], np.diff(routes["offsets"])
    position = np.concatenate([np.arange(n) for n in lengths])
    n_layers, n_used = experts.shape[1:]
    return Recording(
        tuple(range(n_layers)), int(routes["n_expert"]), experts, np.full(experts.shape, 1 / n_used),
        np.repeat(np.arange(len(lengths)), lengths), np.where(position < PROMPT, PREFILL, DECODE))


def decisions(model: str, case: str, model_map: ModelMap, routes: Recording) -> np.ndarray:
    """int32[n, 6]: ubatch, layer that is played (-1: none yet), tier, layer, expert, and its place since then."""
    options = dict(CASES[case])
    changes = _changes(model_map, "vram_budget" in options) if options.pop("changes", False) else []
    of = MODELS[model]
    settings = ReplaySettings(**{"read_bandwidth": of.slow, "link_bandwidth": of.link, "compute_ms": of.compute_ms,
                                 "predict_ms": 0.1, **options})
    rows: list[np.ndarray] = []

    class Watched(Engine):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            parts.watch_replay(self, changes, rows.append)

    with mock.patch("pyorch.traces.replay.Engine", Watched):
        replay(model_map, routes, settings, forecasts=_repeat if settings.prefetch is _GUESSES else None)
    return np.concatenate(rows)


def digest(rows: np.ndarray) -> dict[str, Any]:
    """Counts by tier and place, and a hash of all."""
    counts = {
        f"{tier}: {place}": int(((rows[:, 2] == t) & (rows[:, 5] == p)).sum())
        for t, tier in enumerate(TIERS) for p, place in enumerate(PLACES)
    }
    content = np.ascontiguousarray(rows, "<i4").tobytes()
    return {**{name: n for name, n in counts.items() if n}, "sha256": hashlib.sha256(content).hexdigest()}


def map_of(model: str, directory: Path) -> ModelMap:
    path = directory / f"{model}.gguf"
    MODELS[model].header(path).close()
    return ModelMap(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="*", help="MODEL:CASE; default: all")
    parser.add_argument("--write", action="store_true", help=f"write {DIGESTS.name} in place of printing decisions")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        for model in MODELS:
            with map_of(model, Path(directory)) as model_map:
                routes = recording(model)
                for name in (name for name in names(model) if not args.case or name in args.case):
                    rows = decisions(model, name.partition(":")[2], model_map, routes)
                    found[name] = digest(rows)
                    for ubatch, at, tier, layer, expert, place in rows if not args.write else ():
                        print(f"{name} ubatch {ubatch} at layer {at}: {TIERS[tier]} layer {layer} expert {expert} "
                              f"{PLACES[place]}")
    if args.write:
        DIGESTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
