"""Which order experts have in memory, by what each costs. Rates are made up, so no test depends on a processor."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from architectures import Zoo

from pyorch.errors import PyorchError
from pyorch.eval.verify import decoded, verify
from pyorch.llama.facts import Facts, Header, Question, Request, Unknown
from pyorch.llama.layouts import Layout, LayoutRates, check_layout, choose_layout
from pyorch.llama.model import load
from pyorch.runtime.layouts import layout_rates
from pyorch.runtime.model_map import LayerInfo, ModelMap, Role
from pyorch.settings.settings import Settings
from pyorch.sizes import MiB

# Of a core with AVX2, Q4_K: plain is as fast with one input, and a third as fast with many.
AVX2 = LayoutRates(0.139, (0.081, 0.738), (0.080, 0.254), 8)
ROLES = tuple(Role(name, "q4_K", n_in, "q4_K-repacked-1") for name, n_in in (("gate", 2048), ("up", 2048),
                                                                             ("down", 768)))


def header(roles: tuple[Role, ...] = ROLES, n_expert_used: int = 8) -> Header:
    layers = tuple(LayerInfo(il, 128, n_expert_used, roles, 3 * MiB, 3 * MiB) for il in range(48))
    info = SimpleNamespace(slots_bytes=48 * 128 * 3 * MiB)
    return Header(info, layers, (), 0, 0, 0, 0, 0, "model.gguf", None)


def chosen(
    share: float, of: Header = header(), rates: LayoutRates | str = AVX2, placed: bool = False, native: bool = False,
    **settings: object,
) -> Layout | None:
    facts = Facts(of, Request(placed=placed), {
        Question("is_native"): native, Question("layout_rates", (0, 0)): rates})
    return choose_layout(Settings(**settings), of, lambda: round(share * of.info.slots_bytes), native, facts)


@pytest.mark.parametrize("share, plain", [(0.02, True), (0.1, True), (0.25, True), (0.4, False), (1.0, False)])
def test_experts_stay_plain_where_repacking_costs_more_than_it_saves(share: float, plain: bool) -> None:
    assert chosen(share).plain == plain


def test_the_cost_is_that_of_a_decoded_token_and_of_a_token_of_a_prompt() -> None:
    missed = 0.9 ** 3
    plain = AVX2.plain[0] + AVX2.plain[1] / 8
    repacked = AVX2.repacked[0] + missed * AVX2.repacking + (AVX2.repacked[1] + missed * AVX2.repacking) / 8
    assert AVX2.plain_cost() == pytest.approx(plain) and AVX2.repacked_cost(missed) == pytest.approx(repacked)
    assert str(chosen(0.1)) == (f"plain: with about 73% misses the other order takes {repacked / plain - 1:.0%} more "
                                "processor time")


def test_fast_repacking_pays_at_any_budget() -> None:
    assert not chosen(0.02, rates=LayoutRates(0.02, (0.15, 0.8), (0.1, 0.3), 8)).plain


def test_nothing_is_measured_without_a_question() -> None:
    facts = Facts(header())
    for settings, request in (({"kernels": "repacked"}, Request()), ({"kernels": "stock"}, Request()),
                              ({}, Request(placed=True))):
        assert not choose_layout(Settings(**settings), header(), lambda: MiB, False, Facts(header(), request)).plain
    assert choose_layout(Settings(kernels="plain"), header(), lambda: MiB, False, facts).plain
    whole = choose_layout(Settings(), header(), lambda: header().info.slots_bytes, False, facts)
    assert not whole.plain  # nothing misses
    plain = header(tuple(Role(role.name, "f32", role.n_in) for role in ROLES))
    assert choose_layout(Settings(), plain, lambda: MiB, False, Facts(plain)) is None
    with pytest.raises(Unknown):
        choose_layout(Settings(), header(), lambda: MiB, False, facts)


def test_a_token_that_misses_little_keeps_the_default_order() -> None:
    small = header((ROLES[0], *(Role(role.name, "f32", role.n_in) for role in ROLES[1:])), n_expert_used=1)
    assert not chosen(0.32, of=small).plain and "a token misses about" in chosen(0.32, of=small).why


def test_a_native_pack_leaves_nothing_to_choose() -> None:
    assert str(chosen(0.02, native=True)) == "repacked: the pack has them so"


@pytest.mark.parametrize("has_devices, repacks, named", [(True, True, "--device"), (False, False, "--no-repack")])
def test_repacking_is_refused_where_it_cannot_be(has_devices: bool, repacks: bool, named: str) -> None:
    facts = Facts(header(), Request(repacks=repacks))
    with pytest.raises(PyorchError, match=named):
        check_layout(Settings(kernels="repacked"), facts, has_devices)
    check_layout(Settings(kernels="plain"), facts, has_devices)
    dense = Facts(Header(header().info, (), (), 0, 0, 0, 0, 0, "model.gguf", None), Request(repacks=repacks))
    check_layout(Settings(kernels="repacked"), dense, has_devices)  # there is nothing to repack


def test_rates_are_measured_once(zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with ModelMap(zoo.path("olmoe", "Q4_0")) as model_map:
        layer = model_map.layers[0]
        if layer.roles[0].layout == "plain":
            pytest.skip("this processor has no faster kernels for repacked Q4_0")
        first = layout_rates(model_map, layer.il, 0)
        assert len(first) == 6 and all(rate > 0 for rate in first) and first[-1] == 8
        assert len(list(tmp_path.rglob("layouts-*.json"))) == 1
        assert layout_rates(model_map, layer.il, 0) == first


def logits(path: Path, **settings: object) -> np.ndarray:
    with load(path, n_ctx=64, n_threads=1, **settings) as model:
        return decoded(model, list(range(3, 15)), 4, 1, lambda *_: None, chosen=[5, 9, 2, 7])[1]


def test_a_budget_changes_no_bit_whatever_the_kernels(zoo: Zoo) -> None:
    path = zoo.path("olmoe", "Q4_0")
    found = {kernels: [logits(path, kernels=kernels, budget=budget, managed=True) for budget in ("50%", "100%")]
             for kernels in ("plain", "repacked", "stock")}
    for some, all_resident in found.values():
        assert some.tobytes() == all_resident.tobytes()
    assert found["stock"][0].tobytes() == found["repacked"][0].tobytes()
    assert found["stock"][0].tobytes() == logits(path, budget="resident").tobytes()


def test_plain_experts_are_verified_against_plain_experts(zoo: Zoo) -> None:
    path = zoo.path("olmoe", "Q4_0")
    for kernels in ("plain", "repacked"):
        compared = next(verify(path, ["50%"], n_tokens=4, n_threads=1, kernels=kernels))
        assert compared.identical and compared.plain_experts == (kernels == "plain")


def test_experts_are_repacked_where_rates_cannot_be_measured() -> None:
    assert str(chosen(0.02, rates="no memory")) == "repacked: the rates of plain experts are unknown: no memory"
