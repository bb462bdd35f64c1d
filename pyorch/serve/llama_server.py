"""Runs llama-server in this process, with flags for a model under a budget."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import llama_cpp.llama_cpp as llama

from pyorch.errors import PyorchError
from pyorch.llama import cores, memory
from pyorch.llama.device_parameters import NO_TENSOR
from pyorch.runtime.devices import Devices
from pyorch.serve.library import chat_page, ffi, lib
from pyorch.settings.device_options import NONE, REMOTE, device_names
from pyorch.settings.settings import MAX_THREADS, MAX_TOKENS
from pyorch.sizes import MiB

N_PARALLEL = 4  # slots of llama-server without -np; they share one KV cache

# Timeouts for the head and the body of a request: large pictures may arrive slowly. A silent connection ends after
# --timeout, which may be sooner.
HEAD_SECONDS, BODY_SECONDS = 30.0, 600.0
SILENT_SECONDS = 60


@dataclass(frozen=True)
class Option:
    """A flag of llama-server: its spellings and its environment variable."""

    names: tuple[str, ...]
    env: str = ""


MODEL = Option(("-m", "--model", "-mu", "--model-url", "-hf", "-hfr", "--hf-repo", "-dr", "--docker-repo",
                "--models-dir", "--models-preset"))
ALIAS = Option(("-a", "--alias"), "LLAMA_ARG_ALIAS")
HOST = Option(("--host",), "LLAMA_ARG_HOST")
PORT = Option(("--port",), "LLAMA_ARG_PORT")
CTX_SIZE = Option(("-c", "--ctx-size"), "LLAMA_ARG_CTX_SIZE")
BATCH = Option(("-b", "--batch-size"), "LLAMA_ARG_BATCH")
UBATCH = Option(("-ub", "--ubatch-size"), "LLAMA_ARG_UBATCH")
DEVICE = Option(("-dev", "--device"), "LLAMA_ARG_DEVICE")
TENSOR_SPLIT = Option(("-ts", "--tensor-split"), "LLAMA_ARG_TENSOR_SPLIT")
SPLIT_MODE = Option(("-sm", "--split-mode"), "LLAMA_ARG_SPLIT_MODE")
GPU_LAYERS = Option(("-ngl", "--gpu-layers", "--n-gpu-layers"), "LLAMA_ARG_N_GPU_LAYERS")
THREADS = Option(("-t", "--threads"), "LLAMA_ARG_THREADS")
THREADS_BATCH = Option(("-tb", "--threads-batch"), "LLAMA_ARG_THREADS_BATCH")
DRAFT_THREADS = Option(("--spec-draft-threads", "-td", "--threads-draft"))
DRAFT_THREADS_BATCH = Option(("--spec-draft-threads-batch", "-tbd", "--threads-batch-draft"))
HTTP_THREADS = Option(("--threads-http",), "LLAMA_ARG_THREADS_HTTP")
PARALLEL = Option(("-np", "--parallel"), "LLAMA_ARG_N_PARALLEL")
KV_UNIFIED = Option(("-kvu", "--kv-unified", "-no-kvu", "--no-kv-unified"), "LLAMA_ARG_KV_UNIFIED")
KV_PER_SLOT = Option(("--kv-unified-per-slot",), "LLAMA_ARG_KV_UNIFIED_PER_SLOT")
CACHE_TYPE_K = Option(("-ctk", "--cache-type-k"), "LLAMA_ARG_CACHE_TYPE_K")
CACHE_TYPE_V = Option(("-ctv", "--cache-type-v"), "LLAMA_ARG_CACHE_TYPE_V")
CACHE_RAM = Option(("-cram", "--cache-ram"), "LLAMA_ARG_CACHE_RAM")
SWA_FULL = Option(("--swa-full",), "LLAMA_ARG_SWA_FULL")
LOAD_MODE = Option(("-lm", "--load-mode"), "LLAMA_ARG_LOAD_MODE")
FIT = Option(("-fit", "--fit"), "LLAMA_ARG_FIT")
WARMUP = Option(("--warmup", "--no-warmup"))
UI = Option(("--ui", "--webui", "--no-ui", "--no-webui"), "LLAMA_ARG_UI")
STATIC_FILES = Option(("--path",), "LLAMA_ARG_STATIC_PATH")
TIMEOUT = Option(("-to", "--timeout"), "LLAMA_ARG_TIMEOUT")
METRICS = Option(("--metrics",), "LLAMA_ARG_ENDPOINT_METRICS")
CORS_ORIGINS = Option(("--cors-origins",), "LLAMA_ARG_CORS_ORIGINS")
API_KEY = Option(("--api-key",), "LLAMA_API_KEY")
API_KEY_FILE = Option(("--api-key-file",))
VERBOSITY = Option(("-lv", "--verbosity", "--log-verbosity", "-v", "--verbose", "--log-verbose", "--log-disable"),
                   "LLAMA_ARG_LOG_VERBOSITY")
API_PREFIX = Option(("--api-prefix",), "LLAMA_ARG_API_PREFIX")
DRAFT_MODEL = Option(("-md", "--model-draft", "--spec-draft-model"), "LLAMA_ARG_SPEC_DRAFT_MODEL")
MMPROJ = Option(("-mm", "--mmproj"), "LLAMA_ARG_MMPROJ")

# If one of these is given, the user divides the context among slots.
OF_SLOTS = (PARALLEL, KV_UNIFIED, KV_PER_SLOT, DRAFT_MODEL, MMPROJ)


class Root(Enum):
    """The page at "/": llama-server's chat page or the user's files, pyorch's small chat page, or the live view."""

    LLAMA_SERVER = 1
    SMALL_CHAT = 2
    LIVE_VIEW = 3


