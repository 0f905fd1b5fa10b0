"""Layer specs: shape, dtype and bytes of each layer's KV cache or recurrent state, fixed when the model is loaded.

A spec knows the bytes of a row and its exact geometry; arrays of any other geometry are refused.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

MAX_STEP_TOKENS = 8  # that one row may have in a decode step

Geometry = tuple[tuple[int, ...], mx.Dtype]  # a shape without the batch axis, and its numbers' type


@dataclass(frozen=True)
class Plane:
    """Geometry of one token's keys (or values) in one layer: heads × dim numbers of one dtype."""

    heads: int
    dim: int
    dtype: mx.Dtype

    def shape_of(self, tokens: int, rows: int = 1) -> tuple[int, ...]:
        """Return the shape of the keys (or values) of so many tokens in each of so many rows."""
        return rows, self.heads, tokens, self.dim


@dataclass(frozen=True)
class FullAttention:
    """Spec of a layer with keys and values of every token; MLA latents are one head with two different planes."""

    keys: Plane
    values: Plane

    def slots_needed(self, tokens: int) -> int:
        """Return how many token places a row of so many tokens fills: all of them, in a sliding window at most its ring."""
        return tokens

    def tokens_held(self, tokens: int) -> int:
        """Return of how many tokens a row of so many has keys and values: all of them, in a sliding window at most its size."""
        return tokens

    def bytes_at(self, tokens: int) -> int:
        return self.slots_needed(tokens) * sum(plane.heads * plane.dim * plane.dtype.size for plane in (self.keys, self.values))


@dataclass(frozen=True)
class SlidingWindow(FullAttention):
    """Spec of a layer with keys and values of the last `window` tokens in a ring buffer: token p is at place p % ring.

    `spare` places more keep what a step of several tokens would overwrite, should it go back to the first of them.
    """

    window: int
    spare: int = 0

    @property
    def ring(self) -> int:
        return self.window + self.spare

    def slots_needed(self, tokens: int) -> int:
        return min(tokens, self.ring)

    def tokens_held(self, tokens: int) -> int:
        return min(tokens, self.window)


@dataclass(frozen=True)
class Recurrent:
    """Spec of a layer with fixed-size states (gated delta, Mamba, short convolution …); None is a part left empty."""

    parts: tuple[Geometry | None, ...]

    def bytes_at(self, tokens: int) -> int:  # noqa: ARG002 - a row of any length needs as many
        return sum(math.prod(part[0]) * part[1].size for part in self.parts if part is not None)


LayerSpec = FullAttention | SlidingWindow | Recurrent


@dataclass(frozen=True)
class KeyValues:
    """Keys and values of one layer: [1, heads, tokens, dim] of a row, oldest first, or [slots, heads, places, dim] of a slab."""

    keys: mx.array
    values: mx.array
    planes: tuple[mx.array, mx.array] | None = None  # with room for further tokens, of which these are the first


LayerContents = KeyValues | tuple[mx.array | None, ...]
RowContents = Sequence[LayerContents | None]  # what one row's layers hold


def empty(spec: LayerSpec) -> LayerContents:
    """Return the contents of a layer of this spec that has seen no token: no keys and values, states of zeros."""
    if isinstance(spec, Recurrent):
        return tuple(None if part is None else mx.zeros((1, *part[0]), part[1]) for part in spec.parts)
    return KeyValues(mx.zeros(spec.keys.shape_of(0), spec.keys.dtype), mx.zeros(spec.values.shape_of(0), spec.values.dtype))


def mismatch(spec: LayerSpec, contents: LayerContents | None, length: int) -> str | None:
    """Return why this spec can not hold the contents of a row of `length` tokens; None if they fit exactly."""
    match spec, contents:
        case (_, None):
            return "its cache is of a kind that slabs can not hold"
        case (FullAttention(), KeyValues()):
            tokens = spec.tokens_held(length)
            sides = (("keys", contents.keys, spec.keys), ("values", contents.values, spec.values))
            found = ((side, difference(array, plane.shape_of(tokens), plane.dtype)) for side, array, plane in sides)
            return next((f"{side} are {reason}" for side, reason in found if reason), None)
        case (Recurrent(), tuple()):
            if len(contents) != len(spec.parts):
                return f"it holds {len(contents)} states instead of {len(spec.parts)}"
            pairs = enumerate(zip(contents, spec.parts, strict=True))
            return next((f"state {index} is {reason}" for index, pair in pairs if (reason := part_mismatch(*pair))), None)
        case _:
            held = "keys and values" if isinstance(contents, KeyValues) else f"{len(contents)} states"
            return f"it holds {held}, which is not what {type(spec).__name__} has"


def part_mismatch(array: mx.array | None, geometry: Geometry | None, rows: int = 1) -> str | None:
    """Return how the state of so many rows differs from a part of a Recurrent spec; None if it does not."""
    if array is None:
        return None if geometry is None else f"missing instead of {_written((rows, *geometry[0]), geometry[1])}"
    if geometry is None:
        return f"{_written(array.shape, array.dtype)} instead of missing"
    return difference(array, (rows, *geometry[0]), geometry[1])


def difference(array: mx.array, shape: tuple[int, ...], dtype: mx.Dtype) -> str | None:
    """Return both geometries and where they differ if an array does not have this shape and dtype; None if it does."""
    if array.shape == shape and array.dtype == dtype:
        return None
    if array.ndim != len(shape):
        place = "number of axes"
    else:
        axis = next((axis for axis, sizes in enumerate(zip(array.shape, shape, strict=True)) if sizes[0] != sizes[1]), None)
        place = "dtype" if axis is None else f"axis {axis}"
    return f"{_written(array.shape, array.dtype)} instead of {_written(shape, dtype)} ({place})"


def _written(shape: tuple[int, ...], dtype: mx.Dtype) -> str:
    return f"{shape} {str(dtype).removeprefix('mlx.core.')}"
