"""Takes the picture of the live view, while a server answers requests.

    python scripts/live_view_picture.py MODEL.gguf docs/measurements/serving/live.png [options of pyorch serve]

Needs a Chromium (apt-get install chromium).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import chromium

SECONDS = 20.0  # of decoding before the picture is taken

PROMPTS = ("def read_file(path):\n", "class Table:\n    def __init__(self, rows):\n", "import os\n\ndef main():\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL.gguf")
    parser.add_argument("picture", metavar="PICTURE.png")
    args, options = parser.parse_known_args()
    if chromium.find() is None:
        parser.error("there is no Chromium: apt-get install chromium")
    command = [sys.executable, "-m", "pyorch", "serve", args.model, "--port", "0",
               *(options or ["--budget", "40%"]), "--", "--context-shift"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        url = next(word for line in server.stderr for word in line.split() if word.startswith("http://"))
        threading.Thread(target=lambda: server.stderr.read(), daemon=True).start()
        for i, prompt in enumerate(PROMPTS):
            threading.Thread(target=_decode, args=(url, prompt, i), daemon=True).start()
        with chromium.Page(width=1180, height=800) as page:
            page.open(f"{url}/pyorch")
            time.sleep(SECONDS)
            page.wait_for("document.querySelector('#slots tr.answering') !== null")
            page.picture(Path(args.picture))
            if page.console:
                print("\n".join(page.console), file=sys.stderr)
                return 1
    finally:
        server.kill()
        server.wait()
    return 0


def _decode(url: str, prompt: str, seed: int) -> None:
    body = {"prompt": prompt, "n_predict": -1, "ignore_eos": True, "stream": True, "temperature": 0.8, "seed": seed}
    request = urllib.request.Request(
        f"{url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request) as answer:
            for _ in answer:
                pass
    except OSError:
        pass  # the server has ended


if __name__ == "__main__":
    sys.exit(main())
