"""Caches that carry what a chunk with images needs into one forward: positions, masks, and features added between layers.

A model's first layers are subclassed at load, so that they add what their own cache brings; nothing is left on the model.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from weft.errors import UnsupportedModel
from weft.kernels.mrope import Places
from weft.model.vision.image_mask import ImageMask


class PlacedCache:
    """A row's KV cache for one forward: may say other positions than its length, another mask, and what its layer adds."""

    def __init__(
        self, cache: Any, offset: int | Places | None, addition: mx.array | None = None, mask: ImageMask | None = None
    ) -> None:
        self._cache = cache
        self._mask = mask
        self.addition = addition  # to its layer's output, (1, T, H)
        if offset is not None:
            self.offset = offset

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def make_mask(self, num_tokens: int, window_size: int | None = None, return_array: bool = False) -> Any:
        """Return the cache's mask, in which the tokens of an image may see each other."""
        if self._mask is None:
            return self._cache.make_mask(num_tokens, window_size=window_size, return_array=return_array)
        return self._mask.over(self._cache, num_tokens, window_size, return_array)


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
