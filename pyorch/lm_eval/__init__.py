"""Models under a budget for lm-evaluation-harness: `import pyorch.lm_eval` makes it know the model "pyorch".

    python -m pyorch.lm_eval --model pyorch --model_args model=olmoe.gguf,budget=40% --tasks arc_easy

is lm_eval with that import before it. Nothing here loads llama.cpp: the model runs in a process of its own, because
the harness may import torch (see pyorch.eval.answering).
"""

from __future__ import annotations

import sys

from pyorch.errors import PyorchError


def register() -> None:
    """Makes the harness know the model "pyorch". PyorchError where it is not installed, or not wholly."""
    try:
        from lm_eval.api.registry import model_registry
    except ModuleNotFoundError as error:
        raise incomplete(error) from None
    model_registry.register("pyorch", target="pyorch.lm_eval.model:PyorchLM")


def incomplete(error: ModuleNotFoundError) -> PyorchError:
    """What to say of a module of the harness that is missing."""
    return PyorchError(f"lm-evaluation-harness is not complete here ({error}): pip install 'pyorch[lm-eval]'")


def _is_sought() -> bool:
    """Python looks for `python -m pyorch.lm_eval`: __main__ registers the model then, and says what is wrong."""
    return sys.argv[:1] == ["-m"] and __name__ in sys.orig_argv


if not _is_sought():
    register()
