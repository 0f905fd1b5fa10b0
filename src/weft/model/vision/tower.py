"""Vision towers: an image's pixels become features, one for each of its tokens. What the towers of all families share is here.

One image per forward, without batch or padding: its features depend on that image alone. The states after each block are
handed out, so that encoding can be interrupted between blocks as a prompt is between layers.
Letters: P patches, in the order of the tokens they are merged into; H hidden size; L levels of features.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from weft.errors import UnsupportedModel
from weft.kernels.attention import ON_CPU, grouped_attention

SCORES = 1 << 20  # of a step of attention on a CPU: some milliseconds on two cores
FUSED_HEAD_SIZES = (64, 80, 128)  # of MLX's attention on GPUs; others are padded with zeros
THETA = 10000.0
RENAMED_FIELDS = {"num_hidden_layers": "depth", "num_attention_heads": "num_heads", "num_channels": "in_channels"}

layer_norm = functools.partial(nn.LayerNorm, eps=1e-6)
rms_norm = functools.partial(nn.RMSNorm, eps=1e-6)

Angles = tuple[mx.array, mx.array]  # cosines and sines, (P, head size)
Windowing = tuple[tuple[int, int], ...]  # for windows of one size each: how many, and patches in each


@dataclass(frozen=True, kw_only=True)
class TowerConfig:
    """The shape of a tower, from a `vision_config`."""

    depth: int
    hidden_size: int
    num_heads: int
    patch_size: int
    spatial_merge_size: int
    out_hidden_size: int
    in_channels: int = 3
    has_bias: ClassVar[bool] = True  # of the layers of attention

    @classmethod
    def read(cls, config: dict[str, Any]) -> Self:
        """Read a tower's shape; raises UnsupportedModel where something is missing or is not built here."""
        config = {RENAMED_FIELDS.get(name, name): value for name, value in config.items()}
        for field in dataclasses.fields(cls):
            if field.name not in config and field.default is dataclasses.MISSING:
                raise UnsupportedModel(f"vision_config has no {field.name}")
        found = cls(**{field.name: config[field.name] for field in dataclasses.fields(cls) if field.name in config})
        found.check()
        return found

    def check(self) -> None:
        """Raise UnsupportedModel for a shape that is not built."""

    @property
    def token_pixels(self) -> int:
        """Pixels of a token's side."""
        return self.patch_size * self.spatial_merge_size

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    def check_activation(self, name: str, *known: str) -> None:
        if name not in known:
            raise UnsupportedModel(f"its tower's hidden_act is {name}, which is not built")


class Tower(nn.Module):  # type: ignore[misc]
    """A vision tower: a linear layer of patches, blocks, and what makes features of their states."""

    num_levels = 1  # of features: the first is the embedding, others are added to states of the language model
    embed_scale = 1.0  # by which the language model multiplies embeddings; features are what comes out of that

    def __init__(self, config: TowerConfig, *, has_patch_bias: bool) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = nn.Linear(config.in_channels * config.patch_size**2, config.hidden_size, bias=has_patch_bias)

    @property
    def grid(self) -> tuple[int, int] | None:
        """Rows and columns of tokens, where all images have the same."""
        return None

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Return the weights of a checkpoint as this tower has them: the patches' convolution as a linear layer."""
        found = dict(weights)
        kernel = found.get("patch_embed.proj.weight")
        if kernel is not None and kernel.ndim > 2:
            del found["patch_embed.proj.weight"]
            if kernel.shape[1] != self.config.in_channels:  # conversions have the channels last
                kernel = mx.moveaxis(kernel, -1, 1)
            if kernel.ndim == 5:  # a still image is the same at all times of a patch, so the kernel's times add up
                kernel = kernel.astype(mx.float32).sum(axis=2)
            found["patch_embed.weight"] = kernel.flatten(1)
        if (bias := found.pop("patch_embed.proj.bias", None)) is not None:
            found["patch_embed.bias"] = bias
        return found

    def __call__(self, pixels: mx.array) -> list[mx.array]:
        """Encode normed pixels (height, width, channels); returns states in the order of their making, last the features.

        Features are (L, tokens, size): as many levels as the family has.
        """
        raise NotImplementedError

    def embed_patches(self, pixels: mx.array) -> mx.array:
        """Return the embeddings (P, H) of an image's patches, those of a token behind each other."""
        side, merge = self.config.patch_size, self.config.spatial_merge_size
        height, width, channels = pixels.shape
        cut = pixels.reshape(height // (side * merge), merge, side, width // (side * merge), merge, side, channels)
        patches = cut.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, channels * side * side)
        return self.patch_embed(patches.astype(self.patch_embed.weight.dtype))  # type: ignore[no-any-return]

    def channels_first(self, patches: mx.array) -> mx.array:
        """Return the weight of a linear layer of patches whose pixels have the channels last, as this tower has it."""
        side = self.config.patch_size
        return patches.reshape(-1, side, side, self.config.in_channels).transpose(0, 3, 1, 2).flatten(1)

    def patches_of(self, pixels: mx.array) -> tuple[int, int]:
        """Return how many rows and columns of patches an image has."""
        height, width, _ = pixels.shape
        return height // self.config.patch_size, width // self.config.patch_size


