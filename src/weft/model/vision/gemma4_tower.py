"""Gemma 4's vision tower: images of any shape, learned and rotary positions; a token is the mean of a square of patches."""

import re
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from weft.errors import UnsupportedModel
from weft.model.vision.tower import Angles, Tower, TowerBlock, TowerConfig, attend, patch_places, turned

THETA = 100.0  # where the config does not say another


@dataclass(frozen=True, kw_only=True)
class Gemma4TowerConfig(TowerConfig):
    """The shape of a Gemma 4 tower."""

    intermediate_size: int
    head_dim: int
    position_embedding_size: int
    theta: float
    num_key_value_heads: int | None = None
    hidden_activation: str = "gelu_pytorch_tanh"
    rms_norm_eps: float = 1e-6
    use_clipped_linears: bool = False
    standardize: bool = False

    def check(self) -> None:
        self.check_activation(self.hidden_activation, "gelu_pytorch_tanh")
        if self.num_key_value_heads not in (None, self.num_heads):
            raise UnsupportedModel(f"its tower has {self.num_key_value_heads} heads of keys for {self.num_heads} of queries")

    @classmethod
    def of(cls, vision: dict[str, Any], size: int) -> "Gemma4TowerConfig":
        """Read it from a `vision_config`, for features of `size` numbers."""
        theta = (vision.get("rope_parameters") or {}).get("rope_theta", THETA)
        merge = vision.get("pooling_kernel_size", 3)
        return cls.read({**vision, "spatial_merge_size": merge, "out_hidden_size": size, "theta": theta})


class ClippedLinear(nn.Module):  # type: ignore[misc]
    """A linear layer without bias, whose input and output may be kept within bounds that were learned."""

    def __init__(self, inputs: int, outputs: int, *, is_clipped: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=False)
        self._is_clipped = is_clipped
        if is_clipped:
            self.input_min, self.input_max = mx.array(0.0), mx.array(0.0)
            self.output_min, self.output_max = mx.array(0.0), mx.array(0.0)

    def __call__(self, x: mx.array) -> mx.array:
        if not self._is_clipped:
            return self.linear(x)  # type: ignore[no-any-return]
        return mx.clip(self.linear(mx.clip(x, self.input_min, self.input_max)), self.output_min, self.output_max)


class NormedAttention(nn.Module):  # type: ignore[misc]
    """Attention with normed queries, keys and values, half of whose numbers turn by the column and half by the row."""

    def __init__(self, config: Gemma4TowerConfig) -> None:
        super().__init__()
        self._num_heads, self._eps = config.num_heads, config.rms_norm_eps
        inner, is_clipped = config.num_heads * config.head_dim, config.use_clipped_linears
        self.q_proj = ClippedLinear(config.hidden_size, inner, is_clipped=is_clipped)
        self.k_proj = ClippedLinear(config.hidden_size, inner, is_clipped=is_clipped)
        self.v_proj = ClippedLinear(config.hidden_size, inner, is_clipped=is_clipped)
        self.o_proj = ClippedLinear(inner, config.hidden_size, is_clipped=is_clipped)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def project(self, x: mx.array, angles: Angles) -> tuple[mx.array, mx.array, mx.array]:
        """Return queries, keys and values (1, heads, P, size) of patches (P, H)."""
        query, key, value = (
            layer(x).reshape(x.shape[0], self._num_heads, -1) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = (self._turned(norm(array), angles) for norm, array in ((self.q_norm, query), (self.k_norm, key)))
        value = mx.fast.rms_norm(value, None, self._eps)
        return query.swapaxes(0, 1)[None], key.swapaxes(0, 1)[None], value.swapaxes(0, 1)[None]

    @staticmethod
    def _turned(x: mx.array, angles: Angles) -> mx.array:
        cosine, sine = (array[:, None] for array in angles)  # (P, 1, 2, size / 2)
        return turned(x.reshape(*x.shape[:2], 2, -1), cosine, sine).reshape(x.shape)


class Gemma4Block(TowerBlock):
    """A block with norms before and behind attention and MLP."""

    def __init__(self, config: Gemma4TowerConfig) -> None:
        super().__init__()
        self.self_attn = NormedAttention(config)
        self.mlp = GatedMLP(config)
        for place in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            setattr(self, f"{place}_layernorm", nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps))

    def project(self, x: mx.array, angles: Angles | None) -> tuple[mx.array, mx.array, mx.array]:
        assert angles is not None
        return self.self_attn.project(self.input_layernorm(x), angles)

    def finish(self, x: mx.array, query: mx.array, key: mx.array, value: mx.array, num_windows: int) -> mx.array:  # noqa: ARG002
        found = attend(query, key, value, scale=1.0)[0].swapaxes(0, 1).reshape(x.shape[0], -1)
        x = x + self.post_attention_layernorm(self.self_attn.o_proj(found))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))  # type: ignore[no-any-return]


