"""Any model that llama_cpp loads in this process can leave its experts to an engine.

The functions of `llama_cpp.llama_cpp` that load and free models and contexts are replaced, once, by ones
that do the same and look after the engine. Without settings in force they only pass through.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import llama_cpp
import llama_cpp._internals as internals
import llama_cpp.llama_cpp as llama

from pyorch.errors import ExpertReadError, FormatError, PyorchError
from pyorch.library.bindings import decode_error
from pyorch.library.choices import LEARNED, default_policy
from pyorch.llama import logs, measure, memory
from pyorch.llama.closed import closing
from pyorch.llama.apply import apply_prefetch, apply_substitution, find_buddies, speculative
from pyorch.runtime import fatal
from pyorch.runtime.disk import reads_for
from pyorch.runtime.engine import Engine
from pyorch.runtime.handle import FORKED
from pyorch.runtime.interrupts import raise_held
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.budget import AUTO, RESIDENT, Budget
from pyorch.settings.prefetch import Prefetch
from pyorch.settings.settings import Settings
from pyorch.sidecars import eviction, packs
from pyorch.sidecars.beside import Sidecars
from pyorch.sidecars.buddies import Buddies
from pyorch.sidecars.history import ExpertMaps
from pyorch.sidecars.tuned_setting import read_tuned

LEAST_UBATCH, NARROW_UBATCH, WIDE_UBATCH = 32, 512, 2048


@dataclass
class ManagedModel:
    """A loaded model: its map, and its engine unless it is dense or llama.cpp keeps its experts."""

    path: str
    map: ModelMap
    settings: Settings
    params: llama.llama_model_params
    engine: Engine | None = None
    buddies: Buddies | None = None
    speculating: bool = False  # layers execute what is forecast for them
    contexts: dict[int, int] = field(default_factory=dict)  # llama_context *: bytes, under the automatic budget
    pid: int = field(default_factory=os.getpid)

    @property
    def forked(self) -> bool:
        """Another process loaded the model, whose threads this one lacks: whatever waits for them waits for ever."""
        return self.pid != os.getpid()

    @functools.cached_property
    def sidecars(self) -> Sidecars:
        return Sidecars(self.map)

    @property
    def prefetch(self) -> Prefetch:
        """What the model was loaded with."""
        settings = self.settings
        return speculative(settings.prefetch, self.sidecars) if settings.speculate else settings.prefetch

    def save(self) -> None:
        """Writes what was learned where the settings say. PyorchError if it cannot be written."""
        if self.engine is None:
            return
        if self.settings.maps is not None and self.engine.history:
            self.engine.history.write(self.settings.maps, self.map)
        if self.settings.learned is not None:
            eviction.write(self.settings.learned, self.engine, self.map)

    @property
    def automatic(self) -> bool:
        return self.engine is not None and self.settings.budget == AUTO


_models: dict[int, ManagedModel] = {}  # by llama_model *
# Of _models and of the contexts in it. Reentrant, and loops run over copies: the garbage collector may free
# a model at any moment.
_lock = threading.RLock()
_process_settings: list[Settings] = []
_refused_packs: set[str] = set()  # of which people were told
_thread = threading.local()


class manage:
    """Every model that llama_cpp loads in this process from now on is managed, until close().

        pyorch.manage(budget="40%")
        llm = llama_cpp.Llama("olmoe.gguf")

    Also a context manager. Takes the options of pyorch.load(), but for n_ctx, which is the caller's of llama_cpp.

    Raises PyorchError for an option that cannot mean anything.
    """

    def __init__(self, budget: Budget | int | str = AUTO, **options: object) -> None:
        self.settings = Settings(budget=budget, **options)
        if self.settings.n_ctx:
            raise PyorchError(
                "n_ctx is an argument of llama_cpp.Llama, which makes its own buffers by it: give it there"
            )
        _process_settings.append(self.settings)

    def close(self) -> None:
        """Models that are loaded from now on are not managed; those that are loaded stay so."""
        if self.settings in _process_settings:
            _process_settings.remove(self.settings)

    def __enter__(self) -> manage:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def managing(settings: Settings, model_map: ModelMap | None = None) -> Iterator[None]:
    """As manage, for what the calling thread loads inside. model_map: of the model at its path, if it is open."""
    before = getattr(_thread, "managing", None)
    _thread.managing = settings, model_map
    try:
        yield
    finally:
        _thread.managing = before


def find(model: int) -> ManagedModel | None:
    """What is known of a llama_model *; None if it was loaded without settings in force."""
    return _models.get(model)


def is_forked(model: int) -> bool:
    """Whether another process loaded this managed llama_model *."""
    managed = _models.get(model)
    return managed is not None and managed.forked


def _settings() -> Settings | None:
    settings, _ = getattr(_thread, "managing", None) or (None, None)
    return settings or (_process_settings[-1] if _process_settings else None)


def _map(path: str) -> ModelMap:
    _, model_map = getattr(_thread, "managing", None) or (None, None)
    return model_map if model_map is not None and model_map.path == path else ModelMap(path)


def _load(path: str, params: llama.llama_model_params, call: Callable[[], int | None]) -> int | None:
    """Runs call, which loads the model at path, under the settings in force."""
    settings = _settings()
    if settings is None or params.vocab_only or params.no_alloc:
        return call()
    if settings.use_extra_bufts is not None:
        params.use_extra_bufts = settings.use_extra_bufts
    managed = ManagedModel(path, _map(path), settings, params)
    logs.forget_errors()
    with capture(managed), fatal.refused():
        model = call()
    try:
        raise_held()
    except KeyboardInterrupt:
        if model:
            original("llama_model_free")(model)
        if managed.engine is not None:
            managed.engine.close()
        raise
    if not model:
        if managed.engine is not None:
            managed.engine.close()
        raise FormatError(f"{path}: llama.cpp cannot load it: {logs.last_error()}")
    with _lock:
        _models[model] = managed
    return model


@contextlib.contextmanager
def capture(managed: ManagedModel) -> Iterator[None]:
    """While the model is loaded: makes its engine, or leaves its experts to llama.cpp."""
    plain = not managed.params.use_extra_bufts
    use_pack(managed.map, managed.settings, plain)
    info = managed.map.info
    if managed.settings.tuned is not None:
        tuned = read_tuned(managed.settings.tuned, managed.map)
        managed.settings = managed.settings.with_tuned(tuned.substitution, tuned.budget)
    settings = managed.settings
    budget = settings.budget
    if budget == AUTO:
        # Each context will take its share; then the budget is set to the rest.
        memory.plan(info, memory.memory_limit(), info.dense_bytes, context_bytes=0)
        budget = info.floor_bytes
    elif budget == RESIDENT and info.slim:
        budget = info.slots_bytes
        fatal.notice(f"note: {managed.path} is slim, llama.cpp by itself cannot load it: the reference is the model with "
                     "all experts in memory, from the pack")
    elif budget != RESIDENT:
        budget = budget.resolve(info)
    if not managed.map.layers or budget == RESIDENT:
        yield
    else:
        managed.buddies = find_buddies(settings.substitution, settings.buddies, managed.sidecars)
        reads = settings.reads
        if settings.source is None:
            reads = reads_for(managed.map, reads, settings.direct_io)
        managed.engine = Engine(
            managed.map, budget, settings.policy, reads, settings.direct_io, settings.source, plain=plain,
            pools=settings.pools,
        )
        try:
            if settings.maps is not None and os.path.exists(settings.maps):
                managed.engine.set_history(ExpertMaps.read(settings.maps, managed.map))
            if (settings.policy or default_policy()) == LEARNED:
                if settings.learned is None:
                    managed.sidecars.read_learned(managed.engine)
                elif os.path.exists(settings.learned):
                    eviction.read(settings.learned, managed.engine, managed.map)
            apply_prefetch(managed.prefetch, managed.engine, managed.sidecars)
            managed.engine.set_speculation("decode" if settings.speculate else "none")
            managed.speculating = settings.speculate
            for layer in managed.map.layers:
                apply_substitution(managed.engine, layer.il, settings.substitution, managed.buddies)
        except PyorchError:
            managed.engine.close()
            raise
        with managed.engine.capture():
            yield


def use_pack(model_map: ModelMap, settings: Settings, plain: bool) -> None:
    """Has experts read from the pack that lies beside the model; says once why not where one is there and refused.

    plain: they will be computed with as they lie in the model.
    """
    if model_map.info.slim and settings.source is None:
        if not settings.packed:
            raise PyorchError(f"{model_map.path} is slim, its experts are in its pack only: leave out --no-pack "
                              "(packed=False in Python)")
        packs.require(model_map)
    if not settings.packed or settings.source is not None or settings.budget == RESIDENT:
        return
    refusal = packs.attach(model_map, plain)
    if refusal and refusal not in _refused_packs:
        _refused_packs.add(refusal)
        fatal.notice(f"note: {refusal}; the experts are read from {model_map.path}")


def _free_model(free: Callable, model: int) -> None:
    if is_forked(model):
        return
    with _lock:  # first: once it is freed, another thread may get a model at the same address
        managed = _models.pop(model, None)
    free(model)
    if managed is None:
        return
    if managed.settings.on_free is not None:
        managed.settings.on_free(managed)
    if managed.engine is not None:
        managed.engine.close()


def _init_context(init: Callable, model: int, params: llama.llama_context_params) -> int | None:
    managed = _models.get(model)
    if managed is None:
        return init(model, params)
    if managed.forked:
        raise PyorchError(FORKED)
    settings = _settings() or Settings()
    if settings.flash_attn_type is not None:
        params.flash_attn_type = settings.flash_attn_type
    if settings.n_outputs_max is not None:
        params.n_outputs_max = settings.n_outputs_max
    if settings.n_threads:
        params.n_threads = params.n_threads_batch = settings.n_threads
    n_ubatch = settings.n_ubatch or (default_ubatch(managed) if settings.widen else None)
    if n_ubatch is not None:
        params.n_ubatch = min(n_ubatch, params.n_batch)
    widen = settings.widen and n_ubatch is None
    reserved = plan_context(managed, params, widen) if managed.automatic else 0
    logs.forget_errors()
    with fatal.refused():
        context = init(model, params)
    try:
        raise_held()
    except KeyboardInterrupt:
        if context:
            original("llama_free")(context)
        raise
    if not context:
        raise PyorchError(f"{managed.path}: {measure.refusal(managed.map)}")
    if managed.engine is not None:
        try:
            managed.engine.check_routers()
        except PyorchError:
            original("llama_free")(context)
            raise
    if managed.automatic:
        with _lock:
            managed.contexts[context] = reserved
    return context


def default_ubatch(managed: ManagedModel) -> int | None:
    """Tokens to compute at once: in prefill every expert is read once for each ubatch, so twice as wide is half the
    reading. None under the automatic budget, where it depends on what memory a context leaves."""
    if managed.automatic:
        return None
    whole = managed.engine is None or managed.engine.stats().budget_bytes >= managed.map.info.slots_bytes
    return NARROW_UBATCH if whole else WIDE_UBATCH


def plan_context(managed: ManagedModel, params: llama.llama_context_params, widen: bool) -> int:
    """Sets the engine's budget to what a context with these parameters will leave; returns its bytes.

    widen: choose params.n_ubatch: narrower than llama.cpp's only where its buffers would not leave the floor. Raises
    BudgetError if that is not left.
    """
    limit, info = memory.memory_limit(), managed.map.info
    free_bytes = limit.free_bytes + managed.engine.stats().used_bytes - _promised_bytes(managed)
    free = dataclasses.replace(limit, free_bytes=free_bytes)
    # Mapped dense weights look free, the kernel can drop them; but they are needed for every token.
    mapped = managed.params.load_mode in (llama.LLAMA_LOAD_MODE_MMAP, llama.LLAMA_LOAD_MODE_AUTO)
    dense_bytes = info.dense_bytes if mapped else 0
    with managed.engine.capture(), measure.twin(
        original("llama_model_load_from_file"), managed.path, managed.params
    ) as twin:

        def need(n_ubatch: int) -> int:
            params.n_ubatch = n_ubatch
            return measure.context_bytes(original("llama_init_from_model"), twin, params, managed.map)

        if widen:
            params.n_ubatch = _widest_ubatch(need, params.n_batch, free, info.slots_bytes)
        needed = need(params.n_ubatch)
        while widen and params.n_ubatch > LEAST_UBATCH and memory.rest_bytes(free, dense_bytes, needed) < info.floor_bytes:
            needed = need(params.n_ubatch // 2)
    plan = memory.plan(info, free, dense_bytes, context_bytes=needed)
    managed.engine.set_budget(plan.budget_bytes)
    return needed


def try_context(managed: ManagedModel, params: llama.llama_context_params) -> None:
    """Raises FormatError or BudgetError where llama.cpp refuses the model or a context; nothing is allocated.

    For what loads the model beyond this module's reach, and would end the process.
    """
    with measure.twin(original("llama_model_load_from_file"), managed.path, managed.params) as twin:
        measure.context_bytes(original("llama_init_from_model"), twin, params, managed.map)


def _promised_bytes(managed: ManagedModel) -> int:
    """What looks free and is not: what other models' experts may still take, and contexts of this model."""
    with _lock:
        # Compute buffers may not have been touched yet; to count them twice is on the safe side.
        promised = sum(managed.contexts.values())
        for other in list(_models.values()):
            if other.engine is not None and other is not managed:
                stats = other.engine.stats()
                promised += stats.budget_bytes - stats.used_bytes
    return promised


