"""The routes that llama-server lacks: /metrics with ours in it, /residency, and the live view's files."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

import pytest
from models import PROMPT
from processes import HANG_SECONDS
from prometheus_client.parser import text_string_to_metric_families
from servers import ServerProcess, faulty_serve, pyorch_serve, wait_until

from pyorch.library.bindings import lib
from pyorch.serve.metrics import QUEUE

KEY = "the key of this test"


@pytest.fixture(scope="module")
def server(small_moe: Path, tmp_path_factory: pytest.TempPathFactory):
    command = pyorch_serve(small_moe, "--budget", "40%", "--threads", "1")
    server = ServerProcess(command, tmp_path_factory.mktemp("server") / "log")
    yield server
    server.process.kill()
    server.process.communicate()


def ask(server: ServerProcess, path: str, body: object = None, **headers: str) -> tuple[int, str]:
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {name.replace("_", "-"): value
                                                              for name, value in headers.items()})
    try:
        with urllib.request.urlopen(request, timeout=HANG_SECONDS) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def residency(server: ServerProcess, **headers: str) -> dict:
    status, text = ask(server, "/residency", **headers)
    assert status == 200, text
    return json.loads(text)


def change(server: ServerProcess, **settings: object) -> dict:
    status, text = ask(server, "/residency", settings)
    assert status == 200, text
    return json.loads(text)


def test_a_model_is_asked_for_by_its_name(server: ServerProcess, small_moe: Path):
    listed = json.loads(ask(server, "/v1/models")[1])["data"][0]
    for name in (listed["id"], small_moe.name):
        status, text = ask(server, f"/v1/models/{quote(name, '')}")
        assert status == 200 and json.loads(text) | {"created": 0} == listed | {"created": 0}
    assert ask(server, f"/v1/models/{small_moe.name.replace('.', 'x')}")[0] == 404


def test_metrics_are_those_of_llama_server_and_of_the_experts(server: ServerProcess):
    assert server.complete(PROMPT)
    status, text = ask(server, "/metrics")
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert status == 200 and families["llamacpp:tokens_predicted"].samples
    value = {name: family.samples[0].value for name, family in families.items() if len(family.samples) == 1}
    assert value["pyorch_expert_misses"] > 0 and value["pyorch_read_bytes"] > 0 and value["pyorch_stall_seconds"] > 0
    assert 0 < value["pyorch_resident_bytes"] <= value["pyorch_used_bytes"] <= value["pyorch_budget_bytes"]
    for name in ("expert_hits", "expert_misses", "expert_loads", "read_bytes", "prefetch_useful", "prefetch_late",
                 "prefetch_wasted", "substituted_slots", "dropped_slots", "resident_bytes"):
        by_layer = [sample.value for sample in families[f"pyorch_layer_{name}"].samples]
        assert len(by_layer) == 8 and sum(by_layer) == value[f"pyorch_{name}"], name
    stalls = [sample.value for sample in families["pyorch_layer_stall_seconds"].samples]
    assert sum(stalls) == pytest.approx(value["pyorch_stall_seconds"])


def test_a_snapshot_is_one_reading_of_all_layers(server: ServerProcess):
    assert server.complete(PROMPT)
    state = residency(server)
    totals = state["totals"]
    for name in ("hits", "misses", "loads", "bytes_read", "resident_experts", "resident_bytes"):
        assert sum(layer[name] for layer in state["layers"]) == totals[name], name
    resident = [
        sum(int(flags, 16) & lib.PYORCH_RESIDENT != 0 for flags in layer["states"]) for layer in state["layers"]
    ]
    assert resident == [layer["resident_experts"] for layer in state["layers"]]
    assert [sum(layer["uses"]) for layer in state["layers"]] == [
        layer["hits"] + layer["misses"] for layer in state["layers"]]


def test_settings_change_while_it_runs(server: ServerProcess):
    before = residency(server)["settings"]
    changed = change(server, budget="60%", policy="lru", prefetch="quasi-hidden:1", pin={"1": [3, 5]})
    assert changed["settings"]["budget"] > before["budget"]
    assert (changed["settings"]["policy"], changed["settings"]["prefetch"]) == ("lru", "quasi-hidden:1")
    pinned = changed["layers"][1]["states"]
    assert [i for i, flags in enumerate(pinned) if int(flags, 16) & lib.PYORCH_PINNED] == [3, 5]
    assert server.complete(PROMPT)
    state = change(server, unpin={"1": [3, 5]}, budget=before["budget"], policy=before["policy"],
                   prefetch=before["prefetch"])
    assert not any(int(flags, 16) & lib.PYORCH_PINNED for layer in state["layers"] for flags in layer["states"])
    assert state["settings"] == before and state["totals"]["used_bytes"] <= before["budget"]


def test_a_lower_budget_is_answered_when_experts_have_left(start, small_moe: Path, tmp_path: Path):
    """A prompt waits for the disk, and holds the experts of its layer and of the next one."""
    fault = tmp_path / "fault"
    server = start(faulty_serve(small_moe, fault))
    change(server, budget="100%")
    fault.write_text("slow")
    with ThreadPoolExecutor(2) as pool:
        try:
            prompt = pool.submit(server.complete, PROMPT * 10, 1)
            wait_until(lambda: fault.with_suffix(".reached").exists() or prompt.done())
            least = residency(server)["settings"]["least_budget"]
            changed = pool.submit(change, server, budget=least)
            wait_until(lambda: residency(server)["settings"]["budget"] == least)
            held = residency(server)["totals"]
            assert held["used_bytes"] > held["budget_bytes"], "else the answer need not wait"
        finally:
            fault.unlink()
        totals = changed.result()["totals"]
        assert totals["used_bytes"] <= totals["budget_bytes"] == least and prompt.exception() is None


def test_budgets_that_are_changed_at_once_are_answered_one_after_the_other(start, small_moe: Path):
    """Else one answer would have another's budget, and experts that have not left yet."""
    server = start(pyorch_serve(small_moe, "--budget", "100%", "--threads", "1"))
    least = residency(server)["settings"]["least_budget"]
    with ThreadPoolExecutor(12) as pool:
        prompts = [pool.submit(server.complete, PROMPT * 10, 40) for _ in range(4)]
        budgets = (least, "100%")
        answers = pool.map(lambda i: (i, change(server, budget=budgets[i % 2])), range(200))
        for i, answer in answers:
            totals = answer["totals"]
            assert totals["used_bytes"] <= totals["budget_bytes"]
            assert (totals["budget_bytes"] == least) == (i % 2 == 0)
        assert all(prompt.exception() is None for prompt in prompts)


