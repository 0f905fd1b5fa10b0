"""Layer states of one row: copied out of mlx-lm's caches, put back into fresh ones, and packed as host data for the disk tier."""

import copy
import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache

from weft.errors import UnsupportedModel
from weft.memory.disk_files import Damaged, Packed, StoredArray
from weft.memory.spec import KeyValues
from weft.memory.transfer import ON_CUDA

LayerCaches = list[Any]  # mlx-lm's own cache objects, one per layer, for one row

TYPES: dict[str, mx.Dtype] = {
    "BOOL": mx.bool_, "U8": mx.uint8, "I8": mx.int8, "U16": mx.uint16, "I16": mx.int16, "F16": mx.float16, "BF16": mx.bfloat16,
    "U32": mx.uint32, "I32": mx.int32, "F32": mx.float32, "U64": mx.uint64, "I64": mx.int64, "F64": mx.float64,
    "C64": mx.complex64,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in TYPES.items()}


@dataclass(frozen=True)
class SavedState:
    """A copy of one row's layer states: contiguous arrays, evaluated or started, that keep no other buffer alive."""

    layers: list[Any]  # of a block: (keys, values) or None; of a checkpoint: a cache object or None

    def __post_init__(self) -> None:
        # A lazy slice would keep the whole buffer, a lazy view the host data. A GPU may copy while the next step is built.
        (mx.async_eval if ON_CUDA else mx.eval)(self.arrays)  # sync: not on CUDA

    @property
    def arrays(self) -> list[mx.array]:
        present = [layer for layer in self.layers if layer is not None]
        return [array for layer in present for array in (layer if isinstance(layer, tuple) else arrays_of(layer))]

    @functools.cached_property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def split(self, count: int) -> tuple[Self, Self]:
        """Split a block, keys and values only, after its first `count` tokens."""

        def part(place: slice) -> list[Any]:
            return [None if pair is None else tuple(_own(plane[..., place, :]) for plane in pair) for pair in self.layers]

        return type(self)(part(slice(None, count))), type(self)(part(slice(count, None)))


def leaves(caches: Sequence[Any]) -> Iterator[Any]:
    """Yield a row's caches one by one, each CacheList replaced by the caches inside it."""
    for cache in caches:
        yield from cache.caches if type(cache) is CacheList else (cache,)


def arrays_of(cache: Any) -> list[mx.array]:
    """Return every array that a cache object of any class holds in its attributes, directly or in a list or tuple."""
    held = [value if isinstance(value, list | tuple) else [value] for value in vars(cache).values()]
    return [array for values in held for array in values if isinstance(array, mx.array)]


def save_block(caches: LayerCaches, start: int, end: int) -> SavedState:
    """Copy the keys and values of a row's tokens [start, end) in its KVCache layers; other layers are None."""
    held: list[Any] = [(cache.keys, cache.values) if type(cache) is KVCache else (None, None) for cache in leaves(caches)]
    return SavedState([None if pair[0] is None else tuple(_own(plane[..., start:end, :]) for plane in pair) for pair in held])


def save_checkpoint(caches: LayerCaches) -> SavedState:
    """Copy the current states of all layers but KVCache ones: recurrent states and sliding windows."""
    layers: list[Any] = [None if type(cache) is KVCache else copy.copy(cache) for cache in leaves(caches)]
    for layer in layers:
        if type(layer) is ArraysCache:
            layer.cache = [None if array is None else _own(array) for array in layer.cache]
        elif layer is not None and layer.keys is not None:
            layer.keys, layer.values = _own(layer.keys), _own(layer.values)
    return SavedState(layers)


def _own(array: mx.array) -> mx.array:
    """Copy an array into a buffer of its own; `mx.contiguous` would leave an already contiguous slice in its old buffer."""
    return mx.where(mx.array(True), array, array)


def restore(caches: LayerCaches, blocks: Sequence[object], checkpoint: object | None) -> LayerCaches:
    """Fill a row's fresh caches with saved blocks and the checkpoint at their end; returns the caches."""
    if not blocks:
        return caches
    assert isinstance(checkpoint, SavedState)
    layers = [block.layers for block in blocks if isinstance(block, SavedState)]
    assert len(layers) == len(blocks)
    saved = zip(checkpoint.layers, *layers, strict=True)

    def fill(cache: Any) -> Any:
        state, *pairs = next(saved)
        if state is not None:
            return copy.deepcopy(state)  # shares the arrays until one side writes
        if pairs[0] is not None:
            cache.offset = sum(keys.shape[2] for keys, _ in pairs)
            cache.keys, cache.values = (_joined(planes, cache.step) for planes in zip(*pairs, strict=True))
        return cache

    for index, cache in enumerate(caches):
        if type(cache) is CacheList:
            cache.caches = type(cache.caches)(map(fill, cache.caches))
        else:
            caches[index] = fill(cache)
    return caches


def _joined(planes: Sequence[mx.array], num_tokens: int) -> mx.array:
    """Concatenate KV blocks and pad them to `num_tokens`, so that later tokens are written without another copy."""
    batch, heads, _, width = planes[0].shape
    left = num_tokens - sum(plane.shape[2] for plane in planes)
    return mx.concatenate([*planes, mx.zeros((batch, heads, left, width), planes[0].dtype)], axis=2)


