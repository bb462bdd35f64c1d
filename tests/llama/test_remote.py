"""Experts that other servers compute: the logits are those of one server that has all of them, bit for bit."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import batches
import llama_cpp.llama_cpp as llama_cpp
import numpy as np
import pytest
from architectures import NAMES, types_of
from buddy_lists import N_EXPERT, buddies_with_far_ones_first
from ggufs import write_adapter
from models import assert_same_bits, small_model
from processes import HANG_SECONDS

import pyorch
from pyorch.convert.share import share_for, write_share
from pyorch.errors import FormatError, PyorchError
from pyorch.llama.apply import apply_substitution
from pyorch.llama.context import Context, log_softmax
from pyorch.llama.model import Model
from pyorch.runtime.disk import measure_bandwidth
from pyorch.runtime.engine import HERE
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.substitution import Substitution
from pyorch.sidecars import packs
from pyorch.sidecars.container import fingerprint

TOKEN = "a token for tests"
SLOTS_AT_ONCE = 512  # native/src/routing/expert_worker.h
N_USED = 6  # of the small model

# Each architecture as it was converted; each way in which kernels go through rows: one by one, repacked, in tiles.
CASES = [
    *((name, types_of(name)[0], True) for name in NAMES),
    ("mixtral", "Q8_0", True), ("gpt-oss", "Q4_0", True), ("qwen3-next-fused", "Q4_0", True), ("llama4", "Q8_0", False),
    ("mixtral", "Q4_K", True), ("mixtral", "Q4_K", False),
]


def load(path: Path, budget: int | str, **arguments: object) -> Model:
    if budget == "floor":
        with ModelMap(path) as model_map:
            budget = model_map.info.floor_bytes
    return pyorch.load(path, budget=budget, n_ctx=64, n_batch=64, n_ubatch=batches.N_UBATCH, **arguments)


def digests(model: Model, n_threads: int = 1) -> dict[str, str]:
    with Context(model.llama.model, n_threads=n_threads, **batches.CONTEXT) as context:
        return batches.digests(context.decode, context.clear)


def decoded(model: Model, prompt: list[int]) -> list[np.ndarray]:
    with Context(model.llama.model, n_ctx=128, n_threads=1) as context:
        return [context.decode(prompt), context.decode([7]), context.decode([9])]


@contextlib.contextmanager
def joined(client: Model, server: Model) -> Iterator[int]:
    """The number under which the client knows the server, which computes on two threads."""
    port = server.engine.listen(TOKEN, fingerprint(server.map), n_threads=2)
    try:
        yield client.engine.connect("127.0.0.1", port, TOKEN, fingerprint(client.map), timeout=60)
    finally:
        server.engine.stop_listening()


def wait_until_lost(client: Model, peer: int) -> None:
    end = time.monotonic() + HANG_SECONDS
    while client.engine.peer(peer).joined:
        assert time.monotonic() < end
        time.sleep(0.005)


def place_at_random(client: Model, peer: int, seed: int) -> None:
    """Of the first layer all experts lie elsewhere, of the last none, of the others some."""
    rng = np.random.default_rng(seed)
    layers = list(client.layers.values())
    for i, layer in enumerate(layers):
        places = rng.choice([HERE, peer], layer.n_expert)
        if i == 0:
            places[:] = peer
        elif i == len(layers) - 1:
            places[:] = HERE
        client.engine.set_placement(layer.il, places)


@pytest.mark.parametrize("name, type_name, repacked", CASES)
def test_logits_are_bit_identical_at_a_random_split(zoo, name, type_name, repacked):
    path, how = zoo.path(name, type_name), {"use_extra_bufts": repacked}
    with load(path, "resident", **how) as model:
        expected = digests(model)
    with load(path, "floor", **how) as client, load(path, "floor", **how) as server, joined(client, server) as peer:
        assert client.engine.peer(peer).same_kernels
        place_at_random(client, peer, seed=NAMES.index(name))
        assert digests(client) == expected
        remote, served, asked = client.engine.remote_stats(), server.engine.served(), client.engine.peer(peer)
        assert remote.fallback == 0 and remote.slots == served.slots == asked.slots > 0
        assert (served.failed, served.refused, served.error, asked.error) == (0, 0, "", "")
        for model in (client, server):
            stats = model.engine.stats()
            assert stats.peak_bytes <= stats.budget_bytes and stats.misses > 0


def test_a_wide_prompt_is_computed_in_parts_with_the_same_bits_and_counts_as_the_asker_s_tokens(small_moe, resident):
    prompt = np.random.default_rng(0).integers(8, 376, 240).tolist()

    def decoded_at_once(model: Model) -> np.ndarray:
        with Context(model.llama.model, n_ctx=256, n_threads=1) as context:
            return context.decode(prompt)

    expected = decoded_at_once(resident)
    with small_model(small_moe, "40%") as client, small_model(small_moe, "40%") as server:
        with joined(client, server) as peer:
            for layer in client.layers.values():
                client.engine.set_placement(layer.il, [peer] * layer.n_expert)
            assert_same_bits(decoded_at_once(client), expected)
            served = server.engine.served()
            assert served.slots == 240 * N_USED * len(client.layers) and 240 * N_USED > SLOTS_AT_ONCE
            assert 0 < served.buffer_bytes < 8 * SLOTS_AT_ONCE * 128 * 4
            assert client.engine.stats().tokens > server.engine.stats().tokens == 0
            assert server.engine.stats().misses > 0


def test_rows_of_two_bytes_a_number_give_nearly_the_same_and_say_so(small_moe, resident, prompt_tokens):
    expected = decoded(resident, prompt_tokens)
    with small_model(small_moe, "40%") as client, small_model(small_moe, "40%") as server:
        port = server.engine.listen(TOKEN, fingerprint(server.map))
        found = {}
        for rows in ("f32", "bf16"):
            peer = client.engine.connect("127.0.0.1", port, TOKEN, fingerprint(client.map), timeout=60, rows=rows)
            for layer in client.layers.values():
                client.engine.set_placement(layer.il, [peer] * layer.n_expert)
            logits = decoded(client, prompt_tokens)
            found[rows] = client.engine.peer(peer)
            assert found[rows].same_kernels == (rows == "f32") and found[rows].slots > 0
            same = all(np.array_equal(one, other) for one, other in zip(logits, expected))
            assert same == (rows == "f32")
            divergences = []  # in nats
            for row, right in zip(np.vstack(logits), np.vstack(expected)):
                got, wanted = log_softmax(row), log_softmax(right)
                divergences.append((np.exp(wanted) * (wanted - got)).sum())
            assert np.mean(divergences) < 1e-3, divergences
        assert found["bf16"].slots == found["f32"].slots
        assert 0.5 < found["bf16"].bytes_received / found["f32"].bytes_received < 0.6
        server.engine.stop_listening()


@contextlib.contextmanager
def adapted(model: Model, path: Path) -> Iterator[Context]:
    """A context with a LoRA adapter."""
    adapter = llama_cpp.llama_adapter_lora_init(model.llama.model, str(path).encode())
    assert adapter
    with Context(model.llama.model, n_ctx=128, n_threads=1) as context:
        adapters, scales = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(adapter), (ctypes.c_float * 1)(1.0)
        assert llama_cpp.llama_set_adapters_lora(context.handle, adapters, 1, scales) == 0
        yield context


@pytest.mark.parametrize("role", ["ffn_gate_exps", "attn_output"])
def test_an_adapter_of_experts_keeps_them_here_and_another_one_does_not(small_moe, prompt_tokens, tmp_path, role):
    """The other servers do not have it. What an adapter does outside of the experts is theirs to be told by the
    rows."""
    path = tmp_path / "adapter.gguf"
    write_adapter(path, small_moe, role)

    def answers(model: Model) -> list[np.ndarray]:
        with adapted(model, path) as context:
            return [context.decode(prompt_tokens), context.decode([7]), context.decode([9])]

    with small_model(small_moe, "resident") as model:
        expected = answers(model)
        assert not np.array_equal(decoded(model, prompt_tokens)[0], expected[0]), "the adapter does nothing"
    with small_model(small_moe, "40%") as client, small_model(small_moe, "40%") as server:
        with joined(client, server) as peer:
            place_at_random(client, peer, seed=1)
            for rows, right in zip(answers(client), expected, strict=True):
                assert_same_bits(rows, right)
            assert (client.engine.remote_stats().slots == 0) == (role == "ffn_gate_exps")
            decoded(client, prompt_tokens)  # without it
            assert client.engine.remote_stats().slots > 0


def test_three_servers_with_some_experts_each_ask_each_other(small_moe, resident, prompt_tokens):
    """Each computes a third of the experts and asks the two others for the rest, all at once."""
    expected = decoded(resident, prompt_tokens)
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(small_model(small_moe, "40%")) for _ in range(3)]
        model = fingerprint(servers[0].map)
        ports = [server.engine.listen(TOKEN, model) for server in servers]
        for i, server in enumerate(servers):
            numbers = [HERE if i == j else server.engine.connect("127.0.0.1", port, TOKEN, model, timeout=60)
                       for j, port in enumerate(ports)]
            for layer in server.layers.values():
                server.engine.set_placement(layer.il, [numbers[expert % 3] for expert in range(layer.n_expert)])
        with ThreadPoolExecutor(len(servers)) as pool:
            answers = list(pool.map(lambda server: decoded(server, prompt_tokens), servers))
        for server, answer in zip(servers, answers, strict=True):
            for rows, right in zip(answer, expected, strict=True):
                assert_same_bits(rows, right)
            for resident_experts in server.residency.values():
                elsewhere = np.arange(len(resident_experts)) % 3 != servers.index(server)
                assert resident_experts.any() and not resident_experts[elsewhere].any()
        for server in servers:
            server.engine.stop_listening()


def test_of_two_servers_the_one_that_is_there_is_asked_and_what_is_resident_is_computed_here(
    small_moe, resident, prompt_tokens
):
    expected = decoded(resident, prompt_tokens)
    with contextlib.ExitStack() as stack:
        # Cold: loads tell who read an expert because a layer needed it.
        client, first, second = (
            stack.enter_context(small_model(small_moe, "100%", prefetch="none", warm=False)) for _ in range(3))
        with joined(client, first) as one, joined(client, second) as two:
            for layer in client.layers.values():
                places = [[one, two] if expert % 2 else [two, HERE] for expert in range(layer.n_expert)]
                client.engine.set_placement(layer.il, places)
            for gone in (None, first, second):
                if gone is not None:
                    gone.engine.stop_listening()
                    wait_until_lost(client, one if gone is first else two)
                for rows, right in zip(decoded(client, prompt_tokens), expected, strict=True):
                    assert_same_bits(rows, right)
                assert (client.engine.stats().loads > 0) == (gone is second)
            assert first.engine.stats().loads > 0 and second.engine.stats().loads > 0

        # Now they are all here.
        sent = client.engine.remote_stats().slots
        with joined(client, first) as one:
            for layer in client.layers.values():
                client.engine.set_placement(layer.il, [one] * layer.n_expert)
            for rows, right in zip(decoded(client, prompt_tokens), expected, strict=True):
                assert_same_bits(rows, right)
        assert client.engine.remote_stats().slots == sent


@pytest.fixture(scope="module")
def shares(small_moe, tmp_path_factory) -> list[Path]:
    """Slim models: two with a half of each layer's experts, the second one once more, and one with the first expert."""
    paths = []
    with ModelMap(small_moe) as model_map:
        layers = model_map.layers
    for name, of, first in (("even", 2, 0), ("odd", 2, 1), ("another", 2, 1), ("one", 64, 0)):
        target = tmp_path_factory.mktemp("shares") / name / "small.gguf"
        held = {layer.il: np.arange(layer.n_expert) % of == first for layer in layers}
        write_share(small_moe, target, share_for(layers, held))
        paths.append(target)
    return paths


