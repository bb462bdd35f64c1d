"""llama.cpp without pyorch: its library alone, no hook set. Answers tests/llama/test_architectures.py.

For each path on a line of standard input it writes the digests of the batch shapes as a line of JSON. An argument
"plain" behind the directory of the library: without repacked weights.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["LLAMA_CPP_LIB_PATH"] = sys.argv[1]

import batches
import llama_cpp.llama_cpp as llama
import numpy as np


@llama.llama_log_callback
def _quiet(_level, _text, _user):
    pass


def digests(path: str) -> dict[str, str]:
    params = llama.llama_model_default_params()
    params.use_extra_bufts = "plain" not in sys.argv[2:]
    model = llama.llama_model_load_from_file(os.fsencode(path), params)
    settings = llama.llama_context_default_params()
    for name, value in batches.CONTEXT.items():
        setattr(settings, name, value)
    settings.n_threads = settings.n_threads_batch = 2
    context = llama.llama_init_from_model(model, settings)
    n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    batch = llama.llama_batch_init(settings.n_batch, 0, 1)
    n_past = [0, 0]

    def decode(tokens: list[int], sequences: list[int]) -> np.ndarray:
        batch.n_tokens = len(tokens)
        for i, (token, sequence) in enumerate(zip(tokens, sequences)):
            batch.token[i], batch.pos[i], batch.logits[i] = token, n_past[sequence], True
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            n_past[sequence] += 1
        assert llama.llama_decode(context, batch) == 0
        return np.ctypeslib.as_array(llama.llama_get_logits(context), shape=(len(tokens), n_vocab)).copy()

    def clear() -> None:
        n_past[:] = [0, 0]
        llama.llama_memory_clear(llama.llama_get_memory(context), True)

    try:
        return batches.digests(decode, clear)
    finally:
        llama.llama_batch_free(batch)
        llama.llama_free(context)
        llama.llama_model_free(model)


def main() -> None:
    llama.llama_log_set(_quiet, None)
    for line in sys.stdin:
        path = line.strip()
        assert Path(path).is_file(), path
        print(json.dumps(digests(path)), flush=True)


if __name__ == "__main__":
    main()
