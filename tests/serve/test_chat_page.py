"""llama-server's chat page, where the build has it, and ours where it has not: in a browser, before a server that
decodes."""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path

import pytest
from processes import HANG_SECONDS
from servers import ServerProcess, pyorch_serve, wait_until

from pyorch import _libs
from pyorch.serve.library import chat_page
from pyorch.serve.llama_server import Flags, Root
from scripts import chromium

built = pytest.mark.skipif(not chat_page(), reason="needs the chat page: make chat-page")
not_built = pytest.mark.skipif(bool(chat_page()), reason="the build has llama-server's chat page in its place")
browser = pytest.mark.browser


@built
@browser
def test_a_question_is_answered_and_the_live_view_stays_where_it_is(start, small_moe: Path):
    server = start(pyorch_serve(small_moe, "--budget", "40%", "--threads", "1", "--",
                                "--n-predict", "16"))
    with chromium.Page() as page:
        page.open(f"{server.url}/")
        page.wait_for("document.querySelector('textarea') && !document.querySelector('textarea').disabled")
        page.value("document.querySelector('textarea').focus()")
        page.type("def add(a, b):")
        page.press("Enter")
        page.wait_for("document.body.innerText.includes('def add(a, b):')")
        page.wait_for("fetch('metrics').then(r => r.text()).then(t => /tokens_predicted_total [1-9]/.test(t))")
        # The worker that keeps the page for when there is no network leaves other addresses alone.
        page.wait_for("navigator.serviceWorker.ready.then(() => true)")
        page.open(f"{server.url}/pyorch")
        page.wait_for("document.title.startsWith('pyorch') && document.getElementById('state').textContent == 'live'")
        assert page.value("document.querySelector('header a').getAttribute('href')") == "./"
        # It takes the theme of the system, on a phone too.
        for dark in (True, False):
            page.look(390, 740, dark)
            page.open(f"{server.url}/")
            page.wait_for("document.querySelector('textarea') != null")
            page.wait_for(f"document.documentElement.classList.contains('dark') == {str(dark).lower()}")
            page.wait_for("document.documentElement.scrollWidth <= 390")


@built
def test_its_files_need_no_key_wherever_they_are(start, small_moe: Path):
    server = start(pyorch_serve(small_moe, "--budget", "40%", "--threads", "1", "--",
                                "--api-key", "secret", "--api-prefix", "/here"))
    for name in ("", *(file.path for file in chat_page())):
        request = urllib.request.Request(f"{server.url}/here/{name}", headers={"Accept-Encoding": "gzip"})
        with urllib.request.urlopen(request, timeout=HANG_SECONDS) as answer:
            assert answer.status == 200 and answer.read(), name
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{server.url}/here/props", timeout=HANG_SECONDS)


@built
def test_the_notices_of_what_is_in_it_are_there():
    text = (_libs.lib_dir() / "licenses/LICENSE-chat-page").read_text(encoding="utf-8")
    for name in ("svelte", "katex", "highlight.js", "pdfjs-dist", "dompurify", "decimal.js"):
        assert f"\n{name} " in text or f"\n{name}\n" in text, name


def test_what_the_root_shows(monkeypatch: pytest.MonkeyPatch):
    for files, chat in (([], Root.SMALL_CHAT), (["index.html"], Root.LLAMA_SERVER)):
        monkeypatch.setattr("pyorch.serve.llama_server.chat_page", lambda files=files: files)
        assert Flags(()).root is Flags(["--ui"]).root is chat
        assert Flags(["--path", "files"]).root is Root.LLAMA_SERVER
        assert Flags(["--no-ui"]).root is Flags(["--no-webui"]).root is Root.LIVE_VIEW
        monkeypatch.setenv("LLAMA_ARG_UI", "off")
        assert Flags(()).root is Root.LIVE_VIEW and Flags(["--ui"]).root is chat
        monkeypatch.delenv("LLAMA_ARG_UI")


def test_server_is_told_to_leave_out_a_page_that_it_lacks():
    server = Flags(())
    server.add_defaults()
    assert ("--no-ui" in server.arguments) == (not chat_page())


def test_where_no_chat_is_wanted_the_root_leads_to_the_live_view_with_a_key_and_a_prefix_too(start, small_moe: Path):
    server = start(pyorch_serve(small_moe, "--budget", "40%", "--threads", "1", "--", "--no-ui",
                                "--api-key", "secret", "--api-prefix", "/here"))
    with urllib.request.urlopen(f"{server.url}/here/", timeout=HANG_SECONDS) as answer:
        assert answer.url == f"{server.url}/here/pyorch" and "<title>pyorch</title>" in answer.read().decode()
    assert "pyorch: live view at " in server.log.read_text() and "chat at " not in server.log.read_text()


