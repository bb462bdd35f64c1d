"""Models on this machine: in the hub's cache, and in folders."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pyorch.errors import PyorchError
from pyorch.hub.reference import PREFIX, Candidate, Reference, candidates, choose, name_of
from pyorch.runtime.model_map import SIDECARS
from pyorch.sidecars import memory_plan, tuned_setting
from pyorch.sidecars.container import default_path


@dataclass(frozen=True)
class Stored:
    """A model or a checkpoint. name: the name for commands. sidecars: files next to it, by kind."""

    name: str
    files: tuple[Path, ...]
    n_bytes: int
    sidecars: dict[str, Path]
    checkpoint: bool = False

    @property
    def sidecar_bytes(self) -> int:
        return sum(size(path) for path in self.sidecars.values())


@dataclass(frozen=True)
class Removal:
    """Files to remove, and the space that this frees. hidden: related files of the cache's own."""

    name: str
    files: tuple[Path, ...]
    n_bytes: int
    hidden: tuple[Path, ...] = ()

    def execute(self) -> None:
        for path in (*self.files, *self.hidden):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def directory() -> Path:
    """Returns the folder in which huggingface_hub stores downloads."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def in_cache(where: Path | None = None) -> list[Stored]:
    """Returns all models and checkpoints of the cache by name, each in its newest cached state."""
    found: dict[str, Stored] = {}
    for repo in _repositories(where):
        for revision in _newest_first(repo):
            for stored in _of_revision(repo.repo_id, revision):
                found.setdefault(stored.name, stored)
    return [found[name] for name in sorted(found)]


def listed() -> list[Stored]:
    """Returns the models that commands find by the beginning of a name: in the cache and the current folder."""
    return in_cache() + in_folder(Path(), below=False)


def in_folder(folder: Path, below: bool = True) -> list[Stored]:
    """Returns the models in a folder and the folders below it.

    Raises:
        PyorchError: There is no such folder.
    """
    if not folder.is_dir():
        raise PyorchError(f"{folder} is no folder")
    sizes = {}
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if below and not name.startswith("."))
        for name in names:
            path = Path(root, name)
            if name.endswith(".gguf") and path.is_file():
                sizes[str(path)] = size(path)
    return [_stored(one.files[0], tuple(map(Path, one.files)), one.n_bytes) for one in candidates(sizes)]


def model(reference: Reference, where: Path | None = None) -> Path:
    """Returns a downloaded model.

    Raises:
        PyorchError: The cache does not have it.
    """
    refusal = None
    for revision, sizes in _revisions(reference, where):
        try:
            return revision.snapshot_path / choose(reference, sizes).files[0]
        except PyorchError as error:
            refusal = refusal or error
    raise refusal or _absent(reference)


def checkpoint(reference: Reference, where: Path | None = None) -> Path:
    """Returns a downloaded checkpoint.

    Raises:
        PyorchError: The cache does not have it.
    """
    for revision, sizes in _revisions(reference, where):
        if "config.json" in sizes:
            return revision.snapshot_path
    raise _absent(reference)


def _absent(reference: Reference) -> PyorchError:
    return PyorchError(f"{reference} was not fetched yet, and the hub cannot be asked for it")


def removal(name: str, where: Path | None = None) -> Removal:
    """Returns the removal of a model of the cache, of a whole repository, or of a file, with its sidecars.

    Raises:
        PyorchError: There is no model of that name.
    """
    if not name.startswith(PREFIX):
        return _removal_of_file(Path(name))
    reference = Reference.parse(name)
    repo = next((repo for repo in _repositories(where) if repo.repo_id == reference.repo), None)
    if repo is None:
        raise PyorchError(f"{name} is not in the cache")
    if reference.whole:
        return Removal(name, (repo.repo_path,), _tree_bytes(repo.repo_path))
    pointers: list[Path] = []
    for revision in repo.revisions:
        sizes = _sizes(revision)
        with contextlib.suppress(PyorchError):
            stored = _candidate(revision, choose(reference, sizes), reference.repo, sizes)
            pointers += [*stored.files, *stored.sidecars.values()]
    if not pointers:
        choose(reference, _sizes(_newest_first(repo)[0]))  # raises, with the names that exist
    # Keeps blobs that have another name left.
    blobs = {Path(os.path.realpath(path)) for path in pointers}
    for revision in repo.revisions:
        blobs -= {file.blob_path for file in revision.files if file.file_path not in pointers}
    return Removal(name, tuple(dict.fromkeys(pointers)), sum(map(size, blobs)), tuple(blobs))


def _removal_of_file(path: Path) -> Removal:
    if not path.is_file():
        raise PyorchError(f"{path}: no such file; models of the hub are named hf:ORG/NAME")
    beside = {str(one): size(one) for one in path.parent.iterdir() if one.suffix == ".gguf" and one.is_file()}
    chosen = next((one for one in candidates(beside) if str(path) in one.files), None)
    if chosen is None:
        raise PyorchError(f"{path} is no model")
    stored = _stored(str(path), tuple(map(Path, chosen.files)), chosen.n_bytes)
    return Removal(str(path), (*stored.files, *stored.sidecars.values()), stored.n_bytes + stored.sidecar_bytes)


def _repositories(where: Path | None) -> list:
    """Returns huggingface_hub's CachedRepoInfo of models."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        found = scan_cache_dir(where or directory())
    except CacheNotFound:
        return []
    return sorted((repo for repo in found.repos if repo.repo_type == "model"), key=lambda repo: repo.repo_id)


