"""`pyorch advise`: the estimated speed of a model at each budget, and the command to run it with."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pyorch.cli.advice import Advice, parts_of
from pyorch.cli.numbers import number, rate, size, whole
from pyorch.cli.options import add_force, answer, check_own, check_readable
from pyorch.cli.progress import Progress
from pyorch.cli.settings import OPTIONS, add_settings, given_settings, listed
from pyorch.errors import FormatError, PyorchError
from pyorch.settings.budget import AUTO
from pyorch.settings.device import AUTO as ANY_GPU
from pyorch.settings.device import NONE, REMOTE
from pyorch.sizes import as_option, format_bytes

if TYPE_CHECKING:
    from pyorch.advise.device import Device
    from pyorch.advise.machine import Compute
    from pyorch.llama.division import MemoryLimit
    from pyorch.runtime.model_map import ModelMap

_SHARES = (25, 40, 60, 100)


EXAMPLE = """pyorch advise olmoe.gguf
  pyorch advise olmoe.gguf --trace olmoe.trace --budget 30%,50% --plot pictures
  pyorch advise olmoe.gguf --device auto
  pyorch advise olmoe.gguf --vram 8GiB --link-bandwidth pcie3 --vram-bandwidth 200GB/s"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description += (
        " Disk, computing and memory of this machine are measured once and stored. Then cache, predictors and disk run "
        "in simulated time. The header of the model is enough; no weight is needed."
    )
    parser.add_argument("model", metavar="MODEL.gguf", help="the model, a GGUF file")
    add_settings(parser, "budget", "n_threads", lists=("budget",),
                 defaults={"budget": ",".join(f"{share}%" for share in _SHARES) + ", and what memory leaves"})
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
    wanted = _wanted_device(args)
    with packs.open_model(args.model) as model_map, Progress() as progress:
        if not model_map.layers:
            raise PyorchError(f"{args.model} is a dense model: it has no experts that could be read while it runs")
        model_map.check_text()
        if args.plot is not None:
            pictures.check(args.plot)
            check_own(picture_in(args.plot), args.model, args.force)
        args.ctx = args.ctx or model_map.default_ctx
        try:
            advice = _advise(args, model_map, memory, wanted, progress)
        except PyorchError as error:
            if wanted is None or args.device is not None or wanted.name is None:
                raise
            advice = _advise(args, model_map, memory, None, progress)  # the user did not ask for that GPU
            advice = replace(advice, notes=[*advice.notes, f"a GPU was left out: {error}"])
    return answer(args, advice, lambda: parts_of(advice))


def _times(text: str) -> tuple[float, ...]:
    """Parses the time of a decoded token, and optionally of a token of a prompt."""
    return tuple(map(number(above=0, most=1e9), text.split(":", 1)))


def _link(text: str) -> float:
    """Parses bytes a second, a number or a name."""
    from pyorch.advise.device import LINKS

    return LINKS[text.lower()] if text.lower() in LINKS else rate(text)


@dataclass(frozen=True)
class _WantedDevice:
    """The device of the command line. budgets: its memory for experts; (): the rest."""

    name: str | None
    vram: int | None
    budgets: tuple[str, ...]
    link: float | None
    bandwidth: float | None


def _wanted_device(args: argparse.Namespace) -> _WantedDevice | None:
    """Returns the device of the command line, or None.

    Raises:
        PyorchError: The options contradict each other.
    """
    from pyorch.runtime.devices import find_devices, has_gpu

    options = (args.vram, args.vram_budget, args.link_bandwidth, args.vram_bandwidth)
    unasked = args.device is None and not any(options) and has_gpu()
    name = ANY_GPU if unasked else OPTIONS["device"].parse(args.device)
    if name == NONE and (args.device is not None or not any(options)):  # other options of a device do not matter then
        return None
    if args.vram and args.vram_budget:
        raise PyorchError("--vram is all memory of a device, --vram-budget what experts get of it: give one of them")
    wanted = _WantedDevice(
        None if name == NONE else name, args.vram, tuple(map(str, listed(args, "vram_budget"))), args.link_bandwidth,
        args.vram_bandwidth)
    if wanted.name is not None:
        find_devices(wanted.name)
        return wanted
    if str(AUTO) in wanted.budgets:
        raise PyorchError("what --vram-budget auto leaves to experts is known of a device that --device names: give "
                          "--vram SIZE for another one")
    if not (wanted.vram or wanted.budgets):
        raise PyorchError("of which device? Name it with --device, or say its memory with --vram, such as 8GiB")
    return wanted


