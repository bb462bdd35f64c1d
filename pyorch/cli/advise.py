"""`pyorch advise`: the estimated speed of a model at each budget, and the command to run it with."""

from __future__ import annotations

import argparse
from pathlib import Path

from pyorch.cli.advice import parts_of
from pyorch.cli.advise_request import SHARES, Request, wanted_device
from pyorch.cli.hub import is_of_hub
from pyorch.cli.numbers import number, rate, size, whole
from pyorch.cli.options import add_force, add_model, answer, check_own, check_readable
from pyorch.cli.progress import Progress
from pyorch.cli.settings import add_settings

EXAMPLE = """pyorch advise olmoe.gguf
  pyorch advise hf:ORG/NAME
  pyorch advise olmoe.gguf --trace olmoe.trace --budget 30%,50% --plot pictures
  pyorch advise olmoe.gguf --device auto
  pyorch advise olmoe.gguf --vram 8GiB --link-bandwidth pcie3 --vram-bandwidth 200GB/s"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description += (
        " Disk, computing and memory of this machine are measured once and stored. Then cache, predictors and disk run "
        "in simulated time. The header of the model is enough; no weight is needed. Of a model of the hub "
        "that is not fetched yet, only headers are read: hf:ORG/NAME compares the files of the repository and "
        "recommends one, and the time of the download is estimated."
    )
    add_model(parser, "of which nothing is fetched but headers")
    parser.set_defaults(fetch=False)
    add_settings(parser, "budget", "n_threads", lists=("budget",),
                 defaults={"budget": ",".join(f"{share}%" for share in SHARES) + ", and what memory leaves"})
    parser.add_argument("--trace", type=Path, metavar="FILE",
                        help="routing recorded by pyorch profile (default: MODEL.trace if it exists, else the use "
                             "counts in MODEL.maps.gguf, else an assumption)")
    parser.add_argument("--ctx", type=whole(1), metavar="N",
                        help="leave memory for a context of N tokens (default: as trained, at most 4096)")
    parser.add_argument("--prompt-tokens", type=whole(1), default=512, metavar="N",
                        help="estimate the time to the first token for a prompt of N tokens (default: 512)")
    parser.add_argument("--memory", type=size, metavar="SIZE",
                        help="advise for a machine with this much free memory, such as 16GiB (default: the free memory "
                             "of this machine)")
    parser.add_argument("--read-bandwidth", type=rate, metavar="RATE",
                        help="speed of the disk, such as 3GB/s (default: measured)")
    parser.add_argument("--compute-ms", type=_times, metavar="MS[:MS]",
                        help="time to decode a token with all experts in memory, and after a colon the time of a token "
                             "of a prompt; then nothing is measured (default: measured on small models of the same "
                             "shape)")
    devices = parser.add_argument_group(
        "devices", "Those of this machine, whose speed is measured, or one that it might have.")
    devices.add_argument("--device", metavar="NAME",
                         help="advise for these devices too: auto for the GPUs, names such as CUDA0, or rpc:HOST:PORT, "
                              "with commas between them (default: auto where there is a GPU, else none)")
    devices.add_argument("--vram", type=size, metavar="SIZE",
                         help="memory of the device for experts, other layers and the context (default: the free "
                              "memory of --device)")
    devices.add_argument("--vram-budget", metavar="SIZE,...",
                         help="memory of the device for experts, several with commas between them: sizes, or shares of "
                              "the experts (default: the rest after other layers and the context)")
    devices.add_argument("--link-bandwidth", type=_link, metavar="RATE",
                         help="speed of uploads to the device, such as 12GB/s, or pcie3, pcie4 or pcie5, with 16 lanes "
                              "(default: measured on --device; else pcie4 is assumed)")
    devices.add_argument("--vram-bandwidth", type=rate, metavar="RATE",
                         help="speed at which the device reads weights to compute a token, such as 200GB/s, about "
                              "two thirds of its data sheet (default: measured on --device; else 250GB/s "
                              "is assumed)")
    parser.add_argument("--again", action="store_true", help="measure again, in place of stored results")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write a picture, advice.png, into DIR")
    add_force(parser, "")
    parser.add_argument("--json", action="store_true", help="print the advice as one JSON object")


def run(args: argparse.Namespace) -> int:
    from pyorch import pictures
    from pyorch.advise.advice_plot import picture_in
    from pyorch.llama.division import MemoryLimit
    from pyorch.sidecars import packs

    check_readable([args.trace])
    memory = MemoryLimit("as given", args.memory, args.memory) if args.memory else None
    request = Request(args, memory, wanted_device(args))
    if args.plot is not None:
        pictures.check(args.plot)
        check_own(picture_in(args.plot), args.model, args.force)
    if is_of_hub(args.model):
        from pyorch.cli.advise_hub import advise_hub

        with Progress() as progress:
            found = advise_hub(request, progress)
        return answer(args, found, found.parts)
    with packs.open_model(args.model) as model_map, Progress() as progress:
        request.check(model_map, args.model)
        advice = request.advise(model_map, args.model, progress)
    return answer(args, advice, lambda: parts_of(advice))


def _times(text: str) -> tuple[float, ...]:
    """Parses the time of a decoded token, and optionally of a token of a prompt."""
    return tuple(map(number(above=0, most=1e9), text.split(":", 1)))


def _link(text: str) -> float:
    """Parses bytes a second, a number or a name."""
    from pyorch.advise.device_estimate import LINKS

    return LINKS[text.lower()] if text.lower() in LINKS else rate(text)