def _newest_first(repo) -> list:
    """Returns the CachedRevisionInfo of a repository: the branch main, then the others by age."""
    return sorted(repo.revisions, key=lambda revision: ("main" in revision.refs, revision.last_modified), reverse=True)


def _revisions(reference: Reference, where: Path | None) -> Iterator[tuple]:
    """Yields (CachedRevisionInfo, bytes by name) of the revisions that the reference can mean."""
    for repo in _repositories(where):
        if repo.repo_id == reference.repo:
            for revision in _newest_first(repo):
                wanted = reference.revision
                if not wanted or wanted in revision.refs or revision.commit_hash.startswith(wanted):
                    yield revision, _sizes(revision)


def _sizes(revision) -> dict[str, int]:
    return {file.file_path.relative_to(revision.snapshot_path).as_posix(): file.size_on_disk for file in revision.files}


def _of_revision(repo: str, revision) -> Iterable[Stored]:
    sizes = _sizes(revision)
    for candidate in candidates(sizes):
        yield _candidate(revision, candidate, repo, sizes)
    weights = [name for name in sizes if name.endswith((".safetensors", ".bin"))]
    if weights and "config.json" in sizes:
        files = tuple(revision.snapshot_path / name for name in sorted(sizes))
        yield Stored(f"{PREFIX}{repo}", files, sum(sizes.values()), {}, checkpoint=True)


def _candidate(revision, candidate: Candidate, repo: str, sizes: dict[str, int]) -> Stored:
    files = tuple(revision.snapshot_path / name for name in candidate.files)
    return _stored(name_of(repo, candidate, candidates(sizes)), files, candidate.n_bytes)


def _stored(name: str, files: tuple[Path, ...], n_bytes: int) -> Stored:
    beside = {kind: default_path(files[0], kind) for kind in SIDECARS}
    beside |= {"plan": memory_plan.default_path(files[0]), "tuned": tuned_setting.default_path(files[0])}
    return Stored(name, files, n_bytes, {kind: path for kind, path in beside.items() if path.is_file()})


def size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _tree_bytes(directory: Path) -> int:
    """Returns the bytes of all files below, each counted once."""
    return sum(size(path) for path in directory.rglob("*") if path.is_file() and not path.is_symlink())
