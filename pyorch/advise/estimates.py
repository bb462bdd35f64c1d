"""The estimated speed at a budget, from a replay of the model's routing with the speed of this machine."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pyorch.advise.device_estimate import DeviceSpeed
from pyorch.advise.machine import Compute
from pyorch.advise.routing import N_PROMPT, N_WARM, Routing, one_request
from pyorch.runtime.model_map import ModelMap
from pyorch.settings.prefetch import AUTO, NONE, Prefetch
from pyorch.sidecars.predictor import PredictorFile
from pyorch.traces.replay import Replayed, ReplaySettings, replay

# The share of a token's waits that guesses avoid, relative to perfect knowledge of the next layers. Without recorded
# states a replay cannot make guesses.
GUESSING = {"quasi-hidden": 0.5, "hybrid": 0.7}


@dataclass(frozen=True)
class Estimate:
    """The estimate for one budget, and one VRAM budget if there is a device.

    Rates are in tokens a second, first_token in seconds from the start of loading, sizes in bytes.

    Attributes:
        on_device: Share of expert uses that find the expert on the device. in_memory, read: the same for host memory
            and for the disk.
        hit_rate: Share of in_memory among the uses that the device does not serve.
        stall: Share of a decoded token's time in which nothing is computed, by the processor if it computes experts.
    """

    budget: str
    budget_bytes: int
    vram_budget: str | None
    vram_bytes: int
    hit_rate: float
    on_device: float
    in_memory: float
    read: float
    decode_rate: float
    first_token_seconds: float
    bytes_per_token: float
    stall: float


class Estimator:
    """Estimates for one model on one machine.

    Attributes:
        bandwidth: Bytes a second of the disk.
        n_prompt: Tokens before the first generated one.
        speed: The speed of the device, for estimates with a VRAM budget.
    """

    def __init__(
        self, model_map: ModelMap, routing: Routing, compute: Compute, bandwidth: float, n_prompt: int,
        predictor_file: PredictorFile, speed: DeviceSpeed | None = None,
    ) -> None:
        self._speed = speed
        self._map, self._routing, self._compute, self._bandwidth = model_map, routing, compute, bandwidth
        self._predictor_file = predictor_file
        self._n_prompt, self._prompt = n_prompt, one_request(routing.recording, n_prompt, 1)

    def estimate(
        self, budget: str, vram_budget: str | None = None, predictor: str = AUTO, bandwidth: float | None = None
    ) -> Estimate:
        """Returns the estimate for commands' defaults, or with a named predictor, or with another disk.

        Args:
            budget: The budget of host memory.
            vram_budget: The budget of the device. None: there is no device.
            predictor: The predictor.
            bandwidth: Bytes a second of the disk. None: the measured one.

        Raises:
            BudgetError: The budget is below the floor.
        """
        settings = ReplaySettings(
            prefetch=Prefetch(NONE), budget=budget, read_bandwidth=bandwidth or self._bandwidth,
            compute_ms=1000 * self._compute.decode_seconds, prefill_ms=1000 * self._compute.prefill_seconds,
            n_warm_tokens=N_PROMPT + N_WARM, as_decode=False,
        )
        if vram_budget is not None and self._speed is not None:
            settings = replace(settings, vram_budget=vram_budget, link_bandwidth=self._speed.link,
                               device_speed=self._speed.decode, device_prefill_speed=self._speed.prefill)
        overhead = self._overhead(vram_budget)
        recording = self._routing.recording
        if predictor == AUTO:
            predictor = "hybrid" if self._predictor_file.estimator is not None else "quasi-hidden"
        if recording.has_states and (predictor != "hybrid" or self._predictor_file.estimator is not None):
            found = self._replay(replace(settings, prefetch=Prefetch(predictor)))
            seconds, stall = found.tpot_ms / 1000, found.stall_ms / 1000
        else:
            found, knowing = self._replay(settings), self._replay(replace(settings, prefetch=Prefetch("oracle")))
            saved = GUESSING[predictor] * max(0.0, found.tpot_ms - knowing.tpot_ms) / 1000
            seconds, stall = found.tpot_ms / 1000 - saved, max(0.0, found.stall_ms / 1000 - saved)
        seconds += overhead
        on_device = found.stats.device_hit_rate if settings.vram_budget.amount.of(1) else 0.0
        elsewhere = 1 - on_device
        in_memory = elsewhere * found.hit_rate if elsewhere else 0.0
        return Estimate(
            budget=budget, budget_bytes=settings.budget.resolve(self._map.info), vram_budget=vram_budget,
            vram_bytes=min(settings.vram_budget.amount.of(self._map.info.expert_bytes), self._map.info.expert_bytes),
            hit_rate=found.hit_rate, on_device=on_device, in_memory=in_memory, read=elsewhere - in_memory,
            decode_rate=1 / seconds, first_token_seconds=self._first_token(settings) + overhead,
            bytes_per_token=found.bytes_per_token, stall=stall / seconds,
        )

    def fastest_seconds(self, vram_budget: str | None) -> float:
        """Returns the seconds of a decoded token without waits, on the faster of processor and device."""
        speed = 1.0 if vram_budget is None or self._speed is None else max(1.0, self._speed.decode)
        return self._compute.decode_seconds / speed + self._overhead(vram_budget)

    def _overhead(self, vram_budget: str | None) -> float:
        """Returns the seconds that a device adds to the layers of a ubatch in addition to its weights."""
        layer_seconds = 0.0 if vram_budget is None or self._speed is None else self._speed.layer_seconds
        return layer_seconds * self._map.info.n_layers

    def _replay(self, settings: ReplaySettings) -> Replayed:
        return replay(self._map, self._routing.recording, settings, predictor_file=self._predictor_file)

    def _first_token(self, settings: ReplaySettings) -> float:
        """Dense weights are read before computing starts; a prompt's experts during it, from an empty memory."""
        settings = replace(settings, n_warm_tokens=self._n_prompt)
        prompt = replay(self._map, self._prompt, settings, predictor_file=self._predictor_file)
        *_, computed, _one_more_token = prompt.ubatch_ends
        return self._compute.start_seconds + self._map.info.dense_bytes / settings.read_bandwidth + float(computed)