def test_files_of_the_user_are_in_its_place(start, small_moe: Path, tmp_path: Path):
    (tmp_path / "index.html").write_text("mine")
    server = start(pyorch_serve(small_moe, "--budget", "40%", "--threads", "1", "--", "--path", str(tmp_path)))
    with urllib.request.urlopen(f"{server.url}/", timeout=HANG_SECONDS) as answer:
        assert answer.read() == b"mine"


@not_built
@browser
@pytest.mark.parametrize("dark", [False, True])
def test_without_it_a_small_page_converses(start, small_moe: Path, dark: bool):
    server = start(pyorch_serve(small_moe, "--budget", "40%", "--threads", "1", "--", "--n-predict", "16",
                                "--api-key", "secret", "--api-prefix", "/here"))
    wait_until(lambda: f"pyorch: chat at {server.url}/here/, live view at {server.url}/here/pyorch, API for programs "
                       f"at {server.url}/here/v1" in server.log.read_text())
    with chromium.Page(390, 740, dark=dark) as page:
        page.open(f"{server.url}/here/")
        page.wait_for("document.getElementById('key-form') && !document.getElementById('key-form').hidden")
        page.value("document.getElementById('key').value = 'secret';"
                   "document.querySelector('#key-form button').click()")
        page.wait_for("document.getElementById('name').textContent == 'small-moe.gguf'")
        lightness = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).reduce((a, b) => a + +b, 0) / 3"
        assert (page.value(lightness) < 64) == dark
        page.value("document.getElementById('text').focus()")
        for n in (1, 2):
            page.type("def add(a, b):")
            page.press("Enter")
            page.wait_for(f"document.querySelectorAll('.note').length == {n}")
            assert " tokens, " in page.value("document.querySelector('.note').textContent")
        assert page.value("document.querySelectorAll('.assistant').length") == 2
        assert page.value("document.documentElement.scrollWidth") <= 390
        page.value("document.getElementById('new').click()")
        assert page.value("document.getElementById('messages').children.length") == 0
        page.value("document.querySelector('header a').click()")
        page.wait_for("document.getElementById('state')?.textContent == 'live'")
        assert not page.value("document.querySelector('header a').hidden")
        assert [text for text in page.console if "401" not in text] == []


@not_built
@browser
def test_an_answer_of_the_small_page_is_stopped_and_a_failure_is_said(start, small_moe: Path):
    server = start(pyorch_serve(small_moe, "--budget", "40%", "--threads", "1", "--", "--context-shift",
                                "--ignore-eos"))
    with chromium.Page() as page:
        page.open(f"{server.url}/")
        page.wait_for("document.getElementById('name')?.textContent == 'small-moe.gguf'")
        page.value("document.getElementById('text').focus()")
        page.type("def add(a, b):")
        page.press("Enter")
        page.wait_for("document.querySelector('.assistant')?.textContent.length > 20")
        page.value("document.getElementById('send').click()")
        page.wait_for("document.querySelector('.note')?.textContent == 'stopped'")
        wait_until(lambda: not any(slot["is_processing"] for slot in server.get("/slots")))
        server.stop()
        page.value("document.getElementById('text').focus()")
        page.type("again")
        page.press("Enter")
        page.wait_for("document.querySelector('.error')?.textContent == 'no connection to the server'")
        assert page.value("document.getElementById('text').value") == "again"


@pytest.fixture(scope="module")
def answering(small_moe: Path, tmp_path_factory: pytest.TempPathFactory):
    server = ServerProcess(pyorch_serve(small_moe, "--budget", "40%", "--threads", "1", "--", "--n-predict", "16"),
                           tmp_path_factory.mktemp("server") / "log")
    yield server
    server.process.kill()
    server.process.communicate()


def said(page: chromium.Page) -> list[str]:
    return page.value("[...document.querySelectorAll('.user, .assistant')].map((each) => each.textContent)")


def open_small(server: ServerProcess, page: chromium.Page) -> None:
    page.open(f"{server.url}/")
    page.wait_for("document.getElementById('name')?.textContent == 'small-moe.gguf'")


