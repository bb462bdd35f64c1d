"""Measures speed with experts on a device, against llama.cpp's own ways with the same memory of the device; and makes
tables and figures in the form of the papers that keep experts in GPU memory.

    scripts/measure_device.sh MODEL.gguf CUDA0 --results device.jsonl > device.md

Each measurement is written to --results at once, and is not repeated if the file has it: with --minutes 9 a command
ends after nine minutes, and the same command continues. In a kit (scripts/device_kit.py) the model may be omitted:
one of 48 layers is made first.

Each configuration runs in a process of its own, in turn, in rounds; tables have medians. The tokens are those of a
text, not random, because they decide which experts are used.

checks      whether the device computes correctly, by `pyorch verify` of small models; and the report of
            compute-sanitizer on one, if it is installed.
speed       prefill and decode by share of the experts in VRAM, once with all of them in host memory and once with less,
            so that all three tiers work. llama.cpp's ways are --cpu-moe (all experts on the processor), --n-cpu-moe
            (experts of the first layers, as many as do not fit) and, if it fits, the model wholly on the device. The
            last column is the reached share of the bound, which is the longer of two times: of a token with all
            experts in VRAM, by the faster of both; and of the transfer of the missing experts.
turns       the same two ways in one process, alternating, a block of tokens each, and the ratio of their times, and two
            standard errors: the least noise, if both fit into memory at once. All threads wait as pyorch's do.
latencies   the cost of an expert that is not in VRAM, as BuddyMoE's table 1: the time of a token beyond the time of a
            token with all experts in VRAM, divided by its misses.
limits      time of a token by VRAM and by the way experts move, as FineMoE's figure 12.
ablation    hits by eviction policy and by predictor, as FineMoE's figure 14.
prefetching time of a token on demand, prefetching, and uploading ahead too, by length of the prompt, as Speculating
            Experts' figure 8.
ahead       hits and time of a token by the number of experts of a layer that forecasts upload.

All tables take hours with a model of 20 GB, because each run loads it. In half an hour:

    scripts/measure_device.sh MODEL.gguf CUDA0 --rounds 1 --only speed --shares 25,50,100 --prompt 512
    scripts/measure_device.sh MODEL.gguf CUDA0 --rounds 1 --only latencies,prefetching --prompt 512 --contexts 1024,4096

nan: this did not run, such as a model that does not fit on the device; stderr has the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as llama

from pyorch import _libs
from pyorch.errors import PyorchError
from pyorch.library.choices import Needs, predictors
from pyorch.llama import logs
from pyorch.llama.context import Context
from pyorch.llama.cores import physical_cores
from pyorch.llama.model import Model, load
from pyorch.runtime.devices import find_device, rates_of
from pyorch.runtime.model_map import ModelMap
from pyorch.sizes import format_bytes

STOCK, OURS, BOTH = "llama.cpp", "pyorch", "by turns"
_EXPERTS = r"blk\.LAYERS\.ffn_(up|down|gate|gate_up)_(ch|)exps"
_POLICIES = ("lru", "lfu", "learned")
_PREDICTOR = "quasi-hidden:1"
_MOST_LINES = 40  # of a sanitizer's report
_WARM_PROMPTS = 2  # make graphs and buffers, and fill slots
_SHORTER = (28, 7, 21, 14, 0)  # tokens
_SETTLING, _BLOCK = 4, 28  # tokens of a turn: to restore its graph and caches, and to measure
_METHOD = 2  # of measuring: results of another one are measured again
_ERRORS = 2.0  # standard errors on each side of a ratio


@dataclass(frozen=True)
class Setup:
    """One measurement.

    Attributes:
        on_processor: Of llama.cpp, this many first layers have their experts on the processor; -1: all.
        share: Of the experts in VRAM, in percent.
        budget: Of host memory.
        prompts: Their tokens.
    """

    who: str
    name: str
    prompts: tuple[int, ...]
    share: int = 0
    on_processor: int = 0
    vram_bytes: int = 0  # of experts in VRAM, of llama.cpp
    misses: str = "processor"
    budget: str = "100%"
    prefetch: str = "none"
    ahead: int = 0  # experts of a layer that forecasts upload
    policy: str = ""
    substitution: str = ""


@dataclass(frozen=True)
class Speed:
    """Tokens per second of prompts, and the median time of the tokens decoded after the longest one."""

    prefill: dict[str, float]
    decode_ms: float
    used_bytes: int = 0
    uploaded: float = 0.0
    read: float = 0.0
    misses: float = 0.0  # uses of experts that were not in VRAM
    hit_rate: float | None = None
    host_hit_rate: float | None = None
    foreseen: float | None = None  # prefetched share of the experts that were not in host memory
    ahead: float = 0.0  # experts that forecasts uploaded to VRAM
    right: float | None = None  # share of these that were used
    link: float = 0.0  # bytes a second of uploads, measured alone
    calls: dict[str, list[float]] | None = None  # of CUDA, by token: their number, and milliseconds or bytes
    turns: dict[str, Any] | None = None  # of llama.cpp in the same process


def stock_model(path: str, device: str, setup: Setup) -> int:
    """Loads a llama_model * of llama.cpp alone. Its arguments live as long as the process."""

    class Override(ctypes.Structure):
        _fields_ = [("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p)]

    params = llama.llama_model_default_params()
    params.load_mode = llama.LLAMA_LOAD_MODE_NONE
    params.n_gpu_layers = -1
    devices = (ctypes.c_void_p * 2)(find_device(device).address, None)
    params.devices = ctypes.addressof(devices)
    if setup.on_processor:
        layers = r"\d+" if setup.on_processor < 0 else f"({'|'.join(map(str, range(setup.on_processor)))})"
        base = ctypes.CDLL(str(_libs.lib_dir() / f"libggml-base{_libs.SUFFIX}"))
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


class Text:
    """A context that computes a text: prompts from its beginning, and after the longest one a token at a time."""

    def __init__(self, model: int, setup: Setup, arguments: argparse.Namespace, n_decoded: int) -> None:
        text = Path(arguments.data).read_text(encoding="utf-8")
        widest = max(setup.prompts)
        self._tokens = tokens_of(model, text, widest + n_decoded)
        self._at = widest
        self.context = Context(model, n_ctx=widest + n_decoded, n_batch=widest, n_ubatch=min(widest, 2048), n_outputs=1,
                               n_threads=arguments.threads)

    def prompt(self, length: int) -> float:
        """Computes a prompt, and returns tokens a second."""
        self.context.clear()
        begin = time.perf_counter()
        self.context.decode(self._tokens[:length], outputs=[length - 1])
        return length / (time.perf_counter() - begin)

    def decode(self, n: int) -> list[float]:
        """Returns the milliseconds of the next n tokens."""
        times = []
        for token in self._tokens[self._at:self._at + n]:
            begin = time.perf_counter()
            self.context.decode([token])
            times.append(1000 * (time.perf_counter() - begin))
        self._at += n
        return times


def prompts(texts: Sequence[Text], lengths: Sequence[int]) -> list[dict[str, float]]:
    """Returns tokens a second of each text's prompts by length, alternating between texts.

    These are medians of prompts that are some tokens shorter each, so that each has a graph of its own, as a user's
    prompts have. The last one has the whole length.
    """
    rates: list[dict[str, float]] = [{} for _ in texts]
    for length in lengths:
        for text in texts:
            for _ in range(_WARM_PROMPTS):
                text.prompt(length)
        measured: list[list[float]] = [[] for _ in texts]
        for number, shorter in enumerate(_SHORTER):
            for at in (range(len(texts)) if number % 2 == 0 else reversed(range(len(texts)))):
                measured[at].append(texts[at].prompt(max(1, length - shorter)))
        for of_text, found in zip(rates, measured):
            of_text[str(length)] = statistics.median(found)
    return rates


def measure(
    model: int, setup: Setup, arguments: argparse.Namespace, count_anew: Callable[[], None] = lambda: None
) -> tuple[dict[str, float], float, dict[str, list[float]] | None]:
    """Measures prompts and decoding. count_anew: called before the measured tokens."""
    text = Text(model, setup, arguments, 2 * arguments.tokens)
    with text.context:
        prefill = prompts([text], setup.prompts)[0]
        text.decode(arguments.tokens)  # fills memory with the experts of the text
        count_anew()
        trace = Trace()
        times = text.decode(arguments.tokens)
        return prefill, statistics.median(times), trace.calls(arguments.tokens)


def measure_by_turns(setup: Setup, arguments: argparse.Namespace) -> Speed:
    """Measures both ways in one process, a block of tokens each, so that the machine affects both equally."""
    n = arguments.tokens + arguments.blocks * (_SETTLING + _BLOCK)
    stock = stock_model(str(arguments.model), arguments.device, setup)
    with our_model(setup, arguments) as model:
        texts = [Text(of, setup, arguments, n) for of in (model.llama.model, stock)]
        with texts[0].context, texts[1].context:
            ours, theirs = prompts(texts, setup.prompts)
            for text in texts:
                text.decode(arguments.tokens)
            model.reset_stats()
            blocks: tuple[list[float], list[float]] = [], []
            for number in range(arguments.blocks):
                for at in (number % 2, 1 - number % 2):
                    blocks[at].append(statistics.median(texts[at].decode(_SETTLING + _BLOCK)[_SETTLING:]))
        speed = counted(model, ours, statistics.median(blocks[0]), arguments.blocks * (_SETTLING + _BLOCK))
    return replace(speed, turns={"prefill": theirs, "blocks": blocks})


class Trace:
    """The calls of CUDA from now on, if libcuda_trace.so was loaded before it (scripts/cuda_trace.c)."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._traced = hasattr(self._library, "cuda_trace_reset")
        if self._traced:
            self._library.cuda_trace_reset()

    def calls(self, n_tokens: int) -> dict[str, list[float]] | None:
        """By call: number per token, and microseconds; by direction of copies: number, and bytes."""
        if not self._traced:
            return None
        text = ctypes.create_string_buffer(1 << 14)
        self._library.cuda_trace_read(text, ctypes.c_size_t(len(text)))
        counted = json.loads(text.value)
        return {name: [round(count / n_tokens, 2), round(sum_ / n_tokens / (1000 if name.startswith("cuda") else 1), 2)]
                for name, (count, sum_) in counted.items()}


