"""The gain of sidecars: packs, predictors, buddies, maps."""

from __future__ import annotations

from dataclasses import dataclass

from pyorch.advise.estimates import Estimate, Estimator
from pyorch.runtime.model_map import ModelMap
from pyorch.sidecars.container import is_sidecar_of
from pyorch.sizes import MiB
from pyorch.traces.recorder import why_unrecordable

# The share of bytes that the lossless codec leaves of experts in floats (docs/measurements/packs.md). Quantized experts
# shrink by 3 to 5 %, and decoding them costs as much time as that saves.
CODED_SHARES = {"bf16": 0.70, "f16": 0.70, "f32": 0.85}
NIBBLE_SHARE = 0.77  # of BF16 in nibbles, on disk and in memory, because kernels compute from it
WORTH = 1.05  # least speed-up of a sidecar that is worth making


@dataclass(frozen=True)
class Gain:
    """The gain of a sidecar.

    Attributes:
        sidecar: Its kind.
        there: It already exists.
        decode_rate: Tokens a second with it, None if unknown.
        at_most: The rate is an upper bound.
        lossy: It changes the answers.
        why: The reason in words.
    """

    sidecar: str
    command: str
    there: bool
    decode_rate: float | None
    at_most: bool
    lossy: bool
    why: str

    def helps(self, without: Estimate) -> bool:
        """Whether the sidecar is missing and would speed up tokens enough."""
        return not self.there and (self.decode_rate or 0.0) >= WORTH * without.decode_rate


def gains(
    model_map: ModelMap, estimator: Estimator, base: Estimate, bandwidth: float, repacking: float, n_threads: int,
    name: str | None = None,
) -> list[Gain]:
    """Returns the gains at the budgets of an estimate, for a model with uncompressed experts.

    repacking: the result of Machine.repacking(). name: of the model in commands; None: its path.
    """
    fastest = estimator.fastest_seconds(base.vram_budget)
    there = {kind for kind, path in model_map.sidecars().items() if is_sidecar_of(path, model_map, kind)}
    path = name or model_map.path
    types = {role.type.lower() for layer in model_map.layers for role in layer.roles}
    found = []
    if types == {"bf16"} and base.vram_budget is None:
        budget = min(model_map.info.slots_bytes, round(base.budget_bytes / NIBBLE_SHARE))
        packed = estimator.estimate(str(budget), bandwidth=bandwidth / NIBBLE_SHARE)
        found.append(Gain(
            "pack", f"pyorch pack {path} --codec auto", "experts" in there, packed.decode_rate, True, False,
            f"experts in BF16 are read and kept in {NIBBLE_SHARE:.0%} of the bytes, where kernels are fast with that",
        ))
    elif types <= CODED_SHARES.keys():
        share = max(CODED_SHARES[name] for name in types)
        packed = estimator.estimate(base.budget, base.vram_budget, bandwidth=bandwidth / share)
        codec = "table" if "bf16" in types else "auto"  # auto may choose nibble, which a device cannot use
        found.append(Gain(
            "pack", f"pyorch pack {path} --codec {codec}", "experts" in there, packed.decode_rate, True, False,
            f"experts in floats are read in {share:.0%} of the bytes, where decoding keeps up",
        ))
    else:
        # Threads repack while they would wait; the rest is time of a token.
        seconds = 1 / base.decode_rate
        saved = max(0.0, repacking * base.bytes_per_token / n_threads - base.stall * seconds)
        spared = (f"; for this processor alone, one spares {1e5 * repacking * MiB:.2g} ms of a core for each 100 MiB "
                  "read, which tells where most waiting is left out (--lossy)" if repacking else "")
        found.append(Gain(
            "pack", f"pyorch pack {path}" + " --layout native" * (repacking > 0), "experts" in there,
            1 / max(seconds - saved, fastest), True, False,
            f"quantized experts do not shrink; a pack adds checksums, and one read for each expert{spared}",
        ))
    trained = estimator.estimate(base.budget, base.vram_budget, predictor="hybrid")
    found.append(Gain("predictor", f"pyorch train-predictor {path} --data FILE", "predictor" in there,
                      max(trained.decode_rate, base.decode_rate), False, False,
                      "predicts more of the needed experts, which are then prefetched"))
    if why_unrecordable(model_map):
        return found
    found.append(Gain("maps", f"pyorch maps {path} TRACE", "maps" in there, None, False, False,
                      "use counts: pools of a compressed pack begin with them, and the predictor expert-map searches "
                      "them"))
    found.append(Gain("buddies", f"pyorch buddies {path} --trace TRACE", "buddies" in there,
                      1 / fastest, True, True,
                      "the speed if no absent expert is loaded; --lossy heaviest loads the heavy ones and needs no "
                      "file; pyorch tune measures the accuracy"))
    return found
