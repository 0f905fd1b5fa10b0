"""SigLIP's vision tower, with learned positions, and what Gemma 3 and Idefics3 make of the patches of a token."""

from dataclasses import dataclass
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from weft.errors import UnsupportedModel
from weft.model.vision.tower import Block, Tower, TowerConfig, layer_norm, patch_places, renamed

# Names of checkpoints, and ours; queries, keys and values are one linear layer here.
RENAMED = (
    (r"^embeddings\.patch_embedding\.", "patch_embed.proj."),
    (r"^embeddings\.position_embedding\.", "pos_embed."),
    (r"^encoder\.layers\.(\d+)\.", r"blocks.\1."),
    (r"\.self_attn\.out_proj\.", ".attn.proj."),
    (r"\.self_attn\.", ".attn."),
    (r"\.layer_norm([12])\.", r".norm\1."),
)


@dataclass(frozen=True, kw_only=True)
class SiglipConfig(TowerConfig):
    """The shape of a SigLIP tower."""

    intermediate_size: int
    image_size: int
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-6

    def check(self) -> None:
        self.check_activation(self.hidden_act, "gelu_pytorch_tanh", "gelu_new", "gelu_tanh")
        if self.layer_norm_eps != 1e-6:
            raise UnsupportedModel(f"its tower's layer_norm_eps is {self.layer_norm_eps}, which is not built")

    @property
    def side(self) -> int:
        """Patches in a row of an image."""
        return self.image_size // self.patch_size

    @classmethod
    def of(cls, vision: dict[str, Any], merge: int, size: int) -> Self:
        """Read it from a `vision_config`: `merge`² patches become a token, with a feature of `size` numbers."""
        return cls.read({**vision, "spatial_merge_size": merge, "out_hidden_size": size})


class SiglipMLP(nn.Module):  # type: ignore[misc]
    """Two linear layers with a GELU between them, in its approximation by tanh."""

    def __init__(self, config: SiglipConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def __call__(self, x: mx.array) -> mx.array:
        return self.fc2(nn.gelu_approx(self.fc1(x)))  # type: ignore[no-any-return]


class SiglipTower(Tower):
    """A tower of images of one size, whose patches have learned positions."""

    def __init__(self, shape: SiglipConfig) -> None:
        super().__init__(shape, has_patch_bias=True)
        self._shape = shape
        self.pos_embed = nn.Embedding(shape.side**2, shape.hidden_size)
        self.blocks = [Block(shape, layer_norm, SiglipMLP(shape)) for _ in range(shape.depth)]
        self.post_layernorm = layer_norm(shape.hidden_size)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Return the weights of a checkpoint as this tower has them; a pooling head, which makes one vector, is left out."""
        used = {name: array for name, array in weights.items() if not name.startswith("head.")}
        return super().sanitize(renamed(used, RENAMED))

    def embed_positions(self, rows: int, columns: int, places: NDArray[np.int32]) -> mx.array:  # noqa: ARG002 – all are squares
        """Return the learned positions (P, H) of patches at these rows and columns (P, 2)."""
        row, column = places.T
        return self.pos_embed(mx.array(row * self._shape.side + column))  # type: ignore[no-any-return]

    def run_blocks(self, pixels: mx.array) -> list[mx.array]:
        """Return the states of an image's patches in the order of their making; the last are normed, (P, H)."""
        rows, columns = self.patches_of(pixels)
        places = patch_places(rows, columns, self._shape.spatial_merge_size)
        states = [x := self.embed_patches(pixels) + self.embed_positions(rows, columns, places)]
        for block in self.blocks:
            x, steps = block(x, None)
            states += steps
        return [*states, self.post_layernorm(x)]


class PoolingProjector(nn.Module):  # type: ignore[misc]
    """Makes one feature of the patches that a token stands for: their mean, normed and multiplied by a matrix."""

    def __init__(self, config: SiglipConfig) -> None:
        super().__init__()
        self._merged = config.spatial_merge_size**2
        self._eps = config.layer_norm_eps
        self.mm_soft_emb_norm = {"weight": mx.zeros(config.hidden_size)}
        self.mm_input_projection_weight = mx.zeros((config.hidden_size, config.out_hidden_size))

    def __call__(self, x: mx.array) -> mx.array:
        pooled = x.reshape(-1, self._merged, x.shape[-1]).mean(axis=1)
        return mx.fast.rms_norm(pooled, 1.0 + self.mm_soft_emb_norm["weight"], self._eps) @ self.mm_input_projection_weight


class SquareTower(SiglipTower):
    """A tower whose images are all squares of one size, and have one number of tokens."""

    @property
    def grid(self) -> tuple[int, int]:
        tokens = self._shape.side // self._shape.spatial_merge_size
        return tokens, tokens

    def __call__(self, pixels: mx.array) -> list[mx.array]:
        states = self.run_blocks(pixels)
        return [*states, self.projector(states[-1])[None]]


class Gemma3Tower(SquareTower):
    """The tower of Gemma 3."""

    def __init__(self, config: dict[str, Any]) -> None:
        vision, hidden_size = config["vision_config"], config["text_config"]["hidden_size"]
        tokens = round(config.get("mm_tokens_per_image", 256) ** 0.5)
        patches = vision["image_size"] // vision["patch_size"]
        if patches % tokens:
            raise UnsupportedModel(f"its tower has {patches} patches in a row for {tokens} tokens")
        super().__init__(SiglipConfig.of(vision, patches // tokens, hidden_size))
        self.embed_scale = float(mx.array(hidden_size**0.5, mx.bfloat16))  # as mlx-lm has it
        self.projector = PoolingProjector(self._shape)


class ShufflingProjector(nn.Module):  # type: ignore[misc]
    """Makes one feature of the patches that a token stands for: all their numbers behind each other, by a linear layer."""

    def __init__(self, config: SiglipConfig) -> None:
        super().__init__()
        merged = config.hidden_size * config.spatial_merge_size**2
        self.modality_projection = {"proj": nn.Linear(merged, config.out_hidden_size, bias=False)}
        self._merged = merged

    def __call__(self, x: mx.array) -> mx.array:
        return self.modality_projection["proj"](x.reshape(-1, self._merged))  # type: ignore[no-any-return]


class Idefics3Tower(SquareTower):
    """The tower of Idefics3 and SmolVLM, which sees tiles of an image one by one.

    The references find a patch's position by comparing fractions. For the sides of known models, of 26, 27 and 32 patches,
    that is the patch's number, as it is here.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        merge, vision = config.get("scale_factor", 2), config["vision_config"]
        super().__init__(SiglipConfig.of(vision, merge, config["text_config"].get("hidden_size", 4096)))
        if self._shape.side % merge:
            raise UnsupportedModel(f"its tower has {self._shape.side} patches in a row, and tokens of {merge} patches")
        self.projector = ShufflingProjector(self._shape)
