"""Methods to treat absent experts in an evaluation, and the caches that decide which experts are absent.

- **A cache rate** c is static and simulated: the whole model is in memory, and in each layer substitution treats the
  share c of the experts as resident. These are the experts selected most often in the buddy lists' trace, or without
  lists, in a text that every machine has. So the result for a token depends on the token alone (and, with max_weight,
  on the weights of experts in tokens before it), questions are computed in large batches, and results are
  reproducible. It is a hard judge: a real cache follows the text, and misses less.
- **A budget**, for speed, has a real cache.

In both, ghosts take memory from resident experts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import llama_cpp.llama_cpp as llama
import numpy as np

from pyorch.bench.bench_plan import fits
from pyorch.errors import PyorchError
from pyorch.eval.likelihood import N_BATCH, tokenize
from pyorch.files import staging
from pyorch.llama import logs
from pyorch.llama.apply import find_buddies, find_ghosts
from pyorch.llama.context import Context
from pyorch.llama.managed import find
from pyorch.llama.model import Model, load
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.budget import AUTO, RESIDENT
from pyorch.settings.kernels import AUTO as AUTO_KERNELS
from pyorch.settings.kernels import REPACKED, STOCK
from pyorch.settings.prefetch import Prefetch
from pyorch.settings.substitution import Substitution
from pyorch.sidecars.beside import Sidecars
from pyorch.sidecars.buddies import Buddies
from pyorch.traces.data import read_documents
from pyorch.traces.default_text import write_default_text


@dataclass(frozen=True)
class Arrival:
    """Arrivals of experts in a cache with simulated time, so that an evaluation does not depend on the machine.

    A lossy setting computes differently if an expert arrives late. Here a clock of its own decides this: a layer of a
    token takes one unit, reads follow one after another from a disk of the given speed, and a layer waits for the
    experts that it demands. The residency table, its eviction and its deferred reads are those of a real run.
    Prefetches are not simulated, so a real run has somewhat more experts resident.

    Attributes:
        read_time: Of an expert, in layers of a token.
        seed: 0: every read takes read_time. Otherwise from half to one and a half of it, at random.

    Raises:
        PyorchError: A value is out of range.
    """

    read_time: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.read_time) and self.read_time >= 0):
            raise PyorchError(f"--read-time {self.read_time:g} is not a number of layers from 0 on")
        if not 0 <= self.seed < 1 << 64:
            raise PyorchError(f"--read-seed {self.seed} is not from 0 to 2^64 - 1")

    def simulate(self, model: Model, residents: Mapping[int, np.ndarray] | None = None) -> None:
        """Simulates a cache with the model's budget from now on.

        residents: il to bool[n_expert], its first content. None: it is empty.
        """
        if model.engine is None:
            return
        model.engine.simulate_cache(self.read_time, self.seed)
        for il, mask in (residents or {}).items():
            model.engine.fill_simulated_cache(il, mask.nonzero()[0])


OnProgress = Callable[[str, int, int], None]  # step, done, total

_N_CTX = 64  # of load()'s own context, which computes nothing


@dataclass(frozen=True)
class Method:
    """A row of the papers' tables.

    - "original" waits for absent experts.
    - "random" and "buddies" replace them.
    - "speculate" computes with the experts that the predictor `forecast` names. With a substitution, it computes the
      forecast experts of the router's choice, and substitutes the others.
    """

    name: str
    substitution: Substitution | None
    forecast: str = ""

    @property
    def settings(self) -> str:
        return "+".join(part for part in (self.forecast, str(self.substitution or "")) if part)


@dataclass(frozen=True)
class Slots:
    """The outcome of the expert slots of n_tokens, in all layers.

    Attributes:
        n_tokens: A token that the last layer does not compute, because its logits are not needed, counts as a fraction.
        absent: Their expert was absent.
        substituted: Computed with another expert.
        dropped: Not computed.
        ghosts: Estimated by ghosts.
    """

    n_tokens: int
    absent: int
    substituted: int
    dropped: int
    ghosts: int = 0

    def __add__(self, more: Slots) -> Slots:
        return Slots(*(getattr(self, name) + getattr(more, name) for name in Slots.__dataclass_fields__))

    def __sub__(self, before: Slots) -> Slots:
        return Slots(*(getattr(self, name) - getattr(before, name) for name in Slots.__dataclass_fields__))

    def per_token(self, name: str) -> float:
        return getattr(self, name) / self.n_tokens if self.n_tokens else 0.0

    @property
    def read_per_token(self) -> float:
        """Experts that a token has to read."""
        return (self.absent - self.substituted - self.dropped - self.ghosts) / self.n_tokens if self.n_tokens else 0.0


def slots(model: Model) -> Slots:
    """Returns the outcome since the statistics were reset. Without a substitution, only the tokens are known."""
    stats = model.stats()
    n_tokens = stats.experts.tokens // len(model.layers) if stats.experts is not None and model.layers else 0
    counts = stats.substitution
    if counts is None:
        wrong = stats.speculation.slots - stats.speculation.right if stats.speculation is not None else 0
        return Slots(n_tokens, wrong, wrong, 0)
    refused = sum(getattr(counts, f"refused_{why}") for why in (
        "tae", "margin", "distribution", "rho", "buddies", "sacred"))
    return Slots(n_tokens, counts.substituted + refused, counts.substituted, counts.dropped, counts.ghosts)


ORIGINAL = Method("original", None)


def speculation(text: str) -> Method:
    """Parses "quasi-hidden", or with a substitution for other experts, "quasi-hidden+mode=none,miss=ghost".

    Raises:
        PyorchError: The text is invalid, or layers cannot compute with the predictor's forecasts.
    """
    forecast, _, settings = text.partition("+")
    Prefetch.parse(forecast).check_executable()
    return Method("speculate", Substitution.parse(settings) if settings else None, forecast)


def lossy_method(substitution: Substitution) -> Method:
    return Method(substitution.mode if substitution.mode != "none" else substitution.miss, substitution)


def n_ubatch(substitution: Substitution | None, speculates: bool = False) -> int:
    """Returns the tokens that may be computed at once with a simulated cache.

    1 for settings that look at all tokens of a micro-batch (eq. 2; an expert forecast for one token is resident for the
    others), because decoding has one, and for settings that count the changes of a token in all layers, because the
    last layer has other rows.
    """
    by_batch = substitution is not None and (
        substitution.beta is not None or substitution.rho_token is not None or speculates)
    return 1 if by_batch else N_BATCH


@contextlib.contextmanager
def static_model(path: str | os.PathLike[str], **options: object) -> Iterator[Model]:
    """Loads a model for simulated(), with all experts in memory if they fit.

    Otherwise with as many as fit, which takes longer and changes no result.
    """
    with ModelMap(path) as model_map:
        info = model_map.info
        if not model_map.layers:
            raise PyorchError(f"{path} is a dense model: it has no experts that could be absent")
        model_map.check_text()
    with load(path, budget="100%" if fits(info) else AUTO, managed=True, **{"n_ctx": _N_CTX, **options}) as model:
        yield model


def kernels(path: str | os.PathLike[str], n_models: int, wanted: str = AUTO_KERNELS) -> dict[str, bool]:
    """Returns the options of load() with which a managed model and the resident one compute with the same kernels.

    llama.cpp repacks weights with faster kernels into its own memory. If n_models whole models do not fit into memory
    together, both compute with the plain kernels, for which weights may stay in the file.

    Args:
        path: The model.
        n_models: Whole models in memory at once.
        wanted: As for --kernels.

    Raises:
        PyorchError: The model makes no text, or does not fit for `wanted`.
    """
    with logs.collect(), ModelMap(path) as model_map:  # the error's message says why a file is refused
        model_map.check_text()
        if fits(model_map.info, n_models):
            return {}
        if wanted in (REPACKED, STOCK):
            raise PyorchError(f"{path} does not fit in memory, so it is compared with plain kernels: leave out "
                              f"--kernels {wanted}")
        return {"use_extra_bufts": False}


@contextlib.contextmanager
def resident_model(path: str | os.PathLike[str], **options: object) -> Iterator[Model]:
    """Loads the model as llama.cpp does, unmanaged: the reference of a lossless one. options: including kernels()."""
    mapped = not options.get("use_extra_bufts", True)
    with load(path, budget=RESIDENT, **{"n_ctx": _N_CTX, "use_mmap": mapped, **options}) as model:
        yield model


@contextlib.contextmanager
def simulated(
    model: Model, method: Method, rate: float | None, buddies: Buddies | None, on_progress: OnProgress | None = None
) -> Iterator[Model]:
    """Simulates a cache in the `with` block.

    Without a substitution nothing is simulated: the method waits for all experts, or computes with forecast ones.
    on_progress: Called while the resident experts are determined.
    """
    model.reset_stats()
    if method.substitution is not None:
        counts = buddies.activations if buddies is not None else _counted(model, on_progress or (lambda *_: None))
        ghosts = _ghosts_share(model, method.substitution)
        if ghosts > rate:
            raise PyorchError(f"a cache rate of {rate:g} has no room for the ghosts, which take {ghosts:.1%} of the "
                              "experts' memory")
        model.set_cache(most_active(counts, rate - ghosts))
    again(model, method, buddies)
    if method.forecast:
        model.speculate(method.forecast, prompts=True)
    try:
        yield model
    finally:
        if method.forecast:
            model.speculate(None)
        if method.substitution is not None:
            model.substitute(None)
            model.set_cache(None)


def _ghosts_share(model: Model, substitution: Substitution) -> float:
    """Returns the share of the experts' memory that a setting's ghosts take. Residents lose it, as in a budget."""
    ghosts = find_ghosts(substitution, find(model.llama.model).plan.sidecars)
    return ghosts.n_bytes / model.map.info.slots_bytes if ghosts is not None else 0.0


def again(model: Model, method: Method, buddies: Buddies | None) -> None:
    """Sets the substitution of a method anew, which restarts the mean weights of experts (max_weight)."""
    if method.substitution is not None:
        model.substitute(_everywhere(method.substitution), buddies)


def most_active(activations: Mapping[int, np.ndarray], rate: float) -> dict[int, np.ndarray]:
    """Returns for each layer bool[n_expert]: the experts that were selected most often, the share `rate` of all.

    Among equal experts, those with lower numbers. The fraction of a layer's last expert counts in the next layer.
    """
    masks, wanted, taken = {}, 0.0, 0
    for il, counts in activations.items():
        wanted += rate * len(counts)
        mask = np.zeros(len(counts), bool)
        mask[np.argsort(-counts, kind="stable")[:round(wanted) - taken]] = True
        taken += int(mask.sum())
        masks[il] = mask
    return masks


_COUNTED_TOKENS, _COUNTED_AT_ONCE = 4096, 64  # logits of the second number are in memory
_counts: WeakKeyDictionary[Model, dict[int, np.ndarray]] = WeakKeyDictionary()


def _counted(model: Model, report: OnProgress) -> dict[int, np.ndarray]:
    """Counts once how often a text that every machine has selects each expert: int64[n_expert] of each layer."""
    if model not in _counts:
        before = _activations(model)
        handle, left = model.llama.model, _COUNTED_TOKENS
        n_ctx = min(N_BATCH, llama.llama_model_n_ctx_train(handle))
        with (staging(Path(tempfile.gettempdir(), "pyorch-text")) as directory,
              Context(handle, n_ctx, _COUNTED_AT_ONCE, _COUNTED_AT_ONCE, n_threads=model.llama.n_threads) as context):
            text = directory / "text.jsonl"
            write_default_text(text)
            for document in read_documents([str(text)]):
                tokens = tokenize(model.llama, document.text)[:min(left, n_ctx)]
                context.clear()
                for start in range(0, len(tokens), _COUNTED_AT_ONCE):
                    report("what a text selects", _COUNTED_TOKENS - left + start, _COUNTED_TOKENS)
                    context.decode(tokens[start : start + _COUNTED_AT_ONCE])
                left -= len(tokens)
                if left <= 0:
                    break
        _counts[model] = {il: counts - before[il] for il, counts in _activations(model).items()}
        model.reset_stats()
    return _counts[model]


def _activations(model: Model) -> dict[int, np.ndarray]:
    return {layer.il: model.engine.activations(layer.il).astype(np.int64) for layer in model.map.layers}


def _everywhere(substitution: Substitution | None) -> Substitution | None:
    """Returns the substitution for prompts too: their tokens are treated as decoded tokens."""
    return None if substitution is None else dataclasses.replace(substitution, prefill=True)


@contextlib.contextmanager
def dynamic_model(
    path: str | os.PathLike[str], method: Method, budget: str, buddies: Buddies | None, arrival: Arrival | None = None,
    **options: object,
) -> Iterator[Model]:
    """Loads the model under a real budget: a share such as "50%", or a size.

    With buddy lists, the cache begins with the experts that the trace selected most often: substitution would otherwise
    keep an empty cache from filling. Ghosts count in the budget, as for a user.

    arrival: Simulated arrivals of experts. None: real ones.
    """
    lossy = _everywhere(method.substitution)
    needed = {"substitution": lossy, "buddies": buddies} if lossy is not None and lossy.needs_ghosts else {}
    with load(path, budget=budget, managed=True, **{"n_ctx": _N_CTX, **needed, **options}) as model:
        model.map.check_text()
        begin: dict[int, np.ndarray] = {}
        if buddies is not None and model.engine is not None:
            stats = model.engine.stats()
            rate = min(1.0, stats.budget_bytes / max(1, model.map.info.slots_bytes))
            begin = most_active(buddies.activations, rate)
            for il, mask in begin.items():
                model.layers[il].prefetch(mask.nonzero()[0])
            model.engine.wait_idle()
        if arrival is not None and method.substitution is not None:
            arrival.simulate(model, begin)
        model.substitute(lossy, buddies)
        if method.forecast:
            model.speculate(method.forecast, prompts=True)
        model.reset_stats()
        yield model


def read_buddies(path: str | os.PathLike[str], buddies_file: str | None, needed: bool) -> Buddies | None:
    """Reads the lists of a model, from a file or next to the model; None if they are missing and not needed."""
    with ModelMap(path) as model_map:
        if buddies_file is None and "buddies" not in model_map.sidecars():
            if needed and model_map.layers:
                raise PyorchError(f"there are no buddy lists next to {path}: make them with `pyorch buddies`, or name "
                                  "them with --buddies-file")
            return None
        return find_buddies(Substitution(), buddies_file, Sidecars(model_map))


def share(rate: float) -> str:
    """Returns a cache rate as a budget."""
    return f"{rate * 100:g}%"