@not_built
@browser
def test_the_small_page_keeps_its_conversation_and_new_is_undone(answering: ServerProcess):
    with chromium.Page(390, 740) as page:
        open_small(answering, page)
        assert "make chat-page" in page.value("document.getElementById('intro').textContent")
        page.press("Tab")  # from the message to Send, which is not next to "New conversation"
        assert page.value("document.activeElement.id") == "send"
        page.value("document.getElementById('text').focus()")
        page.type("def add(a, b):")
        page.press("Enter")
        page.wait_for("document.querySelectorAll('.note').length == 1")
        before = said(page)
        assert len(before) == 2 and page.value("document.getElementById('intro').hidden")
        page.reload()
        page.wait_for("document.querySelectorAll('.note').length == 1")
        assert said(page) == before and " tokens, " in page.value("document.querySelector('.note').textContent")

        page.value("document.getElementById('new').focus()")
        page.press("Enter")
        assert said(page) == [] and page.value("document.activeElement.id") == "text"
        assert "removed" in page.value("document.getElementById('undo').textContent")
        page.value("document.getElementById('undo-new').focus()")
        page.press("Enter")
        assert said(page) == before and page.value("document.getElementById('undo').textContent") == ""

        page.value("document.getElementById('new').click(); document.getElementById('text').focus()")
        page.type("import os")
        page.press("Enter")
        page.wait_for("document.querySelectorAll('.note').length == 1")
        assert not page.value("document.getElementById('undo-new')")  # the next message ends the offer
        page.reload()
        page.wait_for("document.querySelectorAll('.note').length == 1")
        assert said(page)[0] == "import os"
        assert page.value("document.documentElement.scrollWidth") <= 390
        assert page.console == [] and all(url.startswith((answering.url, "data:")) for url in page.requests)


@not_built
@browser
def test_a_new_conversation_says_nothing_of_the_stopped_answer(start, small_moe: Path):
    server = start(pyorch_serve(small_moe, "--budget", "40%", "--threads", "1", "--", "--context-shift",
                                "--ignore-eos"))
    arrives = "document.querySelector('.assistant')?.textContent.length > 20"
    with chromium.Page() as page:
        open_small(server, page)
        page.value("document.getElementById('text').focus()")
        page.type("def add(a, b):")
        page.press("Enter")
        page.wait_for(arrives)
        page.value("document.getElementById('new').click()")
        wait_until(lambda: not any(slot["is_processing"] for slot in server.get("/slots")))
        assert page.value("document.getElementById('messages').textContent") == ""
        assert page.value("document.getElementById('send').textContent") == "Send"
        page.value("document.getElementById('undo-new').click()")  # with the part that had arrived
        assert page.value(arrives) and page.value("document.querySelector('.note').textContent") == "stopped"

        page.value("document.getElementById('text').focus()")
        page.type("again")
        page.press("Enter")
        page.wait_for("document.querySelectorAll('.assistant')[1]?.textContent.length > 20")
        assert page.value("document.getElementById('messages').ariaBusy") == "true"
        page.reload()  # keeps the part that has arrived
        page.wait_for("document.querySelectorAll('.note').length == 2")
        assert len(said(page)) == 4
        page.value("document.getElementById('text').focus()")
        page.type("more")
        page.press("Enter")
        page.wait_for("document.querySelectorAll('.assistant')[2]?.textContent.length > 20")
        page.press("Escape")
        page.wait_for("document.querySelectorAll('.note').length == 3")
        assert page.value("document.getElementById('messages').ariaBusy") is None


@not_built
@browser
@pytest.mark.parametrize("dark", [False, True])
def test_the_small_page_can_be_read_and_its_controls_have_names(answering: ServerProcess, dark: bool):
    with chromium.Page(dark=dark) as page:
        open_small(answering, page)
        assert page.pale() == []
        page.value("document.getElementById('text').focus()")
        page.type("def add(a, b):")
        page.press("Enter")
        page.wait_for("document.querySelectorAll('.note').length == 1")
        page.value("document.getElementById('new').click()")
        controls = page.controls()
        assert {("textbox", "message"), ("button", "Send"), ("button", "New conversation"), ("button", "Undo"),
                ("link", "live view"), ("log", "conversation")} <= set(controls)
        assert all(name for _, name in controls), controls
        page.value("document.getElementById('undo-new').click()")
        assert page.pale() == []
        reached = []
        page.value("document.getElementById('new').focus()")
        for _ in range(4):
            reached.append(page.value("document.activeElement.id"))
            page.press("Tab")
            assert page.value("getComputedStyle(document.activeElement).outlineStyle") != "none"
        assert [*reached, page.value("document.activeElement.id")] == ["new", "live", "messages", "text", "send"]
        links = page.value("Promise.all([...document.querySelectorAll('a[href]')].map((a) => fetch(a.href)"
                           ".then((answer) => [a.textContent, answer.status])))")
        assert links == [["live view", 200], ["How to serve a model", 200]]
