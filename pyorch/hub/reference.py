"""Names such as hf:ORG/NAME[@REVISION][:QUANT|/FILE], and the model of a repository that they mean."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pyorch.errors import PyorchError
from pyorch.runtime.model_map import SIDECARS
from pyorch.sizes import format_bytes

PREFIX = "hf:"
PREFERRED = "Q4_K_M"  # if a repository has several models and the name does not say which; llama.cpp does the same

_REFERENCE = re.compile(
    r"hf:(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w.-]+))?(?::(?P<quant>[\w.-]+)|/(?P<file>[^/].*))?", re.ASCII)
_SHARD = re.compile(r"(?P<stem>.*)-(?P<n>\d{5})-of-(?P<count>\d{5})$")
_QUANT = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|NVFP4\w*|BF16|F16|F32))(?=$|[-._/])", re.IGNORECASE | re.ASCII)
_NO_MODEL = re.compile(r"(?:^|[-._/])(?:mmproj|imatrix)(?:$|[-._/])", re.IGNORECASE)


@dataclass(frozen=True)
class Reference:
    """A parsed name. revision, quant and file are "" if the name does not have them."""

    repo: str
    revision: str = ""
    quant: str = ""
    file: str = ""

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Parses a name.

        Raises:
            PyorchError: The text is no such name.
        """
        match = _REFERENCE.fullmatch(text)
        if match is None:
            raise PyorchError(f"{text} names no model of the hub: write hf:ORG/NAME, and after it :Q4_K_M for a "
                              "quantization or /FILE.gguf for a file")
        return cls(*(part or "" for part in match.groups()))

    @property
    def whole(self) -> bool:
        """Whether the name means the whole repository."""
        return not self.quant and not self.file

    def __str__(self) -> str:
        """Returns text that parse() reads."""
        revision = f"@{self.revision}" if self.revision else ""
        model = f":{self.quant}" if self.quant else f"/{self.file}" if self.file else ""
        return f"{PREFIX}{self.repo}{revision}{model}"


@dataclass(frozen=True)
class Candidate:
    """A model of a repository: its files in their order, and the part of its name that says its quantization."""

    files: tuple[str, ...]
    quant: str
    n_bytes: int


def is_reference(text: object) -> bool:
    return isinstance(text, str) and text.startswith(PREFIX)


def is_sidecar(path: str) -> bool:
    """Whether a GGUF file has the name of a sidecar that pyorch makes."""
    return path.removesuffix(".gguf").rpartition(".")[2] in SIDECARS


def candidates(sizes: Mapping[str, int]) -> list[Candidate]:
    """Returns the models among the files of a repository, without sidecars, projectors and statistics.

    Args:
        sizes: Bytes by path.

    Raises:
        PyorchError: A model lacks one of its shards.
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
            continue  # incomplete: it cannot be loaded
        quants = _QUANT.findall(stem)
        made.append(Candidate(tuple(files), quants[-1] if quants else "", sum(sizes[file] for file in files)))
    return made


def choose(reference: Reference, sizes: Mapping[str, int]) -> Candidate:
    """Returns the model that a name means.

    Raises:
        PyorchError: No model matches, or several do; the sentence lists them.
    """
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
    """Returns the user's name of a model: its quantization, unless another model has the same."""
    alone = candidate.quant and sum(one.quant == candidate.quant for one in beside) == 1
    return f"{PREFIX}{repo}:{candidate.quant}" if alone else f"{PREFIX}{repo}/{candidate.files[0]}"


def _is_part(wanted: str, file: str) -> bool:
    return re.search(rf"(?:^|[-._/]){re.escape(wanted)}(?:$|[-._/])", file.removesuffix(".gguf")) is not None


def _listed(repo: str, found: list[Candidate]) -> str:
    return ", ".join(f"{name_of(repo, one, found)} ({format_bytes(one.n_bytes)})" for one in found)