def keys_in(path: str) -> list[str]:
    """Returns the API keys in a file, as llama-server reads them: one on each line, without comments.

    Raises:
        OSError: The file cannot be read.
    """
    lines = Path(path).read_bytes().decode("ascii", "replace").split("\n")
    return [line for line in lines if line and not line.startswith("#")]


class Flags:
    """The flags of llama-server: the user's, and defaults for others."""

    def __init__(self, given: Sequence[str]) -> None:
        self.arguments = list(given)

    def has(self, option: Option) -> bool:
        return any(argument in option.names for argument in self.arguments) or os.environ.get(option.env) is not None

    def default(self, option: Option, *arguments: object) -> None:
        """Adds the arguments unless the option is given."""
        if not self.has(option):
            self.arguments += map(str, arguments)

    @property
    def api_keys(self) -> list[str]:
        """Returns the API keys that requests need.

        Raises:
            OSError: The file of keys cannot be read.
        """
        keys, file = self.value(API_KEY).split(","), self.value(API_KEY_FILE)
        return [key for key in keys + (keys_in(file) if file else []) if key]

    @property
    def root(self) -> Root:
        """The page at "/". Call it before add_defaults()."""
        given = [argument for argument in self.arguments if argument in UI.names]
        on = given[-1] in UI.names[:2] if given else os.environ.get(UI.env, "1") in ("on", "enabled", "true", "1")
        if not on:
            return Root.LIVE_VIEW
        return Root.LLAMA_SERVER if chat_page() or self.has(STATIC_FILES) else Root.SMALL_CHAT

    def value(self, option: Option, default: str = "") -> str:
        """Returns the option's value: the last flag, otherwise the environment variable, otherwise `default`."""
        pairs = zip(self.arguments, self.arguments[1:])
        values = [value for argument, value in pairs if argument in option.names]
        return values[-1] if values else os.environ.get(option.env, default)

    def replace(self, option: Option, value: object) -> None:
        """Replaces the option's value in flags and environment."""
        at = [i for i, argument in enumerate(self.arguments[:-1]) if argument in option.names]
        for i in at:
            self.arguments[i + 1] = str(value)
        if not at:
            self.arguments += (option.names[0], str(value))

    def number(self, option: Option, default: int) -> int:
        text = self.value(option, str(default))
        try:
            return int(text)
        except ValueError:
            raise PyorchError(f'{option.names[0]} "{text}" is not a whole number') from None

    def add_defaults(self) -> None:
        """Adds the defaults that experts under a budget need, except for the sizes of the context."""
        # Dense weights in anonymous memory: the kernel cannot drop them under a memory limit.
        self.default(LOAD_MODE, "--load-mode", "none")
        self.default(WARMUP, "--no-warmup")  # it selects every expert
        self.default(FIT, "-fit", "off")  # it loads the model a second time to fit it to a GPU
        self.default(CACHE_RAM, "-cram", 0)  # it copies the KV of old prompts, up to 8 GiB
        if self.root is Root.SMALL_CHAT:
            self.default(UI, "--no-ui")
        self.default(TIMEOUT, "--timeout", SILENT_SECONDS)
        self.default(METRICS, "--metrics")  # pyorch appends its own
        self.default(THREADS, "-t", cores.physical_cores())

    def place(self, name: str, devices: Devices | None, params: llama.llama_model_params) -> None:
        """Puts dense layers on the devices, as `params` says.

        Args:
            name: The devices, as pyorch.settings.device_options reads them.
            devices: The devices that compute, None for the processor.
            params: The parameters of the model.
        """
        self.arguments.append("--no-op-offload")  # a device would copy experts from the loader's mapping
        if devices is None:
            self.default(DEVICE, "--device", "none")
            return
        if devices.is_remote:
            endpoints = (each.removeprefix(REMOTE) for each in device_names(name) if each.startswith(REMOTE))
            self.arguments[:0] = ("--rpc", ",".join(endpoints))  # before the flags that name these devices
        self.replace(DEVICE, ",".join(device.name for device in devices.each))
        self.default(GPU_LAYERS, "-ngl", "all" if params.n_gpu_layers < 0 else params.n_gpu_layers)
        if len(devices.each) > 1:
            self.replace(SPLIT_MODE, "layer")
            self.replace(TENSOR_SPLIT, ",".join(f"{n:.0f}" for n in params.split[:len(devices.each)]))
            if params.tensor_buft_overrides:
                self.arguments += ("-ot", f"{NO_TENSOR}=CPU")

    @property
    def n_gpu_layers(self) -> int:
        """The given number of layers on a device, 0 without a flag: then the planner decides."""
        text = self.value(GPU_LAYERS, "0")
        return self.number(GPU_LAYERS, 0) if text not in ("all", "auto") else _ALL_LAYERS

    def leave_device(self, left: str) -> None:
        """Replaces a lost device by the devices of this setting, or by the processor if `left` is "none"."""
        if left == NONE:
            self.replace(DEVICE, NONE)
        if self.has(VERBOSITY) and self.value(VERBOSITY) not in ("0", "1", "2", "3"):
            # A more verbose log asks all devices for their memory, and a lost device would end the process.
            self.arguments += ("-lv", "3")

    @property
    def n_slots(self) -> int:
        """The largest number of requests that are computed together."""
        n_parallel = self.number(PARALLEL, -1)
        return n_parallel if n_parallel > 0 else N_PARALLEL

    @property
    def slot_ctx(self) -> int:
        """The tokens of context that a request can have; 0: as many as the model was trained with."""
        n_ctx = self.number(CTX_SIZE, 0)
        return n_ctx // self.n_slots if self.number(PARALLEL, -1) > 0 and not self._is_unified else n_ctx

    @property
    def _is_unified(self) -> bool:
        return self.number(PARALLEL, -1) < 0 or any(name in self.arguments for name in KV_UNIFIED.names[:2])

    def set_slots(self, n_slots: int, n_ctx: int) -> None:
        """Sets the slots, each with a context of its own of so many tokens."""
        self.replace(PARALLEL, n_slots)
        self.replace(CTX_SIZE, n_slots * n_ctx)

    def context_params(self) -> llama.llama_context_params:
        """Returns the parameters of llama-server's context, for the planner."""
        params = llama.llama_context_default_params()
        n_ctx = self.number(CTX_SIZE, 0)
        if n_ctx < 0:
            raise PyorchError(f"{CTX_SIZE.names[0]} is {n_ctx}, and must be 0 (as trained) or more")
        params.n_ctx = n_ctx
        params.n_batch = min(self.number(BATCH, 2048), n_ctx or MAX_TOKENS)  # as llama.cpp does
        params.n_ubatch = min(self.number(UBATCH, 512), params.n_batch)
        params.n_seq_max = self.n_slots
        params.kv_unified = self._is_unified
        params.n_outputs_max = params.n_seq_max
        params.type_k = _cache_type(self.value(CACHE_TYPE_K, "f16"))
        params.type_v = _cache_type(self.value(CACHE_TYPE_V, "f16"))
        return params

    def other_bytes(self) -> int:
        """Returns the bytes of llama-server's other allocations: the prompt cache and other models."""
        files = (self.value(option) for option in (DRAFT_MODEL, MMPROJ))
        return max(0, self.number(CACHE_RAM, 0)) * MiB + sum(os.path.getsize(f) for f in files if os.path.isfile(f))


