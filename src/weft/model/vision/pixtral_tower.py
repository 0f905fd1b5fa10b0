"""The vision tower of Pixtral, with rotary positions only, and the projectors of Mistral 3 and Pixtral."""

from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from weft.errors import UnsupportedModel
from weft.model.vision.tower import THETA, Angles, Block, Tower, TowerConfig, patch_places, renamed

# Names of checkpoints, and ours.
RENAMED = (
    (r"^patch_conv\.", "patch_embed.proj."),
    (r"^transformer\.layers\.(\d+)\.", r"blocks.\1."),
    (r"\.attention\.o_proj\.", ".attn.proj."),
    (r"\.attention\.", ".attn."),
    (r"\.attention_norm\.", ".norm1."),
    (r"\.ffn_norm\.", ".norm2."),
    (r"\.feed_forward\.", ".mlp."),
)
ACTIVATIONS = {"gelu": nn.gelu, "silu": nn.silu}
EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class PixtralConfig(TowerConfig):
    """The shape of a Pixtral tower."""

    intermediate_size: int
    hidden_act: str = "gelu"
    theta: float = THETA
    has_bias: ClassVar[bool] = False

    def check(self) -> None:
        self.check_activation(self.hidden_act, *ACTIVATIONS)

    @classmethod
    def of(cls, config: dict[str, Any]) -> "PixtralConfig":
        """Read it from a config.json."""
        vision = config["vision_config"]
        if (kind := vision.get("model_type", "pixtral")) != "pixtral":
            raise UnsupportedModel(f"its tower is {kind}, which is not built")
        if (layer := config.get("vision_feature_layer", -1)) not in (-1, [-1]):
            raise UnsupportedModel(f"its vision_feature_layer is {layer}, and only the last is built")
        theta = (vision.get("rope_parameters") or vision).get("rope_theta", THETA)
        merge = config.get("spatial_merge_size", 2) if config["model_type"] == "mistral3" else 1
        return cls.read(
            {**vision, "spatial_merge_size": merge, "out_hidden_size": config["text_config"]["hidden_size"], "theta": theta}
        )


class PixtralMLP(nn.Module):  # type: ignore[misc]
    """A linear layer gated by the activation of another, and one back."""

    def __init__(self, config: PixtralConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self._activation = config.hidden_act

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(ACTIVATIONS[self._activation](self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class PixtralProjector(nn.Module):  # type: ignore[misc]
    """Makes a feature of each patch by two linear layers."""

    def __init__(self, config: PixtralConfig, whole: dict[str, Any], *, has_bias: bool) -> None:
        super().__init__()
        if (name := whole.get("projector_hidden_act", "gelu")) != "gelu":
            raise UnsupportedModel(f"its projector_hidden_act is {name}, which is not built")
        has_bias = whole.get("multimodal_projector_bias", has_bias)
        self.linear_1 = nn.Linear(config.hidden_size, config.out_hidden_size, bias=has_bias)
        self.linear_2 = nn.Linear(config.out_hidden_size, config.out_hidden_size, bias=has_bias)

    def __call__(self, x: mx.array) -> mx.array:
        return self.linear_2(nn.gelu(self.linear_1(x)))  # type: ignore[no-any-return]


class MergingProjector(PixtralProjector):
    """Makes one feature of the patches that a token stands for, normed one by one, which a linear layer merges first."""

    def __init__(self, config: PixtralConfig, whole: dict[str, Any]) -> None:
        super().__init__(config, whole, has_bias=False)
        self._merged = config.spatial_merge_size**2
        self.norm = nn.RMSNorm(config.hidden_size, eps=whole["text_config"].get("rms_norm_eps", EPS))
        merging = nn.Linear(config.hidden_size * self._merged, config.hidden_size, bias=False)
        self.patch_merger = {"merging_layer": merging}

    def __call__(self, x: mx.array) -> mx.array:
        # The references have all patches of the first number behind each other, then of the second …
        together = self.norm(x).reshape(-1, self._merged, x.shape[-1]).swapaxes(1, 2).flatten(1)
        return super().__call__(self.patch_merger["merging_layer"](together))


class PixtralTower(Tower):
    """A tower whose patches turn by rows and columns, frequencies in turn."""

    def __init__(self, config: dict[str, Any]) -> None:
        shape = PixtralConfig.of(config)
        super().__init__(shape, has_patch_bias=False)
        self._shape = shape
        self.ln_pre = _norm(shape.hidden_size)
        self.blocks = [Block(shape, _norm, PixtralMLP(shape)) for _ in range(shape.depth)]
        merges = config["model_type"] == "mistral3"
        self.projector = MergingProjector(shape, config) if merges else PixtralProjector(shape, config, has_bias=True)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        return super().sanitize(renamed(weights, RENAMED))

    def __call__(self, pixels: mx.array) -> list[mx.array]:
        places = mx.array(patch_places(*self.patches_of(pixels), self._shape.spatial_merge_size))
        states, angles = [x := self.ln_pre(self.embed_patches(pixels))], self._angles(places)
        for block in self.blocks:
            x, steps = block(x, angles)
            states += steps
        return [*states, self.projector(x)[None]]

    def _angles(self, places: mx.array) -> Angles:
        """Return cosines and sines (P, size): rows have every other frequency, columns those between."""
        size = self._shape.head_size
        rates = 1.0 / mx.power(self._shape.theta, mx.arange(0, size, 2) / size)
        turns = mx.concatenate([places[:, :1] * rates[0::2], places[:, 1:] * rates[1::2]], axis=-1)
        turns = mx.concatenate([turns, turns], axis=-1)
        return mx.cos(turns), mx.sin(turns)


def _norm(size: int) -> nn.RMSNorm:
    return nn.RMSNorm(size, eps=EPS)