def place_shares(model: Model, own: int, peers: list[int]) -> None:
    """own: 0: it has even experts itself, 1: odd ones; the servers with these numbers have the others."""
    for layer in model.layers.values():
        places = np.full((layer.n_expert, len(peers)), HERE)
        places[1 - own :: 2] = peers
        model.engine.set_placement(layer.il, places)


def test_servers_with_a_share_of_the_experts_compute_what_one_with_all_does(shares, resident, prompt_tokens):
    expected = decoded(resident, prompt_tokens)
    with small_model(shares[0], "30%", placed=True) as even, small_model(shares[1], "30%", placed=True) as odd:
        with joined(even, odd) as of_even, joined(odd, even) as of_odd:
            place_shares(even, 0, [of_even])
            place_shares(odd, 1, [of_odd])
            for model in (even, odd):
                model.engine.allow_reads(True)  # which would be sooner: the files are in the page cache
                for _ in range(3):
                    for rows, right in zip(decoded(model, prompt_tokens), expected, strict=True):
                        assert_same_bits(rows, right)
                assert model.engine.remote_stats().fallback == 0 and model.engine.stats().failures == 0
                for il, resident_experts in model.residency.items():
                    assert not resident_experts[np.arange(len(resident_experts)) % 2 == (model is even)].any(), il


