"""Files of the disk tier: the format of an entry, the cache folder with its byte budget, and the digest of a model.

An entry is a safetensors file, `folder/identity/key.safetensors`, whose metadata says what it is. Other processes may write and
delete at any time: a file that vanished is no error. Only files that are named as ours are touched. Imports no mlx.
"""

import fcntl
import glob
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
from blake3 import blake3

from weft.errors import WeftError
from weft.memory.safetensors import LENGTH_BYTES, encode_header, parse_header, read_header_text

FORMAT = "weft-prefix-1"
BLANK_DIGEST = "0" * 64
CHECKPOINT, BLOCK = "checkpoint.", "block."  # how the names of arrays begin in a file
ENTRY_NAMES = re.compile(r"[0-9a-f]{32}/[0-9a-f]{32}\.safetensors")
TEMPORARY_NAMES = re.compile(r"[0-9a-f]{32}/[0-9a-f]{32}\.\w+\.tmp")
MARGIN = 16  # a full folder is emptied by one part in so many, so that it is not looked through at every write


class Damaged(WeftError):
    """Raised for a corrupt cache file: unreadable header, wrong digest, or contents that do not fit."""


class Foreign(WeftError):
    """Raised for a readable cache file whose format version, model identity or key is not the expected one."""


@dataclass(frozen=True)
class StoredArray:
    """A named array as raw bytes, with its safetensors dtype and its shape."""

    name: str
    dtype: str  # as safetensors names it: F32, BF16, BOOL, …
    shape: tuple[int, ...]
    data: bytes | memoryview  # one flat row of bytes


@dataclass(frozen=True)
class Packed:
    """A KV block or a checkpoint of one row as host data: a JSON description and the raw arrays that it refers to."""

    description: str
    planes: tuple[StoredArray, ...]

    @cached_property
    def nbytes(self) -> int:
        return sum(len(plane.data) for plane in self.planes)


@dataclass(frozen=True, eq=False)
class Entry:
    """A prefix-tree chunk as stored on disk: key, parent's key, tokens, block of keys and values, checkpoint or None."""

    key: bytes
    parent: bytes  # the key of the chunk before it
    tokens: tuple[int, ...]
    block: Packed
    checkpoint: Packed | None

    @property
    def nbytes(self) -> int:
        return self.block.nbytes + (self.checkpoint.nbytes if self.checkpoint is not None else 0)


class EntryMetadata(msgspec.Struct, frozen=True, omit_defaults=True):
    """The `__metadata__` of an entry's safetensors file, in strings: digest, model identity, keys, tokens, layer descriptions."""

    digest: str  # blake3 over every byte of the file, with these digits as zeros; it comes first, so they are easily found
    format: str
    identity: str
    key: str
    parent: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{2})*$")]
    tokens: str
    block: str
    checkpoint: str | None = None


class _EntryHeader(msgspec.Struct):
    metadata: EntryMetadata = msgspec.field(name="__metadata__")


def encode_entry(entry: Entry, identity: str) -> list[bytes | memoryview]:
    """Encode an entry as the pieces of its safetensors file, the digest in the header; arrays are not copied."""
    planes = {BLOCK + plane.name: plane for plane in entry.block.planes}
    if entry.checkpoint is not None:
        planes |= {CHECKPOINT + plane.name: plane for plane in entry.checkpoint.planes}
    tensors = {name: (plane.dtype, plane.shape, len(plane.data)) for name, plane in planes.items()}
    keys, tokens = (entry.key.hex(), entry.parent.hex()), msgspec.json.encode(entry.tokens).decode()
    checkpoint = None if entry.checkpoint is None else entry.checkpoint.description
    metadata = EntryMetadata(BLANK_DIGEST, FORMAT, identity, *keys, tokens, entry.block.description, checkpoint)
    head, pieces = encode_header(tensors, msgspec.to_builtins(metadata)), [plane.data for plane in planes.values()]
    return [head.replace(BLANK_DIGEST.encode(), _digest(head, *pieces).encode(), 1), *pieces]


def read_entry(path: Path, identity: str, key: bytes) -> Entry:
    """Read and verify an entry's file; raises Damaged if the digest is wrong, Foreign if identity or key are not these."""
    with path.open("rb", buffering=0) as file:  # with a buffer it would be copied once more
        text, metadata = _read_metadata(file)
        body = memoryview(file.read())
    blank = text.replace(metadata.digest.encode(), BLANK_DIGEST.encode(), 1)
    if _digest(len(text).to_bytes(LENGTH_BYTES, "little"), blank, body) != metadata.digest:
        raise Damaged("its bytes do not have the digest that was written with them")
    _check_place(metadata, identity, key)
    try:
        tokens = msgspec.json.decode(metadata.tokens, type=tuple[int, ...])
        tensors = parse_header(text, len(body))
    except (msgspec.MsgspecError, ValueError) as error:
        raise Damaged(f"it can not be understood ({error})") from error

    def unpack(description: str, prefix: str) -> Packed:
        chosen = ((name.removeprefix(prefix), tensor) for name, tensor in tensors.items() if name.startswith(prefix))
        planes = (StoredArray(name, one.dtype, one.shape, body[one.start : one.end]) for name, one in chosen)
        return Packed(description, tuple(planes))

    checkpoint = None if metadata.checkpoint is None else unpack(metadata.checkpoint, CHECKPOINT)
    return Entry(key, bytes.fromhex(metadata.parent), tokens, unpack(metadata.block, BLOCK), checkpoint)


def read_metadata(path: Path, identity: str, key: bytes) -> EntryMetadata:
    """Read an entry file's metadata without reading its arrays or checking the digest; raises Damaged or Foreign."""
    with path.open("rb", buffering=0) as file:
        _, metadata = _read_metadata(file)
    _check_place(metadata, identity, key)
    return metadata


