"""Models under a budget for lm-evaluation-harness: `import pyorch.lm_eval` makes it know the model "pyorch".

    python -m pyorch.lm_eval --model pyorch --model_args model=olmoe.gguf,budget=40% --tasks arc_easy

is lm_eval with that import before it. Nothing here loads llama.cpp: the model runs in a process of its own, because
the harness may import torch (see pyorch.eval.answering).
"""

from __future__ import annotations

from pyorch.errors import PyorchError

try:
    from lm_eval.api.registry import model_registry
except ModuleNotFoundError as error:
    raise PyorchError(f"lm-evaluation-harness is not complete here ({error}): pip install 'pyorch[lm-eval]'") from None

model_registry.register("pyorch", target="pyorch.lm_eval.model:PyorchLM")
