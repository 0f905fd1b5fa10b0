"""Which vision-language families are built: by model_type, their tower, and how their language model takes tokens of images."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from weft.kernels.mrope import AxisOfFrequency
from weft.model.vision.gemma4_tower import Gemma4Tower
from weft.model.vision.image_mask import Sight
from weft.model.vision.lfm2_tower import Lfm2Tower
from weft.model.vision.pixtral_tower import PixtralTower
from weft.model.vision.qwen2_tower import Qwen2Tower, Qwen25Tower
from weft.model.vision.qwen3_tower import Qwen3Tower
from weft.model.vision.siglip_tower import Gemma3Tower, Idefics3Tower
from weft.model.vision.tower import Tower


@dataclass(frozen=True)
class VisionFamily:
    """What makes the models of a family see."""

    tower: Callable[[dict[str, Any]], Tower]  # from a config.json; raises UnsupportedModel
    axes: Callable[[list[int]], AxisOfFrequency] | None = None  # from an mrope_section; None: tokens of images count as text does
    sight: Callable[[dict[str, Any]], Sight] = lambda _: "causal"  # from a config.json
    reads_as: str | None = None  # token in whose stead the language model reads those of images, by its name in text_config


def _gemma4_sight(config: dict[str, Any]) -> Sight:
    return "in windows" if config["text_config"].get("use_bidirectional_attention") == "vision" else "causal"


QWEN3 = VisionFamily(Qwen3Tower, AxisOfFrequency.interleaved)

FAMILIES = {
    "qwen3_5": QWEN3,
    "qwen3_5_moe": QWEN3,
    "qwen3_vl": QWEN3,
    "qwen3_vl_moe": QWEN3,
    "qwen2_5_vl": VisionFamily(Qwen25Tower, AxisOfFrequency.in_runs),
    "qwen2_vl": VisionFamily(Qwen2Tower, AxisOfFrequency.in_runs),
    "gemma3": VisionFamily(Gemma3Tower, sight=lambda _: "everywhere"),
    "idefics3": VisionFamily(Idefics3Tower),
    "smolvlm": VisionFamily(Idefics3Tower),
    "lfm2_vl": VisionFamily(Lfm2Tower),
    "lfm2-vl": VisionFamily(Lfm2Tower),
    "mistral3": VisionFamily(PixtralTower),
    "pixtral": VisionFamily(PixtralTower),
    "llava": VisionFamily(PixtralTower),
    "gemma4": VisionFamily(Gemma4Tower, sight=_gemma4_sight, reads_as="pad_token_id"),
}
