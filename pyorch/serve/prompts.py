"""Keeps the KV cache of a server's slots in the user's cache directory, so that the next server need not compute it.

    pyorch/prompts/KEY/DIGEST.kv        a slot as llama-server saves it: tokens and their KV

KEY identifies everything that changes a KV cache; DIGEST is the digest of the file's bytes. llama-server itself
compares the tokens with those in a request. Nothing is kept if a setting is lossy, or was: then the KV depends on the
experts that were in memory.

Each reader and writer holds a lock. If a process ends while it writes or tries a file, that file remains without a
holder of the lock. Both kinds are deleted, because llama.cpp ends the process if it cannot read a file.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import llama_cpp
import llama_cpp.llama_cpp as llama

from pyorch import _libs
from pyorch.errors import PyorchError
from pyorch.files import check_free_space, replace
from pyorch.llama.managed import ManagedModel
from pyorch.runtime import fatal, kept
from pyorch.serve import llama_server, routes
from pyorch.serve.failures import files_of
from pyorch.serve.library import lib, served_context
from pyorch.serve.llama_server import Flags
from pyorch.serve.routes import Answer, Request, Routes, refusal
from pyorch.settings.option import texts
from pyorch.sizes import counted

LEAST_TOKENS = 64  # shorter prompts are not kept

_SLOT = "/slots/:id_slot"
_SECONDS = {"save": 5.0, "restore": 30.0}  # for each slot; short for saving, because the user waits for the end

# With these flags a slot has more than tokens and their KV, or another program saves it.
_NOT_WITH = re.compile(r"--?(slot-save-path|spec|md$|model-draft|mm$|mmproj|embedding|rerank|no-cache-prompt|lora"
                       r"|control-vector).*")

# Settings that change no bit of the KV.
_FREE = {"budget", "policy", "prefetch", "reads", "direct_io", "packed", "pools", "maps", "mirror", "warm",
         "cpus"}


class Prompts:
    """The kept prompts of one server. Adds their folder to the server's flags."""

    def __init__(self, record: ManagedModel, server: Flags, limit: int) -> None:
        """Args:
            record: The served model.
            server: The flags of llama-server.
            limit: The bytes for the files of all models; 0: neither write nor read files.
        """
        self._record, self._limit, self._n_slots = record, limit, server.n_slots
        self._has_whole_windows = server.has(llama_server.SWA_FULL)
        self._directory: Path | None = None
        self._lock = threading.Lock()
        self._files: dict[int, Path] = {}  # by slot: the file that was read or written last
        cache = kept.directory()
        settings = record.plan.settings
        if cache is None or not limit or not settings.warm or settings.lossy or _is_more(server):
            return
        if record.devices is not None:  # rounding depends on which experts the device had
            return
        with contextlib.suppress(OSError):
            directory = cache / "prompts" / _key(record, server)
            directory.mkdir(parents=True, exist_ok=True)
            directory.parent.chmod(0o700)  # the files contain the users' texts
            server.arguments += ("--slot-save-path", str(directory))
            self._directory = directory

    def add_to(self, routes: Routes) -> None:
        """Refuses requests of clients to save slots: llama-server would let them write to the folder."""
        if self._directory is not None:
            routes.add("POST", _SLOT, _refuse, when=lib.PYORCH_SERVER_FIRST)

    def restore(self) -> None:
        """Fills the slots of a server that has not answered a request yet."""
        if self._directory is None or self._forgets():
            return
        with contextlib.suppress(OSError), _locked(self._directory.parent):
            for slot, file in enumerate(_newest(self._directory.glob("*.kv"))[: self._n_slots]):
                with contextlib.suppress(OSError):
                    if _digest(file) != file.stem:
                        fatal.notice(f"note: {file} is damaged and was deleted")
                        file.unlink(missing_ok=True)
                        continue
                    tried = file.replace(file.with_suffix(".trying"))
                    if self._ask(slot, "restore", tried.name).get("n_restored"):
                        self._files[slot] = file
                    tried.replace(file)
        if self._files:
            fatal.notice(f"{counted(len(self._files), 'prompt')} of the last time need not be computed again")

    def keep(self) -> None:
        """Writes the content of idle slots. Errors are ignored."""
        if self._directory is None or self._was_lossy() or self._forgets():
            return
        with self._lock, contextlib.suppress(OSError, PyorchError), _locked(self._directory.parent):
            self._directory.mkdir(parents=True, exist_ok=True)  # another server may have removed it
            check_free_space(self._directory, self._limit)
            for slot in range(self._n_slots):
                part = self._directory / f"{slot}.part"
                try:
                    saved = self._ask(slot, "save", part.name)
                    if not saved:  # the slot is busy, or the disk is slow
                        break
                    # llama.cpp does not check that its last bytes were written.
                    is_whole = part.stat().st_size == saved.get("n_written")
                    if is_whole and saved["n_saved"] >= LEAST_TOKENS and not self._was_lossy():
                        file, before = self._directory / f"{_digest(part)}.kv", self._files.get(slot)
                        replace(part, file)
                        self._files[slot] = file
                        if before not in (None, *self._files.values()):  # the new file has at least the same tokens
                            before.unlink(missing_ok=True)
                finally:
                    part.unlink(missing_ok=True)
            self._prune()

    def _forgets(self) -> bool:
        """Returns whether the model keeps only the end of a text: a recurrent state, or a window of tokens.

        Then keeping is useless: a slot has a text with its answer, and another prompt with the same beginning would be
        computed again.
        """
        context = served_context()
        if not context:
            return True
        model = llama.llama_get_model(context)
        window = 0 if self._has_whole_windows else llama.llama_model_n_swa(model)
        return (llama.llama_model_is_recurrent(model) or llama.llama_model_is_hybrid(model)
                or 0 < window < llama.llama_n_ctx_seq(context))

    def _was_lossy(self) -> bool:
        """Returns whether a lossy setting was used; settings can change while the server runs."""
        engine = self._record.engine
        return engine is not None and bool(engine.substitution_stats().tokens or engine.speculation_stats().tokens)

    def _ask(self, slot: int, action: str, name: str) -> dict:
        answer = routes.own(_SLOT, f"id_slot={slot}&action={action}", json.dumps({"filename": name}),
                            _SECONDS[action])
        return json.loads(answer or "{}")

    def _prune(self) -> None:
        """Keeps the newest files: as many as this server has slots, and of all servers as many as the limit allows."""
        for left in (*self._directory.parent.glob("*/*.part"), *self._directory.parent.glob("*/*.trying")):
            left.unlink(missing_ok=True)
        own = _newest(self._directory.glob("*.kv"))
        for file in own[self._n_slots :]:
            file.unlink(missing_ok=True)
        n_bytes = 0
        for file in _newest(self._directory.parent.glob("*/*.kv")):
            n_bytes += file.stat().st_size
            if n_bytes > self._limit:
                file.unlink(missing_ok=True)
        for directory in self._directory.parent.iterdir():
            with contextlib.suppress(OSError):  # the folder is not empty
                if directory != self._directory:
                    directory.rmdir()


