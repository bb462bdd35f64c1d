"""Several models behind one address: each has a `pyorch serve` process, which runs while it is needed.

llama-server's router is not used: it runs llama-server for each model, and limits the number of models, not memory.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pyorch.errors import PyorchError, without_folders
from pyorch.llama import memory
from pyorch.runtime.model_map import ModelMap
from pyorch.serve.address import Address
from pyorch.serve.model_process import Model, end
from pyorch.settings.budget import Budget


class NotLoaded(PyorchError):
    """The model is not loaded, and the request only reads its state."""


class Models:
    """The served models, by name.

    A model is loaded in addition to others if it fits into the free memory. Otherwise idle models are unloaded first,
    the least recently used one before the others, and the load waits for models that answer. If no other model is
    loaded, a model of any size is loaded.
    """

    def __init__(
        self, find_paths: Callable[[], dict[str, Path]], budget: Budget, keep_alive: float, key: str,
        command: Callable[[str, Path, int], list[str]],
    ) -> None:
        """Args:
            find_paths: Returns the present files, by name.
            keep_alive: Seconds before an idle model is unloaded, unless a request gives another time.
            key: The API key of the models' processes, "" for none.
            command: Returns the command that serves a model at any port and writes the port to a descriptor.
        """
        self._find_paths = find_paths
        self._budget = budget
        self.keep_alive = keep_alive
        self.key = key
        self._command = command
        self._changed = threading.Condition()
        self._making_room = threading.Lock()  # one load at a time reads and reserves free memory
        self.ending = threading.Event()
        self.by_name = {name: Model(name, path, keep_alive) for name, path in find_paths().items()}
        threading.Thread(target=self._unload_idle, daemon=True).start()

    def refresh(self) -> dict[str, Model]:
        """Returns the present models. A loaded model stays although its file is gone."""
        try:
            paths = self._find_paths()
        except PyorchError:  # the folder is missing at the moment
            return self.by_name
        with self._changed:
            known = self.by_name
            kept = {name: model for name, model in known.items() if name not in paths and (model.busy or model.process)}
            for name, path in paths.items():
                model = known.get(name)
                kept[name] = model if model and (model.busy or model.process or model.path == path) else Model(
                    name, path, self.keep_alive)
            self.by_name = kept  # a new dictionary: other threads may read the old one
        return kept

    def find(self, asked: str) -> Model | None:
        """Returns the model of that name. Ollama's programs add a tag, and commands use the file's name."""
        names = (asked, f"hf:{asked}", asked.removesuffix(":latest"), asked.removesuffix(".gguf"))
        for models in (lambda: self.by_name, self.refresh):
            by_name = models()
            name = next((name for name in names if name in by_name), None)
            if name is not None:
                return by_name[name]
        return None

    def loaded(self) -> list[Model]:
        """Returns the loaded models, the last used one first."""
        loaded = [model for model in self.by_name.values() if model.is_loaded()]
        return sorted(loaded, key=lambda model: (model.busy > 0, model.used), reverse=True)

    @contextlib.contextmanager
    def held(self, model: Model, keep_alive: float | None = None) -> Iterator[int]:
        """Loads a model if necessary and keeps it loaded inside the context. Yields its port.

        Args:
            keep_alive: Seconds without a request after which the model is unloaded; None: the server's default.

        Raises:
            PyorchError: The model cannot be loaded.
        """
        with self._busy(model, is_use=True) as model:
            self._load_once(model)
            model.keep_alive = self.keep_alive if keep_alive is None else keep_alive
            yield model.port

    @contextlib.contextmanager
    def looked_at(self, model: Model) -> Iterator[int]:
        """Keeps a loaded model inside the context, without counting as a use. Yields its port.

        Raises:
            NotLoaded: The model is not loaded.
        """
        with self._busy(model, is_use=False) as model:
            if not model.is_loaded():
                raise NotLoaded(f"{model.name} is not loaded: a request for an answer loads it, looking at it does not")
            yield model.port

    def unload(self, model: Model) -> None:
        """Unloads a model, after its running and waiting requests."""
        with self._changed:
            model.keep_alive = 0.0
            process = model.process if model.is_loaded() and not model.busy else None
            if process is not None:
                model.process = None
        if process is not None:
            end(model.name, process, "as a request said")

    def tell_to_end(self) -> list[subprocess.Popen]:
        """Sends each process the signal to end; a second signal ends it at once. Returns the processes."""
        self.ending.set()
        with self._changed:
            running = [model.process for model in self.by_name.values() if model.process is not None]
            self._changed.notify_all()
        for process in running:
            process.terminate()
        return running

    @contextlib.contextmanager
    def _busy(self, found: Model, is_use: bool) -> Iterator[Model]:
        """Counts a request for the model that now has the name of `found`. Yields it."""
        with self._changed:
            if found.name not in self.by_name:  # its file was removed meanwhile
                self.by_name = {**self.by_name, found.name: found}
            model = self.by_name[found.name]
            if not model.busy:
                model.waits = time.monotonic()
            model.busy += 1
        try:
            yield model
        finally:
            with self._changed:
                model.busy -= 1
                model.used = time.monotonic() if is_use else model.used
                self._changed.notify_all()

    def _load_once(self, model: Model) -> None:
        """Loads a model in one thread. Other threads wait for it, and fail if the load fails."""
        with self._changed:
            failures = model.failures
            while model.loading:
                self._changed.wait()
            if model.failures != failures:
                raise PyorchError(model.said)
            if model.is_loaded():
                return
            model.loading = True
        try:
            self._load(model)
        except (PyorchError, OSError) as error:
            model.said, model.failures = without_folders(str(error), [model.path]), model.failures + 1
            raise PyorchError(model.said) from None
        finally:
            with self._changed:
                model.loading, model.promised = False, 0
                self._changed.notify_all()

    def _load(self, model: Model) -> None:
        self._make_room(model)
        with self._changed:
            if self.ending.is_set():
                raise PyorchError("the server ends")
            announced = model.begin(self._command)
        model.wait_until_it_serves(announced)

    def _make_room(self, model: Model) -> None:
        needed = self._needed_bytes(model.path)
        while True:
            with self._making_room:
                loaded = [other for other in self.by_name.values() if other.is_loaded()]
                free = self._free_bytes(loaded)  # asks their processes; only this load waits for them
                with self._changed:
                    loaded = sorted((other for other in self.by_name.values() if other.is_loaded()),
                                    key=lambda other: other.used)
                    coming = [other for other in self.by_name.values() if other.promised]
                    is_alone = not loaded and not coming
                    free -= sum(other.still_to_come() for other in coming)
                    if is_alone or self.ending.is_set() or needed <= free:
                        model.promised = needed
                        return
                    idle = next((other for other in loaded if not other.busy), None)
                    if idle is None:
                        process = None
                    else:
                        process, idle.process = idle.process, None
            if process is not None:
                end(idle.name, process, f"to make room for {model.name}")
                continue
            with self._changed:
                self._changed.wait(1.0)

    def _needed_bytes(self, path: Path) -> int:
        """Returns the bytes that a model needs.

        Raises:
            PyorchError: The file is no model, or the budget is too small for it.
        """
        with ModelMap(path) as model_map:
            info = model_map.info
            experts = info.slots_bytes if self._budget.amount is None else self._budget.resolve(info)
            return info.dense_bytes + experts + memory.memory_limit().margin_bytes

    def _unload_idle(self) -> None:
        while not self.ending.wait(0.5):
            now = time.monotonic()
            with self._changed:
                idle = [(model, model.process) for model in self.by_name.values()
                        if model.is_loaded() and not model.busy and now - model.used >= model.keep_alive]
                for model, _ in idle:
                    model.process = None
            for model, process in idle:
                end(model.name, process, f"idle for {model.keep_alive:g} s")

    def _free_bytes(self, loaded: Sequence[Model]) -> int:
        """Returns the free bytes under the memory limit, minus the bytes that loaded models may still allocate."""
        promised = 0
        for model in loaded:
            state = Address("127.0.0.1", model.port, "").get("/residency", self.key)
            if state is not None:  # None for a dense model
                totals = json.loads(state)["totals"]
                promised += totals["budget_bytes"] - totals["used_bytes"]
        return memory.memory_limit().free_bytes - promised
