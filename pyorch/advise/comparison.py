"""Compares the files of a repository, and recommends one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pyorch.advise.machine import Compute

# A rule of thumb: with fewer bits answers get worse, and more bits than those of Q8_0 gain little. 4.25: MXFP4, IQ4_XS.
LEAST_BITS, MOST_BITS = 4.25, 8.6
READING_RATE = 10.0  # tokens a second; few people read faster

MEASURED, SCALED, GIVEN = "measured", "scaled", "as given"


@dataclass(frozen=True)
class Choice:
    """A file, or a conversion, and its estimate at one budget.

    Attributes:
        name: The name for commands, or the type of a conversion.
        n_bytes: Of the file.
        bits: Of a weight, on average.
        missing_bytes: Bytes that are not on this machine yet.
        budget_bytes: Memory for experts. None: the model does not fit.
        all_in_memory: The budget has room for all experts, so none is read while the model runs.
        decode_rate: Tokens a second. None: unknown, or the model does not fit.
        computing: The origin of the time to compute: "measured", "scaled" by the weights that a token reads, or "as
            given". "": there is no estimate.
    """

    name: str
    n_bytes: int
    bits: float
    missing_bytes: int
    budget_bytes: int | None = None
    all_in_memory: bool = False
    decode_rate: float | None = None
    first_token_seconds: float | None = None
    computing: str = ""


def recommend(choices: Sequence[Choice], free_bytes: int) -> tuple[Choice, str] | None:
    """Returns the recommended choice and the reason.

    It is the file with the most bits a weight that decodes at READING_RATE. If none is as fast, it is the fastest one
    with enough bits.

    Args:
        choices: The choices. Those without an estimate are not recommended.
        free_bytes: Of the disk.

    Returns:
        None if no choice has an estimate.
    """
    known = [one for one in choices if one.decode_rate is not None]
    if not known:
        return None
    stored = [one for one in known if one.missing_bytes <= free_bytes]
    but = "" if stored else "; none fits on the disk"
    those, usual = stored or known, f"{LEAST_BITS:g} to 8.5 bits a weight"
    good = [one for one in those if LEAST_BITS <= one.bits <= MOST_BITS]
    fast = [one for one in good if one.decode_rate >= READING_RATE]
    few = [one for one in those if one.bits < LEAST_BITS]
    if fast:
        up_to = ", up to those of Q8_0," if any(one.bits > MOST_BITS for one in those) else ""
        why = f"it has the most bits a weight{up_to} of all that reach {READING_RATE:.0f} tok/s"
    elif good:
        why = f"none reaches {READING_RATE:.0f} tok/s, and it is the fastest with {usual}"
    elif few:
        why = f"none has {usual}, and it has the most below"
    else:
        why = "all have more bits a weight than Q8_0, and it is the fastest"
    bits = [(one.bits, one.decode_rate, one) for one in fast or ([] if good else few)]
    best = max(bits, key=lambda each: each[:2])[2] if bits else max(good or those, key=lambda one: one.decode_rate)
    return best, why + but


def settled(
    choices: Sequence[Choice], free_bytes: int, measure: Callable[[int], Choice]
) -> tuple[list[Choice], int, str] | None:
    """Recommends a choice whose computing was measured, and measures as few as that needs.

    Args:
        choices: The choices, with scaled times to compute.
        free_bytes: Of the disk.
        measure: Returns the choice of an index with a measured time.

    Returns:
        The choices, the index of the recommended one, and the reason. None: as recommend().
    """
    choices = list(choices)
    while (found := recommend(choices, free_bytes)) is not None:
        index = choices.index(found[0])
        if choices[index].computing != SCALED:
            return choices, index, found[1]
        choices[index] = measure(index)
    return None


def scaled(compute: Compute, weights: float, of_weights: float) -> Compute:
    """Returns the time to compute a model that reads `weights` bytes for a token, from that of another model.

    A prompt is bound by multiplications, which stay the same.
    """
    return replace(compute, decode_seconds=compute.decode_seconds * weights / of_weights)

