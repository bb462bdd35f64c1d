"""Servers as processes of their own, spoken to over HTTP."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from models import PROMPT
from processes import HANG_SECONDS

# A prompt of which a part is cached is computed in other batches, whose sums round otherwise.
WHOLE_PROMPT = {"cache_prompt": False}

# Of a chat, with tools.
TEMPLATE_WITH_TOOLS = """{% if tools %}<|im_start|>system
<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools><|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

_READY = re.compile(r"^pyorch: serving .* at (http://[^/\s]+)", re.MULTILINE)


class ServerProcess:
    """A server that is ready to answer, at url. stderr goes to a file, so that it never blocks."""

    def __init__(self, command: list[str], log: Path) -> None:
        import openai  # takes half a second, which no other process of the tests needs to spend

        self.log = log
        self.error, self.internal_error = openai.APIError, openai.InternalServerError
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
        wait_until(lambda: _READY.search(self.log.read_text()) or self.process.poll() is not None)
        ready = _READY.search(self.log.read_text())
        assert ready and self.process.poll() is None, self.log.read_text()
        self.url = ready[1]
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=HANG_SECONDS)

    @property
    def port(self) -> int:
        return urlsplit(self.url).port

    def complete(self, prompt: object, n: int = 16, **options: object) -> str:
        answer = self.client.completions.create(model="", prompt=prompt, max_tokens=n, temperature=0, **options)
        return answer.choices[0].text

    def get(self, path: str) -> object:
        with urllib.request.urlopen(self.url + path, timeout=HANG_SECONDS) as answer:
            return json.load(answer)

    def post(self, path: str, body: object) -> tuple[int, str]:
        """Status and answer. body: JSON, or its bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=HANG_SECONDS) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Exit status and standard output."""
        self.process.send_signal(number)
        stdout, _ = self.process.communicate(timeout=HANG_SECONDS)
        return self.process.returncode, stdout


class Stream:
    """An answer of so many tokens that is being written, -1: it has no end; its parts come one by one.

    [DONE] comes as None.
    """

    def __init__(self, server: ServerProcess, n: int, key: str = "", path: str = "/completion", model: str = ""
                 ) -> None:
        address = urlsplit(server.url)
        self._connection = http.client.HTTPConnection(address.hostname, address.port, timeout=HANG_SECONDS)
        body = {"model": model, "prompt": PROMPT, "input": PROMPT, "messages": [{"role": "user", "content": PROMPT}],
                "n_predict": n, "max_tokens": n, "stream": True, "ignore_eos": True, "temperature": 0}
        self._connection.request("POST", path, json.dumps(body),
                                 {"Content-Type": "application/json", "Authorization": f"Bearer {key}"})
        self._response = self._connection.getresponse()
        self._lines = iter(self._response.readline, b"")

    def __iter__(self) -> Iterator[dict | None]:
        for line in self._lines:
            if line.startswith(b"data: "):
                yield json.loads(line[6:]) if line != b"data: [DONE]\n" else None

    def close(self) -> None:
        self._response.close()
        self._connection.close()


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def pyorch_serve(model: Path | None, *options: str) -> list[str]:
    """At a port that is free, or that of the options; what follows "--" is for llama-server. None: several models.
    Nothing is kept."""
    port = () if "--port" in options else ("--port", "0")
    return [sys.executable, "-m", "pyorch", "serve", *([] if model is None else [str(model)]), *port, "--cold",
            *options]


def serve_models(folder: Path, *options: str) -> list[str]:
    return pyorch_serve(None, "--models", str(folder), "--threads", "1", "--budget", "60%", *options)


def faulty_serve(model: Path, fault: Path, grace: float = 3600.0) -> list[str]:
    """A server whose reads do as a file says while that is there: see serve/faulty_server_process.py."""
    return [sys.executable, str(Path(__file__).parent / "serve/faulty_server_process.py"), str(model), str(fault),
            str(grace)]
