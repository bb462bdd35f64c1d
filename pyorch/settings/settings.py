"""The settings of a model: memory for experts, reads, devices, contexts, and lossy options."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyorch.errors import PyorchError
from pyorch.settings.budget import AUTO, Budget
from pyorch.settings.cpus import ANY as CPUS_ANY
from pyorch.settings.cpus import AUTO as CPUS_AUTO
from pyorch.settings.cpus import cpu_list, cpu_numbers
from pyorch.settings.device_options import MAX_AHEAD, NONE, device_misses, device_name, vram_budget
from pyorch.settings.kernels import AUTO as AUTO_KERNELS
from pyorch.settings.kernels import kernels
from pyorch.settings.mirrors import MAX_MIRRORS, Mirrors
from pyorch.settings.option import CONTEXT, DEVICE, LONG, LOSSY, flag, option, parse_fields, text, whole
from pyorch.settings.pools import KERNELS, Pools, recovery
from pyorch.settings.prefetch import AUTO as PREFETCH_AUTO
from pyorch.settings.prefetch import NONE as PREFETCH_NONE
from pyorch.settings.prefetch import Prefetch
from pyorch.settings.reads import Reads
from pyorch.settings.substitution import Substitution

MAX_THREADS = 512  # GGML_MAX_N_THREADS
MAX_TOKENS = (1 << 31) - 1

_FROM_1_TO = "a whole number from 1 to "
_FROM_0_TO = "a whole number from 0 (for the default) to "  # in Python


def _lists(given: Any) -> Any:
    """Reads buddy lists: Buddies, or the path of a file."""
    if isinstance(given, (bool, int, float, bytes, list, dict)):
        raise TypeError(given)
    return Path(given) if isinstance(given, (str, os.PathLike)) else given


@dataclass(frozen=True)
class Settings:
    """All options of a model. Each field accepts text such as "40%" or a value such as a Budget.

    The library knows the names of policies and predictors, so making an engine checks them.

    Raises:
        PyorchError: An option has no valid value, or two options exclude each other.
    """

    budget: Budget = option(
        AUTO, Budget.parse, "a size or a share", metavar="SIZE",
        help="memory for the experts: a share of them such as 40%, a size such as 1.5GiB, or auto: all memory that "
             "the limit leaves; it gives memory back while other programs need it",
    )
    policy: str | None = option(
        None, text, "the name of a policy", metavar="NAME",
        help="eviction policy: {policies}", default_text="{policy}",
    )
    prefetch: Prefetch = option(
        Prefetch(), Prefetch.parse, "text or a Prefetch", metavar="WHAT",
        help="predictor of the experts to prefetch while decoding: none, auto, or NAME[:DISTANCE:PRECISION] of "
             "{predictors}",
    )
    reads: Reads = option(
        Reads(), Reads.parse, "text or a Reads", metavar="HOW",
        help="how experts are read: auto, or READER[:DEPTH:SIZE] such as io_uring:8:512KiB or threads:4:4MiB",
    )
    mirror: Mirrors | None = option(
        None, Mirrors.parse, f"1 to {MAX_MIRRORS} paths", metavar="PATH", repeated=True,
        help="read also from this copy of the model on another disk, or from the copy in this folder",
    )
    direct_io: bool = option(
        True, flag, "true or false", flag="--buffered",
        help="read through the page cache",
    )
    packed: bool = option(
        True, flag, "true or false", flag="--no-pack",
        help="read the model even if it has a pack",
    )
    pools: Pools | None = option(
        None, Pools.parse, "text or a Pools", metavar="F,C,S,E",
        help="shares of memory for the forms of a compressed pack: full, compressed, signs and mantissas, exponents",
        default_text="MODEL.plan.json, else planned",
    )
    recovery: str = option(
        KERNELS, recovery, "kernels, affinity or exponents-first", metavar="ORDER",
        help="order of recovery from a compressed pack: kernels (by matrix), affinity (by expert), exponents-first "
             "(the paper's)",
    )
    kernels: str = option(
        AUTO_KERNELS, kernels, "auto, plain, repacked or stock", metavar="WHICH",
        help="order of experts in memory: auto, plain, repacked, or stock (llama.cpp's)",
    )
    device: str = option(
        NONE, device_name, "the names of devices", group=DEVICE, metavar="NAME,...",
        help="compute dense layers, and experts in their memory, on these devices: none, auto (GPUs that are faster "
             "than the processor), names such as CUDA0, or rpc:HOST:PORT",
    )
    vram_budget: Budget = option(
        AUTO, vram_budget, "a size or a share", flag="--vram-budget", group=DEVICE, metavar="SIZE",
        help="memory of the devices for experts: a share such as 60%, a size such as 6GiB, or auto: the rest",
    )
    device_misses: str | None = option(
        None, device_misses, "processor or upload", flag="--device-misses", group=DEVICE, metavar="WHO",
        help="who computes experts that the devices lack: the processor, or the device after an upload",
        default_text="the faster one, as measured; processor for rpc:",
    )
    device_ahead: int = option(
        0, whole(MAX_AHEAD, least=0), f"a whole number from 0 (none) to {MAX_AHEAD}", flag="--device-ahead",
        group=DEVICE, metavar="N",
        help="upload up to N predicted experts of a layer ahead; needs a predictor in --prefetch",
        default_text="0",
    )
    n_ctx: int = option(
        0, whole(MAX_TOKENS), _FROM_1_TO + str(MAX_TOKENS), value_kind=_FROM_0_TO + str(MAX_TOKENS),
        group=CONTEXT, flag="--ctx", metavar="N",
        help="context of N tokens, rounded up to a multiple of 256",
        default_text="as trained, at most 4096",
    )
    n_ubatch: int = option(
        0, whole(MAX_TOKENS), _FROM_1_TO + str(MAX_TOKENS), value_kind=_FROM_0_TO + str(MAX_TOKENS),
        group=CONTEXT, flag="--ubatch", metavar="N",
        help="compute N tokens at once", default_text="2048 if experts are read from disk, else 512",
    )
    n_threads: int = option(
        0, whole(MAX_THREADS), _FROM_1_TO + str(MAX_THREADS), value_kind=_FROM_0_TO + str(MAX_THREADS),
        group=CONTEXT, flag="--threads", metavar="N",
        help="compute with N threads", default_text="the fast physical cores",
    )
    cpus: str = option(
        CPUS_AUTO, cpu_list, "any, auto or a list such as 0-5,8", group=CONTEXT, metavar="LIST",
        help="compute only on these processors, such as 0-5,8, or any", default_text="auto: the fast cores",
    )
    maps: Path | None = option(
        None, Path, "the path of a file", group=LONG, metavar="FILE",
        help="start with the expert maps of FILE, and store the maps of {searching} in it",
        default_text="MODEL.maps.gguf, not written",
    )
    warm: bool = option(
        True, flag, "true or false", group=LONG, flag="--cold",
        help="start with no expert in memory, and store nothing for the next start; by default the next start first "
             "reads the experts that were resident at the end",
    )
    tuned: Path | None = option(
        None, Path, "the path of a file", group=LONG, metavar="FILE",
        help="use the lossy setting and the budget that pyorch tune found",
    )
    substitution: Substitution | None = option(
        None, Substitution.parse, "text or a Substitution", group=LOSSY, flag="--lossy", metavar="SETTINGS",
        help="replace or omit absent experts: heaviest, ghosts, buddies, or KEY=VALUE,...; "
             "`pyorch run --lossy help` lists all keys",
    )
    buddies: Any = option(
        None, _lists, "the path of a file or Buddies", group=LOSSY, flag="--buddies-file", metavar="FILE",
        help="the lists of buddies",
        default_text="MODEL.buddies.gguf",
    )
    speculate: bool = option(
        False, flag, "true or false", group=LOSSY,
        help="compute with the experts that {executable} predicts (--prefetch) in place of the router's",
    )

    # Only programs set these. None: the choice of the caller of llama_cpp.
    managed: bool = False  # an engine manages the experts even if llama.cpp can keep the whole model on the device
    source: Any = None  # reads experts in place of the file, see pyorch.runtime.engine.Source
    use_extra_bufts: bool | None = None  # repack weights for faster kernels
    widen: bool = False  # pyorch chooses the ubatch if n_ubatch is 0
    n_outputs_max: int | None = None  # logits rows of a context
    flash_attn_type: int | None = None
    on_free: Callable[[Any], None] | None = None  # called when the model is freed, before its engine

    def __post_init__(self) -> None:
        parse_fields(self)
        if self.n_threads == 0 and self.cpus not in (CPUS_ANY, CPUS_AUTO):
            object.__setattr__(self, "n_threads", len(cpu_numbers(self.cpus)))
        if self.substitution is not None and not self.substitution.lossy:
            object.__setattr__(self, "substitution", None)
        if self.pools is not None and not self.packed:
            raise PyorchError("--pools divides memory among the forms of experts of a compressed pack, and with "
                              "--no-pack (packed=False in Python) none is read: leave out one of them")
        if self.recovery != KERNELS and not self.packed:
            raise PyorchError(f"--recovery {self.recovery} is an order for experts of a compressed pack, and with "
                              "--no-pack (packed=False in Python) none is read: leave out one of them")
        if self.device == NONE and (self.vram_budget != AUTO or self.device_misses is not None):
            raise PyorchError("--vram-budget and --device-misses are about experts on a device: name it with --device")
        names_experts = self.prefetch.predictor not in (PREFETCH_AUTO, PREFETCH_NONE)
        if self.device_ahead > 0 and (self.device == NONE or not names_experts):
            raise PyorchError("--device-ahead uploads what a predictor names, at any time: name a device with "
                              "--device, and a predictor that is not auto, such as --prefetch quasi-hidden")
        if self.tuned is not None and (self.speculate or self.substitution is not None):
            raise PyorchError("a tuned setting is lossy, and so are the other options: give one of them")

    @property
    def lossy(self) -> bool:
        """Whether answers may differ from those of the model."""
        return self.speculate or self.substitution is not None or self.tuned is not None

    def with_tuned(self, substitution: Substitution, budget: str) -> Settings:
        """Returns these settings with a tuned substitution, and with its budget unless the user set one."""
        lossy = substitution if substitution.lossy else None
        chosen = Budget.parse(budget) if self.budget == AUTO else self.budget
        return dataclasses.replace(self, tuned=None, substitution=lossy, budget=chosen)
