"""Configs of the tiny vision-language checkpoints, as their makers write config.json and the image processor's."""

from dataclasses import dataclass
from typing import Any

VOCABULARY = 128
VISION_START, VISION_END, IMAGE, VIDEO = 124, 125, 126, 127
COLOURS = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}

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
SIGLIP = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "patch_size": 14,
    "num_channels": 3,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
GEMMA4_TEXT = {
    **TEXT,
    "model_type": "gemma4_text",
    "head_dim": 16,
    "global_head_dim": 32,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 6,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}
GEMMA4_TOWER = {
    "model_type": "gemma4_vision",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 12,
    "patch_size": 8,
    "pooling_kernel_size": 2,
    "position_embedding_size": 24,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
}
PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 12,
    "patch_size": 14,
    "image_size": 140,
    "hidden_act": "gelu",
    "rope_theta": 10000.0,
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
    "gemma3": {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "vocab_size": VOCABULARY,
        "boi_token_index": VISION_START,
        "eoi_token_index": VISION_END,
        "image_token_index": IMAGE,
        "mm_tokens_per_image": 9,
        "text_config": {
            **TEXT,
            "model_type": "gemma3_text",
            "num_hidden_layers": 4,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": 6,  # less than an image
            "sliding_window_pattern": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "tie_word_embeddings": True,
        },
        "vision_config": {**SIGLIP, "model_type": "siglip_vision_model", "image_size": 84, "vision_use_head": False},
    },
    "gemma4": {
        "model_type": "gemma4",
        "architectures": ["Gemma4ForConditionalGeneration"],
        "vocab_size": VOCABULARY,
        "boi_token_id": VISION_START,
        "eoi_token_id": VISION_END,
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "audio_token_id": VIDEO,
        "text_config": {
            **GEMMA4_TEXT,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "hidden_size_per_layer_input": 0,
            "use_bidirectional_attention": "vision",
        },
        "vision_config": {**GEMMA4_TOWER, "standardize": True},
    },
    "gemma4_small": {
        "model_type": "gemma4",
        "architectures": ["Gemma4ForConditionalGeneration"],
        "vocab_size": VOCABULARY,
        "boi_token_id": VISION_START,
        "eoi_token_id": VISION_END,
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "audio_token_id": VIDEO,
        "text_config": {
            **GEMMA4_TEXT,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCABULARY,
            "use_bidirectional_attention": None,
        },
        "vision_config": {**GEMMA4_TOWER, "use_clipped_linears": True},
    },
    "idefics3": {
        "model_type": "idefics3",
        "architectures": ["Idefics3ForConditionalGeneration"],
        "image_token_id": IMAGE,
        "scale_factor": 2,
        "tie_word_embeddings": False,
        "text_config": {**TEXT, "model_type": "llama", "num_hidden_layers": 3, "rope_theta": 10000.0, "pad_token_id": 0},
        "vision_config": {**SIGLIP, "model_type": "idefics3_vision", "image_size": 84},
    },
    "smolvlm": {
        "model_type": "smolvlm",
        "architectures": ["SmolVLMForConditionalGeneration"],
        "image_token_id": IMAGE,
        "scale_factor": 3,
        "tie_word_embeddings": False,
        "text_config": {**TEXT, "model_type": "llama", "num_hidden_layers": 3, "rope_theta": 10000.0, "pad_token_id": 0},
        "vision_config": {**SIGLIP, "model_type": "smolvlm_vision", "image_size": 84},
    },
    "lfm2_vl": {
        "model_type": "lfm2_vl",
        "architectures": ["Lfm2VlForConditionalGeneration"],
        "image_token_id": IMAGE,
        "downsample_factor": 2,
        "projector_hidden_size": 72,
        "tie_word_embeddings": True,
        "text_config": {
            **TEXT,
            "model_type": "lfm2",
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention"] * 2,
            "norm_eps": 1e-5,
            "conv_bias": False,
            "conv_L_cache": 3,
            "block_dim": 64,
            "block_ff_dim": 96,
            "block_multiple_of": 8,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
        },
        "vision_config": {**SIGLIP, "model_type": "siglip2_vision_model", "num_patches": 25, "vision_use_head": False},
    },
    "mistral3": {
        "model_type": "mistral3",
        "architectures": ["Mistral3ForConditionalGeneration"],
        "image_token_index": IMAGE,
        "spatial_merge_size": 2,
        "vision_feature_layer": -1,
        "tie_word_embeddings": False,
        "text_config": {**TEXT, "model_type": "mistral", "num_hidden_layers": 3, "head_dim": 16, "rope_theta": 10000.0},
        "vision_config": {**PIXTRAL, "hidden_act": "silu"},
    },
    "pixtral": {  # as transformers has it
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "image_token_index": IMAGE,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "tie_word_embeddings": False,
        "text_config": {**TEXT, "model_type": "mistral", "num_hidden_layers": 3, "head_dim": 16, "rope_theta": 10000.0},
        "vision_config": PIXTRAL,
    },
}


