"""Expert maps: routers' decisions of past iterations, for the predictor that searches them.

An iteration is one token on its way through all layers: the output of the embedding layer and the distribution of
each router (FineMoE, section 4.1). `pyorch maps` makes them of a trace and writes the sidecar model.maps.gguf.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from pyorch.errors import FormatError, PyorchError
from pyorch.library.bindings import array, call, check, ffi, lib
from pyorch.runtime.model_map import ModelMap
from pyorch.sidecars import container

KIND = "maps"
VERSION = 1

# FineMoE keeps 1000 iterations, at distances from 3 to 6 (section 6.7).
CAPACITY, DISTANCE = 1000, 3


@dataclass(frozen=True)
class Contents:
    """A copy of a store, with its layers in its order."""

    embeddings: np.ndarray  # float32[n, n_embd]; 0 for an iteration without one
    maps: np.ndarray  # float32[n, n_layers, n_expert]
    uses: np.ndarray  # float32[n_layers, n_expert]


class ExpertMaps:
    """A store of past iterations, which an engine may share and extend.

    Args:
        n_layers: Layers of a map.
        n_expert: Experts of the widest layer; rows of others end with zeros.
        n_embd: Numbers of an embedding; 0: no embeddings.
        capacity: Iterations. In a full store a new one replaces the most redundant one (FineMoE, section 4.4).
        distance: Prefetch distance in layers: redundancy weighs the embeddings' similarity by d / L.

    Raises:
        PyorchError: A size is below 1.
    """

    def __init__(
        self, n_layers: int, n_expert: int, n_embd: int, capacity: int = CAPACITY, distance: int = DISTANCE
    ) -> None:
        made = call(lib.pyorch_history_new, n_layers, n_expert, n_embd, capacity, distance, out="pyorch_history *")[0]
        self.handle = ffi.gc(made, lib.pyorch_history_free)
        self.n_layers, self.n_expert, self.n_embd = n_layers, n_expert, n_embd
        self.capacity, self.distance = capacity, distance
        # float32: uses of each expert in the trace of the store. Engines do not change it.
        self.uses = np.zeros((n_layers, n_expert), np.float32)

    @classmethod
    def for_model(cls, model_map: ModelMap, capacity: int = CAPACITY, distance: int = DISTANCE) -> ExpertMaps:
        """Returns an empty store for the executed layers.

        Raises:
            PyorchError: The model has no routed experts.
        """
        layers = _layers(model_map)
        n_expert = max(layer.n_expert for layer in layers)
        return cls(len(layers), n_expert, _n_embd(model_map), capacity, distance)

    def __bool__(self) -> bool:
        """Whether the store has any iteration."""
        return self.n_maps > 0 or bool(self.uses.any())

    @property
    def n_maps(self) -> int:
        n_maps = ffi.new("int32_t *")
        check(lib.pyorch_history_size(self.handle, n_maps))
        return n_maps[0]

    def add(self, map: np.ndarray, embedding: np.ndarray | None = None) -> None:
        """Adds an iteration: [n_layers, n_expert], each row a distribution, and [n_embd].

        Raises:
            PyorchError: A shape differs, or a value is not finite.
        """
        map = _floats("map", map, (self.n_layers, self.n_expert))
        embedding = ffi.NULL if embedding is None else _floats("embedding", embedding, (self.n_embd,))
        check(lib.pyorch_history_add_map(self.handle, embedding, map))

    def export(self) -> Contents:
        n_maps = ffi.new("int32_t *", self.n_maps)
        embeddings = np.empty((n_maps[0], self.n_embd), np.float32)
        maps = np.empty((n_maps[0], self.n_layers, self.n_expert), np.float32)
        check(lib.pyorch_history_export(self.handle, array("float", embeddings), array("float", maps), n_maps))
        return Contents(embeddings, maps, self.uses)

    def write(self, path: str | os.PathLike[str], model_map: ModelMap) -> None:
        """Writes the sidecar, completely or not at all.

        Raises:
            PyorchError: The store is empty, or the file cannot be written.
        """
        contents = self.export()
        arrays = {name: values for name, values in vars(contents).items()
                  if values.size and (name != "uses" or values.any())}
        if not arrays:
            raise PyorchError(f"there are no expert maps to write into {os.fspath(path)}: nothing was added")
        metadata = {
            "layers": [layer.il for layer in _layers(model_map)], "capacity": self.capacity, "distance": self.distance,
        }
        container.write(path, KIND, VERSION, model_map, metadata, arrays)

    @classmethod
    def read(cls, path: str | os.PathLike[str], model_map: ModelMap) -> ExpertMaps:
        """Reads and checks a sidecar.

        Raises:
            FormatError: It is damaged, or cannot belong to this model.
        """
        file = container.Sidecar(path, KIND, VERSION, model_map)
        file.check_layers(_layers(model_map))
        sizes = [file.metadata.get(name) for name in ("capacity", "distance")]
        file.check(all(isinstance(size, int) and 1 <= size < 1 << 31 for size in sizes),
                   "it does not say what its maps were made for")
        store = cls.for_model(model_map, *sizes)

        def checked(name: str, most: int, *shape: int) -> np.ndarray:
            found = file.arrays.get(name)
            if found is None:
                return np.empty((0, *shape), np.float32)
            file.check(found.dtype == np.float32 and found.shape[1:] == shape and len(found) <= most,
                       f"{name} has the shape {list(found.shape)}, the model needs up to {most} of {list(shape)}")
            file.check(np.isfinite(found).all() and (name == "embeddings" or found.min() >= 0),
                       f"{name} has values that cannot be")
            return found

        shape = store.n_layers, store.n_expert
        maps = checked("maps", store.capacity, *shape)
        embeddings = checked("embeddings", store.capacity, store.n_embd)
        file.check(len(embeddings) == len(maps), f"it has {len(maps)} maps and {len(embeddings)} embeddings")
        try:
            for embedding, map in zip(embeddings, maps):
                store.add(map, embedding)
        except PyorchError as error:
            raise FormatError(f"{file.path}: {error}") from None
        name = "uses" if "uses" in file.arrays else "requests"  # old files have the uses of each request
        if name == "uses":
            file.arrays[name] = file.arrays[name][None]
        store.uses += checked(name, len(file.arrays.get(name, ())), *shape).sum(axis=0)
        return store


def token_embeddings(model_map: ModelMap, tokens: np.ndarray) -> np.ndarray:
    """Returns float32[n, n_embd]: rows of the token table, the outputs of the embedding layer up to a factor.

    It reads only these rows.

    Raises:
        PyorchError: A token does not exist, or the table cannot be dequantized.
        FormatError: The table cannot be read.
    """
    import gguf  # see pyorch.sidecars.container.new_writer

    where, n_embd = model_map.tensor_range(_TABLE), _n_embd(model_map)
    type_name = where.type
    kind = getattr(gguf.GGMLQuantizationType, type_name.upper(), None)
    block, block_bytes = gguf.GGML_QUANT_SIZES.get(kind, (1, 1))
    row_bytes = n_embd // block * block_bytes
    if kind is None or n_embd % block or where.size % row_bytes:
        raise FormatError(f"{where.path}: {_TABLE} of the type {type_name} has no rows of {n_embd} numbers")
    n_tokens = where.size // row_bytes
    tokens = np.asarray(tokens, np.int64)
    if not len(tokens):
        return np.empty((0, n_embd), np.float32)
    if not 0 <= tokens.min() <= tokens.max() < n_tokens:
        raise PyorchError(f"{model_map.path} has tokens from 0 to {n_tokens - 1}, not {tokens.min()} to {tokens.max()}")
    try:
        table = np.memmap(where.path, np.uint8, "r", where.offset, (n_tokens, row_bytes))
    except (OSError, ValueError) as error:
        raise FormatError(f"{where.path} cannot be read: {error}") from None
    wanted, rows = np.unique(tokens, return_inverse=True)
    try:
        return gguf.quants.dequantize(np.ascontiguousarray(table[wanted]), kind)[rows].astype(np.float32, copy=False)
    except NotImplementedError:
        raise PyorchError(f"{model_map.path}: {_TABLE} of the type {type_name} cannot be dequantized here") from None


_TABLE = "token_embd.weight"


def _layers(model_map: ModelMap):
    layers = model_map.decoded_layers
    if not layers:
        raise PyorchError(f"{model_map.path} has no routed experts, so there are no maps of them")
    return layers


def _n_embd(model_map: ModelMap) -> int:
    return model_map.hparam("embedding_length", 0)


def _floats(name: str, values: np.ndarray, shape: tuple[int, ...]):
    """Returns a pointer to floats.

    Raises:
        PyorchError: They have another shape.
    """
    if np.shape(values) != shape:
        raise PyorchError(f"{name} has the shape {list(np.shape(values))}, the store needs {list(shape)}")
    return array("float", values)
