"""What binds the disk tier's entries to a model: one short name for its weights, its config and the facts of the caller.

Reads all weights once; their digests are remembered beside the cache, so that the next start needs only sizes and times.
Knows no model and imports no mlx.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from blake3 import blake3

WEIGHTS = ("*.safetensors", "*.gguf")


class _Known(msgspec.Struct, frozen=True):
    """The digest of a file that had this size and time."""

    size: int
    mtime_ns: int
    digest: str


class _DigestFile(msgspec.Struct):
    """The remembered file; believed only if its digest is right."""

    files: dict[str, _Known]  # by real path
    digest: str


def identity_of(folder: Path, facts: Sequence[str], remembered: Path) -> str:
    """32 hex digits for the weights and the config in a model's folder, together with the caller's facts."""
    known = _recall(remembered)
    config = folder / "config.json"
    parts: list[object] = [list(facts), blake3(config.read_bytes()).hexdigest() if config.exists() else None]
    for path in sorted(path for pattern in WEIGHTS for path in folder.glob(pattern)):
        real = path.resolve()
        found = real.stat()
        before = known.get(str(real))
        if before is None or (before.size, before.mtime_ns) != (found.st_size, found.st_mtime_ns):
            digest = blake3(max_threads=blake3.AUTO).update_mmap(real).hexdigest()
            before = known[str(real)] = _Known(found.st_size, found.st_mtime_ns, digest)
        parts.append([path.name, before.digest])
    _remember(remembered, known)
    return blake3(msgspec.json.encode(parts)).hexdigest(length=16)


def _recall(path: Path) -> dict[str, _Known]:
    with suppress(OSError, msgspec.MsgspecError, ValueError):
        memory = msgspec.json.decode(path.read_bytes(), type=_DigestFile)
        if memory.digest == _digest(memory.files):
            return memory.files
    return {}


def _remember(path: Path, known: dict[str, _Known]) -> None:
    """A folder that can not be written costs only the time to read the weights again."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary.write_bytes(msgspec.json.encode(_DigestFile(known, _digest(known))))
        temporary.replace(path)


def _digest(known: dict[str, _Known]) -> str:
    return blake3(msgspec.json.encode(known)).hexdigest()
