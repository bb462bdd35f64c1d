"""The live view in a browser, before a server that decodes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from devices import DeviceProcess
from servers import ServerProcess, Stream, pyorch_serve

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import chromium

pytestmark = pytest.mark.skipif(chromium.find() is None, reason="needs a browser: apt-get install chromium")

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


@pytest.fixture(scope="module")
def server(small_moe: Path, tmp_path_factory: pytest.TempPathFactory):
    command = pyorch_serve(small_moe, "--budget", "30%", "--prefetch", "quasi-hidden", "--threads", "1", "--",
                           "--context-shift", "--api-key", KEY)
    server = ServerProcess(command, tmp_path_factory.mktemp("server") / "log")
    yield server
    server.process.kill()
    server.process.communicate()


def test_it_moves_while_the_server_decodes_and_its_slider_sets_the_budget(server: ServerProcess):
    def text(name: str) -> str:
        return f"document.getElementById('{name}').textContent"

    with chromium.Page() as page, decoding(server, KEY):
        page.open(f"{server.url}/pyorch")
        page.wait_for("document.getElementById('key-form') && !document.getElementById('key-form').hidden")
        page.value(
            f"document.getElementById('key').value = '{KEY}'; document.querySelector('#key-form button').click()"
        )
        page.wait_for(f"{text('state')} == 'live' && {text('hit-rate')}.includes('%') && {text('read')}.includes('/s')")
        page.wait_for(f"parseFloat({text('tokens')}) > 0 && {text('recall')}.includes('%')")
        page.wait_for("document.querySelector('#slots tr.answering td:nth-child(6)')?.textContent.includes('ms')")

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
            assert page.value("document.getElementById('ttft-of').title").startswith("time to the first token")
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
