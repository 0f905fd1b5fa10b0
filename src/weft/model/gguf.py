"""Reads GGUF files: metadata, tensors mapped from the file, and their dequantised or repacked values. Imports no mlx."""

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from weft.errors import BadModel, UnsupportedModel

GROUP = 32  # values that share a scale, in GGUF's blocks and in MLX's affine quantisation as weft writes it
# Metadata types: struct's letter for the numbers, and two more.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9

Bytes = npt.NDArray[np.uint8]


class TensorType(NamedTuple):
    """A GGUF tensor type: blocks of `num_values` values stored in `num_bytes` bytes."""

    name: str
    num_values: int
    num_bytes: int
    bits: int | None = None  # of MLX's affine quantisation, for the types that can be repacked into it


F32, F16, BF16 = TensorType("F32", 1, 4), TensorType("F16", 1, 2), TensorType("BF16", 1, 2)
Q4_0, Q4_1, Q8_0 = TensorType("Q4_0", GROUP, 18, 4), TensorType("Q4_1", GROUP, 20, 4), TensorType("Q8_0", GROUP, 34, 8)
TYPES = {0: F32, 1: F16, 2: Q4_0, 3: Q4_1, 8: Q8_0, 30: BF16}
OTHER_TYPES = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


class GgufTensor(NamedTuple):
    """One tensor of a GGUF file: type, shape, and raw bytes as a view into the memory-mapped file."""

    type: TensorType
    shape: tuple[int, ...]  # slowest axis first, as numpy counts; GGUF writes it the other way round
    rows: Bytes  # (rows, bytes of a row)


class GgufFile(NamedTuple):
    """A memory-mapped GGUF file's metadata and tensors; the bytes of tensors are read only when they are used."""

    path: Path
    metadata: dict[str, Any]  # numbers, strings and lists as the file has them
    tensors: dict[str, GgufTensor]

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """Return the metadata value of `key`; raises ModelError if it is not a `kind`, or missing without a default."""
        value = self.metadata.get(key, default)
        if value is None:
            raise BadModel(f"{self.path} lacks the metadata {key}; download or convert the file again")
        if not isinstance(value, kind):
            raise UnsupportedModel(f"{self.path} has {key} = {shorten(value)}, which weft can not read; use another file")
        return value


