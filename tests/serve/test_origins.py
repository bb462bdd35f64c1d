"""Who may use a server: pages by their origin, clients by the API key."""

from __future__ import annotations

import http.client
import json
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from processes import HANG_SECONDS
from servers import ServerProcess, pyorch_serve, serve_models

from pyorch.errors import PyorchError
from pyorch.serve import front, ollama
from pyorch.serve.origins import Origins

ROOT = Path(__file__).parents[2]
KEY = "the key of this test"
EVIL = "http://evil.example"
NAMED = "https://chat.example.org"


def decide(origin: str | None, host: str = "127.0.0.1:8080", named: tuple[str, ...] = (),
           hosts: tuple[str, ...] = ("127.0.0.1",)) -> str:
    headers = {"host": host} | ({} if origin is None else {"origin": origin})
    return Origins(named, hosts).refusal(headers)


@pytest.mark.parametrize("origin", [
    None, "http://127.0.0.1:8080", "https://127.0.0.1:8080", "http://localhost:3000", "http://localhost",
    "https://localhost:8443", "http://127.0.0.1:5173", "http://[::1]:3000", "http://app.localhost:3000",
    "HTTP://LOCALHOST:3000",
])
def test_pages_of_the_server_and_of_this_machine_may_use_it(origin: str | None):
    assert decide(origin) == ""


@pytest.mark.parametrize("origin", [
    EVIL, "https://evil.example:8080", "null", "http://localhost.evil.example", "http://127.0.0.1.evil.example",
    "http://localhost@evil.example", "http://evil.example#localhost", "file://", "tauri://localhost",
    "chrome-extension://abcdefgh", "http://10.0.0.1:8080", "http://[::1", "http://localhost:port", "localhost", "*",
    "http://127.0.0.1:8080.evil.example", "http://evil.example, http://localhost",
])
def test_other_pages_may_not(origin: str):
    assert f'of pages of "{origin}"' in decide(origin)


@pytest.mark.parametrize(("host", "is_known"), [
    ("127.0.0.1:8080", True), ("localhost:8080", True), ("[::1]:8080", True), ("", True), ("10.0.0.5:9000", True),
    ("a.localhost", True), ("evil.example:8080", False), ("evil.example", False), ("localhost.evil.example", False),
    ("[::1", False), ("evil.example@localhost", True),  # no browser sends such a Host
    ("chat.example.org", False),
])
def test_a_name_that_leads_here_by_rebinding_is_refused(host: str, is_known: bool):
    """Also without an origin, as in a page's GET to its own site."""
    assert (decide(None, host) == "") == is_known
    if not is_known:
        assert decide(f"http://{host}", host) and decide("http://localhost:3000", host)


def test_a_server_for_the_network_has_names_that_it_cannot_know():
    of_all = {"hosts": ("0.0.0.0",)}
    assert decide(None, "box.lan:8080", **of_all) == "" == decide("http://box.lan:8080", "box.lan:8080", **of_all)
    assert decide(EVIL, "box.lan:8080", **of_all)


def test_named_origins_are_allowed_and_their_hosts_are_names_of_the_server():
    named = {"named": (NAMED, "app://obsidian.md")}
    assert decide(NAMED, **named) == decide("app://obsidian.md", **named) == decide(f"{NAMED}:443", **named) == ""
    assert decide(NAMED, "chat.example.org", **named) == decide(None, "chat.example.org", **named) == ""
    assert decide(f"{NAMED}:8443", **named) and decide("http://chat.example.org", **named)
    assert decide("null", named=("null",)) == "" == decide(EVIL, "evil.example", named=("*",))
    assert decide(None, "myhost:8080", hosts=("127.0.0.1", "MyHost")) == ""
    # A proxy that speaks TLS, in front of a socket: any name, but pages of the same one.
    assert decide(NAMED, "chat.example.org", hosts=("/run/pyorch.sock",)) == ""
    assert decide(EVIL, "chat.example.org", hosts=("/run/pyorch.sock",))


@pytest.mark.parametrize("name", ["example.org", "https://", "https://example.org/path", "https://a@b", "http://[",
                                  "x:y", "https://a:port", "https://*.example.org:0"])
def test_a_name_that_is_no_origin_is_refused(name: str):
    with pytest.raises(PyorchError, match=r"give https://host\[:port\]"):
        Origins((name,), ("127.0.0.1",))
    assert Origins((f"{NAMED}/",), ("127.0.0.1",)).refusal({"host": "", "origin": NAMED}) == ""