def _qwen_processor(config: dict[str, Any]) -> dict[str, Any]:
    tower = config["vision_config"]
    sizes = {"patch_size": tower["patch_size"], "merge_size": tower["spatial_merge_size"], "temporal_patch_size": 2}
    return {"image_processor_type": "Qwen2VLImageProcessor", **COLOURS, **sizes}


def _gemma3_processor(config: dict[str, Any]) -> dict[str, Any]:
    side = config["vision_config"]["image_size"]
    return {"image_processor_type": "Gemma3ImageProcessor", **COLOURS, "resample": 2, "size": {"height": side, "width": side}}


def _gemma4_processor(config: dict[str, Any]) -> dict[str, Any]:
    tower = config["vision_config"]
    sizes = {"patch_size": tower["patch_size"], "pooling_kernel_size": tower["pooling_kernel_size"], "max_soft_tokens": 280}
    return {"image_processor_type": "Gemma4ImageProcessor", "do_normalize": False, **sizes}


def _idefics3_processor(config: dict[str, Any]) -> dict[str, Any]:
    side = config["vision_config"]["image_size"]
    sizes = {"size": {"longest_edge": 4 * side}, "max_image_size": {"longest_edge": side}}
    return {"image_processor_type": "Idefics3ImageProcessor", **COLOURS, "resample": 1, **sizes}


def _lfm2_processor(config: dict[str, Any]) -> dict[str, Any]:
    sizes = {"encoder_patch_size": config["vision_config"]["patch_size"], "downsample_factor": config["downsample_factor"]}
    tiles = {"tile_size": 112, "min_tiles": 2, "max_tiles": 4, "min_image_tokens": 4, "max_image_tokens": 16}
    return {"image_processor_type": "Lfm2VlImageProcessorFast", **COLOURS, **sizes, **tiles, "max_pixels_tolerance": 2.0}


def _pixtral_processor(config: dict[str, Any]) -> dict[str, Any]:
    side = config["vision_config"]["patch_size"]
    sizes = {"size": {"longest_edge": 140}, "patch_size": {"height": side, "width": side}}
    return {"image_processor_type": "PixtralImageProcessor", **COLOURS, "resample": 3, **sizes}


PROCESSORS = {
    "mistral3": _pixtral_processor,
    "pixtral": _pixtral_processor,
    "lfm2_vl": _lfm2_processor,
    "gemma3": _gemma3_processor,
    "gemma4": _gemma4_processor,
    "gemma4_small": _gemma4_processor,
    "idefics3": _idefics3_processor,
    "smolvlm": _idefics3_processor,
}


def processor_config(family: str) -> dict[str, Any]:
    """Return a family's preprocessor_config.json."""
    return PROCESSORS.get(family, _qwen_processor)(CONFIGS[family])


@dataclass(frozen=True)
class Layout:
    """How prompts of a family hold images: pixels of a token's side, and rows and columns of tokens of the images drawn."""

    side: int
    one: tuple[int, int] = (2, 3)
    two: tuple[tuple[int, int], tuple[int, int]] = ((3, 5), (1, 4))
    has_places: bool = False  # tokens of images have positions of three axes
    row_ends: int = 0  # marks behind each row of an image's tokens


def layout(family: str) -> Layout:
    tower = CONFIGS[family]["vision_config"]
    if family in LAYOUTS:
        return LAYOUTS[family]
    return Layout(tower["patch_size"] * tower["spatial_merge_size"], has_places=True)


LAYOUTS = {
    "mistral3": Layout(28, row_ends=1),
    "pixtral": Layout(14, two=((4, 5), (1, 4)), row_ends=1),
    "lfm2_vl": Layout(28),
    "gemma3": Layout(28, (3, 3), ((3, 3), (3, 3))),
    "gemma4": Layout(16),
    "gemma4_small": Layout(16),
    "idefics3": Layout(28, (3, 3), ((3, 3), (3, 3))),
    "smolvlm": Layout(42, (2, 2), ((2, 2), (2, 2))),
}
