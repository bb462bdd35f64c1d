"""What torch makes of an estimator's weights and of quasi-hidden states. A program of its own, because it needs torch.

    python estimator_process.py IN.npz OUT.npz

IN: the arrays of pyorch_estimator, layer: int, states: float32[n, n_embd]; residuals: float32[n, n_embd], weights:
float32[n, k], experts: int64[n, k], defaults: float32[n_expert, n_embd], norm: float32[n_embd], eps: float,
gate: float32[n_expert, n_embd]. OUT: corrections: float32[n, n_expert] for the states; logits: float32[n, n_expert],
the router's for the quasi-hidden states of the residuals with their corrections.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from torch import nn


def linear(weight: torch.Tensor, bias: torch.Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.weight, layer.bias = nn.Parameter(weight), nn.Parameter(bias)
    return layer


def main() -> None:
    source, target = sys.argv[1:]
    given = {name: torch.from_numpy(array) for name, array in np.load(source).items()}
    layer = int(given["layer"])
    into, up, down = (linear(given[f"{name}_weight"], given[f"{name}_bias"]) for name in ("in", "up", "down"))
    head = linear(given["head_weight"][layer], given["head_bias"][layer])
    norm = nn.LayerNorm(len(given["norm_bias"]))
    norm.weight, norm.bias = nn.Parameter(given["norm_weight"]), nn.Parameter(given["norm_bias"])
    rms = nn.RMSNorm(len(given["norm"]), eps=float(given["eps"]))
    rms.weight = nn.Parameter(given["norm"])

    def correct(states: torch.Tensor) -> torch.Tensor:
        latent = into(states) + given["position"][layer]
        return head(norm(latent + down(nn.functional.silu(up(latent)))))

    with torch.inference_mode():
        outputs = (given["weights"][:, :, None] * given["defaults"][given["experts"]]).sum(1)
        hidden = rms(given["residuals"] + outputs)
        np.savez(target, corrections=correct(given["states"]).numpy(),
                 logits=(hidden @ given["gate"].T + correct(hidden)).numpy())


if __name__ == "__main__":
    main()
