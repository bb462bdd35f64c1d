"""Aborts a context inside a layer, at the smallest budget, and then computes with another (test_lifecycle.py).

    python aborted_context_process.py MODEL freed|kept TOKEN...

Prints the digest of the logits that the other context gave. A layer's experts that nobody gives back stop it for ever,
and what is asleep in a library cannot be stopped by Python: hence a process of its own.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys

import llama_cpp.llama_cpp as llama

import pyorch
from pyorch.llama.context import Context


def aborted_context(model: pyorch.Model, prompt: list[int]) -> int:
    """A llama_context * whose decode ended between the router of a layer and its experts."""
    routed: list[int] = []

    @llama.ggml_abort_callback
    def abort(_user: ctypes.c_void_p) -> bool:
        return bool(routed)

    params = llama.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 128
    context = llama.llama_init_from_model(model.llama.model, params)
    llama.llama_set_abort_callback(context, abort, None)
    model.engine.set_observer(lambda routing: routed.append(routing.il))
    tokens = (llama.llama_token * len(prompt))(*prompt)
    status = llama.llama_decode(context, llama.llama_batch_get_one(tokens, len(prompt)))
    model.engine.set_observer(None)
    assert status == 2 and len(routed) == 1, (status, routed)
    return context


def main() -> None:
    path, end, *tokens = sys.argv[1:]
    prompt = [int(token) for token in tokens]
    with pyorch.ModelMap(path) as model_map:
        floor = model_map.info.floor_bytes
    with pyorch.load(path, budget=floor, prefetch="none", n_ctx=128, n_threads=1) as model:
        context = aborted_context(model, prompt)
        if end == "freed":
            llama.llama_free(context)
        in_use = sum(model.engine.residency(il).in_use.sum() for il in model.layers)
        print("in use:", in_use, flush=True)
        with Context(model.llama.model, n_ctx=128, n_threads=1) as other:
            print(hashlib.sha256(other.decode(prompt).tobytes()).hexdigest(), flush=True)
        if end == "kept":
            llama.llama_free(context)


if __name__ == "__main__":
    main()