def test_a_prompt_of_more_rows_than_a_server_takes_at_once_is_asked_in_turns(shares, small_moe):
    """Six times as many, by one that has one expert of each layer."""
    wide = np.random.default_rng(0).integers(8, 376, 1024).tolist()

    def answer(model: Model) -> np.ndarray:
        with Context(model.llama.model, n_ctx=1024, n_batch=1024, n_ubatch=1024, n_threads=1) as context:
            return context.decode(wide)

    with small_model(small_moe, "50%") as whole, small_model(shares[3], "20%", placed=True) as one:
        expected = answer(whole)
        with joined(one, whole) as peer:
            for layer in one.layers.values():
                one.engine.set_placement(layer.il, [HERE] + [peer] * (layer.n_expert - 1))
            assert_same_bits(answer(one), expected)
            assert one.engine.remote_stats().fallback == 0 and whole.engine.served().refused == 0
            assert one.engine.remote_stats().slots > 4 * 1024 * len(one.layers)


def test_what_a_share_lacks_is_asked_of_all_that_have_it_and_then_fails(shares, small_moe, prompt_tokens):
    with small_model(small_moe, "100%") as whole:
        expected = decoded(whole, prompt_tokens)
    with contextlib.ExitStack() as stack:
        even, odd, another = (stack.enter_context(small_model(path, "60%", placed=True)) for path in shares[:3])
        with joined(even, odd) as first, joined(even, another) as second:
            place_shares(even, 1, [first, second])  # which have no even experts, and it has no odd ones itself
            with pytest.raises(PyorchError, match="it is not in this share of the experts"):
                decoded(even, prompt_tokens)
            place_shares(even, 0, [first, second])
            for gone in (None, odd):
                if gone is not None:
                    gone.engine.stop_listening()
                    wait_until_lost(even, first)
                for rows, right in zip(decoded(even, prompt_tokens), expected, strict=True):
                    assert_same_bits(rows, right)
            another.engine.stop_listening()
            wait_until_lost(even, second)
            with pytest.raises(PyorchError, match="no server that has it answers"):
                decoded(even, prompt_tokens)
            assert even.engine.stats().failures > 0
        with joined(even, odd) as again:
            place_shares(even, 0, [again])
            for rows, right in zip(decoded(even, prompt_tokens), expected, strict=True):
                assert_same_bits(rows, right)


