"""How absent experts are treated in an evaluation, and which experts count as absent.

A cache rate c keeps the share c of the experts resident, alike in all layers, in a cache that is simulated: the model
is in memory whole, and substitution takes the experts that were selected most often for resident, and no others: in the
trace of the buddy lists, or where there are none, in a text that every machine has. So what happens to a token depends
on the token alone (and, with max_weight, on what experts weigh in those before), questions are computed in large
batches, and results are reproducible. It is a hard judge: a real cache follows the text, and misses less. Under a
budget, as speed is measured, the cache is a real one. Ghosts take room from residents in both.
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

from pyorch.bench.plan import fits
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
    """When experts arrive in a cache whose time is simulated: so that what is evaluated does not depend on the machine.

    Whether an expert that is on its way counts as absent decides what a lossy setting computes. Here it is decided by a
    clock of its own: a layer of a token takes one unit of it, reads come one after another through a disk that takes as
    long as it is told, and a layer waits for what it demands. The residency table, its eviction and what is deferred
    are those of a run. Guesses are not simulated: a run finds somewhat more experts there.

    read_time: of an expert, in layers of a token. seed: 0: every read takes that; else from half to one and a half
    of it, as drawn. PyorchError for what cannot be.
    """

    read_time: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.read_time) and self.read_time >= 0):
            raise PyorchError(f"--read-time {self.read_time:g} is not a number of layers from 0 on")
        if not 0 <= self.seed < 1 << 64:
            raise PyorchError(f"--read-seed {self.seed} is not from 0 to 2^64 - 1")

    def simulate(self, model: Model, residents: Mapping[int, np.ndarray] | None = None) -> None:
        """From now on absent experts of a model are those of a cache with its budget. residents: il to bool[n_expert],
        with what it begins; None: it is empty."""
        if model.engine is None:
            return
        model.engine.simulate_cache(self.read_time, self.seed)
        for il, mask in (residents or {}).items():
            model.engine.fill_simulated_cache(il, mask.nonzero()[0])


OnProgress = Callable[[str, int, int], None]  # step, done, total

_N_CTX = 64  # of the context that load() makes and that nothing is computed in


@dataclass(frozen=True)
class Method:
    """A row of the papers' tables: "original" waits for absent experts, "random" and "buddies" replace them,
    "speculate" computes with the experts that a predictor, `forecast`, expects; with a substitution too, with those of
    its router's choice that were expected, and treats the others as the substitution says."""

    name: str
    substitution: Substitution | None
    forecast: str = ""

    @property
    def settings(self) -> str:
        return "+".join(part for part in (self.forecast, str(self.substitution or "")) if part)


@dataclass(frozen=True)
class Slots:
    """What became of the expert slots of n_tokens, in all layers. absent: whose expert was absent.

    A token that is left out of the last layer, because no logits are wanted after it, counts as a part of one.
    """

    n_tokens: int
    absent: int
    substituted: int
    dropped: int
    ghosts: int = 0  # estimated

    def __add__(self, more: Slots) -> Slots:
        return Slots(*(getattr(self, name) + getattr(more, name) for name in Slots.__dataclass_fields__))

    def __sub__(self, before: Slots) -> Slots:
        return Slots(*(getattr(self, name) - getattr(before, name) for name in Slots.__dataclass_fields__))

    def per_token(self, name: str) -> float:
        return getattr(self, name) / self.n_tokens if self.n_tokens else 0.0

    @property
    def read_per_token(self) -> float:
        """Experts that have to be read for a token."""
        return (self.absent - self.substituted - self.dropped - self.ghosts) / self.n_tokens if self.n_tokens else 0.0


def slots(model: Model) -> Slots:
    """Since the model's statistics were reset. Without a substitution only the tokens are known."""
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
    """Of "quasi-hidden", or with a substitution for what was not expected, "quasi-hidden+mode=none,miss=ghost".
    PyorchError for what cannot be executed."""
    forecast, _, settings = text.partition("+")
    Prefetch.parse(forecast).check_executable()
    return Method("speculate", Substitution.parse(settings) if settings else None, forecast)


def lossy_method(substitution: Substitution) -> Method:
    return Method(substitution.mode if substitution.mode != "none" else substitution.miss, substitution)


def n_ubatch(substitution: Substitution | None, speculates: bool = False) -> int:
    """Tokens that may be computed at once, with a simulated cache.

    1 where settings look at all tokens of a micro-batch (eq. 2; what was forecast for one is there for the others), of
    which decoding has one, and where they count what all layers do to a token: the last has other rows.
    """
    by_batch = substitution is not None and (
        substitution.beta is not None or substitution.rho_token is not None or speculates)
    return 1 if by_batch else N_BATCH


