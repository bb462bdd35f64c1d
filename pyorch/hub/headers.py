"""Headers of models that are not fetched yet: files of their names and sizes, with holes in place of weights.

Everything that needs only the header of a model reads such a file like a fetched one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import struct
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import gguf
from huggingface_hub import try_to_load_from_cache

from pyorch import files
from pyorch.errors import FormatError, PyorchError
from pyorch.hub.download import Hub, Listing, failures
from pyorch.hub.ranges import OnProgress, RemoteFile, Sample, sample
from pyorch.hub.reference import Candidate, Reference, candidates, choose, name_of
from pyorch.sizes import MiB

_UNREAD = "could not be read: {}; the same command tries it again"
_MOST_TENSORS, _MOST_VALUES, _MOST_KEY = 1 << 20, 1 << 16, 1 << 16
_OF_TOKENIZER = "tokenizer."
_LONG = 4096  # elements of an array that is worth borrowing
_CONNECTIONS = 8  # at once, for the headers of a checkpoint in many files
_COMPARED = 4096  # bytes at the beginning of an array by which another file's is recognized

_Type = gguf.GGUFValueType
_SIZES = {
    _Type.UINT8: 1, _Type.INT8: 1, _Type.BOOL: 1, _Type.UINT16: 2, _Type.INT16: 2, _Type.UINT32: 4, _Type.INT32: 4,
    _Type.FLOAT32: 4, _Type.UINT64: 8, _Type.INT64: 8, _Type.FLOAT64: 8,
}


@dataclass(frozen=True)
class Offer:
    """A model of a repository.

    Attributes:
        name: The name for commands.
        cached: The file in the cache to load; None: it is not there.
        missing_bytes: Bytes that a download has to fetch.
    """

    name: str
    candidate: Candidate
    cached: Path | None
    missing_bytes: int


@dataclass(frozen=True)
class _Vocabulary:
    """The tokenizer of one file, which other quantizations repeat.

    Attributes:
        key: The first long array.
        head: Its type and length.
        content: The bytes from its first element to the last value of the tokenizer.
        n_values: The values of the metadata that these bytes complete.
    """

    key: str
    head: bytes
    content: bytes
    n_values: int


class Repository:
    """Reads the headers of a repository's files into a directory.

    Attributes:
        n_fetched: Bytes of headers that arrived.
    """

    def __init__(self, hub: Hub, reference: Reference, listing: Listing, directory: Path) -> None:
        self.reference, self.directory = reference, directory
        self.n_fetched = 0
        self._hub, self._listing = hub, listing
        self._counting = threading.Lock()
        self._vocabulary: _Vocabulary | None = None

    def offers(self) -> list[Offer]:
        """Returns the models that the reference can mean: one, or all if it names the repository.

        Raises:
            PyorchError: The reference names a model that does not exist.
        """
        found = candidates(self._listing.sizes)
        chosen = found if self.reference.whole else [choose(self.reference, self._listing.sizes)]
        return [self._offer(one, found) for one in chosen]

    def others(self, offer: Offer) -> int:
        """Returns the number of the repository's other models."""
        return sum(one.files != offer.candidate.files for one in candidates(self._listing.sizes))

    def open(self, offer: Offer, on_progress: OnProgress) -> Path:
        """Returns the file of a model in the cache, or a file that has its header and no weights.

        Raises:
            FormatError: The header is damaged.
            PyorchError: The header cannot be fetched.
        """
        if offer.cached is not None:
            return offer.cached
        # A hash, because a path of the repository may be too long for a name.
        folder = self.directory / hashlib.sha256(offer.candidate.files[0].encode()).hexdigest()[:16]
        paths = [folder / PurePosixPath(name).name for name in offer.candidate.files]
        if not paths[0].is_file():
            folder.mkdir(exist_ok=True)
            for n, (name, path) in enumerate(zip(offer.candidate.files, paths)):
                on_progress(f"reading the header of {name}", n, len(paths))
                self._write_header(name, path)
        return paths[0]

    def sample(self, name: str, on_progress: OnProgress) -> Sample | None:
        """Measures how fast the hub sends the second half of a file; None if it sends nothing."""
        size = self._listing.files[name].n_bytes
        with failures(self.reference, _UNREAD):
            return sample(self._url(name), size // 2, size - size // 2, on_progress)

    def has(self, name: str) -> bool:
        return name in self._listing.files

    def n_bytes(self, names: Iterable[str]) -> int:
        return sum(self._listing.files[name].n_bytes for name in names)

    def missing_bytes(self, names: Iterable[str]) -> int:
        """Returns the bytes of files that a download would still have to fetch."""
        return self._hub.missing_bytes(self.reference, {name: self._listing.files[name] for name in names})

    def weight_files(self) -> list[str]:
        """Returns the safetensors files of the checkpoint, without copies in another layout, or []."""
        found = sorted(name for name in self._listing.files if name.endswith(".safetensors") and "/" not in name)
        return [name for name in found if name.startswith("model")] or found

    def read_text(self, name: str, at_most: int = MiB) -> str:
        """Returns a small file.

        Raises:
            FormatError: The file is larger, or no text.
            PyorchError: The file cannot be fetched.
        """
        size = self._listing.files[name].n_bytes
        if size > at_most:
            raise FormatError(f"hf:{self.reference.repo}/{name} has {size} bytes, which is too much for such a file")
        with self._remote(name) as file:
            file.grow(size)
        try:
            return bytes(file.data).decode()
        except UnicodeDecodeError:
            raise FormatError(f"{file.name} is not UTF-8 text") from None

    def read_safetensors(self, names: Sequence[str], on_progress: OnProgress) -> dict[str, dict]:
        """Returns the entries of safetensors headers: "dtype", "shape" and "data_offsets" by tensor.

        Raises:
            FormatError: A header is damaged.
            PyorchError: A header cannot be fetched.
        """
        entries: dict[str, dict] = {}
        pool = ThreadPoolExecutor(_CONNECTIONS)
        try:
            for n, found in enumerate(pool.map(self._safetensors_header, names)):
                on_progress("reading the headers of the checkpoint", n, len(names))
                entries.update(found)
        finally:
            pool.shutdown(cancel_futures=True)
        return entries

    def _safetensors_header(self, name: str) -> dict[str, dict]:
        with self._remote(name) as file:
            file.grow(8)
            n_bytes = int.from_bytes(file.data[:8], "little")
            file.grow(8 + n_bytes)
        try:
            entries = json.loads(bytes(file.data[8: 8 + n_bytes]))
            return {key: dict(entry) for key, entry in entries.items() if key != "__metadata__"}
        except (ValueError, TypeError, AttributeError, RecursionError):
            raise FormatError(f"{file.name} is damaged: its safetensors header cannot be read") from None

    def _offer(self, one: Candidate, found: list[Candidate]) -> Offer:
        paths = [try_to_load_from_cache(self.reference.repo, name, cache_dir=self._hub.directory,
                                        revision=self._listing.commit) for name in one.files]
        cached = Path(str(paths[0])) if all(isinstance(path, str) for path in paths) else None
        missing = 0 if cached is not None else self.missing_bytes(one.files)
        name = name_of(self.reference.repo, one, found)
        if self.reference.revision:
            parsed = Reference.parse(name)
            name = str(Reference(parsed.repo, self.reference.revision, parsed.quant, parsed.file))
        return Offer(name, one, cached, missing)

    def _url(self, name: str) -> str:
        return self._hub.url(self.reference, name, self._listing.commit)

    @contextlib.contextmanager
    def _remote(self, name: str) -> Iterator[RemoteFile]:
        """Yields the beginning of a file, without any bytes yet."""
        file = RemoteFile(self._url(name), f"hf:{self.reference.repo}/{name}", self._listing.files[name].n_bytes)
        with failures(self.reference, _UNREAD), contextlib.closing(file):
            try:
                yield file
            finally:
                with self._counting:
                    self.n_fetched += file.n_fetched

    def _write_header(self, name: str, path: Path) -> None:
        known = self._vocabulary
        with self._remote(name) as file:
            try:
                n_bytes, vocabulary = _Scanner(file, known).scan()
            except FormatError:
                if known is None:
                    raise
                known = None
                file.close()
                file.data.clear()  # another tokenizer than that of the file before
                n_bytes, vocabulary = _Scanner(file, None).scan()
        if vocabulary is not None:
            self._vocabulary = vocabulary
        try:
            with path.open("wb") as header:
                header.write(file.data[:n_bytes])
                header.truncate(file.n_bytes)
        except OSError as error:
            raise PyorchError(
                f"the header of {file.name} cannot be written to {path.parent}: {error.strerror}") from None


@contextlib.contextmanager
def opened(hub: Hub, reference: Reference, listing: Listing) -> Iterator[Repository]:
    """Yields a repository whose headers are in a temporary directory, on the disk of the cache if possible.

    Raises:
        PyorchError: No disk has files with holes.
    """
    wanted = hub.directory.absolute()
    above = next((path for path in (wanted, *wanted.parents) if path.is_dir()), Path("/"))
    refusal: PyorchError | None = None
    for home in (above, Path(tempfile.gettempdir())):
        with contextlib.ExitStack() as stack:
            try:
                directory = stack.enter_context(files.staging(home / "pyorch-headers"))
                _check_holes(directory)
            except PyorchError as error:
                refusal = refusal or error
                continue
            yield Repository(hub, reference, listing, directory)
            return
    assert refusal is not None
    raise refusal


def _check_holes(directory: Path) -> None:
    """Raises PyorchError if a hole takes space in files of this directory, such as on FAT."""
    path = directory / "hole"
    try:
        with path.open("wb") as file:
            file.truncate(16 * MiB)
        status = path.stat()
        path.unlink()
    except OSError as error:
        raise PyorchError(f"{directory} cannot be written: {error.strerror}") from None
    if status.st_blocks * 512 > status.st_size // 2:
        raise PyorchError(f"{directory} is on a file system without holes in files, which a header needs: name another "
                          "one with TMPDIR")


class _Scanner:
    """Finds the end of a GGUF's header. known: the tokenizer of another file, which is not read again."""

    def __init__(self, file: RemoteFile, known: _Vocabulary | None) -> None:
        self._file, self._data, self._known = file, file.data, known
        self._at = 0
        self._seen = self._borrowed = False  # whether a long array was read, and whether the tokenizer was borrowed
        self._first: tuple[str, bytes, int, int] | None = None  # of a vocabulary: key, head, place, number of its value
        self._vocabulary: _Vocabulary | None = None

    def scan(self) -> tuple[int, _Vocabulary | None]:
        """Reads the header. Returns its bytes, and its tokenizer if that was read.

        Raises:
            FormatError: The header is damaged, or contradicts the size of the file.
        """
        magic, version, n_tensors, n_values = struct.unpack("<4sIQQ", self._take(24))
        if magic != b"GGUF" or version not in (2, 3):
            raise FormatError(f"{self._file.name} is no GGUF of version 2 or 3")
        if n_tensors > _MOST_TENSORS or n_values > _MOST_VALUES:
            raise self._damaged(f"it has {n_tensors} tensors and {n_values} values")
        alignment = self._read_values(n_values)
        end = 0
        for _ in range(n_tensors):
            end = max(end, self._read_tensor())
        n_bytes = self._at
        data = -(-n_bytes // alignment) * alignment
        if data + end > self._file.n_bytes or (self._borrowed and self._file.n_bytes - data - end >= alignment):
            raise FormatError(f"{self._file.name} is truncated: its header describes {data + end} bytes, and the file "
                              f"has {self._file.n_bytes}")
        return n_bytes, self._vocabulary

    def _read_values(self, n: int) -> int:
        """Reads the metadata. Returns the alignment of the tensors."""
        alignment, i = gguf.GGUF_DEFAULT_ALIGNMENT, 0
        while i < n:
            key = self._text()
            kind = self._kind()
            if kind == _Type.ARRAY:
                i += self._read_array(key, i)
            elif kind == _Type.STRING:
                self._skip_text()
            else:
                value = self._take(_SIZES[kind])
                if key == gguf.Keys.General.ALIGNMENT and kind == _Type.UINT32:
                    alignment = int.from_bytes(value, "little")
            i += 1
            if self._first is not None and not key.startswith(_OF_TOKENIZER):
                self._first = None
            elif self._first is not None:
                first, head, place, number = self._first
                self._vocabulary = _Vocabulary(first, head, bytes(self._data[place: self._at]), i - number - 1)
        if alignment <= 0 or alignment & (alignment - 1):
            raise self._damaged(f"an alignment of {alignment}")
        return alignment

    def _read_array(self, key: str, number: int) -> int:
        """Reads an array. Returns the further values that a borrowed tokenizer completed."""
        begin = self._at
        kind, n = self._kind(), int.from_bytes(self._take(8), "little")
        head = bytes(self._data[begin: self._at])
        if n >= _LONG and key.startswith(_OF_TOKENIZER) and not self._seen:
            self._seen = True
            if (known := self._known) is not None and (known.key, known.head) == (key, head):
                compared = min(_COMPARED, len(known.content))
                self._file.grow(self._at + compared)
                if self._data[self._at: self._at + compared] == known.content[:compared]:
                    self._file.borrow(known.content[len(self._data) - self._at:])
                    self._at += len(known.content)
                    self._borrowed = True
                    return known.n_values
            self._first = key, head, self._at, number
        if kind == _Type.STRING:
            for _ in range(n):
                self._skip_text()
        elif kind in _SIZES:
            self._skip(n * _SIZES[kind])
        else:
            raise self._damaged(f"an array of type {kind}")
        return 0

    def _read_tensor(self) -> int:
        """Reads the description of a tensor. Returns the end of its bytes."""
        self._text()
        n_dims = int.from_bytes(self._take(4), "little")
        if n_dims > 8:
            raise self._damaged(f"a tensor of {n_dims} dimensions")
        shape = struct.unpack(f"<{n_dims}Q", self._take(8 * n_dims))
        kind, offset = struct.unpack("<IQ", self._take(12))
        values, size = gguf.GGML_QUANT_SIZES.get(kind, (1, 0))  # a type of a later llama.cpp has an unknown size
        n_values = 1
        for n in shape:
            n_values *= n
        return offset + n_values // values * size

    def _take(self, n: int) -> bytes:
        begin = self._at
        self._skip(n)
        return bytes(self._data[begin: self._at])

    def _skip(self, n: int) -> None:
        if self._at + n > len(self._data):
            self._file.grow(self._at + n)
        self._at += n

    def _skip_text(self) -> None:
        if self._at + 8 > len(self._data):
            self._file.grow(self._at + 8)
        self._skip(8 + int.from_bytes(self._data[self._at: self._at + 8], "little"))

    def _text(self) -> str:
        n = int.from_bytes(self._take(8), "little")
        if n > _MOST_KEY:
            raise self._damaged(f"a name of {n} bytes")
        return self._take(n).decode("utf-8", "replace")

    def _kind(self) -> gguf.GGUFValueType:
        number = int.from_bytes(self._take(4), "little")
        try:
            return _Type(number)
        except ValueError:
            raise self._damaged(f"a value of type {number}") from None

    def _damaged(self, what: str) -> FormatError:
        return FormatError(f"{self._file.name} is damaged: its header has {what}")
