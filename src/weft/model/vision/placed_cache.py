"""Caches that carry what a chunk with images needs into one forward: positions, and features that are added between layers.

A model's first layers are subclassed at load, so that they add what their own cache brings; nothing is left on the model.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from weft.errors import UnsupportedModel
from weft.kernels.mrope import Places


class PlacedCache:
    """A row's KV cache that says other positions than its length, for one forward, and what to add to its layer's output."""

    def __init__(self, cache: Any, offset: int | Places, addition: mx.array | None = None) -> None:
        self._cache = cache
        self.offset = offset
        self.addition = addition  # (1, T, H)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


class AddingLayer:
    """Mixin of the layers behind which features of images are added (DeepStack)."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        found: mx.array = super().__call__(x, mask, cache)  # type: ignore[misc]
        return found + cache.addition if isinstance(cache, PlacedCache) and cache.addition is not None else found


def bind_layers(layers: list[nn.Module], num_additions: int) -> None:
    """Let a model's first layers add what their caches bring; raises UnsupportedModel where there are too few."""
    if num_additions > len(layers):
        raise UnsupportedModel(f"its tower has features for {num_additions} layers, and the language model has {len(layers)}")
    for layer in layers[:num_additions]:
        if not isinstance(layer, AddingLayer):
            layer.__class__ = type(f"Adding{type(layer).__name__}", (AddingLayer, type(layer)), {})
