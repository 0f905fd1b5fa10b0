"""The vision tower of Qwen3-VL and Qwen3.5: a learned grid of positions, and with DeepStack features from several blocks."""

import functools
import math
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from weft.errors import UnsupportedModel
from weft.model.vision.tower import Block, Tower, TowerConfig, angles_of, layer_norm, patch_places


@dataclass(frozen=True, kw_only=True)
class Qwen3TowerConfig(TowerConfig):
    """The shape of a Qwen3-VL or Qwen3.5 tower."""

    intermediate_size: int
    num_position_embeddings: int
    hidden_act: str
    deepstack_visual_indexes: tuple[int, ...] | list[int] = ()  # blocks whose states become features too

    def check(self) -> None:
        self.check_activation(self.hidden_act, "gelu_pytorch_tanh", "gelu_new", "gelu_tanh")
        if self.grid_side**2 != self.num_position_embeddings:
            raise UnsupportedModel(f"its tower has {self.num_position_embeddings} positions, which are no square")
        if not {*self.deepstack_visual_indexes} <= {*range(self.depth)}:
            raise UnsupportedModel(f"deepstack_visual_indexes names blocks that a tower of {self.depth} does not have")

    @property
    def grid_side(self) -> int:
        """Learned positions in a row of their grid."""
        return math.isqrt(self.num_position_embeddings)


class MLP(nn.Module):  # type: ignore[misc]
    """Two linear layers with a GELU between them, in its approximation by tanh."""

    def __init__(self, config: Qwen3TowerConfig) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.linear_fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def __call__(self, x: mx.array) -> mx.array:
        return self.linear_fc2(nn.gelu_approx(self.linear_fc1(x)))  # type: ignore[no-any-return]


class Merger(nn.Module):  # type: ignore[misc]
    """Makes one feature of the patches that a token stands for, normed one by one, or together as DeepStack has it."""

    def __init__(self, config: Qwen3TowerConfig, *, norms_together: bool = False) -> None:
        super().__init__()
        merged = config.hidden_size * config.spatial_merge_size**2
        self.norm = layer_norm(merged if norms_together else config.hidden_size)
        self.linear_fc1 = nn.Linear(merged, merged)
        self.linear_fc2 = nn.Linear(merged, config.out_hidden_size)
        self._merged = merged

    def __call__(self, x: mx.array) -> mx.array:
        normed = self.norm(x.reshape(-1, self.norm.weight.shape[0])).reshape(-1, self._merged)
        return self.linear_fc2(nn.gelu(self.linear_fc1(normed)))  # type: ignore[no-any-return]


class Qwen3Tower(Tower):
    """A tower whose patches have learned and rotary positions; DeepStack features follow those of the last block."""

    def __init__(self, config: dict[str, Any]) -> None:
        shape = Qwen3TowerConfig.read(config["vision_config"])
        super().__init__(shape, has_patch_bias=True)
        self._shape = shape
        self.num_levels = 1 + len(shape.deepstack_visual_indexes)
        self.pos_embed = nn.Embedding(shape.num_position_embeddings, shape.hidden_size)
        self.blocks = [Block(shape, layer_norm, MLP(shape)) for _ in range(shape.depth)]
        self.merger = Merger(shape)
        self.deepstack_merger_list = [Merger(shape, norms_together=True) for _ in shape.deepstack_visual_indexes]

    def __call__(self, pixels: mx.array) -> list[mx.array]:
        rows, columns = self.patches_of(pixels)
        x = self.embed_patches(pixels)
        grid = _grid(rows, columns, self._shape.spatial_merge_size, self._shape.grid_side)
        x = x + (self.pos_embed(mx.array(grid.corners)) * mx.array(grid.weights)[..., None].astype(x.dtype)).sum(axis=1)
        angles = angles_of(patch_places(rows, columns, self._shape.spatial_merge_size), self._shape.head_size)
        states, levels = [x], {}
        for number, block in enumerate(self.blocks):
            x, steps = block(x, angles)
            states += steps
            if number in self._shape.deepstack_visual_indexes:
                level = self._shape.deepstack_visual_indexes.index(number)
                levels[level] = self.deepstack_merger_list[level](x)
                states.append(levels[level])
        return [*states, mx.stack([self.merger(x), *(levels[level] for level in sorted(levels))])]


@dataclass(frozen=True)
class PatchGrid:
    """What the patches of an image of one size take of which learned positions."""

    corners: NDArray[np.int32]  # (P, 4), of the learned positions around each
    weights: NDArray[np.float32]  # (P, 4)


@functools.lru_cache(64)
def _grid(rows: int, columns: int, merge: int, side: int) -> PatchGrid:
    row, column = patch_places(rows, columns, merge).T
    above, below, down = _between(rows, side, row)
    left, right, across = _between(columns, side, column)
    corners = [above * side + left, above * side + right, below * side + left, below * side + right]
    weights = [(1 - down) * (1 - across), (1 - down) * across, down * (1 - across), down * across]
    return PatchGrid(np.stack(corners, axis=1).astype(np.int32), np.stack(weights, axis=1).astype(np.float32))


def _between(count: int, side: int, at: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Spread `count` patches evenly over `side` learned positions: the one before and after each, and the way from it."""
    spread = np.linspace(0, side - 1, count, dtype=np.float32)[at]
    low = spread.astype(np.int64)
    return low, np.minimum(low + 1, side - 1), spread - low
