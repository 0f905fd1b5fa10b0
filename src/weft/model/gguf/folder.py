"""`convert` writes the folder that mlx-lm loads: which tensor goes where, in which dtype, and the safetensors file.

Weights are written as float32, or as the file holds them: its 4- and 8-bit blocks are MLX's affine quantisation with
groups of 32 in another order, so nothing is lost. It knows nothing of caches and downloads; `resolve` calls `convert`.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from weft.errors import BadModel, UnsupportedModel
from weft.model.gguf.config import model_config, more_ends, write_json
from weft.model.gguf.file import (
    BF16,
    F16,
    F32,
    GROUP,
    Bytes,
    GgufFile,
    GgufTensor,
    Kind,
    biases,
    has_usable_scales,
    read,
    scales,
    to_float32,
    words,
)
from weft.model.gguf.tokenizer import write_tokenizer

PIECE_VALUES = 1 << 22  # values converted at a time: 16 MB as float32
FORMAT = 1  # raise it when `convert` writes something else for the same file: cached folders carry it in their name

Report = Callable[[int, int], None]  # bytes written, bytes in all


def convert(path: Path, folder: Path, *, quantized: bool, report: Report) -> None:
    """Write `path` into the existing folder `folder` as mlx-lm has it: float32, or quantised as the file is."""
    file = read(path)
    config = model_config(file)
    tensors = _planned(file, config, quantized)
    if quantized and (quantization := _quantization(file, config)):
        config["quantization"] = quantization
    write_tokenizer(file, config, folder)
    write_json(folder / "config.json", config)
    eos = [config["eos_token_id"], *more_ends(file)]
    write_json(folder / "generation_config.json", {"eos_token_id": list(dict.fromkeys(eos))})
    _write_safetensors(folder / "model.safetensors", tensors, report)


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
    tensor: GgufTensor
    make: Callable[[Kind, Bytes], npt.NDArray[Any]]

    @property
    def num_bytes(self) -> int:
        """How long it is in the file."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    def pieces(self) -> Iterator[bytes]:
        """Its bytes, some rows at a time."""
        kind, rows = self.tensor.kind, self.tensor.rows
        row_values = rows.shape[1] // kind.size * kind.values
        # Asked of the package at each call, not imported: a test makes it smaller there.
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


def _in_order(file: GgufFile, source: str, place: Place) -> GgufTensor:
    """The tensor with its rows as mlx-lm has them.

    llama files keep the two halves of each head's q and k rows interleaved: 0, d/2, 1, d/2 + 1, …
    """
    tensor = file.tensors[source]
    if tensor.shape != place.shape:
        raise BadModel(f"{file.path} has {source} of shape {tensor.shape} where its metadata asks for {place.shape}")
    if tensor.kind.bits and not has_usable_scales(tensor):
        raise BadModel(f"{file.path} has scales in {source} that are no usable numbers; download it again")
    if not place.turned_heads:
        return tensor
    order = np.arange(len(tensor.rows)).reshape(place.turned_heads, -1, 2).swapaxes(1, 2).ravel()
    return GgufTensor(tensor.name, tensor.kind, tensor.shape, tensor.rows[order])


def _repacked(place: Place, tensor: GgufTensor, bits: int) -> list[Planned]:
    module = place.name.removesuffix(".weight")
    rows, columns = place.shape
    groups = (rows, columns // GROUP)
    return [
        Planned(f"{module}.weight", "U32", (rows, columns * bits // 32), tensor, words),
        Planned(f"{module}.scales", "F16", groups, tensor, scales),
        Planned(f"{module}.biases", "F16", groups, tensor, biases),
    ]


def _plain_dtype(file: GgufFile) -> str:
    """The dtype in which the rest of a quantised folder is kept, so that the model computes in one dtype."""
    kinds = {tensor.kind for tensor in file.tensors.values()} - {F32}
    return "F32" if not kinds else "BF16" if kinds == {BF16} else "F16"


def _exact_dtype(tensor: GgufTensor, wanted: str) -> str:
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