def test_what_a_share_lacks_waits_until_a_server_that_has_it_was_met(shares, small_moe, prompt_tokens):
    with small_model(small_moe, "100%") as whole:
        expected = decoded(whole, prompt_tokens)
    for _ in range(10):  # it waits for five seconds, and this machine may be slower
        with small_model(shares[0], "60%", placed=True) as even, small_model(shares[1], "60%", placed=True) as odd:
            with ThreadPoolExecutor(1) as pool:
                early = pool.submit(decoded, even, prompt_tokens)
                end = time.monotonic() + HANG_SECONDS
                while even.engine.stats().hits + even.engine.stats().misses == 0:  # of the first layer
                    assert time.monotonic() < end
                    time.sleep(0.005)
                with joined(even, odd) as of_even:
                    place_shares(even, 0, [of_even])
                    if early.exception() is None:
                        break
    else:
        pytest.fail("it never waited")
    for rows, right in zip(early.result(), expected, strict=True):
        assert_same_bits(rows, right)


def test_what_one_server_fails_another_that_has_it_is_asked_for(shares, small_moe, prompt_tokens):
    """The first is said to have all odd experts, and has none of them."""
    with small_model(small_moe, "100%") as whole:
        expected = decoded(whole, prompt_tokens)
    with contextlib.ExitStack() as stack:
        even, lacking, odd = (stack.enter_context(small_model(path, "60%", placed=True))
                              for path in (shares[0], shares[0], shares[1]))
        with joined(even, lacking) as first, joined(even, odd) as second:
            place_shares(even, 0, [first, second])
            for rows, right in zip(decoded(even, prompt_tokens), expected, strict=True):
                assert_same_bits(rows, right)
            assert lacking.engine.served().failed > 0 and odd.engine.served().slots > 0
            assert even.engine.remote_stats().fallback == 0


