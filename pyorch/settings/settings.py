"""The settings of a model: how its experts are kept, and what is computed in place of absent ones."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyorch.errors import PyorchError
from pyorch.settings.budget import AUTO, Budget
from pyorch.settings.device import MAX_AHEAD, NONE, DeviceMisses, device_name, vram_budget
from pyorch.settings.option import CONTEXT, LONG, LOSSY, flag, option, parse_fields, text, whole
from pyorch.settings.pools import Pools
from pyorch.settings.prefetch import AUTO as PREFETCH_AUTO
from pyorch.settings.prefetch import NONE as PREFETCH_NONE
from pyorch.settings.prefetch import Prefetch
from pyorch.settings.reads import Reads
from pyorch.settings.substitution import Substitution


MAX_THREADS = 512  # GGML_MAX_N_THREADS
MAX_TOKENS = (1 << 31) - 1

_FROM_0_TO = "from 0 (for the default) to "


def _lists(given: Any) -> Any:
    """Buddy lists that were read already, or their file."""
    if isinstance(given, (bool, int, float, bytes, list, dict)):
        raise TypeError(given)
    return Path(given) if isinstance(given, (str, os.PathLike)) else given


@dataclass(frozen=True)
class Settings:
    """Every option is read here, once, from what a user gives: text ("40%") or a value (Budget).

    Raises PyorchError for an option that cannot mean anything, and for options that exclude each other. Names of
    policies and predictors are known to the library, which is asked when an engine is made.
    """

    budget: Budget = option(
        AUTO, Budget.parse, "a size or a share", metavar="SIZE",
        help="memory for the experts: a share of them such as 40%, a size such as 1.5GiB or 800MB, or auto, which "
             "takes what the memory limit leaves",
    )
    policy: str | None = option(
        None, text, "the name of a policy", metavar="NAME",
        help="which experts leave memory first (eviction policy). {policies}", default_text="{policy}",
    )
    prefetch: Prefetch = option(
        Prefetch(), Prefetch.parse, "text or a Prefetch", metavar="WHAT",
        help="the predictor that says which experts to read ahead while decoding: {predictors}, each also as "
             "NAME:DISTANCE:PRECISION (how many layers ahead, and how often similar predictions must have been "
             "right); or auto, which takes one of them, while it saves more time than it takes",
    )
    reads: Reads = option(
        Reads(), Reads.parse, "text or a Reads", metavar="HOW",
        help="what reads experts: io_uring, or threads that wait for the disk each; also as READER:DEPTH:SIZE, so many "
             "requests at once, of so many bytes; or auto, which takes io_uring where the system allows it, and what "
             "the disk was measured to need (see pyorch inspect --disk)",
    )
    direct_io: bool = option(
        True, flag, "true or false", flag="--buffered",
        help="read experts through the page cache of the system, not around it",
    )
    packed: bool = option(
        True, flag, "true or false", flag="--no-pack",
        help="read experts from the model itself, even where a pack of them lies beside it",
    )
    pools: Pools | None = option(
        None, Pools.parse, "text or a Pools", metavar="F,C,S,E",
        help="where experts come from a compressed pack: the shares of their memory for full experts, compressed ones, "
             "signs and mantissas only, and exponents only, such as 0.6,0.4,0,0",
        default_text="what MODEL.plan.json says, else planned when the model is loaded, from the use counts in "
                     "MODEL.maps.gguf",
    )
    device: str = option(
        NONE, device_name, "the name of a device", metavar="NAME",
        help="compute dense layers on this device, and experts that lie in its memory: none, auto for the first one, a "
             "name such as CUDA0, or rpc:HOST:PORT for one that another process serves",
    )
    vram_budget: Budget = option(
        AUTO, vram_budget, "a size or a share", flag="--vram-budget", metavar="SIZE",
        help="memory of the device for experts: a share of them such as 60%, a size such as 6GiB, or auto, which takes "
             "what dense layers and context leave",
    )
    device_misses: DeviceMisses = option(
        DeviceMisses(), DeviceMisses.parse, "processor, upload, auto or auto with five rates", flag="--device-misses",
        metavar="WHO",
        help="what computes experts that the device lacks: processor, from host memory, while they are uploaded if "
             "they are worth it; upload, so that the device computes them as soon as they are there; or auto, "
             "whichever is estimated to be faster. The estimate goes by rates that are measured once and kept; "
             "auto:UPLOAD:FIRST:MORE:FIRST:MORE says them, in bytes of weights a second: of uploads, of the processor "
             "for the first row of an expert and for each further one, and the same of the device",
        default_text="processor",
    )
    device_ahead: int = option(
        0, whole(MAX_AHEAD), f"from 0 (none) to {MAX_AHEAD}", flag="--device-ahead", metavar="N",
        help="upload up to N experts of a layer to the device before the layer comes, which the predictor of "
             "--prefetch names; a predictor other than auto",
        default_text="0",
    )
    n_ctx: int = option(
        0, whole(MAX_TOKENS), _FROM_0_TO + str(MAX_TOKENS), group=CONTEXT, flag="--ctx", metavar="N",
        help="make room for N tokens of context",
        default_text="as many as the model was trained with, at most 4096",
    )
    n_ubatch: int = option(
        0, whole(MAX_TOKENS), _FROM_0_TO + str(MAX_TOKENS), group=CONTEXT, flag="--ubatch", metavar="N",
        help="compute N tokens at once", default_text="2048 where experts are read, else 512",
    )
    n_threads: int = option(
        0, whole(MAX_THREADS), _FROM_0_TO + str(MAX_THREADS), group=CONTEXT, flag="--threads", metavar="N",
        help="compute with N threads", default_text="the physical cores",
    )
    maps: Path | None = option(
        None, Path, "the path of a file", group=LONG, metavar="FILE",
        help="for the predictors that search past tokens and requests, {searching}: begin with those in FILE, if FILE "
             "exists, and write into it at the end what was learned",
        default_text="begin with MODEL.maps.gguf, write nothing",
    )
    learned: Path | None = option(
        None, Path, "the path of a file", group=LONG, metavar="FILE",
        help="for the policy learned: begin with what FILE says, if FILE exists, and write into it at the end what was "
             "learned",
        default_text="begin with MODEL.eviction.gguf, write nothing",
    )
    tuned: Path | None = option(
        None, Path, "the path of a file", group=LONG, metavar="FILE",
        help="take the lossy setting that pyorch tune found, and its budget if no other is given",
    )
    substitution: Substitution | None = option(
        None, Substitution.parse, "text or a Substitution", group=LOSSY, flag="--lossy", metavar="SETTINGS",
        help="do not wait for all absent experts: heaviest waits for a token's two heaviest in a layer and leaves out "
             "the others, ghosts has small estimates of those (pyorch ghosts), buddies has similar resident experts "
             "replace what is absent, as far as settings such as max_replaced=3,min_entropy=p15 allow",
    )
    buddies: Any = option(
        None, _lists, "the path of a file or Buddies", group=LOSSY, flag="--buddies-file", metavar="FILE",
        help="file with the lists of buddies",
        default_text="MODEL.buddies.gguf beside the model",
    )
    speculate: bool = option(
        False, flag, "true or false", group=LOSSY,
        help="compute with the experts that the predictor of --prefetch names, and read no others; with --lossy, of "
             "the experts that the router chooses, those that the predictor did not name are treated as absent ones "
             "are, for example by ghosts; the predictor must be {executable} (auto: hybrid if there is an estimator)",
    )

    # What only programs set. None: what the caller of llama_cpp chose.
    source: Any = None  # of experts in place of the file, see pyorch.runtime.engine.Source
    use_extra_bufts: bool | None = None  # repack weights for faster kernels
    widen: bool = False  # the ubatch is chosen where n_ubatch does not say it
    n_outputs_max: int | None = None  # logits rows of a context
    flash_attn_type: int | None = None
    on_free: Callable[[Any], None] | None = None  # called when the model is freed, its engine not yet

    def __post_init__(self) -> None:
        parse_fields(self)
        if self.substitution is not None and not self.substitution.lossy:
            object.__setattr__(self, "substitution", None)
        if self.pools is not None and not self.packed:
            raise PyorchError("--pools divides memory among the forms of experts of a compressed pack, and with "
                              "--no-pack (packed=False in Python) none is read: leave out one of them")
        if self.device == NONE and (self.vram_budget != AUTO or self.device_misses != DeviceMisses()):
            raise PyorchError("--vram-budget and --device-misses are about experts on a device: name it with --device")
        names_experts = self.prefetch.predictor not in (PREFETCH_AUTO, PREFETCH_NONE)
        if self.device_ahead > 0 and (self.device == NONE or not names_experts):
            raise PyorchError("--device-ahead uploads what a predictor names, at any time: name a device with "
                              "--device, and a predictor that is not auto, such as --prefetch next-router")
        if self.tuned is not None and (self.speculate or self.substitution is not None):
            raise PyorchError("a tuned setting is lossy, and so are the other options: give one of them")

    @property
    def lossy(self) -> bool:
        """Whether answers may differ from those of the model."""
        return self.speculate or self.substitution is not None or self.tuned is not None

    def with_tuned(self, substitution: Substitution, budget: str) -> Settings:
        """What a tuned setting makes of these: its substitution, and its budget unless one was given."""
        lossy = substitution if substitution.lossy else None
        chosen = Budget.parse(budget) if self.budget == AUTO else self.budget
        return dataclasses.replace(self, tuned=None, substitution=lossy, budget=chosen)
