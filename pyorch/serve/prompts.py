"""Prompts that outlive the server: what its slots have computed is kept in the user's cache directory, and the next
server that would compute the same begins with it.

    pyorch/prompts/KEY/DIGEST.kv        a slot as llama-server saves it: tokens, and their KV

KEY is of everything that changes what a KV cache holds; a file is named by the digest of its bytes. llama-server itself
compares the tokens with those of a request. Nothing is kept where a setting is lossy, or was: what is computed then
depends on the experts that were in memory.

Who reads or writes there holds a lock, so a file that is being written, or tried, while nobody holds it was left by a
process that ended over it: both are removed, for llama.cpp ends the process over a file that it cannot make sense of.
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

LEAST_TOKENS = 64  # of a prompt that is worth a file

_SLOT = "/slots/:id_slot"
_SECONDS = {"save": 5.0, "restore": 30.0}  # for a slot: who ends a server does not wait for long

# With which a slot is more than tokens and their KV, or is saved by somebody else.
_NOT_WITH = re.compile(r"--?(slot-save-path|spec|md$|model-draft|mm$|mmproj|embedding|rerank|no-cache-prompt|lora"
                       r"|control-vector).*")

# Settings that change no bit of what is computed.
_FREE = {"budget", "policy", "prefetch", "reads", "direct_io", "packed", "pools", "maps", "mirror", "warm",
         "cpus"}


class Prompts:
    """Of one server. limit: bytes that all files occupy, of all models; 0: nothing is kept, nor read.

    Adds the folder to the server's flags.
    """

    def __init__(self, record: ManagedModel, server: Flags, limit: int) -> None:
        self._record, self._limit, self._n_slots = record, limit, server.n_slots
        self._has_whole_windows = server.has(llama_server.SWA_FULL)
        self._directory: Path | None = None
        self._lock = threading.Lock()
        self._files: dict[int, Path] = {}  # of what slots held when they were read or written last
        cache = kept.directory()
        settings = record.plan.settings
        if cache is None or not limit or not settings.warm or settings.lossy or _is_more(server):
            return
        if record.devices is not None:  # who computes an expert there, and how it rounds, depends on what it had
            return
        with contextlib.suppress(OSError):
            directory = cache / "prompts" / _key(record, server)
            directory.mkdir(parents=True, exist_ok=True)
            directory.parent.chmod(0o700)  # they are what people wrote
            server.arguments += ("--slot-save-path", str(directory))
            self._directory = directory

    def add_to(self, routes: Routes) -> None:
        """Keeps clients from the folder, which llama-server would let them write to."""
        if self._directory is not None:
            routes.add("POST", _SLOT, _refuse, when=lib.PYORCH_SERVER_FIRST)

    def restore(self) -> None:
        """Fills the slots of a server that has not answered yet."""
        if self._directory is None or self._forgets():
            return
        with contextlib.suppress(OSError), _locked(self._directory.parent):
            for slot, file in enumerate(_newest(self._directory.glob("*.kv"))[: self._n_slots]):
                with contextlib.suppress(OSError):
                    if _digest(file) != file.stem:
                        fatal.notice(f"note: {file} is damaged, and removed")
                        file.unlink(missing_ok=True)
                        continue
                    tried = file.replace(file.with_suffix(".trying"))
                    if self._ask(slot, "restore", tried.name).get("n_restored"):
                        self._files[slot] = file
                    tried.replace(file)
        if self._files:
            fatal.notice(f"{counted(len(self._files), 'prompt')} of the last time need not be computed again")

    def keep(self) -> None:
        """Writes what slots hold that compute nothing. No error where it cannot."""
        if self._directory is None or self._was_lossy() or self._forgets():
            return
        with self._lock, contextlib.suppress(OSError, PyorchError), _locked(self._directory.parent):
            self._directory.mkdir(parents=True, exist_ok=True)  # another server may have removed it
            check_free_space(self._directory, self._limit)
            for slot in range(self._n_slots):
                part = self._directory / f"{slot}.part"
                try:
                    saved = self._ask(slot, "save", part.name)
                    if not saved:  # it computes on, or the disk is slow
                        break
                    # llama.cpp does not ask whether its last bytes were written.
                    is_whole = part.stat().st_size == saved.get("n_written")
                    if is_whole and saved["n_saved"] >= LEAST_TOKENS and not self._was_lossy():
                        file, before = self._directory / f"{_digest(part)}.kv", self._files.get(slot)
                        replace(part, file)
                        self._files[slot] = file
                        if before not in (None, *self._files.values()):  # the same, and perhaps more
                            before.unlink(missing_ok=True)
                finally:
                    part.unlink(missing_ok=True)
            self._prune()

    def _forgets(self) -> bool:
        """Whether the memory of a text holds only its end: the state of a recurrent layer, or a window of tokens.

        A slot holds a text and its answer, so another prompt with the same beginning would be computed again.
        """
        context = served_context()
        if not context:
            return True
        model = llama.llama_get_model(context)
        window = 0 if self._has_whole_windows else llama.llama_model_n_swa(model)
        return (llama.llama_model_is_recurrent(model) or llama.llama_model_is_hybrid(model)
                or 0 < window < llama.llama_n_ctx_seq(context))

    def _was_lossy(self) -> bool:
        """Settings can change while it serves."""
        engine = self._record.engine
        return engine is not None and bool(engine.substitution_stats().tokens or engine.speculation_stats().tokens)

    def _ask(self, slot: int, action: str, name: str) -> dict:
        answer = routes.own(_SLOT, f"id_slot={slot}&action={action}", json.dumps({"filename": name}),
                            _SECONDS[action])
        return json.loads(answer or "{}")

    def _prune(self) -> None:
        """Leaves as many files as this server has slots, and of all of them the newest that the limit has room for."""
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
            with contextlib.suppress(OSError):  # there are files
                if directory != self._directory:
                    directory.rmdir()


def _refuse(_: Request) -> Answer:
    return refusal(501, "pyorch saves slots: start the server with -- --slot-save-path DIR to save them yourself")


def _is_more(server: Flags) -> bool:
    given = [*server.arguments, *(name for name in ("--mmproj",) if server.has(llama_server.MMPROJ)),
             *(name for name in ("--model-draft",) if server.has(llama_server.DRAFT_MODEL))]
    return any(_NOT_WITH.fullmatch(argument) for argument in given)


def _key(record: ManagedModel, server: Flags) -> str:
    """OSError where a file is gone."""
    without = (*llama_server.HOST.names, *llama_server.PORT.names, *llama_server.API_KEY.names)
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
        record.plan.plain, llama_cpp.__version__))


def _state(file: str | Path) -> tuple[int, ...]:
    """That of the inode cannot be set back by who copies over it."""
    status = os.stat(file)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _processor() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/cpuinfo").read_text()
    return ""


def _newest(files: Iterator[Path]) -> list[Path]:
    """The newest first. Other servers remove files, too."""
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
    """OSError where the file system has no locks."""
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