def test_what_a_server_fails_of_experts_that_are_here_is_computed_here(shares, small_moe, prompt_tokens):
    """It is said to have all, fails what it lacks, and takes its rows otherwise than the one that is asked then."""
    with small_model(small_moe, "100%") as whole:
        expected = decoded(whole, prompt_tokens)
    with contextlib.ExitStack() as stack:
        even, lacking, odd = (stack.enter_context(small_model(path, "60%", placed=True))
                              for path in (shares[0], shares[0], shares[1]))
        first = even.engine.connect("127.0.0.1", lacking.engine.listen(TOKEN, fingerprint(lacking.map)), TOKEN,
                                    fingerprint(even.map), timeout=60)
        second = even.engine.connect("127.0.0.1", odd.engine.listen(TOKEN, fingerprint(odd.map)), TOKEN,
                                     fingerprint(even.map), timeout=60, rows="bf16")
        for layer in even.layers.values():
            even.engine.set_placement(layer.il, [[first, second] if expert % 2 else [first, HERE]
                                                 for expert in range(layer.n_expert)])
        for rows, right in zip(decoded(even, prompt_tokens), expected, strict=True):
            assert np.corrcoef(rows.ravel(), right.ravel())[0, 1] > 0.99
        assert even.engine.remote_stats().fallback > 0 and even.engine.stats().failures == 0
        assert even.engine.peer(second).joined and even.engine.peer(second).error == ""
        for server in (lacking, odd):
            server.engine.stop_listening()


def test_an_expert_that_a_share_lacks_is_neither_kept_nor_read_ahead(shares):
    with small_model(shares[0], "100%", placed=True) as even:
        with pytest.raises(PyorchError, match="expert 1 of layer 0 is not in this share"):
            even.engine.pin(0, [0, 1])
        even.engine.prefetch(0, list(range(64)))
        even.engine.wait_idle()
        assert even.engine.residency(0).resident.tolist() == [True, False] * 32 and even.engine.error() == ""
    with pytest.raises(FormatError, match="has a share of the experts, for one server of a cluster"):
        small_model(shares[0], "100%")
    with pytest.raises(PyorchError, match="no more than 1024 rows for one expert: a ubatch of 1056 tokens"):
        small_model(shares[0], "100%", placed=True, n_ctx=2048, n_batch=2048, n_ubatch=1056)
    with small_model(shares[0], "100%", placed=True, n_ctx=4096, n_batch=4096) as even:
        assert llama_cpp.llama_n_ubatch(even.llama.ctx) <= 1024


def test_a_disk_is_measured_with_experts_that_are_on_it(shares):
    with packs.open_model(shares[3], share=True) as one:  # of 64
        assert measure_bandwidth(one, 0.2).bytes_per_second > 0


