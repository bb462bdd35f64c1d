"""Manages the experts of any model that llama_cpp loads in this process.

The functions of `llama_cpp.llama_cpp` that load and free models and contexts are replaced once. The replacements do the
same and manage the engine. Without settings they only call the original.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jinja2
import llama_cpp
import llama_cpp._internals as internals
import llama_cpp.llama_chat_format as llama_chat_format
import llama_cpp.llama_cpp as llama

from pyorch.errors import PyorchError
from pyorch.library.bindings import call, check, ffi, lib
from pyorch.llama import cores, following, logs, measure
from pyorch.llama.context_plan import check_context, check_ubatch, default_ubatch, plan_context, plan_devices
from pyorch.llama.managed import decoding, find, is_forked, loading, lock, models
from pyorch.llama.originals import original, replace
from pyorch.llama.schemas import check_grammar
from pyorch.runtime import fatal
from pyorch.runtime.callbacks import raise_held
from pyorch.runtime.engine import FORKED
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.budget import AUTO, Budget
from pyorch.settings.settings import Settings
from pyorch.settings.signature import describe, unknown_keyword

_process_settings: list[Settings] = []
_thread = threading.local()


class manage:
    """Manages every model that llama_cpp loads in this process from now on, until close().

        pyorch.manage(budget="40%")
        llm = llama_cpp.Llama("olmoe.gguf")

    Also a context manager.

    Args:
        budget: As for pyorch.load().
        options: As for pyorch.load(), except n_ctx, which is an argument of llama_cpp.Llama here.

    Raises:
        PyorchError: An option is invalid.
        TypeError: No option has this name.
    """

    def __init__(self, budget: Budget | int | str = AUTO, **options: Any) -> None:
        unknown = sorted(options.keys() - {field.name for field in dataclasses.fields(Settings)})
        if unknown:
            raise unknown_keyword("manage", unknown[0])
        self.settings = Settings(**{"budget": budget, **options})
        if self.settings.n_ctx:
            raise PyorchError(
                "n_ctx is an argument of llama_cpp.Llama, which makes its own buffers by it: give it there"
            )
        _process_settings.append(self.settings)

    def close(self) -> None:
        """Stops managing models that are loaded from now on. Models in memory stay managed."""
        if self.settings in _process_settings:
            _process_settings.remove(self.settings)

    def __enter__(self) -> manage:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def managing(settings: Settings, model_map: ModelMap | None = None, placed: bool = False) -> Iterator[None]:
    """Manages the models that the calling thread loads in the `with` block.

    Args:
        settings: The settings.
        model_map: Of the model at its path, if it is open already.
        placed: See loading().
    """
    before = getattr(_thread, "managing", None)
    _thread.managing = settings, model_map, placed
    try:
        yield
    finally:
        _thread.managing = before


def _settings() -> Settings | None:
    settings, *_ = getattr(_thread, "managing", None) or (None,)
    return settings or (_process_settings[-1] if _process_settings else None)


def _map(path: str) -> ModelMap:
    _, model_map, _ = getattr(_thread, "managing", None) or (None, None, False)
    return model_map if model_map is not None and model_map.path == path else ModelMap(path)


def _load(path: str, params: llama.llama_model_params, call: Callable[[], int | None]) -> int | None:
    """Calls `call`, which loads the model at path, with the present settings."""
    settings = _settings()
    if settings is None or params.vocab_only or params.no_alloc:
        return call()
    if settings.use_extra_bufts is not None:
        params.use_extra_bufts = settings.use_extra_bufts
    logs.forget_errors()
    *_, placed = getattr(_thread, "managing", None) or (False,)
    with loading(path, _map(path), settings, params, placed) as managed, fatal.refused():
        model = call()
    try:
        raise_held()
    except KeyboardInterrupt:
        if model:
            original("llama_model_free")(model)
        managed.close()
        raise
    if not model:
        managed.close()
        raise measure.not_loaded(path)
    with lock:
        models[model] = managed
    return model


def _free_model(free: Callable, model: int) -> None:
    if is_forked(model):
        return
    with lock:  # before free(), after which another thread may get a model at the same address
        managed = models.pop(model, None)
    free(model)
    if managed is None:
        return
    if managed.plan.settings.on_free is not None:
        managed.plan.settings.on_free(managed)
    managed.close()


# The first process with a context. A child process has none of OpenMP's threads, and would wait for them.
_computing: int | None = None
FORKED_BEFORE = (
    "this process was forked from one that computes with a model, and threads are not copied: load models in a process "
    'that starts anew, such as one of multiprocessing.get_context("spawn")'
)


def _init_context(init: Callable, model: int, params: llama.llama_context_params) -> int | None:
    managed = find(model)
    if managed is None:
        return init(model, params)
    if managed.forked:
        raise PyorchError(FORKED)
    global _computing
    if _computing not in (None, os.getpid()):
        raise PyorchError(FORKED_BEFORE)
    _computing = os.getpid()
    settings = _settings() or Settings()
    if settings.flash_attn_type is not None:
        params.flash_attn_type = settings.flash_attn_type
    if settings.n_outputs_max is not None:
        params.n_outputs_max = settings.n_outputs_max
    if settings.n_threads:
        params.n_threads = params.n_threads_batch = settings.n_threads
    cores.place(settings, max(params.n_threads, params.n_threads_batch))
    n_ubatch = settings.n_ubatch or (default_ubatch(managed) if settings.widen else None)
    if n_ubatch is not None:
        params.n_ubatch = min(n_ubatch, params.n_batch)
    if managed.engine is not None:
        params.op_offload = False  # a device would copy experts from the wrong place
    widen = settings.widen and n_ubatch is None
    check_context(managed, params, widen)
    reserved = plan_context(managed, params, widen) if managed.plan.automatic else 0
    check_ubatch(managed, params.n_ubatch)
    plan_devices(managed, params)  # after plan_context(), which chooses the ubatch
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
    if managed.plan.automatic:
        with lock:
            managed.contexts[context] = reserved
    managed.warm_up()
    following.follow(managed)
    return context


def _free_context(free: Callable, context: int) -> None:
    if is_forked(llama.llama_get_model(context)):
        return
    with lock:
        for managed in list(models.values()):
            managed.contexts.pop(context, None)
    free(context)


def _init_adapter(init: Callable, model: int, path: bytes) -> Any:
    """Refuses an adapter that was not loaded: llama_cpp would set it, and end the process when it computes."""
    logs.forget_errors()
    adapter = init(model, path)
    if not adapter:
        raise PyorchError(f"{os.fsdecode(path)} is no LoRA adapter for this model: {logs.last_error()}")
    return adapter


def _load_from_file(load: Callable, path: bytes, params: llama.llama_model_params) -> int | None:
    return _load(os.fsdecode(path), params, lambda: load(path, params))


def _load_from_splits(load: Callable, paths, n_paths: int, params: llama.llama_model_params) -> int | None:
    return _load(os.fsdecode(paths[0]), params, lambda: load(paths, n_paths, params))


def _tokenize(self: internals.LlamaModel, text: bytes, add_bos: bool, special: bool) -> list[int]:
    """Tokenizes as llama_cpp does, with room for the text's tokens and not for the context that the model claims."""
    n_room = len(text) + 16  # a token has at least one byte, except a few added ones
    for _ in range(2):
        tokens = (llama.llama_token * n_room)()
        n_tokens = llama.llama_tokenize(self.vocab, text, len(text), tokens, n_room, add_bos, special)
        if n_tokens >= 0:
            return tokens[:n_tokens]
        n_room = -n_tokens
    raise PyorchError(f"llama.cpp cannot tokenize a text of {len(text)} bytes")


