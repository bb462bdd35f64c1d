"""A llama.cpp context of a loaded model with functions that Llama lacks.

Several sequences in one batch, logits of selected positions, and contexts in several threads.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import llama_cpp
import llama_cpp.llama_cpp as llama

from pyorch.errors import PyorchError
from pyorch.library.numerics import np
from pyorch.llama.cores import physical_cores
from pyorch.llama.managed import decoding
from pyorch.runtime.engine import FORKED


class Context:
    """Decodes batches of tokens. One thread at a time; several contexts of a model may run at once.

    Args:
        model: A llama_model *, such as `model.llama.model`. It must outlive the context.
        n_ctx: Tokens of all sequences together.
        n_batch: Tokens of one decode() at most.
        n_ubatch: Tokens computed at once at most.
        n_seq_max: Sequences at most.
        n_threads: Default: the physical cores.
        n_outputs: Rows of logits of one decode() at most; their memory is reserved. 0: n_batch.
        shared: Sequences may share tokens, which are computed and stored once. Recurrent models cannot share. Without
            sharing, each sequence has n_ctx / n_seq_max tokens.
        exact: Attention in F32 throughout. Otherwise keys and values are stored in F16, and the flash kernels sum in
            F16, with results that depend on the tokens computed together.
    """

    def __init__(
        self,
        model: int,
        n_ctx: int = 512,
        n_batch: int = 512,
        n_ubatch: int = 512,
        n_seq_max: int = 1,
        n_threads: int | None = None,
        n_outputs: int = 0,
        shared: bool = False,
        exact: bool = False,
    ) -> None:
        if n_ctx < n_seq_max:  # llama.cpp would end the process
            raise PyorchError(f"a context of {n_ctx} tokens cannot hold {n_seq_max} sequences")
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, n_batch, min(n_ubatch, n_batch)
        params.n_seq_max = n_seq_max
        params.n_threads = params.n_threads_batch = n_threads or physical_cores()
        params.n_outputs_max = max(n_outputs, n_seq_max) if n_outputs else 0  # llama.cpp ends the process below that
        params.kv_unified = shared
        if exact:
            params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
            params.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.n_batch = n_batch
        self._model = model
        self._pid = os.getpid()
        self._n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        self.handle = llama.llama_init_from_model(model, params)
        if not self.handle:
            raise PyorchError(f"llama.cpp refuses a context of {n_ctx} tokens")
        self._batch = llama.llama_batch_init(n_batch, 0, n_seq_max)
        self._n_past = [0] * n_seq_max

    def close(self) -> None:
        if self.handle and self._pid == os.getpid():
            llama.llama_batch_free(self._batch)
            llama.llama_free(self.handle)
        self.handle = None

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def decode(
        self,
        tokens: Sequence[int],
        sequences: Sequence[int | Sequence[int]] | None = None,
        outputs: Sequence[int] | None = None,
    ) -> np.ndarray:
        """Appends tokens to their sequences (default: all to sequence 0).

        Args:
            tokens: The token ids.
            sequences: The sequence of each token. In a shared context, it may be several of equal length.
            outputs: Positions in `tokens`, ascending, whose logits are returned. Default: all.

        Returns:
            The logits after each token, or each of `outputs`, float32[n, n_vocab].

        Raises:
            ExpertReadError: An expert could not be read. The sequences are unchanged.
            DeviceError: A computing device is lost.
            PyorchError: The process was forked after the context was made.
        """
        self._check_process()
        sequences = sequences if sequences is not None else [0] * len(tokens)
        n_past = list(self._n_past)
        wanted = set(range(len(tokens)) if outputs is None else outputs)
        self._batch.n_tokens = len(tokens)
        for i, (token, of) in enumerate(zip(tokens, sequences, strict=True)):
            of = (of,) if isinstance(of, int) else of
            self._batch.token[i] = token
            self._batch.pos[i] = n_past[of[0]]
            self._batch.n_seq_id[i] = len(of)
            for j, sequence in enumerate(of):
                self._batch.seq_id[i][j] = sequence
                n_past[sequence] += 1
            self._batch.logits[i] = i in wanted
        with decoding(self._model, self.handle):
            status = llama.llama_decode(self.handle, self._batch)
            if status != 0:
                self._forget()
                raise PyorchError(f"llama_decode returned {status} for a batch of {len(tokens)} tokens")
        self._n_past = n_past
        if not wanted:
            return np.empty((0, self._n_vocab), np.float32)
        logits = llama.llama_get_logits(self.handle)
        return np.ctypeslib.as_array(logits, shape=(len(wanted), self._n_vocab)).copy()

    def copy(self, source: int, target: int) -> None:
        """Copies the source sequence to the target, which must be empty."""
        llama.llama_memory_seq_cp(llama.llama_get_memory(self.handle), source, target, -1, -1)
        self._n_past[target] = self._n_past[source]

    def remove(self, sequence: int) -> None:
        """Empties one sequence."""
        llama.llama_memory_seq_rm(llama.llama_get_memory(self.handle), sequence, -1, -1)
        self._n_past[sequence] = 0

    def clear(self) -> None:
        """Empties all sequences."""
        self._n_past = [0] * len(self._n_past)
        llama.llama_memory_clear(llama.llama_get_memory(self.handle), True)

    def _check_process(self) -> None:
        """Raises PyorchError in a forked process, because threads that compute and read are not copied."""
        if self._pid != os.getpid():
            raise PyorchError(FORKED)

    def _forget(self) -> None:
        """Removes the results of ubatches before the failed one from the KV cache."""
        memory = llama.llama_get_memory(self.handle)
        for sequence, n_past in enumerate(self._n_past):
            llama.llama_memory_seq_rm(memory, sequence, n_past, -1)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Returns log-probabilities of one row of logits, float64[n_vocab]."""
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())
