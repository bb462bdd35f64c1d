"""Trains an estimator. A separate program that children.py starts; no module imports it.

Torch and ggml have two OpenMP runtimes, so torch stays out of processes that load llama.cpp, and this file imports no
module of pyorch that loads it. After its job (see pyorch.convert.children) it receives the records of tokens as they
are decoded.
"""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection

sys.path.pop(0)  # this file's directory, whose files are no top-level modules

import numpy as np

from pyorch.processes import end_with
from pyorch.traces.file import TraceHeader

os.environ.pop("OPENBLAS_NUM_THREADS", None)  # torch computes on all processors, with any library
signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process

try:
    import torch
    import torch.nn.functional as F
    from torch import nn
except ImportError as error:
    Connection(int(sys.argv[1])).send({"error": "missing", "message": str(error)})
    sys.exit(1)

# Tuned once on the small trained model: see docs/measurements/prefetch.md.
BATCH = 64  # tokens, each in all layers
WARM_UP = 0.1  # of the steps, 200 at most
LAST_RATE = 0.02  # of the learning rate, at the end of the schedule
TOP_K_LOSS = 0.3  # weight of the ranking loss, relative to the divergence
PARTS = 16  # of the training; each ends with an evaluation on held-out tokens
PATIENCE = 4  # parts without improvement

# Memory for tokens to draw batches from, which mixes new ones with earlier ones; and for held-out tokens.
POOL_BYTES, HELD_OUT_BYTES = 1 << 30, 1 << 28


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    end_with(connection.fileno())
    job = connection.recv()
    torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    torch.manual_seed(job["seed"])
    try:
        connection.send({"result": train(job, connection)})
    except Exception as error:
        connection.send({"error": "failed", "message": f"{type(error).__name__}: {error}"})
        raise


