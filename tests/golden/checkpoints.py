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

HERE = Path(__file__).parent
VOCABULARY = 128
VISION_START, VISION_END, IMAGE, VIDEO = 124, 125, 126, 127
SIZES = {"no_image": (), "one_image": ((2, 3),), "two_images": ((3, 5), (1, 4))}  # rows and columns of tokens
COLOURS = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}
SEED = 14  # of weights, prompts and pixels
NUM_LOGITS = 8  # places whose logits are stored
NUM_GREEDY = 6

TOKENS = {
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
}
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
}
TOWER = {
    "depth": 3,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_heads": 4,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "out_hidden_size": 64,
    "num_position_embeddings": 36,
    "hidden_act": "gelu_pytorch_tanh",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "tie_word_embeddings": False,
        **TOKENS,
        "text_config": {
            **TEXT,
            "model_type": "qwen3_5_text",
            "num_hidden_layers": 4,
            "head_dim": 32,
            "full_attention_interval": 2,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_value_head_dim": 16,
            "partial_rotary_factor": 0.5,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [3, 3, 2],
                "mrope_interleaved": True,
            },
        },
        "vision_config": {**TOWER, "model_type": "qwen3_5"},
    },
    "qwen3_vl": {
        "model_type": "qwen3_vl",
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "tie_word_embeddings": False,
        **TOKENS,
        "text_config": {
            **TEXT,
            "model_type": "qwen3_vl_text",
            "num_hidden_layers": 4,
            "head_dim": 32,
            "rope_theta": 10000.0,
            "rope_scaling": {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True},
        },
        "vision_config": {**TOWER, "model_type": "qwen3_vl", "depth": 4, "deepstack_visual_indexes": [0, 2]},
    },
    "qwen3_vl_moe": {
        "model_type": "qwen3_vl_moe",
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "tie_word_embeddings": False,
        **TOKENS,
        "text_config": {
            **TEXT,
            "model_type": "qwen3_vl_moe_text",
            "num_hidden_layers": 3,
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "rope_theta": 10000.0,
            "rope_scaling": {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True},
        },
        "vision_config": {**TOWER, "model_type": "qwen3_vl_moe", "deepstack_visual_indexes": [0, 1, 2]},
    },
    "qwen2_5_vl": {  # flat, as its makers write it
        **TEXT,
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        **TOKENS,
        "num_hidden_layers": 3,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "vision_config": {
            "model_type": "qwen2_5_vl",
            "depth": 3,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_heads": 4,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "in_chans": 3,
            "out_hidden_size": 64,
            "window_size": 56,
            "fullatt_block_indexes": [1],
            "hidden_act": "silu",
        },
    },
    "qwen2_vl": {
        "model_type": "qwen2_vl",
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "tie_word_embeddings": False,
        **TOKENS,
        "text_config": {
            **TEXT,
            "model_type": "qwen2_vl_text",
            "num_hidden_layers": 3,
            "rope_theta": 10000.0,
            "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        },
        "vision_config": {
            "model_type": "qwen2_vl",
            "depth": 3,
            "embed_dim": 48,
            "hidden_size": 64,
            "mlp_ratio": 2,
            "num_heads": 4,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "in_chans": 3,
            "hidden_act": "quick_gelu",
        },
    },
}
AROUND_ZERO = re.compile(r"language_model\.(.*layernorm|.*self_attn\..*norm|norm)\.weight$")  # norms of Qwen3.5, which add 1


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
        tower = self.config["vision_config"]
        sizes = {"patch_size": tower["patch_size"], "merge_size": tower["spatial_merge_size"], "temporal_patch_size": 2}
        preprocessor = {"image_processor_type": "Qwen2VLImageProcessor", **COLOURS, **sizes}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config, indent=2), encoding="utf-8")
        (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor, indent=2), encoding="utf-8")
        tensors = {name: _draw(self.family, name, shape) for name, shape in self.shapes.items()}
        _save_safetensors(folder / "model.safetensors", tensors)
        return folder


def case(family: str, sizes: tuple[tuple[int, int], ...]) -> Case:
    """Return the prompt with images of these sizes, each between its two marks, with text before, between and behind."""
    tower = CONFIGS[family]["vision_config"]
    side = tower["patch_size"] * tower["spatial_merge_size"]
    rng = np.random.default_rng([SEED, *(number for size in sizes for number in size)])
    tokens, starts, pixels = rng.integers(0, VISION_START, 5).tolist(), [], []
    for rows, columns in sizes:
        tokens.append(VISION_START)
        starts.append(len(tokens))
        tokens += [IMAGE] * (rows * columns) + [VISION_END, *rng.integers(0, VISION_START, 4).tolist()]
        pixels.append(rng.integers(0, 256, (rows * side, columns * side, 3), np.uint8))
    return Case(tokens + rng.integers(0, VISION_START, 3).tolist(), starts, pixels)


def logit_places(tokens: list[int]) -> list[int]:
    """Return the places whose logits are compared, spread over a prompt, with its last."""
    return [int(place) for place in np.linspace(0, len(tokens) - 1, NUM_LOGITS)]


def _draw(family: str, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Draw a tensor's values, whose sizes keep the activations near one; nothing is zero or one throughout."""
    rng = np.random.default_rng([SEED, zlib.crc32(f"{family} {name}".encode())])
    if name.endswith("A_log"):
        return rng.uniform(-1.0, 1.0, shape).astype(np.float32)
    if "embed" in name and "patch_embed" not in name:
        return rng.normal(0.0, 0.5, shape).astype(np.float32)
    if len(shape) > 1:
        fan_in = shape[-2] if "experts" in name else int(np.prod(shape[1:]))
        return rng.normal(0.0, 1.5 / np.sqrt(fan_in), shape).astype(np.float32)
    centre = 1.0 if "norm" in name or "ln_q" in name else 0.0
    if name.endswith("bias") or (family == "qwen3_5" and AROUND_ZERO.search(name)):
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