class Attention(nn.Module):  # type: ignore[misc]
    """Attention of the patches of an image to each other, in most families with rotary positions of rows and columns."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=config.has_bias)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.has_bias)

    def project(self, x: mx.array, angles: Angles | None) -> tuple[mx.array, mx.array, mx.array]:
        """Return queries, keys and values (1, heads, P, size) of patches (P, H); angles are None without rotary positions."""
        query, key, value = self.qkv(x).reshape(x.shape[0], 3, self.num_heads, -1).transpose(1, 2, 0, 3)[:, None]
        return (query, key, value) if angles is None else (turned(query, *angles), turned(key, *angles), value)

    def attend(self, query: mx.array, key: mx.array, value: mx.array, num_windows: int = 1) -> mx.array:
        """Return what patches, of which these are the queries, find in the others of their window, (patches, H)."""
        found = attend(_by_window(query, num_windows), _by_window(key, num_windows), _by_window(value, num_windows))
        return self.proj(found.swapaxes(1, 2).reshape(query.shape[2], -1))  # type: ignore[no-any-return]


class TowerBlock(nn.Module):  # type: ignore[misc]
    """One block of a tower, whose attention is cut into steps on a CPU."""

    def project(self, x: mx.array, angles: Angles | None) -> tuple[mx.array, mx.array, mx.array]:
        """Return queries, keys and values (1, heads, P, size) of patches (P, H)."""
        raise NotImplementedError

    def finish(self, x: mx.array, query: mx.array, key: mx.array, value: mx.array, num_windows: int) -> mx.array:
        """Return the block's output for the patches (N, H) that these are the queries of."""
        raise NotImplementedError

    def __call__(self, x: mx.array, angles: Angles | None, windows: Windowing = ()) -> tuple[mx.array, list[mx.array]]:
        """Return the patches (P, H) after this block, and the states to evaluate on the way there, one after the other."""
        query, key, value = self.project(x, angles)
        parts = []
        for step in _steps(x.shape[0], query.shape[1], windows):
            own = query[:, :, step.queries], key[:, :, step.keys], value[:, :, step.keys]
            parts.append(self.finish(x[step.queries], *own, step.num_windows))
        if len(parts) == 1:
            return parts[0], parts
        return mx.concatenate(parts), [query, key, value, *parts]


class Block(TowerBlock):
    """A block with its family's norms and MLP, one norm before each."""

    def __init__(self, config: TowerConfig, norm: Callable[[int], nn.Module], mlp: nn.Module) -> None:
        super().__init__()
        self.norm1 = norm(config.hidden_size)
        self.norm2 = norm(config.hidden_size)
        self.attn = Attention(config)
        self.mlp = mlp

    def project(self, x: mx.array, angles: Angles | None) -> tuple[mx.array, mx.array, mx.array]:
        return self.attn.project(self.norm1(x), angles)

    def finish(self, x: mx.array, query: mx.array, key: mx.array, value: mx.array, num_windows: int) -> mx.array:
        x = x + self.attn.attend(query, key, value, num_windows)
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class AttentionStep:
    """Patches that attend at a time, and those they attend to: the same where they are whole windows."""

    queries: slice
    keys: slice
    num_windows: int = 1


