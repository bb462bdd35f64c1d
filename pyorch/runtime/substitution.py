"""The part of an engine that lets resident experts stand in for absent ones; lossy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pyorch.errors import PyorchError
from pyorch.library.bindings import array, check, default, lib, new
from pyorch.library.numerics import np
from pyorch.runtime.handle import EngineHandle
from pyorch.runtime.observers import Routing
from pyorch.runtime.statistics import Stats, SubstitutionStats, read


class SubstitutionCalls(EngineHandle):
    """What absent experts are replaced by, and what was counted of that. simulates_cache: which ones are absent is
    simulated."""

    simulates_cache = False

    def set_substitution(self, il: int, settings: Mapping[str, int | float]) -> None:
        """How a layer treats absent experts: fields of pyorch_substitution, the others by default."""
        check(lib.pyorch_set_substitution(self.handle, il, default("pyorch_substitution", **settings)))

    def set_buddies(
        self, il: int, ids: np.ndarray, q: np.ndarray, scale: np.ndarray | None = None, hops: np.ndarray | None = None,
        left: np.ndarray | None = None,
    ) -> None:
        """The buddies of each expert of a layer, best first.

        Args:
            ids: int32[n_expert, k_max], -1 after the last. q, scale: float32 of the same shape; scale is the
                factor of the buddy's output, nan where it is not known.
            hops: uint8[n_expert], to where an expert is. None: 1 for one that another server computes, else 0.
            left: float32, what a buddy with its factor leaves of the squared output, 0 to 1; nan where it is not known.
        """
        ids = np.ascontiguousarray(ids, np.int32)
        q = np.ascontiguousarray(q, np.float32)
        scale = None if scale is None else np.ascontiguousarray(scale, np.float32)
        hops = None if hops is None else np.ascontiguousarray(hops, np.uint8)
        if q.shape != ids.shape or (scale is not None and scale.shape != ids.shape):
            raise PyorchError(f"buddy lists of shape {ids.shape} do not fit priorities of shape {q.shape}")
        left = None if left is None else np.ascontiguousarray(left, np.float32)
        if left is not None and left.shape != ids.shape:
            raise PyorchError(f"buddy lists of shape {ids.shape} do not fit errors of shape {left.shape}")
        if hops is not None and hops.shape != ids.shape[:1]:
            raise PyorchError(f"hops of shape {hops.shape} do not fit buddy lists of shape {ids.shape}")
        check(
            lib.pyorch_set_buddies(
                self.handle, il, *ids.shape, array("int32_t[]", ids), array("float[]", q),
                array("float[]", scale), array("uint8_t[]", hops),
            )
        )
        if left is not None:
            check(lib.pyorch_set_buddy_errors(self.handle, il, *ids.shape, array("float[]", left)))

    def set_ghosts(
        self, il: int, rank: np.ndarray, mean: np.ndarray, down: np.ndarray, up: np.ndarray, error: np.ndarray,
        energy: np.ndarray,
    ) -> None:
        """What estimates the outputs of a layer's experts; see pyorch.sidecars.ghosts.LayerGhosts.

        Args:
            rank: int32[n_expert], -1: no ghost. mean: float32[n_expert, n_out]. down, up: float32[sum of ranks, n_in]
                and [sum of ranks, n_out]. error, energy: float32[n_expert].

        Raises PyorchError for ghosts of other experts.
        """
        rank = np.ascontiguousarray(rank, np.int32)
        arrays = {name: np.ascontiguousarray(values, np.float32) for name, values in (
            ("mean", mean), ("down", down), ("up", up), ("error", error), ("energy", energy))}
        (n_expert, n_out), (n_rows, n_in) = arrays["mean"].shape, arrays["down"].shape
        if (arrays["up"].shape != (n_rows, n_out)
                or any(array.shape != (n_expert,) for array in (rank, arrays["error"], arrays["energy"]))):
            raise PyorchError(f"the arrays of ghosts of {n_expert} experts do not fit together")
        check(lib.pyorch_set_ghosts(self.handle, il, default(
            "pyorch_ghosts", n_expert=n_expert, n_in=n_in, n_out=n_out, n_rows=n_rows, rank=array("int32_t[]", rank),
            **{name: array("float[]", values) for name, values in arrays.items()})))

    def apply_ghosts(self, il: int, inputs: np.ndarray, experts: np.ndarray, n_out: int) -> np.ndarray:
        """What ghosts give: float32[n, n_out] for router inputs float32[n, n_in] of experts int32[n].

        PyorchError for an expert that has none.
        """
        inputs, experts = np.ascontiguousarray(inputs, np.float32), np.ascontiguousarray(experts, np.int32)
        outputs = np.empty((len(experts), n_out), np.float32)
        check(lib.pyorch_apply_ghosts(self.handle, il, array("float[]", inputs), array("int32_t[]", experts),
                                      len(experts), array("float[]", outputs)))
        return outputs

    def set_cache(self, il: int, mask: np.ndarray | None) -> None:
        """Substitution takes exactly the experts of mask, bool[n_expert], for resident; None: those that are."""
        raw = None if mask is None else np.ascontiguousarray(mask, np.uint8)
        check(lib.pyorch_set_cache(self.handle, il, array("uint8_t[]", raw), 0 if raw is None else raw.size))

    def simulate_cache(self, read_layers: float, seed: int = 0) -> None:
        """From now on substitution takes for resident what would be in a cache with the engine's budget and policy, in
        simulated time, empty at first.

        read_layers: so many times as long as a layer of a token computes, an expert is read. seed: 0: reads take their
        bytes' time; else from half to one and a half of it. REQUIRES: nothing is being decoded.
        """
        check(lib.pyorch_simulate_cache(self.handle, 1, read_layers, seed))
        self.simulates_cache = True

    def end_simulated_cache(self) -> None:
        """What is resident counts as that again."""
        check(lib.pyorch_simulate_cache(self.handle, 0, 0, 0))
        self.simulates_cache = False

    def fill_simulated_cache(self, il: int, experts: Iterable[int]) -> None:
        """These come into the simulated cache at once, as far as its budget reaches."""
        ids = np.ascontiguousarray(experts, np.int32)
        check(lib.pyorch_fill_simulated_cache(self.handle, il, array("int32_t[]", ids), len(ids)))

    def simulated_stats(self, il: int = -1) -> Stats:
        """Of the simulated cache, as stats(). PyorchError where there is none."""
        raw = new("pyorch_stats")
        check(lib.pyorch_get_simulated_stats(self.handle, il, raw))
        return read(Stats, raw)

    def substitute(
        self, routing: Routing, resident: np.ndarray, normalized: bool = False, softmax_selected: bool = False
    ) -> tuple[np.ndarray, np.ndarray, SubstitutionStats]:
        """What substitution would make of a routing while just these experts are resident, bool[n_expert].

        Changes and counts nothing. normalized, softmax_selected: how the model makes weights of probabilities.
        Returns experts, weights and what was done.
        """
        (n_tokens, n_expert_used), n_expert = routing.experts.shape, routing.probs.shape[1]
        names = ("weights", "probs", "logits")
        arrays = {name: np.ascontiguousarray(getattr(routing, name), np.float32) for name in names}
        given = np.ascontiguousarray(routing.experts, np.int32)
        raw = default(
            "pyorch_routing", il=routing.il, n_tokens=n_tokens, n_expert_used=n_expert_used, n_expert=n_expert,
            experts=array("int32_t[]", given), **{name: array("float[]", values) for name, values in arrays.items()},
        )
        mask = np.ascontiguousarray(resident, np.uint8)
        experts, weights = np.empty_like(given), np.empty_like(arrays["weights"])
        counts = new("pyorch_substitution_counts")
        check(
            lib.pyorch_substitute(
                self.handle, raw, array("uint8_t[]", mask), normalized, softmax_selected,
                array("int32_t[]", experts), array("float[]", weights), counts,
            )
        )
        return experts, weights, read(SubstitutionStats, counts)

    def substitution_stats(self, il: int = -1) -> SubstitutionStats:
        """Of one layer, or of all of them (-1). Zeroed by reset_stats()."""
        raw = new("pyorch_substitution_counts")
        check(lib.pyorch_get_substitution_counts(self.handle, il, raw))
        return read(SubstitutionStats, raw)
