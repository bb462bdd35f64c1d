"""Packs whose matrices are stored as a test wants, whatever trial would choose."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyorch.convert import compression
from pyorch.convert import pack as packing
from pyorch.convert.compression import Choice, Scheme
from pyorch.runtime.model_map import LayerInfo

IN_PLANES = Scheme("table", n_shards=1)
WHOLE = Scheme("zstd", level=1)


def pack_with(scheme_of, model: Path) -> Path:
    """The pack beside a model; scheme_of: LayerInfo -> Scheme of all matrices of a layer."""
    def choose(model_map, *_: object, **__: object) -> Choice:
        return Choice(tuple(scheme_of(layer) for layer in model_map.layers for _ in layer.roles), (), "")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(compression, "choose", choose)
        return packing.pack(model, codec="table").path


def all_but_the_first(layer: LayerInfo) -> Scheme:
    """Layers that are not compressed, beside others."""
    return IN_PLANES if layer.il > 0 else Scheme()
