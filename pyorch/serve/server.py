"""Runs llama-server with the experts of its model under a budget."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import llama_cpp.llama_cpp as llama

from pyorch.errors import PyorchError, one_line
from pyorch.llama import cores, device_parameters, following, logs, measure, memory
from pyorch.llama.context_plan import CTX_STEP, check_context, check_ubatch, default_ubatch, plan_context, plan_devices
from pyorch.llama.managed import ManagedModel, loading
from pyorch.llama.schemas import check_schema
from pyorch.planning.concurrency import Concurrency, SlotMemory, choose_slots
from pyorch.runtime.engine import Engine
from pyorch.runtime.model_map import ModelMap
from pyorch.serve import llama_server, pages, tools
from pyorch.serve.address import Address, free_address
from pyorch.serve.echo import Echo
from pyorch.serve.ending import GRACE_SECONDS, Ending
from pyorch.serve.failures import GOES_ON, PATHS, TEXT_PATHS, explained, files_of, refuse_text
from pyorch.serve.library import lib, served_context
from pyorch.serve.llama_server import Flags, Root
from pyorch.serve.metrics import Metrics
from pyorch.serve.origins import ALL, Origins
from pyorch.serve.prompts import Prompts
from pyorch.serve.residency import Residency
from pyorch.serve.routes import Answer, Request, Routes, as_json, first_answer, own
from pyorch.serve.vocabulary import TokenizerRoutes
from pyorch.settings.budget import AUTO, RESIDENT, Budget
from pyorch.settings.device_options import NONE
from pyorch.settings.settings import Settings
from pyorch.sizes import counted, format_bytes


def serve(
    path: str,
    budget: Budget | int | str = AUTO,
    flags: Sequence[str] = (),
    *,
    verbose: bool = False,
    stats_every: float | None = None,
    as_json: bool = False,
    grace: float = GRACE_SECONDS,
    prompt_cache: int = 0,
    beside: Beside | None = None,
    placed: bool = False,
    **options: object,
) -> int:
    """Serves a model until SIGINT or SIGTERM. Call it on the main thread.

    If a device of another process is lost, the running requests fail, and the model is loaded again without it.

    Args:
        path: The model's file.
        budget: The memory for experts.
        flags: Flags of llama-server. Others get defaults for a model under a budget.
        verbose: Whether llama-server logs its own messages.
        stats_every: Seconds between statistics, which are also printed at the end.
        as_json: Whether to print statistics to stdout, as a JSON object on each line.
        grace: Seconds for running requests to finish, see pyorch.serve.ending.
        prompt_cache: Bytes for all models' prompts that are kept after the end, see pyorch.serve.prompts.
        beside: Returns a context, which is entered on another thread once requests are answered, and left before the
            engine ends.
        placed: Whether other servers will compute experts.
        options: Options of pyorch.load. Learned data is written to the maps at the end.

    Returns:
        The exit status: 0 after a signal, 2 if the server could not start. A second signal ends the process instead.

    Raises:
        PyorchError: The model, an option or the address cannot be used.
    """
    settings = Settings(budget=budget, **options)
    llama_server.check(flags)
    given = llama_server.Flags(flags)
    if any(name in given.arguments for name in llama_server.MODEL.names):
        raise PyorchError("the model to serve is the argument of `pyorch serve`: it cannot be given again after `--`")
    for name, option, value in (("--ctx", llama_server.CTX_SIZE, settings.n_ctx),
                                ("--ubatch", llama_server.UBATCH, settings.n_ubatch),
                                ("--threads", llama_server.THREADS, settings.n_threads)):
        twice = next((argument for argument in flags if argument in option.names), None)
        if value and twice:
            raise PyorchError(f"{name} {value} is given, and {twice} after `--`: give one of them")
        if value:
            given.arguments += (option.names[0], str(value))
    address = free_address(given)
    origins = Origins.of(given)
    given.replace(llama_server.CORS_ORIGINS, ALL)  # it answers requests only that the rule of the origins allows
    given.arguments += ("-m", path)
    root = given.root
    given.add_defaults()
    # llama-server would show the path. A comma separates two names.
    given.default(llama_server.ALIAS, "--alias", os.path.basename(path).replace(",", "_"))
    asked_ctx = given.slot_ctx
    given.default(llama_server.CTX_SIZE, "-c", 4096)
    chooses_slots = not (placed or any(map(given.has, llama_server.OF_SLOTS)))
    with Ending(grace) as ending, contextlib.ExitStack() as connections:
        began_again = False
        while True:
            server = llama_server.Flags(given.arguments)
            if not verbose:
                server.default(llama_server.VERBOSITY, "-lv", 1)
            try:
                slots = _choose_slots(path, settings, server) if chooses_slots else ""
                with planned(path, settings, server, placed) as record:
                    if record.devices is not None and not began_again:
                        connections.enter_context(device_parameters.connected(record.devices))
                    concurrency = Concurrency.of(record.map.layers, server.n_slots)
                    prompts = Prompts(record, server, prompt_cache)
                    watch = _Watch(record, address, root, concurrency, stats_every, as_json, beside,
                                   ending.begin_again, prompts, slots, asked_ctx)
                    _routes = our_routes(record, address.prefix, server, root, concurrency)
                    _routes.check_heads(origins.refusal)  # the routes must outlive the server
                    prompts.add_to(_routes)
                    with ending.serving(lambda: watch.ready, prompts.keep, lambda: (record.save(), watch.print_last())):
                        watch.start()
                        try:
                            status = llama_server.call(server.arguments, record.devices)
                        finally:
                            watch.stop()
                    watch.print_last()
            except PyorchError:
                if not began_again or settings.device == NONE:
                    raise
                left = NONE  # a remaining device is lost, too
            else:
                # A device is lost while the server runs, or a remaining one while the model is loaded again.
                may_be_lost = ending.again or (began_again and not watch.ready)
                left = record.devices_left() if may_be_lost else settings.device
                if not ending.again and left == settings.device:
                    # llama-server has printed why it did not start.
                    return status if watch.ready or status == 0 else 2
            began_again = True
            of_none = {"vram_budget": AUTO, "device_misses": None, "device_ahead": 0} if left == NONE else {}
            settings = dataclasses.replace(settings, device=left, **of_none)
            given.leave_device(left)


def _choose_slots(path: str, settings: Settings, server: Flags) -> str:
    """Sets the number of slots that suits the model and the memory. Returns a sentence with the reason."""
    with ModelMap(path) as model_map:
        layers, info = model_map.layers, model_map.info
        n_ctx = server.context_params().n_ctx or model_map.trained_ctx
        budget = Budget.parse(settings.budget)
        n_bytes = 0 if not layers else info.slots_bytes if budget == RESIDENT else (
            None if budget.amount is None else budget.resolve(info))
        free = memory.memory_limit().rest_bytes(info.dense_bytes, server.other_bytes())
        if model_map.kv_bytes(n_ctx) <= free:  # otherwise the planner refuses it, and names the largest that fits
            n_ctx = min(n_ctx, model_map.trained_ctx)  # as llama-server lowers it
        n_ctx = -(-n_ctx // CTX_STEP) * CTX_STEP
        n_slots, why = choose_slots(layers, SlotMemory(free, model_map.kv_bytes(n_ctx), n_bytes))
    server.set_slots(n_slots, n_ctx)
    return f"{counted(n_slots, 'slot')}: {why}; -- -np N sets another number"


def our_routes(record: ManagedModel, prefix: str, server: Flags, root: Root, concurrency: Concurrency) -> Routes:
    """Returns the routes that llama-server lacks, and those to which pyorch's answer adds something."""
    routes = Routes(prefix, files_of(record.map))
    residency = Residency(record, concurrency, local_only=not server.api_keys)
    routes.add("GET", "/residency", residency.get)
    routes.add("POST", "/residency", residency.post)
    routes.add("GET", "/metrics", Metrics(record).get)
    routes.check_schemas(check_schema)
    aliases = [*filter(None, server.value(llama_server.ALIAS).split(","))] or [os.path.basename(record.path)]
    for name in aliases:  # a route's path is a pattern
        routes.add("GET", "/v1/models/" + re.sub(r"([][.^$|(){}*+?\\])", r"\\\1", name), _model)
    routes.add("GET", "/props", functools.partial(_props, record))
    routes.add("GET", "/lora-adapters", _adapters)
    echo = Echo(record, served_context, aliases[0])
    tokenizer = TokenizerRoutes(served_context)
    routes.add("GET", "/tokenizer_info", tokenizer.info)
    routes.add("POST", "/tokenize", tokenizer.tokenize, when=lib.PYORCH_SERVER_FIRST)
    routes.add("POST", "/detokenize", tokenizer.detokenize)
    for path in PATHS:
        routes.add("POST", path, explained(record), when=lib.PYORCH_SERVER_FAILED)
    for path in (*PATHS, *tools.COUNTING_PATHS):
        handlers = [*(refuse_text(aliases[0], record) if path in TEXT_PATHS else ()), tools.check_grammars,
                    *([tools.require_functions] if path in tools.CHAT_PATHS else []),
                    *([tools.require_template] if path in tools.PATHS else []),
                    *([echo.post] if path == "/v1/completions" else []),
                    *([tools.translate] if path in (*tools.PATHS, *tools.COUNTING_PATHS) else [])]
        routes.add("POST", path, first_answer(*handlers), when=lib.PYORCH_SERVER_FIRST)
    pages.add_to(routes, bool(server.api_keys), root)
    return routes


