"""Downloads models and checkpoints of the hub, and resumes broken downloads."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from pyorch.errors import PyorchError
from pyorch.files import FEW_BYTES, check_free_space, make_directory
from pyorch.hub import cache
from pyorch.hub.ranges import is_of_network
from pyorch.hub.reference import Reference, choose

OnProgress = Callable[[str, int, int], None]  # "fetching ...", bytes, of
OnNote = Callable[[str], None]  # a sentence

_MAIN = "main"
_SECONDS = 0.2  # between two reports of progress

# The files of a checkpoint that the converter reads. Programs are excluded.
_CHECKPOINT = (".json", ".safetensors", ".model", ".txt", ".jinja")
_PICKLED = (".bin",)


@dataclass(frozen=True)
class File:
    """A file of a repository. blob: its name in the cache."""

    n_bytes: int
    blob: str


@dataclass(frozen=True)
class Listing:
    """The files of a repository by path, at one commit."""

    files: dict[str, File]
    commit: str

    @property
    def sizes(self) -> dict[str, int]:
        return {name: file.n_bytes for name, file in self.files.items()}


class Hub:
    """A hub and its cache. endpoint, directory: by default those of huggingface_hub's environment."""

    def __init__(self, endpoint: str | None = None, directory: Path | None = None) -> None:
        self._api = huggingface_hub.HfApi(endpoint=endpoint)
        self._endpoint = endpoint
        self.directory = Path(directory or constants.HF_HUB_CACHE)

    def model(self, reference: Reference, on_progress: OnProgress, on_note: OnNote) -> Path:
        """Returns the GGUF file to load; its other shards are in the same folder.

        If the hub cannot be reached, or must not be (HF_HUB_OFFLINE), the cached file is used.

        Raises:
            PyorchError: There is no such model, or the download fails.
        """
        listing = self.listing(reference, on_note)
        if listing is None:
            return cache.model(reference, self.directory)
        chosen = choose(reference, listing.sizes)
        return self._fetch(reference, {name: listing.files[name] for name in chosen.files}, on_progress)[0]

    def checkpoint(self, reference: Reference, on_progress: OnProgress, on_note: OnNote) -> Path:
        """Returns the directory of a checkpoint, without its programs.

        Raises:
            PyorchError: There is no such checkpoint, or the download fails.
        """
        if not reference.whole:
            raise PyorchError(f"{reference} is one model of a repository, and a checkpoint is the whole of it: name "
                              f"hf:{reference.repo}")
        listing = self.listing(reference, on_note)
        if listing is None:
            return cache.checkpoint(reference, self.directory)
        files = listing.files
        weights = _CHECKPOINT if any(name.endswith(".safetensors") for name in files) else _CHECKPOINT + _PICKLED
        wanted = {name: file for name, file in files.items() if name.endswith(weights) and "/" not in name}
        if "config.json" not in wanted:
            raise PyorchError(f"{reference} has no config.json: it is no checkpoint")
        return self._fetch(reference, wanted, on_progress)[0].parent

    def listing(self, reference: Reference, on_note: OnNote) -> Listing | None:
        """Returns the files of the repository; None if only the cache can be asked.

        Raises:
            PyorchError: The hub has no such repository, or refuses it.
        """
        with failures(reference):
            try:
                info = self._api.model_info(
                    reference.repo, revision=reference.revision or None, files_metadata=True,
                    timeout=constants.HF_HUB_ETAG_TIMEOUT)
            except OfflineModeIsEnabled:
                return None
            except Exception as error:
                if not _unreachable(error):
                    raise
                on_note(f"the hub cannot be reached ({_reason(error)}): what was fetched before is used")
                return None
        files = {
            file.rfilename: File(file.size or 0, file.lfs.sha256 if file.lfs is not None else file.blob_id or "")
            for file in info.siblings or ()
        }
        return Listing(files, info.sha or reference.revision or _MAIN)

    def url(self, reference: Reference, name: str, commit: str) -> str:
        """Returns the address of a file."""
        return huggingface_hub.hf_hub_url(reference.repo, name, revision=commit, endpoint=self._endpoint)

    def missing_bytes(self, reference: Reference, files: Mapping[str, File]) -> int:
        """Returns the bytes of files that a download would still have to fetch."""
        missing, begun = self._missing(reference, files)
        return sum(file.n_bytes for file in missing.values()) - begun

    def _missing(self, reference: Reference, files: Mapping[str, File]) -> tuple[dict[str, File], int]:
        """Returns the files that are not in the cache, and the bytes that it has of them."""
        blobs = self._blobs(reference)
        missing = {name: file for name, file in files.items() if not (blobs / file.blob).is_file()}
        return missing, sum(cache.size(_part(blobs, file)) for file in missing.values())

    def _blobs(self, reference: Reference) -> Path:
        folder = huggingface_hub.file_download.repo_folder_name(repo_id=reference.repo, repo_type="model")
        return self.directory / folder / "blobs"

    def _fetch(self, reference: Reference, files: Mapping[str, File], on_progress: OnProgress) -> list[Path]:
        blobs, (missing, begun) = self._blobs(reference), self._missing(reference, files)
        total = sum(file.n_bytes for file in missing.values())
        if missing:
            make_directory(self.directory)
            check_free_space(self.directory, total - begun, FEW_BYTES)
        revision, paths, done = reference.revision or _MAIN, [], 0
        with failures(reference), _quiet():
            for name, file in files.items():
                with _watched(_part(blobs, file), f"fetching {name}", done, total, on_progress):
                    path = Path(huggingface_hub.hf_hub_download(
                        reference.repo, name, revision=revision, cache_dir=self.directory, endpoint=self._endpoint))
                paths.append(path)
                done += file.n_bytes if name in missing else 0
                # All files are of one revision, even if the repository changes during the download.
                revision = path.parents[name.count("/")].name
        return paths


