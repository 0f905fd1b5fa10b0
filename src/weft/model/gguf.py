"""A GGUF file of architecture llama or qwen2 becomes a folder that mlx-lm loads: weights, config and tokenizer.

Weights are written as float32, or as the file holds them: its 4- and 8-bit blocks are MLX's affine quantisation with
groups of 32 in another order, so nothing is lost. It knows nothing of caches and downloads; `resolve` calls `convert`.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from weft.errors import BadModel, UnsupportedModel

FORMAT = 1  # raise it when `convert` writes something else for the same file: cached folders carry it in their name
GROUP = 32  # values that share a scale, in GGUF's blocks and in what we write
PIECE_VALUES = 1 << 22  # values converted at a time: 16 MB as float32

Bytes = npt.NDArray[np.uint8]
Report = Callable[[int, int], None]  # bytes written, bytes in all


class Kind(NamedTuple):
    """How a tensor's values are stored: `values` of them in a block of `size` bytes."""

    name: str
    values: int
    size: int
    bits: int | None = None  # of MLX's affine quantisation, for the kinds that repack into it


F32, F16, BF16 = Kind("F32", 1, 4), Kind("F16", 1, 2), Kind("BF16", 1, 2)
Q4_0, Q4_1, Q8_0 = Kind("Q4_0", GROUP, 18, 4), Kind("Q4_1", GROUP, 20, 4), Kind("Q8_0", GROUP, 34, 8)
KINDS = {0: F32, 1: F16, 2: Q4_0, 3: Q4_1, 8: Q8_0, 30: BF16}
OTHER_KINDS = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    """One tensor where it lies in the file."""

    name: str
    kind: Kind
    shape: tuple[int, ...]  # slowest axis first, as numpy counts; GGUF writes it the other way round
    rows: Bytes  # (rows, bytes of a row)


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file, read as far as its table of contents."""

    path: Path
    metadata: dict[str, Any]  # numbers, strings and lists as the file has them
    tensors: dict[str, Tensor]

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """The metadata under `key`; without a default it must be there, and it must be of this kind."""
        value = self.metadata.get(key, default)
        if value is None:
            raise BadModel(f"{self.path} lacks the metadata {key}; download or convert the file again")
        if not isinstance(value, kind):
            raise UnsupportedModel(f"{self.path} has {key} = {_short(value)}, which weft can not read; use another file")
        return value


def convert(path: Path, folder: Path, *, quantized: bool, report: Report) -> None:
    """Write `path` into the existing folder `folder` as mlx-lm has it: float32, or quantised as the file is."""
    file = read(path)
    config = _config(file)
    tensors = _planned(file, config, quantized)
    if quantized and (quantization := _quantization(file, config)):
        config["quantization"] = quantization
    _write_tokenizer(file, config, folder)
    _write_json(folder / "config.json", config)
    eos = [config["eos_token_id"], *_more_ends(file)]
    _write_json(folder / "generation_config.json", {"eos_token_id": list(dict.fromkeys(eos))})
    _write_safetensors(folder / "model.safetensors", tensors, report)


# --- reading ---------------------------------------------------------------------------------------------------------


# The types of metadata: struct's letter for the numbers, and two more.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


class _Cursor:
    """Reads little-endian values one after the other and refuses to leave the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = 0

    def take(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self.data):
            raise BadModel(f"{self.path} ends in the middle of its header; download it again")
        piece = self.data[self.at : end]
        self.at = end
        return piece

    def number(self, form: str) -> Any:
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))[0]

    def string(self) -> str:
        # Some vocabularies hold a token that is not UTF-8; it can only matter if it is ever asked for.
        return self.take(self.number("Q")).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self.array()
        if kind not in NUMBERS:
            raise BadModel(f"{self.path} has metadata of the unknown type {kind}; download it again")
        return self.number(NUMBERS[kind])

    def array(self) -> list[Any]:
        kind, count = self.number("I"), self.number("Q")
        if kind in NUMBERS:
            form = f"<{count}{NUMBERS[kind]}"
            return list(struct.unpack(form, self.take(count * struct.calcsize("<" + NUMBERS[kind]))))
        if kind == STRING:
            return [self.string() for _ in range(count)]
        raise BadModel(f"{self.path} has a metadata array of the unknown type {kind}; download it again")