def _model(_: Request) -> Answer:
    """Answers as /v1/models lists the model."""
    return as_json(json.loads(own("/v1/models"))["data"][0])


def _props(record: ManagedModel, request: Request) -> Answer | None:
    """Adds the order of the experts. Users see the names of files without their folders."""
    if request.own_status != 200:
        return None
    said = json.loads(request.own)
    layout = record.plan.layout
    ours = {} if layout is None else {"kernels": str(layout)}
    return as_json(said | {"model_path": os.path.basename(said["model_path"])} | ours)


def _adapters(request: Request) -> Answer | None:
    if request.own_status != 200:
        return None
    return as_json([each | {"path": os.path.basename(each["path"])} for each in json.loads(request.own)])


@contextlib.contextmanager
def planned(path: str, settings: Settings, server: Flags, placed: bool) -> Iterator[ManagedModel]:
    """Captures the model that is loaded inside for an engine with the budget, and selects the ubatch."""
    logs.install()
    logs.set_quiet(True)
    # The default parameters say "mapped", so the planner counts dense weights as not allocated yet.
    params = llama.llama_model_default_params()
    # Without a device, no layers: then llama-server gets no device, whatever -ngl is.
    params.n_gpu_layers = server.n_gpu_layers if settings.device != NONE else 0
    with loading(path, ModelMap(path), settings, params, placed, server.context_params()) as record:
        server.place(settings.device, record.devices, record.params)
        cores.place(settings, max(server.number(option, 0)
                                  for option in (llama_server.THREADS, llama_server.THREADS_BATCH)))
        try:
            ubatch = default_ubatch(record)
            params = server.context_params()
            widen = not server.has(llama_server.UBATCH)
            check_context(record, params, widen)
            if record.plan.automatic:
                record.contexts[0] = server.other_bytes()  # reserved like a context's memory
                plan_context(record, params, widen, is_loaded=False)
                ubatch = params.n_ubatch
            else:
                # If llama.cpp refuses the context here, we can report it; in llama-server it would end the process.
                measure.sizes_of(record.map, record.params, params)
            server.default(llama_server.UBATCH, "-ub", ubatch)
            check_ubatch(record, server.number(llama_server.UBATCH, 512))
            if record.plan.has_share:  # llama-server decodes two tokens to test its context
                record.engine.expect_trial()
            # llama-server computes at most a batch at once.
            server.default(llama_server.BATCH, "-b", max(2048, server.number(llama_server.UBATCH, 512)))
            plan_devices(record, server.context_params(), is_loaded=False)
            yield record
        finally:
            if record.engine is not None:
                try:
                    record.save()
                finally:
                    record.close()


