"""A GGUF file read as far as its table of contents, and the values of its tensors: `read`, `to_float32`.

It knows how the format stores things and nothing of what a model or mlx-lm is. The other files of this package use it.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from weft.errors import BadModel, UnsupportedModel

GROUP = 32  # values that share a scale, in GGUF's blocks and in what we write

Bytes = npt.NDArray[np.uint8]


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
class GgufTensor:
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
    tensors: dict[str, GgufTensor]

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """The metadata under `key`; without a default it must be there, and it must be of this kind."""
        value = self.metadata.get(key, default)
        if value is None:
            raise BadModel(f"{self.path} lacks the metadata {key}; download or convert the file again")
        if not isinstance(value, kind):
            raise UnsupportedModel(f"{self.path} has {key} = {short(value)}, which weft can not read; use another file")
        return value


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


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, GgufTensor]:
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


def _tensor(cursor: _Cursor, name: str, dims: list[int], kind_number: int, start: int) -> GgufTensor:
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
    return GgufTensor(name, kind, tuple(reversed(dims)), rows)


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
    values *= scales(kind, rows).astype(np.float32)[..., None]
    values += biases(kind, rows).astype(np.float32)[..., None]
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


def scales(kind: Kind, rows: Bytes) -> npt.NDArray[np.float16]:
    """The scale of each block, (rows, blocks)."""
    return _blocks(kind, rows)[..., :2].view("<f2")[..., 0]


def biases(kind: Kind, rows: Bytes) -> npt.NDArray[np.float16]:
    """The bias of each block, (rows, blocks).

    Times a power of two is exact in float16; `has_usable_scales` has shown that nothing overflows.
    """
    if kind is Q4_1:
        return _blocks(kind, rows)[..., 2:4].view("<f2")[..., 0]
    return scales(kind, rows) * np.float16(-128 if kind is Q8_0 else -8)


def has_usable_scales(tensor: GgufTensor) -> bool:
    """Whether every scale and bias of a quantised tensor is a finite number."""
    with np.errstate(all="ignore"):
        numbers = scales(tensor.kind, tensor.rows), biases(tensor.kind, tensor.rows)
        return all(bool(np.isfinite(array).all()) for array in numbers)


def words(kind: Kind, rows: Bytes) -> npt.NDArray[np.uint32]:
    """The integers as MLX packs them: the first value in a word's lowest bits."""
    codes = _codes(kind, rows)
    if kind.bits == 4:
        codes = codes[..., 0::2] | codes[..., 1::2] << np.uint8(4)
    return codes.reshape(len(rows), -1).view("<u4")


def short(value: Any) -> str:
    """A value as an error message shows it: no longer than 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