def _refuse(_: Request) -> Answer:
    return refusal(501, "pyorch saves slots: start the server with -- --slot-save-path DIR to save them yourself")


def _is_more(server: Flags) -> bool:
    given = [*server.arguments, *(name for name in ("--mmproj",) if server.has(llama_server.MMPROJ)),
             *(name for name in ("--model-draft",) if server.has(llama_server.DRAFT_MODEL))]
    return any(_NOT_WITH.fullmatch(argument) for argument in given)


def _key(record: ManagedModel, server: Flags) -> str:
    """Returns the digest of everything that changes a KV cache.

    Raises:
        OSError: A file is missing.
    """
    without = [name for option in (llama_server.HOST, llama_server.PORT, llama_server.API_KEY, llama_server.PARALLEL,
                                   llama_server.CTX_SIZE) for name in option.names]
    arguments = [argument for before, argument in zip(("", *server.arguments), server.arguments)
                 if before not in without]
    named = {argument for argument in arguments if os.path.isfile(argument)}
    files = {*files_of(record.map), *named}
    libraries = [path for path in _libs.lib_dir().iterdir() if path.is_file()]
    settings = {name: value for name, value in texts(record.plan.settings, defaults=True).items() if name not in _FREE}
    environment = {name: value for name, value in os.environ.items() if name.startswith(("LLAMA_", "GGML_"))}
    processor = re.findall(r"^(?:model name|flags|Features)\s*:.*$", _processor(), re.MULTILINE)[:2]
    return kept.name_of("kv", (
        [(os.path.realpath(file), *_state(file)) for file in sorted(files)], arguments, sorted(settings.items()),
        sorted(environment.items()), sorted((path.name, *_state(path)) for path in libraries), processor,
        record.plan.plain, server.slot_ctx, llama_cpp.__version__))


def _state(file: str | Path) -> tuple[int, ...]:
    """Identifies a file's state. It includes the inode's change time, which a copy over the file cannot set back."""
    status = os.stat(file)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _processor() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/cpuinfo").read_text()
    return ""


def _newest(files: Iterator[Path]) -> list[Path]:
    """Returns the files that still exist, the newest first. Other servers delete files at the same time."""
    found = []
    for file in files:
        with contextlib.suppress(OSError):
            found.append((file.stat().st_mtime_ns, file))
    return [file for _, file in sorted(found, reverse=True)]


def _digest(file: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with file.open("rb") as data:
        while part := data.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()



@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Holds the lock of the folder.

    Raises:
        OSError: The file system has no locks.
    """
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
