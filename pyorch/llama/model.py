"""A loaded model: generation, residency, statistics; and load()."""

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

# Only the end of a prompt needs logits. Otherwise all n_batch rows would be reserved: 2048 rows of 150 000 floats
# are more than a gigabyte.
N_OUTPUTS_MAX = 64


_loading = threading.Lock()

SETTINGS = declared_options(Settings)  # load() takes them by name
# load() also takes keywords of Llama, which itself ignores unknown names.
_OF_LLAMA = tuple(name for name, parameter in inspect.signature(llama_cpp.Llama.__init__).parameters.items()
                  if parameter.kind is inspect.Parameter.KEYWORD_ONLY)


class Model:
    """A model in memory, made by load().

    Use it in one thread at a time. close() or a `with` block frees it.

    Attributes:
        llama: The llama_cpp.Llama with its whole API: chat completion, embeddings, logits, tokenization.
        map: The model map.
        engine: Manages the experts. None for a dense model, or if llama.cpp keeps the experts.
        layers: The blocks with routed experts, by il.
        residency: By il, bool[n_expert]; with a device uint8 (see Layer.residency).
    """

    def __init__(self, model: llama_cpp.Llama, record: ManagedModel) -> None:
        self.llama = model
        self._in_use = threading.RLock()
        self._closing = False
        self._text = object()  # the newest text
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
        """The names of the computing devices. "": only the processor computes."""
        devices = self._record.devices
        return devices.name if devices is not None else ""

    @property
    def note(self) -> str:
        """Why pyorch does not manage the model's experts, in a sentence. "": it manages them."""
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
        """Continues a prompt, piece by piece, until max_tokens or an end of text.

        Args:
            prompt: Text, or token ids.
            max_tokens: Tokens to generate at most.
            temperature: 0 is greedy.
            top_p: Sample from the most probable tokens with this sum of probabilities.
            top_k: Sample from this many tokens.
            seed: Of the sampling. None: random.
            stop: Texts that end the generation.
            sampling: Further arguments of llama_cpp.Llama.create_completion. `grammar` may be a text in llama.cpp's
                format (GBNF), or a llama_cpp.LlamaGrammar.

        Yields:
            Pieces of text.

        Raises:
            DeviceError: A computing device is lost.
            ExpertReadError: An expert could not be read. The model stays usable.
            PyorchError: The prompt is longer than the context, or empty for a model without a BOS token; the grammar is
                invalid; or results are not numbers, for example with damaged weights.
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
        """Answers a conversation with the model's own template, piece by piece.

        Args:
            messages: Dictionaries {"role": ..., "content": ...}.
            sampling: Further arguments of llama_cpp.Llama.create_chat_completion. `grammar` as for generate().

        Yields:
            Pieces of text.

        Raises:
            DeviceError: A computing device is lost.
            ExpertReadError: An expert could not be read. The model stays usable.
            PyorchError: As for generate(); or llama_cpp would ignore the "response_format", or its schema cannot be
                converted into a grammar.
        """
        sampling = self._with_grammar(sampling)
        form = sampling.get("response_format")
        if form is not None and (not isinstance(form, dict) or form.get("type") not in ("text", "json_object")):
            raise PyorchError(f'"response_format" is {form!r}, and must be {{"type": "json_object"}}, with a "schema" '
                              "or without")
        if form is not None and "schema" in form:  # llama_cpp allows any JSON if it cannot convert the schema
            grammar_of(json.dumps(form["schema"]))
        try:
            for chunk in self._step_by_step(self.llama.create_chat_completion(list(messages), stream=True, **sampling)):
                yield chunk["choices"][0]["delta"].get("content") or ""
        except ValueError as error:
            raise self._refusal(error) from error

    def _with_grammar(self, sampling: dict[str, Any]) -> dict[str, Any]:
        """Returns the keywords with a grammar for llama_cpp. PyorchError: the grammar is invalid."""
        given = sampling.get("grammar")
        if given is None or isinstance(given, llama_cpp.LlamaGrammar):
            return sampling
        if not isinstance(given, str):
            raise PyorchError(f"grammar is of type {type(given).__name__}, and must be text in llama.cpp's form, "
                              "GBNF, or a llama_cpp.LlamaGrammar")
        return sampling | {"grammar": compiled(given, self.llama.model)}

    def _step_by_step(self, chunks: Iterator[Any]) -> Iterator[Any]:
        """Yields chunks, and keeps other threads from freeing the model while it computes one.

        One text at a time: llama_cpp keeps only the state of the newest text.
        """
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
        """Checks one logit: a value that is not a number stays so in all later layers."""
        logits = llama.llama_get_logits_ith(self.llama.ctx, -1)
        if logits and not math.isfinite(logits[0]):
            raise PyorchError(f"{self._record.path} computes results that are not numbers: its weights are damaged, "
                              "so copy or convert it again")

    def _refusal(self, error: ValueError) -> PyorchError:
        """Returns Llama's error, with a remedy if the prompt is too long."""
        too_long = re.search(r"Requested tokens \((\d+)\) exceed context window of (\d+)", str(error))
        if too_long is None:
            return PyorchError(str(error))
        n_tokens, n_ctx = too_long.groups()
        return PyorchError(f"the prompt has {n_tokens} tokens, and the context window has room for {n_ctx}: make it "
                           "larger (--ctx N, in Python n_ctx=N), or the prompt shorter")

    def substitute(
        self, substitution: Substitution | str | None, buddies: Buddies | str | os.PathLike[str] | None = None
    ) -> None:
        """Replaces absent experts by resident ones in all layers (lossy).

        Args:
            substitution: The settings, or their text such as "max_replaced=3,min_entropy=p15". None: load absent
                experts again.
            buddies: The buddy lists, or their file. Default: the present lists, otherwise the sidecar next to the
                model.

        Raises:
            FormatError: The lists are damaged or belong to another model.
            PyorchError: The settings are invalid, or need lists or ghosts that are missing.
        """
        settings = Substitution.parse(substitution) if substitution is not None else None
        in_use = next((layer.buddies for layer in self.layers.values()), None)
        lists = find_buddies(settings, buddies if buddies is not None else in_use, self._record.plan.sidecars)
        if self.layers:
            find_ghosts(settings, self._record.plan.sidecars)
        for il in self.layers:  # checks all before it changes any
            check_substitution(settings or OFF, il, lists)
        for layer in self.layers.values():
            layer.substitute(settings, lists)

    def set_cache(self, masks: Mapping[int, np.ndarray] | None) -> None:
        """Makes substitution treat exactly these experts as resident.

        With all experts in memory, this shows the accuracy of a smaller cache.

        Args:
            masks: By il, bool[n_expert]; other layers use their real residency. None: all layers use it.

        Raises:
            PyorchError: A layer has no routed experts.
        """
        unknown = sorted((masks or {}).keys() - self.layers.keys())
        if unknown:
            raise PyorchError(f"layer {unknown[0]} has no routed experts")
        if self.engine is not None:
            for il in self.layers:
                self.engine.set_cache(il, (masks or {}).get(il))

    def speculate(self, prefetch: str | None, prompts: bool = False) -> None:
        """Makes layers compute with the experts that were forecast one layer earlier, and load no others (lossy).

        Layers with a substitution compute their routers' choice: forecast experts count as resident, and the
        substitution replaces the others.

        Args:
            prefetch: The predictor, such as "hybrid", or "auto". None: routers decide again, and the prefetch of
                load() applies.
            prompts: Also for prompts, which measures the loss of accuracy.

        Raises:
            PyorchError: Layers cannot compute with the predictor's forecasts.
        """
        if self.engine is None:
            return
        plan = self._record.plan
        forecast = plan.prefetch if prefetch is None else speculative(Prefetch.parse(prefetch), plan.sidecars)
        apply_prefetch(forecast, self.engine, plan.sidecars)
        self.engine.set_speculation("none" if prefetch is None else "all" if prompts else "decode")
        self._record.speculating = prefetch is not None

    def set_prefetch(self, prefetch: Prefetch | str) -> None:
        """Sets the predictor of all layers.

        Args:
            prefetch: As for load().

        Raises:
            FormatError: A sidecar that the predictor needs is damaged or belongs to another model.
            PyorchError: The predictor is unknown or lacks its sidecar.
        """
        if self.engine is not None:
            apply_prefetch(Prefetch.parse(prefetch), self.engine, self._record.plan.sidecars)

    def save_maps(self, path: str | os.PathLike[str] | None = None) -> None:
        """Writes the expert maps collected while decoding.

        Args:
            path: The file. Default: MODEL.maps.gguf next to the model.

        Raises:
            PyorchError: No predictor collects maps, or the file cannot be written.
        """
        if self.engine is None or self.engine.history is None:
            raise PyorchError(
                "no expert maps were collected: load the model with the prefetch expert-map"
            )
        self.engine.wait_idle()  # until the last token is in the maps
        self.engine.history.write(path or default_path(self.map.path, "maps"), self.map)

    def stats(self) -> ModelStats:
        """Returns the measurements since loading, or since reset_stats()."""
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
        """Resets the counters of the model and its engine."""
        llama.llama_perf_context_reset(self.llama.ctx)
        if self.engine is not None:
            self.engine.reset_stats()

    def close(self) -> None:
        """Frees the context, the model and then its engine. May be called again.

        Waits for a token that another thread computes with generate() or chat(). After it, generate(), its unfinished
        generators and `llama` raise PyorchError.

        Raises:
            PyorchError: Called in an observer or a source.
        """
        check(lib.pyorch_engine_free(ffi.NULL))  # refused inside a callback, whose decode this would wait for
        self._closing = True  # a computing thread would otherwise take the lock again until its text ends
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
        path: The file, or "hf:ORG/NAME[:QUANT|/FILE]" for a file of the Hugging Face hub, downloaded if needed.
        budget: "auto" (the memory that the limit leaves; it follows free memory while no lossy option is on), a share
            of the experts such as "40%", a size such as "1.5GiB" or "800MB", or bytes.
        n_batch: Tokens of one call of llama_decode. Default: the widest n_ubatch.
        managed: Make an engine, to observe and control experts, even if the whole model fits on a device, where
            llama.cpp would keep it.
        placed: Other servers will compute experts (Engine.connect, Engine.set_placement), as a share requires.
        source: Reads in place of the file, see Engine.
        use_extra_bufts: Repack weights of some types for faster kernels, dense ones and experts, as llama.cpp does.
        verbose: Print the log of llama.cpp.
        {options}
        llama_kwargs: Further arguments of llama_cpp.Llama.

    Returns:
        The loaded model.

    Raises:
        FormatError: The file is missing, damaged, incomplete or no GGUF.
        BudgetError: The budget is below the floor, or the model does not fit under the memory limit.
        PyorchError: An option is invalid, or the model lacks data that an option needs.
        TypeError: No option has this name.
    """
    path = os.fsdecode(path)
    if is_reference(path):
        from pyorch.hub.download import Hub  # huggingface_hub is slow to import

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
    # llama.cpp rounds it up. Llama does not, and would have no room for the tokens of such a prompt.
    n_ctx = -(-(settings.n_ctx or model_map.default_ctx) // CTX_STEP) * CTX_STEP
    n_batch = min(n_batch or max(settings.n_ubatch, WIDE_UBATCH), n_ctx)  # Llama reserves logits for it
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
        except MemoryError as error:  # of numpy, for the logits of a batch, or of a context with logits_all
            raise BudgetError(f"{path} does not fit: {_of_logits(error)}") from None
    if settings.n_ctx > model_map.trained_ctx:
        fatal.notice(f"note: the model was trained with {model_map.trained_ctx} tokens of context: beyond them, of "
                     f"{settings.n_ctx}, it may answer nonsense")
    return Model(model, find(model.model))


def _of_logits(error: MemoryError) -> str:
    """Returns which number to lower if memory is too small for logits."""
    n_tokens, n_vocab = getattr(error, "shape", (0, 1))
    most = memory.memory_limit().free_bytes // (4 * n_vocab)
    return (f"logits of {n_tokens} tokens need {format_bytes(4 * n_vocab * n_tokens)}: make n_batch, or n_ctx with "
            f"logits_all, {most} or less")


describe(load)
