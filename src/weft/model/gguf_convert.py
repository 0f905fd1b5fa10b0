"""Converts a GGUF file of architecture llama or qwen2 into a folder that mlx-lm loads: config, tokenizer and weights.

The file's 4- and 8-bit blocks are MLX's affine quantisation with groups of 32 in another order, so they can be kept as they are.
"""

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from weft.errors import BadModel, UnsupportedModel
from weft.memory.safetensors import DTYPE_BYTES, encode_header
from weft.model import gguf
from weft.model.download import Progress
from weft.model.gguf import BF16, F16, F32, GROUP, Bytes, GgufFile, GgufTensor, TensorType, scales_and_biases, to_float32

PIECE_VALUES = 1 << 22  # values converted at a time: 16 MB as float32
# Metadata that would change the numbers and that mlx-lm's llama and qwen2 do not know.
REFUSED = (
    "attention.scale", "attention.sliding_window", "attention.clamp_kqv", "attention.max_alibi_bias", "logit_scale",
    "embedding_scale", "residual_scale", "expert_count", "use_parallel_residual", "rope.scaling.attn_factor",
)  # fmt: skip
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # types of tokens that stand for themselves and are never split
BEFORE_DIGITS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
AFTER_DIGITS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SMOLLM, GPT2, QWEN2, LLAMA3 = ("smollm",), ("gpt-2", "default"), ("qwen2",), ("llama-bpe", "llama3", "llama-v3")
SAMPLING = {"temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "penalty_repeat": "repetition_penalty"}

Config = dict[str, Any]


def convert(path: Path, folder: Path, *, quantized: bool, progress: Progress) -> None:
    """Convert a GGUF file into an existing folder in mlx-lm's format, in float32 or, if `quantized`, as the file is quantised."""
    file = gguf.read(path)
    config = _model_config(file)
    planned, quantization = _plan(_renamed_tensors(file, config), quantized)
    config |= quantization
    _write_tokenizer(file, config, folder)
    _write_json(folder / "config.json", config)
    others = (file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom"))  # end of turn, of message
    eos = [config["eos_token_id"], *(token for token in others if isinstance(token, int))]
    said = {name: file.metadata.get(f"general.sampling.{key}") for key, name in SAMPLING.items()}
    sampling = {name: value for name, value in said.items() if isinstance(value, int | float)}
    _write_json(folder / "generation_config.json", {"eos_token_id": list(dict.fromkeys(eos)), **sampling})
    _write_weights(folder / "model.safetensors", planned, partial(progress, f"converting {path.name}"))


def _write_json(path: Path, value: Config) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _model_config(file: GgufFile) -> Config:
    model_type = file.get("general.architecture", str)
    if model_type not in ("llama", "qwen2"):
        what = f"{file.path} holds a model of architecture {model_type}; weft converts llama and qwen2 GGUF files"
        raise UnsupportedModel(f"{what}, so use a folder in mlx-lm's format for this one")
    for key in (f"{model_type}.{name}" for name in REFUSED):
        if value := file.metadata.get(key):
            raise UnsupportedModel(f"{file.path} asks for {key} = {gguf.shorten(value)}, which mlx-lm can not honour")

    def number(key: str, default: int | None = None) -> int:
        return int(file.get(f"{model_type}.{key}", int, default))

    heads, hidden, layers = number("attention.head_count"), number("embedding_length"), number("block_count")
    if not 0 < heads <= hidden or layers > len(file.tensors) or "token_embd.weight" not in file.tensors:
        what = f"{file.path} claims {heads} heads, {hidden} values and {layers} layers"
        raise BadModel(f"{what}, which its {len(file.tensors)} tensors can not be; download it again")
    head = number("attention.key_length", hidden // heads)
    config: Config = {
        "architectures": ["LlamaForCausalLM" if model_type == "llama" else "Qwen2ForCausalLM"],
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv", heads),
        "head_dim": head,
        "max_position_embeddings": number("context_length"),
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "rms_norm_eps": _shortest(file.get(f"{model_type}.attention.layer_norm_rms_epsilon", float)),
        "rope_theta": _shortest(file.get(f"{model_type}.rope.freq_base", float, 10000.0)),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.get("tokenizer.ggml.eos_token_id", int),
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
    }
    if model_type == "llama":
        config |= {"attention_bias": "blk.0.attn_q.bias" in file.tensors, "mlp_bias": "blk.0.ffn_up.bias" in file.tensors}
    rotated, value_length = number("rope.dimension_count", head), number("attention.value_length", head)
    if head % 2 or rotated != head or value_length != head:
        what = f"{file.path} has heads of {head} values of which {rotated} are rotated, and {value_length} as values"
        raise UnsupportedModel(f"{what}; weft converts files where all three are the same even number")
    if model_type == "qwen2" and head * heads != hidden:
        raise UnsupportedModel(f"{file.path} has a head size of {head}, which mlx-lm's qwen2 can not take")
    return config | _rope_scaling(file, config)


def _shortest(value: float) -> float:
    """Return the shortest decimal that rounds to this float32: the file's 9.999999747378752e-06 was written as 1e-05."""
    return float(str(np.float32(value)))


def _rope_scaling(file: GgufFile, config: Config) -> Config:
    if "rope_freqs.weight" in file.tensors:
        return {"rope_scaling": _llama3_scaling(file, config)}
    prefix = f"{config['model_type']}.rope"
    kind = file.get(f"{prefix}.scaling.type", str, "none")
    factor = file.get(f"{prefix}.scaling.factor", float, file.metadata.get(f"{prefix}.scale_linear", 1.0))
    original = file.metadata.get(f"{prefix}.scaling.original_context_length")
    if kind == "none" or factor in (0.0, 1.0):
        return {}
    if kind == "linear":
        return {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    if kind == "yarn" and isinstance(original, int):
        return {"rope_scaling": {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}}
    raise UnsupportedModel(f"{file.path} asks for rope scaling of type {kind} by {factor}, which weft can not honour")


def _llama3_scaling(file: GgufFile, config: Config) -> Config:
    """Return Llama 3's rope_scaling config, inferred from the file's frequency divisors; raises UnsupportedModel on others."""
    tensor = file.tensors["rope_freqs.weight"]
    divisors = to_float32(tensor.type, tensor.rows).ravel()
    # Every Llama 3 so far has the same three parameters besides the factor, and the factor is the largest divisor.
    factor, low, high, original = float(divisors.max()), 1.0, 4.0, 8192
    powers = np.arange(0, config["head_dim"], 2) / config["head_dim"]
    turns = original / (2 * math.pi * config["rope_theta"] ** powers)  # full turns within the original context
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    if len(divisors) != len(powers) or not np.allclose(divisors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-4):
        what = f"{file.path} scales its rope frequencies in a way that is not Llama 3's"
        raise UnsupportedModel(f"{what}; mlx-lm can not honour it")
    parameters = {"factor": factor, "low_freq_factor": low, "high_freq_factor": high}
    return {"rope_type": "llama3", **parameters, "original_max_position_embeddings": original}


def _write_tokenizer(file: GgufFile, config: Config, folder: Path) -> None:
    kind = file.get("tokenizer.ggml.model", str)
    if kind != "gpt2":
        what = f"{file.path} has a tokenizer of kind {kind}; weft builds byte-level BPE (gpt2) tokenizers from GGUF files"
        raise UnsupportedModel(f"{what}, so use a folder in mlx-lm's format for this model")
    tokens = file.get("tokenizer.ggml.tokens", list)
    if len(tokens) > config["vocab_size"] or len(set(tokens)) != len(tokens):
        raise BadModel(f"{file.path} has {len(tokens)} tokens, some twice or more than its {config['vocab_size']} embeddings")
    special: dict[str, str] = {}
    for name, key in {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}.items():
        position = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if position is None:
            continue
        if not isinstance(position, int) or not 0 <= position < len(tokens):
            raise BadModel(f"{file.path} says its {key} token is {gguf.shorten(position)}, but it has {len(tokens)} tokens")
        special[name] = tokens[position]
    _build_tokenizer(file, tokens, special.get("bos_token")).save(str(folder / "tokenizer.json"))
    facts = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        "add_bos_token": bool(file.metadata.get("tokenizer.ggml.add_bos_token", False)),
        "chat_template": file.metadata.get("tokenizer.chat_template"),
        **special,
    }
    _write_json(folder / "tokenizer_config.json", {key: value for key, value in facts.items() if value is not None})


def _build_tokenizer(file: GgufFile, tokens: list[str], bos: str | None) -> Any:
    """Build a byte-level BPE tokenizer of the file's vocabulary; typed Any, because the stubs of `tokenizers` lack setters."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    types = file.get("tokenizer.ggml.token_type", list, [1] * len(tokens))
    merges = [tuple(text.split(" ", 1)) for text in file.get("tokenizer.ggml.merges", list)]
    if broken := [" ".join(merge) for merge in merges if len(merge) != 2 or not all(merge)]:
        raise BadModel(f"{file.path} has the merge {broken[0]!r}, which is not two parts; download it again")
    pre = file.get("tokenizer.ggml.pre", str)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    try:
        tokenizer: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in LLAMA3))
    except Exception as error:  # tokenizers raises nothing narrower
        raise BadModel(f"{file.path} has a vocabulary that does not fit its merges ({error}); download it again") from error
    if pre in QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(file, pre)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    if bos is not None and file.metadata.get("tokenizer.ggml.add_bos_token", False):
        forms = {"single": f"{bos} $A", "pair": f"{bos} $A {bos}:1 $B:1"}
        tokenizer.post_processor = processors.TemplateProcessing(**forms, special_tokens=[(bos, vocabulary[bos])])
    whole = [(token, kind) for token, kind in zip(tokens, types, strict=False) if kind in (UNKNOWN, CONTROL, USER_DEFINED)]
    tokenizer.add_tokens([AddedToken(token, special=kind != USER_DEFINED, normalized=False) for token, kind in whole])
    return tokenizer


def _pre_tokenizer(file: GgufFile, pre: str) -> Any:
    """Return the pre-tokenizer named `pre`; unknown names are refused, as a wrong split would silently give wrong tokens."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    if pre in SMOLLM:
        return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)])
    if pre in GPT2:
        return ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in QWEN2 + LLAMA3:
        pattern = BEFORE_DIGITS + (r"\p{N}" if pre in QWEN2 else r"\p{N}{1,3}") + AFTER_DIGITS
        return Sequence([Split(Regex(pattern), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)])
    what = f"{file.path} cuts its text with the pre-tokenizer {pre}; weft knows {', '.join(SMOLLM + GPT2 + QWEN2 + LLAMA3)}"
    raise UnsupportedModel(f"{what}, so use a folder in mlx-lm's format for this model")