class GatedMLP(nn.Module):  # type: ignore[misc]
    """A linear layer gated by the GELU of another, and one back."""

    def __init__(self, config: Gemma4TowerConfig) -> None:
        super().__init__()
        size, inner, is_clipped = config.hidden_size, config.intermediate_size, config.use_clipped_linears
        self.gate_proj = ClippedLinear(size, inner, is_clipped=is_clipped)
        self.up_proj = ClippedLinear(size, inner, is_clipped=is_clipped)
        self.down_proj = ClippedLinear(inner, size, is_clipped=is_clipped)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.gelu_approx(self.gate_proj(x)) * self.up_proj(x))


class Gemma4Tower(Tower):
    """A tower whose patches have learned and rotary positions of rows and columns."""

    def __init__(self, config: dict[str, Any]) -> None:
        hidden_size = config["text_config"]["hidden_size"]
        shape = Gemma4TowerConfig.of(config["vision_config"], hidden_size)
        super().__init__(shape, has_patch_bias=False)
        self._shape = shape
        self.embed_scale = float(hidden_size**0.5)
        self.position_embedding_table = mx.zeros((2, shape.position_embedding_size, shape.hidden_size))
        self.blocks = [Gemma4Block(shape) for _ in range(shape.depth)]
        if shape.standardize:
            self.std_bias, self.std_scale = mx.zeros(shape.hidden_size), mx.zeros(shape.hidden_size)
        self.projector = {"embedding_projection": nn.Linear(shape.hidden_size, hidden_size, bias=False)}

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Return the weights of a checkpoint as this tower has them: it embeds patches with the channels first."""
        found = {
            re.sub(r"^encoder\.layers\.", "blocks.", name).removeprefix("patch_embedder."): array
            for name, array in weights.items()
        }
        if (patches := found.pop("input_proj.weight", None)) is not None:
            found["patch_embed.weight"] = self.channels_first(patches)
        return found

    def __call__(self, pixels: mx.array) -> list[mx.array]:
        places = mx.array(patch_places(*self.patches_of(pixels), self._shape.spatial_merge_size))
        row, column = places.T
        x = self.embed_patches(2 * pixels - 1) + self.position_embedding_table[0][column] + self.position_embedding_table[1][row]
        angles, states = self._angles(places), [x]
        for block in self.blocks:
            x, steps = block(x, angles)
            states += steps
        return [*states, self._features(x)[None]]

    def _angles(self, places: mx.array) -> Angles:
        """Return cosines and sines (P, 2, size / 2): of the column, then of the row."""
        half = self._shape.head_dim // 2
        rates = 1.0 / mx.power(self._shape.theta, mx.arange(0, half, 2) / half)
        turns = places[:, ::-1, None] * rates
        turns = mx.concatenate([turns, turns], axis=-1)
        return mx.cos(turns), mx.sin(turns)

    def _features(self, x: mx.array) -> mx.array:
        """Return the features of tokens, from the mean of their patches, whose size is beyond 16 bits."""
        pooled = x.astype(mx.float32).reshape(-1, self._shape.spatial_merge_size**2, x.shape[-1]).mean(axis=1)
        pooled = pooled * self._shape.hidden_size**0.5
        if self._shape.standardize:
            pooled = (pooled - self.std_bias.astype(mx.float32)) * self.std_scale.astype(mx.float32)
        normed = mx.fast.rms_norm(pooled.astype(x.dtype), None, self._shape.rms_norm_eps)
        return self.projector["embedding_projection"](normed)  # type: ignore[no-any-return]