def test_a_named_budget_or_a_lossy_setting_ends_following_and_auto_begins_it_again(start, small_moe: Path):
    server = start(pyorch_serve(small_moe))
    assert residency(server)["settings"]["budget_follows"]
    named = change(server, budget="60%")["settings"]
    assert not named["budget_follows"]
    assert change(server, budget="auto")["settings"]["budget_follows"]
    assert not change(server, substitution="mode=random")["settings"]["budget_follows"]
    assert change(server, substitution=None)["settings"]["budget_follows"]
    too_many = {str(il): list(range(60)) for il in range(8)}
    assert ask(server, "/residency", {"budget": "20%", "pin": too_many})[0] == 400, "so the budget is restored"
    assert residency(server)["settings"]["budget_follows"]


def test_it_says_how_many_slots_suit_the_budget(server: ServerProcess):
    """A budget of 40 % holds 25 experts of a layer: those of five requests, 64 (1 - (1 - 6/64)^5), are 24.9."""
    before = residency(server)["settings"]
    assert (before["slots"], before["suitable_slots"], before["advice"]) == (5, 5, "")
    assert re.search(r"^pyorch: 5 slots: a step of 6 requests would use about 29 of the 64 experts of a layer, and 2\d "
                     r"of them fit; -- -np N sets another number$", server.log.read_text(), re.MULTILINE)
    small = change(server, budget="20%")["settings"]
    assert small["suitable_slots"] == 2 and small["advice"].startswith(
        "-np 2 suits this budget: a step of 5 requests uses about 25 of the 64 experts of a layer, and 1")
    change(server, budget=before["budget"])


def test_more_clients_than_slots_wait_and_the_metrics_say_so(start, small_moe: Path):
    """As many slots as the user says."""
    server = start(pyorch_serve(small_moe, "--budget", "60%", "--threads", "1", "--", "-np", "2", "-c", "2048"))
    assert "slots: " not in server.log.read_text()

    def queue() -> dict[str, float]:
        text = ask(server, "/metrics")[1]
        return dict(re.findall(r"^pyorch_(requests_waiting\w*) (\S+)$", text, re.MULTILINE))

    assert queue() == {"requests_waiting": "0", "requests_waiting_seconds": "0.0"}
    with ThreadPoolExecutor(9) as pool:
        answers = [pool.submit(server.complete, f"{i} {PROMPT}", 60, extra_body={"ignore_eos": True}) for i in range(9)]
        seen: list[tuple[int, float]] = []
        while not all(answer.done() for answer in answers):
            now = queue()
            seen.append((int(now["requests_waiting"]), float(now["requests_waiting_seconds"])))
        assert all(answer.result() for answer in answers)
    most = max(seen)[0]
    assert 1 < most <= 7, seen
    assert all(seconds == 0 for n, seconds in seen if n == 0)
    assert max(seconds for _, seconds in seen) > 0.01 and queue()["requests_waiting"] == "0"


def test_each_of_the_chosen_slots_has_a_whole_context(start, small_moe: Path):
    """Requests that together are longer than one context are answered, all at once."""
    server = start(pyorch_serve(small_moe, "--budget", "100%", "--threads", "1", "--ctx", "512"))
    props = server.get("/props")
    n_slots = props["total_slots"]
    assert n_slots == 8 and props["default_generation_settings"]["n_ctx"] == 512
    assert "pyorch: 8 slots: memory has room for their contexts and their experts;" in server.log.read_text()
    body = {"n_predict": 100, "ignore_eos": True}
    with ThreadPoolExecutor(12) as pool:
        answers = [*pool.map(lambda i: server.post("/completion", {"prompt": [100 + i] * 380, **body}), range(12))]
    assert [status for status, _ in answers] == [200] * 12
    assert {json.loads(text)["tokens_predicted"] for _, text in answers} == {100}
    assert "note: a request has at most" not in server.log.read_text()


