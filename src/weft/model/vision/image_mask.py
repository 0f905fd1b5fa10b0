"""The mask of a chunk in which tokens of an image see each other, also those behind them (Gemma).

Such an image is never cut: all of its tokens are in one chunk, so they are among the last columns of the chunk's mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import RotatingKVCache
from numpy.typing import NDArray

from weft.ipc.messages import Image

Sight = Literal["causal", "everywhere", "in windows"]  # where tokens of an image see those behind them: on which layers


@dataclass(frozen=True, eq=False)
class ImageMask:
    """Which image each token of a chunk belongs to, and on which layers its tokens see each other."""

    groups: NDArray[np.int32]  # (T,), -1 for text
    sight: Sight

    @classmethod
    def of(cls, images: Sequence[Image], start: int, count: int, sight: Sight) -> "ImageMask":
        groups = np.full(count, -1, np.int32)
        for number, image in enumerate(images):
            groups[max(image.start - start, 0) : max(image.end - start, 0)] = number
        return cls(groups, sight)

    def over(self, cache: Any, num_tokens: int, window_size: int | None, return_array: bool) -> Any:
        """Return the mask of a cache, (T, columns), in which the chunk's own columns, the last, are open within images.

        A layer with a window stays within it. A layer on which images are causal has the cache's own mask.
        """
        has_window = isinstance(cache, RotatingKVCache)
        if num_tokens == 1 or (self.sight == "in windows" and not has_window):
            return cache.make_mask(num_tokens, window_size=window_size, return_array=return_array)
        causal = cache.make_mask(num_tokens, window_size=window_size, return_array=True)
        same = (self.groups[:, None] == self.groups) & (self.groups >= 0)
        if has_window:
            place = np.arange(num_tokens)
            same &= place[:, None] - place < (window_size or cache.max_size)
        return mx.concatenate([causal[:, :-num_tokens], causal[:, -num_tokens:] | mx.array(same)], axis=1)
