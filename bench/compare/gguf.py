"""GGUF files of the very weights weft serves, in float32, in Q8_0 and in Q4_1, for llama.cpp.

smollm2 began as a GGUF file, so llama.cpp's own tool unpacks it; tiny-hybrid is written here, in the order of heads and
with the folded constants that llama.cpp expects of a Qwen3.5. `rivals` asks for a file, `install` has built the tool.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from bench.compare.install import HOME, LLAMA_BIN, Unavailable, llama_source, run
from bench.compare.weights import folder_of
from weft.config import cache_folder
from weft.model.resolve import SMOLLM2, resolve

FILES = {"tiny-hybrid": "tiny-hybrid-with-head"}  # files of that name alone, made by an older version, have no head
HEAD = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head.norm"}


def gguf_file(model: str, kind: str) -> Path:
    """The file of a model as "f32", "Q8_0" or "Q4_1", made if it is not there; smollm2's own file is Q4_1."""
    if (model, kind) == ("smollm2", "Q4_1"):
        return smollm2_file()
    target = HOME / "models" / f"{FILES.get(model, model)}-{kind}.gguf"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    if kind != "f32":
        quantize(gguf_file(model, "f32"), partial, kind)
    elif model == "smollm2":
        quantize(smollm2_file(), partial, "F32")
    else:
        write_hybrid(folder_of(model), partial)
    partial.rename(target)
    return target


def quantize(source: Path, target: Path, kind: str) -> None:
    """Another number format for the same weights, by llama.cpp's tool."""
    run([str(LLAMA_BIN / "llama-quantize"), "--allow-requantize", str(source), str(target), kind], "quantize")


def smollm2_file() -> Path:
    """The file that weft's smollm2 folder was made from."""
    resolve("smollm2", progress=False)
    found = list(cache_folder().glob(f"*{SMOLLM2.sha256[:12]}-gguf/*.gguf"))
    if not found:
        raise Unavailable("the GGUF file smollm2 was made from is gone; remove weft's cache folder and try again")
    return found[0]


def write_hybrid(folder: Path, target: Path) -> None:
    """A Qwen3.5 folder as a GGUF file; a server that is not told to use its head for multi-token prediction skips that."""
    sys.path.insert(0, str(llama_source() / "gguf-py"))  # llama.cpp carries the writer
    import gguf  # type: ignore[import-not-found]

    config = json.loads((folder / "config.json").read_text())["text_config"]
    writer = gguf.GGUFWriter(str(target), "qwen35")
    writer.add_name(folder.name)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    add_shape(writer, config)
    add_tokenizer(writer, gguf.TokenType, folder, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN35, config["num_hidden_layers"] + config["mtp_num_hidden_layers"])
    for name, array in tensors(folder, config):
        new = names.get_name(name.replace("language_model.", ""), try_suffixes=(".weight", ".bias"))
        if new is None:
            raise Unavailable(f"llama.cpp's Qwen3.5 has no place for {name}")
        writer.add_tensor(new, np.ascontiguousarray(array, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_shape(writer: Any, config: dict[str, Any]) -> None:
    """The numbers of the architecture. Any: the writer is untyped and comes with llama.cpp."""
    rope = config["rope_parameters"]
    writer.add_block_count(config["num_hidden_layers"] + config["mtp_num_hidden_layers"])
    writer.add_nextn_predict_layers(config["mtp_num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(config["head_dim"] * rope["partial_rotary_factor"]))
    writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    writer.add_full_attention_interval(config["full_attention_interval"])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])


def add_tokenizer(writer: Any, kinds: Any, folder: Path, config: dict[str, Any]) -> None:
    """Words, merges and the chat template."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    added = {token["id"]: token for token in tokenizer["added_tokens"]}
    words = {number: word for word, number in tokenizer["model"]["vocab"].items()}
    words |= {number: token["content"] for number, token in added.items()}
    types = {number: kinds.CONTROL if token["special"] else kinds.USER_DEFINED for number, token in added.items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")  # the same pattern splits the text
    writer.add_token_list([words[number] for number in range(config["vocab_size"])])
    writer.add_token_types([types.get(number, kinds.NORMAL) for number in range(config["vocab_size"])])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template((folder / "chat_template.jinja").read_text())


def tensors(folder: Path, config: dict[str, Any]) -> list[tuple[str, np.ndarray]]:
    """Every tensor as llama.cpp wants it."""
    from safetensors.numpy import load_file

    weights = load_file(folder / "model.safetensors")
    return [folded(placed(name, config["num_hidden_layers"]), array, config) for name, array in weights.items()]


def placed(name: str, layers: int) -> str:
    """The name of a tensor; for llama.cpp the head is one layer more than the trunk has."""
    if not name.startswith("mtp."):
        return name
    part, _, rest = name.removeprefix("mtp.").removeprefix("layers.0.").partition(".")
    return f"model.layers.{layers}.{HEAD.get(part, part)}.{rest}"


def folded(name: str, array: np.ndarray, config: dict[str, Any]) -> tuple[str, np.ndarray]:
    """One tensor: decay as minus exp, norms with their one added, value heads in llama.cpp's order."""
    value_dim = config["linear_value_head_dim"]
    before_values = 2 * config["linear_key_head_dim"] * config["linear_num_key_heads"]
    match name.rpartition("linear_attn.")[2] if "linear_attn." in name else name:
        case "A_log":
            return name, -np.exp(tiled(array, config, 1))
        case "dt_bias":
            return name.replace("dt_bias", "dt_proj.bias"), tiled(array, config, 1)
        case "in_proj_a.weight" | "in_proj_b.weight":
            return name, tiled(array, config, 1)
        case "in_proj_z.weight":
            return name, tiled(array, config, value_dim)
        case "in_proj_qkv.weight" | "conv1d.weight":
            flat = array.reshape(len(array), -1)
            return name, np.concatenate([flat[:before_values], tiled(flat[before_values:], config, value_dim)])
        case "out_proj.weight":
            return name, tiled(array.T, config, value_dim).T
        case "norm.weight":
            return name, array
    return name, array + 1 if name.endswith("norm.weight") else array


def tiled(array: np.ndarray, config: dict[str, Any], size: int) -> np.ndarray:
    """Value heads stand grouped by their key head; llama.cpp wants the first of every group, then the second."""
    keys = config["linear_num_key_heads"]
    heads = array.reshape(keys, config["linear_num_value_heads"] // keys, size, *array.shape[1:])
    return heads.swapaxes(0, 1).reshape(array.shape)