def train(job: dict, connection: Connection) -> tuple[dict[str, np.ndarray], dict]:
    """Returns the weights with the best results on the held-out records, by name, and these results."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lesson = Lesson(job["header"], job["arrays"], device)
    order = np.random.default_rng(job["seed"])
    pool, held_out = Pool(lesson, POOL_BYTES, order), Pool(lesson, HELD_OUT_BYTES, order)
    training = Training(job, lesson, pool, held_out, connection)
    n_taken = 0
    while (frame := connection.recv()) is not None:
        is_held_out, records = frame
        if device != "cpu":
            connection.send({"taken": True})  # the parent decodes the next records during this training
        (held_out if is_held_out else pool).add(records)
        n_taken += 0 if is_held_out else len(records)
        if pool.is_full:
            training.run(job["epochs"] * n_taken // BATCH)
        if training.is_over:
            break
        training.show(n_taken)
        if device == "cpu":
            connection.send({"taken": True})
    training.run(training.n_steps)
    return training.best_weights, {
        **training.best, "losses": training.losses, "best_part": training.best_part, "curve": training.curve,
    }


class Pool:
    """Tokens in memory, as many as fit. A further token replaces a random one."""

    def __init__(self, lesson: Lesson, n_bytes: int, order: np.random.Generator) -> None:
        self._lesson, self._order = lesson, order
        self._capacity = max(BATCH, n_bytes // lesson.token_bytes)
        self._tensors: list = []
        self._n = 0
        self._drawn, self._shuffled = 0, np.empty(0, np.int64)

    def __len__(self) -> int:
        return self._n

    @property
    def is_full(self) -> bool:
        return len(self) == self._capacity

    def add(self, records: np.ndarray) -> None:
        added = self._lesson.tensors(records)
        if not self._tensors:  # unwritten memory takes no room
            self._tensors = [torch.empty(self._capacity, *tensor.shape[1:], dtype=tensor.dtype) for tensor in added]
        n = min(len(records), self._capacity - self._n)
        places = torch.arange(self._n, self._n + n)
        if rest := len(records) - n:
            drawn = self._order.choice(self._capacity, rest, replace=rest > self._capacity)
            places = torch.cat([places, torch.from_numpy(drawn)])
        for held, new in zip(self._tensors, added):
            held[places] = new
        self._n += n

    def draw(self) -> list:
        """Returns a batch. Each token is drawn once before one is drawn again, except replaced ones."""
        if self._drawn + min(BATCH, len(self)) > len(self._shuffled):
            self._drawn, self._shuffled = 0, self._order.permutation(len(self))
        rows = self._shuffled[self._drawn : self._drawn + BATCH]
        self._drawn += len(rows)
        return self.rows(np.sort(rows))

    def rows(self, rows: np.ndarray | slice) -> list:
        return [tensor[: self._n][rows].to(self._lesson.device) for tensor in self._tensors]


class Training:
    """An estimator in training.

    Attributes:
        best: The results when the loss on the held-out tokens was lowest, with best_weights, after best_part.
        curve: Before training and after each part, the tokens trained on so far, each use counted, and the mean recall
            on held-out tokens.
    """

    def __init__(self, job: dict, lesson: Lesson, pool: Pool, held_out: Pool, connection: Connection) -> None:
        self._lesson, self._pool, self._held_out, self._connection = lesson, pool, held_out, connection
        self._network = Network(lesson.n_embd, job["n_latent"], job["n_hidden"], lesson.n_layers, lesson.n_expert)
        self._network.to(lesson.device)
        matrices, vectors = (
            [p for p in self._network.parameters() if (p.ndim > 1) == is_matrix] for is_matrix in (True, False)
        )
        self._optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}], lr=job["lr"])
        self.n_steps = max(PARTS, math.ceil(job["epochs"] * job["n_training"] / BATCH))
        warm_up = max(1, min(200, int(WARM_UP * self.n_steps)))
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: min(1, (step + 1) / warm_up) * (
                LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * step / self.n_steps))))
        self._n_training, self._n_taken = job["n_training"], 0
        self._step = 0
        self.losses: list[float] = []
        self.curve: list[tuple[int, float]] = []
        self.best: dict = {}
        self.best_weights: dict[str, np.ndarray] = {}
        self.best_part = 0

    @property
    def is_over(self) -> bool:
        """Whether training has reached its end, or does not improve."""
        return self._step == self.n_steps or len(self.losses) - 1 - self.best_part >= PATIENCE

    def run(self, until: int) -> None:
        """Trains up to a step, unless training is over before."""
        if not self.losses:
            self._measure()
        while self._step < min(until, self.n_steps) and not self.is_over:
            divergence, logits, _, selected = self._lesson.loss(self._network, *self._pool.draw())
            loss = divergence.mean() + TOP_K_LOSS * self._lesson.top_k_loss(logits, selected)
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
            self._schedule.step()
            self._step += 1
            if self._step * PARTS // self.n_steps > (self._step - 1) * PARTS // self.n_steps:
                self._measure()
            self.show(self._n_taken)

    def show(self, n_taken: int) -> None:
        self._n_taken = n_taken
        self._connection.send({"done": n_taken + self._step, "total": self._n_training + self.n_steps})

    def _measure(self) -> None:
        measured = evaluate(self._network, self._lesson, self._held_out)
        self.losses.append(measured["loss"])
        self.curve.append((self._step * min(BATCH, len(self._pool)), float(np.mean(measured["estimator"]))))
        if not self.best or measured["loss"] < self.best["loss"]:
            self.best, self.best_weights = measured, self._network.arrays()
            self.best_part = len(self.losses) - 1


class Lesson:
    """Makes training data from records: tensors of tokens [n, n_layers, ...] of all layers before another one."""

    def __init__(self, header: TraceHeader, arrays: Mapping[str, np.ndarray], device: str = "cpu") -> None:
        self.device = device
        self.n_layers = len(header.layers) - 1
        self.n_expert, self.n_embd, self._n_used = header.n_expert, header.n_embd, header.n_expert_used

        def of_layer(name: str, index: int) -> torch.Tensor | None:
            key = f"{name}.{index}"
            return torch.from_numpy(arrays[key]).to(device) if key in arrays else None

        self._defaults = [of_layer("defaults", i) for i in range(self.n_layers)]
        self._routers = [
            {name: of_layer(name, i) for name in ("gate", "bias", "norm", "selection_bias")}
            for i in range(self.n_layers + 1)
        ]
        self._eps, self._gating = arrays["eps"].tolist(), str(arrays["gating"])
        self._n_groups, self._n_groups_used = int(arrays["n_groups"]), int(arrays["n_groups_used"])

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in tensors()."""
        return 2 * self.n_layers * (self.n_embd + self.n_expert + self._n_used)

    def tensors(self, records: np.ndarray) -> list:
        """Returns the training data of records.

        Quasi-hidden states float16[n, n_layers, n_embd], distributions of the next routers float16[n, n_layers,
        n_expert], and their selected experts, int16[n, n_layers, k].
        """
        most = torch.finfo(torch.float16).max
        return [
            self.quasi_hidden(records).clamp(-most, most).half().transpose(0, 1).contiguous().cpu(),
            torch.from_numpy(np.ascontiguousarray(records["router"][:, 1:])),
            torch.from_numpy(records["experts"][:, 1:].astype(np.int16)),
        ]

    def quasi_hidden(self, records: np.ndarray):
        """Computes Norm_{l+1}(r_l + sum_i g_i d_{l,i}) of each layer l, float32[n_layers, n, n_embd]."""
        states = torch.empty(self.n_layers, len(records), self.n_embd, device=self.device)
        for i in range(self.n_layers):
            state = torch.from_numpy(np.ascontiguousarray(records["states"][:, i])).to(self.device)
            norm = self._routers[i + 1]["norm"]
            if norm is not None:
                experts = torch.from_numpy(records["experts"][:, i].astype(np.int64)).to(self.device)
                weights = torch.from_numpy(np.ascontiguousarray(records["weights"][:, i])).to(self.device)
                state = state + torch.einsum("nk,nkd->nd", weights, self._defaults[i][experts])
                state = state * torch.rsqrt(state.square().mean(-1, keepdim=True) + self._eps[i + 1]) * norm
            states[i] = state
        return states

    def routed(self, states):
        """Computes the logits of the next layers' routers for states, [n_layers, n, n_expert]."""
        logits = torch.stack([state @ router["gate"].T for state, router in zip(states, self._routers[1:])])
        for i, router in enumerate(self._routers[1:]):
            if router["bias"] is not None:
                logits[i] += router["bias"]
        return logits

    def _log_gated(self, logits):
        """Computes the logarithms of the model's probabilities from logits. The probabilities need not sum to 1."""
        if self._gating == "sigmoid":
            return F.logsigmoid(logits)
        if self._gating == "sqrt-softplus":
            return 0.5 * F.softplus(logits).log()
        return F.log_softmax(logits, dim=-1)

    def loss(self, network, states, truth, selected):
        """Computes the loss of a batch as made by tensors().

        Returns:
            KL divergence [n_layers, n] of the estimate from the truth, the logits of the estimate and of the
            quasi-hidden state, and the selected experts, int64[n_layers, n, k].
        """
        states, truth = states.float().transpose(0, 1), truth.float().transpose(0, 1)
        selected = selected.long().transpose(0, 1)
        with torch.no_grad():
            routed = self.routed(states)
        logits = routed + network(states)
        likelihood = F.log_softmax(self._log_gated(logits), dim=-1)
        loss = F.kl_div(likelihood, truth, reduction="none").sum(-1)
        return loss, logits, routed, selected

    @property
    def _ranks_by_logits(self) -> bool:
        """Whether experts are selected by their logits alone, without groups and biases."""
        return self._n_groups == 1 and all(router["selection_bias"] is None for router in self._routers[1:])

    def top_k_loss(self, logits, selected):
        """Computes how far experts that were not selected rank above, or close below, selected ones.

        The worst selected expert is compared with the best other one, and so on. 0 if not only logits select.
        """
        if not self._ranks_by_logits:
            return 0.0
        is_selected = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device).scatter_(-1, selected, True)
        n = min(selected.shape[-1], logits.shape[-1] - selected.shape[-1])
        others = logits.masked_fill(is_selected, -torch.inf).topk(n, -1).values
        return F.softplus(others - logits.gather(-1, selected).sort(-1).values[..., :n]).mean()

    def hits(self, logits, selected):
        """Counts the selected experts [n_layers, n, k] among the k most probable, by layer: [n_layers]."""
        scores = logits
        if not self._ranks_by_logits:
            scores = logits.clone() if self._gating == "softmax-selected" else self._log_gated(logits).exp()
            for score, router in zip(scores, self._routers[1:]):
                if router["selection_bias"] is not None:
                    score += router["selection_bias"]
        if self._n_groups > 1:  # selects the groups whose two best experts have the highest sum
            groups = scores.unflatten(-1, (self._n_groups, -1))
            best = groups.topk(min(2, groups.shape[-1]), -1).values.sum(-1).topk(self._n_groups_used, -1).indices
            masked = torch.ones(groups.shape[:-1], dtype=torch.bool, device=scores.device).scatter_(-1, best, False)
            scores = groups.masked_fill(masked.unsqueeze(-1), -torch.inf).flatten(-2)
        likeliest = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
        likeliest.scatter_(-1, scores.topk(selected.shape[-1], -1).indices, True)
        return likeliest.gather(-1, selected).sum((1, 2))


