"""`pyorch advise hf:ORG/NAME`: which file to fetch, how long that takes, and how fast the model would be."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pyorch.cli.advice import Advice, parts_of
from pyorch.cli.advise_request import Request, UnsuitableError
from pyorch.cli.progress import Progress
from pyorch.cli.settings import listed
from pyorch.cli.tables import Facts, Table
from pyorch.errors import BudgetError, FormatError, PyorchError
from pyorch.files import FEW_BYTES
from pyorch.sizes import as_option, counted, format_bytes

if TYPE_CHECKING:
    from pyorch.advise.comparison import Choice
    from pyorch.advise.machine import Compute, Disk
    from pyorch.hub.headers import Offer, Repository
    from pyorch.runtime.model_map import ModelMap

_ALIKE = 3  # files without experts, after which none is expected to have any
_PREFERRED_BITS = 4.85  # of Q4_K_M: computing is measured on the file that is nearest to it


@dataclass(frozen=True)
class Download:
    """The download of a model.

    Attributes:
        n_bytes: Bytes to fetch.
        bytes_per_second: Measured now, over one connection. None: nothing is to be fetched, or nothing arrived.
        seconds: Of the whole download at that speed.
        directory: The cache.
        free_bytes: Free space there.
        enough: Whether the model fits there.
    """

    n_bytes: int
    sampled_bytes: int
    bytes_per_second: float | None
    seconds: float | None
    directory: Path
    free_bytes: int
    enough: bool


@dataclass(frozen=True)
class Conversion:
    """The conversion of a repository without a GGUF.

    Attributes:
        architecture: The class of the checkpoint.
        checkpoint_bytes: Of its weights.
        needed_bytes: Space for the result and the 16-bit file before it, beside the checkpoint.
        free_bytes: Free space of the current directory.
        enough: Whether both fit.
    """

    architecture: str
    checkpoint_bytes: int
    needed_bytes: int
    free_bytes: int
    enough: bool
    command: str


@dataclass(frozen=True)
class HubAdvice:
    """The object that --json prints for a model of the hub.

    Attributes:
        name: The model that the advice is about.
        cached: Its file in the cache. None: it is not fetched yet.
        commit: Of the repository. None: the hub was not asked.
        header_bytes: Bytes of headers that were read over the network.
        files: The files of the repository, if the user named none; or the types that a conversion makes.
        reason: Why the model is recommended. "": the user named it, or it is the only one.
        others: The number of other models in the repository that were not compared.
        left_out: Why files are not in the comparison: they are damaged, or have no experts.
        measured, estimated: The origin of the figures.
        conversion: None: the repository has a GGUF.
    """

    name: str
    cached: Path | None
    commit: str | None
    header_bytes: int
    files: list[Choice]
    reason: str
    others: int
    left_out: list[str]
    download: Download | None
    measured: list[str]
    estimated: list[str]
    advice: Advice
    conversion: Conversion | None = None

    def parts(self) -> list[str | Table | Facts]:
        read = f"{format_bytes(self.header_bytes)} were read over the network, at commit {(self.commit or '')[:8]}"
        facts = [("headers", read if self.header_bytes else "read from the cache")]
        parts: list[str | Table | Facts] = []
        if self.files:
            parts += [table_of(self.files), "", f"recommended: {self.name}, because {self.reason}", ""]
            if self.conversion is not None:
                parts[:0] = ["the repository has no GGUF file, and a checkpoint that pyorch convert takes "
                             f"({self.conversion.architecture})", ""]
                parts[-1:] = [f"convert it with: {self.conversion.command}", ""]
        elif self.others:
            repo = self.name.partition(":")[2].partition(":")[0]
            parts += [f"note: the repository has {counted(self.others, 'other model')}: pyorch advise "
                      f"hf:{'/'.join(repo.split('/')[:2])} compares all", ""]
        if self.left_out:
            parts += [*(f"note: a file is left out: {reason}" for reason in self.left_out), ""]
        facts += download_facts(self.download) if self.download is not None else []
        facts += conversion_facts(self.conversion) if self.conversion is not None else []
        facts += [("cache", f"this model is fetched already: {self.cached}")] if self.cached is not None else []
        facts += [("measured", ", ".join(self.measured)), ("estimated", ", ".join(self.estimated))]
        return [*parts, Facts(facts), "", *parts_of(self.advice)]


def table_of(choices: list[Choice]) -> Table:
    """Returns the table of files; an asterisk marks a rate with a scaled time to compute."""
    from pyorch.advise.comparison import SCALED

    def memory(one: Choice) -> str:
        if one.budget_bytes is None:
            return "does not fit" if one.computing else ""
        return "all experts" if one.all_in_memory else f"streams, {format_bytes(one.budget_bytes)}"

    rows = []
    for one in choices:
        rate = "" if one.decode_rate is None else f"{one.decode_rate:.1f}{'*' if one.computing == SCALED else ' '}"
        first = "" if one.first_token_seconds is None else f"{one.first_token_seconds:.1f} s"
        fetched = "fetched" if one.missing_bytes == 0 else ""
        rows.append((_short(one.name), format_bytes(one.n_bytes), f"{one.bits:.1f}", memory(one), rate, first, fetched))
    columns = ("file", "size", "bits", "in memory", "tok/s", "first token", "")
    return Table(columns, rows, left=("file", "in memory", ""))


def _short(name: str) -> str:
    """Returns the quantization, or the file."""
    rest = name.removeprefix("hf:")
    return rest.partition(":")[2] or rest.split("/", 2)[-1]


def download_facts(download: Download) -> list[tuple[str, str]]:
    if download.n_bytes == 0:
        return []
    time = "its speed could not be measured"
    if download.seconds is not None:
        time = (f"about {_duration(download.seconds)} at {_rate(download.bytes_per_second)} (measured now with "
                f"{format_bytes(download.sampled_bytes)} over one connection)")
    enough = "enough" if download.enough else (
        f"NOT enough: free {format_bytes(download.n_bytes + FEW_BYTES - download.free_bytes, round_up=True)} more, or "
        "name another disk with HF_HUB_CACHE")
    return [("download", f"{format_bytes(download.n_bytes)}, {time}"),
            ("space", f"{format_bytes(download.free_bytes)} free for {download.directory}: {enough}")]


def conversion_facts(conversion: Conversion) -> list[tuple[str, str]]:
    enough = "enough" if conversion.enough else (
        "NOT enough: name another disk with -o, or for the checkpoint with HF_HUB_CACHE")
    return [("conversion", f"about {format_bytes(conversion.needed_bytes, round_up=True)} for the 16-bit file and the "
                           f"result, beside the checkpoint; {format_bytes(conversion.free_bytes)} free here: {enough}")]


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.1f} GB/s" if bytes_per_second >= 1e9 else f"{bytes_per_second / 1e6:.3g} MB/s"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def advise_hub(request: Request, progress: Progress) -> HubAdvice:
    """Returns the advice for a model of the hub, or for a repository.

    Raises:
        PyorchError: The model does not exist, cannot be read, or cannot be advised about.
    """
    from pyorch.hub import cache, headers
    from pyorch.hub.download import Hub
    from pyorch.hub.reference import Reference

    reference, hub, notes = Reference.parse(request.args.model), Hub(), []
    progress.update(f"asking the hub for {reference}", 0, 0)
    listing = hub.listing(reference, notes.append)
    if listing is None:
        try:
            path = cache.model(reference, hub.directory)
        except PyorchError as error:
            raise PyorchError("; ".join([*(note.partition(": what was")[0] for note in notes), str(error)])) from None
        for note in notes:
            progress.say(f"note: {note}")
        with _opened(path, str(reference), request) as model_map:
            advice = request.advise(model_map, str(reference), progress)
        return HubAdvice(str(reference), path, None, 0, [], "", 0, [], None, *_origins(advice), advice)
    with headers.opened(hub, reference, listing) as repository:
        offers = repository.offers()
        if not offers:
            return _of_checkpoint(request, repository, hub.directory, listing.commit, progress)
        choices, reason, left_out = [], "", []
        if len(offers) > 1:
            offers, left_out = _suitable(request, repository, offers, progress)
        offer = offers[0]
        if len(offers) > 1:
            items = [Item(one.name, repository.open(one, progress.update), one.candidate.n_bytes, one.missing_bytes)
                     for one in offers]
            choices, index, reason = _compared(request, items, f"hf:{reference.repo}", hub.directory, progress)
            offer = offers[index]
        with _opened(repository.open(offer, progress.update), offer.name, request) as model_map:
            advice = request.advise(model_map, offer.name, progress)
        download = _download(repository, hub.directory, offer.missing_bytes, offer.candidate.files[0], progress)
        others = repository.others(offer) if not reference.whole else 0
        return HubAdvice(offer.name, offer.cached, listing.commit, repository.n_fetched, choices, reason, others,
                         left_out, download, *_origins(advice, download, choices), advice)


def _of_checkpoint(
    request: Request, repository: Repository, cache: Path, commit: str, progress: Progress
) -> HubAdvice:
    """Returns the advice for the conversion of a repository without a GGUF.

    Raises:
        PyorchError: It has no checkpoint that can be converted.
    """
    from pyorch.advise import stand_in
    from pyorch.advise.comparison import Choice
    from pyorch.convert import quantization
    from pyorch.convert.checkpoint import architecture_of

    where = f"hf:{repository.reference.repo}"
    weights = repository.weight_files()
    if not weights or not repository.has("config.json"):
        raise PyorchError(f"{where} has no model: neither a GGUF file, nor a checkpoint of config.json and safetensors")
    try:
        config = json.loads(repository.read_text("config.json"))
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise FormatError(f"{where}/config.json is not a JSON object")
    try:
        architecture = architecture_of(config, where)
    except FormatError:
        raise
    except PyorchError as error:
        raise PyorchError(f"{where} has no GGUF file and cannot be converted: {error}") from None
    outline = stand_in.read(where, config, repository.read_safetensors(weights, progress.update))
    missing = repository.missing_bytes(weights)
    kinds = {name: quantization.file_type(name) for name in quantization.names()}
    size = {name: round(outline.n_elements * kind.bits_per_weight / 8) for name, kind in kinds.items()}
    need = {name: round(outline.n_elements * quantization.outtype_bits("auto") / 8) + size[name] for name in kinds}
    stem, items = repository.reference.repo.rpartition("/")[2], []
    for name in stand_in.RECIPES:
        path = repository.directory / f"{stem}-{name}.gguf"
        stand_in.write(outline, name, path)
        items.append(Item(name, path, size[name], missing + need[name], kinds[name].bits_per_weight))
    known, index, reason = _compared(request, items, where, cache, progress)
    chosen = known[index].name
    by_name = {one.name: one for one in known}
    choices = [by_name.get(kind.name) or Choice(kind.name, size[kind.name], kind.bits_per_weight,
                                                missing + need[kind.name])
               for kind in sorted(kinds.values(), key=lambda kind: -kind.bits_per_weight)]
    output = items[index].path.name
    with _opened(items[index].path, output, request) as model_map:
        advice = request.advise(model_map, output, progress)
    advice = replace(advice, arch=architecture, notes=[
        *advice.notes, f"computing was measured with a stand-in of another architecture ({stand_in.ARCHITECTURE}) that "
                       "has the same experts and as many other weights"])
    download = _download(repository, cache, missing, weights[0], progress)
    free, needed = _free_bytes(Path()), need[chosen]
    shared = _device(Path()) == _device(cache)
    conversion = Conversion(
        architecture, repository.n_bytes(weights), needed, free, free >= needed + (missing if shared else 0),
        shlex.join(["pyorch", "convert", where, "-o", output, "--quantize", chosen]))
    measured, estimated = _origins(advice, download, choices)
    estimated.append("sizes after the conversion")
    return HubAdvice(output, None, commit, repository.n_fetched, choices, reason, 0, [], download, measured, estimated,
                     advice, conversion)


def _suitable(
    request: Request, repository: Repository, offers: list[Offer], progress: Progress
) -> tuple[list[Offer], list[str]]:
    """Returns the models that can be compared, and why the others cannot.

    Raises:
        PyorchError: None can, or a header cannot be fetched.
    """
    suitable, refusals = [], []
    for offer in offers:
        try:
            with _opened(repository.open(offer, progress.update), offer.name, request):
                suitable.append(offer)
        except (FormatError, UnsuitableError) as error:
            refusals.append(error)
            if isinstance(error, UnsuitableError) and not suitable and len(refusals) == _ALIKE:
                break  # the other quantizations of this model will not have experts either
    if not suitable:
        raise refusals[0]
    return suitable, [str(error) for error in refusals]


def _compared(
    request: Request, items: list[Item], where: str, cache: Path, progress: Progress
) -> tuple[list[Choice], int, str]:
    """Returns a choice for each item, the index of the recommended one, and the reason. See _Comparison."""
    comparison = _Comparison(request, items, where, progress)
    found = request.with_or_without_gpu(lambda: comparison.run(_free_bytes(cache)))
    request.args.again = False  # measured a moment ago
    return found


def _download(
    repository: Repository, directory: Path, n_bytes: int, file: str, progress: Progress
) -> Download:
    """Measures the connection, if something is to be fetched. file: a file from which it reads."""
    sample = repository.sample(file, progress.update) if n_bytes else None
    free_bytes = _free_bytes(directory)
    rate = sample.bytes_per_second if sample is not None else None
    return Download(n_bytes, sample.n_bytes if sample is not None else 0, rate, n_bytes / rate if rate else None,
                    directory, free_bytes, n_bytes == 0 or n_bytes + FEW_BYTES <= free_bytes)


def _free_bytes(directory: Path) -> int:
    """Returns the free space of a directory, which may not exist yet."""
    return shutil.disk_usage(_existing(directory)).free


def _device(directory: Path) -> int:
    return _existing(directory).stat().st_dev


def _existing(directory: Path) -> Path:
    wanted = directory.absolute()
    return next(path for path in (wanted, *wanted.parents) if path.is_dir())


def _origins(
    advice: Advice, download: Download | None = None, choices: list[Choice] | None = None
) -> tuple[list[str], list[str]]:
    """Returns the measured figures, and the estimated ones."""
    from pyorch.advise.comparison import SCALED
    from pyorch.advise.machine import START_SECONDS

    measured, estimated = [], ["tokens a second and the first token (a replay)"]
    if advice.disk.how != "given":
        measured.append("the disk")
    computed = advice.compute.load or advice.compute.start_seconds != START_SECONDS
    if computed:
        measured.append(f"computing of {_short(advice.model)} (a few layers with random routers)")
    if advice.memory.source != "as given":
        measured.append("free memory")
    if download is not None and download.bytes_per_second is not None:
        measured.append("the connection")
        estimated.append("the time of the download")
    if any(one.computing == SCALED for one in choices or ()):
        estimated.append("computing of files with * (in proportion to the weights that a token reads)")
    return measured, estimated


@contextlib.contextmanager
def _opened(path: Path, name: str, request: Request) -> Iterator[ModelMap]:
    """Yields the map of a model or a header. Errors have the model's name in place of the path.

    Raises:
        PyorchError: The model is damaged, or has no experts.
    """
    from pyorch.sidecars import packs

    try:
        with packs.open_model(path) as model_map:
            request.check(model_map, name)
            yield model_map
    except PyorchError as error:
        raise type(error)(str(error).replace(str(path), name)) from None


@dataclass(frozen=True)
class Item:
    """A model to compare. path: its file or header. bits: of a weight; None: as in the file."""

    name: str
    path: Path
    n_bytes: int
    missing_bytes: int
    bits: float | None = None


class _Comparison:
    """Estimates models at one budget: the first that the user gave, or the memory that is left."""

    def __init__(self, request: Request, items: list[Item], where: str, progress: Progress) -> None:
        self._request, self._items, self._where, self._progress = request, items, where, progress
        budgets = listed(request.args, "budget")
        self._budget = str(budgets[0]) if budgets else None

    def run(self, free_bytes: int) -> tuple[list[Choice], int, str]:
        """Returns a choice for each item, the index of the recommended one, and the reason.

        Raises:
            PyorchError: The models have no experts, or none fits.
        """
        with contextlib.ExitStack() as stack:
            self._maps = [stack.enter_context(_opened(item.path, item.name, self._request)) for item in self._items]
            return self._estimated(free_bytes)

    def _estimated(self, free_bytes: int) -> tuple[list[Choice], int, str]:
        from pyorch.advise.comparison import GIVEN, MEASURED, SCALED, scaled, settled
        from pyorch.advise.probe import read_shape

        request, args = self._request, self._request.args
        args.ctx = args.ctx or self._maps[0].default_ctx
        bits = [item.bits or 8 * model_map.info.file_bytes / model_map.info.n_params
                for item, model_map in zip(self._items, self._maps)]
        first = min(range(len(bits)), key=lambda i: abs(bits[i] - _PREFERRED_BITS))
        machine = request.machine(self._maps[first], self._progress)
        disk, compute = request.disk(machine), request.compute(machine)
        weights = [read_shape(model_map).token_bytes for model_map in self._maps]
        choices = []
        for i in range(len(self._maps)):
            self._progress.update(f"replaying {_short(self._items[i].name)}", i, len(self._maps))
            if args.compute_ms:
                choices.append(self._choice(i, bits[i], disk, compute, GIVEN))
            elif i == first:
                choices.append(self._choice(i, bits[i], disk, compute, MEASURED))
            else:
                choices.append(self._choice(i, bits[i], disk, scaled(compute, weights[i], weights[first]), SCALED))

        def measure(i: int) -> Choice:
            measured = request.compute(request.machine(self._maps[i], self._progress))
            return self._choice(i, bits[i], disk, measured, MEASURED)

        found = settled(choices, free_bytes, measure)
        if found is None:
            smallest = min(self._items, key=lambda item: item.n_bytes)
            raise PyorchError(f"no file of {self._where} fits into the memory that is free, nor does the smallest one, "
                              f"{smallest.name} ({format_bytes(smallest.n_bytes)})")
        return found

    def _choice(self, i: int, bits: float, disk: Disk, compute: Compute, computing: str) -> Choice:
        from pyorch.advise.comparison import Choice
        from pyorch.advise.estimates import Estimator
        from pyorch.advise.memory import room_for
        from pyorch.advise.routing import routing_of
        from pyorch.sidecars.predictor import PredictorFile

        request, item, model_map = self._request, self._items[i], self._maps[i]
        device = request.device(model_map, compute, self._progress)
        vram = request.wanted.budgets if request.wanted is not None else ()
        room = room_for(model_map, request.limit(), request.args.ctx, request.n_threads, device, vram)
        choice = Choice(item.name, item.n_bytes, bits, item.missing_bytes, computing=computing)
        budget = self._budget or (as_option(room.left) if room.left is not None else None)
        if budget is None:
            return choice
        estimator = Estimator(model_map, routing_of(model_map, None), compute, disk.bytes_per_second,
                              request.args.prompt_tokens, PredictorFile(), device and device.speed)
        try:
            estimate = estimator.estimate(budget, room.vram_budgets[-1] if room.vram_budgets else None)
        except BudgetError:
            return choice
        return replace(
            choice, budget_bytes=estimate.budget_bytes,
            all_in_memory=estimate.budget_bytes + estimate.vram_bytes >= model_map.info.slots_bytes,
            decode_rate=estimate.decode_rate, first_token_seconds=estimate.first_token_seconds)
