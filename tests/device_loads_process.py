"""Loads a model on a device so many times, and says what this process and that of the device hold after each time.

    device_loads_process.py MODEL rpc:HOST:PORT PID LOADS

One line of JSON: a list of [bytes of this process, bytes of process PID]: private memory that can be written, in use or
not, as Linux counts it.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from pyorch.llama.model import load


def data_bytes(pid: str) -> int:
    return int(re.search(r"^VmData:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)[1]) << 10


def main() -> None:
    path, device, pid, n_loads = sys.argv[1:]
    held = []
    for _ in range(int(n_loads)):
        with load(path, budget="60%", device=device, vram_budget="50%", n_ctx=256, n_batch=64, n_threads=1) as model:
            assert "".join(model.generate(b"import os\n".decode() * 8, max_tokens=2, temperature=0)) is not None
        held.append([data_bytes("self"), data_bytes(pid)])
    print(json.dumps(held))


if __name__ == "__main__":
    main()
