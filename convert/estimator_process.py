"""Trains an estimator. A program of its own: children.py starts it, nothing imports it.

Torch and ggml bring two OpenMP runtimes, so torch stays out of processes that load llama.cpp: this file imports
nothing of pyorch that does. It reads a job (see pyorch.convert.estimator) as JSON from standard input and reports as
converter_process does.
"""

from __future__ import annotations

import json
import math
import signal
import sys
from pathlib import Path

from report import Report

sys.path.pop(0)  # this file's directory: its other neighbours are no top-level modules

import numpy as np

from pyorch.traces.file import Trace

BATCH = 512  # tokens, each in all layers
WARM_UP = 200  # steps
PATIENCE = 3  # epochs without improvement
LAST_RATE = 0.02  # of the learning rate, at the end of the schedule
N_THREADS = 2


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which ends this process
    report = Report(int(sys.argv[1]))
    job = json.load(sys.stdin)
    try:
        import torch
    except ImportError as error:
        report.send(error="missing", message=str(error))
        sys.exit(1)
    torch.set_num_threads(N_THREADS)
    torch.manual_seed(job["seed"])
    try:
        weights, summary = train(job, report)
        np.savez(job["output"], **weights)
        Path(job["output"]).with_suffix(".json").write_text(json.dumps(summary), encoding="utf-8")
    except Exception as error:
        report.send(error="failed", message=f"{type(error).__name__}: {error}")
        raise


def train(job: dict, report: Report) -> tuple[dict[str, np.ndarray], dict]:
    """The weights that did best on the held-out records, by name, and what was measured on them."""
    import torch

    arrays = np.load(job["arrays"])
    batches = Batches(Trace(job["trace"]), arrays)
    training, held_out = arrays["training"], arrays["held_out"]
    network = Network(batches.n_embd, job["n_latent"], job["n_hidden"], batches.n_layers, batches.n_expert)
    matrices = [p for p in network.parameters() if p.ndim > 1]
    vectors = [p for p in network.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}], lr=job["lr"])
    steps_per_epoch = math.ceil(len(training) / BATCH)
    n_steps = job["epochs"] * steps_per_epoch
    warm_up = min(WARM_UP, steps_per_epoch)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / warm_up) * (
        LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * step / n_steps))))
    order = np.random.default_rng(job["seed"])
    best, best_weights, best_epoch = evaluate(network, batches, held_out), network.arrays(), 0
    losses = [best["loss"]]
    for epoch in range(1, job["epochs"] + 1):
        shuffled = order.permutation(training)
        for step in range(steps_per_epoch):
            loss = batches.loss(network, np.sort(shuffled[step * BATCH : (step + 1) * BATCH]))[0].mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            report.send(done=(epoch - 1) * steps_per_epoch + step + 1, total=n_steps)
        measured = evaluate(network, batches, held_out)
        losses.append(measured["loss"])
        if measured["loss"] < best["loss"]:
            best, best_weights, best_epoch = measured, network.arrays(), epoch
        elif epoch - best_epoch >= PATIENCE:
            break
    return best_weights, {**best, "losses": losses, "best_epoch": best_epoch}