_ALL_LAYERS = 1 << 20  # more than any model has


def _cache_type(name: str) -> int:
    if name == "f16":
        return llama.GGML_TYPE_F16
    import gguf  # takes 100 ms

    try:
        return gguf.GGMLQuantizationType[name.upper()].value
    except KeyError:
        raise PyorchError(f'"{name}" is no type for a KV cache: use f16, q8_0 or another of `-- --help`') from None


# With these flags llama-server prints something and exits, or connects to other processes.
_NOT_CHECKED = ("-h", "--help", "--usage", "--version", "-cl", "--cache-list", "--completion-bash", "--list-devices",
                "--rpc")
_WITH_ONE_VALUE = (ALIAS, HOST, PORT, CTX_SIZE, BATCH, UBATCH, DEVICE, TENSOR_SPLIT, SPLIT_MODE, GPU_LAYERS, THREADS,
                   THREADS_BATCH, DRAFT_THREADS, DRAFT_THREADS_BATCH, HTTP_THREADS, PARALLEL, CACHE_TYPE_K,
                   CACHE_TYPE_V, CACHE_RAM, LOAD_MODE, FIT, STATIC_FILES, TIMEOUT, API_KEY_FILE, API_PREFIX,
                   CORS_ORIGINS, DRAFT_MODEL, MMPROJ)