class PlannedTensor(NamedTuple):
    """A tensor to be written to model.safetensors, and the function that makes its values from rows of the GGUF file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: GgufTensor
    make: Callable[[TensorType, Bytes], npt.NDArray[Any]]


def _renamed_tensors(file: GgufFile, config: Config) -> dict[str, GgufTensor]:
    """Return the file's tensors by mlx-lm's names; raises ModelError if one is missing, misshapen or unknown to mlx-lm."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads, vocabulary = config["num_attention_heads"], config["num_key_value_heads"], config["vocab_size"]
    is_llama = config["model_type"] == "llama"
    attention_bias, mlp_bias = config.get("attention_bias", False), config.get("mlp_bias", False)
    qkv_bias = attention_bias or not is_llama  # mlx-lm's qwen2 always has these three
    modules = {  # name in mlx-lm, shape, heads whose two halves have their rows interleaved (llama's q and k), has a bias
        "attn_q": ("self_attn.q_proj", heads * head, hidden, heads * is_llama, qkv_bias),
        "attn_k": ("self_attn.k_proj", kv_heads * head, hidden, kv_heads * is_llama, qkv_bias),
        "attn_v": ("self_attn.v_proj", kv_heads * head, hidden, 0, qkv_bias),
        "attn_output": ("self_attn.o_proj", hidden, heads * head, 0, attention_bias),
        "ffn_gate": ("mlp.gate_proj", inner, hidden, 0, mlp_bias),
        "ffn_up": ("mlp.up_proj", inner, hidden, 0, mlp_bias),
        "ffn_down": ("mlp.down_proj", hidden, inner, 0, mlp_bias),
    }
    places: dict[str, tuple[str, tuple[int, ...], int]] = {
        "token_embd.weight": ("model.embed_tokens.weight", (vocabulary, hidden), 0),
        "output_norm.weight": ("model.norm.weight", (hidden,), 0),
    }
    if not config["tie_word_embeddings"]:
        places["output.weight"] = ("lm_head.weight", (vocabulary, hidden), 0)
    for layer in range(config["num_hidden_layers"]):
        here, there = f"blk.{layer}", f"model.layers.{layer}"
        places[f"{here}.attn_norm.weight"] = (f"{there}.input_layernorm.weight", (hidden,), 0)
        places[f"{here}.ffn_norm.weight"] = (f"{there}.post_attention_layernorm.weight", (hidden,), 0)
        for name, (module, rows, columns, interleaved_heads, has_bias) in modules.items():
            places[f"{here}.{name}.weight"] = (f"{there}.{module}.weight", (rows, columns), interleaved_heads)
            if has_bias:
                places[f"{here}.{name}.bias"] = (f"{there}.{module}.bias", (rows,), interleaved_heads)
    if missing := [name for name in places if name not in file.tensors]:
        raise BadModel(f"{file.path} lacks the tensor {missing[0]}; download or convert the file again")
    if unknown := [name for name in file.tensors if name not in places and name != "rope_freqs.weight"]:
        raise UnsupportedModel(f"{file.path} has the tensor {unknown[0]}, which mlx-lm's {config['model_type']} does not take")
    return {name: _in_order(file, source, shape, heads) for source, (name, shape, heads) in places.items()}


