"""The disk tier of the prefix cache: chunks of the prefix tree as files, kept across restarts, bounded in bytes.

Nothing on disk is trusted: an entry's digest is compared at every load, and once after each start. The engine's thread only
asks and queues; one thread writes and deletes, another loads and verifies. Imports no mlx.
"""

import errno
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from weft.memory import disk_files
from weft.memory.disk_files import CacheFolder, Damaged, Entry, Foreign

QUEUE_BYTES = 256 << 20
WARNING_SECONDS = 60.0  # a disk that can not be written is logged once in so long

log = logging.getLogger("weft.memory")


class _IndexedEntry(NamedTuple):
    parent: bytes
    has_checkpoint: bool
    nbytes: int


class DiskTier:
    """The disk tier of one model's prefix cache; a missing, damaged or unwritable entry is a cache miss, never an error."""

    def __init__(self, folder: Path, identity: str, budget_bytes: int) -> None:
        self.identity = identity
        self.num_written = self.num_loaded = self.num_evicted = 0
        self.num_damaged = self.num_foreign = self.num_skipped = 0
        self._folder = CacheFolder(folder, identity, budget_bytes)
        self._lock = threading.Lock()  # guards all that follows, and the numbers
        self._index: dict[bytes, _IndexedEntry] = {}  # entries on disk
        self._queue: dict[bytes, Entry] = {}  # entries to be written
        self._children: dict[bytes, dict[bytes, int]] = {}  # parent → child → its number of tokens, of all that were ever here
        self._unverified: set[bytes] = set()
        self._generation = 0  # counts how often something was forgotten: loads from before are void
        self._is_open = self._is_closed = False
        self._next_warning = 0.0
        self._writer = ThreadPoolExecutor(1, "weft-disk-write")  # writes and deletes, in the order in which they were asked for
        self._loader = ThreadPoolExecutor(1, "weft-disk-load")  # loads and verifies

    @property
    def held_bytes(self) -> int:
        return self._folder.held_bytes

    def open(self) -> None:
        """Index the folder's files (deleting damaged and surplus ones), then start background writing and verification."""
        with suppress(OSError):
            self._folder.make()
        self._folder.sweep()
        for key, nbytes in self._folder.entries():
            path = self._folder.file(key)
            try:
                metadata = disk_files.read_metadata(path, self.identity, key)
            except (Damaged, Foreign, OSError) as error:
                self._refuse(path, error)
                continue
            parent = bytes.fromhex(metadata.parent)
            self._children.setdefault(parent, {})[key] = metadata.tokens.count(",") + 1
            self._index[key] = _IndexedEntry(parent, metadata.checkpoint is not None, nbytes)
        self._make_room(0)
        self._unverified = set(self._index)
        self._loader.submit(self._verify_next)
        with self._lock:
            self._is_open = True
            for entry in self._queue.values():
                self._writer.submit(self._write, entry)

    def has(self, key: bytes) -> bool:
        return key in self._queue or key in self._index  # in this order: a written entry goes from one to the other

    def has_checkpoint(self, key: bytes) -> bool:
        queued, indexed = self._queue.get(key), self._index.get(key)
        return (queued is not None and queued.checkpoint is not None) or (indexed is not None and indexed.has_checkpoint)

    def sizes_after(self, key: bytes) -> set[int]:
        """Return the chunk lengths in tokens of all entries ever seen with this parent key."""
        return set(self._children.get(key, {}).values())

    def store(self, entry: Entry) -> bool:
        """Queue an entry for writing; False if the queue is full or closed. A known one is rewritten only to add a checkpoint."""
        if self.has_checkpoint(entry.key) or (entry.checkpoint is None and self.has(entry.key)):
            return True
        with self._lock:
            queued_bytes = sum(queued.nbytes for queued in self._queue.values())
            if self._is_closed or (queued_bytes and queued_bytes + entry.nbytes > QUEUE_BYTES):  # one alone may have any size
                self.num_skipped += 1
                return False
            self._queue[entry.key] = entry
            self._children.setdefault(entry.parent, {})[entry.key] = len(entry.tokens)
            if self._is_open:
                self._writer.submit(self._write, entry)
        return True

    def load(self, keys: Sequence[bytes]) -> Future[list[Entry]]:
        """Load entries in a background thread; the future gives them in order, up to the first that is missing or damaged."""
        return self._loader.submit(self._load, keys, self._generation)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Drop these entries and all their descendants; every pending load returns []; files are deleted in the background."""
        doomed, waiting = set[bytes](), list(keys)
        while waiting:
            if (key := waiting.pop()) not in doomed:
                doomed.add(key)
                waiting += self._children.get(key, ())
        self._forget(doomed)

    def clear(self) -> None:
        """Drop all entries of this model; their files are deleted in the background, before anything new is written."""
        self._forget(None)

    def close(self, seconds: float) -> None:
        """Wait up to `seconds` for queued entries to be written, then stop both threads; pending loads are cancelled."""
        with self._lock:
            is_working, self._is_closed = self._is_open and not self._is_closed, True
        if is_working:
            wait([self._writer.submit(int)], seconds)  # done when all before it is
        for executor in (self._writer, self._loader):
            executor.shutdown(wait=False, cancel_futures=True)

    def _forget(self, keys: set[bytes] | None) -> None:
        with self._lock:
            gone = {*self._index, *self._queue} if keys is None else keys
            self._generation += 1
            self._unverified -= gone
            for key in gone:
                self._index.pop(key, None)
                self._queue.pop(key, None)
            if not self._is_closed:
                self._writer.submit(self._delete, keys)

    # The writer's thread.

    def _delete(self, keys: set[bytes] | None) -> None:
        self._folder.remove([key for key, _ in self._folder.entries()] if keys is None else keys)
        self._make_room(0)

    def _write(self, entry: Entry) -> None:
        if self._queue.get(entry.key) is not entry:  # forgotten, or queued again with its checkpoint or after a clear
            return
        nbytes = 0
        try:
            nbytes = self._write_file(entry)
        except OSError as error:
            if time.monotonic() >= self._next_warning:
                self._next_warning = time.monotonic() + WARNING_SECONDS
                log.warning("a prefix was not kept on disk: %s", error)
        with self._lock:
            self.num_written += nbytes > 0
            self.num_skipped += nbytes == 0
            if self._queue.get(entry.key) is entry:  # else it was forgotten, or its checkpoint has come meanwhile
                if nbytes:
                    self._index[entry.key] = _IndexedEntry(entry.parent, entry.checkpoint is not None, nbytes)
                del self._queue[entry.key]

    def _write_file(self, entry: Entry) -> int:
        pieces = disk_files.encode_entry(entry, self.identity)
        nbytes = sum(len(piece) for piece in pieces)
        path = [entry.key, *self._ancestry(entry.parent)]
        self._folder.touch(path)  # first, so that room is not made among its own ancestors
        self._make_room(nbytes)
        if not self._folder.has_room(nbytes):
            raise OSError(errno.ENOSPC, f"{nbytes} bytes do not fit into {self._folder.budget_bytes} of the cache folder")
        self._folder.make()
        disk_files.write_file(self._folder.file(entry.key), pieces)
        self._folder.touch(path)  # again, so that it goes before its ancestors when room is made
        before = self._index.get(entry.key)
        self._folder.held_bytes += nbytes - (before.nbytes if before is not None else 0)
        return nbytes

    def _make_room(self, nbytes: int) -> None:
        evicted = self._folder.make_room(nbytes)
        with self._lock:
            self.num_evicted += len(evicted)
            for path in evicted:
                if path.parent == self._folder.home:
                    self._index.pop(bytes.fromhex(path.stem), None)

    def _ancestry(self, key: bytes) -> Iterator[bytes]:
        """Yield this key and its ancestors' keys while they are on disk; bounded, because files may claim cyclic parents."""
        for _ in range(len(self._index)):
            if (indexed := self._index.get(key)) is None:
                return
            yield key
            key = indexed.parent

    # The loader's thread.

    def _verify_next(self) -> None:
        """Verify one entry found at startup, then queue the next verification behind the loads that requests wait for."""
        with self._lock:
            key = self._unverified.pop() if self._unverified and not self._is_closed else None
        if key is not None:
            self._find(key)
            self._loader.submit(self._verify_next)

    def _load(self, keys: Sequence[bytes], generation: int) -> list[Entry]:
        loaded: list[Entry] = []
        for key in keys:
            if (entry := self._find(key)) is None:
                break
            loaded.append(entry)
        if loaded:
            self._folder.touch([*(entry.key for entry in reversed(loaded)), *self._ancestry(loaded[0].parent)])
        with self._lock:
            if generation != self._generation:
                return []
            self.num_loaded += len(loaded)
            self._unverified.difference_update(entry.key for entry in loaded)
        return loaded

    def _find(self, key: bytes) -> Entry | None:
        """Return an entry from the write queue or disk, else None; an entry whose file is missing or invalid is unindexed."""
        known = self._queue.get(key) or self._index.get(key)
        if known is None or isinstance(known, Entry):
            return known
        path = self._folder.file(key)
        try:
            return disk_files.read_entry(path, self.identity, key)
        except (Damaged, Foreign, OSError) as error:
            with self._lock:
                if self._index.get(key) is not known:  # it was forgotten, evicted or written again meanwhile
                    return None
                del self._index[key]
                self._folder.held_bytes -= known.nbytes
            if not isinstance(error, FileNotFoundError | NotADirectoryError):
                self._refuse(path, error)
            return None

    def _refuse(self, path: Path, error: Exception) -> None:
        """Log and count a file that can not be used; a damaged one is deleted, one of another model or version is kept."""
        is_foreign = isinstance(error, Foreign)
        with self._lock:
            self.num_foreign += is_foreign
            self.num_damaged += not is_foreign
        if not is_foreign:
            with suppress(OSError):
                path.unlink()
        log.warning("%s is not used: %s", path, error)
