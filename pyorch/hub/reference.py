"""hf:ORG/NAME[@REVISION][:QUANT|/FILE], and which of a repository's models that is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pyorch.errors import PyorchError
from pyorch.runtime.model_map import SIDECARS
from pyorch.sizes import format_bytes

PREFIX = "hf:"
PREFERRED = "Q4_K_M"  # where a repository has several models and nobody says which, as llama.cpp has it

_REFERENCE = re.compile(
    r"hf:(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w.-]+))?(?::(?P<quant>[\w.-]+)|/(?P<file>[^/].*))?", re.ASCII)
_SHARD = re.compile(r"(?P<stem>.*)-(?P<n>\d{5})-of-(?P<count>\d{5})$")
_QUANT = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|NVFP4\w*|BF16|F16|F32))(?=$|[-._/])", re.IGNORECASE | re.ASCII)
_NO_MODEL = re.compile(r"(?:^|[-._/])(?:mmproj|imatrix)(?:$|[-._/])", re.IGNORECASE)


@dataclass(frozen=True)
class Reference:
    """What the user named. revision, quant and file are "" where nothing was said of them."""

    repo: str
    revision: str = ""
    quant: str = ""
    file: str = ""

    @classmethod
    def parse(cls, text: str) -> Reference:
        """PyorchError for what is no such name."""
        match = _REFERENCE.fullmatch(text)
        if match is None:
            raise PyorchError(f"{text} names no model of the hub: write hf:ORG/NAME, and after it :Q4_K_M for a "
                              "quantization or /FILE.gguf for a file")
        return cls(*(part or "" for part in match.groups()))

    @property
    def whole(self) -> bool:
        """Whether no model of the repository is singled out."""
        return not self.quant and not self.file

    def __str__(self) -> str:
        """What parse() reads."""
        revision = f"@{self.revision}" if self.revision else ""
        model = f":{self.quant}" if self.quant else f"/{self.file}" if self.file else ""
        return f"{PREFIX}{self.repo}{revision}{model}"


@dataclass(frozen=True)
class Candidate:
    """A model of a repository: its files in their order, and what of its name says how it is quantized."""

    files: tuple[str, ...]
    quant: str
    n_bytes: int


def is_reference(text: object) -> bool:
    return isinstance(text, str) and text.startswith(PREFIX)


def is_sidecar(path: str) -> bool:
    """Whether a GGUF file has the name of one that pyorch makes beside a model."""
    return path.removesuffix(".gguf").rpartition(".")[2] in SIDECARS


def candidates(sizes: Mapping[str, int]) -> list[Candidate]:
    """The models among the files of a repository, by name: GGUF files that are no sidecars, projectors or statistics.

    sizes: bytes, by path. PyorchError where a model lacks one of its shards.
    """
    found: dict[str, list[str]] = {}
    for name in sorted(sizes):
        stem, dot, suffix = name.rpartition(".")
        if not dot or suffix != "gguf" or is_sidecar(name) or _NO_MODEL.search(stem.rpartition("/")[2]):
            continue
        shard = _SHARD.match(stem)
        found.setdefault(shard["stem"] if shard else stem, []).append(name)
    made = []
    for stem, files in found.items():
        shard = _SHARD.match(files[0].removesuffix(".gguf"))
        if shard is not None and len(files) != int(shard["count"]):
            continue  # not whole: nothing can load it
        quants = _QUANT.findall(stem)
        made.append(Candidate(tuple(files), quants[-1] if quants else "", sum(sizes[file] for file in files)))
    return made


def choose(reference: Reference, sizes: Mapping[str, int]) -> Candidate:
    """The model that is meant. PyorchError, with what there is, where none or more than one is."""
    found = candidates(sizes)
    if not found:
        raise PyorchError(f"hf:{reference.repo} has no GGUF file; pyorch convert hf:{reference.repo} -o FILE makes one "
                          "of a checkpoint")
    if reference.file:
        chosen = [one for one in found if reference.file in one.files]
        wrong = f"has no model {reference.file}"
    elif reference.quant:
        wanted = reference.quant.casefold()
        chosen = [one for one in found if one.quant.casefold() == wanted] or [
            one for one in found if _is_part(wanted, one.files[0].casefold())]
        wrong = f"has no model of type {reference.quant}"
    elif len(found) == 1:
        return found[0]
    else:
        chosen = [one for one in found if one.quant.casefold() == PREFERRED.casefold()]
        wrong = "has several models"
    if len(chosen) == 1:
        return chosen[0]
    if chosen:
        wrong = f"has several models {reference.quant or PREFERRED}"
    raise PyorchError(f"hf:{reference.repo} {wrong}: name one of {_listed(reference.repo, chosen or found)}")


def name_of(repo: str, candidate: Candidate, beside: Iterable[Candidate]) -> str:
    """How the user names a model: by its quantization, where no other one has the same."""
    alone = candidate.quant and sum(one.quant == candidate.quant for one in beside) == 1
    return f"{PREFIX}{repo}:{candidate.quant}" if alone else f"{PREFIX}{repo}/{candidate.files[0]}"


def _is_part(wanted: str, file: str) -> bool:
    return re.search(rf"(?:^|[-._/]){re.escape(wanted)}(?:$|[-._/])", file.removesuffix(".gguf")) is not None


def _listed(repo: str, found: list[Candidate]) -> str:
    return ", ".join(f"{name_of(repo, one, found)} ({format_bytes(one.n_bytes)})" for one in found)
