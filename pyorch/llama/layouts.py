"""Decides whether experts are repacked for faster kernels: the time per token that it costs and saves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from pyorch.errors import PyorchError
from pyorch.llama.facts import Facts, Header
from pyorch.settings.kernels import AUTO, PLAIN, REPACKED
from pyorch.settings.settings import Settings
from pyorch.sizes import MiB, format_bytes

_LAYOUT = "plain"  # Role.layout of a matrix that is never repacked

# Repacking fewer bytes takes less than about 3 ms of a token. Experts have llama.cpp's default order then.
_LEAST_BYTES = 16 * MiB


@dataclass(frozen=True)
class LayoutRates:
    """Processor time of a matrix in nanoseconds per byte, as pyorch_layout_rates in pyorch.h.

    Attributes:
        repacking: Of repacking a matrix after reading it.
        plain, repacked: Of a product with one input, and with n_inputs.
        n_inputs: Inputs of the second product.
    """

    repacking: float
    plain: tuple[float, float]
    repacked: tuple[float, float]
    n_inputs: float

    def plain_cost(self) -> float:
        """Returns the time per byte of an expert that a decoded token uses, and as much for a prompt.

        A request's prompt is assumed to be as long as its answer.
        """
        return self.plain[0] + self.plain[1] / self.n_inputs

    def repacked_cost(self, missed: float) -> float:
        """Returns the same time if this share of the uses are misses, which repack the matrix."""
        of_prompt = self.repacked[1] + missed * self.repacking
        return self.repacked[0] + missed * self.repacking + of_prompt / self.n_inputs


def expected_misses(share: float) -> float:
    """Estimates the share of misses among the uses of experts, if memory holds this share of the experts.

    The cube gives 42, 22 and 6 % at 25, 40 and 60 %. With the policy "learned", routes of gpt-oss-20b miss 26, 12 and
    3 %, and the text and the short questions of docs/measurements/eviction.md miss 37 to 40, 22 to 27 and 9 to 16 %.
    """
    return (1 - min(1.0, share)) ** 3


def missed_bytes(header: Header, missed: float) -> float:
    """Returns the bytes of matrices that a token misses and that can be repacked."""
    return missed * sum(
        layer.n_expert_used * layer.expert_bytes * sum(_weight(role.name) for role in layer.roles
                                                       if role.layout != _LAYOUT)
        / sum(_weight(role.name) for role in layer.roles)
        for layer in header.layers)


def _weight(role: str) -> int:
    """Returns the relative size of a matrix within an expert."""
    return 2 if role == "gate_up" else 1


@dataclass(frozen=True)
class Layout:
    """The layout of all experts of a model, and the reason for it."""

    plain: bool
    why: str

    def __str__(self) -> str:
        return f"{PLAIN if self.plain else REPACKED}: {self.why}"


def choose_layout(
    settings: Settings, header: Header, expected: Callable[[], int], packed: bool, facts: Facts
) -> Layout | None:
    """Chooses the layout of experts. All layers have the same layout until the model is freed.

    Args:
        settings: The user's settings.
        header: The model, with the pack if experts are read from it.
        expected: Returns the budget that the experts will have, in bytes.
        packed: Experts are read from the pack.
        facts: facts.layout_rates(il, role) are rates that this machine measured once, so that each start chooses alike.
            Text if measuring failed.

    Returns:
        None if there is no choice for the model.

    Raises:
        Unknown: A fact is missing.
    """
    matrices = Counter({(role.type, role.n_in): layer.n_expert * _weight(role.name)
                        for layer in header.layers for role in layer.roles if role.layout != _LAYOUT})
    if not matrices:
        return None
    if settings.kernels != AUTO:
        return Layout(settings.kernels == PLAIN, f"--kernels {settings.kernels}")
    if facts.request.placed:
        return Layout(False, "all servers of a cluster use the same kernels")
    missed = expected_misses(expected() / max(1, header.info.slots_bytes))
    n_bytes = missed_bytes(header, missed)
    if n_bytes < _LEAST_BYTES:
        return Layout(False, f"a token misses about {format_bytes(round(n_bytes))}")
    if packed and facts.is_native():
        return Layout(False, "the pack has them so")
    wanted = matrices.most_common(1)[0][0]
    at = next((layer.il, index) for layer in header.layers for index, role in enumerate(layer.roles)
              if (role.type, role.n_in) == wanted)
    rates = facts.layout_rates(*at)
    if isinstance(rates, str):
        return Layout(False, f"the rates of plain experts are unknown: {rates}")
    plain, repacked = rates.plain_cost(), rates.repacked_cost(missed)
    less, more = sorted((plain, repacked))
    return Layout(plain < repacked, f"with about {missed:.0%} misses the other order takes {more / less - 1:.0%} more "
                                    "processor time")


def check_layout(settings: Settings, facts: Facts, has_devices: bool) -> None:
    """Raises PyorchError if the settings ask for repacked experts, and this is impossible."""
    if settings.kernels != REPACKED or not facts.header.layers:
        return
    if has_devices:
        raise PyorchError("--kernels repacked is for experts that the processor alone computes, and devices need them "
                          "plain: leave out --kernels or --device")
    if not facts.request.repacks:
        raise PyorchError("--kernels repacked repacks experts, and --no-repack (use_extra_bufts=False in Python) "
                          "forbids it: leave out one of them")
