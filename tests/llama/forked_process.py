"""Forks with a model that was used, and tells what the children could do with it. For tests/llama/test_fork.py.

    python forked_process.py MODEL

A child that waits for threads which it lacks cannot be stopped by Python: hence a process of its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pyorch
from pyorch.errors import PyorchError
from pyorch.llama.context import Context


def text(model: pyorch.Model) -> str:
    return "".join(model.generate("import os", max_tokens=4, temperature=0))


def attempt(what: str, call: Callable[[], object]) -> None:
    try:
        call()
    except PyorchError as e:
        print(f"{what}: {e}", flush=True)


def main() -> None:
    model = pyorch.load(sys.argv[1], budget="50%", n_ctx=64, n_threads=2)
    before = text(model)
    used = Context(model.llama.model, n_ctx=64, n_threads=2)
    used.decode([1, 5, 9])
    if os.fork() == 0:
        attempt("generate", lambda: text(model))
        attempt("stats", model.stats)
        attempt("context", lambda: Context(model.llama.model, n_ctx=64))
        attempt("decode", lambda: used.decode([2]))
        attempt("decode in Llama's context", lambda: model.llama.eval([2]))
        attempt("load anew", lambda: pyorch.load(sys.argv[1], budget="50%", n_ctx=64, n_threads=2))
        used.close()
        model.close()
        attempt("closed", lambda: text(model))
        print("closed by a child", flush=True)
        return
    print("status", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
    if os.fork() == 0:
        sys.exit("left open by a child")
    print("status", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
    assert text(model) == before, "the parent's model is as it was"
    assert used.decode([2]).shape[0] == 1
    used.close()
    print("same", flush=True)
    model.close()


if __name__ == "__main__":
    main()
