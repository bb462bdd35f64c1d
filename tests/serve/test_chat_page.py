"""llama-server's chat page, where the build has it: in a browser, before a server that decodes."""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from processes import HANG_SECONDS
from servers import pyorch_serve

from pyorch import _libs
from pyorch.serve.library import chat_page
from pyorch.serve.llama_server import Flags

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import chromium

built = pytest.mark.skipif(not chat_page(), reason="needs the chat page: make chat-page")


@built
@pytest.mark.skipif(chromium.find() is None, reason="needs a browser: apt-get install chromium")
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


@built
def test_its_files_need_no_key_wherever_they_are(start, small_moe: Path):
    server = start(pyorch_serve(small_moe, "--budget", "40%", "--threads", "1", "--",
                                "--api-key", "secret", "--api-prefix", "/here"))
    for name in ("", *chat_page()):
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


def test_without_it_or_when_it_is_not_wanted_the_root_is_ours(monkeypatch: pytest.MonkeyPatch):
    def has(*flags: str) -> bool:
        server = Flags(flags)
        server.add_defaults()
        return server.has_chat_page

    for files in ([], ["index.html"]):
        monkeypatch.setattr("pyorch.serve.llama_server.chat_page", lambda files=files: files)
        assert has() == bool(files) == has("--ui")
        assert not has("--no-ui") and not has("--no-webui")
        monkeypatch.setenv("LLAMA_ARG_UI", "off")
        assert not has() and has("--ui") == bool(files)
        monkeypatch.delenv("LLAMA_ARG_UI")


def test_server_is_told_to_leave_out_a_page_that_it_lacks():
    server = Flags(())
    server.add_defaults()
    assert ("--no-ui" in server.arguments) == (not chat_page())


def test_without_it_the_root_leads_to_the_live_view_with_a_key_and_a_prefix_too(start, small_moe: Path):
    server = start(pyorch_serve(small_moe, "--budget", "40%", "--threads", "1", "--", "--no-ui",
                                "--api-key", "secret", "--api-prefix", "/here"))
    with urllib.request.urlopen(f"{server.url}/here/", timeout=HANG_SECONDS) as answer:
        assert answer.url == f"{server.url}/here/pyorch" and "<title>pyorch</title>" in answer.read().decode()