def run(setup: Setup, arguments: argparse.Namespace) -> Speed:
    logs.set_quiet(True)
    if setup.who == STOCK:
        stock = stock_model(str(arguments.model), arguments.device, setup)
        prefill, decode_ms, calls = measure(stock, setup, arguments)
        return Speed(prefill, decode_ms, calls=calls)
    if setup.who == BOTH:
        return measure_by_turns(setup, arguments)
    with our_model(setup, arguments) as model:
        prefill, decode_ms, calls = measure(model.llama.model, setup, arguments, model.reset_stats)
        speed = counted(model, prefill, decode_ms, arguments.tokens)
    rates = rates_of(find_device(arguments.device), ModelMap(arguments.model), arguments.threads)
    return replace(speed, link=rates[0], calls=calls)


def our_model(setup: Setup, arguments: argparse.Namespace) -> Model:
    options = {"policy": setup.policy} if setup.policy else {}
    return load(arguments.model, budget=setup.budget, n_ctx=64, n_threads=arguments.threads, device=arguments.device,
                vram_budget=f"{setup.share}%", device_misses=setup.misses, prefetch=setup.prefetch,
                device_ahead=setup.ahead, substitution=setup.substitution or None, **options)


def counted(model: Model, prefill: dict[str, float], decode_ms: float, n_tokens: int) -> Speed:
    experts = model.stats().experts
    absent = experts.prefetch_hits + experts.misses - experts.prefetch_late
    known = lambda rate: None if rate != rate else rate  # noqa: E731
    return Speed(prefill, decode_ms, experts.device_used_bytes, experts.device_bytes / n_tokens,
                 experts.bytes_read / n_tokens, experts.device_misses / n_tokens, known(experts.device_hit_rate),
                 known(experts.hit_rate), experts.prefetch_hits / absent if absent > 0 else None,
                 experts.device_ahead / n_tokens, known(experts.device_ahead_precision))