def ask(server: ServerProcess, method: str, path: str, body: bytes = b"", **headers: str
        ) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=HANG_SECONDS)
    try:
        connection.putrequest(method, path, skip_host="Host" in headers)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        if body:
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body or None)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


@pytest.fixture(scope="module", params=["one model", "several models"])
def server(request, small_moe: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory):
    options = ("--origins", f"{NAMED},https://other.example", "--origins", "app://notes")
    command = (pyorch_serve(small_moe, "--budget", "60%", "--threads", "1", *options) if request.param == "one model"
               else serve_models(folder, *options))
    server = ServerProcess(command, tmp_path_factory.mktemp("server") / "log")
    server.post("/v1/completions", {"model": "sparse", "prompt": "x", "max_tokens": 1})  # loads it
    yield server
    server.process.kill()
    server.process.communicate()


CHAT = json.dumps({"model": "sparse", "prompt": "x", "max_tokens": 1}).encode()
STREAM = json.dumps({"model": "sparse", "prompt": "x", "max_tokens": 2, "stream": True}).encode()


@pytest.mark.parametrize(("method", "path", "body"), [
    ("POST", "/v1/completions", CHAT), ("POST", "/v1/completions", STREAM), ("POST", "/v1/chat/completions", b"{}"),
    ("OPTIONS", "/v1/chat/completions", b""), ("GET", "/slots", b""), ("GET", "/metrics", b""), ("GET", "/health", b""),
    ("GET", "/v1/models", b""), ("GET", "/", b""), ("HEAD", "/", b""), ("DELETE", "/v1/stream", b""),
    ("GET", "/absent", b""), ("PUT", "/v1/completions", CHAT), ("POST", "/residency", b'{"policy": "lru"}'),
])
def test_a_foreign_page_gets_403_and_nothing_that_it_could_read(
    server: ServerProcess, method: str, path: str, body: bytes
):
    for headers in ({"Origin": EVIL}, {"Origin": "null"}, {"Host": "evil.example:8080", "Origin": f"{EVIL}:8080"},
                    {"Host": "evil.example"}):
        status, answered, said = ask(server, method, path, body, Content_Type="text/plain", **headers)
        assert status == 403 and not [name for name in answered if name.lower().startswith("access-control")]
        assert answered["Connection"] == "close"  # a body that was not read is no next request
        if method != "HEAD":
            error = json.loads(said)["error"]
            assert error["code"] == 403 and "--origins" in error["message"], error


def test_nothing_is_computed_for_a_foreign_page(server: ServerProcess):
    def n_tokens() -> float:
        text = ask(server, "GET", "/metrics")[2].decode()
        return float(re.search(r"^llamacpp:tokens_predicted_total\S* (\S+)", text, re.MULTILINE)[1])

    before = n_tokens()
    assert ask(server, "POST", "/v1/completions", CHAT, Origin=EVIL, Content_Type="text/plain")[0] == 403
    assert n_tokens() == before
    assert ask(server, "POST", "/v1/completions", CHAT, Content_Type="text/plain")[0] == 200
    assert n_tokens() > before


def test_a_body_that_was_refused_is_no_request(server: ServerProcess):
    smuggled = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}"
    head = (f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nOrigin: {EVIL}\r\n"
            f"Content-Length: {len(smuggled)}\r\n\r\n")
    with socket.create_connection(("127.0.0.1", server.port), timeout=HANG_SECONDS) as connection:
        connection.sendall(head.encode() + smuggled)
        answers = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert answers.count(b"HTTP/1.1 ") == answers.count(b"HTTP/1.1 403 ") == 1


@pytest.mark.parametrize("head", [
    b"OPTIONS /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nContent-Length: %d\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nContent-Length: %d\r\n\r\n0\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil.example\r\nOrigin: http://localhost\r\n"
    b"Content-Length: %d\r\n\r\n",
])
def test_a_body_is_no_request_although_it_is_not_read(several: ServerProcess, head: bytes):
    smuggled = b"GET /props HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection(("127.0.0.1", several.port), timeout=HANG_SECONDS) as connection:
        connection.sendall(head % len(smuggled) + smuggled)
        answers = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert answers.count(b"HTTP/1.1 ") == 1 and b"role" not in answers