def test_it_says_so_if_the_model_was_trained_with_less_context_than_the_user_wants(start, small_moe: Path):
    server = start(pyorch_serve(small_moe, "--budget", "100%", "--threads", "1", "--ctx", "4096"))
    assert server.get("/props")["default_generation_settings"]["n_ctx"] == 1024
    wait_until(lambda: "live view at " in server.log.read_text())  # the line after the note
    assert "note: a request has at most 1024 tokens of context, and not 4096: " in server.log.read_text()


def test_a_lossy_setting_is_counted_and_ends(server: ServerProcess):
    change(server, budget="25%", substitution="mode=random,prefill")
    assert server.complete("class Matrix:\n    def __init__(self, rows):\n" + PROMPT)
    state = change(server, substitution=None, budget="40%")
    n = state["totals"]["substituted"]
    assert n > 0 and n == sum(layer["substituted"] for layer in state["layers"])
    assert server.complete("def other(rows):\n")
    assert residency(server)["totals"]["substituted"] == n


@pytest.mark.parametrize(("body", "sentence"), [
    (b"{", "is no JSON: Expecting property name"),
    ([], "is no JSON object"),
    (b"[" * 100_000, "the body nests brackets too deep"),
    ({"budge": 1}, 'setting "budge" is not known: use budget'),
    ({"budget": "1KiB"}, "below the floor"),
    ({"budget": "much"}, 'budget "much" is not understood'),
    ({"budget": True}, "budget true is not understood"),
    ({"budget": "auto"}, "only in a server that was started with --budget auto"),
    ({"policy": "newest"}, 'policy "newest" is not known'),
    ({"policy": "belady"}, "know the future"),
    ({"policy": "fifo"}, "there to be compared with"),
    ({"prefetch": "stars"}, 'predictor "stars" is not known'),
    ({"prefetch": "quasi-hidden:99"}, "99 is not from 1 to"),
    ({"pin": {"99": [1]}}, "layer 99 has no routed experts"),
    ({"pin": {"0": [9999]}}, "has experts 0 to"),
    ({"pin": [1]}, "pin is not understood"),
    ({"substitution": "colour=red"}, 'setting "colour" is not known'),
    ({"substitution": "buddies"}, "no buddy lists"),
    # Nothing is changed where one of them cannot be.
    ({"budget": "70%", "policy": "newest"}, 'policy "newest" is not known'),
    ({"policy": "lfu", "pin": {str(il): list(range(30)) for il in range(8)}}, "budget"),
])
def test_a_setting_that_cannot_be_is_refused_and_nothing_changes(server: ServerProcess, body: object, sentence: str):
    before = residency(server)["settings"]
    status, text = ask(server, "/residency", body)
    assert status == 400 and sentence in json.loads(text)["error"]["message"], text
    assert residency(server)["settings"] == before


def test_pages_of_other_sites_change_nothing(server: ServerProcess):
    """Pages of another program of this machine may use the server, and yet not change it."""
    status, text = ask(server, "/residency", {"policy": "lru"}, Origin="http://localhost:3000")
    assert status == 403 and "--api-key" in text
    assert ask(server, "/residency", {"policy": "learned"}, Origin=server.url)[0] == 200


def test_with_an_api_key_only_the_page_itself_is_open(start, small_moe: Path):
    server = start(pyorch_serve(small_moe, "--budget", "40%", "--threads", "1", "--", "--api-key", KEY,
                                "--api-prefix", "/here"))
    for path in ("/here/pyorch", "/here/pyorch/live.js", "/here/pyorch/live.css", "/here/pyorch/charts.js"):
        assert ask(server, path)[0] == 200, path
    for path in ("/here/residency", "/here/metrics"):
        assert ask(server, path)[0] == 401
        assert ask(server, path, Authorization=f"Bearer {KEY}")[0] == 200
    assert ask(server, "/here/residency", {"policy": "lru"})[0] == 401
    # Who has the key may use any page that is allowed.
    headers = {"Authorization": f"Bearer {KEY}", "Origin": "http://localhost:3000"}
    assert ask(server, "/here/residency", {"policy": "lru"}, **headers)[0] == 200


def test_a_dense_model_has_llama_servers_metrics_only(start, dense_model: Path):
    server = start(pyorch_serve(dense_model, "--threads", "1", "--", "-c", "64"))
    status, text = ask(server, "/metrics")
    assert status == 200 and set(re.findall("pyorch_\\w+", text)) == {f"pyorch_{name}" for name, _ in QUEUE}
    status, text = ask(server, "/residency")
    assert status == 400 and "no routed experts" in text
