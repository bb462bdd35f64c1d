"""The live view in a browser: of a server that decodes, and of made-up readings for shapes, states and layouts."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from devices import DeviceProcess
from servers import ServerProcess, Stream, pyorch_serve

from pyorch.serve import pages
from pyorch.serve.llama_server import Root
from scripts import chromium

pytestmark = pytest.mark.browser

KEY = "a-key"


@contextmanager
def decoding(server: ServerProcess, key: str = "") -> Iterator[None]:
    """A request is being answered inside."""
    with closing(Stream(server, -1, key)) as stream:
        answers = iter(stream)
        next(answers)
        ended = threading.Event()

        def read() -> None:
            for _ in answers:
                if ended.is_set():
                    return

        reader = threading.Thread(target=read)
        reader.start()
        try:
            yield
        finally:
            ended.set()
            reader.join()


class Readings:
    """A server with the live view whose readings a test sets: layers, totals, the models' states."""

    def __init__(self, n_layers: int = 8, n_expert: int = 64) -> None:
        self.shape = n_layers, n_expert
        self.seconds = 0.0
        self.totals = dict.fromkeys(
            ("hits", "misses", "device_hits", "device_misses", "prefetch_hits", "prefetch_late", "prefetch_loads",
             "stall_ns", "bytes_read", "tokens", "evictions", "device_used_bytes", "device_bytes", "device_ahead",
             "speculated"), 0) | {"recall": None, "budget_bytes": 3 << 30}
        self.budget = 3 << 30
        self.models = {"one": "loaded"}
        self.slots = [{"id": 0, "is_processing": False}]
        readings = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                readings.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        url = urlsplit(handler.path)
        model = next(iter(parse_qs(url.query).get("model", ())), next(iter(self.models)))
        page = pages.contents(False, Root.SMALL_CHAT).get(url.path)
        if page is not None:
            return self._send(handler, 200, page.body, page.type)
        self.seconds += 0.5
        loaded = self.models.get(model) == "loaded"
        value = {"/residency": self._state(model), "/slots": self.slots, "/v1/models": {"data": [
            {"id": name, "status": {"value": state}} for name, state in self.models.items()]}}.get(url.path)
        if value is None or (url.path == "/residency" and not loaded):
            return self._send(handler, 503, json.dumps({"error": {"message": f"{model} is not loaded"}}))
        self._send(handler, 200, json.dumps(value))

    def _state(self, model: str) -> dict:
        n_layers, n_expert = self.shape
        settings = {"least_budget": 1 << 30, "most_budget": 9 << 30, "policy": "learned", "prefetch": "none",
                    "substitution": None, "device": None, "advice": ""}
        if self.budget:
            settings["budget"] = self.budget
        counts = {"hits": 1, "misses": 1, "device_hits": 0}
        layers = [{"layer": i, "states": ("105" * n_expert)[:n_expert], "uses": list(range(n_expert)), **counts}
                  for i in range(n_layers)]
        return {"model": f"{model}.gguf", "seconds": self.seconds, "settings": settings, "totals": self.totals,
                "layers": layers}

    @staticmethod
    def _send(handler: BaseHTTPRequestHandler, status: int, text: str, kind: str = "application/json") -> None:
        body = text.encode()
        handler.send_response(status)
        handler.send_header("Content-Type", kind)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def readings() -> Iterator[Readings]:
    made = Readings()
    yield made
    made.close()


def text(name: str) -> str:
    return f"document.getElementById('{name}').textContent"


@contextmanager
def live(readings: Readings, query: str = "", **look: object) -> Iterator[chromium.Page]:
    """The page, once it shows a reading."""
    with chromium.Page(**look) as page:
        page.open(f"{readings.url}/pyorch{query}")
        page.wait_for(f"document.getElementById('state') && {text('state')} == 'live'")
        yield page
        assert page.console == []


@pytest.fixture(scope="module")
def server(small_moe: Path, tmp_path_factory: pytest.TempPathFactory):
    command = pyorch_serve(small_moe, "--budget", "30%", "--prefetch", "quasi-hidden", "--threads", "1", "--",
                           "--context-shift", "--api-key", KEY)
    server = ServerProcess(command, tmp_path_factory.mktemp("server") / "log")
    yield server
    server.process.kill()
    server.process.communicate()