def test_a_placement_may_change_at_any_time(small_moe, resident, prompt_tokens):
    with Context(resident.llama.model, n_ctx=128, n_threads=1) as context:
        expected = [context.decode([token]) for token in prompt_tokens[:24]]
    with small_model(small_moe, "30%") as client, small_model(small_moe, "30%") as server:
        with joined(client, server) as peer, Context(client.llama.model, n_ctx=128, n_threads=1) as context:
            for seed, (token, right) in enumerate(zip(prompt_tokens, expected)):
                if seed == 20:
                    client.engine.disconnect(peer)
                elif seed < 20:
                    place_at_random(client, peer, seed)
                assert_same_bits(context.decode([token]), right)
        assert client.engine.remote_stats().fallback == 0


def test_what_lies_elsewhere_is_not_read_ahead(small_moe, prompt_tokens):
    """Neither on a guess nor for a prompt."""
    with small_model(small_moe, "50%", prefetch="quasi-hidden") as client, small_model(small_moe, "50%") as server:
        with joined(client, server) as peer, Context(client.llama.model, n_ctx=128, n_threads=1) as context:
            for layer in client.layers.values():
                client.engine.set_placement(layer.il, [peer] * layer.n_expert)
            context.decode(prompt_tokens)
            for token in prompt_tokens[:8]:
                context.decode([token])
            client.engine.wait_idle()
            assert client.engine.stats().loads == 0
            assert server.engine.stats().loads > 0


def test_a_buddy_that_another_server_computes_is_a_hop_away(small_moe, prompt_tokens):
    """hop(j) of BuddyMoE's eq. 3: a setting makes a similar buddy here better than a more similar one there."""
    far = np.arange(N_EXPERT) < 32
    with load(small_moe, "25%", prefetch="none") as client, load(small_moe, "floor") as server, \
            joined(client, server) as peer, Context(client.llama.model, n_ctx=128, n_threads=1) as context:
        for il in client.layers:
            client.engine.set_placement(il, np.where(far, peer, HERE))
        context.decode(prompt_tokens[:40])  # experts that no server computes become resident
        buddies, ranks = buddies_with_far_ones_first(dict.fromkeys(client.layers, far)), []
        for by_hops in (0, 0.3):
            for il in client.layers:
                apply_substitution(client.engine, il, Substitution(kappa=by_hops), buddies)
            client.reset_stats()
            for token in prompt_tokens[40:50]:
                context.decode([token])
            counts = client.engine.substitution_stats()
            ranks.append(counts.rank_sum / counts.substituted)
        assert ranks[0] < 12 and ranks[1] >= 32


def test_bad_arguments_are_sentences(small_moe):
    with small_model(small_moe, "50%") as model:
        engine, model_is = model.engine, fingerprint(model.map)
        for call, sentence in (
            (lambda: engine.set_placement(0, [3] * 64), "no server 3"),
            (lambda: engine.set_placement(0, [HERE]), "has 64 experts, not 1"),
            (lambda: engine.set_placement(0, [[]] * 64), "0 places"),
            (lambda: engine.set_placement(0, [[[HERE]]] * 64), "not the shape"),
            (lambda: engine.listen("", model_is), "need a token"),
            (lambda: engine.listen("x" * 256, model_is), "255 bytes"),
            (lambda: engine.listen(TOKEN, model_is, address="no address"), "is no address"),
            (lambda: engine.listen(TOKEN, model_is, n_threads=0), "0 threads"),
            (lambda: engine.served(), "does not listen"),
            (lambda: engine.peer(0), "no server 0"),
            (lambda: engine.connect("127.0.0.1", 1, TOKEN, model_is), "cannot be reached"),
            (lambda: engine.connect("127.0.0.1", 70000, TOKEN, model_is), "is no port"),
            (lambda: engine.connect("127.0.0.1", 9, TOKEN, model_is, rows="f16"), "f32 or bf16, not as f16"),
        ):
            with pytest.raises(PyorchError, match=sentence):
                call()
        engine.listen(TOKEN, model_is)
        with pytest.raises(PyorchError, match="listens already"):
            engine.listen(TOKEN, model_is)
