"""The types of a GGUF, by the names of llama.cpp's tools."""

from __future__ import annotations

from dataclasses import dataclass

from pyorch.errors import PyorchError


@dataclass(frozen=True)
class FileType:
    """A llama_ftype: a recipe that gives every tensor its ggml type."""

    name: str  # LLAMA_FTYPE_MOSTLY_<name>, or LLAMA_FTYPE_ALL_F32
    value: int  # of the enum llama_ftype in llama.h
    bits_per_weight: float  # of the recipe's largest tensors, for estimates of size
    is_made: bool = True  # by llama.cpp's quantizer; only a converter writes the others


_TYPES = (
    FileType("F32", 0, 32), FileType("F16", 1, 16), FileType("BF16", 32, 16),
    FileType("Q8_0", 7, 8.5), FileType("Q6_K", 18, 6.6),
    FileType("Q5_0", 8, 5.6), FileType("Q5_1", 9, 6.1), FileType("Q5_K_S", 16, 5.6), FileType("Q5_K_M", 17, 5.8),
    FileType("Q4_0", 2, 4.7), FileType("Q4_1", 3, 5.2), FileType("Q4_K_S", 14, 4.8), FileType("Q4_K_M", 15, 5.0),
    FileType("IQ4_NL", 25, 4.7), FileType("IQ4_XS", 30, 4.5), FileType("MXFP4_MOE", 38, 4.6),
    FileType("NVFP4", 39, 4.7, is_made=False),
    FileType("Q3_K_S", 11, 3.8), FileType("Q3_K_M", 12, 4.1), FileType("Q3_K_L", 13, 4.4),
    FileType("IQ3_XXS", 23, 3.4), FileType("IQ3_XS", 22, 3.6), FileType("IQ3_S", 26, 3.7), FileType("IQ3_M", 27, 3.9),
    FileType("Q2_K", 10, 3.4), FileType("Q2_K_S", 21, 3.2), FileType("Q2_0", 41, 2.6),
    FileType("IQ2_XXS", 19, 2.5), FileType("IQ2_XS", 20, 2.7), FileType("IQ2_S", 28, 2.8), FileType("IQ2_M", 29, 3.0),
    FileType("IQ1_S", 24, 2.0), FileType("IQ1_M", 31, 2.2),
    FileType("TQ1_0", 36, 2.1), FileType("TQ2_0", 37, 2.5), FileType("Q1_0", 40, 1.6),
)

# The short names of llama.cpp's quantizer.
_ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M", "MXFP4": "MXFP4_MOE"}

# The types that the converter writes. auto: bf16 or f16, as in the checkpoint.
OUTTYPES = ("auto", "bf16", "f16", "f32", "q8_0")
_OUTTYPE_BITS = {"auto": 16, "bf16": 16, "f16": 16, "f32": 32, "q8_0": 8.5}


def names() -> tuple[str, ...]:
    """Returns the types that the quantizer makes."""
    return tuple(sorted(kind.name for kind in _TYPES if kind.is_made))


def file_type(name: str) -> FileType:
    """Returns the type with a name, in upper or lower case. PyorchError: there is none."""
    wanted = _ALIASES.get(name.upper(), name.upper())
    for kind in _TYPES:
        if kind.name == wanted and kind.is_made:
            return kind
    raise PyorchError(f"{name} is not a quantization type: use one of {', '.join(names())}")


def by_value(value: int) -> FileType:
    """Returns the type with a number in llama.h. REQUIRES: llama.cpp's converter wrote it."""
    return next(kind for kind in _TYPES if kind.value == value)


def outtype_bits(outtype: str) -> float:
    """Returns the bits of each element as the converter writes it. PyorchError: the type is unknown."""
    if outtype not in _OUTTYPE_BITS:
        raise PyorchError(f"{outtype} is not a type that the converter writes: use one of {', '.join(OUTTYPES)} "
                          "and, for others, --quantize")
    return _OUTTYPE_BITS[outtype]