def test_it_moves_while_the_server_decodes_and_its_slider_sets_the_budget(server: ServerProcess):
    with chromium.Page() as page, decoding(server, KEY):
        page.open(f"{server.url}/pyorch")
        page.wait_for("document.getElementById('key-form') && !document.getElementById('key-form').hidden")
        page.value(
            f"document.getElementById('key').value = '{KEY}'; document.querySelector('#key-form button').click()"
        )
        page.wait_for(f"{text('state')} == 'live' && {text('hit-rate')}.includes('%') && {text('read')}.includes('/s')")
        page.wait_for(f"parseFloat({text('tokens')}) > 0 && {text('recall')}.includes('%')")
        page.wait_for("document.querySelector('#slots tr.answering td:nth-child(6)')?.textContent.includes('ms')")
        page.wait_for(f"{text('activity')} == '1 request in progress.'")

        # The map shows other colours when the next tokens were decoded.
        pixels = "document.getElementById('map').toDataURL()"
        before = page.value(pixels)
        page.wait_for(f"{pixels} != {before!r}")

        # By keyboard: one expert after another.
        page.value("document.getElementById('map').focus()")
        for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
            page.press(key)
        page.wait_for(f"{text('cell')}.startsWith('layer 1, expert 1: ')")

        shown = page.value(text("budget-text"))
        page.value("document.getElementById('budget').focus()")
        page.press("End")
        page.wait_for(f"{text('budget-text')} != {shown!r} && {text('budget-text')}.includes('100 %')")
        page.wait_for(f"fetch('residency', {{headers: {{Authorization: 'Bearer {KEY}'}}}}).then(r => r.json())"
                      ".then(s => s.settings.budget == s.settings.most_budget)")

        # As wide as a phone: nothing lies outside, and nothing needs to be scrolled aside. In both themes.
        lightness = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).reduce((a, b) => a + +b, 0) / 3"
        for dark in (True, False):
            page.look(375, 740, dark)
            page.wait_for("document.documentElement.scrollWidth <= 375")
            scroll = "document.querySelector('.scroll')"
            page.wait_for(f"{scroll}.scrollWidth <= {scroll}.clientWidth")
            page.wait_for(f"({lightness} < 64) == {str(dark).lower()}")
            # What a word means is said where it stands, and in the list.
            assert page.value("document.getElementById('ttft-of').title").startswith("time to first token")
            assert page.value("[...document.querySelectorAll('.terms dt')].every("
                              "(term) => document.getElementById(term.dataset.of).title)")
        assert page.value("[...document.querySelectorAll('header a')].map((a) => a.textContent).join()") == "chat,docs"
        docs = "fetch(document.querySelector('header a:last-child').href).then((answer) => answer.text())"
        assert page.value(docs).startswith("# Serving")
        assert page.console == []
    assert server.process.poll() is None


def test_recall_has_no_value_where_nothing_is_read_ahead(start, small_moe: Path):
    server = start(pyorch_serve(small_moe, "--budget", "30%", "--prefetch", "none", "--threads", "1", "--",
                                "--context-shift"))
    assert server.get("/residency")["totals"]["recall"] is None
    with chromium.Page() as page, decoding(server):
        page.open(f"{server.url}/pyorch")
        page.wait_for("parseFloat(document.getElementById('tokens')?.textContent) > 0 && "
                      "parseFloat(document.getElementById('hit-rate').textContent) < 100")
        assert page.value("document.getElementById('recall').textContent") == "\u2013"
        assert page.value("document.querySelector('header a').getAttribute('href')") == "./"
        page.wait_for("/lines of the last \\d+ s/.test(document.getElementById('span').textContent)")