def _init_grammar(
    init: Any, vocab: int, grammar: bytes, root: bytes, patterns: Any = (), n_patterns: int = 0, tokens: Any = (),
    n_tokens: int = 0, *, lazy: bool = False,
) -> Any:
    """Replaces llama_sampler_init_grammar and, with triggers, llama_sampler_init_grammar_lazy_patterns.

    Raises:
        PyorchError: llama.cpp would end the process or return NULL.
    """
    check_grammar(grammar.decode(errors="replace"))
    texts = [ffi.new("char[]", patterns[i]) for i in range(n_patterns)]
    sampler = call(lib.pyorch_init_grammar, ffi.cast("void *", vocab), grammar, root, int(lazy),
                   ffi.new("const char *[]", texts), n_patterns,
                   ffi.new("int32_t[]", [tokens[i] for i in range(n_tokens)]), n_tokens, out="void *")
    return ctypes.cast(int(ffi.cast("uintptr_t", sampler[0])), init.restype)


def _sample(_: Callable, sampler: Any, context: int, index: int) -> int:
    """Replaces llama_sampler_sample. PyorchError: a grammar allows no token of the model, or takes too long."""
    address = ctypes.cast(sampler, ctypes.c_void_p).value
    return call(lib.pyorch_sample, ffi.cast("void *", address), ffi.cast("void *", context), index, out="int32_t")[0]


def _raise_decode_errors(method: Callable) -> Callable:
    """Makes a decode that the engine failed raise the engine's reason, not only llama.cpp's status."""

    @functools.wraps(method)
    def wrapper(self: internals.LlamaContext, batch: internals.LlamaBatch) -> None:
        if is_forked(self.model.model):
            raise PyorchError(FORKED)
        with decoding(self.model.model, self.ctx):
            method(self, batch)

    return wrapper


