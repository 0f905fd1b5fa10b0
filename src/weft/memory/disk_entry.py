"""One entry of the disk tier as a file: a plain safetensors file whose metadata says what it is, under one digest.

The digest is blake3 over every byte of the file, with the digest's own digits written as zeros. Knows the format and nothing
of budgets or threads; `disk` uses it. Planes are raw bytes under safetensors' names for their types. Imports no mlx.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Annotated

import msgspec
from blake3 import blake3

from weft.errors import WeftError

FORMAT = "weft-prefix-1"
HEADER_LIMIT = 16 << 20  # bytes; a header of 200 layers and 4,096 tokens has a fortieth of it
LENGTH_BYTES = 8  # a safetensors file begins with the length of its header, little-endian
UNKNOWN_DIGEST = "0" * 64
CHECKPOINT, BLOCK = "checkpoint.", "block."  # how the names of planes begin in a file


class Damaged(WeftError):
    """A file that is not what was written."""


class Foreign(WeftError):
    """A whole file, but of another model, version or place."""


@dataclass(frozen=True)
class StoredArray:
    """An array as its bytes."""

    name: str
    dtype: str  # as safetensors names it: F32, BF16, BOOL, …
    shape: tuple[int, ...]
    data: bytes | memoryview  # one flat row of bytes


@dataclass(frozen=True)
class Packed:
    """Layer states of one row as host data: what they are, in JSON, and the arrays in them."""

    description: str
    planes: tuple[StoredArray, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(len(plane.data) for plane in self.planes)


@dataclass(frozen=True, eq=False)
class Entry:
    """A chunk of the tree, as it goes to disk and comes back."""

    key: bytes
    parent: bytes  # the key of the chunk before it
    tokens: tuple[int, ...]
    block: Packed
    checkpoint: Packed | None

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return self.block.nbytes + (self.checkpoint.nbytes if self.checkpoint is not None else 0)


class EntryMetadata(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a file says of itself. All are strings, as safetensors wants it; the digest stands first, see `encode`."""

    digest: str
    format: str
    identity: str
    key: str
    parent: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{2})*$")]
    tokens: str
    block: str
    checkpoint: str | None = None


class _Header(msgspec.Struct):
    metadata: EntryMetadata = msgspec.field(name="__metadata__")


class _TensorEntry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def encode(entry: Entry, identity: str) -> list[bytes | memoryview]:
    """The pieces of an entry's file, in order; the planes are not copied."""
    planes = [(BLOCK + plane.name, plane) for plane in entry.block.planes]
    if entry.checkpoint is not None:
        planes += [(CHECKPOINT + plane.name, plane) for plane in entry.checkpoint.planes]
    header: dict[str, object] = {"__metadata__": _describe(entry, identity)}
    end = 0
    for name, plane in planes:
        start, end = end, end + len(plane.data)
        header[name] = _TensorEntry(plane.dtype, plane.shape, (start, end))
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % LENGTH_BYTES)
    pieces = [plane.data for _, plane in planes]
    digest = _digest(text, pieces)
    return [_length(text), text.replace(UNKNOWN_DIGEST.encode(), digest.encode(), 1), *pieces]


def write(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Put a file under its name, whole or not at all. The lock tells others that the writer lives."""
    handle, temporary = tempfile.mkstemp(prefix=f"{path.stem}.", suffix=".tmp", dir=path.parent)
    try:
        with open(handle, "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.writelines(pieces)
            file.flush()
            os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def remove_if_abandoned(path: Path) -> None:
    """Remove a temporary file whose writer is dead."""
    with suppress(OSError), path.open("rb") as file:  # a lock that is held is an OSError
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()


def read_metadata(path: Path, identity: str, key: bytes) -> EntryMetadata:
    """What a file says of itself, from its header alone: its arrays are not looked at, the digest is not checked."""
    with path.open("rb", buffering=0) as file:
        metadata = _metadata(_read_header(file))
    _check_place(metadata, identity, key)
    return metadata


def read(path: Path, identity: str, key: bytes) -> Entry:
    """The entry in a file, after its digest was compared."""
    with path.open("rb", buffering=0) as file:  # with a buffer it would be copied once more
        header = _read_header(file)
        body = memoryview(file.read())
    metadata = _metadata(header)
    blank = header.replace(metadata.digest.encode(), UNKNOWN_DIGEST.encode(), 1)
    if _digest(blank, [body]) != metadata.digest:
        raise Damaged("its bytes do not have the digest that was written with them")
    _check_place(metadata, identity, key)
    try:
        return _decode(metadata, header, body)
    except (msgspec.MsgspecError, ValueError) as error:
        raise Damaged(f"it can not be understood ({error})") from error


def _describe(entry: Entry, identity: str) -> EntryMetadata:
    return EntryMetadata(
        digest=UNKNOWN_DIGEST,
        format=FORMAT,
        identity=identity,
        key=entry.key.hex(),
        parent=entry.parent.hex(),
        tokens=msgspec.json.encode(entry.tokens).decode(),
        block=entry.block.description,
        checkpoint=None if entry.checkpoint is None else entry.checkpoint.description,
    )


def _decode(metadata: EntryMetadata, header: bytes, body: memoryview) -> Entry:
    tensors = msgspec.json.decode(header)
    del tensors["__metadata__"]
    found = msgspec.convert(tensors, dict[str, _TensorEntry])

    def packed(description: str, prefix: str) -> Packed:
        chosen = ((name.removeprefix(prefix), tensor) for name, tensor in found.items() if name.startswith(prefix))
        planes = (StoredArray(name, tensor.dtype, tensor.shape, body[slice(*tensor.data_offsets)]) for name, tensor in chosen)
        return Packed(description, tuple(planes))

    return Entry(
        bytes.fromhex(metadata.key),
        bytes.fromhex(metadata.parent),
        msgspec.json.decode(metadata.tokens, type=tuple[int, ...]),
        packed(metadata.block, BLOCK),
        None if metadata.checkpoint is None else packed(metadata.checkpoint, CHECKPOINT),
    )


def _length(header: bytes) -> bytes:
    return len(header).to_bytes(LENGTH_BYTES, "little")


def _digest(header: bytes, pieces: Iterable[bytes | memoryview]) -> str:
    hasher = blake3(_length(header)).update(header)
    for piece in pieces:
        hasher.update(piece)
    return hasher.hexdigest()


def _read_header(file: FileIO) -> bytes:
    """The header's bytes, fewer if the file ends before. The length that it gives is not trusted."""
    length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    if not 0 < length <= HEADER_LIMIT:
        raise Damaged(f"its header can not have {length} bytes")
    return file.read(length)


def _metadata(header: bytes) -> EntryMetadata:
    try:
        return msgspec.json.decode(header, type=_Header).metadata
    except (msgspec.MsgspecError, ValueError) as error:
        raise Damaged(f"its header can not be read ({error})") from error


def _check_place(metadata: EntryMetadata, identity: str, key: bytes) -> None:
    """A file must say that it is what its place says."""
    for what, found, wanted in (
        ("format", metadata.format, FORMAT),
        ("identity", metadata.identity, identity),
        ("key", metadata.key, key.hex()),
    ):
        if found != wanted:
            raise Foreign(f"its {what} is {found!r} where {wanted!r} belongs")
