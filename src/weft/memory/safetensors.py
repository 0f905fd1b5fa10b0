"""Reads and writes headers of safetensors files, strictly validated: the tensors must fill the file without gaps.

mlx believes a file's header; a wrong one would be read as garbage or end the process. So a header must fit its file to the
byte. Imports no mlx.
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from weft.errors import BadModel

LENGTH_BYTES = 8  # a file begins with the length of its header, little-endian
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
DTYPE_BYTES = {  # of the types that mlx reads; the sizes of tensors of other types are not checked
    "F32": 4, "F16": 2, "BF16": 2, "C64": 8, "F8_E4M3": 1, "F8_E8M0": 1, "BOOL": 1,
    "I8": 1, "I16": 2, "I32": 4, "I64": 8, "U8": 1, "U16": 2, "U32": 4, "U64": 8,
}  # fmt: skip


class BadHeader(ValueError):
    """Raised for a safetensors header that does not fit its file; the message is a predicate, the file is its subject."""


class TensorEntry(NamedTuple):
    """One tensor in a safetensors header: its dtype, shape, and half-open byte range [start, end) behind the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def encode_header(tensors: Mapping[str, tuple[str, tuple[int, ...], int]], metadata: Mapping[str, str]) -> bytes:
    """Encode a safetensors file's length field and JSON header; `tensors`: name → (dtype, shape, bytes), in file order."""
    entries, end = dict[str, object](__metadata__=metadata), 0
    for name, (dtype, shape, nbytes) in tensors.items():
        start, end = end, end + nbytes
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, end)}
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Return the tensor entries of a model's safetensors file by name; raises BadModel unless they exactly fill the file."""
    try:
        with file.open("rb") as opened:
            return parse_header(*read_header_text(opened))
    except OSError as error:
        raise BadModel(f"{file} could not be read ({error.strerror or error}); download it again") from error
    except BadHeader as error:
        raise BadModel(f"{file} {error}; download it again") from error


def read_header_text(opened: BinaryIO) -> tuple[bytes, int]:
    """Return a file's JSON header text and how many bytes follow it; raises BadHeader if the file is too short."""
    size, length = os.fstat(opened.fileno()).st_size, int.from_bytes(opened.read(LENGTH_BYTES), "little")
    if size < LENGTH_BYTES or length > min(size - LENGTH_BYTES, MAX_HEADER_BYTES):
        raise BadHeader("is not a whole safetensors file: it is cut off or something else")
    return opened.read(length), size - LENGTH_BYTES - length


def parse_header(text: bytes, data_bytes: int) -> dict[str, TensorEntry]:
    """Parse a header's JSON text into tensor entries by name; raises BadHeader unless they fill `data_bytes` without gaps."""
    try:
        entries = msgspec.json.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadHeader("has a header that is not JSON, so it is no safetensors file") from error
    if not isinstance(entries, dict):
        raise BadHeader("has a header that is no JSON object")
    tensors, end = {name: _parse_entry(name, entry) for name, entry in entries.items() if name != "__metadata__"}, 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        size = math.prod(tensor.shape) * DTYPE_BYTES.get(tensor.dtype, 0)
        if tensor.start != end or (tensor.dtype in DTYPE_BYTES and tensor.end - tensor.start != size):
            raise BadHeader(f"has a header that contradicts itself at {name}")
        end = tensor.end
    if end != data_bytes:
        raise BadHeader(f"should hold {end} bytes of weights but holds {data_bytes}")
    return tensors


def _parse_entry(name: str, entry: Any) -> TensorEntry:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(end)]}:
            if all(isinstance(length, int) and length >= 0 for length in shape):
                return TensorEntry(dtype, tuple(shape), start, end)
            raise BadHeader(f"has a header that contradicts itself at {name}")
    raise BadHeader(f"has a broken entry for {name} in its header")
