"""What each replica has cached: an index of prefix keys, fed by what engines report, that finds the longest match of a prompt.

Keys are those of `memory/prefix_tree.py`: equal on all replicas that cut a prompt alike, so one walk serves all. The index is
bounded and may be wrong at any time: a match is where a request is cheaper, never what its answer depends on.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from weft.ipc.messages import EngineEvents, ReportedChunk
from weft.memory.prefix_tree import key_of, root_key

MAX_CHUNKS = 500_000  # some 150 MB; an engine keeps some thousands
MAX_SIZES = 64  # of the chunks behind one key that are tried, the most common first


@dataclass
class IndexedChunk:
    """One prompt chunk, and by replica whether it can continue a prompt at the chunk's end."""

    parent: bytes
    size: int
    has_checkpoint: dict[str, bool] = field(default_factory=dict)


class PrefixIndex:
    """The prompt chunks that replicas have cached; the least recently reported ones are forgotten beyond `max_chunks`."""

    def __init__(self, max_chunks: int = MAX_CHUNKS) -> None:
        self.max_chunks = max_chunks
        self._chunks: OrderedDict[bytes, IndexedChunk] = OrderedDict()
        self._sizes: dict[bytes, Counter[int]] = {}  # by parent key, of the chunks behind it

    def __len__(self) -> int:
        return len(self._chunks)

    def report(self, replica: str, kept: Iterable[ReportedChunk], gone: Iterable[bytes]) -> None:
        """Enter what a replica has cached, or can now continue from, and remove what it has evicted."""
        for key in gone:
            self._remove(replica, key)
        for chunk in kept:
            self._enter(replica, chunk)
        while len(self._chunks) > self.max_chunks:
            self._drop(next(iter(self._chunks)))

    def forget(self, replica: str) -> None:
        """Remove everything of a replica whose engine has died."""
        for key in [key for key, chunk in self._chunks.items() if replica in chunk.has_checkpoint]:
            self._remove(replica, key)

    def matches(self, prompt: Sequence[int], salt: str, scope: str = "") -> dict[str, int]:
        """Return by replica how many of a prompt's tokens it can continue from; replicas with none are left out."""
        found: dict[str, int] = {}
        waiting, last = [(root_key(salt, scope), 0)], len(prompt) - 1
        while waiting:
            key, start = waiting.pop()
            sizes = self._sizes.get(key, Counter())
            for size, _ in sizes.most_common(MAX_SIZES):
                end = start + size
                if end > last or (chunk := self._chunks.get(after := key_of(key, prompt[start:end]))) is None:
                    continue
                waiting.append((after, end))
                for replica, has_checkpoint in chunk.has_checkpoint.items():
                    if has_checkpoint and end > found.get(replica, 0):
                        found[replica] = end
        return found

    def _enter(self, replica: str, chunk: ReportedChunk) -> None:
        known = self._chunks.get(chunk.key)
        if known is None:
            known = self._chunks[chunk.key] = IndexedChunk(chunk.parent, chunk.size)
            self._sizes.setdefault(chunk.parent, Counter())[chunk.size] += 1
        known.has_checkpoint[replica] = chunk.has_checkpoint
        self._chunks.move_to_end(chunk.key)

    def _remove(self, replica: str, key: bytes) -> None:
        chunk = self._chunks.get(key)
        if chunk is not None and chunk.has_checkpoint.pop(replica, None) is not None and not chunk.has_checkpoint:
            self._drop(key)

    def _drop(self, key: bytes) -> None:
        chunk = self._chunks.pop(key)
        sizes = self._sizes[chunk.parent]
        sizes[chunk.size] -= 1
        if not sizes[chunk.size]:
            del sizes[chunk.size]
        if not sizes:
            del self._sizes[chunk.parent]


class ReportedChunks:
    """All chunks that one engine has cached, for fronts that come later: what it has reported so far."""

    def __init__(self) -> None:
        self._chunks: dict[bytes, ReportedChunk] = {}

    def take(self, events: EngineEvents) -> None:
        for key in events.gone:
            self._chunks.pop(key, None)
        self._chunks |= {chunk.key: chunk for chunk in events.kept}

    def clear(self) -> None:
        self._chunks.clear()

    def in_parts(self, size: int = 2000) -> Iterator[list[ReportedChunk]]:
        """Yield all of them, in lists that are not too long for one message."""
        chunks = list(self._chunks.values())
        return (chunks[start : start + size] for start in range(0, len(chunks), size))


def num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many leading tokens two prompts have in common, by halving: comparing slices is fast."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
