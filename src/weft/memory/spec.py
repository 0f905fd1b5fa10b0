"""What each layer must remember, declared once at load as frozen values.

A spec knows its bytes (fixed, per token, window) and its exact geometry; arrays that do not have that geometry are not
let in. The adapter reads the specs off the model, the pool builds memory from them, admission counts with them.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class Plane:
    """One token's keys (or values) in one layer: heads × dim numbers."""

    heads: int
    dim: int
    dtype: mx.Dtype

    @property
    def token_bytes(self) -> int:
        """Bytes one token takes."""
        return self.heads * self.dim * self.dtype.size

    def matches(self, array: mx.array) -> bool:
        """Whether `array` [1, heads, tokens, dim] has exactly this geometry."""
        return array.shape[0] == 1 and (array.shape[1], array.shape[3], array.dtype) == (
            self.heads,
            self.dim,
            self.dtype,
        )


@dataclass(frozen=True)
class FullAttention:
    """Keys and values of every token. MLA latents are the same with one head and two different planes."""

    keys: Plane
    values: Plane

    def slots_needed(self, tokens: int) -> int:
        """Token places a row of this length fills."""
        return tokens

    def bytes_at(self, tokens: int) -> int:
        """Bytes a row of this length needs."""
        return self.slots_needed(tokens) * (self.keys.token_bytes + self.values.token_bytes)


@dataclass(frozen=True)
class SlidingWindow(FullAttention):
    """Keys and values of the last `window` tokens, in a ring: token p lives at place p % window."""

    window: int

    def slots_needed(self, tokens: int) -> int:
        """Token places a row of this length fills."""
        return min(tokens, self.window)


@dataclass(frozen=True)
class Recurrent:
    """Arrays of a fixed size (gated delta, Mamba, short convolution …). None: a place the model leaves empty."""

    parts: tuple[tuple[tuple[int, ...], mx.Dtype] | None, ...]  # shapes without the batch axis

    def bytes_at(self, tokens: int) -> int:  # noqa: ARG002 - the same question for every kind
        """Bytes a row needs, whatever its length."""
        total = 0
        for part in self.parts:
            if part is not None:
                size = part[1].size
                for axis in part[0]:
                    size *= axis
                total += size
        return total


LayerSpec = FullAttention | SlidingWindow | Recurrent


@dataclass(frozen=True)
class KeyValues:
    """One row's keys and values in one layer, oldest first: [1, heads, tokens, dim]."""

    keys: mx.array
    values: mx.array


LayerContents = KeyValues | tuple[mx.array | None, ...]


def mismatch(spec: LayerSpec, contents: LayerContents | None, length: int) -> str | None:
    """Why these contents can not be held by this spec, or None when they fit exactly."""
    match spec, contents:
        case (_, None):
            return "it is empty"
        case (FullAttention(), KeyValues()):
            if not (spec.keys.matches(contents.keys) and spec.values.matches(contents.values)):
                return f"keys {contents.keys.shape} and values {contents.values.shape} are not {spec.keys} and {spec.values}"
            if contents.keys.shape[2] != spec.slots_needed(length):
                return f"it holds {contents.keys.shape[2]} tokens of a row of {length}"
            return None
        case (Recurrent(), tuple()):
            found = tuple(None if array is None else (array.shape[1:], array.dtype) for array in contents)
            alone = all(array is None or array.shape[0] == 1 for array in contents)
            return None if found == spec.parts and alone else f"arrays {found} are not {spec.parts}"
        case _:
            return f"{type(contents).__name__} is no content for {type(spec).__name__}"