def _read_metadata(file: BinaryIO) -> tuple[bytes, EntryMetadata]:
    """Return a file's header text and parsed metadata; parsing the tensor entries too would take a hundred times as long."""
    try:
        text, _ = read_header_text(file)
        return text, msgspec.json.decode(text, type=_EntryHeader).metadata
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Damaged(f"its header can not be read ({error})") from error


def _check_place(metadata: EntryMetadata, identity: str, key: bytes) -> None:
    for what, wanted in (("format", FORMAT), ("identity", identity), ("key", key.hex())):
        if (found := getattr(metadata, what)) != wanted:
            raise Foreign(f"its {what} is {found!r} where {wanted!r} belongs")


def _digest(*pieces: bytes | memoryview) -> str:
    hasher = blake3()
    for piece in pieces:
        hasher.update(piece)
    return hasher.hexdigest()


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write a file atomically by renaming a temporary one, which is locked until then to show that its writer is alive."""
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


class CacheFolder:
    """The cache folder that several models and versions share under one byte budget, with LRU eviction across all of them."""

    def __init__(self, path: Path, identity: str, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.held_bytes = 0  # of all identities, as last seen
        self.home = path / identity
        self._path = path
        self._unseen_bytes = budget_bytes  # written since it was looked through; at first as much as makes it look

    def make(self) -> None:
        """Create the cache folder and this model's subfolder, readable by this user only because prompts are private."""
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.home.mkdir(mode=0o700, exist_ok=True)

    def file(self, key: bytes) -> Path:
        return self.home / f"{key.hex()}.safetensors"

    def entries(self) -> list[tuple[bytes, int]]:
        """Return the key and the size in bytes of every entry file of this model identity."""
        found = self._scan(ENTRY_NAMES)
        return [(bytes.fromhex(path.stem), status.st_size) for path, status in found if path.parent == self.home]

    def sweep(self) -> None:
        """Delete temporary files left behind by dead writers, recognised by their free lock."""
        for path, _ in self._scan(TEMPORARY_NAMES):
            with suppress(OSError), path.open("rb") as file:  # a lock that is held is an OSError
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()

    def touch(self, keys: Iterable[bytes]) -> None:
        """Set the entries' modification times to now, in increasing order: the last key becomes the most recently used."""
        now = time.time_ns()
        for step, key in enumerate(keys):
            with suppress(OSError):
                os.utime(self.file(key), ns=(now + step, now + step))

    def has_room(self, nbytes: int) -> bool:
        return self.held_bytes + nbytes <= self.budget_bytes

    def make_room(self, nbytes: int) -> list[Path]:
        """Delete the least recently used entries of any model until `nbytes` more fit the budget; returns the deleted paths."""
        self._unseen_bytes += nbytes
        margin = self.budget_bytes // MARGIN
        if nbytes > self.budget_bytes or (self.has_room(nbytes) and self._unseen_bytes < margin):
            return []
        found = sorted((status.st_mtime_ns, path, status.st_size) for path, status in self._scan(ENTRY_NAMES))
        self.held_bytes, self._unseen_bytes = sum(size for _, _, size in found), 0
        goal = self.budget_bytes - nbytes - (0 if self.has_room(nbytes) else margin)
        evicted = []
        for _, path, size in found:
            if self.held_bytes <= goal:
                break
            with suppress(OSError):
                path.unlink(missing_ok=True)
                evicted.append(path)
                self.held_bytes -= size
        return evicted

    def remove(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            with suppress(OSError):
                self.file(key).unlink()
        self._unseen_bytes = self.budget_bytes  # look through the folder at the next occasion

    def _scan(self, names: re.Pattern[str]) -> Iterator[tuple[Path, os.stat_result]]:
        """Yield path and stat of every regular file `identity/name` in the cache folder whose path matches the pattern."""
        for name in filter(names.fullmatch, glob.iglob("*/*", root_dir=self._path)):
            with suppress(OSError):
                if stat.S_ISREG((status := (self._path / name).lstat()).st_mode):
                    yield self._path / name, status


def identity_of(folder: Path, facts: Sequence[str], remembered: Path) -> str:
    """Return 32 hex digits that identify a model's weights and config together with the caller's `facts`.

    Reads all weights once; their digests are kept in the file `remembered`, so that the next start needs only sizes and times.
    """
    known: dict[str, dict[str, Any]] = {}  # by real path: size, mtime_ns, digest
    with suppress(OSError, msgspec.MsgspecError, ValueError, KeyError, TypeError):
        memory = msgspec.json.decode(remembered.read_bytes())
        if memory["digest"] == _digest(msgspec.json.encode(memory["files"])):  # else it is damaged, and not believed
            known = memory["files"]
    config = folder / "config.json"
    parts: list[object] = [list(facts), _digest(config.read_bytes()) if config.exists() else None]
    for path in sorted((*folder.glob("*.safetensors"), *folder.glob("*.gguf"))):
        real = path.resolve()
        found, before = {"size": real.stat().st_size, "mtime_ns": real.stat().st_mtime_ns}, known.get(str(real), {})
        if not found.items() <= before.items():
            digest = blake3(max_threads=blake3.AUTO).update_mmap(real).hexdigest()
            before = known[str(real)] = {**found, "digest": digest}
        parts.append([path.name, before["digest"]])
    with suppress(OSError):  # a folder that can not be written costs only the time to read the weights again
        remembered.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_file(remembered, [msgspec.json.encode({"files": known, "digest": _digest(msgspec.json.encode(known))})])
    return blake3(msgspec.json.encode(parts)).hexdigest(length=16)
