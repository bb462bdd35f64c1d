"""What predictors take for a layer's router is its router, whatever the architecture."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import parts
import pytest
from architectures import NAMES, Zoo, types_of
from batches import tokens
from ggufs import as_smallthinker

import pyorch
from pyorch.errors import PyorchError
from pyorch.llama.context import Context
from pyorch.runtime.callbacks import Routing
from pyorch.runtime.engine import Engine
from pyorch.runtime.routers import Router
from pyorch.traces.routers import read_router

GATING = {
    "deepseek-v3": "sigmoid", "glm4-moe": "sigmoid", "dots1": "sigmoid", "llama4": "sigmoid",
    "gpt-oss": "softmax-selected", "gpt-oss-mxfp4": "softmax-selected",
}


def load(path: Path, **settings: object) -> pyorch.Model:
    return pyorch.load(path, budget="100%", n_ctx=64, n_batch=64, n_ubatch=64, n_threads=1, **settings)


@pytest.mark.parametrize("name", NAMES)
def test_a_router_applied_to_its_true_input_selects_and_weighs_as_the_graph_does(zoo: Zoo, name: str) -> None:
    routings: list[Routing] = []
    with load(zoo.path(name, types_of(name)[0]), prefetch="none") as model:
        model.engine.set_observer(routings.append)
        with Context(model.llama.model, n_ctx=64, n_batch=64, n_ubatch=64, n_threads=1) as context:
            context.decode(tokens(48))
            context.decode(tokens(1, seed=1))
        model.engine.set_observer(None)
        assert {routing.il for routing in routings} == set(model.layers)
        for routing in routings:
            router = model.engine.router(routing.il)
            assert router.gating == GATING.get(name, "softmax")
            experts, weights = parts.apply_router(model.engine, routing.il, routing.inputs)
            same = (np.sort(experts) == np.sort(routing.experts)).all(axis=-1)
            # Sums have another order: a near tie may be decided otherwise, which must not happen twice in a layer.
            assert (~same).sum() <= 1, f"layer {routing.il}"
            for expected, given in zip(_by_expert(routing.experts[same], routing.weights[same]),
                                       _by_expert(experts[same], weights[same])):
                np.testing.assert_allclose(given, expected, rtol=1e-4, atol=1e-6)


def _by_expert(experts: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Weights [n_tokens, n_used] in the order of the experts: ties may be ranked in another one."""
    return np.take_along_axis(weights, np.argsort(experts, axis=-1), axis=-1)


@pytest.mark.parametrize("name", NAMES)
def test_a_replay_chooses_by_the_file_as_the_graph_does(zoo: Zoo, name: str) -> None:
    with load(zoo.path(name, types_of(name)[0]), prefetch="none") as model:
        for il in model.layers:
            graph, file = model.engine.router(il), read_router(model.map, il)
            assert (graph.gating, graph.n_used, graph.n_groups, graph.n_groups_used) == (
                file.gating, file.n_used, file.n_groups, file.n_groups_used)
            for array in ("gate", "bias", "selection_bias"):
                assert np.array_equal(graph.arrays().get(array), file.arrays().get(array))


def test_cache_aware_routing_ranks_experts_as_the_router_does(zoo: Zoo) -> None:
    """By probability and bias, where it chooses by these: a higher logit alone does not make an expert the next one."""
    path, il = zoo.path("deepseek-v3", "F32"), 1

    def decoded(token: int, absent: int | None) -> tuple[Routing, np.ndarray, np.ndarray]:
        """What the router said, its bias, and which experts were read."""
        routings: list[Routing] = []
        with load(path, prefetch="none", warm=False) as model:  # cold: what is resident is what a layer needed
            if absent is not None:
                model.substitute("mode=cache,prefill=1")
                model.set_cache({other: np.arange(8) != (absent if other == il else -1) for other in model.layers})
            model.engine.set_observer(routings.append)
            with Context(model.llama.model, n_ctx=64, n_batch=64, n_ubatch=64, n_threads=1) as context:
                context.decode([token])
            model.engine.set_observer(None)
            model.engine.wait_idle()
            router = model.engine.router(il)
            return (
                next(routing for routing in routings if routing.il == il),
                router.arrays()["selection_bias"],
                model.residency[il],
            )

    for token in tokens(40, seed=2):
        routing, bias, _ = decoded(token, None)
        others = np.setdiff1d(np.arange(8), routing.experts[0])
        by_choice = others[(routing.probs[0] + bias)[others].argmax()]
        by_logit = others[routing.logits[0][others].argmax()]
        if by_choice != by_logit:
            break
    _, _, read = decoded(token, int(routing.experts[0, 0]))
    assert by_choice != by_logit and read[by_choice] and not read[by_logit]


