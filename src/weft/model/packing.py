"""Between saved layer states and plain host data: a block or a checkpoint becomes bytes and a description, and back, bit for bit.

Any cache object is taken by its attributes, so no class of mlx-lm is known by name here; coming back, the model's own fresh
caches are the patterns, and a name in a file never chooses a class. `engine` uses it; files are `memory/disk_files.py`'s.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from weft.errors import UnsupportedModel
from weft.memory.disk_files import Damaged, Packed, StoredArray
from weft.model.adapter import Saved

TYPES: dict[str, mx.Dtype] = {
    "BOOL": mx.bool_,
    "U8": mx.uint8,
    "I8": mx.int8,
    "U16": mx.uint16,
    "I16": mx.int16,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "U32": mx.uint32,
    "I32": mx.int32,
    "F32": mx.float32,
    "U64": mx.uint64,
    "I64": mx.int64,
    "F64": mx.float64,
    "C64": mx.complex64,
}
NAMES = {dtype: name for name, dtype in TYPES.items()}

# In a description a dict is always one of ours: {"array": its plane}, {"tuple": [...]} or {"class": ..., "attributes": {...}}.
Described = Any  # whatever JSON holds


def pack(saved: Saved) -> Packed:
    """Layer states as host data. Arrays are not copied where the host can read them; another thread may, without mlx."""
    planes: list[StoredArray] = []
    layers = [_describe_layer(layer, str(index), planes) for index, layer in enumerate(saved.layers)]
    return Packed(json.dumps(layers), tuple(planes))


def unpack(packed: Packed, like: Sequence[Any]) -> Saved:
    """Layer states from host data; `like` are fresh caches of the same model, one for each place."""
    arrays = {plane.name: _array(plane) for plane in packed.planes}
    layers = json.loads(packed.description)
    if len(layers) != len(like):
        raise Damaged(f"it has the states of {len(layers)} layers where the model has {len(like)}")
    restored = [_restore_layer(layer, pattern, arrays) for layer, pattern in zip(layers, like, strict=True)]
    mx.eval(list(arrays.values()))  # sync: the host data must not be needed any more
    return Saved(restored)


def _describe_layer(layer: Any, place: str, planes: list[StoredArray]) -> Described:
    if layer is None or type(layer) is tuple:
        return _describe(layer, place, planes)
    if not hasattr(layer, "__dict__"):
        raise UnsupportedModel(f"a {type(layer).__name__} can not be kept on disk: it has no attributes to read")
    attributes = {name: _describe(value, f"{place}.{name}", planes) for name, value in vars(layer).items()}
    return {"class": type(layer).__name__, "attributes": attributes}


def _describe(value: Any, place: str, planes: list[StoredArray]) -> Described:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (list, tuple):
        items = [_describe(item, f"{place}.{index}", planes) for index, item in enumerate(value)]
        return items if type(value) is list else {"tuple": items}
    if isinstance(value, mx.array):
        planes.append(_plane(place, value))
        return {"array": place}
    raise UnsupportedModel(f"a layer's state can not be kept on disk: {place} is a {type(value).__name__}")


def _restore_layer(layer: Described, pattern: Any, arrays: dict[str, mx.array]) -> Any:
    if not isinstance(layer, dict) or "class" not in layer:
        return _restore(layer, arrays)
    if layer["class"] != type(pattern).__name__:
        raise Damaged(f"it has the states of a {layer['class']} where the model has a {type(pattern).__name__}")
    cache = copy.copy(pattern)
    vars(cache).clear()
    vars(cache).update({name: _restore(value, arrays) for name, value in layer["attributes"].items()})
    return cache


def _restore(value: Described, arrays: dict[str, mx.array]) -> Any:
    match value:
        case {"array": name}:
            return arrays[name]
        case {"tuple": items}:
            return tuple(_restore(item, arrays) for item in items)
        case list():
            return [_restore(item, arrays) for item in value]
        case _:
            return value


def _plane(name: str, array: mx.array) -> StoredArray:
    array = copy.copy(array)  # a handle of our own: the buffer lives as long as the view, whatever happens to the other
    if array.size == 0:
        return StoredArray(name, NAMES[array.dtype], array.shape, b"")
    view = memoryview(array)  # type: ignore[arg-type]  # sync: evaluates it, if it was not
    if not view.c_contiguous:
        view = memoryview(mx.contiguous(array))  # type: ignore[arg-type]
    return StoredArray(name, NAMES[array.dtype], array.shape, view.cast("B"))


def _array(plane: StoredArray) -> mx.array:
    dtype = TYPES.get(plane.dtype)
    if dtype is None or len(plane.data) != math.prod(plane.shape) * dtype.size:
        raise Damaged(f"{plane.name} is no {plane.dtype} array of shape {plane.shape}")
    if not plane.data:
        return mx.zeros(plane.shape, dtype)
    return mx.array(np.frombuffer(plane.data, np.uint8)).view(dtype).reshape(plane.shape)
