"""The vision towers of Qwen2-VL and Qwen2.5-VL: patches with rotary positions only; the latter's mostly attend in windows."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from weft.errors import UnsupportedModel
from weft.model.vision.tower import Block, Tower, TowerConfig, Windowing, angles_of, layer_norm, patch_places, rms_norm

QUICK_GELU = 1.702  # x · sigmoid(this · x) stands for a GELU


@dataclass(frozen=True, kw_only=True)
class Qwen2TowerConfig(TowerConfig):
    """The shape of a Qwen2-VL tower."""

    intermediate_size: int
    hidden_act: str = "quick_gelu"

    def check(self) -> None:
        self.check_activation(self.hidden_act, "quick_gelu")


@dataclass(frozen=True, kw_only=True)
class Qwen25TowerConfig(TowerConfig):
    """The shape of a Qwen2.5-VL tower."""

    intermediate_size: int
    window_size: int  # pixels of a window's side
    fullatt_block_indexes: tuple[int, ...] | list[int]  # blocks in which all patches attend to all
    hidden_act: str = "silu"

    def check(self) -> None:
        self.check_activation(self.hidden_act, "silu")
        if self.window_tokens < 1:
            raise UnsupportedModel(f"its tower's window_size of {self.window_size} is less than a token")

    @property
    def window_tokens(self) -> int:
        """Tokens of a window's side."""
        return self.window_size // self.token_pixels


class QuickGeluMLP(nn.Module):  # type: ignore[misc]
    """Two linear layers with a GELU between them, in its approximation by a sigmoid."""

    def __init__(self, config: Qwen2TowerConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def __call__(self, x: mx.array) -> mx.array:
        x = self.fc1(x)
        return self.fc2(x * mx.sigmoid(QUICK_GELU * x))  # type: ignore[no-any-return]


class SwigluMLP(nn.Module):  # type: ignore[misc]
    """A linear layer gated by the SiLU of another, and one back."""

    def __init__(self, config: Qwen25TowerConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class TokenMerger(nn.Module):  # type: ignore[misc]
    """Makes one feature of the patches that a token stands for, with its family's norm."""

    def __init__(self, config: TowerConfig, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        merged = config.hidden_size * config.spatial_merge_size**2
        self.ln_q = norm(config.hidden_size)
        self.mlp = [nn.Linear(merged, merged), nn.GELU(), nn.Linear(merged, config.out_hidden_size)]

    def __call__(self, x: mx.array) -> mx.array:
        first, gelu, second = self.mlp
        return second(gelu(first(self.ln_q(x).reshape(-1, first.weight.shape[0]))))  # type: ignore[no-any-return]


class Qwen2Tower(Tower):
    """The tower of Qwen2-VL: LayerNorms, and in every block all patches attend to all."""

    def __init__(self, config: dict[str, Any]) -> None:
        # There `hidden_size` is that of the features, and the tower's own is `embed_dim`.
        config = config["vision_config"]
        missing = [name for name in ("embed_dim", "hidden_size", "mlp_ratio") if name not in config]
        if missing:
            raise UnsupportedModel(f"vision_config has no {missing[0]}")
        size = config["embed_dim"]
        sizes = {"hidden_size": size, "out_hidden_size": config["hidden_size"]}
        shape = Qwen2TowerConfig.read({**config, **sizes, "intermediate_size": int(size * config["mlp_ratio"])})
        super().__init__(shape, has_patch_bias=False)
        self.blocks = [Block(shape, layer_norm, QuickGeluMLP(shape)) for _ in range(shape.depth)]
        self.merger = TokenMerger(shape, layer_norm)

    def __call__(self, pixels: mx.array) -> list[mx.array]:
        places = patch_places(*self.patches_of(pixels), self.config.spatial_merge_size)
        angles = angles_of(places, self.config.head_size)
        states = [x := self.embed_patches(pixels)]
        for block in self.blocks:
            x, steps = block(x, angles)
            states += steps
        return [*states, self.merger(x)[None]]


class Qwen25Tower(Tower):
    """The tower of Qwen2.5-VL: RMSNorms, gated MLPs, and in most blocks patches attend within their window."""

    def __init__(self, config: dict[str, Any]) -> None:
        shape = Qwen25TowerConfig.read(config["vision_config"])
        super().__init__(shape, has_patch_bias=False)
        self._shape = shape
        self.blocks = [Block(shape, rms_norm, SwigluMLP(shape)) for _ in range(shape.depth)]
        self.merger = TokenMerger(shape, rms_norm)

    def __call__(self, pixels: mx.array) -> list[mx.array]:
        rows, columns = self.patches_of(pixels)
        merge = self._shape.spatial_merge_size
        windows = _windows(rows // merge, columns // merge, merge, self._shape.window_tokens)
        angles = angles_of(patch_places(rows, columns, merge)[windows.patches], self._shape.head_size)
        states = [x := self.embed_patches(pixels)[mx.array(windows.patches)]]
        for number, block in enumerate(self.blocks):
            x, steps = block(x, angles, () if number in self._shape.fullatt_block_indexes else windows.groups)
            states += steps
        return [*states, self.merger(x)[mx.array(windows.back)][None]]


@dataclass(frozen=True)
class Windows:
    """An order of an image's patches in which those of a window are behind each other, windows of one size too."""

    patches: NDArray[np.int32]  # (P,), by place in the order of windows
    back: NDArray[np.int32]  # (tokens,), where each token is in the order of windows
    groups: Windowing


@functools.lru_cache(64)
def _windows(rows: int, columns: int, merge: int, side: int) -> Windows:
    """Cut an image of rows × columns tokens into windows of `side` × `side`; those at the right and lower edge are smaller."""
    row, column = np.divmod(np.arange(rows * columns), columns)
    window = row // side * -(-columns // side) + column // side
    count = np.bincount(window)[window]  # of the tokens in each token's window
    order = np.lexsort((window, count))
    patches = (order[:, None] * merge**2 + np.arange(merge**2)).reshape(-1)
    sizes, tokens = np.unique(count, return_counts=True)
    groups = tuple((int(total // size), int(size * merge**2)) for size, total in zip(sizes, tokens, strict=True))
    return Windows(patches.astype(np.int32), np.argsort(order).astype(np.int32), groups)