@contextlib.contextmanager
def static_model(path: str | os.PathLike[str], **options: object) -> Iterator[Model]:
    """A model of whose experts simulated() can take any away. All are in memory where they fit; else as many as do,
    which takes longer and changes no result."""
    with ModelMap(path) as model_map:
        info = model_map.info
        if not model_map.layers:
            raise PyorchError(f"{path} is a dense model: it has no experts that could be absent")
        model_map.check_text()
    with load(path, budget="100%" if fits(info) else AUTO, managed=True, **{"n_ctx": _N_CTX, **options}) as model:
        yield model


def kernels(path: str | os.PathLike[str], n_models: int, wanted: str = AUTO_KERNELS) -> dict[str, bool]:
    """Options of load() with which a managed model and the resident one compute with the same kernels.

    llama.cpp repacks what it has faster kernels for into memory of its own: where n_models whole models do not fit
    beside each other, both compute with the plain kernels, for which weights may stay in the file. wanted: as --kernels
    names them. PyorchError for a model that makes no text, or that does not fit for what is wanted.
    """
    with logs.collect(), ModelMap(path) as model_map:  # why a file is refused is said in the sentence
        model_map.check_text()
        if fits(model_map.info, n_models):
            return {}
        if wanted in (REPACKED, STOCK):
            raise PyorchError(f"{path} does not fit in memory, so it is compared with plain kernels: leave out "
                              f"--kernels {wanted}")
        return {"use_extra_bufts": False}


@contextlib.contextmanager
def resident_model(path: str | os.PathLike[str], **options: object) -> Iterator[Model]:
    """The model as llama.cpp loads it, nothing managed: what a lossless one must equal. options: with kernels()."""
    mapped = not options.get("use_extra_bufts", True)
    with load(path, budget=RESIDENT, **{"n_ctx": _N_CTX, "use_mmap": mapped, **options}) as model:
        yield model


@contextlib.contextmanager
def simulated(
    model: Model, method: Method, rate: float | None, buddies: Buddies | None, on_progress: OnProgress | None = None
) -> Iterator[Model]:
    """A simulated cache. Without a method that replaces experts nothing is simulated: it waits for all of them, or
    computes with what is forecast, absent or not. on_progress: where it is counted first what is resident."""
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
    """Of the experts' memory, what ghosts take where a setting has them: residents give way to them, as in a budget."""
    ghosts = find_ghosts(substitution, find(model.llama.model).plan.sidecars)
    return ghosts.n_bytes / model.map.info.slots_bytes if ghosts is not None else 0.0


def again(model: Model, method: Method, buddies: Buddies | None) -> None:
    """Sets the substitution of a method: what experts weigh on average (max_weight) is of what comes from now on."""
    if method.substitution is not None:
        model.substitute(_everywhere(method.substitution), buddies)


def most_active(activations: Mapping[int, np.ndarray], rate: float) -> dict[int, np.ndarray]:
    """bool[n_expert] of each layer: the experts that were selected most often, the share `rate` of all.

    Of experts that are equal in this, those with the lower number. What is no whole number of a layer's experts counts
    in the next one.
    """
    masks, wanted, taken = {}, 0.0, 0
    for il, counts in activations.items():
        wanted += rate * len(counts)
        mask = np.zeros(len(counts), bool)
        mask[np.argsort(-counts, kind="stable")[:round(wanted) - taken]] = True
        taken += int(mask.sum())
        masks[il] = mask
    return masks


_COUNTED_TOKENS, _COUNTED_AT_ONCE = 4096, 64  # the logits of so many are in memory
_counts: WeakKeyDictionary[Model, dict[int, np.ndarray]] = WeakKeyDictionary()


def _counted(model: Model, report: OnProgress) -> dict[int, np.ndarray]:
    """int64[n_expert] of each layer: how often a text that every machine has selects each expert, counted once."""
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
    """In prompts too: their tokens are treated as if each had been decoded."""
    return None if substitution is None else dataclasses.replace(substitution, prefill=True)


@contextlib.contextmanager
def dynamic_model(
    path: str | os.PathLike[str], method: Method, budget: str, buddies: Buddies | None, arrival: Arrival | None = None,
    **options: object,
) -> Iterator[Model]:
    """The model under a real budget, freshly loaded: a share such as "50%", or a size.

    With buddy lists, the cache begins with the experts that the trace selected most often: what stands in for
    absent experts would otherwise keep an empty cache from filling. arrival: of experts, simulated; None: as they come.
    Ghosts count in the budget, as they do for a user.
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
    """The lists of a model, from a file or from beside it; None where there are none and none are needed."""
    with ModelMap(path) as model_map:
        if buddies_file is None and "buddies" not in model_map.sidecars():
            if needed and model_map.layers:
                raise PyorchError(f"there are no buddy lists beside {path}: make them with `pyorch buddies`, or name "
                                  "them with --buddies-file")
            return None
        return find_buddies(Substitution(), buddies_file, Sidecars(model_map))


def share(rate: float) -> str:
    """A cache rate as a budget."""
    return f"{rate * 100:g}%"
