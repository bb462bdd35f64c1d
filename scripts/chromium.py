"""Controls a headless Chromium over the pipe of its DevTools protocol, for tests and pictures of pages."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

PATIENCE_SECONDS = 300.0


def find() -> str | None:
    """Returns the system's Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One page of its own browser, which ends with it.

    console: The page's errors, warnings and uncaught exceptions.
    requests: The addresses that it asked.
    """

    def __init__(self, width: int = 1180, height: int = 900, dark: bool = False, touch: bool = False) -> None:
        self.console: list[str] = []
        self.requests: list[str] = []
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        to_browser, self._to = os.pipe()
        self._from, from_browser = os.pipe()
        # The browser reads commands from descriptor 3, and writes to 4.
        arguments = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
                     "--no-first-run", "--remote-debugging-pipe", f"--user-data-dir={self._profile.name}")
        with open(Path(self._profile.name) / "log", "wb") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", f'exec "$@" 3<&{to_browser} 4>&{from_browser}', "bash", find() or NAMES[0], *arguments],
                pass_fds=(to_browser, from_browser), stdout=log, stderr=log)
        os.close(to_browser)
        os.close(from_browser)
        self._received = b""
        self._n_sent = 0
        self._session: str | None = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        if touch:
            self.send("Emulation.setTouchEmulationEnabled", enabled=True)
        self.look(width, height, dark)

    def __enter__(self) -> Page:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        self._profile.cleanup()

    def look(self, width: int, height: int, dark: bool = False) -> None:
        """Sets the size in CSS pixels, and the preferred colours."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """Evaluates JavaScript, and awaits a promise."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def reload(self) -> None:
        """Loads the page again, and waits for the new one."""
        self.value("document.isOld = true")
        self.send("Page.reload")
        with contextlib.suppress(RuntimeError):  # the old page ended meanwhile
            self.wait_for("!document.isOld")
        self.wait_for("!document.isOld && document.readyState == 'complete'")

    def wait_for(self, expression: str) -> None:
        """Waits until an expression, or its promise, is true."""
        due = time.monotonic() + PATIENCE_SECONDS
        while not self.value(f"Promise.resolve({expression}).then(Boolean)"):
            if time.monotonic() > due:
                raise TimeoutError(f"{expression} does not become true; the page says {self.console}")
            time.sleep(0.05)

    def press(self, key: str) -> None:
        """Presses a key by its name, such as ArrowRight."""
        text = {"text": "\r"} if key == "Enter" else {}  # without it, Enter presses no button
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=_KEYS.get(key, 0),
                      **(text if kind == "keyDown" else {}))

    def click(self, selector: str) -> None:
        """Clicks the middle of an element with the mouse, once it does not move."""
        middle = (f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])"
                  f"(document.querySelector({json.dumps(selector)}).getBoundingClientRect())")
        at = None
        while at != (at := self.value(middle)):
            time.sleep(0.2)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=at[0], y=at[1], clickCount=1,
                      button="none" if kind == "mouseMoved" else "left")

    def tap(self, x: float, y: float) -> None:
        """Taps a point of the window with a finger. REQUIRES: touch."""
        self.send("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.send("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def controls(self) -> list[tuple[str, str]]:
        """Returns role and name of each control that the keyboard reaches, as a screen reader says them."""
        nodes = self.send("Accessibility.getFullAXTree")["nodes"]
        return [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes
                if not node.get("ignored") and any(each["name"] == "focusable" and each["value"]["value"]
                                                   for each in node.get("properties", ()))
                and node["role"]["value"] != "RootWebArea"]

    def pale(self) -> list[str]:
        """Returns texts whose contrast to their background is below 4.5 (WCAG 2, level AA)."""
        return self.value(_PALE)

    def type(self, text: str) -> None:
        """Types a text into the focused element."""
        self.send("Input.insertText", text=text)

    def picture(self, path: Path) -> None:
        """Writes a PNG of the whole page."""
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Sends a command of the protocol, and returns its result."""
        self._n_sent += 1
        message = {"id": self._n_sent, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._n_sent:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer.get("method"), answer.get("params", {}))

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            part = os.read(self._from, 1 << 20)
            if not part:
                raise RuntimeError("the browser ended: " + (Path(self._profile.name) / "log").read_text()[-2000:])
            self._received += part
        message, self._received = self._received.split(b"\0", 1)
        return json.loads(message)

    def _note(self, event: str | None, what: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.console.append(json.dumps(what["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and what["type"] in ("error", "warning", "assert"):
            self.console.append(json.dumps(what["args"]))
        elif event == "Network.requestWillBeSent":
            self.requests.append(what["request"]["url"])
        elif event == "Log.entryAdded" and what["entry"]["level"] in ("error", "warning"):
            self.console.append(what["entry"]["text"] + " " + what["entry"].get("url", ""))


_KEYS = {
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
    "Tab": 9,
    "Enter": 13,
    "Escape": 27,
    "Home": 36,
    "End": 35,
}

# Each element with text of its own: its colour on the nearest background that is no glass.
_PALE = """(() => {
  const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (colour) => parts(colour).slice(0, 3).map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (element) => {
    for (; element; element = element.parentElement) {
      const colour = getComputedStyle(element).backgroundColor;
      if ((parts(colour)[3] ?? 1) > 0) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const pale = [];
  const check = (element, colour, text) => {
    const [a, b] = [light(colour), light(ground(element))].sort((a, b) => b - a);
    const contrast = (a + 0.05) / (b + 0.05);
    if (contrast < 4.5) pale.push(`${text.trim().slice(0, 40)}: ${contrast.toFixed(2)}`);
  };
  for (const element of document.body.querySelectorAll("*")) {
    if (!element.checkVisibility() || ["SCRIPT", "STYLE", "NOSCRIPT"].includes(element.tagName)) continue;
    const text = [...element.childNodes].filter((node) => node.nodeType === 3).map((node) => node.data).join("");
    if (text.trim() || element.value) check(element, getComputedStyle(element).color, text || String(element.value));
    if (element.placeholder) check(element, getComputedStyle(element, "::placeholder").color, element.placeholder);
  }
  return pale;
})()"""