def evaluate(network, lesson: Lesson, tokens: Pool) -> dict:
    """Evaluates tokens in batches: mean loss, and recall@k of the estimate and of quasi-hidden states by layer."""
    total, estimated, quasi_hidden, n_selected = 0.0, 0, 0, 0
    with torch.inference_mode():
        for begin in range(0, len(tokens), 512):
            loss, logits, routed, selected = lesson.loss(network, *tokens.rows(slice(begin, begin + 512)))
            total += loss.mean(0).sum().item()
            estimated = estimated + lesson.hits(logits, selected)
            quasi_hidden = quasi_hidden + lesson.hits(routed, selected)
            n_selected += selected[0].numel()
    return {"loss": total / len(tokens), "estimator": (estimated / n_selected).tolist(),
            "quasi_hidden": (quasi_hidden / n_selected).tolist()}


class Network(nn.Module):
    """The network of pyorch_estimator (Speculating Experts, appendix A). Initially its correction is 0."""

    def __init__(self, n_embd: int, n_latent: int, n_hidden: int, n_layers: int, n_expert: int) -> None:
        super().__init__()
        self.input = nn.Linear(n_embd, n_latent)
        self.position = nn.Parameter(0.5 * torch.randn(n_layers, n_latent))
        self.up, self.down = nn.Linear(n_latent, n_hidden), nn.Linear(n_hidden, n_latent)
        self.norm = nn.LayerNorm(n_latent)
        self.head_weight = nn.Parameter(torch.zeros(n_layers, n_expert, n_latent))
        self.head_bias = nn.Parameter(torch.zeros(n_layers, n_expert))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Returns [n_layers, n, n_expert] for states [n_layers, n, n_embd]."""
        latent = self.input(states) + self.position[:, None]
        latent = self.norm(latent + self.down(F.silu(self.up(latent))))
        return torch.baddbmm(self.head_bias[:, None], latent, self.head_weight.transpose(1, 2))

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns copies of the arrays, by the names of pyorch_estimator."""
        named = {"in": self.input, "up": self.up, "down": self.down, "norm": self.norm}
        tensors = {f"{name}_weight": module.weight for name, module in named.items()}
        tensors |= {f"{name}_bias": module.bias for name, module in named.items()}
        tensors |= {name: getattr(self, name) for name in ("position", "head_weight", "head_bias")}
        return {name: tensor.detach().cpu().numpy().copy() for name, tensor in tensors.items()}


if __name__ == "__main__":
    main()