class _Cursor:
    """Reads little-endian values of a GGUF header one after the other; raises BadModel at the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.position = 0

    def take(self, num_bytes: int) -> bytes:
        start, self.position = self.position, self.position + num_bytes
        if self.position > len(self.data):
            raise BadModel(f"{self.path} ends in the middle of its header; download it again")
        return self.data[start : self.position]

    def numbers(self, letter: str, count: int) -> tuple[Any, ...]:
        return struct.unpack(f"<{count}{letter}", self.take(count * struct.calcsize("<" + letter)))

    def number(self, letter: str) -> Any:
        return self.numbers(letter, 1)[0]

    def string(self) -> str:
        # Some vocabularies hold a token that is not UTF-8; it matters only if that token is ever needed.
        return self.take(self.number("Q")).decode("utf-8", "replace")

    def value(self) -> Any:
        """Read a metadata value, which is preceded by its type number; an array becomes a list."""
        kind = self.number("I")
        if kind == ARRAY:
            return self.values("a metadata array", self.number("I"), self.number("Q"))
        return self.values("metadata", kind, 1)[0]

    def values(self, what: str, kind: int, count: int) -> list[Any]:
        if kind == STRING:
            return [self.string() for _ in range(count)]
        if kind in NUMBERS:
            return list(self.numbers(NUMBERS[kind], count))
        raise BadModel(f"{self.path} has {what} of the unknown type {kind}; download it again")


def read(path: Path) -> GgufFile:
    """Map a GGUF file and read its metadata and tensor entries; raises BadModel or UnsupportedModel for an unusable file."""
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
    num_tensors, num_entries = cursor.numbers("Q", 2)
    metadata = {cursor.string(): cursor.value() for _ in range(num_entries)}
    if metadata.get("split.count", 1) > 1:
        raise UnsupportedModel(f"{path} is one of {metadata['split.count']} parts; merge them into one GGUF file first")
    return GgufFile(path, metadata, _read_tensors(cursor, num_tensors, metadata.get("general.alignment", 32)))


def _read_tensors(cursor: _Cursor, count: int, alignment: Any) -> dict[str, GgufTensor]:
    entries = []
    for _ in range(count):
        name, num_dims = cursor.string(), cursor.number("I")
        if not 1 <= num_dims <= 4:
            raise BadModel(f"{cursor.path} says {name} has {num_dims} axes; download it again")
        entries.append((name, list(cursor.numbers("Q", num_dims)), cursor.number("I"), cursor.number("Q")))
    if not isinstance(alignment, int) or alignment < 1:
        raise BadModel(f"{cursor.path} has general.alignment = {alignment}; download it again")
    start = -(-cursor.position // alignment) * alignment
    return {name: _tensor(cursor, name, dims, number, start + offset) for name, dims, number, offset in entries}


def _tensor(cursor: _Cursor, name: str, dims: list[int], type_number: int, start: int) -> GgufTensor:
    kind = TYPES.get(type_number)
    if kind is None:
        what = f"{cursor.path} stores {name} as {OTHER_TYPES.get(type_number, f'type {type_number}')}"
        known = ", ".join(readable.name for readable in TYPES.values())
        raise UnsupportedModel(f"{what}; weft reads {known}, so use such a file of this model")
    if dims[0] % kind.num_values or not math.prod(dims):
        raise BadModel(f"{cursor.path} says {name} has the shape {dims}, which {kind.name} can not have; download it again")
    width = 1 if len(dims) == 1 and kind.num_values == 1 else dims[0]  # a vector is a column: its rows can be reordered too
    shape = (math.prod(dims) // width, width // kind.num_values * kind.num_bytes)
    if start + math.prod(shape) > len(cursor.data):
        raise BadModel(f"{cursor.path} ends before the end of {name}: it is incomplete; download it again")
    return GgufTensor(kind, tuple(reversed(dims)), np.frombuffer(cursor.data, np.uint8, math.prod(shape), start).reshape(shape))


def to_float32(kind: TensorType, rows: Bytes) -> npt.NDArray[np.float32]:
    """Convert raw rows of a tensor of any readable type to float32, dequantised where necessary."""
    if kind is F32:
        return rows.view("<f4")
    if kind is F16:
        return rows.view("<f2").astype(np.float32)
    if kind is BF16:
        return (rows.view("<u2").astype(np.uint32) << 16).view(np.float32)
    values = _codes(kind, rows).astype(np.float32)
    scales, biases = scales_and_biases(kind, rows)
    values *= scales.astype(np.float32)[..., None]
    values += biases.astype(np.float32)[..., None]
    return values.reshape(len(rows), -1)


def scales_and_biases(kind: TensorType, rows: Bytes) -> tuple[npt.NDArray[np.float16], npt.NDArray[np.float16]]:
    """Return the float16 scale and bias of each block of quantised rows, (rows, blocks) each; a bias may overflow to inf."""
    heads = rows.reshape(len(rows), -1, kind.num_bytes)[..., :4].view("<f2")
    if kind is Q4_1:
        return heads[..., 0], heads[..., 1]
    return heads[..., 0], heads[..., 0] * np.float16(-128 if kind is Q8_0 else -8)  # times a power of two is exact


def codes_as_words(kind: TensorType, rows: Bytes) -> npt.NDArray[np.uint32]:
    """Return the integers of quantised rows packed into uint32 words as in MLX: the first value in the lowest bits."""
    codes = _codes(kind, rows)
    if kind.bits == 4:
        codes = codes[..., 0::2] | codes[..., 1::2] << np.uint8(4)
    return codes.reshape(len(rows), -1).view("<u4")


def _codes(kind: TensorType, rows: Bytes) -> Bytes:
    """Return the integers q of quantised rows, where value = q · scale + bias, as (rows, blocks, 32)."""
    packed = rows.reshape(len(rows), -1, kind.num_bytes)
    if kind is Q8_0:
        return packed[..., 2:] ^ np.uint8(128)  # int8 + 128, as uint8
    halves = packed[..., -GROUP // 2 :]  # values 0-15 are in the low halves of these bytes, 16-31 in the high halves
    return np.concatenate([halves & np.uint8(15), halves >> np.uint8(4)], axis=-1)


def shorten(value: Any) -> str:
    """Return `repr(value)` cut to at most 60 characters, for error messages."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