def _widest_ubatch(need: Callable[[int], int], n_batch: int, free: memory.MemoryLimit, slots_bytes: int) -> int:
    """The widest ubatch whose buffers cost the experts at most a tenth of their memory.

    need: bytes of the context for an ubatch. Where all experts fit, none is read twice: the narrow one.
    """
    narrow = min(NARROW_UBATCH, n_batch)
    least = need(narrow)
    rest = free.free_bytes - memory.margin_bytes(free) - least
    width = min(WIDE_UBATCH, n_batch)
    while width > narrow and (rest >= slots_bytes or need(width) - least > rest // 10):
        width //= 2
    return max(width, narrow)


def _free_context(free: Callable, context: int) -> None:
    if is_forked(llama.llama_get_model(context)):
        return
    with _lock:
        for managed in list(_models.values()):
            managed.contexts.pop(context, None)
    free(context)


_originals: dict[str, Callable] = {}


def original(name: str) -> Callable:
    """A function of llama_cpp.llama_cpp as it was before it was replaced."""
    return _originals[name]


def _replace(name: str, wrapper: Callable) -> None:
    function = _originals[name] = getattr(llama, name)
    replacement = functools.wraps(function)(functools.partial(wrapper, function))
    setattr(llama, name, replacement)
    setattr(llama_cpp, name, replacement)


def _load_from_file(load: Callable, path: bytes, params: llama.llama_model_params) -> int | None:
    return _load(os.fsdecode(path), params, lambda: load(path, params))


def _load_from_splits(load: Callable, paths, n_paths: int, params: llama.llama_model_params) -> int | None:
    return _load(os.fsdecode(paths[0]), params, lambda: load(paths, n_paths, params))


def _tokenize(self: internals.LlamaModel, text: bytes, add_bos: bool, special: bool) -> list[int]:
    """As llama_cpp does, with room for the text's tokens and not for as many as the model says its context has."""
    n_room = len(text) + 16  # a token stands for a byte at least, but for the few that are added
    for _ in range(2):
        tokens = (llama.llama_token * n_room)()
        n_tokens = llama.llama_tokenize(self.vocab, text, len(text), tokens, n_room, add_bos, special)
        if n_tokens >= 0:
            return tokens[:n_tokens]
        n_room = -n_tokens
    raise PyorchError(f"llama.cpp cannot tokenize a text of {len(text)} bytes")


def _raise_decode_errors(method: Callable) -> Callable:
    """A decode that the engine failed raises the engine's sentence, not only llama.cpp's status."""

    @functools.wraps(method)
    def wrapper(self: internals.LlamaContext, batch: internals.LlamaBatch) -> None:
        if is_forked(self.model.model):
            raise PyorchError(FORKED)
        decode_error()  # of an earlier decode
        try:
            method(self, batch)
        except RuntimeError:
            reason = decode_error()
            if reason:
                raise ExpertReadError(reason) from None
            raise
        finally:
            raise_held()

    return wrapper


def _install() -> None:
    logs.install()
    _replace("llama_model_load_from_file", _load_from_file)
    _replace("llama_model_load_from_splits", _load_from_splits)
    _replace("llama_model_free", _free_model)
    _replace("llama_init_from_model", _init_context)
    _replace("llama_free", _free_context)
    internals.LlamaModel.tokenize = _tokenize
    llama_cpp.Llama.close = closing(llama_cpp.Llama.close, lambda model: model in _models)
    internals.LlamaContext.decode = _raise_decode_errors(internals.LlamaContext.decode)
    internals.LlamaContext.encode = _raise_decode_errors(internals.LlamaContext.encode)


_install()
