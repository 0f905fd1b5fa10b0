"""Layer specs: shape, dtype and bytes of each layer's KV cache or recurrent state, fixed when the model is loaded.

A spec knows the bytes of a row and its exact geometry; arrays of any other geometry are refused.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

Geometry = tuple[tuple[int, ...], mx.Dtype]  # a shape without the batch axis, and its numbers' type


@dataclass(frozen=True)
class Plane:
    """Geometry of one token's keys (or values) in one layer: heads × dim numbers of one dtype."""

    heads: int
    dim: int
    dtype: mx.Dtype

    def matches(self, array: mx.array) -> bool:
        return (array.shape[:2], array.shape[3], array.dtype) == ((1, self.heads), self.dim, self.dtype)


@dataclass(frozen=True)
class FullAttention:
    """Spec of a layer with keys and values of every token; MLA latents are one head with two different planes."""

    keys: Plane
    values: Plane

    def slots_needed(self, tokens: int) -> int:
        """Return how many token places a row of so many tokens fills: all of them, in a sliding window at most its size."""
        return tokens

    def bytes_at(self, tokens: int) -> int:
        return self.slots_needed(tokens) * sum(plane.heads * plane.dim * plane.dtype.size for plane in (self.keys, self.values))


@dataclass(frozen=True)
class SlidingWindow(FullAttention):
    """Spec of a layer with keys and values of the last `window` tokens in a ring buffer: token p is at place p % window."""

    window: int

    def slots_needed(self, tokens: int) -> int:
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


LayerContents = KeyValues | tuple[mx.array | None, ...]
RowContents = Sequence[LayerContents | None]  # what one row's layers hold


def mismatch(spec: LayerSpec, contents: LayerContents | None, length: int) -> str | None:
    """Return why this spec can not hold the contents of a row of `length` tokens; None if they fit exactly."""
    match spec, contents:
        case (_, None):
            return "it is empty"
        case (FullAttention(), KeyValues()):
            if not (spec.keys.matches(contents.keys) and spec.values.matches(contents.values)):
                return f"keys {contents.keys.shape} and values {contents.values.shape} are not {spec.keys} and {spec.values}"
            held = contents.keys.shape[2]
            return None if held == spec.slots_needed(length) else f"it holds {held} tokens of a row of {length}"
        case (Recurrent(), tuple()):
            found = tuple(None if array is None else (array.shape[1:], array.dtype) for array in contents)
            is_one_row = all(array is None or array.shape[0] == 1 for array in contents)
            return None if found == spec.parts and is_one_row else f"arrays {found} are not {spec.parts}"
        case _:
            return f"{type(contents).__name__} is no content for {type(spec).__name__}"
