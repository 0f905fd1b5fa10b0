"""The second tier of the prefix cache: chunks of the tree as files, kept across restarts, bounded in bytes.

Nothing on disk is trusted: an entry's digest is compared at every load, and once after each start. The engine's thread only
asks and queues; one thread writes and verifies, another loads. Knows nothing of models; `engine` uses it. Imports no mlx.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from weft.memory import disk_entry as file_format
from weft.memory.disk_entry import Damaged, Entry, Foreign, Packed, StoredArray
from weft.memory.disk_folder import Folder
from weft.memory.disk_identity import identity_of

__all__ = ["DiskTier", "Loaded", "Packed", "StoredArray", "identity_of"]

QUEUE_BYTES = 256 << 20
WARNING_SECONDS = 60.0  # a disk that can not be written is mentioned once in so long

Loaded = Entry
log = logging.getLogger("weft.memory")


@dataclass(frozen=True, eq=False)
class _IndexedEntry:
    """What is known of an entry that is on disk."""

    parent: bytes
    has_checkpoint: bool
    nbytes: int


class DiskTier:
    """The entries of one identity. What is not there, or not right, is a miss and never an error."""

    def __init__(self, folder: Path, identity: str, budget_bytes: int, on_damage: Callable[[Path, str], None]) -> None:
        self.identity = identity
        self.num_written = self.num_loaded = self.num_evicted = 0
        self.num_damaged = self.num_foreign = self.num_skipped = 0
        self._folder = Folder(folder, identity, budget_bytes)
        self._on_damage = on_damage
        self._changed = threading.Condition()  # guards all that follows, and the numbers
        self._kept: dict[bytes, _IndexedEntry] = {}
        self._queue: dict[bytes, Entry] = {}  # to be written, oldest first
        self._queued_bytes = 0
        self._sizes: dict[bytes, set[int]] = {}  # of the chunks that were ever here after a key
        self._unverified: set[bytes] = set()
        self._num_loading = 0
        self._generation = 0  # counts how often something was forgotten
        self._doomed: set[bytes] = set()  # their files are to be deleted
        self._is_clearing = False  # all files are
        self._is_closed = False
        self._next_warning = 0.0
        self._worker = threading.Thread(target=self._work, name="weft-disk", daemon=True)
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="weft-disk-load")

    @property
    def held_bytes(self) -> int:
        """Bytes of all files in the folder, whatever their identity, as last seen."""
        return self._folder.held_bytes

    @property
    def num_entries(self) -> int:
        """Entries that are on disk."""
        return len(self._kept)

    def open(self) -> None:
        """Read the headers of what is there, and begin to work. A folder that can not be made is met again at each write."""
        with suppress(OSError):
            self._folder.make()
        self._folder.sweep()
        for key, nbytes in self._folder.entries():
            self._learn(key, nbytes)
        self._make_room(0)
        self._unverified = set(self._kept)
        self._worker.start()

    def has(self, key: bytes) -> bool:
        """Whether it can be loaded: it is on disk, or on its way there."""
        return key in self._queue or key in self._kept  # in this order: a file that is written goes from one to the other

    def has_checkpoint(self, key: bytes) -> bool:
        """Whether it can be loaded with a checkpoint."""
        queued, kept = self._queue.get(key), self._kept.get(key)
        return (queued is not None and queued.checkpoint is not None) or (kept is not None and kept.has_checkpoint)

    def sizes_after(self, key: bytes) -> set[int]:
        """How many tokens those may have whose parent this is."""
        return self._sizes.get(key, set())

    def store(self, key: bytes, parent_key: bytes, tokens: Sequence[int], block: Packed, checkpoint: Packed | None) -> bool:
        """Have it written. False if too much is waiting. What is there already is written again only for its checkpoint."""
        if self.has_checkpoint(key) or (checkpoint is None and self.has(key)):
            return True
        entry = Entry(key, parent_key, tuple(tokens), block, checkpoint)
        with self._changed:
            is_full = bool(self._queue) and self._queued_bytes + entry.nbytes > QUEUE_BYTES  # one alone may have any size
            if is_full or self._is_closed:
                self.num_skipped += 1
                return False
            self._unqueue(key)
            self._queue[key] = entry
            self._sizes.setdefault(parent_key, set()).add(len(entry.tokens))
            self._queued_bytes += entry.nbytes
            self._changed.notify_all()
        return True

    def load(self, keys: Sequence[bytes]) -> Future[list[Loaded]]:
        """Read these, in order, up to the first that is gone or damaged."""
        with self._changed:
            wanted = [(key, self._queue.get(key) or self._kept.get(key)) for key in keys]
            future = self._loader.submit(self._load, wanted, self._generation)
            self._num_loading += 1
        future.add_done_callback(self._loading_ended)
        return future

    def forget(self, keys: Sequence[bytes]) -> None:
        """Never give these again, nor what was computed on top of them. As with `clear`, the files go in the background."""
        with self._changed:
            parents = {key: kept.parent for key, kept in self._kept.items()}
            parents |= {key: entry.parent for key, entry in self._queue.items()}
            self._doom(_with_descendants(keys, parents))

    def clear(self) -> None:
        """Forget everything of this identity. The files go in the background, before anything new is written."""
        with self._changed:
            self._is_clearing = True
            self._doom({*self._kept, *self._queue})

    def close(self, seconds: float) -> None:
        """Finish what is queued, at most so long, and stop. Loads that have not begun are cancelled."""
        deadline = time.monotonic() + seconds
        with self._changed:
            if self._worker.is_alive():
                self._changed.wait_for(lambda: not (self._queue or self._doomed or self._is_clearing), seconds)
            self._is_closed = True
            self._changed.notify_all()
        self._loader.shutdown(wait=False, cancel_futures=True)
        if self._worker.is_alive():
            self._worker.join(max(0.0, deadline - time.monotonic()))

    def _learn(self, key: bytes, nbytes: int) -> None:
        path = self._folder.file(key)
        try:
            metadata = file_format.read_metadata(path, self.identity, key)
        except (Damaged, Foreign, OSError) as error:
            self._refuse(path, error)
            return
        self._sizes.setdefault(bytes.fromhex(metadata.parent), set()).add(metadata.tokens.count(",") + 1)
        self._kept[key] = _IndexedEntry(bytes.fromhex(metadata.parent), metadata.checkpoint is not None, nbytes)

    # The worker's thread: clears, then writes, then verifies.

    def _work(self) -> None:
        while (job := self._next_job()) is not None:
            job()

    def _next_job(self) -> Callable[[], None] | None:
        with self._changed:
            self._changed.wait_for(self._has_work)
            if self._is_closed:
                return None
            if self._doomed or self._is_clearing:
                return self._delete
            if self._queue:
                return partial(self._write, next(iter(self._queue.values())))
            return partial(self._verify, self._unverified.pop())

    def _has_work(self) -> bool:
        """Verifying is not urgent: it gives way to loads, for which a request waits."""
        urgent = self._is_closed or self._is_clearing or self._doomed or self._queue
        return bool(urgent or (self._unverified and not self._num_loading))

    def _delete(self) -> None:
        with self._changed:
            doomed, self._doomed = self._doomed, set()
            is_clearing, self._is_clearing = self._is_clearing, False
            self._changed.notify_all()
        self._folder.remove([key for key, _ in self._folder.entries()] if is_clearing else doomed)
        self._make_room(0)

    def _write(self, entry: Entry) -> None:
        kept = None
        try:
            kept = self._written(entry)
        except OSError as error:
            self._warn(error)
        with self._changed:
            self.num_written += kept is not None
            self.num_skipped += kept is None
            if self._queue.get(entry.key) is entry:  # else it was cleared, or there is more of it by now
                if kept is not None:
                    self._kept[entry.key] = kept
                self._unqueue(entry.key)
            self._changed.notify_all()

    def _written(self, entry: Entry) -> _IndexedEntry:
        pieces = file_format.encode(entry, self.identity)
        nbytes = sum(len(piece) for piece in pieces)
        path = [entry.key, *self._ancestry(entry.parent)]
        self._folder.touch(path)  # first, so that room is not made among its own ancestors
        self._make_room(nbytes)
        if not self._folder.has_room(nbytes):
            raise OSError(errno.ENOSPC, f"{nbytes} bytes do not fit into {self._folder.budget_bytes} of the cache folder")
        self._folder.make()
        file_format.write(self._folder.file(entry.key), pieces)
        self._folder.touch(path)  # again, so that it goes before its ancestors when room is made
        before = self._kept.get(entry.key)
        self._folder.held_bytes += nbytes - (before.nbytes if before is not None else 0)
        return _IndexedEntry(entry.parent, entry.checkpoint is not None, nbytes)

    def _verify(self, key: bytes) -> None:
        kept = self._kept.get(key)
        if kept is not None:
            self._read(key, kept)

    def _make_room(self, nbytes: int) -> None:
        evicted = self._folder.make_room(nbytes)
        with self._changed:
            self.num_evicted += len(evicted)
            for path in evicted:
                if path.parent == self._folder.home:
                    self._kept.pop(bytes.fromhex(path.stem), None)

    def _warn(self, error: OSError) -> None:
        if time.monotonic() >= self._next_warning:
            self._next_warning = time.monotonic() + WARNING_SECONDS
            log.warning("a prefix was not kept on disk: %s", error)

    # The loader's thread, and what both use.

    def _load(self, wanted: list[tuple[bytes, Entry | _IndexedEntry | None]], generation: int) -> list[Loaded]:
        loaded: list[Loaded] = []
        for key, known in wanted:
            found = self._read(key, known) if isinstance(known, _IndexedEntry) else known
            if found is None:
                break
            loaded.append(found)
        if loaded:
            self._folder.touch([*(found.key for found in reversed(loaded)), *self._ancestry(loaded[0].parent)])
        with self._changed:
            if generation != self._generation:
                return []
            self.num_loaded += len(loaded)
            self._unverified.difference_update(found.key for found in loaded)
        return loaded

    def _loading_ended(self, _: Future[list[Loaded]]) -> None:
        with self._changed:
            self._num_loading -= 1
            self._changed.notify_all()

    def _read(self, key: bytes, kept: _IndexedEntry) -> Entry | None:
        """An entry from disk. One that is not right is dropped, and reported by whoever met it first."""
        path = self._folder.file(key)
        try:
            return file_format.read(path, self.identity, key)
        except (FileNotFoundError, NotADirectoryError):
            self._drop(key, kept)
        except (Damaged, Foreign, OSError) as error:
            if self._drop(key, kept):
                self._refuse(path, error)
        return None

    def _drop(self, key: bytes, kept: _IndexedEntry) -> bool:
        with self._changed:
            if self._kept.get(key) is not kept:
                return False
            del self._kept[key]
            self._folder.held_bytes -= kept.nbytes
            return True

    def _refuse(self, path: Path, error: Exception) -> None:
        """Report a file that is not used. A damaged one is deleted; a foreign one is somebody's, and left to its age."""
        with self._changed:
            self.num_foreign += isinstance(error, Foreign)
            self.num_damaged += not isinstance(error, Foreign)
        if not isinstance(error, Foreign):
            with suppress(OSError):
                path.unlink()
        self._on_damage(path, str(error))

    def _ancestry(self, key: bytes) -> Iterator[bytes]:
        """This entry, the one before it, and so on, as far as they are here; bounded, for files may claim anything."""
        for _ in range(len(self._kept)):
            kept = self._kept.get(key)
            if kept is None:
                return
            yield key
            key = kept.parent

    def _doom(self, keys: set[bytes]) -> None:
        self._generation += 1
        self._doomed |= keys
        for key in keys:
            self._kept.pop(key, None)
            self._unverified.discard(key)
            self._unqueue(key)
        self._changed.notify_all()

    def _unqueue(self, key: bytes) -> None:
        entry = self._queue.pop(key, None)
        self._queued_bytes -= entry.nbytes if entry is not None else 0


def _with_descendants(keys: Sequence[bytes], parents: dict[bytes, bytes]) -> set[bytes]:
    children: dict[bytes, list[bytes]] = {}
    for key, parent in parents.items():
        children.setdefault(parent, []).append(key)
    found, waiting = set[bytes](), list(keys)
    while waiting:
        key = waiting.pop()
        if key not in found:
            found.add(key)
            waiting += children.get(key, ())
    return found