def test_without_a_key_no_body_is_read(start, folder: Path):
    server = start(serve_models(folder, "--", "--api-key", KEY))
    head = b"POST /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000000\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=HANG_SECONDS) as connection:
        connection.sendall(head)  # and nothing else
        connection.settimeout(3.0)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 401 ")


def test_junk_of_the_chat_page_is_refused(several: ServerProcess):
    assert ask(several, "HEAD", "/models/sse")[0] == 200
    status, _, said = ask(several, "POST", "/v1/completions", CHAT, X_Conversation_Id="x" * 60_000)
    assert status == 400 and b"X-Conversation-Id is longer than" in said
    parts = (b'--a\r\nContent-Disposition: form-data; name="model"\r\n'
             b"Content-Type: multipart/mixed; boundary=b\r\n\r\n--b\r\n")
    form = "multipart/form-data; boundary=a"
    assert ask(several, "POST", "/v1/audio/transcriptions", parts, Content_Type=form)[0] == 400


@pytest.mark.parametrize("origin", [NAMED, "https://other.example", "app://notes", "http://localhost:3000"])
@pytest.mark.parametrize("body", [CHAT, STREAM], ids=["whole", "stream"])
def test_an_allowed_page_may_read_the_answer(server: ServerProcess, origin: str, body: bytes):
    status, headers, _ = ask(server, "OPTIONS", "/v1/completions", Origin=origin,
                             Access_Control_Request_Method="POST", Access_Control_Request_Headers="content-type")
    assert status == 200 and headers["Access-Control-Allow-Origin"] == origin
    status, headers, said = ask(server, "POST", "/v1/completions", body, Origin=origin)
    assert status == 200 and headers["Access-Control-Allow-Origin"] == origin and b'"choices"' in said
    # Only the server's own pages change settings.
    assert ask(server, "POST", "/residency?model=sparse", b'{"policy": "lru"}', Origin=origin)[0] == 403


def test_the_servers_own_pages_may_use_it(server: ServerProcess):
    own = server.url
    assert ask(server, "POST", "/v1/completions", CHAT, Origin=own)[0] == 200
    assert ask(server, "POST", "/residency?model=sparse", b'{"policy": "learned"}', Origin=own)[0] == 200
    proxied = {"Host": "chat.example.org", "Origin": NAMED}
    assert ask(server, "POST", "/v1/completions", CHAT, **proxied)[0] == 200


def test_refused_names_are_said_once_and_not_without_end(server: ServerProcess):
    for i in range(30):
        assert ask(server, "GET", "/health", Origin=f"http://{i % 15}.example")[0] == 403
    said = re.findall(r"^pyorch: .*refuses requests of pages of (.*): its", server.log.read_text(), re.MULTILINE)
    assert 0 < len(said) == len(set(said)) <= 8


def test_the_processes_of_several_models_answer_no_foreign_page(several: ServerProcess):
    several.post("/v1/completions", {"model": "sparse", "prompt": "x", "max_tokens": 1})
    for child in psutil.Process(several.process.pid).children():
        (port,) = {each.laddr.port for each in child.net_connections() if each.status == psutil.CONN_LISTEN}
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG_SECONDS)
        for headers in ({"Origin": EVIL}, {"Origin": NAMED}, {"Host": "evil.example"}):
            connection.request("GET", "/props", headers=headers)
            answer = connection.getresponse()
            assert (answer.status, b"--origins" in answer.read()) == (403, True)
        connection.close()


def test_all_pages_may_use_a_server_that_says_so(start, small_moe: Path):
    server = start(pyorch_serve(small_moe, "--budget", "60%", "--threads", "1", "--origins", "*"))
    for headers in ({"Origin": EVIL}, {"Host": "evil.example", "Origin": EVIL}, {"Origin": "null"}):
        status, answered, _ = ask(server, "POST", "/v1/completions", CHAT, **headers)
        assert status == 200 and answered["Access-Control-Allow-Origin"] == headers["Origin"]


# Each route of the server is in one of these.
PUBLIC = {"/health", "/v1/health", "/", "/pyorch", "/pyorch/live.css", "/pyorch/live.js", "/pyorch/charts.js",
          "/pyorch/docs"}
PAGES_OF_LLAMA_SERVER = 4  # registrations of its pages: "/", "/index.html", two of assets

