"""Rotary positions with three axes (M-RoPE): tokens of an image have a position in time, a row and a column, text one for all.

In chunks of a prompt that hold image tokens, the rope layers are handed `Places` instead of an offset. All other forwards go
through mlx's own layers: there the three positions of every token are one number.
"""

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from weft.errors import UnsupportedModel
from weft.kernels import cpu


@dataclass(frozen=True)
class AxisOfFrequency:
    """Which of the three positions each frequency of a rope layer turns by: 0 time, 1 row, 2 column."""

    axes: tuple[int, ...]

    @classmethod
    def interleaved(cls, sections: list[int]) -> "AxisOfFrequency":
        """Frequencies take the axes in turn, rows and columns as far as their sections reach (Qwen3-VL, Qwen3.5)."""
        axes = [0] * sum(sections)
        for axis in (1, 2):
            for place in range(axis, min(3 * sections[axis], len(axes)), 3):
                axes[place] = axis
        return cls(tuple(axes))

    @classmethod
    def in_runs(cls, sections: list[int]) -> "AxisOfFrequency":
        """Each axis has a run of frequencies (Qwen2-VL, Qwen2.5-VL)."""
        return cls(tuple(axis for axis, count in enumerate(sections) for _ in range(count)))


@dataclass(frozen=True, eq=False)
class Places:
    """The positions (3, T) of a chunk's tokens, which rope layers take in place of an offset; any other use of it fails."""

    ids: NDArray[np.int32]
    _known: dict[Any, mx.array] = field(default_factory=dict)

    def angles(self, axes: AxisOfFrequency, dims: int, base: float, scale: float) -> mx.array:
        """Return cosines, then sines, (1, 1, T, dims), computed once for all layers of a forward."""
        kind = axes, dims, base, scale
        if kind not in self._known:
            by_frequency = mx.array(self.ids[list(axes.axes)].T[None, None])  # (1, 1, T, dims / 2)
            self._known[kind] = cpu.angles_at(by_frequency, scale, cpu.rotary_rates(dims, base))
        return self._known[kind]


class PlacedRotation:
    """Mixin of the rope layers of a model with M-RoPE: they take `Places` where others take an offset."""

    axes: AxisOfFrequency

    def __call__(self: Any, x: mx.array, offset: int | mx.array | Places = 0) -> mx.array:
        if not isinstance(offset, Places):
            return super().__call__(x, offset)  # type: ignore[misc,no-any-return]
        angles = offset.angles(self.axes, self.dims, self.base, self.scale)
        if cpu.is_bound(x.dtype):
            return cpu.rotate(x, angles, is_traditional=self.traditional)
        return _rotate(x, angles, is_traditional=self.traditional)


def bind(model: nn.Module, axes: AxisOfFrequency) -> None:
    """Let a model's rope layers take `Places`; to be called after all other bindings. Raises UnsupportedModel for other kinds."""
    layers = [layer for layer in model.modules() if "rope" in type(layer).__name__.lower()]
    for layer in layers:
        if not isinstance(layer, nn.RoPE):
            raise UnsupportedModel(f"its rotary positions are of a kind that images do not go with ({type(layer).__name__})")
        if layer.dims != 2 * len(axes.axes):
            raise UnsupportedModel(f"mrope_section has {len(axes.axes)} frequencies, and its rope layers have {layer.dims // 2}")
    if not layers:
        raise UnsupportedModel("it has no rope layers, though its config has an mrope_section")
    for layer in layers:
        if not isinstance(layer, PlacedRotation):
            layer.__class__ = type(f"Placed{type(layer).__name__}", (PlacedRotation, type(layer)), {})
        layer.axes = axes


def _rotate(x: mx.array, angles: mx.array, *, is_traditional: bool) -> mx.array:
    """Apply RoPE to the first dims of x (B, heads, T, dim), for devices where no fused operation takes angles."""
    half = angles.shape[-1] // 2
    cosine, sine, turned = angles[..., :half], angles[..., half:], x[..., : 2 * half].astype(mx.float32)
    first, second = (turned[..., ::2], turned[..., 1::2]) if is_traditional else (turned[..., :half], turned[..., half:])
    parts = [first * cosine - second * sine, second * cosine + first * sine]
    joined = mx.stack(parts, axis=-1).flatten(-2) if is_traditional else mx.concatenate(parts, axis=-1)
    return mx.concatenate([joined.astype(x.dtype), x[..., 2 * half :]], axis=-1)
