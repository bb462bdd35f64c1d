"""Several models behind one address: each is served by a `pyorch serve` of its own, which runs while it is needed.

llama-server's router is not used: it runs llama-server for each model, and counts models in place of memory.
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
    """A request that only looks at a model does not load it."""


class Models:
    """The models that are served, by name.

    A model is loaded beside others if it fits into the free memory. Otherwise idle models are unloaded first, the least
    recently used one before the others, and the load waits for models that answer. A model that is alone is loaded
    whatever it needs.
    """

    def __init__(
        self, find_paths: Callable[[], dict[str, Path]], budget: Budget, keep_alive: float, key: str,
        command: Callable[[str, Path, int], list[str]],
    ) -> None:
        """Args:
            find_paths: Returns the files that there are now, by name.
            keep_alive: Seconds, for models of which a request says nothing else.
            key: The API key that the processes of the models ask for, "" for none.
            command: Serves a model at any port, and writes the port into a descriptor.
        """
        self._find_paths = find_paths
        self._budget = budget
        self.keep_alive = keep_alive
        self.key = key
        self._command = command
        self._changed = threading.Condition()
        self._making_room = threading.Lock()  # what is free is read and promised to one load at a time
        self.ending = threading.Event()
        self.by_name = {name: Model(name, path, keep_alive) for name, path in find_paths().items()}
        threading.Thread(target=self._unload_idle, daemon=True).start()

    def refresh(self) -> dict[str, Model]:
        """The models that there are now. A model whose file is gone stays while it is loaded."""
        try:
            paths = self._find_paths()
        except PyorchError:  # the folder is gone, for now
            return self.by_name
        with self._changed:
            known = self.by_name
            kept = {name: model for name, model in known.items() if name not in paths and (model.busy or model.process)}
            for name, path in paths.items():
                model = known.get(name)
                kept[name] = model if model and (model.busy or model.process or model.path == path) else Model(
                    name, path, self.keep_alive)
            self.by_name = kept  # threads may be reading the one before
        return kept

    def find(self, asked: str) -> Model | None:
        """The model that a request calls so. Ollama's programs add a tag, and commands take the name of a file."""
        names = (asked, f"hf:{asked}", asked.removesuffix(":latest"), asked.removesuffix(".gguf"))
        for models in (lambda: self.by_name, self.refresh):
            by_name = models()
            name = next((name for name in names if name in by_name), None)
            if name is not None:
                return by_name[name]
        return None

    def loaded(self) -> list[Model]:
        """The one that was used last comes first."""
        loaded = [model for model in self.by_name.values() if model.is_loaded()]
        return sorted(loaded, key=lambda model: (model.busy > 0, model.used), reverse=True)

    @contextlib.contextmanager
    def held(self, model: Model, keep_alive: float | None = None) -> Iterator[int]:
        """Loads a model if it is not loaded. It stays loaded inside, and its port is given.

        Args:
            keep_alive: Seconds without a request after which the model is unloaded; None: as many as the server says.

        Raises:
            PyorchError: The model cannot be loaded.
        """
        with self._busy(model, is_use=True) as model:
            self._load_once(model)
            model.keep_alive = self.keep_alive if keep_alive is None else keep_alive
            yield model.port

    @contextlib.contextmanager
    def looked_at(self, model: Model) -> Iterator[int]:
        """As held(), but raises NotLoaded if the model is not loaded, and does not count as a use."""
        with self._busy(model, is_use=False) as model:
            if not model.is_loaded():
                raise NotLoaded(f"{model.name} is not loaded: a request for an answer loads it, looking at it does not")
            yield model.port

    def unload(self, model: Model) -> None:
        """If a request waits for the model or is answered, the model is unloaded after that."""
        with self._changed:
            model.keep_alive = 0.0
            process = model.process if model.is_loaded() and not model.busy else None
            if process is not None:
                model.process = None
        if process is not None:
            end(model.name, process, "as a request said")

    def tell_to_end(self) -> list[subprocess.Popen]:
        """Each ends as `pyorch serve` does when it is told, told again at once."""
        self.ending.set()
        with self._changed:
            running = [model.process for model in self.by_name.values() if model.process is not None]
            self._changed.notify_all()
        for process in running:
            process.terminate()
        return running

    @contextlib.contextmanager
    def _busy(self, found: Model, is_use: bool) -> Iterator[Model]:
        """Of a model that was found, the one that has its name now."""
        with self._changed:
            if found.name not in self.by_name:  # its file went meanwhile
                self.by_name = {**self.by_name, found.name: found}
            model = self.by_name[found.name]
            model.busy += 1
        try:
            yield model
        finally:
            with self._changed:
                model.busy -= 1
                model.used = time.monotonic() if is_use else model.used
                self._changed.notify_all()

    def _load_once(self, model: Model) -> None:
        """One thread loads a model. Others wait for the model, and fail if that load fails."""
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
                free = self._free_bytes(loaded)  # asks their processes, for which nobody else waits
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
        """PyorchError for what is no model, or one for which the budget is too small."""
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
        """What may be allocated under the memory limit, less what experts were promised and have not taken yet."""
        promised = 0
        for model in loaded:
            state = Address("127.0.0.1", model.port, "").get("/residency", self.key)
            if state is not None:  # of a dense model
                totals = json.loads(state)["totals"]
                promised += totals["budget_bytes"] - totals["used_bytes"]
        return memory.memory_limit().free_bytes - promised
