"""The facts of config.json out of a GGUF file's metadata, rope scaling among them.

It knows what mlx-lm's llama and qwen2 understand and refuses what they would ignore. It knows nothing of how
weights are written; `convert` uses it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from weft.errors import BadModel, UnsupportedModel
from weft.model.gguf.file import GgufFile, short, to_float32

# Metadata that would change the numbers and that mlx-lm's llama and qwen2 do not know.
REFUSED = (
    "attention.scale", "attention.sliding_window", "attention.clamp_kqv", "attention.max_alibi_bias", "logit_scale",
    "embedding_scale", "residual_scale", "expert_count", "use_parallel_residual", "rope.scaling.attn_factor",
)  # fmt: skip


def model_config(file: GgufFile) -> dict[str, Any]:
    """What config.json says of the model, without its quantisation."""
    model_type = file.get("general.architecture", str)
    if model_type not in ("llama", "qwen2"):
        raise UnsupportedModel(
            f"{file.path} holds a model of architecture {model_type}; weft converts llama and qwen2 GGUF files, "
            "so use a folder in mlx-lm's format for this one"
        )
    for key in REFUSED:
        if file.metadata.get(f"{model_type}.{key}"):
            value = file.metadata[f"{model_type}.{key}"]
            raise UnsupportedModel(f"{file.path} asks for {model_type}.{key} = {short(value)}, which mlx-lm can not honour")

    def number(key: str, default: int | None = None) -> int:
        return int(file.get(f"{model_type}.{key}", int, default))

    heads, hidden, layers = number("attention.head_count"), number("embedding_length"), number("block_count")
    if not 0 < heads <= hidden or layers > len(file.tensors) or "token_embd.weight" not in file.tensors:
        raise BadModel(
            f"{file.path} claims {heads} heads, {hidden} values and {layers} layers, which its {len(file.tensors)} "
            "tensors can not be; download it again"
        )
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM" if model_type == "llama" else "Qwen2ForCausalLM"],
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv", heads),
        "head_dim": number("attention.key_length", hidden // heads),
        "max_position_embeddings": number("context_length"),
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "rms_norm_eps": _short_float(file.get(f"{model_type}.attention.layer_norm_rms_epsilon", float)),
        "rope_theta": _short_float(file.get(f"{model_type}.rope.freq_base", float, 10000.0)),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.get("tokenizer.ggml.eos_token_id", int),
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
    }
    if model_type == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        config["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    _check_heads(
        file,
        config,
        number("rope.dimension_count", config["head_dim"]),
        number("attention.value_length", config["head_dim"]),
    )
    if scaling := _rope_scaling(file, config):
        config["rope_scaling"] = scaling
    return config


def _check_heads(file: GgufFile, config: dict[str, Any], rotated: int, value_length: int) -> None:
    head = config["head_dim"]
    if head % 2 or rotated != head or value_length != head:
        raise UnsupportedModel(
            f"{file.path} has heads of {head} values of which {rotated} are rotated, and {value_length} as values; "
            "weft converts files where all three are the same even number"
        )
    if config["model_type"] == "qwen2" and head * config["num_attention_heads"] != config["hidden_size"]:
        raise UnsupportedModel(f"{file.path} has a head size of {head}, which mlx-lm's qwen2 can not take")


def _rope_scaling(file: GgufFile, config: dict[str, Any]) -> dict[str, Any] | None:
    model_type = config["model_type"]
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file, config)
    kind = file.get(f"{model_type}.rope.scaling.type", str, "none")
    factor = file.get(f"{model_type}.rope.scaling.factor", float, file.metadata.get(f"{model_type}.rope.scale_linear", 1.0))
    original = file.metadata.get(f"{model_type}.rope.scaling.original_context_length")
    if kind == "none" or factor in (0.0, 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and isinstance(original, int):
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise UnsupportedModel(f"{file.path} asks for rope scaling of type {kind} by {factor}, which weft can not honour")


def _llama3_scaling(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Llama 3's files carry the finished divisors of the frequencies; find the parameters that give them.

    Every Llama 3 so far has the same three besides the factor, and the factor is the largest divisor.
    """
    tensor = file.tensors["rope_freqs.weight"]
    divisors = to_float32(tensor.kind, tensor.rows).ravel()
    factor, low, high, original = float(divisors.max()), 1.0, 4.0, 8192
    powers = np.arange(0, config["head_dim"], 2) / config["head_dim"]
    turns = original / (2 * math.pi * config["rope_theta"] ** powers)  # full turns within the original context
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    if len(divisors) != len(powers) or not np.allclose(divisors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-4):
        raise UnsupportedModel(
            f"{file.path} scales its rope frequencies in a way that is not Llama 3's; mlx-lm can not honour it"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def more_ends(file: GgufFile) -> list[int]:
    """Tokens besides eos that end an answer: end of turn, end of message."""
    ends = (file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom"))
    return [end for end in ends if isinstance(end, int)]


def _short_float(value: float) -> float:
    """The shortest decimal that is the same float32: the file's 9.999999747378752e-06 was written as 1e-05."""
    return float(str(np.float32(value)))


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write one of the folder's JSON files."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
