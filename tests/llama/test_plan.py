"""What settings mean for a model, before an engine is made; also on machines that are made up of facts."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import llama_cpp.llama_cpp as llama
import numpy as np
import pytest
from architectures import Zoo
from ghost_layers import random_ghosts

import pyorch.llama.engine_plan as planning
from pyorch.cli import settings as flags
from pyorch.errors import BudgetError, PyorchError
from pyorch.llama.device_placement import NO_PROMPT, Placement
from pyorch.llama.division import Division, MemoryLimit, Room, device_margin, divide
from pyorch.llama.engine_plan import Contents, EnginePlan, plan
from pyorch.llama.facts import Facts, Header, Request, questions, settle
from pyorch.llama.layouts import LayoutRates
from pyorch.llama.managed import build
from pyorch.llama.measure import ContextSizes
from pyorch.llama.survey import make_plan
from pyorch.planning.makespan import Delays
from pyorch.planning.planner import LayerCosts, Planner, Split
from pyorch.planning.ranks import even_inclusion
from pyorch.runtime.devices import Device
from pyorch.runtime.model_map import LayerInfo, MapInfo, ModelMap, Role
from pyorch.settings.budget import RESIDENT, Budget
from pyorch.settings.option import option, options, whole
from pyorch.settings.reads import Reads
from pyorch.settings.settings import Settings
from pyorch.sizes import GiB, MiB


def planned(path: Path, **settings: object) -> EnginePlan:
    params = llama.llama_model_default_params()
    params.n_gpu_layers = 0
    return make_plan(Settings(**settings), ModelMap(path), params)


def test_a_plan_says_all_that_an_engine_is_made_of_and_cannot_be_changed(small_moe: Path) -> None:
    plan = planned(small_moe, budget="40%", policy="lru", prefetch="quasi-hidden:2:0.5")
    assert plan.division.budget == Budget.parse("40%").resolve(plan.map.info) and not plan.automatic
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.division = None
    with build(plan) as engine:
        assert engine.stats().budget_bytes == plan.division.budget


def test_the_automatic_budget_is_the_least_that_works_until_a_context_says_more(small_moe: Path) -> None:
    plan = planned(small_moe)
    assert plan.automatic and plan.division.budget == plan.map.info.floor_bytes


def test_no_engine_is_planned_where_all_experts_are_to_be_resident(small_moe: Path) -> None:
    plan = planned(small_moe, budget=RESIDENT)
    assert plan.division.budget is None and build(plan) is None


def test_a_header_without_weights_is_told(small_moe: Path, tmp_path: Path) -> None:
    header = tmp_path / "header.gguf"
    with small_moe.open("rb") as whole, header.open("wb") as file:
        file.write(whole.read(1 << 20))
        file.truncate(small_moe.stat().st_size)
    for path, told in ((header, True), (small_moe, False)):
        notes = planned(path, budget="40%").notes
        assert any("seems to be a header without weights" in note for note in notes) == told


def test_a_lossy_setting_that_waits_for_all_that_a_token_uses_is_told(small_moe: Path, zoo: Zoo) -> None:
    top_2 = planned(zoo.path("mixtral", "Q8_0"), budget="100%", substitution="heaviest,sacred=2")
    assert top_2.notes[-1] == ("the lossy setting heaviest,sacred=2 changes nothing: it waits for a token's heaviest "
                               "experts, 2 of the 2 that the model uses in a layer; sacred=1 does not")
    for path, setting in ((small_moe, "heaviest,sacred=2"), (top_2.map.path, "heaviest")):
        assert planned(Path(path), budget="100%", substitution=setting).notes[-1] == ""


def test_a_budget_counts_ghosts(small_moe: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(small_moe, tmp_path))
    with ModelMap(path) as model_map:
        random_ghosts(1).write(path.with_suffix(".ghosts.gguf"), model_map)
    lossless, lossy = (planned(path, budget="40%", substitution=setting) for setting in ("heaviest", "ghosts"))
    assert lossless.division.budget - lossy.division.budget == lossy.ghosts.n_bytes > 0
    with build(lossy) as engine:
        assert engine.stats().budget_bytes == lossy.division.budget
    floor = lossy.map.info.floor_bytes
    assert planned(path, budget=str(floor), substitution="heaviest").division.budget == floor
    with pytest.raises(BudgetError, match="are for ghosts, is below the floor of .* use --budget") as refused:
        planned(path, budget=str(floor), substitution="ghosts")
    least = str(refused.value).split("--budget ")[1].split()[0]
    assert planned(path, budget=least, substitution="ghosts").division.budget >= floor
    slots = lossy.map.info.slots_bytes
    assert planned(path, budget="100%", substitution="ghosts").division.budget == slots - lossy.ghosts.n_bytes
    assert planned(path, budget=str(slots + lossy.ghosts.n_bytes), substitution="ghosts").division.budget == slots
    assert planned(path, substitution="ghosts").division.budget == floor


@pytest.mark.parametrize("settings, error", [
    ({"budget": "1KiB"}, BudgetError),
    ({"budget": "40%", "substitution": "buddies"}, PyorchError),
    ({"budget": "40%", "substitution": "ghosts"}, PyorchError),
    ({"budget": "40%", "pools": "0.5,0.5,0,0"}, PyorchError),
    ({"budget": "40%", "device": "CUDA77"}, PyorchError),
])
def test_what_the_model_lacks_is_said_when_it_is_planned(
    small_moe: Path, tmp_path: Path, settings: dict[str, str], error: type[PyorchError]
) -> None:
    alone = shutil.copy(small_moe, tmp_path / "alone.gguf")
    with pytest.raises(error):
        planned(Path(alone), **settings)


def test_what_loading_raises_ends_the_engine(small_moe: Path) -> None:
    from pyorch.llama.managed import loading

    made = []
    params = llama.llama_model_default_params()
    with pytest.raises(OSError), loading(os.fspath(small_moe), ModelMap(small_moe), Settings(budget="40%"),
                                         params) as managed:
        made.append(managed.engine)
        raise OSError
    with pytest.raises(PyorchError, match="closed"):
        made[0].stats()


# A model and machines that are made up

N_BLOCKS, N_EXPERT, EXPERT, BLOCK = 48, 128, 2 * MiB, 20 * MiB
_ROLES = (Role("gate", "q4_K", 2048), Role("up", "q4_K", 2048), Role("down", "q4_K", 768))
EXPERTS = N_BLOCKS * N_EXPERT * EXPERT
HEADER = Header(
    MapInfo("made-up", "Made up", 1, N_BLOCKS, N_BLOCKS, 8, EXPERTS + 2 * GiB, EXPERTS, N_BLOCKS * BLOCK + 600 * MiB,
            EXPERTS, 17 * EXPERT),
    tuple(LayerInfo(il, N_EXPERT, 8, _ROLES, EXPERT, EXPERT) for il in range(N_BLOCKS)), (BLOCK,) * N_BLOCKS,
    output_bytes=300 * MiB, host_bytes=300 * MiB, token_bytes=96 * 1024, state_bytes=0, trained_ctx=32768,
    path="made-up.gguf", map=None)
REQUEST = Request(n_layers=-1, n_ctx=4096, n_ubatch=512)

# In bytes of weights a second: of uploads, the processor's first and further rows, and the device's.
QUICK, QUICKER, SLOW = [25e9, 10e9, 40e9, 2e11, 2e12], [25e9, 10e9, 40e9, 4e11, 4e12], [25e9, 10e9, 40e9, 5e9, 5e9]


def gpu(name: str, **fields: bool) -> Device:
    return Device(name, name, "a GPU", None, **{"is_remote": False, **fields})


@dataclass
class Machine:
    """Answers the questions of plans and of contexts. gpus: to free bytes, total bytes and rates."""

    ram: int = 64 * GiB
    gpus: dict[Device, tuple[int, int, list[float] | str]] = field(default_factory=dict)
    planner_: object = None
    asked: list[str] = field(default_factory=list)

    def __getattribute__(self, name: str) -> object:
        found = object.__getattribute__(self, name)
        if callable(found) and not name.startswith("_"):
            self.asked.append(name)
        return found

    def memory(self) -> MemoryLimit:
        return MemoryLimit("made up", self.ram, self.ram - GiB)

    def devices(self, name: str) -> tuple[Device, ...]:
        return tuple(self.gpus)

    def device_memory(self, device: Device) -> tuple[int, int]:
        return self.gpus[device][:2]

    def rates(self, device: Device) -> list[float] | str:
        return self.gpus[device][2]

    def sizes(self, placement: Placement) -> ContextSizes:
        """A KV cache as llama.cpp lays it out, and buffers."""
        kv = HEADER.kv_bytes(REQUEST.n_ctx) // N_BLOCKS
        there = [len([il for il in blocks if il > N_BLOCKS - placement.n_layers or placement.n_layers < 0])
                 for blocks in placement.blocks()]
        return ContextSizes(40 * MiB + kv * (N_BLOCKS - sum(there)), tuple(60 * MiB + kv * n for n in there))

    def context_sizes(self, n_ubatch: int) -> ContextSizes:
        return ContextSizes(HEADER.kv_bytes(4096) + n_ubatch * MiB // 3, (n_ubatch * MiB // 3,) * len(self.gpus))

    def has_holes(self) -> bool:
        return False

    def pack(self, plain: bool, share: bool) -> tuple[Header | None, str, bool]:
        return HEADER if self.planner_ else None, "", False

    def planner(self) -> object:
        return self.planner_

    def reads(self, packed: bool) -> Reads:
        return Reads("io_uring", 16, MiB)

    def sidecars(self, packed: bool) -> None:
        return None

    def contents(self, substitution: object, packed: bool) -> Contents:
        return Contents()


def plan_on(machine: Machine, request: Request = REQUEST, **settings: object) -> EnginePlan:
    machine.asked.clear()
    return settle(partial(plan, Settings(**settings)), Facts(HEADER, request), machine)


def divide_on(machine: Machine, made: EnginePlan, division: Division | None = None, **room: object) -> Division:
    """Beside a context whose ubatch may be as wide as 2048 tokens."""
    devices = made.placement.each
    found = Room(**{"limit": machine.memory(), "host_dense": 0, "device_dense": (0,) * len(devices), "n_ubatch": 512,
                    "widest": 2048, **room})
    return settle(partial(divide, made.settings, devices, division or made.division, found), Facts(made.header),
                  machine)


def test_a_plan_is_the_same_for_the_same_facts_and_asks_nothing_that_it_does_not_need() -> None:
    machine = Machine(gpus={gpu("CUDA0"): (7 * GiB, 8 * GiB, QUICK)})
    for settings, asked in (
        ({"budget": "40%"}, ["has_holes", "pack", "sidecars", "contents", "reads"]),
        ({"budget": "40%", "source": object()}, ["has_holes", "sidecars", "contents"]),
        ({"budget": RESIDENT}, ["has_holes", "sidecars"]),
        ({"budget": "auto"}, ["has_holes", "pack", "memory", "sidecars", "contents", "reads"]),
        ({"budget": "40%", "device": "CUDA0", "vram_budget": "0"},
         ["devices", "device_memory", "has_holes", "pack", "sidecars", "contents", "reads"]),
        ({"budget": "40%", "device": "CUDA0", "vram_budget": "10%", "device_misses": "upload"},
         ["devices", "device_memory", "has_holes", "pack", "sidecars", "contents", "rates", "reads"]),
    ):
        first = plan_on(machine, **settings)
        assert machine.asked == asked, settings
        assert plan_on(machine, **settings) == first


def test_a_decision_stops_at_the_first_fact_that_is_not_known() -> None:
    decide = partial(plan, Settings(budget="40%", device="CUDA0"))
    facts = Facts(HEADER, REQUEST)
    asked = questions(decide, facts)
    assert [(each.about, each.of) for each in asked] == [("devices", ("CUDA0",))]
    known = facts.measured(asked, Machine(gpus={gpu("CUDA0"): (7 * GiB, 8 * GiB, QUICK)}))
    assert questions(decide, known) != asked == questions(decide, facts), "facts do not change"


def test_a_gpu_of_8_gb_has_all_dense_layers_and_the_experts_that_a_context_leaves_room_for() -> None:
    card = gpu("CUDA0")
    free, total = 15 * GiB // 2, 8 * GiB
    machine = Machine(gpus={card: (free, total, QUICK)})
    made = plan_on(machine, budget="40%", device="auto")
    assert made.placement == Placement(-1, (card,), (N_BLOCKS,), (N_BLOCKS + 1,)) and made.plain
    assert made.notes[0] == "CUDA0 (a GPU) computes experts 20 times as fast as the processor: it is used"
    assert made.settings.device_misses == "upload" and made.device_prompt == 32 and made.division.devices == (0,)
    assert "sizes" not in machine.asked, "with that much room nothing is measured"
    dense = N_BLOCKS * BLOCK + 300 * MiB
    found = divide_on(machine, made, device_dense=(dense,), widest=0)
    beside = 512 * MiB // 3 + 4 * 512 * 8 * (3 * 768 + 5 * 2048)
    assert found.devices == (free - dense - beside - device_margin(total),) and found.is_final
    assert found.budget == made.division.budget == Budget.parse("40%").resolve(HEADER.info)
    assert divide_on(machine, made, found, n_ubatch=32, widest=0).devices == found.devices, "a later context has less"


@pytest.mark.parametrize(("rates", "note"), [
    (SLOW, "at 0.5 of the processor's speed, and is not used"), ("it has no memory", "is not used: it has no memory"),
])
def test_a_gpu_that_does_not_compute_sooner_is_left_out(rates: list[float] | str, note: str) -> None:
    made = plan_on(Machine(gpus={gpu("CUDA0"): (7 * GiB, 8 * GiB, rates)}), budget="40%", device="auto")
    assert made.placement == Placement(0) and note in made.notes[0] and not made.plain
    misses = plan_on(Machine(gpus={gpu("CUDA0"): (7 * GiB, 8 * GiB, rates)}), budget="40%", device="CUDA0")
    assert misses.placement.each and misses.settings.device_misses == "processor"


def test_as_many_layers_are_on_a_small_gpu_as_fit() -> None:
    numbers = []
    for free in (256, 512, 768, 1024, 1536, 2048, 4096):
        made = plan_on(Machine(gpus={gpu("CUDA0"): (free * MiB, 4 * GiB, QUICK)}), budget="40%", device="auto")
        numbers.append(made.placement.n_layers)
        if made.placement.n_layers > 0:
            assert f"CUDA0 has room for {made.placement.n_layers - 1} of 48 layers" in made.notes[0]
            header = made.header
            assert sum(made.placement.device_dense(header)) == 300 * MiB + (made.placement.n_layers - 1) * BLOCK
            assert made.placement.host_dense(header) == header.info.dense_bytes, "llama.cpp keeps what it may need"
    assert numbers[0] == 0 and numbers[-1] == -1 and sorted(numbers[:-2]) == numbers[:-2] and 0 < numbers[3] < 48
    assert plan_on(Machine(gpus={gpu("CUDA0"): (0, GiB, QUICK)}), budget="40%", device="CUDA0").placement.each


def test_two_gpus_divide_the_layers_and_the_slower_one_decides() -> None:
    large, small = gpu("CUDA0"), gpu("CUDA1")
    machine = Machine(gpus={large: (23 * GiB, 24 * GiB, QUICKER), small: (7 * GiB, 8 * GiB, QUICK)})
    made = plan_on(machine, budget="40%", device="CUDA0,CUDA1", vram_budget="50%")
    assert made.placement.ends == (38, 48) and sum(made.placement.counts) == 49
    assert made.division.devices == (EXPERTS // 2 * 38 // 48, EXPERTS // 2 * 10 // 48)
    assert made.settings.device_misses == "upload"
    machine.gpus[small] = (7 * GiB, 8 * GiB, SLOW)
    assert plan_on(machine, budget="40%", device="CUDA0,CUDA1", managed=True).settings.device_misses == "processor"
    ahead = {"device_ahead": 1, "prefetch": "quasi-hidden"}
    assert plan_on(Machine(gpus={large: (23 * GiB, 24 * GiB, QUICK)}), budget="40%", device="CUDA0",
                   managed=True, **ahead).settings.device_misses == "processor"


def test_of_several_gpus_the_fastest_that_suffice_are_used() -> None:
    slow, fast = gpu("CUDA0"), gpu("CUDA1")

    def used(free: int, rates: list[float] = QUICK, **settings: object) -> tuple[Device, ...]:
        machine = Machine(gpus={slow: (free, 24 * GiB, rates), fast: (free, 24 * GiB, QUICKER)})
        return plan_on(machine, budget="50%", device="auto", managed=True, **settings).placement.each

    assert used(23 * GiB) == (fast,) and used(10 * GiB) == (fast, slow) and used(10 * GiB, SLOW) == (fast,)
    assert used(10 * GiB, vram_budget="25%") == (fast,)


def test_one_that_would_get_no_layer_with_experts_is_left_out() -> None:
    tiny, large = gpu("CUDA0"), gpu("CUDA1")
    machine = Machine(gpus={tiny: (420 * MiB, 8 * GiB, QUICK), large: (23 * GiB, 24 * GiB, QUICK)})
    assert plan_on(machine, budget="40%", device="CUDA0,CUDA1", vram_budget="40%").placement.each == (large,)


def test_a_model_is_llama_cpps_where_it_fits_on_the_gpus() -> None:
    for cards, fits in (((24,), True), ((8,), False), ((8, 8), True), ((6, 6), False)):
        machine = Machine(gpus={gpu(f"CUDA{i}"): (n * GiB, n * GiB, QUICK) for i, n in enumerate(cards)})
        made = plan_on(machine, budget="40%", device="any")
        assert (made.division.budget is None) == made.placement.pipelined == fits
        assert plan_on(machine, budget="40%", device="any", managed=True).division.budget is not None


# Of a prompt that is brought to a device.
@pytest.mark.parametrize(("rates", "least", "most"), [
    (QUICK, 32, 32),
    ([1e9, 2e9, 8e9, 9e10, 9e10], 32, 96),  # 1 / 1 = 1 / 2 + more / 8: at four more rows
    ([1e9, 4e9, 8e10, 9e10, 9e11], 800, 1200),  # at 60 more
    ([1e10, 2e9, 1e10, 1e9, 5e9], NO_PROMPT, NO_PROMPT),  # the processor is the faster one
])
def test_a_prompt_is_brought_to_the_device_where_that_is_sooner_than_computing_it(
    rates: list[float], least: int, most: int
) -> None:
    here, remote = gpu("CUDA0"), gpu("RPC0", is_remote=True)
    for card, low, high in ((here, least, most), (remote, 32, 32)):
        machine = Machine(gpus={card: (7 * GiB, 8 * GiB, rates)})
        assert low <= plan_on(machine, budget="40%", device="any", vram_budget="20%").device_prompt <= high
        assert ("rates" in machine.asked) == (card is here), "what comes over a network is not measured"


def test_with_6_gb_of_memory_experts_get_what_is_left_and_ubatches_are_as_wide_as_that_allows() -> None:
    found = {}
    for ram in (6, 8, 64):
        machine = Machine(ram=ram * GiB)
        made = plan_on(machine)
        assert made.automatic and made.division.budget == HEADER.info.floor_bytes
        dense = made.placement.host_dense(made.header)
        found[ram] = divide_on(machine, made, host_dense=dense)
        limit = machine.memory()
        left = limit.free_bytes - dense - limit.margin_bytes - found[ram].context_bytes
        assert found[ram].budget == min(left, EXPERTS) > 0
        assert found[ram].context_bytes == machine.context_sizes(found[ram].n_ubatch).host
    assert [found[ram].n_ubatch for ram in (6, 8, 64)] == [1024, 2048, 512], "where all experts fit, none is read twice"
    tight = replace(machine.memory(), limit_bytes=6 * GiB, free_bytes=dense + 17 * EXPERT + 760 * MiB)
    assert divide_on(machine, made, host_dense=dense, limit=tight).n_ubatch == 256, "so that the floor is left"
    with pytest.raises(BudgetError, match="does not fit: .* for the context"):
        divide_on(machine, made, host_dense=dense, limit=replace(tight, free_bytes=dense + 500 * MiB))
    with pytest.raises(BudgetError, match=r"Made up does not fit: 1024 MiB are free .* for dense weights"):
        plan_on(Machine(ram=2 * GiB))


def test_memory_that_a_gpu_shares_with_the_processor_is_divided_once() -> None:
    card = gpu("Vulkan0", shares_memory=True)
    machine = Machine(ram=24 * GiB, gpus={card: (20 * GiB, 24 * GiB, QUICK)})
    alone = plan_on(machine, device="any")
    assert alone.division.devices == (0,) and "the processor the experts" in alone.notes[1]
    made = plan_on(machine, device="any", vram_budget="50%")
    first = divide_on(machine, made)
    there = EXPERTS // 2
    assert first.devices == (there,) and first.budget == EXPERTS - there + HEADER.info.floor_bytes
    little = MemoryLimit("made up", 24 * GiB, 12 * GiB)
    assert divide_on(machine, made, limit=little).budget == little.rest_bytes(there, first.context_bytes)
    second = divide_on(machine, made, first, limit=replace(little, free_bytes=6 * GiB), is_taken=True)
    assert second.budget == replace(little, free_bytes=6 * GiB).rest_bytes(0, second.context_bytes)
    machine.gpus[card] = (0, 24 * GiB, QUICK)
    assert divide_on(machine, made).devices == (0,) and divide_on(machine, made).budget == EXPERTS
    machine.gpus = {card: (20 * GiB, 24 * GiB, QUICK), gpu("CUDA0"): (7 * GiB, 8 * GiB, QUICK)}
    beside_another = divide_on(machine, plan_on(machine, device="any", managed=True))
    assert beside_another.devices[0] == 0 < beside_another.devices[1]


class DiskPlanner:
    """Divides memory where experts are read at so many bytes a second, or as two thirds of the bytes and decoded."""

    origin = "made up"

    def __init__(self, bytes_per_second: float) -> None:
        read, decoded = EXPERT / bytes_per_second, EXPERT / 4e9
        delays = Delays(read / 9, read / 9, decoded / 3, n_workers=2, n_shards=1, n_matrices=3)
        costs = LayerCosts(16, (EXPERT, EXPERT * 2 // 3, EXPERT // 3, EXPERT // 3), delays, read)
        self._planner = Planner(even_inclusion([16] * 2, 2), 2, [costs] * 2)
        self.info = replace(HEADER.info, slots_bytes=32 * EXPERT, floor_bytes=5 * EXPERT)

    def best(self, budget: int) -> Split:
        return self._planner.plan(budget, "FC", 0.5).best

    def packed_best(self, budget: int) -> Split:
        return self._planner.plan(budget, "FC", 0.5).packed_best


@pytest.mark.parametrize(("bytes_per_second", "pays"), [(0.5e9, True), (7e9, False)])
def test_a_compressed_pack_pays_on_a_slow_disk_and_not_on_one_of_7_gb_a_second(
    bytes_per_second: float, pays: bool
) -> None:
    made = plan_on(Machine(planner_=DiskPlanner(bytes_per_second)), budget="40%")
    assert (made.division.pools is not None) == pays
    assert (made.division.origin == "the compressed pack is not used: the model is read sooner") == (not pays)


@pytest.mark.parametrize(("n_context", "compressed"), [(0, True), (2, False)])
def test_the_automatic_budget_for_which_a_pack_pays_is_what_a_context_leaves(n_context: int, compressed: bool) -> None:
    """Of a pack that pays with much memory, and not with little."""
    floor = HEADER.info.floor_bytes
    limit = MemoryLimit("made up", 0, 0)
    limit = replace(limit, free_bytes=limit.margin_bytes + HEADER.info.dense_bytes + 3 * floor)

    def best(budget: int) -> Split:
        return Split((1.0, 0.0, 0.0, 0.0), budget > 2 * floor, *np.zeros((3, 1)))

    machine = Machine(planner_=SimpleNamespace(info=HEADER.info, origin="", best=best, packed_best=best))
    machine.memory = lambda: limit
    machine.sizes = lambda _: ContextSizes(n_context * floor)
    assert plan_on(machine).division.origin.startswith("the compressed pack is not used") != compressed


def test_an_option_is_one_field_and_one_consumer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up one: bytes of the budget that stay free."""
    @dataclass(frozen=True)
    class WithSpare(Settings):
        spare: int = option(0, whole(GiB), f"a whole number from 1 to {GiB}", metavar="BYTES", help="leave it free")

    def budget(settings: WithSpare, *of: object) -> tuple[int, str]:
        n_bytes, note = planned_budget(settings, *of)
        return n_bytes - settings.spare, note

    without, planned_budget = plan_on(Machine(), budget="40%"), planning._budget
    monkeypatch.setattr(flags, "OPTIONS", options(WithSpare))  # as it is where the field is one of Settings
    monkeypatch.setattr(planning, "_budget", budget)
    parser = argparse.ArgumentParser()
    flags.add_settings(parser, "experts")
    given = flags.given_settings(parser.parse_args(["--budget", "40%", "--spare", "1000"]))
    found = settle(partial(plan, WithSpare(**given)), Facts(HEADER, REQUEST), Machine())
    assert found.division.budget == without.division.budget - 1000
    with pytest.raises(PyorchError, match="--spare is much, and must be a whole number"):
        flags.given_settings(parser.parse_args(["--spare", "much"]))


def test_experts_are_kept_plain_where_rates_and_the_budget_say_so() -> None:
    roles = tuple(replace(role, layout="q4_K-repacked-1") for role in _ROLES)
    header = replace(HEADER, layers=tuple(replace(layer, roles=roles) for layer in HEADER.layers))

    def made(ram: int = 64 * GiB, request: Request = REQUEST, **settings: object) -> EnginePlan:
        machine = Machine(ram)
        machine.layout_rates = lambda il, role: LayoutRates(0.139, (0.081, 0.738), (0.080, 0.254), 8)
        return settle(partial(plan, Settings(**settings)), Facts(header, request), machine)

    assert made(budget="5%").plain and made(budget="5%").layout.plain
    for given in (made(budget="60%"), made(budget="5%", kernels="repacked"), made(budget="5%", kernels="stock"),
                  made(budget="5%", request=replace(REQUEST, placed=True))):
        assert not given.plain and not given.layout.plain
    assert made(5 * GiB).plain and not made().plain  # the automatic budget
    forbidden = made(budget="60%", request=replace(REQUEST, repacks=False))
    assert forbidden.plain and forbidden.layout is None