def _end_with_the_context(complete: Callable) -> Callable:
    """Makes Llama._create_completion end a text when the context is full.

    llama_cpp limits a text to the context, but not while the last character of the text lacks bytes: it would decode a
    token for which the context has no room.
    """

    @functools.wraps(complete)
    def wrapper(self: llama_cpp.Llama, *args: Any, stopping_criteria: Any = None, **kwargs: Any) -> Any:
        if (managed := find(self.model)) is not None:
            managed.map.check_text()
        criteria = llama_cpp.StoppingCriteriaList([lambda *_: self.n_tokens >= self.n_ctx()])
        if stopping_criteria is not None:
            criteria.append(stopping_criteria)
        return complete(self, *args, stopping_criteria=criteria, **kwargs)

    return wrapper


CLOSED = "the model was closed: load it again"


class ClosedLlama(llama_cpp.Llama):
    """A Llama after its model is freed. It can be closed again.

    llama_cpp would pass null pointers to llama.cpp, which ends the process. Code that still holds the object, or a
    generator of it, gets an exception instead.
    """

    def __getattribute__(self, name: str) -> object:
        if name in ("close", "__class__", "__dict__"):
            return object.__getattribute__(self, name)
        raise PyorchError(CLOSED)

    def __repr__(self) -> str:
        return "<closed llama_cpp.Llama>"

    def close(self) -> None:
        """Does nothing."""

    def __del__(self) -> None:
        pass


def _close(close: Callable[[llama_cpp.Llama], None]) -> Callable[[llama_cpp.Llama], None]:
    """Makes Llama.close() turn the Llama of a managed model into a ClosedLlama.

    Raises:
        PyorchError: Called inside a callback of an engine. The model stays.
    """

    @functools.wraps(close)
    def wrapper(self: llama_cpp.Llama) -> None:
        managed = getattr(getattr(self, "_model", None), "model", None) in models
        if managed:
            check(lib.pyorch_engine_free(ffi.NULL))  # refused inside a callback, whose decode needs the model
        close(self)
        if managed:
            self.__class__ = ClosedLlama

    return wrapper


class ChatTemplate(llama_chat_format.Jinja2ChatFormatter):
    """The chat template of a model.

    A template that Jinja refuses is an error when a conversation needs it, not when the model is loaded. Undefined
    names are empty and have empty attributes, as in llama.cpp's own templates.
    """

    def __init__(self, template: str, *args: Any, **options: Any) -> None:
        self._refusal = ""
        try:
            super().__init__(template, *args, **options)
            self._environment.environment.undefined = jinja2.ChainableUndefined
        except jinja2.TemplateError as error:
            self._refusal = str(error)

    def __call__(self, **conversation: Any) -> llama_chat_format.ChatFormatterResponse:
        """Formats a conversation.

        Raises:
            PyorchError: The template fails.
            ValueError: The template refuses the conversation.
        """
        if not self._refusal:
            try:
                return super().__call__(**conversation)
            except ValueError:
                raise
            except Exception as error:  # a template is a program and may raise any
                refusal = f"{type(error).__name__}: {error}"
        else:
            refusal = self._refusal
        raise PyorchError(f"the chat template of the model fails ({refusal}): leave the template out, with a prompt "
                          "alone")


describe(manage.__init__, without=("n_ctx",))


def _install() -> None:
    logs.install()
    replace("llama_model_load_from_file", _load_from_file)
    replace("llama_model_load_from_splits", _load_from_splits)
    replace("llama_model_free", _free_model)
    replace("llama_init_from_model", _init_context)
    replace("llama_free", _free_context)
    replace("llama_adapter_lora_init", _init_adapter)
    replace("llama_sampler_init_grammar", _init_grammar)
    replace("llama_sampler_init_grammar_lazy_patterns", functools.partial(_init_grammar, lazy=True))
    replace("llama_sampler_sample", _sample)
    internals.LlamaModel.tokenize = _tokenize  # type: ignore[method-assign]
    llama_chat_format.Jinja2ChatFormatter = ChatTemplate  # type: ignore[misc]
    llama_cpp.Llama._create_completion = _end_with_the_context(  # type: ignore[method-assign]
        llama_cpp.Llama._create_completion)
    llama_cpp.Llama.close = _close(llama_cpp.Llama.close)  # type: ignore[method-assign]
    internals.LlamaContext.decode = _raise_decode_errors(internals.LlamaContext.decode)  # type: ignore[method-assign]
    internals.LlamaContext.encode = _raise_decode_errors(internals.LlamaContext.encode)  # type: ignore[method-assign]


_install()


@atexit.register
def _notice_lost_devices() -> None:
    """Stops logging while Python exits.

    A thread of ggml logs that a device is lost when it uses it. It would wait forever for the interpreter, which waits
    for that thread when it frees the context.
    """
    for managed in list(models.values()):
        for device in managed.devices.each if managed.devices is not None else ():
            device.is_lost()
