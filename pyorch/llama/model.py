"""A loaded model: generation, residency, statistics; and loading it."""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import llama_cpp
import llama_cpp.llama_cpp as llama
import numpy as np

from pyorch.errors import BudgetError, PyorchError
from pyorch.hub.reference import Reference, is_reference
from pyorch.library.bindings import check, ffi, lib
from pyorch.llama import cores, interception, logs, memory
from pyorch.llama.apply import apply_prefetch, check_substitution, find_buddies, find_ghosts, speculative
from pyorch.llama.context_plan import CTX_STEP
from pyorch.llama.division import WIDE_UBATCH
from pyorch.llama.interception import CLOSED, ClosedLlama
from pyorch.llama.layer import Layer, ResidencyView
from pyorch.llama.managed import ManagedModel, find
from pyorch.llama.model_stats import ModelStats
from pyorch.llama.schemas import compiled, grammar_of
from pyorch.runtime import fatal
from pyorch.runtime.callbacks import Source
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.budget import AUTO, Budget
from pyorch.settings.option import options as declared_options
from pyorch.settings.prefetch import Prefetch
from pyorch.settings.settings import MAX_TOKENS, Settings
from pyorch.settings.signature import describe, unknown_keyword
from pyorch.settings.substitution import OFF, Substitution
from pyorch.sidecars.buddies import Buddies
from pyorch.sidecars.container import default_path, refuse_sidecar
from pyorch.sizes import format_bytes

# A prompt's logits are needed at its end only. All n_batch rows of a large vocabulary would be reserved
# otherwise: 2048 rows of 150 000 floats are more than a gigabyte.
N_OUTPUTS_MAX = 64


_loading = threading.Lock()

SETTINGS = declared_options(Settings)  # that load() takes by name
# What else load() takes: keywords of Llama, which ignores every other name.
_OF_LLAMA = tuple(name for name, parameter in inspect.signature(llama_cpp.Llama.__init__).parameters.items()
                  if parameter.kind is inspect.Parameter.KEYWORD_ONLY)


