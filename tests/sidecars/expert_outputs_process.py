"""What the experts of a Hugging Face checkpoint compute. A program of its own, because it needs torch.

    python expert_outputs_process.py CHECKPOINT INPUTS.npy OUTPUTS.npy

INPUTS: float32[n, n_embd]. OUTPUTS: float32[n_layers, n_expert, n, n_embd], every expert on every input.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
import transformers


def outputs(experts: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    if isinstance(experts, torch.nn.ModuleList):
        return torch.stack([expert(inputs) for expert in experts])
    n_expert = experts.num_experts  # all of them in one module: give each the whole weight in turn
    return torch.stack([
        experts(inputs[None], router_indices=torch.full((len(inputs), 1), expert),
                routing_weights=torch.ones(len(inputs), n_expert))[0]
        for expert in range(n_expert)
    ])


def main() -> None:
    checkpoint, source, target = sys.argv[1:]
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    inputs = torch.from_numpy(np.load(source))
    with torch.inference_mode():
        layers = [outputs(module.experts, inputs) for module in model.modules() if hasattr(module, "experts")]
    np.save(target, torch.stack(layers).numpy())


if __name__ == "__main__":
    main()
