"""The vision tower of LFM2-VL: SigLIP 2, whose learned positions are spread over images of any shape."""

import functools
import math
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from weft.errors import UnsupportedModel
from weft.model.vision.siglip_tower import SiglipConfig, SiglipTower


@dataclass(frozen=True, kw_only=True)
class Siglip2Config(SiglipConfig):
    """The shape of a SigLIP 2 tower, which knows a grid of positions instead of an image's size."""

    image_size: int = 0
    num_patches: int = 256

    def check(self) -> None:
        super().check()
        if self.side**2 != self.num_patches:
            raise UnsupportedModel(f"its tower has {self.num_patches} positions, which are no square")

    @property
    def side(self) -> int:
        return math.isqrt(self.num_patches)


class UnshufflingProjector(nn.Module):  # type: ignore[misc]
    """Makes one feature of the patches that a token stands for: all their numbers behind each other, by two linear layers."""

    def __init__(self, config: Siglip2Config, whole: dict[str, Any]) -> None:
        super().__init__()
        self._merged = config.hidden_size * config.spatial_merge_size**2
        inner, has_bias = whole.get("projector_hidden_size", 2560), whole.get("projector_bias", True)
        self._has_norm = whole.get("projector_use_layernorm", True)
        if self._has_norm:
            self.layer_norm = nn.LayerNorm(self._merged, eps=1e-5)
        self.linear_1 = nn.Linear(self._merged, inner, bias=has_bias)
        self.linear_2 = nn.Linear(inner, config.out_hidden_size, bias=has_bias)

    def __call__(self, x: mx.array) -> mx.array:
        x = x.reshape(-1, self._merged)
        return self.linear_2(nn.gelu(self.linear_1(self.layer_norm(x) if self._has_norm else x)))  # type: ignore[no-any-return]


class Lfm2Tower(SiglipTower):
    """A tower for images of any shape, and for tiles of large ones."""

    def __init__(self, config: dict[str, Any]) -> None:
        if (name := config.get("projector_hidden_act", "gelu")) != "gelu":
            raise UnsupportedModel(f"its projector_hidden_act is {name}, which is not built")
        shape = Siglip2Config.of(
            config["vision_config"], config.get("downsample_factor", 2), config["text_config"]["hidden_size"]
        )
        super().__init__(shape)
        self.projector = UnshufflingProjector(shape, config)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Return the weights of a checkpoint as this tower has them: it embeds patches with the channels first."""
        found = super().sanitize(weights)
        if (patches := found.pop("patch_embed.proj.weight", None)) is not None:
            found["patch_embed.weight"] = self.channels_first(patches)
        return found

    def embed_positions(self, rows: int, columns: int, places: NDArray[np.int32]) -> mx.array:
        side = self._shape.side
        grid = self.pos_embed.weight.astype(mx.float32).reshape(side, side, -1)
        down, across = mx.array(spread(side, rows)), mx.array(spread(side, columns))
        whole = mx.einsum("rs,sth,ct->rch", down, grid, across)
        return whole[mx.array(places[:, 0]), mx.array(places[:, 1])].astype(self.pos_embed.weight.dtype)

    def __call__(self, pixels: mx.array) -> list[mx.array]:
        states = self.run_blocks(pixels)
        return [*states, self.projector(states[-1])[None]]


@functools.lru_cache(64)
def spread(side: int, count: int) -> NDArray[np.float32]:
    """Return what each of `count` patches takes of `side` learned positions, (count, side): linear, of all it covers if fewer."""
    scale = side / count
    reach = max(scale, 1.0)
    found = np.zeros((count, side), np.float32)
    for place in range(count):
        centre = scale * (place + 0.5)
        first, end = max(int(centre - reach + 0.5), 0), min(int(centre + reach + 0.5), side)
        weights = np.maximum(0.0, 1.0 - np.abs((np.arange(first, end) - centre + 0.5) / reach))
        found[place, first:end] = weights / weights.sum()
    return found