def in_process(setup: Setup, arguments: argparse.Namespace) -> Speed:
    """Measures in a child, which gets the setup on its command line and answers on its last line.

    Raises:
        RuntimeError: It failed, with the reason.
    """
    command = [sys.executable, __file__, *sys.argv[1:], "--setup", json.dumps(asdict(setup))]
    # llama.cpp's threads wait as they do without pyorch.
    waits = {"GOMP_SPINCOUNT": _libs.LIBGOMP_SPIN_COUNT} if setup.who == STOCK else {}
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **waits})
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"status {done.returncode}")
    return Speed(**json.loads(done.stdout.splitlines()[-1]))


class Report:
    """Measures each setup once in each round, for all tables that need it, and prints tables of medians."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._speeds: dict[Setup, Speed] = {}
        self._any_ran = False
        self._until = time.monotonic() + 60 * arguments.minutes
        self._kept: dict[str, Speed] = {}
        if arguments.results and arguments.results.exists():
            for line in arguments.results.read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(ValueError):  # a killed command leaves a partial line
                    entry = json.loads(line)
                    self._kept[entry["what"]] = Speed(**entry["speed"])

    def speeds(self, setups: Sequence[Setup]) -> list[Speed]:
        plain = [replace(setup, name="") for setup in setups]
        new = list(dict.fromkeys(setup for setup in plain if setup not in self._speeds))
        rounds: dict[Setup, list[Speed]] = {setup: [] for setup in new}
        for number in range(self._arguments.rounds):
            for at, setup in enumerate(new):
                print(f"round {number + 1} of {self._arguments.rounds}, {at + 1} of {len(new)}: {setup}",
                      file=sys.stderr, flush=True)
                rounds[setup].append(self._once(setup, number))
        self._speeds |= {setup: median(speeds) for setup, speeds in rounds.items()}
        return [self._speeds[setup] for setup in plain]

    def _once(self, setup: Setup, number: int) -> Speed:
        """Returns a measurement, from now or from an earlier command."""
        arguments = self._arguments
        what = json.dumps([_METHOD, asdict(setup), number, str(arguments.model.resolve()), arguments.device,
                           arguments.tokens, arguments.threads, arguments.data, arguments.blocks])
        if what not in self._kept:
            if time.monotonic() > self._until:
                print("the minutes are over: the same command goes on", file=sys.stderr)
                sys.exit(3)
            self._kept[what] = self._speed(setup)
            if arguments.results:
                with arguments.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"what": what, "speed": asdict(self._kept[what])}) + "\n")
        self._any_ran |= not math.isnan(self._kept[what].decode_ms)
        return self._kept[what]

    def _speed(self, setup: Setup) -> Speed:
        """Returns a measurement. A failed one costs only its own row, unless it is the first, which would all fail."""
        try:
            speed = in_process(setup, self._arguments)
        except RuntimeError as error:
            if not self._any_ran:
                sys.exit(f"measure_device.py: {error}")
            print(f"did not run: {error}", file=sys.stderr, flush=True)
            return Speed({str(n): math.nan for n in setup.prompts}, math.nan)
        self._any_ran = True
        return speed

    def table(self, title: str, columns: Sequence[str], rows: Iterator[Sequence[str]]) -> None:
        lines = [f"## {title}", "", cells(columns), "|" + " --- |" * len(columns), *map(cells, rows), ""]
        print("\n".join(lines), flush=True)


def median(speeds: Sequence[Speed]) -> Speed:
    """Returns medians. Counts are those of one round, because they follow from the tokens."""
    prefill = {n: statistics.median(speed.prefill[n] for speed in speeds) for n in speeds[0].prefill}
    one = replace(speeds[0], prefill=prefill, decode_ms=statistics.median(speed.decode_ms for speed in speeds))
    turns = [speed.turns for speed in speeds if speed.turns is not None]
    if not turns:
        return one
    theirs = {n: statistics.median(of["prefill"][n] for of in turns) for n in turns[0]["prefill"]}
    blocks = [[ms for of in turns for ms in of["blocks"][who]] for who in range(2)]
    return replace(one, decode_ms=statistics.median(blocks[0]), turns={"prefill": theirs, "blocks": blocks})


def ratio(blocks: Sequence[Sequence[float]]) -> str:
    """Returns the ratio of the second's times to the first's in the same turns: geometric mean with standard errors."""
    logs_ = [math.log(of_theirs / of_ours) for of_ours, of_theirs in zip(*blocks)]
    error = statistics.stdev(logs_) / math.sqrt(len(logs_)) if len(logs_) > 1 else math.inf
    mean = statistics.mean(logs_)
    low, high = (math.exp(mean + at * error) for at in (-_ERRORS, _ERRORS))
    return f"{math.exp(mean):.2f} [{low:.2f}, {high:.2f}]"


def cells(texts: Sequence[str]) -> str:
    return " | ".join(["", *texts, ""]).strip()


def percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def checks(report: Report, _: ModelMap, arguments: argparse.Namespace) -> None:
    def verified(model: Path, share: str, misses: str, *before: str, **variables: str) -> tuple[str, ...]:
        command = [*before, sys.executable, "-m", "pyorch", "verify", str(model), "--device", arguments.device,
                   "--vram-budget", share, "--device-misses", misses, "--threads", str(arguments.threads)]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **variables})
        said = (done.stderr + done.stdout).strip().splitlines() or [f"status {done.returncode}"]
        if before:
            said = [line.strip("= ") for line in said if line.startswith("=========")]
        with_what = [*map(os.path.basename, before[:1]), *(f"{name}={value}" for name, value in variables.items())]
        return model.name, share, misses, " ".join(with_what), " ".join(said[:_MOST_LINES] if before else said[-1:])

    rows = [verified(arguments.small, share, misses) for share in ("30%", "100%") for misses in arguments.misses]
    if arguments.mixed:  # ggml's CUDA fuses several of its kernels for one row into one operation
        rows += [verified(arguments.mixed, share, "upload", **variables) for share in ("30%", "100%")
                 for variables in ({}, {"GGML_CUDA_DISABLE_FUSION": "1"})]
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer and not find_device(arguments.device).is_remote:
        rows.append(verified(arguments.small, "50%", "processor", sanitizer, "--tool", "memcheck"))
    report.table("Checks", ("model", "experts in VRAM", "misses", "with", "pyorch verify says"), iter(rows))


def speed(report: Report, model: ModelMap, arguments: argparse.Namespace) -> None:
    prompts = tuple(arguments.prompt)
    columns = ("by", "experts", "of the device", *(f"prefill of {n}, tok/s" for n in prompts), "decode, tok/s", "hits",
               "uploaded a token", "read a token", "of the bound")
    for budget in arguments.budgets:
        setups = [] if budget != "100%" else [Setup(STOCK, "--cpu-moe", prompts, on_processor=-1)]
        for share in arguments.shares:
            if budget == "100%":
                setups.append(stock_setup(model, prompts, share))
            setups += [Setup(OURS, f"{share} %, misses: {misses}", prompts, share, misses=misses, budget=budget,
                             prefetch="auto") for misses in arguments.misses]
        speeds = report.speeds(setups)
        all_there = min((one.decode_ms for setup, one in zip(setups, speeds)
                         if setup.share == 100 and not math.isnan(one.decode_ms)), default=math.nan)
        report.table(f"Speed, {budget} of the experts in host memory", columns, (
            (setup.who, setup.name, format_bytes(one.used_bytes or setup.vram_bytes),
             *(f"{one.prefill[str(n)]:.1f}" for n in prompts), f"{1000 / one.decode_ms:.2f}", percent(one.hit_rate),
             *((format_bytes(round(one.uploaded)), format_bytes(round(one.read)), reached(one, model, all_there))
               if setup.who == OURS else ("", "", "")))
            for setup, one in zip(setups, speeds)
        ))


def stock_setup(model: ModelMap, prompts: tuple[int, ...], share: int) -> Setup:
    """Returns the setup with the experts of as many last layers on the device as fit into a share of all."""
    of_layer = [layer.n_expert * layer.expert_bytes for layer in model.layers]
    n = next(n for n in range(len(of_layer) + 1) if sum(of_layer[n:]) <= sum(of_layer) * share // 100)
    first = model.layers[n].il if n < len(of_layer) else -1
    return Setup(STOCK, f"--n-cpu-moe {n}" if n else "all on the device", prompts, share, first, sum(of_layer[n:]))


def turns(report: Report, model: ModelMap, arguments: argparse.Namespace) -> None:
    lengths = tuple(arguments.prompt)
    setups = [replace(stock_setup(model, lengths, share), who=BOTH, prefetch="auto") for share in arguments.shares]
    rows = []
    for setup, one in zip(setups, report.speeds(setups)):
        beside = one.turns or {"prefill": one.prefill, "blocks": [[math.nan], [math.nan]]}
        for by, name, prefill, ms, last in (
            (STOCK, setup.name, beside["prefill"], statistics.median(beside["blocks"][1]), ("", "")),
            (OURS, f"{setup.share} %", one.prefill, one.decode_ms, (ratio(beside["blocks"]), percent(one.hit_rate))),
        ):
            rows.append((by, name, *(f"{prefill[str(n)]:.0f}" for n in lengths), f"{ms:.2f}", *last))
    report.table("By turns in one process, all experts in host memory", (
        "by", "experts", *(f"prefill of {n}, tok/s" for n in lengths), "ms a token", "llama.cpp's / pyorch's", "hits"),
        iter(rows))


def reached(one: Speed, model: ModelMap, all_there: float) -> str:
    """Returns the reached share of the bound. all_there: milliseconds of a token with all experts in VRAM, or nan."""
    expert_bytes = statistics.mean(layer.expert_bytes for layer in model.layers)
    if math.isnan(all_there) or not one.link:
        return "-"
    return percent(max(all_there, 1000 * one.misses * expert_bytes / one.link) / one.decode_ms)


def latencies(report: Report, _: ModelMap, arguments: argparse.Namespace) -> None:
    prompts, share, less = tuple(arguments.prompt[:1]), arguments.shares[0], arguments.budgets[-1]
    setups = [
        Setup(OURS, "hit in VRAM", prompts, 100, misses="upload"),
        Setup(OURS, "on demand: uploaded, then computed there", prompts, share, misses="upload"),
        Setup(OURS, "computed by the processor, in host memory", prompts, share),
        Setup(OURS, "computed by the processor, some read from disk", prompts, share, budget=less),
        Setup(OURS, "the same, reading ahead", prompts, share, budget=less, prefetch="auto"),
        Setup(OURS, "a resident expert in place of one that is to be read", prompts, share, budget=less,
              substitution=arguments.substitution),
    ]
    hit, *others = report.speeds(setups)
    rows = [(setups[0].name, f"{hit.decode_ms:.2f}", f"{hit.misses:.1f}", "0", "lossless")]
    rows += [(setup.name, f"{one.decode_ms:.2f}", f"{one.misses:.1f}",
              f"{(one.decode_ms - hit.decode_ms) / one.misses:.3f}" if one.misses else "",
              f"lossy: {setup.substitution}" if setup.substitution else "lossless")
             for setup, one in zip(setups[1:], others)]
    report.table(f"What an expert costs that is not in VRAM, {share} % of them there (BuddyMoE, table 1)",
                 ("scenario", "ms a token", "misses a token", "ms a miss", "accuracy"), iter(rows))


def limits(report: Report, _: ModelMap, arguments: argparse.Namespace) -> None:
    prompts, less = tuple(arguments.prompt[:1]), arguments.budgets[-1]
    ways = {
        "on demand, lru": {"misses": "upload", "policy": "lru"},
        "on demand, lfu": {"misses": "upload", "policy": "lfu"},
        "on demand, learned": {"misses": "upload", "policy": "learned"},
        "by the processor": {},
        f"by the processor, {less} in host memory": {"budget": less},
        "the same, reading ahead": {"budget": less, "prefetch": "auto"},
    }
    setups = [[Setup(OURS, "", prompts, share, **way) for way in ways.values()] for share in arguments.shares]
    speeds = report.speeds([setup for row in setups for setup in row])
    found = iter(speeds)
    report.table("Milliseconds a token by experts in VRAM (FineMoE, figure 12)", ("experts in VRAM", *ways), (
        (f"{share} %", *(f"{next(found).decode_ms:.2f}" for _ in ways)) for share in arguments.shares
    ))


def ablation(report: Report, _: ModelMap, arguments: argparse.Namespace) -> None:
    prompts, share, less = tuple(arguments.prompt[:1]), arguments.shares[0], arguments.budgets[-1]
    setups = [Setup(OURS, policy, prompts, share, misses="upload", budget=less, policy=policy) for policy in _POLICIES]
    report.table(f"Hits by policy, {share} % in VRAM and {less} in host memory (FineMoE, figure 14b)",
                 ("policy", "hits in VRAM", "of the others, in host memory"),
                 ((setup.name, percent(one.hit_rate), percent(one.host_hit_rate))
                  for setup, one in zip(setups, report.speeds(setups))))
    names = [name for name in predictors().present if not Needs.ESTIMATOR & predictors()[name].needs]
    setups = [Setup(OURS, name, prompts, share, budget=less, prefetch=f"{name}:1:0" if name != "none" else name)
              for name in names]
    report.table(f"Foreseen by predictor, {share} % in VRAM and {less} in host memory (FineMoE, figure 14a)",
                 ("predictor", "foreseen of what was absent", "in host memory", "ms a token"),
                 ((setup.name, percent(one.foreseen), percent(one.host_hit_rate), f"{one.decode_ms:.2f}")
                  for setup, one in zip(setups, report.speeds(setups))))


def prefetching(report: Report, _: ModelMap, arguments: argparse.Namespace) -> None:
    share, less = arguments.shares[0], arguments.budgets[-1]
    ways = ({}, {"prefetch": f"{_PREDICTOR}:0"}, {"prefetch": f"{_PREDICTOR}:0", "ahead": 2})
    setups = [Setup(OURS, "", (length,), share, misses="upload", budget=less, **way)
              for length in arguments.contexts for way in ways]
    speeds = iter(report.speeds(setups))
    rows = [[next(speeds).decode_ms for _ in ways] for _ in arguments.contexts]
    report.table(f"Milliseconds a token on demand and ahead, {share} % in VRAM and {less} in host memory "
                 "(Speculating Experts, figure 8)",
                 ("tokens of the prompt", "on demand", "read ahead", "change", "uploaded ahead too", "change"), (
        (str(length), f"{demand:.2f}", *(cell for ms in others for cell in (f"{ms:.2f}", f"{ms / demand - 1:+.0%}")))
        for length, (demand, *others) in zip(arguments.contexts, rows)
    ))


def ahead(report: Report, _: ModelMap, arguments: argparse.Namespace) -> None:
    prompts, share = tuple(arguments.prompt[:1]), arguments.shares[0]
    setups = [Setup(OURS, misses, prompts, share, misses=misses, prefetch=_PREDICTOR if n else "none", ahead=n)
              for misses in ("processor", "upload") for n in (0, *arguments.ahead)]
    report.table(f"Uploaded before their layer comes, {share} % in VRAM, all in host memory, as "
                 f"forecast by {_PREDICTOR}",
                 ("misses", "of a layer at most", "ms a token", "hits in VRAM", "ahead a token", "right",
                  "uploaded a token"),
                 ((setup.name, str(setup.ahead), f"{one.decode_ms:.2f}", percent(one.hit_rate), f"{one.ahead:.1f}",
                   percent(one.right), format_bytes(round(one.uploaded)))
                  for setup, one in zip(setups, report.speeds(setups))))


TABLES = {table.__name__: table for table in (checks, turns, speed, latencies, limits, ablation, prefetching, ahead)}


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def words(text: str) -> list[str]:
    return text.split(",")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("device", help="such as CUDA0, or rpc:HOST:PORT")
    parser.add_argument("--only", type=words, default=list(TABLES), metavar="TABLE,...")
    parser.add_argument("--tokens", type=int, default=128, help="decoded, once to warm up and once measured")
    parser.add_argument("--prompt", type=numbers, default=[512, 2048], help="tokens of prompts, ascending")
    parser.add_argument("--blocks", type=int, default=8, help="of 32 tokens, of each way, alternating")
    parser.add_argument("--contexts", type=numbers, default=[1024, 4096, 16384], help="tokens of prompts, prefetching")
    parser.add_argument("--shares", type=numbers, default=[25, 50, 75, 100], help="of the experts, in percent")
    parser.add_argument("--budgets", type=words, default=["100%", "40%"],
                        help="host memory for experts; the last one is less than all, so that three tiers work")
    parser.add_argument("--misses", type=words, default=["processor", "upload"])
    parser.add_argument("--ahead", type=numbers, default=[1, 2, 4], help="experts of a layer that forecasts upload")
    parser.add_argument("--substitution", default="mode=random,max_replaced=4", help="the lossy row of latencies")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--data", default=argparse.__file__, help="text whose tokens are computed")
    parser.add_argument("--small", type=Path, help="the model that is checked (default: the same)")
    parser.add_argument("--mixed", type=Path, help="a further model, with several types of weights")
    parser.add_argument("--results", type=Path, metavar="FILE", help="stores each measurement, as a line of JSON")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no measurement after this: status 3")
    parser.add_argument("--setup", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.small = arguments.small or arguments.model
    if arguments.setup:
        print(json.dumps(asdict(run(Setup(**arguments.setup), arguments))))
        return
    unknown = set(arguments.only) - set(TABLES)
    if unknown:
        parser.error(f"there is no table {', '.join(sorted(unknown))}: use {', '.join(TABLES)}")
    try:
        model = ModelMap(arguments.model)
    except PyorchError as error:
        parser.error(str(error))
    report = Report(arguments)
    for name in arguments.only:
        TABLES[name](report, model, arguments)


if __name__ == "__main__":
    main()