def test_experts_on_a_device_are_told_apart(small_moe: Path, tmp_path: Path):
    device = DeviceProcess(tmp_path / "device.log")
    server = ServerProcess(pyorch_serve(small_moe, "--budget", "30%", "--device", device.name, "--vram-budget", "100%",
                                        "--threads", "1", "--", "--context-shift"), tmp_path / "log")
    try:
        with chromium.Page() as page, decoding(server):
            page.open(f"{server.url}/pyorch")
            page.wait_for("document.getElementById('device-hit-rate')?.textContent.includes('%')")
            page.wait_for("parseFloat(document.getElementById('tokens').textContent) > 0")
            assert "of the rest" in page.value("document.getElementById('hit-rate-of').textContent")
            page.wait_for("!document.getElementById('device-legend').hidden && "
                          "document.getElementById('settings').textContent.includes('of its memory used')")
            page.value("document.getElementById('map').focus()")
            cell = "document.getElementById('cell').textContent"
            for expert in range(64):  # those that were used are there
                page.press("ArrowRight")
                page.wait_for(f"{cell}.startsWith('layer 0, expert {expert}: ')")
                if "on the device" in page.value(cell):
                    break
            assert "on the device" in page.value(cell)
            assert page.console == []
    finally:
        server.process.kill()
        server.process.communicate()
        device.stop()


def test_an_idle_server_says_since_when(readings: Readings) -> None:
    with live(readings) as page:
        page.wait_for(f"{text('activity')} == 'No request yet.'")
        assert page.value(text("tokens")) == "\u2013" and page.value(text("read")) == "\u2013"
        readings.totals |= {"tokens": 800, "hits": 30, "misses": 10}
        page.wait_for(f"parseFloat({text('tokens')}) > 0 && {text('activity')} == 'Computing.'")
        assert "of the last 2 s" in page.value(text("span"))
        readings.slots = [{"id": 0, "is_processing": False, "id_task": 7, "n_prompt_tokens": 5,
                           "n_prompt_tokens_processed": 4, "n_prompt_tokens_cache": 1, "t_prompt_ms": 9.0,
                           "t_per_token_ms": 20.0, "next_token": [{"n_decoded": 16}]}]
        page.wait_for(f"{text('activity')}.startsWith('Idle since ')")
        said = page.value(text("activity"))
        assert re.search(r"since [\d:]+.*; last request: 5 tokens of prompt, 16 of answer, 20 ms per token", said), said
        # Figures of the last two seconds would be those of no request.
        assert page.value(text("tokens")) == "\u2013" and page.value(text("hit-rate")) == "75.0 %"
        assert "of the last 2 s" not in page.value(text("span"))


def test_of_several_models_one_is_chosen_and_one_that_is_not_loaded_says_so(readings: Readings) -> None:
    readings.models = {"one": "loaded", "two": "loaded", "three": "unloaded"}
    choose = ("(() => {{ const menu = document.getElementById('choice'); menu.value = '{}';"
              "menu.dispatchEvent(new Event('change')); }})()")
    with live(readings, "?model=two") as page:
        page.wait_for(f"{text('model')} == 'two.gguf' && document.getElementById('choice').value == 'two'")
        assert page.value("document.getElementById('choice').options.length") == 4
        page.value(choose.format("one"))
        page.wait_for(f"{text('model')} == 'one.gguf' && location.search == '?model=one'")
        page.value(choose.format("three"))
        page.wait_for(f"{text('absent')} == 'three is not loaded.' && document.getElementById('main').hidden")
        readings.models["three"] = "loaded"
        page.wait_for(f"{text('model')} == 'three.gguf' && !document.getElementById('main').hidden")
        page.wait_for("document.getElementById('choice').selectedOptions[0].textContent == 'three (loaded)'")
        page.value(choose.format(""))
        page.wait_for(f"{text('model')} == 'one.gguf' && location.search == ''")
        page.console = [line for line in page.console if "503" not in line]


def test_the_budget_is_drawn_as_it_changes_and_may_be_missing(readings: Readings) -> None:
    pixels = "document.getElementById('budget-chart').toDataURL()"
    with live(readings) as page:
        page.wait_for(f"{text('budget-now')} == '3.0 GiB'")
        page.wait_for("!document.getElementById('span').textContent.includes('120')")
        before = page.value(pixels)
        readings.totals["budget_bytes"] = readings.budget = 5 << 30
        page.wait_for(f"{text('budget-now')} == '5.0 GiB' && {pixels} != {before!r}")
        del readings.totals["budget_bytes"]
        readings.budget = 4 << 30  # the setting
        page.wait_for(f"{text('budget-now')} == '4.0 GiB'")
        readings.budget = 0
        page.wait_for("document.getElementById('of-budget').hidden")
        assert page.value(text("state")) == "live"