def _device(
    wanted: _WantedDevice, model_map: ModelMap, n_threads: int, compute: Compute, progress: Progress
) -> Device:
    """Returns the device with the given values in place of the measured ones."""
    from pyorch.advise import device as devices

    if wanted.name is None:
        device = devices.given(wanted.vram, wanted.link or devices.LINKS[devices.TYPICAL_LINK],
                               wanted.bandwidth or devices.TYPICAL_BANDWIDTH, model_map, compute)
        known = wanted.link and wanted.bandwidth
        return device if known else replace(device, speed=replace(device.speed, how="assumed"))
    progress.update("measuring the device", 0, 0)
    found = devices.measured(wanted.name, model_map, n_threads)
    speed = found.speed
    if wanted.bandwidth is not None:
        of_bandwidth = devices.given(None, speed.link, wanted.bandwidth, model_map, compute).speed
        speed = replace(speed, decode=of_bandwidth.decode, how="given")
    if wanted.link is not None:
        speed = replace(speed, link=wanted.link, how="given")
    memory = (wanted.vram, wanted.vram) if wanted.vram is not None else (found.total_bytes, found.free_bytes)
    return replace(found, total_bytes=memory[0], free_bytes=memory[1], speed=speed)


def _advise(
    args: argparse.Namespace, model_map: ModelMap, memory: MemoryLimit | None, wanted: _WantedDevice | None,
    progress: Progress,
) -> Advice:
    from pyorch.advise.device import TYPICAL_BANDWIDTH
    from pyorch.advise.device import rest_for_experts as rest_of_device
    from pyorch.advise.estimates import Estimator
    from pyorch.advise.gains import gains
    from pyorch.advise.machine import BUSY, START_SECONDS, Compute, Disk, Machine
    from pyorch.advise.memory import context_bytes, rest_for_experts
    from pyorch.advise.routing import routing_of
    from pyorch.llama.cores import physical_cores
    from pyorch.llama.device import host_bytes_beside_device
    from pyorch.llama.memory import memory_limit
    from pyorch.sidecars.beside import Sidecars
    from pyorch.sidecars.predictor import PredictorFile
    from pyorch.traces.file import Trace
    from pyorch.traces.recorder import why_unrecordable

    info = model_map.info
    budgets = _budgets(args, model_map)
    n_threads = given_settings(args, "budget").get("n_threads") or physical_cores()
    routing = routing_of(model_map, _trace(args, model_map, Trace))
    machine = Machine(model_map, n_threads, progress.update, args.again)
    disk = Disk(args.read_bandwidth, "given") if args.read_bandwidth else machine.disk()
    decode, prompt = (*(ms / 1000 for ms in args.compute_ms or ()), None, None)[:2]
    compute = Compute(decode, prompt, START_SECONDS) if prompt else machine.compute()
    if decode and not prompt:
        compute = replace(compute, decode_seconds=decode,
                          prefill_seconds=compute.prefill_seconds * decode / compute.decode_seconds)
    memory = memory or memory_limit()
    n_context_bytes = n_host_bytes = context_bytes(model_map, args.ctx, n_threads)
    host_dense_bytes, device, vram_budgets = info.dense_bytes, None, []
    without = rest_for_experts(info, memory, host_dense_bytes, n_context_bytes)
    if wanted is not None:
        device = _device(wanted, model_map, n_threads, compute, progress)
        if not device.shares_memory:
            host_dense_bytes = host_bytes_beside_device(model_map)
            n_host_bytes -= model_map.kv_bytes(args.ctx)
        # A device that shares the processor's memory has none for experts unless the user gives a budget.
        vram_budgets = [
            budget if budget != "auto" else "0" if device.shares_memory else
            as_option(rest_of_device(device, model_map, host_dense_bytes, n_context_bytes))
            for budget in wanted.budgets or ("auto",)]
    left = rest_for_experts(info, memory, host_dense_bytes, n_host_bytes)
    notes = []
    try:
        predictor = Sidecars(model_map).predictor
    except FormatError as error:
        predictor = PredictorFile()
        notes.append(f"{error}; until then experts are foreseen without it")
    estimator = Estimator(model_map, routing, compute, disk.bytes_per_second, args.prompt_tokens, predictor,
                          device and device.speed)
    if left is None:
        notes.append(f"the model does not fit into the memory that is free: even the fewest experts need "
                     f"{_missing(model_map, memory, host_dense_bytes + n_host_bytes)} more")
    rest = [(as_option(rest if rest is not None else info.floor_bytes), "least" if rest is None else "auto")
            for rest in (without, left)]
    asked = [(budget, budget) for budget in budgets]
    plan = [(budget, name, None) for budget, name in (rest[:1] if device else [*asked, rest[1]])]
    plan += [(budget, name, vram_budget) for vram_budget in vram_budgets for budget, name in [*asked, rest[1]]]
    estimates = []
    for n, (budget, _, vram_budget) in enumerate(plan):
        beside = f", {vram_budget} of the device" if vram_budget else ""
        progress.update(f"replaying a budget of {budget}{beside}", n, len(plan) + 1)
        estimates.append(estimator.estimate(budget, vram_budget))
    progress.update("replaying with sidecars", len(plan), len(plan) + 1)
    least = min(estimates[-len(asked) - 1:], key=lambda estimate: estimate.budget_bytes)
    found, found_at_least = (
        gains(model_map, estimator, estimate, disk.bytes_per_second, machine.repacking(), n_threads)
        for estimate in (estimates[-1], least))
    useful = [gain.sidecar for gain, at_least in zip(found, found_at_least)
              if gain.helps(estimates[-1]) or at_least.helps(least)]
    if compute.load > BUSY:
        notes.append(f"the machine had other work when computing was measured (a load of {compute.load:.1f}): advise "
                     "measures it anew on a quieter machine, and with --again")
    if device is not None and device.speed.how == "assumed":
        notes.append(f"how fast the device is was assumed: uploads at {device.speed.link / 1e9:.3g} GB/s "
                     f"({'as given' if wanted.link else 'PCIe 4 with 16 lanes'}), weights read at "
                     f"{(wanted.bandwidth or TYPICAL_BANDWIDTH) / 1e9:.3g} GB/s: say --link-bandwidth and "
                     "--vram-bandwidth if you know better")
    if device is not None:
        notes.append(f"{1000 * device.speed.layer_seconds:.2f} ms more for each layer are assumed, for what a device "
                     "is told and asked beside its computing")
    if wanted is not None and REMOTE in (wanted.name or ""):
        notes.append("a device of another process is told and asked through a socket, which takes longer than that: "
                     "with small experts most of the time")
    if device is not None and estimates[-1].decode_rate <= estimates[0].decode_rate:
        notes.append("the device gains nothing here: the command below leaves it out")
        wanted, left = None, without
    why = why_unrecordable(model_map)
    if why:
        notes.append(f"{why}, so neither maps, buddies nor ghosts can be made")
    elif not routing.observed:
        notes.append(f"for more than an assumption: pyorch profile {shlex.quote(args.model)} --data TEXT --states "
                     f"-o {shlex.quote(str(_default_trace(model_map)))}, then advise again")
    notes += [f"worth making: {gain.command}" for gain in found if gain.sidecar in useful and not gain.lossy]
    if useful:
        lossy = " --with-lossy" if any(gain.lossy for gain in found if gain.sidecar in useful) else ""
        notes.append(f"all that helps here is made by: pyorch prepare {shlex.quote(args.model)} --data TEXT{lossy}")
    plot = None
    if args.plot is not None:
        from pyorch.advise.advice_plot import draw

        ordered = sorted(estimates, key=lambda estimate: estimate.budget_bytes)
        plot = draw(ordered, 1 / compute.decode_seconds, estimates[-1].budget_bytes, args.plot)
    return Advice(
        model=model_map.path, arch=info.arch, n_threads=n_threads, disk=disk, compute=compute, memory=memory,
        device=device, n_ctx=args.ctx, context_bytes=n_context_bytes, auto_bytes=left, routing=routing.source,
        prompt_tokens=args.prompt_tokens, estimates=estimates, budget_names=[name for _, name, _ in plan], gains=found,
        least_budget=next(name for (_, name, _), estimate in zip(plan, estimates) if estimate is least),
        gains_at_least=found_at_least, useful=useful,
        command=_command(args, model_map, left, wanted) if left is not None else None, notes=notes, plot=plot,
    )


