"""The experts that tokens use: from a trace, from the model's use counts, or by an assumption."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyorch.errors import FormatError
from pyorch.runtime.model_map import ModelMap
from pyorch.sidecars.beside import Sidecars
from pyorch.traces.file import DECODE, PREFILL, Trace
from pyorch.traces.recording import Recording

N_PROMPT, N_WARM, N_DECODED = 512, 32, 160

# The assumption for an unknown model. The popularity of an expert is 1 / (rank + _FLAT)^_STEEP; a recently used expert
# is _AGAIN times as likely for a while, with a half-life of _HALF_LIFE tokens. Chosen so that the policy `learned` hits
# about as often as on the small trained model of the tests (docs/measurements/eviction.md).
_STEEP, _FLAT, _AGAIN, _HALF_LIFE = 0.8, 6.0, 4.7, 6.0


@dataclass(frozen=True)
class Routing:
    """A routing to replay. source: its origin in words.

    recording: one request, a prompt of N_PROMPT tokens and N_WARM + N_DECODED decoded ones. observed: a model's routers
    decided it, in this order; otherwise the runtime's guesses cannot be replayed.
    """

    recording: Recording
    source: str
    observed: bool


def routing_of(model_map: ModelMap, trace: Trace | None) -> Routing:
    """Returns the best known routing.

    Raises:
        FormatError: The trace belongs to another model.
        PyorchError: The trace has no tokens.
    """
    if trace is not None:
        recording = one_request(Recording.from_trace(trace, model_map), N_PROMPT, N_WARM + N_DECODED)
        return Routing(recording, f"{trace.path}, {len(trace)} tokens", True)
    try:
        uses = Sidecars(model_map).uses()
    except FormatError:  # damaged, or of a former model of this name; the source then names the assumption
        uses = None
    if uses is not None:
        return Routing(_made_up(model_map, _popularity_of(uses)),
                       "made up after the use counts beside the model, in no known order", False)
    return Routing(_made_up(model_map, None),
                   "assumed: uneven as in the small model of the tests; pyorch profile records what this one does",
                   False)


def one_request(recording: Recording, n_prompt: int, n_decoded: int) -> Recording:
    """Returns a request of the wanted length, repeated from the beginning if it has fewer tokens."""
    at = np.arange(n_prompt + n_decoded) % len(recording)
    return Recording(
        recording.layers, recording.n_expert, recording.experts[at], recording.weights[at],
        np.zeros(len(at), np.uint32), _phases(len(at), n_prompt),
        None if recording.probs is None else recording.probs[at],
        (lambda: recording.states[at]) if recording.has_states else None, lambda: recording.embeddings[at],
    )


def _made_up(model_map: ModelMap, popularity: np.ndarray | None) -> Recording:
    """Makes up a routing. popularity: [n_layers, n_expert] of the executed layers; None: the assumption."""
    layers = model_map.decoded_layers
    n_expert, n_used = max(layer.n_expert for layer in layers), model_map.info.n_expert_used
    random = np.random.default_rng(0)
    if popularity is None:
        even = (np.arange(n_expert) * 64 / n_expert + 1 + _FLAT) ** -_STEEP  # ranks as of 64
        popularity = np.stack([random.permutation(even) for _ in layers])
    experts = made_up_experts(random, popularity, n_used, N_PROMPT + N_WARM + N_DECODED)
    weights = np.full(experts.shape, 1 / n_used, np.float32)
    return Recording(tuple(layer.il for layer in layers), n_expert, experts, weights,
                     np.zeros(len(experts), np.uint32), _phases(len(experts), N_PROMPT))


def made_up_experts(random: np.random.Generator, popularity: np.ndarray, n_used: int, n_tokens: int) -> np.ndarray:
    """Returns uint16[n_tokens, n_layers, n_used], drawn without replacement by popularity and recent use."""
    fading = 0.5 ** (1 / _HALF_LIFE)
    log_popularity = np.log(popularity)
    lately = np.zeros(popularity.shape)
    tokens = np.empty((n_tokens, len(popularity), n_used), np.uint16)
    for token in tokens:
        keys = log_popularity + np.log1p(_AGAIN * lately) + random.gumbel(size=popularity.shape)
        token[:] = np.argpartition(-keys, n_used - 1, axis=1)[:, :n_used]
        lately *= fading
        np.put_along_axis(lately, token.astype(np.int64), 1.0, axis=1)
    return tokens


def _popularity_of(uses: np.ndarray) -> np.ndarray:
    """Returns popularities above 0, because an unseen expert may be used too."""
    return uses + 0.1 * uses.mean(axis=1, keepdims=True) + np.finfo(float).tiny


def _phases(n_tokens: int, n_prompt: int) -> np.ndarray:
    phases = np.full(n_tokens, DECODE, np.uint8)
    phases[:n_prompt] = PREFILL
    return phases