def _part(blobs: Path, file: File) -> Path:
    """Returns the path at which huggingface_hub keeps an incomplete file."""
    return blobs / f"{file.blob}.incomplete"


@contextlib.contextmanager
def _watched(part: Path, step: str, done: int, total: int, on_progress: OnProgress) -> Iterator[None]:
    """Reports the bytes of a file during its download, for each of huggingface_hub's ways of downloading."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_SECONDS):
            on_progress(step, min(total, done + cache.size(part)), total)

    if not total:
        yield
        return
    on_progress(step, min(total, done + cache.size(part)), total)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hides huggingface_hub's own bars and log."""
    from huggingface_hub.utils import disable_progress_bars, logging

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        disable_progress_bars()
        logging.set_verbosity_error()
        yield


_KEPT = "did not come: {}; what has come is kept, and the same command goes on there"


@contextlib.contextmanager
def failures(reference: Reference, interrupted: str = _KEPT) -> Iterator[None]:
    """Turns errors into sentences. interrupted: the predicate if the connection fails, with {} for the reason."""
    name = f"hf:{reference.repo}"
    try:
        yield
    except (PyorchError, KeyboardInterrupt):
        raise
    except GatedRepoError:
        raise PyorchError(f"{name} is gated: accept its licence at {constants.ENDPOINT}/{reference.repo}, and set "
                          "HF_TOKEN to a token of that account or run `hf auth login`") from None
    except RevisionNotFoundError:
        raise PyorchError(f"{name} has no revision {reference.revision}") from None
    except RepositoryNotFoundError:
        raise PyorchError(f"{name}: the hub has no such repository, or it is private: then say who you are with "
                          "HF_TOKEN or `hf auth login`") from None
    except LocalEntryNotFoundError as error:
        raise PyorchError(_interrupted(reference, error.__cause__ or error, interrupted)) from None
    except EntryNotFoundError as error:
        raise PyorchError(f"{reference}: {_reason(error)}") from None
    except HFValidationError as error:
        raise PyorchError(f"{name} is no name of a repository: {_reason(error)}") from None
    except MemoryError:
        raise
    except Exception as error:  # of requests, httpx, or the file system
        if isinstance(error, OSError) and error.filename is not None and not isinstance(error, HfHubHTTPError):
            raise PyorchError(f"{error.filename}: {error.strerror}") from None
        raise PyorchError(_interrupted(reference, error, interrupted)) from None


def _interrupted(reference: Reference, error: BaseException, predicate: str) -> str:
    return f"{reference} {predicate.format(_reason(error))}"


def _unreachable(error: Exception) -> bool:
    """Whether the hub does not answer, or says that it cannot."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return status >= 500
    return is_of_network(error)


def _reason(error: BaseException) -> str:
    """Returns the innermost cause on one line."""
    seen = set()
    while id(error) not in seen:
        seen.add(id(error))
        inner = getattr(error, "reason", None) or error.__cause__ or error.__context__
        inner = inner or next((part for part in error.args if isinstance(part, BaseException)), None)
        if isinstance(inner, BaseException):
            error = inner
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(text.split())[:200]