Beside = Callable[[Engine | None, Address], AbstractContextManager[None]]


_KEEP_EVERY = 300.0  # seconds: if a server is killed, the next one starts with the last saved experts


class _Watch(threading.Thread):
    """Watches a running server: reports when it is ready, why decodes failed, and statistics."""

    def __init__(
        self, record: ManagedModel, address: Address, root: Root, concurrency: Concurrency,
        stats_every: float | None, as_json: bool, beside: Beside | None, on_lost: Callable[[], None],
        prompts: Prompts, slots: str, asked_ctx: int,
    ) -> None:
        """Args: see serve(). on_lost: called once, when the device that computes is lost. slots: why there are so many,
            "" if the user said how many. asked_ctx: the user's tokens of context for a request, 0 if not given.
        """
        super().__init__(daemon=True)
        self.ready = False
        self._record = record
        self._address = address
        self._root = root
        self._engine = record.engine
        self._concurrency = concurrency
        self._stats_every = stats_every
        self._as_json = as_json
        self._beside = beside
        self._on_lost = on_lost
        self._prompts = prompts
        self._slots = slots
        self._asked_ctx = asked_ctx
        self._contexts = contextlib.ExitStack()
        self._ended = threading.Event()
        self._began = time.monotonic()

    def run(self) -> None:
        # Polls only after the model is loaded: the imports of a request would delay the loading thread.
        while not (served_context() and self._address.is_healthy()):
            if self._ended.wait(0.05):
                return
        self._prompts.restore()
        self.ready = True
        self._say(f"serving {os.path.basename(self._record.path)} at {self._address.url} ({self._budget()})")
        if self._slots:
            self._say(self._slots)
        trained_ctx = llama.llama_model_n_ctx_train(llama.llama_get_model(served_context()))
        if self._asked_ctx > trained_ctx:  # llama-server lowers it, and logs a warning that few users see
            self._say(f"note: a request has at most {trained_ctx} tokens of context, and not {self._asked_ctx}: the "
                      "model was trained with no more")
        self._record.warm_up()
        self._record.on_budget = self._say
        following.follow(self._record)
        if self._address.port:
            chat = "" if self._root is Root.LIVE_VIEW else f"chat at {self._address.url}/, "
            self._say(f"{chat}live view at {self._address.url}/pyorch, API for programs at {self._address.url}/v1")
        if self._engine is not None and not self._slots:
            advice = self._concurrency.advice(self._record.budget_bytes())
            if advice:
                self._say(f"note: {advice}")
        if self._beside is not None:
            self._contexts.enter_context(self._beside(self._engine, self._address))
        devices = self._record.devices
        watched = devices is not None and devices.is_remote
        if self._engine is None and not watched:
            return
        failures = 0
        keep_at = time.monotonic() + _KEEP_EVERY
        due = time.monotonic() + self._stats_every if self._stats_every else float("inf")
        while not self._ended.wait(min(0.5, self._stats_every or 0.5)):
            if watched and devices.is_lost():
                self._say(f"{self._record.lost()}; {GOES_ON}")
                self._on_lost()
                watched = False
            if self._engine is None:
                continue
            n = self._engine.stats().failures
            if n > failures:
                self._say(f"{n - failures} failed: {self._engine.error()}")
                failures = n
            if time.monotonic() >= keep_at:
                self._record.keep()
                self._prompts.keep()
                keep_at = time.monotonic() + _KEEP_EVERY
            if time.monotonic() >= due:
                due += self._stats_every
                try:
                    self._print_stats()
                except OSError:  # stderr or stdout is closed, but the server goes on
                    due = float("inf")

    def stop(self) -> None:
        """Stops watching. REQUIRES: the server has ended, the engine has not."""
        self._ended.set()
        self.join()
        self._contexts.close()

    def print_last(self) -> None:
        """Prints the statistics of the whole time if the server was ready."""
        if self.ready and self._engine is not None:
            self._print_stats()

    def _budget(self) -> str:
        if self._engine is None:
            if not self._record.map.layers:
                return "a dense model: it has no experts to manage"
            devices = self._record.devices
            return f"llama.cpp keeps all experts {f'on {devices.name}' if devices is not None else 'in memory'}"
        return f"budget {format_bytes(self._engine.stats().budget_bytes)}"

    def _print_stats(self) -> None:
        stats, lossy, speculated = (
            self._engine.stats(),
            self._engine.substitution_stats(),
            self._engine.speculation_stats(),
        )
        if self._as_json:
            line = {
                "seconds": round(time.monotonic() - self._began, 3),
                **dataclasses.asdict(stats),
                "substitution": dataclasses.asdict(lossy) if lossy.tokens else None,
                "speculation": dataclasses.asdict(speculated) if speculated.tokens else None,
            }
            print(json.dumps(line), flush=True)
            return
        self._say(
            f"experts: {stats.in_memory}, {format_bytes(stats.bytes_read)} read, waited "
            f"{stats.stall_ns / 1e9:.2f} s; "
            f"budget {format_bytes(stats.budget_bytes)}, peak {format_bytes(stats.peak_bytes)}"
        )
        if stats.on_device:
            self._say(f"device: {stats.on_device}")
        if speculated.tokens:
            self._say(f"lossy: {speculated.slots} expert slots computed as predicted, "
                      f"{speculated.right} of them as their routers chose")
        if lossy.tokens:
            self._say(
                f"lossy: {lossy.lossy_tokens} of {lossy.tokens} token-layers changed, {lossy}"
            )

    @staticmethod
    def _say(sentence: str) -> None:
        sys.stderr.write(f"pyorch: {one_line(sentence)}\n")  # at once: other threads write lines, too
        sys.stderr.flush()
