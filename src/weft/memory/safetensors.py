"""The safetensors format: a JSON header that names every tensor, then their bytes. Read strictly, written in pieces.

mlx believes a file's header; a wrong one would be read as garbage or end the process. So every header is checked against
the file to the byte. Knows no models; the loader, the registry, GGUF conversion and the disk tier use it. Imports no mlx.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from weft.errors import BadModel

LENGTH_BYTES = 8  # a file begins with the length of its header, little-endian
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
DTYPE_BYTES = {  # of the types that mlx reads; the sizes of tensors of other types are not checked
    "F32": 4, "F16": 2, "BF16": 2, "C64": 8, "F8_E4M3": 1, "F8_E8M0": 1, "BOOL": 1,
    "I8": 1, "I16": 2, "I32": 4, "I64": 8, "U8": 1, "U16": 2, "U32": 4, "U64": 8,
}  # fmt: skip


class TensorEntry(NamedTuple):
    """One tensor of a header: its type, its shape, and where its bytes lie behind the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Header:
    """What a safetensors file says about itself."""

    metadata: Mapping[str, str]
    tensors: Mapping[str, TensorEntry]


def encode_header(tensors: Mapping[str, TensorEntry], metadata: Mapping[str, str]) -> bytes:
    """The bytes of a file up to its first tensor; `tensors` in the order in which their bytes follow."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    for name, entry in tensors.items():
        entries[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [entry.start, entry.end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def read_header(file: Path) -> Header:
    """The header of a file whose tensors fill it to the byte. Raises BadModel saying what is wrong."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(LENGTH_BYTES), "little")
            if size < LENGTH_BYTES or length > min(size - LENGTH_BYTES, MAX_HEADER_BYTES):
                raise BadModel(f"{file} is not a whole safetensors file: it is cut off or something else; download it again")
            header = json.loads(opened.read(length))
    except OSError as error:
        raise BadModel(f"{file} could not be read ({error.strerror or error}); download it again") from error
    except (ValueError, RecursionError) as error:
        raise BadModel(f"{file} has a header that is not JSON, so it is no safetensors file; download it again") from error
    if not isinstance(header, dict):
        raise BadModel(f"{file} has a header that is no JSON object; download it again")
    metadata = header.pop("__metadata__", {})
    tensors = {name: _entry(file, name, entry) for name, entry in header.items()}
    _check_layout(file, tensors, size - LENGTH_BYTES - length)
    return Header(metadata, tensors)


def _entry(file: Path, name: str, entry: Any) -> TensorEntry:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(end)]}:
            if all(isinstance(length, int) and length >= 0 for length in shape):
                return TensorEntry(dtype, tuple(shape), start, end)
            raise BadModel(f"{file} has a header that contradicts itself at {name}; download it again")
    raise BadModel(f"{file} has a broken entry for {name} in its header; download it again")


def _check_layout(file: Path, tensors: Mapping[str, TensorEntry], data_bytes: int) -> None:
    """Raise BadModel unless the tensors follow each other without gaps, have their sizes, and end where the file does."""
    end = 0
    for name, entry in sorted(tensors.items(), key=lambda item: item[1].start):
        size = math.prod(entry.shape) * DTYPE_BYTES.get(entry.dtype, 0)
        if entry.start != end or (entry.dtype in DTYPE_BYTES and entry.end - entry.start != size):
            raise BadModel(f"{file} has a header that contradicts itself at {name}; download it again")
        end = entry.end
    if end != data_bytes:
        raise BadModel(f"{file} should hold {end} bytes of weights but holds {data_bytes}; download it again")