@pytest.mark.parametrize("shape", [(58, 256), (94, 128)])
def test_large_models_take_few_elements_and_keep_cells_that_can_be_seen(shape: tuple[int, int]) -> None:
    readings = Readings(*shape)
    try:
        with live(readings) as page:
            page.wait_for("document.getElementById('map').height > 300")
            assert page.value("document.querySelectorAll('*').length") < 250
            size = page.value("(({clientWidth, clientHeight}) => [clientWidth, clientHeight])("
                              "document.getElementById('map'))")
            assert size[0] >= 4 * shape[1] and size[1] >= 7 * shape[0]
            page.value("document.getElementById('map').focus()")
            for key in ("ArrowRight", "End"):
                page.press(key)
            page.wait_for(f"{text('cell')}.startsWith('layer 0, expert {shape[1] - 1}: ')")
            assert page.value(f"{text('said')} == {text('cell')}")  # for a screen reader, once
            scroller = "document.querySelector('.map')"
            assert page.value(f"{scroller}.scrollLeft + {scroller}.clientWidth >= {scroller}.scrollWidth - 1")
            page.press("Escape")
            page.wait_for(f"{text('cell')}.startsWith('Rows are layers')")
            page.look(390, 740)
            page.wait_for("document.documentElement.scrollWidth <= 390")
    finally:
        readings.close()


def test_a_cell_is_tapped_on_a_phone(readings: Readings) -> None:
    with live(readings, width=390, height=740, touch=True) as page:
        page.wait_for(f"document.getElementById('map').height > 50 && {text('activity')}")
        page.value("document.getElementById('map').scrollIntoView({block: 'center'})")
        box = page.value("(({x, y, height}) => [x, y, height])(document.getElementById('map').getBoundingClientRect())")
        row = box[2] / 8
        page.tap(box[0] + 3, box[1] + 2.5 * row)
        page.wait_for(f"{text('cell')} == 'layer 2, expert 0: in memory, used 0 times'")
        page.tap(box[0] + 10, box[1] + 4.5 * row)
        page.wait_for(f"{text('cell')} == 'layer 4, expert 1: not in memory, used 1 times'")
        # Its text is where the finger's owner looks, not below the fold.
        assert page.value("document.getElementById('cell').getBoundingClientRect().bottom <= innerHeight")
        assert page.value("document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize("dark", [False, True])
def test_it_can_be_read_in_both_themes_and_by_a_screen_reader(readings: Readings, dark: bool) -> None:
    readings.models = {"one": "loaded", "two": "unloaded"}
    with live(readings, dark=dark) as page:
        page.wait_for("!document.getElementById('choice').hidden")
        page.value("document.querySelector('.terms').open = true")
        assert page.pale() == []
        controls = page.controls()
        assert all(name for _, name in controls), controls
        assert [role for role, _ in controls if role in ("combobox", "slider", "application")] == [
            "combobox", "slider", "application"]
        # What changes twice a second is not read aloud.
        live_regions = page.value("[...document.querySelectorAll('output')].every((each) => each.ariaLive == 'off')")
        assert live_regions and page.value("document.getElementById('cell').ariaLive") is None
        reached = []
        for _ in range(5):
            page.press("Tab")
            reached.append(page.value("document.activeElement.id || document.activeElement.textContent"))
            assert page.value("getComputedStyle(document.activeElement).outlineStyle") != "none"
        assert reached == ["choice", "chat", "docs", "budget", "map"]


def test_it_asks_no_other_host_and_its_links_lead_somewhere(readings: Readings) -> None:
    with live(readings) as page:
        page.wait_for("document.getElementById('map').height > 50")
        assert page.requests and all(url.startswith((readings.url, "data:")) for url in page.requests), page.requests
        links = page.value("Promise.all([...document.querySelectorAll('a[href]')].filter((a) => a.checkVisibility())"
                           ".map((a) => fetch(a.href).then((answer) => [a.textContent, answer.status])))")
        assert links == [["chat", 200], ["docs", 200]]