def let_go(caches: LayerCaches) -> None:
    """Leave a row's keys and values, as far as they are those of KVCache layers, to whoever has their arrays now."""
    for cache in leaves(caches):
        if type(cache) is KVCache:
            cache.keys = cache.values = None


def take_back(caches: LayerCaches, layers: Mapping[int, KeyValues]) -> None:
    """Give caches that `let_go` of their arrays these, by layer, which hold the same tokens and maybe further ones."""
    for layer, cache in enumerate(leaves(caches)):
        if layer in layers:
            cache.keys, cache.values = layers[layer].keys, layers[layer].values


def move_end(caches: LayerCaches, by: int) -> None:
    """Let a row's KVCache layers end so many tokens later, which their arrays must hold, or earlier; others must be empty."""
    for cache in leaves(caches):
        if type(cache) is KVCache:
            cache.offset += by


def pack(saved: SavedState) -> Packed:
    """Convert layer states to host data, bit for bit, without copying what the host can read; threads without mlx may read it."""
    arrays: list[StoredArray] = []
    layers = [_describe(layer, str(index), arrays) for index, layer in enumerate(saved.layers)]
    return Packed(json.dumps(layers), tuple(arrays))


def _describe(value: Any, place: str, arrays: list[StoredArray]) -> Any:
    """Convert a layer, or a value in it, to JSON data; its arrays are appended to `arrays` and named by their place."""
    # A dict is always one of ours: {"array": its name}, {"tuple": [...]} or {"class": ..., "attributes": {...}}.
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (list, tuple):
        items = [_describe(item, f"{place}.{index}", arrays) for index, item in enumerate(value)]
        return items if type(value) is list else {"tuple": items}
    if isinstance(value, mx.array):
        # The view holds an array of its own on the same buffer, so the bytes stay whatever happens to the other one.
        data = memoryview(mx.contiguous(value)).cast("B") if value.size else b""  # type: ignore[arg-type]  # sync: evaluates it
        arrays.append(StoredArray(place, NAMES[value.dtype], value.shape, data))
        return {"array": place}
    if place.isdigit() and hasattr(value, "__dict__"):
        attributes = {name: _describe(inner, f"{place}.{name}", arrays) for name, inner in vars(value).items()}
        return {"class": type(value).__name__, "attributes": attributes}
    raise UnsupportedModel(f"a layer's state can not be kept on disk: {place} is a {type(value).__name__}")


def unpack(packed: Packed, like: LayerCaches) -> SavedState:
    """Convert host data back to layer states; `like`: fresh caches of the same model. Raises Damaged if they do not fit."""
    arrays = {stored.name: _array(stored) for stored in packed.planes}
    layers, patterns = json.loads(packed.description), list(leaves(like))
    if len(layers) != len(patterns):
        raise Damaged(f"it has the states of {len(layers)} layers where the model has {len(patterns)}")
    restored = [_restore(layer, arrays, pattern) for layer, pattern in zip(layers, patterns, strict=True)]
    for index, (layer, pattern) in enumerate(zip(restored, patterns, strict=True)):
        if type(pattern) is KVCache and layer is not None and not _is_block(layer):
            raise Damaged(f"layer {index} has no keys and values of shape (1, heads, tokens, dim)")
    return SavedState(restored)


def _is_block(layer: Any) -> bool:
    """Whether this is one row's keys and values, (1, heads, tokens, dim) each, of the same number of tokens."""
    shapes = [plane.shape for plane in layer if isinstance(plane, mx.array)] if isinstance(layer, tuple) else []
    return len(shapes) == len(layer) == 2 and all(len(one) == 4 and one[0] == 1 and one[2] == shapes[0][2] for one in shapes)


def _array(stored: StoredArray) -> mx.array:
    dtype = TYPES.get(stored.dtype)
    if dtype is None or len(stored.data) != math.prod(stored.shape) * dtype.size:
        raise Damaged(f"{stored.name} is no {stored.dtype} array of shape {stored.shape}")
    if not stored.data:
        return mx.zeros(stored.shape, dtype)
    return mx.array(np.frombuffer(stored.data, np.uint8)).view(dtype).reshape(stored.shape)


def _restore(value: Any, arrays: dict[str, mx.array], pattern: Any = None) -> Any:
    """Rebuild the layer or value that `_describe` converted; a layer is a copy of `pattern` with the described attributes."""
    match value:
        case {"class": name, "attributes": attributes}:
            if name != type(pattern).__name__:
                raise Damaged(f"it has the states of a {name} where the model has a {type(pattern).__name__}")
            cache = copy.copy(pattern)  # never of a class that a name in a file chooses
            cache.__dict__ = {name: _restore(inner, arrays) for name, inner in attributes.items()}
            return cache
        case {"array": name}:
            return arrays[name]
        case {"tuple": items}:
            return tuple(_restore(item, arrays) for item in items)
        case list():
            return [_restore(item, arrays) for item in value]
    return value