def _steps(count: int, num_heads: int, windows: Windowing) -> Iterator[AttentionStep]:
    """Cut the attention of so many patches into steps: on a CPU scores are bounded, and so is the time of a step."""
    if not windows:
        size = count if not ON_CPU else max(16, SCORES // (count * num_heads))
        yield from (AttentionStep(slice(start, start + size), slice(None)) for start in range(0, count, size))
    start = 0
    for num_windows, patches in windows:
        at_a_time = num_windows if not ON_CPU else max(1, SCORES // (patches**2 * num_heads))
        for first in range(0, num_windows, at_a_time):
            own = slice(start, start + min(at_a_time, num_windows - first) * patches)
            yield AttentionStep(own, own, (own.stop - own.start) // patches)
            start = own.stop


def renamed(weights: dict[str, mx.array], names: Iterable[tuple[str, str]]) -> dict[str, mx.array]:
    """Return weights under the names that towers here have, from pairs of a pattern and its replacement.

    The projections to queries, keys and values of each block become one, packed or not.
    """
    found = dict(weights)
    for pattern, own in names:
        found = {re.sub(pattern, own, name): array for name, array in found.items()}
    for name in [name for name in found if ".q_proj." in name]:
        parts = [found.pop(name.replace(".q_proj.", f".{letter}_proj.")) for letter in "qkv"]
        found[name.replace(".q_proj.", ".qkv.")] = mx.concatenate(parts)
    return found


@functools.lru_cache(64)
def patch_places(rows: int, columns: int, merge: int) -> NDArray[np.int32]:
    """Return row and column of every patch (P, 2), those of a token behind each other."""
    places = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), axis=-1).astype(np.int32)
    return places.reshape(rows // merge, merge, columns // merge, merge, 2).transpose(0, 2, 1, 3, 4).reshape(-1, 2)


def angles_of(places: NDArray[np.int32], head_size: int) -> Angles:
    """Return the angles of patches: a quarter of a head's numbers turns by the row, a quarter by the column, twice over."""
    rates = 1.0 / mx.power(THETA, mx.arange(0, head_size // 2, 2) / (head_size // 2))
    turns = (mx.array(places)[..., None] * rates).flatten(1)
    turns = mx.concatenate([turns, turns], axis=-1)
    return mx.cos(turns), mx.sin(turns)


def turned(x: mx.array, cosine: mx.array, sine: mx.array) -> mx.array:
    """Turn the last axis by angles, its first half against its second."""
    half = x.shape[-1] // 2
    exact = x.astype(mx.float32)
    crossed = mx.concatenate([-exact[..., half:], exact[..., :half]], axis=-1)
    return (exact * cosine + crossed * sine).astype(x.dtype)


def _by_window(x: mx.array, num_windows: int) -> mx.array:
    """Bring (1, heads, P, size) to (windows, heads, patches, size)."""
    return x.reshape(x.shape[1], num_windows, -1, x.shape[-1]).swapaxes(0, 1)


def attend(query: mx.array, key: mx.array, value: mx.array, scale: float | None = None) -> mx.array:
    """Attention of queries (windows, heads, N, size) to the patches of their window; `scale`: that of the size if None."""
    size = query.shape[-1]
    scale = size**-0.5 if scale is None else scale
    if ON_CPU:
        return grouped_attention(query, key, value, scale, None)
    fused = next((known for known in FUSED_HEAD_SIZES if known >= size), size)
    query, key, value = (mx.pad(array, [(0, 0), (0, 0), (0, 0), (0, fused - size)]) for array in (query, key, value))
    return mx.fast.scaled_dot_product_attention(query, key, value, scale=scale)[..., :size]
