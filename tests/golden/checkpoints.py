"""Tiny vision-language checkpoints whose weights, prompts and images come from a seed, for `make.py` and the tests alike.

Only what the reference implementations made of them is stored: an .npz file for each family. Names and shapes of tensors are
stored there too, as the references write them. numpy only, so that both environments draw the same numbers.
"""

import json
import re
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from golden.configs import CONFIGS, IMAGE, VIDEO, VISION_END, VISION_START, layout, processor_config

HERE = Path(__file__).parent
SEED = 14  # of weights, prompts and pixels
SEEDS = {
    "gemma3": 16,
    "gemma4_small": 16,
    "smolvlm": 15,
    "lfm2_vl": 20,
    "pixtral": 15,
}  # of weights, where the first one draws a model whose answers are of no use
NUM_LOGITS = 8  # places whose logits are stored
NUM_GREEDY = 6
CASES = ("no_image", "one_image", "two_images")
SCALED = ("gemma3", "gemma4", "gemma4_small", "lfm2_vl")  # families that make logits by the matrix of embeddings
AROUND_ZERO = {  # norms that add 1 to their weights
    "qwen3_5": re.compile(r"language_model\.(.*layernorm|.*self_attn\..*norm|norm)\.weight$"),
    "gemma3": re.compile(r"(language_model\..*norm|mm_soft_emb_norm)\.weight$"),
}


@dataclass(frozen=True)
class Case:
    """A prompt with its images: tokens, and for each image where its tokens begin and its pixels (height, width, 3)."""

    tokens: list[int]
    starts: list[int]
    pixels: list[NDArray[np.uint8]]


@dataclass(frozen=True)
class Checkpoint:
    """A family's config, and the names and shapes of its tensors."""

    family: str
    shapes: dict[str, tuple[int, ...]]

    @property
    def config(self) -> dict[str, Any]:
        return CONFIGS[self.family]

    def write(self, folder: Path) -> Path:
        """Write the checkpoint as its makers would: config.json, preprocessor_config.json, model.safetensors in float32."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config, indent=2), encoding="utf-8")
        (folder / "preprocessor_config.json").write_text(json.dumps(processor_config(self.family), indent=2), encoding="utf-8")
        tensors = {name: _draw(self.family, name, shape) for name, shape in self.shapes.items()}
        _save_safetensors(folder / "model.safetensors", tensors)
        return folder


def sizes_of(family: str, name: str) -> tuple[tuple[int, int], ...]:
    """Return rows and columns of tokens of a case's images."""
    return {"no_image": (), "one_image": (layout(family).one,), "two_images": layout(family).two}[name]


def case(family: str, name: str) -> Case:
    """Return a prompt with its images, each between its two marks, with text before, between and behind."""
    side, sizes = layout(family).side, sizes_of(family, name)
    rng = np.random.default_rng([SEED, *(number for size in sizes for number in size)])
    tokens, starts, pixels = rng.integers(0, VISION_START, 5).tolist(), [], []
    for rows, columns in sizes:
        tokens.append(VISION_START)
        starts.append(len(tokens))
        tokens += (([IMAGE] * columns + [VIDEO] * layout(family).row_ends) * rows)[: -1 if layout(family).row_ends else None]
        tokens += [VISION_END, *rng.integers(0, VISION_START, 4).tolist()]
        pixels.append(rng.integers(0, 256, (rows * side, columns * side, 3), np.uint8))
    return Case(tokens + rng.integers(0, VISION_START, 3).tolist(), starts, pixels)


def logit_places(tokens: list[int]) -> list[int]:
    """Return the places whose logits are compared, spread over a prompt, with its last."""
    return [int(place) for place in np.linspace(0, len(tokens) - 1, NUM_LOGITS)]


def _draw(family: str, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Draw a tensor's values, whose sizes keep the activations near one; nothing is zero or one throughout."""
    rng = np.random.default_rng([SEEDS.get(family, SEED), zlib.crc32(f"{family} {name}".encode())])
    if name.endswith(("put_min", "put_max")):  # bounds that some activations are beyond
        return np.array(rng.uniform(1.0, 1.5) * (-1 if name.endswith("min") else 1), np.float32)
    if name.endswith("A_log"):
        return rng.uniform(-1.0, 1.0, shape).astype(np.float32)
    if "embed" in name and "patch_embed" not in name:
        is_scaled = family in SCALED and "embed_tokens" in name
        return rng.normal(0.0, 0.05 if is_scaled else 0.5, shape).astype(np.float32)
    if len(shape) > 1:
        fan_in = shape[-2] if "experts" in name else int(np.prod(shape[1:]))
        return rng.normal(0.0, 1.5 / np.sqrt(fan_in), shape).astype(np.float32)
    centre = 1.0 if "norm" in name or "ln_q" in name else 0.0
    if "gemma4" in family and name.endswith(("q_norm.weight", "k_norm.weight")):
        centre = 0.5  # scores are not scaled there, and sharp ones make much of rounding
    if name.endswith("bias") or (family in AROUND_ZERO and AROUND_ZERO[family].search(name)):
        centre = 0.0
    return rng.normal(centre, 0.2, shape).astype(np.float32)


def _save_safetensors(path: Path, tensors: dict[str, NDArray[np.float32]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, array in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [place, place + array.nbytes]}
        place += array.nbytes
    written = json.dumps(header).encode()
    written += b" " * (-len(written) % 8)
    path.write_bytes(struct.pack("<Q", len(written)) + written + b"".join(array.tobytes() for array in tensors.values()))