SERVE_AND_LIST = """
import sys
from pyorch.serve import server
from pyorch.serve.routes import Routes
add = Routes.add

def listed(self, method, path, *arguments, **options):
    print("route", method, path, file=sys.stderr, flush=True)
    return add(self, method, path, *arguments, **options)

Routes.add = listed
sys.exit(server.serve(sys.argv[1], "60%", ["--port", "0", "-t", "1", "--api-key", sys.argv[2], "--slots"], warm=False))
"""


def of_llama_server() -> Iterator[tuple[str, str]]:
    """The routes that the patched source registers for one model."""
    trees = sorted(ROOT.glob("build/py3-*/llama.cpp/tools/server/server.cpp"))
    if not trees:
        pytest.skip("needs the build tree of an editable install: make setup")
    source = trees[0].read_text(encoding="utf-8")
    of_router = source[source.index("// custom routes for router") : source.index("if (llama_server_hooks.routes)")]
    for method, path in re.findall(r'ctx_http\.(get|post|del|put|patch) *\( *"([^"]+)"', source.replace(of_router, "")):
        yield {"del": "DELETE"}.get(method, method.upper()), re.sub(":.*", "0", path)
    assert len(re.findall(r"ctx_http\.(?:get|post|del|put|patch) *\(", source)) == len(re.findall(
        r'ctx_http\.(?:get|post|del|put|patch) *\( *"', source)), "a route without a literal path"
    http_source = trees[0].with_name("server-http.cpp").read_text(encoding="utf-8")
    pages = re.findall(r'srv->Get\(params\.api_prefix \+ "/(?:index\.html)?"(?:,| \+ a\.name)', http_source)
    others = re.findall(r"srv->(?:Get|Post|Delete|Put|Patch|Options|WebSocket|set_mount_point)\(", http_source)
    # Besides pages: get(), post(), del() of the context, the user's own files (--path), and the script that removes
    # the worker of an old page.
    assert len(pages) == PAGES_OF_LLAMA_SERVER and len(others) == PAGES_OF_LLAMA_SERVER + 5
    yield "GET", "/sw.js"


def test_an_api_key_covers_every_route(start, small_moe: Path):
    server = start([sys.executable, "-c", SERVE_AND_LIST, str(small_moe), KEY])
    routes = {*of_llama_server(), *re.findall(r"^route (\S+) (\S+)$", server.log.read_text(), re.MULTILINE)}
    assert ("POST", "/residency") in routes and ("POST", "/v1/messages") in routes and len(routes) > 50
    closed = {(method, path) for method, path in routes if path not in PUBLIC}
    assert PUBLIC - {path for _, path in routes} <= {"/pyorch/docs"}  # a wheel may lack it
    for method, path in sorted(closed):
        path = path.replace("\\", "")  # of a pattern
        body = b"{}" if method == "POST" else b""
        assert ask(server, method, path, body)[0] == 401, (method, path)
        assert ask(server, method, path, body, Authorization="Bearer other")[0] == 401, (method, path)
        assert ask(server, method, path, body, Authorization=f"Bearer {KEY}")[0] != 401, (method, path)
    for path in PUBLIC - {"/pyorch/docs"}:
        assert ask(server, "GET", path)[0] == 200, path
    assert ask(server, "POST", "/v1/completions", CHAT, X_Api_Key=KEY)[0] == 200  # Anthropic's clients


def test_an_api_key_covers_every_route_of_several_models(start, folder: Path):
    server = start(serve_models(folder, "--", "--api-key", KEY))
    routes = [*((method, path.replace("*", "0")) for method, paths in front.ENDPOINTS.items() for path in paths),
              *(("POST", path) for path in ollama.PATHS), ("GET", "/api/tags"), ("GET", "/api/ps"),
              ("GET", "/api/version"), ("GET", "/v1/models"), ("GET", "/models"), ("GET", "/v1/models/sparse"),
              ("GET", "/absent"), ("PUT", "/v1/models"), ("POST", "/health"), ("POST", "/models/load"),
              ("POST", "/models/unload"), ("GET", "/models/sse"), ("DELETE", "/health")]
    for method, path in routes:
        body = b'{"model": "absent"}' if method == "POST" else b""
        assert ask(server, method, path, body)[0] == 401, (method, path)
        if path != "/models/sse":  # it does not end
            assert ask(server, method, path, body, Authorization=f"Bearer {KEY}")[0] != 401, (method, path)
