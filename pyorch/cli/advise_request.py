"""What `pyorch advise` is asked: the machine, the budgets and the device; and the advice for one model."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pyorch.cli.advice import Advice
from pyorch.cli.progress import Progress
from pyorch.cli.settings import OPTIONS, given_settings, listed
from pyorch.errors import FormatError, PyorchError
from pyorch.settings.budget import AUTO
from pyorch.settings.device_options import AUTO as ANY_GPU
from pyorch.settings.device_options import NONE, REMOTE
from pyorch.sizes import as_option, format_bytes

if TYPE_CHECKING:
    from pyorch.advise.device_estimate import Device
    from pyorch.advise.machine import Compute, Disk, Machine
    from pyorch.llama.division import MemoryLimit
    from pyorch.runtime.model_map import ModelMap

T = TypeVar("T")

SHARES = (25, 40, 60, 100)  # of the experts: the default budgets


class UnsuitableError(PyorchError):
    """A model that cannot be advised about: it has no experts, or makes no text."""


@dataclass
class Request:
    """The machine and the budgets that the user asks about. memory: None: that of this machine."""

    args: argparse.Namespace
    memory: MemoryLimit | None
    wanted: WantedDevice | None
    _refused: str = ""  # why a GPU was left out
    _disk: Disk | None = None

    @property
    def n_threads(self) -> int:
        from pyorch.llama.cores import physical_cores

        return given_settings(self.args, "budget").get("n_threads") or physical_cores()

    def limit(self) -> MemoryLimit:
        from pyorch.llama.memory import memory_limit

        return self.memory or memory_limit()

    def check(self, model_map: ModelMap, name: str) -> None:
        """Checks that the model can be advised about.

        Raises:
            UnsuitableError: It cannot.
        """
        if not model_map.layers:
            raise UnsuitableError(f"{name} is a dense model: it has no experts that could be read while it runs")
        try:
            model_map.check_text()
        except PyorchError as error:
            raise UnsuitableError(str(error)) from None

    def machine(self, model_map: ModelMap, progress: Progress) -> Machine:
        from pyorch.advise.machine import Machine

        return Machine(model_map, self.n_threads, progress.update, self.args.again)

    def disk(self, machine: Machine) -> Disk:
        from pyorch.advise.machine import Disk

        if self._disk is None:  # all models of a comparison are for one disk
            self._disk = Disk(self.args.read_bandwidth, "given") if self.args.read_bandwidth else machine.disk()
        return self._disk

    def compute(self, machine: Machine) -> Compute:
        from pyorch.advise.machine import START_SECONDS, Compute

        decode, prompt = (*(ms / 1000 for ms in self.args.compute_ms or ()), None, None)[:2]
        compute = Compute(decode, prompt, START_SECONDS) if prompt else machine.compute()
        if decode and not prompt:
            compute = replace(compute, decode_seconds=decode,
                              prefill_seconds=compute.prefill_seconds * decode / compute.decode_seconds)
        return compute

    def device(self, model_map: ModelMap, compute: Compute, progress: Progress) -> Device | None:
        return self.wanted and _device(self.wanted, model_map, self.n_threads, compute, progress)

    def advise(self, model_map: ModelMap, name: str, progress: Progress) -> Advice:
        """Returns the advice for a model. name: in commands.

        Raises:
            PyorchError: Something cannot be measured, or a budget does not suit the model.
        """
        self.args.ctx = self.args.ctx or model_map.default_ctx
        advice = self.with_or_without_gpu(lambda: _advise(self, model_map, name, progress))
        notes = [f"a GPU was left out: {self._refused}"] if self._refused else []
        return replace(advice, notes=[*advice.notes, *notes])

    def with_or_without_gpu(self, estimate: Callable[[], T]) -> T:
        """Returns an estimate. If a GPU that the user did not ask for prevents it, that GPU is left out."""
        try:
            return estimate()
        except PyorchError as error:
            if self.wanted is None or self.args.device is not None or self.wanted.name is None:
                raise
            self.wanted, self._refused = None, str(error)
            return estimate()


@dataclass(frozen=True)
class WantedDevice:
    """The device of the command line. budgets: its memory for experts; (): the rest."""

    name: str | None
    vram: int | None
    budgets: tuple[str, ...]
    link: float | None
    bandwidth: float | None


def wanted_device(args: argparse.Namespace) -> WantedDevice | None:
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
    wanted = WantedDevice(
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
    wanted: WantedDevice, model_map: ModelMap, n_threads: int, compute: Compute, progress: Progress
) -> Device:
    """Returns the device with the given values in place of the measured ones."""
    from pyorch.advise import device_estimate as devices

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


def _advise(request: Request, model_map: ModelMap, name: str, progress: Progress) -> Advice:
    from pyorch.advise.device_estimate import TYPICAL_BANDWIDTH
    from pyorch.advise.estimates import Estimator
    from pyorch.advise.gains import gains
    from pyorch.advise.machine import BUSY
    from pyorch.advise.memory import room_for
    from pyorch.advise.routing import routing_of
    from pyorch.sidecars.beside import Sidecars
    from pyorch.sidecars.predictor import PredictorFile
    from pyorch.traces.file import Trace
    from pyorch.traces.recorder import why_unrecordable

    args, wanted, info = request.args, request.wanted, model_map.info
    budgets = _budgets(args, model_map)
    n_threads = request.n_threads
    routing = routing_of(model_map, _trace(args, model_map, Trace))
    machine = request.machine(model_map, progress)
    disk, compute = request.disk(machine), request.compute(machine)
    memory = request.limit()
    device = request.device(model_map, compute, progress)
    room = room_for(model_map, memory, args.ctx, n_threads, device, wanted.budgets if wanted else ())
    without, left, vram_budgets = room.without, room.left, room.vram_budgets
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
                     f"{_missing(model_map, memory, room.others_bytes)} more")
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
        gains(model_map, estimator, estimate, disk.bytes_per_second, machine.repacking(), n_threads, name)
        for estimate in (estimates[-1], least))
    useful = [gain.sidecar for gain, at_least in zip(found, found_at_least)
              if gain.helps(estimates[-1]) or at_least.helps(least)]
    if compute.load > BUSY:
        notes.append(f"the machine had other work when computing was measured (a load of {compute.load:.1f}): advise "
                     "measures it anew on a quieter machine, and with --again")
    if device is not None and device.speed.how == "assumed":
        notes.append(f"how fast the device is was assumed: uploads at {device.speed.link / 1e9:.3g} GB/s "
                     f"({'as given' if wanted.link else 'PCIe 4 with 16 lanes'}), weights read at "
                     f"{(wanted.bandwidth or TYPICAL_BANDWIDTH) / 1e9:.3g} GB/s: --link-bandwidth and "
                     "--vram-bandwidth set others")
    if device is not None:
        notes.append(f"each layer is assumed to cost another {1000 * device.speed.layer_seconds:.2f} ms on the device, "
                     "for kernel launches and synchronization")
    if wanted is not None and REMOTE in (wanted.name or ""):
        notes.append("a device of another process synchronizes through a socket, which takes longer than that: with "
                     "small experts most of the time")
    if device is not None and estimates[-1].decode_rate <= estimates[0].decode_rate:
        notes.append("the device gains nothing here: the command below leaves it out")
        wanted, left = None, without
    why = why_unrecordable(model_map)
    if why:
        notes.append(f"{why}, so neither maps, buddies nor ghosts can be made")
    elif not routing.observed:
        beside = name == model_map.path
        trace = _default_trace(model_map) if beside else Path(_default_trace(model_map).name)
        notes.append("to replace the assumed routing by a recorded one: "
                     f"pyorch profile {shlex.quote(name)} --data TEXT --states "
                     f"-o {shlex.quote(str(trace))}, then advise again{'' if beside else f' with --trace {trace}'}")
    notes += [f"worth making: {gain.command}" for gain in found if gain.sidecar in useful and not gain.lossy]
    if useful:
        lossy = " --with-lossy" if any(gain.lossy for gain in found if gain.sidecar in useful) else ""
        notes.append(f"all that helps here is made by: pyorch prepare {shlex.quote(name)} --data TEXT{lossy}")
    plot = None
    if args.plot is not None:
        from pyorch.advise.advice_plot import draw

        ordered = sorted(estimates, key=lambda estimate: estimate.budget_bytes)
        plot = draw(ordered, 1 / compute.decode_seconds, estimates[-1].budget_bytes, args.plot)
    return Advice(
        model=name, arch=info.arch, n_threads=n_threads, disk=disk, compute=compute, memory=memory,
        device=device, n_ctx=args.ctx, context_bytes=room.context_bytes, auto_bytes=left, routing=routing.source,
        prompt_tokens=args.prompt_tokens, estimates=estimates, budget_names=[name for _, name, _ in plan], gains=found,
        least_budget=next(name for (_, name, _), estimate in zip(plan, estimates) if estimate is least),
        gains_at_least=found_at_least, useful=useful,
        command=_command(args, name, left, wanted) if left is not None else None, notes=notes, plot=plot,
    )


def _budgets(args: argparse.Namespace, model_map: ModelMap) -> list[str]:
    """Returns the given budgets; by default those of SHARES at or above the floor."""
    asked = listed(args, "budget")
    if asked:
        for budget in asked:
            budget.resolve(model_map.info)
        return list(map(str, asked))
    info = model_map.info
    return [f"{share}%" for share in SHARES if share * info.slots_bytes // 100 >= info.floor_bytes]


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


def _command(args: argparse.Namespace, name: str, left: int, wanted: WantedDevice | None) -> str:
    """Returns the command. It names a budget only if "auto" would choose another one, for a different machine."""
    words = ["pyorch", "run", name, "--ctx", str(args.ctx)]
    if args.memory is not None:
        words += ["--budget", as_option(left - left % (1 << 20))]
    if wanted is not None:
        words += ["--device", wanted.name or "auto"]
        words += ["--vram-budget", wanted.budgets[-1]] if wanted.budgets else []
    words += ["-p", "TEXT"]
    return shlex.join(words)