class Batches:
    """Batches of a trace, layers first: [n_layers, n, ...] of the layers that have one after them."""

    def __init__(self, trace: Trace, arrays: np.lib.npyio.NpzFile) -> None:
        import torch

        self.trace = trace
        self.n_layers = len(trace.header.layers) - 1
        self.n_expert, self.n_embd = trace.header.n_expert, trace.header.n_embd

        def of_layer(name: str, index: int) -> torch.Tensor | None:
            return torch.from_numpy(arrays[f"{name}.{index}"]) if f"{name}.{index}" in arrays else None

        self._defaults = [of_layer("defaults", i) for i in range(self.n_layers)]
        self._routers = [
            {name: of_layer(name, i) for name in ("gate", "bias", "norm", "selection_bias")}
            for i in range(self.n_layers + 1)
        ]
        self._eps, self._gating = arrays["eps"].tolist(), str(arrays["gating"])
        self._n_groups, self._n_groups_used = int(arrays["n_groups"]), int(arrays["n_groups_used"])

    def quasi_hidden(self, records: np.ndarray):
        """Norm_{l+1}(r_l + sum_i g_i d_{l,i}) of each layer l, float32[n_layers, n, n_embd]."""
        import torch

        states = torch.empty(self.n_layers, len(records), self.n_embd)
        for i in range(self.n_layers):
            state = torch.from_numpy(np.ascontiguousarray(records["states"][:, i]))
            norm = self._routers[i + 1]["norm"]
            if norm is not None:
                experts = torch.from_numpy(records["experts"][:, i].astype(np.int64))
                weights = torch.from_numpy(np.ascontiguousarray(records["weights"][:, i]))
                state = state + torch.einsum("nk,nkd->nd", weights, self._defaults[i][experts])
                state = state * torch.rsqrt(state.square().mean(-1, keepdim=True) + self._eps[i + 1]) * norm
            states[i] = state
        return states

    def routed(self, states):
        """Logits that the routers of the layers ahead give for states, [n_layers, n, n_expert]."""
        import torch

        logits = torch.stack([state @ router["gate"].T for state, router in zip(states, self._routers[1:])])
        for i, router in enumerate(self._routers[1:]):
            if router["bias"] is not None:
                logits[i] += router["bias"]
        return logits

    def _log_gated(self, logits):
        """Logarithms of the probabilities that the model makes of logits; their sum need not be 1."""
        import torch.nn.functional as F

        if self._gating == "sigmoid":
            return F.logsigmoid(logits)
        if self._gating == "sqrt-softplus":
            return 0.5 * F.softplus(logits).log()
        return F.log_softmax(logits, dim=-1)

    def loss(self, network, rows: np.ndarray):
        """Of records: KL divergence [n_layers, n] of the estimate from the truth, then the logits of the estimate, of
        the quasi-hidden state, and the experts that were selected, int64[n_layers, n, k]."""
        import torch
        import torch.nn.functional as F

        records = self.trace.records[rows]
        truth = torch.from_numpy(records["router"][:, 1:].astype(np.float32)).transpose(0, 1)
        with torch.no_grad():
            states = self.quasi_hidden(records)
            routed = self.routed(states)
        logits = routed + network(states)
        likelihood = F.log_softmax(self._log_gated(logits), dim=-1)
        loss = F.kl_div(likelihood, truth, reduction="none").sum(-1)
        selected = torch.from_numpy(records["experts"][:, 1:].astype(np.int64)).transpose(0, 1)
        return loss, logits, routed, selected

    def hits(self, logits, selected):
        """How many of the selected experts [n_layers, n, k] are the k likeliest, by layer: [n_layers]."""
        import torch

        scores = logits
        if self._n_groups > 1 or any(router["selection_bias"] is not None for router in self._routers[1:]):
            scores = logits.clone() if self._gating == "softmax-selected" else self._log_gated(logits).exp()
            for score, router in zip(scores, self._routers[1:]):
                if router["selection_bias"] is not None:
                    score += router["selection_bias"]
        if self._n_groups > 1:  # in which the two best have the highest sum
            groups = scores.unflatten(-1, (self._n_groups, -1))
            best = groups.topk(min(2, groups.shape[-1]), -1).values.sum(-1).topk(self._n_groups_used, -1).indices
            masked = torch.ones(groups.shape[:-1], dtype=torch.bool).scatter_(-1, best, False)
            scores = groups.masked_fill(masked.unsqueeze(-1), -torch.inf).flatten(-2)
        likeliest = torch.zeros(scores.shape, dtype=torch.bool)
        likeliest.scatter_(-1, scores.topk(selected.shape[-1], -1).indices, True)
        return likeliest.gather(-1, selected).sum((1, 2))


def evaluate(network, batches: Batches, rows: np.ndarray) -> dict:
    """On records, a batch at a time: mean loss, and recall@k of the estimate and of quasi-hidden states by layer."""
    import torch

    total, estimated, quasi_hidden, n_selected = 0.0, 0, 0, 0
    with torch.inference_mode():
        for begin in range(0, len(rows), BATCH):
            loss, logits, routed, selected = batches.loss(network, rows[begin : begin + BATCH])
            total += loss.mean(0).sum().item()
            estimated = estimated + batches.hits(logits, selected)
            quasi_hidden = quasi_hidden + batches.hits(routed, selected)
            n_selected += selected[0].numel()
    return {"loss": total / len(rows), "estimator": (estimated / n_selected).tolist(),
            "quasi_hidden": (quasi_hidden / n_selected).tolist()}


def Network(n_embd: int, n_latent: int, n_hidden: int, n_layers: int, n_expert: int):
    """The network of pyorch_estimator (Speculating Experts, appendix A). Begins by correcting nothing."""
    import torch
    from torch import nn

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.input = nn.Linear(n_embd, n_latent)
            self.position = nn.Parameter(0.5 * torch.randn(n_layers, n_latent))
            self.up, self.down = nn.Linear(n_latent, n_hidden), nn.Linear(n_hidden, n_latent)
            self.norm = nn.LayerNorm(n_latent)
            self.head_weight = nn.Parameter(torch.zeros(n_layers, n_expert, n_latent))
            self.head_bias = nn.Parameter(torch.zeros(n_layers, n_expert))

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            """[n_layers, n, n_expert] for states [n_layers, n, n_embd]."""
            latent = self.input(states) + self.position[:, None]
            latent = self.norm(latent + self.down(nn.functional.silu(self.up(latent))))
            return torch.baddbmm(self.head_bias[:, None], latent, self.head_weight.transpose(1, 2))

        def arrays(self) -> dict[str, np.ndarray]:
            """Copies, by the names of pyorch_estimator."""
            named = {"in": self.input, "up": self.up, "down": self.down, "norm": self.norm}
            tensors = {f"{name}_weight": module.weight for name, module in named.items()}
            tensors |= {f"{name}_bias": module.bias for name, module in named.items()}
            tensors |= {name: getattr(self, name) for name in ("position", "head_weight", "head_bias")}
            return {name: tensor.detach().numpy().copy() for name, tensor in tensors.items()}

    return Network()


if __name__ == "__main__":
    main()