def read(path: Path) -> GgufFile:
    """The table of contents of a GGUF file; the tensors stay in the file until they are asked for."""
    try:
        with path.open("rb") as opened:
            data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file can not be mapped
        raise BadModel(f"{path} could not be read ({error}); give the path of a GGUF file") from error
    cursor = _Cursor(path, data)
    if cursor.take(4) != b"GGUF":
        raise BadModel(f"{path} is not a GGUF file: it does not begin with the letters GGUF")
    version = cursor.number("I")
    if version not in (2, 3):
        raise UnsupportedModel(f"{path} is GGUF version {version} or big-endian; weft reads little-endian 2 and 3")
    num_tensors, num_entries = cursor.number("Q"), cursor.number("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.number("I"))
    if metadata.get("split.count", 1) > 1:
        raise UnsupportedModel(f"{path} is one of {metadata['split.count']} parts; merge them into one GGUF file first")
    return GgufFile(path, metadata, _read_tensors(cursor, num_tensors, metadata.get("general.alignment", 32)))


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, Tensor]:
    entries = [_read_entry(cursor) for _ in range(count)]
    if not isinstance(alignment, int) or alignment < 1:
        raise BadModel(f"{cursor.path} has general.alignment = {alignment}; download it again")
    start = -(-cursor.at // alignment) * alignment
    return {name: _tensor(cursor, name, dims, kind, start + offset) for name, dims, kind, offset in entries}


def _read_entry(cursor: _Cursor) -> tuple[str, list[int], int, int]:
    name, num_dims = cursor.string(), cursor.number("I")
    if not 1 <= num_dims <= 4:
        raise BadModel(f"{cursor.path} says {name} has {num_dims} axes; download it again")
    dims = [cursor.number("Q") for _ in range(num_dims)]
    return name, dims, cursor.number("I"), cursor.number("Q")


def _tensor(cursor: _Cursor, name: str, dims: list[int], kind_number: int, start: int) -> Tensor:
    kind = KINDS.get(kind_number)
    if kind is None:
        raise UnsupportedModel(
            f"{cursor.path} stores {name} as {OTHER_KINDS.get(kind_number, f'type {kind_number}')}; weft reads "
            f"{', '.join(known.name for known in KINDS.values())}, so use such a file of this model"
        )
    if dims[0] % kind.values or not math.prod(dims):
        raise BadModel(f"{cursor.path} says {name} has the shape {dims}, which {kind.name} can not have; download it again")
    width = 1 if len(dims) == 1 and kind.values == 1 else dims[0]  # a vector is a column: its rows can be reordered too
    shape = (math.prod(dims) // width, width // kind.values * kind.size)
    if start + math.prod(shape) > len(cursor.data):
        raise BadModel(f"{cursor.path} ends before the end of {name}: it is incomplete; download it again")
    rows = np.frombuffer(cursor.data, np.uint8, math.prod(shape), start).reshape(shape)
    return Tensor(name, kind, tuple(reversed(dims)), rows)


# --- values ----------------------------------------------------------------------------------------------------------


def to_float32(kind: Kind, rows: Bytes) -> npt.NDArray[np.float32]:
    """The values of some rows of a tensor."""
    if kind is F32:
        return rows.view("<f4")
    if kind is F16:
        return rows.view("<f2").astype(np.float32)
    if kind is BF16:
        return (rows.view("<u2").astype(np.uint32) << 16).view(np.float32)
    values = _codes(kind, rows).astype(np.float32)
    values *= _scales(kind, rows).astype(np.float32)[..., None]
    values += _biases(kind, rows).astype(np.float32)[..., None]
    return values.reshape(len(rows), -1)


def _blocks(kind: Kind, rows: Bytes) -> Bytes:
    return rows.reshape(len(rows), -1, kind.size)


def _codes(kind: Kind, rows: Bytes) -> Bytes:
    """The integers q of value = q · scale + bias, (rows, blocks, 32).

    A 4-bit block keeps its values 0-15 in the low halves of its last 16 bytes and 16-31 in the high halves.
    """
    packed = _blocks(kind, rows)
    if kind is Q8_0:
        return packed[..., 2:] ^ np.uint8(128)  # int8 + 128, as uint8
    halves = packed[..., -GROUP // 2 :]
    return np.concatenate([halves & np.uint8(15), halves >> np.uint8(4)], axis=-1)


def _scales(kind: Kind, rows: Bytes) -> npt.NDArray[np.float16]:
    return _blocks(kind, rows)[..., :2].view("<f2")[..., 0]


def _biases(kind: Kind, rows: Bytes) -> npt.NDArray[np.float16]:
    """Times a power of two is exact in float16; `_in_order` has seen that nothing overflows."""
    if kind is Q4_1:
        return _blocks(kind, rows)[..., 2:4].view("<f2")[..., 0]
    return _scales(kind, rows) * np.float16(-128 if kind is Q8_0 else -8)


def _has_usable_scales(tensor: Tensor) -> bool:
    with np.errstate(all="ignore"):
        scales, biases = _scales(tensor.kind, tensor.rows), _biases(tensor.kind, tensor.rows)
        return bool(np.isfinite(scales).all() and np.isfinite(biases).all())


def _words(kind: Kind, rows: Bytes) -> npt.NDArray[np.uint32]:
    """The integers as MLX packs them: the first value in a word's lowest bits."""
    codes = _codes(kind, rows)
    if kind.bits == 4:
        codes = codes[..., 0::2] | codes[..., 1::2] << np.uint8(4)
    return codes.reshape(len(rows), -1).view("<u4")


# --- what is written -------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where a tensor of the file goes."""

    name: str
    shape: tuple[int, ...]
    turned_heads: int = 0  # for llama's q and k: how many heads have their rows interleaved


@dataclass(frozen=True)
class Planned:
    """One tensor of the safetensors file to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    tensor: Tensor
    make: Callable[[Kind, Bytes], npt.NDArray[Any]]

    @property
    def num_bytes(self) -> int:
        """How long it is in the file."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    def pieces(self) -> Iterator[bytes]:
        """Its bytes, some rows at a time."""
        kind, rows = self.tensor.kind, self.tensor.rows
        row_values = rows.shape[1] // kind.size * kind.values
        step = max(1, PIECE_VALUES // row_values)
        for first in range(0, len(rows), step):
            yield self.make(kind, rows[first : first + step]).tobytes()


DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "U32": 4}


def _planned(file: GgufFile, config: dict[str, Any], quantized: bool) -> list[Planned]:
    """What goes into model.safetensors. Every tensor of the file must have a place and the shape of that place."""
    places = _places(file, config)
    if unknown := [name for name in file.tensors if name not in places and name != "rope_freqs.weight"]:
        raise UnsupportedModel(f"{file.path} has the tensor {unknown[0]}, which mlx-lm's {config['model_type']} does not take")
    wanted = _plain_dtype(file)
    planned: list[Planned] = []
    for source, place in places.items():
        tensor = _in_order(file, source, place)
        if not quantized:
            planned.append(Planned(place.name, "F32", place.shape, tensor, to_float32))
        elif tensor.kind.bits:
            planned += _repacked(place, tensor, tensor.kind.bits)
        else:
            dtype = _exact_dtype(tensor, wanted)
            planned.append(Planned(place.name, dtype, place.shape, tensor, partial(_as_dtype, dtype)))
    return planned


def _places(file: GgufFile, config: dict[str, Any]) -> dict[str, Place]:
    """The tensors that a model of this config has: name in the file → place in the folder."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads, vocabulary = config["num_attention_heads"], config["num_key_value_heads"], config["vocab_size"]
    turned = config["model_type"] == "llama"
    attention_bias = config.get("attention_bias", False)
    is_qwen = config["model_type"] == "qwen2"
    parts = {
        "attn_q": ("self_attn.q_proj", heads * head, hidden, heads * turned, attention_bias or is_qwen),
        "attn_k": ("self_attn.k_proj", kv_heads * head, hidden, kv_heads * turned, attention_bias or is_qwen),
        "attn_v": ("self_attn.v_proj", kv_heads * head, hidden, 0, attention_bias or is_qwen),
        "attn_output": ("self_attn.o_proj", hidden, heads * head, 0, attention_bias),
        "ffn_gate": ("mlp.gate_proj", inner, hidden, 0, config.get("mlp_bias", False)),
        "ffn_up": ("mlp.up_proj", inner, hidden, 0, config.get("mlp_bias", False)),
        "ffn_down": ("mlp.down_proj", hidden, inner, 0, config.get("mlp_bias", False)),
    }
    places = {
        "token_embd.weight": Place("model.embed_tokens.weight", (vocabulary, hidden)),
        "output_norm.weight": Place("model.norm.weight", (hidden,)),
    }
    if not config["tie_word_embeddings"]:
        places["output.weight"] = Place("lm_head.weight", (vocabulary, hidden))
    for layer in range(config["num_hidden_layers"]):
        here, there = f"blk.{layer}", f"model.layers.{layer}"
        places[f"{here}.attn_norm.weight"] = Place(f"{there}.input_layernorm.weight", (hidden,))
        places[f"{here}.ffn_norm.weight"] = Place(f"{there}.post_attention_layernorm.weight", (hidden,))
        for part, (module, rows, columns, turned_heads, has_bias) in parts.items():
            places[f"{here}.{part}.weight"] = Place(f"{there}.{module}.weight", (rows, columns), turned_heads)
            if has_bias:
                places[f"{here}.{part}.bias"] = Place(f"{there}.{module}.bias", (rows,), turned_heads)
    if missing := [name for name in places if name not in file.tensors]:
        raise BadModel(f"{file.path} lacks the tensor {missing[0]}; download or convert the file again")
    return places


def _in_order(file: GgufFile, source: str, place: Place) -> Tensor:
    """The tensor with its rows as mlx-lm has them.

    llama files keep the two halves of each head's q and k rows interleaved: 0, d/2, 1, d/2 + 1, …
    """
    tensor = file.tensors[source]
    if tensor.shape != place.shape:
        raise BadModel(f"{file.path} has {source} of shape {tensor.shape} where its metadata asks for {place.shape}")
    if tensor.kind.bits and not _has_usable_scales(tensor):
        raise BadModel(f"{file.path} has scales in {source} that are no usable numbers; download it again")
    if not place.turned_heads:
        return tensor
    order = np.arange(len(tensor.rows)).reshape(place.turned_heads, -1, 2).swapaxes(1, 2).ravel()
    return Tensor(tensor.name, tensor.kind, tensor.shape, tensor.rows[order])


def _repacked(place: Place, tensor: Tensor, bits: int) -> list[Planned]:
    module = place.name.removesuffix(".weight")
    rows, columns = place.shape
    groups = (rows, columns // GROUP)
    return [
        Planned(f"{module}.weight", "U32", (rows, columns * bits // 32), tensor, _words),
        Planned(f"{module}.scales", "F16", groups, tensor, _scales),
        Planned(f"{module}.biases", "F16", groups, tensor, _biases),
    ]


def _plain_dtype(file: GgufFile) -> str:
    """The dtype in which the rest of a quantised folder is kept, so that the model computes in one dtype."""
    kinds = {tensor.kind for tensor in file.tensors.values()} - {F32}
    return "F32" if not kinds else "BF16" if kinds == {BF16} else "F16"


def _exact_dtype(tensor: Tensor, wanted: str) -> str:
    """`wanted` if it holds every value of the tensor as it is, else F32."""
    values = to_float32(tensor.kind, tensor.rows)
    kind = {"F16": F16, "BF16": BF16, "F32": F32}[wanted]
    again = to_float32(kind, np.ascontiguousarray(_as_dtype(wanted, tensor.kind, tensor.rows)).view(np.uint8))
    return wanted if np.array_equal(values, again) else "F32"


def _as_dtype(dtype: str, kind: Kind, rows: Bytes) -> npt.NDArray[Any]:
    values = to_float32(kind, rows)
    if dtype == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)  # cuts; only asked for where nothing is cut off
    with np.errstate(over="ignore"):
        return values.astype("<f2" if dtype == "F16" else "<f4")


def _quantization(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """The entry of config.json that names each quantised module, as mlx-lm reads it; empty when there is none."""
    bits = {
        place.name.removesuffix(".weight"): file.tensors[source].kind.bits
        for source, place in _places(file, config).items()
        if file.tensors[source].kind.bits
    }
    if not bits:
        return {}
    modules = {name: {"group_size": GROUP, "bits": count, "mode": "affine"} for name, count in bits.items()}
    return {"group_size": GROUP, "bits": min(bits.values(), key=lambda count: count or 0), "mode": "affine", **modules}


def _write_safetensors(path: Path, tensors: list[Planned], report: Report) -> None:
    """Write tensor after tensor, in pieces: no more than a piece is ever in memory."""
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    total = 0
    for tensor in tensors:
        ends = [total, total + tensor.num_bytes]
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": ends}
        total = ends[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    done = 0
    with path.open("wb") as sink:
        sink.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            for piece in tensor.pieces():
                sink.write(piece)
                done += len(piece)
                report(done, total)


# --- config.json -----------------------------------------------------------------------------------------------------

# Metadata that would change the numbers and that mlx-lm's llama and qwen2 do not know.
REFUSED = (
    "attention.scale", "attention.sliding_window", "attention.clamp_kqv", "attention.max_alibi_bias", "logit_scale",
    "embedding_scale", "residual_scale", "expert_count", "use_parallel_residual", "rope.scaling.attn_factor",
)  # fmt: skip


def _config(file: GgufFile) -> dict[str, Any]:
    model_type = file.get("general.architecture", str)
    if model_type not in ("llama", "qwen2"):
        raise UnsupportedModel(
            f"{file.path} holds a model of architecture {model_type}; weft converts llama and qwen2 GGUF files, "
            "so use a folder in mlx-lm's format for this one"
        )
    for key in REFUSED:
        if file.metadata.get(f"{model_type}.{key}"):
            value = file.metadata[f"{model_type}.{key}"]
            raise UnsupportedModel(f"{file.path} asks for {model_type}.{key} = {_short(value)}, which mlx-lm can not honour")

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


def _more_ends(file: GgufFile) -> list[int]:
    """Tokens besides eos that end an answer: end of turn, end of message."""
    ends = (file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom"))
    return [end for end in ends if isinstance(end, int)]


# --- tokenizer -------------------------------------------------------------------------------------------------------

CONTROL, USER_DEFINED, UNKNOWN = 3, 4, 2  # token types that stand for themselves and are never cut


def _write_tokenizer(file: GgufFile, config: dict[str, Any], folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json for a byte-level BPE vocabulary."""
    kind = file.get("tokenizer.ggml.model", str)
    if kind != "gpt2":
        raise UnsupportedModel(
            f"{file.path} has a tokenizer of kind {kind}; weft builds byte-level BPE (gpt2) tokenizers from GGUF "
            "files, so use a folder in mlx-lm's format for this model"
        )
    tokens = file.get("tokenizer.ggml.tokens", list)
    if len(tokens) > config["vocab_size"] or len(set(tokens)) != len(tokens):
        raise BadModel(f"{file.path} has {len(tokens)} tokens, some twice or more than its {config['vocab_size']} embeddings")
    named = {f"{name}_token": _token_named(file, tokens, key) for name, key in TOKEN_KEYS.items()}
    _build_tokenizer(file, tokens, named["bos_token"]).save(str(folder / "tokenizer.json"))
    facts = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        "add_bos_token": bool(file.metadata.get("tokenizer.ggml.add_bos_token", False)),
        "chat_template": file.metadata.get("tokenizer.chat_template"),
        **named,
    }
    _write_json(folder / "tokenizer_config.json", {key: value for key, value in facts.items() if value is not None})


TOKEN_KEYS = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}


def _token_named(file: GgufFile, tokens: list[str], key: str) -> str | None:
    position = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
    if position is None:
        return None
    if not isinstance(position, int) or not 0 <= position < len(tokens):
        raise BadModel(f"{file.path} says its {key} token is {_short(position)}, but it has {len(tokens)} tokens")
    return tokens[position]


def _build_tokenizer(file: GgufFile, tokens: list[str], bos: str | None) -> Any:
    """Any: the stubs of `tokenizers` know no setters."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors

    types = file.get("tokenizer.ggml.token_type", list, [1] * len(tokens))
    merges = [_merge(file, text) for text in file.get("tokenizer.ggml.merges", list)]
    pre = file.get("tokenizer.ggml.pre", str)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    try:
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in LLAMA3)
    except Exception as error:  # tokenizers raises nothing narrower
        raise BadModel(f"{file.path} has a vocabulary that does not fit its merges ({error}); download it again") from error
    tokenizer: Any = Tokenizer(model)
    if pre in QWEN2:
        from tokenizers.normalizers import NFC

        tokenizer.normalizer = NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(file, pre)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    if bos is not None and file.metadata.get("tokenizer.ggml.add_bos_token", False):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, vocabulary[bos])]
        )
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind != USER_DEFINED, normalized=False)
            for token, kind in zip(tokens, types, strict=False)
            if kind in (CONTROL, USER_DEFINED, UNKNOWN)
        ]
    )
    return tokenizer


BEFORE_DIGITS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
AFTER_DIGITS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SMOLLM, GPT2, QWEN2, LLAMA3 = ("smollm",), ("gpt-2", "default"), ("qwen2",), ("llama-bpe", "llama3", "llama-v3")


def _pre_tokenizer(file: GgufFile, pre: str) -> Any:
    """How text is cut before merging. A wrong cut gives wrong tokens without any error, so unknown ones are refused."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    if pre in SMOLLM:
        return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)])
    if pre in GPT2:
        return ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in QWEN2 + LLAMA3:
        pattern = BEFORE_DIGITS + (r"\p{N}" if pre in QWEN2 else r"\p{N}{1,3}") + AFTER_DIGITS
        return Sequence([Split(Regex(pattern), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)])
    raise UnsupportedModel(
        f"{file.path} cuts its text with the pre-tokenizer {pre}; weft knows "
        f"{', '.join(SMOLLM + GPT2 + QWEN2 + LLAMA3)}, so use a folder in mlx-lm's format for this model"
    )


def _merge(file: GgufFile, text: str) -> tuple[str, str]:
    left, _, right = text.partition(" ")
    if not left or not right:
        raise BadModel(f"{file.path} has the merge {text!r}, which is not two parts; download it again")
    return left, right


# --- small things ----------------------------------------------------------------------------------------------------


def _short_float(value: float) -> float:
    """The shortest decimal that is the same float32: the file's 9.999999747378752e-06 was written as 1e-05."""
    return float(str(np.float32(value)))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
