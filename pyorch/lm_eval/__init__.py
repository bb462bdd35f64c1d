"""Models under a budget for lm-evaluation-harness: `import pyorch.lm_eval` registers the model "pyorch".

    python -m pyorch.lm_eval --model pyorch --model_args model=olmoe.gguf,budget=40% --tasks arc_easy

is lm_eval after that import. This package does not load llama.cpp: the model runs in its own process, because the
harness may import torch (see pyorch.eval.answering).
"""

from __future__ import annotations

import sys

from pyorch.errors import PyorchError


def register() -> None:
    """Registers the model "pyorch" in the harness.

    Raises:
        PyorchError: The harness is not installed, or incomplete.
    """
    try:
        from lm_eval.api.registry import model_registry
    except ModuleNotFoundError as error:
        raise incomplete(error) from None
    model_registry.register("pyorch", target="pyorch.lm_eval.model:PyorchLM")


def incomplete(error: ModuleNotFoundError) -> PyorchError:
    """Returns the error for a missing module of the harness."""
    return PyorchError(f"lm-evaluation-harness is not complete here ({error}): pip install 'pyorch[lm-eval]'")


def _is_sought() -> bool:
    """Whether Python is starting `python -m pyorch.lm_eval`: then __main__ registers the model and reports errors."""
    return sys.argv[:1] == ["-m"] and __name__ in sys.orig_argv


if not _is_sought():
    register()