class Model:
    """A model in memory, made by load(). One thread at a time; close() or a `with` block frees it.

    llama: the llama_cpp.Llama, its whole API: chat completion, embeddings, logits, tokenization.
    map: the model map. engine: None for a dense model, which has no experts to manage.
    layers: the blocks with routed experts, by il. residency: il to bool[n_expert], with a device uint8.
    """

    def __init__(self, model: llama_cpp.Llama, record: ManagedModel) -> None:
        self.llama = model
        self._in_use = threading.RLock()
        self._closing = False
        self._text = object()  # that was begun last
        self.map: ModelMap = record.map
        self.engine = record.engine
        self._record = record
        self.layers = {
            layer.il: Layer(record, layer.il, layer.n_expert)
            for layer in (record.map.layers if record.engine is not None else ())
        }
        self.residency: Mapping[int, np.ndarray] = ResidencyView(self.layers)

    def __repr__(self) -> str:
        info, layers = self.map.info, self.map.layers
        if isinstance(self.llama, ClosedLlama):
            return f"<closed pyorch.Model {self.map.path}>"
        if not layers:
            return f"<pyorch.Model {self.map.path}: {info.arch}, dense>"
        kept = "resident" if self.engine is None else f"budget {format_bytes(self.engine.stats().budget_bytes)}"
        return (f"<pyorch.Model {self.map.path}: {info.arch}, {len(layers)} layers with up to "
                f"{max(layer.n_expert for layer in layers)} experts, {kept} of {format_bytes(info.slots_bytes)}>")

    @property
    def device(self) -> str:
        """Of the devices that compute, their names; "" where only the processor does."""
        devices = self._record.devices
        return devices.name if devices is not None else ""

    @property
    def note(self) -> str:
        """Why nothing manages the model's experts, in a sentence; "" where something does."""
        return self._record.unmanaged

    def generate(
        self,
        prompt: str | Sequence[int],
        max_tokens: int = 128,
        temperature: float = 0.8,
        top_p: float = 0.95,
        top_k: int = 40,
        seed: int | None = None,
        stop: Sequence[str] = (),
        **sampling: Any,
    ) -> Iterator[str]:
        """Continues a prompt (text or token ids), piece by piece, until max_tokens or an end of text.

        temperature 0 is greedy. `sampling` goes to llama_cpp.Llama.create_completion. grammar: of these a text in
        llama.cpp's form (GBNF), or a llama_cpp.LlamaGrammar.

        Raises:
            ExpertReadError: an expert could not be read. The model stays usable.
            PyorchError: the prompt is longer than the context, or it is empty and the model has no token that begins a
                text; or llama.cpp does not take the grammar; or what is computed is no number, as with damaged weights.
        """
        if len(prompt) == 0 and not self.llama.tokenize(b""):
            raise PyorchError("the prompt is empty, and this model has no token that begins a text: give some text")
        if not isinstance(prompt, str) and any(not 0 <= token < self.llama.n_vocab() for token in prompt):
            raise PyorchError(f"the prompt has numbers of tokens that are not from 0 to {self.llama.n_vocab() - 1}")
        sampling = self._with_grammar(sampling)
        try:
            for chunk in self._step_by_step(self.llama.create_completion(
                prompt if isinstance(prompt, str) else list(prompt),
                max_tokens=max_tokens,
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                seed=seed,
                stop=list(stop),
                stream=True,
                **sampling,
            )):
                yield chunk["choices"][0]["text"]
        except ValueError as error:  # Llama's, about arguments
            raise self._refusal(error) from error

    def chat(self, messages: Sequence[dict[str, str]], **sampling: Any) -> Iterator[str]:
        """Answers a conversation ({"role": ..., "content": ...}) with the model's own template, piece by piece.

        `sampling` goes to llama_cpp.Llama.create_chat_completion; grammar is as of generate(). Raises as generate()
        does, and PyorchError for a "response_format" that llama_cpp would ignore, or whose schema cannot be made a
        grammar.
        """
        sampling = self._with_grammar(sampling)
        form = sampling.get("response_format")
        if form is not None and (not isinstance(form, dict) or form.get("type") not in ("text", "json_object")):
            raise PyorchError(f'"response_format" is {form!r}, and must be {{"type": "json_object"}}, with a "schema" '
                              "or without")
        if form is not None and "schema" in form:  # llama_cpp takes any JSON where it cannot convert the schema
            grammar_of(json.dumps(form["schema"]))
        try:
            for chunk in self._step_by_step(self.llama.create_chat_completion(list(messages), stream=True, **sampling)):
                yield chunk["choices"][0]["delta"].get("content") or ""
        except ValueError as error:
            raise self._refusal(error) from error

    def _with_grammar(self, sampling: dict[str, Any]) -> dict[str, Any]:
        """The same keywords, with a grammar as llama_cpp takes it. PyorchError for what is none."""
        given = sampling.get("grammar")
        if given is None or isinstance(given, llama_cpp.LlamaGrammar):
            return sampling
        if not isinstance(given, str):
            raise PyorchError(f"grammar is of type {type(given).__name__}, and must be text in llama.cpp's form, "
                              "GBNF, or a llama_cpp.LlamaGrammar")
        return sampling | {"grammar": compiled(given, self.llama.model)}

    def _step_by_step(self, chunks: Iterator[Any]) -> Iterator[Any]:
        """While one is computed, no other thread frees the model. One text at a time: what llama_cpp has computed is of
        the last one that was begun."""
        mine = object()
        self._text = mine
        while True:
            with self._in_use:
                if self._closing:
                    raise PyorchError(CLOSED)
                if self._text is not mine:
                    raise PyorchError("another text was begun with this model, and this one cannot go on: end one "
                                      "before the next, or load the model twice")
                chunk = next(chunks, None)
                if chunk is None:
                    return
                self._check_numbers()
            yield chunk

    def _check_numbers(self) -> None:
        """What is not a number becomes nothing else in any layer behind it, so one logit tells."""
        logits = llama.llama_get_logits_ith(self.llama.ctx, -1)
        if logits and not math.isfinite(logits[0]):
            raise PyorchError(f"what {self._record.path} computes is no number any more: its weights are damaged, "
                              "so copy or convert it again")

    def _refusal(self, error: ValueError) -> PyorchError:
        """What Llama says, with the remedy where a prompt is too long."""
        too_long = re.search(r"Requested tokens \((\d+)\) exceed context window of (\d+)", str(error))
        if too_long is None:
            return PyorchError(str(error))
        n_tokens, n_ctx = too_long.groups()
        return PyorchError(f"the prompt has {n_tokens} tokens, and the context window room for {n_ctx}: make it larger "
                           "(--ctx N, in Python n_ctx=N), or the prompt shorter")

    def substitute(
        self, substitution: Substitution | str | None, buddies: Buddies | str | os.PathLike[str] | None = None
    ) -> None:
        """Lets resident experts stand in for absent ones in all layers (lossy); None: no longer.

        Args:
            substitution: or its settings as text, such as "max_replaced=3,min_entropy=p15".
            buddies: the lists, or their file. Default: those in use, else the sidecar beside the model.

        Raises PyorchError where the settings need what there is not; FormatError for lists that are damaged or another
        model's.
        """
        settings = Substitution.parse(substitution) if substitution is not None else None
        in_use = next((layer.buddies for layer in self.layers.values()), None)
        lists = find_buddies(settings, buddies if buddies is not None else in_use, self._record.plan.sidecars)
        if self.layers:
            find_ghosts(settings, self._record.plan.sidecars)
        for il in self.layers:  # all before any is changed
            check_substitution(settings or OFF, il, lists)
        for layer in self.layers.values():
            layer.substitute(settings, lists)

    def set_cache(self, masks: Mapping[int, np.ndarray] | None) -> None:
        """Substitution takes exactly these experts for resident, whatever is; None: those that are.

        With all experts in memory, this shows what a smaller cache would do to accuracy.

        Args:
            masks: il to bool[n_expert]; a layer that is missing keeps to what is resident.

        Raises PyorchError for a layer that has no routed experts.
        """
        unknown = sorted((masks or {}).keys() - self.layers.keys())
        if unknown:
            raise PyorchError(f"layer {unknown[0]} has no routed experts")
        if self.engine is not None:
            for il in self.layers:
                self.engine.set_cache(il, (masks or {}).get(il))

    def speculate(self, prefetch: str | None, prompts: bool = False) -> None:
        """Lets layers execute what is forecast for them one layer earlier, and read nothing else (lossy).

        Layers that are substituted compute what their routers choose: what was forecast of it counts as there, and for
        the rest their substitution says what is done.

        Args:
            prefetch: what forecasts, such as "hybrid", or "auto"; None: routers decide again, and what is read ahead is
                what the model was loaded with.
            prompts: in prompts too, which shows what it costs in accuracy.

        Raises PyorchError where the predictor's forecasts cannot be executed.
        """
        if self.engine is None:
            return
        plan = self._record.plan
        forecast = plan.prefetch if prefetch is None else speculative(Prefetch.parse(prefetch), plan.sidecars)
        apply_prefetch(forecast, self.engine, plan.sidecars)
        self.engine.set_speculation("none" if prefetch is None else "all" if prompts else "decode")
        self._record.speculating = prefetch is not None

    def set_prefetch(self, prefetch: Prefetch | str) -> None:
        """Reads ahead as this says, in all layers. PyorchError for a predictor that lacks what it needs."""
        if self.engine is not None:
            apply_prefetch(Prefetch.parse(prefetch), self.engine, self._record.plan.sidecars)

    def save_maps(self, path: str | os.PathLike[str] | None = None) -> None:
        """Writes the expert maps with what was learned while decoding, by default beside the model.

        Raises PyorchError where no predictor collects any, or the file cannot be written.
        """
        if self.engine is None or self.engine.history is None:
            raise PyorchError(
                "no expert maps were collected: load the model with the prefetch expert-map"
            )
        self.engine.wait_idle()  # until the last token was learned from
        self.engine.history.write(path or default_path(self.map.path, "maps"), self.map)

    def stats(self) -> ModelStats:
        """What was measured since loading, or since reset_stats()."""
        perf = llama.llama_perf_context(self.llama.ctx)
        lossy = any(layer.settings.substitution is not None for layer in self.layers.values())
        return ModelStats(
            # llama.cpp counts at least one token, to divide by
            perf.n_p_eval if perf.t_p_eval_ms else 0,
            perf.t_p_eval_ms / 1000,
            perf.n_eval if perf.t_eval_ms else 0,
            perf.t_eval_ms / 1000,
            memory.peak_bytes(),
            self.engine.stats() if self.engine is not None else None,
            self.engine.substitution_stats() if lossy else None,
            self.engine.speculation_stats() if self._record.speculating else None,
            {il: layer.stats() for il, layer in self.layers.items()},
            self._record.division.pools,
            self._record.division.origin,
            self._record.plan.layout,
        )

    def reset_stats(self) -> None:
        """Counts anew, here and in the engine."""
        llama.llama_perf_context_reset(self.llama.ctx)
        if self.engine is not None:
            self.engine.reset_stats()

    def close(self) -> None:
        """Frees the context, the model and then its engine. May be called again.

        After it, generate(), its unfinished generators and `llama` raise PyorchError. What another thread computes just
        now with generate() or chat() is waited for. Refused in an observer or a source.
        """
        check(lib.pyorch_engine_free(ffi.NULL))  # refused inside a callback, for whose decode this would wait
        self._closing = True  # who computes takes the lock again at once: without a word it would end its text first
        with self._in_use:
            self.llama.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def load(
    path: str | os.PathLike[str],
    budget: Budget | int | str = AUTO,
    *,
    n_batch: int | None = None,
    managed: bool = False,
    placed: bool = False,
    source: Source | None = None,
    use_extra_bufts: bool = True,
    verbose: bool = False,
    **llama_kwargs: Any,
) -> Model:
    """Loads a GGUF whose experts may occupy at most `budget`.

    Args:
        path: the file, or "hf:ORG/NAME[:QUANT|/FILE]" for one of the Hugging Face hub, fetched if it is not there yet.
        budget: "auto" (what the memory limit leaves), a share of the experts such as "40%", a size such
            as "1.5GiB" or "800MB", or bytes.
        n_batch: tokens of one call of llama_decode, default: the widest n_ubatch.
        managed: have an engine, to look at experts and to change what becomes of them, also where the whole model fits
            on a device, and llama.cpp would keep it there.
        placed: other servers will compute experts (Engine.connect, Engine.set_placement), as those that a share lacks.
        source: reads in place of the file, see Engine.
        use_extra_bufts: repack weights of some types for faster kernels, dense ones and experts, as llama.cpp does.
        {options}
        llama_kwargs: all other arguments are those of llama_cpp.Llama.

    Raises:
        FormatError: the file is missing, damaged, incomplete or no GGUF.
        BudgetError: the budget is below the floor, or the model does not fit under the memory limit.
        PyorchError: an option cannot mean anything, or the model lacks what it needs.
        TypeError: no option has this name.
    """
    path = os.fsdecode(path)
    if is_reference(path):
        from pyorch.hub.download import Hub  # huggingface_hub takes longer to import than all else

        path = str(Hub().model(Reference.parse(path), lambda *_: None, warnings.warn))
    logs.set_quiet(not verbose)
    given = {name: llama_kwargs.pop(name) for name in SETTINGS.keys() & llama_kwargs.keys()}
    unknown = sorted(llama_kwargs.keys() - set(_OF_LLAMA))
    if unknown:
        raise unknown_keyword("load", unknown[0], ["path", "n_batch", "managed", "placed", "source", *_OF_LLAMA])
    all_outputs = llama_kwargs.get("logits_all") or llama_kwargs.get("embedding") or "draft_model" in llama_kwargs
    settings = Settings(
        budget=Budget.parse(budget),
        managed=managed,
        source=source,
        use_extra_bufts=use_extra_bufts,
        widen=True,
        n_outputs_max=0 if all_outputs else N_OUTPUTS_MAX,
        flash_attn_type=None if "flash_attn" in llama_kwargs else llama.LLAMA_FLASH_ATTN_TYPE_AUTO,
        **given,
    )
    if not 0 <= (n_batch or 0) <= MAX_TOKENS:
        raise PyorchError(f"n_batch is {n_batch}, and must be from 0 (for the default) to {MAX_TOKENS}")
    model_map = ModelMap(path)
    refuse_sidecar(model_map)
    n_threads = settings.n_threads or cores.physical_cores()
    # llama.cpp rounds it up, and Llama, which does not know, would have no room for the tokens of such a prompt.
    n_ctx = -(-(settings.n_ctx or model_map.default_ctx) // CTX_STEP) * CTX_STEP
    n_batch = min(n_batch or max(settings.n_ubatch, WIDE_UBATCH), n_ctx)  # for which Llama reserves logits
    arguments: dict[str, object] = {
        # Dense weights in anonymous memory: the kernel cannot drop them under a memory limit to read
        # them again for every token, and a file that is truncated later cannot end the process by SIGBUS.
        "use_mmap": False,
        "n_ctx": n_ctx,
        "n_batch": n_batch,
        "n_threads": n_threads,
        "n_threads_batch": n_threads,
        "verbose": verbose,
    }
    # Llama redirects the process's stdout and stderr while it loads, which two threads must not do at once.
    with _loading, interception.managing(settings, model_map, placed):
        try:
            model = llama_cpp.Llama(path, **arguments | llama_kwargs)
        except UnicodeEncodeError:
            raise PyorchError(f"{path!r} is no name in UTF-8, and llama_cpp opens no other: rename the file") from None
        except ValueError as error:
            raise PyorchError(f"{path}: {error}") from error
        except MemoryError as error:  # numpy's, of the logits of a batch, or of a context with logits_all
            raise BudgetError(f"{path} does not fit: {_of_logits(error)}") from None
    if settings.n_ctx > model_map.trained_ctx:
        fatal.notice(f"note: the model was trained with {model_map.trained_ctx} tokens of context: beyond them, of "
                     f"{settings.n_ctx}, it may answer nonsense")
    return Model(model, find(model.model))


def _of_logits(error: MemoryError) -> str:
    """Which number to lower where logits find no memory."""
    n_tokens, n_vocab = getattr(error, "shape", (0, 1))
    most = memory.memory_limit().free_bytes // (4 * n_vocab)
    return (f"logits of {n_tokens} tokens need {format_bytes(4 * n_vocab * n_tokens)}: make n_batch, or n_ctx with "
            f"logits_all, {most} or less")


describe(load)
