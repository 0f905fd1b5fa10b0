"""Which vision-language families are built: by model_type, their tower, and how their rope layers turn by three positions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from weft.kernels.mrope import AxisOfFrequency
from weft.model.vision.qwen2_tower import Qwen2Tower, Qwen25Tower
from weft.model.vision.qwen3_tower import Qwen3Tower
from weft.model.vision.tower import Tower


@dataclass(frozen=True)
class VisionFamily:
    """What makes the models of a family see."""

    tower: Callable[[dict[str, Any]], Tower]  # from a vision_config; raises UnsupportedModel
    axes: Callable[[list[int]], AxisOfFrequency]  # from an mrope_section


QWEN3 = VisionFamily(Qwen3Tower, AxisOfFrequency.interleaved)

FAMILIES = {
    "qwen3_5": QWEN3,
    "qwen3_5_moe": QWEN3,
    "qwen3_vl": QWEN3,
    "qwen3_vl_moe": QWEN3,
    "qwen2_5_vl": VisionFamily(Qwen25Tower, AxisOfFrequency.in_runs),
    "qwen2_vl": VisionFamily(Qwen2Tower, AxisOfFrequency.in_runs),
}