def _budgets(args: argparse.Namespace, model_map: ModelMap) -> list[str]:
    """Returns the given budgets; by default those of _SHARES at or above the floor."""
    asked = listed(args, "budget")
    if asked:
        for budget in asked:
            budget.resolve(model_map.info)
        return list(map(str, asked))
    info = model_map.info
    return [f"{share}%" for share in _SHARES if share * info.slots_bytes // 100 >= info.floor_bytes]


def _trace(args: argparse.Namespace, model_map: ModelMap, read):
    """Returns the trace of the command line, or the trace beside the model if it belongs to the model."""
    from pyorch.sidecars import container

    if args.trace is not None:
        return read(args.trace)
    path = _default_trace(model_map)
    if not path.is_file():
        return None
    try:
        trace = read(path)
    except FormatError:
        return None
    return trace if len(trace) and trace.header.fingerprint == container.fingerprint(model_map) else None


def _default_trace(model_map: ModelMap) -> Path:
    from pyorch.runtime.model_map import beside

    return beside(model_map.path, "trace")


def _missing(model_map: ModelMap, memory: MemoryLimit, n_other_bytes: int) -> str:
    return format_bytes(model_map.info.floor_bytes - memory.rest_bytes(n_other_bytes), round_up=True)


def _command(
    args: argparse.Namespace, model_map: ModelMap, left: int, wanted: _WantedDevice | None
) -> str:
    """Returns the command. It names a budget only if "auto" would choose another one, for a different machine."""
    words = ["pyorch", "run", model_map.path, "--ctx", str(args.ctx)]
    if args.memory is not None:
        words += ["--budget", as_option(left - left % (1 << 20))]
    if wanted is not None:
        words += ["--device", wanted.name or "auto"]
        words += ["--vram-budget", wanted.budgets[-1]] if wanted.budgets else []
    words += ["-p", "TEXT"]
    return shlex.join(words)
