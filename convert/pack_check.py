"""Whether a pack holds the experts of its model: every byte is compared."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path

import numpy as np

from pyorch.convert import compression
from pyorch.convert.pack_plan import Experts, checksum, chunks_of, forget, layouts_of
from pyorch.errors import FormatError
from pyorch.library import codecs
from pyorch.runtime.model_map import ModelMap, Role
from pyorch.sidecars import container, packs

OnProgress = Callable[[str, int, int], None]  # "checking", bytes done, total


@dataclass(frozen=True)
class Check:
    """What a pack was found to be. damaged: experts whose bytes are not those of the model."""

    path: Path
    n_layers: int
    n_experts: int
    n_bytes: int
    damaged: tuple[str, ...]
    seconds: float


def check(
    model: str | os.PathLike[str], path: str | os.PathLike[str] | None = None, *, layout: str | None = None,
    on_progress: OnProgress | None = None,
) -> Check:
    """Compares every byte of every expert in a pack with the model, and with the checksums; of a slim model's pack,
    which alone has the bytes, with the checksums only, and decodes what is compressed.

    Raises FormatError for a pack that engines would refuse: of another model, or damaged where it says what is where;
    and for one in another layout, if one is asked for.
    """
    begin = time.monotonic()
    path = Path(path or container.default_path(model, packs.KIND)).absolute()
    with ModelMap(model) as model_map, ModelMap(model) as attached:
        metadata, arrays = packs.read(path, model_map)
        attached.attach_pack(path)  # which checks the index
        if layout is not None and metadata[packs.LAYOUTS] != layouts_of(model_map, layout):
            raise FormatError(f"{path} does not hold the experts in the {layout} layout: make it again with --layout "
                              f"{layout}, or check it without")
        damaged, n_done, n_experts, total = [], 0, 0, model_map.info.expert_bytes
        with ExitStack() as stack:
            file, packed = stack.enter_context(path.open("rb", buffering=0)), stack.enter_context(ModelMap(path))
            experts = None if model_map.info.slim else stack.enter_context(Experts(model_map, metadata[packs.LAYOUTS]))
            for layer in model_map.layers:
                for (expert, role), rows in chunks_of(arrays, packed, layer).items():
                    n_bytes = model_map.matrix_bytes(layer, role)
                    expected = None if experts is None else experts.read(layer, expert, role)
                    parts = _damaged_parts(list(rows), partial(_stored, file), expected, layer.roles[role], n_bytes)
                    damaged += [f"{part}expert {expert} of blk.{layer.il}.ffn_{layer.roles[role].name}_exps"
                                for part in parts]
                    n_done += n_bytes
                    if on_progress is not None:
                        on_progress("checking", n_done, total)
                n_experts += layer.n_expert
    return Check(path, len(model_map.layers), n_experts, path.stat().st_size, tuple(damaged), time.monotonic() - begin)


def _stored(file: FileIO, row: np.void) -> np.ndarray:
    """uint8[bytes of a chunk], fewer where the disk does not give them. Read, not mapped: of a page that cannot be had
    the process would die."""
    try:
        content = os.pread(file.fileno(), int(row["stored"]), int(row["offset"]))
        forget(file.fileno(), int(row["offset"]), len(content))
    except OSError:
        content = b""
    return np.frombuffer(content, np.uint8)


def _damaged_parts(
    rows: list[np.void], stored: Callable[[np.void], np.ndarray], expected: np.ndarray | None, role: Role, n_bytes: int
) -> list[str]:
    """What of a matrix is not as in the model, as words to stand before the name of its expert.

    rows: its chunks, by plane; stored: reads the bytes of one; expected: the matrix, uint8[n_bytes], None if only the
    pack has it.
    """
    contents = [stored(row) for row in rows]
    damaged = [row["plane"] for row, chunk in zip(rows, contents) if checksum(chunk) != row["checksum"]]
    if not damaged:
        try:
            chunks = [(codecs.NAMES[row["codec"]], chunk) for row, chunk in zip(rows, contents)]
            matrix = compression.decode_matrix(chunks, role, n_bytes)
            return [] if expected is None or np.array_equal(matrix, expected) else [""]
        except FormatError:
            return [""]
    return ["" if plane == 0 else f"shard {plane} of the exponents of " if plane < len(rows) else
            "signs and mantissas of " for plane in damaged]