def _plan(tensors: dict[str, GgufTensor], quantized: bool) -> tuple[list[PlannedTensor], Config]:
    """Return the tensors to write to model.safetensors, and config.json's `quantization` entry ({} if none is quantised)."""
    # Beside quantised modules all tensors get one dtype where it holds their values, so that the model computes in one.
    kinds = {tensor.type for tensor in tensors.values()} - {F32}
    common = F32 if not quantized or not kinds else BF16 if kinds == {BF16} else F16
    planned: list[PlannedTensor] = []
    modules: Config = {}
    for name, tensor in tensors.items():
        if not quantized or tensor.type.bits is None:
            kind = common if common is not F32 and _is_exact(tensor, common) else F32
            planned.append(PlannedTensor(name, kind.name, tensor.shape, tensor, partial(_cast, kind)))
            continue
        module, bits, (rows, columns) = name.removesuffix(".weight"), tensor.type.bits, tensor.shape
        modules[module] = {"group_size": GROUP, "bits": bits, "mode": "affine"}
        planned += [
            PlannedTensor(f"{module}.weight", "U32", (rows, columns * bits // 32), tensor, gguf.codes_as_words),
            PlannedTensor(f"{module}.scales", "F16", (rows, columns // GROUP), tensor, lambda *of: scales_and_biases(*of)[0]),
            PlannedTensor(f"{module}.biases", "F16", (rows, columns // GROUP), tensor, lambda *of: scales_and_biases(*of)[1]),
        ]
    least: Config = min(modules.values(), key=lambda one: one["bits"], default={})
    return planned, {"quantization": least | modules} if modules else {}


def _in_order(file: GgufFile, name: str, shape: tuple[int, ...], interleaved_heads: int) -> GgufTensor:
    """Return a tensor with its rows in mlx-lm's order; raises BadModel if its shape is wrong or its scales are not finite."""
    tensor = file.tensors[name]
    kind, rows = tensor.type, tensor.rows
    if tensor.shape != shape:
        raise BadModel(f"{file.path} has {name} of shape {tensor.shape} where its metadata asks for {shape}")
    with np.errstate(all="ignore"):
        if kind.bits and not all(np.isfinite(numbers).all() for numbers in scales_and_biases(kind, rows)):
            raise BadModel(f"{file.path} has scales in {name} that are no usable numbers; download it again")
    if not interleaved_heads:
        return tensor
    # llama files keep the two halves of each head's q and k rows interleaved: 0, d/2, 1, d/2 + 1, …
    return tensor._replace(rows=rows[np.arange(len(rows)).reshape(interleaved_heads, -1, 2).swapaxes(1, 2).ravel()])


def _is_exact(tensor: GgufTensor, kind: TensorType) -> bool:
    again = to_float32(kind, _cast(kind, tensor.type, tensor.rows).view(np.uint8))
    return np.array_equal(to_float32(tensor.type, tensor.rows), again)


def _cast(target: TensorType, kind: TensorType, rows: Bytes) -> npt.NDArray[Any]:
    values = to_float32(kind, rows)
    if target is BF16:
        return (values.view(np.uint32) >> 16).astype(np.uint16)  # truncates; used only where nothing is lost
    with np.errstate(over="ignore"):
        return values.astype("<f2" if target is F16 else "<f4")


def _write_weights(path: Path, planned: list[PlannedTensor], report: Callable[[int, int], None]) -> None:
    """Write model.safetensors piece by piece, to bound memory; `report` gets the bytes written so far and in all."""
    entries = {one.name: (one.dtype, one.shape, math.prod(one.shape) * DTYPE_BYTES[one.dtype]) for one in planned}
    done, total = 0, sum(nbytes for _, _, nbytes in entries.values())
    with path.open("wb") as sink:
        sink.write(encode_header(entries, {"format": "mlx"}))
        for one in planned:
            kind, rows = one.source.type, one.source.rows
            num_rows = max(1, PIECE_VALUES // (rows.shape[1] // kind.num_bytes * kind.num_values))
            for start in range(0, len(rows), num_rows):
                done += sink.write(one.make(kind, rows[start : start + num_rows]).tobytes())
                report(done, total)
