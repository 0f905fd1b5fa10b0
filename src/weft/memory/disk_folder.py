"""The folder of the disk tier: `folder/identity/key.safetensors` for several models and versions, under one budget in bytes.

Other processes may write and delete in it at any time, so what is known of it is what was last seen, and a file that vanished
is no error. Touches only files that are named as ours are. Knows nothing of what is in a file; `disk` uses it.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from weft.memory.disk_entry import remove_if_abandoned

MARGIN = 16  # a full folder is emptied by one part in so many, so that it is not looked through at every write
IDENTITY_NAME = re.compile(r"[0-9a-f]{32}")
ENTRY_NAME = re.compile(r"[0-9a-f]{32}\.safetensors")
TEMPORARY_NAME = re.compile(r"[0-9a-f]{32}\.\w+\.tmp")


class Folder:
    """Who is in it, who was used last, and who must go."""

    def __init__(self, path: Path, identity: str, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.held_bytes = 0  # of all identities, as last seen
        self.home = path / identity
        self._path = path
        self._unseen_bytes = budget_bytes  # written since it was looked through; at first as much as makes it look

    def make(self) -> None:
        """Be there, for this user only: prompts are private."""
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.home.mkdir(mode=0o700, exist_ok=True)

    def file(self, key: bytes) -> Path:
        """Where an entry of ours lies."""
        return self.home / f"{key.hex()}.safetensors"

    def entries(self) -> Iterator[tuple[bytes, int]]:
        """Keys and sizes of what lies at home."""
        for path, found in self._scan(ENTRY_NAME):
            if path.parent == self.home:
                yield bytes.fromhex(path.stem), found.st_size

    def sweep(self) -> None:
        """Remove what dead writers left behind."""
        for path, _ in self._scan(TEMPORARY_NAME):
            remove_if_abandoned(path)

    def touch(self, keys: Iterable[bytes]) -> None:
        """These were used just now, each later than the one before it."""
        now = time.time_ns()
        for step, key in enumerate(keys):
            with suppress(OSError):
                os.utime(self.file(key), ns=(now + step, now + step))

    def has_room(self, nbytes: int) -> bool:
        """Whether so many bytes more fit, by what was last seen."""
        return self.held_bytes + nbytes <= self.budget_bytes

    def make_room(self, nbytes: int) -> list[Path]:
        """Delete the longest unused, of any identity, until so many bytes more fit. Gives what was deleted."""
        self._unseen_bytes += nbytes
        margin = self.budget_bytes // MARGIN
        if nbytes > self.budget_bytes or (self.has_room(nbytes) and self._unseen_bytes < margin):
            return []
        self._unseen_bytes = 0
        found = sorted((found.st_mtime_ns, path, found.st_size) for path, found in self._scan(ENTRY_NAME))
        self.held_bytes = sum(size for _, _, size in found)
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
        """Delete these entries of ours."""
        for key in keys:
            with suppress(OSError):
                self.file(key).unlink()
        self._unseen_bytes = self.budget_bytes  # look through it at the next occasion

    def _scan(self, name: re.Pattern[str]) -> Iterator[tuple[Path, os.stat_result]]:
        """Plain files of this kind of name under every identity."""
        for home in _listed(self._path):
            if not IDENTITY_NAME.fullmatch(home.name):
                continue
            for file in _listed(home.path):
                if name.fullmatch(file.name) and (found := _status(file)) is not None:
                    yield Path(file.path), found


def _listed(path: str | Path) -> list[os.DirEntry[str]]:
    with suppress(OSError), os.scandir(path) as listing:
        return list(listing)
    return []


def _status(file: os.DirEntry[str]) -> os.stat_result | None:
    with suppress(OSError):
        if file.is_file(follow_symlinks=False):
            return file.stat(follow_symlinks=False)
    return None