def test_groups_and_selection_biases_change_what_is_selected(zoo: Zoo) -> None:
    """So the tests above would see them dropped."""
    routings: list[Routing] = []
    with load(zoo.path("deepseek-v3", "F32"), prefetch="none") as model:
        model.engine.set_observer(routings.append)
        with Context(model.llama.model, n_ctx=64, n_batch=64, n_ubatch=64, n_threads=1) as context:
            context.decode(tokens(48))
        model.engine.set_observer(None)
        routers = {il: model.engine.router(il) for il in model.layers}
    assert all(
        (router.n_groups, router.n_groups_used, router.normalized, router.scale) == (4, 2, True, 2.5)
        for router in routers.values()
    )
    for routing in routings:
        n_used = routing.experts.shape[1]
        biased = routing.probs + routers[routing.il].selection_bias
        for scores in (routing.probs, biased):
            plain = np.argsort(-scores, axis=-1)[:, :n_used]
            assert not np.array_equal(np.sort(plain), np.sort(routing.experts))


def test_routers_that_cannot_be_are_refused(small_moe: Path) -> None:
    plain = Router(np.zeros((64, 8), np.float32), None, None, None, 0.0, "softmax", 6)
    with pyorch.ModelMap(small_moe) as model_map, Engine(model_map, "100%", simulated=True) as engine:
        engine.set_router(0, plain)
        experts, weights = parts.apply_router(engine, 0, np.zeros((2, 8), np.float32))
        assert experts.tolist() == [[0, 1, 2, 3, 4, 5]] * 2 and np.allclose(weights, 1 / 64)
        for change, complaint in (
            (dict(gating="cubic"), 'gating function "cubic" is not known: use softmax, sigmoid'),
            (dict(n_groups=5), "cannot select 6 of 64 experts from 1 of 5 groups"),
            (dict(n_groups=16), "cannot select 6 of 64 experts from 1 of 16 groups"),
            (dict(n_used=65), "cannot select 65 of 64 experts"),
            (dict(selection_bias=np.zeros(63, np.float32)), "the selection_bias of a router with 64 experts"),
        ):
            with pytest.raises(PyorchError, match=complaint):
                engine.set_router(0, dataclasses.replace(plain, **change))


def test_a_router_that_cannot_be_applied_is_refused_by_name(zoo: Zoo, tmp_path: Path) -> None:
    path = tmp_path / "smallthinker.gguf"
    as_smallthinker(zoo.path("mixtral", "F32"), path)
    for settings in (dict(prefetch="quasi-hidden"), dict(prefetch="auto", speculate=True)):
        with pytest.raises(PyorchError, match="layer 0 gets its choice of experts from another part of the model"):
            load(path, **settings)
    with load(path) as model:  # "auto" does without
        with pytest.raises(PyorchError, match="no predictor can apply its router"):
            model.engine.set_prefetch("quasi-hidden")
        with pytest.raises(PyorchError, match="it cannot be speculated"):
            model.engine.set_speculation("decode")
        model.engine.set_prefetch("none")
        with Context(model.llama.model, n_ctx=64, n_threads=1) as context:
            assert np.isfinite(context.decode(tokens(4))).all()
