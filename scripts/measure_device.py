"""Speed with experts on a device, against llama.cpp's own ways at the same memory of the device.

    scripts/measure_device.sh MODEL.gguf CUDA0 > device.md

Each configuration runs in a process of its own, in turn, in rounds; the table has medians. The tokens are those of a
text, not drawn at random: they decide which experts are used. llama.cpp's ways are --cpu-moe (all experts on the
processor), --n-cpu-moe (those of the first layers, as many as do not fit) and, where it fits, the model wholly on the
device.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import llama_cpp.llama_cpp as llama

import pyorch
from pyorch import _libs
from pyorch.llama import logs
from pyorch.llama.context import Context
from pyorch.runtime.devices import find_device
from pyorch.runtime.model_map import ModelMap
from pyorch.sizes import format_bytes

STOCK, OURS = "llama.cpp", "pyorch"
_EXPERTS = r"blk\.LAYERS\.ffn_(up|down|gate|gate_up)_(ch|)exps"


@dataclass(frozen=True)
class Setup:
    """One row. on_processor: of llama.cpp, so many of the first layers have their experts there, -1: all."""

    who: str
    name: str
    vram_bytes: int = 0
    on_processor: int = 0
    misses: str = "processor"
    budget: str = "100%"


@dataclass(frozen=True)
class Speed:
    prefill: dict[str, float]  # tokens per second, by the tokens of the prompt
    decode: float
    uploaded: float = 0.0  # bytes per decoded token
    hit_rate: float | None = None
    used_bytes: int = 0


def setups(model: ModelMap, shares: list[int], budget: str) -> list[Setup]:
    of_layer = [layer.n_expert * layer.expert_bytes for layer in model.layers]
    rows = [Setup(STOCK, "--cpu-moe", on_processor=-1)]
    for share in shares:
        room = sum(of_layer) * share // 100
        if share == 100:
            rows.append(Setup(STOCK, "all on the device", sum(of_layer)))
        else:
            n = next(n for n in range(len(of_layer) + 1) if sum(of_layer[n:]) <= room)
            first = model.layers[n].il if n < len(of_layer) else -1
            rows.append(Setup(STOCK, f"--n-cpu-moe {n}", sum(of_layer[n:]), first))
        for misses in ("processor", "upload", "auto"):
            rows.append(Setup(OURS, f"{share} %, misses: {misses}", room, misses=misses, budget=budget))
    return rows


def stock_model(path: str, device: str, setup: Setup) -> int:
    """A llama_model *. What it was given lives as long as the process."""

    class Override(ctypes.Structure):
        _fields_ = [("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p)]

    params = llama.llama_model_default_params()
    params.load_mode = llama.LLAMA_LOAD_MODE_NONE
    params.n_gpu_layers = -1
    devices = (ctypes.c_void_p * 2)(find_device(device).address, None)
    params.devices = ctypes.addressof(devices)
    if setup.on_processor:
        layers = r"\d+" if setup.on_processor < 0 else f"({'|'.join(map(str, range(setup.on_processor)))})"
        base = ctypes.CDLL(str(_libs.lib_dir() / f"libggml-base{_libs._SUFFIX}"))
        base.ggml_backend_cpu_buffer_type.restype = ctypes.c_void_p
        pattern = _EXPERTS.replace("LAYERS", layers).encode()
        overrides = (Override * 2)(Override(pattern, base.ggml_backend_cpu_buffer_type()))
        params.tensor_buft_overrides = ctypes.addressof(overrides)
    model = llama.llama_model_load_from_file(path.encode(), params)
    assert model, logs.last_error()
    return model


def tokens_of(model: int, text: str, n: int) -> list[int]:
    room = (llama.llama_token * (len(text.encode()) + 16))()
    found = llama.llama_tokenize(llama.llama_model_get_vocab(model), text.encode(), len(text.encode()), room, len(room),
                                 True, False)
    assert found >= n, f"the text has {found} tokens, and {n} are wanted: name a longer one with --data"
    return room[:n]


def measure(model: int, arguments: argparse.Namespace, text: str) -> tuple[dict[str, float], float]:
    widest = max(arguments.prompt)
    tokens = tokens_of(model, text, widest + 2 * arguments.tokens)
    prefill = {}
    with Context(model, n_ctx=widest + 2 * arguments.tokens, n_batch=widest, n_ubatch=widest, n_outputs=1,
                 n_threads=arguments.threads) as context:
        for n in arguments.prompt:
            for _ in range(2):  # the first makes graphs and buffers
                context.clear()
                begin = time.perf_counter()
                context.decode(tokens[:n], outputs=[n - 1])
                prefill[str(n)] = n / (time.perf_counter() - begin)
        for token in tokens[widest:widest + arguments.tokens]:  # what is kept follows the text
            context.decode([token])
        begin = time.perf_counter()
        for token in tokens[widest + arguments.tokens:]:
            context.decode([token])
        return prefill, arguments.tokens / (time.perf_counter() - begin)


def run(setup: Setup, arguments: argparse.Namespace) -> Speed:
    text = Path(arguments.data).read_text(encoding="utf-8")
    logs.set_quiet(True)
    if setup.who == STOCK:
        model = stock_model(str(arguments.model), arguments.device, setup)
        prefill, decode = measure(model, arguments, text)
        return Speed(prefill, decode, used_bytes=setup.vram_bytes)
    with pyorch.load(arguments.model, budget=setup.budget, n_ctx=64, n_threads=arguments.threads,
                     device=arguments.device, vram_budget=setup.vram_bytes, device_misses=setup.misses) as model:
        prefill, decode = measure(model.llama.model, arguments, text)
        experts = model.stats().experts
        n_tokens = sum(2 * n for n in arguments.prompt) + 2 * arguments.tokens
        return Speed(prefill, decode, experts.device_bytes / n_tokens, experts.device_hit_rate,
                     experts.device_used_bytes)


def in_process(setup: Setup) -> Speed:
    """In a child, which is told the setup on its command line and answers on its last line."""
    command = [sys.executable, __file__, *sys.argv[1:], "--setup", json.dumps(asdict(setup))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{setup.name}: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else done.returncode}")
    return Speed(**json.loads(done.stdout.splitlines()[-1]))


def row(setup: Setup, speeds: list[Speed], prompts: list[int]) -> str:
    first = speeds[0]
    prefill = [f"{statistics.median(speed.prefill[str(n)] for speed in speeds):.1f}" for n in prompts]
    decode = statistics.median(speed.decode for speed in speeds)
    ours = (f"{first.hit_rate:.1%}", format_bytes(round(first.uploaded))) if first.hit_rate is not None else ("", "")
    return cells(setup.who, setup.name, format_bytes(first.used_bytes), *prefill, f"{decode:.2f}", *ours)


def cells(*texts: str) -> str:
    return " | ".join(["", *texts, ""]).strip()


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("device", help="such as CUDA0, or rpc:HOST:PORT")
    parser.add_argument("--tokens", type=int, default=128, help="decoded, once to warm up and once measured")
    parser.add_argument("--prompt", type=numbers, default=[512, 2048], help="tokens of prompts, ascending")
    parser.add_argument("--shares", type=numbers, default=[25, 50, 75, 100], help="of the experts, in percent")
    parser.add_argument("--budget", default="100%", help="host memory for experts; less than all: three tiers work")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--data", default=argparse.__file__, help="text whose tokens are computed")
    parser.add_argument("--setup", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.threads = arguments.threads or pyorch.llama.memory.physical_cores()
    if arguments.setup:
        print(json.dumps(asdict(run(Setup(**arguments.setup), arguments))))
        return
    rows = setups(ModelMap(arguments.model), arguments.shares, arguments.budget)
    speeds: dict[Setup, list[Speed]] = {setup: [] for setup in rows}
    for number in range(arguments.rounds):
        for setup in rows:
            print(f"round {number + 1} of {arguments.rounds}: {setup.who}, {setup.name}", file=sys.stderr, flush=True)
            speeds[setup].append(in_process(setup))
    prefills = [f"prefill of {n}, tok/s" for n in arguments.prompt]
    print(cells("by", "experts", "of the device", *prefills, "decode, tok/s", "hits", "uploaded a token"))
    print("|" + " --- |" * (6 + len(prefills)))
    for setup in rows:
        print(row(setup, speeds[setup], arguments.prompt))


if __name__ == "__main__":
    main()