_REFUSED = re.compile(r'error while handling (?:argument|environment variable) "(?P<name>[^"]*)": (?:error: )?'
                      r"(?P<why>.*?)\s*(?:\nusage:\n(?P<usage>.*?)\s*(?:\n\nto show complete usage.*)?)?", re.DOTALL)
_USAGE_LENGTH = 160  # characters of the usage in an error


# The largest values. llama-server accepts larger ones and then ends, because a fixed array is full
# (GGML_MAX_N_THREADS, LLAMA_MAX_SEQ) or the kernel refuses so many threads.
_MOST = {THREADS: MAX_THREADS, THREADS_BATCH: MAX_THREADS, DRAFT_THREADS: MAX_THREADS, DRAFT_THREADS_BATCH: MAX_THREADS,
         HTTP_THREADS: 1024, PARALLEL: 256}


def check(given: Sequence[str]) -> None:
    """Checks the user's flags.

    Raises:
        PyorchError: llama-server refuses a flag (with its own reason), or a number would end it.
    """
    _check_words(given)
    flags = Flags(given)
    for option, most in _MOST.items():
        if (number := flags.number(option, 1)) > most:
            raise PyorchError(f"{option.names[0]} is {number}, and must be {most} or less")
    n_cache, limit = flags.number(CACHE_RAM, 0), memory.memory_limit().limit_bytes
    if n_cache * MiB > limit:
            raise PyorchError(f"{CACHE_RAM.names[0]} is {n_cache} (MiB), and must be {limit // MiB} or less: this "
                              "is all the memory")


def _check_words(given: Sequence[str]) -> None:
    if any(argument in _NOT_CHECKED for argument in given):
        return
    for option in _WITH_ONE_VALUE:
        values = [value for argument, value in zip(given, given[1:]) if argument in option.names]
        if len(set(values)) > 1:
            raise PyorchError(f"{option.names[0]} is given more than once, as {' and '.join(values)}: give it once")
    argv = [ffi.new("char[]", os.fsencode(argument)) for argument in ("llama-server", *given)]
    text = ffi.new("char[]", 1 << 14)
    lib.pyorch_server_check_arguments(len(argv), ffi.new("char *[]", [*argv, ffi.NULL]), text, len(text))
    said = ffi.string(text).decode(errors="replace").strip()
    if not said:
        return
    unknown, refused = re.search("error: invalid argument: (.*)", said), _REFUSED.fullmatch(said)
    if unknown is not None:
        raise PyorchError(f"llama-server has no flag {unknown[1]}: pyorch serve MODEL -- --help lists all")
    if refused is None:
        raise PyorchError(f"llama-server refuses its flags: {said}")
    name, why = refused["name"], refused["why"]
    value = os.environ.get(name, "")
    if name in given:
        value = next(iter(given[given.index(name) + 1 :]), "")
    if re.fullmatch("(invalid )?sto[a-z]+.*", why):  # the text of a C++ exception
        why = "that is no number, or is too large"
    usage = textwrap.shorten(refused["usage"] or "", _USAGE_LENGTH, placeholder=" ...")
    flag = f"{name} {value}".strip()
    raise PyorchError(f"llama-server refuses {flag}: {why}" + (f"; it takes {usage}" if usage else ""))


def call(arguments: Sequence[str], devices: Devices | None) -> int:
    """Runs llama-server until pyorch.serve.ending.Ending ends it.

    REQUIRES: the calling thread is under the engine's capture.

    Args:
        arguments: All flags.
        devices: The devices that compute. If one of another process is lost, the requests that it computes fail.

    Returns:
        llama-server's exit status.
    """
    argv = [ffi.new("char[]", os.fsencode(argument)) for argument in ("llama-server", *arguments)]
    if devices is not None and devices.is_remote:
        remote = [device.handle for device in devices.each if device.is_remote]
        lib.pyorch_server_set_devices(len(remote), ffi.new("void *[]", remote))
    lib.pyorch_server_set_limits(HEAD_SECONDS, BODY_SECONDS)
    return lib.pyorch_server_run(len(argv), ffi.new("char *[]", [*argv, ffi.NULL]))
